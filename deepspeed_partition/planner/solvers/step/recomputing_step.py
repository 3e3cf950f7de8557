"""What the stages of an allocation recompute in a step: choices that differ from stage to stage.

For some depths, micro-batches in flight of each stage, each stage takes the fastest way to recompute it that has
room for its depth. Tried are the depths of ``step_search.py``, each stage alone as a whole, and, from the best
allocation, another way for a single stage, one more or less in flight, and boundaries that move by a layer.

Where there are few (``MOST_CHOICES``), every way of every stage of every contiguous partition is tried, and each
under all depths where those are few too: no step of 1F1B is shorter then.

Method: local search with a simulation, as ``step_search.py``; beyond small problems nothing is proved. Cost: its
simulations, with the ways of each stage that is looked at (``recomputation.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations_with_replacement, pairwise, product
from math import comb, prod

import numpy as np

from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.memory import UNLIMITED
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.recomputation import SMALL, Ways, rooms
from deepspeed_partition.planner.solvers.contiguous.partition_search import best_partition
from deepspeed_partition.planner.solvers.contiguous.recomputing import choice_for, useful
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.step.orders import DepthRule
from deepspeed_partition.planner.solvers.step.partition_candidates import moved_boundaries
from deepspeed_partition.planner.solvers.step.step_search import FEW, StepSearch, step_engine

MOST_PARTITIONS = 40
"""Most partitions for which choices of recomputation are tried."""
MOST_CHOICES, MOST_DEPTHS = 500, 100
"""Number of partitions with a way for each stage up to which all are tried; and of depths for each."""
NUM_SHARED = 3
"""Number of allocations with several stages on a device for which some are."""


def wanted_in_flight(problem: Problem) -> int:
    """Return how many micro-batches in flight hide all transfers of a contiguous partition: 2 P - 1, or all."""
    assert problem.num_micro_batches is not None
    return min(problem.num_micro_batches, 2 * problem.constraints.max_stages - 1)


def lacks_room(problem: Problem, search: StepSearch) -> bool:
    """Return whether memory may keep the best step that was found from being shorter.

    It does not where each stage that a device may run in the time of the step has room for as many micro-batches
    in flight as hide all transfers, 2 P - 1.
    """
    wanted = wanted_in_flight(problem)
    assert problem.num_micro_batches is not None
    compute, table = problem.times.compute, problem.table
    loads = compute[None, :] - compute[:, None]
    short = loads <= search.best / problem.num_micro_batches
    allowed = problem.constraints.allowed(table)
    return bool((allowed & short & (table.max_in_flight < wanted)).any())


class MixedChoices:
    """Choices of recomputation for the allocations of a search, which remembers what is found.

    Args:
        problem: the problem with recomputation.
        search: a search for the same step, without.
    """

    def __init__(self, problem: Problem, search: StepSearch) -> None:
        assert problem.recomputation is not None and problem.num_micro_batches is not None
        self.problem, self.search, self.costs = problem, search, problem.recomputation
        self.num_micro_batches = problem.num_micro_batches

    def search_contiguous(self, steady: Cuts | None) -> None:
        """Try choices for the most promising partitions, and go on from the best; ``steady``: one more of them."""
        search = self.search
        search.start_again()
        for cuts in self._partitions(steady):
            if search.ended():
                return
            self.try_partition(cuts)
        self._descend()
        search.refine_leaders()

    def search_shared(self) -> None:
        """Try choices for the best allocations with several stages on a device."""
        search = self.search
        search.start_again()
        for placement in [each for each in search.leaders() if not each.is_contiguous][:NUM_SHARED]:
            for choice in self._by_stage(placement):
                if not search.ended():
                    search.try_shared(placement.recomputing(choice))
        search.refine_leaders()

    def try_partition(self, cuts: Cuts) -> None:
        """Try what the stages of a contiguous partition may recompute."""
        search, placement = self.search, Placement.contiguous(cuts)
        steady = choice_for(self.problem, cuts)
        if steady is not None:
            search.try_contiguous(placement.recomputing(steady[0]))
        for depths in self._depths(len(cuts) - 1):
            search.try_contiguous(self._by_need(cuts, depths))
        for choice in self._by_stage(placement):
            search.try_contiguous(placement.recomputing(choice))

    def try_all(self) -> None:
        """Try every choice for every contiguous partition, where there are few, under every depth."""
        search, m = self.search, self.num_micro_batches
        bounds = {each: step_engine(self.problem, each).bound(m) for each in self._every_choice()}
        for placement in sorted(bounds, key=lambda each: (bounds[each], each.cuts, each.recomputed)):
            if bounds[placement] >= search.best or search.ended():
                return
            search.try_contiguous(placement)
            if not self.problem.flushes:
                self._try_depths(placement)

    def _try_depths(self, placement: Placement) -> None:
        """Try every depth of a partition, where there are few; no stage has more in flight than the one before."""
        search, num_stages = self.search, len(placement.devices)
        most = min(self.num_micro_batches, search.engine(placement).most_in_flight[0])
        if comb(most + num_stages - 1, num_stages) > MOST_DEPTHS:
            return
        every = combinations_with_replacement(range(most, 0, -1), num_stages)
        for depths in dict.fromkeys(search.within_room(placement, each) for each in every):
            if search.ended():
                return
            search.run(placement, DepthRule("1F1B", depths), search.best)

    def _every_choice(self) -> list[Placement]:
        """Return every partition with every way for its stages; none where there are too many."""
        found: list[Placement] = []
        if self.problem.chain.num_layers > SMALL:
            return found
        for cuts in self.search.every_partition(FEW):
            stages = list(pairwise(cuts))
            ways = [self.costs.ways(stage) for stage in stages]
            fitting = [
                np.flatnonzero(rooms(self.problem.table, stage, each.stash, each.transient)).tolist()
                for stage, each in zip(stages, ways, strict=True)
            ]
            if len(found) + prod(map(len, fitting)) > MOST_CHOICES:
                return []
            found += [
                Placement.contiguous(cuts, tuple(map(Ways.blocks, ways, numbers))) for numbers in product(*fitting)
            ]
        return found

    def _depths(self, num_stages: int) -> Iterator[tuple[int, ...]]:
        """Yield depths for which stages may want room."""
        m, fewest = self.num_micro_batches, self.problem.fewest_in_flight
        every = (
            range(num_stages, 0, -1),
            range(2 * num_stages - 1, 0, -2),
            [m] * num_stages,
            *([count] * num_stages for count in (1, 2, num_stages)),
        )
        yield from dict.fromkeys(tuple(max(fewest, min(depth, m)) for depth in depths) for depths in every)

    def _by_need(self, cuts: Cuts, depths: Iterable[int]) -> Placement:
        """Return a partition with the fastest way of each stage with room for its depth, else with most room."""
        chosen: list[Blocks] = []
        for stage, depth in zip(pairwise(cuts), depths, strict=True):
            ways = self.costs.ways(stage)
            some = useful(self.problem, stage, ways, UNLIMITED)
            number = next((number for number, _, room in some if room >= depth), some[-1][0] if some else None)
            chosen.append(() if number is None else ways.blocks(number))
        return Placement.contiguous(cuts, tuple(chosen))

    def _by_stage(self, placement: Placement) -> Iterator[tuple[Blocks, ...]]:
        """Yield the choices to recompute one stage as a whole, and all stages."""
        stages = [stage for stage, _ in placement.stages]
        whole: list[Blocks] = [(stage,) if self.costs.allows(*stage) else () for stage in stages]
        yield tuple(whole)
        for index, blocks in enumerate(whole):
            if blocks:
                yield tuple(blocks if index == other else () for other in range(len(stages)))

    def _partitions(self, steady: Cuts | None) -> list[Cuts]:
        """Return partitions, the most promising first: by the bound of their steps in unlimited memory."""
        roomy = self.problem.with_memory(LARGEST_MEMORY_BYTES)
        best = best_partition(roomy.times, roomy.table, roomy.constraints, roomy.deadline)
        partitions = [each.cuts for each in (*self.search.tried, *self.search.found) if each.is_contiguous]
        first = [] if steady is None else [steady]
        if best is not None:
            first += [best.cuts, *(each.cuts for each in moved_boundaries(Placement.contiguous(best.cuts)))]
        partitions += self.search.every_partition(FEW)
        allowed = self.problem.constraints.allowed(self.problem.table)
        bounds = {}
        for cuts in dict.fromkeys((*first, *partitions)):
            if all(allowed[stage] for stage in pairwise(cuts)):
                bound = step_engine(roomy, Placement.contiguous(cuts)).bound(self.num_micro_batches)
                if bound < self.search.best:
                    bounds[cuts] = bound
        promising = sorted(bounds, key=lambda cuts: (bounds[cuts], cuts))[:MOST_PARTITIONS]
        return list(dict.fromkeys([*first[:1], *promising]))

    def _descend(self) -> None:
        """Go from the best contiguous partition to a better neighbour, until there is none."""
        search = self.search
        while not search.ended():
            before = search.best
            centre = next((each for each in search.leaders() if each.is_contiguous), None)
            if centre is None:
                return
            rule = search.found[centre].rule
            depths = rule.depths if isinstance(rule, DepthRule) else tuple(range(len(centre.devices), 0, -1))
            for neighbour in search.promising(self._neighbours(centre, depths)):
                search.try_contiguous(neighbour)
                if search.best < before or search.ended():
                    break
            if search.best >= before:
                return

    def _neighbours(self, centre: Placement, depths: tuple[int, ...]) -> Iterator[Placement]:
        """Yield the partition with another way for a stage, other depths, or a moved boundary."""
        cuts, blocks = centre.cuts, centre.blocks
        for index, stage in enumerate(pairwise(cuts)):
            ways = self.costs.ways(stage)
            for number, _, _ in useful(self.problem, stage, ways, UNLIMITED):
                yield centre.recomputing((*blocks[:index], ways.blocks(number), *blocks[index + 1 :]))
            for change in (1, -1):
                changed = max(1, depths[index] + change)
                yield self._by_need(cuts, (*depths[:index], changed, *depths[index + 1 :]))
        for moved in moved_boundaries(Placement.contiguous(cuts)):
            yield self._by_need(moved.cuts, depths)
            yield self._by_need(moved.cuts, range(len(depths), 0, -1))
