"""What ZeRO-1 shares among data-parallel pipelines counts once per number of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.data_parallel import splits_of, weight_copies_of
from deepspeed_partition.planner.report.comparison import compare
from tests.planner.instances import chain

GB = 10**9
ADAM_MIXED = 8
"""bf16 weights and gradients, an fp32 master copy and two fp32 states: 16 bytes per weight of 2."""


def seven_billion():
    """A transformer of 7B parameters in bf16: an embedding, 32 equal blocks, a head; micro-batches of 1 x 4096."""
    tensor = 2 * 4096 * 4096
    return chain(
        [0.001] + [0.020] * 32 + [0.012],
        [0.002] + [0.040] * 32 + [0.024],
        weights=[262 * 10**6] + [405 * 10**6] * 32 + [262 * 10**6],
        outputs=[tensor] * 33 + [4],
        input_bytes=8 * 4096,
        stash=[8 * 4096] + [600 * 10**6] * 32 + [1_050 * 10**6],
    )


EIGHT = Platform(num_devices=8, memory_bytes=80 * GB, bandwidth=50e9, weight_copies=ADAM_MIXED)


@pytest.mark.parametrize(
    ("copies", "num_pipelines", "zero_stage", "kept"),
    [
        (4, 4, 1, 2.5),  # Adam in fp32: weights, gradients, and a quarter of two states
        (8, 8, 1, 2.75),
        (4, 4, 0, 4),
        (4, 4, None, 4),
        (4, 1, 1, 4),
        (2, 4, 1, 2),  # plain SGD has nothing to share
        (1.5, 4, 1, 1.5),
    ],
)
def test_all_but_weights_and_gradients_are_shared(copies, num_pipelines, zero_stage, kept):
    assert weight_copies_of(copies, num_pipelines, zero_stage) == kept


def test_auto_finds_data_parallelism_that_only_zero_has_room_for():
    """Every device holds the whole model if the optimizer's states are shared: 38 GB of 80 instead of 112."""
    model = seven_billion()
    without = make_plan(model, EIGHT, "contiguous", num_micro_batches=64, data_parallel="auto")
    same = make_plan(model, EIGHT, "contiguous", num_micro_batches=64, data_parallel="auto", zero_stage=0)
    shared = make_plan(model, EIGHT, "contiguous", num_micro_batches=64, data_parallel="auto", zero_stage=1)
    assert replace(same, zero_stage=None, planning_seconds=0) == replace(without, planning_seconds=0)
    assert (without.data_parallel, without.zero_stage, shared.data_parallel, shared.zero_stage) == (4, None, 8, 1)
    assert shared.step_seconds < 0.95 * without.step_seconds
    # The plan says what one pipeline keeps, so whoever replays it needs no more than the plan.
    assert shared.platform.weight_copies == 2.75
    weights = sum(layer.weight_bytes for layer in model.layers)
    assert shared.memory[0].weights == 11 * weights // 4
    assert replay(shared, model).violations == ()
    assert Plan.from_dict(shared.to_dict()) == shared
    with pytest.raises(InfeasibleError):
        make_plan(model, EIGHT, "contiguous", num_micro_batches=64, data_parallel=8)


def test_each_split_keeps_its_own_share():
    splits = splits_of(EIGHT, 8, "auto", 1)
    assert [split.platform.weight_copies for split in splits] == [8, 5, 3.5, 2.75]
    assert {split.platform.weight_copies for split in splits_of(EIGHT, 8, "auto")} == {8}


@pytest.mark.parametrize("stage", [2, 3, -1, True, "1", 1.0])
def test_other_stages_are_refused(stage):
    with pytest.raises(ValueError, match="it must be 0 or 1; stages 2 and 3 divide"):
        make_plan(chain([1], [1]), replace(EIGHT, num_devices=1), zero_stage=stage)
    with pytest.raises(ValueError, match="it must be 0 or 1"):
        compare(chain([1], [1]), replace(EIGHT, num_devices=1), zero_stage=stage)


def test_command_line(tmp_path):
    seven_billion().save(tmp_path / "chain.json")
    chain_file, plan_file = str(tmp_path / "chain.json"), str(tmp_path / "plan.json")
    platform = ["--devices", "8", "--memory", "80GB", "--bandwidth", "50GB/s", "--weight-copies", "8"]
    step = ["--micro-batches", "64", "--algorithm", "contiguous"]
    zero = ["--data-parallel", "auto", "--zero", "1"]
    run = CliRunner().invoke
    result = run(cli, ["plan", chain_file, *platform, *step, *zero, "-o", plan_file])
    assert result.exit_code == 0
    assert "data parallel: 8 such pipelines" in result.output
    assert "sharing by ZeRO-1, each keeps 2.75 copies of its weights" in " ".join(result.output.split())
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert (saved["zero_stage"], saved["platform"]["weight_copies"]) == (1, 2.75)
    assert run(cli, ["check", plan_file, chain_file]).exit_code == 0
    result = run(cli, ["plan", chain_file, *platform, *step, "--zero", "1"])
    assert "--zero 1 shares nothing in a single pipeline" in result.output
    assert result.exit_code == 0
    result = run(cli, ["plan", chain_file, *platform, *step, *zero[:-1], "2"])
    assert result.exit_code == 2
    assert "'2' is not one of '0', '1'" in result.output
    alone = ["plan", chain_file, *platform, "--algorithm", "pipedream-replicated", "--zero", "1"]
    assert "--zero has no effect with pipedream-replicated" in run(cli, alone).output


def test_a_comparison_says_what_each_plan_keeps():
    found = compare(
        seven_billion(), EIGHT, ("contiguous", "uniform"), num_micro_batches=64, data_parallel=8, zero_stage=1
    )
    rows = found.to_dict()["algorithms"]
    assert [(row["data_parallel"], row["weight_copies"]) for row in rows] == [(8, 2.75)] * 2


@pytest.mark.parametrize("data_parallel", [2, "auto"])
def test_the_bound_of_a_comparison_is_below_the_plans_of_all_pipelines(data_parallel):
    """One pipeline of all devices keeps all 8 copies of the weights, each of two keeps 5 of them."""
    model = chain([1, 1], [2, 2], weights=[100, 100], outputs=[1, 1], stash=[100, 1])
    four = Platform(num_devices=4, memory_bytes=950, bandwidth=1e9, weight_copies=ADAM_MIXED)
    found = compare(
        model, four, data_parallel=data_parallel, zero_stage=1, recompute="never", time_limit_seconds=1
    )
    assert any(contender.plan is not None and contender.plan.data_parallel == 2 for contender in found.contenders)
    for contender in found.fitting:
        assert contender.plan is not None
        assert found.lower_bound_seconds <= contender.plan.lower_bound_seconds <= contender.plan.period_seconds
