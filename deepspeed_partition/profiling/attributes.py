"""Attributes that layers keep beside parameters and buffers, in Python: a counter, a cache, a generator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from deepspeed_partition.generators import GENERATORS, generator_state, members_of, set_generator_state

_OF_TORCH = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = ("ds_", "_ds_")
_DEPTH = 2


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the class or a program has set on ``module`` itself, not on its children."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith(_OF_DEEPSPEED) and not isinstance(value, nn.Module)
    }


@contextmanager
def attributes_kept(modules: Iterable[nn.Module], *, buffers: bool = False) -> Iterator[None]:
    """Put the attributes of ``modules`` and of their children back afterwards, and their buffers if asked.

    Numbers, strings, tensors, random generators, arrays, and lists, dicts, sets and deques of these become what
    they were, and so do the attributes of a program's objects. Of any other object only the name is put back: what
    has changed within it stays changed.
    """
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    before = [(owner, _remembered_each(attributes_of(owner))) for owner in owners]
    tables = [(owner._buffers, _remembered_each(owner._buffers)) for owner in owners if buffers]
    try:
        yield
    finally:
        for owner, remembered in before:
            for name in attributes_of(owner).keys() - remembered.keys():
                del vars(owner)[name]
            vars(owner).update(_restored(remembered))
        for table, remembered in tables:
            table.update(_restored(remembered))


Remembered: TypeAlias = Callable[[], Any]
"""Function that makes a value what it was, and returns it."""


def _remembered_each(values: Mapping[Any, Any], depth: int = _DEPTH) -> dict[Any, Remembered]:
    return {key: _remembered(value, depth) for key, value in values.items()}


def _restored(remembered: Mapping[Any, Remembered]) -> dict[Any, Any]:
    return {key: restored() for key, restored in remembered.items()}


def _remembered(value: Any, depth: int) -> Remembered:
    restore = _restorer(value, depth)

    def restored() -> Any:
        restore()
        return value

    return restored


def _restorer(value: Any, depth: int) -> Callable[[], object]:
    if isinstance(value, GENERATORS):
        state = generator_state(value)
        return lambda: set_generator_state(value, state)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
        copy, version = value.detach().clone(), value._version
        return lambda: None if value._version == version else _copy_back(value, copy)
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, list):
        items = [_remembered(item, depth) for item in value]
        return lambda: value.__setitem__(slice(None), [item() for item in items])
    if isinstance(value, dict):
        members = _remembered_each(value, depth)
        return lambda: _refill(value, _restored(members))
    if isinstance(value, set):
        entries = set(value)
        return lambda: _refill(value, entries)
    if isinstance(value, deque):
        queue = list(value)
        return lambda: _refill_queue(value, queue)
    table = members_of(value) if depth else None
    if table is not None:
        inner = _remembered_each(table, depth - 1)
        return lambda: _refill(table, _restored(inner))
    return lambda: None


def _copy_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(copy)


def _refill_queue(queue: deque[Any], items: list[Any]) -> None:
    queue.clear()
    queue.extend(items)


def _refill(container: Any, contents: Any) -> None:
    if _has_same(container, contents):  # it may refuse to be written to
        return
    container.clear()
    container.update(contents)


def _has_same(container: Any, contents: Any) -> bool:
    """Whether a container has these objects already, in this order."""
    if not isinstance(container, dict):
        return bool(container == contents)
    pairs = zip(container.items(), contents.items(), strict=False)
    return len(container) == len(contents) and all(key == old and now is was for (key, now), (old, was) in pairs)
