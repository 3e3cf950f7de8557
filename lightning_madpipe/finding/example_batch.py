"""An example of what a run's steps are given, read from its data before the data's loaders are there.

The first samples of a data set are read in this process, without the loader's sampler and workers. The common
random numbers and the loader's own are not drawn from. A stream that is given to the Trainer as it is, and can be
read once, gets back what was read of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher

from deepspeed_partition.engine.runtime.random_state import preserved_random_state

STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""The step that a run makes first, by the Trainer's function."""


def example_batch(trainer: Any, module: Any) -> Any:
    """The first batch of a run's first loader, as the step would be given it.

    Raises:
        ValueError: there is none that can be read.
    """
    run = str(trainer.state.fn.value)
    loop = trainer.fit_loop if run == "fit" else getattr(trainer, f"{run}_loop")
    with preserved_random_state():
        source = loop._data_source
        loaders = source.dataloader()
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
    if not isinstance(loader, DataLoader):
        iterator = iter(loader)
        batch = _next(iterator, loader)
        return batch, _Again(batch, iterator) if iterator is loader else None
    collates = loader._auto_collation
    if isinstance(loader.dataset, IterableDataset):
        if iter(loader.dataset) is loader.dataset:
            raise ValueError("the data is a stream that can be read once, and an example of it is needed")
        fetcher = _IterableDatasetFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False)
        return fetcher.fetch(range(loader.batch_size or 1) if collates else None), None
    number: Any = 0
    if collates and loader.batch_size is None:
        number = list(_next(iter(loader.batch_sampler), loader))  # type: ignore[arg-type]
    elif collates:
        number = list(range(min(loader.batch_size or 1, len(loader.dataset))))  # type: ignore[arg-type]
    return _MapDatasetFetcher(loader.dataset, collates, loader.collate_fn, drop_last=False).fetch(number), None


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
