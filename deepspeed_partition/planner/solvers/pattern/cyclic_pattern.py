"""Patterns of several micro-batches, each of which a stage may keep or recompute, of contiguous partitions.

A pattern is held as the instant at which each operation begins on the micro-batch of its number, in ticks; it
repeats every ``length`` ticks. ``retimed`` keeps the orders of a pattern, on each device and link, and finds the
shortest length for other durations.

Method: every rule is a difference of two begins, so the least length is the largest ratio, ticks over periods, of
any cycle of rules (rounded up to a tick); exact, in integers. Not in the papers. Cost: O(E) time for each of at
most n rounds, with n operations and E < 4 n rules, for each length that is tried.

Memory depends on the order on the device alone, but for tensors that wait in buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.recomputation import passing_bytes, weight_stash_bytes
from deepspeed_partition.planner.schedule import PeriodicSchedule, PlacedOperation
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road

Key = tuple[str, int, int]
"""First letters of the name of an operation (``F``, ``f``, ``R``, ``B``, ``I``, ``W``, ``SF``, ``SB``), its stage,
or that before its boundary, and the number of its micro-batch."""
Begins = Mapping[Key, int]
Spans = list[tuple[int, int]]


class CyclicRoad:
    """Durations and bytes of a contiguous partition, on a clock for patterns of several micro-batches.

    Args:
        number: micro-batches of the patterns.
    """

    def __init__(self, problem: Problem, placement: Placement, number: int) -> None:
        assert placement.is_contiguous
        self.placement, self.number, self.platform = placement, number, problem.platform
        self.road = Road(problem, placement)
        self.num_stages = self.road.num_stages
        times = problem.times
        self.clock = Clock.of(problem.chain, problem.platform, number)
        self.scale = 10 ** (self.clock.exponent - times.clock.exponent)
        """Ticks of the problem's clock in one of this one."""
        costs = problem.stage_costs(placement)
        cuts = placement.cuts
        self.forward = [self._ticks(cost.forward) for cost in costs]
        self.backward = [self._ticks(cost.backward) for cost in costs]
        self.first_half, self.second_half = list(self.backward), [0] * self.num_stages
        """Ticks of ``I`` and ``W``; those of ``B`` and 0 for a stage without halves."""
        self.may_split = [problem.splits_backward and times.splits(*stage) for stage in pairwise(cuts)]
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            if self.may_split[stage]:
                again = costs[stage].backward - times.backward_ticks(start, stop)
                first, second = (
                    int(half[stop] - half[start]) for half in (times.backward_input, times.backward_weight)
                )
                self.first_half[stage] = self._ticks(first + again)
                self.second_half[stage] = self._ticks(second)
        self.one_way = [self._ticks(int(times.one_way[boundary])) for boundary in cuts[1:-1]]
        self.stash = [cost.stash for cost in costs]
        self.transient = [cost.transient for cost in costs]
        self.weight_stash = [
            weight_stash_bytes(problem.chain, stage) if splits else stash
            for stage, splits, stash in zip(pairwise(cuts), self.may_split, self.stash, strict=True)
        ]
        measured = [
            any(layer.running_bytes is not None for layer in problem.chain.layers[slice(*stage)])
            for stage in pairwise(cuts)
        ]
        self.input_transient = [
            transient + max(0, stash - stays) * counts
            for transient, stash, stays, counts in zip(
                self.transient, self.stash, self.weight_stash, measured, strict=True
            )
        ]
        """Bytes that ``I`` needs only while it runs."""
        self.input = [problem.chain.boundary_bytes(start) for start in cuts[:-1]]
        self.passing = [passing_bytes(problem.chain, stage) for stage in pairwise(cuts)]
        recomputation = problem.recomputation
        self.may_recompute = [
            recomputation is not None and recomputation.allows(*stage) for stage in pairwise(cuts)
        ]
        self.sent = self.road.sent_bytes
        slots = self.road.slots
        at_ends = [0, *(slots * sent for sent in self.sent), 0]
        self.kept = [
            memory.fixed - at_ends[stage] - at_ends[stage + 1] for stage, memory in enumerate(self.road.memory)
        ]
        """Bytes of each device whatever it runs, without buffers."""

    def _ticks(self, ticks: int) -> int:
        return round(Fraction(ticks, self.scale))

    def duration(self, key: Key) -> int:
        """Return the ticks of an operation."""
        kind, stage, _ = key
        if kind[0] == "S":
            return self.one_way[stage]
        ticks = {"B": self.backward, "I": self.first_half, "W": self.second_half}.get(kind, self.forward)
        return ticks[stage]

    def resources(self, key: Key) -> tuple[object, ...]:
        """Return what an operation occupies."""
        kind, stage, _ = key
        if kind[0] != "S":
            return (stage,)
        ends = (stage, stage + 1) if kind == "SF" else (stage + 1, stage)
        return self.platform.resources(*ends)

    @property
    def slots(self) -> list[int]:
        """Stashes for which each device has room beside its buffers and what runs; 0 where not for one."""
        rooms = [
            self.platform.memory_bytes - kept - max(transient, passing) - self._reserved(stage)
            for stage, (kept, transient, passing) in enumerate(
                zip(self.kept, self.transient, self.passing, strict=True)
            )
        ]
        return [
            max(0, room // stash if stash else self.num_stages)
            for room, stash in zip(rooms, self.stash, strict=True)
        ]

    @property
    def bound(self) -> Fraction:
        """Ticks of the problem's clock for each micro-batch; no pattern of the partition has a shorter period.

        For the device of each stage, with x the part of the micro-batches that it keeps: it works 2 tF + tB - x tF
        for one, and what it holds, in bytes times ticks, is in its memory. What is kept is there while all later
        stages run, and what is recomputed while the input waits. Source: the slides of ``kept_and_recomputed.py``,
        with bytes and transfers.
        """
        links = [2 * each for each in self.one_way]
        bounds = [Fraction(each) for each in (links if self.platform.duplex == "half" else self.one_way)]
        tail = 0
        for stage in reversed(range(self.num_stages)):
            forward, splits = self.forward[stage], self.may_split[stage]
            halves = self.first_half[stage] + self.second_half[stage]
            work = forward + (min(self.backward[stage], halves) if splits else self.backward[stage])
            room = self.platform.memory_bytes - self.kept[stage] - self._reserved(stage)
            alive, waits = self.stash[stage] * tail, self.input[stage] * max(0, tail - forward)
            if not self.may_recompute[stage]:
                waits = alive
            always = self.stash[stage] * forward + min(self.stash[stage], self.weight_stash[stage]) * (
                work - forward
            )

            def least(
                kept: Fraction, of: tuple[int, ...] = (forward, work, room, alive, waits, always)
            ) -> Fraction:
                again, busy, space, long, short, one = of
                held = one + kept * long + (1 - kept) * short
                return max(busy + (1 - kept) * again, held / space if space > 0 else Fraction(held > 0))

            parts = {Fraction(1), *([Fraction(0)] if self.may_recompute[stage] else [])}
            slope = alive - waits + forward * room
            if self.may_recompute[stage] and slope > 0:  # where both are equal
                parts.add(
                    min(Fraction(1), max(Fraction(0), Fraction((work + forward) * room - always - waits, slope)))
                )
            bounds.append(min(least(part) for part in parts))
            tail += forward + self.first_half[stage] + (links[stage - 1] if stage else 0)
        return Fraction(max(bounds) * self.scale)

    def _reserved(self, stage: int) -> int:
        ends = [self.sent[each] for each in (stage - 1, stage) if 0 <= each < self.num_stages - 1]
        return self.platform.comm_buffers * sum(ends)


@dataclass(frozen=True, slots=True)
class CyclicPattern:
    """Pattern of several micro-batches of a contiguous partition."""

    road: CyclicRoad
    length: int
    """Ticks of the road's clock with which the pattern repeats."""
    begins: dict[Key, int]
    """Ticks at which each operation begins; the transfers, too."""

    @property
    def placement(self) -> Placement:
        """Partition, and what its stages recompute of every micro-batch that they keep."""
        return self.road.placement

    @property
    def period(self) -> Fraction:
        """Ticks of the problem's clock for each micro-batch."""
        return Fraction(self.length * self.road.scale, self.road.number)

    def schedule(self) -> PeriodicSchedule:
        """Return the pattern in seconds, as a plan has it; micro-batches are numbered as they begin."""
        road, length, seconds = self.road, self.length, self.road.clock.seconds
        first = {key[2]: begin for key, begin in self.begins.items() if key[0] in "Ff" and key[1] == 0}
        index = {
            number: place for place, number in enumerate(sorted(first, key=lambda each: first[each] % length))
        }
        placed = []
        for key, begin in sorted(self.begins.items(), key=lambda each: (index[each[0][2]], each[1])):
            kind, stage, number = key
            shift, at = divmod(begin, length)
            placed.append(
                PlacedOperation(
                    operation=f"{kind}{stage}",
                    device=None if kind[0] == "S" else stage,
                    link=(stage, stage + 1) if kind[0] == "S" else None,
                    start_seconds=seconds(at),
                    duration_seconds=seconds(road.duration(key)),
                    shift=shift - first[number] // length,
                    index=index[number],
                )
            )
        return PeriodicSchedule(seconds(Fraction(length, road.number)), tuple(placed), road.number)

    def fits(self) -> bool:
        """Return whether every device has room for what it holds."""
        memory = self.road.platform.memory_bytes
        return all(max(self.peak(stage), each.floor) <= memory for stage, each in enumerate(self.road.road.memory))

    def peak(self, stage: int) -> int:
        """Return the most bytes of the device of a stage while the pattern runs."""
        road, begins, length = self.road, self.begins, self.length
        ends = {key: begin + road.duration(key) for key, begin in begins.items()}
        stash: Spans = []
        inputs: Spans = []
        numbers = range(road.number)
        later: Spans = []
        for number in numbers:
            splits = ("I", stage, number) in begins
            done = begins["I", stage, number] if splits else ends["B", stage, number]
            if splits:
                later.append((done, ends["W", stage, number]))
            if ("F", stage, number) in begins:
                stash.append((begins["F", stage, number], done))
            else:
                again = begins["R", stage, number]
                inputs.append((ends["f", stage, number], again))
                stash.append((again, done))
        running = [
            (key, (begin, ends[key])) for key, begin in begins.items() if key[1] == stage and key[0][0] != "S"
        ]
        waits: list[tuple[Spans, int]] = []
        for boundary in (stage - 1, stage):
            if not 0 <= boundary < road.num_stages - 1:
                continue
            down = {number: "F" if ("F", stage, number) in begins else "f" for number in numbers}
            up = {number: "B" if ("B", stage, number) in begins else "I" for number in numbers}
            if boundary == stage:
                spans = [(ends[down[n], stage, n], ends["SF", boundary, n]) for n in numbers]
                spans += [(begins["SB", boundary, n], begins[up[n], stage, n]) for n in numbers]
            else:
                spans = [(begins["SF", boundary, n], begins[down[n], stage, n]) for n in numbers]
                spans += [(ends[up[n], stage, n], ends["SB", boundary, n]) for n in numbers]
            waits.append((spans, road.sent[boundary]))
        all_begins = [span[0] for _, span in running] + [span[0] for span in inputs]
        all_begins += [span[0] for spans, _ in waits for span in spans]
        instants = np.unique(np.array(all_begins, dtype=np.int64) % length)

        def count(spans: Spans) -> NDArray[np.int64]:
            return _alive(spans, length, instants)

        total = road.kept[stage] + count(stash) * road.stash[stage] + count(inputs) * road.input[stage]
        total = total + count(later) * road.weight_stash[stage]
        for spans, num_bytes in waits:
            total = total + np.maximum(road.platform.comm_buffers, count(spans)) * num_bytes
        passing = [span for key, span in running if key[0] == "f"]
        first = [span for key, span in running if key[0] == "I"]
        others = [span for key, span in running if key[0] not in "fI"]
        transient = np.maximum(
            np.minimum(count(passing), 1) * road.passing[stage],
            np.minimum(count(others), 1) * road.transient[stage],
        )
        transient = np.maximum(transient, np.minimum(count(first), 1) * road.input_transient[stage])
        return int((total + transient).max())


def busiest_stages(pattern: CyclicPattern) -> list[int]:
    """Return the stages that recompute something, those whose devices work most first."""
    load = [0] * pattern.road.num_stages
    for key in pattern.begins:
        if key[0][0] != "S":
            load[key[1]] += pattern.road.duration(key)
    again = {key[1] for key in pattern.begins if key[0] == "R"}
    return sorted(again, key=lambda stage: -load[stage])


def _alive(spans: Spans, length: int, instants: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many spans, repeated with ``length``, contain each instant; what ends there is gone."""
    lasting = np.array([span for span in spans if span[0] < span[1]], dtype=np.int64).reshape(-1, 2)
    periods, at = np.divmod(lasting, length)
    starts, stops = np.sort(at[:, 0]), np.sort(at[:, 1])
    whole = int((periods[:, 1] - periods[:, 0]).sum())
    return whole + starts.searchsorted(instants, "right") - stops.searchsorted(instants, "right")


@dataclass(frozen=True, slots=True)
class Orders:
    """Pattern whose orders are of interest, in any unit of time, without transfers."""

    length: int
    number: int
    """Micro-batches of the pattern."""
    begins: Begins
    forward: Sequence[int]
    """Duration of a forward of each stage."""
    backward: Sequence[int]
    first_half: Sequence[int] = ()
    """Duration of ``I`` of each stage; left out where there is none."""

    def end(self, key: Key) -> int:
        """Return when an operation whose result is sent ends."""
        return self.begins[key] + {"B": self.backward, "I": self.first_half}.get(key[0], self.forward)[key[1]]


def retimed(road: CyclicRoad, orders: Orders, shorter_than: Fraction | None = None) -> CyclicPattern | None:
    """Return the shortest pattern with the orders of another one.

    Transfers of a link are in the order in which what they carry is there in the other one.

    Args:
        shorter_than: ticks of the problem's clock for each micro-batch; None is returned where no pattern with
            these orders is shorter.
    """
    nominal: dict[Key, int] = dict(orders.begins)
    for key in orders.begins:
        kind, stage, number = key
        if kind in "Ff" and stage + 1 < road.num_stages:
            nominal["SF", stage, number] = orders.end(key)
        elif kind in "BI" and stage:
            nominal["SB", stage - 1, number] = orders.end(key)
    keys = list(nominal)
    place = {key: each for each, key in enumerate(keys)}
    rules = [(place[before], place[after], 0) for before, after in _needs(nominal, road)]
    users: dict[object, list[Key]] = defaultdict(list)
    for key in keys:
        for resource in road.resources(key):
            users[resource].append(key)
    for mine in users.values():
        mine.sort(key=lambda key: (nominal[key] % orders.length, key))
        for before, after in zip(mine, [*mine[1:], mine[0]], strict=True):
            periods = nominal[before] // orders.length - nominal[after] // orders.length + (after == mine[0])
            rules.append((place[before], place[after], periods))
    durations = [road.duration(key) for key in keys]
    least = max(1, *(sum(map(road.duration, mine)) for mine in users.values()))
    most = None if shorter_than is None else shorter_than * road.number / road.scale
    found = _shortest(durations, rules, least, [Fraction(nominal[key], orders.length) for key in keys], most)
    if found is None:
        return None
    length, begins = found
    return CyclicPattern(road, length, {key: int(begin) for key, begin in zip(keys, begins, strict=True)})


def _needs(nominal: Begins, road: CyclicRoad) -> Iterator[tuple[Key, Key]]:
    """Yield which operation comes before which on the same micro-batch."""
    stages = range(road.num_stages)
    for number in range(road.number):
        path: list[Key] = [(kind, stage, number) for stage in stages for kind in ("F", "f", "SF")]
        path += [(kind, stage, number) for stage in reversed(stages) for kind in ("SB", "B", "I")]
        yield from pairwise(key for key in path if key in nominal)
        for stage in stages:
            if ("R", stage, number) in nominal:
                yield ("f", stage, number), ("R", stage, number)
                yield ("R", stage, number), ("B" if ("B", stage, number) in nominal else "I", stage, number)
            if ("I", stage, number) in nominal:
                yield ("I", stage, number), ("W", stage, number)


def _shortest(
    durations: Sequence[int],
    rules: Sequence[tuple[int, int, int]],
    least: int,
    first: Sequence[Fraction],
    most: Fraction | None,
) -> tuple[int, NDArray[np.int64]] | None:
    """Return the least length at which the rules can be kept, and begins; None where it is not below ``most``.

    Args:
        rules: ``(before, after, periods)``: what comes after begins when the other has ended, so many periods
            later.
        least: a length to begin with.
        first: begins that would be nice, in lengths: the earliest that are not before these are found.
    """
    order = sorted(rules, key=lambda rule: rule[1])
    before, after, periods = (np.array(each, dtype=np.int64) for each in zip(*order, strict=True))
    lasts = np.array(durations, dtype=np.int64)[before]
    starts = np.flatnonzero(np.diff(after, prepend=-1))
    heads = after[starts]
    length = least
    while most is None or length < most:
        begins = np.array([int(each * length) for each in first], dtype=np.int64)
        cause = np.full(len(durations), -1, dtype=np.int64)
        for round_ in range(len(durations) + 1):
            ready = begins[before] + lasts - periods * length
            latest = np.maximum.reduceat(ready, starts)
            late = latest > begins[heads]
            if not late.any():
                return length, begins
            begins[heads[late]] = latest[late]
            repeated = np.repeat(latest, np.diff(starts, append=len(after)))
            rule = np.flatnonzero(ready == repeated)
            of_head = dict(zip(after[rule].tolist(), rule.tolist(), strict=True))
            for head in heads[late].tolist():
                cause[head] = of_head[head]
            if round_ % 16 == 15 or round_ == len(durations):
                cycle = _cycle(cause, before)
                if cycle:
                    ticks, turns = int(lasts[cycle].sum()), int(periods[cycle].sum())
                    if turns <= 0:
                        return None
                    length = max(length + 1, -(-ticks // turns))
                    break
        else:
            return None
    return None


def _cycle(cause: NDArray[np.int64], before: NDArray[np.int64]) -> list[int]:
    """Return rules that make one another wait in a circle; none where there is no circle yet."""
    state = [0] * len(cause)
    for node in range(len(cause)):
        trail = []
        while state[node] == 0 and cause[node] >= 0:
            state[node] = 1
            trail.append(node)
            node = int(before[cause[node]])
        if state[node] == 1 and node in trail:
            return [int(cause[each]) for each in trail[trail.index(node) :]]
        for each in trail:
            state[each] = 2
        state[node] = 2
    return []
