"""Metrics that micro-batches tell more often than a batch would, or less at once, are what one process has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection, RunningMean
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
)
from torchmetrics.wrappers import Running

from lightning_madpipe.steps.log_calls import LogCalls
from lightning_madpipe.steps.metrics import _tell_alike, _Told, named_with_class
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.told_metrics import ToldMetrics

NUM_CLASSES, SIZES = 3, ((2, 2, 2), (2, 1, 1), (1, 1))
Step = Callable[[Any, Tensor, Tensor, Tensor], object]


class Module(pl.LightningModule):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.metric = metric


def batches() -> list[tuple[Tensor, Tensor]]:
    """Logits, of which those of some samples all lie within 0 to 1, and labels."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for sizes in SIZES:
        logits = torch.randn(sum(sizes), NUM_CLASSES, generator=generator)
        logits[-1] = torch.rand(NUM_CLASSES, generator=generator)
        found.append((logits, torch.arange(sum(sizes)) % NUM_CLASSES))
    return found


def told(metric: nn.Module, step: Step, means: Sequence[str] = ()) -> list[str]:
    """Tell a metric the batches by their micro-batches; return what is said."""
    said: list[str] = []
    module = Module(metric)
    metrics, logs = ToldMetrics(module, said.append), LogCalls(module, RuntimeError)
    metrics.means = means
    for sizes, batch in zip(SIZES, batches(), strict=True):
        logs.begin_batch()
        parts = list(zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True))
        for place, (logits, labels) in enumerate(parts):
            known: dict[str, Any] = {"step": "training_step", "data": None, "arguments": (), "seed": 0}
            part = MicroBatch(size=len(labels), place=place, is_last=False, batch_seed=0, **known)
            part.is_last = place == len(parts) - 1
            loss = F.cross_entropy(logits, labels)
            with logs.watching_metrics(), metrics.watching(part):
                step(metric, logits, labels, loss)
            part.loss = loss
            metrics.end(part)
    return said


def alone(metric: nn.Module, step: Step) -> Any:
    for logits, labels in batches():
        step(metric, logits, labels, F.cross_entropy(logits, labels))
    return metric.compute()  # type: ignore[operator]


def calls_with_loss(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric(loss)


def updates_with_loss(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update(loss.item())


def updates(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update(logits, labels)


def calls(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric(logits, labels)


def calls_with_names(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric(preds=logits, target=labels)


def updates_binary(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update(logits[:, 0], labels.clamp(max=1))


def updates_with_weight(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update(loss, weight=len(labels))


def updates_with_accuracy(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update((logits.argmax(1) == labels).float().mean())


def updates_with_highest(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
    metric.update(logits.max())


MADE: dict[str, tuple[Callable[[], Any], Step]] = {
    "a mean": (MeanMetric, updates_with_loss),
    "a mean that is called": (MeanMetric, calls_with_loss),
    "a mean with weights": (MeanMetric, updates_with_weight),
    "a window": (lambda: RunningMean(2), updates_with_loss),
    "a window that is called": (lambda: RunningMean(2), calls_with_loss),
    "a window of samples": (lambda: Running(MulticlassAccuracy(NUM_CLASSES), 2), updates),
    "scores": (lambda: MulticlassAUROC(NUM_CLASSES), updates),
    "scores that are called": (lambda: MulticlassAveragePrecision(NUM_CLASSES), calls),
    "scores by name": (lambda: MulticlassCalibrationError(NUM_CLASSES, n_bins=4), calls_with_names),
    "binned scores": (lambda: MulticlassAUROC(NUM_CLASSES, thresholds=9), updates),
    "scores of two classes": (BinaryAccuracy, updates_binary),
    "labels": (lambda: MulticlassAccuracy(NUM_CLASSES), updates),
    "a collection": (
        lambda: MetricCollection([MulticlassAUROC(NUM_CLASSES), MulticlassAveragePrecision(NUM_CLASSES)]),
        updates,
    ),
    "a collection that is called": (
        lambda: MetricCollection([MulticlassAUROC(NUM_CLASSES), MulticlassAveragePrecision(NUM_CLASSES)]),
        calls,
    ),
}


@pytest.mark.parametrize("case", MADE)
def test_a_metric_is_told_once_for_a_batch(case: str) -> None:
    """Windows went over micro-batches, a batch of few micro-batches weighed less, scores were taken for logits."""
    make, step = MADE[case]
    metric, expected = make(), alone(make(), step)
    assert not told(metric, step)
    found = metric.compute()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(metric.compute(), expected)


def test_a_mean_that_a_trial_knows_is_told_by_samples() -> None:
    metric, expected = MeanMetric(), alone(MeanMetric(), updates_with_accuracy)
    assert not told(metric, updates_with_accuracy, [named_with_class("metric", metric)])
    torch.testing.assert_close(metric.compute(), expected)


def test_trials_tell_metrics_as_training_does() -> None:
    """A line named a value that micro-batches leave only where each is told by itself."""
    of_trial = ToldMetrics(Module(BinaryAccuracy()), pytest.fail).for_trial()
    assert list(of_trial._metrics()) == ["metric"]
    assert not ToldMetrics(Module(MeanMetric()), pytest.fail).for_trial()._metrics()


@pytest.mark.parametrize("metric", [MeanMetric(), RunningMean(2)], ids=["mean", "window"])
def test_a_number_of_which_nothing_is_known_is_said_once(metric: Metric) -> None:
    [said] = told(metric, updates_with_highest)
    assert said.count(f"self.metric ({type(metric).__name__})") == 1 and "MadPipeStrategy(loss='batch')" in said


def test_logits_of_another_form_are_said() -> None:
    """Nothing is joined whose samples do not stand in the first dimension."""

    def turned(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        metric.update(logits[:, 0].unsqueeze(0), labels.clamp(max=1).unsqueeze(0))

    [said] = told(BinaryAccuracy(), turned)
    assert "logits.sigmoid()" in said and "self.metric (BinaryAccuracy)" in said


def test_a_metric_that_a_step_resets_stays_as_it_is() -> None:
    def resets(metric: Any, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        metric.reset()
        metric.update(loss)

    metric = MeanMetric()
    told(metric, resets)
    logits, labels = (tensor[-1:] for tensor in batches()[-1])
    torch.testing.assert_close(metric.compute(), F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    "others, of_steps, is_alike",
    [
        ([], (4, True, False), True),  # one stage
        ([0], (4, True, False), True),
        ([0, 0], (4, True, True), True),  # a collection sets counts in a hook
        ([2], (6, True, True), True),  # hooks of all ranks tell it, too
        ([2], (4, True, False), False),  # one of a rank alone
        ([2, 0], (4, True, True), False),
        ([2, 2], None, True),
        ([2, 0], None, False),
    ],
)
def test_what_hooks_of_one_rank_tell_beside_steps_counts(
    others: list[int], of_steps: tuple[int, bool, bool] | None, is_alike: bool
) -> None:
    everyone = [_Told(number, False, bool(number)) for number in others]
    assert _tell_alike([*everyone, *([] if of_steps is None else [_Told(*of_steps)])]) == is_alike
