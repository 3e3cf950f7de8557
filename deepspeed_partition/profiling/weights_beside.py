"""Weights of modules beside the layers that are measured, put back where a run writes them.

Such as a teacher that a function names, which follows what trains. The layers and a loss that is a module run on
copies (``isolation.py``); these modules run as they are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed_partition.kept_values import say_of
from deepspeed_partition.kept_weights import marks_of, places_of
from deepspeed_partition.tensor_values import num_bytes_of

MOST_BYTES = 2**30
"""Bytes of the weights that are copied together, to be put back; those that come after them are not."""


class WeightsBeside:
    """The weights of modules as they are now: those that are not trained are copied, which code may write.

    Args:
        modules: Each without its children.
        apart: The ``id`` of weights that do not count.
        most_bytes: How many are copied; left out: as many as ``MOST_BYTES``.
    """

    def __init__(
        self, modules: Iterable[nn.Module], apart: Container[int] = (), most_bytes: int | None = None
    ) -> None:
        most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        places = {id(place.weight): place for place in places_of(dict.fromkeys(modules))}
        self._copied, self._others = list[tuple[int, torch.Tensor]](), list[int]()
        self._places = [place for key, place in places.items() if key not in apart and not is_lazy(place.weight)]
        num_bytes = 0
        for number, place in enumerate(self._places):
            size = num_bytes_of(place.weight)
            if place.weight.requires_grad or num_bytes + size > most_bytes:
                self._others.append(number)
            else:
                num_bytes += size
                self._copied.append((number, place.weight.detach().clone()))
        self._marks = self._marked()

    def put_back(self) -> None:
        """Give the weights that were written the values that they had, and say which cannot have theirs."""
        pairs = zip(self._marks, self._marked(), strict=True)
        changed = {number for number, (before, now) in enumerate(pairs) if before != now}
        for number, values in self._copied:
            if number in changed:
                self._places[number].put_back(values)
        for number in self._others:
            if number in changed:
                place = self._places[number]
                say_of(place.in_words, place.weight)("it was written")

    def _marked(self) -> list[object]:
        """What tells whether each weight has other values or another place; of one without values its version."""
        marks = marks_of([place.weight for place in self._places])
        # What was written and put back since by another, as what a specification is given, has the same values.
        return [mark if mark[-1] is None else mark[1:] for mark in marks]
