"""The best contiguous allocation on devices and links that are not alike, for the period of 1F1B*.

A stage is on one device, and a device has one stage at most. Which device comes where in the pipeline is part of
the answer: it decides how long a stage takes, how many micro-batches it has room for, and which link a boundary
crosses. For one order of the devices, of which the last n run the n stages, the decision at a period is that of
``optimal.py`` with times, memory and links of each place; it is exact, in O(P L^2) time. The orders are all that
differ in anything, where these are ``MOST_ORDERS`` at the most, and then the answer is proved. Otherwise they are
the devices as numbered, sorted by memory and by speed with each group of linked devices together, and what gets
better by moving one device or swapping two, until the time is up.

Source: MadPipe paper, section 4.1, for the schedule and the recurrence; the search over devices is an addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks
from deepspeed_partition.planner.clock import Ticks, TimedChain
from deepspeed_partition.planner.deadline import DeadlinePassed
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, trace
from deepspeed_partition.planner.solvers.contiguous.partition_search import (
    Option,
    PartitionSearch,
    narrow,
    with_one_stage_more,
)
from deepspeed_partition.planner.solvers.contiguous.recomputing import Way, recomputing_search, useful
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices

MOST_DEVICES, MOST_ORDERS = 8, 200
"""Most devices, and most orders of them, where all orders are tried."""
MOST_LEVELS = 2
"""Most levels of links of which two groups with the same devices are the same for every order."""
SEARCH_SECONDS = 1.0
"""Seconds that the search has at the least."""
Kind = tuple[float, int]
"""Speed and memory of a device."""


@dataclass(frozen=True, slots=True)
class DevicePipeline:
    """Contiguous allocation on certain devices."""

    cuts: Cuts
    devices: tuple[int, ...]
    """Device of each stage."""
    recomputed: tuple[Blocks, ...]
    """Layers that are recomputed, for each stage."""
    period: int
    """Period in ticks."""
    proved: bool = False
    """True: no contiguous allocation, on any devices, has a shorter period."""


class UnlikeDevices:
    """Search for contiguous allocations on the devices of a problem's platform."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.platform = problem, problem.platform
        self.num_layers = problem.chain.num_layers
        self.deadline = problem.deadline.at_least(SEARCH_SECONDS)
        devices = range(self.platform.num_devices)
        self.kinds: list[Kind] = [
            (self.platform.speed_of(device), self.platform.memory_of(device)) for device in devices
        ]
        self.problems = {kind: problem_for(problem, *kind) for kind in dict.fromkeys(self.kinds)}
        """The problem as if all devices were of one kind."""
        self._transfers: dict[tuple[float, ...], Ticks] = {}
        self._links: dict[tuple[int, int], Ticks] = {}
        slowest = max(self.problems.values(), key=lambda each: int(each.times.compute[-1]))
        every = [self.transfer(one, other) for one in devices for other in devices if one < other]
        longest = np.max(every, axis=0) if every else np.zeros(self.num_layers + 1, dtype=np.int64)
        self.relaxed = int(slowest.times.compute[-1] + slowest.times.forward[-1] + 2 * longest.sum())
        """Period, in ticks, at which every stage of any allocation has one micro-batch in flight."""
        self._options: dict[tuple[Kind, int], tuple[NDArray[np.intp], list[Option]]] = {}
        self._searches: dict[Kind, PartitionSearch] = {}

    def transfer(self, one: int, other: int) -> Ticks:
        """Return the ticks of one tensor between two devices over the boundary before each layer."""
        if (one, other) not in self._links:
            platform, chain = self.platform, self.problem.chain
            probes = tuple(platform.transfer_seconds(size, one, other) for size in (0, 10**9))
            if probes not in self._transfers:  # links of one level are alike
                seconds = [
                    platform.transfer_seconds(chain.boundary_bytes(index), one, other)
                    for index in range(1, self.num_layers)
                ]
                ticks = self.problem.times.clock.ticks
                self._transfers[probes] = np.array([0, *map(ticks, seconds), 0], dtype=np.int64)
            self._links[one, other] = self._transfers[probes]
        return self._links[one, other]

    def best(self) -> DevicePipeline | None:
        """Return the allocation of the shortest period that is found; None where none fits.

        It is looked for without recomputation first, then with that of whole stages, which takes a moment each.
        """
        found: DevicePipeline | None = None
        for search in self._simpler():
            found = search._best(found)
        return self._best(found)

    def _simpler(self) -> Iterator[UnlikeDevices]:
        problem = self.problem
        if problem.recomputation is not None:
            yield UnlikeDevices(replace(problem, recomputation=None))
            if problem.recomputation.mode != "stage":
                yield UnlikeDevices(replace(problem, recomputation=Recomputation(problem.times, "stage")))

    def _best(self, found: DevicePipeline | None) -> DevicePipeline | None:
        """Return the best allocation that is found; ``found`` where none is better."""
        orders = list(self._few_orders())
        if found is not None:
            found = replace(found, proved=False)
        try:
            if orders:
                for order in orders:
                    found = self._better(order, found)
                return None if found is None else replace(found, proved=self._is_exact())
            for order in self._first_orders():
                found = self._better(order, found)
            return self._improved(found) if found is not None else None
        except DeadlinePassed:
            return found

    def in_order(self, order: Sequence[int]) -> DevicePipeline | None:
        """Return the best allocation of the last devices of an order; None where none fits, or the time is up."""
        found: DevicePipeline | None = None
        with suppress(DeadlinePassed):
            for search in (*self._simpler(), self):
                found = search._better(tuple(order), found)
        return found

    def priced(self, cuts: Cuts, devices: Sequence[int]) -> DevicePipeline | None:
        """Return an allocation with its shortest period, and what its stages recompute; None: it does not fit."""
        stages = list(pairwise(cuts))
        options: list[list[Way]] = []
        for stage, device in zip(stages, devices, strict=True):
            problem = self.problems[self.kinds[device]]
            if not problem.constraints.allowed(problem.table)[stage]:
                return None
            if problem.recomputation is None:
                room = int(problem.table.max_in_flight[stage])
                options.append([(0, 0, room)] if room else [])
            else:
                ways = problem.recomputation.ways(stage)
                options.append(useful(problem, stage, ways, 2 * len(stages)))
        if not all(options):
            return None
        loads = [
            self.problems[self.kinds[device]].times.compute_ticks(*stage)
            for stage, device in zip(stages, devices, strict=True)
        ]
        sends = [
            2 * int(self.transfer(one, other)[cut])
            for (one, other), cut in zip(pairwise(devices), cuts[1:-1], strict=True)
        ]

        def period_of(choice: Sequence[Way], _: int) -> int:
            return _least_period(loads, sends, choice)

        def decide(period: int) -> list[Way] | None:
            return _choice_at(loads, sends, options, period)

        start = [each[-1] for each in options]
        choice, period = narrow(decide, period_of, start, period_of(start, 0), max(loads))
        blocks = []
        for stage, device, (number, _, _) in zip(stages, devices, choice, strict=True):
            costs = self.problems[self.kinds[device]].recomputation
            blocks.append(() if costs is None else costs.ways(stage).blocks(number))
        return DevicePipeline(cuts, tuple(devices), tuple(blocks), period)

    def _better(self, order: tuple[int, ...], best: DevicePipeline | None) -> DevicePipeline | None:
        """Return the best allocation of an order where it is shorter than ``best``, and else ``best``."""
        if best is None:
            cuts = self.decide(order, self.relaxed)
            best = None if cuts is None else self._priced(cuts, order)
        else:
            cuts = self.decide(order, best.period - 1)
            best = best if cuts is None else self._priced(cuts, order)
        if cuts is None or best is None:
            return best

        def decide(period: int) -> DevicePipeline | None:
            found = self.decide(order, period)
            return None if found is None else self._priced(found, order)

        better, _ = narrow(decide, lambda found, _: found.period, best, best.period, self._bound())
        return better

    def _priced(self, cuts: Cuts, order: Sequence[int]) -> DevicePipeline:
        priced = self.priced(cuts, order[len(order) - len(cuts) + 1 :])
        assert priced is not None, "a partition that a decision found does not fit"
        return priced

    def _bound(self) -> int:
        """Return a period, in ticks, that no allocation beats: all layers at the speed of all devices together."""
        compute = [self.problems[kind].times.compute[-1] for kind in self.kinds]
        return int(1 / sum(1 / float(each) for each in compute)) if all(compute) else 0

    def decide(self, order: Sequence[int], period: int) -> Cuts | None:
        """Return a partition onto the last devices of an order that fits at a period; None where there is none.

        Raises:
            DeadlinePassed: the deadline passed before that was known.
        """
        base = period + 1  # a delay as one integer, group * base + fill, so that the least is found by min
        delay = np.full(self.num_layers + 1, NOTHING_FITS, dtype=np.int64)
        delay[self.num_layers] = base
        counts = self.problem.constraints.counts(self.num_layers)
        choices: list[NDArray[np.intp]] = []
        following: int | None = None
        for count, device in enumerate(reversed(order), 1):
            if count > max(counts, default=0):
                return None
            self.deadline.check()
            if following is not None:
                delay = _above(delay, 2 * self.transfer(device, following), period)
            stops, options = self._stages(self.kinds[device], period)
            choice, delay = with_one_stage_more(delay, stops, options, period)
            choices.append(choice)
            if count in counts and delay[0] < NOTHING_FITS:
                return trace(choices, self.num_layers)
            following = device
        return None

    def _stages(self, kind: Kind, period: int) -> tuple[NDArray[np.intp], list[Option]]:
        """Return the ends of stages on a device of this kind, and what they may take (``PartitionSearch``)."""
        if (kind, period) not in self._options:
            if kind not in self._searches:
                problem = replace(self.problems[kind], deadline=self.deadline)
                self._searches[kind] = (
                    PartitionSearch(problem.times, problem.table, problem.constraints, problem.deadline)
                    if problem.recomputation is None
                    else recomputing_search(problem, self.relaxed)
                )
            if len(self._options) > 64:
                self._options.clear()
            self._options[kind, period] = self._searches[kind].short_stages(period)
        return self._options[kind, period]

    def _is_exact(self) -> bool:
        costs = [problem.recomputation for problem in self.problems.values()]
        complete = all(getattr(search, "is_complete", True) for search in self._searches.values())
        return complete and all(each is None or each.is_exact for each in costs)

    def _few_orders(self) -> Iterator[tuple[int, ...]]:
        """Yield all orders that differ in anything; none where they are more than ``MOST_ORDERS``."""
        if len(self.kinds) > MOST_DEVICES:
            return
        seen: set[tuple[object, ...]] = set()
        found: list[tuple[int, ...]] = []
        for order in self._orders((), set(range(len(self.kinds)))):
            key = self._key(order)
            if key not in seen:
                seen.add(key)
                found.append(order)
                if len(found) > MOST_ORDERS:
                    return
        yield from found

    def _orders(self, behind: tuple[int, ...], left: set[int]) -> Iterator[tuple[int, ...]]:
        """Yield the orders that end with ``behind``; of devices that are alike for it the first one alone."""
        if not left:
            yield behind
            return
        seen: set[tuple[object, ...]] = set()
        for device in sorted(left):
            key = self._seen_as(device, left)
            if key not in seen:
                seen.add(key)
                yield from self._orders((device, *behind), left - {device})

    def _seen_as(self, device: int, left: set[int]) -> tuple[object, ...]:
        """Return all that is known of a device: its kind, and its links to each other device and their kinds."""
        others = range(len(self.kinds))
        placed = tuple(
            id(self.transfer(device, other)) for other in others if other not in left and other != device
        )
        free = sorted((id(self.transfer(device, other)), self.kinds[other]) for other in left if other != device)
        # Groups within groups may differ further away: there only devices of one innermost group are the same.
        has_more = self.platform.machines is not None and len(self.platform.machines.links) > MOST_LEVELS
        return (self.kinds[device], placed, tuple(free), self._node(device) if has_more else 0)

    def _node(self, device: int) -> int:
        """Return the innermost group of devices that a device, or that of the first pipeline, is in."""
        machines = self.platform.machines
        sizes = [] if machines is None else [level.group for level in machines.links if level.group]
        first = self.platform.pipelines[0][device] if self.platform.pipelines else device
        return first // sizes[0] if sizes else 0

    def _key(self, order: Sequence[int]) -> tuple[object, ...]:
        """Return what an order is for a pipeline: kinds, and the links between neighbours."""
        links = tuple(id(self.transfer(one, other)) for one, other in pairwise(order))
        return tuple(self.kinds[device] for device in order), links

    def _first_orders(self) -> list[tuple[int, ...]]:
        natural = tuple(range(len(self.kinds)))
        node = {device: self._node(device) for device in natural}

        def by(part: int, sign: int) -> tuple[int, ...]:
            most = {
                each: max(self.kinds[device][part] for device in natural if node[device] == each)
                for each in set(node.values())
            }
            return tuple(
                sorted(
                    natural,
                    key=lambda device: (sign * most[node[device]], node[device], sign * self.kinds[device][part]),
                )
            )

        orders = [natural, natural[::-1], by(1, -1), by(1, 1), by(0, -1), by(0, 1)]
        return list(dict.fromkeys(orders))

    def _improved(self, best: DevicePipeline) -> DevicePipeline:
        """Return what local search makes of an allocation: a device moved to another place, or two swapped."""
        seen: set[tuple[object, ...]] = set()
        improved = True
        while improved and not self.deadline.passed():
            improved = False
            used = best.devices
            unused = tuple(device for device in range(len(self.kinds)) if device not in used)
            for order in _neighbours((*unused, *used)):
                if self._key(order) in seen:
                    continue
                seen.add(self._key(order))
                try:
                    better = self._better(order, best)
                except DeadlinePassed:
                    return best
                if better is not None and better.period < best.period:
                    best, improved = better, True
                    break
        return best

    def smallest_memory(self) -> int:
        """Return the bytes that each device must have at the least, if all have as many."""
        problem = self.problem
        needs = problem.table.needs(1)
        if problem.recomputation is not None:  # all ways of all stages would take long, and gain little more
            for uniform in uniform_choices(problem):
                needs = np.minimum(needs, uniform.problem.table.needs(1))
        stages = self.platform.num_devices
        best = np.full(self.num_layers + 1, NOTHING_FITS, dtype=np.int64)
        best[0] = 0
        allowed = problem.constraints.allowed(problem.table)
        smallest = NOTHING_FITS
        for _ in range(min(stages, self.num_layers)):
            reach = np.where(allowed, np.maximum(best[:, None], needs), NOTHING_FITS)
            best = reach.min(axis=0)
            smallest = min(smallest, int(best[-1]))
        return int(smallest)


def problem_for(problem: Problem, speed: float, memory_bytes: int) -> Problem:
    """Return the problem as if every device had this speed and memory, on the clock of ``problem``."""
    times = problem.times
    if speed != 1:
        times = TimedChain(scaled(problem.chain, speed), problem.platform, times.clock)
    given = replace(problem, times=times)
    if memory_bytes != problem.platform.memory_bytes:
        given = given.with_memory(memory_bytes)
    if problem.recomputation is not None and speed != 1:
        given = replace(given, recomputation=Recomputation(times, problem.recomputation.mode))
    return given


def scaled(chain: Chain, speed: float | Sequence[float]) -> Chain:
    """Return a chain whose layers run at a speed, or each at its own."""
    speeds = [speed] * chain.num_layers if isinstance(speed, int | float) else speed

    def slower(seconds: float | None, by: float) -> float | None:
        return None if seconds is None else seconds / by

    return replace(
        chain,
        layers=tuple(
            replace(
                layer,
                forward_seconds=layer.forward_seconds / by,
                backward_seconds=layer.backward_seconds / by,
                backward_input_seconds=slower(layer.backward_input_seconds, by),
                backward_weight_seconds=slower(layer.backward_weight_seconds, by),
            )
            for layer, by in zip(chain.layers, speeds, strict=True)
        ),
    )


def _above(delay: NDArray[np.int64], transfer: Ticks, period: int) -> NDArray[np.int64]:
    """Add the transfer over the boundary before each layer to the delays."""
    base = period + 1
    group, fill = np.divmod(delay, base)
    above = np.where(fill + transfer > period, (group + 1) * base + transfer, delay + transfer)
    return np.where((delay < NOTHING_FITS) & (transfer <= period), above, NOTHING_FITS)


def _least_period(loads: Sequence[int], sends: Sequence[int], choice: Sequence[Way]) -> int:
    stages = [load + extra for load, (_, extra, _) in zip(loads, choice, strict=True)]
    pseudo = [stages[0], *(load for pair in zip(sends, stages[1:], strict=True) for load in pair)]
    period = one_f_one_b.least_period(pseudo, [room for _, _, room in choice])
    assert period is not None
    return period


def _choice_at(
    loads: Sequence[int], sends: Sequence[int], options: Sequence[list[Way]], period: int
) -> list[Way] | None:
    """Return an option of each stage with which the allocation fits at a period; None where there is none."""
    delay: one_f_one_b.Delay = (1, 0)
    chosen: list[Way] = []
    for index in range(len(loads) - 1, -1, -1):
        if index < len(sends):
            if sends[index] > period:
                return None
            delay = one_f_one_b.add(delay, sends[index], period)
        above = [
            (one_f_one_b.add(delay, loads[index] + option[1], period), option)
            for option in options[index]
            if loads[index] + option[1] <= period
        ]
        fitting = [(after, option) for after, option in above if after[0] <= option[2]]
        if not fitting:
            return None
        delay, option = min(fitting)
        chosen.append(option)
    return chosen[::-1]


def _neighbours(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield orders with two devices swapped, or one moved."""
    size = len(order)
    for one in range(size):
        for other in range(one + 1, size):
            swapped = list(order)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield tuple(swapped)
    for one in range(size):
        rest = order[:one] + order[one + 1 :]
        for other in range(size):
            if other != one:
                yield (*rest[:other], order[one], *rest[other:])
