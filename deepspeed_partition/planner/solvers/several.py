"""Allocations in which several devices have several stages: all of them, or the neighbours of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from deepspeed_partition.planner.solvers.one_f_one_b import Delay, add
from deepspeed_partition.planner.solvers.problem import Problem
from deepspeed_partition.planner.solvers.road import Placement


@dataclass(frozen=True, slots=True)
class _Device:
    """A device to which stages are given from the end of the chain on; bytes as in ``Road.bytes_at_least``."""

    load: int = 0
    weights: int = 0
    kept: int = 0
    """Without weights and without the group that peaks."""
    peak: int = 0
    group: int = 0
    current: int = 0
    """Of the group that may still grow."""


class _TooMany(Exception):
    """More partial allocations than the caller allows, or too little time."""


def all_placements(problem: Problem, period: int, limit: int) -> list[Placement] | None:
    """Every allocation with several stages on several devices that may fit at a period.

    None where that takes more than ``limit`` partial allocations, or too long. Of an allocation that is left out
    no pattern of this period exists.
    """
    search = _Enumeration(problem, period, limit)
    try:
        search.extend(problem.chain.num_layers, (1, 0), {}, (), ())
    except _TooMany:
        return None
    return search.found


class _Enumeration:
    def __init__(self, problem: Problem, period: int, limit: int) -> None:
        self.problem = problem
        self.period = period
        self.left = limit
        self.found: list[Placement] = []
        chain, platform = problem.chain, problem.platform
        self.compute = problem.times.compute.tolist()
        self.transfer = problem.times.round_trip.tolist()
        self.weights = [0]
        self.stash = [0]
        for layer in chain.layers:
            self.weights.append(self.weights[-1] + layer.weight_bytes)
            self.stash.append(self.stash[-1] + chain.stash(layer))
        self.num_devices = platform.num_devices

    def extend(
        self,
        stop: int,
        delay: Delay,
        links: dict[tuple[int, int], int],
        devices: tuple[_Device, ...],
        above: tuple[tuple[int, int], ...],
    ) -> None:
        """Lay layers 0 to ``stop``; ``above`` has start and device of each stage laid, the last stage first."""
        if self.left <= 0 or self.problem.deadline.passed():
            raise _TooMany
        self.left -= 1
        if stop == 0:
            cuts = [start for start, _ in reversed(above)]
            placement = Placement.of(
                [*cuts, self.problem.chain.num_layers], [device for _, device in reversed(above)]
            )
            if placement.num_shared > 1:
                self.found.append(placement)
            return
        transfer = self.transfer[stop]
        if above and transfer > self.period:
            return
        delay = add(delay, transfer, self.period)
        top = above[-1][1] if above else -1
        for start in range(stop - 1, -1, -1):
            load = self.compute[stop] - self.compute[start]
            if load > self.period:
                break
            after = add(delay, load, self.period)
            for device in range(min(len(devices) + 1, self.num_devices)):
                if device == top:
                    continue
                link = (min(device, top), max(device, top))
                on_link = links.get(link, 0) + transfer
                if above and on_link > self.period:
                    continue
                before = devices[device] if device < len(devices) else _Device()
                with_stage = self._with_stage(before, start, stop, load, after[0])
                if with_stage is None:
                    continue
                laid = (*devices[:device], with_stage, *devices[device + 1 :])
                if self._rest_may_fit(laid, start, after[0]):
                    self.extend(start, after, {**links, link: on_link}, laid, (*above, (start, device)))

    def _with_stage(self, device: _Device, start: int, stop: int, load: int, group: int) -> _Device | None:
        table, platform = self.problem.table, self.problem.platform
        stash, transient = int(table.stash[start, stop]), int(table.transient[start, stop])
        grown = stash + (max(device.current, transient) if device.group == group else transient)
        new = _Device(
            load=device.load + load,
            weights=device.weights + self.weights[stop] - self.weights[start],
            kept=device.kept + int(table.buffers[start, stop]) + (group - 1) * stash,
            peak=max(device.peak, grown),
            group=group,
            current=grown,
        )
        fits = platform.weights_bytes(new.weights) + new.kept + new.peak <= platform.memory_bytes
        return new if fits and new.load <= self.period else None

    def _rest_may_fit(self, devices: tuple[_Device, ...], start: int, group: int) -> bool:
        """Whether time and memory suffice for layers 0 to ``start``, which are in this group or a later one."""
        platform = self.problem.platform
        if self.compute[start] > self.num_devices * self.period - sum(device.load for device in devices):
            return False
        weights = platform.weights_bytes(self.weights[start] + sum(device.weights for device in devices))
        kept = (group - 1) * self.stash[start] + sum(device.kept for device in devices)
        return weights + kept <= self.num_devices * platform.memory_bytes + self.num_devices


def neighbours(problem: Problem, placement: Placement) -> Iterator[Placement]:
    """Allocations one change away: a layer moved over a cut, a stage or a part of one on another device."""
    num_devices = problem.platform.num_devices
    owner = [
        device for (start, stop), device in zip(pairwise(placement.cuts), placement.devices, strict=True)
        for _ in range(start, stop)
    ]  # fmt: skip
    seen = {placement}
    for start, stop in pairwise(placement.cuts):
        for first in range(start, stop):
            # All of the stage, or either end of it: the parts whose move adds one cut at the most.
            for last in range(first + 1, stop + 1) if first == start else (stop,):
                for device in range(num_devices):
                    if device != owner[first]:
                        moved = _of_layers([*owner[:first], *[device] * (last - first), *owner[last:]])
                        if moved not in seen:
                            seen.add(moved)
                            yield moved


def _of_layers(owner: list[int]) -> Placement:
    return Placement.of(range(len(owner) + 1), owner)
