"""What the strategy cannot do, said before anything is built."""

from __future__ import annotations

from typing import Any

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")

ENGINE_HOOKS = ("backward", "configure_gradient_clipping", "optimizer_zero_grad")
"""Hooks of a LightningModule whose work the pipeline engine does, so that they would never be called."""


def refusal_of(trainer: Any, module: Any, base: type) -> str | None:
    """Why ``trainer`` cannot run ``module``, in one sentence; None if it can.

    Args:
        base: The LightningModule class, to tell which hooks ``module`` overrides.
    """
    strategy, name = trainer.strategy, type(module).__name__
    precision = strategy.precision_plugin.precision
    if precision not in PRECISIONS:
        return (
            f"precision={precision!r} is not available with the madpipe strategy yet: "
            f"use one of {', '.join(PRECISIONS)}"
        )
    if strategy._layer_sync is not None:
        return "sync_batchnorm is not available with the madpipe strategy: leave it out"
    return _refusal_of_training(trainer, module, base, name) if trainer.state.fn == "fit" else None


def _refusal_of_training(trainer: Any, module: Any, base: type, name: str) -> str | None:
    if not module.automatic_optimization:
        return (
            f"{name} uses manual optimization, and with a pipeline the engine runs backward and the "
            "optimizer: leave automatic_optimization = True"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        return "gradient_clip_algorithm='value' is not available with a pipeline: clip by 'norm'"
    for hook in ENGINE_HOOKS:
        if getattr(type(module), hook) is not getattr(base, hook):
            return f"{name} overrides {hook}(), whose work the pipeline engine does: leave it out"
    return None
