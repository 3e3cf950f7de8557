"""Steps that change what is beside their module: globals, variables of functions around, callbacks, data.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from pytorch_lightning.callbacks import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host, seeded, trained

SEEN: list[int] = []
CLASSES: Counter[int] = Counter()
NUM_SAMPLES = 0
BANK = torch.zeros(cases.NUM_CLASSES)
LARGE = torch.zeros(2000)
LOSS_OF = [0.0] * 2000
RECENT = numpy.zeros(2000)
VAST = numpy.zeros(3 * 2**20)
LATE = [0.0] * 2000
TABLE = {place: float(place) for place in range(5000)}  # which nobody changes


class Meter:
    """One of the program's classes, whose objects are not sent."""

    total = 0.0

    def add(self, value: float) -> None:
        self.total += value


METER = Meter()


def note(y: torch.Tensor) -> None:
    """What a step calls, and not the step itself, keeps."""
    global NUM_SAMPLES
    NUM_SAMPLES += len(y)
    CLASSES.update(y.tolist())
    BANK.add_(F.one_hot(y, cases.NUM_CLASSES).sum(0))


class Samples(Dataset[Any]):
    def __init__(self) -> None:
        self.data, self.num_told, self.history = cases.samples(54, 2), 0, [0]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class HardestFirst(Sampler[int]):
    """Goes by the losses that a step has written down."""

    def __init__(self, data: Samples) -> None:
        self.data, self.losses = data, torch.arange(float(len(data)))

    def __len__(self) -> int:
        return len(self.losses)

    def __iter__(self) -> Iterator[int]:
        return iter(self.losses.argsort(descending=True).tolist())


class Keeper(Callback):
    def __init__(self) -> None:
        self.labels: list[int] = []
        self.ends: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(len(self.labels))


def counting() -> Callable[[int], int]:
    count = 0

    def add(number: int) -> int:
        nonlocal count
        count += number
        return count

    return add


class Beside(cases.Classifier):
    num_told = 0

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.add, self.add_twice = counting(), counting()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        SEEN.extend(batch[1].tolist())  # before forward: the first stage runs it, too
        logits = self(batch[0])
        note(batch[1])
        self.add(1)
        self.add_twice(2)
        LARGE[batch_idx] += batch[0].sum()
        LOSS_OF[batch_idx] = float(batch[0].sum())
        RECENT[batch_idx] = float(batch[0].sum())
        VAST[batch_idx] = float(batch[0].sum())
        if self.global_step == 4:  # the first change, at a batch at which nothing is looked at closely
            LATE.append(float(batch[0].sum()))
        type(self).num_told += len(batch[1])
        keeper = next(each for each in self.trainer.callbacks if isinstance(each, Keeper))
        keeper.labels += batch[1].tolist()
        self.trainer.samples_told = getattr(self.trainer, "samples_told", 0) + len(batch[1])
        os.environ["MADPIPE_TEST_SAMPLES"] = str(self.trainer.samples_told)
        data = self.trainer.train_dataloader.dataset
        data.num_told += len(batch[1])
        data.history = [*data.history, int(batch[1].sum())] if len(data.history) < 2 else data.history
        self.trainer.train_dataloader.sampler.losses[batch_idx] = logits.detach().abs().sum() / 1e6
        return F.cross_entropy(logits, batch[1]) * (TABLE[1] + TABLE[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        note(batch[1])
        super().validation_step(batch, batch_idx)


def beside_the_module(host: Host) -> dict[str, Any]:
    global NUM_SAMPLES
    NUM_SAMPLES = Beside.num_told = 0
    SEEN.clear()
    CLASSES.clear()
    BANK.zero_()
    LARGE.zero_()
    LOSS_OF[:] = [0.0] * len(LOSS_OF)
    RECENT[:] = 0.0
    VAST[:] = 0.0
    LATE[:] = [0.0] * 2000
    recorder, keeper, data = cases.Recorder(), Keeper(), Samples()
    loader = DataLoader(data, batch_size=16, sampler=HardestFirst(data))
    strategy = {"loss": "batch", "warmup_steps": 2}
    module = seeded(Beside)
    validation = cases.loader(21, seed=3)
    with lines() as said:
        trainer = trained(host, module, recorder, keeper, data=loader, validation=validation, strategy=strategy)
    assert not [line for line in said if "not sent to the other ranks" in line], said
    return {
        "rows": recorder.rows,
        "seen": SEEN[:],
        "classes": sorted(CLASSES.items()),
        "samples": NUM_SAMPLES,
        "bank": BANK.tolist(),
        "large": [LARGE[:4].tolist(), LOSS_OF[:4], RECENT[:4].tolist()],
        "vast": [VAST[:4].tolist(), LATE[2000:]],
        "of functions": [module.add(0), module.add_twice(0)],
        "of the trainer": [trainer.samples_told, os.environ.pop("MADPIPE_TEST_SAMPLES")],
        "of the class": Beside.num_told,
        "of the callback": [keeper.labels, keeper.ends],
        "of the data": [data.num_told, data.history],
        "of the sampler": loader.sampler.losses.tolist(),
    }


NUM_STEPS = 0


class Annealed(cases.Classifier):
    """Its loss is made with a counter that is a global."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.add = counting()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        global NUM_STEPS
        NUM_STEPS += 1
        return F.cross_entropy(self(batch[0]), batch[1]) / (1 + NUM_STEPS) / annealing(1)


annealing = counting()


def annealed_by_globals(host: Host) -> dict[str, Any]:
    global NUM_STEPS, annealing
    NUM_STEPS, annealing = 0, counting()
    recorder = cases.Recorder()
    trained(host, seeded(Annealed), recorder, strategy={"loss": "batch"})
    return {"rows": recorder.rows, "steps": NUM_STEPS, "next": annealing(1)}


HUGE = torch.zeros(5 * 2**20)
MEAN = MeanMetric()
METRICS = {"all": MetricCollection([MulticlassAccuracy(cases.NUM_CLASSES)]), "unused": MeanMetric()}
NUM_BYTES = 17 * 2**20
OUTSIZE: Any = None
FILED: Any = None
READ_ONLY: Any = None
UNNAMED: Any = None


class OfObjects(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.kept = [self.head, torch.nn.Linear(2, 2)]  # which no step changes

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        HUGE[batch_idx] += 1
        OUTSIZE[batch_idx] += 1
        FILED[batch_idx] += READ_ONLY[batch_idx]
        MEAN.update(1.0)
        METRICS["all"].update(batch[1], batch[1])
        SEEN.append(batch_idx)
        METER.add(1.0)
        with open(os.devnull, "a") as file:
            file.write("a line for each micro-batch")
        return F.cross_entropy(self(batch[0]), batch[1])


def told_of_what_is_beside(host: Host) -> dict[str, Any]:
    global OUTSIZE, FILED, READ_ONLY, UNNAMED
    SEEN.clear()
    OUTSIZE = numpy.zeros(2**27 + 1)  # more than a GiB, of which the machine has a page
    with (
        warnings.catch_warnings(record=True) as caught,
        lines() as said,
        tempfile.NamedTemporaryFile() as file,
    ):
        FILED = numpy.memmap(file.name, mode="w+", shape=(NUM_BYTES,))
        READ_ONLY, UNNAMED = (numpy.memmap(file.name, mode=mode, shape=(NUM_BYTES,)) for mode in ("r", "r+"))
        warnings.simplefilter("always")
        trained(host, seeded(OfObjects), max_epochs=1)
    OUTSIZE = FILED = READ_ONLY = UNNAMED = None
    return {"said": [*said, *(str(each.message) for each in caught)]}


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [beside_the_module, annealed_by_globals],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [told_of_what_is_beside], 4: []}
