"""What the planner raises besides ``ValueError`` for malformed arguments."""

from __future__ import annotations

from typing import Any


class MadPipeError(Exception):
    """The root of MadPipe's own errors."""


class InfeasibleError(MadPipeError):
    """A well-formed problem without an answer: no plan fits in memory.

    The numbers of the message are attributes too.
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
        """The stage that does not fit, in the cut that needs least memory."""
        self.short_bytes = short_bytes
        """How many bytes that stage lacks on its device."""
        self.smallest_memory_bytes = smallest_memory_bytes
        """The least memory per device for which a plan exists; None where no memory would help."""

    def __reduce__(self) -> tuple[Any, ...]:  # keyword-only arguments do not survive Exception's own pickling
        return _rebuild_infeasible, (
            str(self), self.stage, self.short_bytes, self.smallest_memory_bytes,
        )  # fmt: skip


def _rebuild_infeasible(
    message: str, stage: int | None, short_bytes: int | None, smallest_memory_bytes: int | None
) -> InfeasibleError:
    return InfeasibleError(
        message, stage=stage, short_bytes=short_bytes, smallest_memory_bytes=smallest_memory_bytes
    )


class BrokenPlanError(MadPipeError):
    """A plan that its own replay refuses: a bug of MadPipe, never the user's."""


class FormatError(MadPipeError, ValueError):
    """A file or mapping that is not what its format says; the message names the field's path."""


class PlanFormatError(FormatError):
    """A plan file that cannot be read, or of another version."""


class ChainFormatError(FormatError):
    """A chain file that cannot be read, or of another version."""


class PlanMismatchError(MadPipeError, ValueError):
    """A plan for another model, or for another number of devices."""


class TimelineFormatError(FormatError):
    """A file of measured times that cannot be read, or of another version."""
