"""What does a pipeline gain that never drains, and how near is its period to the plan's?

    torchrun --nproc_per_node=4 examples/benchmarks/asynchronous/main.py --save
    torchrun --nproc_per_node=8 examples/benchmarks/asynchronous/main.py --save

One stage per rank, all alike. Layers sleep, so that each rank has a device of its own on any machine; links take
no time. For each number of micro-batches per update: batches of the same engine with ``weight_versions`` of
``flush``, and of each mode that does not drain, all of them in one run. Measured is the time from the end of one
batch to that of the last one, on the slowest rank, after batches that warm up and before the drain.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.collectives import gather_objects

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from interleaved import engine_for_plan, environment

NUMBERS = 16
"""Numbers that a layer hands on."""
FILL = 3
"""Micro-batches per rank that are not measured: up to two per rank are in flight, which come in one by one."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, layer: Sleeping) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        time.sleep(layer.forward_seconds)
        return torch.zeros(1, NUMBERS)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(2 * ctx.layer.forward_seconds)
        return torch.zeros(1), torch.zeros(ctx.shape), None


class Sleeping(nn.Module):
    """Sleeps for its forward, and twice as long for its backward."""

    def __init__(self, forward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds, self.weight = forward_seconds, nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.weight, x, self)


def plan_of(num_ranks: int, layer_seconds: float, micro_batches: int, mode: str) -> Plan:
    """Return the contiguous plan of one layer per rank."""
    layer = LayerProfile(
        name="sleeping", forward_seconds=layer_seconds, backward_seconds=2 * layer_seconds, weight_bytes=4,
        output_bytes=4 * NUMBERS, num_trainable_parameters=1,
    )  # fmt: skip
    chain = Chain(name="even", input_bytes=4, layers=(layer,) * num_ranks)
    platform = Platform(num_devices=num_ranks, memory_bytes=10**12, bandwidth=1e12, duplex="full", comm_buffers=4)
    return make_plan(
        chain, platform, list(range(num_ranks + 1)), num_micro_batches=micro_batches, recompute="never",
        weight_versions=mode,
    )  # fmt: skip


def measured(mode: str, layer_seconds: float, micro_batches: int, num_batches: int) -> dict[str, Any]:
    """Return what one mode takes and holds."""
    num_ranks = dist.get_world_size()
    plan = plan_of(num_ranks, layer_seconds, micro_batches, mode)
    layers = [Sleeping(layer_seconds) for _ in range(num_ranks)]
    engine: Any = engine_for_plan(
        layers, plan, micro_batches, lambda outputs, _: outputs.sum(), gradient_clipping=0.0
    )  # fmt: skip
    data = repeat((torch.zeros(1, 1), torch.zeros(1)))
    gc.collect()
    gc.freeze()  # to look for garbage among all that was imported takes a rank 0.2 s, each at another time
    ends, held, warm_up = [], 0, max(2, math.ceil(FILL * num_ranks / micro_batches))
    for _ in range(warm_up + num_batches):
        engine.train_batch(data)
        ends.append(time.perf_counter())
        if engine._endless is not None:
            held = engine._endless.weights_of(engine.stage_id).most_held
    batch_seconds = max(gather_objects((ends[-1] - ends[warm_up - 1]) / num_batches))
    held_of_all = gather_objects(held)
    engine.come_to_rest()
    engine.destroy()
    versions = plan.versions
    return {
        "ranks": num_ranks, "micro_batches": micro_batches, "mode": mode, "layer_ms": 1e3 * layer_seconds,
        "batch_seconds": batch_seconds,
        "planned_seconds": plan.step.step_seconds if plan.step else micro_batches * plan.period_seconds,
        "versions_held": held_of_all,
        "versions_planned": [] if versions is None else [versions.num_held(stage) for stage in range(num_ranks)],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--modes", nargs="+", default=["stashing", "2bw", "vertical-sync"])
    parser.add_argument("--layer-ms", type=float, default=30.0, help="forward; a backward takes twice that")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    lines = []
    for micro_batches in arguments.micro_batches:
        found = []
        for mode in ("flush", *arguments.modes):
            found.append(measured(mode, arguments.layer_ms / 1e3, micro_batches, arguments.batches))
        lines += found
        for each in found if dist.get_rank() == 0 else ():
            print(
                f"P={each['ranks']} m={micro_batches} {each['mode']:14} {1e3 * each['batch_seconds']:8.1f} ms, "
                f"{each['batch_seconds'] / each['planned_seconds']:.3f} of planned, "
                f"{found[0]['batch_seconds'] / each['batch_seconds']:.2f} times flush, "
                f"versions {each['versions_held']} planned {each['versions_planned']}",
                flush=True,
            )
    if dist.get_rank() == 0 and arguments.save:
        path = HERE / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in ({"environment": environment()}, *lines)))
        print(f"saved {path.name}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
