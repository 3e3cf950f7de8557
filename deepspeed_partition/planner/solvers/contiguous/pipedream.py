"""PipeDream's straight pipeline: the contiguous partition whose slowest stage or transfer is fastest.

    A(q, k) = min over l of max(U(k, l), 2 c(k), A(q - 1, l))

with U(k, l) the computation of layers k to l and c(k) one transfer over the boundary before layer k: exact, in
O(P L^2) time and O(P L) memory beside the O(L^2) table of stages. That is the formula of PipeDream's slides, and
gives 0.41104 s for its VGG-16 on 4 machines at 1 GB/s. Its own program leaves the transfers out of a straight
pipeline, 0.21645 s: what this one gives where they are free.

A stage counts only if it fits with q micro-batches in flight, where it is the q-th stage from the end. That is
what a stage holds where no time is lost to transfers; 1F1B*, which counts them, may need up to 2 P - 1, or fewer.
The partition runs under 1F1B* at the least period that fits.

Source: D. Narayanan et al., PipeDream, SOSP 2019, section 3.1, without replicated stages; the weights,
activations and buffers of a stage are those of the MadPipe paper, so that both are measured alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, min_max_partitions
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, bytes_needed, fits


@dataclass(frozen=True, slots=True)
class PipeDream:
    """Solver ``pipedream``; without its memory test, ``pipedream-blind``."""

    name: str = "pipedream"
    tests_memory: bool = True

    def solve(self, problem: Problem) -> Answer:
        cuts = self._cuts(problem)
        return Answer((cuts,) if cuts is not None and fits(problem, cuts) else ())

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        if not self.tests_memory:
            cuts = self._cuts(problem)
            return None if cuts is None else (cuts, max(bytes_needed(problem, cuts)))
        table = problem.table
        found = min_max_partitions(problem, lambda from_end: table.needs(from_end))
        return min(found, key=lambda each: each[1], default=None)

    def _cuts(self, problem: Problem) -> Cuts | None:
        """Return the fastest partition that passes the memory test; of several the one of the fewest stages."""
        times, table = problem.times, problem.table
        compute = times.compute[None, :] - times.compute[:, None]
        slowest = np.maximum(compute, times.round_trip[:, None])

        def cost(from_end: int) -> NDArray[np.int64]:
            return (
                np.where(table.max_in_flight >= from_end, slowest, NOTHING_FITS) if self.tests_memory else slowest
            )

        found = min_max_partitions(problem, cost)
        return min(found, key=lambda each: each[1])[0] if found else None
