"""Steps of saved plans, from which a search begins: each is run as it was saved, so that no answer is longer.

A step that was saved is run in its own order, where that has whole forwards and backwards and as many
micro-batches. Besides, and otherwise, its allocation is tried as any other is. What a plan recomputes is
recomputed where the problem allows that.

Method: own; nothing is searched. Cost: one simulated step for each plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.orders import FixedRule
from deepspeed_partition.planner.solvers.step.step_search import StepSearch
from deepspeed_partition.planner.solvers.step.step_simulator import (
    Positions,
    StepEngine,
    WaitInCircleError,
    in_order,
)


def try_saved(problem: Problem, search: StepSearch, plans: Sequence[Plan]) -> None:
    """Let a search know the steps of saved plans that fit.

    Args:
        problem: the problem of the search, with what may be recomputed.
    """
    for plan in plans:
        devices = [stage.device for stage in plan.stages]
        number = {device: index for index, device in enumerate(dict.fromkeys(devices))}
        if len(number) > problem.platform.num_devices:
            continue
        blocks = tuple(stage.blocks for stage in plan.stages)
        placement = Placement.of(plan.boundaries, devices)
        if len(placement.devices) == len(devices):  # else stages are one here that are two in its order
            recomputing = placement.recomputing(blocks)
            if _may_recompute(problem, recomputing):
                placement = recomputing
            if placement is recomputing and plan.step is not None:
                orders = [plan.step.order[device] for device in number]
                _try_order(search, placement, orders)
        if not search.ended():
            (search.try_contiguous if placement.is_contiguous else search.try_shared)(placement)


def _may_recompute(problem: Problem, placement: Placement) -> bool:
    """Return whether a plan may recompute the blocks of an allocation."""
    costs = problem.recomputation
    for (stage, _), blocks in zip(placement.stages, placement.blocks, strict=True):
        if not blocks:
            continue
        if costs is None or not all(costs.allows(*block) for block in blocks):
            return False
        if costs.mode == "stage" and blocks != (stage,):
            return False
    return True


def _try_order(search: StepSearch, placement: Placement, orders: Sequence[Order]) -> None:
    """Run a step in given orders, and remember it where it fits."""
    engine = search.engine(placement)
    found = _positions(engine, orders, search.num_micro_batches)
    if found is None or search.problem.flushes or not search.problem.allows(placement):
        return
    try:
        run = engine.run(search.num_micro_batches, in_order(found))
    except WaitInCircleError:
        return  # with fewer buffers than it was made for
    if run is None or max(engine.peaks(run)) > search.problem.platform.memory_bytes:
        return
    rule = FixedRule(found)
    if search.simulated < search.num_micro_batches:
        search.certain.append((placement, rule))  # the order is that of a whole step
        search.full_ticks[placement, rule] = run.ticks
    else:
        search.run(placement, rule, inf)


def _positions(
    engine: StepEngine, orders: Sequence[Order], num_micro_batches: int
) -> tuple[Positions, ...] | None:
    """Return orders as the simulator takes them; None where they are not those of such a step."""
    position = {name: index for index, name in enumerate(engine.names)}
    count = [0] * len(engine.names)
    found: list[Positions] = []
    for device, order in enumerate(orders):
        mine: list[int] = []
        for name, micro_batch in order:
            index = position.get(name)
            if index is None or engine.device[index] != device or count[index] != micro_batch:
                return None
            count[index] += 1
            mine.append(index)
        found.append(tuple(mine))
    return tuple(found) if set(count) == {num_micro_batches} else None
