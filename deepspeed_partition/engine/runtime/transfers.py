"""Sends and receives that run beside computation.

Each direction between two ranks has a process group of its own, on which messages are told apart by their order
alone: the one that the lists of both ranks agree on (``lowering.py``). So two directions never wait for each
other, and nothing here depends on tags, which NCCL has not.

What a receive needs to know before it can be posted is the shapes. The first activation over a cut in each batch
is preceded by a header, on the CPU and beside the data; with ``told_each_time`` every activation is. Gradients
have the shapes of the output that they belong to. A receive whose header was not read yet waits in line with all
behind it: a thread for each device that tensors come from reads the headers, and posts the receives at once.

    told once           header  F0.0        F0.1    F0.2
    told each time      header  F0.0 header F0.1 header ...

A sent tensor is kept until it has left. gloo tells that only to who waits for it: a thread for each device that
tensors go to does. Where gloo serves a GPU, tensors go through the host (``host_staging.py``).

On NCCL a transfer is a kernel at both ends, which runs until the other end has begun. So neither is given to its
device before both hosts have come to it: each message has a header, and a note comes back when there is room.

    sender      S ---- header ---->  R      receiver
                  <---- room -----
                isend              irecv    each from a thread, behind its own place among the computations

What a device was given then waits only for what devices were given already, and whatever waits for a device, on
any number of ranks (``torch.cuda.synchronize()``, an allocator that has too little memory), comes to its end. A
host waits for another one at ``W`` and ``D`` alone, as ``dry_run.py`` has it. The threads use streams of their
own: the computing stream has been given more since, which a transfer must not wait for.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.runtime import accelerator, host_staging
from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, tensors_of
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Message

Header = tuple[torch.Tensor, Any]
"""The numbers that will tell shapes, and what to wait for first."""
HEADER_SIZE = 256
"""Numbers in a header: 40 tensors of four dimensions fit."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a receiver must know about a boundary."""

    is_tuple: bool
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @classmethod
    def of(cls, boundary: Boundary) -> Shapes:
        return cls(isinstance(boundary, tuple), tuple((each.shape, each.dtype) for each in tensors_of(boundary)))

    def header(self) -> torch.Tensor:
        """Encode as numbers: tuple or not, how many tensors, and of each the type, the dimensions, the shape.

        Raises:
            RuntimeError: too many tensors or dimensions.
        """
        numbers = [int(self.is_tuple), len(self.tensors)]
        for shape, dtype in self.tensors:
            numbers += [PipelineEngine.DTYPE_TO_ID[dtype], len(shape), *shape]
        if len(numbers) > HEADER_SIZE:
            raise RuntimeError(
                f"{len(self.tensors)} tensors cross one cut, and their shapes take {len(numbers)} numbers: at "
                f"most {HEADER_SIZE} fit, so cut the model where fewer tensors cross"
            )
        return torch.tensor(numbers + [0] * (HEADER_SIZE - len(numbers)), dtype=torch.int64)

    @classmethod
    def from_header(cls, header: torch.Tensor) -> Shapes:
        numbers = iter(header.tolist())
        is_tuple, count = bool(next(numbers)), next(numbers)
        tensors = []
        for _ in range(count):
            dtype, num_dimensions = PipelineEngine.ID_TO_DTYPE[next(numbers)], next(numbers)
            tensors.append((torch.Size([next(numbers) for _ in range(num_dimensions)]), dtype))
        return cls(is_tuple, tuple(tensors))

    def empty(self, device: torch.device) -> Boundary:
        tensors = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.tensors)
        return tensors if self.is_tuple else tensors[0]


class ShapesDifferError(RuntimeError):
    """A stage's output has other shapes than those that its receiver was told of."""

    def __init__(self, message: str, expected: Shapes) -> None:
        super().__init__(message)
        self.expected = expected

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.expected)


Expected = Shapes | Header | None
"""The shapes of a message; or what will tell them; or nothing: they are those of its channel in this batch."""
Posted = tuple[Boundary, list[Any]]
"""The tensors that a message will be in, and what to wait for."""
_Departing = tuple[Message, Any, torch.Tensor]
"""A tensor of a message, and what to wait for."""
ROOM_TAG = 2**21
"""The tag of the notes that there is room for a message, beside the headers, whose tags are cuts."""


class _Departures:
    """Tensors sent to one device, until they have left."""

    def __init__(self, rank: int, when_failed: Callable[[Exception], object]) -> None:
        self._rank = rank
        self._helper = Helper(f"departures-to-{rank}", when_failed)
        self._marks: dict[Message, threading.Event] = {}
        self._lock = threading.Lock()
        self._on_device: deque[_Departing] = deque()

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        """Add a tensor that is being sent from the host's memory."""
        self._helper.do(functools.partial(_wait_holding, work, tensor, self._rank))

    def start(self, message: Message, room: Header, begin: Callable[[], list[tuple[Any, torch.Tensor]]]) -> None:
        """Send the tensors of a message from the device's memory, when its receiver says that there is room.

        Args:
            begin: sends them, and gives what to wait for and what to keep meanwhile.
        """
        self._helper.do(functools.partial(self._start, message, room, begin))

    def _start(self, message: Message, room: Header, begin: Callable[[], list[tuple[Any, torch.Tensor]]]) -> None:
        _wait(room[1], self._rank)
        departing = [(message, *each) for each in begin()]
        with self._lock:
            self._on_device.extend(departing)
            while self._on_device and self._on_device[0][1].is_completed():
                self._on_device.popleft()

    def mark(self, message: Message) -> None:
        """Note that all tensors of a message have been added."""
        self._marks[message] = self._helper.mark()

    def wait_for(self, message: Message) -> None:
        """Return when a message and those before it have left (on NCCL: let the current stream wait for them).

        Raises:
            Exception: what a send failed with.
        """
        self._helper.reach(self._marks.pop(message))
        with self._lock:
            while any(each == message for each, *_ in self._on_device):
                self._let_leave()

    def finish(self) -> None:
        """Return when all messages have left (on NCCL: let the current stream wait for them)."""
        self._marks.clear()
        self._helper.finish()
        with self._lock:
            while self._on_device:
                self._let_leave()

    def _let_leave(self) -> None:
        self._on_device[0][1].wait()
        self._on_device.popleft()  # not before: its memory may be used for something else then

    def close(self) -> None:
        self._helper.close()


def _wait_holding(work: Any, _: torch.Tensor, rank: int) -> None:
    _wait(work, rank)


def _wait(work: Any, rank: int) -> None:
    """Wait for a message to or from a rank.

    Raises:
        RuntimeError: that rank does not answer.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} has ended, or the link to it is down ({error})") from error


class _Line:
    """The receives from one device, posted in the order in which they come.

    Args:
        rank: that device's, globally.
        start: posts a receive of these shapes.
        later: called for each receive that waits in line; gives what the thread enters when it calls ``start``.
    """

    def __init__(
        self,
        rank: int,
        start: Callable[[Message, Shapes], Posted],
        later: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._rank, self._start, self._later = rank, start, later
        self._helper = Helper(f"receives-from-{rank}")
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._num_waiting = 0
        self._shapes: dict[str, Shapes] = {}
        self._posted: dict[Message, Posted] = {}

    def begin(self) -> None:
        """Begin a batch, whose shapes are not known yet."""
        assert not self._posted and not self._num_waiting
        self._shapes.clear()

    def post(self, message: Message, expected: Expected) -> None:
        """Post a receive at once, or when the headers of this message and of those before it have been read."""
        with self._changed:
            shapes = self._known(message, expected)
            if self._num_waiting or shapes is None:
                self._num_waiting += 1
                self._helper.do(functools.partial(self._post_later, message, expected, self._later()))
            else:
                self._posted[message] = self._start(message, shapes)

    def take(self, message: Message) -> Posted:
        """Return what was posted for a message, as soon as it is.

        Raises:
            Exception: what a header, or the posting after it, failed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: message in self._posted or self._error is not None)
            if message not in self._posted:
                assert self._error is not None
                raise self._error
            return self._posted.pop(message)

    def fail(self, error: Exception) -> None:
        """Let :meth:`take` raise this for what is not posted: what makes the sender send may never have left."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def close(self) -> None:
        self._helper.close()

    def _known(self, message: Message, expected: Expected) -> Shapes | None:
        if isinstance(expected, tuple):
            return None
        return expected or self._shapes.get(message.channel)

    def _post_later(self, message: Message, expected: Expected, place: AbstractContextManager[object]) -> None:
        try:
            if isinstance(expected, tuple):
                header, work = expected
                _wait(work, self._rank)
                expected = Shapes.from_header(header)
            with place, self._changed:
                if message.direction == "F" and expected is not None:
                    self._shapes[message.channel] = expected
                shapes = self._known(message, expected)
                assert shapes is not None, "the first message of a channel has a header"
                self._posted[message] = self._start(message, shapes)
                self._num_waiting -= 1
                self._changed.notify()
        except Exception as error:  # raised again by take()
            with self._changed:
                self._error = error
                self._changed.notify()
            raise


@contextmanager
def _from_place(mark: Any, stream: Any) -> Iterator[None]:
    """Wait until the device has come to a mark, and let ``stream`` be the current one.

    The host waits, not the stream: what was freed before the mark can then be used again.
    """
    mark.synchronize()
    with get_accelerator().stream(stream):
        yield


def refuse_blocking_waits(device: torch.device) -> None:
    """Refuse a setting of NCCL with which transfers cannot run. Collective over the job.

    Raises:
        ValueError: on some rank NCCL lets the host wait for each transfer; on every rank.
    """
    if device.type == "cpu" or host_staging.goes_through_host(device):
        return
    reason = next(
        (reason for reason in gather_objects(accelerator.why_not_blocking()) if reason is not None), None
    )
    if reason is not None:
        raise ValueError(reason)


class Transfers:
    """This rank's part of all messages of its pipeline.

    Made by all ranks of the job at once.

    Args:
        pipelines: the global ranks of every pipeline of the job, in the order of its devices.
        device_of_stage: the plan's map.
        device: of the tensors.
    """

    watch: Callable[[Message, int, Boundary, list[Any]], list[Any]] | None = None
    """Function that is told of every receive that is posted: the message, its sender, where it will be, what to
    wait for. It returns what to wait for instead."""
    ranks: list[int]
    """The global ranks of this pipeline, by device."""
    cpu_group: dist.ProcessGroup
    """The process group of these ranks on the CPU."""
    through_host: bool
    """Whether messages begin and end in the host's memory, as on a CPU: somebody must wait for them."""

    def __init__(
        self, pipelines: Sequence[Sequence[int]], device_of_stage: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        self.through_host = host_staging.goes_through_host(device)
        self._on_streams = device.type != "cpu" and not self.through_host
        """Whether messages are kernels on streams of the device."""
        refuse_blocking_waits(device)
        self._computes_on: Any = None
        self._find_computing_stream()
        self._streams: dict[tuple[str, int], Any] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._sent_to: dict[int, dist.ProcessGroup] = {}
        self._received_from: dict[int, dist.ProcessGroup] = {}
        pairs = {pair for pair in itertools.pairwise(device_of_stage) if pair[0] != pair[1]}
        directions = sorted(pairs | {(after, before) for before, after in pairs})
        me = dist.get_rank()
        for ranks in pipelines:
            with accelerator.no_splitting():
                on_host = dist.new_group(list(ranks), backend="gloo")
            if me in ranks:
                self.ranks, self.cpu_group = list(ranks), on_host
                self._groups.append(on_host)
            for source, destination in directions:
                group = dist.new_group([ranks[source], ranks[destination]], pg_options=accelerator.group_options())
                # NCCL connects when a group first sends, and both ranks wait there: now, when all go through
                # the groups in one order, and not in the middle of a step.
                token = torch.zeros(1, device="cpu" if self.through_host else device)
                if me in (ranks[source], ranks[destination]):
                    self._groups.append(group)
                if me == ranks[source]:
                    self._sent_to[destination] = group
                    dist.send(token, ranks[destination], group=group)
                elif me == ranks[destination]:
                    self._received_from[source] = group
                    dist.recv(token, ranks[source], group=group)
        self._departures = {peer: _Departures(self.ranks[peer], self._fail) for peer in self._sent_to}
        self._headers = Helper("headers", self._fail)
        self._lines = {
            peer: _Line(
                self.ranks[peer],
                functools.partial(self._start_message, peer),
                functools.partial(self._place_in_line, peer),
            )
            for peer in self._received_from
        }
        self._told_each_time = False
        self._shapes_sent: dict[str, Shapes] = {}
        self._headers_posted: set[str] = set()

    @property
    def tells_gradients(self) -> bool:
        """Whether the receiver of a gradient is told of its shape, so that it may be empty."""
        return self._on_streams

    def _find_computing_stream(self) -> None:
        self._computes_on = None if self._device.type == "cpu" else get_accelerator().current_stream()

    def _stream(self) -> AbstractContextManager[object]:
        """Enter the stream on which the engine computes, in any thread."""
        return nullcontext() if self._computes_on is None else get_accelerator().stream(self._computes_on)

    def stream_for(self, purpose: str, peer: int) -> Any:
        """Return the stream for a purpose and a peer: a device has few streams, and gives them out in turns."""
        if (purpose, peer) not in self._streams:
            self._streams[purpose, peer] = get_accelerator().Stream()
        return self._streams[purpose, peer]

    def _place_in_line(self, peer: int) -> AbstractContextManager[object]:
        """Return what a thread enters to post a receive later that has its place in the stream here and now."""
        if not self._on_streams:
            return self._stream()
        return _from_place(accelerator.mark(), self.stream_for("receives", peer))

    def _fail(self, error: Exception) -> None:
        """Let receives raise what a thread failed with when it sent: nobody may wait for an answer to that."""
        for line in self._lines.values():
            line.fail(error)

    def agree(self, holds: bool) -> bool:
        """Return whether ``holds`` is true on every rank of the pipeline. Collective over it."""
        vote = torch.tensor(int(holds))  # on the CPU: a GPU need not be waited for
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self.cpu_group)
        return bool(vote)

    def start(self, *, told_each_time: bool) -> None:
        """Begin a batch."""
        self._find_computing_stream()
        self._told_each_time = told_each_time
        self._shapes_sent.clear()
        self._headers_posted.clear()
        for line in self._lines.values():
            line.begin()

    def send(self, message: Message, peer: int, boundary: Boundary) -> None:
        """Begin to send. The tensors must not change any more.

        Raises:
            ShapesDifferError: an activation has other shapes than the first one of its batch, and shapes are told
                once.
        """
        self._tell(message, peer, Shapes.of(boundary))
        tensors = [tensor.contiguous() for tensor in tensors_of(boundary) if tensor.numel()]
        departures = self._departures[peer]
        if self._on_streams:
            departures.start(message, self._ask_for_room(peer), self._when_there_is_room(tensors, peer))
        for tensor in () if self._on_streams else tensors:
            if self.through_host:
                leaving = host_staging.Departing(tensor, functools.partial(self._start_sending, peer=peer))
                departures.add(leaving, leaving.host)
            else:
                departures.add(self._start_sending(tensor, peer), tensor)
        departures.mark(message)

    def _ask_for_room(self, peer: int) -> Header:
        note = torch.empty(1, dtype=torch.int64)
        return note, dist.irecv(note, self.ranks[peer], group=self.cpu_group, tag=ROOM_TAG)

    def _tell_of_room(self, peer: int) -> None:
        note = torch.zeros(1, dtype=torch.int64)
        work = dist.isend(note, self.ranks[peer], group=self.cpu_group, tag=ROOM_TAG)
        self._headers.do(functools.partial(_wait_holding, work, note, self.ranks[peer]))

    def _when_there_is_room(
        self, tensors: list[torch.Tensor], peer: int
    ) -> Callable[[], list[tuple[Any, torch.Tensor]]]:
        """Return what a thread calls to send tensors; their place in the stream is here and now."""
        mark, stream = accelerator.mark(), self.stream_for("sends", peer)

        def begin() -> list[tuple[Any, torch.Tensor]]:
            with get_accelerator().stream(stream):
                stream.wait_event(mark)
                return [(self._start_sending(tensor, peer), tensor) for tensor in tensors]

        return begin

    def _start_sending(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.isend(tensor, self.ranks[peer], group=self._sent_to[peer])

    def _start_receiving(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.irecv(tensor, self.ranks[peer], group=self._received_from[peer])

    def _tell(self, message: Message, peer: int, shapes: Shapes) -> None:
        """Send a header, where one is due."""
        if message.direction == "B":  # whose shapes its receiver knows
            if self._on_streams:
                self._send_header(message, peer, shapes)
            return
        known = self._shapes_sent.get(message.channel)
        if known not in (None, shapes) and not self._told_each_time:
            assert known is not None
            raise ShapesDifferError(
                f"micro-batch {message.micro_batch} crosses cut {message.boundary} with the shapes "
                f"{[tuple(shape) for shape, _ in shapes.tensors]} and the first one of its batch did with "
                f"{[tuple(shape) for shape, _ in known.tensors]}: build the module with dynamic_shape=True",
                known,
            )
        if known is None or self._told_each_time or self._on_streams:
            self._shapes_sent[message.channel] = shapes
            self._send_header(message, peer, shapes)

    def _send_header(self, message: Message, peer: int, shapes: Shapes) -> None:
        header = shapes.header()
        work = dist.isend(header, self.ranks[peer], group=self.cpu_group, tag=message.boundary)
        self._headers.do(functools.partial(_wait_holding, work, header, self.ranks[peer]))

    def wait_until_left(self, message: Message, peer: int) -> None:
        """Return when what was sent is kept no more (on NCCL: as soon as the current stream gets there)."""
        self._departures[peer].wait_for(message)

    def post(self, message: Message, peer: int, shapes: Shapes | None = None) -> None:
        """Make room for a message, behind those that were posted before it.

        Args:
            shapes: of a gradient.
        """
        expected: Expected = shapes
        told = message.direction == "F" and (self._told_each_time or message.channel not in self._headers_posted)
        if told or self._on_streams:
            self._headers_posted.add(message.channel)
            header = torch.empty(HEADER_SIZE, dtype=torch.int64)
            work = dist.irecv(header, self.ranks[peer], group=self.cpu_group, tag=message.boundary)
            expected = header, work
        self._lines[peer].post(message, expected)
        if self._on_streams:
            self._tell_of_room(peer)

    def _start_message(self, peer: int, message: Message, shapes: Shapes) -> Posted:
        boundary = shapes.empty(self._device)
        start = functools.partial(self._start_receiving, peer=peer)
        if self.through_host:
            start = functools.partial(host_staging.Arriving, receive=start, stream=self._stream)
        elif self._on_streams:
            for tensor in tensors_of(boundary):  # whose memory belongs to the stream of the thread
                tensor.record_stream(self._computes_on)
        works = [start(each) for each in tensors_of(boundary) if each.numel()]
        return boundary, works if self.watch is None else self.watch(message, peer, boundary, works)

    def take(self, message: Message, peer: int) -> Boundary:
        """Wait for a message that was posted."""
        boundary, works = self._lines[peer].take(message)
        for work in works:
            _wait(work, self.ranks[peer])
        return boundary

    def finish(self) -> None:
        """End a batch: everything has been received, and everything sent has left."""
        for departures in self._departures.values():
            departures.finish()
        self._headers.finish()

    def close(self) -> None:
        """End what runs beside the engine, and the connections. On all ranks of the job, in the same order."""
        self._headers.close()
        for departures in self._departures.values():
            departures.close()
        for line in self._lines.values():
            line.close()
        for group in self._groups:
            with suppress(ValueError):  # it has ended with all groups, as at the end of a program
                dist.destroy_process_group(group)
        self._groups.clear()
