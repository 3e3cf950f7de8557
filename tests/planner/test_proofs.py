"""What is proved, and of what: a period, the memory of a period, or a step; one is never taken for another."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deepspeed_partition import Plan, Platform, make_plan
from deepspeed_partition.cli import run
from deepspeed_partition.planner.report import draw
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.report.terminal import as_text
from tests.planner.instances import chain

LAYERS = chain([3, 1, 4, 1, 5], [2, 7, 1, 8, 2], outputs=[1] * 5, stash=[4, 2, 6, 1, 3])
PLATFORM = Platform(num_devices=3, memory_bytes=40, bandwidth=4.0)
ARGUMENTS = ["--devices", "3", "--memory", "40", "--bandwidth", "4"]
PROOF, STEP_PROOF = "proved best", "proved shortest"


@pytest.fixture
def path(tmp_path):
    LAYERS.save(tmp_path / "chain.json")
    return str(tmp_path / "chain.json")


@pytest.mark.parametrize("algorithm", ["madpipe", "contiguous", [0, 2, 5]])
def test_what_is_proved_of_a_step_is_not_proved_of_its_period(algorithm, path, tmp_path, capsys):
    """It once said "proved best: one special device" beside a step that nothing proved."""
    assert make_plan(LAYERS, PLATFORM).proved
    plan = make_plan(LAYERS, PLATFORM, algorithm, num_micro_batches=4)
    assert (plan.proved, plan.proved_class, plan.proved_of) == (False, None, None)
    text = draw.summary(plan, 200)
    assert (STEP_PROOF in text) == plan.step_proved == (algorithm == "contiguous")
    assert ("the best found and not proved" in text) == (not plan.step_proved)
    assert PROOF not in text
    name = algorithm if isinstance(algorithm, str) else ",".join(map(str, algorithm))
    saved = tmp_path / "plan.json"
    steps = ["--micro-batches", "4", "--algorithm", name]
    assert run(["plan", path, *ARGUMENTS, *steps, "-o", str(saved)]) == 0
    assert run(["show", str(saved)]) == 0
    assert PROOF not in capsys.readouterr().out
    data = json.loads(saved.read_text())
    assert data["proved"] is False and not data.keys() & {"proved_class", "proved_of"}
    assert data["step_proved"] == plan.step_proved


def test_a_plan_of_others_that_marks_a_step_is_not_believed():
    plan = make_plan(LAYERS, PLATFORM, num_micro_batches=4)
    assert PROOF not in draw.summary(replace(plan, proved=True, proved_class="one special device"))


def test_a_period_and_its_memory_are_told_apart():
    plan = make_plan(LAYERS, PLATFORM)
    assert (plan.proved, plan.proved_of) == (True, "period")
    assert f"period {PROOF}: {plan.proved_class}" in draw.summary(plan, 200)
    least = make_plan(LAYERS, PLATFORM, period_seconds=20, recompute="never")
    assert (least.proved, least.proved_of) == (True, "memory")
    assert f"memory proved least at this period: {least.proved_class}" in draw.summary(least, 200)
    for each in (plan, least):
        assert Plan.from_dict(each.to_dict()) == each
    old = {key: value for key, value in plan.to_dict().items() if key != "proved_of"}
    assert Plan.from_dict(old).proved


def test_tables_say_of_steps_what_is_proved_of_steps():
    steps = compare(LAYERS, PLATFORM, ("madpipe", "contiguous", "uniform"), num_micro_batches=4)
    rows = steps.to_dict()["algorithms"]
    assert not any(row["proved"] for row in rows)
    assert [row["step_proved"] for row in rows] == [False, True, False]
    assert steps.to_dict()["step_lower_bound_seconds"] == rows[0]["step_lower_bound_seconds"]
    text = draw.comparison_text(steps, 200)
    assert text.count("yes") == 1 and "lower bound of the step" in text
    of_partitions = rows[1]["step_lower_bound_seconds"] != steps.to_dict()["step_lower_bound_seconds"]
    assert ("that of contiguous is above the lower bound of contiguous partitions" in text) == of_partitions
    for row in rows:
        line = next(line for line in text.splitlines() if row["algorithm"] in line)
        # algorithm, step, its unit, its gap
        assert line.split()[3] == f"{row['step_gap']:.1%}"
    cut_short = frontier(LAYERS, PLATFORM, num_micro_batches=4, time_limit_seconds=2)
    assert "yes" not in as_text([draw.frontier_table(cut_short)])
    split = compare(LAYERS, PLATFORM, ("uniform",), num_micro_batches=4, data_parallel=1)
    assert split.step_lower_bound_seconds is None
    periods = compare(LAYERS, PLATFORM, ("madpipe", "contiguous"))
    assert {row["proved_of"] for row in periods.to_dict()["algorithms"] if row["proved"]} == {"period"}
    assert "yes" in as_text([draw.frontier_table(frontier(LAYERS, PLATFORM))])
