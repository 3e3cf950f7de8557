"""A convolutional network on handwritten digits, as a pipeline of two CPU processes.

    python examples/train_lightning.py

The digits ship with scikit-learn; enlarged to 32 x 32, the early layers are heavy in time and activations and
the late ones in weights, which is what DeepSpeed's default cut (``parameters``) gets wrong. The script trains
on the cut that MadPipe plans from the first batch, prints the plan and what it promised against what the run
did, then runs a few steps on DeepSpeed's default cut.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from report import Measured, gathered, print_report, tensors_that_stay
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_madpipe
from deepspeed_partition.planner.units import format_seconds
from deepspeed_partition.profiling import LiveBytes

BATCH, MICRO_BATCHES = 128, 8


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(pl.LightningModule):
    """An ordinary LightningModule: one ``nn.Sequential``, and nothing about pipelines."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self.epochs = epochs
        self.net = nn.Sequential(
            convolution(1, 24),
            convolution(24, 24),
            nn.MaxPool2d(2),
            convolution(24, 48),
            convolution(48, 48),
            nn.MaxPool2d(2),
            convolution(48, 64),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Sequential(nn.Linear(64 * 4 * 4, 1024), nn.ReLU()),
            nn.Sequential(nn.Linear(1024, 512), nn.ReLU()),
            nn.Linear(512, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Four fifths for training, the rest for the test; the same on every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(images, size=(32, 32), mode="bilinear", align_corners=False)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=BATCH, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=BATCH),
    )


class Meter(pl.Callback):
    """Times every step, and counts the live tensor bytes of one."""

    def __init__(self, count_at: int = 4) -> None:
        self.count_at = count_at
        self.seconds: list[float] = []
        self.live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.count_at:
            self.live = LiveBytes(include=[*tensors_that_stay(trainer.optimizers[0], module), *batch])
            self.live.__enter__()
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.count_at + 1 and self.live is not None:
            self.live.__exit__(None, None, None)
        elif trainer.global_step > 2:  # the first step plans, the second one warms up
            self.seconds.append(time.perf_counter() - self.started)

    def measured(self) -> Measured:
        assert self.live is not None
        return Measured(tuple(self.seconds), self.live.peak_bytes)


def train(strategy: Any, epochs: int, meter: Meter, **limits: Any) -> tuple[pl.Trainer, Digits]:
    pl.seed_everything(0, verbose=False)
    model = Digits(epochs)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        **limits,
    )
    trainer.fit(model, loaders()[0])
    return trainer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    torch.set_num_threads(1)  # two processes, each with one core
    meter = Meter()
    strategy = lightning_madpipe.MadPipeStrategy(num_micro_batches=MICRO_BATCHES)
    started = time.perf_counter()
    trainer, model = train(strategy, epochs, meter)
    seconds = time.perf_counter() - started
    accuracy = trainer.test(model, loaders()[1], verbose=False)[0]["accuracy"]
    ranks = gathered(meter.measured())
    if trainer.is_global_zero:
        print(strategy.plan.summary())
        print_report(strategy.plan, ranks)
        print(f"test accuracy {accuracy:.1%} after {epochs} epochs in {seconds:.0f} s")

    default = Meter()
    train(lightning_madpipe.MadPipeStrategy(num_micro_batches=MICRO_BATCHES, algorithm="parameters"), 2, default)
    others = gathered(default.measured())
    if trainer.is_global_zero:
        planned, uncut = (max(rank.median_seconds for rank in each) for each in (ranks, others))
        print(
            f"a step takes {format_seconds(planned)} on MadPipe's cut and {format_seconds(uncut)} on DeepSpeed's "
            f"default cut ('parameters'): {uncut / planned:.2f} times as long "
            "(one run after the other: an idle machine shows it)"
        )


if __name__ == "__main__":
    main()
