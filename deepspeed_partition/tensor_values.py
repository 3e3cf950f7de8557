"""Values of tensors that are put back after a run that may have changed them."""

from __future__ import annotations

import torch


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor values, and their shape, which it may have lost: observers of quantization grow at first data.

    Its version stays, for autograd may have saved it.
    """
    if tensor.shape == values.shape:
        tensor.data.copy_(values)
    else:
        tensor.data = values.clone()
