"""The DeepSpeed host: pipelines that DeepSpeed runs on a planned cut."""

from __future__ import annotations

from deepspeed_partition.quiet import leave_out_useless_lines
from deepspeed_partition.versions import require

# Before the imports that fail where one is missing, and could fail with an older one.
require("the DeepSpeed engine of MadPipe", "deepspeed", "torch", "deepspeed")

leave_out_useless_lines()  # before DeepSpeed is imported

from deepspeed_partition.engine.runtime.accelerator import prepare_cuda

prepare_cuda()  # before anything starts CUDA

from deepspeed_partition.engine.engine import MadPipeEngine, initialize
from deepspeed_partition.engine.install import install
from deepspeed_partition.engine.pipeline.module import PipelineModule
from deepspeed_partition.engine.pipeline.shared_weights import TiedModule
from deepspeed_partition.engine.runtime.environment import prepare_cpu
from deepspeed_partition.engine.runtime.gloo_threads import wait_at_exit
from deepspeed_partition.engine.runtime.joining import watch_joining

__all__ = ["MadPipeEngine", "PipelineModule", "TiedModule", "initialize", "install", "prepare_cpu"]

wait_at_exit()
prepare_cpu()  # which ends the process groups before that
watch_joining()
