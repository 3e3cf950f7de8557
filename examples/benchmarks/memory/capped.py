"""Does a plan that is made for a cap on memory train under that cap?

    torchrun --nproc_per_node=2 examples/benchmarks/memory/capped.py [--pipelines 1] [--groups 6] [--out FILE]
    python examples/benchmarks/memory/capped.py --report FILE ...

For each model, precision, optimizer and ZeRO stage of a sample: the engine measures the layers by itself, and the
planner tells the least memory with which a step fits. Plans are made for caps from there upwards, and each trains
for three steps under ``counted_memory(limit_bytes=cap)``, from before the engine is made: an allocation beyond
raises ``torch.OutOfMemoryError``, as on a GPU. Of a cap a plan fills what it fills in a run under
``limit_memory``: all but 1 %.

One line of JSON for each plan. A run that was interrupted, or died, goes on where it was, with the same file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from cases import PLANNING_SECONDS, Group, all_cases, chosen
from models import MODELS
from rich.console import Console
from rich.table import Table
from training import DTYPES, MICRO_BATCHES_PER_DEVICE, STEPS, WatchedEngine, engine_of, measured

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.engine.warmup.run_platform import MARGIN_OF_LIMIT
from deepspeed_partition.profiling import counted_memory
from tests.engine.harness import forget_engines, share_groups

SHARES = (1.0, 1.1, 1.3, 1.7)
"""Memory that plans may fill, relative to the least with which a step fits."""
OUT_OF_MEMORY = 3
"""Exit status of a rank that ran out of memory."""


class LoadingEngine(WatchedEngine):
    """Loads micro-batches from where a GPU has them: from memory that is not its own."""

    def _next_batch(self) -> Any:
        return tuple(None if each is None else each.clone() for each in super()._next_batch())


def sampled(num_groups: int, zero: list[int]) -> list[Group]:
    """Return so many models with what trains them, always the same, with as many pairs as there can be."""
    return [case.group for case in chosen(all_cases(zero), ("uniform", "recompute none"), num_groups)]


def plans_of(chain: Chain, platform: Platform, num_micro_batches: int) -> list[tuple[float, int, Plan]]:
    """Return plans for caps from the least memory upwards: the share of it, the cap in bytes, the plan."""
    how: dict[str, Any] = {
        "num_micro_batches": num_micro_batches, "every_device_trains": True,
        "time_limit_seconds": PLANNING_SECONDS,
    }  # fmt: skip
    try:
        make_plan(chain, replace(platform, memory_bytes=1), **how)
        raise AssertionError("nothing fits in one byte")
    except InfeasibleError as error:
        least = error.smallest_memory_bytes
        assert least is not None, error
    made = []
    for share in SHARES:
        cap = math.ceil(share * least / (1 - MARGIN_OF_LIMIT))
        usable = cap - int(cap * MARGIN_OF_LIMIT)
        made.append((share, cap, make_plan(chain, replace(platform, memory_bytes=usable), **how)))
    return made


def run(group: Group, plan: Plan, num_micro_batches: int, cap: int) -> dict[str, Any]:
    """Train on a plan under a cap, and return what this rank needed, or that it ran out of memory."""
    make = MODELS[group.model].micro_batch
    data = [make(DTYPES[group.precision]) for _ in range(STEPS * num_micro_batches)]
    found: dict[str, Any] = {"died": None}
    with counted_memory(limit_bytes=cap) as memory:
        try:
            engine = engine_of(group, num_micro_batches, plan.platform.num_devices, LoadingEngine, plan=plan)
            batches = iter(data)
            found["losses"] = [float(engine.train_batch(batches)) for _ in range(STEPS)]
        except torch.OutOfMemoryError as error:
            return {"died": str(error), "peak_bytes": memory.peak_bytes}
    found |= {"peak_bytes": memory.peak_bytes, "stage": engine.stage_id}
    del engine
    forget_engines()
    return found


def rows_of(group: Group, num_stages: int, num_pipelines: int, known: set[Any]) -> Iterator[dict[str, Any]]:
    """Train on all plans of a group that are not known yet; where a rank dies, the program ends behind its row."""
    num_micro_batches = MICRO_BATCHES_PER_DEVICE * num_stages
    chain, platform = measured(group, num_micro_batches, num_stages, 0)
    plans = from_rank_0(lambda: plans_of(chain, platform, num_micro_batches))
    for share, cap, plan in plans:
        if (str(group), num_stages, num_pipelines, share) in known:
            continue
        started = time.perf_counter()
        found = run(group, plan, num_micro_batches, cap)
        about = {
            **asdict(group), "num_devices": num_stages, "num_pipelines": num_pipelines, "share": share,
            "cap_bytes": cap, "boundaries": plan.boundaries, "devices": [stage.device for stage in plan.stages],
            "recomputed": [list(map(list, stage.blocks)) for stage in plan.stages],
            "planned_bytes": list(plan.peak_memory_bytes),
        }  # fmt: skip
        if found["died"] is not None:  # the others wait for it, and it cannot tell them
            yield {**about, **found, "rank": dist.get_rank()}
            os._exit(OUT_OF_MEMORY)
        ranks = gather_objects(found)
        if dist.get_rank() == 0:
            print(f"{group}, {share:g} of the least memory: {time.perf_counter() - started:.1f} s", flush=True)
            yield {**about, "died": None, "peak_bytes": [each["peak_bytes"] for each in ranks]}


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the rows of files that are there."""
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


def name_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells a plan from all others."""
    group = Group(*(row[key] for key in Group.__dataclass_fields__))
    return str(group), row["num_devices"], row["num_pipelines"], row["share"]


def report(rows: list[dict[str, Any]]) -> None:
    """Print how many plans trained, and how full they left their caps."""
    table = Table()
    for name in ("devices", "pipelines", "plans", "out of memory", "with recomputation", "several stages",
                 "fullest, of the cap: least", "median", "most"):  # fmt: skip
        table.add_column(name, justify="right")
    keys = sorted({(row["num_devices"], row["num_pipelines"]) for row in rows})
    for key in [*keys, None]:
        mine = [row for row in rows if key in (None, (row["num_devices"], row["num_pipelines"]))]
        full = sorted(max(row["peak_bytes"]) / row["cap_bytes"] for row in mine if row["died"] is None)
        table.add_row(
            *(map(str, key) if key else ("all", "")), str(len(mine)),
            str(sum(row["died"] is not None for row in mine)),
            str(sum(any(row["recomputed"]) for row in mine)),
            str(sum(len(row["devices"]) > row["num_devices"] for row in mine)),
            *(f"{each:.1%}" for each in (full[0], full[len(full) // 2], full[-1])),
        )  # fmt: skip
    Console(width=140).print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", type=int, default=1)
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--groups", type=int, default=6, help="models with what trains them; four plans for each")
    parser.add_argument("--out", type=Path, default=Path("capped.jsonl"))
    parser.add_argument("--report", type=Path, nargs="+")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.report:
        report(read(arguments.report))
        return
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    share_groups()
    num_stages = dist.get_world_size() // arguments.pipelines
    known = from_rank_0(lambda: {name_of(row) for row in read([arguments.out])})
    for group in sampled(arguments.groups, arguments.zero):
        if all((str(group), num_stages, arguments.pipelines, share) in known for share in SHARES):
            continue
        for row in rows_of(group, num_stages, arguments.pipelines, known):
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
