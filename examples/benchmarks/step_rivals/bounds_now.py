"""The lower bound of a setting, as the planner computes it now: no plan is made."""

from __future__ import annotations

import time
from typing import Any

from settings import Setting, chain_of

from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound


def bound_row(setting: Setting) -> dict[str, Any]:
    """Return the lower bound of a step of any allocation, as a plan of ``madpipe`` has it."""
    chain = chain_of(setting.network)
    m = setting.num_micro_batches
    problem = with_recomputation(problem_of(chain, setting.platform, num_micro_batches=m), "auto")
    started = time.process_time()
    bound = problem.times.clock.seconds(step_lower_bound(problem, contiguous=False))
    seconds = time.process_time() - started
    return {"number": setting.number, "step_lower_bound_seconds": bound, "processor_seconds": seconds}
