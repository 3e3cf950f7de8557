"""Objects of a program, such as a meter, as another process can have them: pickled, and laid upon its own ones.

What cannot be pickled in an object, such as a lock or a lambda, stays what the other process has in that place.
Modules and their weights are known by their names in the layer. What is alike in two layers of one specification
stays, too: it may name the rank or its device.
"""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import queue
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import BuiltinMethodType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from deepspeed_partition.code_names import module_of
from deepspeed_partition.engine.repartition.shared_tensors import are_equal
from deepspeed_partition.generators import GENERATORS, OF_THREADS, generator_state, set_generator_state
from deepspeed_partition.hidden_modules import table_of
from deepspeed_partition.kept_values import MOST_BYTES, Given, numbers_of_count, state_of
from deepspeed_partition.profiling.attributes import PLAIN
from deepspeed_partition.tensor_values import bytes_view, is_computed

HOSTS = frozenset(("lightning", "lightning_fabric", "pytorch_lightning"))
"""Packages whose objects no layer makes."""
_OF_A_RANK = frozenset((*HOSTS, *OF_THREADS, "deepspeed", "deepspeed_partition", "lightning_madpipe"))
"""Packages whose objects each rank has of its own."""
_OF_A_RANK_IN_TORCH = ("torch.cuda", "torch.distributed", "torch.utils.data")
_QUEUES = (queue.Queue, queue.LifoQueue, queue.PriorityQueue)
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_MISSING: Any = object()

Named: TypeAlias = Mapping[tuple[str, str], Any]
"""Modules and tensors of a layer, by ``("module", path)`` and ``("tensor", name)``: the same in each process."""


class NotHereError(Exception):
    """An object has something that cannot be sent, and this process has nothing in its place."""


@dataclass(frozen=True, slots=True)
class Stays:
    """What stands for a value that cannot be sent."""

    kind: str
    state: Any
    """What tells the value from what it is after a change, where that is the same in every process."""
    is_of_a_rank: bool = False
    """Whether each rank has one of its own, such as the engine."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object, or a container of objects, as another process can have it."""

    kind: str
    data: bytes
    stays: tuple[Stays, ...]
    """Parts of the object that cannot be sent to another process."""
    classes: tuple[tuple[str, str], ...]
    """Classes of objects within this one that are defined in a function, as (module, qualified name): another
    process finds them only in an object of its own."""
    before: bytes | None = None
    """Pickled form of the object as it was before a program changed it; None where that is not known."""
    shown: str = ""
    """Name of the attribute that has the object, where a part of the object that cannot be sent has changed; else
    empty."""

    @property
    def needs_another(self) -> bool:
        """Whether a process can have it only where it has one already."""
        return bool(self.stays or self.classes)

    def is_as(self, other: ObjectState | None) -> bool:
        """Whether another process has the same; not where a part of it cannot be told."""
        is_known = all(stay.state is not None or stay.is_of_a_rank for stay in self.stays)
        return is_known and self == other


def object_state(value: Any, named: Named) -> ObjectState | None:
    """Pickle an object; None of what cannot be sent as a whole.

    Args:
        value: An attribute of a module.
        named: The modules and tensors of the layer, which are sent otherwise.
    """
    file = _LimitedBytes()
    pickler = _Pickler(file, named)
    if isinstance(value, nn.Module) or pickler.is_staying(value):
        return None
    try:
        pickler.dump(value)
    except Exception:  # pickling runs code of any class
        return None
    return ObjectState(type(value).__name__, file.getvalue(), tuple(pickler.stays), tuple(pickler.classes))


def loaded(state: ObjectState, named: Named) -> Any:
    """Make another object of a state, all of which can be sent.

    Raises:
        NotHereError: it cannot.
    """
    value = _unpickled(state.data, named, {})
    _Laying(state).lay(value)
    return value


def laid(state: ObjectState, present: Mapping[str, Any], name: str, named: Named) -> Any:
    """Give an attribute the state that it has on another rank: an object that is there already gets the contents.

    Args:
        state: The state there.
        present: The attributes here.
        name: The attribute.
        named: The modules and tensors of the layer here.

    Returns:
        What the attribute is to be.

    Raises:
        NotHereError: this process lacks a part of it; nothing has changed.
    """
    here, classes = present.get(name, _MISSING), dict[tuple[str, str], type]()
    if state.classes and here is not _MISSING:
        pickler = _Pickler(_LimitedBytes(), named)
        pickler.dump(here)
        classes = pickler.classes
    laying = _Laying(state)
    before = _MISSING if state.before is None else _unpickled(state.before, named, classes)
    value = laying.lay(_unpickled(state.data, named, classes), here, before)
    for do in laying.to_do:
        do()
    return value


class _LimitedBytes(io.BytesIO):
    """Bytes of an object that is no large data."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise ValueError("it is too large")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, named: Named) -> None:
        super().__init__(file, protocol=4)
        self._names = {id(value): place for place, value in named.items()}
        self.stays: list[Stays] = []
        self.classes: dict[tuple[str, str], type] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return None
        if isinstance(value, type) and not _stands_in_module(value):
            place = module_of(value), value.__qualname__
            if self.classes.setdefault(place, value) is not value:
                raise pickle.PicklingError(f"two classes are called {value.__qualname__}")
            return "class", place
        return self._names.get(id(value))

    def is_staying(self, value: Any) -> bool:
        """Whether a value cannot be sent, by its class."""
        kind = type(value)
        module = module_of(kind)
        if isinstance(value, FunctionType):
            return not _stands_in_module(value)
        if isinstance(value, _METHODS):  # what it belongs to is another attribute, or within one
            return not isinstance(value.__self__, type | ModuleType | None)
        if isinstance(value, torch.Tensor):
            return kind not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided or value.is_meta
        if kind is itertools.count:
            return numbers_of_count(value) is None
        if kind in _QUEUES:
            return False
        is_iterator = isinstance(value, Iterator) and module in ("builtins", "itertools")
        return kind is Given or is_iterator or _is_of_a_rank(value) or isinstance(value, nn.Module | ModuleType)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type):
            return NotImplemented
        if self.is_staying(value):
            return self._staying(value)
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return _tensor_of, _parts_of(value)
        if isinstance(value, torch.device):
            return _device_of, (value.type,)
        if kind is itertools.count:
            return itertools.count, numbers_of_count(value)
        if kind in _QUEUES:
            return _queue_of, (kind, list(value.queue))
        if kind is torch.Generator:
            return _generator_of, (value.get_state().numpy().tobytes(),)
        if isinstance(value, FunctionType):
            return NotImplemented
        try:
            return copyreg.dispatch_table.get(kind, _reduced)(value)
        except Exception:  # a lock, a file, whatever its class does
            return self._staying(value)

    def _staying(self, value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        self.stays.append(Stays(type(value).__name__, state_of(value), _is_of_a_rank(value)))
        return Stays, (self.stays[-1].kind, self.stays[-1].state)


def _is_of_a_rank(value: Any) -> bool:
    module = module_of(type(value))
    return module.partition(".")[0] in _OF_A_RANK or module.startswith(_OF_A_RANK_IN_TORCH)


def _reduced(value: Any) -> Any:
    return value.__reduce_ex__(4)


def _stands_in_module(value: Any) -> bool:
    """Whether a class or a function is what its module calls so: each process finds it there."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "builtins")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, named: Named, classes: Mapping[tuple[str, str], type]) -> None:
        super().__init__(file)
        self._named, self._classes = named, classes

    def persistent_load(self, place: Any) -> Any:
        what, name = place
        return self._classes[name] if what == "class" else self._named[place]


def _unpickled(data: bytes, named: Named, classes: Mapping[tuple[str, str], type]) -> Any:
    try:
        return _Unpickler(io.BytesIO(data), named, classes).load()
    except Exception as error:  # it runs code of any class
        raise NotHereError(f"{type(error).__name__}: {error}") from error


def _parts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.nbytes > MOST_BYTES:
        raise ValueError("it is too large")
    elements = bytes_view(tensor.cpu()).numpy().tobytes()
    kind, has_gradient = type(tensor), tensor.requires_grad and not is_computed(tensor)
    return kind, tensor.dtype, tuple(tensor.shape), elements, tensor.device.type, has_gradient


def _tensor_of(
    kind: type, dtype: torch.dtype, shape: tuple[int, ...], elements: bytes, device_type: str, has_gradient: bool
) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(elements), dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape).to(_device_of(device_type))
    return nn.Parameter(tensor, has_gradient) if kind is nn.Parameter else tensor.requires_grad_(has_gradient)


def _device_of(device_type: str) -> torch.device:
    """A device of this rank, where another one had its own."""
    device = torch.device(get_accelerator().current_device_name())
    return device if device.type == device_type else torch.device(device_type)


def _queue_of(kind: Any, items: list[Any]) -> Any:
    made = kind()
    made.queue.extend(items)
    made.unfinished_tasks = len(items)
    return made


def _generator_of(state: bytes) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


class _Laying:
    """Lays new objects upon present ones, which others may have, too: they get the contents, in ``to_do``.

    Where an object from before any change is given, what is as in that one stays as it is present.
    """

    def __init__(self, state: ObjectState) -> None:
        self.to_do: list[Callable[[], object]] = []
        self._may_stay = bool(state.stays)
        self._laid: dict[int, Any] = {}
        """What stands for each new object, by the ``id`` of that."""
        self._taken: set[int] = set()

    def lay(self, new: Any, present: Any = _MISSING, before: Any = _MISSING) -> Any:
        """Return what is to stand in the place of ``present``.

        Raises:
            NotHereError: it has something that cannot be sent, and nothing is present in its place.
        """
        if isinstance(new, Stays):
            if present is _MISSING:
                raise NotHereError(f"a {new.kind}")
            return present
        if type(new) in PLAIN or isinstance(new, type | nn.Module):
            return self._unless_alike(new, present, before)
        if id(new) in self._laid:
            return self._laid[id(new)]
        if isinstance(new, tuple):
            items = self._items(new, present, before)
            if all(item is old for item, old in zip(items, new, strict=True)):
                return new
            return getattr(type(new), "_make", type(new))(items)
        if not _is_filled(new):
            return self._unless_alike(new, present, before)
        is_same_kind = type(present) is type(new) and id(present) not in self._taken
        if isinstance(new, deque) and is_same_kind:
            is_same_kind = present.maxlen == new.maxlen
        if not is_same_kind:
            present = before = _MISSING
        elif type(before) is not type(new):
            before = _MISSING
        target = self._laid[id(new)] = new if present is _MISSING else present
        self._taken.add(id(target))
        self._fill(target, new, present, before)
        return target

    def _fill(self, target: Any, new: Any, present: Any, before: Any) -> None:
        if isinstance(new, GENERATORS):
            state = generator_state(new)
            if before is _MISSING or not _are_alike(state, generator_state(before)):
                self.to_do.append(lambda: set_generator_state(target, state))
            return
        if type(new) in _QUEUES:
            old, was = (each if each is _MISSING else list(each.queue) for each in (present, before))
            items = self._items(list(new.queue), old, was)
            self.to_do.append(lambda: fill_queue(target, items))
            return
        if isinstance(new, list | deque):
            items = self._items(new, present, before)
            self.to_do.append(lambda: _fill_sequence(target, items))
        elif isinstance(new, set):
            found = {self.lay(item) for item in new}
            if before is _MISSING or found != before:
                self.to_do.append(lambda: (target.clear(), target.update(found)))
        elif isinstance(new, dict):
            members = self._members(new, present, before)
            self.to_do.append(lambda: _fill_dict(target, members))
        if not _is_container(new):
            tables = [each if each is _MISSING else table_of(each) for each in (new, present, before)]
            attributes = self._members(*tables)
            self.to_do.append(lambda: _fill_table(table_of(target), attributes))

    def _items(self, new: Any, present: Any, before: Any) -> list[Any]:
        others = list(present) if type(present) is type(new) else []
        was = list(before) if type(before) is type(new) and len(before) == len(others) == len(new) else []
        if PLAIN.issuperset(map(type, new)):  # a long list of numbers, as of losses, is copied at once
            return others if was and list(new) == was else list(new)
        pairs = itertools.zip_longest(new, others[: len(new)], was, fillvalue=_MISSING)
        return [self.lay(*pair) for pair in pairs]

    def _members(self, new: Mapping[Any, Any], present: Any, before: Any) -> dict[Any, Any]:
        present, known = ({} if each is _MISSING else each for each in (present, before))
        members = {
            key: self.lay(value, present.get(key, _MISSING), known.get(key, _MISSING))
            for key, value in new.items()
        }
        if before is not _MISSING:
            members.update({key: value for key, value in present.items() if key not in known and key not in new})
        return members

    def _unless_alike(self, new: Any, present: Any, before: Any) -> Any:
        if are_equal(new, present):
            return present
        is_parameter = isinstance(new, nn.Parameter) and type(present) is type(new) and present.shape == new.shape
        if present is _MISSING or before is _MISSING or not _are_alike(new, before):
            if self._may_stay and type(new) not in PLAIN and not isinstance(new, type | nn.Module):
                inner = object_state(new, {})
                if inner is not None and any(each.kind == Stays.__name__ for each in inner.stays):
                    raise NotHereError(f"a {type(new).__name__}, of which a part stays")
            if is_parameter and present is not new and present.dtype == new.dtype:  # which others may have, too
                self.to_do.append(lambda: present.data.copy_(new.data))
                return present
            return new
        return present


def _is_container(value: Any) -> bool:
    return type(value) in (list, dict, set, OrderedDict, deque)


def _is_filled(value: Any) -> bool:
    """Whether a present object can get all that makes this one: it has nothing beyond contents and attributes."""
    if isinstance(value, GENERATORS) or type(value) in _QUEUES or _is_container(value):
        return True
    if isinstance(value, torch.Tensor | numpy.ndarray | FunctionType):
        return False
    if isinstance(value, dict | list | set | deque) and not hasattr(value, "__dict__"):
        return True
    try:
        function, arguments, *_ = value.__reduce_ex__(4)
    except Exception:  # whatever its class does
        return False
    is_new = function is copyreg.__newobj__ and len(arguments) == 1  # type: ignore[attr-defined]
    return is_new or (function is type(value) and not arguments)  # as of a SimpleNamespace


def _are_alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if one is other:
        return True
    if type(one) in PLAIN:
        return bool(one == other)
    first, second = (object_state(each, {}) for each in (one, other))
    return first is not None and second is not None and first.data == second.data


def _fill_sequence(target: Any, items: list[Any]) -> None:
    present = list(target)
    if len(present) != len(items) or any(old is not new for old, new in zip(present, items, strict=True)):
        target.clear()
        target.extend(items)


def _fill_dict(target: Any, members: dict[Any, Any]) -> None:
    kind: Any = OrderedDict if isinstance(target, OrderedDict) else dict  # a Counter's update() adds
    kind.clear(target)
    for key, value in members.items():
        kind.__setitem__(target, key, value)


def _fill_table(table: Any, members: Mapping[str, Any]) -> None:
    for key in [key for key in table if key not in members]:
        del table[key]
    for key, value in members.items():
        if key not in table or table[key] is not value:
            table[key] = value


def fill_queue(target: Any, items: Iterable[Any]) -> None:
    """Let a queue have these items."""
    with target.mutex:
        target.queue.clear()
        target.queue.extend(items)
        target.unfinished_tasks = len(target.queue)
        target.not_empty.notify_all()
