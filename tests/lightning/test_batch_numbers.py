"""A loss that bends at a number of the whole batch is told from one that is a mean in every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_madpipe.steps.batch_runs import BatchRun
from lightning_madpipe.steps.batches import size_of, split_batch
from lightning_madpipe.steps.losses import Finding
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.trials import try_batch
from lightning_madpipe.steps.user_step import UserSteps

Loss = Callable[[Tensor, Tensor], Tensor]
NUM_CLASSES, NUM_SAMPLES = 5, 12
WEIGHTS = torch.tensor([1.0, 3.0, 0.2, 7.0, 1.0])
SCALE = nn.Parameter(torch.tensor(2.0))


class Module(pl.LightningModule):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.weight = loss, WEIGHTS

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x), y)


def micro_batches(batch: Any, *, uneven: bool) -> list[MicroBatch]:
    known: dict[str, Any] = {"step": "training_step", "arguments": (0,), "batch_seed": 0}
    pieces = split_batch(batch, 4, uneven=uneven)
    return [
        MicroBatch(data=piece, size=size_of(piece, 4), seed=place, place=place, **known)
        for place, piece in enumerate(pieces)
    ]


def finding_of(loss: Loss | Module, outputs: Tensor | None = None, labels: Sequence[int] | None = None) -> Finding:
    """What a trial of one batch finds, of 12 samples in four micro-batches, whose outputs are those given."""
    module = loss if isinstance(loss, Module) else Module(loss)
    generator = torch.Generator().manual_seed(0)
    if outputs is None:
        outputs = torch.randn(NUM_SAMPLES, NUM_CLASSES, generator=generator)
    y = torch.arange(NUM_SAMPLES) * 7 % NUM_CLASSES if labels is None else torch.tensor(labels)
    batch = torch.arange(float(NUM_SAMPLES))[:, None], y
    parts = micro_batches(batch, uneven=True)
    run = BatchRun(parts, replace(parts[0], data=batch, size=NUM_SAMPLES))
    run.trained_as = micro_batches(batch, uneven=False)
    run.begin()
    for rows in outputs.split([part.size for part in parts]):
        run.collect((rows.clone().requires_grad_(),))
    steps = UserSteps(module, "forward")
    with steps.rehearsal():
        return try_batch(steps, module, run, False, compares=True)


def one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, NUM_CLASSES).float()


def focal(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).mean()


def triplet(o: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(o, o.flip(1), o.roll(1, 1), margin=0.3)


def masked(o: Tensor, y: Tensor) -> Tensor:
    mask = (y != 0).float()
    return (F.cross_entropy(o, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def masked_if_any(o: Tensor, y: Tensor) -> Tensor:
    mask = y != 0
    if mask.sum() > 0 and mask.any() and int(mask.sum()) >= 1:
        return F.cross_entropy(o[mask], y[mask])
    return o.sum() * 0


def guarded(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    if torch.isnan(loss) or not torch.isfinite(loss) or torch.isinf(o).any() or loss != loss:
        return loss * 0
    return loss


def logged(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    seen = [loss.item(), float((o.argmax(1) == y).float().mean()), o.abs().max().item(), int((y == 1).sum())]
    is_better, _ = loss < 0.5, [number > 0.5 for number in seen]
    assert is_better is not None
    return loss


def one_by_one(o: Tensor, y: Tensor) -> Tensor:
    losses = []
    for row, label in zip(o, y, strict=True):
        loss = F.cross_entropy(row, label).clamp(max=2)
        losses.append(loss * 2 if loss > 1.5 and label.item() > 1 else loss)
    return torch.stack(losses).mean()


def of_counted_rows(o: Tensor, y: Tensor) -> Tensor:
    rows = (y != 0).nonzero().flatten()
    if len(rows) == 0:
        return o.sum() * 0
    return F.cross_entropy(o[rows], y[rows], reduction="sum") / len(rows)


def ctc(o: Tensor, y: Tensor) -> Tensor:
    length = torch.full((len(o),), 4)
    rows = o[None].repeat(4, 1, 1).log_softmax(-1)
    return F.ctc_loss(rows, y[:, None].clamp(min=1), length, length * 0 + 1, zero_infinity=True)


MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "summed": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "of each": lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    "ignoring": lambda o, y: F.cross_entropy(o, y, ignore_index=0),
    "class weights": lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS),
    "smoothed labels": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "squared": lambda o, y: F.mse_loss(o, one_hot(y)),
    "absolute": lambda o, y: F.l1_loss(o, one_hot(y)),
    "smooth": lambda o, y: F.smooth_l1_loss(o, one_hot(y)),
    "Huber": lambda o, y: F.huber_loss(o, one_hot(y)),
    "binary": lambda o, y: F.binary_cross_entropy(o.sigmoid(), one_hot(y)),
    "binary of logits": lambda o, y: F.binary_cross_entropy_with_logits(o, one_hot(y), pos_weight=WEIGHTS),
    "focal": focal,
    "Kullback-Leibler": lambda o, y: F.kl_div(o.log_softmax(1), one_hot(y) * 0.9 + 0.02, reduction="batchmean"),
    "CTC": ctc,
    "cosine": lambda o, y: F.cosine_embedding_loss(o, o.flip(1), (y > 1) * 2.0 - 1),
    "similar": lambda o, y: (1 - F.cosine_similarity(o, one_hot(y))).mean(),
    "triplet": triplet,
    "hinge": lambda o, y: F.multi_margin_loss(o, y),
    "GAN hinge": lambda o, y: F.relu(1 - o[:, 0]).mean() + F.leaky_relu(o[:, 1], 0.2).mean(),
    "clamped by sample": lambda o, y: F.cross_entropy(o, y, reduction="none").clamp(max=2).mean(),
    "PPO by sample": lambda o, y: (
        -torch.min(o[:, 0].exp() * (y - 2), o[:, 0].exp().clamp(0.8, 1.2) * (y - 2)).mean()
    ),
    "normalized": lambda o, y: F.cross_entropy(F.normalize(o, dim=1) * SCALE.clamp(max=100), y),
    "two terms": lambda o, y: F.cross_entropy(o[:, :4], y.clamp(max=3)) + 0.1 * F.relu(o).mean(),
    "regularized": lambda o, y: F.cross_entropy(o * SCALE, y) + SCALE.abs() + F.relu(SCALE - 1),
    "masked": masked,
    "masked if any": masked_if_any,
    "guarded": guarded,
    "guarded otherwise": lambda o, y: F.cross_entropy(o, y) if torch.isfinite(o.mean(0)).all() else o.sum() * 0,
    "logged": logged,
    "one by one": one_by_one,
    "of counted rows": of_counted_rows,
    "divided by a number": lambda o, y: (
        F.cross_entropy(o, y, ignore_index=0, reduction="sum") / max(1, int((y != 0).sum()))
    ),
}
"""Losses that are sums over samples in every batch, weighted by something or not."""


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_a_mean_in_every_batch_stays_one(name: str) -> None:
    found = finding_of(MEANS[name])
    assert (found.why_not, found.why_unknown, found.may_not) == (None, None, None)
    assert found.fitting and not found.bends


TOLD_BY_SIDES: dict[str, Loss] = {
    "clamped": lambda o, y: F.cross_entropy(o, y).clamp(max=90.0),
    "flooded": lambda o, y: (F.cross_entropy(o, y) - 0.01).abs() + 0.01,
    "hinged": lambda o, y: F.cross_entropy(o, y) + F.relu(o.mean() - 9),
    "largest": lambda o, y: torch.maximum(F.cross_entropy(o, y), o.mean()),
    "chosen": lambda o, y: torch.where(torch.isfinite(o.mean()), F.cross_entropy(o, y), 0.0),
}
"""Of these it is enough to see whether all micro-batches are on one side."""


@pytest.mark.parametrize("name", TOLD_BY_SIDES)
def test_a_bend_of_a_mean_is_watched(name: str) -> None:
    """The trial of such a batch shows nothing, and in that of a threshold the loss is none."""
    found = finding_of(TOLD_BY_SIDES[name])
    assert found.fitting and found.bends and found.may_not is None


def ranked(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) + torch.stack([o.mean(), o[:, 0].mean() - 9]).max()


def scaled_if_common(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * (2 if (y == 0).sum() >= 4 else 1)


def scaled_if_counted(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * (2 if int((y == 0).sum()) > 4 else 1)


def scaled_if_high(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return loss if loss.item() < 20 else loss * 0.5


def scaled_by_classes(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * (2 if len(y.unique()) > 6 else 1)


def scaled_by_rows(o: Tensor, y: Tensor) -> Tensor:
    rows = o[y == 3]
    return F.cross_entropy(o, y) * (2 if rows.shape[0] > 6 else 1)


def scaled_by_the_last_of_several(o: Tensor, y: Tensor) -> Tensor:
    seen = [(y == label).sum().item() for label in range(5)]
    return F.cross_entropy(o, y) * (2 if seen and (y == 3).nonzero().numel() > 6 else 1)


def of_easy_ones(o: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    mask = (each < 20).float()
    return (each * mask).sum() / mask.sum().clamp(min=1)


def by_largest(o: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return loss / max(50.0, float(loss))


BENT: dict[str, Loss] = {
    "features": lambda o, y: F.cross_entropy(o, y) + F.relu(o.mean(0) - 9).sum(),
    "deviations": lambda o, y: F.cross_entropy(o, y) + F.relu(o.std(0) - 9).sum(),
    "a norm": lambda o, y: F.cross_entropy(o, y) + F.relu(o.norm() - 90),
    "free bits": lambda o, y: F.cross_entropy(o, y) + o.square().mean(0).clamp(min=9).sum(),
    "smooth": lambda o, y: F.cross_entropy(o, y) + F.smooth_l1_loss(o.mean() + 9, torch.tensor(0.0)),
    "no numbers": lambda o, y: torch.nan_to_num(F.cross_entropy(o, y)),
    "elu": lambda o, y: F.elu(F.cross_entropy(o, y)),
    "ranked": ranked,
    "both": lambda o, y: F.relu(F.relu(o).mean() + 9),
    "common": scaled_if_common,
    "counted": scaled_if_counted,
    "high": scaled_if_high,
    "classes": scaled_by_classes,
    "rows": scaled_by_rows,
    "the last of several": scaled_by_the_last_of_several,
    "multiplied": lambda o, y: F.cross_entropy(o, y) * (1 + (o.mean() > 9).float()),
    "filled": lambda o, y: F.cross_entropy(o, y).masked_fill(o.max() > 99, 0.0),
    "of easy ones": of_easy_ones,
    "by the largest": by_largest,
    "weighted": lambda o, y: F.cross_entropy(o, y) * F.cross_entropy(o, y).detach().clamp(min=9),
    "imbalanced": lambda o, y: F.cross_entropy(o, y) * (1 + F.relu((y == 0).float().mean() - 0.9)),
    "lower": lambda o, y: min(F.cross_entropy(o, y), o.sum() + 1e4),
    "chosen by a count": lambda o, y: torch.where((y == 0).sum() > 3, 2.0, 1.0) * F.cross_entropy(o, y),
}
"""Losses that are means in the batch that is tried, and none in others: by vectors, norms, counts and branches."""


@pytest.mark.parametrize("name", BENT)
def test_a_loss_that_may_be_no_mean_of_another_batch_is_told(name: str) -> None:
    """Each was trained as the mean over micro-batches, in silence, in the batches where it was none."""
    found = finding_of(BENT[name])
    assert found.fitting and found.why_not is None
    assert found.may_not is not None and "test_batch_numbers.py:" in found.may_not


class Leaving(Module):
    """Leaves something where its batch says so, and nothing in the batch that is tried."""

    def __init__(self, leave: Callable[[Leaving, Tensor, Tensor], object]) -> None:
        super().__init__(self.loss_of)
        self.leave = leave
        self.alarm, self.last, self.kept, self.seen = -1, 0.0, [0.5], torch.zeros(1000)

    def loss_of(self, o: Tensor, y: Tensor) -> Tensor:
        self.leave(self, o, y)
        return F.cross_entropy(o, y)

    def note(self, name: str, is_wanted: object) -> None:
        if is_wanted:
            setattr(self, name, 3)


LEAVES: dict[str, Callable[[Leaving, Tensor, Tensor], object]] = {
    "alarm": lambda self, o, y: self.note("alarm", F.cross_entropy(o, y).item() > 9),
    "kept": lambda self, o, y: F.cross_entropy(o, y) > 9 and self.kept.append(3.0),
    "seen": lambda self, o, y: (y == 3).sum().item() > 6 and self.seen[3].fill_(1.0),
    "last": lambda self, o, y: self.note("last", len(y.unique()) > 6),
}


@pytest.mark.parametrize("name", LEAVES)
def test_what_a_number_of_the_batch_decides_to_leave_is_told(name: str) -> None:
    """Where only the first micro-batch, or a list, or a large tensor had it, nothing was said."""
    found = finding_of(Leaving(LEAVES[name]))
    assert found.fitting and found.may_not is None and not found.traces
    assert list(found.left_by) == [f"self.{name}"] and "test_batch_numbers.py:" in found.left_by[f"self.{name}"]


def keep_numbers(self: Leaving, o: Tensor, y: Tensor) -> None:
    self.kept.append(F.cross_entropy(o, y).item())
    self.last += (o.argmax(1) == y).sum().item()
    if torch.isfinite(o).all():
        self.alarm = 3


def test_numbers_of_the_batch_that_are_kept_decide_nothing() -> None:
    assert finding_of(Leaving(keep_numbers)).left_by == {}


def test_a_trial_takes_the_micro_batches_that_are_trained() -> None:
    """The first sample alone is clamped. Beside three others, in an uneven cut, it was not."""
    outputs = torch.zeros(NUM_SAMPLES, NUM_CLASSES)
    outputs[0, 1] = 14.0
    found = finding_of(lambda o, y: F.cross_entropy(o, y).clamp(max=5.2), outputs, [0] * NUM_SAMPLES)
    assert found.why_not is not None
