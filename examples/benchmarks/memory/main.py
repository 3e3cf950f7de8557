"""How much memory does each rank need, and how much does its plan say?

    torchrun --nproc_per_node=2 examples/benchmarks/memory/main.py [--pipelines 1] [--only WORD ...] [--sample N]
        [--warm-up 3] [--out FILE]
    python examples/benchmarks/memory/report.py FILE ...

Each case trains a model for a few steps on our engine. A counter beneath torch's allocator, which shares nothing
with the planner, is begun before the engine is made; its peak is held against the plan's ``peak_memory_bytes``.
The chain and the platform are those that the engine measures and plans with by itself, on a uniform cut, before
its first step or in a warm-up.

One line of JSON for each rank of each case; cases that the file has already are passed over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from cases import Case, Group, all_cases, chosen, plan_of
from training import MICRO_BATCHES_PER_DEVICE, STEPS, Data, engine_of, measured

from deepspeed_partition import Plan
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.profiling import counted_memory
from tests.engine.harness import forget_engines, share_groups


def run(case: Case, plan: Plan, num_micro_batches: int) -> dict[str, Any]:
    """Train on a plan, and return what this rank needed and what the plan says of it."""
    with counted_memory() as memory:
        engine = engine_of(case.group, num_micro_batches, plan.platform.num_devices, plan=plan)
        at_start = memory.current_bytes
        engine.begin(memory)
        data, between = Data(case.group), []
        for _ in range(STEPS):
            memory.reset_peak()
            engine.train_batch(data)
            between.append(memory.current_bytes)
        row = {
            "stages": [stage.layers for stage in plan.stages if stage.device == engine.stage_id],
            "device": engine.stage_id,
            "pipeline": engine.grid.data_parallel_id,
            "measured": {**engine.peaks, "before_steps": at_start, "between_steps": between},
            "moments": engine.moments,
            "planned": {"peak": plan.peak_memory_bytes[engine.stage_id], **asdict(plan.memory[engine.stage_id])},
        }
        del engine
        forget_engines()
    return row


def rows_of(
    group: Group, cases: list[Case], num_stages: int, num_pipelines: int, warm_up_steps: int
) -> Iterator[list[dict[str, Any]]]:
    num_micro_batches = MICRO_BATCHES_PER_DEVICE * num_stages
    chain, platform = measured(group, num_micro_batches, num_stages, warm_up_steps)
    for case in cases:
        started = time.perf_counter()
        plan = from_rank_0(lambda case=case: plan_of(case, chain, platform, num_micro_batches))
        row = run(case, plan, num_micro_batches)
        about = {
            **asdict(group), "cut": case.cut, "recompute": case.recompute, "num_devices": num_stages,
            "num_pipelines": num_pipelines, "warm_up_steps": warm_up_steps, "boundaries": plan.boundaries,
            "devices": [stage.device for stage in plan.stages],
        }  # fmt: skip
        yield [{**about, **each} for each in gather_objects(row)]
        if dist.get_rank() == 0:
            print(f"{case}: {time.perf_counter() - started:.1f} s", flush=True)


def names_in(path: Path, num_devices: int, num_pipelines: int) -> set[str]:
    """Return the names of the cases that a file has for so many processes."""
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {
        str(Case(Group(*(row[key] for key in Group.__dataclass_fields__)), row["cut"], row["recompute"]))
        for row in rows
        if (row["num_devices"], row["num_pipelines"]) == (num_devices, num_pipelines)
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=1, help="data parallelism: ZeRO 1 comes with 2")
    parser.add_argument("--zero", type=int, nargs="+", help="0, 1; left out: 0 with one pipeline, else both")
    parser.add_argument("--only", nargs="+", default=(), help="words that the name of a case has")
    parser.add_argument("--sample", type=int, help="so many cases, chosen by chance, always the same")
    parser.add_argument("--warm-up", type=int, default=0, help="steps in which layers are measured in training")
    parser.add_argument("--out", type=Path, default=Path("memory.jsonl"))
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    share_groups()
    num_stages = dist.get_world_size() // arguments.pipelines
    zero = arguments.zero or ([0] if arguments.pipelines == 1 else [0, 1])
    cases = chosen(all_cases(zero), arguments.only, arguments.sample)
    known = from_rank_0(lambda: names_in(arguments.out, num_stages, arguments.pipelines))
    cases = [case for case in cases if str(case) not in known]
    for group, members in groupby(cases, lambda case: case.group):
        for rows in rows_of(group, list(members), num_stages, arguments.pipelines, arguments.warm_up):
            if dist.get_rank() == 0:
                with arguments.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
