"""A lower bound of the step of any allocation that counts what it costs to come back to a device.

An allocation on q devices has n >= q stages, and their first layers ``x(0) = 0 < x(1) < ...``. With ``S(j)`` the
ticks of a tensor one way over all boundaries up to ``x(j)``, nothing is done from layer ``x(j)`` on in the first
``F + S`` and the last ``B + S`` ticks of the step, in all ``C(x(j)) + 2 S(j)``, its *idle time*. In a step of T
ticks:

- each stage needs at most T: ``2 S(j) + X``, and with the ticks over all boundaries together ``2 S(n - 1) + Y``
  (``stage_needs.py``);
- the j-th device to be reached begins at ``x(j)`` or behind it. All devices have ``q T`` ticks, so the idle time
  of ``x(j)`` is lost q - j times at least: it is at most ``(q T - m (U + R)) / (q - j)``, for U ticks of all
  layers, and R ticks that must run twice for lack of memory (Little's law);
- where r < q stages are left, at most r devices do all that is left: ``m (U - C(x)) <= r (T - C(x) - 2 S)``.

So short steps need early and late boundaries besides those that share the work out, and each costs its transfers.
The least T for which there are such boundaries is a lower bound; by bisection, with the least S for each layer and
number of stages. Cost: O(q^2 L^2) for each decision and number of devices q.

Method: own; not in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.step.stage_needs import FAR

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.stage_needs import StageNeeds
    from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

MOST_WORK = 3 * 10**8
"""Most numbers that are looked at."""
FEWEST, MOST = 12, 55
"""Fewest decisions with which a bisection is worth beginning, and the most that it takes."""
ROUNDS = 3
"""Number of times that boundaries are looked for in a decision, in the mean (``StageNeeds.total``)."""
ROUNDING = 1e-9
"""Relative error that sums of bytes times ticks may have."""
Integers = NDArray[np.int64]


def num_decisions(bounds: StepBounds) -> int:
    """Return how many decisions a bisection may take; 0 where they are too few to begin."""
    work = (3 * bounds.num_devices**2 // 2 + 1) * bounds.size**2  # fewer devices hardly ever have the time
    decisions = MOST_WORK // work
    return min(MOST, max(FEWEST, decisions // ROUNDS)) if decisions >= FEWEST else 0


def least_from(low: int, may_take: Callable[[int], bool], decisions: int) -> int:
    """Return a T that is at most the least one to which the answer is yes; it is that one, given decisions enough.

    Args:
        low: a T to which the answer is no.
    """
    high = low + low // 4 + 1
    while decisions > 0 and not may_take(high):
        low, high = high, 2 * high
        decisions -= 1
    for _ in range(decisions - 1):
        if high - low <= 1:
            break
        middle = (low + high) // 2
        if may_take(middle):
            high = middle
        else:
            low = middle
    return low + 1


class SegmentBound:
    """The bound for one problem.

    Args:
        bounds: times and bytes of the problem.
        needs: what each stage asks of a step.
    """

    def __init__(self, bounds: StepBounds, needs: StageNeeds) -> None:
        self.m, self.size, self.needs = bounds.m, bounds.size, needs
        self.decisions = num_decisions(bounds)
        self.C = bounds.C
        self.send: Integers = np.array([*bounds.send, 0], dtype=np.int64)
        self.num_devices, self.room_of = bounds.num_devices, bounds.room_besides_weights
        chain = bounds.problem.chain
        self.stashed = sum(
            chain.stash(layer) * int(self.C[-1] - self.C[index]) for index, layer in enumerate(chain.layers)
        )
        cheapest = sorted(
            (each for each in bounds.savings if each[0]), key=lambda each: Fraction(each[1], each[0])
        )
        self.saved = np.cumsum([0.0, *(float(saved) for saved, _ in cheapest)])
        """Bytes times ticks that the cheapest layers save, one more in each entry."""
        self.twice = np.cumsum([0.0, *(float(ticks) for _, ticks in cheapest)])
        """Ticks that they take."""

    def least(self, at_least: int) -> int:
        """Return ticks than which no step is shorter; never less than ``at_least``."""
        return at_least if self.may_take(at_least) else least_from(at_least, self.may_take, self.decisions)

    def may_take(self, T: int) -> bool:
        """Return whether some number of devices may do a step in T ticks."""
        needed = self.needs.within(T)
        total = self.needs.total_of_any(T, needed)
        if total >= FAR:
            return False
        return any(self._may_take(T, count, needed, total) for count in range(self.num_devices, 0, -1))

    def _may_take(self, T: int, count: int, needed: Integers, total: int) -> bool:
        spare = count * T - self.m * int(self.C[-1])
        if spare < 0:
            return False
        again = self._again(T, count)
        if again is None or spare < self.m * again:
            return False
        spare -= int(self.m * again)
        return any(
            self._has_boundaries(T, count, number, spare, needed, total) for number in range(count, 2 * count)
        )

    def _again(self, T: int, count: int) -> float | None:
        """Return the ticks that must run twice for each micro-batch; None where there is no room even so."""
        lacks = self.stashed - Fraction(self.room_of(count) * T, self.m)
        if lacks <= 0:
            return 0.0
        if lacks > self.saved[-1] * (1 + ROUNDING):
            return None
        return float(np.interp(float(lacks), self.saved, self.twice)) * (1 - ROUNDING)

    def _has_boundaries(self, T: int, count: int, number: int, spare: int, needed: Integers, total: int) -> bool:
        def least_total(needed: Integers) -> int:
            return self._least_total(T, count, number, spare, needed)

        return self.needs.total(T, needed, least_total, total) < FAR

    def _least_total(self, T: int, count: int, number: int, spare: int, needed: Integers) -> int:
        """Return the least ticks one way over all boundaries of ``number`` stages; ``FAR`` where none may do.

        The largest number that is asked for stands for all beyond.
        """
        least = np.full(self.size + 1, FAR, dtype=np.int64)
        least[0] = 0
        for index in range(number):
            if 0 < index < count:
                least[(count - index) * (self.C + 2 * np.minimum(least, FAR)) > spare] = FAR
            if index == count and number == 2 * count - 1:
                least = self._with_more(T, least, needed)
            left = number - index
            if left < count:
                rooms = np.maximum(T - self.C - 2 * np.minimum(least, FAR), 0)
                least[self.m * (self.C[-1] - self.C) > left * rooms] = FAR
            if left == 1:
                return int(least[2 * least + needed[:, -1] <= T].min(initial=FAR))
            least = self._next(T, least, needed)
            if least.min() >= FAR:
                return FAR
        return FAR

    def _next(self, T: int, least: Integers, needed: Integers) -> Integers:
        """Return the least ticks one way up to the end of one more stage."""
        rows = np.flatnonzero(least < FAR)
        so_far = least[rows, None]
        fits = 2 * so_far + needed[rows] <= T
        reached: Integers = np.where(fits, so_far, FAR).min(axis=0, initial=FAR)
        result: Integers = np.minimum(reached + self.send, FAR)
        return result

    def _with_more(self, T: int, least: Integers, needed: Integers) -> Integers:
        """Return the least ticks one way with any number of stages more."""
        least = least.copy()
        for start in np.flatnonzero(self.send >= 0):
            if least[start] < FAR:
                fits = 2 * least[start] + needed[start, start + 1 :] <= T
                reached = np.where(fits, least[start] + self.send[start + 1 :], FAR)
                np.minimum(least[start + 1 :], reached, out=least[start + 1 :])
        return least
