"""A lower bound of a step by one stage: what its device keeps takes memory, what it does not keep runs twice.

A micro-batch holds the stash of layer l, in a stage that begins with layer k, for as long as l and all layers
behind it compute; where l runs twice, for its own second forward and its backward alone. With x the part of the
micro-batches of which a layer runs twice, a stage with ``room`` bytes besides its weights needs T ticks between
the begin of its first forward and the end of its last backward, with

    T  >=  m (f + b) + m sum of x forward            T room  >=  m (held - sum of x saved)

So for every price p of a tick, in bytes, ``T (room + p) >= m (held + p (f + b) - sum of max(0, saved - p
forward))``.

Source: the argument of the slides that ``identical_stages.py`` names, whose bound this is for identical stages,
with unequal layers and real bytes. Cost: O(L^2) for each of ``NUM_PRICES`` prices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.step.stage_depths import stage_rooms

if TYPE_CHECKING:
    from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds

NUM_PRICES = 12
ROUNDING = 1e-9
"""Relative error that products of bytes and ticks may have."""
MOST_LAYERS = 600
"""Number of layers up to which this is looked at: O(L^2) numbers for each price."""


def ticks_of_stages(bounds: StepBounds) -> NDArray[np.int64] | int:
    """Return the least ticks from the first forward of the stage of layers k to l to its last backward; [k, l].

    0 where nothing is known: no layer may run twice, or there are too many.
    """
    chain = bounds.problem.chain
    if bounds.problem.recomputation is None or bounds.size > MOST_LAYERS:
        return 0
    stash = np.array([chain.stash(layer) for layer in chain.layers], dtype=float)
    path = (bounds.C[-1] - bounds.C[:-1]).astype(float)
    saved, forward = np.array(bounds.saved, dtype=float), bounds.f.astype(float)
    held, work = _between(stash * path), _between(bounds.c.astype(float))
    room = np.maximum(stage_rooms(bounds.problem), 0).astype(float)
    ratios = saved[(saved > 0) & (forward > 0)] / forward[(saved > 0) & (forward > 0)]
    if not len(ratios):
        return 0
    # A ratio of the layers is the best price where all of one kind run twice in part.
    prices = np.unique(np.quantile(ratios, np.linspace(0, 1, NUM_PRICES), method="nearest"))
    least = np.zeros(room.shape)
    for price in [0.0, *prices.tolist()]:
        gain = _between(np.maximum(0.0, saved - price * forward))
        needs = held + price * work - gain * (1 + ROUNDING)
        total = room + price
        np.maximum(least, np.divide(needs, total, out=np.zeros_like(needs), where=total > 0), out=least)
    floor = np.floor(bounds.m * least * (1 - ROUNDING))
    known = np.isfinite(floor) & (floor < 2**62)  # bytes times ticks may be more than a float holds
    result: NDArray[np.int64] = np.where(known, floor, 0).astype(np.int64)
    return np.maximum(result, 0)


def _between(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums of layers k to l, [k, l]."""
    total = np.concatenate([np.zeros(1), np.cumsum(values)])
    result: NDArray[np.float64] = total[None, :] - total[:, None]
    return result
