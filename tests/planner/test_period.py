"""A chosen period: the least memory that reaches it."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from deepspeed_partition import InfeasibleError, Platform, make_plan, replay
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import stage_memory
from deepspeed_partition.planner.solvers import one_f_one_b
from tests.planner import oracles
from tests.planner.instances import chain, random_instance

ROOM = 10**6


def least_bytes(layers, platform, period: int) -> int | None:
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
        if seed % 16 == 0:  # with a special device, maybe less
            best = make_plan(layers, platform, period_seconds=period, time_limit_seconds=2)
            assert max(best.peak_memory_bytes) <= least
            assert best.period_seconds <= period and replay(best, layers).violations == ()


LAYERS = chain([1] * 4, [2] * 4, outputs=[10] * 4, stash=[100] * 4)


def test_a_longer_period_needs_less() -> None:
    peaks = [
        max(make_plan(LAYERS, Platform(num_devices=4, memory_bytes=ROOM, bandwidth=20.0), "contiguous",
                      period_seconds=period).peak_memory_bytes)
        for period in (3, 4, 6, 9, 12)
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > peaks[-1]


def test_a_fixed_cut_at_a_period_runs_as_it_is() -> None:
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
