"""The gradients of a step, before ranks add them up: those of tied weights, and weights that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from deepspeed_partition.engine.pipeline.tied_copies import several_of_a_key


def gradient_so_far(weight: nn.Parameter, optimizer: Any, *, in_bf16: bool) -> torch.Tensor:
    """The gradient of ``weight`` that the step has added up so far; zeros if there is none.

    Args:
        optimizer: DeepSpeed's, or the user's where it wraps none.
        in_bf16: Whether it is DeepSpeed's optimizer for bf16.
    """
    name = "_hp_grad" if in_bf16 else _attribute(optimizer)
    if getattr(weight, name, None) is None:
        dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else weight.dtype
        setattr(weight, name, torch.zeros_like(weight, dtype=dtype))
    gradient: torch.Tensor = getattr(weight, name)
    return gradient


def _attribute(optimizer: Any) -> str:
    """The attribute of a weight in which its gradient is."""
    return "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"


def without_gradient(weights: Iterable[nn.Parameter], optimizer: Any) -> list[nn.Parameter]:
    """Those of ``weights`` that the step has computed no gradient of so far.

    Args:
        weights: Of this rank, which train.
        optimizer: As for :func:`gradient_so_far`.
    """
    if hasattr(optimizer, "fp32_groups_has_gradients"):  # of DeepSpeed's for bf16, which keeps count
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_has_gradients, strict=True)
        has = {id(weight): flag for group in groups for weight, flag in zip(*group, strict=True)}
        return [weight for weight in weights if not has.get(id(weight), True)]
    name = _attribute(optimizer)
    return [weight for weight in weights if getattr(weight, name, None) is None]


@contextmanager
def copies_added_up(module: PipelineModule, gradient_of: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
    """Make the gradients of all copies of a tied weight on this rank one, while ranks add them up."""
    alike = [
        tuple(map(gradient_of, weights))
        for copies in several_of_a_key(module)
        for weights in zip(*(tied.tied_weights(module) for tied in copies), strict=True)
        if weights[0].requires_grad
    ]
    for first, *others in alike:
        for other in others:
            first += other
    yield
    for first, *others in alike:
        for other in others:
            other.copy_(first)
