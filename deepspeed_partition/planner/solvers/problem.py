"""What every solver is given and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.step import blocking_step

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.road import Pattern, Placement

Cuts = tuple[int, ...]
"""Boundaries: where stages begin, and the number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Which cuts are allowed, besides fitting into memory."""

    max_stages: int
    exactly: bool = False
    """Exactly ``max_stages`` stages, as an engine with one stage per rank needs; otherwise at most."""
    every_stage_trains: bool = False
    """No stage without trainable parameters: an optimizer has nothing to do there."""
    every_device_trains: bool = False
    """No device without them, on which there may be several stages. Of contiguous cuts it asks the two above."""

    @property
    def fewest_stages(self) -> int:
        """Of a contiguous cut."""
        return self.max_stages if self.exactly or self.every_device_trains else 1

    @property
    def any_allocation(self) -> bool:
        """Whether nothing is asked for."""
        return not (self.exactly or self.every_stage_trains or self.every_device_trains)

    def allowed(self, table: StageTable) -> NDArray[np.bool_]:
        """[k, l]: whether layers k to l may be a stage of a contiguous cut."""
        return table.trains if self.every_stage_trains or self.every_device_trains else table.is_stage

    def counts(self, num_layers: int) -> range:
        """The numbers of stages to consider."""
        return range(self.fewest_stages, min(self.max_stages, num_layers) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A chain, a platform, and what the host needs."""

    chain: Chain
    platform: Platform
    constraints: Constraints
    times: TimedChain
    table: StageTable
    num_micro_batches: int | None = None
    """Of one synchronous step; None: the pipeline never drains."""
    in_deepspeed: bool = False
    """That step is for DeepSpeed's own engine: one stage per rank, 1F1B of fixed depth, transfers that block."""
    deadline: Deadline = field(default_factory=Deadline)
    """Of searches that prove nothing, which then return the best they have."""
    flushes: tuple[int, ...] | None = None
    """Micro-batches of each batch of the step, where the last stage begins no backward of a batch before all of
    its forwards are done, because the loss is computed once on all of its outputs."""
    num_pipelines: int | None = None
    """Among which gradients are all-reduced; None where that is not planned."""
    zero_stage: int | None = None
    """Of these; ``platform.weight_copies`` is what one of them keeps under it."""
    is_one_of_many: bool = False
    """Whether others are planned as well, so that nobody asks why this one has no plan, or what would do."""

    def with_memory(self, memory_bytes: int) -> Problem:
        """The same on devices of another size."""
        platform = replace(self.platform, memory_bytes=memory_bytes)
        return replace(self, platform=platform, table=self.table.with_memory(memory_bytes))

    def allreduce_seconds(self, cuts: Cuts) -> list[float]:
        """Of each stage."""
        prefix = [0, *accumulate(layer.weight_bytes for layer in self.chain.layers)]
        return [
            self.platform.allreduce_seconds(prefix[stop] - prefix[start], self.num_pipelines or 1)
            for start, stop in pairwise(cuts)
        ]

    def blocking_step(self, cuts: Cuts, num_micro_batches: int) -> int:
        """Ticks of a step in DeepSpeed's engine, all-reduces included."""
        allreduce = [self.times.clock.ticks(seconds) for seconds in self.allreduce_seconds(cuts)]
        return blocking_step(self.times, cuts, num_micro_batches, allreduce)

    def allows(self, placement: Placement) -> bool:
        """Whether every device trains something, where that is asked for."""
        training = {
            device
            for stage, device in zip(pairwise(placement.cuts), placement.devices, strict=True)
            if self.table.trains[stage]
        }
        return not self.constraints.every_device_trains or len(training) == self.platform.num_devices

    @property
    def fewest_in_flight(self) -> int:
        """Micro-batches that every stage has in flight at some instant of a step, whatever its order."""
        return max(self.flushes) if self.flushes else 1

    @property
    def longest_period(self) -> int:
        """Ticks of one micro-batch through everything and over every cut: a period that suits any allocation."""
        return int(self.times.compute[-1] + self.times.round_trip.sum())

    def depth(self, from_end: int) -> int:
        """Micro-batches that the ``from_end``-th stage from the end must be able to hold at the least.

        One, since some period, or some order of a step, always allows that; in DeepSpeed's own engine the depth of
        its ``TrainSchedule``.
        """
        return self.deepspeed_depth(from_end) if self.in_deepspeed else 1

    def deepspeed_depth(self, from_end: int) -> int:
        """Micro-batches that the ``from_end``-th stage from the end holds in DeepSpeed's ``TrainSchedule``."""
        return from_end if self.num_micro_batches is None else min(from_end, self.num_micro_batches)


def stage_bytes(problem: Problem, cuts: Cuts, in_flight: Sequence[int]) -> list[int]:
    """What each stage needs with so many micro-batches in flight."""
    table = problem.table
    return [
        int(table.fixed[stage]) + count * int(table.stash[stage])
        for stage, count in zip(pairwise(cuts), in_flight, strict=True)
    ]


def bytes_needed(problem: Problem, cuts: Cuts) -> list[int]:
    """Of each stage at ``problem.depth``: what it needs to be part of any plan."""
    return stage_bytes(problem, cuts, [problem.depth(from_end) for from_end in range(len(cuts) - 1, 0, -1)])


def fits(problem: Problem, cuts: Cuts) -> bool:
    """Whether every stage of the cut is allowed and has room at ``problem.depth``."""
    allowed = problem.constraints.allowed(problem.table)
    return all(allowed[stage] for stage in pairwise(cuts)) and (
        max(bytes_needed(problem, cuts)) <= problem.platform.memory_bytes
    )


@dataclass(frozen=True, slots=True)
class Step:
    """An allocation and what each of its devices does in one synchronous step."""

    steady: Cuts | Pattern
    """The same allocation's steady pattern; that of a contiguous cut is 1F1B*."""
    orders: tuple[Order, ...]
    ticks: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found, best first, and what is proved of the first."""

    cuts: tuple[Cuts, ...]
    """Contiguous, for 1F1B*. More than one where the next may have to stand in for the first."""
    best_period: int | None = None
    """In ticks: nothing in ``proved_class`` has a shorter period. None: nothing is proved."""
    patterns: tuple[Pattern, ...] = ()
    """Of allocations that are not contiguous; better than ``cuts``. With both empty nothing fits."""
    proved_class: str = "contiguous"
    steps: tuple[Step, ...] = ()
    """Where a step was asked for, and not for DeepSpeed's engine: better than a fixed order of ``cuts``."""
    class_bound: int | None = None
    """In ticks: no allocation with at most one special device has a shorter period. None: not looked for."""


class Solver(Protocol):
    """Finds cuts. It touches nothing else: no printing, no files."""

    @property
    def name(self) -> str: ...

    def solve(self, problem: Problem) -> Answer:
        """Cuts that fit, none where none does.

        Raises:
            ValueError: the solver's own arguments do not suit the problem.
            InfeasibleError: none fits, for a reason that only the solver knows.
        """

    def smallest_memory(self, problem: Problem) -> tuple[Cuts | Placement, int] | None:
        """The allocation that needs least memory, and the bytes of its largest device; None where none may be."""
