"""The receives from one device, in the order in which they are posted.

A receive whose header was not read yet waits in line with all behind it: a thread reads the headers, and posts the
receives at once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from deepspeed_partition.engine.runtime.autograd_boundary import Boundary
from deepspeed_partition.engine.runtime.boundary_shapes import Shapes
from deepspeed_partition.engine.runtime.departures import Header, wait
from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Message

Expected = Shapes | Header
"""The shapes of a message, or what will tell them."""


class Posted(NamedTuple):
    """A message that room was made for."""

    boundary: Boundary
    """The tensors that it will be in."""
    works: list[Any]
    """What to wait for."""
    shapes: Shapes
    was_told: bool
    """Whether a header told the shapes; else they are those that were expected."""


class Line:
    """The receives from one device, posted in the order in which they come.

    Args:
        rank: that device's, globally.
        start: posts a receive of these shapes, and is told whether a header told them.
        later: called for each receive that waits in line; gives what the thread enters when it calls ``start``.
    """

    def __init__(
        self,
        rank: int,
        start: Callable[[Message, Shapes, bool], Posted],
        later: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._rank, self._start, self._later = rank, start, later
        self._helper = Helper(f"receives-from-{rank}")
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._num_waiting = 0
        self._posted: dict[Message, Posted] = {}

    def begin(self) -> None:
        """Begin a batch."""
        assert not self._posted and not self._num_waiting

    def post(self, message: Message, expected: Expected) -> None:
        """Post a receive at once, or when the headers of this message and of those before it have been read."""
        # This thread alone lets receives wait: where none does, no helper is at work that a lock would keep away.
        if not self._num_waiting and not isinstance(expected, tuple):
            self._posted[message] = self._start(message, expected, False)
            return
        with self._changed:
            if self._num_waiting or isinstance(expected, tuple):
                self._num_waiting += 1
                self._helper.do(functools.partial(self._post_later, message, expected, self._later()))
            else:
                self._posted[message] = self._start(message, expected, False)

    def take(self, message: Message) -> Posted:
        """Return what was posted for a message, as soon as it is.

        Raises:
            Exception: what a header, or the posting after it, failed with.
        """
        posted = self._posted.pop(message, None)
        if posted is not None:
            return posted
        with self._changed:
            if message not in self._posted:
                self._changed.wait_for(lambda: message in self._posted or self._error is not None)
            if message not in self._posted:
                assert self._error is not None
                raise self._error
            return self._posted.pop(message)

    def fail(self, error: Exception) -> None:
        """Let :meth:`take` raise this for what is not posted: what makes the sender send may never have left."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def close(self) -> None:
        self._helper.close()

    def _post_later(self, message: Message, expected: Expected, place: AbstractContextManager[object]) -> None:
        try:
            was_told = isinstance(expected, tuple)
            if isinstance(expected, tuple):
                header, work = expected
                wait(work, self._rank)
                expected = Shapes.from_header(header)
            with place, self._changed:
                self._posted[message] = self._start(message, expected, was_told)
                self._num_waiting -= 1
                self._changed.notify()
        except Exception as error:  # raised again by take()
            with self._changed:
                self._error = error
                self._changed.notify()
            raise
