"""The best contiguous allocation under memory: exact, for the period of 1F1B*.

Decision at a period T: with D(q, k) the least delay above the cut before layer k, over all ways to split
layers k..L into q stages that fit,

    D(0, L) = nothing        D(q, k) = min over l of  (D(q - 1, l) (+) U(k, l)) (+) C(k)

where a stage is allowed if U(k, l) <= T, C(k) <= T and its group fits into memory. ``(+)`` is monotone in the
delay and memory only grows with it, so the least delay is all that must be remembered: P L^2 steps.

The answer is found by bisection over T. Each cut found is snapped to its own least period, and a probe one tick
below the best period proves that nothing shorter exists. Source: MadPipe paper, section 4.1; the recurrence is
that of section 4.2.2 without the special processor, with delays as (group, fill) instead of a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.solvers import one_f_one_b, synchronous
from deepspeed_partition.planner.solvers.min_max import NOTHING_FITS, min_max_cuts, trace
from deepspeed_partition.planner.solvers.problem import Answer, Constraints, Cuts, Problem
from deepspeed_partition.planner.solvers.steps import best_contiguous_step

MOST_FAILURES = 4
"""Of a bisection in a row, before it asks whether there is anything better at all."""
Found = TypeVar("Found")
Start = TypeVar("Start")


@dataclass(frozen=True, slots=True)
class Contiguous:
    """One stage per device, in order.

    Without a step: the cut of the shortest period, exactly. With one (``num_micro_batches``): the cut and the
    order of the shortest step that a search finds, in DeepSpeed's own engine (``synchronous.py``) where a host
    asks, else in one that overlaps transfers (``steps.py``). That proves nothing, but is never slower there than
    the cut of the shortest period.
    """

    name: str = "contiguous"

    def solve(self, problem: Problem) -> Answer:
        found = best_cut(problem.times, problem.table, problem.constraints, problem.deadline)
        if found is None:
            return Answer(())
        cuts, period = found
        proved = None if problem.deadline.stopped else period
        if problem.num_micro_batches is None:
            return Answer((cuts,), proved)
        if problem.in_deepspeed:
            return Answer(tuple(synchronous.best_cuts(problem, cuts)), proved)
        return Answer((cuts,), proved, steps=best_contiguous_step(problem, cuts))

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        table = problem.table

        def need(from_end: int) -> NDArray[np.int64]:
            return table.fixed + problem.depth(from_end) * table.stash

        cuts = min_max_cuts(problem, need)
        return min(cuts, key=lambda found: found[1]) if cuts else None


def best_cut(
    times: TimedChain, table: StageTable, constraints: Constraints, deadline: Deadline | None = None
) -> tuple[Cuts, int] | None:
    """The boundaries of the shortest period that fits, and that period in ticks; None where none fits.

    Times and costs of all layers in O(P L^2) for each of about a dozen decisions, for P stages and L layers. It
    needs no time limit, but where somebody stops ``deadline`` the best cut so far is the answer.
    """
    search = _Search(times, table, constraints)
    relaxed = int(times.compute[-1] + times.round_trip.sum())  # at this period every stage has one in flight
    cuts = search.decide(relaxed)
    if cuts is None:
        return None
    return narrow(
        search.decide,
        search.snap,
        cuts,
        search.snap(cuts, relaxed),
        lower_bound_ticks(times, constraints.max_stages),
        deadline,
    )


def narrow(
    decide: Callable[[int], Found | None],
    snap: Callable[[Found, int], int],
    start: Start,
    period: int,
    bound: int,
    deadline: Deadline | None = None,
) -> tuple[Found | Start, int]:
    """The best answer and its period, exactly, from one at ``period`` and a lower bound.

    Where somebody stops ``deadline`` it is the best so far.

    Args:
        decide: some answer that fits at a period, or None where there is none.
        snap: the least period of an answer that was found at a period.
        start: the answer at ``period``; None where only shorter ones are of interest.
    """
    found: Found | Start = start
    failures, anything, answered = 0, False, False
    while bound < period and not (deadline is not None and deadline.stopped):
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


def cut_at(problem: Problem, period: int) -> Cuts | None:
    """Some cut that fits at ``period``, or None where there is none."""
    return _Search(problem.times, problem.table, problem.constraints).decide(period)


def lower_bound_ticks(times: TimedChain, max_stages: int) -> int:
    """No allocation is faster than the mean load of a stage, or than the longest layer."""
    longest = int(np.diff(times.compute).max())
    return max(-(-int(times.compute[-1]) // max_stages), longest)


class _Search:
    def __init__(self, times: TimedChain, table: StageTable, constraints: Constraints) -> None:
        self.times = times
        self.table = table
        self.constraints = constraints
        self.loads = times.compute[None, :] - times.compute[:, None]
        self.room = np.where(constraints.allowed(table), table.max_in_flight, 0)

    def snap(self, cuts: Cuts, found_at: int) -> int:
        """The least period of a cut that fits at ``found_at``."""
        loads = one_f_one_b.pseudo_stage_loads(self.times, cuts)
        room = [int(self.room[start, stop]) for start, stop in pairwise(cuts)]
        period = one_f_one_b.least_period(loads, room)
        assert period is not None and period <= found_at, "a cut that a decision found does not fit"
        return period

    def decide(self, period: int) -> Cuts | None:
        """Some allowed cut that fits at ``period``, or None where there is none."""
        num_layers = self.times.chain.num_layers
        counts = self.constraints.counts(num_layers)
        base = period + 1  # a delay as one integer, group * base + fill, so that the least is found by min
        delay = np.full(num_layers + 1, NOTHING_FITS, dtype=np.int64)
        delay[num_layers] = base
        choices: list[NDArray[np.intp]] = []
        for count in range(1, max(counts, default=0) + 1):
            group, fill = np.divmod(delay, base)
            total = fill[None, :] + self.loads
            opens = total > period
            group_here = group[None, :] + opens
            fits = (self.loads <= period) & (group_here <= self.room) & (delay < NOTHING_FITS)[None, :]
            key = np.where(fits, group_here * base + np.where(opens, self.loads, total), NOTHING_FITS)
            choices.append(key.argmin(axis=1))
            delay = self._above_cuts(key.min(axis=1), period)
            if count in counts and delay[0] < NOTHING_FITS:
                return trace(choices, num_layers)
        return None

    def _above_cuts(self, delay: NDArray[np.int64], period: int) -> NDArray[np.int64]:
        """Add the transfer over the cut before each layer."""
        base = period + 1
        transfer = self.times.round_trip[: len(delay)]
        group, fill = np.divmod(delay, base)
        above = np.where(fill + transfer > period, (group + 1) * base + transfer, delay + transfer)
        return np.where((delay < NOTHING_FITS) & (transfer <= period), above, NOTHING_FITS)
