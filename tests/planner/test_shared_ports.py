"""Steps whose messages share the ports of hosts, as connections of a network do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.cli import cli
from deepspeed_partition.planner.step import one_f_one_b_order
from deepspeed_partition.planner.units import format_seconds
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

Seconds = tuple[float, float]
"""Seconds of a forward and of a backward."""


def plan_in_order(layers: list[Seconds], num_bytes: int, orders: list[str], **platform: object) -> Plan:
    """Plan with one layer per device, and what each device runs in turn."""
    made = Chain(
        name="three", input_bytes=num_bytes,
        layers=tuple(
            LayerProfile(
                name=f"layer {index}", forward_seconds=forward, backward_seconds=backward, weight_bytes=4,
                output_bytes=num_bytes, num_trainable_parameters=1,
            )
            for index, (forward, backward) in enumerate(layers)
        ),
    )  # fmt: skip
    given: dict[str, object] = {"comm_buffers": 16, "duplex": "full", **platform}
    devices = Platform(num_devices=len(layers), memory_bytes=10**12, **given)  # type: ignore[arg-type]
    number = 1 + max(int(each.partition(".")[2]) for each in orders[0].split())
    plan = make_plan(made, devices, list(range(len(layers) + 1)), num_micro_batches=number)
    assert plan.step is not None
    pairs = [[each.split(".") for each in order.split()] for order in orders]
    order = tuple(tuple((name, int(micro_batch)) for name, micro_batch in each) for each in pairs)
    return replace(plan, step=replace(plan.step, order=order))


BOTH_WAYS = [
    "F0.0 F0.1 B0.0 B0.1",
    "F1.0 B1.0 F1.1 B1.1",
    "F2.0 B2.0 F2.1 B2.1",
]
"""Device 1 sends the gradient of micro-batch 0 down, and a forward later the output of micro-batch 1 up."""


def test_messages_share_a_port_fairly() -> None:
    """By hand: B1.0 ends at 6.5 s. Half a second alone (5 bytes), a second of 5 bytes each, half a second alone.
    The gradient is there at 8 s, before two backwards of 10 s. Red where the second message waits for the first
    one (7.5 s), or where a rate is not taken anew when a message begins or ends."""
    plan = plan_in_order(
        [(0.5, 10), (0.5, 1), (0.5, 1)], 10, BOTH_WAYS, bandwidth=10, port_bandwidth=10, latency_seconds=0
    )
    assert shared_step_seconds(plan) == pytest.approx(28)


def test_the_second_of_two_messages_is_there_when_both_have_gone() -> None:
    """By hand: B1.0 ends at 15.5 s and the output is there at 17.5 s, where the port carries 20 bytes in 2 s."""
    plan = plan_in_order(
        [(0.5, 1), (0.5, 1), (0.5, 10)], 10, BOTH_WAYS, bandwidth=10, port_bandwidth=10, latency_seconds=0
    )
    assert shared_step_seconds(plan) == pytest.approx(17.5 + 10.5 + 1 + 1 + 1 + 1)


def test_what_a_narrow_link_cannot_use_others_have() -> None:
    """By hand: at 36 s a message each way begins over the link of devices 0 and 1, which leaves 3 bytes per second
    to each, and one from device 1 to device 2. That has 5 of the port's 8 and takes 4.8 s. Red where a port is
    shared in equal parts whatever else holds a message up (6 s)."""
    orders = [
        "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2",
        "F1.0 B1.0 F1.1 F1.2 B1.1 B1.2",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2",
    ]
    plan = plan_in_order(
        [(12, 1), (0, 3), (0, 9)], 24, orders, bandwidth=6, port_bandwidth=8, duplex="half", latency_seconds=0
    )
    assert shared_step_seconds(plan) == pytest.approx(36 + 4.8 + 2 * 9 + 4 + 3 + 4 + 1)


def test_latency_uses_no_port() -> None:
    """By hand: B1.0 ends at 11 s, and the output waits for its first byte from 12 s to 13 s, while the gradient
    flows alone. Red where they share then."""
    plan = plan_in_order(
        [(1, 10), (1, 1), (1, 1)], 10, BOTH_WAYS, bandwidth=10, port_bandwidth=10, latency_seconds=1
    )
    assert shared_step_seconds(plan) == pytest.approx(11 + 2 + 2 * 10)


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
