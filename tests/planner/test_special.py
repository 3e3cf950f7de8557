"""The best allocation with one special device under an estimate of its memory: exact."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.non_contiguous import one_special_device
from deepspeed_partition.planner.solvers.non_contiguous.many_special_devices import SeveralSearch, neighbours
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch, best_special
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from tests.planner import oracles
from tests.planner.instances import chain, in_training_alone, of_case, problem_of, random_instance, solved_cases

PLENTY = 10**6
"""More partial allocations than these chains have."""


def special_placements(made, platform):
    for placed in oracles.all_placements(made.num_layers, platform.num_devices):
        if oracles.num_shared(placed) <= 1:
            yield placed


@pytest.mark.parametrize("estimate", ["peak", "safe"])
@pytest.mark.parametrize("seed", range(60))
def test_equals_exhaustive_search(seed, estimate):
    made, platform = random_instance(seed, most_layers=6)
    made = in_training_alone(made)
    periods = [
        oracles.estimated_period(made, platform, placed, estimate) for placed in special_placements(made, platform)
    ]
    best = min((period for period in periods if period is not None), default=None)
    problem = problem_of(made, platform)
    found = best_special(problem, estimate, None)
    assert (found.bound is None) == (best is None)
    if best is not None:
        assert problem.times.clock.seconds(found.bound) == pytest.approx(float(best), rel=1e-12)
        placed = found.placement.cuts, found.placement.devices
        assert oracles.estimated_period(made, platform, placed, estimate) == best
        assert best_special(problem, estimate, found.bound).placement is None


@pytest.mark.parametrize("seed", range(40))
def test_finds_every_allocation_below_a_period(seed):
    """With one special device, and with several: the two enumerations together miss none and add none."""
    made, platform = random_instance(seed, most_layers=6, most_devices=3)
    made = in_training_alone(made)
    problem = problem_of(made, platform)
    period = int(problem.times.compute[-1]) * 2 // 3
    one_special_device, several = set(), set()
    for placed in oracles.all_placements(made.num_layers, platform.num_devices):
        least = oracles.estimated_period(made, platform, placed, "peak")
        if least is not None and least <= problem.times.clock.seconds(period):
            (several if oracles.num_shared(placed) > 1 else one_special_device).add(placed)
    found = SpecialSearch(problem, "peak").all(period, PLENTY)
    assert {(each.cuts, each.devices) for each in found} == one_special_device
    paired = {each for each in found if Road(problem, each).may_fit(period, "pair")}
    assert paired <= set(SpecialSearch(problem, "pair").all(period, PLENTY)) <= set(found)
    found = SeveralSearch(problem).all(period, PLENTY)
    assert {(each.cuts, each.devices) for each in found} == several
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("seed", range(40))
def test_the_bound_of_an_allocation(seed):
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    made = in_training_alone(made)
    problem = problem_of(made, platform)
    for placed in oracles.all_placements(made.num_layers, platform.num_devices):
        road = Road(problem, Placement(*placed))
        for estimate in ("peak", "safe"):
            expected = oracles.estimated_period(made, platform, placed, estimate)
            least = road.shortest_that_may_fit(estimate)
            assert (least is None) == (expected is None)
            if least is not None:
                assert problem.times.clock.seconds(least) == pytest.approx(float(expected), rel=1e-12)


def test_a_sandwiched_stage_loads_one_link_with_both_its_cuts():
    case = next(case for case in solved_cases("plan") if case["name"] == "sandwich")
    made, platform = of_case(case, case["P"], case["M"])
    slower = replace(platform, bandwidth=platform.bandwidth / 2)  # 6 + 6 on the only link, 9 on the normal device
    for given, period in ((platform, 9.0), (slower, 12.0)):
        problem = problem_of(made, given)
        assert problem.times.clock.seconds(best_special(problem, "peak", None).bound) == period


def test_stages_that_follow_one_another_on_a_device_are_one():
    assert Placement.of([0, 1, 3, 4, 7], [4, 4, 1, 4]) == Placement((0, 3, 4, 7), (0, 1, 0))


def test_the_neighbours_of_an_allocation_move_a_stage_or_a_part_of_one():
    made = chain([1.0] * 4, [1.0] * 4)
    problem = problem_of(made, Platform(num_devices=2, memory_bytes=100, bandwidth=1e9))
    found = {(each.cuts, each.devices) for each in neighbours(problem, Placement((0, 2, 4), (0, 1)))}
    assert found == {
        ((0, 4), (0,)), ((0, 1, 4), (0, 1)), ((0, 3, 4), (0, 1)), ((0, 1, 2, 4), (0, 1, 0)),
        ((0, 2, 3, 4), (0, 1, 0)),
    }  # fmt: skip


def test_rounds_fractional_weights_once_per_device():
    """Two stages of one weight byte each at 2.5 copies take 5 bytes on their device, not 3 + 3."""
    made = chain([1, 4, 1], [1, 4, 1], weights=[1, 0, 1])
    exact = Platform(num_devices=2, memory_bytes=5, bandwidth=1e9, weight_copies=2.5)
    placed = SpecialSearch(problem_of(made, exact), "peak").decide(10**15)
    assert placed is not None
    alone = replace(exact, memory_bytes=4)
    assert oracles.estimated_period(made, exact, ((0, 1, 2, 3), (0, 1, 0)), "peak") is not None
    assert Road(problem_of(made, exact), Placement((0, 1, 2, 3), (0, 1, 0))).shortest_that_may_fit() is not None
    assert Road(problem_of(made, alone), Placement((0, 1, 2, 3), (0, 1, 0))).shortest_that_may_fit() is None


def longer_instance(seed):
    pick = random.Random(seed)
    size, num_devices = pick.randint(12, 18), pick.randint(3, 5)
    made = chain(
        [pick.randint(1, 20) for _ in range(size)], [pick.randint(2, 40) for _ in range(size)],
        outputs=[pick.randrange(10) for _ in range(size)], stash=[pick.randint(1, 100) for _ in range(size)],
    )  # fmt: skip
    stored = sum(layer.stash_bytes for layer in made.layers)
    return made, Platform(num_devices=num_devices, memory_bytes=int(pick.uniform(0.35, 0.8) * stored), bandwidth=2)


@pytest.mark.parametrize("seed", range(6))
def test_how_the_work_is_cut_up_changes_nothing(seed, monkeypatch):
    """A coarse or a fine bound on completions, few or many labels at a time: larger than brute force reaches."""
    problem = problem_of(*longer_instance(seed))
    answers = []
    for steps, pairs, rows in ((0, PLENTY, PLENTY), (1e9, PLENTY, PLENTY), (30, 1, 1), (1e9, 40, 3)):
        monkeypatch.setattr(one_special_device, "STEPS_PER_LABEL", steps)
        monkeypatch.setattr(one_special_device, "MOST_PAIRS", pairs)
        monkeypatch.setattr(one_special_device, "MOST_ROWS", rows)
        bounds = tuple(best_special(problem, estimate, None).bound for estimate in ("safe", "peak", "pair"))
        everything = SpecialSearch(problem, "peak").all(bounds[1] * 101 // 100, PLENTY)
        answers.append((bounds, set(everything)))
    assert all(answer == answers[0] for answer in answers)
    assert everything
