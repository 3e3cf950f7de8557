"""Whether the first and the last stage of a pipeline read the same micro-batches.

Inputs come from the rank of the first stage, and labels from that of the last. Where a loader shuffles by numbers
that are not alike on both, a model is trained on the labels of other samples, in plain DeepSpeed, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils import _pytree as pytree

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.tensor_values import has_memory

OTHER_DATA = (
    "rank {first} reads other micro-batches for the first stage than rank {last} for the last one: outputs of the "
    "samples of one meet the labels of the other, in plain DeepSpeed, too. Where labels belong to inputs, nothing "
    "can be learned from them (where an end has something else in the place of what it does not use, this is "
    "nothing). Give both the same samples in the same order: a loader that shuffles needs a generator that is "
    "seeded alike on all ranks of a pipeline, DataLoader(..., shuffle=True, "
    "generator=torch.Generator().manual_seed(0)), and so does what draws random numbers for a sample"
)
COMPARE_EVERY = 128
"""The number of batches after which both ends compare again what they read."""
MOST_NUMBERS = 256
"""Numbers of a tensor that are compared, from all over it."""
TOLERANCE = 1e-3
"""The relative difference up to which floating-point numbers are the same, computed on unlike machines."""


class Mark(NamedTuple):
    """What tells a tensor from another one."""

    shape: tuple[int, ...]
    is_exact: bool
    numbers: tuple[float, ...]


Marks = tuple[list[Mark | None], list[Mark | None]]
"""The marks of inputs and of labels; None of a tensor that says nothing: its numbers are equal, or none."""


class BothEnds:
    """Compares what the two ends of a pipeline read, in batches 1, 2, 4, ..., 128, and each 128th.

    Training and evaluation count their own.
    """

    def __init__(self) -> None:
        self._numbers: Counter[bool] = Counter()
        self._is_said = False

    def is_due(self) -> bool:
        """Count a batch; return whether its data are compared. The same on all ranks."""
        trains = torch.is_grad_enabled()
        self._numbers[trains] = number = self._numbers[trains] + 1
        is_due = number & (number - 1) == 0 if number < COMPARE_EVERY else number % COMPARE_EVERY == 0
        return is_due and not self._is_said

    def compare(self, micro_batch: Any, ends: Sequence[tuple[int, int]]) -> None:
        """Say once where the ends of a pipeline have read other data. Collective over the job.

        Args:
            micro_batch: The last one that this rank has read of its batch, the memory of which the iterator has
                not filled again; None where there is none.
            ends: The global ranks of the first and of the last stage of each pipeline.
        """
        marks = gather_objects(marks_of(micro_batch))
        for first, last in ends:
            if are_others(marks[first], marks[last]):
                self._is_said = True
                warn_once("other data", OTHER_DATA.format(first=first, last=last))
                return


def marks_of(micro_batch: Any) -> Marks | None:
    """The marks of what is read of a micro-batch; None where there are not both inputs and labels."""
    if not isinstance(micro_batch, tuple | list) or len(micro_batch) < 2:
        return None
    inputs, labels = ([_mark(leaf) for leaf in pytree.tree_leaves(part)] for part in micro_batch[:2])
    return inputs, labels


def are_others(first: Marks | None, last: Marks | None) -> bool:
    """Whether both the inputs and the labels differ between two ends.

    Inputs alone may: noise in them, or an end that is given zeros for what it does not use.
    """
    if first is None or last is None:
        return False
    return all(
        len(one) == len(other) and any(map(_differ, one, other)) for one, other in zip(first, last, strict=True)
    )


def _differ(one: Mark | None, other: Mark | None) -> bool:
    if one is None or other is None or len(one.shape) != len(other.shape):
        return False
    if one.shape != other.shape or one.is_exact != other.is_exact:
        return True
    if one.is_exact:
        return one.numbers != other.numbers
    pairs = list(zip(one.numbers, other.numbers, strict=True))
    finite = [abs(number) for pair in pairs for number in pair if math.isfinite(number)]
    least = TOLERANCE * max(finite, default=0.0)
    return any(math.isfinite(a) != math.isfinite(b) or abs(a - b) > least for a, b in pairs)


def _mark(leaf: Any) -> Mark | None:
    if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
        chosen = leaf.flat[numpy.linspace(0, leaf.size - 1, min(leaf.size, MOST_NUMBERS)).astype(int)]
        return _told(leaf.shape, chosen.astype(float).tolist(), is_exact=leaf.dtype.kind != "f")
    is_plain = type(leaf) is torch.Tensor and has_memory(leaf)
    if not is_plain or leaf.is_quantized or leaf.is_complex() or any(getattr(leaf, "names", ())):  # of old torch
        return None
    try:
        return _told(tuple(leaf.shape), _numbers_of(leaf), is_exact=not leaf.is_floating_point())
    except (RuntimeError, TypeError):  # torch has not every operation for every type
        return None


def _numbers_of(leaf: torch.Tensor) -> list[float]:
    size = leaf.numel()
    places = torch.linspace(0, max(size - 1, 0), min(size, MOST_NUMBERS), dtype=torch.float64).long()
    # By their indices, since a flat view of some tensors would be a copy of all.
    chosen = (
        leaf.detach()[torch.unravel_index(places.to(leaf.device), leaf.shape)] if leaf.dim() else leaf.detach()
    )
    return [float(number) for number in chosen.double().reshape(-1).tolist()]


def _told(shape: tuple[int, ...], numbers: list[float], *, is_exact: bool) -> Mark | None:
    says_nothing = not numbers or (not numbers[0] if len(numbers) == 1 else len(set(numbers)) == 1)
    return None if says_nothing else Mark(shape, is_exact, tuple(numbers))
