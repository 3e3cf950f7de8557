"""Nested values as bytes, for the other ranks of a pipeline.

A tensor travels as its own elements: not with the storage that it is a view of, and without its graph. One that
stands in several places arrives as one.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_partition.tensor_values import bytes_view
from lightning_madpipe.steps.batches import map_children


class PackedTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    elements: bytes
    on_device: bool
    """Whether it lay on an accelerator, and belongs on the receiver's own."""


def packed(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """``value`` with its tensors replaced by :class:`PackedTensor`; tensors of no strided layout stay."""
    memo = {} if memo is None else memo
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        if id(value) not in memo:
            # With the tensor, so that no other one can get its id while the memo lives.
            memo[id(value)] = value, _packed_tensor(value)
        return memo[id(value)][1]
    return map_children(value, lambda child: packed(child, memo))


def unpacked(value: Any, device: torch.device, memo: dict[int, Tensor] | None = None) -> Any:
    """What :func:`packed` was given; tensors that lay on an accelerator are put on ``device``."""
    memo = {} if memo is None else memo
    if isinstance(value, PackedTensor):
        if id(value) not in memo:
            memo[id(value)] = _unpacked_tensor(value, device)
        return memo[id(value)]
    return map_children(value, lambda child: unpacked(child, device, memo))


def pickled(value: Any) -> tuple[bytes | None, str]:
    """``value`` as bytes; or None, and why it cannot be sent."""
    try:
        return pickle.dumps(value), ""
    except Exception as error:  # pickling runs code of any class
        return None, f"{type(error).__name__}: {error}"


def _packed_tensor(tensor: Tensor) -> PackedTensor:
    elements = bytes_view(tensor.cpu()).numpy().tobytes()
    return PackedTensor(tensor.dtype, tuple(tensor.shape), elements, tensor.device.type != "cpu")


def _unpacked_tensor(sent: PackedTensor, device: torch.device) -> Tensor:
    if not sent.elements:
        flat = torch.empty(0, dtype=sent.dtype)
    else:
        # Bytes cannot be written to, and the tensor can.
        flat = torch.frombuffer(bytearray(sent.elements), dtype=sent.dtype)
    return flat.reshape(sent.shape).to(device if sent.on_device else "cpu")
