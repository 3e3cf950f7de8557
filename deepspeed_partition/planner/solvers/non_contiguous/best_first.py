"""Best-first search: the allocations that promise to cost least are scheduled first, until none can beat the best.

Two solvers share it. The cost of an allocation is the period of its best schedule in a given memory, in ticks
(``madpipe.py``), or the bytes of its largest device at a given period (``min_memory_allocation.py``). To schedule
an allocation takes an integer program. A lower bound on its cost, its *promise*, takes a fraction of that.

Method: enumerations of all allocations up to a limit, which rises from a lower bound to just below the best cost;
those that each finds are scheduled in the order of their promises. Exact where an enumeration comes to its end
and every allocation is settled (``enumerate``, ``settled``); ``probe`` proves nothing. Cost: the enumerations and
the integer programs, whose number grows exponentially in the worst case, so limits and the deadline end them.
Source: an addition to the MadPipe paper, section 4, which schedules one allocation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Estimate

MOST_LABELS = 1_000_000
"""Most partial allocations with one special device that an enumeration holds before it gives up."""
FEW_PLACEMENTS = 300
"""Number of partial allocations with several special devices, at one boundary: so few that all are tried."""
PROBES, BEAM_WIDTH, MOST_TRIED = 8, 1000, 8
"""Limits of the search where those are too many: costs, labels per boundary, schedules per cost."""
ESTIMATES: tuple[tuple[Estimate, int | None], ...] = (("safe", None), ("pair", 2), ("pair", None))
"""Estimates, each with the most stages of the special device (None: any number). The last one bounds all
allocations."""
LEVELS = (64, 16, 4, 2, 1)
"""Divisors of the distance from a bound to the best cost: an enumeration first looks at a 64th of it."""


class BestFirstSearch(ABC):
    """State of a search: what is found and what is proved so far.

    Args:
        cuts: the contiguous partition that costs least; None where none is known.
        best: its cost.
        contiguous_is_best: whether no contiguous partition costs less.
        worst: the largest cost that is allowed.
    """

    def __init__(
        self, problem: Problem, cuts: Cuts | None, best: int | None, contiguous_is_best: bool, worst: int
    ) -> None:
        self.problem = problem
        self.cuts = cuts
        self.best = best
        """Least cost so far; None where nothing is found."""
        self.contiguous_is_best = contiguous_is_best
        """True: no contiguous partition costs less. What is proved of other allocations builds on it."""
        self.worst = worst
        self.bounds: dict[Placement, int | None] = {}
        """Lower bound on the cost of each allocation that was tried; None where no schedule costs less than the
        best."""
        self.tried_below = 0
        """Cost below which every allocation of the class that is enumerated was tried."""

    @abstractmethod
    def promise(self, placement: Placement) -> int | None:
        """Return a lower bound on the cost of an allocation, by one look; None: no less than the best."""

    @abstractmethod
    def schedule(self, placement: Placement) -> int | None:
        """Schedule an allocation, and remember its pattern if it is the best so far.

        Returns:
            A lower bound on the cost of all its schedules; None: none costs less than the best.
        """

    @property
    def to_beat(self) -> int:
        """Cost of the best so far; without one, more than the largest that is allowed."""
        return self.worst + 1 if self.best is None else self.best

    def reached(self, bound: int) -> bool:
        """Return whether the best costs no more than a bound."""
        return self.best is not None and self.best <= bound

    def settled(self) -> bool:
        """Return whether no allocation that was tried may have a better schedule than the best one."""
        return all(least is None or self.reached(least) for least in self.bounds.values())

    def enumerate(self, placements: Callable[[int], list[Placement] | None], bound: int) -> bool:
        """Try the allocations that may cost less than the best, lowest first; return whether all were tried.

        Args:
            placements: returns all that may cost no more than a limit; None where they are too many.
            bound: a lower bound on the cost of all of them.
        """
        for limit in self.limits(bound):
            found = placements(limit)
            if found is None or not self.try_all(found):
                return False
            self.tried_below = limit + 1
        return True

    def limits(self, bound: int) -> Iterator[int]:
        """Yield costs from a bound to just below what is then the best."""
        for level in LEVELS:
            if self.to_beat <= bound:
                return
            yield bound + (self.to_beat - 1 - bound) // level

    def probe(self, some: Callable[[int], list[Placement]], bound: int) -> None:
        """Try allocations that promise much, by bisection over the cost; some that exist may be missed.

        Args:
            some: returns some that may cost no more than a limit, the most promising first.
            bound: a lower bound on the cost of all of them.
        """
        for _ in range(PROBES):
            limit = (bound + self.to_beat - 1) // 2
            if self.to_beat <= bound or not self.try_all(some(limit)[:MOST_TRIED]):
                return
            if self.to_beat > limit:
                bound = limit + 1

    def try_all(self, placements: Iterable[Placement]) -> bool:
        """Schedule allocations, the most promising first; return False where the time is up."""
        promises = []
        for placement in placements:
            if placement not in self.bounds:
                least = self.promise(placement) if self.problem.allows(placement) else None
                if least is None:
                    self.bounds[placement] = None
                else:
                    promises.append((least, placement.cuts, placement.devices, placement))
            if self.problem.deadline.passed():
                return False
        for least, _, _, placement in sorted(promises):
            if self.problem.deadline.passed():
                return False
            if not self.reached(least):
                self.try_one(placement)
        return True

    def try_one(self, placement: Placement) -> None:
        """Schedule an allocation that was not tried before; contiguous ones need no search."""
        if not placement.is_contiguous and placement not in self.bounds:
            self.bounds[placement] = self.schedule(placement) if self.problem.allows(placement) else None


def proved_class(one: bool, several: bool) -> str:
    """Return the allocations among which the best is proved; empty for none.

    Args:
        one: whether it is proved among those with one special device.
        several: whether none with several special devices is better.
    """
    if not one:
        return ""
    return "any allocation" if several else "one special device"
