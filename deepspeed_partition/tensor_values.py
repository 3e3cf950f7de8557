"""Values of tensors: put back after a run that may have changed them, and as bytes."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_TWO_IN_A_BYTE = getattr(torch, "float4_e2m1fn_x2", None)
"""A type of two numbers in a byte, for which torch has no arithmetic; older ones have no such type."""


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


def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor values, and their shape, which it may have lost: observers of quantization grow at first data.

    Its version stays, for autograd may have saved it.
    """
    if tensor.shape == values.shape:
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
