"""The allocation that needs least memory at a chosen period.

Each solver decides whether something fits at a period and a memory. ``madpipe.py`` searches for the shortest
period in a given memory. This search (``best_first.py``) exchanges the two, over bytes of the largest device:

1. the contiguous partition that needs least, exactly, by bisection over the memory;
2. the best allocation with one special device by the "safe" and by the "pair" estimate, by this one also with two
   special stages alone, each with the pattern that needs least memory at the period (``min_memory_schedule.py``);
3. every other allocation with one special device whose "pair" bound is below the least so far, in the order of
   the "pairs" bound, until none is left, which proves the answer, or the time is up;
4. allocations in which several devices have several stages: all of them where they are few, else a good few.

A pattern of a shorter period can be slowed down and then needs no more memory, so patterns of the chosen period
suffice.

Source: the searches of the MadPipe paper, section 4, at a fixed period; the paper does not ask this question.
Step 1 is exact, and so is the answer where step 3 ends (among allocations with one special device) or step 4
tries all. Cost: that of ``optimal.py``, O(P L^2) for each of some dozen decisions, then labels and integer
programs as in ``madpipe.py``, exponential in the worst case; the deadline ends them.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import DeadlinePassed
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.contiguous.optimal import partition_at
from deepspeed_partition.planner.solvers.contiguous.partition_search import narrow
from deepspeed_partition.planner.solvers.contiguous.recomputing import least_memory_at
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, stage_bytes
from deepspeed_partition.planner.solvers.non_contiguous.best_first import (
    BEAM_WIDTH,
    ESTIMATES,
    FEW_PLACEMENTS,
    MOST_LABELS,
    BestFirstSearch,
    proved_class,
)
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import SeveralSearch
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.min_memory_schedule import estimated_bytes, most_compact
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Estimate, Pattern, Road

FIRST_SECONDS = 1.0
"""Seconds to find out whether any partition is fast enough, where the time is up: then there is some plan."""


def contiguous_at(problem: Problem, period: int) -> tuple[tuple[Cuts, int] | None, bool]:
    """Find the partition of least memory at ``period``, and its bytes; None where none is that fast.

    Returns:
        The partition and its bytes, and whether that is certain: False where the deadline passed before.
    """
    best: tuple[Cuts, int] | None = None

    def need(cuts: Cuts, _: int) -> int:
        nonlocal best
        best = cuts, bytes_at(problem, cuts, period)
        return best[1]

    def decide(memory_bytes: int) -> Cuts | None:
        return partition_at(problem.with_memory(memory_bytes), period)

    try:
        first = replace(problem, deadline=problem.deadline.at_least(FIRST_SECONDS))
        cuts = partition_at(first.with_memory(LARGEST_MEMORY_BYTES), period)
        if cuts is not None:
            narrow(decide, need, cuts, need(cuts, 0), 1)
    except DeadlinePassed:
        return best, False
    return best, True


def bytes_at(problem: Problem, cuts: Cuts, period: int) -> int:
    """Return the bytes of the largest device of a contiguous partition under 1F1B* at ``period``."""
    if problem.recomputation is not None:
        found = least_memory_at(problem, cuts, period)
        assert found is not None, "a partition that a decision found is too slow"
        return found[1]
    in_flight = one_f_one_b.in_flight(one_f_one_b.pseudo_stage_loads(problem.times, cuts), period)
    return max(stage_bytes(problem, cuts, in_flight))


def answer_at(problem: Problem, period: int, *, special: bool) -> Answer:
    """Find the allocation that needs least memory at ``period``; the answer is empty where none is that fast.

    Args:
        special: whether to search allocations that are not contiguous, too. What is proved is proved of the
            memory.
    """
    found, best = contiguous_at(problem, period)
    if problem.recomputation is not None:
        best = best and problem.recomputation.is_exact
        if special:
            return _MemorySearch(
                replace(problem, recomputation=None), period, found, best
            ).run_beside_recomputation()
    elif special:
        return _MemorySearch(problem, period, found, best).run()
    return Answer(()) if found is None else Answer((found[0],), period if best else None)


class _MemorySearch(BestFirstSearch):
    """Search for the least memory at a period; the cost of an allocation is the bytes of its largest device."""

    def __init__(
        self, problem: Problem, period: int, contiguous: tuple[Cuts, int] | None, contiguous_is_best: bool
    ) -> None:
        cuts, best = (None, None) if contiguous is None else contiguous
        super().__init__(problem, cuts, best, contiguous_is_best, LARGEST_MEMORY_BYTES)
        self.period = period
        self.pattern: Pattern | None = None

    def run(self) -> Answer:
        one, several = self._one_special() and self.contiguous_is_best, self._several_special()
        proved = proved_class(one, several)
        if self.pattern is not None:
            return Answer((), self.pattern.period if proved else None, (self.pattern,), proved_class=proved)
        if self.cuts is None:
            return Answer(())
        return Answer((self.cuts,), self.period if proved else None, proved_class=proved)

    def run_beside_recomputation(self) -> Answer:
        """Search allocations that recompute nothing, besides the contiguous partition, which may.

        What is proved is proved among contiguous partitions.
        """
        answer = self.run()
        if answer.patterns:
            return replace(answer, best_period=None)
        proved = self.contiguous_is_best and self.cuts is not None
        return replace(answer, best_period=self.period if proved else None, proved_class="contiguous")

    def _one_special(self) -> bool:
        """Search the best allocation with one special device; return whether it is proved."""
        if self.problem.platform.num_devices == 1:
            return True
        try:
            for estimate, most_specials in ESTIMATES:
                found, bound = self._best_special(estimate, most_specials)
                if found is not None:
                    self.try_one(found)
        except DeadlinePassed:
            return False

        def every(memory_bytes: int) -> list[Placement] | None:
            search = SpecialSearch(self.problem.with_memory(memory_bytes), "pair")
            return search.all(self.period, MOST_LABELS)

        return self.enumerate(every, bound) and self.settled()

    def _best_special(self, estimate: Estimate, most_specials: int | None) -> tuple[Placement | None, int]:
        """Return the allocation with one special device that needs least by an estimate, and its bytes."""

        def decide(memory_bytes: int) -> Placement | None:
            problem = self.problem.with_memory(memory_bytes)
            return SpecialSearch(problem, estimate, most_specials).decide(self.period)

        def need(placement: Placement, memory_bytes: int) -> int:
            least = estimated_bytes(Road(self.problem, placement), self.period, estimate)
            assert least is not None, "an allocation that a decision found is too slow"
            return min(least, memory_bytes)  # its rounded weights may take a byte more

        return narrow(decide, need, None, self.to_beat, 1)

    def _several_special(self) -> bool:
        """Search allocations in which several devices have several stages; return whether none is left."""

        def search(memory_bytes: int) -> SeveralSearch:
            return SeveralSearch(self.problem.with_memory(memory_bytes))

        if self.enumerate(lambda limit: search(limit).all(self.period, FEW_PLACEMENTS), 1) and self.settled():
            return True
        self.probe(lambda limit: search(limit).some(self.period, BEAM_WIDTH), 1)
        return False

    def promise(self, placement: Placement) -> int | None:
        least = estimated_bytes(Road(self.problem, placement), self.period)
        return None if least is None or least >= self.to_beat else least

    def schedule(self, placement: Placement) -> int | None:
        found = most_compact(self.problem, placement, self.period, self.to_beat)
        if found.pattern is not None and found.num_bytes is not None:
            self.pattern, self.best = found.pattern, found.num_bytes
        return found.bound
