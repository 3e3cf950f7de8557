"""Bounds on completions: what the layers still to be placed cost the special device, to give up a label early.

Method: a relaxation of the dynamic program of the MadPipe paper, section 4.2.2, with weighted sums of load and
memory in place of both; it is not in the paper. It is a lower bound, so no label that has a completion is lost.
Cost, for L layers, P devices and b buckets of the delay: O(L^2 P b) time, at most ``MOST_STEPS``, and O(L P b)
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch

WEIGHTS = np.array([(1, 0), (0, 1), (1, 1), (1, 2), (2, 1)], dtype=float)
"""Weights of load and memory, both as shares of what the special device has; a completion is bounded by
each sum."""
ENOUGH = WEIGHTS.sum(axis=1)[:, None] + 1e-9
"""Largest weighted sum of load and memory that fits, with a margin for rounding; shape (weights, 1)."""
BUCKETS_PER_PERIOD, MOST_BUCKETS = 16, 256
"""Number of buckets for the delay at a boundary: per period, and at most."""
MOST_STEPS = 2e7
"""Most steps of the recurrence; on long chains the delays are told apart less finely."""
UNREACHED = 2**62
"""Delay that no allocation has; it marks a boundary that none reaches."""
Ticks = int | np.int64 | NDArray[np.int64]


class Completion:
    """Lower bound on what layers 0 to k still cost the special device, at a period.

    With n normals left and a delay of d or more above layer k, for each of the weights::

        N(n, k, d) = min over j < k of   min(N, S)(n - 1, j, d')             [j, k) on a normal device
        S(n, k, d) = min over j < k of   cost of [j, k) at d' + N(n, j, d')  on the special one, and then not
            again

    with d' the delay above layer j. Delays are rounded down to a bucket, counted from the least delay that any
    allocation has at the boundary; the last bucket holds all longer delays. At first there is one bucket: it
    prunes nearly as well, and the recurrence takes about as long as a few labels do.
    """

    def __init__(self, search: SpecialSearch, period: int) -> None:
        self.search = search
        self.period = period
        compute = search.problem.times.compute
        self.first = np.searchsorted(compute, compute - period)
        """First layer of the longest stage that ends at layer k and takes at most a period; indexed [k]."""
        self.least = self._least_delays()
        self.periods = 2 * search.problem.longest_period // max(period, 1) + 3  # two groups are longer than one
        self._fill(1)

    def refine(self, steps: float) -> bool:
        """Use as many buckets as ``steps`` of the recurrence allow; return whether that is twice as many."""
        size = self.search.num_layers
        per_bucket = len(WEIGHTS) * (self.search.max_normals + 1) * size * size / 2
        count = int(min(min(steps, MOST_STEPS) / per_bucket, MOST_BUCKETS, self.periods * BUCKETS_PER_PERIOD))
        finer = count >= 2 * self.count
        if finer:
            self._fill(count)
        return finer

    def _fill(self, count: int) -> None:
        search, period, base = self.search, self.period, self.period + 1
        self.count = count
        self.width = -(-self.periods * base // count)
        shape = 2, (search.num_layers + 1) * count, search.max_normals + 1, len(WEIGHTS)
        self.table = np.full(shape, np.inf)
        """Lower bounds, indexed [after a special stage, boundary and bucket, normals left, weight]."""
        self.table[:, :count] = 0.0
        either, normal = self.table
        loads = search.loads.T[:, None]  # [k, bucket, j] here and below
        above = _after(self.least[:, None] + np.arange(count) * self.width, search.transfer[:, None], base)
        delay = _after(above[:, :, None], loads, base)
        group = delay // base
        place = self._place(np.arange(search.num_layers + 1), delay)
        blocked = np.where(group <= search.room.T[:, None], 0.0, np.inf)
        counted = group - 1 if search.counts_peak else group
        fits = counted <= search.most_counted.T[:, None]
        kept = search.fixed.T[:, None] + np.where(fits, counted, 0) * search.stash.T[:, None]
        of_memory = kept / max(search.memory, 1)  # none may be left, and nothing be kept
        shares = np.stack([np.broadcast_to(loads / max(period, 1), kept.shape), of_memory], axis=-1)
        cost = np.where(fits[..., None], shares @ WEIGHTS.T, np.inf)
        for k in range(1, search.num_layers + 1):
            search.problem.deadline.check()
            if self.least[k] < UNREACHED and search.transfer[k] <= period and self.first[k] < k:
                j, here = slice(self.first[k], k), slice(k * count, (k + 1) * count)
                reached = place[k, :, j]
                on_normal = either[reached, :-1] + blocked[k, :, j, None, None]
                normal[here, 1:] = on_normal.min(axis=1)
                on_special = (normal[reached] + cost[k, :, j, None]).min(axis=1)
                either[here] = np.minimum(normal[here], on_special)

    def _least_delays(self) -> NDArray[np.int64]:
        """Return the least delay above each layer, of any allocation."""
        search, base = self.search, self.period + 1
        delay = np.full(search.num_layers + 1, UNREACHED, dtype=np.int64)
        delay[-1] = base
        for stop, first in reversed(list(enumerate(self.first.tolist()))):
            if delay[stop] < UNREACHED and search.transfer[stop] <= self.period and first < stop:
                above = int(_after(delay[stop], search.transfer[stop], base))
                reached = delay[first:stop]
                np.minimum(reached, _after(above, search.loads[first:stop, stop], base), out=reached)
        return delay

    def _place(self, boundary: NDArray[np.int64], delay: NDArray[np.int64]) -> NDArray[np.int64]:
        bucket = np.maximum(delay - self.least[boundary], 0) // self.width
        found: NDArray[np.int64] = boundary * self.count + np.minimum(bucket, self.count - 1)
        return found

    def possible(
        self,
        used: NDArray[np.int64],
        delay: NDArray[np.int64],
        load: NDArray[np.int64],
        kept: NDArray[np.int64],
        first: NDArray[np.int64],
        after_special: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Return, for each label, whether layers 0 to ``first`` may still fit below it."""
        needed = self.table[after_special, self._place(first, delay), self.search.max_normals - used]
        shares = np.array([load / max(self.period, 1), kept / max(self.search.memory, 1)])
        found: NDArray[np.bool_] = (WEIGHTS @ shares + needed.T <= ENOUGH).all(axis=0)
        return found


def _after(delay: Ticks, load: Ticks, base: int) -> NDArray[np.int64]:
    """Return ``delay (+) load``, for a delay as ``group * base + fill`` and a load below ``base``."""
    fill = delay % base
    return delay + load + np.where(fill + load < base, 0, base - fill)
