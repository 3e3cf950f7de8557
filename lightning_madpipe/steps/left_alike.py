"""Values that a step leaves on its module, in a form that shows later whether micro-batches go on changing them.

A step that has left a number alike for a batch and for its micro-batches where it was tried may not do so in
another batch. So what the first micro-batch leaves is kept, also of tensors that are changed in place and of
containers. And of a list the numbers that it gains for each sample are compared with those of batches that were
tried.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from deepspeed_partition.tensor_values import bytes_view, num_bytes_of
from lightning_madpipe.steps.step_side_effects import PLAIN, Change
from lightning_madpipe.steps.torch_calls import are_others

MOST_ELEMENTS = 256
"""Elements of a tensor that are looked at one by one; of a larger one a checksum is taken."""
MOST_BYTES = 16 << 20
"""Bytes of a tensor up to which a checksum is taken."""
MOST_ITEMS = 1000
"""Items of a container up to which they are looked at."""
DEPTH = 3


class Other(NamedTuple):
    """What is not looked at: very large tensors and containers, and objects."""


class Elements(NamedTuple):
    """What a small tensor holds."""

    shape: tuple[int, ...]
    values: list[Any]


class Checksum(NamedTuple):
    """What a larger tensor holds."""

    shape: tuple[int, ...]
    value: int


OTHER = Other()


class LeftForAWhile(NamedTuple):
    """An attribute that a micro-batch leaves otherwise than the first one, and the last one does not."""

    value: Any
    number: int
    """Which micro-batch of the batch left it, counted from 1."""
    last: Any


class PlainAttributes:
    """Numbers and texts of a module behind each micro-batch of a batch.

    A mark that a step sets for a part of a batch (``self.skips = not loss.isfinite()``) is overwritten by the next
    micro-batch, and a hook finds the last one's.

    Args:
        module: The LightningModule.
        ignored: Attributes that are not the user's.
    """

    def __init__(self, module: Any, ignored: Collection[str]) -> None:
        self._module, self._ignored = module, frozenset(ignored)
        self._first: dict[str, Any] = {}
        self._others: dict[str, tuple[Any, int]] = {}

    def note(self, place: int, is_last: bool) -> dict[str, LeftForAWhile]:
        """Note what there is behind a micro-batch; return, behind the last one, what there was for a while."""
        table = vars(self._module)
        now = {key: value for key, value in table.items() if type(value) in PLAIN and key not in self._ignored}
        if place == 0:
            self._first, self._others = now, {}
        for key, value in now.items():
            if key in self._first and are_others(self._first[key], value):
                self._others.setdefault(key, (value, place + 1))
        if not is_last:
            return {}
        return {
            key: LeftForAWhile(*other, now[key])
            for key, other in self._others.items()
            if key in now and not are_others(self._first[key], now[key])
        }


def is_followed(change: Change) -> bool:
    """Whether a change can be compared with that of the next micro-batch; of what a list gains see ``gained``."""
    return change.kind in ("bind", "refill") and _shown(change.value) is not OTHER


def is_too_large(change: Change) -> bool:
    """Whether a tensor or an array is not followed for its size."""
    value = change.value
    return (
        change.kind in ("bind", "refill")
        and isinstance(value, Tensor | numpy.ndarray)
        and num_bytes_of(value) > MOST_BYTES
    )


def gained(change: Change) -> int | None:
    """How many numbers and texts a list has gained; None where no list has gained something."""
    return _num_in(change.value) if change.kind in ("extend", "continues") else None


def _num_in(value: Any) -> int:
    if isinstance(value, Tensor | numpy.ndarray):
        return int(value.numel() if isinstance(value, Tensor) else value.size)
    if isinstance(value, Mapping):
        return sum(map(_num_in, value.values()))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return sum(map(_num_in, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_num_in(getattr(value, each.name)) for each in fields(value))
    return 1


def shown(change: Change) -> Any:
    """What a change has left, as it is now."""
    return _shown(change.value)


def go_on(first: Any, last: Any) -> bool:
    """Whether two values that were :func:`shown` are not the same.

    What one of them has more of, such as the keys of more samples, is no sign: it is the same joined.
    """
    if type(first) is not type(last):
        return True
    if isinstance(first, Elements):
        return first.shape == last.shape and go_on(first.values, last.values)
    if isinstance(first, dict):
        return any(go_on(value, last[key]) for key, value in first.items() if key in last)
    if isinstance(first, list):
        return len(first) == len(last) and any(map(go_on, first, last))
    return first is not last and are_others(first, last)


def _shown(value: Any, depth: int = DEPTH) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(numpy.ascontiguousarray(value))
    if isinstance(value, Tensor):
        return _of_tensor(value)
    if not depth or not isinstance(value, Mapping | list | tuple | deque) or len(value) > MOST_ITEMS:
        return OTHER
    if isinstance(value, Mapping):
        return {key: _shown(each, depth - 1) for key, each in value.items()}
    return [_shown(each, depth - 1) for each in value]


def _of_tensor(value: Tensor) -> Elements | Checksum | Other:
    if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.nbytes > MOST_BYTES:
        return OTHER
    with _disable_current_modes():
        own = value.detach()
        if own.numel() <= MOST_ELEMENTS:
            return Elements(tuple(own.shape), own.flatten().tolist())
        own = own.resolve_conj().resolve_neg().cpu().contiguous()
        return Checksum(tuple(own.shape), zlib.crc32(bytes_view(own).numpy().data))
