"""Which scheme on which machines: steps of ZeRO by hand, rankings that differ, and files that run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, Platform
from deepspeed_partition.cli import run
from deepspeed_partition.planner.cluster import scheme_choice
from deepspeed_partition.planner.cluster.scheme_choice import SchemeRanking, rank_schemes
from deepspeed_partition.planner.cluster.sharded_steps import GLOO, UnknownSharesError, sharded_step
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines


def chain_of(num_layers: int, weight_bytes: int, output_bytes: int, stash_bytes: int = 10) -> Chain:
    layers = tuple(
        LayerProfile(
            name=f"block{index}", forward_seconds=1.0, backward_seconds=2.0, weight_bytes=weight_bytes,
            output_bytes=output_bytes, stash_bytes=stash_bytes,
        )
        for index in range(num_layers)
    )  # fmt: skip
    return Chain(name="blocks", input_bytes=output_bytes, layers=layers, micro_batch_size=2)


def platform_of(size: int, memory_bytes: int, bandwidth: float, **others: Any) -> Platform:
    return Platform(num_devices=size, memory_bytes=memory_bytes, bandwidth=bandwidth, **others)


@pytest.mark.parametrize(
    ("stage", "memory", "sent"),
    [
        # 2 devices, 2 micro-batches each, 2 layers of 100 bytes and a stash of 10, 4 copies.
        (0, 4 * 200 + 20, 2 * 2 * 100),
        (1, 2 * 200 + 200 + 20, 2 * 2 * 100),
        (2, 200 + 300 + 20 + 100, 3 * 2 * 100),
        (3, 400 + 20 + 300, 6 * 2 * 100),
    ],
)
def test_memory_and_bytes_by_hand(stage: int, memory: int, sent: int) -> None:
    step = sharded_step(chain_of(2, 100, 1), platform_of(2, 10**6, 10.0, weight_copies=4), 4, stage)
    assert (step.memory_bytes, step.bytes_sent, step.compute_seconds) == (memory, sent, 12)


def test_steps_by_hand() -> None:
    """Two layers of 100 bytes, two devices, a micro-batch each, 10 bytes per second: 5 s for each pass of a layer.

    Forwards end at 2, backwards at 4 and 6. DDP: rings at 4-14 and 14-24. ZeRO-1: 4-9, 9-14, and gathers, 10.
    """
    chain, platform = chain_of(2, 100, 1), platform_of(2, 10**6, 10.0)
    assert sharded_step(chain, platform, 2, 0).step_seconds == 24
    assert sharded_step(chain, platform, 2, 1).step_seconds == 24
    assert sharded_step(chain, platform, 2, 2).step_seconds == 24
    fast = platform_of(2, 10**6, 1e9)
    for stage in range(4):
        assert sharded_step(chain, fast, 2, stage).step_seconds == pytest.approx(6, abs=1e-5)
    assert sharded_step(chain, fast, 2, 3, recomputes=True).step_seconds == pytest.approx(8, abs=1e-5)
    # ZeRO-3 gathers at 0-5 (F0 5-6), 5-10 (F1 10-11), 10-15 (B1 15-17), 15-20 (B0 20-22); gradients 20-25, 25-30.
    assert sharded_step(chain, platform, 2, 3).step_seconds == 30
    # Over gloo FSDP waits for each of its 3 + 1 passes of both layers, all 1.07 times as long, in 6 calls of 4 ms.
    over_gloo = sharded_step(chain, platform, 2, 3, collectives=GLOO)
    assert (
        over_gloo.step_seconds == pytest.approx(6 + 2 * 4 * 5 * 1.07 + 0.024) and over_gloo.bytes_sent == 4 * 200
    )
    assert sharded_step(chain, platform, 2, 0, collectives=GLOO).step_seconds == pytest.approx(4 + 20 * 1.07)
    with pytest.raises(ValueError, match="2 devices do not share 3 micro-batches evenly"):
        sharded_step(chain, platform, 3, 0)


def test_a_ring_goes_over_the_level_that_it_crosses() -> None:
    machines = Machines(
        devices=(DeviceGroup(count=4, memory_bytes=10**6),),
        links=(LinkLevel(group=2, bandwidth=1e9), LinkLevel(bandwidth=10.0)),
    )
    chain = chain_of(1, 400, 1)
    across = sharded_step(chain, Platform.on(machines), 4, 0)
    assert across.step_seconds == pytest.approx(3 + 2 * 3 * 100 / 10)
    within = sharded_step(chain, Platform.on(machines.first(2)), 2, 0)
    assert within.step_seconds == pytest.approx(3, abs=1e-3)


def ranked(chain: Chain, platform: Platform) -> SchemeRanking:
    return rank_schemes(chain, [platform], 8, time_limit_seconds=3)


def test_another_scheme_wins_on_another_chain() -> None:
    """Small weights: DDP. Large weights on fast links in small memory: ZeRO-3. Slow links: a pipeline."""
    light = ranked(chain_of(4, 1, 1000), platform_of(4, 10**6, 1000.0))
    assert light.best is not None and light.best.scheme == "DDP"
    sharded = ranked(chain_of(4, 10**6, 10**7), platform_of(4, 10**7 - 10**6, 1e9))
    assert sharded.best is not None and sharded.best.scheme.startswith("ZeRO-")
    heavy = ranked(chain_of(4, 10**6, 10), platform_of(4, 10**8, 1e5))
    assert heavy.best is not None and heavy.best.scheme.endswith(" 1 x 4")
    assert "DDP takes" in heavy.why() and "ZeRO-3 takes" in heavy.why()
    order = [choice.step_seconds for choice in heavy.choices if choice.fits]
    assert order == sorted(order, key=lambda seconds: seconds or 0.0)
    nothing = ranked(chain_of(4, 10**6, 10), platform_of(4, 1000, 1e5))
    assert nothing.best is None and nothing.why().startswith("Nothing that runs fits")


def test_prices_and_numbers_of_devices() -> None:
    machines = Machines(
        devices=(DeviceGroup(count=4, memory_bytes=10**9),),
        links=(LinkLevel(bandwidth=1e9),),
        price_per_device_hour=(3.6,),
    )
    platforms = [Platform.on(machines.first(number)) for number in (2, 4)]
    ranking = rank_schemes(chain_of(2, 1, 1), platforms, 4, time_limit_seconds=2)
    best = ranking.best
    assert best is not None and best.num_devices == 4 and " on 4 devices has the shortest step" in ranking.why()
    # 4 micro-batches of 2 samples in 6 s, on 4 devices for 3.6 an hour: 0.024 for 8 samples.
    assert best.price_per_million == pytest.approx(0.024 / 8 * 1e6, rel=1e-3)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, out = str(tmp_path / "chain.json"), str(tmp_path / "out.json")
    chain_of(4, 10**6, 10).save(chain)
    how = ["--devices", "4", "--memory", "100MB", "--bandwidth", "100kB/s", "--time-limit", "2"]
    asked = ["schemes", chain, *how]
    assert run([*asked, "-o", out]) == 0
    told = capsys.readouterr().out
    assert "blocks: 4 layers, 16 micro-batches per step, on 4 devices of 100 MB" in told
    assert " 1 x 4 has the shortest step" in told and Plan.load(out).num_micro_batches == 16
    assert run(["check", out, chain]) == 0
    capsys.readouterr()
    assert run([*asked, "--numbers", "2,4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["num_devices"] for row in data["schemes"]} == {2, 4} and data["schemes"][0]["fits"]
    for wrong, words in ((["--numbers", "8"], "--numbers has 8"), (["--numbers", "x"], "is no list of numbers")):
        assert run([*asked, *wrong]) == 2
        assert words in capsys.readouterr().err
    small = ["schemes", chain, "--devices", "2", "--memory", "1kB", "--bandwidth", "1GB/s", "--time-limit", "1"]
    assert run(small) == 3


def test_a_ranking_keeps_its_limit_with_all_that_a_plan_takes_beside_its_search(monkeypatch):
    """One of 70 billion parameters on 64 devices took 35 s of the processor of a limit of 12."""
    worked, planned = [0.0], []

    def search(chain, platform, algorithm, *, data_parallel, time_limit_seconds, **_):
        length = platform.num_devices // data_parallel
        planned.append((algorithm, length))
        worked[0] += time_limit_seconds + 0.5 * length
        raise InfeasibleError("no plan was found")

    monkeypatch.setattr(scheme_choice.time, "thread_time", lambda: worked[0])
    monkeypatch.setattr(scheme_choice, "make_plan", search)
    ranking = rank_schemes(chain_of(16, 1, 1), [platform_of(16, 10**6, 1e9)], 16, time_limit_seconds=12)
    assert worked[0] <= 12
    assert planned == [("uniform", 2), ("madpipe", 2), ("madpipe", 4), ("madpipe", 8)]
    left_out = {row.scheme for row in ranking.choices if "too little of the time limit is left" in row.reason}
    assert left_out == {"MadPipe 1 x 16", *(f"1F1B with equal stages {16 // n} x {n}, ZeRO-1" for n in (4, 8)),
                        "1F1B with equal stages 1 x 16"}  # fmt: skip


def test_pipelines_whose_weights_alone_are_too_much_are_not_planned() -> None:
    """70 billion parameters on 16 devices: searches for pipelines that could not fit took minutes."""
    chain = chain_of(8, 100, 1)  # 800 bytes, 8 copies: 6,400; two pipelines share 6 of 8, which leaves 5: 4,000
    ranking = rank_schemes(chain, [platform_of(4, 1800, 1e9, weight_copies=8)], 8, time_limit_seconds=2)
    rows = {row.scheme: row for row in ranking.choices}
    two = rows["MadPipe 2 x 2, ZeRO-1"]
    assert not two.fits and two.memory_bytes == 2000
    assert two.reason == "needs more than 2 kB of 1.8 kB: weights alone"
    assert rows["MadPipe 1 x 4"].fits


def measured_chain() -> Chain:
    """Eight layers of 100 bytes, for each of which a run kept 900, and needed 5,000 more to step over it."""
    chain = chain_of(8, 100, 1)
    layers = [replace(each, training_bytes=900, optimizer_transient_bytes=5000) for each in chain.layers]
    return replace(chain, layers=tuple(layers))


def test_weights_that_layers_share_count_once_for_a_pipeline() -> None:
    """Two devices with 1,000 bytes of weights each, three copies: the first two layers have the same ones."""
    chain = chain_of(3, 1000, 1)
    first, second, third = chain.layers
    tied = tuple(replace(layer, shared_weights={"embedding": 1000}) for layer in (first, second))
    chain = replace(chain, layers=(*tied, third))
    ranking = rank_schemes(chain, [platform_of(2, 4000, 1e9, weight_copies=3)], 4, time_limit_seconds=2)
    row = next(each for each in ranking.choices if each.scheme == "MadPipe 1 x 2")
    assert row.fits and row.plan is not None and max(row.plan.peak_memory_bytes) == row.memory_bytes < 4000
    apart = rank_schemes(chain_of(3, 1000, 1), [platform_of(2, 4000, 1e9)], 4, time_limit_seconds=2)
    row = next(each for each in apart.choices if each.scheme == "MadPipe 1 x 2")
    assert "needs more than 4.5 kB of 4 kB: weights alone" in row.reason


def test_what_zero_shares_of_a_run_is_not_known() -> None:
    """All rows of ZeRO said that they need as much as DDP, as if nothing were shared."""
    ranking = rank_schemes(measured_chain(), [platform_of(4, 10**5, 1e9)], 8, time_limit_seconds=1)
    rows = {row.scheme: row for row in ranking.choices}
    assert rows["DDP"].memory_bytes == 8 * 900 + 5000 and rows["DDP"].fits
    for stage in (1, 2, 3):
        row = rows[f"ZeRO-{stage}"]
        assert not row.fits and row.memory_bytes is None
        assert row.reason == (
            "is not known: training_bytes say what a run kept for each layer, and not which part of it "
            f"ZeRO-{stage} shares: drop them, and give weight_copies"
        )
        with pytest.raises(UnknownSharesError):
            sharded_step(measured_chain(), platform_of(4, 10**5, 1e9), 8, stage)


def test_looped_pipelines_keep_what_a_run_kept() -> None:
    """They counted three times the weights, 600, and neither 1,800 that a run kept nor the optimizer's step."""
    ranking = rank_schemes(measured_chain(), [platform_of(4, 6000, 1e9)], 8, time_limit_seconds=1)
    rows = {row.scheme: row for row in ranking.choices}
    for scheme, num_layers in (
        ("looped pipelines 1 x 4", 2),
        ("looped pipelines 2 x 2", 4),
        ("fully sharded looped pipelines 2 x 2", 4),
    ):
        assert rows[scheme].memory_bytes == num_layers * 900 + 5000, scheme
        assert rows[scheme].reason.startswith("needs ")
    small = rank_schemes(chain_of(8, 100, 1, stash_bytes=0), [platform_of(4, 6000, 1e9)], 8, time_limit_seconds=1)
    memory = {row.scheme: row.memory_bytes for row in small.choices}
    assert memory["looped pipelines 1 x 4"] == 3 * 200 + 4


UNLIKE = Machines(
    devices=(DeviceGroup(count=2, memory_bytes=10**6), DeviceGroup(count=2, memory_bytes=10**6, speed=0.5)),
    links=(LinkLevel(bandwidth=1e9),),
)


def test_pipelines_without_a_plan_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They "had no plan that fits", in 10^6 bytes of which 800 were needed."""
    chain = chain_of(4, 100, 1)
    platforms = [Platform.on(UNLIKE.first(2)), Platform.on(UNLIKE)]
    ranking = rank_schemes(chain, platforms, 8, recompute="micro-batch", time_limit_seconds=20)
    rows = {(row.scheme, row.num_devices): row for row in ranking.choices}
    assert rows["MadPipe 1 x 2", 2].fits
    assert rows["MadPipe 1 x 4", 4].reason == (
        "has no plan: recompute='micro-batch' is planned for devices and links that are alike: leave it out, or "
        "give num_devices, memory_bytes and bandwidth in the place of machines"
    )
    with pytest.raises(ValueError, match="recompute='micro-batch' is planned for devices and links that are"):
        rank_schemes(chain, [Platform.on(UNLIKE)], 8, recompute="micro-batch", time_limit_seconds=1)
    chain.save(tmp_path / "chain.json")
    UNLIKE.save(tmp_path / "machines.json")
    asked = ["schemes", str(tmp_path / "chain.json"), "--machines", str(tmp_path / "machines.json")]
    assert run([*asked, "--recompute", "micro-batch"]) == 2
    assert capsys.readouterr().err.startswith("madpipe: recompute='micro-batch' is planned for devices")


def test_memory_is_no_reason_where_it_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers are no pipeline of 4 devices, and these do not share 3 micro-batches: that was "give memory"."""
    chain_of(2, 100, 1).save(tmp_path / "chain.json")
    asked = ["schemes", str(tmp_path / "chain.json"), "--devices", "4", "--memory", "1MB", "--bandwidth", "1GB/s"]
    assert run([*asked, "--micro-batches", "3"]) == 2
    told = capsys.readouterr()
    why = "DDP is not possible: 4 devices do not share 3 micro-batches evenly: give a multiple of 4"
    assert f"madpipe: nothing runs: {why}\n" in told.err and "memory" not in told.out.splitlines()[-1]
