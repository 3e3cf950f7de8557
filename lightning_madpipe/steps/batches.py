"""A Lightning batch cut into micro-batches along dimension 0, what ranks must agree on about it, and what a step
returns for the micro-batches joined again."""

from __future__ import annotations

import copy
import numbers
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from itertools import pairwise
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from deepspeed_partition.engine.pipeline.drawn_data import Copies
from deepspeed_partition.tensor_values import bytes_view, version_of

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of a batch's tensors, in order."""

JOINABLE = "return tensors or lists with an item per sample, in dicts, tuples or dataclasses of fixed fields"


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of nested mappings, lists, tuples and dataclasses, in order, and of objects within them."""
    if isinstance(batch, Tensor):
        yield batch
    elif _has_children(batch):
        for child in _children(batch):
            yield from tensors_of(child)
    else:
        yield from _tensors_in_object(batch)


def _tensors_to_cut(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch but for those of objects, such as graphs, which are not cut."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for child in _children(batch):
            yield from _tensors_to_cut(child)


def _tensors_in_object(value: Any) -> Iterator[Tensor]:
    """The tensors that an object has in its attributes, in those of objects there, and in their containers."""
    todo, seen = [value], set[int]()
    while todo:
        each = todo.pop()
        if isinstance(each, Tensor):
            yield each
        elif id(each) not in seen and not isinstance(each, type | FunctionType | ModuleType | nn.Module):
            seen.add(id(each))
            children = _children(each) if _has_children(each) else getattr(each, "__dict__", {}).values()
            todo += reversed(list(children))


def named_tensors_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch, in order, each with the expression that finds it: ``batch['labels']``."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif not _has_children(batch):
        yield from ((f"a tensor of {name}", tensor) for tensor in _tensors_in_object(batch))
    else:
        for key, child in zip(_names(batch), _children(batch), strict=False):
            yield from named_tensors_of(child, f"{name}[{key!r}]")


def copy_of_batch(batch: Any) -> Any:
    """A batch of the same type with a copy of each tensor and array, for a loader may fill these again."""
    copies = Copies()

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor | numpy.ndarray):
            return copies(value)
        return copy_of_object(value) if is_object(value) else map_children(value, copied)

    return copied(batch)


@contextmanager
def normal_tensors(batch: Any) -> Iterator[Any]:
    """Give a batch with copies of the tensors that inference mode has made, and write back what is written there.

    Such are the batches of an evaluation on a GPU, which come to their device within inference mode. It is entered
    outside of that.
    """
    if not any(tensor.is_inference() for tensor in tensors_of(batch)):
        yield batch
        return
    pairs: list[tuple[Tensor, Tensor, int | None]] = []

    def normal(value: Any) -> Any:
        if isinstance(value, Tensor):
            made = value.clone() if value.is_inference() else value
        elif is_object(value):
            made = copy_of_object(value)
        else:
            return map_children(value, normal)
        pairs.extend(
            (own, each, version_of(each)) for own, each in zip(tensors_of(value), tensors_of(made), strict=True)
        )
        return made

    yield normal(batch)
    with torch.inference_mode():
        for own, made, version in pairs:
            if own is not made and version_of(made) != version:
                own.copy_(made)


def is_object(value: Any) -> bool:
    """Whether something in a batch is an object with tensors, such as a graph, which is never cut."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor)
        and not _has_children(value)
        and next(_tensors_in_object(value), None) is not None
    )


def copy_of_object(value: Any) -> Any:
    """An object of a batch with tensors of its own: a step may set its attributes and change its tensors.

    One that cannot be copied, as with an open file, is itself.
    """
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return value


def with_own_objects(batch: Any) -> Any:
    """A batch with the same tensors, and copies of the objects in it, for a run of a step to see what it calls."""
    if is_object(batch):
        return copy_of_object(batch)
    return batch if isinstance(batch, Tensor) else map_children(batch, with_own_objects)


OF_AN_OBJECT = (
    ". Let collate_fn return what it has in a dict, with a row per sample in each tensor: of graphs of several "
    "sizes the features of nodes (graphs, nodes, features) and the adjacency (graphs, nodes, nodes), padded, and "
    "a mask (graphs, nodes, 1)"
)


OR_WHOLE = "; or MadPipeStrategy(num_micro_batches=1), with which each batch passes whole, stage after stage"


def _has_children(batch: Any) -> bool:
    return isinstance(batch, Mapping | list | tuple | str) or is_dataclass(batch)


def batch_size_of(batch: Any) -> int:
    """Samples in ``batch``: the length of dimension 0 of its first tensor that has one.

    Raises:
        UncutBatchError: no tensor with a dimension 0; a sparse or nested tensor.
        ValueError: no sample in it.
    """
    if any(map(_is_sparse_or_nested, _tensors_to_cut(batch))):
        raise UncutBatchError(
            "the batch holds a sparse or nested tensor, which cannot be cut into micro-batches: let the data "
            "loader return a padded or dense one (to_padded_tensor(), to_dense()), and change it back in a layer"
            f"{OR_WHOLE}"
        )
    size = next((tensor.shape[0] for tensor in _tensors_to_cut(batch) if tensor.ndim > 0), None)
    if size is None:
        raise UncutBatchError(
            f"the batch, a {type(batch).__name__}, holds no tensor whose dimension 0 counts its samples, "
            "in lists, tuples, dicts or dataclasses: return one from the data loader, so that the batch can be "
            f"cut into micro-batches{'' if _has_children(batch) else OF_AN_OBJECT}{OR_WHOLE}"
        )
    if size == 0:
        raise ValueError("the batch holds no samples: drop empty batches in the data loader")
    return size


def size_of(batch: Any, num_micro_batches: int) -> int:
    """Samples in ``batch``, where it is cut; of one that passes whole the rows of its first tensor, or 1.

    Raises:
        UncutBatchError: it is to be cut, and cannot be.
        ValueError: no sample in it.
    """
    if num_micro_batches > 1:
        return batch_size_of(batch)
    size = next((tensor.size(0) for tensor in tensors_of(batch) if tensor.ndim > 0), 1)
    if size == 0:
        raise ValueError("the batch holds no samples: drop empty batches in the data loader")
    return size


def not_by_samples(size: int) -> str:
    """What to do about a batch of ``size`` samples that cannot be cut into micro-batches by its samples."""
    return (
        f"every tensor whose dimension 0 is {size} is cut, also one that has that length by chance, or that has "
        "the samples in another dimension, too, such as the adjacency of a graph. "
        "MadPipeStrategy(num_micro_batches=1) cuts nothing; of a tensor that does not go by samples make a buffer "
        "of the module, or choose another batch_size"
    )


def split_batch(
    batch: Any, num_micro_batches: int, *, uneven: bool = False, ones_apart: bool = False
) -> list[Any]:
    """Cut ``batch`` into at most ``num_micro_batches`` pieces whose sizes differ by one sample at most.

    A batch of fewer samples gives a piece per sample. Tensors are cut along dimension 0 (views, not
    copies), and so are lists and tuples of one item per sample that hold no tensors, such as names.
    What has no dimension 0 (numbers, strings, None) goes to every piece. One micro-batch is the batch itself,
    whatever it is.

    Args:
        uneven: The pieces are not all of one size, so that what depends on the number of samples shows it.
        ones_apart: No piece has one sample where another one has more, for which code may go another way.

    Raises:
        UncutBatchError: no tensor to count samples by, or an object beside tensors that has one, too.
        ValueError: a tensor whose dimension 0 has another length.
    """
    if num_micro_batches == 1:
        size_of(batch, 1)
        return [batch]
    size = batch_size_of(batch)
    _refuse_objects_of_samples(batch, size)
    bounds = _bounds(size, min(num_micro_batches, size), uneven=uneven, ones_apart=ones_apart)
    return [_rows_of(batch, size, range(start, stop)) for start, stop in pairwise(bounds)]


def _refuse_objects_of_samples(batch: Any, size: int, name: str = "batch") -> None:
    """Refuse an object beside tensors, such as a graph in a dict, whose tensors go by the samples, too.

    Each micro-batch would get all of it. Other objects, such as settings, are for all samples.
    """
    if isinstance(batch, Tensor):
        return
    if _has_children(batch):
        for key, child in zip(_names(batch), _children(batch), strict=False):
            _refuse_objects_of_samples(child, size, f"{name}[{key!r}]")
    elif size > 1 and any(each.ndim and each.size(0) == size for each in _tensors_in_object(batch)):
        raise UncutBatchError(
            f"{name} is a {type(batch).__name__} with a tensor whose dimension 0 is the number of samples, "
            f"{size}, and objects are not cut into micro-batches{OF_AN_OBJECT}{OR_WHOLE}"
        )


def _bounds(size: int, num_pieces: int, *, uneven: bool, ones_apart: bool) -> list[int]:
    if uneven and num_pieces == size > 2:
        num_pieces -= 1
    if ones_apart and num_pieces < size < 2 * num_pieces:
        num_pieces = size // 2
    if ones_apart and uneven and size == 2 * num_pieces > 4:
        num_pieces -= 1
    # The larger pieces come first: the first one, which is measured and planned for, is the most that comes.
    base, num_larger = divmod(size, num_pieces)
    bounds = [piece * base + min(piece, num_larger) for piece in range(num_pieces + 1)]
    if uneven and num_larger == 0 and num_pieces > 1 and base > 1 + ones_apart:
        bounds[1:-1] = [bound + 1 for bound in bounds[1:-1]]  # one more in the first, one less in the last
    return bounds


def join_pieces(
    pieces: Sequence[Any],
    sizes: Sequence[int],
    where: str,
    *,
    mean: bool = False,
    factors: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> Any:
    """What a step returns for a whole batch, from what it returned for the micro-batches.

    Tensors and arrays whose dimension 0 counts the samples are joined along it, and so are lists of one item
    per sample. Mappings, other lists, tuples and dataclasses are joined field by field. Anything else must be
    the same for all micro-batches.

    Args:
        pieces: One for each micro-batch, in order.
        sizes: Samples of each micro-batch.
        where: What the pieces are, for the message.
        mean: Take fractions, such as a loss, for means over the samples, and join them to the mean.
        factors: Of each micro-batch in numbers that are sums with factors, by what ``where`` is of them.

    Raises:
        ValueError: what cannot be joined.
    """
    first = pieces[0]
    if any(type(piece) is not type(first) for piece in pieces):
        kinds = ", ".join(sorted({type(piece).__name__ for piece in pieces}))
        raise ValueError(f"{where} is of different types for the micro-batches of one batch, {kinds}: {JOINABLE}")
    if where in factors and is_number(first):
        return sum(piece * factor for piece, factor in zip(pieces, factors[where], strict=True) if factor)
    if isinstance(first, Tensor | numpy.ndarray) and all(
        piece.ndim and len(piece) == size for piece, size in zip(pieces, sizes, strict=True)
    ):
        return torch.cat(list(pieces)) if isinstance(first, Tensor) else numpy.concatenate(pieces)
    if mean and is_fraction(first):
        total = sum(piece * size for piece, size in zip(pieces, sizes, strict=True))
        return total / sum(sizes)
    if _is_per_sample(pieces, sizes):
        return type(first)(item for piece in pieces for item in piece)
    if isinstance(first, Mapping | list | tuple) or (is_dataclass(first) and not isinstance(first, type)):
        return _joined_fields(pieces, sizes, where, mean, factors)
    is_uncut = isinstance(first, Tensor) and not (mean and is_number(first))
    if is_uncut or not all(_equal(piece, first) for piece in pieces[1:]):
        shown = f"of shape {tuple(first.shape)} " if isinstance(first, Tensor) else ""
        raise ValueError(
            f"{where}, a {type(first).__name__} {shown}for the first of {len(pieces)} micro-batches, cannot be "
            f"joined: {JOINABLE}"
        )
    return first


def _joined_fields(
    pieces: Sequence[Any], sizes: Sequence[int], where: str, mean: bool, factors: Mapping[str, Sequence[float]]
) -> Any:
    names = _names(pieces[0])
    if any(_names(piece) != names for piece in pieces):
        raise ValueError(f"{where} has different fields for the micro-batches of one batch: {JOINABLE}")
    children = [list(_children(piece)) for piece in pieces]
    joined = iter(
        [
            join_pieces(same, sizes, f"{where}[{name!r}]", mean=mean, factors=factors)
            for name, same in zip(names, zip(*children, strict=True), strict=True)
        ]
    )
    return map_children(pieces[0], lambda _: next(joined))


def _names(piece: Any) -> list[Any]:
    if isinstance(piece, Mapping):
        return list(piece)
    if isinstance(piece, list | tuple):
        return list(range(len(piece)))
    return [f.name for f in fields(piece)] if is_dataclass(piece) else []


def is_number(value: Any) -> bool:
    """Whether this is one real number, also in a tensor."""
    return isinstance(value, numbers.Real) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )


def is_fraction(value: Any) -> bool:
    """Whether this is one number that may have a fraction, also in a tensor."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)


def _is_per_sample(pieces: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether these are lists of an item per sample, and not, by chance, of as many tensors for all samples.

    A tuple is a record, but that data loaders make one of the samples' strings.
    """
    if not isinstance(pieces[0], list | tuple):
        return False
    if isinstance(pieces[0], tuple) and not all(isinstance(item, str) for piece in pieces for item in piece):
        return False
    counts = all(len(piece) == size for piece, size in zip(pieces, sizes, strict=True))
    return counts and not all(
        isinstance(item, Tensor) and item.ndim and len(item) == size
        for piece, size in zip(pieces, sizes, strict=True)
        for item in piece
    )


def _equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):  # arrays, which have no single answer
        return False


def shapes_of(batch: Any) -> Shapes:
    """Return the shapes of a batch's tensors: where they are the same, those of activations are."""
    return tuple(tuple(tensor.shape) for tensor in tensors_of(batch))


def fingerprint_of(batch: Any) -> list[tuple[tuple[int, ...], int]]:
    """The shape and a checksum of each tensor: what ranks compare to see that they read the same batch.

    Sparse and nested ones have none: where the batch is cut they are refused, on every rank.
    """
    return [
        ((), 0) if _is_sparse_or_nested(tensor) else (tuple(tensor.shape), _checksum(tensor))
        for tensor in tensors_of(batch)
    ]


def _is_sparse_or_nested(tensor: Tensor) -> bool:
    return tensor.is_nested or tensor.layout is not torch.strided


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(bytes_view(tensor.cpu()).numpy().tobytes())


def some_of(batch: Any, size: int, number: int) -> Any:
    """Samples from the whole of a batch of ``size``, in order, cut out as :func:`split_batch` cuts it."""
    steps = max(number - 1, 1)
    return _rows_of(batch, size, [place * (size - 1) // steps for place in range(number)])


def refuse_lists_of_samples(batch: Any, samples: int) -> None:
    """Refuse a batch of lists with a tensor for each sample, all of one length, which would be cut along that.

    Such as sequences that were not stacked. By themselves they look as lists of tensors for all samples do.

    Args:
        samples: In a batch, by its loader.

    Raises:
        UncutBatchError: it is one.
    """
    lists = list(_lists_of_tensors(batch))
    rows = {tensor.shape[0] for tensor in _tensors_to_cut(batch) if tensor.ndim}
    everything = sum(map(len, lists)) == sum(1 for tensor in _tensors_to_cut(batch) if tensor.ndim)
    if lists and everything and len(rows) == 1 and samples not in rows and {*map(len, lists)} == {samples} != {1}:
        raise UncutBatchError(
            f"the batch has lists of {samples} tensors, one for each sample of the loader's batch_size, and all "
            f"have {rows.pop()} rows, such as sequences of one length: dimension 0 of every tensor must count the "
            "samples, so that the batch can be cut into micro-batches. Let collate_fn stack them, "
            "torch.stack(tensors), or pad them, pad_sequence(tensors, batch_first=True)"
        )


def _lists_of_tensors(batch: Any) -> Iterator[Any]:
    if isinstance(batch, list | tuple) and batch and all(isinstance(each, Tensor) and each.ndim for each in batch):
        yield batch
    elif not isinstance(batch, Tensor):
        for child in _children(batch):
            yield from _lists_of_tensors(child)


class UncutBatchError(ValueError):
    """A batch that cannot be cut into samples, whatever the layers are."""


def _rows_of(batch: Any, size: int, rows: range | list[int]) -> Any:
    if isinstance(batch, Tensor):
        if batch.ndim == 0:
            return batch
        if batch.shape[0] != size:
            raise UncutBatchError(
                f"a tensor of shape {tuple(batch.shape)} stands in a batch whose first tensor has {size} rows: "
                "dimension 0 of every tensor must count the samples, so that the batch can be cut into "
                "micro-batches. Let collate_fn pad tensors to a row per sample, and give the loaders of a "
                "CombinedLoader one batch_size; make what belongs to no sample a buffer of the module"
                f"{OR_WHOLE}"
            )
        return batch[rows.start : rows.stop] if isinstance(rows, range) else batch[rows]
    if isinstance(batch, list | tuple) and len(batch) == size and next(tensors_of(batch), None) is None:
        return (
            batch[rows.start : rows.stop] if isinstance(rows, range) else type(batch)(batch[row] for row in rows)
        )
    if isinstance(batch, list | tuple) and len(batch) > 2 and all(isinstance(each, Tensor) for each in batch):
        lengths = list(dict.fromkeys(each.shape[0] for each in batch if each.ndim))
        if len(lengths) > 1 and len({each.shape[1:] for each in batch if each.ndim}) == 1:
            raise UncutBatchError(
                f"a {type(batch).__name__} of {len(batch)} tensors stands in a batch of {size} samples, and they "
                f"have {', '.join(map(str, lengths[:4]))}{', ...' * (len(lengths) > 4)} rows, such as sets of "
                "several sizes: a batch is cut into micro-batches along dimension 0 of every tensor, which counts "
                "the samples. Let collate_fn pad them to one tensor of a row per sample, with a mask "
                "(torch.nn.utils.rnn.pad_sequence), and let the layers use the mask"
                f"{OR_WHOLE}"
            )
    return map_children(batch, lambda child: _rows_of(child, size, rows))


def _children(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, list | tuple):
        yield from batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from (getattr(batch, field.name) for field in fields(batch))


def map_children(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A batch of the same type with ``function`` applied to each child; what has no children is itself."""
    if type(batch) is dict:
        return {key: function(child) for key, child in batch.items()}
    if isinstance(batch, MutableMapping):
        # With whatever else such a class remembers, such as the factory of a defaultdict.
        mapping = copy.copy(batch)
        for key, child in batch.items():
            mapping[key] = function(child)
        return mapping
    if isinstance(batch, Mapping):
        return type(batch)({key: function(child) for key, child in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, deque):
        return deque(map(function, batch), batch.maxlen)
    if isinstance(batch, list | tuple):
        return type(batch)(map(function, batch))
    if is_dataclass(batch) and not isinstance(batch, type):
        record = copy.copy(batch)
        for field in fields(batch):
            # Frozen or not, and with fields that its __init__ does not take.
            object.__setattr__(record, field.name, function(getattr(batch, field.name)))
        return record
    return batch
