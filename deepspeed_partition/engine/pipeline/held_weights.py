"""Several versions of the weights on a rank: which one a stage runs with, and what an update does to them.

A graph that waits for its backward refers to weights in two ways: by what autograd saved of them (a view, such as
``weight.t()``, of the storage that they had), and by the parameter itself, where that was saved. So

- an update while older graphs wait writes into new storages, which the parameters and the optimizer get before it;
- before each forward and backward the parameters of its stage get the storages of the version that it uses;
- the versions that torch counts for its own check (``Tensor._version``) are left as they are in an update, since
  nothing that was saved has changed.

A storage is let go when the last micro-batch that uses its version has had its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import grad_mode

CAN_KEEP_COUNTS = hasattr(grad_mode, "_unsafe_preserve_version_counter")


class Weights:
    """Versions of weights that are held and updated together.

    Args:
        parameters: those that train.
        new_storages: makes storages for the next version, equal to those that the parameters have, and gives them
            to the parameters and to the optimizer.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], new_storages: Callable[[], None] | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._new_storages = new_storages or self._copy
        self.newest = 0
        self._current = 0
        self._held: dict[int, list[torch.Tensor]] = {0: self._storages()}

    @property
    def num_held(self) -> int:
        """Number of versions that have storages now."""
        return len(self._held)

    def use(self, version: int) -> None:
        """Let the parameters have the values of a version."""
        if version != self._current:
            for parameter, storage in zip(self.parameters, self._held[version], strict=True):
                parameter.data = storage
            self._current = version

    def next(self, *, keeps: bool) -> None:
        """Let the parameters have storages for the next version, with the values of the newest one.

        Args:
            keeps: whether the newest one is used by a micro-batch still. Else its storages are those of the next.
        """
        self.use(self.newest)
        if keeps:
            self._new_storages()
            self._held[self.newest + 1] = self._storages()
        else:
            self._held[self.newest + 1] = self._held.pop(self.newest)
        self.newest += 1
        self._current = self.newest

    def let_go(self, before: int) -> None:
        """Let go of all versions before one, and never of the newest."""
        for version in [each for each in self._held if each < min(before, self.newest)]:
            if version == self._current:
                self.use(self.newest)
            del self._held[version]

    def _storages(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters]

    def _copy(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


class Gradients:
    """Gradients of one stage, of several batches at once, of which the parameters have one at a time.

    Args:
        parameters: of the stage, those that train.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._batch: int | None = None
        """The batch whose gradients the parameters have; None: they have none."""
        self._aside: dict[int, list[torch.Tensor | None]] = {}

    def use(self, batch: int) -> None:
        """Let the parameters have the gradients of a batch, which are added up there."""
        if batch == self._batch:
            return
        if self._batch is not None:
            self._aside[self._batch] = [parameter.grad for parameter in self._parameters]
        found = self._aside.pop(batch, None)
        for place, parameter in enumerate(self._parameters):
            parameter.grad = None if found is None else found[place]
        self._batch = batch

    def used(self) -> None:
        """Note that the gradients which the parameters had were used up."""
        self._batch = None

    def forget(self) -> None:
        """Forget all gradients."""
        self._batch = None
        self._aside.clear()
        for parameter in self._parameters:
            parameter.grad = None


class Settings:
    """Settings of an optimizer's parameter groups, as they are when a batch is trained on.

    An update that comes later has those of its own batch, so that a learning-rate schedule means what it means
    where nothing is late.

    Args:
        optimizer: torch's, whose groups have the settings.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._own: set[str] = set()
        """Settings that the optimizer changes itself in a step, such as a count: they are left to it."""

    def now(self) -> list[dict[str, Any]]:
        """Return the settings as they are."""
        defaults = getattr(self._optimizer, "defaults", {})
        return [
            {key: _copied(value) for key, value in group.items() if key in defaults and key not in self._own}
            for group in self._optimizer.param_groups
        ]

    @contextmanager
    def applied(self, settings: list[dict[str, Any]]) -> Iterator[None]:
        """Let the groups have these settings meanwhile."""
        groups = self._optimizer.param_groups
        present = self.now()
        for group, its in zip(groups, settings, strict=True):
            group.update({key: value for key, value in its.items() if key not in self._own})
        try:
            yield
        finally:
            for group, its, back in zip(groups, settings, present, strict=True):
                for key, value in back.items():
                    if key in its and not _same(group[key], its[key]):
                        self._own.add(key)
                    else:
                        group[key] = value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


@contextmanager
def counts_kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let changes of tensors meanwhile not count as changes of what autograd has saved of them."""
    with ExitStack() as stack:
        for tensor in tensors:  # torch 2.4 takes one at a time
            stack.enter_context(grad_mode._unsafe_preserve_version_counter(tensor))
        yield
