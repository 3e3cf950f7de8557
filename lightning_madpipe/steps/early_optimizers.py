"""Optimizers for a step that asks for them while its layers are found, before those of the run are made.

A step may log the rate before it calls its layers. ``forward`` may not read it: the layers that are found of it
would keep the first one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from deepspeed_partition.capture import CaptureError
from deepspeed_partition.capture.element_attributes import of_class, subclass_of
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.finding.step_call import line_that_runs, replaced
from lightning_madpipe.steps.followed_calls import undone


@contextmanager
def optimizers_for_steps(trainer: Any, module: Any, lightning: Lightning) -> Iterator[None]:
    """Make optimizers and schedulers meanwhile where a step asks for them; refuse a ``forward`` that does.

    Raises:
        CaptureError: a ``forward`` asks; the message has its line.
    """
    if trainer.state.fn != "fit":  # there are none in one process either
        yield
        return
    core = lightning.module("core.optimizer")

    @cache
    def configured() -> tuple[list[Any], list[Any]]:
        with undone(module, lightning):
            return core._init_optimizers_and_lr_schedulers(module)

    def asked(place: int) -> list[Any]:
        if _is_in_forward():
            raise CaptureError(
                f"forward() of {type(module).__name__} asks for the optimizer or its rate at {line_that_runs()}, "
                "and the layers that are found of it would keep the rate of the first step: use the rate in the "
                "step, after its call of the layers"
            )
        return configured()[place]

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        made = asked(0)
        shown = [core.LightningOptimizer(each) for each in made] if use_pl_optimizer else made
        return shown[0] if len(shown) == 1 else shown

    members = {"optimizers": property(lambda _: asked(0)), "lr_scheduler_configs": property(lambda _: asked(1))}
    with of_class(trainer, subclass_of(type(trainer), members)), replaced(module, "optimizers", optimizers):
        yield


def _is_in_forward() -> bool:
    """Whether the code that runs was called by a ``forward()`` of a model."""
    frame = sys._getframe(1)
    while frame is not None:
        package = (frame.f_globals.get("__name__") or "").partition(".")[0]
        if frame.f_code.co_name == "forward" and package not in ("deepspeed_partition", "lightning_madpipe"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
