"""Search for orders by groups and boundaries together: allocations in turns, and what leads to shorter steps.

Which boundaries are the best depends on the order, and which order on the boundaries: with groups of a third of
the micro-batches, and first devices far ahead of the last ones, a step may be 3 % shorter than any that equal
stages lead to. So for allocations in turns, with 1 to ``MOST_TURNS`` stages on each device, many orders by groups
are tried, and in each of them many boundaries at once (``many_cuts.py``):

1. Boundaries of the best allocations so far are moved under their own orders.
2. Groups of a half, a third, or a quarter of the micro-batches, of all, or of as many as there are devices; each
   device may be ``slope`` micro-batches further ahead than the next one (Megatron-LM: 2). Slow links ask for more.
3. Of the best of these, the size of the group and the limits are changed, and boundaries follow.

Boundaries move by a random walk of many partitions side by side, which ends where the real step is simulated;
where partitions are few, all are met. Where memory is short and layers may be recomputed, so does what each stage
recomputes (``many_ways.py``).

Method: own; simulated annealing (S. Kirkpatrick, C. Gelatt and M. Vecchi, 1983). Cost: ``MOST_EVENTS`` operations
and transfers on vectors, some seconds; less where steps are short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from math import inf, log
from random import Random

import numpy as np

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.step.annealing import FEWEST_LAYERS, LITTLE_IS_LEFT
from deepspeed_partition.planner.solvers.step.fewest_recomputed import FewestRecomputed, rows_of
from deepspeed_partition.planner.solvers.step.many_cuts import Integers, ManyCuts
from deepspeed_partition.planner.solvers.step.many_ways import ManyWays, WaysOfStages
from deepspeed_partition.planner.solvers.step.orders import GroupRule, Rule
from deepspeed_partition.planner.solvers.step.step_search import Outcome, StepSearch, step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, StepRun, WaitInCircleError

MOST_EVENTS = 3_000_000
"""Most operations and transfers on vectors."""
MOST_STEPS, FEWEST_STEPS = 4000, 200
"""Number of steps whose operations and transfers suffice, and the least that are worth a search; a step has two
stages for each device."""
NUM_SIDE_BY_SIDE = 64
"""Number of partitions of a walk."""
NUM_MOVES, NUM_MOVES_AFTER = 30, 20
"""Numbers of moves of a walk: for a new order, and for one that was changed."""
NUM_MOVES_ALONE = 100
"""Number of moves of a walk under an order that stays as it is."""
TEMPERATURE, TEMPERATURE_AFTER = 0.01, 0.003
"""Ticks by which a step may become longer at first, in the mean, over those of the step."""
EVENTS_OF_STAGE = 1000
"""Operations and transfers that take as long as what the ways to recompute a stage take, where it is met first."""
MOST_TURNS = 4
"""Most stages of a device."""
SLOPES = (2, 3, 5)
"""Numbers of micro-batches that a device may be ahead of the next one."""
SHARE_OF_ORDERS = 0.6
"""Part of all operations for first orders; the rest is for changed ones."""
NUM_CHANGED = 3
"""Number of orders that are changed."""
MOST_TIMES = 3
"""Most times that all of this is done, with other draws, as long as the step becomes shorter."""
NUM_LEADERS = 6
"""Number of allocations of other searches whose boundaries are moved."""
SEED = 2021


class GroupSearch:
    """Search for one problem; what it finds is remembered by ``search``.

    Args:
        ways: ways to recompute stages; None: nothing is recomputed.
    """

    def __init__(self, search: StepSearch, ways: WaysOfStages | None = None) -> None:
        assert not search.problem.flushes
        self.search, self.problem, self.m = search, search.problem, search.num_micro_batches
        self.ways = ways
        self.random, self.draws = Random(SEED), np.random.default_rng(SEED)
        of_step = 8 * self.problem.platform.num_devices * self.m
        self.most_events = min(MOST_EVENTS, MOST_STEPS * of_step)
        is_short = self.problem.chain.num_layers < FEWEST_LAYERS or self.problem.platform.num_devices == 1
        if is_short or self.most_events < FEWEST_STEPS * of_step:
            self.most_events = 0
        self.events_left: float = self.most_events

    def run(self, lower_bound: Callable[[], int]) -> None:
        """Search from the best allocations so far and from those in turns, as long as that shortens the step.

        Args:
            lower_bound: returns ticks than which no step is shorter: near to them nothing is done.
        """
        search = self.search
        is_whole = search.simulated == self.m  # of a longer step only the beginning is simulated
        for _ in range(MOST_TIMES if is_whole and self.most_events else 0):
            before = search.best
            if search.out_of_time() or before <= LITTLE_IS_LEFT * lower_bound():
                return
            self.events_left = self.most_events
            self._search()
            if search.best >= before:
                return

    def _search(self) -> None:
        """Move boundaries of the best allocations so far, try orders by groups, and change the best of these."""
        search = self.search
        self.move_boundaries()
        search.start_again()
        found: dict[tuple[int, int], tuple[float, Placement, GroupRule]] = {}
        least_left = (1 - SHARE_OF_ORDERS) * self.events_left
        for placement, rule in self._orders():
            if self.events_left <= least_left or search.out_of_time():
                break
            ticks, better = self._improve(placement, rule, NUM_MOVES, TEMPERATURE)
            kind = len(placement.devices), rule.group
            if kind not in found or ticks < found[kind][0]:
                found[kind] = ticks, better, rule
        for placement in self._leaders():
            known = search.found[placement]
            if isinstance(known.rule, GroupRule) and known.rule.at_once:  # no other order here is like these
                kind = len(placement.devices), known.rule.group
                if kind not in found or known.estimate < found[kind][0]:
                    found[kind] = known.estimate, placement, known.rule
        best = sorted(found.values(), key=lambda each: each[0])[:NUM_CHANGED]
        for number, (ticks, placement, rule) in enumerate(best):
            self._change(ticks, placement, rule, self.events_left * (len(best) - number - 1) / len(best))

    def move_boundaries(self) -> bool:
        """Move boundaries of the best allocations under their own orders; return whether the step is shorter."""
        search = self.search
        if search.simulated < self.m or not self.events_left:
            return False
        search.start_again()
        before = search.best
        for placement in self._leaders():
            if not search.ended():
                self._improve(placement, search.found[placement].rule, NUM_MOVES_ALONE, TEMPERATURE_AFTER)
        return search.best < before

    def _leaders(self) -> list[Placement]:
        """Return the best allocations whose boundaries can be moved."""
        leaders = (
            each
            for each in self.search.leaders()
            if len(each.devices) > 1 and (self.ways is not None or not each.recomputed)
        )
        return list(islice(leaders, NUM_LEADERS))

    def _orders(self) -> Iterator[tuple[Placement, GroupRule]]:
        """Yield allocations in turns, with stages that take equally long, and orders by groups."""
        size, num_devices = self.problem.chain.num_layers, self.problem.platform.num_devices
        parts = {-(-self.m // parts) for parts in (1, 2, 3, 4)} | {min(num_devices, self.m)}
        for slope in SLOPES:
            for turns in range(1, MOST_TURNS + 1):
                if turns * num_devices >= size:
                    break
                placement = Placement.of(self._even(turns * num_devices), list(range(num_devices)) * turns)
                for group in sorted(parts) if turns > 1 else (1,):
                    ahead = [slope * (num_devices - 1 - place) for place in range(num_devices)]
                    limits = tuple((turns - 1) * group + 1 + each for each in ahead)
                    for alternates in (True, False) if turns == 1 else (True,):
                        yield placement, GroupRule(group, limits, alternates)

    def _even(self, num_stages: int) -> list[int]:
        """Return boundaries of stages that take about equally long."""
        compute, size = self.problem.times.compute, self.problem.chain.num_layers
        shares = compute[-1] * np.arange(1, num_stages) // num_stages
        cuts = [0, *(int(cut) for cut in np.abs(compute[None, :] - shares[:, None]).argmin(axis=1)), size]
        if all(left < right for left, right in pairwise(cuts)):
            return cuts
        return [size * index // num_stages for index in range(num_stages + 1)]

    def _change(self, ticks: float, placement: Placement, rule: GroupRule, least_left: float) -> None:
        """Change the group and the limits; longer steps are taken, too, and less and less so."""
        whole = self.events_left - least_left
        while self.events_left > least_left and not self.search.out_of_time():
            left = (self.events_left - least_left) / whole
            changed = self._changed(rule, is_contiguous=placement.is_contiguous)
            found, better = self._improve(placement, changed, NUM_MOVES_AFTER, TEMPERATURE_AFTER)
            if found < ticks - TEMPERATURE_AFTER * ticks * left**2 * log(1 - self.random.random()):
                ticks, placement, rule = found, better, changed

    def _changed(self, rule: GroupRule, *, is_contiguous: bool) -> GroupRule:
        draw, limits, group, alternates = self.random.random(), list(rule.limits), rule.group, rule.alternates
        change = self.random.choice((-2, -1, 1, 2))
        if draw < 0.15 and not is_contiguous:
            group = max(1, min(self.m, group + change))
        elif draw < 0.2:
            alternates = not alternates
        elif draw < 0.4:
            limits = [max(1, limit + change) for limit in limits]
        else:
            place = self.random.randrange(len(limits))
            limits[place] = max(1, limits[place] + self.random.choice((1, 2)) * change)
        return replace(rule, group=group, limits=tuple(limits), alternates=alternates)

    def _improve(
        self, placement: Placement, rule: Rule, num_moves: int, temperature: float
    ) -> tuple[float, Placement]:
        """Move boundaries under a rule; return the ticks of the better step, infinite where none fits."""
        search = self.search
        if self.ways is not None and not placement.recomputed:
            placement = self._recomputed(self.ways, placement, rule)
        engine = step_engine(self.problem, placement)
        run = self._run(engine, rule)
        if run is None:
            return inf, placement
        best, better = inf, placement
        if max(engine.peaks(run)) <= self.problem.platform.memory_bytes:
            best = run.ticks
        num_met = 0 if self.ways is None else self.ways.num_met
        many = ManyCuts(self.problem, engine, run) if self.ways is None else ManyWays(self.ways, engine, run)
        moved = self._walk(many, placement, num_moves, temperature)
        self.events_left -= num_moves * len(many.events)
        if self.ways is not None:
            self.events_left -= EVENTS_OF_STAGE * (self.ways.num_met - num_met)
        if moved is not None and search.run(moved, rule, inf if moved == placement else best) is Outcome.FITS:
            best, better = search.found[moved].estimate, moved
        return best, better

    def _run(self, engine: StepEngine, rule: Rule) -> StepRun | None:
        """Return the step under a rule; None where a limit is below what the order needs."""
        try:
            run = engine.run(self.m, rule.choice(engine, self.m))
        except WaitInCircleError:
            return None
        assert run is not None
        return run

    def _recomputed(self, ways: WaysOfStages, placement: Placement, rule: Rule) -> Placement:
        """Return an allocation with what an order makes it recompute; with all, where no choice fits."""
        engine = step_engine(self.problem, placement)
        run = self._run(engine, rule)
        if run is None:
            return placement
        rows = [rows_of(engine, place, tuple(order)) for place, order in enumerate(run.orders)]
        chosen = FewestRecomputed(ways.problem).choose(placement, engine, rows, [0] * engine.num_devices)
        if chosen is None:
            chosen = placement.recomputing(tuple(ways.blocks_of(stage)[-1] for stage, _ in placement.stages))
        return chosen

    def _walk(self, many: ManyCuts, start: Placement, num_moves: int, temperature: float) -> Placement | None:
        """Move boundaries of many partitions at once; return the best that are met, None where none fits.

        Where partitions are few, all are met.
        """
        every = many.every(num_moves * NUM_SIDE_BY_SIDE)
        if every is not None:
            return self._best_of(many, every)
        first = many.state(start)
        states = np.tile(first, (NUM_SIDE_BY_SIDE, 1))
        far = np.iinfo(np.int64).max
        ticks = np.where(many.fit(states), many.ticks(states), far).astype(float)
        scale = temperature * float(many.ticks(first[None])[0])
        best, found = float(far), None
        for move in range(num_moves):
            if self.search.out_of_time():  # a move takes up to 50 ms
                break
            proposed, are_allocations = many.moved(states, self.draws)
            proposed_ticks = np.where(many.fit(proposed), many.ticks(proposed), far)
            left = 1 - move / num_moves
            slack = -scale * left**2 * np.log(1 - self.draws.random(NUM_SIDE_BY_SIDE))
            taken = are_allocations & (proposed_ticks < ticks + slack)
            states[taken], ticks[taken] = proposed[taken], proposed_ticks[taken]
            least = int(ticks.argmin())
            if ticks[least] < best:
                best, found = float(ticks[least]), states[least].copy()
        return None if found is None else many.placement(found)

    def _best_of(self, many: ManyCuts, states: Integers) -> Placement | None:
        """Return the best of states; None where none fits."""
        best, found = inf, None
        for part in np.array_split(states, -(-len(states) // NUM_SIDE_BY_SIDE)):
            if self.search.out_of_time():
                break
            fitting = part[many.fit(part)]
            ticks = many.ticks(fitting) if len(fitting) else fitting
            if len(fitting) and ticks.min() < best:
                best, found = int(ticks.min()), fitting[ticks.argmin()]
        return None if found is None else many.placement(found)
