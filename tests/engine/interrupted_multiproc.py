"""A pipeline that trains until it is interrupted, and says when that may be."""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import deepspeed_partition

torch.set_num_threads(1)
deepspeed_partition.install()
deepspeed.init_distributed()
torch.manual_seed(0)
engine, *_ = deepspeed.initialize(
    model=PipelineModule(
        layers=[nn.Linear(8, 8) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss,
        partition_method=[0, 2, 4],
    ),
    config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    },
)  # fmt: skip
data = iter(lambda: (torch.randn(4, 8), torch.randn(4, 8)), None)
while True:
    engine.train_batch(data)
    if engine.global_steps == 2 and engine.global_rank == 0:
        print("it may be interrupted", flush=True)
