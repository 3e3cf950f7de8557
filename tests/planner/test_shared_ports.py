"""Steps whose messages share the ports of hosts, as connections of a network do."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.step import one_f_one_b_order
from deepspeed_partition.planner.units import format_seconds
from deepspeed_partition.schedule.instructions import Message
from deepspeed_partition.schedule.shared_ports import _Flow, _Network, shared_step_seconds

THREE = [Message("F", boundary, 0) for boundary in range(3)]


def arrivals(
    bandwidths: Mapping[Hashable, float],
    through: Mapping[tuple[int, int], list[Hashable]],
    begins: Mapping[tuple[int, int], float],
    latency_seconds: float = 0.0,
) -> dict[tuple[int, int], float]:
    """Seconds at which messages of ten bytes arrive that are sent and posted at given seconds."""
    network, now, found = _Network(bandwidths, through), 0.0, {}
    to_begin, messages = dict(begins), dict(zip(begins, THREE, strict=False))
    while len(found) < len(begins):
        for ends in [ends for ends, second in to_begin.items() if second <= now + 1e-12]:
            del to_begin[ends]
            network.send(ends, _Flow(messages[ends], latency_seconds, 10.0))
            network.post(ends, messages[ends])
        seconds = min([network.next_seconds(), *[second - now for second in to_begin.values()]])
        assert not math.isinf(seconds)
        network.pass_by(seconds)
        now += seconds
        found |= {ends: now for ends in begins if messages[ends] in network.arrived and ends not in found}
    return found


def test_messages_share_a_port_fairly() -> None:
    """By hand: half a second alone (5 bytes), a second of 5 bytes each, and half a second alone. Red where the
    second waits for the first, or where a rate is not taken anew when a message begins or ends."""
    through: dict[tuple[int, int], list[Hashable]] = {(1, 2): ["out 1"], (1, 0): ["out 1"]}
    found = arrivals({"out 1": 10.0}, through, {(1, 2): 0.0, (1, 0): 0.5})
    assert found == {(1, 2): pytest.approx(1.5), (1, 0): pytest.approx(2.0)}


def test_what_a_narrow_link_cannot_use_others_have() -> None:
    """A link of 4 bytes per second leaves 6 of the port. Red where a port is shared in equal parts whatever else
    holds a message up."""
    through: dict[tuple[int, int], list[Hashable]] = {(0, 1): ["narrow", "out 0"], (0, 2): ["out 0"]}
    found = arrivals({"narrow": 4.0, "out 0": 10.0}, through, {(0, 1): 0.0, (0, 2): 0.0})
    assert found == {(0, 1): pytest.approx(2.5), (0, 2): pytest.approx(10 / 6)}


def test_latency_uses_no_port() -> None:
    """The second waits for its first byte while the first one flows alone. Red where they share then."""
    through: dict[tuple[int, int], list[Hashable]] = {(1, 2): ["out 1"], (1, 0): ["out 1"]}
    found = arrivals({"out 1": 10.0}, through, {(1, 2): 0.0, (1, 0): 1.0}, latency_seconds=1.0)
    assert found == {(1, 2): pytest.approx(2.0), (1, 0): pytest.approx(3.0)}


def even_plan(megabytes: float, depths: list[int], number: int = 8, **platform: object) -> Plan:
    layer = LayerProfile(
        name="even", forward_seconds=0.02, backward_seconds=0.04, weight_bytes=4,
        output_bytes=int(megabytes * 1e6), num_trainable_parameters=1,
    )  # fmt: skip
    chain = Chain(name="even", input_bytes=layer.output_bytes, layers=(layer,) * len(depths))
    given: dict[str, object] = {"bandwidth": 1e8, "duplex": "full", "port_bandwidth": 1e8, **platform}
    devices = Platform(num_devices=len(depths), memory_bytes=10**12, **given)  # type: ignore[arg-type]
    plan = make_plan(chain, devices, list(range(len(depths) + 1)), num_micro_batches=number)
    assert plan.step is not None
    order = tuple(one_f_one_b_order(stage, depth, number) for stage, depth in enumerate(depths))
    stages = tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    return replace(plan, stages=stages, step=replace(plan.step, order=order))


def test_without_two_messages_at_once_a_step_is_as_planned() -> None:
    """One micro-batch goes down and up: three forwards, three backwards and four messages of 0.01 s."""
    plan = even_plan(1.0, [1, 1, 1], number=1, latency_seconds=0.001)
    assert shared_step_seconds(plan) == pytest.approx(3 * 0.06 + 4 * 0.011)


def test_operations_and_copies_of_a_device_count() -> None:
    plan = even_plan(1.0, [1, 1], number=1, operation_seconds=0.5, copy_bandwidth=1e6)
    assert shared_step_seconds(plan) == pytest.approx(2 * 0.06 + 2 * 0.01 + 4 * (0.5 + 1.0))


def test_a_step_with_more_than_a_port_carries_takes_longer() -> None:
    """Inner devices send both ways at once: what a plan has in turn is there later for both."""
    plan = even_plan(6.0, [7, 5, 3, 1], number=16)
    alone = replace(plan, platform=replace(plan.platform, port_bandwidth=1e12))
    found, free = shared_step_seconds(plan), shared_step_seconds(alone)
    assert found is not None and free is not None and found > 1.1 * free


def test_who_has_no_ports_is_told_nothing() -> None:
    plan = even_plan(6.0, [2, 1], port_bandwidth=None)
    assert shared_step_seconds(plan) is None


def test_the_command_line_says_it(tmp_path) -> None:
    """Where a step takes longer than planned, and nowhere else."""
    plan = even_plan(6.0, [7, 5, 3, 1], number=16)
    found = shared_step_seconds(plan)
    assert plan.step is not None and found is not None
    for planned, is_said in ((found * 0.8, True), (found, False)):
        replace(plan, step=replace(plan.step, step_seconds=planned)).save(tmp_path / "plan.json")
        shown = CliRunner().invoke(cli, ["show", str(tmp_path / "plan.json")])
        assert shown.exit_code == 0, shown.output
        words = f"as connections of a network do, a step takes {format_seconds(found)}"
        assert (words in " ".join(shown.output.split())) == is_said
