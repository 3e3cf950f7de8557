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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.pipeline.module import load_plan
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.runtime.collectives import own_groups
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import in_words, is_met_by_all, is_raised_by_all
from deepspeed_partition.engine.runtime.joining import watch_joining
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.options import Options
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.weight_versions import FLUSH
from lightning_madpipe.captured_layers import captured_layers
from lightning_madpipe.checkpoint.saving import GATHERED_BY_ALL, Checkpointing
from lightning_madpipe.checkpoint.whole_model import PLACES
from lightning_madpipe.compat.callback_patches import show_samples_once, show_whole_to_callbacks
from lightning_madpipe.compat.clipped_gradients import clip_in_hooks
from lightning_madpipe.compat.elsewhere import AFTER_A_RUN, AFTER_AN_EXCEPTION
from lightning_madpipe.compat.logged_values import hand_values_over
from lightning_madpipe.compat.names_of_files import take_names_from_rank_zero
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.number_types import convert_but_complex, leave_types
from lightning_madpipe.compat.optimizer_hooks import OptimizerHooks, tell_of_states
from lightning_madpipe.compat.optimizers import (
    EndedOptimizers,
    configured_optimizer,
    refuse_weights_of_nobody,
    tell_of_zeros,
)
from lightning_madpipe.compat.signals import SignalsTogether
from lightning_madpipe.compat.unsupported import clipping_changed, clips_by_value
from lightning_madpipe.compat.watched_hooks import HookWatch
from lightning_madpipe.compat.weights_in_flight import WeightsInFlight
from lightning_madpipe.forked_ranks import ForkedRanks, launcher_class, refuse_initialized_process
from lightning_madpipe.groups import PipelineGroups
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.planning import WarmUpOfFit, folder_of_logs, note_on_resuming
from lightning_madpipe.preflight import (
    notes_on_fit,
    refuse_callbacks,
    refuse_notebooks,
    refuse_programs_without_file,
    refuse_what_cannot_run,
)
from lightning_madpipe.progress import LoggedFigures, Phase
from lightning_madpipe.settings import check_count, checked_settings, read_config, resolved_num_stages
from lightning_madpipe.spread_model import SpreadModel, in_reach
from lightning_madpipe.steps.group_settings import GroupSettings
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks
from lightning_madpipe.steps.layer_comparison import LayerComparison
from lightning_madpipe.steps.loss_mode import LOSSES
from lightning_madpipe.steps.metrics import BetweenPipelines
from lightning_madpipe.steps.own_generators import states_for_hook
from lightning_madpipe.steps.rank_of_step import tell_of_local_rank
from lightning_madpipe.steps.rests import Rests
from lightning_madpipe.steps.runner import BatchRunner
from lightning_madpipe.steps.sizes_asked import SizesAsked
from lightning_madpipe.steps.unlike_ranks import compare_ranks
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.what_layers_set import LayerTraces, left_by_code
from lightning_madpipe.steps.written_in_hooks import HookWriting

MICRO_BATCHES_PER_STAGE = 4
"""Micro-batches per stage by default: P equal stages then work 4 P / (5 P - 1) of a step, over 80 %."""


def _is_of_use(record: logging.LogRecord) -> bool:
    """Return whether a line of Lightning's DeepSpeed strategy says more than the number of its rank."""
    return not str(record.msg).startswith("initializing deepspeed distributed")


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
        duplex: ``"full"`` where links carry transfers both ways at once, else ``"half"``. None: measured.
        port_bandwidth: Bytes per second of a port that all links of a host share. None: measured.
        devices_per_port: Devices of a host, which share its port. None: measured.
        operation_seconds: Seconds that the engine takes for each forward and each backward of a stage beside its
            layers. None: measured on CPUs, 0 on GPUs.
        copy_bandwidth: Bytes per second at which a device itself moves messages. None: measured on CPUs; on GPUs
            they move by themselves.
        weight_copies: None: from the optimizer and the precision.
        algorithm: The name of a planner, or boundaries, on which a run begins with ``warmup_epochs=0``.
        warmup_steps: In the place of ``warmup_epochs``, in optimizer steps.
        plan: A plan file, which is run as it is, without measuring.
        save_plan: Where the plan is written. None: ``madpipe-plan.json`` in the logger's directory, if it has one.
        recompute: What may run its forward again in the backward, to keep less: ``"never"``, ``"stage"`` (each
            stage as a whole), ``"block"`` (ranges of layers within a stage), ``"auto"``, whatever is fastest
            within memory, or ``"micro-batch"``, which decides for each micro-batch besides. None: ``"auto"``.
        split_backward: Whether a plan that the run makes may have backwards in two halves, the gradient of the
            input, sent on at once, and those of the weights later; left out, no.
        weight_versions: What becomes of the weights: ``"flush"``, the pipeline drains before each optimizer step;
            or it never drains, and the optimizer's step of a batch comes during later ones, on weights of which
            stages keep versions: ``"stashing"``, ``"2bw"``, ``"vertical-sync"``. It comes to rest before
            validation, checkpoints and the end of an epoch. Left out, as ``plan`` says, or ``"flush"``.
        replan: ``"when_slow"``: where a rank becomes slow, by another job on its device or by heat, the plan is
            made again for the speeds that ranks have then, and layers move; left out, ``"never"``.
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
    rank_in_step: int | None = None
    """What steps of the user's are told for their rank; None: outside of steps."""
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
        duplex: str | None = None,
        port_bandwidth: float | str | None = None,
        devices_per_port: int | None = None,
        operation_seconds: float | str | None = None,
        copy_bandwidth: float | str | None = None,
        weight_copies: float | None = None,
        algorithm: str | Sequence[int] | None = None,
        warmup_steps: int | None = None,
        plan: str | Path | None = None,
        save_plan: str | Path | None = None,
        recompute: str | None = None,
        split_backward: bool | None = None,
        weight_versions: str | None = None,
        replan: Literal["never", "when_slow"] | None = None,
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
            raise ValueError(f"loss is {loss!r}: it must be one of {', '.join(map(repr, LOSSES))}")
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
            "duplex": duplex,
            "port_bandwidth": port_bandwidth,
            "devices_per_port": devices_per_port,
            "operation_seconds": operation_seconds,
            "copy_bandwidth": copy_bandwidth,
            "weight_copies": weight_copies,
            "algorithm": algorithm,
            "warmup_steps": warmup_steps,
            "plan": None if plan is None else str(plan),
            "save_plan": None if save_plan is None else str(save_plan),
            "recompute": recompute,
            "split_backward": split_backward,
            "weight_versions": weight_versions,
            "replan": replan,
            "time_limit_seconds": time_limit_seconds,
            "save_timeline": None if save_timeline is None else str(save_timeline),
            "checkpoint_checksums": checkpoint_checksums,
            "unpickle": unpickle,
            "patience_seconds": patience_seconds,
        }
        self.config, self.options, counts_steps = checked_settings(self.config, arguments, stage)
        if loss == "batch" and self.options.weight_versions not in (None, FLUSH):
            raise ValueError(
                "loss='batch' computes the loss once on all outputs of a batch, for which the pipeline drains, "
                f"and weight_versions {self.options.weight_versions!r} never does: leave one of them out"
            )
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
        self._phase: Phase | None = None
        self._figures: LoggedFigures | None = None
        self._metrics: BetweenPipelines | None = None
        self._looks_at_metrics = False
        self._hook_watch: HookWatch | None = None
        self._hook_writing: HookWriting | None = None
        self._sizes_asked = SizesAsked(self.tell_of_asked_size)
        self._optimizer_hooks: OptimizerHooks | None = None
        self._group_settings: GroupSettings | None = None
        self._rests: Rests | None = None
        self._distributes_data: bool | None = None
        self._engine_optimizers: list[Any] = []
        self._asked_at_start: tuple[Any, Any] = (None, None)
        self._engine: MadPipeEngine | None = None
        self._runner: BatchRunner | None = None
        self._base_seed, self._num_groups = 0, 0
        self._batch_numbers = count(1)
        self._is_first_batch = False
        self._number_of_batch: int | None = None
        self._left_out_in: int | None = None
        """The number of a batch whose closure has run and whose optimizer's step was not asked for."""
        self._is_asked_to_step = False
        self._all_are_here = False
        self._spread_before: SpreadModel | None = None
        self.plan_of_ranks: Plan | None = None
        """The plan of a fit whose ranks were forked from this process, and have ended."""

    def __repr__(self) -> str:
        # Lightning refuses the strategy of the other package, with this among its words.
        [other] = {"pytorch_lightning", "lightning.pytorch"} - {self.namespace}
        ways = f"lightning_madpipe.strategy_class({other!r})(...) or strategy='madpipe'"
        return f"<MadPipeStrategy of {self.namespace}; in a Trainer of {other}: {ways}>"

    # What is there after setup

    @property
    def deepspeed_engine(self) -> MadPipeEngine:
        """The pipeline engine. ``trainer.model`` stays the LightningModule."""
        assert self._engine is not None, "setup() starts it"
        return self._engine

    @property
    def plan(self) -> Plan | None:
        """The plan that is run; None before it is made, and where the cut has another origin."""
        return self.plan_of_ranks if self._engine is None else self._engine.plan

    @property
    def pipeline(self) -> PipelineModule:
        """DeepSpeed's module with this rank's layers, which stay the LightningModule's where the user put them."""
        return pipeline_of(self._module)

    @property
    def global_rank(self) -> int:
        """This process's number; in a step of the user's that of the process which its pipeline stands for."""
        return super().global_rank if self.rank_in_step is None else self.rank_in_step

    @property
    def local_rank(self) -> int:
        """This process's number on its node, by which it has its device, in steps, too."""
        number = int(super().local_rank)
        if self.rank_in_step == 0 and number:
            tell_of_local_rank(number)
        return number

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of the data's sampler: ranks of one pipeline read the same data, pipelines share it."""
        if self._engine is None:  # a loader is made for an example of the data, from which layers are found
            replicas = self.world_size // self._resolved_num_stages()
            return {"num_replicas": replicas, "rank": self.global_rank % replicas}
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

    @property
    def _spread(self) -> SpreadModel:
        """The module's layers on the ranks, of this run or of those before."""
        if self._spread_before is None or self._spread_before.module is not self._module:
            self._spread_before = SpreadModel(self._module, self._lightning, self._follow_layers)
        return self._spread_before

    def _resolved_num_stages(self) -> int:
        try:
            return resolved_num_stages(self.num_stages, self.world_size)
        except ValueError as error:
            raise self._lightning.refusal(str(error)) from None

    def _resolved_num_micro_batches(self) -> int:
        num_stages = self._resolved_num_stages()
        default = MICRO_BATCHES_PER_STAGE * num_stages if num_stages > 1 else 1
        return self.num_micro_batches or default

    # Processes and devices

    def setup_environment(self) -> None:
        watch.begin_anew()
        if not isinstance(self.launcher, ForkedRanks):  # whose parent looks after them
            watch_joining(os.getppid() if self.starts_ranks and self.local_rank > 0 else None)
        kind = self.root_device.type
        if kind not in ("cpu", "cuda"):
            raise self._lightning.refusal(f"the madpipe strategy runs on CPUs and CUDA devices, not on {kind}")
        refuse_callbacks(self._module.trainer, self._module, self._lightning)
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self.setup_distributed()
        try:
            dist.barrier(group=own_groups().objects)
        except RuntimeError as error:  # after a run that ended so, in a script that went on
            raise self._lightning.refusal(
                "the processes cannot reach each other: a process of this job has ended, or closed its "
                f"connections ({str(error).splitlines()[0]}); start the job again, from a checkpoint"
            ) from error
        take_names_from_rank_zero(self._module.trainer, self.broadcast)
        self._keep_samplers(self._module.trainer)  # hooks of setup may ask for the loader
        self._sizes_asked.begin()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        connector = self._lightning.module("trainer.connectors.accelerator_connector")
        is_several = self.num_processes * self.num_nodes > 1
        is_notebook = bool(getattr(connector, "_IS_INTERACTIVE", False))
        if is_notebook and is_several and _is_alone():
            refuse_initialized_process(self._lightning)
        if is_notebook and is_several and self.starts_ranks:
            refuse_notebooks(self._lightning, self.num_nodes)
            self._launcher = launcher_class(self.namespace)(self)
        elif is_notebook and not is_several:
            self._launcher = None  # one process is this one
        elif self.starts_ranks:  # Lightning makes a launcher in any case
            refuse_programs_without_file(self._lightning, self.num_processes)

    @property
    def starts_ranks(self) -> bool:
        """Whether the Trainer starts the other processes itself; torchrun and its kin have started them."""
        environment = self.cluster_environment
        return environment is not None and not environment.creates_processes_externally

    def setup_distributed(self) -> None:
        quiet = logging.getLogger(f"{self._lightning.name}.strategies.deepspeed")
        if _is_of_use not in quiet.filters:
            quiet.addFilter(_is_of_use)
        chosen, wanted = get_accelerator().device_name(), self.root_device.type
        if chosen != wanted:
            raise self._lightning.refusal(
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
        module, self._number_of_batch = self._module, None
        take_names_from_rank_zero(trainer, self.broadcast)  # by which rank 0 has made folders since
        # Anew each time: the Trainer may have other settings than in the fit before.
        self.config, self._config_initialized = copy.deepcopy(self._given_config), False
        self._init_config_if_needed()
        self.precision_plugin = leave_types(self.precision_plugin)
        clip_in_hooks(self.precision_plugin)
        if self.world_size > 1:
            pipelines, is_new = self.world_size // self._resolved_num_stages(), pipeline_of(module) is None
            ignored = vars(self._lightning.module_class())
            if unlike := compare_ranks(module, ignored, self.global_rank, pipelines, is_new=is_new):
                raise self._lightning.refusal(unlike)
            self._spread.follow_rank_zero()
        captured = cache(
            lambda: captured_layers(trainer, module, self._lightning, self._resolved_num_micro_batches())
        )
        refuse_what_cannot_run(
            trainer,
            module,
            self._lightning,
            num_stages=self._resolved_num_stages,
            num_processes=self.world_size,
            flattened=self.wraps_optimizer,
            captured=captured,
        )
        self.accelerator.setup(trainer)  # type: ignore[union-attr]
        for name in convert_but_complex(self.precision_plugin, module):
            self._lightning.warn(
                f"the complex buffer {name} keeps its type under precision={self.precision_plugin.precision!r}, "
                "where Lightning would drop its imaginary part in one process"
            )
        # Every rank takes its seeds from rank 0: one model and one course, however the layers are cut.
        self._base_seed = self.broadcast(torch.initial_seed() % 2**31)
        self._spread.spread(
            num_stages=self._resolved_num_stages(),
            base_seed=self._base_seed,
            plan=self.options.plan,
            end_engine=self._stop_engine,
            captured=captured,
        )
        module.to(self.root_device)  # but for what another rank runs, which stays where it is
        self._spread.buffers.share()
        if self.distributed_sampler_kwargs["num_replicas"] > 1:
            self.refuse_too_few_samples(trainer)
        self._spread.copies.early.begin()
        self._start_engine(trainer)
        self._spread.buffers.share()
        self.model = module
        self._watch_dumps(trainer)
        if self.pipeline.num_stages > 1:
            self._hook_writing = HookWriting(
                trainer, module, self.pipeline.mpu(), vars(self._lightning.module_class())
            )
        show_samples_once(self, trainer, self._lightning)
        if trainer.state.fn == "fit":
            for note in filter(None, [*notes_on_fit(trainer, module, self._lightning), self._spread.told_views]):
                self._lightning.warn(note)
            show_whole_to_callbacks(self, trainer, self._lightning)
            is_cut = self.pipeline.num_stages > 1
            if is_cut or self.wraps_optimizer:
                self._hook_watch = HookWatch(
                    trainer,
                    module,
                    self.pipeline.mpu(),
                    optimizers=lambda: self.optimizers,
                    is_cut=is_cut,
                    flattened=self.wraps_optimizer,
                    refusal=self._lightning.refusal,
                    states=states_for_hook,
                    leaves_loop=self._leave_loop,
                    in_flight=WeightsInFlight(
                        module, self._of_engine, lambda: self.optimizers, self._lightning.refusal
                    ),
                )
            self._watch_optimizer()
            watch, bar = self._hook_watch, trainer.progress_bar_callback
            self._phase = Phase(trainer, nullcontext if watch is None else watch.of_progress_bar(bar))
            self.deepspeed_engine.tell_phase = self._phase.tell
            self._figures = LoggedFigures(trainer, self.deepspeed_engine)
        self._start_runner(trainer)
        SignalsTogether(trainer, self.deepspeed_engine, self.launcher)
        self.barrier()

    def _watch_optimizer(self) -> None:
        """Let hooks of the user's optimizer run when they do in one process, and be watched."""
        is_cut = self.pipeline.num_stages > 1
        inner = self.deepspeed_engine.basic_optimizer
        self._num_groups = len(inner.param_groups)
        self._optimizer_hooks = OptimizerHooks(
            inner,
            None if self._hook_watch is None or not is_cut else self._hook_watch.of_optimizer,
            closure_is_first=self.precision_plugin.precision.startswith("16"),
            refusal=self._lightning.refusal,
        )
        if is_cut:
            self._group_settings = GroupSettings(lambda: self.optimizers)
            tell_of_states(inner)

    def _keep_samplers(self, trainer: Any) -> None:
        """Let one pipeline read data as one process does, in the order of the user's own sampler.

        Lightning would put a distributed sampler in its place, which shuffles whatever is trained on, and leaves
        nothing out where all ranks read the same.
        """
        connector = trainer._accelerator_connector  # of Lightning (2.5 to 2.6), which asks it at each loader
        if self._distributes_data is None:
            self._distributes_data = connector.use_distributed_sampler
        if self.world_size == self._resolved_num_stages():
            connector.use_distributed_sampler = False

    def on_exception(self, exception: BaseException) -> None:
        """Let the other ranks hear of an exception that this one has met alone."""
        super().on_exception(exception)
        if self._engine is None and isinstance(self.launcher, ForkedRanks):
            return  # in the notebook, whose ranks have ended
        if not is_raised_by_all(exception):
            trainer = getattr(self.lightning_module, "_trainer", None)  # none where ranks were not launched yet
            what = "its program" if trainer is None else f"{trainer.state.fn.value}()"
            if not is_met_by_all(exception):
                watch.say_who_left(in_words(exception))
            watch.tell_that_this_rank_leaves(f"left {what} with {in_words(exception)}")
            if self._engine is not None:
                self._engine.tell_at_next_batch(exception)
        if is_raised_by_all(exception) and isinstance(exception, Exception):
            watch.begin_anew()  # all are here, and may go on
        self._all_are_here = is_raised_by_all(exception)

    # A pipeline that never drains

    def come_to_rest(self) -> None:
        """Bring the pipeline to rest, where it never drains (``weight_versions``). Collective.

        The optimizer's steps of all batches so far are done then, and all ranks have weights of the same step.
        Validation, checkpoints, the end of an epoch and of the run do it by themselves; a hook that reads weights
        between batches calls it first, on every rank.
        """
        # What runs in it is the engine's, and no hook's that may have called this.
        with nullcontext() if self._hook_watch is None else self._hook_watch.unwatched():
            self.deepspeed_engine.come_to_rest()

    @property
    def asked_weight_versions(self) -> str:
        """What is to become of the weights, by the option or else by the plan that is given."""
        if self.options.weight_versions is not None or self.options.plan is None:
            return self.options.weight_versions or FLUSH
        return load_plan(self.options.plan).weight_versions

    def _of_engine(self) -> MadPipeEngine:
        return self.deepspeed_engine

    @property
    def _never_drains(self) -> bool:
        return self.deepspeed_engine.weight_versions != FLUSH

    def _rest_before_checkpoint(self) -> None:
        """Bring the pipeline to rest before a checkpoint.

        Raises:
            MisconfigurationException: batches were in flight when an error ended training.
        """
        engine = self.deepspeed_engine
        if self._never_drains and not engine.is_destroyed:
            try:
                engine.check_that_it_goes_on()
            except RuntimeError as error:
                raise self._lightning.refusal(f"no checkpoint is written after this exception: {error}") from None
            engine.come_to_rest()

    def _rest_at_the_end(self) -> None:
        """Bring the pipeline to rest at the end of a run, where all ranks come to it."""
        engine = self.deepspeed_engine
        if engine.is_at_rest or not engine.goes_on:
            return
        if self._module.trainer.interrupted and not self._all_are_here:
            announce(
                "training has ended while batches were in flight, which not all ranks have met together: their "
                "updates are lost",
                logging.WARNING,
            )
            return
        try:
            engine.come_to_rest()
        except Exception:
            if not self._module.trainer.interrupted:
                raise  # else the first exception is what its user is to see

    def _stop_watching_hooks(self) -> None:
        if self._hook_watch is not None:
            self._hook_watch.end()
            self._hook_watch = None
        if self._optimizer_hooks is not None:
            self._optimizer_hooks.end()
            self._optimizer_hooks = self._group_settings = None

    def _follow_layers(self, group: Any) -> None:
        """Let the ranks of a pipeline know what steps have found out and hooks have logged on some of them."""
        if self._runner is not None:
            self._runner.follow_layers(group)
        if self._phase is not None:  # between the first and the last step of fit
            hand_values_over(self._module.trainer, group)

    # What is there when a run has ended

    def teardown(self) -> None:
        """End a run, and put the whole model where ``whole_model`` says."""
        self._sizes_asked.end()
        if self._phase is not None:
            self._phase.end()
        self._phase = self._figures = None
        if self._engine is not None and pipeline_of(self.lightning_module) is not None:
            self._rest_at_the_end()
            if self._rests is not None:
                self._rests.end()
                self._rests = None
            if self._metrics is not None:
                predicts = self._module.trainer.state.fn == "predict"
                num_alike = self.world_size // self._num_pipelines() if predicts else 1
                self._metrics.end(self._data_parallel_group(), num_alike)
                self._metrics = None
            self._stop_watching_hooks()
            self._engine.retire()
            if not self._module.trainer.interrupted:
                self._spread.say_changed_copies()
            if self._module.trainer.interrupted and not self._all_are_here:
                # Others may not have met the exception, and would never come.
                self._spread.stay_spread(AFTER_AN_EXCEPTION)
            elif self.whole_model == "none":
                self._spread.stay_spread(AFTER_A_RUN)
            else:
                self._spread.gather(self.whole_model, is_rank_zero=self.is_global_zero)
        if self._distributes_data is not None:
            self._module.trainer._accelerator_connector.use_distributed_sampler = self._distributes_data
            vars(self._module.trainer._data_connector).pop("_resolve_sampler", None)
            self._distributes_data = None
        if self._hook_writing is not None:  # ranks have met since the last hook
            self._hook_writing.end()
            self._hook_writing = None
        with in_reach(self.lightning_module):
            super().teardown()  # which moves the module to the CPU
        self._spread.buffers.share()

    def gather_model(self) -> None:
        """Put the whole model on every rank, after a run that left each rank with its own layers. Collective.

        Raises:
            MisconfigurationException: there is not enough memory for it, on every rank; or some rank did not come.
        """
        if isinstance(self.launcher, ForkedRanks) and pipeline_of(self._module) is None:
            return  # a notebook gets it whole
        self._wait_for_all("trainer.strategy.gather_model()", GATHERED_BY_ALL)
        if not self._spread.is_whole_everywhere():
            self._spread.hand_back()
            self._spread.gather("every_rank", is_rank_zero=self.is_global_zero)
        if not self.pipeline.is_whole:
            raise self._lightning.refusal(
                "the whole model cannot be put on every rank: the line before this one says why"
            )

    def _start_engine(self, trainer: Any) -> None:
        fitting = trainer.state.fn == "fit"
        self._lost_optimizer = not fitting and (self._lost_optimizer or bool(self.optimizers))
        self._stop_engine()
        config = dict(self.config)
        optimizer, scheduler = None, None
        if fitting:
            self._spread.begin_anew_if_changed()
            try:
                # All ranks make the same groups, by the names of all parameters.
                with self.pipeline.elsewhere.lifted():
                    optimizer, scheduler, given = configured_optimizer(
                        self._lightning.module("core.optimizer")._init_optimizers_and_lr_schedulers,
                        self._module,
                        set(self.pipeline.parameters()),
                        flattened=self.wraps_optimizer,
                    )
                    refuse_weights_of_nobody(given, self._weights_of_all())
            except ValueError as error:
                raise self._lightning.refusal(str(error)) from None
            group = self.pipeline.mpu().get_pipe_parallel_group()
            self._spread.copies.cut_to_own(optimizer, given, group, flattened=self.wraps_optimizer)
            # A run leaves its states on the CPU, and a script may give the next run the same optimizer.
            self._lightning.module("strategies.strategy")._optimizers_to_device([optimizer], self.root_device)
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
        self._engine.copies_follow = True
        self._engine.watches_optimizer = False
        self._engine.clips_optimizer_alone = True
        self._engine.leaves_without_gradient = True
        if self.wraps_optimizer:
            self._engine.when_zeros_stand_for_none = partial(tell_of_zeros, self._module)
        if fitting:
            layers.refine_masters()
            layers.remember_groups(given)
            self.optimizers = [engine_optimizer]
            self._engine_optimizers = list(self.optimizers)
            self._asked_at_start = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
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

    def _weights_of_all(self) -> set[torch.nn.Parameter]:
        """The parameters of the LightningModule and of its layers, while those of all ranks are shown."""
        layers = (layer for _, layer in self.pipeline.call_of_module.existing_modules())
        owners = (self._module, self.pipeline, *layers)
        return {weight for owner in owners for weight in owner.parameters()}

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
        self.optimizers = EndedOptimizers() if self._lost_optimizer else []
        if self._lost_optimizer:
            self._lightning_optimizers = EndedOptimizers()  # what self.optimizers() asks for
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
        trainer = self._module.trainer
        number = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if number == self._number_of_batch:
            raise self._lightning.refusal(
                "optimizer_step evaluates its closure a second time for a batch, and in a pipeline the closure "
                "has made the optimizer's step when it returns: what evaluates the loss twice, such as SAM, "
                "cannot run in a pipeline"
            )
        self._number_of_batch = number
        self._refuse_step_that_was_left_out()
        self._look_at_metrics()
        with nullcontext() if self._hook_watch is None else self._hook_watch.step():
            trained = self._batches.train(batch, arguments)
        is_step = not trainer.fit_loop._should_accumulate()
        if is_step and self._rests is not None and self._never_drains:
            self._rests.is_given(batch)
        if is_step and self._figures is not None:
            self._figures.after_step()
        if is_step and not self._is_asked_to_step:
            self._left_out_in = number
        return trained

    def _look_at_metrics(self) -> None:
        """Let metrics that a hook has made before an epoch gather as the others do."""
        if self._looks_at_metrics and self._metrics is not None:
            self._metrics.look()
        self._looks_at_metrics = False

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the step's results if a hook reads them, else its loss."""
        self._look_at_metrics()
        return self._batches.evaluate("validation_step", batch, arguments)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the step's results if a hook reads them, else its loss."""
        self._look_at_metrics()
        return self._batches.evaluate("test_step", batch, arguments)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; return the predictions, if somebody takes them."""
        return self._batches.evaluate("predict_step", batch, arguments)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the closure, that is ``training_step``, whose ``engine.train_batch`` ends with the step."""
        call, trainer = self._lightning.module("trainer.call"), self._module.trainer
        self._refuse_what_changed(trainer)
        if self._optimizer_hooks is not None:
            self._optimizer_hooks.run_before_closure()
        call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
        self._refuse_step_that_was_left_out(but_in=trainer.fit_loop.epoch_loop.batch_progress.total.ready)
        self._left_out_in, self._is_asked_to_step = None, True
        try:
            return closure()
        finally:
            self._is_asked_to_step = False

    def _refuse_step_that_was_left_out(self, but_in: int | None = None) -> None:
        """Refuse an overridden ``optimizer_step`` that has run its closure and not the optimizer's step.

        Args:
            but_in: The number of a batch whose optimizer's step comes after its closure.
        """
        if self._left_out_in not in (None, but_in):
            raise self._lightning.refusal(
                f"optimizer_step of {type(self._module).__name__} has called its closure without "
                "optimizer.step(closure=...), to leave the optimizer's step out; in a pipeline the closure makes "
                "that step, as it has for the batch before. Let it call optimizer.step(closure=optimizer_closure) "
                "for each batch; Trainer(accumulate_grad_batches=n) steps once for n batches"
            )

    def setup_optimizers(self, trainer: Any) -> None:
        """Refuse to make a new optimizer within a run: Lightning's other strategies do, where a hook asks.

        Raises:
            MisconfigurationException: always; the pipeline's engine makes its steps with the one of the beginning.
        """
        raise self._lightning.refusal(
            "strategy.setup_optimizers() makes a new optimizer, and the pipeline's engine steps with the one that "
            "it has had since fit began: put all parameters that may train later into a group in "
            "configure_optimizers, with a learning rate of 0 that a hook sets later, or end this fit and call fit "
            "again"
        )

    def _refuse_what_changed(self, trainer: Any) -> None:
        """Refuse what the engine took when it began, and a hook has replaced since."""
        if self.optimizers[:1] != self._engine_optimizers:
            raise self._lightning.refusal(
                f"trainer.optimizers has another optimizer ({type(self.optimizers[0]).__name__}) than when fit "
                f"began, "
                "and the pipeline's engine steps with that one: let configure_optimizers return it, and fit again"
            )
        num_groups = len(self.deepspeed_engine.basic_optimizer.param_groups)
        if num_groups != self._num_groups and not self.wraps_optimizer:
            raise self._lightning.refusal(
                f"the optimizer had {self._num_groups} parameter groups when fit began and has {num_groups} now "
                "(add_param_group), and the pipeline's engine knows only those: make the group in "
                "configure_optimizers, with a learning rate of 0 that a hook sets later, or fit once without and "
                "once with the group"
            )
        now = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        if now != self._asked_at_start and "norm" in (now[1] or "norm", self._asked_at_start[1] or "norm"):
            raise self._lightning.refusal(clipping_changed(*self._asked_at_start, *now))

    def on_train_start(self) -> None:
        self._left_out_in, self._is_asked_to_step = None, False
        self._is_first_batch = True
        if self.options.plan is None:
            self._spread.refuse_copies_that_stay()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._looks_at_metrics = True
            self._batches.begin_training_epoch()
        elif self._is_first_batch and (note := note_on_resuming(self._module.trainer, batch_idx)) is not None:
            announce(note, logging.WARNING)
        self._is_first_batch = False

    def _leave_loop(self) -> None:
        """Leave the loop over the batches of an epoch on all ranks, or on none."""
        trainer = self._module.trainer
        stops = (
            "; trainer.should_stop is set there, which ranks have to decide alike, as by "
            "trainer.strategy.reduce_boolean_decision(stop, all=False)"
        )
        number = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        self.deepspeed_engine.leave(
            f"has left the loop over the batches of epoch {trainer.current_epoch} after {number} of them"
            f"{stops if trainer.should_stop else ''}"
        )
        if self.deepspeed_engine.goes_on:
            self.deepspeed_engine.come_to_rest()

    def on_train_end(self) -> None:
        self._refuse_step_that_was_left_out()
        self._batches.leave_window()
        if self._warm_up is not None and self.deepspeed_engine.is_warming_up:
            self._warm_up.say_that_no_plan_was_made()

    def on_validation_start(self) -> None:
        self._looks_at_metrics = True
        self._batches.begin_epoch()

    def on_test_start(self) -> None:
        self._looks_at_metrics = True
        self._batches.begin_epoch()

    def on_predict_start(self) -> None:
        self._batches.begin_epoch()

    def _start_runner(self, trainer: Any) -> None:
        module, engine, call = self._module, self.deepspeed_engine, self.pipeline.call_of_module
        traces = LayerTraces(module, call, self._lightning.exception, self._is_in_last_stage)
        traces.add(left_by_code(call))
        if self.pipeline.num_stages > 1:
            traces.add_of_hooks(collected_by_hooks(module, call))
        if self._hook_writing is not None:
            self._hook_writing.traces = traces
        runs_whole = self.pipeline.num_stages == 1 and self._resolved_num_micro_batches() == 1
        steps = UserSteps(
            module,
            call.attribute,
            self.precision_plugin.forward_context,
            self._lightning.exception,
            # What a LightningModule has before its user gives it anything.
            ignored=vars(self._lightning.module_class()),
            is_cut=self.pipeline.num_stages > 1,
            may_run_again=lambda: engine.may_run_again,
            traces=None if runs_whole else traces,
            captured=call.captured,
        )
        self.pipeline.loss_fn = steps.loss
        comparison = LayerComparison(
            trainer=trainer,
            module=module,
            pipeline=self.pipeline,
            engine=engine,
            steps=steps,
            traces=traces,
            lightning=self._lightning,
            context=self.precision_plugin.forward_context,
            is_wanted=self.check_layers,
        )
        self._runner = BatchRunner(
            trainer=trainer,
            module=module,
            pipeline=self.pipeline,
            engine=engine,
            steps=steps,
            comparison=comparison,
            num_micro_batches=self._resolved_num_micro_batches(),
            base_seed=self._base_seed,
            batch_numbers=self._batch_numbers,
            lightning=self._lightning,
            call_hooks=self._call_hooks_before_step,
            loss=self.loss,
            group_settings=self._group_settings,
            look_at_orders=self._spread.look_at_orders,
            copies_have_changed=self._spread.copies_have_changed,
            refuse_changed_copies=self._spread.refuse_changed_copies,
        )
        if self._rests is not None:
            self._rests.end()
            self._rests = None
        if trainer.state.fn == "fit":  # a checkpoint may bring a plan of another mode
            # What the module's hooks read is watched, and not what the engine's module is asked for.
            self.pipeline.has_told_old_weights = True
            self._rests = Rests(trainer, engine)
        stages = self.pipeline.mpu().get_pipe_parallel_group()
        self._metrics = BetweenPipelines(
            module, lambda: trainer.callbacks, self.gather_state, self._num_pipelines(), stages, self._steps_of_run
        )
        self.leave_out_needless_advice()

    def _steps_of_run(self) -> UserSteps | None:
        return None if self._runner is None else self._runner.steps

    def _is_in_last_stage(self, layer: int | str) -> bool:
        """Whether the stage behind which steps run has a layer, as layers lie now."""
        return isinstance(layer, int) and layer >= allocation_of(self.pipeline).stages[-1].layers[0]

    @property
    def _batches(self) -> BatchRunner:
        assert self._runner is not None, "setup() makes it"
        return self._runner

    def _call_hooks_before_step(self) -> None:
        """Call Lightning's hooks, on every rank, when the gradients of the whole step are there."""
        with nullcontext() if self._rests is None else self._rests.step_of_update():
            self._call_hooks_with_gradients()

    def _call_hooks_with_gradients(self) -> None:
        call, trainer = self._lightning.module("trainer.call"), self._module.trainer
        for hook, arguments in (("on_after_backward", ()), ("on_before_optimizer_step", self.optimizers[:1])):
            call._call_callback_hooks(trainer, hook, *arguments)
            call._call_lightning_module_hook(trainer, hook, *arguments)
        if trainer.gradient_clip_val and clips_by_value(trainer):
            torch.nn.utils.clip_grad_value_(self.pipeline.parameters(), trainer.gradient_clip_val)
        if self._group_settings is not None and self.deepspeed_engine.is_at_rest:
            self._group_settings.compare()


def _is_alone() -> bool:
    return dist.is_initialized() and dist.get_world_size() == 1


@cache
def strategy_class(namespace: str) -> type:
    """The strategy of ``pytorch_lightning`` or ``lightning.pytorch``, whose base classes are different ones."""
    base = importlib.import_module(f"{namespace}.strategies").DeepSpeedStrategy
    body = {
        "namespace": namespace,
        "_lightning": Lightning(namespace),
        "__doc__": PipelineStrategy.__doc__,
        "__module__": "lightning_madpipe",
    }
    return type("MadPipeStrategy", (PipelineStrategy, base), body)
