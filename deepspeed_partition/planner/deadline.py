"""Deadlines: when a search must return the best answer that it has; and how it reports its progress.

Seconds are those in which a processor worked for the search, not those of the clock on the wall: on a busy
machine a search takes longer and finds the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

PATIENCE_FACTOR, PATIENCE_SECONDS = 30, 300.0
"""Limits on the clock on the wall: a deadline of s seconds of the processor also ends after this many times s,
plus this many seconds. They apply on a machine that hardly runs anything any more."""


class DeadlinePassed(Exception):
    """Raised where a deadline passes before a search has decided its question."""


class Deadline:
    """End of a search: after some seconds, when it is stopped, or with the deadline that it is part of.

    A search asks ``passed()`` between its steps and then returns the best answer so far, unproved. A caller that
    waits can call ``stop()``, for example from a signal handler::

        for step in search:
            if problem.deadline.passed():
                break

    ``Deadline(5, within=problem.deadline)`` gives one part of a search at most five seconds.

    Args:
        seconds: seconds of the processor, from now, in the thread that makes the deadline and asks it: what other
            threads, processes and programs do is not counted.
        within: the deadline that it is part of.
        watch: called with a line of text now and then, for whoever waits.

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
            raise ValueError(f"a deadline in {seconds} s has passed: it must be more than 0 s from now")
        self._end = time.thread_time() + seconds
        self._patience = time.monotonic() + seconds * PATIENCE_FACTOR + PATIENCE_SECONDS
        self._within = within
        self._extended: Deadline | None = None
        self._watch = watch
        self._stopped = False
        self._starved = False

    def tell(self, progress: str) -> None:
        """Report how far the search is, in a line of text."""
        if self._watch is not None:
            self._watch(progress)
        if self._within is not None:
            self._within.tell(progress)

    def stop(self) -> None:
        """End the search at once."""
        self._stopped = True

    @property
    def stopped(self) -> bool:
        """Return whether somebody stopped it, rather than the clock."""
        return self._stopped or any(
            other is not None and other.stopped for other in (self._within, self._extended)
        )

    @property
    def starved(self) -> bool:
        """Return whether it, or a part of it, ended because the machine was too busy to run the search."""
        return self._starved

    def remaining_seconds(self) -> float:
        """Seconds until it passes, from 0 to infinity; for solvers that take a time limit of their own."""
        return self._left(time.thread_time(), time.monotonic())

    def _left(self, worked: float, now: float) -> float:
        """Seconds until it passes, given the thread's time ``worked`` and the time ``now`` on the wall."""
        if self._stopped or (self._extended is not None and self._extended.stopped):
            return 0.0
        if now > self._patience:
            self._starve()
        left = 0.0 if self._starved else max(0.0, self._end - worked)
        return left if self._within is None else min(left, self._within._left(worked, now))

    def passed(self) -> bool:
        return self.remaining_seconds() == 0.0

    def part(self, share: float) -> Deadline:
        """Return a deadline that ends with this one, or after ``share`` (0 to 1) of the seconds that are left."""
        part = Deadline(within=self)
        part._end = time.thread_time() + self.remaining_seconds() * share
        return part

    def at_least(self, seconds: float) -> Deadline:
        """Return a deadline that ends with this one, but not within ``seconds`` unless somebody stops it."""
        longer = Deadline(max(seconds, self.remaining_seconds()))
        longer._extended = self
        return longer

    def check(self) -> None:
        """Raise ``DeadlinePassed`` where it has passed; for steps deep within a search.

        The search catches the exception and returns the best answer so far.

        Raises:
            DeadlinePassed: the deadline has passed.
        """
        if self.passed():
            raise DeadlinePassed

    def _starve(self) -> None:
        """End this deadline, and those that it is part of, because no processor was free."""
        self._starved = True
        if self._within is not None:
            self._within._starve()
