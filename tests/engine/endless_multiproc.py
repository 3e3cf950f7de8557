"""Trains without end, so that a test can kill one of its processes; see ``test_killed.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import deepspeed_partition
from tests.engine.pipelines import loss_fn, micro_batch, mlp


def main() -> None:
    torch.set_num_threads(1)
    deepspeed_partition.install()
    deepspeed.init_distributed()
    module = deepspeed.pipe.PipelineModule(
        layers=mlp(), num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method="madpipe"
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        },
        model_parameters=list(module.parameters()),
    )
    data = iter(lambda: micro_batch(0), None)
    for step in range(10**9):
        engine.train_batch(data)
        if step == 3:
            Path(sys.argv[1], f"rank{dist.get_rank()}").write_text(str(os.getpid()))


main()
