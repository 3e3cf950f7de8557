"""Attributes that layers keep beside parameters and buffers, in Python: a counter, a cache, a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

_OF_TORCH = frozenset(vars(nn.Module()))
_OF_DEEPSPEED = ("ds_", "_ds_")


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

    Numbers, strings, tensors, generators, arrays, and lists, dicts and sets of these become what they were. Of any
    other object only the name is put back: what has changed within it stays changed.
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


def _remembered_each(values: Mapping[Any, Any]) -> dict[Any, Remembered]:
    return {key: _remembered(value) for key, value in values.items()}


def _restored(remembered: Mapping[Any, Remembered]) -> dict[Any, Any]:
    return {key: restored() for key, restored in remembered.items()}


def _remembered(value: Any) -> Remembered:
    restore = _restorer(value)

    def restored() -> Any:
        restore()
        return value

    return restored


def _restorer(value: Any) -> Callable[[], object]:
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
        copy, version = value.detach().clone(), value._version
        return lambda: None if value._version == version else _copy_back(value, copy)
    if isinstance(value, np.ndarray):
        array = value.copy()
        return lambda: np.copyto(value, array)
    if isinstance(value, list):
        items = [_remembered(item) for item in value]
        return lambda: value.__setitem__(slice(None), [item() for item in items])
    if isinstance(value, dict):
        members = _remembered_each(value)
        return lambda: _refill(value, _restored(members))
    if isinstance(value, set):
        entries = set(value)
        return lambda: _refill(value, entries)
    return lambda: None


def _copy_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(copy)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    container.update(contents)
