"""Layers that sleep, with a backward in two parts: for the input, and for the weight."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, layer: SplitLayer) -> Tensor:
        begin = time.perf_counter()
        ctx.layer, ctx.shape, ctx.anchored = layer, x.shape, anchor is not None
        output = torch.zeros(x.shape[0], layer.output_numel)
        layer.sleep("F", begin)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        begin = time.perf_counter()
        gradient = torch.zeros(ctx.shape) if ctx.needs_input_grad[0] else None
        ctx.layer.sleep("I", begin)
        return gradient, torch.zeros(1) if ctx.anchored else None, None


class _OfWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: SplitLayer) -> Tensor:
        ctx.layer = layer
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        ctx.layer.sleep("W", time.perf_counter())
        return torch.zeros(1), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        return torch.zeros(x.shape)  # torch's stages detach their outputs, which a view does not allow

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], torch.zeros(1)


class SplitLayer(nn.Module):
    """Sleeps for its forward, and for each half of its backward; hands on a tensor of the given size.

    What it does besides counts as part of that time. Where its neighbour in the same pass has just slept, it ends
    as if it had begun at the due end of that one: a pass over many layers is late once.

    Args:
        number: of the layer in the model.
        output_numel: of a sample, in fp32.
    """

    just_slept: ClassVar[tuple[int, str, float]] = -9, "", 0.0
    """The layer of this process that slept last, for what, and when it was due to end."""

    def __init__(self, number: int, forward_seconds: float, backward_seconds: float, output_numel: int) -> None:
        super().__init__()
        self.number, self.output_numel = number, output_numel
        self.seconds = {"F": forward_seconds, "I": backward_seconds / 2, "W": backward_seconds / 2}
        self.weight = nn.Parameter(torch.zeros(1))
        # The model's input has no gradient: without something else to go to, there would be no backward for it.
        self.anchor = nn.Parameter(torch.zeros(1)) if number == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        return _Join.apply(_OfInput.apply(x, self.anchor, self), _OfWeight.apply(self.weight, self))

    def sleep(self, kind: str, begin: float) -> None:
        """Sleep for the rest of a part of a pass that began at ``begin``."""
        own = self.number
        before = {
            "F": {(own - 1, "F")},
            "I": {(own, "W"), (own + 1, "I")},
            "W": {(own, "I"), (own + 1, "I"), (own + 1, "W"), (own - 1, "W")},
        }
        number, its_kind, due = SplitLayer.just_slept
        due = (due if (number, its_kind) in before[kind] else begin) + self.seconds[kind]
        time.sleep(max(0.0, due - time.perf_counter()))
        SplitLayer.just_slept = own, kind, due
