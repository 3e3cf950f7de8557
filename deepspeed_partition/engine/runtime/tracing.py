"""When the operations of a step ran, and when messages came, on the clock of the pipeline's first rank.

Forwards and backwards are timed where they run. A transfer has two ends: its sender knows when the tensor was
there, its receiver when there was room and when the tensor had arrived.

    device 0   F0.0 [=======]      sent |
    device 1             posted |       |-----SF0.0-----| arrived

On a CPU the clock is ``perf_counter``, and a thread for each device that tensors come from sees them arrive. On a
GPU it is events: on the stream that computes, and for arrivals on a stream that does nothing but wait for them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, tensors_of
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message

NUM_PINGS = 16
"""The number of messages by which a rank finds how its clock differs from the first one's: the quickest counts."""
PING_TAG = 2**20
"""The tag of these messages, beside the headers, whose tags are cuts."""

Execute = Callable[[Instruction], None]
Stamp = Any
"""An instant: ``perf_counter``'s, or an event of the device."""


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """What one device saw of a step, in seconds of the first device's clock."""

    computed: list[tuple[str, int, float, float]]
    """Operation, micro-batch, start and end (in seconds) of each computation."""
    sent: dict[Message, float]
    received: dict[Message, tuple[float, float]]
    """The seconds at which each receive was posted and its tensor was there, in the order of posting."""
    received_bytes: dict[Message, int]
    clock_error_seconds: float


class Move(NamedTuple):
    """One message, on the clock of the pipeline's first rank."""

    message: Message
    start_seconds: float
    """The seconds at which its tensor was there, its receive was posted, and what came before had arrived."""
    end_seconds: float
    num_bytes: int


class Recorded:
    """One device's instants of one step."""

    part: DeviceTrace
    """What the device saw of the step; it is there when the step is over."""

    def __init__(self, clock: _Clock, arrivals: _Arrivals, execute: Execute) -> None:
        self._clock, self._arrivals, self._execute = clock, arrivals, execute
        self._computed: list[tuple[Compute, Stamp, Stamp]] = []
        self._sent: dict[Message, Stamp] = {}
        self._posted: dict[Message, Stamp] = {}
        self._arrived: dict[Message, Stamp] = {}
        self._bytes: dict[Message, int] = {}

    def execute(self, instruction: Instruction) -> None:
        """Execute an instruction of the step, and note when."""
        if isinstance(instruction, Compute):
            start = self._clock.now()
            self._execute(instruction)
            self._computed.append((instruction, start, self._clock.now()))
            return
        if instruction.kind == "S":
            self._sent[instruction.message] = self._clock.now()
        self._execute(instruction)

    def watch(self, message: Message, peer: int, boundary: Boundary, works: list[Any]) -> list[Any]:
        """Return what to wait for in the place of ``works``, of a receive that is posted now."""
        self._posted[message] = self._clock.now()
        self._bytes[message] = sum(each.numel() * each.element_size() for each in tensors_of(boundary))
        return self._arrivals.watch(peer, works, functools.partial(self._arrived.__setitem__, message))

    def finish(self, offset_seconds: float, error_seconds: float) -> None:
        self._clock.finish()
        self._arrivals.close()

        def seconds(stamp: Stamp) -> float:
            return self._clock.seconds(stamp) + offset_seconds

        self.part = DeviceTrace(
            computed=[
                (each.name, each.micro_batch, seconds(start), seconds(end)) for each, start, end in self._computed
            ],
            sent={message: seconds(stamp) for message, stamp in self._sent.items()},
            received={
                message: (seconds(stamp), seconds(self._arrived[message]))
                for message, stamp in self._posted.items()
            },
            received_bytes=self._bytes,
            clock_error_seconds=error_seconds,
        )


@contextmanager
def recorded(transfers: Transfers, device: torch.device, execute: Execute) -> Iterator[Recorded]:
    """Record a step of all ranks of a pipeline, whose instructions go through the object that this yields."""
    offset_seconds, error_seconds = _offset_to_first(transfers)
    clock = _Clock() if device.type == "cpu" else _DeviceClock()
    on_host = device.type == "cpu" or transfers.through_host
    step = Recorded(clock, _Arrivals() if on_host else _DeviceArrivals(transfers), execute)
    transfers.watch = step.watch
    try:
        yield step
    finally:
        transfers.watch = None
    # Not after an error, which ends the run: threads may wait for transfers still.
    step.finish(offset_seconds, error_seconds)


def moves_of(parts: Sequence[DeviceTrace], devices: Sequence[int]) -> Iterator[Move]:
    """Return the messages of a step, seen from both ends; ``parts`` by device, ``devices`` of each stage."""
    sent = {message: seconds for part in parts for message, seconds in part.sent.items()}
    for part in parts:
        last_arrival: dict[int, float] = {}  # by the device that it came from
        for message, (posted, arrived) in part.received.items():
            source, _ = message.ends(devices)
            start = max(sent[message], posted, last_arrival.get(source, posted))
            last_arrival[source] = max(start, arrived)
            yield Move(message, start, arrived, part.received_bytes[message])


class _Clock:
    """The clock of a CPU."""

    def now(self) -> Stamp:
        return time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        return stamp

    def finish(self) -> None:
        """Wait until every instant is over."""


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
        """End what runs beside the engine."""
        for helper in self._helpers.values():
            helper.close()


class _Awaited:
    """A receive for which a helper waits."""

    def __init__(self, works: list[Any], note: Callable[[Stamp], None]) -> None:
        self._works, self._note = works, note
        self._over = threading.Event()
        self._error: Exception | None = None

    def wait_and_note(self) -> None:
        try:
            for work in self._works:
                work.wait()
            self._note(time.perf_counter())
        except Exception as error:  # raised again by wait()
            self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error


class _DeviceArrivals(_Arrivals):
    """Sees tensors arrive on a GPU: a stream for each device waits for what comes from there, in every step."""

    def __init__(self, transfers: Transfers) -> None:
        super().__init__()
        self._transfers = transfers

    def watch(self, peer: int, works: list[Any], note: Callable[[Stamp], None]) -> list[Any]:
        accelerator = get_accelerator()
        with accelerator.stream(self._transfers.stream_for("arrivals", peer)):
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
