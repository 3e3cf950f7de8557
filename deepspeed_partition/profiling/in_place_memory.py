"""Memory of layers, read in one micro-batch where they train.

Each layer has a counter of its own. It counts while the layer runs forward, and goes on counting in the backward
from the arrival of the layer's gradient to the next arrival further down, as the clock of ``in_place.py`` does.

    forward    |--0--|---1---|--2--|loss|
    backward                            ^----2----^-----1-----^---0---|

The gradients of parameters are made in a step's first backward and stay: they count as weights, not as the
layer's. The same holds for what others do when such a gradient is there: ZeRO makes buffers for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from deepspeed_partition.profiling.allocated import allocated_on
from deepspeed_partition.profiling.boundaries import Boundary, bytes_of, is_boundary, tensors_of
from deepspeed_partition.profiling.hidden_bytes import HiddenBytes
from deepspeed_partition.profiling.in_place import LayerTimes, bases_made, gradients_before, made_by, tensors_in
from deepspeed_partition.profiling.layer_memory import LayerMemory, MemoryReading, keys_of
from deepspeed_partition.profiling.live_bytes import SwitchedCounter
from deepspeed_partition.profiling.measure import MeasuredLayer
from deepspeed_partition.profiling.sources import layer_sources

COMPILED = "CompiledFunctionBackward"


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch."""

    input_tensor_bytes: tuple[int, ...]
    num_samples: int | None
    """First dimension of the input's first tensor; None where it has none."""
    output_bytes: int
    memory: MemoryReading


class InPlaceMemory:
    """Reader of the bytes of this rank's layers in one micro-batch: around its forward, then around its backward.

    Training computes the same as without it. A gradient between two layers is held until the next one is there.

    Args:
        device: the device where the layers run.
        module: the module that has their parameters and buffers.
        loss_layer: the number of the layer whose output goes to a loss function, if that runs here.
    """

    def __init__(self, device: torch.device, module: nn.Module, loss_layer: int | None) -> None:
        self._loss_layer = loss_layer
        # From before the first forward to the end of the last backward: what is freed then was counted.
        self._counting = ExitStack()
        self._allocated = self._counting.enter_context(allocated_on(device, this_thread=True))
        self._trained = [weight for weight in module.parameters() if weight.requires_grad]
        self._persistent = keys_of([*module.parameters(), *module.buffers()])
        self._runs_forward = False
        self._num_forwards = 0
        """Number of layers and losses whose forward has begun and not ended, also of those that run again."""
        self._layers: dict[int, _Watched] = {}
        self._switch = SwitchedCounter()
        self._running: LayerMemory | None = None
        self._held: list[torch.Tensor] = []
        self.found: dict[int, LayerBytes] = {}
        """Bytes by number of the layer, after the backward, for the layers that ran on tensors and returned
        tensors."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._runs_forward = True
        try:
            yield
        finally:
            self._runs_forward = False

    def watched_layer(self, layer: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the function to call in the place of the layer with this number in the chain."""

        def run(inputs: Any) -> Any:
            if not self._runs_forward or not is_boundary(inputs):
                with self._within_forward():
                    return function(inputs)
            watched = _Watched(LayerMemory(self._allocated, inputs, self._persistent), inputs)
            before = gradients_before(inputs)
            with watched.memory.forward(), self._within_forward():
                outputs = function(inputs)
            if is_boundary(outputs):
                watched.output_bytes = bytes_of(outputs)
                self._layers[layer] = watched
                if layer != self._loss_layer:
                    watched.memory.forward_has_ended(outputs, ())
                    self._await(before, outputs, watched.memory)
            return outputs

        return run

    def watched_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call in the place of the loss function; its bytes are the last layer's."""

        def run(*arguments: Any) -> Any:
            if not self._runs_forward or self._loss_layer not in self._layers:
                return loss_fn(*arguments)
            memory = self._layers[self._loss_layer].memory
            with memory.forward(), self._within_forward():
                loss = loss_fn(*arguments)
            memory.forward_has_ended(arguments[0], list(tensors_in(loss)))
            self._await({}, loss, memory)
            return loss

        return run

    @contextmanager
    def backward(self) -> Iterator[None]:
        for watched in self._layers.values():
            watched.memory.backward_comes()
        hooks = [weight.register_hook(self._reached_weight) for weight in self._trained]
        # This hook comes after those of others: hooks run in the order in which they were added.
        hooks += [weight.register_post_accumulate_grad_hook(self._left_weight) for weight in self._trained]
        try:
            with self._switch:
                yield
        finally:
            self._pause()
            self.close()
            for hook in hooks:
                hook.remove()
        self.found = {layer: watched.bytes() for layer, watched in self._layers.items()}

    def close(self) -> None:
        """End the count; the end of ``backward`` does, too."""
        self._counting.close()

    @contextmanager
    def _within_forward(self) -> Iterator[None]:
        self._num_forwards += 1
        try:
            yield
        finally:
            self._num_forwards -= 1

    def _await(self, before: Mapping[int, Any], outputs: Any, memory: LayerMemory) -> None:
        made = made_by(before, outputs)
        for tensor in made:
            tensor.register_hook(functools.partial(self._arrived, memory))
        for base in bases_made(before, made):
            base.register_hook(functools.partial(self._arrived_at_base, memory))

    def _arrived_at_base(self, memory: LayerMemory, gradient: torch.Tensor) -> None:
        if memory is not self._running:  # else the layer has made it of what arrived at its output
            self._arrived(memory, gradient)

    def _arrived(self, memory: LayerMemory, gradient: torch.Tensor) -> None:
        if self._num_forwards:  # a forward has asked for gradients, which are its own
            return
        if self._running is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._pause)
        else:
            self._running.backward_pauses()
        if memory is not self._running:
            self._held.clear()
        self._held.append(gradient)
        self._running, self._switch.counter = memory, memory.live
        memory.backward_goes_on([gradient])

    def _reached_weight(self, _: torch.Tensor) -> None:
        if self._running is not None:
            self._running.backward_pauses()
            self._switch.counter = None

    def _left_weight(self, weight: torch.Tensor) -> None:
        if self._running is not None:
            if weight.grad is not None:
                self._running.live.leave_out([weight.grad])
            self._running.backward_goes_on()
            self._switch.counter = self._running.live

    def _pause(self) -> None:
        if self._running is not None:
            self._running.backward_pauses()
        self._running = self._switch.counter = None
        self._held.clear()


class _Watched:
    """One layer's micro-batch; it keeps no tensor."""

    def __init__(self, memory: LayerMemory, inputs: Boundary) -> None:
        self.memory = memory
        self.output_bytes = 0
        first, *_ = tensors = tensors_of(inputs)
        self._input_tensor_bytes = tuple(map(bytes_of, tensors))
        self._num_samples = first.shape[0] if first.dim() else None

    def bytes(self) -> LayerBytes:
        return LayerBytes(
            input_tensor_bytes=self._input_tensor_bytes,
            num_samples=self._num_samples,
            output_bytes=self.output_bytes,
            memory=self.memory.reading(),
        )


def would_notice(before: Mapping[int, Any], outputs: Any) -> bool:
    """Return whether the graph of a layer has a ``torch.autograd.Function`` in Python that was given a parameter.

    Where hooks see what autograd saves, such a function gets other tensors back than it has saved: what it adds
    to the gradient of a saved parameter by itself is lost. What ``torch.compile`` makes of a function counts,
    too: it would run otherwise where its tensors are counted.

    Args:
        before: ``gradients_before`` of the layer's inputs.
        outputs: the outputs of the layer.
    """
    nodes = [tensor.grad_fn for tensor in tensors_in(outputs)]
    seen = set(before.values())
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        behind = [following for following, _ in node.next_functions]
        given = (getattr(each, "variable", None) for each in behind)
        if isinstance(node, BackwardCFunction) and (
            type(node).__name__ == COMPILED or any(isinstance(each, nn.Parameter) for each in given)
        ):
            return True
        nodes += behind
    return False


def measured_in_place(
    functions: Sequence[Callable[[Any], Any]],
    first_index: int,
    times: Mapping[int, LayerTimes],
    found: Mapping[int, LayerBytes],
    device: torch.device,
) -> list[MeasuredLayer] | None:
    """Return, for consecutive layers by number, what was measured of each on ``device``.

    None where one was not measured.
    """
    sources = layer_sources(functions, first_index=first_index)
    numbers = range(first_index, first_index + len(sources))
    if not all(number in times and number in found for number in numbers):
        return None
    measured = []
    built_layers = [source.build() for source in sources]
    hidden = HiddenBytes((each for built in built_layers for each in built.modules), device)
    for number, source, built in zip(numbers, sources, built_layers, strict=True):
        measured.append(
            MeasuredLayer(
                name=source.name,
                type=source.type,
                forward=times[number].forward,
                backward=times[number].backward,
                weight_bytes=built.weight_bytes,
                trainable_parameters=built.trainable_parameters,
                buffer_bytes=built.buffer_bytes,
                hidden_bytes=hidden.of(built.modules),
                input_tensor_bytes=found[number].input_tensor_bytes,
                output_bytes=found[number].output_bytes,
                memory=found[number].memory,
            )
        )
    return measured
