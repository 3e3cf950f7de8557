"""Values that a step leaves on its module, in a form that shows later whether micro-batches go on changing them.

A step that has left a number alike for a batch and for its micro-batches where it was tried may not do so in
another batch. So what the first micro-batch leaves is kept, also of tensors that are changed in place and of
containers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_madpipe.steps.step_side_effects import PLAIN, Change
from lightning_madpipe.steps.torch_calls import are_others

MOST_ELEMENTS = 256
"""Elements of a tensor, and items of a container, up to which they are looked at."""
DEPTH = 3


class Other(NamedTuple):
    """What is not looked at: large tensors, and objects."""


class Elements(NamedTuple):
    """What a small tensor holds."""

    shape: tuple[int, ...]
    values: list[Any]


OTHER = Other()


def is_followed(change: Change) -> bool:
    """Whether a change can be compared with that of the next micro-batch; what is added to a list cannot."""
    return change.kind in ("bind", "refill") and _shown(change.value) is not OTHER


def shown(change: Change) -> Any:
    """What a change has left, as it is now."""
    return _shown(change.value)


def go_on(first: Any, last: Any) -> bool:
    """Whether two values that were :func:`shown` are not the same.

    What one of them has more of, such as the keys of more samples, is no sign: it is the same joined.
    """
    if type(first) is not type(last):
        return True
    if isinstance(first, Elements):
        return first.shape == last.shape and go_on(first.values, last.values)
    if isinstance(first, dict):
        return any(go_on(value, last[key]) for key, value in first.items() if key in last)
    if isinstance(first, list):
        return len(first) == len(last) and any(map(go_on, first, last))
    return first is not last and are_others(first, last)


def _shown(value: Any, depth: int = DEPTH) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.numel() > MOST_ELEMENTS or value.is_sparse or value.is_meta:
            return OTHER
        with _disable_current_modes():
            return Elements(tuple(value.shape), value.detach().flatten().tolist())
    if not depth or not isinstance(value, Mapping | list | tuple | deque) or len(value) > MOST_ELEMENTS:
        return OTHER
    if isinstance(value, Mapping):
        return {key: _shown(each, depth - 1) for key, each in value.items()}
    return [_shown(each, depth - 1) for each in value]
