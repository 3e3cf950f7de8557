"""The replay: it unrolls a plan and checks what it promises, independently of the planner.

It shares only the data types (and the clock) with the planner: durations, dependencies, overlaps and bytes are
derived here a second time, from the chain and from the operations alone. Two instants are compared in ticks of
the clock, since counts depend on them; a rule counts as broken beyond a tolerance. The lower bound and
DeepSpeed's own step (``blocking_step_seconds``) are no property of the operations and are not checked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import MemoryUse, Plan, PlannedStage
from deepspeed_partition.planner.problem import Chain, LayerProfile
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.simulate.replay_step import Timeline, boundaries_of, run_step, step_ticks

TOLERANCE = 1e-9
"""Tolerance of the replay, relative to the period: a smaller violation may be rounding."""


_Peaks = tuple[MemoryUse, ...]
"""Memory of one device at each of the moments when it needs the most: the same total, possibly in other terms."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of running a plan: what it does, and where that differs from what the plan says.

    Sizes are in bytes; ``in_flight`` has an entry for each stage, ``memory`` for each device.
    """

    violations: tuple[str, ...]
    """Sentences, one for each promise that the plan breaks; empty where it keeps them all."""
    in_flight: tuple[int, ...]
    """Most micro-batches in flight of each stage; of the step where there is one, else of the pattern."""
    memory: tuple[MemoryUse, ...]
    """Peak bytes of each device, by term; of the step where there is one, else of the pattern."""
    step_seconds: float | None = None
    """Seconds of the step in this run; None without a step, or where it cannot run."""


def replay(plan: Plan, chain: Chain) -> Replay:
    """Run ``plan`` on ``chain`` and compare it with what it promises.

    Everything but the data types and the clock is written a second time here: nothing is shared with the planner.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    plan.check_chain(chain)
    costs = [_StageCost(chain, stage) for stage in plan.stages]
    violations = list(_structure_violations(plan, chain, costs))
    if violations:  # a pattern that lacks operations cannot be unrolled
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
        step = run_step(plan, chain)
        if isinstance(step, str):
            return Replay((*violations, step), in_flight, tuple(each[0] for each in peaks))
        step_seconds = Clock.of(chain, plan.platform).seconds(step_ticks(plan, chain, step))
        if abs(step_seconds - plan.step.step_seconds) > TOLERANCE * step_seconds:
            violations.append(
                f"one step takes {step_seconds:.9g} s and the plan says {plan.step.step_seconds:.9g} s"
            )
        costs = [_StageCost(chain, stage, in_step=True) for stage in plan.stages]
        in_flight, peaks = _peaks(plan, chain, costs, step)
        violations += _memory_violations(plan, peaks, "step")
    violations += _promise_violations(plan, in_flight, peaks)
    return Replay(tuple(violations), in_flight, tuple(each[0] for each in peaks), step_seconds)


class _StageCost:
    """Times and bytes of one stage, from the chain alone.

    Args:
        in_step: whether the stage runs in a step that drains, or in a steady state, which has gradients at any
            time and counts the larger of what a layer needs forward and backward.
    """

    def __init__(self, chain: Chain, stage: PlannedStage, *, in_step: bool = False) -> None:
        start, stop = stage.layers
        layers = chain.layers[start:stop]
        self.forward_seconds = math.fsum(layer.forward_seconds for layer in layers)
        self.backward_seconds = math.fsum(layer.backward_seconds for layer in layers)
        self.weight_bytes = sum(layer.weight_bytes for layer in layers)
        blocks = [(first - start, last - start) for first, last in stage.blocks]
        kept = [layer.stash_bytes or 0 for layer in layers]
        recomputed = 0
        for first, last in blocks:  # of a block the first layer keeps the input, and the others nothing
            block_input = chain.boundary_bytes(start + first)
            recomputed = max(recomputed, sum(kept[first:last]) - block_input)
            kept[first:last] = [block_input] + [0] * (last - first - 1)
            self.backward_seconds += math.fsum(layer.forward_seconds for layer in layers[first:last])
        if stop < chain.num_layers and all(last < len(layers) for _, last in blocks):
            kept[-1] += layers[-1].cut_stash_bytes
        self.stash_bytes = sum(kept)
        self.late_gradient_bytes = sum(map(_unshared_gradient_bytes, layers)) if in_step else 0
        """Gradients that are not there before the first backward of the step."""
        self.forward_transient_bytes = self.backward_transient_bytes = 0
        for index, layer in enumerate(layers):
            forward, backward = _transient(layers, kept, blocks, index)
            if layer.running_bytes is None:
                backward = forward + recomputed
            elif in_step and layer.forward_running_bytes is not None:
                forward -= layer.running_bytes - layer.forward_running_bytes
            self.forward_transient_bytes = max(self.forward_transient_bytes, forward)
            self.backward_transient_bytes = max(self.backward_transient_bytes, backward)


def _unshared_gradient_bytes(layer: LayerProfile) -> int:
    """Return the gradients of weights that the layer has for itself: those of others may come earlier."""
    own = layer.weight_bytes - sum(size for _, size in layer.shared_weights)
    return layer.gradient_bytes * own // layer.weight_bytes if layer.weight_bytes else 0


def _transient(
    layers: Sequence[LayerProfile], kept: Sequence[int], blocks: Sequence[tuple[int, int]], index: int
) -> tuple[int, int]:
    """Return what one layer of a stage needs beyond all that the stage keeps, in its forward and its backward."""
    running = layers[index].running_bytes
    if running is None:
        return layers[index].transient_bytes, layers[index].transient_bytes
    for first, last in blocks:
        if first < index < last:  # its backward begins when the forwards of the block have run again
            again = sum(layer.stash_bytes or 0 for layer in layers[first:index])
            beyond = running - sum(kept[first:])
            return beyond + kept[first], beyond + max(kept[first], again)
    return running - sum(kept[index:]), running - sum(kept[index:])


def _structure_violations(plan: Plan, chain: Chain, costs: list[_StageCost]) -> Iterator[str]:
    """Yield a sentence for each operation that is missing, doubled, misplaced, or of a wrong duration."""
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
    """Yield a sentence where an all-reduce is no ring: 2 (D - 1) rounds, each with a D-th of the weights."""
    degree = plan.data_parallel or 1
    for index, (cost, planned) in enumerate(zip(costs, plan.allreduce_seconds, strict=False)):
        share = math.ceil(Fraction(cost.weight_bytes, degree))
        seconds = sum(plan.platform.transfer_seconds(share) for _ in range(2 * (degree - 1)))
        if abs(planned - seconds) > TOLERANCE * max(seconds, plan.period_seconds):
            yield f"the all-reduce of stage {index} takes {seconds:.9g} s and the plan says {planned:.9g} s"


def _begin(plan: Plan, operation: PlacedOperation) -> float:
    """Return the instant, in seconds, at which the operation runs on micro-batch 0."""
    return operation.shift * plan.period_seconds + operation.start_seconds


def _end(plan: Plan, operation: PlacedOperation) -> float:
    return _begin(plan, operation) + operation.duration_seconds


def _dependency_violations(plan: Plan, placed: dict[str, PlacedOperation]) -> Iterator[str]:
    """Yield a sentence for each operation that begins before what it needs: forwards down, backwards up."""
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
    """Yield a sentence where a device or a link does two things at once, over the end of the period too."""
    period, tolerance = plan.period_seconds, TOLERANCE * plan.period_seconds
    resources: dict[str, list[PlacedOperation]] = defaultdict(list)
    for operation in plan.operations:
        if operation.link is None:
            resources[f"device {operation.device}"].append(operation)
        else:
            ends = sorted(operation.link)
            resources[f"the link {ends[0]}-{ends[1]}"].append(operation)
    for resource, operations in resources.items():
        # Sort by middles: an operation without time comes before what begins then and after what ends then.
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


def _unrolled_pattern(plan: Plan, chain: Chain, placed: dict[str, PlacedOperation]) -> Timeline:
    """Return the pattern over enough periods that the beginning of the last one is in steady state."""
    ticks = Clock.of(chain, plan.platform).ticks
    period = max(1, ticks(plan.period_seconds))
    spans = {}
    for name, operation in placed.items():
        begin = operation.shift * period + ticks(operation.start_seconds)
        spans[name] = begin, begin + ticks(operation.duration_seconds)
    periods = -(-max(end for _, end in spans.values()) // period) + 2
    timeline = Timeline(window=((periods - 1) * period, periods * period))
    for micro_batch in range(periods + 1):
        for name, (begin, end) in spans.items():
            timeline.operations[name, micro_batch] = micro_batch * period + begin, micro_batch * period + end
    return timeline


class _Residents:
    """Intervals during which something is kept, and how many of them contain given instants.

    ``instants``: an interval that begins and ends at one instant contains it, as the micro-batch in a stage that
    takes no time; otherwise it contains none, as for a tensor that is used the moment it comes.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]], *, instants: bool = False) -> None:
        spans = np.array(list(intervals)).reshape(-1, 2)  # Python's integers where 64 bits are too few
        instant = spans[:, 0] == spans[:, 1]
        self.starts = np.sort(spans[:, 0])
        self.lasting_starts = np.sort(spans[~instant][:, 0])
        self.lasting_ends = np.sort(spans[~instant][:, 1])
        self.instants = np.sort(spans[instant & instants][:, 0])

    def count(self, at: NDArray[Any]) -> NDArray[np.int64]:
        """Count the intervals at each instant; what ends there is gone before anything begins there."""
        lasting = self.lasting_starts.searchsorted(at, "right") - self.lasting_ends.searchsorted(at, "right")
        return lasting + self.instants.searchsorted(at, "right") - self.instants.searchsorted(at, "left")


def _peaks(
    plan: Plan, chain: Chain, costs: list[_StageCost], timeline: Timeline
) -> tuple[tuple[int, ...], tuple[_Peaks, ...]]:
    """Return the most in flight of each stage, and each device's memory at its peaks, in the timeline's window."""
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
        fixed = plan.platform.fixed_bytes
        weights, after_backwards = _for_weights(plan, chain, device)
        last = MemoryUse(weights=weights, stash=0, buffers=0, transient=after_backwards, fixed=fixed)
        if not residents:
            memory.append((last,))
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
        held = np.full(len(moments), weights, dtype=np.int64)
        for index in mine:
            begins = (begin for begin, _ in _spans(timeline, f"B{index}"))
            held -= (moments < min(begins)) * costs[index].late_gradient_bytes
        total = held + stash + buffers + transient
        if weights + after_backwards > total.max():  # then no micro-batch is there, and no tensor
            memory.append((last,))
            continue
        at_peak = np.flatnonzero(total == total.max())
        terms = zip(*(each[at_peak].tolist() for each in (held, stash, buffers, transient)), strict=True)
        memory.append(
            tuple(
                MemoryUse(weights=kept, stash=stashed, buffers=waiting, transient=running, fixed=fixed)
                for kept, stashed, waiting, running in dict.fromkeys(terms)
            )
        )
    return tuple(in_flight), tuple(memory)


def _for_weights(plan: Plan, chain: Chain, device: int) -> tuple[int, int]:
    """Return the bytes that training keeps for the weights of a device, and those needed behind its backwards."""
    layers = [
        layer for stage in plan.stages if stage.device == device for layer in chain.layers[slice(*stage.layers)]
    ]
    copies, seen = Fraction(str(plan.platform.weight_copies)), set[str]()
    kept = multiplied = 0
    for layer in layers:
        again = [size for key, size in layer.shared_weights if key in seen]
        seen.update(key for key, _ in layer.shared_weights)
        if layer.training_bytes is None:
            multiplied += layer.weight_bytes - sum(again)
        else:
            kept += layer.training_bytes
            kept -= sum(layer.training_bytes * size // layer.weight_bytes for size in again if layer.weight_bytes)
    steps = [layer.optimizer_transient_bytes for layer in layers]
    optimizer = sum(steps) if plan.platform.optimizer_step == "sum" else max(steps, default=0)
    reduction = sum(layer.reduction_bytes for layer in layers)
    return kept + math.ceil(copies * multiplied), max(optimizer, reduction)


def _spans(timeline: Timeline, name: str) -> Iterator[tuple[int, int]]:
    for micro_batch in timeline.micro_batches:
        if (name, micro_batch) in timeline.operations:
            yield timeline.operations[name, micro_batch]


def _between(
    timeline: Timeline, first: str, first_edge: int, second: str, second_edge: int
) -> Iterator[tuple[int, int]]:
    """Yield per micro-batch the instants of an edge (0 start, 1 end) of one operation and of another."""
    for micro_batch in timeline.micro_batches:
        begin = timeline.operations[first, micro_batch][first_edge]
        yield begin, max(begin, timeline.operations[second, micro_batch][second_edge])


def _kept(timeline: Timeline, forward: str, backward: str) -> _Residents:
    return _Residents(_between(timeline, forward, 0, backward, 1), instants=True)


def _waiting_at_ends(
    plan: Plan, chain: Chain, timeline: Timeline, device: int
) -> Iterator[tuple[tuple[int, str], tuple[_Residents, int]]]:
    """Yield the tensors, activations and gradients together, at each end of a boundary that lies on ``device``."""
    for index, num_bytes in boundaries_of(plan, chain, between_devices=True):
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
    plan: Plan, chain: Chain, timeline: Timeline, device: int
) -> Iterator[tuple[int, tuple[_Residents, int]]]:
    """Yield the tensors that wait between neighbouring stages of one device."""
    for index, num_bytes in boundaries_of(plan, chain, between_devices=False):
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
