"""Whether the first and the last stage of a pipeline read the same micro-batches.

Inputs come from the rank of the first stage, and labels from that of the last. Where a loader shuffles by numbers
that are not alike on both, a model is trained on the labels of other samples, in plain DeepSpeed, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_partition.engine.pipeline.drawn_data import tensors_in
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.tensor_values import bytes_view

OTHER_DATA = (
    "rank {first} reads other micro-batches for the first stage than rank {last} for the last one: outputs of the "
    "samples of one meet the labels of the other, in plain DeepSpeed, too. Where labels belong to inputs, nothing "
    "can be learned from them. Give both the same samples in the same order: a loader that shuffles needs a "
    "generator that is seeded alike on all ranks of a pipeline, DataLoader(..., shuffle=True, "
    "generator=torch.Generator().manual_seed(0)), and so does what draws random numbers for a sample"
)
COMPARE_EVERY = 128
"""The number of batches after which both ends compare again what they read."""
Mark = tuple[tuple[int, ...], int] | None
"""The shape and a checksum of a tensor; None where it says nothing: of one element, or of equal ones."""


class BothEnds:
    """Compares what the two ends of a pipeline read, in batches 1, 2, 4, ..., 128, and each 128th."""

    def __init__(self) -> None:
        self._number = 0
        self._is_said = False

    def is_due(self) -> bool:
        """Count a batch; return whether its data are compared. The same on all ranks."""
        self._number += 1
        number = self._number
        is_due = number & (number - 1) == 0 if number < COMPARE_EVERY else number % COMPARE_EVERY == 0
        return is_due and not self._is_said

    def compare(self, micro_batch: Any, ends: Sequence[tuple[int, int]]) -> None:
        """Say once where the ends of a pipeline have read other data. Collective over the job.

        Args:
            micro_batch: The last one that this rank has read of its batch, the memory of which the iterator has
                not filled again; None where it reads none.
            ends: The global ranks of the first and of the last stage of each pipeline.
        """
        marks = gather_objects(marks_of(micro_batch))
        for first, last in ends:
            if are_others(marks[first], marks[last]):
                self._is_said = True
                warn_once("other data", OTHER_DATA.format(first=first, last=last))
                return


def marks_of(micro_batch: Any) -> tuple[list[Mark], list[Mark]] | None:
    """A mark of each tensor among inputs and labels; None where there are not both."""
    if not isinstance(micro_batch, tuple | list) or len(micro_batch) != 2:
        return None
    inputs, labels = ([_mark(tensor) for tensor in tensors_in(part)] for part in micro_batch)
    return inputs, labels


def are_others(first: tuple[list[Mark], ...] | None, last: tuple[list[Mark], ...] | None) -> bool:
    """Whether both the inputs and the labels differ between two ends.

    Inputs alone may: noise in them, or an end that is given zeros for what it does not use.
    """
    if first is None or last is None:
        return False
    return all(
        len(one) == len(other) and any(map(_differ, one, other)) for one, other in zip(first, last, strict=True)
    )


def _differ(one: Mark, other: Mark) -> bool:
    return one is not None and other is not None and len(one[0]) == len(other[0]) and one != other


def _mark(tensor: torch.Tensor) -> Mark:
    is_plain = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_meta)
    )
    if not is_plain or tensor.numel() < 2:
        return None
    of_elements = bytes_view(tensor.cpu()).view(tensor.numel(), -1)
    if bool((of_elements == of_elements[0]).all()):
        return None
    return tuple(tensor.shape), zlib.crc32(of_elements.numpy().tobytes())
