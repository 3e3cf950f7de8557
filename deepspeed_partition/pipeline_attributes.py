"""What a program keeps on DeepSpeed's pipeline module itself, beside its layers: a count, a centre, a meter."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from deepspeed_partition.code_names import function_in, is_librarys, module_of, names_in

_OF_DEEPSPEED = ("tied_modules", "loss_fn")
"""The modules that DeepSpeed registers on a pipeline module beside the layers, which it numbers."""


def is_pipeline_module(value: Any) -> bool:
    """Whether this is DeepSpeed's pipeline module, or of a class made of it."""
    return _is_a(value, "PipelineModule")


def is_engine(value: Any) -> bool:
    """Whether this is an engine of DeepSpeed's."""
    return _is_a(value, "DeepSpeedEngine")


def _is_a(value: Any, name: str) -> bool:
    return any(base.__name__ == name and module_of(base).startswith("deepspeed.") for base in type(value).__mro__)


def names_of_program(kind: type, method: Any = None) -> frozenset[str]:
    """The attributes that a program's own code gives a pipeline module.

    Those are the names in the code of its own classes, but for what classes of DeepSpeed and of MadPipe set.

    Args:
        kind: The class of the module.
        method: One of its methods, which need not be of its class.
    """
    function = function_in(getattr(method, "__func__", method))
    named = frozenset[str]() if function is None else frozenset(names_in(function.__code__))
    return (named | _names_in_classes(kind)) - _set_by_libraries(kind)


@cache
def _names_in_classes(kind: type) -> frozenset[str]:
    return frozenset(name for code in _codes_of(kind, of_libraries=False) for name in names_in(code))


@cache
def _set_by_libraries(kind: type) -> frozenset[str]:
    return frozenset(name for code in _codes_of(kind, of_libraries=True) for name in _set_in(code))


def _codes_of(kind: type, *, of_libraries: bool) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if is_librarys(base) == of_libraries:
            members = (function_in(getattr(each, "__func__", each)) for each in vars(base).values())
            yield from (each.__code__ for each in members if each is not None)


def _set_in(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR")
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _set_in(inner)


def modules_of_program(pipeline: nn.Module) -> list[nn.Module]:
    """The modules that a program has registered on a pipeline module and that are in no layer."""
    of_layers = {
        id(module)
        for name, child in pipeline._modules.items()
        if child is not None and (name.isdigit() or name in _OF_DEEPSPEED)
        for module in child.modules()
    }
    own = (child for child in pipeline._modules.values() if child is not None)
    found = {id(module): module for child in own for module in child.modules()}
    return [module for key, module in found.items() if key not in of_layers]
