"""The shortest step of one allocation whose backwards may be two operations, by a constraint program.

The program of ``order_program.py`` with ``I`` in the place of each backward, and ``W`` as an interval of its own,
any time behind it. A micro-batch holds its stash to the begin of ``I``, and from there ``weight_stash_bytes`` to
the end of ``W``. Every operation takes the micro-batches in their order, ``W`` too, for the same reason.

A whole backward is ``I`` with ``W`` right behind it, whose result is sent on earlier. To make that so in all
cases, ``W`` takes no ``operation_seconds``, no more time than the whole backward leaves, and no more bytes than
the stash. So the optimum is a lower bound, and an order that is found counts only as it is simulated.

Method: constraint programming with clause learning (CP-SAT of OR-tools). Source of the halves: "Zero Bubble
Pipeline Parallelism", 2023, whose integer program has equal stages. Cost: exponential.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from deepspeed_partition.planner.solvers.constraint_program import unit_of
from deepspeed_partition.planner.solvers.step.order_program import BYTE_STEPS, OrderProgram, bytes_before_backwards
from deepspeed_partition.planner.solvers.step.split_engine import SplitEngine


class SplitProgram(OrderProgram):
    """Constraint program of the step of one allocation with halves."""

    engine: SplitEngine

    def _later(self, stage: int) -> int:
        """Return the units of ``W`` of a stage, 0 where it has none."""
        engine, later = self.engine, self.engine.later[stage]
        if later is None:
            return 0
        back = engine.ticks[engine.backs[stage]]
        return max(0, min(later - engine.operation, engine.whole[stage] - back)) // self.unit

    def times_of(self) -> list[int]:
        engine = self.engine
        both = zip(engine.later, engine.backs, engine.whole, strict=True)
        later = [
            max(0, min(each - engine.operation, whole - engine.ticks[back]))
            for each, back, whole in both
            if each is not None
        ]
        return [*super().times_of(), *later]

    def _add_operations(self) -> None:
        engine, model, m = self.engine, self.model, self.num_micro_batches
        spans = [self._spans(*each) for each in zip(self.begins, engine.ticks, strict=True)]
        self.spans = spans
        self.later_begins: list[list[Any]] = []
        self.later_spans: list[list[Any]] = []
        for stage in range(engine.num_stages):
            size = self._later(stage) if engine.later[stage] is not None else None
            begins = [] if size is None else [model.new_int_var(0, self.horizon - size, "") for _ in range(m)]
            self.later_begins.append(begins)
            self.later_spans.append([model.new_fixed_size_interval_var(each, size, "") for each in begins])
        for place in range(engine.num_devices):
            mine = [position for position, device in enumerate(engine.device) if device == place]
            every = [span for position in mine for span in spans[position]]
            every += [span for stage in engine.stages_of[place] for span in self.later_spans[stage]]
            model.add_no_overlap(every)
        for position, begins in enumerate(self.begins):
            size = engine.ticks[position] // self.unit
            for before, after in pairwise(begins):
                model.add(after >= before + size)
            model.add(self.step >= begins[-1] + size + engine.allreduce[position] // self.unit)
            if position + 1 < len(self.begins) and engine.send[position] is None:
                for begin, following in zip(begins, self.begins[position + 1], strict=True):
                    model.add(following >= begin + size)
        for stage, begins in enumerate(self.later_begins):
            back, size = engine.backs[stage], self._later(stage)
            reduces = engine.allreduce[back] // self.unit
            for begin, first in zip(begins, self.begins[back], strict=bool(begins)):
                model.add(begin >= first + engine.ticks[back] // self.unit)
            for before, after in pairwise(begins):
                model.add(after >= before + size)
            if begins:
                model.add(self.step >= begins[-1] + size + reduces)

    def _orders(self, solver: Any) -> tuple[tuple[int, ...], ...]:
        """Return what each device runs, by the numbers of ``split_engine.py``."""
        engine = self.engine
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in range(engine.num_devices)]
        every = [
            (position, engine.ticks[position] // self.unit, each) for position, each in enumerate(self.begins)
        ]
        first = 2 * engine.num_stages
        every += [(first + stage, self._later(stage), each) for stage, each in enumerate(self.later_begins)]
        for code, size, begins in every:
            place = engine.device[code if code < first else code - first]
            for number, begin in enumerate(begins):
                when = solver.value(begin)
                found[place].append((when, when + size, number, code))
        return tuple(tuple(code for *_, code in sorted(each)) for each in found)

    def _add_memory(self, place: int, memory_bytes: int, recomputes: bool) -> None:
        engine, m = self.engine, self.num_micro_batches
        room = memory_bytes - bytes_before_backwards(engine, place)
        spans: list[tuple[Any, int]] = []
        most = 0
        for stage in engine.stages_of[place]:
            back = engine.backs[stage]
            up, size = self.begins[back], engine.ticks[back] // self.unit
            begins, halves = self.later_begins[stage], engine.later[stage] is not None
            weight_stash = min(engine.stash[stage], engine.weight_stash[stage])
            late, last = engine.late_gradients[stage], self._later(stage)
            most += m * max(engine.stash[stage], weight_stash) + late
            for number, down in enumerate(self.begins[stage]):
                until = up[number] if halves else up[number] + size
                spans.append((self._from_to(down, until), engine.stash[stage]))
                spans.append((self.spans[stage][number], engine.transient[stage]))
                if halves:
                    spans.append((self._from_to(up[number], begins[number] + last), weight_stash))
                    spans.append((self.spans[back][number], engine.transient[back]))
                later = engine.transient[back] if number else engine.first_backward[stage]
                spans.append((self.later_spans[stage][number] if halves else self.spans[back][number], later))
            come = begins[0] + last if halves else up[0] + size
            spans.append((self._from_to(come, self.horizon), late))
        most += max((size for _, size in spans), default=0)
        if room < 0 or engine.floor[place] > memory_bytes:
            self.model.add_bool_or([])
        elif most > room and not recomputes:
            unit = unit_of([room, *(size for _, size in spans)], room, BYTE_STEPS)
            needed = [(span, size // unit) for span, size in spans if size // unit]
            self.model.add_cumulative([span for span, _ in needed], [size for _, size in needed], room // unit)
