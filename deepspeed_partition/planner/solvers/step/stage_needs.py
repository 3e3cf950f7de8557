"""What a stage asks of a step: ticks for its work, its link, its memory, and the way of its last micro-batch.

Of the stage of layers k to l, with ``S`` the ticks of a tensor one way over all boundaries up to k, and ``A`` over
the boundary behind l and all further ones, a step takes at least

    2 S + needed(k, l)              its work, its link, its memory, its turn with the boundary behind it alone
    2 S + turning(k, l) + 2 A       its turn

A turn is the way of the last micro-batch whose forward it runs, or of the first whose backward it runs: to the end
of the chain and back. A link has a turn, too: one tensor after the other goes over it. A is not known while
boundaries are chosen from the first layer on, but it is at least the least one over those that a step of T ticks
may have (``StageNeeds.within``). And S and A together are the ticks over *all* boundaries, whatever the stage. So
where all choices of boundaries that a step of T ticks may have take ``total`` ticks at least, none has a stage
with ``2 total + turning(k, l) > T``; without these stages the least total may be larger, until nothing changes
(``total``).

Besides its work, a stage waits. There are D ticks or more from the begin of its first forward to that of its first
backward: its forward, and the way to the end and back. By then it has begun at most K forwards: no more than it
may have in flight, g, nor than come over the link before it, ``1 + D / send``. The others, and all backwards, come
later: it waits ``D - K f`` ticks in the fill. As well in the drain, seen from the end of the step: ``D' - K' b``,
with D' ticks from the end of the last forward to that of the last backward, when at most g backwards have yet to
end. If g < m, the last forward begins behind the first D ticks, so both spans of time are apart, and it waits in
both. Other stages of the device may run meanwhile; that does not help this one.

Method: own; not in the papers. Cost: O(L^2) for each pair of ``stage_depths.py``, and for each T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.step.kept_bounds import ticks_of_stages
from deepspeed_partition.planner.solvers.step.stage_depths import stage_depths

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

FAR = np.iinfo(np.int64).max // 4
"""Ticks that no step has."""
ROUNDING = 1e-9
"""Relative error of ticks in floating point."""
MOST_ROUNDS = 40
"""Number of times that stages are left out for what all boundaries take."""
NUM_ROWS = 256
"""Number of first layers whose stages are looked at together: tables of all take much memory."""
Integers = NDArray[np.int64]


class StageNeeds:
    """What each stage asks of a step.

    Args:
        bounds: times and bytes of the problem.
        allowed: whether layers k to l may be a stage, [k, l].
        waits: count what a stage waits besides its turns.
    """

    def __init__(self, bounds: StepBounds, allowed: NDArray[np.bool_], *, waits: bool = True) -> None:
        m, C = bounds.m, bounds.C
        self.m, self.size, self.waits = m, bounds.size, waits
        self.send: Integers = np.array([*bounds.send, 0], dtype=np.int64)
        """Ticks of a tensor over the boundary before each layer, one way; 0 at both ends of the chain."""
        rest = (C[-1] - C)[None, :]
        behind = rest + 2 * self.send[None, :]
        needed: Integers = np.full((self.size + 1,) * 2, FAR, dtype=np.int64)
        turning: Integers = np.full((self.size + 1,) * 2, FAR, dtype=np.int64)
        for depths, extras in stage_depths(bounds.problem, bounds.f):
            for first in range(0, self.size + 1, NUM_ROWS):
                rows = slice(first, first + NUM_ROWS)
                before, most = C[rows, None], depths[rows]
                f, b = bounds.F[None, :] - bounds.F[rows, None], bounds.B[None, :] - bounds.B[rows, None]
                again = b + extras[rows]
                flush = behind if bounds.flushes_once else 0
                turns = -(-m // np.maximum(1, most))
                may = (most >= 1) & allowed[rows]
                idle = self._idle(rows, f, again, most, rest, behind)
                work = m * (f + again)
                needs = np.maximum(work + np.maximum(idle[0], flush), turns * (f + again + behind))
                np.minimum(needed[rows], before + needs, out=needed[rows], where=may)
                way = np.maximum(work + idle[1], turns * (f + again + rest))
                np.minimum(turning[rows], before + way, out=turning[rows], where=may)
        np.maximum(needed, (C + bounds.on_link * self.send)[None, :], out=needed)
        np.maximum(needed, C[:, None] + ticks_of_stages(bounds), out=needed)
        link = int(C[-1]) + (m - 1) * self.send
        np.maximum(turning, link[:, None], out=turning)
        np.maximum(turning, link[None, :], out=turning)
        self.needed: Integers = needed
        self.turning: Integers = turning

    def _idle(
        self, rows: slice, f: Integers, again: Integers, most: Integers, rest: Integers, behind: Integers
    ) -> tuple[Integers, Integers]:
        """Return the ticks in which a stage waits, with the boundary behind it, and without transfers; [k, l].

        Args:
            f, again: ticks of a forward and of a backward, with what runs twice.
            most: most micro-batches in flight.
            rest, behind: ticks from the end of the stage to the end of the chain and back, without transfers, and
                with those over the boundary behind it.
        """
        if not self.waits:
            most = np.full_like(most, self.m)
        link = self.send[rows, None].astype(float) * self.waits
        fills: list[Integers] = []
        drains: list[Integers] = []
        for way in (behind, rest):
            for ticks, found in ((f, fills), (again, drains)):
                whole = ticks + way
                by_link = whole * (1 - np.divide(ticks, link, out=np.ones(ticks.shape), where=link > 0)) - ticks
                # Through a link of next to no time this is below what 64 bits hold, and of no use. It is above
                # that from a layer to an earlier one, which is no stage.
                by_link = np.floor(np.clip(by_link * (1 - ROUNDING), -(2.0**62), 2.0**62)).astype(np.int64)
                # With more transfers behind it, what a link makes it wait grows by less: it is left out there.
                found.append(whole - most * ticks if way is rest else np.maximum(whole - most * ticks, by_link))
        both = most < self.m
        fill, drain = (np.maximum(found[0], 0) for found in (fills, drains))
        alone = np.where(both, fill + drain, np.maximum(fill, drain))
        with_fill, with_drain = fills[1] + np.where(both, drain, 0), drains[1] + np.where(both, fill, 0)
        return alone, np.maximum(with_fill, with_drain)

    def within(self, T: int) -> Integers:
        """Return the ticks of a step of at most T ticks for each stage, without transfers before it; [k, l]."""
        after = np.full(self.size + 1, FAR, dtype=np.int64)
        after[-1] = 0
        for start in range(self.size - 1, 0, -1):
            further = after[start + 1 :]
            asks = np.maximum(self.needed[start, start + 1 :], self.turning[start, start + 1 :] + 2 * further)
            ways = further[asks + 2 * self.send[start] <= T]
            if len(ways):
                after[start] = ways.min() + self.send[start]
        result: Integers = np.maximum(self.needed, self.turning + 2 * after[None, :])
        return result

    def total(self, T: int, needed: Integers, least_total: Callable[[Integers], int], at_least: int = 0) -> int:
        """Return the least ticks of a tensor one way over all boundaries of a step of T ticks; ``FAR``: none is.

        Args:
            needed: ticks that each stage needs, as ``within`` returns them.
            least_total: returns the least ticks over all boundaries, of some that a step of T ticks may have where
                stages need what it is given; ``FAR`` where there are none. They are never more for stages that
                need less.
            at_least: ticks over all boundaries, as far as that is known.
        """
        for _ in range(MOST_ROUNDS):
            found = least_total(np.where(self.turning + 2 * at_least <= T, needed, FAR) if at_least else needed)
            if found >= FAR or found <= at_least:
                return found if found >= FAR else at_least
            at_least = found
        return at_least

    def total_of_any(self, T: int, needed: Integers) -> int:
        """Return the same of any number of stages, whatever their devices do."""

        def least_total(needed: Integers) -> int:
            least = np.full(self.size + 1, FAR, dtype=np.int64)
            least[0] = 0
            for start in np.flatnonzero(self.send >= 0)[:-1]:
                if least[start] < FAR:
                    further = slice(start + 1, None)
                    fits = 2 * least[start] + needed[start, further] <= T
                    reached = np.where(fits, least[start] + self.send[further], FAR)
                    np.minimum(least[further], reached, out=least[further])
            return int(least[-1])

        return self.total(T, needed, least_total)
