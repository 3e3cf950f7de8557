"""What does a warm-up cost, and what does the move after it gain, in one run?

    torchrun --nproc_per_node=2 examples/benchmarks/warm_up/main.py asleep real move [--steps 20] [--save]

The digits network starts on DeepSpeed's default cut, is measured while it trains, planned, and moved. ``asleep``:
its layers sleep for the times that they take alone, which is what devices of their own give. ``real``: two
processes of one machine run them. The overhead of measuring is that of an engine in its warm-up over one at the
same cut without, a step of each in turn: of steps that time layers, of those that record transfers as well, and of
the one that reads bytes. ``move``: its extra bytes are those of tensors alive at
its peak beyond what the rank holds before or after it, whichever is more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from torch import nn

from deepspeed_partition import Chain, Plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule, initialize
from deepspeed_partition.engine.warmup.stage_profiler import NUM_RECORDED
from deepspeed_partition.planner.io.files import write_json
from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.profiling.in_place import NUM_DROPPED, InPlaceClock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
from emulation import sleeping_layers
from interleaved import environment, step_seconds
from train_lightning import Digits, loaders

MICRO_BATCH, MICRO_BATCHES = 16, 8
SLEEP_SCALE = 4
"""Longer sleeps, so that the fraction of a millisecond by which each is late does not count."""
CHAIN = HERE.parent / "digits_cuts" / "results" / "digits_chain_202611.json"
CUTS = [0, 10, 12], [0, 3, 12]
"""The cuts before and after a move whose bytes are counted: DeepSpeed's default, the best contiguous one."""
ENDLESS = 10**6
MEASURED = {
    "timed": slice(NUM_DROPPED + NUM_RECORDED, None),
    "transfers recorded": slice(NUM_DROPPED, NUM_DROPPED + NUM_RECORDED),
    "bytes read": slice(1, NUM_DROPPED),
}
"""The steps of a warm-up, but for the first one, which does what only a first step does."""
Made = tuple[list[nn.Module], list[Any], Callable[..., Any]]


def asleep() -> Made:
    """Make layers that sleep in proportion to those of the digits network, micro-batches and a loss."""
    sample = torch.zeros(MICRO_BATCH, 1), torch.zeros(MICRO_BATCH)
    layers = sleeping_layers(Chain.load(CHAIN), time_scale=SLEEP_SCALE, output_numel=1000)
    return list(layers), [sample] * MICRO_BATCHES, lambda outputs, _: outputs.sum()


def real() -> Made:
    """Make the layers of the digits network, its micro-batches and its loss."""
    torch.manual_seed(0)
    images, labels = next(iter(loaders()[0]))
    return (
        list(Digits(1).net),
        list(zip(images.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True)),
        (F.cross_entropy),
    )


def engine_for(made: Made, method: Any, zero: int = 0, **options: Any) -> MadPipeEngine:
    layers, _, loss_fn = made
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method=method)
    return initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": zero},
            "pipeline": {"madpipe": options},
        },
    )[0]


def one_run(made: Made, steps: int) -> dict[str, Any]:
    """Measure so many steps on the trial cut, and as many after the move."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")  # of rank 0
        engine = engine_for(made, "madpipe", warmup_steps=steps, save_plan=path)
        trial, data = engine.module.parts, cycle(made[1])
        seconds = step_seconds({"run": engine}, lambda: data, 2 * steps)["run"]
        seconds.insert(0, float("nan"))  # the first step, which that function leaves out
    plan: Plan = engine.plan
    before, after = statistics.median(seconds[2:steps]), statistics.median(seconds[steps + 1 :])
    return {
        "cut_before": trial,
        "cut_after": plan.boundaries,
        "devices_after": [stage.device for stage in plan.stages],
        "step_seconds_before": before,
        "step_seconds_after": after,
        "planned_step_seconds": plan.step_seconds,
        "planning_seconds": plan.planning_seconds,
        "pause_seconds": seconds[steps] - after,
        "pause_steps": (seconds[steps] - after) / after,
    }


def overhead(make: Callable[[], Made], rounds: int) -> dict[str, dict[str, float]]:
    """What measuring adds to a step, as a part of it: of its time, and of the processor's time in it.

    Medians over steps of a kind. A second engine that measures nothing says how far equal ones differ.
    """
    measured = engine_for(make(), "madpipe", warmup_steps=ENDLESS)
    plain = {name: engine_for(make(), measured.module.parts) for name in ("plain", "control")}
    engines = {"measured": measured, **plain}
    data = cycle(make()[1])
    seconds: dict[str, list[torch.Tensor]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            engine.train_batch(data)
            spent = torch.tensor([time.perf_counter(), time.process_time()], dtype=torch.float64)
            spent -= torch.tensor(started, dtype=torch.float64)
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            seconds[name].append(spent)
    plain_seconds = torch.stack(seconds["plain"])
    found = {}
    for kind, name, steps in (
        *((kind, "measured", steps) for kind, steps in MEASURED.items()),
        ("control", "control", slice(1, None)),
    ):
        ratios = torch.stack(seconds[name])[steps] / plain_seconds[steps]
        wall, processor = (ratios.median(0).values - 1).tolist()
        found[kind] = {"wall": wall, "processor": processor}
    return found


def stand_in_seconds() -> float:
    """What it costs to time one layer for one micro-batch, forward and backward: the quickest of many."""
    layers: list[Callable[[Any], Any]] = [lambda x: x + 1] * 20
    clock = InPlaceClock(torch.device("cpu"))
    timed = [clock.timed_layer(place, layer) for place, layer in enumerate(layers)]
    quickest = {}
    for name, functions in (("timed", timed), ("plain", layers)):
        readings = []
        for _ in range(300):
            x = torch.zeros(1, requires_grad=True)
            with clock.step():
                started = time.perf_counter()
                for function in functions:
                    x = function(x)
                x.backward()
                readings.append(time.perf_counter() - started)
        quickest[name] = min(readings)
    return (quickest["timed"] - quickest["plain"]) / len(layers)


def bytes_of_a_move(zero: int) -> list[dict[str, int]]:
    """Measure the bytes of a move on each rank: before it, after it, at its peak, and what the peak adds."""
    engine = engine_for(real(), CUTS[0], zero)
    engine.train_batch(cycle(real()[1]))
    with LiveBytes(include=alive(engine)) as live:
        before = live.current_bytes
        engine.recut(CUTS[1])
        after, peak = live.current_bytes, live.peak_bytes
    mine = {"before": before, "after": after, "peak": peak, "extra": peak - max(before, after)}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, mine)
    return gathered


def alive(engine: MadPipeEngine) -> list[torch.Tensor]:
    """All that training keeps between two steps: whatever tensors the module and the optimizers hold."""
    found: dict[int, torch.Tensor] = {}

    def look(value: Any, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
            if value.grad is not None:
                found[id(value.grad)] = value.grad
        elif depth < 6 and isinstance(value, dict):
            for member in value.values():
                look(member, depth + 1)
        elif depth < 6 and isinstance(value, list | tuple | set):
            for member in value:
                look(member, depth + 1)

    for holder in (vars(engine.optimizer), engine.basic_optimizer.state, engine.basic_optimizer.param_groups):
        look(holder)
    look([*engine.module.parameters(), *engine.module.buffers()])
    return list(found.values())


def report_run(row: dict[str, Any]) -> None:
    before, after = row["step_seconds_before"], row["step_seconds_after"]
    print(f"cut {row['cut_before']}, then {row['cut_after']} on ranks {row['devices_after']}")
    print(f"step {before:.3f} s, then {after:.3f} s: {before / after:.2f} times as fast")
    print(f"planned {row['planned_step_seconds']:.3f} s, in {row['planning_seconds']:.2f} s")
    print(f"the pause was {row['pause_seconds']:.2f} s, {row['pause_steps']:.1f} steps")
    for name, found in row["overhead"].items():
        print(f"{name}: {found['wall']:+.1%} of a step, {found['processor']:+.1%} of its processor time")
    print(f"a stand-in takes {row['stand_in_seconds'] * 1e6:.1f} us per layer and micro-batch")


def report_moves(moves: Sequence[dict[str, Any]]) -> None:
    table = Table(title="megabytes alive around a move")
    for title in ("ZeRO", "rank", "before", "after", "at the peak", "extra"):
        table.add_column(title, justify="right")
    for move in moves:
        for rank, found in enumerate(move["ranks"]):
            row = (f"{found[key] / 1e6:.1f}" for key in ("before", "after", "peak", "extra"))
            table.add_row(str(move["zero"]), str(rank), *row)
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["asleep", "real", "move"])
    parser.add_argument("--steps", type=int, default=20, help="of the warm-up, and after the move")
    parser.add_argument("--rounds", type=int, default=20, help="of the overhead; at most 20 are measured")
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    for kind in arguments.kinds:
        found: Any
        if kind == "move":
            found = [{"zero": zero, "cuts": CUTS, "ranks": bytes_of_a_move(zero)} for zero in (0, 1)]
        else:
            make = {"asleep": asleep, "real": real}[kind]
            found = {
                **one_run(make(), arguments.steps),
                "overhead": overhead(make, min(arguments.rounds, 20)),
                "stand_in_seconds": stand_in_seconds(),
            }
        if dist.get_rank() == 0:
            report_moves(found) if kind == "move" else report_run(found)
            if arguments.save:
                path = HERE / "results" / f"digits_{kind}_2_processes_{date.today():%Y%m}.json"
                path.parent.mkdir(exist_ok=True)
                write_json(path, {**environment(), "found": found})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
