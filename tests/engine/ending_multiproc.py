"""Trains plans with several stages per rank until one rank fails; see ``test_ends.py``.

The packages are imported once. Each case is a job of its own, of processes that are forked from here and end as
any others do; nobody ends them.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.engine.runtime.collectives import refused_together
from deepspeed_partition.engine.runtime.environment import prepare_cpu
from tests.engine.any_plan_multiproc import begin, plan_for
from tests.engine.pipelines import micro_batch, mlp
from tests.engine.running import NUM_MICRO_BATCHES
from tests.ranks import before_any_fork, run_job


class Case(NamedTuple):
    """What goes wrong, and where."""

    how: str
    """``killed``, ``raised`` (in a layer), ``raised late`` (in the last backward of a batch), ``ended`` (the
    data) or ``refused`` (on all ranks, for what this one has met; the last rank takes a second to end)."""
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
    Case("refused", (0, 1, 0), 1),
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


def refused(trace: Path, rank: int) -> None:
    def refuse() -> None:
        if rank == 1:
            raise ValueError("no plan suits rank 1")

    if rank == 1:
        atexit.register(trace.touch)
        atexit.register(time.sleep, 1.0)
    refused_together(refuse)


def train(case: Case, trace: Path, rank: int) -> None:
    torch.set_num_threads(1)
    if case.how == "refused" and rank == 0:
        atexit.register(lambda: print("rank 1 was", "there" if trace.exists() else "not there", flush=True))
        prepare_cpu()  # whose end at exit comes before what was registered earlier
    deepspeed.init_distributed()
    specs = mlp()
    # A layer of the first stage on that device.
    place = CUTS[case.devices][case.devices.index(case.rank)] + 1
    specs.insert(place, LayerSpec(Failing, case.how) if case.how not in ("ended", "refused") else nn.Identity())
    engine, _, _ = begin(specs, plan_for(case.devices, CUTS[case.devices]))
    ends_here = case.how == "ended" and rank == case.rank
    batches = data(10 if ends_here else float("inf"))
    if case.how == "refused":
        refused(trace, rank)
    for _ in range(100):  # and no more, if nothing ends it
        engine.train_batch(batches)


def main(out: Path) -> None:
    before_any_fork()
    outcomes = {}
    for case in CASES:
        logs = [out.parent / f"{case}_{rank}.log" for rank in range(2)]
        outcome = run_job(functools.partial(train, case, out.parent / f"{case}.trace"), logs)
        print(f"{case}: the other rank ended {outcome.seconds_apart:.2f} s after the first one")
        outcomes[str(case)] = outcome._asdict()
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
