"""Values that one layer hands to the next: a tensor or a tuple of tensors, as in DeepSpeed's pipeline.

Between layers a boundary is held detached from any graph; the ``requires_grad`` of its tensors says which
of them the layer before it wants a gradient for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

Boundary: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


def tensors_of(boundary: Boundary) -> tuple[torch.Tensor, ...]:
    return (boundary,) if isinstance(boundary, torch.Tensor) else boundary


def like(boundary: Boundary, tensors: list[torch.Tensor]) -> Boundary:
    """Return ``tensors`` in the form of ``boundary``: alone, or in a tuple."""
    return tensors[0] if isinstance(boundary, torch.Tensor) else tuple(tensors)


def is_boundary(value: Any) -> bool:
    """Return whether a value is a tensor, or a tuple of at least one tensor and nothing else."""
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, tuple) and bool(value) and all(isinstance(item, torch.Tensor) for item in value)


def bytes_of(boundary: Boundary) -> int:
    """Return the bytes sent where the chain is cut here: every element, however few of them are stored."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(boundary))


def describe(value: Any) -> str:
    """Return shapes and types for a message: ``(8, 16) float32``, ``((8, 16) float32, (8,) int64)``."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"({', '.join(describe(item) for item in value)}{',' if len(value) == 1 else ''})"
    return type(value).__name__


def detached(boundary: Boundary) -> Boundary:
    """Return a boundary without its graph; ``requires_grad`` says which tensors had one."""
    return like(boundary, [t.detach().requires_grad_(t.requires_grad) for t in tensors_of(boundary)])


def with_grad(boundary: Boundary, wanted: bool) -> Boundary:
    """Return a boundary without its graph; all floating tensors require a gradient, or none does."""
    return like(
        boundary,
        [t.detach().requires_grad_(wanted and t.is_floating_point()) for t in tensors_of(boundary)],
    )


def to_device(value: Any, device: torch.device) -> Any:
    """Return a value with its tensors, alone or within tuples and lists, on ``device``; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple is built from its fields
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(to_device(item, device) for item in value)
    return value


def receive(boundary: Boundary) -> tuple[Boundary, tuple[torch.Tensor, ...]]:
    """Return a private copy of a boundary to run a layer on, and the leaves that its gradients arrive at.

    DeepSpeed clones what a stage received, too: a layer may work in place, which autograd forbids on a leaf.
    """
    copies, leaves = [], []
    for tensor in tensors_of(boundary):
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        copy = leaf.clone()
        # Expanded, or with gaps: the layer gets it as it was made.
        if torch.Tensor.stride(copy) != torch.Tensor.stride(leaf):
            copy = _StridedCopy.apply(leaf)
        copies.append(copy)
        if leaf.requires_grad:
            leaves.append(leaf)
    return like(boundary, copies), tuple(leaves)


def num_in_span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last one in memory, of a tensor that has some."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def span(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stretch of memory that holds a tensor, from its first element to its last, as a flat copy."""
    if tensor.numel() == 0:
        return tensor.new_empty(0)
    length = num_in_span(tensor.shape, torch.Tensor.stride(tensor))
    return tensor.detach().as_strided((length,), (1,)).clone()


def from_span(flat: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor whose ``span`` is ``flat``; not a view of it for autograd, which limits those."""
    return flat.new_empty(0).set_(flat.untyped_storage(), 0, size, stride)


class _StridedCopy(torch.autograd.Function):
    """Clone of a tensor that keeps its strides, even where elements overlap or leave gaps."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return from_span(span(tensor), tuple(tensor.shape), torch.Tensor.stride(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient
