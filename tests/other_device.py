"""A device that stands for a GPU: its random numbers come from another generator than those of the CPU."""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

_GENERATOR = torch.Generator().manual_seed(0)


class OtherDevice:
    """What is asked of an accelerator about its generator; in the place of ``get_accelerator``."""

    def device_name(self) -> str:
        return "cuda"

    def get_rng_state(self) -> torch.Tensor:
        return _GENERATOR.get_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        _GENERATOR.set_state(state)

    def manual_seed(self, seed: int) -> None:
        _GENERATOR.manual_seed(seed)


def rand_on_device(like: torch.Tensor) -> torch.Tensor:
    """A number that is drawn there: a function of torch, as ``torch.rand((), device="cuda")`` is one."""
    if has_torch_function_unary(like):
        return handle_torch_function(rand_on_device, (like,), like)
    return torch.rand((), generator=_GENERATOR)
