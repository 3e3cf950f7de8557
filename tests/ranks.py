"""Starts the ranks of a job as torchrun does, forked from one process that has imported the libraries.

Importing torch, DeepSpeed and Lightning takes a rank longer than most cases do. :func:`run_ranks` runs a script,
and ends all ranks when one has failed; :func:`run_job` runs a function of the program that calls it, and lets its
ranks end by themselves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import random
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

LIBRARIES = [
    "torch", "torch._dynamo", "numpy", "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer",
    "pytorch_lightning",
]  # fmt: skip
"""Not ours, which each rank imports as any process does. What is not installed is left out."""
ON_THE_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
OF_A_JOB = ("PL_", "RANK", "WORLD", "LOCAL_", "MASTER_", "MADPIPE")
"""How variables begin that belong to a job, and that this one must not inherit."""
PATIENCE_SECONDS = 300
"""For all ranks that are to end by themselves; what then still runs was left behind."""


class Outcome(NamedTuple):
    exits: list[int | None]
    """Of each rank; None where it had to be killed."""
    logs: list[str]
    seconds_apart: float
    """From the end of the first rank to that of the last one."""


def environments_of(num_ranks: int | None, variables: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The environment of each rank, as torchrun makes it; of one process that is no rank if ``None``."""
    common = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_JOB)}
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


def _enter(environment: Mapping[str, str], log: Path) -> None:
    """Be a rank: with its environment, in the folder of its log, where all that it prints goes."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(log.parent)
    os.environ.clear()
    os.environ.update(environment)
    collect_seldom()
    finish_what_runs()
    use_one_device_of_gloo()
    random.seed()  # ranks that must draw the same numbers have to see to it
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def collect_seldom() -> None:
    """Let Python look for garbage a hundred times less often: engines and their tests make much, in small pieces."""
    gc.set_threshold(70_000, 20, 20)


def finish_what_runs() -> None:
    """Let no thread of this process interrupt another one, where the system knows such a policy.

    A message wakes gloo's thread, often before the sender has let go of the connection's lock: that thread then
    tries again and again until the sender is given its core back, a fifth of the time where cores are few.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_one_device_of_gloo() -> None:
    """Let all process groups of this process have one thread that waits for messages, where torch allows it.

    Each group of gloo has one of its own, that wakes up a hundred times a second: a fifth of the time of tests
    that make many engines.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    group = torch.distributed.distributed_c10d.ProcessGroupGloo
    make, devices = group.__init__, []

    def share(self: Any, store: Any, rank: int, size: int, timeout: Any = None, **more: Any) -> None:
        options = group._Options()
        if more or timeout is None or not hasattr(options, "_devices"):
            make(self, store, rank, size, *filter(None, [timeout]), **more)
            return
        if not devices:
            devices.append(group.create_default_device())
        options._devices, options._timeout = devices, timeout
        make(self, store, rank, size, options)

    group.__init__ = share


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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    with mock.patch.dict(os.environ, ON_THE_CPU):  # as DeepSpeed asks for it when it is imported
        multiprocessing.forkserver.ensure_running()
    log.touch()
    ranks = [
        context.Process(target=_rank, args=(script, list(arguments), environment, log))
        for environment in environments_of(num_ranks, variables)
    ]
    for rank in ranks:
        rank.start()
    try:
        return _first_failure(ranks, time.monotonic() + timeout_seconds)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _first_failure(ranks: list[multiprocessing.process.BaseProcess], until: float) -> int:
    running = list(ranks)
    while running:
        left = max(0.0, until - time.monotonic())
        ended = multiprocessing.connection.wait([rank.sentinel for rank in running], timeout=left)
        if not ended:
            return -9
        for rank in [rank for rank in running if rank.sentinel in ended]:
            rank.join()
            running.remove(rank)
            if rank.exitcode:
                _let_end(running)
                return rank.exitcode
    return 0


def _let_end(ranks: list[multiprocessing.process.BaseProcess]) -> None:
    """Time for the others to say what they saw of it."""
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(timeout=10)


def _rank(script: Path, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    _enter(environment, log)
    gc.freeze()  # a million objects of the libraries, through which each collection would go
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def before_any_fork() -> None:
    """Import what DeepSpeed imports late, seconds in each process; and leave all of it alone in collections."""
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # compiles something
    gc.collect()
    gc.freeze()


def run_job(work: Callable[[int], None], logs: Sequence[Path]) -> Outcome:
    """Run ``work`` as each rank of a job, with a log for each, and say how they ended.

    A rank ends as any other program does: this function raises ``SystemExit`` there, or what ``work`` raised.
    """
    started: dict[int, int] = {}
    for rank, (environment, log) in enumerate(zip(environments_of(len(logs)), logs, strict=True)):
        log.touch()
        process = os.fork()
        if process == 0:
            _enter(environment, log)
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
