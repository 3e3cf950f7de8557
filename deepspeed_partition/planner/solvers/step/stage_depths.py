"""How many micro-batches a stage may have in flight in a step, and what it must recompute for that.

A stage of layers k to l that recomputes some of them, for every micro-batch, keeps the stash of the others; its
first layer keeps its input at the least. Where it is to have g micro-batches in flight, what it recomputes must
save

    need(g) = stash(k, l) - (room - stash of the smallest block that runs again) / g

bytes, which takes ``extra(g)`` ticks of forwards, at the least: for any price p of a byte, in ticks,

    extra(g)  >=  p need(g) - sum over its layers of max(0, p saved - forward)

(the price of a knapsack's relaxation; every price gives a lower bound, and with the ratio of some layer it is the
least time to save so much if parts of a layer may be recomputed); and it is the number of layers that save so much
at the least, times the shortest forward. The largest number of micro-batches in flight is
there when some backward runs, since only that can make it less: so the stash of what runs again counts, too.

Method: own; the argument is that of the published bound in ``identical_stages.py``, with whole layers and whole
micro-batches. Cost: O(L^2) for each of ``NUM_PRICES`` prices and ``NUM_DEPTHS`` ranges of g.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.interface import Problem

NUM_PRICES, NUM_DEPTHS = 8, 10
"""Numbers of prices, and of ranges of micro-batches in flight, that are looked at."""
MOST_NUMBERS = 10**8
"""Most numbers that are looked at; of long chains fewer prices and ranges are."""
MOST_LAYERS = 1200
"""Number of layers up to which it counts that what runs twice takes time: tables of more take much memory."""
ROUNDING = 1e-9
"""Relative error of prices times bytes."""
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


def stage_depths(problem: Problem, forward: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Yield pairs for all stages: most micro-batches in flight, and the ticks that run twice for each; [k, l].

    These ticks are part of the backward. A stage behaves as one of the pairs says, or worse. Where no micro-batch
    fits, the first number is 0.

    Args:
        forward: ticks of the forward of each layer, shape (L,).
    """
    table = problem.table
    assert problem.num_micro_batches is not None
    room = stage_rooms(problem)
    yield _most(room - table.forward_transient, table.stash, problem.num_micro_batches), np.zeros_like(room)
    if problem.recomputation is not None:
        yield from _recomputing(problem, forward, room)


def stage_rooms(problem: Problem) -> Integers:
    """Return the bytes of stages for micro-batches, at most: no gradients have come; [k, l]."""
    chain, table, platform = problem.chain, problem.table, problem.platform
    slots, size = platform.comm_buffers, chain.num_layers
    sizes = [0, *(chain.boundary_bytes(boundary) for boundary in range(1, size)), 0]
    ends = np.array([min(slots * each, 2**58) for each in sizes], dtype=np.int64)
    gradients = _between(np.array([layer.gradient_bytes for layer in chain.layers]))
    room: Integers = platform.memory_bytes - platform.fixed_bytes - (table.weights - gradients)
    room -= ends[:, None] + ends[None, :]
    return room


def _recomputing(problem: Problem, forward: Integers, room: Integers) -> Iterator[tuple[Integers, Integers]]:
    """Yield the pairs of stages that recompute something."""
    chain, m = problem.chain, problem.num_micro_batches
    assert m is not None
    stash = np.array([chain.stash(layer) for layer in chain.layers], dtype=np.int64)
    again = np.array([layer.recomputable for layer in chain.layers])
    inputs = np.array([chain.boundary_bytes(index) for index in range(chain.num_layers)], dtype=np.int64)
    saved = np.where(again, stash, 0)
    kept = _between(stash - saved)
    first = np.append(np.minimum(inputs, stash), 0)[:, None]
    most = _most(room, np.maximum(kept, first), m)
    if problem.per_micro_batch:
        # No two need recompute the same, and a forward that keeps nothing does not hold its input yet.
        most = _most(room, kept, m)
    if problem.per_micro_batch or chain.num_layers > MOST_LAYERS:
        yield most, np.zeros_like(most)
        return
    every, total = _between(stash), _between(forward)
    far = np.iinfo(np.int64).max
    # Of layers that were measured while they ran it is not known what is there while they run again.
    unmeasured = np.array([layer.running_bytes is None for layer in chain.layers])
    room = room - _smallest(np.where(again, np.where(unmeasured, stash, 0), far))
    shortest = _smallest(np.where(again, forward, far))
    largest_saved = np.maximum(1, -_smallest(-saved))
    prices, depths = _prices(saved, forward), _depths(m)
    while len(prices) * len(depths) * room.size > MOST_NUMBERS and len(prices) * len(depths) > 4:
        prices, depths = prices[:: 2 if len(prices) > 2 else 1], _depths(m, max(2, len(depths) // 2))
    for fewest, largest in depths:
        need = every - room / fewest
        extra = np.zeros(room.shape)
        for price in prices:
            gain = _between(np.maximum(0.0, price * saved - forward))
            np.maximum(extra, price * need * (1 - ROUNDING) - gain * (1 + ROUNDING), out=extra)
        fewest_layers = np.maximum(1, np.ceil(need * (1 - ROUNDING) / largest_saved))
        np.maximum(extra, fewest_layers * shortest, out=extra)
        has_room = (most >= fewest) & (extra <= total)
        yield np.where(has_room, np.minimum(most, largest), 0), np.where(has_room, extra, 0).astype(np.int64)


def _smallest(values: Integers) -> Integers:
    """Return the smallest value of layers k to l, [k, l]; 0 where all are the largest number."""
    size = len(values) + 1
    result = np.zeros((size, size), dtype=np.int64)
    for start in range(size - 1):
        result[start, start + 1 :] = np.minimum.accumulate(values[start:])
    result[result == np.iinfo(np.int64).max] = 0
    return result


def _most(room: Integers, stash: Integers, m: int) -> Integers:
    """Return how many micro-batches fit, m at most; 0 where not one does."""
    most = np.full(room.shape, m, dtype=np.int64)
    np.floor_divide(room, stash, out=most, where=stash > 0)
    most[room < 0] = 0
    return np.minimum(most, m)


def _prices(saved: Integers, forward: Integers) -> Floats:
    """Return prices of a byte: ratios of some of the layers, evenly over them, and one beyond."""
    ratios = np.sort(np.unique(forward[saved > 0] / saved[saved > 0]))
    if not len(ratios):
        return np.zeros(0)
    places = np.unique(np.linspace(0, len(ratios) - 1, min(len(ratios), NUM_PRICES - 1)).round().astype(np.intp))
    return np.append(ratios[places], 1e6 * max(ratios[-1], 1e-12))


def _depths(m: int, number: int = NUM_DEPTHS) -> list[tuple[int, int]]:
    """Return ranges of micro-batches in flight, from 1 to m, fine where one more makes a difference."""
    ends = sorted({-(-m // turns) for turns in range(1, m + 1)})
    chosen = sorted({ends[place * (len(ends) - 1) // max(1, number - 1)] for place in range(number)})
    return [(low + 1, high) for low, high in zip([0, *chosen[:-1]], chosen, strict=True)]


def _between(values: NDArray[np.generic]) -> NDArray:  # type: ignore[type-arg]
    """Return sums of layers k to l, [k, l]."""
    total = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
    result: NDArray = total[None, :] - total[:, None]  # type: ignore[type-arg]
    return result
