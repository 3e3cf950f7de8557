"""Patterns of several micro-batches, kept or recomputed one by one: the slides' optimum, any times and bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from pulp import HiGHS, LpProblem, LpStatusOptimal, LpVariable, lpSum

from deepspeed_partition import Chain, Plan, Platform, make_plan, replay
from deepspeed_partition.options import Options
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.planning.problems import problem_of, with_recomputation
from deepspeed_partition.planner.simulate.replay import replay_and_count
from deepspeed_partition.planner.solvers.contiguous import per_micro_batch
from deepspeed_partition.planner.solvers.pattern.cyclic_pattern import CyclicRoad, retimed
from deepspeed_partition.planner.solvers.pattern.cyclic_program import CyclicProgram
from deepspeed_partition.planner.solvers.pattern.kept_and_recomputed import kept_and_recomputed
from tests.exhaustive import is_exhaustive, some
from tests.planner.instances import FREE, chain
from tests.planner.test_micro_batches import plan_of

PER_MICRO_BATCH = "micro-batch"


def identical(num_stages: int, ratio: int) -> Chain:
    return chain([1.0] * num_stages, [float(ratio)] * num_stages, stash=[1] * num_stages)


def bound_of_slides(num_stages: int, slots: int, ratio: int) -> Fraction:
    """C* / m of device 1: compute and memory are equal."""
    tau = (num_stages - 1) * (1 + ratio)
    kept = Fraction((2 + ratio) * slots - (1 + ratio), slots + tau)
    return 2 + ratio - kept


def test_identical_stages_reach_the_bound_of_the_slides():
    """Red if a gap, a run or a free forward were one block off, or if a device i > w recomputed."""
    most = 13 if is_exhaustive() else 8
    for num_stages in range(2, most):
        for slots in range(1, num_stages):
            for ratio in (1, 2, 3):
                length, number, begins = kept_and_recomputed(num_stages, slots, ratio)
                where = (num_stages, slots, ratio)
                assert Fraction(length, number) == bound_of_slides(*where), where
                made = identical(num_stages, ratio)
                lasts = {"B": ratio}
                spans = {key: (begin, begin + lasts.get(key[0], 1)) for key, begin in begins.items()}
                later = {key: (begin + 50 * length, end + 50 * length) for key, (begin, end) in spans.items()}
                plan, found = replay_and_count(plan_of(made, length, number, later), made)
                assert found.violations == (), where
                assert max(plan.peak_memory_bytes) == slots, where


@pytest.mark.parametrize(
    ("num_stages", "slots", "period"),
    [(5, 3, Fraction(51, 15)), (8, 4, Fraction(87, 25)), (4, 2, Fraction(39, 11))],
)
def test_the_planner_finds_the_patterns_of_the_slides(num_stages, slots, period):
    made = identical(num_stages, 2)
    platform = Platform(num_devices=num_stages, memory_bytes=slots, bandwidth=FREE)
    plan = make_plan(made, platform, recompute=PER_MICRO_BATCH)
    assert plan.period_seconds == pytest.approx(float(period), rel=1e-12)
    assert replay(plan, made).violations == ()
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.class_lower_bound_seconds is None  # it bounds plans that treat all micro-batches alike
    names = [operation.operation for operation in plan.operations]
    kept = names.count("F0")
    assert (kept, names.count("f0")) == (4 * slots - 3, 3 * (num_stages - slots))
    busy = sum(operation.duration_seconds for operation in plan.operations if operation.device == 0)
    assert busy == pytest.approx(plan.pattern_seconds)  # device 0 is never idle
    assert not make_plan(made, platform, recompute="block").micro_batches_per_period > 1


def random_case(seed: int, *, transfers: bool) -> tuple[Chain, Platform]:
    """Two or three layers of small whole times; memory that holds one or two micro-batches on each device."""
    pick = random.Random(seed)
    size = pick.randint(2, 3)
    stash = [pick.randint(1, 3) for _ in range(size)]
    made = chain(
        [float(pick.randint(1, 2)) for _ in range(size)], [float(pick.randint(1, 3)) for _ in range(size)],
        outputs=[pick.randint(0, 1) for _ in range(size)] if transfers else None, stash=stash,
    )  # fmt: skip
    platform = Platform(
        num_devices=size, memory_bytes=pick.randint(max(stash), 2 * max(stash)) + 4 * transfers,
        bandwidth=pick.choice([1.0, 2.0]) if transfers else FREE,
    )  # fmt: skip
    return made, platform


def road_of(made: Chain, platform: Platform, number: int) -> CyclicRoad:
    problem = with_recomputation(problem_of(made, platform), "block")
    return CyclicRoad(problem, Placement.contiguous(tuple(range(made.num_layers + 1))), number)


def has_pattern(made: Chain, platform: Platform, number: int, length: int) -> bool:
    """Whether a pattern of this length exists, by a program with a variable for every operation and second."""
    stages, most = range(made.num_layers), (made.num_layers + 2) * length
    program = LpProblem()
    begins = {}
    for stage in stages:
        for m in range(number):
            for kind in "FRB":
                begins[kind, stage, m] = [
                    LpVariable(f"{kind}_{stage}_{m}_{time}", cat="Binary") for time in range(most)
                ]
    keeps = {(stage, m): LpVariable(f"k_{stage}_{m}", cat="Binary") for stage in stages for m in range(number)}

    def lasts(kind: str, stage: int) -> int:
        layer = made.layers[stage]
        return int(layer.backward_seconds if kind == "B" else layer.forward_seconds)

    def when(key: tuple[str, int, int]):
        return lpSum(time * each for time, each in enumerate(begins[key]))

    for (kind, stage, m), each in begins.items():
        program += lpSum(each) == (1 - keeps[stage, m] if kind == "R" else 1)
    program += begins["F", 0, 0][0] == 1
    for m in range(number):
        program += when(("F", 0, m)) <= length - 1
        for stage in stages:
            own = when(("F", stage, m)) + lasts("F", stage)
            if stage:
                program += when(("F", stage, m)) >= when(("F", stage - 1, m)) + lasts("F", stage - 1)
                program += when(("B", stage - 1, m)) >= when(("B", stage, m)) + lasts("B", stage)
            program += when(("B", stage, m)) >= own
            again = when(("R", stage, m))
            program += again >= own - 2 * most * keeps[stage, m]
            program += when(("B", stage, m)) >= again + lasts("F", stage) * (1 - keeps[stage, m])
    for stage in stages:
        room = platform.memory_bytes // made.layers[stage].stash_bytes
        for place in range(length):
            program += (
                lpSum(
                    begins[kind, stage, m][time]
                    for kind in "FRB"
                    for m in range(number)
                    for time in range(most)
                    if (place - time) % length < lasts(kind, stage)
                )
                <= 1
            )
            held = []
            for m in range(number):
                for turn in range(most // length + 2):
                    now = turn * length + place
                    # Held at ``now``: what keeps began F, what does not began R, and B has not ended.
                    alive = LpVariable(f"a_{stage}_{place}_{m}_{turn}", 0, 1)
                    ended = lpSum(begins["B", stage, m][: max(0, now + 1 - lasts("B", stage))])
                    began = lpSum(begins["F", stage, m][: now + 1])
                    program += alive >= began - ended - (1 - keeps[stage, m])
                    program += alive >= lpSum(begins["R", stage, m][: now + 1]) - ended
                    held.append(alive)
            program += lpSum(held) <= room
    program.solve(HiGHS(msg=False, threads=1))  # as the planner: HiGHS keeps the threads of its first program
    return program.status == LpStatusOptimal


def test_the_program_of_a_partition_finds_the_shortest_pattern():
    """Against a joint program of every second. Red if memory, order or recomputation were counted otherwise."""
    pytest.importorskip("ortools")
    for seed in range(some(24)):
        made, platform = random_case(seed, transfers=False)
        number = 1 + seed % 2
        road = road_of(made, platform, number)
        solved = CyclicProgram(road, recomputes=True).solve(10**18, 60)
        assert solved.is_optimal and solved.orders
        found = retimed(road, solved.orders)
        assert found is not None and found.fits()
        length = round(found.length * 10.0**road.clock.exponent)
        assert found.length == solved.bound
        assert has_pattern(made, platform, number, length), seed
        assert not has_pattern(made, platform, number, length - 1), seed


def test_any_times_and_bytes():
    """Every pattern replays within memory, is not below its bounds, and not slower than one micro-batch each."""
    faster = 0
    for seed in range(some(32)):
        made, platform = random_case(seed, transfers=seed % 2 == 0)
        alike = make_plan(made, platform, "contiguous", recompute="block")
        plan = make_plan(made, platform, "contiguous", recompute=PER_MICRO_BATCH, time_limit_seconds=1)
        assert replay(plan, made).violations == (), seed
        assert plan.period_seconds <= alike.period_seconds * (1 + 1e-12), seed
        faster += plan.period_seconds < alike.period_seconds * (1 - 1e-9)
        if len(plan.stages) == made.num_layers:
            bound = road_of(made, platform, 1)
            in_ticks = bound.bound * Fraction(10) ** bound.clock.exponent
            assert plan.period_seconds >= in_ticks * (1 - Fraction(1, 10**9)), seed
    assert faster


def test_without_the_program_it_is_found_too(monkeypatch):
    """The orders of identical stages, retimed: unequal times, transfers, bytes of inputs."""
    monkeypatch.setattr(per_micro_batch, "is_installed", lambda: False)
    faster = 0
    for seed in range(some(16)):
        pick = random.Random(seed)
        size = pick.randint(3, 5)
        made = chain(
            [pick.uniform(1, 1.3) for _ in range(size)], [pick.uniform(1.9, 2.4) for _ in range(size)],
            outputs=[pick.randint(1, 40) for _ in range(size)],
            stash=[pick.randint(800, 1000) for _ in range(size)],
        )  # fmt: skip
        platform = Platform(num_devices=size, memory_bytes=2400, bandwidth=400.0)
        alike = make_plan(made, platform, "contiguous", recompute="block")
        plan = make_plan(made, platform, "contiguous", recompute=PER_MICRO_BATCH, time_limit_seconds=1)
        assert replay(plan, made).violations == (), seed
        assert plan.period_seconds <= alike.period_seconds, seed
        faster += plan.micro_batches_per_period > 1
    assert faster >= some(16) // 2


def test_several_micro_batches_per_period_without_recomputation():
    """Three equal stages with room for two: one micro-batch per period takes 6, two take 9, whoever recomputes."""
    pytest.importorskip("ortools")
    made = chain([1.0] * 3, [2.0] * 3, stash=[1] * 3)
    made = replace(made, layers=tuple(replace(layer, recomputable=False) for layer in made.layers))
    platform = Platform(num_devices=3, memory_bytes=2, bandwidth=FREE)
    alike = make_plan(made, platform, [0, 1, 2, 3])
    assert alike.period_seconds == 6
    plan = make_plan(made, platform, "contiguous", recompute=PER_MICRO_BATCH)
    assert (plan.micro_batches_per_period, plan.pattern_seconds) == (2, 9)
    assert {operation.operation[0] for operation in plan.operations} == set("FBS")
    assert replay(plan, made).violations == ()


def test_what_is_not_planned_so_is_refused():
    made = identical(3, 2)
    platform = Platform(num_devices=3, memory_bytes=2, bandwidth=FREE)
    flushed = {"num_micro_batches": 4, "flushes": [2, 2]}
    for more in (flushed, {"period_seconds": 9.0}):
        with pytest.raises(ValueError, match="planned for the shortest period or step alone: leave"):
            make_plan(made, platform, recompute=PER_MICRO_BATCH, **more)
    assert Options(recompute=PER_MICRO_BATCH).recompute == PER_MICRO_BATCH
    assert make_plan(made, platform, "uniform", recompute=PER_MICRO_BATCH).treats_all_alike
