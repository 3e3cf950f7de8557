"""How long does a pipeline of many layers take to start: building its engine, and its first step?

    torchrun --nproc_per_node=2 examples/benchmarks/start_up/main.py [--layers 200] [--save] [--profile FILE]

The same layers, each a linear one of 16 numbers with a tanh, start under plain DeepSpeed and under MadPipe: at a
cut that is given, with a plan that the run makes before its first step, also with a limit on the search, and with
a warm-up, whose end makes the plan.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from deepspeed_partition.engine import PipelineModule, initialize

WIDTH, SAMPLES, MICRO_BATCHES, WARM_UP = 16, 4, 8, 2
WAYS = ("DeepSpeed", "boundaries", "plan before the first step", "the same within 2 s", "plan after a warm-up")


class Layer(nn.Module):
    """A layer that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def start(way: str, number: int) -> Any:
    """An engine for a pipeline of ``number`` layers."""
    torch.manual_seed(0)
    layers, ranks = [Layer() for _ in range(number)], dist.get_world_size()
    limit = {"time_limit_seconds": 2} if way == WAYS[3] else {}
    options = {"pipeline": {"madpipe": {"warmup_steps": WARM_UP if way == WAYS[4] else 0, **limit}}}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        **({} if way == "DeepSpeed" else options),
    }  # fmt: skip
    cut = [number * rank // ranks for rank in range(ranks + 1)]
    loss = nn.MSELoss()
    if way == "DeepSpeed":
        module = deepspeed.pipe.PipelineModule(layers, num_stages=ranks, loss_fn=loss, partition_method="uniform")
        return deepspeed.initialize(model=module, config=config, model_parameters=module.parameters())[0]
    method = cut if way == "boundaries" else "madpipe"
    module = PipelineModule(layers, num_stages=ranks, loss_fn=loss, partition_method=method)
    return initialize(model=module, config=config, model_parameters=module.parameters())[0]


def measured(way: str, number: int, profile: str | None) -> dict[str, float]:
    """Seconds until the engine is there, and of the steps after it; on the slower rank."""
    watched = cProfile.Profile() if profile else nullcontext()
    dist.barrier()
    with watched:
        begin = time.perf_counter()
        engine = start(way, number)
        times = [time.perf_counter() - begin]
        for _ in range(WARM_UP + 3):
            batch = torch.randn(2, MICRO_BATCHES, SAMPLES, WIDTH)
            begin = time.perf_counter()
            engine.train_batch(iter([*zip(*batch, strict=True)]))
            times.append(time.perf_counter() - begin)
    if profile and dist.get_rank() == 0 and isinstance(watched, cProfile.Profile):
        with open(f"{profile}.{WAYS.index(way)}", "w") as file:
            pstats.Stats(watched, stream=file).sort_stats("cumulative").print_stats(60)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    build, first, *others = slowest.tolist()
    return {"engine": build, "first step": first, "longest later step": max(others), "last step": others[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--profile", help="where rank 0 writes a profile of each way")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    measured("DeepSpeed", 4, None)  # what the libraries load when an engine is first made
    measured("plan before the first step", 4, None)
    rows = {way: measured(way, arguments.layers, arguments.profile) for way in WAYS}
    if dist.get_rank():
        return
    table = Table("seconds", *next(iter(rows.values())), title=f"{arguments.layers} layers")
    for way, row in rows.items():
        table.add_row(way, *(f"{value:.2f}" for value in row.values()))
    Console(width=110).print(table)
    if arguments.save:
        path = Path(__file__).parent / "results" / f"{arguments.layers}_layers.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"date": date.today().isoformat(), "seconds": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
