"""Interleaved steps: the allocations, the published orders, and what local search makes of them.

The judge is the replay, or an order written down here from its publication.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from deepspeed_partition import Chain, Platform, replay
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.pattern.modulo_scheduling import early_pattern
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from deepspeed_partition.planner.solvers.step import step_search
from deepspeed_partition.planner.solvers.step.interleaved_search import InterleavedSearch
from deepspeed_partition.planner.solvers.step.interleaving import balanced, interleaved, moved_layers
from deepspeed_partition.planner.solvers.step.order_search import better_orders
from deepspeed_partition.planner.solvers.step.orders import DepthRule, GroupRule, megatron_limits
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import WaitInCircleError, in_order
from tests.planner.instances import FREE, chain, problem_of, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan
from tests.planner.test_step_search import one_at_a_time, run_in


def blocks(num_blocks: int, *, stash: int = 1, num_bytes: int = 0) -> Chain:
    """Equal blocks between an embedding and a head, in ms."""
    size = num_blocks + 2
    return chain(
        [0.001, *[0.010] * num_blocks, 0.006], [0.001, *[0.020] * num_blocks, 0.012], weights=[1] * size,
        outputs=[num_bytes] * (size - 1) + [0], stash=[stash] * size,
    )  # fmt: skip


def step_problem(made: Chain, platform: Platform, m: int) -> Problem:
    return replace(problem_of(made, platform), num_micro_batches=m)


def megatron(num_devices: int, per_device: int, m: int) -> list[list[tuple[str, int]]]:
    """Megatron-LM's interleaved 1F1B, from section 2.2 of its paper and the numbers of its warm-up."""
    orders = []
    for device in range(num_devices):

        def unit(number: int, *, forward: bool, device: int = device) -> tuple[str, int]:
            of_group = number % (num_devices * per_device)
            chunk = of_group // num_devices if forward else per_device - 1 - of_group // num_devices
            micro_batch = number // (num_devices * per_device) * num_devices + of_group % num_devices
            return f"{'F' if forward else 'B'}{chunk * num_devices + device}", micro_batch

        total = m * per_device
        ahead = (
            total
            if m == num_devices
            else min(total, 2 * (num_devices - device - 1) + (per_device - 1) * num_devices)
        )
        order = [unit(number, forward=True) for number in range(ahead)]
        for number in range(total - ahead):
            order += [unit(ahead + number, forward=True), unit(number, forward=False)]
        orders.append(order + [unit(number, forward=False) for number in range(total - ahead, total)])
    return orders


@pytest.mark.parametrize(
    ("num_devices", "per_device", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 4, 9), (4, 4, 8)]
)
def test_groups_of_as_many_as_there_are_devices_are_megatrons_order(num_devices, per_device, m):
    made = blocks(num_devices * per_device - 2)
    problem = step_problem(made, Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=FREE), m)
    devices = tuple(range(num_devices)) * per_device
    engine = step_engine(problem, Placement.of(range(made.num_layers + 1), devices))
    rule = GroupRule(num_devices, megatron_limits(devices, num_devices), alternates=True)
    run = engine.run(m, rule.choice(engine, m))
    assert [list(order) for order in engine.named(run.orders)] == megatron(num_devices, per_device, m)


def test_one_group_of_all_is_breadth_first():
    made = blocks(6)
    problem = step_problem(made, Platform(num_devices=2, memory_bytes=10**9, bandwidth=FREE), 3)
    engine = step_engine(problem, Placement.of(range(0, 9, 2), (0, 1, 0, 1)))
    run = engine.run(3, GroupRule(3, (100, 100), alternates=False).choice(engine, 3))
    first = " ".join(f"{name}.{number}" for name, number in engine.named(run.orders)[0])
    assert first == "F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2"


def test_a_limit_below_what_a_group_needs_is_told():
    made = blocks(6)
    problem = step_problem(made, Platform(num_devices=2, memory_bytes=10**9, bandwidth=FREE), 4)
    engine = step_engine(problem, Placement.of(range(0, 9, 2), (0, 1, 0, 1)))
    with pytest.raises(WaitInCircleError, match="wait for each other"):
        engine.run(4, GroupRule(4, (2, 2), alternates=False).choice(engine, 4))


@pytest.mark.parametrize("seed", range(12))
def test_allocations_use_every_device_and_every_layer(seed):
    pick = random.Random(seed)
    num_devices = pick.randint(2, 4)
    made = blocks(pick.randint(0, 40))
    problem = step_problem(made, Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=1e6), 4)
    found = list(interleaved(problem))
    assert bool(found) == (made.num_layers > num_devices)
    assert len(found) == len(set(found))
    for placement in found:
        assert placement.cuts[0] == 0 and placement.cuts[-1] == made.num_layers
        assert all(start < stop for start, stop in zip(placement.cuts, placement.cuts[1:], strict=False))
        assert set(placement.devices) == set(range(num_devices))
        assert placement == Placement.of(placement.cuts, placement.devices)


def test_balance_is_what_moving_layers_can_reach():
    """Against every cut of the same devices: the busiest device is as little busy as can be, or nearly."""
    for seed in range(8):
        pick = random.Random(seed)
        made = chain([pick.randint(1, 9) for _ in range(9)], [pick.randint(1, 9) for _ in range(9)])
        problem = step_problem(made, Platform(num_devices=2, memory_bytes=10**9, bandwidth=FREE), 2)

        def busiest(cuts: tuple[int, ...], problem: Problem = problem) -> int:
            return max(step_engine(problem, Placement(cuts, (0, 1, 0, 1))).load)

        start = Placement((0, 2, 4, 6, 9), (0, 1, 0, 1))
        every = [(0, a, b, c, 9) for a in range(1, 7) for b in range(a + 1, 8) for c in range(b + 1, 9)]
        found = balanced(problem, start)
        assert busiest(found.cuts) <= busiest(start.cuts)
        assert busiest(found.cuts) <= 1.15 * min(map(busiest, every))
        assert set(moved_layers(found.cuts)) <= set(every)


@pytest.mark.parametrize("seed", range(20))
def test_an_early_pattern_is_replayed(seed):
    """It is a plan as any other: no overlap, no tensor before its time, and within memory."""
    pick = random.Random(seed)
    made, platform = random_instance(seed)
    platform = replace(platform, num_devices=3, memory_bytes=pick.choice([60, 200, 10**6]))
    num_stages = pick.randint(1, made.num_layers)
    cuts = (0, *sorted(pick.sample(range(1, made.num_layers), num_stages - 1)), made.num_layers)
    problem = problem_of(made, platform)
    placement = Placement.of(cuts, [pick.randint(0, 2) for _ in range(num_stages)])
    road = Road(problem, placement)
    pattern = early_pattern(road, Deadline())
    if pattern is None:
        assert any(device.bytes_for_one > platform.memory_bytes for device in road.memory)
        return
    assert road.busiest <= pattern.period <= max(1, road.sequential)
    steady = pattern.schedule(problem.times.clock)
    roomy = replace(platform, memory_bytes=10**9)
    plan = replace(
        one_at_a_time(made, roomy, placement), operations=steady.operations, period_seconds=steady.period_seconds
    )
    found = replay(plan, made)
    # What the plan says beside its operations is that of another pattern.
    assert not [violation for violation in found.violations if "the plan says" not in violation]
    assert max(use.total for use in found.memory) <= platform.memory_bytes


@pytest.mark.parametrize("seed", range(16))
def test_changed_orders_are_shorter_and_fit(seed):
    pick = random.Random(seed)
    made, platform = random_instance(seed, most_layers=6)
    platform = replace(platform, num_devices=2, memory_bytes=10**9)
    problem, m = step_problem(made, platform, 3), 3
    placement = Placement.of(range(made.num_layers + 1), [index % 2 for index in range(made.num_layers)])
    engine = step_engine(problem, placement)
    start = engine.run(m, DepthRule("oldest", (pick.randint(1, m),) * len(placement.devices)).choice(engine, m))
    room, left = max(engine.peaks(start)), [300]

    def may_run() -> bool:
        left[0] -= 1
        return left[0] > 0

    orders, ticks = better_orders(
        engine, start, lambda run: max(engine.peaks(run)) <= room, engine.bound(m), may_run
    )
    assert engine.bound(m) <= ticks <= start.ticks
    plan = one_at_a_time(made, platform, placement)
    seconds, num_bytes = run_in(plan, made, engine.named(orders), m)
    assert seconds == problem.times.clock.seconds(ticks)
    assert num_bytes <= room


def test_orders_that_can_be_shorter_get_shorter():
    """Both devices begin with the wrong micro-batches in flight; one operation moved at a time mends it."""
    made = chain([1, 1, 1, 1], [2, 2, 2, 2], outputs=[1] * 4)
    problem = step_problem(made, Platform(num_devices=2, memory_bytes=10**9, bandwidth=FREE), 4)
    engine = step_engine(problem, Placement.of(range(5), (0, 1, 0, 1)))
    start = engine.run(4, DepthRule("furthest", (1, 1, 1, 1)).choice(engine, 4))
    orders, ticks = better_orders(engine, start, lambda run: True, engine.bound(4), lambda: True)
    assert problem.times.clock.seconds(start.ticks) == 48
    assert problem.times.clock.seconds(ticks) == problem.times.clock.seconds(engine.bound(4))
    assert sum(map(len, orders)) == 32


def test_a_transformer_of_32_blocks_is_interleaved():
    """Contiguous, 4 devices wait for the first and the last micro-batch; a step was once 1.681 s for that.

    A round robin of six stages per device, in the same memory, takes 1.253 s.
    """
    made = replace(
        blocks(32),
        layers=tuple(
            replace(layer, weight_bytes=400_000_000, stash_bytes=stash, output_bytes=sent)
            for layer, stash, sent in zip(
                blocks(32).layers, [33554432, *[600_000_000] * 32, 500_000_000], [*[33554432] * 33, 4], strict=True
            )
        ),
    )
    platform = Platform(num_devices=4, memory_bytes=32_334_217_728, bandwidth=12e9)
    plan = make_plan(made, platform, num_micro_batches=4)
    assert replay(plan, made).violations == ()
    assert plan.step_seconds < 1.2526
    contiguous = make_plan(made, platform, "contiguous", num_micro_batches=4)
    assert contiguous.step_seconds / plan.step_seconds > 1.3


def test_the_head_goes_back_to_the_first_device():
    """Llama 2 of 13 billion, 8 devices, 16 micro-batches: a step was 6.8 % longer with it on the last device."""
    m, problem = 16, step_problem(blocks(40), Platform(num_devices=8, memory_bytes=10**9, bandwidth=FREE), 16)
    search = step_search.StepSearch(problem)
    last_on_first = [each for each in interleaved(problem) if each.devices == (*list(range(8)) * 5, 0)]
    for placement in last_on_first:
        InterleavedSearch(search).try_usual(placement)
    of_five_blocks, head, embedding = 5 * 0.030, 0.018, 0.002
    step = problem.times.clock.seconds(int(search.best))
    assert step == pytest.approx(m * (of_five_blocks + head + embedding))
    assert 1.03 * step < m * (of_five_blocks + head) + 6 * 0.030 + embedding  # on the last device, behind 6 others


def test_the_embedding_goes_where_the_head_is_not():
    """Llama 2 of 7 billion, 4 devices, 4 micro-batches, no room for the weights of both beside 8 blocks.

    A step was 5 % longer with the head on the last device.
    """
    made, m = blocks(32), 4
    layers = tuple(
        replace(layer, weight_bytes=size) for layer, size in zip(made.layers, [80, *[120] * 32, 80], strict=True)
    )
    made = replace(made, layers=layers)
    platform = Platform(num_devices=4, memory_bytes=3 * (8 * 120 + 80) + 100, bandwidth=FREE)
    problem = step_problem(made, platform, m)
    search = step_search.StepSearch(problem)
    for placement in interleaved(problem):
        if len(placement.devices) == 34:
            InterleavedSearch(search).try_usual(placement)
    step = problem.times.clock.seconds(int(search.best))
    assert step == pytest.approx(m * (8 * 0.030 + 0.018), rel=0.02)
    assert 1.03 * step < m * (8 * 0.030 + 0.018) + 2 * 0.030  # on the last device, behind 2 others
    devices = search.leaders()[0].devices
    assert devices.count(devices[0]) == devices.count(devices[-1]) == 9 and devices[0] != devices[-1]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_head_that_runs_at_once_takes_no_turn(last):
    """Its backward follows its forward, and the other stages keep Megatron-LM's order."""
    made, m = blocks(12), 8
    problem = step_problem(made, Platform(num_devices=4, memory_bytes=10**9, bandwidth=FREE), m)
    inner = (0, 1, 2, 3) * 3
    placement = Placement.of((0, *range(2, 15)), (*inner, last))
    limits = tuple(limit + 1 for limit in megatron_limits(inner, 4))
    engine = step_engine(problem, placement)
    rule = GroupRule(4, limits, alternates=True, at_once=(12,))
    run = engine.run(m, rule.choice(engine, m))
    forward, backward = 12, 13
    plain = step_engine(problem, Placement.of((0, *range(2, 13), 14), inner))
    expected = GroupRule(4, limits, alternates=True).orders(plain, m)
    for device, order in enumerate(run.orders):
        ends = [index for index, position in enumerate(order) if position == forward]
        assert len(ends) == (m if device == last else 0)
        assert all(order[index + 1] == backward for index in ends)
        rest = [position - 2 * (position > backward) for position in order if position not in (forward, backward)]
        assert rest == list(expected[device])


def test_a_first_stage_that_runs_at_once_waits_for_the_second_one():
    made, m = blocks(12), 8
    problem = step_problem(made, Platform(num_devices=4, memory_bytes=10**9, bandwidth=FREE), m)
    placement = Placement.of((0, *range(1, 13), 14), (3, *(0, 1, 2, 3) * 3))
    engine = step_engine(problem, placement)
    limits = megatron_limits(placement.devices[1:], 4)
    run = engine.run(m, GroupRule(4, limits, alternates=True, at_once=(0,)).choice(engine, m))
    ahead = [number - sum(begin <= now for begin in run.begins[1]) for number, now in enumerate(run.begins[0])]
    assert 0 < max(ahead) < m - 2  # all of them would be m - 1 ahead


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_ends_at_once_leave_no_device_idle_that_its_order_would_not(num_devices):
    """Red where the first stage waits for another device, whose forwards end no wait here.

    The replay of such a step is shorter, and refused the plan.
    """
    for per_device, last, first in product((1, 2), range(num_devices), range(1, num_devices)):
        made, m = blocks(num_devices * per_device, num_bytes=1), 8
        problem = step_problem(made, Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=1e3), m)
        inner = tuple(range(num_devices)) * per_device
        placement = Placement.of(range(made.num_layers + 1), (first, *inner, last))
        at_once = (0, len(inner) + 1)[: 1 + (last != inner[-1])]
        engine = step_engine(problem, placement)
        limits = tuple(limit + 1 for limit in megatron_limits(placement.devices[1 : len(inner) + 1], num_devices))
        run = engine.run(m, GroupRule(num_devices, limits, alternates=True, at_once=at_once).choice(engine, m))
        assert run.ticks == engine.run(m, in_order([tuple(order) for order in run.orders])).ticks


def test_limits_are_lowered_where_memory_is_short():
    """The same allocation has room for fewer micro-batches in flight: another order, not another plan."""
    made = blocks(14, stash=10)
    steps = []
    for memory in (10**6, 420, 300):
        platform = Platform(num_devices=4, memory_bytes=memory, bandwidth=FREE)
        plan = make_plan(made, platform, num_micro_batches=8)
        assert max(use.total for use in replay(plan, made).memory) <= memory
        steps.append(plan.step_seconds)
    assert steps == sorted(steps)


def test_stages_with_one_layer_more_stand_in_a_row():
    """Devices run a round at a time: 64 stages of 2 or 1 blocks are 1.2 times as fast so as with these spread."""
    problem = step_problem(blocks(102), Platform(num_devices=16, memory_bytes=10**9, bandwidth=1e9), 16)
    found = {placement.cuts for placement in interleaved(problem) if len(placement.devices) == 64}
    sizes = {tuple(stop - start for start, stop in pairwise(cuts)) for cuts in found}
    assert (3, *[2] * 37, *[1] * 25, 2) in sizes
    assert (2, *[1] * 25, *[2] * 37, 3) in sizes


def test_published_orders_come_before_any_other_search():
    """In two seconds other allocations alone were searched: a step of 1.79 s, where Megatron-LM's takes 1.325."""
    made = chain([0.01] * 32, [0.02] * 32, weights=[1] * 32, outputs=[1] * 31 + [0])
    platform = Platform(num_devices=8, memory_bytes=10**6, bandwidth=400.0, duplex="full", comm_buffers=16)
    problem = replace(step_problem(made, platform, 8), deadline=Deadline(1.7))
    search = step_search.StepSearch(problem)
    InterleavedSearch(search).begin()
    assert problem.times.clock.seconds(int(search.best)) == pytest.approx(1.325)
    assert search.must_find


def test_where_not_all_can_be_simulated_the_promising_come_first(monkeypatch):
    m, made = 8, blocks(30)
    platform = Platform(num_devices=4, memory_bytes=10**9, bandwidth=FREE)
    monkeypatch.setattr(step_search, "MOST_OPERATIONS", 5_000)
    monkeypatch.setattr(step_search, "MOST_OPERATIONS_POLISHED", 0)
    plan = make_plan(made, platform, num_micro_batches=m)
    assert not replay(plan, made).violations
    by_hand = Placement.of([0, *range(3, 32, 2), 32], [0, 1, 2, 3] * 4)  # 3 layers, 14 times 2, and 1
    seconds, _ = run_in(one_at_a_time(made, platform, by_hand), made, megatron(4, 4, m), m)
    assert plan.step_seconds <= seconds
