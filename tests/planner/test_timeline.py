"""The file of a measured timeline, and the comparison with its plan.

The oracle is the replay: a run in which everything happens as simulated must be found to be as planned.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from deepspeed_partition import Chain, InfeasibleError, Plan, PlanMismatchError, Platform, make_plan
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.errors import TimelineFormatError
from deepspeed_partition.planner.plan import StepPlan
from deepspeed_partition.planner.report.draw_timelines import measured_step
from deepspeed_partition.planner.report.timeline import MeasuredTimeline, TimedOperation, TimedStep, steps_in_words
from deepspeed_partition.planner.simulate.replay_step import run_step
from deepspeed_partition.planner.step import one_f_one_b_order
from tests.engine import plans
from tests.exhaustive import some
from tests.planner.instances import chain, random_instance
from tests.planner.test_fuzz import assert_one_sentence, changed_somewhere, damaged, many


def as_simulated(plan: Plan, made: Chain, slower: float = 1.0) -> TimedStep:
    """A step that runs as the replay runs it, or so many times as long."""
    clock = Clock.of(made, plan.platform)
    step = run_step(plan, made)
    assert not isinstance(step, str), step
    operations = []
    for (name, number), (begin, end) in step.operations.items():
        stage = int(name.lstrip("SFBfRIW"))
        place: dict = {"device": plan.stages[stage].device}
        if name[0] == "S":
            place = {"link": (plan.stages[stage].device, plan.stages[stage + 1].device)}
        begin_seconds, seconds = clock.seconds(begin) * slower, clock.seconds(end - begin) * slower
        operations.append(
            TimedOperation(
                operation=name, micro_batch=number, start_seconds=begin_seconds, duration_seconds=seconds, **place
            )
        )
    operations.sort(key=lambda each: each.start_seconds)
    errors = (0.0,) * plan.platform.num_devices
    return TimedStep(step=0, clock_error_seconds=errors, operations=tuple(operations))


def timeline_of(plan: Plan, *steps: TimedStep) -> MeasuredTimeline:
    assert plan.step is not None
    return MeasuredTimeline(
        chain=plan.chain,
        devices=tuple(stage.device for stage in plan.stages),
        num_micro_batches=plan.step.num_micro_batches,
        steps=tuple(replace(step, step=number) for number, step in enumerate(steps)),
    )


def planned(seed: int) -> tuple[Plan, Chain]:
    """A plan with a step, some of them with several stages on a device."""
    while True:
        made, platform = random_instance(seed)
        try:
            return make_plan(made, platform, num_micro_batches=1 + seed % 5, time_limit_seconds=2), made
        except InfeasibleError:
            seed += 1000


@pytest.mark.parametrize("seed", range(25))
def test_a_run_as_simulated_is_as_planned(seed, tmp_path):
    plan, made = planned(seed)
    timeline = timeline_of(plan, as_simulated(plan, made), as_simulated(plan, made, 3.0), as_simulated(plan, made))
    found = timeline.compare(plan)
    assert found.planned_step_seconds == plan.step_seconds
    assert found.measured_step_seconds == pytest.approx(plan.step_seconds), "the median, not the mean"
    for each in found.operations:
        assert each.measured_seconds == pytest.approx(each.planned_seconds)
    assert {each.operation for each in found.operations} == {each.operation for each in plan.operations}
    assert found.planned_idle_share is not None
    assert found.measured_idle_share == pytest.approx(found.planned_idle_share)
    timeline.save(tmp_path / "timeline.json")
    assert MeasuredTimeline.load(tmp_path / "timeline.json") == timeline


def test_a_step_with_second_forwards_and_halves(tmp_path):
    """They stand in the file and the comparison; one without the other is refused."""
    orders = plans.some_in_halves(plans.some_recomputed(plans.depth_first((0, 1, 0), 5, 3), 2), 2)
    made = plans.chain_of(3)
    plan = plans.plan_of(made, plans.platform_of(2), range(4), (0, 1, 0), orders=orders)
    step = as_simulated(plan, made)
    plan = replace(plan, step=replace(plan.step, step_seconds=step.seconds))
    timeline = timeline_of(plan, step)
    timeline.save(tmp_path / "timeline.json")
    assert MeasuredTimeline.load(tmp_path / "timeline.json") == timeline
    assert {event.get("cat") for event in timeline.chrome_trace()["traceEvents"]} >= {*"FfRBIW"}
    found = timeline.compare(plan)
    measured = {each.operation: each.measured_seconds for each in found.operations}
    planned = {each.operation: each.planned_seconds for each in found.operations}
    assert all(measured[name] == (2.0 if name[0] == "B" else 1.0) for name in measured if name[0] not in "BIS")
    assert {name[0] for name in measured} == {*"FfRBIWS"}
    assert {name[0] for name, seconds in planned.items() if seconds is None} == {"I", "W"}
    assert all(planned[name] == 1.0 for name in planned if name[0] in "FfR")
    assert found.measured_idle_share == pytest.approx(found.planned_idle_share)
    for kind, other in (("W", "I"), ("R", None), ("I", "W"), ("f", "R")):
        left = tuple(each for each in step.operations if each.operation[0] != kind)
        if other is None:  # a backward that runs the forward again itself
            timeline_of(plan, replace(step, operations=left))
            continue
        with pytest.raises(ValueError, match=r"and no|has [0-9]+ operations"):
            timeline_of(plan, replace(step, operations=left))
    with pytest.raises(ValueError, match="an operation twice"):
        again = next(each for each in step.operations if each.operation[0] == "R")
        timeline_of(plan, replace(step, operations=(*step.operations, again)))


def test_the_period_is_that_of_the_slowest_stage():
    """Whatever the depth of the others: fill and drain do not count."""
    made = chain([1, 2, 1], [2, 5, 1], outputs=[1, 1, 1])
    plan = make_plan(made, Platform(num_devices=3, memory_bytes=10**6, bandwidth=4.0), [0, 1, 2, 3])
    assert plan.period_seconds == 7.0
    for depth in (3, 4, 6):
        orders = tuple(one_f_one_b_order(stage, depth - stage, 12) for stage in range(3))
        step = StepPlan(num_micro_batches=12, step_seconds=1.0, blocking_step_seconds=None, order=orders)
        stages = tuple(replace(each, in_flight=depth - stage) for stage, each in enumerate(plan.stages))
        deep = replace(plan, step=step, stages=stages)
        found = timeline_of(deep, as_simulated(deep, made)).compare(deep)
        assert found.measured_period_seconds == pytest.approx(7.0)
        all_at_once = replace(deep, stages=tuple(replace(each, in_flight=11) for each in stages))
        assert timeline_of(deep, as_simulated(deep, made)).compare(all_at_once).measured_period_seconds is None


# Found at once: all that imports this file, on each worker of a run, would look through thirty plans.
PLAN, MADE = next((plan, made) for plan, made in map(planned, (29, *range(100))) if not plan.is_contiguous)
DOCUMENT = timeline_of(PLAN, as_simulated(PLAN, MADE)).to_dict()


def test_another_plan_is_refused():
    plan, made = planned(1)
    timeline = timeline_of(plan, as_simulated(plan, made))
    other, _ = planned(2)
    with pytest.raises(PlanMismatchError, match="give the plan of that run"):
        timeline.compare(other)
    no_step = replace(plan, step=None)
    found = timeline.compare(no_step)
    assert found.planned_step_seconds is None and found.planned_idle_share is None


def test_a_trace_has_every_operation_once():
    timeline = timeline_of(PLAN, as_simulated(PLAN, MADE), as_simulated(PLAN, MADE))
    trace = json.loads(json.dumps(timeline.chrome_trace()))
    rows = {each["tid"]: each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M"}
    shown = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert len(shown) == sum(len(step.operations) for step in timeline.steps)
    for row in rows:
        runs = sorted((each["ts"], each["ts"] + each["dur"]) for each in shown if each["tid"] == row)
        assert runs and all(before[1] <= after[0] * (1 + 1e-9) for before, after in pairwise(runs))


def changed(**fields: object) -> dict:
    return {**DOCUMENT, **fields}


def without_the_last() -> dict:
    step = DOCUMENT["steps"][0]
    return changed(steps=[{**step, "operations": step["operations"][:-1]}])


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed(format="madpipe-timeline/2"), "format is 'madpipe-timeline/2'"),
        (changed(steps=[]), "steps is"),
        (changed(num_micro_batches=10**6), "and 1000000 micro-batches have"),
        (changed(devices=[*DOCUMENT["devices"][:-1], 5]), "in its place"),
        (without_the_last(), "operations, and"),
    ],
)
def test_a_file_that_is_wrong_is_refused(document, message):
    with pytest.raises(TimelineFormatError, match=message):
        MeasuredTimeline.from_dict(document)


def test_any_bytes_are_read_or_refused(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "file"
    content = json.dumps(DOCUMENT).encode()

    @settings(many, max_examples=some(200))
    @given(damaged(content) | changed_somewhere(DOCUMENT).map(lambda data: json.dumps(data).encode()))
    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            value = MeasuredTimeline.load(path)
        except TimelineFormatError as refusal:
            assert_one_sentence(refusal)
            return
        assert MeasuredTimeline.from_dict(json.loads(json.dumps(value.to_dict(), allow_nan=False))) == value
        try:
            value.compare(PLAN)
        except PlanMismatchError as refusal:
            assert_one_sentence(refusal)

    read()


@pytest.mark.parametrize(
    ("measured", "planned", "said"),
    [
        ([0.10] * 10, None, "10 steps of 100 ms"),
        ([0.10] * 9 + [0.4], 0.09, "10 steps of 100 ms (90 ms planned)"),
        ([0.10] * 7 + [0.16] * 3, 0.1, "10 steps of 100 ms (100 ms planned), 100 ms to 160 ms: noisy"),
        ([0.139] * 10, 0.24, "10 steps of 139 ms (240 ms planned): faster than when layers were measured"),
        ([0.24] * 10, 0.139, "10 steps of 240 ms (139 ms planned): slower than when layers were measured"),
        ([0.1, 0.2], 0.1, "2 steps of 150 ms (100 ms planned), 100 ms to 200 ms: noisy"),
    ],
)
def test_steps_on_a_busy_machine_are_said_to_be_noisy(measured, planned, said):
    """Planned with 240 ms and measured with 139, and no line said that other jobs had run beside it."""
    assert steps_in_words(measured, planned) == said


def test_an_instant_is_no_time():
    """A clock that is too coarse sees nothing last."""
    step = as_simulated(PLAN, MADE)
    still = tuple(replace(each, start_seconds=0.0, duration_seconds=0.0) for each in step.operations)
    found = timeline_of(PLAN, replace(step, operations=still)).compare(PLAN)
    assert found.measured_step_seconds == 0.0 and set(found.measured_idle_share) == {0.0}


def test_a_measured_step_is_drawn_with_each_operation_in_its_place():
    computations = [
        ("F0", 0, 0.0, 2.0, 0), ("F1", 0, 3.0, 2.0, 1), ("B1", 0, 5.0, 3.0, 1), ("B0", 0, 9.0, 3.0, 0),
    ]  # fmt: skip
    transfers = [("SF0", 0, 2.0, 1.0, (0, 1)), ("SB0", 0, 8.0, 1.0, (0, 1))]
    operations = [
        TimedOperation(
            operation=name, micro_batch=number, start_seconds=begin, duration_seconds=seconds,
            **({"link": place} if isinstance(place, tuple) else {"device": place}),
        )
        for name, number, begin, seconds, place in (*computations, *transfers)
    ]  # fmt: skip
    plan, _ = planned(0)
    step = TimedStep(step=7, clock_error_seconds=(0.0, 0.0), operations=tuple(operations))
    timeline = MeasuredTimeline(chain=plan.chain, devices=(0, 1), num_micro_batches=1, steps=(step,))
    assert measured_step(timeline, width=48).splitlines() == [
        "step 7, 12 s: = forward, # backward, - transfer, . idle",
        "device 0 |F0.0====" + "." * 28 + "B0.0########|  42%",
        "device 1 |" + "." * 12 + "F1.0====B1.0########" + "." * 16 + "|  42%",
        "link 1>0 |" + "." * 32 + "----" + "." * 12 + "|   8%",
        "link 0>1 |" + "." * 8 + "----" + "." * 36 + "|   8%",
    ]
