"""The shortest order of one step of one allocation, by a constraint program: exact, for small steps.

Each forward, backward and transfer of each micro-batch is an interval. Intervals of a device, and of a link, do
not overlap; a micro-batch follows its path; a receiver has ``slots`` places for tensors that wait. The memory of a
device is a cumulative resource: a micro-batch holds its stash from the begin of the forward to the end of the
backward, what runs has its transient bytes, and gradients come with the first backward.

Every operation takes the micro-batches in their order. This loses nothing: all micro-batches are alike, so in any
schedule the k-th begin of each operation may be called that of micro-batch k. The k-th begin of an operation comes
behind the k-th end of the one before it, for the number of begins never exceeds that of ends, and the bytes of a
device depend on these numbers alone.

The program is a relaxation of the simulated step (``step_simulator.py``) in three places: operations and
transfers may begin later than they could, unless ``greedy`` forbids that with many more constraints; tensors that
wait beyond the reserved buffers take no bytes; and times and bytes that need more digits than ``TIME_STEPS`` and
``BYTE_STEPS`` are rounded down. So its optimum is a lower bound of the step of the allocation, and an order that
it finds counts only as it is simulated.

Method: constraint programming with clause learning (CP-SAT of OR-tools); not in the papers. Cost: exponential.
OR-tools is an extra (``madpipe[exact]``) and imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.constraint_program import minimized, unit_of
from deepspeed_partition.planner.solvers.step.step_simulator import Positions, StepEngine

TIME_STEPS, BYTE_STEPS = 2**28, 2**20
"""Largest numbers of units of time and of bytes: the program multiplies and adds them in 64 bits."""


@dataclass(frozen=True, slots=True)
class Solved:
    """Answer for one allocation."""

    bound: int
    """Ticks; no order of the allocation has a shorter step."""
    orders: tuple[Positions, ...] | None
    """Orders of the devices, as positions; None where none was found."""


class OrderProgram:
    """Constraint program of the step of one allocation.

    Args:
        engine: the simulator of the allocation.
        memory_bytes: bytes of each device.
        recomputes: allow that layers keep nothing, as if they ran twice and took no longer for it.
        flushes: micro-batches of each batch of the step, as in ``Problem``.
        greedy: let everything begin as early as it can, in the order of its device, and of transfers the first
            that was ready first; only where times are whole and transfers take time, so that instants are told
            apart as the simulator does.
    """

    def __init__(
        self,
        engine: StepEngine,
        num_micro_batches: int,
        memory_bytes: int,
        flushes: Sequence[int] | None = None,
        *,
        recomputes: bool = False,
        greedy: bool = False,
    ) -> None:
        from ortools.sat.python import cp_model

        self.engine, self.num_micro_batches = engine, num_micro_batches
        self.model: Any = cp_model.CpModel()
        times = self.times_of()
        longest = num_micro_batches * (sum(times) - sum(engine.allreduce))
        self.unit = unit_of(times, longest, TIME_STEPS)
        self.is_greedy = greedy and 0 not in engine.send and all(ticks % self.unit == 0 for ticks in times)
        self.is_greedy &= not engine.has_ports  # ports tie the rules of all links together
        self.horizon = longest // self.unit + max(engine.allreduce) // self.unit + 1
        self.begins = [self._starts(ticks) for ticks in engine.ticks]
        self.step: Any = self.model.new_int_var(0, self.horizon, "")
        self._add_operations()
        self._add_transfers()
        self._add_flushes(flushes)
        if self.is_greedy:
            self._begin_at_once(flushes)
            for users in engine.users:
                self._send_at_once(users)
        for place in range(engine.num_devices):
            self._add_memory(place, memory_bytes, recomputes)
        self.model.minimize(self.step)

    def solve(self, shorter_than: int, deadline: Deadline) -> Solved:
        """Return the shortest step, if it is shorter than ``shorter_than`` ticks, and a lower bound in any case.

        Where the time is up before, the bound is what is known by then, 0 for nothing.
        """
        limit = (shorter_than - 1) // self.unit + 1
        found = minimized(self.model, self.step, limit, deadline.remaining_seconds())
        if found.solver is None:
            return Solved(shorter_than if found.is_optimal else 0, None)
        return Solved(found.bound * self.unit, self._orders(found.solver))

    def times_of(self) -> list[int]:
        """Return the ticks of all operations, all-reduces and transfers."""
        return [*self.engine.ticks, *self.engine.allreduce, *(send or 0 for send in self.engine.send)]

    def _orders(self, solver: Any) -> tuple[Positions, ...]:
        """Return what each device runs, in the order of the solution."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self.engine.num_devices)]
        for position, begins in enumerate(self.begins):
            for number, begin in enumerate(begins):
                when, ticks = solver.value(begin), self.engine.ticks[position] // self.unit
                found[self.engine.device[position]].append((when, when + ticks, number, position))
        return tuple(tuple(position for *_, position in sorted(each)) for each in found)

    def _starts(self, ticks: int) -> list[Any]:
        last = self.horizon - ticks // self.unit
        return [self.model.new_int_var(0, last, "") for _ in range(self.num_micro_batches)]

    def _spans(self, begins: list[Any], ticks: int) -> list[Any]:
        size = ticks // self.unit
        return [self.model.new_fixed_size_interval_var(begin, size, "") for begin in begins]

    def _add_operations(self) -> None:
        engine, model = self.engine, self.model
        spans = [self._spans(*each) for each in zip(self.begins, engine.ticks, strict=True)]
        self.spans = spans
        for place in range(engine.num_devices):
            mine = [position for position, device in enumerate(engine.device) if device == place]
            model.add_no_overlap([span for position in mine for span in spans[position]])
        for position, begins in enumerate(self.begins):
            size = engine.ticks[position] // self.unit
            for before, after in pairwise(begins):
                model.add(after >= before + size)
            model.add(self.step >= begins[-1] + size + engine.allreduce[position] // self.unit)
            if position + 1 < len(self.begins) and engine.send[position] is None:
                for begin, following in zip(begins, self.begins[position + 1], strict=True):
                    model.add(following >= begin + size)

    def _add_transfers(self) -> None:
        engine, model, m = self.engine, self.model, self.num_micro_batches
        links: list[list[Any]] = [[] for _ in engine.users]
        self.sends: dict[tuple[int, int], Any] = {}
        for position, send in enumerate(engine.send):
            if send is None:
                continue
            sends, following, size = self._starts(send), self.begins[position + 1], send // self.unit
            spans = self._spans(sends, send)
            for each in engine.ways[position]:
                links[each] += spans
            self.sends |= {(number, position): each for number, each in enumerate(sends)}
            for number in range(m):
                model.add(sends[number] >= self.begins[position][number] + engine.ticks[position] // self.unit)
                model.add(following[number] >= sends[number] + size)
                if number:
                    model.add(sends[number] >= sends[number - 1] + size)
                if number >= engine.slots:
                    model.add(sends[number] >= following[number - engine.slots])
        for occupied in links:
            model.add_no_overlap(occupied)

    def _begin_at_once(self, flushes: Sequence[int] | None) -> None:
        """Let each operation begin when its tensor is there, or when another operation of its device ends."""
        engine, model = self.engine, self.model
        batches = zip(accumulate(flushes or ()), flushes or (), strict=True)
        batch_ends = [stop - 1 for stop, size in batches for _ in range(size)]
        for position, begins in enumerate(self.begins):
            others = [
                (begin, other)
                for other, each in enumerate(self.begins)
                if engine.device[other] == engine.device[position]
                for begin in each
            ]
            for number, begin in enumerate(begins):
                before = position - 1
                if position == 0:
                    arrival = 0
                elif engine.send[before] is not None:
                    arrival = self.sends[number, before] + (engine.send[before] or 0) // self.unit
                else:
                    last = batch_ends[number] if batch_ends and position == engine.num_stages else number
                    arrival = self.begins[before][last] + engine.ticks[before] // self.unit
                literals = [self._when(begin == arrival)]
                literals += [
                    self._when(begin == other + engine.ticks[place] // self.unit)
                    for other, place in others
                    if other is not begin
                ]
                model.add_bool_or(literals)

    def _send_at_once(self, users: Sequence[int]) -> None:
        """Let the transfers of a link begin by the rule of the simulator.

        A transfer begins when it is ready (its tensor is there, and a place for it), or when another one ends. No
        other one goes before it from then on, unless that one was ready first, and right behind a third one.
        """
        engine, model = self.engine, self.model
        # In the order in which transfers that were ready at the same time begin.
        mine = sorted(
            (key for key in self.sends if key[1] in users), key=lambda key: (key[0], engine.rank[key[1]])
        )
        produced = {key: self.begins[key[1]][key[0]] + engine.ticks[key[1]] // self.unit for key in mine}
        ready, at_once, behind = {}, {}, {}
        for key in mine:
            number, position = key
            ready[key] = model.new_int_var(0, self.horizon, "")
            room = [self.begins[position + 1][number - engine.slots]] if number >= engine.slots else []
            model.add_max_equality(ready[key], [produced[key], *room])
            at_once[key] = self._when(self.sends[key] == ready[key])
            behind[key] = [
                self._when(self.sends[key] == self.sends[other] + (engine.send[other[1]] or 0) // self.unit)
                for other in mine
                if other != key
            ]
            model.add_bool_or([at_once[key], *behind[key]])
        for place, key in enumerate(mine):
            for other_place, other in enumerate(mine):
                if key == other:
                    continue
                # Where ``other`` begins after this one was ready and before it begins, it has gone before.
                passes = model.new_bool_var("")
                came_later, was_late = model.new_bool_var(""), model.new_bool_var("")
                model.add(self.sends[other] < ready[key]).only_enforce_if(came_later)
                model.add(self.sends[other] >= self.sends[key]).only_enforce_if(was_late)
                model.add_bool_or([passes, came_later, was_late])
                first = 0 if other_place < place else 1
                model.add(produced[other] <= produced[key] - first).only_enforce_if(passes)
                not_idle = model.new_bool_var("")
                model.add(self.sends[other] <= ready[key]).only_enforce_if(not_idle)
                model.add_bool_or([*behind[other], not_idle, came_later, was_late])

    def _when(self, condition: Any) -> Any:
        """Return a literal that implies a condition."""
        literal = self.model.new_bool_var("")
        self.model.add(condition).only_enforce_if(literal)
        return literal

    def _add_flushes(self, flushes: Sequence[int] | None) -> None:
        last = self.engine.num_stages - 1
        begins, size = self.begins[last], self.engine.ticks[last] // self.unit
        first = 0
        for stop in accumulate(flushes or ()):
            self.model.add(self.begins[last + 1][first] >= begins[stop - 1] + size)
            first = stop

    def _add_memory(self, place: int, memory_bytes: int, recomputes: bool) -> None:
        """Limit the bytes of a device to its memory, where they could be more."""
        engine, m = self.engine, self.num_micro_batches
        stages = [stage for stage in range(engine.num_stages) if engine.device[stage] == place]
        room = memory_bytes - bytes_before_backwards(engine, place)
        spans: list[tuple[Any, int]] = []
        for stage in stages:
            back = len(engine.ticks) - 1 - stage
            up, size = self.begins[back], engine.ticks[back] // self.unit
            for number, down in enumerate(self.begins[stage]):
                spans.append((self._from_to(down, up[number] + size), engine.stash[stage]))
                spans.append((self.spans[stage][number], engine.transient[stage]))
                later = engine.transient[back] if number else engine.first_backward[stage]
                spans.append((self.spans[back][number], later))
            spans.append((self._from_to(up[0] + size, self.horizon), engine.late_gradients[stage]))
        most = sum(m * engine.stash[stage] + engine.late_gradients[stage] for stage in stages)
        most += max(size for _, size in spans)
        if room < 0 or engine.floor[place] > memory_bytes:
            self.model.add_bool_or([])
        elif most > room and not recomputes:
            unit = unit_of([room, *(size for _, size in spans)], room, BYTE_STEPS)
            needed = [(span, size // unit) for span, size in spans if size // unit]
            self.model.add_cumulative([span for span, _ in needed], [size for _, size in needed], room // unit)

    def _from_to(self, begin: Any, end: Any) -> Any:
        size = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(begin, size, end, "")


def bytes_before_backwards(engine: StepEngine, place: int) -> int:
    """Return the bytes that a device holds at any instant of a step, at least: weights and reserved buffers."""
    late = sum(size for stage, size in enumerate(engine.late_gradients) if engine.device[stage] == place)
    ends = sum(
        size
        for boundary, size in enumerate(engine.crossing_bytes)
        if engine.link[boundary] >= 0 and place in engine.device[boundary : boundary + 2]
    )
    return engine.kept[place] - late + engine.platform.comm_buffers * ends
