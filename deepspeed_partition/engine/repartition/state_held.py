"""What layers and a loss function that are no modules hold themselves: it goes with them where they move.

That is: the attributes of an object that is called, of what a method belongs to, and of a function; the
arguments of a partial; the items of a dict, a list or a deque.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from deepspeed_partition.engine.pipeline.beside_layers import held_by
from deepspeed_partition.engine.repartition.part_descriptions import (
    NotHereError,
    ObjectState,
    Sent,
    sendable,
    take,
)
from deepspeed_partition.engine.repartition.shared_tensors import StillThere, is_shareable

STAYS_HELD = (
    "{written} ({kind}), which {who} holds, has changed where that ran, and it, or a part of it, is what it was "
    "on rank {rank}, which runs it now: numbers, tensors, arrays, containers of these and objects that can be "
    "pickled go with a layer or a loss; what cannot be pickled, such as a generator or a lambda, stays: an "
    "itertools.count, or a function of a file, goes"
)
_GONE = "gone"
"""The kind of what a layer has deleted."""


class Place(NamedTuple):
    """Where something stands in what a layer, or the loss function, holds itself."""

    table: int
    """The number of the object, function or partial in the layer that has it."""
    key: Any


class StateHeld:
    """What layers of this rank hold themselves, and held before."""

    def __init__(self) -> None:
        self._first: dict[int, dict[Place, Sent]] = {}
        """What each held before it ran here, by its number."""
        self._came: dict[int, dict[Place, Sent]] = {}
        """What each held that is here, when it had come from another rank, or began here."""
        self._objects: dict[int, dict[Place, weakref.ref[Any]]] = {}
        """The tensors and arrays that each held before it ran here."""

    def remember(self, functions: Iterable[tuple[int, Any]]) -> None:
        """Note what is here of layers, and of the loss function, that have begun or come."""
        here = dict(functions)
        came = {layer: self._came.get(layer) or _held_in(function) for layer, function in here.items()}
        self._came = came
        for layer, held in came.items():
            self._first.setdefault(layer, held)
            self._objects.setdefault(layer, _shareable_in(here[layer]))

    def begin_arrival(self, functions: Mapping[int, Any]) -> None:
        """Note what layers hold that have come, before they take what they held on another rank."""
        for layer, function in functions.items():
            if layer not in self._came and layer not in self._first:
                self._first[layer] = _held_in(function)
                self._objects[layer] = _shareable_in(function)
        self._came = {layer: held for layer, held in self._came.items() if layer in functions}

    def changed(self, layer: int, function: Any) -> Iterator[tuple[str, Sent, Place]]:
        """Yield what a layer has changed, with how that is written and where it stands."""
        first, came, now = self._first.get(layer, {}), self._came.get(layer, {}), _held_in(function)
        tables, objects, present = held_by(function), self._objects.get(layer, {}), _shareable_in(function)
        for place, sent in now.items():
            is_first, is_changed = _is_as(sent, first.get(place)), not _is_as(sent, came.get(place))
            if is_first and not is_changed:
                continue
            # Another rank may have what came here: it takes all of an object that has changed since.
            has_whole = first.get(place) is not came.get(place) and is_changed
            known = sent.since(came.get(place) if has_whole else first.get(place))
            if has_whole and isinstance(known.value, ObjectState):
                known = replace(known, value=replace(known.value, before=None))
            written = tables[place.table].written.format(key=place.key)
            if place in present and place in objects and present[place]() is objects[place]():
                known = replace(known, value=StillThere(known.value, written))
            # The mark may have keys that cannot be pickled.
            yield written, replace(known, mark=None), place
        for place in first.keys() - now.keys():
            yield tables[place.table].written.format(key=place.key), Sent(None, None, _GONE), place


def _is_as(sent: Sent, before: Sent | None) -> bool:
    return before is not None and bool(before.mark == sent.mark)


def _held_in(function: Any) -> dict[Place, Sent]:
    return {
        Place(number, key): sendable(value, is_held=True)
        for number, held in enumerate(held_by(function))
        for key, value in held.members().items()
    }


def _shareable_in(function: Any) -> dict[Place, weakref.ref[Any]]:
    return {
        Place(number, key): weakref.ref(value)
        for number, held in enumerate(held_by(function))
        for key, value in held.members().items()
        if is_shareable(value)
    }


def take_held(function: Any, place: Place, sent: Sent) -> bool:
    """Let a layer that has come hold what it held on another rank; return whether it has all of it."""
    tables = held_by(function)
    if place.table >= len(tables) or not sent.can_be_taken:
        return False
    table = tables[place.table].table
    if sent.kind == _GONE:
        table.pop(place.key, None)
        return True
    try:
        take(table, place.key, sent)
    except (NotHereError, IndexError):  # an item before it in a list is not here
        return False
    return not sent.leaves_a_part
