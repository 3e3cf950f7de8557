"""The shortest pattern of a few micro-batches of one contiguous partition, by a constraint program: exact.

Variables: the length T; each operation begins at ``k T + t`` with 0 <= t < T; and whether a stage keeps a
micro-batch or recomputes it, by an operation of its own. On each device and link, operations at t and again at
t + T do not overlap. At an instant x of the pattern, what lasts from ``k T + t`` to ``l T + u`` is there
``l - k + [t <= x] - [u <= x]`` times, so the bytes of a device are a reservoir that these events fill and empty.
Micro-batches are all alike: they are numbered as they begin, and the first one begins with the pattern.

Tensors that wait beyond the reserved buffers take no bytes here, and times and bytes that need too many digits are
rounded down; and where the backward may be two operations, it always is, the second of them with no more bytes
than the stash and no more time than a whole backward leaves: the optimum is a lower bound of patterns of so many
micro-batches, and a pattern that is found counts only as it is retimed and counted (``cyclic_pattern.py``).

Method: constraint programming with clause learning (CP-SAT of OR-tools); not in the papers. Cost: exponential.
OR-tools is an extra (``madpipe[exact]``) and imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from deepspeed_partition.planner.solvers.constraint_program import minimized, unit_of
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicRoad, Key, Orders

TIME_STEPS, BYTE_STEPS = 2**22, 2**20
"""Largest numbers of units of time and of bytes."""


@dataclass(frozen=True, slots=True)
class SolvedPattern:
    """Answer for one partition and number of micro-batches."""

    bound: int
    """Ticks of the road's clock; no pattern of so many micro-batches has a shorter length. 0: nothing is known."""
    orders: Orders | None
    """The pattern that was found; None where none was."""
    is_optimal: bool = False
    """Whether the bound is the length of what was found, or nothing shorter than was asked for exists."""


class CyclicProgram:
    """Constraint program of the pattern of one contiguous partition.

    Args:
        road: the partition, and the number of micro-batches.
        recomputes: allow stages to recompute micro-batches.
        most_periods: how many lengths a micro-batch may be on its way.
    """

    def __init__(self, road: CyclicRoad, *, recomputes: bool, most_periods: int = 0) -> None:
        from ortools.sat.python import cp_model

        self.road = road
        self.model: Any = cp_model.CpModel()
        # A whole backward is a first half with the second one right behind it, whose result is sent on earlier.
        self.backward = [
            first if splits else whole
            for first, whole, splits in zip(road.first_half, road.backward, road.may_split, strict=True)
        ]
        self.later = [
            max(0, min(second, whole - first)) if splits else 0
            for second, whole, first, splits in zip(
                road.second_half, road.backward, road.first_half, road.may_split, strict=True
            )
        ]
        times = [*road.forward, *self.backward, *self.later, *road.one_way]
        total = sum(2 * each for each in road.forward) + sum(road.backward) + 2 * sum(road.one_way)
        self.unit = unit_of(times, total * road.number, TIME_STEPS)
        self.longest = total * road.number // self.unit + 1
        self.most_periods = most_periods or road.num_stages + 2
        self.length: Any = self.model.new_int_var(1, self.longest, "")
        self.begins: dict[Key, Any] = {}
        self.periods: dict[Key, Any] = {}
        self.when: dict[Key, Any] = {}
        """Begin of each operation, as an instant; its place in the pattern and the lengths before it make it."""
        self.ends: dict[Key, tuple[Any, Any]] = {}
        self.keeps: dict[tuple[int, int], Any] = {}
        self.users: dict[object, list[Any]] = {}
        self.recomputes = recomputes
        for number in range(road.number):
            self._add_path(number)
        for spans in self.users.values():
            self.model.add_no_overlap(spans)
        for stage in range(road.num_stages):
            self._add_memory(stage)
            self.model.add(
                self.length
                >= sum(
                    self._units(road.forward[stage]) * (2 - self.keeps[stage, number])
                    + self._units(self.backward[stage])
                    + self._units(self.later[stage])
                    for number in range(road.number)
                )
            )
        first = [self.begins["F", 0, number] for number in range(road.number)]
        self.model.add(first[0] == 0)
        for one, other in pairwise(first):
            self.model.add(one < other if road.forward[0] else one <= other)
        self.model.minimize(self.length)

    def solve(self, shorter_than: int, seconds: float) -> SolvedPattern:
        """Return the shortest pattern, if it is shorter than ``shorter_than`` ticks, and a lower bound.

        Args:
            seconds: the most seconds that this takes.
        """
        limit = (shorter_than - 1) // self.unit + 1
        found = minimized(self.model, self.length, limit, seconds)
        if found.solver is None:
            return SolvedPattern(
                shorter_than if found.is_optimal else found.bound * self.unit, None, found.is_optimal
            )
        return SolvedPattern(found.bound * self.unit, self._orders(found.solver), found.is_optimal)

    def _orders(self, solver: Any) -> Orders:
        length = solver.value(self.length)
        begins: dict[Key, int] = {}
        for key, begin in self.begins.items():
            kind, stage, number = key
            if kind[0] == "S":
                continue
            keeps = solver.value(self.keeps[stage, number])
            if kind == "R" and keeps:
                continue
            name = "f" if kind == "F" and not keeps else kind
            if kind == "B" and self.road.may_split[stage]:
                name = "I"
            begins[name, stage, number] = solver.value(begin) + solver.value(self.periods[key]) * length
        road = self.road
        forward, backward = ([self._units(each) for each in times] for times in (road.forward, road.backward))
        first_half = [self._units(each) for each in self.backward]
        return Orders(length, road.number, begins, forward, backward, first_half)

    def _units(self, ticks: int) -> int:
        return ticks // self.unit

    def _size(self, key: Key) -> int:
        """Return the units of an operation; ``B`` of a stage with halves stands for its first half."""
        kind, stage, _ = key
        ticks = {"B": self.backward, "W": self.later}.get(kind)
        return self._units(self.road.duration(key) if ticks is None else ticks[stage])

    def _add_path(self, number: int) -> None:
        road, model = self.road, self.model
        stages = range(road.num_stages)
        path: list[Key] = []
        for stage in stages:
            path += [("F", stage, number), *([("SF", stage, number)] if stage + 1 < road.num_stages else [])]
        for stage in reversed(stages):
            path += [("B", stage, number), *([("SB", stage - 1, number)] if stage else [])]
        for stage in stages:
            may = self.recomputes and road.may_recompute[stage]
            self.keeps[stage, number] = model.new_bool_var("") if may else model.new_constant(1)
        for key in path:
            self._add(key)
        for before, after in pairwise(path):
            model.add(self.when[after] >= self.when[before] + self._size(before))
        for stage in stages:
            if road.may_split[stage]:
                first, later = ("B", stage, number), ("W", stage, number)
                self._add(later)
                model.add(self.when[later] >= self.when[first] + self._size(first))
            if not (self.recomputes and road.may_recompute[stage]):
                continue
            again = ("R", stage, number)
            runs = self.keeps[stage, number].negated()
            self._add(again, runs)
            size = self._units(road.forward[stage])
            model.add(self.when[again] >= self.when["F", stage, number] + size).only_enforce_if(runs)
            model.add(self.when["B", stage, number] >= self.when[again] + size).only_enforce_if(runs)
            model.add(self.begins[again] == 0).only_enforce_if(runs.negated())
            model.add(self.periods[again] == 0).only_enforce_if(runs.negated())

    def _add(self, key: Key, runs: Any = None) -> None:
        """Add an operation, and what it occupies in the pattern and, once more, in the next one."""
        model, road = self.model, self.road
        begin = model.new_int_var(0, self.longest, "")
        is_first = key[0] == "F" and key[1] == 0
        periods = model.new_int_var(0, 0 if is_first else self.most_periods, "")
        model.add(begin <= self.length - 1)
        self.begins[key], self.periods[key] = begin, periods
        before = model.new_int_var(0, self.longest * self.most_periods, "")
        model.add_multiplication_equality(before, [periods, self.length])
        self.when[key] = before + begin
        size = self._size(key)
        following = model.new_int_var(0, 2 * self.longest, "")
        model.add(following == begin + self.length)
        for each in (begin, following):
            if runs is None:
                span = model.new_fixed_size_interval_var(each, size, "")
            else:
                span = model.new_optional_fixed_size_interval_var(each, size, runs, "")
            for resource in road.resources(key):
                self.users.setdefault(resource, []).append(span)

    def _add_memory(self, stage: int) -> None:
        road, model = self.road, self.model
        memory = road.road.memory[stage]
        capacity = road.platform.memory_bytes - road.kept[stage]
        ends = [road.sent[each] for each in (stage - 1, stage) if 0 <= each < road.num_stages - 1]
        capacity -= road.platform.comm_buffers * sum(ends)
        if capacity < 0 or memory.floor > road.platform.memory_bytes:
            model.add_bool_or([])
            return
        stays = min(road.stash[stage], road.weight_stash[stage])
        sizes = [road.stash[stage], road.input[stage], road.transient[stage], road.passing[stage], capacity]
        if road.stash[stage] * road.number * (self.most_periods + 1) + max(sizes[2:4]) <= capacity:
            return
        unit = unit_of([*sizes, stays], capacity, BYTE_STEPS)
        stays //= unit
        stash, bytes_in, transient, passing, room = (each // unit for each in sizes)
        times: list[Any] = []
        changes: list[Any] = []
        actives: list[Any] = []
        base: list[Any] = []

        def hold(since: Key, ended: bool, until: Key, ends: bool, size: int, active: Any) -> None:
            """Hold ``size`` from an edge of one operation to an edge of another, where ``active``."""
            if not size:
                return
            edges = []
            for key, at_end in ((since, ended), (until, ends)):
                edges.append(self._edge(key, active) if at_end else (self.begins[key], self.periods[key]))
            (begin, first), (end, last) = edges
            for time, change in ((begin, size), (end, -size)):
                times.append(time)
                changes.append(change)
                actives.append(active)
            whole = model.new_int_var(-1, self.most_periods + 1, "")
            model.add(whole == last - first).only_enforce_if(active)
            model.add(whole == 0).only_enforce_if(active.negated())
            base.append(size * whole)

        always = model.new_constant(1)
        for number in range(road.number):
            keeps = self.keeps[stage, number]
            forward, again, back = ("F", stage, number), ("R", stage, number), ("B", stage, number)
            may, splits = self.recomputes and road.may_recompute[stage], road.may_split[stage]
            hold(forward, False, back, not splits, stash, keeps if may else always)
            if splits:
                later = ("W", stage, number)
                hold(back, False, later, True, stays, always)
                hold(later, False, later, True, transient, always)
            if may:
                hold(again, False, back, not splits, stash, keeps.negated())
                hold(forward, True, again, False, bytes_in, keeps.negated())
                hold(forward, False, forward, True, passing, keeps.negated())
                hold(again, False, again, True, transient, keeps.negated())
            hold(forward, False, forward, True, transient, keeps if may else always)
            hold(back, False, back, True, transient, always)
        if not base:
            return
        # What is there at instant 0, before anything begins or ends.
        level = model.new_int_var(0, room, "")
        model.add(level == sum(base))
        self._reservoir(times, changes, actives, level, room)

    def _edge(self, key: Key, active: Any) -> tuple[Any, Any]:
        """Return when an operation ends, as a place in the pattern and a number of periods."""
        model, size = self.model, self._size(key)
        known = self.ends
        if key not in known:
            at, more = model.new_int_var(0, self.longest, ""), model.new_bool_var("")
            model.add(at <= self.length - 1)
            model.add(at == self.begins[key] + size - self.length).only_enforce_if(more)
            model.add(at == self.begins[key] + size).only_enforce_if(more.negated())
            model.add(self.begins[key] + size >= self.length).only_enforce_if(more)
            model.add(self.begins[key] + size <= self.length - 1).only_enforce_if(more.negated())
            known[key] = at, self.periods[key] + more
        return known[key]

    def _reservoir(self, times: list[Any], changes: list[int], actives: list[Any], level: Any, room: int) -> None:
        """Keep the level within ``room`` at the time of each event that fills.

        Events at one instant count together.
        """
        model = self.model
        for one, change in enumerate(changes):
            if change < 0:
                continue
            terms = [level]
            for other, size in enumerate(changes):
                literal = model.new_bool_var("")
                model.add(times[other] <= times[one]).only_enforce_if(literal)
                model.add(times[other] > times[one]).only_enforce_if(literal.negated())
                both = model.new_bool_var("")
                model.add_bool_and([literal, actives[other]]).only_enforce_if(both)
                model.add_bool_or([literal.negated(), actives[other].negated(), both])
                terms.append(size * both)
            model.add(sum(terms) <= room).only_enforce_if(actives[one])
