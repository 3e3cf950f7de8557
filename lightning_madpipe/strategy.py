"""The Lightning strategy: DeepSpeed's pipeline engine, planned by MadPipe, under an unchanged LightningModule.

One Lightning batch is what one pipeline consumes at once. The strategy cuts it into micro-batches and hands
those of one optimizer step to ``engine.train_batch``. Every rank of a pipeline reads the same batches: the
first stage uses their inputs, and only the last one runs the whole ``training_step``. What that logs is sent
to the other ranks and logged there again, so that callbacks decide alike everywhere.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec

from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.repartition.layer_moves import exchange_layers, has_layers
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import in_words, is_raised_by_all
from deepspeed_partition.engine.runtime.joining import watch_joining
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.options import Options
from deepspeed_partition.planner.plan import Plan
from lightning_madpipe.checkpoint.saving import Checkpointing
from lightning_madpipe.checkpoint.weight_copies import WAY_OUT, WeightCopies, refusals_of_averages
from lightning_madpipe.checkpoint.whole_model import PLACES, LayersOfUser, can_be_whole
from lightning_madpipe.compat.callback_patches import count_pipelines, summarize_whole, whole_module
from lightning_madpipe.compat.elsewhere import AFTER_A_RUN, AFTER_AN_EXCEPTION, ON_RANK_ZERO, Elsewhere
from lightning_madpipe.compat.optimizers import configured_optimizer
from lightning_madpipe.compat.state_dict_names import one_device_names
from lightning_madpipe.compat.unsupported import (
    all_at_once,
    clips_by_value,
    layers_of_statistics,
    notes_on,
    notes_on_hooks,
    notes_on_statistics,
    refusals_of,
    refusals_of_callbacks,
    refusals_of_hooks,
    refusals_of_normalization,
)
from lightning_madpipe.groups import PipelineGroups
from lightning_madpipe.module import (
    HOLDER,
    PipelineCall,
    PipelineHolder,
    find_layers,
    pipeline_of,
    refuse_other_calls,
)
from lightning_madpipe.planning import WarmUpOfFit, folder_of_logs, note_on_resuming
from lightning_madpipe.settings import check_count, checked_settings, read_config
from lightning_madpipe.steps.forward_reads import Read
from lightning_madpipe.steps.layer_check import Verdict, check_layers
from lightning_madpipe.steps.loss_mode import LOSSES
from lightning_madpipe.steps.metrics import gather_between_pipelines
from lightning_madpipe.steps.runner import BatchRunner
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.what_layers_set import LayerTraces, left_by_code

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage by default: P equal stages then work 4 P / (5 P - 1) of a step, over 80 %."""


class PipelineStrategy(PipelineGroups, Checkpointing):
    """Pipeline parallelism on a cut that is planned from measurements of the model's own layers.

    ``Trainer(strategy="madpipe", devices=4)``, or ``MadPipeStrategy(...)`` with arguments, all optional:

    Args:
        num_stages: Stages of a pipeline. It divides the number of processes; the rest is data parallel.
            None: all processes.
        num_micro_batches: Pieces that each Lightning batch is cut into. None: 4 per stage. A batch of fewer
            samples gives a piece per sample.
        warmup_epochs: Epochs on a trial cut, in which layers are measured while they train; then the plan is made
            and layers move. 0: they are measured one by one on the first micro-batch, before the first optimizer
            step, as where nothing would be trained after the warm-up.
        stage: ZeRO stage, 0 or 1.
        loss: ``"auto"`` finds out, before the first step and wherever batches give a reason to, how the loss of a
            batch comes from those of its micro-batches: as their mean, weighted by samples, or by labels that are
            not ignored and the like; else, as ``"batch"`` always does, the step runs once on all outputs of a
            batch, so that all forwards of a batch come before its first backward. ``"mean"`` asks for the mean
            over micro-batches, whatever the loss is, and runs evaluation per micro-batch, too.
        memory: Bytes of each device, also ``"16GB"``. None: the device's own; on a CPU the machine's memory
            divided by its processes.
        bandwidth: Bytes per second between neighbours, also ``"12GB/s"``. None: measured.
        latency_seconds: None: measured.
        weight_copies: None: from the optimizer and the precision.
        algorithm: The name of a planner, or boundaries, on which a run begins with ``warmup_epochs=0``.
        warmup_steps: In the place of ``warmup_epochs``, in optimizer steps.
        plan: A plan file, which is run as it is, without measuring.
        save_plan: Where the plan is written. None: ``madpipe-plan.json`` in the logger's directory, if it has one.
        time_limit_seconds: For planning.
        save_timeline: Where it is written when each operation of the first steps ran.
        checkpoint_checksums: Whether a checkpoint gets a checksum of each file, and whether those are verified
            before it is loaded; left out, yes.
        unpickle: Whether files of a checkpoint may be unpickled, which can run any code: True, all of them; False,
            none; left out, only those with objects of classes of your own, which is said.
        patience_seconds: After so long without progress the log says which rank waits for which. 0: it does not.
            None: 20.
        whole_model: Where all layers have their trained values when ``fit``, ``validate``, ``test`` or ``predict``
            has returned: ``"every_rank"`` (the default), ``"rank_zero"``, or ``"none"``. Elsewhere, and where
            memory is short, to read a layer of another rank raises; ``gather_model()`` brings them later.
        check_layers: Compare ``pipeline_layers()`` with what ``forward`` computes, before the first step of a fit,
            in training and in evaluation, and refuse where they differ. One process does it, in two forwards and
            two backwards of one micro-batch through the whole model, on copies, which take three times its weights
            with the gradients; layer by layer where that does not fit. False: the list is trained as it is.
        config: DeepSpeed configuration, a dict or the path of a JSON file. Its own ``pipeline.madpipe`` gives
            the options that are not given here.
        cluster_environment: As in Lightning's ``DeepSpeedStrategy``.
        process_group_backend: As there. None: NCCL on CUDA, gloo on a CPU.
        timeout: As there, for communication.

    Raises:
        ValueError: a malformed argument, or an unknown one, with the known ones.

    Limits: the part of a step after its call of ``forward`` runs on the last stage only. The other ranks learn
    what it logs, returns and leaves behind on the module when the batch is through; it may wait for the last
    stages of other pipelines and for nobody else. ``training_step`` runs once per micro-batch, or once per batch
    where ``loss`` says so. ``on_after_backward`` comes once per optimizer step. On a rank that does not run the
    layer ``module.head`` nobody can read its weights until the run has ended. Checkpoints are DeepSpeed's
    directories; those of weights only are ordinary Lightning files of the whole model. FEATURES.md goes through
    the rest.
    """

    strategy_name = "madpipe"
    namespace: str
    """``pytorch_lightning`` or ``lightning.pytorch``."""
    config: dict[str, Any]
    options: Options
    """The options of planning, from the arguments and from ``pipeline.madpipe`` of the configuration."""

    def __init__(
        self,
        *,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        warmup_epochs: int = 1,
        stage: int = 0,
        loss: str = "auto",
        memory: int | str | None = None,
        bandwidth: float | str | None = None,
        latency_seconds: float | str | None = None,
        weight_copies: float | None = None,
        algorithm: str | Sequence[int] | None = None,
        warmup_steps: int | None = None,
        plan: str | Path | None = None,
        save_plan: str | Path | None = None,
        time_limit_seconds: float | None = None,
        save_timeline: str | Path | None = None,
        checkpoint_checksums: bool | None = None,
        unpickle: bool | None = None,
        patience_seconds: float | None = None,
        whole_model: Literal["every_rank", "rank_zero", "none"] = "every_rank",
        check_layers: bool = True,
        config: Mapping[str, Any] | str | Path | None = None,
        cluster_environment: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        **unknown: Any,
    ) -> None:
        if unknown:
            known = [name for name in inspect.signature(type(self)).parameters if name != "unknown"]
            raise ValueError(
                f"unknown argument {', '.join(unknown)} of MadPipeStrategy: known are {', '.join(known)}"
            )
        check_count("num_stages", num_stages, least=1)
        check_count("num_micro_batches", num_micro_batches, least=1)
        if warmup_epochs is None:
            raise ValueError("warmup_epochs is None, not a whole number of at least 0")
        check_count("warmup_epochs", warmup_epochs, least=0)
        if whole_model not in PLACES:
            raise ValueError(f"whole_model is {whole_model!r}, not one of {', '.join(map(repr, PLACES))}")
        if stage not in (0, 1):
            raise ValueError(f"stage is {stage!r}: a pipeline works with ZeRO stage 0 or 1")
        if loss not in LOSSES:
            raise ValueError(f"loss is {loss!r}: it is one of {', '.join(map(repr, LOSSES))}")
        self.loss = loss
        super().__init__(
            zero_optimization=stage > 0,
            stage=stage,
            config=read_config(config),
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        arguments = {
            "memory": memory,
            "bandwidth": bandwidth,
            "latency_seconds": latency_seconds,
            "weight_copies": weight_copies,
            "algorithm": algorithm,
            "warmup_steps": warmup_steps,
            "plan": None if plan is None else str(plan),
            "save_plan": None if save_plan is None else str(save_plan),
            "time_limit_seconds": time_limit_seconds,
            "save_timeline": None if save_timeline is None else str(save_timeline),
            "checkpoint_checksums": checkpoint_checksums,
            "unpickle": unpickle,
            "patience_seconds": patience_seconds,
        }
        self.config, self.options, counts_steps = checked_settings(self.config, arguments, stage)
        self._given_config = self.config
        num_steps = self.options.warmup_steps
        if warmup_epochs > 1 and num_steps:
            raise ValueError(f"warmup_epochs is {warmup_epochs} and warmup_steps is {num_steps}: give one of them")
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.check_layers = check_layers
        # One epoch is what nobody asked for.
        self.warmup_epochs = 0 if warmup_epochs == 1 and counts_steps else warmup_epochs
        self.whole_model = whole_model
        self._warm_up: WarmUpOfFit | None = None
        self._let_metrics_go: Callable[[], None] = lambda: None
        self._engine: MadPipeEngine | None = None
        self._runner: BatchRunner | None = None
        self._base_seed = 0
        self._batch_numbers = count(1)
        self._is_first_batch = False
        self._all_are_here = False
        self._noted: set[str] = set()

    # What is there after setup

    @property
    def deepspeed_engine(self) -> MadPipeEngine:
        """The pipeline engine. ``trainer.model`` stays the LightningModule."""
        assert self._engine is not None, "setup() starts it"
        return self._engine

    @property
    def plan(self) -> Plan | None:
        """The plan that is run; None before it is made, and where the cut has another origin."""
        return None if self._engine is None else self._engine.plan

    @property
    def pipeline(self) -> PipelineModule:
        """DeepSpeed's module with this rank's layers, which stay the LightningModule's where the user put them."""
        return pipeline_of(self._module)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of the data's sampler: ranks of one pipeline read the same data, pipelines share it."""
        grid = self.pipeline.mpu()
        return {"num_replicas": grid.get_data_parallel_world_size(), "rank": grid.get_data_parallel_rank()}

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the strategy accumulates gradients by itself. It does not: Lightning says when a window of
        batches is full, the short last one of an epoch included."""
        return False

    @property
    def wraps_optimizer(self) -> bool:
        """Whether DeepSpeed puts an optimizer of its own around the user's, on flat copies of the weights."""
        low = self.precision_plugin.precision != "32-true"
        low = low or any(self.config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
        return low or self.config.get("zero_optimization", {}).get("stage", 0) > 0

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None, "the Trainer connects it"
        return self.lightning_module

    def _resolved_num_stages(self) -> int:
        num_stages = self.num_stages or self.world_size
        if self.world_size % num_stages != 0:
            raise self._refusal(
                f"num_stages={num_stages} does not divide the {self.world_size} processes: each pipeline has "
                "num_stages of them"
            )
        return num_stages

    def _resolved_num_micro_batches(self) -> int:
        num_stages = self._resolved_num_stages()
        default = MICRO_BATCHES_PER_STAGE * num_stages if num_stages > 1 else 1
        return self.num_micro_batches or default

    # Processes and devices

    def setup_environment(self) -> None:
        watch.begin_anew()
        environment = self.cluster_environment
        launched = environment is not None and not environment.creates_processes_externally
        watch_joining(os.getppid() if launched and self.local_rank > 0 else None)
        kind = self.root_device.type
        if kind not in ("cpu", "cuda"):
            raise self._refusal(f"the madpipe strategy runs on CPUs and CUDA devices, not on {kind}")
        reasons = list(refusals_of_callbacks(self._module.trainer, self._lightning("callbacks")))
        if self._module.trainer.state.fn == "fit" and reasons:
            # Their own setup hooks, which come next, would speak of a DeepSpeed strategy.
            base = self._lightning("core.module").LightningModule
            reasons = list(refusals_of(self._module.trainer, self._module, base, self._lightning("callbacks")))
            raise self._refusal(all_at_once(type(self._module).__name__, reasons))
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self.setup_distributed()

    def setup_distributed(self) -> None:
        chosen, wanted = get_accelerator().device_name(), self.root_device.type
        if chosen != wanted:
            raise self._refusal(
                f"DeepSpeed runs on {chosen} and the Trainer on {wanted}: set DS_ACCELERATOR={wanted} in the "
                "environment"
            )
        if wanted == "cuda":
            super().setup_distributed()
        else:
            # Lightning's method also validates CUDA indices.
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        yield

    # Building the pipeline and its engine

    def setup(self, trainer: Any) -> None:
        module = self._module
        # Anew each time: the Trainer may have other settings than in the fit before.
        self.config, self._config_initialized = copy.deepcopy(self._given_config), False
        self._init_config_if_needed()
        base, callbacks = self._lightning("core.module").LightningModule, self._lightning("callbacks")
        self._refuse_what_cannot_run(trainer)
        self.accelerator.setup(trainer)  # type: ignore[union-attr]
        self.precision_plugin.convert_module(module)
        # Every rank takes its seeds from rank 0: one model and one course, however the layers are cut.
        self._base_seed = self.broadcast(torch.initial_seed() % 2**31)
        self._spread_layers()
        # An RNN reads its own weights when it is moved, also one that another rank runs; these are on the CPU.
        with self.pipeline.elsewhere.lifted() if self.root_device.type == "cpu" else nullcontext():
            module.to(self.root_device)
        self._start_engine(trainer)
        self.model = module
        self._watch_dumps(trainer)
        if trainer.state.fn == "fit":
            self._prepare_callbacks(trainer, base, callbacks)
        self._start_runner(trainer)
        self._take_sigterm(trainer)
        self.barrier()

    def _take_sigterm(self, trainer: Any) -> None:
        """Let SIGTERM to any rank end all of them, after the batch that runs.

        Lightning's handler (2.6) broadcasts from within: it may have stopped its rank in the middle of a transfer
        that the others wait for, and they never come to the broadcast.
        """
        connector, engine = trainer._signal_connector, self.deepspeed_engine
        asked = False

        def note(number: int, _: Any) -> None:
            nonlocal asked
            if not asked and self.launcher is not None:
                self.launcher.kill(number)  # its processes have handlers like this one
            asked = True

        def stop() -> None:
            connector.received_sigterm = True
            announce("some rank was asked to end by SIGTERM: all ranks end after this batch", logging.WARNING)

        # Attributes of Lightning (2.5 to 2.6), which registers the method after setup() and reads the flag at the
        # end of each batch.
        connector._sigterm_notifier_fn = note
        # Before each batch of training it tells all ranks what rank 0 knows, which they know here.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        engine.wants_to_stop = lambda: asked and not connector.received_sigterm
        engine.when_asked_to_stop = stop
        engine.data_ends_with_batch = True

    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks hear of an exception that this one has met alone."""
        super().on_exception(exception)
        if not is_raised_by_all(exception):
            what = self._module.trainer.state.fn.value
            watch.tell_that_this_rank_leaves(f"left {what}() with {in_words(exception)}")
            if self._engine is not None:
                self._engine.tell_at_next_batch(exception)
        if is_raised_by_all(exception) and isinstance(exception, Exception):
            watch.begin_anew()  # all are here, and may go on
        self._all_are_here = is_raised_by_all(exception)

    def _refuse_what_cannot_run(self, trainer: Any) -> None:
        """Give all reasons at once, before anything is built."""
        module, fitting = self._module, trainer.state.fn == "fit"
        base, callbacks = self._lightning("core.module").LightningModule, self._lightning("callbacks")
        reasons = list(refusals_of(trainer, module, base, callbacks))
        averages = list(refusals_of_averages(module, _named_owners(module))) if fitting else []
        reasons += averages or self._flaws_of_layers()
        if reasons and fitting:
            reasons += self._flaws_of_optimizer()
        if reasons:
            raise self._refusal(all_at_once(type(module).__name__, reasons))

    def _flaws_of_layers(self) -> list[str]:
        module, num_stages = self._module, self._resolved_num_stages()
        try:
            call = self._found_layers()
        except ValueError as flaw:
            return list(flaw.args)
        num_layers = len(call.layers)
        flaws = [*refusals_of_normalization(module, num_stages), *refusals_of_hooks(module, call)]
        if num_layers >= num_stages:
            return flaws
        return [
            *flaws,
            f"{type(module).__name__} has {num_layers} pipeline layers for {num_stages} stages: take fewer "
            "stages, or finer layers",
        ]

    def _flaws_of_optimizer(self) -> list[str]:
        """What else would be refused, where the run is refused anyway."""
        configure = self._lightning("core.optimizer")._init_optimizers_and_lr_schedulers
        weights = set(self._module.parameters())
        try:
            configured_optimizer(configure, self._module, weights, flattened=self.wraps_optimizer)
        except ValueError as flaw:
            return [str(flaw)]
        except Exception as flaw:  # the user's code, in a run that does not begin
            return [f"configure_optimizers raises {type(flaw).__name__}: {flaw}"]
        return []

    def _prepare_callbacks(self, trainer: Any, base: Any, callbacks: Any) -> None:
        defaults = [kind.on_before_backward for kind in (base, callbacks.Callback)]
        with self.pipeline.elsewhere.lifted():
            hooks = list(notes_on_hooks(self._module, self.pipeline.call_of_module))
        for note in [*notes_on(trainer, self._module, defaults), *hooks]:
            self._lightning("utilities.rank_zero").rank_zero_warn(f"madpipe: {note}")
        whole = self.pipeline.whole_module()
        for callback in trainer.callbacks:
            if whole is not None and isinstance(callback, callbacks.ModelSummary):
                summarize_whole(self, whole, callback, self._lightning("utilities.model_summary").summarize)
            if isinstance(callback, callbacks.ThroughputMonitor):
                num_stages = self.pipeline.num_stages
                count_pipelines(callback, num_pipelines=self.world_size // num_stages, num_stages=num_stages)

    def _found_layers(self) -> PipelineCall:
        pipeline = pipeline_of(self._module)
        is_whole = pipeline is None or pipeline.is_whole
        # Which layers a rank builds must not shift the random numbers that follow.
        with preserved_random_state(), nullcontext() if is_whole else pipeline.elsewhere.lifted():
            return find_layers(self._module)

    def _spread_layers(self) -> None:
        """Let each rank have its own layers only, where a run before had them, if there was one."""
        module, pipeline, call = self._module, pipeline_of(self._module), self._found_layers()
        if pipeline is not None:
            if pipeline.num_stages == self._resolved_num_stages() and has_layers(pipeline, call.layers):
                exchange_layers(pipeline, call.layers)
            elif self._is_whole_everywhere():
                self._stop_engine()
                object.__delattr__(module, HOLDER)
                pipeline = None
            else:
                raise self._refusal(
                    f"this {type(module).__name__} lies in {pipeline.num_stages} stages, and has other layers now "
                    f"or is to run in num_stages={self._resolved_num_stages()}: bring its layers together first, "
                    "with trainer.strategy.gather_model() on every rank"
                )
        if pipeline is None:
            pipeline = self._built_pipeline(call)
        pipeline.call_of_module = call
        pipeline.one_device_names = one_device_names(module, call)
        whole = whole_module(module, call)
        pipeline.whole_module = lambda: whole  # not as a child of the pipeline
        pipeline.elsewhere = Elsewhere(module, pipeline)
        pipeline.whole_in_reach = pipeline.elsewhere.lifted
        pipeline.train = pipeline.elsewhere.take_over_modes
        if pipeline.num_stages > 1:
            pipeline.allow_calls()
            pipeline.allow_calls = refuse_other_calls(module, call.attribute, self._refusal)
        # Not a child: the layers have the user's names, and no others.
        object.__setattr__(module, HOLDER, PipelineHolder(pipeline))
        pipeline.elsewhere.hide()
        pipeline.is_whole = False
        self._copies_of_weights(pipeline)
        pipeline.when_layers_moved = self._follow_layers
        pipeline.when_layers_moved()
        # Lightning's summary would run it through the whole model, of which this rank has a part.
        if module.example_input_array is not None:
            pipeline.example_input_array, module.example_input_array = module.example_input_array, None

    def _follow_layers(self) -> None:
        """Let what a rank has of its layers, or knows of them, be where they are now. Collective."""
        group = self.pipeline.mpu().get_pipe_parallel_group()
        self._copies.follow(group)
        if self._runner is not None:
            self._runner.steps.share_dims(group)

    def _copies_of_weights(self, pipeline: PipelineModule) -> WeightCopies:
        module, base = self._module, self._lightning("core.module").LightningModule
        ignored = {*vars(base()), HOLDER}
        self._copies = WeightCopies(module, lambda: _named_owners(module), ignored, pipeline.elsewhere.lifted)
        return self._copies

    def _refuse_copies_that_stay(self) -> None:
        """Refuse modules that average the weights of this rank's layers, if these may leave it."""
        found = self._copies.modules() if self.pipeline.num_stages > 1 else []
        if found and self.options.plan is None:
            raise self._refusal(
                f"{', '.join(found)} is a copy of the layers that this rank has now, and they move when the "
                f"plan is made: {WAY_OUT}; or run a saved plan, MadPipeStrategy(plan=...), with which none moves"
            )

    def _built_pipeline(self, call: PipelineCall) -> PipelineModule:
        with preserved_random_state():
            pipeline = PipelineModule(
                layers=call.layers,
                num_stages=self._resolved_num_stages(),
                plan=self.options.plan,
                seed_layers=any(isinstance(layer, LayerSpec) for layer in call.layers),
                base_seed=self._base_seed,
            )
        # The seeds make a LayerSpec the same layer on any rank. In training they would reset everybody's
        # random numbers before each layer.
        pipeline.seed_layers = False
        pipeline.model_name = type(self._module).__name__  # which the plan names
        pipeline.engine = lambda: None
        pipeline.layers_of_user = LayersOfUser(pipeline)
        pipeline.allow_calls = lambda: None
        pipeline.example_input_array = None
        return pipeline

    def _is_whole_everywhere(self) -> bool:
        return self.reduce_boolean_decision(self.pipeline.is_whole)

    # What is there when a run has ended

    def teardown(self) -> None:
        """End a run, and put the whole model where ``whole_model`` says."""
        if self._engine is not None and pipeline_of(self.lightning_module) is not None:
            self._let_metrics_go()
            self._engine.retire()
            if self._module.trainer.interrupted and not self._all_are_here:
                # Others may not have met the exception, and would never come.
                self._stay_spread(AFTER_AN_EXCEPTION)
            elif self.whole_model == "none":
                self._stay_spread(AFTER_A_RUN)
            else:
                self._gather(self.whole_model)
        pipeline = pipeline_of(self.lightning_module)
        is_spread = pipeline is not None and not pipeline.is_whole
        with pipeline.elsewhere.lifted() if is_spread else nullcontext():
            super().teardown()  # which moves the module to the CPU

    def gather_model(self) -> None:
        """Put the whole model on every rank, after a run that left each rank with its own layers. Collective.

        Raises:
            MisconfigurationException: there is not enough memory for it, on every rank.
        """
        if not self._is_whole_everywhere():
            self._gather("every_rank")
        if not self.pipeline.is_whole:
            raise self._refusal("the whole model cannot be put on every rank: the line before this one says why")

    def _gather(self, place: str) -> None:
        pipeline, module = self.pipeline, self._module
        if not can_be_whole(pipeline):
            self._stay_spread(AFTER_A_RUN)
            return
        with pipeline.elsewhere.lifted():
            reason = pipeline.layers_of_user.gather(place)
        if reason is not None:
            announce(
                f"the whole model is not put on {place.replace('_', ' ')}, because {reason}: each rank keeps its "
                "own layers, and whole_model='rank_zero' or 'none' asks for less",
                logging.WARNING,
            )
            self._stay_spread(AFTER_A_RUN)
            return
        if place == "rank_zero" and not self.is_global_zero:
            self._stay_spread(ON_RANK_ZERO)
        else:
            pipeline.elsewhere.show()
            pipeline.whole_in_reach = self._refuse_moves
            pipeline.allow_calls()
            pipeline.is_whole = True
            if pipeline.example_input_array is not None:
                module.example_input_array = pipeline.example_input_array
        pipeline.when_layers_moved()  # on every rank: those that stay spread give theirs

    def _stay_spread(self, sentence: str) -> None:
        self.pipeline.elsewhere.sentence = sentence
        self.pipeline.elsewhere.hide()

    def _refuse_moves(self) -> Any:
        raise self._refusal("layers move in a run only, and this one has ended: call recut in a hook of fit")

    def _start_engine(self, trainer: Any) -> None:
        self._stop_engine()
        fitting = trainer.state.fn == "fit"
        config = dict(self.config)
        optimizer, scheduler = None, None
        if fitting:
            try:
                # All ranks make the same groups, by the names of all parameters.
                with self.pipeline.elsewhere.lifted():
                    optimizer, scheduler, given = configured_optimizer(
                        self._lightning("core.optimizer")._init_optimizers_and_lr_schedulers,
                        self._module,
                        set(self.pipeline.parameters()),
                        flattened=self.wraps_optimizer,
                    )
            except ValueError as flaw:
                raise self._refusal(str(flaw)) from None
        else:
            config.pop("zero_optimization", None)  # which needs an optimizer
        layers = self.pipeline.layers_of_user
        with self.pipeline.elsewhere.lifted():
            layers.hand_over(low=self.precision_plugin.precision != "32-true", fitting=fitting)
        self._engine, engine_optimizer, _, _ = initialize_with(
            partial(MadPipeEngine, options=self.options),
            args=argparse.Namespace(device_rank=self.local_rank),
            model=self.pipeline,
            optimizer=optimizer,
            model_parameters=[weight for weight in self.pipeline.parameters() if weight.requires_grad],
            config=config,
            dist_init_required=False,
        )
        self.pipeline.engine = weakref.ref(self._engine)
        if fitting:
            layers.refine_masters()
            layers.remember_groups(given)
            self.optimizers = [engine_optimizer]
            self.lr_scheduler_configs = [] if scheduler is None else [scheduler]
            if scheduler is not None:
                self._engine.show_every_group(scheduler.scheduler)
            # The engine runs backward and the optimizer, and clears the gradients.
            trainer.fit_loop._skip_backward = True
            self._engine.folder_of_logs = folder_of_logs(trainer)
            num_steps = self.options.warmup_steps
            if self.warmup_epochs or num_steps:
                self._warm_up = WarmUpOfFit(trainer, num_epochs=self.warmup_epochs, num_steps=num_steps)
                self._engine.warm_up_until(self._warm_up.is_over, self._warm_up.length)

    def _format_config(self) -> None:
        super()._format_config()
        if self.config.get("fp16", {}).get("enabled"):
            # Its optimizer keeps fp32 weights that are known by parameter, which the one without ZeRO does not.
            self.config["zero_optimization"] = {**self.config.get("zero_optimization", {}), "stage": 1}

    def _stop_engine(self) -> None:
        """End what an earlier fit, validate or test left on the pipeline, of this Trainer or of another one."""
        engine, layers = self.pipeline.engine(), self.pipeline.layers_of_user
        is_there = engine is not None and not engine.is_destroyed
        layers.take_back(has_masters=is_there)
        if is_there:
            engine.release()
        self._engine = None
        self.optimizers = []
        gc.collect()

    def _format_batch_size_and_grad_accum_config(self) -> None:
        trainer = self._module.trainer
        num_micro_batches = self._resolved_num_micro_batches() * trainer.accumulate_grad_batches
        self.config["gradient_accumulation_steps"] = num_micro_batches
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # until the first batch comes
        by_norm = 0.0 if clips_by_value(trainer) else trainer.gradient_clip_val or 0.0
        self.config.setdefault("gradient_clipping", by_norm)
        self.config.setdefault("steps_per_print", sys.maxsize)

    # Steps

    def training_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` with those of its optimizer step; return its loss, and other results if they are read."""
        return self._batches.train(batch, arguments)

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the step's results if a hook reads them, else its loss."""
        return self._batches.evaluate("validation_step", batch, arguments)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the step's results if a hook reads them, else its loss."""
        return self._batches.evaluate("test_step", batch, arguments)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the predictions, if somebody takes them."""
        return self._batches.evaluate("predict_step", batch, arguments)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the closure, that is ``training_step``, whose ``engine.train_batch`` ends with the step."""
        call, trainer = self._lightning("trainer.call"), self._module.trainer
        call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
        return closure()

    def on_train_start(self) -> None:
        self._is_first_batch = True
        self._refuse_copies_that_stay()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._batches.begin_training_epoch()
        elif self._is_first_batch and (note := note_on_resuming(self._module.trainer, batch_idx)) is not None:
            announce(note, logging.WARNING)
        self._is_first_batch = False

    def on_train_end(self) -> None:
        if self._warm_up is not None and self.deepspeed_engine.is_warming_up:
            self._warm_up.say_that_no_plan_was_made()

    def on_validation_start(self) -> None:
        self._batches.begins = True

    def on_test_start(self) -> None:
        self._batches.begins = True

    def on_predict_start(self) -> None:
        self._batches.begins = True

    def _start_runner(self, trainer: Any) -> None:
        module, engine, call = self._module, self.deepspeed_engine, self.pipeline.call_of_module
        self._traces = LayerTraces(module, call, self._exception)
        self._traces.add(left_by_code(call))
        runs_whole = self.pipeline.num_stages == 1 and self._resolved_num_micro_batches() == 1
        steps = UserSteps(
            module,
            call.attribute,
            self.precision_plugin.forward_context,
            self._exception,
            # What a LightningModule has before its user gives it anything.
            ignored=vars(self._lightning("core.module").LightningModule()),
            is_cut=self.pipeline.num_stages > 1,
            may_run_again=lambda: engine.may_run_again,
            traces=None if runs_whole else self._traces,
        )
        self.pipeline.loss_fn = steps.loss
        self._noted.clear()
        self._runner = BatchRunner(
            trainer=trainer,
            module=module,
            pipeline=self.pipeline,
            engine=engine,
            steps=steps,
            check_layers=self._compare_layers,
            num_micro_batches=self._resolved_num_micro_batches(),
            base_seed=self._base_seed,
            batch_numbers=self._batch_numbers,
            namespace=self.namespace,
            call_hooks=self._call_hooks_before_step,
            refusal=self._refusal,
            loss=self.loss,
        )
        self._let_metrics_go = gather_between_pipelines(module, self.gather_state)
        self.leave_out_needless_advice()

    def _compare_layers(
        self, arguments: Sequence[Any], sizes: Sequence[int], changed: Sequence[str]
    ) -> Sequence[Read]:
        """Let rank 0 compare the layers with ``forward``; every rank hears what it found.

        Weights of other ranks' layers are there as they were when these left rank 0: for the comparison any do.

        Args:
            arguments: What the step gives ``forward``, for the first micro-batch.
            sizes: The samples of each micro-batch.
            changed: What ``forward`` reads, and is another thing than when they were compared before.

        Returns:
            What ``forward`` reads besides.
        """
        call, engine = self.pipeline.call_of_module, self.deepspeed_engine
        half = torch.bfloat16 if engine.bfloat16_enabled() else torch.float16 if engine.fp16_enabled() else None

        def compare() -> Verdict:
            if not self.check_layers or call.attribute != "forward":
                return Verdict()  # one nn.Sequential is called as it is
            with self.pipeline.elsewhere.lifted():
                return check_layers(
                    self._module,
                    call,
                    arguments,
                    device=engine.device,
                    dtype=half,
                    context=self.precision_plugin.forward_context,
                    traces=lambda: self._batches.steps.leftovers(undoable=True),
                )

        verdict = from_rank_0(compare)
        if verdict.difference is not None:
            since = f"since {', '.join(changed)} has changed, " if changed else ""
            raise self._refusal(f"{since}{verdict.difference}")
        self._traces.add(verdict.left)
        notes = list(verdict.notes)
        if self._module.training and len(sizes) > 1:
            notes += notes_on_statistics(self._layers_of_statistics(), verdict.statistics, sizes)
        for note in notes:
            if note not in self._noted:
                self._lightning("utilities.rank_zero").rank_zero_warn(f"madpipe: {note}")
        self._noted.update(notes)
        return verdict.reads

    def _layers_of_statistics(self) -> list[str]:
        inside = self.pipeline.elsewhere.inside
        named = ((f"self.{name}", part) for name, part in self._module.named_modules() if part in inside)
        made = ((type(part).__name__, part) for part in self.pipeline.elsewhere.made_for_the_pipeline())
        mine = [*layers_of_statistics(named), *layers_of_statistics(made)]
        everyone = gather_objects(mine, self.pipeline.mpu().get_pipe_parallel_group())
        return list(dict.fromkeys(name for names in everyone for name in names))

    @property
    def _batches(self) -> BatchRunner:
        assert self._runner is not None, "setup() makes it"
        return self._runner

    def _call_hooks_before_step(self) -> None:
        """Call Lightning's hooks, on every rank, when the gradients of the whole step are there."""
        call, trainer = self._lightning("trainer.call"), self._module.trainer
        for hook, arguments in (("on_after_backward", ()), ("on_before_optimizer_step", self.optimizers[:1])):
            call._call_callback_hooks(trainer, hook, *arguments)
            call._call_lightning_module_hook(trainer, hook, *arguments)
        if trainer.gradient_clip_val and clips_by_value(trainer):
            torch.nn.utils.clip_grad_value_(self.pipeline.parameters(), trainer.gradient_clip_val)

    # Lightning, of either namespace

    def _lightning(self, module: str) -> Any:
        return importlib.import_module(f"{self.namespace}.{module}")

    @property
    def _exception(self) -> type[Exception]:
        return self._lightning("utilities.exceptions").MisconfigurationException

    def _refusal(self, sentence: str) -> Exception:
        return self._exception(sentence)


def _named_owners(module: Any) -> dict[str, Any]:
    """The module and the callbacks of its Trainer, in which a program keeps its own things."""
    callbacks = {type(callback).__name__: callback for callback in reversed(module.trainer.callbacks)}
    more = (
        (f"{type(callback).__name__} {place}", callback)
        for place, callback in enumerate(module.trainer.callbacks)
        if callbacks[type(callback).__name__] is not callback
    )
    return {"self": module, **callbacks, **dict(more)}


@cache
def strategy_class(namespace: str) -> type:
    """The strategy of ``pytorch_lightning`` or ``lightning.pytorch``, whose base classes are different ones."""
    base = importlib.import_module(f"{namespace}.strategies").DeepSpeedStrategy
    body = {"namespace": namespace, "__doc__": PipelineStrategy.__doc__, "__module__": "lightning_madpipe"}
    return type("MadPipeStrategy", (PipelineStrategy, base), body)
