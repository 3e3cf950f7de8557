"""The user's optimizer and scheduler, on the parameters that one rank of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ONE_OF_EACH = "a pipeline works with one optimizer and at most one scheduler"
NEED_SHAPES = ("Adafactor", "Muon")
"""Optimizers of torch whose update of a matrix is not that of its elements."""


def configured_optimizer(
    configure: Callable[[Any], tuple[list[Any], list[Any]]],
    module: Any,
    local: set[nn.Parameter],
    *,
    flattened: bool,
) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer of ``module.configure_optimizers()``, with this rank's parameters in its groups.

    Args:
        configure: Lightning's reader of all that ``configure_optimizers()`` may return.
        local: The parameters of this rank's stage.
        flattened: Whether DeepSpeed will give the optimizer one flat tensor per group.

    Returns:
        The optimizer, and the configuration of its scheduler or None.

    Raises:
        ValueError: several optimizers or schedulers, or an optimizer that a pipeline cannot drive.
    """
    try:
        optimizers, schedulers = configure(module)
    except RuntimeError as flaw:
        if "multiple optimizers" not in str(flaw):
            raise
        # Lightning's advice, manual optimization, would be refused here.
        raise ValueError(f"configure_optimizers returns several optimizers: {ONE_OF_EACH}") from None
    if len(schedulers) > 1:
        raise ValueError(f"configure_optimizers returns {len(schedulers)} schedulers: {ONE_OF_EACH}")
    optimizer = optimizers[0]
    if not any(group["params"] for group in optimizer.param_groups):
        raise ValueError("configure_optimizers returns no optimizer with parameters: return one, to train")
    if flattened and type(optimizer).__name__ in NEED_SHAPES:
        raise ValueError(
            f"configure_optimizers returns {type(optimizer).__name__}, which looks at the shape of each "
            "parameter, and DeepSpeed's ZeRO, bf16 and fp16 optimizers flatten them: use precision='32-true' and "
            "stage=0, or another optimizer"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"configure_optimizers returns {type(optimizer).__name__}: a pipeline works with a torch "
            "optimizer whose step needs no closure"
        )
    # Groups may name layers that run elsewhere, such as self.head.parameters().
    for group in optimizer.param_groups:
        group["params"] = [weight for weight in group["params"] if weight in local]
    return optimizer, schedulers[0] if schedulers else None


def renew_parameters(module: nn.Module) -> None:
    """Replace every Parameter by a new one of the same data, with sharing and DeepSpeed's mark kept."""
    renewed: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is None:
                continue
            if old not in renewed:
                renewed[old] = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
                renewed[old].ds_pipe_replicated = getattr(old, "ds_pipe_replicated", False)  # type: ignore[attr-defined]
            part._parameters[name] = renewed[old]
