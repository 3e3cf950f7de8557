"""Values of tensors: put back after a run that may have changed them, and as bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_TWO_IN_A_BYTE = getattr(torch, "float4_e2m1fn_x2", None)
"""A type of two numbers in a byte, for which torch has no arithmetic; older ones have no such type."""


_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def is_computed(value: object) -> bool:
    """Whether a tensor is a result that autograd knows; False for what is none, such as an array.

    True of a view of a weight, made without gradients, where the weight has been written since: torch, asked how
    it was computed, raises.
    """
    try:
        return getattr(value, "grad_fn", None) is not None
    except RuntimeError:
        return True


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in memory: not one without values, of several tensors, or sparse."""
    if is_lazy(tensor) or tensor.is_meta or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None of one that inference mode has made, which is not counted."""
    return None if tensor.is_inference() else tensor._version


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one is made of: itself, or the indices and values of a sparse one, or what it wraps."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in parts_of(getattr(tensor, name))]
    return [tensor]


def num_bytes_of(tensor: Any) -> int:
    """The bytes of the elements of a tensor, or of an array: as many of them as it has."""
    if not isinstance(tensor, torch.Tensor):
        return int(tensor.nbytes)
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor with one of the elements that are one in memory, as in an expanded mask; else itself."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        for dimension, (size, stride) in enumerate(zip(tensor.shape, torch.Tensor.stride(tensor), strict=True)):
            if size > 1 and not stride:
                tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor values, and their shape, which it may have lost: observers of quantization grow at first data.

    Its version stays, for autograd may have saved it.
    """
    if tensor.shape == values.shape and tensor.layout is torch.strided:  # a sparse one is copied to another memory
        tensor.data.copy_(values)
    else:
        tensor.data = values.clone()


def plain_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The values as real numbers that torch can add up: complex ones in pairs, codes of types without arithmetic.

    A view of the tensor where that can be: not of conjugates and negatives that torch has not worked out yet.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_quantized:
        return values.int_repr()
    if values.is_complex():
        return torch.view_as_real(values)
    return values.view(torch.uint8) if values.dtype is _TWO_IN_A_BYTE else values


def bytes_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in their order: of itself where it is contiguous, or of a copy.

    A tensor of one element is contiguous with any stride, and its elements are bytes with a stride of 1 alone.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
