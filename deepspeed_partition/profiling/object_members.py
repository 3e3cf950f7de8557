"""What objects of a program hold: attributes, also those in slots, and what a method belongs to."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import MethodType, ModuleType
from typing import Any

from torch import nn

from deepspeed_partition.cached_results import CACHE
from deepspeed_partition.code_names import SlotsOf, is_installed, is_librarys, module_of, slots_of
from deepspeed_partition.generators import attributes_of_object

_COMPILERS = ("cupy", "numba", "triton")
"""Packages whose objects that can be called are functions: what they keep is compiled code."""


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
