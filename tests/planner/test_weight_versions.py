"""Asynchronous training: which version of the weights a micro-batch uses, and how many a stage holds.

``SlowVersions`` unrolls a pattern over many micro-batches and counts, event by event, what a stage would really
hold: copies of weights and gradients. It knows nothing of closed forms.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deepspeed_partition import Plan, PlanFormatError, Platform, make_plan
from deepspeed_partition.planner.weight_versions import WeightVersions, checked_mode, versions_in_order
from tests.planner.instances import chain

ASYNCHRONOUS = ("stashing", "2bw", "vertical-sync")
MICRO_BATCHES = 60


class SlowVersions:
    """What the stages of a pattern hold over ``MICRO_BATCHES`` micro-batches.

    Args:
        spans: begin and end of the forward and of the backward of each stage on micro-batch 0, in whole numbers.
    """

    def __init__(
        self, mode: str, per_update: int, devices: Sequence[int], spans: Sequence[tuple[int, ...]], period: int
    ) -> None:
        self.used: dict[tuple[int, int], int] = {}
        self.held, self.gradients = [1] * len(devices), [1] * len(devices)
        self.too_early: set[tuple[int, int]] = set()
        whole = MICRO_BATCHES // per_update * per_update
        ends: dict[int, list[int]] = {}
        for device in set(devices):
            mine = [stage for stage, other in enumerate(devices) if other == device]
            lasts = range(per_update - 1, whole, per_update)
            ends[device] = [max(last * period + spans[stage][3] for stage in mine) for last in lasts]

        def newest(stage: int, now: int) -> int:
            return bisect_right(ends[devices[stage]], now)

        for micro_batch in range(whole):
            for stage in range(len(devices)):
                there = newest(stage, micro_batch * period + spans[stage][0])
                if mode == "2bw":
                    version = max(0, micro_batch // per_update - 1)
                elif mode == "vertical-sync" and stage:
                    version = self.used[0, micro_batch]
                else:
                    version = there
                self.used[stage, micro_batch] = version
                if version > there:
                    self.too_early.add((stage, micro_batch))
        # In the middle, where the pipeline is full: what is there just after each instant at which something ends.
        end = period * (whole - 2)
        begin = end - 2 * period * per_update
        instants = {
            number * period + spans[stage][edge]
            for number in range(whole)
            for stage in range(len(devices))
            for edge in range(4)
        }
        for now in sorted(now for now in instants if begin <= now < end):
            for stage, device in enumerate(devices):
                needed = {newest(stage, now)} | {
                    self.used[stage, number]
                    for number in range(whole)
                    if number * period + spans[stage][3] > now and self.used[stage, number] <= newest(stage, now)
                }
                self.held[stage] = max(self.held[stage], len(needed))
                batches = [
                    batch
                    for batch, done in enumerate(ends[device])
                    if batch * per_update * period + spans[stage][2] <= now < done
                ]
                self.gradients[stage] = max(self.gradients[stage], len(batches))


def random_pattern(pick: random.Random) -> tuple[list[int], list[tuple[int, ...]], int]:
    """Return devices, spans and the period of a pattern that may run: every device does one thing at a time."""
    num_stages, num_devices = pick.randint(1, 6), pick.randint(1, 4)
    devices = [pick.randrange(num_devices) for _ in range(num_stages)]
    ticks = [pick.randint(1, 5) for _ in range(2 * num_stages)]
    path = [*range(num_stages), *reversed(range(num_stages))]
    load = max(sum(ticks[i] for i, s in enumerate(path) if devices[s] == d) for d in set(devices))
    period = load + pick.choice([0, 0, 1, 3])
    busy: dict[int, set[int]] = {device: set() for device in devices}
    now, begins = 0, []
    for place, stage in enumerate(path):
        now += pick.choice([0, 0, 0, 1, 7])
        for _ in range(20 * period):
            wanted = {(now + tick) % period for tick in range(ticks[place])}
            if not wanted & busy[devices[stage]]:
                break
            now += 1
        else:
            return random_pattern(pick)
        busy[devices[stage]] |= wanted
        begins.append((now, now + ticks[place]))
        now += ticks[place]
    last = 2 * num_stages - 1
    return devices, [(*begins[stage], *begins[last - stage]) for stage in range(num_stages)], period


def versions_of(
    mode: str, per_update: int, devices: Sequence[int], spans: Sequence[tuple[int, ...]], period: int
) -> WeightVersions:
    forwards, backwards = (
        [(*divmod(span[edge], period), span[edge + 1] - span[edge]) for span in spans] for edge in (0, 2)
    )
    return WeightVersions.of(mode, per_update, devices, forwards, backwards)


def orders_of(
    devices: Sequence[int], spans: Sequence[tuple[int, ...]], period: int, number: int
) -> list[tuple[tuple[str, int], ...]]:
    events: dict[int, list[tuple[int, str, int]]] = {device: [] for device in range(max(devices) + 1)}
    for stage, (forward, _, backward, _) in enumerate(spans):
        for micro_batch in range(number):
            events[devices[stage]].append((micro_batch * period + forward, f"F{stage}", micro_batch))
            events[devices[stage]].append((micro_batch * period + backward, f"B{stage}", micro_batch))
    return [tuple((name, number) for _, name, number in sorted(events[device])) for device in sorted(events)]


@pytest.mark.parametrize("seed", range(60))
def test_closed_form_is_what_an_unrolled_pattern_holds(seed: int) -> None:
    pick = random.Random(seed)
    devices, spans, period = random_pattern(pick)
    for per_update in (1, 2, pick.randint(3, 6)):
        for mode in ASYNCHRONOUS:
            slow = SlowVersions(mode, per_update, devices, spans, period)
            found = versions_of(mode, per_update, devices, spans, period)
            assert (found.why_not() is not None) == bool(slow.too_early)
            assert {key: found.version(*key) for key in slow.used} == slow.used
            if not slow.too_early:
                assert [found.num_held(stage) for stage in range(len(devices))] == slow.held
                assert [found.num_gradients(stage) for stage in range(len(devices))] == slow.gradients


@pytest.mark.parametrize("seed", range(60))
def test_counted_in_order_like_the_closed_form(seed: int) -> None:
    pick = random.Random(seed)
    devices, spans, period = random_pattern(pick)
    per_update = pick.randint(1, 5)
    orders = orders_of(devices, spans, period, 40 * per_update)
    for mode in ASYNCHRONOUS:
        found = versions_of(mode, per_update, devices, spans, period)
        if found.why_not() is not None:
            with pytest.raises(ValueError, match="2bw wants version"):
                versions_in_order(mode, per_update, orders)
            continue
        counted = versions_in_order(mode, per_update, orders)
        assert counted.versions == {key: found.version(*key) for key in counted.versions}
        stages = range(len(devices))
        assert counted.num_held == tuple(found.num_held(stage) for stage in stages)
        assert counted.num_gradients == tuple(found.num_gradients(stage) for stage in stages)
        for device, updates in enumerate(counted.updates):
            if device in devices:
                assert [number for number, _ in updates] == list(range(40))
            for version in range(1, 40 if device in devices else 0):
                place = dict(updates)[version - 1]
                name, micro_batch = orders[device][place]
                assert (name, micro_batch) == (f"B{devices.index(device)}", found.made_after(version))


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_stage_i_of_pipedreams_pipeline_holds_p_minus_i_versions(num_stages: int) -> None:
    """PipeDream: 1F1B on stages alike, an update after every micro-batch, the last stage has one version."""
    period = 3
    devices = list(range(num_stages))
    spans = [(stage, stage + 1, back, back + 2) for stage, back in enumerate(_backs(num_stages))]
    found = versions_of("stashing", 1, devices, spans, period)
    assert [found.num_held(stage) for stage in devices] == [num_stages - stage for stage in devices]
    assert [found.delay(stage, 50) for stage in devices] == [num_stages - 1 - stage for stage in devices]
    synced = versions_of("vertical-sync", 1, devices, spans, period)
    assert [synced.num_held(stage) for stage in devices] == [num_stages] * num_stages
    assert {synced.delay(stage, 50) for stage in devices} == {num_stages - 1}
    # With as many micro-batches per update as are in flight, two versions are enough.
    for mode in ASYNCHRONOUS:
        many = versions_of(mode, num_stages, devices, spans, period)
        assert max(many.num_held(stage) for stage in devices) <= 2 and many.why_not() is None


def _backs(num_stages: int) -> list[int]:
    """Return when backwards of 2 ticks begin, behind forwards of 1 tick, as early as they can."""
    return [num_stages + 2 * (num_stages - 1 - stage) for stage in range(num_stages)]


def test_modes() -> None:
    for mode in ("flush", *ASYNCHRONOUS):
        assert checked_mode(mode) == mode
    for bad in ("2BW", None, 2):
        with pytest.raises(ValueError, match="it must be one of flush, stashing, 2bw, vertical-sync"):
            checked_mode(bad)


def test_two_versions_are_refused_with_the_numbers() -> None:
    spans = [(stage, stage + 1, back, back + 2) for stage, back in enumerate(_backs(4))]
    why = versions_of("2bw", 2, [0, 1, 2, 3], spans, 3).why_not()
    assert why is not None and why.startswith(
        "stage 0 has 4 micro-batches on their way to an update of its device, and two versions of the weights are "
        "enough for 3, one more than the 2 of an update"
    )
    assert "--micro-batches 3 or more" in why
    assert versions_of("2bw", 3, [0, 1, 2, 3], spans, 3).why_not() is None


def test_a_plan_says_its_versions_and_keeps_them_in_its_file() -> None:
    made = make_plan(chain([1.0] * 4, [2.0] * 4), Platform(num_devices=4, memory_bytes=100, bandwidth=1e9))
    assert made.weight_versions == "flush" and made.versions is None and "weight_versions" not in made.to_dict()
    plan = replace(made, weight_versions="stashing", micro_batches_per_update=2, flush_step_seconds=15.0)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.to_dict()["num_micro_batches"] == plan.num_micro_batches == 2
    assert plan.update_seconds == plan.to_dict()["update_seconds"] == 2 * plan.period_seconds
    versions = plan.versions
    assert versions is not None and [versions.num_held(stage) for stage in range(4)] == [3, 2, 2, 1]
    alone = {
        key: value for key, value in plan.to_dict().items() if key not in ("num_micro_batches", "update_seconds")
    }
    assert Plan.from_dict(alone).micro_batches_per_update == 1
    for key, value in (("weight_versions", "2BW"), ("num_micro_batches", 0)):
        with pytest.raises(PlanFormatError, match=key):
            Plan.from_dict(plan.to_dict() | {key: value})
    step = make_plan(
        chain([1.0] * 2, [2.0] * 2), Platform(num_devices=2, memory_bytes=9, bandwidth=1e9), num_micro_batches=2
    )
    with pytest.raises(PlanFormatError, match="there is an order of a step, after which it drains"):
        Plan.from_dict(step.to_dict() | {"weight_versions": "2bw"})
