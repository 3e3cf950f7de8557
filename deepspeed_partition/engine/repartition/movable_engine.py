"""An engine whose layers can change their ranks, while the user's objects stay the same ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from deepspeed_partition.engine.pipeline.experts import why_they_stay
from deepspeed_partition.engine.pipeline.module import asks_for_plan, check_every_rank_trains
from deepspeed_partition.engine.pipeline.own_optimizers import kept_beside_state
from deepspeed_partition.engine.pipeline.parts import (
    held_modules,
    in_words,
    parts_here,
    trainable_parameters,
)
from deepspeed_partition.engine.pipeline.plan_engine import AnyPlanEngine
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.repairs import fit_reduction_buffers, let_stages_differ, prefer_torch_adam
from deepspeed_partition.engine.repartition.given_gradients import GivenGradients
from deepspeed_partition.engine.repartition.kept_along import KeptAlong
from deepspeed_partition.engine.repartition.layer_moves import build_arriving, move_layers
from deepspeed_partition.engine.repartition.one_memory import in_memory_of_others
from deepspeed_partition.engine.repartition.optimizer_copies import mark_copies
from deepspeed_partition.engine.repartition.optimizer_state import TrainingState, lay_states_given
from deepspeed_partition.engine.repartition.parameter_groups import EveryGroup, ParameterGroups
from deepspeed_partition.engine.repartition.part_descriptions import tensors_in
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce, log_here, planning_is_off, warn_once
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.units import counted

OUTLIVES_A_MOVE = (
    "agg_additional_losses", "agg_train_loss", "batch_fn", "batch_timer", "client_lr_scheduler",
    "client_optimizer", "curriculum_scheduler_legacy", "data_iterator", "dynamic_shape", "global_samples",
    "global_steps", "has_attention_mask", "log_batch_step_id", "losses", "micro_batches", "micro_steps", "monitor",
    "pipeline_enable_backward_allreduce", "progressive_layer_drop", "random_ltd_scheduler", "skipped_steps",
    "timers", "torch_autocast_z0_gradscaler", "total_loss", "tput_timer", "training", "training_data",
    "training_dataloader", "_global_grad_norm",
)  # fmt: skip
"""Attributes that DeepSpeed's ``__init__`` sets anew (not all of them in each version, or configuration)."""


class MovingEngine(AnyPlanEngine):
    """Moves layers between any two steps, with all that training has made of them.

    The module, this engine, its optimizer and its scheduler stay the same objects, with their settings and counts.
    """

    copies_follow = False
    """Whether the host lets copies of weights that a script keeps follow layers that move."""
    tells_ends = True
    """Whether it is said where the first and the last stage are, if not where plain DeepSpeed has them."""
    is_in_checkpoint = False
    """Whether a checkpoint is being saved or loaded: its files say of which cut they are."""
    has_experts = False
    """Whether any rank has layers of DeepSpeed's mixture of experts."""
    has_told_unmarked = False
    """Whether it was said that a state of the optimizer does not say of which parameters it is."""

    # DeepSpeed's, without types there.
    basic_optimizer: Any
    data_iterator: Any
    lr_scheduler: Any
    optimizer: Any

    _is_destroyed = False
    _told_ends: tuple[int, int] | None = None
    """The places in a pipeline of the first and the last stage, when they were last told."""

    def __init__(self, **kwargs: Any) -> None:
        self._groups: ParameterGroups | None = None
        self._every_group: EveryGroup | None = None
        self._users_scheduler: Any = kwargs.get("lr_scheduler")
        self._compile_arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        given_anew = ("model", "optimizer", "lr_scheduler", "model_parameters", "training_data")
        self._init_arguments = {key: value for key, value in kwargs.items() if key not in given_anew}
        super().__init__(**kwargs)
        self._scheduler_at_start = self.lr_scheduler

    def move_to(self, allocation: Allocation) -> None:
        """Move the layers, and start the engine again on the same objects. Collective.

        Raises:
            ValueError: a rank would be left without trainable parameters; nothing has moved.
            RuntimeError: the optimizer's state cannot be told apart by parameters, or is kept elsewhere, the
                schedule of learning rates cannot go on, a layer is not what its specification builds, or the
                model has experts; nothing has moved, and training can go on.
        """
        if self.has_experts:
            raise RuntimeError(why_they_stay(self.module))
        if self.basic_optimizer is not None:
            check_every_rank_trains(allocation, trainable_parameters(self.module))
        self.check_that_optimizer_can_go_on()
        optimizer, groups, scheduler = self.optimizer, self._groups, None
        before = parts_here(self.module)
        training_state: TrainingState | None = None
        along: KeptAlong | None = None
        with preserved_random_state():
            beside = getattr(self, "state_beside", None)
            leaving = {} if beside is None else beside.leaving(allocation)
            arriving = build_arriving(self.module, allocation)
            if groups is not None and self._every_group is not None:
                num_scheduled = self._num_scheduled(self._every_group)
                groups.gather(self._every_group, self.grid.get_pipe_parallel_group())
                self._every_group.follow(groups.groups)
                along = KeptAlong(optimizer, groups.groups) if optimizer is self.basic_optimizer else None
                try:
                    training_state = TrainingState(optimizer, self.module, groups.place_of())
                    scheduler = self._scheduler_to_keep(num_scheduled)
                except Exception:
                    if along is not None:
                        along.undo()
                    raise
            gradients = GivenGradients(self.module, allocation)
            self._release_parameters()
            if training_state is not None:
                training_state.take_out()
            move_layers(self.module, allocation, arriving, training_state)
            if beside is not None:
                beside.arrive(leaving)
            if groups is not None:
                groups.assign(self.basic_optimizer, self.module)
            turned = [] if training_state is None else training_state.turned_of(self.module)
            if optimizer is self.basic_optimizer:  # which trains whatever has a gradient
                turned = [weight for weight in turned if not weight.requires_grad]
            self._tell_of_unfrozen(turned)
            with _turned_back(turned):
                self._start_again(scheduler)
            self.optimizer = _one_object(optimizer, self.optimizer)
            if training_state is not None:
                training_state.lay_into(self.optimizer, self.module)
            if along is not None:
                along.give_back()
            gradients.give_to(self.module)
        self._tell_what_moved(before)
        self.tell_ends()

    def _tell_of_unfrozen(self, turned: list[nn.Parameter]) -> None:
        names = {weight: name for name, weight in self.module.named_parameters()}
        unfrozen = [names[weight] for weight in turned if weight.requires_grad]
        if unfrozen:
            warn_once(
                "unfrozen late",
                f"{counted(len(unfrozen), 'weight')}, such as {unfrozen[0]}, had no gradient when the optimizer "
                "was made and has one now: DeepSpeed's ZeRO, bf16 and fp16 optimizers train what they began with, "
                "so it stays as it is. Make the engine anew, or train in fp32 without ZeRO",
            )

    def _tell_what_moved(self, before: dict[str, bool]) -> None:
        """Say, on each rank of the first pipeline, of which layers a script has not made anything so far."""
        after = parts_here(self.module)
        is_silent = self.grid.data_parallel_id or self.grid.get_slice_parallel_rank()
        if is_silent or before.keys() == after.keys():
            return
        changes = []
        for beginning, parts, others in (("has", after, before), ("no longer has", before, after)):
            trained, bare = (
                [name for name, has_some in parts.items() if name not in others and has_some == which]
                for which in (True, False)
            )
            said = [f"the parameters of {in_words(trained)}"] if trained else []
            said += [f"{in_words(bare)} (no parameters)"] if bare else []
            if said:
                now = " now" if parts is after else ""
                changes.append(f"{beginning} {' and '.join(said)}{now}")
        of_copies = (
            ""
            if self.copies_follow
            else ": what a script made of its layers or parameters before (a list, a "
            "state_dict(), an average by name, a copy) does not follow: make it again of engine.module; an "
            "attribute of a parameter follows (p.average = p.detach().clone())"
        )
        # A host whose copies follow has told the user where parameters are.
        level = logging.DEBUG if self.copies_follow else logging.INFO
        log_here(f"rank {self.global_rank} {' and '.join(changes)} (names stay){of_copies}", level)

    def tell_ends(self) -> None:
        """Say on rank 0 that data, loss and logits are on other ranks than a script takes them to be."""
        module, plain = self.module, (0, self.num_stages - 1)
        now = int(module.stage_owner(0)), int(module.stage_owner(module._num_layers - 1))
        before, self._told_ends = self._told_ends or plain, now
        if now == before or not self.tells_ends:
            return
        rank_of = self.grid.stage_to_global
        moved = [
            f"the {name} stage is on rank {rank_of(place)} now, no longer on rank {rank_of(other)}"
            for name, place, other in zip(("first", "last"), now, before, strict=True)
            if place != other
        ]
        way_out = (
            "" if now == plain else "; the algorithm 'contiguous' makes plans with the last stage on the last rank"
        )
        announce(
            f"{' and '.join(moved)}: what a script has asked before, or takes to be on the last rank (the loss, "
            "the logits of eval_batch(return_logits=True)), is out of date: ask engine.is_first_stage() and "
            f"engine.is_last_stage() each time{way_out}"
        )

    def destroy(self) -> None:
        """End this engine, once: Python calls it again when it collects the object, whenever that is.

        By then another engine may train the same parameters, and this one would cut them from its master weights.
        """
        if not self._is_destroyed:
            self._is_destroyed = True
            with _parameters_alone(getattr(self, "basic_optimizer", None)):
                super().destroy()

    def retire(self) -> None:
        """Train no more, and let the parameters be trained otherwise: what is kept can still be saved."""
        for hook in getattr(self.optimizer, "_grad_acc_hooks", ()):  # of DeepSpeed's ZeRO and bf16 optimizers
            hook.remove()

    @property
    def is_destroyed(self) -> bool:
        """Whether :meth:`destroy` was called, after which there are no master weights."""
        return self._is_destroyed

    def release(self) -> None:
        """End this engine, and leave the module and its parameters to another one."""
        self.destroy()
        self.module_forward_pre_hook.remove()
        self.module_forward_post_hook.remove()
        self.param_names.clear()
        if self.optimizer is not self.basic_optimizer:
            vars(self.optimizer).clear()  # flat buffers
        for parameter in self.module.parameters():
            parameter.grad = None

    def _release_parameters(self) -> None:
        """Take DeepSpeed's hooks and flat buffers off the parameters, and every other reference to them."""
        self.release()
        if self.basic_optimizer is not None:
            self.basic_optimizer.state.clear()
            for group in self.basic_optimizer.param_groups:
                group["params"].clear()
        held = held_modules(self.module).values()
        views = {id(each) for part in held for each in in_memory_of_others(tensors_in(part))}
        for parameter in self.module.parameters():
            if hasattr(parameter, "_hp_grad"):  # the bf16 optimizer's, a view of a flat buffer like the next
                del parameter._hp_grad
            # A view of a flat buffer keeps all of it alive; one of what its layer has is to stay one. What has its
            # memory for itself keeps it, for a program may look at it, as with weight.detach().
            if id(parameter) not in views and parameter.untyped_storage().nbytes() != parameter.nbytes:
                parameter.data = parameter.data.clone()

    def _num_scheduled(self, every_group: EveryGroup) -> int:
        """How many groups the scheduler knows: where DeepSpeed cut the module, those in use on this rank alone."""
        knows_all = getattr(self.lr_scheduler, "optimizer", None) is every_group
        return len((every_group if knows_all else self.basic_optimizer).param_groups)

    def check_that_scheduler_can_go_on(self) -> None:
        """Refuse now a scheduler that a move would refuse later. Collective; changes nothing.

        Raises:
            RuntimeError: it was set after the engine was made, and does not know every group on each rank.
        """
        if self._groups is None or self._every_group is None:
            return
        num_scheduled, groups = self._num_scheduled(self._every_group), copy.copy(self._groups)
        groups.gather(self._every_group, self.grid.get_pipe_parallel_group())
        self._is_scheduler_assigned(num_scheduled == len(groups.groups))
        self._refuse_scheduler_of_few_groups(groups)

    def check_that_optimizer_can_go_on(self, *, after_steps: bool = False) -> None:
        """Refuse an optimizer that keeps something of its parameters where it does not go with them. Collective.

        Args:
            after_steps: Look at what it will keep when it has made steps; else at what it keeps now.

        Raises:
            RuntimeError: on every rank, it does; nothing has moved.
        """
        optimizer = self.basic_optimizer
        is_one = isinstance(optimizer, torch.optim.Optimizer)
        mine = (
            kept_beside_state(optimizer, after_steps=after_steps, follows=self.optimizer is optimizer)
            if is_one
            else []
        )
        kept = list(dict.fromkeys(name for names in gather_objects(mine) for name in names))
        if kept:
            raise RuntimeError(
                f"the optimizer of the pipeline is {type(optimizer).__name__}, which keeps tensors of parameters "
                f"in {', '.join(kept)}, and when layers move to other ranks that does not go with them: keep it "
                "in self.state[p], which goes with its parameter (in fp32 without ZeRO a list or a dict with an "
                "entry for each parameter does, too), or let no layer move: boundaries as partition_method, in "
                "Lightning MadPipeStrategy(plan=...), and no recut()"
            )

    def _is_scheduler_assigned(self, knows_all: bool) -> tuple[bool, bool]:
        """Whether a script has set the scheduler, and whether it knows all groups on each rank. Collective."""
        told = gather_objects((self.lr_scheduler is not self._scheduler_at_start, knows_all))
        is_assigned = any(assigned for assigned, _ in told)
        if is_assigned and not all(assigned and knows for assigned, knows in told):
            raise RuntimeError(
                "engine.lr_scheduler was set after deepspeed.initialize(), and some rank has none, or lacks a "
                "parameter group of the optimizer: it cannot go on when layers move. Give it to "
                "deepspeed.initialize(lr_scheduler=...), also as a function that makes it of the optimizer"
            )
        return is_assigned, all(knows for _, knows in told)

    def _refuse_scheduler_of_few_groups(self, groups: ParameterGroups) -> None:
        """Refuse one that was made for the groups of a rank, where other ranks have others. Collective.

        Raises:
            RuntimeError: on every rank, some rank's scheduler has not this number of groups, or not in this order.
        """
        if any(gather_objects(groups.are_reordered and self.lr_scheduler is not None)):
            raise RuntimeError(
                "the ranks have made the same parameter groups in different orders, and when layers move the "
                f"{type(self.lr_scheduler).__name__} would set the rate of one group in another: give them in one "
                "order on every rank, those without parameters of the rank too, {'params': [], ...}"
            )
        rates, num_groups = getattr(self.lr_scheduler, "base_lrs", None), len(groups.groups)
        told = gather_objects(len(rates) if isinstance(rates, list) else num_groups)
        if any(number != num_groups for number in told):
            raise RuntimeError(
                f"the {type(self.lr_scheduler).__name__} knows {told} parameter groups on the ranks, and layers "
                f"that move bring theirs: {num_groups} in all. Let it be made for all of them: give a function to "
                "deepspeed.initialize(lr_scheduler=lambda optimizer: LambdaLR(optimizer, ...))"
            )

    def _scheduler_to_keep(self, num_scheduled: int) -> Any:
        """The scheduler that goes on; None where DeepSpeed must make one anew, before the first step. Collective.

        Raises:
            RuntimeError: it has counted steps already, and does not know every group on each rank.
        """
        assert self._groups is not None
        groups, scheduler = self._groups.groups, self.lr_scheduler
        self._refuse_scheduler_of_few_groups(self._groups)
        knows_all = num_scheduled == len(groups)
        is_assigned, all_know = self._is_scheduler_assigned(knows_all)
        if is_assigned:
            self.show_every_group(scheduler)
            return scheduler
        if scheduler is self.client_lr_scheduler:
            return scheduler
        if self.global_steps and not all_know:
            raise RuntimeError(
                f"the {type(scheduler).__name__} was made for a module that DeepSpeed cut, where each rank has "
                "only the groups of its own parameters, and some rank lacks one of them: it cannot go on when "
                "layers move. Set pipeline.partition_method to the cut, or to 'madpipe', in the configuration, or "
                "call recut before the first step"
            )
        if knows_all:
            self.show_every_group(scheduler)
            return scheduler
        for group in groups:  # schedulers multiply the rate that they find
            group["lr"] = group.get("initial_lr", group["lr"])
        return None

    def _start_again(self, scheduler: Any) -> None:
        """DeepSpeed's ``__init__`` on this object, around the moved layers."""
        kept = {name: vars(self)[name] for name in OUTLIVES_A_MOVE if name in vars(self)}
        old_scheduler = self.lr_scheduler
        collects_garbage_late = getattr(self, "_python_gc_generation", None) is not None  # not in 0.19.0
        self._is_destroyed = False
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
        self.lr_scheduler = self._scheduler_at_start = _one_object(old_scheduler, self.lr_scheduler)
        if collects_garbage_late:
            self._configure_python_gc()
        if self._compile_arguments is not None:
            args, kwargs = self._compile_arguments
            super().compile(*args, **kwargs)

    @contextmanager
    def _monitors_opened_once(self) -> Iterator[None]:
        """Keep TensorBoard and other monitors open: started again, DeepSpeed would open a second of each."""
        config, monitors = self._config, self._config.monitor_config
        config.monitor_config = type(monitors)()
        try:
            yield
        finally:
            config.monitor_config = monitors

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)
        self._compile_arguments = (args, kwargs)

    @property
    def _is_to_own_cut(self) -> bool:
        """Whether the cut is this engine's, or the configuration makes it so when ``__init__`` is through."""
        method = self._config.pipeline.get("partition_method")
        asked = isinstance(method, list | tuple) or (asks_for_plan(method) and not planning_is_off())
        return self.owns_cut or asked

    def _configure_basic_optimizer(self, model_parameters):
        if (self.owns_cut or self._config.pipeline.get("partition_method")) and not self.zero_use_cpu_optimizer():
            prefer_torch_adam(self._config)
        optimizer = super()._configure_basic_optimizer(model_parameters)
        self._groups = ParameterGroups(optimizer, self.module, self._groups)
        return optimizer

    def _configure_optimizer(self, client_optimizer, model_parameters):
        if self.owns_cut:
            check_every_rank_trains(allocation_of(self.module), trainable_parameters(self.module))
        if isinstance(client_optimizer, torch.optim.Optimizer):
            self._groups = ParameterGroups(client_optimizer, self.module, self._groups)
        elif client_optimizer is not None:
            make_optimizer = client_optimizer

            def client_optimizer(parameters):
                optimizer = make_optimizer(parameters)
                self._groups = ParameterGroups(optimizer, self.module)
                return optimizer

        super()._configure_optimizer(client_optimizer, model_parameters)
        base = self.basic_optimizer
        if self._is_to_own_cut and base is not self.optimizer and isinstance(base, torch.optim.Optimizer):
            lay_states_given(base, self.optimizer, self.module)
        let_stages_differ(self.optimizer, self.mpu.get_model_parallel_group(), self.device)
        weights = (weight for weight in self.module.parameters() if weight.requires_grad)
        fit_reduction_buffers(self.optimizer, sum(weight.numel() for weight in weights))
        mark_copies(self)
        if self._groups is None:
            return
        if self._every_group is None or not self._every_group.stands_for(self.basic_optimizer):
            self._every_group = EveryGroup(self.basic_optimizer, self._groups.groups)
            if self._is_to_own_cut and self._makes_scheduler():
                # It is made for the groups of all stages, so that it can go on when layers move.
                self._groups.gather(self._every_group, self.mpu.get_pipe_parallel_group())
        if self._is_to_own_cut and self.optimizer is self.basic_optimizer:
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
        if self._is_to_own_cut and self._every_group is not None and optimizer is not basic_optimizer:
            self.optimizer = self.basic_optimizer = self._every_group
        try:
            super()._configure_lr_scheduler()
        finally:
            self.optimizer, self.basic_optimizer = optimizer, basic_optimizer
        dropped = self._groups is not None and len(self._groups.groups) > len(self.basic_optimizer.param_groups)
        # One that DeepSpeed made of a callable, and that a re-cut passes on, knows the groups in use alone.
        if self._is_to_own_cut and dropped and isinstance(self._users_scheduler, LRScheduler):
            self.show_every_group(self._users_scheduler)

    def show_every_group(self, scheduler: Any) -> None:
        """Let ``scheduler``, which the user made for all groups of the optimizer, have all of them.

        Those without parameters on this rank are dropped by DeepSpeed's wrapping optimizers.
        """
        wrapped = self.optimizer is not self.basic_optimizer
        its_own = getattr(scheduler, "optimizer", None)  # the program's class may have another name for it
        if self._every_group is not None and wrapped and its_own is self.basic_optimizer:
            self._every_group.show_to(scheduler)


@contextmanager
def _turned_back(turned: list[nn.Parameter]) -> Iterator[None]:
    """Let parameters that were frozen or unfrozen since the optimizer started be as they were then meanwhile.

    Optimizers of DeepSpeed's that flatten parameters leave out for ever what is frozen when they start. One that
    had a parameter before it was frozen goes on with it when it is released.
    """
    for parameter in turned:
        parameter.requires_grad_(not parameter.requires_grad)
    try:
        yield
    finally:
        for parameter in turned:
            parameter.requires_grad_(not parameter.requires_grad)


@contextmanager
def _parameters_alone(optimizer: Any) -> Iterator[None]:
    """Leave out what an optimizer has in ``state`` for no parameter: DeepSpeed 0.19 takes all there for dicts."""
    state = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}
    of_none = {key: state.pop(key) for key in list(state) if not torch.is_tensor(key)}
    try:
        yield
    finally:
        state.update(of_none)


def _one_object(old: Any, new: Any) -> Any:
    """Let ``old``, which the user holds, be ``new``, which DeepSpeed made in its place and refers to.

    Both names then share one state.
    """
    if type(old) is not type(new) or old is new or old is None:
        return new
    old.__dict__ = new.__dict__
    return old
