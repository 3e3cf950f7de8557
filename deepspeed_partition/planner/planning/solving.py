"""From a problem and a solver to a plan that has been replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.assembly import assemble
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.infeasible import infeasible, no_room_for_flush, out_of_time, piles_up
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.shared_choice import SEARCH_SHARE, least_where_shared
from deepspeed_partition.planner.recomputation import PER_MICRO_BATCH
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.per_micro_batch import best_pattern, partitions
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, Solver, Step
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.step.best_step import fixed_step, memory_of_flush, with_best_step
from deepspeed_partition.planner.solvers.step.exact_step import with_exact_step
from deepspeed_partition.planner.solvers.step.interleaving import MOST_STAGES_PER_DEVICE
from deepspeed_partition.planner.solvers.step.micro_batch_step import shorter_step, with_buffers
from deepspeed_partition.planner.solvers.step.split_step import shorter_split_step
from deepspeed_partition.planner.solvers.step.step_bounds import most_bound_seconds, step_lower_bound
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import in_order
from deepspeed_partition.planner.solvers.step.step_simulator import one_f_one_b as one_f_one_b_orders
from deepspeed_partition.planner.solvers.uniform_recomputation import uniform_choices
from deepspeed_partition.planner.units import format_bytes

FEW_BUFFERS_SHARE = 0.3
"""The part of the time for steps that decide micro-batch by micro-batch with no more buffers than asked for."""
REPLAY_SECONDS = 40e-6
"""Most time of the processor for each forward and each backward of a step from the end of the search on."""
LITTLE_SHARE, LEAST_SEARCH_SHARE = 0.02, 0.5
"""Share of the time that a search need not leave, and the least that it has."""
WHOLE_SHARE = 0.6
"""The part of the time for steps of whole backwards, where halves are looked for from the best of them on."""


def solve(problem: Problem, solver: Solver) -> Plan:
    """Return the plan of the shortest period or step that a solver finds, replayed.

    Raises:
        InfeasibleError: no plan of this solver fits in memory.
    """
    searched = replace(problem, deadline=_deadline_of_search(problem))
    if problem.splits_backward:
        # Periods of whole backwards are mostly proved long before the end: patterns with halves have what is left.
        is_step = problem.num_micro_batches is not None
        deadline = searched.deadline.part(WHOLE_SHARE) if is_step else searched.deadline
        searched = replace(searched, splits_backward=False, deadline=deadline)
    try:
        answer = with_exact_step(searched, with_best_step(searched, answer_of(searched, solver)))
    except DeadlinePassed:
        raise out_of_time(solver.name) from None
    if not answer.cuts and not answer.patterns:
        if problem.deadline.stopped:
            raise out_of_time(solver.name)  # whoever stopped the search does not wait for advice
        if problem.is_one_of_many:
            memory, num_devices = format_bytes(problem.platform.memory_bytes), problem.platform.num_devices
            raise InfeasibleError(f"no plan fits into {memory} per device on {num_devices} devices")
        raise infeasible(problem, solver, solve)
    if (problem.per_micro_batch or problem.splits_backward) and problem.num_micro_batches is None:
        faster = _plan_per_micro_batch(problem, solver, answer)
        if faster is not None:
            return faster
    if problem.recomputation is not None:
        problem.recomputation.forget()  # the replay of a long step needs as much
    too_large: list[int] = []
    for found, step in _candidates(problem, answer):
        plan, replayed = assemble(problem, solver.name, answer, found, step)
        over = max(use.total for use in replayed.memory)
        if over > problem.platform.memory_bytes:
            too_large.append(over)  # only the step shows tensors that wait for a slow link
            continue
        shares = bool(answer.other_steps)
        within = replace(problem, deadline=problem.deadline.part(SEARCH_SHARE)) if shares else problem
        plans = [plan]
        if problem.per_micro_batch and plan.step is not None:
            plans.append(_step_per_micro_batch(within, solver, answer, plan))
        if problem.splits_backward and step is not None:
            plans.append(_step_in_halves(within, solver, answer, plan, step))
        shortest = min(reversed(plans), key=lambda each: each.step_seconds or 0.0)
        return least_where_shared(problem, solver.name, answer, shortest) if shares else shortest
    if problem.flushes:
        raise no_room_for_flush(problem, memory_of_flush(problem))
    raise piles_up(problem, min(too_large))


def _deadline_of_search(problem: Problem) -> Deadline:
    """Return the deadline of the search, which leaves time for the replay of a long step, and for its bound.

    The bound is found at once where that may leave half of the time: what it takes depends on the machine, too.
    """
    deadline, m = problem.deadline, problem.num_micro_batches
    if m is None:
        return deadline
    of_bound, remaining = most_bound_seconds(problem), deadline.remaining_seconds()
    if LITTLE_SHARE * remaining < of_bound < (1 - LEAST_SEARCH_SHARE) * remaining:
        step_lower_bound(problem, contiguous=False)
        of_bound = 0.0
    num_stages = min(problem.chain.num_layers, MOST_STAGES_PER_DEVICE * problem.platform.num_devices)
    left = REPLAY_SECONDS * 2 * m * num_stages + of_bound
    share = 1 - left / max(deadline.remaining_seconds(), 1e-9)
    return deadline if share > 1 - LITTLE_SHARE else deadline.part(max(share, LEAST_SEARCH_SHARE))


def decides_per_micro_batch(problem: Problem, solver: Solver, mode: str, period_seconds: float | None) -> bool:
    """Return whether plans may treat micro-batches differently; those of baselines treat them alike.

    Raises:
        ValueError: they are asked to, and no such plan is known of what else is asked for.
    """
    if mode != PER_MICRO_BATCH:
        return False
    for key, value in (("flushes", problem.flushes), ("period_seconds", period_seconds)):
        if value is not None:
            raise ValueError(
                f"recompute is {mode!r}, which is planned for the shortest period or step alone: leave {key} out, "
                "or use recompute='block'"
            )
    return isinstance(solver, MadPipe | Contiguous)


def _plan_per_micro_batch(problem: Problem, solver: Solver, answer: Answer) -> Plan | None:
    """Return the plan of a pattern of several micro-batches, or with halves; None where none is faster."""
    memory_bytes = problem.platform.memory_bytes
    period = Fraction(problem.longest_period)
    for found, _ in _candidates(problem, answer):
        plan, replayed = assemble(problem, solver.name, answer, found)
        if max(use.total for use in replayed.memory) <= memory_bytes:
            period = Fraction(problem.times.clock.ticks(plan.period_seconds))
            break
    keeps_cut = not isinstance(solver, MadPipe | Contiguous)
    pattern = best_pattern(problem, answer, period, keeps_cut=keeps_cut)
    if pattern is None:
        return None
    plan, replayed = assemble(problem, solver.name, answer, pattern)
    return plan if max(use.total for use in replayed.memory) <= memory_bytes else None


def _step_per_micro_batch(problem: Problem, solver: Solver, answer: Answer, plan: Plan) -> Plan:
    """Return a plan whose step keeps some micro-batches and recomputes others; ``plan`` where none is shorter."""
    assert plan.step is not None
    placements = partitions(problem, answer)
    if plan.is_contiguous:
        placements.insert(0, Placement.contiguous(tuple(plan.boundaries)))
    assert problem.num_micro_batches is not None
    ticks = problem.times.clock.ticks(plan.step.step_seconds)
    # What is kept overtakes what is recomputed: that takes more places for messages than orders do otherwise.
    roomier = max(problem.platform.comm_buffers, 2 * problem.num_micro_batches)
    for buffers in dict.fromkeys((problem.platform.comm_buffers, roomier)):
        share = 1 if buffers == roomier else FEW_BUFFERS_SHARE
        buffered = with_buffers(replace(problem, deadline=problem.deadline.part(share)), buffers)
        step = shorter_step(buffered, answer, list(dict.fromkeys(placements)), ticks)
        if step is None:
            continue
        shorter, replayed = assemble(buffered, solver.name, answer, step.steady, step)
        if max(use.total for use in replayed.memory) <= problem.platform.memory_bytes:
            plan, ticks = shorter, step.ticks
    return plan


def _step_in_halves(problem: Problem, solver: Solver, answer: Answer, plan: Plan, step: Step) -> Plan:
    """Return a plan whose step has backwards in two operations; that of ``step`` if none is shorter.

    Args:
        step: the step of ``plan``, of whole backwards.
    """
    allocation = plan.allocation
    devices = tuple(stage.device for stage in allocation.stages)
    placement = Placement(tuple(allocation.boundaries), devices, step.recomputed)
    placements = [] if answer.step_search is None else partitions(problem, answer)
    found = shorter_split_step(problem, answer, placements, step, placement)
    shorter, replayed = assemble(problem, solver.name, answer, found.steady, found)
    return shorter if max(use.total for use in replayed.memory) <= problem.platform.memory_bytes else plan


def answer_of(problem: Problem, solver: Solver) -> Answer:
    """Return the answer of a solver; a baseline that has none without recomputation is asked again with it."""
    answer = solver.solve(problem)
    if answer.cuts or answer.patterns or isinstance(solver, MadPipe | Contiguous):
        return answer
    for uniform in uniform_choices(problem):
        again = solver.solve(uniform.problem)
        if again.cuts:
            return again
    return answer


def _candidates(problem: Problem, answer: Answer) -> Iterator[tuple[Cuts | Pattern, Step | None]]:
    """Yield allocations, the best first, each with its step; None: without a step."""
    if problem.num_micro_batches is None:
        yield from ((pattern, None) for pattern in answer.patterns)
        yield from ((cuts, None) for cuts in answer.cuts)
    elif problem.in_deepspeed:
        yield from ((cuts, _step_in_deepspeed(problem, cuts)) for cuts in answer.cuts)
    elif answer.steps:
        yield from ((step.steady, step) for step in answer.steps)
    else:
        yield from ((cuts, fixed_step(problem, cuts)) for cuts in answer.cuts)


def _step_in_deepspeed(problem: Problem, cuts: Cuts) -> Step:
    """Return the step in DeepSpeed's order, run by an engine that overlaps transfers."""
    assert problem.num_micro_batches is not None
    num_stages = len(cuts) - 1
    engine = step_engine(problem, Placement.contiguous(cuts))
    depths = [problem.deepspeed_depth(from_end) for from_end in range(num_stages, 0, -1)]
    orders = one_f_one_b_orders(engine, depths, problem.num_micro_batches)
    run = engine.run(problem.num_micro_batches, in_order(orders))
    assert run is not None
    return Step(cuts, engine.named(orders), run.ticks)
