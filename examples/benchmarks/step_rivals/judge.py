"""The judge: what an order takes, in time and memory, by the project's independent replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from deepspeed_partition import Chain, Plan, Platform
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, PlannedStage, StepPlan
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.simulate.replay import replay
from deepspeed_partition.planner.simulate.replay_memory import costs_of, peaks_of
from deepspeed_partition.planner.simulate.replay_step import run_step, step_ticks


@dataclass(frozen=True)
class Judged:
    """Seconds of a step, and the most bytes that a device needs."""

    step_seconds: float
    peak_bytes: int


def judged(plan: Plan, chain: Chain) -> Judged | None:
    """Return what the replay finds of the step of a plan, whatever it promises; None where it waits forever."""
    timeline = run_step(plan, chain)
    if isinstance(timeline, str):
        return None
    _, peaks = peaks_of(plan, chain, costs_of(plan, chain, in_step=True), timeline)
    seconds = Clock.of(chain, plan.platform).seconds(step_ticks(plan, chain, timeline))
    return Judged(seconds, max(uses[0].total for uses in peaks))


def check(plan: Plan, chain: Chain) -> Judged:
    """Replay a plan as a whole, with all that it promises.

    Raises:
        ValueError: it breaks a promise.
    """
    found = replay(plan, chain)
    if found.violations or found.step_seconds is None:
        raise ValueError("; ".join(found.violations))
    return Judged(found.step_seconds, max(use.total for use in found.memory))


def plan_of(
    chain: Chain,
    platform: Platform,
    cuts: Sequence[int],
    devices: Sequence[int],
    orders: Sequence[Sequence[tuple[str, int]]],
    num_micro_batches: int,
    *,
    recomputes: bool = False,
) -> Plan:
    """Return a plan of an order. What it promises is left open, but for a steady pattern of one at a time."""
    stages = tuple(
        PlannedStage(layers=layers, device=device, rematerialize=recomputes, in_flight=1)
        for layers, device in zip(pairwise(cuts), devices, strict=True)
    )
    operations, period = _one_at_a_time(chain, platform, stages)
    idle: list[tuple[tuple[str, int], ...]] = [()] * (platform.num_devices - len(orders))
    nothing = (MemoryUse(weights=0, stash=0, buffers=0, transient=0),) * platform.num_devices
    return Plan(
        chain=ChainReference.of(chain),
        platform=platform,
        algorithm="rival",
        period_seconds=period,
        lower_bound_seconds=period,
        gap=0.0,
        proved=False,
        stages=stages,
        operations=operations,
        memory=nothing,
        peak_memory_bytes=tuple(use.total for use in nothing),
        step=StepPlan(
            num_micro_batches=num_micro_batches,
            step_seconds=0.0,
            blocking_step_seconds=None,
            order=(*map(tuple, orders), *idle),
        ),
    )


def with_promises(plan: Plan, chain: Chain) -> Plan:
    """Return the plan with the step and the memory that its replay finds."""
    found = replay(plan, chain)
    assert plan.step is not None and found.step_seconds is not None
    return replace(
        plan,
        step=replace(plan.step, step_seconds=found.step_seconds),
        stages=tuple(
            replace(stage, in_flight=count) for stage, count in zip(plan.stages, found.in_flight, strict=True)
        ),
        memory=found.memory,
        peak_memory_bytes=tuple(use.total for use in found.memory),
    )


def _one_at_a_time(
    chain: Chain, platform: Platform, stages: Sequence[PlannedStage]
) -> tuple[tuple[PlacedOperation, ...], float]:
    """Return the pattern in which nothing runs beside anything else, and its period."""
    forward = [sum(layer.forward_seconds for layer in chain.layers[slice(*stage.layers)]) for stage in stages]
    backward = [
        sum(layer.backward_seconds for layer in chain.layers[slice(*stage.layers)])
        + (seconds if stage.rematerialize else 0.0)
        for stage, seconds in zip(stages, forward, strict=True)
    ]
    placed: list[PlacedOperation] = []
    now = 0.0

    def place(name: str, seconds: float, device: int | None, link: tuple[int, int] | None) -> None:
        nonlocal now
        placed.append(
            PlacedOperation(
                operation=name, start_seconds=now, duration_seconds=seconds, device=device, link=link, shift=0
            )
        )
        now += seconds

    def send(name: str, index: int) -> None:
        link = (stages[index].device, stages[index + 1].device)
        if link[0] != link[1]:
            place(name, platform.transfer_seconds(chain.boundary_bytes(stages[index].layers[1])), None, link)

    last = len(stages) - 1
    for index, stage in enumerate(stages):
        place(f"F{index}", forward[index], stage.device, None)
        if index < last:
            send(f"SF{index}", index)
    for index in range(last, -1, -1):
        place(f"B{index}", backward[index], stages[index].device, None)
        if index:
            send(f"SB{index - 1}", index - 1)
    return tuple(placed), now
