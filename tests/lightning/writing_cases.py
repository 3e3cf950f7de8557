"""What steps and hooks log, count and write, where it depends on the rank or on how often a step runs.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pytorch_lightning.callbacks import Callback
from torch.nn import functional as F

from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host, seeded, trained


class LogsLayers(cases.Classifier):
    """It logs a number of each of its layers, by steps and by epochs, in training and validation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, weight in self.named_parameters():
            self.log(f"norm/{name}", weight.grad.norm())
            self.log(f"both/{name}", weight.grad.norm(), on_step=True, on_epoch=True)
            self.log(f"mean/{name}", weight.grad.norm(), on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        for name, weight in self.named_parameters():
            self.log(f"weight/{name}", weight.norm())


class Shown(Callback):
    """Notes the numbers of layers that Lightning shows, after each batch and each epoch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        shown = {**trainer.callback_metrics, **trainer.logged_metrics, **trainer.progress_bar_metrics}
        self.rows.append({name: float(value) for name, value in shown.items() if "/" in name})

    on_train_epoch_end = on_train_batch_end


def numbers_of_layers(host: Host) -> dict[str, Any]:
    found = {}
    for name, strategy in (("epochs", {}), ("steps", {"warmup_steps": 2, "algorithm": [0, 5, 8]})):
        shown = Shown()
        trainer = host.trainer(shown, max_epochs=3, strategy={"algorithm": [0, 6, 8], **strategy})
        trainer.fit(seeded(LogsLayers), cases.loader(64), cases.loader(16, seed=3))
        found[name] = shown.rows
    return found


class Counts(cases.Classifier):
    """It counts its steps, and what it logs is no mean over samples."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.count += 1
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("root", loss.sqrt())
        return loss


class WritesLines(cases.Classifier):
    """It writes to files that are open before its steps begin."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.lines, self.table = io.StringIO(), csv.writer(io.StringIO())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.lines.write(f"{batch_idx}\n")
        self.table.writerow([batch_idx])
        return loss


def repeated(host: Host) -> dict[str, Any]:
    """What is said of steps that run once per micro-batch."""
    found = {}
    for name, build, loss in (("counts", Counts, "mean"), ("writes", WritesLines, "auto")):
        with lines() as said:
            trained(host, seeded(build), data=cases.loader(32), max_epochs=1, strategy={"loss": loss})
        found[name] = [line for line in said if "training_step" in line]
    return found


class Pair(NamedTuple):
    name: str
    factors: Any


class DrawsFromTuples(cases.Classifier):
    """Its loss is made with iterators that stand in tuples."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.pair = Pair("factors", itertools.cycle([1.0, 1.5, 0.5]))
        self.table = {"more": ("factors", (itertools.cycle([2.0, 0.5]),))}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss * next(self.pair.factors) * next(self.table["more"][1][0])


def drawn_from_tuples(host: Host) -> dict[str, Any]:
    recorder, module = cases.Recorder(), seeded(DrawsFromTuples)
    trained(host, module, recorder, strategy={"warmup_steps": 2})
    return {"rows": recorder.rows, "next": next(module.pair.factors), "kind": type(module.pair).__name__}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [numbers_of_layers, drawn_from_tuples],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [repeated], 4: []}
