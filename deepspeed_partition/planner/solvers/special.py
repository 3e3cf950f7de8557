"""The best allocation with one special device, under an estimate of its memory: exact, without a grid.

Every device runs one stage, but for the special one, which runs any number (MadPipe paper, section 4.2). The
paper's dynamic program has a grid for the special device's load and memory and for the delay. Here, for a
decision at a period T, the allocations of layers l and on are *labels*, and only those are kept that no other one
dominates:

    normals used, delay of 1F1B*, load and bytes of the special device, load of the link that it shares

Stages are laid from the end of the chain; each label becomes, for every k < l, one whose next stage [k, l) is on
a normal device, and one where it is on the special device. All costs are monotone in the labels, so dominance
loses nothing. A label is dropped early where even a relaxed completion has too little load or memory left, for a
few weights between the two (``completion.py``). Bisection over T is that of ``contiguous.py``. Stages that follow
one another on a device are one stage, and a normal stage between two special ones loads one link with both cuts.

The memory of the special device depends on the schedule, so it is estimated:

- ``"peak"``, a lower bound: what ``Road.bytes_at_least`` counts. No schedule of a shorter period exists.
- ``"pair"``, a better one: in addition, special stages that follow one another have room (``pairs.py``).
- ``"safe"``: all forwards in a row, then all backwards, ``sum g_i s_i``: allocations easy to schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.completion import MOST_STEPS, MOST_STEPS_OF_ALL, Completion
from deepspeed_partition.planner.solvers.contiguous import lower_bound_ticks, narrow
from deepspeed_partition.planner.solvers.pairs import Side, may_share
from deepspeed_partition.planner.solvers.problem import Problem
from deepspeed_partition.planner.solvers.road import Estimate, Placement, Road

USED, DELAY, LOAD, KEPT, PEAK, CURRENT, LINK = range(7)
"""The columns of a label: the normals used; the delay as ``group * (T + 1) + fill``; load and bytes of the special
device without the group that peaks; the bytes of the group that peaks; those of the delay's own group, which may
still grow; the load of the link to the special device that a special stage would share next."""
GROUP, FILL, FORWARD, BACKWARD, STASH, TRANSIENT, AHEAD, BACK = range(7, 15)
"""For ``"pair"``: the special stage laid last, as a ``Side``, and the ticks from the label's boundary to its
forward and from its backward to the boundary; all 0 where there is none."""
SIDE = slice(GROUP, AHEAD)
SPECIALS = 15
"""Special stages laid, counted where they are limited."""
NUM_COLUMNS = 16
MOST_PAIRS = 500_000
"""Of a label and where its next stage begins, looked at together."""


@dataclass(frozen=True, slots=True)
class Special:
    """What a search for one special device found."""

    placement: Placement | None
    bound: int | None
    """Ticks: the estimate allows no shorter period. None: none that was asked for."""


def best_special(
    problem: Problem, estimate: Estimate, shorter_than: int | None, most_specials: int | None = None
) -> Special:
    """The allocation that the estimate calls best among those with a period below ``shorter_than``.

    But under ``"safe"`` the bound holds for every schedule of every allocation with one special device, or, where
    ``most_specials`` is given, of those with no more stages there. Where the deadline passes, the placement is the
    best so far.
    """
    search = SpecialSearch(problem, estimate, most_specials)
    most = problem.longest_period if shorter_than is None else shorter_than - 1
    bound = lower_bound_ticks(problem.times, problem.platform.num_devices)
    if most < bound:
        return Special(None, None)
    try:
        first = search.decide(most)
        if first is None:
            return Special(None, None)
        return Special(*narrow(search.decide, search.snap, first, search.snap(first, most), bound))
    except DeadlinePassed:
        return Special(search.best, max(bound, search.bound))


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels of one boundary; a row of ``values`` for each column."""

    values: NDArray[np.int64]
    came_from: NDArray[np.int64]
    """[boundary above which the label was, its place there, whether the stage between is special]"""

    @property
    def size(self) -> int:
        return int(self.values.shape[1])

    def pick(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> _Labels:
        return _Labels(self.values[:, chosen], self.came_from[:, chosen])


class SpecialSearch:
    """Decides whether some allocation with one special device fits at a period, by one of the estimates."""

    def __init__(self, problem: Problem, estimate: Estimate, most_specials: int | None = None) -> None:
        self.problem = problem
        self.most_specials = most_specials
        self.estimate: Estimate = estimate
        self.counts_peak = estimate != "safe"
        self.best: Placement | None = None
        self.bound = 0
        """The first period that is not decided to be too short."""
        self.num_layers = problem.chain.num_layers
        self.max_normals = problem.platform.num_devices - 1
        times, table = problem.times, problem.table
        self.loads = np.maximum(times.compute[None, :] - times.compute[:, None], 0)
        self.transfer = times.round_trip
        self.forward, self.backward, self.one_way = times.forward, times.backward, times.one_way
        self.room = table.max_in_flight
        # Weights are rounded up once per device, not per stage: in fractions of a byte their sums are exact.
        copies = Fraction(str(problem.platform.weight_copies))
        memory = problem.platform.memory_bytes
        unit = copies.denominator if copies.denominator * memory < 2**60 else 1
        self.memory = unit * memory

        def counted(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
            return unit * np.minimum(num_bytes, memory + 1)

        prefix = np.cumsum([0, *(layer.weight_bytes for layer in problem.chain.layers)]).astype(object)
        weights = (prefix[None, :] - prefix[:, None]) * copies.numerator * unit // copies.denominator
        self.stash = counted(table.stash)
        self.transient = counted(table.transient)
        self.fixed = np.clip(weights, 0, self.memory + 1).astype(np.int64) + counted(table.buffers)
        free = self.memory - self.fixed
        most = np.full_like(free, 2**40)
        np.floor_divide(free, self.stash, out=most, where=self.stash > 0)
        self.most_counted = np.where((free < 0) | ~table.is_stage, -1, most)
        """[k, l]: the most micro-batches of one special stage that the estimate may count."""

    def snap(self, placement: Placement, period: int) -> int:
        """The least period of an allocation that was found at ``period``."""
        self.best = placement
        least = Road(self.problem, placement).shortest_that_may_fit(self.estimate)
        return period if least is None else min(least, period)  # None: a byte of rounded weights too much

    def decide(self, period: int) -> Placement | None:
        """Some allocation that fits, or None where there is none.

        Raises:
            DeadlinePassed: before that is known.
        """
        boundaries = self._labels(period, everything=None)
        if boundaries is None:
            self.bound = max(self.bound, period + 1)
            return None
        return self._trace(boundaries, 0)

    def all(self, period: int, limit: int) -> list[Placement] | None:
        """Every allocation that fits; None where that takes more than ``limit`` labels, or too long."""
        try:
            boundaries = self._labels(period, everything=limit)
            if boundaries is None:
                return []
            if not boundaries:
                return None
            found = []
            for place in range(boundaries[0].size):
                self.problem.deadline.check()
                found.append(self._trace(boundaries, place))
            return found
        except DeadlinePassed:
            return None

    def _trace(self, boundaries: dict[int, _Labels], place: int) -> Placement:
        cuts, devices, boundary = [0], [], 0
        while boundary < self.num_layers:
            boundary, place, special = boundaries[boundary].came_from[:, place].tolist()
            cuts.append(boundary)
            devices.append(0 if special else len(cuts))  # a number of its own for every normal stage
        return Placement.of(cuts, devices)

    def _labels(self, period: int, everything: int | None) -> dict[int, _Labels] | None:
        """The labels of each boundary; None where none reaches the beginning, empty where they are too many."""
        size, deadline = self.num_layers, self.problem.deadline
        base = period + 1
        completion = Completion(self, period, MOST_STEPS if everything is None else MOST_STEPS_OF_ALL)
        start = np.zeros((NUM_COLUMNS, 1), dtype=np.int64)
        start[DELAY] = base
        known = {size: _Labels(start, np.zeros((3, 1), dtype=np.int64))}
        waiting: dict[int, list[_Labels]] = {}
        total = 0
        for stop in range(size, 0, -1):
            if stop < size:
                arrived = waiting.pop(stop, [])
                if not arrived or self.transfer[stop] > period:
                    continue
                labels = _joined(arrived)
                if everything is None:
                    labels = labels.pick(_undominated(labels.values, base, deadline))
                known[stop] = labels
            for made in self._in_parts(known[stop], stop, period, completion):
                if not made.size:
                    continue
                total += made.size
                if everything is not None and total > everything:
                    return {}
                order = np.argsort(made.came_from[3], kind="stable")
                firsts = made.came_from[3, order]
                edges = np.flatnonzero(np.diff(firsts, prepend=-1))
                for begin, end in zip(edges, [*edges[1:], len(order)], strict=True):
                    part = made.pick(order[begin:end])
                    waiting.setdefault(int(firsts[begin]), []).append(_Labels(part.values, part.came_from[:3]))
            if everything is None and 0 in waiting:
                break
        if 0 not in waiting:
            return None
        known[0] = _joined(waiting[0])
        return known

    def _in_parts(self, labels: _Labels, stop: int, period: int, completion: Completion) -> Iterator[_Labels]:
        """What ``_extended`` makes of so few labels at a time that its tables stay small."""
        step = max(1, MOST_PAIRS // stop)
        for begin in range(0, labels.size, step):
            part = labels.pick(np.arange(begin, min(begin + step, labels.size)))
            for made in self._extended(part, stop, period, completion):
                made.came_from[1] += begin
                yield made
            self.problem.deadline.check()

    def _extended(self, labels: _Labels, stop: int, period: int, completion: Completion) -> Iterator[_Labels]:
        """The labels with one more stage, on a normal device or on the special one, that may be completed.

        ``came_from`` has a fourth row: where the new stage starts.
        """
        values = labels.values
        base, transfer = period + 1, int(self.transfer[stop])
        group, fill = np.divmod(values[DELAY], base)
        opens = fill + transfer > period
        group, fill = group + opens, np.where(opens, transfer, fill + transfer)
        current = np.where(opens, 0, values[CURRENT])

        load = self.loads[:stop, stop][None, :]
        opens = fill[:, None] + load > period
        group = group[:, None] + opens
        delay = group * base + np.where(opens, load, fill[:, None] + load)
        current = np.where(opens, 0, current[:, None])
        short = load <= period
        below = values[STASH] > 0
        ahead = values[AHEAD][:, None] + self.one_way[stop] + (self.forward[stop] - self.forward[:stop])
        back = values[BACK][:, None] + self.one_way[stop] + (self.backward[stop] - self.backward[:stop])

        after_special = values[LINK] > period
        normal = short & (values[USED] < self.max_normals)[:, None] & (group <= self.room[:stop, stop][None, :])
        link = np.where(after_special, transfer, 0)[:, None]
        made = self._made(
            labels, stop, normal,
            {USED: (values[USED] + 1)[:, None], DELAY: delay, CURRENT: current, LINK: link,
             AHEAD: np.where(below[:, None], ahead, 0), BACK: np.where(below[:, None], back, 0)}, special=False,
        )  # fmt: skip
        yield self._completable(made, completion)

        special_load = values[LOAD][:, None] + load
        counted = group - 1 if self.counts_peak else group
        special = (
            short
            & (values[LINK] + transfer <= period)[:, None]
            & (special_load <= period)
            & (counted <= self.most_counted[:stop, stop][None, :])
        )
        kept = (
            values[KEPT][:, None]
            + self.fixed[:stop, stop]
            + np.where(special, counted, 0) * self.stash[:stop, stop]
        )
        specials = values[SPECIALS]
        if self.most_specials is not None:
            special &= (specials < self.most_specials)[:, None]
            specials = specials + 1
        transient = self.transient[:stop, stop][None, :]
        if self.counts_peak:
            current = self.stash[:stop, stop] + np.maximum(current, transient)
            peak = np.maximum(values[PEAK][:, None], current)
        else:
            peak = np.maximum(values[PEAK][:, None], transient)
        special &= kept + peak <= self.memory
        made = self._made(
            labels, stop, special,
            {DELAY: delay, LOAD: special_load, KEPT: kept, PEAK: peak, CURRENT: current,
             LINK: np.full((1, 1), period + 1), AHEAD: ahead, BACK: back, SPECIALS: specials[:, None]},
            special=True,
        )  # fmt: skip
        made = self._completable(made, completion)
        yield self._paired(made, stop, period) if self.estimate == "pair" else made

    def _completable(self, made: _Labels, completion: Completion) -> _Labels:
        values, (_, _, special, first) = made.values, made.came_from
        kept = values[KEPT] + values[PEAK]
        after_special = bool(special.any())
        return made.pick(
            completion.possible(
                values[USED], values[DELAY], values[LOAD], kept, first, after_special=after_special
            )
        )

    def _paired(self, made: _Labels, stop: int, period: int) -> _Labels:
        """The labels whose new special stage has room beside the one laid before it."""
        values, first = made.values, made.came_from[3]
        group, fill = np.divmod(values[DELAY], period + 1)
        forward, backward = (ticks[stop] - ticks[first] for ticks in (self.forward, self.backward))
        new = Side(group, fill, forward, backward, self.stash[first, stop], self.transient[first, stop])
        room = self.memory - values[KEPT]
        fits = may_share(period, room, new, Side(*values[SIDE]), values[AHEAD], values[BACK])
        values[SIDE] = new.group, new.fill, new.forward, new.backward, new.stash, new.transient
        values[[AHEAD, BACK]] = 0
        return made.pick(fits)

    def _made(
        self,
        labels: _Labels,
        stop: int,
        chosen: NDArray[np.bool_],
        changed: dict[int, NDArray[np.int64]],
        *,
        special: bool,
    ) -> _Labels:
        place, first = np.nonzero(chosen)
        values = labels.values[:, place]
        for column, new in changed.items():
            values[column] = np.broadcast_to(new, chosen.shape)[place, first]
        came_from = np.stack([np.full_like(place, stop), place, np.full_like(place, special), first])
        return _Labels(values, came_from)


def _joined(parts: list[_Labels]) -> _Labels:
    return _Labels(
        np.concatenate([part.values for part in parts], axis=1),
        np.concatenate([part.came_from for part in parts], axis=1),
    )


def _undominated(values: NDArray[np.int64], base: int, deadline: Deadline) -> NDArray[np.intp]:
    """The labels to keep: none of them is at least as good as another one in everything.

    A group that may still grow counts only against labels of the same group: one that is a group behind pays
    for every further stage what the other one may add to its group. Of the last special stage all sums count that
    ``may_share`` compares with a period; stages of different groups do not compare.
    """
    order = np.lexsort(values[[LINK, CURRENT, PEAK, KEPT, LOAD, USED, DELAY]])  # who dominates comes first
    values = values[:, order]
    group, last_group = values[DELAY] // base, values[GROUP]
    kept = np.ones(values.shape[1], dtype=bool)
    others = values[[USED, DELAY, LOAD, KEPT, PEAK, LINK, SPECIALS]]
    if last_group.any():
        fill, forward, backward, ahead, back = values[[FILL, FORWARD, BACKWARD, AHEAD, BACK]]
        both = forward + backward
        sums = (fill, fill + ahead, fill + back, fill + ahead + back, both, both + ahead, both + back,
                forward + ahead, backward + back)  # fmt: skip
        others = np.concatenate([others, values[[STASH, TRANSIENT]], sums])
    for one in range(values.shape[1]):
        if kept[one]:
            deadline.check()
            worse = (others[:, one, None] <= others[:, one + 1 :]).all(axis=0)
            worse &= (group[one] < group[one + 1 :]) | (values[CURRENT, one] <= values[CURRENT, one + 1 :])
            if last_group[one]:
                worse &= last_group[one] == last_group[one + 1 :]
            kept[one + 1 :] &= ~worse
    return order[kept]
