"""What explains memory: the parts of a peak, what would lower it, and what would do where nothing fits."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deepspeed_partition import InfeasibleError, Platform, make_plan
from deepspeed_partition.cli import run
from deepspeed_partition.planner import deadline
from deepspeed_partition.planner.remedies import divided, with_remedies
from deepspeed_partition.planner.report.memory_report import explain_memory
from tests.exhaustive import some
from tests.planner.instances import FREE, chain, random_instance

ROOMY = Platform(num_devices=2, memory_bytes=1000, bandwidth=FREE, weight_copies=2)


def four_layers():
    return chain(
        [1, 1, 1, 1], [1, 1, 1, 1], weights=[1, 2, 3, 4], outputs=[5, 5, 5, 5], stash=[10, 20, 30, 40],
        input_bytes=5, transient=[0, 7, 0, 0],
    )  # fmt: skip


@pytest.mark.parametrize("num_micro_batches", [None, 3])
def test_parts_add_up_to_what_the_plan_says(num_micro_batches):
    explained = 0
    for seed in range(some(60)):
        layers, platform = random_instance(seed, most_layers=5, most_devices=3)
        try:
            plan = make_plan(layers, platform, "contiguous", num_micro_batches=num_micro_batches)
        except InfeasibleError:
            continue
        for peak, wanted in zip(explain_memory(plan, layers), plan.peak_memory_bytes, strict=True):
            assert sum(part.num_bytes for part in peak.parts) == peak.use.total == wanted
            for term in ("weights", "stash", "buffers", "transient", "fixed"):
                parts = sum(part.num_bytes for part in peak.parts if part.term == term)
                assert parts == getattr(peak.use, term), (seed, term)
            explained += 1
    assert explained > some(20)


def test_by_hand():
    plan = make_plan(four_layers(), ROOMY, [0, 2, 4], num_micro_batches=3)
    first, last = explain_memory(plan, four_layers())
    # Two micro-batches of 30, two tensors of 5, weights of 3 twice, and 7 while a layer runs.
    assert [(part.term, part.num_bytes) for part in first.parts] == [
        ("stash", 60), ("buffers", 10), ("transient", 7), ("weights", 6),
    ]  # fmt: skip
    assert "stage 0: 2 in flight, 30 B each ('layer1' 20 B, 'layer0' 10 B)" in first.parts[0].what
    assert "while stage 0 runs" in first.when
    saved = {remedy.what: remedy.saved_bytes for remedy in first.remedies}
    # Kept is the input of 5 alone, 25 less for each of two; one of them is there again while it runs backward.
    assert saved["recompute stage 0, for 2 s more per micro-batch"] == 2 * 25 - 25
    assert saved["layer 'layer1' in stage 1"] == 2 * 20 + 7 + 2 * 2
    assert saved["half the micro-batch size"] == 30 + 4 + 3  # of 60, twice 5 and 7; halves rounded up
    assert [remedy.saved_bytes for remedy in first.remedies] == sorted(saved.values(), reverse=True)
    assert "layer 'layer2' in stage 0" in {remedy.what for remedy in last.remedies}


def test_behind_the_backwards_no_micro_batch_is_there():
    layers = four_layers()
    heavy = replace(layers.layers[0], optimizer_transient_bytes=500)
    layers = replace(layers, layers=(heavy, *layers.layers[1:]))
    plan = make_plan(layers, ROOMY, [0, 2, 4], num_micro_batches=3)
    peak = explain_memory(plan, layers)[0]
    assert (peak.seconds, peak.use.transient, peak.use.stash) == (None, 500, 0)
    assert peak.when.startswith("after the last backward of a step")


def test_show_tells_what_the_peaks_consist_of(tmp_path, capsys):
    four_layers().save(tmp_path / "layers.json")
    plan = make_plan(four_layers(), ROOMY, [0, 2, 4], num_micro_batches=3)
    plan.save(tmp_path / "plan.json")
    assert run(["show", str(tmp_path / "plan.json"), "--memory"]) == 2
    assert "--memory needs the chain of the plan" in capsys.readouterr().err
    assert run(["show", str(tmp_path / "plan.json"), "--memory", "--chain", str(tmp_path / "layers.json")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("device 0: 83 B at its peak, ")
    assert "would save" in text
    four_layers().save(tmp_path / "plan.chain.json")  # where a run leaves it
    assert run(["show", str(tmp_path / "plan.json"), "--memory", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["peak_memory_bytes"] for each in told] == list(plan.peak_memory_bytes)
    assert run(["show", str(tmp_path / "plan.json"), "--chain", str(tmp_path / "layers.json")]) == 2


def test_what_would_do_where_nothing_fits_is_a_plan_that_fits():
    layers = replace(four_layers(), micro_batch_size=4)
    small = replace(ROOMY, memory_bytes=63)
    how = {"num_micro_batches": 2, "algorithm": "contiguous"}
    with pytest.raises(InfeasibleError) as refused:
        make_plan(layers, small, **how)
    told = with_remedies(refused.value, make_plan, layers, small, **how)
    assert (told.smallest_memory_bytes, told.short_bytes) == (
        refused.value.smallest_memory_bytes, refused.value.short_bytes,
    )  # fmt: skip
    assert set(told.remedies) == {"a micro-batch of 2", "3 devices"}
    assert str(told).startswith(f"{refused.value}. What would do, the cheapest first: ")
    assert pickle.loads(pickle.dumps(told)).remedies == told.remedies
    halves = make_plan(divided(layers, 2), small, num_micro_batches=4, algorithm="contiguous")
    assert max(halves.peak_memory_bytes) <= 63
    more = make_plan(layers, replace(small, num_devices=3), **how)
    costs = {
        "a micro-batch of 2": 2 * 2 * halves.step_seconds / 4,
        "3 devices": 3 * more.step_seconds / 2,
    }
    assert list(told.remedies) == sorted(costs, key=costs.__getitem__)


@pytest.mark.parametrize(("limit", "most"), [(0.1, 0.1), (2, 2), (60, 5), (None, 5)])
def test_what_would_do_shares_the_time_limit(monkeypatch, limit, most):
    """Each of them once had 5 s, whatever the limit, and the search for what would help them besides."""
    worked = 0.0
    monkeypatch.setattr(deadline, "time", SimpleNamespace(thread_time=lambda: worked, monotonic=lambda: 0.0))
    asked = []

    def make(chain, platform, *, time_limit_seconds, is_one_of_many, **how):
        nonlocal worked
        asked.append(time_limit_seconds)
        worked += time_limit_seconds
        assert is_one_of_many
        raise InfeasibleError("does not fit", smallest_memory_bytes=1)

    refused, small = InfeasibleError("does not fit", smallest_memory_bytes=100), replace(ROOMY, memory_bytes=63)
    how = {"recompute": "never", "num_micro_batches": 2}
    assert with_remedies(refused, make, four_layers(), small, None, limit, **how) is refused
    assert len(asked) == 6 and max(asked[1:]) < asked[0] and sum(asked) <= most
    stopped = deadline.Deadline()
    stopped.stop()
    with_remedies(refused, make, four_layers(), small, stopped, limit, **how)
    assert len(asked) == 6


def test_one_of_many_says_no_more_than_that_it_does_not_fit():
    small = replace(ROOMY, memory_bytes=63)
    with pytest.raises(InfeasibleError, match=r"no plan fits into 63 B per device on 2 devices$") as refused:
        make_plan(four_layers(), small, "contiguous", num_micro_batches=2, is_one_of_many=True)
    assert refused.value.smallest_memory_bytes is None


def test_zero_1_is_a_remedy_of_several_pipelines():
    layers = chain([1, 1], [1, 1], weights=[10, 10], outputs=[0, 0], stash=[1, 1])
    small = Platform(num_devices=4, memory_bytes=65, bandwidth=FREE, weight_copies=8)
    how = {"num_micro_batches": 2, "data_parallel": 2, "algorithm": "contiguous"}
    with pytest.raises(InfeasibleError) as refused:
        make_plan(layers, small, **how)
    told = with_remedies(refused.value, make_plan, layers, small, **how)
    assert "ZeRO-1 (zero 1)" in told.remedies


def test_a_period_that_no_memory_allows_has_no_remedy():
    with pytest.raises(InfeasibleError) as refused:
        make_plan(four_layers(), ROOMY, period_seconds=0.5)
    assert with_remedies(refused.value, make_plan, four_layers(), ROOMY, period_seconds=0.5) is refused.value
