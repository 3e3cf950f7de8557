"""Sends and receives that run beside computation.

Each direction between two ranks has a process group of its own, on which messages are told apart by their order
alone: the one that the lists of both ranks agree on (``lowering.py``). So two directions never wait for each
other, and nothing here depends on tags, which NCCL has not.

What a receive needs to know before it can be posted is the shapes. The first activation over a cut in each batch
is preceded by a header, on the CPU and beside the data; with ``told_each_time`` every activation is. Gradients
have the shapes of the output that they belong to. A receive whose header was not read yet waits in line with all
behind it, and is posted when the first of them is needed.

    told once           header  F0.0        F0.1    F0.2     posted ahead from the second micro-batch on
    told each time      header  F0.0 header F0.1 header ...  posted when needed

A sent tensor is kept until it has left. gloo tells that only to who waits for it: a thread does.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.lowering import Message
from deepspeed_partition.engine.stage_graph import Boundary, tensors_of

Header = tuple[torch.Tensor, Any]
"""The numbers that will tell shapes, and what to wait for first."""
PATIENCE_SECONDS = 2.0
"""With sends that nobody receives, when the process ends."""
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
        """As numbers: tuple or not, how many tensors, and of each the type, the dimensions and the shape.

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


Expected = Shapes | Header | None
"""The shapes of a message; or what will tell them; or nothing: they are those of its channel in this batch."""


class _Departures:
    """Sent tensors, until they have left."""

    def __init__(self) -> None:
        self._flaw: Exception | None = None
        self._on_device: deque[tuple[Any, torch.Tensor]] = deque()
        self._queue: queue.SimpleQueue[tuple[Any, torch.Tensor] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait_for_all, name="madpipe-departures", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            self._queue.put((work, tensor))
            return
        self._on_device.append((work, tensor))
        while self._on_device and self._on_device[0][0].is_completed():
            self._on_device.popleft()

    def finish(self) -> None:
        """Return when all have left (on a GPU: let its stream wait for them).

        Raises:
            Exception: what a send failed with.
        """
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        while self._on_device:
            self._on_device.popleft()[0].wait()
        if self._flaw is not None:
            raise self._flaw

    def close(self) -> None:
        atexit.unregister(self._at_exit)
        self._queue.put(None)

    def _at_exit(self) -> None:
        """A thread that wakes up from a send while Python ends aborts the process: after an error, let it fail."""
        self._queue.put(None)
        self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive() and dist.is_initialized():
            dist.destroy_process_group()
            self._thread.join(PATIENCE_SECONDS)

    def _wait_for_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._flaw is None:
                try:
                    item[0].wait()
                except Exception as flaw:  # raised again by finish()
                    self._flaw = flaw
            del item  # the last reference to the tensor


class Transfers:
    """This rank's part of all messages of its pipeline.

    Made by all ranks of the job at once.

    Args:
        pipelines: the global ranks of every pipeline of the job, in the order of its devices.
        device_of_stage: the plan's map.
        device: of the tensors.
    """

    def __init__(
        self, pipelines: Sequence[Sequence[int]], device_of_stage: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        self._sent_to: dict[int, dist.ProcessGroup] = {}
        self._received_from: dict[int, dist.ProcessGroup] = {}
        pairs = {pair for pair in itertools.pairwise(device_of_stage) if pair[0] != pair[1]}
        directions = sorted(pairs | {(after, before) for before, after in pairs})
        me = dist.get_rank()
        for ranks in pipelines:
            on_cpu = dist.new_group(list(ranks), backend="gloo")
            if me in ranks:
                self._ranks, self._on_cpu = list(ranks), on_cpu
                self._groups.append(on_cpu)
            for source, destination in directions:
                group = dist.new_group([ranks[source], ranks[destination]])
                # NCCL connects when a group first sends, and both ranks wait there: now, when all go through
                # the groups in one order, and not in the middle of a step.
                token = torch.zeros(1, device=device)
                if me in (ranks[source], ranks[destination]):
                    self._groups.append(group)
                if me == ranks[source]:
                    self._sent_to[destination] = group
                    dist.send(token, ranks[destination], group=group)
                elif me == ranks[destination]:
                    self._received_from[source] = group
                    dist.recv(token, ranks[source], group=group)
        self._departures = _Departures()
        self._told_each_time = False
        self._shapes_sent: dict[str, Shapes] = {}
        self._shapes_received: dict[str, Shapes] = {}
        self._in_line: dict[int, deque[tuple[Message, Expected]]] = defaultdict(deque)
        """By device: receives that are not posted yet."""
        self._headers_posted: set[str] = set()
        self._posted: dict[Message, tuple[Boundary, list[Any]]] = {}

    def agree(self, holds: bool) -> bool:
        """Whether it holds on every rank of the pipeline."""
        vote = torch.tensor(int(holds))  # on the CPU: a GPU need not be waited for
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._on_cpu)
        return bool(vote)

    def start(self, *, told_each_time: bool) -> None:
        """Begin a batch."""
        assert not self._posted and not any(self._in_line.values())
        self._told_each_time = told_each_time
        self._shapes_sent.clear()
        self._shapes_received.clear()
        self._headers_posted.clear()

    def send(self, message: Message, peer: int, boundary: Boundary) -> None:
        """Begin to send. The tensors must not change any more.

        Raises:
            RuntimeError: an activation has other shapes than the first one of its batch, and shapes are told once.
        """
        if message.direction == "F":
            self._tell(message, peer, Shapes.of(boundary))
        for tensor in tensors_of(boundary):
            if tensor.numel():
                contiguous = tensor.contiguous()
                self._departures.add(self._start_sending(contiguous, peer), contiguous)

    def _start_sending(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.isend(tensor, self._ranks[peer], group=self._sent_to[peer])

    def _start_receiving(self, tensor: torch.Tensor, peer: int) -> Any:
        return dist.irecv(tensor, self._ranks[peer], group=self._received_from[peer])

    def _tell(self, message: Message, peer: int, shapes: Shapes) -> None:
        known = self._shapes_sent.get(message.channel)
        if known is not None and not self._told_each_time:
            if known != shapes:
                raise RuntimeError(
                    f"micro-batch {message.micro_batch} crosses cut {message.cut} with the shapes "
                    f"{[tuple(shape) for shape, _ in shapes.tensors]} and the first one of its batch did with "
                    f"{[tuple(shape) for shape, _ in known.tensors]}: build the module with dynamic_shape=True"
                )
            return
        self._shapes_sent[message.channel] = shapes
        header = shapes.header()
        work = dist.isend(header, self._ranks[peer], group=self._on_cpu, tag=message.cut)
        self._departures.add(work, header)

    def post(self, message: Message, peer: int, shapes: Shapes | None = None) -> None:
        """Make room for a message, behind those that were posted before it.

        Args:
            shapes: of a gradient.
        """
        expected: Expected = shapes
        if message.direction == "F" and (self._told_each_time or message.channel not in self._headers_posted):
            self._headers_posted.add(message.channel)
            header = torch.empty(HEADER_SIZE, dtype=torch.int64)
            work = dist.irecv(header, self._ranks[peer], group=self._on_cpu, tag=message.cut)
            expected = header, work
        self._in_line[peer].append((message, expected))
        self._advance(peer)

    def _advance(self, peer: int, until: Message | None = None) -> None:
        """Post what stands in line: up to ``until``, waiting for headers, then as far as shapes are known."""
        line = self._in_line[peer]
        waits = until is not None and until not in self._posted
        while line:
            message, expected = line[0]
            if isinstance(expected, tuple):
                if not waits:
                    return
                header, work = expected
                work.wait()
                expected = self._shapes_received[message.channel] = Shapes.from_header(header)
            shapes = expected or self._shapes_received.get(message.channel)
            if shapes is None:
                return
            line.popleft()
            boundary = shapes.empty(self._device)
            works = [self._start_receiving(tensor, peer) for tensor in tensors_of(boundary) if tensor.numel()]
            self._posted[message] = boundary, works
            waits = waits and message != until

    def take(self, message: Message, peer: int) -> Boundary:
        """Wait for a message that was posted."""
        self._advance(peer, until=message)
        boundary, works = self._posted.pop(message)
        for work in works:
            work.wait()
        return boundary

    def finish(self) -> None:
        """End a batch: everything has been received, and everything sent has left."""
        self._departures.finish()

    def close(self) -> None:
        """End what runs beside the engine, and the connections. On all ranks of the job, in the same order."""
        self._departures.close()
        for group in self._groups:
            with suppress(ValueError):  # it has ended with all groups, as at the end of a program
                dist.destroy_process_group(group)
        self._groups.clear()
