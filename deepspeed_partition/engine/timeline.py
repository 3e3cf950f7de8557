"""Records when each operation of a step runs, in the terms of the plan, on the clock of the pipeline's first rank.

Forwards and backwards are timed where they run. A transfer has two ends: its sender knows when the tensor was
there, its receiver when there was room and when the tensor had arrived; the file has what follows from both.

    device 0   F0.0 [=======]      sent |
    device 1             posted |       |-----SF0.0-----| arrived

On a CPU the clock is ``perf_counter``, and a thread for each device that tensors come from sees them arrive. On a
GPU it is events: on the stream that computes, and for arrivals on a stream that does nothing but wait for them.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.environment import announce
from deepspeed_partition.engine.helper import Helper
from deepspeed_partition.engine.program import Compute, Instruction, Message
from deepspeed_partition.engine.transfers import Transfers
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.timeline import MeasuredTimeline, TimedOperation, TimedStep
from deepspeed_partition.planner.units import format_seconds

NUM_STEPS = 10
"""So many training steps are recorded, from the first one on; comparisons take their median."""
NUM_PINGS = 16
"""By which a rank finds how its clock differs from the first one's: the quickest counts."""
PING_TAG = 2**20
"""Beside the headers, whose tags are cuts."""

Execute = Callable[[Instruction], None]
Stamp = Any
"""An instant: ``perf_counter``'s, or an event of the device."""


class Recorder:
    """Records the first training steps of the job's first pipeline, and writes them to a file.

    The file is whole after each step. Where it cannot be written the training goes on, and a warning says so. It
    has the steps of one plan, the last one, and of one number of micro-batches, that of its first step.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = path
        self._device = device
        self._num_left = NUM_STEPS
        self._plan: Plan | None = None
        self._num_micro_batches = 0
        self._steps: list[TimedStep] = []
        self._arrivals: _Arrivals | None = None

    @property
    def wants_more(self) -> bool:
        return self._num_left > 0

    @contextmanager
    def step(self, plan: Plan, transfers: Transfers, execute: Execute) -> Iterator[Execute]:
        """A step of all ranks of a pipeline: what to call in the place of ``execute``."""
        self._num_left -= 1
        if 0 not in transfers.ranks:
            self._num_left = 0
            yield execute
            return
        offset_seconds, error_seconds = _offset_to_first(transfers)
        clock = _Clock() if self._device.type == "cpu" else _DeviceClock()
        if self._arrivals is None:
            on_host = self._device.type == "cpu" or transfers.through_host
            self._arrivals = _Arrivals() if on_host else _DeviceArrivals()
        recorded = _Recorded(clock, self._arrivals)
        transfers.watch = recorded.watch
        yield recorded.timed(execute)
        # After an error, which ends the run, nothing is tidied up: threads may wait for transfers still.
        transfers.watch = None
        parts = _gather(recorded.part(offset_seconds, error_seconds), transfers)
        if dist.get_rank() == 0:
            self._write(plan, parts)
        if not self.wants_more:
            self.close()

    def close(self) -> None:
        """End what runs beside the engine."""
        if self._arrivals is not None:
            self._arrivals.close()
            self._arrivals = None

    def _write(self, plan: Plan, parts: list[_Part]) -> None:
        devices = tuple(stage.device for stage in plan.stages)
        num_micro_batches = sum(name == "F0" for part in parts for name, *_ in part.computed)
        if plan is not self._plan:
            self._plan, self._num_micro_batches = plan, num_micro_batches
            self._steps.clear()
        if num_micro_batches == self._num_micro_batches:
            step = TimedStep(
                step=NUM_STEPS - self._num_left - 1,
                clock_error_seconds=tuple(part.clock_error_seconds for part in parts),
                operations=merged(parts, devices),
            )
            self._steps.append(step)
        timeline = MeasuredTimeline(
            chain=plan.chain,
            devices=devices,
            num_micro_batches=self._num_micro_batches,
            steps=tuple(self._steps),
        )
        try:
            timeline.save(self._path)
        except OSError as flaw:
            announce(f"the timeline in {self._path}: {flaw.strerror}", logging.WARNING)
            return
        if not self.wants_more:
            found = timeline.compare(plan)
            planned = found.planned_step_seconds
            announce(
                f"the timeline of the first {NUM_STEPS} steps is in {self._path}: a step took "
                f"{format_seconds(found.measured_step_seconds)} without the optimizer"
                + ("" if planned is None else f", planned were {format_seconds(planned)}")
            )


@dataclass(frozen=True, slots=True)
class _Part:
    """What one device saw of a step, in seconds of the first device's clock."""

    computed: list[tuple[str, int, float, float]]
    """Operation, micro-batch, start, end."""
    sent: dict[Message, float]
    received: dict[Message, tuple[float, float]]
    """When the receive was posted and when the tensor was there, in the order of posting."""
    clock_error_seconds: float


class _Recorded:
    """One device's instants of one step."""

    def __init__(self, clock: _Clock, arrivals: _Arrivals) -> None:
        self._clock, self._arrivals = clock, arrivals
        self._computed: list[tuple[Compute, Stamp, Stamp]] = []
        self._sent: dict[Message, Stamp] = {}
        self._posted: dict[Message, Stamp] = {}
        self._arrived: dict[Message, Stamp] = {}

    def timed(self, execute: Execute) -> Execute:
        def run(instruction: Instruction) -> None:
            if isinstance(instruction, Compute):
                start = self._clock.now()
                execute(instruction)
                self._computed.append((instruction, start, self._clock.now()))
                return
            if instruction.kind == "S":
                self._sent[instruction.message] = self._clock.now()
            execute(instruction)

        return run

    def watch(self, message: Message, peer: int, works: list[Any]) -> list[Any]:
        """What to wait for in the place of ``works``, of a receive that is posted now."""
        self._posted[message] = time.perf_counter()
        return self._arrivals.watch(peer, works, functools.partial(self._arrived.__setitem__, message))

    def part(self, offset_seconds: float, error_seconds: float) -> _Part:
        self._clock.finish()

        def seconds(stamp: Stamp) -> float:
            return self._clock.seconds(stamp) + offset_seconds

        return _Part(
            computed=[
                (f"{each.kind}{each.stage}", each.micro_batch, seconds(start), seconds(end))
                for each, start, end in self._computed
            ],
            sent={message: seconds(stamp) for message, stamp in self._sent.items()},
            received={
                message: (seconds(stamp), seconds(self._arrived[message]))
                for message, stamp in self._posted.items()
            },
            clock_error_seconds=error_seconds,
        )


class _Clock:
    """Of a CPU."""

    def now(self) -> Stamp:
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        return stamp

    def finish(self) -> None:
        """Until every instant is over."""


class _DeviceClock(_Clock):
    """Events on the current stream, between instants of ``perf_counter``."""

    def __init__(self) -> None:
        get_accelerator().synchronize()
        self._first = self.now()
        self._first.synchronize()
        self._first_seconds = time.perf_counter()

    def now(self) -> Stamp:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, float):
            return stamp
        return self._first_seconds + self._first.elapsed_time(stamp) / 1e3

    def finish(self) -> None:
        get_accelerator().synchronize()


class _Arrivals:
    """Sees tensors arrive in the memory of a CPU. gloo tells that only to who waits for it: threads do."""

    def __init__(self) -> None:
        self._helpers: dict[int, Helper] = {}

    def watch(self, peer: int, works: list[Any], note: Callable[[Stamp], None]) -> list[Any]:
        if peer not in self._helpers:
            self._helpers[peer] = Helper(f"arrivals-from-{peer}")
        awaited = _Awaited(works, note)
        self._helpers[peer].do(awaited.wait_and_note)
        return [awaited]

    def close(self) -> None:
        for helper in self._helpers.values():
            helper.close()


class _Awaited:
    """A receive for which a helper waits."""

    def __init__(self, works: list[Any], note: Callable[[Stamp], None]) -> None:
        self._works, self._note = works, note
        self._over = threading.Event()
        self._flaw: Exception | None = None

    def wait_and_note(self) -> None:
        try:
            for work in self._works:
                work.wait()
            self._note(time.perf_counter())
        except Exception as flaw:  # raised again by wait()
            self._flaw = flaw
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._flaw is not None:
            raise self._flaw


class _DeviceArrivals(_Arrivals):
    """Sees tensors arrive on a GPU: a stream for each device waits for what comes from there."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[int, Any] = {}

    def watch(self, peer: int, works: list[Any], note: Callable[[Stamp], None]) -> list[Any]:
        accelerator = get_accelerator()
        if peer not in self._streams:
            self._streams[peer] = accelerator.Stream()
        with accelerator.stream(self._streams[peer]):
            for work in works:
                work.wait()
            event = accelerator.Event(enable_timing=True)
            event.record()
        note(event)
        return works


def _offset_to_first(transfers: Transfers) -> tuple[float, float]:
    """What to add to this rank's clock to have that of the pipeline's first one, and how wrong that may be."""
    first, *others = transfers.ranks
    message = torch.zeros(1, dtype=torch.float64)
    options: dict[str, Any] = {"group": transfers.cpu_group, "tag": PING_TAG}
    if dist.get_rank() == first:
        for rank in others:
            for _ in range(NUM_PINGS):
                dist.recv(message, rank, **options)
                message[0] = time.perf_counter()
                dist.send(message, rank, **options)
        return 0.0, 0.0
    answers = []
    for _ in range(NUM_PINGS):
        asked = time.perf_counter()
        dist.send(message, first, **options)
        dist.recv(message, first, **options)
        answered = time.perf_counter()
        answers.append(((answered - asked) / 2, float(message) - (asked + answered) / 2))
    error_seconds, offset_seconds = min(answers)
    return offset_seconds, error_seconds


def _gather(part: _Part, transfers: Transfers) -> list[_Part]:
    """Those of all devices, on the first one."""
    first = transfers.ranks[0]
    parts: list[Any] | None = [None] * len(transfers.ranks) if dist.get_rank() == first else None
    dist.gather_object(part, parts, dst=first, group=transfers.cpu_group)
    return parts or []


def merged(parts: list[_Part], devices: tuple[int, ...]) -> tuple[TimedOperation, ...]:
    """The operations of a step, by their start; of each transfer what its two ends saw."""
    zero = min(start for part in parts for _, _, start, _ in part.computed)

    def placed(name: str, micro_batch: int, start: float, end: float, **place: Any) -> TimedOperation:
        start = max(start - zero, 0.0)
        return TimedOperation(
            operation=name,
            micro_batch=micro_batch,
            start_seconds=start,
            duration_seconds=max(end - zero - start, 0.0),
            **place,
        )

    operations = [
        placed(name, micro_batch, start, end, device=device)
        for device, part in enumerate(parts)
        for name, micro_batch, start, end in part.computed
    ]
    sent = {message: seconds for part in parts for message, seconds in part.sent.items()}
    for part in parts:
        last_arrival: dict[int, float] = {}  # by the device that it came from
        for message, (posted, arrived) in part.received.items():
            link = devices[message.cut], devices[message.cut + 1]
            source = link[0] if message.direction == "F" else link[1]
            start = max(sent[message], posted, last_arrival.get(source, posted))
            last_arrival[source] = max(start, arrived)
            operations.append(placed(f"S{message.channel}", message.micro_batch, start, arrived, link=link))
    return tuple(sorted(operations, key=lambda each: (each.start_seconds, each.operation)))
