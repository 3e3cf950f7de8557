"""From a model as it is to layers of a pipeline: its ``forward`` is run once without data, and cut.

``captured`` runs the model, ``recorder`` writes down the calls, ``graph`` chooses the modules that are run whole,
``partition`` cuts, ``program`` runs a layer, ``model_layers`` makes modules of them; open that one first. ``tail``
takes the calls that make a loss out of the layers, for a host that has a whole batch's outputs. Torch alone is
imported, no host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from deepspeed_partition.capture.captured import Captured, capture
from deepspeed_partition.capture.coarse import coarse_layers, undivided
from deepspeed_partition.capture.model_layers import Layers, TiedLayer, layers_from
from deepspeed_partition.capture.outside_layers import OutsideLayers, notes_on_attributes, refuse_kept_state
from deepspeed_partition.capture.program import ShapeError
from deepspeed_partition.capture.recorder import CaptureError

__all__ = ["CaptureError", "Captured", "Layers", "ShapeError", "capture", "layers_as_they_are", "layers_from"]


def layers_as_they_are(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any],
    wrap: Callable[[TiedLayer], Any] = lambda layer: layer,
) -> Layers:  # fmt: skip
    """The layers of a model: by capture, and where that cannot be by its elements that run in order.

    Args:
        wrap: Makes of a layer that shares weights what stands in the list.

    Raises:
        CaptureError: neither can be; the message says where and why.
    """
    try:
        captured = capture(model, args, kwargs)
    except CaptureError as error:
        return coarse_layers(model, args, kwargs, error, wrap)
    whole = undivided(captured)
    if whole is not None:
        within, reason = whole
        try:
            return coarse_layers(model, args, kwargs, reason, wrap, within)
        except CaptureError as error:
            captured.notes.append(str(error))
    outside = OutsideLayers(captured)
    outside.verify()
    refuse_kept_state(captured)
    captured.notes += notes_on_attributes(captured)
    layers = layers_from(captured, wrap)
    layers.recipe.outside = outside
    return layers
