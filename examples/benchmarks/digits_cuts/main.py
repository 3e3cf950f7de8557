"""What does the planned cut of the digits network gain over DeepSpeed's ``parameters`` and ``uniform``?

    torchrun --nproc_per_node=2 examples/benchmarks/digits_cuts/main.py --rounds 12 [--save]

Three answers: by layer times measured alone; by steps of the real network on this machine, whose two processes
slow each other where they share caches and memory; and by steps of layers that sleep for the measured times,
which is what devices of their own give. Engines of all cuts stand side by side and take a step in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import date
from itertools import cycle, repeat
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Platform, make_plan
from deepspeed_partition.profiling import measure_links, profile_chain

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from emulation import sleeping_layers
from interleaved import engine_for, ratios, step_seconds
from train_lightning import Digits, loaders

MICRO_BATCH, MICRO_BATCHES = 16, 8
SLEEP_SCALE = 4
"""Longer sleeps, so that the fraction of a millisecond by which each is late does not count."""
CUTS = ("madpipe", "parameters", "uniform")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    images, labels = next(iter(loaders()[0]))
    micro_batches = list(zip(images.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True))
    link = measure_links()
    boxes = [None]
    alone = dist.new_group([0])
    if dist.get_rank() == 0:
        layers = list(Digits(1).net)
        boxes = [
            profile_chain(layers, micro_batches[0], loss_fn=F.cross_entropy, name="digits", repeats=9, group=alone)
        ]
    dist.barrier()
    dist.broadcast_object_list(boxes)
    chain = boxes[0]
    platform = Platform(
        num_devices=2, memory_bytes=10**10, bandwidth=link.bandwidth, latency_seconds=link.latency_seconds
    )
    plans = {
        name: make_plan(chain, platform, name, num_micro_batches=MICRO_BATCHES, num_stages=2) for name in CUTS
    }
    real = {
        name: engine_for(list(Digits(1).net), plan.boundaries, MICRO_BATCHES, MICRO_BATCH, F.cross_entropy)
        for name, plan in plans.items()
    }
    measured = step_seconds(real, lambda: cycle(micro_batches), arguments.rounds)
    asleep = {
        name: engine_for(
            sleeping_layers(chain, time_scale=SLEEP_SCALE),
            plan.boundaries,
            MICRO_BATCHES,
            1,
            lambda outputs, _: outputs.sum(),
        )
        for name, plan in plans.items()
    }
    sleeper = (torch.zeros(1, 1), torch.zeros(1))
    slept = step_seconds(asleep, lambda: repeat(sleeper), arguments.rounds)
    if dist.get_rank() == 0:
        planned = {name: [plan.blocking_step_seconds or 0.0] for name, plan in plans.items()}
        rows = []
        table = Table(
            title=f"digits, 2 stages, {MICRO_BATCHES} micro-batches of {MICRO_BATCH}: step against madpipe's"
        )
        for title in (
            "cut",
            "boundaries",
            "planned",
            "",
            "real layers",
            "",
            f"sleeping layers, {SLEEP_SCALE} x",
            "",
        ):
            table.add_column(title, justify="left" if title in ("cut", "boundaries") else "right")
        for name, plan in plans.items():
            row = {"cut": name, "boundaries": plan.boundaries}
            cells = [name, str(plan.boundaries)]
            for kind, seconds in (("planned", planned), ("real", measured), ("sleeping", slept)):
                row[f"{kind}_seconds"] = statistics.median(seconds[name])
                row[f"{kind}_over_madpipe"] = ratios(seconds, to="madpipe")[name]
                cells += [f"{row[f'{kind}_seconds']:.3f} s", f"{row[f'{kind}_over_madpipe']:.2f}"]
            rows.append(row)
            table.add_row(*cells)
        Console(width=120).print(table)
        if arguments.save:
            results = Path(__file__).parent / "results"
            (results / f"digits_2_processes_{date.today():%Y%m}.json").write_text(
                json.dumps(rows, indent=1) + "\n"
            )
            chain.save(results / f"digits_chain_{date.today():%Y%m}.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
