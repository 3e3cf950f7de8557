"""The shortest step in which stages keep some micro-batches and recompute others, by a constraint program.

For one contiguous partition. Each forward, backward, recomputation and transfer of each micro-batch is an
interval; a recomputation is there where its stage does not keep the micro-batch. Intervals of a device, and of a
link, do not overlap, and what a device holds is a cumulative resource: the stash from the begin of the forward
that keeps, or of the recomputation, to the end of the backward, and the input from the end of a forward that keeps
nothing to its recomputation. Micro-batches are alike: they are numbered in the order in which they enter stage 0.
Beyond that their order is free, since what is kept may overtake what is recomputed; but where a receiver has one
place for messages, all devices take forwards, and backwards, in one order.

Two sums hold besides, without which proofs take long: each device works between what comes before it and what
comes behind it, and what it holds, in bytes times ticks, is in its memory in that time.

Operations and transfers may begin later than an engine begins them, tensors that wait beyond the reserved buffers
take no bytes, weights count with all their gradients, and large numbers are rounded down. So the optimum is a
lower bound where no gradients come late, and an order counts only as it is replayed.

Method: constraint programming with clause learning (CP-SAT of OR-tools); not in the papers. Cost: exponential.
OR-tools is an extra (``madpipe[exact]``) and imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from deepspeed_partition.planner.solvers.constraint_program import minimized, unit_of
from deepspeed_partition.planner.solvers.step.micro_batch_orders import Entry, StepRoad

TIME_STEPS, BYTE_STEPS = 2**24, 2**20
"""Largest numbers of units of time and of bytes."""
Key = tuple[str, int, int]
"""First letters of the name of an operation, its stage, or that before its boundary, and its micro-batch."""


@dataclass(frozen=True, slots=True)
class SolvedStep:
    """Answer for one partition."""

    bound: int
    """Ticks; no order has a shorter step. 0: nothing is known."""
    orders: tuple[tuple[Entry, ...], ...] | None
    """What each device runs; None where nothing was found."""
    is_optimal: bool = False


class MicroBatchProgram:
    """Constraint program of the step of one contiguous partition."""

    def __init__(self, road: StepRoad, num_micro_batches: int) -> None:
        from ortools.sat.python import cp_model

        self.road, self.num_micro_batches = road, num_micro_batches
        self.model: Any = cp_model.CpModel()
        times = [*road.forward, *road.again, *road.backward, *road.one_way, *road.allreduce]
        each = sum(road.forward) + sum(road.again) + sum(road.backward) + 2 * sum(road.one_way)
        longest = num_micro_batches * each + max(road.allreduce)
        self.unit = unit_of(times, longest, TIME_STEPS)
        self.horizon = longest // self.unit + 1
        self.step: Any = self.model.new_int_var(0, self.horizon, "")
        self.begins: dict[Key, Any] = {}
        self.keeps: dict[tuple[int, int], Any] = {}
        self.users: dict[object, list[Any]] = {}
        for number in range(num_micro_batches):
            self._add_path(number)
        for spans in self.users.values():
            self.model.add_no_overlap(spans)
        # With a single place at the receiver, what is sent first is used first: forwards, and backwards, have the
        # same order on all devices.
        for before, after in pairwise(range(num_micro_batches)):
            for stage in range(road.num_stages if road.slots == 1 else 1):
                one, other = self.begins["F", stage, before], self.begins["F", stage, after]
                self.model.add(other >= one + self._units(road.forward[stage]))
        if road.slots == 1:
            self._order_backwards()
        else:
            self._add_places()
        for stage in range(road.num_stages):
            self._add_device(stage)
        self.model.minimize(self.step)

    def solve(self, shorter_than: int, seconds: float) -> SolvedStep:
        """Return the shortest step, if it is shorter than ``shorter_than`` ticks, and a lower bound.

        Args:
            seconds: the most seconds that this takes.
        """
        limit = (shorter_than - 1) // self.unit + 1
        found = minimized(self.model, self.step, limit, seconds)
        if found.solver is None:
            return SolvedStep(
                shorter_than if found.is_optimal else found.bound * self.unit, None, found.is_optimal
            )
        return SolvedStep(found.bound * self.unit, self._orders(found.solver), found.is_optimal)

    def _orders(self, solver: Any) -> tuple[tuple[Entry, ...], ...]:
        found: list[list[tuple[int, int, Entry]]] = [[] for _ in range(self.road.num_stages)]
        for (kind, stage, number), begin in self.begins.items():
            keeps = kind[0] == "S" or solver.value(self.keeps[stage, number])
            if kind[0] == "S" or (kind == "R" and keeps):
                continue
            name = "f" if kind == "F" and not keeps else kind
            when = solver.value(begin)
            found[stage].append((when, when + self._units(self.road.duration(kind, stage)), (name, number)))
        return tuple(tuple(entry for *_, entry in sorted(each)) for each in found)

    def _order_backwards(self) -> None:
        model, road = self.model, self.road
        for one, other in combinations(range(self.num_micro_batches), 2):
            first = model.new_bool_var("")
            for stage in range(road.num_stages):
                begins = self.begins["B", stage, one], self.begins["B", stage, other]
                size = self._units(road.backward[stage])
                model.add(begins[1] >= begins[0] + size).only_enforce_if(first)
                model.add(begins[0] >= begins[1] + size).only_enforce_if(first.negated())

    def _add_places(self) -> None:
        """Let no more tensors wait at a receiver than it has places for."""
        model, road = self.model, self.road
        if road.slots >= self.num_micro_batches:
            return
        for boundary in range(road.num_stages - 1):
            for send, user, stage in (("SF", "F", boundary + 1), ("SB", "B", boundary)):
                spans = []
                for number in range(self.num_micro_batches):
                    wait = model.new_int_var(0, self.horizon, "")
                    begin, end = self.begins[send, boundary, number], self.begins[user, stage, number]
                    spans.append(model.new_interval_var(begin, wait, end, ""))
                model.add_cumulative(spans, [1] * len(spans), road.slots)

    def _units(self, ticks: int) -> int:
        return ticks // self.unit

    def _add_path(self, number: int) -> None:
        road, model = self.road, self.model
        stages = range(road.num_stages)
        down = [key for stage in stages for key in (("F", stage, number), ("SF", stage, number))]
        up = [key for stage in reversed(stages) for key in (("SB", stage, number), ("B", stage, number))]
        path = [key for key in down + up if key[0][0] != "S" or key[1] + 1 < road.num_stages]
        for key in path:
            self._add(key)
        for before, after in pairwise(path):
            model.add(self.begins[after] >= self.begins[before] + self._size(before))
        for stage in stages:
            if not road.may_recompute[stage]:
                self.keeps[stage, number] = model.new_constant(1)
                continue
            keeps = self.keeps[stage, number] = model.new_bool_var("")
            forward, again, back = (("F", stage, number), ("R", stage, number), ("B", stage, number))
            self._add(again, keeps.negated())
            size = self._size(forward)
            model.add(self.begins[again] >= self.begins[forward] + size)
            done = self.begins[again] + self._size(again)
            model.add(self.begins[back] >= done).only_enforce_if(keeps.negated())
            model.add(self.begins[again] == self.begins[forward] + size).only_enforce_if(keeps)

    def _size(self, key: Key) -> int:
        return self._units(self.road.duration(key[0], key[1]))

    def _add(self, key: Key, runs: Any = None) -> None:
        size = self._size(key)
        begin = self.begins[key] = self.model.new_int_var(0, self.horizon, "")
        if runs is None:
            span = self.model.new_fixed_size_interval_var(begin, size, "")
        else:
            span = self.model.new_optional_fixed_size_interval_var(begin, size, runs, "")
        for resource in self.road.resources(key[0], key[1]):
            self.users.setdefault(resource, []).append(span)

    def _add_device(self, stage: int) -> None:
        """Limit what a device holds, and say what its work and its memory take in all."""
        road, model, m = self.road, self.model, self.num_micro_batches
        forward, backward, once_more = (
            self._units(ticks[stage]) for ticks in (road.forward, road.backward, road.again)
        )
        before = sum(self._units(road.forward[each]) + self._units(road.one_way[each]) for each in range(stage))
        behind = sum(self._units(road.backward[each]) + self._units(road.one_way[each]) for each in range(stage))
        tail = max(
            behind,
            *(
                sum(
                    self._units(road.backward[each]) + self._units(road.one_way[each])
                    for each in range(last, stage)
                )
                + self._units(road.allreduce[last])
                for last in range(stage + 1)
            ),
        )
        work = sum(backward + forward + once_more * (1 - self.keeps[stage, number]) for number in range(m))
        model.add(self.step >= before + work + tail)
        for number in range(m):
            model.add(self.step >= self.begins["B", stage, number] + backward + self._units(road.allreduce[stage]))
        room = road.room(stage)
        if room < 0:
            model.add_bool_or([])
            return
        sizes = [road.stash[stage], road.input[stage], road.transient[stage], road.passing[stage]]
        if m * max(road.stash[stage], road.input[stage]) + max(sizes[2:]) <= room:
            return
        unit = unit_of([*sizes, room], room, BYTE_STEPS)
        stash, bytes_in, transient, passing, room = (each // unit for each in (*sizes, room))
        spans: list[Any] = []
        demands: list[int] = []
        energy: list[Any] = []
        for number in range(m):
            keeps = self.keeps[stage, number]
            down, back = self.begins["F", stage, number], self.begins["B", stage, number]
            end = back + backward
            if not road.may_recompute[stage]:
                held = model.new_int_var(0, self.horizon, "")
                spans.append(model.new_interval_var(down, held, end, ""))
                demands.append(stash)
                energy.append(stash * held)
                continue
            again = self.begins["R", stage, number]
            long, short, waits = (model.new_int_var(0, self.horizon, "") for _ in range(3))
            spans.append(model.new_optional_interval_var(down, long, end, keeps, ""))
            spans.append(model.new_optional_interval_var(again, short, end, keeps.negated(), ""))
            spans.append(model.new_optional_interval_var(down + forward, waits, again, keeps.negated(), ""))
            demands += [stash, stash, bytes_in]
            model.add(long == 0).only_enforce_if(keeps.negated())
            model.add(short == 0).only_enforce_if(keeps)
            model.add(waits == 0).only_enforce_if(keeps)
            later = sum(
                self._units(road.forward[each]) + self._units(road.backward[each])
                for each in range(stage + 1, road.num_stages)
            ) + 2 * sum(self._units(each) for each in road.one_way[stage:])
            model.add(long >= forward + later + backward).only_enforce_if(keeps)
            model.add(short >= once_more + backward).only_enforce_if(keeps.negated())
            model.add(long >= (forward + later + backward) * keeps)
            model.add(short >= (once_more + backward) * (1 - keeps))
            energy += [stash * (long + short), bytes_in * waits]
        if transient or passing:
            for number in range(m):
                for kind in "FRB":
                    if (kind, stage, number) not in self.begins:
                        continue
                    size = {"F": forward, "R": once_more, "B": backward}[kind]
                    begin, keeps = self.begins[kind, stage, number], self.keeps[stage, number]
                    if kind == "F" and road.may_recompute[stage]:
                        spans.append(model.new_optional_fixed_size_interval_var(begin, size, keeps.negated(), ""))
                        demands.append(passing)
                        spans.append(model.new_optional_fixed_size_interval_var(begin, size, keeps, ""))
                    elif kind == "R":
                        spans.append(model.new_optional_fixed_size_interval_var(begin, size, keeps.negated(), ""))
                    else:
                        spans.append(model.new_fixed_size_interval_var(begin, size, ""))
                    demands.append(transient)
        model.add_cumulative(spans, demands, room)
        model.add(sum(energy) <= room * (self.step - before - tail))
