"""Engines on different cuts of one model, side by side: a step of each in turn, so that noise hits all alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from platform import machine, python_version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_partition import Chain, Plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.runtime.transfers import Transfers


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
    **more: Any,
) -> deepspeed.PipelineEngine:
    """DeepSpeed's own engine on one given cut; ``more`` goes into its configuration."""
    module = GivenCut(
        layers=layers, num_stages=dist.get_world_size(), loss_fn=loss_fn, partition_method=list(boundaries)
    )
    return deepspeed.initialize(
        model=module,
        config=_config(micro_batches, micro_batch_size) | more,
        model_parameters=list(module.parameters()),
    )[0]


def engine_for_plan(
    layers: Sequence[nn.Module],
    plan: Plan,
    micro_batches: int,
    loss_fn: Callable[..., Any],
    transfers_class: type[Transfers] = Transfers,
    *,
    micro_batch_size: int = 1,
    **more: Any,
) -> deepspeed.PipelineEngine:
    """Our engine on any plan; ``more`` goes into its configuration."""
    engine_class = type("Engine", (MadPipeEngine,), {"transfers_class": transfers_class})
    module = PipelineModule(layers, num_stages=plan.platform.num_devices, plan=plan, loss_fn=loss_fn)
    parameters = list(module.parameters())
    engine = initialize_with(
        engine_class,
        model=module,
        config=_config(micro_batches, micro_batch_size) | more,
        model_parameters=parameters,
    )[0]
    return engine


def planned_by_a_run(
    layers: Sequence[nn.Module],
    micro_batches: int,
    loss_fn: Callable[..., Any],
    data: Iterator[Any],
    options: Mapping[str, Any],
    *,
    micro_batch_size: int = 1,
) -> tuple[Plan, Chain]:
    """Return the plan that a run makes after its warm-up, and the chain that it measured; on all ranks.

    Args:
        options: of madpipe; ``warmup_steps`` among them.
    """
    module = PipelineModule(layers, num_stages=dist.get_world_size(), partition_method="madpipe", loss_fn=loss_fn)
    config = _config(micro_batches, micro_batch_size) | {"pipeline": {"madpipe": dict(options)}}
    engine = initialize_with(
        MadPipeEngine, model=module, config=config, model_parameters=list(module.parameters())
    )[0]
    for _ in range(options["warmup_steps"] + 1):
        engine.train_batch(data)
    plan, chain = engine.plan, engine.chain
    engine.destroy()
    return plan, chain


def _config(micro_batches: int, micro_batch_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
    }


def step_seconds(
    engines: Mapping[str, deepspeed.PipelineEngine], data: Callable[[], Iterator[Any]], rounds: int
) -> dict[str, list[float]]:
    """Measure the seconds of each engine's steps on the slowest rank, after a round that warms up."""
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
    """Return the median over the rounds of each engine's time by that of ``to`` in the same round."""
    return {
        name: statistics.median(mine / other for mine, other in zip(each, seconds[to], strict=True))
        for name, each in seconds.items()
    }


def environment() -> dict[str, Any]:
    """Describe the machine and the versions that times were taken on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    packages = {name: version(name) for name in ("torch", "deepspeed")}
    return {
        "processor": next(names, machine()),
        "num_cores": os.cpu_count(),
        "backend": f"{dist.get_backend()}, CPU",
        "versions": {"python": python_version()} | packages,
    }
