"""DeepSpeed's pipeline engine, which plans before its first step and can change its cut."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from deepspeed_partition.capture.model_layers import cut_off_weights
from deepspeed_partition.engine.checkpoint.checkpoint_engine import Found, ResumingEngine, is_whole
from deepspeed_partition.engine.pipeline.batch_programs import program_of
from deepspeed_partition.engine.pipeline.before_step import (
    BeforeStep,
    Buffers,
    WeightsOfForward,
    WrittenName,
    is_small,
)
from deepspeed_partition.engine.pipeline.carried_types import why_types_are_not_carried
from deepspeed_partition.engine.pipeline.drawn_data import copy_of_micro_batch
from deepspeed_partition.engine.pipeline.drawn_weights import tell_of_another_method
from deepspeed_partition.engine.pipeline.endless_conditions import (
    UNCOMPARED,
    announce_endless,
    check_versions,
    why_not_endless,
)
from deepspeed_partition.engine.pipeline.endless_training import EndlessTraining
from deepspeed_partition.engine.pipeline.experts import has_experts, why_they_stay
from deepspeed_partition.engine.pipeline.module import (
    Cut,
    asks_for_plan,
    check_boundaries,
    check_method_name,
    check_plan,
    check_same_model,
    load_plan,
    when_cut,
    why_deepspeeds_schedule,
)
from deepspeed_partition.engine.pipeline.old_weights import (
    WatchedLayers,
    tell_reads_of_optimizer,
    watch_state,
)
from deepspeed_partition.engine.pipeline.optimizers_in_parts import (
    StepOfUser,
    listed_groups,
    refuse_ranks_without_parameters,
    refuse_weights_of_nobody,
    refuse_what_needs_all,
    weights_given,
)
from deepspeed_partition.engine.pipeline.parts import held_modules, trainable_parameters
from deepspeed_partition.engine.pipeline.sharded_stages import ShardedStages
from deepspeed_partition.engine.pipeline.stages import StagesModule, allocation_of, hold_built_stages
from deepspeed_partition.engine.pipeline.tied_gradients import without_gradient
from deepspeed_partition.engine.repairs import (
    clip_by_global_norm,
    fp16_without_zero,
    link_states_of_all_groups,
    tell_how_gradients_are_clipped,
    viewed_as_bytes,
)
from deepspeed_partition.engine.repartition.part_descriptions import remember_attributes
from deepspeed_partition.engine.repartition.state_beside import StateBeside
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.all_come import wait_until_all_come
from deepspeed_partition.engine.runtime.collectives import from_rank_0, raise_first
from deepspeed_partition.engine.runtime.environment import (
    announce,
    check_writable,
    planning_is_off,
)
from deepspeed_partition.engine.runtime.first_failure import is_raised_by_all
from deepspeed_partition.engine.runtime.interruption import say_interruptions_in_one_line
from deepspeed_partition.engine.runtime.planned_peak import MICRO_BATCHES, OPTIMIZER, REDUCTION, PlannedPeak
from deepspeed_partition.engine.runtime.random_state import random_state
from deepspeed_partition.engine.runtime.recorded_timeline import Recorder
from deepspeed_partition.engine.runtime.step_watch import StepWatch
from deepspeed_partition.engine.runtime.transfers import refuse_blocking_waits
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.engine.warmup.given_plan import check_given_plan
from deepspeed_partition.engine.warmup.losses_of_batches import take_losses_of_batches
from deepspeed_partition.engine.warmup.pending_plan import PendingPlan
from deepspeed_partition.engine.warmup.planned_by import SIZE, given_up_if_planned_otherwise, planned_by
from deepspeed_partition.options import WHEN_SLOW, Options
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.report.step_figures import StepFigures
from deepspeed_partition.planner.units import counted
from deepspeed_partition.planner.weight_versions import FLUSH, TWO_VERSIONS
from deepspeed_partition.profiling.attributes import AttributesOfForward, HeldState
from deepspeed_partition.schedule.endless import EndlessProgram, lower_endless
from deepspeed_partition.schedule.instructions import Compute, Instruction
from deepspeed_partition.tensor_values import num_bytes_of

SAVED_BY_ALL = (
    "each rank writes its layers, so call save_checkpoint on every rank, and not under a condition such as "
    "`if rank == 0`"
)
MOVED_BY_ALL = (
    "layers move between ranks, so call recut on every rank, and not under a condition such as `if rank == 0`"
)
MONITORED_STEPS = 10
"""Steps between two writings of figures to DeepSpeed's monitor, where ``steps_per_print`` says nothing."""

when_cut.append(remember_attributes)


class MadPipeEngine(ResumingEngine):
    """DeepSpeed's ``PipelineEngine`` on a planned cut.

    Where the module or the configuration asks for ``madpipe``, the first ``train_batch`` measures the layers on
    its first micro-batch, rank 0 plans, and layers move to their planned ranks before the first optimizer step.
    With ``warmup_steps`` so many steps train on a trial cut before that, and layers are measured in them.
    :meth:`recut` moves layers between any two steps.
    Cuts that are MadPipe's, or given as a plan or boundaries, run as lists of instructions wherever that is
    possible (``runs_lists``). A module that DeepSpeed cut is trained as DeepSpeed does. Made by
    :func:`initialize`, or by DeepSpeed's own ``initialize`` after :func:`install`.

    Raises:
        ValueError: an unknown or malformed key of ``madpipe`` in the configuration; fp16 without ZeRO.
        PlanMismatchError: a plan file for another model or another number of ranks.
    """

    chain: Chain | None = None
    """The measurements that this run planned with."""
    when_zeros_stand_for_none: Callable[[list[torch.nn.Parameter]], object] | None = None
    """Function that is called once, with this rank's weights that a step has computed no gradient of, before the
    optimizer takes zeros for it."""
    before_optimizer_step: Callable[[], object] | None = None
    """Function called on every rank once per step, with the gradients, before they are clipped and applied. Where
    the pipeline never drains that is in the call of a later batch, or in a rest, on each rank at another time."""
    when_losses_are_known: Callable[[], object] | None = None
    """Function called on every rank once per step, when the steps of its batch have run: before
    ``before_optimizer_step``, or, where the pipeline never drains, at the end of the batch's own call. It may
    communicate with all ranks."""
    clips_optimizer_alone = False
    """Whether the norm of gradients is that of the optimizer's parameters, as under Lightning; else, as under
    DeepSpeed, that of all parameters of the module. In fp32 without ZeRO; elsewhere it is the first."""
    when_given_up: Callable[[], object] | None = None
    """Function called where a rank ran out of memory in a step of the warm-up: the step runs again, as if it had
    not begun."""
    state_beside: StateBeside | None = None
    """What layers and the loss keep beside their modules, which goes with them where they move."""
    watches_optimizer = True
    """Whether the engine says what hooks of the optimizer's step see; a host may do so itself."""
    around_measurements: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that every rank enters while the layers and the loss function run to be measured."""
    tell_phase: Callable[[str], object] = staticmethod(lambda phase: None)
    """Function called on every rank when ``"warm-up"`` and ``"planning"`` begin, and with ``""`` when layers are
    where they were planned."""
    folder_of_logs: str | None = None
    """The folder where the plan is saved if ``save_plan`` names no place. None: the folder of DeepSpeed's
    monitors, if one writes files."""
    around_updates: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that a rank enters for each update of a pipeline that never drains, which comes between the
    micro-batches of a later batch."""
    steps_behind = 0
    """While ``before_optimizer_step`` runs: calls of ``train_batch`` that have ended since the one that gave the
    batch of the update."""
    watches_reads = True
    """Whether reads of weights, and of the optimizer's state, one by one are told of while a pipeline goes on that
    never drains. A host that watches its users' code itself says False."""
    _watched_layers: WatchedLayers | None = None
    runs_ahead = True
    """Whether the data of the next batch may be read before a call returns, where the pipeline never drains."""
    _endless: EndlessTraining | None = None
    """Training without a drain between batches, once it has begun on the present cut."""
    _goes_on = False
    """Whether the step that runs is one of a pipeline that never drains."""
    _has_linked_states = False
    """Whether DeepSpeed's functions find the optimizer's states by parameters."""
    _mode_for_benchmarks: str | None = None
    _tells_reads = False
    """Whether the optimizer says where its state is read while the pipeline goes on."""
    knows_micro_batch_size = True
    """Whether the configuration says the size of micro-batches; else a host does with the first batch."""
    options: Options
    """The options that a host has given; else those of ``pipeline.madpipe`` in the configuration."""

    def __init__(self, *, options: Options | None = None, **kwargs: Any) -> None:
        self._pending = PendingPlan(self)
        if options is not None:  # of another host, whose steps have ranks of their own
            self.watches_programs = self.knows_micro_batch_size = False
        self._before_step: BeforeStep | None = None
        """This rank as it was before the step that is under way."""
        self._layer_buffers: Buffers | None = None
        self._weights_of_forward: WeightsOfForward | None = None
        self._attributes_of_forward: AttributesOfForward | None = None
        self._cut_off: dict[str, torch.nn.Parameter] | None = None
        self.written_by_forwards: set[WrittenName] = set()
        """The weights that forwards of any rank were seen to write, once layers have been measured."""
        self._peak: PlannedPeak | None = None
        of_fp16 = fp16_without_zero(kwargs["config_class"], kwargs.get("optimizer"), kwargs["model"].num_stages)
        if of_fp16 and getattr(kwargs["model"], "madpipe_cut", None) is not None:
            raise ValueError(of_fp16)  # before DeepSpeed speaks of the type, on devices that have none of it
        of_types = why_types_are_not_carried(kwargs["model"], kwargs["config_class"], kwargs.get("optimizer"))
        if of_types and getattr(kwargs["model"], "madpipe_cut", None) is not None:
            raise ValueError(of_types)
        if kwargs.get("model_parameters") is not None:
            given = kwargs["model_parameters"] = listed_groups(kwargs["model_parameters"])
            optimizer = kwargs.get("optimizer")
            refuse_ranks_without_parameters(kwargs["model"], given, optimizer, kwargs["config_class"])
        weights = weights_given(kwargs.get("optimizer"), kwargs.get("model_parameters") or ())
        self.has_experts = has_experts(kwargs["model"])
        super().__init__(**kwargs)
        remember_attributes([*self.module._layer_specs, *held_modules(self.module).values()])
        if self.watches_programs and isinstance(self.module, StagesModule):
            if self.state_beside is None:
                self.state_beside = StateBeside(self.module)
            self.state_beside.remember()
        self.options = options or Options.from_mapping(self._config.pipeline.get("madpipe", {}))
        watch.start(self.options.patience_seconds)
        say_interruptions_in_one_line()
        self.tells_ends = options is None  # other hosts run steps and hooks where they belong
        self._cut_as_configured()
        if self._pending.is_pending and self.has_experts and self.num_stages > 1:
            raise ValueError(why_they_stay(self.module))
        if (of_fp16 or of_types) and self.owns_cut:
            raise ValueError(of_fp16 or of_types)
        if of_fp16:
            announce(of_fp16, logging.WARNING)
        self._announce_schedule()
        self.tell_ends()
        if self.options.save_timeline is not None:
            self._record_into(self.options.save_timeline)
        self._writes_figures = bool(self._config.monitor_config.enabled)
        if self._writes_figures or self.options.replan == WHEN_SLOW:
            self.watch_steps()
        self._let_shapes_differ()
        tell_how_gradients_are_clipped(self, is_compared=options is None)
        refuse_what_needs_all(self)
        if options is None:  # other hosts know what their optimizers have
            refuse_weights_of_nobody(self, weights)
        raise_first(self._without_gradient())
        self._step_of_user = StepOfUser(self)
        if self.options.shard_weights:
            self._share_out()

    def _share_out(self) -> None:
        """Leave each rank the weights of its share of its stages."""
        if self._pending.is_pending:
            raise ValueError(
                "shard_weights: layers move when this run has made its plan, and weights that are shared out do "
                "not: give it the plan of an earlier run (option plan), or boundaries"
            )
        if self.weight_versions != FLUSH:
            raise ValueError(
                f"shard_weights: a rank with weight_versions {self.weight_versions!r} keeps versions of "
                "all its weights: leave one of both out"
            )
        self.sharded = ShardedStages(self)

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which each rank has all weights of its stages, between two steps. Collective.

        That is to read or to load them where ``shard_weights`` leaves a rank some of them only; what the owner of
        a stage has at the end stays. Without that option it changes nothing.
        """
        return nullcontext() if self.sharded is None else self.sharded.whole()

    def _whole_states(self) -> AbstractContextManager[None]:
        """Each rank has all weights of its stages, and the optimizer's states of them, as DeepSpeed expects it."""
        return nullcontext() if self.sharded is None else self.sharded.whole(self.basic_optimizer)

    def _broadcast_model(self) -> None:
        with viewed_as_bytes(self.module):
            super()._broadcast_model()

    def _get_gradients_for_reduction(self) -> Any:
        """Leave out gradients that DeepSpeed cannot reduce, in float64 or complex, where no other pipeline is.

        Where weights without a gradient are left so, it makes none for them.
        """
        without = self._weights_without_gradient() if self.leaves_without_gradient else []
        gradients, of_experts = super()._get_gradients_for_reduction()
        made = {weight.grad.data_ptr() for weight in without if weight.grad is not None}
        gradients = [
            each for each in gradients if not isinstance(each, torch.Tensor) or each.data_ptr() not in made
        ]
        for weight in without:
            weight.grad = None
        if self.grid.data_parallel_size == 1:
            reducible = get_accelerator().supported_dtypes()
            gradients = [gradient for gradient in gradients if gradient.dtype in reducible]
        return gradients, of_experts

    def _weights_without_gradient(self) -> list[torch.nn.Parameter]:
        """The weights that the step has computed no gradient of, in any pipeline. Collective over these."""
        weights = [weight for weight in self.module.parameters() if weight.requires_grad and weight.numel()]
        has_gradient = [int(weight.grad is not None) for weight in weights]
        if self.grid.data_parallel_size > 1 and weights:
            found = torch.tensor(has_gradient, dtype=torch.uint8, device=self.device)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.grid.get_data_parallel_group())
            has_gradient = found.tolist()
        return [weight for weight, has in zip(weights, has_gradient, strict=True) if not has]

    def _reduce_non_expert_gradients(self, grads: Any, *args: Any, **kwargs: Any) -> None:
        """Reduce gradients over the pipelines; where there is one, and no type or factor changes them, nothing."""
        kind = self.communication_data_type
        if (
            self.grid.data_parallel_size > 1
            or self.gradient_predivide_factor() != 1.0
            or not all(isinstance(each, torch.Tensor) and each.dtype == kind for each in grads)
        ):
            super()._reduce_non_expert_gradients(grads, *args, **kwargs)

    def allreduce_and_copy(self, small_bucket: Any, dp_group: Any, dp_world_size: Any = None) -> None:
        """Reduce gradients over the pipelines; where there is one, it would be a copy of all of them, and back.

        Those of experts that no other pipeline has are divided by the number of pipelines nevertheless.
        """
        size = dist.get_world_size(group=dp_group)
        changes_type = any(each.dtype != self.communication_data_type for each in small_bucket)
        scales = self.gradient_predivide_factor() != 1.0 or dp_world_size not in (None, 1)
        if size > 1 or changes_type or scales:
            super().allreduce_and_copy(small_bucket, dp_group, dp_world_size)

    # The cut

    def _cut_as_configured(self) -> None:
        """Follow ``pipeline.partition_method`` of the configuration, else what the module was built with.

        A method of DeepSpeed there changes nothing: DeepSpeed does not read it, and the module is cut already.
        """
        method = self._config.pipeline.get("partition_method")
        cut: Cut | None = getattr(self.module, "madpipe_cut", None)
        if isinstance(method, list | tuple):
            self.recut(method)
            return
        check_method_name(method)
        tell_of_another_method(self.module, method, self.options.algorithm)
        if asks_for_plan(method) and (cut is None or cut.origin == "boundaries"):
            if planning_is_off():
                announce(f"MADPIPE=0: no planning, the layers stay cut at {self.module.parts}")
                return
            self._own_cut()
            cut = self.module.madpipe_cut = Cut("trial")
        if cut is None or cut.origin == "default" or (cut.origin == "boundaries" and not cut.is_where_runs_plan):
            return
        if cut.is_of_a_run and cut.planned_by is None and self.basic_optimizer is not None:
            cut = self.module.madpipe_cut = replace(cut, planned_by=planned_by(self))
        cut = given_up_if_planned_otherwise(self, cut)
        asked = None if self.options.plan is None else load_plan(self.options.plan)
        # A plan that an earlier run has made is no user's, who asks for another one now.
        if asked is not None and (cut.plan is None or (cut.is_of_a_run and cut.plan != asked)):
            self._check(asked)
            check_given_plan(self.options, asked, self.stage_id)
            check_same_model(asked, trainable_parameters(self.module))
            self.recut_to(Cut("plan", asked, planned_by=planned_by(self)), allocation_of(asked))
        elif cut.plan is not None:
            self._check(cut.plan)
            if not cut.is_of_a_run:
                check_given_plan(self.options, cut.plan, self.stage_id)
            if self.basic_optimizer is not None:  # frozen weights are evaluated on any cut
                check_same_model(cut.plan, trainable_parameters(self.module))
            self.plan = cut.plan
        elif cut.origin == "trial":
            save_plan = self.options.save_plan
            if save_plan is not None:
                from_rank_0(lambda: check_writable(save_plan))
            self._pending.wait()
            if num_steps := self.options.warmup_steps:
                self.warm_up_until(lambda: self.global_steps >= num_steps, counted(num_steps, "step"))

    def take_micro_batch_size(self, size: int) -> None:
        """Know the size of the run's micro-batches, and plan anew where an earlier run's plan is for another one.

        Collective, before the first step.
        """
        self.set_train_micro_batch_size(size)
        self.knows_micro_batch_size = True
        cut: Cut = self.module.madpipe_cut
        if cut.planned_by is None or self.plan is None or cut.planned_by[SIZE] in (None, size):
            return
        if given_up_if_planned_otherwise(self, cut) is not cut:
            self.adopt(Cut("trial"))
            self._pending.wait()

    def warm_up_until(self, is_over: Callable[[], bool], length: str) -> None:
        """Train on the trial cut first, and measure the layers in place, where a plan is to be made.

        Args:
            is_over: asked before each step, on every rank, with the same answer. Where it says so before the first
                one there is no warm-up.
            length: of the warm-up in words, such as ``20 steps``.
        """
        self._pending.warm_up_until(is_over, length)

    @property
    def is_warming_up(self) -> bool:
        """Whether steps have been made on a trial cut, and the plan is not made yet."""
        warm_up = self._pending.warm_up
        return warm_up is not None and warm_up.has_begun and not warm_up.goes_on

    @property
    def may_run_again(self) -> bool:  # type: ignore[override]
        """Whether a step runs that is given up, and run again, if a rank runs out of memory in it."""
        return self._pending.warm_up is not None and self._pending.warm_up.is_trying

    def reason_for_deepspeeds_schedule(self) -> str | None:
        """Why DeepSpeed's own schedule must run a cut of ours; None where lists of instructions can."""
        return why_deepspeeds_schedule(self.module) or self._why_not_lists

    def take_losses_of_batches(self, flushes: tuple[int, ...]) -> None:
        """Compute the loss of a batch once, on all of its outputs (``flushes``), from the next step on.

        Collective. A plan that this run has made is made anew, for all forwards of a batch before its first
        backward. One that it was given keeps its allocation.

        Args:
            flushes: Of the next step.

        Raises:
            InfeasibleError: no plan has room for all micro-batches of a batch in flight.
            ValueError: DeepSpeed's own schedule runs here, which begins backwards earlier; or the plan that was
                given has no room.
        """
        take_losses_of_batches(self, flushes)

    def _own_cut(self) -> None:
        """Let a module that DeepSpeed cut hold stages, where lists can run."""
        if not self.runs_lists and self.reason_for_deepspeeds_schedule() is None:
            hold_built_stages(self.module)
            self.module.madpipe_cut = Cut("boundaries")
            self._let_shapes_differ()

    def _let_shapes_differ(self) -> None:
        """Let micro-batches of a batch have different shapes, on a CPU: they are told where they change."""
        if self.owns_cut and self.device.type == "cpu":
            self.dynamic_shape = True

    def _announce_schedule(self) -> None:
        if not self.owns_cut or self.num_stages == 1:
            return
        if self.runs_lists:
            refuse_blocking_waits(self.device)
            announce(
                "MadPipe's own lists of instructions run here, with transfers beside computation", logging.DEBUG
            )
            for message in (accelerator.prepare_cuda(), accelerator.why_streams_may_wait()):
                if message is not None:
                    announce(message, logging.WARNING)
        else:
            reason = self.reason_for_deepspeeds_schedule() or "MADPIPE=0 asks for it"
            announce(f"DeepSpeed's own schedule runs here, one stage per rank, because {reason}")

    def _record_into(self, path: str) -> None:
        from_rank_0(lambda: check_writable(path, "save_timeline"))
        if self.runs_lists and (self.plan is not None or self._pending.is_pending):
            self._recorder = Recorder(path, self.device)
        else:
            announce(
                f"no timeline is saved in {path}: no plan runs here that it could be laid over", logging.WARNING
            )

    def _check(self, plan: Plan) -> None:
        reason = self.reason_for_deepspeeds_schedule()
        check_plan(plan, self.module._num_layers, self.num_stages, one_stage_each=reason)
        if self.basic_optimizer is not None and self._mode_for_benchmarks is None:
            check_versions(plan, self.options.weight_versions, self.micro_batches)
        if reason is None:
            program_of(plan, self.num_stages, self.micro_batches, trains=True)

    def recut(self, plan: Plan | str | os.PathLike[str] | Sequence[int]) -> None:
        """Move the layers to the stages of ``plan``, between two steps; training goes on as without. Collective.

        Layers whose rank changes move with their weights, buffers and optimizer states, values unchanged. The
        module, this engine, its optimizer and its scheduler stay the same objects, with their settings and counts.
        ``Parameter`` objects of layers that move are new; they have the attributes of the old ones.

        Args:
            plan: a plan, the path of one, or boundaries such as ``[0, 3, 8]``.

        Raises:
            PlanMismatchError: a plan for another model or another number of ranks, or that this pipeline cannot
                run.
            LoweringError: a plan whose order cannot be run.
            ValueError: boundaries that do not fit the layers and the ranks, or leave a rank without trainable
                parameters.
            RuntimeError: within a step; or an optimizer whose state cannot be told apart by parameters; or a hook
                or an attribute on a layer that moves, which would stay behind.
        """
        wait_until_all_come("engine.recut()", MOVED_BY_ALL)
        if isinstance(plan, str | os.PathLike):
            plan = load_plan(plan)
        # A later run that is planned otherwise asks for another cut than the one that is left here.
        cut = getattr(self.module, "madpipe_cut", None)
        by = planned_by(self) if cut is not None and cut.is_where_runs_plan else None
        if isinstance(plan, Plan):
            self._check(plan)
            self.recut_to(Cut("plan", plan, planned_by=by), allocation_of(plan))
        else:
            boundaries = check_boundaries(plan, self.module._num_layers, self.num_stages)
            self.recut_to(Cut("boundaries", planned_by=by), Allocation.contiguous(boundaries))

    def recut_to_plan_of_run(self, plan: Plan) -> None:
        """Do as :meth:`recut` with a plan that no user gave: a run has made it. Collective."""
        self._check(plan)
        self.recut_to(Cut("plan", plan, is_of_a_run=True), allocation_of(plan))

    def recut_to(self, cut: Cut, allocation: Allocation) -> None:
        """Move the layers to where ``cut`` has them, which was checked."""
        self.come_to_rest()
        self._endless = None
        if self._in_step:
            raise RuntimeError("the layers cannot move within a step: call recut between two calls of train_batch")
        if self.sharded is not None:
            raise RuntimeError(
                "recut is not possible while weights are shared out (shard_weights): save a checkpoint, and load "
                "it in a run without the option, or with another plan"
            )
        self._own_cut()
        if allocation != allocation_of(self.module):
            self._forget_layers()  # nothing may hold what leaves
            self.move_to(allocation)
        self.adopt(cut)

    def adopt(self, cut: Cut) -> None:
        """Run ``cut``, whose layers are in their places."""
        if cut.is_of_a_run:
            cut = replace(cut, planned_by=planned_by(self))
        before = self.weight_versions
        self.module.madpipe_cut, self.plan = cut, cut.plan
        if self.weight_versions != before:
            announce(f"weight_versions is {self.weight_versions!r} now, as the plan says, and was {before!r}")
        self._pending.settle()
        self.most_in_flight = None
        self._endless = None
        self.lower_anew()
        self._forget_layers()

    def _forget_layers(self) -> None:
        self._layer_buffers = self._weights_of_forward = self._attributes_of_forward = None
        self._cut_off = None

    def _why_not_begin(self) -> Exception | None:
        return self._why_not_noted() or super()._why_not_begin() or self._without_gradient()

    def _why_not_noted(self) -> Exception | None:
        """Note what this rank is before a training step that drains; return what has kept it from that."""
        if self._in_step and not self._goes_on:
            try:
                self._before_step = BeforeStep(self)
            except Exception as error:  # of a buffer, say, that cannot be copied; every rank must hear of it
                return error
        return None

    def _without_gradient(self) -> Exception | None:
        """What keeps this rank from training weights that were frozen when layers were found in a model."""
        if self._cut_off is None:
            self._cut_off = cut_off_weights(held_modules(self.module))
        name = next((name for name, weight in self._cut_off.items() if weight.requires_grad), None)
        if name is not None:
            return RuntimeError(
                f"{name} has a gradient now, and had none when layers_of() captured the model, whose layers send "
                "none to it: call layers_of() when all weights that are to be trained have requires_grad, or once "
                "more, for a new engine"
            )
        return None

    @property
    def attributes_of_forward(self) -> AttributesOfForward:
        """What the layers that this rank has now, and the loss, set on themselves as they run."""
        if self._attributes_of_forward is None:
            self._attributes_of_forward = AttributesOfForward(held_modules(self.module).values(), is_small)
        return self._attributes_of_forward

    @property
    def layer_buffers(self) -> Buffers:
        """The buffers of the layers that this rank has now."""
        if self._layer_buffers is None:
            self._layer_buffers = Buffers(self.module)
        return self._layer_buffers

    @property
    def weights_of_forward(self) -> WeightsOfForward:
        """The weights of the layers that this rank has now, as far as a ``forward`` writes them."""
        if self._weights_of_forward is None:
            self._weights_of_forward = WeightsOfForward(self.module, self.written_by_forwards)
        return self._weights_of_forward

    # Training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """DeepSpeed's ``train_batch``. The first one measures and plans before it trains, or begins a warm-up.

        Raises:
            InfeasibleError: no plan fits in memory; on every rank. After a warm-up that had enough, training goes
                on instead at the trial cut.
            RuntimeError: before the first step, a layer or a schedule that could not move; see :meth:`recut`.
        """
        if self.step_watch is not None and self.step_watch.some_rank_is_slow and torch.is_grad_enabled():
            self._plan_again()
        self.data_draws.begin_step()
        loss = self._pending.train(self._train_batch, data_iter)
        self.data_draws.end_step(self.is_first_stage() or self.is_last_stage())
        if self._writes_figures and self.step_watch is not None:
            self._write_figures()
        return loss

    @property
    def may_move(self) -> bool:
        """Whether layers may move in the next training step; alike on all ranks."""
        is_slow = self.step_watch is not None and self.step_watch.some_rank_is_slow
        return self._pending.is_pending or is_slow

    # What somebody asks to know of steps

    def watch_steps(self) -> None:
        """Time the steps from now on, for :meth:`figures_of_steps`, and look for ranks that become slow.

        To be called on every rank. Where DeepSpeed's own schedule runs it does nothing, which rank 0 says. In a
        pipeline that never drains, batches are timed from one loss to the next, and no slow rank is looked for.
        """
        if self.step_watch is not None:
            return
        if not self.runs_lists:
            announce("DeepSpeed's own schedule runs here: its steps are not timed, for loggers or for replan")
            return
        if self.weight_versions != FLUSH and self.options.replan == WHEN_SLOW:
            announce("a pipeline that never drains runs here: no slow rank is looked for, and replan does nothing")
        self._planned_peak.is_wanted = True
        self.step_watch = StepWatch(self, lambda: self._planned_peak.peak_bytes)

    def figures_of_steps(self) -> StepFigures | None:
        """What the steps since the last call took: per stage, link and rank, beside the plan. Collective.

        Returns:
            None before :meth:`watch_steps`, and where no step has ended.
        """
        return None if self.step_watch is None else self.step_watch.figures()

    def _write_figures(self) -> None:
        """Let DeepSpeed's monitor have the figures, as often as DeepSpeed prints."""
        every = self.steps_per_print() or MONITORED_STEPS
        if self.global_steps % (every if every < sys.maxsize else MONITORED_STEPS):
            return
        figures = self.figures_of_steps()
        if figures is not None and self.global_rank == 0:
            self.monitor.write_events(
                [(name, value, self.global_samples) for name, value in figures.named().items()]
            )

    def _plan_again(self) -> None:
        """Make the plan for the speeds that the ranks have now, where the user asks for it. Collective."""
        steps = self.step_watch
        assert steps is not None
        if self.options.replan != WHEN_SLOW:
            return
        from deepspeed_partition.engine.warmup.replanning import plan_for_speeds

        factors = steps.planned_and_measured()
        if factors is not None:  # else one of the next steps knows more
            steps.some_rank_is_slow = False
            self.tell_phase("planning")
            try:
                plan_for_speeds(self, factors)
            finally:
                self.tell_phase("")

    # Training without a drain between batches

    @property
    def weight_versions(self) -> str:
        """What becomes of the weights: ``"flush"``, or a mode in which the pipeline never drains."""
        if self._mode_for_benchmarks is not None:
            return self._mode_for_benchmarks
        return self.plan.weight_versions if self.plan is not None else self.options.weight_versions or FLUSH

    @property
    def is_at_rest(self) -> bool:
        """Whether no batch is in flight between two calls: all updates are done."""
        return self._endless is None or not self._endless.is_under_way

    @property
    def endless_program(self) -> EndlessProgram | None:
        """The lists of a pipeline that never drains, once it trains on them; None where it drains."""
        return None if self._endless is None else self._endless.program

    @property
    def updates_wait(self) -> bool:
        """Whether updates wait for the norm of all ranks' gradients, with batches before not updated with yet."""
        return self._endless is not None and self._endless.clips_by_all

    def come_to_rest(self) -> None:
        """Bring the pipeline to rest, where it never drains by itself (``weight_versions``). Collective.

        All updates of the batches that were trained on are done then, and all stages have one version of the
        weights. ``eval_batch``, ``save_checkpoint``, ``load_checkpoint`` and ``recut`` do it by themselves; who
        reads weights otherwise calls it first. Training goes on by the next ``train_batch``.

        Raises:
            Exception: what a rank has met in the last batches, on every rank.
        """
        if self._endless is not None:
            self._lockstep.check_that_it_goes_on()
            self._weights_are_read_no_more()
            self._endless.come_to_rest()

    def _begins_endless(self) -> bool:
        """Whether the next step is one of a pipeline that never drains.

        A batch of another number of micro-batches than planned is trained on at rest, and drains.

        Raises:
            ValueError: it is asked for, and cannot be had here.
        """
        if self.weight_versions == FLUSH or self._pending.is_pending or not torch.is_grad_enabled():
            return False
        if self._endless is not None and self.micro_batches != self._endless.program.num_micro_batches:
            self.come_to_rest()
            return False
        if self.plan is not None and self.micro_batches != self.plan.micro_batches_per_update:
            return False
        if self._endless is None:
            reason = why_not_endless(self)
            if reason is not None:
                raise ValueError(
                    f"weight_versions={self.weight_versions!r} cannot be had here: {reason}; or leave "
                    "weight_versions out"
                )
            assert self.plan is not None
            mode, clips = self.weight_versions, bool(self.gradient_clipping()) and self.num_stages > 1
            two_versions = mode == TWO_VERSIONS
            plan, number = self.plan, self.micro_batches
            program = from_rank_0(  # which takes seconds for long pipelines
                lambda: lower_endless(
                    plan, number, two_versions=two_versions, puts_off=two_versions and clips,
                    runs_ahead=self.runs_ahead,
                )
            )  # fmt: skip
            if self._recorder is not None:
                announce("no timeline is saved: it is one of steps that drain, and this pipeline never does")
            if self._planned_peak.is_possible:
                announce(UNCOMPARED)
            announce_endless(self, mode, program)
            if not self._tells_reads:
                self._tells_reads = True
                tell_reads_of_optimizer(self)
            self._endless = EndlessTraining(self, mode, program, puts_off=two_versions and clips)
        return True

    def _train_schedule(self) -> Any:
        return self._endless.program if self._endless is not None and self._goes_on else super()._train_schedule()

    def _train_endless(self) -> None:
        assert self._endless is not None
        self._endless.train()
        if self.lr_scheduler is not None:
            try:
                self.lr_scheduler.step()
            except TypeError:  # as DeepSpeed does for Megatron's
                self.lr_scheduler.step(self.train_batch_size())
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.when_losses_are_known is not None:
            with self._lockstep.ended_by_errors():
                self.when_losses_are_known()

    def _aggregate_total_loss(self) -> Any:
        if self._endless is None or not self._goes_on:
            return super()._aggregate_total_loss()
        self.agg_additional_losses = None
        self.dp_group_loss = torch.tensor(self._endless.loss, device=self.device)
        self.loss = self.dp_group_loss.clone()  # of the last micro-batch nothing may be known yet
        return self.dp_group_loss.clone()

    def _train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        self._lockstep.check_that_it_goes_on()
        self.reset_activation_shape()
        is_endless = self._begins_endless()
        self._in_step, self._goes_on = True, is_endless
        if is_endless:
            self._weights_are_read_no_more()
        try:
            with self._planned_peak.step(self.plan if self.runs_lists and not is_endless else None, self.stage_id):
                return super().train_batch(data_iter)
        except Exception as error:  # such as the end of the data, after which another batch can be trained on
            self.timers(TRAIN_BATCH_TIMER).reset()  # DeepSpeed would not start it again
            if self._before_step is not None and is_raised_by_all(error):
                self._before_step.restore()
            raise
        finally:
            self._before_step, self._in_step, self._goes_on = None, False, False
            if self._endless is not None and self._endless.is_under_way and not self.module.has_told_old_weights:
                self.module.has_old_weights = self.weight_versions
                if self.watches_reads:
                    watch_state(self)
                    self._watched_layers = self._watched_layers or WatchedLayers(self.module)
                    self._watched_layers.begin()

    def _weights_are_read_no_more(self) -> None:
        """Let what the engine itself does with weights, until the next call ends, be told to nobody."""
        self.module.has_old_weights = None
        if self._watched_layers is not None:
            self._watched_layers.end()

    @property
    def _planned_peak(self) -> PlannedPeak:
        if self._peak is None:  # which outlives a move of the layers
            self._peak = PlannedPeak(self.device, self.global_rank)
        return self._peak

    def eval_batch(self, data_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        self._lockstep.check_that_it_goes_on()
        self.come_to_rest()
        self.reset_activation_shape()
        of_training = getattr(self, "training_dataloader", None), self.data_iterator
        call = inspect.signature(PipelineEngine.eval_batch).bind(self, data_iter, *args, **kwargs)
        restore = random_state(), self.module.counts_of_forwards() if self.runs_lists else lambda: None
        try:
            if self.runs_lists:
                assert self._transfers, "made by all ranks, before they meet"
                with torch.no_grad():  # before DeepSpeed's barrier, at which nobody could tell
                    self._lockstep.begin_together(call.arguments.get("num_micro_batches") or self.micro_batches)
            return super().eval_batch(data_iter, *args, **kwargs)
        except Exception:
            self.let_batch_go()
            for put_back in restore:
                put_back()
            self.training_dataloader, self.data_iterator = of_training
            self.eval_return_logits = False
            raise

    def _runner(self) -> Callable[[Instruction], None]:
        warm_up = self._pending.warm_up if torch.is_grad_enabled() else None
        if warm_up is None and not self._planned_peak.is_read:
            return super()._runner()
        plain = super()._runner()

        def run(instruction: Instruction) -> None:
            if warm_up is None:
                plain(instruction)
            else:
                warm_up.execute(instruction, plain)
            if isinstance(instruction, Compute):
                self._planned_peak.computed(
                    len(self.batch_data.kept) / self.micro_batches,
                    forward=instruction.kind == "F",
                    loads_inputs=self.is_first_stage(),
                )

        return run

    def _begin_batch(self, num_micro_batches: int) -> None:
        super()._begin_batch(num_micro_batches)
        self._planned_peak.data_was_read()
        if self.when_zeros_stand_for_none is not None and self.using_bf16_optimizer:
            for (
                weight
            ) in self.module.parameters():  # which has zeros of the step before, that look like a gradient
                weight.grad = None

    def _exec_reduce_tied_grads(self) -> None:
        self._planned_peak.ended(MICRO_BATCHES)
        if self.when_zeros_stand_for_none is not None:
            tied = {id(weight) for weight, _ in self.module.get_tied_weights_and_groups()}
            own = [
                weight for weight in self.module.parameters() if weight.requires_grad and id(weight) not in tied
            ]
            without = [*without_gradient(own, self.optimizer), *self._tied_without_gradient]
            if without:
                self.when_zeros_stand_for_none(without)
                self.when_zeros_stand_for_none = None
        super()._exec_reduce_tied_grads()

    def _recorded(self) -> AbstractContextManager[Callable[[Instruction], None]]:
        if self._pending.warm_up is None or not torch.is_grad_enabled():
            return super()._recorded()
        return self._pending.warm_up.recorded(self._transfers, self._execute)

    def peek_data(self) -> None:
        """Take the next micro-batch out of the data iterator, which will give it again."""
        if (self.is_first_stage() or self.is_last_stage()) and self.data_iterator is not None:
            self.batch_data.catch_up()
            micro_batch = next(self.data_iterator)
            self.data_iterator = self.batch_data.give_again([micro_batch], self.data_iterator)

    def data_ended(self) -> StopIteration:
        """What is raised where there are no data for a batch."""
        self._num_loaded = 0
        return self._data_ended()

    def peek_micro_batch(self) -> tuple[Any, Any]:
        """Inputs and labels of the next micro-batch, on the device; the data iterator will give it again.

        The first stage has the inputs, the last one the labels; the rest is None.
        """
        if not (self.is_first_stage() or self.is_last_stage()):
            return None, None
        if self.data_iterator is not None:
            self.batch_data.catch_up()
            micro_batch = next(self.data_iterator)
            measured = copy_of_micro_batch(micro_batch)  # a loss function may write into its labels
            self.data_iterator = self.batch_data.give_again([measured, micro_batch], self.data_iterator)
        self._reserve_pipe_buffers(1)
        self.reset_activation_shape()  # it belongs to no batch before it
        # What the program does with each micro-batch is done again where this one is trained on.
        restore = None if self.batch_fn is None else _state_of(self.batch_fn)
        try:
            type(self)._exec_load_micro_batch(self, 0)
        finally:
            if restore is not None:
                restore(frozenset())
        inputs, labels = self.pipe_buffers["inputs"][0], self.pipe_buffers["labels"][0]
        self.pipe_buffers["inputs"][0] = self.pipe_buffers["labels"][0] = None
        return inputs, labels

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages.

        DeepSpeed counts only the first stage's parameters here (as of 0.19.8: ``clip_grad_norm_`` asks for the
        model-parallel rank 0, and pipeline stages count as model-parallel), so that its norm depends on the cut.
        """
        if not self.owns_cut:
            super().clip_fp32_gradients()
            return
        never_drains = not self.is_at_rest
        if never_drains and self.updates_wait:
            return  # it has been done
        self._global_grad_norm = clip_by_global_norm(
            self._clipped_parameters(),
            self.gradient_clipping(),
            group=self.mpu.get_model_parallel_group() if self.sharded is None else None,
            pipelines=self.mpu.get_data_parallel_group() if self.has_experts else None,
            holds_slice=self.grid.get_slice_parallel_rank() == 0,
            alone=never_drains,
            device=self.device,
        )

    def _clipped_parameters(self) -> list[torch.nn.Parameter]:
        if not self.clips_optimizer_alone:
            return list(self.module.parameters())
        return [parameter for group in self.basic_optimizer.param_groups for parameter in group["params"]]

    def _exec_optimizer_step(self, lr_kwargs=None):
        never_drains = not self.is_at_rest
        if self.when_losses_are_known is not None and not never_drains:
            self.when_losses_are_known()
        # Where all ranks' norm is taken before, so is this.
        if self.before_optimizer_step is not None and not (never_drains and self.updates_wait):
            self.before_optimizer_step()
        self._planned_peak.ended(REDUCTION)
        with self._step_of_user.over_all_ranks() if self.watches_optimizer else nullcontext():
            super()._exec_optimizer_step(lr_kwargs)
        self._planned_peak.ended(OPTIMIZER)
        # After a step that is skipped, as fp16's first ones often are, there are no states to link.
        if self.owns_cut and not self._has_linked_states and not getattr(self.optimizer, "overflow", False):
            self._has_linked_states = True
            link_states_of_all_groups(self.optimizer)

    # DeepSpeed calls instructions through this map, which does not see overriding methods.
    _INSTRUCTION_MAP: ClassVar = {
        **ResumingEngine._INSTRUCTION_MAP,
        schedule.OptimizerStep: _exec_optimizer_step,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
    }

    # Checkpoints

    def save_checkpoint(self, save_dir, tag=None, *args: Any, **kwargs: Any):
        wait_until_all_come("engine.save_checkpoint()", SAVED_BY_ALL)
        self.come_to_rest()
        originals = nullcontext() if self._pending.warm_up is None else self._pending.warm_up.originals()
        with originals, self._whole_states():
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def _load_found(self, found: Found | None, bound: inspect.BoundArguments) -> tuple[Any, Any]:
        """Load a checkpoint under its cut, if this run waits for a plan, else under that of this run."""
        self.come_to_rest()
        if found is not None and self.has_experts:
            self.refuse_experts_of_other_ranks(found, whole=is_whole(bound.arguments))
        load = super()._load_found
        with self._whole_states():
            return self._pending.resume(found, bound.arguments, lambda: load(found, bound))


def initialize_with(make_engine: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with another class, or function, that makes the engine of pipeline modules."""
    stock = deepspeed.PipelineEngine
    # deepspeed.initialize looks the class up when it is called, and has no argument for it.
    deepspeed.PipelineEngine = make_engine
    try:
        return deepspeed.initialize(*args, **kwargs)
    finally:
        deepspeed.PipelineEngine = stock


@functools.wraps(deepspeed.initialize, assigned=())
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with a :class:`MadPipeEngine` for pipeline modules; the same arguments.

    Returns:
        The engine, its optimizer, data loader and learning-rate scheduler.
    """
    return initialize_with(MadPipeEngine, *args, **kwargs)


def _state_of(batch_fn: Any) -> Callable[[Any], None]:
    """Note what a function of data holds, but for large tensors of its data set; return what puts it back."""
    left = _MOST_BYTES_OF_DATA

    def copies(value: Any) -> bool:
        nonlocal left
        num_bytes = num_bytes_of(value)
        if num_bytes > left:
            return False
        left -= num_bytes
        return True

    return HeldState([batch_fn]).remembered(buffers=True, by_others=True, copies=copies)


_MOST_BYTES_OF_DATA = 64 * 2**20
"""Bytes of tensors and arrays that are copied of what a function of data holds."""
