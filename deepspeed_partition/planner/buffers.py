"""More room for messages of a plan whose devices have memory to spare.

With room for one message at each end of a boundary a device waits until its neighbour has taken it before it sends
the next one. On paper nobody waits, for times are exact there. In a run each delay of one device becomes one of
the others; with more room it is made up for.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.planning.shared_choice import MORE_BUFFERS, MOST_FILLED
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.simulate.replay import replay_and_count
from deepspeed_partition.planner.simulate.replay_step import run_step, step_ticks
from deepspeed_partition.planner.solvers.step.split_bounds import split_lower_bound
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.schedule.shared_ports import comparable_step_seconds

MOST_OPERATIONS = 20_000
"""Operations of a step up to which it is replayed for them: a second or two."""


def with_more_buffers(plan: Plan, chain: Chain, *, recompute: str = "auto", split_backward: bool = False) -> Plan:
    """Return the plan with room for more messages: the same operations in the same order, in no longer a step.

    A plan stays as it is without a step or messages, with data parallelism, with more than ``MOST_OPERATIONS``, or
    where its devices would be filled beyond ``MOST_FILLED``. What is proved of a step is proved for so much room;
    the bound of another one is that of any allocation, with whatever the planner was allowed.

    Args:
        recompute: what the planner was allowed to run again, as in ``make_plan``. A plan that decides
            micro-batch by micro-batch was allowed to, in any case.
        split_backward: whether it was allowed backwards in two operations. A plan with such ones was, in any case.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    step, platform = plan.step, plan.platform
    num_devices = len({stage.device for stage in plan.stages})
    if step is None or num_devices == 1 or plan.data_parallel is not None:
        return plan
    if 2 * len(plan.stages) * step.num_micro_batches > MOST_OPERATIONS:
        return plan
    for number in MORE_BUFFERS:
        if number <= platform.comm_buffers:
            break
        roomier = _with_buffers(plan, chain, replace(platform, comm_buffers=number), recompute, split_backward)
        if roomier is not None and not _takes_longer_where_shared(plan, roomier):
            return roomier
    return plan


def _takes_longer_where_shared(plan: Plan, roomier: Plan) -> bool:
    planned, found = comparable_step_seconds([plan, roomier])
    assert planned is not None and found is not None
    return found > planned * (1 + 1e-9)


def _with_buffers(
    plan: Plan, chain: Chain, platform: Platform, recompute: str, split_backward: bool
) -> Plan | None:
    """Return the plan on a platform that has other buffers; None where it is slower, or too large."""
    assert plan.step is not None
    roomier = replace(plan, platform=platform)
    run = run_step(roomier, chain)
    if isinstance(run, str):
        return None
    clock = Clock.of(chain, platform)
    ticks = step_ticks(roomier, chain, run)
    seconds = clock.seconds(ticks)
    if seconds > plan.step.step_seconds:
        return None  # a transfer comes earlier, and another one waits for it
    bound = clock.seconds(_step_bound(plan, chain, platform, recompute, split_backward))
    step = replace(
        plan.step,
        step_seconds=seconds,
        lower_bound_seconds=bound,
        gap=seconds / bound - 1,
        proved=seconds == bound,
    )
    roomier, replayed = replay_and_count(replace(roomier, step=step), chain)
    if replayed.violations or max(roomier.peak_memory_bytes) > MOST_FILLED * platform.memory_bytes:
        return None
    return roomier


def _step_bound(plan: Plan, chain: Chain, platform: Platform, recompute: str, split_backward: bool) -> int:
    """Return the ticks than which no step is shorter, of whatever the planner may choose."""
    assert plan.step is not None
    kinds = {name[0] for order in plan.step.order for name, _ in order}
    mode = PER_MICRO_BATCH if "f" in kinds else recompute
    problem = with_recomputation(problem_of(chain, platform, plan.step.num_micro_batches), mode)
    problem = replace(problem, per_micro_batch=mode == PER_MICRO_BATCH)
    if split_backward or "W" in kinds:
        return split_lower_bound(replace(problem, splits_backward=True), contiguous=False)
    return step_lower_bound(problem, contiguous=False)
