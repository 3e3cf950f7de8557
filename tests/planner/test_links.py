"""Links that carry both directions at once, and hosts whose transfers share a port."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_partition import InfeasibleError, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.simulate.replay_step import run_step
from deepspeed_partition.planner.solvers.step.step_bounds import step_lower_bound
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, eager, in_order
from deepspeed_partition.schedule.lowering import lower
from deepspeed_partition.schedule.timetable import of_orders
from tests.planner.instances import chain, problem_of, random_instance

Span = tuple[Fraction, Fraction, int, int]
"""Begin and end of a transfer, and the devices that it goes from and to."""


def exclude(platform: Platform, one: Span, other: Span) -> bool:
    """Whether two transfers may not run at the same time, by the sentences of ``Platform`` alone."""
    (*_, from_one, to_one), (*_, from_other, to_other) = one, other
    if (from_one, to_one) == (from_other, to_other):
        return True
    if (from_one, to_one) == (to_other, from_other):
        return platform.duplex == "half"
    host = [device // platform.devices_per_port for device in (from_one, to_one, from_other, to_other)]
    if platform.port_bandwidth is None or host[0] == host[1] or host[2] == host[3]:
        return False
    return host[0] == host[2] or host[1] == host[3]


def too_many_at_once(platform: Platform, transfers: list[Span]) -> list[tuple[Span, Span]]:
    return [
        (one, other)
        for one, other in combinations(transfers, 2)
        if max(one[0], other[0]) < min(one[1], other[1]) and exclude(platform, one, other)
    ]


def ends_of(plan: Plan, name: str) -> tuple[int, int]:
    devices = [stage.device for stage in plan.stages]
    ends = devices[int(name[2:])], devices[int(name[2:]) + 1]
    return ends if name[1] == "F" else ends[::-1]


def transfers_of_pattern(plan: Plan) -> list[Span]:
    """The transfers of so many periods that all that may meet in one do so in the last."""
    period = Fraction(repr(plan.period_seconds))
    result = []
    for each in plan.operations:
        if each.operation[0] == "S":
            begin = Fraction(repr(each.start_seconds))
            lasts = Fraction(repr(each.duration_seconds))
            result += [
                (begin + k * period, begin + k * period + lasts, *ends_of(plan, each.operation)) for k in range(3)
            ]
    return result


def random_platform(platform: Platform, pick: random.Random) -> Platform:
    ports = pick.choice([None, platform.bandwidth, platform.bandwidth / 2])
    return replace(
        platform,
        duplex=pick.choice(["half", "full"]),
        port_bandwidth=ports,
        devices_per_port=1 if ports is None else pick.choice([1, 1, 2]),
    )


@given(st.integers(0, 10**6))
def test_no_two_transfers_meet_on_a_link_or_a_port(seed):
    """Of plans, steps and patterns; the replay agrees with the planner to the tick, and no bound is above."""
    pick = random.Random(seed)
    made, platform = random_instance(seed, most_layers=5)
    platform = random_platform(platform, pick)
    m = pick.choice([None, 2, 4])
    try:
        plan = make_plan(made, platform, "contiguous", num_micro_batches=m)
    except InfeasibleError:
        return
    assert replay(plan, made).violations == ()
    rounding = Fraction(repr(plan.period_seconds)) / 10**9
    shorter = [(begin, end - rounding, *ends) for begin, end, *ends in transfers_of_pattern(plan)]
    assert too_many_at_once(platform, shorter) == []
    if plan.step is not None:
        timeline = run_step(plan, made)
        spans = [
            (*map(Fraction, when), *ends_of(plan, name))
            for (name, _), when in timeline.operations.items()
            if name[0] == "S"
        ]
        assert too_many_at_once(platform, spans) == []
    is_plain = platform.duplex == "half" and platform.port_bandwidth is None
    assert plan.proved is False or is_plain or plan.gap <= 1e-6


@given(st.integers(0, 10**6))
def test_simulators_agree_on_any_allocation(seed):
    """The planner and the timetable of the engine have each transfer at one instant; no bound is above a step."""
    pick = random.Random(seed)
    size, num_devices, m = pick.randint(2, 5), pick.randint(2, 4), pick.randint(1, 4)
    made = chain(
        [pick.randint(0, 3) for _ in range(size - 1)] + [1], [pick.randint(0, 3) for _ in range(size)],
        outputs=[pick.randint(1, 6) for _ in range(size)],
    )  # fmt: skip
    platform = random_platform(
        Platform(num_devices=num_devices, memory_bytes=10**9, bandwidth=1, comm_buffers=pick.choice([2, 4])), pick
    )
    problem = problem_of(made, platform)
    devices = [0]
    for _ in range(size - 1):
        known = range(min(num_devices, max(devices) + 2))
        devices.append(pick.choice([each for each in known if each != devices[-1]]))
    engine = StepEngine(problem.times, problem.table, range(size + 1), devices)
    run = engine.run(m, eager(engine, [pick.randint(1, 4)] * size, oldest_first=pick.random() < 0.5))
    assert step_lower_bound(replace(problem, num_micro_batches=m), contiguous=False) <= run.ticks
    again = engine.run(m, in_order([tuple(order) for order in run.orders]))
    assert (again.ticks, again.sends) == (run.ticks, run.sends)
    seconds = {name: problem.times.clock.seconds(ticks) for name, ticks in named_ticks(engine).items()}
    orders = engine.named(run.orders)
    times = of_orders(orders, devices, seconds, max(1, platform.comm_buffers // 2), platform)
    found = {
        (transfer_name(engine, position), number): begin
        for position, begins in enumerate(run.sends)
        for number, begin in enumerate(begins)
    }
    if 0 not in engine.ticks:  # what takes no time comes in another order there, at the same instant
        whole = max(end for _, end in times.instants.values())  # the two have clocks of their own
        assert {key: Fraction(begin, whole) for key, (begin, _) in times.instants.items() if key[0][0] == "S"} == {
            key: Fraction(begin, run.ticks) for key, begin in found.items()
        }
    spans = [
        (Fraction(begin), Fraction(begin + engine.send[position]), *engine.device[position : position + 2])
        for position, begins in enumerate(run.sends)
        for begin in begins
    ]
    assert too_many_at_once(platform, spans) == []


def transfer_name(engine: StepEngine, position: int) -> str:
    stage = int(engine.names[position][1:])
    return f"SF{stage}" if position < engine.num_stages else f"SB{stage - 1}"


def named_ticks(engine: StepEngine) -> dict[str, int]:
    ticks = dict(zip(engine.names, engine.ticks, strict=True))
    return ticks | {
        transfer_name(engine, position): send for position, send in enumerate(engine.send) if send is not None
    }


SLOW = chain([1, 1, 1], [1, 1, 1], outputs=[4, 4, 4])
"""Layers that compute for 2 s, and tensors that travel for 4 s."""
THREE = Platform(num_devices=3, memory_bytes=1000, bandwidth=1)


def period_on(platform: Platform, made=SLOW) -> Plan:
    plan = make_plan(made, platform, [0, 1, 2, 3])
    assert replay(plan, made).violations == ()
    return plan


def test_periods_by_hand():
    # The link is busy for 4 s and 4 s; a direction alone for 4 s. The middle host sends and receives twice that.
    assert period_on(THREE).period_seconds == 8
    full = replace(THREE, duplex="full")
    assert period_on(full).period_seconds == 4
    assert period_on(replace(full, port_bandwidth=1.0)).period_seconds == 8
    # Half of the bandwidth: the port is slower than the link, and its transfers last so long.
    assert period_on(replace(full, port_bandwidth=0.5)).period_seconds == 16
    # All devices are one host.
    assert period_on(replace(full, port_bandwidth=1.0, devices_per_port=3)).period_seconds == 4
    assert (period_on(THREE).lower_bound_seconds, period_on(full).lower_bound_seconds) == (6, 4)


def test_a_link_bounds_the_period_by_one_direction():
    """Layers of 3 s each, and 4 s for a tensor: on a link of one transfer at a time nothing gains by a second
    device, and where directions do not wait for each other a period of 4 s is below 6 s."""
    made = chain([1, 1], [2, 2], outputs=[4, 4])
    two = replace(THREE, num_devices=2)
    assert (make_plan(made, two).period_seconds, make_plan(made, two).proved) == (6, True)
    full = replace(two, duplex="full")
    assert make_plan(made, full).lower_bound_seconds == 4
    both = make_plan(made, full, [0, 1, 2])
    assert (both.period_seconds, both.proved_class) == (4, "any allocation")
    # The search compares schedules of links that carry one transfer at a time: it proves nothing here.
    found = make_plan(made, full, "contiguous")
    assert (found.period_seconds, found.proved, found.class_lower_bound_seconds) == (6, False, None)
    step = make_plan(made, full, num_micro_batches=6)
    assert (
        step.step_lower_bound_seconds <= step.step_seconds < make_plan(made, two, num_micro_batches=6).step_seconds
    )


def test_the_replay_refuses_two_transfers_through_one_port():
    made = chain([1, 1, 1], [1, 1, 1], outputs=[1, 1, 1])
    plan = make_plan(made, THREE, [0, 1, 2, 3])
    sends = {each.operation: each for each in plan.operations}
    # SF1 leaves device 1 for 2 while SB0 leaves it for 0.
    moved = replace(sends["SF1"], start_seconds=sends["SB0"].start_seconds, shift=sends["SF1"].shift + 5)
    later = [
        replace(each, shift=each.shift + 9) if each.operation in ("F2", "B2", "SB1", "B1", "SB0", "B0") else each
        for each in plan.operations
    ]
    operations = tuple(moved if each.operation == "SF1" else each for each in later)

    def about_ports(platform: Platform) -> list[str]:
        found = replay(replace(plan, operations=operations, platform=platform), made).violations
        return [each for each in found if "port" in each]

    assert about_ports(THREE) == []
    ports = replace(THREE, port_bandwidth=1.0)
    assert about_ports(ports)[0].startswith("the port out of host 1 runs ")
    assert about_ports(replace(ports, devices_per_port=2)) == []  # SB0 stays within host 0


def test_files_without_the_fields_are_as_they_were():
    assert {"duplex", "port_bandwidth", "devices_per_port"}.isdisjoint(THREE.to_dict())
    made = replace(THREE, duplex="full", port_bandwidth=2e9, devices_per_port=2)
    assert Platform.from_dict(made.to_dict()) == made
    plan = make_plan(SLOW, made)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert lower(plan, 3).lists


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("duplex", "both", "it must be half or full"),
        ("port_bandwidth", 0, "it must be more than 0"),
        ("port_bandwidth", True, "not a finite number"),
        ("devices_per_port", 2, "give port_bandwidth, too"),
        ("devices_per_port", 0, "whole number"),
    ],
)
def test_malformed_fields(field, value, says):
    with pytest.raises(ValueError, match=says):
        replace(THREE, **{field: value})


def test_a_chosen_period_has_no_ports():
    with pytest.raises(ValueError, match="leave it out, or port_bandwidth"):
        make_plan(SLOW, replace(THREE, port_bandwidth=1.0), period_seconds=20)
    plan = make_plan(SLOW, replace(THREE, duplex="full"), period_seconds=20)
    assert (plan.period_seconds, plan.proved) == (20, False)


@pytest.mark.parametrize("algorithm", ["madpipe", "contiguous", [0, 1, 2, 3]])
def test_a_chosen_period_that_takes_both_directions_at_once(algorithm):
    """One transfer at a time is slower, and no period is shorter than the 4 s of a message."""
    full = replace(THREE, duplex="full")
    short = chain([1] * 3, [2] * 3, outputs=[4, 4, 1], input_bytes=4)
    best = make_plan(short, full, algorithm, recompute="never")
    assert best.period_seconds < make_plan(short, THREE, algorithm, recompute="never").period_seconds
    for period in (best.period_seconds, best.period_seconds + 0.5):
        plan = make_plan(short, full, algorithm, period_seconds=period, recompute="never")
        assert plan.period_seconds <= period and (plan.proved, plan.proved_class) == (False, None)
        assert replay(plan, short).violations == ()
    with pytest.raises(InfeasibleError, match=r"a period of 3 s in any memory: the shortest found is [46]"):
        make_plan(short, full, algorithm, period_seconds=3, recompute="never")
    needs = max(best.peak_memory_bytes)
    with pytest.raises(
        InfeasibleError, match=rf"takes {needs} bytes .* in the best plan found, 1 byte"
    ) as refused:
        make_plan(
            short, replace(full, memory_bytes=needs - 1), algorithm, period_seconds=best.period_seconds,
            recompute="never",
        )  # fmt: skip
    assert refused.value.smallest_memory_bytes == needs
