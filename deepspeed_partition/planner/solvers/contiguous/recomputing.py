"""The best contiguous partition under memory, and what each of its stages recomputes: exact at a period.

At a period, the delay above a stage never falls where the delay below it or its own time grows. So each stage
takes, in each decision of ``partition_search.py``, the way to recompute it (``recomputation.py``) with which its
delay is least among those that have room for its micro-batches in flight; of its ways only those count that are
slower than another one and have more room. The answer for given boundaries is found by the same bisection.

Exact, and proved, where the sets of ways are exact; otherwise a last decision with sets that are rounded down may
still prove it, and where it does not, all of that runs once more with larger sets. In chains longer than
``MOST_POSITIONS`` the lower bound alone proves anything. Where a decision with unlimited memory finds nothing
better, nothing is recomputed and no way is ever made. Cost beside that of ``optimal.py``: the ways of at most
``MOST_STAGES`` stages, those that take a period at most and lack room; where there are more, of those between the
places at which blocks may begin.

Source: MadPipe paper, section 4.1, for the schedule; recomputation is an addition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.memory import UNLIMITED
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.recomputation import MORE_WAYS, Recomputation, Ways, rooms
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS, min_max_partitions
from deepspeed_partition.planner.solvers.contiguous.partition_search import (
    BestPartition,
    Option,
    PartitionSearch,
    best_partition,
    lower_bound_ticks,
    narrow,
)
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices

MOST_STAGES = 4000
"""Most stages whose ways are made for a search."""
LEAST_MEMORY_SECONDS = 1.0
"""Seconds of the processor for the least memory of all stages, when those of the search are over."""
Way = tuple[int, int, int]
"""A way to recompute a stage: its number, its extra ticks, and the most micro-batches in flight that fit."""
Choice = list[Way]
"""A way for each stage of a partition."""


def best_recomputing_partition(problem: Problem) -> BestPartition | None:
    """Find the boundaries of the shortest period that fits with recomputation; None where none is found.

    What is recomputed is what ``choice_for`` returns for them.
    """
    table, constraints, times = problem.table, problem.constraints, problem.times
    plain = best_partition(times, table, constraints, problem.deadline)
    assert problem.recomputation is not None
    if plain is not None:
        roomy = PartitionSearch(times, table, constraints, Deadline())
        roomy.room = np.where(constraints.allowed(table), UNLIMITED, 0)
        if plain.proved and roomy.decide(plain.period - 1) is None:
            return plain
    known = [] if plain is None else [plain]
    for uniform in uniform_choices(problem):
        made = best_partition(uniform.problem.times, uniform.problem.table, constraints, problem.deadline)
        if made is not None:
            known.append(replace(made, proved=False))
        del uniform  # its tables, of long chains the most that planning keeps, before those of the next one
    known = [_snapped(problem, each) for each in known]
    best = min(known, key=lambda each: each.period, default=None)
    try:
        found = _narrowed(problem, best)
    except DeadlinePassed:
        return best or _in_least_memory(problem)
    if found is None or found.proved or not problem.recomputation.has_all_positions:
        return found
    return _with_more_ways(problem, found)


def _with_more_ways(problem: Problem, best: BestPartition) -> BestPartition:
    """Return the best partition where more ways are remembered than those that left a proof open."""
    costs = problem.recomputation
    assert costs is not None
    before = costs.most_ways
    costs.remember(max(before, MORE_WAYS))
    known = choice_for(problem, best.cuts)
    if known is None or known[1] > best.period:  # other ways were left out
        costs.remember(before)
        return best
    best = BestPartition(best.cuts, known[1], False)
    try:
        return _narrowed(problem, best) or best
    except DeadlinePassed:
        return best


def _in_least_memory(problem: Problem) -> BestPartition | None:
    """Return the partition that needs least memory, if it fits.

    By the uniform choices first, which takes a moment; the ways to recompute every stage take seconds in long
    chains, and are made only where nothing fits with those, for ``LEAST_MEMORY_SECONDS`` at most.
    """
    for bytes_of in (uniform_bytes, least_bytes):
        table = bytes_of(problem, 1)
        found = min_max_partitions(problem, lambda from_end, table=table: table)  # type: ignore[misc]
        cuts, smallest = min(found, key=lambda each: each[1], default=((), NOTHING_FITS))
        choice = choice_for(problem, cuts) if smallest <= problem.platform.memory_bytes else None
        if choice is not None:
            return BestPartition(cuts, choice[1], False)
    return None


def _snapped(problem: Problem, found: BestPartition) -> BestPartition:
    """Return a partition with its least period over all ways to recompute its stages."""
    choice = choice_for(problem, found.cuts)
    return found if choice is None else BestPartition(found.cuts, min(found.period, choice[1]), False)


def _narrowed(problem: Problem, best: BestPartition | None) -> BestPartition | None:
    """Return the best partition, from the best one that is known.

    Raises:
        DeadlinePassed: the deadline passed before that was known.
    """
    longest = _relaxed(problem) if best is None else best.period
    search = recomputing_search(problem, longest)
    if best is None:
        cuts = search.decide(longest)
        if cuts is None:
            return None
        best = BestPartition(cuts, search.snap(cuts, longest), False)
    least = lower_bound_ticks(problem.times, problem.constraints.max_stages)
    try:
        found, period = narrow(search.decide, search.snap, best.cuts, best.period, least)
    except DeadlinePassed:
        known = [each for each in (search.best, best) if each is not None]
        return min(known, key=lambda each: each.period)
    proved = period <= least or (search.costs.is_exact and search.is_complete)
    if not proved and search.is_complete and search.costs.has_all_positions:
        try:
            proved = recomputing_search(problem, period, optimistic=True).decide(period - 1) is None
        except DeadlinePassed:
            proved = False
    return BestPartition(found, period, proved)


def recomputing_search(problem: Problem, longest: int, *, optimistic: bool = False) -> _RecomputingSearch:
    """Return the decisions of a problem with recomputation, at periods up to ``longest`` ticks.

    Args:
        optimistic: count ways that need not exist, for a proof that nothing is faster.

    Raises:
        DeadlinePassed: the deadline passed before the ways of all stages were known.
    """
    assert problem.recomputation is not None
    return _RecomputingSearch(problem, problem.recomputation, longest, optimistic=optimistic)


def _relaxed(problem: Problem) -> int:
    """Return a period, in ticks, at which every stage has one micro-batch in flight, whatever it recomputes."""
    return problem.longest_period + int(problem.times.forward[-1])


class _RecomputingSearch(PartitionSearch):
    """Decisions in which each stage may be recomputed.

    Args:
        longest: the longest period that is asked for, in ticks.
        optimistic: count ways that need not exist, for a proof that nothing is faster.
    """

    def __init__(self, problem: Problem, costs: Recomputation, longest: int, *, optimistic: bool = False) -> None:
        super().__init__(problem.times, problem.table, problem.constraints, problem.deadline)
        self.problem, self.costs, self.relaxed = problem, costs, longest
        self.most_groups = 2 * problem.constraints.max_stages
        """More micro-batches than any stage has in flight: there is one group at most for each pseudo-stage."""
        self.is_complete = True
        """Whether the ways of all stages are known that could matter."""
        options: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for stage in self._stages(longest):
            self.deadline.check()
            ways = costs.ways(stage, optimistic=optimistic)
            options[stage] = [(extra, room) for _, extra, room in useful(problem, stage, ways, self.most_groups)]
        size = problem.chain.num_layers + 1
        width = max(map(len, options.values()), default=0) or 1
        uniform = [] if self.is_complete else list(uniform_choices(problem))
        # All at once: zeros take no memory until they are written, and to append makes copies.
        shape = (width + len(uniform), size, size)
        self.extra: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        """Extra ticks of each option of each stage, [option, k, l]."""
        self.rooms: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
        """Most micro-batches in flight under each option, [option, k, l]; 0 where it is none."""
        self.rooms[0] = self.room
        for (start, stop), known in options.items():
            for number, (extra, room) in enumerate(known):
                self.extra[number, start, stop], self.rooms[number, start, stop] = extra, room
        for number, each in enumerate(uniform, width):
            longer = each.problem.times.compute - self.times.compute
            np.subtract(longer[None, :], longer[:, None], out=self.extra[number])
            allowed = problem.constraints.allowed(self.table)
            np.copyto(self.rooms[number], each.problem.table.max_in_flight, where=allowed)

    def _stages(self, longest: int) -> Iterator[tuple[int, int]]:
        """Yield the stages whose ways matter: those that take a period at most, and lack room."""
        compute = self.times.compute
        loads = compute[None, :] - compute[:, None]
        lacks = self.constraints.allowed(self.table) & (self.room < self.most_groups) & (loads <= longest)
        if int(lacks.sum()) > MOST_STAGES:
            self.is_complete = False
            places = np.zeros(len(compute), dtype=bool)
            places[[*self.costs.positions, 0, len(compute) - 1]] = True
            lacks &= places[:, None] & places[None, :]
        for start, stop in np.argwhere(lacks):
            yield int(start), int(stop)

    def _options(
        self, period: int, begins: NDArray[np.intp], stops: NDArray[np.intp], within: NDArray[np.bool_]
    ) -> list[Option]:
        compute = self.times.compute
        loads = compute[stops] - compute[begins]
        options = []
        for extra, room in zip(self.extra, self.rooms, strict=True):
            longer = loads + extra[begins, stops]
            options.append((longer, np.where(within & (longer <= period), room[begins, stops], 0)))
        return options

    def snap(self, cuts: Cuts, found_at: int) -> int:
        choice = choice_for(self.problem, cuts)
        assert choice is not None and choice[1] <= found_at, "a partition that a decision found does not fit"
        if self.best is None or choice[1] < self.best.period:
            self.best = BestPartition(cuts, choice[1], False)
        return choice[1]


def useful(problem: Problem, stage: tuple[int, int], ways: Ways, most: int) -> list[Way]:
    """Return the ways that have room for more micro-batches than all faster ones.

    Args:
        most: more micro-batches than anybody asks for.
    """
    room = np.minimum(rooms(problem.table, stage, ways.stash, ways.transient), most)
    found: list[Way] = []
    best = 0
    for number in np.argsort(ways.extra, kind="stable"):
        if room[number] > best:
            best = int(room[number])
            if found and found[-1][1] == int(ways.extra[number]):
                found.pop()
            found.append((int(number), int(ways.extra[number]), best))
    return found


def least_bytes(problem: Problem, in_flight: int, deadline: Deadline | None = None) -> NDArray[np.int64]:
    """Return the bytes of a device with layers k to l and ``in_flight`` micro-batches in flight, [k, l].

    With recomputation, where that is allowed, by the way that needs least; of long chains, by the uniform choices
    and between the places at which blocks may begin. Stages whose ways are not known when the deadline has passed,
    and ``LEAST_MEMORY_SECONDS``, have what they need by the uniform choices.

    Args:
        deadline: the caller's own, where it asks several times; left out: that of the problem.
    """
    least = uniform_bytes(problem, in_flight)
    costs, table = problem.recomputation, problem.table
    if costs is None:
        return least
    places: NDArray[np.intp] = np.arange(problem.chain.num_layers + 1)
    if len(places) * (len(places) - 1) // 2 > MOST_STAGES:
        places = np.unique([0, *costs.positions, places[-1]])
    deadline = deadline or problem.deadline.at_least(LEAST_MEMORY_SECONDS)
    usual = problem.chain.num_layers / problem.constraints.max_stages
    stages = combinations(places.tolist(), 2)
    for stage in sorted(stages, key=lambda each: abs(each[1] - each[0] - usual)):  # what is likely comes first
        if not costs.knows(stage) and deadline.passed():
            continue
        ways = costs.ways(stage)
        others = int(table.fixed[stage]) - int(table.transient[stage])
        needs = others + int((in_flight * ways.stash + table.with_update(ways.transient, stage)).min())
        needs = max(needs + int(table.further_versions(in_flight, stage)), int(table.floor[stage]))
        least[stage] = min(int(least[stage]), needs)
    return least


def uniform_bytes(problem: Problem, in_flight: int) -> NDArray[np.int64]:
    """Return the same where a stage recomputes nothing, or as the uniform choices do."""
    least = problem.table.needs(in_flight)
    for uniform in uniform_choices(problem):
        least = np.minimum(least, uniform.problem.table.needs(in_flight))
    return least


def choice_for(problem: Problem, cuts: Cuts) -> tuple[tuple[Blocks, ...], int] | None:
    """Return what the stages of a partition recompute under 1F1B*, and its least period; None where none fits.

    The period is the shortest, exactly, over the ways that are known of each stage.
    """
    if problem.recomputation is None:
        return None
    stages = list(pairwise(cuts))
    ways = [problem.recomputation.ways(stage) for stage in stages]
    options = [useful(problem, stage, each, 2 * len(stages)) for stage, each in zip(stages, ways, strict=True)]
    if not all(options):
        return None
    times = problem.times

    def snap(choice: Choice, _: int) -> int:
        loads = one_f_one_b.pseudo_stage_loads(times, cuts, [extra for _, extra, _ in choice])
        period = one_f_one_b.least_period(loads, [room for _, _, room in choice])
        assert period is not None
        return period

    def decide(period: int) -> Choice | None:
        return _decided(times.round_trip[list(cuts[:-1])].tolist(), loads, options, period)

    loads = [times.compute_ticks(*stage) for stage in stages]
    start = [each[-1] for each in options]
    choice, period = narrow(decide, snap, start, snap(start, 0), max(loads))
    blocks = tuple(each.blocks(number) for each, (number, _, _) in zip(ways, choice, strict=True))
    return blocks, period


def _decided(
    transfers: Sequence[int], loads: Sequence[int], options: Sequence[list[Way]], period: int
) -> Choice | None:
    """Return an option of each stage with which a partition fits at a period; None where there is none.

    Args:
        transfers: ticks of the boundary before each stage, there and back.
        loads: ticks of each stage without recomputation.
    """
    delay: one_f_one_b.Delay = (1, 0)
    chosen = []
    for transfer, load, some in zip(reversed(transfers), reversed(loads), reversed(options), strict=True):
        above = [
            (one_f_one_b.add(delay, load + option[1], period), option)
            for option in some
            if load + option[1] <= period
        ]
        fitting = [(after, option) for after, option in above if after[0] <= option[2]]
        if not fitting or transfer > period:
            return None
        delay, option = min(fitting)
        chosen.append(option)
        delay = one_f_one_b.add(delay, transfer, period)
    return chosen[::-1]


def choice_at(problem: Problem, cuts: Cuts, period: int | None) -> tuple[Blocks, ...]:
    """Return what the stages of a partition recompute under 1F1B*; for the shortest period where it is left out.

    At a chosen period, in ticks, it is what needs least memory.
    """
    if problem.recomputation is None:
        return ()
    if period is not None:
        found = least_memory_at(problem, cuts, period)
        return () if found is None else found[0]
    choice = choice_for(problem, cuts)
    return () if choice is None else choice[0]


def least_memory_at(problem: Problem, cuts: Cuts, period: int) -> tuple[tuple[Blocks, ...], int] | None:
    """Return what the stages of a partition recompute in the least memory at ``period``, and the largest's bytes.

    None: it is not as fast as that.
    """
    assert problem.recomputation is not None
    stages, times, table = list(pairwise(cuts)), problem.times, problem.table
    ways = [problem.recomputation.ways(stage) for stage in stages]
    loads = [times.compute_ticks(*stage) for stage in stages]
    transfers = times.round_trip[list(cuts[:-1])].tolist()

    def decide(memory_bytes: int) -> Choice | None:
        given = problem.with_memory(memory_bytes)
        options = [useful(given, *each, 2 * len(stages)) for each in zip(stages, ways, strict=True)]
        return _decided(transfers, loads, options, period) if all(options) else None

    def need(choice: Choice, _: int) -> int:
        counts = one_f_one_b.in_flight(
            one_f_one_b.pseudo_stage_loads(times, cuts, [extra for _, extra, _ in choice]), period
        )
        return max(
            max(
                int(table.fixed[stage]) - int(table.transient[stage])
                + count * int(each.stash[number]) + int(each.transient[number]),
                int(table.floor[stage]),
            )
            for stage, each, (number, _, _), count in zip(stages, ways, choice, counts, strict=True)
        )  # fmt: skip

    some = decide(LARGEST_MEMORY_BYTES)
    if some is None:
        return None
    choice, smallest = narrow(decide, need, some, need(some, 0), 1)
    return tuple(each.blocks(number) for each, (number, _, _) in zip(ways, choice, strict=True)), smallest
