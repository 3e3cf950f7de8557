"""The search for a step in which stages keep some micro-batches and recompute others, of contiguous partitions.

It begins with a step that treats all micro-batches alike, and looks for shorter ones:

- windows of the best pattern (``per_micro_batch.py``): m of its micro-batches whose backwards follow one another,
  begun and ended as early as their order allows. So the middle of a long step is the pattern, which is optimal for
  identical stages. What it keeps overtakes what it recomputes, so it takes more places for messages than others;
- lists, made in time: a free device runs a backward that is ready, else recomputes for the next one, else runs the
  next forward, which keeps where there is room and which may be ahead of the backwards by so many. All forwards,
  and all backwards, take the micro-batches in their order. The numbers of micro-batches ahead and of stashes that
  are left for recomputation are tried out;
- from the best of them, by hill climbing: one micro-batch more is kept, or two neighbours change places;
- where backwards may be two operations, the best of them with the second halves in the gaps of its devices;
- a constraint program (``micro_batch_program.py``), where the operations are few and OR-tools is installed: no
  order of that partition is shorter then.

Every order is simulated (``micro_batch_orders.py``). Nothing is proved of a step but what meets the lower bound.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.contiguous.per_micro_batch import best_pattern
from deepspeed_partition.planner.solvers.interface import Answer, Problem, Step
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicPattern
from deepspeed_partition.planner.solvers.step.micro_batch_orders import Entry, StepRoad
from deepspeed_partition.planner.solvers.step.micro_batch_program import MicroBatchProgram

MOST_CHANGES = 400
"""Most changes of the best order that are tried for a partition."""
MOST_STARTS = 25
"""Most windows of a pattern that are tried."""
STEADY_SHARE = 0.2
"""The part of the time that is left for a pattern."""
MOST_OPERATIONS = 150
"""Most forwards, backwards and recomputations of a step that the constraint program looks at."""
MOST_SECONDS, SHARE = 20.0, 0.5
"""Most seconds of the constraint program, and the most of those that are left."""
GAPS = (1.0, 0.5, 0.01)
"""Gaps of a device that a second half is put into, in its own length."""
Orders = tuple[tuple[Entry, ...], ...]


def with_buffers(problem: Problem, comm_buffers: int) -> Problem:
    """Return the problem with so many buffers at each end of a boundary."""
    if comm_buffers == problem.platform.comm_buffers:
        return problem
    platform = replace(problem.platform, comm_buffers=comm_buffers)
    times = TimedChain(problem.chain, platform)
    recomputation = problem.recomputation and Recomputation(times, problem.recomputation.mode)
    table = StageTable(problem.chain, platform)
    return replace(problem, platform=platform, times=times, table=table, recomputation=recomputation)


def shorter_step(problem: Problem, answer: Answer, placements: Sequence[Placement], ticks: int) -> Step | None:
    """Return the shortest step that is found, if it is shorter than ``ticks``.

    Args:
        answer: the best plans that treat all micro-batches alike.
        placements: contiguous partitions, with what their stages recompute of all micro-batches.
    """
    steady = replace(problem, num_micro_batches=None, deadline=problem.deadline.part(STEADY_SHARE))
    pattern = best_pattern(steady, answer, Fraction(problem.longest_period))
    if pattern is not None:
        placements = list(dict.fromkeys([pattern.placement, *placements]))
    best: Step | None = None
    for placement in placements:
        if problem.deadline.passed():
            break
        search = _StepSearch(problem, placement, pattern if pattern and pattern.placement == placement else None)
        found = search.run(ticks if best is None else best.ticks)
        if found is not None:
            orders, shorter = found
            best = Step(placement.cuts, search.road.named(orders), shorter, placement.recomputed)
    return best


@dataclass(frozen=True, slots=True)
class _Rule:
    """What makes a list of operations."""

    ahead: tuple[int, ...]
    """Most forwards ahead of the backwards, for each stage."""
    left: int
    """Stashes that are left for recomputation while some micro-batch is to be recomputed."""
    is_eager: bool
    """Whether a micro-batch may be recomputed before the gradient has come."""


class _StepSearch:
    def __init__(self, problem: Problem, placement: Placement, pattern: CyclicPattern | None) -> None:
        assert problem.num_micro_batches is not None
        self.pattern = pattern
        self.road = StepRoad(problem, placement)
        self.num_micro_batches = problem.num_micro_batches
        self.deadline = problem.deadline
        self.best: Orders | None = None

    def run(self, ticks: int) -> tuple[Orders, int] | None:
        """Return the best orders that are shorter than ``ticks``, and how long they take."""
        road = self.road
        self.ticks = ticks
        if any(road.slots_of(stage) < 1 for stage in range(road.num_stages)):
            return None
        seen: set[Orders] = set()
        nearest: tuple[int, Orders] | None = None
        for orders in self._first_orders():
            if self.deadline.passed():
                break
            if orders is None or orders in seen:
                continue
            seen.add(orders)
            found = road.run(orders, None if nearest is None else nearest[0])
            if found is not None and road.fits(orders):
                nearest = found, orders
        if nearest is not None:
            self._take(nearest[1], nearest[0])
            self._climb(*nearest)
        self._solve()
        if self.best is not None and any(road.may_split):
            self._split(self.best)
        return None if self.best is None else (self.best, self.ticks)

    def _take(self, orders: Orders, ticks: int) -> None:
        if ticks < self.ticks:
            self.best, self.ticks = orders, ticks

    def _first_orders(self) -> Iterator[Orders | None]:
        """Yield orders to begin with; None for those that cannot go on."""
        if self.pattern is not None:
            yield from _windows(self.pattern, self.num_micro_batches)
        for rule in self._rules():
            yield _listed(self.road, self.num_micro_batches, rule)

    def _rules(self) -> Iterator[_Rule]:
        road, m = self.road, self.num_micro_batches
        depths = range(road.num_stages, 0, -1)
        kept = [min(m, road.slots_of(stage)) for stage in range(road.num_stages)]
        for more, left, is_eager in product((0, 1, 2, 3, 4, 6, 8, m), (1, 2), (True, False)):
            enough = tuple(
                min(m, max(most, min(depth, most + more))) for most, depth in zip(kept, depths, strict=True)
            )
            yield _Rule(enough, left, is_eager)
            yield _Rule(tuple(min(m, most + more) for most in kept), left, is_eager)

    def _climb(self, ticks: int, orders: Orders) -> None:
        """Change the orders one by one, as long as they get no longer."""
        pick = random.Random(0)
        for _ in range(MOST_CHANGES):
            if self.deadline.passed():
                return
            changed = _changed(orders, pick)
            if changed is None or not self.road.fits(changed):
                continue
            found = self.road.run(changed, ticks + 1)
            if found is not None:
                ticks, orders = found, changed
                self._take(orders, ticks)

    def _split(self, orders: Orders) -> None:
        """Try orders with backwards in two halves: one behind the other, and the second ones in gaps."""
        road = self.road
        for least_gap in (None, *GAPS):
            if self.deadline.passed():
                return
            split = _in_halves(road, orders, least_gap)
            found = road.run(split, self.ticks)
            if found is not None and road.fits(split):
                self._take(split, found)

    def _solve(self) -> None:
        road, m = self.road, self.num_micro_batches
        if not is_installed() or 3 * road.num_stages * m > MOST_OPERATIONS:
            return
        deadline = Deadline(MOST_SECONDS, within=self.deadline.part(SHARE))
        solved = MicroBatchProgram(road, m).solve(self.ticks, deadline.remaining_seconds())
        if solved.orders is None:
            return
        found = road.run(solved.orders)
        if found is not None and road.fits(solved.orders):
            self._take(solved.orders, found)


def _windows(pattern: CyclicPattern, m: int) -> Iterator[Orders]:
    """Yield what a pattern runs on m micro-batches whose backwards follow one another on the first device.

    So the drain has no gap where a micro-batch would be that entered later. Forwards that keep nothing, which the
    pattern runs long before, are the stock with which the step begins.
    """
    road, length = pattern.road, pattern.length
    back = {key[2]: begin for key, begin in pattern.begins.items() if key[0] in "BI" and key[1] == 0}
    in_order = sorted(back, key=lambda number: back[number] % length)
    for first in range(0, road.number, -(-road.number // MOST_STARTS)):
        lists: list[list[tuple[int, Entry]]] = [[] for _ in range(road.num_stages)]
        for number in range(m):
            turn, place = divmod(first + number, road.number)
            name = in_order[place]
            later = (turn - back[name] // length) * length
            for kind, stage, each in pattern.begins:
                if each == name and kind[0] != "S":
                    lists[stage].append((pattern.begins[kind, stage, each] + later, (kind, number)))
        yield tuple(tuple(entry for _, entry in sorted(each)) for each in lists)


def _in_halves(road: StepRoad, orders: Orders, least_gap: float | None) -> Orders:
    """Return orders with each backward in two halves, where a stage has some.

    Args:
        least_gap: put a second half before an operation that waits for so many times as long, or that has no room
            beside what second halves hold; None: behind its first half.
    """
    first = tuple(
        tuple(
            ("I" if kind == "B" and road.may_split[stage] else kind, number)
            for kind, number in order
            if kind != "W"
        )
        for stage, order in enumerate(orders)
    )
    begins = road.begins(first)
    result = []
    for stage, order in enumerate(first):
        made: list[Entry] = []
        waiting: list[int] = []
        ended = 0
        for kind, number in order:
            role = {"f": "F", "I": "B"}.get(kind, kind)
            begin = begins[role, stage, number]
            while waiting and (
                (least_gap is not None and begin - ended >= least_gap * road.second_half[stage])
                or road.peak(stage, [*made, (kind, number)]) > road.room(stage)
            ):
                made.append(("W", waiting.pop(0)))
                ended += road.second_half[stage]
            made.append((kind, number))
            ended = max(ended, begin) + road.duration(kind, stage)
            if kind == "I" and least_gap is None:
                made.append(("W", number))
            elif kind == "I":
                waiting.append(number)
        result.append((*made, *(("W", number) for number in waiting)))
    return tuple(result)


def _changed(orders: Orders, pick: random.Random) -> Orders | None:
    """Return orders with one micro-batch more kept, or two neighbours exchanged; None where these must not be."""
    stage = pick.randrange(len(orders))
    order = list(orders[stage])
    again = [number for kind, number in order if kind == "R"]
    if again and pick.random() < 0.5:
        number = pick.choice(again)
        order.remove(("R", number))
        order[order.index(("f", number))] = "F", number
    else:
        place = pick.randrange(len(order) - 1) if len(order) > 1 else 0
        one, other = order[place], order[min(place + 1, len(order) - 1)]
        both = one[0] + other[0]
        if one[1] == other[1] or set(both) <= set("BI") or set(both) <= set("Ff"):
            return None
        order[place : place + 2] = other, one
    return (*orders[:stage], tuple(order), *orders[stage + 1 :])


def _listed(road: StepRoad, m: int, rule: _Rule) -> Orders | None:
    """Return lists that are made in time; None where no device can go on."""
    num_stages = road.num_stages
    orders: list[list[Entry]] = [[] for _ in range(num_stages)]
    free = [0] * num_stages
    arrived = [[0] * m if stage == 0 else [] for stage in range(num_stages)]
    """When the input of each micro-batch is there, for each stage."""
    returned: list[list[int]] = [[] for _ in range(num_stages)]
    """When the gradient is there; that of the last stage with the forward."""
    forwards, backwards = [0] * num_stages, [0] * num_stages
    held: list[set[int]] = [set() for _ in range(num_stages)]

    def choices(stage: int) -> Iterator[tuple[int, int, str, int]]:
        """Yield what a device could do: when, its rank, the operation and its micro-batch."""
        now, back = free[stage], backwards[stage]
        gradient = returned[stage][back] if back < len(returned[stage]) else None
        if back < forwards[stage]:
            if back in held[stage]:
                if gradient is not None:
                    yield max(now, gradient), 0, "B", back
            elif road.has_room(stage, len(held[stage]) + 1, forwards[stage] - back - len(held[stage]) - 1):
                if gradient is not None:
                    yield max(now, gradient - road.duration("R", stage)), 1, "R", back
                elif rule.is_eager:
                    yield now, 3, "R", back
        number = forwards[stage]
        if number < len(arrived[stage]) and number - back < rule.ahead[stage]:
            unheld = number - back - len(held[stage])
            left = rule.left if unheld else 0
            if road.has_room(stage, len(held[stage]) + 1 + left, max(0, unheld - left)):
                yield max(now, arrived[stage][number]), 2, "F", number
            elif road.may_recompute[stage] and road.has_room(stage, max(1, len(held[stage])), unheld + 1):
                yield max(now, arrived[stage][number]), 2, "f", number

    for _ in range(3 * m * num_stages):
        best = min(
            ((*choice, stage) for stage in range(num_stages) for choice in choices(stage)),
            default=None,
        )
        if best is None:
            break
        start, _, kind, number, stage = best
        end = free[stage] = start + road.duration(kind, stage)
        orders[stage].append((kind, number))
        if kind in "FR":
            held[stage].add(number)
        if kind in "Ff":
            forwards[stage] += 1
            if stage + 1 < num_stages:
                arrived[stage + 1].append(end + road.one_way[stage])
            else:
                returned[stage].append(end)
        elif kind == "B":
            backwards[stage] += 1
            held[stage].remove(number)
            if stage:
                returned[stage - 1].append(end + road.one_way[stage - 1])
    if any(count < m for count in backwards):
        return None
    return tuple(map(tuple, orders))
