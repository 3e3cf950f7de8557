"""Measured timelines: when each operation of a plan really ran, and how that compares with the plan.

plan.json, timeline.json --compare--> a step, a period, each operation: planned and measured
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from deepspeed_partition.planner.errors import PlanMismatchError, TimelineFormatError
from deepspeed_partition.planner.io import files
from deepspeed_partition.planner.plan import ChainReference, Plan
from deepspeed_partition.planner.schedule import OperationSpan, span_from_dict
from deepspeed_partition.planner.units import format_seconds

TIMELINE_FORMAT = "madpipe-timeline/1"
NOISY = 1.5
"""Quotient of two times of steps from which a sentence says that they differ."""
FEWEST_FOR_OUTLIERS = 5
"""Steps from which the shortest and the longest do not count for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOperation(OperationSpan):
    """One measured operation on one micro-batch, named and placed as in a plan.

    It starts so many seconds after the start of the step, which is the same instant on all devices. A transfer
    starts when its tensor is there, its receive is posted, and what was sent before it in its direction has
    arrived; it lasts until the tensor has arrived.
    """

    micro_batch: int

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.duration_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**self.place_to_dict(), "micro_batch": self.micro_batch, **self.times_to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TimedOperation:
        return cls(**span_from_dict(data), micro_batch=int(data["micro_batch"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One training step of one pipeline, without what follows its last backward."""

    step: int
    """Number of the step: how many the run did before it."""
    clock_error_seconds: tuple[float, ...]
    """Seconds by which the clock of each device, set by that of device 0, may be wrong at most."""
    operations: tuple[TimedOperation, ...]
    """Operations in the order of their start."""

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first forward to the end of the last backward."""
        computations = [each for each in self.operations if each.link is None]
        first = min(each.start_seconds for each in computations)
        return max(each.end_seconds for each in computations) - first

    def idle_share(self, device: int) -> float:
        """Return the part of the step (0 to 1) in which a device runs no forward and no backward: its bubble."""
        busy = sum(each.duration_seconds for each in self.operations if each.device == device)
        return 1 - busy / self.seconds if self.seconds else 0.0

    def period_seconds(self, depth: int) -> float | None:
        """Return the mean seconds between forwards of the first stage, from ``depth`` in flight on.

        From then on each forward waits for a backward, so forwards come as often as micro-batches leave. None
        where fewer than two forwards are left.
        """
        starts = sorted(each.start_seconds for each in self.operations if each.operation in ("F0", "f0"))[depth:]
        return (starts[-1] - starts[0]) / (len(starts) - 1) if len(starts) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimeline:
    """Measured steps of a run."""

    chain: ChainReference
    """Reference to the chain of the plan."""
    devices: tuple[int, ...]
    """Device of each stage."""
    num_micro_batches: int
    steps: tuple[TimedStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a timeline has at least one step")
        places = self._places()
        for step in self.steps:
            # Count first: a small file may name any number of micro-batches.
            plain = [each for each in step.operations if each.operation[0] not in "RW"]
            if len(plain) != len(places) * self.num_micro_batches:
                raise ValueError(
                    f"step {step.step} has {len(plain)} operations, and {self.num_micro_batches} "
                    f"micro-batches have {len(places)} each"
                )
            found = {(_role(each.operation), each.micro_batch): each for each in step.operations}
            for name, place in places.items():
                for number in range(self.num_micro_batches):
                    each = found.get((name, number))
                    if each is None or (each.device if each.link is None else each.link) != place:
                        raise ValueError(f"step {step.step} has no {name} of micro-batch {number} in its place")
            _check_what_comes_besides(step)

    def _places(self) -> dict[str, int | tuple[int, int]]:
        """Device or link of each operation, by its name."""
        places: dict[str, int | tuple[int, int]] = {}
        for stage, device in enumerate(self.devices):
            places[f"F{stage}"] = places[f"B{stage}"] = device
            if stage + 1 < len(self.devices) and device != self.devices[stage + 1]:
                places[f"SF{stage}"] = places[f"SB{stage}"] = device, self.devices[stage + 1]
        return places

    def compare(self, plan: Plan) -> TimelineComparison:
        """Compare the plan with what was measured: medians over the steps.

        Raises:
            PlanMismatchError: the timeline belongs to another plan.
        """
        devices = tuple(stage.device for stage in plan.stages)
        names = {_role(each.operation) for each in plan.operations if each.operation[0] not in "RW"}
        if (plan.chain, devices, names) != (self.chain, self.devices, set(self._places())):
            raise PlanMismatchError(
                f"the timeline is of a plan for {self.chain.name!r} ({self.chain.digest[:19]!r}...) with its "
                f"stages on the devices {list(self.devices)}, and this plan is for {plan.chain.name!r} "
                f"({plan.chain.digest[:19]!r}...) with stages on {list(devices)}: give the plan of that run"
            )
        return _compared(self, plan)

    # The file

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, ``madpipe-timeline/1``; seconds."""
        return {
            "format": TIMELINE_FORMAT,
            "chain": self.chain.to_dict(),
            "devices": list(self.devices),
            "num_micro_batches": self.num_micro_batches,
            "steps": [
                {
                    "step": step.step,
                    "clock_error_seconds": list(step.clock_error_seconds),
                    "operations": [each.to_dict() for each in step.operations],
                }
                for step in self.steps
            ],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: object, *, where: str = "timeline") -> MeasuredTimeline:
        """Read the JSON form; ``where`` (a file's name) begins the message of an error.

        Raises:
            TimelineFormatError: ``data`` does not follow the format; the message names the path of the field.
        """
        mapping = files.validated(data, schema="timeline", where=where, error=TimelineFormatError)
        try:
            return cls(
                chain=ChainReference.from_dict(mapping["chain"]),
                devices=tuple(int(device) for device in mapping["devices"]),
                num_micro_batches=int(mapping["num_micro_batches"]),
                steps=tuple(
                    TimedStep(
                        step=int(step["step"]),
                        clock_error_seconds=tuple(float(error) for error in step["clock_error_seconds"]),
                        operations=tuple(TimedOperation.from_dict(each) for each in step["operations"]),
                    )
                    for step in mapping["steps"]
                ),
            )
        except ValueError as error:
            raise TimelineFormatError(f"{where}: {error}") from None

    @classmethod
    def load(cls, path: str | PathLike[str]) -> MeasuredTimeline:
        """Read a file that a run wrote.

        Raises:
            TimelineFormatError: the file cannot be read, or is no timeline; the message names the file and the
                field.
        """
        return cls.from_dict(files.read_json(path, error=TimelineFormatError), where=str(path))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, as a whole or not at all; ``MeasuredTimeline.load(path) == timeline``.

        Raises:
            OSError: the folder cannot be written to.
        """
        files.write_json(path, self.to_dict())

    def chrome_trace(self) -> dict[str, Any]:
        """Return a trace for Perfetto and chrome://tracing: a row for each device and direction of a link.

        Steps follow one another, without the time between them.
        """
        events: list[dict[str, Any]] = []
        rows: dict[str, int] = {f"device {device}": device for device in sorted(set(self.devices))}
        begin = 0.0
        for step in self.steps:
            for each in step.operations:
                row = f"device {each.device}"
                if each.link is not None:
                    ends = each.link if each.operation.startswith("SF") else each.link[::-1]
                    row = "from device {} to {}".format(*ends)
                events.append(
                    {
                        "ph": "X", "pid": 0, "tid": rows.setdefault(row, 10**6 + len(rows)),
                        "name": f"{each.operation}.{each.micro_batch}", "cat": each.operation.rstrip("0123456789"),
                        "ts": (begin + each.start_seconds) * 1e6, "dur": each.duration_seconds * 1e6,
                        "args": {"step": step.step},
                    }
                )  # fmt: skip
            begin += max(each.end_seconds for each in step.operations)
        names = [
            {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
            for name, row in rows.items()
        ]
        return {"traceEvents": [*names, *events]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOperation:
    """Planned and measured seconds of one operation, over all micro-batches."""

    operation: str
    planned_seconds: float | None
    """Planned seconds; None for half a backward, where the pattern of the plan has whole ones."""
    measured_seconds: float
    """Median of the measured seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineComparison:
    """Promises of a plan beside what was measured."""

    planned_step_seconds: float | None
    """Planned seconds of the step; None where the plan has no step of so many micro-batches. With several
    pipelines it contains their all-reduce, which the measured step does not."""
    measured_step_seconds: float
    planned_period_seconds: float
    measured_period_seconds: float | None
    """Measured seconds per micro-batch in steady state; None where a step has too few micro-batches for one."""
    operations: tuple[ComparedOperation, ...]
    """Compared operations: those of all stages, then those of all boundaries between devices."""
    planned_idle_share: tuple[float, ...] | None
    """Planned idle part (0 to 1) of each device within a step; None with ``planned_step_seconds``."""
    measured_idle_share: tuple[float, ...]


def steps_in_words(measured_seconds: Sequence[float], planned_seconds: float | None) -> str:
    """Say how long steps took, and by how much that can be trusted: whether they vary, or differ from the plan.

    Args:
        measured_seconds: of each step.
        planned_seconds: of a step; None where the plan has none.
    """
    in_order = sorted(measured_seconds)
    median, one = statistics.median(in_order), int(len(in_order) >= FEWEST_FOR_OUTLIERS)
    words = f"{len(measured_seconds)} steps of {format_seconds(median)}"
    if planned_seconds is None:
        return words
    words += f" ({format_seconds(planned_seconds)} planned)"
    if in_order[-1 - one] > NOISY * in_order[one]:
        return f"{words}, {format_seconds(in_order[0])} to {format_seconds(in_order[-1])}: noisy"
    if median > NOISY * planned_seconds:
        return f"{words}: slower than when layers were measured"
    if planned_seconds > NOISY * median:
        return f"{words}: faster than when layers were measured"
    return words


def _compared(timeline: MeasuredTimeline, plan: Plan) -> TimelineComparison:
    planned = {each.operation: each.duration_seconds for each in plan.operations}
    for index in range(len(plan.stages)):
        forward = planned.setdefault(f"F{index}", planned.get(f"f{index}", 0.0))
        planned.setdefault(f"B{index}", planned.get(f"I{index}", 0.0) + planned.get(f"W{index}", 0.0))
        planned[f"f{index}"] = planned[f"R{index}"] = forward
    num_devices = plan.platform.num_devices
    step = plan.step
    if step is not None and step.num_micro_batches != timeline.num_micro_batches:
        step = None
    planned_idle = None
    if step is not None and step.step_seconds:
        busy = [0.0] * num_devices
        again = [name for order in step.order for name, _ in order if name[0] == "f"]
        for index, stage in enumerate(plan.stages):
            # Both halves of a backward last as long as the whole, and a forward in it as long as one of its own.
            once = timeline.num_micro_batches * (planned[f"F{index}"] + planned[f"B{index}"])
            busy[stage.device] += once + again.count(f"f{index}") * planned[f"F{index}"]
        planned_idle = tuple(1 - each / step.step_seconds for each in busy)
    periods = [each.period_seconds(plan.stages[0].in_flight) for each in timeline.steps]
    steady = [period for period in periods if period is not None]
    measured = dict(_medians(each for step in timeline.steps for each in step.operations))
    return TimelineComparison(
        planned_step_seconds=None if step is None else step.step_seconds,
        measured_step_seconds=statistics.median(each.seconds for each in timeline.steps),
        planned_period_seconds=plan.period_seconds,
        measured_period_seconds=statistics.median(steady) if steady else None,
        operations=tuple(
            ComparedOperation(operation=name, planned_seconds=planned.get(name), measured_seconds=measured[name])
            for name in sorted(measured, key=lambda name: (name[0] == "S", int(name.lstrip("SFBfRIW")), name))
        ),
        planned_idle_share=planned_idle,
        measured_idle_share=tuple(
            statistics.median(each.idle_share(device) for each in timeline.steps) for device in range(num_devices)
        ),
    )


def _role(name: str) -> str:
    """Return ``F0`` for any first forward of stage 0, ``B0`` for a backward or its first half."""
    return {"f": "F", "I": "B"}.get(name[0], name[0]) + name[1:]


def _check_what_comes_besides(step: TimedStep) -> None:
    """Refuse a forward that runs again, or half a backward, without the other one on its device."""
    devices = {(each.operation, each.micro_batch): each.device for each in step.operations}
    wanted = {"R": "f", "W": "I", "I": "W"}
    for (name, number), device in devices.items():
        other = wanted.get(name[0], name[0]) + name[1:]
        if devices.get((other, number), -1) != device:
            raise ValueError(f"step {step.step} has {name} of micro-batch {number} and no {other} on its device")
    if len(devices) != len(step.operations):
        raise ValueError(f"step {step.step} has an operation twice")


def _medians(operations: Iterable[TimedOperation]) -> Iterator[tuple[str, float]]:
    durations: dict[str, list[float]] = defaultdict(list)
    for each in operations:
        durations[each.operation].append(each.duration_seconds)
    for name, seconds in durations.items():
        yield name, statistics.median(seconds)
