"""Tensors on their way to another rank: what they are like there, and their elements as they lie in memory.

Elements that are one in memory, as those of an expanded mask, are sent and held once; a sparse tensor goes as its
indices and its values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_partition.engine.runtime.collectives import receive_bytes, send_bytes
from deepspeed_partition.profiling.boundaries import from_span, num_in_span, span
from deepspeed_partition.tensor_values import has_memory, parts_of, without_repeats


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a receiver must know of a tensor that it is sent."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    """None: that of a contiguous tensor."""
    layout: torch.layout = torch.strided
    parts: tuple[TensorForm, ...] = ()
    """The tensors that a sparse one is made of."""
    is_coalesced: bool = False

    @property
    def num_sent(self) -> int:
        """The number of elements that are sent, of a tensor that is not sparse."""
        return self.shape.numel() if self.stride is None else num_in_span(self.shape, self.stride)


def can_be_sent(tensor: torch.Tensor) -> bool:
    """Whether another process can have a tensor: not one of several tensors, without values, or quantized."""
    if tensor.is_sparse or tensor.layout in _COMPRESSED:
        return True
    return has_memory(tensor) and not tensor.is_quantized


def can_be_filled(tensor: torch.Tensor) -> bool:
    """Whether values can be copied into the memory of a tensor: not of a sparse one, nor into an expanded one."""
    return tensor.layout is torch.strided and without_repeats(tensor).shape == tensor.shape


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def form_of(tensor: torch.Tensor) -> TensorForm:
    """What another process must know of a tensor to receive it."""
    if tensor.layout is torch.strided:
        return TensorForm(tensor.shape, tensor.dtype, _stride_of(tensor))
    parts = tuple(map(form_of, parts_of(tensor))) if can_be_sent(tensor) else ()
    is_coalesced = tensor.is_sparse and tensor.is_coalesced()
    return TensorForm(tensor.shape, tensor.dtype, None, tensor.layout, parts, is_coalesced)


def send_tensor(tensor: torch.Tensor, rank: int) -> None:
    """Send a tensor to a rank that knows its form."""
    form = form_of(tensor)
    if form.layout is not torch.strided:
        for part in parts_of(tensor.detach()):
            send_tensor(part, rank)
    else:
        send_bytes(tensor if form.stride is None else span(tensor), rank)


def receive_tensor(form: TensorForm, device: torch.device, rank: int) -> torch.Tensor:
    """The tensor that :func:`send_tensor` sends, on ``device``."""
    if form.layout is torch.strided:
        if form.stride is None:
            return receive_bytes(form.shape, form.dtype, device, rank)
        flat = receive_bytes(torch.Size([form.num_sent]), form.dtype, device, rank)
        return from_span(flat, tuple(form.shape), form.stride)
    parts = [receive_tensor(part, device, rank) for part in form.parts]
    if form.layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(indices, values, form.shape, is_coalesced=form.is_coalesced)
    begins, places, values = parts
    return torch.sparse_compressed_tensor(begins, places, values, form.shape, layout=form.layout)


def _stride_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """How the elements of a tensor lie in memory; None where they lie one after the other, or with gaps."""
    if not has_memory(tensor) or tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    stride = tuple(torch.Tensor.stride(tensor))
    return stride if num_in_span(tensor.shape, stride) <= tensor.numel() else None


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor can have in the place of its memory: a tensor of its type without elements."""
    if tensor.layout in _COMPRESSED:  # of blocks there are none without elements
        return torch.empty((0, 0), dtype=tensor.dtype, device=tensor.device, layout=torch.sparse_csr)
    return tensor.data.new_empty(0)
