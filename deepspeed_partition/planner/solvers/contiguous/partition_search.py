"""The search for the contiguous partition of the shortest period: its decision at one period, and the bisection.

``optimal.py`` says what the recurrence is, and why it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, trace
from deepspeed_partition.planner.solvers.interface import Constraints, Cuts
from deepspeed_partition.planner.solvers.pattern import one_f_one_b

MOST_FAILURES = 4
"""Failed probes of a bisection in a row, after which it asks whether there is anything better at all."""
PARTITION_SECONDS = 0.5
"""Seconds for the best contiguous partition where the time is up: enough for 500 layers on 32 devices."""
Option = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ticks of stages, and the most micro-batches in flight for which they have room."""
Found = TypeVar("Found")
Start = TypeVar("Start")


@dataclass(frozen=True, slots=True)
class BestPartition:
    """Contiguous partition of the shortest period that was found."""

    cuts: Cuts
    period: int
    """Period of the partition, in ticks."""
    proved: bool
    """True: no contiguous partition has a shorter period. False: the deadline passed before that was known."""


def best_partition(
    times: TimedChain, table: StageTable, constraints: Constraints, deadline: Deadline | None = None
) -> BestPartition | None:
    """Find the boundaries of the shortest period that fits; None where no contiguous partition fits.

    Each of about a dozen decisions costs O(P L^2) for P stages and L layers, and less where a period holds few
    layers. The search gets at least ``PARTITION_SECONDS``, whatever the deadline says. Where those and the
    deadline have passed, or it is stopped, the best partition so far is the answer; some partition that fits is
    found in any case.
    """
    search = PartitionSearch(times, table, constraints, (deadline or Deadline()).at_least(PARTITION_SECONDS))
    cuts = search.decide_relaxed()
    if cuts is None:
        return None
    first, least = search.snap(cuts, search.relaxed), lower_bound_ticks(times, constraints.max_stages)
    try:
        best, period = narrow(search.decide, search.snap, cuts, first, least)
    except DeadlinePassed:
        return search.best
    return BestPartition(best or cuts, period, True)


def narrow(
    decide: Callable[[int], Found | None],
    snap: Callable[[Found, int], int],
    start: Start,
    period: int,
    bound: int,
) -> tuple[Found | Start, int]:
    """Narrow an answer at ``period`` and a lower bound down to the best answer and its period, exactly.

    Args:
        decide: returns some answer that fits at a period, or None where there is none. It may raise where a
            deadline passes; the exception is handed on.
        snap: returns the least period of an answer that was found at a period.
        start: the answer at ``period``; None where only shorter ones are of interest.
        period: the period of ``start``, in ticks.
        bound: a lower bound on the period of every answer, in ticks.
    """
    found: Found | Start = start
    failures, anything, answered = 0, False, False
    while bound < period:
        # Halve until there is an answer, which is often the best one: then ask for anything better at all. Where
        # there is, halve again.
        probe = period - 1 if anything else (bound + period) // 2
        better = decide(probe)
        if better is None:
            bound = probe + 1
            failures += 1
            anything, answered = failures % MOST_FAILURES == 0, False
        else:
            found, period = better, snap(better, probe)
            failures, anything, answered = 0, not answered, not answered
    return found, period


def lower_bound_ticks(times: TimedChain, max_stages: int) -> int:
    """Return the larger of a stage's mean load and the longest layer, in ticks: no allocation is faster."""
    longest = int(np.diff(times.compute).max())
    return max(-(-int(times.compute[-1]) // max_stages), longest)


def with_one_stage_more(
    delay: NDArray[np.int64], stops: NDArray[np.intp], options: list[Option], period: int
) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Put one more stage in front: return where it best ends, for each layer it may begin at, and the least delay.

    Args:
        delay: of the stages behind each layer, as one integer: group * (period + 1) + fill, with one entry more
            than there are layers; ``NOTHING_FITS`` where there is no way.
        stops, options: ends of stages and what they may take (``PartitionSearch.short_stages``).
    """
    base, below = period + 1, delay[stops]
    group, fill = np.divmod(delay, base)
    key = np.full(stops.shape, NOTHING_FITS, dtype=np.int64)
    for loads, room in options:
        total = fill[stops] + loads
        opens = total > period
        group_here = group[stops] + opens
        fits = (group_here <= room) & (below < NOTHING_FITS)
        key = np.where(fits, np.minimum(key, group_here * base + np.where(opens, loads, total)), key)
    place = key.argmin(axis=1)[:, None]
    choice = np.append(np.take_along_axis(stops, place, axis=1)[:, 0], len(delay) - 1)
    return choice, np.append(np.take_along_axis(key, place, axis=1)[:, 0], NOTHING_FITS)


class PartitionSearch:
    """Decisions whether some contiguous partition fits at a period, and the best one found by them."""

    def __init__(self, times: TimedChain, table: StageTable, constraints: Constraints, deadline: Deadline) -> None:
        self.times = times
        self.table = table
        self.constraints = constraints
        self.deadline = deadline
        self.room = np.where(constraints.allowed(table), table.max_in_flight, 0)
        self.relaxed = int(times.compute[-1] + times.round_trip.sum())
        """Period, in ticks, at which every stage has one micro-batch in flight."""
        self.best: BestPartition | None = None

    def snap(self, cuts: Cuts, found_at: int) -> int:
        """Return the least period of a partition that fits at ``found_at``, and remember the best."""
        loads = one_f_one_b.pseudo_stage_loads(self.times, cuts)
        room = [int(self.room[start, stop]) for start, stop in pairwise(cuts)]
        period = one_f_one_b.least_period(loads, room)
        assert period is not None and period <= found_at, "a partition that a decision found does not fit"
        if self.best is None or period < self.best.period:
            self.best = BestPartition(cuts, period, False)
        return period

    def decide_relaxed(self) -> Cuts | None:
        """Return some allowed partition that has room for one micro-batch at a time, or None where there is none.

        Without it there is no plan, so it is found even where the deadline passes, by a shorter method.
        """
        try:
            return self.decide(self.relaxed)
        except DeadlinePassed:
            return self._any_partition()

    def _any_partition(self) -> Cuts | None:
        """Return some partition of which every stage fits alone; this takes a moment, and no deadline ends it."""
        fits = self.room >= 1
        num_layers = self.times.chain.num_layers
        counts = self.constraints.counts(num_layers)
        reached: NDArray[np.bool_] = np.arange(num_layers + 1) == num_layers
        choices: list[NDArray[np.intp]] = []
        for count in range(1, max(counts, default=0) + 1):
            onward = fits & reached
            choices.append(onward.argmax(axis=1))
            reached = np.asarray(onward.any(axis=1))
            if count in counts and reached[0]:
                return trace(choices, num_layers)
        return None

    def decide(self, period: int) -> Cuts | None:
        """Return some allowed partition that fits at ``period``, or None where there is none.

        Raises:
            DeadlinePassed: the deadline passed before that was known.
        """
        num_layers = self.times.chain.num_layers
        counts = self.constraints.counts(num_layers)
        base = period + 1  # a delay as one integer, group * base + fill, so that the least is found by min
        delay = np.full(num_layers + 1, NOTHING_FITS, dtype=np.int64)
        delay[num_layers] = base
        self.deadline.check()
        stops, options = self.short_stages(period)
        choices: list[NDArray[np.intp]] = []
        for count in range(1, max(counts, default=0) + 1):
            self.deadline.check()
            choice, best = with_one_stage_more(delay, stops, options, period)
            choices.append(choice)
            delay = self._above_boundaries(best, period)
            if count in counts and delay[0] < NOTHING_FITS:
                return trace(choices, num_layers)
        return None

    def short_stages(self, period: int) -> tuple[NDArray[np.intp], list[Option]]:
        """Return the ends of the stages that take a period at most, and what they may take.

        Entry ``[k, i]`` is the i-th stage that begins at layer k; beyond the last one the room is 0.
        """
        compute = self.times.compute
        num_layers = len(compute) - 1
        begins = np.arange(num_layers)[:, None]
        last = np.searchsorted(compute, compute[:-1] + period, "right") - 1
        width = max(1, int((last - begins[:, 0]).max()))
        stops = begins + np.arange(1, width + 1)
        within = stops <= last[:, None]
        stops = np.minimum(stops, num_layers)
        return stops, self._options(period, begins, stops, within)

    def _options(
        self, period: int, begins: NDArray[np.intp], stops: NDArray[np.intp], within: NDArray[np.bool_]
    ) -> list[Option]:
        """Return the loads of stages, and their most micro-batches in flight, for each choice that they have."""
        compute = self.times.compute
        return [(compute[stops] - compute[begins], np.where(within, self.room[begins, stops], 0))]

    def _above_boundaries(self, delay: NDArray[np.int64], period: int) -> NDArray[np.int64]:
        """Add the transfer over the boundary before each layer to the delays."""
        base = period + 1
        transfer = self.times.round_trip[: len(delay)]
        group, fill = np.divmod(delay, base)
        above = np.where(fill + transfer > period, (group + 1) * base + transfer, delay + transfer)
        return np.where((delay < NOTHING_FITS) & (transfer <= period), above, NOTHING_FITS)
