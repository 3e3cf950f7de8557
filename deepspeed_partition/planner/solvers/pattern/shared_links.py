"""Patterns of an allocation where directions do not wait for each other, or hosts have ports.

The searches make patterns in which a link carries one transfer at a time, and has no port. Where a platform says
otherwise such a pattern may be longer than it need be (both directions at once), or may not run (two transfers at
once through one port). Here its operations are placed anew, at one period after the other: along the path of a
micro-batch, each as early as all that it occupies is free at that place of the period.

    period | F0 SF0 .. F1 .. |     each operation behind the one before, at the first gap of its device,
           | B0 .. SB0 .. B1 |     or of its link and both its ports at once

Method: own; not in the papers. It proves nothing: a period that is not found may exist. One micro-batch after the
other always runs. Cost: O(S^2) for S stages and each of ``NUM_SHORTER + NUM_LONGER`` periods.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.problem import Resource as Way
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road, one_by_one

NUM_SHORTER, NUM_LONGER = 12, 36
"""Number of periods that are tried, below the one that is known and from there on."""
Spans = list[tuple[int, int]]


def is_plain(platform: Platform) -> bool:
    """Return whether a link carries one transfer at a time and hosts have no ports, as in the MadPipe paper."""
    return platform.duplex == "half" and platform.port_bandwidth is None


def placed_anew(road: Road, platform: Platform, period: int) -> Pattern | None:
    """Return the shortest pattern that is found; None where none is shorter than ``period`` or need be made.

    Args:
        period: ticks of a pattern of this allocation on links without ports, one transfer at a time.
    """
    ways = [_way(road, platform, index) for index in range(len(road.operations))]
    loads: dict[Way, int] = defaultdict(int)
    for operation, way in zip(road.operations, ways, strict=True):
        for each in way:
            loads[each] += operation.ticks
    least = max(1, *loads.values())
    longest = one_by_one(road)
    for candidate in _periods(least, period, longest.period):
        if candidate >= period and platform.port_bandwidth is None:
            return None
        pattern = _placed(road, ways, candidate)
        if pattern is not None and road.fits(pattern) and road.fits_with_waiting(pattern):
            return pattern
    return longest


def _periods(least: int, known: int, longest: int) -> Iterator[int]:
    """Yield periods in ascending order, the known one among them, in steps that grow with them."""
    if least < known:
        for index in range(NUM_SHORTER):
            yield least + (known - least) * index // NUM_SHORTER
    first = max(least, known)
    for index in range(NUM_LONGER):
        yield first + (longest - first) * index * index // NUM_LONGER**2


def _way(road: Road, platform: Platform, index: int) -> tuple[Way, ...]:
    """Return all that an operation occupies: its device, or the link and the ports of its transfer."""
    name, devices = road.operations[index].name, road.placement.devices
    stage = int(name.lstrip("FBS"))
    if name[0] != "S":
        return (("device", devices[stage]),)
    ends = devices[stage], devices[stage + 1]
    return platform.resources(*(ends if name[1] == "F" else ends[::-1]))


def _placed(road: Road, ways: list[tuple[Way, ...]], period: int) -> Pattern | None:
    """Return the pattern of a period in which each operation begins as early as it can; None for none."""
    taken: dict[Way, Spans] = defaultdict(list)
    begins = []
    now = 0
    for operation, way in zip(road.operations, ways, strict=True):
        begin = _first_gap([span for each in way for span in taken[each]], now, operation.ticks, period)
        if begin is None:
            return None
        begins.append(begin)
        for each in way:
            taken[each].append((begin % period, operation.ticks))
        now = begin + operation.ticks
    return Pattern(road.placement, tuple(road.operations), period, tuple(begins))


def _first_gap(spans: Spans, earliest: int, ticks: int, period: int) -> int | None:
    """Return the first instant from ``earliest`` on at which nothing else runs for so many ticks.

    Args:
        spans: where something runs: its begin within the period, and its ticks; it may run over the end.
    """
    if ticks > period:
        return None
    # A gap begins at once, or where something ends.
    ends = ((begin + lasts - earliest) % period for begin, lasts in spans)
    for wait in sorted({0, *ends}):
        if not any(_meet((earliest + wait) % period, ticks, *span, period) for span in spans):
            return earliest + wait
    return None


def _meet(begin: int, ticks: int, other: int, lasts: int, period: int) -> bool:
    """Return whether two spans of a period have an instant in common, or one without time is within the other."""
    return (other - begin) % period < ticks or (begin - other) % period < lasts
