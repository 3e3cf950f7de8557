"""The buffers, the modes and the hooks of modules, changed for a while and put back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from deepspeed_partition.module_hooks import MODULE_HOOKS
from deepspeed_partition.tensor_values import put_back
from lightning_madpipe.compat.unsupported import is_of_model, libraries_of


def buffer_values(modules: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """The buffers of modules, each with a copy of its values."""
    buffers = {id(b): b for module in modules for b in module.buffers()}
    return [(buffer, buffer.detach().clone()) for buffer in buffers.values()]


def restore_buffers(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Put the values back that :func:`buffer_values` has copied."""
    for buffer, value in buffers:
        put_back(buffer, value)


@contextmanager
def buffers_restored(buffers: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put the values of buffers back at the end."""
    try:
        yield
    finally:
        restore_buffers(buffers)


@contextmanager
def modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Let modules be in these modes meanwhile."""
    before = {part: part.training for part in modes}
    try:
        for part, mode in modes.items():
            part.training = mode
        yield
    finally:
        for part, mode in before.items():
            part.training = mode


@contextmanager
def silenced(modules: Sequence[nn.Module], but: Collection[Any] = ()) -> Iterator[None]:
    """Leave out hooks but for those that a model computes with: torch's own and those of the model's own library.

    Left out are those of the user, which may count or record, and those of hosts.

    Args:
        but: Hooks that are not left out.
    """
    before, kept = [], set(map(id, but))
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    libraries = libraries_of(parts)
    try:
        for part in parts:
            for table in MODULE_HOOKS:
                hooks = vars(part).get(table)
                if hooks:
                    before.append((part, table, hooks))
                    remaining = {
                        key: hook
                        for key, hook in hooks.items()
                        if id(hook) in kept or is_of_model(hook, libraries)
                    }
                    vars(part)[table] = type(hooks)(remaining)
        yield
    finally:
        for part, table, hooks in before:
            vars(part)[table] = hooks


NUM_COPIES = 3
"""The number of copies of all weights in a check: the weights, and the gradients by either way."""


def fits(modules: Sequence[nn.Module], device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether copies of the weights of ``modules`` fit on ``device`` beside what is there."""
    weights = {id(weight): weight for module in modules for weight in module.parameters()}
    size = torch.finfo(dtype).bits // 8 if dtype is not None else None
    needed = NUM_COPIES * sum(weight.numel() * (size or weight.element_size()) for weight in weights.values())
    if device.type == "cuda":
        return needed < torch.cuda.mem_get_info(device)[0]
    return needed < psutil.virtual_memory().available
