"""Measurement of time and memory of layers, each alone on a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed_partition.given_modules import built_aside
from deepspeed_partition.hidden_modules import parts_of
from deepspeed_partition.profiling.backward_halves import Halves
from deepspeed_partition.profiling.boundaries import Boundary, bytes_of, describe, detached, receive, tensors_of
from deepspeed_partition.profiling.failed_backward import forget_failed_backward
from deepspeed_partition.profiling.hidden_bytes import HiddenBytes
from deepspeed_partition.profiling.isolation import gradients_kept, stand_ins
from deepspeed_partition.profiling.layer_memory import MemoryReading, keys_of, measure_memory
from deepspeed_partition.profiling.live_bytes import storages_of
from deepspeed_partition.profiling.run import Conditions, LayerRun, Loss, gradients_for
from deepspeed_partition.profiling.sources import BuiltLayer, LayerSource, modules_called, modules_of, said


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated readings of one duration, in seconds."""

    median_seconds: float
    interquartile_seconds: float

    @classmethod
    def of(cls, readings: Sequence[float]) -> Spread:
        if len(readings) == 1:
            return cls(median_seconds=readings[0], interquartile_seconds=0.0)
        first, median, third = statistics.quantiles(readings, n=4, method="inclusive")
        return cls(median_seconds=median, interquartile_seconds=third - first)


@dataclass(frozen=True, kw_only=True)
class HalvesReading:
    """Reading of the two halves of a backward: the gradient of the input, and those of the weights after it."""

    input_seconds: float
    weight_seconds: float
    weight_stash_bytes: int
    """Bytes kept from the first half to the second: saved tensors and gradients, not parameters and buffers."""

    @property
    def input_share(self) -> float:
        """Part of the backward (0 to 1) that the first half takes; 0 where neither takes time."""
        both = self.input_seconds + self.weight_seconds
        return self.input_seconds / both if both else 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredLayer:
    """Measurements of one layer by itself, in seconds and bytes. ``layer_profiles`` joins layers to a chain."""

    name: str
    type: str
    forward: Spread
    backward: Spread
    weight_bytes: int
    trainable_parameters: tuple[int, ...]
    """How many numbers each parameter has that is trained, in order."""
    buffer_bytes: int
    input_tensor_bytes: tuple[int, ...]
    output_bytes: int
    memory: MemoryReading
    hidden_bytes: int = 0
    """Bytes on the device of modules and tensors that the layer holds in attributes, lists and objects, and no
    layer of the same process before it."""
    halves: HalvesReading | None = None
    """None: not looked at, or the backward cannot be divided."""

    @property
    def num_trainable_parameters(self) -> int:
        """Numbers of the parameters that are trained."""
        return sum(self.trainable_parameters)


@contextmanager
def _ready(
    layer: LayerSource,
    boundary: Boundary,
    conditions: Conditions,
    finish: Loss | None = None,
    apart: Container[nn.Module] = (),
) -> Iterator[BuiltLayer]:
    """Build the layer and put it on the device, with the modules of its loss, within the context.

    ``apart`` are the layers of the chain and their parts.
    """
    try:
        with built_aside(layer.source, layer.build) as built:
            of_loss = () if finish is None else modules_called(finish.function)
            for what, modules in ((f"layer {layer.name!r}", built.modules), ("the loss function", of_loss)):
                if any(map(nn.parameter.is_lazy, _weights_of(modules))):
                    raise ValueError(f"{what} has lazy parameters or buffers, without shapes: run it once before")
            beside = None if finish is None else finish.parts
            with stand_ins(built.modules, conditions.device, beside=beside, apart=apart):
                yield built
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        forget_failed_backward()
        raise MemoryError(
            f"layer {layer.name!r} with its input {describe(boundary)} does not fit on {conditions.device}, "
            f"alone: {said(error)}"
        ) from error


def _weights_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from (*module.parameters(), *module.buffers())


def measure_layer(
    layer: LayerSource,
    boundary: Boundary,
    conditions: Conditions,
    finish: Loss | None = None,
    hidden: HiddenBytes | None = None,
    apart: Container[nn.Module] = (),
) -> tuple[MeasuredLayer, Boundary]:
    """Measure one layer on the input ``boundary``; return the measurement and the output, detached.

    ``hidden`` counts what layers hold where torch does not look; None: it knows no other layers. ``apart`` are the
    layers of the chain and their parts, which stay as they are where this one holds them.
    """
    hidden = HiddenBytes((), conditions.device) if hidden is None else hidden
    with _ready(layer, boundary, conditions, finish, apart) as built:
        run = LayerRun(layer.name, built.call, boundary, conditions, finish, built.modules)
        parameters = built.parameters()
        with gradients_kept(_parameters_elsewhere(run, parameters)):
            forward, backward, output = _time(run)
            memory = measure_memory(run, [*parameters, *built.buffers()])
            halves = _halves(run, [*parameters, *built.buffers()]) if conditions.halves else None
    measured = MeasuredLayer(
        name=layer.name,
        type=layer.type,
        forward=forward,
        backward=backward,
        weight_bytes=built.weight_bytes,
        trainable_parameters=built.trainable_parameters,
        buffer_bytes=built.buffer_bytes,
        hidden_bytes=hidden.of(built.modules),
        input_tensor_bytes=tuple(bytes_of(tensor) for tensor in tensors_of(boundary)),
        output_bytes=bytes_of(output),
        memory=memory,
        halves=halves,
    )
    return measured, output


def run_layer(
    layer: LayerSource, boundary: Boundary, conditions: Conditions, apart: Container[nn.Module] = ()
) -> Boundary:
    """Return the output of one layer, detached; nothing is measured. ``apart``: as for :func:`measure_layer`."""
    with _ready(layer, boundary, conditions, apart=apart) as built:
        output, _ = LayerRun(layer.name, built.call, boundary, conditions, modules=built.modules).forward(
            receive(boundary)[0]
        )
    return detached(output)


def measure_layers(
    layers: Sequence[LayerSource],
    boundary: Boundary,
    conditions: Conditions,
    finish: Loss | None = None,
    *,
    of_chain: Sequence[LayerSource] = (),
    on_layer: Callable[[], object] | None = None,
) -> tuple[list[MeasuredLayer], Boundary]:
    """Measure consecutive layers, one at a time; return the measurements and the last output, detached.

    Args:
        finish: makes the loss of the last output; its cost is part of the last layer.
        of_chain: all layers of the chain, where others have some of them.
        on_layer: called after each layer.
    """
    measured = []
    modules = [each for layer in of_chain or layers for each in modules_of(layer.source)]
    hidden, apart = HiddenBytes(modules, conditions.device), parts_of(modules)
    for layer in layers:
        loss = finish if layer is layers[-1] else None
        one, boundary = measure_layer(layer, boundary, conditions, loss, hidden, apart)
        measured.append(one)
        if on_layer is not None:
            on_layer()
    return measured, boundary


def run_layers(
    layers: Sequence[LayerSource],
    boundary: Boundary,
    conditions: Conditions,
    of_chain: Sequence[LayerSource] = (),
) -> Boundary:
    """Return the output of consecutive layers, one at a time on the device; nothing is measured."""
    apart = parts_of(each for layer in of_chain or layers for each in modules_of(layer.source))
    for layer in layers:
        boundary = run_layer(layer, boundary, conditions, apart)
    return boundary


def _parameters_elsewhere(run: LayerRun, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters that the layer uses without owning them, as a function may: they get gradients, too."""
    arguments, leaves = receive(run.boundary)
    _, roots = run.forward(arguments)
    known = {id(tensor) for tensor in (*parameters, *leaves)}
    waiting = [root.grad_fn for root in roots]
    seen = set(waiting)
    found: dict[int, torch.Tensor] = {id(root): root for root in roots if root.is_leaf}
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        if node.name().endswith("AccumulateGrad"):  # it adds to the gradient of a leaf
            found[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return [tensor for key, tensor in found.items() if key not in known]


def _time(run: LayerRun) -> tuple[Spread, Spread, Boundary]:
    forward_seconds, backward_seconds = [], []
    now = run.conditions.now
    for _ in range(run.conditions.warm_up + run.conditions.repeats):
        arguments, leaves = receive(run.boundary)
        start = now()
        output, roots = run.forward(arguments)
        forward_seconds.append(now() - start)

        gradients = gradients_for(roots)
        start = now()
        if roots:
            run.backward(roots, gradients)
        backward_seconds.append(now() - start if roots else 0.0)
        output = detached(output)
        del arguments, leaves, roots, gradients  # freed before the next forward, as in training
    warm_up = run.conditions.warm_up
    return Spread.of(forward_seconds[warm_up:]), Spread.of(backward_seconds[warm_up:]), output


def _halves(run: LayerRun, persistent: Sequence[torch.Tensor]) -> HalvesReading | None:
    """Measure the two halves of a layer's backward; None where it cannot be divided, or not by saved tensors."""
    first_seconds, second_seconds, num_bytes = [], [], 0
    now, needs_input = run.conditions.now, any(each.requires_grad for each in tensors_of(run.boundary))
    known = keys_of(persistent)
    for _ in range(1 + run.conditions.repeats):
        arguments, leaves = receive(run.boundary)
        halves = Halves()
        try:
            with halves.saving():
                if needs_input:
                    halves.begins_at(arguments)
                output, roots = run.forward(arguments)
        except ValueError:  # as where torch.func allows no hooks; without them it has run before
            return None
        if not roots:
            return None
        gradients = gradients_for(roots)
        start = now()
        if halves.survey(roots) is not None:
            return None
        halves.first(roots, gradients)
        first_seconds.append(now() - start if needs_input else 0.0)
        del output, arguments, roots, gradients
        kept = {id(each): each.nbytes() for tensor in halves.kept() for each in storages_of(tensor)}
        num_bytes = sum(size for key, size in kept.items() if key not in known)
        start = now()
        halves.second()
        second_seconds.append(now() - start)
        del leaves
    return HalvesReading(
        input_seconds=statistics.median(first_seconds[1:]),
        weight_seconds=statistics.median(second_seconds[1:]),
        weight_stash_bytes=num_bytes,
    )
