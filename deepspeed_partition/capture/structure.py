"""Nested values, such as the arguments and the result of a ``forward``: their leaves and their structure.

A leaf is whatever is no container: a tensor, a number, a configuration. Containers are what torch's pytree knows
(tuples, lists, dicts, named tuples, the outputs of Hugging Face models), data classes, and slices.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deepspeed_partition.capture.sizes import Shape

_DEPTH = 8
"""How deep an object of an unknown class is searched for tensors."""
_MOST = 10_000
"""How many objects are looked at."""
_WITHOUT = (str, bytes, int, float, complex, type, torch.nn.Module, types.ModuleType, types.FunctionType)
"""What is not searched."""


class Leaf:
    """The place of a leaf."""

    __slots__ = ()

    def build(self, leaves: Iterator[Any]) -> Any:
        return next(leaves)


class Node:
    """A container: its parts, and what makes one of them."""

    __slots__ = ("make", "names", "parts", "places")

    def __init__(
        self, make: Callable[[list[Any]], Any], parts: list[Any], names: list[str], places: list[str]
    ) -> None:
        self.make, self.parts, self.names = make, parts, names
        self.places = places
        """How code names each part, behind the container."""

    def build(self, leaves: Iterator[Any]) -> Any:
        return self.make([part.build(leaves) for part in self.parts])


LEAF = Leaf()
Structure = Leaf | Node


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """The leaves of a value in their order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def build(structure: Structure, leaves: Iterable[Any]) -> Any:
    """A value of a structure, with these leaves."""
    return structure.build(iter(leaves))


def names_of(structure: Structure, name: str = "") -> list[str]:
    """A name for each leaf: ``hidden_states.0`` for the first member of what is called ``hidden_states``."""
    if isinstance(structure, Leaf):
        return [name]
    own = [f"{name}.{part}" if name else part for part in structure.names]
    return [found for part, each in zip(structure.parts, own, strict=True) for found in names_of(part, each)]


def has_same_names(structure: Structure, other: Structure) -> bool:
    """Whether two structures have leaves of the same names; a list is as good as a tuple."""
    if isinstance(structure, Leaf) or isinstance(other, Leaf):
        return structure is other
    return structure.names == other.names and all(map(has_same_names, structure.parts, other.parts))


def written_names_of(structure: Structure, name: str) -> list[str]:
    """How code names each leaf of what it calls ``name``: ``batch['lengths'][0]``."""
    if isinstance(structure, Leaf):
        return [name]
    both = zip(structure.parts, structure.places, strict=True)
    return [found for part, place in both for found in written_names_of(part, f"{name}{place}")]


def _flatten_into(value: Any, leaves: list[Any]) -> Structure:
    taken_apart = _taken_apart(value)
    if taken_apart is None:
        leaves.append(value)
        return LEAF
    parts, names, make = taken_apart
    places = [f"[{each}]" if each.isdigit() else f".{each}" for each in names]
    if isinstance(value, dict):
        places = [f"[{key!r}]" for key in value]
    return Node(make, [_flatten_into(part, leaves) for part in parts], names, places)


def _taken_apart(value: Any) -> tuple[list[Any], list[str], Callable[[list[Any]], Any]] | None:
    kind = type(value)
    if kind is tuple or kind is list:
        return list(value), [str(place) for place in range(len(value))], kind
    if kind is dict:
        keys = list(value)
        return list(value.values()), [str(key) for key in keys], lambda parts: dict(zip(keys, parts, strict=True))
    if kind is slice:
        return [value.start, value.stop, value.step], ["start", "stop", "step"], lambda parts: slice(*parts)
    if kind is torch.Size or kind is Shape:
        return list(value), [str(place) for place in range(len(value))], lambda parts: tuple(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value), list(value._fields), lambda parts: kind(*parts)
    if (known := pytree.SUPPORTED_NODES.get(kind)) is not None:
        parts, context = known.flatten_fn(value)
        parts = list(parts)
        names = list(map(str, value)) if isinstance(value, dict) else [str(place) for place in range(len(parts))]
        return parts, names, lambda parts: known.unflatten_fn(parts, context)
    if isinstance(value, dict):
        return _dict_taken_apart(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _data_class_taken_apart(value)
    return None


def _dict_taken_apart(value: Any) -> tuple[list[Any], list[str], Callable[[list[Any]], Any]]:
    keys = list(value)

    def make(parts: list[Any]) -> Any:
        made = copy.copy(value)
        for key, part in zip(keys, parts, strict=True):
            # Classes of the user's may refuse update(), keep attributes beside their entries, or take no entries.
            try:
                made[key] = part
            except Exception:
                dict.__setitem__(made, key, part)
        return made

    return [value[key] for key in keys], list(map(str, keys)), make


def _data_class_taken_apart(value: Any) -> tuple[list[Any], list[str], Callable[[list[Any]], Any]]:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]

    def make(parts: list[Any]) -> Any:
        made = copy.copy(value)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)
        return made

    return [getattr(value, name) for name in names], names, make


def plain_leaves(value: Any) -> list[tuple[str, Any]]:
    """The numbers, flags and texts of a value, or in a container, each with the name of its place."""
    leaves, structure = flatten(sorted(value, key=repr) if isinstance(value, set | frozenset) else value)
    both = zip(names_of(structure), leaves, strict=True)
    return [(name, leaf) for name, leaf in both if isinstance(leaf, bool | int | float | str)]


def holds_tensors(value: Any, depth: int = _DEPTH) -> bool:
    """Whether an object, which is no container, has tensors in its attributes: a cache of keys and values."""
    return _holds_tensors(value, depth, set())


def _holds_tensors(value: Any, depth: int, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, _WITHOUT) or value is None or not depth or id(value) in seen or len(seen) > _MOST:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return any(_holds_tensors(part, depth - 1, seen) for part in parts)
