"""What the planner expects of a step, in the order in which the engine runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_partition import Chain, Plan
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import StepPlan
from deepspeed_partition.planner.simulate.replay_step import Timeline, run_step, step_ticks
from deepspeed_partition.schedule.instructions import Compute
from deepspeed_partition.schedule.lowering import lower


@dataclass(frozen=True)
class SimulatedStep:
    """A step as the independent replay has it, which knows nothing of the engine."""

    step_seconds: float
    left_seconds: list[float]
    """Seconds after which each micro-batch has left the pipeline."""


def simulated_step(plan: Plan, chain: Chain, num_micro_batches: int) -> SimulatedStep:
    """Simulate a step of a plan, with or without an order of its own."""
    orders = tuple(
        tuple((each.name, each.micro_batch) for each in instructions if isinstance(each, Compute))
        for instructions in lower(plan, num_micro_batches).lists
    )
    in_order = StepPlan(
        num_micro_batches=num_micro_batches, step_seconds=0.0, blocking_step_seconds=None, order=orders
    )
    timeline = run_step(replace(plan, step=in_order), chain)
    assert isinstance(timeline, Timeline), timeline
    seconds = Clock.of(chain, plan.platform).seconds
    return SimulatedStep(
        step_seconds=seconds(step_ticks(plan, chain, timeline)),
        left_seconds=[seconds(timeline.operations["B0", number][1]) for number in range(num_micro_batches)],
    )


def rhythm(instants: list[float]) -> float:
    """Return the seconds from one instant to the next, in the middle half."""
    first, last = len(instants) // 4, 3 * len(instants) // 4
    return (instants[last] - instants[first]) / (last - first)
