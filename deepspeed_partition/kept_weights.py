"""Values of parameters that a forward writes, put back after a run that trains nothing.

Layers may set weights in their first forward: data-dependent initialization as in ActNorm, a normalized or masked
weight, a step size that is worked out once. A run that only looks at layers puts their counters back, so it has to
put these values back, too: else they are set twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.tensor_values import (
    bytes_view,
    has_memory,
    num_bytes_of,
    plain_numbers,
    put_back,
    version_of,
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE, _WIDTH = 2**20, 2**10
"""Elements that are made to wider ones at a time; numbers in a row of the table that is summed up."""
_SMALL_BYTES = 2**16
"""Bytes up to which values on the CPU are read one after the other, which takes fewer calls."""
_FACTOR = 0x9E3779B1
"""An odd number with many digits, by which parts of a sum are told apart."""
_MOST_BYTES = 2**28
"""Bytes of a module's weights up to which they are copied together while it runs; of a larger one, each part."""


Running: TypeAlias = Callable[[nn.Module], AbstractContextManager[None]]


class WeightPlace(NamedTuple):
    """A parameter as it was, and where it stood."""

    owner: nn.Module
    name: str
    weight: nn.Parameter
    data: torch.Tensor | None
    """The memory that it had; its values may have been written since. None: not noted."""

    @property
    def is_left(self) -> bool:
        return self.owner._parameters.get(self.name) is not self.weight

    @property
    def in_words(self) -> str:
        return f"{self.name} of {type(self.owner).__name__}"

    def put_back(self, values: torch.Tensor) -> None:
        """Let the parameter have the place, the memory and the values that it had."""
        if self.is_left:
            self.owner._parameters[self.name] = self.weight
        data = self.data
        if data is not None and (self.weight.data_ptr(), self.weight.shape) != (data.data_ptr(), data.shape):
            self.weight.data = data
        put_back(self.weight, values.detach().to(self.weight.device, self.weight.dtype))


class WrittenWeights:
    """The weights that a ``forward`` of this process has written while it was looked at."""

    def __init__(self) -> None:
        self._names = WeakIdKeyDictionary()
        self.in_words: dict[str, None] = {}
        """Those of all ranks, once layers have been measured: a name, and the class of the module."""
        self.number = 0

    def add(self, place: WeightPlace) -> None:
        """Note one of them."""
        names = self._names.setdefault(place.owner, set())
        if place.name not in names:
            names.add(place.name)
            self.number += 1
        self.in_words.setdefault(place.in_words)

    def names_in(self, owner: nn.Module) -> Collection[str]:
        """The names of those that a module itself has."""
        names: set[str] = self._names.get(owner, set())
        return names


WRITTEN = WrittenWeights()


def places_of(modules: Iterable[nn.Module]) -> list[WeightPlace]:
    """The parameters of modules as they are now, of each module itself."""
    return [
        WeightPlace(owner, name, weight, weight.data)
        for owner in modules
        if not isinstance(owner, torch.jit.ScriptModule)  # which makes new objects of its parameters each time
        for name, weight in owner._parameters.items()
        if weight is not None
    ]


class Weights:
    """The parameters of modules, as they are now, to tell later which have been written.

    Args:
        modules: Each without its children.
        noted: Whether it is let known which of them a forward writes.
    """

    def __init__(self, modules: Iterable[nn.Module], *, noted: bool = True) -> None:
        self.places, self._is_noted = places_of(modules), noted
        self._marks = self._marked()

    def written(self) -> list[int]:
        """The numbers of the places whose parameter has been written, or replaced, since."""
        now = zip(self.places, self._marks, self._marked(), strict=True)
        return [number for number, (place, was, mark) in enumerate(now) if was != mark or place.is_left]

    def note_written(self) -> list[int]:
        """Let it be known which of them a forward writes; return their numbers."""
        written = self.written()
        for number in written if self._is_noted else ():
            WRITTEN.add(self.places[number])
        return written

    def put_back(self, values: Callable[[int], torch.Tensor]) -> None:
        """Give those that have been written the values that they had.

        Args:
            values: Gives the values for the place of a number, of any type and on any device.
        """
        written = self.note_written()
        for number in written:
            self.places[number].put_back(values(number))
        if written:
            self._marks = self._marked()

    def _marked(self) -> list[Any]:
        return marks_of([place.weight for place in self.places])


@contextmanager
def weights_kept(
    modules: Iterable[nn.Module], is_wanted: Callable[[nn.Module], bool] = lambda _: True
) -> Iterator[Running]:
    """Put the weights of ``modules`` back afterwards that these write while they run.

    A module is copied while it runs, with those in it if all are small. Copies stay of weights that were written.

    Args:
        is_wanted: Whether the weights of a module itself are put back, at the end; left out: those of all.

    Yields:
        A function that gives the context in which code runs as a module whose ``forward`` is not called by torch.
    """
    parts = {id(part): part for module in modules for part in module.modules()}
    kept: dict[int, tuple[WeightPlace, torch.Tensor]] = {}
    is_copied = False
    call = nn.Module.__call__

    @contextmanager
    def running(part: nn.Module) -> Iterator[None]:
        nonlocal is_copied
        if is_copied or id(part) not in parts:
            yield
            return
        is_small = sum(map(num_bytes_of, part.parameters())) <= _MOST_BYTES
        weights = Weights(part.modules() if is_small else [part])
        copies = [place.weight.detach().clone() for place in weights.places]
        is_copied = is_small
        try:
            yield
        finally:
            is_copied = False
            for number in weights.written():
                place = weights.places[number]
                kept.setdefault(id(place.weight), (place, copies[number]))

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(module, *args, **kwargs)
        with running(module):
            return call(module, *args, **kwargs)

    try:
        type.__setattr__(nn.Module, "__call__", called)
        yield running
    finally:
        type.__setattr__(nn.Module, "__call__", call)
        for place, values in kept.values():
            WRITTEN.add(place)
            if is_wanted(place.owner):
                place.put_back(values)


def marks_of(weights: Sequence[torch.Tensor], *, values: bool = True) -> list[Any]:
    """What tells of each weight whether it has been written, or got other memory: two marks of it then differ.

    Args:
        weights: As they are now, on any devices.
        values: Whether the values are looked at, in a pass over them: torch does not count what is written through
            ``.data``.
    """
    with _disable_current_modes(), torch.no_grad():
        looked_at = [weight.data if values and _has_numbers(weight) else None for weight in weights]
        sums = [None if each is None else _mark_of_values(each) for each in looked_at]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for number in sums:
            if isinstance(number, torch.Tensor):
                by_device.setdefault(number.device, []).append(number)
        # One transfer for all weights of a device.
        read = {device: iter(torch.stack(numbers).tolist()) for device, numbers in by_device.items()}
        return [
            (*_place_of(weight), next(read[number.device]) if isinstance(number, torch.Tensor) else number)
            for weight, number in zip(weights, sums, strict=True)
        ]


def _place_of(weight: torch.Tensor) -> tuple[Any, ...]:
    version = version_of(weight)
    return (version, weight.shape, torch.Tensor.data_ptr(weight)) if has_memory(weight) else (version, None, None)


def _has_numbers(weight: torch.Tensor) -> bool:
    return has_memory(weight) and type(weight.data) is torch.Tensor


def _mark_of_values(values: torch.Tensor) -> torch.Tensor | int:
    """A number made of all elements' bits and their places, so that NaN is equal to itself.

    Eight bytes are one number, where they lie so, for which no memory is needed; elements are made to such numbers
    in pieces else.
    """
    flat = _in_a_row(plain_numbers(values))
    if flat.device.type == "cpu" and flat.nbytes <= _SMALL_BYTES:
        return zlib.crc32(bytes_view(flat).numpy().data)
    size = flat.element_size()
    per_word = 8 // size
    num_words = flat.numel() // per_word if flat.storage_offset() % per_word == 0 else 0
    rest = flat[num_words * per_word :].view(_INTEGERS[size])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if num_words:
        total = _mark_of_words(flat[: num_words * per_word].view(torch.int64))
    for piece in rest.split(_PIECE) if rest.numel() else ():
        total = total * _FACTOR + _mark_of_words(piece.to(torch.int64))
    return total


def _in_a_row(values: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie in memory; a copy where they do not lie together."""
    length = 1
    for stride, size in sorted((stride, size) for stride, size in zip(values.stride(), values.shape, strict=True)):
        if size != 1 and stride != length:
            return values.contiguous().view(-1)
        length *= size
    return values.as_strided((length,), (1,))


def _mark_of_words(words: torch.Tensor) -> torch.Tensor:
    """A sum in which each number counts by its place: those of a large table by their row and their column."""
    if words.numel() <= _PIECE:
        return _by_place(words)
    table = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rest = words[table.numel() :]
    columns, rows = table.sum(0), table.sum(1)
    return _by_place(columns) + _FACTOR * _by_place(rows) + _FACTOR * _FACTOR * _by_place(rest)


def _by_place(numbers: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    return (numbers * (places * places + _FACTOR)).sum()
