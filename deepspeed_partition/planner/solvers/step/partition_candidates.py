"""Contiguous partitions that a search for the shortest step tries: good ones to begin with, and those around one.

To begin with: those of other planners, and for each number of stages the best by a bound. Around one lie those
with a boundary, or a run of boundaries, moved by a layer, or by more where stages have many; and those without
a boundary.

Method: an addition to the papers. Cost: that of ``min_max.py`` and of ``StepBounds.partition``; around S stages
O(S^2 log(L / S)) partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.contiguous import deepspeed_partitions, deepspeed_step
from deepspeed_partition.planner.solvers.contiguous.mcap import MemoryBalanced
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, min_max_partitions
from deepspeed_partition.planner.solvers.contiguous.pipedream import PipeDream
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

MOST_CELLS = 50_000_000
"""Layers squared times devices up to which the partitions of PipeDream and mCAP are candidates: seconds beyond."""
STRIDE, MOST_STAGES_WITH_STRIDES, MOST_STAGES_WITH_RUNS = 4, 32, 12
"""Ratio of the distances by which one boundary is moved, up to half a stage; most stages for which it is moved by
more than a layer; and most stages for which boundaries are moved together."""


def rival_partitions(problem: Problem, steady: Cuts, ended: Callable[[], bool] = lambda: False) -> Iterator[Cuts]:
    """Yield the partitions of other planners, and at last the one that needs least memory.

    Args:
        ended: whether the search has no time left for what takes long to make.
    """
    chain, num_devices = problem.chain, problem.constraints.max_stages
    yield steady
    yield deepspeed_partitions.uniform(chain, num_devices)
    yield deepspeed_partitions.parameters(chain, num_devices)
    if chain.num_layers**2 * num_devices <= MOST_CELLS:
        for algorithm in (PipeDream(), MemoryBalanced()):
            yield from algorithm.solve(problem).cuts
    table = problem.table
    in_flight = problem.fewest_in_flight
    needs = table.needs(in_flight)
    least = min_max_partitions(problem, lambda from_end: needs, ended)
    if least:
        yield min(least, key=lambda found: found[1])[0]


def balanced_partitions(problem: Problem, ended: Callable[[], bool] = lambda: False) -> list[Cuts]:
    """Return, for each number of stages, a good partition for DeepSpeed's engine, and that of least bound.

    The bound is ``StepEngine.bound`` per micro-batch, without the transfers on the way. One more is best by the
    bound with all transfers (``StepBounds.partition``). Those that a search has no time for, once it has
    ``ended``, are left out.
    """
    times, table, m = problem.times, problem.table, problem.num_micro_batches
    assert m is not None
    before = times.compute[:, None] // m
    on_link = times.one_way if problem.platform.duplex == "full" else times.round_trip
    busiest = np.maximum(times.compute[None, :] - times.compute[:, None], on_link[:, None])
    room = np.minimum(np.maximum(table.max_in_flight, 1), m)
    waiting = (times.compute[-1] - times.compute)[:, None] // room
    costs: NDArray[np.int64] = before + np.maximum(busiest, waiting)
    fitting = np.where(table.max_in_flight >= 1, costs, NOTHING_FITS)
    blocking = deepspeed_step.balanced_partitions(replace(problem, in_deepspeed=True))
    least = StepBounds(problem).partition()
    found = [*blocking, *(cuts for cuts, _ in min_max_partitions(problem, lambda from_end: fitting, ended))]
    return found if least is None else [least, *found]


def moved_boundaries(placement: Placement, distances: Iterable[int] = (1,)) -> Iterator[Placement]:
    """Yield the contiguous partitions in which one boundary is so many layers further."""
    cuts = placement.cuts
    for distance in distances:
        for index in range(1, len(cuts) - 1):
            for moved in (cuts[index] - distance, cuts[index] + distance):
                if cuts[index - 1] < moved < cuts[index + 1]:
                    yield Placement.contiguous((*cuts[:index], moved, *cuts[index + 1 :]))


def moved_runs(placement: Placement) -> Iterator[Placement]:
    """Yield the contiguous partitions with one boundary, or several in a row, moved, and those without one."""
    cuts = placement.cuts
    for distance in strides(placement):
        for first, last in combinations_with_replacement(range(1, len(cuts) - 1), 2):
            for change in (-distance, distance):
                run = (cut + change for cut in cuts[first : last + 1])
                moved = (*cuts[:first], *run, *cuts[last + 1 :])
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield Placement.contiguous(moved)
    for index in range(1, len(cuts) - 1):
        yield Placement.contiguous((*cuts[:index], *cuts[index + 1 :]))


def strides(placement: Placement) -> list[int]:
    """Return distances by which a boundary is moved: a layer, and more where stages have many."""
    num_stages, distances = len(placement.devices), [1]
    if num_stages <= MOST_STAGES_WITH_STRIDES:
        while distances[-1] * STRIDE <= placement.cuts[-1] // (2 * num_stages):
            distances.append(distances[-1] * STRIDE)
    return distances
