"""An example of what a run's steps are given, read from its data before the data's loaders are there.

The first samples of a data set are read in this process, without the loader's sampler and workers. The common
random numbers and the loader's own are not drawn from, and what the data's own code counts, draws or keeps becomes
what it was before: of what makes the loaders, data sets, samplers, functions that collate, and loaders of another
class. A stream that is given to the Trainer as it is, and can be read once, gets back what was read of it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.profiling.attributes import HeldState

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The step that a run makes first, by the Trainer's function."""
_MOST_BYTES = 2**20
"""Bytes of the largest tensor or array that may be a state of the data's code."""
_MOST_BYTES_READ = 2**28
"""Bytes of all arrays that are looked through for changes, in a quarter of a second: of each the beginning.

The first batch is there, where data are not shuffled.
"""

CHANGED = (
    "reading the data changes them in place: the first samples were read once more than in one process, as an "
    "example, and data of more than 1 MiB keep what that has changed. Let the data set give a changed copy "
    "(`x = self.x[i] * 0.5` for `x *= 0.5`)"
)
"""What is said of data that an example has changed."""


def example_batch(trainer: Any, module: Any) -> Any:
    """The first batch of a run's first loader, as the step would be given it.

    Raises:
        ValueError: there is none that can be read.
    """
    run = str(trainer.state.fn.value)
    loop = trainer.fit_loop if run == "fit" else getattr(trainer, f"{run}_loop")
    source = loop._data_source
    with preserved_random_state(), _state_of_data_kept([getattr(source.instance, source.name, None)]) as large:
        loaders = source.dataloader()
        large.tell_if_changed()
        if run != "fit" and isinstance(loaders, list | tuple) and loaders:
            loaders = loaders[0]
        loaders = getattr(loaders, "iterables", loaders)  # a CombinedLoader
        if _is_loader(loaders):
            batch, again = _first_of(loaders)
            if again is not None and source.instance is loaders:
                source.instance = again
        else:
            batch = tree_map(lambda loader: _first_of(loader)[0], loaders, is_leaf=_is_loader)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return module._apply_batch_transfer_handler(batch, device=module.device, dataloader_idx=0)


def _is_loader(value: Any) -> bool:
    return isinstance(value, DataLoader) or not isinstance(value, dict | list | tuple)


def _first_of(loader: Any) -> tuple[Any, Any]:
    """The first batch of a loader, and what stands for the loader where it can be read only once."""
    if not isinstance(loader, DataLoader) and iter(loader) is loader:
        batch = _next(loader, loader)
        return batch, _Again(batch, loader)
    with _state_of_data_kept(_called_for(loader)) as large:
        batch = _first_of_many(loader)
        if large.have_changed():
            _first_of_many(loader)  # which changes nothing more where they are a cache
            large.tell_if_changed()
        return batch, None


def _called_for(loader: Any) -> Iterator[Any]:
    """Yield what is called where a loader is read."""
    if not isinstance(loader, DataLoader):
        yield getattr(loader, "__iter__", None)
        return
    yield loader.collate_fn
    for sampler in (loader.batch_sampler, loader.sampler):
        yield getattr(sampler, "__iter__", None)
    data = [loader.dataset]
    for each in data:  # grows by the data sets that others are made of, as Subset and ConcatDataset are
        for name in ("__getitem__", "__getitems__", "__iter__"):
            yield getattr(each, name, None)
        inner = [getattr(each, "dataset", None), *(getattr(each, "datasets", None) or ())]
        data += [other for other in inner if other is not None and all(other is not known for known in data)]


@contextmanager
def _state_of_data_kept(called: Iterable[Callable[..., Any] | None]) -> Iterator[_LargeData]:
    """Put back afterwards what functions of the data hold; large tensors and arrays are the data itself.

    Yields:
        Those.
    """
    held, large = HeldState(each for each in called if each is not None), _LargeData()

    def is_small(value: Any) -> bool:
        if value.nbytes > _MOST_BYTES:
            large.note(value)
        return bool(value.nbytes <= _MOST_BYTES)

    restore = held.remembered(buffers=True, copies=is_small, by_others=True)
    try:
        yield large
    finally:
        restore(frozenset())


class _LargeData:
    """Large tensors and arrays of the data's code, which are not copied."""

    def __init__(self) -> None:
        self._noted: list[tuple[Any, int, int | None]] = []
        self._known: set[int] = set()
        self._num_bytes_left = _MOST_BYTES_READ

    def note(self, value: Any) -> None:
        """Note how one of them is now."""
        if id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, Tensor):
            self._noted.append((value, 0, _mark_of(value, 0)))
        elif isinstance(value, np.ndarray) and _may_change(value):
            num_bytes = min(value.nbytes, self._num_bytes_left)
            self._num_bytes_left -= num_bytes
            self._noted.append((value, num_bytes, _mark_of(value, num_bytes)))

    def have_changed(self) -> bool:
        """Whether one of them has changed since it was noted, or since this was asked for last."""
        now = [(value, num_bytes, _mark_of(value, num_bytes)) for value, num_bytes, _ in self._noted]
        before, self._noted = self._noted, now
        return any(was != mark for (*_, was), (*_, mark) in zip(before, now, strict=True))

    def tell_if_changed(self) -> None:
        """Say that reading changes the data, where it does."""
        if self.have_changed():
            warn_once("data that reading changes", CHANGED)


def _may_change(array: Any) -> bool:
    """Whether an array of plain numbers may be written; those on a disk are many, and mostly may not."""
    return bool(array.flags.writeable and array.flags.c_contiguous and array.dtype.kind in "biufc")


def _mark_of(value: Any, num_bytes: int) -> int | None:
    """What is another number when a tensor, or the beginning of an array, has changed; None: that is not known."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    return zlib.crc32(value.reshape(-1).view(np.uint8)[:num_bytes])


def _first_of_many(loader: Any) -> Any:
    """The first batch of a loader that can be read again."""
    if not isinstance(loader, DataLoader):
        _check_begins_again(loader)
        return _next(iter(loader), loader)
    collates = loader._auto_collation
    if isinstance(loader.dataset, IterableDataset):
        _check_begins_again(loader.dataset)
        fetcher = _IterableDatasetFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False)
        return fetcher.fetch(range(loader.batch_size or 1) if collates else None)
    number: Any = 0
    if collates and loader.batch_size is None:
        number = list(_next(iter(loader.batch_sampler), loader))  # type: ignore[arg-type]
    elif collates:
        number = list(range(min(loader.batch_size or 1, len(loader.dataset))))  # type: ignore[arg-type]
    return _MapDatasetFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False).fetch(number)


def _check_begins_again(data: Any) -> None:
    """Refuse data that hands out one iterator each time, of which an example would be missing.

    Raises:
        ValueError: it does.
    """
    first = iter(data)
    if iter(data) is first:
        raise ValueError(
            f"the data, a {type(data).__name__}, is a stream that can be read once, and an example of it is needed"
        )


def _next(iterator: Iterator[Any], data: Any) -> Any:
    try:
        return next(iterator)
    except StopIteration:
        raise ValueError(f"the data, a {type(data).__name__}, has no batch") from None


class _Again:
    """A stream of which one batch has been read, with that batch."""

    def __init__(self, batch: Any, rest: Iterable[Any]) -> None:
        self._stream = itertools.chain([batch], rest)

    def __iter__(self) -> Iterator[Any]:
        return self._stream
