"""Attributes in Python that a recomputed layer changes twice per micro-batch: numbers, lists, dicts, sets.

Buffers and generators are put back when a layer runs again. What else a layer keeps, it keeps twice: a counter
counts each micro-batch twice, and a list gets two entries. The first micro-batch of each range of layers that are
recomputed shows it, and a line says it once. An attribute that only holds something of the last run, such as its
largest value, is not named: after both runs of a micro-batch it is the same.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import members_of
from deepspeed_partition.profiling.attributes import attributes_of

DEPTH = 3
"""Depth, in containers and objects, to which an attribute is looked at."""
MOST_MEMBERS = 1000
"""Most members of a list, dict or set whose values are looked at: of longer ones the length is, of larger tensors
nothing."""
MOST_NAMED = 4

_Place: TypeAlias = tuple[int, str]
"""A layer, and an attribute in it."""
_Values: TypeAlias = dict[_Place, list[Any]]


def tell_of_second_runs() -> None:
    """Say once in a job that layers are recomputed, and what of theirs nobody looks at."""
    warn_once(
        "second runs",
        "layers are recomputed: they run again in the backward of each micro-batch. Buffers and random generators "
        "are put back; what else such a layer changes (files, globals, objects, tensors of more than "
        f"{MOST_MEMBERS:,} numbers), it changes twice. recompute='never', and activation_checkpoint_interval=0, "
        "run each layer once",
    )


class TwoRuns:
    """A look at the two runs of recomputed layers for one micro-batch.

    Args:
        functions: The layers; what is no module has no attributes.
        first: The number of the first one.
        when_over: Called after the second run.
    """

    def __init__(self, functions: Sequence[Any], first: int, when_over: Callable[[], object]) -> None:
        self._modules = {
            first + place: module for place, function in enumerate(functions) for module in _modules_of(function)
        }
        self._after_first: _Values | None = None
        self._when_over = when_over

    def of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the layers, and after the second run says what that has changed again."""

        def watched(*tensors: Any) -> Any:
            before = _values_of(self._modules)
            try:
                return run(*tensors)
            finally:  # a checkpoint may end the second run where it has what it needs
                after = _values_of(self._modules)
                if self._after_first is None:
                    self._after_first = after
                else:
                    self._tell(_different(before, after), _different(self._after_first, after))
                    self._when_over()

        return watched

    def _tell(self, by_second: set[_Place], since_first: set[_Place]) -> None:
        # What other micro-batches change between the two runs is theirs, and what is only replaced is as before.
        named = sorted(by_second & since_first)
        if not named:
            return
        words = [f"{name} of layer {place} ({type(self._modules[place]).__name__})" for place, name in named]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        warn_once(
            f"changed twice/{', '.join(words)}",
            f"a run changes {', '.join(words[:MOST_NAMED])}{more}, and the plan runs the layer twice for each "
            "micro-batch, to recompute it: a counter counts twice, and a list gets two entries. Buffers are put "
            "back: use a buffer for it, or plan with recompute='never'",
        )


def _modules_of(function: Any) -> list[nn.Module]:
    """The module of a layer, also of a tied one that a function runs."""
    parts = function.args if isinstance(function, functools.partial) else (function,)
    return [part for part in parts if isinstance(part, nn.Module)][:1]


def _values_of(modules: Mapping[int, nn.Module]) -> _Values:
    return {
        (place, f"{path}.{name}".removeprefix(".")): list(_leaves(value, DEPTH))
        for place, module in modules.items()
        for path, part in module.named_modules()
        for name, value in attributes_of(part).items()
        if not isinstance(value, nn.Parameter)
    }


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """The numbers, lengths and strings in a value."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= MOST_MEMBERS and value.layout is torch.strided and not value.is_meta:
            yield from value.detach().flatten().tolist()
    elif isinstance(value, np.ndarray):
        if value.size <= MOST_MEMBERS and value.dtype.kind in "biufc":
            yield from value.ravel().tolist()
    elif isinstance(value, numbers.Number | str):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | deque | dict):
        yield len(value)
        if depth and len(value) <= MOST_MEMBERS and not isinstance(value, set | frozenset):
            for member in value.values() if isinstance(value, dict) else value:
                yield from _leaves(member, depth - 1)
    elif depth:
        for member in (members_of(value) or {}).values():
            yield from _leaves(member, depth - 1)


def _different(values: _Values, others: _Values) -> set[_Place]:
    return {place for place, own in others.items() if not _are_same(own, values.get(place))}


def _are_same(values: list[Any], others: list[Any] | None) -> bool:
    return others is not None and len(values) == len(others) and all(map(_is_same, values, others))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        # A recomputed number may differ in its last digits.
        return math.isclose(value, other, rel_tol=1e-5) or (math.isnan(value) and math.isnan(other))
    return bool(value == other)
