"""The shortest step of all, where it is small: every allocation, each with a lower bound or its shortest order.

It begins with the step that the search has found. Allocations come in the order of a bound of their own; one whose
bound is not below the best step so far cannot have a shorter one. The others are solved by the constraint program
(``order_program.py``), and what it finds is simulated: a shorter step that fits takes the place of the best. Where
the program is a relaxation that no real step meets, it is solved again with transfers begun as the simulator does.

The bound of the whole is the least that is left: of the best step, and of the allocations that the time, or the
missing OR-tools, left open. With recomputation the program runs without the bytes of layers that may run twice, so
its bounds hold for every way to recompute; steps are taken without recomputation alone, by another program. What
cannot matter is not solved: for the bound, allocations that are bounded no lower than one that was solved; for a
step, those without room for one as short.

Method: enumeration with bounds; not in the papers. Cost: at most ``MOST_ALLOCATIONS`` programs, exponential each,
in a share of the time that is left, ``MOST_SECONDS`` at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise, product
from math import comb

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Step
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road
from deepspeed_partition.planner.solvers.step.order_program import (
    OrderProgram,
    Solved,
    bytes_before_backwards,
)
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, StepRun, in_order

MOST_ALLOCATIONS, MOST_OPERATIONS = 400, 60
"""Most allocations, and most forwards and backwards of all layers in a step, of a problem that counts as small."""
MOST_SECONDS, SHARE = 5.0, 0.5
"""Most seconds of the processor for all programs, and the most of those that are left."""


def with_exact_step(problem: Problem, answer: Answer) -> Answer:
    """Return an answer with the shortest step of all, or with a better lower bound, where the problem is small."""
    if not answer.steps or not is_small(problem, contiguous=answer.step_search == "contiguous"):
        return answer
    search = ExactStep(problem, answer, installed=is_installed())
    search.run()
    return replace(answer, steps=(replace(search.best, bound=search.bound), *answer.steps[1:]))


def is_small(problem: Problem, *, contiguous: bool) -> bool:
    """Return whether every allocation of a problem can be looked at.

    Args:
        contiguous: devices have one stage each.
    """
    size, m = problem.chain.num_layers, problem.num_micro_batches
    if m is None or 2 * size * m > MOST_OPERATIONS:
        return False
    num_devices = min(size, problem.platform.num_devices)
    if contiguous:
        return sum(comb(size - 1, count - 1) for count in problem.constraints.counts(size)) <= MOST_ALLOCATIONS
    ways = [1] + [0] * num_devices  # to share out the layers so far among so many devices
    for _ in range(size):
        ways = [0] + [ways[count - 1] + count * ways[count] for count in range(1, num_devices + 1)]
    return sum(ways) <= MOST_ALLOCATIONS


@dataclass(frozen=True, slots=True)
class Open:
    """Allocation that may have a shorter step."""

    bound: int
    placement: Placement
    engine: StepEngine


class ExactStep:
    """Search through every allocation of a small step.

    Args:
        answer: what a search has found; its first step is where this one begins.
        installed: whether the constraint program can run; without it, only the bound of each allocation counts.
    """

    def __init__(self, problem: Problem, answer: Answer, *, installed: bool) -> None:
        assert problem.num_micro_batches is not None
        self.problem, self.num_micro_batches = problem, problem.num_micro_batches
        self.contiguous = answer.step_search == "contiguous"
        self.installed = installed
        self.best = answer.steps[0]
        """Shortest step so far."""
        self.bound = max(self.best.bound, self._lower_bound())
        """Ticks than which no step is shorter."""
        self.patterns = {pattern.placement: pattern for pattern in answer.patterns}
        self.deadline = Deadline(MOST_SECONDS, within=problem.deadline.part(SHARE))
        self.recomputes = problem.recomputation is not None
        self.memory = problem.platform.memory_bytes
        self.left = self.best.ticks
        """Least bound of the allocations that were looked at so far."""

    def _lower_bound(self) -> int:
        return step_lower_bound(self.problem, contiguous=self.contiguous)

    def _engine(self, placement: Placement) -> StepEngine:
        return step_engine(self.problem, placement)

    def run(self) -> None:
        """Look at every allocation, unless the bound is met before."""
        if self.bound >= self.best.ticks:
            return
        self.left = self.best.ticks
        for each in self._allocations():
            if each.bound >= self.best.ticks:
                break
            self.left = min(self.left, max(each.bound, self._least(each)))
        self.bound = max(self.bound, min(self.left, self.best.ticks))

    def _allocations(self) -> list[Open]:
        """Return the allocations that may have a step below the best, the least bound first."""
        found = []
        for placement in dict.fromkeys(self._placements()):
            engine = self._engine(placement)
            bound = self._bound(engine, keeps_all=not self.recomputes)
            if bound < self.best.ticks:
                found.append(Open(bound, placement, engine))
        return sorted(found, key=lambda each: (each.bound, each.placement.cuts, each.placement.devices))

    def _placements(self) -> Iterator[Placement]:
        problem, size = self.problem, self.problem.chain.num_layers
        if self.contiguous:
            allowed = problem.constraints.allowed(problem.table)
            for count in problem.constraints.counts(size):
                for inner in combinations(range(1, size), count - 1):
                    cuts = (0, *inner, size)
                    if all(allowed[stage] for stage in pairwise(cuts)):
                        yield Placement.contiguous(cuts)
            return
        num_devices = min(size, problem.platform.num_devices)
        for devices in product(range(num_devices), repeat=size - 1):
            if all(device <= max((0, *devices[:place])) + 1 for place, device in enumerate(devices)):
                placement = Placement.of(range(size + 1), (0, *devices))
                if problem.allows(placement):
                    yield placement

    def _bound(self, engine: StepEngine, *, keeps_all: bool) -> int:
        """Return ticks than which no order of an allocation is shorter, ``best`` at most where it does not fit.

        Args:
            keeps_all: nothing is recomputed; False: whatever is.
        """
        bound = bound_of_work(engine, self.num_micro_batches)
        for stage, stash in enumerate(engine.stash if keeps_all else []):
            room = self.memory - bytes_before_backwards(engine, engine.device[stage])
            if stash > room:
                return self.best.ticks
            if stash:
                bound = max(bound, _bound_in_turns(engine, self.num_micro_batches, stage, room // stash))
        return bound

    def _least(self, each: Open) -> int:
        """Return a lower bound of an allocation, and take its shortest step where that is the best."""
        if not self.installed or self.deadline.passed():
            return 0
        bound = 0
        if not self.recomputes or each.bound < self.left:
            solved = self._solve(each, recomputes=self.recomputes)
            bound = solved.bound
            if self._take(each, solved) or not bound:
                return bound
        if not self.recomputes:
            again = self._solve(each, greedy=True)
            self._take(each, again)
            return max(bound, again.bound)
        # An allocation whose bound is no less than that of another one tells nothing of the bound of the whole.
        if self._bound(each.engine, keeps_all=True) < self.best.ticks:
            self._take(each, self._solve(each))
        return bound

    def _solve(self, each: Open, *, recomputes: bool = False, greedy: bool = False) -> Solved:
        if self.deadline.passed():
            return Solved(0, None)
        m, flushes = self.num_micro_batches, self.problem.flushes
        program = OrderProgram(each.engine, m, self.memory, flushes, recomputes=recomputes, greedy=greedy)
        return program.solve(self.best.ticks, self.deadline)

    def _take(self, each: Open, solved: Solved) -> bool:
        """Take the orders of an allocation where they are the best; return whether no others are shorter."""
        if solved.orders is None:
            return solved.bound >= self.best.ticks
        try:
            run = each.engine.run(self.num_micro_batches, in_order(solved.orders))
        except ValueError:  # operations without time that wait for each other, at one instant
            return False
        assert run is not None
        if max(each.engine.peaks(run)) > self.memory:
            return False
        if run.ticks < self.best.ticks:
            self._keep(each, run)
        return self.best.ticks <= solved.bound

    def _keep(self, each: Open, run: StepRun) -> None:
        steady = self._steady_of(each)
        if steady is not None:
            self.best = Step(steady, each.engine.named(run.orders), run.ticks)

    def _steady_of(self, each: Open) -> Cuts | Pattern | None:
        """Return a steady state of an allocation; None where there is no room for one."""
        if each.placement.is_contiguous:
            return each.placement.cuts if min(each.engine.most_in_flight) > 0 else None
        return self._steady(each.placement)

    def _steady(self, placement: Placement) -> Pattern | None:
        known = self.patterns.get(placement)
        return known or ilp.schedule(Road(self.problem, placement), None, self.problem.deadline).pattern


def bound_of_work(engine: StepEngine, num_micro_batches: int) -> int:
    """Return ticks in which no device or link of an allocation has done its work, fill and drain included."""
    head, m = _heads(engine), num_micro_batches
    bounds = []
    for place, load in enumerate(engine.load):
        first = engine.device.index(place)
        bounds.append(head[first] + m * load + engine.tail[len(engine.ticks) - 1 - first])
    for users in engine.users:
        load = sum(engine.send[position] or 0 for position in users)
        after = users[-1] + 1
        bounds.append(
            head[users[0]] + engine.ticks[users[0]] + m * load + engine.ticks[after] + engine.tail[after]
        )
    return int(max(bounds))


def _bound_in_turns(engine: StepEngine, num_micro_batches: int, stage: int, most: int) -> int:
    """Return the ticks in which a stage takes ``most`` micro-batches at once to the end of the path and back."""
    head, back = _heads(engine), len(engine.ticks) - 1 - stage
    turns = -(-num_micro_batches // min(most, num_micro_batches))
    return int(head[stage] + turns * (head[back] + engine.ticks[back] - head[stage]) + engine.tail[back])


def _heads(engine: StepEngine) -> list[int]:
    """Return the ticks of the path before each position."""
    steps = (ticks + (send or 0) for ticks, send in zip(engine.ticks, engine.send, strict=True))
    return list(accumulate(steps, initial=0))
