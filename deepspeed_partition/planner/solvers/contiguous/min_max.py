"""The partition whose costliest stage is cheapest: a dynamic program that several solvers share.

Method: the classic recurrence for min-max partitions of a chain, as in the PipeDream slides, "Automatic
Partitioning". Exact, in O(P L^2) time and O(P L) memory for L layers and P stages, beside O(L^2) costs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.interface import Cuts, Problem

NOTHING_FITS = 2**62
"""Cost that no stage has: it forbids a stage."""


def min_max_partitions(
    problem: Problem, cost: Callable[[int], NDArray[np.int64]], ended: Callable[[], bool] = lambda: False
) -> list[tuple[Cuts, int]]:
    """Return, for each number of stages, the boundaries whose costliest stage is cheapest, and that cost.

    With q stages for layers k and on, ``cost(q)[k, l]`` the cost of layers k to l as the q-th stage from the
    end::

        T(q, k) = min over l of max(cost(q)[k, l], T(q - 1, l))

    A cost of ``NOTHING_FITS`` or more forbids a stage; numbers of stages without any partition are left out, and
    so are further ones once the search has ``ended``.
    """
    allowed = problem.constraints.allowed(problem.table)
    num_layers = problem.chain.num_layers
    counts = problem.constraints.counts(num_layers)
    worst = np.full(num_layers + 1, NOTHING_FITS, dtype=np.int64)
    worst[num_layers] = 0
    choices: list[NDArray[np.intp]] = []
    found = []
    for count in range(1, max(counts, default=0) + 1):
        if ended():
            break
        key = np.where(allowed, np.maximum(cost(count), worst[None, :]), NOTHING_FITS)
        choices.append(key.argmin(axis=1))
        worst = key.min(axis=1)
        if count in counts and worst[0] < NOTHING_FITS:
            found.append((trace(choices, num_layers), int(worst[0])))
    return found


def trace(choices: list[NDArray[np.intp]], num_layers: int) -> Cuts:
    """Return the boundaries that choices lead to: entry q - 1 says where the q-th stage from the end stops."""
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    assert cuts[-1] == num_layers
    return tuple(cuts)
