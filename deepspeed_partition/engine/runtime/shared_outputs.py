"""Tensors at the end of a stage that share memory, which those that arrive behind the cut do not."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import torch

from deepspeed_partition.engine.runtime.environment import warn_once


class SharedOutputs:
    """Says once of each stage whose outputs share elements that a change of one does not change the other."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()
        """Layouts of outputs that were looked at: of each tensor the number of its memory, its offset, shape and
        strides in elements, and the bytes of an element."""

    def look(self, stage: int, outputs: Sequence[torch.Tensor]) -> None:
        """Look at the outputs of a stage, which are told from each other by their memory at next to no cost."""
        memories: dict[int, int] = {}
        numbers = [memories.setdefault(each.untyped_storage().data_ptr(), len(memories)) for each in outputs]
        if len(memories) == len(outputs):
            return
        views = tuple(
            (number, each.storage_offset(), each.shape, torch.Tensor.stride(each), each.element_size())
            for number, each in zip(numbers, outputs, strict=True)
        )
        if views in self._known:
            return
        self._known.add(views)
        places = shared_places(outputs)
        if places is None:
            return
        first, second = places
        warn_once(
            f"shared outputs/{stage}",
            f"stage {stage} ends with a layer that returns tensors of one memory (its outputs {first} and "
            f"{second}): behind the cut they are two, so a later layer that changes one of them in place does not "
            "change the other one, as it would in one process: return a clone() of one of them, or change nothing "
            "in place",
        )


def shared_places(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return the places of the first two tensors that are not one, and show an element of memory both."""
    for (first, one), (second, other) in combinations(enumerate(tensors), 2):
        if one is other or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
            continue
        if one.element_size() == other.element_size() and one.numel() and other.numel():
            marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
            marks.as_strided(one.shape, torch.Tensor.stride(one), one.storage_offset()).fill_(True)
            if marks.as_strided(other.shape, torch.Tensor.stride(other), other.storage_offset()).any():
                return first, second
    return None
