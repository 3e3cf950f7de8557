"""A chosen period: the least memory that reaches it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import Chain, InfeasibleError, Platform, replay
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.cluster.scheme_choice import rank_schemes
from deepspeed_partition.planner.memory import stage_memory
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.draw import frontier_text
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.solvers.pattern import one_f_one_b
from tests.planner import oracles
from tests.planner.instances import chain, random_instance, three_layers
from tests.planner.instances import plan_without_recomputation as make_plan

ROOM = 10**6


def least_bytes(layers, platform, period: float) -> int | None:
    """Of the largest device, over every cut whose stages and transfers fit into ``period`` seconds."""
    times, best = TimedChain(layers, platform), None
    ticks = times.clock.ticks(period)
    for cuts in oracles.all_cuts(layers.num_layers, platform.num_devices):
        loads = one_f_one_b.pseudo_stage_loads(times, cuts)
        if max(loads) <= ticks:
            counts = one_f_one_b.in_flight(loads, ticks)
            stages = zip(cuts, cuts[1:], counts, strict=False)
            need = max(stage_memory(layers, platform, start, stop, count).total for start, stop, count in stages)
            best = need if best is None else min(best, need)
    return best


@pytest.mark.parametrize("seed", range(80))
def test_least_memory_of_all_cuts(seed: int) -> None:
    layers, small = random_instance(seed, most_layers=6, most_devices=3)
    platform = Platform(num_devices=small.num_devices, memory_bytes=ROOM, bandwidth=small.bandwidth)
    longest = round(layers.compute_seconds) + 5
    for period in {1, longest // 3, longest // 2, longest}:
        if period < 1:
            continue
        least = least_bytes(layers, platform, period)
        if least is None:
            with pytest.raises(InfeasibleError, match="in any memory: the shortest is"):
                make_plan(layers, platform, "contiguous", period_seconds=period)
            continue
        plan = make_plan(layers, platform, "contiguous", period_seconds=period)
        assert max(plan.peak_memory_bytes) <= least
        assert plan.period_seconds <= period
        assert (plan.proved, replay(plan, layers).violations) == (True, ())


def least_bytes_of_all(layers, platform, period: int, enough: int) -> int:
    """Over all allocations and all of their patterns, found by trying every order and shift; up to ``enough``."""

    def exists(memory_bytes: int) -> bool:
        tight = replace(platform, memory_bytes=memory_bytes)
        return any(
            oracles.a_pattern_exists(layers, tight, placed, period)
            for placed in oracles.all_placements(layers.num_layers, platform.num_devices)
        )

    while enough > 1 and exists(enough - 1):
        enough -= 1
    assert exists(enough)
    return enough


@pytest.mark.parametrize("seed", range(24))
def test_least_memory_of_all_orders_and_shifts(seed: int) -> None:
    """Three layers on two devices, times so small that every pattern of every allocation can be tried."""
    pick = random.Random(seed)
    layers = three_layers(pick)
    platform = Platform(num_devices=2, memory_bytes=ROOM, bandwidth=2)
    period = pick.randint(4, 5)
    try:
        plan = make_plan(layers, platform, period_seconds=period)
    except InfeasibleError:
        assert not any(
            oracles.a_pattern_exists(layers, platform, placed, period) for placed in oracles.all_placements(3, 2)
        )
        return
    assert plan.proved_class == "any allocation" and plan.period_seconds <= period
    peak = max(plan.peak_memory_bytes)
    assert least_bytes_of_all(layers, platform, period, peak) == peak


@pytest.mark.parametrize("seed", range(40))
def test_the_shortest_period_in_that_memory(seed: int) -> None:
    """The least memory at a period, and the shortest period in a memory, are one question from two sides."""
    layers, small = random_instance(seed, most_layers=6, most_devices=3)
    platform = Platform(num_devices=small.num_devices, memory_bytes=ROOM, bandwidth=small.bandwidth)
    period = make_plan(layers, platform).period_seconds * (1 + seed % 3)
    plan = make_plan(layers, platform, period_seconds=period)
    contiguous = least_bytes(layers, platform, period)
    peak = max(plan.peak_memory_bytes)
    shares = any(layer.shared_weights for layer in layers.layers)
    assert plan.proved and (plan.proved_class != "contiguous" or shares)
    assert plan.period_seconds <= period and replay(plan, layers).violations == ()
    assert contiguous is None or peak <= contiguous
    assert make_plan(layers, replace(platform, memory_bytes=peak)).period_seconds <= period * (1 + 2e-6)
    try:
        other = make_plan(layers, replace(platform, memory_bytes=peak - 1))
    except InfeasibleError:
        return
    devices = [stage.device for stage in other.stages]
    outside = (
        plan.proved_class == "one special device" and sum(devices.count(each) > 1 for each in set(devices)) > 1
    )
    assert other.period_seconds > period * (1 - 2e-6) or outside


def test_a_period_that_no_contiguous_cut_reaches() -> None:
    """2, 4 and 2 s on two devices: 6 s contiguously, 4 s with the ends on one device."""
    layers = chain([1, 2, 1], [1, 2, 1], outputs=[0, 0, 0], stash=[5, 5, 5])
    platform = Platform(num_devices=2, memory_bytes=ROOM, bandwidth=1.0)
    plan = make_plan(layers, platform, period_seconds=5)
    assert plan.period_seconds <= 5 and not plan.is_contiguous
    with pytest.raises(InfeasibleError, match=r"madpipe has a period of 3 s in any memory: the shortest is 4 s"):
        make_plan(layers, platform, period_seconds=3)


def test_what_is_proved_is_the_memory() -> None:
    """A period as short as the bound was once called the best of any allocation, whatever it took."""
    platform = Platform(num_devices=4, memory_bytes=ROOM, bandwidth=20.0)
    assert make_plan(LAYERS, platform, [0, 1, 2, 3, 4]).proved_class == "any allocation"
    assert not make_plan(LAYERS, platform, [0, 1, 2, 3, 4], period_seconds=3).proved
    assert make_plan(LAYERS, platform, "contiguous", period_seconds=3).proved_class == "contiguous"


def tied_ends() -> Chain:
    """Layers of 3, 6 and 3 s; the first and the last have the same 100 bytes of weights."""
    made = chain([1, 2, 1], [2, 4, 2], weights=[100, 10, 100], outputs=[1, 1, 1], input_bytes=1)
    ends = {"shared_weights": {"embedding": 100}}
    return replace(made, layers=tuple(replace(each, **(ends if index != 1 else {})) for index, each in
                                      enumerate(made.layers)))  # fmt: skip


def test_nothing_is_proved_of_allocations_that_share_weights() -> None:
    """One device with both ends keeps their weights once, which no search beyond contiguous partitions counts."""
    layers, platform = tied_ends(), Platform(num_devices=2, memory_bytes=ROOM, bandwidth=100.0)
    best = make_plan(layers, platform)
    assert best.period_seconds == 6 and not best.is_contiguous
    least = make_plan(layers, platform, "contiguous", period_seconds=9)
    assert max(best.peak_memory_bytes) < max(least.peak_memory_bytes)
    assert (least.proved, least.proved_class) == (True, "contiguous")
    small = replace(platform, memory_bytes=max(best.peak_memory_bytes))
    plan = make_plan(layers, small, period_seconds=9)
    assert (plan.period_seconds, plan.proved, plan.class_lower_bound_seconds) == (6, False, None)
    with pytest.raises(InfeasibleError, match=r"takes \d+ bytes .* in the best plan found, 1 byte more"):
        make_plan(layers, replace(small, memory_bytes=small.memory_bytes - 1), period_seconds=9)


@pytest.mark.parametrize("memory_bytes", [1000, 340, 309])
def test_a_period_takes_no_more_than_the_shortest_plan_where_layers_share_weights(memory_bytes: int) -> None:
    """A plan of 9 s and 334 bytes was returned though one of 6 s and 309 bytes was known."""
    platform = Platform(num_devices=2, memory_bytes=memory_bytes, bandwidth=100.0)
    plan = make_plan(tied_ends(), platform, period_seconds=9, time_limit_seconds=1)
    assert (plan.period_seconds, max(plan.peak_memory_bytes), plan.proved) == (6, 309, False)


def test_no_memory_is_called_the_smallest_where_layers_share_weights() -> None:
    """The allocation of 309 bytes was there, and 333 were "the smallest memory that would do"."""
    layers, roomy = tied_ends(), Platform(num_devices=2, memory_bytes=1000, bandwidth=100.0)
    best = make_plan(layers, roomy, time_limit_seconds=1)
    assert (max(best.peak_memory_bytes), best.period_seconds) == (309, 6)
    small = replace(roomy, memory_bytes=308)
    for algorithm, words in (
        ("madpipe", "there are; 333 bytes (333 B) would do: "),
        ("contiguous", "there are; the smallest memory that would do is 333 bytes (333 B): "),
    ):
        with pytest.raises(InfeasibleError) as refusal:
            make_plan(layers, small, algorithm, time_limit_seconds=1)
        assert words in str(refusal.value) and refusal.value.smallest_memory_bytes == 333
    words = compare(layers, small, ("madpipe", "contiguous"), time_limit_seconds=1).nothing_fits()
    assert "per device; 333 bytes (333 B) would do, for madpipe: " in str(words)
    rows = rank_schemes(layers, [small], 4, time_limit_seconds=1).choices
    assert "would fit into 333 B" in [each.reason for each in rows if each.scheme == "MadPipe 1 x 2"]


def test_a_frontier_proves_nothing_of_allocations_that_share_weights() -> None:
    """Points of 334 and 333 bytes were proved, and one of 309 is faster."""
    platform = Platform(num_devices=2, memory_bytes=340, bandwidth=100.0)
    for algorithm, memory, is_exact in (("madpipe", [309], False), ("contiguous", [334, 333], True)):
        found = frontier(tied_ends(), platform, algorithm, recompute="never")
        points = found.to_dict()["points"]
        assert [(point["memory_bytes"], point["proved"]) for point in points] == [
            (each, is_exact) for each in memory
        ]
        assert found.complete == is_exact
        text = frontier_text(found)
        assert (" yes " in text, "Less memory may be enough" in text) == (is_exact, not is_exact)


@pytest.mark.parametrize("memory_bytes", [400, 600])
def test_no_class_bounds_allocations_that_share_weights(memory_bytes: int) -> None:
    layers, platform = tied_ends(), Platform(num_devices=2, memory_bytes=memory_bytes, bandwidth=100.0)
    assert make_plan(layers, platform).class_lower_bound_seconds is None


LAYERS = chain([1] * 4, [2] * 4, outputs=[10] * 4, stash=[100] * 4)


def test_a_longer_period_needs_less() -> None:
    peaks = [
        max(make_plan(LAYERS, Platform(num_devices=4, memory_bytes=ROOM, bandwidth=20.0), "contiguous",
                      period_seconds=period).peak_memory_bytes)
        for period in (3, 4, 6, 9, 12)
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]


def test_a_fixed_partition_at_a_period_runs_as_it_is() -> None:
    platform = Platform(num_devices=2, memory_bytes=ROOM, bandwidth=20.0)
    plan = make_plan(LAYERS, platform, [0, 1, 4], period_seconds=10)
    assert (plan.boundaries, plan.period_seconds) == ([0, 1, 4], 10)
    with pytest.raises(InfeasibleError, match=r"no plan of 0,1,4 has a period of 8 s .* the shortest is 9 s"):
        make_plan(LAYERS, platform, [0, 1, 4], period_seconds=8)


def test_what_a_period_does_not_go_with() -> None:
    platform = Platform(num_devices=2, memory_bytes=150, bandwidth=20.0)
    # Three micro-batches of two layers, two buffers: 6 s of the last stage, 1 s of transfers, 6 s of the first.
    with pytest.raises(InfeasibleError, match=r"takes 620 bytes .* more than there are: choose a longer period"):
        make_plan(LAYERS, platform, "contiguous", period_seconds=6)
    with pytest.raises(ValueError, match="leave one of them out"):
        make_plan(LAYERS, platform, period_seconds=6, num_micro_batches=4)
    for wrong in (0, -1.0, True, "6"):
        with pytest.raises(ValueError, match="period_seconds is"):
            make_plan(LAYERS, platform, period_seconds=wrong)


def test_command_line(tmp_path) -> None:
    LAYERS.save(tmp_path / "chain.json")
    arguments = ["plan", str(tmp_path / "chain.json"), "--devices", "2", "--memory", "1MB", "--bandwidth", "20B/s"]
    result = CliRunner().invoke(cli, [*arguments, "--period", "8s"])
    assert result.exit_code == 0 and "period 8 s per micro-batch" in result.output


def test_several_pipelines_need_as_little_as_the_best_number_of_them() -> None:
    platform = Platform(num_devices=4, memory_bytes=ROOM, bandwidth=20.0)
    best = make_plan(LAYERS, platform, data_parallel="auto", period_seconds=12)
    for degree in (1, 2, 4):
        plan = make_plan(LAYERS, platform, data_parallel=degree, period_seconds=12)
        assert max(best.peak_memory_bytes) <= max(plan.peak_memory_bytes)
    assert best.data_parallel == 1


def test_what_takes_no_memory() -> None:
    light = chain([1] * 4, [2] * 4)
    platform = Platform(num_devices=2, memory_bytes=ROOM, bandwidth=20.0)
    assert make_plan(light, platform, period_seconds=12).peak_memory_bytes == (0, 0)


def test_the_shortest_period_is_that_of_as_many_stages() -> None:
    platform = Platform(num_devices=4, memory_bytes=ROOM, bandwidth=20.0)
    with pytest.raises(InfeasibleError, match="the shortest is 6 s"):
        make_plan(LAYERS, platform, "contiguous", num_stages=2, period_seconds=4)


@pytest.mark.parametrize("options", [
    {"period_seconds": math.inf}, {"period_seconds": 10**400}, {"period_seconds": math.nan},
    {"time_limit_seconds": "3"}, {"time_limit_seconds": True},
])  # fmt: skip
def test_numbers_that_are_none(options: dict) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(options))} is"):
        make_plan(LAYERS, Platform(num_devices=2, memory_bytes=ROOM, bandwidth=20.0), **options)
