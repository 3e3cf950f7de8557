"""Cases: what happens until a pipeline of many layers trains grows with their number, and not with its square."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine.running import batches, planned, start
from tests.growth import beyond_proportion, counted

FEW, MANY = 50, 200


class Small(nn.Module):
    """A layer that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def calls_until_training(number: int, method: Any, options: dict[str, Any]) -> Counter[str]:
    """The calls from the layers to the third step: the plan is made, and a quarter of the layers has moved."""
    layers = [*(Small() for _ in range(number - 1)), nn.Linear(8, 4)]
    with counted() as calls:
        engine, _, _ = start(layers, method, options, seed_layers=False)
        for batch in batches(3):
            engine.train_batch(iter(batch))
    # What the search does hangs on the times that were measured: see tests/planner for how it grows.
    return Counter({name: count for name, count in calls.items() if "/planner/solvers/" not in name})


def calls_grow_with_the_number_of_layers(_: Path) -> None:
    """An engine of 200 layers once took 17 s to build, and its first step 16 s."""
    for steps in (0, 2):
        found = {}
        for number in (4, FEW, MANY):  # the first loads what is loaded once
            options = planned([0, number // 4, number], warmup_steps=steps)
            found[number] = calls_until_training(number, "madpipe", options)
        of_ranks = gather_objects(beyond_proportion(found[FEW], found[MANY], MANY / FEW))
        assert not any(of_ranks), (steps, of_ranks)
        plans = [count for name, count in found[MANY].items() if name.endswith(" make_plan")]
        assert sum(plans) <= 2, plans


CASES = [calls_grow_with_the_number_of_layers]
