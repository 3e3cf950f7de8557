"""Seconds that operations take beside their layers, told from a step that a run has made.

What an engine does for an operation is a part of it. A device that is late also lets others wait, and the more
often devices wait for each other, the more of that is passed on. Neither is seen where one operation is measured
by itself; a whole step of training, beside its simulation, shows both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_partition.planner.planning.problems import problem_of
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.step.step_simulator import Positions, StepEngine, in_order

SHARE = 0.002
"""Share of a step within which its simulation agrees with it."""


def operation_seconds_of(
    chain: Chain,
    platform: Platform,
    boundaries: Sequence[int],
    orders: Sequence[Order],
    step_seconds: float,
    flushes: Sequence[int] | None = None,
) -> float:
    """Return the seconds of an operation beside its layers with which a measured step agrees.

    Args:
        chain: the layers as they were measured in that step.
        platform: its ``operation_seconds`` are the least that is returned.
        boundaries: of the partition with one stage per device that ran.
        orders: forwards and backwards of each device in the step, as in a plan.
        step_seconds: what the step took, from the first forward to the last backward.
        flushes: micro-batches of each batch of the step, where the last stage begins no backward of a batch
            before all of its forwards are done.

    Raises:
        ValueError: ``orders`` are not of these stages, or wait for each other in a circle.
    """
    num_stages = len(boundaries) - 1
    in_positions = [tuple(_position(name, num_stages) for name, _ in order) for order in orders]

    def simulated(seconds: float) -> float:
        return _simulated(chain, replace(platform, operation_seconds=seconds), boundaries, in_positions, flushes)

    least = platform.operation_seconds
    if step_seconds <= simulated(least):
        return least
    most = max(least, step_seconds / (2 * max(map(len, orders))))
    while simulated(most) < step_seconds:
        most *= 2
    while simulated(most) - simulated(least) > SHARE * step_seconds:
        middle = (least + most) / 2
        if simulated(middle) < step_seconds:
            least = middle
        else:
            most = middle
    return least


def _position(name: str, num_stages: int) -> int:
    """Return the place of an operation on the path of a micro-batch, such as 5 for ``B0`` of three stages."""
    kind, stage = name[0], int(name[1:])
    if kind not in "FB" or stage >= num_stages:
        raise ValueError(f"operation {name} is no forward or backward of one of {num_stages} stages")
    return stage if kind == "F" else 2 * num_stages - 1 - stage


def _simulated(
    chain: Chain,
    platform: Platform,
    boundaries: Sequence[int],
    orders: Sequence[Positions],
    flushes: Sequence[int] | None,
) -> float:
    num_stages = len(boundaries) - 1
    problem = problem_of(chain, platform)
    engine = StepEngine(problem.times, problem.table, boundaries, range(num_stages), flushes=flushes)
    run = engine.run(sum(position == 0 for position in orders[0]), in_order(orders))
    assert run is not None, "no limit is given"
    return problem.times.clock.seconds(run.ticks)
