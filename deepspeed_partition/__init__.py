"""MadPipe: measure the layers, plan the pipeline, train. Importing this package costs no torch.

layers --profile--> Chain --plan--> Plan --engine--> training
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed_partition.planner.allocation import Allocation, Stage
from deepspeed_partition.planner.errors import (
    ChainFormatError,
    InfeasibleError,
    MadPipeError,
    PlanFormatError,
    PlanMismatchError,
)
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.simulate.replay import Replay, replay

if TYPE_CHECKING:
    from torch import nn

    from deepspeed_partition.capture import Layers

__version__ = "0.1.0"

__all__ = [
    "Allocation",
    "Chain",
    "ChainFormatError",
    "InfeasibleError",
    "LayerProfile",
    "MadPipeError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "Platform",
    "Replay",
    "Stage",
    "install",
    "layers_of",
    "make_plan",
    "replay",
]


def install() -> None:
    """Teach DeepSpeed ``partition_method="madpipe"``, once, before the pipeline module is built.

    It works on ``PipelineModule`` and every subclass, in code that nobody edits; to call it again changes
    nothing.

    Raises:
        ImportError: DeepSpeed or torch is missing, or older than the versions that this package works with.
    """
    from deepspeed_partition.engine.install import install as install_engine  # torch, DeepSpeed

    install_engine()


def layers_of(model: nn.Module, *args: Any, **kwargs: Any) -> Layers:
    """Return the layers of a model as it is, a list for ``PipelineModule(layers=...)``.

    The model's ``forward`` is run once on tensors without data, and what it calls is cut wherever that is
    possible. The layers hold the model's own modules under their own names. The first layer takes the tuple of the
    tensors in ``args`` and ``kwargs`` (``layers.input_names``), and the last one returns the tuple of the tensors
    that the model returns (``layers.output_names``); ``layers.output(tensors)`` makes the model's own output of
    them.

    Args:
        model: Any module, such as a Hugging Face model.
        args: The arguments of its ``forward`` for one micro-batch.
        kwargs: Its keyword arguments.

    Raises:
        CaptureError: The model cannot be captured; the message names the line of its source and what to do.
        ImportError: DeepSpeed or torch is missing, or older than the versions that this package works with.
    """
    from deepspeed_partition.engine.captured_model import layers_of as captured_layers_of  # torch, DeepSpeed

    return captured_layers_of(model, *args, **kwargs)
