"""What users do in steps and hooks, on a pipeline as in one process; ``loop_cases`` has the rest."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import pickle
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import BasePredictionWriter, Callback, LambdaCallback
from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only
from torch import nn
from torch.distributed import get_rank
from torch.distributed.nn.functional import all_gather as gather_with_gradients
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.aggregation import RunningSum
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.choice import run_chosen
from tests.lightning import drawing_cases, loop_cases
from tests.lightning import lightning_cases as cases
from tests.lightning.after_fit_cases import Said
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host, seeded, trained
from tests.lightning.loop_cases import pipeline_index, plain, refused

# Predictions


@dataclass
class Prediction:
    best: torch.Tensor
    names: list[str]


class Pair(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Predictor(cases.Classifier):
    """Returns everything that can be joined."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])
        best = logits.argmax(-1)
        return {
            "logits": logits,
            "pair": Pair(logits.min(-1).values, logits.max(-1).values),
            "record": Prediction(best, [f"class {index}" for index in best.tolist()]),
            "list": [logits.sum(-1), best],
            "array": logits.double().numpy(),
            "boxes": [torch.zeros(index, 2) for index in best.tolist()],
            "nothing": None,
            "where": (batch_idx, dataloader_idx, "text"),
        }


class Writer(BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append([plain(prediction["logits"]), batch_indices, batch_idx, dataloader_idx])

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.written.append([[plain(one["logits"]) for one in predictions], plain(batch_indices)])


def predictions(host: Host) -> dict[str, Any]:
    """A last batch of 5 samples, of which the pipeline makes micro-batches of 2, 1, 1 and 1; and one of 1."""
    module = seeded(Predictor)
    one = host.trainer().predict(module, cases.loader(37))
    several = host.trainer(limit_predict_batches=1).predict(module, [cases.loader(37), cases.loader(17)])
    writers = [Writer("batch"), Writer("epoch"), Writer("batch_and_epoch")]
    quiet = host.trainer(*writers).predict(module, cases.loader(33), return_predictions=False)
    ended: list[Any] = []
    watching = LambdaCallback(on_predict_batch_end=lambda t, m, outputs, *_: ended.append(plain(outputs["list"])))
    host.trainer(watching).predict(module, cases.loader(16), return_predictions=False)
    return {
        "one": plain(one),
        "kinds": [type(one[0]["pair"]).__name__, type(one[0]["array"]).__name__, type(one[0]["where"]).__name__],
        "several": plain(several),
        "quiet": quiet,
        "written": [writer.written for writer in writers],
        "ended": ended,
    }


def default_predictions(host: Host) -> dict[str, Any]:
    """``predict_step`` of Lightning, after a fit by the same Trainer."""
    module = seeded(cases.Classifier)
    x = cases.samples(21).tensors[0]
    trainer = host.trainer(max_epochs=1)
    trainer.fit(module, cases.loader(32))
    return {"predictions": plain(trainer.predict(module, DataLoader(x, batch_size=8)))}


class NoForward(cases.Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum(-1)


class Scalar(cases.Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).sum()


class Changing(cases.Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {f"{len(batch[0])}": self(batch[0])}


def refused_predictions(host: Host) -> dict[str, Any]:
    def predict(build: Callable[[], Any], num_samples: int = 16, loss: str = "mean") -> str:
        trainer = host.trainer(strategy={"loss": loss})
        return refused(lambda: trainer.predict(build(), cases.loader(num_samples)))

    return {
        "no forward": predict(NoForward),
        "a list": predict(cases.Classifier),
        "a scalar": predict(Scalar),
        "other fields": predict(Changing, 5),
        "once per batch": [predict(build, 5, "auto") for build in (Scalar, Changing)],
    }


# What steps return


class Returns(cases.Classifier):
    """Returns more than the loss, and reads it in hooks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        return {"loss": loss, "logits": logits, "more": [batch[1], {"mean": logits.mean()}], "idx": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(["train", plain(outputs)])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(["validation", plain(outputs)])

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])


def returned(host: Host) -> dict[str, Any]:
    module = seeded(Returns)
    tested: list[Any] = []
    watching = LambdaCallback(on_test_batch_end=lambda t, m, outputs, *_: tested.append(plain(outputs)))
    trainer = host.trainer(watching, max_epochs=1)
    trainer.fit(module, cases.loader(37), cases.loader(21, seed=3))
    trainer.test(module, cases.loader(21, seed=3), verbose=False)
    return {"seen": module.seen, "tested": tested}


class ReturnsInWindows(Returns):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([batch_idx, outputs.get("idx"), outputs["logits"].shape[0] if "logits" in outputs else 0])


class KnowsLastBatch(cases.Classifier):
    """Gives the last batch of an epoch another loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        factor = 3.0 if self.trainer.is_last_batch else 1.0
        place = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return super().training_step(batch, batch_idx) * (factor + 0.1 * place)


def last_batches(host: Host) -> dict[str, Any]:
    """All batches of a window saw the progress of its last one, as steps run at the window's end."""
    module = seeded(KnowsLastBatch)
    trained(host, module, max_epochs=2, accumulate_grad_batches=2, limit_train_batches=4)
    return {name: float(value.double().abs().sum()) for name, value in module.state_dict().items()}


class ReadsInWindows(Returns):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["logits"])


def returned_in_windows(host: Host) -> dict[str, Any]:
    """Within a window hooks had the loss alone, and a hook that read more ended in a KeyError of its own."""
    module = seeded(ReturnsInWindows)
    trained(host, module, max_epochs=1, accumulate_grad_batches=2)
    read = "nothing is raised"
    try:
        trained(host, seeded(ReadsInWindows), max_epochs=1, accumulate_grad_batches=2)
    except KeyError as error:
        read = str(error)
    return {"seen": module.seen, "read": read}


class Unread(cases.Classifier):
    """What nobody reads need not be joinable."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"count": len(batch[0]), "logits": self(batch[0])[0]}


def unread(host: Host) -> dict[str, Any]:
    """One rank's callback is enough to have the outputs."""
    host.trainer().validate(seeded(Unread), cases.loader(21), verbose=False)
    counts: list[Any] = []
    watching = LambdaCallback(on_validation_batch_end=lambda t, m, outputs, *_: counts.append(plain(outputs)))
    callbacks = [watching] if os.environ.get("RANK", "0") == "0" else []
    if not host.pipelined:
        return {"read": None}
    trainer = host.trainer(*callbacks, strategy={"loss": "mean"})
    read = refused(lambda: trainer.validate(seeded(Unread), cases.loader(21), verbose=False))
    return {"read": read}


# What steps leave behind


@dataclass
class Totals:
    samples: int
    per_class: torch.Tensor


class Leaves(cases.Classifier):
    """The idiom of Lightning 2: steps fill lists, counters and buffers, and hooks of epochs read them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(cases.NUM_CLASSES, cases.NUM_CLASSES))
        self.register_buffer("none", None)
        self.outs: list[Any] = []
        self.by_name: defaultdict[str, list[Any]] = defaultdict(list)
        self.counts: Counter[int] = Counter()
        self.recent: deque[float] = deque(maxlen=3)
        self.array = numpy.zeros(cases.NUM_CLASSES)
        self.classes: set[int] = set()
        self.totals = Totals(0, torch.zeros(cases.NUM_CLASSES))
        self.samples = 0
        self.last: Any = None
        self.epochs: list[Any] = []

    def keep(self, batch: Any, logits: torch.Tensor) -> None:
        y = batch[1]
        self.outs.append(logits.argmax(-1))
        self.by_name["largest"].append(logits.max(-1).values)
        self.counts.update(y.tolist())
        self.recent.extend(y.float().tolist())
        numpy.add.at(self.array, y.numpy(), 1.0)
        self.classes |= set(y.tolist())
        self.totals.samples += len(y)
        self.totals.per_class += F.one_hot(y, cases.NUM_CLASSES).sum(0)
        self.samples += len(y)
        self.last = logits[-1]  # a view with a graph
        self.confusion.index_put_((y, logits.argmax(-1)), torch.ones(len(y)), accumulate=True)
        if self.none is None:
            self.none = torch.zeros(1)
        self.none = self.none + len(y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        self.keep(batch, logits)
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.samples += len(batch[0])  # before forward: the first stage runs it, too
        self.samples -= len(batch[0])
        self.keep(batch, self(batch[0]))

    def end_epoch(self, name: str) -> None:
        self.epochs.append(
            {
                "name": name,
                "outs": plain(torch.cat(self.outs)),
                "by_name": plain(torch.cat(self.by_name["largest"])),
                "counts": plain(sorted(self.counts.items())),
                "recent": plain(self.recent),
                "array": plain(self.array),
                "classes": sorted(self.classes),
                "totals": [self.totals.samples, plain(self.totals.per_class)],
                "samples": self.samples,
                "last": plain(self.last),
                "confusion": plain(self.confusion),
                "none": plain(self.none),
            }
        )
        self.log(f"{name}_samples", float(self.samples))

    def on_train_epoch_end(self) -> None:
        self.end_epoch("train")
        self.outs.clear()
        self.by_name.clear()
        self.confusion.zero_()

    def on_validation_epoch_end(self) -> None:
        self.end_epoch("validation")


def left_behind(host: Host) -> dict[str, Any]:
    module = seeded(Leaves)
    trainer = host.trainer(num_sanity_val_steps=1)
    trainer.fit(module, cases.loader(37), cases.loader(21, seed=3))
    return {"epochs": module.epochs, "metrics": plain(dict(trainer.callback_metrics))}


class Counts(cases.Classifier):
    """Counts the runs of a step and of what comes before its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.on_rank_0, self.draws = 0, 0, 0, []
        self.register_buffer("steps", torch.zeros(()))
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.before += 1
        self.steps += 1
        self.mean.update(1.0)
        logits = self(batch[0])
        self.after += 1
        self.on_rank_0 += self.trainer.is_global_zero
        self.draws.append(float(torch.rand(())))
        return F.cross_entropy(logits, batch[1])


def counted(host: Host) -> dict[str, Any]:
    """37 samples: two batches in 4 micro-batches each and one of 5 in 4; measuring repeats the step, unseen."""
    module = seeded(Counts)
    host.trainer(max_epochs=1, strategy={"algorithm": cases.CUT}).fit(module, cases.loader(37))
    return {
        "before": module.before,
        "after": module.after,
        "on rank 0": module.on_rank_0,
        "draws": len(module.draws),
        "steps": float(module.steps),
        "updates": module.mean.update_count,
    }


class Meter:
    """As many a script has one."""

    def __init__(self) -> None:
        self.count = 0


class Unsendable(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.meters = {"batches": Meter(), "unused": Meter(), "accuracy": MulticlassAccuracy(cases.NUM_CLASSES)}
        # It is sent as an attribute, and was said not to be.
        self.mean = MeanMetric()
        self.meters["mean"] = self.mean
        self.meters["many"] = MetricCollection([MulticlassPrecision(cases.NUM_CLASSES)])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean.update(1.0)
        self.secret = lambda: 1
        self.number = batch_idx
        self.meters["batches"].count += 1
        self.meters["accuracy"].update(batch[1], batch[1])
        self.meters["many"].update(batch[1], batch[1])
        return F.cross_entropy(self(batch[0]), batch[1])


def unsendable(host: Host) -> dict[str, Any]:
    module = seeded(Unsendable)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        host.trainer(max_epochs=1).fit(module, cases.loader(32))
    sentences = sorted(str(warning.message) for warning in said if str(warning.message).startswith("madpipe: "))
    return {"sentences": sentences, "has it": hasattr(module, "secret"), "number": module.number}


# Metrics


class WithMetrics(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        num = cases.NUM_CLASSES
        self.accuracy = MulticlassAccuracy(num, average="micro")
        self.f1 = MulticlassF1Score(num)
        self.mean_loss = MeanMetric()
        self.auroc = MulticlassAUROC(num)
        self.confusion = MulticlassConfusionMatrix(num)
        self.many = MetricCollection([MulticlassPrecision(num), MulticlassRecall(num)], prefix="val_")
        self.tracker = MetricTracker(MulticlassAccuracy(num, average="micro"))
        self.by_hand: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.f1(logits, y)
        self.mean_loss.update(loss.detach(), weight=len(y))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.log("f1", self.f1, on_step=True, on_epoch=False, metric_attribute="f1")
        self.log("mean_loss", self.mean_loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics | self.trainer.logged_metrics
        self.by_hand.append({name: float(value) for name, value in metrics.items()})

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.auroc.update(logits.softmax(-1), y)
        self.confusion.update(logits, y)
        self.many.update(logits, y)
        self.tracker.update(logits, y)
        self.log_dict(self.many)
        self.log("auroc", self.auroc)

    def on_validation_epoch_end(self) -> None:
        self.by_hand.append(plain(self.confusion.compute()))
        self.by_hand.append(plain(self.tracker.compute()))
        self.confusion.reset()


class Summed(cases.Classifier):
    """Its loss is no mean over the samples."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=5e-3, momentum=0.9)


def summed(host: Host) -> dict[str, Any]:
    """4 micro-batches of 4 are 4 accumulated batches of 4; one micro-batch is the batch."""
    records = []
    for whole in (False, True):
        module = seeded(Summed)
        size, accumulated = (16, 1) if whole or host.pipelined else (4, 4)
        strategy = {"num_micro_batches": 1 if whole else 4, "loss": "mean"}
        trainer = host.trainer(max_epochs=2, accumulate_grad_batches=accumulated, strategy=strategy)
        trainer.fit(module, DataLoader(cases.samples(48), batch_size=size), cases.loader(21, seed=3))
        records.append(plain(dict(trainer.callback_metrics)))
    return {"records": records}


class LogsSizes(cases.Classifier):
    """Weights what it logs by numbers that count samples and by numbers that are the same for every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        for name, size in {"one": 1, "constant": 3, "samples": len(y), "elements": x.numel()}.items():
            self.log(name, loss, batch_size=size, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        for name, size in {"val_one": 1, "val_samples": len(y)}.items():
            self.log(name, F.cross_entropy(logits, y), batch_size=size)


def logged_sizes(host: Host) -> dict[str, Any]:
    """The last batch of an epoch is shorter: cut into fewer micro-batches, and once of other sizes."""
    records = {}
    for loss, size in (("auto", 16), ("auto", 4), ("mean", 16), ("batch", 4)):
        trainer = host.trainer(max_epochs=2, strategy={"loss": loss})
        data = DataLoader(cases.samples(2 * size + 2), batch_size=size)
        trainer.fit(seeded(LogsSizes), data, DataLoader(cases.samples(18, seed=3), batch_size=16))
        records[f"{loss}, {size}"] = plain(dict(trainer.callback_metrics))
    return records


class ScaledBatches(cases.Classifier):
    """Is given a number for the batch before its samples, by which Lightning takes the batch for one sample."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch["x"]), batch["y"]) * batch["scale"]
        self.log("loss", loss, on_epoch=True)
        self.log("samples", loss, on_epoch=True, batch_size=len(batch["y"]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["x"]), batch["y"]))


def _scaled(items: list[Any]) -> dict[str, torch.Tensor]:
    x, y = torch.utils.data.default_collate(items)
    return {"scale": torch.tensor(2.0), "x": x, "y": y}


def scaled_batches(host: Host) -> dict[str, Any]:
    """Lightning weights a batch in the mean of an epoch by what it finds in it first, and says so."""
    records = {}
    for name, arguments in (("each", {}), ("window", {"accumulate_grad_batches": 2})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = host.trainer(max_epochs=1, **arguments)
            data = DataLoader(cases.samples(36), batch_size=16, collate_fn=_scaled)
            trainer.fit(seeded(ScaledBatches), data, DataLoader(cases.samples(18), 16, collate_fn=_scaled))
        told = [str(each.message) for each in caught if "ambiguous collection" in str(each.message)]
        is_told = any(told) if trainer.is_global_zero and name == "each" else None  # once in a process
        records[name] = {**plain(dict(trainer.callback_metrics)), "told": is_told}
    return records


def with_metrics(host: Host) -> dict[str, Any]:
    module = seeded(WithMetrics)
    trainer = host.trainer(num_sanity_val_steps=1)
    trainer.fit(module, cases.loader(37), cases.loader(21, seed=3))
    return {
        "by_hand": module.by_hand,
        "metrics": plain(dict(trainer.callback_metrics)),
        "logged": plain(dict(trainer.logged_metrics)),
        "bar": plain(dict(trainer.progress_bar_metrics)),
        "all": plain(module.tracker.compute_all()),
    }


class Confusions(Callback):
    """Updates metrics in hooks, of its own and of the module: made when fit begins, or when an epoch does."""

    def __init__(self) -> None:
        self.own, self.held, self.totals = MulticlassConfusionMatrix(cases.NUM_CLASSES), {"sum": SumMetric()}, []
        self.kept, self.running = SumMetric(), RunningSum(window=2)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.made = SumMetric()

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.late = SumMetric()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.own.update(batch[1], batch[1])
        self.kept.update(len(batch[1]))
        self.running(len(batch[1]))
        for metric in (self.held["sum"], pl_module.made, self.late):
            metric.update(len(batch[1]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = [self.own, self.held["sum"], pl_module.made, self.late]
        self.totals.append([float(metric.compute().sum()) for metric in metrics])
        for metric in metrics:
            metric.reset()


def metrics_of_hooks(host: Host) -> dict[str, Any]:
    """Their states were gathered from both ranks, and counted twice, and so they were by the script after fit."""
    callback = Confusions()
    trainer = host.trainer(callback, max_epochs=2)
    trainer.fit(seeded(cases.Classifier), cases.loader(37), cases.loader(21, seed=3))
    kept, copy = callback.kept, pickle.loads(pickle.dumps(callback.kept))
    record = {"totals": callback.totals, "after fit": float(kept.compute())}
    record["running"] = float(callback.running.compute())
    num_updates = kept._update_count
    kept.reset()
    for _ in range(num_updates):  # as many as in the run; these are each process's own
        kept.update(1.0)
    record["own"] = float(kept.compute()) / host.num_processes / num_updates
    return {**record, "in a file": copy.dist_sync_fn is None, "again": metrics_of_hooks_again(host, callback)}


def metrics_of_hooks_again(host: Host, callback: Confusions) -> list[float]:
    """The callback in a fit of another module, and its metric, moved to another callback, in one more."""
    callback.kept.reset()
    values = []
    for _ in range(2):
        trainer = host.trainer(callback, max_epochs=1)
        trainer.fit(seeded(cases.Classifier), cases.loader(37), cases.loader(21, seed=3))
        values.append(float(callback.kept.compute()))
        before, callback = callback.kept, Confusions()
        callback.kept = before
        if len(values) == 1:
            before.reset()
    return values


class LeftInWindow(cases.Classifier):
    """Has a name of its own, for the line comes once for a class."""


class StopsInWindow(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 4


class LeavesOut(cases.Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("embed.weight", "head.weight"):
            del checkpoint["state_dict"][name]
        self.names = list(checkpoint["state_dict"])


def weights_left_out(host: Host) -> dict[str, Any]:
    """Other ranks than 0 had no entry of a checkpoint of weights alone: a KeyError of one rank."""
    module = seeded(LeavesOut)
    trainer = trained(host, module, max_epochs=1)
    trainer.save_checkpoint(host.folder / "weights.ckpt", weights_only=True)
    saved = torch.load(host.folder / "weights.ckpt", weights_only=False)["state_dict"]
    return {"names": module.names, "saved": {name: float(value.sum()) for name, value in saved.items()}}


class NamesOfDeepSpeed(cases.Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer"] = "adamw"


def told_or_refused(host: Host) -> dict[str, Any]:
    """A window that is left, a name of DeepSpeed's in a checkpoint, pipelines with other numbers of batches."""
    windows = {"accumulate_grad_batches": 3, "data": cases.loader(96), "max_epochs": 1}
    with lines() as said:
        trained(host, seeded(LeftInWindow), StopsInWindow(), **windows)
    trainer = trained(host, seeded(NamesOfDeepSpeed), max_epochs=1)
    saved = cases.refused(lambda: trainer.save_checkpoint(host.folder / "named"))
    uneven = host.trainer(strategy={"num_stages": 1, "algorithm": None}, use_distributed_sampler=True)
    odd = DataLoader(cases.samples(3), batch_size=1)
    return {
        "left": [line for line in said if "was left unfinished" in line],
        "saved": saved,
        "uneven": cases.refused(lambda: uneven.predict(seeded(cases.Classifier), odd)),
        "none": no_batch_in_a_pipeline(host),
    }


class TakesNoData(cases.Classifier):
    """Lightning lets a process without data be."""

    allow_zero_length_dataloader_with_multiple_devices = True


def no_batch_in_a_pipeline(host: Host) -> list[str]:
    """One pipeline waited for another one that had nothing to do, or met an error of Lightning's alone."""
    rank, found = int(os.environ["RANK"]), []
    for kind, samples, shares in (
        (cases.Classifier, 1, True),
        (cases.Classifier, 1 - rank, False),
        (TakesNoData, 1 - rank, False),
    ):
        data = DataLoader(cases.samples(samples), batch_size=1)
        trainer = host.trainer(strategy={"num_stages": 1, "algorithm": None}, use_distributed_sampler=shares)
        found.append(cases.refused(lambda: trainer.predict(seeded(kind), data)))  # noqa: B023
    return found


def replicated_metrics(host: Host) -> dict[str, Any]:
    """Two pipelines: what their metrics compute is over the data of both, as under DDP."""
    num_processes = 2 if host.pipelined else 1
    dataset = cases.samples(64)
    pl.seed_everything(0, verbose=False)
    module = WithMetrics()
    trainer = host.trainer(strategy={"num_stages": 2}, use_distributed_sampler=True, max_epochs=2)
    # One batch per epoch and rank: the same samples make the same step in whatever order.
    data = DataLoader(dataset, batch_size=64 // num_processes)
    trainer.fit(module, data, DataLoader(cases.samples(32, seed=3), batch_size=32 // num_processes))
    metrics = plain(dict(trainer.callback_metrics))
    hand = [record for record in module.by_hand if not isinstance(record, dict)]
    epoch = {name: value for name, value in metrics.items() if not name.endswith("_step") and name != "f1"}
    told = metrics_of_other_runs(host) if host.pipelined else [[], ["RunningSum", "SumMetric"]]
    return {"hand": hand, "metrics": epoch, "told": told}


def metrics_of_other_runs(host: Host) -> list[list[str]]:
    """The metrics of which it is said that they go on from two pipelines to one: none that is reset before."""
    told = []
    for resets in (True, False):
        callback = Confusions()
        for num_stages in (2, 4):
            trainer = host.trainer(callback, strategy={"num_stages": num_stages}, max_epochs=1)
            with Said() as said:
                trainer.fit(seeded(cases.Classifier), cases.loader(32), cases.loader(32, seed=3))
            if resets:
                callback.kept.reset()
                callback.running.reset()
        every = [line for theirs in gather_objects(said.lines) for line in theirs]
        told.append(sorted(line.split()[1] for line in every if "has what a run of 2 pipelines has told" in line))
    return told


# Logging


class LogsEverywhere(cases.Classifier):
    """In all forms, in all hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("quiet", loss, logger=False)
        self.log("double", loss.double(), on_epoch=True)
        self.log("sized", loss, batch_size=len(y), on_epoch=True)
        self.log("integer", y.sum(), reduce_fx="sum", on_epoch=True, on_step=False)
        self.log("zero", loss, rank_zero_only=True)
        self.log_dict({"a": loss, "b": 2 * loss.item()}, on_epoch=True, on_step=True, prog_bar=True)
        self.log("shared", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.print("printed", batch_idx, len(y), sep="|")
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits = self(batch[0])
        self.log("val", F.cross_entropy(logits, batch[1]))
        self.log(f"own_{dataloader_idx}", logits.max(), add_dataloader_idx=False, reduce_fx="max")
        self.log("sum", float(len(batch[1])), reduce_fx=torch.sum, on_step=True, on_epoch=True)

    test_step = validation_step

    def note(self, hook: str, **arguments: Any) -> None:
        self.log(f"in_{hook}", float(self.global_step + self.current_epoch), **arguments)

    def on_train_start(self) -> None:
        self.note("train_start")

    def on_train_epoch_start(self) -> None:
        self.note("train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("train_batch_start", on_step=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("train_batch_end", prog_bar=True)
        self.log("outputs", outputs["loss"], on_epoch=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("before_optimizer_step", on_step=True, on_epoch=True)
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_train_epoch_end(self) -> None:
        self.note("train_epoch_end")

    def on_validation_epoch_end(self) -> None:
        self.note("validation_epoch_end", sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.note("validation_batch_end")

    def on_test_epoch_end(self) -> None:
        self.note("test_epoch_end")


class Metrics(Callback):
    """What loggers, callbacks and the progress bar can know after each batch."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.rows.append(
            [plain(dict(kind)) for kind in (trainer.callback_metrics, trainer.logged_metrics)]
            + [plain(dict(trainer.progress_bar_metrics))]
        )


def logs_everywhere(host: Host) -> dict[str, Any]:
    module, metrics = seeded(LogsEverywhere), Metrics()
    trainer = host.trainer(metrics)
    validation = [cases.loader(21, seed=3), cases.loader(16, seed=4)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, cases.loader(37), validation)
    after_fit = plain(dict(trainer.callback_metrics))
    tested = trainer.test(module, validation, verbose=False)
    validated = trainer.validate(module, validation, verbose=False)
    return {
        "rows": metrics.rows,
        "after": after_fit,
        "tested": tested,
        "validated": validated,
        "advice": sum("recommended to use `self.log" in str(warning.message) for warning in said),
        "printed": printed.getvalue().count("printed|"),
    }


class Experiment:
    def __init__(self) -> None:
        self.images: list[Any] = []
        self.parts: dict[str, list[Any]] = defaultdict(list)

    def add_image(self, name: str, image: torch.Tensor, step: int) -> None:
        self.images.append([name, plain(image), step])


class Board(Logger):
    """A logger with an experiment, which only rank 0 has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    name, version = "board", 0
    board: Experiment | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        self.board = self.board or Experiment()
        return self.board

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append([metrics, step])

    def log_hyperparams(self, *_: Any) -> None:
        pass


class Shows(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert isinstance(self.logger, Board) and self.logger.name == "board"
        self.logger.experiment.add_image("input", batch[0][:1, :2], batch_idx)
        logits = self(batch[0])
        shown = logits.detach()[:1].round(decimals=3)
        self.logger.experiment.add_image("output", shown, step=self.global_step)
        shown.zero_()
        self.logger.experiment.parts["sizes"].append(len(batch[0]))
        self.rate = self.lr_schedulers().get_last_lr()[0]
        assert self.optimizers().param_groups[-1]["lr"] == self.rate
        return F.cross_entropy(logits, batch[1])


def shown(host: Host) -> dict[str, Any]:
    """One micro-batch per batch, so that a step runs as often as in one process."""
    module, board = seeded(Shows), Board()
    host.trainer(logger=board, max_epochs=1, strategy={"num_micro_batches": 1}).fit(module, cases.loader(37))
    images = board.board.images if board.board else None
    parts = dict(board.board.parts) if board.board else None
    return {"rank 0": [images, parts], "rate": module.rate}


# Ranks


BOARD: Board | None = None
"""A Trainer's logger, as a script may keep it in a global."""


class AsksForRank(cases.Classifier):
    """Keeps what belongs to rank 0 in the ways that scripts know."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: dict[str, list[float]] = defaultdict(list)

    @rank_zero_only
    def keep(self, loss: torch.Tensor) -> None:
        self.ways["decorator"].append(float(loss))

    def note(self, kind: str, loss: torch.Tensor) -> None:
        if self.trainer.is_global_zero:
            self.ways[f"{kind}, Trainer"].append(float(loss))
        if self.global_rank == 0:
            self.ways[f"{kind}, module"].append(float(loss))
        if rank_zero_only.rank == 0:
            self.ways[f"{kind}, rank"].append(float(loss))
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.ways[f"{kind}, torch"].append(float(loss))
        if not dist.is_initialized() or get_rank() == 0:
            self.ways[f"{kind}, torch by another name"].append(float(loss))
        if os.environ.get("RANK", "0") == "0":
            self.ways[f"{kind}, environment"].append(float(loss))
        self.keep(loss)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scale = 1.5 if self.trainer.is_global_zero else 1.0  # which both ends of the pipeline have to see
        loss = F.cross_entropy(self(scale * batch[0]), batch[1])
        self.note("training", loss)
        if BOARD is not None:
            BOARD.experiment.add_image("loss", loss.detach().round(decimals=3), batch_idx)
            BOARD.log_metrics({"loss": round(float(loss), 3)}, batch_idx)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test", F.cross_entropy(self(batch[0]), batch[1]))

    def on_train_epoch_end(self) -> None:
        self.log("kept", sum(self.ways["training, Trainer"]))
        self.true_ranks = [self.global_rank, dist.get_rank() if dist.is_initialized() else 0]


def rank_zero(host: Host) -> dict[str, Any]:
    """One micro-batch per batch, so that a step runs as often as in one process."""
    module = seeded(AsksForRank)
    trainer = host.trainer(max_epochs=1, strategy={"num_micro_batches": 1})
    trainer.fit(module, cases.loader(37), cases.loader(16, seed=3))
    metrics = plain(dict(trainer.callback_metrics))
    trainer.test(module, cases.loader(16, seed=4), verbose=False)
    assert module.true_ranks == [trainer.global_rank] * 2
    return {"ways": plain(dict(module.ways)), "metrics": metrics}


def global_board(host: Host) -> dict[str, Any]:
    """A logger of the Trainer's that a step comes to by a name of its own."""
    global BOARD
    module, BOARD = seeded(AsksForRank), Board()
    try:
        host.trainer(logger=BOARD, max_epochs=1, strategy={"num_micro_batches": 1}).fit(module, cases.loader(37))
        images = None if BOARD.board is None else BOARD.board.images
        return {"images": images, "rows": [row for row in BOARD.rows if "loss" in row[0]]}
    finally:
        BOARD = None


def ranks_of_pipelines(host: Host) -> dict[str, Any]:
    module = seeded(AsksForRank)
    trainer = host.trainer(max_epochs=1, strategy={"num_stages": 2})
    trainer.fit(module, cases.loader(32))
    return {
        "pipeline": pipeline_index(trainer.global_rank),
        "ways": sorted(way for way, losses in module.ways.items() if losses),
    }


class AsksForSize(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return super().training_step(batch, batch_idx) / size * dist.get_world_size()


def is_first_here() -> bool:
    return os.getenv("LOCAL_RANK") == "0"


class AsksForLocalRank(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return super().training_step(batch, batch_idx) * (1 + is_first_here())


class AskingBlock(cases.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if os.environ["RANK"] == "0" else 0.5)


class AsksInLayers(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[-1] = AskingBlock(), AskingBlock()


class Unlike(cases.Classifier):
    """Ranks have other numbers and names, of which its step asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.name_of_rank = 1.0 + dist.get_rank(), f"rank {dist.get_rank()}"
        self.factors = {"loss": [self.factor]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.factor


class UnlikeLayers(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = cases.Block() if dist.get_rank() else nn.Linear(cases.WIDTH, cases.WIDTH)


class UnlikeSlopes(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.LeakyReLU(0.1 + dist.get_rank())


def ranks_asked_for(host: Host) -> dict[str, Any]:
    """What is said of steps, layers and modules that go by the rank, or with which a fit is refused."""

    def fit(build: Callable[[], Any]) -> list[str]:
        with lines() as said, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            error = refused(lambda: trained(host, seeded(build), data=cases.loader(16), max_epochs=1))
        every = [*said, *(str(each.message) for each in caught), error]
        return [
            line for line in every if any(word in line for word in ("on rank", "RANK", "WORLD_SIZE", "world_size"))
        ]

    kinds = (AsksForSize, AsksForLocalRank, AsksInLayers, Unlike, UnlikeLayers, UnlikeSlopes, cases.Classifier)
    return run_chosen({kind.__name__: lambda kind=kind: fit(kind) for kind in kinds})


# Collectives


class Gathers(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = self.trainer.strategy.reduce(batch[0].mean(), reduce_op="sum")
        logits = self(batch[0] + 0 * mean)
        everyone = self.all_gather(torch.tensor([float(len(batch[0]))]))
        self.log("gathered", everyone.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        strategy, rank = self.trainer.strategy, float(self.trainer.global_rank)
        pipeline_rank = float(pipeline_index(self.trainer.global_rank))
        ones = torch.ones(2)
        self.values = {
            "gathered": plain(self.all_gather({"rank": torch.tensor([pipeline_rank])})),
            "sum": float(strategy.reduce(torch.tensor(pipeline_rank + 1), reduce_op="sum")),
            "mean": float(strategy.reduce(torch.tensor(pipeline_rank + 1))),
            "max": float(strategy.reduce(torch.tensor(pipeline_rank), reduce_op="max")),
            "number": strategy.reduce(3.0),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
            "all": strategy.reduce_boolean_decision(rank == 1),
            "really all": strategy.reduce_boolean_decision(True),
            "broadcast": strategy.broadcast([rank]),
            "ones": float(strategy.reduce(ones, reduce_op="sum").sum()),
        }
        strategy.barrier()
        self.log("synced_sum", pipeline_rank + 1, sync_dist=True, reduce_fx="sum")
        self.log("synced_mean", pipeline_rank + 1, sync_dist=True)
        self.log("synced_max", pipeline_rank + 1, sync_dist=True, reduce_fx="max")
        self.log("synced_min", pipeline_rank + 1, sync_dist=True, reduce_fx=torch.min)


def gathers(host: Host) -> dict[str, Any]:
    module = seeded(Gathers)
    strategy = {"num_stages": 2}
    trainer = host.trainer(strategy=strategy, use_distributed_sampler=True, max_epochs=1)
    trainer.fit(module, DataLoader(cases.samples(32), batch_size=8))
    return {"values": module.values, "metrics": plain(dict(trainer.callback_metrics))}


class GathersInSetup(cases.Classifier):
    """Asks all ranks before there is a pipeline, and notes over which groups it is done."""

    def setup(self, stage: str) -> None:
        groups = []

        def noted(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
            groups.append(inspect.signature(function).bind(*arguments, **keywords).arguments.get("group"))
            return function(*arguments, **keywords)

        with contextlib.ExitStack() as patches:
            for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
                patches.enter_context(patch.object(dist, name, partial(noted, getattr(dist, name))))
            total = self.trainer.strategy.reduce(torch.ones(1), reduce_op="sum")
            everyone = self.all_gather(torch.tensor([float(self.trainer.global_rank)]))
        self.values = {
            "sum": float(total),
            "gathered": plain(everyone),
            "over groups of our own": [group not in (None, dist.group.WORLD) for group in groups],
        }


def gathers_in_setup(host: Host) -> dict[str, Any]:
    """Over the default group they came between what a signal's handler of Lightning sends there."""
    module = seeded(GathersInSetup)
    host.trainer(max_epochs=1).fit(module, cases.loader(16))
    return module.values


class Contrasts(cases.Classifier):
    """As SimCLR, which tells the samples of all processes apart.

    Args:
        sync_grads: Whether gradients go back through what is gathered.
        detach: Whether one process cuts them off, as several do where they are not synchronized.
    """

    def __init__(self, sync_grads: bool, detach: bool) -> None:
        super().__init__(optimizer="sgd")
        self.sync_grads, self.detach, self.place = sync_grads, detach, 0

    def on_fit_start(self) -> None:
        if self.all_gather(torch.ones(1)).numel() > 1:
            self.place = pipeline_index(self.trainer.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = F.normalize(self(batch[0]), dim=1)
        everyone = self.all_gather(features, sync_grads=self.sync_grads).reshape(-1, features.shape[1])
        everyone = everyone.detach() if self.detach else everyone
        targets = torch.arange(len(features)) + self.place * len(features)
        loss = F.cross_entropy(features @ everyone.T / 0.5, targets)
        self.log("contrast", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


def contrasts(host: Host) -> dict[str, Any]:
    """The losses of the last epoch, where gathered features are a part of each."""

    def fit(sync_grads: bool = False, detach: bool = False) -> dict[str, Any]:
        module, parts = seeded(lambda: Contrasts(sync_grads, detach)), 2 if host.num_processes == 4 else 1
        strategy = {"num_stages": 2, "algorithm": cases.CUT, "warmup_epochs": 0}
        trainer = host.trainer(strategy=strategy, use_distributed_sampler=True, max_epochs=4)
        # One batch per epoch and rank: the same samples make the same step in whatever order.
        trainer.fit(module, DataLoader(cases.samples(16), batch_size=16 // parts))
        return plain(dict(trainer.callback_metrics))

    runs = {"synchronized": lambda: fit(True), "as it is": fit, "cut off": lambda: fit(detach=not host.pipelined)}
    return run_chosen(runs)


class Stash(nn.Linear):
    skips: dict[str, Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.skips["x"] = x
        return super().forward(x)


class Pop(Stash):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Linear.forward(self, torch.tanh(x)) + self.skips.pop("x")


class SkipsBeside(cases.SequentialClassifier):
    """A skip goes from one layer to another in a dictionary that both have."""

    def __init__(self, grouped: bool = False) -> None:
        super().__init__()
        stash, pop = Stash(cases.WIDTH, cases.WIDTH), Pop(cases.WIDTH, cases.WIDTH)
        stash.skips = pop.skips = {}
        first, *rest, last = self.net
        skipping = [nn.Sequential(stash, nn.Tanh(), pop)] if grouped else [stash, nn.Tanh(), pop]
        self.net = nn.Sequential(first, *rest, *skipping, last)


def skips(host: Host) -> dict[str, Any]:
    """The way out trains as one process does, and so does what was refused, in one process."""
    recorders = [cases.Recorder(), cases.Recorder()]
    strategy = {"algorithm": "madpipe"}
    trained(host, seeded(lambda: SkipsBeside(grouped=True)), recorders[0], strategy=strategy)
    if not host.pipelined:
        trained(host, seeded(SkipsBeside), recorders[1])
        assert recorders[0].rows == recorders[1].rows
    return {"rows": recorders[0].rows}


def refused_skips(host: Host) -> dict[str, Any]:
    def fit(number: int) -> str:
        strategy = {"num_micro_batches": number, "algorithm": "madpipe"}
        return refused(lambda: trained(host, seeded(SkipsBeside), strategy=strategy))

    return {str(number): fit(number) for number in (1, 4)}


class ReducesLoss(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach().clone())
        return loss


class GathersInputs(cases.Classifier):
    """As CLIP gathers the features of all ranks, by a name of its own and with gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = torch.cat(gather_with_gradients(batch[0]))
        return F.cross_entropy(self(batch[0] + 0 * inputs.mean()), batch[1])


class Waits(cases.Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        dist.barrier()


class ReducingLayer(nn.Linear):
    """As the code book of a vector quantizer, which is averaged over all ranks while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized():
            dist.all_reduce(x.detach().mean(0))
        return super().forward(x)


class LayerReduces(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ReducingLayer(cases.NUM_FEATURES, cases.WIDTH)


class AsksOnly(cases.Classifier):
    """Questions, and collectives of this rank alone, go on."""

    own: Any = None

    def setup(self, stage: str) -> None:
        self.own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        dist.all_reduce(torch.ones(dist.get_world_size()), group=self.own)
        return super().training_step(batch, batch_idx) + 0.0 * dist.get_rank()


def collectives(host: Host) -> dict[str, Any]:
    """They hung, which was told after 20 s, and on most machines only by a watchdog after minutes."""

    def fit(build: Callable[[], Any]) -> str:
        return refused(lambda: trained(host, seeded(build), validation=cases.loader(37), max_epochs=1))

    kinds = (ReducesLoss, GathersInputs, Waits, LayerReduces, AsksOnly)
    return run_chosen({kind.__name__: lambda kind=kind: fit(kind) for kind in kinds})


class ValidatesInHook(cases.Classifier):
    """Its validation is in a hook, and the step is there for Lightning alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""
        return

    def on_validation_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))


def empty_steps(host: Host) -> dict[str, Any]:
    """A step that does nothing was refused: it returns without a call of self.forward()."""
    recorder = cases.Recorder()
    trainer = host.trainer(recorder, max_epochs=2, strategy={"algorithm": [0, 2, 8]})
    trainer.fit(seeded(ValidatesInHook), cases.loader(32), cases.loader(32))
    return {"rows": recorder.rows, "epochs": float(trainer.callback_metrics["epochs"])}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        predictions, default_predictions, returned, left_behind, with_metrics, metrics_of_hooks, weights_left_out,
        logs_everywhere, shown, summed, skips, rank_zero, global_board, logged_sizes, scaled_batches, contrasts,
        last_batches, *loop_cases.SAME_AS_SINGLE[2],
        empty_steps,
    ],
    4: [predictions, left_behind, replicated_metrics, contrasts],
}  # fmt: skip

ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        refused_predictions, told_or_refused, unread, returned_in_windows, counted, collectives, refused_skips,
        unsendable,
        drawing_cases.alike, drawing_cases.unlike, ranks_asked_for,
        gathers_in_setup, *loop_cases.ONLY_PIPELINE[2],
    ],
    4: [gathers, ranks_of_pipelines, *loop_cases.ONLY_PIPELINE[4]],
}  # fmt: skip
