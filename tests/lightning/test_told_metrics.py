"""Metrics that micro-batches tell more often than a batch would, or less at once, are what one process has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, RunningMean, SumMetric
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassCalibrationError,
)
from torchmetrics.wrappers import Running

from lightning_madpipe.steps import metrics as metrics_module
from lightning_madpipe.steps.log_calls import LogCalls
from lightning_madpipe.steps.metrics import (
    COUNTS,
    BetweenPipelines,
    ToldElsewhere,
    _tell_alike,
    _Told,
    named_with_class,
)
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
        ([], (4, 0), True),  # one stage
        ([(0, 0)], (4, 0), True),
        ([(3, 0)], (7, 0), True),  # told before the run, by each process
        ([(2, 2)], (6, 2), True),  # hooks of all ranks tell it, too
        ([(5, 2)], (9, 2), True),
        ([(2, 2)], (4, 0), False),  # one of a rank alone
        ([(3, 3)], (6, 2), False),
        ([(2, 2), (0, 0)], (4, 0), False),
        ([(2, 2), (2, 2)], None, True),
        ([(2, 2), (0, 0)], None, False),
    ],
)
def test_what_hooks_of_one_rank_tell_beside_steps_counts(
    others: list[tuple[int, int]], of_steps: tuple[int, int] | None, is_alike: bool
) -> None:
    everyone = [_Told(number, False, by_hooks) for number, by_hooks in others]
    everyone += [] if of_steps is None else [_Told(of_steps[0], True, of_steps[1])]
    assert _tell_alike(everyone) == is_alike


class Steps:
    """What runs the steps of a rank, as far as metrics ask for it."""

    def __init__(self) -> None:
        self.running: str | None = None
        self.told_elsewhere = ToldElsewhere()


@pytest.fixture
def steps() -> Iterator[Steps]:
    own = Steps()
    between = BetweenPipelines(nn.Module(), list, lambda tensor: [tensor], 1, None, lambda: own)
    yield own
    between.end(None, 1)


class Full(SumMetric):
    full_state_update = True


HOOKS: dict[str, tuple[Callable[[Metric], object], int]] = {
    "nothing": (lambda metric: None, 0),
    "updates": (lambda metric: metric.update(1.0), 1),
    "calls": (lambda metric: metric(1.0), 1),
    "updates and calls": (lambda metric: [metric.update(1.0), metric(1.0), metric(1.0)], 3),
    "resets": (lambda metric: [metric(1.0), metric.reset(), metric.update(1.0)], 1),
    "computes": (lambda metric: [metric(1.0), metric.compute()], 1),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("make", [SumMetric, Full, MeanMetric])
def test_hooks_count_alike_where_steps_tell_a_metric_and_where_not(
    steps: Steps, make: Callable[[], Metric], hook: str
) -> None:
    """A call in a step hid what hooks had told; a metric told once for a batch seemed told by a hook."""
    of_first, of_last = make(), make()
    module = Module(nn.Identity())
    module.metrics = {"own": of_last}
    metrics = ToldMetrics(module, pytest.fail, repeating=steps.told_elsewhere.repeating_steps)
    tell, number = HOOKS[hook]
    for metric in (of_first, of_last):
        tell(metric)
    known: dict[str, Any] = {"data": None, "arguments": (), "seed": 0, "batch_seed": 0, "size": 2}
    for place in (0, 1):
        part = MicroBatch(step="training_step", place=place, is_last=place == 1, **known)
        part.loss = torch.tensor(2.0 + place)
        steps.running = part.step
        with metrics.watching(part):
            of_last.update(part.loss)
            of_last(part.loss)
        steps.running = None
        metrics.end(part)
    found = [steps.told_elsewhere.times_told_by_hooks(metric) for metric in (of_first, of_last)]
    assert found == [number, number]
    for metric in (of_first, of_last):
        tell(metric)
    of_both = [steps.told_elsewhere.times_told_by_hooks(metric) for metric in (of_first, of_last)]
    assert of_both == ([1, 1] if hook == "resets" else [2 * number, 2 * number])


def test_a_collection_that_copies_its_states_tells_nothing(steps: Steps) -> None:
    metrics = MetricCollection({"one": SumMetric(), "other": SumMetric()})
    steps.running = "training_step"
    for number in (1.0, 2.0):
        metrics.update(number)
    steps.running = None
    told = [steps.told_elsewhere.times_told_by_hooks(metric) for _, metric in metrics.items()]
    assert told == [0, 0]
    metrics.update(3.0)
    assert [steps.told_elsewhere.times_told_by_hooks(metric) for _, metric in metrics.items()] == [1, 1]


@pytest.mark.parametrize("make", [SumMetric, Full, CatMetric, lambda: Running(SumMetric(), 2)])
def test_what_a_step_tells_up_to_its_call_is_put_back(steps: Steps, make: Callable[[], Metric]) -> None:
    """The first stage kept it beside the state of the last one: what rank 0 told, too, brought it along."""
    metric, alone = make(), make()
    for each in (metric, alone):
        each.update(1.0)
    steps.running = "training_step"
    with steps.told_elsewhere.undone():
        metric.update(2.0)
        metric(3.0)
        metric.reset()
        metric.update(4.0)
    steps.running = None
    counts = [max(getattr(each, name, 0) for name in COUNTS) for each in (metric, alone)]
    assert counts == [1, 1]
    torch.testing.assert_close(metric.compute(), alone.compute())


def test_a_metric_that_a_step_makes_stays_whole(steps: Steps) -> None:
    steps.running = "training_step"
    with steps.told_elsewhere.undone():
        metric = SumMetric()
        metric.update(2.0)
    assert float(metric.compute()) == 2.0


@pytest.mark.parametrize("by_hooks, num_said", [((1, 0), 0), ((2, 1), 1)])
def test_what_hooks_of_all_ranks_tell_beside_one_that_tells_more_is_said(
    by_hooks: tuple[int, int], num_said: int
) -> None:
    said: list[str] = []
    first, last = (_Told(5, place == 1, number) for place, number in enumerate(by_hooks))
    with patch.object(metrics_module, "warn_once", lambda _, line: said.append(line)):
        BetweenPipelines._tell_of_unlike_hooks(SumMetric(), [first, last])
    assert ["a SumMetric something" in line for line in said] == [True] * num_said
