"""Plans for pipelines that never drain: their memory, their search, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.memory import most_with_versions
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.draw import summary
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.schedule.other_runtimes import ConversionError, megatron_layout, torch_csv
from tests.planner import oracles
from tests.planner.instances import chain
from tests.planner.test_weight_versions import ASYNCHRONOUS, SlowVersions


def random_chain(pick: random.Random, num_layers: int) -> Chain:
    def numbers(least: int, most: int) -> list[int]:
        return [pick.randint(least, most) for _ in range(num_layers)]

    return chain(
        list(map(float, numbers(1, 4))), list(map(float, numbers(1, 6))), weights=numbers(0, 9),
        outputs=numbers(0, 3), input_bytes=2, stash=numbers(1, 6),
        transient=[pick.choice([0, 0, 3]) for _ in range(num_layers)],
    )  # fmt: skip


def slow(plan: Plan, period: int, mode: str, per_update: int) -> SlowVersions:
    """Unroll a plan whose times are whole seconds."""
    spans: list[tuple[int, ...]] = []
    placed = {each.operation: each for each in plan.operations}
    for stage in range(len(plan.stages)):
        both = [placed[f"{kind}{stage}"] for kind in "FB"]
        begins = [round(each.shift * period + each.start_seconds) for each in both]
        ends = [begin + round(each.duration_seconds) for begin, each in zip(begins, both, strict=True)]
        spans.append((begins[0], ends[0], begins[1], ends[1]))
    return SlowVersions(mode, per_update, [stage.device for stage in plan.stages], spans, period)


@pytest.mark.parametrize("seed", range(16))
def test_replay_counts_what_an_unrolled_plan_holds(seed: int) -> None:
    """Weights of each device: per byte copies - 2 + versions, and the gradients of more than one update."""
    pick = random.Random(seed)
    made = random_chain(pick, pick.randint(3, 6))
    platform = Platform(num_devices=pick.randint(2, 3), memory_bytes=pick.choice([60, 90, 200]), bandwidth=1.0)
    for mode in ASYNCHRONOUS:
        per_update = pick.choice([1, 2, 3])
        try:
            plan = make_plan(
                made, platform, num_micro_batches=per_update, weight_versions=mode, time_limit_seconds=1,
                recompute="never",
            )  # fmt: skip
        except InfeasibleError:
            continue
        assert not replay(plan, made).violations
        if plan.period_seconds % 1 or any(each.start_seconds % 1 for each in plan.operations):
            continue  # the oracle counts whole numbers
        found = slow(plan, round(plan.period_seconds), mode, per_update)
        assert not found.too_early
        for device, use in enumerate(plan.memory):
            expected = 0
            for index, stage in enumerate(plan.stages):
                if stage.device == device:
                    own = sum(layer.weight_bytes for layer in made.layers[slice(*stage.layers)])
                    held = 2 if mode == "2bw" else found.held[index]
                    expected += (3 - 2 + held + found.gradients[index] - 1) * own
            assert use.weights == expected


def best_period(made: Chain, platform: Platform, mode: str, per_update: int) -> Fraction | None:
    """Try every contiguous partition at every period at which 1F1B* changes."""
    best = None
    for cuts in oracles.all_cuts(made.num_layers, platform.num_devices):
        loads = oracles.loads(made, platform, cuts)
        size = len(loads)
        parts = [loads[first:last] for first in range(size) for last in range(first + 1, size + 1)]
        sums = {sum(part, Fraction(0)) for part in parts}
        for period in sorted(each for each in sums if each >= max(loads)):
            groups = oracles.groups(loads, period)
            counts = {
                "2bw": [2] * len(groups),
                "stashing": [1 + -(-(group - 1) // per_update) for group in groups],
                "vertical-sync": [1 + -(-(groups[0] - 1) // per_update)] * len(groups),
            }[mode]
            if mode == "2bw" and max(groups) > per_update + 1:
                continue
            copies = [replace(platform, weight_copies=1 + count) for count in counts]
            fits = all(
                oracles.memory(made, each, *stage, group) <= platform.memory_bytes
                for stage, each, group in zip(pairwise(cuts), copies, groups, strict=True)
            )
            if fits:
                best = period if best is None else min(best, period)
                break
    return best


@pytest.mark.parametrize("seed", range(24))
def test_contiguous_plans_equal_exhaustive_search(seed: int) -> None:
    pick = random.Random(seed)
    made = random_chain(pick, pick.randint(2, 5))
    platform = Platform(num_devices=pick.randint(1, 4), memory_bytes=pick.choice([40, 60, 90]), bandwidth=1.0)
    for mode in ASYNCHRONOUS:
        per_update = pick.choice([1, 2, 4])
        best = best_period(made, platform, mode, per_update)
        how = {"num_micro_batches": per_update, "weight_versions": mode, "recompute": "never"}
        if best is None:
            with pytest.raises(InfeasibleError):
                make_plan(made, platform, "contiguous", **how)
            continue
        plan = make_plan(made, platform, "contiguous", **how)
        assert plan.period_seconds == pytest.approx(float(best)) and plan.proved
        free = make_plan(made, platform, **how, time_limit_seconds=1)
        assert plan.lower_bound_seconds <= free.period_seconds * (1 + 1e-9) <= plan.period_seconds * (1 + 2e-9)


def test_most_in_flight_with_versions() -> None:
    for seed in range(300):
        pick = random.Random(seed)
        room, stash, version, per_update = (pick.randint(0, most) for most in (60, 6, 9, 4))
        per_update += 1
        if not stash and not version:
            continue

        def needs(count: int, stash=stash, version=version, per_update=per_update) -> int:
            return count * stash + -(-(count - 1) // per_update) * version

        fitting = [count for count in range(1, 1000) if needs(count) <= room]
        assert int(most_with_versions(*map(_array, (room, stash, version)), per_update)) == max(fitting, default=0)


def _array(number: int):
    import numpy as np

    return np.array(number)


def test_two_versions_take_the_memory_of_a_steady_state() -> None:
    made = random_chain(random.Random(1), 6)
    platform = Platform(num_devices=3, memory_bytes=300, bandwidth=1.0)
    flush = make_plan(made, platform)
    plan = make_plan(made, platform, num_micro_batches=8, weight_versions="2bw")
    assert plan.operations == flush.operations and plan.memory == flush.memory
    stashing = make_plan(made, platform, num_micro_batches=8, weight_versions="stashing")
    assert max(stashing.peak_memory_bytes) <= max(flush.peak_memory_bytes)
    # What an update needs besides comes while micro-batches are in flight, and not behind them.
    needy = replace(made, layers=tuple(replace(each, optimizer_transient_bytes=50) for each in made.layers))
    for mode in ("flush", "2bw"):
        how = {} if mode == "flush" else {"num_micro_batches": 8}
        needs = make_plan(needy, platform, "0,2,4,6", weight_versions=mode, **how)
        with_none = make_plan(made, platform, "0,2,4,6", weight_versions=mode, **how)
        for use, less in zip(needs.memory, with_none.memory, strict=True):
            assert (use.transient >= 50 and use.stash == less.stash) or mode == "flush"


def test_check_refuses_what_the_mode_does_not_allow() -> None:
    made = chain([1.0] * 4, [2.0] * 4, weights=[5] * 4, stash=[1] * 4)
    platform = Platform(num_devices=4, memory_bytes=100, bandwidth=1e9)
    deep = make_plan(made, platform, weight_versions="stashing", num_micro_batches=4)
    for per_update, why in ((1, "give 3 or more"), (2, "give 3 or more"), (3, "")):
        changed = replace(deep, weight_versions="2bw", micro_batches_per_update=per_update)
        told = " ".join(each for each in replay(changed, made).violations if "2bw" in each)
        assert (why in told) if why else not told
    # Fewer micro-batches per update: more versions than the plan says, and than there is room for.
    tight = replace(deep, platform=replace(platform, memory_bytes=max(deep.peak_memory_bytes)))
    told = " ".join(replay(replace(tight, micro_batches_per_update=1), made).violations)
    assert "bytes short" in told and "and the plan says" in told
    assert not replay(tight, made).violations


def test_one_version_along_the_pipeline_is_planned_under_the_name_that_was_asked_for() -> None:
    made = chain([1.0] * 4, [2.0] * 4, weights=[5] * 4, stash=[1] * 4)
    platform = Platform(num_devices=2, memory_bytes=200, bandwidth=1e9)
    for name in ("madpipe", "contiguous", "0,2,4"):
        plan = make_plan(made, platform, name, weight_versions="vertical-sync", num_micro_batches=2)
        versions = plan.versions
        assert plan.algorithm == name and versions is not None
        assert [versions.num_held(stage) for stage in range(2)] == [2, 2]
        assert [use.weights for use in plan.memory] == [30, 30]
        for convert in (torch_csv, megatron_layout):
            with pytest.raises(ConversionError, match="'vertical-sync', a pipeline that never drains"):
                convert(plan)


def test_what_is_not_planned_is_refused_in_a_sentence() -> None:
    made = chain([1.0, 1.0], [2.0, 2.0])
    platform = Platform(num_devices=2, memory_bytes=100, bandwidth=1e9)
    for what, sentence in (
        ({"period_seconds": 9.0}, "period_seconds is not planned for one"),
        ({"num_stages": 2}, "num_stages is not planned for one"),
        ({"data_parallel": 1, "zero_stage": 1}, "zero_stage=1 is not planned for one"),
        ({"recompute": "micro-batch"}, "recompute='micro-batch' is not planned for one"),
        ({"algorithm": "madpipe-paper"}, "counts three times the weights alone"),
        (
            {"weight_versions": "3bw"},
            "weight_versions is '3bw': it must be one of flush, stashing, 2bw, vertical-sync",
        ),
    ):
        with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
            make_plan(made, platform, **{"weight_versions": "2bw", **what})
    with pytest.raises(ValueError, match="two versions of the weights are among them"):
        make_plan(made, replace(platform, weight_copies=0.5), weight_versions="stashing")


def test_reports_say_how_long_an_update_takes() -> None:
    made = chain([1.0] * 8, [2.0] * 8, weights=[1] * 8, stash=[1] * 8)
    platform = Platform(num_devices=4, memory_bytes=1000, bandwidth=1e9)
    plan = make_plan(made, platform, weight_versions="2bw", num_micro_batches=4)
    assert plan.update_seconds == 24 and plan.flush_step_seconds == 42
    text = " ".join(summary(plan).split())
    assert "an update of 4 micro-batches every 24 s, with weights 1 update old at the most" in text
    assert "a synchronous step of the same allocation takes 42 s, 1.75 times as long" in text
    table = compare(made, platform, ("contiguous", "uniform"), weight_versions="stashing", num_micro_batches=2)
    rows = table.to_dict()["algorithms"]
    assert [row["update_seconds"] for row in rows] == [12, 12] and table.step_lower_bound_seconds is None
    points = frontier(made, platform, "contiguous", num_micro_batches=2, weight_versions="2bw").plans
    assert {each.weight_versions for each in points} == {"2bw"}
