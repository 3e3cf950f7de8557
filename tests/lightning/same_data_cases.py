"""What depends on how many ranks there are, or on the clock of each: hooks have the same data on all of them.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection, PearsonCorrCoef, RunningMean, SumMetric
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassConfusionMatrix

from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import Host, end, seeded, trained


class Confused(cases.Classifier):
    """Makes a metric in a hook, and asks it there."""

    def on_validation_epoch_start(self) -> None:
        self.guessed: list[torch.Tensor] = []
        self.true: list[torch.Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.guessed.append(self(x).argmax(-1))
        self.true.append(y)

    def on_validation_epoch_end(self) -> None:
        matrix = MulticlassConfusionMatrix(cases.NUM_CLASSES)
        matrix.update(torch.cat(self.guessed), torch.cat(self.true))
        self.log("seen", matrix.compute().sum().float())


SEEN = MeanMetric()


class Asking(cases.Classifier):
    """Asks metrics for their values wherever that may be: in steps, and in hooks of one rank or of all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"means": MeanMetric()}
        self.later = [MeanMetric(), SumMetric()]
        self.one = cases.samples(48)[5][0]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.later[0].update(batch[0].mean())
        if (batch[0] == self.one).all(-1).any():  # of several pipelines one tells it something
            self.later[1].update(21.0)
        return loss

    def _shared(self, x: torch.Tensor) -> None:
        SEEN.update(x.mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        own = MulticlassAccuracy(cases.NUM_CLASSES, average="micro")
        own.update(self(x), y)
        self.table["means"].update(x.mean())
        self._shared(x)
        self.log("own", own.compute())
        self.log("means", self.table["means"].compute())

    def on_validation_epoch_end(self) -> None:
        self.log("of_file", SEEN.compute())
        SEEN.reset()

    def on_train_epoch_end(self) -> None:
        for number, metric in enumerate(self.later):
            self.log(f"later_{number}", metric.compute())
        self.later[0].reset()


class Summing(cases.Classifier):
    """Adds up what its hook has counted, as a script for several devices does."""

    op = dist.ReduceOp.SUM

    def on_validation_epoch_end(self) -> None:
        number = torch.tensor(21.0)
        if dist.is_initialized():
            dist.all_reduce(number, op=self.op)
        self.log("number", number)


class Highest(Summing):
    op = dist.ReduceOp.MAX


class Early(cases.Classifier):
    """Asks for the number of its steps before it is spread, for which Lightning makes the loader."""

    def setup(self, stage: str) -> None:
        self.total = self.trainer.estimated_stepping_batches

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("mean", batch[0].mean(), on_step=True)
        self.log("total", float(self.total))
        return super().training_step(batch, batch_idx)


class Slow(pl.Callback):
    """One rank's clock is behind those of the others."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            time.sleep(0.05)


class Bad(torch.utils.data.Dataset[Any]):
    """Samples of which those of one batch are bad, which ``good_ones`` leaves out."""

    def __init__(self) -> None:
        self.samples = cases.samples(64)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return None if 16 <= index < 32 else self.samples[index]


def good_ones(samples: list[Any]) -> Any:
    kept = [sample for sample in samples if sample is not None]
    return torch.utils.data.default_collate(kept) if kept else None


def metrics_made_in_hooks(host: Host) -> dict[str, Any]:
    """A confusion matrix had each sample once for each stage."""
    return end(trained(host, seeded(Confused), max_epochs=1, validation=cases.loader(21, seed=3)))


def metrics_asked_anywhere(host: Host) -> dict[str, Any]:
    """In a step it was refused; of rank 0 alone, or of pipelines told unlike things, it waited for ever."""
    module = seeded(Asking)
    trainer = trained(
        host, module, max_epochs=2, data=cases.loader(48), validation=cases.loader(32, seed=3),
        strategy={"num_stages": 2}, use_distributed_sampler=True,
    )  # fmt: skip
    return end(trainer)


def loaders_asked_for_early(host: Host) -> dict[str, Any]:
    """The loader was shuffled where one process reads it in order."""
    recorder = cases.Recorder()
    trainer = trained(host, seeded(Early), recorder, max_epochs=2)
    again = trained(host, seeded(Early), max_epochs=1)
    return {**end(trainer), "rows": recorder.rows, "again": end(again)}


def validation_at_intervals_of_time(host: Host) -> dict[str, Any]:
    """Ranks decided by their own clocks, and began different batches."""
    if pl.__version__ < "2.6":
        return {}
    trainer = trained(
        host, seeded(), Slow(), max_epochs=6, validation=cases.loader(21, seed=3), num_sanity_val_steps=0,
        val_check_interval={"seconds": 0.2}, check_val_every_n_epoch=None,
    )  # fmt: skip
    return {"global_step": trainer.global_step, "has_validated": "accuracy" in trainer.callback_metrics}


def throughput_of_evaluation(host: Host) -> dict[str, Any]:
    """Rates were as many times too high as there are stages."""
    logger = CSVLogger(host.folder / "throughput", version=0)
    monitor = shipped.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = host.trainer(monitor, logger=logger, log_every_n_steps=1, strategy={"algorithm": cases.CUT})
    trainer.validate(seeded(), cases.loader(64), verbose=False)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    names = sorted(name for name in header if name.startswith("validate"))
    return {"names": names, "has_rates": "validate/samples_per_sec" in names}


def batches_that_are_absent(host: Host) -> dict[str, Any]:
    """The batch before one that is None in its window was trained on with the window behind it."""
    data = DataLoader(Bad(), batch_size=16, collate_fn=good_ones)  # type: ignore[arg-type]
    trainer = trained(host, seeded(), max_epochs=1, data=data, accumulate_grad_batches=2)
    [tested] = trainer.validate(trainer.lightning_module, cases.loader(21, seed=3), verbose=False)
    return {"global_step": trainer.global_step, "tested": tested}


def sums_over_stages(host: Host) -> dict[str, Any]:
    """What is said of a sum that a hook asks for over all ranks."""
    from lightning_madpipe.steps import written_in_hooks

    found = {}
    for build in (Summing, Highest):
        said: list[str] = []
        with patch.object(written_in_hooks, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            trainer = trained(host, seeded(build), max_epochs=1, validation=cases.loader(21, seed=3))
        found[build.__name__] = float(trainer.callback_metrics["number"]), sorted(set(said))
    return found


class AskedByRank0(cases.Classifier):
    """Makes a metric in a hook of one rank, as programs do that print something."""

    tells_elsewhere = False

    def __init__(self) -> None:
        super().__init__()
        self.of_rank_0: list[float] = []
        self.later = [SumMetric()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        own = MulticlassAccuracy(cases.NUM_CLASSES, average="micro")
        own.update(self(batch[0]), batch[1])
        self.log("own", own.compute())
        if self.tells_elsewhere:
            self.later[0].update(len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            of_hook = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
            of_hook.update(2.0)
            of_hook(4.0)
            self.of_rank_0 += map(float, of_hook.compute().values())
        if self.tells_elsewhere:
            self.log("later", self.later[0].compute())


class AskedByRank0Beside(AskedByRank0):
    """Asks on all ranks, too, for what steps have told a metric that is sent to no rank."""

    tells_elsewhere = True


def metrics_of_one_rank(host: Host) -> dict[str, Any]:
    """It waited for ever for the others, at first at all times, and then where steps tell another metric."""
    found = {}
    for build in (AskedByRank0, AskedByRank0Beside):
        module = seeded(build)
        trainer = trained(host, module, max_epochs=2, validation=cases.loader(32, seed=3))
        of_rank_0 = module.of_rank_0 if trainer.is_global_zero else [3.0, 6.0] * 3
        found[build.__name__] = {**end(trainer), "of_rank_0": of_rank_0}
    return found


COUNTED = SumMetric()


class AskedBySteps(cases.Classifier):
    """Asks in steps for what these have told metrics that are sent to no rank, and in hooks again."""

    def __init__(self) -> None:
        super().__init__()
        self.totals = [SumMetric()]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self._count(batch)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self._count(batch)

    def _count(self, batch: Any) -> None:
        for metric in (*self.totals, COUNTED):
            metric.update(len(batch[0]))
            metric.compute()

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("total_at_batch", self.totals[0].compute())

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.totals[0].compute())
        self.log("counted", COUNTED.compute())
        COUNTED.reset()


class Parts(Metric):
    """A state whose tensors stay apart, as those of detection, and one that is the mean of those of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sums", [], dist_reduce_fx=None)
        self.add_state("largest", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, x: torch.Tensor) -> None:
        self.sums.append(x.sum())
        self.largest = torch.maximum(self.largest, x.max())

    def compute(self) -> torch.Tensor:
        return torch.stack([*self.sums, self.largest]).sum()


class ToldByBoth(cases.Classifier):
    """Steps and hooks of all ranks tell metrics that are sent to no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.told = {"sum": SumMetric(), "begun": SumMetric(), "parts": Parts(), "like": PearsonCorrCoef()}

    def on_validation_epoch_start(self) -> None:
        self.told["begun"].reset()
        self.told["begun"].update(1000.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.told["sum"].update(len(x))  # before the layers are called: the first stage comes here, too
        super().validation_step(batch, batch_idx)
        self.told["begun"].update(len(x))
        self.told["parts"].update(x)
        self.told["like"].update(x[:, 0], x[:, 1])

    def on_validation_epoch_end(self) -> None:
        self.told["sum"].update(0.5)
        self.told["sum"](0.25)
        for name, metric in self.told.items():
            self.log(name, metric.compute())


class ToldWithoutHooks(cases.Classifier):
    """Steps alone tell metrics that are sent to no rank, before they call the layers and behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Metric] = {"before": SumMetric(), "called": SumMetric(), "window": RunningMean(3)}
        self.seen["loaded"] = SumMetric()
        self.seen["loaded"].update(1000.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["before"].update(len(batch[0]))
        self.seen["loaded"].update(len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        self.seen["called"](len(batch[0]))
        self.seen["window"](loss)
        return loss

    def on_train_epoch_end(self) -> None:
        for name, metric in self.seen.items():
            self.log(name, metric.compute())


class ToldByCalls(cases.Classifier):
    """Steps call metrics, or reset them, that hooks of all ranks tell something, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"called": SumMetric(), "full": Full(), "reset": SumMetric()}

    def on_train_epoch_start(self) -> None:
        self.is_reset = False
        for metric in self.seen.values():
            metric.update(5.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if not self.is_reset:
            self.seen["reset"].reset()
            self.is_reset = True
        for name in ("called", "full"):
            self.seen[name](batch[0].sum())
        loss = super().training_step(batch, batch_idx)
        self.seen["reset"].update(batch[0].sum())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen["called"](0.25)
        for name, metric in self.seen.items():
            self.log(name, metric.compute())


class Full(SumMetric):
    """Is told twice by each call."""

    full_state_update = True


class ToldByRank0(cases.Classifier):
    """Steps tell metrics that are sent to no rank, and a hook of rank 0 alone tells them something, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {
            "loss": MeanMetric(), "before": SumMetric(), "scores": BinaryAccuracy(),
            "many": MetricCollection({"sum": SumMetric(), "mean": SumMetric()}),
        }  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.seen["before"].update(len(x))
        loss = super().training_step(batch, batch_idx)
        self.seen["loss"].update(loss)
        self.seen["many"].update(len(x))
        self.seen["scores"].update(torch.where(x[:, 0] > 1.2, 3.0, 0.25), y.clamp(max=1))
        return loss

    def on_train_epoch_end(self) -> None:
        list(self.seen["many"].items())
        if self.trainer.is_global_zero:
            for name in ("loss", "before", "many"):
                self.seen[name].update(7.0)
            self.seen["scores"].update(torch.tensor([0.1] * 20), torch.tensor([1] * 20))
        for name, metric in self.seen.items():
            value = metric.compute()
            self.log_dict(value) if isinstance(value, dict) else self.log(name, value)


class ToldAgain(cases.Classifier):
    """Has a loss with another term after some steps, by which the batch runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"sum": SumMetric(), "parts": Parts()}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.seen["sum"].update(len(x))
        self.seen["parts"].update(x)
        loss = F.cross_entropy(logits, y)
        return loss if self.global_step < 2 else loss + logits.mean(0).square().sum()

    def on_train_epoch_end(self) -> None:
        for name, metric in self.seen.items():
            self.log(name, metric.compute())


class AskedInSecondFit(cases.Classifier):
    """Is told by hooks and by steps in two fits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [SumMetric(), SumMetric()]

    def on_train_epoch_start(self) -> None:
        self.seen[0](5.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for metric in self.seen:
            metric(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        for number, metric in enumerate(self.seen):
            self.log(f"seen_{number}", metric.compute())


def metrics_of_batches_that_run_again(host: Host) -> dict[str, Any]:
    """A batch that was given up counted in metrics that are sent to no rank, and again."""
    return end(trained(host, seeded(ToldAgain), max_epochs=1))


def metrics_told_in_two_fits(host: Host) -> dict[str, Any]:
    """What had been told before the fit counted once for each stage."""
    module = seeded(AskedInSecondFit)
    return {"first": end(trained(host, module, max_epochs=1)), "second": end(trained(host, module, max_epochs=1))}


def metrics_told_before_the_layers(host: Host) -> dict[str, Any]:
    """What the first stage had run of a step counted beside what the last stage had."""
    return end(trained(host, seeded(ToldWithoutHooks), max_epochs=2))


def metrics_called_in_steps(host: Host) -> dict[str, Any]:
    """The call of a metric forgot that hooks of all ranks had told it, and these counted once for each."""
    return end(trained(host, seeded(ToldByCalls), max_epochs=2))


def metrics_told_by_rank_0(host: Host) -> dict[str, Any]:
    """What a batch told a metric once, in place of its micro-batches, was taken for a hook's of all ranks."""
    return end(trained(host, seeded(ToldByRank0), max_epochs=2))


def metrics_told_by_both(host: Host) -> dict[str, Any]:
    """What hooks had told counted once for each stage; states that are no sums were gathered with empty ones."""
    return end(trained(host, seeded(ToldByBoth), max_epochs=2, validation=cases.loader(32, seed=3)))


def metrics_asked_in_steps(host: Host) -> dict[str, Any]:
    """The rank that runs steps had kept the value, and the others waited for it."""
    return end(trained(host, seeded(AskedBySteps), max_epochs=2, validation=cases.loader(32, seed=3)))


class Moments(cases.Classifier):
    """Looks at the mean of all second moments."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.mean = float(torch.stack([state["exp_avg_sq"].mean() for state in states]).mean())


class Decays(cases.Classifier):
    """Changes each moment by itself."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"].mul_(0.9)


def states_of_optimizers(host: Host) -> list[str]:
    """Each rank has those of its own layers."""
    from lightning_madpipe.compat import watched_hooks

    said: list[str] = []
    with patch.object(watched_hooks, "warn_once", lambda _, line: said.append(line)):
        for build in (Moments, Decays):
            trained(host, seeded(build), max_epochs=1)
    return said


class Predicts(cases.Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(-1)


def metrics_of_predictions(host: Host) -> dict[str, Any]:
    """What is said of a metric that the script makes when predictions are there."""
    from lightning_madpipe.steps import metrics

    trainer = host.trainer(strategy={"algorithm": cases.CUT})
    predicted = torch.cat(trainer.predict(seeded(Predicts), cases.loader(21)))
    said: list[str] = []
    with patch.object(metrics, "warn_once", lambda _, line: said.append(line)):
        own, every = SumMetric(sync_on_compute=False), SumMetric()
        for metric in (own, every):
            metric.update(torch.ones(len(predicted)))
        return {"own": float(own.compute()), "every": float(every.compute()), "said": said}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        metrics_made_in_hooks, metrics_asked_anywhere, metrics_of_one_rank, metrics_asked_in_steps,
        metrics_told_by_both, metrics_told_before_the_layers, metrics_called_in_steps, metrics_told_by_rank_0,
        metrics_of_batches_that_run_again, metrics_told_in_two_fits,
        loaders_asked_for_early, validation_at_intervals_of_time,
        throughput_of_evaluation, batches_that_are_absent,
    ],
    4: [],
}  # fmt: skip
ONLY_PIPELINE: dict[int, list[Callable[[Host], Any]]] = {
    2: [sums_over_stages, metrics_of_predictions, states_of_optimizers],
    4: [metrics_asked_anywhere],
}
