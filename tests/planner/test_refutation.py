"""Every period below that of the shortest pattern is refuted, and that one is not."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from deepspeed_partition import Platform
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.branch_and_bound import least_unrefuted, refuted
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from tests.planner.instances import chain, problem_of, shared_instance


def any_instance(seed):
    """Up to seven stages on two or three devices, which share some links, and hardly room for them."""
    pick = random.Random(seed)
    size = pick.randint(3, 7)
    devices = [0]
    while len(devices) < size:
        devices.append(pick.choice([device for device in range(3) if device != devices[-1]]))
    made = chain(
        [pick.randint(0, 9) for _ in range(size)], [pick.randint(1, 18) for _ in range(size)],
        outputs=[pick.randint(0, 9) for _ in range(size)], stash=[pick.choice([0, 3, 7, 20]) for _ in range(size)],
        weights=[pick.randint(0, 3) for _ in range(size)], transient=[pick.choice([0, 0, 6]) for _ in range(size)],
    )  # fmt: skip
    placement = Placement.of(range(size + 1), devices)
    free = Platform(num_devices=3, memory_bytes=10**4, bandwidth=pick.choice([1, 2, 4]))
    smallest = max(device.bytes_for_one for device in Road(problem_of(made, free), placement).memory)
    return made, replace(free, memory_bytes=smallest + pick.randint(0, 40)), placement


@pytest.fixture
def program(monkeypatch):
    """The integer program that is told nothing of what is refuted."""
    monkeypatch.setattr(ilp, "refuted", lambda *_: False)
    monkeypatch.setattr(ilp, "least_unrefuted", lambda road, least, *_: least)
    return lambda road: ilp.schedule(road, None, Deadline(20)).bound


@pytest.mark.parametrize("instance", [shared_instance, any_instance])
def test_just_the_periods_that_no_pattern_has_are_refuted(instance, program):
    better = at_once = 0
    for seed in range(30):
        made, platform, placement = instance(seed)
        road = Road(problem_of(made, platform), placement)
        shortest = program(road)
        below = math.floor(shortest * (1 - 2 * ilp.RESOLUTION))
        assert not refuted(road, shortest, Deadline())
        assert refuted(road, below, Deadline())
        first = road.shortest_that_may_fit("pairs")
        if first < below:
            better += 1
            at_once += refuted(road, below, Deadline(), 1)
        bound = least_unrefuted(road, first, shortest, Deadline())
        assert first <= bound <= shortest
    assert better > 5 and at_once > better / 2


def test_nothing_is_refuted_without_time_or_where_memory_is_no_limit():
    made, platform, placement = shared_instance(16)
    road = Road(problem_of(made, platform), placement)
    assert refuted(road, road.busiest - 1, Deadline())
    below = least_unrefuted(road, road.busiest, road.sequential, Deadline()) - 1
    assert below > road.busiest and refuted(road, below, Deadline())
    past = Deadline()
    past.stop()
    assert not refuted(road, below, past)
    roomy = replace(platform, memory_bytes=LARGEST_MEMORY_BYTES)
    assert not refuted(Road(problem_of(made, roomy), placement), below, Deadline())
