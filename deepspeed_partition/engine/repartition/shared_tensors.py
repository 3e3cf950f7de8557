"""Tensors and arrays that a layer shares with a script, which changes them in place: a mask, an annealed weight.

A layer that moves has those of the process that it comes to, where the script of that process made them alike: as
arguments of its specification, or as attributes of a module that every process builds.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from deepspeed_partition.code_names import is_installed
from deepspeed_partition.engine.repartition.plain_data import HostTensor
from deepspeed_partition.engine.runtime.environment import warn_once

_OURS = ("deepspeed_partition", "lightning_madpipe")


@dataclass(frozen=True, slots=True)
class StillThere:
    """A tensor or an array that a layer has had from the start: other processes have their own in its place."""

    value: Any
    shown: str


@dataclass(frozen=True, slots=True)
class CopyOfVariable:
    """One that a layer got later, and a variable of the script has, too."""

    value: Any
    shown: str
    variable: str


def is_shareable(value: Any) -> bool:
    """Whether this is a tensor or an array, which can be changed in place."""
    return isinstance(value, torch.Tensor | numpy.ndarray) and not isinstance(value, nn.Parameter)


def are_equal(value: Any, present: Any) -> bool:
    """Whether two tensors, or two arrays, are alike in all bits, so that one can stand for the other."""
    if not is_shareable(value) or type(present) is not type(value):
        return False
    if (present.shape, present.dtype) != (value.shape, value.dtype):
        return False
    if isinstance(value, torch.Tensor):
        is_like = (present.device, present.layout) == (value.device, value.layout)
        return is_like and present.requires_grad == value.requires_grad and torch.equal(present, value)
    return bool(numpy.array_equal(present, value))


def with_present(value: Any, present: Any) -> Any:
    """Return a value whose tensors and arrays are present ones where these are equal; others may have those."""
    if are_equal(value, present):
        return present
    if (
        type(present) is not type(value)
        or not isinstance(value, list | tuple | dict)
        or len(present) != len(value)
    ):
        return value
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = with_present(each, present.get(key))
        return value
    members = [with_present(each, own) for each, own in zip(value, present, strict=True)]
    return type(value)(members) if type(value) in (list, tuple) else value


def told_of_sharing(sent: Any, own: Any, shown: str, *, is_first: bool) -> Any:
    """Return what is sent of an attribute, with what is known of others that have it.

    Args:
        sent: What another process is to have of it.
        own: What it is here.
        shown: How it is called.
        is_first: Whether it is the object that it has been from the start.
    """
    if not (isinstance(sent, HostTensor) or is_shareable(sent)) or not is_shareable(own):
        return sent
    if is_first:
        return StillThere(sent, shown)
    variable = _variable_of_script(own)
    return sent if variable is None else CopyOfVariable(sent, shown, variable)


def _variable_of_script(value: Any) -> str | None:
    """Return the name of a variable of the program that has this object, among those of the functions that run."""
    frame: Any = sys._getframe(1)
    seen = set[int]()
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _OURS and not is_installed(module):
            tables = [frame.f_locals] if id(frame.f_globals) in seen else [frame.f_locals, frame.f_globals]
            found = (name for table in tables for name, each in list(table.items()) if each is value)
            name = next(found, None)
            if name is not None:
                return str(name)
            seen.add(id(frame.f_globals))
        frame = frame.f_back
    return None


def say_of_copy(shown: str, kind: str, variable: str | None = None) -> None:
    """Say, once, that a layer has a copy of what a script has, too."""
    also = f", which is {variable} in the script," if variable else ""
    warn_once(
        f"copied/{shown}",
        f"{shown} ({kind}){also} goes with its layer as a copy: what changes it in place from now on does not "
        "reach the layer. Give it to the layer as an argument of its LayerSpec, or let its __init__ take it, on "
        "every rank; or set the attribute again after each change",
    )


def take_still_there(table: MutableMapping[Any, Any], name: Any, given: StillThere, value: Any) -> None:
    """Let the tensor or array that this process has in its place get the values, where it can have them.

    Args:
        table: The attributes here.
        name: The attribute.
        given: What was sent.
        value: What it is on this rank's device.
    """
    present: Any = table.get(name)
    if isinstance(value, torch.Tensor):
        if _takes_tensor(present, value):
            values = value.to(present.device)
            if not torch.equal(present.detach(), values):
                present.data.copy_(values)
            return
    elif isinstance(present, numpy.ndarray) and (present.shape, present.dtype) == (value.shape, value.dtype):
        if numpy.array_equal(present, value):
            return
        if present.flags.writeable:
            present[...] = value
            return
    table[name] = value
    say_of_copy(given.shown, type(value).__name__)


def _takes_tensor(present: Any, value: torch.Tensor) -> bool:
    return (
        type(present) is torch.Tensor
        and (present.shape, present.dtype, present.layout) == (value.shape, value.dtype, value.layout)
        and not any(
            size > 1 and not stride
            for size, stride in zip(present.shape, torch.Tensor.stride(present), strict=True)
        )
    )
