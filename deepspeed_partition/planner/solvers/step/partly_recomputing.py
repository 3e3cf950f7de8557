"""Search for a step with interleaved stages of which some recompute: as few as fit into memory in a given order.

The interleaved allocations that are most promising without regard to memory, and those that other searches found,
are tried in the orders of Megatron-LM, in groups of several sizes, with more and fewer micro-batches in flight.
For each order, every device recomputes as little as it must (``fewest_recomputed.py``). More in flight keeps
devices busy and must recompute more; which of the two is shorter, a simulation tells. From the best ones on,
layers are moved between stages and limits are changed, as long as that shortens the step.

Method: local search with a simulation (``step_search.py``); not in the papers. Cost: its simulations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import islice, takewhile
from math import inf

import numpy as np

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.fewest_recomputed import FewestRecomputed, Rows, rows_of
from deepspeed_partition.planner.solvers.step.interleaved_search import InterleavedSearch, changed_limits
from deepspeed_partition.planner.solvers.step.interleaving import moved_layers, short_ends
from deepspeed_partition.planner.solvers.step.order_times import look_at
from deepspeed_partition.planner.solvers.step.orders import (
    GroupRule,
    fixed_orders,
    megatron_limits,
)
from deepspeed_partition.planner.solvers.step.step_search import (
    Outcome,
    StepSearch,
    step_engine,
)
from deepspeed_partition.planner.solvers.step.step_simulator import (
    Positions,
    StepEngine,
    WaitInCircleError,
    in_order,
)
from deepspeed_partition.planner.solvers.uniform_recomputation import extra_ticks

NUM_FOUND, NUM_PROMISING, NUM_TRIED_MORE, NUM_CENTRES, NUM_NEIGHBOURS = 8, 16, 4, 4, 40
"""Numbers of allocations that are taken from other searches, that are taken by their promise, that are tried in
more orders, and from which on layers are moved; and most cuts that are tried around one."""
SHARE_OF_DESCENT = 0.5
"""Simulations for these, as a share of those for all allocations."""
SHARES = (1.0, 0.5, 0.0, 0.75, 0.25)
"""Parts of the way from the least limits of an order to Megatron-LM's."""
NUM_ATTEMPTS = 3
"""Most choices for one order: where more waits than buffers are reserved, the next one has less room."""


class PartlyRecomputing:
    """Search among interleaved allocations of which some stages recompute; ``search`` remembers what it finds.

    Args:
        problem: the problem with recomputation.
        search: a search for the same step, without.
    """

    def __init__(self, problem: Problem, search: StepSearch) -> None:
        assert not problem.flushes
        self.problem, self.search, self.m = problem, search, search.simulated
        self.choices = FewestRecomputed(problem)
        self.roomy = search.problem.with_memory(LARGEST_MEMORY_BYTES)
        self.rows: dict[tuple[tuple[int, ...], GroupRule], list[Rows]] = {}
        self.best_of: dict[Placement, tuple[float, GroupRule, Placement]] = {}
        """Least step of each allocation, its rule, and the allocation with what it recomputes."""
        self.engines: dict[Placement, StepEngine] = {}

    def search_all(self) -> None:
        """Try the most promising allocations, then more orders and other cuts for the best."""
        search = self.search
        search.start_again()
        must_find, search.must_find = search.must_find, False
        for placement in self._candidates():
            for group in dict.fromkeys(min(each, self.m) for each in (self._num_devices, self.m)):
                self._try_limits(placement, group)
        for placement in self._leaders()[:NUM_TRIED_MORE]:
            for group in (2 * self._num_devices, self._num_devices // 2, 2, 1):
                if 1 <= group < self.m:
                    self._try_limits(placement, group)
        search.start_again(SHARE_OF_DESCENT)
        self._descend_from_leaders()
        search.must_find = must_find

    @property
    def _num_devices(self) -> int:
        return self.problem.platform.num_devices

    def _candidates(self) -> list[Placement]:
        search, roomy = self.search, StepSearch(self.roomy)
        roomy.simulated, roomy.must_find, roomy.deadline = self.m, False, search.deadline
        roomy.best = search.best
        found = (each for each in search.leaders() if not each.is_contiguous)
        known = list(islice(dict.fromkeys(map(_plain, found)), NUM_FOUND))
        promising = InterleavedSearch(roomy).by_promise(search.near())
        every = dict.fromkeys([*known, *islice(promising, NUM_PROMISING)])
        return [each for each in every if len(each.devices) > self._num_devices]

    def _leaders(self) -> list[Placement]:
        """Return the allocations that were tried, the shortest step first."""
        return sorted(self.best_of, key=lambda each: (self.best_of[each][0], each.cuts, each.devices))

    def _try_limits(self, placement: Placement, group: int) -> None:
        """Try groups of a size with several limits on what is in flight."""
        if group == self.m < self.search.num_micro_batches:
            return  # the beginning of a step does not tell the end of its one group
        for ends in dict.fromkeys(((), short_ends(self.problem, placement))):
            in_turn = [device for stage, device in enumerate(placement.devices) if stage not in ends]
            limits = megatron_limits(in_turn, group)
            least = [(in_turn.count(place) - 1) * group + 1 for place in range(len(limits))]
            every = (
                tuple(low + max(0, round((high - low) * share)) for low, high in zip(least, limits, strict=True))
                for share in SHARES
            )
            for some in dict.fromkeys(every):
                if self.search.ended():
                    return
                self._attempt(placement, GroupRule(group, some, alternates=True, at_once=ends))

    def _attempt(self, placement: Placement, rule: GroupRule, shorter_than: float | None = None) -> bool:
        """Try an order with as little recomputation as it needs; return whether it is shorter than asked for.

        Args:
            placement: an allocation without recomputation.
        """
        search, memory = self.search, self.problem.platform.memory_bytes
        limit = search.near() if shorter_than is None else shorter_than
        plain = self._engine(placement)
        if plain.bound(search.num_micro_batches) >= limit:
            return False
        key = placement.devices, rule
        if key not in self.rows:
            orders = self._orders(plain, rule)
            if orders is None:
                return False
            self.rows[key] = [rows_of(plain, *each) for each in enumerate(orders)]
        search.operations_left -= len(plain.ticks) * self.m
        margin = [0] * plain.num_devices
        for _ in range(NUM_ATTEMPTS):
            chosen = self.choices.choose(placement, plain, self.rows[key], margin)
            if chosen is None or not search.problem.allows(chosen):
                return False
            engine = step_engine(search.problem, chosen)
            if engine.bound(search.num_micro_batches) >= limit:
                return False
            outcome = search.run(chosen, rule, limit)
            if outcome is not Outcome.TOO_LARGE:
                break
            margin = [
                more + max(0, peak - memory) for more, peak in zip(margin, self._peaks(engine, rule), strict=True)
            ]
        if outcome is Outcome.TOO_LARGE or chosen not in search.found:
            return False
        estimate = search.found[chosen].estimate
        if estimate < self.best_of.get(placement, (inf, rule, chosen))[0]:
            self.best_of[placement] = estimate, rule, chosen
        return outcome is Outcome.FITS

    def _peaks(self, engine: StepEngine, rule: GroupRule) -> list[int]:
        self.search.operations_left -= len(engine.ticks) * self.m
        orders = self._orders(engine, rule)
        assert orders is not None
        run = look_at(engine, orders, self.m).run or engine.run(self.m, in_order(orders))
        assert run is not None
        return engine.peaks(run)

    def _orders(self, engine: StepEngine, rule: GroupRule) -> Sequence[Positions] | None:
        """Return what each device does; None where devices wait in a circle."""
        orders = fixed_orders(rule, engine, self.m)
        if orders is not None:
            return orders
        self.search.operations_left -= len(engine.ticks) * self.m
        try:
            run = engine.run(self.m, rule.choice(engine, self.m))
        except WaitInCircleError:
            return None
        assert run is not None
        return [tuple(order) for order in run.orders]

    def _engine(self, placement: Placement) -> StepEngine:
        if placement not in self.engines:
            self.engines[placement] = step_engine(self.roomy, placement)
        return self.engines[placement]

    def _descend_from_leaders(self) -> None:
        """Go from the best allocations, each of which is a centre once, to better ones around them."""
        centres: set[Placement] = set()
        while len(centres) < NUM_CENTRES and not self.search.ended():
            placement = next((each for each in self._leaders() if each not in centres), None)
            if placement is None:
                return
            centres.add(placement)
            while not self.search.ended():
                estimate = self.best_of[placement][0]
                around = takewhile(lambda _: not self.search.out_of_time(), self._around(placement))
                better = next((each for each in around if self._attempt(*each, estimate)), None)
                if better is None:
                    break
                placement = better[0]

    def _around(self, placement: Placement) -> Iterator[tuple[Placement, GroupRule]]:
        """Yield the allocation under other limits, and others with layers moved, the most balanced first.

        Devices are balanced with what they recompute now.
        """
        _, rule, chosen = self.best_of[placement]
        for limits in changed_limits(rule.limits):
            yield placement, replace(rule, limits=limits)
        compute, devices = self.problem.times.compute, np.array(placement.devices)
        extra = np.bincount(devices, extra_ticks(self.problem.times, chosen))
        loads = []
        for cuts in moved_layers(placement.cuts):
            load = extra + np.bincount(devices, np.diff(compute[list(cuts)]))
            loads.append((float(load.max()), float((load**2).sum()), cuts))
        for _, _, cuts in nsmallest(NUM_NEIGHBOURS, loads):
            yield Placement(cuts, placement.devices), rule


def _plain(placement: Placement) -> Placement:
    return placement.recomputing(())
