"""What does a step cost the processor, beyond the layers, under DeepSpeed, under ours and under torch's schedules?

    torchrun --nproc_per_node=2 examples/benchmarks/engine_cost/main.py [--rounds 20] [--save]
    torchrun --nproc_per_node=4 examples/benchmarks/engine_cost/main.py [--stages-per-rank 2] [--save]

One tiny layer per stage (a linear one of 16 numbers, micro-batches of four samples), so that what is left is the
engine: instructions, messages, threads, autograd's calls. The engines run the same order of forwards and
backwards; a step ends with the optimizer's. Processor time is that of all threads of a process; a step of each in
turn.

- ``MadPipe``: ours.
- ``DeepSpeed``: its own engine (one stage per rank alone).
- ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``: those of
  ``torch.distributed.pipelining``, with torch's SGD. The last one splits backwards in two.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1])]
from interleaved import engine_for, engine_for_plan, environment
from orders import interleaved_plan
from torch_schedules import TorchPipeline

WIDTH, SAMPLES = 16, 4


class OneLayer(nn.Module):
    """A layer that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def layers(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [OneLayer() for _ in range(number)]


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels) ** 2).mean()


Step = Callable[[], Any]


def steps(stages_per_rank: int, micro_batches: int, only: list[str] | None) -> dict[str, Step]:
    """Make what takes a step of each engine."""
    num_stages = dist.get_world_size() * stages_per_rank
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, micro_batches * SAMPLES, WIDTH, generator=generator)
    micro = [(batch[0, at : at + SAMPLES], batch[1, at : at + SAMPLES]) for at in range(0, len(batch[0]), SAMPLES)]

    def deepspeeds(engine: Any) -> Step:
        return lambda: engine.train_batch(iter(micro))

    def ours() -> Step:
        plan = interleaved_plan(dist.get_world_size(), stages_per_rank, micro_batches)
        return deepspeeds(engine_for_plan(layers(num_stages), plan, micro_batches, loss, gradient_clipping=0.0))

    def torchs(name: str) -> Step:
        return TorchPipeline(name, layers(num_stages), micro_batches, batch, loss).step

    makers: dict[str, Callable[[], Step]] = {
        "MadPipe": ours,
    }
    if stages_per_rank == 1:
        boundaries = range(num_stages + 1)
        makers["DeepSpeed"] = lambda: deepspeeds(
            engine_for(layers(num_stages), list(boundaries), micro_batches, SAMPLES, loss, gradient_clipping=0.0)
        )
        makers["Schedule1F1B"] = lambda: torchs("Schedule1F1B")
    for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
        makers[name] = lambda name=name: torchs(name)
    return {name: make() for name, make in makers.items() if only is None or name in only}


def measured(taken: Mapping[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the processor seconds of each rank's steps, in the mean of the ranks, and the wall seconds."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"processor": [], "wall": []} for name in taken}
    for round_ in range(rounds + 2):
        for name, step in taken.items():
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            step()
            taken_by_step = [time.process_time() - processor, time.perf_counter() - began]
            mine = torch.tensor(taken_by_step, dtype=torch.float64)
            dist.all_reduce(mine)
            mine /= dist.get_world_size()
            if round_ >= 2:
                seconds[name]["processor"].append(float(mine[0]))
                seconds[name]["wall"].append(float(mine[1]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--stages-per-rank", type=int, default=1)
    parser.add_argument("--only", nargs="+", help="names of engines")
    parser.add_argument("--collect-all", action="store_true", help="look for garbage among what was imported, too")
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    taken = steps(arguments.stages_per_rank, arguments.micro_batches, arguments.only)
    if not arguments.collect_all:
        gc.collect()
        gc.freeze()  # what was imported: which engine's step looks for garbage among that is chance
    seconds = measured(taken, arguments.rounds)
    if dist.get_rank() == 0:
        report(seconds, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(seconds: dict[str, dict[str, list[float]]], arguments: argparse.Namespace) -> None:
    reference = "Schedule1F1B" if "Schedule1F1B" in seconds else "ScheduleInterleaved1F1B"
    if reference not in seconds:
        reference = next(iter(seconds))
    number = arguments.micro_batches
    title = (
        f"{dist.get_world_size()} ranks of {arguments.stages_per_rank} stages, {number} micro-batches: "
        "milliseconds of the processor per micro-batch and rank"
    )
    table = Table(title=title)
    for name in ("engine", "ms", "least ms", f"over {reference}", "wall ms"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    rows = {}
    for name, each in seconds.items():
        ratio = statistics.median(
            a / b for a, b in zip(each["processor"], seconds[reference]["processor"], strict=True)
        )
        ms = {kind: 1e3 * statistics.median(values) / number for kind, values in each.items()}
        least = 1e3 * min(each["processor"]) / number
        rows[name] = {"processor_ms": ms["processor"], "least_processor_ms": least, "ratio": ratio,
                      "wall_ms": ms["wall"]}  # fmt: skip
        table.add_row(name, f"{ms['processor']:.3f}", f"{least:.3f}", f"{ratio:.2f}", f"{ms['wall']:.3f}")
    Console(width=120).print(table)
    if arguments.save:
        name = f"{dist.get_world_size()}_ranks_{arguments.stages_per_rank}_stages_{date.today():%Y%m}.json"
        path = Path(__file__).parent / "results" / name
        path.parent.mkdir(exist_ok=True)
        found = {"environment": environment(), "micro_batches": number, "rounds": arguments.rounds,
                 "per_micro_batch_and_rank": rows}  # fmt: skip
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"saved {path.name}")


if __name__ == "__main__":
    main()
