"""What happens when a rank becomes slow while it trains: when is it noticed, and what does a new plan gain?

    torchrun --nproc_per_node=2 examples/benchmarks/slow_rank/main.py [--factor 1.5] [--save]

Twelve layers that sleep, 2 ms forward and 4 ms backward, so that each rank has a device of its own on any machine.
The run measures them and plans. From step 50 on the last rank sleeps ``factor`` times as long, whatever layers it
has. With ``replan="when_slow"`` the run notices it, plans again and moves layers; in the run after it nothing is
done.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1])]
from interleaved import environment

from deepspeed_partition.engine import PipelineModule, initialize
from deepspeed_partition.engine.runtime.collectives import gather_objects

FORWARD_SECONDS, BACKWARD_SECONDS, WIDTH = 0.002, 0.004, 8
SLOW_FROM = 50
slowness = [1.0]
"""The factor by which this rank sleeps longer, now."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS * slowness[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS * slowness[0])
        return gradient


class Sleeping(nn.Linear):
    """A small layer that sleeps in both directions."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Sleep.apply(x if x.requires_grad else x.requires_grad_()))


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels) ** 2).mean()


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def run(replan: str, factor: float, micro_batches: int, num_steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    slowness[0] = 1.0
    options = {"replan": replan, "patience_seconds": 0}
    module = PipelineModule(
        [Sleeping() for _ in range(12)], num_stages=dist.get_world_size(), loss_fn=loss, partition_method="madpipe"
    )
    engine, *_ = initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_print": sys.maxsize,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "pipeline": {"madpipe": options},
        },
        model_parameters=list(module.parameters()),
    )
    engine.watch_steps()
    batches, seconds, plans, noticed_at = data(), [], [], None
    for step in range(num_steps):
        if step == SLOW_FROM and dist.get_rank() == dist.get_world_size() - 1:
            slowness[0] = factor
        began = time.perf_counter()
        engine.train_batch(batches)
        seconds.append(time.perf_counter() - began)
        if engine.plan is not (plans[-1] if plans else None):
            plans.append(engine.plan)
            moved_at = step
        if noticed_at is None and engine.step_watch is not None and engine.step_watch.some_rank_is_slow:
            noticed_at = step
    first, last = plans[0], plans[-1]
    has_moved = len(plans) > 1
    during = seconds[SLOW_FROM : moved_at if has_moved else num_steps]
    after = seconds[moved_at + 1 :] if has_moved else []
    return {
        "replan": replan,
        "noticed_after_steps": None if noticed_at is None else noticed_at - SLOW_FROM + 1,
        "before_seconds": statistics.median(seconds[5:SLOW_FROM]),
        "during_seconds": statistics.median(during),
        "pause_seconds": seconds[moved_at] - statistics.median(after) if has_moved else None,
        "after_seconds": statistics.median(after) if has_moved else None,
        "planned_before_seconds": first.step_seconds,
        "planned_after_seconds": last.step_seconds if has_moved else None,
        "layers_before": _layers(first),
        "layers_after": _layers(last) if has_moved else None,
    }


def _layers(plan: Any) -> list[list[int]]:
    """Return the device of each stage, with its layers."""
    return [[stage.device, *stage.layers] for stage in plan.stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor", type=float, default=1.5)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--replan", nargs="+", default=["when_slow", "never"])
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    found = [
        run(replan, arguments.factor, arguments.micro_batches, arguments.steps) for replan in arguments.replan
    ]
    noticed = gather_objects([row["noticed_after_steps"] for row in found])
    assert all(each == noticed[0] for each in noticed), "all ranks hear of it in the same step"
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
        if arguments.save:
            path = Path(__file__).parent / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.json"
            path.parent.mkdir(exist_ok=True)
            saved = {"environment": environment(), "factor": arguments.factor, "runs": found}
            path.write_text(json.dumps(saved, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
