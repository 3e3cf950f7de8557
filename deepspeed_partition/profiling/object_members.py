"""What objects of a program hold: attributes, also those in slots, and what a method belongs to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, MutableMapping
from types import MethodType, ModuleType
from typing import Any

from torch import nn

from deepspeed_partition.cached_results import CACHE
from deepspeed_partition.code_names import SlotsOf, function_of, is_installed, is_librarys, module_of, slots_of
from deepspeed_partition.generators import attributes_of_object

_OF_TORCH = frozenset(vars(nn.Module()))
OF_DEEPSPEED = ("ds_", "_ds_")
"""How names begin of attributes that DeepSpeed sets on modules."""
_COMPILERS = ("cupy", "numba", "triton")
"""Packages whose objects that can be called are functions: what they keep is compiled code."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the class or a program has set on ``module`` itself, not on its children."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _OF_TORCH and not name.startswith(OF_DEEPSPEED) and not isinstance(value, nn.Module)
    }


def members_of(value: Any) -> MutableMapping[str, Any] | None:
    """Return the attributes of an object of the program, also those in slots; None of anything else.

    An object that can be called counts, too: a schedule, a helper of a layer. A function does not.
    """
    kind: Any = type(value)
    if callable(value) and (isinstance(value, CACHE) or is_function_of_library(value)):
        return None
    table, slots = attributes_of_object(value), slots_of(kind)
    if not slots or isinstance(value, nn.Module | type) or is_librarys(kind) or is_installed(module_of(kind)):
        return table
    return SlotsOf(value, slots, table)


def is_function_of_library(value: Any) -> bool:
    """Whether what can be called is an object of a library: one of torch's, or a function that was compiled."""
    kind: Any = type(value)
    return is_librarys(kind) or module_of(kind).partition(".")[0] in _COMPILERS


def owner_of_method(value: Any) -> Any:
    """Return the object that a method of Python's belongs to; None of anything else, and of a class's method."""
    if not isinstance(value, MethodType) or isinstance(value.__self__, type | ModuleType):
        return None
    return value.__self__


def packages_of(called: Iterable[Any]) -> frozenset[str]:
    """Return the packages that layers and functions are of, also installed ones, but for Python's and libraries.

    Args:
        called: Modules, each with its children, specifications of layers, functions and objects.
    """
    named: list[Any] = []
    for each in called:
        owner = owner_of_method(each)
        if isinstance(each, functools.partial):
            named += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(kind := getattr(each, "typename", None), type):
            named.append(kind)
        else:
            named.append(each if owner is None else owner)
    kinds = [part for each in named for part in _kinds_of(each)]
    found = {module_of(kind).partition(".")[0] for kind in kinds if not is_librarys(kind)}
    return frozenset(found.difference(sys.stdlib_module_names, ("",)))


def _kinds_of(value: Any) -> list[Any]:
    """What tells the package of a value: its classes, or itself where it is a function."""
    if isinstance(value, nn.Module):
        return [type(part) for part in value.modules()]
    return [value] if isinstance(value, type) or function_of(value) is not None else [type(value)]
