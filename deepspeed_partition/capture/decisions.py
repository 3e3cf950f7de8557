"""What a model's own code asks of tensors, or hangs on them, and layers do, too, for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepspeed_partition.capture.sizes import ShapeError


class Overwritten(BaseException):
    """A tensor that was made from sizes alone is changed by one that was not.

    No ``except Exception`` of the model's code may stop it.
    """


class Undecided(Exception):
    """The model's own code asks whether a tensor is true, which is not known without data."""


def must_be(outcome: bool, tensor: torch.Tensor, where: str) -> None:
    """Verify what the model's own code asks of a tensor: it raises otherwise.

    Raises:
        ValueError: another outcome.
    """
    if bool(tensor) is not outcome:
        raise ValueError(f"the model's code refuses this batch ({where})")


def must_stay(outcome: bool, tensor: torch.Tensor, where: str) -> None:
    """Verify what the model's own code asked of a tensor that is made from sizes: it goes another way otherwise.

    Raises:
        ShapeError: another outcome.
    """
    must_give(torch.Tensor.__bool__, outcome, where, tensor)


def must_give(function: Callable[..., Any], outcome: Any, where: str, *args: Any, **kwargs: Any) -> None:
    """Verify a number, or several, that the model's own code took out of tensors that are made from sizes.

    Raises:
        ShapeError: others come out.
    """
    now = function(*args, **kwargs)
    if not np.array_equal(now, outcome):
        shown = "" if isinstance(outcome, list | np.ndarray) else f", {now} and not {outcome}"
        raise ShapeError(
            f"the model's code takes another way for the sizes of this batch ({where}{shown}): capture it with "
            "arguments of such sizes, pad the batch, or leave it out"
        )


def hang(register: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Hang a hook on the gradient of a tensor, as the model's own code does where there is one."""
    if tensor.requires_grad:
        register(tensor, *args, **kwargs)
