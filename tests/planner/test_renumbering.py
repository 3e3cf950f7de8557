"""The same plan under other numbers of the devices is the same plan."""

from __future__ import annotations

import random

import pytest

from deepspeed_partition import Platform, make_plan, replay
from deepspeed_partition.planner.renumbering import renumbered
from tests.planner.instances import chain


@pytest.mark.parametrize("num_micro_batches", [None, 6])
def test_a_renumbered_plan_passes_the_same_replay(num_micro_batches):
    numbers = random.Random(3)
    layers = chain([3, 1, 4, 1, 5, 2], [2, 7, 1, 8, 2, 4], stash=[3, 1, 4, 1, 5, 9])
    plan = make_plan(
        layers, Platform(num_devices=3, memory_bytes=10**6, bandwidth=4.0), num_micro_batches=num_micro_batches
    )
    for _ in range(4):
        order = numbers.sample(range(3), 3)
        turned = renumbered(plan, order)
        assert [order[stage.device] for stage in turned.stages] == [stage.device for stage in plan.stages]
        before, after = replay(plan, layers), replay(turned, layers)
        assert not after.violations
        assert after.memory == tuple(before.memory[device] for device in order)
        assert after.in_flight == before.in_flight and turned.step_seconds == plan.step_seconds
        back = [order.index(device) for device in range(3)]
        assert renumbered(turned, back) == plan


@pytest.mark.parametrize("order", [[0], [0, 0], [1, 2], [0, 1, 2]])
def test_each_device_is_named_once(order):
    plan = make_plan(chain([1, 1], [1, 1]), Platform(num_devices=2, memory_bytes=10**6, bandwidth=4.0))
    with pytest.raises(ValueError, match="each of 2 devices once"):
        renumbered(plan, order)
