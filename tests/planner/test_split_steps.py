"""Steps and patterns whose backwards may be two operations: what they take, never slower, exact where small."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan, replay
from deepspeed_partition.planner import deadline
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.assembly import assemble
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.recomputation import Recomputation
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.solvers.interface import Answer, Problem, Step
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicRoad, retimed
from deepspeed_partition.planner.solvers.pattern.cyclic_program import CyclicProgram
from deepspeed_partition.planner.solvers.pattern.modulo_scheduling import early_pattern
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from deepspeed_partition.planner.solvers.step import micro_batch_step, split_step
from deepspeed_partition.planner.solvers.step.micro_batch_orders import StepRoad
from deepspeed_partition.planner.solvers.step.split_bounds import split_lower_bound
from deepspeed_partition.planner.solvers.step.split_engine import SplitEngine
from deepspeed_partition.planner.solvers.step.split_program import SplitProgram
from deepspeed_partition.planner.solvers.step.split_rules import SplitRule
from deepspeed_partition.planner.solvers.step.step_simulator import WaitInCircleError
from tests.exhaustive import some
from tests.planner.instances import FREE, chain
from tests.planner.test_deadline import tight
from tests.planner.test_step_bounds import random_placement, with_memory

SLOW = {"forward_seconds": 5, "backward_seconds": 10, "backward_input_seconds": 5, "backward_weight_seconds": 5}
"""Times of a layer that is five times as slow as those of ``in_halves``."""


def in_halves(
    num_layers: int, forward: float = 1, first: float = 1, second: float = 1, stash: int = 2, stays: int | None = 1
) -> Chain:
    """Equal layers without weights and messages."""
    layer = LayerProfile(
        name="layer", forward_seconds=forward, backward_seconds=first + second, backward_input_seconds=first,
        backward_weight_seconds=second, weight_bytes=0, output_bytes=0, stash_bytes=stash,
        weight_stash_bytes=stays,
    )  # fmt: skip
    return Chain(input_bytes=0, layers=(layer,) * num_layers, name="halves")


def random_layers(pick: random.Random, size: int) -> Chain:
    """Some layers without halves, some measured while they ran, with gradients that come late."""
    layers = []
    for index in range(size):
        first, second = pick.randint(0, 3), pick.randint(0, 3)
        weights, stash = pick.randint(0, 4), pick.randint(0, 9)
        gradients = pick.randint(0, weights)
        halves = {"backward_input_seconds": first, "backward_weight_seconds": second}
        layers.append(
            LayerProfile(
                name=f"l{index}", forward_seconds=pick.randint(0 if index else 1, 3),
                backward_seconds=first + second, **(halves if pick.random() < 0.8 else {}),
                weight_bytes=weights, output_bytes=pick.randint(0, 4), stash_bytes=stash,
                transient_bytes=pick.choice([0, 3]), running_bytes=pick.choice([None, stash + pick.randint(0, 5)]),
                training_bytes=pick.choice([weights, weights + 3]), gradient_bytes=gradients,
                first_backward_bytes=pick.choice([None, gradients // 2]),
                weight_stash_bytes=pick.choice([None, 1, 12]),
            )
        )  # fmt: skip
    return Chain(input_bytes=pick.randint(0, 4), layers=tuple(layers), name="random")


def random_problem(pick: random.Random) -> Problem:
    made = random_layers(pick, pick.randint(2, 6))
    platform = Platform(
        num_devices=pick.randint(1, 4), memory_bytes=10**9, bandwidth=pick.choice([0.5, 2, FREE]),
        comm_buffers=pick.choice([0, 2, 3]), operation_seconds=pick.choice([0, 0, 1]),
        copy_bandwidth=pick.choice([None, None, 2]), duplex=pick.choice(["half", "full"]),
        port_bandwidth=pick.choice([None, None, None, 1.0]),
    )  # fmt: skip
    m = pick.randint(1, 6)
    problem = replace(problem_of(made, platform, m), splits_backward=True)
    if pick.random() < 0.2:
        first = pick.randint(1, m)
        problem = replace(problem, flushes=(first, *([m - first] if m > first else [])))
    if pick.random() < 0.3:
        problem = replace(problem, recomputation=Recomputation(problem.times, "block"))
    return problem


def test_what_is_simulated_is_what_the_replay_finds():
    """Any allocation under any rule; then on devices with just this memory, no bound is above the step.

    Red if a half began too early, if a message waited for W, if bytes between the halves were those of the stash.
    """
    split = replayed = 0
    for seed in range(some(80)):
        pick = random.Random(seed)
        problem = random_problem(pick)
        m = problem.num_micro_batches
        placement = random_placement(pick, problem)
        engine = SplitEngine(problem, placement)
        least = max(problem.flushes or (1,))
        rule = SplitRule(
            (pick.randint(least, m),) * len(placement.devices),
            pick.choice([0, 1, 2, 99]),
            pick.choice([0.0, 0.5, 1.0]),
        )
        try:
            run = engine.simulate(m, rule.choice(engine, m))
        except WaitInCircleError:
            continue
        assert run is not None
        again = engine.run_orders(m, run.orders)
        assert again is not None
        run = again
        steady = (
            placement.cuts
            if placement.is_contiguous
            else early_pattern(Road(problem, placement), problem.deadline)
        )
        if steady is None:
            continue
        step = Step(steady, engine.in_plan(run.orders), run.ticks, placement.recomputed)
        plan, found = assemble(problem, "contiguous", Answer(()), steady, step)
        assert found.violations == (), (seed, found.violations)
        assert list(plan.peak_memory_bytes[: engine.num_devices]) == engine.split_peaks(run), seed
        tight = with_memory(problem, max(engine.split_peaks(run)))
        assert split_lower_bound(tight, contiguous=False) <= run.ticks, seed
        if placement.is_contiguous:
            assert split_lower_bound(tight, contiguous=True) <= run.ticks, seed
        replayed += 1
        split += any(name[0] == "W" for order in plan.step.order for name, _ in order)
    assert replayed > some(80) // 2
    assert split > some(80) // 4


def test_the_program_bounds_every_order():
    """Small steps of one allocation: what the program proves, its orders reach, and no rule beats."""
    pytest.importorskip("ortools")
    reached = 0
    for seed in range(some(24)):
        pick = random.Random(seed)
        problem = replace(
            random_problem(pick), recomputation=None, num_micro_batches=pick.randint(1, 3), flushes=None
        )
        m = problem.num_micro_batches
        placement = random_placement(pick, problem)
        engine = SplitEngine(problem, placement)
        run = engine.simulate(m, SplitRule((m,) * len(placement.devices), 1, 0.0).choice(engine, m))
        memory = max(engine.split_peaks(run))
        engine = SplitEngine(with_memory(problem, memory), placement)
        solved = SplitProgram(engine, m, memory).solve(2**62, Deadline(2))
        assert solved.bound <= run.ticks, seed
        assert split_lower_bound(with_memory(problem, memory), contiguous=False) <= run.ticks, seed
        if solved.orders is not None:
            found = engine.run_orders(m, solved.orders)
            assert found is not None and found.ticks >= solved.bound, seed
            reached += found.ticks == solved.bound
    assert reached > some(24) // 2


@pytest.mark.parametrize("algorithm", ["contiguous", "madpipe"])
def test_equal_stages_have_no_bubble_but_the_fill(algorithm):
    """Zero bubble: P - 1 forwards and the work of the last device; proved. 1F1B takes (m + P - 1) (f + b)."""
    made = in_halves(4)
    platform = Platform(num_devices=4, memory_bytes=100, bandwidth=FREE)
    whole = make_plan(made, platform, algorithm, num_micro_batches=8, recompute="never")
    plan = make_plan(made, platform, algorithm, num_micro_batches=8, recompute="never", split_backward=True)
    assert whole.step_seconds == 33
    assert (plan.step_seconds, plan.step_proved) == (27, True)
    assert replay(plan, made).violations == ()
    assert {name[0] for order in plan.step.order for name, _ in order} >= set("FIW")


def test_never_slower_and_within_memory(monkeypatch):
    """Random chains in tight memory, with and without recomputation, contiguous and not."""
    monkeypatch.setattr(split_step, "MOST_OPERATIONS", 20_000)
    shorter = 0
    for seed in range(some(16)):
        pick = random.Random(seed)
        made = random_layers(pick, pick.randint(2, 4))
        platform = Platform(num_devices=pick.randint(2, 3), memory_bytes=pick.randint(40, 90), bandwidth=2.0)
        how = {"num_micro_batches": pick.randint(2, 5), "recompute": pick.choice(["never", "block"])}
        how |= {"algorithm": pick.choice(["contiguous", "madpipe", "uniform"]), "time_limit_seconds": 2}
        try:
            whole = make_plan(made, platform, **how)
        except (InfeasibleError, ValueError):
            continue
        try:
            plan = make_plan(made, platform, split_backward=True, **how)
        except ValueError as error:
            assert "does not say how long halves" in str(error)
            continue
        assert replay(plan, made).violations == (), seed
        assert plan.step_seconds <= whole.step_seconds, seed
        assert plan.step_lower_bound_seconds <= plan.step_seconds, seed
        shorter += plan.step_seconds < whole.step_seconds
    assert shorter


def test_recomputation_micro_batch_by_micro_batch_and_halves_together(monkeypatch):
    """Each alone, and both. Red if ``W`` held no room, or all of it until the end."""
    # What a constraint program finds depends on how busy the machine is. The rules alone do not.
    monkeypatch.setattr(micro_batch_step, "MOST_OPERATIONS", 0)
    monkeypatch.setattr(micro_batch_step, "MOST_CHANGES", 40)
    made = in_halves(4)
    platform = Platform(num_devices=4, memory_bytes=4, bandwidth=FREE)
    found = []
    for how in (
        {"recompute": "never"}, {"recompute": "never", "split_backward": True}, {"recompute": "micro-batch"},
        {"recompute": "micro-batch", "split_backward": True},
    ):  # fmt: skip
        plan = make_plan(made, platform, "contiguous", num_micro_batches=5, time_limit_seconds=20, **how)
        assert replay(plan, made).violations == ()
        assert plan.step_lower_bound_seconds <= plan.step_seconds
        found.append(plan.step_seconds)
    assert found[:2] == [36, 27]
    assert found[3] < found[2] < 26  # which is the shortest that treats all alike
    assert {name[0] for order in plan.step.order for name, _ in order} >= set("fFRIW")


def test_random_steps_with_both():
    """What the planner counts of orders with all six operations is what the replay finds."""
    for seed in range(some(16)):
        pick = random.Random(seed)
        made = random_layers(pick, pick.randint(2, 3))
        platform = Platform(
            num_devices=3, memory_bytes=10**6, bandwidth=2.0, operation_seconds=pick.choice([0, 1])
        )
        m = pick.randint(1, 5)
        problem = replace(problem_of(made, platform, m), splits_backward=True, per_micro_batch=True)
        problem = replace(problem, recomputation=Recomputation(problem.times, "block"))
        road = StepRoad(problem, Placement.contiguous(tuple(range(made.num_layers + 1))))
        whole = micro_batch_step._listed(road, m, micro_batch_step._Rule((m,) * road.num_stages, 1, True))
        twice = {"F": "fR"}  # and all of them run again at once
        kept = tuple(
            tuple((each, number) for kind, number in order for each in twice.get(kind, kind)) for order in whole
        )
        for orders in (whole, kept):
            split = micro_batch_step._in_halves(road, orders, pick.choice([None, 0.5]))
            ticks = road.run(split)
            step = Step(road.placement.cuts, road.named(split), ticks)
            _, found = assemble(problem, "contiguous", Answer(()), road.placement.cuts, step)
            assert found.violations == (), seed


def test_halves_that_do_not_help_stay_one_operation():
    """One device is never idle; where each operation takes a second of its own, halves only cost."""
    made = in_halves(2)
    alone = Platform(num_devices=1, memory_bytes=100, bandwidth=FREE)
    costly = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE, operation_seconds=5.0)
    for platform in (alone, costly):
        plan = make_plan(made, platform, num_micro_batches=4, recompute="never", split_backward=True)
        assert {name[0] for order in plan.step.order for name, _ in order} == set("FB")


@pytest.mark.parametrize(
    ("num_stages", "slots", "whole", "period"), [(3, 2, 6, 4), (4, 2, 6, 5), (5, 3, 6, 4), (4, 4, 3, 3)]
)
def test_patterns_hold_less_where_gradients_are_sent_on_earlier(num_stages, slots, whole, period):
    """Equal stages with room for some stashes. Red if ``W`` held up the stages before, or held nothing."""
    pytest.importorskip("ortools")
    made = in_halves(num_stages)
    platform = Platform(num_devices=num_stages, memory_bytes=2 * slots, bandwidth=FREE)
    plan = make_plan(made, platform, "contiguous", recompute="never")
    assert plan.period_seconds == whole
    plan = make_plan(made, platform, "contiguous", recompute="never", split_backward=True)
    assert plan.period_seconds == period
    assert plan.lower_bound_seconds <= period
    assert replay(plan, made).violations == ()
    names = {operation.operation[0] for operation in plan.operations}
    assert ("I" in names) == (period < whole)


@pytest.mark.parametrize("limit", [20, 60, 100, 300])
@pytest.mark.parametrize("recompute", ["block", "micro-batch"])
def test_to_allow_halves_costs_the_search_of_whole_backwards_no_time(monkeypatch, limit, recompute):
    """That search had 60 % of the limit, and with halves allowed periods were up to 6 % longer than without.

    Time is the number of looks at the clock, so both searches of whole backwards end at the same place.
    """
    pytest.importorskip("ortools")
    made, platform = tight(16, 4, 0.4)
    halves = [each.backward_seconds / 2 for each in made.layers]
    layers = [
        replace(layer, backward_input_seconds=half, backward_weight_seconds=half)
        for layer, half in zip(made.layers, halves, strict=True)
    ]
    made = replace(made, layers=tuple(layers))

    def planned(**how: object) -> float:
        looks = count(1.0)
        monkeypatch.setattr(deadline.time, "thread_time", lambda: next(looks))
        return make_plan(made, platform, "contiguous", time_limit_seconds=limit, **how).period_seconds

    whole = planned(recompute="block")
    assert planned(recompute=recompute, split_backward=True) <= whole


def test_random_patterns_with_halves():
    """Within memory, not longer than whole backwards, not below the bounds; they need what is counted."""
    pytest.importorskip("ortools")
    counted = 0
    for seed in range(some(24)):
        pick = random.Random(seed)
        made = random_layers(pick, pick.randint(2, 3))
        platform = Platform(num_devices=3, memory_bytes=pick.randint(30, 60), bandwidth=pick.choice([1.0, FREE]))
        how = {"recompute": pick.choice(["never", "block", "micro-batch"]), "time_limit_seconds": 1}
        try:
            whole = make_plan(made, platform, "contiguous", **how)
            plan = make_plan(made, platform, "contiguous", split_backward=True, **how)
        except (InfeasibleError, ValueError):
            continue
        assert replay(plan, made).violations == (), seed
        assert plan.lower_bound_seconds <= plan.period_seconds, seed
        if how["recompute"] != "micro-batch":  # whose programs may find less in the same time
            assert plan.period_seconds <= whole.period_seconds * (1 + 1e-12), seed
        problem = with_recomputation(replace(problem_of(made, platform), splits_backward=True), "never")
        placement = Placement.contiguous(tuple(range(made.num_layers + 1)))
        road = CyclicRoad(problem, placement, 1)
        solved = CyclicProgram(road, recomputes=False).solve(10**18, 1)
        pattern = solved.orders and retimed(road, solved.orders)
        # What takes no time may need bytes at its instant, which only the replay counts.
        if pattern and all(road.duration(key) for key in pattern.begins if key[0][0] != "S"):
            assert pattern.length >= solved.bound
            assert pattern.period >= road.bound, seed
            _, found = assemble(problem, "contiguous", Answer(()), pattern)
            peaks = [max(pattern.peak(stage), memory.floor) for stage, memory in enumerate(road.road.memory)]
            assert [use.total for use in found.memory[: road.num_stages]] == peaks, seed
            counted += 1
    assert counted


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_micro_batches": None, "period_seconds": 9.0}, "leave period_seconds out"),
        ({"num_stages": 2}, "DeepSpeed's own engine runs whole backwards"),
        ({"split_backward": 1}, "split_backward is 1: it must be True or False"),
    ],
)
def test_what_is_not_planned_so_is_refused(more, message):
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)
    how = {"num_micro_batches": 4, "split_backward": True} | more
    with pytest.raises(ValueError, match=message):
        make_plan(in_halves(2), platform, **how)


def test_the_bound_of_a_comparison_allows_halves():
    """A micro-batch leaves before the gradients of the weights, so one in flight at a time is there for less."""
    platform = Platform(num_devices=2, memory_bytes=2, bandwidth=FREE)
    layers = in_halves(2, stash=2, stays=1)
    found = compare(layers, platform, ("madpipe",), recompute="never", split_backward=True, time_limit_seconds=1)
    (plan,) = (contender.plan for contender in found.fitting)
    assert plan is not None
    assert found.lower_bound_seconds == plan.lower_bound_seconds <= plan.period_seconds


@pytest.mark.parametrize("algorithm", [[0, 1, 4], "uniform", "pipedream-blind"])
def test_a_fixed_cut_is_kept_in_patterns_with_halves(algorithm):
    """The last layer takes five times as long as the others: another cut would be faster."""
    layers = tuple(replace(in_halves(1).layers[0], **times) for times in ({},) * 3 + (SLOW,))
    chain_of = Chain(input_bytes=0, layers=layers, name="one slow layer")
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)
    whole = make_plan(chain_of, platform, algorithm)
    plan = make_plan(chain_of, platform, algorithm, split_backward=True)
    assert plan.boundaries == whole.boundaries and plan.period_seconds <= whole.period_seconds
    assert make_plan(chain_of, platform, split_backward=True, time_limit_seconds=1).boundaries == [0, 3, 4]


def test_a_chain_without_halves_is_refused():
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=FREE)
    with pytest.raises(ValueError, match="does not say how long halves of a backward last: give its layers"):
        make_plan(chain([1.0, 1.0], [2.0, 2.0]), platform, num_micro_batches=2, split_backward=True)
