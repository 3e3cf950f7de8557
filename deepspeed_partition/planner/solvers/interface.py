"""Problem and answer: what every solver is given and returns. It searches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import Recomputation, StageCost, stage_cost
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.step import blocking_step
from deepspeed_partition.planner.weight_versions import VersionRule

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern

Cuts = tuple[int, ...]
"""Boundaries of stages: the first layer of each stage, and the number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Allowed partitions, besides fitting into memory."""

    max_stages: int
    exactly: bool = False
    """True: exactly ``max_stages`` stages, as an engine with one stage per rank needs; False: at most so many."""
    every_stage_trains: bool = False
    """True: no stage without trainable parameters, since an optimizer has nothing to do there."""
    every_device_trains: bool = False
    """True: no device without trainable parameters; it may have several stages. For contiguous partitions the two
    options above must be set, too."""

    @property
    def fewest_stages(self) -> int:
        """Return the fewest stages of a contiguous partition."""
        return self.max_stages if self.exactly or self.every_device_trains else 1

    @property
    def any_allocation(self) -> bool:
        """Return whether no constraint is set."""
        return not (self.exactly or self.every_stage_trains or self.every_device_trains)

    def allowed(self, table: StageTable) -> NDArray[np.bool_]:
        """Return, as entry [k, l], whether layers k to l may be a stage of a contiguous partition."""
        return table.trains if self.every_stage_trains or self.every_device_trains else table.is_stage

    def counts(self, num_layers: int) -> range:
        """Return the numbers of stages to consider."""
        return range(self.fewest_stages, min(self.max_stages, num_layers) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Problem of a solver: a chain, a platform, and what the host needs."""

    chain: Chain
    platform: Platform
    constraints: Constraints
    times: TimedChain
    table: StageTable
    num_micro_batches: int | None = None
    """Micro-batches of one synchronous step. None: no step is planned, and the pipeline never drains."""
    in_deepspeed: bool = False
    """True: the step is for DeepSpeed's own engine, with one stage per rank, 1F1B of fixed depth, and transfers
    that block."""
    deadline: Deadline = field(default_factory=Deadline)
    """Deadline of searches that prove nothing; they then return the best answer so far."""
    flushes: tuple[int, ...] | None = None
    """Micro-batches of each batch of the step, where the loss is computed once on all outputs of a batch: the
    last stage then begins no backward of a batch before all of its forwards are done. None: no flush."""
    num_pipelines: int | None = None
    """Number of pipelines that all-reduce their gradients; None where that is not planned."""
    zero_stage: int | None = None
    """ZeRO stage of these pipelines; ``platform.weight_copies`` is what one of them keeps under it."""
    recomputation: Recomputation | None = None
    """Ways to recompute a stage, of which a plan may take one for each. None: nothing is recomputed. ``table`` and
    ``times`` are without it."""
    per_micro_batch: bool = False
    """True: a plan may treat micro-batches differently."""
    splits_backward: bool = False
    """True: a backward may be two operations, the gradient of the input and the gradients of the weights."""
    versions: VersionRule | None = None
    """How the versions of the weights count, where the pipeline never drains; ``table`` counts so. None: it drains
    before each update."""
    is_one_of_many: bool = False
    """True: others are planned as well, so nobody asks why this one has no plan, or what would help."""

    def with_memory(self, memory_bytes: int) -> Problem:
        """Return the problem on devices with ``memory_bytes``."""
        platform = replace(self.platform, memory_bytes=memory_bytes)
        return replace(self, platform=platform, table=self.table.with_memory(memory_bytes))

    def stage_costs(self, placement: Placement) -> list[StageCost]:
        """Return the cost of each stage of an allocation, with the recomputation that is chosen in it."""
        stages = zip(pairwise(placement.cuts), placement.blocks, strict=True)
        return [stage_cost(self.times, self.table, stage, blocks) for stage, blocks in stages]

    def allreduce_seconds(self, cuts: Cuts) -> list[float]:
        """Return the seconds in which the gradients of each stage are all-reduced."""
        prefix = [0, *accumulate(layer.weight_bytes for layer in self.chain.layers)]
        return [
            self.platform.allreduce_seconds(prefix[stop] - prefix[start], self.num_pipelines or 1)
            for start, stop in pairwise(cuts)
        ]

    def blocking_step(self, cuts: Cuts, num_micro_batches: int) -> int:
        """Return the ticks of a step in DeepSpeed's engine, all-reduces included."""
        allreduce = [self.times.clock.ticks(seconds) for seconds in self.allreduce_seconds(cuts)]
        return blocking_step(self.times, cuts, num_micro_batches, allreduce)

    def allows(self, placement: Placement) -> bool:
        """Return whether every device trains something, where that is required."""
        training = {device for stage, device in placement.stages if self.table.trains[stage]}
        return not self.constraints.every_device_trains or len(training) == self.platform.num_devices

    @property
    def fewest_in_flight(self) -> int:
        """Number of micro-batches that every stage has in flight at some instant of a step, whatever its order."""
        return max(self.flushes) if self.flushes else 1

    @property
    def longest_period(self) -> int:
        """Ticks of one micro-batch through the whole chain: a period that suits any allocation."""
        return int(self.times.compute[-1] + self.times.round_trip.sum())

    def depth(self, from_end: int) -> int:
        """Return the micro-batches that the ``from_end``-th stage from the end must be able to hold at least.

        It is 1, since some period, or some order of a step, always allows that; in DeepSpeed's own engine it is
        the depth of its ``TrainSchedule``.
        """
        return self.deepspeed_depth(from_end) if self.in_deepspeed else 1

    def deepspeed_depth(self, from_end: int) -> int:
        """Return how many micro-batches this stage, counted from the end, holds in DeepSpeed's schedule."""
        return from_end if self.num_micro_batches is None else min(from_end, self.num_micro_batches)


def stage_bytes(problem: Problem, cuts: Cuts, in_flight: Sequence[int]) -> list[int]:
    """Return the bytes that each stage needs at least with ``in_flight[stage]`` micro-batches in flight."""
    return [_least_bytes(problem, stage, count) for stage, count in zip(pairwise(cuts), in_flight, strict=True)]


def _least_bytes(problem: Problem, stage: tuple[int, int], in_flight: int) -> int:
    """Return the bytes that a stage needs, with the recomputation with which it needs least."""
    table = problem.table
    versions = int(table.further_versions(in_flight, stage))
    needs = int(table.fixed[stage]) + in_flight * int(table.stash[stage])
    if problem.recomputation is not None:
        ways = problem.recomputation.ways(stage)
        others = int(table.fixed[stage]) - int(table.transient[stage])
        transient = table.with_update(ways.transient, stage)
        needs = others + int((in_flight * ways.stash + transient).min())
    return max(needs + versions, int(table.floor[stage]))


def bytes_needed(problem: Problem, cuts: Cuts) -> list[int]:
    """Return the bytes that each stage needs at ``problem.depth``, to be part of any plan."""
    return stage_bytes(problem, cuts, [problem.depth(from_end) for from_end in range(len(cuts) - 1, 0, -1)])


def fits(problem: Problem, cuts: Cuts) -> bool:
    """Return whether every stage of the partition is allowed and has room at ``problem.depth``."""
    allowed = problem.constraints.allowed(problem.table)
    return all(allowed[stage] for stage in pairwise(cuts)) and (
        max(bytes_needed(problem, cuts)) <= problem.platform.memory_bytes
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Allocation, and what each of its devices does in one synchronous step."""

    steady: Cuts | Pattern
    """Pattern of the same allocation in steady state; a contiguous partition stands for its 1F1B* pattern."""
    orders: tuple[Order, ...]
    ticks: int
    recomputed: tuple[Blocks, ...] = ()
    """Layers that are recomputed, for each stage of a contiguous partition; empty where none is."""
    bound: int = 0
    """Ticks; a search that proves something has found that no step is shorter."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a solver: what was found, the best first, and what is proved of the first."""

    cuts: tuple[Cuts, ...]
    """Contiguous partitions, for 1F1B*. There are several where the next may have to replace the first."""
    best_period: int | None = None
    """Period in ticks: nothing in ``proved_class`` has a shorter one. None: nothing is proved."""
    patterns: tuple[Pattern, ...] = ()
    """Patterns of allocations that are not contiguous; better than ``cuts``. With both empty nothing fits."""
    proved_class: str = "contiguous"
    steps: tuple[Step, ...] = ()
    """Steps, where one was asked for, and not for DeepSpeed's engine; better than a fixed order of ``cuts``."""
    other_steps: tuple[Step, ...] = ()
    """Steps that fit, too, one of which may take less than the first of ``steps`` where messages share ports."""
    step_search: Literal["contiguous", "any"] | None = None
    """The allocations among which a shorter step is to be looked for, from this answer on; None: nowhere."""
    starts: tuple[Plan, ...] = ()
    """Saved plans whose steps are tried, too, where a step is looked for."""
    class_bound: int | None = None
    """Period in ticks: no allocation with at most one special device has a shorter one. None: not looked for."""


class Solver(Protocol):
    """Interface of a solver: it finds allocations and touches nothing else, no output and no files."""

    @property
    def name(self) -> str: ...

    def solve(self, problem: Problem) -> Answer:
        """Return allocations that fit; an empty answer where none does.

        Raises:
            ValueError: the solver's own arguments do not suit the problem.
            InfeasibleError: none fits, for a reason that only the solver knows.
        """

    def smallest_memory(self, problem: Problem) -> tuple[Cuts | Placement, int] | None:
        """Return the allocation that needs least memory, and its largest device's bytes; None if there is none."""
