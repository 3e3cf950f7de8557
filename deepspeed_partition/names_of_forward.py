"""Which attributes of its own module a ``forward`` reads and sets, by its code."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from deepspeed_partition.code_names import LIBRARIES, module_of

OF_MEMBERS = ("STORE_SUBSCR", "DELETE_SUBSCR")
FILLING = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem",
    "popleft", "remove", "reverse", "rotate", "setdefault", "sort", "update",
))  # fmt: skip
"""The methods that change a container."""


class NamesOfForward(NamedTuple):
    """Names of attributes."""

    written: tuple[str, ...]
    """Those that it sets on the module, in the order of the code."""
    counted: frozenset[str]
    """Those that it changes as in ``self.calls += 1``, of the module or of anything else."""
    read: frozenset[str]
    """Those that it may read, of the module or of anything else."""
    fills: bool
    """Whether it may change members of a list, a dict or the like."""


@cache
def names_of_forward(kind: Any) -> NamesOfForward:
    """The names in the ``forward`` of a class of modules, and in methods that it calls, but those of libraries."""
    written: dict[str, None] = {}
    counted: set[str] = set()
    stores = False
    todo, seen = ["forward"], set[str]()
    while todo:
        name = todo.pop()
        function = inspect.getattr_static(kind, name, None)
        own = isinstance(function, FunctionType) and module_of(function).partition(".")[0] not in LIBRARIES
        if name not in seen and own:
            todo.extend(function.__code__.co_names)
            written.update(dict.fromkeys(_set_on_self(function)))
            counted.update(_counted(function))
            stores |= any(each.opname in OF_MEMBERS for each in dis.get_instructions(function))
        seen.add(name)
    fills = stores or not seen.isdisjoint(FILLING)
    return NamesOfForward(tuple(written), frozenset(counted), frozenset(seen), fills)


def loads_attribute(code: CodeType, name: str) -> bool:
    """Whether code reads an attribute of this name, of anything, for more than to change it by ``+= 1``."""
    before = ""
    for instruction in dis.get_instructions(code):
        is_read = instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == name
        if is_read and before not in ("COPY", "DUP_TOP"):  # the latter in Python 3.10
            return True
        before = instruction.opname
    return any(loads_attribute(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


def _set_on_self(function: FunctionType) -> Iterator[str]:
    owner = next(iter(function.__code__.co_varnames), None)
    before: Any = None
    for instruction in dis.get_instructions(function):
        # Newer versions of Python (3.13) load two names at once.
        loaded = before[-1] if isinstance(before, tuple) else before
        if instruction.opname == "STORE_ATTR" and loaded == owner:
            yield instruction.argval
        before = instruction.argval if instruction.opname.startswith("LOAD_FAST") else None


def _counted(function: FunctionType) -> Iterator[str]:
    before = ""
    for instruction in dis.get_instructions(function):
        if instruction.opname == "STORE_ATTR" and before in ("SWAP", "ROT_TWO"):  # the latter in Python 3.10
            yield instruction.argval
        before = instruction.opname
