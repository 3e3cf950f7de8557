"""Trains while ranks stand still, or are lost; see ``test_frozen.py``. Each case is a job of forked processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_partition.engine.runtime import watch
from tests.choice import is_chosen
from tests.engine.pipelines import micro_batch, mlp
from tests.engine.running import planned, start
from tests.ranks import before_any_fork, run_job

CASES = {
    "stopped": 2, "computes": 2, "barrier": 2, "off": 2, "no_link_breaks": 4, "slow_store": 2, "measured": 2,
}  # fmt: skip
"""With so many ranks."""


class Slow(nn.Module):
    """Stands still in the fifth step."""

    num_forwards = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Slow.num_forwards += torch.is_grad_enabled()
        if Slow.num_forwards == 17:
            Slow.num_forwards += 1
            if self.what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.what == "computes":
                until = time.monotonic() + 8
                while time.monotonic() < until:
                    sum(range(1000))
        return x


class Meeting(nn.Module):
    """Wants to meet the other ranks, of which none runs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(total := x.detach().sum())
        return x + 0 * total


def measure(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    specs = mlp()
    specs.insert(6, Meeting())
    engine, _, _ = start(specs, "madpipe", planned([0, 4, 9], patience_seconds=2))
    engine.train_batch(iter(lambda: micro_batch(0), None))


def train(what: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    specs, cut = mlp(), [0, 4, 9] if dist.get_world_size() == 2 else [0, 3, 5, 7, 9]
    specs.insert(6, Slow(what))
    patience = {"madpipe": {"patience_seconds": 0 if what == "off" else 2}}
    engine, _, _ = start(specs, cut, {"pipeline": patience})
    data = iter(lambda: micro_batch(0), None)
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    for _ in range(6):
        engine.train_batch(data)
    if what in ("barrier", "off"):
        if rank == 1:
            time.sleep(8)
        engine.save_checkpoint(str(folder / "saved"))
    if what == "no_link_breaks":
        # As on NCCL: what rank 0 waits for does not fail when rank 1 dies, and rank 3 waits for its device.
        others: Any = dist.new_group([0, 2])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            dist.recv(torch.zeros(1), 2, group=others)
        if rank == 3:
            watch.watch._device = Mock(is_through=lambda: False)
            time.sleep(60)
        time.sleep(10)  # rank 2 computes, and is not ended
    time.sleep(1)  # in which it is said that a rank goes on
    print("the end", flush=True)


class SlowStore:
    """Answers late, as that of a busy machine."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        def answer(*_: Any) -> int:
            with suppress(RuntimeError):  # the time is up
                self.store.wait(["a key that nobody sets"], timedelta(seconds=1.2))
            return 0

        return answer


class Late:
    """Keeps Python from ending for a while."""

    def __del__(self) -> None:
        time.sleep(3)


def end_beside_slow_store(folder: Path, rank: int) -> None:
    deepspeed.init_distributed()
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    watch.watch.start()
    if rank == 1:
        watch.watch._store = SlowStore(watch.watch._store)
        sys.modules["late"] = Late()  # type: ignore[assignment]
    time.sleep(0.7)


def let_go_on(folder: Path, log: Path) -> None:
    """Wake the rank that is stopped when it has been spoken of."""
    while not (log.exists() and " has waited " in log.read_text()):
        time.sleep(0.2)
    time.sleep(1)
    os.kill(int((folder / "rank1").read_text()), signal.SIGCONT)


def end_job(folder: Path, log: Path) -> None:
    """End ranks that wait for ever, when that has been said."""
    while not (log.exists() and " has waited " in log.read_text()):
        time.sleep(0.2)
    for rank in (0, 1):
        os.kill(int((folder / f"rank{rank}").read_text()), signal.SIGKILL)


def main(out: Path) -> None:
    before_any_fork()
    watch.ANSWER_SECONDS, watch.GRACE_SECONDS, watch.TICK_SECONDS = 1.0, 3.0, 0.3
    outcomes = {}
    for what, num_ranks in CASES.items():
        if not is_chosen(what):
            continue
        folder = out.parent / what
        folder.mkdir()
        logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
        if what == "stopped":
            threading.Thread(target=let_go_on, args=(folder, logs[0]), daemon=True).start()
        if what == "measured":
            threading.Thread(target=end_job, args=(folder, logs[0]), daemon=True).start()
        others: dict[str, Any] = {"slow_store": end_beside_slow_store, "measured": measure}
        outcome = run_job(functools.partial(others.get(what, functools.partial(train, what)), folder), logs)
        pids = [int((folder / f"rank{rank}").read_text()) for rank in range(num_ranks)]
        outcomes[what] = {**outcome._asdict(), "pids": pids}
        out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
