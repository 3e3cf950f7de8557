"""The whole trade-off of time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_partition.planner.data_parallel import seconds_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning import DEFAULT_TIME_LIMIT_SECONDS, make_plan
from deepspeed_partition.planner.problem import Chain, Platform

RESOLUTION = 0.02
"""Of the memory: two plans of a frontier differ by at least this part of it."""
POINTS = 20
"""The time is enough for so many plans at the least."""
SAVES_MEMORY = ("madpipe", "contiguous")
"""These plan for a period in as little memory as possible."""
WORTH = 0.05
"""So much slower is still worth naming, if it saves memory."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans of falling memory and rising time; none is worse than another one in both."""

    plans: tuple[Plan, ...]
    complete: bool
    """Down to the smallest memory into which the algorithm fits a plan; otherwise the time was up."""

    def memory_bytes(self, plan: Plan) -> int:
        """What each device must have."""
        return max(plan.peak_memory_bytes)

    def slowdown(self, plan: Plan) -> float:
        """How much longer than the fastest, as a part of it."""
        return seconds_of(plan) / seconds_of(self.plans[0]) - 1

    def bargain(self) -> Plan | None:
        """The least memory that costs at most ``WORTH``; None where nothing is saved for that."""
        plan = max((plan for plan in self.plans if self.slowdown(plan) <= WORTH), key=seconds_of)
        return None if plan is self.plans[0] else plan

    def to_dict(self) -> dict[str, Any]:
        """Plain data, in seconds and bytes."""
        return {
            "complete": self.complete,
            "points": [
                {
                    "memory_bytes": self.memory_bytes(plan),
                    "seconds": seconds_of(plan),
                    "slowdown": self.slowdown(plan),
                    "proved": plan.proved,
                    "plan": plan.to_dict(),
                }
                for plan in self.plans
            ],
        }


def frontier(
    chain: Chain,
    platform: Platform,
    algorithm: str | Sequence[int] = "madpipe",
    *,
    num_micro_batches: int | None = None,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Frontier:
    """Plan for less and less memory, from what the fastest plan takes down to the least that any plan takes.

    Each plan is made for ``RESOLUTION`` less memory than the one before used, the last one for the smallest memory
    of all; and then for its period in less memory, where the algorithm can do that. Where it is exact, so are the
    points: nothing is faster in the memory that they show.

    Args:
        platform: ``memory_bytes`` is the most that a plan may use.
        time_limit_seconds: for all of it.

    Raises:
        InfeasibleError: not even the first plan fits.
        ValueError: as ``make_plan``.
    """
    limit = DEFAULT_TIME_LIMIT_SECONDS if time_limit_seconds is None else time_limit_seconds
    deadline = Deadline(limit, within=deadline)

    def plan_for(memory_bytes: int) -> Plan:
        smaller = replace(platform, memory_bytes=memory_bytes)
        make = partial(
            make_plan, chain, smaller, algorithm, time_limit_seconds=limit / POINTS / 2, deadline=deadline
        )
        plan = make(num_micro_batches=num_micro_batches)
        if num_micro_batches is not None or algorithm not in SAVES_MEMORY:
            return plan
        try:
            least = make(period_seconds=plan.period_seconds)
        except InfeasibleError:  # the time was up before it had found as little as the plan takes
            return plan
        if max(least.peak_memory_bytes) >= max(plan.peak_memory_bytes):
            return plan
        # What is proved of a point is that nothing is faster.
        return replace(least, proved=plan.proved, proved_class=plan.proved_class, proved_of=plan.proved_of)

    plans = [plan_for(platform.memory_bytes)]
    smallest, complete = 1, False
    while not deadline.passed():
        used = max(plans[-1].peak_memory_bytes)
        if used <= smallest:
            complete = True
            break
        try:
            plans.append(plan_for(max(smallest, min(used - 1, int(used * (1 - RESOLUTION))))))
        except InfeasibleError as error:
            smallest = used if error.smallest_memory_bytes is None else error.smallest_memory_bytes
            if smallest > used:  # the last plan fits into less: it had no time to find that
                break
    return Frontier(tuple(_undominated(plans)), complete)


def _undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Without those that a plan of less memory equals or beats."""
    kept: list[Plan] = []
    for plan in reversed(plans):
        if not kept or seconds_of(plan) < seconds_of(kept[-1]):
            kept.append(plan)
    return kept[::-1]
