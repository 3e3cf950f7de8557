"""What the strategy cannot do, said before anything is built."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")

ENGINE_HOOKS = ("backward", "configure_gradient_clipping", "optimizer_zero_grad")
"""Hooks of a LightningModule whose work the pipeline engine does, so that they would never be called."""

CALLBACKS = {
    "WeightAveraging": (
        "averages a copy of the whole model, of which each rank has one stage, and the fp32 weights of bf16 and "
        "ZeRO-1 lie elsewhere"
    ),
    "ModelPruning": (
        "puts masks in the place of weights after the optimizer took them, and compares weights of all stages"
    ),
}
"""Callbacks that Lightning ships and would let pass, with what keeps them from working."""


def refusal_of(trainer: Any, module: Any, base: type, callbacks: Any) -> str | None:
    """Why ``trainer`` cannot run ``module``, in one sentence; None if it can.

    Args:
        base: The LightningModule class, to tell which hooks ``module`` overrides.
        callbacks: Lightning's module of callbacks.
    """
    strategy, name = trainer.strategy, type(module).__name__
    precision = strategy.precision_plugin.precision
    if precision not in PRECISIONS:
        return (
            f"precision={precision!r} is not available with the madpipe strategy: use one of {_list(PRECISIONS)}"
        )
    if precision.startswith("16") and not get_accelerator().is_fp16_supported():
        return (
            f"precision={precision!r} needs a device that DeepSpeed trains on in fp16, and this "
            f"{get_accelerator().device_name()} is none: use 'bf16-mixed'"
        )
    if strategy._layer_sync is not None:
        return (
            "sync_batchnorm is not available with the madpipe strategy, whose micro-batches pass a stage one "
            "after the other: leave it out"
        )
    if trainer.state.fn != "fit":
        return None
    return _refusal_of_training(trainer, module, base, name) or _refusal_of_callbacks(trainer, callbacks)


def _refusal_of_training(trainer: Any, module: Any, base: type, name: str) -> str | None:
    if not module.automatic_optimization:
        return (
            f"{name} uses manual optimization, and with a pipeline the engine runs backward and the "
            "optimizer: leave automatic_optimization = True"
        )
    if trainer.gradient_clip_val and clips_by_value(trainer) and trainer.strategy.wraps_optimizer:
        return (
            "gradient_clip_algorithm='value' works in 32-true with stage=0 only, because DeepSpeed's ZeRO, bf16 "
            "and fp16 optimizers clip by norm: clip by 'norm'"
        )
    for hook in ENGINE_HOOKS:
        if getattr(type(module), hook) is not getattr(base, hook):
            return f"{name} overrides {hook}(), whose work the pipeline engine does: leave it out"
    return None


def _refusal_of_callbacks(trainer: Any, callbacks: Any) -> str | None:
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        for name, reason in CALLBACKS.items():
            if isinstance(callback, getattr(callbacks, name, ())):  # some are newer than the oldest Lightning
                return f"the callback {kind} is not available with a pipeline, because it {reason}: leave it out"
        if isinstance(callback, callbacks.LearningRateFinder) and trainer.strategy.wraps_optimizer:
            return (
                "the learning-rate finder works in 32-true with stage=0 only, because its schedulers do not know "
                "DeepSpeed's ZeRO, bf16 and fp16 optimizers: find the rate there, and give it to this run"
            )
        io = trainer.strategy.checkpoint_io_plugin
        if io is not None and isinstance(callback, callbacks.ModelCheckpoint) and not callback.save_weights_only:
            return (
                f"{kind} would write DeepSpeed's folders past the plugin {type(io).__name__}: give it "
                "save_weights_only=True, or leave the plugin out"
            )
    return None


def clips_by_value(trainer: Any) -> bool:
    """Whether ``gradient_clip_val`` bounds each element of the gradients, and not their norm."""
    return trainer.gradient_clip_algorithm == "value"


def notes_on(trainer: Any, module: Any, defaults: Collection[Any]) -> Iterator[str]:
    """What runs otherwise than the user may expect, one sentence each.

    Args:
        defaults: Lightning's own ``on_before_backward``, of modules and of callbacks.
    """
    hooks = {type(owner).__name__: owner.on_before_backward for owner in (module, *trainer.callbacks)}
    deaf = [name for name, hook in hooks.items() if getattr(hook, "__func__", hook) not in defaults]
    if deaf:
        yield f"on_before_backward of {_list(deaf)} is not called: a pipeline runs many backwards in each step"
    if any(getattr(logger, "_log_graph", False) for logger in trainer.loggers):
        yield "log_graph=True shows nothing: no rank of a pipeline has the whole graph"


def _list(names: Any) -> str:
    return ", ".join(names)
