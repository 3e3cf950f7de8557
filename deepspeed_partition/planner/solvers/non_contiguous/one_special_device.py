"""The best allocation with one special device, under an estimate of its memory: exact, without a grid.

Every device runs one stage, except the special one, which runs any number (MadPipe paper, section 4.2). The
paper's dynamic program has a grid for the special device's load and memory and for the delay. Here, for a
decision at a period T, the allocations of layers l and on are *labels*, and only those are kept that no other one
dominates:

    normals used, delay of 1F1B*, load and bytes of the special device, load of the link that it shares

Stages are laid from the end of the chain; each label becomes, for every k < l, one whose next stage [k, l) is on
a normal device, and one where it is on the special device. All costs are monotone in the labels, so dominance
loses nothing. A label is dropped early where even a relaxed completion has too little load or memory left, for a
few weights between the two (``completion_bound.py``). Bisection over T is that of ``optimal.py``. Stages that
follow one another on a device are one stage, and a normal stage between two special ones loads one link with both
boundaries.

The memory of the special device depends on the schedule, so it is estimated:

- ``"peak"``, a lower bound: what ``Road.bytes_at_least`` counts. No schedule of a shorter period exists.
- ``"pair"``, a better one: in addition, special stages that follow one another have room (``pairwise_memory.py``).
- ``"safe"``: all forwards in a row, then all backwards, ``sum g_i s_i``: allocations easy to schedule.

Cost for L layers: with n labels that no other one dominates at a boundary, each makes up to 2 L new ones, and
comparing them takes O(n^2) per boundary; memory is O(L n). No polynomial in L and P bounds n; the deadline ends
the search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.partition_search import narrow
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.non_contiguous.completion_bound import Completion
from deepspeed_partition.planner.solvers.pattern.pairwise_memory import Side, may_share
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Estimate, Road

USED, DELAY, LOAD, KEPT, PEAK, CURRENT, LINK = range(7)
"""Columns of a label: the normals used; the delay as ``group * (T + 1) + fill``; load and bytes of the special
device without the group that peaks; the bytes of the group that peaks; those of the delay's own group, which may
still grow; the load of the link to the special device that a special stage would share next."""
GROUP, FILL, FORWARD, BACKWARD, STASH, TRANSIENT, AHEAD, BACK = range(7, 15)
"""Columns for ``"pair"``: the special stage laid last, as a ``Side``, and the ticks from the label's boundary to
its forward and from its backward to the boundary; all 0 where there is none."""
SIDE = slice(GROUP, AHEAD)
SPECIALS = 15
"""Column of the number of special stages laid, counted where they are limited."""
STOP, PLACE, KIND, FIRST = range(16, 20)
"""Columns of the stage laid last: where it ends, the place of the label below it there, whether it is special,
and where it starts, which is the boundary of the label."""
CAME_FROM = slice(STOP, FIRST)
NUM_COLUMNS = 20
Labels = NDArray[np.int64]
"""Labels as integers, indexed [column, label]."""
Places = NDArray[np.intp]
"""Places of labels at their boundary."""
STEPS_PER_LABEL = 30
"""Steps per label of the recurrence that bounds completions: as fine as the labels made so far are worth."""
MOST_PAIRS = 500_000
"""Most pairs looked at together: of a label and where its next stage begins, or of two labels."""
MOST_ROWS = 64
"""Labels that others are compared with at a time: what these dominate is not compared again."""


@dataclass(frozen=True, slots=True)
class Special:
    """Result of a search for one special device."""

    placement: Placement | None
    bound: int | None
    """Lower bound on the period by the estimate, in ticks. None: nothing that was asked for exists."""


def best_special(
    problem: Problem, estimate: Estimate, shorter_than: int | None, most_specials: int | None = None
) -> Special:
    """Find the allocation that the estimate calls best among those with a period below ``shorter_than`` ticks.

    The bound holds for every schedule of every allocation with one special device, or, where ``most_specials`` is
    given, of those with no more stages there; under ``"safe"`` it does not. Where the deadline passes, the
    placement is the best so far.
    """
    search = SpecialSearch(problem, estimate, most_specials)
    most = problem.longest_period if shorter_than is None else shorter_than - 1
    bound = math.ceil(lower_bound(problem))
    if most < bound:
        return Special(None, None)
    try:
        # Found is Placement, which mypy takes to be Placement | None.
        placement, period = narrow(search.decide, search.snap, None, most + 1, bound)  # type: ignore[arg-type]
        return Special(placement, None if placement is None else period)
    except DeadlinePassed:
        return Special(search.best, max(bound, search.bound))


class SpecialSearch:
    """Decision whether some allocation with one special device fits at a period, by one of the estimates."""

    def __init__(self, problem: Problem, estimate: Estimate, most_specials: int | None = None) -> None:
        self.problem = problem
        self.most_specials = most_specials
        self.estimate: Estimate = estimate
        self.counts_peak = estimate != "safe"
        self.best: Placement | None = None
        self.bound = 0
        """First period, in ticks, that is not decided to be too short."""
        self.num_layers = problem.chain.num_layers
        self.max_normals = problem.platform.num_devices - 1
        times, table = problem.times, problem.table
        self.loads = np.maximum(times.compute[None, :] - times.compute[:, None], 0)
        self.transfer = times.round_trip
        self.forward, self.backward, self.one_way = times.forward, times.backward, times.one_way
        self.room = table.max_in_flight
        # Weights are rounded up once per device, not per stage: in fractions of a byte their sums are exact.
        copies = Fraction(str(problem.platform.weight_copies))
        memory = max(0, problem.platform.memory_bytes - problem.platform.fixed_bytes)
        unit = copies.denominator if copies.denominator * memory < 2**60 else 1
        self.memory = unit * memory

        def counted(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
            return unit * np.minimum(num_bytes, memory + 1)

        weights = table.training.in_parts_of_a_byte(unit)
        stash, part = table.with_part_of_versions(weights // unit)
        self.stash = counted(stash)
        self.transient = counted(table.transient)
        self.fixed = np.minimum(weights - unit * part, self.memory + 1) + counted(table.buffers)
        free = self.memory - self.fixed
        most = np.full_like(free, 2**40)
        np.floor_divide(free, self.stash, out=most, where=self.stash > 0)
        self.most_counted = np.where((free < 0) | ~table.is_stage, -1, most)
        """Most micro-batches of one special stage that the estimate may count; [k, l] for layers k to l."""

    def snap(self, placement: Placement, period: int) -> int:
        """Return the least period of an allocation that was found at ``period``, in ticks."""
        self.best = placement
        least = Road(self.problem, placement).shortest_that_may_fit(self.estimate)
        return period if least is None else min(least, period)  # None: a byte of rounded weights too much

    def decide(self, period: int) -> Placement | None:
        """Return some allocation that fits, or None where there is none.

        Raises:
            DeadlinePassed: the deadline passed before that was known.
        """
        boundaries = self._labels(period, everything=None)
        if boundaries is None:
            self.bound = max(self.bound, period + 1)
            return None
        return self._trace(boundaries, 0)

    def some(self, period: int) -> list[Placement]:
        """Return the allocations that fit and that no other one dominates; none where the deadline passes."""
        try:
            boundaries = self._labels(period, everything=None)
        except DeadlinePassed:
            return []
        return [self._trace(boundaries, place) for place in range(boundaries[0].shape[1])] if boundaries else []

    def all(self, period: int, limit: int) -> list[Placement] | None:
        """Return every allocation that fits; None where that takes more than ``limit`` labels, or too long."""
        try:
            boundaries = self._labels(period, everything=None, to_the_end=True)
            if boundaries is None:
                return []
            boundaries = self._labels(period, everything=limit, dead=self._dead(boundaries, period))
            if boundaries is None:
                return []
            if not boundaries:
                return None
            found = []
            for place in range(boundaries[0].shape[1]):
                self.problem.deadline.check()
                found.append(self._trace(boundaries, place))
            return found
        except DeadlinePassed:
            return None

    def _dead(self, boundaries: dict[int, Labels], period: int) -> dict[int, Labels]:
        """Return the labels that nothing completes; what they dominate is dead, too.

        Args:
            boundaries: all labels that no other one dominates, by boundary.
        """
        completion = Completion(self, period)
        dead: dict[int, Labels] = {}
        for stop in sorted(boundaries):
            labels = boundaries[stop]
            alive = np.full(labels.shape[1], stop == 0)
            if stop:
                for made in self._in_parts(labels, stop, period, completion):
                    for first, part in _by_first(made):
                        alive[self._living(part, dead.get(first), period)[PLACE]] = True
            dead[stop] = labels[:, ~alive]
        return dead

    def _living(self, labels: Labels, dead: Labels | None, period: int) -> Labels:
        """Return the labels of a boundary that no dead one dominates."""
        if dead is None or not dead.size:
            return labels
        known = _Measures(dead, period + 1)
        step = max(1, MOST_PAIRS // dead.shape[1])
        living = []
        for begin in range(0, labels.shape[1], step):
            self.problem.deadline.check()
            some = labels[:, begin : begin + step]
            these = _Measures(some, period + 1)
            dominated = known.dominate(np.arange(dead.shape[1]), these, np.arange(some.shape[1])).any(axis=0)
            living.append(some[:, ~dominated])
        return np.concatenate(living, axis=1)

    def _trace(self, boundaries: dict[int, Labels], place: int) -> Placement:
        cuts, devices, boundary = [0], [], 0
        while boundary < self.num_layers:
            boundary, place, special = boundaries[boundary][CAME_FROM, place].tolist()
            cuts.append(boundary)
            devices.append(0 if special else len(cuts))  # a number of its own for every normal stage
        return Placement.of(cuts, devices)

    def _labels(
        self,
        period: int,
        everything: int | None,
        *,
        to_the_end: bool = False,
        dead: dict[int, Labels] | None = None,
    ) -> dict[int, Labels] | None:
        """Return the labels of each boundary; None where none reaches layer 0, empty where too many.

        Args:
            everything: the most labels, dominated or not; None: only those that no other one dominates.
            to_the_end: make all of those, and not only until one reaches the beginning.
            dead: labels that nothing completes.
        """
        size, deadline = self.num_layers, self.problem.deadline
        completion = Completion(self, period)
        start = np.zeros((NUM_COLUMNS, 1), dtype=np.int64)
        start[DELAY], start[FIRST] = period + 1, size
        waiting = {size: [start]} if self._completable(start, completion).size else {}
        known: dict[int, Labels] = {}
        total = 0
        for stop in range(size, 0, -1):
            if stop not in waiting or self.transfer[stop] > period:
                continue
            labels = np.concatenate(waiting.pop(stop), axis=1)
            if completion.refine(total * STEPS_PER_LABEL):
                labels = self._completable(labels, completion)
            if everything is None:
                labels = labels[:, _undominated(labels, period + 1, deadline)]
            known[stop] = labels
            for made in self._in_parts(labels, stop, period, completion):
                total += made.shape[1]
                if everything is not None and total > everything:
                    return {}
                for first, part in _by_first(made):
                    living = part if dead is None else self._living(part, dead.get(first), period)
                    waiting.setdefault(first, []).append(living)
            if everything is None and not to_the_end and 0 in waiting:
                break
        if 0 not in waiting:
            return None
        known[0] = np.concatenate(waiting[0], axis=1)
        return known

    def _in_parts(self, labels: Labels, stop: int, period: int, completion: Completion) -> Iterator[Labels]:
        """Yield what ``_extended`` makes of a few labels at a time, so that its tables stay small."""
        step = max(1, MOST_PAIRS // stop)
        for begin in range(0, labels.shape[1], step):
            made = self._extended(labels[:, begin : begin + step], stop, period, completion)
            made[PLACE] += begin
            yield made
            self.problem.deadline.check()

    def _extended(self, labels: Labels, stop: int, period: int, completion: Completion) -> Labels:
        """Return the labels with one more stage, on a normal or the special device, that may be completed."""
        base, transfer, lowest = period + 1, int(self.transfer[stop]), int(completion.first[stop])
        group, fill = np.divmod(labels[DELAY], base)
        opens = fill + transfer > period
        group, fill = group + opens, np.where(opens, transfer, fill + transfer)
        current = np.where(opens, 0, labels[CURRENT])

        load = self.loads[lowest:stop, stop]
        opens = fill[:, None] + load > period
        group = group[:, None] + opens
        fill = np.where(opens, load, fill[:, None] + load)
        counted = group - 1 if self.counts_peak else group
        normal = (labels[USED] < self.max_normals)[:, None] & (group <= self.room[lowest:stop, stop])
        special = (
            (labels[LINK] + transfer <= period)[:, None]
            & (labels[LOAD][:, None] + load <= period)
            & (counted <= self.most_counted[lowest:stop, stop])
        )
        if self.most_specials is not None:
            special &= (labels[SPECIALS] < self.most_specials)[:, None]

        kind, place, first = np.array([normal, special]).nonzero()
        made = labels[:, place]
        made[DELAY] = group[place, first] * base + fill[place, first]
        made[CURRENT] = np.where(opens[place, first], 0, current[place])
        made[STOP], made[PLACE], made[KIND], made[FIRST] = stop, place, kind, first + lowest
        num_normal = int(np.count_nonzero(kind == 0))
        self._on_normal(made[:, :num_normal], transfer, period)
        self._on_special(made[:, num_normal:], stop, counted[place[num_normal:], first[num_normal:]], period)
        made = self._completable(made, completion)
        return self._paired(made, stop, period) if self.estimate == "pair" else made

    def _on_normal(self, made: Labels, transfer: int, period: int) -> None:
        made[USED] += 1
        made[LINK] = np.where(made[LINK] > period, transfer, 0)  # this boundary loads a special stage's link

    def _on_special(self, made: Labels, stop: int, counted: NDArray[np.int64], period: int) -> None:
        first = made[FIRST]
        made[LOAD] += self.loads[first, stop]
        made[KEPT] += self.fixed[first, stop] + counted * self.stash[first, stop]
        peak = self.transient[first, stop]
        if self.counts_peak:
            made[CURRENT] = self.stash[first, stop] + np.maximum(made[CURRENT], peak)
            peak = made[CURRENT]
        made[PEAK] = np.maximum(made[PEAK], peak)
        made[LINK] = period + 1
        if self.most_specials is not None:
            made[SPECIALS] += 1

    def _completable(self, labels: Labels, completion: Completion) -> Labels:
        used, delay, load, kept, peak = labels[:CURRENT]
        kept = kept + peak
        possible = completion.possible(used, delay, load, kept, labels[FIRST], labels[KIND])
        return labels[:, possible & (kept <= self.memory)]

    def _paired(self, made: Labels, stop: int, period: int) -> Labels:
        """Return the labels whose new special stage has room beside the one laid before it."""
        first = made[FIRST]
        forward, backward = (ticks[stop] - ticks[first] for ticks in (self.forward, self.backward))
        made[AHEAD] += self.one_way[stop] + forward
        made[BACK] += self.one_way[stop] + backward
        made[AHEAD : BACK + 1, made[GROUP] == 0] = 0
        special = np.flatnonzero(made[KIND])
        values, first = made[:, special], first[special]
        group, fill = np.divmod(values[DELAY], period + 1)
        new = Side(
            group, fill, forward[special], backward[special], self.stash[first, stop], self.transient[first, stop]
        )
        room = self.memory - values[KEPT]
        fits = may_share(period, room, new, Side(*values[SIDE]), values[AHEAD], values[BACK])
        values[SIDE] = new.group, new.fill, new.forward, new.backward, new.stash, new.transient
        values[[AHEAD, BACK]] = 0
        made[:, special] = values
        kept = np.ones(made.shape[1], dtype=bool)
        kept[special] = fits
        return made[:, kept]


def _by_first(labels: Labels) -> Iterator[tuple[int, Labels]]:
    """Yield each boundary and its labels."""
    if labels.size:
        labels = labels[:, labels[FIRST].argsort(kind="stable")]
        firsts = labels[FIRST]
        begins = [0, *(np.flatnonzero(firsts[1:] != firsts[:-1]) + 1).tolist()]
        for begin, end in pairwise([*begins, len(firsts)]):
            yield int(firsts[begin]), labels[:, begin:end]


class _Measures:
    """Measures by which the labels of a boundary are compared.

    A group that may still grow counts only against labels of the same group: one that is a group behind pays for
    every further stage what the other one may add to its group. For the last special stage, all sums count that
    ``may_share`` compares with a period; stages of different groups are not compared.
    """

    def __init__(self, values: Labels, base: int) -> None:
        self.group, self.current, self.last_group = values[DELAY] // base, values[CURRENT], values[GROUP]
        self.others = values[[USED, DELAY, LOAD, KEPT, PEAK, LINK, SPECIALS]]
        self.paired = bool(self.last_group.any())
        if self.paired:
            fill, forward, backward, ahead, back = values[[FILL, FORWARD, BACKWARD, AHEAD, BACK]]
            both = forward + backward
            sums = (fill, fill + ahead, fill + back, fill + ahead + back, both, both + ahead, both + back,
                    forward + ahead, backward + back)  # fmt: skip
            self.others = np.concatenate([self.others, values[[STASH, TRANSIENT]], sums])

    def dominate(self, one: Places, those: _Measures, other: Places) -> NDArray[np.bool_]:
        """Return, as entry [one, other], whether a label is at least as good as another one in everything."""
        one, other = one[:, None], other[None]
        rows = min(len(self.others), len(those.others))  # without a last special stage, fewer rows are compared
        better: NDArray[np.bool_] = (self.group[one] < those.group[other]) | (
            self.current[one] <= those.current[other]
        )
        better &= (self.others[:rows, one] <= those.others[:rows, other]).all(axis=0)
        if self.paired:
            better &= (self.last_group[one] == 0) | (self.last_group[one] == those.last_group[other])
        return better


def _undominated(values: Labels, base: int, deadline: Deadline) -> Places:
    """Return the places of the labels to keep: none of them dominates another one."""
    size = values.shape[1]
    if size < 2:
        return np.arange(size)
    order = np.lexsort(values[[LINK, CURRENT, PEAK, KEPT, LOAD, USED, DELAY]])  # dominating labels come first
    measures = _Measures(values[:, order], base)
    kept = np.ones(size, dtype=bool)
    step = max(1, min(MOST_ROWS, MOST_PAIRS // size))
    for begin in range(0, size, step):
        deadline.check()
        # Dominance is transitive: a label that is dominated may stay among those that others are compared with.
        one = begin + np.flatnonzero(kept[begin : begin + step])
        other = begin + np.flatnonzero(kept[begin:])
        worse = measures.dominate(one, measures, other) & (one[:, None] < other)
        kept[other] = ~worse.any(axis=0)
    return order[kept]
