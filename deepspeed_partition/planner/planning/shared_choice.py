"""Choice among the steps that a search keeps by how long they take where messages share the ports of hosts.

The search goes by the step in which a port carries one message at a time, which is also what the plan promises and
what its bounds speak of. The step that is shortest by that may take longer in a run than another one.

What shares a port comes later than planned, and devices wait for room then. So each step is also looked at with
room for more messages, as a run gives it (``buffers.py``), where a quarter of the memory stays free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.assembly import assemble
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.solvers.interface import Answer, Problem, Step
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern
from deepspeed_partition.planner.solvers.step.micro_batch_step import with_buffers
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import in_order
from deepspeed_partition.schedule.instructions import LoweringError
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

SEARCH_SHARE = 0.85
"""Share of the time that is left for searches after that for a step, where this choice follows."""
ROUNDING = 1e-6
"""Relative difference of two steps that is none."""
MORE_BUFFERS = (16, 8, 4)
"""Numbers of tensors at each end of a boundary that are tried."""
MOST_FILLED = 0.75
"""Share of a device's memory that a plan with more of them may need: they are worth no risk."""
LOOK_SECONDS = 500e-6
"""Most time of the processor to look at a step, for each of its forwards and backwards."""


def least_where_shared(problem: Problem, algorithm: str, answer: Answer, chosen: Plan) -> Plan:
    """Return the plan whose step takes least where messages share ports; ``chosen`` where none takes less.

    The deadline ends the choice, before a step that would take as long to look at as the longest so far, and
    before the first one where two may take longer than what is left.

    Args:
        answer: the steps to choose from (``steps`` and ``other_steps``).
        chosen: the plan of the shortest step, as planned.
    """
    if chosen.step is None:
        return chosen
    longest, left = LOOK_SECONDS * sum(map(len, chosen.step.order)), problem.deadline.remaining_seconds()
    if left < 2 * longest:  # one step alone is no choice
        return chosen
    least, best = _shared_seconds(chosen), chosen
    if least is None:
        return chosen
    left = problem.deadline.remaining_seconds()
    for plan in _candidates(problem, algorithm, answer):
        seconds = None if plan is None else _shared_seconds(plan)
        if plan is not None and seconds is not None and seconds < least * (1 - ROUNDING):
            best, least = plan, seconds
        before, left = left, problem.deadline.remaining_seconds()
        longest = max(longest, before - left)
        if left <= longest:
            break
    return best


def _candidates(problem: Problem, algorithm: str, answer: Answer) -> Iterator[Plan | None]:
    """Yield the plan of each step, as it is and with room for more messages; None where it does not fit."""
    # What is proved of whole backwards does not hold for halves.
    bound = answer.steps[0].bound if answer.steps and not problem.splits_backward else 0
    numbers = [number for number in MORE_BUFFERS if number > problem.platform.comm_buffers]
    roomier: dict[int, Problem] = {}
    for step in (*answer.steps, *answer.other_steps):
        yield _assembled(problem, algorithm, answer, replace(step, bound=bound), problem.platform.memory_bytes)
        for number in numbers:
            if number not in roomier:
                roomier[number] = with_buffers(problem, number)
            most = int(MOST_FILLED * problem.platform.memory_bytes)
            again = _simulated_again(roomier[number], step, most)
            plan = None if again is None else _assembled(roomier[number], algorithm, answer, again, most)
            yield plan
            if plan is not None:
                break


def _simulated_again(problem: Problem, step: Step, most_bytes: int) -> Step | None:
    """Return a step on another platform, with nothing proved of it; None where a device needs more than so much.

    What it would repeat in steady state is looked for only where there is room for the step.
    """
    if isinstance(step.steady, Pattern):
        placement = step.steady.placement
    else:
        placement = Placement.contiguous(step.steady, step.recomputed)
    engine = step_engine(problem, placement)
    if min(engine.most_in_flight) < 1:
        return None
    position = {name: index for index, name in enumerate(engine.names)}
    orders = [tuple(position[name] for name, _ in order) for order in step.orders]
    assert problem.num_micro_batches is not None
    run = engine.run(problem.num_micro_batches, in_order(orders))
    assert run is not None
    return replace(step, ticks=run.ticks, bound=0) if max(engine.peaks(run)) <= most_bytes else None


def _assembled(problem: Problem, algorithm: str, answer: Answer, step: Step, most_bytes: int) -> Plan | None:
    plan, replayed = assemble(problem, algorithm, answer, step.steady, step)
    return plan if max(use.total for use in replayed.memory) <= most_bytes else None


def _shared_seconds(plan: Plan) -> float | None:
    try:
        return shared_step_seconds(plan)
    except LoweringError:  # the engine says so
        return None
