"""A Lightning batch cut into micro-batches along dimension 0, and what ranks must agree on about it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors, in order."""


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of nested mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for child in _children(batch):
            yield from tensors_of(child)


def batch_size_of(batch: Any) -> int:
    """Samples in ``batch``: the length of dimension 0 of its first tensor that has one.

    Raises:
        ValueError: no tensor with a dimension 0, or no sample in it.
    """
    size = next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.ndim > 0), None)
    if size is None:
        raise ValueError(
            f"the batch, a {type(batch).__name__}, holds no tensor whose dimension 0 counts its samples: "
            "return one from the data loader, so that the batch can be cut into micro-batches"
        )
    if size == 0:
        raise ValueError("the batch holds no samples: drop empty batches in the data loader")
    return size


def split_batch(batch: Any, num_micro_batches: int) -> list[Any]:
    """Cut ``batch`` into at most ``num_micro_batches`` pieces whose sizes differ by one sample at most.

    A batch of fewer samples gives a piece per sample. Tensors are cut along dimension 0 (views, not
    copies), and so are lists and tuples of one item per sample that hold no tensors, such as names.
    What has no dimension 0 (numbers, strings, None) goes to every piece.

    Raises:
        ValueError: no tensor to count samples by, or one whose dimension 0 has another length.
    """
    size = batch_size_of(batch)
    num_pieces = min(num_micro_batches, size)
    # The larger pieces come first: the first one, which is measured and planned for, is the most that comes.
    base, num_larger = divmod(size, num_pieces)
    bounds = [piece * base + min(piece, num_larger) for piece in range(num_pieces + 1)]
    return [_slice(batch, size, start, stop) for start, stop in pairwise(bounds)]


def shapes_of(batch: Any) -> Shapes:
    """Micro-batches of the same shapes have activations of the same shapes."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(batch))


def fingerprint_of(batch: Any) -> list[tuple[tuple[int, ...], int]]:
    """The shape and a checksum of each tensor: what ranks compare to see that they read the same batch."""
    return [(tuple(tensor.shape), _checksum(tensor)) for tensor in tensors_of(batch)]


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0


def _slice(batch: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        if batch.shape[0] != size:
            raise ValueError(
                f"a tensor of shape {tuple(batch.shape)} stands in a batch of {size} samples: dimension 0 "
                "of every tensor must count the samples, so that the batch can be cut into micro-batches"
            )
        return batch[start:stop]
    if isinstance(batch, list | tuple) and len(batch) == size and next(tensors_of(batch), None) is None:
        return batch[start:stop]
    return _map_children(batch, lambda child: _slice(child, size, start, stop))


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from (getattr(batch, field.name) for field in fields(batch))


def _map_children(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A batch of the same type with ``function`` applied to each child; what has no children is itself."""
    if isinstance(batch, Mapping):
        mapped = {key: function(child) for key, child in batch.items()}
        return mapped if type(batch) is dict else type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(function, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in fields(batch) if field.init]
        return replace(batch, **{name: function(getattr(batch, name)) for name in names})
    return batch
