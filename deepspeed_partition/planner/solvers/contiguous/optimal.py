"""The best contiguous allocation under memory: exact, for the period of 1F1B*.

Decision at a period T: with D(q, k) the least delay above the boundary before layer k, over all ways to split
layers k..L into q stages that fit,

    D(0, L) = nothing        D(q, k) = min over l of  (D(q - 1, l) (+) U(k, l)) (+) C(k)

where a stage is allowed if U(k, l) <= T, C(k) <= T and its group fits into memory. ``(+)`` is monotone in the
delay, and memory only grows with it, so the least delay is all that must be remembered. A decision takes O(P L^2)
time and O(P L) memory for L layers and P devices, beside the O(L^2) table of stages.

The answer is found by bisection over T. Each partition found is snapped to its own least period, and a probe one
tick below the best period proves that nothing shorter exists. Source: MadPipe paper, section 4.1; the recurrence
is that of section 4.2.2 without the special processor, with delays as (group, fill) instead of a grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.contiguous import deepspeed_step
from deepspeed_partition.planner.solvers.contiguous.min_max import min_max_partitions
from deepspeed_partition.planner.solvers.contiguous.partition_search import PartitionSearch, best_partition
from deepspeed_partition.planner.solvers.contiguous.recomputing import (
    LEAST_MEMORY_SECONDS,
    best_recomputing_partition,
    least_bytes,
    recomputing_search,
)
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Solver for one stage per device, in order.

    Without a step it finds the partition of the shortest period, exactly. With a step (``num_micro_batches``) it
    finds the partition and the order of the shortest step by a search: in DeepSpeed's own engine
    (``deepspeed_step.py``) where a host asks for that, otherwise in one that overlaps transfers
    (``step_search.py``). The search proves nothing, but its step is never longer than that of the partition of the
    shortest period.
    """

    name: str = "contiguous"

    def solve(self, problem: Problem) -> Answer:
        if problem.recomputation is None:
            found = best_partition(problem.times, problem.table, problem.constraints, problem.deadline)
        else:
            found = best_recomputing_partition(problem)
        if found is None:
            return Answer(())
        proved = found.period if found.proved else None
        if problem.num_micro_batches is None:
            return Answer((found.cuts,), proved)
        if problem.in_deepspeed:
            return Answer(tuple(deepspeed_step.best_partitions(problem, found.cuts)), proved)
        return Answer((found.cuts,), proved, step_search="contiguous")

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        deadline = problem.deadline.at_least(LEAST_MEMORY_SECONDS)

        def need(from_end: int) -> NDArray[np.int64]:
            return least_bytes(problem, problem.depth(from_end), deadline)

        return min(min_max_partitions(problem, need), key=lambda found: found[1], default=None)


def partition_at(problem: Problem, period: int) -> Cuts | None:
    """Return some contiguous partition that fits at ``period``, or None where there is none.

    Raises:
        DeadlinePassed: the deadline passed before that was known.
    """
    if problem.recomputation is not None:
        return recomputing_search(problem, period).decide(period)
    return PartitionSearch(problem.times, problem.table, problem.constraints, problem.deadline).decide(period)
