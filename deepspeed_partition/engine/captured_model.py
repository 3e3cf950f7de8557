"""``layers_of``: a model as it is, as a list of layers for DeepSpeed's ``PipelineModule``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from deepspeed_partition.capture import Captured, CaptureError, Layers, layers_as_they_are, layers_from
from deepspeed_partition.capture.coarse import coarse_layers
from deepspeed_partition.capture.model_layers import TiedLayer
from deepspeed_partition.engine.pipeline.shared_weights import TiedModule
from deepspeed_partition.engine.pipeline.unlike_recordings import watch_recordings
from deepspeed_partition.engine.runtime.environment import announce, warn_once


def layers_of(model: nn.Module, *args: Any, **kwargs: Any) -> Layers:
    """The layers of a model: the body of ``deepspeed_partition.layers_of``."""
    layers = layers_as_they_are(model, args, kwargs, wrap=_tied)
    for note in layers.captured.notes:
        announce(note)
    if layers.recipe.outside is not None:
        layers.recipe.outside.tell = warn_once
        watch_recordings(layers.recipe)
    return layers


def layers_of_captured(captured: Captured) -> Layers:
    """The layers of a model that was captured already."""
    return layers_from(captured, wrap=_tied)


def layers_of_elements(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], reason: CaptureError, within: str = ""
) -> Layers:
    """The layers of a model that cannot be captured: elements that it runs in order, and the code around them.

    Args:
        within: The module whose elements are meant.

    Raises:
        CaptureError: the reason, where it runs none, or its code does more around them.
    """
    return coarse_layers(model, args, kwargs, reason, _tied, within)


def _tied(layer: TiedLayer) -> TiedModule:
    return TiedModule(layer.key, layer.shared, functools.partial(_run, layer.recipe, layer.number))


def _run(recipe: Any, number: int, shared: nn.Module, inputs: Any) -> Any:
    return recipe.program(number, shared).run(shared, inputs)
