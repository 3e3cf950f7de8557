"""Tensors without data: what stands in their places where data is needed, and what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from deepspeed_partition.capture.sizes import Size, number_of
from deepspeed_partition.capture.structure import flatten


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


def version_of(leaf: Any) -> int | None:
    """How often a tensor was changed in place; None where that is not known, and for what is no tensor."""
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def forget_fakes(module: nn.Module, before: dict[str, Any]) -> None:
    """Take back what a forward without data has left in the attributes of a module."""
    for name, now in list(vars(module).items()):
        if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
            continue
        if now is not before.get(name, _MISSING) and _holds_fakes(now):
            if name in before:
                vars(module)[name] = before[name]
            else:
                del vars(module)[name]


_MISSING = object()


def _holds_fakes(value: Any) -> bool:
    leaves, _ = flatten(value)
    return any(isinstance(leaf, FakeTensor | Size) for leaf in leaves)
