"""The search for a step whose backwards are two operations where that helps: allocations, orders, and the proof.

It begins with a step of whole backwards, and looks for shorter ones, of

- the allocation of that step; contiguous partitions, those balanced for several memories; interleaved allocations,
  in turn and there and back (``interleaving.py``), balanced over the devices. Those of the least bound come first;
- the rules of ``split_rules.py``, with depths from 1F1B's to what memory allows, other limits on the second halves
  that wait, and other patience; and the orders of the given step with each backward in two;
- changes of single operations of the best orders, at random, as long as they do not make the step longer.

At last backwards whose halves follow one another become one operation again, unless that makes the step longer.
The result is never slower than the step of whole backwards. Steps that are small (``exact_step.py``) are then
solved exactly, over all allocations and orders, by a constraint program (``split_program.py``).

Method: list scheduling and hill climbing with a simulation; not in the papers. Cost: simulations of at most
``MOST_OPERATIONS`` operations for rules, and a half as many for changes, or until the deadline.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Step
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.modulo_scheduling import early_pattern
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road
from deepspeed_partition.planner.solvers.step.exact_step import ExactStep, Open, is_small
from deepspeed_partition.planner.solvers.step.interleaving import balanced, interleaved
from deepspeed_partition.planner.solvers.step.order_program import Solved, bytes_before_backwards
from deepspeed_partition.planner.solvers.step.orders import megatron_limits
from deepspeed_partition.planner.solvers.step.split_bounds import split_lower_bound
from deepspeed_partition.planner.solvers.step.split_engine import SplitEngine, SplitOrders, SplitRun
from deepspeed_partition.planner.solvers.step.split_program import SplitProgram
from deepspeed_partition.planner.solvers.step.split_rules import UNLIMITED, SplitRule
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, WaitInCircleError

MOST_OPERATIONS = 400_000
"""Most operations that are simulated for the rules."""
MOST_INTERLEAVED = 60
"""Most interleaved allocations that are looked at."""
PATIENCE = (0.0, 0.5, 1.0)
WAITING = (0, 1, 2, 4, UNLIMITED)
NUM_CHANGED = 3
"""Number of allocations whose best orders are changed operation by operation."""
MOST_STAGES_OF_PROGRAM = 10
"""Most stages for whose steady state the integer program is asked."""


def shorter_split_step(
    problem: Problem, answer: Answer, placements: Sequence[Placement], given: Step, placement: Placement
) -> Step:
    """Return the shortest step that is found with halves, with its lower bound; ``given`` where none is shorter.

    Args:
        answer: of the solver; it says whether devices may have several stages.
        placements: contiguous partitions that are worth a look, with what they recompute.
        given: a step of whole backwards.
        placement: its allocation.
    """
    search = SplitSearch(problem, given, placement)
    every = [placement, *placements]
    if answer.step_search == "any":
        every += _interleaved(problem)
    search.search(list(dict.fromkeys(every)))
    best = search.step() or replace(given, bound=0)
    if answer.steps and is_small(problem, contiguous=answer.step_search == "contiguous"):
        small = replace(answer, steps=(best,))
        exact = ExactSplitStep(problem, small, installed=is_installed())
        exact.run()
        return replace(exact.best, bound=exact.bound)
    return best


def _interleaved(problem: Problem) -> Iterator[Placement]:
    """Yield interleaved allocations, there and back as well as in turn, as they are and balanced."""
    ended = problem.deadline.passed
    for number, placement in enumerate(interleaved(problem, ended)):
        if number >= MOST_INTERLEAVED or ended():
            return
        yield placement
        yield balanced(problem, placement, ended)


class SplitSearch:
    """Search for the shortest step with halves.

    Args:
        given: a step of whole backwards; only shorter ones are found.
        placement: its allocation.
    """

    def __init__(self, problem: Problem, given: Step, placement: Placement) -> None:
        assert problem.num_micro_batches is not None
        self.problem, self.m = problem, problem.num_micro_batches
        self.given, self.first = given, placement
        self.best_ticks = given.ticks
        self.found: dict[Placement, tuple[int, SplitOrders]] = {}
        """Shortest step of each allocation, with its orders."""
        self.engines: dict[Placement, SplitEngine] = {}
        self.left = MOST_OPERATIONS

    def search(self, placements: Sequence[Placement]) -> None:
        """Try allocations, the most promising first, and improve on the best."""
        m = self.m
        bounds: list[tuple[int, int, Placement]] = []
        for number, placement in enumerate(placements):
            if number and self.problem.deadline.passed():
                break
            if not self.problem.allows(placement):
                continue
            engine = self.engine(placement)
            bound = engine.least_ticks(m)
            if engine.splits_any and bound < self.best_ticks and min(engine.rooms) >= 0:
                bounds.append((bound if placement != self.first else 0, number, placement))
        for bound, _, placement in sorted(bounds, key=lambda each: each[:2]):
            if self._ended() or (bound >= self.best_ticks):
                break
            self.try_rules(placement)
        self.left = MOST_OPERATIONS // 2
        for placement in sorted(self.found, key=lambda each: self.found[each][0])[:NUM_CHANGED]:
            self.change(placement, self.left * 2 // 3)
        for placement in sorted(self.found, key=lambda each: self.found[each][0])[:1]:
            self._join_all(placement)

    def engine(self, placement: Placement) -> SplitEngine:
        if placement not in self.engines:
            self.engines[placement] = SplitEngine(self.problem, placement)
        return self.engines[placement]

    def step(self) -> Step | None:
        """Return the shortest step that has a steady state; None where none is shorter than the given one."""
        for placement in sorted(self.found, key=lambda each: self.found[each][0]):
            ticks, orders = self.found[placement]
            steady = self._steady(placement)
            if steady is not None and ticks < self.given.ticks:
                named: tuple[Order, ...] = self.engine(placement).in_plan(orders)
                return Step(steady, named, ticks, placement.recomputed)
        return None

    def _steady(self, placement: Placement) -> Cuts | Pattern | None:
        if placement == self.first:
            return self.given.steady
        if placement.is_contiguous:
            return placement.cuts if min(self.engine(placement).most_in_flight) > 0 else None
        road, pattern = Road(self.problem, placement), None
        if len(placement.devices) <= MOST_STAGES_OF_PROGRAM:
            pattern = ilp.schedule(road, None, self.problem.deadline).pattern
        return early_pattern(road, self.problem.deadline) if pattern is None else pattern

    def _ended(self) -> bool:
        return self.left <= 0 or self.problem.deadline.passed()

    # Rules

    def try_rules(self, placement: Placement) -> None:
        """Try the rules on an allocation, and on that of the given step its orders in halves, too."""
        engine = self.engine(placement)
        if placement == self.first:
            self._attempt_orders(placement, engine.in_two(positions_of(engine, self.given.orders)))
        rules = list(self._rules(placement))
        for rule in rules:
            if self._ended():
                return
            self.left -= 3 * engine.num_stages * self.m
            most = min(self.best_ticks, self.found.get(placement, (self.best_ticks, ()))[0]) - 1
            try:
                run = engine.simulate(self.m, rule.choice(engine, self.m), most)
            except WaitInCircleError:
                continue
            self._keep(placement, run)

    def _rules(self, placement: Placement) -> Iterator[SplitRule]:
        engine, m = self.engine(placement), self.m
        num_stages = engine.num_stages
        if placement.is_contiguous:
            usual = [range(num_stages, 0, -1), range(2 * num_stages - 1, 0, -2), [m] * num_stages]
            usual[2:2] = [[depth + 1 for depth in usual[0]], [depth + 2 for depth in usual[0]]]
            choices = [(tuple(min(m, each) for each in depths), 0) for depths in usual]
        else:
            num_devices = engine.num_devices
            choices = [((m,) * num_stages, 0)]
            for more in (0, 1, 2):
                choices.append((tuple(min(m, num_stages - stage + more) for stage in range(num_stages)), 0))
            for group in dict.fromkeys((min(num_devices, m), m, 1)):
                limits = megatron_limits(placement.devices, group)
                choices += [(limits, group), (tuple(limit + num_devices for limit in limits), group)]
        if self.problem.flushes:
            choices = [(tuple(max(each, *self.problem.flushes) for each in depths), 0) for depths, _ in choices]
        for (depths, group), waiting, patience in product(dict.fromkeys(choices), WAITING, PATIENCE):
            if waiting or not patience:
                yield SplitRule(depths, waiting, patience, group)

    def _attempt_orders(self, placement: Placement, orders: SplitOrders) -> None:
        engine = self.engine(placement)
        self.left -= 3 * engine.num_stages * self.m
        self._keep(placement, engine.run_orders(self.m, orders))

    def _keep(self, placement: Placement, run: SplitRun | None) -> bool:
        """Take a run where it is the shortest of its allocation and has room; return whether it is."""
        if run is None or (placement in self.found and run.ticks >= self.found[placement][0]):
            return False
        if max(self.engine(placement).split_peaks(run)) > self.problem.platform.memory_bytes:
            return False
        self.found[placement] = run.ticks, run.orders
        self.best_ticks = min(self.best_ticks, run.ticks)
        return True

    # Single operations

    def change(self, placement: Placement, until: int) -> None:
        """Change the orders of an allocation one operation at a time, as long as they get no longer."""
        engine, pick = self.engine(placement), random.Random(0)
        memory = self.problem.platform.memory_bytes
        ticks, orders = self.found[placement]
        least = engine.least_ticks(self.m)
        while self.left > until and ticks > least and not self.problem.deadline.passed():
            self.left -= 3 * engine.num_stages * self.m
            changed = _changed(orders, pick, engine.num_stages)
            run = None if changed is None else engine.run_orders(self.m, changed, ticks)
            if run is not None and max(engine.split_peaks(run)) <= memory:
                ticks, orders = run.ticks, run.orders
                self._keep(placement, run)

    def _join_all(self, placement: Placement) -> None:
        """Make one operation of halves that follow one another, unless that makes the step longer or larger."""
        engine, memory = self.engine(placement), self.problem.platform.memory_bytes
        ticks, orders = self.found[placement]
        for stage in range(engine.num_stages):
            joined = _joined(orders, stage, engine)
            if joined == orders or self.problem.deadline.passed():
                continue
            run = engine.run_orders(self.m, joined, ticks)
            if run is not None and max(engine.split_peaks(run)) <= memory:
                ticks, orders = run.ticks, joined
        self.found[placement] = ticks, orders


def positions_of(engine: StepEngine, orders: Sequence[Order]) -> list[tuple[int, ...]]:
    """Return the orders of a plan as positions, for the devices that have stages."""
    position = {name: index for index, name in enumerate(engine.names)}
    return [tuple(position[name] for name, _ in order) for order in orders[: engine.num_devices]]


def _changed(orders: SplitOrders, pick: random.Random, num_stages: int) -> SplitOrders | None:
    """Return orders in which one operation of a device is moved by a few places; None where it must not be."""
    place = pick.randrange(len(orders))
    order = list(orders[place])
    if len(order) < 2:
        return None
    at = pick.randrange(len(order))
    code = order.pop(at)
    to = min(len(order), max(0, at + pick.choice((-3, -2, -1, 1, 2, 3))))
    passed = order[min(at, to) : max(at, to)]
    if code in passed:
        return None
    first, last = 2 * num_stages, 3 * num_stages
    stage = code - first if first <= code < last else first - 1 - code
    if code >= num_stages and {first + stage, first - 1 - stage} & set(passed) and code < last:
        # The halves of one stage keep their order; what does not matter is found by other moves.
        return None
    order.insert(to, code)
    return (*orders[:place], tuple(order), *orders[place + 1 :])


def _joined(orders: SplitOrders, stage: int, engine: SplitEngine) -> SplitOrders:
    """Return orders in which the halves of a stage's backward that follow one another are one operation.

    Second halves take the micro-batches in the order of the first ones, so these are the same micro-batch's where
    no second half is open before.
    """
    first, second, whole = engine.backs[stage], 2 * engine.num_stages + stage, 3 * engine.num_stages + stage
    if engine.later[stage] is None:
        return orders
    place = engine.device[stage]
    found: list[int] = []
    still_open = 0
    for code in orders[place]:
        if code == second and still_open == 1 and found and found[-1] == first:
            found[-1] = whole
        else:
            found.append(code)
        still_open += (code == first) - (code == second)
    return (*orders[:place], tuple(found), *orders[place + 1 :])


class ExactSplitStep(ExactStep):
    """Search through every allocation of a small step with halves."""

    def _lower_bound(self) -> int:
        return split_lower_bound(self.problem, contiguous=self.contiguous)

    def _engine(self, placement: Placement) -> StepEngine:
        return SplitEngine(self.problem, placement)

    def _bound(self, engine: StepEngine, *, keeps_all: bool) -> int:
        assert isinstance(engine, SplitEngine)
        if keeps_all:
            for stage in range(engine.num_stages):
                least = min(engine.stash[stage], engine.weight_stash[stage])
                if least > self.memory - bytes_before_backwards(engine, engine.device[stage]):
                    return self.best.ticks
        return engine.least_ticks(self.num_micro_batches)

    def _solve(self, each: Open, *, recomputes: bool = False, greedy: bool = False) -> Solved:
        assert isinstance(each.engine, SplitEngine)
        if greedy or self.deadline.passed():
            return Solved(0, None)
        m, flushes = self.num_micro_batches, self.problem.flushes
        program = SplitProgram(each.engine, m, self.memory, flushes, recomputes=recomputes)
        return program.solve(self.best.ticks, self.deadline)

    def _take(self, each: Open, solved: Solved) -> bool:
        if solved.orders is None:
            return solved.bound >= self.best.ticks
        engine = each.engine
        assert isinstance(engine, SplitEngine)
        run = engine.run_orders(self.num_micro_batches, solved.orders)
        if run is None or max(engine.split_peaks(run)) > self.memory:
            return False
        if run.ticks < self.best.ticks:
            search = SplitSearch(self.problem, self.best, each.placement)
            search.found[each.placement] = run.ticks, run.orders
            search._join_all(each.placement)
            steady = self._steady_of(each)
            if steady is not None:
                ticks, orders = search.found[each.placement]
                self.best = Step(steady, engine.in_plan(orders), ticks)
        return self.best.ticks <= solved.bound
