"""Renumbering of the devices of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from deepspeed_partition.planner.plan import Plan

T = TypeVar("T")


def renumbered(plan: Plan, order: Sequence[int]) -> Plan:
    """Return ``plan`` with device ``order[0]`` as the new device 0, and so on; all devices are alike.

    Raises:
        ValueError: ``order`` does not name each device once.
    """
    if sorted(order) != list(range(plan.platform.num_devices)):
        raise ValueError(f"{list(order)} does not name each of {plan.platform.num_devices} devices once")
    number = {old: new for new, old in enumerate(order)}

    def in_order(values: Sequence[T]) -> tuple[T, ...]:
        return tuple(values[old] for old in order)

    return replace(
        plan,
        stages=tuple(replace(stage, device=number[stage.device]) for stage in plan.stages),
        operations=tuple(
            replace(
                each,
                device=None if each.device is None else number[each.device],
                link=None if each.link is None else (number[each.link[0]], number[each.link[1]]),
            )
            for each in plan.operations
        ),
        memory=in_order(plan.memory),
        peak_memory_bytes=in_order(plan.peak_memory_bytes),
        step=None if plan.step is None else replace(plan.step, order=in_order(plan.step.order)),
    )
