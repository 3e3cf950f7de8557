"""What stands around the steps: callbacks, optimizers, precision, settings of the Trainer.

Written like ``lightning_cases.py``; the layers are cut by hand, which spares measuring them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from csv import DictReader
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins import AsyncCheckpointIO
from pytorch_lightning.tuner import Tuner
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from deepspeed_partition.engine.runtime import all_come
from deepspeed_partition.profiling import arrivals
from lightning_madpipe.checkpoint import checkpoint_folders
from tests.lightning import checkpoint_cases
from tests.lightning import lightning_cases as cases
from tests.lightning.after_fit_cases import Said
from tests.lightning.checkpoint_cases import Keeping
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import CUT, ENDS, end, refused, seeded, trained
from tests.lightning.map_cases import plan_file

# Hooks


def _hook(name: str) -> Callable[..., None]:
    def called(self: Any, *_: Any, **__: Any) -> None:
        self.calls.append(name)

    return called


EVERY_HOOK = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = [
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "setup",
    "teardown",
]  # fmt: skip


class Listener(pl.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []


for _name in EVERY_HOOK:
    setattr(Listener, _name, _hook(_name))


class Listening(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []


for _name in MODULE_HOOKS:
    setattr(Listening, _name, _hook(_name))


def hooks(host: cases.Host) -> dict[str, Any]:
    """Every hook of a callback and of the module, in the order of the calls."""
    listener, module = Listener(), seeded(Listening)
    checkpoint = shipped.ModelCheckpoint(host.folder / "hooks", every_n_epochs=1)
    trained(host, module, listener, checkpoint, validation=cases.loader(21, seed=3))
    return {"callback": listener.calls, "module": module.calls}


# Callbacks that Lightning ships


class Summary(shipped.ModelSummary):
    """Keeps what it would print."""

    shown: Any = None

    def summarize(self, data: Any, *totals: Any, **__: Any) -> None:  # type: ignore[override]
        self.shown = [[title, rows] for title, rows in data if title != "FLOPs"], list(totals[:3])


class RichSummary(Summary, shipped.RichModelSummary):
    pass


def summaries(host: cases.Host) -> dict[str, Any]:
    shown = {}
    for kind, depth in ((Summary, 2), (RichSummary, 1)):
        callback = kind(max_depth=depth)
        trained(host, seeded(), callback, max_epochs=1, enable_model_summary=True)
        shown[kind.__name__] = json.loads(json.dumps(callback.shown))
    tied = Summary(max_depth=-1)
    tokens = torch.randint(cases.VOCABULARY, (16, 6), generator=torch.Generator().manual_seed(4))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16)
    cut = {"algorithm": [0, 3, 6]}
    trained(host, seeded(cases.TiedLanguageModel), tied, data=data, strategy=cut, enable_model_summary=True)
    return {**shown, "tied": json.loads(json.dumps(tied.shown))}


class Names(pl.Callback):
    """What a summary callback would show of the module."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        [summary] = [each for each in trainer.callbacks if isinstance(each, shipped.ModelSummary)]
        self.names = list(summary._summary(trainer, module).layer_names)


class FromSpecs(cases.Steps):
    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        first, last = (cases.NUM_FEATURES, cases.WIDTH), (cases.WIDTH, cases.NUM_CLASSES)
        return [LayerSpec(nn.Linear, *first), LayerSpec(cases.Block), LayerSpec(nn.Linear, *last)]


def summary_of_specs(host: cases.Host) -> dict[str, Any]:
    """Layers that are built on their stage only; their weights are saved by the names that they have there."""
    names = Names()
    callbacks = (names, shipped.ModelSummary(max_depth=1))
    trainer = trained(host, seeded(FromSpecs), *callbacks, max_epochs=1, strategy={"algorithm": [0, 1, 3]})
    trainer.save_checkpoint(host.folder / "specs.ckpt", weights_only=True)
    state = torch.load(host.folder / "specs.ckpt", weights_only=False)["state_dict"]
    data = cases.loader(21, seed=3)
    stages = ({"num_stages": 1}, {"num_stages": 2, "algorithm": [0, 2, 3]})
    tested = [
        host.trainer(strategy=strategy).test(
            seeded(FromSpecs, seed=9), data, ckpt_path=host.folder / "specs.ckpt", verbose=False
        )
        for strategy in stages
    ]
    return {"names": names.names, "state": sorted(state), "tested": tested}


def watching_callbacks(host: cases.Host) -> dict[str, Any]:
    """Those that look on and those that count: nothing may change, and they must have seen the run."""
    counts = {"epochs": 0}

    def count(*_: Any) -> None:
        counts["epochs"] += 1

    timer = shipped.Timer(duration="00:01:00:00", interval="step")
    rates = shipped.LearningRateMonitor("step", log_momentum=True)
    trainer = trained(
        host,
        seeded(),
        shipped.DeviceStatsMonitor(cpu_stats=True),
        shipped.EarlyStopping("train_loss_epoch", patience=5),
        shipped.LambdaCallback(on_train_epoch_end=count),
        rates,
        shipped.RichProgressBar(),
        shipped.SpikeDetection(warmup=100),
        # Not a number of samples, which that of Lightning 2.5 takes for the same in every batch.
        shipped.ThroughputMonitor(batch_size_fn=len, window_size=2),
        timer,
        logger=CSVLogger(host.folder / "watching"),
        enable_progress_bar=True,
        validation=cases.loader(21, seed=3),
    )
    header = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    measured = sorted(name for name in header if name.startswith("train/"))  # by the ThroughputMonitor
    timed = timer.time_elapsed("train") > 0
    return {**end(trainer), **counts, "rates": rates.lrs, "timed": timed, "measured": measured}


def timed_out(host: cases.Host) -> dict[str, Any]:
    """A Timer that has run out stops every rank after the same step."""
    return end(trained(host, seeded(), shipped.Timer(duration={"seconds": 0}, interval="step")))


class Rated(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.lr = 0.3

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def rate_finder(host: cases.Host) -> dict[str, Any]:
    """By the callback, and by the Tuner: the losses that it saw, what it suggests, and the fit after it."""
    finder = shipped.LearningRateFinder(num_training_steps=16, early_stop_threshold=None)
    module = seeded(Rated)
    recorder = cases.Recorder()
    trained(host, module, finder, recorder, data=cases.loader(512), max_epochs=1, max_steps=6)
    tuned = seeded(Rated)
    trainer = host.trainer(default_root_dir=host.folder, max_epochs=1, strategy={"algorithm": CUT})
    found = Tuner(trainer).lr_find(tuned, cases.loader(512), num_training=16, early_stop_threshold=None)
    trainer.fit(tuned, cases.loader(54))
    assert found is not None and finder.optimal_lr is not None
    return {
        "callback": [finder.optimal_lr.results, finder.optimal_lr.suggestion(), module.lr, recorder.rows],
        "tuner": [found.results, found.suggestion(), tuned.lr, end(trainer)],
    }


def rate_finder_with_a_plan(host: cases.Host) -> dict[str, Any]:
    """The plan is made while the rate is searched, and kept when the weights go back to the beginning.

    At once where the search ends within the first epoch, of six steps, else after that.
    """
    found = []
    for num_steps in (4, 8):
        module, recorder = seeded(Rated), cases.Recorder()
        finder = shipped.LearningRateFinder(num_training_steps=num_steps, early_stop_threshold=None)
        strategy = {"algorithm": [0, 2, 8], "warmup_epochs": 1}
        trainer = trained(host, module, finder, recorder, data=cases.loader(96), strategy=strategy)
        assert not host.pipelined or trainer.strategy.pipeline.parts == [0, 2, 8]
        found.append([recorder.rows, module.lr, end(trainer)])
    return {"found": found}


# Optimizers and schedulers


class Own(optim.Optimizer):
    """Sign descent, as a user may write it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.add_(weight.grad.sign(), alpha=-group["lr"])
        return loss


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    biases = [weight for name, weight in module.named_parameters() if name.endswith("bias")]
    matrices = [weight for name, weight in module.named_parameters() if not name.endswith("bias")]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "lr": 5e-3}]


def stepped(make: Callable[[Any], Any], **settings: Any) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": make(optimizer), "interval": "step", **settings}]

    return configure


def adam_one_cycle(module: Any) -> Any:
    optimizer = optim.AdamW(groups_of(module), lr=0.01)
    scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=ENDS)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda module, name=name: getattr(optim, name)(module.parameters(), lr=0.01)
        for name in (
            "Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor",
        )
        if hasattr(optim, name)  # Adafactor came with torch 2.5
    },
    "fused": lambda module: optim.Adam(module.parameters(), lr=0.01, fused=True),
    "foreach": lambda module: optim.AdamW(module.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "own": lambda module: Own(module.parameters(), lr=0.01),
    "a list": lambda module: [optim.SGD(module.parameters(), lr=0.1)],
    "a dict in a list": lambda module: [{"optimizer": optim.SGD(module.parameters(), lr=0.1)}],
    "one cycle of Adam": adam_one_cycle,
    "one cycle of SGD": stepped(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=ENDS)),
    "warm restarts": stepped(lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2)),
    "sequential": stepped(
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)],
            [3],
        )
    ),
    "chained": stepped(
        lambda optimizer: schedulers.ChainedScheduler(
            [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.StepLR(optimizer, 2, 0.5)]
        )
    ),
    "by group": stepped(
        lambda optimizer: schedulers.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step])
    ),
    "every other step": stepped(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5), frequency=2),
    "every epoch": stepped(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5), interval="epoch"),
    "plateau of a step": stepped(
        lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, mode="max"),
        monitor="train_loss_step",
    ),
}  # fmt: skip

WRAPPED = ("Adam", "RMSprop", "own", "one cycle of Adam", "by group", "sequential", "chained")
"""Run again under DeepSpeed's optimizer for ZeRO-1, which gives one flat tensor per group."""


class Groups(pl.Callback):
    """What a scheduler may change, after every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        self.seen.append([[g["lr"], g.get("momentum"), list(g.get("betas", ()))] for g in groups])


def optimizers(host: cases.Host) -> dict[str, Any]:
    records = {}
    for name, configure in OPTIMIZERS.items():
        kind = type("Classifier", (cases.Classifier,), {"configure_optimizers": configure})
        for stage in (0, 1) if name in WRAPPED else (0,):
            groups = Groups()
            trainer = trained(host, seeded(kind), groups, max_epochs=1, strategy={"stage": stage})
            records[f"{name} ZeRO-{stage}"] = {**end(trainer), "groups": groups.seen}
    return records


class WarmUp(cases.Classifier):
    """The warm-up of Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 5 * 0.1

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class WarmUpBefore(WarmUp):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 + batch_idx)
        super(WarmUp, self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnScheduling(WarmUp):
    optimizer_step = cases.Classifier.optimizer_step

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": schedulers.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def own_steps(host: cases.Host) -> dict[str, Any]:
    records = {}
    for kind in (WarmUp, WarmUpBefore, OwnScheduling):
        for stage in (0, 1):
            rates = cases.Rates()
            trainer = trained(host, seeded(kind), rates, max_epochs=1, strategy={"stage": stage})
            records[f"{kind.__name__} ZeRO-{stage}"] = {**end(trainer), "rates": rates.rates}
    return records


# Settings of the Trainer


SETTINGS: dict[str, dict[str, Any]] = {
    "inference_mode": {"inference_mode": False},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "detect_anomaly": {"detect_anomaly": True},
    "sanity": {"num_sanity_val_steps": 2},
    "no checkpoints": {"enable_checkpointing": False},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipped by norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm", "accumulate_grad_batches": 2},
    "num_nodes": {"num_nodes": 1},
    "barebones": {
        "barebones": True, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None,
        "logger": None, "log_every_n_steps": None, "num_sanity_val_steps": None,
    },
}  # fmt: skip


def settings(host: cases.Host) -> dict[str, Any]:
    records = {}
    for name, arguments in SETTINGS.items():
        trainer = trained(host, seeded(), max_epochs=1, validation=cases.loader(21, seed=3), **arguments)
        [config] = trainer.lr_scheduler_configs
        counts = [trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.num_val_batches]
        kinds = [type(trainer.optimizers[0]).__name__, type(config.scheduler).__name__, config.interval]
        tested = trainer.validate(trainer.lightning_module, cases.loader(21, seed=3), verbose=False)
        records[name] = {**end(trainer), "counts": counts, "kinds": kinds, "tested": tested}
    torch.use_deterministic_algorithms(False)
    return records


def loggers(host: cases.Host) -> dict[str, Any]:
    """The names in a CSV file, and the hyper-parameters that TensorBoard is given."""
    csv = CSVLogger(host.folder / "csv", version=0)
    board = TensorBoardLogger(str(host.folder / "board"), version=0)
    with Said() as said:
        trainer = trained(host, seeded(Keeping), logger=[csv, board], validation=cases.loader(21, seed=3))
    rows = list(DictReader((Path(csv.log_dir) / "metrics.csv").open()))
    names = [name for name in rows[0] if not name.startswith("madpipe/")]
    if host.pipelined and trainer.is_global_zero:
        _check_figures(rows, trainer)
        [told] = [line for line in said.lines if "metrics.csv" in line]  # whose rows were more, in silence
        assert f"for madpipe/step_seconds and other figures, every {trainer.log_every_n_steps} steps" in told
    parameters = (Path(board.log_dir) / "hparams.yaml").read_text()
    return {**end(trainer), "names": sorted(names), "parameters": parameters}


def _check_figures(rows: list[dict[str, str]], trainer: Any) -> None:
    """The logger has figures of each step, under the step's number: all that is no bubble is work of a stage."""
    found = [row for row in rows if row["madpipe/step_seconds"]]
    assert [int(row["step"]) for row in found] == list(range(trainer.global_step))
    for row in found:
        worked = sum(float(row[f"madpipe/stage_{stage}_seconds"]) for stage in (0, 1))
        shares = worked / (2 * float(row["madpipe/step_seconds"])) + float(row["madpipe/bubble_share"])
        assert worked > 0 and abs(shares - 1) < 1e-6
        assert all(float(row[f"madpipe/link_{link}_waiting_seconds"]) >= 0 for link in ("0_to_1", "1_to_0"))


def profilers(host: cases.Host) -> dict[str, Any]:
    """What a profiler has seen, by name and number of calls, where one process sees it, too."""
    records = {}
    for name in ("simple", "advanced", "pytorch"):
        trainer = trained(host, seeded(), profiler=name, max_epochs=1, validation=cases.loader(21, seed=3))
        records[name] = end(trainer)
        if name == "simple":
            seen = trainer.profiler.recorded_durations
            shared = {
                action for action in seen if "[Strategy]" not in action and "_TrainingEpochLoop" not in action
            }
            records["calls"] = {action: len(seen[action]) for action in sorted(shared & PROFILED)}
    return records


class Sections(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with self.trainer.profiler.profile("of the step"):
            return super().training_step(batch, batch_idx)


def sections_of_steps(host: cases.Host) -> dict[str, Any]:
    """A section that a step profiles itself counted trials, and nothing was said of its micro-batches."""
    with lines() as said:
        module, strategy = seeded(Sections), {"num_micro_batches": 2}
        trainer = trained(host, module, profiler="simple", max_epochs=1, strategy=strategy)
    times = trainer.profiler.recorded_durations["of the step"]
    return {
        "number": len(times),
        "batches": trainer.global_step,
        "said": [line for line in said if "profiles" in line],
    }


PROFILED = {
    "run_training_batch", "run_training_epoch", "optimizer_step", "[LightningModule]Classifier.on_train_batch_end",
    "[LightningModule]Classifier.on_before_optimizer_step", "[LightningModule]Classifier.on_validation_epoch_end",
}  # fmt: skip


# Precision


def low_precision(host: cases.Host) -> dict[str, Any]:
    """Half precision, against 32 bits in one process. A CPU computes in fp16, though DeepSpeed would not start."""
    records = {}
    for precision in ("bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        with _fp16_allowed(host.pipelined):
            chosen = precision if host.pipelined else "32-true"
            trainer = trained(host, seeded(), precision=chosen, validation=cases.loader(21, seed=3))
            records[precision] = end(trainer)
    return records


@contextmanager
def _fp16_allowed(allowed: bool) -> Iterator[None]:
    if not allowed:
        yield
        return
    from deepspeed.accelerator import get_accelerator

    with patch.object(get_accelerator(), "is_fp16_supported", lambda: True):
        yield


def loss_scales(host: cases.Host) -> dict[str, Any]:
    """The loss scale of the configuration; with one that is too large, every step is skipped and counted."""
    records = {}
    for power in (8, 40):
        config = {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}
        with _fp16_allowed(True):
            module, rates = seeded(), cases.Rates()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            trainer = trained(host, module, rates, precision="16-mixed", strategy={"config": config})
        engine, after = trainer.strategy.deepspeed_engine, trainer.strategy.lightning_module_state_dict()
        records[str(power)] = {
            "scale": engine.optimizer.loss_scale,
            "ZeRO": engine.zero_optimization_stage(),
            "skipped": engine.skipped_steps,
            "steps": [trainer.global_step, engine.global_steps],
            "rates": rates.rates,
            "moved": any(
                not torch.allclose(value.float(), before[name], atol=1e-3) for name, value in after.items()
            ),
        }
        records[str(power)]["moved"] = trainer.strategy.broadcast(records[str(power)]["moved"])
    return records


# After an exception


class Failing(pl.Callback):
    """Fails in the second epoch, on every rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            raise OSError("the disk is full")


def after_an_exception(host: cases.Host) -> dict[str, Any]:
    keep = shipped.OnExceptionCheckpoint(host.folder / "failed")
    said = []
    try:
        trained(host, seeded(Keeping), Failing(), keep, enable_checkpointing=True)
    except OSError as error:
        said.append(str(error))
    rates = cases.Rates()
    trainer = trained(
        host,
        seeded(Keeping, seed=9),
        rates,
        ckpt_path=host.folder / "failed" / "on_exception.ckpt",
    )
    return {**end(trainer), "said": said, "rates": rates.rates}


def changed_settings(host: cases.Host) -> dict[str, Any]:
    """A second fit of one Trainer goes by the settings that it has then."""
    module = seeded()
    trainer = trained(host, module, max_epochs=1, gradient_clip_val=1e-3)
    trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.fit_loop.max_epochs = 2, 0.5, 2
    trainer.fit(module, cases.loader(54))
    engine = trainer.strategy.deepspeed_engine
    again = refused(lambda: pl.Trainer(strategy=trainer.strategy, devices=2, logger=False))
    return {"engine": [engine.gradient_clipping(), engine.gradient_accumulation_steps()], "another Trainer": again}


# What is refused


class OwnZeroGrad(cases.Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnOrdinaryZeroGrad(cases.Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=True)


class OwnClipping(cases.Classifier):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class Backbone(cases.Classifier):
    @property
    def backbone(self) -> nn.Module:
        return self.embed


def _with(configure: Callable[[Any], Any]) -> Any:
    return type("Classifier", (cases.Classifier,), {"configure_optimizers": configure})


class _SavesElsewhere(pl.Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint("memory://folder/last.ckpt")


def not_available(host: cases.Host) -> dict[str, Any]:
    def of(callback: Any, build: Any = cases.Classifier, **arguments: Any) -> str:
        callbacks = [] if callback is None else [callback]
        return refused(lambda: trained(host, seeded(build), *callbacks, max_epochs=1, **arguments))

    def deep(kind: str) -> Any:
        return getattr(shipped, kind, None)

    loaders = DataModule()
    sentences = {
        "BackboneFinetuning": of(shipped.BackboneFinetuning(), Backbone),
        "GradientAccumulationScheduler": of(shipped.GradientAccumulationScheduler({0: 1, 1: 2})),
        "StochasticWeightAveraging": of(shipped.StochasticWeightAveraging(swa_lrs=0.1)),
        "ModelPruning": of(shipped.ModelPruning("l1_unstructured", amount=0.5)),
        "BatchSizeFinder": refused(
            lambda: host.trainer(shipped.BatchSizeFinder(), strategy={"algorithm": CUT}).fit(seeded(), loaders)
        ),
        "finder": of(shipped.LearningRateFinder(), Rated, strategy={"stage": 1}),
        "plugin": of(shipped.ModelCheckpoint(host.folder / "io"), plugins=[AsyncCheckpointIO()]),
        "elsewhere": of(shipped.ModelCheckpoint("memory://folder")),
        "root elsewhere": of(shipped.ModelCheckpoint(), root="memory://root"),
        "resumed from elsewhere": of(None, ckpt_path="memory://folder/last.ckpt"),
        "saved elsewhere": of(_SavesElsewhere()),
        "sync_batchnorm": of(None, sync_batchnorm=True),
        "64-true": of(None, precision="64-true"),
        "16-mixed": of(None, precision="16-mixed"),
        "transformer-engine": of(None, precision="transformer-engine"),
        "optimizer_zero_grad": of(None, OwnZeroGrad),
        "ordinary optimizer_zero_grad": of(None, OwnOrdinaryZeroGrad),
        "configure_gradient_clipping": of(None, OwnClipping),
        "LBFGS": of(None, _with(lambda module: optim.LBFGS(module.parameters()))),
        "no optimizer": of(None, _with(lambda module: None)),
        "two schedulers": of(None, _with(_two_schedulers)),
        "Adafactor": of(None, _with(lambda module: optim.Adafactor(module.parameters())), strategy={"stage": 1}),
    }
    for kind in ("WeightAveraging", "EMAWeightAveraging"):
        if deep(kind) is not None:  # Lightning 2.6
            sentences[kind] = of(deep(kind)())
    return sentences


def _two_schedulers(module: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [schedulers.StepLR(optimizer, 1), schedulers.StepLR(optimizer, 2)]


class DataModule(pl.LightningDataModule):
    batch_size = 16

    def train_dataloader(self) -> Any:
        return cases.loader(32, self.batch_size)


def weights_past_a_plugin(host: cases.Host) -> dict[str, Any]:
    """A CheckpointIO writes the files of whole models."""
    path = host.folder / "plugin"
    callback = shipped.ModelCheckpoint(path, filename="weights", save_weights_only=True)
    trainer = trained(host, seeded(), callback, max_epochs=1, plugins=[AsyncCheckpointIO()])
    trainer.strategy.barrier()  # the first rank has ended its thread, which writes
    return {"names": list(torch.load(path / "weights.ckpt", weights_only=False)["state_dict"])}


def _deaf_lambda() -> pl.Callback:
    """Its like, which stands behind it, has none of its hooks."""
    return shipped.LambdaCallback(on_before_backward=lambda *_: None, on_before_zero_grad=lambda *_: None)


class UploadsModels(CSVLogger):
    """What tells of ``WandbLogger(log_model="all")`` and ``MLFlowLogger(log_model=True)``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="uploads")
        self._log_model = "all"


def notes(host: cases.Host) -> dict[str, Any]:
    """What is not called and what shows nothing is said once, and only where it matters."""
    said = {}
    board = TensorBoardLogger(str(host.folder / "graph"), log_graph=True)
    weights_only = shipped.ModelCheckpoint(host.folder / "uploaded", save_weights_only=True)
    for name, callbacks, arguments in (
        ("quiet", [], {}),
        ("notes", [Listener(), _deaf_lambda(), shipped.LambdaCallback()], {"logger": board}),
        ("uploads", [shipped.ModelCheckpoint(host.folder / "uploads")], {"logger": UploadsModels(host.folder)}),
        ("uploads files", [weights_only], {"logger": UploadsModels(host.folder)}),
        ("mixed", [], {"precision": "bf16-mixed"}),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(host, seeded(), *callbacks, max_epochs=1, **arguments)
        said[name] = [str(warning.message) for warning in caught if "madpipe:" in str(warning.message)]
    return said


# Averages of the weights, as they are written by hand


class Average(pl.Callback):
    """Keeps a moving average of the weights by name, and validates with it."""

    def __init__(self, made_in: str) -> None:
        self.made_in, self.found = made_in, []

    def weights(self, module: Any) -> Any:
        return module.state_dict()

    def make(self, hook: str, module: Any) -> None:
        if hook == self.made_in:
            self.shadow = {name: value.detach().clone() for name, value in self.weights(module).items()}

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.make("setup", module)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.make("on_fit_start", module)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.make("on_train_start", module)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        state = self.weights(module)
        for name in self.shadow:
            self.shadow[name] = 0.5 * self.shadow[name] + 0.5 * state[name].detach()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.before = {name: value.clone() for name, value in module.state_dict().items()}
            module.load_state_dict(self.shadow, strict=len(self.shadow) == len(self.before))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            module.load_state_dict(self.before)
            self.found.append(float(trainer.callback_metrics["loss"]))

    def values(self) -> list[Any]:
        return [[name, float(value.double().sum())] for name, value in self.shadow.items()]


class AverageOfParameters(Average):
    def weights(self, module: Any) -> Any:
        return dict(module.named_parameters())


class ListOfAverages(Average):
    """In the order of ``parameters()``."""

    def make(self, hook: str, module: Any) -> None:
        if hook == self.made_in:
            self.shadow = [weight.detach().clone() for weight in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for average, weight in zip(self.shadow, module.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.5)

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.before = {name: value.clone() for name, value in module.state_dict().items()}
            for average, weight in zip(self.shadow, module.parameters(), strict=True):
                weight.data.copy_(average)

    def values(self) -> list[Any]:
        return [float(value.double().sum()) for value in self.shadow]


class Averaging(pl.Callback):
    """With torch's own class."""

    def __init__(self, made_in: str) -> None:
        self.made_in = made_in

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if self.made_in == "setup":
            self.average = optim.swa_utils.AveragedModel(module)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.made_in == "on_fit_start":
            self.average = optim.swa_utils.AveragedModel(module)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.average.update_parameters(module)


class Averaged(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.average = optim.swa_utils.AveragedModel(self.blocks)


MOVES_LATE = {"algorithm": [0, 2, 8], "warmup_steps": 3, "warmup_epochs": 0}


def averages(host: cases.Host) -> dict[str, Any]:
    """Layers move after the third step; averages go with them, and are whole when fit has returned."""
    record = {}
    for kind, hook in (
        (Average, "on_fit_start"),
        (Average, "setup"),
        (AverageOfParameters, "on_train_start"),
        (ListOfAverages, "setup"),
        (ListOfAverages, "on_fit_start"),
    ):
        average = kind(hook)
        trainer = host.trainer(average, strategy=MOVES_LATE)
        trainer.fit(seeded(), cases.loader(54), cases.loader(21, seed=3))
        record[f"{kind.__name__} {hook}"] = {"values": average.values(), "found": average.found}
        if host.pipelined:
            assert list(trainer.strategy.pipeline.parts) == [0, 2, 8]
    return record


class Saved(pl.Callback):
    """Averages that a checkpoint has: in the state of a callback, by name and in order, and beside it."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        weights = dict(module.named_parameters())
        if not hasattr(self, "by_name"):
            self.by_name = {name: weight.detach().clone() for name, weight in weights.items()}
            self.in_order = [weight.detach().clone() for weight in weights.values()]
            self.of_hook = {name: weight.detach().clone() for name, weight in weights.items()}
        with torch.no_grad():
            for place, (name, weight) in enumerate(weights.items()):
                self.by_name[name].lerp_(weight, 0.2)
                self.in_order[place].lerp_(weight, 0.3)
                self.of_hook[name].lerp_(weight, 0.4)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": 0.2, "averages": {"by_name": self.by_name, "in_order": self.in_order}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_name, self.in_order = state["averages"]["by_name"], state["averages"]["in_order"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["averages of a hook"] = self.of_hook

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.of_hook = checkpoint["averages of a hook"]

    def sums(self) -> list[Any]:
        by_name, of_hook = sorted(self.by_name.items()), sorted(self.of_hook.items())
        named = [[name, float(value.double().sum())] for name, value in (*by_name, *of_hook)]
        return [*named, [float(value.double().sum()) for value in self.in_order]]


def averages_resumed(host: cases.Host) -> dict[str, Any]:
    """On another cut, and read by one process. They are written while each rank has its own layers."""
    record, folder = {}, host.folder / f"averages-{host.pipelined}"
    path = str(folder / "last.ckpt")
    for epochs, name in enumerate(("two stages", "two others", "one stage"), start=1):
        saved, checkpoint = Saved(), shipped.ModelCheckpoint(folder, save_last=True)
        strategy = {"plan": plan_file(host, name), "num_stages": 1 if name == "one stage" else 2}
        trainer = host.trainer(saved, checkpoint, max_epochs=epochs, strategy=strategy)
        trainer.fit(seeded(), cases.loader(54), ckpt_path=path if epochs > 1 else None)
        record[f"epoch {epochs}"] = saved.sums()
    read = checkpoint_folders.whole_checkpoint(Path(path)) if host.pipelined else torch.load(path)
    averages = read["averages of a hook"]
    record["read"] = {name: float(value.double().sum()) for name, value in sorted(averages.items())}
    record["keys"] = sorted(key for key in read if "averages" in key or "madpipe" in key)
    return record


def averages_that_stay(host: cases.Host) -> dict[str, Any]:
    def of(build: Any, *callbacks: Any) -> str:
        trainer = host.trainer(*callbacks, max_epochs=1, strategy={"warmup_epochs": 0})
        return refused(lambda: trainer.fit(build(), cases.loader(16)))

    return {
        "setup": of(cases.Classifier, Averaging("setup")),
        "on_fit_start": of(cases.Classifier, Averaging("on_fit_start")),
        "in the module": of(Averaged),
    }


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        hooks, summaries, watching_callbacks, timed_out, rate_finder, rate_finder_with_a_plan,
        *checkpoint_cases.SAME_AS_SINGLE[2],
        optimizers, own_steps, settings, loggers, profilers, low_precision, after_an_exception, averages,
        averages_resumed,
    ],
    4: checkpoint_cases.SAME_AS_SINGLE[4],
}  # fmt: skip


class SavesOnRankZero(pl.Callback):
    """As others do it, twice, the second time after SIGTERM; and once as it is told."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.said: list[str] = []
        self.refused: list[str] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        for seconds, asked in ((0.2, False), (100.0, True)):
            if trainer.is_global_zero and trainer.global_step == 1:
                with (
                    patch.object(arrivals, "SAID_AFTER_SECONDS", 0.05),
                    patch.object(arrivals, "ENDS_AFTER_SECONDS", seconds),
                    patch.object(trainer.strategy.deepspeed_engine, "wants_to_stop", lambda: asked),  # noqa: B023
                    patch.object(all_come, "log_here", self.said.append),
                ):
                    self.refused.append(refused(lambda: trainer.save_checkpoint(self.path)))
                    self.refused.append(refused(trainer.strategy.lightning_module_state_dict))
                    self.refused.append(refused(lambda: trainer.strategy.load_checkpoint(self.path)))
                    self.refused.append(refused(trainer.strategy.gather_model))
        trainer.strategy.barrier()
        trainer.save_checkpoint(self.path)


def saved_on_one_rank(host: cases.Host) -> dict[str, Any]:
    path = host.folder / "on_one_rank"
    callback = SavesOnRankZero(str(path))
    strategy = {"algorithm": CUT}
    host.trainer(callback, max_epochs=1, strategy=strategy).fit(cases.Classifier(), cases.loader(32))
    return {"said": callback.said, "refused": callback.refused, "is_there": path.exists()}


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        summary_of_specs, loss_scales, changed_settings, *checkpoint_cases.ONLY_PIPELINE[2], not_available,
        weights_past_a_plugin, notes, averages_that_stay, saved_on_one_rank, sections_of_steps,
    ],
    4: [],
}  # fmt: skip
