"""Code of layers that asks tensors for numbers or lengths, by which it may decide for all samples together.

``if x.mean() > 0:`` and ``y / max(1.0, y.abs().max().item())`` do that for a batch in one process and for each
micro-batch in a pipeline. Few samples need not show it: these may all lie on one side of what is decided. So the
layer's code is watched while it runs: which tensors come from its input, and where Python asks for a number of one
of them, or for a length that such numbers decide (``len(mask.nonzero())``, ``torch.unique(y).numel()``). What
parameters and buffers hold, and other sizes, are the same for every micro-batch and do not count.

What torch asks within its own functions, to check an index, is no decision of the layer, nor is what layers that
are found read of the sizes that they hand on.
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
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.capture import program

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
SHAPES = frozenset((getattr(Tensor.shape, "__get__"), Tensor.numel, Tensor.nelement, torch.numel))  # noqa: B009
"""What asks for all sizes of a tensor."""
SIZES = frozenset((Tensor.__len__, Tensor.size, *SHAPES))
"""What asks for a size of a tensor."""
LENGTHS_AT = {
    "nonzero": (0,), "argwhere": (0,), "masked_select": (0,), "bincount": (0,), "repeat_interleave": (0,),
    "_unique": (0,), "_unique2": (0, 2), "unique_dim": (0, 2), "unique_consecutive": (0, 2),
    "unique_dim_consecutive": (0, 2),
}  # fmt: skip
"""Functions of which some results are as long as the numbers in tensors say, and the places of these results."""
MOST_LINES = 3
OF_TORCH = Path(torch.__file__).parent
METHODS = (str(OF_TORCH / "_tensor.py"), torch.overrides.__file__)
OF_FOUND_LAYERS = Path(program.__file__)


def lines_that_decide(function: Callable[[Any], Any], inputs: Any) -> list[str]:
    """Run ``function`` and return the lines of its code that ask for numbers which depend on ``inputs``."""
    given = [leaf.detach().clone() for leaf in tree_leaves(inputs)]
    origins = Origins(given)
    questions = _Questions(origins)
    with origins, questions:
        function(tuple(given))
    return questions.lines[:MOST_LINES]


class Origins(TorchDispatchMode):
    """Follows which tensors come from the given ones."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        # A weak reference holds the place of a storage in memory, so that no other storage gets the same.
        self._known = {reference for tensor in given if (reference := _storage_of(tensor)) is not None}
        self._lengths = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.follow(func, args, kwargs, result)
        return result

    def follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Follow what a function has made; return whether it was given something that is followed."""
        if not any(map(self.has, tree_leaves((args, kwargs)))):
            return False
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        references = map(_storage_of, tree_leaves((result, written)))
        self._known.update(reference for reference in references if reference is not None)
        self._follow_lengths(func, args, kwargs, result)
        return True

    def _follow_lengths(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        results = result if isinstance(result, tuple | list) else (result,)
        name = func._schema.name.removeprefix("aten::")
        if name in LENGTHS_AT:
            dim = args[1] if name.startswith("unique_dim") else 0
            born = {place: (dim if place == 0 else 0,) for place in LENGTHS_AT[name]}
        elif name == "index" and (masks := _masks(args[1])) and any(self.has(args[1][place]) for place in masks):
            born = {0: (masks[0],)}
        else:
            born = {}
        for place, each in enumerate(results):
            if isinstance(each, Tensor) and not any(each is tensor for tensor in given):
                dims = born.get(place) or self._inherited(each, given)
                if dims:
                    self._lengths[each] = dims

    def _inherited(self, result: Tensor, given: Sequence[Tensor]) -> tuple[int, ...]:
        """The dimensions of a result that have a length of what it is made of, or a new one in its place."""
        lengths: set[int] = set()
        others = {1}
        for tensor in given:
            dims = self._lengths.get(tensor, ())
            for dim, size in enumerate(tensor.shape):
                (lengths if dim in dims else others).add(size)
        if not lengths:
            return ()
        return tuple(dim for dim, size in enumerate(result.shape) if size in lengths or size not in others)

    def depends(self, tensor: Any, dim: int | None) -> bool:
        """Whether numbers that were given decide how long a tensor is, in one dimension or in any."""
        dims = self._lengths.get(tensor, ()) if isinstance(tensor, Tensor) else ()
        return any(dim is None or dim % tensor.dim() == each for each in dims)

    def has(self, value: Any) -> bool:
        """Whether a value comes from what was given."""
        return bool(self._known) and _storage_of(value) in self._known


def _masks(indices: Any) -> list[int]:
    """The places of the masks among what indexes a tensor."""
    return [
        place
        for place, index in enumerate(indices)
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    ]


def _storage_of(value: Any) -> StorageWeakRef | None:
    is_plain = isinstance(value, Tensor) and value.layout is torch.strided
    return StorageWeakRef(value.untyped_storage()) if is_plain else None


class _Questions(TorchFunctionMode):
    """Notes the lines that ask for numbers."""

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func in ASKING and any(map(self._origins.has, tree_leaves((args, kwargs))))) or (
            func in SIZES and self._origins.depends(args[0], dim_of(func, args, kwargs or {}))
        ):
            line = _line_that_asks()
            if line is not None and line not in self.lines:
                self.lines.append(line)
        return func(*args, **(kwargs or {}))


def dim_of(func: Any, args: Any, kwargs: Any) -> int | None:
    """The dimension whose size is asked for; None: all of them."""
    if func is Tensor.__len__:
        return 0
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim if isinstance(dim, int) else None


def _line_that_asks() -> str | None:
    """The line that runs now; None where it is torch's own, or that of layers that were found."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename in METHODS:  # such as `3 in x` and `numpy.asarray(x)`
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    is_own = path.is_relative_to(OF_TORCH) or path == OF_FOUND_LAYERS
    return None if is_own else f"{path.name}:{frame.f_lineno}"
