"""What a specification changes in the modules that it is given.

A ``LayerSpec`` may take its layer out of a whole model (``LayerSpec(Block, model, 3)``), and the class may change
what it takes when it is built: it wraps a part, loads or draws weights, takes an attribute off a parameter.
DeepSpeed builds a layer once. Here it is built more often, to be counted, compared and moved: each time from what
the specification was given, and the layer that trains keeps what it has.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.layer_calls import is_layer_spec
from deepspeed_partition.tensor_values import has_memory, version_of

Built = TypeVar("Built")


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
def built_aside(spec: Any, build: Callable[[], Built], trains: nn.Module | None = None) -> Iterator[Built]:
    """Build a specification from what it was given; afterwards what this has changed is as it was before.

    Args:
        spec: A specification, or another form of a layer.
        build: Builds it.
        trains: The layer of this specification that trains, if there is one. It keeps what it has.
    """
    if not _takes_modules(spec):
        yield build()
        return
    if spec in _CHANGED:
        objects = {id(each): each for each in (*_CHANGED[spec].objects, *_held_by([trains]))}
        present = _State(objects.values(), with_values=True)
        _CHANGED[spec].put_back()
        try:
            yield build()
        finally:
            present.put_back()
        return
    before = _State(_held_by([spec.module_args, spec.module_kwargs]))
    try:
        with before.keeping_what_is_written():
            built = build()
        yield built
    finally:
        changed = before.that_differ()
        changed.put_back()
        changed.forget_data()
        _CHANGED[spec] = changed


def put_back_as_given(spec: Any) -> None:
    """Put back what building a specification has changed in what it is given, for it to be built to stay."""
    if is_layer_spec(spec) and spec in _CHANGED:
        _CHANGED[spec].put_back()


def _takes_modules(spec: Any) -> bool:
    return is_layer_spec(spec) and any(True for _ in reached([spec.module_args, spec.module_kwargs]))


def _held_by(values: Iterable[Any]) -> list[nn.Module | torch.Tensor]:
    """The modules and tensors in arguments, or of a layer, that building a specification can change."""
    found: dict[int, nn.Module | torch.Tensor] = {}
    for each in reached(values):
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

    def keeping_what_is_written(self) -> _NumbersBefore:
        """A context in which tensors that are written to keep the numbers that they had."""
        return _NumbersBefore(state.tensor for state in self._states if state.tensor is not None)

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
        has_place = isinstance(of, torch.Tensor) and not is_lazy(of)
        self.tensor = _TensorState(cast(torch.Tensor, of), with_values) if has_place else None

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
        self._requires_grad = of.requires_grad
        self._values = of.data.clone() if with_values and has_memory(of) else None

    @property
    def memory(self) -> int | None:
        """What tells the memory in which it lies; None where it has none."""
        return _memory_of(self._data)

    def keep_values(self) -> None:
        self._values = self._data.clone()

    def differs(self) -> bool:
        if self._values is not None or self._requires_grad != self._of.requires_grad:
            return True
        return self._is_elsewhere() or version_of(self._of) != self._version

    def put_back(self) -> None:
        if self._is_elsewhere():
            self._of.data = self._data
        if self._values is not None:
            with torch.inference_mode(self._data.is_inference()):
                self._data.copy_(self._values)
        if self._of.requires_grad != self._requires_grad:
            self._of.requires_grad_(self._requires_grad)

    def _is_elsewhere(self) -> bool:
        return not _lies_as(self._of, self._data)


class _NumbersBefore(TorchDispatchMode):
    """A mode in which tensors keep their numbers before the first operation of torch that writes to their memory.

    So not all of a model that a specification is given is copied, to build a layer of it.
    """

    def __init__(self, states: Iterable[_TensorState]) -> None:
        super().__init__()
        self._states: defaultdict[int | None, list[_TensorState]] = defaultdict(list)
        for state in states:
            self._states[state.memory].append(state)
        self._states.pop(None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else given.get(argument.name)
                for tensor in written if isinstance(written, list | tuple) else [written]:
                    if isinstance(tensor, torch.Tensor):
                        for state in self._states.pop(_memory_of(tensor), ()):
                            state.keep_values()
        return func(*args, **given)


def _memory_of(tensor: torch.Tensor) -> int | None:
    return int(tensor.untyped_storage()._cdata) if has_memory(tensor) else None


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


_CHANGED = WeakIdKeyDictionary()  # a specification that is a dataclass has no hash
"""By specification: what its first building has changed, as it was before."""
