"""Loaders without a length, ended together by all pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed_partition.engine.runtime.collectives import any_bits


class EvenLoader:
    """Hands out a batch only if every rank has one.

    Pipelines average their gradients: one whose data ended later would wait for the others for ever. Collective
    over the job; attributes are those of the loader.

    Args:
        loader: It has no length.
        announce: Told that something was left over, in a sentence.
    """

    def __init__(self, loader: Any, announce: Callable[[str], None]) -> None:
        self._madpipe_parts = loader, announce

    def __iter__(self) -> Iterator[Any]:
        loader, announce = self._madpipe_parts
        num_batches = 0
        nothing = object()
        iterator = iter(loader)
        while True:
            batch = next(iterator, nothing)
            some_have_one, some_have_none = any_bits([batch is not nothing, batch is nothing])
            if some_have_none:
                if some_have_one:
                    announce(
                        f"the data of some ranks ends after {num_batches} batches: the epoch ends there "
                        "for all, and the rest of the others' data is dropped"
                    )
                return
            num_batches += 1
            yield batch

    def __getattr__(self, name: str) -> Any:
        if name == "_madpipe_parts":  # while a copy of this object is being made
            raise AttributeError(name)
        return getattr(self._madpipe_parts[0], name)
