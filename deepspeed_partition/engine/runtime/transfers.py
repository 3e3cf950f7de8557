"""Sends and receives that run beside computation.

Each direction between two devices has a process group of its own, on which messages are told apart by their order
alone: the one that the lists of both ranks agree on (``lowering.py``). So two directions never wait for each
other, and nothing here depends on tags, which NCCL has not. On a CPU there are two groups of all ranks: one for
messages to later devices, one for those to earlier ones. Both ways between two ranks over one group would be one
connection of gloo: while one thread begins to send there, gloo's own thread, which was woken by what comes in,
tries again and again to lock it. Where all processors are busy it does so for a whole time slice, 4 ms.

What a receive needs to know before it can be posted is the shapes. Gradients have those of the output that they
belong to; activations those that their receiver expects (``boundary_shapes.py``), or a header tells them, on the
CPU and beside the data. A receive whose header was not read yet waits in line with all behind it
(``receive_line.py``). A sent tensor is kept until it has left (``departures.py``). Where gloo serves a GPU,
tensors pass through the host's memory (``host_staging.py``).

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
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.runtime import accelerator, host_staging
from deepspeed_partition.engine.runtime.agreements import job_timeout
from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, each_once, tensors_of
from deepspeed_partition.engine.runtime.boundary_shapes import (
    HEADER_SIZE,
    MARK_BYTES,
    Bases,
    Shapes,
    ShapesDifferError,
    ShapesOfBoundary,
    bases_of,
)
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.engine.runtime.departures import (
    Header,
    HostDepartures,
    ThreadedDepartures,
    wait,
    wait_holding,
)
from deepspeed_partition.engine.runtime.receive_line import Expected, Line, Posted
from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Message, Program

ROOM_TAG = 2**21
"""The tag of the notes that there is room for a message, beside the headers, whose tags are cuts."""
ASIDE_TAG = 2**22
"""The first tag of activations that are sent aside, a tag for each."""
MOST_ASIDE = 2**16
"""Tags of a boundary."""
DATA_TAG = 2**19
"""The tag of tensors on a CPU, where they share a group with headers."""


def _tag_aside(message: Message) -> int:
    return ASIDE_TAG + message.boundary * MOST_ASIDE + message.micro_batch % MOST_ASIDE


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
        self._num_boundaries = len(device_of_stage) - 1
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
        self._rank_on_host: dict[int, int] = {}
        """The ranks of devices in the group on a CPU."""
        self._on_cpu = device.type == "cpu" and not self._on_streams
        pairs = {pair for pair in itertools.pairwise(device_of_stage) if pair[0] != pair[1]}
        directions = sorted(pairs | {(after, before) for before, after in pairs})
        me, waits = dist.get_rank(), job_timeout()
        for ranks in pipelines:
            with accelerator.no_splitting():
                on_host = dist.new_group(list(ranks), backend="gloo", timeout=waits)
            if me in ranks:
                self.ranks, self.cpu_group = list(ranks), on_host
                self._rank_on_host = {
                    device: dist.get_group_rank(on_host, rank) for device, rank in enumerate(ranks)
                }
                self._groups.append(on_host)
            # Each rank of the job makes the groups of all pipelines.
            to_earlier = on_host
            if self._on_cpu:
                to_earlier = dist.new_group(list(ranks), backend="gloo", timeout=waits)
            if me in ranks and self._on_cpu:
                self._groups.append(to_earlier)
                mine = self.ranks.index(me)
                ways = {(one, other): on_host if one < other else to_earlier for one, other in directions}
                self._sent_to = {other: way for (one, other), way in ways.items() if one == mine}
                self._received_from = {one: way for (one, other), way in ways.items() if other == mine}
            for source, destination in () if self._on_cpu else directions:
                options, both = accelerator.group_options(waits), [ranks[source], ranks[destination]]
                group = dist.new_group(both, timeout=waits, pg_options=options)
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
        self._departures: dict[int, HostDepartures] = {}
        self._threaded: dict[int, ThreadedDepartures] = {}
        for peer in self._sent_to:
            if self._on_cpu:
                self._departures[peer] = HostDepartures(self.ranks[peer])
            else:
                self._threaded[peer] = ThreadedDepartures(self.ranks[peer], self._fail)
        self._headers = Helper("headers", self._fail)
        self._lines = {
            peer: Line(
                self.ranks[peer],
                functools.partial(self._start_message, peer),
                functools.partial(self._place_in_line, peer),
            )
            for peer in self._received_from
        }
        self._mark = from_rank_0(lambda: secrets.token_bytes(MARK_BYTES))
        self._shapes_of: dict[bool, defaultdict[int, ShapesOfBoundary]] = {
            trains: defaultdict(ShapesOfBoundary) for trains in (True, False)
        }
        """Shapes of activations by boundary, of training and of evaluation."""
        self._shapes = self._shapes_of[True]
        self._shapes_may_differ = True
        self._bases: Bases = {}
        self._bases_of_programs: list[tuple[Program, Bases]] = []

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

    def start(self, program: Program, *, trains: bool, shapes_may_differ: bool) -> None:
        """Begin a batch.

        Args:
            program: the lists of all devices.
            trains: whether it is a step of training; else of evaluation.
            shapes_may_differ: from one micro-batch of the batch to another.
        """
        self._find_computing_stream()
        self._shapes_may_differ = shapes_may_differ
        self._bases = self._bases_for(program)
        self._shapes = self._shapes_of[trains]
        for shapes in self._shapes.values():
            shapes.begin()
        for line in self._lines.values():
            line.begin()

    def start_endless(self, bases: Bases, *, shapes_may_differ: bool) -> None:
        """Begin batches of training that follow one another without end, until :meth:`finish`.

        Args:
            bases: of all activations.
            shapes_may_differ: from one micro-batch to another.
        """
        self._find_computing_stream()
        self._shapes_may_differ = shapes_may_differ
        self._bases, self._shapes = bases, self._shapes_of[True]
        for boundary in range(self._num_boundaries):
            self._shapes[boundary].begin_endless()
        for line in self._lines.values():
            line.begin()

    def _bases_for(self, program: Program) -> Bases:
        for known, bases in self._bases_of_programs:
            if known is program:
                return bases
        self._bases_of_programs[3:] = []
        self._bases_of_programs.insert(0, (program, bases_of(program)))
        return self._bases_of_programs[0][1]

    def send(self, message: Message, peer: int, boundary: Boundary) -> None:
        """Begin to send. The tensors must not change any more.

        Raises:
            ShapesDifferError: an activation has other shapes than the first one of its batch, and they may not
                differ.
        """
        is_known = message.direction == "B" and not self._on_streams  # by the activation
        shapes = None if is_known else Shapes.of(boundary)
        if shapes is not None and message.direction == "F" and not self._shapes_may_differ:
            self._check(message, shapes)
        if self._on_cpu:
            self._send_from_cpu(message, peer, boundary, shapes)
            return
        if shapes is not None:
            self._shapes[message.boundary].note(message.micro_batch, None, shapes)
            work, header = self._send_header(message, peer, shapes)
            self._headers.do(functools.partial(wait_holding, work, header, self.ranks[peer]))
        sent = each_once(boundary) if message.direction == "F" else tensors_of(boundary)
        tensors = [tensor.contiguous() for tensor in sent if tensor.numel()]
        departures = self._threaded[peer]
        if self._on_streams:
            departures.start(message, self._ask_for_room(peer), self._when_there_is_room(tensors, peer))
        for tensor in () if self._on_streams else tensors:
            leaving = host_staging.Departing(tensor, functools.partial(self._start_sending, peer=peer))
            departures.add(leaving, leaving.host)
        departures.mark(message)

    def _send_from_cpu(self, message: Message, peer: int, boundary: Boundary, shapes: Shapes | None) -> None:
        leaving: list[tuple[Any, torch.Tensor]] = []
        if shapes is not None:
            basis, known = self._bases[message], self._shapes[message.boundary]
            expected = known.expected(basis)
            known.note(message.micro_batch, basis, shapes)
            if expected is None:
                leaving.append(self._send_header(message, peer, shapes))
            elif expected is not shapes and expected != shapes:
                self._send_aside(message, peer, boundary, shapes)
                boundary = expected.marked(self._mark)
            boundary = tuple(each_once(boundary))
        for tensor in boundary if isinstance(boundary, tuple) else (boundary,):
            if tensor.numel():
                whole = tensor.contiguous()
                leaving.append((self._start_sending(whole, peer), whole))
        self._departures[peer].add(message, leaving)

    def _send_aside(self, message: Message, peer: int, boundary: Boundary, shapes: Shapes) -> None:
        tensors = [shapes.header(), *(each.contiguous() for each in each_once(boundary) if each.numel())]
        options: dict[str, Any] = {"group": self._sent_to[peer], "tag": _tag_aside(message)}
        self._departures[peer].add_aside(
            [(dist.isend(tensor, self.ranks[peer], **options), tensor) for tensor in tensors]
        )

    def _receive_aside(self, message: Message, peer: int) -> tuple[Boundary, Shapes]:
        options: dict[str, Any] = {"group": self._received_from[peer], "tag": _tag_aside(message)}
        header = torch.empty(HEADER_SIZE, dtype=torch.int64)
        wait(dist.irecv(header, self.ranks[peer], **options), self.ranks[peer])
        shapes = Shapes.from_header(header)
        boundary = shapes.empty(self._device)
        for tensor in each_once(boundary):
            if tensor.numel():
                wait(dist.irecv(tensor, self.ranks[peer], **options), self.ranks[peer])
        return boundary, shapes

    def _ask_for_room(self, peer: int) -> Header:
        note = torch.empty(1, dtype=torch.int64)
        return note, dist.irecv(note, self.ranks[peer], group=self.cpu_group, tag=ROOM_TAG)

    def _tell_of_room(self, peer: int) -> None:
        note = torch.zeros(1, dtype=torch.int64)
        work = dist.isend(note, self.ranks[peer], group=self.cpu_group, tag=ROOM_TAG)
        self._headers.do(functools.partial(wait_holding, work, note, self.ranks[peer]))

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

    # On a CPU past ``dist.isend`` and ``dist.irecv``, which look the group and the rank up each time.

    def _start_sending(self, tensor: torch.Tensor, peer: int) -> Any:
        if self._on_cpu:
            return self._sent_to[peer].send([tensor], self._rank_on_host[peer], DATA_TAG)
        return dist.isend(tensor, self.ranks[peer], group=self._sent_to[peer])

    def _start_receiving(self, tensor: torch.Tensor, peer: int) -> Any:
        if self._on_cpu:
            return self._received_from[peer].recv([tensor], self._rank_on_host[peer], DATA_TAG)
        return dist.irecv(tensor, self.ranks[peer], group=self._received_from[peer])

    def _check(self, message: Message, shapes: Shapes) -> None:
        """Refuse an activation of other shapes than the first one of its batch, where they may not differ."""
        known = self._shapes[message.boundary].first
        if known is None:
            return
        if known is not shapes and known != shapes:
            raise ShapesDifferError(
                f"micro-batch {message.micro_batch} crosses cut {message.boundary} with the shapes "
                f"{[tuple(shape) for shape, _ in shapes.tensors]} and the first one of its batch did with "
                f"{[tuple(shape) for shape, _ in known.tensors]}: build the module with dynamic_shape=True",
                known,
            )

    def _send_header(self, message: Message, peer: int, shapes: Shapes) -> tuple[Any, torch.Tensor]:
        header = shapes.header()
        group = self._sent_to[peer] if self._on_cpu else self.cpu_group
        return dist.isend(header, self.ranks[peer], group=group, tag=message.boundary), header

    def wait_until_left(self, message: Message, peer: int) -> None:
        """Return when what was sent is kept no more (on NCCL: as soon as the current stream gets there)."""
        (self._departures if self._on_cpu else self._threaded)[peer].wait_for(message)

    def post(self, message: Message, peer: int, shapes: Shapes | None = None) -> None:
        """Make room for a message, behind those that were posted before it.

        Args:
            shapes: of a gradient.
        """
        expected: Expected | None = shapes
        if message.direction == "F" and self._on_cpu:
            expected = self._shapes[message.boundary].expected(self._bases[message])
        elif message.direction == "F" or self._on_streams:
            expected = None
        if expected is None:
            header = torch.empty(HEADER_SIZE, dtype=torch.int64)
            group = self._received_from[peer] if self._on_cpu else self.cpu_group
            work = dist.irecv(header, self.ranks[peer], group=group, tag=message.boundary)
            expected = header, work
        self._lines[peer].post(message, expected)
        if self._on_streams:
            self._tell_of_room(peer)

    def _start_message(self, peer: int, message: Message, shapes: Shapes, was_told: bool) -> Posted:
        boundary = shapes.empty(self._device)
        if self._on_cpu and self.watch is None and not self.through_host:
            works = [self._start_receiving(each, peer) for each in each_once(boundary) if each.numel()]
            return Posted(boundary, works, shapes, was_told)
        start: Callable[[torch.Tensor], Any] = functools.partial(self._start_receiving, peer=peer)
        if self.through_host:
            start = functools.partial(host_staging.Arriving, receive=start, stream=self._stream)
        elif self._on_streams:
            for tensor in each_once(boundary):  # whose memory belongs to the stream of the thread
                tensor.record_stream(self._computes_on)
        works = [start(each) for each in each_once(boundary) if each.numel()]
        if self.watch is not None:
            works = self.watch(message, peer, boundary, works)
        return Posted(boundary, works, shapes, was_told)

    def take(self, message: Message, peer: int) -> Boundary:
        """Wait for a message that was posted."""
        boundary, works, shapes, was_told = self._lines[peer].take(message)
        for work in works:
            wait(work, self.ranks[peer])
        if message.direction == "F" and self._on_cpu:
            if not was_told and shapes.bears(self._mark, boundary):
                boundary, shapes = self._receive_aside(message, peer)
            self._shapes[message.boundary].note(message.micro_batch, self._bases[message], shapes)
        return boundary

    def finish(self) -> None:
        """End a batch: everything has been received, and everything sent has left."""
        for departures in (self._departures if self._on_cpu else self._threaded).values():
            departures.finish()
        if not self._on_cpu:
            self._headers.finish()

    def close(self) -> None:
        """End what runs beside the engine, and the connections. On all ranks of the job, in the same order."""
        self._headers.close()
        for departures in self._threaded.values():
            departures.close()
        for line in self._lines.values():
            line.close()
        for group in self._groups:
            with suppress(ValueError):  # it has ended with all groups, as at the end of a program
                dist.destroy_process_group(group)
        self._groups.clear()
