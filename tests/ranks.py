"""Starts the ranks of a job as torchrun does, forked from a process that has imported the libraries.

Importing torch, DeepSpeed and Lightning takes a rank longer than most cases do. :func:`run_ranks` runs a script on
ranks that the server forks (``server.py``), and ends all of them when one has failed; :func:`run_job` runs a
function of the program that calls it, and lets its ranks end by themselves.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests import exhaustive
from tests.server import ON_THE_CPU, Process, enter, import_libraries

OF_A_JOB = ("PL_", "RANK", "WORLD", "LOCAL_", "MASTER_", "MADPIPE")
"""How variables begin that belong to a job, and that this one must not inherit."""
PATIENCE_SECONDS = 300
"""For all ranks that are to end by themselves; what then still runs was left behind."""

MOST_SECONDS_APART = 45
"""From the end of a rank to that of another one which hears of it within seconds, and then has to end, where many
processes share a core. One that hears nothing waits twice as long at the least."""


class Outcome(NamedTuple):
    exits: list[int | None]
    """Of each rank; None where it had to be killed."""
    logs: list[str]
    seconds_apart: float
    """From the end of the first rank to that of the last one."""


def environments_of(num_ranks: int | None, variables: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun makes it; of one process that is no rank if ``None``."""
    common = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OF_A_JOB) or name == exhaustive.VARIABLE
    }
    common |= {**ON_THE_CPU, **(variables or {})}
    if num_ranks is None:
        return [common]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {
        "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "forked",
    }  # fmt: skip
    return [{**common, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def run_ranks(
    script: Path, arguments: Sequence[str], num_ranks: int | None, log: Path, *, timeout_seconds: float,
    variables: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """Run ``script`` on every rank, in the folder of ``log``, where all that it prints goes.

    Args:
        num_ranks: None: one process, that is not a rank of anything.
        variables: of the environment.

    Returns:
        0, or the exit status of the first rank that failed, at which all the others are ended; -9 when the
        time is up.
    """
    ranks = [Process(script, arguments, environment, log) for environment in environments_of(num_ranks, variables)]
    try:
        return _first_failure(ranks, time.monotonic() + timeout_seconds)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _first_failure(ranks: list[Process], until: float) -> int:
    running = list(ranks)
    while running:
        ended, _, _ = select.select(running, [], [], max(0.0, until - time.monotonic()))
        if not ended:
            return -9
        for rank in ended:
            running.remove(rank)
            if status := rank.wait():
                _let_end(running)
                return status
    return 0


def _let_end(ranks: list[Process]) -> None:
    """Time for the others to say what they saw of it."""
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait(timeout=10)


def before_any_fork() -> None:
    """Import what is not there yet, and leave all of it alone in collections of garbage."""
    import_libraries()


def run_job(work: Callable[[int], None], logs: Sequence[Path]) -> Outcome:
    """Run ``work`` as each rank of a job, with a log for each, and say how they ended.

    A rank ends as any other program does: this function raises ``SystemExit`` there, or what ``work`` raised.
    """
    started: dict[int, int] = {}
    for rank, (environment, log) in enumerate(zip(environments_of(len(logs)), logs, strict=True)):
        log.touch()
        process = os.fork()
        if process == 0:
            enter(environment, log)
            work(rank)
            sys.exit()
        started[process] = rank
    exits: list[int | None] = [None] * len(logs)
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
    return Outcome(exits, [log.read_text() for log in logs], ends[-1] - ends[0])
