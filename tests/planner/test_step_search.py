"""The shortest step in an engine that overlaps transfers, against brute force and against everything simpler.

The judge is the replay, which simulates a step by another program than the search does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, replay
from deepspeed_partition import make_plan as make_plan_with_recomputation
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.plan import PlannedStage, StepPlan
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Pattern, Road
from deepspeed_partition.planner.solvers.step import best_step, step_bounds
from deepspeed_partition.planner.solvers.step.step_search import LONGEST_RUN, StepSearch
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, eager, in_order
from deepspeed_partition.planner.step import one_f_one_b_order
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import FREE, chain, instances, problem_of, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan

LINKS = [0.5, 1, 2, 4, FREE]

ENOUGH_SECONDS = 3600.0
"""Of which searches take shares; with these they end by themselves, however busy the machine is."""


def run_in(plan: Plan, made: Chain, orders: Sequence[Order], m: int) -> tuple[float, int]:
    """Seconds and bytes of a step of the plan's allocation in given orders, as the replay finds them."""
    idle: tuple[Order, ...] = ((),) * (plan.platform.num_devices - len(orders))
    step = StepPlan(num_micro_batches=m, step_seconds=1.0, blocking_step_seconds=None, order=(*orders, *idle))
    found = replay(replace(plan, step=step), made)
    assert found.step_seconds is not None, found.violations
    return found.step_seconds, max(use.total for use in found.memory)


def order_of_pattern(plan: Plan, m: int) -> list[Order]:
    """What each device does if the first m micro-batches go through the periodic pattern."""
    runs: list[list[tuple[float, float, int, int, str]]] = [[] for _ in range(plan.platform.num_devices)]
    road = [f"F{stage}" for stage in range(len(plan.stages))]
    road += [f"B{stage}" for stage in reversed(range(len(plan.stages)))]
    for operation in plan.operations:
        for number in range(m) if operation.device is not None else ():
            begin = (number + operation.shift) * plan.period_seconds + operation.start_seconds
            place = road.index(operation.operation)
            middle = round(begin + operation.duration_seconds / 2, 6)  # what takes no time before what begins then
            runs[operation.device].append((middle, round(begin, 6), number, place, operation.operation))
    return [tuple((name, number) for *_, number, _, name in sorted(each)) for each in runs]


def step_of(made: Chain, platform: Platform, m: int, algorithm="madpipe") -> Plan | None:
    """A plan that the replay confirms; None where nothing fits."""
    try:
        plan = make_plan(made, platform, algorithm, num_micro_batches=m, time_limit_seconds=ENOUGH_SECONDS)
    except InfeasibleError:
        return None
    found = replay(plan, made)
    assert found.violations == ()
    assert found.step_seconds == pytest.approx(plan.step_seconds, rel=1e-12)
    return plan


@pytest.mark.parametrize("seed", range(40))
def test_never_slower_than_the_periodic_plan(seed: int) -> None:
    """In its own order, contiguous or not, as far as that fits when run as early as possible."""
    made, platform = random_instance(seed)
    platform = replace(platform, num_devices=max(2, platform.num_devices))
    try:
        periodic = make_plan(made, platform, time_limit_seconds=ENOUGH_SECONDS)
    except InfeasibleError as error:
        platform = replace(platform, memory_bytes=error.smallest_memory_bytes)
        periodic = make_plan(made, platform, time_limit_seconds=ENOUGH_SECONDS)
    for m in (1, 3, 20):
        plan = step_of(made, platform, m)
        assert plan is not None
        seconds, num_bytes = run_in(periodic, made, order_of_pattern(periodic, m), m)
        if num_bytes <= platform.memory_bytes:
            assert plan.step_seconds <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_never_slower_than_any_partition_under_the_usual_orders(seed: int) -> None:
    """DeepSpeed's 1F1B, one that hides transfers, and GPipe's flush, on every cut, where they fit."""
    pick = random.Random(seed)
    made, platform = random_instance(seed, most_layers=6)
    platform = replace(platform, bandwidth=pick.choice(LINKS))
    for m in (2, 5):
        plan = step_of(made, platform, m)
        fitted = 0
        for cuts in oracles.all_cuts(made.num_layers, platform.num_devices):
            P = len(cuts) - 1
            on_cut = make_plan(made, replace(platform, memory_bytes=10**9), cuts)
            for depths in (range(P, 0, -1), range(2 * P - 1, 0, -2), [m] * P, [1] * P):
                orders = [one_f_one_b_order(stage, min(m, depth), m) for stage, depth in enumerate(depths)]
                seconds, num_bytes = run_in(on_cut, made, orders, m)
                if num_bytes <= platform.memory_bytes:
                    fitted += 1
                    assert plan is not None
                    assert plan.step_seconds <= seconds * (1 + 1e-9)
        assert fitted or plan is None or not plan.is_contiguous


def interleavings(positions: Sequence[int], m: int) -> Iterator[tuple[int, ...]]:
    """Everything a device may do: each operation on the micro-batches in order, and after the one before it."""

    def extend(counts: tuple[int, ...], order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == m * len(positions):
            yield order
        for index, position in enumerate(positions):
            if counts[index] < (m if index == 0 else counts[index - 1]):
                counted = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                yield from extend(counted, (*order, position))

    return extend((0,) * len(positions), ())


def shortest_of_all(
    made: Chain, platform: Platform, m: int, allowed: Callable[[oracles.Placed], bool] = lambda placed: True
) -> int | None:
    """Over every allocation and all orders of its devices, in ticks; None where none fits."""
    problem, best = problem_of(made, platform), None
    for cuts, devices in filter(allowed, oracles.all_placements(made.num_layers, platform.num_devices)):
        engine = StepEngine(problem.times, problem.table, cuts, devices)
        mine = [[p for p, on in enumerate(engine.device) if on == device] for device in range(engine.num_devices)]
        fitting = []
        for orders in product(*([*interleavings(positions, m)] for positions in mine)):
            try:
                run = engine.run(m, in_order(orders))
            except ValueError:  # these orders wait for each other
                continue
            if (best is None or run.ticks < best) and max(engine.peaks(run)) <= platform.memory_bytes:
                best = run.ticks
            if max(engine.peaks(run)) <= platform.memory_bytes:
                fitting.append(run.ticks)
        if fitting:
            assert engine.bound(m) <= min(fitting), "no order is faster than the bound by which cuts are pruned"
    return best


@pytest.mark.parametrize(("m", "most_layers", "seeds"), [(2, 3, 60), (2, 4, 20), (3, 3, 8)])
def test_small_steps_are_the_best_of_all(m: int, most_layers: int, seeds: int) -> None:
    """Two devices, every cut, every map of stages to devices and every order."""
    fits = 0
    for seed in range(some(seeds)):
        pick = random.Random(seed)
        made, platform = random_instance(seed, most_layers=most_layers)
        platform = replace(platform, num_devices=2, bandwidth=pick.choice(LINKS))
        best, plan = shortest_of_all(made, platform, m), step_of(made, platform, m)
        assert (plan is None) == (best is None)
        if plan is not None:
            fits += 1
            assert plan.step_seconds == problem_of(made, platform).times.clock.seconds(best)
    assert fits >= some(seeds) / 2


@pytest.mark.parametrize("seed", range(25))
def test_never_slower_than_any_other_algorithm(seed: int) -> None:
    made, platform = random_instance(seed, most_layers=8)
    for m in (2, 9):
        plan = step_of(made, platform, m)
        for rival in ("contiguous", "pipedream", "pipedream-blind", "mcap", "uniform", "parameters"):
            other = step_of(made, platform, m, rival)
            if other is not None:
                assert plan is not None
                assert plan.step_seconds <= other.step_seconds


@pytest.mark.parametrize("seed", range(25))
def test_the_smallest_memory_is_the_smallest(seed: int) -> None:
    """One micro-batch at a time always runs, so that no step needs more than the steady state does."""
    made, platform = random_instance(seed)
    smallest = oracles.smallest_memory(made, platform)
    for m in (1, 6):
        with pytest.raises(InfeasibleError) as raised:
            make_plan(made, replace(platform, memory_bytes=smallest - 1), "contiguous", num_micro_batches=m)
        assert raised.value.smallest_memory_bytes == smallest
        plan = step_of(made, replace(platform, memory_bytes=smallest), m, "contiguous")
        assert plan is not None
        for algorithm in ("madpipe", [0, made.num_layers]):
            with pytest.raises(InfeasibleError) as raised:
                make_plan(made, replace(platform, memory_bytes=1), algorithm, num_micro_batches=m)
            enough = raised.value.smallest_memory_bytes
            assert step_of(made, replace(platform, memory_bytes=enough), m, algorithm) is not None


def test_more_memory_is_not_slower() -> None:
    """A search cannot promise that, and orders run as early as possible know anomalies; here there are none."""
    for seed in range(some(25)):
        made, platform = random_instance(seed, most_layers=5)
        before = None
        for memory in (15, 20, 30, 45, 70, 110, 200):
            plan = step_of(made, replace(platform, memory_bytes=memory), 6)
            if before is not None:
                assert plan is not None
                assert plan.step_seconds <= before * (1 + 1e-9)
            before = plan and plan.step_seconds


def one_at_a_time(made: Chain, platform: Platform, placement: Placement) -> Plan:
    """A plan of any allocation: one micro-batch goes down and up before the next one comes."""
    problem = problem_of(made, platform)
    road = Road(problem, placement)
    begins = accumulate((operation.ticks for operation in road.operations[:-1]), initial=0)
    pattern = Pattern(placement, tuple(road.operations), road.sequential, tuple(begins))
    steady = pattern.schedule(problem.times.clock)
    stages = tuple(PlannedStage(layers=layers, device=device, in_flight=1) for layers, device in placement.stages)
    plan = make_plan(made, platform, [0, made.num_layers])
    return replace(plan, stages=stages, operations=steady.operations, period_seconds=steady.period_seconds)


@pytest.mark.parametrize("seed", range(150))
def test_two_programs_simulate_alike(seed: int) -> None:
    """Any allocation in any order: the search's simulation and the replay find the same time and peaks."""
    pick = random.Random(seed)
    made, platform = random_instance(seed)
    platform = replace(platform, num_devices=4, memory_bytes=10**9, bandwidth=pick.choice(LINKS))
    problem, m = problem_of(made, platform), pick.randint(1, 8)
    num_stages = pick.randint(1, min(5, made.num_layers))
    cuts = (0, *sorted(pick.sample(range(1, made.num_layers), num_stages - 1)), made.num_layers)
    devices = [0]
    for _ in range(num_stages - 1):
        devices.append(pick.choice([each for each in range(min(4, max(devices) + 2)) if each != devices[-1]]))
    engine = StepEngine(problem.times, problem.table, cuts, devices)
    limits = [pick.randint(1, m) for _ in devices]
    run = engine.run(m, eager(engine, limits, oldest_first=pick.random() < 0.5))
    plan = one_at_a_time(made, platform, Placement(cuts, tuple(devices)))
    seconds, num_bytes = run_in(plan, made, engine.named(run.orders), m)
    assert seconds == problem.times.clock.seconds(run.ticks)
    assert num_bytes == max(engine.peaks(run))
    again = engine.run(m, in_order([tuple(order) for order in run.orders]))
    assert again.ticks == run.ticks


@pytest.mark.parametrize("seed", range(6))
def test_long_steps_are_planned_by_their_rhythm(seed: int) -> None:
    """Only the first micro-batches of many are simulated in the search, but the promises hold for all of them."""
    made, platform = random_instance(seed, most_layers=5)
    m = LONGEST_RUN + 150
    plan = step_of(made, platform, m)
    if plan is None:
        return
    periodic = make_plan(made, platform)
    seconds, num_bytes = run_in(periodic, made, order_of_pattern(periodic, m), m)
    if num_bytes <= platform.memory_bytes:
        assert plan.step_seconds <= seconds * (1 + 1e-9)
    for algorithm in ("uniform", "parameters", "contiguous"):
        other = step_of(made, platform, m, algorithm)
        assert other is None or plan.step_seconds <= other.step_seconds * 1.01


def test_a_stage_on_two_devices_in_turn_shortens_a_step() -> None:
    """The first and the last layer take half the time of the one between them: together they are its equal."""
    made = chain([1, 2, 1], [2, 4, 2], outputs=[1, 1, 1], input_bytes=1, stash=[1, 1, 1])
    plan = step_of(made, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e6), 12)
    assert plan is not None
    assert [stage.device for stage in plan.stages] == [0, 1, 0]
    assert plan.blocking_step_seconds is None
    contiguous = step_of(made, plan.platform, 12, "contiguous")
    assert contiguous is not None
    assert contiguous.step_seconds >= 9 * 12 > plan.step_seconds
    assert contiguous.blocking_step_seconds is not None


def test_a_deadline_that_has_passed_leaves_a_plan() -> None:
    made, platform = random_instance(3)
    deadline = Deadline()
    deadline.stop()
    plan = make_plan(made, replace(platform, memory_bytes=10**6), num_micro_batches=8, deadline=deadline)
    assert replay(plan, made).violations == ()


@pytest.mark.parametrize(("bound_seconds", "is_asked_for"), [(step_bounds.BOUND_SECONDS, True), (1e6, False)])
def test_no_search_begins_that_its_bound_would_end(monkeypatch, bound_seconds: float, is_asked_for: bool) -> None:
    """Searches that recompute begin with the bound: where it takes longer than what is left, none of them does."""
    asked = []

    def counted(*arguments, **options):
        asked.append(arguments)
        return step_bounds.step_lower_bound(*arguments, **options)

    monkeypatch.setattr(step_bounds, "BOUND_SECONDS", bound_seconds)
    monkeypatch.setattr(best_step, "step_lower_bound", counted)
    made = chain([1] * 6, [2] * 6, stash=[10] * 6)
    tight = Platform(num_devices=2, memory_bytes=60, bandwidth=FREE)
    plan = make_plan_with_recomputation(made, tight, num_micro_batches=8, time_limit_seconds=ENOUGH_SECONDS)
    assert replay(plan, made).violations == ()
    assert bool(asked) == is_asked_for


@settings(deadline=None, max_examples=some(60), suppress_health_check=list(HealthCheck))
@given(instances(), st.integers(1, 30), st.sampled_from(["madpipe", "contiguous", "mcap"]), st.integers(0, 3))
def test_steps_of_any_problem_are_replayed(instance, m: int, algorithm: str, comm_buffers: int) -> None:
    """Floats of all sizes, any number of buffers; what does not fit does so in the memory that is named."""
    made, platform = instance
    platform = replace(platform, comm_buffers=comm_buffers)
    if step_of(made, platform, m, algorithm) is None:
        with pytest.raises(InfeasibleError) as raised:
            make_plan(made, platform, algorithm, num_micro_batches=m)
        enough = raised.value.smallest_memory_bytes
        assert step_of(made, replace(platform, memory_bytes=enough), m, algorithm) is not None


def test_allocations_that_differ_in_recomputation_alone_are_ordered():
    made = chain([1, 0], [1, 1], stash=[1, 1])  # to recompute the second layer takes no time
    problem = replace(
        problem_of(made, Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)), num_micro_batches=2
    )
    plain, recomputed = (Placement((0, 1, 2), (0, 1), blocks) for blocks in ((), ((), ((1, 2),))))
    search = StepSearch(problem)
    assert set(search.promising([recomputed, plain])) == {plain, recomputed}
