"""Tensors without data, and what stands in their places where data is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition.capture.sizes import number_of


@contextmanager
def hidden_functions() -> Iterator[None]:
    """Show torch functions to no mode meanwhile."""
    with torch._C.DisableTorchFunction():
        yield


@contextmanager
def hidden_modes() -> Iterator[None]:
    """Show neither torch functions nor the operations below them to any mode meanwhile."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def same_random_numbers(device: torch.device) -> Any:
    """A context after which the device draws the numbers that it would have drawn before."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def data_like(leaf: Any, device: torch.device) -> Any:
    """A tensor with data, in the place of one without; integers are zeros, which any table has a row for."""
    if not isinstance(leaf, torch.Tensor):
        return number_of(leaf)
    if not isinstance(leaf, FakeTensor):
        return leaf
    shape, dtype = tuple(map(int, leaf.shape)), leaf.dtype
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    make = torch.ones if dtype is torch.bool else torch.zeros
    return make(shape, dtype=dtype, device=device)


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operation of torch's dispatcher writes to, of what it is given."""
    for place, name in _written_arguments(func):
        written = args[place] if place < len(args) else kwargs.get(name)
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


class PadsNothing(TorchDispatchMode):
    """Packs sequences as if none was padded: lengths that stand for data would be zeros, which torch refuses."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._pack_padded_sequence.default:
            padded, lengths, batch_first = args
            args = padded, torch.full_like(lengths, padded.shape[int(batch_first)]), batch_first
        return func(*args, **(kwargs or {}))
