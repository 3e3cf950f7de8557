"""The shortest step of all: against every order of every allocation, and never a bound above a step that runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

from deepspeed_partition import InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.constraint_program import is_installed
from deepspeed_partition.planner.solvers.interface import Answer, Problem, Step
from deepspeed_partition.planner.solvers.step import exact_step, order_program
from deepspeed_partition.planner.solvers.step.order_program import OrderProgram
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.solvers.step.step_search import step_engine
from deepspeed_partition.planner.solvers.step.step_simulator import eager, in_order
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import FREE, chain, problem_of, random_instance
from tests.planner.test_step_bounds import random_placement, random_problem, with_memory
from tests.planner.test_step_search import interleavings

pytestmark = pytest.mark.skipif(not is_installed(), reason="OR-tools is not installed")


def shortest(problem: Problem) -> int | None:
    """Over every allocation and all orders of its devices, in ticks; None where none fits."""
    m, best = problem.num_micro_batches, None
    for cuts, devices in oracles.all_placements(problem.chain.num_layers, problem.platform.num_devices):
        engine = step_engine(problem, Placement(tuple(cuts), tuple(devices)))
        mine = [[p for p, on in enumerate(engine.device) if on == device] for device in range(engine.num_devices)]
        for orders in product(*([*interleavings(positions, m)] for positions in mine)):
            try:
                run = engine.run(m, in_order(orders))
            except ValueError:  # these orders wait for each other
                continue
            if (best is None or run.ticks < best) and max(engine.peaks(run)) <= problem.platform.memory_bytes:
                best = run.ticks
    return best


def plan_of(problem: Problem, made, platform) -> Plan | None:
    try:
        plan = make_plan(
            made, platform, num_micro_batches=problem.num_micro_batches, flushes=problem.flushes, recompute="never"
        )
    except InfeasibleError:
        return None
    assert replay(plan, made).violations == ()
    return plan


@pytest.mark.parametrize(("m", "most_layers", "seeds"), [(2, 3, 40), (2, 4, 20), (3, 3, 12)])
def test_the_best_of_every_allocation_and_order(m: int, most_layers: int, seeds: int) -> None:
    """With latencies, free links, all that a run says of memory, and one flush in every other instance."""
    proved = 0
    for seed in range(some(seeds)):
        pick = random.Random(seed)
        made, platform = random_instance(seed, most_layers=most_layers)
        platform = replace(platform, num_devices=2, bandwidth=pick.choice([0.5, 1, 4, FREE]))
        problem = replace(problem_of(made, platform), num_micro_batches=m, flushes=(m,) if seed % 2 else None)
        best, plan = shortest(problem), plan_of(problem, made, platform)
        assert (plan is None) == (best is None)
        if plan is not None:
            seconds = problem.times.clock.seconds(best)
            assert plan.step_seconds == seconds
            assert plan.step_lower_bound_seconds <= seconds
            proved += plan.step_proved
    assert proved >= some(seeds) / 2


@pytest.mark.parametrize("seed", range(some(60)))
def test_never_a_bound_above_a_step_that_runs(seed: int) -> None:
    """Any allocation in any order, with just the memory that this order takes; transfers at once, or later."""
    pick = random.Random(seed)
    problem = random_problem(pick, seed)
    m = problem.num_micro_batches
    placement = replace(random_placement(pick, problem), recomputed=())
    engine = step_engine(problem, placement)
    if 2 * m * len(placement.devices) > 40:
        return
    least = max(problem.flushes) if problem.flushes else 1
    limits = [pick.randint(least, m) for _ in placement.devices]
    limits = [max(limits[index:]) for index in range(len(limits))]
    run = engine.run(m, eager(engine, limits, oldest_first=pick.random() < 0.5))
    tight = with_memory(problem, max(engine.peaks(run)))
    engine = step_engine(tight, placement)
    for greedy in (False, True):
        program = OrderProgram(engine, m, tight.platform.memory_bytes, tight.flushes, greedy=greedy)
        solved = program.solve(run.ticks + 1, Deadline(60))
        assert solved.bound <= run.ticks
        assert exact_step.bound_of_work(engine, m) <= run.ticks
        if program.is_greedy and solved.orders is not None and 0 not in engine.ticks:
            assert engine.run(m, in_order(solved.orders)).ticks == solved.bound


BENCHMARK = Path(__file__).parents[2] / "examples/benchmarks/step_optimum"


@pytest.mark.parametrize("row", range(some(16)))
def test_the_optima_of_the_benchmark(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed ones are proved again, and are no longer than what the search alone finds."""
    known = json.loads((BENCHMARK / "results/tiny_202611.json").read_text())[6 * row + 2]
    monkeypatch.syspath_prepend(str(BENCHMARK))
    given = import_module("tiny").instance(known["seed"])
    assert (given.chain.num_layers, given.num_micro_batches) == (known["layers"], known["micro_batches"])
    m = given.num_micro_batches
    plan = make_plan(given.chain, given.platform, num_micro_batches=m, recompute="never")
    assert plan.step_proved and known["proved"]
    assert plan.step_seconds == known["optimum_seconds"]


def test_the_bound_of_any_allocation_is_below_every_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optima are those of all orders: no bound that overlooks an allocation or an order passes them all."""
    monkeypatch.syspath_prepend(str(BENCHMARK))
    rows, met = json.loads((BENCHMARK / "results/tiny_202611.json").read_text()), 0
    for row in rows[:: 4 if some(4) < 4 else 1]:
        given = import_module("tiny").instance(row["seed"])
        problem = replace(problem_of(given.chain, given.platform), num_micro_batches=given.num_micro_batches)
        bound = problem.times.clock.seconds(step_lower_bound(problem, contiguous=False))
        assert bound <= row["optimum_seconds"] * (1 + 1e-12), row["seed"]
        met += bound >= row["optimum_seconds"] * (1 - 1e-6)
    assert met >= 3


def known_instance() -> tuple:
    """Six equal layers on three devices."""
    made = chain([2, 2, 2, 2, 2, 2], [4, 4, 4, 4, 4, 4], outputs=[1] * 5 + [0])
    return made, Platform(num_devices=3, memory_bytes=10**6, bandwidth=1.0)


def test_a_bad_start_is_left_behind() -> None:
    """From one device alone the program finds what is best."""
    made, platform = known_instance()
    problem = replace(problem_of(made, platform), num_micro_batches=3)
    best = make_plan(made, platform, num_micro_batches=3, recompute="never")
    alone = step_engine(problem, Placement((0, 6), (0,)))
    run = alone.run(3, eager(alone, [3], oldest_first=True))
    step = Step((0, 6), alone.named(run.orders), run.ticks)
    answer = Answer(((0, 6),), steps=(step,), step_search="any")
    found = exact_step.with_exact_step(problem, answer).steps[0]
    assert problem.times.clock.seconds(found.ticks) == best.step_seconds
    assert found.bound == found.ticks < run.ticks


def test_without_or_tools_nothing_is_lost_but_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    made, platform = random_instance(11, most_layers=5)
    platform = replace(platform, num_devices=2, memory_bytes=10**6)
    with_it = make_plan(made, platform, num_micro_batches=3, recompute="never")
    monkeypatch.setattr(exact_step, "is_installed", lambda: False)
    without = make_plan(made, platform, num_micro_batches=3, recompute="never")
    assert without.step_lower_bound_seconds <= with_it.step_lower_bound_seconds <= with_it.step_seconds
    assert with_it.step_proved
    assert with_it.step_seconds <= without.step_seconds


@pytest.mark.parametrize(
    ("layers", "devices", "m", "small"), [(6, 3, 4, True), (6, 3, 6, False), (9, 4, 2, False)]
)
def test_what_counts_as_small(layers: int, devices: int, m: int, small: bool) -> None:
    made = chain([1] * layers, [1] * layers)
    problem = replace(
        problem_of(made, Platform(num_devices=devices, memory_bytes=100, bandwidth=FREE)), num_micro_batches=m
    )
    assert exact_step.is_small(problem, contiguous=False) == small


def test_what_cannot_matter_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 programs of this plan once, two for most of its allocations, and nothing came of them."""
    made = chain(
        [4, 4, 1, 3, 3], [4, 4, 3, 4, 6], weights=[12, 9, 18, 8, 4], outputs=[40, 15, 37, 20, 0], input_bytes=50,
        stash=[92, 77, 221, 65, 134],
    )  # fmt: skip
    solve, asked = OrderProgram.solve, list[int]()

    def counted(program: OrderProgram, shorter_than: int, deadline: Deadline) -> order_program.Solved:
        asked.append(shorter_than)
        return solve(program, shorter_than, deadline)

    monkeypatch.setattr(OrderProgram, "solve", counted)
    platform = Platform(num_devices=3, memory_bytes=500, bandwidth=100.0)
    plan = make_plan(made, platform, num_micro_batches=4)
    assert 0 < len(asked) <= 5
    assert plan.step_lower_bound_seconds == pytest.approx(65.17)


def test_no_time_no_program() -> None:
    made, platform = known_instance()
    problem = replace(problem_of(made, platform), num_micro_batches=2)
    deadline = Deadline()
    deadline.stop()
    engine = step_engine(problem, Placement((0, 3, 6), (0, 1)))
    assert OrderProgram(engine, 2, 10**6).solve(10**18, deadline) == order_program.Solved(0, None)
