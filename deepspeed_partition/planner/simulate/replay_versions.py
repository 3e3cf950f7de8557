"""Versions of the weights for the replay (``replay.py``): how many stages hold, from the instants of operations.

``weight_versions.py`` is what the planner counts with, by the order of a device's operations; here everything is
derived a second time, from when operations begin and end, in ticks. With T the period and M micro-batches per
update, update k of a device comes when the backward of its first stage on micro-batch (k + 1) M - 1 ends, and so
every M T ticks. What lasts L ticks and begins every M T is there ceil(L / M T) times at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain


@dataclass(frozen=True, slots=True)
class HeldByStage:
    """What a stage holds of the weights at once."""

    versions: int
    """Most versions of its weights."""
    gradients: int
    """Most updates for which it has gradients."""
    behind: int
    """Number of micro-batches before one that its device is not through with when the stage begins that one."""


def held_by_stage(plan: Plan, chain: Chain, stage: int) -> HeldByStage:
    """Return what a stage of a plan whose pipeline never drains holds, where its pattern has run for long."""
    ticks, per_update = Clock.of(chain, plan.platform).ticks, plan.micro_batches_per_update
    period = max(1, ticks(plan.period_seconds))
    placed = {each.operation: each for each in plan.operations}

    def span(kind: str, number: int) -> tuple[int, int]:
        """Return when an operation runs on micro-batch 0."""
        operation = placed[f"{kind}{number}"]
        begin = operation.shift * period + ticks(operation.start_seconds)
        return begin, begin + ticks(operation.duration_seconds)

    def through(number: int) -> int:
        """Return when the device of a stage is through with micro-batch 0."""
        device = plan.stages[number].device
        return max(span("B", other)[1] for other, each in enumerate(plan.stages) if each.device == device)

    done = through(stage)
    behind = max(0, -((span("F", stage)[0] - done) // period + 1))
    # The last micro-batch that uses version 0 is M - 1 + delay, and version 0 was made behind micro-batch -1.
    if plan.weight_versions == "2bw":
        delay = per_update
    elif plan.weight_versions == "vertical-sync":
        delay = max(0, -((span("F", 0)[0] - through(0)) // period + 1))
    else:
        delay = behind
    made, next_made = done - period, done + (per_update - 1) * period
    last_use = span("B", stage)[1] + (per_update - 1 + delay) * period
    every = per_update * period
    lasts = max(last_use, next_made) - made
    summed = done + (per_update - 1) * period - span("B", stage)[0]
    return HeldByStage(
        versions=2 if plan.weight_versions == "2bw" else -(-lasts // every),
        gradients=max(1, -(-summed // every)),
        behind=behind,
    )


def version_violations(plan: Plan, chain: Chain) -> Iterator[str]:
    """Yield a sentence for each stage that begins a batch before the version that its mode wants is made."""
    if plan.weight_versions != "2bw":
        return
    per_update = plan.micro_batches_per_update
    for stage in range(len(plan.stages)):
        behind = held_by_stage(plan, chain, stage).behind
        if behind > per_update:
            yield (
                f"stage {stage} begins a micro-batch {behind} behind those that its device is through with, and "
                f"2bw has two versions of the weights, so with {per_update} micro-batches per update "
                f"{per_update} at the most: plan with 2bw and this --micro-batches, give {behind} or more, or use "
                "stashing"
            )
