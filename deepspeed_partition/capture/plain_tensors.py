"""The tensors that a model's code holds beside weights and buffers, and which of them a run has written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture.left_behind import Held
from deepspeed_partition.kept_weights import marks_of
from deepspeed_partition.tensor_values import has_memory, parts_of, put_back, without_repeats


class PlainTensors:
    """Tensors in attributes, containers and variables, with the values that they have now.

    Args:
        model: The model, whose own weights and buffers are none of them.
        held: What its code holds.
    """

    def __init__(self, model: nn.Module, held: Held) -> None:
        buffers = set(map(id, model.buffers()))
        self._tensors = [
            (name, tensor)
            for name, tensor in held.tensors()
            if id(tensor) not in buffers and all(map(has_memory, parts_of(tensor)))
        ]
        self._copies = [without_repeats(tensor).detach().clone() for _, tensor in self._tensors]
        self._values = self.values()

    def names(self) -> list[str]:
        """What each is called."""
        return [name for name, _ in self._tensors]

    def values(self) -> list[Any]:
        """A mark of the values of each, as they are now."""
        return values_of(tensor for _, tensor in self._tensors)

    def put_back(self) -> None:
        """Give those that have been written the values that they had.

        Others are left alone: they may lie in memory that none may write.
        """
        for (_, tensor), copy, was, now in zip(
            self._tensors, self._copies, self._values, self.values(), strict=True
        ):
            if now != was:
                put_back(without_repeats(tensor), copy)


def values_of(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Marks of the values of tensors; how often each was written, where it is sparse."""
    marks = marks_of([without_repeats(tensor.detach()) for tensor in tensors])
    return [version if value is None else (shape, value) for version, shape, _, value in marks]
