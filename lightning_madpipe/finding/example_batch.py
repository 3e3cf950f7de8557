"""An example of what a run's steps are given, read from its data before the data's loaders are there.

The first samples of a data set are read in this process, without the loader's sampler and workers; data that
need these give the loader's own first batch. The common random numbers and the loader's own are not drawn from,
and what the data's own code counts, draws or keeps becomes what it was before: of what makes the loaders, data
sets, samplers, functions that collate, loaders of another class, and hooks that a batch goes through. A stream
that is given to the Trainer as it is, and can be read once, gets back what was read of it.
"""

from __future__ import annotations

import copy
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

from deepspeed_partition.code_names import is_librarys
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.profiling.attributes import HeldState
from deepspeed_partition.tensor_values import num_bytes_of, version_of
from lightning_madpipe.finding.step_call import line_of_users

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The step that a run makes first, by the Trainer's function."""
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""What a batch goes through before a step has it, of the module or of a datamodule."""
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


class NoExampleError(ValueError):
    """There is no example of the data, for a reason that is known."""


def example_batch(trainer: Any, module: Any) -> Any:
    """The first batch of a run's first loader, as the step would be given it.

    Raises:
        NoExampleError: there is none that can be read.
    """
    run = str(trainer.state.fn.value)
    loop = trainer.fit_loop if run == "fit" else getattr(trainer, f"{run}_loop")
    source = loop._data_source
    called = [getattr(source.instance, source.name, None), *_hooks_of_batches(trainer)]
    with preserved_random_state(), _state_of_data_kept(called) as large:
        loaders = source.dataloader()
        large.tell_if_changed()
        try:
            batch = trainer.precision_plugin.convert_input(_first_of_all(loaders, run, source))
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            return module._apply_batch_transfer_handler(batch, device=module.device, dataloader_idx=0)
        except NoExampleError:
            raise
        except Exception as error:  # of the program's code
            raise NoExampleError(
                f"an example of the data is read before the hooks of {run} have run, and that raises "
                f"{_in_words(error)}"
            ) from error


def _hooks_of_batches(trainer: Any) -> Iterator[Callable[..., Any]]:
    """Yield the hooks of the program that a batch goes through."""
    for name in _HOOKS:  # Lightning's (2.5 to 2.6) choice between the module and a datamodule
        hook = getattr(trainer._data_connector._datahook_selector.get_instance(name), name)
        if not is_librarys(hook):
            yield hook


def _in_words(error: Exception) -> str:
    """An error of the program, with its line; of a loader's worker the last line of what that printed."""
    lines = str(error).splitlines() or [""]
    if "in DataLoader worker process" in lines[0]:
        return f"{lines[-1]} in a worker"
    return f"{type(error).__name__}: {error} ({line_of_users(error)})"


def _first_of_all(loaders: Any, run: str, source: Any) -> Any:
    """The first batch of a run's loaders, of which ``source`` knows."""
    if run != "fit" and isinstance(loaders, list | tuple) and loaders:
        loaders = loaders[0]
    loaders = getattr(loaders, "iterables", loaders)  # a CombinedLoader
    if not _is_loader(loaders):
        return tree_map(lambda loader: _first_of(loader)[0], loaders, is_leaf=_is_loader)
    batch, again = _first_of(loaders)
    if again is not None and source.instance is loaders:
        source.instance = again
    return batch


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
        is_large = num_bytes_of(value) > _MOST_BYTES
        if is_large:
            large.note(value)
        return not is_large

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
        return version_of(value)
    return zlib.crc32(value.reshape(-1).view(np.uint8)[:num_bytes])


def _first_of_many(loader: Any) -> Any:
    """The first batch of a loader that can be read again."""
    if not isinstance(loader, DataLoader):
        _check_begins_again(loader)
        return _next(iter(loader), loader)
    try:
        return _first_samples(loader)
    except NoExampleError:
        raise
    except Exception:  # such as that of data that ask for their worker, or for what a sampler gives
        return _first_by_workers(loader)


def _first_samples(loader: DataLoader) -> Any:
    """A batch of the first samples, without sampler and workers."""
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


def _first_by_workers(loader: DataLoader) -> Any:
    """The first batch as the loader reads it, with its sampler and workers, which end with that."""
    again = copy.copy(loader)
    vars(again)["_iterator"] = None  # persistent workers of the loader itself begin with the run
    generator = loader.generator
    before = None if generator is None else generator.get_state()
    try:
        return _next(iter(again), loader)
    finally:
        if generator is not None:
            generator.set_state(before)


def _check_begins_again(data: Any) -> None:
    """Refuse data that hands out one iterator each time, of which an example would be missing.

    Raises:
        NoExampleError: it does.
    """
    first = iter(data)
    if iter(data) is first:
        raise NoExampleError(
            f"the data, a {type(data).__name__}, is a stream that can be read once, and an example of it is needed"
        )


def _next(iterator: Iterator[Any], data: Any) -> Any:
    try:
        return next(iterator)
    except StopIteration:
        raise NoExampleError(f"the data, a {type(data).__name__}, has no batch") from None


class _Again:
    """A stream of which one batch has been read, with that batch."""

    def __init__(self, batch: Any, rest: Iterable[Any]) -> None:
        self._stream = itertools.chain([batch], rest)

    def __iter__(self) -> Iterator[Any]:
        return self._stream
