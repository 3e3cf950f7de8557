"""Layers that sleep, with a backward in two parts: for the input, and for the weight."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class Instant(NamedTuple):
    """An instant in the thread that computes."""

    seconds: float
    """By ``time.perf_counter``."""
    worked_seconds: float
    """That this thread has worked so far."""
    queued_seconds: float
    """That it has waited so far for a processor to be free."""

    @classmethod
    def now(cls) -> Instant:
        return cls(time.perf_counter(), time.thread_time(), _queued_seconds())


def _queued_seconds() -> float:
    """Return the second number of Linux's ``schedstat`` of the main thread; 0 where there is none."""
    if _SCHEDSTAT is None:
        return 0.0
    return int(os.pread(_SCHEDSTAT, 99, 0).split()[1]) / 1e9


_SCHEDSTAT = os.open("/proc/self/schedstat", os.O_RDONLY) if os.path.exists("/proc/self/schedstat") else None


class Work:
    """What the thread that computes has done in a step.

    Args:
        begin: of the first layer.
    """

    def __init__(self, begin: Instant) -> None:
        self.begin = self.end = begin
        """Begin of the first layer, and end of the last one so far."""
        self.worked_seconds = self.queued_seconds = 0.0
        """Between layers, where that is not part of their time: the engine works, and waits for a processor."""

    def add(self, begin: Instant, end: Instant, *, runs_on: bool) -> None:
        """Add a layer; what was done since one that it runs on from is part of its time."""
        if not runs_on:
            self.worked_seconds += begin.worked_seconds - self.end.worked_seconds
            self.queued_seconds += begin.queued_seconds - self.end.queued_seconds
        self.end = end


class _OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, layer: SplitLayer, in_pass: object) -> Tensor:
        begin = Instant.now()
        ctx.layer, ctx.shape, ctx.anchored = layer, x.shape, anchor is not None
        output = torch.zeros(x.shape[0], layer.output_numel)
        layer.sleep("F", begin, in_pass)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        begin = Instant.now()
        gradient = torch.zeros(ctx.shape) if ctx.needs_input_grad[0] else None
        ctx.layer.sleep("I", begin, _backward_pass())
        return gradient, torch.zeros(1) if ctx.anchored else None, None, None


class _OfWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: SplitLayer) -> Tensor:
        ctx.layer = layer
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        ctx.layer.sleep("W", Instant.now(), _backward_pass())
        return torch.zeros(1), None


def _backward_pass() -> object:
    """Return what is equal within one call of autograd and in no other one of this process."""
    return torch._C._current_graph_task_id()  # type: ignore[attr-defined]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(x)  # the same tensor and no view, which torch's stages could not detach
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return gradients[0], torch.zeros(1)


class SplitLayer(nn.Module):
    """Sleeps for its forward, and for each half of its backward; hands on a tensor of the given size.

    What it does besides counts as part of that time. Where a layer in the same pass has just slept, it ends as if
    it had begun at the due end of that one: a pass over many layers is late once. A pass is a forward of a stage,
    or one call of autograd: half a backward, where a schedule splits them.

    Args:
        number: of the layer in the model.
        output_numel: of a sample, in fp32.
    """

    just_slept: ClassVar[tuple[object, float]] = None, 0.0
    """The pass in which a layer of this process slept last, and when it was due to end."""
    work: ClassVar[Work | None] = None
    """What the thread that computes has worked in this step; None before its first layer."""

    def __init__(self, number: int, forward_seconds: float, backward_seconds: float, output_numel: int) -> None:
        super().__init__()
        self.number, self.output_numel = number, output_numel
        self.seconds = {"F": forward_seconds, "I": backward_seconds / 2, "W": backward_seconds / 2}
        self.weight = nn.Parameter(torch.zeros(1))
        # The model's input has no gradient: without something else to go to, there would be no backward for it.
        self.anchor = nn.Parameter(torch.zeros(1)) if number == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        # A layer hands on its output with the pass; what comes from another stage has none.
        in_pass = getattr(x, "in_pass", None) or object()
        output = _Join.apply(_OfInput.apply(x, self.anchor, self, in_pass), _OfWeight.apply(self.weight, self))
        output.in_pass = in_pass
        return output

    def sleep(self, kind: str, begin: Instant, in_pass: object) -> None:
        """Sleep for the rest of a part of a pass that began at ``begin``."""
        last_pass, due = SplitLayer.just_slept
        runs_on = last_pass == in_pass
        due = (due if runs_on else begin.seconds) + self.seconds[kind]
        time.sleep(max(0.0, due - time.perf_counter()))
        SplitLayer.just_slept = in_pass, due
        work = SplitLayer.work or Work(begin)
        work.add(begin, Instant.now(), runs_on=runs_on)
        SplitLayer.work = work
