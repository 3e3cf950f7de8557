"""Steps beside the shortest one, of which one may take less where messages share the ports of hosts.

A search goes by the step in which a port carries one message at a time. ``schedule/shared_ports.py`` says how long
a step takes where messages share it, and which of these steps takes least is chosen in ``planning``. Of the best
few allocations these are the orders that the search remembers and, on contiguous partitions, plain ones: 1F1B as
deep as DeepSpeed's, 1F1B that hides transfers, and deeper ones, up to all forwards first as in GPipe, each as deep
as memory allows.

Cost: a step is simulated once for each order, and some times as long as that goes into its time on shared ports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.interface import Step
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.step.orders import DepthRule, Rule
from deepspeed_partition.planner.solvers.step.step_search import StepSearch
from deepspeed_partition.planner.solvers.step.step_simulator import WaitInCircleError

NUM_ALLOCATIONS = 6
"""Most allocations with contenders."""
MOST_OPERATIONS = 25_000
"""Most forwards and backwards of all contenders."""


def contenders(search: StepSearch, best: Step, patterns: Sequence[Pattern]) -> Iterator[Step]:
    """Yield steps that fit and may replace the best one where messages share ports, those of its allocation first.

    Args:
        search: a search that has ended.
        best: its shortest step.
        patterns: patterns of allocations with several stages on a device.
    """
    known = {pattern.placement: pattern for pattern in patterns}
    if isinstance(best.steady, Pattern):
        known[best.steady.placement] = best.steady
        first = best.steady.placement
    else:
        first = Placement.contiguous(best.steady, best.recomputed)
    # A pattern for other allocations would have to be searched.
    leaders = (each for each in search.leaders() if each.is_contiguous or each in known)
    seen, left = {best.orders}, MOST_OPERATIONS
    for placement in islice(dict.fromkeys([first, *leaders]), NUM_ALLOCATIONS):
        for rule in _rules(search, placement):
            left -= len(search.engine(placement).ticks) * search.num_micro_batches
            if left < 0 or search.problem.deadline.passed():
                return
            step = _step_that_fits(search, placement, rule, known.get(placement))
            if step is not None and step.orders not in seen:
                seen.add(step.orders)
                yield step


def _rules(search: StepSearch, placement: Placement) -> list[Rule]:
    """Return the orders of an allocation that are worth a look: those that were found, and plain ones."""
    rules: list[Rule] = []
    if placement in search.found:
        rules.append(search.found[placement].rule)
    rules += [rule for (each, _), (_, rule) in search.by_name.items() if each == placement]
    if placement.is_contiguous and not search.problem.flushes:
        rooms = search.engine(placement).most_in_flight
        rules += [DepthRule("1F1B", _within(depths, rooms)) for depths in _plain_depths(search, placement)]
    return list(dict.fromkeys(rules))


def _plain_depths(search: StepSearch, placement: Placement) -> Iterator[list[int]]:
    """Yield depths of 1F1B: DeepSpeed's, one to three more for each stage behind, twice as many, and all."""
    count = search.num_micro_batches
    from_end = range(len(placement.devices), 0, -1)
    for each in (1, 2, 3):
        yield [min(1 + each * (stage - 1), count) for stage in from_end]
    yield [min(2 * stage, count) for stage in from_end]
    yield [count for _ in from_end]


def _within(depths: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...]:
    """Return depths that the stages have room for and that never rise, or a stage would wait forever."""
    return tuple(accumulate((min(pair) for pair in zip(depths, rooms, strict=True)), min))


def _step_that_fits(search: StepSearch, placement: Placement, rule: Rule, steady: Pattern | None) -> Step | None:
    if isinstance(rule, DepthRule) and min(rule.depths) < search.problem.fewest_in_flight:
        return None
    try:
        step = search.step(placement, rule, steady)
    except WaitInCircleError:
        return None
    return step if search.peak_bytes(placement, rule) <= search.problem.platform.memory_bytes else None
