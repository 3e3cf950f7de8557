"""One synchronous step: m micro-batches enter, all drain, then the optimizer runs (not counted here).

Two engines are simulated, event by event, from the same orders of forwards and backwards:

- ``blocking_step``: DeepSpeed's ``TrainSchedule``. Sends and receives block both ends, nothing overlaps.
- ``overlapping_step``: transfers run beside computation, as early as their link and buffers allow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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


def blocking_step(times: TimedChain, boundaries: Sequence[int], num_micro_batches: int) -> int:
    """Ticks of one step of a contiguous cut under DeepSpeed's schedule, whose transfers block both ends.

    A transfer begins when both neighbours have come to it and holds both until it has ended.
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
    return max(now)


@dataclass(slots=True)
class _Link:
    busy_until: int = 0
    waiting: list[tuple[int, int, str, int]] = field(default_factory=list)


def overlapping_step(
    times: TimedChain,
    boundaries: Sequence[int],
    device_of_stage: Sequence[int],
    orders: Sequence[Order],
    slots: int,
) -> int:
    """Ticks of one step in which transfers run beside computation.

    A device runs its order, each operation as soon as its tensor is there. A transfer starts when its link is
    free and the receiver has fewer than ``slots`` tensors of its kind (activations, gradients) waiting; of
    several, the one that became ready first.

    Raises:
        ValueError: the orders wait for each other in a circle.
    """
    num_stages = len(boundaries) - 1
    duration = {}
    for stage in range(num_stages):
        first, last = boundaries[stage], boundaries[stage + 1]
        duration[f"F{stage}"] = times.forward_ticks(first, last)
        duration[f"B{stage}"] = times.backward_ticks(first, last)
    arrived: set[tuple[str, int]] = {("F0", mb) for order in orders for op, mb in order if op == "F0"}
    kept: set[tuple[str, int]] = set()  # forwards that ran: what their backwards need besides the gradient
    position = [0] * len(orders)
    running = [False] * len(orders)
    waiting: dict[str, int] = {}  # tensors on the way to, or waiting at, the consumer
    links: dict[tuple[int, int], _Link] = {}
    events: list[tuple[int, int, str, str, int]] = []
    now = 0

    def consumer_of(operation: str) -> tuple[str, int] | None:
        """The operation that reads the result, and the boundary it crosses."""
        kind, stage = operation[0], int(operation[1:])
        if kind == "F" and stage + 1 < num_stages:
            return f"F{stage + 1}", boundaries[stage + 1]
        if kind == "B" and stage > 0:
            return f"B{stage - 1}", boundaries[stage]
        return None

    def link_of(operation: str, consumer: str) -> tuple[int, int] | None:
        ends = sorted((device_of_stage[int(operation[1:])], device_of_stage[int(consumer[1:])]))
        return None if ends[0] == ends[1] else (ends[0], ends[1])

    def finish(operation: str, micro_batch: int) -> None:
        if operation[0] == "F":
            kept.add((operation, micro_batch))
            if int(operation[1:]) == num_stages - 1:
                arrived.add((f"B{num_stages - 1}", micro_batch))
        following = consumer_of(operation)
        if following is None:
            return
        consumer, _ = following
        ends = link_of(operation, consumer)
        if ends is None:
            arrived.add((consumer, micro_batch))
        else:
            link = links.setdefault(ends, _Link())
            heapq.heappush(link.waiting, (now, micro_batch, operation, micro_batch))

    def start_operations() -> bool:
        started = False
        for device, order in enumerate(orders):
            if running[device] or position[device] >= len(order):
                continue
            operation, micro_batch = order[position[device]]
            if (operation, micro_batch) not in arrived:
                continue
            if operation[0] == "B" and (f"F{operation[1:]}", micro_batch) not in kept:
                continue
            running[device] = True
            if operation in waiting:
                waiting[operation] -= 1
            heapq.heappush(events, (now + duration[operation], device, "operation", operation, micro_batch))
            started = True
        return started

    def start_transfers() -> bool:
        started = False
        for link in links.values():
            if link.busy_until > now:
                continue
            blocked = []
            while link.waiting and link.busy_until <= now:
                entry = heapq.heappop(link.waiting)
                operation, micro_batch = entry[2], entry[3]
                following = consumer_of(operation)
                assert following is not None
                consumer, boundary = following
                if waiting.get(consumer, 0) >= slots:
                    blocked.append(entry)
                    continue
                waiting[consumer] = waiting.get(consumer, 0) + 1
                link.busy_until = now + int(times.one_way[boundary])
                heapq.heappush(events, (link.busy_until, -1, "transfer", consumer, micro_batch))
                started = True
            for entry in blocked:
                heapq.heappush(link.waiting, entry)
        return started

    while True:
        while start_operations() or start_transfers():
            pass
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] == now:
            _, device, kind, operation, micro_batch = heapq.heappop(events)
            if kind == "transfer":
                arrived.add((operation, micro_batch))
            else:
                running[device] = False
                position[device] += 1
                finish(operation, micro_batch)
    if any(position[device] < len(order) for device, order in enumerate(orders)):
        raise ValueError("the orders of the devices wait for each other in a circle")
    return now
