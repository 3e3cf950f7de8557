"""The judge of the search for steps: published orders as their papers draw them, balanced cuts, and verdicts.

Its tables say whether a published schedule is faster than what the planner finds, so they must be able to say so.
"""

from __future__ import annotations

import json
import math
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks" / "step_rivals"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "profiles" / "transformers"))

import rival_cuts
from bounds_now import bound_row
from judge import check, judged, plan_of, with_promises
from llama2 import MODELS, chain_of
from rival_orders import (
    Costs,
    breadth_first,
    interleaved,
    kept_bytes,
    least_seconds,
    listed,
    one_f_one_b,
    there_and_back,
)
from rivals import FAMILIES, best_of, rivals_of
from rows import newest_rows, read_rows, run_jobs
from settings import NUMBER, read_settings
from settings import chain_of as chain_of_setting
from step_report import compared, gaps, report

from deepspeed_partition import Chain, Platform, make_plan
from tests.exhaustive import is_exhaustive
from tests.planner.instances import chain

RESULTS = Path(__file__).parents[1] / "examples" / "benchmarks" / "step_rivals" / "results"
TRANSFORMERS = Path(__file__).parents[1] / "examples" / "profiles" / "transformers"

EVEN = chain([1] * 8, [2] * 8, outputs=[0] * 8, input_bytes=0, stash=[10] * 8)


def words(orders) -> list[str]:
    return [" ".join(f"{name}.{number}" for name, number in order) for order in orders]


def platform(num_devices: int, memory_bytes: int = 10**9, bandwidth: float = 1e12) -> Platform:
    return Platform(num_devices=num_devices, memory_bytes=memory_bytes, bandwidth=bandwidth)


def test_1f1b_is_that_of_the_paper():
    assert words(one_f_one_b(2, 3)) == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"]


def test_interleaved_is_that_of_the_paper():
    # Narayanan et al. 2021, figure 4, below, with 2 devices: 2 (P - r - 1) + (v - 1) P forwards come first.
    assert words(interleaved(2, 2, 4)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


def test_interleaved_wants_whole_groups():
    assert interleaved(4, 2, 6) is None
    assert interleaved(4, 2, 2) is not None


def test_breadth_first_runs_a_chunk_after_the_other():
    assert words(breadth_first(2, 2, 2))[0] == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert words(breadth_first(2, 1, 2)) == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]


def test_there_and_back_ends_where_it_began():
    assert there_and_back(3, 6) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("most_alive", [1, 2, 3, 6])
def test_list_scheduling_keeps_its_limit_and_ends(most_alive):
    costs = Costs(there_and_back(2, 4), (1.0,) * 4, (2.0,) * 4, (0.5, 0.0, 0.5))
    orders = listed(costs, 6, most_alive)
    assert least_seconds(costs, orders, 6) is not None
    # Stage 0 has a micro-batch from its beginning to its end; backwards come first, so there are 4 at most.
    assert kept_bytes(orders[0], [1, 0, 0, 0]) == min(most_alive, 4)


def test_least_seconds_of_a_step_that_waits_forever():
    costs = Costs((0, 1), (1.0, 1.0), (2.0, 2.0), (0.0,))
    assert least_seconds(costs, [[("F0", 0), ("B0", 0)], [("F1", 0), ("B1", 0)]], 1) == 6
    assert least_seconds(costs, [[("F0", 0), ("B0", 0)], [("B1", 0), ("F1", 0)]], 1) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_refutes_a_rival_is_no_more_than_the_replay_finds(family):
    """Seconds and bytes by which a rival is not judged are lower bounds of what the judge finds."""
    uneven = chain(
        [3, 1, 4, 1, 5, 2, 6, 2], [2, 7, 1, 8, 2, 8, 1, 8], outputs=[3] * 8, stash=[9, 7, 5, 3, 8, 6, 4, 2]
    )
    some = 0
    for rival in rivals_of(uneven, platform(2, bandwidth=2.0), 4, family):
        if rival.chunks > 4:
            continue
        found = judged(rival.plan(), uneven)
        least = least_seconds(rival.costs, rival.orders, 4)
        assert found is not None and least is not None
        assert rival.load_seconds <= least * (1 + 1e-12)
        assert least <= found.step_seconds * (1 + 1e-12)
        assert rival.least_bytes() <= found.peak_bytes
        some += 1
    assert some


def test_bubbles_are_those_of_the_papers():
    """(P - 1) / v of the forwards and backwards of a device, with free links: GPipe, 1F1B, interleaved."""
    devices, number = 4, 8
    for family, chunks, bubble in (
        ("1F1B", 1, 3),
        ("GPipe", 1, 3),
        ("interleaved", 2, 1.5),
        ("breadth first", 2, 1.5),
    ):
        rival = next(
            each for each in rivals_of(EVEN, platform(devices), number, family)
            if each.chunks == chunks and not each.recomputes
        )  # fmt: skip
        stage = 3 * 8 / devices
        found = judged(rival.plan(), EVEN)
        assert found.step_seconds == pytest.approx((number + bubble) * stage), family


def test_a_rival_that_does_not_fit_is_no_rival():
    roomy = best_of(EVEN, platform(2), 4, "GPipe")
    assert not roomy.rival.recomputes
    tight = best_of(EVEN, platform(2, roomy.peak_bytes - 1), 4, "GPipe")
    assert tight is None or (tight.peak_bytes < roomy.peak_bytes and tight.step_seconds > roomy.step_seconds)
    assert best_of(EVEN, platform(2, 1), 4, "GPipe") is None


def test_the_judge_agrees_with_the_planner_on_a_plan_of_the_planner():
    plan = make_plan(EVEN, platform(2), "contiguous", num_micro_batches=4)
    assert judged(plan, EVEN) == check(plan, EVEN)
    orders = [list(order) for order in plan.step.order]
    again = plan_of(EVEN, plan.platform, plan.boundaries, [stage.device for stage in plan.stages], orders, 4)
    assert check(with_promises(again, EVEN), EVEN).step_seconds == plan.step_seconds


@pytest.mark.parametrize("seed", range(3))
def test_even_time_is_the_best_of_all_cuts(seed):
    seconds = [(7 * (seed + 1) * index**2) % 11 + 1 for index in range(8)]

    def squares(cuts) -> float:
        return sum(sum(seconds[start:stop]) ** 2 for start, stop in pairwise(cuts))

    best = min(squares((0, *inner, 8)) for inner in combinations(range(1, 8), 2))
    assert squares(rival_cuts._even_time(seconds, 3)) == pytest.approx(best)


def test_balanced_cuts_attach_the_ends_of_a_transformer():
    transformer = chain_of(MODELS[0])
    assert (0, 9, 17, 25, 34) in rival_cuts.balanced_cuts(transformer, range(4))
    assert rival_cuts.balanced_cuts(transformer, range(35)) == []


@pytest.mark.parametrize(
    ("sizes", "parameters"), zip(MODELS, (6_738_415_616, 13_015_864_320, 68_976_648_192), strict=True)
)
def test_transformers_have_the_published_number_of_parameters(sizes, parameters):
    """The numbers are those of the models' weights as published."""
    made = chain_of(sizes)
    assert sizes.tensor_parallel * sum(layer.num_trainable_parameters for layer in made.layers) == parameters
    assert 2 * parameters == sizes.tensor_parallel * sum(layer.weight_bytes for layer in made.layers)
    saved = Chain.load(TRANSFORMERS / f"{sizes.name}.json")
    assert saved == made, "run examples/profiles/transformers/llama2.py"


def test_settings_are_for_the_chains_that_there_are():
    settings = read_settings()
    assert [setting.number for setting in settings] == list(range(NUMBER))
    digests = {setting.network: chain_of_setting(setting.network).digest() for setting in settings}
    assert {setting.digest for setting in settings} == set(digests.values())
    assert len(digests) == 12


SETTING = {
    "number": 0,
    "network": "net",
    "num_devices": 2,
    "num_micro_batches": 4,
    "memory": "tight",
    "memory_bytes": 1,
}
RIVAL = {"step_seconds": 2.0, "chunks": 3, "most_alive": None, "recomputes": False}


def plan_row(algorithm: str, step: float | None) -> dict:
    row = {
        "number": 0,
        "algorithm": algorithm,
        "processor_seconds": 1.0,
        "time_limit_seconds": 20.0,
        "devices": [0],
    }
    return row if step is None else row | {"step_seconds": step, "step_lower_bound_seconds": 1.6}


@pytest.mark.parametrize(
    ("step", "ratio", "words"),
    [
        (1.9, 0.95, "A rival is faster in 0"),
        (2.0, 1.0, "A rival is faster in 0"),
        (2.0 * (1 + 1e-8), 1.0, "A rival is faster in 1"),
        (2.5, 1.25, "| 1.2500 | interleaved | 3 |"),
        (None, math.inf, "No plan fits in 1 settings (0)"),
    ],
)
def test_verdicts_go_both_ways(step, ratio, words):
    plans = [plan_row("madpipe", step), plan_row("contiguous", 2.4)]
    rivals = [{"number": 0, "rivals": {"1F1B": RIVAL | {"step_seconds": 3.0}, "interleaved": RIVAL}}]
    [row] = compared([SETTING], rivals, plans)
    assert row.ratio == pytest.approx(ratio)
    if step is not None:
        assert row.gain == pytest.approx(2.4 / step)
        assert row.gap == pytest.approx(step / 1.6 - 1)
    assert words in report([SETTING], rivals, plans)


def test_gaps_are_of_both_bounds():
    text = gaps(
        [SETTING],
        [plan_row("madpipe", 2.0) | {"recomputes": False}],
        [{"number": 0, "step_lower_bound_seconds": 1.96}],
    )
    assert "| all | 1 | 25.0% | 2.0% | 2.04% | 2.0% | 0 | 1 |" in text


def test_no_recorded_step_is_below_its_bound():
    """Of chains as large as real ones: some of the settings, computed anew."""
    steps = {
        row["number"]: row["step_seconds"]
        for row in read_rows(RESULTS / "plans_now.jsonl")
        if row["algorithm"] == "madpipe"
    }
    chosen = [each for each in read_settings() if is_exhaustive() or each.number % 20 == 0]
    for setting in chosen:
        assert bound_row(setting)["step_lower_bound_seconds"] <= steps[setting.number] * (1 + 1e-9), setting
    assert len(chosen) >= 10


def test_a_torn_line_is_done_again(tmp_path):
    """And reading leaves it, since another process may write its end; only who writes cuts it off."""
    path = tmp_path / "rows.jsonl"
    torn = json.dumps({"number": 1}) + "\n" + '{"number": 2, "riv'
    path.write_text(torn)
    assert read_rows(path) == [{"number": 1}]
    assert path.read_text() == torn
    run_jobs(path, [], 1)
    assert path.read_text() == '{"number": 1}\n'


def test_a_report_takes_the_newest_plan_of_each_setting(tmp_path):
    """A run that is under way has few lines, or no file yet; a contiguous step stands where there is one."""
    old = [plan_row("madpipe", 2.2), plan_row("contiguous", 2.4), plan_row("madpipe", 2.1) | {"number": 1}]
    (tmp_path / "plans_old.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in old))
    (tmp_path / "plans_new.jsonl").write_text(json.dumps(plan_row("madpipe", 1.9)) + "\n" + '{"number": 1, "al')
    rows = newest_rows(tmp_path, ("missing", "new", "old"))
    found = {(row["number"], row["algorithm"]): (row["step_seconds"], row["label"]) for row in rows}
    assert found == {(0, "madpipe"): (1.9, "new"), (0, "contiguous"): (2.4, "old"), (1, "madpipe"): (2.1, "old")}
    settings = [SETTING, SETTING | {"number": 1}]
    text = report(settings, [{"number": number, "rivals": {"1F1B": RIVAL}} for number in (0, 1)], rows)
    assert "at most 1.0500" in text and "The planner's steps are 1 of 'new', 1 of 'old'." in text
    assert "The contiguous steps are 1 of 'old'." in text
