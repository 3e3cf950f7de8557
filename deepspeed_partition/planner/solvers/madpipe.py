"""MadPipe: where, when and in how much memory, decided together over allocations that need not be contiguous.

The candidates come in the order of what they may promise:

1. the best contiguous cut, exactly (``contiguous.py``);
2. the best allocation with one special device by the "safe" and by the "pair" estimate (``special.py``), by this
   one also with two special stages alone, of which it is mostly right, each with the schedule that an integer
   linear program finds for it (``ilp.py``);
3. every other allocation with one special device whose "pair" bound is below the best period so far, in the order
   of what ``refutation.py`` leaves of it, until none is left, which proves the answer, or the time is up;
4. allocations in which several devices have several stages: all of them where they are few, else those around the
   best one.

Source: MadPipe paper, section 4, with exact searches in place of its grid, and with step 3, without which its
answer may be far from the best of its own class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.memory import buffer_slots
from deepspeed_partition.planner.solvers import ilp
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous import Contiguous, best_cut, narrow
from deepspeed_partition.planner.solvers.problem import Answer, Cuts, Problem
from deepspeed_partition.planner.solvers.refutation import least_unrefuted, refuted
from deepspeed_partition.planner.solvers.road import Estimate, Pattern, Placement, Road, one_by_one
from deepspeed_partition.planner.solvers.several import SeveralSearch, neighbours
from deepspeed_partition.planner.solvers.special import SpecialSearch, best_special
from deepspeed_partition.planner.solvers.steps import best_step
from deepspeed_partition.planner.units import format_seconds

MOST_LABELS = 1_000_000
"""Partial allocations with one special device that an enumeration holds before it gives up."""
FEW_PLACEMENTS, MOST_PLACEMENTS = 300, 20_000
"""The same with several of them, at one boundary: so few that all are tried, and as many as may be enumerated."""
SPECIAL_SHARE = 0.5
"""Of the time that is left, for the allocation that each estimate calls best; the rest is for its schedule."""
SEVERAL_SHARE, SCHEDULE_SHARE = 0.25, 0.06
"""Of the time that is left, for allocations in which several devices have several stages, and for each of them."""
PROBES, BEAM_WIDTH, MOST_TRIED = 8, 1000, 8
"""Of that search where the allocations are too many: periods, labels per boundary, schedules per period."""
PERIODIC_SHARE = 0.2
"""Of the time for a step, for the plan of the shortest period, from which its search begins."""
PROMISE_STEPS = 8
"""Of the bisection that tells which of many allocations is tried first; its schedule begins with the rest."""
LAST_SECONDS = 0.5
"""For what would do, where nothing was found: so much for one special device where the time is up, and so much at
the most for several of them."""
ESTIMATES: tuple[tuple[Estimate, int | None], ...] = (("safe", None), ("pair", 2), ("pair", None))
"""And the most stages of the special device. The last one bounds all of them."""
LEVELS = (64, 16, 4, 2, 1)
"""An enumeration first looks at this part of what lies between its bound and the best period."""


@dataclass(frozen=True, slots=True)
class MadPipe:
    """The shortest period over all allocations, proved best in its class where time allows.

    A host whose engine runs one stage per rank (``num_stages``, ``every_stage_trains``) gets what ``Contiguous``
    answers, under this name. For a step (``num_micro_batches``) the best of these plans is where the search
    begins.
    """

    name: str = "madpipe"
    start: tuple[Allocation, ...] = ()
    """Of plans for less memory, bandwidth or devices, or for other times of the same layers: tried first, so that
    the answer is not worse where those still fit."""

    def solve(self, problem: Problem) -> Answer:
        if _only_contiguous(problem):
            return Contiguous(self.name).solve(problem)
        if problem.num_micro_batches is None:
            return self._periodic(problem)
        periodic = replace(problem, num_micro_batches=None, deadline=problem.deadline.part(PERIODIC_SHARE))
        answer = self._periodic(periodic)
        if not answer.cuts and not answer.patterns:
            return answer
        return replace(answer, steps=best_step(problem, next(iter(answer.cuts), None), answer.patterns))

    def _periodic(self, problem: Problem) -> Answer:
        answer = _Search(problem, self.start).run()
        if answer.cuts or answer.patterns:
            return answer
        # Where the time was too short for any schedule, one micro-batch after the other may fit.
        found = self.smallest_memory(problem)
        if found is None or not isinstance(found[0], Placement) or found[1] > problem.platform.memory_bytes:
            return answer
        return replace(answer, patterns=(one_by_one(Road(problem, found[0])),), best_period=None)

    def smallest_memory(self, problem: Problem) -> tuple[Cuts | Placement, int] | None:
        found = Contiguous(self.name).smallest_memory(problem)
        if found is None or _only_contiguous(problem) or problem.platform.num_devices == 1:
            return found
        where, smallest = _smallest_memory(problem, *found)
        placement = where if isinstance(where, Placement) else Placement.contiguous(where)
        # Where not every device trains in it, the least that is known is that of a contiguous cut.
        return (where, smallest) if problem.allows(placement) else found


def _only_contiguous(problem: Problem) -> bool:
    constraints = problem.constraints
    return constraints.exactly or constraints.every_stage_trains


class _Search:
    """What is found and what is proved so far."""

    def __init__(self, problem: Problem, start: Iterable[Allocation] = ()) -> None:
        self.problem = problem
        self.start = [_placement(problem, allocation) for allocation in start]
        found = best_cut(problem.times, problem.table, problem.constraints, problem.deadline)
        self.cuts = None if found is None else found.cuts
        self.best = None if found is None else found.period
        """The shortest period so far, in ticks."""
        self.cuts_are_best = found is None or found.proved
        """Whether no contiguous cut is better; what is proved of other allocations builds on it."""
        self.patterns: list[Pattern] = []
        self.bounds: dict[Placement, int | None] = {}
        """Of each allocation that was tried: no pattern of it has a shorter period; None where none is better."""
        self.bound = math.ceil(lower_bound(problem))
        self.schedule_seconds = math.inf
        self.tried_below = self.bound
        """Every allocation with one special device whose bound is shorter was tried."""

    def run(self) -> Answer:
        for placement in self.start:
            if len(set(placement.devices)) <= self.problem.platform.num_devices:
                self._try(placement)
        one = self._one_special() and self.cuts_are_best
        class_bound = self._best_or_longest() if one else self._class_bound()
        several = self._several_special()
        one = one or self._done(class_bound)
        proved_class = ("any allocation" if several else "one special device") if one else None
        counted = self.problem.platform.comm_buffers >= buffer_slots(self.problem.platform)
        return Answer(
            cuts=() if self.cuts is None else (self.cuts,),
            patterns=tuple(reversed(self.patterns)),
            best_period=self.best if proved_class and counted else None,
            proved_class=proved_class or "",
            class_bound=class_bound if counted else None,
        )

    def _one_special(self) -> bool:
        """The best allocation with one special device; True where it is proved."""
        problem = self.problem
        if self._done(self.bound) or problem.platform.num_devices == 1:
            return True
        for estimate, most_specials in ESTIMATES:
            if problem.deadline.passed():
                return False
            found = best_special(self._with_share(SPECIAL_SHARE), estimate, self.best, most_specials)
            if found.placement is not None:
                self._try(found.placement)
        if found.bound is None:
            return True
        self.tried_below = max(self.tried_below, found.bound)
        search = SpecialSearch(problem, "pair")
        for period in self._periods_to_try(found.bound):
            self._try_all(search.some(period))
        return self._enumerate(lambda period: search.all(period, MOST_LABELS), found.bound) and self._settled()

    def _class_bound(self) -> int:
        """No allocation with at most one special device has a shorter period."""
        if not self.cuts_are_best:
            return self.bound
        untried = min(self.tried_below, self._best_or_longest())
        return max(self.bound, min([untried, *(least for least in self.bounds.values() if least is not None)]))

    def _several_special(self) -> bool:
        """Better allocations in which several devices have several stages; True where there are no more."""
        if self._done(self.bound) or self.problem.platform.num_devices == 1:
            return True
        seconds = self.problem.deadline.remaining_seconds() * SEVERAL_SHARE
        if not seconds:
            return False
        # What lies beyond one special device is rarely proved: it gets a part of the time, and each schedule first
        # a part of that.
        self.problem = self._with_share(SEVERAL_SHARE)
        self.schedule_seconds = seconds * SCHEDULE_SHARE
        search = SeveralSearch(self.problem)
        few = search.all(self._best_or_longest() - 1, FEW_PLACEMENTS)
        if few is None:
            self._probe(search)
            self._descend()
        everything = self._enumerate(lambda period: search.all(period, MOST_PLACEMENTS), self.bound)
        self.schedule_seconds = math.inf
        again = [
            placement for placement, least in self.bounds.items() if least is not None and not self._done(least)
        ]
        for placement in again:
            del self.bounds[placement]
        return everything and self._try_all(again) and self._settled()

    def _probe(self, search: SeveralSearch) -> None:
        """Look for allocations that promise much, by bisection of the period; what is not found may yet exist."""
        bound = self.bound
        for _ in range(PROBES):
            best = self._best_or_longest()
            period = (bound + best - 1) // 2
            if best <= bound or not self._try_all(search.some(period, BEAM_WIDTH)[:MOST_TRIED]):
                return
            if self.best is None or self.best > period:
                bound = period + 1

    def _enumerate(self, placements: Callable[[int], list[Placement] | None], bound: int) -> bool:
        """Try the allocations whose "pair" bound is below the best period, lowest first; True where that is all.

        Args:
            placements: all with a bound up to a period; None where they are too many.
            bound: of all of them.
        """
        for period in self._periods_to_try(bound):
            found = placements(period)
            if found is None or not self._try_all(found):
                return False
            self.tried_below = period + 1
        return True

    def _periods_to_try(self, bound: int) -> Iterator[int]:
        """From a bound to just below what is then the best period."""
        for level in LEVELS:
            best = self._best_or_longest()
            if best <= bound:
                return
            yield bound + (best - 1 - bound) // level

    def _with_share(self, share: float) -> Problem:
        """The problem with a part of the time that is left."""
        return replace(self.problem, deadline=self.problem.deadline.part(share))

    def _settled(self) -> bool:
        """Whether no allocation that was tried may have a better schedule than the best one."""
        return all(least is None or self._done(least) for least in self.bounds.values())

    def _best_or_longest(self) -> int:
        return self.problem.longest_period + 1 if self.best is None else self.best

    def _done(self, bound: int) -> bool:
        """Whether the best period is as short as a bound."""
        return self.best is not None and self.best <= bound

    def _try_all(self, placements: Iterable[Placement]) -> bool:
        """Schedule allocations, the most promising first; False where the time is up."""
        promises = []
        for placement in placements:
            if placement not in self.bounds:
                allowed = self.problem.allows(placement)
                least = self._promise(Road(self.problem, placement)) if allowed else None
                if least is None:
                    self.bounds[placement] = None
                else:
                    promises.append((least, placement.cuts, placement.devices, placement))
            if self.problem.deadline.passed():
                return False
        for least, _, _, placement in sorted(promises):
            if self.problem.deadline.passed():
                return False
            if not self._done(least):
                self._try(placement)
        return True

    def _promise(self, road: Road) -> int | None:
        """No pattern is shorter, as far as one look tells; None: none is shorter than the best."""
        least, most, deadline = max(road.busiest, self.bound), self._best_or_longest() - 1, self.problem.deadline
        if least > most or not road.may_fit(most, "peak") or refuted(road, most, deadline, most_trials=1):
            return None
        return least_unrefuted(road, least, most, deadline, PROMISE_STEPS)

    def _try(self, placement: Placement) -> None:
        """Schedule an allocation."""
        if placement.is_contiguous or placement in self.bounds:
            return
        if not self.problem.allows(placement):
            self.bounds[placement] = None
            return
        self._tell()
        deadline = Deadline(self.schedule_seconds, within=self.problem.deadline)
        scheduled = ilp.schedule(Road(self.problem, placement), self.best, deadline)
        self.bounds[placement] = scheduled.bound
        if scheduled.pattern is not None:
            self.patterns.append(scheduled.pattern)
            self.best = scheduled.pattern.period

    def _tell(self) -> None:
        clock = self.problem.times.clock
        found = "no plan yet" if self.best is None else f"period {format_seconds(clock.seconds(self.best))} so far"
        self.problem.deadline.tell(f"{found}, {len(self.bounds)} allocations scheduled")

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


def _placement(problem: Problem, allocation: Allocation) -> Placement:
    num_layers = allocation.boundaries[-1]
    if num_layers != problem.chain.num_layers:
        raise ValueError(
            f"the plan to start from cuts {num_layers} layers and {problem.chain.name!r} has "
            f"{problem.chain.num_layers}: it is of another model"
        )
    return Placement.of(allocation.boundaries, [stage.device for stage in allocation.stages])


def _smallest_memory(problem: Problem, cuts: Cuts, enough: int) -> tuple[Cuts | Placement, int]:
    """The allocation that needs least memory, one micro-batch in flight, and how much.

    The least with one special device, and with several of them the least that is found in a moment; that is worth
    a moment more where the time is up.
    """

    best: tuple[Placement, int] = Placement.contiguous(cuts), enough

    def special(memory_bytes: int) -> Placement | None:
        return SpecialSearch(problem.with_memory(memory_bytes), "peak").decide(problem.longest_period)

    def several(memory_bytes: int) -> Placement | None:
        problem.deadline.check()
        search = SeveralSearch(problem.with_memory(memory_bytes))
        found = search.all(problem.longest_period, FEW_PLACEMENTS)
        if found is None:
            found = search.some(problem.longest_period, BEAM_WIDTH)
        return next(iter(found), None)

    def need(placement: Placement, _: int) -> int:
        nonlocal best
        smallest = max(device.bytes_for_one for device in Road(problem, placement).memory)
        best = min(best, (placement, smallest), key=lambda each: each[1])
        return smallest

    seconds = LAST_SECONDS / 10 if problem.is_one_of_many else LAST_SECONDS
    problem = replace(problem, deadline=problem.deadline.at_least(seconds))
    with suppress(DeadlinePassed):
        narrow(special, need, best[0], enough, 1)
        problem = replace(problem, deadline=Deadline(seconds, within=problem.deadline))
        narrow(several, need, *best, 1)
    placement, smallest = best
    return (placement.cuts if placement.is_contiguous else placement), smallest
