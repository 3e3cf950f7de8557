"""Proof that an allocation has no pattern at a period: by branch and bound over orders, in integers.

For two operations a and b of one resource, which take D_a and D_b, there is a whole number k of periods T with::

    k T + D_a  <=  b - a  <=  (k + 1) T - D_b           equally: from b to a there are -(k + 1) of them

for their beginnings a and b on one micro-batch. The path of a micro-batch says how far apart operations are at
the least, and at the most, too, since without loss nothing waits a whole period (``ilp.py``). That bounds every
k, each bound of a k is a distance again, and longest paths carry it on. So does the memory: when an operation e
of a device begins,

    k(F_j, e) - k(B_j, e)                               micro-batches of stage j are in flight there

Where some k has several values left, they are tried in turn, those with the fewest first. A pattern of a shorter
period can be slowed down, so a period is refuted with all below it. An allocation without a schedule is mostly
refuted without any trial, in a hundredth of the time of the integer program or less.

A refutation is exact; without one nothing is known, since trials are limited. Cost for S stages: O(S^2) memory
and, for each distance that changes, O(S^2) time; the number of trials is exponential in the worst case. Source:
the rows of the integer program of the MadPipe paper, section 4.3, with the search of a constraint solver.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import DeviceMemory, Road

Matrix = NDArray[np.int64]
"""Ticks or periods, indexed [from operation, to operation] by their positions on the path of a micro-batch."""
MOST_TRIALS = 3000
"""Most trials, worth about as much time as an integer program."""
MOST_STEPS = 20
"""Most steps of a bisection: to a millionth of where it begins."""
LARGEST_SUM = 2**62
NUMBERS_PER_LOOK, MOST_NUMBERS = 100_000, 30_000_000
"""Distances that are updated between two looks at the deadline, and that all open trials hold together."""


def refuted(road: Road, period: int, deadline: Deadline, most_trials: int = MOST_TRIALS) -> bool:
    """Return whether no pattern of an allocation has a period of ``period`` ticks or fewer.

    False: there is one, or ``most_trials`` or the deadline do not suffice to tell.
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
    """Return a lower bound on the period of every pattern, from ``least`` up to ``most`` ticks.

    It is found by bisection without trials: only what one look refutes.
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
        """Booleans, [operation, operation]: whether two operations exclude one another."""
        for users in road.users.values():
            self.shared[np.ix_(users, users)] = True
        np.fill_diagonal(self.shared, False)
        self.shared &= self.ticks[:, None] + self.ticks > 0  # two operations that take no time never overlap
        # Unlimited memory is not counted: its bytes might be more than an integer holds.
        self.devices = [
            _Device(road, device)
            for device in road.memory
            if device.room < 2 * size * sum(road.stash[stage] for stage in device.stages) < LARGEST_SUM
        ]

    def start(self) -> Matrix:
        """Return the least ticks from one operation's start to another's; negative where it may come before."""
        begins = np.concatenate([[0], np.cumsum(self.ticks)[:-1]])
        apart = begins[None, :] - begins[:, None]
        position = np.arange(len(begins))
        backwards = position[:, None] - position[None, :]
        found: Matrix = apart - np.maximum(backwards, 0) * self.period
        return found

    def periods(self, apart: Matrix) -> Matrix:
        """Return the least k of every two operations; the largest is -1 less the least the other way round."""
        least: Matrix = -(-(apart + self.ticks) // self.period) - 1
        np.fill_diagonal(least, 0)
        return least

    def narrowed(self, apart: Matrix) -> Matrix | None:
        """Return the distances with all that follows from them; None where they contradict one another.

        Raises:
            DeadlinePassed: the deadline passed before that was known.
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
        """Return the distances with an open k at its least, and with it above; empty where none is open."""
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
    """Memory of a device."""

    def __init__(self, road: Road, device: DeviceMemory) -> None:
        self.forward = np.array([road.position[f"F{stage}"] for stage in device.stages])
        self.backward = np.array([road.position[f"B{stage}"] for stage in device.stages])
        self.events = np.concatenate([self.forward, self.backward])
        self.stash = np.array([road.stash[stage] for stage in device.stages], dtype=np.int64)
        transient = np.array([road.transient[stage] for stage in device.stages], dtype=np.int64)
        self.room = device.room - np.concatenate([transient, transient])
        """Bytes for what is in flight at each event."""

    def tighten(self, least: Matrix) -> bool:
        """Raise the least k by the memory that there is; return False where not even those have room."""
        forward, backward, events = self.forward, self.backward, self.events
        to_event = least[forward[:, None], events]  # [stage, event], here and below
        from_event = least[events, backward[:, None]]
        # At any instant, as many are in flight as at the end of a stage's backward, or one more.
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
