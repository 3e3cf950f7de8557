"""Does the step that was planned gain in training, over the contiguous one and over DeepSpeed's own engine?

    torchrun --nproc_per_node=2 examples/benchmarks/planned_steps/main.py [--models digits gpt] [--micro-batches 8]
        [--rounds 20] [--save]

The real layers of the two examples on this machine, measured in the warm-up of a run; then a step of each engine
in turn:

- ``madpipe``: the plan that the run made, with several stages on a rank where that is faster;
- ``contiguous``: the best contiguous step, on the same engine;
- ``DeepSpeed, same cut``: DeepSpeed's own engine on the best cut for it that is planned;
- ``DeepSpeed``: DeepSpeed's own engine on its default cut, ``parameters``.

Two processes of one machine slow each other where they share caches and memory: run it on an idle one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import cycle
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, Plan, make_plan
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.planner.buffers import with_more_buffers

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
from interleaved import engine_for, engine_for_plan, environment, planned_by_a_run, ratios, step_seconds

MEMORY_BYTES = 10**10
WARM_UP_STEPS = 12
BUFFERS = 2
"""Tensors at each end of a boundary with which plans are searched."""
ENGINES = ("madpipe", "contiguous", "DeepSpeed, same cut", "DeepSpeed")


@dataclass(frozen=True)
class Model:
    """A model as the example trains it; layers are made anew for each engine."""

    layers: Callable[[], list[Any]]
    loss: Callable[..., torch.Tensor]
    micro_batches: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]
    micro_batch_size: int


def digits() -> Model:
    from train_lightning import Digits, loaders

    images, labels = next(iter(loaders()[0]))
    pairs = list(zip(images.split(16), labels.split(16), strict=True))
    return Model(lambda: list(Digits(1).net), F.cross_entropy, lambda: cycle(pairs), 16)


def gpt() -> Model:
    from train_deepspeed import MICRO_BATCH, layers, loss_of, micro_batches, tokens_of_the_standard_library

    data = micro_batches(tokens_of_the_standard_library(), seed=1)
    pairs = [next(data) for _ in range(8)]
    return Model(layers, loss_of, lambda: cycle(pairs), MICRO_BATCH)


MODELS = {"digits": digits, "gpt": gpt}


def plans_for(plan: Plan, chain: Chain, num_micro_batches: int) -> dict[str, Plan]:
    """Plan the others, on rank 0, with what the run has measured, so that all ranks have the same plans.

    Args:
        plan: the one that the run made.
    """
    platform = replace(plan.platform, comm_buffers=BUFFERS)
    number, devices = num_micro_batches, platform.num_devices
    return {"madpipe": plan} | from_rank_0(lambda: {
        "contiguous": with_more_buffers(make_plan(chain, platform, "contiguous", num_micro_batches=number), chain),
        "DeepSpeed, same cut": make_plan(chain, platform, num_micro_batches=number, num_stages=devices),
        "DeepSpeed": make_plan(chain, platform, "parameters", num_micro_batches=number, num_stages=devices),
    })  # fmt: skip


def engines_for(model: Model, plans: Mapping[str, Plan], num_micro_batches: int) -> dict[str, Any]:
    engines = {}
    for name, plan in plans.items():
        torch.manual_seed(0)
        if name.startswith("DeepSpeed"):
            engines[name] = engine_for(
                model.layers(), plan.boundaries, num_micro_batches, model.micro_batch_size, model.loss
            )
        else:
            engines[name] = engine_for_plan(
                model.layers(), plan, num_micro_batches, model.loss, micro_batch_size=model.micro_batch_size
            )
    return engines


def processor_seconds(engines: Mapping[str, Any], data: Callable[[], Iterator[Any]]) -> dict[str, float]:
    """Measure the seconds of the processor that one step of each engine takes, on all ranks together."""
    found = {}
    for name, engine in engines.items():
        dist.barrier()
        started = time.process_time()
        engine.train_batch(data())
        found[name] = sum(gather_objects(time.process_time() - started))
    return found


def measured(name: str, num_micro_batches: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each engine of a model: planned and measured, and against ``madpipe``."""
    model = MODELS[name]()
    torch.manual_seed(0)
    plan, chain = planned_by_a_run(
        model.layers(), num_micro_batches, model.loss, model.micro_batches(),
        {"memory": MEMORY_BYTES, "warmup_steps": WARM_UP_STEPS}, micro_batch_size=model.micro_batch_size,
    )  # fmt: skip
    plans = plans_for(plan, chain, num_micro_batches)
    engines = engines_for(model, plans, num_micro_batches)
    seconds = step_seconds(engines, model.micro_batches, rounds)
    worked = processor_seconds(engines, model.micro_batches)
    rows = []
    for kind, plan in plans.items():
        planned = plan.blocking_step_seconds if kind.startswith("DeepSpeed") else plan.step_seconds
        rows.append({
            "model": name, "engine": kind, "boundaries": plan.boundaries,
            "devices": [stage.device for stage in plan.stages], "micro_batches": num_micro_batches,
            "operation_seconds": plan.platform.operation_seconds, "planned_seconds": planned,
            "measured_seconds": statistics.median(seconds[kind]),
            "takes_times_madpipe": ratios(seconds, to="madpipe")[kind],
            "processor_seconds": worked[kind], "rounds": rounds,
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="a step of each engine in turn")
    for title in ("model", "engine", "layers", "ranks", "planned", "measured", "over madpipe's", "processor s"):
        table.add_column(title)
    for row in rows:
        table.add_row(
            row["model"], row["engine"], str(row["boundaries"]), str(row["devices"]),
            f"{row['planned_seconds']:.3f} s", f"{row['measured_seconds']:.3f} s",
            f"{row['takes_times_madpipe']:.2f}", f"{row['processor_seconds']:.3f}",
        )  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    rows = []
    for name in arguments.models:
        rows += measured(name, arguments.micro_batches, arguments.rounds)
    if dist.get_rank() == 0:
        show(rows)
        if arguments.save:
            name = f"{dist.get_world_size()}_processes_{date.today():%Y%m}.json"
            path = Path(__file__).parent / "results" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
