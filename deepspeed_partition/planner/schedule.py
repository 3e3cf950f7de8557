"""The schedule: a pattern of operations that repeats with a period."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationSpan:
    """Operation, its device or link, and when it runs there: what plans and measured timelines have in common."""

    operation: str
    """Name of the operation. ``F2``, ``B2``: forward, backward of stage 2. ``SF2``, ``SB2``: the activation sent
    from stage 2 to stage 3, and its gradient sent back."""
    start_seconds: float
    """Seconds from the start of the period of a plan, or of the step that was measured."""
    duration_seconds: float
    device: int | None = None
    """Device of a forward or backward; None for a transfer."""
    link: tuple[int, int] | None = None
    """Devices of a transfer, that of stage i and that of stage i + 1, in both directions; None for a
    computation."""

    def place_to_dict(self) -> dict[str, Any]:
        """Return name and place in the JSON form of plans and timelines."""
        if self.link is None:
            return {"operation": self.operation, "device": self.device}
        return {"operation": self.operation, "link": list(self.link)}

    def times_to_dict(self) -> dict[str, float]:
        """Return start and duration in the JSON form of plans and timelines; seconds."""
        return {"start_seconds": self.start_seconds, "duration_seconds": self.duration_seconds}


def span_from_dict(data: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of an ``OperationSpan`` from the JSON form, as arguments.

    Raises:
        ValueError: the operation has no place.
    """
    name = data["operation"]
    key = "link" if name.startswith("S") else "device"
    if key not in data:
        raise ValueError(f"operation {name} has no {key}")
    place = data[key]
    return {
        "operation": name,
        key: int(place) if key == "device" else (int(place[0]), int(place[1])),
        "start_seconds": float(data["start_seconds"]),
        "duration_seconds": float(data["duration_seconds"]),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation(OperationSpan):
    """One operation of the pattern: in period k it runs at ``k * period + start`` on micro-batch ``k - shift``.

    It starts within [0, period), and may run over the end of the period.
    """

    shift: int

    def to_dict(self) -> dict[str, Any]:
        return {**self.place_to_dict(), **self.times_to_dict(), "shift": self.shift}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlacedOperation:
        return cls(**span_from_dict(data), shift=int(data["shift"]))


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """Pattern of operations that repeats every ``period_seconds``."""

    period_seconds: float
    operations: tuple[PlacedOperation, ...]


Order = tuple[tuple[str, int], ...]
"""Operations of one device in one synchronous step, in order: ``("F0", 3)`` is the forward of stage 0 on
micro-batch 3."""
