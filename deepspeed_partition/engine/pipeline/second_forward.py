"""A forward that keeps nothing, and when it runs again: at an instruction of its own, or in its backward.

A checkpoint of ``torch`` or DeepSpeed runs its layers again when the backward asks for the first tensor that they
saved. A tensor of our own is saved before all others, so to ask for it runs them again at any instant before.
"""

from __future__ import annotations

from typing import Any

import torch


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.zeros(()))
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]  # nobody uses what this belongs to


class SecondForward:
    """Lets the layers of a checkpoint run again."""

    def __init__(self) -> None:
        self._node: Any = None

    def save(self, *, is_first: bool) -> None:
        """Save a tensor, in each run of the layers: a checkpoint counts what they save."""
        node = _Saved.apply(torch.zeros((), requires_grad=True)).grad_fn
        if is_first:
            self._node = node

    def run(self) -> None:
        """Run the layers again now, and keep what they save until their backward."""
        node, self._node = self._node, None
        assert len(node.saved_tensors) == 1
