"""The schedule of a fixed allocation: exact, and never the solver's word for it."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace

import pulp
import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner import assembly
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.interface import Answer
from deepspeed_partition.planner.solvers.pattern import ilp, one_f_one_b
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road, one_by_one, pattern_of
from tests.planner import oracles
from tests.planner.instances import (
    boundaries_of,
    chain,
    of_case,
    problem_of,
    random_instance,
    solved_cases,
    three_layers,
)
from tests.planner.instances import plan_without_recomputation as make_plan


def scheduled(made, platform, cuts, devices, shorter_than=None, deadline=None):
    problem = problem_of(made, platform)
    road = Road(problem, Placement(tuple(cuts), tuple(devices)))
    return problem, road, ilp.schedule(road, shorter_than, deadline or Deadline())


def small_instance(pick, size, num_devices, memory):
    made = chain(
        [pick.randint(1, 9) for _ in range(size)],
        [pick.randint(2, 18) for _ in range(size)],
        weights=[pick.randint(0, 3) for _ in range(size)],
        outputs=[pick.randint(0, 12) for _ in range(size)],
        input_bytes=pick.randint(1, 9),
        transient=[pick.choice([0, 0, 6]) for _ in range(size)],
    )
    return made, Platform(num_devices=num_devices, memory_bytes=memory, bandwidth=pick.choice([1, 2, 4]))


@pytest.fixture(params=["HiGHS", "CBC"])
def solver(request, monkeypatch):
    if request.param == "CBC":
        monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)


@pytest.mark.parametrize("case", solved_cases("schedule"), ids=lambda case: case["name"])
def test_solved_cases(case, solver):
    made, platform = of_case(case, len(set(case["proc"])), case["M"])
    problem, _, found = scheduled(made, platform, boundaries_of(case["stages"]), case["proc"])
    if case["expect"] is None:
        assert found == ilp.Scheduled(None, None)
        return
    assert problem.times.clock.seconds(found.pattern.period) == case["expect"]
    assert found.bound == found.pattern.period


@pytest.mark.parametrize("seed", range(20))
def test_contiguous_allocations_equal_1f1b(seed):
    """1F1B* needs the least memory of all patterns, so none is better, and one is as good."""
    pick = random.Random(seed)
    size = pick.randint(2, 5)
    made, platform = small_instance(pick, size, size, pick.choice([40, 60, 90, 140]))
    problem, _, found = scheduled(made, platform, range(size + 1), range(size))
    loads = one_f_one_b.pseudo_stage_loads(problem.times, range(size + 1))
    least = one_f_one_b.least_period(
        loads, [int(problem.table.max_in_flight[stage, stage + 1]) for stage in range(size)]
    )
    assert found.bound == least
    assert (found.pattern and found.pattern.period) == least


@pytest.mark.parametrize("seed", range(30))
def test_three_stages_equal_every_order_and_shift(seed):
    """Times so small that every pattern can be tried: one of that period exists, and none of a shorter one."""
    pick = random.Random(seed)
    made = three_layers(pick)
    free = Platform(num_devices=2, memory_bytes=1000, bandwidth=2, comm_buffers=pick.choice([2, 3]))
    placed = (0, 1, 2, 3), (0, 1, 0)
    smallest = max(device.bytes_for_one for device in Road(problem_of(made, free), Placement(*placed)).memory)
    platform = replace(free, memory_bytes=smallest + pick.randint(-1, 9))
    problem, road, found = scheduled(made, platform, *placed)
    ticks = 10**-problem.times.clock.exponent
    if found.pattern is None:
        assert platform.memory_bytes < smallest
        assert not oracles.a_pattern_exists(made, platform, placed, road.busiest // ticks)
        return
    assert found.bound == found.pattern.period
    period = math.ceil(found.pattern.period / ticks)
    if period <= 6:
        assert oracles.a_pattern_exists(made, platform, placed, period)
    if period <= 7:
        assert not oracles.a_pattern_exists(made, platform, placed, period - 1)


@pytest.mark.parametrize("seed", range(12))
def test_tensors_that_wait_beyond_their_buffers_have_room_where_the_replay_finds_it(seed):
    """Any operation may come a period later, with all that follow it: then one more of what it reads waits."""
    pick = random.Random(seed)
    made, platform = small_instance(pick, 4, 3, 10**6)
    placement = Placement((0, 1, 2, 3, 4), pick.choice([(0, 1, 0, 2), (0, 1, 2, 0), (0, 1, 2, 1)]))
    problem = problem_of(made, platform)
    best = ilp.schedule(Road(problem, placement), None, Deadline()).pattern
    for late in range(len(best.begins)):
        begins = (*best.begins[:late], *(begin + 2 * best.period for begin in best.begins[late:]))
        pattern = replace(best, begins=begins if late else best.begins)
        replayed = assembly.assemble(problem, "madpipe", Answer(()), pattern)[1]
        needed = max(use.total for use in replayed.memory)
        assert Road(problem.with_memory(needed), placement).fits_with_waiting(pattern)
        assert not Road(problem.with_memory(needed - 1), placement).fits_with_waiting(pattern)


@pytest.mark.parametrize("seed", range(6))
def test_the_solvers_agree(seed, monkeypatch):
    pick = random.Random(seed)
    made, platform = small_instance(pick, 5, 3, 10**6)
    platform = Platform(num_devices=3, memory_bytes=120, bandwidth=platform.bandwidth)
    placed = (0, 1, 2, 3, 4, 5), (0, 1, 0, 2, 0)
    _, _, highs = scheduled(made, platform, *placed)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    _, _, cbc = scheduled(made, platform, *placed)
    assert highs.bound == cbc.bound
    assert (highs.pattern and highs.pattern.period) == (cbc.pattern and cbc.pattern.period)


def test_a_cutoff_below_the_optimum_finds_nothing_and_above_it_the_optimum():
    case = solved_cases("schedule")[3]
    made, platform = of_case(case, 2, case["M"])
    placed = boundaries_of(case["stages"]), case["proc"]
    _, road, best = scheduled(made, platform, *placed)
    period = best.pattern.period
    assert scheduled(made, platform, *placed, shorter_than=period)[2] == ilp.Scheduled(None, None)
    assert scheduled(made, platform, *placed, shorter_than=road.busiest)[2] == ilp.Scheduled(None, None)
    assert scheduled(made, platform, *placed, shorter_than=period * 101 // 100)[2].pattern.period == period


def test_no_time_is_no_schedule_and_only_the_estimate_as_its_bound():
    case = solved_cases("schedule")[3]
    made, platform = of_case(case, 2, case["M"])
    over = Deadline()
    over.stop()
    _, road, found = scheduled(made, platform, boundaries_of(case["stages"]), case["proc"], deadline=over)
    assert found == ilp.Scheduled(None, road.shortest_that_may_fit())


def test_importing_the_planner_imports_no_solver():
    script = "import sys, deepspeed_partition; assert not {'pulp', 'highspy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_transfers_that_share_a_link_do_not_overlap():
    """Both cuts of a sandwiched stage: four transfers on one link fill it, in the replay's eyes, too."""
    case = next(case for case in solved_cases("plan") if case["name"] == "sandwich")
    made, platform = of_case(case, case["P"], case["M"])
    plan = make_plan(made, platform)
    links = {operation.link for operation in plan.operations if operation.link}
    assert links == {(0, 1), (1, 0)} and plan.period_seconds == 9


def test_a_deadline_stops_the_solver_within_a_solve():
    """From a signal handler, for one. What PuLP then calls a solution may be none: it must not be believed."""
    case = solved_cases("schedule")[3]
    made, platform = of_case(case, 2, case["M"])

    class Stopping(Deadline):
        def passed(self):
            asked.append(True)
            return len(asked) > 1  # not when the solver starts, but when it asks

    asked = []
    _, road, found = scheduled(made, platform, boundaries_of(case["stages"]), case["proc"], deadline=Stopping())
    assert len(asked) > 2
    assert found.pattern is None or found.pattern.period >= road.shortest_that_may_fit()
    assert found.bound == road.shortest_that_may_fit()


@pytest.mark.parametrize("seed", range(20))
def test_one_micro_batch_after_the_other_is_the_pattern_of_the_path(seed):
    """It took 70 s for 320 stages by longest paths; the closed form is the same pattern."""
    made, platform = random_instance(seed)
    pick = random.Random(seed)
    devices = [pick.randrange(platform.num_devices) for _ in made.layers]
    placement = Placement.of(tuple(range(made.num_layers + 1)), devices)
    road = Road(problem_of(made, replace(platform, memory_bytes=10**9)), placement)
    assert one_by_one(road) == pattern_of(road, road.users, [0] * len(road.operations), single_slots=True)
