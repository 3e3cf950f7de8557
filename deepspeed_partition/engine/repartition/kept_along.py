"""What an optimizer keeps of its parameters outside of ``state``: it goes with them in there while layers move.

Such as slow weights in a list in the order of the groups, or the states of an optimizer that it wraps. What tells
no parameter is refused before (``own_optimizers.kept_beside_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from deepspeed_partition.engine.pipeline.own_optimizers import OF_TORCH, goes_with_groups

BY_ID, BY_WEIGHT, IN_ORDER = "by id", "by weight", "in order"
ITSELF = "itself"
"""What stands for the parameter itself."""


class KeptAlong:
    """The lists and dicts of an optimizer, whose contents are in ``state`` until :meth:`give_back`.

    Args:
        optimizer: which trains the parameters themselves.
        groups: Its parameter groups with those of other ranks, in the order that all ranks have when layers have
            moved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
        self._optimizer, self._groups = optimizer, groups
        self._lists = [(value, list(value)) for value in _lists_of_groups(optimizer)]
        places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
        for value, own in self._lists:
            value[:] = [own[places[id(group)]] if id(group) in places else [] for group in groups]
        found = list(_containers(optimizer, groups))
        self._containers = {name: container for name, container, _ in found}
        for name, container, group in found:
            for weight, kind, value in self._entries(container, group):
                entries = self._optimizer.state.setdefault(weight, {})
                whole = {"": ITSELF} if value is weight else value if type(value) is dict else {"": value}
                entries[name, kind, None] = type(value) is dict
                entries.update({(name, kind, key): each for key, each in whole.items()})
            container.clear()

    def _weights(self) -> list[nn.Parameter]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    def _entries(self, container: Any, group: int | None) -> Iterator[tuple[nn.Parameter, str, Any]]:
        """What a container has for each parameter.

        Args:
            group: The place of the group that a list is for, where there is one for each; else None.
        """
        weights = self._weights()
        if isinstance(container, dict):
            of_id = {id(weight): weight for weight in weights}
            for key, value in container.items():
                is_id = type(key) is int
                yield of_id[key if is_id else id(key)], BY_ID if is_id else BY_WEIGHT, value
            return
        shapes = [value.shape for value in container]
        groups = [list(each["params"]) for each in self._groups]
        lists = (weights, *groups) if group is None else (groups[group],)
        along = next(each for each in lists if [weight.shape for weight in each] == shapes)
        yield from ((weight, IN_ORDER, value) for weight, value in zip(along, container, strict=True))

    def undo(self) -> None:
        """Give everything back as it was: nothing has moved."""
        self.give_back()
        for value, own in self._lists:
            value[:] = own

    def give_back(self) -> None:
        """Fill the lists and dicts with what is there for the parameters that are here now."""
        for weight in self._weights():
            entries = self._optimizer.state.get(weight, {})
            kept: dict[tuple[str, str], dict[Any, Any]] = {}
            for place in [place for place in entries if isinstance(place, tuple)]:
                name, kind, key = place
                kept.setdefault((name, kind), {})[key] = entries.pop(place)
            if weight in self._optimizer.state and not entries:
                del self._optimizer.state[weight]
            for (name, kind), found in kept.items():
                is_dict = found.pop(None)
                is_itself = not is_dict and isinstance(found[""], str) and found[""] == ITSELF
                value = found if is_dict else weight if is_itself else found[""]
                container = self._containers[name]
                if kind == IN_ORDER:
                    container.append(value)
                else:
                    container[id(weight) if kind == BY_ID else weight] = value


def _lists_of_groups(optimizer: Any) -> Iterator[list[list[Any]]]:
    """The lists that have a list for each group of an optimizer."""
    for name, value in vars(optimizer).items():
        is_one = name not in OF_TORCH and isinstance(value, list) and all(isinstance(each, list) for each in value)
        if is_one and value and goes_with_groups(value, optimizer.param_groups):
            yield value


def _containers(optimizer: Any, groups: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Any, int | None]]:
    """The lists and dicts that have something for each parameter, by name; those of a list with their places."""
    seen = {id(getattr(optimizer, name, None)) for name in OF_TORCH}
    for name, value in vars(optimizer).items():
        if name in OF_TORCH or not goes_with_groups(value, groups):
            continue
        whole = value.state if isinstance(value, torch.optim.Optimizer) else value
        inner: list[tuple[str, Any, int | None]] = [(name, whole, None)]
        if isinstance(value, list) and all(isinstance(each, list) for each in value):
            inner = [(f"{name}.{place}", each, place) for place, each in enumerate(value)]
        for own, container, group in inner:
            if id(container) not in seen:
                seen.add(id(container))
                yield own, container, group
