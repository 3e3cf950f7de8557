"""The unrestricted plan: the best of its class, proved, replayed, and never worse than a smaller class's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from deepspeed_partition import InfeasibleError, Plan, Platform, replay
from deepspeed_partition import make_plan as plan_with_recomputation
from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.report import draw_timelines
from deepspeed_partition.planner.solvers.bounds import lower_bound
from deepspeed_partition.planner.solvers.non_contiguous import madpipe
from deepspeed_partition.planner.solvers.pattern import ilp
from deepspeed_partition.planner.solvers.pattern.periodic_pattern import Road
from deepspeed_partition.planner.solvers.step import best_step, step_search
from tests.exhaustive import some
from tests.planner import oracles
from tests.planner.instances import chain, instances, of_case, problem_of, random_instance, solved_cases
from tests.planner.instances import plan_without_recomputation as make_plan

CASES = [case for case in solved_cases("plan") if case["general_best"] is not None]


def period_of(made, platform, **options):
    try:
        return make_plan(made, platform, **options).period_seconds
    except InfeasibleError:
        return math.inf


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_solved_cases(case):
    made, platform = of_case(case, case["P"], case["M"])
    plan = make_plan(made, platform)
    assert plan.period_seconds == case["general_best"]
    assert (plan.proved, plan.proved_class) == (True, "any allocation")
    assert replay(plan, made).violations == ()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_solved_cases_with_one_special_device(case, monkeypatch):
    monkeypatch.setattr(madpipe._PeriodSearch, "_several_special", lambda self: False)
    made, platform = of_case(case, case["P"], case["M"])
    plan = make_plan(made, platform)
    # Where the file has no value of the class, it found the sandwich or the contiguous optimum as the best of all.
    assert plan.period_seconds == case.get("special_best", case["general_best"])
    assert plan.proved and plan.proved_class in ("one special device", "any allocation")


@pytest.mark.parametrize("batch", range(some(15)))
def test_equals_every_allocation_with_its_best_schedule(batch, monkeypatch):
    """The schedules of the other side are not told of the bounds that the planner prunes with.

    One of 300 (seed 155) is proved among contiguous allocations alone, though it is the best of all.
    """
    of_less = 0
    for seed in range(20 * batch, 20 * batch + 20):
        made, platform = random_instance(seed, most_layers=4, most_devices=3)
        problem = problem_of(made, platform)
        best: int | None = None
        with monkeypatch.context() as patched:
            patched.setattr(Road, "_pairs_may_fit", lambda *_: True)
            for placed in oracles.all_placements(made.num_layers, platform.num_devices):
                found = ilp.schedule(Road(problem, Placement(*placed)), best, Deadline())
                if found.pattern is not None:
                    best = found.pattern.period
        if best is None:
            assert period_of(made, platform) == math.inf
            continue
        plan = make_plan(made, platform)
        assert plan.period_seconds == problem.times.clock.seconds(best)
        assert plan.proved
        of_less += plan.proved_class != "any allocation"
        assert plan.lower_bound_seconds <= plan.period_seconds
        assert plan.class_lower_bound_seconds is None or plan.class_lower_bound_seconds >= plan.period_seconds
        assert replay(plan, made).violations == ()
    assert of_less <= (batch == 7)


@pytest.mark.parametrize("algorithm", ["contiguous", "madpipe"])
def test_plans_from_random_chains_pass_the_replay(algorithm):
    """A thousand of both at the most."""
    made_plans = 0
    for seed in range(1000, 1000 + some(800 if algorithm == "contiguous" else 200)):
        made, platform = random_instance(seed, most_layers=5, most_devices=3)
        try:
            plan = make_plan(made, platform, algorithm)
        except InfeasibleError as error:
            platform = replace(platform, memory_bytes=error.smallest_memory_bytes)
            plan = make_plan(made, platform, algorithm)
        assert replay(plan, made).violations == ()
        assert max(plan.peak_memory_bytes) <= platform.memory_bytes
        made_plans += 1
    assert made_plans >= some(200)


def test_several_stages_on_a_device_replay_draw_and_travel_through_a_file(tmp_path):
    made, platform = of_case(CASES[1], CASES[1]["P"], CASES[1]["M"])
    plan = make_plan(made, platform)
    devices = [stage.device for stage in plan.stages]
    assert not plan.is_contiguous and len(devices) > len(set(devices))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    row = next(
        row for row in draw_timelines.timeline(plan).splitlines() if row.startswith(f"device {devices[-1]} ")
    )
    mine = [stage for stage, device in enumerate(devices) if device == devices[-1]]
    assert len(mine) == 2 and all(f"{kind}{stage}" in row for stage in mine for kind in "FB")
    assert f"lower bound {plan.lower_bound_seconds:.3f} s".replace(".000", "") in plan.summary().replace(
        ".00 ", " "
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(instances())
def test_every_plan_keeps_its_promises(instance):
    made, platform = instance
    try:
        plan = make_plan(made, platform, time_limit_seconds=2)
    except InfeasibleError as error:
        assert error.smallest_memory_bytes > platform.memory_bytes
        platform = replace(platform, memory_bytes=error.smallest_memory_bytes)
        plan = make_plan(made, platform, time_limit_seconds=2)
    assert replay(plan, made).violations == ()
    assert max(plan.peak_memory_bytes) <= platform.memory_bytes
    assert 0 < plan.lower_bound_seconds <= plan.period_seconds
    try:
        assert plan.period_seconds <= make_plan(made, platform, "contiguous").period_seconds
    except InfeasibleError:
        assert not plan.is_contiguous


@pytest.mark.parametrize("seed", range(20))
def test_more_of_anything_is_never_slower(seed):
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    period = period_of(made, platform)
    for key, value in (
        ("memory_bytes", platform.memory_bytes + 7),
        ("num_devices", platform.num_devices + 1),
        ("bandwidth", platform.bandwidth * 2),
    ):
        assert period_of(made, replace(platform, **{key: value})) <= period * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_says_the_smallest_memory(seed):
    """That much does, one byte less does not: on so small chains over all allocations."""
    made, platform = random_instance(seed, most_layers=5, most_devices=3)
    with pytest.raises(InfeasibleError) as raised:
        make_plan(made, replace(platform, memory_bytes=1))
        pytest.skip("fits into a byte")
    smallest = raised.value.smallest_memory_bytes
    assert str(smallest) in str(raised.value)
    assert raised.value.short_bytes > 0
    needed = []
    for placed in oracles.all_placements(made.num_layers, platform.num_devices):
        road = Road(problem_of(made, platform), Placement(*placed))
        needed.append(max(device.bytes_for_one for device in road.memory))
    assert smallest == min(needed)
    assert period_of(made, replace(platform, memory_bytes=smallest)) < math.inf


def test_an_allocation_that_is_not_contiguous_fits_where_no_contiguous_one_does():
    made = chain([1, 1, 1], [1, 1, 1], weights=[4, 8, 4], outputs=[1, 1, 1], stash=[1, 1, 1])
    platform = Platform(num_devices=2, memory_bytes=30, bandwidth=4)  # weights 24, buffers 4, stash 2
    with pytest.raises(InfeasibleError):
        make_plan(made, platform, "contiguous")
    plan = make_plan(made, platform)
    assert [stage.device for stage in plan.stages] == [0, 1, 0]
    assert plan.peak_memory_bytes == (30, 29)
    with pytest.raises(InfeasibleError, match="layers 0 to 1 and 2 to 3 on one device need 30 B, 1 byte more"):
        make_plan(made, replace(platform, memory_bytes=29))


def test_what_fits_fits_when_the_time_is_up():
    """One micro-batch after the other, where the time was too short for any other schedule."""
    shared = 0
    for seed in range(some(250)):
        made, platform = random_instance(seed, most_layers=5, most_devices=3)
        try:
            make_plan(made, replace(platform, memory_bytes=1))
        except InfeasibleError as error:
            least = replace(platform, memory_bytes=error.smallest_memory_bytes)
            plan = make_plan(made, least, time_limit_seconds=1e-9)
            assert replay(plan, made).violations == ()
            shared += not plan.is_contiguous
    assert shared > 0


def test_hosts_get_one_stage_per_rank():
    """So many stages, all of which train, is what a host can run; without that this plan is not contiguous."""
    case = CASES[0]
    made, platform = of_case(case, case["P"], case["M"])
    assert not make_plan(made, platform).is_contiguous
    for options in ({"num_stages": 3}, {"every_stage_trains": True}):
        plan = make_plan(made, platform, **options)
        assert plan.is_contiguous and plan.algorithm == "madpipe" and plan.proved_class == "contiguous"
    roomy = replace(platform, memory_bytes=10**6)
    assert make_plan(made, roomy, num_micro_batches=4, every_stage_trains=True).is_contiguous
    assert not make_plan(made, roomy, num_micro_batches=4).is_contiguous


def test_out_of_time_it_returns_the_best_so_far_and_proves_nothing():
    case = CASES[0]
    made, platform = of_case(case, case["P"], case["M"])
    plan = make_plan(made, platform, time_limit_seconds=1e-9)
    assert plan.period_seconds == case["contiguous"]
    assert (plan.proved, plan.proved_class) == (False, None), "other allocations may be better"


@pytest.mark.parametrize("seed", range(5))
def test_answers_repeat(seed):
    made, platform = random_instance(seed, most_layers=6, most_devices=3)
    if period_of(made, platform) < math.inf:
        first, second = (replace(make_plan(made, platform), planning_seconds=0.0) for _ in range(2))
        assert first == second


def test_the_lower_bound_knows_that_a_cut_may_be_too_slow_to_use():
    case = next(case for case in CASES if case["name"] == "fewer stages than GPUs")
    made, platform = of_case(case, case["P"], case["M"])
    problem = problem_of(made, platform)
    assert problem.times.clock.seconds(lower_bound(problem)) == 27
    assert make_plan(made, platform).gap == 0


def test_fewer_than_two_buffers_prove_nothing():
    made, platform = of_case(CASES[0], CASES[0]["P"], CASES[0]["M"])
    plan = make_plan(made, replace(platform, comm_buffers=0))
    assert not plan.proved and replay(plan, made).violations == ()


def test_the_replay_knows_the_order_of_transfers_shorter_than_its_tolerance():
    """Back to back on one link, and in any order in the file; the replay once took them for overlapping."""
    made = chain([3.0000000072, 0], [3, 0], outputs=[48, 0])
    plan = make_plan(made, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e10), [0, 1, 2])
    assert replay(replace(plan, operations=plan.operations[::-1]), made).violations == ()


class _After(Deadline):
    """Passes when it has been asked so many times: somewhere in the search, and there in every run."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def remaining_seconds(self):
        self.times -= 1
        return 100.0 if self.times >= 0 else 0.0


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_wherever_it_is_interrupted_the_class_bound_holds(seed, monkeypatch):
    monkeypatch.setattr(madpipe._PeriodSearch, "_several_special", lambda self: False)
    made, platform = random_instance(seed, most_layers=7, most_devices=4)
    try:
        best = make_plan(made, platform).period_seconds
    except InfeasibleError:
        pytest.skip("nothing fits")
    for times in (0, 5, 20, 40, 80, 160):
        try:
            plan = make_plan(made, platform, deadline=_After(times))
        except InfeasibleError:  # nothing contiguous fits, and no time to find what does
            continue
        bound, shares = plan.class_lower_bound_seconds, any(layer.shared_weights for layer in made.layers)
        assert best <= plan.period_seconds
        assert shares if bound is None else bound <= best
        assert bound is None or plan.lower_bound_seconds <= bound * (1 + 1e-12)
        assert not plan.proved or plan.proved_class == "contiguous" or plan.period_seconds == best


def test_an_unproved_plan_says_how_far_it_is_from_the_best_of_its_class(tmp_path):
    made, platform = of_case(CASES[0], CASES[0]["P"], CASES[0]["M"])
    plan = make_plan(made, platform)
    assert plan.class_lower_bound_seconds == plan.period_seconds and "above the best with" not in plan.summary()
    plan = replace(plan, class_lower_bound_seconds=plan.period_seconds / 1.25, proved=False, proved_class=None)
    assert "at most 25.0% above the best with one special device" in plan.summary()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_to_start_from_is_not_lost(monkeypatch):
    """With more of anything, and nothing but the allocation to start from."""
    started = 0
    for seed in range(some(100)):
        made, platform = random_instance(seed, most_layers=5, most_devices=3)
        try:
            before = make_plan(made, platform)
        except InfeasibleError:
            continue
        if before.is_contiguous:
            continue
        started += 1
        more = replace(
            platform,
            num_devices=platform.num_devices + seed % 2,
            memory_bytes=platform.memory_bytes + seed % 3,
            bandwidth=platform.bandwidth * 2,
        )
        with monkeypatch.context() as patched:
            patched.setattr(madpipe._PeriodSearch, "_one_special", lambda _: False)
            patched.setattr(madpipe._PeriodSearch, "_several_special", lambda _: False)
            after = make_plan(made, more, madpipe.MadPipe(start=(before.allocation,)))
        assert after.period_seconds <= before.period_seconds * (1 + 1e-12)
    assert started > some(5)


@pytest.fixture
def finds_little(monkeypatch):
    """Searches of steps that find little but what they are given."""

    def weaken():
        monkeypatch.setattr(best_step, "_walk_and_polish", lambda *_: None)
        monkeypatch.setattr(best_step, "_search_recomputing", lambda *_: None)
        for name in ("search_shared", "refine_leaders", "descend"):
            monkeypatch.setattr(step_search.StepSearch, name, lambda *_: None)
        for name in ("begin", "search_all"):
            monkeypatch.setattr(best_step.InterleavedSearch, name, lambda _: None)

    return weaken


@pytest.mark.parametrize(("recompute", "memory"), [("never", 1000), ("block", 25), ("stage", 25)])
def test_a_step_to_start_from_is_not_made_longer(finds_little, recompute, memory):
    """Layers of 6, 2, 6 and 2 s, the short ones on one device; all in little memory."""
    made = chain([3, 1, 3, 1], [3, 1, 3, 1], weights=[1] * 4, outputs=[1] * 4, stash=[9] * 4)
    platform = Platform(num_devices=3, memory_bytes=memory, bandwidth=100.0)
    how = {"num_micro_batches": 5, "time_limit_seconds": 0.3, "recompute": recompute}
    before = plan_with_recomputation(made, platform, **how)
    finds_little()
    start = madpipe.MadPipe(start=(before,))
    after = plan_with_recomputation(made, platform, start, **how)
    assert after.step_seconds <= before.step_seconds
    if recompute == "never":  # alone, no step is found with the others
        assert before.step_seconds < plan_with_recomputation(made, platform, **how).step_seconds
    assert any(stage.blocks for stage in before.stages) == (recompute != "never")
    for other in ({"num_micro_batches": 4}, {"recompute": "never"}, {"num_micro_batches": 10, "data_parallel": 2}):
        fewer = replace(platform, num_devices=4, memory_bytes=memory + 30)
        plan = plan_with_recomputation(made, fewer, start, **how | other)
        assert replay(plan, made).violations == ()


def test_a_long_step_to_start_from_is_run_in_full(finds_little):
    """Beyond 128 micro-batches a search looks at the beginning alone; the layers in turn shorten the drain."""
    made = chain([1, 1, 1, 1], [2, 2, 2, 2], outputs=[0] * 4)
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1.0)
    before = make_plan(made, platform, num_micro_batches=130, time_limit_seconds=1)
    finds_little()
    start = madpipe.MadPipe(start=(before,))
    after = make_plan(made, platform, start, num_micro_batches=130, time_limit_seconds=1)
    alone = make_plan(made, platform, num_micro_batches=130, time_limit_seconds=1)
    assert after.step_seconds == before.step_seconds < alone.step_seconds


def test_a_long_step_to_start_from_is_kept_when_the_time_is_up():
    """It was run last of all, for which no time was left: 1,206 s in the place of 1,203."""
    made = chain([1, 1, 1, 1], [2, 2, 2, 2], outputs=[0] * 4)
    platform = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1.0)
    before = make_plan(made, platform, num_micro_batches=200, time_limit_seconds=0.5)
    alone, after = (
        make_plan(made, platform, algorithm, num_micro_batches=200, time_limit_seconds=0.001)
        for algorithm in ("madpipe", madpipe.MadPipe(start=(before,)))
    )
    assert after.step_seconds == before.step_seconds < alone.step_seconds


def test_a_plan_to_start_from_suits_the_model_and_may_need_more_devices_than_there_are():
    case = CASES[0]
    made, platform = of_case(case, case["P"], case["M"])
    start = madpipe.MadPipe(start=(make_plan(made, platform).allocation,))
    fewer = replace(platform, num_devices=2, memory_bytes=10**6)
    assert make_plan(made, fewer, start).period_seconds == make_plan(made, fewer).period_seconds
    other = replace(made, layers=made.layers[:-1])
    with pytest.raises(ValueError, match=f"cuts {made.num_layers} layers and 'test' has {other.num_layers}"):
        make_plan(other, platform, start)


@pytest.mark.filterwarnings("error:.*divide")
def test_devices_without_memory_to_spare():
    """Layers that keep nothing fit on them: the bound divided by their memory, and left everything out."""
    made = chain([1, 3, 1, 3, 1], [2, 6, 2, 6, 2], stash=[0] * 5, weights=[0] * 5, outputs=[0] * 5)
    roomy, full = (
        Platform(num_devices=2, memory_bytes=100, bandwidth=1e10, fixed_bytes=fixed) for fixed in (0, 100)
    )
    plans = [make_plan(made, platform, "madpipe") for platform in (roomy, full)]
    assert plans[0].period_seconds == plans[1].period_seconds
    assert plans[0].proved == plans[1].proved
