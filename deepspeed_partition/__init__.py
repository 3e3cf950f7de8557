"""MadPipe: measure the layers, plan the pipeline, train. Importing this package costs no torch.

layers --profile--> Chain --plan--> Plan --engine--> training
"""

from __future__ import annotations

from deepspeed_partition.planner.allocation import Allocation, Stage
from deepspeed_partition.planner.errors import (
    ChainFormatError,
    InfeasibleError,
    MadPipeError,
    PlanFormatError,
    PlanMismatchError,
)
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning import make_plan
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.simulate.replay import Replay, replay

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
