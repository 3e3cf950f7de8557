"""Where the autograd graph of a stage begins and ends: what stands there for DeepSpeed, which keeps more.

DeepSpeed runs a stage on a copy of its input, keeps input and output until the backward, and runs one backward per
output tensor. Here the input itself goes into the graph, the output may be freed as soon as it was sent, and
there is one backward for all tensors.
"""

from __future__ import annotations

from typing import Any

import torch

Boundary = torch.Tensor | tuple[torch.Tensor, ...]
"""What crosses a cut: a tensor, or several."""
Gradients = tuple[torch.Tensor, ...]
"""The gradients of the floating tensors of a boundary, in their order."""


def tensors_of(boundary: Boundary) -> tuple[torch.Tensor, ...]:
    return boundary if isinstance(boundary, tuple) else (boundary,)


class Loaded:
    """The first stage's input, in the place of tensors of which DeepSpeed makes one more copy."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary | None = boundary

    def clone(self) -> Boundary:
        """Return the tensors themselves, once: DeepSpeed asks its inputs for clones."""
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        # With reentrant checkpointing they are leaves with a gradient, which a layer may not change in place.
        own = tuple(tensor.clone() if tensor.requires_grad else tensor for tensor in tensors_of(boundary))
        return own if isinstance(boundary, tuple) else own[0]


class _Beginning(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, arrived: Arrived, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arrived = arrived
        ctx.set_materialize_grads(False)
        # Not the tensors themselves: a layer may change its input in place, which autograd forbids for leaves.
        # The new ones share the count of changes, so that a stage on the same rank that needs the old values
        # finds out.
        outputs = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.arrived._caught = gradients
        return (None,) * (2 + len(gradients))


class Arrived:
    """A stage's input from the stage before it, in the place of DeepSpeed's leaf tensors."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary | None = boundary
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_of(boundary)]
        self._caught: tuple[torch.Tensor | None, ...] = (None,) * len(self._like)

    def clone(self) -> Boundary:
        """Return the tensors themselves, once: DeepSpeed asks its inputs for clones, to run the stage on."""
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        if not torch.is_grad_enabled():
            return boundary
        outputs = _Beginning.apply(torch.zeros((), requires_grad=True), self, *tensors_of(boundary))
        return outputs if isinstance(boundary, tuple) else outputs[0]

    def gradients(self) -> Gradients:
        """Return the gradients of the input, after the backward. They are zeros where no gradient came back."""
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for (shape, dtype, device), gradient in zip(self._like, self._caught, strict=True)
            if dtype.is_floating_point
        )


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Given away, not lent: the last layer's backward is the last one that needs them.
        return None, *(ctx.gradients.pop(0) if floating else None for floating in ctx.floating)


class Departed:
    """A stage's output, of which only the graph is kept."""

    def __init__(self, boundary: Boundary) -> None:
        # The graph refers to the gradients and not to this object, or a circle would keep it for ever.
        self._gradients: list[torch.Tensor] = []
        self.root = _End.apply(self._gradients, *tensors_of(boundary))
        """A number from which DeepSpeed runs the backward; it needs no gradient where the output needs none."""

    def give(self, gradients: Gradients) -> None:
        """Give the gradients that came back, before the backward."""
        self._gradients.extend(gradients)
