"""What is decided about when: a pattern of operations that repeats with a period."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation:
    """One operation of the pattern: in period k it runs at ``k * period + start`` on micro-batch ``k - shift``."""

    operation: str
    """``F2``, ``B2``: forward, backward of stage 2. ``SF2``, ``SB2``: the activation sent from stage 2 to
    stage 3, and its gradient sent back."""
    start_seconds: float
    """In [0, period)."""
    duration_seconds: float
    """The operation may run over the end of the period."""
    shift: int
    device: int | None = None
    """Of a forward or backward."""
    link: tuple[int, int] | None = None
    """Of a transfer: the device of stage i and of stage i + 1, in both directions."""


@dataclass(frozen=True, slots=True)
class PeriodicSchedule:
    """A pattern that repeats every ``period_seconds``."""

    period_seconds: float
    operations: tuple[PlacedOperation, ...]


Order = tuple[tuple[str, int], ...]
"""What one device runs in one synchronous step, in order: ``("F0", 3)`` is the forward of stage 0 on
micro-batch 3."""
