"""What a specification changes in the modules that it is given.

A ``LayerSpec`` may take its layer out of a whole model (``LayerSpec(Block, model, 3)``), and the class may change
what it takes when it is built: it wraps a part, loads or draws weights, takes an attribute off a parameter.
DeepSpeed builds a layer once. Here it is built more often, to be counted, compared and moved: each time from what
the specification was given, and the layer that trains keeps what it has.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from deepspeed_partition.tensor_values import version_of


def reached(values: Iterable[Any], depth: int = 3) -> Iterator[nn.Module | nn.Parameter]:
    """The modules and parameters among values, and in lists and dicts of them."""
    for value in values if depth else ():
        if isinstance(value, nn.Module | nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from reached(value, depth - 1)
        elif isinstance(value, dict):
            yield from reached(value.values(), depth - 1)


@contextmanager
def built_aside(spec: Any) -> Iterator[None]:
    """Let a specification be built from what it was given; then what this has changed is as it was before."""
    if not _takes_arguments(spec):
        yield
        return
    if spec in _CHANGED:
        present = _State(_CHANGED[spec].objects, with_values=True)
        _CHANGED[spec].put_back()
        try:
            yield
        finally:
            present.put_back()
        return
    before = _State(_given_to(spec))
    try:
        yield
    finally:
        changed = before.that_differ()
        changed.put_back()
        changed.forget_data()
        _CHANGED[spec] = changed


def put_back_as_given(spec: Any) -> None:
    """Put back what building a specification has changed in what it is given, for it to be built to stay."""
    if _takes_arguments(spec) and spec in _CHANGED:
        _CHANGED[spec].put_back()


def _takes_arguments(spec: Any) -> bool:
    return hasattr(spec, "module_args")


def _given_to(spec: Any) -> list[nn.Module | torch.Tensor]:
    """The modules and tensors that a specification can change."""
    found: dict[int, nn.Module | torch.Tensor] = {}
    for each in reached([spec.module_args, spec.module_kwargs]):
        found[id(each)] = each
        if isinstance(each, nn.Module):
            for held in (each.modules(), each.parameters(), each.buffers()):
                found.update((id(one), one) for one in held)
    return list(found.values())


class _State:
    """Attributes of modules and tensors as they are when it is made."""

    def __init__(self, objects: Iterable[nn.Module | torch.Tensor], *, with_values: bool = False) -> None:
        self._states = [_ObjectState(each, with_values) for each in objects]

    @property
    def objects(self) -> list[nn.Module | torch.Tensor]:
        return [state.of for state in self._states]

    def that_differ(self) -> _State:
        """The state of those that are others now."""
        differing = _State(())
        differing._states = [state for state in self._states if state.differs()]
        return differing

    def put_back(self) -> None:
        for state in self._states:
            state.put_back()

    def forget_data(self) -> None:
        """Leave the data of tensors where it will be: an engine casts them, and its hooks know them so."""
        for state in self._states:
            state.tensor = None


class _ObjectState:
    """Attributes of a module, or those of a tensor, where its data is and, if asked for, its numbers."""

    def __init__(self, of: nn.Module | torch.Tensor, with_values: bool) -> None:
        self.of = of
        # torch keeps what a module registers in tables, and handles of hooks know the tables: those stay.
        self._attributes = dict(vars(of))
        self._tables = {
            name: dict(value) if value else _EMPTY
            for name, value in self._attributes.items()
            if isinstance(value, dict) and name.startswith("_")
        }
        self.tensor = _TensorState(of, with_values) if isinstance(of, torch.Tensor) else None

    def differs(self) -> bool:
        present = vars(self.of)
        if self.tensor is not None and self.tensor.differs():
            return True
        if not _are_same(present, self._attributes):
            return True
        return any(not _are_same(present[name], table) for name, table in self._tables.items())

    def put_back(self) -> None:
        _fill(vars(self.of), self._attributes)
        for name, table in self._tables.items():
            _fill(self._attributes[name], table)
        if self.tensor is not None:
            self.tensor.put_back()


class _TensorState:
    def __init__(self, of: torch.Tensor, with_values: bool) -> None:
        self._of, self._data, self._version = of, of.data, version_of(of)
        self._values = of.data.clone() if with_values else None

    def differs(self) -> bool:
        return self._is_elsewhere() or version_of(self._of) != self._version

    def put_back(self) -> None:
        if self._is_elsewhere():
            self._of.data = self._data
        if self._values is not None and self._data.device.type != "meta":
            self._data.copy_(self._values)

    def _is_elsewhere(self) -> bool:
        return not _lies_as(self._of, self._data)


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one memory; so are those that have none to compare, such as sparse ones."""
    if one.device.type == "meta" or one.layout != torch.strided:
        return one.device == other.device
    return one.shape == other.shape and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


def _are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two tables have the same objects, in one order."""
    if len(one) != len(other):
        return False
    return not one or (list(one) == list(other) and all(map(operator.is_, one.values(), other.values())))


def _fill(table: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    table.clear()
    table.update(content)


_EMPTY: Mapping[Any, Any] = {}


_CHANGED: WeakKeyDictionary[Any, _State] = WeakKeyDictionary()
"""By specification: what its first building has changed, as it was before."""
