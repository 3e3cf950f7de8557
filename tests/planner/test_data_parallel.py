"""Devices split into several pipelines, whose gradients are all-reduced."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import Chain, InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.data_parallel import (
    bytes_sent,
    bytes_sent_without_pipeline,
    seconds_of,
    splits_of,
)
from tests.planner.instances import chain, random_instance

SMALL = chain([1, 1, 1, 1], [2, 2, 2, 2], weights=[1] * 4, outputs=[4000] * 4)
LARGE = chain([1, 1, 1, 1], [2, 2, 2, 2], weights=[100_000] * 4, outputs=[1] * 4)


def platform(num_devices: int, **changes) -> Platform:
    return Platform(**{"num_devices": num_devices, "memory_bytes": 10**9, "bandwidth": 1000.0, **changes})


def test_plain_data_parallelism_by_hand() -> None:
    """One device runs everything on its share of the micro-batches, then the ring: 2 * 3 rounds of a quarter."""
    plan = make_plan(SMALL, platform(4), num_micro_batches=8, data_parallel=4)
    assert (plan.data_parallel, plan.platform.num_devices, plan.num_micro_batches) == (4, 1, 2)
    assert plan.allreduce_seconds == (6 * 1 / 1000,)
    assert plan.step_seconds == plan.blocking_step_seconds == 2 * 12 + 6 / 1000
    assert replay(plan, SMALL).violations == ()


def test_an_allreduce_runs_while_earlier_stages_drain() -> None:
    """Two pipelines of two stages. The last stage has ended one backward and a transfer before the first."""
    layers = chain([1, 1], [2, 2], weights=[0, 1500], outputs=[0, 0])
    plan = make_plan(layers, platform(4), num_micro_batches=4, data_parallel=2)
    assert [stage.layers for stage in plan.stages] == [(0, 1), (1, 2)]
    assert plan.allreduce_seconds == (0.0, 1.5)  # 1500 bytes in two rounds of a half
    alone = make_plan(layers, platform(2), num_micro_batches=2)
    assert plan.step_seconds == alone.step_seconds  # the last backward of the first stage takes 2 s


@pytest.mark.parametrize(("layers", "degree"), [(SMALL, 4), (LARGE, 1)])
def test_auto_weighs_gradients_against_activations(layers: Chain, degree: int) -> None:
    assert make_plan(layers, platform(4), num_micro_batches=8, data_parallel="auto").data_parallel == degree
    assert make_plan(layers, platform(4), data_parallel="auto").data_parallel == degree


@pytest.mark.parametrize("seed", range(40))
def test_auto_is_the_best_of_all(seed: int) -> None:
    layers, small = random_instance(seed)
    whole = replace(small, num_devices=4)
    num_micro_batches = random.Random(seed).choice([None, 4, 8])
    plans = []
    for degree in (1, 2, 4):
        try:
            plan = make_plan(
                layers, whole, "contiguous", num_micro_batches=num_micro_batches, data_parallel=degree
            )
        except InfeasibleError:
            continue
        assert replay(plan, layers).violations == ()
        assert Plan.from_dict(plan.to_dict()) == plan
        assert plan.platform.num_devices * degree == 4
        assert all(peak <= whole.memory_bytes for peak in plan.peak_memory_bytes)
        plans.append(plan)
    if not plans:
        with pytest.raises(InfeasibleError):
            make_plan(layers, whole, "contiguous", num_micro_batches=num_micro_batches, data_parallel="auto")
        return
    best = make_plan(layers, whole, "contiguous", num_micro_batches=num_micro_batches, data_parallel="auto")
    assert seconds_of(best) == min(map(seconds_of, plans))


def test_the_cut_pays_for_its_allreduces() -> None:
    """The heavy layer stands alone: its all-reduce begins early and runs while the others drain."""
    layers = chain([2, 2, 2, 2], [4, 4, 4, 4], weights=[0, 0, 0, 20_000], outputs=[0] * 4)
    plan = make_plan(layers, platform(4), num_micro_batches=2, data_parallel=2)
    assert plan.boundaries == [0, 3, 4]
    # 8 s of forwards, 4 s of the last layer's backward, and 20 s; a cut in the middle ends 4 s later.
    assert plan.blocking_step_seconds == 32
    even = make_plan(layers, platform(4), [0, 2, 4], num_micro_batches=2, data_parallel=2)
    assert even.blocking_step_seconds == 36


def test_the_replay_finds_a_wrong_allreduce() -> None:
    plan = make_plan(LARGE, platform(4), num_micro_batches=8, data_parallel=2)
    wrong = replace(plan, allreduce_seconds=(0.0,) * len(plan.stages))
    assert any("the all-reduce of stage 0 takes" in violation for violation in replay(wrong, LARGE).violations)
    assert any("one step takes" in violation for violation in replay(wrong, LARGE).violations)
    with pytest.raises(ValueError, match="allreduce_seconds has 1 entries for"):
        replace(plan, allreduce_seconds=(0.0,))


def test_bytes_sent() -> None:
    step = make_plan(LARGE, platform(4), [0, 2, 4], num_micro_batches=8, data_parallel=2)
    assert bytes_sent(step, LARGE) == 8 * 2 * 1 + 2 * 400_000
    assert bytes_sent_without_pipeline(LARGE, 4, per_step=True) == 6 * 400_000
    steady = make_plan(LARGE, platform(4), [0, 2, 4], data_parallel=2)
    assert bytes_sent(steady, LARGE) == 2 * 1 + 2 * 400_000 / 2
    assert bytes_sent_without_pipeline(LARGE, 4, per_step=False) == 6 * 400_000 / 4


@pytest.mark.parametrize("degree", [0, 3, 8, True, 2.0, "many"])
def test_degrees_that_do_not_divide(degree: object) -> None:
    with pytest.raises(ValueError, match="share 4 devices and the 6 micro-batches of a step evenly, so it is one"):
        splits_of(platform(4), 6, degree)


def test_one_pipeline_needs_no_allreduce() -> None:
    """Nor does it fail on weights that would travel for ages."""
    slow = platform(2, bandwidth=1e-3)
    plan = make_plan(chain([1], [1], weights=[10**8]), slow, data_parallel=1)
    assert plan.allreduce_seconds == (0.0,)


def test_command_line(tmp_path) -> None:
    SMALL.save(tmp_path / "chain.json")
    arguments = ["plan", str(tmp_path / "chain.json"), "--devices", "4", "--memory", "1GB", "--bandwidth", "1kB/s"]
    result = CliRunner().invoke(cli, [*arguments, "--micro-batches", "8", "--data-parallel", "auto"])
    assert result.exit_code == 0
    assert (
        "data parallel: 4 such pipelines, all-reduce of a stage 6 ms at most, included in the step"
        in result.output
    )
    result = CliRunner().invoke(cli, [*arguments, "--data-parallel", "some"])
    assert result.exit_code == 2
    assert "'some' is neither a number nor auto" in result.output
    arguments[0] = "compare"
    result = CliRunner().invoke(cli, [*arguments, "--micro-batches", "8", "--data-parallel", "2"])
    assert result.exit_code == 0
    assert "* pipedream-replicated: no plan" in result.output
