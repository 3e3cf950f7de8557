"""Orders of a synchronous step, from their published descriptions; nothing of the planner is used.

An order is, for each device, what it runs in turn: ``("F2", 5)`` is the forward of stage 2 on micro-batch 5. With
v chunks per device and P devices, chunk c of device r is stage c P + r (round robin), unless said otherwise.

- 1F1B: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
  section 2.2.1. GPipe's flush: Huang et al. 2019, "GPipe".
- Interleaved 1F1B: Narayanan et al., section 2.2.2, with as many warm-up forwards as Megatron-LM has
  (``forward_backward_pipelining_with_interleaving``).
- Breadth first: Lamy-Poirier 2023, "Breadth-first pipeline parallelism": all micro-batches of a chunk, then those
  of the next.
- There and back: the placement of zero bubble's V, Qi et al. 2024, "Pipeline parallelism with controllable
  memory": two chunks per device, the second ones in the reverse order of devices, so that the last stage is on the
  first device. The backward is not split. The order is that of ``listed``.
- Depth first: each device prefers a backward, and else the forward that is furthest on its way (``listed``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Orders = list[list[tuple[str, int]]]


def one_f_one_b(num_devices: int, num_micro_batches: int) -> Orders:
    """1F1B: device r runs P - r forwards, then one backward and one forward in turn, then the backwards left."""
    return [
        _turns(
            [(f"F{device}", number) for number in range(num_micro_batches)],
            [(f"B{device}", number) for number in range(num_micro_batches)],
            warm_up=num_devices - device - 1,
        )
        for device in range(num_devices)
    ]


def interleaved(num_devices: int, chunks: int, num_micro_batches: int) -> Orders | None:
    """Megatron-LM's interleaved 1F1B; None where the micro-batches do not make groups of P.

    Fewer than P micro-batches are one group.
    """
    group = min(num_devices, num_micro_batches)
    if num_micro_batches % group:
        return None
    turns = [
        (chunk, first + number)
        for first in range(0, num_micro_batches, group)
        for chunk in range(chunks)
        for number in range(group)
    ]
    return [
        _turns(
            [(f"F{chunk * num_devices + device}", number) for chunk, number in turns],
            [(f"B{(chunks - 1 - chunk) * num_devices + device}", number) for chunk, number in turns],
            warm_up=2 * (num_devices - device - 1) + (chunks - 1) * group,
        )
        for device in range(num_devices)
    ]


def breadth_first(num_devices: int, chunks: int, num_micro_batches: int) -> Orders:
    """All micro-batches of a chunk, then of the next; the backwards likewise. One chunk: GPipe's flush."""
    numbers = range(num_micro_batches)
    return [
        [(f"F{chunk * num_devices + device}", number) for chunk in range(chunks) for number in numbers]
        + [(f"B{chunk * num_devices + device}", number) for chunk in reversed(range(chunks)) for number in numbers]
        for device in range(num_devices)
    ]


def _turns(
    forwards: list[tuple[str, int]], backwards: list[tuple[str, int]], warm_up: int
) -> list[tuple[str, int]]:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [each for pair in zip(forwards[warm_up:], backwards, strict=False) for each in pair]
    return [*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :]]


@dataclass(frozen=True)
class Costs:
    """Seconds of the stages of an allocation, in the order of the chain."""

    devices: tuple[int, ...]
    """Device of each stage."""
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]
    """Seconds over the boundary behind each stage but the last; 0 within a device."""

    @property
    def num_devices(self) -> int:
        return max(self.devices) + 1


def there_and_back(num_devices: int, num_stages: int) -> tuple[int, ...]:
    """Devices of stages that go to the last device and back again."""
    there = list(range(num_devices))
    return tuple((there + there[::-1])[stage % (2 * num_devices)] for stage in range(num_stages))


def listed(costs: Costs, num_micro_batches: int, most_alive: int) -> Orders:
    """List scheduling: a free device takes what is ready, a backward first, else the stage furthest on.

    At most ``most_alive`` micro-batches are on their way, from their first forward to their last backward, so that
    none waits forever. Links are taken to be free.
    """
    last = len(costs.devices) - 1
    orders: Orders = [[] for _ in range(costs.num_devices)]
    ready: list[list[tuple[int, int, int]]] = [[] for _ in orders]  # by preference: (rank, micro-batch, place)
    free = [True] * costs.num_devices
    events: list[
        tuple[float, int, int, int]
    ] = []  # when, 0: a device gets free or 1: a tensor comes, place, which
    started = ended = 0

    def come(place: int, number: int) -> None:
        # Place s is the forward of stage s; place 2 last + 1 - s its backward.
        stage = place if place <= last else 2 * last + 1 - place
        heapq.heappush(ready[costs.devices[stage]], (-place, number, place))

    def admit() -> None:
        nonlocal started
        while started < num_micro_batches and started - ended < most_alive:
            come(0, started)
            started += 1

    def dispatch(now: float) -> None:
        for device, waiting in enumerate(ready):
            if not free[device] or not waiting:
                continue
            _, number, place = heapq.heappop(waiting)
            is_forward = place <= last
            stage = place if is_forward else 2 * last + 1 - place
            orders[device].append((f"{'F' if is_forward else 'B'}{stage}", number))
            free[device] = False
            end = now + (costs.forward[stage] if is_forward else costs.backward[stage])
            heapq.heappush(events, (end, 0, place, number))
            boundary = stage if is_forward else stage - 1
            if place < 2 * last + 1:
                travel = 0.0 if place == last else costs.transfer[boundary]
                heapq.heappush(events, (end + travel, 1, place + 1, number))

    admit()
    dispatch(0.0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, what, place, number = heapq.heappop(events)
            if what == 1:
                come(place, number)
                continue
            stage = place if place <= last else 2 * last + 1 - place
            free[costs.devices[stage]] = True
            if place == 2 * last + 1:
                ended += 1
                admit()
        dispatch(now)
    return orders


def least_seconds(costs: Costs, orders: Orders, num_micro_batches: int) -> float | None:
    """Return the seconds of a step in these orders if links were free; None where it waits forever.

    No engine that follows the orders is faster.
    """
    last = len(costs.devices) - 1
    done: dict[tuple[str, int], float] = {}
    waiting: dict[tuple[str, int], int] = {}
    position, free = [0] * len(orders), [0.0] * len(orders)
    to_visit = list(range(len(orders)))
    while to_visit:
        device = to_visit.pop()
        order = orders[device]
        while position[device] < len(order):
            name, number = order[position[device]]
            stage = int(name[1:])
            if name[0] == "F":
                need, travel = (f"F{stage - 1}", number), costs.transfer[stage - 1] if stage else 0.0
                is_first, seconds = stage == 0, costs.forward[stage]
            else:
                need = (f"B{stage + 1}" if stage < last else f"F{stage}", number)
                travel = costs.transfer[stage] if stage < last else 0.0
                is_first, seconds = False, costs.backward[stage]
            if not is_first and need not in done:
                waiting[need] = device
                break
            start = free[device] if is_first else max(free[device], done[need] + travel)
            free[device] = done[name, number] = start + seconds
            position[device] += 1
            if (name, number) in waiting:
                to_visit.append(waiting.pop((name, number)))
    return max(free) if len(done) == 2 * (last + 1) * num_micro_batches else None


def kept_bytes(order: Sequence[tuple[str, int]], stash_bytes: Sequence[int]) -> int:
    """Return the most bytes that the micro-batches in flight of one device's order keep."""
    changes = ((1 if name[0] == "F" else -1) * stash_bytes[int(name[1:])] for name, _ in order)
    return max(accumulate(changes), default=0)
