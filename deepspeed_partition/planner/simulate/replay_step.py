"""Simulation of one step for the replay (``replay.py``): orders in, instants out.

It is written from the rules of a step alone; the planner's own simulation (``step_simulator.py``) is another
program.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain


@dataclass
class Timeline:
    """Instants of every operation on every micro-batch, in ticks."""

    operations: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    window: tuple[int, float] = (0, math.inf)
    """Ticks between which peaks are looked for: in a pattern the last period, when everything before it has
    begun."""

    @cached_property
    def micro_batches(self) -> range:
        """Numbers of all micro-batches; known once every operation is there."""
        return range(max(micro_batch for _, micro_batch in self.operations) + 1)

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of all operations; known once every operation is there."""
        return frozenset(self.spans)

    @cached_property
    def spans(self) -> dict[str, NDArray[Any]]:
        """When each operation begins and ends, a row for each of its micro-batches in their order, by its name;
        known once every operation is there."""
        found: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for (name, micro_batch), span in self.operations.items():
            found[name][micro_batch] = span
        return {name: as_spans(spans[number] for number in sorted(spans)) for name, spans in found.items()}


def as_spans(spans: Iterable[tuple[int, int]]) -> NDArray[Any]:
    """Return intervals as rows of two; Python's integers where 64 bits are too few."""
    return np.array(list(spans)).reshape(-1, 2)


def boundaries_of(plan: Plan, chain: Chain, *, between_devices: bool) -> Iterator[tuple[int, int]]:
    """Yield the stage before each boundary and the bytes that cross it."""
    for index in range(len(plan.stages) - 1):
        travels = plan.stages[index].device != plan.stages[index + 1].device
        if travels == between_devices:
            yield index, chain.boundary_bytes(plan.stages[index].layers[1])


def occupied_by(plan: Plan, boundary: int, direction: str) -> list[str]:
    """Return what a transfer occupies, in words: two transfers with the same words in common exclude each other.

    Args:
        boundary: the stage before it.
        direction: ``"F"`` for the activation, ``"B"`` for the gradient.
    """
    platform, ends = plan.platform, [plan.stages[boundary].device, plan.stages[boundary + 1].device]
    source, destination = ends if direction == "F" else ends[::-1]
    if platform.duplex == "full":
        result = [f"the link {source}>{destination}"]
    else:
        result = [f"the link {min(ends)}-{max(ends)}"]
    sending, receiving = (device // platform.devices_per_port for device in (source, destination))
    if platform.port_bandwidth is not None and sending != receiving:
        result += [f"the port out of host {sending}", f"the port into host {receiving}"]
    return result


def step_ticks(plan: Plan, chain: Chain, step: Timeline) -> int:
    """Return the ticks until the last stage has ended its last backward and the all-reduce after it."""
    ticks = Clock.of(chain, plan.platform).ticks
    tails = plan.allreduce_seconds or [0.0] * len(plan.stages)
    ends = {name: int(spans[:, 1].max()) for name, spans in step.spans.items()}
    backwards = [max(ends.get(f"{kind}{index}", 0) for kind in "BIW") for index in range(len(plan.stages))]
    return max(end + ticks(tail) for end, tail in zip(backwards, tails, strict=True))


def run_step(plan: Plan, chain: Chain) -> Timeline | str:
    """Run the step's orders, transfers as early as possible; return a sentence where they cannot run.

    Times are in ticks. The operation or transfer that can start first is always committed first: whatever is
    committed later cannot start earlier.
    """
    assert plan.step is not None
    violation = _order_violation(plan, chain)
    if violation is not None:
        return violation
    return _StepRun(plan, chain).run()


def _order_violation(plan: Plan, chain: Chain) -> str | None:
    """Return a sentence where the orders are not each forward and backward once, on its device; else None.

    A forward that keeps nothing may stand in the place of one that keeps, and then a recomputation beside it; the
    two halves of a backward in the place of the whole.
    """
    assert plan.step is not None
    entries = {entry for order in plan.step.order for entry in order}
    wanted = {}
    for index, stage in enumerate(plan.stages):
        has_halves = all(layer.backward_input_seconds is not None for layer in chain.layers[slice(*stage.layers)])
        for micro_batch in range(plan.step.num_micro_batches):
            keeps_nothing = (f"f{index}", micro_batch) in entries
            wanted[f"{'f' if keeps_nothing else 'F'}{index}", micro_batch] = stage.device
            if keeps_nothing and (f"R{index}", micro_batch) in entries:
                wanted[f"R{index}", micro_batch] = stage.device
            in_halves = (f"I{index}", micro_batch) in entries
            for kind in "IW" if in_halves else "B":
                wanted[f"{kind}{index}", micro_batch] = stage.device
            if in_halves and not has_halves:
                return f"I{index} is half a backward, and the chain does not say how long its halves last"
    for device, order in enumerate(plan.step.order):
        for entry in order:
            if wanted.pop(entry, None) != device:
                return f"{entry[0]} of micro-batch {entry[1]} does not stand once in the order of its device"
    if wanted:
        name, micro_batch = next(iter(wanted))
        return f"{name} of micro-batch {micro_batch} is missing from the order"
    return None


class _StepRun:
    """A run of a step's jobs, in numbers: a long step has a million of them, and names are slow.

    A job is an operation or a transfer on one micro-batch; its number is that of its name times the number of
    micro-batches, plus that of the micro-batch. Names are in alphabetical order, those of transfers at the end: of
    what can start at one tick the lowest number is first. A place is a device or a line, where transfers wait that
    may exclude each other; devices come first.
    """

    def __init__(self, plan: Plan, chain: Chain) -> None:
        assert plan.step is not None
        self.plan = plan
        # Ties decide which transfer goes first: the clock makes them the same instants as in the planner.
        self.clock = Clock.of(chain, plan.platform)
        ticks_of, again = self._ticks(chain)
        in_orders = {name for order in plan.step.order for name, _ in order}
        wanted = in_orders | {_role(name) for name in in_orders} | {name for name in ticks_of if name[0] == "S"}
        names = sorted(wanted, key=lambda name: (name[0] == "S", name))
        number_of = {name: number for number, name in enumerate(names)}
        self.names, self.number_of = names, number_of
        self.ticks = [ticks_of[name] for name in names]
        self.num_micro_batches = plan.step.num_micro_batches
        self.num_jobs = len(names) * self.num_micro_batches
        self.num_devices = plan.platform.num_devices
        self.is_transfer = [name[0] == "S" for name in names]
        # What a name alone tells is told once.
        self.role = [number_of[_role(name)] for name in names]
        self.needs = [self._needs(name) for name in names]
        self.receiver = [number_of[_receiver(name)] if name[0] == "S" else 0 for name in names]
        """Role of the operation that uses what a transfer brings."""
        self.send = [self._send(name) for name in names]
        """Transfer that follows an operation; None where none does."""
        self.lines: dict[tuple[int, ...], int] = {}
        """Places of lines, by the two devices of a link; by none where all links share ports."""
        self.place = [self._place(name) for name in names]
        self.near = [self._near(number) for number in range(len(names))]
        resources: dict[str, int] = {}
        self.occupied = [
            [resources.setdefault(each, len(resources)) for each in self._occupied(name)] for name in names
        ]
        self.free_from = [0] * len(resources)
        """Ticks at which the last transfer of each link and port has ended."""
        self.slots = max(1, plan.platform.comm_buffers // 2)
        self.orders = [[self._job(*entry) for entry in order] for order in plan.step.order]
        self.needs_again: dict[int, int] = {}
        """Recomputations that backwards, or their first halves, must wait for."""
        self.again: dict[int, int] = {}
        """Ticks by which backwards, or their first halves, are longer: they run the forward again themselves."""
        apart = {entry for order in plan.step.order for entry in order if entry[0][0] == "R"}
        for name, number in {entry for order in plan.step.order for entry in order if entry[0][0] == "f"}:
            again_by = f"R{name[1:]}", number
            for backward in in_orders & {f"B{name[1:]}", f"I{name[1:]}"}:
                job = self._job(backward, number)
                if again_by in apart:
                    self.needs_again[job] = self._job(*again_by)
                else:
                    self.again[job] = again[name[1:]]
        self.begins, self.ends = [-1] * self.num_jobs, [-1] * self.num_jobs
        """Ticks at which operations and transfers begin and end, by their role; -1 where that is not known."""
        self.done: list[int] = []
        self.device_free = [0] * self.num_devices
        self.position = [0] * len(self.orders)
        num_places = self.num_devices + len(self.lines)
        self.waiting: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(num_places)]
        """What waits in each line: by transfer, when its tensors were ready and their micro-batches, in order."""
        self.sent: list[list[int]] = [[] for _ in names]
        """Micro-batches of which each transfer has begun."""
        self.candidates = [-1] * num_places
        """What could start first in each place: its start in ticks times the number of jobs, plus its job; -1
        where nothing can, as far as is known."""
        self.heap: list[int] = []
        """Candidates of all places, also former ones."""

    def _ticks(self, chain: Chain) -> tuple[dict[str, int], dict[str, int]]:
        """Return how long each operation and transfer lasts by its name, and each forward, alone, by its stage."""
        plan, to_ticks = self.plan, self.clock.ticks
        durations: dict[str, int] = {}
        for index, stage in enumerate(plan.stages):
            layers = chain.layers[slice(*stage.layers)]
            speed = plan.platform.speed_of(stage.device)

            def ticks(seconds: float, speed: float = speed) -> int:
                return to_ticks(seconds / speed)

            recomputed = [layer for first, last in stage.blocks for layer in chain.layers[first:last]]
            again = sum(ticks(layer.forward_seconds) for layer in recomputed)
            durations[f"F{index}"] = sum(ticks(layer.forward_seconds) for layer in layers)
            durations[f"B{index}"] = sum(ticks(layer.backward_seconds) for layer in layers) + again
            durations[f"f{index}"] = durations[f"R{index}"] = durations[f"F{index}"]
            halves = [
                [
                    ticks(seconds or 0.0)
                    for seconds in (layer.backward_input_seconds, layer.backward_weight_seconds)
                ]
                for layer in layers
            ]
            durations[f"I{index}"] = sum(first for first, _ in halves) + again
            durations[f"W{index}"] = sum(second for _, second in halves)
        forwards = {name[1:]: duration for name, duration in durations.items() if name[0] == "F"}
        for name in durations:
            durations[name] += to_ticks(plan.platform.operation_seconds)
        for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
            copied = to_ticks(plan.platform.copy_seconds(num_bytes))
            for kind in "FfBI":
                for end in (index, index + 1):
                    durations[f"{kind}{end}"] += copied
        for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
            ends = plan.stages[index].device, plan.stages[index + 1].device
            transfer = to_ticks(plan.platform.transfer_seconds(num_bytes, *ends))
            durations[f"SF{index}"] = durations[f"SB{index}"] = transfer
        return durations, forwards

    def _job(self, name: str, micro_batch: int) -> int:
        return self.number_of[name] * self.num_micro_batches + micro_batch

    def run(self) -> Timeline | str:
        # Only what was just committed can change what could start first, and only in the few places that read it.
        for device in range(len(self.orders)):
            self._look_at(device)
        heap, candidates, place, near = self.heap, self.candidates, self.place, self.near
        num_jobs, num_micro_batches = self.num_jobs, self.num_micro_batches
        while heap:
            candidate = heapq.heappop(heap)
            start, job = divmod(candidate, num_jobs)
            number, micro_batch = divmod(job, num_micro_batches)
            if candidates[place[number]] != candidate:
                continue  # something else could start there since
            self._commit(start, number, micro_batch)
            for each in near[number]:
                self._look_at(each)
        for device, order in enumerate(self.orders):
            if self.position[device] < len(order):
                number, micro_batch = divmod(order[self.position[device]], num_micro_batches)
                return f"device {device} waits forever for {self.names[number]} of micro-batch {micro_batch}"
        timeline = Timeline()
        for job in self.done:
            number, micro_batch = divmod(job, num_micro_batches)
            same = self.role[number] * num_micro_batches + micro_batch
            timeline.operations[self.names[number], micro_batch] = self.begins[same], self.ends[same]
        return timeline

    def _look_at(self, place: int) -> None:
        """Find out what could start first on a device or line."""
        candidate = self._operation(place) if place < self.num_devices else self._transfer(place)
        if candidate != self.candidates[place]:
            self.candidates[place] = candidate
            if candidate >= 0:
                heapq.heappush(self.heap, candidate)

    def _near(self, number: int) -> list[int]:
        """Return the device and the lines on which another candidate may come first once this one is committed.

        An operation: its own device, for the next one; the line that it hands a tensor to; the line whose
        transfer it makes room for, by using what that brought. What follows it without a transfer is on its
        own device. A transfer: its own line, and the device that waits for it.
        """
        if self.is_transfer[number]:
            return [self.place[number], self.place[self.receiver[number]]]
        role, send = self.role[number], self.send[number]
        lines = [] if send is None else [self.place[send]]
        index = int(self.names[number][1:])
        brings = {"F": f"SF{index - 1}", "B": f"SB{index}"}.get(self.names[role][0])
        if brings in self.number_of:
            lines.append(self.place[self.number_of[brings]])
        return [self.place[number], *dict.fromkeys(lines)]

    def _send(self, name: str) -> int | None:
        if name[0] == "S":
            return None
        kind, index = _role(name)[0], int(name[1:])
        return self.number_of.get(f"S{kind}{index if kind == 'F' else index - 1}")

    def _needs(self, name: str) -> list[int]:
        """Return the roles of what must have ended on the same micro-batch before an operation."""
        if name[0] == "S":
            return []
        kind, index = _role(name)[0], int(name[1:])
        last = len(self.plan.stages) - 1
        if kind in "RW":
            needs = [f"{'F' if kind == 'R' else 'B'}{index}"]
        else:
            if kind == "F":
                before, send = f"F{index - 1}" if index else None, f"SF{index - 1}"
            else:
                before, send = (f"B{index + 1}" if index < last else None), f"SB{index}"
            needs = [] if kind == "F" else [f"F{index}"]
            if before is not None:
                needs.append(send if send in self.number_of else before)
        return [self.number_of[need] for need in needs]

    def _operation(self, device: int) -> int:
        """Return the candidate of a device: the next operation of its order."""
        order, position = self.orders[device], self.position[device]
        if position == len(order):
            return -1
        job = order[position]
        number, micro_batch = divmod(job, self.num_micro_batches)
        start = self.device_free[device]
        for need in self.needs[number]:
            end = self.ends[need * self.num_micro_batches + micro_batch]
            if end < 0:
                return -1
            if end > start:
                start = end
        if job in self.needs_again:
            end = self.ends[self.needs_again[job]]
            if end < 0:
                return -1
            start = max(start, end)
        return start * self.num_jobs + job

    def _transfer(self, line: int) -> int:
        """Return the candidate of a line: of those with room at their receiver the transfer that starts first."""
        first: tuple[int, int, int, int] | None = None
        for number, tensors in self.waiting[line].items():
            ready, micro_batch = tensors[0]
            start, sent = ready, self.sent[number]
            if len(sent) >= self.slots:
                room = self.begins[self.receiver[number] * self.num_micro_batches + sent[-self.slots]]
                if room < 0:
                    continue
                if room > start:
                    start = room
            for each in self.occupied[number]:
                if self.free_from[each] > start:
                    start = self.free_from[each]
            # Several may start first: take the one whose tensor was ready first.
            candidate = start, ready, micro_batch, number
            if first is None or candidate < first:
                first = candidate
        if first is None:
            return -1
        start, _, micro_batch, number = first
        return start * self.num_jobs + number * self.num_micro_batches + micro_batch

    def _commit(self, start: int, number: int, micro_batch: int) -> None:
        job = number * self.num_micro_batches + micro_batch
        end = start + self.ticks[number] + self.again.get(job, 0)
        same = self.role[number] * self.num_micro_batches + micro_batch
        self.begins[same], self.ends[same] = start, end
        self.done.append(job)
        if self.is_transfer[number]:
            for each in self.occupied[number]:
                self.free_from[each] = end
            self.sent[number].append(micro_batch)
            line = self.waiting[self.place[number]]
            line[number].pop(0)
            if not line[number]:
                del line[number]
            return
        device, send = self.place[number], self.send[number]
        self.device_free[device] = end
        self.position[device] += 1
        if send is not None:
            insort(self.waiting[self.place[send]].setdefault(send, []), (end, micro_batch))

    def _occupied(self, name: str) -> list[str]:
        return occupied_by(self.plan, int(name[2:]), name[1]) if name[0] == "S" else []

    def _place(self, name: str) -> int:
        """Return the device of an operation, or the line of a transfer: those of others never exclude it."""
        if name[0] != "S":
            return self.plan.stages[int(name[1:])].device
        platform, boundary = self.plan.platform, int(name[2:])
        ends: tuple[int, ...] = ()
        if platform.port_bandwidth is None:
            ends = self.plan.stages[boundary].device, self.plan.stages[boundary + 1].device
            if platform.duplex != "full":
                ends = min(ends), max(ends)
            elif name[1] == "B":
                ends = ends[::-1]
        return self.lines.setdefault(ends, self.num_devices + len(self.lines))


def _role(name: str) -> str:
    """Return what an operation is to others: a forward that keeps nothing is a forward, half a backward sends."""
    return {"f": "F", "I": "B"}.get(name[0], name[0]) + name[1:]


def _receiver(transfer: str) -> str:
    """Return the role of the operation that uses what a transfer brings."""
    boundary = int(transfer[2:])
    return f"F{boundary + 1}" if transfer[1] == "F" else f"B{boundary}"
