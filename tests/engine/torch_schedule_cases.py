"""Schedule files of plans, run by ``torch.distributed.pipelining``: the gradients of one process."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from deepspeed_partition import Plan, cli
from tests.engine import plans
from tests.engine.pipelines import Block, loss_fn

WIDTH = 6
NUM_MICRO_BATCHES, MICRO_BATCH_SIZE = 6, 3
MAPS = {
    2: [((0, 1), [0, 2, 5]), ((0, 1, 0, 1), [0, 1, 3, 4, 5]), ((1, 0, 0, 1), [0, 1, 2, 4, 5])],
    4: [((0, 1, 2, 3), [0, 1, 2, 4, 5]), ((0, 1, 2, 3, 0), [0, 1, 2, 3, 4, 5])],
}


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH), *(Block(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 4)]


def run_in_torch(plan: Plan, file: Path, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of this rank's layers after one step of the schedule in ``file``."""
    rank, own = dist.get_rank(), layers()
    stages = [
        PipelineStage(nn.Sequential(*own[slice(*stage.layers)]), index, len(plan.stages), torch.device("cpu"))
        for index, stage in enumerate(plan.stages)
        if stage.device == rank
    ]
    schedule = _PipelineScheduleRuntime(stages, NUM_MICRO_BATCHES, loss_fn=loss_fn)
    schedule._load_csv(str(file), format="compute_only")
    has_first, has_last = plan.stages[0].device == rank, plan.stages[-1].device == rank
    schedule.step(*((inputs,) if has_first else ()), **({"target": labels, "losses": []} if has_last else {}))
    held = {layer for stage in plan.stages if stage.device == rank for layer in range(*stage.layers)}
    return {
        f"{layer}.{name}": weight.grad
        for layer in held
        for name, weight in own[layer].named_parameters()
        if weight.grad is not None
    }


def schedule_files_run_in_torch(folder: Path) -> None:
    """Plans of patterns and of orders, with one stage on each rank and with several, on any."""
    generator = torch.Generator().manual_seed(5)
    size = NUM_MICRO_BATCHES * MICRO_BATCH_SIZE
    inputs = torch.randn(size, WIDTH, generator=generator)
    labels = torch.randint(4, (size,), generator=generator)
    alone = nn.Sequential(*layers())
    loss_fn(alone(inputs), labels).backward()
    expected = {name: weight.grad for name, weight in alone.named_parameters()}
    num_ranks = dist.get_world_size()
    for number, (devices, cuts) in enumerate(MAPS[num_ranks]):
        for is_ordered in (True, False):
            orders: Any = plans.depth_first(devices, NUM_MICRO_BATCHES, 3) if is_ordered else None
            plan = plans.plan_of(plans.chain_of(5), plans.platform_of(num_ranks), cuts, devices, orders=orders)
            file = folder / f"{number}-{is_ordered}.csv"
            if dist.get_rank() == 0:
                plan.save(folder / "plan.json")
                options = [] if is_ordered else ["--micro-batches", str(NUM_MICRO_BATCHES)]
                made = ["convert", str(folder / "plan.json"), "--to", "torch-csv", *options, "-o", str(file)]
                assert cli.run(made) == 0
            dist.barrier()
            found = run_in_torch(plan, file, inputs, labels)
            everyone: list[Any] = [None] * num_ranks
            dist.all_gather_object(everyone, set(found))
            assert set(itertools.chain.from_iterable(everyone)) == set(expected), "every weight has a gradient"
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
