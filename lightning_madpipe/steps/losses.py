"""How the loss of a batch comes from the losses of its micro-batches: found by trying, and watched.

On real outputs of one batch the step runs on all of it and on each micro-batch. Where the loss of the batch is a
sum of theirs with some factors, its gradient by the outputs of a micro-batch is that of the micro-batch's own
loss times its factor: so the factors are found, and whether there are any, from gradients and values together. A
*weight* is a guess at what they are proportional to: the number of samples, of labels that are not ignored, and
so on. All weights that fit are kept, and a batch for which two of them differ is tried, too, before it trains.

Whether a weight that fitted could fail on another batch is told by *features*, shares of label values, of masks
and the like, in which any such weight is linear: what is tried holds for every batch whose micro-batches differ
only in directions in which they differed when it was tried.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_madpipe.steps.batches import named_tensors_of
from lightning_madpipe.steps.logged_sizes import LogKey
from lightning_madpipe.steps.tensor_comparison import as_real

Weight = tuple[Hashable, ...]
Vector = NDArray[numpy.float64]

SAMPLES: Weight = ("samples",)
SUM: Weight = ("sum",)
"""The weight of a loss that is a sum over the batch: each micro-batch has the factor 1."""

MOST_VALUES = 64
"""The most different values of an integer tensor in which all of them are counted; else only special ones."""
WIDEST_RANGE = 4096
MOST_ELEMENTS = 1 << 24
"""The most elements, in all micro-batches, of a tensor that is looked at in every step."""
MOST_EXTREMES = 8
"""How many different extremes of one floating tensor make a batch worth trying."""
NOT_A_NUMBER = "NaN"
COUNTED = ("labels", "rows")
"""Kinds of weights that count what is not some value."""
TOLERANCE = 1e-5


class Unknown(Enum):
    """Why a trial did not show how the loss of a batch comes from those of its micro-batches."""

    MEETS_AGAIN = "what failed in it fails where the step is trained, too"
    NO_LOSS = "the step returns no loss for it"
    NO_GRADIENT = "neither the batch nor its micro-batches have a gradient"
    NOT_FINITE = "the loss of the batch is no number"
    NO_TRIAL = "the batch as a whole cannot be tried"
    NOT_JOINED = "outputs of its micro-batches are not those of a batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What trying one batch has shown."""

    factors: Vector | None = None
    """The factor of each micro-batch in the loss of the batch; None: there are none, or they are not known."""
    why_not: str | None = None
    """Why the loss of the batch is no sum of those of micro-batches."""
    why_unknown: str | None = None
    """Why the loss of the batch could not be explained, in words; with ``unknown``."""
    unknown: Unknown | None = None
    may_not: str | None = None
    """What the step does with numbers of the batch that makes another loss of another batch, in words."""
    bends: frozenset[str] = frozenset()
    """Kinds of nodes of which micro-batches are on one side where their losses make up that of the batch."""
    raised: Exception | None = None
    """What the step raises for the batch, as in one process, where it does not raise the same for a part of it."""
    fitting: frozenset[Weight] = frozenset()
    considered: frozenset[Weight] = frozenset()
    """All weights that were guessed."""
    relative_error: float | None = None
    """The relative error of the mean over samples as the loss of the batch."""
    log_rules: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The rules of ``RULES`` by each of which a number of micro-batches, logged or returned, is right."""
    constant_sizes: tuple[LogKey, ...] = ()
    """The calls of ``self.log`` whose ``batch_size`` is the same for the batch and for its micro-batches."""
    counted_sizes: tuple[LogKey, ...] = ()
    """Those whose ``batch_size`` counts what the step was given."""
    wrong_logs: tuple[tuple[str, float, float, str], ...] = ()
    """Names that are logged with another value than that of the whole batch: name, merged, whole, how merged."""
    wrong_results: tuple[tuple[str, float, float], ...] = ()
    """Numbers that the step returns, other than for the whole batch: name, joined, whole."""
    traces: tuple[tuple[str, str], ...] = ()
    """What the step leaves on the module otherwise for micro-batches than for a batch: its name, and in words."""
    left_by: Mapping[str, str] = field(default_factory=dict)
    """What the step leaves by a decision about numbers of the whole batch, with the line that decides."""
    means: tuple[str, ...] = ()
    """Metrics that the step tells a mean over the samples of each micro-batch; it is told once for the batch."""
    draws_for_batch: bool = False
    """Whether the step draws something from torch's common generator once for a batch."""
    draws_for_samples: bool = False
    """Whether it draws something from it for each sample."""
    drawn_from: tuple[str, ...] = ()
    """The common generators that the step draws from."""
    loss_seconds: tuple[float, float] = (0.0, 0.0)
    """Seconds of the forward and of the backward of the step on the whole batch."""
    loss_bytes: int = 0
    """Bytes that the step on the whole batch keeps and makes at its peak, the joined outputs included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A step on real outputs, with the gradients of its loss by them."""

    loss: float
    gradients: tuple[Tensor | None, ...]
    passed: tuple[Any, ...]
    """What the step passed to ``forward``."""
    drawn: Mapping[str, int]
    """The states of random generators in the end, but for torch's common one, as numbers that tell."""
    log_calls: list[dict[str, Any]]
    returned: Any
    """What it returned, where somebody reads it."""
    seconds: tuple[float, float]
    """Seconds of the forward and of the backward."""
    operations: frozenset[str]
    """The names of the nodes that compute its loss."""


def factors_of(
    whole: Tried, pieces: Sequence[Tried], cut: Sequence[Sequence[Tensor | None]], tolerance: float
) -> Vector | None:
    """The factors with which the losses of micro-batches, and their gradients, make those of the batch.

    Args:
        cut: The gradients of the whole, by micro-batch.
        tolerance: Relative.

    Returns:
        None where there are none; NaN of a micro-batch without any gradient.
    """
    factors, residual, norm = [], 0.0, 0.0
    for piece, wanted in zip(pieces, cut, strict=True):
        both = [
            (as_real(theirs.detach()).double().flatten(), as_real(own.detach()).double().flatten())
            for theirs, own in zip(wanted, piece.gradients, strict=True)
            if theirs is not None and own is not None
        ]
        square = float(sum(theirs @ theirs for theirs, _ in both))
        norm += square
        own_square = float(sum(own @ own for _, own in both))
        if square == 0.0 and not (own_square > 0.0 and numpy.isfinite(own_square)):
            factors.append(numpy.nan)  # nothing in it counts, or nothing can be told
            continue
        factor = float(sum(theirs @ own for theirs, own in both)) / own_square if own_square > 0 else numpy.nan
        factors.append(factor)
        residual += float(sum(((theirs - factor * own) ** 2).sum() for theirs, own in both))
    if not norm > 0.0 or not numpy.isfinite(residual) or residual > (tolerance**2) * norm:
        return None
    return numpy.array(factors)


def shared_gradients_fit(
    whole: Tried, pieces: Sequence[Tried], dims: Sequence[int | None], factors: Vector, tolerance: float
) -> bool:
    """Whether gradients by outputs that all micro-batches share add up to the batch's, with these factors.

    Those that are nothing beside the other gradients are rounding, as of a bias before a softmax.
    """
    norms = [float(as_real(each.detach()).double().norm()) for each in whole.gradients if each is not None]
    least = min(tolerance, TOLERANCE) * max(norms, default=0.0)  # of a step in low precision that was widened, too
    for place, dim in enumerate(dims):
        wanted = whole.gradients[place]
        own = [piece.gradients[place] for piece in pieces]
        if dim is not None or (wanted is None and all(gradient is None for gradient in own)):
            continue
        parts = [
            factor * as_real(gradient.detach()).double()
            for factor, gradient in zip(factors, own, strict=True)
            if gradient is not None and factor != 0
        ]
        zero = torch.zeros((), dtype=torch.double)
        of_whole = zero if wanted is None else as_real(wanted.detach()).double()
        rest, size = sum(parts, zero) - of_whole, sum((part.norm() for part in parts), zero)
        is_nothing = math.isfinite(least) and bool(size <= least) and bool(of_whole.norm() <= least)
        if not is_nothing and not bool(rest.norm() <= tolerance * size):
            return False
    return True


def fits(factors: Vector, losses: Vector, loss: float, weights: Vector, weight: Weight, tolerance: float) -> bool:
    """Whether weights give the factors of micro-batches, and with them the loss of the batch.

    Args:
        factors: As far as gradients tell them.
        losses: Of micro-batches.
        loss: Of the batch.
    """
    expected = normalized(weights, weight)
    if expected is None:
        return False
    known = ~numpy.isnan(factors)
    if numpy.any(
        numpy.abs(factors - expected)[known] > tolerance * numpy.maximum(numpy.abs(expected), 1e-4)[known]
    ):
        return False
    parts = expected * losses
    parts[expected == 0] = 0.0  # nothing in it counts, and a mean over nothing is NaN
    return bool(abs(loss - parts.sum()) <= tolerance * (abs(loss) + numpy.abs(parts).sum()))


def normalized(weights: Vector, weight: Weight) -> Vector | None:
    """The factors of micro-batches by their weights; None where all weights are 0."""
    if weight == SUM:
        return numpy.ones(len(weights))
    total = weights.sum()
    return weights / total if total > 0 and numpy.all(numpy.isfinite(weights)) else None


def weights_of(
    views: Sequence[View], sizes: Sequence[int], class_weights: Mapping[str, Tensor]
) -> dict[Weight, Vector]:
    """Return all guesses of weights, for the micro-batches of one batch."""
    weights: dict[Weight, Vector] = {
        SAMPLES: numpy.array(sizes, dtype=float),
        SUM: numpy.ones(len(sizes)),
    }
    for view in views:
        weights.update(_weights_of_view(view, class_weights))
    return weights


def _weights_of_view(view: View, class_weights: Mapping[str, Tensor]) -> Iterator[tuple[Weight, Vector]]:
    place = view.path, view.shift
    for kind, numbers, counts in [] if view.is_floating and view.shift else view.counted:
        yield (kind, *place, None), numbers
        for value, count in counts.items():
            yield (kind, *place, value), numbers - count
    for name, per_class in () if view.is_floating else class_weights.items():
        given = _sum_of_classes(view.tensors, per_class)
        if given is not None:
            yield ("class weights", *place, name), given
    if _is_weight(view.tensors):
        yield ("sum of", *place), view.sums


def values_of(weight: Weight, weights: Mapping[Weight, Vector]) -> Vector | None:
    """A weight of each micro-batch; None where the batch has no such tensor."""
    if weight in weights or weight[0] not in COUNTED:
        return weights.get(weight)
    return weights.get((*weight[:3], None))  # the value does not occur


def still_fits(weight: Weight, fitting: frozenset[Weight], considered: frozenset[Weight]) -> bool:
    """Whether a weight explains a batch: a value that does not occur there is as good as no value."""
    if weight in considered or weight[0] not in COUNTED:
        return weight in fitting
    return (*weight[:3], None) in fitting


def best_of(fitting: frozenset[Weight]) -> Weight | None:
    """The most likely explanation."""

    def order(weight: Weight) -> tuple[Any, ...]:
        kind = weight[0]
        if weight in (SAMPLES, SUM):
            return (0 if weight == SAMPLES else 1, "")
        if kind in COUNTED:
            value = weight[3]
            is_special = value == NOT_A_NUMBER or (value is not None and value < 0)  # type: ignore[operator]
            return (2 if is_special else 5, repr(weight))
        return (3 if kind == "class weights" else 4, repr(weight))

    return min(fitting, key=order, default=None)


MOST_TIMES_OFF = 1e4
"""The relative difference from which it says nothing but that a loss is small."""


def error_in_words(error: float | None) -> str:
    """What differs between the mean over micro-batches and the loss of the batch.

    A micro-batch in which nothing counts has no number. Where the losses are the same, their gradients differ.
    """
    if error is None or not math.isfinite(error):
        return "no number, as of a micro-batch in which nothing counts"
    if error > MOST_TIMES_OFF:
        return "far off, for that of the batch is next to 0"
    shown = f"{error:.2%}"
    return "the same, and its gradient is another one" if shown == "0.00%" else f"{shown} off"


def in_words(weight: Weight) -> str:
    """What micro-batches are weighted by."""
    if weight == SUM:
        return "summed"
    if weight == SAMPLES:
        return "weighted by samples"
    kind, path, *rest = weight
    if kind in COUNTED:
        ignored = "" if rest[1] is None else f" that are not {rest[1]}"
        return f"weighted by the {'elements' if kind == 'labels' else kind} of {path}{rest[0]}{ignored}"
    if kind == "class weights":
        return f"weighted by the sum of {rest[1]} over {path}{rest[0]}"
    return f"weighted by the sum of {path}{rest[0]}"


def features_of(views: Sequence[View], sizes: Sequence[int]) -> dict[Weight, Vector]:
    """Numbers by name, per micro-batch, in which every guess is linear."""
    features: dict[Weight, Vector] = {SAMPLES: numpy.array(sizes, dtype=float)}
    for view in views:
        place = view.path, view.shift
        if view.is_floating and view.shift:
            continue
        if view.is_floating:
            features[("sum of", *place)] = numpy.nan_to_num(view.sums, posinf=0.0, neginf=0.0)
        for kind, _, counts in view.counted:
            for value, count in counts.items():
                if not view.shift or len(counts) <= 4 or value <= 0:
                    features[(kind, *place, value)] = count
    return features


class Tracked:
    """The directions in which the micro-batches of tried batches differed."""

    def __init__(self) -> None:
        self._names: dict[Weight, int] = {}
        self._scales: list[float] = []
        self._basis: list[Vector] = []

    def is_new(self, features: Mapping[Weight, Vector], weights: Vector) -> bool:
        """Whether micro-batches, with factors in these proportions, differ in another direction."""
        return any(True for _ in self._beyond(features, weights))

    def add(self, features: Mapping[Weight, Vector], weights: Vector) -> None:
        for direction in self._beyond(features, weights):
            rest = self._rest(direction)
            length = float(numpy.linalg.norm(rest))
            if length > 1e-9:
                self._basis.append(rest / length)

    def _beyond(self, features: Mapping[Weight, Vector], weights: Vector) -> Iterator[Vector]:
        counts = weights > 0
        if counts.sum() < 2:
            return
        rows = {name: values[counts] / weights[counts] for name, values in features.items()}
        for name, row in rows.items():
            if name not in self._names and self._is_worth_it(name):
                size = float(numpy.abs(row).max())
                self._names[name] = len(self._names)
                self._scales.append(size if size > 0 and numpy.isfinite(size) else 1.0)
        table = numpy.zeros((len(self._names), int(counts.sum())))
        for name in rows.keys() & self._names.keys():
            place = self._names[name]
            table[place] = rows[name] / self._scales[place]
        table -= table.mean(axis=1, keepdims=True)
        table[~(numpy.abs(table) > 1e-9)] = 0.0
        for direction in table.T:
            length = float(numpy.linalg.norm(direction))
            if length > 0 and float(numpy.linalg.norm(self._rest(direction))) > 1e-6 * length:
                yield direction

    def _is_worth_it(self, name: Weight) -> bool:
        """Whether to track this, too: where each batch has an extreme of its own, that is no sign of anything."""
        if not isinstance(name[-1], float):
            return True
        same = sum(isinstance(known[-1], float) and known[:-1] == name[:-1] for known in self._names)
        return same <= MOST_EXTREMES  # 0 is one of them

    def _rest(self, direction: Vector) -> Vector:
        rest = direction.copy()
        for known in self._basis:
            rest[: len(known)] -= (rest[: len(known)] @ known) * known
        return rest


def class_weights_of(modules: Iterator[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Find one-dimensional floating tensors outside the pipeline, which may be the weights of classes."""
    found = {}
    for path, owner in modules:
        for name, value in (*vars(owner).items(), *owner._buffers.items()):
            is_vector = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 1
            if is_vector and 2 <= value.numel() <= WIDEST_RANGE:
                found[".".join(filter(None, ("self", path, name)))] = value.detach()
    return found


@dataclass(frozen=True, eq=False)
class View:
    """A tensor of each micro-batch that labels or masks may be, whole or shifted as for the next token."""

    path: str
    shift: str
    tensors: list[Tensor]

    @property
    def is_floating(self) -> bool:
        return self.tensors[0].is_floating_point()

    @cached_property
    def sums(self) -> Vector:
        return _sums(self.tensors)

    @cached_property
    def counted(self) -> list[tuple[str, Vector, dict[Any, Vector]]]:
        """Kinds of things that a loss may leave out: how many there are in each, and how many of each value."""
        return list(_counted(self.tensors))


def views_of(pieces: Sequence[Any]) -> list[View]:
    """Return the tensors of micro-batches that labels and masks may be, whole or shifted."""
    return list(_views(pieces))


def _views(pieces: Sequence[Any]) -> Iterator[View]:
    for same in zip(*map(named_tensors_of, pieces), strict=True):
        path, tensors = same[0][0], [tensor for _, tensor in same]
        if tensors[0].ndim == 0 or sum(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
            continue
        if tensors[0].is_complex() or tensors[0].layout is not torch.strided:
            continue
        yield View(path, "", tensors)
        if tensors[0].ndim >= 2 and tensors[0].shape[1] > 1:
            yield View(path, "[:, 1:]", [tensor[:, 1:] for tensor in tensors])
            yield View(path, "[:, :-1]", [tensor[:, :-1] for tensor in tensors])


def _counted(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Vector, dict[Any, Vector]]]:
    numbers = numpy.array([tensor.numel() for tensor in tensors], dtype=float)
    if not tensors[0].is_floating_point():
        yield "labels", numbers, dict(_counts(tensors))
        return
    values = _float_counts(tensors)
    yield "labels", numbers, values
    # Whole rows are left out by masks such as x.abs().sum(-1) > 0, or isnan().any(-1).
    length = tensors[0].shape[-1]
    if tensors[0].ndim < 2 or length < 2:
        return
    rows: dict[Any, Vector] = {}
    if 0.0 in values:
        rows[0.0] = _vector((tensor == 0).all(-1).sum() for tensor in tensors)
    if NOT_A_NUMBER in values:
        rows[NOT_A_NUMBER] = _vector(tensor.isnan().any(-1).sum() for tensor in tensors)
    yield "rows", numbers / length, rows


def _float_counts(tensors: Sequence[Tensor]) -> dict[Any, Vector]:
    """Count NaN, 0 and extremes that are no coincidence in each tensor: targets that are missing."""
    counts: dict[Any, Vector] = {
        NOT_A_NUMBER: _vector(tensor.isnan().sum() for tensor in tensors),
        0.0: _vector(tensor.numel() - tensor.count_nonzero() for tensor in tensors),
    }
    ends = [end for tensor in tensors if tensor.numel() for end in tensor.aminmax()]
    known = [end for end in (torch.stack(ends).tolist() if ends else []) if end == end]
    for value in {min(known), max(known)} - {0.0} if known else ():
        counts[value] = _vector((tensor == value).sum() for tensor in tensors)
    return {value: count for value, count in counts.items() if count.sum() > (value not in (0.0, NOT_A_NUMBER))}


def _vector(numbers: Iterable[Tensor]) -> Vector:
    return torch.stack(list(numbers)).cpu().double().numpy()


def _counts(tensors: Sequence[Tensor]) -> dict[int, Vector]:
    """Count how often each value stands in each tensor; of many values only those that may be special."""
    low = min(int(tensor.min()) for tensor in tensors if tensor.numel()) if any(t.numel() for t in tensors) else 0
    high = max((int(tensor.max()) for tensor in tensors if tensor.numel()), default=0)
    if high - low < WIDEST_RANGE:
        table = torch.stack(
            [torch.bincount(tensor.reshape(-1).long() - low, minlength=high - low + 1) for tensor in tensors]
        ).cpu()
        present = table.any(dim=0).nonzero().flatten().tolist()
        if len(present) <= MOST_VALUES:
            return {low + place: table[:, place].double().numpy() for place in present}
    special = {value for value in (0, -1, -100) if low <= value <= high}
    for tensor in tensors:
        negative = tensor[tensor < 0]
        if negative.numel():
            special.update(negative.unique()[:MOST_VALUES].tolist())
        if tensor.ndim >= 2 and tensor.shape[-1] >= 2:
            for first, second in ((0, 1), (-1, -2)):  # what stands there twice may fill up short rows
                repeated = tensor[..., first][tensor[..., first] == tensor[..., second]]
                if repeated.numel():
                    special.update(repeated.unique()[:MOST_VALUES].tolist())
    return {
        value: numpy.array([int((tensor == value).sum()) for tensor in tensors], dtype=float)
        for value in sorted(special)
    }


def _sum_of_classes(tensors: Sequence[Tensor], per_class: Tensor) -> Vector | None:
    if any(not tensor.numel() or int(tensor.max()) >= max(len(per_class), 256) for tensor in tensors):
        return None
    if any(tensor.dtype == torch.bool for tensor in tensors):
        return None
    sums = []
    for tensor in tensors:
        labels = tensor.reshape(-1).long()
        labels = labels[(labels >= 0) & (labels < len(per_class))]
        sums.append(float(per_class.to(labels.device).double()[labels].sum()))
    return numpy.array(sums)


def _is_weight(tensors: Sequence[Tensor]) -> bool:
    return all(bool((tensor >= 0).all()) for tensor in tensors if tensor.numel())


def _sums(tensors: Sequence[Tensor]) -> Vector:
    return torch.stack([tensor.double().sum() for tensor in tensors]).cpu().numpy()
