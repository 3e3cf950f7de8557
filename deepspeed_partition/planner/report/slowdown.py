"""Whether a rank has become slow, and whether steps have left their plan, told from noise.

A cumulative sum of how much longer than usual each step took, on a logarithmic scale (CUSUM: E. S. Page,
*Continuous Inspection Schemes*, Biometrika 1954), each step's part bounded, so that a few very long steps do not
sum up to an alarm. Usual is the median of earlier steps, and noise what two thirds of them differ from it by. What
the sum suspects is said where the last steps confirm it: their median, and nearly all of them, for what makes some
steps long leaves others as short as before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

NUM_LEFT_OUT = 2
"""The first steps of a plan, in which memory is allocated and connections are made."""
FEWEST_EARLIER, MOST_EARLIER = 25, 100
"""Steps that say what is usual: at the least, and at the most."""
WINDOW = 15
"""Steps that confirm that something is slow."""
NUM_SHORTEST, LONG_SHARE = 3, 0.75
"""The place, among the shortest steps of a window, of the one that must be longer than so many of the earlier
steps. By chance 13 of 15 steps are that once in a million windows, whatever the noise is like."""
SLOW_FACTOR = 1.25
"""How much longer than usual a median is that is called slow; it is longer than planned, too."""
LEAST_NOISE = 0.1
"""The least deviation that is taken for noise: a tenth of a step."""
NUM_DEVIATIONS = 12.0
"""Deviations that the sum of a slow rank is above."""
MOST_OF_A_STEP = 2.0
"""Deviations that one step adds at the most."""
LEFT_FACTOR, LEFT_STEPS = 1.5, 50
"""How much longer than planned a step is that has left its plan, and in how many steps the median says so."""


class Slow(NamedTuple):
    """Finding that the last steps of a rank were slow."""

    factor: float
    """Their median, divided by that of earlier steps."""
    seconds: float
    """Their median."""
    planned_seconds: float


class Slowdown:
    """Looks for the step from which on a rank is slow, and goes on looking for the next one when it was said.

    Args:
        planned_seconds: that its layers take in a step, by the plan.
    """

    def __init__(self, planned_seconds: float) -> None:
        self._planned_seconds = planned_seconds
        self._num_seen = 0
        self._earlier: list[float] = []
        self._usual = self._long = self._noise = 0.0
        self._sum = 0.0
        self._last: deque[float] = deque(maxlen=WINDOW)
        self.is_slow = False
        """Whether it was found to be slow, and has not been as fast as before since."""

    @property
    def median_seconds(self) -> float | None:
        """Seconds of the last steps, as their median; None before there are enough."""
        return statistics.median(self._last) if len(self._last) == WINDOW else None

    def see(self, seconds: float) -> Slow | None:
        """Return that the rank is slow, in the step in which that is found.

        Args:
            seconds: that its layers took in a step.
        """
        self._num_seen += 1
        if self._num_seen <= NUM_LEFT_OUT or not (seconds > 0 and math.isfinite(seconds)):
            return None
        before = self._last[0] if len(self._last) == WINDOW else None
        self._last.append(seconds)
        is_learning = len(self._earlier) < MOST_EARLIER and not self.is_slow
        # What is suspected to be slow is not usual; all else is, or usual would be what is fast.
        if before is not None and is_learning and self._sum < NUM_DEVIATIONS / 4:
            self._learn(before)
        if len(self._earlier) < FEWEST_EARLIER:
            return None
        deviations = math.log(seconds / self._usual) / self._noise - self._allowed
        self._sum = max(0.0, self._sum + max(-MOST_OF_A_STEP, min(MOST_OF_A_STEP, deviations)))
        median = self.median_seconds
        if median is None:
            return None
        if self.is_slow:
            self.is_slow = median > math.sqrt(SLOW_FACTOR) * self._usual
            self._sum = 0.0
            return None
        if self._sum <= NUM_DEVIATIONS or median <= max(SLOW_FACTOR * self._usual, self._planned_seconds):
            return None
        if sorted(self._last)[NUM_SHORTEST - 1] <= max(self._long, math.sqrt(SLOW_FACTOR) * self._usual):
            return None
        self.is_slow, self._sum = True, 0.0
        return Slow(median / self._usual, median, self._planned_seconds)

    @property
    def _allowed(self) -> float:
        """Deviations by which a step may be longer than usual without a suspicion: half of those of a slow one."""
        return max(math.log(SLOW_FACTOR) / self._noise, 1.0)

    def _learn(self, seconds: float) -> None:
        self._earlier.append(seconds)
        number = len(self._earlier)
        if number < FEWEST_EARLIER:
            return
        in_order = sorted(self._earlier)
        self._usual = statistics.median(in_order)
        self._long = in_order[math.ceil(number * LONG_SHARE) - 1]
        longer, shorter = self._long / self._usual, self._usual / in_order[number // 4]
        # Few steps may show less noise than there is.
        noise = math.log(max(longer, shorter)) / 0.674 * (1 + 1 / math.sqrt(number))
        self._noise = max(noise, LEAST_NOISE)


class LeftPlan:
    """Looks at whether steps take much longer than planned, for long; says so once.

    Args:
        planned_seconds: of a step.
    """

    def __init__(self, planned_seconds: float) -> None:
        self._planned_seconds = planned_seconds
        self._num_seen = 0
        self._last: deque[float] = deque(maxlen=LEFT_STEPS)
        self._was_said = False

    def see(self, seconds: float) -> float | None:
        """Return the median of the last steps, in seconds, where it is found to have left the plan.

        Args:
            seconds: of a step.
        """
        self._num_seen += 1
        if self._num_seen > NUM_LEFT_OUT:
            self._last.append(seconds)
        # A few times within the window are enough: this is no alarm that hurries.
        if self._was_said or len(self._last) < LEFT_STEPS or self._num_seen % (LEFT_STEPS // 5):
            return None
        median = statistics.median(self._last)
        if median <= LEFT_FACTOR * self._planned_seconds:
            return None
        self._was_said = True
        return median
