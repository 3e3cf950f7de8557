"""Cases: a pipeline that never drains, against the same delayed updates in one process."""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deepspeed_partition import Plan
from tests.choice import run_chosen
from tests.engine.asynchronous_cases import MAPS, MODES, OPTIMIZERS, Delayed, plan_for
from tests.engine.pipelines import Whole, loss_fn, mlp
from tests.engine.running import batches, same
from tests.lightning import lightning_cases as cases

Batch = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The micro-batches of a batch."""


class Model(pl.LightningModule):
    """The layers of the engine's tests, with the weights that one process begins with."""

    def __init__(self, whole: Whole, optimizer: str, *, decays: bool = False) -> None:
        super().__init__()
        self.net = nn.ModuleDict({name: part for name, part in whole.named_children() if name != "tied_modules"})
        self.order = list(whole.functions)
        self.make_optimizer, self.decays = OPTIMIZERS[optimizer], decays
        self.steps_of_hooks: list[int] = []

    def pipeline_layers(self) -> list[Any]:
        return self.order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_fn(self(batch[0]), batch[1])
        self.log("train", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", loss_fn(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self)
        if not self.decays:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decaying(optimizer), "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps_of_hooks.append(self.global_step)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)


class Losses(Callback):
    """The loss of each batch, and which batches the pipeline has come to rest behind."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rests: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.deepspeed_engine
        come = engine.come_to_rest

        def come_to_rest() -> None:
            if not engine.is_at_rest:
                self.rests.append(len(self.losses))
            come()

        engine.come_to_rest = come_to_rest

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def loader(data: Sequence[Batch]) -> DataLoader:
    inputs = torch.cat([each for batch in data for each, _ in batch])
    labels = torch.cat([each for batch in data for _, each in batch])
    return DataLoader(TensorDataset(inputs, labels), batch_size=sum(len(each) for each, _ in data[0]))


def saved(host: cases.Host, plan: Plan) -> str:
    path = host.folder / f"{plan.weight_versions} on {len(plan.stages)}.json"
    plan.save(path)  # alike on all ranks
    return str(path)


def started(plan: Plan, optimizer: str, *, decays: bool = False, clip: float = 0.0) -> tuple[Delayed, Model]:
    torch.manual_seed(3)
    expected = Delayed(
        OPTIMIZERS[optimizer], lambda stage, number: 0, plan, clip=clip,
        make_scheduler=decaying if decays else None,
    )  # fmt: skip
    model = Model(Whole(mlp()), optimizer, decays=decays)
    weights = {f"net.{name}": each for name, each in expected.weights.items()}
    model.load_state_dict(weights, strict=False)  # of which the buffers begin alike
    return expected, model


def versions_of(trainer: pl.Trainer) -> Callable[[int, int], int]:
    """The versions of the weights that stages use, by the lists that the engine has run."""
    engine = trainer.strategy.deepspeed_engine
    return functools.partial(engine._endless.program.version, engine.weight_versions)


def alone(expected: Delayed, data: Sequence[Batch], rests: Sequence[int]) -> list[float]:
    """Train in one process, with a rest behind some batches."""
    losses = []
    for number, batch in enumerate(data):
        if number in rests:
            expected.rest()
        losses.append(expected.train(batch))
    return losses


def same_weights(model: Model, expected: Delayed) -> None:
    found = model.state_dict()
    for name, weight in expected.weights.items():
        assert torch.allclose(found[f"net.{name}"], weight, rtol=1e-5, atol=1e-6), name


def fits(host: cases.Host, mode: str, turn: int, optimizer: str, *, decays: bool, clip: float) -> dict[str, Any]:
    """Two epochs of six batches, with validation behind the fourth and the last one of each."""
    data, given = batches(6), batches(1)
    maps = list(MAPS[host.num_processes].items())
    devices, cuts = maps[turn % len(maps)]
    plan = plan_for(devices, cuts, mode)
    expected, model = started(plan, optimizer, decays=decays, clip=clip)
    watch = Losses()
    name = f"{mode} {turn}"
    logger = CSVLogger(host.folder / "asynchronous", name=name, version=0)
    trainer = host.trainer(
        watch, strategy={"plan": saved(host, plan), "loss": "mean"}, val_check_interval=4, logger=logger,
        gradient_clip_val=clip or None,
    )  # fmt: skip
    trainer.fit(model, loader(data), loader(given))
    assert watch.rests == [4, 6, 10, 12], watch.rests
    expected.version = versions_of(trainer)
    same(watch.losses, alone(expected, [*data, *data], watch.rests))
    same_weights(model, expected)
    assert model.steps_of_hooks == list(range(12)) and trainer.global_step == 12, model.steps_of_hooks
    if trainer.is_global_zero:
        with open(logger.experiment.metrics_file_path) as file:
            logged = {int(row["step"]): float(row["train"]) for row in csv.DictReader(file) if row.get("train")}
        same([logged[step] for step in range(12)], watch.losses)
    validated = float(loss_fn(expected.model(given[0][0][0]), given[0][0][1]))
    assert trainer.callback_metrics["validated"] > 0 and validated > 0
    return {"delay": max(step - expected.version(0, 4 * step) for step in range(4))}


def never_drains(host: cases.Host) -> dict[str, Any]:
    """Losses, weights, logs and hooks of each mode, with a schedule, clipping and validation."""
    runs = {}
    for turn, (mode, optimizer) in enumerate(itertools.product(MODES, ("momentum", "adam"))):
        clip = 0.05 if mode == "2bw" else 0.0
        runs[f"{mode}, {optimizer}"] = functools.partial(
            fits, host, mode, turn, optimizer, decays=bool(turn % 2), clip=clip
        )
    return run_chosen(runs)


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {2: [never_drains], 4: []}
SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {2: [], 4: []}
