"""Plain data that goes from one rank to another: numbers, texts, tensors, arrays, and containers of these."""

from __future__ import annotations

import enum
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.tensor_values import bytes_view


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor on the CPU, as ``Module.to`` leaves those of attributes, of a rank that has another device."""

    value: torch.Tensor


def is_data(value: Any) -> bool:
    """Whether this is plain data, a tensor or an array, or a container of these."""
    if type(value) in (list, tuple, set, frozenset, deque):
        return all(map(is_data, value))
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        factory = getattr(value, "default_factory", None)
        return factory in _FACTORIES and all(is_data(key) and is_data(each) for key, each in value.items())
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
    if type(value) is numpy.ndarray:
        return not value.dtype.hasobject
    return isinstance(value, numpy.generic | torch.device | bytearray | array) or is_plain(value)


_FACTORIES = (None, bool, dict, float, int, list, set, str)
"""What a ``defaultdict`` that is sent may make of a key that it does not have."""


def off_the_device(value: Any) -> Any:
    """What another process can have of a value."""
    if isinstance(value, torch.device):
        return torch.device(value.type)
    if isinstance(value, bytearray | array):
        return value[:]
    if not isinstance(value, torch.Tensor):
        return value
    if value.device.type == "cpu" != torch.device(get_accelerator().current_device_name()).type:
        return HostTensor(value.detach())
    return value.detach().cpu()


def onto_the_device(value: Any) -> Any:
    """The value on this rank's device if it lay on the sender's; such a device itself is this rank's."""
    if isinstance(value, HostTensor):
        return value.value
    device = torch.device(get_accelerator().current_device_name())
    if isinstance(value, torch.device):
        return device if value.type == device.type else value
    return value.to(device) if isinstance(value, torch.Tensor) else value


def with_data(value: Any, made_of: Callable[[Any], Any]) -> Any:
    """Copy data of :func:`is_data`, and make something of each value in its containers."""
    kind: Any = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(with_data(each, made_of) for each in value)
    if kind is deque:
        return deque((with_data(each, made_of) for each in value), value.maxlen)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        copy: Any = value.copy()
        for key, each in value.items():  # a Counter's update() would add them
            copy[key] = with_data(each, made_of)
        return copy
    return made_of(value)


def is_plain(value: Any) -> bool:
    """Whether this is numbers, texts or types, or a container of these, and no tensor."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(member) for key, member in value.items())
    return value is None or isinstance(value, str | bytes | int | float | complex | torch.dtype | enum.Enum)


def checked(value: Any) -> Any:
    """A checksum in the place of a tensor or an array."""
    if isinstance(value, HostTensor):
        return HostTensor, checked(value.value)
    if not isinstance(value, torch.Tensor | numpy.ndarray):
        return value
    numbers = bytes_view(value).numpy() if isinstance(value, torch.Tensor) else numpy.ascontiguousarray(value)
    return str(value.dtype), tuple(value.shape), zlib.crc32(numbers.tobytes())
