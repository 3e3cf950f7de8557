"""The buffers that the modules of a layer have, by name: a forward may make some, or let go of some.

A causal mask is often made by the first forward, and a specification builds the layer without it. Where the layer
moves, it has there the buffers that it had here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """A name under which a module has a buffer, or None in the place of one."""

    first: str | None
    """The name that comes first of those under which the layer has the same tensor; None without a tensor."""
    dtype: torch.dtype | None
    is_persistent: bool
    """Whether it is in the module's ``state_dict()``."""


BufferPlaces: TypeAlias = dict[str, BufferPlace]
"""The buffers of a layer's modules, and of those that it hides, by their names in the layer."""


def buffers_of(modules: Mapping[str, nn.Module]) -> BufferPlaces:
    """What modules of a layer, given by their paths, have in the places of buffers."""
    firsts: dict[int, str] = {}
    found: BufferPlaces = {}
    for path, module in modules.items():
        for key, buffer in module._buffers.items():
            name = f"{path}.{key}" if path else key
            first = None if buffer is None else firsts.setdefault(id(buffer), name)
            found[name] = BufferPlace(first, None if buffer is None else buffer.dtype, _is_persistent(module, key))
    return found


def take_buffers(modules: Mapping[str, nn.Module], there: BufferPlaces, sent: Container[str]) -> None:
    """Let modules have buffers under the names where they have them in another process; values come later.

    Args:
        modules: Those that the layer has in both processes, by their paths: others may belong to other layers.
        there: What :func:`buffers_of` has returned in the other process.
        sent: The names of those whose values come; no other buffer is made.
    """
    for name in buffers_of(modules).keys() - there.keys():
        path, _, key = name.rpartition(".")
        delattr(modules[path], key)
    taken: dict[str, torch.Tensor | None] = {}
    for name, place in there.items():
        path, _, key = name.rpartition(".")
        table: Any = modules[path]._buffers
        present: torch.Tensor | None = dict(table.items()).get(key)
        wanted: torch.Tensor | None = None
        if place.first == name:
            is_free = present is not None and all(present is not each for each in taken.values())
            if not is_free and name not in sent:
                continue
            wanted = present if is_free else torch.empty(0, dtype=place.dtype)
            taken[name] = wanted
        elif place.first is not None:
            if place.first not in taken:
                continue
            wanted = taken[place.first]
        if wanted is not present or key not in table:
            table[key] = wanted
        if place.is_persistent != _is_persistent(modules[path], key):
            others = modules[path]._non_persistent_buffers_set
            others.discard(key) if place.is_persistent else others.add(key)


def _is_persistent(module: nn.Module, key: str) -> bool:
    return key not in getattr(module, "_non_persistent_buffers_set", ())


def put_buffer(modules: Mapping[str, nn.Module], places: BufferPlaces, name: str, values: torch.Tensor) -> None:
    """Let modules have other values under each name of a buffer, which has no room for them: of another layout."""
    for each, place in places.items():
        if place.first == name:
            path, _, key = each.rpartition(".")
            modules[path]._buffers[key] = values
