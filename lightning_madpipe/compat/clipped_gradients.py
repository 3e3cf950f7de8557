"""``self.clip_gradients(...)`` of a LightningModule, which Lightning leaves to DeepSpeed's own clipping."""

from __future__ import annotations

from typing import Any


def clip_in_hooks(plugin: Any) -> None:
    """Let a precision plugin clip the gradients that a hook asks it to clip, as in one process.

    Lightning's plugin for DeepSpeed does nothing there, and DeepSpeed clips by what the Trainer was given alone.
    The norm that a hook clips by is that of all ranks, see ``watched_hooks``.

    Args:
        plugin: Lightning's; one whose class clips by itself stays as it is.
    """
    idle = next(kind for kind in type(plugin).__mro__ if "clip_gradients" in vars(kind))
    if idle.__module__.endswith("plugins.precision.deepspeed"):
        by_one_device: Any = super(idle, plugin)
        plugin.clip_gradients = by_one_device.clip_gradients
