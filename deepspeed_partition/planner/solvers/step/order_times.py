"""The step of given orders, without a simulation event by event where no transfer waits for another.

An order leaves nothing to choose. Were each link free whenever it is wanted, one pass over the operations would
find every time: no step in these orders is shorter. Where no two transfers want a link at once, and receivers have
room, that is what the simulation finds (``step_simulator.py``), at a tenth of its cost.

Method: the longest path through operations and transfers; sorted transfers tell whether they meet. Cost:
O(m S log m) for m micro-batches and S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.step.step_simulator import (
    Positions,
    StepEngine,
    StepRun,
)

LONGEST_IN_64_BITS = 2**62
"""Ticks up to which times are compared in 64 bits."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one pass over given orders tells."""

    least: float
    """Ticks than which no step in these orders is shorter; infinite where they wait in a circle."""
    run: StepRun | None
    """The step; None where it takes too long, or transfers may meet: then only a simulation tells it."""


def look_at(engine: StepEngine, orders: Sequence[Positions], num_micro_batches: int, at_most: float = inf) -> Look:
    """Return what one pass over given orders tells of their step.

    Args:
        engine: the simulator of the allocation, without flushes.
        orders: positions that each device runs, in order: each position ``num_micro_batches`` times.
        at_most: ticks beyond which the step is not wanted.
    """
    comes = _comes(engine, orders, num_micro_batches)
    if comes is None:
        return Look(inf, None)
    ticks = _last(engine, comes)
    if ticks > at_most or ticks > LONGEST_IN_64_BITS:
        return Look(ticks, None)
    ends = np.array(comes[1:], dtype=np.int64)
    ends -= np.array([send or 0 for send in engine.send], dtype=np.int64)[:, None]
    begins = ends - np.array(engine.ticks, dtype=np.int64)[:, None]
    if not _links_are_free(engine, begins, ends):
        return Look(ticks, None)
    sends = [[] if send is None else each for send, each in zip(engine.send, ends.tolist(), strict=True)]
    return Look(ticks, StepRun(ticks, begins.tolist(), ends.tolist(), sends, [list(order) for order in orders]))


def _comes(engine: StepEngine, orders: Sequence[Positions], num_micro_batches: int) -> list[list[int]] | None:
    """Return when each micro-batch comes to each position, and behind the last one; None where they never do."""
    # This loop is where a search for a step spends its time, so it is one function with local names.
    ticks, device, size = engine.ticks, engine.device, len(engine.ticks)
    sends = [send or 0 for send in engine.send]
    comes: list[list[int]] = [[0] * num_micro_batches, *([] for _ in range(size))]
    number, following, free = [0] * size, [0] * len(orders), [0] * len(orders)
    waits_for = [-1] * len(orders)
    """Position whose micro-batch each device waits for; -1: none."""
    may_go = list(range(len(orders)))[::-1]
    while may_go:
        place = may_go.pop()
        order, now, index = orders[place], free[place], following[place]
        while index < len(order):
            position = order[index]
            count, come = number[position], comes[position]
            if count == len(come):
                waits_for[place] = position
                break
            if come[count] > now:
                now = come[count]
            now += ticks[position]
            number[position] = count + 1
            comes[position + 1].append(now + sends[position])
            index += 1
            if position + 1 < size:
                other = device[position + 1]
                if waits_for[other] == position + 1:
                    waits_for[other] = -1
                    may_go.append(other)
        free[place], following[place] = now, index
    if len(comes[size]) < num_micro_batches or any(count < num_micro_batches for count in number):
        return None
    return comes


def _last(engine: StepEngine, comes: Sequence[Sequence[int]]) -> int:
    """Return the ticks until the last stage has ended its all-reduce."""
    return max(
        come[-1] - (send or 0) + tail
        for come, send, tail in zip(comes[1:], engine.send, engine.allreduce, strict=True)
    )


def _links_are_free(engine: StepEngine, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> bool:
    """Return whether each transfer may begin when its tensor is there."""
    slots = engine.slots
    for users in engine.users:
        positions = np.array(users)
        # A receiver holds so many tensors at most: an earlier one has begun by then.
        if (begins[positions + 1, :-slots] > ends[positions, slots:]).any():
            return False
        starts = ends[positions].ravel()
        lengths = np.repeat([engine.send[position] or 0 for position in users], ends.shape[1])
        order = np.argsort(starts, kind="stable")
        starts, lengths = starts[order], lengths[order]
        if (starts[:-1] + lengths[:-1] > starts[1:]).any():
            return False
    return True
