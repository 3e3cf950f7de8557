"""What steps and hooks log, count and write, where it depends on the rank or on how often a step runs.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import logging
import lzma
import multiprocessing
import os
import socket
import sqlite3
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from zipfile import ZipFile

import torch
from pytorch_lightning.callbacks import BasePredictionWriter, Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import CUT, Host, seeded, trained


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


class WritesTables(cases.Classifier):
    """It writes into the Trainer's tables itself, and not by ``self.log``."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.trainer.callback_metrics["hand"] = loss.detach()
        self.trainer.progress_bar_metrics.update(shown=float(loss))
        return loss


class ReadsTables(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1]) * (1 + 0 * len(self.trainer.callback_metrics))
        self.log("loss", loss)
        return loss


class KeepsLosses(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, y)
        self.losses.append(float(loss))
        return loss


LOSS, PLAIN_LOSS = KeepsLosses(), torch.nn.CrossEntropyLoss()


class WithLoss(cases.Classifier):
    """Its loss is an object of the file, which keeps something."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return LOSS(self(batch[0]), batch[1]) + 0 * PLAIN_LOSS(self.class_weights, torch.tensor(0))


def repeated(host: Host) -> dict[str, Any]:
    """What is said of steps that run once per micro-batch."""
    found = {}
    kinds = (
        ("counts", Counts, "mean"), ("writes", WritesLines, "auto"), ("tables", WritesTables, "auto"),
        ("reads", ReadsTables, "auto"), ("loss", WithLoss, "auto"),
    )  # fmt: skip
    for name, build, loss in kinds:
        with lines() as said, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(host, seeded(build), data=cases.loader(32), max_epochs=1, strategy={"loss": loss})
        every = [*said, *(str(each.message).removeprefix("madpipe: ") for each in caught)]
        found[name] = [line for line in every if "training_step" in line]
    return found


class Prints(cases.Classifier):
    """It prints before and after its call of the layers, and in a part of some batches alone."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        print("before", batch_idx)
        loss = F.cross_entropy(self(batch[0]), batch[1])
        print("after", batch_idx, file=sys.stderr)
        self.print("itself", batch_idx)
        if batch[1][-1] == 0:
            print("the last is 0", batch_idx)
        if batch_idx == 2:  # which is no step that is tried
            self.late = True
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        print("validation", len(batch[1]))
        super().validation_step(batch, batch_idx)


class PrintsInLayers(cases.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("a layer", len(x))
        return super().forward(x)


def printed(host: Host) -> dict[str, Any]:
    """What is shown of what steps and layers print, and what is said of it."""
    found = {}
    for name, build in {"steps": Prints, "layers": lambda: WithBlock(PrintsInLayers())}.items():
        with lines() as said, redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
            trainer = host.trainer(max_epochs=1, strategy={"algorithm": [0, 5, 8]})
            trainer.fit(seeded(build), cases.loader(64), cases.loader(16, seed=3))
        shown = [*out.getvalue().splitlines(), *errors.getvalue().splitlines()]
        words = ("before", "after", "itself", "the last", "validation", "a layer")
        found[name] = {
            "shown": [line for line in shown if line.startswith(words)],
            "said": [line for line in said if "prints or logs" in line],
        }
    return found


class WritesThere(cases.Classifier):
    """It calls a function that writes, and has what that writes to in an attribute."""

    def __init__(self, target: Any, write: Callable[[Any], object]) -> None:
        super().__init__(optimizer="sgd")
        self.target, self.write = target, write

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.write(self.target)
        return loss


class Tee:
    """What a program puts into the place of standard output, to keep what is printed."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque()

    def write(self, text: str) -> int:
        self.kept.append(text)
        return len(text)

    def flush(self) -> None:
        pass


Opened = tuple[Any, Callable[[Any], object]]


def pipe(mode: str, **options: Any) -> Any:
    """The end of a pipe that is written to; the other one is open as long as this process."""
    return os.fdopen(os.pipe()[1], mode, **options)


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE losses (loss)")
    return connection


def opened(opens: Callable[..., Any], *arguments: Any) -> Any:
    """What stays open as long as it is used."""
    return opens(*arguments)


def logger(path: Path) -> logging.Logger:
    found = logging.getLogger("writing_cases")
    found.addHandler(logging.FileHandler(path))
    return found


SQL = "INSERT INTO losses VALUES (1)"
OPENED: dict[str, Callable[[Path], Opened]] = {
    "text pipe": lambda _: (pipe("w"), lambda file: file.write("loss")),
    "printed to a pipe": lambda _: (pipe("w"), lambda file: print("loss", file=file)),
    "binary pipe": lambda _: (pipe("wb"), lambda file: file.write(b"loss")),
    "pipe of bytes": lambda _: (pipe("wb", buffering=0), lambda file: file.write(b"loss")),
    "table in a pipe": lambda _: (csv.writer(pipe("w")), lambda table: table.writerow(["loss"])),
    "descriptor": lambda _: (os.pipe()[1], lambda number: os.write(number, b"loss")),
    "gzip": lambda folder: (opened(gzip.open, folder / "log.gz", "wb"), lambda file: file.write(b"loss")),
    "bz2": lambda folder: (opened(bz2.open, folder / "log.bz2", "wt"), lambda file: file.write("loss")),
    "lzma": lambda folder: (opened(lzma.open, folder / "log.xz", "wt"), lambda file: file.write("loss")),
    "socket": lambda _: (socket.socketpair(), lambda pair: pair[0].sendall(b"loss")),
    "file of a socket": lambda _: (list(_file_of_socket()), lambda files: files[0].write("loss")),
    "connection": lambda _: (multiprocessing.Pipe(), lambda pair: pair[1].send("loss")),
    "queue": lambda _: (multiprocessing.Queue(), lambda queue: queue.put("loss")),
    "database": lambda _: (database(), lambda table: table.execute(SQL)),
    "cursor": lambda _: (database().cursor(), lambda table: table.execute(SQL)),
    "named temporary file": lambda _: (opened(NamedTemporaryFile, "w"), lambda file: file.write("loss")),
    "archive": lambda folder: (ZipFile(folder / "log.zip", "w"), lambda file: file.writestr("a", "loss")),
    "process": lambda _: (Popen(["cat"], stdin=PIPE), lambda process: process.stdin.write(b"loss")),
    "log": lambda folder: (logger(folder / "log"), lambda logger: logger.warning("loss")),
    "opened by bz2": lambda folder: (folder / "log.bz2", lambda path: bz2.open(path, "w").close()),
    "opened by torch": lambda folder: (folder / "log.pt", lambda path: torch.save(1.0, path)),
    "standard output": lambda _: (None, lambda _: print("loss")),
    "none of them": lambda _: ([pipe("w"), socket.socketpair(), database()], lambda _: None),
}  # fmt: skip
"""What opens something, and how a step writes to it."""


def _file_of_socket() -> Iterator[Any]:
    one, other = socket.socketpair()
    yield one.makefile("w")
    yield other


def written_there(host: Host) -> dict[str, Any]:
    """What is said of steps that write where nothing tells how much was written."""
    found = {}
    for name, opened in OPENED.items():
        if not is_chosen(name):
            continue
        folder = host.folder / name
        folder.mkdir(exist_ok=True)
        with lines() as said, ExitStack() as stack:
            if name == "standard output":
                stack.enter_context(redirect_stdout(cast(Any, Tee())))
            kind = type(f"Writes {name}", (WritesThere,), {})  # of one class a line is said once
            module = seeded(lambda kind=kind, opened=opened, folder=folder: kind(*opened(folder)))
            trained(host, module, data=cases.loader(32), max_epochs=1)
        found[name] = [line for line in said if "training_step" in line]
    return found


LINES: Any = None
"""A file that layers write to, opened before."""


class WritesLine(cases.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LINES.write("a line\n")
        return super().forward(x)


class Appends(cases.Block):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.path.open("a") as file:
            file.write("a line\n")
        return super().forward(x)


class WithBlock(cases.Classifier):
    def __init__(self, block: cases.Block) -> None:
        super().__init__(optimizer="sgd")
        self.blocks[1] = block


def written_by_layers(host: Host) -> dict[str, Any]:
    """What is said of layers that write, and how many lines there are before the first step of the optimizer."""
    global LINES
    path = host.folder / f"lines of layers {os.environ['RANK']}"
    found = {}
    with path.open("w") as LINES:
        for name, make in {"held": WritesLine, "opened": lambda: Appends(path), "none": cases.Block}.items():
            with lines() as said:
                trained(host, seeded(lambda make=make: WithBlock(make())), data=cases.loader(16), max_epochs=1)
            found[name] = [line for line in said if "writ" in line]
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


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> dict[str, Any]:
        inputs, labels = cases.samples(32).tensors
        return {"x": inputs[number], "y": labels[number], "id": number, "more": {"name": str(number)}}


class ChangesBatch(cases.Classifier):
    """Its steps take things out of the batch, and put others there, which hooks read."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        labels = batch.pop("y")
        del batch["id"]
        logits = self(batch["x"])
        batch["logits"], batch["more"]["labels"], batch["n"] = logits, labels, 3
        batch["more"]["name"] = [name + "!" for name in batch["more"]["name"]]
        batch["x"] = batch["x"] / 2
        loss = F.cross_entropy(logits, labels)
        batch["loss"] = loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = batch["more"]["name"]
        numbers = {key: float(value.sum()) for key, value in batch.items() if key not in ("n", "more")}
        self.seen += [list(batch), numbers, batch["n"], names, batch["more"]["labels"].tolist()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0] = self(batch.pop(0))
        batch.append(["last"])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [len(batch), float(batch[0].sum()), batch[1]]


def changed_batches(host: Host) -> dict[str, Any]:
    """What a step does to its batch is what hooks are given after it."""
    found: dict[str, Any] = {}
    for name, strategy in (("cut", {}), ("whole", {"num_micro_batches": 1}), ("at once", {"loss": "batch"})):
        module = seeded(ChangesBatch)
        trained(
            host, module, data=DataLoader(Rows(), 16), validation=cases.loader(16), max_epochs=1, strategy=strategy
        )
        found[name] = module.seen
    return found


@dataclass
class Marked:
    """A batch of a class of the program."""

    x: torch.Tensor
    y: torch.Tensor
    about: Any


def _marked(rows: Any) -> Marked:
    inputs, labels = map(torch.stack, zip(*rows, strict=True))
    return Marked(inputs, labels, SimpleNamespace(name="digits"))


class MarksBatch(cases.Classifier):
    """Its steps set attributes of the batch, and of an object in it, which hooks read."""

    def __init__(self, *, deep: bool) -> None:
        super().__init__(optimizer="sgd")
        self.deep = deep
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch.x)
        batch.logits, batch.x = logits.detach(), batch.x / 2
        if self.deep:
            batch.about.mean = 3.0
        return F.cross_entropy(logits, batch.y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        numbers = [float(value.sum()) for value in (batch.x, batch.logits)]
        self.seen += [numbers, getattr(batch.about, "mean", None) if self.deep else None]


def marked_batches(host: Host) -> dict[str, Any]:
    """What a step sets on its batch, and on an object of it, hooks are given after it; else it is told."""
    found: dict[str, Any] = {}
    for name, deep, strategy in (
        ("cut", False, {}),
        ("whole", True, {"num_micro_batches": 1}),
        ("told", True, {}),
    ):
        module = seeded(partial(MarksBatch, deep=deep))
        data = DataLoader(cases.samples(64), 16, collate_fn=_marked)  # the third batch is not tried
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(host, module, data=data, max_epochs=1, strategy=strategy)
        told = [str(each.message) for each in caught if "batch." in str(each.message)]
        found[name] = told if name == "told" else module.seen
    return found


class ChangesUnevenly(cases.Classifier):
    """It puts a number of its micro-batches into the batch that is none of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch["largest"], batch["logits"] = batch["id"].max().item(), self(batch["x"])
        return F.cross_entropy(batch["logits"], batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.largest = batch.get("largest")


def changed_unevenly(host: Host) -> dict[str, Any]:
    found = {}
    for name, number in (("each", 1), ("in windows", 2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(
                host, seeded(ChangesUnevenly), data=DataLoader(Rows(), 16), max_epochs=1,
                accumulate_grad_batches=number, strategy={"loss": "mean"},
            )  # fmt: skip
        found[name] = [str(each.message) for each in caught if "batch['l" in str(each.message)]
    return found


class AppendsEpochs(cases.Classifier):
    """Its hook appends a line to a file, and prints."""

    def __init__(self, path: Path) -> None:
        super().__init__(optimizer="sgd")
        self.path = path

    def on_train_epoch_end(self) -> None:
        with open(self.path, "a") as file:
            file.write("an epoch\n")
        print("an epoch")


class WritesPredictions(BasePredictionWriter):
    """Lightning calls it in a hook of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__("batch")
        self.path = path

    def write_on_batch_end(self, *_: Any) -> None:
        torch.save({}, self.path)


class WritesByRank(Callback):
    """It writes files of its rank, and on rank 0, and saves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.own = self.folder / f"{trainer.global_rank}.txt"

    def on_train_batch_end(self, *_: Any) -> None:
        self.own.write_text("a batch")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        torch.save({}, self.folder / f"{trainer.global_rank}.pt")
        if trainer.is_global_zero:
            print((self.folder / "zero.txt").write_text("an epoch"))
        trainer.save_checkpoint(self.folder / "saved.ckpt")


def written_by_hooks(host: Host) -> dict[str, Any]:
    """What is said of hooks that write on every rank."""
    with lines() as said:
        trained(host, seeded(lambda: AppendsEpochs(host.folder / "epochs.txt")), max_epochs=2)
    appended = [line for line in said if "hooks run" in line]
    with lines() as said:
        inputs = cases.samples(16).tensors[0]
        writer = WritesPredictions(host.folder / "predicted.pt")
        host.trainer(writer, strategy={"algorithm": CUT}).predict(seeded(), DataLoader(inputs, 8))
    predicted = [line for line in said if "hooks run" in line]
    with lines() as said:
        logger, keeps = CSVLogger(host.folder), ModelCheckpoint(host.folder / "kept")
        trained(
            host,
            seeded(),
            WritesByRank(host.folder),
            keeps,
            max_epochs=2,
            logger=logger,
            enable_checkpointing=True,
        )
    return {
        "appended": appended,
        "predicted": predicted,
        "by rank": [line for line in said if "hooks run" in line],
    }


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [numbers_of_layers, drawn_from_tuples, printed, changed_batches, marked_batches],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [repeated, written_there, written_by_layers, written_by_hooks, changed_unevenly],
    4: [],
}
