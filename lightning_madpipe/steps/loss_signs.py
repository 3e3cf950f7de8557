"""Signs, cheap enough for every step, that a loss may not be the one that was tried.

- The graph of the loss: a term that begins brings operations, a scalar factor that is no longer 0, or a scalar on
  the other side of a threshold (``loss.clamp(max=8)``), which the steps that were tried had not. It is read where
  the step of a micro-batch has just run, so that the batch can still be given up and tried. Factors on a device
  are read behind the last micro-batch, all at once, for that waits for the device.
- The single numbers that something in that graph is divided by, such as how many samples count: over micro-batches
  they are neither the same nor in proportion to their shares in the loss of the batch.
- The class weights of a cross-entropy in that graph: they are others than those that were tried, and than those by
  which micro-batches are weighted.
- The names of what is logged and returned: a number that is no mean is named when it first appears.
- The module: an attribute that is a number, a flag or a string, and the epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torchmetrics import Metric

from deepspeed_partition.engine.pipeline.batch_attempt import BatchGivenUpError
from lightning_madpipe.module import outside_pipeline
from lightning_madpipe.steps.reached_objects import attributes_of
from lightning_madpipe.steps.step_side_effects import Beside, reached_objects

Operations = frozenset[tuple[str, str]]
"""Pairs of an operation and the one whose result it takes."""

MOST_NODES = 2000
"""Nodes of a graph that are read, from the loss on."""
MOST_TERMS = 16
"""Terms of a loss that are joined to a vector, up to which the weights in another one are looked at."""
MOST_TIMES_NEW = 16
"""How often a number under a new name gives a batch up: steps may have a name for each batch."""
MOST_VALUES = 16
"""Values of one string attribute that are told apart."""
SIGNS = (int, float, str, NoneType)
"""The types of attributes that are looked at; each step asks, and a union of types takes longer than a tuple."""
STEPS_BEFORE_AN_EPOCH = 64
"""Steps since the last trial, after which the first step of an epoch is tried."""


class UntriedLossError(BatchGivenUpError):
    """Ends a batch whose loss may come from its micro-batches otherwise than in the steps that were tried."""


class LossGraph(NamedTuple):
    """What computes a loss from the outputs of the pipeline."""

    operations: Operations
    class_weights: list[Tensor]
    """Those of its cross-entropies."""
    divisors: list[Tensor]
    """The single numbers that something is divided by, as they are met."""
    bends: tuple[str, ...] = ()
    """The nodes that go on otherwise from a threshold on, each with its side, as they are met."""
    unread: frozenset[tuple[str | Unread, str | Unread]] = frozenset()
    """Pairs like those of ``operations``, of which a name goes by what is in ``answers``."""
    answers: Tensor | None = None
    """Whether the factors on a device are such that a node has another name, on that device."""


class Unread(NamedTuple):
    """A node whose name goes by factors on a device."""

    name: str
    others: tuple[tuple[str, int], ...]
    """Names that it has instead, each with the place of the answer by which it has."""

    def named(self, answers: Sequence[bool]) -> str:
        return next((other for other, place in self.others if answers[place]), self.name)


def graph_of(loss: Tensor, ends: Collection[Any]) -> LossGraph:
    """Read what computes ``loss``, down to the nodes ``ends``, which made the outputs of the pipeline."""
    class_weights, divisors, bends = [], [], []
    pairs: set[tuple[str, str]] = set()
    unread: set[tuple[str | Unread, str | Unread]] = set()
    answers: list[Tensor] = []
    todo, names = [loss.grad_fn], {loss.grad_fn: _named(loss.grad_fn, answers)}
    while todo and len(names) < MOST_NODES:
        node: Any = todo.pop()
        if node is None or node in ends:
            continue
        own = names[node]
        name = own.name if isinstance(own, Unread) else own
        if kind_of(name.split()[0]) in BENDS:
            bends.append(name)
        if name.startswith("NllLoss") and (weight := _saved(node, "_saved_weight")) is not None:
            class_weights.append(weight)
        divisor = _saved(node, DIVISORS.get(kind_of(name.split()[0]), ""))
        # In a cross-entropy that is no mean nothing is divided.
        if divisor is not None and divisor.ndim == 0 and getattr(node, "_saved_reduction", 1) == 1:
            divisors.append(divisor)
        for following, _ in node.next_functions:
            if following not in names:
                names[following] = "outputs" if following in ends else _named(following, answers)
                todo.append(following)
            other = names[following]
            for each in (own, *_named_weights(node, following, answers)):
                if isinstance(each, Unread) or isinstance(other, Unread):
                    unread.add((each, other))
                else:
                    pairs.add((each, other))
    graph = LossGraph(frozenset(pairs), class_weights, divisors, tuple(bends))
    if not answers:
        return graph
    with _disable_current_modes():
        stacked = torch.stack([each.to(answers[0].device) for each in answers])
    return graph._replace(unread=frozenset(unread), answers=stacked)


def read_operations(graphs: Sequence[LossGraph]) -> Operations:
    """The operations of graphs that were left ``unread``, by what factors were when each graph was read."""
    unread = [(graph.unread, graph.answers) for graph in graphs if graph.answers is not None]
    if not unread:
        return frozenset()
    with _disable_current_modes():
        # One wait for the device.
        read = torch.cat([answers.to(unread[0][1].device) for _, answers in unread]).tolist()
    operations, begin = set(), 0
    for pairs, answers in unread:
        own = read[begin : begin + len(answers)]
        begin += len(answers)
        for pair in pairs:
            one, other = (each.named(own) if isinstance(each, Unread) else each for each in pair)
            operations.add((one, other))
    return frozenset(operations)


def are_in_proportion(divisors: Sequence[Sequence[Tensor]], *shares: Sequence[float]) -> bool:
    """Whether numbers that something is divided by are the same in all micro-batches, or in proportion to shares.

    Args:
        divisors: Those of each micro-batch.
        shares: Of each micro-batch, by samples and in the loss of its batch.
    """
    numbers = [each for part in divisors for each in part]
    if not numbers or len(set(map(len, divisors))) > 1:
        return True
    with _disable_current_modes():  # a number of Python's is no tensor to them
        # One wait for the device.
        stacked = torch.stack([each.detach().to(numbers[0].device).double() for each in numbers])
        table = stacked.cpu().view(len(divisors), -1)
    eps = max((torch.finfo(each.dtype).eps for each in numbers if each.is_floating_point()), default=0.0)
    tolerance = max(1e-4, 4 * eps)
    fits = torch.zeros(table.shape[1], dtype=torch.bool)
    counts = torch.tensor(shares[-1]) > 0  # a part of which nothing counts may be divided by anything
    if bool((table[counts] == 0).any()):  # a mask that leaves nothing of a part, and something of the batch
        return False
    for share in (torch.ones(len(divisors)), *map(torch.tensor, shares)):
        ratios = table[counts] / share[counts].double().unsqueeze(1)
        fits |= ((ratios - ratios.mean(0)).abs() <= tolerance * ratios.abs().amax(0)).all(0)
    return bool(fits.all())


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node has kept; None where it has none, or a backward has freed it."""
    kept = _kept(node, name)
    return kept if isinstance(kept, Tensor) else None


def _kept(node: Any, name: str) -> Any:
    """What a node has kept under a name, such as a tensor or a number."""
    try:
        return getattr(node, name, None)
    except RuntimeError:
        return None


class ClassWeights:
    """The class weights of losses that were tried, and whether others are a sign of another loss.

    Such weights count if they are others than those by which micro-batches are weighted, and were not in a loss
    that was tried; and of those that change from step to step the 1st, 2nd, 4th, 8th, ... new ones do.
    """

    def __init__(self) -> None:
        self.in_use: Tensor | None = None
        """Those by which the micro-batches of this batch are weighted; None: by no class weights."""
        self._tried: set[bytes] = set()
        self._given_up_for: set[bytes] = set()
        self._num_new = 0
        self._last: tuple[Tensor, int, bytes] | None = None

    def note(self, weights: Collection[Tensor]) -> None:
        """Note those of a loss that is tried."""
        self._tried.update(map(self._mark, weights))

    def are_others(self, weights: Collection[Tensor]) -> bool:
        """Whether those of a loss are a sign that it is not one that was tried."""
        for weight in weights:
            if self.in_use is not None and (
                _is_one(weight, self.in_use) or torch.equal(weight, self.in_use.to(weight))
            ):
                continue
            mark = self._mark(weight)
            if mark in self._given_up_for or (self.in_use is None and mark in self._tried):
                continue
            self._given_up_for.add(mark)  # tried once, even if the trial does not tell them apart
            self._num_new += 1
            if self._num_new & (self._num_new - 1) == 0:
                return True
        return False

    def _mark(self, weight: Tensor) -> bytes:
        # Reading them waits for the device, so those that were read last are not read again. They are kept, so
        # that no other tensor comes to their place in memory.
        if self._last is None or not _is_one(weight, self._last[0]) or self._last[1] != weight._version:
            values = weight.detach().double().cpu().numpy().tobytes()
            self._last = weight, weight._version, hashlib.blake2b(values, digest_size=16).digest()
        return self._last[2]


def _is_one(weight: Tensor, other: Tensor) -> bool:
    """Whether two are one tensor in memory."""
    return weight.data_ptr() == other.data_ptr() and weight.shape == other.shape and weight.dtype == other.dtype


def _named(node: Any, answers: list[Tensor]) -> str | Unread:
    """The name of a node; ``answers`` gets what it goes by on a device."""
    name, others = _name_of(node), []
    for attribute, end in FACTORS.get(name, ()):
        factor = _kept(node, attribute)
        if not isinstance(factor, Tensor):
            if factor == end:
                return f"{name} by {end}"
            continue
        if factor.numel() != 1 or factor.layout is not torch.strided:
            continue
        # A number of Python's is no tensor to modes.
        with nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes():
            if is_elsewhere(factor):
                others.append((f"{name} by {end}", len(answers)))
                answers.append(factor.reshape(()) == end)
            elif factor == end:
                return f"{name} by {end}"
    return Unread(name, tuple(others)) if others else name


def _named_weights(node: Any, terms: Any, answers: list[Tensor]) -> Iterator[str | Unread]:
    """Names for a node that weighs terms of a loss by a vector, one for each weight: whether it is 0.

    A set of such names grows by two for each term at the most, in whatever order these begin.
    """
    name = _name_of(node)
    if name not in WEIGHTS or terms is None or terms.name() not in ("StackBackward0", "CatBackward0"):
        return
    # Of single numbers. Vectors that are joined, as of samples, are longer.
    number = len(terms.next_functions)
    if not 1 < number <= MOST_TERMS or tuple(terms._input_metadata[0].shape) != (number,):
        return
    for weights in (_kept(node, attribute) for attribute in WEIGHTS[name]):
        if weights is None or weights.layout is not torch.strided or tuple(weights.shape) != (number,):
            continue
        with nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes():
            are_zero = weights.detach() == 0
            if is_elsewhere(weights):
                for place, each in enumerate(are_zero.unbind()):
                    yield Unread(f"{name} at {place}", ((f"{name} by 0 at {place}", len(answers)),))
                    answers.append(each)
            else:
                yield from (f"{name}{' by 0' * zero} at {place}" for place, zero in enumerate(are_zero.tolist()))


def is_elsewhere(number: Tensor) -> bool:
    """Whether reading a number waits for a device."""
    return number.device.type != "cpu"


def _name_of(node: Any) -> str:
    if node is None:
        return ""
    name = node.name()
    if name in SELECTIONS:
        return f"{name} of some" * _is_of_some(node) or name
    side = BENDS.get(kind_of(name))
    if side is None:
        return name
    try:
        # Where the mean of a batch crosses a threshold, that of one of its micro-batches does.
        return f"{name}{side(node)}"
    except RuntimeError:  # a backward has freed what it was
        return name


def _is_of_some(node: Any) -> bool:
    """Whether a selection leaves something out, such as samples of high losses: a mean is one of the others."""
    try:
        sizes = node._saved_self_sym_sizes if node.name() == "IndexBackward0" else node._saved_mask.shape
        return math.prod(node._input_metadata[0].shape) < math.prod(sizes)
    except RuntimeError:  # a backward has freed what it was
        return False


def kind_of(node: str) -> str:
    """What a node is of, by its name: ``Clamp`` of ``ClampBackward1``."""
    return node.rstrip("0123456789").removesuffix("Backward")


def _of_clamp(node: Any) -> str:
    low, high = (getattr(node, name, None) for name in ("_saved_min", "_saved_max"))
    return _side(node._saved_self, low, high)


def _side(value: Tensor, low: Any, high: Any) -> str:
    """On which side of its thresholds a scalar is; nothing of tensors, whose elements may be of samples."""
    if value.numel() != 1 or any(isinstance(each, Tensor) and each.numel() != 1 for each in (low, high)):
        return ""
    # Reading a number waits for the device, which only a loss with a threshold of its own makes necessary.
    with _disable_current_modes():
        number = float(value.detach())
        return " below" * (low is not None and number < low) + " above" * (high is not None and number > high)


DIVISORS = {
    "Div": "_saved_other", "NllLoss": "_saved_total_weight", "NllLoss2D": "_saved_total_weight",
}  # fmt: skip
"""What a node has kept of what it divides by, by its kind."""
FACTORS: dict[str, tuple[tuple[str, int], ...]] = {
    "MulBackward0": (("_saved_self", 0), ("_saved_other", 0)),
    "DivBackward0": (("_saved_self", 0),),
    **dict.fromkeys(("AddBackward0", "SubBackward0"), (("_saved_alpha", 0),)),
    "AddcmulBackward0": (("_saved_tensor1", 0), ("_saved_tensor2", 0), ("_saved_value", 0)),
    "AddcdivBackward0": (("_saved_tensor1", 0), ("_saved_value", 0)),
    **dict.fromkeys(("LerpBackward0", "LerpBackward1"), (("_saved_weight", 0), ("_saved_weight", 1))),
    **dict.fromkeys(("PowBackward0", "PowBackward1"), (("_saved_exponent", 0),)),
    **dict.fromkeys(("MaskedFillBackward0", "MaskedFillBackward1"), (("_saved_mask", 0),)),
}
"""Single numbers that nodes keep, each with the one by which an argument adds nothing to the result."""
WEIGHTS = {"MulBackward0": ("_saved_self", "_saved_other"), "DotBackward0": ("_saved_self", "_saved_tensor")}
"""Vectors that nodes keep, by which terms of a loss may be weighted."""
SELECTIONS = frozenset(("IndexBackward0", "MaskedSelectBackward0"))
BENDS: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("Clamp", "ClampMin", "ClampMax"), _of_clamp),
    "Hardtanh": lambda node: _side(node._saved_self, node._saved_min_val, node._saved_max_val),
    "Relu": lambda node: _side(node._saved_result, None, 0.0),
    **dict.fromkeys(("Abs", "LeakyRelu"), lambda node: _side(node._saved_self, 0.0, None)),
    **dict.fromkeys(("Maximum", "Minimum"), lambda node: _side(node._saved_self, node._saved_other, None)),
    "Where": lambda node: _side(node._saved_condition, 1, None),
}
"""Functions that go on otherwise from a threshold on, by the names of their nodes (torch 2.4 to 2.13)."""


class Attributes:
    """The numbers, flags and strings on a module and beside it, and its epoch: steps may make their loss of these.

    A change counts where the attribute was never of this kind (0 or not, true or not, another string), and as the
    1st, 2nd, 4th, 8th, ... change of the same attribute: a counter changes in every step.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], beside: Beside | None = None) -> None:
        self._module, self._ignored, self._beside = module, ignored, beside
        self._kinds: dict[str, set[Any]] = defaultdict(set)
        self._num_changes: Counter[str] = Counter()
        self._before: dict[str, Any] = dict(self._now())
        self._note_kinds(self._before)

    def have_changed(self) -> bool:
        """Whether a change since the last call counts."""
        now = dict(self._now())
        changed = [name for name, value in now.items() if name not in self._before or value != self._before[name]]
        self._before = now
        self._num_changes.update(changed)
        new = self._note_kinds({name: now[name] for name in changed})
        return new or any(number & (number - 1) == 0 for number in map(self._num_changes.__getitem__, changed))

    def _note_kinds(self, values: dict[str, Any]) -> bool:
        """Whether one of them is of a new kind."""
        new = False
        for name, value in values.items():
            kind = value if isinstance(value, str) else (type(value), bool(value))
            if kind not in self._kinds[name] and len(self._kinds[name]) < MOST_VALUES:
                self._kinds[name].add(kind)
                new = True
        return new

    def _now(self) -> Iterator[tuple[str, Any]]:
        yield "current_epoch", getattr(self._module, "current_epoch", 0)
        for path, owner in outside_pipeline(self._module):
            if isinstance(owner, Metric):
                continue
            for name, value in vars(owner).items():
                if isinstance(value, SIGNS) and name not in self._ignored:
                    yield f"{path}.{name}", value
        for place, value in () if self._beside is None else self._beside.places():
            if isinstance(value, SIGNS):
                yield f"beside {place}", value
        for name, each in reached_objects(self._module, self._ignored, self._beside).items():
            for key, value in (attributes_of(each) or {}).items():
                if isinstance(value, SIGNS):
                    yield f"{name}.{key}", value
