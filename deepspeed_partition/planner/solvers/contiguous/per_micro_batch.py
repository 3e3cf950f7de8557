"""The search for patterns of several micro-batches, kept or recomputed one by one, of contiguous partitions.

Orders come from these sources, and each is retimed for the stages that there are:

- the optimal patterns of identical stages (``kept_and_recomputed.py``), with other numbers of stages, slots and
  ratios of backward to forward than there really are: stages in between that do not exist give transfers time.
  Where a device has room for more, it keeps what it need not recompute, as long as the pattern gets shorter;
- 1F1B* of one micro-batch whose gradients are sent on before those of the weights are computed, where backwards
  may be two operations;
- a constraint program (``cyclic_program.py``), where the operations are few and OR-tools is installed: no pattern
  of 1 to ``MOST_NUMBER`` micro-batches is shorter then, of that partition.

Partitions are those that are best in this memory and in more of it. Nothing is proved of a pattern but what meets
a lower bound. Cost: ``MOST_ORDERS`` patterns to retime for each of a few partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.recomputing import choice_at
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import (
    CyclicPattern,
    CyclicRoad,
    Key,
    Orders,
    busiest_stages,
    retimed,
)
from deepspeed_partition.planner.solvers.pattern.cyclic_program import CyclicProgram
from deepspeed_partition.planner.solvers.pattern.kept_and_recomputed import kept_and_recomputed

MOST_NUMBER, MOST_OPERATIONS = 4, 48
"""Most micro-batches of a pattern that the constraint program looks for, and most operations in all."""
MOST_ORDERS = 200
"""Most patterns of identical stages that are retimed for a partition."""
NUM_LENGTHS = 12
"""Lengths between the least and the best one so far at which 1F1B* with early gradients is made."""
MORE_STAGES = 2
"""How many times as many stages an ideal pattern may have as there are."""
MOST_IDEAL_STAGES = 24
RATIOS = (1, 2, 3)
MORE_MEMORY = (1.25, 1.6, 2.0, 3.0, 5.0)
"""What the memory is multiplied by for other partitions."""
NEAR = Fraction(6, 5)
"""A pattern that is so many times as long as the best one may become shorter where it keeps more."""
MOST_SECONDS = 5.0
"""Most seconds for one constraint program."""
SHARE = 0.5
"""Most of the time that is left for the constraint programs of one partition."""


def best_pattern(
    problem: Problem, answer: Answer, period: Fraction, *, keeps_cut: bool = False
) -> CyclicPattern | None:
    """Return the best pattern of several micro-batches, if one is shorter than ``period``.

    Args:
        answer: the best plans that treat all micro-batches alike.
        period: ticks of their best period.
        keeps_cut: look at the partitions of the answer alone.
    """
    best: CyclicPattern | None = None
    bound = lower_bound(problem)
    for placement in partitions(problem, answer, keeps_cut=keeps_cut):
        if period <= bound or problem.deadline.passed():
            break
        for pattern in _patterns(problem, placement, period):
            if pattern.period < period:
                best, period = pattern, pattern.period
    return best


def partitions(problem: Problem, answer: Answer, *, keeps_cut: bool = False) -> list[Placement]:
    """Return contiguous partitions that are worth a look, with what all micro-batches recompute.

    Args:
        keeps_cut: return those of the answer alone, as for a baseline, which is one fixed cut.
    """
    cuts: list[Cuts] = list(answer.cuts[:1])
    cuts += [pattern.placement.cuts for pattern in answer.patterns[:1] if pattern.placement.is_contiguous]
    alone = [Placement.contiguous(each, choice_at(problem, each, None)) for each in answer.cuts[:1]]
    memory_bytes = problem.platform.memory_bytes
    # A frontier begins with the largest memory that a device may have.
    larger = (min(int(memory_bytes * more), LARGEST_MEMORY_BYTES) for more in MORE_MEMORY)
    for size in () if keeps_cut else dict.fromkeys(larger):
        cuts += Contiguous().solve(problem.with_memory(size)).cuts[:1]
    return list(dict.fromkeys([*(Placement.contiguous(each) for each in dict.fromkeys(cuts)), *alone]))


def _patterns(problem: Problem, placement: Placement, period: Fraction) -> Iterator[CyclicPattern]:
    """Yield patterns of a partition that fit and are shorter than all before, and than ``period``."""
    single = CyclicRoad(problem, placement, 1)
    slots, bound = single.slots, single.bound
    if min(slots) < 1:
        return
    deadline = problem.deadline.part(SHARE)
    for number, orders in _ideal_orders(slots) if problem.per_micro_batch else ():
        if deadline.passed() or period <= bound:
            break
        road = CyclicRoad(problem, placement, number)
        if not all(road.may_recompute[stage] for kind, stage, _ in orders.begins if kind == "f"):
            continue
        found = retimed(road, orders, period * NEAR)
        found = found and _keeping_more(found, orders)
        if found and found.period < period:
            period = found.period
            yield found
    for orders in _early_gradients(single, period) if any(single.may_split) else ():
        if deadline.passed() or period <= bound:
            break
        found = retimed(single, orders, period)
        if found and found.fits():
            period = found.period
            yield _joined(found, orders)
    if period > bound:
        yield from _solved(problem, placement, period, deadline)


def _ideal_orders(slots: list[int]) -> Iterator[tuple[int, Orders]]:
    """Yield the orders of patterns of identical stages, of which some may not exist."""
    num_stages = len(slots)
    seen = 0
    sizes = range(num_stages, min(MORE_STAGES * num_stages, MOST_IDEAL_STAGES) + 1)
    for size in sizes:
        for kept in sorted({each for slot in slots for each in (slot, slot - 1)}, reverse=True):
            if not 1 <= kept < size:
                continue
            for ratio in RATIOS:
                for places in _spread(num_stages, size):
                    # Device i of the ideal pattern holds this many at the most.
                    if any(min(kept, size - place) > slot for place, slot in zip(places, slots, strict=True)):
                        continue
                    seen += 1
                    if seen > MOST_ORDERS:
                        return
                    length, number, begins = kept_and_recomputed(size, kept, ratio)
                    stage_of = {place: stage for stage, place in enumerate(places)}
                    mine = {
                        (kind, stage_of[place], each): begin
                        for (kind, place, each), begin in begins.items()
                        if place in stage_of
                    }
                    yield number, Orders(length, number, mine, [1] * num_stages, [ratio] * num_stages)


def _early_gradients(road: CyclicRoad, period: Fraction) -> Iterator[Orders]:
    """Yield 1F1B* of one micro-batch with ``I`` for a backward, and ``W`` in one of the two gaps of each device.

    That is behind ``I``, before the next ``I``, or where the device is idle longer.
    """
    stages = range(road.num_stages)
    loads: list[int] = []
    for stage in stages:
        loads.append(road.forward[stage] + road.first_half[stage])
        loads += [2 * each for each in road.one_way[stage : stage + 1]]
    most = int(period / road.scale)
    least = max(*loads, *(loads[2 * stage] + road.second_half[stage] for stage in stages))
    lengths = (least + (most - least) * part // NUM_LENGTHS for part in range(NUM_LENGTHS + 1))
    for length in dict.fromkeys(lengths) if most > least else ():
        waits = one_f_one_b.delays(loads, length)[::2]
        for place in ("behind", "before", "longer"):
            begins: dict[Key, int] = {}
            start = 0
            for stage, (group, fill) in enumerate(waits):
                begins["F", stage, 0] = start
                end = start + (group - 1) * length + fill
                first = end - road.first_half[stage]
                begins["I" if road.may_split[stage] else "B", stage, 0] = first
                if road.may_split[stage]:
                    till_forward = (start - end) % length
                    idle = length - loads[2 * stage] - till_forward
                    is_behind = place == "behind" or (place == "longer" and till_forward >= idle)
                    begins["W", stage, 0] = end if is_behind else first + length - road.second_half[stage]
                start += road.forward[stage] + sum(road.one_way[stage : stage + 1])
            yield Orders(length, 1, begins, road.forward, road.backward, road.first_half)


def _joined(pattern: CyclicPattern, orders: Orders) -> CyclicPattern:
    """Return the pattern with whole backwards in the stages where that makes it no longer and no larger."""
    road = pattern.road
    for stage in range(road.num_stages):
        begins = dict(orders.begins)
        if ("I", stage, 0) not in begins:
            continue
        for number in range(road.number):
            begins["B", stage, number] = begins.pop(("I", stage, number))
            del begins["W", stage, number]
        whole = Orders(orders.length, orders.number, begins, orders.forward, orders.backward, orders.first_half)
        found = retimed(road, whole)
        if found is not None and found.length <= pattern.length and found.fits():
            pattern, orders = found, whole
    return pattern


def _spread(num_stages: int, size: int) -> list[tuple[int, ...]]:
    """Return places of the stages among ``size`` ideal ones: the last ones, or spread over all of them."""
    last = tuple(range(size - num_stages, size))
    if num_stages == 1 or size == num_stages:
        return [last]
    even = tuple(round(stage * (size - 1) / (num_stages - 1)) for stage in range(num_stages))
    return list(dict.fromkeys([even, last]))


def _keeping_more(pattern: CyclicPattern, orders: Orders) -> CyclicPattern | None:
    """Keep what need not be recomputed, as long as the pattern gets shorter; None where it does not fit."""
    if not pattern.fits():
        return None
    best, road = pattern, pattern.road
    while True:
        shorter = None
        for stage in busiest_stages(best):
            for orders_ in _keeping_one(orders, stage):
                found = retimed(road, orders_, best.period)
                if found is not None and found.fits():
                    shorter, orders = found, orders_
                    break
            if shorter:
                break
        if shorter is None:
            return best
        best = shorter


def _keeping_one(orders: Orders, stage: int) -> Iterator[Orders]:
    """Yield the orders in which a stage keeps one micro-batch more, the one that is there shortest first."""
    again = [key for key in orders.begins if key[0] == "R" and key[1] == stage]
    for key in sorted(
        again, key=lambda key: orders.begins["B", stage, key[2]] - orders.begins["f", stage, key[2]]
    ):
        begins = dict(orders.begins)
        del begins[key]
        begins["F", stage, key[2]] = begins.pop(("f", stage, key[2]))
        yield Orders(orders.length, orders.number, begins, orders.forward, orders.backward)


def _solved(
    problem: Problem, placement: Placement, period: Fraction, deadline: Deadline
) -> Iterator[CyclicPattern]:
    """Yield what the constraint program finds, for one micro-batch and for more."""
    if not is_installed():
        return
    for number in range(1, MOST_NUMBER + 1 if problem.per_micro_batch else 2):
        road = CyclicRoad(problem, placement, number)
        if road.num_stages * number * 3 > MOST_OPERATIONS or deadline.passed():
            return
        program = CyclicProgram(road, recomputes=problem.per_micro_batch and any(road.may_recompute))
        limit = int(period * number / road.scale)
        solved = program.solve(limit, min(MOST_SECONDS, deadline.remaining_seconds()))
        found = solved.orders and retimed(road, solved.orders)
        if solved.orders and found and found.fits() and found.period < period:
            period = found.period
            yield _joined(found, solved.orders)
