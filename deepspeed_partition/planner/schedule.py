"""The schedule: a pattern of operations that repeats with a period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation:
    """One operation of the pattern: in period k it runs at ``k * period + start`` on micro-batch ``k - shift``."""

    operation: str
    """Name of the operation. ``F2``, ``B2``: forward, backward of stage 2. ``SF2``, ``SB2``: the activation sent
    from stage 2 to stage 3, and its gradient sent back."""
    start_seconds: float
    """Seconds from the start of the period; in [0, period)."""
    duration_seconds: float
    """Seconds of the operation, which may run over the end of the period."""
    shift: int
    device: int | None = None
    """Device of a forward or backward; None for a transfer."""
    link: tuple[int, int] | None = None
    """Devices of a transfer, that of stage i and that of stage i + 1, in both directions; None for a
    computation."""


def place_to_dict(device: int | None, link: tuple[int, int] | None) -> dict[str, Any]:
    """Return where an operation runs, in the JSON form of plans and timelines."""
    return {"device": device} if link is None else {"link": list(link)}


def place_from_dict(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``operation`` and ``device`` or ``link`` from the JSON form, as arguments.

    Raises:
        ValueError: the operation has no place.
    """
    name = data["operation"]
    place = "link" if name.startswith("S") else "device"
    if place not in data:
        raise ValueError(f"operation {name} has no {place}")
    if place == "device":
        return {"operation": name, "device": int(data["device"])}
    return {"operation": name, "link": (int(data["link"][0]), int(data["link"][1]))}


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """Pattern of operations that repeats every ``period_seconds``."""

    period_seconds: float
    operations: tuple[PlacedOperation, ...]


Order = tuple[tuple[str, int], ...]
"""Operations of one device in one synchronous step, in order: ``("F0", 3)`` is the forward of stage 0 on
micro-batch 3."""
