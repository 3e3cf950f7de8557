"""What a step does with numbers of its whole batch, and goes on with otherwise from a threshold on.

``loss.clamp(max=8)``, ``F.relu(outputs.mean() - 1)`` and ``if (labels == 0).sum() > 3:`` take a number of the
batch. On one side of the threshold the loss is the mean of those of its micro-batches; where these lie on
two sides, it is another one. A trial of one batch need not show that, so the step is watched while it is tried:

- A *bend* is a function such as ``abs`` of something that depends on the outputs, with a gradient.
- A *question* is a comparison, a number that Python is given, or one without a gradient that has a threshold or
  divides; and a length that numbers of the batch decide (``len(y.unique())``). It counts if the step goes on
  otherwise with another answer, which is tried.

Either belongs to the batch if each micro-batch has it again: what is done for each sample is done as often for all
micro-batches together as for the batch.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_madpipe.steps.deciding_layers import METHODS, SIZES, Origins, dim_of
from lightning_madpipe.steps.loss_signs import kind_of

WATCHED = frozenset((
    "abs", "clamp", "clamp_max", "clamp_min", "hardtanh", "leaky_relu", "maximum", "minimum", "relu", "where",
))  # fmt: skip
"""Bends of a single number that are watched in every step, by their nodes in the graph (``loss_signs.BENDS``)."""
BENDS = frozenset((
    *WATCHED, "amax", "amin", "aminmax", "celu", "elu", "hardshrink", "hardsigmoid", "hardswish", "huber_loss",
    "kthvalue", "masked_fill", "max", "median", "min", "nan_to_num", "nanmedian", "rrelu_with_noise",
    "_prelu_kernel", "smooth_l1_loss", "softplus", "softshrink", "sort", "threshold", "topk",
))  # fmt: skip
"""Functions that are linear for some numbers, and others elsewhere."""
CHOICES = frozenset(("where", "masked_fill"))
"""Bends by a comparison, which is a question of its own."""
COMPARISONS = frozenset(("eq", "ge", "gt", "le", "lt", "ne"))
NUMBER = "_local_scalar_dense"
"""What gives Python a number of a tensor."""
LENGTH = "length"
"""What gives Python a length that numbers of the batch decide."""
OF_TORCH = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
NEAR = 1e-6
FACTORS = (0.01, 30.0, 1000.0)
"""What numbers with a fraction are multiplied by, to see whether a step decides by them."""


class Use(NamedTuple):
    """A function that is given something of the batch, in a line of code."""

    function: str
    line: str


class BatchNumbers(TorchDispatchMode):
    """Notes bends and questions of a step.

    Args:
        data: The tensors of the batch.
        outputs: Those that the layers return.
        answers: Other answers to questions: what gives a number for the number that it was, or turns a comparison.
    """

    def __init__(
        self,
        data: Sequence[Tensor],
        outputs: Sequence[Tensor],
        answers: Mapping[Use, Callable[[Any], Any]] | None = None,
    ) -> None:
        super().__init__()
        self._of_batch, self._of_outputs = Origins([*data, *outputs]), Origins(outputs)
        self._answers = answers or {}
        self._lengths = _Lengths(self._of_batch, self._length)
        self.bends: dict[Use, list[int]] = defaultdict(list)
        """How many numbers each was given."""
        self.values: dict[Use, list[float]] = defaultdict(list)
        """Where a single number lies, before the threshold or behind it."""
        self.questions: dict[Use, list[int]] = defaultdict(list)

    def __enter__(self) -> Any:
        self._lengths.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._lengths.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        result = func(*args, **kwargs)
        self._of_outputs.follow(func, args, kwargs, result)
        if not self._of_batch.follow(func, args, kwargs, result):
            return result
        if name in BENDS and torch.is_grad_enabled() and _needs_gradient(args, kwargs):
            self._note_bend(Use(name, _line()), args, kwargs, result)
        elif (numel := self._asks(name, args, result)) > 0:
            use = Use(name, _line())
            self.questions[use].append(numel)
            if use in self._answers:
                return self._answers[use](result)
        return result

    def _asks(self, name: str, args: Any, result: Any) -> int:
        """How many numbers a function asks for; 0: it is no question."""
        if name in COMPARISONS:
            return 0 if _is_plain(name, args) else result.numel()
        if name == NUMBER:
            return int(args[0].dtype != torch.bool)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return 0
        if name == "div":  # by how many outputs are of some kind; what counts labels is told by batches
            divisor = args[1]
            is_number = isinstance(divisor, Tensor) and divisor.numel() == 1 and not divisor.requires_grad
            return int(is_number and self._of_outputs.has(divisor))
        if name in CHOICES or name not in BENDS or _protects(name, args):
            return 0
        return int(args[0].numel())

    def _length(self, line: str, size: int) -> int:
        """The answer to a question for a length."""
        use = Use(LENGTH, line)
        self.questions[use].append(1)
        return self._answers[use](size) if use in self._answers and size else size

    def _note_bend(self, use: Use, args: Any, kwargs: Any, result: Any) -> None:
        is_of_result = use.function in ("maximum", "minimum", "where", "masked_fill")
        numel = (result if is_of_result else args[0]).numel()
        self.bends[use].append(numel)
        if numel == 1 and use.function in WATCHED:
            value = args[0].detach()
            if use.function in ("maximum", "minimum"):
                value = value - args[1].detach()
            self.values[use].append(float(value))


class _Lengths(TorchFunctionMode):
    """Meets where the step asks for a length that numbers decide.

    Args:
        origins: Knows these lengths.
        answer: Gives the answer to a line that asks for a length, which is given, too.
    """

    def __init__(self, origins: Origins, answer: Callable[[str, int], int]) -> None:
        super().__init__()
        self._origins, self._answer = origins, answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in SIZES or not self._origins.depends(args[0], dim_of(func, args, kwargs or {})):
            return result
        line = _line_that_asks()
        if not line:
            return result
        if not isinstance(result, torch.Size):
            return self._answer(line, result)
        dims = enumerate(result)
        return torch.Size(
            self._answer(line, size) if self._origins.depends(args[0], dim) else size for dim, size in dims
        )


def _protects(name: str, args: Any) -> bool:
    """Whether this keeps a number from 0, such as a count of labels by which a loss is divided."""
    if name not in ("clamp", "clamp_min") or any(bound is not None for bound in args[2:]):
        return False
    low = args[1] if len(args) > 1 else None
    return isinstance(low, int | float) and 0 <= low <= 1


def _needs_gradient(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))


def _is_plain(name: str, args: Any) -> bool:
    """Whether a comparison has one answer for the batch if it has it for all micro-batches.

    A sum is 0, or more than that, if all of its parts are, and no number or infinite if one of them is.
    """
    own, other = args[:2]
    if own is other:
        return True
    if isinstance(other, Tensor):
        if other.numel() != 1 or other.dim() or other.device.type != "cpu":
            return False
        other = other.item()
    is_count = isinstance(own, Tensor) and not own.is_floating_point()
    return other == 0 or math.isinf(other) or (is_count and other == 1 and name in ("ge", "lt"))


def _line() -> str:
    """The line of the user's code that runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(OF_TORCH):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _line_that_asks() -> str:
    """The line of the user's code that runs now; nothing where it is one of torch's own."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename.startswith((OF_TORCH[1], *METHODS)):
        frame = frame.f_back
    place = frame.f_code.co_filename
    return "" if place.startswith(OF_TORCH[0]) else f"{Path(place).name}:{frame.f_lineno}"


class Watch:
    """The numbers of a batch, and of each of its parts, in a step that is tried on all of them."""

    def __init__(self) -> None:
        self._seen: list[BatchNumbers] = []

    def begin(self, data: Sequence[Tensor], outputs: Sequence[Tensor]) -> BatchNumbers:
        """The context of the next run of the step, first on the batch and then on its parts."""
        self._seen.append(BatchNumbers(data, outputs))
        return self._seen[-1]

    def bends_of_batch(self, operations: Collection[str]) -> tuple[frozenset[str], str | None]:
        """Find the bends that take something of the whole batch.

        Args:
            operations: The names of the nodes that compute the loss.

        Returns:
            The kinds of nodes whose sides tell in each batch whether it is bent, and the first bend, in words, of
            which they do not.
        """
        whole, *parts = self._seen
        kinds = {kind_of(name.split()[0]) for name in operations if name}
        told: set[str] = set()
        for use, sizes in whole.bends.items():
            kind = _kind_of(use)
            if kind not in kinds or sum(sum(part.bends[use]) for part in parts) <= sum(sizes):
                continue
            if not self._is_told_by_sides(use):
                name = use.function.removeprefix("_")
                return frozenset(), f"{name} in {use.line} takes a number of the whole batch"
            told.add(kind)
        return frozenset(told), None

    def _is_told_by_sides(self, use: Use) -> bool:
        """Whether the batch lies on the side on which all of its micro-batches are.

        So it does where its number lies between theirs, as a mean. And the loss must have no such function that
        takes samples one by one, which lie on sides of their own.
        """
        whole, *parts = self._seen
        alike = [sizes for other, sizes in whole.bends.items() if _kind_of(other) == _kind_of(use)]
        if use.function not in WATCHED or any(set(sizes) != {1} for sizes in alike):
            return False
        if any(len(part.values[use]) != len(whole.values[use]) for part in parts):
            return False
        for place, value in enumerate(whole.values[use]):
            others = [part.values[use][place] for part in parts]
            room = NEAR * max(map(abs, others))
            if not min(others) - room <= value <= max(others) + room:
                return False
        return True

    def questions_of_batch(self) -> list[Use]:
        """The questions that are asked once for the batch, and once for each of its parts."""
        whole, *parts = self._seen
        return [
            use
            for use, sizes in whole.questions.items()
            if use.line and sum(sum(part.questions[use]) for part in parts) > sum(sizes)
        ]


def _kind_of(use: Use) -> str:
    """The kind of the node of a function."""
    return "".join(part.capitalize() for part in use.function.split("_"))


def other_answers(use: Use) -> Iterator[Callable[[Any], Any]]:
    """Other answers to a question."""
    if use.function in COMPARISONS:
        yield torch.logical_not
        return
    if use.function not in (NUMBER, LENGTH):
        yield lambda numbers: numbers * FACTORS[1] + 1  # also of those that are 0 behind their threshold
        return
    for place in range(len(FACTORS)):
        yield functools.partial(_another, place=place)


def _another(number: Any, *, place: int) -> Any:
    """Another number: of a count a larger one that a step may have; of nothing nothing.

    What is done where nothing counts is no decision about the batch.
    """
    return number * (place + 2) + 7 if number and isinstance(number, int) else number * FACTORS[place]
