"""Calls of a pipeline's layer with what the layer before it returned. Imports no torch."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

PIPE_MODULE = "deepspeed.runtime.pipe.module"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def unpacking(layer: Any) -> Any:
    """Return ``layer`` as DeepSpeed can call it: with one value, where it has parameters for several.

    DeepSpeed hands a layer what the one before it returned, a tensor or a tuple, as one argument. A layer such as
    ``forward(self, x, mask)`` cannot be called so. Where a call with one argument cannot be bound to the
    signature, the result calls the layer with the members of a tuple; it has the layer's attributes
    and, to ``isinstance``, its class. Any other layer is returned as it is: one that takes ``*args``, whose other
    parameters have defaults, or that has a forward pre-hook, which may do it by itself.
    """
    if not needs_unpacking(layer):
        return layer

    def call(value: Any) -> Any:
        return layer(*value) if isinstance(value, tuple | list) else layer(value)

    if hasattr(layer, "forward") or isinstance(layer, functools.partial):
        return stand_in(layer, call)
    call.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
    return functools.wraps(layer)(call)


def needs_unpacking(layer: Any) -> bool:
    """Return whether a layer, a module or a function, cannot be called with one argument, and can be with more."""
    if type(layer) is _StandIn or getattr(layer, "_forward_pre_hooks", None):
        return False
    function = getattr(layer, "forward", layer)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it has no signature, such as a function in C
        return False
    required = [each for each in parameters if each.default is inspect.Parameter.empty]
    return sum(each.kind in _POSITIONAL for each in required) > 1


class _StandIn:
    """Object that behaves like another one, except when it is called."""

    __slots__ = ("_call", "_original")

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_original", original)
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._call(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._original, name, value)

    def __reduce__(self) -> Any:
        return _rebuilt, (self._original,)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._original)


def _rebuilt(original: Any) -> Any:
    return unpacking(original)


def original_of(layer: Any) -> Any:
    """Return what a stand-in stands for; anything else as it is."""
    while type(layer) is _StandIn:
        layer = object.__getattribute__(layer, "_original")
    return layer


def stand_in(original: Callable[..., Any], call: Callable[..., Any]) -> Any:
    """Return an object that runs ``call`` when called, and has the attributes and the class of ``original``."""
    return _StandIn(original, call)


def is_layer_spec(layer: Any) -> bool:
    """Return whether a layer is DeepSpeed's ``LayerSpec``; where DeepSpeed was never imported, none can be."""
    module = sys.modules.get(PIPE_MODULE)
    return module is not None and isinstance(layer, module.LayerSpec)
