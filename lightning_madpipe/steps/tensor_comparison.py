"""Tensors and gradients compared: the same, the same but for rounding, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def has_gradient(tensor: Tensor) -> bool:
    """Whether autograd may give a tensor of this type a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, and any other one itself."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def directions_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A gradient for each tensor, drawn at random, always alike."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(output.shape, generator=generator).to(device=output.device, dtype=output.dtype)
        for output in outputs
    ]


def gradients_of(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor | None], list[Tensor]]:
    """The gradients of ``inputs`` where those of ``outputs`` are random; and these."""
    directions = directions_for(outputs)
    ends = [(o, d) for o, d in zip(outputs, directions, strict=True) if o.requires_grad]
    asked = [tensor for tensor in inputs if tensor.requires_grad]
    found: dict[int, Tensor | None] = {}
    if ends and asked:
        gradients = torch.autograd.grad(
            [o for o, _ in ends], asked, [d for _, d in ends], retain_graph=True, allow_unused=True
        )
        found = {id(tensor): gradient for tensor, gradient in zip(asked, gradients, strict=True)}
    return [found.get(id(tensor)) for tensor in inputs], directions


def first_difference(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> int | None:
    """The place of the first gradients that are not the same; None if all are."""
    dense = [(_dense(one, other), _dense(other, one)) for one, other in zip(left, right, strict=True)]
    largest = max((float(one.abs().max()) for one, _ in dense if one is not None and one.numel()), default=0.0)
    for index, (one, other) in enumerate(dense):
        if one is not None and other is not None and not close(one, other, FLOOR * largest):
            return index
    return None


def _dense(gradient: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Replace a gradient that is None by zeros."""
    if gradient is None and other is not None:
        return torch.zeros_like(other.to_dense() if other.is_sparse else other)
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def are_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether they are the same objects."""
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def equal(left: Tensor, right: Tensor) -> bool:
    """Whether all values are equal, and not-a-numbers stand in the same places."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = left.detach(), right.detach()
    if left.is_sparse or right.is_sparse:
        left, right = left.to_dense(), right.to_dense()
    if left.is_floating_point() or left.is_complex():
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return torch.equal(left, right)


def close(left: Tensor, right: Tensor, least: float = 0.0, tolerance: float | None = None) -> bool:
    """Whether tensors are equal but for rounding, in proportion to the largest value, or to ``least``.

    Args:
        tolerance: That proportion; None: the one of ``TOLERANCES``.
    """
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    left, right = as_real(left), as_real(right)
    if not left.is_floating_point():
        return equal(left, right)
    if left.numel() == 0 or equal(left, right):
        return True
    if tolerance is None:
        tolerance = TOLERANCES.get(left.dtype, 1e-1)
    left, right = left.detach().double(), right.detach().double()
    finite = left.isfinite() & right.isfinite()
    if not bool((finite | (left == right) | (left.isnan() & right.isnan())).all()):
        return False
    left, right = left[finite], right[finite]
    if not left.numel():
        return True
    return float((left - right).abs().max()) <= tolerance * max(float(right.abs().max()), least)


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far rounding may bring two tensors apart, in proportion to their largest value."""

FLOOR = 1e-3
"""A gradient is compared in proportion to this share of the largest one at least: some are rounding alone, such as
that of a bias before batch normalization."""


def gap_in_words(left: Tensor, right: Tensor) -> str:
    """How far the list's tensor, the left one, is from that of ``forward``."""
    if left.shape != right.shape:
        return f"of shape {tuple(right.shape)}, and by the list {tuple(left.shape)}"
    if left.dtype != right.dtype:
        return f"{right.dtype}, and by the list {left.dtype}"
    left, right = as_real(left), as_real(right)
    most = (left.double() - right.double()).abs().max()
    return f"by {float(most):.3g} at most, of values up to {float(right.double().abs().max()):.3g}"


def first_gap_in_words(left: Sequence[Tensor], right: Sequence[Tensor]) -> str | None:
    """How far the list's first tensor that differs is from that of ``forward``; None where all are close."""
    if len(left) != len(right):
        return f"{len(right)} tensors, and by the list {len(left)}"
    apart = (gap_in_words(own, other) for own, other in zip(left, right, strict=True) if not close(own, other))
    return next(apart, None)
