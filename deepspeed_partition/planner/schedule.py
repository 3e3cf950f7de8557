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
    from stage 2 to stage 3, and its gradient sent back. ``f2``: a forward that keeps nothing but the input of the
    stage; ``R2``: the forward of such a micro-batch again, which keeps. ``I2``, ``W2``: the two halves of a
    backward, the gradient of the input and the gradients of the weights."""
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

    It starts within [0, period), and may run over the end of the period. Where the pattern has q micro-batches,
    it repeats every q periods, and k counts these: the operation runs at ``k * q * period + start`` on
    micro-batch ``(k - shift) * q + index``.
    """

    shift: int
    index: int = 0
    """Number of the micro-batch within the pattern, from 0."""

    def to_dict(self) -> dict[str, Any]:
        data = {**self.place_to_dict(), **self.times_to_dict(), "shift": self.shift}
        return data | {"index": self.index} if self.index else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PlacedOperation:
        return cls(**span_from_dict(data), shift=int(data["shift"]), index=int(data.get("index", 0)))


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """Pattern of operations that repeats every ``micro_batches_per_period * period_seconds``."""

    period_seconds: float
    """Seconds per micro-batch."""
    operations: tuple[PlacedOperation, ...]
    micro_batches_per_period: int = 1


Order = tuple[tuple[str, int], ...]
"""Operations of one device in one synchronous step, in order: ``("F0", 3)`` is the forward of stage 0 on
micro-batch 3."""
PLAIN = "FB"
"""First letters of the computations of a plan whose stages treat all micro-batches alike."""


def is_plain_name(name: str) -> bool:
    """Return whether an operation is a transfer, a forward that keeps, or a whole backward."""
    return name[0] == "S" or name[0] in PLAIN
