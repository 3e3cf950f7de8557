"""What makes values what they were: numbers, lists, tensors, generators, and objects of a program."""

from __future__ import annotations

import functools
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from operator import is_
from types import BuiltinMethodType, MethodType, MethodWrapperType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.cached_results import CACHE, cache_kept
from deepspeed_partition.code_names import SlotsOf
from deepspeed_partition.generators import GENERATORS, generator_state, set_generator_state
from deepspeed_partition.kept_values import (
    copied,
    iterator_kept,
    itself,
    kept_by_another,
    kept_in_place,
    say_of,
    state_of,
    told_of,
)
from deepspeed_partition.profiling.object_members import members_of, owner_of_method
from deepspeed_partition.tensor_values import num_bytes_of, version_of
from deepspeed_partition.tensor_values import put_back as put_values_back

PLAIN = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
"""Types of values that nothing changes in place."""
_DEPTH = 2
"""Objects within objects that are put back and compared, as often as steps need it."""
_DEPTH_MEASURED = 4
"""Those that are put back where layers are measured: what lies deeper is said, if it has changed."""
MOST_MEMBERS = 1000
"""Members of a list or a dict up to which each is compared: of longer ones the length is."""
MOST_BYTES = 2**28
"""Bytes of the largest tensor or array that is copied to be put back: a larger one is data and no state."""
MOST_BYTES_READ = 2**32
"""Bytes of the largest array that is read to see whether it has changed: an array counts no writes."""
STAND_INS = WeakIdKeyDictionary()
"""Copies that stand for tensors while layers are looked at: nothing that is written to them stays."""


def mark(value: Any) -> Any:
    """Return what tells a value from what it is after a change, within a process; to be compared with ``==``."""
    return _mark(value, _DEPTH)


def _mark(value: Any, depth: int, around: tuple[int, ...] = ()) -> Any:
    """What tells a value from what it is after a change, without its numbers where it is a tensor.

    ``around`` are the ``id`` of the containers that it stands in.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    if isinstance(value, list | tuple | dict | set | deque):
        if isinstance(value, set) or len(value) > MOST_MEMBERS or id(value) in around:
            return id(value), len(value)
        around = (*around, id(value))
        if isinstance(value, dict):
            return id(value), {key: _mark(member, depth, around) for key, member in value.items()}
        return id(value), [_mark(member, depth, around) for member in value]
    if (owner := owner_of_method(value)) is not None:
        return id(owner), _mark(owner, depth, around)
    state = state_of(value)
    value = itself(value)
    if state is not None:
        return id(value), state
    table = members_of(value) if depth else None
    if table is None:
        return id(value), None
    return id(value), {key: _mark(member, depth - 1, around) for key, member in table.items()}


class PartialArguments(MutableMapping[str, Any]):
    """What a ``functools.partial`` is made of: its function, its arguments, and by their names those with one."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def _table(self) -> dict[str, Any]:
        return {"func": self._function.func, "args": self._function.args, **self._function.keywords}

    def partial_of(self, values: Iterable[Any]) -> Any:
        """A partial of other values, which come in the same order."""
        function, args, *given = values
        return functools.partial(function, *args, **dict(zip(self._function.keywords, given, strict=True)))

    def __getitem__(self, name: str) -> Any:
        return self._table()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        function, args, *keywords = {**self._table(), name: value}.values()
        named = dict(zip(self._function.keywords, keywords, strict=True))
        self._function.__setstate__((function, args, named, vars(self._function)))

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table())

    def __len__(self) -> int:
        return len(self._table())


Remembered: TypeAlias = Callable[[], Any]
"""Function that makes a value what it was, and returns it."""
Known: TypeAlias = dict[tuple[int, int], Remembered]
"""Such functions by the ``id`` of their values, and by the depth to which these are looked into."""


class Remembering:
    """Makes functions that put values back.

    Args:
        copies: Whether a tensor or an array is copied, to be put back where it is changed in place.
        known: Functions that were made for values at this instant.
        by_others: Whether others stand meanwhile in the place of what cannot be put back itself.
        iterators: Whether they do in the place of iterators, for code that runs as it does.
    """

    def __init__(
        self,
        copies: Callable[[Any], bool],
        known: Known | None = None,
        *,
        by_others: bool = False,
        iterators: bool = False,
    ) -> None:
        self._copies, self._known, self._by_others = copies, {} if known is None else known, by_others
        self._iterators = iterators
        self._depth = _DEPTH_MEASURED if by_others else _DEPTH
        self._name = ""
        self._walked: set[tuple[int, int]] = set()
        """Values that are being looked into, by their ``id`` and the depth."""
        self._meanwhile: dict[Remembered, Any] = {}
        """What stands in the place of a value, by the function that puts it back."""

    @property
    def has_others(self) -> bool:
        """Whether something stands in the place of a value."""
        return bool(self._meanwhile)

    def each(self, values: Mapping[Any, Any], depth: int | None = None) -> dict[Any, Remembered]:
        """Return what makes each value what it is now."""
        found, depth = {}, self._depth if depth is None else depth
        for key, value in values.items():
            if depth == self._depth and isinstance(key, str):
                self._name = key
            found[key] = self._remembered(value, depth)
        return found

    def let_others_stand(self, container: Any, remembered: Mapping[Any, Remembered]) -> None:
        """Put others into the place of some values of a container for the time being."""
        for key, put_back in remembered.items() if self._meanwhile else ():
            if put_back in self._meanwhile:
                with suppress(Exception):  # a container of a class that lets nobody write to it
                    container[key] = self._meanwhile[put_back]

    def _remembered(self, value: Any, depth: int) -> Remembered:
        if type(value) in PLAIN:
            return lambda: value
        key = id(value), depth
        found = self._known.get(key)
        if found is not None:
            return found
        if key in self._walked:  # it holds itself
            return lambda: value
        self._walked.add(key)
        try:
            found = self._known[key] = self._by_another(value, depth) or self._itself(value, depth)
        finally:
            self._walked.discard(key)
        return found

    def _itself(self, value: Any, depth: int) -> Remembered:
        restore = self._restorer(value, depth)
        tell = None if self._by_others else told_of(value, self._name)

        def restored() -> Any:  # it holds the value, so that its id is no other's
            if tell is not None:
                tell()
            restore()
            return value

        return restored

    def _by_another(self, value: Any, depth: int) -> Remembered | None:
        """What returns a value, or another one in its place; None where it stays itself."""
        if type(value) in (dict, list) or isinstance(value, torch.Tensor | np.ndarray):
            return None
        if isinstance(value, tuple):
            return self._made_anew(value, value, depth, getattr(type(value), "_make", type(value)))
        if type(value) is functools.partial:
            arguments = PartialArguments(value)
            return self._made_anew(value, tuple(arguments.values()), depth, arguments.partial_of)
        if owner_of_method(value) is not None:
            method = value.__func__
            return self._made_anew(value, (value.__self__,), depth, lambda owner: MethodType(method, owner[0]))
        is_method = isinstance(value, BuiltinMethodType | MethodWrapperType)
        if is_method and not isinstance(value.__self__, type | ModuleType):
            name = value.__name__  # as of itertools.count().__next__
            return self._made_anew(value, (value.__self__,), depth, lambda owner: getattr(owner[0], name))
        if not self._by_others:
            found = copied(value)
            kept = iterator_kept(value, self._name) if self._iterators and found is None else None
        else:
            found, kept = None, kept_by_another(value, self._name)
        if kept is None:
            return found
        restore = self._restorer(value, depth) if kept.meanwhile is value else _nothing

        def restored() -> Any:
            before = kept.restored()
            restore()
            return before

        if kept.meanwhile is not value:
            self._meanwhile[restored] = kept.meanwhile
        return restored

    def _made_anew(
        self, value: Any, parts: tuple[Any, ...], depth: int, make: Callable[[list[Any]], Any]
    ) -> Remembered:
        """Keep the parts of a value into which nothing can be put: of other parts another value is made."""
        remembered = [self._remembered(part, depth) for part in parts]
        others = [self._meanwhile.get(each, part) for each, part in zip(remembered, parts, strict=True)]

        def restored() -> Any:
            now = [each() for each in remembered]
            return value if all(map(is_, now, parts)) else make(now)

        if not all(map(is_, others, parts)):
            self._meanwhile[restored] = make(others)
        return restored

    def _restorer(self, value: Any, depth: int) -> Callable[[], object]:
        if type(value) in PLAIN:
            return _nothing
        if isinstance(value, GENERATORS):
            state = generator_state(value)
            return lambda: set_generator_state(value, state)
        if isinstance(value, torch.Tensor) and nn.parameter.is_lazy(value):
            return _nothing
        if isinstance(value, torch.Tensor | np.ndarray) and not self._copies(value):
            return self._large_told(value) if self._by_others and value not in STAND_INS else _nothing
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference():
            copy, version = value.detach().clone(), value._version

            def is_same() -> bool:  # batch normalization changes its buffers, and torch does not count that
                is_read = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
                return value._version == version and (not is_read or torch.equal(value, copy))

            return lambda: None if is_same() else _copy_back(value, copy)
        if isinstance(value, np.ndarray):
            array = value.copy()
            return lambda: np.copyto(value, array) if value.flags.writeable else None
        if isinstance(value, list):
            if PLAIN.issuperset(map(type, value)):  # a long list of numbers, as of losses, is copied at once
                numbers = list(value)
                return lambda: _refill_list(value, numbers)
            items = [self._remembered(item, depth) for item in value]
            self.let_others_stand(value, dict(enumerate(items)))
            return lambda: _refill_list(value, [item() for item in items])
        if isinstance(value, dict):
            members = {key: self._remembered(member, depth) for key, member in value.items()}
            self.let_others_stand(value, members)
            return lambda: _refill(value, restored_values(members))
        if isinstance(value, set):
            entries = set(value)
            return lambda: _refill(value, entries)
        if isinstance(value, deque):
            queue = list(value)
            return lambda: _refill_queue(value, queue)
        if isinstance(value, CACHE):
            name, cache = self._name, cache_kept(value)
            return lambda: put_cache_back(name, value, cache)
        in_place = kept_in_place(value)
        if in_place is not None:
            return in_place
        table = members_of(value)
        if table is not None and not depth:
            return self._teller(value, table) if self._by_others else _nothing
        if table is not None:
            inner = self.each(table, depth - 1)
            self.let_others_stand(table, inner)
            return lambda: _refill(table, restored_values(inner))
        return _nothing

    def _large_told(self, value: Any) -> Callable[[], object]:
        """What says whether a tensor or an array has changed that is too large to be copied."""
        name, before = self._name, _mark_of_large(value)

        def tell() -> None:
            if _mark_of_large(value) != before:
                say_of(name, value)("its values, too many to be copied, were changed")

        return tell

    def _teller(self, value: Any, table: Mapping[str, Any]) -> Callable[[], object]:
        """What says whether an object has changed that lies too deep to be put back."""
        name, before = self._name, {key: _mark(member, 0) for key, member in table.items()}

        def tell() -> None:
            if any((id(value), depth) in self._known for depth in range(1, self._depth + 1)):
                return  # another way to it is shorter
            if {key: _mark(member, 0) for key, member in table.items()} != before:
                say_of(name, value)("what it holds was changed")

        return tell


def is_no_data(value: Any) -> bool:
    return (num_bytes_of(value) if isinstance(value, torch.Tensor) else value.nbytes) <= MOST_BYTES


def _mark_of_large(value: Any) -> int | None:
    """What tells whether a large tensor or array was written in place; None where it would take too long."""
    if isinstance(value, torch.Tensor):
        return version_of(value)
    is_read = value.flags.writeable and value.flags.c_contiguous and not isinstance(value, np.memmap)
    if not is_read or value.dtype.hasobject or value.nbytes > MOST_BYTES_READ:
        return None
    return zlib.crc32(value.view(np.uint8).data) if value.nbytes else 0


def restored_values(remembered: Mapping[Any, Remembered]) -> dict[Any, Any]:
    return {key: restored() for key, restored in remembered.items()}


def _nothing() -> None:
    pass


def put_cache_back(name: str, cache: Any, put_back: Callable[[], bool]) -> None:
    if not put_back():
        say_of(name, cache)("its cache, which has a maxsize, has got results")


def _copy_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if tensor.shape != copy.shape or tensor.layout is not torch.strided:
        put_values_back(tensor, copy)
        return
    with torch.no_grad():
        tensor.copy_(copy)


def _refill_list(present: list[Any], items: list[Any]) -> None:
    if len(present) != len(items) or not all(map(is_, present, items)):  # it may refuse to be written to
        present[:] = items


def _refill_queue(queue: deque[Any], items: list[Any]) -> None:
    present = list(queue)
    if len(present) != len(items) or not all(map(is_, present, items)):  # threads may use it
        queue.clear()
        queue.extend(items)


def _refill(container: Any, contents: Any) -> None:
    if isinstance(container, SlotsOf):
        for key in [key for key in container if key not in contents]:
            del container[key]
        for key, value in contents.items():
            if key not in container or container[key] is not value:
                container[key] = value
        return
    if _has_same(container, contents):  # it may refuse to be written to
        return
    container.clear()
    container.update(contents)


def _has_same(container: Any, contents: Any) -> bool:
    """Whether a container has these objects already, in this order."""
    if not isinstance(container, dict):
        return bool(container == contents)
    pairs = zip(container.items(), contents.items(), strict=False)
    return len(container) == len(contents) and all(key is old and now is was for (key, now), (old, was) in pairs)
