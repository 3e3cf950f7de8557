"""A pattern for allocations with too many stages for the integer program: each operation as early as it can be.

The operations are placed in the order of a micro-batch's path, each at the first instant, modulo the period, at
which its device or link is free. Periods are tried from the busiest resource's time on, each a little longer,
until what is in flight has room; at the period of one micro-batch after the other that is sure.

Method: modulo scheduling, as compilers do for loops (B. R. Rau, "Iterative modulo scheduling", 1994), without its
backtracking; nothing is proved. Cost: O(n u) time for each period that is tried, for n operations of which u share
a resource, and about 2 log(S) / log(``GROWTH``) periods for S stages.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict

from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Resource, Road, one_by_one

GROWTH = 1.03
"""Factor from one period that is tried to the next."""


def early_pattern(road: Road, deadline: Deadline) -> Pattern | None:
    """Return a pattern that fits; None where not even one micro-batch at a time has room.

    Args:
        deadline: where it has passed, the pattern of one micro-batch after the other is the answer.
    """
    if any(device.room < 0 or device.bytes_for_one > device.bytes_with(device.room) for device in road.memory):
        return None
    period = max(1, road.shortest_that_may_fit() or road.sequential)
    while period < road.sequential and not deadline.passed():
        pattern = _placed(road, period)
        if pattern is not None and road.fits_with_waiting(pattern):
            return pattern
        period = max(period + 1, int(period * GROWTH))
    return one_by_one(road)


def _placed(road: Road, period: int) -> Pattern | None:
    """Return the pattern with every operation as early as its resource is free; None where one has no place."""
    taken: dict[Resource, list[tuple[int, int]]] = defaultdict(list)
    begins: list[int] = []
    now = 0
    for operation in road.operations:
        begin = _first_free(taken[operation.resource], now, operation.ticks, period)
        if begin is None:
            return None
        insort(taken[operation.resource], (begin % period, operation.ticks))
        begins.append(begin)
        now = begin + operation.ticks
    return Pattern(road.placement, tuple(road.operations), period, tuple(begins))


def _first_free(taken: list[tuple[int, int]], now: int, ticks: int, period: int) -> int | None:
    """Return the first instant from ``now`` on at which nothing of ``taken`` overlaps, modulo the period."""
    latest = now + period
    while now < latest:
        for at, length in taken:
            since = (now - at) % period
            # It runs at this instant, or begins before the new operation would have ended.
            if since < length or (since > 0 and period - since < ticks):
                now += length - since if since < length else period - since + length
                break
        else:
            return now
    return None
