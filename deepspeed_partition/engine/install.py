"""Teaching DeepSpeed's own classes ``partition_method="madpipe"``."""

from __future__ import annotations

import deepspeed
import deepspeed.pipe

from deepspeed_partition.engine.engine import MadPipeEngine
from deepspeed_partition.engine.environment import prepare_cpu
from deepspeed_partition.engine.module import partition_layers


def install() -> None:
    """Let DeepSpeed's ``PipelineModule``, every subclass of it and ``deepspeed.initialize`` plan.

    Call it once before the pipeline module is built; calling it again changes nothing. DeepSpeed's own
    partition methods stay DeepSpeed's, except that ``parts`` holds Python integers.
    """
    prepare_cpu()
    # The method is replaced on the class: subclasses, and modules that imported the class before, have it too.
    original = deepspeed.pipe.PipelineModule._partition_layers
    if not getattr(original, "by_madpipe", False):

        def _partition_layers(self, method="uniform"):
            partition_layers(self, method, lambda own: original(self, method=own))

        _partition_layers.by_madpipe = True  # type: ignore[attr-defined]
        deepspeed.pipe.PipelineModule._partition_layers = _partition_layers
    # deepspeed.initialize looks the class up when it is called.
    deepspeed.PipelineEngine = MadPipeEngine
