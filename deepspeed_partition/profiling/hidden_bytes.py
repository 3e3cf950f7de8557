"""Bytes of what layers hold where torch does not look: modules and tensors in attributes, lists and objects.

A frozen teacher in a list, a table of positions: they are in no ``parameters()`` and no ``buffers()``, lie on the
device all the same, and go with the layer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed_partition.hidden_modules import hidden_modules, hidden_tensors, parts_of
from deepspeed_partition.profiling.attributes import attributes_of
from deepspeed_partition.profiling.live_bytes import storages_of
from deepspeed_partition.profiling.object_members import members_of
from deepspeed_partition.tensor_values import is_computed

_DEPTH = 3
_MOST_MEMBERS = 1000


class HiddenBytes:
    """Counter of what layers of one process hold so, each storage once: that of the first layer that has it.

    Args:
        modules: Modules of all layers that are there; their parameters and buffers do not count.
        device: Where layers run; what lies elsewhere does not count.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._device = device
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """By their ``id`` while they are there: another one may have it later."""
        modules = list(modules)
        self._apart = parts_of(modules)
        """Layers and their parts, which a layer may reach through a whole model: they are no layer's besides."""
        for module in modules:
            self._note(module)

    def of(self, modules: Iterable[nn.Module]) -> int:
        """Return the bytes of what the modules of a layer hold, and no layer before it."""
        modules = list(modules)
        for module in modules:
            self._note(module)
        return sum(self._add(tensor) for module in modules for tensor in _held_by(module, self._apart))

    def _note(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> int:
        """Note the storages of a tensor; return the bytes of those on the device that were not known."""
        num_bytes = 0
        for storage in () if is_lazy(tensor) else storages_of(tensor):
            known = self._known.get(id(storage))
            if known is None or known() is not storage:
                self._known[id(storage)] = weakref.ref(storage)
                num_bytes += storage.nbytes() if storage.device.type == self._device.type else 0
        return num_bytes


def _held_by(module: nn.Module, apart: Container[nn.Module]) -> Iterator[torch.Tensor]:
    hidden = {path: each for path, each in hidden_modules(module, apart).items() if each not in apart}
    yield from hidden_tensors(hidden).values()
    for part in (*module.modules(), *hidden.values()):
        for value in attributes_of(part).values():
            yield from _tensors_in(value, _DEPTH)


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors in a value, but for results that autograd knows: those are of a micro-batch."""
    if isinstance(value, torch.Tensor):
        if not is_computed(value):
            yield value
    elif depth and isinstance(value, dict | list | tuple | deque):
        members = value.values() if isinstance(value, dict) else value
        for member in list(islice(members, _MOST_MEMBERS)):
            yield from _tensors_in(member, depth - 1)
    elif depth:
        for member in list((members_of(value) or {}).values()):
            yield from _tensors_in(member, depth - 1)
