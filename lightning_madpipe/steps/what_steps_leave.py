"""What a step leaves on its module when it runs once for a batch, beside what its micro-batches leave together.

Entries of a list are one for each run of the step, and so is what a metric is told of a loss. Where the batch and
its micro-batches leave the same, as predictions do that a hook joins, nothing is said.
"""

from __future__ import annotations

import dis
import itertools
import math
import numbers
from array import array
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric

from deepspeed_partition.code_names import CodeSearch
from deepspeed_partition.raw_states import RawState
from lightning_madpipe.steps import left_alike
from lightning_madpipe.steps.hooks_of_program import hooks_of_program
from lightning_madpipe.steps.metrics import copied, metrics_in_containers, metrics_of, named_with_class
from lightning_madpipe.steps.tensor_comparison import as_real

CLOSE = 1e-4
MOST_NAMED = 4
JOINS = frozenset(("cat", "chain", "concat", "concatenate", "from_iterable", "hstack", "vstack"))
"""Functions for which it is the same in how many pieces a list has its numbers."""

FILLS = ("append", "clear", "extend")
"""Methods of a list that give nothing of what is in it."""

Numbers = dict[str, Tensor]
"""The numbers in a value, one after the other, by the keys that lead to them."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What one attribute has become, or what a list has gained."""

    num_entries: int | None
    """Entries that a list has gained; None for anything else."""
    numbers: Numbers


class StepTraces:
    """The traces of the steps that run from now on, within a rehearsal.

    Args:
        steps: Runs the user's steps.
        module: The LightningModule.
    """

    def __init__(self, steps: Any, module: nn.Module) -> None:
        self._steps, self._metrics = steps, {**metrics_of(module), **metrics_in_containers(module)}
        # One that has been told something before would dilute what this batch tells it.
        self._fresh = {name for name, metric in self._metrics.items() if not metric.update_called}
        self._before = steps.leftovers(undoable=True)
        self._module = module
        self._means: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.changes: list[Any] = []
        """All that was changed by what was taken, but for the states of metrics."""
        self.going_on: set[Any] = set()
        """The places that micro-batches behind the first one go on changing, such as a sum."""
        self.gained: dict[str, int] = {}
        """How many numbers and texts lists have gained by what was taken last."""
        self._of_first: dict[Any, Any] | None = None
        self.losses: Sequence[float] = ()
        """Those of the micro-batches that are noted."""

    def taken(self) -> dict[str, Trace]:
        """The traces since the beginning, which are then undone."""
        changes = self._before.changes()
        self._steps.untried("training_step", changes)
        self.changes += [change for change in changes if change.place.owner not in self._metrics]
        self.going_on |= {change.place for change in changes if self._goes_on(change)}
        self._of_first = None
        counts = {str(change.place): left_alike.gained(change) for change in changes}
        self.gained = {name: count for name, count in counts.items() if count is not None}
        return self._traces_of(changes)

    def _goes_on(self, change: Any) -> bool:
        if self._of_first is None or left_alike.gained(change) is not None:
            return False
        now = left_alike.shown(change)
        return change.place not in self._of_first or left_alike.go_on(self._of_first[change.place], now)

    def taken_apart(self) -> dict[str, Trace]:
        """The traces of a run that shows nothing of what batches leave, which are then undone."""
        return self._traces_of(self._before.changes())

    def _traces_of(self, changes: Sequence[Any]) -> dict[str, Trace]:
        found = {}
        for change in changes:
            if change.place.owner not in self._metrics and change.kind != "delete":
                gained = len(change.value) if change.kind in ("extend", "continues") else None
                found[str(change.place)] = Trace(gained, numbers_of(change.value))
        for name, metric in self._metrics.items():
            if name in self._fresh and metric.update_called:
                found[named_with_class(name, metric)] = Trace(None, numbers_of(_value_of(metric)))
        self._before.undo()
        return found

    def is_joined(self, name: str) -> bool:
        """Whether a step or a hook that reads a list joins what is in lists, as by ``torch.cat``."""
        key = name.rpartition(".")[2]
        for _, owner, function in hooks_of_program(self._module):
            search = CodeSearch(self._steps.beside.is_programs)
            search.read(function, type(owner))
            if JOINS.isdisjoint(search.written):
                continue
            # A step that fills the list may join something else.
            if any(_reads_entries(each.__code__, key) for each in search.functions):
                return True
        return False

    def note(self, size: int) -> None:
        """Note what there is after the step of a micro-batch of so many samples."""
        if self._of_first is None:
            self._of_first = {change.place: left_alike.shown(change) for change in self._before.changes()}
        for name, metric in self._metrics.items():
            if isinstance(metric, MeanMetric) and name in self._fresh and metric.update_called:
                self._means[named_with_class(name, metric)].append((size, float(metric.mean_value.sum())))

    def is_mean_over(self, name: str, whole: Trace) -> bool:
        """Whether a mean of numbers of micro-batches of one size would be that of the batch."""
        sizes, sums = zip(*self._means.get(name, [(1, math.nan)]), strict=True)
        mean = numpy.average(numpy.diff(sums, prepend=0.0), weights=sizes)
        return bool(numpy.allclose(mean, float(whole.numbers.get("", torch.tensor([math.nan]))[0]), rtol=CLOSE))

    def is_told_again(self, name: str, whole: Trace) -> bool:
        """Whether a mean is told once for the batch what its micro-batches have told it: losses, or means."""
        sums = [told for _, told in self._means.get(name, ())]
        is_loss = len(sums) == len(self.losses) and numpy.allclose(
            numpy.diff(sums, prepend=0.0), self.losses, rtol=CLOSE
        )
        return is_loss or self.is_mean_over(name, whole)

    def means_over(self, left: Mapping[str, Trace]) -> list[str]:
        """The metrics that are told one number for each micro-batch, which count alike whatever the sizes."""
        return [name for name in self._means if name in left and self.is_mean_over(name, left[name])]


def _reads_entries(code: CodeType, key: str) -> bool:
    """Whether code reads what is in an attribute, or a global, and does not only fill or clear it."""
    instructions = list(dis.get_instructions(code))
    behind = (*instructions[1:], None)
    return any(
        each.opname.startswith("LOAD") and each.argval == key and (after is None or after.argval not in FILLS)
        for each, after in zip(instructions, behind, strict=True)
    ) or any(_reads_entries(inner, key) for inner in code.co_consts if isinstance(inner, CodeType))


def differences(
    traces: StepTraces,
    whole: Mapping[str, Trace],
    pieces: Mapping[str, Trace],
    trained: Mapping[str, Trace],
) -> list[tuple[str, str]]:
    """What is left otherwise by micro-batches: its name, and that in words.

    Args:
        pieces: By those of a trial, which are of unlike sizes.
        trained: By those that the batch is trained in; empty where they are the same.
    """
    as_trained = {**pieces, **trained}  # where the micro-batches of the trial are fewer
    found = [
        (name, _in_words(name, trace, pieces[name], trained.get(name)))
        for name, trace in whole.items()
        if name in pieces
        and not (_are_same(trace, pieces[name]) and _are_same(trace, as_trained[name]))
        and not traces.is_told_again(name, trace)
    ]
    told, parts = {name for name, _ in found}, trained or pieces
    found += [
        (name, _by_one(name, whole.get(name), parts.get(name)))
        for name in {**whole, **parts}
        if (name in whole) != (name in parts) and name not in told
    ]
    cut = [
        (
            name,
            f"{name} gets {as_trained[name].num_entries} entries instead of {trace.num_entries}, which are the "
            "same joined",
        )
        for name, trace in whole.items()
        if name in pieces and trace.num_entries != as_trained[name].num_entries and name not in told
    ]
    return found + [(name, words) for name, words in cut if not traces.is_joined(name)]


def said(differing: Sequence[str], number: int) -> str:
    """The sentence for these differences of the batch of a step, by its number."""
    of = "the first batch" if number == 1 else f"a batch of step {number}"
    more = f"; and {len(differing) - MOST_NAMED} more" if len(differing) > MOST_NAMED else ""
    return (
        f"training_step runs once per micro-batch, so that for {of} {'; '.join(differing[:MOST_NAMED])}{more}: "
        "MadPipeStrategy(loss='batch') runs it once per batch"
    )


def _in_words(name: str, whole: Trace, pieces: Trace, trained: Trace | None) -> str:
    if trained is not None and not _are_same(whole, trained):
        pieces = trained
    elif trained is not None:
        return f"{_in_words(name, whole, pieces, None)} where its micro-batches are of unlike sizes"
    if whole.num_entries != pieces.num_entries:
        return f"{name} gets {pieces.num_entries} entries instead of {whole.num_entries}"
    for key in sorted(whole.numbers.keys() & pieces.numbers.keys()):
        own, theirs = whole.numbers[key], pieces.numbers[key]
        if own.numel() == theirs.numel() == 1 and not torch.allclose(own, theirs, rtol=CLOSE, atol=1e-6):
            return f"{name}{key} is {float(theirs):.6g} instead of {float(own):.6g}"
        if own.numel() != theirs.numel():
            return f"{name}{key} has {theirs.numel()} values instead of {own.numel()}"
    return f"{name} differs"


def _by_one(name: str, whole: Trace | None, pieces: Trace | None) -> str:
    """In words, what either the batch or its micro-batches leave, and the others nothing."""
    own, theirs = (0 if trace is None else trace.num_entries for trace in (whole, pieces))
    if own is not None and theirs is not None:
        return f"{name} gets {theirs} entries instead of {own}"
    return f"{name} is changed " + ("by the batch alone" if pieces is None else "by micro-batches alone")


def unlike(whole: Mapping[str, Trace], other: Mapping[str, Trace]) -> dict[str, Trace | None]:
    """What another run of the step leaves otherwise than for the batch, by name; None of what it leaves not."""
    return {
        name: other.get(name)
        for name in {**whole, **other}
        if name not in whole or name not in other or not _are_same(whole[name], other[name])
        or whole[name].num_entries != other[name].num_entries
    }  # fmt: skip


def has_twins(traces: Sequence[Trace | None]) -> bool:
    """Whether two of them are the same."""
    return any(
        one is other or (one is not None and other is not None and _are_same(one, other))
        for one, other in itertools.combinations(traces, 2)
    )


def _are_same(whole: Trace, pieces: Trace) -> bool:
    return whole.numbers.keys() == pieces.numbers.keys() and all(
        own.shape == theirs.shape and torch.allclose(own, theirs, rtol=CLOSE, atol=1e-6, equal_nan=True)
        for own, theirs in zip(whole.numbers.values(), pieces.numbers.values(), strict=True)
    )


def numbers_of(value: Any) -> Numbers:
    """The numbers in nested lists, dicts and dataclasses of tensors; strings count as one each."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    _collect(value, "", parts)
    return {key: torch.cat(parts[key]) for key in sorted(parts)}


def _collect(value: Any, key: str, parts: dict[str, list[Tensor]]) -> None:
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        # A tensor on meta, as captured layers keep for forms, has no numbers.
        if not value.is_meta and value.layout is torch.strided:
            parts[key].append(as_real(value.detach()).cpu().double().reshape(-1))
    elif isinstance(value, complex):
        parts[key].append(torch.tensor([value.real, value.imag], dtype=torch.float64))
    elif isinstance(value, numbers.Real | numpy.bool_):
        parts[key].append(torch.tensor([float(value)], dtype=torch.float64))
    elif isinstance(value, str | bytes):
        parts[key].append(torch.zeros(1, dtype=torch.float64))
    elif isinstance(value, Mapping):
        for name, child in value.items():
            _collect(child, f"{key}[{name!r}]", parts)
    elif isinstance(value, list | tuple | deque | array):
        for child in value:
            _collect(child, key, parts)
    elif isinstance(value, set | frozenset):
        for child in sorted(value, key=lambda child: (type(child).__name__, repr(child))):
            _collect(child, key, parts)
    elif isinstance(value, RawState):
        _collect(list(value.contents) if isinstance(value.contents, bytes) else value.contents, key, parts)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            _collect(getattr(value, each.name), f"{key}.{each.name}", parts)


def _value_of(metric: Metric) -> Any:
    """The value for what this rank has told a metric; None where there is none for so little."""
    copy = copied(metric)  # no clone(): a metric that is called with a loss holds its graph
    copy._to_sync = False
    try:
        return copy.compute()
    except Exception:  # whatever a class says of too few samples, it says it again where it is asked for good
        return None
