"""What the layers that are not laid yet still cost the special device at the least: when to give a label up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.special import SpecialSearch

WEIGHTS = np.array([(1, 0), (0, 1), (1, 1), (1, 2), (2, 1)], dtype=float)
"""Of load and memory, both as shares of what the special device has: what a completion is bounded by."""
ROUNDING = 1e-9
BUCKETS_PER_PERIOD, MOST_BUCKETS = 16, 256
"""Of the delay at a boundary."""
MOST_STEPS, MOST_STEPS_OF_ALL = 1e6, 2e7
"""Of the recurrence, for one allocation and for all; on long chains the delays are told apart less finely."""
UNREACHED = 2**62


class Completion:
    """What layers 0 to k still cost the special device at the least, at a period.

    With n normals left and a delay of d or more above layer k, for each of the weights::

        N(n, k, d) = min over j < k of   min(N, S)(n - 1, j, d')             [j, k) on a normal device
        S(n, k, d) = min over j < k of   cost of [j, k) at d' + N(n, j, d')  on the special one, and then not again

    with d' the delay above layer j. Delays are rounded down to a bucket, counted from the least delay that any
    allocation has at the boundary; the last bucket holds all that are longer.
    """

    def __init__(self, search: SpecialSearch, period: int, most_steps: float) -> None:
        self.search = search
        self.period = period
        size, normals, base = search.num_layers, search.max_normals, period + 1
        self.least = self._least_delays(period)
        steps = len(WEIGHTS) * (normals + 1) * size * size / 2
        count = int(np.clip(most_steps / steps, 1, MOST_BUCKETS))
        periods = 2 * search.problem.longest_period // max(period, 1) + 3  # two groups are longer than a period
        self.width = max(base // BUCKETS_PER_PERIOD, periods * base // count, 1)
        self.count = min(count, periods * base // self.width + 1)
        shape = (len(WEIGHTS), normals + 1, size + 1, self.count)
        self.normal, self.either = np.full(shape, np.inf), np.full(shape, np.inf)
        self.normal[:, :, 0] = self.either[:, :, 0] = 0.0
        for k in range(1, size + 1):
            search.problem.deadline.check()
            if self.least[k] < UNREACHED and search.transfer[k] <= period:
                self._reach(k)

    def _reach(self, k: int) -> None:
        search, period, base = self.search, self.period, self.period + 1
        j = np.arange(k)[None, :]
        loads, transfer = search.loads[:k, k][None, :], int(search.transfer[k])
        delay = _after(
            _after(self.least[k] + np.arange(self.count) * self.width, transfer, base)[:, None], loads, base
        )
        group = delay // base
        bucket = np.clip((delay - self.least[:k]) // self.width, 0, self.count - 1)
        short = loads <= period
        normal = np.where(short & (group <= search.room[:k, k]), 0.0, np.inf)
        self.normal[:, 1:, k] = (self.either[:, :-1, j, bucket] + normal).min(axis=-1)
        counted = group - 1 if search.counts_peak else group
        fits = short & (counted <= search.most_counted[:k, k])
        kept = search.fixed[:k, k] + np.where(fits, counted, 0) * search.stash[:k, k]
        shares = np.stack([np.broadcast_to(loads / max(period, 1), kept.shape), kept / search.memory])
        special = np.where(fits, np.tensordot(WEIGHTS, shares, axes=1), np.inf)[:, None]
        on_special = (self.normal[:, :, j, bucket] + special).min(axis=-1)
        self.either[:, :, k] = np.minimum(self.normal[:, :, k], on_special)

    def _least_delays(self, period: int) -> NDArray[np.int64]:
        """Above each layer, of any allocation."""
        search, base = self.search, period + 1
        delay = np.full(search.num_layers + 1, UNREACHED, dtype=np.int64)
        delay[-1] = base
        for stop in range(search.num_layers, 0, -1):
            if delay[stop] < UNREACHED and search.transfer[stop] <= period:
                loads = search.loads[:stop, stop]
                above = _after(_after(delay[stop : stop + 1], int(search.transfer[stop]), base), loads, base)
                delay[:stop] = np.minimum(delay[:stop], np.where(loads <= period, above, UNREACHED))
        return delay

    def possible(
        self,
        used: NDArray[np.int64],
        delay: NDArray[np.int64],
        load: NDArray[np.int64],
        kept: NDArray[np.int64],
        first: NDArray[np.intp],
        *,
        after_special: bool,
    ) -> NDArray[np.bool_]:
        """Whether layers 0 to ``first`` might still be laid below so much; an entry for each label."""
        bucket = np.clip((delay - self.least[first]) // self.width, 0, self.count - 1)
        needed = (self.normal if after_special else self.either)[:, self.search.max_normals - used, first, bucket]
        shares = np.stack([load / max(self.period, 1), kept / self.search.memory])
        found: NDArray[np.bool_] = (WEIGHTS @ shares + needed <= WEIGHTS.sum(axis=1)[:, None] + ROUNDING).all(
            axis=0
        )
        return found


def _after(delay: NDArray[np.int64], load: int | NDArray[np.int64], base: int) -> NDArray[np.int64]:
    """``delay (+) load``, for a delay as ``group * base + fill`` and a load below ``base``."""
    group, fill = np.divmod(delay, base)
    found: NDArray[np.int64] = np.where(fill + load < base, delay + load, (group + 1) * base + load)
    return found
