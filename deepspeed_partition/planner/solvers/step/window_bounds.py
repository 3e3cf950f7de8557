"""A lower bound of the step of any allocation, by the work that is left for the devices at each boundary.

With the idle time of a layer x as in ``segment_bounds.py``, ``idle(x) = C(x) + 2 S(x)``: nothing is done from x on
in that many ticks of the step. From the i-th stage on, ``x(i)`` its first layer, all devices have ``m (U -
C(x(i)))`` ticks of work left. Each of P devices does its share of it in stages that begin at ``x(i)`` or behind,
and no two at the same layer. So for *every* i

    m (U - C(x(i)))  <=  sum over j < P of  T - idle(x(i + j)).

For i = 0 this is the work and the idle time of the devices; for the next ones it says that the first stages cannot
be as small as fill and drain alone want them: a device that has done those waits for its next stage.

- Two stages that follow one another alone, ``idle(x(i)) + (P - 1) idle(x(i + 1))`` for the sum: the least S for
  each layer decides whether some boundaries do, so this is exact for two devices.
- All P of them: any prices ``a(i) >= 0`` of the inequalities give a lower bound of T, by the boundaries that make
  the priced sum least (a shortest path over the number and the layer of a boundary). The prices are improved by
  subgradients.

Method: own; not in the papers. The prices are a Lagrangian relaxation (A. Geoffrion, 1974). Cost: O(L^2) for each
decision, O(P L^2) for each of ``MOST_PRICES`` prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.step.segment_bounds import ROUNDS, least_from
from deepspeed_partition.planner.solvers.step.stage_needs import FAR

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.stage_needs import StageNeeds
    from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

MOST_WORK = 2 * 10**8
"""Most numbers that are looked at, for the decisions and for the prices."""
FEWEST, MOST_DECISIONS, MOST_PRICES = 8, 55, 30
"""Fewest decisions or prices with which it is worth to begin, and the most."""
FIRST_RATIO, SECOND_RATIO = 1.25, 1.02
"""T up to which boundaries are allowed, over the bound so far: in the first and the second round of prices."""
STEP, DECAY = 0.5, 0.92
"""Length of the first subgradient step, and by how much the next one is shorter."""
OVERHEAD = 5000
"""Numbers whose sum takes as long as to begin with a layer."""
ROUNDING = 1e-9
"""Relative error that sums of ticks in floating point may have."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class WindowBound:
    """The bound for one problem.

    Args:
        bounds: times of the problem.
        needs: what each stage asks of a step.
    """

    def __init__(self, bounds: StepBounds, needs: StageNeeds) -> None:
        self.m, self.size, self.needs = bounds.m, bounds.size, needs
        self.num_devices, self.C = bounds.num_devices, bounds.C
        self.total = int(bounds.C[-1])
        self.send: Integers = np.append(bounds.send, 0)
        self.own: Integers = np.append(bounds.path, 0)
        """Ticks before and behind the work from a layer on, without transfers; the end has 0."""

    def least(self, at_least: int) -> int:
        """Return ticks than which no step is shorter; never less than ``at_least``."""
        if MOST_WORK // (8 * self.size**2 + 1) < FEWEST:
            return at_least
        work = ROUNDS * self.size * (8 * self.size + OVERHEAD)
        decisions = min(MOST_DECISIONS, max(FEWEST, MOST_WORK // work))
        bound = at_least
        longest = FAR // (2 * self.num_devices)
        if at_least >= longest or self._reached(longest) is None:
            return at_least  # some layer fits in no stage: no step is long enough
        if self._reached(bound) is None:
            bound = least_from(bound, lambda T: self._reached(T) is not None, decisions)
        if self.num_devices > 2:
            bound = self._by_prices(bound)
        return bound

    def _reached(self, T: int) -> NDArray[np.bool_] | None:
        """Return which stages may follow from layer 0 on, [k, l]; None where they do not come to the end."""
        stages = np.zeros((self.size + 1, self.size + 1), dtype=np.bool_)

        def least_total(needed: Integers) -> int:
            return self._mark(T, needed, stages)

        return stages if self.needs.total(T, self.needs.within(T), least_total) < FAR else None

    def _mark(self, T: int, needed: Integers, stages: NDArray[np.bool_]) -> int:
        """Write down which stages may follow from layer 0 on; return the least ticks over all boundaries."""
        least = np.full(self.size + 1, FAR, dtype=np.int64)
        least[0] = 0
        stages[:] = False
        others = self.num_devices - 1
        for start in range(self.size):
            if least[start] >= FAR:
                continue
            behind = slice(start + 1, None)
            so_far = int(least[start])
            left = self.num_devices * T - self.m * (self.total - int(self.C[start]))
            left -= int(self.own[start]) + 2 * so_far
            one_way = so_far + self.send[behind]
            idle = self.own[behind] + 2 * one_way
            idle[-1] = T  # no stage is left for the other devices
            may = (2 * so_far + needed[start, behind] <= T) & (others * idle <= left)
            stages[start, behind] = may
            np.minimum(least[behind], np.where(may, one_way, FAR), out=least[behind])
        return int(least[-1])

    def _by_prices(self, bound: int) -> int:
        """Return ticks than which no step is shorter, by the inequalities of all P devices."""
        numbers = self.num_devices + 2
        work = 2 * (numbers + self.num_devices) * self.size**2
        rounds = min(MOST_PRICES, MOST_WORK // work)
        if rounds < FEWEST:
            return bound
        for ratio in (FIRST_RATIO, SECOND_RATIO):
            longest = int(bound * ratio) + 1
            stages = self._reached(longest)
            if stages is None:
                bound = max(bound, longest)
                continue
            allowed = np.where(stages, 0.0, np.inf)
            bound = max(bound, min(longest, self._priced(allowed, bound, numbers, rounds)))
        return bound

    def _priced(self, allowed: Floats, bound: int, numbers: int, rounds: int) -> int:
        """Return the best bound that some prices give, of steps whose stages are ``allowed``: 0, else infinite."""
        P, work = self.num_devices, float(self.m * self.total)
        prices = np.zeros(numbers)
        prices[0] = 1.0
        best = float(bound)
        for turn in range(rounds):
            least, layers = self._cheapest(allowed, prices)
            if not np.isfinite(least):
                break
            best = max(best, (least + work) / P * (1 - ROUNDING))
            missing = self._idle_and_done(layers, numbers) - (P * best - work)
            length = float(np.sqrt((missing**2).sum()))
            if missing.max() <= 0 or not length:
                break
            prices = np.maximum(0, prices + missing / length * STEP * DECAY**turn)
            prices /= prices.sum()
        return int(best)

    def _cheapest(self, allowed: Floats, prices: Floats) -> tuple[float, list[int]]:
        """Return the least priced sum over all boundaries, and the boundaries: behind the last one L stands.

        The end counts ``U + 2 S`` for stages that are not there, which is less than T.
        """
        weights = np.convolve(prices, np.ones(self.num_devices))
        """What the idle time of each boundary counts, by its number."""
        sends = 2 * np.cumsum(weights[::-1])[::-1]
        done = np.append(prices, np.zeros(len(weights) - len(prices))) * self.m
        own = self.own.astype(float)
        own[-1] = self.total
        value = np.full(self.size + 1, np.inf)
        value[0] = weights[0] * own[0]
        came_from = []
        for number in range(1, len(weights)):
            ways = value[:, None] + allowed
            before = ways.argmin(axis=0)
            shortest = ways[before, np.arange(self.size + 1)]
            if value[-1] < shortest[-1]:
                shortest[-1], before[-1] = value[-1], self.size
            value = shortest + weights[number] * own + sends[number] * self.send - done[number] * self.C
            came_from.append(before)
        layers = [int(value.argmin())]
        for before in reversed(came_from):
            layers.append(int(before[layers[-1]]))
        return float(value.min()), layers[::-1]

    def _idle_and_done(self, layers: list[int], numbers: int) -> Floats:
        """Return the left side of each inequality for some boundaries: idle ticks, less the work that is done."""
        one_way = np.cumsum(np.where(np.arange(len(layers)) > 0, self.send[layers], 0))
        own = np.where(np.array(layers) == self.size, self.total, self.own[layers])
        idle = (own + 2 * one_way).astype(float)
        sums = np.convolve(idle, np.ones(self.num_devices), "valid")[:numbers]
        result: Floats = sums - self.m * self.C[layers[:numbers]]
        return result
