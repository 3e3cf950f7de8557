"""Integers that a model's own code makes from sizes of tensors, such as ``x.shape[1] // 2``.

During a capture such an integer remembers how it was made, so that a layer makes it again from the sizes of the
tensors that it has. Where the code asks for more than the integer (a comparison, a loop over it), the answer holds
for this size alone or for a range: it is noted as a condition, which the layers verify for every micro-batch.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_partition.capture.shown_texts import only_shows

KNOW_SYMBOLS = frozenset({"einops"})
"""Libraries that keep what they found for a shape, and find it anew where torch's symbolic numbers, which have no
hash, stand in it. What was kept would be for this shape alone, or for another capture."""


class ShapeError(ValueError):
    """A micro-batch for whose sizes the captured layers do not hold."""


ADVICE = ": capture it with "
"""What begins the part of the message that is for who captures a model himself."""


def way_of_sizes(message: str) -> str:
    """What a :class:`ShapeError` says of the model, in words, without its name and its advice."""
    return message.removeprefix(f"{ShapeError.__name__}: ").partition(ADVICE)[0]


@dataclass(frozen=True, slots=True)
class Dimension:
    """One size of a tensor: ``kind`` is ``shape``, ``stride`` or ``numel``."""

    value: int
    kind: str
    place: int

    def read(self, tensor: Any) -> int:
        if self.kind == "numel":
            return int(tensor.numel())
        return int((tensor.shape if self.kind == "shape" else tensor.stride())[self.place])


@dataclass(frozen=True, slots=True)
class Returned:
    """A number that a module returned."""

    value: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A number that was computed from others."""

    operation: Callable[..., Any]
    operands: tuple[Any, ...]


Expression = Dimension | Returned | Computed
"""How a number was made; plain numbers stand for themselves."""


def dimensions_in(expression: Any) -> Iterator[Dimension | Returned]:
    """What has to be known for an expression."""
    if isinstance(expression, Dimension | Returned):
        yield expression
    elif isinstance(expression, Computed):
        for operand in expression.operands:
            yield from dimensions_in(operand)


def evaluate(expression: Any, known: Mapping[Any, Any]) -> Any:
    """The number that an expression stands for, where these dimensions are known."""
    if isinstance(expression, Computed):
        return expression.operation(*(evaluate(operand, known) for operand in expression.operands))
    if isinstance(expression, Dimension | Returned):
        return known[expression]
    return expression


@dataclass(frozen=True, slots=True)
class Condition:
    """What must hold of sizes for a capture to hold: the model's code asked for it, at a line of its source."""

    expression: Any
    outcome: Any
    where: str


class Size:
    """A number that was made from sizes; it behaves as an ``int`` or ``float``.

    No subclass of ``int``: Python reads those without asking, for example in ``range``. It is one of torch's
    symbolic numbers to the functions that take numbers.
    """

    number: Any
    expression: Any
    note: Callable[[Any, Any], None]

    def __init__(self, number: Any, expression: Any, note: Callable[[Any, Any], None]) -> None:
        self.number, self.expression, self.note = number, expression, note

    def _asked(self) -> Any:
        self.note(self.expression, self.number)
        return self.number

    def __index__(self) -> int:
        return operator.index(self._asked())

    def __int__(self) -> int:
        return int(self._asked())

    def __float__(self) -> float:
        return float(self._asked())

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        if sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] in KNOW_SYMBOLS:
            raise TypeError("unhashable type: a number that stands for a size")
        return hash(self._asked())

    def _written(self) -> Any:
        """The number, for a text: what code does with that is not known, but where it only shows it."""
        return self.number if only_shows(sys._getframe(2)) else self._asked()

    def __repr__(self) -> str:
        return repr(self._written())

    def __str__(self) -> str:
        return str(self._written())

    def __format__(self, kind: str) -> str:
        return format(self._written(), kind)

    def is_integer(self) -> bool:
        return float(self).is_integer()


class _IntegerSize(Size, torch.SymInt):
    pass


class _FloatSize(Size, torch.SymFloat):
    pass


def size(number: Any, expression: Any, note: Callable[[Any, Any], None]) -> Size:
    """A number with its origin; ``note`` is called with both when the number itself is asked for."""
    return (_FloatSize if isinstance(number, float) else _IntegerSize)(number, expression, note)


_RANGE = range


class _Ranges(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _RANGE)


class CountedRange(metaclass=_Ranges):
    """What stands for ``range``: of the size that ends one it is noted how many numbers that makes.

    The numbers themselves are made of the start and the step alone.
    """

    def __new__(cls, *given: Any) -> Any:
        start, stop, step = (0, *given, 1) if len(given) == 1 else (*given, 1, 1, 1)[:3]
        if len(given) > 3 or not isinstance(stop, Size):
            return _RANGE(*given)
        start, step = operator.index(start), operator.index(step)
        made = _RANGE(start, stop.number, step)
        stop.note(Computed(_count, (start, stop.expression, step)), len(made))
        return made


def _count(start: int, stop: int, step: int) -> int:
    return len(_RANGE(start, stop, step))


def number_of(value: Any) -> Any:
    """The number of a size; other things as they are."""
    return value.number if isinstance(value, Size) else value


def _expression_of(value: Any) -> Any:
    return value.expression if isinstance(value, Size) else value


def _computed(operation: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    if not all(isinstance(operand, Size | int | float) for operand in operands):
        return NotImplemented
    note = next(operand.note for operand in operands if isinstance(operand, Size))
    number = operation(*map(number_of, operands))
    return size(number, Computed(operation, tuple(map(_expression_of, operands))), note)


def _compared(operation: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    if not all(isinstance(operand, Size | int | float) for operand in operands):
        return NotImplemented
    note = next(operand.note for operand in operands if isinstance(operand, Size))
    outcome = bool(operation(*map(number_of, operands)))
    expressions = tuple(map(_expression_of, operands))
    if len(set(expressions)) > 1:
        note(Computed(operation, expressions), outcome)
    return outcome


def _teach() -> None:
    arithmetic = ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")
    for name in arithmetic:
        operation = getattr(operator, name)

        def forward(self: Size, other: Any, operation: Any = operation) -> Any:
            return _computed(operation, (self, other))

        def backward(self: Size, other: Any, operation: Any = operation) -> Any:
            return _computed(operation, (other, self))

        setattr(Size, f"__{name}__", forward)
        setattr(Size, f"__r{name}__", backward)
    for name in ("neg", "pos", "abs"):
        operation = getattr(operator, name)
        setattr(Size, f"__{name}__", lambda self, operation=operation: _computed(operation, (self,)))
    Size.__round__ = lambda self, digits=None: _computed(round, (self,))  # type: ignore[attr-defined]
    for name in ("floor", "ceil", "trunc"):
        setattr(Size, f"__{name}__", lambda self, name=name: _computed(_ROUNDED[name], (self,)))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        operation = getattr(operator, name)

        def compare(self: Size, other: Any, operation: Any = operation) -> Any:
            return _compared(operation, (self, other))

        setattr(Size, f"__{name}__", compare)

    def divide(self: Any, other: Any) -> Any:
        return self // other, self % other

    operators: Any = Size
    operators.__divmod__ = divide


def _floor(number: float) -> int:
    return int(number // 1)


def _ceil(number: float) -> int:
    return -int(-number // 1)


_ROUNDED: dict[str, Callable[[float], int]] = {"floor": _floor, "ceil": _ceil, "trunc": int}
_teach()


class Shape(tuple):
    """The shape of a tensor, in the place of ``torch.Size``, which holds nothing but numbers."""

    __slots__ = ()

    def numel(self) -> Any:
        total: Any = 1
        for size in self:
            total = size * total
        return total

    def __getitem__(self, place: Any) -> Any:
        found = tuple.__getitem__(self, place)
        return Shape(found) if isinstance(place, slice) else found

    def __add__(self, other: Any) -> Any:
        return Shape(tuple.__add__(self, tuple(other)))

    def __radd__(self, other: Any) -> Any:
        return Shape(tuple(other) + tuple(self))
