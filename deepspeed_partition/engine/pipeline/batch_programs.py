"""The lists of instructions of a batch, on any cut."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.step import one_f_one_b_order
from deepspeed_partition.schedule import lowering
from deepspeed_partition.schedule.instructions import Program


def program_of(
    plan: Plan | None,
    num_ranks: int,
    num_micro_batches: int,
    *,
    trains: bool,
    flushes: Sequence[int] | None = None,
    most_in_flight: int | None = None,
) -> Program:
    """The lists of one batch.

    A cut without a plan has one stage per rank and runs as DeepSpeed would run it, with as many micro-batches in
    flight.

    Args:
        flushes: Micro-batches of each batch of the step, see ``AnyPlanEngine.flushes``.
        most_in_flight: The most micro-batches in flight in a step, on a cut without a plan.

    Raises:
        LoweringError: the plan's order cannot be run.
    """
    if plan is not None and trains:
        return lowering.lower(plan, num_micro_batches, flushes)
    if plan is not None:
        return lowering.lower_evaluation(plan, num_micro_batches)
    if trains and flushes is not None:
        return lowering.with_transfers(lowering.flush_orders(range(num_ranks), flushes), range(num_ranks))
    orders = [
        one_f_one_b_order(stage, min(num_ranks - stage, most_in_flight or num_ranks), num_micro_batches)
        if trains
        else tuple((f"F{stage}", number) for number in range(num_micro_batches))
        for stage in range(num_ranks)
    ]
    return lowering.with_transfers(orders, range(num_ranks))
