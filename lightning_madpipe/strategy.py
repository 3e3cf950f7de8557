"""The Lightning strategy: DeepSpeed's pipeline engine, planned by MadPipe, under an unchanged LightningModule.

One Lightning batch is what one pipeline consumes at once. The strategy cuts it into micro-batches and hands
those of one optimizer step to ``engine.train_batch``. Every rank of a pipeline reads the same batches: the
first stage uses their inputs, and only the last one runs the whole ``training_step``. What that logs is sent
to the other ranks and logged there again, so that callbacks decide alike everywhere.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_partition.engine import MadPipeEngine, PipelineModule, initialize
from deepspeed_partition.engine.collectives import gather_objects
from deepspeed_partition.engine.transplant import preserved_random_state
from deepspeed_partition.planner.plan import Plan
from lightning_madpipe.batches import batch_size_of, fingerprint_of, shapes_of, split_batch
from lightning_madpipe.limits import refusal_of
from lightning_madpipe.module import detach_layers, find_layers
from lightning_madpipe.settings import check_count, checked_config
from lightning_madpipe.steps import MicroBatch, StepResult, UserSteps, result_of

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DeepSpeedStrategy
else:
    DeepSpeedStrategy = object

PIPELINE = "pipeline_module"
"""The attribute of the LightningModule that holds its pipeline, that is, this rank's layers."""

OUTSIDE_STATE = "madpipe_state_dict"
"""Where a checkpoint keeps the buffers of the LightningModule that belong to no layer."""

MICRO_BATCHES_PER_STAGE = 4
"""The default: with 4 P micro-batches each of P equal stages works 4 P / (5 P - 1) of a step, over 80 %."""


class PipelineStrategy(DeepSpeedStrategy):
    """Pipeline parallelism on a cut that is planned from measurements of the model's own layers.

    ``Trainer(strategy="madpipe", devices=4)``, or ``MadPipeStrategy(...)`` with arguments, all optional:

    Args:
        num_stages: Stages of a pipeline. It divides the number of processes; the rest is data parallel.
            None: all processes.
        num_micro_batches: Pieces that each Lightning batch is cut into. None: 4 per stage. A batch of fewer
            samples gives a piece per sample.
        warmup_epochs: Accepted, like ``warmup_steps``: the plan is made before the first optimizer step.
        stage: ZeRO stage, 0 or 1.
        memory: Bytes of each device, also ``"16GB"``. None: the device's own; on a CPU the machine's memory
            divided by its processes.
        bandwidth: Bytes per second between neighbours, also ``"12GB/s"``. None: measured.
        latency_seconds: None: measured.
        weight_copies: None: from the optimizer and the precision.
        algorithm: The name of a planner, or boundaries.
        warmup_steps: See ``warmup_epochs``.
        plan: A plan file, which is run as it is, without measuring.
        save_plan: Where the plan is written.
        time_limit_seconds: For planning.
        config: DeepSpeed configuration, a dict or the path of a JSON file. Its own ``pipeline.madpipe`` gives
            the options that are not given here.
        cluster_environment: As in Lightning's ``DeepSpeedStrategy``.
        process_group_backend: As there. None: NCCL on CUDA, gloo on a CPU.
        timeout: As there, for communication.

    Raises:
        ValueError: a malformed argument, or an unknown one, with the known ones.

    Limits: the part of a step after its call of ``forward`` runs on the last stage only. Attributes that it
    sets are set there, and other ranks learn its loss and what it logs; nothing that it does may wait for
    other ranks. ``on_after_backward`` comes once per optimizer step. On a rank that does not run the layer
    ``module.head`` its weights stay the initial ones. Checkpoints are DeepSpeed's directories.
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
        warmup_epochs: int | None = None,
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
        check_count("warmup_epochs", warmup_epochs, least=0)
        if stage not in (0, 1):
            raise ValueError(f"stage is {stage!r}: a pipeline works with ZeRO stage 0 or 1")
        super().__init__(
            zero_optimization=stage > 0,
            stage=stage,
            config=dict(config) if isinstance(config, Mapping) else config,
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
        }
        self.config = checked_config(self.config, options, stage)
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.warmup_epochs = warmup_epochs
        self._engine: MadPipeEngine | None = None
        self._steps: UserSteps | None = None
        self._window: list[list[MicroBatch]] = []
        self._last_loss = torch.zeros(())
        self._rehearsed: set[str] = set()
        self._begins = True
        """Whether the next batch is the first of an epoch."""
        self._base_seed = 0
        self._num_batches = 0

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
    def _module(self) -> Any:
        assert self.lightning_module is not None, "the Trainer connects it"
        return self.lightning_module

    @property
    def _user_steps(self) -> UserSteps:
        assert self._steps is not None, "setup() makes it"
        return self._steps

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
        refusal = refusal_of(trainer, module, self._lightning("core.module").LightningModule)
        if refusal is not None:
            raise self._refusal(refusal)
        self._init_config_if_needed()
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
        self._steps = UserSteps(
            module,
            self.pipeline.called_attribute,
            self.precision_plugin.forward_context,
            self._exception,
        )
        self.pipeline.loss_fn = self._steps.loss
        module.to(self.root_device)
        self._start_engine(trainer)
        self.model = module
        self._window, self._rehearsed = [], set()
        self._last_loss = torch.zeros((), device=self.root_device)
        self.barrier()

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
        pipeline.engine = lambda: None
        detach_layers(module, call)
        setattr(module, PIPELINE, pipeline)
        # Lightning's summary would run it through the whole model, of which this rank has a part.
        module.example_input_array = None

    def _start_engine(self, trainer: Any) -> None:
        self._stop_engine()
        fitting = trainer.state.fn == "fit"
        config = dict(self.config)
        optimizer, scheduler = None, None
        if fitting:
            optimizer, scheduler = self._configured_optimizer()
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
            self._engine.before_optimizer_step = self._call_hooks_before_step
            self.optimizers = [engine_optimizer]
            self.lr_scheduler_configs = [] if scheduler is None else [scheduler]
            if scheduler is not None:
                self._engine.show_every_group(scheduler.scheduler)
            # The engine runs backward and the optimizer, and clears the gradients.
            trainer.fit_loop._skip_backward = True
            if self.warmup_epochs is not None:
                self._lightning("utilities.rank_zero").rank_zero_info(
                    "madpipe: the plan is made before the first optimizer step "
                    f"(warmup_epochs={self.warmup_epochs} changes nothing here)"
                )

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
        _renew_parameters(self.pipeline)
        gc.collect()

    def _format_batch_size_and_grad_accum_config(self) -> None:
        trainer = self._module.trainer
        num_micro_batches = self._resolved_num_micro_batches() * trainer.accumulate_grad_batches
        self.config["gradient_accumulation_steps"] = num_micro_batches
        self.config.setdefault("train_micro_batch_size_per_gpu", 1)  # until the first batch comes
        self.config.setdefault("gradient_clipping", trainer.gradient_clip_val or 0.0)
        self.config.setdefault("steps_per_print", sys.maxsize)

    def _configured_optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        """The user's optimizer, with this rank's parameters in its groups, and the scheduler's config or None."""
        configure = self._lightning("core.optimizer")._init_optimizers_and_lr_schedulers
        one_of_each = "a pipeline works with one optimizer and at most one scheduler"
        try:
            optimizers, schedulers = configure(self._module)
        except RuntimeError as flaw:
            if "multiple optimizers" not in str(flaw):
                raise
            # Lightning's advice, manual optimization, would be refused here.
            raise self._refusal(f"configure_optimizers returns several optimizers: {one_of_each}") from None
        if len(schedulers) > 1:
            raise self._refusal(f"configure_optimizers returns {len(schedulers)} schedulers: {one_of_each}")
        optimizer = optimizers[0]
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
            raise self._refusal(
                f"configure_optimizers returns {type(optimizer).__name__}: a pipeline works with a torch "
                "optimizer whose step needs no closure"
            )
        # Groups may name layers that run elsewhere, such as self.head.parameters().
        local = set(self.pipeline.parameters())
        for group in optimizer.param_groups:
            group["params"] = [weight for weight in group["params"] if weight in local]
        return optimizer, schedulers[0] if schedulers else None

    # Steps

    def training_step(self, batch: Any, *arguments: Any) -> Tensor:
        """Collect the micro-batches of ``batch``; with the last batch of an optimizer step, run them all.

        Returns:
            The loss of ``batch`` on this pipeline, the same on each of its ranks. While batches are being
            collected: that of the last one before, 0 where there is none.
        """
        trainer, engine = self._module.trainer, self.deepspeed_engine
        self._window.append(self._micro_batches("training_step", batch, arguments))
        if trainer.fit_loop._should_accumulate():
            return self._last_loss
        window, self._window = self._window, []
        for micro_batches in window:
            total = sum(micro_batch.size for micro_batch in micro_batches)
            for micro_batch in micro_batches:
                share = micro_batch.size / total / trainer.accumulate_grad_batches
                micro_batch.loss_scale = share * engine.gradient_accumulation_steps()
        in_order = [micro_batch for micro_batches in window for micro_batch in micro_batches]
        engine.micro_batches = len(in_order)
        if engine.global_steps == 0:
            engine.set_train_micro_batch_size(in_order[0].size)  # known now; the plan's chain names it
        with self._announced_shapes(in_order):
            engine.train_batch(self._feed(in_order))
        results = self._shared_results(window)
        for result in results:
            self._log_again(result)
        self._last_loss = torch.tensor(results[-1].loss, device=self.root_device)
        return self._last_loss

    def validation_step(self, batch: Any, *arguments: Any) -> Tensor | None:
        """Run ``batch`` through the pipeline, and return its loss if the user's step returns one."""
        return self._evaluate("validation_step", batch, arguments)

    def test_step(self, batch: Any, *arguments: Any) -> Tensor | None:
        """Run ``batch`` through the pipeline, and return its loss if the user's step returns one."""
        return self._evaluate("test_step", batch, arguments)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        """Run the closure, that is ``training_step``, whose ``engine.train_batch`` ends with the step."""
        return closure()

    def _evaluate(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> Tensor | None:
        micro_batches = self._micro_batches(step, batch, arguments)
        # In inference mode, which Lightning may have entered, the engine would allocate buffers that
        # training cannot use.
        with torch.inference_mode(False), torch.no_grad(), self._announced_shapes(micro_batches):
            self.deepspeed_engine.eval_batch(
                self._feed(micro_batches),
                compute_loss=True,
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=len(micro_batches),
            )
        [result] = self._shared_results([micro_batches])
        self._log_again(result)
        return None if result.loss is None else torch.tensor(result.loss, device=self.root_device)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._begins = self._begins or batch_idx == 0

    def on_validation_start(self) -> None:
        self._begins = True

    def on_test_start(self) -> None:
        self._begins = True

    def _micro_batches(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> list[MicroBatch]:
        if self._begins:
            self._check_same_batch(batch)
            self._begins = False
        try:
            pieces = split_batch(batch, self._resolved_num_micro_batches())
        except ValueError as flaw:
            raise self._refusal(f"{step}: {flaw}") from None
        self._num_batches += 1
        # Primes keep the seeds of ranks, batches and pieces apart.
        seed = self._base_seed + 7919 * self._num_batches + self.pipeline.mpu().get_data_parallel_rank()
        micro_batches = [
            MicroBatch(
                step=step,
                data=piece,
                size=batch_size_of(piece),
                arguments=arguments,
                seed=seed + 15485863 * index,
            )
            for index, piece in enumerate(pieces)
        ]
        if step not in self._rehearsed:
            # Every rank runs the step up to the pipeline once: what it cannot do is then an error on all
            # ranks, and not one error and a wait on the others.
            self._user_steps.inputs(micro_batches[0])
            self._rehearsed.add(step)
        return micro_batches

    def _feed(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Any, MicroBatch]]:
        """What the engine reads: inputs, on the first stage, and each micro-batch itself as its labels."""
        for micro_batch in micro_batches:
            first = self.deepspeed_engine.is_first_stage()
            yield self._user_steps.inputs(micro_batch) if first else None, micro_batch

    @contextmanager
    def _announced_shapes(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Where shapes differ within a batch, let the engine send them with every micro-batch of it.

        Otherwise it sends them once per batch.
        """
        engine = self.deepspeed_engine
        before = engine.dynamic_shape
        shapes = {shapes_of(micro_batch.data) for micro_batch in micro_batches}
        engine.dynamic_shape = before or len(shapes) > 1
        try:
            yield
        finally:
            engine.dynamic_shape = before

    def _shared_results(self, window: Sequence[Sequence[MicroBatch]]) -> list[StepResult]:
        """The results of the window's batches, on every rank of the pipeline."""
        results = None
        if self.deepspeed_engine.is_last_stage():
            results = [result_of(micro_batches) for micro_batches in window]
        box: list[Any] = [results]
        if self.pipeline.num_stages > 1:
            grid = self.pipeline.mpu()
            last = grid.stage_to_global(self.pipeline.num_stages - 1)
            torch.distributed.broadcast_object_list(box, src=last, group=grid.get_pipe_parallel_group())
        return box[0]

    def _log_again(self, result: StepResult) -> None:
        for log_call in result.log_calls:
            if log_call.get("sync_dist"):
                # The ranks of a pipeline hold one value, which is to count once.
                log_call = {**log_call, "sync_dist_group": self.pipeline.mpu().get_data_parallel_group()}
            self._module.log(**log_call)

    def _check_same_batch(self, batch: Any) -> None:
        """At the beginning of an epoch: the ranks of a pipeline must read the same batches.

        Random augmentation may make the inputs differ, of which only the first stage's count. Where samples
        come in another order, every tensor differs.
        """
        if self.pipeline.num_stages == 1:
            return
        everyone = gather_objects(fingerprint_of(batch), self.pipeline.mpu().get_pipe_parallel_group())
        for stage, tensors in enumerate(everyone[1:], start=1):
            same_shapes = [shape for shape, _ in tensors] == [shape for shape, _ in everyone[0]]
            if not same_shapes or (tensors and not set(tensors) & set(everyone[0])):
                raise self._refusal(
                    f"stages 0 and {stage} of a pipeline read different batches: use the Trainer's own "
                    "distributed sampler (use_distributed_sampler=True), or one that is seeded alike on all ranks"
                )

    def _call_hooks_before_step(self) -> None:
        """Lightning's hooks, on every rank, when the gradients of the whole step are there."""
        call, trainer = self._lightning("trainer.call"), self._module.trainer
        for hook, arguments in (("on_after_backward", ()), ("on_before_optimizer_step", self.optimizers[:1])):
            call._call_callback_hooks(trainer, hook, *arguments)
            call._call_lightning_module_hook(trainer, hook, *arguments)

    # Checkpoints: DeepSpeed's directories, with the cut and with the state of what is no layer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = self._module.state_dict()
        outside = {name: value for name, value in state.items() if not name.startswith(f"{PIPELINE}.")}
        super().save_checkpoint({**checkpoint, OUTSIDE_STATE: outside}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *arguments, **keywords)
        self._module.load_state_dict(checkpoint.get(OUTSIDE_STATE, {}), strict=False)
        return checkpoint

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


def _renew_parameters(module: nn.Module) -> None:
    """Replace every Parameter by a new one of the same data, with sharing and DeepSpeed's mark kept."""
    renewed: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is None:
                continue
            if old not in renewed:
                renewed[old] = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
                renewed[old].ds_pipe_replicated = getattr(old, "ds_pipe_replicated", False)  # type: ignore[attr-defined]
            part._parameters[name] = renewed[old]
