"""Trains plans with several stages per rank until one rank fails; see ``test_ends.py``.

The packages are imported once. Each case is a job of its own, of processes that are forked from here and end as
any others do; nobody ends them.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from any_plan_multiproc import begin, plan_for
from deepspeed.pipe import LayerSpec
from pipelines import micro_batch, mlp
from running import NUM_MICRO_BATCHES
from torch import nn

PATIENCE_SECONDS = 300
"""For all processes of a case to end; what then still runs was left behind."""


class Case(NamedTuple):
    """What goes wrong, and where."""

    how: str
    """``killed``, ``raised`` (in a layer), ``raised late`` (in the last backward of a batch) or ``ended`` (the
    data)."""
    devices: tuple[int, ...]
    rank: int

    def __str__(self) -> str:
        return f"{self.how.replace(' ', '_')}_{'-'.join(map(str, self.devices))}_rank{self.rank}"


CUTS = {(1, 0): [0, 4, 9], (0, 1, 0): [0, 3, 6, 9], (0, 1, 1, 0): [0, 3, 5, 7, 9], (0, 1, 0, 1): [0, 3, 5, 7, 9]}
CASES = [
    Case("killed", (0, 1, 0), 1),
    Case("killed", (0, 1, 1, 0), 0),
    Case("raised", (0, 1, 0), 1),
    Case("raised", (0, 1, 1, 0), 0),
    Case("raised late", (1, 0), 1),  # when the other rank waits to apply its gradients
    Case("ended", (0, 1, 0, 1), 0),  # the first stage's
    Case("ended", (0, 1, 0, 1), 1),  # the last stage's
]


class Failing(nn.Module):
    """Goes wrong in the third step."""

    num_forwards = num_backwards = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Failing.num_forwards += 1
        if self.how == "raised late":
            x.register_hook(self.fail_late)
        elif Failing.num_forwards == 11:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ArithmeticError("the layer has had enough")
        return x

    def fail_late(self, _: torch.Tensor) -> None:
        Failing.num_backwards += 1
        if Failing.num_backwards == 3 * NUM_MICRO_BATCHES:
            raise ArithmeticError("the layer has had enough")


def data(num: float) -> Iterator[Any]:
    for number in itertools.count():
        if number == num:
            return
        yield micro_batch(number)


def train(case: Case, rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    specs = mlp()
    # A layer of the first stage on that device.
    place = CUTS[case.devices][case.devices.index(case.rank)] + 1
    specs.insert(place, LayerSpec(Failing, case.how) if case.how != "ended" else nn.Identity())
    engine, _, _ = begin(specs, plan_for(case.devices, CUTS[case.devices]))
    ends_here = case.how == "ended" and rank == case.rank
    batches = data(10 if ends_here else float("inf"))
    for _ in range(100):  # and no more, if nothing ends it
        engine.train_batch(batches)


def run(case: Case, folder: Path) -> dict[str, Any] | None:
    """How the processes of a case ended; None in these processes themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"{case}_{rank}.log" for rank in range(2)]
    started: dict[int, int] = {}
    for rank, log in enumerate(logs):
        process = os.fork()
        if process == 0:
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            train(case, rank, port)
            return None
        started[process] = rank
    exits: list[int | None] = [None, None]
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
    print(f"{case}: the other rank ended {ends[-1] - ends[0]:.2f} s after the first one")
    return {"exits": exits, "logs": [log.read_text() for log in logs]}


def main(out: Path) -> None:
    outcomes = {}
    for case in CASES:
        outcome = run(case, out.parent)
        if outcome is None:
            return
        outcomes[str(case)] = outcome
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
