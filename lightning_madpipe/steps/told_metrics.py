"""Metrics that ask how often they are told, or of which samples at once, told once for a batch.

``RunningMean`` keeps a window of what it is told, ``MeanMetric`` counts each number that it is told once, and
metrics of classification take predictions for logits where one of those that they are told at once lies outside of
0 to 1. So what the micro-batches of a batch have told such a metric is joined, and the metric is told that in its
place: numbers that are the step's loss as the loss of the batch, and samples one after the other.
"""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.wrappers import Running

from deepspeed_partition.tensor_values import num_bytes_of
from lightning_madpipe.steps.batches import map_children, tensors_of
from lightning_madpipe.steps.metrics import (
    MetricValue,
    copied,
    metrics_in_containers,
    metrics_of,
    named_with_class,
)
from lightning_madpipe.steps.micro_batches import MicroBatch

MOST_BYTES = 64 * 2**20
"""Most of what a metric is told of a batch that is kept until its last micro-batch."""
SAME = 1e-6
WAY_OUT = "MadPipeStrategy(loss='batch') runs the step once per batch"
BESIDE_STATES = ("_update_count", "_computed", "_num_vals_seen")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Told:
    """What the micro-batches of one batch have told a metric."""

    before: dict[str, Any]
    """The state of the metric before the first micro-batch of the batch has told it anything, by its names."""
    calls: dict[int, list[Arguments]] = field(default_factory=lambda: defaultdict(list))
    """The arguments of the calls of the metric, by the place of the micro-batch in its batch."""
    are_scores: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """Whether all that a call has told lies within 0 to 1."""
    num_bytes: int = 0

    @property
    def num_calls(self) -> int:
        return sum(map(len, self.calls.values()))

    @property
    def is_mixed(self) -> bool:
        """Whether some micro-batches have told scores where others have told logits."""
        return any(len(set(each)) > 1 for each in zip(*self.are_scores.values(), strict=False))

    def note(
        self, place: int, arguments: tuple[Any, ...], keywords: dict[str, Any], *, may_be_scores: bool
    ) -> None:
        """Note a call in a micro-batch; without its tensors where they are too large."""
        told = _detached((arguments, keywords))
        if may_be_scores:
            self.are_scores[place].append(_are_scores(arguments, keywords))
        self.num_bytes += sum(num_bytes_of(tensor) for tensor in tensors_of(told))
        self.calls[place].append(told if self.num_bytes <= MOST_BYTES else ((None,), {}))


class ToldMetrics:
    """Tells metrics once for a batch what its micro-batches have told them.

    Args:
        module: The LightningModule.
        say: Warns of what cannot be told once.
        is_trial: Leave out the metrics that count calls: a trial looks at what these were told.
        repeating: A context in which metrics are told again what steps have told them.
    """

    def __init__(
        self,
        module: nn.Module,
        say: Callable[[str], object],
        *,
        is_trial: bool = False,
        repeating: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._module, self._say, self._is_trial, self._repeating = module, say, is_trial, repeating
        self.means: Collection[str] = ()
        """Metrics that trials have seen to be told means over samples, as they are named there."""
        self._told: dict[str, Told] = {}
        self._parts: list[MicroBatch] = []
        self._weights: dict[str, int] = {}
        """The number of times that a batch counts in a mean, by its name."""
        self._said: set[str] = set()

    def for_trial(self) -> ToldMetrics:
        """What tells metrics in a trial, which says nothing."""
        return ToldMetrics(self._module, lambda _: None, is_trial=True, repeating=self._repeating)

    @contextmanager
    def watching(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Follow what a step tells its metrics, in a micro-batch of several."""
        if micro_batch.place == 0:
            self._told, self._parts = {}, []
        self._parts.append(micro_batch)
        with ExitStack() as stack:
            for name, metric in {} if micro_batch.is_whole else self._metrics().items():
                stack.enter_context(self._followed(name, metric, micro_batch.place))
            yield

    def end(self, micro_batch: MicroBatch) -> None:
        """Behind the last micro-batch, tell metrics what the batch has told them."""
        if micro_batch.is_last:
            metrics = self._metrics() if self._told else {}
            with self._repeating():
                for name, told in self._told.items():
                    if name in metrics:
                        self._end_of(name, metrics[name], told)
            self._told, self._parts = {}, []  # they hold a batch

    def _metrics(self) -> dict[str, Metric]:
        """The metrics to look at, by their names: not those within other metrics, which tell them."""
        every = {**metrics_of(self._module), **metrics_in_containers(self._module)}
        within = {id(part) for metric in every.values() for part in metric.modules() if part is not metric}
        return {
            name: metric
            for name, metric in every.items()
            if id(metric) not in within and (not self._is_trial if _counts_calls(metric) else _classifies(metric))
        }

    @contextmanager
    def _followed(self, name: str, metric: Metric, place: int) -> Iterator[None]:
        update, depth, may_be_scores = metric.update, 0, not _counts_calls(metric)

        def note(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            if name not in self._told:
                self._told[name] = Told(_state_of(metric))
            self._told[name].note(place, arguments, keywords, may_be_scores=may_be_scores)

        def updated(*arguments: Any, **keywords: Any) -> Any:
            if depth == 0:
                note(arguments, keywords)
            return update(*arguments, **keywords)

        def enters(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            nonlocal depth
            if depth == 0:
                note(arguments, keywords)
            depth += 1

        def leaves(*_: Any) -> None:
            nonlocal depth
            depth -= 1

        handles = [
            metric.register_forward_pre_hook(enters, with_kwargs=True),
            metric.register_forward_hook(leaves, always_call=True),
        ]
        # In its table: copies of a metric leave it out, and wrap the update of its class themselves.
        vars(metric)["update"] = updated
        try:
            yield
        finally:
            vars(metric)["update"] = update
            for handle in handles:
                handle.remove()

    def _end_of(self, name: str, metric: Metric, told: Told) -> None:
        if _counts_calls(metric) or told.is_mixed:
            # A step that has reset it, or put another state into it, has done more than telling it.
            is_all = _count_of(metric, vars(metric)) == _count_of(metric, told.before) + told.num_calls
            calls = self._joined(name, metric, told) if is_all else None
            if calls is not None:
                self._tell_again(name, metric, told, calls)
            else:
                self._warn(name, metric, told)

    def _joined(self, name: str, metric: Metric, told: Told) -> list[Arguments] | None:
        """What the batch has told a metric, call by call; None where that is not known."""
        places = [part.place for part in self._parts]
        if set(told.calls) != set(places) or len({len(each) for each in told.calls.values()}) > 1:
            return None
        joined: list[Arguments] = []
        for calls in zip(*(told.calls[place] for place in places), strict=True):
            call = self._joined_call(name, metric, calls)
            if call is None:
                return None
            joined.append(call)
        return joined

    def _joined_call(self, name: str, metric: Metric, calls: Sequence[Arguments]) -> Arguments | None:
        if len({(len(arguments), tuple(sorted(keywords))) for arguments, keywords in calls}) > 1:
            return None
        if _counts_calls(metric) and all(_is_one_number(call) for call in calls):
            values = [value for arguments, keywords in calls for value in (*arguments, *keywords.values())]
            number = self._joined_number(name, metric, values)
            return None if number is None else ((number,), {})
        if isinstance(metric, MeanMetric):
            return None  # a weight beside a number, or samples, of which each counts
        arguments = [self._joined_samples(each) for each in zip(*(call[0] for call in calls), strict=True)]
        named = {key: self._joined_samples([call[1][key] for call in calls]) for key in calls[0][1]}
        return None if any(each is None for each in (*arguments, *named.values())) else (tuple(arguments), named)

    def _joined_samples(self, values: Sequence[Any]) -> Tensor | None:
        are_samples = all(
            isinstance(value, Tensor) and value.ndim > 0 and len(value) == part.size
            for value, part in zip(values, self._parts, strict=True)
        )
        return torch.cat(list(values)) if are_samples else None

    def _joined_number(self, name: str, metric: Metric, values: Sequence[Any]) -> Tensor | None:
        told = torch.stack([torch.as_tensor(value).detach().reshape(()) for value in values])
        losses = [part.loss for part in self._parts]
        sizes = torch.tensor([float(part.size) for part in self._parts])
        by_samples = sizes / sizes.sum()
        if all(_are_close(value, loss) for value, loss in zip(told, losses, strict=True)):
            shares = [part.share for part in self._parts]
            known = all(share is not None for share in shares)
            return _weighted(told, torch.tensor(shares) if known else by_samples)
        return _weighted(told, by_samples) if named_with_class(name, metric) in self.means else None

    def _tell_again(self, name: str, metric: Metric, told: Told, calls: Sequence[Arguments]) -> None:
        """Put the state of before back, and tell the metric what the batch has told it."""
        states = list(metric._defaults)
        # Metrics of a collection that have the same states share them.
        alike = [
            other
            for other in metrics_of(self._module).values()
            if other is not metric and states and all(_shares(metric, other, key) for key in states)
        ]
        for key, value in told.before.items():
            setattr(metric, key, value)
        for arguments, keywords in calls:
            metric.update(*arguments, **keywords)
        for other in alike:
            for key in (*states, *BESIDE_STATES[:2]):
                setattr(other, key, getattr(metric, key))
        self._weights.setdefault(name, 1)
        self._show(name, metric, calls)

    def _show(self, name: str, metric: Metric, calls: Sequence[Arguments]) -> None:
        """Put the value for the batch alone into the calls of ``self.log`` that show it."""
        logged = [
            log_call
            for log_call in self._parts[-1].log_calls
            if isinstance(log_call["value"], MetricValue)
            and log_call["value"].path == name
            and log_call["value"].batch_value is not None
        ]
        if logged:
            own = copied(metric)
            own.reset()
            for arguments, keywords in calls:
                own.update(*arguments, **keywords)
            own._to_sync = metric.dist_sync_on_step
            value = own.compute()
            for log_call in logged:
                log_call["value"] = log_call["value"]._replace(batch_value=value)

    def _warn(self, name: str, metric: Metric, told: Told) -> None:
        """Say that a metric, which was told by each micro-batch, may be another number for that."""
        step, shown = self._parts[0].step, named_with_class(name, metric)
        if isinstance(metric, Running):
            self._say_once(
                name,
                f"{step} tells {shown} once per micro-batch, and it keeps a window of what it is told, so that it "
                f"is another number than in one process: {WAY_OUT}",
            )
        elif not _counts_calls(metric):
            self._say_once(
                name,
                f"{step} gives {shown} logits, and it takes those of a micro-batch for probabilities where none "
                "lies outside of 0 to 1, so that it is another number than in one process: give it probabilities "
                f"(logits.softmax(1) or logits.sigmoid()), or {WAY_OUT}",
            )
        elif all(_is_one_number(call) for calls in told.calls.values() for call in calls):
            weight = self._weights.setdefault(name, told.num_calls)
            sizes = dict.fromkeys(part.size for part in self._parts)
            if len(sizes) > 1 or weight != told.num_calls:
                words = f"{' and '.join(map(str, sizes))} sample{'' if [*sizes] == [1] else 's'}"
                self._say_once(
                    name,
                    f"a batch is cut into {len(self._parts)} micro-batches of {words}, and {step} gives {shown} a "
                    "number of each. All count alike there, so that it is another number than in one process. "
                    "Give it their samples, update(loss, weight=len(y)), leave the batch out (drop_last=True), or "
                    "use MadPipeStrategy(loss='batch')",
                )

    def _say_once(self, name: str, sentence: str) -> None:
        if name not in self._said:
            self._said.add(name)
            self._say(sentence)


def _counts_calls(metric: Metric) -> bool:
    """Whether it matters to a metric how often it is told something."""
    return isinstance(metric, MeanMetric | Running)


def _classifies(metric: Metric) -> bool:
    """Whether a metric may take what it is told for logits or for scores, by their values."""
    return any(kind.__module__.startswith("torchmetrics.classification.") for kind in type(metric).__mro__)


def _are_scores(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    told = next((value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor)), None)
    told = keywords.get("preds", told)
    if not isinstance(told, Tensor) or not told.is_floating_point():
        return True
    return bool(((told >= 0) & (told <= 1)).all())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else map_children(value, _detached)


def _state_of(metric: Metric) -> dict[str, Any]:
    """What a metric is put back to: copies of its states, and what it counts."""
    table = {key: getattr(metric, key) for key in (*metric._defaults, *BESIDE_STATES) if hasattr(metric, key)}
    return {
        key: value.detach().clone()
        if isinstance(value, Tensor)
        else list(value)
        if isinstance(value, list)
        else value
        for key, value in table.items()
    }


def _count_of(metric: Metric, table: Mapping[str, Any]) -> int:
    """The number of times that a metric was told something; a Running counts itself where it is called."""
    return int(table["_num_vals_seen" if isinstance(metric, Running) else "_update_count"])


def _shares(metric: Metric, other: Metric, key: str) -> bool:
    return key in other._defaults and getattr(other, key) is getattr(metric, key)


def _is_one_number(call: Arguments) -> bool:
    values = [*call[0], *call[1].values()]
    return len(values) == 1 and (
        isinstance(values[0], numbers.Real) or (isinstance(values[0], Tensor) and values[0].ndim == 0)
    )


def _are_close(value: Tensor, loss: Tensor | None) -> bool:
    """Whether a number is a loss, which is NaN where nothing counts."""
    if loss is None:
        return False
    own, its = float(value), float(loss)
    return math.isclose(own, its, rel_tol=SAME) or (math.isnan(own) and math.isnan(its))


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """The sum of numbers, each times its weight; one without a weight, as without labels, may be NaN."""
    counts = weights.to(values.device, values.dtype if values.is_floating_point() else torch.float32)
    return (torch.where(counts == 0, torch.zeros_like(counts), values) * counts).sum()
