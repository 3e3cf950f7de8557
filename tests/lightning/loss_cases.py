"""Losses that are no plain mean over samples: on a pipeline as in one process."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_madpipe.steps import loss_signs
from tests.choice import run_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning import map_cases
from tests.lightning.epoch_cases import Moves
from tests.lightning.lightning_cases import Host
from tests.lightning.loop_cases import pipeline_index, refused, seeded

VOCABULARY, LENGTH, PAD = 17, 7, 0


class Layers(pl.LightningModule):
    """Eight layers, as in the other cases."""

    first: Callable[[], nn.Module] = staticmethod(lambda: nn.Linear(cases.NUM_FEATURES, cases.WIDTH))
    num_outputs = cases.NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.embed = self.first()
        self.blocks = nn.ModuleList(cases.Block() for _ in range(5))
        self.head = nn.Linear(cases.WIDTH, self.num_outputs)

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, torch.tanh, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))

    def loss_of(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class LanguageModel(Layers):
    """The usual batch of Hugging Face: labels of -100 where there is padding, and on some prompts."""

    first = staticmethod(lambda: nn.Embedding(VOCABULARY, cases.WIDTH))
    num_outputs = VOCABULARY

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits = self(batch["input_ids"])
        shifted, labels = logits[:, :-1], batch["labels"][:, 1:]
        return F.cross_entropy(shifted.reshape(-1, VOCABULARY), labels.reshape(-1))


class Masked(LanguageModel):
    """The same mean, over a mask, and perplexity besides."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        each = F.cross_entropy(
            self(batch["input_ids"])[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none"
        )
        mask = batch["attention_mask"][:, 1:]
        loss = (each * mask).sum() / mask.sum()
        if self.trainer.training:
            self.log("perplexity", loss.exp())
            self.log("tokens", mask.sum().float())
        return loss


class LoggedLate(LanguageModel):
    """Numbers that are 0 in the first four batches, of which trials show nothing, and then are not."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        labels, is_late = batch["labels"][:, 1:], batch_idx >= 4
        known = (labels != -100).sum()
        self.log("hits", (labels % 5 == 1).sum() * is_late / known, on_step=True, on_epoch=True)
        self.log("hit count", (labels % 5 == 1).sum().float() * is_late)
        return self.loss_of(batch)


class CutToLongest(LanguageModel):
    """A batch is cut to its longest sample within the step, so that micro-batches have lengths of their own."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        longest = int(batch["attention_mask"].sum(1).max())
        return super().loss_of({name: tensor[:, :longest] for name, tensor in batch.items()})


class PaddingAsLabel(LanguageModel):
    """Padding is known by its token alone."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits, labels = self(batch["input_ids"])[:, :-1], batch["input_ids"][:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=PAD)


class ClassWeighted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 0.2, 7.0]))
        self.accuracy = MulticlassAccuracy(cases.NUM_CLASSES)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("plain", (logits.argmax(-1) == y).float().mean())
        return self.criterion(logits, y)


class Reweighted(Layers):
    """Deferred re-weighting: other class weights begin at a step that is not tried for anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", torch.ones(4))
        self.register_buffer("balanced", torch.tensor([0.1, 1.0, 3.0, 6.0]))

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, weight=self.even if self.global_step < 5 else self.balanced)


class Stopping(Layers):
    """Stops by what it sees: of one micro-batch here, and of the whole batch in one process."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if y[0] == 0:
            self.trainer.should_stop = True
        return F.cross_entropy(self(x), y)


class HiddenWeights(Layers):
    """Weights that nobody can find: the step runs once."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, weight=torch.tensor([1.0, 3.0, 0.2, 7.0]))


class Contrastive(Layers):
    """InfoNCE on two views, which go through the network as one batch (SimCLR)."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        z = F.normalize(self(torch.cat([x, x.flip(-1) + 0.1])), dim=-1)
        similar = z @ z.t() / 0.3
        similar = similar.masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        positive = torch.arange(len(z)).roll(len(x))
        return F.cross_entropy(similar, positive)


class Summed(Layers):
    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum") / 16


class NoisyLinear(nn.Linear):
    """Draws in training and in evaluation, as an encoder of means and variances does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class Noisy(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.embed = NoisyLinear(cases.NUM_FEATURES, cases.WIDTH)


class InPairs(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(super().forward(x).unflatten(1, (-1, 2)))


class Complex(Layers):
    """The layers return complex numbers. It was refused: "it returns no loss"."""

    def __init__(self) -> None:
        super().__init__()
        self.head = InPairs(cases.WIDTH, 2 * cases.NUM_CLASSES)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x).abs(), y)


class ComplexRoots(Complex):
    """A loss of all outputs of a batch, which are complex."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        return super().loss_of(batch).sqrt()


class Divided(Layers):
    """A mean by hand."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = torch.zeros(())
        for logits, label in zip(self(x), y, strict=True):
            loss = loss + F.cross_entropy(logits, label)
        return loss / len(x)


class Statistics(Layers):
    """A loss with the statistics of the batch (as Barlow Twins or VICReg)."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        z = self(x)
        z = (z - z.mean(0)) / (z.std(0) + 1.0)
        covariance = z.t() @ z / len(z)
        return (covariance - torch.eye(z.shape[1])).square().sum() + F.cross_entropy(z, y)


class Roots(Layers):
    """The loss is a mean, and what is logged is none."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), F.one_hot(y, cases.NUM_CLASSES).float())
        if self.trainer.training:
            self.log("root", loss.sqrt())
            self.log("samples", float(len(x)))
        return loss


class TimeFirst(LanguageModel):
    """Batches along dimension 1 within the network."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits = self(batch["input_ids"].t()).transpose(0, 1)
        z = F.normalize(logits.mean(1), dim=-1)
        return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


class EightFirst(TimeFirst):
    """As many tokens in dimension 0 of what the network gives as two micro-batches have samples."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        return super().loss_of({"input_ids": F.pad(batch["input_ids"], (0, 1), value=PAD)})


class Changing(Layers):
    """Has another term after some steps; a step that is given up must not touch its metric and its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.register = MulticlassAccuracy(cases.NUM_CLASSES), torch.zeros(2)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.register += torch.tensor([1.0, len(x)])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("seen", self.register[1])
        loss = F.cross_entropy(logits, y)
        return loss if self.global_step < 5 else loss + logits.mean(0).square().sum()


class Begun(Layers):
    """A buffer that a hook fills begins a term, in a step that is not tried."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(0.0))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.share.fill_(1.0)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + self.share * logits.mean(0).square().sum()


class Rising(Layers):
    """Has a term from the beginning, which is too small to be seen, and no operation begins with it."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        share = 1e-12 if self.global_step < 5 else 1.0
        return F.cross_entropy(logits, y) + share * logits.mean(0).square().sum()


def rounded(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers with as many digits as a GPU gives products, where TF32 is allowed: 10 bits."""
    if not torch.backends.cudnn.allow_tf32:
        return numbers
    bits = numbers.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class RoundedProduct(torch.autograd.Function):
    """A product as a GPU computes it in TF32."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.right = right
        return rounded(left) @ rounded(right)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return rounded(gradients[0]) @ rounded(ctx.right).T, None


class Perceptual(Layers):
    """Compares features of the outputs, each sample's with its own."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(size, generator=generator) for size in ((cases.NUM_CLASSES, 16), (16, 16))]

        def features(values: torch.Tensor) -> torch.Tensor:
            return RoundedProduct.apply(RoundedProduct.apply(values, weights[0]).relu(), weights[1])

        return F.mse_loss(features(self(x)), features(F.one_hot(y, cases.NUM_CLASSES).float()))


class Clamped(Layers):
    """Its loss is clamped, which acts for a sample that has a micro-batch of its own, and not for the batch."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        wanted = F.one_hot(y, cases.NUM_CLASSES) * x.abs().amax(1, keepdim=True)
        return F.mse_loss(self(x), wanted).clamp(max=4.0)


class Flooded(Layers):
    """A loss that does not fall below a level."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (F.cross_entropy(self(x), y) - 1.3).abs() + 1.3


class Hinged(Layers):
    """A penalty of the mean of all outputs, from a threshold on."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + F.relu(logits.abs().mean() - 0.5)


class OnBothSides(Layers):
    """The absolute value of a mean, which has one sign in some batches, the other one in some, and both in one."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + (logits.mean() + x[:, 0].mean()).abs()


class OfFeatures(Layers):
    """A penalty of the means over the batch, which no batch has at first."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + F.relu((logits * x[:, :1].abs()).mean(0) - 2.0).sum()


class ByCounts(Layers):
    """Doubles the loss of a batch that has many samples of a class, which no micro-batch has."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss * 2 if (y == 0).sum() > 5 else loss


class Easy(Layers):
    """A mean over the samples that are not too hard, which at first are all."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        wanted = F.one_hot(y, cases.NUM_CLASSES) * x.abs().amax(1, keepdim=True)
        each = (self(x) - wanted).square().mean(1)
        return each[each < 4.0].mean()


class ScaledInputs(Layers):
    """Scales the inputs of a batch that has a large one."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x / 2 if x.max() > 4 else x), y)


class HardestLater(Layers):
    """Takes the hardest samples from a step on, more than a micro-batch has."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        each = F.cross_entropy(self(x), y, reduction="none")
        return (each.topk(5).values if self.global_step >= 4 else each).mean()


class SwitchedOn(Layers):
    """A flag that a hook sets begins a term whose operations were there before, with a tensor that was 0."""

    def on_train_epoch_start(self) -> None:
        self.compares = self.current_epoch >= 1

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        share = torch.full((cases.NUM_CLASSES,), float(self.compares))
        return F.cross_entropy(logits, y) + (share * logits.mean(0)).square().sum()


class CoolsInThird(Layers):
    """Its loss reads a number that the step changes in step 3 alone, which is no step that is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 4.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x) / self.tau, y)
        if batch_idx == 2:
            self.tau *= 0.5
        return loss


class MasksInThird(Layers):
    """In step 3 alone the step masks samples itself, and divides by how many are left."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        mask = (x[:, 0] > 0).float() if batch_idx == 2 else torch.ones(len(x))
        return (F.cross_entropy(self(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


class PreparesInThird(Layers):
    """In step 3 alone the step makes something of its whole batch that its loss has no gradient by."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        weights = x[:, 0].abs() + 0.1
        shift = int(batch_idx == 2)  # which is no attribute
        if shift and self.what == "inputs":
            x = x - x.mean(0)
        elif shift and self.what == "labels":
            y = y.flip(0)
        elif shift and self.what == "weights":
            weights = weights * len(x) / weights.sum()
        elif shift and self.what == "fewer":
            x, y, weights = x[:8], y[:8], weights[:8]
        elif self.what == "shifted":
            y = y.roll(shift)
        return (F.cross_entropy(self(x), y, reduction="none") * weights).mean()


class ScalesInThird(Layers):
    """Makes a number of each batch, and multiplies its loss by it in step 3 alone, in the place of another one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if self.kind == "samples":  # all micro-batches have as many
            size = len(y) / 16
            return loss * (size if batch_idx == 2 else 1 / (1 + batch_idx))
        if self.kind == "numbers":
            share = sum(y.tolist()) / len(y)
            return loss * (share if batch_idx == 2 else 1 / (1 + batch_idx))
        mean, one = y.float().mean(), torch.ones(())
        return loss * (mean if batch_idx == 2 else one)


class FlipsAtRandom(Layers):
    """Which batches are mixed with themselves, a generator of the program's own decides."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(5)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if self.draws.random() < 0.3:
            x = 0.7 * x + 0.3 * x.flip(0)
        return F.cross_entropy(self(x), y)


class KeepsInThird(Layers):
    """In step 3 alone it keeps its loss, counts, and draws; in all steps it keeps its last losses."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []
        self.count = 0
        self.last: deque[float] = deque(maxlen=3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if batch_idx == 2:
            x = x + 0.1 * torch.randn_like(x)
        loss = F.cross_entropy(self(x), y)
        self.last.append(float(loss))
        if batch_idx == 2:
            self.kept.append(float(loss))
            self.count += 1
        return loss


class CountsMarked(Layers):
    """Counts batches whose first sample is marked: in step 1 one micro-batch does, and in step 7 all do."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate = 0, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.rate = 0.9**batch_idx
        self.count += int(bool(x[0, 0] > 0))
        return F.cross_entropy(self(x), y)


class MarksInTensors(Layers):
    """Counts as :class:`CountsMarked` does, in a tensor, a buffer and a dict, which keeps a rate, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.count, self.rate, self.of = torch.zeros(()), torch.ones(()), {"marked": 0, "rate": 1.0}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        is_marked = (x[0, 0] > 0).float()
        self.rate, self.of["rate"] = torch.tensor(0.9**batch_idx), 0.9**batch_idx
        self.count = self.count + is_marked
        self.total[1] += is_marked
        self.of["marked"] += int(is_marked)
        return F.cross_entropy(self(x), y)


class KeepsInLarge(Layers):
    """Keeps a rate and a sign in a large tensor and array, and samples that are far above the mean.

    In each batch it adds up what it has seen, which micro-batches do as one process does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.array, self.seen = torch.zeros(1000), numpy.zeros(1000), 0
        self.above: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.table[3] = self.array[3] = 0.9**batch_idx
        self.table[7], self.array[7] = x[0, 0].sign(), float(x[0, 0].sign())
        self.above.append(x[x[:, 0] - x[:, 0].mean() > 3])
        self.seen += len(y)
        return F.cross_entropy(self(x), y)

    def on_train_epoch_end(self) -> None:
        self.above = [torch.cat(self.above)]


class Alarmed(Layers):
    """Notes batches of high first features: in step 7 the first micro-batch has some, and the batch has not."""

    def __init__(self) -> None:
        super().__init__()
        self.alarm = -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        if x[:, 0].mean() > 2.5:
            self.alarm = batch_idx
        return F.cross_entropy(self(x), y)


class NamedLate(Layers):
    """Logs an extreme that no batch had logged before, and returns another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        if batch_idx == 2:
            self.log("largest", logits.max())
        returned = {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}
        return returned if batch_idx < 1 else {**returned, "extremes": [logits.min()]}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert "accuracy" in outputs


class ReturnsCounts(Layers):
    """Returns counts of samples beside the loss, none in the first batch, and hooks read them. It was refused."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        hits = (logits.argmax(1) == y) & (batch_idx > 0)
        totals = {"correct": hits.sum(), "as float": hits.sum().float(), "samples": len(y), "step": batch_idx}
        return {"loss": F.cross_entropy(logits, y), "totals": totals, "share": hits.float().mean()}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        numbers = {**outputs["totals"], "share": outputs["share"]}
        self.log_dict({name: float(value) for name, value in numbers.items()}, on_step=True, on_epoch=True)


class ReturnsPeak(Layers):
    """Returns a number that is neither a sum nor the same, and it is a whole one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return {"loss": F.cross_entropy(self(x), y), "highest": (x[:, 0] * 100).long().max()}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("highest", float(outputs["highest"]))


class Missing(Layers):
    """Targets that are NaN count for nothing."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        target = F.one_hot(y.nan_to_num(0).long(), cases.NUM_CLASSES).float()
        known = ~y.isnan()
        return F.mse_loss(self(x)[known], target[known])


class MaskedByInputs(Layers):
    """Samples whose inputs are 0 are padding."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        mask = (x.abs().sum(-1) > 0).float()
        return (F.cross_entropy(self(x), y, reduction="none") * mask).sum() / mask.sum()


class InPlace(Layers):
    """Changes the outputs in place."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        logits.mul_(2)
        logits[x[:, 0] > 1, 0] = -1.0
        return F.cross_entropy(logits, y)


class InPlaceContrastive(Contrastive):
    """Changes the outputs of a whole batch in place."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        z = self(torch.cat([batch[0], batch[0].flip(-1) + 0.1]))
        z /= z.norm(dim=-1, keepdim=True).detach()
        similar = z @ z.t() / 0.3
        similar.fill_diagonal_(-1e9)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(batch[0])))


class Seeded(Layers):
    """Noise that is the same whenever a batch comes again."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        torch.manual_seed(batch_idx)
        loss = F.cross_entropy(self(x + 0.5 * torch.randn_like(x)), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class OwnGenerator(Seeded):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        generator = torch.Generator().manual_seed(batch_idx)
        loss = F.cross_entropy(self(x) + torch.randn(len(x), cases.NUM_CLASSES, generator=generator), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


class Drawing(Layers):
    """Draws from generators of its own before and after its call of the layers, and takes a branch by that."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = {"first": [numpy.random.default_rng(3)]}
        self.generator = torch.Generator().manual_seed(5)
        self.factors = itertools.cycle([1.0, 0.5, 2.0])

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        first = self.tools["first"][0]
        loss = F.cross_entropy(self(x * (1 + first.random())), y) * next(self.factors)
        if OF_THE_FILE.random() < 0.5:
            loss = loss * (1 + torch.rand((), generator=self.generator))
        return loss * (1 + first.random()) if self.trainer.accumulate_grad_batches == 1 else loss


OF_THE_FILE = random.Random(7)


class DrawingForSamples(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(11)

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        weights = torch.tensor([self.generator.random() for _ in x])
        return (F.cross_entropy(self(x), y, reduction="none") * weights).mean()


class DrawingFromCommon(Layers):
    """Takes a branch for the batch by the common generators, or for each sample besides."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.both, self.drawn = both, []

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.drawn.append([random.random(), numpy.random.rand(), float(torch.rand(()))])
        return F.cross_entropy(F.dropout(logits, 0.5) if self.both else logits, y)


class DrawingUntried(Layers):
    """Draws in steps whose loss is not tried, and seeds one of them itself."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) * (1 + random.random())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        torch.rand(3)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        self(batch[0] + torch.randn_like(batch[0]))


class Collecting(Layers):
    """Keeps what it has seen: losses, of which micro-batches have one each, and predictions, which are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.names: list[int] = []
        self.features: list[torch.Tensor] = []
        self.highest, self.mean, self.all = MaxMetric(), MeanMetric(), CatMetric()
        self.accuracy = MulticlassAccuracy(cases.NUM_CLASSES)
        self.called = MeanMetric()
        self.num_steps = 0

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss.detach())
        self.outputs.append(logits.detach())
        self.features.append(2 * logits.detach())
        self.names.extend(y.tolist())
        self.num_steps += 1
        for metric in (self.highest, self.mean, self.all):
            metric.update(loss.detach())
        self.called(loss)  # keeps the loss with its graph, which no copy of the metric can have
        self.accuracy.update(logits, y)
        return loss

    def on_train_epoch_end(self) -> None:
        self.outputs = [torch.cat(self.outputs)]


class Selecting(Layers):
    """Leaves samples out before the layers run."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        chosen = y != 9
        return F.cross_entropy(self(x[chosen]), y[chosen])


class Denoising(Layers):
    """Draws for each sample: micro-batches may draw their own."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(F.dropout(self(x + 0.1 * torch.randn_like(x)), 0.1), y)


class MixUp(Layers):
    """Draws a permutation of the batch."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        order = torch.randperm(len(x))
        logits = self(0.7 * x + 0.3 * x[order])
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


class Hungry(cases.Block):
    """Runs out of memory in training where ``FAILURES`` says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAILURES.left and torch.is_grad_enabled():
            FAILURES.left[0] -= 1
            if FAILURES.left[0] < 0:
                FAILURES.left.pop(0)
                raise torch.cuda.OutOfMemoryError("tried to allocate more than there is")
        return super().forward(x)


class Failures:
    """How many forwards go well before each that runs out of memory; no state of the layer that it meets."""

    __module__ = "torch"  # what an object of a library holds is not put back with a step
    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: list[int] = []


FAILURES = Failures()


class HungryContrastive(Contrastive):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[-1].__class__ = Hungry  # the same weights


class Chosen(Layers):
    """Leaves samples out behind the layers."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        chosen = y != 9
        return F.cross_entropy(self(x)[chosen], y[chosen])


class GradientLater(Contrastive):
    """Has no gradient for the first batches, whose inputs are zeros."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        return (super().loss_of(batch) * batch[0].abs().amax().sign().reshape(1)).sum()


class InfiniteAtFirst(Contrastive):
    """Has gradients for the first batches, and a loss that is no number."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        is_empty = batch[0].abs().sum() == 0
        return super().loss_of(batch) + torch.where(is_empty, torch.inf, 0.0)


class RaisingForBatches(Layers):
    """Takes no batch as large as those that it gets, and each of their parts."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if len(x) > 8:
            raise ValueError("more samples than there is room for")
        return F.cross_entropy(self(x), y)


class RatedByBatches(Layers):
    """Sets a rate in its step, which is refused, and wants as many samples as it has targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("targets", torch.zeros(16).long())

    def loss_of(self, batch: Any) -> torch.Tensor:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)
        return F.cross_entropy(self(batch[0]), self.targets)


class WithAuxiliary(nn.Module):
    """Hands on a number that is of all samples, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.square().mean()


class Auxiliary(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.end = WithAuxiliary()

    def pipeline_layers(self) -> list[Any]:
        return [*super().pipeline_layers(), self.end]

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(super().forward(x))

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits, auxiliary = self(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.1 * auxiliary


class Towers(pl.LightningModule):
    """Two towers and a temperature that is learned, as forward() of CLIP returns them. It was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(*(self.net() for _ in range(2)))
        self.right = nn.Sequential(*(self.net() for _ in range(2)))
        self.scale = nn.Parameter(torch.tensor(2.0))

    @staticmethod
    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, 2 * cases.WIDTH), nn.GELU(), nn.Linear(2 * cases.WIDTH, 8)
        )

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        return F.normalize(self.left(x), dim=-1), F.normalize(self.right(z), dim=-1), self.scale.exp()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, _ = batch
        u, v, scale = self(x, x.flip(-1) + 0.1)
        logits, labels = scale * u @ v.t(), torch.arange(len(x))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        u, v, scale = self(x, x.flip(-1) + 0.1)
        self.log("val_loss", F.cross_entropy(scale * u @ v.t(), torch.arange(len(x))))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class WithScale(nn.Module):
    """Returns a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.scale


class Scaled(Layers):
    """Named layers, the last of which returns a weight, in a loss that compares samples."""

    end = WithScale

    def __init__(self) -> None:
        super().__init__()
        self.last = self.end()

    def pipeline_layers(self) -> list[Any]:
        return [*super().pipeline_layers(), self.last]

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(super().forward(x))

    def loss_of(self, batch: Any) -> torch.Tensor:
        z, scale = self(batch[0])
        z = F.normalize(z, dim=-1)
        return F.cross_entropy(scale.sum().exp() * z @ z.flip(-1).t(), torch.arange(len(z)))


class ScaledMean(Scaled):
    """The same in a mean over samples. It was refused: "the loss depends on weights in other ways"."""

    def loss_of(self, batch: Any) -> torch.Tensor:
        logits, scale = self(batch[0])
        return F.cross_entropy(scale.exp() * logits, batch[1]) + 0.1 * scale.square().sum()


class WithSize(nn.Module):
    """Returns a number that grows with the samples, which micro-batches of one size do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.scale * len(x)


class SizedScale(Scaled):
    end = WithSize


class Weighed(pl.LightningModule):
    """Two losses with weights that are learned (Kendall et al.), which forward() returns. It was refused."""

    reduction = "mean"

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(cases.NUM_FEATURES, cases.NUM_FEATURES) for _ in range(5)))
        self.classes = nn.Linear(cases.NUM_FEATURES, cases.NUM_CLASSES)
        self.value = nn.Linear(cases.NUM_FEATURES, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return self.classes(h), self.value(h), self.log_vars

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits, value, log_vars = self(x)
        terms = torch.stack(
            [
                F.cross_entropy(logits, y, reduction=self.reduction),
                F.mse_loss(value[:, 0], y.float(), reduction=self.reduction),
            ]
        )
        loss = (torch.exp(-log_vars) * terms).sum() + log_vars.sum()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class WeighedSums(Weighed):
    """Zeros at first, by which the losses of micro-batches add up to the batch's, and their gradients do not."""

    reduction = "sum"


def found_layers(host: Host, build: Callable[[], Any], num: int = 54, **arguments: Any) -> dict[str, Any]:
    strategy = {"algorithm": "madpipe", **arguments.pop("strategy", {})}
    return fitted(host, build, labelled(num), strategy=strategy, **arguments)


def ending_in(host: Host, build: Callable[[], Any], **arguments: Any) -> dict[str, Any]:
    strategy = {"algorithm": [0, 4, 9], **arguments.pop("strategy", {})}
    return fitted(host, build, labelled(54), strategy=strategy, **arguments)


def with_auxiliary(host: Host, loss: str) -> dict[str, Any]:
    return fitted(host, Auxiliary, labelled(32), max_epochs=1, strategy={"loss": loss, "algorithm": [0, 4, 9]})


def texts(num: int, *, padded: bool = True, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Samples whose lengths rise with their place in a batch, so that micro-batches have different ones."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(num):
        length = 2 + index * 5 % (LENGTH - 1) if padded else LENGTH
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < length).long()
        ids = ids * mask
        labels = torch.where(mask.bool(), ids, -100)
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return samples


def later_padded(num: int) -> list[dict[str, torch.Tensor]]:
    """No padding in the first batches, then some in each: one with the same number in all micro-batches before."""
    return texts(32, padded=False) + texts(num - 32)


def only_tokens(samples: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": sample["input_ids"]} for sample in samples]


@contextmanager
def listening() -> Iterator[list[str]]:
    said: list[str] = []
    logger = logging.getLogger("deepspeed_partition.engine")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def weights_of(host: Host, trainer: Any, module: Any) -> dict[str, Any]:
    if not host.pipelined:
        states = module.state_dict()
    else:
        from deepspeed_partition.engine.runtime.collectives import from_rank_0

        own = trainer.strategy.lightning_module_state_dict()
        states = from_rank_0(lambda: own)
    return {
        name: [float(value.double().sum()), float(value.double().square().sum())]
        for name, value in sorted(states.items())
        if not name.startswith("criterion")
    }


def fitted(
    host: Host,
    build: Callable[[], Any],
    data: Any,
    validation: Any = None,
    batch_size: int = 16,
    callbacks: Sequence[Any] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """The steps' losses, what was logged, the weights in the end, and how the loss was taken."""
    module, recorder = seeded(build), cases.Recorder()
    strategy = {"algorithm": cases_cut(), "warmup_epochs": 0, **arguments.pop("strategy", {})}
    arguments.setdefault("max_epochs", 2)
    data = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size)
    if validation is not None:
        validation = DataLoader(validation, batch_size=batch_size)
    with listening() as said:
        trainer = host.trainer(recorder, *callbacks, strategy=strategy, **arguments)
        trainer.fit(module, data, validation)
    record = cases.fit_record(trainer, module, recorder.rows)
    if host.pipelined:
        from deepspeed_partition.engine.runtime.collectives import from_rank_0

        losses = trainer.strategy._batches._losses
        found = {"once": losses.once, "weight": list(losses.weight), "said": from_rank_0(lambda: said)}
        plan = trainer.strategy.plan
        found["flushed"] = None if plan is None else is_flushed(plan)
    else:
        found = None
    return {"record": {**record, "weights": weights_of(host, trainer, module)}, "found": found}


def is_flushed(plan: Any) -> bool:
    last = f"B{len(plan.stages) - 1}"
    [order] = [order for order in plan.step.order if any(name == last for name, _ in order)]
    names = [name for name, _ in order]
    return names.index(last) > max(place for place, name in enumerate(names) if name == f"F{last[1:]}")


def cases_cut() -> Any:
    return [0, 4, 8]


def labelled(num: int, seed: int = 1) -> TensorDataset:
    return cases.samples(num, seed) if seed != 1 else cases.samples(num)


def later_missing(num: int) -> TensorDataset:
    """From the third batch on some labels are missing, and some inputs are padding."""
    x, y = labelled(num).tensors
    late = torch.arange(num) >= 32
    x = torch.where((late & (torch.arange(num) * 5 % 7 < 3))[:, None], 0.0, x)
    return TensorDataset(x, torch.where(late & (torch.arange(num) * 3 % 8 < 2), torch.nan, y.float()))


def later_inputs(num: int, begin: int) -> TensorDataset:
    """Zeros come first."""
    x, y = labelled(num).tensors
    return TensorDataset(torch.where(torch.arange(num)[:, None] < begin, 0.0, x), y)


def with_outliers(num: int) -> TensorDataset:
    """The first sample of the third, the sixth and the twelfth four has a large number."""
    x, y = labelled(num).tensors
    x = x.clone()
    x[[8, 20, 44], 0] = 5.0
    return TensorDataset(x, y)


def marked(num: int) -> TensorDataset:
    """The first feature is negative, but for the first sample and for the seventh batch of 16."""
    x, y = labelled(num).tensors
    place = torch.arange(num)
    sign = torch.where((place == 0) | (place // 16 == 6), 1.0, -1.0)
    return TensorDataset(torch.cat([(x[:, 0].abs() * sign)[:, None], x[:, 1:]], 1), y)


def with_marks_behind(num: int) -> TensorDataset:
    """The first feature is 0, but of half of the samples in the seventh batch of 16."""
    x, y = labelled(num).tensors
    first = torch.zeros(num)
    first[103], first[104:108], first[108:112] = 5.0, 20.0, 1.0
    return TensorDataset(torch.cat([first[:, None], x[:, 1:]], 1), y)


def with_a_high_start(num: int) -> TensorDataset:
    """The first features of the first four samples of the seventh batch of 16 are high."""
    x, y = labelled(num).tensors
    x = x.clone()
    x[96:100, 0] = 3.0
    return TensorDataset(x, y)


def with_signs(num: int) -> TensorDataset:
    """Batches of 16 whose first feature is positive, negative, and of both signs in the seventh."""
    x, y = labelled(num).tensors
    batch, signs = torch.arange(num) // 16, 1.0 - torch.arange(num) // 16 % 2 * 2
    x = x.clone()
    x[:, 0] = torch.where(batch == 6, torch.where(torch.arange(num) % 16 < 10, 1.0, -1.0), signs)
    return TensorDataset(x, y)


def with_means(num: int) -> TensorDataset:
    """Samples of the seventh batch of 16 are larger."""
    x, y = labelled(num).tensors
    return TensorDataset(torch.where((torch.arange(num) // 16 == 6)[:, None], x * 6, x), y)


def with_a_common_class(num: int) -> TensorDataset:
    """Of the third and the seventh batch of 16, six are of the first class, and else one of each four."""
    x, y = labelled(num).tensors
    common = torch.isin(torch.arange(num) // 16, torch.tensor([2, 6]))
    place = torch.arange(num) % 16
    few = torch.where(place % 4 == 0, 0, y.clamp(min=1))
    return TensorDataset(x, torch.where(common & (place % 8 == 1), 0, few))


def later_padding(num: int) -> TensorDataset:
    return TensorDataset(later_missing(num).tensors[0], labelled(num).tensors[1])


def later_chosen(num: int, begin: int) -> TensorDataset:
    x, y = labelled(num).tensors
    return TensorDataset(x, torch.where((torch.arange(num) >= begin) & (torch.arange(num) % 3 == 0), 9, y))


def losses(host: Host) -> dict[str, Any]:
    """54 samples: the last batch has six, in micro-batches of 2, 2, 1 and 1."""
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "padded": lambda: fitted(host, LanguageModel, texts(54), texts(22, seed=2)),
        "padded later": lambda: fitted(host, LanguageModel, later_padded(80), texts(22, seed=2), max_epochs=1),
        "masked": lambda: fitted(host, Masked, texts(54), texts(22, seed=2)),
        "padding as label": lambda: fitted(host, PaddingAsLabel, only_tokens(later_padded(80)), max_epochs=1),
        "class weights": lambda: fitted(host, ClassWeighted, labelled(54), labelled(21, 3)),
        "hidden weights": lambda: fitted(host, HiddenWeights, labelled(54), labelled(21, 3)),
        "other class weights": lambda: fitted(host, Reweighted, labelled(54)),
        "contrastive": lambda: fitted(host, Contrastive, labelled(54), labelled(21, 3)),
        "summed": lambda: fitted(host, Summed, labelled(54), labelled(21, 3)),
        "towers": lambda: found_layers(host, Towers, validation=labelled(21, 3)),
        "accumulated towers": lambda: found_layers(host, Towers, accumulate_grad_batches=3),
        "scaled by a weight": lambda: ending_in(host, Scaled, validation=labelled(21, 3)),
        "scaled mean": lambda: ending_in(host, ScaledMean, validation=labelled(21, 3)),
        "scaled mean, whole": lambda: ending_in(host, ScaledMean, strategy={"num_micro_batches": 1}),
        "weighed": lambda: found_layers(host, Weighed),
        "weighed, whole": lambda: found_layers(host, Weighed, strategy={"num_micro_batches": 1}),
        "weighed, mean": lambda: found_layers(host, Weighed, 64, strategy={"loss": "mean"}),
        "weighed, in twos": lambda: found_layers(host, Weighed, 12, batch_size=2),
        "weighed, in fours": lambda: found_layers(host, Weighed, 24, batch_size=4),
        "weighed sums": lambda: found_layers(host, WeighedSums),
        "auxiliary, whole": lambda: ending_in(host, Auxiliary, strategy={"num_micro_batches": 1}),
        "complex": lambda: fitted(host, Complex, labelled(54), labelled(21, 3)),
        "complex, of a batch": lambda: fitted(host, ComplexRoots, labelled(54)),
        "divided": lambda: fitted(host, Divided, labelled(54), labelled(21, 3)),
        "statistics": lambda: fitted(host, Statistics, labelled(54), labelled(22, 3)),
        "time first": lambda: fitted(host, TimeFirst, texts(54), texts(22, seed=2)),
        "time first, moved": lambda: moved(host),
        "accumulated": lambda: fitted(host, Contrastive, labelled(54), accumulate_grad_batches=3),
        "accumulated padded": lambda: fitted(host, LanguageModel, texts(54), accumulate_grad_batches=3),
        "asked for": lambda: fitted(host, Roots, labelled(54), strategy={"loss": "batch"}),
        "warmed up": lambda: fitted(
            host, Contrastive, labelled(54), max_epochs=3, strategy={"algorithm": "madpipe", "warmup_steps": 3}
        ),
        "warmed up padded": lambda: fitted(host, LanguageModel, texts(54), strategy={"warmup_steps": 3}),
        "given up": lambda: given_up(host),
        "missing later": lambda: fitted(host, Missing, later_missing(80), max_epochs=1),
        "padding later": lambda: fitted(host, MaskedByInputs, later_padding(80), max_epochs=1),
        "changing": lambda: fitted(host, Changing, labelled(64), max_epochs=3),
        "changing in warm-up": lambda: fitted(
            host, Changing, labelled(64), max_epochs=2, strategy={"warmup_steps": 7}
        ),
        "accumulated flips": lambda: fitted(
            host, FlipsAtRandom, labelled(128), max_epochs=1, accumulate_grad_batches=4
        ),
        "accumulated changing": lambda: fitted(
            host, Changing, labelled(64), max_epochs=4, accumulate_grad_batches=2
        ),
        "switched on": lambda: fitted(host, SwitchedOn, labelled(54)),
        "begun": lambda: fitted(host, Begun, labelled(64)),
        "begun elsewhere": lambda: begun_elsewhere(host),
        "clamped": lambda: fitted(host, Clamped, with_outliers(64), max_epochs=1, batch_size=4),
        "flooded": lambda: fitted(host, Flooded, labelled(64), max_epochs=1, batch_size=4),
        "hinged": lambda: fitted(host, Hinged, labelled(64), max_epochs=1, batch_size=4),
        "on both sides": lambda: fitted(host, OnBothSides, with_signs(160), max_epochs=1),
        "of features": lambda: fitted(host, OfFeatures, with_means(160), max_epochs=1),
        "by counts": lambda: fitted(host, ByCounts, with_a_common_class(160), max_epochs=1),
        "easy": lambda: fitted(host, Easy, with_outliers(64), max_epochs=1, batch_size=4),
        "scaled inputs": lambda: fitted(host, ScaledInputs, with_outliers(64), max_epochs=1, batch_size=4),
        "hardest later": lambda: fitted(host, HardestLater, labelled(96), max_epochs=1),
        "cools in step 3": lambda: fitted(host, CoolsInThird, labelled(54), max_epochs=1),
        "masks in step 3": lambda: fitted(host, MasksInThird, labelled(54), max_epochs=1),
        **{
            f"{what} in step 3": functools.partial(prepared, host, what)
            for what in ("inputs", "labels", "weights", "shifted")
        },
        **{
            f"{kind} in step 3": functools.partial(scaled, host, kind)
            for kind in ("numbers", "factors", "samples")
        },
        "named late": lambda: fitted(host, NamedLate, labelled(54), max_epochs=1),
        "returned counts": lambda: fitted(host, ReturnsCounts, labelled(54)),
        "logged late": lambda: fitted(host, LoggedLate, texts(16) * 6, max_epochs=1),
        "in place": lambda: fitted(host, InPlace, labelled(54), labelled(21, 3)),
        "in place contrastive": lambda: fitted(
            host, InPlaceContrastive, labelled(54), labelled(21, 3), max_epochs=1
        ),
        "seeded": lambda: fitted(host, Seeded, labelled(54)),
        "own generator": lambda: fitted(host, OwnGenerator, labelled(54)),
        "drawing": lambda: drawing(host, Drawing),
        "accumulated drawing": lambda: drawing(host, Drawing, accumulate_grad_batches=2),
        "drawing for samples": lambda: fitted(host, DrawingForSamples, labelled(54)),
        "cut to the longest": lambda: fitted(host, CutToLongest, texts(54), texts(22, seed=2), batch_size=8),
        "gradient later": lambda: fitted(host, GradientLater, later_inputs(80, 32), max_epochs=1),
        "infinite at first": lambda: fitted(host, InfiniteAtFirst, later_inputs(80, 16), max_epochs=1),
        "clipped": lambda: fitted(host, Contrastive, labelled(54), gradient_clip_val=0.05, strategy={"stage": 1}),
    }
    return run_chosen(runs)


def begun_elsewhere(host: Host) -> dict[str, Any]:
    """As where factors lie on a device, which are read once per batch."""
    with patch.object(loss_signs, "is_elsewhere", lambda _: True):
        return fitted(host, Begun, labelled(64))


def prepared(host: Host, what: str) -> dict[str, Any]:
    return fitted(host, lambda: PreparesInThird(what), labelled(54), max_epochs=1)


def scaled(host: Host, kind: str) -> dict[str, Any]:
    return fitted(host, lambda: ScalesInThird(kind), labelled(54), max_epochs=1)


def drawing(host: Host, build: Callable[[], Any], **arguments: Any) -> dict[str, Any]:
    OF_THE_FILE.seed(7)
    found = fitted(host, build, labelled(54), labelled(21, 3), **arguments)
    found["record"]["next"] = OF_THE_FILE.random()
    return found


def drawn_from_common(host: Host, both: bool) -> dict[str, Any]:
    module: Any = None

    def build() -> Any:
        nonlocal module
        module = DrawingFromCommon(both)
        return module

    found = fitted(host, build, labelled(32), max_epochs=1)["found"]
    return {**found, "drawn": module.drawn}


def drawn_untried(host: Host) -> dict[str, Any]:
    from deepspeed_partition.engine.runtime.collectives import gather_objects

    with listening() as said:
        data, strategy = DataLoader(labelled(16), batch_size=16), {"loss": "mean", "warmup_epochs": 0}
        trainer, module = host.trainer(max_epochs=1, strategy=strategy), seeded(DrawingUntried)
        trainer.fit(module, data, data)
        trainer.test(module, data, verbose=False)
    return {"said": sorted(each for lines in gather_objects(said) for each in lines)}


def stopping(host: Host) -> dict[str, Any]:
    from deepspeed_partition.engine.runtime.collectives import gather_objects

    with listening() as said:
        trainer, module = host.trainer(max_epochs=1, strategy={"warmup_epochs": 0}), seeded(Stopping)
        trainer.fit(module, DataLoader(labelled(32), batch_size=16))
    firsts = labelled(32).tensors[1][::4]
    assert (firsts == 0).any() and not (firsts == 0).reshape(2, 4).all(1).any()
    return {"said": [each for lines in gather_objects(said) for each in lines], "steps": trainer.global_step}


def moved(host: Host) -> dict[str, Any]:
    """After an epoch the last stage is on another rank, which has joined no outputs yet."""
    plans, devices = map_cases.plans, (0, 1, 0)
    orders = plans.gpipe(devices, map_cases.NUM_MICRO_BATCHES)
    plan = plans.plan_of(plans.chain_of(8), plans.platform_of(2), [0, 3, 6, 8], devices, orders=orders)
    moves = [Moves([plan], first=0)] if host.pipelined else []
    return fitted(host, EightFirst, texts(64), texts(32, seed=2), callbacks=moves)


def given_up(host: Host) -> dict[str, Any]:
    """Steps of a warm-up run out of memory in a first and in a later micro-batch, and run again."""
    FAILURES.left = [1, 3] if host.pipelined else []
    strategy = {"algorithm": [0, 2, 8], "warmup_steps": 4}
    found = fitted(host, HungryContrastive, labelled(54), max_epochs=2, strategy=strategy)
    if host.pipelined:
        said = [sentence for sentence in found["found"]["said"] if "ran out of memory" in sentence]
        assert len(said) in (0, 2), said  # rank 0 says them
    FAILURES.left = []
    return found


def turned(host: Host) -> dict[str, Any]:
    """What is found when, and what is drawn for each sample or for a batch."""
    long = {"max_epochs": 3, "strategy": {"algorithm": "madpipe"}}
    found = {
        "rising": fitted(host, Rising, labelled(64), **long)["found"],
        "changing": fitted(host, Changing, labelled(64), **long)["found"],
        "collecting": fitted(host, Collecting, labelled(32), max_epochs=1)["found"],
        "keeping in step 3": fitted(host, KeepsInThird, labelled(64), max_epochs=1)["found"],
        "counting marked": fitted(host, CountsMarked, marked(128), max_epochs=1)["found"],
        "keeping in large": fitted(host, KeepsInLarge, with_marks_behind(128), max_epochs=1)["found"],
        "alarmed": fitted(host, Alarmed, with_a_high_start(128), max_epochs=1)["found"],
        "marking tensors": fitted(host, MarksInTensors, marked(128), max_epochs=1)["found"],
        "denoising": fitted(host, Denoising, labelled(32), max_epochs=1)["found"],
        "drawn for a batch": drawn_from_common(host, both=False),
        "drawn for both": drawn_from_common(host, both=True),
        "drawn untried": drawn_untried(host),
        "mix-up": fitted(host, MixUp, labelled(32), max_epochs=1)["found"],
        "perceptual": fitted(host, Perceptual, labelled(32), max_epochs=1)["found"],
        "mean": fitted(host, Contrastive, labelled(32), max_epochs=1, strategy={"loss": "mean"})["found"],
        "roots": fitted(host, Roots, labelled(32), max_epochs=1)["found"],
        "stopping": stopping(host),
    }
    for record in found.values():
        record["said"] = [
            each
            for each in record["said"]
            if any(word in each for word in ("loss", "plan was made", "common random"))
        ]
    return found


def low(host: Host) -> dict[str, Any]:
    precision = {"precision": "bf16-mixed" if host.pipelined else "32-true"}
    return {
        "padded": fitted(host, LanguageModel, texts(54), texts(22, seed=2), **precision),
        "contrastive": fitted(host, Contrastive, labelled(54), labelled(21, 3), **precision),
    }


def planned(host: Host) -> dict[str, Any]:
    """A plan file that was made for 1F1B, with and without room for all micro-batches in flight."""
    from deepspeed_partition import Plan

    path = host.folder / "1f1b.json"
    fitted(host, Divided, labelled(16), max_epochs=1, strategy={"save_plan": str(path)})
    found = fitted(host, Contrastive, labelled(54), strategy={"plan": str(path)})
    alone = fitted(host, Contrastive, labelled(54))
    # In large batches activations are most of the memory, and not what the optimizer's step needs.
    large, of_large = host.folder / "large.json", {"batch_size": 256, "max_epochs": 1}
    fitted(host, Divided, labelled(256), strategy={"save_plan": str(large)}, **of_large)
    plan, tight = Plan.load(large), host.folder / f"tight-{torch.distributed.get_rank()}.json"
    smaller = replace(plan.platform, memory_bytes=max(plan.peak_memory_bytes))
    replace(plan, platform=smaller).save(tight)
    return {
        "record": found["record"],
        "alone": alone["record"],
        "said": [each for each in found["found"]["said"] if "plan's stages" in each],
        "tight": refused(
            lambda: fitted(host, Contrastive, labelled(256), strategy={"plan": str(tight)}, **of_large)
        ),
        "unknown": refused(lambda: host.trainer(strategy={"loss": "sum"})),
        "selected": refused(lambda: fitted(host, Selecting, later_chosen(32, 0), max_epochs=1)),
        "fewer later": refused(lambda: prepared(host, "fewer")),
        "selected later": refused(lambda: fitted(host, Selecting, later_chosen(64, 32), max_epochs=1)),
        "without a trial": refused(lambda: with_auxiliary(host, "auto")),
        "accepted": with_auxiliary(host, "mean")["found"]["once"],
        "sized": refused(lambda: ending_in(host, SizedScale, strategy={"loss": "batch"}, max_epochs=1)),
        "raising otherwise": refused(lambda: fitted(host, RatedByBatches, labelled(32), max_epochs=1)),
        "raising for batches": refused(lambda: fitted(host, RaisingForBatches, labelled(32), max_epochs=1)),
        "returned peak": refused(lambda: fitted(host, ReturnsPeak, labelled(32), max_epochs=1)),
        "returned peak, once": refused(
            lambda: fitted(host, ReturnsPeak, labelled(32), max_epochs=1, strategy={"loss": "batch"})
        ),
        "selected after": fitted(host, Chosen, later_chosen(64, 32), max_epochs=1)["found"]["once"],
    }


def batches_of(host: Host, samples: Any, size: int) -> DataLoader:
    """Those of a pipeline, of two; of one process those of both, by turns."""
    batches = list(DataLoader(samples, batch_size=size))
    if host.pipelined:
        batches = batches[pipeline_index(int(os.environ["RANK"])) :: 2]
    return DataLoader(batches, batch_size=None)


def replicated(host: Host) -> dict[str, Any]:
    """Two pipelines of two stages: the mean of the losses of their batches, as with Lightning's DDP."""
    arguments: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 1 if host.pipelined else 2}
    arguments["strategy"] = {"num_stages": 2, "algorithm": [0, 4, 8]}
    found = {
        "padded": fitted(host, LanguageModel, batches_of(host, texts(48), 12), **arguments),
        "contrastive": fitted(host, Contrastive, batches_of(host, labelled(48), 12), **arguments),
        "changing": fitted(host, Changing, batches_of(host, labelled(48), 12), **{**arguments, "max_epochs": 4}),
    }
    for record in found.values():
        record["record"] = {"weights": record["record"]["weights"]}
    return found


def noisy(host: Host) -> dict[str, Any]:
    """Layers that draw, with forwards that try the loss, and without."""
    return {
        loss: fitted(host, Noisy, labelled(54), strategy={"loss": loss})["record"]["rows"]
        for loss in ("auto", "mean")
    }


def means(host: Host) -> dict[str, Any]:
    """A loss that compares samples, with the mean that is asked for, and without."""
    return {
        name: found_layers(host, Towers, 32, max_epochs=1, strategy={"loss": loss})["found"]
        for name, loss in {"towers": "mean", "auto": "auto"}.items()
    }


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [losses, low], 4: [replicated]}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [turned, planned, means, noisy], 4: []}
