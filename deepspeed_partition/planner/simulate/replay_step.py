"""Simulation of one step for the replay (``replay.py``): orders in, instants out.

It is written from the rules of a step alone; the planner's own simulation (``step_simulator.py``) is another
program.
"""

from __future__ import annotations

import heapq
import math
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

_Place = int | tuple[int, ...]
"""A device, or the two devices of a link; no devices stand for all links together, where they share ports."""
_Candidate = tuple[int, int, str, int]
"""Start in ticks, 0 for an operation and 1 for a transfer, its name, its micro-batch."""


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
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for (name, _), span in sorted(self.operations.items(), key=lambda each: each[0][1]):
            found[name].append(span)
        return {name: as_spans(spans) for name, spans in found.items()}


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
    ends: dict[str, int] = defaultdict(int)
    for (name, _), (_, end) in step.operations.items():
        ends[name] = max(ends[name], end)
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
    def __init__(self, plan: Plan, chain: Chain) -> None:
        assert plan.step is not None
        self.plan = plan
        self.orders = plan.step.order
        # Ties decide which transfer goes first: the clock makes them the same instants as in the planner.
        self.clock = Clock.of(chain, plan.platform)
        to_ticks = self.clock.ticks
        self.durations: dict[str, int] = {}
        self.again: dict[str, int] = {}
        """Ticks of a forward that a backward runs again, by stage: it is no operation of its own."""
        for index, stage in enumerate(plan.stages):
            layers = chain.layers[slice(*stage.layers)]
            speed = plan.platform.speed_of(stage.device)

            def ticks(seconds: float, speed: float = speed) -> int:
                return to_ticks(seconds / speed)

            recomputed = [layer for first, last in stage.blocks for layer in chain.layers[first:last]]
            again = sum(ticks(layer.forward_seconds) for layer in recomputed)
            self.durations[f"F{index}"] = sum(ticks(layer.forward_seconds) for layer in layers)
            self.durations[f"B{index}"] = sum(ticks(layer.backward_seconds) for layer in layers) + again
            self.durations[f"f{index}"] = self.durations[f"R{index}"] = self.durations[f"F{index}"]
            halves = [
                [
                    ticks(seconds or 0.0)
                    for seconds in (layer.backward_input_seconds, layer.backward_weight_seconds)
                ]
                for layer in layers
            ]
            self.durations[f"I{index}"] = sum(first for first, _ in halves) + again
            self.durations[f"W{index}"] = sum(second for _, second in halves)
            self.again[str(index)] = self.durations[f"F{index}"]
        for name in self.durations:
            self.durations[name] += to_ticks(plan.platform.operation_seconds)
        for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
            copied = to_ticks(plan.platform.copy_seconds(num_bytes))
            for kind in "FfBI":
                for end in (index, index + 1):
                    self.durations[f"{kind}{end}"] += copied
        entries = {entry for order in self.orders for entry in order if entry[0][0] in "fR"}
        self.recomputed = {(name[1:], number) for name, number in entries if name[0] == "R"}
        """Stages and micro-batches of which an operation runs the forward again."""
        self.within = {(name[1:], number) for name, number in entries if name[0] == "f"} - self.recomputed
        """Stages and micro-batches of which the backward runs the forward again."""
        for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
            ends = plan.stages[index].device, plan.stages[index + 1].device
            transfer = to_ticks(plan.platform.transfer_seconds(num_bytes, *ends))
            self.durations[f"SF{index}"] = self.durations[f"SB{index}"] = transfer
        # What a name alone tells is told once: a long step has a million operations and transfers.
        self.role = {name: _role(name) for name in self.durations}
        self.needs = {name: self._needs(name) for name in self.durations if name[0] != "S"}
        self.line = {name: self._line(name) for name in self.durations if name[0] == "S"}
        self.receiver = {name: _receiver(name) for name in self.line}
        self.brought_to: dict[str, list[str]] = defaultdict(list)
        """Transfers by the role of the operation that uses what they bring."""
        for sent, user in self.receiver.items():
            self.brought_to[user].append(sent)
        self.device_and_send = {name: self._device_and_send(name) for name in self.needs}
        self.near = {name: self._near(name) for name in self.durations}
        self.slots = max(1, plan.platform.comm_buffers // 2)
        self.runs: dict[tuple[str, int], tuple[int, int]] = {}
        """Ticks at which operations begin and end, by their role: ``F`` for any forward, ``B`` for any backward or
        its first half."""
        self.timeline = Timeline()
        self.device_free = [0] * plan.platform.num_devices
        self.occupied = {
            name: occupied_by(plan, int(name[2:]), name[1]) for name in self.durations if name[0] == "S"
        }
        self.free_from: dict[str, int] = defaultdict(int)
        """Ticks at which the last transfer of each link and port has ended."""
        self.position = [0] * len(self.orders)
        self.to_send: dict[tuple[int, ...], list[tuple[int, int, str]]] = defaultdict(list)
        self.received: dict[str, list[int]] = defaultdict(list)
        self.candidates: dict[_Place, _Candidate | None] = {}
        self.heap: list[tuple[_Candidate, _Place]] = []
        """Candidates of all places, also former ones."""

    def run(self) -> Timeline | str:
        # Candidates are what could start first on each device and link. Only what was just committed can change
        # them, and only in the few places that read it.
        for device in range(len(self.orders)):
            self._look_at(device)
        while self.heap:
            candidate, place = heapq.heappop(self.heap)
            if self.candidates[place] != candidate:
                continue  # something else could start there since
            start, _, name, micro_batch = candidate
            self._commit(start, name, micro_batch)
            for place in self.near[name]:
                self._look_at(place)
        for device, order in enumerate(self.orders):
            if self.position[device] < len(order):
                name, micro_batch = order[self.position[device]]
                return f"device {device} waits forever for {name} of micro-batch {micro_batch}"
        return self.timeline

    def _look_at(self, place: _Place) -> None:
        """Find out what could start first on a device or link."""
        candidate = self._operation(place) if isinstance(place, int) else self._transfer(place)
        if candidate == self.candidates.get(place):
            return
        self.candidates[place] = candidate
        if candidate is not None:
            # Two that are equal are of one place: the places themselves are never compared.
            heapq.heappush(self.heap, (candidate, place))

    def _near(self, name: str) -> list[_Place]:
        """Return the device and the lines on which another candidate may come first once this one is committed.

        An operation: its own device, for the next one; the line that it hands a tensor to; the line whose
        transfer it makes room for, by using what that brought. What follows it without a transfer is on its
        own device. A transfer: its own line, and the device that waits for it.
        """
        if name[0] == "S":
            return [self.line[name], self.plan.stages[int(name[2:]) + (name[1] == "F")].device]
        device, send = self.device_and_send[name]
        sends = [send, *self.brought_to[self.role[name]]]
        return [device, *dict.fromkeys(self.line[each] for each in sends if each is not None)]

    def _device_and_send(self, name: str) -> tuple[int, str | None]:
        """Return the device of an operation, and the transfer that follows it, if one does."""
        kind, index = self.role[name][0], int(name[1:])
        send = f"S{kind}{index if kind == 'F' else index - 1}"
        return self.plan.stages[index].device, send if send in self.durations else None

    def _needs(self, name: str) -> list[str]:
        """Return the operations that must have ended on the same micro-batch."""
        kind, index = self.role[name][0], int(name[1:])
        last = len(self.plan.stages) - 1
        if kind in "RW":
            return [f"{'F' if kind == 'R' else 'B'}{index}"]
        if kind == "F":
            before, send = f"F{index - 1}" if index else None, f"SF{index - 1}"
        else:
            before, send = (f"B{index + 1}" if index < last else None), f"SB{index}"
        own = [] if kind == "F" else [f"F{index}"]
        if before is None:
            return own
        return [*own, send if send in self.durations else before]

    def _operation(self, device: int) -> _Candidate | None:
        """Return the next operation of the device's order and when it can start; None where that is not known."""
        order = self.orders[device]
        if self.position[device] == len(order):
            return None
        name, micro_batch = order[self.position[device]]
        start = self.device_free[device]
        needs = self.needs[name]
        if self.recomputed and name[0] in "BI" and (name[1:], micro_batch) in self.recomputed:
            needs = [*needs, f"R{name[1:]}"]
        for need in needs:
            run = self.runs.get((need, micro_batch))
            if run is None:
                return None
            if run[1] > start:
                start = run[1]
        return start, 0, name, micro_batch

    def _transfer(self, line: tuple[int, ...]) -> _Candidate | None:
        """Return the first transfer of the line and when it can start; None where none is ready and has room."""
        waiting: Iterable[tuple[int, int, str]] = self.to_send[line]
        if len(self.to_send[line]) > 1:
            first: dict[str, tuple[int, int, str]] = {}
            for entry in sorted(waiting):
                first.setdefault(entry[2], entry)
            waiting = first.values()
        eligible = []
        for ready, micro_batch, name in waiting:
            room = self._room_from(name)
            if room is not None:
                start = max(ready, room, *(self.free_from[each] for each in self.occupied[name]))
                eligible.append((start, ready, micro_batch, name))
        if not eligible:
            return None
        # Several may start first: take the one whose tensor was ready first.
        start, _, micro_batch, name = min(eligible)
        return start, 1, name, micro_batch

    def _room_from(self, name: str) -> int | None:
        """Return the tick from which the receiver has a free slot; None while that is not known."""
        sent = self.received[name]
        if len(sent) < self.slots:
            return 0
        run = self.runs.get((self.receiver[name], sent[-self.slots]))
        return None if run is None else run[0]

    def _commit(self, start: int, name: str, micro_batch: int) -> None:
        end = start + self.durations[name]
        if name[0] in "BI" and (name[1:], micro_batch) in self.within:
            end += self.again[name[1:]]
        run = start, end
        self.timeline.operations[name, micro_batch] = self.runs[self.role[name], micro_batch] = run
        if name[0] == "S":
            for each in self.occupied[name]:
                self.free_from[each] = end
            line = self.line[name]
            self.received[name].append(micro_batch)
            waiting = self.to_send[line]
            if len(waiting) == 1:
                waiting.clear()
            else:
                self.to_send[line] = [entry for entry in waiting if entry[1:] != (micro_batch, name)]
            return
        device, send = self.device_and_send[name]
        self.device_free[device] = end
        self.position[device] += 1
        if send is not None:
            self.to_send[self.line[send]].append((end, micro_batch, send))

    def _line(self, transfer: str) -> tuple[int, ...]:
        """Return the place in which a transfer waits: transfers of other places have nothing in common with it."""
        platform, boundary = self.plan.platform, int(transfer[2:])
        if platform.port_bandwidth is not None:
            return ()
        ends = self.plan.stages[boundary].device, self.plan.stages[boundary + 1].device
        if platform.duplex == "full":
            return ends if transfer[1] == "F" else ends[::-1]
        return min(ends), max(ends)


def _role(name: str) -> str:
    """Return what an operation is to others: a forward that keeps nothing is a forward, half a backward sends."""
    return {"f": "F", "I": "B"}.get(name[0], name[0]) + name[1:]


def _receiver(transfer: str) -> str:
    """Return the role of the operation that uses what a transfer brings."""
    boundary = int(transfer[2:])
    return f"F{boundary + 1}" if transfer[1] == "F" else f"B{boundary}"
