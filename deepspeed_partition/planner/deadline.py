"""When a search must hand over the best that it has."""

from __future__ import annotations

import math
import time


class Deadline:
    """Ends after some seconds, when it is stopped, or with the deadline that it is part of.

    A search asks ``passed()`` between its steps and returns the best it has, unproved. Whoever waits for it
    calls ``stop()``, from a signal handler for one::

        for step in search:
            if problem.deadline.passed():
                break

    ``Deadline(5, within=problem.deadline)`` gives one part of a search five seconds at the most.

    Raises:
        ValueError: ``seconds`` is not more than 0.
    """

    def __init__(self, seconds: float = math.inf, *, within: Deadline | None = None) -> None:
        if not seconds > 0:  # true for NaN, too
            raise ValueError(f"a deadline in {seconds} s has passed: it is more than 0")
        self._end = time.monotonic() + seconds
        self._within = within
        self._stopped = False

    def stop(self) -> None:
        """End it now."""
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Whether somebody ended it, rather than the clock."""
        return self._stopped or (self._within is not None and self._within.stopped)

    def remaining_seconds(self) -> float:
        """From 0, when it has passed, to infinity; for solvers that take a time limit of their own."""
        if self.stopped:
            return 0.0
        left = max(0.0, self._end - time.monotonic())
        return left if self._within is None else min(left, self._within.remaining_seconds())

    def passed(self) -> bool:
        return self.remaining_seconds() == 0.0
