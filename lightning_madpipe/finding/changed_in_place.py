"""Tensors that a step's calls are given or return, and that are changed in place: by a call, or later.

What a call was given and returned is written down by reference. Where a tensor is changed later, that would be
what it has become: the step runs once more, and a copy is written down. Where a call changes what it is given, the
step in which something stands for the call gets the same change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deepspeed_partition.capture.structure import build, flatten
from deepspeed_partition.tensor_values import version_of

Key = tuple[int, str, int]
"""The number of a call; ``given``, ``returned``, or ``after`` it what it has changed; the place there."""


class ChangedInPlace:
    """Notes which tensors are changed while a step runs, and copies those that were in the run before."""

    def __init__(self) -> None:
        self._copied: set[Key] = set()
        self._seen: list[tuple[Key, Tensor, int]] = []
        self._by_call: dict[int, list[int]] = {}
        """The places of the arguments that a call changes."""
        self._same: dict[int, dict[int, int]] = {}
        """The places of arguments that a call returns, by their places in what it returns."""
        self._has_found = False

    def begin(self) -> None:
        """Begin a run of the step."""
        self._seen.clear()
        self._by_call.clear()
        self._same.clear()

    def end(self) -> None:
        """End it, and find what has changed since it was written down."""
        found = {key for key, tensor, version in self._seen if version_of(tensor) != version} - self._copied
        self._copied |= found
        self._has_found |= bool(found)
        self._seen.clear()

    def has_found(self) -> bool:
        """Whether runs since this was asked for have written down what has changed later."""
        found, self._has_found = self._has_found, False
        return found

    def given(self, number: int, arguments: Any) -> Any:
        """What to write down of the arguments of a call, before it runs."""
        return self._noted(number, "given", arguments)

    def returned(self, number: int, arguments: Any, returned: Any) -> tuple[Any, tuple[Tensor, ...]]:
        """What to write down of what a call has returned, and of the arguments that it has changed."""
        leaves, known = flatten(arguments)[0], {id(tensor): v for _, tensor, v in self._seen}
        changed = [
            place for place, leaf in enumerate(leaves) if id(leaf) in known and version_of(leaf) != known[id(leaf)]
        ]
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._by_call[number] = changed
        self._same[number] = {
            place: places[id(leaf)] for place, leaf in enumerate(flatten(returned)[0]) if id(leaf) in places
        }
        after = self._noted(number, "after", tuple(leaves[place] for place in changed))
        return self._noted(number, "returned", returned), after

    def happen(self, number: int, arguments: Any, returned: Any, after: tuple[Tensor, ...]) -> Any:
        """Change arguments as the call does that this stands for; return what it returns, with them in it."""
        leaves = flatten(arguments)[0]
        for place, value in zip(self._by_call.get(number, ()), after, strict=True):
            leaves[place].copy_(value)
        if not after:
            return returned
        own, structure = flatten(returned)
        for place, of_arguments in self._same[number].items():
            own[place] = leaves[of_arguments]
        return build(structure, own)

    def _noted(self, number: int, part: str, value: Any) -> Any:
        leaves, structure = flatten(value)
        copies = list(leaves)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or version_of(leaf) is None:
                continue
            key = (number, part, place)
            self._seen.append((key, leaf, leaf._version))
            if key in self._copied:
                copies[place] = leaf.clone()
        is_same = all(copy is leaf for copy, leaf in zip(copies, leaves, strict=True))
        return value if is_same else build(structure, copies)
