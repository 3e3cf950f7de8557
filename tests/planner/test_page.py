"""The page of a plan: every operation and byte of it is there, and a browser shows it."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, PlanMismatchError, Platform, cli, make_plan
from deepspeed_partition.planner.report.comparison import compare
from deepspeed_partition.planner.report.frontier import frontier
from deepspeed_partition.planner.report.page import plan_page
from deepspeed_partition.planner.report.pictures import comparison_svg, frontier_svg, timeline_svg
from deepspeed_partition.planner.report.planned_run import place_of, planned_run
from deepspeed_partition.planner.simulate.replay import replay
from tests.planner.test_micro_batches import two_per_period
from tests.planner.test_timeline import MADE, PLAN, as_simulated, planned, timeline_of

HAS_BROWSER = importlib.util.find_spec("PyQt6") is not None and importlib.util.find_spec("PyQt6.QtWebEngineCore")


class Parts(HTMLParser):
    """Elements of a page, and what is in its element of data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.data = ""
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, text):
        if not self.tags:
            return
        if self.tags[-1][1].get("id") == "data" and not self.data:
            self.data = text
        elif self.tags[-1][0] not in ("script", "style"):
            self.text += text


def data_of(page: str) -> dict:
    return json.loads(Parts(page).data)


def rows_of(data: dict, run: dict) -> set[tuple[str, str, int, int, int]]:
    """Name, place, micro-batch, start and end of each operation, times in units."""
    rows = set()
    for place, lane in zip(data["lanes"], run["lanes"], strict=True):
        start = 0
        for name, micro_batch, gap, lasts in zip(lane["n"], lane["m"], lane["s"], lane["d"], strict=True):
            start += gap
            rows.add((data["names"][name], place, micro_batch, start, start + lasts))
    return rows


def rows_as(operations, unit: float) -> set[tuple[str, str, int, int, int]]:
    return {
        (each.operation, place_of(each), each.micro_batch, round(each.start_seconds / unit),
         round(each.end_seconds / unit))
        for each in operations
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_every_operation_and_every_peak_is_there(seed):
    plan, chain = planned(seed)
    data = data_of(plan_page(plan, chain))
    assert rows_of(data, data["run"]) == rows_as(planned_run(plan, chain).operations, data["unit"])
    for device, memory in enumerate(data["memory"]):
        highest = max(sum(memory["levels"][level]) for level in memory["l"])
        use = replay(plan, chain).memory[device]
        behind = use.stash == use.buffers == 0  # the peak may be that of the optimizer's step
        assert highest == use.total or (behind and highest < use.total)
    assert [layer["name"] for layer in data["layers"]] == [layer.name for layer in chain.layers]


def test_memory_goes_down_when_something_is_freed():
    """At the end of a step nothing is in flight."""
    layers = tuple(
        LayerProfile(
            name=str(i), forward_seconds=1, backward_seconds=1, weight_bytes=5, output_bytes=7, stash_bytes=11
        )
        for i in range(2)
    )
    chain = Chain(name="two", input_bytes=7, layers=layers)
    plan = make_plan(
        chain, Platform(num_devices=2, memory_bytes=10**6, bandwidth=1e9), [0, 1, 2], num_micro_batches=3
    )
    for memory in data_of(plan_page(plan, chain))["memory"]:
        stashes = [memory["levels"][level][1] for level in memory["l"]]
        assert stashes[-1] == 0 and max(stashes) >= 11
        assert {stash % 11 for stash in stashes} == {0}


def test_memory_begins_with_the_run():
    """Weights are held before the first operation of a device, which comes late on the last one."""
    plan = make_plan(MADE, PLAN.platform, "uniform", num_micro_batches=4)
    assert len(plan.stages) > 1
    for device, memory in enumerate(data_of(plan_page(plan, MADE))["memory"]):
        first = memory["levels"][memory["l"][0]]
        assert memory["t"][0] == 0 and 0 < first[0] <= plan.memory[device].weights


def test_no_plan_is_below_the_bound_beside_it():
    """A plan with backwards in halves was drawn beside the bound of whole ones, which is above it."""
    halves = {"backward_input_seconds": 1.0, "backward_weight_seconds": 1.0}
    layers = tuple(
        LayerProfile(
            name=str(i),
            forward_seconds=1,
            backward_seconds=2,
            weight_bytes=1,
            output_bytes=1,
            stash_bytes=9,
            **halves,
        )
        for i in range(4)
    )
    chain = Chain(name="halves", input_bytes=1, layers=layers)
    platform = Platform(num_devices=4, memory_bytes=10**6, bandwidth=1e9)
    plan = make_plan(chain, platform, num_micro_batches=4, split_backward=True, time_limit_seconds=5)
    whole = make_plan(chain, platform, num_micro_batches=4, time_limit_seconds=5)
    assert plan.step_seconds < whole.step.lower_bound_seconds  # that bound would be above the plan
    compared = compare(
        chain, platform, ["madpipe", "uniform"], num_micro_batches=4, planned=plan, time_limit_seconds=5
    )
    assert len(compared.fitting) == 2
    assert all(compared.step_lower_bound_seconds <= each.seconds for each in compared.fitting)


def test_what_was_measured_is_beside_the_plan():
    plan, chain = planned(1)
    timeline = timeline_of(plan, as_simulated(plan, chain), as_simulated(plan, chain, 3.0))
    page = plan_page(plan, chain, timeline)
    data = data_of(page)
    assert len(data["measured"]) == 2
    slower = rows_as(as_simulated(plan, chain, 3.0).operations, data["unit"])
    found = rows_of(data, data["measured"][1])
    assert {row[:3] for row in found} == {row[:3] for row in slower}
    assert data["measured"][1]["seconds"] == pytest.approx(3 * data["measured"][0]["seconds"])
    assert "measured (median)" in Parts(page).text and "measured / planned" in Parts(page).text
    other, other_chain = planned(2)
    with pytest.raises(PlanMismatchError):
        plan_page(plan, chain, timeline_of(other, as_simulated(other, other_chain)))
    with pytest.raises(PlanMismatchError):
        plan_page(plan, other_chain)


def test_a_page_needs_nothing_else_and_runs_no_name():
    """A layer's name is text, whatever it holds."""
    chain, plan = two_per_period()
    hostile = "</script><script>alert(1)</script><img src=http://x/y>"
    layers = tuple(replace(layer, name=hostile) for layer in chain.layers)
    named = replace(chain, layers=layers, name=hostile)
    stages = tuple(replace(stage, layer_names=(hostile,)) for stage in plan.stages)
    page = plan_page(replace(plan, chain=replace(plan.chain, name=hostile), stages=stages), named)
    parts = Parts(page)
    assert [tag for tag, _ in parts.tags].count("script") == 2
    assert not any({"src", "href"} & attributes.keys() for _, attributes in parts.tags)
    assert not re.search(r"https?://|@import|url\(", re.sub(r"http://www.w3.org/2000/svg|http://x/y", "", page))
    assert json.loads(parts.data)["layers"][0]["name"] == hostile


@pytest.mark.parametrize("command", ["report", "trace"])
def test_the_commands(command, tmp_path, capsys):
    plan, chain = planned(1)
    _, other_chain = planned(2)
    files = {name: str(tmp_path / name) for name in ("plan.json", "chain.json", "time.json", "out", "other.json")}
    plan.save(files["plan.json"])
    chain.save(files["chain.json"])
    other_chain.save(files["other.json"])
    timeline_of(plan, as_simulated(plan, chain)).save(files["time.json"])
    options = ["--chain", files["chain.json"], "--measured", files["time.json"], "-o", files["out"]]
    limit = ["--time-limit", "0.5"] if command == "report" else []
    assert cli.run([command, files["plan.json"], *options, *limit]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"saved {files['out']}\n", "")
    text = (tmp_path / "out").read_text()
    if command == "report":
        assert "Algorithms compared" in text and "Planned and measured" in text
    else:
        assert json.loads(text)["traceEvents"]
    assert cli.run([command, files["plan.json"], "-o", files["plan.json"]]) == 2
    assert "is what is read" in capsys.readouterr().err
    assert Plan.load(files["plan.json"]) == plan
    wrong = ["--chain", files["other.json"]]
    assert cli.run([command, files["plan.json"], *wrong, "-o", files["out"]]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.run([command, files["plan.json"]]) == 2
    assert "Missing option" in capsys.readouterr().err


def test_a_notebook_shows_the_plan_without_scripts():
    _, plan = two_per_period()
    hostile = "<script>alert(1)</script>"
    shown = replace(plan, chain=replace(plan.chain, name=hostile))._repr_html_()
    parts = Parts(shown)
    tags = [tag for tag, _ in parts.tags]
    assert "script" not in tags and {"svg", "table"} <= set(tags)
    assert tags.count("tr") == 1 + len(plan.stages) and "Bottleneck: " in parts.text and hostile in parts.text
    assert "One pattern of " in parts.text and "gradients of weights" in parts.text
    assert tags.count("rect") >= len(plan.operations)


@pytest.mark.skipif(not HAS_BROWSER, reason="no browser: pip install 'madpipe[browser]' brings a Chromium")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_shows_every_operation_and_answers_mouse_and_keys(theme, tmp_path):
    """A small plan in light, and one with measured steps in dark."""
    plan, chain = PLAN, MADE
    measured = timeline_of(plan, as_simulated(plan, chain, 1.2)) if theme == "dark" else None
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    compared = compare(chain, plan.platform, ["madpipe", "uniform", "parameters"], time_limit_seconds=1)
    page.write_text(plan_page(plan, chain, measured, compared))
    pictures = {
        "comparison.svg": comparison_svg(compared),
        "frontier.svg": frontier_svg(frontier(chain, plan.platform, "uniform", time_limit_seconds=1)),
        "timeline.svg": timeline_svg(plan),
        "notebook.html": f"<!doctype html><html><body>{plan._repr_html_()}</body></html>",
    }
    for name, text in pictures.items():
        (tmp_path / name).write_text(text)
    others = [str(tmp_path / name) for name in pictures]
    command = [sys.executable, "-m", "tests.planner.page_browser", str(page), str(picture), theme, *others]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["console"] == [] and found["loaded"] == []
    expected = sorted((each.operation, each.micro_batch) for each in planned_run(plan, chain).operations)
    assert sorted((name, number) for lane in found["rows"] for name, number, _, _ in lane) == expected
    assert found["ground"] == ("rgb(13, 17, 23)" if theme == "dark" else "rgb(255, 255, 255)")
    assert all(colours > 4 for colours in found["canvases"]) and len(found["canvases"]) == 3, found["canvases"]
    assert picture.stat().st_size > 10_000
    hovered = found["hovered"]["tip"]
    assert "device 0" in hovered and "micro-batch" in hovered and "planned: from" in hovered
    first, second, below, last, closer = (each["told"] for each in found["keys"])
    device = sorted(
        (each for each in planned_run(plan, chain).operations if each.device == 0),
        key=lambda each: each.start_seconds,
    )
    names = [f"{each.operation}, micro-batch {each.micro_batch}, device 0" for each in device]
    assert first.startswith(names[0]) and second.startswith(names[1])
    assert "measured: from" in below if measured else "device 0" not in below
    assert last != below and closer == last
    assert found["hovered"]["marked"] == 0 and all(each["marked"] > 20 for each in found["keys"])
    before, after = (found["keys"][place]["window"] for place in (3, 4))
    assert after[1] - after[0] < before[1] - before[0]
    run = planned_run(plan, chain) if measured is None else measured.steps[0]
    lane = [each for each in run.operations if each.device == (1 if measured is None else 0)]
    chosen = max(lane, key=lambda each: each.start_seconds)
    middle = (chosen.start_seconds + chosen.end_seconds) / 2
    assert after[0] < middle < after[1], "zoomed on what is chosen"
    assert found["words_are_above"]
    assert found["table"] == min(200, len(expected) * (2 if measured else 1))
    assert found["layer"].startswith("layer 0: ")
    narrow = found["narrow"]
    assert narrow["beside"] <= 0 and narrow["button"] < 45 and narrow["letters"] >= 10, narrow
    assert min(narrow["tip"]) >= 0, narrow
    # The contrast that WCAG AA asks for, of the page and of all that is a picture of its own.
    assert set(found["contrast"]) == {"page", *pictures}
    for name, each in found["contrast"].items():
        assert each["low"] == [], (name, each["low"])
        assert each["texts"] >= (50 if name == "page" else 5) and each["shapes"] >= 2, (name, each)
