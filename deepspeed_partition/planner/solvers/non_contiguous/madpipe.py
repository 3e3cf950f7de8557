"""MadPipe: where, when and in how much memory, decided together over allocations that need not be contiguous.

The candidates come in the order of what they may promise (``best_first.py``):

1. the best contiguous partition, exactly (``optimal.py``);
2. the best allocation with one special device by the "safe" and by the "pair" estimate
   (``one_special_device.py``), by the second also with at most two special stages, where it is mostly right; each
   with the schedule that an integer linear program finds for it (``ilp.py``);
3. every other allocation with one special device whose "pair" bound is below the best period so far, in the order
   of what ``branch_and_bound.py`` leaves of it, until none is left, which proves the answer, or the time is up;
4. allocations in which several devices have several stages: all of them where they are few, else those around the
   best one.

Source: MadPipe paper, section 4, with exact searches in place of its grid, and with step 3, without which the
answer may be far from the best of its own class.

Exact: step 1; with step 3 run to its end, the best among allocations with one special device; with all of step 4,
the best of all. Cost for L layers and P devices: O(P L^2) time for each of some dozen decisions of step 1, with
the O(L^2) table of stages; the labels of steps 2 and 3, the allocations of step 4 and each integer program grow
exponentially in the worst case, so limits and the deadline end them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

from deepspeed_partition.planner.allocation import Allocation, Placement
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.memory import reserves_all_slots
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.partition_search import BestPartition, best_partition, narrow
from deepspeed_partition.planner.solvers.contiguous.recomputing import best_recomputing_partition
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem
from deepspeed_partition.planner.solvers.non_contiguous.best_first import (
    BEAM_WIDTH,
    ESTIMATES,
    FEW_PLACEMENTS,
    MOST_LABELS,
    BestFirstSearch,
    proved_class,
)
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import SeveralSearch, neighbours
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch, best_special
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.branch_and_bound import least_unrefuted, refuted
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road, one_by_one
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices
from deepspeed_partition.planner.units import format_seconds

MOST_PLACEMENTS = 20_000
"""Most partial allocations with several special devices that are enumerated, at one boundary."""
SPECIAL_SHARE = 0.5
"""Share of the time that is left for the allocation that each estimate calls best; the rest is for its
schedule."""
SEVERAL_SHARE, SCHEDULE_SHARE = 0.5, 0.2
"""Shares of the time that is left: for all allocations in which several devices have several stages, and for
each. In less time than that a search ends at an allocation whose better neighbour has no schedule yet."""
PLAIN_SHARE = 0.4
"""Share of the time that is left for each search of allocations, where layers may be recomputed: without any, with
unlimited memory, which may prove that none is of use, and with each uniform choice."""
PERIODIC_SHARE = 0.2
"""Share of the time for a step that is used for the plan of the shortest period, from which its search begins."""
PROMISE_STEPS = 8
"""Steps of the bisection that tells which of many allocations is tried first; its schedule begins with the
rest."""
LAST_SECONDS = 0.5
"""Seconds to find out what would help where nothing was found: for one special device where the time is up, and
at most for several."""


@dataclass(frozen=True, slots=True)
class MadPipe:
    """Solver for the shortest period over all allocations, proved best in its class where time allows.

    A host whose engine runs one stage per rank (``num_stages``, ``every_stage_trains``) gets the answer of
    ``Contiguous`` under this name. For a step (``num_micro_batches``) the search begins with the best of these
    plans.
    """

    name: str = "madpipe"
    start: tuple[Allocation | Plan, ...] = ()
    """Plans for less memory, bandwidth or devices, or for other times of the same layers, or their allocations.
    They are tried first, so that the answer is not worse where they still fit; the step of a plan in its own
    order, for as many micro-batches."""

    def solve(self, problem: Problem) -> Answer:
        if _only_contiguous(problem):
            return Contiguous(self.name).solve(problem)
        if problem.num_micro_batches is None:
            return self._periodic(problem, proves=True)
        periodic = replace(problem, num_micro_batches=None, deadline=problem.deadline.part(PERIODIC_SHARE))
        answer = self._periodic(periodic, proves=False)
        if not answer.cuts and not answer.patterns:
            return answer
        return replace(
            answer, step_search="any", starts=tuple(each for each in self.start if isinstance(each, Plan))
        )

    def _periodic(self, problem: Problem, *, proves: bool) -> Answer:
        if problem.recomputation is None:
            answer = _PeriodSearch(problem, self.start).run()
        else:
            answer = self._recomputing(problem, proves=proves)
        if answer.cuts or answer.patterns:
            return answer
        # The time may have been too short for any schedule; one micro-batch after the other may still fit.
        for uniform in (None, *uniform_choices(problem)):
            view = replace(problem, recomputation=None) if uniform is None else uniform.problem
            found = self.smallest_memory(view)
            if found is not None and isinstance(found[0], Placement) and found[1] <= problem.platform.memory_bytes:
                placement = found[0] if uniform is None else uniform.chosen(found[0])
                return replace(answer, patterns=(one_by_one(Road(problem, placement)),), best_period=None)
        return answer

    def _recomputing(self, problem: Problem, *, proves: bool) -> Answer:
        """Return the best contiguous partition with recomputation, and the best of the others without any or all.

        Args:
            proves: whether to look for what is proved, and for allocations of which everything is recomputed.
        """
        found = best_recomputing_partition(problem)
        plain = replace(problem, recomputation=None)
        answer = _PeriodSearch(_with_share(plain, PLAIN_SHARE), self.start, found).run()
        patterns = list(answer.patterns)
        contiguous = found.period if found is not None and found.proved else None
        bound = math.ceil(lower_bound(problem)) if reserves_all_slots(problem.platform) else None
        answer = Answer(() if found is None else (found.cuts,), patterns=tuple(patterns), class_bound=bound)
        if not proves:
            return answer
        period = patterns[0].period if patterns else None if found is None else found.period
        if period is not None:
            roomy = self._unlimited(_with_share(plain, PLAIN_SHARE), period)
            if roomy is not None and roomy.best_period == period:
                proved, bound = roomy.proved_class, roomy.class_bound
                return replace(answer, best_period=period, proved_class=proved, class_bound=bound)
        for uniform in uniform_choices(problem):
            known = None if period is None else BestPartition((0, problem.chain.num_layers), period, False)
            view = _with_share(uniform.problem, PLAIN_SHARE)
            for pattern in reversed(_PeriodSearch(view, (), known).run().patterns):
                patterns.insert(0, replace(pattern, placement=uniform.chosen(pattern.placement)))
                period = pattern.period
        return replace(answer, patterns=tuple(patterns), best_period=None if patterns else contiguous)

    @staticmethod
    def _unlimited(problem: Problem, period: int) -> Answer | None:
        """Return what is proved of a period where memory is unlimited, and so whatever is recomputed.

        None: some contiguous partition is faster then.
        """
        roomy = problem.with_memory(LARGEST_MEMORY_BYTES)
        best = best_partition(roomy.times, roomy.table, roomy.constraints, roomy.deadline)
        if best is None or best.period < period:
            return None
        answer = _PeriodSearch(roomy, (), replace(best, period=period)).run()
        return None if answer.patterns else answer

    def smallest_memory(self, problem: Problem) -> tuple[Cuts | Placement, int] | None:
        found = Contiguous(self.name).smallest_memory(problem)
        if found is None or _only_contiguous(problem) or problem.platform.num_devices == 1:
            return found
        where, smallest = _smallest_memory(replace(problem, recomputation=None), *found)
        if smallest >= found[1]:
            return found
        placement = where if isinstance(where, Placement) else Placement.contiguous(where)
        # If a device does not train in it, the least that is known is that of a contiguous partition.
        return (where, smallest) if problem.allows(placement) else found


def _with_share(problem: Problem, share: float) -> Problem:
    """Return the problem with a share of the time that is left."""
    return replace(problem, deadline=problem.deadline.part(share))


def _only_contiguous(problem: Problem) -> bool:
    constraints = problem.constraints
    return constraints.exactly or constraints.every_stage_trains


class _PeriodSearch(BestFirstSearch):
    """Search for the shortest period in the memory of the problem; the cost of an allocation is its period."""

    def __init__(
        self, problem: Problem, start: Iterable[Allocation | Plan] = (), known: BestPartition | None = None
    ) -> None:
        self.start = [_placement(problem, allocation) for allocation in start]
        found = known
        if known is None:
            found = best_partition(problem.times, problem.table, problem.constraints, problem.deadline)
        super().__init__(
            problem,
            cuts=None if found is None else found.cuts,
            best=None if found is None else found.period,
            contiguous_is_best=found is None or found.proved,
            worst=problem.longest_period,
        )
        self.patterns: list[Pattern] = []
        """Patterns found, the best last."""
        self.bound = math.ceil(lower_bound(problem))
        """Ticks: no period is shorter."""
        self.schedule_seconds = math.inf
        self.tried_below = self.bound

    def run(self) -> Answer:
        for placement in self.start:
            if len(set(placement.devices)) <= self.problem.platform.num_devices:
                self.try_one(placement)
        one = self._one_special() and self.contiguous_is_best
        class_bound = self.to_beat if one else self._class_bound()
        several = self._several_special()
        proved = proved_class(one or self.reached(class_bound), several)
        counted = reserves_all_slots(self.problem.platform)
        return Answer(
            cuts=() if self.cuts is None else (self.cuts,),
            patterns=tuple(reversed(self.patterns)),
            best_period=self.best if proved and counted else None,
            proved_class=proved,
            class_bound=class_bound if counted else None,
        )

    def _one_special(self) -> bool:
        """Search the best allocation with one special device; return whether it is proved."""
        problem = self.problem
        if self.reached(self.bound) or problem.platform.num_devices == 1:
            return True
        for estimate, most_specials in ESTIMATES:
            if problem.deadline.passed():
                return False
            found = best_special(_with_share(self.problem, SPECIAL_SHARE), estimate, self.best, most_specials)
            if found.placement is not None:
                self.try_one(found.placement)
        if found.bound is None:
            return True
        self.tried_below = max(self.tried_below, found.bound)
        search = SpecialSearch(problem, "pair")
        for period in self.limits(found.bound):
            self.try_all(search.some(period))
        return self.enumerate(lambda period: search.all(period, MOST_LABELS), found.bound) and self.settled()

    def _class_bound(self) -> int:
        """Return a period, in ticks, below which no allocation with at most one special device exists."""
        if not self.contiguous_is_best:
            return self.bound
        untried = min(self.tried_below, self.to_beat)
        return max(self.bound, min([untried, *(least for least in self.bounds.values() if least is not None)]))

    def _several_special(self) -> bool:
        """Search allocations in which several devices have several stages; return whether none is left."""
        if self.reached(self.bound) or self.problem.platform.num_devices == 1:
            return True
        seconds = self.problem.deadline.remaining_seconds() * SEVERAL_SHARE
        if not seconds:
            return False
        # Allocations with several special devices are rarely proved best: they get a part of the time, and each
        # schedule at first a part of that.
        self.problem = _with_share(self.problem, SEVERAL_SHARE)
        self.schedule_seconds = seconds * SCHEDULE_SHARE
        search = SeveralSearch(self.problem)
        few = search.all(self.to_beat - 1, FEW_PLACEMENTS)
        if few is None:
            self.probe(lambda period: search.some(period, BEAM_WIDTH), self.bound)
            self._descend()
        everything = self.enumerate(lambda period: search.all(period, MOST_PLACEMENTS), self.bound)
        self.schedule_seconds = math.inf
        again = [
            placement for placement, least in self.bounds.items() if least is not None and not self.reached(least)
        ]
        for placement in again:
            del self.bounds[placement]
        return everything and self.try_all(again) and self.settled()

    def promise(self, placement: Placement) -> int | None:
        road = Road(self.problem, placement)
        least, most, deadline = max(road.busiest, self.bound), self.to_beat - 1, self.problem.deadline
        if least > most or not road.may_fit(most, "peak") or refuted(road, most, deadline, most_trials=1):
            return None
        return least_unrefuted(road, least, most, deadline, PROMISE_STEPS)

    def schedule(self, placement: Placement) -> int | None:
        self._tell()
        deadline = Deadline(self.schedule_seconds, within=self.problem.deadline)
        scheduled = ilp.schedule(Road(self.problem, placement), self.best, deadline)
        if scheduled.pattern is not None:
            self.patterns.append(scheduled.pattern)
            self.best = scheduled.pattern.period
        return scheduled.bound

    def _tell(self) -> None:
        clock = self.problem.times.clock
        found = "no plan yet" if self.best is None else f"period {format_seconds(clock.seconds(self.best))} so far"
        self.problem.deadline.tell(f"{found}, {len(self.bounds)} allocations scheduled")

    def _descend(self) -> None:
        """Go from the best allocation to a better neighbour, until there is none or the time is up."""
        while True:
            before = self.best
            if self.patterns:
                centre = self.patterns[-1].placement
            elif self.cuts is not None:
                centre = Placement.contiguous(self.cuts)
            else:
                return
            if not self.try_all(neighbours(self.problem, centre)) or self.best == before:
                return


def _placement(problem: Problem, start: Allocation | Plan) -> Placement:
    allocation = start.allocation if isinstance(start, Plan) else start
    num_layers = allocation.boundaries[-1]
    if num_layers != problem.chain.num_layers:
        raise ValueError(
            f"the plan to start from cuts {num_layers} layers and {problem.chain.name!r} has "
            f"{problem.chain.num_layers}: it is of another model"
        )
    return Placement.of(allocation.boundaries, [stage.device for stage in allocation.stages])


def _smallest_memory(problem: Problem, cuts: Cuts, enough: int) -> tuple[Cuts | Placement, int]:
    """Return the allocation that needs least memory with one micro-batch in flight, and its bytes.

    It is the least of those with one special device, and of those with several that a search finds in a moment;
    it gets that moment where the time is up, too.
    """

    best: tuple[Placement, int] = Placement.contiguous(cuts), enough

    def fitting(placement: Placement | None, memory_bytes: int) -> Placement | None:
        """Return the placement, unless what comes behind the backwards, which searches leave out, does not fit."""
        if placement is None:
            return None
        return placement if max(need_of(placement)) <= memory_bytes else None

    def need_of(placement: Placement) -> list[int]:
        return [device.bytes_for_one for device in Road(problem, placement).memory]

    def special(memory_bytes: int) -> Placement | None:
        search = SpecialSearch(problem.with_memory(memory_bytes), "peak")
        return fitting(search.decide(problem.longest_period), memory_bytes)

    def several(memory_bytes: int) -> Placement | None:
        problem.deadline.check()
        search = SeveralSearch(problem.with_memory(memory_bytes))
        found = search.all(problem.longest_period, FEW_PLACEMENTS)
        if found is None:
            found = search.some(problem.longest_period, BEAM_WIDTH)
        return fitting(next(iter(found), None), memory_bytes)

    def need(placement: Placement, _: int) -> int:
        nonlocal best
        smallest = max(need_of(placement))
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
