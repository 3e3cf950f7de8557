"""The shortest step of m micro-batches in an engine that overlaps transfers: cut, devices and orders together.

Everything is judged by the simulated step (``overlapping.py``), memory included; what is not simulated is pruned
by a bound that no order of an allocation beats. The candidates:

1. contiguous cuts: the best for the period, those of the baselines, for each number of stages the best by the
   bound and for DeepSpeed's own engine, and whatever gets better by moving one boundary; all where they are few;
2. each under 1F1B with a depth of its own for each stage: DeepSpeed's, that of 1F1B*, one that hides transfers
   (2 (P - s) - 1), all that memory allows (with room for all of them GPipe's flush), and what is reached from the
   best of these by changing single depths;
3. allocations with several stages on a device: those of the periodic search, in the order of their pattern and
   in eager orders with a limit on the micro-batches in flight of each stage, and what lies around the best one.

Nothing is proved, but the answer is never slower than any of the candidates: not than the periodic plan in its
own order, nor than DeepSpeed's 1F1B, deep 1F1B or GPipe's flush on any of those cuts where they fit. Steps that
are too long to be simulated so often are compared by the rhythm of their beginning; in full the last few and the
periodic plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import accumulate, combinations, islice, product
from math import ceil, comb, inf

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.memory import UNLIMITED
from deepspeed_partition.planner.overlapping import Choice, StepEngine, StepRun, eager, in_order, one_f_one_b
from deepspeed_partition.planner.solvers import baselines, ilp, synchronous
from deepspeed_partition.planner.solvers import one_f_one_b as steady_1f1b
from deepspeed_partition.planner.solvers.mcap import MemoryBalanced
from deepspeed_partition.planner.solvers.min_max import NOTHING_FITS, min_max_cuts
from deepspeed_partition.planner.solvers.pipedream import PipeDream
from deepspeed_partition.planner.solvers.problem import Cuts, Problem, Step
from deepspeed_partition.planner.solvers.road import Pattern, Placement, Road
from deepspeed_partition.planner.solvers.several import neighbours

MOST_OPERATIONS = 500_000
"""Forwards and backwards that are simulated for contiguous cuts, and as many beyond: a few seconds each."""
LONGEST_RUN = 128
"""Micro-batches: a longer step is extrapolated from its rhythm, until the best ones are compared in full."""
FEW = 300
"""Cuts, or ways to give layers to devices: so few that all are tried."""
NUM_REFINED, NUM_FINALISTS, MOST_NEIGHBOURS = 20, 4, 100
"""Allocations whose depths are refined, and that are compared in full; neighbours of one that are simulated."""
NUM_CENTRES = 3
"""Cuts whose neighbours are looked at."""
CONTIGUOUS_SHARE, SEARCH_SHARE = 0.6, 0.85
"""Of the time that is left: for contiguous cuts where others follow, and for all that is searched. The rest is for
the full steps of the best, and for the pattern of an allocation that has none yet."""
NEAR = 1.05
"""What is within this factor of the best is remembered: with other depths it may become the best."""


def best_contiguous_step(problem: Problem, cuts: Cuts) -> tuple[Step, ...]:
    """The shortest step of a contiguous cut that is found; none where none fits.

    Args:
        cuts: those of the shortest period.
    """
    search = _StepSearch(problem)
    search.deadline = problem.deadline.part(SEARCH_SHARE)
    search.search_contiguous(cuts)
    return tuple(islice(search.steps(), 1))


def best_step(problem: Problem, cuts: Cuts | None, patterns: Sequence[Pattern]) -> tuple[Step, ...]:
    """The shortest step of any allocation that is found; none where none fits.

    Args:
        cuts: the contiguous cut of the shortest period; None where none fits.
        patterns: of allocations with several stages on a device.
    """
    search = _StepSearch(problem)
    if cuts is not None:
        search.deadline = problem.deadline.part(CONTIGUOUS_SHARE)
        search.search_contiguous(cuts)
    search.deadline = problem.deadline.part(SEARCH_SHARE)
    search.search_shared(patterns)
    return tuple(islice(search.steps(patterns), 1))


def fixed_step(problem: Problem, cuts: Cuts) -> Step:
    """A given cut under DeepSpeed's 1F1B: at its depth P - s, or as near to that as memory allows.

    Where not even one micro-batch at a time fits, which only the step shows, that is the answer.
    """
    search = _StepSearch(problem)
    placement = Placement.contiguous(cuts)
    if problem.flushes:
        rule = _Rule("furthest", (problem.fewest_in_flight,) * (len(cuts) - 1))
        return search.step(placement, rule)
    search.attempt(placement, "1F1B", tuple(range(len(cuts) - 1, 0, -1)))
    found = next(search.steps(), None)
    return found or search.step(placement, _Rule("1F1B", (1,) * (len(cuts) - 1)))


def memory_of_flush(problem: Problem) -> int:
    """Bytes per device with which all micro-batches of a batch can be in flight in a contiguous cut."""
    table, in_flight = problem.table, problem.fewest_in_flight
    found = min_max_cuts(problem, lambda from_end: table.fixed + in_flight * table.stash)
    cuts = min(found, key=lambda each: each[1])[0]
    engine = step_engine(problem, Placement.contiguous(cuts))
    rule = _Rule("furthest", (in_flight,) * (len(cuts) - 1))
    assert problem.num_micro_batches is not None
    run = engine.run(problem.num_micro_batches, rule.choice(engine, problem.num_micro_batches))
    assert run is not None
    return max(engine.peaks(run))


def step_engine(problem: Problem, placement: Placement) -> StepEngine:
    """The simulation of an allocation, all-reduces included."""
    ticks = problem.times.clock.ticks
    allreduce = [ticks(seconds) for seconds in problem.allreduce_seconds(placement.cuts)]
    return StepEngine(problem.times, problem.table, placement.cuts, placement.devices, allreduce, problem.flushes)


@dataclass(frozen=True, slots=True)
class _Rule:
    """How the devices of an allocation take turns."""

    name: str
    """``"1F1B"``, or ``"furthest"`` or ``"oldest"`` first (``overlapping.eager``)."""
    depths: tuple[int, ...]
    """The most micro-batches in flight of each stage."""

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        depths = [min(depth, num_micro_batches) for depth in self.depths]
        if self.name == "1F1B":
            return in_order(one_f_one_b(engine, depths, num_micro_batches))
        return eager(engine, depths, oldest_first=self.name == "oldest")


@dataclass(frozen=True, slots=True)
class _PatternRule:
    """The order of a periodic pattern."""

    pattern: Pattern

    def choice(self, engine: StepEngine, num_micro_batches: int) -> Choice:
        pattern = self.pattern
        position = {name: index for index, name in enumerate(engine.names)}
        moments = [
            (begin + number * pattern.period, begin + number * pattern.period + each.ticks, number, each.name)
            for each, begin in zip(pattern.operations, pattern.begins, strict=True)
            if each.name in position
            for number in range(num_micro_batches)
        ]
        orders: list[list[int]] = [[] for _ in range(engine.num_devices)]
        # What takes no time goes before what begins at the same instant, and then in the order of the road.
        for _, _, _, index in sorted((begin, end, number, position[name]) for begin, end, number, name in moments):
            orders[engine.device[index]].append(index)
        return in_order([tuple(order) for order in orders])


Rule = _Rule | _PatternRule


class _Outcome(Enum):
    FITS = auto()
    TOO_SLOW = auto()
    TOO_LARGE = auto()


@dataclass(frozen=True, slots=True)
class _Found:
    estimate: float
    rule: Rule


class _StepSearch:
    """The steps found so far, the best of each allocation."""

    def __init__(self, problem: Problem) -> None:
        assert problem.num_micro_batches is not None
        self.problem = problem
        self.num_micro_batches = problem.num_micro_batches
        # Of a step with flushes the beginning does not tell the rest.
        self.simulated = self.num_micro_batches if problem.flushes else min(self.num_micro_batches, LONGEST_RUN)
        self.operations_left = MOST_OPERATIONS
        self.deadline = problem.deadline
        self.engines: dict[Placement, StepEngine] = {}
        self.tried: set[Placement] = set()
        self.found: dict[Placement, _Found] = {}
        self.by_name: dict[tuple[Placement, str], tuple[float, _Rule]] = {}
        """The best estimate of an allocation under a rule of a name."""
        self.best = inf
        """The least estimate so far, ticks."""
        self.last_complete: tuple[tuple[Placement, Rule], StepRun] | None = None
        self.certain: list[tuple[Placement, Rule]] = []
        """Periodic plans in their own order, which are compared in full whatever their estimates."""

    def search_contiguous(self, steady: Cuts) -> None:
        """Search the contiguous cuts; ``steady`` is that of the shortest period."""
        placement = Placement.contiguous(steady)
        if not self.problem.flushes:
            self.certain.append((placement, _Rule("1F1B", self._of_steady_state(placement))))
        for cuts in _rivals(self.problem, steady):
            if self._ended():
                return
            self._try_contiguous(Placement.contiguous(cuts))
        size, most = self.problem.chain.num_layers, self.problem.constraints.max_stages
        counts = range(min(most, size))
        if sum(comb(size - 1, count) for count in counts) <= FEW:
            every = [(0, *inner, size) for count in counts for inner in combinations(range(1, size), count)]
            for placement in self._promising(map(Placement.contiguous, every)):
                self._try_contiguous(placement)
        else:
            for placement in self._promising(map(Placement.contiguous, _balanced(self.problem))):
                self._try_contiguous(placement)
            for placement in self._leaders()[:NUM_CENTRES]:
                self._descend(placement, _moved_boundaries)
        self._refine_leaders()

    def search_shared(self, patterns: Sequence[Pattern]) -> None:
        """Search on where a device may have several stages, from the allocations of ``patterns``."""
        self.operations_left = MOST_OPERATIONS
        for pattern in patterns if not self.problem.flushes else ():  # they mix forwards and backwards
            rule = _PatternRule(pattern)
            self.certain.append((pattern.placement, rule))
            self._run(pattern.placement, rule, inf)
        for pattern in patterns:
            self._try_shared(pattern.placement)
        if self._ended():
            return
        size, num_devices = self.problem.chain.num_layers, self.problem.platform.num_devices
        if num_devices ** (size - 1) <= FEW:
            owners = product(range(num_devices), repeat=size - 1)
            every = dict.fromkeys(Placement.of(range(size + 1), (0, *rest)) for rest in owners)
            for placement in self._promising(every):
                self._try_shared(placement)
        for placement in self._leaders()[:1]:
            self._refine(placement)
            self._descend(placement, lambda centre: neighbours(self.problem, centre))
        self._refine_leaders()

    def steps(self, patterns: Iterable[Pattern] = ()) -> Iterator[Step]:
        """What was found and fits, simulated in full, the shortest first."""
        known = {pattern.placement: pattern for pattern in patterns}
        memory, deadline = self.problem.platform.memory_bytes, self.problem.deadline
        pairs = [(placement, self.found[placement].rule) for placement in self._leaders()]
        if self.simulated < self.num_micro_batches:
            pairs = self._in_full(list(dict.fromkeys([*pairs[:NUM_FINALISTS], *self.certain])))
        for placement, rule in pairs:
            steady = known.get(placement)
            if steady is None and not placement.is_contiguous and deadline.passed():
                continue
            if max(self._engine(placement).peaks(self._complete(placement, rule))) > memory:
                continue  # tensors piled up only after the part that was simulated
            if steady is None and not placement.is_contiguous:
                steady = ilp.schedule(Road(self.problem, placement), None, deadline).pattern
                if steady is None:
                    continue
            yield self.step(placement, rule, steady)

    def _in_full(self, pairs: list[tuple[Placement, Rule]]) -> list[tuple[Placement, Rule]]:
        """The shortest first, by their full steps; where the time is up, those that were not run come last."""
        run: dict[tuple[Placement, Rule], int] = {}
        for pair in pairs:
            if run and self.problem.deadline.passed():
                break
            run[pair] = self._complete(*pair).ticks
        return sorted(pairs, key=lambda pair: run.get(pair, inf))

    def step(self, placement: Placement, rule: Rule, steady: Pattern | None = None) -> Step:
        run = self._complete(placement, rule)
        return Step(steady or placement.cuts, self._engine(placement).named(run.orders), run.ticks)

    def _complete(self, placement: Placement, rule: Rule) -> StepRun:
        if self.last_complete is None or self.last_complete[0] != (placement, rule):
            engine = self._engine(placement)
            run = engine.run(self.num_micro_batches, rule.choice(engine, self.num_micro_batches))
            assert run is not None
            self.last_complete = (placement, rule), run
        return self.last_complete[1]

    # Allocations

    def _try_contiguous(self, placement: Placement) -> None:
        """A cut under the usual depths."""
        engine = self._engine(placement)
        if min(engine.most_in_flight) < 1 or engine.bound(self.num_micro_batches) >= self.best or self._ended():
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
        for depths in dict.fromkeys(self._within_room(placement, each) for each in usual):
            self.attempt(placement, "1F1B", depths)

    def _try_shared(self, placement: Placement) -> None:
        """An allocation with several stages on a device in eager orders."""
        road, engine = Road(self.problem, placement), self._engine(placement)
        period = road.shortest_that_may_fit()
        if period is None or engine.bound(self.num_micro_batches) >= self.best or self._ended():
            return
        if self.problem.flushes:
            self._try_flushes(placement)
            return
        fewest = road.fewest_in_flight(period)
        usual = (fewest, [count + 1 for count in fewest], engine.most_in_flight)
        for depths in dict.fromkeys(self._within_room(placement, each) for each in usual):
            for name in ("furthest", "oldest"):
                if not self._out_of_time():
                    self.attempt(placement, name, depths)

    def _try_flushes(self, placement: Placement) -> None:
        """An allocation with all micro-batches of a batch in flight, then with as many as there is room for."""
        engine = self._engine(placement)
        fewest = (self.problem.fewest_in_flight,) * len(placement.devices)
        for depths in dict.fromkeys(
            self._within_room(placement, each) for each in (fewest, engine.most_in_flight)
        ):
            for name in ("furthest", "oldest"):
                self.attempt(placement, name, depths)

    def _descend(self, placement: Placement, around: Callable[[Placement], Iterable[Placement]]) -> None:
        """To a better allocation beside this one, until there is none or the search has ended."""
        better = True
        while better and not self._ended():
            better = False
            before = self.best
            for neighbour in self._promising(around(placement))[:MOST_NEIGHBOURS]:
                if neighbour.is_contiguous:
                    self._try_contiguous(neighbour)
                else:
                    self._try_shared(neighbour)
                if self.best < before:
                    placement, better = neighbour, True
                    break

    def _promising(self, placements: Iterable[Placement]) -> list[Placement]:
        """Those that were not tried and may be better than the best, the most promising first.

        Where the time is up: of those that were looked at by then.
        """
        bounds = []
        for placement in placements:
            if self._ended():
                break
            if placement not in self.tried:
                # Most are never run, so their engines are not kept.
                engine = self.engines.get(placement) or step_engine(self.problem, placement)
                bound = engine.bound(self.num_micro_batches)
                if bound < self.best:
                    bounds.append((bound, placement.cuts, placement.devices, placement))
        return [placement for bound, *_, placement in sorted(bounds) if bound < self.best]

    # Orders

    def _refine_leaders(self) -> None:
        """Refine the best allocations, as long as no bound says that it is in vain."""
        for placement in self._leaders()[:NUM_REFINED]:
            if self._out_of_time():
                return
            if self._engine(placement).bound(self.num_micro_batches) < self.best:
                self._refine(placement)

    def _refine(self, placement: Placement) -> None:
        """Change the depths of an allocation as long as that shortens its step, under each rule."""
        rule = self.found[placement].rule
        in_turns = placement.is_contiguous and not self.problem.flushes
        for name in ("1F1B", "furthest", "oldest") if in_turns else ("furthest", "oldest"):
            if isinstance(rule, _Rule) and (placement, name) not in self.by_name:
                self.attempt(placement, name, rule.depths)
            while (placement, name) in self.by_name and self._improve(placement, name):
                pass

    def _improve(self, placement: Placement, name: str) -> bool:
        """Take the first change of depths that shortens the step; False where there is none."""
        estimate, rule = self.by_name[placement, name]
        for depths in dict.fromkeys(self._within_room(placement, each) for each in _changed(rule.depths)):
            if self._ended():
                return False
            if self._run(placement, _Rule(name, depths), estimate) is _Outcome.FITS:
                return True
        return False

    def attempt(self, placement: Placement, name: str, depths: tuple[int, ...]) -> None:
        """A rule, at smaller depths where it does not fit at these."""
        depths = self._within_room(placement, depths)
        if self._run(placement, _Rule(name, depths), self.best * NEAR) is not _Outcome.TOO_LARGE:
            return
        enough, too_many = self.problem.fewest_in_flight - 1, max(depths)
        while too_many - enough > 1 and not self._out_of_time():
            cap = (enough + too_many) // 2
            capped = tuple(min(depth, cap) for depth in depths)
            if self._run(placement, _Rule(name, capped), self.best * NEAR) is _Outcome.TOO_LARGE:
                too_many = cap
            else:
                enough = cap

    def _run(self, placement: Placement, rule: Rule, shorter_than: float) -> _Outcome:
        """Simulate a rule and keep it where it is the best of its allocation."""
        self.tried.add(placement)
        if not self.problem.allows(placement):
            return _Outcome.TOO_SLOW
        if isinstance(rule, _Rule) and min(rule.depths) < self.problem.fewest_in_flight:
            return _Outcome.TOO_LARGE  # there is no room for a batch
        engine, rest = self._engine(placement), self.num_micro_batches - self.simulated
        at_most = None if shorter_than == inf else ceil(shorter_than) - 1 - max(engine.load) * rest
        self.operations_left -= len(engine.ticks) * self.simulated
        run = engine.run(self.simulated, rule.choice(engine, self.simulated), at_most)
        if run is None:
            return _Outcome.TOO_SLOW
        if max(engine.peaks(run)) > self.problem.platform.memory_bytes:
            return _Outcome.TOO_LARGE
        estimate = run.ticks + rest * _rhythm(run) if rest else run.ticks
        if placement not in self.found or estimate < self.found[placement].estimate:
            self.found[placement] = _Found(estimate, rule)
            self.best = min(self.best, estimate)
        if isinstance(rule, _Rule) and estimate < self.by_name.get((placement, rule.name), (inf, rule))[0]:
            self.by_name[placement, rule.name] = estimate, rule
        return _Outcome.FITS if estimate < shorter_than else _Outcome.TOO_SLOW

    # What is at hand

    def _engine(self, placement: Placement) -> StepEngine:
        if placement not in self.engines:
            self.engines[placement] = step_engine(self.problem, placement)
        return self.engines[placement]

    def _leaders(self) -> list[Placement]:
        """The best first."""
        return sorted(self.found, key=lambda each: (self.found[each].estimate, each.cuts, each.devices))

    def _of_steady_state(self, placement: Placement) -> tuple[int, ...]:
        """The depths of a contiguous cut under 1F1B* at its least period."""
        loads = steady_1f1b.pseudo_stage_loads(self.problem.times, placement.cuts)
        period = steady_1f1b.least_period(loads, self._engine(placement).most_in_flight)
        assert period is not None
        return self._within_room(placement, steady_1f1b.in_flight(loads, period))

    def _within_room(self, placement: Placement, depths: Iterable[int]) -> tuple[int, ...]:
        """Depths that the stages have room for, if each had its device for itself.

        A micro-batch in flight in a stage is so in all before it: a stage that waited for more than there can be
        would wait forever.
        """
        rooms = self._engine(placement).most_in_flight
        wanted = (min(depth, room, self.num_micro_batches) for depth, room in zip(depths, rooms, strict=True))
        return tuple(max(1, depth) for depth in accumulate(wanted, min))

    def _ended(self) -> bool:
        """Whether the search has done its work or its time is up; never before something was found."""
        return bool(self.found) and (self.operations_left <= 0 or self.deadline.passed())

    def _out_of_time(self) -> bool:
        return bool(self.found) and self.deadline.passed()


def _rivals(problem: Problem, steady: Cuts) -> Iterator[Cuts]:
    """The cuts of other planners, and at last the one that needs least memory."""
    chain, num_devices = problem.chain, problem.constraints.max_stages
    yield steady
    for algorithm in (PipeDream(), MemoryBalanced()):
        yield from algorithm.solve(problem).cuts
    yield baselines.uniform(chain, num_devices)
    yield baselines.parameters(chain, num_devices)
    table = problem.table
    in_flight = problem.fewest_in_flight
    least = min_max_cuts(problem, lambda from_end: table.fixed + in_flight * table.stash)
    yield min(least, key=lambda found: found[1])[0]


def _balanced(problem: Problem) -> list[Cuts]:
    """For each number of stages the best cut for DeepSpeed's own engine, nearly, and that of the least bound.

    That bound is ``StepEngine.bound`` per micro-batch, without the transfers on the way.
    """
    times, table, m = problem.times, problem.table, problem.num_micro_batches
    assert m is not None
    before = times.compute[:, None] // m
    busiest = np.maximum(times.compute[None, :] - times.compute[:, None], times.round_trip[:, None])
    room = np.minimum(np.maximum(table.max_in_flight, 1), m)
    waiting = (times.compute[-1] - times.compute)[:, None] // room
    costs: NDArray[np.int64] = before + np.maximum(busiest, waiting)
    fitting = np.where(table.max_in_flight >= 1, costs, NOTHING_FITS)
    blocking = synchronous.balanced_cuts(replace(problem, in_deepspeed=True))
    return [*blocking, *(cuts for cuts, _ in min_max_cuts(problem, lambda from_end: fitting))]


def _moved_boundaries(placement: Placement) -> Iterator[Placement]:
    cuts = placement.cuts
    for index in range(1, len(cuts) - 1):
        for moved in (cuts[index] - 1, cuts[index] + 1):
            if cuts[index - 1] < moved < cuts[index + 1]:
                yield Placement.contiguous((*cuts[:index], moved, *cuts[index + 1 :]))


def _changed(depths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One more or one less for a stage, or for it and all before it; then the most or the least for a stage."""
    for change in (1, -1):
        for stage, depth in enumerate(depths):
            yield (*depths[:stage], depth + change, *depths[stage + 1 :])
            if stage:
                yield (*(each + change for each in depths[: stage + 1]), *depths[stage + 1 :])
    for extreme in (UNLIMITED, 1):
        for stage in range(len(depths)):
            yield (*depths[:stage], extreme, *depths[stage + 1 :])


def _rhythm(run: StepRun) -> float:
    """Ticks per micro-batch in the middle of a step."""
    ends = run.ends[-1]
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (ends[last] - ends[first]) / (last - first)
