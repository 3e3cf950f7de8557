"""mCAP's aim: the contiguous partition into P stages whose largest device needs the least memory.

What a stage needs is what mCAP's predictor says of it (section 3.3) where the chain has an mCAP profile
(``Chain.mcap``), with ties broken as section 3.4 does. Else it is the planner's own (weights, stash, buffers,
transient bytes), and of equals any:

    M(q, k) = min over l of max(memory(k, l) with q micro-batches in flight, M(q - 1, l))

The paper searches by brute force (mCAP-BF) or Bayesian optimization (mCAP-BO). Dynamic programming finds what
brute force does, in O(P L^2) time and O(P L) memory beside the O(L^2) tables of stages. Micro-batches in flight
are those of 1F1B: the q-th stage from the end holds q, or as many as the step has, if that is fewer.

Source: H. Dreuning et al., mCAP, Euro-Par 2022, section 3, whose pipeline holds all micro-batches of a step at
once (GPipe).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.contiguous import mcap_search
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, min_max_partitions
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, bytes_needed, fits

Search = Literal["exact", "brute-force", "bayesian"]
"""How the partition is looked for: dynamic programming, all partitions one by one, Bayesian optimization."""
MCAP_SEARCHES: dict[str, Search] = {"mcap": "exact", "mcap-bf": "brute-force", "mcap-bo": "bayesian"}
"""Search of each algorithm; the paper calls two of them mCAP-BF and mCAP-BO."""


@dataclass(frozen=True, slots=True)
class MemoryBalanced:
    """Solver ``mcap``: it balances memory and ignores time."""

    name: str = "mcap"
    search: Search = "exact"

    def solve(self, problem: Problem) -> Answer:
        cuts = self._cuts(problem)
        return Answer((cuts,) if cuts is not None and fits(problem, cuts) else ())

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        cuts = self._cuts(problem)
        return None if cuts is None else (cuts, max(bytes_needed(problem, cuts)))

    def _cuts(self, problem: Problem) -> Cuts | None:
        """Return the partition of the most stages that there is; None where there is none."""
        if self.search == "exact" and problem.chain.mcap is None:
            found = min_max_partitions(problem, lambda from_end: _own_peaks(problem, from_end))
            return found[-1][0] if found else None
        peaks = {count: _peaks(problem, count) for count in range(1, max(_counts(problem), default=0) + 1)}
        for num_stages in reversed(_counts(problem)):
            stages = [peaks[from_end] for from_end in range(num_stages, 0, -1)]
            if self.search == "exact":
                cuts = mcap_search.exact(stages)
            elif self.search == "brute-force":
                cuts = mcap_search.brute_force(stages)
            else:
                cuts = mcap_search.bayesian(stages, deadline=problem.deadline)
            if cuts is not None:
                return cuts
        return None


def _counts(problem: Problem) -> range:
    return problem.constraints.counts(problem.chain.num_layers)


def _own_peaks(problem: Problem, from_end: int) -> NDArray[np.int64]:
    return problem.table.needs(min(from_end, problem.num_micro_batches or from_end))


def _peaks(problem: Problem, from_end: int) -> NDArray[np.int64]:
    """Return, as entry [k, l], the bytes of layers k to l as this stage from the end; forbidden stages marked."""
    profile, in_flight = problem.chain.mcap, min(from_end, problem.num_micro_batches or from_end)
    peaks = _own_peaks(problem, from_end) if profile is None else profile.peaks(in_flight)
    return np.where(problem.constraints.allowed(problem.table), peaks, NOTHING_FITS)
