"""Whether an allocation has no pattern at a period: by branching over orders, in integers.

Of two operations a and b of one resource, that take D_a and D_b, some whole number k of periods T lies between::

    k T + D_a  <=  b - a  <=  (k + 1) T - D_b           equally: from b to a there are -(k + 1) of them

for their beginnings a and b on one micro-batch. The road says how far apart operations are at the least, and at
the most, too, since without loss nothing waits a whole period (``ilp.py``). That bounds every k, each bound of a k
is a distance again, and longest paths carry it on. So does the memory: when an operation e of a device begins,

    k(F_j, e) - k(B_j, e)                               micro-batches of stage j are in flight there

Where some k has several values left they are tried in turn, those with the fewest first. A pattern of a shorter
period can be slowed down, so a period is refuted with all below it. What has no schedule is mostly refuted without
any trial, in a hundredth of the time of the integer program or less.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.road import DeviceMemory, Road

Matrix = NDArray[np.int64]
"""[from operation, to operation], by their positions on the road."""
MOST_TRIALS = 3000
"""Worth about as much as an integer program."""
MOST_STEPS = 20
"""Of a bisection: to a millionth of where it begins."""
LARGEST_SUM = 2**62
NUMBERS_PER_LOOK, MOST_NUMBERS = 100_000, 30_000_000
"""Distances that are updated between two looks at the deadline, and that all open trials hold together."""


def refuted(road: Road, period: int, deadline: Deadline, most_trials: int = MOST_TRIALS) -> bool:
    """Whether no pattern of an allocation has a period of ``period`` ticks or fewer.

    False where there is one, or where ``most_trials`` or the deadline do not suffice to tell.
    """
    if period < road.busiest:
        return True
    search = _Refutation(road, period, deadline)
    try:
        open_ = [search.start()]
        for _ in range(most_trials):
            if not open_:
                return True
            apart = search.narrowed(open_.pop())
            if apart is not None:
                parts = search.split(apart)
                if not parts:
                    return False  # every order is decided
                open_ += parts
                if len(open_) * apart.size > MOST_NUMBERS:
                    return False
    except DeadlinePassed:
        return False
    return not open_


def least_unrefuted(road: Road, least: int, most: int, deadline: Deadline, most_steps: int = MOST_STEPS) -> int:
    """A lower bound on the period of every pattern, from ``least`` up to ``most``, which is not refuted.

    By bisection without trials: all that one look refutes.
    """
    if not refuted(road, least, deadline, most_trials=1):
        return least
    for _ in range(most_steps):
        middle = (least + most) // 2
        if refuted(road, middle, deadline, most_trials=1):
            least = middle + 1
        else:
            most = middle
    return least


class _Refutation:
    def __init__(self, road: Road, period: int, deadline: Deadline) -> None:
        self.period = period
        self.deadline = deadline
        self.ticks = np.array([operation.ticks for operation in road.operations], dtype=np.int64)
        size = len(self.ticks)
        self.updates_per_look = 1 + NUMBERS_PER_LOOK // size**2
        self.shared = np.zeros((size, size), dtype=bool)
        """Whether two operations exclude one another."""
        for users in road.users.values():
            self.shared[np.ix_(users, users)] = True
        np.fill_diagonal(self.shared, False)
        self.shared &= self.ticks[:, None] + self.ticks > 0  # two that take no time never meet
        # Where memory is no limit at all, its bytes are not counted: they might be more than an integer holds.
        self.devices = [
            _Device(road, device)
            for device in road.memory
            if device.room < 2 * size * sum(road.stash[stage] for stage in device.stages) < LARGEST_SUM
        ]

    def start(self) -> Matrix:
        """How long after the first the second begins at the least: negative where it may come before it."""
        begins = np.concatenate([[0], np.cumsum(self.ticks)[:-1]])
        apart = begins[None, :] - begins[:, None]
        position = np.arange(len(begins))
        backwards = position[:, None] - position[None, :]
        found: Matrix = apart - np.maximum(backwards, 0) * self.period
        return found

    def periods(self, apart: Matrix) -> Matrix:
        """The least k of every two operations; the largest is -1 less the least the other way round."""
        least: Matrix = -(-(apart + self.ticks) // self.period) - 1
        np.fill_diagonal(least, 0)
        return least

    def narrowed(self, apart: Matrix) -> Matrix | None:
        """The distances with all that follows from them; None where they contradict one another.

        Raises:
            DeadlinePassed: before that is known.
        """
        while True:
            self.deadline.check()
            least = self.periods(apart)
            for device in self.devices:
                if not device.tighten(least):
                    return None
            wanted = least * self.period + self.ticks[:, None]
            news = np.argwhere(self.shared & (wanted > apart)).tolist()
            if not news:
                return apart
            for index, (one, other) in enumerate(news):
                if index % self.updates_per_look == 0:
                    self.deadline.check()
                ticks = wanted[one, other]
                if ticks + apart[other, one] > 0:
                    return None
                if ticks > apart[one, other]:
                    apart = np.maximum(apart, apart[:, one, None] + (ticks + apart[other]))

    def split(self, apart: Matrix) -> list[Matrix]:
        """The distances with the first k that is open at its least, or above it; empty where none is open."""
        least = self.periods(apart)
        num_open = np.where(self.shared, -1 - least.T - least, 0)
        one, other = divmod(int(np.argmin(np.where(num_open > 0, num_open, LARGEST_SUM))), len(apart))
        if num_open[one, other] <= 0:
            return []
        k = int(least[one, other])
        above, at = apart.copy(), apart.copy()
        self._join(above, one, other, (k + 1) * self.period + int(self.ticks[one]))
        self._join(at, other, one, int(self.ticks[other]) - (k + 1) * self.period)
        return [above, at]

    def _join(self, apart: Matrix, one: int, other: int, ticks: int) -> None:
        np.maximum(apart, apart[:, one, None] + (ticks + apart[other]), out=apart)


class _Device:
    """The memory of a device."""

    def __init__(self, road: Road, device: DeviceMemory) -> None:
        self.forward = np.array([road.position[f"F{stage}"] for stage in device.stages])
        self.backward = np.array([road.position[f"B{stage}"] for stage in device.stages])
        self.events = np.concatenate([self.forward, self.backward])
        self.stash = np.array([road.stash[stage] for stage in device.stages], dtype=np.int64)
        transient = np.array([road.transient[stage] for stage in device.stages], dtype=np.int64)
        self.room = device.room - np.concatenate([transient, transient])
        """For what is in flight at each event."""

    def tighten(self, least: Matrix) -> bool:
        """Raise the least k by what there is room for; False where there is not even room for those."""
        forward, backward, events = self.forward, self.backward, self.events
        to_event = least[forward[:, None], events]  # [stage, event], here and below
        from_event = least[events, backward[:, None]]
        # At any instant as many are in flight as at the end of a stage's backward, or one more.
        count = np.maximum(to_event + 1 + from_event, least[forward, backward][:, None])
        free = self.room - self.stash @ count
        if (free < 0).any():
            return False
        most = count + np.where(self.stash[:, None] > 0, free // np.maximum(self.stash, 1)[:, None], LARGEST_SUM)
        reverse = events, forward[:, None]
        least[reverse] = np.maximum(least[reverse], from_event - most)
        reverse = backward[:, None], events
        least[reverse] = np.maximum(least[reverse], to_event - most)
        least[backward, forward] = np.maximum(least[backward, forward], -1 - most.min(axis=1))
        return True
