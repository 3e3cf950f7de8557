"""Time against memory: points are plans, none better than another, and none is missing at the ends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import InfeasibleError, Plan, Platform, replay
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.report.frontier import RESOLUTION, frontier
from tests.planner.instances import chain, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan

LAYERS = chain([1] * 6, [2] * 6, outputs=[50] * 6, input_bytes=50, stash=[300, 250, 200, 150, 100, 50])


def platform(num_devices: int = 3, memory_bytes: int = 10**9) -> Platform:
    return Platform(num_devices=num_devices, memory_bytes=memory_bytes, bandwidth=100.0)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_micro_batches", [None, 4])
def test_points_are_plans_for_less_and_less_memory(seed: int, num_micro_batches: int | None) -> None:
    layers, small = random_instance(seed)
    roomy = Platform(num_devices=small.num_devices, memory_bytes=10**6, bandwidth=small.bandwidth)
    found = frontier(layers, roomy, "contiguous", num_micro_batches=num_micro_batches, recompute="never")
    assert found.complete
    memory = [found.memory_bytes(plan) for plan in found.plans]
    slowdowns = [found.slowdown(plan) for plan in found.plans]
    assert memory == sorted(set(memory), reverse=True)
    assert slowdowns == sorted(set(slowdowns)) and slowdowns[0] == 0
    for plan in found.plans:
        assert replay(plan, layers).violations == ()
    fastest = make_plan(layers, roomy, "contiguous", num_micro_batches=num_micro_batches, recompute="never")
    assert found.plans[0].period_seconds <= fastest.period_seconds or num_micro_batches
    tighter = Platform(num_devices=small.num_devices, memory_bytes=memory[-1] - 1, bandwidth=small.bandwidth)
    with pytest.raises(InfeasibleError):
        make_plan(layers, tighter, "contiguous", num_micro_batches=num_micro_batches, recompute="never")


def test_nothing_between_two_points_is_faster_than_the_upper_one_in_their_memory() -> None:
    found = frontier(LAYERS, platform(), "contiguous", recompute="never")
    for upper, lower in zip(found.plans, found.plans[1:], strict=False):
        between = found.memory_bytes(upper) - 1
        if between - found.memory_bytes(lower) > RESOLUTION * found.memory_bytes(upper):
            plan = make_plan(LAYERS, platform(memory_bytes=between), "contiguous")
            assert upper.period_seconds <= plan.period_seconds


@pytest.mark.parametrize("seed", range(12))
def test_sharing_devices_never_costs_time_or_memory(seed: int) -> None:
    layers, small = random_instance(seed, most_layers=5, most_devices=3)
    roomy = Platform(num_devices=small.num_devices, memory_bytes=10**6, bandwidth=small.bandwidth)
    shared, contiguous = (
        frontier(layers, roomy, algorithm, time_limit_seconds=600, recompute="never")
        for algorithm in ("madpipe", "contiguous")
    )
    ties = any(layer.shared_weights for layer in layers.layers)
    assert shared.complete != ties and all(plan.proved for plan in shared.plans)
    for plan in contiguous.plans:
        memory, seconds = contiguous.memory_bytes(plan) / (1 - RESOLUTION), plan.period_seconds * (1 + 2e-6)
        assert any(shared.memory_bytes(each) <= memory and each.period_seconds <= seconds for each in shared.plans)
    for each in shared.plans:
        assert replay(each, layers).violations == ()
        least = make_plan(layers, roomy, period_seconds=each.period_seconds)
        assert shared.memory_bytes(each) <= max(least.peak_memory_bytes) * (1 + 2e-6)


def test_the_time_is_up() -> None:
    stopped = Deadline()
    stopped.stop()
    found = frontier(LAYERS, platform(), "contiguous", deadline=stopped)
    assert (len(found.plans), found.complete) == (1, False)


def test_nothing_fits_at_all() -> None:
    with pytest.raises(InfeasibleError):
        frontier(LAYERS, platform(memory_bytes=10), "contiguous")


def test_command_line(tmp_path) -> None:
    LAYERS.save(tmp_path / "chain.json")
    arguments = ["frontier", str(tmp_path / "chain.json"), "--devices", "3", "--bandwidth", "100B/s"]
    arguments += ["--algorithm", "contiguous"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert "slower" in result.output.splitlines()[-1] or "No plan saves memory" in result.output.splitlines()[-1]
    result = CliRunner().invoke(cli, [*arguments, "--json", "--memory", "3kB"])
    points = json.loads(result.stdout)["points"]
    assert points[0]["slowdown"] == 0 and all(point["memory_bytes"] <= 3000 for point in points)
    assert all(point["plan"]["format"] == "madpipe-plan/1" for point in points)
    # No memory at all was once taken for a --memory that was left out.
    result = CliRunner().invoke(cli, [*arguments, "--memory", "0"])
    assert isinstance(result.exception, ValueError) and "memory_bytes is 0" in str(result.exception)


@pytest.mark.parametrize("option", ["--split-backward", "--recompute=micro-batch", "--port-bandwidth=50B/s"])
def test_what_no_chosen_period_is_planned_with(option: str, tmp_path) -> None:
    """They failed by an error about ``period_seconds``, which nobody had given."""
    halves = [replace(each, backward_input_seconds=1, backward_weight_seconds=1) for each in LAYERS.layers]
    layers = replace(LAYERS, layers=tuple(halves))
    layers.save(tmp_path / "chain.json")
    arguments = ["frontier", str(tmp_path / "chain.json"), "--devices", "3", "--bandwidth", "100B/s", option]
    result = CliRunner().invoke(cli, [*arguments, "--algorithm", "contiguous", "--time-limit", "1", "--json"])
    assert result.exit_code == 0, result.exception
    points = json.loads(result.stdout)["points"]
    assert points and all(replay(Plan.from_dict(point["plan"]), layers).violations == () for point in points)
