"""Code of layers that asks tensors for numbers, by which it may decide for all samples that it is given.

``if x.mean() > 0:`` and ``y / max(1.0, y.abs().max().item())`` do that for a batch in one process and for each
micro-batch in a pipeline. Few samples need not show it: these may all lie on one side of what is decided. So the
layer's code is watched while it runs: which tensors come from its input, and where Python asks for a number of one
of them. What parameters and buffers hold, and sizes, are the same for every micro-batch and do not count.

What torch asks within its own functions, to check an index, is no decision of the layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ASKING = frozenset(
    (
        Tensor.__array__,
        Tensor.__bool__,
        Tensor.__contains__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__int__,
        Tensor.allclose,
        Tensor.equal,
        Tensor.is_nonzero,
        Tensor.item,
        Tensor.numpy,
        Tensor.tolist,
        torch.allclose,
        torch.equal,
        torch.is_nonzero,
    )
)
MOST_LINES = 3
OF_TORCH = Path(torch.__file__).parent
METHODS = (str(OF_TORCH / "_tensor.py"), torch.overrides.__file__)


def lines_that_decide(function: Callable[[Any], Any], inputs: Any) -> list[str]:
    """Run ``function`` and return the lines of its code that ask for numbers which depend on ``inputs``."""
    given = [leaf.detach().clone() for leaf in tree_leaves(inputs)]
    origins = _Origins(given)
    questions = _Questions(origins)
    with origins, questions:
        function(tuple(given))
    return questions.lines[:MOST_LINES]


class _Origins(TorchDispatchMode):
    """Follows which tensors come from the given ones."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # A weak reference holds the place of a storage in memory, so that no other storage gets the same.
        self._known = {reference for tensor in given if (reference := _storage_of(tensor)) is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(map(self.has, tree_leaves((args, kwargs)))):
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            references = map(_storage_of, tree_leaves((result, written)))
            self._known.update(reference for reference in references if reference is not None)
        return result

    def has(self, value: Any) -> bool:
        """Whether a value comes from what was given."""
        return bool(self._known) and _storage_of(value) in self._known


def _storage_of(value: Any) -> StorageWeakRef | None:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return StorageWeakRef(value.untyped_storage()) if is_plain else None


class _Questions(TorchFunctionMode):
    """Notes the lines that ask for numbers."""

    def __init__(self, origins: _Origins) -> None:
        super().__init__()
        self._origins = origins
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKING and any(map(self._origins.has, tree_leaves((args, kwargs)))):
            line = _line_that_asks()
            if line is not None and line not in self.lines:
                self.lines.append(line)
        return func(*args, **(kwargs or {}))


def _line_that_asks() -> str | None:
    """The line that runs now; None where it is torch's own."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename in METHODS:  # such as `3 in x` and `numpy.asarray(x)`
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return None if path.is_relative_to(OF_TORCH) else f"{path.name}:{frame.f_lineno}"
