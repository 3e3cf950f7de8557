"""A thread that waits for what the engine must not wait for."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable

import torch.distributed as dist

from deepspeed_partition.engine.runtime.watch import LAST_PATIENCE_SECONDS

PATIENCE_SECONDS = 2.0
"""The seconds that a process waits for a helper when it ends, before it ends transfers that never end."""


class Helper:
    """Runs what it is given on a thread of its own, one after the other, until something fails.

    Args:
        when_failed: called there with what failed.
    """

    def __init__(self, name: str, when_failed: Callable[[Exception], object] = lambda _: None) -> None:
        self._when_failed = when_failed
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[Callable[[], object] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"madpipe-{name}", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def do(self, function: Callable[[], object]) -> None:
        """Call ``function`` after all before it; it is not referred to any more when it has returned."""
        self._queue.put(function)

    def mark(self) -> threading.Event:
        """Return a mark to give to :meth:`reach`."""
        mark = threading.Event()
        self._queue.put(mark)
        return mark

    def reach(self, mark: threading.Event) -> None:
        """Return when everything before the mark is done.

        Raises:
            Exception: what failed first; nothing behind it was run.
        """
        mark.wait()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Return when everything is done; raises what :meth:`reach` does."""
        self.reach(self.mark())

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._queue.put(None)

    def _at_exit(self) -> None:
        """Let a transfer fail at exit: a thread that wakes up from one while Python ends aborts the process."""
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            if dist.is_initialized():
                dist.destroy_process_group()
            self._thread.join(
                LAST_PATIENCE_SECONDS
            )  # what it waits for has ended, and a busy machine takes seconds

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._error is None:
                try:
                    item()
                except Exception as error:  # raised again by finish()
                    self._error = error
                    self._when_failed(error)
            del item  # with what it refers to
