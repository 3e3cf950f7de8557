"""How much faster is a step whose transfers run beside computation, on the same cut as DeepSpeed's?

    torchrun --nproc_per_node=4 examples/benchmarks/overlap/main.py --rounds 5 [--save]
    torchrun --nproc_per_node=4 examples/benchmarks/overlap/main.py --rounds 5 --megabytes 1 4 [--save]

One layer per stage that sleeps for its forward and backward, and links that sleep: no computation, so that every
stage has a device of its own. The ratio is that of transfers to computation per micro-batch, 2c / (tF + tB).
With ``--megabytes`` activations of these sizes travel over the machine's loopback instead, at what that takes.
With ``--told-each-time`` ours tell the shapes of every activation, for micro-batches of different shapes.

- ``DeepSpeed``: its own engine, whose transfers block.
- ``same depth``: ours, with DeepSpeed's order of computations.
- ``deep``: ours, with about twice as many micro-batches in flight.

A step of each in turn, so that noise hits all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.planner.plan import StepPlan
from deepspeed_partition.planner.step import one_f_one_b_order

sys.path.insert(0, str(Path(__file__).parents[1]))
from emulation import SlowTransfers, sleeping_layers, slow_blocking_transfers
from interleaved import engine_for, ratios, step_seconds

FORWARD_SECONDS = 0.02
RATIOS = [0.05, 0.1, 0.25, 0.5]
NUMBERS = 1024
"""In each activation: what really travels takes no time worth counting."""


class EmulatedEngine(MadPipeEngine):
    transfers_class = SlowTransfers


class Within:
    """An engine whose steps run within a context."""

    def __init__(self, engine: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.engine, self.context = engine, context

    def train_batch(self, data: Iterator[Any]) -> Any:
        with self.context():
            return self.engine.train_batch(data)


def chain(num_layers: int, numbers: int) -> Chain:
    layer = LayerProfile(
        name="sleeping", forward_seconds=FORWARD_SECONDS, backward_seconds=2 * FORWARD_SECONDS, weight_bytes=4,
        output_bytes=4 * numbers, num_trainable_parameters=1,
    )  # fmt: skip
    return Chain(name="even", input_bytes=4 * numbers, layers=(layer,) * num_layers)


def plan_of_depth(plan: Plan, depths: list[int], micro_batches: int) -> Plan:
    """1F1B with so many micro-batches in flight."""
    orders = tuple(one_f_one_b_order(stage, depth, micro_batches) for stage, depth in enumerate(depths))
    step = StepPlan(num_micro_batches=micro_batches, step_seconds=0.0, blocking_step_seconds=None, order=orders)
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    return replace(plan, step=step, stages=stages)


def overlapping_engine(
    engine_class: type, plan: Plan, layers: list[Any], micro_batches: int, told_each_time: bool
) -> Any:
    module = PipelineModule(layers, num_stages=dist.get_world_size(), plan=plan, loss_fn=loss)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9, "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    }  # fmt: skip
    parameters = list(module.parameters())
    engine = initialize_with(engine_class, model=module, config=config, model_parameters=parameters)[0]
    engine.dynamic_shape = told_each_time  # which a CPU has, and a GPU has not, unless its user asks for it
    return engine


def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def engines_for(
    engine_class: type, numbers: int, num_stages: int, micro_batches: int, told_each_time: bool
) -> dict[str, Any]:
    model = chain(num_stages, numbers)
    platform = Platform(num_devices=num_stages, memory_bytes=10**12, bandwidth=1e9)
    plan = make_plan(model, platform, list(range(num_stages + 1)))
    depths = {
        "same depth": [num_stages - stage for stage in range(num_stages)],
        "deep": [2 * (num_stages - stage) - 1 for stage in range(num_stages)],
    }
    deepspeeds = engine_for(sleeping_layers(model), plan.boundaries, micro_batches, 1, loss)
    return {"DeepSpeed": deepspeeds} | {
        name: overlapping_engine(
            engine_class,
            plan_of_depth(plan, each, micro_batches),
            sleeping_layers(model),
            micro_batches,
            told_each_time,
        )
        for name, each in depths.items()
    }


def measured(engines: dict[str, Any], numbers: int, rounds: int) -> dict[str, dict[str, float]]:
    micro_batch = (torch.zeros(1, numbers), torch.zeros(1))
    seconds = step_seconds(engines, lambda: repeat(micro_batch), rounds)
    gains = ratios(seconds, to="DeepSpeed")
    return {
        name: {"seconds": statistics.median(each), "deepspeed_takes": 1 / gains[name]}
        for name, each in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=float, nargs="+", help="of activations that travel over loopback")
    parser.add_argument("--told-each-time", action="store_true", help="the shapes, with every activation")
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    num_stages = dist.get_world_size()
    micro_batches = 4 * num_stages
    ideal = {"without_transfers_seconds": (micro_batches + num_stages - 1) * 3 * FORWARD_SECONDS}
    rows: list[dict[str, Any]] = []
    if arguments.megabytes:
        for megabytes in arguments.megabytes:
            numbers = round(megabytes * 1e6 / 4)
            engines = engines_for(MadPipeEngine, numbers, num_stages, micro_batches, arguments.told_each_time)
            rows.append({"megabytes": megabytes, **ideal, **measured(engines, numbers, arguments.rounds)})
    else:
        engines = engines_for(EmulatedEngine, NUMBERS, num_stages, micro_batches, arguments.told_each_time)
        blocking = engines.pop("DeepSpeed")
        for ratio in RATIOS:
            SlowTransfers.seconds = ratio * 3 * FORWARD_SECONDS / 2
            lasting = Within(blocking, lambda: slow_blocking_transfers(SlowTransfers.seconds, NUMBERS))
            side_by_side = {"DeepSpeed": lasting, **engines}
            rows.append({"ratio": ratio, **ideal, **measured(side_by_side, NUMBERS, arguments.rounds)})
    if dist.get_rank() == 0:
        report(rows, num_stages, micro_batches, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[dict[str, Any]], num_stages: int, micro_batches: int, arguments: argparse.Namespace) -> None:
    table = Table(
        title=f"{num_stages} stages, {micro_batches} micro-batches: one step over that without transfers"
    )
    link = "megabytes" if "megabytes" in rows[0] else "ratio"
    for name in (link, "DeepSpeed", "same depth", "deep", "gain at same depth", "gain, deep"):
        table.add_column(name, justify="right")
    for row in rows:
        over = [f"{row[name]['seconds'] / row['without_transfers_seconds']:.2f}"
                for name in ("DeepSpeed", "same depth", "deep")]  # fmt: skip
        gains = [f"{row[name]['deepspeed_takes']:.2f}" for name in ("same depth", "deep")]
        table.add_row(f"{row[link]:g}", *over, *gains)
    Console(width=120).print(table)
    if arguments.save:
        told = "_told_each_time" if arguments.told_each_time else ""
        name = f"{link}_{num_stages}_stages{told}_{date.today():%Y%m}.json"
        path = Path(__file__).parent / "results" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
