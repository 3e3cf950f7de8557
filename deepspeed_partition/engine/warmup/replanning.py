"""The plan of a run made again while it trains, because a rank has become slow, or is as fast again as before."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_partition.engine.pipeline.stages import allocation_of, owner
from deepspeed_partition.engine.repartition.layer_moves import check_that_layers_can_move
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.warmup.run_plan import MIN_GAIN
from deepspeed_partition.planner.cluster.slow_devices import plan_at_speeds
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.units import counted, format_seconds

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

MOST_SECONDS = 10.0
"""Seconds of rank 0's processor for planning, at the most: the other ranks wait."""
AS_PLANNED = 0.03
"""How much a speed may differ from 1 that counts as 1: such differences are noise."""


def plan_for_speeds(engine: MadPipeEngine, factors: Sequence[float]) -> None:
    """Make the plan again for the speeds that ranks have, and move the layers where a step gains. Collective.

    Args:
        engine: between two steps, with a plan that it has made.
        factors: of each device of a pipeline: how many times as long as planned its layers take.
    """
    why_not = _why_not(engine)
    if why_not is not None:
        announce(f"the plan is not made again: {why_not}", logging.WARNING)
        return
    started, present = time.perf_counter(), engine.plan
    assert present is not None
    speeds = speeds_of(present, factors)
    try:
        plan, takes = from_rank_0(lambda: _plan(engine, present, speeds))
    except InfeasibleError as error:
        announce(f"the plan is not made again: {error}", logging.WARNING)
        return
    at_speeds = ", ".join(f"{speed:.2f}" for speed in speeds)
    seconds = plan.step_seconds or takes
    gain = 1 - seconds / takes
    if gain < MIN_GAIN:
        announce(
            f"no layer moves: at the speeds of the ranks now ({at_speeds}){_left_out(engine)} the best plan found "
            f"takes {gain:.1%} less than the {format_seconds(takes)} of the present one"
        )
        return
    why_not = _rank_without_data(engine, plan)
    if why_not is not None:
        announce(f"no layer moves: {why_not}", logging.WARNING)
        return
    planned = time.perf_counter()
    old, new = allocation_of(engine.module), allocation_of(plan)
    num_moved = sum(owner(old, layer) != owner(new, layer) for layer in range(engine.module._num_layers))
    engine.recut_to_plan_of_run(plan)
    announce(
        f"the plan was made again for the speeds of the ranks now ({at_speeds}){_left_out(engine)}: a step of "
        f"{format_seconds(seconds)} instead of {format_seconds(takes)}; {counted(num_moved, 'layer')} "
        f"moved in {format_seconds(time.perf_counter() - planned)}, after {format_seconds(planned - started)} of "
        "planning"
    )


def _left_out(engine: MadPipeEngine) -> str:
    """What options ask for, and plans for unlike devices do not have, in words."""
    left_out = []
    if engine.options.split_backward:
        left_out.append("backwards in halves")
    if engine.options.recompute == PER_MICRO_BATCH:
        left_out.append("recomputation micro-batch by micro-batch")
    return f", without {' and '.join(left_out)}" if left_out else ""


def speeds_of(present: Plan, factors: Sequence[float]) -> list[float]:
    """Return the speed of each device: 1 is that at which the layers were measured.

    What all devices lose alike is no speed of theirs: the plan counts too little for all of them.
    """
    now = [present.platform.speed_of(device) / factor for device, factor in enumerate(factors)]
    fastest = max(now)
    speeds = [each / fastest for each in now]
    return [1.0 if each > 1 - AS_PLANNED else max(each, 1e-3) for each in speeds]


def _plan(engine: MadPipeEngine, present: Plan, speeds: Sequence[float]) -> tuple[Plan, float]:
    chain, options = engine.chain, engine.options
    assert chain is not None
    limit = min(options.time_limit_seconds or MOST_SECONDS, MOST_SECONDS)
    mode = "block" if options.recompute == PER_MICRO_BATCH else options.recompute
    return plan_at_speeds(present, chain, speeds, str(options.algorithm), recompute=mode, time_limit_seconds=limit)


def _why_not(engine: MadPipeEngine) -> str | None:
    """Why no plan can be made again here, alike on all ranks; None where one can. Collective."""
    if engine.chain is None or engine.plan is None:
        return "this run has not measured its layers, because its plan was given or comes from a checkpoint"
    if engine.flushes is not None:
        return "the loss is that of a whole batch, which is planned for ranks that are alike"
    try:
        check_that_layers_can_move(engine.module)
        engine.check_that_optimizer_can_go_on(after_steps=True)
        engine.check_that_scheduler_can_go_on()
    except RuntimeError as error:
        return str(error)
    return None


def _rank_without_data(engine: MadPipeEngine, plan: Plan) -> str | None:
    """Why a plan's ends cannot be where it has them, alike on all ranks. Collective."""
    has_data = gather_objects(engine.data_iterator is not None or engine.batch_fn is not None)
    ends = {plan.stages[0].device, plan.stages[-1].device}
    without = [rank for ranks in engine._pipelines() for end in ends if not has_data[rank := ranks[end]]]
    if not without:
        return None
    return f"an end of the pipeline would come to rank {without[0]}, which was given no data: give every rank some"
