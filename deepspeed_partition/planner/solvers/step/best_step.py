"""The shortest step, as hosts and the command line ask for it: from a solver's answer, or for given boundaries.

``step_search.py`` searches, ``recomputing_step.py`` tries what its best allocations may recompute. With
recomputation the search runs several times: without any; where a stage lacks room for the micro-batches that hide
the others' time, also with each uniform choice (all layers, as whole stages and one by one); and from what these
found with other choices, by stage, then by block, for interleaved allocations as few as an order needs
(``partly_recomputing.py``). So no uniform choice has a shorter step, unless the time was up.

Contiguous partitions are searched as if there were no others; the search among all allocations goes on from there.
So a step of any allocation is never longer than the best contiguous one, unless the time was up. At last,
orders by groups are looked for together with their boundaries (``group_search.py``), and a random walk looks for
allocations that follow no pattern (``annealing.py``).

Source, and cost of each search: ``step_search.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.contiguous.deepspeed_partitions import uniform
from deepspeed_partition.planner.solvers.contiguous.min_max import min_max_partitions
from deepspeed_partition.planner.solvers.contiguous.partition_search import best_partition
from deepspeed_partition.planner.solvers.contiguous.recomputing import choice_for
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Step
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.step.annealing import Annealing
from deepspeed_partition.planner.solvers.step.contenders import contenders
from deepspeed_partition.planner.solvers.step.group_search import GroupSearch
from deepspeed_partition.planner.solvers.step.interleaved_search import InterleavedSearch
from deepspeed_partition.planner.solvers.step.many_ways import WaysOfStages
from deepspeed_partition.planner.solvers.step.orders import DepthRule
from deepspeed_partition.planner.solvers.step.partly_recomputing import PartlyRecomputing
from deepspeed_partition.planner.solvers.step.recomputing_step import (
    MixedChoices,
    lacks_room,
    wanted_in_flight,
)
from deepspeed_partition.planner.solvers.step.saved_steps import try_saved
from deepspeed_partition.planner.solvers.step.step_bounds import most_bound_seconds, step_lower_bound
from deepspeed_partition.planner.solvers.step.step_search import StepSearch, step_engine
from deepspeed_partition.planner.solvers.uniform_recomputation import Uniform, uniform_choices

CONTIGUOUS_SHARE, GROUP_SHARE, WALK_SHARE, SEARCH_SHARE = 0.6, 0.6, 0.7, 0.85
"""Shares of the time that is left: for contiguous partitions where others follow, for orders by groups, for
allocations that follow no pattern, and for all that is searched. The rest is for the full steps of the best, and
for the pattern of an allocation that has none yet."""
NUM_POLISHED_AGAIN = 3
"""Number of times that boundaries follow the orders that were changed one by one, and orders the boundaries."""
FIRST_SHARE, PLAIN_SHARE, UNIFORM_SHARE = 0.3, 0.5, 0.3
"""Shares of the time that is left, where layers may be recomputed: for what the first partitions may recompute,
for the search without that, and with each uniform choice."""


def with_best_step(problem: Problem, answer: Answer) -> Answer:
    """A solver's answer with the shortest step that is found from it, where the solver asks for a search.

    Raises:
        DeadlinePassed: before any step was found.
    """
    if answer.step_search is None:
        return answer
    cuts, patterns = next(iter(answer.cuts), None), answer.patterns
    shared = answer.step_search == "any"
    if problem.recomputation is not None:
        search = recomputing_search(problem, cuts, patterns, shared=shared)
    else:
        search = searched(problem, cuts, patterns, shared=shared).every
    try_saved(problem, search, answer.starts)
    if shared:
        _walk_and_polish(problem, search)
    steps = tuple(islice(search.steps(patterns), 1))
    are_shared = problem.platform.port_bandwidth is not None
    others = tuple(contenders(search, steps[0], patterns)) if steps and are_shared else ()
    return replace(answer, steps=steps, other_steps=others)


@dataclass(frozen=True, slots=True)
class Searches:
    """The search among contiguous partitions, and that among all allocations; one and the same without the others.

    The second takes over what the first finds, and never the other way round. So the first finds what it would
    find alone, and devices with several stages make no step longer.
    """

    contiguous: StepSearch
    every: StepSearch

    @property
    def shared(self) -> bool:
        return self.every is not self.contiguous

    def take_over(self) -> None:
        """Tell the second search what the first one has found."""
        if self.shared:
            self.every.take_over(self.contiguous)


def searched(
    problem: Problem, cuts: Cuts | None, patterns: Sequence[Pattern], *, shared: bool, share: float = SEARCH_SHARE
) -> Searches:
    """Return the search for the shortest step, at its end but for the orders that are changed one by one.

    Args:
        cuts: the boundaries of the contiguous partition of the shortest period; None where none fits.
        patterns: patterns of allocations with several stages on a device.
        shared: whether devices may have several stages.
        share: the part of the time that is left for it.
    """
    contiguous = StepSearch(problem)
    if not shared:
        if cuts is not None:
            contiguous.deadline = problem.deadline.part(share)
            contiguous.search_contiguous(cuts)
        return Searches(contiguous, contiguous)
    every = StepSearch(problem)
    every.engines = contiguous.engines
    searches = Searches(contiguous, every)
    interleaving = None if problem.flushes else InterleavedSearch(every)
    if interleaving is not None:
        every.deadline = problem.deadline.part(share)
        interleaving.begin()
    if cuts is not None:
        contiguous.must_find = not every.found
        contiguous.deadline = problem.deadline.part(share * CONTIGUOUS_SHARE / SEARCH_SHARE)
        contiguous.search_contiguous(cuts)
    searches.take_over()
    every.deadline = problem.deadline.part(share)
    every.search_shared(patterns)
    if interleaving is not None:
        interleaving.search_all()
    return searches


def recomputing_search(
    problem: Problem, cuts: Cuts | None, patterns: Sequence[Pattern], *, shared: bool
) -> StepSearch:
    """Return the search for the shortest step where layers may be recomputed, at its end as that of ``searched``.

    Args:
        cuts: the boundaries of the shortest period with recomputation; None where none fits.
        patterns: of allocations in which nothing is recomputed.
    """
    plain = replace(problem, recomputation=None)
    first = _first_choices(problem, plain, cuts)
    best = best_partition(plain.times, plain.table, plain.constraints, plain.deadline)
    searches = searched(plain, None if best is None else best.cuts, patterns, shared=shared, share=PLAIN_SHARE)
    if searches.every.out_of_time():  # else a short step would only narrow what follows
        searches.contiguous.take_over(first)
        searches.take_over()
    _search_recomputing(problem, searches, cuts)
    MixedChoices(problem, searches.contiguous).try_all()
    searches.contiguous.take_over(first)
    searches.take_over()
    return searches.every


def _walk_and_polish(problem: Problem, search: StepSearch) -> None:
    """Look for allocations that follow no pattern, and change the orders of the best ones one by one.

    Args:
        problem: the problem of the deadline.
        search: a search that has ended, without recomputation but for what its allocations say.
    """

    def lower_bound() -> int:
        return step_lower_bound(search.problem, contiguous=False)

    ways: WaysOfStages | None = None
    if not search.problem.flushes and problem.deadline.remaining_seconds() > most_bound_seconds(search.problem):
        search.deadline = problem.deadline.part(GROUP_SHARE)
        GroupSearch(search).run(lower_bound)
        search.deadline = problem.deadline.part(WALK_SHARE)
        Annealing(search).run(lower_bound)
        # Where the best step recomputes nothing, what recomputes is a detour in which little else is tried.
        if problem.recomputation is not None and any(each.recomputed for each in search.leaders()[:1]):
            search.polish()
            ways = WaysOfStages(problem)
            GroupSearch(search, ways).run(lower_bound)
    search.deadline = problem.deadline.part(SEARCH_SHARE)
    search.polish()
    for _ in range(NUM_POLISHED_AGAIN):
        if search.problem.flushes or not GroupSearch(search, ways).move_boundaries():
            break
        search.polish()


def _search_recomputing(problem: Problem, searches: Searches, cuts: Cuts | None) -> None:
    """Let searches that have ended without recomputation go on with it, where they lack room."""
    assert problem.recomputation is not None
    both = (searches.contiguous, searches.every)
    lacking = [search for search in dict.fromkeys(both) if not search.found or lacks_room(problem, search)]
    modes = ["stage"] if problem.recomputation.mode == "stage" else ["stage", "block"]
    for mode in modes if lacking else ():
        if searches.every.found and problem.deadline.remaining_seconds() <= most_bound_seconds(problem):
            return  # what follows takes as long to begin, which is long in long chains
        # What ``stage`` finds is found first, so that no other mode is slower.
        given = problem
        if mode != problem.recomputation.mode:
            given = replace(problem, recomputation=Recomputation(problem.times, mode))
        for choice in uniform_choices(given):
            if choice.whole_stages == (mode == "stage"):
                _adopt(searches, lacking, choice)
            del choice  # its tables, before those of the next one
        if searches.contiguous in lacking:
            search = searches.contiguous
            share = CONTIGUOUS_SHARE if searches.shared else SEARCH_SHARE
            search.deadline = problem.deadline.part(share)
            MixedChoices(given, search).search_contiguous(cuts)
            searches.take_over()
        if searches.shared and searches.every in lacking:
            search = searches.every
            search.deadline = problem.deadline.part(SEARCH_SHARE)
            mixed = MixedChoices(given, search)
            mixed.search_shared()
            # A shorter step than any so far leads to other partitions.
            mixed.search_contiguous(cuts)
            if not problem.flushes:
                PartlyRecomputing(given, search).search_all()


def _first_choices(problem: Problem, plain: Problem, cuts: Cuts | None) -> StepSearch:
    """Return a search for what the even partition, and that of the shortest period, may recompute; it is short.

    What comes next may take all of a short limit: with 64 devices a search of 3 s had a longer step than the even
    partition, which was found in 0.2 s. Nothing is tried where that has room for what hides transfers.
    """
    search = StepSearch(plain)
    even = uniform(problem.chain, problem.constraints.max_stages)
    allowed, room = problem.constraints.allowed(problem.table), problem.table.max_in_flight
    if all(room[stage] >= wanted_in_flight(problem) for stage in pairwise(even)):
        return search
    search.deadline = problem.deadline.part(FIRST_SHARE)
    for each in dict.fromkeys((even,) if cuts is None else (even, cuts)):
        if all(allowed[stage] for stage in pairwise(each)) and not search.ended():
            MixedChoices(problem, search).try_partition(each)
    return search


def _adopt(searches: Searches, lacking: Sequence[StepSearch], choice: Uniform) -> None:
    """Take over the steps that are found where everything is recomputed."""
    deadline = searches.every.problem.deadline.part(UNIFORM_SHARE)
    problem = replace(choice.problem, deadline=deadline)
    if searches.every.found and deadline.remaining_seconds() < most_bound_seconds(problem):
        return  # the bound alone takes longer
    wanted = [
        search
        for search in lacking
        if step_lower_bound(problem, contiguous=search is searches.contiguous) < search.best
    ]
    if not wanted:
        return
    shared = searches.shared and searches.every in wanted
    best = best_partition(problem.times, problem.table, problem.constraints, problem.deadline)
    if best is None and not shared:
        return
    others = searched(problem, None if best is None else best.cuts, (), shared=shared)
    if searches.contiguous in wanted:
        searches.contiguous.adopt(others.contiguous, choice.chosen)
        searches.take_over()
    if shared:
        searches.every.adopt(others.every, choice.chosen)


def fixed_step(problem: Problem, cuts: Cuts) -> Step:
    """Return the step of given boundaries under DeepSpeed's 1F1B: depth P - s, or as near as memory allows.

    With recomputation it is the shortest that is found. Where not even one micro-batch at a time fits, which only
    the step shows, that is the answer.
    """
    plain = replace(problem, recomputation=None)
    search, placement = StepSearch(plain), Placement.contiguous(cuts)
    if not problem.flushes:
        search.attempt(placement, "1F1B", tuple(range(len(cuts) - 1, 0, -1)))
    if problem.recomputation is not None:
        MixedChoices(problem, search).try_partition(cuts)
    found = next(search.steps(), None)
    if found is not None:
        return found
    in_flight = problem.fewest_in_flight
    rule = DepthRule("furthest" if problem.flushes else "1F1B", (in_flight,) * (len(cuts) - 1))
    choice = choice_for(problem, cuts)
    return search.step(placement if choice is None else placement.recomputing(choice[0]), rule)


def memory_of_flush(problem: Problem) -> int:
    """Return the bytes per device with which a contiguous partition has a whole batch in flight."""
    plain = replace(problem, recomputation=None)
    return min(map(_memory_of_flush, [plain, *(each.problem for each in uniform_choices(problem))]))


def _memory_of_flush(problem: Problem) -> int:
    table, in_flight = problem.table, problem.fewest_in_flight
    found = min_max_partitions(problem, lambda from_end: table.needs(in_flight))
    cuts = min(found, key=lambda each: each[1])[0]
    engine = step_engine(problem, Placement.contiguous(cuts))
    rule = DepthRule("furthest", (in_flight,) * (len(cuts) - 1))
    assert problem.num_micro_batches is not None
    run = engine.run(problem.num_micro_batches, rule.choice(engine, problem.num_micro_batches))
    assert run is not None
    return max(engine.peaks(run))
