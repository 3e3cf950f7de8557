"""Objects of a program's own that its steps reach, such as a meter, and the tables of their attributes.

They are looked for in attributes of modules, in globals and in other objects, also in lists, tuples, dicts and
deques, behind bound methods and ``functools.partial``. Classes of torch, of the hosts and of Python itself are
left out, but for those that only hold attributes (``SimpleNamespace``). Functions and classes of the program count
for the attributes that are set on them.
"""

from __future__ import annotations

import gc
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from io import IOBase
from itertools import islice
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import numpy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from deepspeed_partition.cached_results import CACHE
from deepspeed_partition.capture.draws import Rewindable
from deepspeed_partition.code_names import (
    LIBRARIES,
    ClassData,
    SlotsOf,
    attribute_of,
    is_installed,
    is_librarys,
    module_of,
    slots_of,
)
from deepspeed_partition.generators import GENERATORS

MOST_OBJECTS = 300
"""Objects that are followed, the nearest ones."""
MOST_MEMBERS = 200
"""Items of a container up to which objects are looked for in it, the first ones."""
MOST_VISITED = 3000
"""Containers and objects that are looked through for objects."""
_PLAIN = frozenset((bool, bytes, complex, float, int, str, NoneType))
_HOLDERS = (SimpleNamespace, UserDict, UserList)
_OTHERS = (
    type, ModuleType, nn.Module, Tensor, numpy.ndarray, IOBase, Dataset, Sampler, DataLoader, *GENERATORS
)  # fmt: skip
"""What is no object of a step: loading, which goes on beside it on each rank, changes data and their order."""


class ReachedObjects:
    """The objects that are reached from some values.

    Args:
        roots: Values with their names, which are to be the same on all ranks.
        apart: Identities of objects that are followed elsewhere.
        note_code: Is given each class of an object, and each function.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        apart: Iterable[int] = (),
        note_code: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.by_name: dict[str, Any] = {}
        self.files: dict[str, Any] = {}
        """Files that are open for writing, and databases, by name."""
        self.left_out: str | None = None
        """The name of the first value that was not looked at, because there are so many."""
        self._seen, self._note_code = set(apart), note_code
        todo = deque((name, value) for name, value in roots if type(value) not in _PLAIN)
        num_visited = 0
        while todo:  # the nearest ones first
            name, value = todo.popleft()
            if id(value) in self._seen:
                continue
            if len(self.by_name) >= MOST_OBJECTS or num_visited >= MOST_VISITED:
                self.left_out = name
                break
            children = self._children(name, value)
            if children is not None:
                num_visited += 1
                self._seen.add(id(value))
                todo.extend(children)

    def _note_file(self, name: str, value: Any) -> None:
        shown = (sys.__stdout__, sys.__stderr__)  # to whoever runs the program
        if isinstance(value, IOBase) and not value.closed and value.writable() and value not in shown:
            self.files[name] = value

    def _note_files_of(self, name: str, value: Any) -> None:
        """Note the files of an object of Python's own, such as a table of csv, a process or an archive."""
        value = value.madpipe_iterator if isinstance(value, Rewindable) else value  # a cursor gives rows
        package = module_of(type(value)).partition(".")[0]
        if package == "_csv":
            for method in gc.get_referents(value):  # by which a writer writes to its file
                self._note_file(name, getattr(method, "__self__", None))
        elif package == "sqlite3":
            self.files[name] = value
        elif package in sys.stdlib_module_names and isinstance(table := attribute_of(value, "__dict__"), dict):
            for key, member in list(table.items()):
                self._note_file(f"{name}.{key}", member)

    def _children(self, name: str, value: Any) -> Iterable[tuple[str, Any]] | None:
        """What is in a value and may lead to objects, by name; None where there is nothing to look for."""
        if _is_other(value) and not (isinstance(value, type) and _is_programs_data(value)):
            self._note_file(name, value)
            return None
        found: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            members = islice(dict.items(value), MOST_MEMBERS)
            # Other keys may be written otherwise on another rank.
            found += [
                (f"{name}[{key!r}]" if type(key) in _PLAIN else f"{name}[key {place}]", child)
                for place, (key, child) in enumerate(members)
                if type(child) not in _PLAIN
            ]
        elif isinstance(value, list | tuple | deque):
            found += [
                (f"{name}[{place}]", child)
                for place, child in enumerate(islice(value, MOST_MEMBERS))
                if type(child) not in _PLAIN
            ]
        elif isinstance(value, MethodType):
            return [(f"{name}.__self__", value.__self__)]
        elif isinstance(value, partial):
            return [(f"{name}.{key}", getattr(value, key)) for key in ("func", "args", "keywords")]
        table = attributes_of(value)
        if table is None:
            self._note_files_of(name, value)
            return found or None
        if not _is_record(value):
            self.by_name[name] = value
            self._note_code(value if isinstance(value, FunctionType | type) else type(value))
        return [*found, *((f"{name}.{key}", child) for key, child in table.items() if type(child) not in _PLAIN)]


def attributes_of(value: Any) -> MutableMapping[str, Any] | None:
    """The attributes of an object or a function of the program, in its dict and slots; None of anything else."""
    kind: Any = type(value)
    if isinstance(value, FunctionType | CACHE):
        return None if is_librarys(value) else vars(value)
    if isinstance(value, type):
        return ClassData(value) if _is_programs_data(value) else None
    if _is_other(value) or not _is_followed(kind):
        return None
    slots, table = slots_of(kind), attribute_of(value, "__dict__")
    if slots:
        return SlotsOf(value, slots, table if isinstance(table, dict) else None)
    return table if isinstance(table, dict) else None


def _is_record(value: Any) -> bool:
    """Whether this is a dataclass with a dict, which is looked into like one wherever it stands."""
    return is_dataclass(value) and isinstance(attribute_of(value, "__dict__"), dict)


def _is_other(value: Any) -> bool:
    """Whether this is no object of a step. Each step asks that of many."""
    kind: Any = type(value)
    # A proxy says that it is of the class of what it stands for.
    return _are_others(kind) or (attribute_of(value, "__class__") is not kind and isinstance(value, _OTHERS))


@cache
def _are_others(kind: type) -> bool:
    return issubclass(kind, _OTHERS)


def _is_programs_data(kind: type) -> bool:
    """Whether a class may have counters and the like: one of the program, and no module or enumeration."""
    return not is_installed(module_of(kind)) and not issubclass(kind, (*_OTHERS, Enum)) and type(kind) is type


@cache
def _is_followed(kind: type) -> bool:
    package = module_of(kind).partition(".")[0]
    if not package or package in sys.stdlib_module_names:  # whose objects are shared by all code: loggers, locks
        return kind in _HOLDERS
    return package not in (*LIBRARIES, "numpy", "torchmetrics", "torchvision")
