"""Layers whose backward mixes the samples of a batch, as one that divides a gradient by its norm does.

Their forward treats each sample by itself, so that nothing else shows it: it is in an ``autograd.Function``, or
in a hook on a tensor. A layer that draws nothing runs backward for all samples and for either half alone:
together the halves must give the gradients of the whole, those of parameters as a sum. One that draws would draw
otherwise for a half: it runs on all samples, with other gradients of its outputs for either half in turn, and
the gradients of the other half must stay what they were.

Gradients are compared as a whole, not number by number: where a sum is rounded otherwise for a half, a ReLU may
open that was shut, which changes few of many numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
Directions: TypeAlias = Sequence[Tensor | None]
"""The gradient of each output; None for one that is the same for all samples, such as a mask."""

SHARE = {torch.float64: 1e-6, torch.float32: 1e-2}
"""How far rounding may bring gradients apart, in proportion to their norm; of narrower types :data:`LOW_SHARE`."""
LOW_SHARE = 0.1
LEAST = 0.1
"""The least norm of a gradient that counts, in proportion to the largest one: others may be rounding alone, such
as that of a bias before a normalization."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a layer's inputs and of its parameters."""

    inputs: list[Tensor | None]
    parameters: list[Tensor | None]

    def differs_from(self, other: Gradients) -> bool:
        """Whether they differ by more than rounding."""
        pairs = zip((self.inputs, self.parameters), (other.inputs, other.parameters), strict=True)
        return any(_differ(zip(own, theirs, strict=True)) for own, theirs in pairs)


@dataclass(frozen=True, slots=True)
class Halves:
    """Where the halves of the samples stand in the tensors between two layers."""

    alone: tuple[Tensors, Tensors]
    """The tensors for either half."""
    dims: tuple[int | None, ...]
    """The dimension in which the halves make the whole; None where a tensor is the same for both."""

    def directions(self, first_draw: int = 0, second_draw: int = 0) -> list[Tensor | None]:
        """A gradient for all samples: the halves' own ones, drawn at random, always alike for the same numbers."""
        halves = self.direction_of(0, first_draw), self.direction_of(1, second_draw)
        return [
            None if one is None or other is None or dim is None else torch.cat([one, other], dim)
            for one, other, dim in zip(*halves, self.dims, strict=True)
        ]

    def direction_of(self, half: int, draw: int = 0) -> list[Tensor | None]:
        """A gradient for one half."""
        generator = torch.Generator().manual_seed(2 * draw + half)
        scale = 1.0 + 2.0 * draw
        return [
            None
            if dim is None
            else (scale * torch.randn(tensor.shape, generator=generator)).to(tensor.device, tensor.dtype)
            for tensor, dim in zip(self.alone[half], self.dims, strict=True)
        ]


class BackwardRun:
    """Runs a layer forward and backward.

    Args:
        forward: Gives the inputs as leaves of a graph, and the outputs.
        restore: Puts random numbers back to where they are before each run.
        parameters: Those of the layer that are trained, none of which any optimizer watches.
    """

    def __init__(
        self,
        forward: Callable[[Tensors], tuple[Tensors, Tensors]],
        restore: Callable[[], None],
        parameters: Sequence[Tensor],
    ) -> None:
        self._forward, self._restore, self._parameters = forward, restore, parameters
        self._is_reentrant = False

    def __call__(self, inputs: Tensors, directions: Directions) -> Gradients:
        try:
            return self._gradients(inputs, directions)
        except RuntimeError as error:
            if self._is_reentrant or "use_reentrant" not in str(error):
                raise
            self._is_reentrant = True  # which runs in a plain backward alone
            return self._gradients(inputs, directions)

    def _gradients(self, inputs: Tensors, directions: Directions) -> Gradients:
        self._restore()
        leaves, outputs = self._forward(inputs)
        pairs = zip(outputs, directions, strict=True)
        ends = [(output, end) for output, end in pairs if end is not None and output.requires_grad]
        sources = [*leaves, *self._parameters]
        asked = [tensor for tensor in sources if tensor.requires_grad]
        found: dict[int, Tensor | None] = {}
        if ends and asked:
            gradients = self._backward([output for output, _ in ends], [end for _, end in ends], asked)
            found = {id(tensor): gradient for tensor, gradient in zip(asked, gradients, strict=True)}
        gradients_of_all = [found.get(id(tensor)) for tensor in sources]
        return Gradients(gradients_of_all[: len(leaves)], gradients_of_all[len(leaves) :])

    def _backward(self, outputs: list[Tensor], ends: list[Tensor], asked: list[Tensor]) -> list[Tensor | None]:
        if not self._is_reentrant:
            return list(torch.autograd.grad(outputs, asked, ends, allow_unused=True))
        for tensor in asked:
            tensor.grad = None
        torch.autograd.backward(outputs, ends)
        gradients = [tensor.grad for tensor in asked]
        for tensor in asked:
            tensor.grad = None
        return gradients


def gradients_depend_on_others(
    run: Callable[[Tensors, Directions], Gradients],
    whole: Gradients,
    inputs: Tensors,
    of_inputs: Halves,
    of_outputs: Halves,
    *,
    draws: bool,
) -> bool:
    """Whether the gradient of a sample depends on the other samples of the batch.

    Args:
        run: Runs the layer forward and backward, always as in the beginning.
        whole: The gradients for all samples.
        inputs: The layer's, for all samples.
        draws: Whether the layer draws random numbers.
    """
    if draws:
        return _depend_on_other_gradients(run, whole, inputs, of_inputs, of_outputs)
    one, other = (run(of_inputs.alone[half], of_outputs.direction_of(half)) for half in (0, 1))
    by_input = [
        (own, _sum(first, second) if dim is None else _joined(first, second, dim))
        for own, first, second, dim in zip(whole.inputs, one.inputs, other.inputs, of_inputs.dims, strict=True)
    ]
    by_parameter = zip(whole.parameters, map(_sum, one.parameters, other.parameters), strict=True)
    return _differ(by_input) or _differ(by_parameter)


def _depend_on_other_gradients(
    run: Callable[[Tensors, Directions], Gradients],
    whole: Gradients,
    inputs: Tensors,
    of_inputs: Halves,
    of_outputs: Halves,
) -> bool:
    other_first, other_second, others = (
        run(inputs, of_outputs.directions(*draws)) for draws in ((1, 0), (0, 1), (1, 1))
    )
    by_input: list[tuple[Tensor | None, Tensor | None]] = []
    for own, first, second, both, dim in zip(
        whole.inputs, other_first.inputs, other_second.inputs, others.inputs, of_inputs.dims, strict=True
    ):
        if dim is None:
            by_input.append((_sum(own, both), _sum(first, second)))
        elif own is not None and first is not None and second is not None:
            size = own.shape[dim] // 2
            by_input.append((own.narrow(dim, 0, size), second.narrow(dim, 0, size)))
            by_input.append((own.narrow(dim, size, size), first.narrow(dim, size, size)))
    by_parameter = zip(
        map(_sum, whole.parameters, others.parameters),
        map(_sum, other_first.parameters, other_second.parameters),
        strict=True,
    )
    return _differ(by_input) or _differ(by_parameter)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    tensors = [tensor.to_dense() for tensor in (one, other) if tensor is not None]
    return sum(tensors[1:], start=tensors[0]) if tensors else None


def _joined(one: Tensor | None, other: Tensor | None, dim: int) -> Tensor | None:
    return None if one is None or other is None else torch.cat([one.to_dense(), other.to_dense()], dim)


def _differ(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> bool:
    """Whether gradients differ by more than rounding; those that are None, or no numbers, tell nothing."""
    known = [(own.to_dense(), other.to_dense()) for own, other in pairs if own is not None and other is not None]
    known = [pair for pair in known if all(bool(tensor.isfinite().all()) for tensor in pair)]
    largest = max((_norm(tensor) for pair in known for tensor in pair), default=0.0)
    for own, other in known:
        share = SHARE.get(own.dtype, LOW_SHARE)
        size = max(_norm(own), _norm(other), LEAST * largest)
        if own.shape != other.shape or _norm(_wide(own) - _wide(other)) > share * size:
            return True
    return False


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
