"""Machines that are not alike: files, plans against brute force, and what the replay knows of them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Plan, Platform, make_plan, replay
from deepspeed_partition.cli import run
from deepspeed_partition.planner.errors import MachinesFormatError
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines, pipelines_of
from deepspeed_partition.planner.report.comparison import compare

FILE: dict[str, Any] = {
    "format": "madpipe-machines/1",
    "devices": [
        {"count": 2, "name": "fast", "memory_bytes": 400},
        {"count": 2, "memory_bytes": 300, "speed": 0.5},
    ],
    "links": [{"group": 2, "bandwidth": 20.0}, {"bandwidth": 2.0, "latency_seconds": 1.0}],
    "price_per_device_hour": [3.5, 1.2],
}
MACHINES = Machines.from_dict(FILE)


def random_chain(seed: int, num_layers: int) -> Chain:
    rng = random.Random(seed)
    layers = tuple(
        LayerProfile(
            name=str(index), forward_seconds=rng.randint(1, 9), backward_seconds=rng.randint(1, 9),
            weight_bytes=rng.randint(0, 9), output_bytes=rng.randint(1, 20),
        )
        for index in range(num_layers)
    )  # fmt: skip
    return Chain(name="random", input_bytes=20, layers=layers)


def random_machines(seed: int) -> Machines:
    rng = random.Random(seed)
    devices = tuple(
        DeviceGroup(count=rng.randint(1, 2), memory_bytes=rng.randint(60, 300), speed=rng.choice([0.5, 1.0, 2.0]))
        for _ in range(2)
    )
    inner = LinkLevel(group=2, bandwidth=rng.choice([4.0, 20.0]), latency_seconds=rng.choice([0.0, 0.5]))
    return Machines(devices=devices, links=(inner, LinkLevel(bandwidth=2.0, latency_seconds=1.0)))


def brute_force(chain: Chain, platform: Platform) -> float | None:
    """Return the shortest period of 1F1B* over all partitions and devices, in seconds; None where none fits."""
    best = None
    size = chain.num_layers
    for count in range(1, min(platform.num_devices, size) + 1):
        for cuts in itertools.combinations(range(1, size), count - 1):
            for devices in itertools.permutations(range(platform.num_devices), count):
                period = period_of(chain, platform, (0, *cuts, size), devices)
                best = period if best is None or (period is not None and period < best) else best
    return best


def period_of(chain: Chain, platform: Platform, cuts: tuple[int, ...], devices: tuple[int, ...]) -> float | None:
    loads: list[float] = []
    rooms: list[float] = []
    for (start, stop), device in zip(pairwise(cuts), devices, strict=True):
        if start:
            size = chain.boundary_bytes(start)
            loads.append(2 * platform.transfer_seconds(size, devices[len(rooms) - 1], device))
        layers = chain.layers[start:stop]
        loads.append(sum(layer.compute_seconds for layer in layers) / platform.speed_of(device))
        ends = [chain.boundary_bytes(cut) for cut in (start, stop) if 0 < cut < chain.num_layers]
        room = platform.memory_of(device) - 3 * sum(layer.weight_bytes for layer in layers) - 2 * sum(ends)
        rooms.append(room / sum(layer.stash_bytes or 0 for layer in layers))
    candidates = sorted({sum(loads[i:j]) for i in range(len(loads)) for j in range(i + 1, len(loads) + 1)})
    for period in candidates:
        if period < max(loads):
            continue
        group, fill, fits = 1, 0.0, True
        for index in reversed(range(len(loads))):
            if fill + loads[index] <= period + 1e-9:
                fill += loads[index]
            else:
                group, fill = group + 1, loads[index]
            fits &= index % 2 == 1 or group <= rooms[index // 2] + 1e-9
        if fits:
            return period
    return None


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force(seed: int) -> None:
    chain, platform = random_chain(seed, 5), Platform.on(random_machines(seed))
    best = brute_force(chain, platform)
    if best is None:
        with pytest.raises(InfeasibleError, match="no plan fits into the memory of these"):
            make_plan(chain, platform, "contiguous", recompute="never")
        return
    plan = make_plan(chain, platform, "contiguous", recompute="never")
    assert plan.period_seconds == pytest.approx(best, rel=1e-9)
    assert (plan.proved and plan.proved_class == "contiguous") or platform.is_alike
    assert plan.lower_bound_seconds <= plan.period_seconds
    assert not replay(plan, chain).violations
    assert make_plan(chain, platform, time_limit_seconds=2).period_seconds <= best * (1 + 1e-9)


@pytest.mark.parametrize("num_micro_batches", [None, 4])
def test_directions_that_do_not_wait_for_each_other(num_micro_batches: int | None) -> None:
    """One transfer at a time makes the link the slowest part of this cut, and one in each direction does not."""
    layers = tuple(
        LayerProfile(name=name, forward_seconds=1, backward_seconds=2, weight_bytes=1, output_bytes=size)
        for name, size in (("a", 10), ("b", 1))
    )
    chain = Chain(name="two", input_bytes=1, layers=layers)
    machines = Machines(
        devices=(DeviceGroup(count=1, memory_bytes=800), DeviceGroup(count=1, memory_bytes=900)),
        links=(LinkLevel(bandwidth=4.0),),
    )
    half = make_plan(chain, Platform.on(machines), num_micro_batches=num_micro_batches, time_limit_seconds=1)
    assert (half.period_seconds, half.proved) == (5, num_micro_batches is None)
    full = Platform.on(machines, duplex="full")
    for algorithm in ("madpipe", "contiguous", [0, 1, 2]):
        plan = make_plan(chain, full, algorithm, num_micro_batches=num_micro_batches, time_limit_seconds=1)
        assert (plan.period_seconds, plan.lower_bound_seconds, plan.boundaries) == (3, 3, [0, 1, 2])
        assert not plan.proved and not replay(plan, chain).violations


def test_the_memory_of_each_device_limits_directions_that_do_not_wait() -> None:
    """The larger device has room for what both directions at once keep in flight, and the smaller one has not."""
    chain = random_chain(2, 5)
    for seed in range(6):
        platform = Platform.on(random_machines(seed), duplex="full")
        half = replace(platform, duplex="half")
        try:
            plans = [make_plan(chain, each, "contiguous", recompute="never") for each in (platform, half)]
        except InfeasibleError:
            continue
        assert plans[0].period_seconds <= plans[1].period_seconds * (1 + 1e-9)
        assert plans[0].lower_bound_seconds <= plans[0].period_seconds
        assert platform.is_alike or not plans[0].proved
        assert not replay(plans[0], chain).violations


def test_nothing_is_proved_with_fewer_buffers_than_are_counted() -> None:
    platform = Platform.on(random_machines(0), comm_buffers=0)
    plan = make_plan(random_chain(0, 5), platform, "contiguous", recompute="never")
    assert not platform.is_alike and not plan.proved and plan.proved_class is None


@pytest.mark.parametrize("how", [{}, {"num_micro_batches": 4}, {"num_micro_batches": 4, "data_parallel": 2}])
@pytest.mark.parametrize("seed", [0])
def test_no_slower_than_on_the_slowest_links(seed: int, how: dict[str, Any]) -> None:
    """The same devices, where every link has the least bandwidth and every device the least speed and memory."""
    chain, machines = random_chain(seed + 20, 7), replace(MACHINES, price_per_device_hour=())
    slow = Machines(
        devices=(DeviceGroup(count=4, memory_bytes=300, speed=0.5),),
        links=(LinkLevel(bandwidth=2.0, latency_seconds=1.0),),
    )
    for algorithm in ("madpipe", "contiguous"):
        plan = make_plan(chain, Platform.on(machines), algorithm, time_limit_seconds=3, **how)
        slowest = make_plan(chain, Platform.on(slow), algorithm, time_limit_seconds=3, **how)
        seconds = [each.step_seconds or each.period_seconds for each in (plan, slowest)]
        assert seconds[0] <= seconds[1] * (1 + 1e-9)
        assert not replay(plan, chain).violations and not replay(slowest, chain).violations
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_more_layers_on_the_faster_device_and_cuts_at_the_fast_link() -> None:
    layers = tuple(
        LayerProfile(
            name=str(index), forward_seconds=1, backward_seconds=2, weight_bytes=0, output_bytes=10, stash_bytes=1
        )
        for index in range(9)
    )
    chain = Chain(input_bytes=1, layers=layers)
    speeds = tuple(DeviceGroup(count=1, memory_bytes=10**6, speed=speed) for speed in (2.0, 1.0))
    fast = Machines(devices=speeds, links=(LinkLevel(bandwidth=1e6),))
    plan = make_plan(chain, Platform.on(fast), "contiguous")
    shares = {stage.device: stage.layers[1] - stage.layers[0] for stage in plan.stages}
    assert shares == {0: 6, 1: 3} and plan.period_seconds == 9
    # Four devices in two nodes: with a slow network the pipeline stays in one node.
    nodes = Machines(
        devices=(DeviceGroup(count=4, memory_bytes=10**6),),
        links=(LinkLevel(group=2, bandwidth=1e6), LinkLevel(bandwidth=1.0)),
    )
    plan = make_plan(chain, Platform.on(nodes), "contiguous")
    assert len(plan.stages) == 2 and plan.stages[0].device // 2 == plan.stages[1].device // 2


def test_a_comparison_states_no_bound_of_plans_that_recompute_nothing() -> None:
    """Each device has room for what one layer keeps of one micro-batch, and recomputing lets more be in flight."""
    layer = LayerProfile(
        name="", forward_seconds=1, backward_seconds=2, weight_bytes=0, output_bytes=1, stash_bytes=20
    )
    chain = Chain(name="two", input_bytes=1, layers=(replace(layer, name="a"), replace(layer, name="b")))
    devices = (DeviceGroup(count=1, memory_bytes=30), DeviceGroup(count=1, memory_bytes=31))
    platform = Platform.on(Machines(devices=devices, links=(LinkLevel(bandwidth=1000.0),)))

    compared = compare(chain, platform, ("uniform", "madpipe-paper"), time_limit_seconds=2)
    bounds = [each.plan.lower_bound_seconds for each in compared.fitting if each.plan]
    assert (bounds, compared.lower_bound_seconds) == ([3, 6], 3)
    assert min(each.seconds for each in compared.fitting) == 4

    never = compare(chain, platform, ("uniform", "madpipe-paper"), time_limit_seconds=2, recompute="never")
    assert never.lower_bound_seconds == 6

    for num_micro_batches in (None, 3):
        how = {"num_micro_batches": num_micro_batches, "time_limit_seconds": 2}
        planned = make_plan(chain, platform, "parameters", recompute="never", **how)
        beside = compare(chain, platform, ("uniform",), planned=planned, **how)
        own = planned.lower_bound_seconds if planned.step is None else planned.step.lower_bound_seconds
        stated = beside.lower_bound_seconds if planned.step is None else beside.step_lower_bound_seconds
        assert stated <= beside.contenders[1].seconds < own


def test_replicas_all_reduce_over_the_level_that_they_cross() -> None:
    """Heavy weights: replicas of a stage stay in a node. Heavy activations: pipelines do."""

    def chain_of(weight_bytes: int, output_bytes: int) -> Chain:
        layer = LayerProfile(
            name="", forward_seconds=1, backward_seconds=2, weight_bytes=weight_bytes, output_bytes=output_bytes,
            stash_bytes=1,
        )  # fmt: skip
        return Chain(input_bytes=1, layers=(layer,) * 4)

    machines = Machines(
        devices=(DeviceGroup(count=4, memory_bytes=10**6),),
        links=(LinkLevel(group=2, bandwidth=1000.0), LinkLevel(bandwidth=1.0)),
    )
    how: dict[str, Any] = {"num_micro_batches": 4, "data_parallel": 2, "time_limit_seconds": 2}
    heavy = make_plan(chain_of(1000, 1), Platform.on(machines), "contiguous", **how)
    assert heavy.platform.pipelines == ((0, 2), (1, 3)) and heavy.allreduce_seconds[0] == pytest.approx(2.0)
    light = make_plan(chain_of(0, 100), Platform.on(machines), "contiguous", **how)
    assert light.platform.pipelines == ((0, 1), (2, 3))
    for plan, chain in ((heavy, chain_of(1000, 1)), (light, chain_of(0, 100))):
        assert not replay(plan, chain).violations
    wrong = replace(heavy, allreduce_seconds=tuple(each * 2 for each in heavy.allreduce_seconds))
    assert any("the all-reduce of stage 0" in each for each in replay(wrong, chain_of(1000, 1)).violations)


def test_replay_knows_links_speeds_and_memory() -> None:
    chain = random_chain(3, 5)
    plan = make_plan(chain, Platform.on(MACHINES), "contiguous", num_micro_batches=3, time_limit_seconds=2)
    assert not replay(plan, chain).violations
    for change, words in (
        ({"devices": (DeviceGroup(count=4, memory_bytes=400, speed=3.0),)}, " lasts "),
        ({"devices": tuple(replace(each, memory_bytes=9) for each in MACHINES.devices)}, "bytes short"),
        ({"links": (LinkLevel(bandwidth=1.0),)}, " lasts "),
    ):
        others = replace(MACHINES, price_per_device_hour=(), **change)
        changed = replace(plan, platform=replace(plan.platform, machines=others))
        assert any(words in each for each in replay(changed, chain).violations)


def test_machines_that_are_alike_are_the_simple_platform() -> None:
    chain = random_chain(5, 6)
    machines = Machines(devices=(DeviceGroup(count=3, memory_bytes=400),), links=(LinkLevel(bandwidth=2.0),))
    simple = make_plan(chain, Platform(num_devices=3, memory_bytes=400, bandwidth=2.0))
    plan = make_plan(chain, Platform.on(machines))
    assert (plan.period_seconds, plan.stages, plan.proved_class) == (
        simple.period_seconds, simple.stages, simple.proved_class,
    )  # fmt: skip
    assert not replay(plan, chain).violations


def test_file_and_platform_come_back(tmp_path: Path) -> None:
    path = tmp_path / "machines.json"
    MACHINES.save(path)
    assert Machines.load(path) == MACHINES
    assert MACHINES.price_per_hour([0, 3]) == 4.7
    assert MACHINES.first(3).devices[1].count == 1 and MACHINES.first(2).price_per_device_hour == (3.5,)
    assert MACHINES.level_between(0, 1).bandwidth == 20 and MACHINES.level_between(1, 2).bandwidth == 2
    platform = replace(Platform.on(MACHINES), num_devices=2, pipelines=((0, 2), (1, 3)))
    assert Platform.from_dict(json.loads(json.dumps(platform.to_dict()))) == platform
    assert (platform.speed_of(1), platform.memory_of(1), platform.memory_of(0)) == (0.5, 300, 400)
    assert list(pipelines_of(4, 2)) == [((0, 2), (1, 3)), ((0, 1), (2, 3))]
    assert platform.transfer_seconds(20, 0, 1) == 11 and platform.ring_seconds(20, [0, 1]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "madpipe-machines/2"}, "format is 'madpipe-machines/2', not 'madpipe-machines/1'"),
        ({"devices": []}, "devices is []"),
        ({"devices": [{"count": 1}]}, "devices[0].memory_bytes is missing"),
        ({"devices": [{"count": 1, "memory_bytes": 5, "speed": 0}]}, "devices[0].speed is 0"),
        ({"links": [{"group": 2, "bandwidth": 1}]}, "links[0].group is 2 and there are 4 devices"),
        ({"links": [{"bandwidth": 1}, {"group": 2, "bandwidth": 1}]}, "links[0].group is left out"),
        ({"links": [{"group": 2, "bandwidth": 1}, {"group": 3, "bandwidth": 1}]}, "links[1].group is 3"),
        ({"links": [{"bandwidth": -1}]}, "links[0].bandwidth is -1"),
        ({"price_per_device_hour": [1]}, "price_per_device_hour has 1 entries and devices has 2"),
    ],
)
def test_bad_files_are_refused_with_the_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MachinesFormatError) as refused:
        Machines.from_dict(FILE | changes, where="machines.json")
    assert str(refused.value).startswith("machines.json: ") and words in str(refused.value)


def test_refuses_what_is_planned_for_alike_machines_alone() -> None:
    chain, platform = random_chain(1, 4), Platform.on(MACHINES)
    for how in (
        {"period_seconds": 100.0},
        {"recompute": "micro-batch"},
        {"num_stages": 2, "num_micro_batches": 2},
    ):
        with pytest.raises(ValueError, match="is planned for devices and links that are alike"):
            make_plan(chain, platform, **how)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port_bandwidth is for devices that are alike"):
        replace(platform, port_bandwidth=1.0)
    with pytest.raises(ValueError, match="each is one of 4, and no two are the same"):
        replace(platform, num_devices=2, pipelines=((0, 1), (1, 2)))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, machines, plan = (str(tmp_path / name) for name in ("chain.json", "machines.json", "plan.json"))
    random_chain(3, 5).save(chain)
    MACHINES.save(machines)
    asked = [chain, "--machines", machines, "--time-limit", "2"]
    assert run(["plan", *asked, "--data-parallel", "2", "-o", plan]) == 0
    assert "links: 20 B/s in groups of 2, 2 B/s beyond; devices of the pipelines: " in capsys.readouterr().out
    assert Plan.load(plan).platform.machines == MACHINES
    assert run(["check", plan, chain]) == 0
    assert run(["compare", *asked]) == 0
    told = capsys.readouterr().out
    assert "2 fast of 400 B and 2 device of 300 B at 0.5 times the speed" in " ".join(told.split())
    assert run(["plan", *asked, "--devices", "3"]) == 2
    assert "--devices cannot be used with --machines" in capsys.readouterr().err
    assert run(["plan", chain, "--devices", "3", "--memory", "1GB"]) == 2
    assert "Missing option '--bandwidth', or --machines" in capsys.readouterr().err
