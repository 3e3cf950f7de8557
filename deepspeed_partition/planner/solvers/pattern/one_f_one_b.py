"""1F1B*: the periodic schedule of a contiguous partition with the least memory (MadPipe paper, section 4.1).

A delay, from the start of a stage's forward to the end of its backward on the same micro-batch, is held as
(group, fill), never as a multiple of the period in floats:

    delay = (group - 1) * period + fill,    0 <= fill <= period

The group of a stage is the number of its micro-batches in flight. A transfer over a boundary counts as a stage of
its own between the two that it connects (section 4.1, last paragraph): a *pseudo-stage*.

Exact, in integers: no periodic schedule of the partition needs less memory at its period. Cost for P stages: O(P)
for the delays at a period, and O(P^2 log P) time and O(P^2) memory for the least period.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.schedule import PeriodicSchedule, PlacedOperation

Delay = tuple[int, int]


def add(delay: Delay, load: int, period: int) -> Delay:
    """Return ``x (+) y`` of the paper: the delay one pseudo-stage up, in a new group where needed."""
    group, fill = delay
    return (group, fill + load) if fill + load <= period else (group + 1, load)


def pseudo_stage_loads(times: TimedChain, boundaries: Sequence[int], extra: Sequence[int] = ()) -> list[int]:
    """Return the ticks per micro-batch of stage 0, boundary 0, stage 1, boundary 1, ..., the last stage.

    Args:
        extra: ticks by which recomputation makes the backward of each stage longer; left out, none does.
    """
    loads: list[int] = []
    for (start, stop), more in zip(pairwise(boundaries), extra or [0] * (len(boundaries) - 1), strict=True):
        if start:
            loads.append(int(times.round_trip[start]))
        loads.append(times.compute_ticks(start, stop) + more)
    return loads


def delays(loads: Sequence[int], period: int) -> list[Delay]:
    """Return the delay of each pseudo-stage, itself included; its group is the micro-batches in flight.

    Every load must fit into the period. Loads and period are in ticks.
    """
    delay: Delay = (1, 0)
    result = []
    for load in reversed(loads):
        delay = add(delay, load, period)
        result.append(delay)
    return result[::-1]


def in_flight(loads: Sequence[int], period: int) -> list[int]:
    """Return the micro-batches in flight of each stage: the groups of the even pseudo-stages."""
    return [group for group, _ in delays(loads, period)[::2]]


def least_period(loads: Sequence[int], max_in_flight: Sequence[int]) -> int | None:
    """Return the shortest period, in ticks, at which every stage has room; None where there is none."""
    if min(max_in_flight) < 1:
        return None

    def fits(period: int) -> bool:
        return all(need <= room for need, room in zip(in_flight(loads, period), max_in_flight, strict=True))

    return shortest_that(fits, loads, max(loads))


def shortest_that(fits: Callable[[int], bool], loads: Sequence[int], shortest: int) -> int:
    """Return the first period from ``shortest`` on that fits, in ticks; the sum of all loads must fit.

    Groups shrink as the period grows, so a binary search over all periods is exact.
    """
    candidates = range(shortest, max(shortest, sum(loads)) + 1)
    return candidates[bisect_left(candidates, True, key=fits)]


def schedule(
    times: TimedChain, boundaries: Sequence[int], period: int, extra: Sequence[int] = ()
) -> PeriodicSchedule:
    """Return the 1F1B* pattern of a contiguous partition at a period in ticks; ``extra`` as above.

    All forwards and their transfers run back to back; the backward of a stage ends ``delay`` after its forward
    began::

        F0 SF0 F1 SF1 F2 B2 SB1 B1 SB0 B0           one group: everything on one micro-batch
        F0 SF0 F1 B1' SB0' B0''                     more: B1' belongs to an earlier micro-batch
    """
    loads = pseudo_stage_loads(times, boundaries, extra)
    seconds = times.clock.seconds
    operations = []
    start = 0
    for index, (load, (group, fill)) in enumerate(zip(loads, delays(loads, period), strict=True)):
        number, is_boundary = divmod(index, 2)
        first, last = boundaries[number], boundaries[number + 1]
        forward = int(times.one_way[last]) if is_boundary else times.forward_ticks(first, last)
        backward = load - forward
        end_of_backward = start + (group - 1) * period + fill
        for name, begin, duration in (("F", start, forward), ("B", end_of_backward - backward, backward)):
            shift, at = divmod(begin, period)
            operations.append(
                PlacedOperation(
                    operation=f"S{name}{number}" if is_boundary else f"{name}{number}",
                    device=None if is_boundary else number,
                    link=(number, number + 1) if is_boundary else None,
                    start_seconds=seconds(at),
                    duration_seconds=seconds(duration),
                    shift=shift,
                )
            )
        start += forward
    return PeriodicSchedule(seconds(period), tuple(operations))
