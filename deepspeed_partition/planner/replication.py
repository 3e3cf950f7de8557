"""PipeDream's partitioner where it may replicate stages: a plan where its result is one, else a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.infeasible import out_of_time
from deepspeed_partition.planner.memory import stage_memory
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.make_plan import make_plan
from deepspeed_partition.planner.planning.problems import problem_of, time_limit
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.solvers.contiguous.deepspeed_partitions import FixedPartition
from deepspeed_partition.planner.solvers.contiguous.replicated import (
    MOST_REPLICAS,
    REPLICATED,
    Level,
    ReplicatedPipeline,
    ReplicatedStage,
    pipedream_replicated,
)
from deepspeed_partition.planner.units import exact_bytes, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """Pipeline whose stages may have different numbers of replicas; no plan file can hold it."""

    chain: Chain
    platform: Platform
    levels: tuple[Level, ...]
    """Levels of the hierarchy, from the devices of one machine upwards."""
    pipeline: ReplicatedPipeline

    def on_devices(self) -> Iterator[tuple[int, int, int]]:
        """Yield for each stage on single devices its first layer, its end (half-open), and its devices' number."""
        yield from _leaves(self.pipeline.stages, 1)

    @property
    def fewest_bytes(self) -> list[int]:
        """Return the bytes that one device of each stage needs with one micro-batch in flight."""
        return [
            stage_memory(self.chain, self.platform, start, stop, 1).total for start, stop, _ in self.on_devices()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the pipeline as plain data, in seconds and bytes."""
        return {
            "algorithm": REPLICATED,
            "chain": {
                "name": self.chain.name, "num_layers": self.chain.num_layers, "digest": self.chain.digest(),
            },
            "platform": self.platform.to_dict(),
            "levels": [{"num_workers": level.num_workers, "bandwidth": level.bandwidth} for level in self.levels],
            "period_seconds": self.pipeline.period_seconds,
            "bytes_sent": self.pipeline.bytes_per_micro_batch,
            "num_in_flight": self.pipeline.num_in_flight,
            "stages": [_stage(stage) for stage in self.pipeline.stages],
            "fewest_memory_bytes": self.fewest_bytes,
        }  # fmt: skip


def partition_replicated(
    chain: Chain,
    platform: Platform,
    num_machines: int = 1,
    machine_bandwidth: float = 0.0,
    deadline: Deadline | None = None,
) -> Replicated:
    """Run PipeDream's partitioner on ``num_machines`` equal machines that share the devices.

    Args:
        machine_bandwidth: bytes per second between two machines, if there are several. Within a machine it is
            that of the platform.

    Raises:
        ValueError: the machines do not divide the devices, or there are more than ``MOST_REPLICAS`` devices.
        DeadlinePassed: the deadline passes first; there is no answer before everything is looked at.
    """
    problem_of(chain, platform)  # raises where the chain cannot be planned for
    num_devices = platform.num_devices
    if num_devices > MOST_REPLICAS:
        raise ValueError(f"{REPLICATED} is asked for {MOST_REPLICAS} devices at most, not {num_devices}")
    if num_devices % num_machines:
        raise ValueError(f"{num_machines} machines do not share {num_devices} devices evenly")
    levels = [Level(num_workers=num_devices // num_machines, bandwidth=platform.bandwidth)]
    if num_machines > 1:
        levels.append(Level(num_workers=num_machines, bandwidth=machine_bandwidth))
    pipeline = pipedream_replicated(chain, levels, deadline)
    return Replicated(chain=chain, platform=platform, levels=tuple(levels), pipeline=pipeline)


def plan_replicated(
    chain: Chain,
    platform: Platform,
    num_machines: int = 1,
    machine_bandwidth: float = 0.0,
    *,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Plan | Replicated:
    """Return PipeDream's pipeline: a plan where each stage has D replicas and all links are alike.

    The period of such a plan is that of 1F1B* in the memory that there is. Otherwise the answer is a
    ``Replicated``, whose period is PipeDream's own count: it has no waiting times, and memory is checked for one
    micro-batch in flight.

    Raises:
        InfeasibleError: a stage has no room for one micro-batch, or the time was up.
        ValueError: as ``partition_replicated``; or the answer is no plan and links have a latency.
    """
    deadline = Deadline(time_limit(time_limit_seconds), within=deadline)
    try:
        found = partition_replicated(chain, platform, num_machines, machine_bandwidth, deadline)
    except DeadlinePassed:
        raise out_of_time(REPLICATED) from None
    counts = {stage.num_replicas for stage in found.pipeline.stages}
    if len(found.levels) == 1 and len(counts) == 1:
        cuts = (0, *(stage.layers[1] for stage in found.pipeline.stages))
        straight = FixedPartition(REPLICATED, lambda chain, stages: cuts)
        return make_plan(chain, platform, straight, data_parallel=counts.pop(), deadline=deadline)
    if platform.latency_seconds:
        raise ValueError(
            f"latency_seconds is {platform.latency_seconds:g}, and {REPLICATED} counts bytes alone where stages "
            "have unlike numbers of replicas, or machines are several: leave it out, or use another algorithm"
        )
    needs, memory = found.fewest_bytes, platform.memory_bytes
    largest = max(needs)
    if largest > memory:
        start, stop, _ = list(found.on_devices())[needs.index(largest)]
        raise InfeasibleError(
            f"no plan fits into {format_bytes(memory)} per device: layers {start} to {stop}, a stage of "
            f"{REPLICATED}, need {format_bytes(largest)}, {exact_bytes(largest - memory)} more than there are; "
            f"the smallest memory that would do is {exact_bytes(largest)}: give more memory, or another algorithm",
            stage=needs.index(largest),
            short_bytes=largest - memory,
            smallest_memory_bytes=largest,
        )
    return found


def _leaves(stages: tuple[ReplicatedStage, ...], copies: int) -> Iterator[tuple[int, int, int]]:
    for stage in stages:
        if stage.inside:
            yield from _leaves(stage.inside, copies * stage.num_replicas)
        else:
            yield *stage.layers, copies * stage.num_replicas


def _stage(stage: ReplicatedStage) -> dict[str, Any]:
    inside = {"inside": [_stage(each) for each in stage.inside]} if stage.inside else {}
    return {"layers": list(stage.layers), "replicas": stage.num_replicas, **inside}
