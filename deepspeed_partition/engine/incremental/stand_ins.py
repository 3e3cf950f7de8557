"""Layers of a profiling run: as they are, with something to train where a device would have nothing, or stand-ins.

A stand-in gives tensors of the shapes that the layers it stands for give, and takes no memory for anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from deepspeed_partition.engine.repairs import let_normalizations_run
from deepspeed_partition.layer_calls import unpacking
from deepspeed_partition.profiling.boundaries import Boundary, like, tensors_of


class CopySpec(LayerSpec):
    """Specification of a copy of a module: what a rank does not run takes no memory that is counted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(type(module))
        self.module = module

    def build(self, log: bool = False) -> nn.Module:
        return copy.deepcopy(self.module)


class _Touch(torch.autograd.Function):
    """A tensor as it is, of which a parameter has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_zeros(1)


class TrainedLayer(nn.Module):
    """A layer beside one number that trains: DeepSpeed's optimizer cannot start on a rank without parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        built = layer.build() if isinstance(layer, LayerSpec) else layer
        if isinstance(built, nn.Module):
            self.layer = built
        self._run = unpacking(built)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Boundary) -> Boundary:
        tensors = list(tensors_of(output := self._run(x)))
        place = next((index for index, each in enumerate(tensors) if each.is_floating_point()), None)
        if place is not None:
            tensors[place] = _Touch.apply(tensors[place], self.weight)
        return like(output, tensors)


class _Replace(torch.autograd.Function):
    """Tensors of other shapes; gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, shapes: Sequence[tuple[Any, ...]], weight: torch.Tensor, *inputs: torch.Tensor) -> Any:
        ctx.inputs = [(each.shape, each.dtype, each.device) for each in inputs]
        made = tuple(torch.zeros(shape, dtype=dtype, device=weight.device) for shape, dtype in shapes)
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        wanted = zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in wanted
        )
        return None, torch.zeros(1, device=ctx.inputs[0][2]), *zeros


class StandIn(nn.Module):
    """Gives a boundary of these shapes and types for any input."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self._alone = isinstance(boundary, torch.Tensor)
        self._shapes = [(tuple(each.shape), each.dtype) for each in tensors_of(boundary)]
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Boundary) -> Boundary:
        made = _Replace.apply(self._shapes, self.weight, *tensors_of(x))
        return made[0] if self._alone else made


def passed_on(x: Boundary) -> Boundary:
    """Return the input: the other layers of a device whose first one is a stand-in."""
    return x


def specifications(layers: Sequence[Any]) -> list[Any]:
    """Return layers so that a rank's memory has in it what the rank runs, and nothing else.

    Raises:
        ValueError: layers share weights without a ``TiedLayerSpec``.
    """
    seen: dict[int, int] = {}
    specs = []
    for index, layer in enumerate(layers):
        for weight in layer.parameters() if isinstance(layer, nn.Module) else ():
            if seen.setdefault(id(weight), index) != index:
                raise ValueError(
                    f"layers {seen[id(weight)]} and {index} share weights, and incremental profiling runs copies "
                    "of layers: make them TiedLayerSpec"
                )
        specs.append(CopySpec(layer) if isinstance(layer, nn.Module) else layer)
    return specs


def trains(layer: Any) -> bool:
    """Return whether a layer has trainable parameters; a specification is built without data to find out."""
    if isinstance(layer, CopySpec):
        layer = layer.module
    if isinstance(layer, LayerSpec):
        try:
            with torch.device("meta"):
                layer = layer.build()
        except Exception:  # some modules compute with their weights when they are built
            layer = layer.build()
    return isinstance(layer, nn.Module) and any(weight.requires_grad for weight in layer.parameters())


def boundaries_behind(layers: Sequence[Any], inputs: Boundary, dtype: torch.dtype | None = None) -> list[Boundary]:
    """Return what each layer gives, without data; one layer at a time is built and run.

    Where layers draw or count, those that train notice nothing: these are other copies.

    Args:
        layers: Specifications, and functions.
        inputs: of the first one.
        dtype: that the engine of a run gives the weights of layers; None: their own.
    """
    found: list[Boundary] = []
    with torch.no_grad():
        for layer in layers:
            built = layer.build() if isinstance(layer, LayerSpec) else layer
            if isinstance(built, nn.Module) and dtype is not None:
                _cast_weights(built, dtype)
            forward = getattr(layer, "forward_fn", None) if isinstance(layer, TiedLayerSpec) else None
            inputs = forward(built, inputs) if forward else unpacking(built)(inputs)
            found.append(like(inputs, [torch.empty_like(each, device="meta") for each in tensors_of(inputs)]))
    return found


def _cast_weights(layer: nn.Module, dtype: torch.dtype) -> None:
    """Give weights a type as an engine does, which leaves buffers as they are, except for running statistics."""
    for weight in layer.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    let_normalizations_run(layer)


def layers_of_run(
    specs: Sequence[Any], boundaries: Sequence[int], replaced: Sequence[int], shapes: Sequence[Boundary]
) -> list[Any]:
    """Return the layers of a run: specifications, stand-ins for ``replaced`` devices, something to train on each.

    Args:
        shapes: what each layer gives; only of devices that are replaced.
    """
    made = list(specs)
    for device, (start, stop) in enumerate(pairwise(boundaries)):
        if device in replaced:
            made[start:stop] = [LayerSpec(StandIn, shapes[stop - 1]), *[passed_on] * (stop - start - 1)]
        elif not any(map(trains, specs[start:stop])):
            # At the end of the device: no layer behind it there could write into its output in place.
            made[stop - 1] = LayerSpec(TrainedLayer, specs[stop - 1])
    return made
