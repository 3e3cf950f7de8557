"""Chain and plan files: to the letter of their formats, exact round trips, and every error named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepspeed_partition import (
    Chain,
    ChainFormatError,
    InfeasibleError,
    LayerProfile,
    MadPipeError,
    Plan,
    PlanFormatError,
    PlanMismatchError,
    Platform,
    make_plan,
    replay,
)
from deepspeed_partition.planner.io.files import write_json, write_text
from deepspeed_partition.planner.report.draw_timelines import timeline
from tests.exhaustive import some
from tests.planner.instances import instances

CHAIN = {
    "format": "madpipe-chain/1",
    "name": "two",
    "micro_batch_size": 8,
    "hardware": "by hand",
    "input_bytes": 48000000,
    "layers": [
        {"name": "a", "forward_seconds": 0.02, "backward_seconds": 0.04, "weight_bytes": 100000000,
         "output_bytes": 48000000, "stash_bytes": 7, "transient_bytes": 3, "type": "Linear",
         "num_trainable_parameters": 5},
        {"name": "b", "forward_seconds": 0.02, "backward_seconds": 0.04, "weight_bytes": 100000000,
         "output_bytes": 48000000.0, "comment": "unknown fields are ignored"},
    ],
    "warm_up": {
        "boundaries": [0, 1, 2], "num_steps": 18, "optimizer_seconds": [0.01, None], "peak_bytes": [1000, None],
        "planned_peak_bytes": [1100, 900], "step_seconds": 0.25,
        "links": [{"link": [0, 1], "forward_bytes": 48000000, "forward_seconds": 0.004, "backward_bytes": 24000000,
                   "backward_seconds": 0.003, "bandwidth": 8e9}],
    },
}  # fmt: skip

PLATFORM = Platform(num_devices=2, memory_bytes=500_000_000, bandwidth=12e9)


def changed(path, value, base=None):
    """A copy of the chain with one field, such as ``layers.0.name``, set; REMOVE takes it away."""
    data = json.loads(json.dumps(CHAIN if base is None else base))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    inner = data
    for part in parents:
        inner = inner[part]
    if value is REMOVE:
        del inner[last]
    else:
        inner[last] = value
    return data


REMOVE = object()


def test_left_out_fields_are_filled_in():
    chain = Chain.from_dict(CHAIN)
    first, second = chain.layers
    assert (first.stash_bytes, first.transient_bytes, first.type, first.num_trainable_parameters) == (
        7,
        3,
        "Linear",
        5,
    )
    assert (second.stash_bytes, second.transient_bytes) == (48000000, 0)
    assert (second.type, second.num_trainable_parameters) == ("b", 100000000)
    assert isinstance(second.output_bytes, int)
    whole = Chain.from_dict(changed("layers.0.stash_bytes", REMOVE))
    assert whole.layers[0].stash_bytes == 48000000, "the bytes of the input"


def test_digest_is_the_documented_one():
    layers = [
        {"forward_seconds": 0.02, "backward_seconds": 0.04, "weight_bytes": 100000000, "output_bytes": 48000000,
         "stash_bytes": 7, "transient_bytes": 3, "type": "Linear", "num_trainable_parameters": 5},
        {"forward_seconds": 0.02, "backward_seconds": 0.04, "weight_bytes": 100000000, "output_bytes": 48000000,
         "stash_bytes": 48000000, "transient_bytes": 0, "type": "b", "num_trainable_parameters": 100000000},
    ]  # fmt: skip
    text = json.dumps({"input_bytes": 48000000, "layers": layers}, sort_keys=True, separators=(",", ":"))
    assert Chain.from_dict(CHAIN).digest() == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    renamed = Chain.from_dict(changed("layers.0.name", "other"))
    assert renamed.digest() == Chain.from_dict(CHAIN).digest()
    slower = Chain.from_dict(changed("layers.0.forward_seconds", 0.03))
    assert slower.digest() != renamed.digest()


def test_chain_round_trip(tmp_path):
    chain = Chain.from_dict(CHAIN)
    chain.save(tmp_path / "chain.json")
    again = Chain.load(tmp_path / "chain.json")
    assert again == chain
    assert again.digest() == chain.digest()
    assert again.to_dict()["hardware"] == "by hand"
    assert again.warm_up == chain.warm_up and again.to_dict()["warm_up"] == CHAIN["warm_up"]


def test_what_else_a_warm_up_measured_changes_no_plan():
    with_it, without = Chain.from_dict(CHAIN), Chain.from_dict(changed("warm_up", REMOVE))
    assert without.warm_up is None and "warm_up" not in without.to_dict()
    assert with_it == without and with_it.digest() == without.digest()
    first, second = (make_plan(chain, PLATFORM) for chain in (with_it, without))
    assert replace(first, planning_seconds=0.0) == replace(second, planning_seconds=0.0)


def test_the_bandwidth_of_a_link_is_that_of_its_slower_direction():
    [use] = Chain.from_dict(CHAIN).warm_up.links
    assert use.bandwidth == 24000000 / 0.003
    for too_little in ({"backward_bytes": 1000}, {"backward_seconds": 1e-5}):
        assert replace(use, **too_little).bandwidth == 48000000 / 0.004
    assert replace(use, forward_bytes=1000, backward_bytes=1000).bandwidth is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "madpipe-chain/2", "format is 'madpipe-chain/2', not 'madpipe-chain/1'"),
        ("format", REMOVE, "format is missing"),
        ("input_bytes", REMOVE, "input_bytes is missing"),
        ("input_bytes", -1, "input_bytes is -1, less than 0"),
        ("input_bytes", True, "input_bytes is True, not an integer"),
        ("input_bytes", 0.5, "input_bytes is 0.5, not an integer"),
        ("input_bytes", 1e300, "more than"),
        ("layers", [], "layers is [], with fewer than 1 entries"),
        ("layers", {}, "layers is {}, not an array"),
        ("layers.1", 3, "layers[1] is 3, not an object"),
        ("layers.1.name", 3, "layers[1].name is 3, not a string"),
        ("layers.1.name", REMOVE, "layers[1].name is missing"),
        ("layers.0.forward_seconds", -0.5, "layers[0].forward_seconds is -0.5, less than 0"),
        ("layers.0.forward_seconds", False, "layers[0].forward_seconds is False, not a number"),
        ("layers.0.backward_seconds", "1", "layers[0].backward_seconds is '1', not a number"),
        ("layers.0.backward_seconds", None, "layers[0].backward_seconds is None, not a number"),
        ("layers.0.weight_bytes", REMOVE, "layers[0].weight_bytes is missing"),
        ("layers.0.stash_bytes", -2, "layers[0].stash_bytes is -2, less than 0"),
        ("layers.0.type", [], "layers[0].type is [], not a string"),
        ("warm_up", 3, "warm_up is 3, not an object"),
        ("warm_up.num_steps", -1, "warm_up.num_steps is -1, less than 0"),
        ("warm_up.step_seconds", "long", "warm_up.step_seconds is 'long', not a number"),
        ("warm_up.links.0.link", [0], "warm_up.links[0].link is [0], with fewer than 2 entries"),
        ("warm_up.peak_bytes.0", "much", "warm_up.peak_bytes[0] is 'much', not an integer or a null"),
    ],
)  # fmt: skip
def test_errors_in_a_chain_are_named(tmp_path, path, value, message):
    file = tmp_path / "chain.json"
    file.write_text(json.dumps(changed(path, value)))
    with pytest.raises(ChainFormatError) as raised:
        Chain.load(file)
    assert message in str(raised.value)
    assert str(raised.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ('{"format": ', "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"input_bytes": NaN}', "input_bytes is nan, not a finite number"),
        ('{"layers": [{"weight_bytes": -Infinity}]}', r"layers\[0\].weight_bytes is -inf, not a finite number"),
        ('{"input_bytes": 1e999}', "input_bytes is inf, not a finite number"),
        ('{"input_bytes": ' + "9" * 5000 + "}", "input_bytes is inf, not a finite number"),
        ("null", "the file is None, not an object"),
    ],
)
def test_what_is_no_json_is_refused(tmp_path, text, message):
    file = tmp_path / "chain.json"
    file.write_text(text)
    with pytest.raises(ChainFormatError, match=message):
        Chain.load(file)
    with pytest.raises(PlanFormatError, match=message):
        Plan.load(file)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ChainFormatError, match=r"nowhere\.json: cannot be read: No such file"):
        Chain.load(tmp_path / "nowhere.json")
    with pytest.raises(ChainFormatError, match="cannot be read: Is a directory"):
        Chain.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ChainFormatError, match="not text"):
        Chain.load(tmp_path / "binary")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=some(300), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_value_anywhere_is_read_or_refused(data):
    """Whatever stands in one place of a chain or a plan file: a value, or the format's own error."""
    both = (Chain.from_dict, CHAIN, ChainFormatError), (Plan.from_dict, some_plan(), PlanFormatError)
    for read, base, error in both:
        paths = list(_paths(base))
        damaged = changed(data.draw(st.sampled_from(paths)), data.draw(json_values | st.just(REMOVE)), base)
        with contextlib.suppress(error):  # refused in its own words
            _use(read(damaged))


@cache
def some_plan():
    return make_plan(Chain.from_dict(CHAIN), PLATFORM, num_micro_batches=3).to_dict()


def _use(value):
    """What reads well must also be usable: replayed, drawn, planned, or refused in one of our own errors."""
    with contextlib.suppress(MadPipeError, ValueError):
        if isinstance(value, Plan):
            value.summary()
            timeline(value)
            replay(value, Chain.from_dict(CHAIN))
        else:
            make_plan(value, PLATFORM, num_micro_batches=3)


def _paths(value, prefix=""):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield f"{prefix}{key}"
        yield from _paths(inner, f"{prefix}{key}.")


@settings(max_examples=some(60), deadline=None)
@given(instances(), st.sampled_from([None, 1, 4]))
def test_plan_round_trip(tmp_path_factory, instance, num_micro_batches):
    chain, platform = instance
    try:
        plan = make_plan(chain, platform, num_micro_batches=num_micro_batches)
    except InfeasibleError:
        return
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan


def test_the_plan_file_has_the_documented_fields():
    plan = make_plan(Chain.from_dict(CHAIN), PLATFORM, num_micro_batches=4).to_dict()
    assert list(plan) == [
        "format", "chain", "platform", "algorithm", "period_seconds", "lower_bound_seconds", "gap", "proved",
        "class_lower_bound_seconds", "stages", "operations", "peak_memory_bytes", "memory",
        "planning_seconds", "num_micro_batches", "step_seconds", "blocking_step_seconds",
        "step_lower_bound_seconds", "step_gap", "step_proved", "order",
    ]  # fmt: skip
    assert plan["format"] == "madpipe-plan/1"
    assert plan["stages"][0].keys() == {
        "layers", "layer_names", "device", "rematerialize", "in_flight", "num_trainable_parameters",
    }  # fmt: skip
    for operation in plan["operations"]:
        place = "link" if operation["operation"].startswith("S") else "device"
        assert operation.keys() == {"operation", place, "start_seconds", "duration_seconds", "shift"}
    assert {op["operation"] for op in plan["operations"]} == {"F0", "F1", "SF0", "SB0", "B0", "B1"}
    assert plan["order"] == [
        [["F0", 0], ["F0", 1], ["F0", 2], ["B0", 0], ["F0", 3], ["B0", 1], ["B0", 2], ["B0", 3]],
        [["F1", 0], ["B1", 0], ["F1", 1], ["B1", 1], ["F1", 2], ["B1", 2], ["F1", 3], ["B1", 3]],
    ]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", "madpipe-plan/9", "format is 'madpipe-plan/9', not 'madpipe-plan/1'"),
        ("stages.1.layers", [0, 2], "stage 1 begins at layer 0, not at 1"),
        ("stages.1.device", 7, "stages[1].device is 7 of 2 devices"),
        ("stages.0.rematerialize", [[0, 9]], "rematerialize range [0, 9] is not within layers [0, 1]"),
        ("peak_memory_bytes", [1], "peak_memory_bytes has 1 entries for 2 devices"),
        ("chain.num_layers", 3, "the stages end at layer 2 of 3"),
        ("operations.0.operation", "X1", "operations[0].operation is 'X1', not of the form"),
        ("operations.0.start_seconds", -1, "operations[0].start_seconds is -1, less than 0"),
        ("period_seconds", 0, "period_seconds is 0, less than 1e-15"),
    ],
)
def test_errors_in_a_plan_are_named(path, value, message):
    plan = make_plan(Chain.from_dict(CHAIN), PLATFORM).to_dict()
    with pytest.raises(PlanFormatError) as raised:
        Plan.from_dict(changed(path, value, plan))
    assert message in str(raised.value)


def test_a_plan_for_another_chain_is_refused():
    plan = make_plan(Chain.from_dict(CHAIN), PLATFORM)
    with pytest.raises(PlanMismatchError, match="another profile"):
        plan.check_chain(Chain.from_dict(changed("layers.0.forward_seconds", 1)))
    with pytest.raises(PlanMismatchError, match="the plan is for 2 layers"):
        plan.check_chain(Chain.from_dict(changed("layers.1", REMOVE)))


def test_a_pipe_is_written_to(tmp_path):
    """Its links lead to ``pipe:[...]``, which is no path."""
    code = "from deepspeed_partition.planner.io.files import write_text; write_text('/dev/stdout', 'text')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "text"), done.stderr
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(fifo, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)


def test_files_are_written_whole_or_not_at_all(tmp_path):
    """A crash while writing leaves the old file; no temporary file stays behind."""
    chain = Chain.from_dict(CHAIN)
    target = tmp_path / "chain.json"
    chain.save(target)
    before = target.read_text()
    bad = Chain.from_dict(CHAIN)
    object.__setattr__(bad, "name", object())  # cannot be written as JSON
    with pytest.raises(TypeError):
        bad.save(target)
    assert target.read_text() == before
    assert os.listdir(tmp_path) == ["chain.json"]
    assert stat.S_IMODE(target.stat().st_mode) & 0o444


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_seconds", float("nan")), ("forward_seconds", -1), ("backward_seconds", float("inf")),
        ("backward_seconds", True), ("weight_bytes", 1.5), ("weight_bytes", "3"), ("output_bytes", None),
        ("stash_bytes", -1), ("name", 3), ("type", 3), ("num_trainable_parameters", 2.5),
    ],
)  # fmt: skip
def test_a_layer_cannot_be_built_wrong(field, value):
    good = {"name": "a", "forward_seconds": 1, "backward_seconds": 1, "weight_bytes": 1, "output_bytes": 1}
    with pytest.raises(ValueError, match=field):
        LayerProfile(**(good | {field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_devices", 0), ("num_devices", 1.5), ("num_devices", True), ("num_devices", float("nan")),
        ("memory_bytes", 0), ("memory_bytes", float("inf")), ("memory_bytes", "16GB"), ("bandwidth", 0),
        ("bandwidth", float("nan")), ("bandwidth", -1), ("latency_seconds", -1), ("weight_copies", -1),
        ("weight_copies", float("inf")), ("comm_buffers", -1), ("comm_buffers", 1.5),
    ],
)  # fmt: skip
def test_a_platform_cannot_be_built_wrong(field, value):
    good = {"num_devices": 2, "memory_bytes": 1, "bandwidth": 1}
    with pytest.raises(ValueError, match=field):
        Platform(**(good | {field: value}))


def test_files_are_created_exclusively_under_names_that_nobody_can_predict(tmp_path, monkeypatch):
    """In a shared folder somebody may plant a link under a name that he can predict."""
    created, stock = [], os.open

    def noted(path, flags, *rest, **keywords):
        if flags & os.O_CREAT:
            created.append((os.path.basename(path), bool(flags & os.O_EXCL)))
        return stock(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", noted)
    for _ in range(2):
        write_json(tmp_path / "plan.json", {})
    names, are_exclusive = zip(*created, strict=True)
    assert are_exclusive == (True, True) and len({*names, "plan.json"}) == 3
