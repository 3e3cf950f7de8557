"""A loss that is computed once on all outputs of a batch, and what becomes of the plan that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.units import counted, format_bytes
from deepspeed_partition.schedule.lowering import is_flushed

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine


def take_losses_of_batches(engine: MadPipeEngine, flushes: tuple[int, ...]) -> None:
    """Let the loss of a batch be computed once, see :meth:`MadPipeEngine.take_losses_of_batches`. Collective."""
    if not engine.runs_lists and engine.num_stages > 1:
        reason = engine.reason_for_deepspeeds_schedule() or "MADPIPE=0 asks for it"
        raise ValueError(
            f"DeepSpeed's own schedule runs here, because {reason}, and it begins backwards before all "
            "forwards are done; take the mean over micro-batches instead (loss='mean'), or one micro-batch"
        )
    engine.flushes = flushes
    if engine.plan is None or engine.plan.step is None or engine.num_stages == 1:
        return
    last = len(engine.plan.stages) - 1
    if engine.plan.step.num_micro_batches == sum(flushes) and is_flushed(
        engine.plan.step.order, last + 1, flushes
    ):
        return
    if engine.chain is not None:
        from deepspeed_partition.engine.warmup.run_plan import plan_for_flushes

        announce("the plan was made for other orders and is made again")
        engine.recut_to_plan_of_run(plan_for_flushes(engine))
        return
    lacking = why_no_room_for_flush(engine.plan, max(flushes))
    if lacking is not None:
        raise ValueError(lacking)
    announce(
        f"the plan's stages stay where they are and run the {counted(max(flushes), 'forward')} of a batch "
        "before its first backward: the times and the memory that the plan promises are not those of this "
        "order"
    )


def why_no_room_for_flush(plan: Plan, num_micro_batches: int) -> str | None:
    """What a plan lacks to keep all micro-batches in flight, as far as it tells what it keeps of one."""
    for device, use in enumerate(plan.memory):
        in_flight = [stage.in_flight for stage in plan.stages if stage.device == device]
        if not in_flight:
            continue
        needed = use.weights + use.buffers + use.transient + use.stash * num_micro_batches // max(in_flight)
        if needed > plan.platform.memory_bytes:
            return (
                f"the plan keeps at most {counted(max(in_flight), 'micro-batch')} in flight on device {device}, "
                f"and all {num_micro_batches} of a batch need {format_bytes(needed)} of the "
                f"{format_bytes(plan.platform.memory_bytes)} that it was made for: leave the plan out, so that "
                "one is made for this order, or take the mean over micro-batches (loss='mean')"
            )
    return None
