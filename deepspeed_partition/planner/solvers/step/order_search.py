"""Search for an order of a step, operation by operation: what keeps the last operation waiting is done earlier.

The critical path of a step goes back from its end: each operation waited for its tensor, or for its device, which
ran another operation until then. Of operations that a device runs one after the other on this path (a block), one
is moved to the block's beginning or end. Only such moves can shorten the step of given orders.

Method: tabu search with the neighbourhood of E. Balas and A. Vazacopoulos ("Guided local search with shifting
bottleneck for job shop scheduling", 1998) on the blocks of J. Grabowski; memory is checked by simulation. Cost:
one simulation for each neighbour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from deepspeed_partition.planner.solvers.step.order_times import look_at
from deepspeed_partition.planner.solvers.step.step_simulator import (
    Positions,
    StepEngine,
    StepRun,
    WaitInCircleError,
    in_order,
)

Orders = tuple[Positions, ...]
MOST_IN_BLOCK = 12
"""Number of operations of a block that are moved, from each of its ends."""


def better_orders(
    engine: StepEngine, start: StepRun, fits: Callable[[StepRun], bool], least: int, may_run: Callable[[], bool]
) -> tuple[Orders, int]:
    """Return the best orders found around those of a run, and the ticks of their step.

    Args:
        engine: the simulator of the allocation.
        start: a run whose orders fit into memory.
        fits: whether a run fits into memory.
        least: ticks that no order can be shorter than: the search ends there.
        may_run: whether one more simulation may be run; asked before each.
    """
    run, orders = start, _orders_of(start)
    best = orders, start.ticks
    seen = {orders}
    while best[1] > least:
        chosen: tuple[int, Orders, StepRun] | None = None
        for neighbour in _neighbours(engine, run):
            if neighbour in seen:
                continue
            if not may_run():
                return best
            at_most = None if chosen is None else chosen[0] - 1
            found = _simulated(engine, neighbour, run, at_most)
            if found is None:
                continue
            if not fits(found):
                seen.add(neighbour)
                continue
            if chosen is None or found.ticks < chosen[0]:
                chosen = found.ticks, neighbour, found
                if found.ticks < best[1]:
                    break
        if chosen is None:
            return best
        ticks, orders, run = chosen
        seen.add(orders)
        if ticks < best[1]:
            best = orders, ticks
    return best


def _orders_of(run: StepRun) -> Orders:
    return tuple(tuple(order) for order in run.orders)


def _simulated(engine: StepEngine, orders: Orders, like: StepRun, at_most: int | None) -> StepRun | None:
    """Return the run of orders; None where they wait in a circle or take longer than ``at_most``."""
    num_micro_batches = len(like.begins[0])
    most = inf if at_most is None else at_most
    look = look_at(engine, orders, num_micro_batches, most)
    if look.run is not None or look.least == inf or look.least > most:
        return look.run
    try:
        return engine.run(num_micro_batches, in_order(orders), at_most)
    except WaitInCircleError:
        return None


def _neighbours(engine: StepEngine, run: StepRun) -> Iterator[Orders]:
    """Yield the orders in which one operation is at the beginning or the end of its block."""
    every = _orders_of(run)
    for place, first, last in _blocks(engine, run):
        order = every[place]
        made = dict.fromkeys(_moved(order, first, last))
        made.pop(order, None)
        for changed in made:
            yield (*every[:place], changed, *every[place + 1 :])


def _moved(order: Positions, first: int, last: int) -> Iterator[Positions]:
    """Yield an order with one operation from ``first`` to ``last`` at an end of these, the shortest ways first."""
    for index in range(first + 1, min(last, first + MOST_IN_BLOCK) + 1):
        yield (*order[:first], order[index], *order[first:index], *order[index + 1 :])
    for index in range(max(first, last - MOST_IN_BLOCK), last):
        yield (*order[:index], *order[index + 1 : last + 1], order[index], *order[last + 1 :])


def _blocks(engine: StepEngine, run: StepRun) -> Iterator[tuple[int, int, int]]:
    """Yield device, first and last index of each block of the critical path, from the end of the step on."""
    size = len(engine.ticks)
    number = [[0] * len(order) for order in run.orders]
    index_of: dict[tuple[int, int], int] = {}
    for place, order in enumerate(run.orders):
        count = [0] * size
        for index, position in enumerate(order):
            number[place][index] = count[position]
            index_of[position, count[position]] = index
            count[position] += 1
    position = max(range(size), key=lambda each: run.ends[each][-1] + engine.allreduce[each])
    place, index = engine.device[position], index_of[position, len(run.ends[position]) - 1]
    last = index
    while True:
        position, micro_batch = run.orders[place][index], number[place][index]
        begin = run.begins[position][micro_batch]
        if index:
            before = run.orders[place][index - 1]
            if run.ends[before][number[place][index - 1]] == begin:
                index -= 1
                continue
        if index < last:
            yield place, index, last
        if not position or not begin:
            return
        place, index = engine.device[position - 1], index_of[position - 1, micro_batch]
        last = index
