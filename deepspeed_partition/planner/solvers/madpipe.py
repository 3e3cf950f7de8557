"""MadPipe: where, when and in how much memory, decided together over allocations that need not be contiguous.

The candidates come in the order of what they may promise:

1. the best contiguous cut, exactly (``contiguous.py``);
2. the best allocation with one special device by the "safe" and by the "peak" estimate (``special.py``), each
   with the schedule that an integer linear program finds for it (``ilp.py``);
3. every other allocation with one special device whose "peak" bound is below the best period so far, in the order
   of that bound, until none is left, which proves the answer, or the time is up;
4. allocations in which several devices have several stages: all of them where they are few, else those around the
   best one.

Source: MadPipe paper, section 4, with exact searches in place of its grid, and with step 3, without which its
answer may be far from the best of its own class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from deepspeed_partition.planner.memory import StageTable, buffer_slots
from deepspeed_partition.planner.solvers import ilp
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous import Contiguous, best_cut, narrow
from deepspeed_partition.planner.solvers.problem import Answer, Cuts, Problem
from deepspeed_partition.planner.solvers.road import Estimate, Pattern, Placement, Road
from deepspeed_partition.planner.solvers.several import all_placements, neighbours
from deepspeed_partition.planner.solvers.special import DeadlinePassed, SpecialSearch, best_special

MOST_LABELS = 300_000
"""Partial allocations with one special device that an enumeration holds before it gives up."""
MOST_PLACEMENTS = 30_000
"""Partial allocations with several of them, which are looked at one by one."""
ESTIMATES: tuple[Estimate, ...] = ("safe", "peak")
LEVELS = (64, 16, 4, 1)
"""An enumeration first looks at this part of what lies between its bound and the best period."""


@dataclass(frozen=True, slots=True)
class MadPipe:
    """The shortest period over all allocations, proved best in its class where time allows.

    A host that runs one stage per rank (``num_stages``, ``every_stage_trains``) or drains the pipeline at every
    step (``num_micro_batches``) gets what ``Contiguous`` answers, under this name.
    """

    name: str = "madpipe"

    def solve(self, problem: Problem) -> Answer:
        if _only_contiguous(problem):
            return Contiguous(self.name).solve(problem)
        return _Search(problem).run()

    def smallest_memory(self, problem: Problem) -> tuple[Cuts | Placement, int] | None:
        found = Contiguous(self.name).smallest_memory(problem)
        if found is None or _only_contiguous(problem) or problem.platform.num_devices == 1:
            return found
        return _smallest_memory(problem, *found)


def _only_contiguous(problem: Problem) -> bool:
    constraints = problem.constraints
    return constraints.exactly or constraints.every_stage_trains or problem.num_micro_batches is not None


class _Search:
    """What is found and what is proved so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        found = best_cut(problem.times, problem.table, problem.constraints, problem.deadline)
        self.cuts = None if found is None else found[0]
        self.best = None if found is None else found[1]
        """The shortest period so far, in ticks."""
        self.patterns: list[Pattern] = []
        self.bounds: dict[Placement, int | None] = {}
        """Of each allocation that was tried: no pattern of it has a shorter period; None where none is better."""
        self.bound = math.ceil(lower_bound(problem))

    def run(self) -> Answer:
        proved_class = None
        if self._one_special():
            proved_class = "one special device"
            if self._several_special():
                proved_class = "any allocation"
        counted = self.problem.platform.comm_buffers >= buffer_slots(self.problem.platform)
        if proved_class is None and not self.patterns and not self.problem.deadline.stopped:
            proved_class = "contiguous"
        return Answer(
            cuts=() if self.cuts is None else (self.cuts,),
            patterns=tuple(reversed(self.patterns)),
            best_period=self.best if proved_class and counted else None,
            proved_class=proved_class or "",
        )

    def _one_special(self) -> bool:
        """The best allocation with one special device; True where it is proved."""
        problem = self.problem
        if self._done(self.bound) or problem.platform.num_devices == 1:
            return True
        for estimate in ESTIMATES:
            found = best_special(problem, estimate, self.best)
            if found.placement is not None:
                self._try(found.placement)
        if found.bound is None:
            return True
        search = SpecialSearch(problem, "peak")
        return self._enumerate(lambda period: search.all(period, MOST_LABELS), found.bound)

    def _several_special(self) -> bool:
        """Better allocations in which several devices have several stages; True where there are no more."""
        if self._done(self.bound) or self.problem.platform.num_devices == 1:
            return True
        if self._enumerate(lambda period: all_placements(self.problem, period, MOST_PLACEMENTS), self.bound):
            return True
        self._descend()
        return self._done(self.bound)

    def _enumerate(self, placements: Callable[[int], list[Placement] | None], bound: int) -> bool:
        """Try the allocations whose "peak" bound is below the best period, lowest first; True where none is left.

        Args:
            placements: all with a bound up to a period; None where they are too many.
            bound: of all of them.
        """
        for level in LEVELS:
            best = self.problem.longest_period + 1 if self.best is None else self.best
            if best <= bound:
                break
            found = placements(bound + (best - 1 - bound) // level)
            if found is None or not self._try_all(found):
                return False
        # A schedule that was not settled in time does not matter any more where a better one was found elsewhere.
        return all(least is None or self._done(least) for least in self.bounds.values())

    def _done(self, bound: int) -> bool:
        """Whether the best period is as short as a bound."""
        return self.best is not None and self.best <= bound

    def _try_all(self, placements: Iterable[Placement]) -> bool:
        """Schedule allocations, the most promising first; False where the time is up."""
        promises = []
        for placement in placements:
            if placement not in self.bounds:
                least = Road(self.problem, placement).shortest_that_may_fit()
                if least is not None and not self._done(least):
                    promises.append((least, placement.cuts, placement.devices, placement))
            if self.problem.deadline.passed():
                return False
        for least, _, _, placement in sorted(promises):
            if self.problem.deadline.passed():
                return False
            if not self._done(least):
                self._try(placement)
        return True

    def _try(self, placement: Placement) -> None:
        """Schedule an allocation."""
        if placement.is_contiguous or placement in self.bounds:
            return
        scheduled = ilp.schedule(Road(self.problem, placement), self.best, self.problem.deadline)
        self.bounds[placement] = scheduled.bound
        if scheduled.pattern is not None:
            self.patterns.append(scheduled.pattern)
            self.best = scheduled.pattern.period

    def _descend(self) -> None:
        """From the best allocation to a better one beside it, until there is none or the time is up."""
        while True:
            before = self.best
            if self.patterns:
                centre = self.patterns[-1].placement
            elif self.cuts is not None:
                centre = Placement.contiguous(self.cuts)
            else:
                return
            if not self._try_all(neighbours(self.problem, centre)) or self.best == before:
                return


def _smallest_memory(problem: Problem, cuts: Cuts, enough: int) -> tuple[Cuts | Placement, int]:
    """The allocation with one special device that needs least memory, one micro-batch in flight, and how much."""

    def with_memory(memory_bytes: int) -> Problem:
        platform = replace(problem.platform, memory_bytes=memory_bytes)
        return replace(problem, platform=platform, table=StageTable(problem.chain, platform))

    def decide(memory_bytes: int) -> Placement | None:
        return SpecialSearch(with_memory(memory_bytes), "peak").decide(problem.longest_period)

    def need(placement: Placement, _: int) -> int:
        return max(device.bytes_for_one for device in Road(problem, placement).memory)

    try:
        placement, smallest = narrow(decide, need, Placement.contiguous(cuts), enough, 1)
    except DeadlinePassed:
        return cuts, enough
    return (cuts if placement.is_contiguous else placement), smallest
