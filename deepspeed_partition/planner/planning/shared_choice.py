"""Choice among the steps that a search keeps by how long they take where messages share the ports of hosts.

The search goes by the step in which a port carries one message at a time, which is also what the plan promises and
what its bounds speak of. The step that is shortest by that may take longer in a run than another one.
"""

from __future__ import annotations

from dataclasses import replace

from deepspeed_partition.planner.assembly import assemble
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.solvers.interface import Answer, Problem
from deepspeed_partition.schedule.instructions import LoweringError
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

SEARCH_SHARE = 0.85
"""Share of the time that is left for searches after that for a step, where this choice follows."""


def least_where_shared(problem: Problem, algorithm: str, answer: Answer, chosen: Plan) -> Plan:
    """Return the plan whose step takes least where messages share ports; ``chosen`` where none takes less.

    The deadline ends the choice, before a step that would take as long to look at as the longest so far.

    Args:
        answer: the steps to choose from (``steps`` and ``other_steps``).
        chosen: the plan of the shortest step, as planned.
    """
    least = _shared_seconds(chosen)
    if least is None or chosen.step is None:
        return chosen
    order, best = chosen.step.order, chosen
    longest, left = 0.0, problem.deadline.remaining_seconds()
    # What is proved of whole backwards does not hold for halves.
    bound = answer.steps[0].bound if answer.steps and not problem.splits_backward else 0
    for step in (*answer.steps, *answer.other_steps):
        if step.orders == order[: len(step.orders)]:
            continue
        if left <= longest:
            break
        plan, replayed = assemble(problem, algorithm, answer, step.steady, replace(step, bound=bound))
        if max(use.total for use in replayed.memory) <= problem.platform.memory_bytes:
            seconds = _shared_seconds(plan)
            if seconds is not None and seconds < least:
                best, least = plan, seconds
        before, left = left, problem.deadline.remaining_seconds()
        longest = max(longest, before - left)
    return best


def _shared_seconds(plan: Plan) -> float | None:
    try:
        return shared_step_seconds(plan)
    except LoweringError:  # the engine says so
        return None
