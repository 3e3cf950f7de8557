"""DeepSpeed's pipeline engine, which plans before its first step and can change its cut."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch.optim.lr_scheduler import LRScheduler

from deepspeed_partition.engine import checkpoints
from deepspeed_partition.engine.collectives import from_rank_0
from deepspeed_partition.engine.environment import announce, check_writable, planning_is_off
from deepspeed_partition.engine.instructions import AnyBoundaryEngine
from deepspeed_partition.engine.module import (
    Cut,
    asks_for_plan,
    check_boundaries,
    check_method_name,
    check_plan,
    check_same_model,
    load_plan,
)
from deepspeed_partition.engine.parameter_groups import EveryGroup, ParameterGroups
from deepspeed_partition.engine.repairs import (
    clip_by_global_norm,
    let_stages_differ,
    link_states_of_all_groups,
    prefer_torch_adam,
    warn_of_clipping,
)
from deepspeed_partition.engine.training_state import TrainingState
from deepspeed_partition.engine.transplant import move_layers, preserved_random_state, trainable_parameters
from deepspeed_partition.options import Options
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain

OUTLIVES_A_RECUT = (
    "agg_additional_losses", "agg_train_loss", "batch_fn", "batch_timer", "client_lr_scheduler",
    "client_optimizer", "curriculum_scheduler_legacy", "data_iterator", "dynamic_shape", "global_samples",
    "global_steps", "has_attention_mask", "log_batch_step_id", "losses", "micro_batches", "micro_steps", "monitor",
    "pipeline_enable_backward_allreduce", "progressive_layer_drop", "random_ltd_scheduler", "skipped_steps",
    "timers", "torch_autocast_z0_gradscaler", "total_loss", "tput_timer", "training", "training_data",
    "training_dataloader", "_global_grad_norm",
)  # fmt: skip
"""Attributes that DeepSpeed's ``__init__`` sets anew (not all of them in each version, or configuration)."""


class MadPipeEngine(AnyBoundaryEngine):
    """DeepSpeed's ``PipelineEngine`` on a planned cut.

    Where the module or the configuration asks for ``madpipe``, the first ``train_batch`` measures the layers on
    its first micro-batch, rank 0 plans, and layers move to their planned ranks before the first optimizer step;
    :meth:`recut` moves them between any two steps.
    A module that DeepSpeed cut is trained as DeepSpeed does. Made by :func:`initialize`, or by DeepSpeed's own
    ``initialize`` after :func:`install`.

    Raises:
        ValueError: an unknown or malformed key of ``madpipe`` in the configuration.
        PlanMismatchError: a plan file for another model or another number of ranks.
    """

    plan: Plan | None = None
    """The plan of the current cut; None for a trial cut, and for one that was given as boundaries."""
    chain: Chain | None = None
    """The measurements that this run planned with."""
    before_optimizer_step: Callable[[], object] | None = None
    """Called on every rank once per step, with the gradients, right before they are clipped and applied."""
    around_measurements: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered on every rank while the layers and the loss function run to be measured."""
    options: Options

    # DeepSpeed's, without types there.
    basic_optimizer: Any
    data_iterator: Any
    lr_scheduler: Any
    optimizer: Any

    def __init__(self, **kwargs: Any) -> None:
        self._groups: ParameterGroups | None = None
        self._every_group: EveryGroup | None = None
        self._peeked: Iterator[Any] | None = None
        self._users_scheduler: Any = kwargs.get("lr_scheduler")
        self._compile_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._waits_for_plan = self._in_step = False
        super().__init__(**kwargs)
        given_anew = ("model", "optimizer", "lr_scheduler", "model_parameters", "training_data")
        self._init_arguments = {key: value for key, value in kwargs.items() if key not in given_anew}
        self.options = Options.from_mapping(self._config.pipeline.get("madpipe", {}))
        self._cut_as_configured()
        if self.owns_cut and self.device.type == "cpu":
            # On a CPU the shape of each micro-batch can be told with it: a tenth of a millisecond.
            self.dynamic_shape = True
        in_fp32_without_zero = self.optimizer is not None and self.optimizer is self.basic_optimizer
        if not self.owns_cut and self.num_stages > 1 and in_fp32_without_zero and self.gradient_clipping():
            warn_of_clipping(deepspeed.__version__, self.module.parts)

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
            cut = self.module.madpipe_cut = Cut("trial")
        if cut is None or cut.origin in ("boundaries", "default"):
            return
        if cut.plan is not None:
            check_same_model(cut.plan, trainable_parameters(self.module))
            self.plan = cut.plan
        elif self.options.plan is not None:
            plan = load_plan(self.options.plan)
            check_plan(plan, self.module._num_layers, self.num_stages)
            check_same_model(plan, trainable_parameters(self.module))
            self.recut(plan)
        else:
            save_plan = self.options.save_plan
            if save_plan is not None:
                from_rank_0(lambda: check_writable(save_plan))
            self._waits_for_plan = True
            announce(
                f"the layers are cut at {self.module.parts} until the first train_batch, which measures them: the "
                f"plan is made before the first optimizer step (warmup_steps: {self.options.warmup_steps})"
            )

    def recut(self, plan: Plan | str | os.PathLike[str] | Sequence[int]) -> None:
        """Move the layers to the stages of ``plan``, between two steps; training goes on as without. Collective.

        Layers whose rank changes move with their weights, buffers and optimizer states, values unchanged. The
        module, this engine, its optimizer and its scheduler stay the same objects, with their settings and counts.
        ``Parameter`` objects of layers that move are new, so hooks on them must be registered again.

        Args:
            plan: a plan, the path of one, or boundaries such as ``[0, 3, 8]``.

        Raises:
            PlanMismatchError: a plan for another model or another number of ranks.
            ValueError: boundaries that do not fit the layers and the ranks, or leave a stage without trainable
                parameters.
            RuntimeError: within a step; or an optimizer whose state cannot be told apart by parameters.
        """
        num_layers, num_stages = self.module._num_layers, self.num_stages
        if isinstance(plan, Plan | str | os.PathLike):
            plan = load_plan(plan)
            boundaries = check_plan(plan, num_layers, num_stages)
            cut = Cut("plan", plan)
        else:
            boundaries = check_boundaries(plan, num_layers, num_stages)
            cut = Cut("boundaries")
        if self._in_step:
            raise RuntimeError("the layers cannot move within a step: call recut between two calls of train_batch")
        if boundaries != self.module.parts:
            self._check_every_stage_trains(boundaries)
            self._move_to(boundaries)
        self.module.madpipe_cut = cut
        self.plan = cut.plan
        self._waits_for_plan = False

    def _check_every_stage_trains(self, boundaries: list[int]) -> None:
        """Refuse, while everything still stands, what the optimizer of a stage could not start on."""
        if self.basic_optimizer is None:
            return
        counts = trainable_parameters(self.module)
        for stage, (start, stop) in enumerate(itertools.pairwise(boundaries)):
            if not any(counts[start:stop]):
                raise ValueError(
                    f"the boundaries {boundaries} leave stage {stage}, layers {start} to {stop}, without "
                    "trainable parameters, and DeepSpeed's optimizer cannot start without: move a boundary"
                )

    def _move_to(self, boundaries: list[int]) -> None:
        """Move the layers, and start the engine again on the same objects."""
        optimizer, groups, scheduler = self.optimizer, self._groups, None
        training_state: TrainingState | None = None
        with preserved_random_state():
            if groups is not None and self._every_group is not None:
                num_groups = len(self._every_group.param_groups)
                groups.gather(self._every_group, self.grid.get_pipe_parallel_group())
                training_state = TrainingState(optimizer, self.module, groups.place_of())
                scheduler = self._scheduler_to_keep(num_groups)
            self._release_parameters()
            if training_state is not None:
                training_state.take_out()
            move_layers(self.module, boundaries, training_state)
            if groups is not None:
                groups.assign(self.basic_optimizer, self.module)
            self._start_again(scheduler)
            self.optimizer = _one_object(optimizer, self.optimizer)
            if training_state is not None:
                training_state.lay_into(self.optimizer, self.module)

    def _release_parameters(self) -> None:
        """Take DeepSpeed's hooks and flat buffers off the parameters, and every other reference to them."""
        self.destroy()
        self.module_forward_pre_hook.remove()
        self.module_forward_post_hook.remove()
        self.param_names.clear()
        if self.optimizer is not self.basic_optimizer:
            vars(self.optimizer).clear()
        if self.basic_optimizer is not None:
            self.basic_optimizer.state.clear()
            for group in self.basic_optimizer.param_groups:
                group["params"] = []
        for parameter in self.module.parameters():
            parameter.grad = None
            if hasattr(parameter, "_hp_grad"):  # the bf16 optimizer's, a view of a flat buffer like the next
                del parameter._hp_grad
            # A view of a flat buffer keeps all of it alive.
            parameter.data = parameter.data.clone()

    def _scheduler_to_keep(self, num_groups_before: int) -> Any:
        """The scheduler that goes on; None where DeepSpeed makes one anew, as happens before the first step.

        A scheduler that DeepSpeed made before this engine owned the cut knows the groups of its rank alone.
        """
        assert self._groups is not None
        groups, wrapped = self._groups.groups, self.optimizer is not self.basic_optimizer
        knows_all = not wrapped or getattr(self.lr_scheduler, "optimizer", None) is self._every_group
        made_by_user = self.lr_scheduler is self.client_lr_scheduler
        if made_by_user or (knows_all and len(groups) == num_groups_before):
            return self.lr_scheduler
        for group in groups:  # schedulers multiply the rate that they find
            group["lr"] = group.get("initial_lr", group["lr"])
        return None

    def _start_again(self, scheduler: Any) -> None:
        """DeepSpeed's ``__init__`` on this object, around the moved layers."""
        kept = {name: vars(self)[name] for name in OUTLIVES_A_RECUT if name in vars(self)}
        old_scheduler = self.lr_scheduler
        collects_garbage_late = getattr(self, "_python_gc_generation", None) is not None  # not in 0.19.0
        with self._monitors_opened_once():
            super().__init__(
                model=self.module,
                optimizer=self.basic_optimizer,
                model_parameters=list(self.module.parameters()),
                lr_scheduler=self.client_lr_scheduler if scheduler is None else scheduler,
                training_data=None,
                **self._init_arguments,
            )
        self.__dict__.update(kept)
        self.lr_scheduler = _one_object(old_scheduler, self.lr_scheduler)
        if collects_garbage_late:
            self._configure_python_gc()
        if self._compile_arguments is not None:
            args, kwargs = self._compile_arguments
            super().compile(*args, **kwargs)

    @contextmanager
    def _monitors_opened_once(self) -> Iterator[None]:
        """TensorBoard and the others stay open; started again, DeepSpeed would open a second one of each."""
        config, monitors = self._config, self._config.monitor_config
        config.monitor_config = type(monitors)()
        try:
            yield
        finally:
            config.monitor_config = monitors

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        self._compile_arguments = (args, kwargs)

    def _configure_basic_optimizer(self, model_parameters):
        if (self.owns_cut or self._config.pipeline.get("partition_method")) and not self.zero_use_cpu_optimizer():
            prefer_torch_adam(self._config)
        optimizer = super()._configure_basic_optimizer(model_parameters)
        self._groups = ParameterGroups(optimizer, self.module)
        return optimizer

    def _configure_optimizer(self, client_optimizer, model_parameters):
        if isinstance(client_optimizer, torch.optim.Optimizer):
            self._groups = ParameterGroups(client_optimizer, self.module)
        elif client_optimizer is not None:
            make_optimizer = client_optimizer

            def client_optimizer(parameters):
                optimizer = make_optimizer(parameters)
                self._groups = ParameterGroups(optimizer, self.module)
                return optimizer

        super()._configure_optimizer(client_optimizer, model_parameters)
        let_stages_differ(self.optimizer, self.mpu.get_model_parallel_group(), self.device)
        if self._groups is None:
            return
        if self._every_group is None:
            self._every_group = EveryGroup(self.basic_optimizer, self._groups.groups)
            if self.owns_cut and self._makes_scheduler():
                # It is made for the groups of all stages, so that it can go on when layers move.
                self._groups.gather(self._every_group, self.mpu.get_pipe_parallel_group())
        if self.owns_cut and self.optimizer is self.basic_optimizer:
            # DeepSpeed drops groups without parameters, which only its wrapping optimizers cannot have. With
            # them, schedulers see the same groups on every rank.
            self.basic_optimizer.param_groups[:] = self._groups.groups
        self._every_group.follow(self._groups.groups)

    def _makes_scheduler(self) -> bool:
        """Whether DeepSpeed makes the scheduler; otherwise it is the user's, or there is none."""
        if self.client_lr_scheduler:
            return callable(self.client_lr_scheduler)
        return self.scheduler_name() is not None

    def _configure_lr_scheduler(self):
        optimizer, basic_optimizer = self.optimizer, self.basic_optimizer
        if self.owns_cut and self._every_group is not None and optimizer is not basic_optimizer:
            self.optimizer = self.basic_optimizer = self._every_group
        try:
            super()._configure_lr_scheduler()
        finally:
            self.optimizer, self.basic_optimizer = optimizer, basic_optimizer
        dropped = self._groups is not None and len(self._groups.groups) > len(self.basic_optimizer.param_groups)
        # One that DeepSpeed made of a callable, and that a re-cut passes on, knows the groups in use alone.
        if self.owns_cut and dropped and isinstance(self._users_scheduler, LRScheduler):
            self.show_every_group(self._users_scheduler)

    def show_every_group(self, scheduler: Any) -> None:
        """Let ``scheduler``, which the user made for all groups of the optimizer, have all of them.

        Those without parameters on this rank are dropped by DeepSpeed's wrapping optimizers.
        """
        wrapped = self.optimizer is not self.basic_optimizer
        if self._every_group is not None and wrapped and scheduler.optimizer is self.basic_optimizer:
            self._every_group.show_to(scheduler)

    # Training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """DeepSpeed's ``train_batch``. The first one measures and plans before it trains.

        Raises:
            InfeasibleError: no plan fits in memory; on every rank.
        """
        if self._waits_for_plan and torch.is_grad_enabled():
            if data_iter is not None and data_iter is not self._peeked:
                self.set_dataiterator(data_iter)
                self._peeked = data_iter  # where planning fails and is tried again, nothing of it is lost
            self._plan_first_step()
            data_iter = None  # the engine's own begins with the micro-batch that was measured
        self._peeked = None
        self.reset_activation_shape()
        self._in_step = True
        try:
            return super().train_batch(data_iter)
        except StopIteration:
            self.timers(TRAIN_BATCH_TIMER).reset()  # DeepSpeed would not start it again
            raise
        finally:
            self._in_step = False

    def eval_batch(self, data_iter: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        self.reset_activation_shape()
        return super().eval_batch(data_iter, *args, **kwargs)

    def _plan_first_step(self) -> None:
        if self.module.activation_checkpoint_interval:
            announce(
                "activation checkpointing is on: layers are measured without it, so the plan counts on more "
                "memory than they will keep, and on backwards without recomputation",
                logging.WARNING,
            )
        from deepspeed_partition.engine.planning import plan_first_step  # the profiler, used only here

        with self.around_measurements():
            plan, self.chain = plan_first_step(self)
        before = self.module.parts
        self.recut(plan)
        announce(f"the layers are cut at {self.module.parts} as planned (until now: {before})")

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
        **AnyBoundaryEngine._INSTRUCTION_MAP,
        schedule.OptimizerStep: _exec_optimizer_step,
    }

    # Checkpoints

    def save_checkpoint(self, save_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``save_checkpoint``, with the cut beside its files.

        Raises:
            OSError: rank 0 cannot write the cut; on every rank.
        """
        if self.owns_cut and save_dir:
            folder = os.path.join(save_dir, f"global_step{self.global_steps}" if tag is None else str(tag))
            # Before DeepSpeed's files: whoever finds a complete checkpoint finds its cut.
            from_rank_0(lambda: checkpoints.save_cut(folder, self.module.parts, self.plan))
        return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def load_checkpoint(self, load_dir, tag=None, *args: Any, **kwargs: Any):
        """DeepSpeed's ``load_checkpoint``, after moving the layers to the cut of the checkpoint.

        Raises:
            PlanMismatchError: a checkpoint of another number of stages or layers.
            PlanFormatError: the file of its cut is damaged.
        """
        arguments = inspect.signature(super().load_checkpoint).bind(load_dir, tag, *args, **kwargs).arguments
        asked_for_plan = self._waits_for_plan
        if self.owns_cut and not arguments.get("load_module_only", False):  # weights alone load on any cut
            self._adopt_cut_of(load_dir, tag)
        loaded = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        if asked_for_plan and self.plan is None and not self.global_steps:
            # Written before the first step: nothing was trained on its cut, so a plan can still change it.
            self.module.madpipe_cut, self._waits_for_plan = Cut("trial"), True
        elif self._waits_for_plan and self.global_steps:
            self._waits_for_plan = False
            announce(
                "the checkpoint has optimizer states and no plan: training goes on at the cut "
                f"{self.module.parts}",
                logging.WARNING,
            )
        return loaded

    def _adopt_cut_of(self, load_dir: str, tag: str | None) -> None:
        folder = checkpoints.folder_to_load(load_dir, tag, universal=self.load_universal_checkpoint())
        saved = from_rank_0(lambda: None if folder is None else checkpoints.read_cut(folder))
        if saved is None:
            return
        num_stages, num_layers = len(saved.boundaries) - 1, saved.boundaries[-1]
        if (num_stages, num_layers) != (self.num_stages, self.module._num_layers):
            raise PlanMismatchError(
                f"the checkpoint in {folder} has {num_layers} layers on {num_stages} stages and this run "
                f"{self.module._num_layers} layers on {self.num_stages}: start it with {num_stages} stages"
            )
        if saved.boundaries != self.module.parts:
            announce(f"the checkpoint was written at the cut {saved.boundaries}: the layers move to it")
            self.recut(saved.boundaries)
        self.plan = saved.plan
        self.module.madpipe_cut = Cut("boundaries") if saved.plan is None else Cut("plan", saved.plan)
        self._waits_for_plan = False


def _one_object(old: Any, new: Any) -> Any:
    """Let ``old``, which the user holds, be ``new``, which DeepSpeed made in its place and refers to.

    Both names then share one state.
    """
    if type(old) is not type(new) or old is new or old is None:
        return new
    old.__dict__ = new.__dict__
    return old


def initialize_with(engine_class: type, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with another class for the engine of pipeline modules."""
    stock = deepspeed.PipelineEngine
    # deepspeed.initialize looks the class up when it is called, and has no argument for it.
    deepspeed.PipelineEngine = engine_class
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
