"""What a step puts into its batch, takes out and replaces, for hooks that are given the batch after it.

A step changes a piece of the batch, on one rank: ``y = batch.pop("y")``, ``batch["logits"] = logits``. Mappings
and lists are looked at, at any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_madpipe.steps.batches import join_pieces, map_children, tensors_of
from lightning_madpipe.steps.micro_batches import MicroBatch


class Changed(NamedTuple):
    """What a step has changed in one mapping or list."""

    path: tuple[Any, ...]
    """The keys that lead to it."""
    removed: list[Any]
    """The keys that are gone; of a list nothing."""
    length: int
    """How many items there are now."""
    values: dict[Any, Any]
    """What is there now and was not, by key or place."""


class Contents:
    """What the mappings and lists of a batch hold before a step."""

    def __init__(self, batch: Any) -> None:
        self._before = [(path, container, _items(container)) for path, container in _containers(batch)]

    def changed(self) -> list[Changed]:
        """What is another object than before."""
        found = []
        for path, container, before in self._before:
            now = _items(container)
            removed = [key for key in before if key not in now]
            values = {
                key: _detached(value)
                for key, value in now.items()
                if key not in before or value is not before[key]
            }
            if removed or values:
                found.append(Changed(path, [] if isinstance(container, list) else removed, len(now), values))
        return found


def joined_changes(micro_batches: Sequence[MicroBatch], tell: Callable[[str], None]) -> list[Changed]:
    """What a step has changed in a batch, joined over its micro-batches; tell what cannot be joined."""
    first, *others = [{each.path: each for each in micro_batch.contents} for micro_batch in micro_batches]
    if not others:
        return list(first.values())
    step, sizes = micro_batches[0].step, [each.size for each in micro_batches]
    found = []
    for path, change in first.items():
        same = [each.get(path) for each in (first, *others)]
        values: dict[Any, Any] = {}
        for key in change.values:
            name = shown((*path, key))
            pieces = [None if each is None else each.values.get(key) for each in same]
            try:
                values[key] = join_pieces(pieces, sizes, name, mean=True)
            except ValueError as error:
                tell(f"{step} changes {name}, which hooks such as on_train_batch_end do not see: {error}")
                continue
            is_number = isinstance(values[key], float) or (
                isinstance(values[key], Tensor) and not values[key].ndim
            )
            if is_number and any(piece != pieces[0] for piece in pieces):
                tell(
                    f"{step} sets {name}, a number, and runs once per micro-batch: hooks such as "
                    "on_train_batch_end see the mean of these by samples. MadPipeStrategy(loss='batch') runs "
                    "training_step once per batch"
                )
        if values or not change.values or change.removed:
            found.append(Changed(path, change.removed, change.length, values))
    return found


def change_alike(batch: Any, changes: Sequence[Changed]) -> None:
    """Do to ``batch`` what a step did to its copy; again does nothing more."""
    containers = dict(_containers(batch))
    for path, removed, length, values in changes:
        container = containers.get(path)
        if isinstance(container, list):
            del container[length:]
            for place, value in sorted(values.items()):
                container[place : place + 1] = [value]
        elif container is not None:
            for key in removed:
                container.pop(key, None)
            container.update(values)


def shown(path: Sequence[Any]) -> str:
    """The expression that finds something in a batch: ``batch['logits']``."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _containers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    holds_tensors = isinstance(value, list) and next(tensors_of(value), None) is not None
    if isinstance(value, MutableMapping) or holds_tensors:  # a list of names is cut like a tensor
        yield path, value
    if isinstance(value, MutableMapping | list | tuple):
        for key, child in _items(value).items():
            yield from _containers(child, (*path, key))


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, MutableMapping) else dict(enumerate(container))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else map_children(value, _detached)
