"""Steps of many partitions at once whose stages recompute some of their layers (see ``many_cuts.py``).

Each stage of each partition has the number of one of its ways to recompute it, those of the least extra time first
(``recomputation.py``). A way makes the backward longer and the stash smaller; what a device holds is told by what
its order has in flight while each of its operations runs (``fewest_recomputed.py``).

Method: own. Cost: that of ``many_cuts.py``, and O(R S) on vectors for R distinct combinations in flight.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.recomputation import stage_cost
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.fewest_recomputed import rows_of
from deepspeed_partition.planner.solvers.step.many_cuts import Integers, ManyCuts
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, StepRun

MOST_WAYS = 12
"""Most ways of a stage that are looked at, those of the least and of the most extra time among them."""
SHARE_OF_WAYS = 0.5
"""Share of moves that change what stages recompute, and no boundary."""
ALONG, CHANGES = 0.3, (0.7, 0.5)
"""Share of the other moves that change it, too, and chances with which a first and a second stage changes."""
_EXTRA, _STASH, _FORTH, _BACK = range(4)
"""Columns of what a way takes: extra ticks, bytes for each micro-batch, and bytes while either operation runs."""


class WaysOfStages:
    """What the ways of stages take, as arrays; each stage is looked at where it is met first.

    Args:
        problem: with recomputation.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, num_layers = problem, problem.chain.num_layers
        self.row = np.full((num_layers, num_layers + 1), -1, dtype=np.int64)
        """Number of each stage among those that were met; -1: not yet."""
        self.count = np.zeros(64, dtype=np.int64)
        """Number of ways of each stage that was met."""
        self.takes = np.zeros((64, MOST_WAYS, 4), dtype=np.int64)
        self.blocks: list[tuple[Blocks, ...]] = []

    @property
    def num_met(self) -> int:
        """Number of stages that were met."""
        return len(self.blocks)

    def rows(self, cuts: Integers) -> Integers:
        """Return the number of each stage; cuts: (K, S + 1), rising."""
        found = self.row[cuts[:, :-1], cuts[:, 1:]]
        if (found < 0).any():
            for start, stop in np.unique(
                np.stack([cuts[:, :-1][found < 0], cuts[:, 1:][found < 0]], axis=1), axis=0
            ).tolist():
                self._meet(start, stop)
            found = self.row[cuts[:, :-1], cuts[:, 1:]]
        return found

    def num_ways(self, cuts: Integers) -> Integers:
        """Return the number of ways of each stage; cuts: (K, S + 1), rising."""
        rows = self.rows(cuts)
        counts: Integers = self.count[rows]
        return counts

    def blocks_of(self, stage: tuple[int, int]) -> tuple[Blocks, ...]:
        """Return what the ways of a stage recompute, that of the least extra time first."""
        row = int(self.rows(np.array([stage]))[0, 0])
        return self.blocks[row]

    def number(self, stage: tuple[int, int], blocks: Blocks) -> int:
        """Return the way with these blocks; else one that takes as long, or a little longer."""
        every = self.blocks_of(stage)
        if blocks in every:
            return every.index(blocks)
        extra = sum(self.problem.times.forward_ticks(*block) for block in blocks)
        row = int(self.row[stage])
        taken = self.takes[row, : self.count[row], _EXTRA]
        return min(int(taken.searchsorted(extra)), len(every) - 1)

    def _meet(self, start: int, stop: int) -> None:
        problem, row = self.problem, len(self.blocks)
        assert problem.recomputation is not None
        if row == len(self.count):
            self.count = np.concatenate([self.count, np.zeros_like(self.count)])
            self.takes = np.concatenate([self.takes, np.zeros_like(self.takes)])
        ways = problem.recomputation.ways((start, stop))
        every = len(ways.extra)
        kept = np.unique(np.linspace(0, every - 1, min(every, MOST_WAYS)).round().astype(np.int64))
        blocks = tuple(ways.blocks(int(number)) for number in kept)
        costs = [stage_cost(problem.times, problem.table, (start, stop), each) for each in blocks]
        self.takes[row, : len(kept)] = [
            (extra, cost.stash, cost.forward_transient, cost.transient)
            for extra, cost in zip(ways.extra[kept].tolist(), costs, strict=True)
        ]
        self.count[row] = len(kept)
        self.blocks.append(blocks)
        self.row[start, stop] = row


class ManyWays(ManyCuts):
    """Estimates of the steps of partitions that run as another one does, whatever they recompute.

    A state is a row of its boundaries, (S + 1), and of the number of the way of each stage, (S).

    Args:
        ways: those of the problem, with what others have met.
        engine: simulator of the other one.
        run: its step.
    """

    def __init__(self, ways: WaysOfStages, engine: StepEngine, run: StepRun) -> None:
        problem, self.ways = ways.problem, ways
        super().__init__(problem, engine, run)
        self.orders = [rows_of(engine, place, order) for place, order in enumerate(map(tuple, run.orders))]
        gradients = [layer.gradient_bytes for layer in problem.chain.layers]
        self.gradients = np.concatenate([[0], np.cumsum(gradients)])

    def state(self, placement: Placement) -> Integers:
        stages = [stage for stage, _ in placement.stages]
        return np.array([*placement.cuts, *map(self.ways.number, stages, placement.blocks)])

    def placement(self, state: Integers) -> Placement:
        cuts = state[: self.num_stages + 1]
        rows = self.ways.rows(cuts[None])[0]
        blocks = [self.ways.blocks[row][number] for row, number in zip(rows, state[len(cuts) :], strict=True)]
        return Placement(tuple(cuts.tolist()), self.devices).recomputing(tuple(blocks))

    def every(self, most: int) -> None:
        """Return None: what each stage recomputes leaves too many."""

    def moved(self, states: Integers, draws: np.random.Generator) -> tuple[Integers, NDArray[np.bool_]]:
        size, count = self.num_stages, len(states)
        cuts, numbers = states[:, : size + 1], states[:, size + 1 :]
        before = self.ways.num_ways(cuts)
        moved, rising = super().moved(cuts, draws)
        stay = draws.random(count) < SHARE_OF_WAYS
        moved[stay], rising[stay] = cuts[stay], True
        after = self.ways.num_ways(moved)
        share = numbers / np.maximum(before - 1, 1)
        # A stage that has become longer recomputes as large a part of what it may.
        changed = np.where(after == before, numbers, (share * (after - 1)).round().astype(np.int64))
        for chance in CHANGES:
            some = np.flatnonzero((stay | (draws.random(count) < ALONG)) & (draws.random(count) < chance))
            which = draws.integers(0, size, len(some))
            longest = np.log(after[some, which])
            distance = np.exp(draws.random(len(some)) * longest).astype(np.int64)
            changed[some, which] += distance * draws.choice([-1, 1], len(some))
        return np.concatenate([moved, np.clip(changed, 0, after - 1)], axis=1), rising

    def ticks(self, states: Integers) -> Integers:
        return self.ticks_of(states[:, : self.num_stages + 1], self._takes(states)[:, :, _EXTRA])

    def fit(self, states: Integers) -> NDArray[np.bool_]:
        cuts, takes = states[:, : self.num_stages + 1], self._takes(states)
        needed, gradients = self._needed(cuts), np.diff(self.gradients[cuts], axis=1)
        fits = np.ones(len(states), dtype=np.bool_)
        for rows, mine in zip(self.orders, self.engine.stages_of, strict=True):
            some = takes[:, mine]
            bytes_of = some[:, :, _STASH] @ rows.in_flight.T + gradients[:, mine] @ rows.come.T
            bytes_of += some[:, :, _FORTH] @ rows.runs[0].T + some[:, :, _BACK] @ rows.runs[1].T
            fits &= needed[:, mine].sum(axis=1) + bytes_of.max(axis=1) <= self.room
        return fits

    def _takes(self, states: Integers) -> Integers:
        size = self.num_stages
        rows = self.ways.rows(states[:, : size + 1])
        taken: Integers = self.ways.takes[rows, states[:, size + 1 :]]
        return taken
