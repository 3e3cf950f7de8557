"""What a step says to the outside: its calls of loggers and of ``self.print``, kept to be made on rank 0.

A logger's experiment lives on rank 0 only, and a step runs on the last stage, so that
``self.logger.experiment.add_image(...)`` would reach nobody there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch

from lightning_madpipe.steps.batches import map_children
from lightning_madpipe.steps.serialization import PackedTensor, packed, unpacked

Step = tuple[str, Any]
"""``("attribute", name)`` or ``("item", key)``: how to come from an object to a part of it."""


class Call(NamedTuple):
    """A call that was not made yet."""

    logger: int | None
    """The logger's place among the Trainer's; None for the LightningModule."""
    path: tuple[Step, ...]
    arguments: Any
    keywords: Any

    def __str__(self) -> str:
        names = [f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in self.path]
        return f"{'self' if self.logger is None else 'self.logger'}{''.join(names)}()"


def merged(calls: Sequence[Sequence[Call]], sizes: Sequence[int]) -> list[Call] | None:
    """The calls of a batch from those of its micro-batches: numbers are means by samples.

    Args:
        calls: Those of each micro-batch.
        sizes: Its samples.

    Returns:
        None where micro-batches make other calls, or where something else than a number differs.
    """
    if len({tuple((call.logger, call.path) for call in each) for each in calls}) > 1:
        return None
    try:
        return [
            same[0]._replace(
                arguments=_mean([call.arguments for call in same], sizes),
                keywords=_mean([call.keywords for call in same], sizes),
            )
            for same in zip(*calls, strict=True)
        ]
    except _DiffersError:
        return None


class _DiffersError(Exception):
    """Something that is no number differs between micro-batches."""


def _mean(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if all(type(value) is type(first) and _are_equal(value, first) for value in values):
        return first
    numbers = [_number_of(value) for value in values]
    if all(number is not None for number in numbers):
        return sum(number * size for number, size in zip(numbers, sizes, strict=True) if number) / sum(sizes)
    if any(type(value) is not type(first) for value in values):
        raise _DiffersError
    if isinstance(first, dict) and all(value.keys() == first.keys() for value in values):
        return {key: _mean([value[key] for value in values], sizes) for key in first}
    if type(first) in (list, tuple) and all(len(value) == len(first) for value in values):
        return type(first)(_mean(each, sizes) for each in zip(*values, strict=True))
    raise _DiffersError


def _are_equal(left: Any, right: Any) -> bool:
    if isinstance(left, numpy.ndarray):
        return numpy.array_equal(left, right)
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):  # such as of tables and of lists with arrays in them
        return False


def _number_of(value: Any) -> float | None:
    """A number with a fraction, also in a tensor; a count of samples or a step has no mean."""
    if isinstance(value, PackedTensor):
        if not value.dtype.is_floating_point or torch.Size(value.shape).numel() != 1:
            return None
        value = unpacked(value, torch.device("cpu")).item()
    return value if isinstance(value, float) else None


def make(call: Call, module: Any, device: torch.device) -> None:
    """Make the call that another rank's step recorded."""
    target = module if call.logger is None else module.loggers[call.logger]
    for kind, key in call.path:
        target = getattr(target, key) if kind == "attribute" else target[key]
    target(*unpacked(call.arguments, device), **unpacked(call.keywords, device))


class Recorder:
    """Stands for an object; its methods, and those of its parts, are recorded and return None."""

    def __init__(self, logger: int | None, path: tuple[Step, ...], record: Callable[[Call], None]) -> None:
        self._logger, self._path, self._record = logger, path, record

    def __getattr__(self, name: str) -> Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorder(self._logger, (*self._path, ("attribute", name)), self._record)

    def __getitem__(self, key: Any) -> Recorder:
        return Recorder(self._logger, (*self._path, ("item", key)), self._record)

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        # As they are now: the step may change a tensor or an array that it has shown.
        arguments, keywords = _with_arrays_copied(arguments), _with_arrays_copied(keywords)
        self._record(Call(self._logger, self._path, packed(arguments), packed(keywords)))


def _with_arrays_copied(value: Any) -> Any:
    return value.copy() if isinstance(value, numpy.ndarray) else map_children(value, _with_arrays_copied)


class RecordedLogger:
    """A logger as a step sees it: what it is told is recorded, and what it is asked for it still answers."""

    def __init__(self, logger: Any, place: int, record: Callable[[Call], None]) -> None:
        self._madpipe_logger, self._madpipe_recorder = logger, Recorder(place, (), record)

    def __getattr__(self, name: str) -> Any:
        if _is_recorded(name):
            return getattr(self._madpipe_recorder, name)
        return getattr(self._madpipe_logger, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # steps ask isinstance(self.logger, TensorBoardLogger)
        return type(self._madpipe_logger)


def recorded_loggers(loggers: Sequence[Any], record: Callable[[Call], None]) -> list[Any]:
    return [RecordedLogger(logger, place, record) for place, logger in enumerate(loggers)]


@contextmanager
def recorded_by_other_names(loggers: Sequence[Any], record: Callable[[Call], None]) -> Iterator[None]:
    """Let loggers record what this thread tells them meanwhile, by whatever name it comes to them.

    A program may keep a logger of the Trainer's in a global or in ``self.board``.
    """
    before: list[tuple[Any, type]] = []
    try:
        for place, logger in enumerate(loggers):
            kind = type(logger)
            if kind is RecordedLogger or id(logger) in _RECORDERS:
                continue
            try:
                logger.__class__ = _recording(kind)  # type: ignore[arg-type]
            except TypeError:  # a class in C, or with slots
                continue
            before.append((logger, kind))
            _RECORDERS[id(logger)] = threading.get_ident(), Recorder(place, (), record)
        yield
    finally:
        for logger, kind in before:
            logger.__class__ = kind
            del _RECORDERS[id(logger)]


_RECORDERS: dict[int, tuple[int, Recorder]] = {}
"""What loggers record with, and for which thread, by ``id``."""


@functools.cache
def _recording(kind: type) -> type:
    """A class of loggers that record what their ``kind`` would do."""

    def recording(name: str) -> property:
        def read(logger: Any) -> Any:
            thread, recorder = _RECORDERS.get(id(logger), (None, None))
            if recorder is not None and thread == threading.get_ident():
                return getattr(recorder, name)
            return getattr(super(own, logger), name)

        return property(read)

    names = [name for name in dir(kind) if _is_recorded(name)]
    table = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = type(kind)(kind.__name__, (kind,), {**table, **{name: recording(name) for name in names}})
    return own


def _is_recorded(name: str) -> bool:
    """Whether a logger tells the outside something by the attribute of this name."""
    return name == "experiment" or (name.startswith("log_") and name != "log_dir")
