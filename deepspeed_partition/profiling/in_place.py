"""Clock for layers where they train, which does not wait for the device.

A layer is called through a stand-in that notes when its forward begins and ends, and when the gradient of what it
returned arrives; the backward of a layer lasts from there to the next arrival further down, or to the end of the
backward. A forward within a backward recomputes, and its time is taken off. A forward that asks for gradients
itself, such as a head that returns forces, runs a backward that is part of this forward.

    forward    |--0--|---1---|--2--|loss|
    backward                            ^----2----^-----1-----^---0---|--accumulation--|
                                     arrival   arrival     arrival   end

What an optimizer does with the gradients of each micro-batch beside autograd is the layers' by their shares in it.

On a CPU the clock is ``perf_counter``. On a GPU it uses events on the stream that computes, read at the end.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from deepspeed_partition.profiling.measure import Spread

NUM_DROPPED = 2
"""Number of first steps that do not count: they allocate, choose kernels and make the optimizer's states. They
count if there are no others."""

Stamp = Any
"""Instant: of ``perf_counter``, in seconds, or an event of the device."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer for one micro-batch."""

    forward: Spread
    backward: Spread


class _Event(NamedTuple):
    kind: Literal["forward", "loss", "inner", "arrival", "end", "accumulation", "optimizer"]
    layer: int
    start: Stamp
    end: Stamp


class InPlaceClock:
    """Clock of layers, the loss function and the optimizer during real training steps.

    Args:
        device: the device on which they run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[list[_Event]] = []
        self._events: list[_Event] = []
        self._in_backward = False
        self._num_forwards = 0
        """Number of layers and losses whose forward has begun and not ended."""
        self._shares: Mapping[int, float] = {}

    @property
    def num_steps(self) -> int:
        """Number of steps that came to their end."""
        return len(self._steps)

    @property
    def num_counted_steps(self) -> int:
        """Number of steps whose times count."""
        return len(self._steps) - self._num_dropped

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the step that runs within the context; it counts unless it raises."""
        self._events, self._in_backward = [], False
        yield
        self._steps.append(self._events)
        self._events = []

    def timed_layer(self, layer: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function to call in the place of the layer with this number in the chain."""
        arrived = functools.partial(self._arrived, layer)

        def run(inputs: Any) -> Any:
            before = gradients_before(inputs)
            outputs = self._forward("forward", layer, function, inputs)
            if torch.is_grad_enabled():
                made = made_by(before, outputs)
                for tensor in (*made, *bases_made(before, made)):
                    tensor.register_hook(arrived)
            return outputs

        return run

    def timed_loss(self, layer: int, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in the place of the loss function; its time is the last layer's."""
        arrived = functools.partial(self._arrived, layer)

        def run(*arguments: Any) -> Any:
            loss = self._forward("loss", layer, loss_fn, *arguments)
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(arrived)
            return loss

        return run

    def _forward(
        self, kind: Literal["forward", "loss"], layer: int, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        depth = self._num_forwards
        self._num_forwards += 1
        start = self._now()
        try:
            return function(*arguments)
        finally:  # recomputation may stop in the middle of a layer
            if depth <= 1:
                self._events.append(_Event("inner" if depth else kind, layer, start, self._now()))
            self._num_forwards = depth

    def timed_accumulation(self, function: Callable[..., Any], shares: Mapping[int, float]) -> Callable[..., Any]:
        """Return the function to call in the place of one that adds up gradients after each backward.

        Args:
            shares: of its time, by the numbers of the layers in whose backward it is counted.
        """
        self._shares = shares
        return self._timed("accumulation", function)

    def timed_optimizer(self, optimizer_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in the place of the optimizer step."""
        return self._timed("optimizer", optimizer_step)

    def _timed(
        self, kind: Literal["accumulation", "optimizer"], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            start = self._now()
            result = function(*arguments, **keywords)
            self._events.append(_Event(kind, -1, start, self._now()))
            return result

        return run

    def times(self) -> dict[int, LayerTimes]:
        """Return the times of each layer that ran: medians over the micro-batches of the steps that count."""
        forward: dict[int, list[float]] = defaultdict(list)
        backward: dict[int, list[float]] = defaultdict(list)
        accumulation: list[float] = []
        for events in self._counted_steps():
            self._read(events, forward, backward)
            accumulation.append(self._accumulation_seconds(events))
        beside = statistics.median(accumulation or [0.0])
        for layer, share in self._shares.items():
            backward[layer] = [seconds + beside * share for seconds in backward[layer]]
        return {
            layer: LayerTimes(forward=Spread.of(readings), backward=Spread.of(backward.get(layer) or [0.0]))
            for layer, readings in forward.items()
        }

    def _accumulation_seconds(self, events: list[_Event]) -> float:
        """Return the seconds of a step that gradients are added up beside autograd, for each micro-batch."""
        seconds = sum(self._seconds(each.start, each.end) for each in events if each.kind == "accumulation")
        return seconds / max(1, sum(each.kind == "end" for each in events))

    def optimizer_step(self) -> Spread | None:
        """Seconds of the optimizer step, with what is done around it; None where no step was timed."""
        readings = [
            self._seconds(each.start, each.end)
            for events in self._counted_steps()
            for each in events
            if each.kind == "optimizer"
        ]
        return Spread.of(readings) if readings else None

    def _counted_steps(self) -> list[list[_Event]]:
        if self._steps and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._steps[self._num_dropped :]

    @property
    def _num_dropped(self) -> int:
        return max(0, min(NUM_DROPPED, len(self._steps) - 1))

    def _read(
        self, events: list[_Event], forward: dict[int, list[float]], backward: dict[int, list[float]]
    ) -> None:
        """Add a reading per micro-batch and layer to ``forward`` and ``backward``, in seconds."""
        current: _Event | None = None
        """Arrival whose backward is going on; within a backward there is one."""
        recomputed_seconds = inner_seconds = 0.0
        spans: dict[int, float] = defaultdict(float)
        for event in events:
            if event.kind == "inner":  # recomputed for gradients that the forward noted next has asked for
                inner_seconds += self._seconds(event.start, event.end)
            elif event.kind in ("forward", "loss"):
                seconds = self._seconds(event.start, event.end)
                if current is not None:
                    recomputed_seconds += seconds
                elif event.kind == "loss":
                    forward[event.layer][-1] += seconds - inner_seconds
                else:
                    forward[event.layer].append(seconds - inner_seconds)
                inner_seconds = 0.0
            elif event.kind in ("arrival", "end"):
                if current is not None:
                    seconds = self._seconds(current.start, event.start) - recomputed_seconds
                    spans[current.layer] += max(seconds, 0.0)
                recomputed_seconds = 0.0
                current = event if event.kind == "arrival" else None
                if current is None:
                    for layer, seconds in spans.items():
                        backward[layer].append(seconds)
                    spans.clear()

    def _arrived(self, layer: int, _: torch.Tensor) -> None:
        if self._num_forwards:  # a forward has asked for gradients
            return
        if not self._in_backward:
            self._in_backward = True
            # Autograd calls it when everything of this backward is done, leaves included.
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        now = self._now()
        self._events.append(_Event("arrival", layer, now, now))

    def _ended(self) -> None:
        self._in_backward = False
        now = self._now()
        self._events.append(_Event("end", -1, now, now))

    def _now(self) -> Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Stamp, end: Stamp) -> float:
        return end - start if self._device.type != "cuda" else start.elapsed_time(end) / 1e3


def gradients_before(inputs: Any) -> dict[int, Any]:
    """Return the graph node behind each tensor that a layer is given, and behind what these are views of.

    Call it before the layer runs.
    """
    tensors = list(tensors_in(inputs))
    return {id(tensor): tensor.grad_fn for tensor in (*tensors, *_bases_of(tensors))}


def made_by(before: Mapping[int, Any], outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that want a gradient and that a layer made or changed in place; not those passed on."""
    return [
        tensor
        for tensor in tensors_in(outputs)
        if tensor.grad_fn is not None and (id(tensor) not in before or before[id(tensor)] is not tensor.grad_fn)
    ]


def bases_made(before: Mapping[int, Any], made: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what the tensors that a layer made are views of, where the layer made that, too.

    Where the next layer changes a view in place, no gradient arrives at the node that was behind the view: torch
    puts others in its place. The node behind what it is a view of stays.
    """
    known = {id(node) for node in before.values()}
    return [base for base in _bases_of(made) if base.grad_fn is not None and id(base.grad_fn) not in known]


def _bases_of(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """Return each tensor once that some of ``tensors`` are views of."""
    return {id(tensor._base): tensor._base for tensor in tensors if tensor._base is not None}.values()


def tensors_in(boundary: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a tuple, or the one tensor; none for anything else."""
    members = boundary if isinstance(boundary, tuple) else (boundary,)
    return (member for member in members if isinstance(member, torch.Tensor))
