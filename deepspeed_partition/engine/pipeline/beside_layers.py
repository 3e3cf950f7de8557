"""What layers name beside their weights and outputs: globals, variables around them, objects that several have.

A layer can leave something there for another one: a skip in a dictionary, a list, a global. Where the two run in
stages of their own, perhaps on other ranks, nothing carries it. The layer that wants it then meets an error of its
own, which is told here in a sentence with both layers, or it does without in silence, which the first forward of
each stage tells: what its layers change that layers of other stages have, too.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from io import IOBase
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.cached_results import CACHE, may_differ
from deepspeed_partition.code_names import (
    LIBRARIES,
    CodeSearch,
    Name,
    forward_of,
    function_of,
    is_installed,
    is_librarys,
    module_of,
)
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import GENERATORS, members_of
from deepspeed_partition.hidden_modules import table_of
from deepspeed_partition.layer_calls import original_of
from deepspeed_partition.pipeline_attributes import is_pipeline_module, modules_of_program, names_of_program
from deepspeed_partition.profiling.attributes import attributes_of
from deepspeed_partition.tensor_values import plain_numbers

DEPTH = 3
"""Depth, in containers and objects, to which a value is looked at."""
MOST_MEMBERS = 1000
"""Most members of a list, dict or set whose values are looked at: of longer ones the length is. Of tensors with
more numbers sums are compared."""
MOST_NUMBERS = 2**28
"""Most numbers of a tensor or an array that are summed."""
_OF_HOSTS = frozenset(LIBRARIES) - {"torch"}
"""Packages whose objects each rank has of its own."""
MISSED = (LookupError, AttributeError, TypeError)
"""What a layer raises that does not find what another one should have left."""
HAND_IT_ON = (
    "make one layer of both and of all between them, such as an nn.Sequential, or let the layers hand it on: "
    "`return x, skip`"
)


class HandedOverError(RuntimeError):
    """A layer wants something that a layer of another stage leaves beside its output."""


class Thing(NamedTuple):
    """Something that a layer's code can reach beside its weights."""

    written: str
    """How the layer calls it."""
    value: Callable[[], Any]
    """Gives what it is now."""


# What layers can reach


def modules_of(function: Any) -> list[nn.Module]:
    """The module of a layer, also of a tied one that a function runs."""
    parts = function.args if isinstance(function, functools.partial) else (function,)
    return [part for part in parts if isinstance(part, nn.Module)][:1]


def names_beside(function: Any) -> list[Name]:
    """The names of data that the code of a layer reads: globals, attributes of classes, variables around it.

    Args:
        function: A layer: a module, a function, or a ``LayerSpec``, which need not be built.
    """
    return [name for name in _code_of(original_of(function)).found.values() if _is_data(name.value)]


def differing_caches(function: Any) -> dict[str, Any]:
    """The functions with a cache that a layer calls, and that may give another result another time, by name."""
    function, found = original_of(function), {}
    parts = [part for module in modules_of(function) for part in module.modules()]
    for written, cached in _code_of(function).caches.items():
        kind = next((type(part) for part in parts if _has_member(part, cached)), None)
        own = CodeSearch(lambda module: not is_installed(module))
        own.read(cached, kind)
        if may_differ(own.functions, [name.value for name in own.found.values()]):
            found[written] = cached
    return found


def _has_member(part: nn.Module, value: Any) -> bool:
    """Whether a module, or its class, has a value as an attribute."""
    return any(each is value for table in (part, *type(part).__mro__) for each in list(vars(table).values()))


def _code_of(function: Any) -> CodeSearch:
    """The code of a layer, and what it names."""
    kind = _kind_of(function)
    own = "" if kind is None or is_librarys(kind) else (kind.__module__ or "").partition(".")[0]

    def is_of_program(module: str | None) -> bool:
        return (module or "").partition(".")[0] == own or not is_installed(module)

    search = CodeSearch(is_of_program)
    if isinstance(function, LayerSpec):
        search.read(getattr(kind, "forward", None), kind)
    for module in modules_of(function):
        for part in module.modules():
            search.read(forward_of(part), type(part))
            for value in attributes_of(part).values():
                if isinstance(value, FunctionType | CACHE):
                    search.read(value, None)
    parts = (function.func, *function.args) if isinstance(function, functools.partial) else (function,)
    for each in parts:
        if not isinstance(each, nn.Module | LayerSpec):
            _read_called(each, search)
    return search


def _read_called(function: Any, search: CodeSearch) -> None:
    """Read the code of what is called: a function, a method, or an object whose class says what a call does."""
    if isinstance(function, MethodType):
        search.read(function, type(function.__self__))
    elif function_of(function) is None and callable(function) and not isinstance(function, type):
        search.read(type(function).__call__, type(function))
    else:
        search.read(function, None)


class Held(NamedTuple):
    """What something that is called, and is no module, holds itself."""

    owner: Any
    written: str
    """How members of ``owner`` are called, with ``{key}`` for the name of each."""
    table: MutableMapping[Any, Any]
    names: frozenset[str] | None = None
    """The members that count; None: all of them."""

    def members(self) -> dict[Any, Any]:
        """Return what ``owner`` holds, by name, but for modules and objects of DeepSpeed, Lightning or ours."""
        is_module = isinstance(self.owner, nn.Module) and self.table is vars(self.owner)
        return {
            key: value
            for key, value in list((attributes_of(self.owner) if is_module else self.table).items())
            if (self.names is None or key in self.names)
            and not isinstance(value, nn.Module | ModuleType)
            and module_of(type(value)).partition(".")[0] not in _OF_HOSTS
        }


def held_by(function: Any) -> list[Held]:
    """What a layer or a loss function holds that is called, and is no module; and what it calls by name.

    That is: the attributes of an object, of what a method belongs to, and of a function; the arguments of a
    partial; the items of a dict, a list or a deque.
    """
    function, found = original_of(function), list[Held]()
    _add_held(function, found)
    search = _code_of(function)
    for each in search.functions:
        found.append(Held(each, f"{each.__name__}.{{key}}", vars(each)))
    for name in search.found.values():
        value = name.value
        if callable(value) and not isinstance(value, type) and not is_installed(module_of(type(value))):
            _add_held(value, found, f"{name.written}.{{key}}")
    return list({id(held.table) if isinstance(held.table, dict) else id(held): held for held in found}.values())


def _add_held(function: Any, found: list[Held], written: str = "its {key}") -> None:
    function = original_of(function)
    if isinstance(function, functools.partial):
        found.append(Held(function, "its argument {key}", ArgumentsOf(function)))
        for each in (function.func, *function.args, *function.keywords.values()):
            if isinstance(each, functools.partial | MethodType | FunctionType):
                _add_held(each, found)
        return
    holder = function.__self__ if isinstance(function, MethodType) else function
    if isinstance(holder, nn.Module) and holder is not function:
        parts = list(holder.modules())
        if is_pipeline_module(holder):  # whose layers, and DeepSpeed's own attributes, are no method's
            parts = modules_of_program(holder)
            names = names_of_program(type(holder), function)
            found += [Held(holder, written, vars(holder), names), Held(holder, written, holder._buffers)]
        for part in parts:
            found += [Held(part, written, vars(part)), Held(part, written, part._buffers)]
    if not callable(function) or isinstance(holder, nn.Module | ModuleType | type | LayerSpec):
        return
    is_function = isinstance(holder, FunctionType)
    if is_librarys(holder if is_function else type(holder)):
        return
    found.append(Held(holder, written, vars(holder) if is_function else table_of(holder)))
    if isinstance(holder, dict):
        found.append(Held(holder, written, holder))
    elif isinstance(holder, list | deque):
        found.append(Held(holder, "its item {key}", ItemsOf(holder)))
    wrapped = vars(holder).get("__wrapped__") if is_function else None
    if wrapped is not None:
        _add_held(wrapped, found)


class ArgumentsOf(MutableMapping[Any, Any]):
    """The arguments of a ``functools.partial``, by their places, and by their names those that have one."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def _table(self) -> dict[Any, Any]:
        return {**dict(enumerate(self._function.args)), **self._function.keywords}

    def __getitem__(self, key: Any) -> Any:
        return self._table()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        table = {**self._table(), key: value}
        args = tuple(table.pop(place) for place in range(len(self._function.args)))
        self._function.__setstate__((self._function.func, args, table, vars(self._function)))

    def __delitem__(self, key: Any) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


class ItemsOf(MutableMapping[Any, Any]):
    """The items of a list or a deque by their places. Without one, those behind it are gone, too."""

    def __init__(self, items: list[Any] | deque[Any]) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        if key not in range(len(self._items)):
            raise KeyError(key)
        return self._items[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == len(self._items):
            self._items.append(value)
        else:
            self._items[key] = value

    def __delitem__(self, key: Any) -> None:
        while len(self._items) > key:
            self._items.pop()

    def __iter__(self) -> Iterator[Any]:
        return iter(range(len(self._items)))

    def __len__(self) -> int:
        return len(self._items)


def _kind_of(function: Any) -> Any:
    if isinstance(function, LayerSpec):
        return function.typename if isinstance(function.typename, type) else None
    return next((module.__class__ for module in modules_of(function)), None)


def _is_data(value: Any) -> bool:
    return not isinstance(value, (nn.Module, type, FunctionType, *GENERATORS)) and not callable(value)


def things_of(function: Any) -> dict[object, Thing]:
    """What a layer can reach that others may have, too, by what is the same for all that have it."""
    function = original_of(function)
    found: dict[object, Thing] = {}
    for held in held_by(function):
        for key, value in held.members().items():
            found[id(held.owner), key] = Thing(
                held.written.format(key=key), functools.partial(held.table.get, key)
            )
            _add_containers(value, held.written.format(key=key), DEPTH, found)
    for name in names_beside(function):
        table, key = name.table, name.key
        found[name.owner, key] = Thing(name.written, functools.partial(table.get, key))
        _add_containers(name.value, name.written, DEPTH, found)
    if isinstance(function, LayerSpec):
        arguments = {**dict(enumerate(function.module_args)), **function.module_kwargs}
        for key, value in arguments.items():
            _add_containers(value, f"its argument {key}", DEPTH, found)
    for module in modules_of(function):
        for path, part in module.named_modules():
            for key, value in attributes_of(part).items():
                _add_containers(value, f"its {path}.{key}".replace(" .", " "), DEPTH, found)
    return found


def _add_containers(value: Any, written: str, depth: int, found: dict[object, Thing]) -> None:
    if isinstance(value, nn.Parameter | nn.Module | LayerSpec) or id(value) in found:
        return
    members: Mapping[Any, Any] = {}
    if isinstance(value, dict):
        members = value
    elif isinstance(value, list | tuple | deque):
        members = dict(enumerate(value))
    elif not isinstance(value, torch.Tensor | np.ndarray | set):
        table = members_of(value)
        if table is None:
            return
        members = table
    if not isinstance(value, tuple):
        found[id(value)] = Thing(written, lambda: value)
    if depth and len(members) <= MOST_MEMBERS:
        for key, member in list(members.items()):
            _add_containers(member, f"{written}[{key!r}]", depth - 1, found)


# What values are


def leaves(value: Any, depth: int = DEPTH) -> Iterator[Any]:
    """The numbers, lengths and strings in a value, and of large tensors sums; what can be compared later."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_meta and value.numel() <= MOST_NUMBERS:
            yield from _numbers_of(value.detach())
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc" and value.size <= MOST_NUMBERS:
            yield from _numbers_of(value)
    elif value is None:
        yield "None"
    elif isinstance(value, numbers.Number | str):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | deque | dict):
        yield len(value)
        if depth and len(value) <= MOST_MEMBERS and not isinstance(value, set | frozenset):
            for member in list(value.values()) if isinstance(value, dict) else list(value):
                yield from leaves(member, depth - 1)
    elif isinstance(value, IOBase):
        with suppress(OSError, ValueError):  # a pipe, or closed
            yield value.tell() if value.writable() else 0
    elif depth:
        for member in list((members_of(value) or {}).values()):
            yield from leaves(member, depth - 1)


def _numbers_of(values: Any) -> list[Any]:
    if isinstance(values, torch.Tensor):
        values = plain_numbers(values)
        size, are_signed = values.numel(), values.dtype.is_signed
    else:
        size, are_signed = values.size, True
    if size <= MOST_MEMBERS:
        found = values.flatten().tolist()
        return found if isinstance(found, list) else [found]
    if isinstance(values, torch.Tensor):
        total = float(values.sum(dtype=torch.float64))
        # Torch has no absolute values of types that are never negative: truth values and unsigned integers.
        return [size, total, float(values.abs().sum(dtype=torch.float64)) if are_signed else total]
    return [size, float(np.sum(np.real(values), dtype=float)), float(np.sum(np.abs(values), dtype=float))]


def are_same(values: Sequence[Any], others: Sequence[Any] | None) -> bool:
    """Whether two values, of which :func:`leaves` has told, are the same but for the last digits of numbers."""
    return others is not None and len(values) == len(others) and all(map(_is_same, values, others))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        # A recomputed number may differ in its last digits.
        return math.isclose(value, other, rel_tol=1e-5) or (math.isnan(value) and math.isnan(other))
    return bool(value == other)


# What layers of several stages have


class SharedThings:
    """What layers of different stages can reach beside their outputs.

    Args:
        layers: All layers of the model, those of other ranks perhaps not built.
        stage_of: The stage of each.
    """

    def __init__(self, layers: Sequence[Any], stage_of: Sequence[int]) -> None:
        self._layers, self._stage_of = layers, stage_of
        holders: dict[object, dict[int, Thing]] = {}
        for place, layer in enumerate(layers):
            for key, thing in things_of(layer).items():
                holders.setdefault(key, {})[place] = thing
        self._shared = [each for each in holders.values() if len({stage_of[place] for place in each}) > 1]

    @contextmanager
    def told(self, stage: int) -> Iterator[None]:
        """Say once what the layers of a stage change meanwhile that layers of other stages have, too."""
        here = [each for each in self._shared if any(self._stage_of[place] == stage for place in each)]
        before = [self._values(each) for each in here]
        yield
        for holders, values in zip(here, before, strict=True):
            if not are_same(self._values(holders), values):
                self._tell(stage, holders)

    @staticmethod
    def _values(holders: Mapping[int, Thing]) -> list[Any]:
        return list(leaves(next(iter(holders.values())).value()))

    def _tell(self, stage: int, holders: Mapping[int, Thing]) -> None:
        givers = [place for place in holders if self._stage_of[place] == stage]
        others = [place for place in holders if self._stage_of[place] != stage]
        written = holders[givers[0]].written
        warn_once(
            f"handed over/{self._in_words(givers)}/{self._in_words(others)}",
            f"{self._in_words(givers)}, in stage {stage}, changes {written} while it runs, which "
            f"{self._in_words(others)} can reach, too, in other stages: they find nothing there, or the value of "
            f"another micro-batch. If they compute with it, {HAND_IT_ON}. For a cache, or a counter "
            "that no output depends on, nothing differs",
        )

    def explained(self, error: Exception, stage: int) -> HandedOverError | None:
        """Return a sentence in the place of an error of a layer that misses what another one leaves; or None."""
        taker = self._raised_by(error, stage)
        if taker is None:
            return None
        givers: dict[int, Thing] = {}
        for holders in self._shared:
            if taker in holders and _may_be_missed(error, holders[taker].value()):
                others = {p: thing for p, thing in holders.items() if self._stage_of[p] != stage}
                givers = givers or dict.fromkeys(others, holders[taker])
        if not givers:
            return None
        before = [place for place in givers if place < taker] or list(givers)
        return HandedOverError(
            f"{self._in_words([taker])} raises {type(error).__name__}: {error}. It runs in stage {stage} and can "
            f"reach {givers[before[0]].written} beside its input, as {self._in_words(before)} of another stage "
            "can, and nothing goes from stage to stage but what layers return. If the one leaves there what the "
            f"other takes, such as a skip, {HAND_IT_ON}"
        )

    def _raised_by(self, error: Exception, stage: int) -> int | None:
        """The layer of a stage in which an error was raised."""
        own = [place for place, of in enumerate(self._stage_of) if of == stage]
        parts = {id(part): place for place in own for m in modules_of(self._layers[place]) for part in m.modules()}
        codes = {getattr(self._layers[place], "__code__", None): place for place in own}
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            found = parts.get(id(frame.f_locals.get("self")), codes.get(frame.f_code))
            if found is not None:
                return found
            trace = trace.tb_next
        return None

    def _in_words(self, places: Sequence[int]) -> str:
        named = [f"layer {place} ({name_of(self._layers[place])})" for place in places[:3]]
        return " and ".join(named) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def name_of(layer: Any) -> str:
    """The name of a layer's class, or of its function."""
    kind = _kind_of(layer)
    return str(getattr(layer if kind is None else kind, "__name__", type(layer).__name__))


def _may_be_missed(error: Exception, value: Any) -> bool:
    """Whether an error can come from what is not in a value."""
    if isinstance(error, KeyError):
        return isinstance(value, dict) and not (error.args and _has(value, error.args[0]))
    if isinstance(error, IndexError):
        return isinstance(value, list | deque)
    if isinstance(error, AttributeError):
        return getattr(error, "obj", value) is value or value is None
    return isinstance(value, dict | list | deque) or value is None


def _has(value: dict[Any, Any], key: Any) -> bool:
    try:
        return key in value
    except TypeError:
        return False
