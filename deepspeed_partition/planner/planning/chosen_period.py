"""Plans of a chosen period, in as little memory as possible."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from deepspeed_partition.planner.assembly import assemble, class_with_shared_weights
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.memory import reserves_all_slots
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.solving import solve
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Solver
from deepspeed_partition.planner.solvers.non_contiguous import min_memory_allocation
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.pattern.shared_links import is_plain
from deepspeed_partition.planner.units import exact_bytes, format_bytes, format_seconds, shown

LONGEST_PERIOD_SECONDS = 1e15


def solve_at(problem: Problem, solver: Solver, period_seconds: float) -> Plan:
    """Return the plan of a chosen period that needs the least memory.

    Raises:
        InfeasibleError: no plan of the solver is that fast, or none that is found fits in memory.
    """
    _check_period(problem, solver, period_seconds)
    clock, memory = problem.times.clock, problem.platform.memory_bytes
    period = min(clock.ticks(float(period_seconds)), problem.longest_period)
    roomy = problem.with_memory(LARGEST_MEMORY_BYTES)
    answer = _answer_at(problem, roomy, solver, period)
    every: tuple[Cuts | Pattern, ...] = (*answer.patterns, *answer.cuts)
    plans: list[Plan] = []
    if every:
        plan, _ = assemble(roomy, solver.name, answer, every[0], chosen_period=period)
        plans.append(_of_memory(problem, plan, answer))
    # Even where the plan found fits, the shortest one may take less memory.
    may_miss = isinstance(solver, MadPipe) and problem.table.training.shares
    if not plans or may_miss or (_counts_too_much(problem) and _needs(plans[0]) > memory):
        for shortest in _shortest(problem, roomy, solver, has_other=bool(plans)):
            if clock.ticks(shortest.period_seconds) <= period:
                plans.append(_of_memory(problem, shortest, None))
                if _needs(plans[-1]) <= memory and not may_miss:
                    break
    if not plans:
        is_exact = is_plain(problem.platform) and not problem.deadline.passed()
        raise InfeasibleError(
            f"no plan of {solver.name} has a period of {format_seconds(period_seconds)} in any memory: the "
            f"shortest {'is' if is_exact else 'found is'} {format_seconds(shortest.period_seconds)}"
        )
    best = min(plans, key=_needs)
    needs = _needs(best)
    if needs <= memory:
        return best
    is_least = best.proved and best.proved_class == answer.proved_class
    raise InfeasibleError(
        f"a period of {format_seconds(period_seconds)} takes {exact_bytes(needs)} ({format_bytes(needs)}) per "
        f"device {'at the least' if is_least else 'in the best plan found'}, {exact_bytes(needs - memory)} more "
        "than there are: choose a longer period or give more memory",
        short_bytes=needs - memory,
        smallest_memory_bytes=needs,
    )


def _needs(plan: Plan) -> int:
    """Return the bytes of the largest device of a plan."""
    return max(plan.peak_memory_bytes)


def _of_memory(problem: Problem, plan: Plan, answer: Answer | None) -> Plan:
    """Return a plan that says what is proved of its memory.

    Args:
        plan: a plan on devices of any memory.
        answer: what was found of the least memory; None: the plan is not from there, and nothing is proved of it.
    """
    bound_seconds = problem.times.clock.seconds(lower_bound(problem))
    proved = answer is not None and answer.best_period is not None
    proved &= is_plain(problem.platform) and reserves_all_slots(problem.platform)
    proved_class = class_with_shared_weights(problem, answer.proved_class) if answer is not None else None
    return replace(
        plan,
        platform=problem.platform,
        lower_bound_seconds=bound_seconds,
        gap=plan.period_seconds / bound_seconds - 1,
        proved=proved,
        proved_class=proved_class if proved else None,
        proved_of="memory" if proved else None,
        class_lower_bound_seconds=None,
    )


def _counts_too_much(problem: Problem) -> bool:
    """Return whether a plan may be faster, or take less memory, than the search for the least memory counts.

    It counts one transfer at a time on a link, and weights that layers share on each stage.
    """
    return not is_plain(problem.platform) or problem.table.training.shares


def _shortest(problem: Problem, roomy: Problem, solver: Solver, *, has_other: bool) -> Iterator[Plan]:
    """Yield the plans of the shortest period, in the memory that there is and in any.

    Args:
        has_other: whether there is another plan, so that none of these need exist.

    Raises:
        InfeasibleError: there is none in any memory.
    """
    if _counts_too_much(problem):
        with suppress(InfeasibleError):
            yield solve(replace(problem, is_one_of_many=True), solver)
    try:
        yield solve(roomy, solver)
    except InfeasibleError:
        if not has_other:
            raise


def _check_period(problem: Problem, solver: Solver, period_seconds: float) -> None:
    """Refuse a period that is malformed, or that this problem or solver has no plan for."""
    if problem.num_micro_batches is not None:
        raise ValueError(
            f"period_seconds is {period_seconds}: a period is of the steady state, and num_micro_batches asks for "
            "a step that drains; leave one of them out"
        )
    if isinstance(period_seconds, bool) or not isinstance(period_seconds, int | float):
        raise ValueError(f"period_seconds is {period_seconds!r}: it must be a number")
    if not 0 < period_seconds <= LONGEST_PERIOD_SECONDS:
        raise ValueError(
            f"period_seconds is {shown(str(period_seconds))}: it must be more than 0 and at most "
            f"{LONGEST_PERIOD_SECONDS:.0g}"
        )
    if problem.platform.port_bandwidth is not None:
        raise ValueError(
            "period_seconds asks for the least memory of a chosen period, which is known of links without ports "
            "alone: leave it out, or port_bandwidth"
        )
    if isinstance(solver, PaperMadPipe):
        raise ValueError(
            f"{solver.name} looks for the shortest period alone: leave period_seconds out, or use madpipe"
        )


def _answer_at(problem: Problem, roomy: Problem, solver: Solver, period: int) -> Answer:
    """Return the allocations of a solver that are as fast as ``period`` ticks, that of the least memory first.

    Args:
        roomy: the problem on devices with the largest memory.
    """
    if isinstance(solver, MadPipe | Contiguous):
        special = isinstance(solver, MadPipe) and problem.constraints.any_allocation
        return min_memory_allocation.answer_at(problem, period, special=special)
    answer = solver.solve(roomy)
    loads = [one_f_one_b.pseudo_stage_loads(problem.times, cuts) for cuts in answer.cuts]
    return Answer(tuple(cuts for cuts, load in zip(answer.cuts, loads, strict=True) if max(load) <= period))
