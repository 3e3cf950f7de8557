"""The loss, the logs and the output of a Lightning batch, from those of its micro-batches."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_madpipe.steps.batches import is_fraction, is_number, join_pieces
from lightning_madpipe.steps.logged_sizes import LoggedSizes, LogKey
from lightning_madpipe.steps.metrics import MetricValue
from lightning_madpipe.steps.micro_batches import LogCall, MicroBatch

RULES = ("samples", "loss", "sum")
"""How logged means, and numbers that a step returns, are merged: weighted by samples, or as the
loss is, or summed; the likeliest comes first."""


class StepResult(NamedTuple):
    """What the last stage tells the other ranks about one Lightning batch."""

    loss: float | None
    log_calls: list[LogCall]
    returned: Any


def result_of(
    micro_batches: Sequence[MicroBatch],
    log_rules: Mapping[str, str] | None = None,
    logged_sizes: LoggedSizes | None = None,
) -> StepResult:
    """The loss, the logs and the output of a Lightning batch from those of its micro-batches.

    Means are weighted by the micro-batches' sizes, so they are those of the whole batch; where
    ``reduce_fx`` is sum, min or max, that is applied.

    Args:
        log_rules: Of logged numbers that are merged otherwise, see :func:`merged_logs`, and of returned ones, by
            :func:`result_name`.
        logged_sizes: What is known of the ``batch_size`` that the step logs with.

    Raises:
        ValueError: somebody reads what the step returns, and it cannot be joined.
    """
    with_loss = [micro_batch for micro_batch in micro_batches if micro_batch.loss is not None]
    losses = _as_floats([micro_batch.loss for micro_batch in with_loss])
    loss = _weighted_sum(losses, _shares_of(with_loss)) if losses else None
    log_calls = merged_logs(micro_batches, log_rules or {}, logged_sizes)
    return StepResult(loss, log_calls, _joined_output(micro_batches, log_rules or {}))


def _joined_output(micro_batches: Sequence[MicroBatch], rules: Mapping[str, str]) -> Any:
    first = micro_batches[0]
    if not first.keeps_returned:
        return None
    if len(micro_batches) == 1:
        return first.returned
    pieces, sizes = zip(*((piece.returned, piece.size) for piece in micro_batches), strict=True)
    where, shares = f"what {first.step} returns", _shares_of(micro_batches)
    of_rule: dict[str, list[float]] = {"sum": [1] * len(shares), "loss": shares}
    factors = {
        f"{where}{name.removeprefix(RETURNED)}": of_rule[rule]
        for name, rule in rules.items()
        if name.startswith(RETURNED) and rule in of_rule
    }
    return join_pieces(pieces, sizes, where, mean=first.step != "predict_step", factors=factors)


RETURNED = "returned "


def result_name(place: str) -> str:
    """The name of a number that a step returns, among those of what it logs."""
    return f"{RETURNED}{place}"


def does_with(name: str) -> str:
    """What a step does with a number, by its name, in words."""
    return f"returns {name.removeprefix(RETURNED)}" if name.startswith(RETURNED) else f"logs {name!r}"


def merged_results(micro_batches: Sequence[MicroBatch], rule: str) -> dict[str, float]:
    """The numbers beside the loss that a step returns, merged by a rule; NaN where it gives none.

    A whole number that is not the same for all micro-batches has no mean.
    """
    each = [_numbers_returned(micro_batch.returned) for micro_batch in micro_batches]
    sizes, shares = [micro_batch.size for micro_batch in micro_batches], _shares_of(micro_batches)
    merged = {}
    for place, first in each[0].items():
        values = [float(numbers.get(place, math.nan)) for numbers in each]
        if rule == "samples":
            is_mean = is_fraction(first) or len(set(values)) == 1
            merged[place] = _weighted_mean(values, sizes) if is_mean else math.nan
        elif rule == "loss":
            merged[place] = _weighted_sum(values, shares) if is_fraction(first) else math.nan
        else:
            is_truth = isinstance(first, bool | numpy.bool_) or getattr(first, "dtype", None) == torch.bool
            merged[place] = math.nan if is_truth else sum(values)
    return merged


def names_of_numbers(log_calls: Sequence[LogCall], returned: Any) -> set[str]:
    """The names of what a step logs, but for metrics, and of the numbers beside the loss that it returns."""
    logged = {call["name"] for call in log_calls if not isinstance(call["value"], MetricValue)}
    return logged | {result_name(place) for place in returned_numbers(returned)}


def returned_numbers(returned: Any) -> dict[str, float]:
    """The numbers beside the loss that a step returns, by where they stand."""
    return {place: float(value) for place, value in _numbers_returned(returned).items()}


def _numbers_returned(returned: Any) -> dict[str, Any]:
    return dict(_numbers_in(returned, "")) if isinstance(returned, Mapping) else {}


def _numbers_in(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if place or name != "loss":
                yield from _numbers_in(item, f"{place}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers_in(item, f"{place}[{index}]")
    elif is_number(value):
        yield place, value


def means_of(log_calls: Sequence[LogCall], returned: Any, names: Collection[str]) -> list[tuple[str, float]]:
    """The numbers with these names that a step logs to be averaged, and that it returns."""
    calls = [call for call in log_calls if call["name"] in names and _is_mean(call)]
    plain = [call for call in calls if not isinstance(call["value"], MetricValue)]
    values = _as_floats([call["value"] for call in plain])
    logged = zip((call["name"] for call in plain), values, strict=True)
    results = ((result_name(place), value) for place, value in returned_numbers(returned).items())
    return [*logged, *((name, value) for name, value in results if name in names)]


def merged_logs(
    micro_batches: Sequence[MicroBatch],
    rules: str | Mapping[str, str] = "samples",
    logged_sizes: LoggedSizes | None = None,
) -> list[LogCall]:
    """The log calls of a batch from those of its micro-batches.

    Args:
        rules: How means are merged, one for all or by name: weighted by ``samples``, which is the default, or as
            the ``loss`` is; or as a ``sum``.
        logged_sizes: What is known of each ``batch_size`` from the batches before; None: nothing.

    Returns:
        Calls with a ``batch_size`` where the step gives one.
    """
    logged_sizes = LoggedSizes() if logged_sizes is None else logged_sizes
    # The k-th call with a name is merged with the k-th call of the other micro-batches.
    same: dict[tuple[str, int], list[tuple[LogCall, int]]] = defaultdict(list)
    shares = _shares_of(micro_batches)
    for micro_batch in micro_batches:
        seen: Counter[str] = Counter()
        for log_call in micro_batch.log_calls:
            same[log_call["name"], seen[log_call["name"]]].append((log_call, micro_batch.size))
            seen[log_call["name"]] += 1
    plain = [calls for calls in same.values() if not isinstance(calls[0][0]["value"], MetricValue)]
    floats = iter(_as_floats([log_call["value"] for calls in plain for log_call, _ in calls]))
    merged = []
    for key, calls in same.items():
        if isinstance(calls[0][0]["value"], MetricValue):
            merged.append(calls[-1][0])  # the last micro-batch's knows the value of the batch
            continue
        sizes, given = [size for _, size in calls], [_plain(log_call.get("batch_size")) for log_call, _ in calls]
        values = [next(floats) for _ in calls]
        first = calls[0][0]
        weights = logged_sizes.weights(key, given, sizes, matters=_is_mean(first) and bool(first.get("on_epoch")))
        rule = rules if isinstance(rules, str) else rules.get(first["name"], "samples")
        if len(calls) == len(shares) and rule != "samples" and _is_mean(first):
            value = _weighted_sum(values, shares if rule == "loss" else [1.0] * len(values))
        else:
            value = _reduced(first, values, weights.of_pieces)
        # Without one Lightning looks at the batch, whose weight in a mean need not be its number of samples.
        of_batch = {"batch_size": weights.of_batch} if any(given) else {}
        merged.append({**first, "value": value, **of_batch})
    return merged


def sizes_logged(log_calls: Sequence[LogCall]) -> Iterator[tuple[LogKey, int]]:
    """The ``batch_size`` of each call that has one."""
    seen: Counter[str] = Counter()
    for log_call in log_calls:
        key = log_call["name"], seen[log_call["name"]]
        seen[log_call["name"]] += 1
        if log_call.get("batch_size"):
            yield key, _plain(log_call["batch_size"])


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, Tensor) else number


def _is_mean(log_call: LogCall) -> bool:
    return rule_of(log_call) == "mean"


def rule_of(log_call: LogCall) -> str:
    """How values of micro-batches are merged if nothing else is found: ``mean``, ``sum``, ``min`` or ``max``."""
    reduce_fx = log_call.get("reduce_fx", "mean")
    name = reduce_fx.lower() if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    # What Lightning doesn't know, it refuses when the merged value is logged.
    return name if name in ("sum", "min", "max") else "mean"


def _reduced(log_call: LogCall, values: Sequence[float], weights: Sequence[int]) -> float:
    plain: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "min": min, "max": max}
    rule = rule_of(log_call)
    return plain[rule](values) if rule in plain else _weighted_mean(values, weights)


def _shares_of(micro_batches: Sequence[MicroBatch]) -> list[float]:
    """The share of each micro-batch's loss in that of the batch."""
    total = sum(micro_batch.size for micro_batch in micro_batches)
    return [each.size / total if each.share is None else each.share for each in micro_batches]


def _weighted_sum(values: Sequence[float], shares: Sequence[float]) -> float:
    # A micro-batch in which no label counts has no loss: a mean over nothing is NaN.
    return sum(value * share for value, share in zip(values, shares, strict=True) if share)


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _as_floats(values: Sequence[Any]) -> list[float]:
    """Tensors and numbers as floats, in one copy from each device: a step may log some of the CPU."""
    on_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for value in values:
        if isinstance(value, Tensor):
            on_device[value.device].append(value.double())
    floats = {device: iter(torch.stack(tensors).tolist()) for device, tensors in on_device.items()}
    return [next(floats[value.device]) if isinstance(value, Tensor) else float(value) for value in values]
