"""What functions and other objects that are called hold, and what their code names."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, MutableMapping
from itertools import islice
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from deepspeed_partition.code_names import CodeSearch, attribute_of, forward_of, function_of, is_installed
from deepspeed_partition.hidden_modules import hidden_modules, modules_within
from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.pipeline_attributes import (
    is_engine,
    is_pipeline_module,
    modules_of_program,
    names_of_program,
)
from deepspeed_partition.profiling.object_members import (
    attributes_of,
    is_function_of_library,
    members_of,
    owner_of_method,
)
from deepspeed_partition.profiling.remembered_values import MOST_MEMBERS, PLAIN, PartialArguments

_OWN_PACKAGES = ("deepspeed_partition", "lightning_madpipe")
_DEPTH = 3
"""Containers and objects in one another in which functions are looked for."""
_MOST_VALUES = 20_000
"""Values that are looked at for that."""


class Held:
    """What functions hold: modules, and variables by the tables that they stand in.

    Args:
        packages: Installed packages whose code is read as the program's own.
        of_parts: Whether the code of the children of a module that is called is read, too.
    """

    def __init__(self, packages: Container[str] = frozenset(), *, of_parts: bool = False) -> None:
        self.modules: list[nn.Module] = []
        self.pipelines: dict[nn.Module, set[str]] = {}
        """Pipeline modules of DeepSpeed's, and the attributes of these that are the program's: others go on."""
        self._objects: list[MutableMapping[str, Any]] = []
        self._specifications: list[MutableMapping[str, Any]] = []
        """Those of specifications, whose modules are put back where they are built (``given_modules.py``)."""
        self._seen: dict[int, Any] = {}
        """What was looked at, by ``id``; it is held, so that no other one gets the ``id`` of a method."""
        self._of_parts, self._num_left = of_parts, _MOST_VALUES
        self._search = CodeSearch(
            lambda module: not is_installed(module) or (module or "").partition(".")[0] in packages
        )

    @property
    def caches(self) -> dict[str, Any]:
        """The functions with a cache, by name."""
        return self._search.caches

    def add(self, value: Any) -> None:
        """Find what ``value`` holds, if it can be called."""
        if id(value) in self._seen or isinstance(value, type) or not callable(value) or is_engine(value):
            return
        self._seen[id(value)] = value
        if not isinstance(value, nn.Module):
            self.add(attribute_of(value, "__wrapped__"))  # such as a method, whose object is not in its code
        if is_pipeline_module(value):
            self._add_pipeline(value)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
            self._read(forward_of(value), type(value))
            self._add_hooks_of(value)
            if self._of_parts:
                self._read_parts(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.add(part)
            self._objects.append(PartialArguments(value))
        elif isinstance(value, MethodType):
            self._add_object(value.__self__, value)
            self._read(value.__func__, type(value.__self__))
            self._read_call_of(value.__self__)
        elif function_of(value) is not None:
            self._read(value, None)
        else:
            self._add_object(value)
            self._read(type(value).__call__, type(value))

    def add_code_of(self, layer: Any) -> None:
        """Find what the code of a module and its children names; of a specification, its arguments, too."""
        if isinstance(layer, nn.Module):
            self._add_hooks_of(layer)
            self._read_parts(layer)
        elif isinstance(kind := getattr(layer, "typename", None), type):
            self._specifications.append(vars(layer))
            self._read(getattr(kind, "forward", None), kind)

    def _read_parts(self, module: nn.Module) -> None:
        for part in (*module.modules(), *hidden_modules(module).values()):
            for base in type(part).__mro__:  # one may call that of another with super()
                if "forward" in vars(base):
                    self._read(vars(base)["forward"], type(part))
            for value in attributes_of(part).values():
                self._read_functions(value)

    def _add_hooks_of(self, module: nn.Module) -> None:
        for part in module.modules():
            for kind in MODULE_HOOKS:
                for hook in list(getattr(part, kind, {}).values()):
                    self.add(hook)

    def _read_functions(self, value: Any, depth: int = _DEPTH) -> None:
        """Read functions of the program that are an attribute, or stand in containers and objects there."""
        if type(value) in PLAIN or isinstance(value, nn.Module | torch.Tensor | np.ndarray) or not self._num_left:
            return
        self._num_left -= 1
        members: Iterable[Any] = ()
        if isinstance(value, dict):
            members = value.values()
        elif isinstance(value, list | tuple):
            members = value
        else:
            owner = owner_of_method(value)
            if function_of(value) is not None:
                self._read(value, None if owner is None else type(owner))
            self._read_call_of(value if owner is None else owner)
            if depth and not isinstance(value, type):
                members = (members_of(value if owner is None else owner) or {}).values()
        for member in list(islice(members, MOST_MEMBERS)) if depth else ():
            self._read_functions(member, depth - 1)

    def _read_call_of(self, value: Any) -> None:
        """Read what calls an object of the program's that is no function and no module."""
        is_none = isinstance(value, type | nn.Module | functools.partial) or function_of(value) is not None
        if callable(value) and not is_none and not is_function_of_library(value):
            self._read(type(value).__call__, type(value))

    def _add_pipeline(self, value: nn.Module, method: Any = None) -> None:
        if value not in self.pipelines:
            self.modules += modules_of_program(value)
        self.pipelines.setdefault(value, set()).update(names_of_program(type(value), method))

    def _add_object(self, value: Any, method: Any = None) -> None:
        if is_engine(value):
            return
        if is_pipeline_module(value):
            self._add_pipeline(value, method)
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(table := getattr(value, "__dict__", None), dict):
            if type(value).__module__.partition(".")[0] not in _OWN_PACKAGES:  # what ours keep is of the measuring
                self._objects += [table, value] if isinstance(value, dict) else [table]
            for member in list(table.values()):
                self.add(member)

    def _read(self, code: Any, kind: type | None) -> None:
        before, num_read, num_caches = set(self._search.found), len(self._search.functions), len(self.caches)
        self._search.read(code, kind)
        self._objects += [vars(function) for function in self._search.functions[num_read:]]
        self._objects += [vars(cache) for cache in list(self.caches.values())[num_caches:]]
        for place, name in list(self._search.found.items()):
            if place not in before:
                self.add(name.value)

    def hidden_modules(self) -> list[nn.Module]:
        """The modules that stand in containers and objects, in these modules or elsewhere."""
        found = [each for module in self.modules for each in hidden_modules(module).values()]
        given = set(map(id, self._specifications))
        for table, keys in self.tables():
            for key in (keys or list(table)) if id(table) not in given else ():
                found += modules_within(table.get(key))
        return [each for each in dict.fromkeys(found) if not is_pipeline_module(each) and not is_engine(each)]

    def tables(self) -> Iterator[tuple[MutableMapping[str, Any], list[str]]]:
        """Yield each table with the variables in it that are held; no names: all of them."""
        for table in (*self._objects, *self._specifications):
            yield table, []
        for name in self._search.found.values():
            yield name.table, [name.key]
