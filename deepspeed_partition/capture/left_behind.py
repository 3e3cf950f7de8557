"""What a run without data would leave behind in a program, and what takes it back.

Code keeps masks and tables in attributes, in lists and dicts, in variables of its file and behind ``lru_cache``.
Those of a run without data have no data either, and have numbers among their keys that stand for sizes. So all of
it becomes what it was: neither the model's own code finds any later, nor another recording. Hooks that the code
hangs on modules stay, as transformers 5 does when a model is first called, and so do the flags that tell of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed_partition.cached_results import CACHE, without_added
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
    held = Held()
    held.add((model, arguments), _DEPTH + 1)
    held.add_names_of({type(part): forward_of(part) for part in model.modules()}, call)
    return held


class Held:
    """The contents of modules, containers, objects, variables and caches, as they are when they are added."""

    def __init__(self) -> None:
        self._tables: list[tuple[Any, Any]] = []
        self._hooks: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = []
        self._variables: list[tuple[MutableMapping[str, Any], str, Any]] = []
        self._caches: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}

    def add(self, value: Any, depth: int) -> None:
        """Add what a value holds, if it is a module, a container, a cache or an object of the program's."""
        if not depth or id(value) in self._seen or isinstance(value, str | int | float | torch.Tensor | None):
            return
        self._seen[id(value)] = value
        if isinstance(value, CACHE):
            self._caches.append(without_added(value))
        elif isinstance(value, nn.Module):
            hooks = [table for name, table in vars(value).items() if name in _TABLES_OF_HOOKS]
            self._seen.update((id(table), table) for table in hooks)
            self._hooks += [(table, dict(table)) for table in hooks]
            self._add_table(vars(value), _DEPTH + 1)
        elif isinstance(value, tuple):
            self._add_each(value, depth)
        elif isinstance(value, dict | list | set | deque):
            self._add_table(value, depth)
        elif isinstance(value, partial):
            self._add_each((value.func, value.args, value.keywords), depth + 1)
        elif (table := members_of(value)) is not None:
            self._add_table(table, depth)
        elif callable(value) and is_no_librarys(type(value).__module__) and isinstance(value, Hashable):
            self._add_each(getattr(value, "__dict__", {}).values(), depth)

    def _add_table(self, table: Any, depth: int) -> None:
        before = dict(table) if isinstance(table, dict) else list(table)
        self._tables.append((table, before))
        self._add_each(table.values() if isinstance(table, dict) else table, depth)

    def _add_each(self, members: Iterable[Any], depth: int) -> None:
        for member in list(members)[:_MOST_MEMBERS]:
            self.add(member, depth - 1)

    def add_names_of(self, methods: Mapping[type, Any], function: Any) -> None:
        """Add the variables that code, and the functions that it calls, read of files, classes and functions."""
        search = CodeSearch(is_no_librarys)
        search.read(function, None)
        for kind, method in methods.items():
            search.read(method, kind)
        for cache in search.caches.values():
            self.add(cache, _DEPTH)
        for name in search.found.values():
            self._variables.append((name.table, name.key, name.value))
            self.add(name.value, _DEPTH)

    def has(self, value: Any) -> bool:
        """Whether an object was there."""
        is_common = value is torch.default_generator or value in torch.cuda.default_generators
        return is_common or id(value) in self._seen

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Let all of it be afterwards what it was."""
        try:
            yield
        finally:
            for drop in self._caches:
                drop()
            have_hooks = any(not _is_same(table, before) for table, before in self._hooks)
            for table, before in self._tables:
                _put_back(table, before, flags_stay=have_hooks)
            for table, key, value in self._variables:
                if table.get(key) is not value and not isinstance(value, Iterator):
                    table[key] = value


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
