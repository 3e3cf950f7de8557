"""A rank that becomes slow is noticed, and noise is not; a plan that is left is said once; figures of steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_partition import Chain, LayerProfile, Platform, make_plan
from deepspeed_partition.planner.cluster.slow_devices import plan_at_speeds, platform_at_speeds
from deepspeed_partition.planner.report.slowdown import LEFT_FACTOR, LEFT_STEPS, LeftPlan, Slow, Slowdown
from deepspeed_partition.planner.report.step_figures import RankSteps, StepFigures

Noise = Callable[[random.Random], float]
NOISES: dict[str, Noise] = {
    "quiet": lambda draw: draw.lognormvariate(0, 0.02),
    "usual": lambda draw: draw.lognormvariate(0, 0.1),
    "much": lambda draw: draw.lognormvariate(0, 0.3),
    "exponential tail": lambda draw: 1 + draw.expovariate(2),
    "heavy tail": lambda draw: draw.paretovariate(2.5),
    "no mean": lambda draw: draw.paretovariate(1),
    "a tenth ten times as long": lambda draw: (10 if draw.random() < 0.1 else 1) * draw.lognormvariate(0, 0.05),
    "a quarter twice as long": lambda draw: (2 if draw.random() < 0.25 else 1) * draw.lognormvariate(0, 0.05),
}
MODERATE = ("quiet", "usual", "a tenth ten times as long")


def in_bursts(draw: random.Random) -> Iterator[float]:
    """Steps of which some follow one another at three times the length: another program runs for a moment."""
    while True:
        long = draw.randint(1, 4) if draw.random() < 0.02 else 0
        yield from (3 * draw.lognormvariate(0, 0.05) for _ in range(long))
        yield draw.lognormvariate(0, 0.05)


def found_at(
    seconds: Iterator[float], num_steps: int, slow_from: int | None = None, factor: float = 1.5
) -> int | None:
    """The step in which a rank with these steps is found to be slow."""
    looks = Slowdown(1.0)
    for step in range(num_steps):
        lasts = next(seconds) * (factor if slow_from is not None and step >= slow_from else 1.0)
        if looks.see(lasts) is not None:
            return step
    return None


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from([*NOISES]), st.integers(0, 2**32), st.floats(0.001, 1000))
def test_noise_is_no_slow_rank(name: str, seed: int, scale: float) -> None:
    """In 1,000 steps each; by the scale they are far shorter than planned, or longer from the start."""
    draw = random.Random(seed)
    assert found_at(iter(lambda: scale * NOISES[name](draw), None), 1000) is None


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_bursts_are_no_slow_rank(seed: int) -> None:
    assert found_at(in_bursts(random.Random(seed)), 1000) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(MODERATE), st.integers(0, 2**32), st.integers(45, 400))
def test_a_slow_rank_is_noticed_within_20_steps(name: str, seed: int, start: int) -> None:
    """One whose layers take 1.5 times as long from some step on."""
    draw = random.Random(seed)
    found = found_at(iter(lambda: NOISES[name](draw), None), start + 40, start)
    assert found is not None and start < found < start + 20


def test_a_slow_rank_is_told_once_and_again_after_it_was_fast() -> None:
    looks, told = Slowdown(2.0), []
    for seconds in [2.0] * 60 + [3.0] * 100 + [2.0] * 40 + [4.0] * 30:
        told += [found] if (found := looks.see(seconds)) is not None else []
    assert told == [Slow(1.5, 3.0, 2.0), Slow(2.0, 4.0, 2.0)]


def test_slower_than_before_and_no_slower_than_planned_is_not_slow() -> None:
    looks = Slowdown(10.0)
    assert not any(looks.see(seconds) for seconds in [2.0] * 60 + [3.0] * 100)


def test_a_left_plan_is_told_once() -> None:
    draw = random.Random(0)
    long = [(2.0 if draw.random() < 0.9 else 0.5) for _ in range(10 * LEFT_STEPS)]
    looks = LeftPlan(1.0)
    told = [found for seconds in long if (found := looks.see(seconds)) is not None]
    assert told == [2.0]
    looks = LeftPlan(1.0)
    often = [(9.0 if draw.random() < 0.3 else LEFT_FACTOR * 0.9) for _ in range(1000)]
    assert not any(map(looks.see, often))


# The plan made again

CHAIN = Chain(
    input_bytes=1000,
    layers=tuple(
        LayerProfile(
            name=str(index),
            forward_seconds=0.01,
            backward_seconds=0.02,
            weight_bytes=1000,
            output_bytes=1000,
            num_trainable_parameters=250,
        )
        for index in range(8)
    ),
)
PLATFORM = Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9)


@pytest.mark.parametrize("speeds", [(1.0, 2 / 3), (2 / 3, 1.0)])
def test_layers_leave_a_slow_device(speeds: tuple[float, float]) -> None:
    """Of 8 equal layers one of 2/3 of the speed has 3, so that a step takes as long as both work."""
    plan = make_plan(CHAIN, PLATFORM, "contiguous", num_micro_batches=8, every_device_trains=True)
    assert plan.step is not None
    again, takes = plan_at_speeds(plan, CHAIN, speeds, "contiguous", time_limit_seconds=1)
    share = [0, 0]
    for stage in again.stages:
        share[stage.device] += stage.layers[1] - stage.layers[0]
    slow = speeds.index(min(speeds))
    assert share[slow] == 3 and share[1 - slow] == 5
    # As it was it takes 1.5 times as long on the slow device, and never less than its work.
    assert takes >= 1.5 * 8 * 4 * 0.03 and again.step_seconds is not None and again.step_seconds < 0.9 * takes
    # Back at the speed of before it is the first plan's step again.
    back, slowly = plan_at_speeds(again, CHAIN, (1.0, 1.0), "contiguous", time_limit_seconds=1)
    assert back.step_seconds == pytest.approx(plan.step_seconds) and slowly > plan.step.step_seconds


def test_the_present_step_at_the_same_speeds_is_the_plans() -> None:
    plan = make_plan(CHAIN, PLATFORM, "contiguous", num_micro_batches=4, every_device_trains=True)
    _, takes = plan_at_speeds(plan, CHAIN, (1.0, 1.0), "contiguous", time_limit_seconds=1)
    assert takes == pytest.approx(plan.step_seconds)
    ports = replace(PLATFORM, port_bandwidth=1e8, devices_per_port=1)
    assert platform_at_speeds(ports, (1.0, 0.5)).bandwidth == 1e8


# Figures


def rank(step: float, stages: dict[int, float], waiting: dict[tuple[int, int], float], peak: int | None = None):
    return RankSteps(
        num_steps=3, step_seconds=step, stage_seconds=stages, waiting_seconds=waiting, peak_bytes=peak
    )


def test_figures_are_of_the_slowest_pipeline() -> None:
    one = [rank(10.0, {0: 4.0, 2: 2.0}, {(1, 0): 1.0}, 100), rank(9.0, {1: 8.0}, {(0, 1): 0.5, (1, 0): 0.25})]
    other = [rank(8.0, {0: 5.0, 2: 1.0}, {(1, 0): 2.0}, 50), rank(8.0, {1: 8.0}, {})]
    plan = make_plan(CHAIN, PLATFORM, "contiguous", num_micro_batches=4)
    figures = StepFigures.of([one, other], plan, 4)
    assert figures.step_seconds == 10.0 and figures.bubble_share == pytest.approx(1 - 14 / 20)
    assert figures.stage_seconds == {0: 5.0, 1: 8.0, 2: 2.0}
    assert figures.waiting_seconds == {(1, 0): 2.0, (0, 1): 0.5}
    assert figures.named() == {
        "madpipe/step_seconds": 10.0,
        "madpipe/planned_step_seconds": plan.step_seconds,
        "madpipe/bubble_share": pytest.approx(0.3),
        "madpipe/stage_0_seconds": 5.0,
        "madpipe/stage_1_seconds": 8.0,
        "madpipe/stage_2_seconds": 2.0,
        "madpipe/link_0_to_1_waiting_seconds": 0.5,
        "madpipe/link_1_to_0_waiting_seconds": 2.0,
        "madpipe/rank_0_peak_bytes": 100.0,
        "madpipe/rank_0_planned_peak_bytes": float(plan.peak_memory_bytes[0]),
    }
    assert StepFigures.of([one], plan, 5).planned_step_seconds is None
    assert StepFigures.of([one], None, 4).planned_peak_bytes == {}
