"""When a search must hand over the best that it has, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class DeadlinePassed(Exception):
    """Nothing is decided."""


class Deadline:
    """Ends after some seconds, when it is stopped, or with the deadline that it is part of.

    A search asks ``passed()`` between its steps and returns the best it has, unproved. Whoever waits for it
    calls ``stop()``, from a signal handler for one::

        for step in search:
            if problem.deadline.passed():
                break

    ``Deadline(5, within=problem.deadline)`` gives one part of a search five seconds at the most.

    Args:
        seconds: from now.
        within: the deadline that it is part of.
        watch: is called with a line of text now and then, for whoever waits.

    Raises:
        ValueError: ``seconds`` is not more than 0.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        *,
        within: Deadline | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        if not seconds > 0:  # true for NaN, too
            raise ValueError(f"a deadline in {seconds} s has passed: it is more than 0")
        self._end = time.monotonic() + seconds
        self._within = within
        self._watch = watch
        self._stopped = False

    def tell(self, progress: str) -> None:
        """Say how far the search is, in a line of text."""
        if self._watch is not None:
            self._watch(progress)
        if self._within is not None:
            self._within.tell(progress)

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

    def part(self, share: float) -> Deadline:
        """Ends with this one, or after a share of what is left of it."""
        part = Deadline(within=self)
        part._end = time.monotonic() + self.remaining_seconds() * share
        return part

    def check(self) -> None:
        """For steps deep within a search, which has to catch it and to return the best it has.

        Raises:
            DeadlinePassed: it has passed.
        """
        if self.passed():
            raise DeadlinePassed
