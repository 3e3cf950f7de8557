"""The DeepSpeed host: pipelines that DeepSpeed runs on a planned cut."""

from __future__ import annotations

from deepspeed_partition.versions import check_versions

check_versions("torch", "deepspeed")  # before the imports that could fail with an older one

from deepspeed_partition.engine.runtime.accelerator import prepare_cuda  # noqa: E402

prepare_cuda()  # before anything starts CUDA

from deepspeed_partition.engine.engine import MadPipeEngine, initialize  # noqa: E402
from deepspeed_partition.engine.install import install  # noqa: E402
from deepspeed_partition.engine.pipeline.module import PipelineModule  # noqa: E402
from deepspeed_partition.engine.pipeline.shared_weights import TiedModule  # noqa: E402
from deepspeed_partition.engine.runtime.environment import prepare_cpu  # noqa: E402
from deepspeed_partition.engine.runtime.joining import watch_joining  # noqa: E402

__all__ = ["MadPipeEngine", "PipelineModule", "TiedModule", "initialize", "install", "prepare_cpu"]

prepare_cpu()
watch_joining()
