"""What must hold where a pipeline never drains, and what is said of it before it begins.

A plan says how many versions of the weights each stage has room for. So the mode is the plan's, and a plan for
another mode than the user's, or for another number of micro-batches per update, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_partition.engine.pipeline.held_weights import CAN_KEEP_COUNTS, new_flat_buffers
from deepspeed_partition.engine.pipeline.parts import all_that_moves
from deepspeed_partition.engine.pipeline.plain_passes import has_additional_losses
from deepspeed_partition.engine.pipeline.shared_weights import listed
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.units import counted, format_seconds
from deepspeed_partition.planner.weight_versions import TWO_VERSIONS
from deepspeed_partition.schedule.endless import EndlessProgram

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

CLIPS_BY_ALL = (
    "weight_versions '2bw' clips by the norm of all stages, as a step that drains does, so updates come later and "
    "a rank keeps the gradients of two batches, one more than planned"
)
CLIPS_BY_OWN = (
    "weight_versions {mode!r} clips by the norm of each rank's own gradients, because the norm of all would make "
    "stages wait for one another: training then depends on the cut; '2bw' clips by the norm of all"
)

READS_AHEAD = (
    "weight_versions {mode!r} reads data before its call: a data iterator is {number} further than what was "
    "trained on, also where its place is saved with a checkpoint or it is used otherwise; engine.come_to_rest() "
    "keeps what was read for the next call with this iterator"
)
UNCOMPARED = (
    "the memory that each rank needs is not compared with its plan: that is done for steps that drain, and this "
    "pipeline never does"
)


def why_not_with(plan: Plan, asked: str | None, num_micro_batches: int) -> str | None:
    """Return why a plan is not for a run, in its versions of the weights; None where it is.

    Args:
        asked: ``weight_versions`` of the run; None: those of the plan, whatever they are.
        num_micro_batches: of an update in the run.
    """
    mode = plan.weight_versions
    if asked not in (None, mode):
        return (
            f"the plan is for weight_versions {mode!r} and the option weight_versions is {asked!r}: leave the "
            f"option out, which follows the plan, or plan with --weight-versions {asked} "
            f"--micro-batches {num_micro_batches}"
        )
    if not plan.is_asynchronous:
        return None
    planned = plan.micro_batches_per_update
    if planned != num_micro_batches:
        return (
            f"the plan's num_micro_batches is {planned}, by which weight_versions {mode!r} counts the versions of "
            f"the weights, and gradient_accumulation_steps of this run is {num_micro_batches}: set that to "
            f"{planned}, or plan with --micro-batches {num_micro_batches}"
        )
    versions = plan.versions if plan.treats_all_alike else None  # else it is refused in other words
    return None if versions is None else versions.why_not()


def check_versions(plan: Plan, asked: str | None, num_micro_batches: int) -> None:
    """Refuse a plan that is not for a run, in its versions of the weights; see :func:`why_not_with`.

    Raises:
        PlanMismatchError: it is not.
    """
    reason = why_not_with(plan, asked, num_micro_batches)
    if reason is not None:
        raise PlanMismatchError(reason)


def announce_endless(engine: MadPipeEngine, mode: str, program: EndlessProgram) -> None:
    """Say what differs from training that drains, and from the plan. On every rank; rank 0 says it."""
    if engine.runs_ahead:
        num_ahead = max(1, program.batches_ahead) * program.num_micro_batches
        announce(READS_AHEAD.format(mode=mode, number=counted(num_ahead, "micro-batch")))
    clips = engine.gradient_clipping() and engine.num_stages > 1
    if clips:
        announce(CLIPS_BY_ALL if mode == TWO_VERSIONS else CLIPS_BY_OWN.format(mode=mode))
    if engine.plan is not None and not engine.runs_ahead and engine.num_stages > 1:
        here, ahead = program.batch_seconds, engine.plan.period_seconds * program.num_micro_batches
        announce(
            "the data of a batch come when the losses of the one before are known, so forwards do not run ahead "
            f"of it: an update is to take {format_seconds(here)}, and {format_seconds(ahead)} in the plan, whose "
            "forwards do"
        )
    versions = None if engine.plan is None else engine.plan.versions
    if versions is None or new_flat_buffers(engine.optimizer) is None:
        return
    words = []
    for device in range(engine.num_stages):
        stages = [stage for stage, each in enumerate(program.device_of_stage) if each == device]
        planned = [versions.num_held(stage) for stage in stages]
        held = program.most_held_together(mode, device)
        if held > min(planned):
            words.append(
                f"rank {device} {held} of the stages {listed(stages)}, of which its plan counts {listed(planned)}"
            )
    if words:
        announce(
            f"{type(engine.optimizer).__name__} has the weights of all stages of a rank in one buffer, so their "
            f"versions are held together, in more memory than planned: {'; '.join(words)}. It is as planned with "
            "one stage per rank (algorithm 'contiguous'), or in fp32 without ZeRO"
        )


def why_not_endless(engine: Any) -> str | None:
    """Why an engine cannot train without a drain between batches, and what to do; None where it can."""
    module = engine.module
    if not engine.runs_lists:
        return f"DeepSpeed's own schedule runs here, because {engine.reason_for_deepspeeds_schedule()}"
    if engine.plan is None:
        return "it needs the pattern of a plan: give partition_method='madpipe', or a plan"
    if not CAN_KEEP_COUNTS:
        return "it needs torch 2.4 or newer"
    if engine.flushes is not None:
        return "the loss is that of a whole batch, so that each batch drains the pipeline"
    stage_of = {
        layer: number for number, stage in enumerate(module.allocation.stages) for layer in range(*stage.layers)
    }
    for part in all_that_moves(module):
        if len({stage_of[layer] for layer in part.layers}) > 1:
            layers = ", ".join(map(str, part.layers))
            return (
                f"layers {layers} share weights and are on different stages, which would have different versions"
            )
    if engine.fp16_enabled() or engine.torch_autocast_z0_gradscaler:
        return "the scale of the loss in fp16 depends on the update before: use bf16 or fp32"
    known = (BF16_Optimizer, DeepSpeedZeroOptimizer)
    if engine.optimizer is not engine.basic_optimizer and not isinstance(engine.optimizer, known):
        return f"{type(engine.optimizer).__name__} is not known to it: use fp32 or bf16, with ZeRO 0 or 1"
    if engine.sharded is not None:
        return "pipelines share out the weights of their stages (shard_weights), which have one version"
    clips = engine.gradient_clipping() and engine.num_stages > 1
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and clips and engine.weight_versions == TWO_VERSIONS:
        return (
            "'2bw' clips by the norm of all stages, for which updates come later, and ZeRO-1 has room for the "
            "reduced gradients of one batch: set gradient_clipping to 0, or use bf16 without ZeRO or 'stashing'"
        )
    if engine.has_experts and clips and isinstance(engine.optimizer, BF16_Optimizer):
        return (
            "BF16_Optimizer keeps the gradients of MoE layers apart, which would be left out of the norm that "
            "clips: set gradient_clipping to 0, or use fp32"
        )
    if engine.has_experts and clips and engine.weight_versions != TWO_VERSIONS:
        return (
            f"{engine.weight_versions!r} clips by the norm of each rank's own gradients, and with MoE layers "
            "pipelines have different ones, so that the weights that they share would part: set "
            "gradient_clipping to 0, or use '2bw'"
        )
    if has_additional_losses(module):
        return "get_additional_losses() is of the batches that the last stage has run, which are several"
    return None
