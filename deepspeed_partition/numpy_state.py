"""Where NumPy's common generator is, read and written where it lies.

NumPy makes an object of each of the 624 words of its state when it is asked for them, which takes 35 us. It is
asked before each step and each recomputation. The words lie where ``ctypes`` of the generator says. The normal
number that is left of a draw of two lies in the generator itself, where it is looked for once.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any, NamedTuple

import numpy as np

_NUM_WORDS = 624
_POSITION = struct.Struct("i")
"""The number of the next word, which ``MT19937`` keeps behind the words."""
_BYTES_OF_WORDS = 4 * _NUM_WORDS + _POSITION.size
_KEPT = struct.Struct("@id")
"""What ``RandomState`` keeps: whether there is a normal number, and the number."""


class NumpyState(NamedTuple):
    """Where a generator is. Two are equal where the generator gives the same numbers."""

    words: bytes
    kept: bytes

    @property
    def legacy(self) -> tuple[Any, ...]:
        """The state in the form of ``RandomState.get_state()``.

        That is the kind of generator, its 624 words, the number of the next of them, whether a normal number is
        kept of a draw of two, and that number.
        """
        words = np.frombuffer(self.words, np.uint32, _NUM_WORDS)
        (position,) = _POSITION.unpack_from(self.words, words.nbytes)
        return "MT19937", words, position, *_KEPT.unpack(self.kept)


def state_of(generator: np.random.RandomState) -> NumpyState | dict[str, Any]:
    """Return where a generator is; as NumPy tells it, where it is of another kind or another NumPy."""
    bits, kept = generator._bit_generator, _kept_by(generator)
    if type(bits) is not np.random.MT19937 or kept is None:
        return generator.get_state(legacy=False)
    return NumpyState(ctypes.string_at(_place_of_words(bits), _BYTES_OF_WORDS), kept)


def put_back(generator: np.random.RandomState, state: NumpyState | dict[str, Any]) -> None:
    """Put a generator to where :func:`state_of` has found it."""
    if not isinstance(state, NumpyState):
        generator.set_state(state)
        return
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937 or _kept_by(generator) != state.kept:
        generator.set_state(state.legacy)
        return
    with bits.lock:
        ctypes.memmove(_place_of_words(bits), state.words, _BYTES_OF_WORDS)


def _kept_by(generator: np.random.RandomState) -> bytes | None:
    """What a generator keeps of a draw; None where that is not found."""
    place = _place_of_kept()
    if place is None or type(generator) is not np.random.RandomState:
        return None
    return ctypes.string_at(id(generator) + place, _KEPT.size)


@functools.lru_cache(maxsize=8)
def _place_of_words(bits: np.random.MT19937) -> int:
    return int(bits.ctypes.state_address)


@functools.cache
def _place_of_kept() -> int | None:
    """Return where in a ``RandomState`` the kept number lies; None where it is not found."""
    places = {_place_in(np.random.RandomState(seed)) for seed in (1, 2)}
    return places.pop() if len(places) == 1 else None


def _place_in(generator: np.random.RandomState) -> int | None:
    generator.standard_normal()
    *_, has_kept, number = generator.get_state()
    size = type(generator).__basicsize__
    place = ctypes.string_at(id(generator), size).find(_KEPT.pack(has_kept, number))
    generator.standard_normal()
    *_, has_kept, number = generator.get_state()
    is_followed = ctypes.string_at(id(generator), size).find(_KEPT.pack(has_kept, number), place) == place
    return place if has_kept == 0 and place >= 0 and is_followed else None
