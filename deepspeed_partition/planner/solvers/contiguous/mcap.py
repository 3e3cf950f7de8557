"""mCAP's aim: the contiguous partition into P stages whose largest device needs the least memory.

    M(q, k) = min over l of max(memory(k, l) with q micro-batches in flight, M(q - 1, l))

The paper predicts peaks from profiles of whole partitionings (section 3.3) and searches by brute force or
Bayesian optimization (section 3.4). Here the peak is the planner's own (weights, stash, buffers, transient
bytes), so the answer is exact, in O(P L^2) time and O(P L) memory beside the O(L^2) table of stages.
Micro-batches in flight are those of 1F1B: the q-th stage from the end holds q, or as many as the step has, if
that is fewer.

Source: H. Dreuning et al., mCAP, Euro-Par 2022, section 3, whose pipeline holds all micro-batches of a step at
once (GPipe).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_partition.planner.solvers.contiguous.min_max import min_max_partitions
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, bytes_needed, fits


@dataclass(frozen=True, slots=True)
class MemoryBalanced:
    """Solver ``mcap``: it balances memory and ignores time."""

    name: str = "mcap"

    def solve(self, problem: Problem) -> Answer:
        cuts = self._cuts(problem)
        return Answer((cuts,) if cuts is not None and fits(problem, cuts) else ())

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        cuts = self._cuts(problem)
        return None if cuts is None else (cuts, max(bytes_needed(problem, cuts)))

    @staticmethod
    def _cuts(problem: Problem) -> Cuts | None:
        table, most = problem.table, problem.num_micro_batches
        found = min_max_partitions(problem, lambda from_end: table.needs(min(from_end, most or from_end)))
        return found[-1][0] if found else None  # the partition of the most stages
