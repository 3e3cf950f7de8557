"""One synchronous step: m micro-batches enter, all drain, then the optimizer runs (not counted here).

Two engines are simulated, event by event, from the same orders of forwards and backwards:

- ``blocking_step``: DeepSpeed's ``TrainSchedule``. Sends and receives block both ends, nothing overlaps.
- ``overlapping_step``: transfers run beside computation, as early as their link and buffers allow.

With several pipelines in parallel a stage all-reduces its gradients after its last backward, as DeepSpeed does,
while the stages before it still drain; the step has ended when the last all-reduce has.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.schedule import Order

Instruction = tuple[str, int]


def one_f_one_b_order(stage: int, depth: int, num_micro_batches: int) -> Order:
    """Warm up with ``depth`` forwards, then one backward, one forward, then drain.

    ::

        depth 2, 4 micro-batches:   F0 F1 B0 F2 B1 F3 B2 B3
    """
    order: list[tuple[str, int]] = []
    for step in range(num_micro_batches + depth):
        if step >= depth:
            order.append((f"B{stage}", step - depth))
        if step < num_micro_batches:
            order.append((f"F{stage}", step))
    # A depth beyond the number of micro-batches leaves nothing between warm-up and drain.
    return tuple(order)


def deepspeed_instructions(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Instruction]:
    """DeepSpeed's ``TrainSchedule`` for one stage: computations and transfers in the order of their execution.

    Each result is sent when the *next* step of the stage begins, and a gradient is received before the last
    activation is sent, so that neighbours always meet in pairs.
    """
    previous: tuple[str, int] | None = None
    for step in range(2 * (num_micro_batches + num_stages - 1)):
        forward = step % 2 == stage % 2
        micro_batch = (step - stage) // 2 if forward else (step + stage + 1) // 2 - num_stages
        runs = 0 <= micro_batch < num_micro_batches
        if forward:
            if previous and stage > 0:
                yield "SendGrad", previous[1]
            if runs and stage > 0:
                yield "RecvActivation", micro_batch
        else:
            if runs and stage + 1 < num_stages:
                yield "RecvGrad", micro_batch
            if previous and stage + 1 < num_stages:
                yield "SendActivation", previous[1]
        if runs:
            yield "ForwardPass" if forward else "BackwardPass", micro_batch
        previous = ("forward" if forward else "backward", micro_batch) if runs else None


def blocking_step(
    times: TimedChain, boundaries: Sequence[int], num_micro_batches: int, allreduce: Sequence[int] = ()
) -> int:
    """Ticks of one step of a contiguous cut under DeepSpeed's schedule, whose transfers block both ends.

    A transfer begins when both neighbours have come to it and holds both until it has ended.

    Args:
        allreduce: ticks for each stage; left out, there is one pipeline.
    """
    num_stages = len(boundaries) - 1
    lists = [list(deepspeed_instructions(stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    position = [0] * num_stages
    now = [0] * num_stages
    cost = {}
    for stage in range(num_stages):
        first, last = boundaries[stage], boundaries[stage + 1]
        cost[stage, "ForwardPass"] = times.forward_ticks(first, last)
        cost[stage, "BackwardPass"] = times.backward_ticks(first, last)

    def meet(stage: int, neighbour: int, wanted: Instruction, transfer: int) -> bool:
        if not 0 <= neighbour < num_stages or position[neighbour] >= len(lists[neighbour]):
            return False
        if lists[neighbour][position[neighbour]] != wanted:
            return False
        now[stage] = now[neighbour] = max(now[stage], now[neighbour]) + transfer
        position[stage] += 1
        position[neighbour] += 1
        return True

    partner = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}
    advanced = True
    while advanced:
        advanced = False
        for stage in range(num_stages):
            while position[stage] < len(lists[stage]):
                name, micro_batch = lists[stage][position[stage]]
                if name.endswith("Pass"):
                    now[stage] += cost[stage, name]
                    position[stage] += 1
                elif name in partner:
                    receive, side = partner[name]
                    boundary = boundaries[stage + 1] if side == 1 else boundaries[stage]
                    if not meet(stage, stage + side, (receive, micro_batch), int(times.one_way[boundary])):
                        break
                else:
                    break  # a receive: its sender brings it about
                advanced = True
    assert all(position[stage] == len(lists[stage]) for stage in range(num_stages)), "DeepSpeed's schedule blocks"
    return _with_allreduce(now, allreduce)


def _with_allreduce(ends: Sequence[int], allreduce: Sequence[int]) -> int:
    return max(end + ticks for end, ticks in zip(ends, allreduce or [0] * len(ends), strict=True))


def overlapping_step(
    times: TimedChain,
    boundaries: Sequence[int],
    device_of_stage: Sequence[int],
    orders: Sequence[Order],
    slots: int,
    allreduce: Sequence[int] = (),
) -> int:
    """Ticks of one step in which transfers run beside computation.

    A device runs its order, each operation as soon as its tensor is there. A transfer starts when its link is
    free and the receiver has fewer than ``slots`` tensors of its kind (activations, gradients) waiting; of
    several, the one that became ready first.

    Args:
        allreduce: ticks for each stage; left out, there is one pipeline.

    Raises:
        ValueError: the orders wait for each other in a circle.
    """
    ends = _OverlappingStep(times, boundaries, device_of_stage, orders, slots).run()
    return _with_allreduce(ends, allreduce)


class _Event(NamedTuple):
    """What ends at ``time``: an operation on a device, or a transfer towards an operation."""

    time: int
    device: int
    """-1 for a transfer."""
    operation: str
    micro_batch: int


@dataclass(slots=True)
class _Link:
    busy_until: int = 0
    queue: list[tuple[int, int, str]] = field(default_factory=list)
    """Ready since, micro-batch, name of the transfer; a heap."""


class _OverlappingStep:
    def __init__(
        self,
        times: TimedChain,
        boundaries: Sequence[int],
        device_of_stage: Sequence[int],
        orders: Sequence[Order],
        slots: int,
    ) -> None:
        self.last = len(boundaries) - 2
        self.device_of_stage = device_of_stage
        self.orders = orders
        self.slots = slots
        self.duration: dict[str, int] = {}
        for stage, (start, stop) in enumerate(pairwise(boundaries)):
            self.duration[f"F{stage}"] = times.forward_ticks(start, stop)
            self.duration[f"B{stage}"] = times.backward_ticks(start, stop)
            self.duration[f"SF{stage}"] = self.duration[f"SB{stage}"] = int(times.one_way[stop])
        self.now = 0
        self.events: list[_Event] = []
        self.arrived = {entry for order in orders for entry in order if entry[0] == "F0"}
        """Operations whose input is on their device."""
        self.forwarded: set[tuple[str, int]] = set()
        self.position = [0] * len(orders)
        self.running = [False] * len(orders)
        self.waiting: dict[str, int] = defaultdict(int)
        """Tensors on the way to, or waiting for, each operation."""
        self.links: dict[tuple[int, int], _Link] = defaultdict(_Link)
        self.ends = [0] * (self.last + 1)

    def run(self) -> list[int]:
        """When each stage has done its last backward."""
        while True:
            # What takes no time has ended before the next thing begins at the same instant.
            while self.events and self.events[0].time == self.now:
                self._end(heapq.heappop(self.events))
            if self._start_operations() or self._start_transfer():
                continue
            if not self.events:
                break
            self.now = self.events[0].time
        if any(position < len(order) for position, order in zip(self.position, self.orders, strict=True)):
            raise ValueError("the orders of the devices wait for each other in a circle")
        return self.ends

    def _start_operations(self) -> bool:
        started = False
        for device, order in enumerate(self.orders):
            if self.running[device] or self.position[device] == len(order):
                continue
            operation, micro_batch = order[self.position[device]]
            backward = operation[0] == "B"
            if (operation, micro_batch) not in self.arrived:
                continue
            if backward and (f"F{operation[1:]}", micro_batch) not in self.forwarded:
                continue
            self.running[device] = started = True
            self.waiting[operation] = max(0, self.waiting[operation] - 1)
            heapq.heappush(
                self.events, _Event(self.now + self.duration[operation], device, operation, micro_batch)
            )
        return started

    def _start_transfer(self) -> bool:
        """Start one transfer: on each free link the first in its queue that the receiver has a slot for, and of
        those of several links the first by name."""
        ready = []
        for link in self.links.values():
            if link.busy_until <= self.now:
                with_slot = (entry for entry in sorted(link.queue) if self._has_slot(entry[2]))
                first = next(with_slot, None)
                if first is not None:
                    ready.append((first[2], first[1], first, link))
        if not ready:
            return False
        transfer, micro_batch, entry, link = min(ready, key=lambda each: each[:2])
        link.queue.remove(entry)
        heapq.heapify(link.queue)
        consumer = _receiver(transfer)
        self.waiting[consumer] += 1
        link.busy_until = self.now + self.duration[transfer]
        heapq.heappush(self.events, _Event(link.busy_until, -1, consumer, micro_batch))
        return True

    def _has_slot(self, transfer: str) -> bool:
        return self.waiting[_receiver(transfer)] < self.slots

    def _end(self, event: _Event) -> None:
        operation, micro_batch = event.operation, event.micro_batch
        if event.device < 0:
            self.arrived.add((operation, micro_batch))
            return
        self.running[event.device] = False
        self.position[event.device] += 1
        if operation[0] == "F":
            self.forwarded.add((operation, micro_batch))
        else:
            self.ends[int(operation[1:])] = self.now
        consumer = self._consumer(operation)
        if consumer is None:
            return
        ends = sorted(self.device_of_stage[int(name[1:])] for name in (operation, consumer))
        if ends[0] == ends[1]:
            self.arrived.add((consumer, micro_batch))
        else:
            cut = int(operation[1:]) - (operation[0] == "B")
            heapq.heappush(self.links[ends[0], ends[1]].queue, (self.now, micro_batch, f"S{operation[0]}{cut}"))

    def _consumer(self, operation: str) -> str | None:
        """The operation that reads the result; None for the last backward."""
        kind, stage = operation[0], int(operation[1:])
        if kind == "F":
            return f"F{stage + 1}" if stage < self.last else f"B{stage}"
        return f"B{stage - 1}" if stage > 0 else None


def _receiver(transfer: str) -> str:
    """``F1`` of ``SF0``, ``B0`` of ``SB0``."""
    kind, cut = transfer[1], int(transfer[2:])
    return f"F{cut + 1}" if kind == "F" else f"B{cut}"
