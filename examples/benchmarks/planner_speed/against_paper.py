"""Time and answer of the planner beside the paper's own dynamic program, in one process, on the same instances.

Seconds are those of the processor (all solvers use one thread), so that other work on the machine counts less.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from instances import random_instance
from whole_table import whole_table

from deepspeed_partition import InfeasibleError, make_plan
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.planning.problems import problem_of
from deepspeed_partition.planner.solvers.contiguous.partition_search import best_partition
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import Grid, PaperMadPipe
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import best_special

SIZES = [(25, 4), (25, 8), (50, 4), (50, 8), (100, 8)]
SHARES = [0.3, 0.5, 0.8]
"""Memory of all devices together, as a share of what the layers store once."""
LONG, LONG_SHARES = 100, [0.5]
"""The number of layers from which the paper's program takes minutes, and the shares of memory for such chains."""
REPEATS = 5
"""The number of times that the search is repeated; it is short."""
HOURS = 3600.0
"""The time limit of the paper's program in seconds: it is never cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed(PaperMadPipe):
    """``madpipe-paper`` that notes how long its allocation took, without the schedule."""

    seconds: list[float] = field(default_factory=list)

    def allocation(self, problem: Problem) -> Placement | None:
        begin = time.process_time()
        found = PaperMadPipe.allocation(self, problem)
        self.seconds.append(time.process_time() - begin)
        return found


def against_paper(num_layers: int, num_devices: int, time_limit: float) -> dict[str, Any]:
    """Measure both programs on each instance: seconds of one question and of whole answers, and periods."""
    instances = []
    for seed, share in enumerate(SHARES if num_layers < LONG else LONG_SHARES):
        chain, platform = random_instance(num_layers, num_devices, seed, share)
        problem = problem_of(chain, platform)
        seconds = [seconds_of(search, problem) for _ in range(REPEATS)]
        paper = Timed()
        grid, target = Grid(problem, paper), search(problem) or problem.longest_period
        ours, our_period = planned(chain, platform, "madpipe", time_limit)
        theirs, their_period = planned(chain, platform, paper, HOURS)
        instances.append({
            "memory_share": share,
            "search_seconds": statistics.median(seconds),
            "paper_seconds": paper.seconds[0],
            "whole_table_seconds": paper.iterations * seconds_of(whole_table, grid, target),
            "madpipe_plan_seconds": ours,
            "paper_plan_seconds": theirs,
            "madpipe_period": our_period,
            "paper_period": their_period,
        })  # fmt: skip
    return {"layers": num_layers, "devices": num_devices, "instances": instances}


def search(problem: Problem) -> int | None:
    """The least period that the estimate of memory allows, over contiguous cuts and one special device; ticks."""
    found = best_partition(problem.times, problem.table, problem.constraints, problem.deadline)
    contiguous = None if found is None else found.period
    special = best_special(problem, "peak", contiguous).bound
    return contiguous if special is None else special


def seconds_of(call: Callable[..., object], *arguments: object) -> float:
    begin = time.process_time()
    call(*arguments)
    return time.process_time() - begin


def planned(chain: Any, platform: Any, algorithm: Any, time_limit: float) -> tuple[float, float | None]:
    """Seconds of a whole answer, proof and schedule included, and its period; None where there is none."""
    begin, period = time.process_time(), None
    with contextlib.suppress(InfeasibleError):
        period = make_plan(chain, platform, algorithm, time_limit_seconds=time_limit).period_seconds
    return time.process_time() - begin, period


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each size: medians over its instances, and for the periods the range."""
    lines = [
        "| layers | devices | our search | madpipe-paper | times | the paper's whole table | times "
        "| `madpipe` whole | `madpipe-paper` whole | its period / ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = row["instances"]

        def middle(key: str, each: list[dict[str, Any]] = each) -> float:
            return statistics.median(instance[key] for instance in each)

        def times(key: str, each: list[dict[str, Any]] = each) -> float:
            return math.exp(statistics.mean(math.log(one[key] / one["search_seconds"]) for one in each))

        ratios = [
            one["paper_period"] / one["madpipe_period"]
            for one in each
            if one["paper_period"] and one["madpipe_period"]
        ]
        missing = sum(one["paper_period"] is None for one in each)
        found = f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "-"
        lines.append(
            f"| {row['layers']} | {row['devices']} | {middle('search_seconds'):.2f} s | "
            f"{middle('paper_seconds'):.2f} s | {times('paper_seconds'):.0f} | "
            f"{middle('whole_table_seconds'):.0f} s | {times('whole_table_seconds'):.0f} | "
            f"{middle('madpipe_plan_seconds'):.1f} s | {middle('paper_plan_seconds'):.1f} s | "
            f"{found}{f', none in {missing}' if missing else ''} |"
        )
    return lines
