"""Two stages of one device that keep micro-batches at the same time: a bound, cheaper than a schedule."""

from __future__ import annotations

import pytest

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.non_contiguous.one_special_device import SpecialSearch, best_special
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.min_memory_schedule import estimated_bytes, most_compact
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import in_training_alone, problem_of, random_instance, shared_instance


def test_no_schedule_is_shorter_and_often_one_is_as_short(monkeypatch):
    better = best = reached = 0
    for seed in range(0, 100, 100 // some(100)):
        made, platform, placement = shared_instance(seed)
        road = Road(problem_of(made, platform), placement)
        peak, pair, pairs = (road.shortest_that_may_fit(estimate) for estimate in ("peak", "pair", "pairs"))
        with monkeypatch.context() as patched:  # an integer program that is not told of pairs
            patched.setattr(Road, "_pairs_may_fit", lambda *_: True)
            patched.setattr(ilp, "refuted", lambda *_: False)
            patched.setattr(ilp, "least_unrefuted", lambda road, least, *_: least)
            found = ilp.schedule(road, None, Deadline())
        assert peak <= pair <= pairs <= found.pattern.period * (1 + 2 * ilp.RESOLUTION)
        better += pair > peak
        best += pairs > pair
        reached += pairs > peak and pairs >= found.bound * (1 - 2 * ilp.RESOLUTION)
    assert better > some(15) and best >= 0 and reached > better / 2


def test_no_pattern_of_a_period_takes_less_and_often_one_takes_that(monkeypatch):
    better = reached = 0
    for seed in range(some(60)):
        made, platform, placement = shared_instance(seed)
        problem = problem_of(made, platform)
        road = Road(problem, placement)
        period = road.shortest_that_may_fit("peak")
        peak, pairs = (estimated_bytes(road, period, estimate) for estimate in ("peak", "pairs"))
        with monkeypatch.context() as patched:
            patched.setattr(Road, "bytes_of_pairs", lambda *_: 0)
            found = most_compact(problem, placement, period, 10**6)
        assert peak <= pairs <= found.num_bytes
        better += pairs > peak
        reached += pairs > peak and pairs == found.bound
    assert better > some(10) and reached > better / 2


@pytest.mark.parametrize("seed", range(100))
def test_the_search_equals_exhaustive_search(seed):
    made, platform = random_instance(seed, most_layers=6)
    made = in_training_alone(made)
    problem = problem_of(made, platform)
    periods, periods_of_two = [], []
    for placed in oracles.all_placements(made.num_layers, platform.num_devices):
        if oracles.num_shared(placed) <= 1:
            least = Road(problem, Placement(*placed)).shortest_that_may_fit("pair")
            if least is not None:
                periods.append(least)
                if max(placed[1].count(device) for device in placed[1]) <= 2:
                    periods_of_two.append(least)
    found = best_special(problem, "pair", None)
    assert found.bound == min(periods, default=None)
    assert best_special(problem, "pair", None, 2).bound == min(periods_of_two, default=None)
    if periods and found.bound > 1:
        assert SpecialSearch(problem, "pair").decide(found.bound - 1) is None
