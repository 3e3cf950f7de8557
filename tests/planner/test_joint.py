"""The lower bound of a plan against allocation and schedule decided in one integer program."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepspeed_partition import InfeasibleError, Platform
from tests.planner.instances import chain
from tests.planner.instances import plan_without_recomputation as make_plan
from tests.planner.joint_program import best_period

TOLERANCE = 1e-5
"""Of the solver; two periods that may be optimal differ by more, since all times are small whole numbers."""


@pytest.mark.parametrize("seed", range(50))
def test_the_lower_bound_is_at_most_the_joint_optimum_and_the_plan_at_least(seed):
    """Layers that follow one another on a device are one stage in a plan, so it may be longer than the optimum."""
    pick = random.Random(seed)
    size = 4 if seed % 10 == 0 else 3
    made = chain(
        [pick.randint(1, 5) for _ in range(size)], [pick.randint(1, 5) for _ in range(size)],
        weights=[pick.randint(0, 3) for _ in range(size)], outputs=[pick.randint(0, 8) for _ in range(size)],
        stash=[pick.randint(0, 9) for _ in range(size)], transient=[pick.choice([0, 0, 3]) for _ in range(size)],
    )  # fmt: skip
    platform = Platform(num_devices=2, memory_bytes=pick.randint(20, 60), bandwidth=pick.choice([1, 2, 8]))
    optimum = best_period(made, platform)
    try:
        plan = make_plan(made, platform)
    except InfeasibleError as error:  # then with the least memory that a plan needs
        plan = make_plan(made, replace(platform, memory_bytes=error.smallest_memory_bytes))
        optimum = best_period(made, plan.platform)
    assert plan.lower_bound_seconds <= optimum * (1 + TOLERANCE)
    assert optimum <= plan.period_seconds * (1 + TOLERANCE)
