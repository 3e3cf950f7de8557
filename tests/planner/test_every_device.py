"""What a host asks for whose engine runs any map: no device without something to train."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Plan, Platform, replay
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import FREE, problem_of, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan
from tests.planner.test_step_search import LINKS, shortest_of_all

SEEDS = range(some(120))


def trains_everywhere(made: Chain, platform: Platform, placed: oracles.Placed) -> bool:
    cuts, devices = placed
    training = {
        device
        for (start, stop), device in zip(pairwise(cuts), devices, strict=True)
        if any(layer.weight_bytes for layer in made.layers[start:stop])
    }
    return training == set(range(platform.num_devices))


def placed(plan: Plan) -> oracles.Placed:
    return tuple(plan.boundaries), tuple(stage.device for stage in plan.stages)


def has_enough_layers(made: Chain, platform: Platform) -> bool:
    return sum(1 for layer in made.layers if layer.weight_bytes) >= platform.num_devices


def test_the_period_is_the_best_of_all_allocations_that_train_everywhere():
    fits = stricter = 0
    for seed in SEEDS:
        made, platform = random_instance(seed, most_layers=4, most_devices=3)
        if not has_enough_layers(made, platform):
            with pytest.raises(ValueError, match=r"use num_devices=[12] or fewer|has 0: let one train"):
                make_plan(made, platform, every_device_trains=True)
            continue
        problem, best = problem_of(made, platform), None
        for each in oracles.all_placements(made.num_layers, platform.num_devices):
            if trains_everywhere(made, platform, each):
                found = ilp.schedule(Road(problem, Placement(*each)), best, Deadline())
                best = found.pattern.period if found.pattern is not None else best
        if best is None:
            with pytest.raises(InfeasibleError) as refusal:
                make_plan(made, platform, every_device_trains=True)
            assert refusal.value.smallest_memory_bytes is not None
            enough = replace(platform, memory_bytes=refusal.value.smallest_memory_bytes)
            assert trains_everywhere(made, platform, placed(make_plan(made, enough, every_device_trains=True)))
            continue
        fits += 1
        plan = make_plan(made, platform, every_device_trains=True)
        assert trains_everywhere(made, platform, placed(plan))
        assert plan.period_seconds == problem.times.clock.seconds(best)
        assert plan.proved and replay(plan, made).violations == ()
        stricter += plan.period_seconds > make_plan(made, platform).period_seconds
    assert fits > some(20) and stricter >= some(2), "some of these must cost something"


def test_a_small_step_is_the_best_of_all_that_train_everywhere():
    fits = 0
    for seed in SEEDS:
        pick = random.Random(seed)
        made, platform = random_instance(seed, most_layers=3)
        platform = replace(platform, num_devices=2, bandwidth=pick.choice(LINKS))
        if not has_enough_layers(made, platform):
            continue
        best = shortest_of_all(made, platform, 2, partial(trains_everywhere, made, platform))
        try:
            plan = make_plan(made, platform, num_micro_batches=2, every_device_trains=True)
        except InfeasibleError:
            assert best is None
            continue
        fits += 1
        assert plan.step is not None and best is not None
        assert trains_everywhere(made, platform, placed(plan))
        assert plan.step.step_seconds == problem_of(made, platform).times.clock.seconds(best)
    assert fits > some(20)


def layer(name: str, seconds: float, weights: int) -> LayerProfile:
    return LayerProfile(
        name=name, forward_seconds=seconds, backward_seconds=seconds, weight_bytes=weights, output_bytes=1
    )


def test_several_stages_on_a_device_where_that_is_shorter():
    """1 3 2 on two devices: 4 and 2 or 1 and 5 where each has one stage, 3 and 3 where one has both ends."""
    made = Chain(input_bytes=1, layers=(layer("a", 1, 4), layer("b", 3, 4), layer("c", 2, 4)))
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=FREE)
    assert make_plan(made, platform, num_stages=2, every_stage_trains=True).period_seconds == 8
    plan = make_plan(made, platform, every_device_trains=True)
    assert (plan.period_seconds, [stage.device for stage in plan.stages]) == (6, [0, 1, 0])
    step = make_plan(made, platform, num_micro_batches=16, every_device_trains=True)
    assert not step.is_contiguous


def test_a_stage_may_have_nothing_to_train_where_its_device_has():
    made = Chain(input_bytes=1, layers=(layer("a", 1, 0), layer("b", 3, 4), layer("c", 2, 4)))
    plan = make_plan(made, Platform(num_devices=2, memory_bytes=10**6, bandwidth=FREE), every_device_trains=True)
    assert [stage.device for stage in plan.stages] == [0, 1, 0]


def test_boundaries_that_leave_a_device_idle_are_refused():
    made = Chain(input_bytes=1, layers=(layer("a", 1, 4), layer("b", 3, 4), layer("c", 2, 4)))
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=FREE)
    with pytest.raises(ValueError, match="1 stages and 2 are needed"):
        make_plan(made, platform, [0, 3], every_device_trains=True)
