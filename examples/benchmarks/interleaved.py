"""Engines on different cuts of one model, side by side: a step of each in turn, so that noise hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_partition.engine  # noqa: F401  prepares DeepSpeed for a CPU


class GivenCut(deepspeed.PipelineModule):
    """DeepSpeed's module at boundaries that it would not choose: its own engine runs it."""

    def _partition_layers(self, method: Sequence[int] = ()) -> None:
        self.parts = list(method)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def engine_for(
    layers: Sequence[nn.Module],
    boundaries: Sequence[int],
    micro_batches: int,
    micro_batch_size: int,
    loss_fn: Callable[..., Any],
) -> deepspeed.PipelineEngine:
    """DeepSpeed's own engine on one given cut."""
    module = GivenCut(
        layers=layers, num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method=list(boundaries)
    )
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    }
    return deepspeed.initialize(model=module, config=config, model_parameters=list(module.parameters()))[0]


def step_seconds(
    engines: Mapping[str, deepspeed.PipelineEngine], data: Callable[[], Iterator[Any]], rounds: int
) -> dict[str, list[float]]:
    """Of each engine, after a round that warms up; on every rank the time until its own step ended."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for round_ in range(rounds + 1):
        for name, engine in engines.items():
            dist.barrier()
            started = time.perf_counter()
            engine.train_batch(data())
            lasted = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
            dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
            if round_:
                seconds[name].append(float(lasted))
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], to: str) -> dict[str, float]:
    """Median over the rounds of each engine's time by that of ``to`` in the same round."""
    return {
        name: statistics.median(mine / other for mine, other in zip(each, seconds[to], strict=True))
        for name, each in seconds.items()
    }
