"""Values of tensors: put back after a run that may have changed them, and as bytes."""

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


def bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in their order: of itself where it is contiguous, or of a copy.

    A tensor of one element is contiguous with any stride, and its elements are bytes with a stride of 1 alone.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
