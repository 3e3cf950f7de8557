"""Pipeline modules whose ranks hold the stages that an allocation gives them: several, in any order."""

from __future__ import annotations

import copy
import functools
import glob
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_
from typing import Any, TypeAlias

import deepspeed.pipe
import deepspeed.runtime.pipe.module
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from deepspeed_partition.capture.captured import autocast_on, same_autocast
from deepspeed_partition.engine.pipeline.asked_ranks import ranks_told_in_build
from deepspeed_partition.engine.pipeline.beside_layers import (
    HAND_IT_ON,
    MISSED,
    HandedOverError,
    SharedThings,
    name_of,
)
from deepspeed_partition.engine.pipeline.module_walks import set_mode
from deepspeed_partition.engine.pipeline.old_weights import tell_of_a_part, tell_old_weights
from deepspeed_partition.engine.pipeline.recomputed_attributes import (
    TwoRuns,
    changes_in_backward_told,
    tell_of_second_runs,
)
from deepspeed_partition.engine.pipeline.second_forward import SecondForward
from deepspeed_partition.engine.pipeline.shared_buffers import SharedBuffers
from deepspeed_partition.engine.pipeline.shared_weights import WAY_OUT, listed, places_of_repeated, why_not_apart
from deepspeed_partition.engine.pipeline.tied_copies import own_copies, several_of_a_key
from deepspeed_partition.engine.runtime.random_state import drawn_state
from deepspeed_partition.layer_calls import unpacking
from deepspeed_partition.planner.allocation import Allocation, Stage
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.profiling.backward_halves import Halves
from deepspeed_partition.tensor_values import put_back, version_of

OF_DEEPSPEED: Any = deepspeed.pipe.PipelineModule
Within: TypeAlias = Callable[[int, Callable[[], Any]], Any]
"""What stands around a run of layers: it is given the number of the micro-batch and what runs them."""


class StagesModule(deepspeed.pipe.PipelineModule):
    """DeepSpeed's ``PipelineModule`` with any number of stages on a rank.

    Parameters have the same names on any map. Only one stage is active at a time: ``forward`` runs its layers, and
    it alone is saved or loaded by DeepSpeed's code, which knows of one stage per rank. Nobody builds this class:
    :func:`hold_stages` puts it in front of the class of a module, DeepSpeed's or one derived from it, so that
    the methods of that class stay.
    """

    allocation: Allocation
    own_stages: list[int]
    """The stages of this rank, in the order of the chain."""
    device_of_stage: list[int]
    """The device of each stage; the pipeline's ranks are its devices."""
    forward_funcs: list[Any]
    madpipe_cut: Any
    cut_without_plan: Sequence[int] | None = None
    """The boundaries that layers have until a plan is made, which are DeepSpeed's own."""
    micro_offset: int
    _is_active = False
    _layer_specs: list[Any]
    activation_checkpoint_func: Callable[..., Any]
    is_checkpointable_results: list[bool]
    _has_told = False
    """Whether it was said that layers run twice."""
    _shared_things: SharedThings | None = None
    """What layers of different stages can reach beside their outputs, on this cut."""
    _shared_buffers: SharedBuffers
    """Modules with buffers that layers of different stages have, on this cut."""
    _stages_looked_at: set[tuple[int, bool]]
    """The stages of which it was told what their layers change of it, and whether that was in training."""
    is_checkpointable_results_interval: int | None
    _listed: list[Any]
    """The layers of all stages of this rank, as a script finds them and may put others in their places."""
    _known: list[Any]
    """Those that run."""
    _has_told_part = False
    """Whether it was said that the loss or a layer reads the parameters of this rank."""
    _loads_stages = False
    micro_batch = -1
    """The micro-batch that the active stage runs, counted from the begin of the batch."""
    _within: Within | None = None
    has_old_weights: str | None = None
    """Mode of a pipeline that goes on, where nobody was told yet that weights read now are not all updated."""
    has_told_old_weights = False
    second_forward: SecondForward | None = None
    """While the active stage keeps nothing of a micro-batch but its input: what lets it run again."""
    halves: Halves | None = None
    """While the active stage runs a forward whose backward is in two halves: those."""

    @contextmanager
    def run_within(self, within: Within) -> Iterator[None]:
        """Let something meanwhile stand around each run of a stage's layers.

        Args:
            within: Is given the number of the micro-batch and what runs the layers, and returns what that returns.
                Where layers are recomputed it is called again, for these.
        """
        self.__dict__["_within"] = within
        try:
            yield
        finally:
            self.__dict__["_within"] = None

    def place(self, allocation: Allocation) -> None:
        """Say which stages this rank is to build."""
        self.allocation = allocation
        self.parts = list(allocation.boundaries)
        self.device_of_stage = [stage.device for stage in allocation.stages]
        self.own_stages = [stage for stage, device in enumerate(self.device_of_stage) if device == self.stage_id]
        self._set_bounds(*allocation.stages[self.own_stages[0]].layers)

    def train(self, mode: bool = True) -> Any:
        """As in ``nn.Module``, in less time: DeepSpeed calls it before each step, when mostly no mode changes."""
        if not isinstance(mode, bool) or getattr(super().train, "__func__", None) is not nn.Module.train:
            return super().train(mode)
        set_mode(self, mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the stages of this rank, as ``nn.Module`` has them."""
        if self.has_old_weights is not None:
            tell_old_weights(self, "a parameter")
        if self._is_active and not self._has_told_part and len(self.device_of_stage) > 1:
            self._has_told_part = tell_of_a_part(sys._getframe(1))
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The weights and buffers of the stages of this rank, as ``nn.Module`` has them."""
        if self.has_old_weights is not None:
            tell_old_weights(self, "the state of the module")
        return super().state_dict(*args, **kwargs)

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that runs a layer."""
        return owner(self.allocation, layer_idx)

    def _build(self) -> None:
        self._functions: dict[int, list[Any]] = {}
        self._checkpointable: dict[int, list[bool]] = {stage: [] for stage in self.own_stages}
        # Between two batches all stages have run equally often, also those that come from other ranks.
        self._num_forwards = dict.fromkeys(self.own_stages, self.micro_offset)
        specs = self._layer_specs
        is_planned = self.madpipe_cut is not None and self.madpipe_cut.plan is not None
        # To DeepSpeed, copies of different forms are tied modules of different keys.
        self._layer_specs = self._specs_to_build()
        try:
            for stage in self.own_stages:
                self._set_bounds(*self.allocation.stages[stage].layers)
                self.forward_funcs = []
                with ranks_told_in_build(self._layer_specs) if is_planned else nullcontext():
                    super()._build()
                self._functions[stage] = [unpacking(function) for function in self.forward_funcs]
        finally:
            self._layer_specs = specs
        self._show_all()

    def _specs_to_build(self) -> list[Any]:
        specs = list(self._layer_specs)
        for tied in own_copies(self):
            for layer in () if tied.is_main else tied.form.layers:
                specs[layer] = copy.copy(specs[layer])
                specs[layer].key = tied.registered
        return specs

    def _index_tied_modules(self) -> dict[str, Any]:
        comms = super()._index_tied_modules()
        self._count_tied_weights_once(comms)
        return comms

    def _count_tied_weights_once(self, comms: dict[str, Any]) -> None:
        """Let the norm of all gradients count a tied weight once, and all else that copies have.

        DeepSpeed leaves out the whole module on every rank but the first.
        """
        for tied in own_copies(self):
            comm = comms.get(tied.form.key)
            if comm is None and tied.is_main:
                continue
            speaks = tied.is_main and comm is not None and self.global_rank == comm["ranks"][0]
            for parameter in self.tied_modules[tied.registered].parameters():
                parameter.ds_pipe_replicated = False
            weight: Any
            for weight in tied.tied_weights(self):
                weight.ds_pipe_replicated = not speaks

    def take_over(self) -> None:
        """Go on with the one stage that DeepSpeed has built.

        Raises:
            ValueError: with one module for layers that need two, or layers that share weights and are not tied.
        """
        for copies in several_of_a_key(self):
            first, second = (tied.form.layers[0] for tied in copies[:2])
            raise ValueError(
                f"layers {first} and {second} share the key {copies[0].form.key!r}, are built differently, and "
                "DeepSpeed has built one module for both: call deepspeed_partition.install() before the pipeline "
                "module is built, and give it partition_method='madpipe'"
            )
        if repeated := places_of_repeated(self._layer_specs):
            raise ValueError(
                f"layers {listed(repeated[0])} are one module object, and DeepSpeed has built them as modules of "
                f"their own: give the pipeline module partition_method='madpipe', which ties them, or {WAY_OUT}"
            )
        if reason := why_not_apart(self._layer_specs, self.loss_fn):
            raise ValueError(reason)
        [stage] = self.own_stages
        self.forward_funcs = [unpacking(function) for function in self.forward_funcs]
        self._functions = {stage: self.forward_funcs}
        self._checkpointable = {stage: self.is_checkpointable_results}
        self._num_forwards = {stage: self.micro_offset}
        self._shown = stage
        self._count_tied_weights_once(self.tied_comms)

    def let_go(self) -> None:
        """Forget the layers, before others take their places."""
        self._functions.clear()
        for name in ("_watched_blocks", "_shared_things", "_shared_buffers"):
            self.__dict__.pop(name, None)

    def _show(self, stage: int) -> None:
        self._shown = stage
        self.forward_funcs = self._functions[stage]
        self.is_checkpointable_results = self._checkpointable[stage]
        self._set_bounds(*self.allocation.stages[stage].layers)
        # What ``seed_layers`` counts micro-batches by.
        self.micro_offset = self._num_forwards[stage]

    def _show_all(self) -> None:
        """Be all stages of this rank, for which a script asks between two steps."""
        self._show(self.own_stages[0])
        self._known = [each for stage in self.own_stages for each in self._functions[stage]]
        self._listed = list(self._known)
        self._list_all()

    def _list_all(self) -> None:
        """List the layers of all stages; those of one are the list that runs."""
        if len(self.own_stages) > 1:
            self.__dict__["forward_funcs"] = self._listed

    def _take_listed(self) -> None:
        """Let stages run what a script has put into the list of the layers of all stages."""
        if len(self.own_stages) == 1 or all(map(is_, self._listed, self._known)):
            return
        places = [(stage, place) for stage in self.own_stages for place in range(len(self._functions[stage]))]
        for (stage, place), function, known in zip(places, self._listed, self._known, strict=True):
            if function is not known:
                self._functions[stage][place] = unpacking(function)
        self._known = list(self._listed)

    def count_forwards_from(self, num_forwards: int) -> None:
        """Go on as if each stage had run so often."""
        self._num_forwards = dict.fromkeys(self.own_stages, num_forwards)
        self.micro_offset = num_forwards

    def counts_of_forwards(self) -> Callable[[], None]:
        """Note how often each stage has run; return a function that puts it back."""
        num_forwards, micro_offset = dict(self._num_forwards), self.micro_offset

        def restore() -> None:
            self._num_forwards, self.micro_offset = dict(num_forwards), micro_offset

        return restore

    @contextmanager
    def active(self, stage: int) -> Iterator[None]:
        """Let this module be one of its stages."""
        self.activate(stage)
        try:
            yield
        finally:
            self.deactivate()

    def activate(self, stage: int) -> None:
        """Let this module be one of its stages, until :meth:`deactivate`."""
        own = self.__dict__  # past torch, which looks at each assignment for children
        if len(self.own_stages) > 1:
            self._take_listed()
        if stage == self._shown and self.forward_funcs is self._functions[stage]:
            own["micro_offset"] = self._num_forwards[stage]
        else:
            self._show(stage)
        own["_is_active"] = True

    def deactivate(self) -> None:
        """Let this module be all its stages again."""
        self.__dict__["_is_active"] = False
        self._num_forwards[self._shown] = self.micro_offset
        if len(self.own_stages) > 1:
            self._list_all()

    def forward(self, forward_input: Any) -> Any:
        if not self._is_active and not self.allocation.is_contiguous:
            raise RuntimeError(
                f"the stages of this module are on the ranks {self.device_of_stage}, which DeepSpeed's own engine "
                "cannot run: call deepspeed_partition.install() first, or start the engine by "
                "deepspeed_partition.engine.initialize"
            )
        own = self.__dict__
        if own.get("_shared_things") is None:
            own["_shared_things"], own["_stages_looked_at"] = self._things_of_layers(), set()
            own["_shared_buffers"] = self._buffers_of_layers()
        shared, stage = own["_shared_things"], self._shown
        look = stage, self.training
        try:
            if look in self._stages_looked_at:
                return self._run(forward_input)
            with shared.told(stage), self._shared_buffers.told(stage):
                outputs = self._run(forward_input)
            self._stages_looked_at.add(look)
            return outputs
        except MISSED as error:
            if explained := shared.explained(error, stage):
                raise explained from error
            raise

    def layers_alone(self, stage: int) -> Callable[[Any], Any] | None:
        """What does all that a :meth:`forward` of a stage does in this batch, if that is no more than its layers.

        It has run before, then, and nothing of it is recomputed; gradients are computed.
        """
        plan = self.madpipe_cut.plan if self.madpipe_cut is not None else None
        if (
            self._shared_things is None or (stage, self.training) not in self._stages_looked_at
            or self._within is not None or self.activation_checkpoint_interval or self.seed_layers
            or not self._has_no_own_forward() or (plan is not None and plan.stages[stage].blocks)
        ):  # fmt: skip
            return None

        def run(forward_input: Any) -> Any:
            try:
                return self._forward_in_turn(forward_input)
            except MISSED as error:
                # Not kept until then: it holds layers, which may leave before the next batch.
                if self._shared_things is not None and (explained := self._shared_things.explained(error, stage)):
                    raise explained from error
                raise

        return run

    def _run(self, forward_input: Any) -> Any:
        if self._within is not None:
            return self._within(self.micro_batch, lambda: self._forward(forward_input))
        return self._forward(forward_input)

    def _things_of_layers(self) -> SharedThings:
        """What the layers of several stages can reach; those of this rank are looked at as they were built."""
        built = self._built_layers()
        layers = [built.get(place, spec) for place, spec in enumerate(self._layer_specs)]
        return SharedThings(layers, self._stage_of_layers())

    def _buffers_of_layers(self) -> SharedBuffers:
        stages = self._stage_of_layers()
        return SharedBuffers(self._layer_specs, self._built_layers(), stages, self.device_of_stage)

    def _built_layers(self) -> dict[int, Any]:
        """The layers of this rank by their places."""
        stages = [(self.allocation.stages[stage].layers[0], self._functions[stage]) for stage in self.own_stages]
        return {first + place: each for first, functions in stages for place, each in enumerate(functions)}

    def _stage_of_layers(self) -> list[int]:
        return [number for number, stage in enumerate(self.allocation.stages) for _ in range(*stage.layers)]

    def _forward(self, forward_input: Any) -> Any:
        """Run the ``forward`` of the class of the module, which may be a program's own, around the layers."""
        if self._has_no_own_forward():
            return self._forward_of_layers(forward_input, is_replaced=False)
        own = self.__dict__
        own["_has_run_layers"] = False
        outputs = super().forward(forward_input)
        if not own["_has_run_layers"] and torch.is_grad_enabled() and self._recomputed_blocks():
            raise RuntimeError(
                f"{type(self).__name__}.forward runs the layers of a stage other than by super().forward(inputs), "
                "and the plan runs layers twice, which is done in there: call that, or plan without it "
                "(recompute='never')"
            )
        return outputs

    def _has_no_own_forward(self) -> bool:
        """Whether no class of the module has a ``forward`` but DeepSpeed's."""
        first = getattr(super().forward, "__func__", None)
        return first is _RunsLayers.forward and not _is_forward_replaced()

    def _forward_of_layers(self, forward_input: Any, *, is_replaced: bool) -> Any:
        """DeepSpeed's ``forward``, with what a plan has run twice or in halves.

        Args:
            forward_input: The input of the active stage.
            is_replaced: Whether a program has put its own ``forward`` into DeepSpeed's class.
        """
        blocks = self._recomputed_blocks()
        self.__dict__["_has_run_layers"] = not is_replaced
        if (blocks or self.activation_checkpoint_interval) and torch.is_grad_enabled() and not self._has_told:
            self._has_told = True
            tell_of_second_runs()
        is_plain = not is_replaced and not blocks and not self.activation_checkpoint_interval
        if is_plain and self._is_active and not self.seed_layers:
            return self._forward_in_turn(forward_input)
        if self._is_cut_for_halves() and is_plain:
            self.micro_offset += 1
            is_tuple = isinstance(forward_input, tuple)
            run = self._layers_in_turn(self._local_start, self._local_stop, is_tuple=is_tuple)
            return run(*(forward_input if is_tuple else (forward_input,)))
        if is_replaced or not blocks or not torch.is_grad_enabled():
            with self._checkpoints_where_gradients_begin():
                outputs = OF_DEEPSPEED.forward(self, forward_input)
            if not self._is_active:  # in DeepSpeed's own schedule
                self._num_forwards[self._shown] = self.micro_offset
            return outputs
        return self._forward_recomputing(forward_input, blocks)

    def _forward_in_turn(self, passed: Any) -> Any:
        """DeepSpeed's ``forward`` where nothing is checkpointed or seeded: one layer after the other."""
        own = self.__dict__
        own["micro_offset"] += 1
        if self._is_cut_for_halves():
            last = self._local_stop - 1
            for own["curr_layer"], function in enumerate(self.forward_funcs, self._local_start):
                passed = function(passed)
                passed = passed if self.curr_layer == last else own["halves"].cut_behind_first(passed)
            return passed
        for own["curr_layer"], function in enumerate(self.forward_funcs, self._local_start):
            passed = function(passed)
        return passed

    def _is_cut_for_halves(self) -> bool:
        """Whether the graph of a forward ends behind the first layers, whose input needs no gradient."""
        return self.halves is not None and self._shown == 0

    @contextmanager
    def _checkpoints_where_gradients_begin(self) -> Iterator[None]:
        """Let the layers of a checkpointed block train whose input has no gradient, such as the numbers of words.

        The outputs of DeepSpeed's default, a reentrant checkpoint, have a gradient only where an input has one.
        """
        checkpoint, within, micro_batch = self.activation_checkpoint_func, self._within, self.micro_batch
        is_default = checkpoint is checkpointing.checkpoint
        if not self.activation_checkpoint_interval:
            yield
            return

        def either(run: Callable[..., Any], *inputs: Any) -> Any:
            begins = not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
            chosen = checkpointing.non_reentrant_checkpoint if begins and is_default else checkpoint
            if torch.is_grad_enabled() and (layers := _layers_of(run)) is not None:
                first, last = (self._local_start + place for place in layers)
                run = self._watched_at_first(run, first, min(last, self._local_stop))
            run = _in_same_autocast(run)
            return chosen(run if within is None else _again_within(run, within, micro_batch), *inputs)

        self.activation_checkpoint_func = either
        try:
            yield
        finally:
            self.activation_checkpoint_func = checkpoint

    def changes_in_backward_told(self, stage: int) -> AbstractContextManager[None]:
        """Say what layers of a stage change in a backward, if nothing of it is recomputed by the plan."""
        plan = self.madpipe_cut.plan if self.madpipe_cut is not None else None
        if self.activation_checkpoint_interval or (plan is not None and plan.stages[stage].blocks):
            return nullcontext()
        return changes_in_backward_told(self._functions[stage], self.allocation.stages[stage].layers[0])

    def _recomputed_blocks(self) -> tuple[tuple[int, int], ...]:
        """The ranges of layers of the active stage that the plan recomputes."""
        if self.second_forward is not None:
            return ((self._local_start, self._local_stop),)
        plan = self.madpipe_cut.plan if self.madpipe_cut is not None else None
        return () if plan is None or not self._is_active else plan.stages[self._shown].blocks

    def _forward_recomputing(self, forward_input: Any, blocks: Sequence[tuple[int, int]]) -> Any:
        """DeepSpeed's ``forward``, whose checkpoints all have one length, with these ranges of layers instead."""
        self.micro_offset += 1
        # DeepSpeed's default for the first of two needs an input that has a gradient.
        checkpoint = self.activation_checkpoint_func
        if checkpoint is checkpointing.checkpoint:
            checkpoint = checkpointing.non_reentrant_checkpoint
        if self.halves is not None:  # which lets go of what the first half alone needs
            checkpoint = self.halves.checkpoint
        ends = sorted({self._local_start, self._local_stop, *(end for block in blocks for end in block)})
        passed = forward_input
        for block in itertools.pairwise(ends):
            is_tuple = isinstance(passed, tuple)
            tensors = passed if is_tuple else (passed,)
            run = self._layers_in_turn(*block, is_tuple=is_tuple)
            if block in blocks:
                run = self._watched_at_first(run, *block)
                versions = [version_of(tensor) for tensor in tensors]
                passed = _checkpointed(checkpoint, run, tensors)
                if versions != [version_of(tensor) for tensor in tensors]:
                    raise RuntimeError(
                        f"layers {block[0]} to {block[1]} change their input in place, and the plan wants them "
                        "run again from it: build that layer without inplace=True, or plan without recomputation"
                    )
            else:
                passed = run(*tensors)
        return passed

    def _layers_in_turn(self, first: int, last: int, *, is_tuple: bool) -> Callable[..., Any]:
        """What runs these layers of the active stage, now and again, with the same seeds.

        Args:
            first: The first layer.
            last: The one behind the last layer.
            is_tuple: Whether the first layer takes a tuple, which may have one tensor; else it takes the tensor.
        """
        functions = self.forward_funcs[first - self._local_start : last - self._local_start]
        seed = self.base_seed * (self.micro_offset + 1)
        second = self.second_forward
        cut = self.halves if self._is_cut_for_halves() else None
        last_layer = self._local_stop - 1
        first_state: Callable[[], None] | None = None

        def run(*tensors: Any) -> Any:
            nonlocal first_state
            again, first_state = first_state, first_state or drawn_state(functions)
            if second is not None:
                second.save(is_first=again is None)
            passed = tensors if is_tuple else tensors[0]
            with nullcontext() if again is None else _as_at_first(functions, again):
                for self.curr_layer, function in enumerate(functions, first):
                    if self.seed_layers:
                        (self.seed_fn or set_random_seed)(seed + self.curr_layer)
                    try:
                        passed = function(passed)
                    except MISSED as error:
                        if again is None:
                            raise
                        raise HandedOverError(
                            f"layer {self.curr_layer} ({name_of(function)}) raises {type(error).__name__}: {error}"
                            ". It runs again there, to be recomputed, and has not raised that in its first run. "
                            "If that has taken what is missed, such as a skip out of a dictionary, plan with "
                            f"recompute='never', or {HAND_IT_ON}"
                        ) from error
                    if cut is not None and again is None and self.curr_layer != last_layer:
                        passed = cut.cut_behind_first(passed)
            return passed

        chosen = _in_same_autocast(run)
        return chosen if self._within is None else _again_within(chosen, self._within, self.micro_batch)

    def _watched_at_first(self, run: Callable[..., Any], first: int, last: int) -> Callable[..., Any]:
        """What runs these layers, and says once which attributes they change in both runs of a micro-batch."""
        watched = self.__dict__.setdefault("_watched_blocks", set())
        if (first, last) in watched:
            return run
        functions = self.forward_funcs[first - self._local_start : last - self._local_start]
        return TwoRuns(functions, first, when_over=lambda: watched.add((first, last))).of(run)

    # DeepSpeed's methods for one stage, on each

    def _precompute_checkpointable_values(self) -> None:
        for stage in self.own_stages:
            self._show(stage)
            self.is_checkpointable_results_interval = None  # of the stage before
            super()._precompute_checkpointable_values()
            self._checkpointable[stage] = self.is_checkpointable_results
        self._show_all()

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._take_listed()
        for stage in self.own_stages:
            self._show(stage)
            super().save_state_dict(*args, **kwargs)
        self._show_all()

    def ckpt_layer_path_list(self, ckpt_dir: Any, local_layer_idx: int) -> list[str]:
        """Find files also in a folder with a bracket in its name, which DeepSpeed takes for a pattern."""
        return list(super().ckpt_layer_path_list(glob.escape(str(ckpt_dir)), local_layer_idx))

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        self._loads_stages = True
        self._take_listed()
        try:
            for stage in self.own_stages:
                self._show(stage)
                super().load_state_dir(*args, **kwargs)
        finally:
            self._loads_stages = False
            self._show_all()
        self._synchronize_tied_weights()

    def _synchronize_tied_weights(self) -> None:
        """Give all copies the weights of the first layer that has them.

        DeepSpeed gives them those of the lowest rank, which is the first layer's where stages follow the ranks.
        """
        if self._loads_stages:  # DeepSpeed calls this after each stage, and ranks have different numbers of them
            return
        for key, comm in self.tied_comms.items():
            tied = (isinstance(spec, TiedLayerSpec) and spec.key == key for spec in self._layer_specs)
            source = self._grid.stage_to_global(stage_id=self.stage_owner(list(tied).index(True)))
            with torch.no_grad():
                for name in comm["weight_attr"]:
                    weight = self._recursive_getattr(comm["module"], name)
                    dist.broadcast(weight, src=source, group=comm["group"])
        with torch.no_grad():
            for main, *others in several_of_a_key(self):
                for other in others:
                    for weight, own in zip(main.tied_weights(self), other.tied_weights(self), strict=True):
                        own.copy_(weight)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._take_listed()
        for stage in self.own_stages:
            self._show(stage)
            super().compile(*args, **kwargs)
        self._show_all()


class _RunsLayers(deepspeed.pipe.PipelineModule):
    """A base right in front of DeepSpeed's class: ``super().forward`` of a program's class comes to it."""

    _forward_of_layers: Callable[..., Any]

    def forward(self, forward_input: Any) -> Any:
        return self._forward_of_layers(forward_input, is_replaced=_is_forward_replaced())


def _is_forward_replaced() -> bool:
    """Whether a program has put its own ``forward`` into DeepSpeed's class."""
    return getattr(OF_DEEPSPEED.forward, "__globals__", None) is not vars(deepspeed.runtime.pipe.module)


@functools.cache
def _with_stages(module_class: Any) -> type:
    """Derive a class with stages, of the same name: by the name DeepSpeed knows some modules."""
    kept = {name: getattr(module_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    of_program = () if module_class is OF_DEEPSPEED else (module_class,)
    bases = (StagesModule, *of_program, _RunsLayers)
    return types.new_class(module_class.__name__, bases, exec_body=lambda namespace: namespace.update(kept))


def _layers_of(run: Callable[..., Any]) -> tuple[int, int] | None:
    """The layers of the active stage, from the first to behind the last, that what DeepSpeed checkpoints runs."""
    variables = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))
    if not {"start", "end"} <= variables.keys():
        return None
    return variables["start"].cell_contents, variables["end"].cell_contents


def _checkpointed(checkpoint: Callable[..., Any], run: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """What a checkpoint of ``run`` returns; a tuple of one tensor stays one, which DeepSpeed's takes apart."""
    is_tuple = False

    def noted(*given: Any) -> Any:
        nonlocal is_tuple
        outputs = run(*given)
        is_tuple = isinstance(outputs, tuple)
        return outputs

    outputs = checkpoint(noted, *tensors)
    return (outputs,) if is_tuple and not isinstance(outputs, tuple) else outputs


def _in_same_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` as within the present autocast: a backward, which is outside of it, may call it again."""
    device = torch.device(get_accelerator().device_name())
    autocast = autocast_on(device)

    def as_now(*inputs: Any) -> Any:
        with same_autocast(device, autocast):
            return run(*inputs)

    return as_now if autocast else run


def _again_within(run: Callable[..., Any], within: Within, micro_batch: int) -> Callable[..., Any]:
    """What runs layers, of which the first run is within already, and a second one in a backward is not."""
    has_run = False

    def run_again(*tensors: Any) -> Any:
        nonlocal has_run
        is_second, has_run = has_run, True
        return within(micro_batch, lambda: run(*tensors)) if is_second else run(*tensors)

    return run_again


def hold_stages(module: deepspeed.pipe.PipelineModule, allocation: Allocation) -> None:
    """Make ``module`` a :class:`StagesModule`, in place, whose layers are still to be built."""
    if not isinstance(module, StagesModule):
        module.__class__ = _with_stages(type(module))  # type: ignore[arg-type]
    module.place(allocation)


def hold_built_stages(module: deepspeed.pipe.PipelineModule) -> None:
    """Make a module that DeepSpeed has cut and built a :class:`StagesModule`, in place."""
    parts = [int(cut) for cut in module.parts]
    hold_stages(module, Allocation.contiguous(parts))
    module.cut_without_plan = parts
    module.take_over()


def owner(allocation: Allocation, layer: int) -> int:
    """The device of a layer."""
    return next(stage.device for stage in allocation.stages if layer < stage.layers[1])


def allocation_in_words(allocation: Allocation) -> str:
    """The boundaries, and the ranks of the stages where these do not follow one another."""
    if allocation.is_contiguous:
        return str(list(allocation.boundaries))
    return f"{list(allocation.boundaries)} on the ranks {[stage.device for stage in allocation.stages]}"


def allocation_of(source: Plan | deepspeed.pipe.PipelineModule) -> Allocation:
    """Return the device of each layer of a plan or of a module, and nothing else, so that two can be compared."""
    if isinstance(source, Plan):
        return Allocation(tuple(Stage(layers=stage.layers, device=stage.device) for stage in source.stages))
    return source.allocation if isinstance(source, StagesModule) else Allocation.contiguous(source.parts)


@contextmanager
def _as_at_first(functions: Sequence[Any], put_generators_back: Callable[[], None]) -> Iterator[None]:
    """Let layers run again as they ran at first, and leave no trace of it in buffers and generators."""
    present = drawn_state(functions)
    put_generators_back()
    try:
        with _unchanged_buffers(functions):
            yield
    finally:
        present()


@contextmanager
def _unchanged_buffers(functions: Sequence[Any]) -> Iterator[None]:
    """Put the buffers of layers, such as running statistics, back: their first run has changed them already."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for function in functions
        if isinstance(function, nn.Module)
        for module in function.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            put_back(buffer, value)
