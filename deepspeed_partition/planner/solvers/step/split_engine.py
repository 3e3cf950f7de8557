"""One synchronous step whose backwards may be two operations, simulated event by event.

The rules are those of ``step_simulator.py``. A backward is one operation, or two: ``I``, the gradient of the
input, whose result is sent on at once, and ``W``, the gradients of the weights, at any time later. Operations have
numbers, for S stages:

    0 to S - 1        forwards, as positions of the path
    S to 2 S - 1      ``I``, as positions of the path; ``B`` of a stage whose halves are not known
    2 S + s           ``W`` of stage s
    3 S + s           ``B`` of stage s, in the place of its ``I``

Each takes the micro-batches in their order: the k-th backward of a stage, in one operation or two, is of
micro-batch k, and its ``W`` follow in the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.recomputation import stage_cost, weight_stash_bytes
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.step.step_memory import LONGEST_IN_64_BITS, Instants, StepSpans
from deepspeed_partition.planner.solvers.step.step_simulator import Simulation, StepEngine, WaitInCircleError

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.interface import Problem

SplitOrders = tuple[tuple[int, ...], ...]
"""Operations of each device, in order, by their numbers."""
SplitChoice = Callable[["SplitSimulation", int], int]
"""Function that chooses what a free device runs next, from the state of the simulation; negative: it waits."""


@dataclass(frozen=True, slots=True)
class SplitRun:
    """Events of one simulated step, in ticks."""

    ticks: int
    begins: list[list[int]]
    """By position, then by micro-batch; a backward in one operation stands at the position of its ``I``."""
    ends: list[list[int]]
    sends: list[list[int]]
    is_split: list[list[bool]]
    """Whether each backward of each stage is two operations."""
    later_begins: list[list[int]]
    """Begins of ``W``, for each stage."""
    later_ends: list[list[int]]
    orders: SplitOrders


class SplitEngine(StepEngine):
    """Simulator of the steps of an allocation whose backwards may be two operations."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        times = problem.times
        ticks = times.clock.ticks
        allreduce = (
            [ticks(seconds) for seconds in problem.allreduce_seconds(placement.cuts)]
            if (problem.num_pipelines or 1) > 1
            else []
        )
        cuts, devices = placement.cuts, placement.devices
        super().__init__(times, problem.table, cuts, devices, allreduce, problem.flushes, placement.recomputed)
        size, stages = self.num_stages, list(pairwise(cuts))
        beside = times.ticks_beside_layers(cuts, devices)
        self.backs = [2 * size - 1 - stage for stage in range(size)]
        """Position of the backward of each stage, or of its first half."""
        self.whole = [self.ticks[back] for back in self.backs]
        """Ticks of the backward of each stage in one operation."""
        self.operation = times.operation
        """Ticks that each operation takes beside those of its layers."""
        self.later: list[int | None] = [None] * size
        """Ticks of ``W`` of each stage; None where the stage has no halves."""
        self.weight_stash = list(self.stash)
        """Bytes of a micro-batch from the begin of its ``I`` to the end of its ``W``, for each stage."""
        self.input_transient = [self.transient[back] for back in self.backs]
        """Bytes that ``I`` of each stage needs only while it runs."""
        for stage, (start, stop) in enumerate(stages):
            if not times.splits(start, stop):
                continue
            again = stage_cost(times, problem.table, (start, stop), placement.blocks[stage]).backward
            again -= times.backward_ticks(start, stop)
            halves = (times.backward_input, times.backward_weight)
            first, second = (int(half[stop] - half[start]) for half in halves)
            self.ticks[self.backs[stage]] = first + again + beside[stage]
            self.later[stage] = second + times.operation
            self.weight_stash[stage] = weight_stash_bytes(problem.chain, (start, stop))
            if any(layer.running_bytes is not None for layer in problem.chain.layers[start:stop]):
                self.input_transient[stage] += max(0, self.stash[stage] - self.weight_stash[stage])
        self.tail = self._tails()
        self.least_load = [
            sum(
                self.ticks[stage]
                + min(self.whole[stage], self.ticks[self.backs[stage]] + (self.later[stage] or 0))
                for stage in mine
            )
            for mine in self.stages_of
        ]
        """Ticks that each device computes for one micro-batch, at least."""
        self.rooms = self._rooms()
        """Bytes of each device for micro-batches and what runs."""

    def _rooms(self) -> list[int]:
        reserved = [0] * self.num_devices
        for boundary, num_bytes in enumerate(self.crossing_bytes):
            if self.link[boundary] >= 0:
                for place in self.device[boundary : boundary + 2]:
                    reserved[place] += self.platform.comm_buffers * num_bytes
        memory = self.platform.memory_bytes
        return [
            memory - kept - ends if floor <= memory else -1
            for kept, ends, floor in zip(self.kept, reserved, self.floor, strict=True)
        ]

    @property
    def splits_any(self) -> bool:
        """Return whether some stage has halves."""
        return any(later is not None for later in self.later)

    def least_ticks(self, num_micro_batches: int) -> int:
        """Return ticks than which no order is shorter: a device's fill and work, and the path of a micro-batch."""
        head = [0]
        for ticks, send in zip(self.ticks, self.send, strict=True):
            head.append(head[-1] + ticks + (send or 0))
        most = max(
            head[mine[0]] + num_micro_batches * load
            for mine, load in zip(self.stages_of, self.least_load, strict=True)
        )
        return max(most, head[-1] + (num_micro_batches - 1) * max(self.ticks))

    def simulate(self, num_micro_batches: int, choose: SplitChoice, at_most: int | None = None) -> SplitRun | None:
        """Simulate one step; return None where it is sure to take longer than ``at_most`` ticks.

        Raises:
            WaitInCircleError: the orders wait for each other in a circle.
        """
        return SplitSimulation(self, num_micro_batches).run_split(choose, at_most)

    def run_orders(
        self, num_micro_batches: int, orders: SplitOrders, at_most: int | None = None
    ) -> SplitRun | None:
        """Return the run of given orders; None where they wait in a circle or take longer than ``at_most``."""
        try:
            return self.simulate(num_micro_batches, in_given_order(orders), at_most)
        except WaitInCircleError:
            return None

    def in_two(self, orders: Sequence[Sequence[int]]) -> SplitOrders:
        """Return orders of whole backwards with each of them in two operations, one behind the other.

        Args:
            orders: as positions.
        """
        size = self.num_stages
        found = []
        for order in orders:
            changed: list[int] = []
            for position in order:
                changed.append(position)
                stage = 2 * size - 1 - position
                if position >= size and self.later[stage] is not None:
                    changed.append(2 * size + stage)
            found.append(tuple(changed))
        return tuple(found)

    def in_plan(self, orders: SplitOrders) -> tuple[Order, ...]:
        """Return orders in the form of a plan."""
        size = self.num_stages
        result = []
        for order in orders:
            entries: list[tuple[str, int]] = []
            count = [0] * (3 * size)
            split: list[list[int]] = [[] for _ in range(size)]
            for code in order:
                if code < size:
                    name, at = f"F{code}", code
                elif code < 2 * size:
                    at, stage = code, 2 * size - 1 - code
                    name = f"{'B' if self.later[stage] is None else 'I'}{stage}"
                    split[stage].append(count[at])
                elif code < 3 * size:
                    stage = code - 2 * size
                    entries.append((f"W{stage}", split[stage][count[code]]))
                    count[code] += 1
                    continue
                else:
                    stage = code - 3 * size
                    name, at = f"B{stage}", self.backs[stage]
                entries.append((name, count[at]))
                count[at] += 1
            result.append(tuple(entries))
        return tuple(result)

    def split_peaks(self, run: SplitRun) -> list[int]:
        """Return the peak bytes of each device, exactly as the file formats define them."""
        spans = _SplitSpans(self, run)
        return [max(spans.peak(place), self.floor[place]) for place in range(self.num_devices)]


class SplitSimulation(Simulation):
    """State of a step while it is simulated, for the rule that chooses (``split_rules.py``)."""

    engine: SplitEngine

    def __init__(self, engine: SplitEngine, num_micro_batches: int) -> None:
        super().__init__(engine, num_micro_batches, lambda *_: -1)
        size = engine.num_stages
        self.now = 0
        self.is_split: list[list[bool]] = [[] for _ in range(size)]
        self.later_begins: list[list[int]] = [[] for _ in range(size)]
        self.later_ends: list[list[int]] = [[] for _ in range(size)]
        self.open = [0] * size
        """How many ``W`` of each stage may begin: their ``I`` have ended."""
        self.held = [0] * engine.num_devices
        """Bytes of micro-batches on each device."""

    def run_split(self, choose: SplitChoice, at_most: int | None) -> SplitRun | None:
        engine, size, m = self.engine, self.engine.num_stages, self.num_micro_batches
        events, orders = self.events, self.orders
        idle, links = list(range(engine.num_devices)), set[int]()
        busy = [False] * engine.num_devices
        latest = inf if at_most is None else at_most
        slack = [latest - m * load for load in engine.least_load]
        since = [0] * engine.num_devices
        turn = size if engine.flush_ends is not None else -1
        begin_transfers = self._begin_through_ports if engine.has_ports else self._begin_transfers
        while True:
            while idle:
                place = idle.pop()
                if busy[place]:
                    continue
                code = choose(self, place)
                if code < 0:
                    continue
                slack[place] -= self.now - since[place]
                if slack[place] < 0:
                    return None
                busy[place] = True
                orders[place].append(code)
                since[place] = self._begin(code, place, links)
            if links and not (events and events[0][0] == self.now):
                begin_transfers(links, self.now)
                continue
            if not events:
                break
            self.now = events[0][0]
            if self.now > latest:
                return None
            while events and events[0][0] == self.now:
                code = heapq.heappop(events)[1]
                if code >= 2 * size:
                    self._arrive(code - 2 * size, idle, links)
                    continue
                place = self._end(code if code >= 0 else -1 - code, links, turn)
                busy[place] = False
                idle.append(place)
        if any(count < m for count in self.begun) or any(self.open):
            raise WaitInCircleError("the orders of the devices wait for each other in a circle")
        ends = [
            max([self.ends[back][-1], *self.later_ends[stage][-1:]]) + engine.allreduce[back]
            for stage, back in enumerate(engine.backs)
        ]
        if max(ends) > latest:
            return None
        return SplitRun(
            max(ends), self.begins, self.ends, self.sends, self.is_split, self.later_begins, self.later_ends,
            tuple(map(tuple, orders)),
        )  # fmt: skip

    def _begin(self, code: int, place: int, links: set[int]) -> int:
        """Begin an operation, and return when it ends."""
        engine, size, now = self.engine, self.engine.num_stages, self.now
        if 2 * size <= code < 3 * size:
            stage = code - 2 * size
            self.open[stage] -= 1
            self.later_begins[stage].append(now)
            end: int = now + (engine.later[stage] or 0)
            heapq.heappush(self.events, (end, -1 - code))
            return end
        position = code if code < size else engine.backs[code - 3 * size] if code >= 3 * size else code
        stage = position if position < size else 2 * size - 1 - position
        self.begun[position] += 1
        self.begins[position].append(now)
        if position < size:
            self.held[place] += engine.stash[stage]
            end = now + engine.ticks[position]
        else:
            splits = code < 2 * size and engine.later[stage] is not None
            self.is_split[stage].append(splits)
            if splits:
                self.held[place] += engine.weight_stash[stage] - engine.stash[stage]
            end = now + (engine.ticks[position] if splits else engine.whole[stage])
        heapq.heappush(self.events, (end, position if code < 2 * size else -1 - code))
        if position and engine.link[position - 1] >= 0:
            links.add(engine.link[position - 1])
        return end

    def _end(self, code: int, links: set[int], turn: int) -> int:
        """End an operation, and return its device."""
        engine, size = self.engine, self.engine.num_stages
        if 2 * size <= code < 3 * size:
            stage = code - 2 * size
            self.later_ends[stage].append(self.now)
            self.held[engine.device[stage]] -= engine.weight_stash[stage]
            return engine.device[stage]
        position = engine.backs[code - 3 * size] if code >= 3 * size else code
        place = engine.device[position]
        self.ends[position].append(self.now)
        if position >= size:
            stage = 2 * size - 1 - position
            if self.is_split[stage][len(self.ends[position]) - 1]:
                self.open[stage] += 1
            else:
                self.held[place] -= engine.stash[stage]
        after = engine.link[position]
        if after >= 0:
            number = len(self.ends[position]) - 1
            self.pending[after].append((self.now, number, engine.rank[position], position))
            if not self.link_busy[after]:
                links.add(after)
        elif position + 1 == turn:
            assert engine.flush_ends is not None
            if len(self.ends[position]) in engine.flush_ends:
                self.arrived[turn] = len(self.ends[position])
        elif position + 1 < 2 * size:
            self.arrived[position + 1] += 1
        return place

    def _arrive(self, position: int, idle: list[int], links: set[int]) -> None:
        """End the transfer after a position."""
        engine = self.engine
        for each in engine.ways[position]:
            self.link_busy[each] = False
        links.add(engine.link[position])
        self.arrived[position + 1] += 1
        idle.append(engine.device[position + 1])

    def next_arrival(self, place: int) -> float:
        """Return the first tick at which a tensor that is on its way or being made may come to a device."""
        engine, size = self.engine, 2 * self.engine.num_stages
        first = inf
        for time, code in self.events:
            position = code - size if code >= size else code
            sends = 0
            if code < 0:
                if -1 - code < 3 * engine.num_stages:
                    continue  # a second half sends nothing
                position = engine.backs[-1 - code - 3 * engine.num_stages]
            if code < size:
                sends = engine.send[position] or 0
            if position + 1 < size and engine.device[position + 1] == place:
                first = min(first, time + sends)
        return first


def in_given_order(orders: SplitOrders) -> SplitChoice:
    """Return the choice by which each device runs its order, each operation as soon as its tensor is there."""
    places = [0] * len(orders)

    def choose(state: SplitSimulation, device: int) -> int:
        order, place, size = orders[device], places[device], state.engine.num_stages
        if place == len(order):
            return -1
        code = order[place]
        if 2 * size <= code < 3 * size:
            ready = state.open[code - 2 * size] > 0
        else:
            position = state.engine.backs[code - 3 * size] if code >= 3 * size else code
            ready = state.begun[position] < state.arrived[position]
        if not ready:
            return -1
        places[device] += 1
        return code

    return choose


class _SplitSpans(StepSpans):
    """Instants of one step with halves, by position; in half ticks."""

    def __init__(self, engine: SplitEngine, run: SplitRun) -> None:
        self.kind: type = np.int64 if run.ticks < LONGEST_IN_64_BITS else object
        super().__init__(engine, *(self._doubled(each) for each in (run.begins, run.ends, run.sends)))
        self.split = engine
        self.is_split = [np.array(each, dtype=bool) for each in run.is_split]
        self.later_begins, self.later_ends = self._doubled(run.later_begins), self._doubled(run.later_ends)

    def _doubled(self, every: Sequence[Sequence[int]]) -> list[Instants]:
        return [2 * np.array(each, dtype=self.kind) for each in every]

    def hold(self, stage: int) -> list[tuple[Instants, Instants, int]]:
        back = self.split.backs[stage]
        begins, halves = self.begins[stage], self.is_split[stage]
        first = self.begins[back][halves]
        until = np.where(halves, self.begins[back], self.ends[back])
        # A first half that begins the moment its forward does takes over what that would hold.
        lasts = ~halves | (until > begins)
        held = [(begins[lasts], np.maximum(until, begins + 1)[lasts], self.engine.stash[stage])]
        if len(first):
            held.append((first, np.maximum(self.later_ends[stage], first + 1), self.split.weight_stash[stage]))
        return held

    def gradients_come(self, stage: int) -> Instants:
        """Return when the first backward in one operation, or second half, has ended; one instant, or none."""
        ends = [*self.ends[self.split.backs[stage]][~self.is_split[stage]][:1], *self.later_ends[stage][:1]]
        return np.array([min(ends)] if ends else [], dtype=self.kind)

    def running(self, stage: int) -> list[tuple[Instants, Instants, NDArray[np.int64]]]:
        engine, back, halves = self.split, self.split.backs[stage], self.is_split[stage]
        found = [self.runs(self.begins[stage], self.ends[stage], engine.transient[stage])]
        later = engine.transient[back]
        inputs = self.runs(self.begins[back][halves], self.ends[back][halves], engine.input_transient[stage])
        others = [
            self.runs(self.begins[back][~halves], self.ends[back][~halves], later),
            self.runs(self.later_begins[stage], self.later_ends[stage], later),
        ]
        come = self.gradients_come(stage)
        for begins, _, needs in others:  # the first of all, which brings the gradients, needs more
            needs[begins < come[0] if len(come) else np.zeros(len(begins), dtype=bool)] = engine.first_backward[
                stage
            ]
        return [*found, inputs, *others]
