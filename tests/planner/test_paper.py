"""The paper's own dynamic program: equal to its recurrence, and never better than what is exact."""

from __future__ import annotations

import functools
import math
import random
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks" / "planner_speed"))

from whole_table import whole_table

from deepspeed_partition import InfeasibleError, Platform, replay
from deepspeed_partition.planner.deadline import Deadline, DeadlinePassed
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.non_contiguous import madpipe_paper
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import NOTHING, Grid, PaperMadPipe
from tests.exhaustive import is_exhaustive
from tests.planner import oracles
from tests.planner.instances import chain, of_case, problem_of, random_instance, solved_cases
from tests.planner.instances import plan_without_recomputation as make_plan

CASES = {case["name"]: case for case in solved_cases("plan")}
COARSE = {"load_steps": 6, "memory_steps": 5, "delay_steps": 4}


def recursion(problem, options, target, *, exact=False):
    """T(L, P - 1, 0, 0, 0) as printed, value by value, in fractions; ``exact``: without any grid.

    Layers are numbered from 1 as in the paper.
    """
    made, platform, times = problem.chain, problem.platform, problem.times
    num_layers, longest, total = made.num_layers, problem.longest_period, int(times.compute[-1])
    room = max(1, platform.memory_bytes - platform.fixed_bytes)

    def on_grid(value, largest, steps):
        """None: above the grid, where only larger values are safe."""
        if exact:
            return value
        place = Fraction(value) / Fraction(largest, steps - 1)
        step = {"up": math.ceil(place), "down": math.floor(place), "nearest": math.floor(place + Fraction(1, 2))}
        found = step[options.rounding]
        if found > steps - 1 and options.rounding == "up":
            return None
        return min(found, steps - 1) * Fraction(largest, steps - 1)

    def load(k, l):
        return times.compute_ticks(k - 1, l)

    def transfers(l):
        return int(times.round_trip[l])

    def bytes_of(k, l, g):
        return oracles.memory(made, platform, k - 1, l, g)

    def plus(x, y):
        group = math.ceil(x / target)
        return x + y if group == math.ceil((x + y) / target) else target * group + y

    @functools.cache
    def period(l, p, t, m, v):
        if l == 0:
            return t

        def in_flight(k):
            return max(1, math.ceil((v + load(k, l)) / Fraction(target)))

        if p == 0:
            return load(1, l) + t if m + special_bytes(1, l, in_flight(1) - 1) <= room else math.inf
        best = math.inf
        for k in range(1, l + 1):
            g = in_flight(k)
            above = plus(plus(v, load(k, l)), transfers(k - 1))
            above = on_grid(above, longest, options.delay_steps) if k > 1 else 0
            if above is None:
                continue
            if math.ceil(bytes_of(k, l, g)) <= platform.memory_bytes:
                rest = period(k - 1, p - 1, t, m, above)
                best = min(best, max(load(k, l), transfers(k - 1), rest))
            more = special_bytes(k, l, g - 1)
            if m + more <= room:
                loaded = on_grid(t + load(k, l), total, options.load_steps)
                loaded = Fraction(total) if loaded is None else loaded  # no device ever has more
                kept = on_grid(m + more, room, options.memory_steps)
                best = min(best, max(loaded, transfers(k - 1), period(k - 1, p, loaded, kept, above)))
        return best

    def special_bytes(k, l, g):
        """Of a stage on the special device, without what only a moment needs and what any device keeps."""
        before = made.layers[k - 2].output_bytes if k > 1 else 0
        after = made.layers[l - 1].output_bytes if l < num_layers else 0
        weights = math.ceil(oracles.training_bytes(made, platform, [(k - 1, l)]))
        return weights + platform.comm_buffers * (before + after) + g * oracles.stash(made, k - 1, l)

    return period(num_layers, min(platform.num_devices - 1, num_layers), 0, 0, 0)


def ticks(value):
    return NOTHING if value == math.inf else math.ceil(value)


@pytest.mark.parametrize("rounding", ["up", "nearest", "down"])
@pytest.mark.parametrize("seed", range(40))
def test_equals_the_recursion_of_the_paper(seed, rounding):
    made, platform = random_instance(seed, most_layers=6)
    problem = problem_of(made, platform)
    total = int(problem.times.compute[-1])
    for options in (PaperMadPipe(rounding=rounding), PaperMadPipe(rounding=rounding, **COARSE)):
        grid = Grid(problem, options)
        for share in (Fraction(1, platform.num_devices), Fraction(2, 3), Fraction(1)):
            target = math.ceil(total * share)
            value, placement = grid.best(target)
            assert value == ticks(recursion(problem, options, target))
            assert (placement is None) == (value == NOTHING)


@pytest.mark.parametrize("rounding", ["up", "nearest", "down"])
@pytest.mark.parametrize("seed", range(6))
def test_equals_the_whole_table(seed, rounding):
    """Longer chains than the recursion can take, by the program that the benchmark times."""
    pick = random.Random(seed)
    size = 12
    made = chain(
        [pick.uniform(1, 20) for _ in range(size)],
        [pick.uniform(2, 40) for _ in range(size)],
        weights=[pick.randrange(100) for _ in range(size)],
        outputs=[pick.randrange(1000) for _ in range(size)],
        stash=[pick.randrange(10_000) for _ in range(size)],
    )
    platform = Platform(num_devices=3, memory_bytes=pick.choice([30_000, 50_000, 90_000]), bandwidth=100.0)
    problem = problem_of(made, platform)
    grid = Grid(problem, PaperMadPipe(load_steps=21, memory_steps=9, delay_steps=11, rounding=rounding))
    target = int(problem.times.compute[-1]) * pick.randint(4, 9) // 10
    assert grid.best(target)[0] == whole_table(grid, target)


@pytest.mark.parametrize("seed", range(40))
def test_rounding_up_is_never_optimistic(seed):
    """Neither below the recurrence without a grid, nor below what its allocation really loads a device with."""
    made, platform = random_instance(seed, most_layers=6)
    problem = problem_of(made, platform)
    options = PaperMadPipe(**COARSE)
    total = int(problem.times.compute[-1])
    for share in (Fraction(1, 2), Fraction(4, 5), Fraction(1)):
        target = math.ceil(total * share)
        value, placement = Grid(problem, options).best(target)
        assert value >= ticks(recursion(problem, options, target, exact=True))
        if placement is not None:
            loads = dict.fromkeys(placement.devices, 0)
            for device, start, stop in zip(placement.devices, placement.cuts, placement.cuts[1:], strict=False):
                loads[device] += problem.times.compute_ticks(start, stop)
            assert value >= max(loads.values())


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case["name"])
def test_solved_cases_on_a_grid_that_has_every_value(case):
    """All times are multiples of a half, all sizes whole numbers: a grid of as many steps rounds nothing."""
    made, platform = of_case(case, case["P"], min(case["M"], 999))  # where there is more, it is plenty
    problem = problem_of(made, platform)
    clock, best = problem.times.clock, case["madpipe_dp_continuous"]
    total = round(clock.seconds(int(problem.times.compute[-1])))
    halves = 2 * clock.seconds(problem.longest_period)
    every = {"load_steps": total + 1, "memory_steps": platform.memory_bytes + 1, "delay_steps": round(halves) + 1}
    # They differ only above the largest delay, where "up" leaves out and "nearest" counts too little.
    up, nearest = (Grid(problem, PaperMadPipe(rounding=rounding, **every)) for rounding in ("up", "nearest"))
    if best is None:
        assert nearest.best(problem.longest_period) == (NOTHING, None)
        return
    assert nearest.best(clock.ticks(best))[0] <= clock.ticks(best)
    assert up.best(clock.ticks(best) - 1)[0] > clock.ticks(best) - 1


@pytest.mark.parametrize("seed", range(25))
def test_plans_replay_and_are_never_better_than_the_optimum(seed):
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    try:
        best = make_plan(made, platform)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            make_plan(made, platform, "madpipe-paper")
        return
    assert best.proved
    try:
        plan = make_plan(made, platform, "madpipe-paper")
    except InfeasibleError as refusal:
        assert "madpipe-paper" in str(refusal)
        return
    assert replay(plan, made).violations == ()
    assert plan.period_seconds >= best.period_seconds
    reached = plan.period_seconds <= problem_of(made, platform).times.clock.seconds(
        math.ceil(lower_bound(problem_of(made, platform)))
    )
    assert plan.proved == reached


def test_line_7_as_printed_would_give_no_answer():
    made, platform = of_case(CASES["s6: PipeDream memory test rejects everything, a plan exists"], 3, 37)
    problem = problem_of(made, platform)
    options = PaperMadPipe()
    first = -(-int(problem.times.compute[-1]) // 3)
    assert Grid(problem, options).best(first) == (NOTHING, None)  # that is lb = inf as printed
    assert options.allocation(problem) is not None


def test_an_allocation_without_a_schedule_says_so():
    case = CASES["s21: MadPipe-DP's allocation cannot be scheduled at all"]
    made, platform = of_case(case, case["P"], case["M"])
    fine = PaperMadPipe(load_steps=67, memory_steps=72, delay_steps=102)  # every value there is
    with pytest.raises(InfeasibleError, match=r"madpipe-paper has no plan .* it chose \(.*@0.*\)") as refusal:
        make_plan(made, platform, fine)
    needs = refusal.value.smallest_memory_bytes
    assert needs == platform.memory_bytes + refusal.value.short_bytes
    roomier = replace(platform, memory_bytes=needs)
    assert make_plan(made, roomier, fine).peak_memory_bytes


def test_no_allocation_names_the_memory_of_a_contiguous_plan():
    made = chain([1, 1], [1, 1], weights=[10, 10], outputs=[1, 1], input_bytes=1)
    with pytest.raises(
        InfeasibleError, match=r"finds no allocation for 20 B .* a contiguous plan fits is 33 bytes"
    ):
        make_plan(made, Platform(num_devices=2, memory_bytes=20, bandwidth=1.0), "madpipe-paper")
    make_plan(made, Platform(num_devices=2, memory_bytes=33, bandwidth=1.0), "madpipe-paper")


def test_without_time_there_is_no_allocation_and_no_search_for_a_schedule():
    made, platform = of_case(CASES["s9: special beats contiguous"], 3, 100)
    over = Deadline()
    over.stop()
    with pytest.raises(InfeasibleError, match="no allocation when its time was up"):
        make_plan(made, platform, "madpipe-paper", deadline=over)


def test_past_the_deadline_the_best_so_far_counts(monkeypatch):
    """The targets that were tried before it, and no others."""
    made, platform = of_case(CASES["s9: special beats contiguous"], 3, 61)
    problem = problem_of(made, platform)
    real, tried = Grid.best, []

    def best(self, target):
        if len(tried) == 2:
            raise DeadlinePassed
        tried.append((real(self, target), target))
        return tried[-1][0]

    monkeypatch.setattr(Grid, "best", best)
    found = PaperMadPipe().allocation(problem)
    assert found == min(tried, key=lambda one: max(one[0][0], one[1]))[0][1]
    assert found is not None and tried[1][1] > tried[0][1]


def test_algorithm_1_ends_where_target_and_period_meet():
    """No target period among many gives a better one than the ten that are tried, by more than they resolve."""
    made, platform = of_case(CASES["s12: the g-1 estimate misleads: ILP on MadPipe-DP's allocation is worse than "
                                   "the contiguous optimum"], 3, 96)  # fmt: skip
    problem = problem_of(made, platform)
    grid = Grid(problem, PaperMadPipe(load_steps=100, memory_steps=97, delay_steps=200))
    clock = problem.times.clock
    every = [
        max(grid.best(target)[0], target)
        for target in map(clock.ticks, range(30, 146, 3 if is_exhaustive() else 12))
    ]
    tried = []

    class Noting(Grid):
        def best(self, target):
            found = super().best(target)
            tried.append(max(found[0], target))
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(madpipe_paper, "Grid", Noting)
        PaperMadPipe(load_steps=100, memory_steps=97, delay_steps=200).allocation(problem)
    assert len(tried) == 10
    assert min(tried) <= min(every) + clock.ticks(1)


def test_a_schedule_that_is_not_found_in_time_is_one_micro_batch_after_the_other(monkeypatch):
    made, platform = of_case(CASES["sandwich"], 2, 200)
    options = PaperMadPipe()
    placement = options.allocation(problem_of(made, platform))
    assert not placement.is_contiguous

    def late(self, problem):
        problem.deadline.stop()
        return placement

    monkeypatch.setattr(PaperMadPipe, "allocation", late)
    plan = make_plan(made, platform, options)
    assert replay(plan, made).violations == ()
    assert all(stage.in_flight == 1 for stage in plan.stages)
    assert not plan.proved


def test_a_step_that_drains_and_a_chosen_period_are_refused():
    made, platform = random_instance(1)
    with pytest.raises(ValueError, match="looks for the shortest period alone"):
        make_plan(made, platform, "madpipe-paper", period_seconds=100.0)
    with pytest.raises(ValueError, match="knows no step that drains"):
        make_plan(made, platform, "madpipe-paper", num_micro_batches=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"load_steps": 1}, "load_steps is 1"),
        ({"memory_steps": 1001}, "memory_steps is 1001"),
        ({"load_steps": 1000, "memory_steps": 1000, "delay_steps": 1000}, "has 1000000000 values"),
        ({"iterations": 0}, "iterations is 0"),
        ({"rounding": "even"}, "rounding is 'even'"),
    ],
)
def test_malformed_options(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        PaperMadPipe(**options)
