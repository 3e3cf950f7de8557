"""The DeepSpeed host: pipelines that DeepSpeed runs on a planned cut."""

from __future__ import annotations

from deepspeed_partition.engine.engine import MadPipeEngine, initialize
from deepspeed_partition.engine.environment import prepare_cpu
from deepspeed_partition.engine.install import install
from deepspeed_partition.engine.module import PipelineModule

__all__ = ["MadPipeEngine", "PipelineModule", "initialize", "install", "prepare_cpu"]

prepare_cpu()
