"""What a recomputed layer changes twice per micro-batch: attributes in Python, globals, files.

Buffers and generators are put back when a layer runs again. What else a layer keeps, it keeps twice: a counter
counts each micro-batch twice, and a list gets two entries. The first micro-batch of each range of layers that are
recomputed shows it, and a line says it once. So it is for globals, attributes of classes and variables of
functions around, if the code of a layer names them, and for files that it opens. What only holds something of the
last run, such as its largest value, is not named: after both runs of a micro-batch it is the same.
"""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import nn

from deepspeed_partition.code_names import Name
from deepspeed_partition.engine.pipeline.beside_layers import (
    are_same,
    leaves,
    modules_of,
    name_of,
    names_beside,
)
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.profiling.attributes import attributes_of

MOST_NAMED = 9

_Place: TypeAlias = tuple[int, bool, str]
"""A layer; whether it is a name that its code reads beside its attributes; the attribute, or that name."""
_Values: TypeAlias = dict[_Place, list[Any]]


def tell_of_second_runs() -> None:
    """Say once in a job that layers are recomputed, and what of theirs nobody looks at."""
    warn_once(
        "second runs",
        "layers are recomputed: they run again in the backward of each micro-batch. Buffers and random generators "
        "are put back; what else such a layer changes, it changes twice: what shows in the first micro-batch is "
        "named with its layer, but objects of libraries and files that no Python code opens are not looked into. "
        "recompute='never', and activation_checkpoint_interval=0, run each layer once",
    )


@contextmanager
def changes_in_backward_told(functions: Sequence[Any], first: int) -> Iterator[None]:
    """Say once what layers change in a backward, while other micro-batches are between their forward and theirs.

    Args:
        functions: The layers, none of which the plan recomputes.
        first: The number of the first one.
    """
    modules, names = _reached(functions, first)
    before = _values_of(modules, names)
    yield
    places = sorted(_different(before, _values_of(modules, names)))
    if places:
        words = _in_words(places, {first + place: name_of(function) for place, function in enumerate(functions)})
        warn_once(
            f"changed in a backward/{', '.join(words)}",
            f"a backward changes {', '.join(words[:MOST_NAMED])}: code that torch.utils.checkpoint runs again, or "
            "a backward() of the program's own. It does so once per micro-batch, on the rank that has the layer, "
            "behind more forwards than in one process: what layers compute with it and hooks read of it differs. "
            "Count outside of the function that is given to checkpoint(), and gradients in a hook, such as "
            "on_after_backward",
        )


def _reached(functions: Sequence[Any], first: int) -> tuple[dict[int, nn.Module], dict[int, Sequence[Name]]]:
    """The modules of layers, and the names that their code reads, by their numbers."""
    modules = {
        first + place: module for place, function in enumerate(functions) for module in modules_of(function)
    }
    return modules, {first + place: names_beside(function) for place, function in enumerate(functions)}


def _in_words(places: Sequence[_Place], kinds: Mapping[int, str]) -> list[str]:
    return [
        f"{name} {'beside' if is_beside else 'of'} layer {place} ({kinds[place]})"
        for place, is_beside, name in places
    ]


class TwoRuns:
    """A look at the two runs of recomputed layers for one micro-batch.

    Args:
        functions: The layers; what is no module has no attributes.
        first: The number of the first one.
        when_over: Called after the second run.
    """

    def __init__(self, functions: Sequence[Any], first: int, when_over: Callable[[], object]) -> None:
        self._modules, self._names = _reached(functions, first)
        self._kinds = {first + place: name_of(function) for place, function in enumerate(functions)}
        self._after_first: _Values | None = None
        self._opened: list[str] = []
        self._when_over = when_over

    def of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the layers, and after the second run says what that has changed again."""

        def watched(*tensors: Any) -> Any:
            before, opened = _values_of(self._modules, self._names), list[str]()
            try:
                with _opened_for_writing(opened):
                    return run(*tensors)
            finally:  # a checkpoint may end the second run where it has what it needs
                after = _values_of(self._modules, self._names)
                if self._after_first is None:
                    self._after_first, self._opened = after, opened
                else:
                    self._tell(_different(before, after), _different(self._after_first, after))
                    self._tell_of_files(sorted({*opened} & {*self._opened}))
                    self._when_over()

        return watched

    def _tell(self, by_second: set[_Place], since_first: set[_Place]) -> None:
        # What other micro-batches change between the two runs is theirs, and what is only replaced is as before.
        named = sorted(by_second & since_first)
        if not named:
            return
        words = _in_words(named, self._kinds)
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        warn_once(
            f"changed twice/{', '.join(words)}",
            f"a run changes {', '.join(words[:MOST_NAMED])}{more}, and the plan runs the layer twice for each "
            "micro-batch, to recompute it: a counter counts twice, and a list gets two entries. Buffers are put "
            "back: use a buffer for it, or plan with recompute='never'",
        )

    def _tell_of_files(self, files: Sequence[str]) -> None:
        if files:
            first, last = min(self._kinds), max(self._kinds)
            which = f"layer {first} ({self._kinds[first]})" if first == last else f"layers {first} to {last}"
            warn_once(
                f"written twice/{first}/{last}",
                f"{which} opened {', '.join(map(repr, files[:MOST_NAMED]))} for writing in both runs of a "
                "micro-batch, and the plan runs it twice for each, to recompute it: what it writes stands there "
                "twice. Write in a hook of the run, or plan with recompute='never'",
            )


def _values_of(modules: Mapping[int, nn.Module], names: Mapping[int, Sequence[Name]]) -> _Values:
    found = {
        (place, False, f"{path}.{name}".removeprefix(".")): list(leaves(value))
        for place, module in modules.items()
        for path, part in module.named_modules()
        for name, value in attributes_of(part).items()
        if not isinstance(value, nn.Parameter)
    }
    return found | {
        (place, True, name.written): list(leaves(name.value)) for place, of in names.items() for name in of
    }


@contextmanager
def _opened_for_writing(found: list[str]) -> Iterator[None]:
    """Note the files that this thread opens for writing meanwhile."""
    opened, thread = builtins.open, threading.get_ident()

    def watched(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if set(mode) & set("wax+") and threading.get_ident() == thread:
            found.append(str(file))
        return opened(file, mode, *arguments, **keywords)

    builtins.open = io.open = watched
    try:
        yield
    finally:
        builtins.open = io.open = opened


def _different(values: _Values, others: _Values) -> set[_Place]:
    return {place for place, own in others.items() if not are_same(own, values.get(place))}
