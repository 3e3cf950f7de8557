"""The threads of gloo at the end of a program.

A thread of gloo's lets a tensor go after it has told who waits for the tensor; on a busy machine long after. Where
the tensor is Python's, it needs Python for that. A thread that comes to it while Python ends aborts the process
("terminate called without an active exception", signal 6), behind correct results. ``destroy_process_group`` waits
for the threads of a group that nothing else refers to; of DeepSpeed's groups some are kept to the end. Seen with
torch 2.13: ``tests/engine/gloo_threads_multiproc.py``.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from pathlib import Path

BEGIN_OF_NAME = "pt_gloo"
"""How torch names the threads, which Linux cuts after 15 characters."""
RUNNING = "R"
"""The letter for a thread in ``/proc`` that has something to do, whether it has a processor or not."""
LOOKS = 3
"""How often one after another all threads must be at rest: one that waits for Python's lock is, too, but goes on
between two looks."""
BETWEEN_LOOKS_SECONDS = 0.001
PATIENCE_SECONDS = 10.0


def wait_at_exit() -> None:
    """Let the program wait at its end, behind what else is registered later, until the threads are at rest."""
    atexit.unregister(wait_for_gloo_threads)
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads(patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until no thread of gloo's has anything to do. Without ``/proc``, do nothing.

    Args:
        patience_seconds: how long at most.
    """
    until = time.monotonic() + patience_seconds
    at_rest = 0
    while at_rest < LOOKS and time.monotonic() < until:
        at_rest = 0 if _some_run() else at_rest + 1
        time.sleep(BETWEEN_LOOKS_SECONDS)


def _some_run() -> bool:
    with suppress(OSError):
        return any(map(_runs, Path("/proc/self/task").iterdir()))
    return False


def _runs(thread: Path) -> bool:
    with suppress(OSError):  # it has ended
        if (thread / "comm").read_text().startswith(BEGIN_OF_NAME):
            return (thread / "stat").read_text().rpartition(")")[2].split()[0] == RUNNING
    return False
