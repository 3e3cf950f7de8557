"""A lower bound of a step whose backwards may be two operations, of any allocation that may be chosen.

Two relaxations, and the larger of their bounds:

- Without the second halves. Take a step and leave out every ``W``, and of a whole backward all but its last ticks,
  as many as ``I`` takes. What is left is a step of the layers with ``I`` for a backward and the lesser of stash
  and ``weight_stash_bytes`` for a stash: an order is kept, nothing begins earlier or is held longer, and the
  memory of ``I`` and of whole backwards is part of what was there. So all bounds of steps (``step_bounds.py``)
  hold for it.
- The work alone. Nothing need follow a ``W``, so a device is idle only before the first micro-batch has come to
  it: within T ticks a device with first layer l does at most T - F(l) - a transfer. Devices have distinct first
  layers, and the layers up to any one are done by devices whose first layers are among them. For q devices
  together that is ``m (U + R) + idle <= q T``, R the ticks that must run twice for lack of memory (Little's law,
  with the path and the stashes of the first relaxation).

Contiguous partitions: the stage of layers k to l needs F(k) + S + m (f + b), S the transfers before it, one way.

Method: own; not in the papers. Cost: twice that of ``step_bounds.py``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import numpy as np

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import Chain, LayerProfile
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.bounds import with_savings
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.segment_bounds import least_from
from deepspeed_partition.planner.solvers.step.step_bounds import Integers, StepBounds, step_lower_bound

FEWEST_DECISIONS, MOST_DECISIONS = 3, 55
"""Fewest decisions with which a bisection is worth beginning, and the most that it takes."""
MOST_WORK = 3 * 10**7
"""Most numbers that the bound of contiguous partitions looks at."""


def split_lower_bound(problem: Problem, *, contiguous: bool) -> int:
    """Return ticks than which no step is shorter, whatever backwards are two operations.

    Args:
        contiguous: bound the steps of contiguous partitions alone.
    """
    first = without_second_halves(problem)
    work = _WorkBounds(problem, first)
    return max(step_lower_bound(first, contiguous=contiguous), work.unit * work.least(contiguous=contiguous))


def without_second_halves(problem: Problem) -> Problem:
    """Return the problem without ``W``: a backward is ``I``, and a stash the least that is held while it waits."""
    chain = replace(problem.chain, layers=tuple(map(_first_half, problem.chain.layers)))
    times = _with_first_halves(problem.times, chain)
    recomputation = problem.recomputation and Recomputation(times, problem.recomputation.mode)
    table = StageTable(chain, problem.platform)
    return replace(
        problem, chain=chain, times=times, table=table, recomputation=recomputation, splits_backward=False
    )


def _first_half(layer: LayerProfile) -> LayerProfile:
    if layer.backward_input_seconds is None or layer.weight_stash_bytes is None:
        return layer
    return replace(layer, stash_bytes=min(Chain.stash(layer), layer.weight_stash_bytes))


def _with_first_halves(times: TimedChain, chain: Chain) -> TimedChain:
    """Return the times on the same clock, of a chain whose backwards are first halves."""
    made = copy.copy(times)
    made.__dict__.pop("compute", None)
    made.chain = chain
    made.backward = times.first_halves
    return made


class _WorkBounds(StepBounds):
    """Bounds of the work alone: no path behind it, and all of a backward counts.

    Args:
        first: the problem without second halves, whose paths and stashes count.
    """

    def __init__(self, problem: Problem, first: Problem) -> None:
        super().__init__(first)
        times = problem.times
        whole = np.diff(times.backward)
        halves = np.diff(times.backward_input) + np.diff(times.backward_weight)
        known = np.diff(times.undivided) == 0
        self.b = np.where(known, np.minimum(whole, halves), whole) // self.unit
        self.c = self.f + self.b
        self.tail = np.zeros_like(self.tail)
        self.last_forward = 0

    def least(self, *, contiguous: bool) -> int:
        """Return the ticks in which the devices have done their work, the fill counted."""
        bound = max(self._of_all(), int((self.F[:-1] + self.m * self.c).max()))
        for may_take in self._decisions():
            if not may_take(bound):
                bound = least_from(bound, may_take, MOST_DECISIONS)
        return self._of_partitions(bound) if contiguous else bound

    def _of_all(self) -> int:
        """Return the ticks in which all devices together have time and memory."""
        chain, C = self.problem.chain, self.C
        held = [chain.stash(layer) * int(C[-1] - C[index]) for index, layer in enumerate(chain.layers)]
        savings = [
            (held[index], int(self.f[index]))
            for index, layer in enumerate(chain.layers)
            if self.may_run_twice(layer)
        ]
        idle = np.concatenate([[0], np.cumsum(np.sort(self.head[1:]))])
        total = int(self.c.sum())
        found = []
        for count in range(1, self.num_devices + 1):
            room = self.room_besides_weights(count)
            if room > 0:
                busy = total + Fraction(int(idle[count - 1]), self.m)
                found.append(self.m * with_savings(busy, sum(held), savings, room, count))
        return int(min(found, default=0))

    def _of_partitions(self, at_least: int) -> int:
        """Return ticks than which no step of a contiguous partition is shorter; never less than ``at_least``."""
        size, far = self.size, np.iinfo(np.int64).max // 4
        counts = self.problem.constraints.counts(size)
        most = counts.stop - 1
        decisions = min(MOST_DECISIONS, MOST_WORK // (most * size**2 + 1))
        if decisions < FEWEST_DECISIONS:
            return at_least
        before = np.concatenate([[0], np.cumsum(self.c)])
        needed = self.F[:-1, None] + self.m * (before[None, :] - before[:-1, None])
        sends: Integers = np.append(self.send, 0)

        def may_take(T: int) -> bool:
            least = np.full((most + 1, size + 1), far, dtype=np.int64)
            least[0, 0] = 0
            for start in range(size):
                so_far = least[:-1, start, None]
                reached = np.where(so_far + needed[start, None, start + 1 :] <= T, so_far, far)
                reached = np.minimum(reached + sends[None, start + 1 :], far)
                np.minimum(least[1:, start + 1 :], reached, out=least[1:, start + 1 :])
            return bool((least[counts.start : counts.stop, size] < far).any())

        return at_least if may_take(at_least) else least_from(at_least, may_take, decisions)
