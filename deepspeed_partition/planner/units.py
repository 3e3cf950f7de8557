"""Sizes and times as people write them."""

from __future__ import annotations

import math
import re

_SIZES = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, prefix in enumerate("KMGTP", start=1)
}
_DURATIONS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ]*?)(?:/s)?\s*")


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = _QUANTITY.fullmatch(text)
    lookup = {unit.lower(): factor for unit, factor in units.items()}
    if match is None or match.group(2).lower() not in lookup:
        raise ValueError(f"{text!r} is not {what}: write it like {example}")
    value = float(match.group(1)) * lookup[match.group(2).lower()]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not {what}: write it like {example}")
    return value


def parse_size(value: str | int | float) -> int:
    """Bytes: ``"16GB"`` is 16e9, ``"16GiB"`` is 16 * 2**30, a plain number is bytes.

    Raises:
        ValueError: not a size, not finite, negative.
    """
    if isinstance(value, str):
        value = _parse(value, dict(_SIZES), "a size", "16GB, 16GiB or a number of bytes")
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a size: write it like 16GB, 16GiB or a number of bytes")
    return round(value)


def parse_bandwidth(value: str | int | float) -> float:
    """Bytes per second: ``"12GB/s"`` is 12e9, a plain number is bytes per second."""
    if isinstance(value, str):
        value = _parse(value, dict(_SIZES), "a bandwidth", "12GB/s or a number of bytes per second")
    if isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is not a bandwidth: write it like 12GB/s, more than zero")
    return float(value)


def parse_seconds(value: str | int | float) -> float:
    """Seconds: ``"10us"`` is 1e-5, a plain number is seconds."""
    if isinstance(value, str):
        value = _parse(value, dict(_DURATIONS), "a time", "10us, 5ms, 0.1s or a number of seconds")
    if isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a time: write it like 10us, 5ms or a number of seconds")
    return float(value)


def format_bytes(num_bytes: float) -> str:
    """``3435973836`` as ``3.44 GB``: decimal units, as on the command line."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}"
                if num_bytes < 1e3 * factor
                else f"{num_bytes / factor:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def exact_bytes(num_bytes: int) -> str:
    """``22 bytes``, for numbers that are to be typed again."""
    return f"{num_bytes} byte" if num_bytes == 1 else f"{num_bytes} bytes"


def format_seconds(seconds: float) -> str:
    """``0.0123`` as ``12.3 ms``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def printable(text: str) -> str:
    """On one line, with what no terminal shows (control characters, half of a surrogate pair) escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in " ".join(text.split())
    )
