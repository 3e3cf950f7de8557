"""One layer per stage, all alike, on DeepSpeed's engine and on ours at two depths: what does overlap gain?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from emulation import sleeping_layers
from interleaved import engine_for, engine_for_plan, ratios, step_seconds
from simulated import simulated_step

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.planner.step import one_f_one_b_order

FORWARD_SECONDS = 0.02
MICRO_BATCHES_PER_STAGE = 4


def even_chain(num_layers: int, numbers: int) -> Chain:
    """A chain whose activations have so many numbers."""
    layer = LayerProfile(
        name="sleeping", forward_seconds=FORWARD_SECONDS, backward_seconds=2 * FORWARD_SECONDS, weight_bytes=4,
        output_bytes=4 * numbers, num_trainable_parameters=1,
    )  # fmt: skip
    return Chain(name="even", input_bytes=4 * numbers, layers=(layer,) * num_layers)


def plans_for(chain: Chain, platform: Platform) -> dict[str, Plan]:
    """Make two plans: ``same depth`` has DeepSpeed's order, ``deep`` about twice as many in flight."""
    num_stages = platform.num_devices
    num_micro_batches = MICRO_BATCHES_PER_STAGE * num_stages
    plan = make_plan(chain, platform, list(range(num_stages + 1)), num_micro_batches=num_micro_batches)
    depths = {
        "same depth": [num_stages - stage for stage in range(num_stages)],
        "deep": [2 * (num_stages - stage) - 1 for stage in range(num_stages)],
    }
    return {name: _of_depths(plan, chain, each) for name, each in depths.items()}


def _of_depths(plan: Plan, chain: Chain, depths: list[int]) -> Plan:
    """Change a plan to 1F1B with so many micro-batches in flight on each stage."""
    assert plan.step is not None
    number = plan.step.num_micro_batches
    step = replace(
        plan.step,
        order=tuple(one_f_one_b_order(stage, depth, number) for stage, depth in enumerate(depths)),
    )
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    changed = replace(plan, step=step, stages=stages)
    return replace(changed, step=replace(step, step_seconds=simulated_step(changed, chain, number).step_seconds))


def loss(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def engines_for(chain: Chain, plans: Mapping[str, Plan], transfers_class: type[Transfers]) -> dict[str, Any]:
    """DeepSpeed's engine and ours under each plan."""
    some = next(iter(plans.values()))
    number = MICRO_BATCHES_PER_STAGE * len(some.stages)
    ours = {
        name: engine_for_plan(sleeping_layers(chain), plan, number, loss, transfers_class)
        for name, plan in plans.items()
    }
    return {"DeepSpeed": engine_for(sleeping_layers(chain), some.boundaries, number, 1, loss), **ours}


def measured(engines: Mapping[str, Any], numbers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return each engine's median of its steps, and how many times as long DeepSpeed's take."""
    micro_batch = (torch.zeros(1, numbers), torch.zeros(1))
    seconds = step_seconds(engines, lambda: repeat(micro_batch), rounds)
    gains = ratios(seconds, to="DeepSpeed")
    return {
        name: {"seconds": statistics.median(each), "deepspeed_takes": 1 / gains[name]}
        for name, each in seconds.items()
    }
