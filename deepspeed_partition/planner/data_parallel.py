"""Splitting devices into identical pipelines that all-reduce their gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain, Platform

AUTO = "auto"


class Split(NamedTuple):
    """A way to use the devices."""

    num_pipelines: int | None
    """None: one, and nothing is said about others."""
    platform: Platform
    """Of one pipeline."""
    num_micro_batches: int | None
    """Of one pipeline, in a step."""


def splits_of(platform: Platform, num_micro_batches: int | None, data_parallel: int | str) -> list[Split]:
    """The splits to plan for.

    Args:
        platform: all devices.
        num_micro_batches: of a whole step, which the pipelines share.
        data_parallel: the number of pipelines, or ``"auto"`` for every one that divides devices and micro-batches.

    Raises:
        ValueError: not a number that divides them.
    """
    num_devices = platform.num_devices
    shared = f" and the {num_micro_batches} micro-batches of a step" if num_micro_batches is not None else ""
    possible = [
        degree
        for degree in range(1, num_devices + 1)
        if num_devices % degree == 0 and (num_micro_batches or 0) % degree == 0
    ]
    if data_parallel != AUTO:
        if isinstance(data_parallel, bool) or not isinstance(data_parallel, int) or data_parallel not in possible:
            raise ValueError(
                f"data_parallel is {data_parallel!r}: the pipelines share {num_devices} devices{shared} evenly, "
                f"so it is one of {', '.join(map(str, possible))}, or {AUTO!r}"
            )
        possible = [data_parallel]
    return [
        Split(
            degree,
            replace(platform, num_devices=num_devices // degree),
            None if num_micro_batches is None else num_micro_batches // degree,
        )
        for degree in possible
    ]


def seconds_of(plan: Plan, *, in_deepspeed: bool = False) -> float:
    """What the best split makes shortest: the step, or without one the time per micro-batch of all pipelines.

    Without a step weights are updated after every micro-batch, as in PipeDream, and a stage's all-reduce runs
    beside its computation: the slower of both sets the pace.

    Args:
        in_deepspeed: the step is that of DeepSpeed's own engine, where it can run the allocation; otherwise of an
            engine that overlaps transfers. A stage's all-reduce follows its last backward in both.
    """
    if plan.step is None:
        return max((plan.period_seconds, *plan.allreduce_seconds)) / (plan.data_parallel or 1)
    blocking = plan.step.blocking_step_seconds
    return blocking if in_deepspeed and blocking is not None else plan.step.step_seconds


def bytes_sent(plan: Plan, chain: Chain) -> float:
    """What one step sends over all links, or without a step one micro-batch.

    Tensors over the cuts, and the all-reduces of the pipelines: once per step, or without one once for a
    micro-batch in each of them.
    """
    degree = plan.data_parallel or 1
    cuts = sum(
        2 * chain.boundary_bytes(before.layers[1])
        for before, after in pairwise(plan.stages)
        if before.device != after.device
    )
    if plan.step is None:
        return cuts + allreduce_bytes(chain, degree) / degree
    return degree * plan.step.num_micro_batches * cuts + allreduce_bytes(chain, degree)


def bytes_sent_without_pipeline(chain: Chain, num_devices: int, *, per_step: bool) -> float:
    """The same for plain data parallelism, the whole chain on each of the devices."""
    return allreduce_bytes(chain, num_devices) / (1 if per_step else num_devices)


def allreduce_bytes(chain: Chain, num_copies: int) -> int:
    """What one ring all-reduce of all weights sends over all links."""
    return 2 * (num_copies - 1) * sum(layer.weight_bytes for layer in chain.layers)
