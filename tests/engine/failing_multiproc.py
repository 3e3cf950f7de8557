"""Trains any plan until something goes wrong in the middle of a step; see ``test_any_plan.py``."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from any_plan_multiproc import begin, plan_for
from deepspeed.pipe import LayerSpec
from pipelines import micro_batch, mlp
from torch import nn


class Failing(nn.Module):
    """Goes wrong in the third step."""

    num_forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Failing.num_forwards += 1
        if Failing.num_forwards == 10 and sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def data() -> Iterator[Any]:
    for number in itertools.count():
        if sys.argv[1] == "ended" and number == 10:
            return
        yield micro_batch(number)


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    specs = mlp()
    specs.insert(4, LayerSpec(Failing))
    engine, _, _ = begin(specs, plan_for((0, 1, 0, 2), [0, 3, 5, 7, 9]))
    batches = data()
    for _ in range(100):  # and no more, if nothing ends it
        engine.train_batch(batches)


main()
