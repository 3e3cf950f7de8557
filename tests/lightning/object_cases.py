"""Steps that keep their state in objects, functions, defaults and iterators, or that call loggers themselves.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning.loggers.logger import DummyLogger
from torch.nn import functional as F
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host, seeded, trained


class Decay:
    """A weight that becomes less with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return (1 + self.calls) / self.calls


class Slotted:
    __slots__ = ("factor", "held")

    def __init__(self) -> None:
        self.factor, self.held = 1.0, deque[float](maxlen=2)


class Queue:
    """A queue of outputs, as MoCo has it, in an object and not in buffers."""

    def __init__(self) -> None:
        self.rows, self.pointer = torch.zeros(4, cases.NUM_CLASSES), 0

    def push(self, row: torch.Tensor) -> None:
        self.rows[self.pointer] = row
        self.pointer = (self.pointer + 1) % len(self.rows)


class Meter:
    def __init__(self) -> None:
        self.values: list[float] = []


def schedule() -> Iterator[float]:
    while True:
        yield from (1.0, 1.5, 0.5)


DECAY, SCHEDULE = Decay(), schedule()


def counted(_calls: list[int] = [0]) -> float:  # noqa: B006
    _calls[0] += 1
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return 1 + 1 / (_calls[0] + counted.calls)  # type: ignore[attr-defined]


class ByObjects(cases.Classifier):
    """Its loss is made with the state of objects."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.decay, self.slotted, self.queues = Decay(), Slotted(), {"first": [Queue()]}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        self.slotted.factor *= 0.9
        self.slotted.held.append(float(batch[0].sum()))
        queue = self.queues["first"][0]
        loss = F.cross_entropy(logits + queue.rows.sum(0), batch[1])
        queue.push(logits.detach().mean(0))
        return loss * self.decay() * DECAY() * self.slotted.factor * counted() * next(SCHEDULE)


def by_objects(host: Host) -> dict[str, Any]:
    global DECAY, SCHEDULE
    DECAY, SCHEDULE = Decay(), schedule()
    counted.__defaults__, counted.calls = ([0],), 0  # type: ignore[attr-defined]
    found = {}
    for loss in ("auto", "batch"):
        recorder, module = cases.Recorder(), seeded(ByObjects)
        trained(host, module, recorder, strategy={"loss": loss, "warmup_steps": 2})
        found[loss] = {
            "rows": recorder.rows,
            "calls": [module.decay.calls, DECAY.calls, counted.calls, *counted.__defaults__],  # type: ignore
            "slots": [module.slotted.factor, list(module.slotted.held)],
            "queue": [module.queues["first"][0].rows.tolist(), module.queues["first"][0].pointer],
            "next": next(SCHEDULE),
        }
    return found


class Metered(cases.Classifier):
    """It logs what a meter of its own has seen."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.meter = Meter()
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.meter.values.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.means.append(sum(self.meter.values) / max(1, len(self.meter.values)))
        self.meter = Meter()


def metered(host: Host) -> dict[str, Any]:
    module = seeded(Metered)
    with lines() as said:
        trained(host, module, data=cases.loader(32), strategy={"loss": "auto"})
    named = [line for line in said if "self.meter.values gets 4 entries instead of 1" in line]
    return {"means": module.means, "said": len(named) if host.pipelined else 1}


class KeepsMetrics(cases.Classifier):
    """Its metrics stand in a dict and a list, where torch does not see them."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.kept, self.more = {"loss": MeanMetric()}, [MulticlassAccuracy(cases.NUM_CLASSES), SumMetric()]
        self.values: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.kept["loss"].update(loss.detach())
        self.more[0].update(logits, batch[1])
        self.more[1].update(float(len(batch[1])))
        return loss

    def on_train_epoch_end(self) -> None:
        every = (*self.kept.values(), *self.more)
        self.values.append([float(metric.compute()) for metric in every])
        for metric in every:
            metric.reset()


def kept_metrics(host: Host) -> dict[str, Any]:
    """Metrics of batches that are cut evenly, and of those that are not: the last batch weighed less."""
    module, uneven = seeded(KeepsMetrics), seeded(KeepsMetrics)
    trained(host, module, data=cases.loader(32), strategy={"loss": "auto"})
    with lines() as said:
        trained(host, uneven, data=cases.loader(21), max_epochs=1, strategy={"loss": "auto"})
    named = [line for line in said if "a number of each" in line or "once per micro-batch, so" in line]
    return {"values": module.values + uneven.values, "said": named}


class Logged(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[Any]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "raw" in metrics:
            self.rows.append([step, float(metrics["raw"]), metrics["fixed"]])


class LogsItself(cases.Classifier):
    """It calls its logger in its step."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.logger.log_metrics({"raw": loss.item(), "fixed": 3}, step=self.global_step)  # type: ignore
        return loss


def logged_by_itself(host: Host) -> dict[str, Any]:
    logger = Logged()
    with lines() as said:
        trained(host, seeded(LogsItself), logger=logger, strategy={"loss": "auto"})
    return {
        "rows": logger.rows,
        "said": [line for line in said if "calls self.logger.log_metrics() itself" in line],
    }


SAME_AS_SINGLE: dict[int, list[Any]] = {2: [by_objects, metered, kept_metrics, logged_by_itself], 4: []}
ONLY_PIPELINE: dict[int, list[Any]] = {2: [], 4: []}
