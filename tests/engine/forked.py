"""Jobs of several processes that are forked from one in which the packages are imported already."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PATIENCE_SECONDS = 300
"""For all processes of a job to end; what then still runs was left behind."""


class Outcome(NamedTuple):
    exits: list[int | None]
    """Of each rank; None where it had to be killed."""
    logs: list[str]
    seconds_apart: float
    """From the end of the first process to that of the last one."""


def before_any_fork() -> None:
    """Import what DeepSpeed imports late, seconds in each process; and leave all of it alone in collections."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # compiles something
    gc.collect()
    gc.freeze()


def run_job(work: Callable[[int], None], num_processes: int, logs: list[Path]) -> Outcome | None:
    """Run ``work`` as each rank of a job, and say how the processes ended; None in these processes themselves.

    They must return from the main program then, so as to end as any others do; nobody ends them.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: dict[int, int] = {}
    for rank, log in enumerate(logs[:num_processes]):
        process = os.fork()
        if process == 0:
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_processes))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            work(rank)
            return None
        started[process] = rank
    exits: list[int | None] = [None] * num_processes
    ends: list[float] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while started and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            exits[started.pop(process)] = os.waitstatus_to_exitcode(status)
            ends.append(time.monotonic())
        time.sleep(0.05)
    for process in started:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        ends.append(time.monotonic())
    return Outcome(exits, [log.read_text() for log in logs[:num_processes]], ends[-1] - ends[0])
