"""The parts of a pipeline module that a rank holds if it runs one of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from deepspeed_partition.engine.pipeline.stages import owner
from deepspeed_partition.engine.pipeline.tied_copies import forms_of, own_copies
from deepspeed_partition.engine.runtime.collectives import (
    gather_objects,
)
from deepspeed_partition.planner.allocation import Allocation

LOSS = "loss_fn"
"""The name of a loss function that is a module among the parts of a pipeline."""


@dataclass(frozen=True, slots=True)
class Part:
    """A submodule of the pipeline that a rank holds if it runs one of its layers."""

    name: str
    """The part's name in the pipeline: ``"3"``, or ``"tied_modules.embed"`` for layers that share one module."""
    layers: tuple[int, ...]
    """The layers that run it; several where it is tied."""
    spec: LayerSpec | nn.Module

    def owners(self, allocation: Allocation) -> list[int]:
        """The ranks of the pipeline that hold it, in order."""
        return sorted({owner(allocation, layer) for layer in self.layers})


def parts_of(module: PipelineModule) -> list[Part]:
    """Everything with weights in the whole pipeline, in the order of the layers; functions have none."""
    parts = [Part(form.part_name, form.layers, form.spec) for form in forms_of(module._layer_specs)]
    parts += [
        Part(str(index), (index,), spec)
        for index, spec in enumerate(module._layer_specs)
        if isinstance(spec, LayerSpec | nn.Module) and not isinstance(spec, TiedLayerSpec)
    ]
    return sorted(parts, key=lambda part: part.layers)


def loss_part_of(module: PipelineModule) -> Part | None:
    """The loss function, if it has weights or buffers: it belongs to the rank that runs the last layer.

    DeepSpeed registers it on every rank, where the other ones never use it.
    """
    loss_fn = module.loss_fn
    if not isinstance(loss_fn, nn.Module) or not tensors_by_name(loss_fn):
        return None
    return Part(LOSS, (module._num_layers - 1,), loss_fn)


def all_that_moves(module: PipelineModule) -> list[Part]:
    """The parts of the pipeline, and the loss function where it is one."""
    loss = loss_part_of(module)
    return [*parts_of(module), *([] if loss is None else [loss])]


def held_modules(module: PipelineModule) -> dict[str, nn.Module]:
    """The parts that this rank holds now, by their global names."""
    # Not named_children(), which names a module once that the user listed as several layers.
    held = {name: child for name, child in module._modules.items() if name.isdigit() and child is not None}
    if isinstance(module.loss_fn, nn.Module):
        held[LOSS] = module.loss_fn
    held.update({copy.form.part_name: module.tied_modules[copy.registered] for copy in own_copies(module)})
    return held


def parts_here(module: PipelineModule) -> dict[str, bool]:
    """Return the parts of this rank, in the order of the layers, and whether they have parameters."""
    held = held_modules(module)
    found = (part.name for part in all_that_moves(module) if part.name in held)
    return {name: any(True for _ in held[name].parameters()) for name in found}


def in_words(names: Sequence[str]) -> str:
    """Names of parts: ``layers 3, 4 and tied_modules.embed``."""
    *others, last = [*names[:8], *(["..."] if len(names) > 8 else [])]
    return ("layers " + ", ".join(others) + " and " if others else "layer ") + last


def trainable_parameters(module: PipelineModule) -> list[int]:
    """Count each layer's trainable parameters; tied ones count wherever they stand. Collective."""
    return trainable_and_frozen_parameters(module)[0]


def trainable_and_frozen_parameters(module: PipelineModule) -> tuple[list[int], list[int]]:
    """Count each layer's trainable and frozen parameters; tied ones count wherever they stand. Collective."""
    held = held_modules(module)
    mine = {
        layer: tuple(
            sum(weight.numel() for weight in held[part.name].parameters() if weight.requires_grad == trains)
            for trains in (True, False)
        )
        for part in parts_of(module)
        if part.name in held
        for layer in part.layers
    }
    counts: dict[int, tuple[int, ...]] = {}
    for theirs in gather_objects(mine, module.mpu().get_pipe_parallel_group()):
        counts.update(theirs)
    each = [counts.get(layer, (0, 0)) for layer in range(len(module._layer_specs))]
    return [trainable for trainable, _ in each], [frozen for _, frozen in each]


def tensors_by_name(part: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a part, or of a layer, by their names there."""
    return {**dict(part.named_parameters()), **dict(part.named_buffers())}
