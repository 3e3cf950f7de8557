"""Who is missing while a job begins: before all ranks have joined there is no store that they could ask.

The ranks of this machine are found by the environment of their processes. One that was there and is gone will
never come: then this rank ends with the reason. Of others it is said, once, that they are missing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from deepspeed_partition.engine.runtime import watch
from deepspeed_partition.engine.runtime.environment import log_here
from deepspeed_partition.options import PATIENCE_SECONDS

TICK_SECONDS = 0.5
SLOW_BEGINNING = 2
"""How many times as long a rank waits without a line where all ranks of the job have a process on this machine."""

LAST_PATIENCE_SECONDS = 5.0
"""How long the end of the process waits for the thread that looks on."""

_begun = False
_over = threading.Event()
_started_by: int | None = None


def watch_joining(started_by: int | None = None) -> None:
    """Look on until this rank's first engine is made; where its environment says that it is one of several.

    Args:
        started_by: the process of rank 0, where that is this one's parent, whose environment does not tell.
    """
    global _begun, _started_by
    _started_by = _started_by or started_by
    rank, size, port = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    rank = os.environ.get("LOCAL_RANK") if rank is None else rank
    if _begun or not (rank and size and port) or not (rank.isdigit() and size.isdigit()) or int(size) < 2:
        return
    _begun = True
    look_on = threading.Thread(
        target=_look_on, args=(int(rank), int(size), port), name="madpipe-joining", daemon=True
    )
    look_on.start()
    atexit.register(_end, look_on)


def _end(look_on: threading.Thread) -> None:
    """End the thread, where no engine has: one that still runs when Python ends may abort the process."""
    _over.set()
    look_on.join(LAST_PATIENCE_SECONDS)


def _look_on(rank: int, size: int, port: str) -> None:
    seen: set[int] = set()
    place: tuple[int, int] | None = None
    since, said = time.monotonic(), False
    while not watch.watch.is_looking and not _over.is_set():
        there = ranks_on_this_machine(size, port, os.listdir("/proc") if Path("/proc/self").exists() else ())
        if _started_by is not None:
            there = there | {0} if os.getppid() == _started_by else there
            seen.add(0)
        seen |= there
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if frame is None or not threading.main_thread().is_alive():
            return
        now, here = time.monotonic(), (id(frame), frame.f_lasti)
        if here != place or not watch.waits_for_ranks(frame):
            if said:
                log_here(f"rank {rank} goes on after {now - since:.0f} s")
            place, since, said = here, now, False
        waited = now - since
        lost = sorted(seen - there - {rank})
        if lost and waited >= watch.GRACE_SECONDS:
            named = _ranks(lost)
            log_here(f"rank {rank} ends: it waits for {named} to join the job, which had begun and has ended")
            watch.leave_at_once()
        missing = [other for other in range(size) if other not in there and other != rank]
        # Where all are here they begin slowly, as on a busy machine: that is worth a line later.
        if waited >= PATIENCE_SECONDS * (1 if missing else SLOW_BEGINNING) and not said:
            said = True
            where = f"{_ranks(missing)} not seen on this machine" if missing else "all have a process here"
            log_here(f"rank {rank} has waited {waited:.0f} s {_what_for(size, port)}: {where}")
        _over.wait(TICK_SECONDS)


def _what_for(size: int, port: str) -> str:
    if dist.is_initialized():
        return "for other ranks in a call of torch.distributed, before its first engine"
    return f"to join the {size} ranks at port {port}"


def ranks_on_this_machine(size: int, port: str, processes: Iterable[str]) -> set[int]:
    """The ranks of the job that have a process here which this user may look at.

    Args:
        size: of the job.
        port: of its rendezvous, which tells it from other jobs.
        processes: the names in ``/proc``.
    """
    found: set[int] = set()
    wanted = {f"WORLD_SIZE={size}".encode(), f"MASTER_PORT={port}".encode()}
    for process in processes:
        if not process.isdigit():
            continue
        with contextlib.suppress(OSError, KeyError, ValueError):  # it has ended, or belongs to somebody else
            variables = set(Path(f"/proc/{process}/environ").read_bytes().split(b"\0"))
            if wanted <= variables:
                named = dict(variable.partition(b"=")[::2] for variable in variables)
                found.add(int(named.get(b"RANK") or named[b"LOCAL_RANK"]))
    return found


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
