"""What is proved, and of what: a period, the memory of a period, and never a step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deepspeed_partition import Plan, Platform, make_plan
from deepspeed_partition.cli import run
from deepspeed_partition.planner.report import draw
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.frontier import frontier
from tests.planner.instances import chain

LAYERS = chain([3, 1, 4, 1, 5], [2, 7, 1, 8, 2], outputs=[1] * 5, stash=[4, 2, 6, 1, 3])
PLATFORM = Platform(num_devices=3, memory_bytes=40, bandwidth=4.0)
ARGUMENTS = ["--devices", "3", "--memory", "40", "--bandwidth", "4"]
PROOF = "proved best"


@pytest.fixture
def path(tmp_path):
    LAYERS.save(tmp_path / "chain.json")
    return str(tmp_path / "chain.json")


@pytest.mark.parametrize("algorithm", ["madpipe", "contiguous", [0, 2, 5]])
def test_of_a_step_nothing_is_proved(algorithm, path, tmp_path, capsys):
    """It once said "proved best: one special device" beside a step that nothing proves."""
    assert make_plan(LAYERS, PLATFORM).proved
    plan = make_plan(LAYERS, PLATFORM, algorithm, num_micro_batches=4)
    assert (plan.proved, plan.proved_class, plan.proved_of) == (False, None, None)
    text = draw.summary(plan)
    assert "the best found and not proved" in text and PROOF not in text
    name = algorithm if isinstance(algorithm, str) else ",".join(map(str, algorithm))
    saved = tmp_path / "plan.json"
    steps = ["--micro-batches", "4", "--algorithm", name]
    assert run(["plan", path, *ARGUMENTS, *steps, "-o", str(saved)]) == 0
    assert run(["show", str(saved)]) == 0
    assert PROOF not in capsys.readouterr().out
    data = json.loads(saved.read_text())
    assert data["proved"] is False and not data.keys() & {"proved_class", "proved_of", "step_proved"}


def test_a_plan_of_others_that_marks_a_step_is_not_believed():
    plan = make_plan(LAYERS, PLATFORM, num_micro_batches=4)
    assert PROOF not in draw.summary(replace(plan, proved=True, proved_class="one special device"))


def test_a_period_and_its_memory_are_told_apart():
    plan = make_plan(LAYERS, PLATFORM)
    assert (plan.proved, plan.proved_of) == (True, "period")
    assert f"period {PROOF}: {plan.proved_class}" in draw.summary(plan)
    least = make_plan(LAYERS, PLATFORM, period_seconds=20, recompute="never")
    assert (least.proved, least.proved_of) == (True, "memory")
    assert f"memory proved least at this period: {least.proved_class}" in draw.summary(least)
    for each in (plan, least):
        assert Plan.from_dict(each.to_dict()) == each
    old = {key: value for key, value in plan.to_dict().items() if key != "proved_of"}
    assert Plan.from_dict(old).proved


def test_tables_claim_nothing_of_steps():
    steps = compare(LAYERS, PLATFORM, ("madpipe", "contiguous"), num_micro_batches=4)
    assert not any(row["proved"] for row in steps.to_dict()["algorithms"])
    assert "yes" not in draw.as_text([draw.comparison_table(steps)])
    assert "yes" not in draw.as_text([draw.frontier_table(frontier(LAYERS, PLATFORM, num_micro_batches=4))])
    periods = compare(LAYERS, PLATFORM, ("madpipe", "contiguous"))
    assert {row["proved_of"] for row in periods.to_dict()["algorithms"] if row["proved"]} == {"period"}
    assert "yes" in draw.as_text([draw.frontier_table(frontier(LAYERS, PLATFORM))])
