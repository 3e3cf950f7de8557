"""A lower bound of the step of any allocation in tight memory: what is kept in the mean, and how memory fills.

All devices together have V bytes besides weights and buffers, at every instant. A micro-batch that has come to a
layer holds the stashes of the layers before, but those that it recomputes:

- in the mean over the step (Little's law), each stash for as long as the layer and all behind it compute;
- in the fill: within t ticks a micro-batch is t ticks far at the most, so all of them together have done at most
  ``w(t)``, the largest sum of progress whose stashes fit into V. With q devices that work at once,
  ``q t - w(t)`` ticks are idle. Likewise the drain, seen from the end of the step: what is left to do holds
  memory. In tight memory devices cannot all begin with a micro-batch of their own; they wait until the first ones
  come back.

What is recomputed costs its time for every micro-batch, and saves both. For every amount of it, from ``low`` to
``high`` ticks, the step takes at least the largest of

    (m (U + low) + idle ticks) / q                 bytes times ticks that are kept / V

with the stashes that are cheapest to save, in parts of layers, in ``high`` ticks of each micro-batch. All of them
recompute the same layers.

Method: own; not in the papers. Little's law is the argument of the slides (``identical_stages.py``). Cost: O(L)
for each of ``NUM_AMOUNTS`` amounts, ``NUM_PRICES`` prices, and numbers of devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

NUM_AMOUNTS, NUM_PRICES = 48, 12
"""Numbers of amounts that are recomputed, and of prices of a byte."""
SLOPES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Prices of a byte in the fill, over the ticks of the path divided by the bytes of a whole micro-batch."""
ROUNDING = 1e-9
"""Relative error that products of bytes and ticks may have."""
Floats = NDArray[np.float64]


class MemoryBound:
    """The bound for one problem."""

    def __init__(self, bounds: StepBounds) -> None:
        self.bounds, self.m = bounds, bounds.m
        layers = bounds.problem.chain.layers
        self.stash = np.array([bounds.problem.chain.stash(layer) for layer in layers], dtype=float)
        self.again = np.array([bounds.may_run_twice(layer) for layer in layers])
        self.saved = np.array(bounds.saved, dtype=float)
        """Bytes times ticks that each layer saves if it runs twice; 0 where it must not."""
        self.f, self.b = bounds.f.astype(float), bounds.b.astype(float)
        self.total = float(bounds.C[-1])
        self.most = self._amounts()

    def _amounts(self) -> Floats:
        """Return amounts that run twice, in ticks per micro-batch: fine where little does."""
        whole = float(self.f[self.again].sum())
        if not whole:
            return np.zeros(2)
        return whole * np.linspace(0, 1, NUM_AMOUNTS + 1) ** 2

    def least(self) -> int:
        """Return ticks than which no step is shorter; 0 where no number of devices has room for the weights."""
        low, high = self.most[:-1], self.most[1:]
        kept = self._kept(high)
        fill, drain = self._fill(high)
        work, idle, best = self.m * (self.total + low), self.bounds.least_idle, np.inf
        for count in range(self.bounds.num_devices, 0, -1):
            busy = min(count, self.m)
            if self.m * self.total / busy >= best:
                break
            room = self.bounds.room_besides_weights(count)
            if room <= 0:
                continue
            waits = np.zeros(len(low))
            if not self.bounds.problem.per_micro_batch:  # then no two of them need recompute the same
                waits = self._waits(fill, busy, room) + self._waits(drain, busy, room)
            if busy == count:
                waits = np.maximum(waits, idle[count])
            lost = self.bounds.lost(room)
            times = np.maximum((work + waits) / busy, (self.m * kept + lost) / room)
            best = min(best, float(times.min()))
        return int(best * (1 - ROUNDING)) if np.isfinite(best) else 0

    def _kept(self, most: Floats) -> Floats:
        """Return the bytes times ticks that a micro-batch takes of the memory, at least, by amount."""
        paths = self.total - self.bounds.C[:-1]
        every = float((self.stash * paths).sum())
        saves = np.full(len(most), every)
        for price in _prices(self.saved[self.again], self.f[self.again]):
            gain = float(np.maximum(0, np.where(self.again, self.saved - price * self.f, 0)).sum())
            np.minimum(saves, gain + price * most, out=saves)
        return np.maximum(0, every - saves)

    def _fill(self, most: Floats) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Return progress and stashes in the fill, and what is left and its stashes in the drain.

        Shapes: progress (amounts, L), and the largest ``progress - slope * stashes`` so far (slopes, amounts, L).
        """
        held = np.zeros((len(most), self.bounds.size))
        for price in _prices(self.stash[self.again], self.f[self.again]):
            items = np.where(self.again, np.minimum(self.stash, price * self.f), self.stash)
            np.maximum(held, np.cumsum(items)[None, :] - price * most[:, None], out=held)
        forth = np.broadcast_to(np.cumsum(self.f)[None, :], held.shape)
        twice = np.minimum(most[:, None], np.cumsum(np.where(self.again, self.f, 0))[None, :])
        back = np.cumsum(self.b)[None, :] + twice
        return (forth, self._sloped(forth, held)), (back, self._sloped(back, held))

    def _sloped(self, progress: Floats, held: Floats) -> Floats:
        slopes = np.array(SLOPES)[:, None, None] * self._slope
        above = np.maximum.accumulate(progress[None] - slopes * held[None], axis=2)
        return np.maximum(0, above)

    @property
    def _slope(self) -> float:
        return self.total / max(1.0, float(self.stash.sum()))

    def _waits(self, part: tuple[Floats, Floats], busy: int, room: int) -> Floats:
        """Return the ticks that ``busy`` devices idle at least in the fill, or in the drain, by amount."""
        progress, sloped = part
        slopes = np.array(SLOPES)[:, None, None] * self._slope
        done = (self.m * sloped + slopes * room).min(axis=0) * (1 + ROUNDING)
        result: Floats = np.maximum(0, (busy * progress - done).max(axis=1))
        return result


def _prices(saved: Floats, ticks: Floats) -> Floats:
    """Return prices of a tick in what it saves: ratios of some of the layers."""
    ratios = saved[ticks > 0] / ticks[ticks > 0]
    if not len(ratios):
        return np.zeros(1) if not len(saved) else np.array([0.0, 1e30])
    some = np.unique(np.quantile(ratios, np.linspace(0, 1, NUM_PRICES)))
    return np.unique(np.append(some, 0.0))
