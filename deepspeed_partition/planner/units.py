"""Sizes and times as people write them, and texts for messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_SIZES = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGTP", start=1)
}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*?)(/s)?\s*")
_BITS = re.compile(r"[KMGTPkmgtp]?i?b")
"""Units of bits: their b is small."""


def _parse(value: object, units: dict[str, float], what: str, *, per_second: bool = False) -> float:
    """Return a finite number, not negative, in the unit that has the factor 1.

    Args:
        per_second: whether ``/s`` may stand behind the unit.
    """
    number = value
    if isinstance(value, str):
        match = _QUANTITY.fullmatch(value)
        lookup = {unit.lower(): factor for unit, factor in units.items()}
        number = None
        if match is not None and match.group(2).lower() in lookup and (per_second or not match.group(3)):
            digits, factor = match.group(1), lookup[match.group(2).lower()]
            # Whole numbers stay exact beyond 2**53; longer ones are infinite anyway.
            number = (int(digits) if digits.isdecimal() and len(digits) <= 308 else float(digits)) * factor
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= sys.float_info.max:
        raise ValueError(f"{shown(value)} is not {what}")
    return number


def parse_size(value: str | int | float) -> int:
    """Return bytes: ``"16GB"`` is 16e9, ``"16GiB"`` is 16 * 2**30, a plain number is bytes.

    Raises:
        ValueError: the value is not a size, not finite, or negative.
    """
    return round(_parse(value, dict(_SIZES), "a size: write it like 16GB, 16GiB or a number of bytes"))


def parse_bandwidth(value: str | int | float) -> float:
    """Return bytes per second: ``"12GB/s"`` is 12e9, a plain number is bytes per second.

    Raises:
        ValueError: the value is not a bandwidth, not finite, or not more than 0; or it is in bits.
    """
    what = "a bandwidth: write it like 12GB/s or a number of bytes per second, more than zero"
    parsed = float(_parse(value, dict(_SIZES), what, per_second=True))
    if not parsed:
        raise ValueError(f"{shown(value)} is not {what}")
    if isinstance(value, str):
        _check_in_bytes(value)
    return parsed


def _check_in_bytes(bandwidth: str) -> None:
    """Refuse a bandwidth with a small b: links are sold in bits, and sizes are often written in small letters."""
    match = _QUANTITY.fullmatch(bandwidth)
    assert match is not None
    number, unit = float(match.group(1)), match.group(2)
    if _BITS.fullmatch(unit):
        in_bytes = f"{unit[:-1].capitalize()}B/s"
        raise ValueError(
            f"{shown(bandwidth)} is in bits, for its small b: write {number / 8:.12g}{in_bytes}, or "
            f"{number:.12g}{in_bytes} if bytes are meant"
        )


def parse_seconds(value: str | int | float) -> float:
    """Return seconds: ``"10us"`` is 1e-5, a plain number is seconds.

    Raises:
        ValueError: the value is not a time, not finite, or negative.
    """
    what = "a time: write it like 10us, 5ms, 0.1s or a number of seconds"
    return float(_parse(value, dict(_DURATIONS), what)) + 0.0  # -0.0 is 0.0


def format_bytes(num_bytes: float) -> str:
    """Format bytes for reading: ``3435973836`` as ``3.44 GB``, in decimal units, as on the command line."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}"
                if num_bytes < 1e3 * factor
                else f"{num_bytes / factor:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def exact_bytes(num_bytes: int) -> str:
    """Format bytes that are to be typed again: ``22 bytes``."""
    return f"{num_bytes} byte" if num_bytes == 1 else f"{num_bytes} bytes"


def format_seconds(seconds: float) -> str:
    """Format seconds for reading: ``0.0123`` as ``12.3 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def counted(number: int, thing: str) -> str:
    """Format a count with its noun: ``2`` and ``"step"`` as ``2 steps``, and ``"batch"`` as ``2 batches``."""
    ending = "" if number == 1 else "es" if thing.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {thing}{ending}"


def printable(text: str) -> str:
    """Return a text on one line, with what no terminal shows escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in " ".join(text.split())
    )


def shown(value: object) -> str:
    """Format a value for a message: on one line, in printable characters, and no longer than a line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_of(name: str, value: object, known: Sequence[str]) -> str:
    """Return the value of an option, if it is a known one.

    Args:
        name: of the option, for the message.
        known: all values that it may have.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {shown(value)}: it must be one of {', '.join(known)}")
    return value
