"""A function that runs in the backward, such as one that fails there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def in_backward(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a copy of ``x`` whose gradient ``change`` takes, and gives to ``x``."""
    copied: torch.Tensor = _InBackward.apply(x, change)
    return copied
