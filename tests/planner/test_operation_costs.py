"""What an engine takes for an operation beside its layers, and room for messages beyond what a plan needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_partition import InfeasibleError, Platform, make_plan, replay
from deepspeed_partition.planner.buffers import MOST_FILLED, with_more_buffers
from deepspeed_partition.planner.operation_costs import SHARE, operation_seconds_of
from deepspeed_partition.planner.simulate.replay_step import run_step
from tests.exhaustive import some
from tests.planner.instances import chain, problem_of, random_instance

COSTS = [(0.0, None), (0.5, None), (0.0, 2.0), (1.25, 4.0)]
"""Seconds of an operation, and bytes per second of a copy."""


@given(
    st.integers(0, 10**6), st.sampled_from(COSTS), st.integers(1, 5), st.sampled_from(["madpipe", "contiguous"])
)
def test_planner_and_replay_count_the_same(seed, cost, num_micro_batches, algorithm):
    """Two programs simulate a step; the replay also refuses a step below its bound."""
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    platform = replace(platform, operation_seconds=cost[0], copy_bandwidth=cost[1])
    try:
        plan = make_plan(made, platform, algorithm, num_micro_batches=num_micro_batches, time_limit_seconds=1)
    except InfeasibleError:
        return
    assert not replay(plan, made).violations


def test_a_step_by_hand():
    """Two stages of one layer, one micro-batch: all operations and messages, one behind the other."""
    made = chain([1, 2], [3, 4], outputs=[8, 0], weights=[5, 5])
    platform = Platform(
        num_devices=2, memory_bytes=50, bandwidth=4.0, weight_copies=1, operation_seconds=0.25, copy_bandwidth=16.0
    )
    plan = make_plan(made, platform, [0, 1, 2], num_micro_batches=1)
    layers, transfers, copies = 1 + 2 + 3 + 4, 2 * 8 / 4, 4 * 8 / 16
    assert plan.step_seconds == layers + transfers + copies + 4 * 0.25
    assert plan.blocking_step_seconds == plan.step_seconds
    lasts = {name: end - begin for (name, _), (begin, end) in run_step(plan, made).operations.items()}
    ticks = problem_of(made, platform).times.clock.ticks
    assert lasts["F0"] == ticks(1 + 0.25 + 0.5) and lasts["B0"] == ticks(3 + 0.25 + 0.5)
    assert {each.operation: each.duration_seconds for each in plan.operations}["F0"] == 1, (
        "periods do not count it"
    )


@settings(max_examples=some(30))
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 2.0]), st.integers(1, 5))
def test_a_measured_step_tells_what_an_operation_takes(seed, seconds, num_micro_batches):
    """The step is that of the replay, which is another program."""
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    platform = replace(platform, memory_bytes=10**15)
    dear = replace(platform, operation_seconds=seconds)
    plan = make_plan(made, dear, "uniform", num_micro_batches=num_micro_batches, recompute="never")
    found = operation_seconds_of(made, platform, plan.boundaries, plan.step.order, plan.step_seconds)
    assert found == pytest.approx(seconds, abs=SHARE * plan.step_seconds)
    again = replay(replace(plan, platform=replace(dear, operation_seconds=found)), made).step_seconds
    assert again == pytest.approx(plan.step_seconds, rel=0.01)
    least = replace(platform, operation_seconds=seconds + 1)
    assert operation_seconds_of(made, least, plan.boundaries, plan.step.order, plan.step_seconds) == seconds + 1


def test_a_measured_step_of_whole_batches():
    """Where the loss is that of a whole batch, forwards end before backwards begin."""
    made = chain([1, 1], [2, 2], outputs=[0, 0])
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1.0)
    order = ("F", 0), ("B", 0), ("F", 1), ("B", 1)
    one_by_one = [tuple((f"{kind}{stage}", number) for kind, number in order) for stage in range(2)]
    all_first = [tuple((f"{kind}{stage}", number) for kind in "FB" for number in range(2)) for stage in range(2)]

    def found(orders, step_seconds, flushes):
        return operation_seconds_of(made, platform, [0, 1, 2], orders, step_seconds, flushes)

    assert found(all_first, 9 + 6 * 0.5, None) == pytest.approx(0.5, rel=0.01)
    assert found(all_first, 9 + 6 * 0.5, (2,)) == pytest.approx(0.5, rel=0.01)
    assert found(one_by_one, 12 + 8 * 0.5, (1, 1)) == pytest.approx(0.5, rel=0.01)
    with pytest.raises(ValueError, match="operation R0 is no forward or backward of one of 2 stages"):
        found([(("R0", 0),), ()], 12.0, None)


def test_neighbours_on_one_device_copy_nothing():
    made = chain([1, 1, 1], [1, 1, 1], outputs=[8, 8, 0])
    platform = Platform(num_devices=2, memory_bytes=10**3, bandwidth=4.0, copy_bandwidth=8.0)
    times = problem_of(made, platform).times
    assert [times.clock.seconds(each) for each in times.ticks_beside_layers([0, 1, 2, 3], [0, 0, 1])] == [0, 1, 1]


@pytest.mark.parametrize(("number", "operation_seconds"), [(1, 0.5), (2, 3.0), (3, 1.0)])
def test_no_plan_is_faster_than_the_bound_of_a_step_with_costs(number, operation_seconds):
    """Every cut of the layers, with its own order, takes as long as the bound says at the least."""
    made, platform = random_instance(number, most_layers=4, most_devices=2)
    platform = replace(platform, operation_seconds=operation_seconds, memory_bytes=100 * platform.memory_bytes)
    bound = make_plan(made, platform, num_micro_batches=3, time_limit_seconds=1).step.lower_bound_seconds
    layers = len(made.layers)
    cuts = [[0, layers], *([0, cut, layers] for cut in range(1, layers) if platform.num_devices > 1)]
    steps = [make_plan(made, platform, cut, num_micro_batches=3).step_seconds for cut in cuts]
    assert bound <= min(steps) * (1 + 1e-9)


@pytest.mark.parametrize("cost", [{"operation_seconds": 0.5}, {"copy_bandwidth": 10.0}])
def test_what_operations_cost_makes_stages_fewer(cost):
    made = chain([1] * 8, [2] * 8, outputs=[4] * 7 + [0])
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e3)
    free = make_plan(made, platform, num_micro_batches=4)
    dear = make_plan(made, replace(platform, **cost), num_micro_batches=4)
    assert len(free.stages) > 2 and len(dear.stages) < len(free.stages)
    assert not replay(dear, made).violations


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_more_buffers_change_nothing_but_room(seed, num_micro_batches):
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    platform = replace(platform, comm_buffers=2, memory_bytes=10 * platform.memory_bytes)
    try:
        plan = make_plan(made, platform, num_micro_batches=num_micro_batches, time_limit_seconds=1)
    except InfeasibleError:
        return
    roomier = with_more_buffers(plan, made)
    assert roomier.platform == replace(platform, comm_buffers=roomier.platform.comm_buffers)
    assert roomier.step.order == plan.step.order and roomier.step_seconds <= plan.step_seconds
    assert not replay(roomier, made).violations
    if roomier is not plan:
        assert max(roomier.peak_memory_bytes) <= MOST_FILLED * platform.memory_bytes
        assert roomier.step.lower_bound_seconds <= roomier.step_seconds


def test_more_buffers_where_memory_is_to_spare():
    made = chain([1] * 4, [2] * 4, outputs=[4] * 3 + [0], weights=[5] * 4)
    platform = Platform(num_devices=2, memory_bytes=10**4, bandwidth=10.0)
    plan = make_plan(made, platform, num_micro_batches=8)
    roomier = with_more_buffers(plan, made)
    assert roomier.platform.comm_buffers == 16
    peak = max(plan.peak_memory_bytes)
    tight = replace(plan, platform=replace(platform, memory_bytes=peak))
    assert with_more_buffers(tight, made) is tight, "beyond three quarters of the memory"
    some = max(roomier.peak_memory_bytes) - 1
    between = replace(plan, platform=replace(platform, memory_bytes=int(some / MOST_FILLED)))
    assert with_more_buffers(between, made).platform.comm_buffers == 8
    without = replace(plan, step=None)
    assert with_more_buffers(without, made) is without


def test_more_buffers_for_a_plan_that_decides_by_micro_batch():
    """Its step is shorter than that of any plan which treats all alike, and the bound of those is no bound."""
    stages = [replace(each, stash_bytes=100) for each in chain([1] * 3, [1] * 3, outputs=[1, 1, 0]).layers]
    made = replace(chain([1], [1]), layers=tuple(stages))
    platform = Platform(num_devices=3, memory_bytes=230, bandwidth=1e9)
    options = {"num_micro_batches": 14, "recompute": "micro-batch", "time_limit_seconds": 1}
    plan = make_plan(made, platform, "contiguous", **options)
    assert not plan.treats_all_alike
    roomier = with_more_buffers(replace(plan, platform=replace(platform, memory_bytes=400)), made)
    assert roomier.platform.comm_buffers == 16 and roomier.step.order == plan.step.order
    assert roomier.step.lower_bound_seconds <= roomier.step_seconds < 42
    assert not replay(roomier, made).violations


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        ({"operation_seconds": -1.0}, "operation_seconds is -1.0: seconds are finite, from 0 to 1e+09"),
        ({"copy_bandwidth": 0}, "copy_bandwidth is 0 bytes per second: it must be more than 0"),
        ({"copy_bandwidth": "fast"}, "copy_bandwidth is 'fast', not a finite number"),
    ],
)
def test_costs_that_are_none(cost, words):
    with pytest.raises(ValueError, match=words.replace("+", r"\+")):
        Platform(num_devices=2, memory_bytes=1, bandwidth=1.0, **cost)


@pytest.mark.parametrize("cost", [{"operation_seconds": 1e8}, {"copy_bandwidth": 1e-8}])
def test_costs_beyond_the_clock(cost):
    made = chain([1, 1], [1, 1], outputs=[4, 0])
    with pytest.raises(ValueError, match="more than 1e\\+06 times what all layers take"):
        make_plan(made, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1.0, **cost))


@pytest.mark.parametrize("split_backward", [True, False])
def test_more_buffers_keep_the_bound_of_what_the_planner_was_allowed(split_backward):
    """Whole backwards take 33 at the least, and 27 in halves: 33 was proved, though halves were allowed."""
    halves = {"backward_input_seconds": 1, "backward_weight_seconds": 1}
    made = chain([1] * 4, [2] * 4)
    made = replace(made, layers=tuple(replace(each, **halves) for each in made.layers))
    platform = Platform(num_devices=4, memory_bytes=10**6, bandwidth=1e9)
    plan = make_plan(made, platform, "contiguous", num_micro_batches=8, split_backward=split_backward)
    roomier = with_more_buffers(plan, made, split_backward=True)
    assert roomier.platform.comm_buffers == 16
    assert roomier.step_seconds == (27 if split_backward else 33)
    assert (roomier.step.lower_bound_seconds, roomier.step.proved) == (27, split_backward)
    assert (plan.step.lower_bound_seconds, plan.step.proved) == (27 if split_backward else 33, True)


def test_more_buffers_know_that_stages_might_have_decided_by_micro_batch():
    """A cut that recomputes all takes 42, as short as any that treats micro-batches alike; others take less."""
    stages = [replace(each, stash_bytes=100) for each in chain([1] * 3, [1] * 3, outputs=[1, 1, 0]).layers]
    made = replace(chain([1], [1]), layers=tuple(stages))
    platform = Platform(num_devices=3, memory_bytes=290, bandwidth=1e9)
    plan = make_plan(made, platform, [0, 1, 2, 3], num_micro_batches=14, recompute="block")
    alike = with_more_buffers(plan, made, recompute="block")
    by_micro_batch = with_more_buffers(plan, made, recompute="micro-batch")
    assert alike.platform.comm_buffers == by_micro_batch.platform.comm_buffers > 2
    assert round(alike.step.lower_bound_seconds) == round(alike.step_seconds) == 42
    assert round(by_micro_batch.step.lower_bound_seconds) == 32 and not by_micro_batch.step.proved
