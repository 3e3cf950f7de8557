"""What each host runs (``main.py`` starts it): engines at one cut for each size of activations, a step of each in
turn; the first rank writes what was measured."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from deepspeed_partition import Platform
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.planner.io.files import write_json
from deepspeed_partition.profiling import measure_links
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

sys.path.insert(0, str(Path(__file__).parents[1]))
from even_stages import FORWARD_SECONDS, engines_for, even_chain, measured, plans_for
from interleaved import environment

PROBE_BYTES = 4_000_000
REPEATS = 5


def row_of(megabytes: float, platform: Platform, rounds: int) -> dict[str, Any]:
    """Steps of all engines with activations of one size, measured and predicted."""
    numbers = round(megabytes * 1e6 / 4)
    chain = even_chain(platform.num_devices, numbers)
    plans = plans_for(chain, platform)
    planned = {name: plan.step_seconds for name, plan in plans.items()}
    planned["DeepSpeed"] = next(iter(plans.values())).blocking_step_seconds
    shared = {name: shared_step_seconds(plan) for name, plan in plans.items()}
    predicted = {name: max(seconds, shared.get(name) or 0.0) for name, seconds in planned.items()}
    engines = engines_for(chain, plans, Transfers)
    steps = measured(engines, numbers, rounds)
    for engine in engines.values():
        engine.destroy()
    one_way = platform.transfer_seconds(4 * numbers)
    return {
        "megabytes": megabytes,
        "ratio": 2 * one_way / (3 * FORWARD_SECONDS),
        "engines": {
            name: step
            | {
                "planned_seconds": planned[name],
                "predicted_seconds": predicted[name],
                "over_predicted": step["seconds"] / predicted[name],
            }
            for name, step in steps.items()
        },
    }


def how_links_share() -> dict[str, float]:
    """How many times as long a message takes from the second rank to the third, if another travels, too.

    1: they do not share; 2: they take turns. As in the engine, each direction has a group of its own.
    """
    directions = [(1, 2), (2, 1), (1, 0)]
    groups = {each: dist.new_group(list(each)) for each in directions}

    def seconds_of(*messages: tuple[int, int]) -> float:
        readings = []
        for _ in range(1 + REPEATS):
            works = []
            dist.barrier()
            begin = time.perf_counter()
            for source, to in messages:
                if dist.get_rank() == source:
                    works.append(dist.isend(torch.zeros(PROBE_BYTES // 4), to, group=groups[source, to]))
                elif dist.get_rank() == to:
                    works.append(dist.irecv(torch.zeros(PROBE_BYTES // 4), source, group=groups[source, to]))
            for work in works:
                work.wait()
            lasted = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
            readings.append(float(lasted))
        return statistics.median(readings[1:])

    alone, back, aside = directions
    return {
        "one comes back": seconds_of(alone, back) / seconds_of(alone),
        "one goes to the first rank": seconds_of(alone, aside) / seconds_of(alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    link = measure_links()
    platform = Platform(
        num_devices=dist.get_world_size(),
        memory_bytes=10**12,
        bandwidth=link.bandwidth,
        latency_seconds=link.latency_seconds,
        duplex=link.duplex,
        port_bandwidth=link.port_bandwidth,
        devices_per_port=link.devices_per_port,
    )
    shared = how_links_share()
    rows = [row_of(megabytes, platform, arguments.rounds) for megabytes in arguments.megabytes]
    if dist.get_rank() == 0:
        write_json(
            arguments.output,
            {"environment": environment(), "link": asdict(link), "link_takes": shared, "rows": rows},
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
