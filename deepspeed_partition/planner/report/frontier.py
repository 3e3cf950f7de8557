"""Frontier: the trade-off of time against memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_partition.planner.data_parallel import seconds_of
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.planning.problems import DEFAULT_TIME_LIMIT_SECONDS
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.training_bytes import TrainingBytes
from deepspeed_partition.planner.weight_versions import FLUSH

RESOLUTION = 0.02
"""Least relative difference in memory between two plans of a frontier."""
POINTS = 20
"""Number of plans for which the time is enough at least."""
SAVES_MEMORY = ("madpipe", "contiguous")
"""Algorithms that can plan for a given period in as little memory as possible."""
WORTH = 0.05
"""Largest slowdown, relative to the fastest plan, that is worth naming if it saves memory."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans of falling memory and rising time; none is worse than another one in both."""

    plans: tuple[Plan, ...]
    complete: bool
    """True: the plans go down to the smallest memory into which the algorithm fits one. False: the time was up, or
    that memory is not known: ``madpipe`` does not search for the least memory of a device whose stages share
    weights."""

    def memory_bytes(self, plan: Plan) -> int:
        """Return the bytes that each device must have for a plan."""
        return max(plan.peak_memory_bytes)

    def slowdown(self, plan: Plan) -> float:
        """Return how much longer a plan takes than the fastest one, relative to the fastest."""
        return seconds_of(plan) / seconds_of(self.plans[0]) - 1

    def is_proved(self, plan: Plan) -> bool:
        """Return whether nothing that the algorithm may plan is proved to be faster in the memory of a plan."""
        if plan.step is not None:
            return bool(plan.step.proved)
        return plan.proved and not (plan.algorithm == "madpipe" and plan.proved_class == "contiguous")

    def bargain(self) -> Plan | None:
        """Plan of the least memory whose slowdown is at most ``WORTH``; None where no such plan saves memory."""
        plan = max((plan for plan in self.plans if self.slowdown(plan) <= WORTH), key=seconds_of)
        return None if plan is self.plans[0] else plan

    def to_dict(self) -> dict[str, Any]:
        """Return the frontier as plain data, in seconds and bytes."""
        return {
            "complete": self.complete,
            "points": [
                {
                    "memory_bytes": self.memory_bytes(plan),
                    "seconds": seconds_of(plan),
                    "slowdown": self.slowdown(plan),
                    "proved": self.is_proved(plan),
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
    recompute: str = "auto",
    split_backward: bool = False,
    weight_versions: str = FLUSH,
) -> Frontier:
    """Plan for less and less memory, from what the fastest plan takes down to the least that any plan takes.

    Each plan is made for ``RESOLUTION`` less memory than the plan before it used, the last one for the smallest
    memory of all. Then, where the algorithm can do that, it is planned again for its period in less memory. Where
    the algorithm is exact, the points are exact: nothing is faster in the memory that they show.

    Args:
        platform: its ``memory_bytes`` is the most that a plan may use.
        time_limit_seconds: the limit for all plans together.
        recompute: what may run its forward again, as in ``make_plan``.
        split_backward: whether backwards may be two operations, as in ``make_plan``.
        weight_versions: what becomes of the weights, as in ``make_plan``. Other modes than ``"flush"`` are not
            planned again for less memory, nor are backwards in two operations, recomputation micro-batch by
            micro-batch, and ports: no plan for a chosen period is known of them.

    Raises:
        InfeasibleError: not even the first plan fits.
        ValueError: as ``make_plan``.
    """
    limit = DEFAULT_TIME_LIMIT_SECONDS if time_limit_seconds is None else time_limit_seconds
    deadline = Deadline(limit, within=deadline)
    # What make_plan takes together with a chosen period.
    can_save = (
        num_micro_batches is None
        and algorithm in SAVES_MEMORY
        and weight_versions == FLUSH
        and not split_backward
        and recompute != PER_MICRO_BATCH
        and platform.port_bandwidth is None
    )

    def plan_for(memory_bytes: int) -> Plan:
        smaller = replace(platform, memory_bytes=memory_bytes)
        make = partial(
            make_plan,
            chain,
            smaller,
            algorithm,
            time_limit_seconds=limit / POINTS / 2,
            deadline=deadline,
            recompute=recompute,
            split_backward=split_backward,
            weight_versions=weight_versions,
        )
        plan = make(num_micro_batches=num_micro_batches)
        return _in_less_memory(plan, make) if can_save else plan

    plans, complete = _descent(platform.memory_bytes, plan_for, deadline)
    if algorithm == "madpipe" and TrainingBytes(chain, platform).shares:
        complete = False
    return Frontier(tuple(_undominated(plans)), complete)


def _in_less_memory(plan: Plan, make: Callable[..., Plan]) -> Plan:
    """Return a plan of the same period that needs less memory, if one is found; otherwise the plan."""
    try:
        least = make(period_seconds=plan.period_seconds)
    except InfeasibleError:  # the time was up before a plan as small was found
        return plan
    if max(least.peak_memory_bytes) >= max(plan.peak_memory_bytes):
        return plan
    # A proved point means that nothing is faster in its memory.
    return replace(least, proved=plan.proved, proved_class=plan.proved_class, proved_of=plan.proved_of)


def _descent(memory_bytes: int, plan_for: Callable[[int], Plan], deadline: Deadline) -> tuple[list[Plan], bool]:
    """Return plans for less and less memory, and whether the last one is for the least that any plan takes.

    Raises:
        InfeasibleError: not even the first plan fits.
    """
    plans = [plan_for(memory_bytes)]
    smallest = 1
    while not deadline.passed():
        used = max(plans[-1].peak_memory_bytes)
        if used <= smallest:
            return plans, True
        try:
            plans.append(plan_for(max(smallest, min(used - 1, int(used * (1 - RESOLUTION))))))
        except InfeasibleError as error:
            smallest = used if error.smallest_memory_bytes is None else error.smallest_memory_bytes
            if smallest > used:  # the last plan fits into less: it had no time to find that
                break
    return plans, False


def _undominated(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans without those that a plan of less memory equals or beats."""
    kept: list[Plan] = []
    for plan in reversed(plans):
        if not kept or seconds_of(plan) < seconds_of(kept[-1]):
            kept.append(plan)
    return kept[::-1]
