"""The run of a plan from fill to drain: when each operation begins on each micro-batch, and what is busy longest.

plan.json (and chain.json) --planned_run--> every operation of a step, else of so many micro-batches of the pattern
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import ChainReference, Plan
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.report.timeline import TimedOperation
from deepspeed_partition.planner.simulate.replay_step import Timeline, occupied_by, run_step
from deepspeed_partition.planner.units import format_bytes, format_seconds

TIE = 1e-3
"""Relative difference of two loads that are called the same."""
SAME_STEP = 1e-6
"""Relative difference between the step of a plan and its run from here on which they are called different."""
FEWEST_PERIODS = 4
"""Periods of a steady state that are shown at least, besides fill and drain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Time for which a device, a link or a port is busy per period, or per step where there is one."""

    place: str
    """Name, such as ``device 1``, ``the link 0-1`` or ``the port into host 1``."""
    seconds: float
    share: float
    """Part of the period, or of the step: 1 is always busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """Every operation of a plan on every micro-batch, from fill to drain."""

    operations: tuple[TimedOperation, ...]
    """Operations in the order of their start."""
    num_micro_batches: int
    is_step: bool
    """True: the plan's step. False: its pattern, for as many micro-batches as were asked for."""
    is_exact: bool = True
    """False: the plan's numbers alone do not give the step that it promises; its chain would."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first operation to the end of the last."""
        return max((each.end_seconds for each in self.operations), default=0.0)

    @property
    def phases(self) -> tuple[float, float]:
        """Seconds at which the fill ends and at which the drain begins.

        The fill ends when the last device begins its first operation, and the drain begins when the first device
        has ended its last one. Where the pipeline drains before it is full, both are that second instant.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        for each in self.operations:
            if each.device is not None:
                first[each.device] = min(first.get(each.device, each.start_seconds), each.start_seconds)
                last[each.device] = max(last.get(each.device, 0.0), each.end_seconds)
        drain = min(last.values(), default=0.0)
        return min(max(first.values(), default=0.0), drain), drain


def planned_run(
    plan: Plan,
    chain: Chain | None = None,
    num_micro_batches: int | None = None,
    *,
    replayed: Timeline | str | None = None,
) -> PlannedRun:
    """Return every operation of a plan's step; of the pattern where there is no step of so many micro-batches.

    Args:
        chain: the chain of the plan. Without it the durations are those of the plan's operations.
        num_micro_batches: as many are run. None: those of the step, else so many that fill, steady state and drain
            are seen.
        replayed: the instants of the plan's step on the chain, where they are known, which saves finding them.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    if chain is not None:
        plan.check_chain(chain)
    step = plan.step
    if step is not None and num_micro_batches in (None, step.num_micro_batches):
        found = _step(plan, chain, replayed)
        if found is not None:
            return found
    return _pattern(plan, num_micro_batches)


def repeats_pattern(plan: Plan) -> bool:
    """Whether a run of the plan repeats its pattern, so that the period says something of the run.

    The order of a step can be shorter than the periods of its micro-batches: it may have more of them in flight
    than a pattern that repeats for ever in the same memory. Where a device has several stages, a step has an order
    of its own, which need not be that of the pattern.
    """
    step = plan.step
    if step is None:
        return True
    if step.step_seconds < plan.period_seconds * step.num_micro_batches:
        return False
    return plan.is_contiguous or _in_order_of_pattern(plan)


def _in_order_of_pattern(plan: Plan) -> bool:
    """Whether each device runs its step in the order of the pattern, from fill to drain."""
    assert plan.step is not None
    each_time, seconds = plan.micro_batches_per_period, plan.pattern_seconds
    begins = {(each.operation, each.index): each.shift * seconds + each.start_seconds for each in plan.operations}
    for order in plan.step.order:
        last = -inf
        for name, number in order:
            begin = begins.get((name, number % each_time))
            if begin is None:  # halves, or recomputation, of the step alone
                return False
            instant = number // each_time * seconds + begin
            if instant < last - SAME_STEP * seconds:
                return False
            last = instant
    return True


def busy(plan: Plan) -> list[Busy]:
    """Return how long each device, link and port is busy, the busiest first: per step, else per pattern."""
    durations = _durations(plan, in_step=plan.step is not None)
    seconds: dict[str, float] = {f"device {device}": 0.0 for device in range(plan.platform.num_devices)}
    counts = _counts(plan)
    for name, count in counts.items():
        lasts = count * durations.get(name, 0.0)
        stage = int(name.lstrip("SFBfRIW"))
        if name[0] != "S":
            seconds[f"device {plan.stages[stage].device}"] += lasts
            continue
        for place in occupied_by(plan, stage, name[1]):
            seconds[place] = seconds.get(place, 0.0) + lasts
    whole = plan.pattern_seconds if plan.step is None else plan.step.step_seconds
    found = [
        Busy(place=place, seconds=each, share=each / whole if whole else 0.0) for place, each in seconds.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)


def bottleneck_words(plan: Plan) -> str:
    """Return a sentence: which device, link or port is busy longest."""
    places = busy(plan)
    first = places[0]
    alike = [each.place for each in places if each.seconds >= first.seconds * (1 - TIE)]
    if plan.step is not None:
        whole = f"the {format_seconds(plan.step.step_seconds)} of a step"
    else:
        what = "a period" if plan.micro_batches_per_period == 1 else "a pattern"
        whole = f"the {format_seconds(plan.pattern_seconds)} of {what}"
    names = alike[0] if len(alike) == 1 else f"{', '.join(alike[:-1])} and {alike[-1]}"
    if len(alike) > 4:
        names = f"{', '.join(alike[:3])} and {len(alike) - 3} more"
    is_busy = "is busy for" if len(alike) == 1 else "are busy for"
    return f"Bottleneck: {names} {is_busy} {format_seconds(first.seconds)} of {whole} ({first.share:.1%})."


def memory_words(plan: Plan) -> str:
    """Return a sentence: which device has least memory left, as a part of its own."""
    peaks = plan.peak_memory_bytes
    limits = [plan.platform.memory_of(device) for device in range(len(peaks))]
    device = max(range(len(peaks)), key=lambda device: peaks[device] / limits[device])
    limit = limits[device]
    return (
        f"Memory: device {device} needs most, {format_bytes(peaks[device])} of {format_bytes(limit)} "
        f"({peaks[device] / limit:.1%})."
    )


def _counts(plan: Plan) -> Counter[str]:
    """Count the operations of each name in a step, else in the pattern."""
    if plan.step is None:
        return Counter(each.operation for each in plan.operations)
    counts = Counter(name for order in plan.step.order for name, _ in order)
    number = plan.step.num_micro_batches
    sends = {each.operation for each in plan.operations if each.link is not None}
    counts.update(dict.fromkeys(sends, number))
    # A backward that runs a forward again is longer by it.
    entries = {entry for order in plan.step.order for entry in order}
    for name, micro_batch in entries:
        if name[0] == "f" and (f"R{name[1:]}", micro_batch) not in entries:
            counts[f"R{name[1:]}"] += 1
    return counts


def _durations(plan: Plan, *, in_step: bool) -> dict[str, float]:
    """Return the seconds of each operation by its name, without a forward that a backward runs again."""
    spans: dict[str, dict[int, float]] = defaultdict(dict)
    for each in plan.operations:
        spans[each.operation][each.index] = each.duration_seconds
    platform = plan.platform
    bandwidth = min(platform.bandwidth, platform.port_bandwidth or platform.bandwidth)
    if not in_step:
        platform = replace(platform, operation_seconds=0.0, copy_bandwidth=None)
    durations = {}
    for index in range(len(plan.stages)):
        forwards = [seconds for kind in "FfR" for seconds in spans.get(f"{kind}{index}", {}).values()]
        forward = min(forwards, default=0.0)
        kept_nothing = spans.get(f"f{index}", {}).keys() - spans.get(f"R{index}", {}).keys()
        beside = platform.operation_seconds
        for boundary in (index - 1, index):
            sent = list(spans.get(f"SF{boundary}", {}).values())
            if sent:
                num_bytes = (sent[0] - platform.latency_seconds) * bandwidth
                beside += platform.copy_seconds(round(max(0.0, num_bytes)))
        for kind in "FfR":
            durations[f"{kind}{index}"] = forward + beside
        for kind in "BIW":
            lasting = [
                max(0.0, seconds - (forward if kind in "BI" and number in kept_nothing else 0.0))
                for number, seconds in spans.get(f"{kind}{index}", {}).items()
            ]
            if lasting:  # the second half of a backward receives and sends nothing
                durations[f"{kind}{index}"] = min(lasting) + (
                    platform.operation_seconds if kind == "W" else beside
                )
    return durations | {name: max(each.values()) for name, each in spans.items() if name[0] == "S"}


def _step(plan: Plan, chain: Chain | None, replayed: Timeline | str | None) -> PlannedRun | None:
    """Return the step of a plan; None where the plan alone does not tell how long its operations last."""
    assert plan.step is not None
    promised = plan.step.step_seconds
    if chain is None:
        made = _stand_in(plan)
        if made is None:
            return None
        plan, chain = made
        replayed = None
    timeline = run_step(plan, chain) if replayed is None else replayed
    if isinstance(timeline, str):
        return None
    operations = tuple(_timed(plan, Clock.of(chain, plan.platform), timeline))
    last: dict[str, float] = defaultdict(float)
    for each in operations:
        if each.operation[0] in "BIW":
            last[each.operation[1:]] = max(last[each.operation[1:]], each.end_seconds)
    tails = plan.allreduce_seconds or (0.0,) * len(plan.stages)
    seconds = max(end + tails[int(stage)] for stage, end in last.items())
    return PlannedRun(
        operations=operations,
        num_micro_batches=plan.step.num_micro_batches,  # type: ignore[union-attr]
        is_step=True,
        is_exact=abs(seconds - promised) <= SAME_STEP * promised,
    )


def _stand_in(plan: Plan) -> tuple[Plan, Chain] | None:
    """Return a plan and a chain whose layers are the stages: they last as long and send as much.

    None where the plan has halves of backwards in its step alone, or nothing that takes time.
    """
    assert plan.step is not None
    durations, platform = _durations(plan, in_step=False), plan.platform
    bandwidth = min(platform.bandwidth, platform.port_bandwidth or platform.bandwidth)
    kinds = {name[0] for order in plan.step.order for name, _ in order}
    layers = []
    for index in range(len(plan.stages)):
        first, second = durations.get(f"I{index}"), durations.get(f"W{index}")
        backward = durations.get(f"B{index}")
        if "I" in kinds and (first is None or second is None):
            return None
        if backward is None:
            backward = (first or 0.0) + (second or 0.0)
        sent = durations.get(f"SF{index}", 0.0)
        layers.append(
            LayerProfile(
                name=str(index),
                forward_seconds=durations.get(f"F{index}", 0.0),
                backward_seconds=backward if first is None or second is None else first + second,
                weight_bytes=0,
                output_bytes=round(max(0.0, sent - platform.latency_seconds) * bandwidth),
                backward_input_seconds=None if second is None else first,
                backward_weight_seconds=None if first is None else second,
            )
        )
    chain = Chain(name=plan.chain.name, input_bytes=0, layers=tuple(layers))
    stages = tuple(
        replace(stage, layers=(index, index + 1), layer_names=(), rematerialize=False)
        for index, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages, chain=ChainReference.of(chain)), chain


def _timed(plan: Plan, clock: Clock, timeline: Timeline) -> Iterator[TimedOperation]:
    spans = sorted((begin, end, name, number) for (name, number), (begin, end) in timeline.operations.items())
    for begin, end, name, number in spans:
        stage = int(name.lstrip("SFBfRIW"))
        device = plan.stages[stage].device
        is_sent = name[0] == "S"
        yield TimedOperation(
            operation=name,
            micro_batch=number,
            start_seconds=clock.seconds(begin),
            duration_seconds=clock.seconds(end - begin),
            device=None if is_sent else device,
            link=(device, plan.stages[stage + 1].device) if is_sent else None,
        )


def _pattern(plan: Plan, num_micro_batches: int | None) -> PlannedRun:
    """Return the pattern, repeated for so many micro-batches."""
    each_time, seconds = plan.micro_batches_per_period, plan.pattern_seconds
    deepest = max(operation.shift for operation in plan.operations)
    if num_micro_batches is None:
        num_micro_batches = each_time * (deepest + max(FEWEST_PERIODS, deepest // 2))
    operations = [
        TimedOperation(
            operation=operation.operation,
            micro_batch=number,
            start_seconds=(number // each_time + operation.shift) * seconds + operation.start_seconds,
            duration_seconds=operation.duration_seconds,
            device=operation.device,
            link=operation.link,
        )
        for operation in plan.operations
        for number in range(operation.index, num_micro_batches, each_time)
    ]
    operations.sort(key=lambda each: (each.start_seconds, each.operation))
    return PlannedRun(operations=tuple(operations), num_micro_batches=num_micro_batches, is_step=False)


def places_of(run: PlannedRun, platform: Platform) -> list[str]:
    """Return the names of all devices and of the links that are used, in the order in which they are drawn."""
    links = {each.link if each.operation[1] == "F" else each.link[::-1] for each in run.operations if each.link}
    return [
        *(f"device {device}" for device in range(platform.num_devices)),
        *(f"link {sender}>{receiver}" for sender, receiver in sorted(links)),
    ]


def place_of(operation: TimedOperation) -> str:
    """Return the name of an operation's device, or of its link with its direction."""
    if operation.link is None:
        return f"device {operation.device}"
    sender, receiver = operation.link if operation.operation[1] == "F" else operation.link[::-1]
    return f"link {sender}>{receiver}"
