"""DeepSpeed's pipeline engine, which plans before its first step and can change its cut."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from deepspeed_partition.engine.checkpoint.checkpoint_engine import Found, ResumingEngine
from deepspeed_partition.engine.checkpoint.saved_cut import SavedCut
from deepspeed_partition.engine.pipeline.batch_programs import program_of
from deepspeed_partition.engine.pipeline.before_step import BeforeStep, Buffers
from deepspeed_partition.engine.pipeline.module import (
    Cut,
    asks_for_plan,
    check_boundaries,
    check_method_name,
    check_plan,
    check_same_model,
    load_plan,
    why_deepspeeds_schedule,
)
from deepspeed_partition.engine.pipeline.stages import allocation_of, hold_built_stages, owner
from deepspeed_partition.engine.repairs import (
    clip_by_global_norm,
    fp16_without_zero,
    link_states_of_all_groups,
    warn_of_clipping,
)
from deepspeed_partition.engine.repartition.layer_moves import check_that_layers_can_move, trainable_parameters
from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.engine.runtime.environment import announce, check_writable, planning_is_off
from deepspeed_partition.engine.runtime.first_failure import is_raised_by_all
from deepspeed_partition.engine.runtime.recorded_timeline import Recorder
from deepspeed_partition.engine.runtime.transfers import refuse_blocking_waits
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.options import Options
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.errors import InfeasibleError, PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.units import counted, format_bytes, format_seconds
from deepspeed_partition.schedule.instructions import Instruction, Program
from deepspeed_partition.schedule.lowering import is_flushed

if TYPE_CHECKING:
    from deepspeed_partition.engine.warmup.warm_up import WarmUp


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
    before_optimizer_step: Callable[[], object] | None = None
    """Function called on every rank once per step, with the gradients, before they are clipped and applied."""
    when_given_up: Callable[[], object] | None = None
    """Function called where a rank ran out of memory in a step of the warm-up: the step runs again, as if it had
    not begun."""
    around_measurements: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context that every rank enters while the layers and the loss function run to be measured."""
    folder_of_logs: str | None = None
    """The folder where the plan is saved if ``save_plan`` names no place. None: the folder of DeepSpeed's
    monitors, if one writes files."""
    options: Options
    """The options that a host has given; else those of ``pipeline.madpipe`` in the configuration."""

    def __init__(self, *, options: Options | None = None, **kwargs: Any) -> None:
        self._peeked: Iterator[Any] | None = None
        self._waits_for_plan = False
        self._knows_what_moves = False
        self._layer_buffers: Buffers | None = None
        self._warm_up: WarmUp | None = None
        of_fp16 = fp16_without_zero(kwargs["config_class"])
        if of_fp16 and getattr(kwargs["model"], "madpipe_cut", None) is not None:
            raise ValueError(of_fp16)  # before DeepSpeed speaks of the type, on devices that have none of it
        super().__init__(**kwargs)
        self.options = options or Options.from_mapping(self._config.pipeline.get("madpipe", {}))
        watch.start(self.options.patience_seconds)
        self._cut_as_configured()
        if of_fp16 and self.owns_cut:
            raise ValueError(of_fp16)
        if of_fp16:
            announce(of_fp16, logging.WARNING)
        self._announce_schedule()
        if self.options.save_timeline is not None:
            self._record_into(self.options.save_timeline)
        self._tell_shapes_each_time()
        self._tell_how_gradients_are_clipped()

    def _tell_how_gradients_are_clipped(self) -> None:
        """Say how gradients are clipped where plain DeepSpeed, or the program, does otherwise: fp32, no ZeRO."""
        in_fp32_without_zero = self.optimizer is not None and self.optimizer is self.basic_optimizer
        if not in_fp32_without_zero or self.num_stages == 1 or not self.gradient_clipping():
            return
        if not self.owns_cut:
            warn_of_clipping(deepspeed.__version__, self.module.parts)
        elif "gradient_clipping" not in self._config._param_dict:
            announce(
                "gradient_clipping is not set, so gradients are clipped to DeepSpeed's default, a norm of "
                f"{self.gradient_clipping():g}, over all stages; plain DeepSpeed would take the norm of the first "
                "stage alone and train otherwise: set it to 0 to clip nothing, or to a number"
            )

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
        if asks_for_plan(method) and (cut is None or cut.origin == "boundaries"):
            if planning_is_off():
                announce(f"MADPIPE=0: no planning, the layers stay cut at {self.module.parts}")
                return
            self._own_cut()
            cut = self.module.madpipe_cut = Cut("trial")
        if cut is None or cut.origin in ("boundaries", "default"):
            return
        if cut.plan is not None:
            self._check(cut.plan)
            check_same_model(cut.plan, trainable_parameters(self.module))
            self.plan = cut.plan
        elif self.options.plan is not None:
            plan = load_plan(self.options.plan)
            self._check(plan)
            check_same_model(plan, trainable_parameters(self.module))
            self.recut(plan)
        else:
            save_plan = self.options.save_plan
            if save_plan is not None:
                from_rank_0(lambda: check_writable(save_plan))
            self._waits_for_plan = True
            if num_steps := self.options.warmup_steps:
                self.warm_up_until(lambda: self.global_steps >= num_steps, counted(num_steps, "step"))

    def warm_up_until(self, is_over: Callable[[], bool], length: str) -> None:
        """Train on the trial cut first, and measure the layers in place, where a plan is to be made.

        Args:
            is_over: asked before each step, on every rank, with the same answer. Where it says so before the first
                one there is no warm-up.
            length: of the warm-up in words, such as ``20 steps``.
        """
        if not self._waits_for_plan:
            return
        if not self.runs_lists:
            announce(
                "DeepSpeed's own schedule runs here, under which layers are not measured while they train: there "
                "is no warm-up, and the plan is made before the first optimizer step",
                logging.WARNING,
            )
            return
        from deepspeed_partition.engine.warmup.warm_up import WarmUp  # with the profiler, like planning

        self._warm_up = WarmUp(self, is_over, length)

    @property
    def is_warming_up(self) -> bool:
        """Whether steps have been made on a trial cut, and the plan is not made yet."""
        return self._warm_up is not None and self._warm_up.has_begun and not self._warm_up.goes_on

    @property
    def may_run_again(self) -> bool:  # type: ignore[override]
        """Whether a step runs that is given up, and run again, if a rank runs out of memory in it."""
        return self._warm_up is not None and self._warm_up.is_trying

    def _why_deepspeeds_schedule(self) -> str | None:
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
        if not self.runs_lists and self.num_stages > 1:
            reason = self._why_deepspeeds_schedule() or "MADPIPE=0 asks for it"
            raise ValueError(
                f"DeepSpeed's own schedule runs here, because {reason}, and it begins backwards before all "
                "forwards are done; take the mean over micro-batches instead (loss='mean'), or one micro-batch"
            )
        self.flushes = flushes
        if self.plan is None or self.plan.step is None or self.num_stages == 1:
            return
        last = len(self.plan.stages) - 1
        if self.plan.step.num_micro_batches == sum(flushes) and is_flushed(
            self.plan.step.order, last + 1, flushes
        ):
            return
        if self.chain is not None:
            from deepspeed_partition.engine.warmup.run_plan import plan_for_flushes

            announce("the plan was made for other orders and is made anew")
            self.recut(plan_for_flushes(self))
            return
        flaw = why_no_room_for_flush(self.plan, max(flushes))
        if flaw is not None:
            raise ValueError(flaw)
        announce(
            f"the plan's stages stay where they are and run the {counted(max(flushes), 'forward')} of a batch "
            "before its first backward: the times and the memory that the plan promises are not those of this "
            "order"
        )

    def _own_cut(self) -> None:
        """Let a module that DeepSpeed cut hold stages, where lists can run."""
        if not self.runs_lists and self._why_deepspeeds_schedule() is None:
            hold_built_stages(self.module)
            self.module.madpipe_cut = Cut("boundaries")
            self._tell_shapes_each_time()

    def _tell_shapes_each_time(self) -> None:
        """Tell the shape of each micro-batch with it, on a CPU: that takes a tenth of a millisecond."""
        if self.owns_cut and self.device.type == "cpu":
            self.dynamic_shape = True

    def _announce_schedule(self) -> None:
        if not self.owns_cut or self.num_stages == 1:
            return
        if self.runs_lists:
            refuse_blocking_waits(self.device)
            announce("MadPipe's own lists of instructions run here, with transfers beside computation")
            for flaw in (accelerator.prepare_cuda(), accelerator.why_streams_may_wait()):
                if flaw is not None:
                    announce(flaw, logging.WARNING)
        else:
            reason = self._why_deepspeeds_schedule() or "MADPIPE=0 asks for it"
            announce(f"DeepSpeed's own schedule runs here, one stage per rank, because {reason}")

    def _record_into(self, path: str) -> None:
        from_rank_0(lambda: check_writable(path, "save_timeline"))
        if self.runs_lists and (self.plan is not None or self._waits_for_plan):
            self._recorder = Recorder(path, self.device)
        else:
            announce(
                f"no timeline is saved in {path}: no plan runs here that it could be laid over", logging.WARNING
            )

    def _check(self, plan: Plan) -> None:
        reason = self._why_deepspeeds_schedule()
        check_plan(plan, self.module._num_layers, self.num_stages, one_stage_each=reason)
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
        if isinstance(plan, Plan | str | os.PathLike):
            plan = load_plan(plan)
            self._check(plan)
            cut, allocation = Cut("plan", plan), allocation_of(plan)
        else:
            boundaries = check_boundaries(plan, self.module._num_layers, self.num_stages)
            cut, allocation = Cut("boundaries"), Allocation.contiguous(boundaries)
        if self._in_step:
            raise RuntimeError("the layers cannot move within a step: call recut between two calls of train_batch")
        self._own_cut()
        if allocation != allocation_of(self.module):
            self.move_to(allocation)
        self._adopt(cut)

    def _adopt(self, cut: Cut) -> None:
        """Run ``cut``, whose layers are in their places."""
        self.module.madpipe_cut, self.plan = cut, cut.plan
        self._waits_for_plan, self._warm_up = False, None
        self.lower_anew()
        self._layer_buffers = None

    @property
    def layer_buffers(self) -> Buffers:
        """The buffers of the layers that this rank has now."""
        if self._layer_buffers is None:
            self._layer_buffers = Buffers(self.module)
        return self._layer_buffers

    def _cut_in_words(self) -> str:
        return _in_words(allocation_of(self.module))

    # Training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """DeepSpeed's ``train_batch``. The first one measures and plans before it trains, or begins a warm-up.

        Raises:
            InfeasibleError: no plan fits in memory; on every rank. After a warm-up that had enough, training goes
                on instead at the trial cut.
            RuntimeError: before the first step, a layer or a schedule that could not move; see :meth:`recut`.
        """
        while self._waits_for_plan and torch.is_grad_enabled():
            if not self._knows_what_moves:
                check_that_layers_can_move(self.module)  # not after minutes
                self.check_that_scheduler_can_go_on()
                self._knows_what_moves = True
            if data_iter is not None and data_iter is not self._peeked:
                self.set_dataiterator(data_iter)
                self._peeked = data_iter  # where planning fails and is tried again, nothing of it is lost
            data_iter = None  # the engine's own begins with the micro-batch that was measured
            trained = None if self._warm_up is None else self._warm_up.train(self._train_batch)
            if trained is not None:
                self._peeked = None
                return trained[0]
            self._measure_and_plan()
        self._peeked = None
        return self._train_batch(data_iter)

    def _train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        self._lockstep.check_that_it_goes_on()
        self.reset_activation_shape()
        before = BeforeStep(self) if self.runs_lists else None
        self._in_step = True
        try:
            return super().train_batch(data_iter)
        except Exception as flaw:  # such as the end of the data, after which another batch can be trained on
            self.timers(TRAIN_BATCH_TIMER).reset()  # DeepSpeed would not start it again
            if before is not None and is_raised_by_all(flaw):
                before.restore()
            raise
        finally:
            self._in_step = False

    def eval_batch(self, data_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        self._lockstep.check_that_it_goes_on()
        self.reset_activation_shape()
        of_training = getattr(self, "training_dataloader", None), self.data_iterator
        call = inspect.signature(PipelineEngine.eval_batch).bind(self, data_iter, *args, **kwargs)
        try:
            if self.runs_lists:
                assert self._transfers, "made by all ranks, before they meet"
                with torch.no_grad():  # before DeepSpeed's barrier, at which nobody could tell
                    self._lockstep.begin_together(call.arguments.get("num_micro_batches") or self.micro_batches)
            return super().eval_batch(data_iter, *args, **kwargs)
        except Exception:
            self.let_batch_go()
            self.training_dataloader, self.data_iterator = of_training
            self.eval_return_logits = False
            raise

    def _run(self, instruction: Instruction) -> None:
        if self._warm_up is None or not torch.is_grad_enabled():
            super()._run(instruction)
        else:
            self._warm_up.execute(instruction, super()._run)

    def _recorded(self) -> AbstractContextManager[Callable[[Instruction], None]]:
        if self._warm_up is None or not torch.is_grad_enabled():
            return super()._recorded()
        return self._warm_up.recorded(self._transfers, self._execute)

    def _lower(self, num_micro_batches: int, trains: bool, flushes: tuple[int, ...] | None) -> Program:
        other = None
        if trains and self._warm_up is not None and flushes is None:
            other = self._warm_up.program(num_micro_batches)
        return super()._lower(num_micro_batches, trains, flushes) if other is None else other

    def _measure_and_plan(self) -> None:
        if self.module.activation_checkpoint_interval:
            announce(
                "activation checkpointing is on: layers are measured without it, so the plan counts on more "
                "memory than they will keep, and on backwards without recomputation",
                logging.WARNING,
            )
        from deepspeed_partition.engine.warmup.run_plan import measure_and_plan  # the profiler, used only here

        before, started = self._cut_in_words(), time.perf_counter()
        if self._warm_up is None or not self._warm_up.has_begun:
            announce(
                f"the layers, cut at {before} until the plan is made, are measured one by one on the first "
                f"micro-batch, before training {'goes on' if self.global_steps else 'begins'}"
            )
        elif not self._warm_up.ran_out_of_memory:
            announce(f"the warm-up is over after step {self.global_steps}")
        try:
            with self.around_measurements():
                plan, self.chain = measure_and_plan(
                    self, None if self._warm_up is None else self._warm_up.measuring
                )
        except InfeasibleError as flaw:
            warm_up = self._warm_up
            if warm_up is None or warm_up.ran_out_of_memory or warm_up.ran_at != allocation_of(self.module):
                raise
            # It has run so far, at this cut: no reason to end it.
            announce(f"no plan fits, and training goes on at {self._cut_in_words()}: {flaw}", logging.WARNING)
            if warm_up.has_fallen_back:
                warm_up.goes_on = True
            else:
                self._adopt(Cut("boundaries"))
            return
        planned = time.perf_counter()
        old, new = allocation_of(self.module), allocation_of(plan)
        num_moved = sum(owner(old, layer) != owner(new, layer) for layer in range(self.module._num_layers))
        self.recut(plan)
        moved = f"{counted(num_moved, 'layer')} moved in {format_seconds(time.perf_counter() - planned)}"
        took = f"measuring and planning took {format_seconds(planned - started)}"
        where = f"the layers are cut at {self._cut_in_words()} as planned"
        announce(f"{where} (until now: {before}): {took}, {moved}" if num_moved else f"{where}, as before: {took}")

    def peek_data(self) -> None:
        """Take the next micro-batch out of the data iterator, which will give it again."""
        if (self.is_first_stage() or self.is_last_stage()) and self.data_iterator is not None:
            micro_batch = next(self.data_iterator)
            self.data_iterator = itertools.chain((micro_batch,), self.data_iterator)

    def peek_micro_batch(self) -> tuple[Any, Any]:
        """Inputs and labels of the next micro-batch, on the device; the data iterator will give it again.

        The first stage has the inputs, the last one the labels; the rest is None.
        """
        if not (self.is_first_stage() or self.is_last_stage()):
            return None, None
        if self.data_iterator is not None:
            micro_batch = next(self.data_iterator)
            self.data_iterator = itertools.chain((micro_batch, micro_batch), self.data_iterator)
        self._reserve_pipe_buffers(1)
        self._exec_load_micro_batch(0)
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
        self._global_grad_norm = clip_by_global_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            group=self.mpu.get_model_parallel_group(),
            holds_slice=self.grid.get_slice_parallel_rank() == 0,
            device=self.device,
        )

    def _exec_optimizer_step(self, lr_kwargs=None):
        if self.before_optimizer_step is not None:
            self.before_optimizer_step()
        super()._exec_optimizer_step(lr_kwargs)
        if self.owns_cut and self.global_steps == 1:
            link_states_of_all_groups(self.optimizer)

    # DeepSpeed calls instructions through this map, which does not see overriding methods.
    _INSTRUCTION_MAP: ClassVar = {
        **ResumingEngine._INSTRUCTION_MAP,
        schedule.OptimizerStep: _exec_optimizer_step,
    }

    # Checkpoints

    def save_checkpoint(self, save_dir, tag=None, *args: Any, **kwargs: Any):
        with nullcontext() if self._warm_up is None else self._warm_up.originals():
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def _load_found(self, found: Found | None, bound: inspect.BoundArguments) -> tuple[Any, Any]:
        """Load a checkpoint under its cut, if this run waits for a plan, else under that of this run."""
        asked_for_plan, warm_up = self._waits_for_plan, self._warm_up
        options = bound.arguments
        # Weights alone load on any cut.
        saved = None if found is None or options["load_module_only"] else found.cut
        try:
            if found is not None and saved is not None:
                self._adopt_cut_of(found, saved, whole=options["load_optimizer_states"])
            loaded = super()._load_found(found, bound)
        except Exception:
            # A script may go on without, or with another one. A warm-up needs one stage per rank: where the layers
            # have moved to a plan with several, that plan stays.
            if asked_for_plan and allocation_of(self.module).is_contiguous:
                self._wait_for_plan(warm_up)
            raise
        if warm_up is not None and saved is not None and self.global_steps:
            warm_up.ran_at = saved.allocation
        plans_anew = saved is not None and saved.num_ranks != self.num_stages
        if asked_for_plan and self.plan is None and (warm_up is not None or not self.global_steps):
            # Written before a plan was made: the warm-up goes on, where there is one.
            self._wait_for_plan(warm_up)
        elif self._waits_for_plan and self.global_steps and not plans_anew:
            self._waits_for_plan = False
            announce(
                f"the checkpoint was written without a plan: training goes on at the cut {self.module.parts}",
                logging.WARNING,
            )
        return loaded

    def _wait_for_plan(self, warm_up: WarmUp | None) -> None:
        """Let the present cut be a trial, as it was before a checkpoint's was adopted."""
        self._adopt(Cut("trial"))
        self._waits_for_plan, self._warm_up = True, warm_up

    def _adopt_cut_of(self, found: Found, saved: SavedCut, *, whole: bool) -> None:
        """Take over the cut of a checkpoint where this run waits for a plan.

        Args:
            whole: Whether the optimizer's states are to be loaded.
        """
        num_layers, as_many = saved.boundaries[-1], saved.num_ranks == self.num_stages
        if num_layers != self.module._num_layers:
            raise PlanMismatchError(
                f"the checkpoint in {found.folder} has {num_layers} layers and this run "
                f"{self.module._num_layers}: it is of another model"
            )
        same_cut, cut_here = found.is_at_cut_of(self.module), self._cut_in_words()
        if as_many and same_cut and self._waits_for_plan:
            self._adopt(Cut("boundaries") if saved.plan is None else Cut("plan", saved.plan))
        elif as_many and self._waits_for_plan:
            announce(f"the checkpoint was written at the cut {_in_words(saved.allocation)}: the layers move to it")
            self.recut(saved.boundaries if saved.plan is None else saved.plan)
        elif not same_cut:
            there, here = f"{saved.num_ranks} stages", str(self.num_stages)
            if as_many:
                there, here = f"the cut {_in_words(saved.allocation)}", cut_here
            if found.layout is None and (whole or not as_many):
                raise PlanMismatchError(
                    f"the checkpoint in {found.folder} has {there} and this run {here}, and it does not say where "
                    f"the optimizer's states lie: start it with {there}"
                )
            where = "are planned for these" if self._waits_for_plan else f"stay cut at {cut_here}"
            announce(f"the checkpoint has {there} and this run {here}: the layers {where}")


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


def _in_words(allocation: Allocation) -> str:
    if allocation.is_contiguous:
        return str(list(allocation.boundaries))
    return f"{list(allocation.boundaries)} on the ranks {[stage.device for stage in allocation.stages]}"


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
