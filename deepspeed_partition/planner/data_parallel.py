"""Division of the devices into identical pipelines that all-reduce their gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from deepspeed_partition.planner.machines import pipelines_of
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain, Platform

AUTO = "auto"
NEVER_SHARED = 2
"""Copies of the weights that every pipeline keeps for itself, under ZeRO-1 too: the weights and their
gradients."""


class Split(NamedTuple):
    """A way to divide the devices into pipelines."""

    num_pipelines: int | None
    """Number of pipelines. None: one, and the plan says nothing about others."""
    platform: Platform
    """Platform of one pipeline; its ``weight_copies`` is what one pipeline keeps itself."""
    num_micro_batches: int | None
    """Micro-batches of one pipeline in a step; None: no step is planned."""


def weight_copies_of(weight_copies: float, num_pipelines: int, zero_stage: int | None) -> float:
    """Return the copies of its weights that one of several pipelines keeps.

    Under ZeRO-1 the pipelines share the optimizer's states, and the master copy of mixed precision: all but the
    weights and their gradients. With Adam in fp32 that is 2 of 4 copies, in mixed precision 6 of 8.
    """
    if zero_stage != 1 or weight_copies <= NEVER_SHARED:
        return weight_copies
    return NEVER_SHARED + (weight_copies - NEVER_SHARED) / num_pipelines


def check_zero_stage(zero_stage: object) -> None:
    """Refuse a ZeRO stage that a pipeline cannot have.

    Raises:
        ValueError: the stage is not None, 0 or 1.
    """
    if zero_stage is not None and (
        isinstance(zero_stage, bool) or not isinstance(zero_stage, int) or zero_stage not in (0, 1)
    ):
        raise ValueError(
            f"zero_stage is {zero_stage!r}: it must be 0 or 1; stages 2 and 3 divide gradients and weights, which "
            "does not work with a pipeline"
        )


def splits_of(
    platform: Platform,
    num_micro_batches: int | None,
    data_parallel: int | str,
    zero_stage: int | None = None,
) -> list[Split]:
    """Return the splits to plan for.

    Args:
        platform: the platform with all devices.
        num_micro_batches: micro-batches of a whole step, which the pipelines share.
        data_parallel: the number of pipelines, or ``"auto"`` for every one that divides devices and
            micro-batches.
        zero_stage: under 1 what ZeRO-1 shares among the pipelines counts once per number of them.

    Raises:
        ValueError: ``data_parallel`` does not divide the devices and the micro-batches.
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
            replace(
                platform,
                num_devices=num_devices // degree,
                weight_copies=weight_copies_of(platform.weight_copies, degree, zero_stage),
                pipelines=pipelines,
            ),
            None if num_micro_batches is None else num_micro_batches // degree,
        )
        for degree in possible
        for pipelines in (pipelines_of(num_devices, degree) if platform.machines is not None else ((),))
    ]


def seconds_of(plan: Plan, *, in_deepspeed: bool = False) -> float:
    """Return the seconds that the best split minimizes: the step, or the time per micro-batch of all pipelines.

    Without a step, weights are updated after every micro-batch, as in PipeDream, or where the pipeline never
    drains after those of an update, and a stage's all-reduce runs beside its computation: the slower of both sets
    the pace.

    Args:
        in_deepspeed: take the step of DeepSpeed's own engine, where it can run the allocation; otherwise that of
            an engine that overlaps transfers. In both, a stage's all-reduce follows its last backward.
    """
    if plan.step is None:
        reductions = (seconds / plan.micro_batches_per_update for seconds in plan.allreduce_seconds)
        return max((plan.period_seconds, *reductions)) / (plan.data_parallel or 1)
    blocking = plan.step.blocking_step_seconds
    return blocking if in_deepspeed and blocking is not None else plan.step.step_seconds


def bytes_sent(plan: Plan, chain: Chain) -> float:
    """Return the bytes that one step sends over all links, or without a step one micro-batch.

    They are the tensors over the boundaries, and the all-reduces of the pipelines: once per step, or without one
    once for a micro-batch in each pipeline.
    """
    degree = plan.data_parallel or 1
    over_boundaries = sum(
        2 * chain.boundary_bytes(before.layers[1])
        for before, after in pairwise(plan.stages)
        if before.device != after.device
    )
    if plan.step is None:
        return over_boundaries + allreduce_bytes(chain, degree) / degree / plan.micro_batches_per_update
    return degree * plan.step.num_micro_batches * over_boundaries + allreduce_bytes(chain, degree)


def bytes_sent_without_pipeline(chain: Chain, num_devices: int, *, per_step: bool) -> float:
    """Return the bytes that plain data parallelism sends, per step or per micro-batch."""
    return allreduce_bytes(chain, num_devices) / (1 if per_step else num_devices)


def allreduce_bytes(chain: Chain, num_copies: int) -> int:
    """Return the bytes that one ring all-reduce of all weights sends over all links."""
    return 2 * (num_copies - 1) * sum(layer.weight_bytes for layer in chain.layers)
