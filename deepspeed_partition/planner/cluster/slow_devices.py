"""The plan of a run made again, for devices that have become slow while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_partition.planner.machine_planning import in_given_order, placed_times
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.planning.problems import problem_of
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.solvers.interface import Problem


def platform_at_speeds(platform: Platform, speeds: Sequence[float]) -> Platform:
    """Return a platform of the same devices and links, where layers take longer by other factors.

    Args:
        platform: with devices alike, or one of this function.
        speeds: of each device: the number that divides the seconds of its layers.
    """
    # A port is not planned with machines: the link is the slower of the two.
    bandwidth = min(platform.bandwidth, platform.port_bandwidth or platform.bandwidth)
    machines = Machines(
        devices=tuple(
            DeviceGroup(count=1, name=f"rank {device}", memory_bytes=platform.memory_of(device), speed=speed)
            for device, speed in enumerate(speeds)
        ),
        links=(LinkLevel(bandwidth=bandwidth, latency_seconds=platform.latency_seconds),),
    )
    return replace(
        platform, machines=machines, bandwidth=bandwidth, port_bandwidth=None, devices_per_port=1, pipelines=()
    )


def plan_at_speeds(
    present: Plan,
    chain: Chain,
    speeds: Sequence[float],
    algorithm: str = "madpipe",
    *,
    recompute: str = "auto",
    time_limit_seconds: float = 10.0,
) -> tuple[Plan, float]:
    """Return the best plan at these speeds, and the seconds that a step of the present one takes at them.

    Args:
        present: has a step.
        chain: the layers that it was made for.
        speeds: as for :func:`platform_at_speeds`.
        algorithm: ``"madpipe"`` or ``"contiguous"``.
        recompute: what it may recompute.
        time_limit_seconds: of a processor.

    Raises:
        InfeasibleError: no plan fits in memory.
    """
    platform = platform_at_speeds(present.platform, speeds)
    assert present.num_micro_batches is not None
    problem = problem_of(chain, platform, present.num_micro_batches, time_limit_seconds=time_limit_seconds)
    takes = step_seconds_of(problem, present)
    plan = make_plan(
        chain,
        platform,
        algorithm,
        num_micro_batches=present.num_micro_batches,
        every_device_trains=True,
        recompute=recompute,
        time_limit_seconds=time_limit_seconds,
    )
    return plan, takes


def step_seconds_of(problem: Problem, plan: Plan) -> float:
    """Return the seconds of a step of another platform's plan, in its order, on this problem's devices and links.

    Args:
        plan: has a step, of the same layers and number of devices. Where it decides micro-batch by micro-batch, or
            has backwards in halves, its own step is taken, longer by what the device that lost most speed takes.
    """
    assert plan.step is not None
    devices = [stage.device for stage in plan.stages]
    if not plan.treats_all_alike:
        speeds = [(plan.platform.speed_of(one), problem.platform.speed_of(one)) for one in devices]
        return plan.step.step_seconds * max(1.0, *(before / now for before, now in speeds))
    order = plan.step.order
    if len(set(devices)) == len(devices):
        order = tuple(order[device] for device in devices)
    in_order_of_stages = replace(plan, step=replace(plan.step, order=order))
    cuts, blocks = tuple(plan.boundaries), tuple(stage.blocks for stage in plan.stages)
    times = placed_times(problem, cuts, devices)
    return in_given_order(problem, times, in_order_of_stages, cuts, devices, blocks).step_seconds
