"""What a step puts into its batch, takes out and replaces, for hooks that are given the batch after it.

A step changes a piece of the batch, on one rank: ``y = batch.pop("y")``, ``batch["logits"] = logits``,
``batch.logits = logits``. Mappings, lists and attributes of objects are looked at, at any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_madpipe.steps.batches import join_pieces, map_children, tensors_of
from lightning_madpipe.steps.list_in_words import some
from lightning_madpipe.steps.micro_batches import MicroBatch


class Attribute(str):
    """The name of an attribute, where others are keys."""


OF_OBJECT = Attribute()
"""The last key of the path to the attributes of an object."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """The attributes of an object in a batch."""

    owner: Any
    is_cut: bool
    """Whether each micro-batch has an object of its own, with its samples; else all have this one."""

    def items(self) -> dict[Any, Any]:
        names = [field.name for field in fields(self.owner)] if is_dataclass(self.owner) else []
        slots = {name: getattr(self.owner, name) for name in names if hasattr(self.owner, name)}
        return {Attribute(name): value for name, value in (slots | getattr(self.owner, "__dict__", {})).items()}

    def change(self, removed: Sequence[str], values: dict[str, Any]) -> None:
        """Also those of a frozen object."""
        for name in removed:
            if hasattr(self.owner, name):
                object.__delattr__(self.owner, str(name))
        for name, value in values.items():
            object.__setattr__(self.owner, str(name), value)


class Changed(NamedTuple):
    """What a step has changed in one mapping, list or object."""

    path: tuple[Any, ...]
    """The keys that lead to it."""
    removed: list[Any]
    """The keys that are gone; of a list nothing."""
    length: int
    """How many items there are now."""
    values: dict[Any, Any]
    """What is there now and was not, by key, place or name."""
    is_cut: bool
    """Whether each micro-batch has a part of it; else it is an object that all of them have."""


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
                is_cut = container.is_cut if isinstance(container, Attributes) else True
                gone = [] if isinstance(container, list) else removed
                found.append(Changed(path, gone, len(now), values, is_cut))
        return found


def joined_changes(micro_batches: Sequence[MicroBatch], tell: Callable[[str], None]) -> list[Changed]:
    """What a step has changed in a batch, joined over its micro-batches; tell what cannot be joined."""
    first, *others = [{each.path: each for each in micro_batch.contents} for micro_batch in micro_batches]
    if not others:
        return list(first.values())
    step, sizes = micro_batches[0].step, [each.size for each in micro_batches]
    found = []
    for path, change in first.items():
        if not change.is_cut:
            names = some([shown((*path, key)) for key in (*change.removed, *change.values)])
            tell(
                f"{step} changes {names} of an object that is not cut into micro-batches, so that hooks such as "
                "on_train_batch_end may not see it. Set it in a dict of the batch, or use num_micro_batches=1"
            )
            continue
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
            found.append(Changed(path, change.removed, change.length, values, is_cut=True))
    return found


def change_alike(batch: Any, changes: Sequence[Changed]) -> None:
    """Do to ``batch`` what a step did to its copy; again does nothing more."""
    containers = dict(_containers(batch))
    for path, removed, length, values, _ in changes:
        container = containers.get(path)
        if isinstance(container, list):
            del container[length:]
            for place, value in sorted(values.items()):
                container[place : place + 1] = [value]
        elif isinstance(container, Attributes):
            container.change(removed, values)
        elif container is not None:
            for key in removed:
                container.pop(key, None)
            container.update(values)


def shown(path: Sequence[Any]) -> str:
    """The expression that finds something in a batch: ``batch['logits']``, ``batch.logits``."""
    keys = (key for key in path if key or not isinstance(key, Attribute))
    return "batch" + "".join(f".{key}" if isinstance(key, Attribute) else f"[{key!r}]" for key in keys)


def _containers(
    value: Any, path: tuple[Any, ...] = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    holds_tensors = isinstance(value, list) and next(tensors_of(value), None) is not None
    if isinstance(value, MutableMapping) or holds_tensors:  # a list of names is cut like a tensor
        yield path, value
    children: dict[Any, Any] = {}
    if isinstance(value, MutableMapping | list | tuple):
        children = _items(value)
    elif _has_attributes(value) and id(value) not in around:
        is_cut = is_dataclass(value) and next(tensors_of(value), None) is not None
        attributes = Attributes(value, is_cut)
        yield (*path, OF_OBJECT), attributes
        children = attributes.items()
        if not is_cut:  # what others of its objects have in turn may be the whole program
            children = {key: child for key, child in children.items() if isinstance(child, MutableMapping)}
    for key, child in children.items():
        yield from _containers(child, (*path, key), (*around, id(value)))


def _has_attributes(value: Any) -> bool:
    others = Tensor | nn.Module | type | FunctionType | ModuleType
    return is_dataclass(value) or (hasattr(value, "__dict__") and not isinstance(value, others))


def _items(container: Any) -> dict[Any, Any]:
    if isinstance(container, Attributes):
        return container.items()
    return dict(container) if isinstance(container, MutableMapping) else dict(enumerate(container))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else map_children(value, _detached)
