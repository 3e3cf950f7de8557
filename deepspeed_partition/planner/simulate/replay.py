"""The replay: it unrolls a plan and checks what it promises, independently of the planner.

It shares only the data types (and the clock) with the planner: durations, dependencies, overlaps and bytes are
derived here a second time, from the chain and from the operations alone. Two instants are compared in ticks of
the clock, since counts depend on them; a rule counts as broken beyond a tolerance. Lower bounds and DeepSpeed's
own step (``blocking_step_seconds``) are no property of the operations: it is checked only that no lower bound is
above what runs, and that gaps and proofs say the same as the bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import MemoryUse, Plan, StepPlan
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.simulate.replay_memory import (
    DevicePeaks,
    StageCost,
    costs_of,
    peaks_of,
    weights_of,
)
from deepspeed_partition.planner.simulate.replay_step import Timeline, occupied_by, run_step, step_ticks
from deepspeed_partition.planner.simulate.replay_versions import version_violations

TOLERANCE = 1e-9
"""Tolerance of the replay, relative to the period: a smaller violation may be rounding."""
MOST_COUNTED = 2**62
"""Most bytes of a device that are counted over time."""
BELOW_BOUND = "is below its lower bound"
LARGEST_PROVED_GAP = 2e-6
"""Largest gap of a step that is proved: proofs hold to one part in a million."""


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


@dataclass(frozen=True, slots=True)
class _Run:
    """What a plan does, whatever it promises of memory and micro-batches in flight."""

    violations: tuple[str, ...]
    in_flight: tuple[int, ...] = ()
    peaks: tuple[DevicePeaks, ...] = ()
    step_seconds: float | None = None
    is_whole: bool = False
    """False: it cannot run to its end."""

    @property
    def memory(self) -> tuple[MemoryUse, ...]:
        return tuple(each[0] for each in self.peaks)

    def beside(self, plan: Plan) -> Replay:
        """Return the run with the promises that the plan breaks."""
        broken = _promise_violations(plan, self.in_flight, self.peaks) if self.is_whole else ()
        return Replay((*self.violations, *broken), self.in_flight, self.memory, self.step_seconds)


def replay(plan: Plan, chain: Chain) -> Replay:
    """Run ``plan`` on ``chain`` and compare it with what it promises.

    Everything but the data types and the clock is written a second time here: nothing is shared with the planner.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    return _run(plan, chain).beside(plan)


def replay_and_count(plan: Plan, chain: Chain) -> tuple[Plan, Replay]:
    """Return the plan with the memory and the micro-batches in flight that its run has, and its replay.

    The run is one: nothing that a plan does depends on what it promises. A plan that cannot run stays as it is.

    Raises:
        PlanMismatchError: the plan is for another chain.
    """
    run = _run(plan, chain)
    if run.is_whole:
        stages = tuple(
            replace(stage, in_flight=count) for stage, count in zip(plan.stages, run.in_flight, strict=True)
        )
        peaks = tuple(use.total for use in run.memory)
        plan = replace(plan, stages=stages, memory=run.memory, peak_memory_bytes=peaks)
    return plan, run.beside(plan)


def _run(plan: Plan, chain: Chain) -> _Run:
    plan.check_chain(chain)
    costs = costs_of(plan, chain, in_step=False)
    violations = [*_structure_violations(plan, chain, costs), *_uncounted_violations(plan, chain)]
    if plan.is_asynchronous and not plan.treats_all_alike:
        violations.append(
            f"weight_versions is {plan.weight_versions!r}, which is counted for patterns of one micro-batch with "
            "whole forwards and backwards alone"
        )
    if violations:  # a pattern that lacks operations cannot be unrolled
        return _Run(tuple(violations))
    violations += _dependency_violations(plan)
    violations += _overlap_violations(plan)
    violations += _allreduce_violations(plan, costs)
    pattern = _unrolled_pattern(plan, chain)
    violations += version_violations(plan, chain)
    in_flight, peaks = peaks_of(plan, chain, costs, pattern)
    violations += _memory_violations(plan, peaks, "pattern")
    step_seconds = None
    if plan.step is not None:
        step = run_step(plan, chain)
        if isinstance(step, str):
            return _Run((*violations, step), in_flight, peaks)
        step_seconds = Clock.of(chain, plan.platform).seconds(step_ticks(plan, chain, step))
        if abs(step_seconds - plan.step.step_seconds) > TOLERANCE * step_seconds:
            violations.append(
                f"one step takes {step_seconds:.9g} s and the plan says {plan.step.step_seconds:.9g} s"
            )
        costs = costs_of(plan, chain, in_step=True)
        in_flight, peaks = peaks_of(plan, chain, costs, step)
        violations += _memory_violations(plan, peaks, "step")
    return _Run(tuple(violations), in_flight, peaks, step_seconds, is_whole=True)


def timeline_of(plan: Plan, chain: Chain) -> Timeline | str:
    """Return the instants of a plan's step, else of its pattern; a sentence where the step cannot run."""
    if plan.step is not None:
        return run_step(plan, chain)
    return _unrolled_pattern(plan, chain)


def clock_of(plan: Plan, chain: Chain) -> Clock:
    """Return the clock of a plan's timeline: that of its step, else of its pattern."""
    return Clock.of(chain, plan.platform, 1 if plan.step is not None else plan.micro_batches_per_period)


def _structure_violations(plan: Plan, chain: Chain, costs: list[StageCost]) -> Iterator[str]:
    """Yield a sentence for each operation that is missing, doubled, misplaced, or of a wrong duration."""
    period = plan.pattern_seconds
    rows = {(operation.operation, operation.index) for operation in plan.operations}
    expected: dict[tuple[str, int], tuple[float, int | None, tuple[int, int] | None]] = {}
    for number in range(plan.micro_batches_per_period):
        for index, (stage, cost) in enumerate(zip(plan.stages, costs, strict=True)):
            kinds = {kind for kind in "FBfRIW" if (f"{kind}{index}", number) in rows}
            for kind in _kinds_of(kinds):
                seconds = cost.seconds(kind, recomputes="f" in kinds and "R" not in kinds)
                if seconds is None:
                    yield f"{kind}{index} is half a backward, and the chain does not say how long its halves last"
                    return
                expected[f"{kind}{index}", number] = seconds, stage.device, None
            if index + 1 < len(plan.stages) and stage.device != plan.stages[index + 1].device:
                link = (stage.device, plan.stages[index + 1].device)
                seconds = plan.platform.transfer_seconds(chain.boundary_bytes(stage.layers[1]), *link)
                expected[f"SF{index}", number] = (seconds, None, link)
                expected[f"SB{index}", number] = (seconds, None, link)
    seen: set[tuple[str, int]] = set()
    for operation in plan.operations:
        key, name = (operation.operation, operation.index), _shown(plan, operation.operation, operation.index)
        if key in seen:
            yield f"{name} stands twice in the pattern"
        seen.add(key)
        if key not in expected:
            yield f"{name} is no operation of this allocation"
            continue
        seconds, device, travels = expected[key]
        if abs(operation.duration_seconds - seconds) > TOLERANCE * max(seconds, period):
            yield f"{name} lasts {seconds:.9g} s and the plan says {operation.duration_seconds:.9g} s"
        if (operation.device, operation.link) != (device, travels):
            place, right = ("device", device) if travels is None else ("link", travels)
            yield f"{name} is on {place} {getattr(operation, place)}, not on {right}"
        if not 0 <= operation.start_seconds < period:
            yield f"{name} starts at {operation.start_seconds:.9g} s, not within the period of {period:.9g} s"
        if operation.operation in ("F0", "f0") and operation.shift != 0:
            yield f"{name} has shift {operation.shift}, not 0"
    for missing in expected.keys() - seen:
        yield f"{_shown(plan, *missing)} is missing from the pattern"


def _uncounted_violations(plan: Plan, chain: Chain) -> Iterator[str]:
    """Yield a sentence for each device with more bytes than 64-bit numbers count: no device has so many."""
    for device in sorted({stage.device for stage in plan.stages}):
        mine = [stage.layers for stage in plan.stages if stage.device == device]
        ends = {boundary for layers in mine for boundary in layers} - {0, chain.num_layers}
        buffers = plan.platform.comm_buffers * sum(map(chain.boundary_bytes, ends))
        kept, memory_bytes = weights_of(plan, chain, device), plan.platform.memory_of(device)
        if kept + buffers > MOST_COUNTED:
            yield (
                f"device {device} keeps {kept} bytes for its weights and {buffers} in buffers and has "
                f"{memory_bytes}: {kept + buffers - memory_bytes} bytes short"
            )


def _kinds_of(kinds: set[str]) -> list[str]:
    """Return what a stage runs on a micro-batch, if it runs some of ``kinds``: a forward and a backward at least.

    Where these contradict one another (``F`` and ``f``, ``R`` beside ``F``, ``B`` beside ``I``), what is too much
    is left out.
    """
    forward = ["F"] if "F" in kinds or "f" not in kinds else ["f", *(["R"] if "R" in kinds else [])]
    return [*forward, *(["I", "W"] if "B" not in kinds and kinds & {"I", "W"} else ["B"])]


def _shown(plan: Plan, name: str, index: int) -> str:
    """Return the name of an operation, with its number where the pattern has several of this name."""
    return name if plan.micro_batches_per_period == 1 else f"{name} of index {index}"


def _allreduce_violations(plan: Plan, costs: list[StageCost]) -> Iterator[str]:
    """Yield a sentence where an all-reduce is no ring: 2 (D - 1) rounds, each with a D-th of the weights."""
    degree = plan.data_parallel or 1
    for index, (cost, planned) in enumerate(zip(costs, plan.allreduce_seconds, strict=False)):
        share = math.ceil(Fraction(cost.weight_bytes, degree))
        seconds = sum(_round_seconds(plan, index, share) for _ in range(2 * (degree - 1)))
        if abs(planned - seconds) > TOLERANCE * max(seconds, plan.period_seconds):
            yield f"the all-reduce of stage {index} takes {seconds:.9g} s and the plan says {planned:.9g} s"


def _round_seconds(plan: Plan, stage: int, num_bytes: int) -> float:
    """Return the seconds of a round of a stage's all-reduce: on machines, of the slowest link of its ring."""
    platform, place = plan.platform, plan.stages[stage].device
    if platform.machines is None or not platform.pipelines:
        return platform.transfer_seconds(num_bytes)
    ring = sorted(pipeline[place] for pipeline in platform.pipelines)
    levels = [platform.machines.level_between(one, other) for one, other in pairwise([*ring, ring[0]])]
    return max(level.latency_seconds + num_bytes / level.bandwidth for level in levels)


def _begin(plan: Plan, operation: PlacedOperation) -> float:
    """Return the instant, in seconds, at which the operation runs on the micro-batch of its index."""
    return operation.shift * plan.pattern_seconds + operation.start_seconds


def _end(plan: Plan, operation: PlacedOperation) -> float:
    return _begin(plan, operation) + operation.duration_seconds


def _dependency_violations(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each operation that begins before what it needs: forwards down, backwards up.

    A forward that keeps nothing runs again before its backward, and the second half of a backward comes behind
    the first.
    """
    stages = range(len(plan.stages))
    forward = [f"{kind}{stage}" for stage in stages for kind in ("F", "f", "SF")]
    backward = [f"{kind}{stage}" for stage in reversed(stages) for kind in ("SB", "B", "I")]
    for number in range(plan.micro_batches_per_period):
        placed = {each.operation: each for each in plan.operations if each.index == number}
        pairs = list(pairwise(name for name in forward + backward if name in placed))
        for stage in stages:
            again = [name for name in (f"f{stage}", f"R{stage}", f"B{stage}", f"I{stage}") if name in placed]
            halves = [name for name in (f"I{stage}", f"W{stage}") if name in placed]
            pairs += [*(pairwise(again) if f"R{stage}" in placed else ()), *pairwise(halves)]
        for before, after in pairs:
            ready = _end(plan, placed[before])
            begins = _begin(plan, placed[after])
            if begins < ready - TOLERANCE * plan.period_seconds:
                yield (
                    f"{_shown(plan, after, number)} starts at {begins:.9g} s, before {before} has ended at "
                    f"{ready:.9g} s"
                )


def _overlap_violations(plan: Plan) -> Iterator[str]:
    """Yield a sentence where a device, link or port does two things at once, over the end of the period too."""
    period, tolerance = plan.pattern_seconds, TOLERANCE * plan.period_seconds
    resources: dict[str, list[PlacedOperation]] = defaultdict(list)
    for operation in plan.operations:
        if operation.link is None:
            resources[f"device {operation.device}"].append(operation)
        else:
            for each in occupied_by(plan, int(operation.operation[2:]), operation.operation[1]):
                resources[each].append(operation)
    for resource, operations in resources.items():
        # Sort by middles: an operation without time comes before what begins then and after what ends then.
        operations.sort(key=lambda each: each.start_seconds + each.duration_seconds / 2)
        following = [(each, each.start_seconds) for each in operations[1:]]
        following.append((operations[0], operations[0].start_seconds + period))
        for operation, (after, start) in zip(operations, following, strict=True):
            end = operation.start_seconds + operation.duration_seconds
            if end > start + tolerance:
                yield (
                    f"{resource} runs {_shown(plan, operation.operation, operation.index)} until {end:.9g} s "
                    f"and {_shown(plan, after.operation, after.index)} from {start:.9g} s"
                )


def _unrolled_pattern(plan: Plan, chain: Chain) -> Timeline:
    """Return the pattern over enough periods that the beginning of the last one is in steady state."""
    number = plan.micro_batches_per_period
    ticks = Clock.of(chain, plan.platform, number).ticks
    period = max(1, ticks(plan.pattern_seconds))
    spans = {}
    for operation in plan.operations:
        begin = operation.shift * period + ticks(operation.start_seconds)
        spans[operation.operation, operation.index] = begin, begin + ticks(operation.duration_seconds)
    periods = -(-max(end for _, end in spans.values()) // period) + 2
    timeline = Timeline(window=((periods - 1) * period, periods * period))
    for time in range(periods + 1):
        for (name, index), (begin, end) in spans.items():
            timeline.operations[name, time * number + index] = time * period + begin, time * period + end
    return timeline


def _memory_violations(plan: Plan, peaks: tuple[DevicePeaks, ...], what: str) -> Iterator[str]:
    for device, (use, *_) in enumerate(peaks):
        memory_bytes = plan.platform.memory_of(device)
        short = use.total - memory_bytes
        if short > 0:
            yield (
                f"device {device} needs {use.total} bytes in the {what} and has {memory_bytes}: "
                f"{short} bytes short"
            )


def _promise_violations(plan: Plan, in_flight: tuple[int, ...], peaks: tuple[DevicePeaks, ...]) -> Iterator[str]:
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
    if plan.step is not None and plan.step.lower_bound_seconds is not None:
        yield from _step_bound_violations(plan.step, plan.step.lower_bound_seconds)


def _step_bound_violations(step: StepPlan, bound: float) -> Iterator[str]:
    """Yield a sentence where a step, its lower bound, its gap and its proof contradict one another."""
    if bound > step.step_seconds * (1 + TOLERANCE):
        yield f"the step of {step.step_seconds:.9g} s {BELOW_BOUND} of {bound:.9g} s"
        return
    gap = step.step_seconds / bound - 1 if bound else math.inf
    if step.gap is not None and not abs(gap - step.gap) <= 1e-3:
        yield f"the gap of the step to its lower bound is {gap:.4f} and the plan says {step.gap:.4f}"
    if step.proved and gap > LARGEST_PROVED_GAP:
        yield f"the step is {gap:.2g} above its lower bound and the plan says that it is proved"
