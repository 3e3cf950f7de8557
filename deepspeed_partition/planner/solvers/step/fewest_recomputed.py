"""What the stages of a device recompute, so that given orders of a step fit into memory: in the least time.

An order says how many micro-batches each stage of a device has in flight while an operation runs. So of the rows

    base + sum over its stages of  in flight * stash(way)  +  transient(way of the stage that runs)

none may be more than the memory, where each stage has one of its ways to recompute (``recomputation.py``): a
knapsack of several dimensions. From no recomputation on, the way is changed that takes least time for each byte
that the rows are too large by; then ways are taken back, the most expensive first, as long as all rows fit.

Method: greedy, not in the papers; nothing is proved of it. What orders do not tell, tensors that wait beyond the
reserved buffers, a caller asks for as a ``margin``. Cost for v stages of a device with N ways each: O(v^2 N) for
each distinct row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.recomputation import stage_cost
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.order_program import bytes_before_backwards
from deepspeed_partition.planner.solvers.step.step_simulator import Positions, StepEngine

MOST_ROWS = 256
"""Number of distinct rows up to which those are left out that others contain."""
MOST_CHANGES = 12
"""Most changes for each stage of a device until its orders fit."""
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageWays:
    """Ways to recompute a stage: arrays of shape (N,), those of the least extra time first."""

    extra: Integers
    """Ticks by which the backward is longer."""
    stash: Integers
    running: Integers
    """Bytes beyond the stashes while a forward runs, and while a backward does; shape (2, N)."""
    blocks: tuple[Blocks, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """What a device has in flight while its operations run: each combination once."""

    in_flight: Integers
    """Micro-batches of each stage, the one that runs included, shape (R, v)."""
    runs: Integers
    """Shape (2, R, v): 1 where a forward of a stage runs, and where a backward does; else 0."""
    come: Integers
    """Shape (R, v): 1 where the gradients of a stage have come, or do in the backward that runs; else 0."""


def rows_of(engine: StepEngine, place: int, order: Positions) -> Rows:
    """Return what a device has in flight in its order."""
    positions = np.array(order)[:, None]
    stages = np.array(engine.stages_of[place])
    forward, backward = positions == stages, positions == len(engine.ticks) - 1 - stages
    begun, ended = np.cumsum(forward, axis=0), np.cumsum(backward, axis=0) - backward
    come = ended + backward > 0
    if not any(engine.late_gradients):
        come = np.zeros_like(come)
    table = np.unique(np.concatenate([begun - ended, forward, backward, come], axis=1), axis=0)
    if len(table) <= MOST_ROWS:
        contains = np.all(table[:, None, :] >= table[None, :, :], axis=2)
        np.fill_diagonal(contains, False)
        table = table[~contains.any(axis=0)]
    in_flight, *runs, came = np.split(table.astype(np.int64), 4, axis=1)
    return Rows(in_flight, np.stack(runs), came)


class FewestRecomputed:
    """Choice of what the stages of an allocation recompute.

    Args:
        problem: the problem with recomputation.
    """

    def __init__(self, problem: Problem) -> None:
        assert problem.recomputation is not None
        self.problem, self.costs = problem, problem.recomputation
        self.ways: dict[tuple[int, int], StageWays] = {}

    def choose(
        self, placement: Placement, engine: StepEngine, rows: Sequence[Rows], margin: Sequence[int]
    ) -> Placement | None:
        """Return the allocation with what its stages recompute; None where no choice is found.

        Args:
            engine: the simulator of the allocation, whatever it recomputes.
            rows: what each device has in flight.
            margin: bytes of each device that something else needs.
        """
        memory_bytes = self.problem.platform.memory_bytes
        stages = [stage for stage, _ in placement.stages]
        chosen: list[Blocks] = [()] * len(stages)
        for place, here in enumerate(engine.stages_of):
            if engine.floor[place] > memory_bytes:
                return None
            ways = [self._ways(stages[stage]) for stage in here]
            room = memory_bytes - bytes_before_backwards(engine, place) - margin[place]
            late = np.array([engine.late_gradients[stage] for stage in here], dtype=np.int64)
            numbers = _fewest(ways, rows[place], room - rows[place].come @ late)
            if numbers is None:
                return None
            for stage, way, number in zip(here, ways, numbers, strict=True):
                chosen[stage] = way.blocks[number]
        return placement.recomputing(tuple(chosen))

    def _ways(self, stage: tuple[int, int]) -> StageWays:
        if stage not in self.ways:
            problem, found = self.problem, self.costs.ways(stage)
            every = tuple(found.blocks(number) for number in range(len(found.extra)))
            costs = [stage_cost(problem.times, problem.table, stage, blocks) for blocks in every]
            running = [[each.forward_transient for each in costs], [each.transient for each in costs]]
            self.ways[stage] = StageWays(found.extra, found.stash, np.array(running, dtype=np.int64), every)
        return self.ways[stage]


def _fewest(ways: Sequence[StageWays], rows: Rows, room: Integers) -> list[int] | None:
    """Return the number of the way of each stage of a device; None where it finds none that fits.

    Args:
        room: bytes for each row, shape (R,).
    """
    numbers = [0] * len(ways)
    needs = [
        rows.in_flight[:, stage, None] * way.stash
        + (rows.runs[:, :, stage, None] * way.running[:, None, :]).sum(axis=0)
        for stage, way in enumerate(ways)
    ]
    """Bytes of each stage in each row, by its way; (R, N)."""
    over = sum((need[:, 0] for need in needs), start=-room)
    for _ in range(MOST_CHANGES * len(ways)):
        lacks = int(np.maximum(over, 0).sum())
        if not lacks:
            return _taken_back(ways, needs, over, numbers)
        best: tuple[float, int, int, int] | None = None
        for stage, (way, need) in enumerate(zip(ways, needs, strict=True)):
            now = numbers[stage]
            gains = lacks - np.maximum(over[:, None] + need - need[:, now, None], 0).sum(axis=0)
            useful = np.flatnonzero(gains > 0)
            if len(useful):
                prices = (way.extra[useful] - way.extra[now]) / gains[useful]
                number = int(useful[np.lexsort((-gains[useful], prices))[0]])
                found = float(prices.min()), -int(gains[number]), stage, number
                best = found if best is None else min(best, found)
        if best is None:
            return None
        _, _, stage, number = best
        over = over + needs[stage][:, number] - needs[stage][:, numbers[stage]]
        numbers[stage] = number
    return None


def _taken_back(
    ways: Sequence[StageWays], needs: Sequence[Integers], over: Integers, numbers: list[int]
) -> list[int]:
    """Return the ways with as little time as they can take one by one, the most expensive first."""
    for stage in sorted(range(len(ways)), key=lambda each: -int(ways[each].extra[numbers[each]])):
        way, need, now = ways[stage], needs[stage], numbers[stage]
        fits = np.all(over[:, None] + need - need[:, now, None] <= 0, axis=0)
        number = int(np.where(fits, way.extra, np.iinfo(np.int64).max).argmin())
        if way.extra[number] < way.extra[now]:
            over = over + need[:, number] - need[:, now]
            numbers[stage] = number
    return numbers
