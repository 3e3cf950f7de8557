"""A LightningModule whose layers lie on several ranks while it runs, and where they are when the run has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.pipeline.module import TooManyStagesError
from deepspeed_partition.engine.pipeline.parts import tensors_by_name
from deepspeed_partition.engine.repartition.layer_moves import begin_anew_if_changed, exchange_layers, has_layers
from deepspeed_partition.engine.runtime.collectives import gather_objects, reduced
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.planner.units import format_bytes
from deepspeed_partition.profiling.sources import users_names
from lightning_madpipe.checkpoint.layers_on_rank_zero import (
    BESIDE,
    MODULE,
    take_from_rank_zero,
    taken_in_words,
)
from lightning_madpipe.checkpoint.watched_copies import CHANGED, WAY_OUT
from lightning_madpipe.checkpoint.weight_copies import WeightCopies
from lightning_madpipe.checkpoint.whole_model import LayersOfUser, can_be_whole
from lightning_madpipe.compat.callback_patches import whole_module
from lightning_madpipe.compat.elsewhere import AFTER_A_RUN, ON_RANK_ZERO, Elsewhere
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.shared_buffers import SharedBuffers
from lightning_madpipe.compat.state_dict_names import one_device_names
from lightning_madpipe.module import (
    HOLDER,
    PIPELINE,
    PipelineCall,
    PipelineHolder,
    called_as_written,
    find_layers,
    frozen_beside,
    named_owners,
    pipeline_of,
    refuse_other_calls,
)
from lightning_madpipe.settings import fewer_stages
from lightning_madpipe.steps.views_of_weights import told_views


def layers_of(module: Any, captured: Callable[[], PipelineCall] | None = None) -> PipelineCall:
    """The layers of ``module``, also where they lie on several ranks.

    Args:
        captured: Finds the layers of a module that does not name them.

    Raises:
        ValueError: see :func:`find_layers`.
    """
    # Which layers a rank builds must not shift the random numbers that follow.
    with preserved_random_state(), in_reach(module):
        return find_layers(module, captured)


@contextmanager
def in_reach(module: Any) -> Iterator[None]:
    """Let the tensors of all layers be read, with the values that this rank has."""
    pipeline = pipeline_of(module)
    with nullcontext() if pipeline is None or pipeline.is_whole else pipeline.elsewhere.lifted():
        yield


class SpreadModel:
    """The layers of a LightningModule on the ranks of its pipeline.

    Args:
        module: The LightningModule.
        lightning: The package of its class.
        follow: Called with the group of the pipeline's ranks, on all of them, when layers have moved.
    """

    def __init__(self, module: Any, lightning: Lightning, follow: Callable[[Any], None]) -> None:
        self.module, self._lightning, self._follow = module, lightning, follow
        self._copies: WeightCopies | None = None
        self.buffers = SharedBuffers([])
        """The buffers that layers share with the module, or with each other."""
        self.told_views: str | None = None
        """What is to be said of tensors of the module that are views of its layers' weights."""

    @property
    def copies(self) -> WeightCopies:
        """The copies of the module's weights in callbacks and hooks, such as averages."""
        assert self._copies is not None, "they are looked for when layers are spread"
        return self._copies

    @property
    def pipeline(self) -> Any:
        """DeepSpeed's module with this rank's layers; None before the first run."""
        return pipeline_of(self.module)

    def spread(
        self,
        *,
        num_stages: int,
        base_seed: int,
        plan: str | None,
        end_engine: Callable[[], None],
        captured: Callable[[], PipelineCall],
    ) -> None:
        """Let each rank have its own layers only, where a run before had them, if there was one. Collective.

        Args:
            num_stages: The stages of the pipeline.
            base_seed: The seed of layers that are built; the same on every rank.
            plan: The path of the plan that is given.
            end_engine: Ends the engine of a run before, where the layers get another pipeline.
            captured: Finds the layers of a module that does not name them.

        Raises:
            MisconfigurationException: the layers lie on the ranks of another pipeline, or are too few to train.
        """
        module, pipeline, call = self.module, self.pipeline, layers_of(self.module, captured)
        layers = [layer for _, layer in call.existing_modules()]
        self.buffers = SharedBuffers([module, *layers])
        if pipeline is None and num_stages > 1:  # so that all weights are here, as the user has made them
            self.told_views = told_views(module, layers)
        if pipeline is not None:
            is_same = pipeline.num_stages == num_stages and has_layers(pipeline, call.layers)
            self._refuse_layers_of_one_rank(is_same)
            if is_same:
                self._hand_back_of_rank_zero()
                exchange_layers(pipeline, call.layers)
                if plan is not None:
                    # The cut is that of the Trainer before, and this one asks for its own plan.
                    pipeline.madpipe_cut = replace(pipeline.madpipe_cut, is_of_a_run=True)
            elif self.is_whole_everywhere():
                end_engine()
                object.__delattr__(module, HOLDER)
                pipeline = None
            else:
                raise self._lightning.refusal(
                    f"this {type(module).__name__} lies in {pipeline.num_stages} stages, and has other layers now "
                    f"or is to run in num_stages={num_stages}: bring its layers together first, with "
                    "trainer.strategy.gather_model() on every rank"
                )
        if pipeline is None:
            self._take_from_rank_zero(self._unnamed(call))
            try:
                pipeline = _built_pipeline(call, type(module).__name__, num_stages, base_seed, plan)
            except TooManyStagesError as error:
                raise self._refusal_of(error) from None
        pipeline.call_of_module = call
        self.buffers.share()  # which DeepSpeed's module has brought to its device
        pipeline.one_device_names = one_device_names(module, call)
        whole = whole_module(module, call)
        pipeline.whole_module = lambda: whole  # not as a child of the pipeline
        pipeline.elsewhere = Elsewhere(module, pipeline)
        pipeline.whole_in_reach = pipeline.elsewhere.lifted
        pipeline.train = pipeline.elsewhere.take_over_modes
        if pipeline.num_stages > 1:
            pipeline.allow_calls()
            pipeline.allow_calls = refuse_other_calls(module, call.attribute, self._lightning.refusal)
        if call.captured is not None:
            call.captured.let_reach(self._all_can_run)
        for name, part in module.named_modules():
            if name:
                users_names[part] = f"self.{name}"
        # Not a child: the layers have the user's names, and no others.
        object.__setattr__(module, HOLDER, PipelineHolder(pipeline))
        pipeline.elsewhere.hide()
        pipeline.is_whole = False
        pipeline.layers_of_user.on_rank_zero.note(None)
        ignored = {*vars(self._lightning.module_class()), HOLDER}
        self._copies = WeightCopies(module, lambda: named_owners(module), ignored, pipeline)
        pipeline.when_layers_moved = self._follow_layers
        pipeline.when_layers_moved()
        self._say_what_is_beside(call)
        # Lightning's summary would run it through the whole model, of which this rank has a part.
        if module.example_input_array is not None:
            pipeline.example_input_array, module.example_input_array = module.example_input_array, None

    def _refuse_layers_of_one_rank(self, is_same: bool) -> None:
        """Refuse layers that some ranks have replaced since the run before, and others not. Collective.

        Args:
            is_same: Whether this rank has the same layers.
        """
        with_others = [rank for rank, same in enumerate(gather_objects(is_same)) if not same]
        if 0 < len(with_others) < dist.get_world_size():
            raise self._lightning.refusal(
                f"rank {with_others[0]} has other layers of this {type(self.module).__name__} than in the run "
                "before, and other ranks have those: call trainer.strategy.gather_model() on every rank, and "
                "change layers on every rank"
            )

    def follow_rank_zero(self) -> None:
        """Let what rank 0 has of the module count, where every rank has all of it. Collective.

        Raises:
            MisconfigurationException: it has other tensors there.
        """
        pipeline = self.pipeline
        if pipeline is None:  # whose layers are not known yet
            self._take_from_rank_zero({MODULE: self.module})
        elif self.is_whole_everywhere() and not pipeline.layers_of_user.are_with_engine:
            # An engine to which layers are lent, to be saved, has those of this rank in its own types.
            self._take_from_rank_zero({MODULE: self.module, **self._unnamed(pipeline.call_of_module)})

    def hand_back(self) -> None:
        """Let what a script has changed on rank 0 alone since a run be on the other ranks. Collective.

        Raises:
            MisconfigurationException: it has other tensors there.
        """
        if self.pipeline.layers_of_user.on_rank_zero.is_there:
            self._hand_back_of_rank_zero()
        else:
            self.follow_rank_zero()

    def _hand_back_of_rank_zero(self) -> None:
        """Let what a script has changed on rank 0, where that alone has all layers, be on their ranks. Collective.

        Raises:
            MisconfigurationException: it has other tensors there.
        """
        layers = self.pipeline.layers_of_user
        try:
            if layers.on_rank_zero.is_there:
                with in_reach(self.module):
                    layers.on_rank_zero.hand_back(self._layers_and_beside())
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None

    def _take_from_rank_zero(self, modules: dict[str, nn.Module]) -> None:
        if dist.get_world_size() == 1:
            return
        try:
            words = taken_in_words(take_from_rank_zero(modules))
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None
        if words is not None and dist.get_rank() == 0:
            warn_once(f"taken/{words}", words)

    def _unnamed(self, call: PipelineCall) -> dict[str, nn.Module]:
        """The layers that are not in the module, so that its user has no names for them."""
        named = {
            id(tensor)
            for name, tensor in tensors_by_name(self.module).items()
            if not name.startswith(f"{PIPELINE}.")  # where those of this rank are
        }
        return {
            str(owner): layer
            for owner, layer in call.existing_modules()
            if any(id(tensor) not in named for tensor in tensors_by_name(layer).values())
        }

    def begin_anew_if_changed(self) -> None:
        """Let a fit that trains other weights than the one before be measured and planned anew. Collective.

        Raises:
            MisconfigurationException: too few layers train.
        """
        try:
            begin_anew_if_changed(self.pipeline)
        except TooManyStagesError as error:
            raise self._refusal_of(error) from None
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None

    def _refusal_of(self, error: TooManyStagesError) -> Exception:
        way_out = fewer_stages(error.most, dist.get_world_size())
        return self._lightning.refusal(f"{type(self.module).__name__}: {error.what}: {way_out}")

    def _say_what_is_beside(self, call: PipelineCall) -> None:
        """Say once which frozen modules beside the layers every rank has."""
        owned = {weight for _, layer in call.existing_modules() for weight in layer.parameters()}
        names = {id(part): name for name, part in self.module.named_modules()}
        found = [] if self.pipeline.num_stages == 1 else frozen_beside(self.module, owned)
        for part in found if call.captured is None else ():
            size = format_bytes(sum(weight.nbytes for weight in part.parameters()))
            name = names[id(part)]
            warn_once(
                f"beside/{name}",
                f"self.{name} ({size}) is frozen and beside the layers: every rank has all of it, which "
                "the plan does not count, and steps may call it",
            )

    @contextmanager
    def _all_can_run(self) -> Iterator[None]:
        """Let the whole module be run without data, where layers are on other ranks."""
        target = self.pipeline.call_of_module.target(self.module)
        with in_reach(self.module), called_as_written(target):
            yield

    def _follow_layers(self) -> None:
        """Let what a rank has of its layers, or knows of them, be where they are now. Collective."""
        group = self.pipeline.mpu().get_pipe_parallel_group()
        self.copies.follow(group)
        self._follow(group)

    def refuse_copies_that_stay(self) -> None:
        """Refuse modules that average the weights of this rank's layers, which may leave it.

        Raises:
            MisconfigurationException: there is one.
        """
        found = self.copies.modules() if self.pipeline.num_stages > 1 else []
        if found:
            raise self._lightning.refusal(
                f"{', '.join(found)} is a copy of the layers that this rank has now, and they move when the "
                f"plan is made: {WAY_OUT}; or run a saved plan, MadPipeStrategy(plan=...), with which none moves"
            )

    def look_at_orders(self) -> None:
        """Learn the orders of lists of copies from their values; called before each step."""
        self.copies.early.tell()
        if self.pipeline.num_stages > 1:
            self.copies.look_at_orders()

    def copies_have_changed(self) -> bool:
        """Whether copies of layers, made before these were spread, have changed; asked before each step."""
        return self.pipeline.num_stages > 1 and self.copies.watched.have_changed()

    def refuse_changed_copies(self) -> None:
        """Refuse copies of layers that a hook changes, on each rank by its own layers. Collective over a pipeline.

        Raises:
            MisconfigurationException: there is one; on every rank.
        """
        if found := self._changed_copies():
            raise self._lightning.refusal(found)

    def say_changed_copies(self) -> None:
        """Name those that have changed after the last look before a step. Collective over a pipeline."""
        if found := self._changed_copies():
            warn_once(f"changed copies/{found}", found)

    def _changed_copies(self) -> str:
        if self.pipeline.num_stages == 1:
            return ""
        found = self.copies.watched.unlike(self.pipeline.mpu().get_pipe_parallel_group())
        return CHANGED.format(places=" and ".join(found), way_out=WAY_OUT) if found else ""

    def is_whole_everywhere(self) -> bool:
        """Whether every rank has all layers. Collective."""
        [is_whole] = reduced([int(self.pipeline.is_whole)], dist.ReduceOp.MIN)
        return bool(is_whole)

    def gather(self, place: str, *, is_rank_zero: bool) -> None:
        """Put the whole model on every rank, or on rank 0; where there is no room, say so. Collective.

        Args:
            place: ``every_rank`` or ``rank_zero``.
            is_rank_zero: Whether this is rank 0.
        """
        pipeline, module = self.pipeline, self.module
        if not can_be_whole(pipeline):
            self.stay_spread(AFTER_A_RUN)
            return
        with pipeline.elsewhere.lifted():
            reason = pipeline.layers_of_user.gather(place)
            if reason is None:
                on_rank_zero = self._layers_and_beside() if place == "rank_zero" else None
                pipeline.layers_of_user.on_rank_zero.note(on_rank_zero)
        if reason is not None:
            announce(
                f"the whole model is not put on {place.replace('_', ' ')}, because {reason}: each rank keeps its "
                "own layers, and whole_model='rank_zero' or 'none' asks for less",
                logging.WARNING,
            )
            self.stay_spread(AFTER_A_RUN)
            return
        if place == "rank_zero" and not is_rank_zero:
            self.stay_spread(ON_RANK_ZERO)
        else:
            pipeline.elsewhere.show()
            pipeline.whole_in_reach = self._refuse_moves
            pipeline.allow_calls()
            pipeline.is_whole = True
            if pipeline.example_input_array is not None:
                module.example_input_array = pipeline.example_input_array
        pipeline.when_layers_moved()  # on every rank: those that stay spread give theirs
        self.copies.complete_modules(pipeline.mpu().get_pipe_parallel_group(), place)

    def _layers_and_beside(self) -> dict[str, nn.Module]:
        """All layers by their names in the pipeline, and what the module has beside them."""
        layers = self.pipeline.layers_of_user.layers()
        of_layers = {id(tensor) for layer in layers.values() for tensor in tensors_by_name(layer).values()}
        beside = nn.Module()
        for name, tensor in tensors_by_name(self.module).items():
            if id(tensor) not in of_layers:
                table: dict[str, Any] = beside._parameters if isinstance(tensor, nn.Parameter) else beside._buffers
                table[name] = tensor  # a name with dots, which torch's functions refuse
        return {**layers, BESIDE: beside}

    def stay_spread(self, sentence: str) -> None:
        """Leave each rank with its own layers after a run; ``sentence`` is said to whoever reads another one."""
        self.pipeline.elsewhere.sentence = sentence
        self.pipeline.elsewhere.hide()

    def _refuse_moves(self) -> Any:
        raise self._lightning.refusal(
            "layers move in a run only, and this one has ended: call recut in a hook of fit"
        )


def _built_pipeline(
    call: PipelineCall, name: str, num_stages: int, base_seed: int, plan: str | None
) -> PipelineModule:
    with preserved_random_state():
        pipeline = PipelineModule(
            layers=call.layers,
            num_stages=num_stages,
            plan=plan,
            seed_layers=any(isinstance(layer, LayerSpec) for layer in call.layers),
            base_seed=base_seed,
        )
    # The seeds make a LayerSpec the same layer on any rank. In training they would reset everybody's
    # random numbers before each layer.
    pipeline.seed_layers = False
    pipeline.model_name = name  # which the plan names
    pipeline.engine = lambda: None
    pipeline.layers_of_user = LayersOfUser(pipeline)
    if plan is not None:  # which is that of a Trainer, and not of the module
        pipeline.madpipe_cut = replace(pipeline.madpipe_cut, is_of_a_run=True)
    pipeline.allow_calls = lambda: None
    pipeline.example_input_array = None
    return pipeline
