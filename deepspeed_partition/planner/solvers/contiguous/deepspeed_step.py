"""Contiguous partitions for a synchronous step of m micro-batches under DeepSpeed's schedule.

Its transfers block both neighbours, so a stage is as slow as its computation and the transfers over both its
boundaries together. For each number of stages the partition that balances this is a first guess (``min_max.py``).
Then single boundaries move by one layer as long as the simulated step gets shorter.

Method: the PipeDream slides' recurrence with the cost above, and a local search; nothing is proved. Cost for L
layers and P stages: O(P L^2) time and O(P L) memory for the guesses; each simulated step takes O(m P) time, and
fewer micro-batches are simulated where the step soon repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, min_max_partitions
from deepspeed_partition.planner.solvers.interface import Cuts, Problem, fits


def best_partitions(problem: Problem, steady: Cuts) -> list[Cuts]:
    """Return partitions that fit at DeepSpeed's depth, the shortest step first; ``steady`` is a candidate."""
    starts = balanced_partitions(problem)
    if fits(problem, steady):
        starts.append(steady)
    known: dict[Cuts, float] = {}
    for cuts in starts:
        if known and problem.deadline.passed():
            break
        _descend(problem, cuts, known)
    if not known:
        return []
    # The estimate is exact, except where the rhythm settles late: let the full steps decide.
    finalists = sorted(known, key=lambda cuts: (known[cuts], len(cuts)))[:4]
    if fits(problem, steady) and steady not in finalists:
        finalists.append(steady)
    assert problem.num_micro_batches is not None
    full: dict[Cuts, int] = {}
    for cuts in finalists:
        if full and problem.deadline.passed():
            break
        full[cuts] = problem.blocking_step(cuts, problem.num_micro_batches)
    others = sorted(known.keys() - full.keys(), key=lambda cuts: (known[cuts], len(cuts), cuts))
    return [*sorted(full, key=lambda cuts: (full[cuts], len(cuts))), *others]


def balanced_partitions(problem: Problem) -> list[Cuts]:
    """Return, for each number of stages, the partition whose slowest stage, with its transfers, is fastest."""
    table, times = problem.table, problem.times
    transfers = times.one_way[:, None] + times.one_way[None, :]
    loads = times.compute[None, :] - times.compute[:, None] + 2 * transfers

    def cost(from_end: int) -> NDArray[np.int64]:
        return np.where(table.max_in_flight >= problem.depth(from_end), loads, NOTHING_FITS)

    return [cuts for cuts, _ in min_max_partitions(problem, cost)]


def _descend(problem: Problem, cuts: Cuts, known: dict[Cuts, float]) -> None:
    """Move one boundary by one layer as long as that shortens the step."""
    if cuts not in known:
        known[cuts] = _step_estimate(problem, cuts)
    improved = True
    while improved:
        improved = False
        for neighbour in _neighbours(problem, cuts):
            if problem.deadline.passed():
                return
            if neighbour in known:
                continue
            known[neighbour] = _step_estimate(problem, neighbour)
            if known[neighbour] < known[cuts]:
                cuts, improved = neighbour, True
                break


def _neighbours(problem: Problem, cuts: Cuts) -> Iterator[Cuts]:
    for index in range(1, len(cuts) - 1):
        for moved in (cuts[index] - 1, cuts[index] + 1):
            neighbour = (*cuts[:index], moved, *cuts[index + 1 :])
            if cuts[index - 1] < moved < cuts[index + 1] and fits(problem, neighbour):
                yield neighbour


def _step_estimate(problem: Problem, cuts: Cuts) -> float:
    """Return the ticks of a step; a long one is simulated until it repeats itself, then extended by its rhythm."""
    num_micro_batches = problem.num_micro_batches
    assert num_micro_batches is not None
    num_stages = len(cuts) - 1
    settled = 4 * num_stages + 8
    if num_micro_batches <= settled + num_stages:
        return problem.blocking_step(cuts, num_micro_batches)
    shorter = problem.blocking_step(cuts, settled)
    longer = problem.blocking_step(cuts, settled + num_stages)
    return longer + (longer - shorter) / num_stages * (num_micro_batches - settled - num_stages)
