"""The cut that a pipeline module is built on."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import deepspeed.pipe
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.utils import partition_balanced
from torch import nn

from deepspeed_partition.engine.pipeline.asked_ranks import ranks_told_in_build
from deepspeed_partition.engine.pipeline.drawn_weights import tell_of_drawn_weights, watch_draws
from deepspeed_partition.engine.pipeline.shared_weights import tie_repeated_modules, warn_of_weights_apart
from deepspeed_partition.engine.pipeline.stages import allocation_of, hold_stages, owner
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.all_come import wait_for_the_same_error
from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.engine.runtime.environment import announce, planning_is_off, without_lines_of_hosts
from deepspeed_partition.given_modules import built_aside
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.units import format_bytes

try:
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
except ImportError:  # as of DeepSpeed 0.19.0; later versions have it
    DualPipeVModule = None

KEPT_TO_TRAIN = 4
"""The numbers that training keeps per parameter, by Adam in one precision: itself, its gradient, two states."""
METHODS = ("madpipe", "profile")
"""Names of planning. DeepSpeed names ``profile`` and does not implement it."""
KNOWN_METHODS = "'madpipe', a list of boundaries, or one of DeepSpeed's own 'parameters', 'uniform', 'type:REGEX'"


@dataclass(frozen=True, slots=True)
class Cut:
    """The origin of a module's boundaries; a module that DeepSpeed cut by itself has none."""

    origin: Literal["trial", "boundaries", "plan", "default"]
    """``trial``: until a plan is made. ``default``: DeepSpeed's cut in the place of a plan (``MADPIPE=0``)."""
    plan: Plan | None = None
    is_of_a_run: bool = False
    """Whether a run has made the plan by its own measurements, or has come by it with a checkpoint: no user asks
    for it where the model has changed."""
    planned_by: Mapping[str, Any] | None = None
    """What the run was planned by that came to this cut (``warmup/planned_by.py``). None: no run of the module is
    planned, or none has come to the cut yet."""

    @property
    def is_where_runs_plan(self) -> bool:
        """Whether runs of the module make their own cuts, so that a later one may ask for another cut."""
        return self.origin == "trial" or self.is_of_a_run or self.planned_by is not None

    @property
    def is_of_program(self) -> bool:
        """Whether a program has written down the boundaries, or DeepSpeed has made them, and no plan."""
        return self.origin in ("boundaries", "default") and not self.is_of_a_run


def asks_for_plan(method: object) -> bool:
    """Whether a ``partition_method`` asks for a plan, in any case: ``"madpipe"`` or ``"profile"``."""
    return isinstance(method, str) and method.strip().lower() in METHODS


def check_method_name(method: object) -> None:
    """Refuse a name that is neither MadPipe's nor DeepSpeed's, in the configuration, where DeepSpeed reads none.

    Raises:
        ValueError: such a name.
    """
    if method is None or asks_for_plan(method):
        return
    if not isinstance(method, str) or not method.strip().lower().startswith(("parameters", "uniform", "type:")):
        raise ValueError(f"pipeline.partition_method is {method!r}: it must be {KNOWN_METHODS}")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, which rank 0 reads for all ranks.

    Raises:
        PlanFormatError: the file is no plan, or one of another version.
        OSError: the file cannot be read.
    """
    return from_rank_0(lambda: Plan.load(path))


def check_boundaries(boundaries: Iterable[Any], num_layers: int, num_stages: int) -> list[int]:
    """Explicit boundaries, ready for ``parts`` of a module.

    Raises:
        ValueError: not integers that rise from 0 to ``num_layers`` in ``num_stages`` steps.
    """
    cuts = list(boundaries)
    if any(isinstance(cut, bool) or not hasattr(cut, "__index__") for cut in cuts):
        raise ValueError(f"the boundaries {cuts} are not all integers")
    cuts = [cut.__index__() for cut in cuts]
    if len(cuts) != num_stages + 1:
        raise ValueError(
            f"the boundaries {cuts} make {len(cuts) - 1} stages and the pipeline has {num_stages}: "
            f"give {num_stages + 1} boundaries, from 0 to {num_layers}"
        )
    if cuts[0] != 0 or cuts[-1] != num_layers or any(left >= right for left, right in pairwise(cuts)):
        raise ValueError(
            f"the boundaries {cuts} do not rise from 0 to {num_layers}, the number of layers: "
            "every stage needs at least one layer"
        )
    return cuts


def ranks_of_pipeline(plan: Plan, num_ranks: int) -> int:
    """Return the ranks of a pipeline that runs a plan: its devices; all ranks where these do not divide them.

    ``check_plan`` refuses the latter with both numbers.
    """
    devices = plan.platform.num_devices
    return num_ranks if num_ranks % devices else devices


def check_plan(plan: Plan, num_layers: int, num_ranks: int, *, one_stage_each: str | None = None) -> None:
    """Refuse a plan that a pipeline of ``num_layers`` layers on ``num_ranks`` ranks cannot run.

    Args:
        one_stage_each: why DeepSpeed's own schedule runs here, which has one stage per rank; None where lists of
            instructions do.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks; a rank without a stage; what
            DeepSpeed's schedule cannot do, where that runs.
    """
    if plan.chain.num_layers != num_layers:
        raise PlanMismatchError(
            f"the plan for {plan.chain.name!r} cuts {plan.chain.num_layers} layers and this model has "
            f"{num_layers}: make a plan for this model"
        )
    if plan.platform.num_devices != num_ranks:
        raise PlanMismatchError(
            f"the plan is for {plan.platform.num_devices} devices and this pipeline has {num_ranks} ranks: "
            f"make a plan for {num_ranks} devices, or start {plan.platform.num_devices} ranks per pipeline"
        )
    num_used = len({stage.device for stage in plan.stages})
    if num_used < num_ranks:
        raise PlanMismatchError(
            f"the plan uses {num_used} of its {num_ranks} devices, and DeepSpeed's optimizer cannot start on a "
            "rank without parameters: make a plan that uses all of them, or start fewer ranks and plan for those"
        )
    if one_stage_each is None:
        return
    plan.check_treats_all_alike(f"DeepSpeed's own schedule, which runs here, because {one_stage_each},")
    recomputed = [index for index, stage in enumerate(plan.stages) if stage.blocks]
    if recomputed:
        raise PlanMismatchError(
            f"the plan recomputes layers of stage {recomputed[0]}, and DeepSpeed's own schedule runs here, "
            f"because {one_stage_each}: use activation_checkpoint_interval, or make a plan without recomputation"
        )
    if not plan.is_contiguous:
        raise PlanMismatchError(
            f"the plan puts several stages on a device, or stages out of order, and DeepSpeed's own schedule runs "
            f"here, because {one_stage_each}: make a plan with the algorithm 'contiguous'"
        )
    if plan.step is not None and plan.step.blocking_step_seconds is None:
        raise PlanMismatchError(
            f"the plan fits into {format_bytes(plan.platform.memory_bytes)} per device with fewer micro-batches "
            "in flight than DeepSpeed's own schedule has, one on the last stage and one more on each before it, "
            f"which runs here, because {one_stage_each}: plan with more memory, or let the run make its own plan"
        )


def check_every_rank_trains(allocation: Allocation, num_trainable_parameters: Sequence[int]) -> None:
    """Refuse what the optimizer of a rank could not start on.

    Raises:
        ValueError: a rank without trainable parameters.
    """
    trains = {owner(allocation, layer) for layer, count in enumerate(num_trainable_parameters) if count}
    for device in sorted({stage.device for stage in allocation.stages} - trains):
        layers = ", ".join(
            f"{start} to {stop}"
            for start, stop in (stage.layers for stage in allocation.stages if stage.device == device)
        )
        place = f"stage {device}" if allocation.is_contiguous else f"rank {device}"
        raise ValueError(
            f"the cut at {list(allocation.boundaries)} leaves {place}, layers {layers}, without trainable "
            "parameters, and DeepSpeed's optimizer cannot start without: give other boundaries, another plan, or "
            "freeze layers before the pipeline is built (under Lightning in __init__()), which then cuts otherwise"
        )


def check_same_model(plan: Plan, num_trainable_parameters: Sequence[int]) -> None:
    """Refuse a plan that was measured on another model, which its number of layers alone does not tell.

    A chain that somebody wrote by hand may say anything about parameters: only names as the profiler gives them
    (``"3.Linear"``) vouch for the counts.

    Raises:
        PlanMismatchError: a stage of the plan has another number of trainable parameters than its layers here.
    """
    measured = all(
        name.startswith(f"{layer}.")
        for stage in plan.stages
        for layer, name in zip(range(*stage.layers), stage.layer_names, strict=False)
    )
    for index, stage in enumerate(plan.stages):
        promised, found = stage.num_trainable_parameters, sum(num_trainable_parameters[slice(*stage.layers)])
        if measured and stage.layer_names and promised not in (None, found):
            start, stop = stage.layers
            raise PlanMismatchError(
                f"the plan was measured on another model: layers {start} to {stop} of {plan.chain.name!r} have "
                f"{promised} trainable parameters and this model's have {found} (stage {index}): make a plan for "
                "this model"
            )


class TooManyStagesError(ValueError):
    """More stages than there are layers for them.

    Args:
        what: How many there are of both.
        most: The most stages.
    """

    def __init__(self, what: str, most: int) -> None:
        super().__init__(
            f"{what}: use at most {most} stages, PipelineModule(num_stages={most}) or another number that divides "
            f"the processes, or start {most} processes"
        )
        self.what, self.most = what, most


def trial_boundaries(
    num_trainable_parameters: Sequence[int], num_stages: int, num_frozen_parameters: Sequence[int] = ()
) -> list[int]:
    """DeepSpeed's ``parameters`` cut, on which every stage has something to train.

    DeepSpeed does not see frozen parameters, which take memory all the same. Where there are some, it is the cut
    whose fullest stage keeps least: ``KEPT_TO_TRAIN`` numbers per trainable parameter, one per frozen one.

    Raises:
        ValueError: fewer layers with trainable parameters than stages, or none at all.
    """
    num_trainable = sum(1 for count in num_trainable_parameters if count)
    if not num_trainable:
        raise ValueError(
            f"none of the model's {len(num_trainable_parameters)} layers has trainable parameters, and a plan is "
            "made for training: give the boundaries as a list"
        )
    if num_trainable < num_stages:
        raise TooManyStagesError(
            f"the pipeline has {num_stages} stages and the model {len(num_trainable_parameters)} layers, "
            f"{num_trainable} of them with trainable parameters",
            num_trainable,
        )
    if not any(num_frozen_parameters):
        return [int(cut) for cut in partition_balanced(list(num_trainable_parameters), num_stages)]
    both = zip(num_trainable_parameters, num_frozen_parameters, strict=True)
    return _least_fullest(
        [(KEPT_TO_TRAIN * trainable + frozen, trainable) for trainable, frozen in both], num_stages
    )


def _least_fullest(layers: Sequence[tuple[int, int]], num_stages: int) -> list[int]:
    """Boundaries with the smallest sum of the fullest stage; layers are what they keep, and what they train.

    With T(k, l) that sum for the first l layers in k stages: T(k, l) = min over j < l of
    max(T(k - 1, j), kept(j, l)), where layers j to l train something.
    """
    kept, trained = ([0, *itertools.accumulate(each)] for each in zip(*layers, strict=True))
    fullest: list[float] = [0, *[math.inf] * len(layers)]
    starts: list[list[int]] = []
    for _ in range(num_stages):
        best = [
            min(
                ((max(fullest[j], kept[l] - kept[j]), j) for j in range(l) if trained[l] > trained[j]),
                default=(math.inf, 0),
            )
            for l in range(len(layers) + 1)
        ]
        fullest = [most for most, _ in best]
        starts.append([j for _, j in best])
    boundaries = [len(layers)]
    for last_start in reversed(starts):
        boundaries.append(last_start[boundaries[-1]])
    return boundaries[::-1]


def count_parameters(module: deepspeed.pipe.PipelineModule) -> tuple[list[int], list[int]]:
    """The trainable and the frozen parameters of each layer; one layer is built at a time."""
    trainable, frozen = [], []
    for spec in module._layer_specs:
        with built_aside(spec, partial(_built, spec)) as layer:
            parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
            trainable.append(sum(weight.numel() for weight in parameters if weight.requires_grad))
            frozen.append(sum(weight.numel() for weight in parameters if not weight.requires_grad))
    return trainable, frozen


def _built(spec: Any) -> Any:
    return spec.build() if isinstance(spec, LayerSpec) else spec


def set_boundaries(module: deepspeed.pipe.PipelineModule, boundaries: Sequence[int]) -> None:
    """Tell ``module``, whose ranks have one stage each, which layers this rank builds."""
    stage = module._topo.get_coord(module.global_rank).pipe
    # DeepSpeed's numpy integers break ``seed_layers`` on Python 3.11 and later.
    module.parts = [int(cut) for cut in boundaries]
    module._set_bounds(start=module.parts[stage], stop=module.parts[stage + 1])


def why_deepspeeds_schedule(module: deepspeed.pipe.PipelineModule) -> str | None:
    """Why DeepSpeed's own schedule must run a cut of ours; None where lists of instructions can."""
    num_slices = module.mpu().model_parallel_size
    if num_slices > 1:
        return f"each layer is sliced over {num_slices} ranks"
    return None


def place_layers(module: deepspeed.pipe.PipelineModule, allocation: Allocation) -> None:
    """Tell ``module`` which layers this rank builds, before it builds them."""
    if why_deepspeeds_schedule(module) is None:
        hold_stages(module, allocation)
    else:
        set_boundaries(module, allocation.boundaries)


when_cut: list[Callable[[Sequence[Any]], object]] = []
"""Functions that are called with the layers of each module before it is cut."""


def partition_layers(
    module: deepspeed.pipe.PipelineModule, method: object, by_deepspeed: Callable[[str], None]
) -> None:
    """Cut ``module`` while it is built: the body of ``PipelineModule._partition_layers``.

    Args:
        method: ``partition_method``: a plan, boundaries, one of ``METHODS``, or a method of DeepSpeed.
        by_deepspeed: DeepSpeed's own ``_partition_layers``, for its own methods.
    """
    num_layers, num_stages = module._num_layers, module.num_stages
    module.madpipe_cut = None
    for look_at in when_cut:
        look_at(module._layer_specs)
    if isinstance(method, str) and not asks_for_plan(method):
        try:
            by_deepspeed(method)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} It is {KNOWN_METHODS}.") from None
        set_boundaries(module, module.parts)
        warn_of_weights_apart(module._layer_specs, module.stage_owner, module.loss_fn)
        return
    if DualPipeVModule is not None and isinstance(module, DualPipeVModule):
        raise ValueError(
            f"partition_method {method!r} cannot cut a DualPipeVModule, whose ranks hold two stages each: "
            "use one of DeepSpeed's methods"
        )
    if num_layers < num_stages:
        raise TooManyStagesError(
            f"the pipeline has {num_stages} stages and the model {num_layers} layers", num_layers
        )
    if planning_is_off() and (asks_for_plan(method) or isinstance(method, Plan)):
        announce("MADPIPE=0: no planning, the layers are cut by DeepSpeed's default method 'parameters'")
        by_deepspeed("parameters")
        set_boundaries(module, module.parts)
        warn_of_weights_apart(module._layer_specs, module.stage_owner, module.loss_fn)
        module.madpipe_cut = Cut("default")
        return
    module._layer_specs = tie_repeated_modules(module._layer_specs, num_stages, module.loss_fn)
    watch_draws(module)
    if isinstance(method, Plan):
        check_plan(method, num_layers, num_stages, one_stage_each=why_deepspeeds_schedule(module))
        place_layers(module, allocation_of(method))
        module.madpipe_cut = Cut("plan", method)
    elif asks_for_plan(method):
        with ranks_told_in_build(module._layer_specs):
            trainable, frozen = count_parameters(module)
        boundaries = trial_boundaries(trainable, num_stages, frozen)
        place_layers(module, Allocation.contiguous(boundaries))
        module.madpipe_cut = Cut("trial")
        module.cut_without_plan = boundaries
        module.is_counted_as_by_deepspeed = not any(frozen)
    elif isinstance(method, list | tuple):
        place_layers(module, Allocation.contiguous(check_boundaries(method, num_layers, num_stages)))
        module.madpipe_cut = Cut("boundaries")
    else:
        raise ValueError(f"partition_method is {method!r}: it must be {KNOWN_METHODS}")


class PipelineModule(deepspeed.pipe.PipelineModule):
    """DeepSpeed's ``PipelineModule`` that is cut by a plan.

    Takes DeepSpeed's arguments and

    Args:
        num_stages: ranks of a pipeline; left out with a plan: the plan's devices.
        partition_method: ``"madpipe"`` (the default) measures the layers on the first micro-batch and plans;
            a list of boundaries such as ``[0, 3, 8]`` is taken as it is; DeepSpeed's own methods work too.
        plan: a plan, or the path of one, that is run as it is, without measuring. A rank may have several stages.

    Raises:
        ValueError: fewer layers than stages, or boundaries that do not fit the layers.
        PlanMismatchError: a plan for another model or another number of ranks.
        PlanFormatError: a file that is no plan.
    """

    def __init__(
        self,
        layers,
        num_stages=None,
        topology=None,
        loss_fn=None,
        seed_layers=False,
        seed_fn=None,
        base_seed=1234,
        partition_method="madpipe",
        activation_checkpoint_interval=0,
        activation_checkpoint_func=checkpointing.checkpoint,
        checkpointable_layers=None,
        dynamic_shape=False,
        *,
        plan: Plan | str | os.PathLike[str] | None = None,
    ) -> None:
        accelerator.before_communication()
        if plan is not None:
            partition_method = plan if isinstance(plan, Plan) else load_plan(plan)
            if num_stages is None and topology is None and dist.is_initialized():
                num_stages = ranks_of_pipeline(partition_method, dist.get_world_size())
        with without_lines_of_hosts():
            super().__init__(
                layers=layers,
                num_stages=num_stages,
                topology=topology,
                loss_fn=loss_fn,
                seed_layers=seed_layers,
                seed_fn=seed_fn,
                base_seed=base_seed,
                partition_method=partition_method,
                activation_checkpoint_interval=activation_checkpoint_interval,
                activation_checkpoint_func=activation_checkpoint_func,
                checkpointable_layers=checkpointable_layers,
                dynamic_shape=dynamic_shape,
            )
        tell_of_drawn_weights(self)

    def _partition_layers(self, method="uniform"):
        try:
            partition_layers(self, method, super()._partition_layers)
        except ValueError:
            wait_for_the_same_error()
            raise
