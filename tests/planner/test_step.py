"""One synchronous step: DeepSpeed's own schedule, and an engine that overlaps transfers."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from deepspeed_partition import InfeasibleError, Platform, replay
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, in_order, one_f_one_b
from deepspeed_partition.planner.step import blocking_step, deepspeed_instructions, one_f_one_b_order
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import FREE, chain, problem_of, random_instance, solved_cases
from tests.planner.instances import plan_without_recomputation as make_plan


def uniform(case):
    size = 1000
    made = chain([case["tF"]] * case["P"], [case["tB"]] * case["P"], outputs=[size] * case["P"])
    bandwidth = size / case["c"] if case["c"] else FREE
    return made, Platform(num_devices=case["P"], memory_bytes=1e15, bandwidth=bandwidth)


@pytest.mark.parametrize("case", solved_cases("flush"), ids=lambda case: case["name"])
def test_solved_cases(case):
    made, platform = uniform(case)
    plan = make_plan(made, platform, num_micro_batches=case["m"], num_stages=case["P"])
    assert plan.blocking_step_seconds == pytest.approx(case["deepspeed_blocking"], rel=1e-9)
    assert plan.step_seconds == pytest.approx(case["async_1f1b"], rel=1e-9)
    assert [stage.in_flight for stage in plan.stages] == case["in_flight"]["deepspeed"]
    free = make_plan(made, platform, num_micro_batches=case["m"])
    assert free.step_seconds <= case["async_deep_2P_minus_1"] * (1 + 1e-9)


@pytest.mark.parametrize("case", solved_cases("flush"), ids=lambda case: case["name"])
def test_a_deep_warm_up_hides_transfers(case):
    made, platform = uniform(case)
    stages, m = case["P"], case["m"]
    problem = problem_of(made, platform)
    engine = StepEngine(problem.times, problem.table, range(stages + 1), range(stages))
    depths = [min(2 * (stages - stage) - 1, m) for stage in range(stages)]
    run = engine.run(m, in_order(one_f_one_b(engine, depths, m)))
    assert problem.times.clock.seconds(run.ticks) == pytest.approx(case["async_deep_2P_minus_1"], rel=1e-9)


def test_orders_as_pictures():
    assert " ".join(f"{op}.{mb}" for op, mb in one_f_one_b_order(0, 2, 4)) == (
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"
    )
    assert list(deepspeed_instructions(0, 2, 2)) == [
        ("ForwardPass", 0), ("SendActivation", 0), ("ForwardPass", 1),
        ("RecvGrad", 0), ("SendActivation", 1), ("BackwardPass", 0),
        ("RecvGrad", 1), ("BackwardPass", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
def test_instructions_are_deepspeeds(num_stages, num_micro_batches):
    """The same commands in the same order as DeepSpeed's TrainSchedule, and our 1F1B is its order."""
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    names = {"SendGrad", "RecvActivation", "RecvGrad", "SendActivation", "ForwardPass", "BackwardPass"}
    for stage in range(num_stages):
        theirs = [
            type(command).__name__
            for step in schedule.TrainSchedule(num_micro_batches, num_stages, stage)
            for command in step
            if type(command).__name__ in names
        ]
        ours = list(deepspeed_instructions(stage, num_stages, num_micro_batches))
        assert [name for name, _ in ours] == theirs
        for name in names:  # every kind runs on the micro-batches in order
            assert [mb for each, mb in ours if each == name] in ([], list(range(num_micro_batches)))
        depth = min(num_stages - stage, num_micro_batches)
        passes = [(f"{name[0]}{stage}", mb) for name, mb in ours if name.endswith("Pass")]
        assert tuple(passes) == one_f_one_b_order(stage, depth, num_micro_batches)


@pytest.mark.parametrize("stages", [3, 4, 6])
@pytest.mark.parametrize("m", [6, 11])
def test_blocking_step_of_equal_stages_in_closed_form(stages, m):
    forward, backward, one_way = 2, 5, 1
    made = chain([forward] * stages, [backward] * stages, outputs=[8] * stages)
    times = TimedChain(made, Platform(num_devices=stages, memory_bytes=1e9, bandwidth=8))
    step = times.clock.seconds(blocking_step(times, range(stages + 1), m))
    assert step == (m + stages - 1) * (forward + backward) + 4 * one_way * (m + stages / 2 - 2)


@pytest.mark.parametrize("seed", range(100))
def test_steps_in_deepspeed_are_replayed(seed):
    """The replay executes the orders in another way and finds the same time, depth and memory."""
    made, platform = random_instance(seed)
    num_stages = min(made.num_layers, platform.num_devices)
    for m in (1, 3, 7):
        try:
            plan = make_plan(made, platform, num_micro_batches=m, num_stages=num_stages)
        except InfeasibleError as error:
            platform = replace(platform, memory_bytes=error.smallest_memory_bytes)
            plan = make_plan(made, platform, num_micro_batches=m, num_stages=num_stages)
        found = replay(plan, made)
        assert found.violations == ()
        assert found.step_seconds == pytest.approx(plan.step_seconds, rel=1e-12)
        assert list(found.in_flight) == [min(num_stages - s, m) for s in range(num_stages)]
        assert plan.step_seconds <= plan.blocking_step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_in_deepspeed_the_step_is_never_slower_than_that_of_the_shortest_period(seed):
    made, platform = random_instance(seed)
    platform = replace(platform, memory_bytes=10**6)
    num_stages = min(made.num_layers, platform.num_devices)
    periodic = make_plan(made, platform, "contiguous", num_stages=num_stages)
    for m in (2, 6, 40):
        plan = make_plan(made, platform, num_micro_batches=m, num_stages=num_stages)
        of_periodic = make_plan(made, platform, periodic.boundaries, num_micro_batches=m, num_stages=num_stages)
        assert plan.blocking_step_seconds <= of_periodic.blocking_step_seconds


def test_the_search_for_a_step_in_deepspeed_finds_the_best_partition():
    """On small instances, against every cut: the best in nearly all, and never far."""
    ratios = []
    for seed in range(some(80)):
        made, platform = random_instance(seed, most_layers=6)
        platform = replace(platform, memory_bytes=10**6)
        num_stages = min(made.num_layers, platform.num_devices)
        times = TimedChain(made, platform)
        every = [cuts for cuts in oracles.all_cuts(made.num_layers, num_stages) if len(cuts) == num_stages + 1]
        best = min(blocking_step(times, cuts, 6) for cuts in every)
        plan = make_plan(made, platform, num_micro_batches=6, num_stages=num_stages)
        ratios.append(plan.blocking_step_seconds / times.clock.seconds(best))
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) <= 1.1


def test_memory_of_a_step_in_deepspeed_is_that_of_its_depth():
    """1F1B* slows down to fit, and so does an order of our own; DeepSpeed's keeps P - s micro-batches."""
    made = chain([1] * 4, [2] * 4, outputs=[1, 1, 1, 1], input_bytes=1, stash=[10, 10, 10, 10])
    platform = Platform(num_devices=4, memory_bytes=35, bandwidth=1e9)
    slowed = make_plan(made, platform, [0, 1, 2, 3, 4])
    assert [stage.in_flight for stage in slowed.stages] == [3, 2, 1, 1]
    with pytest.raises(InfeasibleError, match="with 4 micro-batches in flight"):
        make_plan(made, platform, [0, 1, 2, 3, 4], num_micro_batches=8, num_stages=4)
    free = make_plan(made, platform, [0, 1, 2, 3, 4], num_micro_batches=8)
    assert [stage.in_flight for stage in free.stages] == [3, 3, 2, 1]
    assert free.blocking_step_seconds is None


def test_tensors_that_pile_up_before_a_slow_link_are_counted():
    """Four forwards in a row leave four activations waiting: more than the two buffers of the cut."""
    made = chain([1] * 4, [1] * 4, outputs=[10, 1, 1, 1], input_bytes=1, stash=[1, 1, 1, 1])
    slow = Platform(num_devices=4, memory_bytes=10**6, bandwidth=0.5)
    plan = make_plan(made, slow, [0, 1, 2, 3, 4], num_micro_batches=6, num_stages=4)
    fast = make_plan(made, replace(slow, bandwidth=1e9), [0, 1, 2, 3, 4], num_micro_batches=6, num_stages=4)
    assert plan.memory[0].buffers > fast.memory[0].buffers == 20
    with pytest.raises(InfeasibleError, match="pile up before a slow link") as raised:
        make_plan(
            made,
            replace(slow, memory_bytes=max(plan.peak_memory_bytes) - 1),
            [0, 1, 2, 3, 4],
            num_micro_batches=6,
            num_stages=4,
        )
    assert raised.value.smallest_memory_bytes == max(plan.peak_memory_bytes)
    # An order of our own begins fewer micro-batches where these have no room.
    tight = replace(slow, memory_bytes=max(plan.peak_memory_bytes) - 1)
    less = make_plan(made, tight, [0, 1, 2, 3, 4], num_micro_batches=6)
    assert max(less.peak_memory_bytes) < max(plan.peak_memory_bytes)
    assert less.step_seconds >= plan.step_seconds


@pytest.mark.parametrize("seed", range(250))
def test_layers_that_take_no_time(seed):
    """A frozen prefix has backwards of zero seconds: at one instant then many things end and begin, and the two
    executions of a step once disagreed on which transfer goes first."""
    pick = random.Random(seed)
    size = pick.randint(2, 5)
    made = chain(
        [pick.choice([0, 0, 1, 2, 3]) for _ in range(size - 1)] + [1],
        [pick.choice([0, 0, 1, 2]) for _ in range(size)],
        outputs=[pick.choice([0, 1, 2, 4]) for _ in range(size)],
        input_bytes=1,
    )
    platform = Platform(num_devices=size, memory_bytes=10**6, bandwidth=pick.choice([1, 2, 4]))
    for cuts in oracles.all_cuts(size, size):
        plan = make_plan(made, platform, cuts, num_micro_batches=pick.randint(1, 9))
        assert replay(plan, made).violations == ()


def test_one_device_needs_no_transfers():
    made = chain([1, 2], [3, 4], outputs=[5, 5])
    plan = make_plan(made, Platform(num_devices=1, memory_bytes=1000, bandwidth=1), num_micro_batches=5)
    assert plan.step_seconds == plan.blocking_step_seconds == 50


def test_orders_that_wait_for_each_other_are_refused():
    made = chain([1, 1], [1, 1], outputs=[1, 1])
    problem = problem_of(made, Platform(num_devices=2, memory_bytes=1000, bandwidth=1))
    engine = StepEngine(problem.times, problem.table, [0, 1, 2], [0, 1])
    orders = [(3, 0), (1, 2)]  # B0 before F0
    with pytest.raises(ValueError, match="wait for each other"):
        engine.run(1, in_order(orders))


def test_number_of_micro_batches_is_checked():
    made = chain([1], [1])
    with pytest.raises(ValueError, match="from 1 to 10000"):
        make_plan(made, Platform(num_devices=1, memory_bytes=1000, bandwidth=1), num_micro_batches=0)


def test_pairs_of_neighbours_meet():
    """Every send of a stage has its receive at the neighbour, in the same order."""
    lists = [list(deepspeed_instructions(stage, 5, 9)) for stage in range(5)]
    for upper, lower in pairwise(lists):
        sent = [each for each in upper if each[0] in ("SendActivation", "RecvGrad")]
        mirror = {"RecvActivation": "SendActivation", "SendGrad": "RecvGrad"}
        received = [(mirror[name], mb) for name, mb in lower if name in mirror]
        assert sent == received
