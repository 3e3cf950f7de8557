"""The types of parameters, buffers and batches: those that they have under Lightning in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def leave_types(plugin: Any) -> Any:
    """A precision plugin that leaves all types as they are, as Lightning does in one process in full precision.

    Lightning's plugin for DeepSpeed casts modules and batches to float32, complex numbers to their real part.

    Args:
        plugin: Lightning's, which is returned as it is where it is for another precision.
    """
    if plugin.precision != "32-true" or getattr(plugin, "leaves_types", False):
        return plugin

    class FullPrecision(type(plugin)):  # type: ignore[misc]
        """Full precision in which every tensor keeps the type that the user gave it."""

        leaves_types = True

        def convert_module(self, module: nn.Module) -> nn.Module:
            return module

        def convert_input(self, data: Any) -> Any:
            return data

    return FullPrecision(plugin.precision)


def convert_but_complex(plugin: Any, module: nn.Module) -> list[str]:
    """Convert ``module`` with ``plugin``, but for complex buffers; return their names where it casts."""
    kept = [
        (f"{path}.{name}".lstrip("."), owner, name, buffer)
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_complex()
    ]
    for _, owner, name, _ in kept:
        owner._buffers[name] = None
    try:
        plugin.convert_module(module)
    finally:
        for _, owner, name, buffer in kept:
            owner._buffers[name] = buffer
    casts = plugin.precision.endswith("-true") and plugin.precision != "32-true"
    return [path for path, *_ in kept] if casts else []


def refusals_of_types(module: nn.Module, precision: str, *, flattened: bool, replicated: bool) -> Iterator[str]:
    """Yield why trainable parameters of ``module`` cannot keep their types, one sentence.

    Args:
        flattened: Whether DeepSpeed puts an optimizer of its own around the user's.
        replicated: Whether gradients are reduced over several pipelines.
    """
    if precision == "32-true":
        carried = {torch.float32}
        if not flattened:
            carried |= {torch.float16, torch.bfloat16}
    else:
        carried = {torch.float64, torch.float32, torch.float16, torch.bfloat16}  # which that precision casts
    if not (flattened or replicated):
        return
    others = {
        name: str(parameter.dtype).removeprefix("torch.")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.dtype not in carried
    }
    if others:
        named = ", ".join(f"{name} ({dtype})" for name, dtype in list(others.items())[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield (
            f"DeepSpeed cannot train parameters of these types here: {named}{more}; its ZeRO, bf16 and fp16 "
            "optimizers, and several pipelines side by side, have one type for all gradients: use "
            "precision='32-true' with stage=0 and one pipeline, or store the parameter in float32 "
            "(a complex one with torch.view_as_real) and convert it in forward"
        )
