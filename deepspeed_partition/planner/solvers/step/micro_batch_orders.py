"""Orders of a step in which stages keep some micro-batches and recompute others: their time and their memory.

For contiguous partitions. What a device runs is a list of entries, ``("F", 3)``, ``("f", 3)``, ``("R", 3)`` and
``("B", 3)``, or ``("I", 3)`` and ``("W", 3)`` in the place of the last. The rules of the step are those of
``step_simulator.py``: everything begins as early as it can, in the order of its device, and of the transfers of a
link the first that was ready first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.recomputation import passing_bytes, weight_stash_bytes
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road

Entry = tuple[str, int]
"""First letter of an operation, and its micro-batch."""
Orders = Sequence[Sequence[Entry]]


class StepRoad:
    """Durations and bytes of a contiguous partition in a step, in ticks."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        assert placement.is_contiguous
        self.placement, self.platform = placement, problem.platform
        self.num_stages = len(placement.devices)
        cuts, chain = placement.cuts, problem.chain
        costs = problem.stage_costs(placement)
        times = problem.times
        beside = times.ticks_beside_layers(cuts, placement.devices)
        self.forward = [cost.forward + more for cost, more in zip(costs, beside, strict=True)]
        self.backward = [cost.backward + more for cost, more in zip(costs, beside, strict=True)]
        self.again = [cost.forward + times.operation for cost in costs]
        """Ticks of a recomputation, which sends and receives nothing."""
        self.one_way = [int(problem.times.one_way[boundary]) for boundary in cuts[1:-1]]
        ticks = problem.times.clock.ticks
        self.allreduce = (
            [ticks(seconds) for seconds in problem.allreduce_seconds(cuts)]
            if problem.num_pipelines
            else [0] * self.num_stages
        )
        self.stash = [cost.stash for cost in costs]
        self.transient = [max(cost.transient, cost.forward_transient) for cost in costs]
        self.first_half, self.second_half = list(self.backward), [0] * self.num_stages
        """Ticks of ``I`` and ``W``; those of ``B`` and 0 for a stage without halves."""
        self.weight_stash, self.input_transient = list(self.stash), list(self.transient)
        self.may_split = [problem.splits_backward and times.splits(*stage) for stage in pairwise(cuts)]
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            if self.may_split[stage]:
                second = int(times.backward_weight[stop] - times.backward_weight[start])
                first = int(times.backward_input[stop] - times.backward_input[start])
                self.first_half[stage] += first - times.backward_ticks(start, stop)
                self.second_half[stage] = second + times.operation
                self.weight_stash[stage] = weight_stash_bytes(chain, (start, stop))
                if any(layer.running_bytes is not None for layer in chain.layers[start:stop]):
                    self.input_transient[stage] += max(0, self.stash[stage] - self.weight_stash[stage])
        self.input = [chain.boundary_bytes(start) for start in cuts[:-1]]
        self.passing = [passing_bytes(chain, stage, in_step=True) for stage in pairwise(cuts)]
        recomputation = problem.recomputation
        self.may_recompute = [
            recomputation is not None and recomputation.allows(*stage) for stage in pairwise(cuts)
        ]
        road = Road(problem, placement)
        self.sent = road.sent_bytes
        self.slots = max(1, self.platform.comm_buffers // 2)
        at_ends = [0, *(road.slots * sent for sent in self.sent), 0]
        self._rooms = []
        for stage, memory in enumerate(road.memory):
            kept = memory.fixed - at_ends[stage] - at_ends[stage + 1]
            ends = [self.sent[each] for each in (stage - 1, stage) if 0 <= each < self.num_stages - 1]
            room = self.platform.memory_bytes - kept - self.platform.comm_buffers * sum(ends)
            self._rooms.append(room if memory.floor <= self.platform.memory_bytes else -1)

    def duration(self, kind: str, stage: int) -> int:
        """Return the ticks of an operation, or of a transfer over the boundary behind ``stage``."""
        if kind[0] == "S":
            return self.one_way[stage]
        ticks = {"B": self.backward, "R": self.again, "I": self.first_half, "W": self.second_half}
        return ticks.get(kind, self.forward)[stage]

    def resources(self, kind: str, stage: int) -> tuple[object, ...]:
        """Return what an operation or transfer occupies."""
        if kind[0] != "S":
            return (stage,)
        return self.platform.resources(*((stage, stage + 1) if kind == "SF" else (stage + 1, stage)))

    def room(self, stage: int) -> int:
        """Return the bytes of a device for micro-batches and for what runs; negative where it has none."""
        return self._rooms[stage]

    def has_room(self, stage: int, stashes: int, inputs: int) -> bool:
        """Return whether a device has room for so many stashes and inputs, and for what runs."""
        held = stashes * self.stash[stage] + inputs * self.input[stage]
        return held + max(self.transient[stage], self.passing[stage]) <= self.room(stage)

    def slots_of(self, stage: int) -> int:
        """Return for how many stashes a device has room; 2**30 stands for any number."""
        room = self.room(stage) - max(self.transient[stage], self.passing[stage])
        if room < 0:
            return 0
        return room // self.stash[stage] if self.stash[stage] else 2**30

    def fits(self, orders: Orders) -> bool:
        """Return whether each device has room for what it holds, without tensors that wait for a slow link."""
        return all(self.peak(stage, order) <= self.room(stage) for stage, order in enumerate(orders))

    def peak(self, stage: int, order: Sequence[Entry]) -> int:
        """Return the most bytes of micro-batches and of what runs, in the order of a device."""
        held = most = 0
        inputs: set[int] = set()
        for kind, number in order:
            if kind == "f":
                most = max(most, held + self.passing[stage])
                held += self.input[stage]
                inputs.add(number)
            elif kind == "I":
                held += self.weight_stash[stage] - self.stash[stage]
                most = max(most, held + self.input_transient[stage])
            elif kind == "W":
                most = max(most, held + self.transient[stage])
                held -= self.weight_stash[stage]
            else:
                if kind == "R":
                    held -= self.input[stage]
                if kind in "FR":
                    held += self.stash[stage]
                most = max(most, held + self.transient[stage])
                if kind == "B":
                    held -= self.stash[stage]
            most = max(most, held)
        return most

    def named(self, orders: Orders) -> tuple[Order, ...]:
        """Return orders in the form of a plan."""
        return tuple(
            tuple((f"{kind}{stage}", number) for kind, number in order) for stage, order in enumerate(orders)
        )

    def begins(self, orders: Orders) -> dict[tuple[str, int, int], int]:
        """Return the ticks at which operations begin, by role: ``F`` for any forward, ``B`` for ``I``, too."""
        run = _Run(self, orders)
        run.ticks(None)
        return run.begins

    def run(self, orders: Orders, at_most: int | None = None) -> int | None:
        """Return the ticks of a step; None where devices wait for each other, or it lasts ``at_most`` or more."""
        return _Run(self, orders).ticks(at_most)


class _Run:
    """One simulated step: what can begin first, begins first."""

    def __init__(self, road: StepRoad, orders: Orders) -> None:
        self.road, self.orders = road, orders
        self.place = [0] * road.num_stages
        self.free: dict[object, int] = defaultdict(int)
        self.ends: dict[tuple[str, int, int], int] = {}
        """Ends of forwards (``F``, whatever they keep), recomputations, backwards (``B``, or their first halves),
        second halves and transfers."""
        self.begins: dict[tuple[str, int, int], int] = {}
        self.recomputed = {
            (stage, number) for stage, order in enumerate(orders) for kind, number in order if kind == "R"
        }
        self.waiting: dict[tuple[object, ...], list[tuple[int, int, str, int]]] = defaultdict(list)
        """Tensors to send on each link: when they were ready, their micro-batches, and what they are."""
        self.sent: dict[tuple[str, int], list[int]] = defaultdict(list)

    def ticks(self, at_most: int | None) -> int | None:
        road = self.road
        end = 0
        while True:
            best: tuple[int, int, tuple[object, ...] | int, str, int, int] | None = None
            for stage in range(road.num_stages):
                candidate = self._operation(stage)
                if candidate is not None and (best is None or (candidate[0], 0) < best[:2]):
                    best = candidate[0], 0, stage, candidate[1], stage, candidate[2]
            for link, tensors in self.waiting.items():
                for start, ready, number, kind, boundary in self._sendable(tensors):
                    del ready
                    if best is None or (start, 1) < best[:2]:
                        best = start, 1, link, kind, boundary, number
                    break
            if best is None:
                break
            start, _, where, kind, stage, number = best
            done = start + road.duration(kind, stage)
            if at_most is not None and done >= at_most:
                return None
            self._commit(where, kind, stage, number, start, done)
            if kind in ("B", "I", "W"):
                end = max(end, done + road.allreduce[stage])
        if any(place < len(order) for place, order in zip(self.place, self.orders, strict=True)):
            return None
        return end if at_most is None or end < at_most else None

    def _operation(self, stage: int) -> tuple[int, str, int] | None:
        order = self.orders[stage]
        if self.place[stage] == len(order):
            return None
        kind, number = order[self.place[stage]]
        needs: list[tuple[str, int, int]] = []
        if kind in "Ff":
            needs = [("SF", stage - 1, number)] if stage else []
        elif kind == "R":
            needs = [("F", stage, number)]
        elif kind == "W":
            needs = [("B", stage, number)]
        else:
            needs = [("R" if (stage, number) in self.recomputed else "F", stage, number)]
            needs += [("SB", stage, number)] if stage + 1 < self.road.num_stages else []
        start = self.free[stage]
        for need in needs:
            ready = self.ends.get(need)
            if ready is None:
                return None
            start = max(start, ready)
        return start, kind, number

    def _sendable(self, tensors: list[tuple[int, int, str, int]]) -> list[tuple[int, int, int, str, int]]:
        """Return the tensors of a link that can be sent, that which can begin first before the others."""
        first: dict[tuple[str, int], tuple[int, int]] = {}
        for ready, number, kind, boundary in sorted(tensors, key=lambda each: each[:2]):
            first.setdefault((kind, boundary), (ready, number))
        found = []
        for (kind, boundary), (ready, number) in first.items():
            sent = self.sent[kind, boundary]
            room: int | None = 0
            if len(sent) >= self.road.slots:
                receiver = ("F", boundary + 1) if kind == "SF" else ("B", boundary)
                room = self.begins.get((*receiver, sent[-self.road.slots]))
            if room is not None:
                free = max(self.free[each] for each in self.road.resources(kind, boundary))
                found.append((max(ready, room, free), ready, number, f"{kind}{boundary}", kind, boundary))
        return [
            (start, ready, number, kind, boundary) for start, ready, number, _, kind, boundary in sorted(found)
        ]

    def _commit(
        self, where: tuple[object, ...] | int, kind: str, stage: int, number: int, start: int, done: int
    ) -> None:
        role = {"f": "F", "I": "B"}.get(kind, kind)
        self.begins[role, stage, number], self.ends[role, stage, number] = start, done
        for each in self.road.resources(kind, stage):
            self.free[each] = done
        if isinstance(where, tuple):
            self.sent[kind, stage].append(number)
            self.waiting[where] = [each for each in self.waiting[where] if each[1:] != (number, kind, stage)]
            return
        self.place[stage] += 1
        send = None
        if role == "F" and stage + 1 < self.road.num_stages:
            send = "SF", stage
        elif role == "B" and stage:
            send = "SB", stage - 1
        if send is not None:
            self.waiting[self._line(*send)].append((done, number, *send))

    def _line(self, kind: str, boundary: int) -> tuple[object, ...]:
        """Return where a transfer waits: transfers of other lines have nothing in common with it."""
        if self.road.platform.port_bandwidth is not None:
            return ()
        return self.road.resources(kind, boundary)
