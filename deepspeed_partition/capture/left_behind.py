"""What a run without data would leave behind in a program, and what takes it back.

Code keeps masks and tables in attributes, in lists and dicts, in variables of its file and behind ``lru_cache``.
Those of a run without data have no data either, and have numbers among their keys that stand for sizes. So all of
it becomes what it was: neither the model's own code finds any later, nor another recording. Hooks that the code
hangs on modules stay, as transformers 5 does when a model is first called, and so do the flags that tell of them.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from deepspeed_partition.cached_results import CACHE, without_added
from deepspeed_partition.capture.reads_in_code import ReadsInCode
from deepspeed_partition.code_names import LIBRARIES, CodeSearch, forward_of
from deepspeed_partition.generators import members_of

_DEPTH = 3
"""How deep containers and objects within an attribute are looked into."""
_TABLES_OF_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)
_MOST_MEMBERS = 1000
"""Members of a container up to which each is looked into."""


def held_by(model: nn.Module, call: Any, arguments: Any) -> Held:
    """What a model's modules, what the program's code names, and what a call is given hold now.

    Args:
        call: What is run in the place of the model; None: nothing is.
    """
    names = {id(part): ".".join(filter(None, ("self", name))) for name, part in model.named_modules()}
    held = Held(names)
    held.add(model, _DEPTH, "self")
    held.add(arguments, _DEPTH, "the arguments")
    held.add_names_of({type(part): forward_of(part) for part in model.modules()}, call)
    return held


@dataclass(frozen=True, slots=True)
class Left:
    """What a run has left in a container or an object, or in a variable."""

    written: str
    """What it is called."""
    table: Any
    """A container, or the variables among which it is one."""
    key: str | None
    """The variable; None for a container."""
    member: str
    """How a member is called, behind the container."""
    before: Any
    after: Any

    def is_of(self, other: Left) -> bool:
        """Whether another run has left something at the same place."""
        return self.table is other.table and self.key == other.key

    @property
    def now(self) -> Any:
        """What is there now, to be compared."""
        if self.key is not None:
            return id(self.table.get(self.key))
        return [*map(id, self.table.values())] if isinstance(self.table, dict) else [*map(id, self.table)]

    @property
    def members(self) -> dict[Any, Any]:
        """What is there that was not, by how it is called."""
        if self.key is not None:
            return {self.written: self.after}
        if isinstance(self.after, dict):
            before = self.before
            changed = {key: now for key, now in self.after.items() if key not in before or before[key] is not now}
            return {self.written + self.member.format(key): now for key, now in changed.items()}
        before = dict(enumerate(self.before))
        new = [(place, now) for place, now in enumerate(self.after) if before.get(place, self) is not now]
        return {self.written + self.member.format(place): now for place, now in new}

    def is_read(self, reads: ReadsInCode, members: Iterable[str]) -> bool:
        """Whether code reads some of its members."""
        if self.key is not None:
            return reads.has_variable(self.key) or reads.has_attribute(self.key)
        names = re.findall(r"\w+", self.written)
        if self.member == ".{}":
            return any(reads.has_attribute(shown.rpartition(".")[2]) for shown in members)
        keys = reads.keys_of(names[-1])
        return keys is None or any(f"[{key!r}]" in shown for key in keys for shown in members)

    def put_in(self, stand_in: Callable[[Any], Any]) -> None:
        """Leave it there again, with something in the place of each member."""
        if self.key is not None:
            self.table[self.key] = stand_in(self.after)
        elif isinstance(self.after, dict):
            _put_back(self.table, {key: stand_in(each) for key, each in self.after.items()}, flags_stay=False)
        else:
            _put_back(self.table, list(map(stand_in, self.after)), flags_stay=False)


class Held:
    """The contents of modules, containers, objects, variables and caches, as they are when they are added.

    Args:
        names: What modules are called, by their numbers.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._tables: list[tuple[str, Any, str, Any]] = []
        self._of_modules: set[int] = set()
        self._hooks: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = []
        self._variables: list[tuple[str, MutableMapping[str, Any], str, Any]] = []
        self._caches: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self.left: list[Left] = []
        """What was there when all was put back, and was not there before; but for attributes of modules."""

    def add(self, value: Any, depth: int, written: str) -> None:
        """Add what a value holds, if it is a module, a container, a cache or an object of the program's."""
        if isinstance(value, torch.Tensor):
            self._tensors.append((written, value))
        if not depth or id(value) in self._seen or isinstance(value, str | int | float | torch.Tensor | None):
            return
        self._seen[id(value)] = value
        if isinstance(value, CACHE):
            self._caches.append(without_added(value))
        elif isinstance(value, nn.Module):
            written = self._names.get(id(value), written)
            hooks = [table for name, table in vars(value).items() if name in _TABLES_OF_HOOKS]
            weights = [value._parameters, value._buffers, value._modules]
            self._seen.update((id(table), table) for table in hooks)
            self._hooks += [(table, dict(table)) for table in hooks]
            self._of_modules.update(map(id, (vars(value), *weights)))
            self._add_table(vars(value), _DEPTH + 1, written, ".{}")
        elif isinstance(value, tuple):
            self._add_each(_numbered(value), depth, written, "[{}]")
        elif isinstance(value, dict | list | set | deque):
            self._add_table(value, depth, written, "[{!r}]")
        elif isinstance(value, partial):
            self._add_each(_numbered((value.func, value.args, value.keywords)), depth + 1, written, "")
        elif (table := members_of(value)) is not None:
            self._add_table(table, depth, written, ".{}")
        elif callable(value) and is_no_librarys(type(value).__module__) and isinstance(value, Hashable):
            self._add_each(getattr(value, "__dict__", {}).items(), depth, written, ".{}")

    def _add_table(self, table: Any, depth: int, written: str, member: str) -> None:
        self._tables.append((written, table, member, _contents_of(table)))
        self._add_each(table.items() if isinstance(table, dict) else _numbered(table), depth, written, member)

    def _add_each(self, members: Iterable[tuple[Any, Any]], depth: int, written: str, member: str) -> None:
        for key, value in list(islice(members, _MOST_MEMBERS)):
            self.add(value, depth - 1, written + member.format(key))

    def add_names_of(self, methods: Mapping[type, Any], function: Any) -> None:
        """Add the variables that code, and the functions that it calls, read of files, classes and functions."""
        search = CodeSearch(is_no_librarys)
        search.read(function, None)
        for kind, method in methods.items():
            search.read(method, kind)
        for written, cache in search.caches.items():
            self.add(cache, _DEPTH, written)
        for name in search.found.values():
            self._variables.append((name.written, name.table, name.key, name.value))
            self.add(name.value, _DEPTH, name.written)

    def has(self, value: Any) -> bool:
        """Whether an object was there."""
        is_common = value is torch.default_generator or value in torch.cuda.default_generators
        return is_common or id(value) in self._seen

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that were there, but for parameters, with what each is called."""
        seen = {id(each[1]): each for each in self._tensors if not isinstance(each[1], nn.Parameter)}
        return iter(seen.values())

    @cached_property
    def of_storage(self) -> dict[int, str]:
        """What tensors are called that were there, by the memory in which they lie."""
        dense = [each for each in self._tensors if each[1].layout is torch.strided]
        with torch._C.DisableTorchFunction():
            return {tensor.untyped_storage()._cdata: name for name, tensor in reversed(dense)}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let all of it be afterwards what it was."""
        try:
            yield
        finally:
            for drop in self._caches:
                drop()
            self.left = list(self.left_now())
            have_hooks = any(not _is_same(table, before) for table, before in self._hooks)
            for _, table, _, before in self._tables:
                _put_back(table, before, flags_stay=have_hooks)
            for _, table, key, value in self._variables:
                if table.get(key) is not value and not isinstance(value, Iterator):
                    table[key] = value

    def remembered_now(self) -> Callable[[], None]:
        """Remember what is there now; return what puts that back."""
        tables = [(table, _contents_of(table)) for _, table, _, _ in self._tables]
        variables = [(table, key, table[key]) for _, table, key, _ in self._variables if key in table]

        def put() -> None:
            for table, contents in tables:
                _put_back(table, contents, flags_stay=False)
            for table, key, value in variables:
                table[key] = value

        return put

    def left_now(self) -> Iterator[Left]:
        """What is there, and was not there before; but for attributes of modules."""
        for written, table, member, before in self._tables:
            is_same = _is_same(table, before) if isinstance(table, dict) else _are_same(table, before)
            if not is_same and id(table) not in self._of_modules:
                yield Left(written, table, None, member, before, _contents_of(table))
        for written, table, key, value in self._variables:
            if key in table and table[key] is not value:
                yield Left(written, table, key, "", value, table[key])


def _contents_of(table: Any) -> Any:
    """What a container holds now; a copy of it might run code of its class."""
    return dict(table) if isinstance(table, dict) else list(table)


def _numbered(members: Iterable[Any]) -> Iterable[tuple[int, Any]]:
    return enumerate(list(members))


def is_no_librarys(module: str | None) -> bool:
    """Whether a file, by the name of its module, is the program's or an installed model's."""
    package = (module or "").partition(".")[0]
    return package not in LIBRARIES and package != "numpy" and package not in sys.stdlib_module_names


def _put_back(table: Any, before: Any, *, flags_stay: bool) -> None:
    if isinstance(table, dict):
        if flags_stay:
            before = {**before, **{key: value for key, value in table.items() if value is True}}
        # An iterator may have been put back by another one, which gives what was taken from it.
        before = {
            key: table.get(key, value) if isinstance(value, Iterator) else value for key, value in before.items()
        }
        if not _is_same(table, before):
            table.clear()
            table.update(before)
    elif isinstance(table, set):
        if not _are_same(table, before):
            table.clear()
            table.update(before)
    elif not _are_same(table, before):
        table.clear()
        table.extend(before)


def _is_same(table: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    return _are_same(table, before) and _are_same(table.values(), before.values())


def _are_same(members: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    return len(members) == len(before) and all(
        now is was or (type(now) is str and now == was) for now, was in zip(members, before, strict=True)
    )
