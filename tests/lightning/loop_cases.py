"""Loops, loaders, batches and errors, on a pipeline as in one process."""

from __future__ import annotations

import copy
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import CombinedLoader
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.choice import run_chosen
from tests.growth import beyond_proportion, counted
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import Host


def plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | deque):
        return [plain(child) for child in value]
    if is_dataclass(value):
        return {"kind": type(value).__name__, **plain(vars(value))}
    return value


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except (MisconfigurationException, ValueError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "not refused"


def pipeline_index(rank: int) -> int:
    """Which of two pipelines of two stages a rank belongs to: neighbours run the same stage."""
    return rank % 2


def seeded(build: Callable[[], Any]) -> Any:
    pl.seed_everything(0, verbose=False)
    return build()


# Loops


class Recorded(cases.Classifier):
    """Knows every hook's place in a run, and tests what a step may ask the Trainer."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.stop_at = stop_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.trainer.training and not self.trainer.sanity_checking
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("place", float(100 * self.current_epoch + self.global_step), reduce_fx="max")
        if batch_idx == self.stop_at:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log("sanity", float(self.trainer.sanity_checking))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.events.append(["train", batch_idx, self.global_step, self.current_epoch])

    def on_validation_epoch_end(self) -> None:
        metric = self.trainer.callback_metrics
        self.events.append(
            ["validation", self.global_step, {name: float(value) for name, value in metric.items()}]
        )

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.events.append(["test", batch_idx, dataloader_idx])


def run_loop(
    host: Host, *callbacks: Any, stop_at: int | None = None, several: bool = False, **arguments: Any
) -> dict[str, Any]:
    module = seeded(lambda: Recorded(stop_at))
    trainer = host.trainer(*callbacks, **arguments)
    validation = [cases.loader(21, seed=3), cases.loader(9, seed=4)] if several else cases.loader(37, seed=3)
    trainer.fit(module, cases.loader(70), validation)
    return {
        "events": module.events,
        "metrics": plain(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


class Schedule(pl.Callback):
    """Lightning's own refuses strategies of DeepSpeed's."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.accumulate_grad_batches = (1, 2, 2, 3)[trainer.current_epoch]


def scheduled_windows(host: Host) -> dict[str, Any]:
    """Windows of later epochs are told of where they begin: a hook between two batches of them was in silence."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        record = run_loop(host, Schedule(), max_epochs=4)
    told = [
        each for each in warned if "with accumulate_grad_batches=2, all batches of a window" in str(each.message)
    ]
    assert bool(told) == (host.pipelined and int(os.environ["RANK"]) == 0)
    return record


def loops(host: Host) -> dict[str, Any]:
    """Five batches per epoch, the last one of six samples."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "sanity": lambda: run_loop(host, max_epochs=1, num_sanity_val_steps=2),
        "several": lambda: run_loop(host, several=True, max_epochs=1, num_sanity_val_steps=1),
        "interval": lambda: run_loop(host, max_epochs=1, val_check_interval=2),
        "fraction": lambda: run_loop(host, max_epochs=1, val_check_interval=0.5),
        "every n": lambda: run_loop(host, max_epochs=3, check_val_every_n_epoch=2, limit_train_batches=2),
        "limits": lambda: run_loop(host, limit_train_batches=0.4, limit_val_batches=1),
        "no validation": lambda: run_loop(host, max_epochs=1, limit_val_batches=0),
        "no training": lambda: run_loop(host, max_epochs=1, limit_train_batches=0),
        "overfit": lambda: run_loop(host, max_epochs=3, overfit_batches=1),
        "fast": lambda: run_loop(host, fast_dev_run=True),
        "fast 2": lambda: run_loop(host, fast_dev_run=2),
        "steps": lambda: run_loop(host, max_epochs=-1, max_steps=7),
        "min epochs": lambda: run_loop(host, stop_at=1, max_epochs=4, min_epochs=2),
        "stopped": lambda: run_loop(host, stop_at=1, max_epochs=4),
        "min steps": lambda: run_loop(host, stop_at=1, max_epochs=4, min_steps=8),
        "window": lambda: run_loop(host, max_epochs=1, accumulate_grad_batches=4, val_check_interval=5),
        "scheduled windows": lambda: scheduled_windows(host),
    }
    return run_chosen(runs)


def timed(host: Host) -> dict[str, Any]:
    """Whenever it is that the time is over, it is at the same step on all ranks."""
    trainer = host.trainer(max_epochs=-1, max_time={"seconds": 1})
    trainer.fit(seeded(lambda: Recorded()), cases.loader(70))
    return {"steps": trainer.global_step, "some": trainer.global_step > 0}


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.size = 37

    def train_dataloader(self) -> Any:
        return cases.loader(self.size)

    def val_dataloader(self) -> Any:
        return cases.loader(21, seed=3)

    def test_dataloader(self) -> Any:
        return [cases.loader(21, seed=4), cases.loader(9, seed=5)]

    def predict_dataloader(self) -> Any:
        return cases.loader(9, seed=5)


class WithPredictions(Recorded):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def data_modules(host: Host) -> dict[str, Any]:
    module, data = seeded(WithPredictions), Data()
    trainer = host.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    tested = trainer.test(module, datamodule=data, verbose=False)
    validated = trainer.validate(module, datamodule=data, verbose=False)
    predicted = trainer.predict(module, datamodule=data)
    return {
        "calls": data.calls, "events": module.events, "results": [tested, validated, plain(predicted)],
    }  # fmt: skip


class SeveralLoaders(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        parts = [part for part in parts if part is not None]
        loss = F.cross_entropy(self(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts]))
        self.log("loss", loss, on_epoch=True, batch_size=sum(len(y) for _, y in parts))
        return loss


def combined(host: Host) -> dict[str, Any]:
    """Several loaders whose batches have the same size."""
    records = []
    for loaders in (
        {"a": cases.loader(32), "b": cases.loader(32, seed=5)},
        [cases.loader(32), cases.loader(32, seed=6)],
        CombinedLoader({"a": cases.loader(32), "b": cases.loader(48, seed=7)}, "max_size_cycle"),
        CombinedLoader([cases.loader(32), cases.loader(16, seed=8)], "min_size"),
    ):
        module, recorder = seeded(SeveralLoaders), cases.Recorder()
        trainer = host.trainer(recorder, max_epochs=1)
        trainer.fit(module, loaders)
        records.append({"rows": recorder.rows, "metrics": plain(dict(trainer.callback_metrics))})
    return {"records": records}


class Growing(cases.Classifier):
    def train_dataloader(self) -> Any:
        return cases.loader(16 * (1 + self.current_epoch), seed=self.current_epoch)


def reloaded(host: Host) -> dict[str, Any]:
    module, recorder = seeded(Growing), cases.Recorder()
    host.trainer(recorder, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
    return {"rows": recorder.rows}


class Stream(IterableDataset):
    def __init__(self, num_samples: int, seed: int = 2) -> None:
        self.dataset = cases.samples(num_samples, seed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)


def streamed(host: Host) -> dict[str, Any]:
    module, recorder = seeded(cases.Classifier), cases.Recorder()
    trainer = host.trainer(recorder)
    trainer.fit(module, DataLoader(Stream(37), 16), DataLoader(Stream(21, 3), 16))
    tested = trainer.test(module, DataLoader(Stream(21, 3), 16), verbose=False)
    return {"rows": recorder.rows, "metrics": plain(dict(trainer.callback_metrics)), "tested": tested}


def uneven_streams(host: Host) -> dict[str, Any]:
    """The second pipeline's data ends two batches before the first one's: so does the epoch."""
    second = pipeline_index(int(os.environ["RANK"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = seeded(cases.Classifier)
        trainer = host.trainer(max_epochs=2, strategy={"num_stages": 2})
        stream = DataLoader(Stream(48 if second else 80, seed=second), 16)
        validation = DataLoader(Stream(33 if second else 16, seed=3), 16)
        trainer.fit(module, stream, validation)
    return {"steps": trainer.global_step, "epoch": trainer.current_epoch}


# Batches


class Encoding(dict):
    """As Hugging Face's: a mapping with attributes, made from a mapping."""

    def __init__(self, data: dict[str, Any], encodings: Any = None) -> None:
        super().__init__(data)
        self.encodings = encodings


@dataclass
class Sample:
    x: torch.Tensor
    names: tuple[str, ...]


class Batch(NamedTuple):
    sample: Any
    y: torch.Tensor


class Structured(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[str] = []
        self.kinds: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.kinds.add(f"{type(batch).__name__} of {type(batch.sample).__name__}")
        encoding = batch.sample["inner"][0]
        assert isinstance(encoding, Encoding)
        logits = self(encoding["record"].x)
        names = encoding["record"].names
        assert len(names) == len(logits) and batch.sample["scale"] == 2.0 and batch.sample["word"] == "word"
        each = F.cross_entropy(logits, batch.y, reduction="none")
        wanted = batch.sample["mask"]
        loss = (each * wanted).sum() / len(each)
        named = torch.tensor([float(int(name) % 2) for name in names])
        self.log("named", (named * wanted).mean(), batch_size=len(each))
        return loss

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append("before")
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.transfers.append("transfer")
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.transfers.append("after")
        batch.sample["inner"][0]["record"].x.mul_(2)
        return batch


def structured(items: list[Any]) -> Batch:
    x = torch.stack([x for x, _ in items])
    y = torch.stack([y for _, y in items])
    record = Sample(x, tuple(str(index) for index in range(len(items))))
    sample = {
        "inner": [Encoding({"record": record})], "mask": x[:, 0] > 0, "scale": torch.tensor(2.0), "word": "word",
    }  # fmt: skip
    return Batch(sample, y)


def structured_batches(host: Host) -> dict[str, Any]:
    """The last batch has one sample, the one of the second fit three, which is less than the micro-batches."""
    records = []
    for num_samples in (33, 35):
        module, recorder = seeded(Structured), cases.Recorder()
        data = DataLoader(cases.samples(num_samples), 16, collate_fn=structured)
        trainer = host.trainer(recorder, max_epochs=1)
        trainer.fit(module, data)
        records.append(
            {
                "rows": recorder.rows,
                "metrics": plain(dict(trainer.callback_metrics)),
                "transfers": module.transfers,
                "kinds": sorted(module.kinds),
            }
        )
    return {"records": records}


class MaskedLayer(nn.Module):
    """Takes and returns what attention layers hand on: activations, a mask of bools, and one of numbers."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, kept, bias = inputs
        return torch.tanh(self.linear(x + bias)).masked_fill(~kept, 0.0), kept, bias


class SpreadLayer(MaskedLayer):
    """The same with a parameter for each, as for one device: the pipeline gives it the members of the tuple."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward((x, kept, bias))


class MaskedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(cases.WIDTH, cases.NUM_CLASSES)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.linear(inputs[0])


class Masked(cases.Steps):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        widths = [cases.NUM_FEATURES, *[cases.WIDTH] * 4]
        kinds = (SpreadLayer, MaskedLayer, SpreadLayer, MaskedLayer)
        self.layers = nn.ModuleList(kind(a, b) for kind, (a, b) in zip(kinds, pairwise(widths), strict=True))
        self.head = MaskedHead()

    def pipeline_layers(self) -> list[nn.Module]:
        return [*self.layers, self.head]

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        handed_on: Any = inputs
        for layer in self.pipeline_layers():
            handed_on = layer(*handed_on) if isinstance(layer, SpreadLayer) else layer(handed_on)
        return handed_on

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x, x[:, :1] > -1.0, x[:, 1:2] * 0.1)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("loss", F.cross_entropy(self(x, x[:, :1] > -1.0, x[:, 1:2] * 0.1), y))


def masked(host: Host) -> dict[str, Any]:
    """Between the layers stand tuples, with tensors that get no gradient."""
    return cases.fit(host, Masked, cases.loader(54))


# Errors


class GivesDict(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x}


class WithDict(cases.Classifier):
    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, GivesDict(), self.head]


def refused_layers(host: Host) -> dict[str, Any]:
    return {"dict": refused(lambda: host.trainer(max_epochs=1).fit(WithDict(), cases.loader(16)))}


class Skips(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return None if batch_idx == 1 else F.cross_entropy(logits, batch[1])


class SkipsEarly(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class SkipsWhole(cases.Classifier):
    """The batch that is tried, and no micro-batch of it: as by a threshold of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return None if len(batch[1]) > self.trainer.train_dataloader.batch_size // 2 else loss


class ValidatesSome(cases.Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            super().validation_step(batch, batch_idx)


class Raises(cases.Classifier):
    """In the last micro-batch of the second batch."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.raises_in = step
        self.steps_made = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.one("training", batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.one("validation", batch, batch_idx)

    def one(self, step: str, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        if step == self.raises_in and batch_idx == 1:
            raise ValueError(f"the user's own error in {step}")
        return F.cross_entropy(logits, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps_made += 1


class Waits(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.trainer.strategy.barrier()
        return loss


class Consuming(cases.Classifier):
    """Takes its batch apart, as is often done with dicts, and scales it where it stands."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        y, x = batch.pop("y"), batch.pop("x").mul_(0.5)
        logits = self(x)
        logits.mul_(0.5)  # what the last stage put out, too
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, batch_size=len(y))
        return loss


def named_samples(items: list[Any]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items])}


def consumed_batches(host: Host) -> dict[str, Any]:
    """A step's first run, to see what it does, took the labels out of the batch before its real run."""
    pl.seed_everything(0, verbose=False)
    trainer = host.trainer(max_epochs=1)
    data = torch.utils.data.DataLoader(cases.samples(37), batch_size=16, collate_fn=named_samples)
    trainer.fit(Consuming(), data)
    return cases.fit_record(trainer, None, [])


class Refilling(torch.utils.data.IterableDataset):
    """Gives the same two tensors again, filled anew, through torch or past it."""

    def __init__(self, through_numpy: bool) -> None:
        self.through_numpy = through_numpy

    def __iter__(self) -> Any:
        x, y = torch.zeros(16, cases.NUM_FEATURES), torch.zeros(16, dtype=torch.long)
        for rows, labels in cases.loader(64):
            if self.through_numpy:
                x.numpy()[:], y.numpy()[:] = rows.numpy(), labels.numpy()
            else:
                x.copy_(rows), y.copy_(labels)
            yield {"x": x, "y": y}

    def __len__(self) -> int:  # so that Lightning draws a batch when it is used, and not before
        return 4


class Scaling(Consuming):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(dict(batch), batch_idx)
        self.log("last", loss, on_step=True, on_epoch=True)
        return loss


def refilled_batches(host: Host) -> dict[str, Any]:
    """A loader that gives the same tensors again, and one whose tensors a step scales for all epochs to come."""
    records = {}
    pairs = [named_samples([*zip(*batch, strict=True)]) for batch in cases.loader(64)]
    for name, data in {
        "torch": torch.utils.data.DataLoader(Refilling(False), batch_size=None),
        "numpy": torch.utils.data.DataLoader(Refilling(True), batch_size=None),
        "kept": torch.utils.data.DataLoader(pairs, batch_size=None),  # type: ignore[arg-type]
    }.items():
        pl.seed_everything(0, verbose=False)
        module = Scaling()
        trainer = host.trainer(max_epochs=2, accumulate_grad_batches=2)
        trainer.fit(module, data)
        records[name] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    records["left"] = [float(batch["x"].abs().sum()) for batch in pairs]
    return records


class Arriving(cases.Classifier):
    """Its batches come to their device in the loop of an evaluation, as those of a GPU: within inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[float] = []

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return tuple(tensor.clone() for tensor in batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("validated", F.cross_entropy(self(x), y))
        if batch_idx:
            y.add_(batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.labels.append(float(batch[1].sum()))


def arriving_batches(host: Host) -> dict[str, Any]:
    """What was ended with "Inference tensors do not track version counter" on every GPU."""
    pl.seed_everything(0, verbose=False)
    module, trainer = Arriving(), host.trainer(max_epochs=1)
    trainer.fit(module, cases.loader(32), cases.loader(37, seed=3))
    [validated] = trainer.validate(module, cases.loader(37, seed=3), verbose=False)
    return {**validated, "labels": module.labels}


class Ends(cases.Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


def ended_epochs(host: Host) -> dict[str, Any]:
    """A hook ends each epoch in the middle of a window; its batches were run with those of the next epoch."""
    pl.seed_everything(0, verbose=False)
    trainer, module = host.trainer(max_epochs=3, accumulate_grad_batches=2), Ends()
    trainer.fit(module, cases.loader(80))
    [tested] = trainer.test(module, cases.loader(21, seed=3), verbose=False)
    return {"tested": tested, "step": trainer.fit_loop.epoch_loop.global_step}


class Unreduced(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="none")


class CallsTwice(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self(batch[0]).square().mean()


class Detached(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx).detach()}


def step_errors(host: Host) -> dict[str, Any]:
    """Raised on the last stage only, when the others are in the middle of the batch."""

    def fit(module: Any) -> str:
        return refused(lambda: host.trainer(max_epochs=1).fit(module, cases.loader(54), cases.loader(37)))

    def fit_by_mean(module: Any) -> str:
        trainer = host.trainer(max_epochs=1, strategy={"loss": "mean"})
        return refused(lambda: trainer.fit(module, cases.loader(54)))

    training, validation = Raises("training"), Raises("validation")
    return {
        "no losses": [how(kind()) for kind in (Unreduced, Detached, CallsTwice) for how in (fit, fit_by_mean)],
        "skips": fit(Skips()),
        "skips early": fit(SkipsEarly()),
        "skips whole": fit(SkipsWhole()),
        "validates some": fit(ValidatesSome()),
        "training": [fit(training), training.steps_made],
        "validation": [fit(validation), validation.steps_made],
        "waits": fit(Waits()),
        "works": fit(cases.Classifier()),  # nothing of the above is in the way
    }


def step_errors_of_a_pipeline(host: Host) -> dict[str, Any]:
    """Only the second of two pipelines raises: no rank makes the step."""
    module = Raises("training" if pipeline_index(int(os.environ["RANK"])) else "never")
    trainer = host.trainer(max_epochs=1, strategy={"num_stages": 2})
    sentence = refused(lambda: trainer.fit(module, cases.loader(54)))
    return {"sentence": sentence, "steps": [module.steps_made, trainer.global_step]}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        loops,
        data_modules,
        combined,
        reloaded,
        streamed,
        structured_batches,
        masked,
        consumed_batches,
        refilled_batches,
        arriving_batches,
        ended_epochs,
    ],
    4: [],
}


class Reads(pl.Callback):
    """Reads what the step has logged after each batch, and copies the table."""

    def __init__(self) -> None:
        self.read: list[Any] = []
        self.kinds: set[str] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        tables = {"train_loss": trainer.callback_metrics, "train_loss_step": trainer.logged_metrics}
        for name, table in tables.items():
            try:
                self.read.append(float(table[name]))
            except KeyError as error:
                self.read.append(str(error))
            self.kinds.add(type(copy.deepcopy(table)).__name__)
        self.read.append(trainer.callback_metrics.get("train_loss") is None)


def read_within_windows(host: Host) -> dict[str, Any]:
    """A KeyError with the name alone told nobody why there is no value where one process has one."""
    reads = Reads()
    host.trainer(reads, max_epochs=1, accumulate_grad_batches=2).fit(cases.Classifier(), cases.loader(64))
    return {"read": reads.read, "kinds": sorted(reads.kinds)}


class Deep(cases.Classifier):
    """Has as many small layers as it is told."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(cases.WIDTH, cases.WIDTH) for _ in range(number))


def many_layers(host: Host) -> dict[str, Any]:
    """The functions whose calls, until a run trains, grow by more than the number of layers."""
    found: dict[int, dict[str, int]] = {}
    for number in (4, 50, 200):  # the first loads what is loaded once
        strategy = {"algorithm": [0, number // 4, number + 3], "warmup_epochs": 0}
        with counted() as calls:
            host.trainer(strategy=strategy, max_epochs=1).fit(Deep(number), cases.loader(32))
        found[number] = dict(calls)
    beyond = beyond_proportion(found[50], found[200], 4)
    return {
        "beyond": sorted(f"{name}: {counts}" for name, counts in beyond.items()),
        "some": len(found[200]) > 500,
    }


ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [timed, refused_layers, step_errors, read_within_windows, many_layers],
    4: [uneven_streams, step_errors_of_a_pipeline],
}
