"""Does a step on DeepSpeed's own engine take as long as the plan says?

    torchrun --nproc_per_node=4 examples/benchmarks/step_prediction/main.py --rounds 5 [--save]

Layers that sleep for their forward and backward, so that every stage has a device of its own. A chain of 12
uneven layers is cut by ``madpipe`` and by DeepSpeed's ``parameters`` and ``uniform``; the engines of all cuts
stand side by side and take a step in turn, so that noise hits them alike. Run with 2 and with 4 processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import date
from itertools import repeat
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.profiling import measure_links

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulation import sleeping_layers
from interleaved import engine_for, ratios, step_seconds

MICRO_BATCHES = 16
MILLISECONDS = [2, 12, 6, 3, 9, 4, 4, 3, 5, 2, 3, 5]
"""Milliseconds of each layer's forward; the backward takes twice as long. Early layers are slow, late ones
heavy."""
PARAMETERS = [1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 8]
BOUNDARY_BYTES = 4096


def chain() -> Chain:
    return Chain(
        name="sleeping",
        input_bytes=BOUNDARY_BYTES,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_seconds=forward / 1000,
                backward_seconds=2 * forward / 1000,
                weight_bytes=4 * weight,
                output_bytes=BOUNDARY_BYTES,
                num_trainable_parameters=weight,
            )
            for index, (forward, weight) in enumerate(zip(MILLISECONDS, PARAMETERS, strict=True))
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    link = measure_links()
    num_stages = dist.get_world_size()
    model = chain()
    platform = Platform(
        num_devices=num_stages, memory_bytes=10**9, bandwidth=link.bandwidth, latency_seconds=link.latency_seconds
    )
    plans = {
        name: make_plan(model, platform, name, num_micro_batches=MICRO_BATCHES, num_stages=num_stages)
        for name in ("madpipe", "parameters", "uniform")
    }
    engines = {
        name: engine_for(
            sleeping_layers(model), plan.boundaries, MICRO_BATCHES, 1, lambda outputs, _: outputs.sum()
        )
        for name, plan in plans.items()
    }
    micro_batch = (torch.zeros(1, BOUNDARY_BYTES // 4), torch.zeros(1))
    seconds = step_seconds(engines, lambda: repeat(micro_batch), arguments.rounds)
    if dist.get_rank() == 0:
        report(plans, seconds, arguments.save)
    dist.barrier()
    dist.destroy_process_group()


def report(plans: dict[str, Plan], seconds: dict[str, list[float]], save: bool) -> None:
    num_stages = len(plans["madpipe"].stages)
    table = Table(title=f"{num_stages} stages, {MICRO_BATCHES} micro-batches: seconds of one step")
    for name in ("cut", "boundaries", "planned", "measured", "measured / planned", "against madpipe"):
        table.add_column(name, justify="left" if name in ("cut", "boundaries") else "right")
    slower = ratios(seconds, to="madpipe")
    rows = []
    for name, plan in plans.items():
        measured, planned = statistics.median(seconds[name]), plan.blocking_step_seconds
        assert planned is not None
        rows.append({"cut": name, "boundaries": plan.boundaries, "blocking_step_seconds": planned,
                     "measured_seconds": measured, "measured_over_planned": measured / planned,
                     "over_madpipe": slower[name]})  # fmt: skip
        table.add_row(name, str(plan.boundaries), f"{planned:.3f}", f"{measured:.3f}", f"{measured / planned:.3f}",
                      f"{slower[name]:.2f}")  # fmt: skip
    Console(width=120).print(table)
    if save:
        path = Path(__file__).parent / "results" / f"sleeping_{num_stages}_stages_{date.today():%Y%m}.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
