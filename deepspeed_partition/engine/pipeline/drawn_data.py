"""What is drawn from a data iterator and kept for later, in memory that the iterator does not fill again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.tensor_values import version_of


def copy_of_micro_batch(value: Any) -> Any:
    """Return a micro-batch with a copy of each tensor and array in its tuples, lists and dicts.

    Anything else in it is not copied, and neither is a tensor that needs a gradient, which no iterator can fill
    again.
    """
    if type(value) is torch.Tensor:
        return value if value.requires_grad else value.clone()
    return with_leaves(Copies(), value)


def with_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a tree with ``function`` of each leaf in its place, as torch's ``tree_map``.

    Tuples and lists of tensors, as most data is, take a tenth of the time that ``tree_map`` takes.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_leaves(function, each) for each in value])
    return function(value) if kind is torch.Tensor else pytree.tree_map(function, value)


class Copies:
    """Copies tensors and arrays, and one that comes twice once."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def __call__(self, leaf: Any) -> Any:
        if not isinstance(leaf, (torch.Tensor, numpy.ndarray)) or getattr(leaf, "requires_grad", False):
            return leaf
        if id(leaf) not in self._known:
            self._known[id(leaf)] = leaf.clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
        return self._known[id(leaf)]


def gives_own_memory(iterator: Any) -> bool:
    """Whether what an iterator has given stays as it is when more is drawn from it, as it says itself."""
    return getattr(iterator, "gives_own_memory", False) is True


FILLED_AGAIN = (
    "the data iterator gives one {kind} object for several micro-batches and fills its tensors again, and all "
    "micro-batches of a batch are read before the first is computed: each sees the tensors of the last one. Give "
    "tensors in tuples, lists or dicts, of which copies are kept, or a new {kind} for each micro-batch"
)


class ObjectsOfBatch:
    """Says once where objects of the program's own classes, of which no copies are made, are filled again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[int | None]]] = {}

    def clear(self) -> None:
        self._known.clear()

    def note(self, drawn: Any) -> None:
        """Look at a micro-batch."""
        for part in drawn if isinstance(drawn, tuple | list) else (drawn,):
            if type(part) is torch.Tensor:
                continue
            for leaf in pytree.tree_leaves(part):
                held = () if isinstance(leaf, torch.Tensor) else getattr(leaf, "__dict__", {}).values()
                if tensors := [each for each in held if isinstance(each, torch.Tensor)]:
                    versions = [version_of(tensor) for tensor in tensors]
                    if self._known.setdefault(id(leaf), (leaf, versions))[1] != versions:
                        kind = type(leaf).__name__
                        warn_once(f"filled again/{kind}", FILLED_AGAIN.format(kind=kind))


@dataclass(slots=True)
class _Original:
    """A tensor as it was drawn, beside its copy; versions are None where torch counts no writes."""

    tensor: torch.Tensor
    version: int | None
    copy: torch.Tensor
    version_of_copy: int | None

    def is_to_be_written(self) -> bool:
        """Whether the copy was written to, and the tensor was not."""
        if version_of(self.tensor) != self.version:
            return False
        if self.version_of_copy is not None:
            return version_of(self.copy) != self.version_of_copy
        return not torch.equal(self.tensor, self.copy)


class Originals:
    """The tensors as they were drawn, for what a step or a loss function writes into them.

    In one process it writes into what the iterator gave, which may give the same tensor again in the next epoch.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, list[_Original]] = {}
        self._last_number: dict[int, int] = {}
        """The last micro-batch that has come in a piece of memory."""

    def clear(self) -> None:
        self._by_number.clear()
        self._last_number.clear()

    def note(self, number: int, drawn: Iterable[torch.Tensor], copies: Iterable[torch.Tensor]) -> None:
        """Note the tensors of a batch or a micro-batch, and their copies; numbers grow."""
        pairs = zip(drawn, copies, strict=True)
        noted = [_Original(own, version_of(own), copy, version_of(copy)) for own, copy in pairs if own is not copy]
        self._by_number[number] = noted
        self._last_number.update((_memory_of(each.tensor), number) for each in noted)

    def write_back(self, number: int) -> None:
        """Write what was written into copies into what was drawn, if the iterator has not filled it again."""
        for each in self._by_number.get(number, ()):
            is_newest = self._last_number.get(_memory_of(each.tensor)) == number
            if is_newest:
                del self._last_number[_memory_of(each.tensor)]
            if is_newest and each.is_to_be_written():
                self._write(each)
        self._by_number.pop(number, None)

    def _write(self, original: _Original) -> None:
        # Slices of one tensor count their writes together.
        others = [each for noted in self._by_number.values() for each in noted if each.version is not None]
        untouched = [each for each in others if version_of(each.tensor) == each.version]
        # One that inference mode has made, a user's own around an evaluation, can be written in it alone.
        with torch.inference_mode(original.tensor.is_inference()), torch.no_grad():
            original.tensor.copy_(original.copy)
        for each in untouched:
            each.version = version_of(each.tensor)


def tensors_in(value: Any) -> Sequence[torch.Tensor]:
    """The tensors in tuples, lists and dicts."""
    if type(value) is torch.Tensor:
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()


class OwnMemory(Iterator[Any]):
    """An iterator whose items nobody changes when the next one is drawn."""

    gives_own_memory = True

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __next__(self) -> Any:
        return next(self._items)
