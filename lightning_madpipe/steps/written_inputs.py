"""Layers that change in place what a step gives them: tensors of the batch, in one process.

In a pipeline the first stage has a copy of these. What the step reads of them behind its call, on the last stage,
and what the loader may give again, is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

WRITES = (
    "{layer} changes its input in place, which is what the step gives the layers: in one process the step sees "
    "that after its call, and so does the next epoch of a loader that keeps its tensors; in a pipeline they do "
    "not. Where that matters, let the step change it, before its call; else let the layer make a new tensor (`x = "
    "x * 2` for `x *= 2`)"
)


class GivenTensors:
    """Follows the tensors that a step gives its layers, from one layer to the next.

    Args:
        number: How many there are.
    """

    def __init__(self, number: int) -> None:
        self._are_given = [True] * number
        self._calls: tuple[list[bool], list[list[int]]] = [], []

    def note(self, inputs: Sequence[Tensor], versions: Sequence[int], outputs: Sequence[Tensor]) -> None:
        """Note a run of a layer.

        Args:
            versions: Those of ``inputs`` before it.
        """
        if any(type(each) is not Tensor for each in (*inputs, *outputs)):
            return  # such as one that is watched
        memory = [each.untyped_storage().data_ptr() for each in inputs]
        changed = [each._version != before for each, before in zip(inputs, versions, strict=True)]
        shared = [
            [place for place, begin in enumerate(memory) if each.untyped_storage().data_ptr() == begin]
            for each in outputs
        ]
        self._calls = changed, shared

    def layer_writes(self) -> bool:
        """Go on to the next layer; return whether the last one has changed any of these tensors."""
        changed, shared = self._calls
        writes = any(given and written for given, written in zip(self._are_given, changed, strict=False))
        self._are_given = [any(self._are_given[place] for place in places) for places in shared]
        return writes
