"""Trains any plan until the data end in the middle of a step; see ``test_any_plan.py``."""

from __future__ import annotations

import deepspeed
import torch

from tests.engine.any_plan_multiproc import begin, plan_for
from tests.engine.pipelines import micro_batch, mlp

NUM_READ = 10
"""Micro-batches: two steps and a half."""


def main() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    engine, _, _ = begin(mlp(), plan_for((0, 1, 0, 2), [0, 3, 5, 6, 8]))
    batches = map(micro_batch, range(NUM_READ))
    for _ in range(NUM_READ):
        engine.train_batch(batches)


main()
