"""From a model as it is to layers of a pipeline: its ``forward`` is run once without data, and cut.

``recorder`` writes down the calls, ``graph`` chooses the modules that are run whole, ``partition`` cuts,
``program`` runs a layer, ``model_layers`` makes modules of them; open that one first. Torch alone is imported, no
host.
"""

from __future__ import annotations

from deepspeed_partition.capture.model_layers import Captured, Layers, capture, layers_from
from deepspeed_partition.capture.program import ShapeError
from deepspeed_partition.capture.recorder import CaptureError

__all__ = ["CaptureError", "Captured", "Layers", "ShapeError", "capture", "layers_from"]
