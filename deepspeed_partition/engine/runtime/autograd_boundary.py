"""Where the autograd graph of a stage begins and ends: what stands there for DeepSpeed, which keeps more.

DeepSpeed runs a stage on a copy of its input, keeps input and output until the backward, and runs one backward per
output tensor. Here the input itself goes into the graph, the output may be freed as soon as it was sent, and
there is one backward for all tensors.

Functions in Python at both ends of a graph see to that, which take some tens of microseconds each. Boundaries of
few bytes do without: a copy of the input costs less, and their gradients may stay until the backward ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

Boundary = torch.Tensor | tuple[torch.Tensor, ...]
"""What crosses a cut: a tensor, or several."""
Gradients = tuple[torch.Tensor, ...]
"""The gradients of the floating tensors of a boundary, in their order."""


FEW_BYTES = 16 * 1024
"""The most bytes of a boundary that is copied rather than handed over by a function in Python."""
HAS_EDGES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
"""Whether torch runs a backward from a place in the graph, without the tensor there."""

NoGradient = Callable[[torch.Size, torch.dtype, torch.device], torch.Tensor]
"""Makes what stands for the gradient of a tensor that got none, of its shape, type and device."""
TAGS = {
    torch.float16: (torch.int16, 0x7E51),
    torch.bfloat16: (torch.int16, 0x7FD1),
    torch.float32: (torch.int32, 0x7FC4D161),
    torch.float64: (torch.int64, 0x7FF84D6164506970),
}
"""For each type one of its many forms of "not a number", which no computation gives, as an integer."""


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A gradient in the place of none, as DeepSpeed has it."""
    return torch.zeros(shape, dtype=dtype, device=device)


def nothing(_: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor, where the next stage is told of shapes, or is on the same rank."""
    return torch.empty(0, dtype=dtype, device=device)


def tagged(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that tells by its numbers that there is no gradient; zeros for a type that has no such number."""
    if dtype not in TAGS:
        return zeros(shape, dtype, device)
    integers, tag = TAGS[dtype]
    return torch.full(shape, tag, dtype=integers, device=device).view(dtype)


def _is_missing(gradient: torch.Tensor, num_elements: int) -> bool:
    if gradient.numel() != num_elements:
        return True
    if not num_elements or gradient.dtype not in TAGS or not gradient.is_contiguous():
        return False
    integers, tag = TAGS[gradient.dtype]
    return int(gradient.view(-1)[:1].view(integers)) == tag


def tensors_of(boundary: Boundary) -> tuple[torch.Tensor, ...]:
    return boundary if isinstance(boundary, tuple) else (boundary,)


def has_twice(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one tensor stands at two places."""
    return len(tensors) > 1 and len({id(tensor) for tensor in tensors}) < len(tensors)


def first_places(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the first place at which it stands."""
    places: dict[int, int] = {}
    return tuple([places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])


def each_once(boundary: Boundary) -> Sequence[torch.Tensor]:
    """The tensors of a boundary, each once."""
    if isinstance(boundary, torch.Tensor):
        return (boundary,)
    return list({id(tensor): tensor for tensor in boundary}.values()) if has_twice(boundary) else boundary


def detached(boundary: Boundary) -> Boundary:
    """The tensors of a boundary without their graph; one that stands at two places is one again.

    Of one that has no graph, or one of a run that makes none, a copy: a layer may keep it, as a buffer or a part
    of one, and write it again in its next forward, before the tensor has left or the next stage has read it.
    """
    if isinstance(boundary, torch.Tensor):
        return _detached(boundary)
    if not has_twice(boundary):
        return tuple([_detached(tensor) for tensor in boundary])
    without = {id(tensor): _detached(tensor) for tensor in boundary}
    return tuple([without[id(tensor)] for tensor in boundary])


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    alone = tensor.detach()
    return alone.clone() if tensor.is_leaf or not torch.is_grad_enabled() else alone


def has_few_bytes(boundary: Boundary) -> bool:
    """Whether the tensors of a boundary together have at most ``FEW_BYTES``."""
    if isinstance(boundary, torch.Tensor):
        return boundary.nbytes <= FEW_BYTES
    return sum([tensor.nbytes for tensor in boundary]) <= FEW_BYTES


def run_backward(roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    """Run a backward without what ``torch.autograd.backward`` checks, which takes longer than a tiny layer.

    Args:
        roots: tensors, or places in the graph (``torch.autograd.graph.GradientEdge``).
        gradients: of the roots; None: of a number, 1.
    """
    given = [
        torch.ones_like(root, memory_format=torch.preserve_format) if gradient is None else gradient
        for root, gradient in zip(roots, gradients, strict=True)
    ]
    Variable._execution_engine.run_backward(
        tuple(roots), tuple(given), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class Loaded:
    """The first stage's input, in the place of tensors of which DeepSpeed makes one more copy."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary: Boundary | None = boundary

    def clone(self) -> Boundary:
        """Return the tensors themselves, once: DeepSpeed asks its inputs for clones."""
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        # With reentrant checkpointing they are leaves with a gradient, which a layer may not change in place.
        if isinstance(boundary, torch.Tensor):
            return boundary.clone() if boundary.requires_grad else boundary
        return tuple([tensor.clone() if tensor.requires_grad else tensor for tensor in boundary])


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
    """A stage's input from the stage before it, in the place of DeepSpeed's leaf tensors.

    Args:
        boundary: the tensors.
        is_ours: whether nobody else has them, as where they came from another rank.
    """

    def __init__(self, boundary: Boundary, *, is_ours: bool = False) -> None:
        self._boundary: Boundary | None = boundary
        tensors = tensors_of(boundary)
        self._like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._places = first_places(tensors) if has_twice(tensors) else None
        """Where one tensor stands at two places: the layers change both where they change one."""
        self._caught: tuple[torch.Tensor | None, ...] = (None,) * len(each_once(boundary))
        self._leaves = each_once(boundary) if is_ours and has_few_bytes(tensors) else None

    def clone(self) -> Boundary:
        """Return the tensors themselves, once: DeepSpeed asks its inputs for clones, to run the stage on."""
        boundary, self._boundary = self._boundary, None
        assert boundary is not None
        if not torch.is_grad_enabled():
            return boundary
        outputs: tuple[torch.Tensor, ...]
        if self._leaves is not None:  # copies of them, for a layer may change its input in place
            outputs = tuple(
                leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf for leaf in self._leaves
            )
        else:
            outputs = _Beginning.apply(torch.zeros((), requires_grad=True), self, *each_once(boundary))
        if not isinstance(boundary, tuple):
            return outputs[0]
        if self._places is None:
            return outputs
        of_place = dict(zip(dict.fromkeys(self._places), outputs, strict=True))
        return tuple(of_place[place] for place in self._places)

    def catch(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of the floating tensors from a backward that does not come here."""
        caught = iter(gradients)
        each = tuple(next(caught) if dtype.is_floating_point else None for _, dtype, _ in self._like)
        if self._places is not None:
            each = tuple(each[place] for place in dict.fromkeys(self._places))
        if self._leaves is None:
            self._caught = each
        else:
            for leaf, gradient in zip(self._leaves, each, strict=True):
                leaf.grad = gradient

    def gradients(self, no_gradient: NoGradient = zeros) -> Gradients:
        """Return the gradients of the input, after the backward.

        Args:
            no_gradient: Makes what is returned where no gradient came back.
        """
        caught = self._caught if self._leaves is None else [leaf.grad for leaf in self._leaves]
        if self._places is not None:  # of a tensor at two places it is that of both, and given once
            of_place = dict(zip(dict.fromkeys(self._places), caught, strict=True))
            caught = [of_place.get(place) for place in range(len(self._places))]
        return tuple(
            no_gradient(shape, dtype, device) if gradient is None else gradient
            for (shape, dtype, device), gradient in zip(self._like, caught, strict=True)
            if dtype.is_floating_point
        )


class ArrivedLeaf:
    """A stage's input of one floating tensor of few bytes that nobody else has: :class:`Arrived` in short.

    Args:
        leaf: the tensor.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._leaf = leaf

    def clone(self) -> torch.Tensor:
        """Return a copy to run the stage on, which a layer may change in place."""
        return self._leaf.requires_grad_().clone() if torch.is_grad_enabled() else self._leaf

    def catch(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradient from a backward that does not come here."""
        [self._leaf.grad] = gradients

    def gradients(self, no_gradient: NoGradient = zeros) -> Gradients:
        """Return the gradient of the input, after the backward; argument as of :meth:`Arrived.gradients`."""
        leaf = self._leaf
        gradient = leaf.grad
        return (no_gradient(leaf.shape, leaf.dtype, leaf.device) if gradient is None else gradient,)


def arrived_of(boundary: Boundary, *, is_ours: bool) -> Arrived | ArrivedLeaf:
    """Return what stands for a stage's input; arguments as of :class:`Arrived`."""
    if not is_ours or isinstance(boundary, tuple) or not boundary.is_floating_point():
        return Arrived(boundary, is_ours=is_ours)
    return ArrivedLeaf(boundary) if boundary.nbytes <= FEW_BYTES else Arrived(boundary, is_ours=True)


class Noted:
    """A stage's input that tells which tensors the stage runs on.

    Args:
        arrived: the input.
        note: is given them.
    """

    def __init__(self, arrived: Arrived | ArrivedLeaf, note: Callable[[Boundary], None]) -> None:
        self._arrived, self._note = arrived, note

    def clone(self) -> Boundary:
        """Return the tensors to run the stage on, once."""
        boundary = self._arrived.clone()
        self._note(boundary)
        return boundary


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: list[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.zeros((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, torch.Tensor]:
        # Given away, not lent: the last layer's backward is the last one that needs it.
        return None, ctx.gradient.pop()


class DepartedEdges:
    """A stage's output of few bytes, of which only its places in the graph are kept.

    Args:
        boundary: the output.
    """

    def __init__(self, boundary: Boundary) -> None:
        floating = [tensor for tensor in tensors_of(boundary) if tensor.is_floating_point()]
        self._sizes = [tensor.numel() for tensor in floating]
        self._edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in floating]

    def roots(
        self, gradients: Gradients, *, may_be_missing: bool = False
    ) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Return where the backward begins, and with which gradients; arguments as of :meth:`Departed.give`."""
        if not may_be_missing and None not in self._edges:
            return self._edges, list(gradients)
        edges: list[Any] = []
        given: list[torch.Tensor | None] = []
        for edge, gradient, size in zip(self._edges, gradients, self._sizes, strict=True):
            if edge is not None and not (may_be_missing and _is_missing(gradient, size)):
                edges.append(edge)
                given.append(gradient)
        return edges, given


class Departed:
    """A stage's output, of which only the graph is kept."""

    def __init__(self, boundary: Boundary) -> None:
        # The graph refers to the gradients and not to this object, or a circle would keep it for ever.
        self._gradients: list[list[torch.Tensor]] = []
        self._ends: list[torch.Tensor] = []
        self._sizes: list[int] = []
        for tensor in tensors_of(boundary):
            self._device = tensor.device
            if tensor.is_floating_point():
                self._sizes.append(math.prod(tensor.shape))
                self._gradients.append([])
                self._ends.append(_End.apply(self._gradients[-1], tensor))
        self.root = self._sum(self._ends)
        """A number from which DeepSpeed runs the backward; it needs no gradient where the output needs none."""

    def give(self, gradients: Gradients, *, may_be_missing: bool = False) -> None:
        """Give the gradients that came back, before the backward.

        Args:
            may_be_missing: Whether one may stand for none, as :meth:`Arrived.gradients` returns it. Then the
                backward passes over what that output was made of: weights there get no gradient, and not zeros.
        """
        missing = [
            may_be_missing and _is_missing(gradient, size)
            for gradient, size in zip(gradients, self._sizes, strict=True)
        ]
        for kept, gradient in zip(self._gradients, gradients, strict=True):
            kept.append(gradient)
        if any(missing):
            self.root = self._sum([end for end, out in zip(self._ends, missing, strict=True) if not out])
        self._ends = []

    def roots(
        self, gradients: Gradients, *, may_be_missing: bool = False
    ) -> tuple[list[Any], list[torch.Tensor | None]]:
        """Give the gradients as :meth:`give` does; return where the backward begins, and with which gradients."""
        self.give(gradients, may_be_missing=may_be_missing)
        return ([self.root], [None]) if self.root.requires_grad else ([], [])

    def _sum(self, ends: list[torch.Tensor]) -> torch.Tensor:
        needed = [end for end in ends if end.requires_grad]
        if len(needed) == 1:
            return needed[0]
        return torch.stack(needed).sum() if needed else torch.zeros((), device=self._device)
