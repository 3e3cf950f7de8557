"""Data that are drawn while they are read, such as images and masks that are turned together."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from deepspeed_partition.engine.runtime import random_state
from tests.lightning import lightning_cases as cases
from tests.lightning.after_fit_cases import Said
from tests.lightning.lightning_cases import Host
from tests.lightning.loop_cases import plain, refused, seeded
from tests.other_device import OtherDevice, rand_on_device


class Drawing(nn.Module):
    """Draws as dropout does, and changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * (torch.rand(1) + random.random() + numpy.random.rand())


class Turned(cases.Classifier):
    """Its first stage draws, and its last one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(self.blocks[0], Drawing())
        self.read: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[:2], batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.append([plain(part.double().sum()) for part in batch[:3]])


class Drawn(Dataset):
    """Samples whose inputs and labels are drawn, beside the sample's number."""

    def __init__(self, draw: Callable[[], float], numbered: bool = True) -> None:
        self.data, self.draw, self.numbered = cases.samples(48), draw, numbered

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        (x, y), share = self.data[index], self.draw()
        sample = x * (1 + share), (y + int(share > 0.5)) % cases.NUM_CLASSES
        return (*sample, index) if self.numbered else sample


def from_all_generators() -> float:
    return (torch.rand(1).item() + random.random() + numpy.random.rand()) / 3


def alike(host: Host) -> dict[str, Any]:
    """Two epochs in another process that Lightning seeds, and two in this one, unseeded and in another order."""
    found = {}
    for name, arguments in {"workers": {"num_workers": 1}, "shuffled": {"shuffle": True}}.items():
        pl.seed_everything(0, workers=name == "workers", verbose=False)
        module = Turned()
        if name == "shuffled":
            torch.manual_seed(int(os.environ["RANK"]))
        loader = DataLoader(Drawn(from_all_generators), batch_size=16, **arguments)
        host.trainer(strategy={"algorithm": cases.CUT, "warmup_epochs": 0}).fit(module, loader)
        found[name] = module.read
    os.environ.pop("PL_SEED_WORKERS")
    found["on the device"] = _read_on_device(host)
    return found


class DrawingOnDevice(nn.Module):
    """Draws as dropout does on a GPU, and changes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * rand_on_device(x)


class TurnedOnDevice(Turned):
    """Inputs and labels are turned together on the device, from whose generator its first stage draws, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = nn.Sequential(self.blocks[0], DrawingOnDevice())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        share = rand_on_device(batch[0])
        return batch[0] * (1 + share), (batch[1] + int(share > 0.5)) % cases.NUM_CLASSES, batch[2]


def _read_on_device(host: Host) -> list[Any]:
    """Two epochs whose data each rank draws on its device, with the seed that torch gave that: another on each."""
    pl.seed_everything(0, verbose=False)
    module, loader = TurnedOnDevice(), DataLoader(Drawn(lambda: 0.25), batch_size=16)
    OtherDevice().manual_seed(int(os.environ["RANK"]))
    with patch.object(random_state, "get_accelerator", OtherDevice):
        host.trainer(strategy={"algorithm": cases.CUT, "warmup_epochs": 0}).fit(module, loader)
    return module.read


class IgnoresOutputs(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch_idx += 1


class Renumbered(Dataset):
    """Samples whose classes are numbered in the order of a set, which is another one on each rank."""

    def __init__(self) -> None:
        self.data = cases.samples(48)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x, (y + int(os.environ["RANK"])) % cases.NUM_CLASSES


def unlike(host: Host) -> dict[str, Any]:
    """Each rank has a generator of its own from the third batch on: only the samples' numbers agree then."""

    def loader(numbered: bool) -> DataLoader:
        own, count = numpy.random.default_rng(int(os.environ["RANK"])), itertools.count()
        draw = lambda: float(own.random()) if next(count) >= 16 else 0.25  # noqa: E731
        return DataLoader(Drawn(draw, numbered), batch_size=8)

    with Said() as said:
        reads = LambdaCallback(on_train_batch_end=lambda t, m, outputs, *_: float(outputs["loss"]))
        callbacks = [reads] if int(os.environ["RANK"]) else [IgnoresOutputs()]  # rank 0 says what another one has
        host.trainer(*callbacks, max_epochs=1, accumulate_grad_batches=2).fit(seeded(Turned), loader(True))
    with Said() as said_of_one:
        host.trainer(max_epochs=1).fit(seeded(Turned), DataLoader(Renumbered(), batch_size=8))
    told = [
        [line for line in said.lines if "read different" in line or "on_train_batch_end" in line],
        [line for line in said_of_one.lines if "read different" in line],
    ]
    dist.broadcast_object_list(told, 0)
    return {
        "told": told[0],
        "told_of_one": told[1],
        "refused": refused(lambda: host.trainer(max_epochs=1).fit(seeded(Turned), loader(False))),
    }
