"""The lower bound of a step: never above a step that exists, and tight where that can be checked by thought."""

from __future__ import annotations

import random
import tracemalloc
import warnings
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan, replay
from deepspeed_partition.planner.allocation import Blocks, Placement
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.solvers.interface import Constraints, Problem
from deepspeed_partition.planner.solvers.step.stage_needs import StageNeeds
from deepspeed_partition.planner.solvers.step.step_bounds import StepBounds, step_lower_bound
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import eager
from tests.exhaustive import some
from tests.planner.instances import FREE, chain, problem_of, random_instance

LINKS = (0.5, 1, 2, 4, FREE)


def random_problem(pick: random.Random, seed: int) -> Problem:
    """Any term of a chain and a platform, a step of one or several batches, several pipelines, recomputation."""
    made, platform = random_instance(seed, most_layers=8, most_devices=5)
    platform = replace(
        platform, bandwidth=pick.choice(LINKS), comm_buffers=pick.choice([0, 1, 2, 2, 3]),
        operation_seconds=pick.choice([0, 0, 1]),
    )  # fmt: skip
    m = pick.randint(1, 9)
    problem = replace(problem_of(made, replace(platform, memory_bytes=10**9)), num_micro_batches=m)
    if pick.random() < 0.3:
        first = pick.randint(1, m)
        problem = replace(problem, flushes=(first, *([m - first] if m > first else [])))
    elif pick.random() < 0.3:
        problem = replace(problem, num_pipelines=pick.randint(2, 4))
    if pick.random() < 0.4:
        problem = replace(problem, recomputation=Recomputation(problem.times, "block"))
    return problem


def random_placement(pick: random.Random, problem: Problem) -> Placement:
    """Any allocation: few stages or many, in order or not, with any of its layers recomputed."""
    made, num_devices = problem.chain, problem.platform.num_devices
    num_stages = pick.randint(1, made.num_layers)
    cuts = (0, *sorted(pick.sample(range(1, made.num_layers), num_stages - 1)), made.num_layers)
    if pick.random() < 0.5 and num_stages <= num_devices:
        placement = Placement.contiguous(cuts)
    else:
        placement = Placement.of(cuts, [pick.randrange(num_devices) for _ in range(num_stages)])
    if problem.recomputation is None:
        return placement
    return placement.recomputing(tuple(random_blocks(pick, made, stage) for stage in pairwise(placement.cuts)))


def random_blocks(pick: random.Random, made: Chain, stage: tuple[int, int]) -> Blocks:
    blocks, start = [], stage[0]
    while start < stage[1]:
        stop = pick.randint(start + 1, stage[1])
        if pick.random() < 0.5 and all(layer.recomputable for layer in made.layers[start:stop]):
            blocks.append((start, stop))
        start = stop
    return tuple(blocks)


def with_memory(problem: Problem, memory_bytes: int) -> Problem:
    platform = replace(problem.platform, memory_bytes=max(1, memory_bytes))
    return replace(problem, platform=platform, table=StageTable(problem.chain, platform))


@pytest.mark.parametrize("seed", range(some(120)))
def test_never_above_a_step_that_runs(seed: int) -> None:
    """Any allocation in any order, on devices with just the memory that this very order takes."""
    pick = random.Random(seed)
    problem = random_problem(pick, seed)
    m = problem.num_micro_batches
    assert m is not None
    for _ in range(8):
        placement = random_placement(pick, problem)
        engine = step_engine(problem, placement)
        limit = max(problem.flushes) if problem.flushes else pick.randint(1, m)
        limits = [pick.randint(limit, m) for _ in placement.devices]
        limits = [max(limits[index:]) for index in range(len(limits))]
        run = engine.run(m, eager(engine, limits, oldest_first=pick.random() < 0.5))
        assert run is not None
        tight = with_memory(problem, max(engine.peaks(run)))
        assert step_lower_bound(tight, contiguous=False) <= run.ticks, placement
        if placement.is_contiguous:
            assert step_lower_bound(tight, contiguous=True) <= run.ticks, placement
            exactly = Constraints(max_stages=len(placement.devices), exactly=True)
            assert step_lower_bound(replace(tight, constraints=exactly), contiguous=True) <= run.ticks


def plan_of(made: Chain, platform: Platform, m: int, **options: object):
    plan = make_plan(made, platform, num_micro_batches=m, **options)  # type: ignore[arg-type]
    assert replay(plan, made).violations == ()
    return plan


@pytest.mark.parametrize(("num_devices", "m"), [(2, 1), (2, 5), (3, 4), (4, 9)])
def test_equal_layers_take_work_fill_and_drain(num_devices: int, m: int) -> None:
    """One layer per device, free links: (m + P - 1) (f + b) is the shortest step of all, and proved."""
    made = chain([1] * num_devices, [2] * num_devices)
    platform = Platform(num_devices=num_devices, memory_bytes=100, bandwidth=FREE)
    contiguous = plan_of(made, platform, m, algorithm="contiguous")
    assert contiguous.step_seconds == contiguous.step_lower_bound_seconds == 3 * (m + num_devices - 1)
    assert contiguous.step_proved and contiguous.step_gap == 0
    assert contiguous.step_lower_bound_seconds >= plan_of(made, platform, m).step_lower_bound_seconds


def test_what_operations_take_beside_their_layers_counts() -> None:
    """One device: there is nothing to search, and its step is proved. Two: each has a stage at least."""
    made = chain([1] * 30, [2] * 30)
    platform = Platform(num_devices=1, memory_bytes=10**6, bandwidth=FREE, operation_seconds=40)
    plan = plan_of(made, platform, 8)
    assert plan.step_seconds == plan.step_lower_bound_seconds == 8 * (90 + 2 * 40)
    assert plan.step_proved
    two = plan_of(made, replace(platform, num_devices=2), 8)
    assert 8 * (45 + 2 * 40) < two.step_lower_bound_seconds <= two.step_seconds


def test_layers_that_cannot_be_shared_out_evenly() -> None:
    """Five layers on two devices: one has three of them, whatever their order."""
    made = chain([1] * 5, [2] * 5)
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)
    plan = plan_of(made, platform, 10)
    assert plan.step_lower_bound_seconds == 3 * 3 * 10  # device 0, which waits for nothing, has three
    assert plan.step_gap < 0.05


def test_a_device_without_room_for_more_than_one_micro_batch() -> None:
    """The first layer holds its stash until the micro-batch has come back: one at a time, m times the path."""
    made = chain([1, 1], [2, 2], stash=[60, 1])
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)
    plan = plan_of(made, platform, 4, recompute="never")
    assert plan.step_seconds == plan.step_lower_bound_seconds == 4 * 6
    assert plan.step_proved
    roomy = plan_of(made, replace(platform, memory_bytes=1000), 4, recompute="never")
    assert roomy.step_seconds == 3 * 5


def test_mean_memory_over_the_step() -> None:
    """No layer alone is short of memory, but all devices together are."""
    made = chain([1] * 4, [1] * 4, stash=[10] * 4)
    platform = Platform(num_devices=2, memory_bytes=20, bandwidth=FREE)
    m = 20
    problem = replace(problem_of(made, platform), num_micro_batches=m)
    stashed = 10 * (8 + 6 + 4 + 2)
    bound = problem.times.clock.seconds(step_lower_bound(problem, contiguous=False))
    assert bound >= m * stashed / (2 * 20) > m * 8 / 2


def bound_of(problem: Problem, m: int, *, contiguous: bool = False) -> float:
    bound = step_lower_bound(replace(problem, num_micro_batches=m), contiguous=contiguous)
    return problem.times.clock.seconds(bound)


def test_first_stages_of_two_devices_cannot_be_small() -> None:
    """Fill and drain alone want device 1 to begin behind the first layer; then device 0 has too little to do."""
    made = chain([1, 3, 3, 1, 2], [4, 1, 4, 1, 4], outputs=[1, 3, 1, 1, 2], stash=[0] * 5)
    platform = Platform(num_devices=2, memory_bytes=1000, bandwidth=2)
    bound = bound_of(problem_of(made, platform), 3)
    assert (3 * 24 + 5 + 2 * 0.5) / 2 == 39  # work, fill and drain
    assert bound == pytest.approx(40.5)
    assert bound <= plan_of(made, platform, 3).step_seconds


def test_first_stages_of_four_devices_cannot_be_small() -> None:
    made = chain([1] * 4 + [4] * 12, [1] * 4 + [4] * 12, outputs=[4] * 16, stash=[0] * 16)
    platform = Platform(num_devices=4, memory_bytes=1000, bandwidth=1)
    bound = bound_of(problem_of(made, platform), 8)
    assert 231.4 < bound <= plan_of(made, platform, 8, algorithm="contiguous").step_seconds  # 226 by pairs alone


def test_the_last_micro_batch_goes_over_all_boundaries() -> None:
    """Its way, and the other micro-batch before it in the stage of layers 1 and 2: its link alone is not all."""
    made = chain([3, 1, 3, 3, 2], [6, 2, 6, 6, 4], outputs=[1, 3, 1, 2, 1], stash=[0] * 5)
    platform = Platform(num_devices=4, memory_bytes=1000, bandwidth=1)
    plan = plan_of(made, platform, 2)
    assert plan.boundaries == [0, 1, 3, 4, 5]
    way = 36 + 2 * (1 + 1 + 2)
    assert bound_of(problem_of(made, platform), 2) == plan.step_seconds == way + 8


def test_all_boundaries_together_leave_time_for_the_turn_of_each_stage() -> None:
    """Boundaries that are cheap before a stage, and others that are cheap behind it, are not the same ones."""
    ticks = [2, 2, 2, 4, 2, 4, 1]
    made = chain(ticks, [2 * each for each in ticks], outputs=[3, 3, 4, 1, 2, 3, 4], stash=[0] * 7)
    platform = Platform(num_devices=3, memory_bytes=1000, bandwidth=1)
    assert bound_of(problem_of(made, platform), 3) == 92  # 87 where each stage has its own
    plan = plan_of(made, platform, 3)
    assert plan.step_seconds == 92 and plan.boundaries == [0, 2, 4, 6, 7] and plan.step_proved


def test_a_stage_waits_in_fill_and_drain_for_lack_of_memory() -> None:
    """Room for two micro-batches: device 0 has run two forwards (8) when the first gradient comes back (15)."""
    made = chain([4, 3], [8, 6], outputs=[1, 0], stash=[20, 20])
    platform = Platform(num_devices=2, memory_bytes=60, bandwidth=1)
    plan = plan_of(made, platform, 6, recompute="never")
    fill, drain = (4 + 1 + 9 + 1) - 2 * 4, (1 + 9 + 1 + 8) - 2 * 8
    assert plan.step_seconds == bound_of(problem_of(made, platform), 6) == 6 * 12 + fill + drain


def test_a_stage_waits_in_the_fill_for_a_slow_link() -> None:
    """A micro-batch comes to device 1 each 4 s, and its forward takes 2 s, for 12 s before its first backward."""
    made = chain([1, 2, 4], [1, 10, 6], outputs=[4, 0, 0], stash=[0] * 3)
    platform = Platform(num_devices=3, memory_bytes=1000, bandwidth=1)
    waits = 12 - (1 + 12 / 4) * 2
    assert 2 + 2 * 4 + 8 * 12 + waits == 110
    assert bound_of(problem_of(made, platform), 8) + 1e-6 >= 110
    assert bound_of(problem_of(made, platform), 8) <= plan_of(made, platform, 8).step_seconds == 112


def test_two_micro_batches_without_room_for_both() -> None:
    """Each holds 60 bytes at the end of the chain, and both devices have 70: one waits for the other."""
    made = chain([1] * 6, [2] * 6, stash=[10] * 6)
    platform = Platform(num_devices=2, memory_bytes=35, bandwidth=FREE)
    assert bound_of(problem_of(made, platform), 2) > 24.8  # their work, and fill and drain by a layer, take 21
    roomy = problem_of(made, replace(platform, memory_bytes=60))
    assert bound_of(roomy, 2) == 21


def test_what_a_stage_must_recompute() -> None:
    """Room for one micro-batch: one at a time takes 4 * 6, and two at a time run the first forward twice."""
    made = chain([1, 1], [2, 2], stash=[10, 1])
    platform = Platform(num_devices=2, memory_bytes=15, bandwidth=FREE)
    never = plan_of(made, platform, 4, algorithm="contiguous", recompute="never")
    assert never.step_lower_bound_seconds == never.step_seconds == 4 * 6
    problem = problem_of(made, platform)
    problem = replace(problem, recomputation=Recomputation(problem.times, "block"))
    assert bound_of(problem, 4, contiguous=True) >= 15.9  # 4 * 4 on device 0 with twice the forward, or 24
    assert plan_of(made, platform, 4, algorithm="contiguous").step_seconds >= 16


def test_slow_links_keep_layers_together() -> None:
    """A boundary whose tensors alone take longer than everything on one device is no place for a cut."""
    made = chain([1, 1, 1], [1, 1, 1], outputs=[100, 100, 0])
    platform = Platform(num_devices=3, memory_bytes=10**6, bandwidth=1)
    plan = plan_of(made, platform, 4)
    assert plan.step_seconds == plan.step_lower_bound_seconds == 4 * 6
    assert plan.step_proved


def test_flush_of_one_batch() -> None:
    """Between its forwards and its backwards each device waits for the way to the end and back."""
    made = chain([1, 1], [2, 2])
    platform = Platform(num_devices=2, memory_bytes=1000, bandwidth=FREE)
    plan = plan_of(made, platform, 5, flushes=[5])
    assert plan.step_seconds == 18
    assert plan.step_lower_bound_seconds == pytest.approx(18)


@pytest.mark.parametrize("seed", range(some(20)))
def test_every_algorithm_has_a_bound_below_its_step(seed: int) -> None:
    """And those that make only contiguous partitions one that the best of these meets or is above."""
    made, platform = random_instance(seed)
    for m in (1, 4):
        for options in ({}, {"algorithm": "contiguous"}, {"algorithm": "uniform"}, {"num_stages": 1}):
            try:
                plan = plan_of(made, platform, m, **options)
            except (InfeasibleError, ValueError):
                continue
            assert plan.step_gap >= 0
            assert plan.step_proved == (plan.step_gap <= 1e-6)
            assert plan.step_gap == plan.step_seconds / plan.step_lower_bound_seconds - 1


def test_long_steps_count_beyond_64_bits() -> None:
    made = chain([1e8, 1e8], [2e8, 1e8], outputs=[3, 0])
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e-8)
    problem = replace(problem_of(made, platform), num_micro_batches=10_000)
    seconds = problem.times.clock.seconds(step_lower_bound(problem, contiguous=True))
    assert seconds == pytest.approx(10_000 * 5e8)


def test_a_link_of_next_to_no_time_is_no_link() -> None:
    """Numpy warned twice of a number beyond 64 bits, on every rank that planned."""
    made = chain([5e3] * 3, [5e3] * 3, outputs=[1] * 3)
    steps = []
    for bandwidth in (1e9 / 3, FREE):
        platform = Platform(num_devices=3, memory_bytes=10**6, bandwidth=bandwidth)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps.append(bound_of(problem_of(made, platform), 4, contiguous=True))
    assert steps == pytest.approx([4 * 1e4 + 2 * 1e4] * 2)


def test_what_has_no_room_may_be_faster_than_the_bound() -> None:
    """A step one byte too large, the last one that is tried, was once called a bug instead of too large."""
    made, platform = random_instance(17, most_layers=3)
    platform = replace(platform, num_devices=2, bandwidth=FREE)
    with pytest.raises(InfeasibleError):
        make_plan(made, platform, num_micro_batches=2, flushes=(2,), recompute="never")


def test_a_bound_where_nothing_fits():
    """A comparison of such a chain ended in a traceback: no step was long enough, however long."""
    made = chain([1] * 12, [2] * 12, weights=[100] * 12)
    problem = problem_of(made, Platform(num_devices=4, memory_bytes=90, bandwidth=1.0))
    problem = replace(problem, num_micro_batches=4)
    assert step_lower_bound(problem, contiguous=False) >= 4 * 12 * 3 / 4


def test_large_tables_are_not_kept():
    """A bound that was remembered kept the tables of its problem: 335 MB of 2048 layers."""
    made = chain([1] * 6, [2] * 6)
    problem = replace(
        problem_of(made, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1.0)), num_micro_batches=4
    )
    bound = step_lower_bound(problem, contiguous=False)
    assert bound == step_lower_bound(problem, contiguous=False)
    table = weakref.ref(problem.table)
    del problem
    assert table() is None


def test_few_tables_at_a_time():
    """What stages of long chains need was computed with 17 tables of all of them, 33 MB each at 2048 layers."""
    size = 1500
    made = chain([1] * size, [2] * size)
    platform = Platform(num_devices=8, memory_bytes=10**6, bandwidth=1.0)
    problem = replace(problem_of(made, platform), num_micro_batches=8)
    bounds = StepBounds(problem)
    tracemalloc.start()
    StageNeeds(bounds, problem.table.is_stage)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 9 * 8 * size**2
