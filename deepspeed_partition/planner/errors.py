"""Exceptions of the planner. Malformed arguments raise ``ValueError``."""

from __future__ import annotations

from typing import Any


class MadPipeError(Exception):
    """Base class of MadPipe's own exceptions."""


class InfeasibleError(MadPipeError):
    """Raised where a well-formed problem has no answer: no plan fits in memory.

    The numbers of the message are attributes too: ``stage``, ``short_bytes``, ``smallest_memory_bytes``; each may
    be None.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: int | None = None,
        short_bytes: int | None = None,
        smallest_memory_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.stage = stage
        """Number of the stage that does not fit, in the partition that needs the least memory; None where it is
        not known."""
        self.short_bytes = short_bytes
        """Bytes that this stage lacks on its device; None where it is not known."""
        self.smallest_memory_bytes = smallest_memory_bytes
        """Fewest bytes per device with which there is known to be a plan; None where no memory would help."""
        self.remedies: tuple[str, ...] = ()
        """What else would do, in words, the cheapest first, where that was looked for."""

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only arguments do not survive Exception's own pickling
        return _rebuild_infeasible, (
            str(self), self.stage, self.short_bytes, self.smallest_memory_bytes, self.remedies,
        )  # fmt: skip


def _rebuild_infeasible(
    message: str,
    stage: int | None,
    short_bytes: int | None,
    smallest_memory_bytes: int | None,
    remedies: tuple[str, ...],
) -> InfeasibleError:
    error = InfeasibleError(
        message, stage=stage, short_bytes=short_bytes, smallest_memory_bytes=smallest_memory_bytes
    )
    error.remedies = remedies
    return error


class BrokenPlanError(MadPipeError):
    """Raised where the replay refuses a plan that the planner made: a bug of MadPipe, never the user's."""


class FormatError(MadPipeError, ValueError):
    """Raised for a file or mapping that does not follow its format; the message names the path of the field."""


class PlanFormatError(FormatError):
    """Raised for a plan file that cannot be read, or that has another version."""


class ChainFormatError(FormatError):
    """Raised for a chain file that cannot be read, or that has another version."""


class MachinesFormatError(FormatError):
    """Raised for a machines file that cannot be read, or that has another version."""


class PlanMismatchError(MadPipeError, ValueError):
    """Raised for a plan that was made for another model, or for another number of devices."""


class TimelineFormatError(FormatError):
    """Raised for a file of measured times that cannot be read, or that has another version."""
