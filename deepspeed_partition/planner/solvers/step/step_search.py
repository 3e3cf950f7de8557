"""The shortest step of m micro-batches with overlapped transfers: boundaries, devices and orders together.

Candidates are compared by the simulated step (``step_simulator.py``), memory included; what is not simulated is
pruned by a bound that no order of an allocation beats. They are:

1. contiguous partitions: the best for the period, those of the baselines, for each number of stages the best by
   the bound and for DeepSpeed's own engine, and whatever gets better by moving one boundary, by a layer or by
   several; all where they are few;
2. each under 1F1B with a depth of its own for each stage: DeepSpeed's, that of 1F1B*, one that hides transfers
   (2 (P - s) - 1), all that memory allows (with room for all micro-batches: GPipe's flush), and what is reached
   from the best of these by changing single depths;
3. allocations with several stages on a device: those of the periodic search, in the order of their pattern and
   in eager orders with a limit on the micro-batches in flight of each stage, and what lies around the best one;
   interleaved ones, which ``interleaved_search.py`` searches;
4. at last, the orders of the best of all, changed operation by operation (``order_search.py``).

Nothing is proved, but the answer is never slower than any of the candidates: the periodic plan in its own order,
and DeepSpeed's 1F1B, deep 1F1B and GPipe's flush on any of those partitions where they fit. Steps that are too
long to be simulated so often are compared by the rhythm of their beginning; in full the last few and the periodic
plans.

Method: local search with a simulation; it is not in the papers. The baselines are those of DeepSpeed (1F1B),
GPipe (the flush) and the MadPipe paper, section 4 (the periodic plan). Cost: a simulated step takes time and
memory in O(m S) for S stages; the simulations of points 1 and 2, and of point 3 without
interleaving run ``MOST_OPERATIONS`` forwards and backwards each at most, interleaving 2.5 times as many, or end
with the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, combinations, islice, product
from math import ceil, comb, inf

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.memory import UNLIMITED
from deepspeed_partition.planner.solvers.interface import Cuts, Problem, Step
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import neighbours
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern import one_f_one_b as steady_1f1b
from deepspeed_partition.planner.solvers.pattern.modulo_scheduling import early_pattern
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road
from deepspeed_partition.planner.solvers.step.order_search import better_orders
from deepspeed_partition.planner.solvers.step.order_times import look_at
from deepspeed_partition.planner.solvers.step.orders import DepthRule, FixedRule, PatternRule, Rule, fixed_orders
from deepspeed_partition.planner.solvers.step.partition_candidates import (
    MOST_STAGES_WITH_RUNS,
    balanced_partitions,
    moved_boundaries,
    moved_runs,
    rival_partitions,
    strides,
)
from deepspeed_partition.planner.solvers.step.step_simulator import (
    StepEngine,
    StepRun,
    WaitInCircleError,
    in_order,
)
from deepspeed_partition.planner.solvers.uniform_recomputation import extra_ticks

MOST_OPERATIONS = 500_000
"""Most forwards and backwards that are simulated for contiguous partitions, and as many beyond: a few seconds
each."""
LONGEST_RUN = 128
"""Most micro-batches of a simulation, or three for each device: a longer step is extrapolated from its rhythm,
until the best are compared in full."""
FEW = 300
"""Number of partitions, or ways to give layers to devices, up to which all are tried."""
NUM_REFINED, NUM_FINALISTS, MOST_NEIGHBOURS = 20, 4, 100
"""Numbers of allocations whose depths are refined, and that are compared in full; neighbours of one that are
simulated."""
NUM_CENTRES = 3
"""Number of partitions whose neighbours are looked at."""
NUM_POLISHED, MOST_OPERATIONS_POLISHED, MOST_STEPS_POLISHED = 40, 600_000, 3000
"""Number of allocations whose orders are changed operation by operation; of operations, and of steps, run for
that."""
MOST_STAGES_OF_PROGRAM = 10
"""Most stages for whose steady state the integer program is asked: beyond, it seldom ends within seconds."""
SHARE_OF_LOOK = 6
"""Number of times that one pass over given orders is sooner done than their simulation."""
NEAR = 1.1
"""Factor of the best within which an allocation is remembered: with other depths it may become the best."""


def step_engine(problem: Problem, placement: Placement) -> StepEngine:
    """Return the simulator of an allocation, all-reduces included."""
    allreduce: list[int] = []
    if (problem.num_pipelines or 1) > 1:
        ticks = problem.times.clock.ticks
        allreduce = [ticks(seconds) for seconds in problem.allreduce_seconds(placement.cuts)]
    return StepEngine(
        problem.times,
        problem.table,
        placement.cuts,
        placement.devices,
        allreduce,
        problem.flushes,
        placement.recomputed,
    )


class Outcome(Enum):
    """Result of a simulation: shorter than asked for, not so, or in need of more memory than there is."""

    FITS = auto()
    TOO_SLOW = auto()
    TOO_LARGE = auto()


@dataclass(frozen=True, slots=True)
class _Found:
    estimate: float
    rule: Rule


class StepSearch:
    """Steps found so far, the best of each allocation."""

    def __init__(self, problem: Problem) -> None:
        assert problem.num_micro_batches is not None
        self.problem = problem
        self.num_micro_batches = problem.num_micro_batches
        # In a step with flushes, the beginning does not tell the rest.
        most = max(LONGEST_RUN, 3 * problem.platform.num_devices)
        self.simulated = self.num_micro_batches if problem.flushes else min(self.num_micro_batches, most)
        # Where more were in flight, the beginning would not show the memory that the rest needs.
        self.most_in_flight = most * 2 // 3 if self.simulated < self.num_micro_batches else self.num_micro_batches
        self.operations_left = MOST_OPERATIONS
        self.deadline = problem.deadline
        self.must_find = True
        """Whether the search goes on, whatever the time, until it has found a step."""
        self.engines: dict[Placement, StepEngine] = {}
        self.tried: set[Placement] = set()
        self.refined: set[Placement] = set()
        """Allocations that another search has refined."""
        self.found: dict[Placement, _Found] = {}
        self.by_name: dict[tuple[Placement, str], tuple[float, DepthRule]] = {}
        """Best estimate of each allocation in ticks, and its rule, by the name of the rule."""
        self.best = inf
        """Least estimate so far, in ticks."""
        self.last_complete: tuple[tuple[Placement, Rule], StepRun] | None = None
        self.certain: list[tuple[Placement, Rule]] = []
        """Periodic plans in their own order, which are compared in full whatever their estimates."""
        self.full_ticks: dict[tuple[Placement, Rule], int] = {}
        """Ticks of full steps that have been run already, and fit, of pairs in ``certain``."""
        self.others: list[tuple[Placement, Rule]] = []
        """Best of a search that was taken over, which are compared in full, too."""

    def search_contiguous(self, steady: Cuts) -> None:
        """Search the contiguous partitions; ``steady`` is that of the shortest period."""
        placement = Placement.contiguous(steady)
        if not self.problem.flushes:
            self.certain.append((placement, DepthRule("1F1B", self._of_steady_state(placement))))
        for cuts in rival_partitions(self.problem, steady, self.ended):
            if self.ended():
                return
            self.try_contiguous(Placement.contiguous(cuts))
        every = self.every_partition(FEW)
        if every:
            for placement in self.promising(map(Placement.contiguous, every)):
                self.try_contiguous(placement)
        else:
            for placement in self.promising(
                map(Placement.contiguous, balanced_partitions(self.problem, self.ended))
            ):
                self.try_contiguous(placement)
            contiguous = [placement for placement in self.leaders() if placement.is_contiguous]
            for placement in contiguous[:NUM_CENTRES]:
                self.descend(placement, lambda centre: moved_boundaries(centre, strides(centre)))
            best = next((placement for placement in self.leaders() if placement.is_contiguous), None)
            if best is not None and len(best.devices) <= MOST_STAGES_WITH_RUNS:
                self.descend(best, moved_runs)
        self.refine_leaders()

    def every_partition(self, most: int) -> list[Cuts]:
        """Return all contiguous partitions; none of them where there are more than ``most``."""
        size = self.problem.chain.num_layers
        counts = range(min(self.problem.constraints.max_stages, size))
        if sum(comb(size - 1, count) for count in counts) > most:
            return []
        return [(0, *inner, size) for count in counts for inner in combinations(range(1, size), count)]

    def start_again(self, share: float = 1) -> None:
        """Allow as many simulations as at the beginning, or a share of them."""
        self.operations_left = int(share * MOST_OPERATIONS)

    def adopt(self, other: StepSearch, chosen: Callable[[Placement], Placement]) -> None:
        """Take over the best of a search for the same step under a choice of recomputation.

        Args:
            chosen: returns an allocation of that search with the choice.
        """
        for placement in other.leaders()[:NUM_FINALISTS]:
            rule = other.found[placement].rule
            if not isinstance(rule, PatternRule):
                self.run(chosen(placement), rule, inf)
        self.certain += [
            (chosen(placement), rule) for placement, rule in other.certain if not isinstance(rule, PatternRule)
        ]

    def take_over(self, other: StepSearch) -> None:
        """Know all that a search for the same problem has found, which refined it as far as it could."""
        for placement, found in other.found.items():
            if placement not in self.found or found.estimate < self.found[placement].estimate:
                self.found[placement] = found
        for key, named in other.by_name.items():
            if named[0] < self.by_name.get(key, (inf, named[1]))[0]:
                self.by_name[key] = named
        self.tried |= other.tried
        self.refined.update(other.found)
        self.best = min(self.best, other.best)
        self.certain = list(dict.fromkeys([*self.certain, *other.certain]))
        self.others = [(each, other.found[each].rule) for each in other.leaders()[:NUM_FINALISTS]]

    def search_shared(self, patterns: Sequence[Pattern]) -> None:
        """Search allocations in which a device may have several stages, beginning with those of ``patterns``."""
        self.operations_left = MOST_OPERATIONS
        for pattern in patterns if not self.problem.flushes else ():  # they mix forwards and backwards
            rule = PatternRule(pattern)
            self.certain.append((pattern.placement, rule))
            self.run(pattern.placement, rule, inf)
        for pattern in patterns:
            self.try_shared(pattern.placement)
        if self.ended():
            return
        size, num_devices = self.problem.chain.num_layers, self.problem.platform.num_devices
        if num_devices ** (size - 1) <= FEW:
            owners = product(range(num_devices), repeat=size - 1)
            every = dict.fromkeys(Placement.of(range(size + 1), (0, *rest)) for rest in owners)
            for placement in self.promising(every):
                self.try_shared(placement)
        # Interleaved ones have a search of their own.
        short = (placement for placement in self.leaders() if len(placement.devices) < 2 * num_devices)
        for placement in islice(short, 1):
            self._refine(placement)
            self.descend(placement, lambda centre: neighbours(self.problem, centre))
        self.refine_leaders()

    def steps(self, patterns: Iterable[Pattern] = ()) -> Iterator[Step]:
        """Yield the steps that were found and fit, simulated in full, the shortest first."""
        known = {pattern.placement: pattern for pattern in patterns}
        memory = self.problem.platform.memory_bytes
        pairs = [(placement, self.found[placement].rule) for placement in self.leaders()]
        if self.simulated < self.num_micro_batches:
            pairs = self._in_full(list(dict.fromkeys([*pairs[:NUM_FINALISTS], *self.others, *self.certain])))
        for placement, rule in pairs:
            steady = known.get(placement)
            if self.peak_bytes(placement, rule) > memory:
                continue  # tensors piled up only after the part that was simulated
            if steady is None and not placement.is_contiguous:
                steady = self._steady(placement)
                if steady is None:
                    continue
            yield self.step(placement, rule, steady)

    def _steady(self, placement: Placement) -> Pattern | None:
        """Return a pattern of the steady state; None where there is no room for one."""
        road = Road(self.problem, placement)
        steady = None
        if len(placement.devices) <= MOST_STAGES_OF_PROGRAM:
            steady = ilp.schedule(road, None, self.problem.deadline).pattern
        return early_pattern(road, self.problem.deadline) if steady is None else steady

    def _in_full(self, pairs: list[tuple[Placement, Rule]]) -> list[tuple[Placement, Rule]]:
        """Return the pairs by their full steps, the shortest first; those not run for lack of time come last."""
        run = {pair: self.full_ticks[pair] for pair in pairs if pair in self.full_ticks}
        for number, pair in enumerate(pair for pair in pairs if pair not in run):
            if number and self.problem.deadline.passed():
                break
            run[pair] = self._complete(*pair).ticks
        return sorted(pairs, key=lambda pair: run.get(pair, inf))

    def step(self, placement: Placement, rule: Rule, steady: Pattern | None = None) -> Step:
        run = self._complete(placement, rule)
        orders = self.engine(placement).named(run.orders)
        return Step(steady or placement.cuts, orders, run.ticks, placement.recomputed)

    def peak_bytes(self, placement: Placement, rule: Rule) -> int:
        """Return the most bytes of a device in the full step of a rule."""
        return max(self.engine(placement).peaks(self._complete(placement, rule)))

    def _complete(self, placement: Placement, rule: Rule) -> StepRun:
        if self.last_complete is None or self.last_complete[0] != (placement, rule):
            engine = self.engine(placement)
            run = engine.run(self.num_micro_batches, rule.choice(engine, self.num_micro_batches))
            assert run is not None
            self.last_complete = (placement, rule), run
        return self.last_complete[1]

    # Allocations

    def try_contiguous(self, placement: Placement) -> None:
        """Try a contiguous partition under the usual depths."""
        engine = self.engine(placement)
        if min(engine.most_in_flight) < 1 or engine.bound(self.num_micro_batches) >= self.best or self.ended():
            return
        num_stages = len(placement.devices)
        if self.problem.flushes:
            self._try_flushes(placement)
            return
        usual = (
            range(num_stages, 0, -1),
            self._of_steady_state(placement),
            range(2 * num_stages - 1, 0, -2),
            engine.most_in_flight,
        )
        for depths in dict.fromkeys(self.within_room(placement, each) for each in usual):
            self.attempt(placement, "1F1B", depths)

    def ticks_of(self, placement: Placement) -> int | None:
        """Return the ticks of the shortest full step of an allocation under usual depths; None if none fits."""
        (self.try_contiguous if placement.is_contiguous else self.try_shared)(placement)
        for found, rule in self._in_full([(each, self.found[each].rule) for each in self.leaders()]):
            run = self._complete(found, rule)
            if max(self.engine(found).peaks(run)) <= self.problem.platform.memory_bytes:
                return run.ticks
        return None

    def try_shared(self, placement: Placement) -> None:
        """Try an allocation with several stages on a device in eager orders."""
        road, engine = Road(self.problem, placement), self.engine(placement)
        period = road.shortest_that_may_fit()
        if period is None or engine.bound(self.num_micro_batches) >= self.best or self.ended():
            return
        if self.problem.flushes:
            self._try_flushes(placement)
            return
        fewest = road.fewest_in_flight(period)
        usual = (fewest, [count + 1 for count in fewest], engine.most_in_flight)
        for depths in dict.fromkeys(self.within_room(placement, each) for each in usual):
            for name in ("furthest", "oldest"):
                if not self.out_of_time():
                    self.attempt(placement, name, depths)

    def _try_flushes(self, placement: Placement) -> None:
        """Try an allocation with all micro-batches of a batch in flight, then with as many as have room."""
        engine = self.engine(placement)
        fewest = (self.problem.fewest_in_flight,) * len(placement.devices)
        for depths in dict.fromkeys(self.within_room(placement, each) for each in (fewest, engine.most_in_flight)):
            for name in ("furthest", "oldest"):
                self.attempt(placement, name, depths)

    def descend(self, placement: Placement, around: Callable[[Placement], Iterable[Placement]]) -> None:
        """Go to better neighbours of an allocation, until there is none or the search has ended."""
        better = True
        while better and not self.ended():
            better = False
            before = self.best
            for neighbour in self.promising(around(placement))[:MOST_NEIGHBOURS]:
                if neighbour.is_contiguous:
                    self.try_contiguous(neighbour)
                else:
                    self.try_shared(neighbour)
                if self.best < before:
                    placement, better = neighbour, True
                    break

    def promising(self, placements: Iterable[Placement], shorter_than: float | None = None) -> list[Placement]:
        """Return the allocations not tried yet that may be better, the most promising first.

        Where the time is up, only those are returned that were looked at by then.

        Args:
            shorter_than: ticks of a step; left out, those of the best.
        """
        bounds, limit = [], self.best if shorter_than is None else shorter_than
        for placement in placements:
            if self.ended():
                break
            if placement not in self.tried:
                # Most allocations are never run, so their engines are not kept.
                engine = self.engines.get(placement) or step_engine(self.problem, placement)
                bound = engine.bound(self.num_micro_batches)
                if bound < limit:
                    bounds.append((bound, placement))
        bounds.sort(key=lambda each: (each[0], each[1].cuts, each[1].devices, each[1].recomputed))
        return [placement for bound, placement in bounds if bound < limit]

    # Orders

    def refine_leaders(self) -> None:
        """Refine the best allocations, as long as no bound says that it is useless."""
        leaders = (each for each in self.leaders() if each not in self.refined)
        for placement in islice(leaders, NUM_REFINED):
            if self.out_of_time():
                return
            if self.engine(placement).bound(self.num_micro_batches) < self.best:
                self._refine(placement)

    def _refine(self, placement: Placement) -> None:
        """Change the depths of an allocation as long as that shortens its step, under each rule."""
        rule = self.found[placement].rule
        in_turns = placement.is_contiguous and not self.problem.flushes
        for name in ("1F1B", "furthest", "oldest") if in_turns else ("furthest", "oldest"):
            if isinstance(rule, DepthRule) and (placement, name) not in self.by_name:
                self.attempt(placement, name, rule.depths)
            while (placement, name) in self.by_name and self._improve(placement, name):
                pass

    def polish(self) -> None:
        """Change the orders of the best allocations operation by operation, if the step is simulated in full."""
        if self.simulated < self.num_micro_batches or self.problem.flushes:
            return
        memory = self.problem.platform.memory_bytes
        leaders = self.leaders()[:NUM_POLISHED]
        of_step = 2 * self.simulated * len(leaders[0].devices) if leaders else 0
        self.operations_left = min(MOST_OPERATIONS_POLISHED, MOST_STEPS_POLISHED * of_step)
        for placement in leaders:
            if self.out_of_time():
                return
            engine, rule = self.engine(placement), self.found[placement].rule
            run = engine.run(self.simulated, rule.choice(engine, self.simulated))
            assert run is not None
            share, least = self.operations_left * 3 // 4, engine.bound(self.num_micro_batches)
            if least >= self.best:
                continue

            def may_run(stop: int = share, cost: int = len(engine.ticks) * self.simulated // 2) -> bool:
                self.operations_left -= cost
                return self.operations_left > stop and not self.out_of_time()

            def fits(run: StepRun, engine: StepEngine = engine) -> bool:
                return max(engine.peaks(run)) <= memory

            orders, ticks = better_orders(engine, run, fits, least, may_run)
            if ticks < run.ticks:
                self.run(placement, FixedRule(orders), inf)

    def _improve(self, placement: Placement, name: str) -> bool:
        """Take the first change of depths that shortens the step; return False where there is none."""
        estimate, rule = self.by_name[placement, name]
        for depths in dict.fromkeys(self.within_room(placement, each) for each in _changed(rule.depths)):
            if self.ended():
                return False
            if self.run(placement, DepthRule(name, depths), estimate) is Outcome.FITS:
                return True
        return False

    def attempt(
        self, placement: Placement, name: str, depths: tuple[int, ...], shorter_than: float | None = None
    ) -> None:
        """Try a rule, at smaller depths where it does not fit at these.

        Args:
            shorter_than: ticks of a step that is wanted; left out, those near the best.
        """
        depths = self.within_room(placement, depths)
        limit = self.near() if shorter_than is None else shorter_than
        if self.run(placement, DepthRule(name, depths), limit) is not Outcome.TOO_LARGE:
            return
        enough, too_many = self.problem.fewest_in_flight - 1, max(depths)
        while too_many - enough > 1 and not self.out_of_time():
            cap = (enough + too_many) // 2
            capped = tuple(min(depth, cap) for depth in depths)
            if self.run(placement, DepthRule(name, capped), limit) is Outcome.TOO_LARGE:
                too_many = cap
            else:
                enough = cap

    def run(self, placement: Placement, rule: Rule, shorter_than: float) -> Outcome:
        """Simulate a rule and keep it where it is the best of its allocation."""
        self.tried.add(placement)
        if not self.problem.allows(placement):
            return Outcome.TOO_SLOW
        if isinstance(rule, DepthRule) and min(rule.depths) < self.problem.fewest_in_flight:
            return Outcome.TOO_LARGE  # there is no room for a batch
        engine, rest = self.engine(placement), self.num_micro_batches - self.simulated
        if placement.is_contiguous and min(engine.most_in_flight) < 1:
            return Outcome.TOO_LARGE  # a step of one micro-batch may have room where the steady state has none
        at_most = None if shorter_than == inf else ceil(shorter_than) - 1 - max(engine.load) * rest
        cost = len(engine.ticks) * self.simulated
        orders = None if self.problem.flushes else fixed_orders(rule, engine, self.simulated)
        run = None
        if orders is not None:
            self.operations_left -= cost // SHARE_OF_LOOK
            look = look_at(engine, orders, self.simulated, inf if at_most is None else at_most)
            if look.least == inf or (at_most is not None and look.least > at_most):
                return Outcome.TOO_SLOW
            run = look.run
        if run is None:
            self.operations_left -= cost
            try:
                choice = rule.choice(engine, self.simulated) if orders is None else in_order(orders)
                run = engine.run(self.simulated, choice, at_most)
            except WaitInCircleError:
                run = None  # a limit below what the order needs
        if run is None:
            return Outcome.TOO_SLOW
        if max(engine.peaks(run)) > self.problem.platform.memory_bytes:
            return Outcome.TOO_LARGE
        estimate = run.ticks + rest * _rhythm(run) if rest else run.ticks
        if placement not in self.found or estimate < self.found[placement].estimate:
            self.found[placement] = _Found(estimate, rule)
            self.best = min(self.best, estimate)
        if isinstance(rule, DepthRule) and estimate < self.by_name.get((placement, rule.name), (inf, rule))[0]:
            self.by_name[placement, rule.name] = estimate, rule
        return Outcome.FITS if estimate < shorter_than else Outcome.TOO_SLOW

    # State

    def near(self) -> float:
        """Return the ticks within which an allocation is remembered."""
        return self.best * NEAR

    def may_be_better(self, placement: Placement) -> bool:
        """Return whether an allocation has room, and no bound says that it is no better than the best."""
        engine = self.engine(placement)
        return min(engine.most_in_flight) >= 1 and engine.bound(self.num_micro_batches) < self.best

    def engine(self, placement: Placement) -> StepEngine:
        if placement not in self.engines:
            self.engines[placement] = step_engine(self.problem, placement)
        return self.engines[placement]

    def leaders(self) -> list[Placement]:
        """Return the allocations that were found, the best estimate first."""
        return sorted(self.found, key=lambda each: (self.found[each].estimate, each.cuts, each.devices))

    def _of_steady_state(self, placement: Placement) -> tuple[int, ...]:
        """Return the depths of a contiguous partition under 1F1B* at its least period."""
        times = self.problem.times
        loads = steady_1f1b.pseudo_stage_loads(times, placement.cuts, extra_ticks(times, placement))
        period = steady_1f1b.least_period(loads, self.engine(placement).most_in_flight)
        assert period is not None
        return self.within_room(placement, steady_1f1b.in_flight(loads, period))

    def within_room(self, placement: Placement, depths: Iterable[int]) -> tuple[int, ...]:
        """Return depths that the stages have room for, if each had its device for itself.

        A micro-batch in flight in a stage is in flight in all stages before it: a stage that waited for more than
        those allow would wait forever.
        """
        rooms = self.engine(placement).most_in_flight
        wanted = (min(depth, room, self.most_in_flight) for depth, room in zip(depths, rooms, strict=True))
        return tuple(max(1, depth) for depth in accumulate(wanted, min))

    def ended(self) -> bool:
        """Return whether the search has done its work or its time is up; never before what it must find."""
        return self._may_end and (self.operations_left <= 0 or self.deadline.passed())

    def out_of_time(self) -> bool:
        return self._may_end and self.deadline.passed()

    @property
    def _may_end(self) -> bool:
        return bool(self.found) or not self.must_find


def _changed(depths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield changed depths: one more or less for a stage, or for it and all before it; then the extremes."""
    for change in (1, -1):
        for stage, depth in enumerate(depths):
            yield (*depths[:stage], depth + change, *depths[stage + 1 :])
            if stage:
                yield (*(each + change for each in depths[: stage + 1]), *depths[stage + 1 :])
    for extreme in (UNLIMITED, 1):
        for stage in range(len(depths)):
            yield (*depths[:stage], extreme, *depths[stage + 1 :])


def _rhythm(run: StepRun) -> float:
    """Return the ticks per micro-batch in the middle of a step."""
    ends = run.ends[-1]
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (ends[last] - ends[first]) / (last - first)
