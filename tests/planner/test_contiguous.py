"""The best contiguous allocation: exact, feasibility included, and never worse with more of anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, replay
from tests.planner import oracles
from tests.planner.instances import boundaries_of, instances, of_case, random_instance, solved_cases
from tests.planner.instances import plan_without_recomputation as make_plan

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def period_of(chain, platform, algorithm="contiguous", **options):
    try:
        return make_plan(chain, platform, algorithm, **options).period_seconds
    except InfeasibleError:
        return float("inf")


@pytest.mark.parametrize("case", solved_cases("plan"), ids=lambda case: case["name"])
def test_solved_cases(case):
    made, platform = of_case(case, case["P"], case["M"])
    if case["contiguous"] is None:
        with pytest.raises(InfeasibleError):
            make_plan(made, platform, "contiguous")
        return
    plan = make_plan(made, platform, "contiguous")
    assert plan.period_seconds == case["contiguous"]
    assert period_of(made, platform, boundaries_of(case["contiguous_stages"])) == case["contiguous"]
    best = case.get("general_best") or case.get("special_best") or case["contiguous"]
    assert plan.lower_bound_seconds <= best
    assert plan.proved


@pytest.mark.parametrize("seed", range(400))
def test_equals_exhaustive_search(seed):
    made, platform = random_instance(seed)
    best = oracles.best_contiguous(made, platform)
    assert period_of(made, platform) == (float("inf") if best is None else best)


@pytest.mark.parametrize("seed", range(100))
def test_says_the_smallest_memory(seed):
    made, platform = random_instance(seed)
    tight = replace(platform, memory_bytes=1)
    smallest = oracles.smallest_memory(made, platform)
    if smallest <= 1:
        return
    with pytest.raises(InfeasibleError) as raised:
        make_plan(made, tight, "contiguous")
    assert raised.value.smallest_memory_bytes == smallest
    assert raised.value.short_bytes == smallest - 1
    assert str(smallest) in str(raised.value)
    make_plan(made, replace(platform, memory_bytes=smallest), "contiguous")


@relaxed
@given(instances())
def test_every_plan_keeps_its_promises(instance):
    made, platform = instance
    try:
        plan = make_plan(made, platform)
    except InfeasibleError as error:
        assert error.smallest_memory_bytes > platform.memory_bytes
        plan = make_plan(made, replace(platform, memory_bytes=error.smallest_memory_bytes))
    assert replay(plan, made).violations == ()
    assert max(plan.peak_memory_bytes) <= plan.platform.memory_bytes
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds


@relaxed
@given(instances())
def test_more_of_anything_is_never_slower(instance):
    made, platform = instance
    period = period_of(made, platform)
    more = {
        "memory_bytes": platform.memory_bytes * 2,
        "num_devices": platform.num_devices + 1,
        "bandwidth": platform.bandwidth * 3,
    }
    for key, value in more.items():
        assert period_of(made, replace(platform, **{key: value})) <= period * (1 + 1e-12)


@relaxed
@given(instances())
def test_scaled_times_scale_the_period(instance):
    made, platform = instance
    period = period_of(made, platform)
    slow = replace(
        made,
        layers=tuple(
            replace(layer, forward_seconds=layer.forward_seconds * 8, backward_seconds=layer.backward_seconds * 8)
            for layer in made.layers
        ),
    )
    slower = replace(platform, bandwidth=platform.bandwidth / 8, latency_seconds=platform.latency_seconds * 8)
    assert period_of(slow, slower) == pytest.approx(8 * period, rel=1e-9)


@relaxed
@given(instances())
def test_scaled_bytes_change_nothing(instance):
    made, platform = instance
    keys = ("weight_bytes", "output_bytes", "stash_bytes", "transient_bytes")
    large = replace(
        made,
        input_bytes=made.input_bytes * 4,
        layers=tuple(replace(layer, **{key: getattr(layer, key) * 4 for key in keys}) for layer in made.layers),
    )
    larger = replace(platform, memory_bytes=platform.memory_bytes * 4, bandwidth=platform.bandwidth * 4)
    assert period_of(large, larger) == pytest.approx(period_of(made, platform), rel=1e-12)


def layer(name, **changes):
    costs = {"forward_seconds": 1, "backward_seconds": 2, "weight_bytes": 4, "output_bytes": 1} | changes
    return LayerProfile(name=name, **costs)


def test_what_an_engine_with_one_stage_per_rank_needs():
    """Exactly as many stages as ranks, each with something to train, though fewer would be faster."""
    made = Chain(
        input_bytes=1,
        layers=(layer("embed"), layer("relu", weight_bytes=0), layer("view", weight_bytes=0), layer("head")),
    )
    slow_links = Platform(num_devices=2, memory_bytes=10**6, bandwidth=0.1)
    assert make_plan(made, slow_links).boundaries == [0, 4]
    fast_links = replace(slow_links, bandwidth=1e9)
    assert make_plan(made, fast_links, num_stages=2).boundaries == [0, 2, 4]
    plan = make_plan(made, slow_links, num_stages=2, every_stage_trains=True)
    assert len(plan.stages) == 2
    with pytest.raises(ValueError, match="chain has 2: use num_stages=2 or fewer"):
        make_plan(made, replace(fast_links, num_devices=3), num_stages=3, every_stage_trains=True)
    with pytest.raises(ValueError, match="5 layers and the chain has 4: use num_stages=4 or fewer"):
        make_plan(made, replace(fast_links, num_devices=5), num_stages=5)


def test_a_stage_that_trains_nothing_is_avoided_where_it_would_be_fastest():
    made = Chain(input_bytes=1, layers=(layer("a", weight_bytes=0), layer("b"), layer("c", weight_bytes=4)))
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)
    stages = make_plan(made, platform, num_stages=2, every_stage_trains=True).boundaries
    assert stages == [0, 2, 3]


def test_more_devices_than_layers_is_a_plan():
    made = Chain(input_bytes=1, layers=(layer("a"), layer("b")))
    plan = make_plan(made, Platform(num_devices=5, memory_bytes=1000, bandwidth=1e9))
    assert plan.boundaries == [0, 1, 2]
    assert plan.peak_memory_bytes[2:] == (0, 0, 0)


def test_a_layer_that_takes_no_time_still_has_one_micro_batch_in_flight():
    made = Chain(input_bytes=3, layers=(layer("a"), layer("b", forward_seconds=0, backward_seconds=0)))
    plan = make_plan(made, Platform(num_devices=2, memory_bytes=1000, bandwidth=1e9), [0, 1, 2])
    assert [stage.in_flight for stage in plan.stages] == [2, 1]


def test_fewer_than_two_buffers_are_counted_as_they_fall():
    """Two tensors can wait at an end of a cut however few buffers are reserved: the replay says how many do."""
    made = Chain(input_bytes=8, layers=(layer("a", output_bytes=8), layer("b", output_bytes=8)))
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=16, comm_buffers=0)
    plan = make_plan(made, platform, [0, 1, 2])
    assert replay(plan, made).violations == ()
    assert [use.buffers for use in plan.memory] == [8, 8]
    assert [use.buffers for use in make_plan(made, replace(platform, comm_buffers=2), [0, 1, 2]).memory] == [
        16,
        16,
    ]


def test_all_zero_times_are_refused():
    made = Chain(input_bytes=1, layers=(layer("a", forward_seconds=0, backward_seconds=0),))
    with pytest.raises(ValueError, match="every layer takes 0 seconds"):
        make_plan(made, Platform(num_devices=1, memory_bytes=1000, bandwidth=1))
