"""The pattern of a chosen period that needs the least memory, by integer linear programming.

Method: the program of ``ilp.py`` (MadPipe paper, section 4.3) with the period fixed. What its rows let a device
use is now a variable, and the objective. As there, only the orders and shifts are taken from the solver; they
decide how many micro-batches each stage holds at every instant, and the bytes are counted from those.

Exact to ``RESOLUTION`` of the memory, where the deadline does not pass. Cost: one binary variable for each two
operations of a device or link, so O(S^2) of them for S stages; the time is exponential in the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import (
    DeviceMemory,
    Estimate,
    Pattern,
    Road,
    pattern_of,
)

RESOLUTION = 1e-6
"""Smallest saving that is looked for, relative to the memory."""


@dataclass(frozen=True, slots=True)
class Compact:
    """Pattern found that needs the least memory, and what is known about all patterns."""

    pattern: Pattern | None
    """Pattern that was found. None: none was found that takes fewer bytes than asked for."""
    num_bytes: int | None
    """Bytes of the pattern's largest device; None without a pattern."""
    bound: int | None
    """Lower bound on the bytes of every pattern (to ``RESOLUTION``). None: there is none below the bytes asked
    for."""


NOTHING = Compact(None, None, None)


def estimated_bytes(road: Road, period: int, estimate: Estimate = "pairs") -> int | None:
    """Estimate the bytes of the largest device at ``period``; None where no pattern has so short a period.

    No pattern takes less at this period, except under ``"safe"``, which is no bound.
    """
    if period < road.busiest:
        return None
    in_flight = road.fewest_in_flight(period)

    def needs(device: DeviceMemory) -> int:
        if estimate == "safe":
            return road.bytes_enough(in_flight, device.stages)
        least = road.bytes_at_least(in_flight, device.stages)
        return least if estimate == "peak" else max(least, road.bytes_of_pairs(period, device, estimate))

    return max(device.bytes_with(needs(device)) for device in road.memory)


def bytes_of(road: Road, pattern: Pattern) -> int:
    """Return the bytes of the largest device under a pattern."""
    return max(device.bytes_with(road.peak_bytes(pattern, device)) for device in road.memory)


def most_compact(problem: Problem, placement: Placement, period: int, below: int) -> Compact:
    """Find the pattern of least memory at ``period``, if it takes less than ``below`` bytes.

    Where the deadline of ``problem`` passes, the answer is the best so far and its bound is weaker.
    """
    # Unlimited memory would be out of all proportion to the bytes of the pattern.
    enough = _more_than_any(Road(problem, placement))
    problem = problem.with_memory(min(enough, math.floor(below * (1 - RESOLUTION))))
    road = Road(problem, placement)
    least = estimated_bytes(road, period)
    if least is None or least > problem.platform.memory_bytes:
        return NOTHING
    # As in ``ilp.py``, solve first without tensors that wait at ends of boundaries: that needs no more.
    relaxed = _solve(problem, road, period, least, single_slots=False)
    if relaxed.pattern is None or _slots_suffice(road, relaxed.pattern):
        return relaxed
    held = _solve(problem, road, period, least if relaxed.bound is None else relaxed.bound, single_slots=True)
    return Compact(held.pattern, held.num_bytes, relaxed.bound)


def _more_than_any(road: Road) -> int:
    """Return the bytes of the largest device if no operation takes, and none waits, longer than a period."""
    in_flight = [2 * len(road.operations) + 1] * road.num_stages
    return max(device.bytes_with(road.bytes_enough(in_flight, device.stages)) for device in road.memory)


def _solve(problem: Problem, road: Road, period: int, least: int, *, single_slots: bool) -> Compact:
    """Find the pattern that takes the fewest bytes, from ``least`` to the memory of the problem."""
    unknown = Compact(None, None, least)
    if problem.deadline.passed():
        return unknown
    import pulp  # not at the top, so that importing the planner stays cheap

    try:
        model = _Model(
            pulp, road, period, least, problem.platform.memory_bytes, problem.deadline, single_slots=single_slots
        )
    except DeadlinePassed:
        return unknown
    model.problem.solve(ilp._solver(pulp, problem.deadline))
    status = model.problem.sol_status
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return NOTHING if model.problem.status == pulp.LpStatusInfeasible else unknown
    if ilp._value(model.peak) * model.least < least * (1 - RESOLUTION):
        return unknown  # stopped before it had any solution, which PuLP reports as a feasible one of zeros
    orders, shifts = model.orders_and_shifts()
    pattern = pattern_of(road, orders, shifts, single_slots=True)
    if not single_slots and (pattern is None or pattern.period > period):
        pattern = pattern_of(road, orders, shifts, single_slots=False)
    if pattern is None or pattern.period > period or not road.fits(pattern):
        return unknown  # operations so short that the solver's tolerance reorders them
    num_bytes = bytes_of(road, pattern)
    return Compact(pattern, num_bytes, num_bytes if status == pulp.LpSolutionOptimal else least)


def _slots_suffice(road: Road, pattern: Pattern) -> bool:
    """Return whether no tensor waits longer than a period at the end of a boundary, so that one slot is enough."""
    begins, ticks = pattern.begins, [operation.ticks for operation in road.operations]
    return all(
        begins[index] + ticks[index] <= begins[index - 1] + ticks[index - 1] + pattern.period
        and begins[index + 1] <= begins[index] + pattern.period
        for index, operation in enumerate(road.operations)
        if operation.name.startswith("S")
    )


class _Model(ilp._Model):
    """Integer linear program of an allocation at one period, for the least bytes of the largest device."""

    def __init__(
        self,
        pulp: Any,
        road: Road,
        period: int,
        least: int,
        memory_bytes: int,
        deadline: Deadline,
        *,
        single_slots: bool,
    ) -> None:
        self.least, self.memory_bytes = max(1, least), memory_bytes
        self.peak = pulp.LpVariable("peak", least / self.least, max(1, memory_bytes) / self.least)
        """Peak memory as a multiple of the least possible, so that the solver's tolerances are relative to the
        answer."""
        super().__init__(pulp, road, period, period, deadline, single_slots=single_slots)
        self.problem.setObjective(-self.peak)

    def _fit(self, stages: tuple[int, ...], event: int, room: int) -> None:
        fixed = (self.memory_bytes - room) / self.least
        self.problem += fixed + self._kept(stages, event, self.least) <= self.peak
