"""The contiguous partitions that a search for the shortest step begins with, and those around one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from deepspeed_partition import Chain, Platform, make_plan
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.interface import Cuts
from deepspeed_partition.planner.solvers.step.partition_candidates import (
    balanced_partitions,
    moved_boundaries,
    moved_runs,
    rival_partitions,
    strides,
)
from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds
from deepspeed_partition.planner.solvers.step.step_search import StepSearch, step_engine
from tests.exhaustive import some
from tests.planner.instances import FREE, chain, problem_of, random_instance

PROFILES = Path(__file__).parents[2] / "examples" / "profiles"


def partition(made: Chain, num_devices: int, m: int, bandwidth: float = FREE) -> Cuts | None:
    platform = Platform(num_devices=num_devices, memory_bytes=10**6, bandwidth=bandwidth)
    return StepBounds(replace(problem_of(made, platform), num_micro_batches=m)).partition()


def test_equal_layers_are_shared_out_evenly() -> None:
    """With many micro-batches fill and drain do not count."""
    assert partition(chain([1] * 12, [2] * 12), 4, 1000) == (0, 3, 6, 9, 12)


def test_no_cut_where_every_tensor_takes_longer_than_everything() -> None:
    assert partition(chain([1] * 4, [2] * 4, outputs=[100] * 4), 4, 3, bandwidth=1) == (0, 4)


def test_one_boundary_costs_less_than_the_others() -> None:
    assert partition(chain([1] * 6, [2] * 6, outputs=[9, 9, 1, 9, 9, 9]), 6, 8, bandwidth=1) == (0, 3, 6)


@pytest.mark.parametrize("seed", range(some(24)))
def test_the_partition_asks_for_little_more_than_the_least(seed: int) -> None:
    """Its bound in the simulator is not far from the least one of all partitions, where memory does not count."""
    made, platform = random_instance(seed, most_layers=7, most_devices=4)
    platform = replace(platform, memory_bytes=10**9)
    problem = replace(problem_of(made, platform), num_micro_batches=1 + seed % 9)
    found = StepBounds(problem).partition()
    size, m = made.num_layers, problem.num_micro_batches
    assert found is not None and m is not None
    assert found[0] == 0 and found[-1] == size and len(found) - 1 <= platform.num_devices
    every = [
        (0, *inner, size)
        for count in range(min(platform.num_devices, size))
        for inner in combinations(range(1, size), count)
    ]
    bounds = {cuts: step_engine(problem, Placement.contiguous(cuts)).bound(m) for cuts in every}
    assert bounds[found] <= 1.02 * min(bounds.values())


def test_what_lies_around_a_partition() -> None:
    around = set(moved_runs(Placement.contiguous((0, 2, 4, 6))))
    expected = {
        (0, 1, 4, 6),
        (0, 3, 4, 6),
        (0, 2, 3, 6),
        (0, 2, 5, 6),
        (0, 1, 3, 6),
        (0, 3, 5, 6),
        (0, 4, 6),
        (0, 2, 6),
    }
    assert around == {Placement.contiguous(cuts) for cuts in expected}


def test_long_stages_are_moved_by_many_layers() -> None:
    assert strides(Placement.contiguous((0, 4, 8))) == [1]
    assert strides(Placement.contiguous((0, 150, 300))) == [1, 4, 16, 64]


def test_good_cuts_far_from_even_ones_are_found() -> None:
    """158 layers on 8 devices: cuts moved layer by layer from even ones stayed at 0.711 s."""
    made = Chain.load(PROFILES / "pipedream" / "resnet50.graph.txt")
    platform = Platform(num_devices=8, memory_bytes=2**40, bandwidth=24e9)
    problem = replace(problem_of(made, platform), num_micro_batches=4)
    search, cuts = StepSearch(problem), StepBounds(problem).partition()
    assert cuts is not None
    search.descend(Placement.contiguous(cuts), lambda centre: moved_boundaries(centre, strides(centre)))
    assert problem.times.clock.seconds(int(search.best)) < 0.70


def test_devices_with_several_stages_hide_no_contiguous_step() -> None:
    """Several stages on a device made the search leave out what led to 2.196 s: it ended with 2.200 s."""
    made = Chain.load(PROFILES / "pipedream" / "vgg16.graph.txt")
    platform = Platform(num_devices=8, memory_bytes=32_490_000_000, bandwidth=12e9)
    contiguous, every = (
        make_plan(made, platform, algorithm, num_micro_batches=8, time_limit_seconds=3600)
        for algorithm in ("contiguous", "madpipe")
    )
    assert contiguous.step_seconds is not None and every.step_seconds is not None
    assert every.step_seconds <= contiguous.step_seconds < 2.197


def test_a_shorter_step_leads_to_other_ways_to_recompute() -> None:
    """Searched as if there were no other allocations alone, contiguous partitions ended with 1.483 s."""
    made = Chain.load(PROFILES / "pipedream" / "vgg16.graph.txt")
    platform = Platform(num_devices=4, memory_bytes=18_853_000_000, bandwidth=12e9)
    plan = make_plan(made, platform, num_micro_batches=4, time_limit_seconds=3600)
    assert plan.step_seconds is not None and plan.step_seconds < 1.396


def test_no_partition_is_made_once_the_time_is_up() -> None:
    """Those of 128 stages of 2048 layers took five seconds more than there were."""
    made, platform = random_instance(3)
    problem = replace(problem_of(made, platform), num_micro_batches=4)
    steady = (0, made.num_layers)
    late = list(rival_partitions(problem, steady, lambda: True))
    assert late[0] == steady
    assert len(late) == len(list(rival_partitions(problem, steady))) - 1
    assert len(balanced_partitions(problem, lambda: True)) < len(balanced_partitions(problem))
