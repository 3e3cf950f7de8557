"""A convolutional network on handwritten digits, as a pipeline of two CPU processes.

    python examples/train_lightning.py

The digits ship with scikit-learn; enlarged to 32 x 32, the early layers are heavy in time and activations and
the late ones in weights, which is what DeepSpeed's default cut (``parameters``) gets wrong. Training begins on
that cut; MadPipe measures the layers meanwhile, makes a plan after the first epoch and moves them. The script
prints what the plan promised against what the run did, a step as it ran, the time of a step before and after, and
the pause.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from report import Measured, gathered, print_report, tensors_that_stay
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_madpipe
from deepspeed_partition.planner.report.draw_timelines import measured_step
from deepspeed_partition.planner.report.timeline import MeasuredTimeline
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
    """Make the loaders: four fifths of the digits for training, the rest for the test; the same on every rank."""
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
    """Times every step, on the trial cut and as planned, and counts the live tensor bytes of a planned one."""

    def __init__(self) -> None:
        self.on_trial: list[float] = []
        self.as_planned: list[float] = []
        self.live: LiveBytes | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if len(self.as_planned) == 1:
            self.live = LiveBytes(include=[*tensors_that_stay(trainer.optimizers[0], module), *batch])
            self.live.__enter__()
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seconds = time.perf_counter() - self.started
        if len(self.as_planned) == 1 and self.live is not None:
            self.live.__exit__(None, None, None)
        (self.on_trial if trainer.strategy.plan is None else self.as_planned).append(seconds)

    def before(self) -> Measured:
        return Measured(tuple(self.on_trial[2:]))

    def after(self) -> Measured:
        """Return what was measured as planned, without the step that planned and moved, and the counted one."""
        assert self.live is not None
        return Measured(tuple(self.as_planned[2:]), self.live.peak_bytes)

    def pause_seconds(self) -> float:
        """Seconds of planning and moving: what the step in which it was done takes longer than others."""
        return self.as_planned[0] - self.after().median_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    if epochs < 2:
        parser.error("the first epoch is the warm-up: give --epochs 2 or more")
    torch.set_num_threads(1)  # two processes, each with one core
    for name in ("pytorch_lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)  # nothing about devices that are not there
    pl.seed_everything(0, verbose=False)
    train, test = loaders()
    model, meter = Digits(epochs), Meter()
    timeline = str(Path(tempfile.gettempdir(), f"madpipe-digits-{os.getuid()}.json"))
    strategy = lightning_madpipe.MadPipeStrategy(num_micro_batches=MICRO_BATCHES, save_timeline=timeline)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(model, train)
    seconds = time.perf_counter() - started
    accuracy = trainer.test(model, test, verbose=False)[0]["accuracy"]
    ranks, others = gathered(meter.after()), gathered(meter.before())
    if trainer.is_global_zero:
        steps = MeasuredTimeline.load(timeline)
        print_report(strategy.plan, ranks, steps.compare(strategy.plan).measured_step_seconds)
        print(measured_step(steps, width=63).rstrip())
        after, before = (max(rank.median_seconds for rank in each) for each in (ranks, others))
        pause = format_seconds(meter.pause_seconds())
        print(
            f"test accuracy {accuracy:.1%} after {epochs} epochs in {seconds:.0f} s, of which a pause of {pause}"
        )
        speed = f"{before / after:.2f} times as fast as on DeepSpeed's default cut ('parameters')"
        print(f"step: {format_seconds(after)}, {speed}")


if __name__ == "__main__":
    main()
