"""1F1B*: the groups, the least period, and that no periodic pattern needs less."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from tests.planner import oracles
from tests.planner.instances import FREE, boundaries_of, chain, of_case, random_instance, solved_cases
from tests.planner.instances import plan_without_recomputation as make_plan


@pytest.mark.parametrize("case", solved_cases("oplus"), ids=lambda case: case["name"])
def test_adding_a_load_to_a_delay(case):
    period = case["T"]
    group = max(1, -(-case["x"] // period))
    group, fill = one_f_one_b.add((group, case["x"] - (group - 1) * period), case["y"], period)
    assert (group - 1) * period + fill == case["expect"]


@pytest.mark.parametrize("case", solved_cases("groups"), ids=lambda case: case["name"])
def test_groups(case):
    times = TimedChain(*of_case(case, len(case["stages"]), 1e15))
    loads = one_f_one_b.pseudo_stage_loads(times, boundaries_of(case["stages"]))
    assert one_f_one_b.in_flight(loads, times.clock.ticks(case["T"])) == case["expect"]


@pytest.mark.parametrize("case", solved_cases("min_period"), ids=lambda case: case["name"])
def test_least_period(case):
    made, platform = of_case(case, len(case["stages"]), case["M"])
    plan = make_plan(made, platform, boundaries_of(case["stages"]))
    assert plan.period_seconds == pytest.approx(case["expect"], rel=1e-12)
    assert [stage.in_flight for stage in plan.stages] == [1, 1, 1]


@pytest.mark.parametrize("seed", range(300))
def test_groups_are_those_of_the_paper(seed):
    made, platform = random_instance(seed)
    times = TimedChain(made, platform)
    pick = random.Random(seed)
    cuts = pick.choice(list(oracles.all_cuts(made.num_layers, platform.num_devices)))
    exact = oracles.loads(made, platform, cuts)
    loads = one_f_one_b.pseudo_stage_loads(times, cuts)
    assert [times.clock.seconds(load) for load in loads] == [float(load) for load in exact]
    for first, last in pairwise(sorted({sum(exact[: i + 1]) for i in range(len(exact))} | {2 * sum(exact)})):
        for period in (first, (first + last) / 2):
            if period >= max(exact):
                ticks = times.clock.ticks(float(period))
                assert one_f_one_b.in_flight(loads, ticks) == oracles.groups(exact, period)


@pytest.mark.parametrize(
    ("forward", "backward", "transfer", "period"),
    [
        ([1, 1], [2, 2], [1], 3),
        ([1, 1], [2, 2], [1], 4),
        ([1, 1], [2, 1], [1], 5),
        ([2, 1], [1, 1], [2], 4),
        ([1, 0], [1, 1], [1], 3),
        ([1, 1, 1], [1, 1, 1], [0, 0], 2),
        ([1, 1, 1], [1, 1, 1], [0, 0], 3),
        ([1, 0, 1], [1, 1, 1], [0, 0], 3),
    ],
)
def test_no_pattern_has_fewer_in_flight(forward, backward, transfer, period):
    """Proposition 1 of the paper, by trying every pattern."""
    bandwidth = 1 if any(transfer) else FREE
    made = chain(forward, backward, outputs=[*transfer, 0])
    times = TimedChain(made, Platform(num_devices=len(forward), memory_bytes=1e9, bandwidth=bandwidth))
    loads = one_f_one_b.pseudo_stage_loads(times, range(len(forward) + 1))
    groups = one_f_one_b.in_flight(loads, times.clock.ticks(period))
    assert oracles.fewest_in_flight(forward, backward, transfer, period) == {tuple(groups)}


def test_schedule_as_a_picture():
    """Three equal stages at the shortest period: each backward right after the forward that frees its slot."""
    made = chain([1, 1, 1], [2, 2, 2])
    plan = make_plan(made, Platform(num_devices=3, memory_bytes=1, bandwidth=FREE), [0, 1, 2, 3])
    placed = {op.operation: (op.start_seconds, op.shift) for op in plan.operations}
    assert {name: placed[name] for name in ("F0", "F1", "F2", "B2", "B1", "B0")} == {
        "F0": (0, 0), "F1": (1, 0), "F2": (2, 0), "B2": (0, 1), "B1": (2, 1), "B0": (1, 2),
    }  # fmt: skip
