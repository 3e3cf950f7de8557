"""Modules that a loss uses without being one: those that a method of a model names, and what these hold."""

from __future__ import annotations

import dis
import re
from collections.abc import Container
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from deepspeed_partition.code_names import function_of, names_in
from deepspeed_partition.hidden_modules import hidden_beside
from deepspeed_partition.profiling.sources import methods_of, modules_called

_OF_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"))
_NO_LOADS = frozenset(("LOAD_ATTR", "LOAD_CLOSURE", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_METHOD", "LOAD_NAME"))
_ALL_OF_A_MODULE = frozenset((
    "__call__", "__dict__", "_modules", "_parameters", "apply", "buffers", "children", "modules", "named_buffers",
    "named_children", "named_modules", "named_parameters", "parameters", "state_dict",
))  # fmt: skip
"""Names by which code reaches all of a module without naming a part of it."""


@dataclass(frozen=True)
class PartsOfLoss:
    """What a loss uses of modules."""

    parts: tuple[nn.Module, ...] = ()
    """Those that are registered, each without its children."""
    hidden: tuple[nn.Module, ...] = ()
    """Those that these hold in lists and objects, each without its children."""

    @staticmethod
    def of(loss: Any, apart: Container[nn.Module] = ()) -> PartsOfLoss:
        """Return what ``loss`` uses.

        Args:
            loss: A function, a module, a method or a partial.
            apart: The layers and their parts. A method of a whole model has those alone of them that it names.
        """
        parts: list[nn.Module] = []
        hidden: list[nn.Module] = []
        for owner, method in methods_of(loss):
            names = _names_of_parts(method, type(owner))
            if names is None:
                parts += _but(owner, apart)
                hidden += hidden_beside(owner, apart).values()
                continue
            parts.append(owner)
            for name, child in owner.named_children():
                if name in names:
                    parts += child.modules() if child in apart else _but(child, apart)
                    hidden += hidden_beside(child, apart).values()
            own = hidden_beside(owner, apart, of_children=False)
            hidden += [each for path, each in own.items() if re.split(r"\W", path, maxsplit=1)[0] in names]
        for module in modules_called(loss):
            parts += module.modules()
            hidden += hidden_beside(module, apart).values()
        once = {id(each): each for each in parts}
        others = {id(each): each for each in hidden if id(each) not in once}
        return PartsOfLoss(tuple(once.values()), tuple(others.values()))


def _but(module: nn.Module, apart: Container[nn.Module]) -> list[nn.Module]:
    return [each for each in module.modules() if each not in apart]


def _names_of_parts(method: MethodType, kind: type) -> set[str] | None:
    """The attributes that a method of a module, and methods that it calls, name; None where it may use all."""
    names = set[str]()
    todo, seen = [function_of(method)], set[int]()
    while todo:
        function = todo.pop()
        if function is None or _uses_itself(function.__code__, _first_of(function)):
            return None
        new = set(names_in(function.__code__)) - names
        names |= new
        members = [vars(base)[name] for name in new for base in kind.__mro__ if name in vars(base)]
        for called in filter(None, map(function_of, members)):
            if id(called) not in seen:
                seen.add(id(called))
                todo.append(called)
    return names if names.isdisjoint(_ALL_OF_A_MODULE) else None


def _first_of(function: FunctionType) -> str:
    return function.__code__.co_varnames[0] if function.__code__.co_argcount else ""


def _uses_itself(code: CodeType, name: str) -> bool:
    """Whether code uses what ``name`` stands for otherwise than to ask it for an attribute."""
    operations = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "EXTENDED_ARG")]
    for each, following in zip(operations, [*operations[1:], None], strict=True):
        loaded = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        if not each.opname.startswith("LOAD_") or each.opname in _NO_LOADS or name not in loaded:
            continue
        if name in loaded[:-1] or following is None or following.opname not in _OF_ATTRIBUTES:
            return True
    return any(_uses_itself(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))
