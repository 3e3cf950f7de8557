"""The independent replay: unrolls a plan and finds what it really does.

It shares only the data types (and the clock) with the planner: durations, dependencies, overlaps and bytes are
derived here a second time, from the chain and from the operations alone. Whether two instants are the same, on
which counts depend, is decided in ticks of the clock; whether a rule is broken, with a tolerance. The lower
bound and DeepSpeed's own step (``blocking_step_seconds``) are no property of the operations: they are taken as
they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import MemoryUse, Plan, PlannedStage
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.schedule import PlacedOperation

TOLERANCE = 1e-9
"""Of the period: what is broken by less may be rounding."""


_Peaks = tuple[MemoryUse, ...]
"""What one device needs at each of the moments when it needs the most: the same total, maybe in other terms."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a plan does when it is run, and where that is not what it says."""

    violations: tuple[str, ...]
    """One sentence each; none where the plan keeps what it promises."""
    in_flight: tuple[int, ...]
    """The most micro-batches in each stage at once: of the step where there is one, else of the pattern."""
    memory: tuple[MemoryUse, ...]
    """What each device's peak consists of, likewise."""
    step_seconds: float | None = None


def replay(plan: Plan, chain: Chain) -> Replay:
    """Run ``plan`` on ``chain`` and compare it with what it promises.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    plan.check_chain(chain)
    costs = [_StageCost(chain, stage) for stage in plan.stages]
    violations = list(_structure_violations(plan, chain, costs))
    if violations:  # without all operations in place there is nothing to unroll
        return Replay(tuple(violations), (), ())
    placed = {operation.operation: operation for operation in plan.operations}
    violations += _dependency_violations(plan, placed)
    violations += _overlap_violations(plan)
    violations += _allreduce_violations(plan, costs)
    pattern = _unrolled_pattern(plan, chain, placed)
    in_flight, peaks = _peaks(plan, chain, costs, pattern)
    violations += _memory_violations(plan, peaks, "pattern")
    step_seconds = None
    if plan.step is not None:
        step = _run_step(plan, chain, costs)
        if isinstance(step, str):
            return Replay((*violations, step), in_flight, tuple(each[0] for each in peaks))
        step_seconds = Clock.of(chain, plan.platform).seconds(_step_ticks(plan, chain, step))
        if abs(step_seconds - plan.step.step_seconds) > TOLERANCE * step_seconds:
            violations.append(
                f"one step takes {step_seconds:.9g} s and the plan says {plan.step.step_seconds:.9g} s"
            )
        in_flight, peaks = _peaks(plan, chain, costs, step)
        violations += _memory_violations(plan, peaks, "step")
    violations += _promise_violations(plan, in_flight, peaks)
    return Replay(tuple(violations), in_flight, tuple(each[0] for each in peaks), step_seconds)


class _StageCost:
    """What one stage takes, from the chain alone (formats: the memory of a device)."""

    def __init__(self, chain: Chain, stage: PlannedStage) -> None:
        start, stop = stage.layers
        layers = chain.layers[start:stop]
        self.forward_seconds = math.fsum(layer.forward_seconds for layer in layers)
        self.backward_seconds = math.fsum(layer.backward_seconds for layer in layers)
        self.weight_bytes = sum(layer.weight_bytes for layer in layers)
        self.stash_bytes = sum(layer.stash_bytes or 0 for layer in layers)
        self.forward_transient_bytes = max(layer.transient_bytes for layer in layers)
        recomputed = 0
        for first, last in stage.blocks:
            block = chain.layers[first:last]
            block_stash = sum(layer.stash_bytes or 0 for layer in block)
            block_input = chain.boundary_bytes(first)
            self.stash_bytes += block_input - block_stash
            self.backward_seconds += math.fsum(layer.forward_seconds for layer in block)
            recomputed = max(recomputed, block_stash - block_input)
        self.backward_transient_bytes = self.forward_transient_bytes + recomputed


def _structure_violations(plan: Plan, chain: Chain, costs: list[_StageCost]) -> Iterator[str]:
    """Every operation once, where it belongs, as long as the chain says."""
    period = plan.period_seconds
    expected: dict[str, tuple[float, int | None, tuple[int, int] | None]] = {}
    for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
        expected[f"F{index}"] = cost.forward_seconds, stage.device, None
        expected[f"B{index}"] = cost.backward_seconds, stage.device, None
        if index + 1 < len(plan.stages) and stage.device != plan.stages[index + 1].device:
            seconds = plan.platform.transfer_seconds(chain.boundary_bytes(stage.layers[1]))
            link = (stage.device, plan.stages[index + 1].device)
            expected[f"SF{index}"] = (seconds, None, link)
            expected[f"SB{index}"] = (seconds, None, link)
    seen: set[str] = set()
    for operation in plan.operations:
        name = operation.operation
        if name in seen:
            yield f"{name} stands twice in the pattern"
        seen.add(name)
        if name not in expected:
            yield f"{name} is no operation of this allocation"
            continue
        seconds, device, travels = expected[name]
        if abs(operation.duration_seconds - seconds) > TOLERANCE * max(seconds, period):
            yield f"{name} lasts {seconds:.9g} s and the plan says {operation.duration_seconds:.9g} s"
        if (operation.device, operation.link) != (device, travels):
            place, right = ("device", device) if travels is None else ("link", travels)
            yield f"{name} is on {place} {getattr(operation, place)}, not on {right}"
        if not 0 <= operation.start_seconds < period:
            yield f"{name} starts at {operation.start_seconds:.9g} s, not within the period of {period:.9g} s"
        if name == "F0" and operation.shift != 0:
            yield f"F0 has shift {operation.shift}, not 0"
    for name in expected.keys() - seen:
        yield f"{name} is missing from the pattern"


def _allreduce_violations(plan: Plan, costs: list[_StageCost]) -> Iterator[str]:
    """A ring among the pipelines: each of 2 (D - 1) rounds sends a D-th of the stage's weights."""
    degree = plan.data_parallel or 1
    for index, (cost, planned) in enumerate(zip(costs, plan.allreduce_seconds, strict=False)):
        share = math.ceil(Fraction(cost.weight_bytes, degree))
        seconds = sum(plan.platform.transfer_seconds(share) for _ in range(2 * (degree - 1)))
        if abs(planned - seconds) > TOLERANCE * max(seconds, plan.period_seconds):
            yield f"the all-reduce of stage {index} takes {seconds:.9g} s and the plan says {planned:.9g} s"


def _begin(plan: Plan, operation: PlacedOperation) -> float:
    """When the operation runs on micro-batch 0."""
    return operation.shift * plan.period_seconds + operation.start_seconds


def _end(plan: Plan, operation: PlacedOperation) -> float:
    return _begin(plan, operation) + operation.duration_seconds


def _dependency_violations(plan: Plan, placed: dict[str, PlacedOperation]) -> Iterator[str]:
    """On every micro-batch: forwards down the chain, backwards up, with the transfers between them."""
    last = len(plan.stages) - 1
    forward = [name for stage in range(last + 1) for name in (f"F{stage}", f"SF{stage}")]
    backward = [name for stage in range(last, -1, -1) for name in (f"SB{stage}", f"B{stage}")]
    road = [name for name in forward + backward if name in placed]
    for before, after in pairwise(road):
        ready = _end(plan, placed[before])
        begins = _begin(plan, placed[after])
        if begins < ready - TOLERANCE * plan.period_seconds:
            yield f"{after} starts at {begins:.9g} s, before {before} has ended at {ready:.9g} s"


def _overlap_violations(plan: Plan) -> Iterator[str]:
    """No device and no link does two things at once, over the end of the period either."""
    period, tolerance = plan.period_seconds, TOLERANCE * plan.period_seconds
    resources: dict[str, list[PlacedOperation]] = defaultdict(list)
    for operation in plan.operations:
        if operation.link is None:
            resources[f"device {operation.device}"].append(operation)
        else:
            ends = sorted(operation.link)
            resources[f"the link {ends[0]}-{ends[1]}"].append(operation)
    for resource, operations in resources.items():
        # By their middles: what takes no time stands before what begins then and after what ends then.
        operations.sort(key=lambda each: each.start_seconds + each.duration_seconds / 2)
        following = [(each, each.start_seconds) for each in operations[1:]]
        following.append((operations[0], operations[0].start_seconds + period))
        for operation, (after, start) in zip(operations, following, strict=True):
            end = operation.start_seconds + operation.duration_seconds
            if end > start + tolerance:
                yield (
                    f"{resource} runs {operation.operation} until {end:.9g} s "
                    f"and {after.operation} from {start:.9g} s"
                )


@dataclass
class _Timeline:
    """When every operation ran, on which micro-batch, in ticks."""

    operations: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    window: tuple[int, float] = (0, math.inf)
    """Where to look for peaks: in a pattern the last period, everything before it having begun."""

    @cached_property
    def micro_batches(self) -> range:
        """All of them; asked for when every operation is there."""
        return range(max(micro_batch for _, micro_batch in self.operations) + 1)


def _unrolled_pattern(plan: Plan, chain: Chain, placed: dict[str, PlacedOperation]) -> _Timeline:
    """Enough periods that everything of the last one's beginning is in steady state."""
    ticks = Clock.of(chain, plan.platform).ticks
    period = max(1, ticks(plan.period_seconds))
    spans = {}
    for name, operation in placed.items():
        begin = operation.shift * period + ticks(operation.start_seconds)
        spans[name] = begin, begin + ticks(operation.duration_seconds)
    periods = -(-max(end for _, end in spans.values()) // period) + 2
    timeline = _Timeline(window=((periods - 1) * period, periods * period))
    for micro_batch in range(periods + 1):
        for name, (begin, end) in spans.items():
            timeline.operations[name, micro_batch] = micro_batch * period + begin, micro_batch * period + end
    return timeline


class _Residents:
    """Intervals during which something is kept, and how many of them hold at given instants.

    ``instants``: what begins and ends at one instant is there for that instant, as the micro-batch in a stage
    that takes no time is; a tensor that is used the moment it comes has not waited.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]], *, instants: bool = False) -> None:
        spans = np.array(list(intervals)).reshape(-1, 2)  # of Python's integers where they need more than 64 bits
        instant = spans[:, 0] == spans[:, 1]
        self.starts = np.sort(spans[:, 0])
        self.lasting_starts = np.sort(spans[~instant][:, 0])
        self.lasting_ends = np.sort(spans[~instant][:, 1])
        self.instants = np.sort(spans[instant & instants][:, 0])

    def count(self, at: NDArray[Any]) -> NDArray[np.int64]:
        """Begun by then and not yet ended. What ends at an instant is gone before anything begins there."""
        lasting = self.lasting_starts.searchsorted(at, "right") - self.lasting_ends.searchsorted(at, "right")
        return lasting + self.instants.searchsorted(at, "right") - self.instants.searchsorted(at, "left")


def _peaks(
    plan: Plan, chain: Chain, costs: list[_StageCost], timeline: _Timeline
) -> tuple[tuple[int, ...], tuple[_Peaks, ...]]:
    """In flight of each stage, and what each device needs at its peaks, over the timeline's window."""
    in_flight = [0] * len(plan.stages)
    memory: list[_Peaks] = []
    for device in range(plan.platform.num_devices):
        mine = [index for index, stage in enumerate(plan.stages) if stage.device == device]
        kept = {index: _kept(timeline, f"F{index}", f"B{index}") for index in mine}
        ends = dict(_waiting_at_ends(plan, chain, timeline, device))
        inside = dict(_waiting_inside(plan, chain, timeline, device))
        running = {
            (index, kind): _Residents(_spans(timeline, f"{kind}{index}"), instants=True)
            for index in mine
            for kind in "FB"
        }
        residents = [*kept.values(), *(r for r, _ in ends.values()), *(r for r, _ in inside.values())]
        weights = math.ceil(
            Fraction(str(plan.platform.weight_copies)) * sum(costs[index].weight_bytes for index in mine)
        )
        if not residents:
            memory.append((MemoryUse(weights=weights, stash=0, buffers=0, transient=0),))
            continue
        moments = np.unique(np.concatenate([r.starts for r in (*residents, *running.values())]))
        moments = moments[(moments >= timeline.window[0]) & (moments < timeline.window[1])]
        stash = np.zeros(len(moments), dtype=np.int64)
        for index in mine:
            alive = kept[index].count(moments)
            in_flight[index] = int(alive.max())
            stash += alive * costs[index].stash_bytes
        buffers = np.zeros(len(moments), dtype=np.int64)
        for waiting, num_bytes in ends.values():
            buffers += np.maximum(plan.platform.comm_buffers, waiting.count(moments)) * num_bytes
        for waiting, num_bytes in inside.values():
            buffers += waiting.count(moments) * num_bytes
        transient = np.zeros(len(moments), dtype=np.int64)
        for (index, kind), runs in running.items():
            cost = costs[index]
            needs = cost.forward_transient_bytes if kind == "F" else cost.backward_transient_bytes
            transient = np.maximum(transient, (runs.count(moments) > 0) * needs)
        total = stash + buffers + transient
        at_peak = np.flatnonzero(total == total.max())
        terms = zip(stash[at_peak].tolist(), buffers[at_peak].tolist(), transient[at_peak].tolist(), strict=True)
        memory.append(
            tuple(
                MemoryUse(weights=weights, stash=kept_bytes, buffers=waiting_bytes, transient=running_bytes)
                for kept_bytes, waiting_bytes, running_bytes in dict.fromkeys(terms)
            )
        )
    return tuple(in_flight), tuple(memory)


def _spans(timeline: _Timeline, name: str) -> Iterator[tuple[int, int]]:
    for micro_batch in timeline.micro_batches:
        if (name, micro_batch) in timeline.operations:
            yield timeline.operations[name, micro_batch]


def _between(
    timeline: _Timeline, first: str, first_edge: int, second: str, second_edge: int
) -> Iterator[tuple[int, int]]:
    """From an edge (0 start, 1 end) of one operation to an edge of another, on each micro-batch."""
    for micro_batch in timeline.micro_batches:
        begin = timeline.operations[first, micro_batch][first_edge]
        yield begin, max(begin, timeline.operations[second, micro_batch][second_edge])


def _kept(timeline: _Timeline, forward: str, backward: str) -> _Residents:
    return _Residents(_between(timeline, forward, 0, backward, 1), instants=True)


def _cuts(plan: Plan, chain: Chain, *, between_devices: bool) -> Iterator[tuple[int, int]]:
    """The stage before each cut and the bytes that cross it."""
    for index in range(len(plan.stages) - 1):
        travels = plan.stages[index].device != plan.stages[index + 1].device
        if travels == between_devices:
            yield index, chain.boundary_bytes(plan.stages[index].layers[1])


def _waiting_at_ends(
    plan: Plan, chain: Chain, timeline: _Timeline, device: int
) -> Iterator[tuple[tuple[int, str], tuple[_Residents, int]]]:
    """The tensors, activations and gradients together, at each end of a cut that lies on ``device``."""
    for index, num_bytes in _cuts(plan, chain, between_devices=True):
        before, after = f"F{index}", f"F{index + 1}"
        if plan.stages[index].device == device:
            spans = [
                *_between(timeline, before, 1, f"SF{index}", 1),
                *_between(timeline, f"SB{index}", 0, f"B{index}", 0),
            ]
            yield (index, "upper"), (_Residents(spans), num_bytes)
        if plan.stages[index + 1].device == device:
            spans = [
                *_between(timeline, f"SF{index}", 0, after, 0),
                *_between(timeline, f"B{index + 1}", 1, f"SB{index}", 1),
            ]
            yield (index, "lower"), (_Residents(spans), num_bytes)


def _waiting_inside(
    plan: Plan, chain: Chain, timeline: _Timeline, device: int
) -> Iterator[tuple[int, tuple[_Residents, int]]]:
    """The tensors that wait between neighbouring stages of one device."""
    for index, num_bytes in _cuts(plan, chain, between_devices=False):
        if plan.stages[index].device == device:
            spans = [
                *_between(timeline, f"F{index}", 1, f"F{index + 1}", 0),
                *_between(timeline, f"B{index + 1}", 1, f"B{index}", 0),
            ]
            yield index, (_Residents(spans), num_bytes)


def _memory_violations(plan: Plan, peaks: tuple[_Peaks, ...], what: str) -> Iterator[str]:
    for device, (use, *_) in enumerate(peaks):
        short = use.total - plan.platform.memory_bytes
        if short > 0:
            yield (
                f"device {device} needs {use.total} bytes in the {what} and has {plan.platform.memory_bytes}: "
                f"{short} bytes short"
            )


def _promise_violations(plan: Plan, in_flight: tuple[int, ...], peaks: tuple[_Peaks, ...]) -> Iterator[str]:
    for index, (stage, found) in enumerate(zip(plan.stages, in_flight, strict=True)):
        if stage.in_flight != found:
            yield f"stage {index} has {found} micro-batches in flight and the plan says {stage.in_flight}"
    for device, (uses, peak) in enumerate(zip(peaks, plan.peak_memory_bytes, strict=True)):
        if uses[0].total != peak:
            yield f"device {device} needs {uses[0].total} bytes and the plan says {peak}"
        if plan.memory[device] not in uses:
            yield f"the peak of device {device} consists of {uses[0]} and the plan says {plan.memory[device]}"
    if plan.lower_bound_seconds > plan.period_seconds * (1 + TOLERANCE):
        yield (
            f"the period of {plan.period_seconds:.9g} s is below its lower bound of "
            f"{plan.lower_bound_seconds:.9g} s"
        )
    else:
        gap = plan.period_seconds / plan.lower_bound_seconds - 1 if plan.lower_bound_seconds else math.inf
        if not abs(gap - plan.gap) <= 1e-3:
            yield f"the gap to the lower bound is {gap:.4f} and the plan says {plan.gap:.4f}"


def _step_ticks(plan: Plan, chain: Chain, step: _Timeline) -> int:
    """When the last stage to do so has ended its last backward and the all-reduce after it."""
    ticks = Clock.of(chain, plan.platform).ticks
    tails = plan.allreduce_seconds or [0.0] * len(plan.stages)
    ends: dict[str, int] = defaultdict(int)
    for (name, _), (_, end) in step.operations.items():
        ends[name] = max(ends[name], end)
    return max(ends[f"B{index}"] + ticks(tail) for index, tail in enumerate(tails))


def _run_step(plan: Plan, chain: Chain, costs: list[_StageCost]) -> _Timeline | str:
    """Run the step's orders, transfers as early as link and buffers allow; a sentence where they cannot run.

    In ticks, always committing the operation or transfer that can start first: whatever is committed
    later cannot start earlier.
    """
    assert plan.step is not None
    flaw = _order_flaw(plan)
    if flaw is not None:
        return flaw
    return _StepRun(plan, chain, costs).run()


def _order_flaw(plan: Plan) -> str | None:
    assert plan.step is not None
    wanted = {
        (f"{kind}{index}", micro_batch): stage.device
        for index, stage in enumerate(plan.stages)
        for kind in "FB"
        for micro_batch in range(plan.step.num_micro_batches)
    }
    for device, order in enumerate(plan.step.order):
        for entry in order:
            if wanted.pop(entry, None) != device:
                return f"{entry[0]} of micro-batch {entry[1]} does not stand once in the order of its device"
    if wanted:
        name, micro_batch = next(iter(wanted))
        return f"{name} of micro-batch {micro_batch} is missing from the order"
    return None


class _StepRun:
    def __init__(self, plan: Plan, chain: Chain, costs: list[_StageCost]) -> None:
        assert plan.step is not None
        self.plan = plan
        self.orders = plan.step.order
        # Ties decide which transfer goes first: the clock makes them the same instants as in the planner.
        self.clock = Clock.of(chain, plan.platform)
        ticks = self.clock.ticks
        self.durations: dict[str, int] = {}
        for index, stage in enumerate(plan.stages):
            layers = chain.layers[slice(*stage.layers)]
            recomputed = [layer for first, last in stage.blocks for layer in chain.layers[first:last]]
            self.durations[f"F{index}"] = sum(ticks(layer.forward_seconds) for layer in layers)
            self.durations[f"B{index}"] = sum(ticks(layer.backward_seconds) for layer in layers) + sum(
                ticks(layer.forward_seconds) for layer in recomputed
            )
        for index, num_bytes in _cuts(plan, chain, between_devices=True):
            transfer = ticks(plan.platform.transfer_seconds(num_bytes))
            self.durations[f"SF{index}"] = self.durations[f"SB{index}"] = transfer
        self.needs = {name: self._needs(name) for name in self.durations if name[0] != "S"}
        self.near = {name: self._near(name) for name in self.durations}
        self.slots = max(1, plan.platform.comm_buffers // 2)
        self.begun: dict[tuple[str, int], int] = {}
        self.ended: dict[tuple[str, int], int] = {}
        self.device_free = [0] * plan.platform.num_devices
        self.link_free: dict[tuple[int, int], int] = defaultdict(int)
        self.position = [0] * len(self.orders)
        self.to_send: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
        self.received: dict[str, list[int]] = defaultdict(list)

    def run(self) -> _Timeline | str:
        # What could start first on each device and link. Only what has just been committed can change that, and
        # only on the devices and links next to it.
        operations = {device: self._operation(device) for device in range(len(self.orders))}
        transfers: dict[tuple[int, int], tuple[int, int, str, int] | None] = {}
        while True:
            candidates = [each for each in (*operations.values(), *transfers.values()) if each is not None]
            if not candidates:
                break
            start, _, name, micro_batch = min(candidates)
            self._commit(start, name, micro_batch)
            stages, cuts = self.near[name]
            for stage in stages:
                operations[self.plan.stages[stage].device] = self._operation(self.plan.stages[stage].device)
            for cut in cuts:
                transfers[self._link(cut)] = self._transfer(self._link(cut))
        for device, order in enumerate(self.orders):
            if self.position[device] < len(order):
                name, micro_batch = order[self.position[device]]
                return f"device {device} waits forever for {name} of micro-batch {micro_batch}"
        return _Timeline({key: (begin, self.ended[key]) for key, begin in self.begun.items()})

    def _near(self, name: str) -> tuple[list[int], list[int]]:
        """The stages and the cuts between devices that an operation, or a transfer, may let start."""
        index = int(name.lstrip("SFB"))
        stages, cuts = (
            ([index, index + 1], [index])
            if name[0] == "S"
            else ([index - 1, index, index + 1], [index - 1, index])
        )
        return (
            [stage for stage in stages if 0 <= stage < len(self.plan.stages)],
            [cut for cut in cuts if f"SF{cut}" in self.durations],
        )

    def _needs(self, name: str) -> list[str]:
        """What must have ended on the same micro-batch."""
        kind, index = name[0], int(name[1:])
        last = len(self.plan.stages) - 1
        if kind == "F":
            before, send = f"F{index - 1}" if index else None, f"SF{index - 1}"
        else:
            before, send = (f"B{index + 1}" if index < last else None), f"SB{index}"
        own = [] if kind == "F" else [f"F{index}"]
        if before is None:
            return own
        return [*own, send if send in self.durations else before]

    def _operation(self, device: int) -> tuple[int, int, str, int] | None:
        """The next of the device's order and when it can start; None where that is not known."""
        order = self.orders[device]
        if self.position[device] == len(order):
            return None
        name, micro_batch = order[self.position[device]]
        ready = [self.ended.get((need, micro_batch)) for need in self.needs[name]]
        known = [end for end in ready if end is not None]
        return (
            (max([self.device_free[device], *known]), 0, name, micro_batch) if len(known) == len(ready) else None
        )

    def _transfer(self, link: tuple[int, int]) -> tuple[int, int, str, int] | None:
        """The first over the link and when it can start; None where none waits that has room."""
        first: dict[str, tuple[int, int, str]] = {}
        for entry in sorted(self.to_send[link]):
            first.setdefault(entry[2], entry)
        eligible = []
        for ready, micro_batch, name in first.values():
            room = self._room_from(name)
            if room is not None:
                start = max(ready, room, self.link_free[link])
                eligible.append((start, ready, micro_batch, name))
        if not eligible:
            return None
        # Of those that can start first, the one whose tensor was ready first.
        start, _, micro_batch, name = min(eligible)
        return start, 1, name, micro_batch

    def _room_from(self, name: str) -> int | None:
        """From when the receiver has a free slot; None while that is not known."""
        index = int(name[2:])
        consumer = f"F{index + 1}" if name[1] == "F" else f"B{index}"
        sent = self.received[name]
        if len(sent) < self.slots:
            return 0
        return self.begun.get((consumer, sent[-self.slots]))

    def _commit(self, start: int, name: str, micro_batch: int) -> None:
        end = start + self.durations[name]
        self.begun[name, micro_batch], self.ended[name, micro_batch] = start, end
        if name[0] == "S":
            index = int(name[2:])
            link = self._link(index)
            self.link_free[link] = end
            self.received[name].append(micro_batch)
            self.to_send[link] = [entry for entry in self.to_send[link] if entry[1:] != (micro_batch, name)]
            return
        kind, index = name[0], int(name[1:])
        device = self.plan.stages[index].device
        self.device_free[device] = end
        self.position[device] += 1
        cut = index if kind == "F" else index - 1
        send = f"S{kind}{cut}"
        if send in self.durations:
            self.to_send[self._link(cut)].append((end, micro_batch, send))

    def _link(self, cut: int) -> tuple[int, int]:
        ends = sorted((self.plan.stages[cut].device, self.plan.stages[cut + 1].device))
        return ends[0], ends[1]
