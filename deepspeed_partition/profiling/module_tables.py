"""Tables of modules: which parameters, buffers and modules they have, put back after a run that makes some."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class ModuleTables:
    """The tables of modules as they are when this is made.

    A first forward may make what a module has: a normalization for the width of its input, a weight, a buffer.

    Args:
        modules: Each without its children.
        buffers: Whether the tables of buffers count.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = True) -> None:
        self._before: list[tuple[Any, dict[str, Any]]] = []
        self._not_saved: list[tuple[set[str], set[str]]] = []
        self._scripted: list[tuple[nn.Module, list[str]]] = []
        for owner in dict.fromkeys(modules):
            if isinstance(owner, torch.jit.ScriptModule):  # nothing is added to it, and its tables are no dicts
                self._scripted.append((owner, [name for name, buffer in owner._buffers.items() if buffer is None]))
                continue
            tables: tuple[Any, ...] = (owner._modules, owner._parameters, owner._buffers)
            self._before += [(table, dict(table.items())) for table in tables[: 3 if buffers else 2]]
            if buffers:
                self._not_saved.append((owner._non_persistent_buffers_set, set(owner._non_persistent_buffers_set)))

    def put_back(self) -> None:
        """Let each table have what it had, in that order."""
        for table, before in self._before:
            now = dict(table.items())
            if [*now] != [*before] or any(now[name] is not value for name, value in before.items()):
                table.clear()
                table.update(before)
        for present, noted in self._not_saved:
            if present != noted:
                present.clear()
                present.update(noted)
        for owner, names in self._scripted:
            for name in names:
                if owner._buffers[name] is not None:
                    setattr(owner, name, None)
