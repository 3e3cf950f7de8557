"""What does it cost to time steps for a logger, and to gather their figures?

    torchrun --nproc_per_node=2 examples/benchmarks/step_figures/main.py [--micro-batches 8 32] [--rounds 300]
        [--save]

One engine, whose steps are timed in every second round: layers that cost next to nothing, so that the clock is as
large a part of a step as it can be. Processor time is that of the thread that trains, which does all of this, in
the mean of the ranks: other threads wait for messages, and what they take differs more from step to step.
``clock alone`` is the same without an engine: the calls that a step makes of the clock, and what becomes of them
when it is over. ``figures`` is what gathering them takes, where they are logged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).parents[1])]
from even_stages import even_chain
from interleaved import engine_for_plan, environment

from deepspeed_partition import Platform, make_plan
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.step_clock import StepClock
from deepspeed_partition.engine.runtime.watch import watch

WIDTH, SAMPLES = 16, 4
STEP_SECONDS = 0.1
"""The step that costs are a part of."""


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ((outputs - labels) ** 2).mean()


def engine_of(micro_batches: int) -> MadPipeEngine:
    num_ranks = dist.get_world_size()
    platform = Platform(num_devices=num_ranks, memory_bytes=10**9, bandwidth=1e9)
    plan = make_plan(even_chain(num_ranks, 1), platform, "contiguous", num_micro_batches=micro_batches)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]
    return engine_for_plan(layers, plan, micro_batches, loss, gradient_clipping=0.0)


def measured(micro_batches: int, rounds: int) -> dict[str, float]:
    """Return microseconds of the processor per step and rank."""
    engine = engine_of(micro_batches)
    data = [(torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)) for _ in range(micro_batches)]
    engine.watch_steps()
    steps, differences, gathers, plain = engine.step_watch, [], [], []
    for round_ in range(rounds + 5):
        spent = {}
        for timed in (True, False) if round_ % 2 else (False, True):
            engine.step_watch = steps if timed else None
            began = time.thread_time()
            engine.train_batch(iter(data))
            spent[timed] = time.thread_time() - began
        engine.step_watch = steps
        began = time.thread_time()
        engine.figures_of_steps()
        if round_ >= 5:
            gathers.append(time.thread_time() - began)
            differences.append(spent[True] - spent[False])
            plain.append(spent[False])
    middle = [1e6 * statistics.median(each) for each in (plain, differences, gathers, _alone(engine, 300))]
    mine = torch.tensor(middle, dtype=torch.float64)
    dist.all_reduce(mine)
    names = ("step_us", "timed_us", "figures_us", "clock_alone_us")
    return dict(zip(names, (mine / dist.get_world_size()).tolist(), strict=True))


def _alone(engine: MadPipeEngine, rounds: int) -> list[float]:
    """Return the seconds that a step's calls of the clock take, more than those of the watch without it."""
    instructions = engine.program(engine.micro_batches, trains=True).lists[engine.stage_id]
    clock, seconds = StepClock(engine.device, engine.stage_id), []
    for _ in range(rounds):
        spent = []
        for timed in (True, False):
            began = time.thread_time()
            note = clock.begin(instructions) if timed else watch.runs
            for instruction in instructions:
                note(instruction)
            if timed:
                clock.end()
            spent.append(time.thread_time() - began)
        seconds.append(spent[0] - spent[1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    found = {number: measured(number, arguments.rounds) for number in arguments.micro_batches}
    if dist.get_rank() == 0:
        for number, row in found.items():
            us = {name: f"{each:.0f} us" for name, each in row.items()}
            shares = {name: f"{each / 1e6 / STEP_SECONDS:.3%}" for name, each in row.items()}
            print(
                f"{dist.get_world_size()} ranks, {number} micro-batches: a step takes {us['step_us']} of the "
                f"processor, timed {us['timed_us']} more ({shares['timed_us']} of 100 ms), the clock alone "
                f"{us['clock_alone_us']} ({shares['clock_alone_us']}); figures {us['figures_us']} "
                f"({shares['figures_us']} of the step in which they are logged)"
            )
        if arguments.save:
            path = Path(__file__).parent / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.json"
            path.parent.mkdir(exist_ok=True)
            rows = [{"micro_batches": number, **row} for number, row in found.items()]
            saved = {"environment": environment(), "rounds": arguments.rounds, "rows": rows}
            path.write_text(json.dumps(saved, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
