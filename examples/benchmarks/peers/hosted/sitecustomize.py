"""Install MadPipe in every process of a stranger's tests: Python imports this module from PYTHONPATH.

``PEERS_MODE=plain`` leaves DeepSpeed as it is. ``madpipe`` installs MadPipe, which plans before the first step;
``warm-up`` lets it train ``PEERS_WARMUP_STEPS`` steps first. No test is edited: what a user writes in one place
(``partition_method="madpipe"`` and the options of the configuration) is put there for it.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

import cpuinfo
import deepspeed
import deepspeed.pipe
import torch
from deepspeed.accelerator import get_accelerator

MODE = os.environ.get("PEERS_MODE", "plain")
OPTIONS = {"memory": "2GB", "bandwidth": "1GB/s", "latency_seconds": 1e-5, "time_limit_seconds": 5}
"""What is the same on every machine need not be measured in each of some hundred short tests."""


def _plan_by_default(original: Any) -> Any:
    """``PipelineModule.__init__`` with the partition method that a user of MadPipe writes."""

    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        named.setdefault("partition_method", "madpipe")
        original(self, *arguments, **named)

    return __init__


def _with_options(original: Any) -> Any:
    """``deepspeed.initialize`` with MadPipe's options in the configuration of a pipeline."""

    @functools.wraps(original)
    def initialize(*arguments: Any, **named: Any) -> Any:
        config = named.get("config")
        if isinstance(config, dict) and isinstance(named.get("model"), deepspeed.pipe.PipelineModule):
            pipeline = config.get("pipeline", {})
            options = OPTIONS | {"warmup_steps": int(os.environ["PEERS_WARMUP_STEPS"]) if MODE == "warm-up" else 0}
            named["config"] = config | {"pipeline": pipeline | {"madpipe": options}}
        return original(*arguments, **named)

    return initialize


# Every process asks what processor there is, which takes seconds of it.
if os.environ.get("PEERS_PROCESSOR"):
    cpuinfo.get_cpu_info = functools.partial(json.loads, os.environ["PEERS_PROCESSOR"])
# On a GPU these tests fork its random numbers by a module of torch that has no such functions for a CPU.
torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()  # type: ignore[attr-defined]
torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)  # type: ignore[attr-defined]
# DeepSpeed refuses fp16 on a CPU, where torch computes in it today.
type(get_accelerator()).is_fp16_supported = lambda self: True
type(get_accelerator()).supported_dtypes = lambda self: [torch.float, torch.bfloat16, torch.half]
# A name that tests of some versions compare and DeepSpeed 0.19.8 no longer sets on a pipeline.
deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()

if MODE != "plain":
    import deepspeed_partition

    deepspeed_partition.install()
    module = deepspeed.pipe.PipelineModule
    module.__init__ = _plan_by_default(module.__init__)
    deepspeed.initialize = _with_options(deepspeed.initialize)
