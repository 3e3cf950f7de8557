"""Search for a step with interleaved stages: regular allocations, the orders known for them, and what lies around.

1. Every allocation of ``interleaving.py`` whose bound is below the best step so far is tried under a few orders:
   Megatron-LM's, the same with a backward whenever it can begin, breadth first, and whatever is furthest.
2. The best of them are tried under more: groups of one to all micro-batches, other limits on what is in flight.
3. Layers are moved between the stages of the best, as long as that shortens their step under the order that suits
   them best.

Where a first or a last stage shares its device, an embedding or a head, orders are tried in which it runs at once
and those of the other stages go by groups as if it were not there.

An order that needs too much memory is tried with fewer micro-batches in flight, by bisection.

Method: local search with a simulation (``step_search.py``); the orders are those of Megatron-LM (D. Narayanan et
al., 2021), breadth-first (J. Lamy-Poirier, 2022) and depth-first pipelines. Cost: its simulations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.step.interleaving import (
    balanced,
    interleaved,
    moved_layers,
    short_ends,
)
from deepspeed_partition.planner.solvers.step.order_times import look_at
from deepspeed_partition.planner.solvers.step.orders import (
    GroupRule,
    in_flight,
    least_bytes,
    megatron_limits,
    natural_limits,
)
from deepspeed_partition.planner.solvers.step.step_search import (
    MOST_NEIGHBOURS,
    Outcome,
    StepSearch,
    step_engine,
)

NUM_BEGUN, NUM_TRIED_MORE, NUM_CENTRES = 3, 6, 24
"""Numbers of allocations that are tried first, that are tried under more orders, and between whose stages layers
are moved."""
SHARE_OF_MORE = 0.5
"""Simulations for more orders, as a share of those for all allocations."""
NUM_BALANCED, LEAST_SCREENED = 200, 32
"""Number of allocations whose devices are balanced, and fewest micro-batches with which all are compared."""
SHORT_SECONDS = 2.0
"""Time of a search in which others may leave none for interleaved allocations."""
SHARE_OF_LOOKS = 0.25
"""Most time for a first look at all allocations, as a share of that for the whole search."""
MOST_OPERATIONS_LOOKED_AT = 4_000_000
"""Number of operations up to which allocations are compared before any is simulated: a second or two."""
MORE_AT_ONCE = (1, 2)
"""Forwards beyond Megatron-LM's limits where a head runs at once on another device."""
NUM_STEPS = 8
"""Number of limits between the least and the wanted one among which bisection looks for what has room."""


class InterleavedSearch:
    """Search among interleaved allocations; what it finds is remembered by ``search``."""

    def __init__(self, search: StepSearch) -> None:
        assert not search.problem.flushes
        self.search, self.problem = search, search.problem
        self.m = search.simulated

    def begin(self) -> None:
        """Where not all allocations may be simulated: try the most promising, before anything else is searched.

        A step that is short already leaves little to look at among other allocations.
        """
        search, deadline = self.search, self.search.deadline
        search.must_find = False
        search.start_again()
        search.deadline = deadline.part(SHARE_OF_LOOKS)
        every = list(interleaved(self.problem, search.out_of_time))
        ends_soon = deadline.remaining_seconds() < SHORT_SECONDS
        least = self._least(every) if ends_soon or self._are_many(every) else {}
        search.deadline = deadline
        for placement in sorted(least, key=least.__getitem__)[:NUM_BEGUN]:
            if not search.ended():
                self.try_usual(placement)
        search.start_again()
        search.must_find = True

    def search_all(self) -> None:
        """Try all interleaved allocations, then more orders and other cuts for the best."""
        search = self.search
        search.must_find = False  # where nothing fits, that is for other searches to say
        search.start_again()
        self.screen()
        search.start_again(SHARE_OF_MORE)
        for placement in self._leaders()[:NUM_TRIED_MORE]:
            if not search.ended():
                self.try_more(placement)
        search.start_again()
        self.descend_from_leaders()
        search.must_find = True

    def descend_from_leaders(self) -> None:
        """Move layers between the stages of the best allocations, each of which is a centre once."""
        centres: set[Placement] = set()
        while len(centres) < NUM_CENTRES and not self.search.ended():
            placement = next((each for each in self._leaders() if each not in centres), None)
            if placement is None:
                return
            centres.add(placement)
            self.descend(placement)

    def screen(self) -> None:
        """Try all interleaved allocations under the usual orders, and the most promising ones balanced, too.

        Where the step is long, only its beginning is simulated, in a search of its own.
        """
        search = self.search
        few = max(LEAST_SCREENED, 3 * self.problem.platform.num_devices)
        if search.simulated >= 2 * few:
            screen = StepSearch(self.problem)
            screen.simulated, screen.best, screen.deadline = few, search.best, search.deadline
            screen.most_in_flight, screen.must_find = search.most_in_flight, False
            screen.engines = search.engines
            other = InterleavedSearch(screen)
            other.try_all()
            for placement in screen.leaders()[: 2 * NUM_TRIED_MORE]:
                search.run(placement, screen.found[placement].rule, search.near())
                if search.ended():
                    return
        else:
            self.try_all()

    def by_promise(self, shorter_than: float) -> list[Placement]:
        """Return the allocations that may take less, by the ticks that Megatron-LM's order takes at least."""
        promising = self.search.promising(interleaved(self.problem, self.search.out_of_time), shorter_than)
        least = self._least(promising)
        return sorted(least, key=least.__getitem__)

    def try_all(self) -> None:
        """Try all interleaved allocations under the usual orders, and the most promising ones balanced, too."""
        search = self.search
        first = search.promising(interleaved(self.problem, search.out_of_time), search.near())
        for number, placement in enumerate(self._by_looks(first)):
            every = [placement]
            if number < NUM_BALANCED:
                every.append(balanced(self.problem, placement, search.out_of_time))
            for each in every:
                if search.ended():
                    return
                if each not in search.tried and search.may_be_better(each):
                    self.try_usual(each)

    def _by_looks(self, placements: list[Placement]) -> list[Placement]:
        """Return allocations by the ticks that Megatron-LM's order takes at least, if not all can be simulated."""
        least = self._least(placements) if self._are_many(placements) else {}
        return sorted(placements, key=lambda each: least.get(each, inf))

    def _least(self, placements: list[Placement]) -> dict[Placement, float]:
        """Return the ticks that Megatron-LM's order takes at least, of the allocations where it has room.

        Where not all can be looked at, it is some of each number of stages and pattern of devices: the first, and
        those with as many stages on each device before others.
        """
        search, group = self.search, min(self.problem.platform.num_devices, self.m)
        numbers: Counter[tuple[int, ...]] = Counter()
        turns = []
        for placement in placements:
            numbers[placement.devices] += 1
            num_stages = len(placement.devices)
            are_uneven = num_stages % self.problem.platform.num_devices > 0
            turns.append((are_uneven, numbers[placement.devices], -num_stages))
        least: dict[Placement, float] = {}
        left = MOST_OPERATIONS_LOOKED_AT
        for _, placement in sorted(zip(turns, placements, strict=True), key=lambda each: each[0]):
            if left <= 0 or search.ended():
                break
            engine = step_engine(self.problem, placement)  # most are never simulated, so none is kept
            left -= len(engine.ticks) * self.m
            limits = megatron_limits(placement.devices, group)
            orders = GroupRule(group, limits, alternates=True).orders(engine, self.m)
            if least_bytes(engine, orders) <= self.problem.platform.memory_bytes:
                least[placement] = look_at(engine, orders, self.m, search.near()).least
        return least

    def _are_many(self, placements: list[Placement]) -> bool:
        """Return whether there are too many allocations to simulate each once."""
        return sum(2 * len(each.devices) * self.m for each in placements) > self.search.operations_left

    def try_usual(self, placement: Placement) -> None:
        """Try the orders that are most often the best."""
        search, num_devices = self.search, self.problem.platform.num_devices
        search.tried.add(placement)
        self.attempt(placement, min(num_devices, self.m), alternates=True, known=True)
        # The beginning of a step does not tell the end of its one group.
        if self.m == search.num_micro_batches and not search.out_of_time():
            self.attempt(placement, self.m, alternates=True)
        if not search.out_of_time():
            self.attempt(placement, min(num_devices, self.m), alternates=False)
        if short_ends(self.problem, placement) and not search.out_of_time():
            for more in MORE_AT_ONCE:
                self._attempt_at_once(placement, min(num_devices, self.m), more)
        if placement in search.found and not search.out_of_time():
            search.attempt(placement, "furthest", tuple(search.engine(placement).most_in_flight))

    def try_more(self, placement: Placement) -> None:
        """Try groups of all sizes, and depths that the best order so far has."""
        search, num_devices = self.search, self.problem.platform.num_devices
        for group in dict.fromkeys((num_devices, 2 * num_devices, num_devices // 2, 2, 1, self.m)):
            if 1 <= group <= self.m and (group < self.m or self.m == search.num_micro_batches):
                for alternates, known in ((True, True), (True, False), (False, False)):
                    if search.ended():
                        return
                    self.attempt(placement, group, alternates=alternates, known=known)
        rule = search.found[placement].rule if placement in search.found else None
        if rule is not None and not search.ended():
            engine = search.engine(placement)
            run = engine.run(self.m, rule.choice(engine, self.m))
            assert run is not None
            for extra in (0, 1):
                depths = tuple(count + extra for count in in_flight(engine, run.orders))
                for name in ("furthest", "oldest"):
                    search.attempt(placement, name, depths)
        if isinstance(rule, GroupRule):
            self._change_limits(placement)

    def _change_limits(self, placement: Placement) -> None:
        """Change the limits of all devices, or of one, as long as that shortens the step."""
        search, better = self.search, True
        while better:
            better = False
            rule = search.found[placement].rule
            if not isinstance(rule, GroupRule):
                return
            for limits in changed_limits(rule.limits):
                if search.ended():
                    return
                shortest = search.found[placement].estimate
                changed = replace(rule, limits=limits)
                if search.run(placement, changed, shortest) is Outcome.FITS:
                    better = True
                    break

    def attempt(self, placement: Placement, group: int, *, alternates: bool, known: bool = False) -> None:
        """Try groups of a size, with fewer micro-batches in flight where there is no room for as many.

        Args:
            known: limit what is in flight as Megatron-LM does; False: as far as devices would wait.
        """
        search = self.search
        if known:
            limits = megatron_limits(placement.devices, group)
        else:
            engine = search.engine(placement)
            num_devices = max(placement.devices) + 1
            every = GroupRule(group, (len(engine.ticks) * self.m,) * num_devices, alternates=False)
            search.operations_left -= len(engine.ticks) * self.m
            run = engine.run(self.m, every.choice(engine, self.m))
            assert run is not None
            limits = natural_limits(engine, run.orders)
        self._run_or_less(placement, GroupRule(group, limits, alternates), placement.devices)

    def _attempt_at_once(self, placement: Placement, group: int, more: int) -> None:
        """Try groups of a size among the stages between ends that run at once.

        Args:
            more: forwards beyond Megatron-LM's limits, in which the head of a micro-batch runs.
        """
        ends = short_ends(self.problem, placement)
        inner = [device for stage, device in enumerate(placement.devices) if stage not in ends]
        limits = tuple(limit + more for limit in megatron_limits(inner, group))
        self._run_or_less(placement, GroupRule(group, limits, alternates=True, at_once=ends), inner)

    def _run_or_less(self, placement: Placement, rule: GroupRule, devices: Sequence[int]) -> None:
        """Simulate a rule; where it has no room, the same with lower limits, by bisection.

        Args:
            devices: of the stages that take turns.
        """
        least = tuple((devices.count(place) - 1) * rule.group + 1 for place in range(len(rule.limits)))
        if self._run(placement, rule) is not Outcome.TOO_LARGE:
            return
        fits, too_large = -1, NUM_STEPS
        while too_large - fits > 1 and not self.search.ended():
            part = (fits + too_large) // 2
            some = tuple(
                low + max(0, high - low) * part // NUM_STEPS for low, high in zip(least, rule.limits, strict=True)
            )
            if self._run(placement, replace(rule, limits=some)) is Outcome.TOO_LARGE:
                too_large = part
            else:
                fits = part

    def _run(self, placement: Placement, rule: GroupRule) -> Outcome:
        """Simulate a rule, unless its order alone tells that it needs more memory than there is."""
        if rule.alternates:
            engine = self.search.engine(placement)
            orders = rule.orders(engine, self.search.num_micro_batches)
            if least_bytes(engine, orders) > self.problem.platform.memory_bytes:
                return Outcome.TOO_LARGE
        return self.search.run(placement, rule, self.search.near())

    def descend(self, placement: Placement) -> None:
        """Move layers between stages as long as that shortens the step under the rule that suits them best."""
        search = self.search
        while not search.ended():
            found = search.found[placement]
            for neighbour in self._around(placement):
                if search.ended():
                    return
                if search.run(neighbour, found.rule, found.estimate) is Outcome.FITS:
                    placement = neighbour
                    break
            else:
                return

    def _around(self, placement: Placement) -> list[Placement]:
        bound = self.search.found[placement].estimate
        compute, devices = self.problem.times.compute, np.array(placement.devices)
        every = (
            Placement(cuts, placement.devices)
            for cuts in moved_layers(placement.cuts)
            # Most moves keep a device busy for too long: that is sooner known than a bound.
            if np.bincount(devices, np.diff(compute[list(cuts)])).max() * self.search.num_micro_batches < bound
        )
        return list(islice(self.search.promising(every, bound), MOST_NEIGHBOURS))

    def _leaders(self) -> list[Placement]:
        """Return the allocations that were found with several stages on a device, the best first."""
        return [each for each in self.search.leaders() if not each.is_contiguous]


def changed_limits(limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield limits that are a little larger or smaller, for all devices, then for one."""
    for change in (1, -1, 2, -2):
        yield tuple(max(1, limit + change) for limit in limits)
    for change in (1, -1):
        for place, limit in enumerate(limits):
            yield (*limits[:place], max(1, limit + change), *limits[place + 1 :])
