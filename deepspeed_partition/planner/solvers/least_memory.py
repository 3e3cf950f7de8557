"""The allocation that needs least memory at a chosen period.

Memory only ever grows as a period shrinks, and a decision at a period and a memory is what the solvers are made
of; so the least memory is found by bisection over it, every answer snapped to what it really needs. For
contiguous cuts the decision is exact, and so is the answer. Allocations with one special device are tried below
that, with the schedule that an integer program finds within the period; what is not found there may exist.
"""

from __future__ import annotations

from deepspeed_partition.planner.solvers import ilp, one_f_one_b
from deepspeed_partition.planner.solvers.contiguous import cut_at, narrow
from deepspeed_partition.planner.solvers.problem import Answer, Cuts, Problem, stage_bytes
from deepspeed_partition.planner.solvers.road import Pattern, Road
from deepspeed_partition.planner.solvers.special import DeadlinePassed, SpecialSearch

RESOLUTION = 0.005
"""Of the memory: what allocations with a special device might save beyond that is not looked for."""


def contiguous_at(problem: Problem, period: int) -> tuple[Cuts, int] | None:
    """The cut whose largest device is smallest at ``period``, and its bytes; None where no cut is that fast."""
    enough = problem.with_memory(2**60)
    cuts = cut_at(enough, period)
    if cuts is None:
        return None
    return narrow(
        lambda memory_bytes: cut_at(problem.with_memory(memory_bytes), period),
        lambda found, _: bytes_at(problem, found, period),
        cuts,
        bytes_at(problem, cuts, period),
        1,
    )


def bytes_at(problem: Problem, cuts: Cuts, period: int) -> int:
    """Of the largest device of a cut under 1F1B* at ``period``."""
    in_flight = one_f_one_b.in_flight(one_f_one_b.pseudo_stage_loads(problem.times, cuts), period)
    return max(stage_bytes(problem, cuts, in_flight))


def one_special_at(problem: Problem, period: int, below: int) -> Pattern | None:
    """A pattern within ``period`` in less than ``below`` bytes, as few as are found; None where none is."""
    best: Pattern | None = None
    least = 1
    while not problem.deadline.passed() and least < below * (1 - RESOLUTION):
        tighter = problem.with_memory((least + below) // 2)
        pattern = _pattern_at(tighter, period)
        if pattern is None:
            least = tighter.platform.memory_bytes
        else:
            best, below = pattern, tighter.platform.memory_bytes
    return best


def answer_at(problem: Problem, period: int, *, special: bool) -> Answer:
    """The allocation that needs least memory at ``period``, empty where none is that fast.

    Args:
        special: allocations with one special device, too. What is proved is proved of contiguous cuts.
    """
    found = contiguous_at(problem, period)
    if found is None:
        return Answer(())
    cuts, num_bytes = found
    if special and problem.platform.num_devices > 1:
        pattern = one_special_at(problem, period, num_bytes)
        if pattern is not None:
            return Answer((), None, (pattern,))
    return Answer((cuts,), period)


def _pattern_at(problem: Problem, period: int) -> Pattern | None:
    for estimate in ("safe", "peak"):
        try:
            placement = SpecialSearch(problem, estimate).decide(period)
        except DeadlinePassed:
            return None
        if placement is None or placement.is_contiguous:
            continue
        pattern = ilp.schedule(Road(problem, placement), period + 1, problem.deadline).pattern
        if pattern is not None:
            return pattern
    return None
