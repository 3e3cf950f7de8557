"""What the plan of a run depends on that a script sets: a later run that asks for something else plans anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed_partition.engine.pipeline.module import Cut, trial_boundaries
from deepspeed_partition.engine.pipeline.parts import trainable_and_frozen_parameters
from deepspeed_partition.engine.pipeline.stages import allocation_in_words, allocation_of
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.planner.allocation import Allocation

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

OPTIONS = (
    "algorithm", "memory", "bandwidth", "latency_seconds", "duplex", "port_bandwidth", "devices_per_port",
    "operation_seconds", "copy_bandwidth", "weight_copies", "plan", "weight_versions",
    "recompute", "split_backward",
)  # fmt: skip


SIZE = "size of micro-batches"


def planned_by(engine: MadPipeEngine) -> dict[str, Any]:
    """What a plan of ``engine`` depends on beside the model and the machine, by its names."""
    return {
        **{name: getattr(engine.options, name) for name in OPTIONS},
        "precision": [engine.fp16_enabled(), engine.bfloat16_enabled()],
        "stage of ZeRO": engine.zero_optimization_stage(),
        "number of micro-batches": engine.micro_batches,
        SIZE: engine.train_micro_batch_size_per_gpu() if engine.knows_micro_batch_size else None,
        "number of pipelines": engine.grid.data_parallel_size,
        "optimizer": type(engine.basic_optimizer).__name__,
    }


def given_up_if_planned_otherwise(engine: MadPipeEngine, cut: Cut) -> Cut:
    """``cut``, or a trial cut in its place where the run that made it was planned by something else. Collective.

    A plan that the user built the module with stays. One by which a hook of that run has cut it is that run's.
    What happens is said.
    """
    if cut.planned_by is None or engine.options.plan is not None or engine.basic_optimizer is None:
        return cut
    now, present = planned_by(engine), allocation_of(engine.module)
    words = allocation_in_words(present)
    changed = [name for name, value in now.items() if cut.planned_by[name] != value]
    if None in (now[SIZE], cut.planned_by[SIZE]):  # looked at with the first batch
        changed = [name for name in changed if name != SIZE]
    if not changed:
        announce(f"the layers stay cut at {words}, as in the run before: this one is planned by the same options")
        return cut
    announce(
        f"this run has another {' and another '.join(changed)} than the run before: the cut of that, {words}, is "
        "given up, and the layers are measured and planned again"
    )
    trial = Cut("trial")
    if present.is_contiguous:
        engine.module.madpipe_cut = trial
    else:  # a warm-up and a trial have one stage per rank
        trainable, frozen = trainable_and_frozen_parameters(engine.module)
        boundaries = trial_boundaries(trainable, engine.num_stages, frozen)
        engine.recut_to(trial, Allocation.contiguous(boundaries))
    return trial
