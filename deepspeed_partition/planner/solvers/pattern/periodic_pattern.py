"""The path of a micro-batch: the operations of an allocation in its order, and patterns over them.

    F0 SF0 F1 SF1 F2 B2 SB1 B1 SB0 B0           a transfer only where neighbouring stages are on different devices

A pattern is held as the instant at which each operation begins on micro-batch 0, in ticks from the beginning of
F0; ``divmod`` by the period gives the shift and the place within the period.

Method: the memory of a pattern is exact; estimates without one are bounds, except ``"safe"`` (MadPipe paper,
section 4.2.1). The least period of given orders is exact, by the longest cycle of their rules: O(S^2) time for
each period that is tried and O(S) memory, for S stages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Literal

import numpy as np

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.memory import buffer_slots
from deepspeed_partition.planner.schedule import PeriodicSchedule, PlacedOperation
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.pairwise_memory import Integers, Side, least_room, may_share
from deepspeed_partition.planner.training_bytes import TrainingBytes
from deepspeed_partition.planner.weight_versions import VERTICAL_SYNC, WeightVersions

Resource = int | tuple[int, int]
"""Device, or link between two devices, the lower one first."""
Estimate = Literal["peak", "pair", "pairs", "safe"]
"""Estimate of the memory of a device with several stages. ``"peak"``: a lower bound; ``"pair"``: a better one,
from every two stages that follow one another there; ``"pairs"``: the best one, from every two stages; ``"safe"``:
what is easy to schedule."""
Shifts = Sequence[int]
Orders = Mapping[Resource, Sequence[int]]
"""Operations of each resource in one period, in order, as positions on the path of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the path of a micro-batch."""

    name: str
    resource: Resource
    ticks: int


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, in bytes."""

    stages: tuple[int, ...]
    fixed: int
    """Bytes of weights and buffers, and of the process itself."""
    floor: int
    """Bytes needed after the last backward of a step."""
    room: int
    """Bytes for stashes and transients; negative where ``fixed`` or ``floor`` does not fit. Where versions of the
    weights come with micro-batches in flight, the part of one version that ``Road.stash`` has is in it, too."""
    bytes_for_one: int
    """Bytes needed in all with one micro-batch in flight, which is the least."""

    def bytes_with(self, num_bytes: int) -> int:
        """Return the bytes needed in all with ``num_bytes`` of stashes and transients."""
        return max(self.fixed + num_bytes, self.floor)


class Road:
    """Path of a micro-batch through an allocation: its operations, and what it keeps on the devices."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.placement = placement
        times, chain, platform = problem.times, problem.chain, problem.platform
        cuts, devices = placement.cuts, placement.devices
        self.num_stages = len(devices)
        down: list[Operation] = []
        up: list[Operation] = []
        self.loads: list[int] = []
        """Ticks of each pseudo-stage: stage 0, boundary 0, stage 1, ..."""
        costs = problem.stage_costs(placement)
        for stage, (start, cost) in enumerate(zip(cuts, costs, strict=False)):
            if stage:
                ends = sorted(devices[stage - 1 : stage + 1])
                link = ends[0], ends[1]
                one_way = int(times.one_way[start])
                down.append(Operation(f"SF{stage - 1}", link, one_way))
                up.append(Operation(f"SB{stage - 1}", link, one_way))
                self.loads.append(2 * one_way)
            down.append(Operation(f"F{stage}", devices[stage], cost.forward))
            up.append(Operation(f"B{stage}", devices[stage], cost.backward))
            self.loads.append(cost.compute)
        self.operations: list[Operation] = [*down, *reversed(up)]
        self.position = {operation.name: index for index, operation in enumerate(self.operations)}
        self.users: dict[Resource, list[int]] = defaultdict(list)
        for index, operation in enumerate(self.operations):
            self.users[operation.resource].append(index)
        table = problem.table
        self.kept = [cost.stash for cost in costs]
        """Bytes of each micro-batch in flight, for each stage."""
        self.stash = list(self.kept)
        """Bytes that bounds count for each micro-batch in flight, for each stage: those that it keeps, and its
        part of a version of the weights, rounded down, where more micro-batches in flight bring more versions."""
        self.transient = [cost.transient for cost in costs]
        self.versions = problem.versions
        self.version_bytes = [0] * self.num_stages
        """Bytes of each further version of the weights of a stage, where it holds more with more in flight."""
        self.gradient_bytes = [0] * self.num_stages
        """Bytes of the gradients of a stage that may have those of several updates; 0 where it cannot."""
        self.slots = buffer_slots(platform)
        self.sent_bytes = [chain.boundary_bytes(boundary) for boundary in cuts[1:-1]]
        """Bytes over the boundary after each stage but the last."""
        at_ends = [0, *(self.slots * sent for sent in self.sent_bytes), 0]
        self.memory: list[DeviceMemory] = []
        for device in sorted(set(devices)):
            mine = tuple(stage for stage in range(self.num_stages) if devices[stage] == device)
            layers = [(cuts[stage], cuts[stage + 1]) for stage in mine]
            kept = table.training.of(layers) + platform.fixed_bytes
            part = self._count_versions(table.training, mine, layers)
            floor = kept + table.training.after_backwards(layers)
            fixed = kept + sum(at_ends[stage] + at_ends[stage + 1] for stage in mine)
            one = fixed + self._bytes_at_least([1] * self.num_stages, mine, self.kept)
            room = platform.memory_bytes - fixed + part if floor <= platform.memory_bytes else -1
            self.memory.append(DeviceMemory(mine, fixed, floor, room, max(one, floor)))

    def _count_versions(
        self, training: TrainingBytes, stages: tuple[int, ...], layers: Sequence[tuple[int, int]]
    ) -> int:
        """Count versions of the weights and gradients of a device; return the part of one version in its stashes.

        With M micro-batches per update and g in flight a stage holds 1 + (g - 1) / M versions or more, of which
        each micro-batch in flight brings an M-th, and the rest of the first one is always there.
        """
        if self.versions is None:
            return 0
        # Updates come while micro-batches are in flight, behind a backward of the first stage.
        first = stages[0]
        self.transient[first] = max(self.transient[first], training.after_backwards(layers))
        for stage, num_bytes in zip(stages[1:], training.gradients(layers)[1:], strict=True):
            self.gradient_bytes[stage] = num_bytes
        if not self.versions.grows:
            return 0
        for stage, num_bytes in zip(stages, training.versions(layers), strict=True):
            self.version_bytes[stage] = num_bytes
            self.stash[stage] += num_bytes // self.versions.micro_batches_per_update
        return self.part_of_versions(stages)

    def part_of_versions(self, stages: Iterable[int]) -> int:
        """Return the bytes of the first version of the weights of stages that are counted with their stashes."""
        per_update = 1 if self.versions is None else self.versions.micro_batches_per_update
        return sum(-(-self.version_bytes[stage] // per_update) for stage in stages)

    @cached_property
    def busiest(self) -> int:
        """Ticks per period of the busiest device or link: no period is shorter."""
        return max(sum(self.operations[index].ticks for index in users) for users in self.users.values())

    @cached_property
    def sequential(self) -> int:
        """Period, in ticks, at which one micro-batch goes down and up before the next one comes."""
        return sum(self.loads)

    def fewest_in_flight(self, period: int) -> list[int]:
        """Return the fewest micro-batches in flight of each stage in any pattern: those of 1F1B*.

        Stages that share a device can only have more.
        """
        return one_f_one_b.in_flight(self.loads, period)

    def bytes_at_least(self, in_flight: Sequence[int], stages: Sequence[int]) -> int:
        """Return the least stash and transient bytes at a device's peak, given the fewest in flight.

        A stage's count alternates between its maximum m and m - 1, and a micro-batch in flight in a stage is so
        in all stages before it. So when the forward of stage i starts, stage i has g_i, any other stage j at
        least g_j - 1, and those before it at least g_i: all stages that share a group peak together.
        """
        return self._bytes_at_least(in_flight, stages, self.stash)

    def _bytes_at_least(self, in_flight: Sequence[int], stages: Sequence[int], stash: Sequence[int]) -> int:
        base = sum((in_flight[stage] - 1) * stash[stage] for stage in stages)
        most = current = 0
        group = 0
        for stage in reversed(stages):
            current = stash[stage] + (
                max(current, self.transient[stage]) if in_flight[stage] == group else self.transient[stage]
            )
            group = in_flight[stage]
            most = max(most, current)
        return base + most

    def bytes_enough(self, in_flight: Sequence[int], stages: Sequence[int]) -> int:
        """Return the bytes of a device that runs all its forwards in a row, then all its backwards."""
        kept = sum(in_flight[stage] * self.stash[stage] for stage in stages)
        return kept + max(self.transient[stage] for stage in stages)

    def may_fit(self, period: int, estimate: Estimate = "peak") -> bool:
        """Return whether every device has room by the estimate; where a bound has none, no pattern fits."""
        if period < self.busiest:
            return False
        in_flight = self.fewest_in_flight(period)
        most = None if self.versions is None else self.versions.most_in_flight
        if most is not None and max(in_flight) > most:
            return False
        needs = self.bytes_enough if estimate == "safe" else self.bytes_at_least
        if any(needs(in_flight, device.stages) > device.room for device in self.memory):
            return False
        if estimate in ("peak", "safe"):
            return True
        return all(self._pairs_may_fit(period, device, estimate) for device in self.memory)

    def shortest_that_may_fit(self, estimate: Estimate = "peak") -> int | None:
        """Return the first period, in ticks, for which the estimate has room; None where there is none.

        It is a lower bound on the period of every pattern, except under ``"safe"``.
        """
        if not self.may_fit(self.sequential, estimate):
            return None

        def fits(period: int) -> bool:
            return self.may_fit(period, estimate)

        if estimate in ("pair", "pairs"):
            least = self.shortest_that_may_fit("peak")
            assert least is not None
            return bisect_left(range(least, self.sequential), True, key=fits) + least
        return one_f_one_b.shortest_that(fits, self.loads, self.busiest)

    def _pairs_may_fit(self, period: int, device: DeviceMemory, estimate: Estimate) -> bool:
        """Return whether the pairs of stages that the estimate looks at have room (``pairwise_memory.py``)."""
        if len(device.stages) == 1:
            return True
        kept, upper, lower, ahead, back = self._pairs(period, device, estimate)
        return bool(may_share(period, np.array(device.room - kept), upper, lower, ahead, back).all())

    def bytes_of_pairs(self, period: int, device: DeviceMemory, estimate: Estimate) -> int:
        """Return the stash and transient bytes that a device needs at least for any two of its stages."""
        if len(device.stages) == 1:
            return 0
        kept, upper, lower, ahead, back = self._pairs(period, device, estimate)
        return kept + int(least_room(period, upper, lower, ahead, back).max())

    def _pairs(
        self, period: int, device: DeviceMemory, estimate: Estimate
    ) -> tuple[int, Side, Side, Integers, Integers]:
        """Return the bytes of what is in flight beside the pairs, and the pairs as ``may_share`` takes them."""
        delays = one_f_one_b.delays(self.loads, period)[::2]
        kept = sum((delays[stage][0] - 1) * self.stash[stage] for stage in device.stages)
        sides, begins, ends = [], [], []
        for stage in device.stages:
            forward, backward = self.position[f"F{stage}"], self.position[f"B{stage}"]
            durations = self.operations[forward].ticks, self.operations[backward].ticks
            sides.append((*delays[stage], *durations, self.stash[stage], self.transient[stage]))
            begins.append(sum(operation.ticks for operation in self.operations[:forward]))
            ends.append(sum(operation.ticks for operation in self.operations[backward + 1 :]))
        numbers = range(len(sides))
        pairs = pairwise(numbers) if estimate == "pair" else combinations(numbers, 2)
        i, j = np.array(list(pairs)).T
        values, ahead, back = (np.array(each, dtype=np.int64) for each in (sides, begins, ends))
        return kept, Side(*values[i].T), Side(*values[j].T), ahead[j] - ahead[i], back[j] - back[i]

    def fits(self, pattern: Pattern) -> bool:
        """Return whether the stash and transient bytes of a pattern have room, and its versions of the weights."""
        return self.has_versions(pattern) and all(
            self.peak_bytes(pattern, device) <= device.room for device in self.memory
        )

    def peak_bytes(self, pattern: Pattern, device: DeviceMemory) -> int:
        """Return the peak of stash and transient bytes on a device: at the start of one of its operations.

        Versions of the weights, and gradients, beyond those in ``device.fixed`` are among them, as ``device.room``
        counts them.
        """
        begins = (pattern.begins[self.position[f"{kind}{stage}"]] for stage in device.stages for kind in "FB")
        return max(self._bytes_at(pattern, device, begin) for begin in begins) + self._beyond(pattern, device)

    def has_versions(self, pattern: Pattern) -> bool:
        """Return whether the versions that are counted are enough for what is in flight."""
        rule = self.versions
        if rule is None or rule.most_in_flight is None:
            return True
        lags = self.versions_of(pattern).lags
        # Along the whole pipeline it is what stage 0 has in flight that decides.
        return max(lags[:1] if rule.mode == VERTICAL_SYNC else lags) < rule.most_in_flight

    def versions_of(self, pattern: Pattern) -> WeightVersions:
        """Return the versions of the weights that a pattern uses, where the pipeline never drains."""
        assert self.versions is not None

        def place(name: str) -> tuple[int, float, float]:
            begin = pattern.begins[self.position[name]]
            return (*divmod(begin, pattern.period), self.operations[self.position[name]].ticks)

        stages = range(self.num_stages)
        return WeightVersions.of(
            self.versions.mode,
            self.versions.micro_batches_per_update,
            self.placement.devices,
            [place(f"F{stage}") for stage in stages],
            [place(f"B{stage}") for stage in stages],
        )

    def _beyond(self, pattern: Pattern, device: DeviceMemory) -> int:
        """Return the bytes of versions and gradients beyond one, and of that one what ``device.room`` has."""
        if self.versions is None:
            return 0
        versions = self.versions_of(pattern)
        return self.part_of_versions(device.stages) + sum(
            (versions.num_held(stage) - 1) * self.version_bytes[stage]
            + (versions.num_gradients(stage) - 1) * self.gradient_bytes[stage]
            for stage in device.stages
        )

    def fits_with_waiting(self, pattern: Pattern) -> bool:
        """Return whether a pattern has room with the tensors that wait at boundaries beyond the buffers."""

        def when(name: str) -> tuple[int, int]:
            begin = pattern.begins[self.position[name]]
            return begin, begin + self.operations[self.position[name]].ticks

        ends: dict[int, list[tuple[tuple[int, int], tuple[int, int], int]]] = defaultdict(list)
        devices = pattern.placement.devices
        for boundary, sent_bytes in enumerate(self.sent_bytes):
            there, back = when(f"SF{boundary}"), when(f"SB{boundary}")
            above = (when(f"F{boundary}")[1], there[1]), (back[0], when(f"B{boundary}")[0])
            below = (there[0], when(f"F{boundary + 1}")[0]), (when(f"B{boundary + 1}")[1], back[1])
            ends[devices[boundary]].append((*above, sent_bytes))
            ends[devices[boundary + 1]].append((*below, sent_bytes))
        for device in self.memory:
            mine = ends[devices[device.stages[0]]]
            moments = {when(f"{kind}{stage}")[0] for stage in device.stages for kind in "FB"}
            beyond = self._beyond(pattern, device)
            for now in moments | {span[0] for one, other, _ in mine for span in (one, other)}:
                total = self._bytes_at(pattern, device, now) + beyond
                for one, other, sent_bytes in mine:
                    waiting = _waiting(one, now, pattern.period) + _waiting(other, now, pattern.period)
                    total += max(0, waiting - self.slots) * sent_bytes
                if total > device.room:
                    return False
        return True

    def _bytes_at(self, pattern: Pattern, device: DeviceMemory, now: int) -> int:
        total = running = 0
        for stage in device.stages:
            spans = []
            for kind in "FB":
                position = self.position[f"{kind}{stage}"]
                begin = pattern.begins[position]
                spans.append((begin, begin + self.operations[position].ticks))
            whole = spans[0][0], spans[1][1]
            total += _alive(whole, now, pattern.period) * self.kept[stage]
            if any(_alive(span, now, pattern.period) for span in spans):
                running = max(running, self.transient[stage])
        return total + running


def _alive(span: tuple[int, int], now: int, period: int) -> int:
    """Count the repetitions of a span that hold at an instant; one that takes no time holds at its instant."""
    begin, end = span
    return int((now - begin) % period == 0) if begin == end else _waiting(span, now, period)


def _waiting(span: tuple[int, int], now: int, period: int) -> int:
    """Count the repetitions of a half-open span that hold at an instant."""
    begin, end = span
    return (now - begin) // period - (now - end) // period


@dataclass(frozen=True, slots=True)
class Pattern:
    """Allocation, and when its operations run, in ticks."""

    placement: Placement
    operations: tuple[Operation, ...]
    period: int
    begins: tuple[int, ...]
    """Ticks at which each operation begins on micro-batch 0; 0 for F0."""

    def schedule(self, clock: Clock) -> PeriodicSchedule:
        """Return the pattern in seconds, as a plan has it."""
        placed = []
        for operation, begin in zip(self.operations, self.begins, strict=True):
            shift, at = divmod(begin, self.period)
            stage = int(operation.name.lstrip("FBS"))
            devices = self.placement.devices
            is_transfer = operation.name.startswith("S")
            placed.append(
                PlacedOperation(
                    operation=operation.name,
                    device=None if is_transfer else devices[stage],
                    link=(devices[stage], devices[stage + 1]) if is_transfer else None,
                    start_seconds=clock.seconds(at),
                    duration_seconds=clock.seconds(operation.ticks),
                    shift=shift,
                )
            )
        return PeriodicSchedule(clock.seconds(self.period), tuple(placed))


@dataclass(frozen=True, slots=True)
class _Edge:
    """Rule for two operations: ``begin[after] >= begin[before] + ticks - periods * period``."""

    before: int
    after: int
    ticks: int
    periods: int


def pattern_of(road: Road, orders: Orders, shifts: Shifts, *, single_slots: bool) -> Pattern | None:
    """Return the shortest pattern with these orders and shifts, in exact integers; None where there is none.

    Every rule is a difference of two beginnings, so the least period is the largest ratio, ticks over periods,
    of any cycle of rules (rounded up to a tick), and the beginnings are longest paths from F0.

    Args:
        road: the allocation.
        orders: what each resource does in one period, in order.
        shifts: the shift of each operation, with the instants that ``orders`` refers to in [0, period).
        single_slots: allow one activation and one gradient to wait at each end of a boundary, not more.
    """
    edges = _order_edges(road, orders, shifts)
    if single_slots:
        edges += _slot_edges(road)
    period = max(1, road.busiest)
    while True:
        longest = _longest_paths(len(road.operations), edges, period)
        if isinstance(longest, list):
            return Pattern(road.placement, tuple(road.operations), period, tuple(longest))
        ticks, periods = longest
        if periods <= 0:
            return None
        period = -(-ticks // periods)


def one_by_one(road: Road) -> Pattern:
    """Return the pattern of one micro-batch after the other: least memory, longest period.

    The allocation must have room for one micro-batch. It is what ``pattern_of`` finds for the orders of the path,
    without shifts, in O(S) time for S stages: each operation begins when the one before it has ended.
    """
    begins = tuple(accumulate((operation.ticks for operation in road.operations[:-1]), initial=0))
    # The device of the first stage begins the path and ends it.
    pattern = Pattern(road.placement, tuple(road.operations), max(1, road.sequential), begins)
    assert road.fits(pattern), "one micro-batch at a time fits by its bytes"
    return pattern


def _order_edges(road: Road, orders: Orders, shifts: Shifts) -> list[_Edge]:
    ticks = [operation.ticks for operation in road.operations]
    edges = [_Edge(before, before + 1, ticks[before], 0) for before in range(len(ticks) - 1)]
    for order in orders.values():
        for before, after in pairwise(order):
            edges.append(_Edge(before, after, ticks[before], shifts[before] - shifts[after]))
        first, last = order[0], order[-1]
        edges.append(_Edge(last, first, ticks[last], shifts[last] - shifts[first] + 1))
    return edges


def _slot_edges(road: Road) -> Iterable[_Edge]:
    """Yield the rules by which a tensor leaves sender and receiver within a period of its coming."""
    for index, operation in enumerate(road.operations):
        if operation.name.startswith("S"):
            producer, consumer = index - 1, index + 1
            yield _Edge(index, producer, operation.ticks - road.operations[producer].ticks, 1)
            yield _Edge(consumer, index, 0, 1)


def _longest_paths(size: int, edges: Sequence[_Edge], period: int) -> list[int] | tuple[int, int]:
    """Return the beginnings with F0 at 0, or ticks and periods of a cycle that asks for a longer period."""
    weights = [(edge, edge.ticks - edge.periods * period) for edge in edges]
    reach = [0] + [-(2**200)] * (size - 1)
    came_by: list[_Edge | None] = [None] * size
    changed = 0
    for _ in range(size + 1):
        changed = -1
        for edge, weight in weights:
            if reach[edge.before] + weight > reach[edge.after]:
                reach[edge.after] = reach[edge.before] + weight
                came_by[edge.after] = edge
                changed = edge.after
        if changed < 0:
            return reach
    node = changed
    for _ in range(size):  # back until the walk is surely on the cycle
        edge_in = came_by[node]
        assert edge_in is not None
        node = edge_in.before
    ticks = periods = 0
    end = node
    while True:
        edge_in = came_by[node]
        assert edge_in is not None
        ticks, periods, node = ticks + edge_in.ticks, periods + edge_in.periods, edge_in.before
        if node == end:
            return ticks, periods
