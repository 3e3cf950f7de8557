"""Models, data and runs that the pipeline and a single process go through alike.

A case is a function of a ``Host``, which knows how to build the Trainer, and returns what it saw as plain
numbers. The reference is the same function with a host of one process and no strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    TQDMProgressBar,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.loops import utilities
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# As on a GPU, where ranks talk over NCCL: over gloo Lightning evaluates without inference mode.
utilities._distributed_is_initialized = lambda: False  # type: ignore[attr-defined]

_apply = nn.Module._apply


def _applied(module: nn.Module, *arguments: Any, **keywords: Any) -> nn.Module:
    """As on a GPU, where a module that comes to its device has another tensor at each place of a buffer."""
    _apply(module, *arguments, **keywords)
    if not isinstance(module._buffers, dict):  # a scripted one
        return module
    for name, buffer in list(dict.items(module._buffers)):
        if type(buffer) is torch.Tensor:
            dict.__setitem__(module._buffers, name, buffer.clone())
    return module


nn.Module._apply = _applied  # type: ignore[method-assign]

WIDTH = 12
NUM_CLASSES = 4
NUM_FEATURES = 8
VOCABULARY = 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Steps(pl.LightningModule):
    """Steps and optimizers as they are written for one device."""

    def __init__(self, *, optimizer: str = "adam", interval: str = "step", sync_dist: bool = False) -> None:
        super().__init__()
        self.register_buffer("class_weights", torch.tensor([1.0, 2.0, 0.5, 1.5]))
        self.optimizer_name, self.interval, self.sync_dist = optimizer, interval, sync_dist
        self.num_hook_calls = {"on_after_backward": 0, "on_before_optimizer_step": 0}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = (F.cross_entropy(self(x).float(), y, reduction="none") * self.class_weights[y]).mean()
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x).float()
        assert not self.training
        accuracy = (logits.argmax(-1) == y).float().mean()
        self.log_dict({"loss": F.cross_entropy(logits, y), "accuracy": accuracy}, sync_dist=self.sync_dist)
        self.log("samples", float(len(y)), reduce_fx="sum", sync_dist=self.sync_dist)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adam":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 if self.interval == "step" else 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def on_after_backward(self) -> None:
        self.num_hook_calls["on_after_backward"] += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_hook_calls["on_before_optimizer_step"] += 1


class Classifier(Steps):
    """Only ``pipeline_layers`` is for the pipeline."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.embed = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, torch.tanh, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


class PartGroups(Classifier):
    """A parameter group and a rate of its own for either end: on each rank one of them is empty."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [*self.embed.parameters(), *self.blocks[:2].parameters()], "lr": 1e-3},
            {"params": [*self.blocks[2:].parameters()], "lr": 1e-2},
            {"params": self.head.parameters(), "lr": 3e-2, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups)
        factors = [lambda step: 1 / (1 + step), lambda step: 1.0, lambda step: 0.9**step]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PlateauClassifier(Classifier):
    """The rate is halved wherever the loss does not rise."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


class SequentialClassifier(Steps):
    """Needs no ``pipeline_layers``; what ``forward`` does around the Sequential stays where it is."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh(), Block(), Block(), nn.Linear(WIDTH, NUM_CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * self.net(x.unflatten(1, (2, -1)).flatten(1)) - 1.0


class TiedLanguageModel(pl.LightningModule):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def pipeline_layers(self) -> list[Any]:
        from lightning_madpipe import TiedModule

        def unembed(embed: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return x @ embed.weight.t()

        return [
            TiedModule("embed", self.embed),
            *self.blocks,
            TiedModule("embed", self.embed, forward_fn=unembed),
        ]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.t()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        [tokens] = batch
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Logger(Classifier):
    """Logs in every way that numbers can be logged."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        each = F.cross_entropy(logits, y, reduction="none")
        correct = (logits.argmax(-1) == y).float()
        self.log("mean", each.mean(), batch_size=len(y), on_epoch=True, on_step=False)
        self.log("correct", correct.sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("worst", each.max(), reduce_fx=torch.max, on_epoch=True, on_step=False)
        self.log("best", each.min(), reduce_fx="min", on_epoch=True, on_step=True)
        self.log("number", 0.25 * self.current_epoch)
        return each.mean()


class Mixing(pl.LightningModule):
    """Draws in the step, and compares what went in on one end with what came out on the other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(4)))
        nn.init.ones_(self.net[0].weight)
        for layer in self.net:
            nn.init.ones_(layer.weight)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        share = torch.rand(len(batch[0]), 1)
        through = self.net(share)
        self.log("share", share.mean())
        self.log("difference", (through - share).abs().max(), reduce_fx="max")
        return through.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def samples(num_samples: int, seed: int = 2) -> TensorDataset:
    direction = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=torch.Generator().manual_seed(1))
    x = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x @ direction).argmax(-1))


def loader(num_samples: int, batch_size: int = 16, seed: int = 2) -> DataLoader:
    return DataLoader(samples(num_samples, seed), batch_size=batch_size)


class Recorder(Callback):
    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # A loss is known where a step was made, and the other batches of a window differ on purpose.
        if not trainer.fit_loop._should_accumulate():
            loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
            self.rows.append([trainer.global_step, loss])


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        # The scheduler sees the groups that have no parameters on this rank, too.
        configs = trainer.lr_scheduler_configs
        optimizer = configs[0].scheduler.optimizer if configs else trainer.optimizers[0]
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@dataclass(frozen=True)
class Host:
    """Builds Trainers: of one process, or of ``num_processes`` with the madpipe strategy."""

    folder: Path
    num_processes: int = 1
    pipelined: bool = False

    def trainer(self, *callbacks: Callback, **arguments: Any) -> pl.Trainer:
        strategy = arguments.pop("strategy", {})
        defaults = {
            "accelerator": "cpu",
            "devices": self.num_processes,
            "max_epochs": 2,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            "use_distributed_sampler": False,
            "log_every_n_steps": 1,
        }
        if self.pipelined and os.environ.get("BACKEND") == "nccl":  # of examples/benchmarks/on_a_gpu/launch.py
            defaults |= {"accelerator": "gpu", "devices": 1, "num_nodes": self.num_processes}
        if self.pipelined:
            import lightning_madpipe

            settings = {
                "algorithm": "contiguous",  # planned in a tenth of the default's time
                "num_micro_batches": 4, "bandwidth": 1e9, "latency_seconds": 0.0,
                "operation_seconds": 0.0, "copy_bandwidth": 1e12,  # to measure them takes a tenth of a short run
                **strategy,
            }  # fmt: skip
            defaults["strategy"] = lightning_madpipe.MadPipeStrategy(**settings)
        return pl.Trainer(callbacks=list(callbacks), **{**defaults, **arguments})


def fit_record(trainer: pl.Trainer, module: Any, rows: list[list[float]]) -> dict[str, Any]:
    return {
        "rows": rows,
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def fit(host: Host, build: Callable[[], Any], data: DataLoader, **arguments: Any) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module, recorder, rates = build(), Recorder(), Rates()
    callbacks = arguments.pop("callbacks", [])
    trainer = host.trainer(recorder, rates, *callbacks, **arguments)
    validation = loader(21, seed=3) if hasattr(module, "class_weights") else None
    trainer.fit(module, data, validation)
    record = fit_record(trainer, module, recorder.rows)
    record["rates"] = rates.rates
    if hasattr(module, "num_hook_calls"):
        record["num_hook_calls"] = dict(module.num_hook_calls)
    return record


def plain(host: Host) -> dict[str, Any]:
    # 54 samples: three batches of 16, and one of 6 in micro-batches of 2, 2, 1, 1.
    checkpoint = ModelCheckpoint(host.folder / "plain", monitor="loss", filename="{epoch}", save_last=True)
    strategy = {"save_plan": str(host.folder / "plan.json"), "algorithm": "madpipe"}
    record = fit(host, Classifier, loader(54), callbacks=[checkpoint], strategy=strategy)
    best = checkpoint.best_model_path
    return {**record, "best": Path(best).name, "best_score": float(checkpoint.best_model_score)}


def tiny_last_batch(host: Host) -> dict[str, Any]:
    """18 samples: the last batch has two samples for four micro-batches."""
    return fit(host, lambda: Classifier(optimizer="sgd"), loader(18))


class FixedShapes(Callback):
    """On a CPU the engine sends shapes with every micro-batch; on CUDA it does so where it is told to."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if trainer.world_size > 1:
            trainer.strategy.deepspeed_engine.dynamic_shape = False


def announced_shapes(host: Host) -> dict[str, Any]:
    return fit(host, lambda: Classifier(optimizer="sgd"), loader(54), callbacks=[FixedShapes()])


def accumulated(host: Host) -> dict[str, Any]:
    """Four batches per epoch in windows of three: the last one is short, in batches and in samples."""
    return fit(host, lambda: Classifier(interval="epoch"), loader(54), accumulate_grad_batches=3)


def clipped(host: Host) -> dict[str, Any]:
    return fit(host, lambda: Classifier(optimizer="sgd"), loader(54), gradient_clip_val=0.1)


def zero_1(host: Host) -> dict[str, Any]:
    return fit(host, lambda: Classifier(optimizer="sgd"), loader(54), gradient_clip_val=0.1, strategy={"stage": 1})


def bf16(host: Host) -> dict[str, Any]:
    return fit(host, Classifier, loader(54), precision="bf16-mixed" if host.pipelined else "32-true")


def sequential(host: Host) -> dict[str, Any]:
    return fit(host, SequentialClassifier, loader(54))


def tied(host: Host) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (40, 6), generator=torch.Generator().manual_seed(4))
    return fit(host, TiedLanguageModel, DataLoader(TensorDataset(tokens), batch_size=16))


def part_groups(host: Host, **arguments: Any) -> dict[str, Any]:
    monitor = LearningRateMonitor("step")
    logger = CSVLogger(host.folder)
    record = fit(host, PartGroups, loader(54), callbacks=[monitor], logger=logger, **arguments)
    return {**record, "monitored": monitor.lrs}


def part_groups_zero_1(host: Host) -> dict[str, Any]:
    return part_groups(host, strategy={"stage": 1, "algorithm": [0, 1, 8]})  # stage 0 has the first group only


def plateau(host: Host) -> dict[str, Any]:
    return fit(host, PlateauClassifier, loader(54), max_epochs=4)


def logged(host: Host) -> dict[str, Any]:
    return fit(host, Logger, loader(54))


def logged_in_windows(host: Host) -> dict[str, Any]:
    return fit(host, Logger, loader(54), accumulate_grad_batches=3)


def stopped_early(host: Host) -> dict[str, Any]:
    stopping = EarlyStopping("loss", mode="max", patience=3)
    return fit(host, PlateauClassifier, loader(54), callbacks=[stopping], max_epochs=12)


def alone(host: Host) -> dict[str, Any]:
    """Validate and test of a model that nobody trained here, and test again after a fit by another Trainer."""
    pl.seed_everything(0, verbose=False)
    module = Classifier()
    [validated] = host.trainer().validate(module, loader(21, seed=3), verbose=False)
    [tested] = host.trainer().test(module, loader(37, seed=5), verbose=False)
    host.trainer(max_epochs=1).fit(module, loader(54))
    trainer = host.trainer(max_epochs=1)
    trainer.fit(module, loader(54))
    [again] = trainer.test(module, loader(37, seed=5), verbose=False)
    [elsewhere] = host.trainer().test(module, loader(37, seed=5), verbose=False)
    return {"metrics": [validated, tested, again, elsewhere]}


class Ends(Callback):
    """Ends the run with its first epoch, which the Trainer cannot know beforehand."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = True


def resumed(host: Host, **arguments: Any) -> dict[str, Any]:
    """Two epochs, in the pipeline with a checkpoint and new objects after the first."""
    if not host.pipelined:
        record = fit(host, Classifier, loader(54), **arguments)
        return {"metrics": record["metrics"], "last_loss": record["rows"][-1], "rates": record["rates"][-1]}
    folder = host.folder / f"resumed-{host.num_processes}-{arguments}"
    checkpoint = ModelCheckpoint(folder, save_last=True)
    fit(host, Classifier, loader(54), callbacks=[checkpoint, Ends()], **arguments)
    pl.seed_everything(99, verbose=False)  # other weights, until they are loaded
    module, recorder, rates = Classifier(), Recorder(), Rates()
    module.class_weights.zero_()
    trainer = host.trainer(recorder, rates, max_epochs=2, **arguments)
    trainer.fit(module, loader(54), loader(21, seed=3), ckpt_path=str(folder / "last.ckpt"))
    record = fit_record(trainer, module, recorder.rows)
    [tested] = host.trainer().test(
        Classifier(), loader(21, seed=3), ckpt_path=str(folder / "last.ckpt"), verbose=False
    )
    return {
        "metrics": record["metrics"],
        "last_loss": record["rows"][-1],
        "rates": rates.rates[-1],
        "num_rows": len(record["rows"]),
        "tested": tested,
    }


def resumed_zero_1(host: Host) -> dict[str, Any]:
    return resumed(host, strategy={"stage": 1})


def replicated(host: Host, **arguments: Any) -> dict[str, Any]:
    """Two pipelines of two stages; one process reads the union of their batches."""
    dataset = samples(64)
    if host.pipelined:
        data = DataLoader(dataset, batch_size=8, shuffle=True)
    else:
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
        data = DataLoader(dataset, batch_size=16, sampler=sampler)
    pl.seed_everything(0, verbose=False)
    module, rates = Classifier(optimizer="sgd", sync_dist=True), Rates()
    strategy = {"num_stages": 2, **arguments.pop("strategy", {})}
    callbacks = [rates, *arguments.pop("callbacks", [])]
    trainer = host.trainer(*callbacks, strategy=strategy, use_distributed_sampler=True, **arguments)
    trainer.fit(module, data, DataLoader(samples(32, seed=3), batch_size=8 if host.pipelined else 16))
    record = fit_record(trainer, module, [])
    return {**record, "rates": rates.rates}


def replicated_zero_1(host: Host) -> dict[str, Any]:
    return replicated(host, strategy={"stage": 1}, gradient_clip_val=0.1)


def replicated_clipped(host: Host) -> dict[str, Any]:
    return replicated(host, gradient_clip_val=0.1, accumulate_grad_batches=2)


def progress_bar(host: Host) -> dict[str, Any]:
    bar, phases = TQDMProgressBar(), []

    def shown() -> str:
        return bar.train_progress_bar.postfix or "" if bar.is_enabled else ""

    def tell(phase: Any, name: str) -> None:
        told(phase, name)
        phases.append([name, shown()])

    with ExitStack() as watched:
        if host.pipelined:
            from lightning_madpipe.progress import Phase

            told = Phase.tell
            watched.enter_context(patch.object(Phase, "tell", tell))
        options = {"enable_progress_bar": True, "max_epochs": 1, "strategy": {"warmup_steps": 1}}
        record = fit(host, Classifier, loader(32), callbacks=[bar], **options)
    own = {"phases": phases} if host.pipelined else {}
    return {**record, **own, "postfix": shown()}


# What the other files of cases are made of

CUT = [0, 4, 8]
ENDS = 4
"""Optimizer steps of an epoch of ``trained``."""


class Schedule:
    """Counts in its class, by which a step of another file calls it."""

    number = own_number = 0

    @classmethod
    def next_number(cls) -> int:
        cls.number += 1
        return cls.number

    def own(self) -> int:
        Schedule.own_number += 1
        return Schedule.own_number


def trained(host: Host, module: Any, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    strategy = {"algorithm": CUT, "warmup_epochs": 0, **arguments.pop("strategy", {})}
    data = arguments.pop("data", None) or loader(54)
    validation, ckpt_path = arguments.pop("validation", None), arguments.pop("ckpt_path", None)
    trainer = host.trainer(
        *callbacks, default_root_dir=arguments.pop("root", host.folder), strategy=strategy, **arguments
    )
    trainer.fit(module, data, validation, ckpt_path=ckpt_path)
    return trainer


def seeded(build: Callable[[], Any] = Classifier, seed: int = 0) -> Any:
    pl.seed_everything(seed, verbose=False)
    return build()


def end(trainer: pl.Trainer) -> dict[str, Any]:
    return fit_record(trainer, None, [])


def refused(run: Callable[[], Any]) -> str:
    """The first line of what ``run`` is refused with, here and by Lightning."""
    try:
        run()
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, KeyError) as refusal:
        return f"{type(refusal).__name__}: {str(refusal).splitlines()[0]}"
    return "not refused"


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        plain, tiny_last_batch, announced_shapes, accumulated, clipped, zero_1, bf16, sequential, tied,
        part_groups, part_groups_zero_1, plateau, logged, logged_in_windows, stopped_early, alone, resumed,
        resumed_zero_1, progress_bar,
    ],
    4: [plain, clipped, zero_1, tied, resumed, replicated, replicated_zero_1, replicated_clipped],
}  # fmt: skip
