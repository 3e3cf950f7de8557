"""Plans of any shape: maps of stages to devices that no planner would choose, and orders that it would not."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, replay
from deepspeed_partition.planner.allocation import Rematerialize, Stage
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, PlannedStage, StepPlan
from deepspeed_partition.planner.schedule import Order, PlacedOperation


def chain_of(num_layers: int, times: Sequence[tuple[float, float]] | None = None, output_bytes: int = 4) -> Chain:
    times = times or [(1.0, 2.0)] * num_layers
    layers = tuple(
        LayerProfile(
            name=f"layer {index}", forward_seconds=forward, backward_seconds=backward, weight_bytes=4,
            output_bytes=output_bytes, backward_input_seconds=backward / 2, backward_weight_seconds=backward / 2,
        )
        for index, (forward, backward) in enumerate(times)
    )  # fmt: skip
    return Chain(input_bytes=output_bytes, layers=layers, name="by hand")


def platform_of(num_devices: int, *, bandwidth: float = 4.0, comm_buffers: int = 2) -> Platform:
    return Platform(
        num_devices=num_devices, memory_bytes=10**12, bandwidth=bandwidth, comm_buffers=comm_buffers
    )  # fmt: skip


def pattern(
    chain: Chain,
    platform: Platform,
    cuts: Sequence[int],
    devices: Sequence[int],
    period: float,
    recomputed: Mapping[int, Rematerialize] = MappingProxyType({}),
    waits: Callable[[], float] = lambda: 0.0,
) -> list[PlacedOperation]:
    """Each operation of the chain's road at the first instant at which its device or link is free in every period.

    Args:
        waits: tells how long each operation waits beyond what it must.

    Raises:
        ValueError: there is no such instant for one of them.
    """
    road: list[tuple[str, float, tuple[int, ...]]] = []
    last = len(devices) - 1
    stages = list(itertools.pairwise(cuts))
    sends = [platform.transfer_seconds(chain.boundary_bytes(stop)) for _, stop in stages]

    def compute(kind: str, stage: int) -> None:
        layers = chain.layers[slice(*stages[stage])]
        times = [layer.forward_seconds if kind == "F" else layer.backward_seconds for layer in layers]
        if kind == "B":
            blocks = Stage(layers=stages[stage], device=0, rematerialize=recomputed.get(stage, False)).blocks
            times += [layer.forward_seconds for block in blocks for layer in chain.layers[slice(*block)]]
        road.append((f"{kind}{stage}", sum(times), (devices[stage],)))

    def send(kind: str, cut: int) -> None:
        if devices[cut] != devices[cut + 1]:
            road.append((f"S{kind}{cut}", sends[cut], (devices[cut], devices[cut + 1])))

    for stage in range(last + 1):
        compute("F", stage)
        if stage < last:
            send("F", stage)
    for stage in range(last, -1, -1):
        compute("B", stage)
        if stage:
            send("B", stage - 1)
    busy: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    placed, earliest = [], 0.0
    for name, seconds, place in road:
        taken = busy[tuple(sorted(place))]
        ends = (begin + length for begin, length in taken)
        candidates = [earliest, *(earliest + (end - earliest) % period for end in ends)]
        free = [
            begin
            for begin in candidates
            if all(_apart(begin, seconds, other, length, period) for other, length in taken)
        ]
        if not free or seconds > period:
            raise ValueError(f"no place for {name} in a period of {period}")
        begin = min(free)
        taken.append((begin, seconds))
        shift, at = divmod(begin, period)
        where = {"device": place[0]} if len(place) == 1 else {"link": place}
        placed.append(
            PlacedOperation(
                operation=name, start_seconds=at, duration_seconds=seconds, shift=int(shift), **where
            )
        )  # fmt: skip
        earliest = begin + seconds + waits()
    return placed


def _apart(begin: float, length: float, other: float, other_length: float, period: float) -> bool:
    """Whether two intervals that repeat every period never overlap."""
    return (other - begin) % period >= length and (begin - other) % period >= other_length


def some_recomputed(orders: Sequence[Order], seed: int, share: float = 0.5) -> tuple[Order, ...]:
    """Orders of which some forwards keep nothing: they run again before their backward, or within it."""
    pick = random.Random(seed)
    found = []
    for order in orders:
        entries = list(order)
        for name, number in order:
            if name[0] == "F" and pick.random() < share:
                at = entries.index((name, number))
                entries[at] = f"f{name[1:]}", number
                if pick.random() < 0.6:
                    backward = entries.index((f"B{name[1:]}", number))
                    entries.insert(pick.randint(at + 1, backward), (f"R{name[1:]}", number))
        found.append(tuple(entries))
    return tuple(found)


def some_in_halves(orders: Sequence[Order], seed: int, share: float = 0.5) -> tuple[Order, ...]:
    """Orders of which some backwards are in two halves, with the second one anywhere behind the first."""
    pick = random.Random(seed)
    found = []
    for order in orders:
        entries = list(order)
        for name, number in order:
            if name[0] == "B" and pick.random() < share:
                at = entries.index((name, number))
                entries[at] = f"I{name[1:]}", number
                entries.insert(pick.randint(at + 1, len(entries)), (f"W{name[1:]}", number))
        found.append(tuple(entries))
    return tuple(found)


def plan_of(
    chain: Chain,
    platform: Platform,
    cuts: Sequence[int],
    devices: Sequence[int],
    period: float | None = None,
    orders: Sequence[Order] | None = None,
    recomputed: Mapping[int, Rematerialize] = MappingProxyType({}),
    waits: Callable[[], float] = lambda: 0.0,
) -> Plan:
    """A plan whose micro-batches in flight the replay counted; ``orders`` are those of one step.

    Left out, the period is so long that each micro-batch is alone.
    """
    alone = 2 * chain.compute_seconds + 2 * sum(
        platform.transfer_seconds(chain.boundary_bytes(cut)) for cut in cuts[1:-1]
    )
    period = period or alone
    step = None
    if orders is not None:
        num_micro_batches = 1 + max(number for order in orders for _, number in order)
        step = StepPlan(
            num_micro_batches=num_micro_batches, step_seconds=alone * num_micro_batches,
            blocking_step_seconds=None, order=tuple(orders),
        )  # fmt: skip
    nothing = MemoryUse(weights=0, stash=0, buffers=0, transient=0)
    plan = Plan(
        chain=ChainReference.of(chain),
        platform=platform,
        algorithm="by hand",
        period_seconds=period,
        lower_bound_seconds=period,
        gap=0.0,
        proved=False,
        stages=tuple(
            PlannedStage(layers=layers, device=device, in_flight=1, rematerialize=recomputed.get(index, False))
            for index, (layers, device) in enumerate(zip(itertools.pairwise(cuts), devices, strict=True))
        ),
        operations=tuple(pattern(chain, platform, cuts, devices, period, recomputed, waits)),
        memory=(nothing,) * platform.num_devices,
        peak_memory_bytes=(0,) * platform.num_devices,
        step=step,
    )
    replayed = replay(plan, chain)
    assert replayed.in_flight, replayed.violations
    broken = [violation for violation in replayed.violations if "the plan says" not in violation]
    assert not broken, broken
    stages = tuple(
        replace(stage, in_flight=count) for stage, count in zip(plan.stages, replayed.in_flight, strict=True)
    )
    return replace(plan, stages=stages)


def of_two_per_period(plan: Plan) -> Plan:
    """The same plan, with a pattern of twice the length, of two micro-batches."""
    length = 2 * plan.period_seconds
    operations = []
    for index in (0, 1):
        for each in plan.operations:
            shift, start = divmod(each.start_seconds + (each.shift + index) * plan.period_seconds, length)
            operations.append(replace(each, start_seconds=start, shift=int(shift), index=index))
    return replace(plan, operations=tuple(operations), micro_batches_per_period=2)


def packed(
    chain: Chain,
    platform: Platform,
    cuts: Sequence[int],
    devices: Sequence[int],
    orders: Sequence[Order] | None = None,
    waits: Callable[[], float] = lambda: 0.0,
) -> Plan:
    """A plan of a short period: the first, from the busiest device's up, at which each operation finds a place."""
    stages = list(zip(itertools.pairwise(cuts), devices, strict=True))
    busiest = max(
        sum(layer.compute_seconds for cut, on in stages if on == device for layer in chain.layers[slice(*cut)])
        for device in set(devices)
    )
    for stretch in (1.0, 1.2, 1.5, 2.0, 3.0):
        try:
            return plan_of(chain, platform, cuts, devices, busiest * stretch, orders, waits=waits)
        except ValueError:
            continue
    return plan_of(chain, platform, cuts, devices, orders=orders)


def gpipe(devices: Sequence[int], num_micro_batches: int) -> list[Order]:
    """All forwards, then all backwards; a device takes its stages one after the other (looped: breadth first)."""
    orders: list[list[tuple[str, int]]] = [[] for _ in range(max(devices) + 1)]
    numbers = range(num_micro_batches)
    for stage, device in enumerate(devices):
        orders[device] += [(f"F{stage}", number) for number in numbers]
    for stage in reversed(range(len(devices))):
        orders[devices[stage]] += [(f"B{stage}", number) for number in numbers]
    return [tuple(order) for order in orders]


def depth_first(devices: Sequence[int], num_micro_batches: int, depth: int) -> list[Order]:
    """An eager list schedule: of what is ready the backward of the deepest stage, else the deepest forward.

    At most ``depth`` micro-batches are in flight in a stage. All computations take one unit of time.
    """
    last = len(devices) - 1
    done: set[tuple[str, int]] = set()
    counts = {f"{kind}{stage}": 0 for kind in "FB" for stage in range(last + 1)}
    orders: list[list[tuple[str, int]]] = [[] for _ in range(max(devices) + 1)]
    while len(done) < 2 * (last + 1) * num_micro_batches:
        now: list[tuple[str, int]] = []
        for device, order in enumerate(orders):
            for stage in (stage for stage in range(last, -1, -1) if devices[stage] == device):
                forward, backward = counts[f"F{stage}"], counts[f"B{stage}"]
                before = ("F", stage) if stage == last else ("B", stage + 1)
                if backward < num_micro_batches and (f"{before[0]}{before[1]}", backward) in done:
                    now.append((f"B{stage}", backward))
                    break
                arrived = stage == 0 or (f"F{stage - 1}", forward) in done
                if forward < num_micro_batches and arrived and forward - backward < depth:
                    now.append((f"F{stage}", forward))
                    break
            order += now[-1:] if now and devices[int(now[-1][0][1:])] == device else []
        assert now, "nothing is ready"
        for name, _ in now:
            counts[name] += 1
        done |= set(now)
    return [tuple(order) for order in orders]
