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
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec

from deepspeed_partition.engine import MadPipeEngine, PipelineModule, initialize
from deepspeed_partition.engine.transplant import preserved_random_state
from deepspeed_partition.planner.plan import Plan
from lightning_madpipe.groups import PipelineGroups
from lightning_madpipe.limits import clips_by_value, notes_on, refusal_of
from lightning_madpipe.metrics import gather_between_pipelines
from lightning_madpipe.module import PIPELINE, detach_layers, find_layers, refuse_other_calls
from lightning_madpipe.names import one_device_names
from lightning_madpipe.observers import count_pipelines, summarize_whole, whole_module
from lightning_madpipe.optimizers import configured_optimizer, renew_parameters
from lightning_madpipe.planning import WarmUpOfFit, folder_of_logs
from lightning_madpipe.runner import BatchRunner
from lightning_madpipe.saving import Checkpointing
from lightning_madpipe.settings import check_count, checked_config, read_config
from lightning_madpipe.steps import UserSteps

MICRO_BATCHES_PER_STAGE = 4
"""The default: with 4 P micro-batches each of P equal stages works 4 P / (5 P - 1) of a step, over 80 %."""


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
        config: DeepSpeed configuration, a dict or the path of a JSON file. Its own ``pipeline.madpipe`` gives
            the options that are not given here.
        cluster_environment: As in Lightning's ``DeepSpeedStrategy``.
        process_group_backend: As there. None: NCCL on CUDA, gloo on a CPU.
        timeout: As there, for communication.

    Raises:
        ValueError: a malformed argument, or an unknown one, with the known ones.

    Limits: the part of a step after its call of ``forward`` runs on the last stage only. The other ranks learn
    what it logs, returns and leaves behind on the module when the batch is through; it may wait for the last
    stages of other pipelines and for nobody else. A step runs once per micro-batch. ``on_after_backward`` comes
    once per optimizer step. On a rank that does not run the layer ``module.head`` its weights stay the initial
    ones. Checkpoints are DeepSpeed's directories; those of weights only are ordinary Lightning files of the whole
    model. FEATURES.md goes through the rest.
    """

    strategy_name = "madpipe"
    namespace: str
    """``pytorch_lightning`` or ``lightning.pytorch``."""
    config: dict[str, Any]

    def __init__(
        self,
        *,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
        warmup_epochs: int = 1,
        stage: int = 0,
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
        if stage not in (0, 1):
            raise ValueError(f"stage is {stage!r}: a pipeline works with ZeRO stage 0 or 1")
        super().__init__(
            zero_optimization=stage > 0,
            stage=stage,
            config=read_config(config),
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        options = {
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
        }
        self.config = self._given_config = checked_config(self.config, options, stage)
        num_steps = self.config["pipeline"]["madpipe"].get("warmup_steps")
        if warmup_epochs > 1 and num_steps:
            raise ValueError(f"warmup_epochs is {warmup_epochs} and warmup_steps is {num_steps}: give one of them")
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        # One epoch is what nobody asked for.
        self.warmup_epochs = 0 if warmup_epochs == 1 and num_steps is not None else warmup_epochs
        self._warm_up: WarmUpOfFit | None = None
        self._engine: MadPipeEngine | None = None
        self._runner: BatchRunner | None = None
        self._base_seed = 0
        self._batch_numbers = count(1)

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
        """DeepSpeed's module with this rank's layers, a child of the LightningModule."""
        return getattr(self._module, PIPELINE)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Every rank of a pipeline reads the same data; the pipelines share it among themselves."""
        grid = self.pipeline.mpu()
        return {"num_replicas": grid.get_data_parallel_world_size(), "rank": grid.get_data_parallel_rank()}

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning says when a window of batches is full, the short last one of an epoch included."""
        return False

    @property
    def wraps_optimizer(self) -> bool:
        """Whether DeepSpeed puts an optimizer of its own around the user's, on flat copies of the weights."""
        low = any(self.config.get(kind, {}).get("enabled") for kind in ("bf16", "fp16"))
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
        kind = self.root_device.type
        if kind not in ("cpu", "cuda"):
            raise self._refusal(f"the madpipe strategy runs on CPUs and CUDA devices, not on {kind}")
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
        refusal = refusal_of(trainer, module, base, callbacks)
        if refusal is not None:
            raise self._refusal(refusal)
        self.accelerator.setup(trainer)  # type: ignore[union-attr]
        self.precision_plugin.convert_module(module)
        # Every rank takes its seeds from rank 0: one model and one course, however the layers are cut.
        self._base_seed = self.broadcast(torch.initial_seed() % 2**31)
        if getattr(module, PIPELINE, None) is None:
            self._build_pipeline()
        elif self.pipeline.num_stages != self._resolved_num_stages():
            raise self._refusal(
                f"this {type(module).__name__} runs in {self.pipeline.num_stages} stages already and not in "
                f"num_stages={self._resolved_num_stages()}: build a new one"
            )
        module.to(self.root_device)
        self._start_engine(trainer)
        self.model = module
        self._watch_dumps(trainer)
        if trainer.state.fn == "fit":
            self._prepare_callbacks(trainer, base, callbacks)
        self._start_runner(trainer)
        self.barrier()

    def _prepare_callbacks(self, trainer: Any, base: Any, callbacks: Any) -> None:
        defaults = [kind.on_before_backward for kind in (base, callbacks.Callback)]
        for note in notes_on(trainer, self._module, defaults):
            self._lightning("utilities.rank_zero").rank_zero_warn(f"madpipe: {note}")
        whole = self.pipeline.whole_module()
        for callback in trainer.callbacks:
            if whole is not None and isinstance(callback, callbacks.ModelSummary):
                summarize_whole(self, whole, callback, self._lightning("utilities.model_summary").summarize)
            if isinstance(callback, callbacks.ThroughputMonitor):
                num_stages = self.pipeline.num_stages
                count_pipelines(callback, num_pipelines=self.world_size // num_stages, num_stages=num_stages)

    def _build_pipeline(self) -> None:
        module, num_stages = self._module, self._resolved_num_stages()
        # Which layers a rank builds must not shift the random numbers that follow.
        with preserved_random_state():
            try:
                call = find_layers(module)
            except ValueError as flaw:
                raise self._refusal(str(flaw)) from None
            if len(call.layers) < num_stages:
                raise self._refusal(
                    f"{type(module).__name__} has {len(call.layers)} pipeline layers for {num_stages} stages: "
                    "take fewer stages, or finer layers"
                )
            pipeline = PipelineModule(
                layers=call.layers,
                num_stages=num_stages,
                plan=self.config["pipeline"]["madpipe"].get("plan"),
                seed_layers=any(isinstance(layer, LayerSpec) for layer in call.layers),
                base_seed=self._base_seed,
            )
        # The seeds make a LayerSpec the same layer on any rank. In training they would reset everybody's
        # random numbers before each layer.
        pipeline.seed_layers = False
        pipeline.called_attribute = call.attribute
        pipeline.model_name = type(module).__name__  # which the plan names
        pipeline.one_device_names = one_device_names(module, call)
        pipeline.engine = lambda: None
        whole = whole_module(module, call)
        pipeline.whole_module = lambda: whole  # not as a child of the pipeline
        detach_layers(module, call)
        if num_stages > 1:
            refuse_other_calls(module, call.attribute, self._refusal)
        setattr(module, PIPELINE, pipeline)
        # Lightning's summary would run it through the whole model, of which this rank has a part.
        module.example_input_array = None

    def _start_engine(self, trainer: Any) -> None:
        self._stop_engine()
        fitting = trainer.state.fn == "fit"
        config = dict(self.config)
        optimizer, scheduler = None, None
        if fitting:
            try:
                optimizer, scheduler = configured_optimizer(
                    self._lightning("core.optimizer")._init_optimizers_and_lr_schedulers,
                    self._module,
                    set(self.pipeline.parameters()),
                    flattened=self.wraps_optimizer,
                )
            except ValueError as flaw:
                raise self._refusal(str(flaw)) from None
        else:
            config.pop("zero_optimization", None)  # which needs an optimizer
        self._engine, engine_optimizer, _, _ = initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            model=self.pipeline,
            optimizer=optimizer,
            model_parameters=[weight for weight in self.pipeline.parameters() if weight.requires_grad],
            config=config,
            dist_init_required=False,
        )
        self.pipeline.engine = weakref.ref(self._engine)
        if fitting:
            self.optimizers = [engine_optimizer]
            self.lr_scheduler_configs = [] if scheduler is None else [scheduler]
            if scheduler is not None:
                self._engine.show_every_group(scheduler.scheduler)
            # The engine runs backward and the optimizer, and clears the gradients.
            trainer.fit_loop._skip_backward = True
            self._engine.folder_of_logs = folder_of_logs(trainer)
            num_steps = self._engine.options.warmup_steps
            if self.warmup_epochs or num_steps:
                self._warm_up = WarmUpOfFit(trainer, num_epochs=self.warmup_epochs, num_steps=num_steps)
                self._engine.warm_up_until(self._warm_up.is_over, self._warm_up.length)

    def _format_config(self) -> None:
        super()._format_config()
        if self.config.get("fp16", {}).get("enabled"):
            # Its optimizer keeps fp32 weights that are known by parameter, which the one without ZeRO does not.
            self.config["zero_optimization"] = {**self.config.get("zero_optimization", {}), "stage": 1}

    def _stop_engine(self) -> None:
        """End what an earlier fit, validate or test left on the pipeline, of this Trainer or of another one.

        An engine that goes cuts its parameters from their optimizer, and Python may call it again for that at
        any time: the next engine gets parameters of its own.
        """
        engine = self.pipeline.engine()
        if engine is not None:
            engine.destroy()
        self._engine = None
        self.optimizers = []
        self._lightning("strategies.deepspeed").remove_module_hooks(self.pipeline)
        renew_parameters(self.pipeline)
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
        """Run ``batch`` with those of its optimizer step; its loss, with what else was returned if it is read."""
        return self._batches.train(batch, arguments)

    def validation_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; what the user's step returned if a hook reads it, else its loss."""
        return self._batches.evaluate("validation_step", batch, arguments)

    def test_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; what the user's step returned if a hook reads it, else its loss."""
        return self._batches.evaluate("test_step", batch, arguments)

    def predict_step(self, batch: Any, *arguments: Any) -> Any:
        """Run ``batch`` through the pipeline; the predictions, if somebody takes them."""
        return self._batches.evaluate("predict_step", batch, arguments)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the closure, that is ``training_step``, whose ``engine.train_batch`` ends with the step."""
        call, trainer = self._lightning("trainer.call"), self._module.trainer
        call._call_callback_hooks(trainer, "on_before_zero_grad", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_zero_grad", optimizer)
        return closure()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._batches.begin_training_epoch()

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
        module, engine = self._module, self.deepspeed_engine
        steps = UserSteps(
            module,
            self.pipeline.called_attribute,
            self.precision_plugin.forward_context,
            self._exception,
            # What a LightningModule has before its user gives it anything.
            ignored=vars(self._lightning("core.module").LightningModule()),
            is_cut=self.pipeline.num_stages > 1,
            may_run_again=lambda: engine.may_run_again,
        )
        self.pipeline.loss_fn = steps.loss
        self._runner = BatchRunner(
            trainer=trainer,
            module=module,
            pipeline=self.pipeline,
            engine=engine,
            steps=steps,
            num_micro_batches=self._resolved_num_micro_batches(),
            base_seed=self._base_seed,
            batch_numbers=self._batch_numbers,
            namespace=self.namespace,
            call_hooks=self._call_hooks_before_step,
            refusal=self._refusal,
        )
        gather_between_pipelines(module, self.gather_state)
        self.leave_out_needless_advice()

    @property
    def _batches(self) -> BatchRunner:
        assert self._runner is not None, "setup() makes it"
        return self._runner

    def _call_hooks_before_step(self) -> None:
        """Lightning's hooks, on every rank, when the gradients of the whole step are there."""
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


@cache
def strategy_class(namespace: str) -> type:
    """The strategy of ``pytorch_lightning`` or ``lightning.pytorch``, whose base classes are different ones."""
    base = importlib.import_module(f"{namespace}.strategies").DeepSpeedStrategy
    body = {"namespace": namespace, "__doc__": PipelineStrategy.__doc__, "__module__": "lightning_madpipe"}
    return type("MadPipeStrategy", (PipelineStrategy, base), body)
