"""Layers and links that sleep instead of working, so that every stage has a device of its own on any machine."""

from __future__ import annotations

import fcntl
import mmap
import os
import queue
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from torch import Tensor, nn

from deepspeed_partition import Chain, Plan
from deepspeed_partition.engine.runtime.autograd_boundary import Boundary
from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.runtime.worker_thread import PATIENCE_SECONDS
from deepspeed_partition.schedule.instructions import Message

POSTED_TAG = 2**18
"""The tag of what tells that a receive is posted: its group has other messages, too."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: SleepingLayer) -> Tensor:
        begin = time.perf_counter()
        ctx.layer, ctx.shape = layer, x.shape
        output = torch.zeros(x.shape[0], layer.output_numel) + anchor
        layer.sleep("F", begin)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        begin = time.perf_counter()
        results = torch.zeros(ctx.shape), gradients[0].sum().reshape(1), None
        ctx.layer.sleep("B", begin)
        return results


class SleepingLayer(nn.Module):
    """Sleeps for its forward and backward and hands on a tensor of the given size.

    What it does besides counts as part of that time, and where its neighbour has just slept it ends as if it had
    begun at the due end of that one: a stage of many layers is late once, not as often as it has layers.
    ``num_parameters`` only weigh in cuts that count parameters.
    """

    just_slept: ClassVar[tuple[SleepingLayer | None, str, float]] = None, "", 0.0
    """The layer of this process that slept last, its forward or backward, and when it was due to end."""

    def __init__(
        self, forward_seconds: float, backward_seconds: float, output_numel: int, num_parameters: int
    ) -> None:
        super().__init__()
        self.seconds = {"F": forward_seconds, "B": backward_seconds}
        self.output_numel = output_numel
        self.anchor = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(max(0, num_parameters - 1)))
        self.before: dict[str, SleepingLayer | None] = {"F": None, "B": None}
        """The layer's neighbours on the way of a forward and of a backward."""
        self.naps: dict[str, list[tuple[float, float]]] = {"F": [], "B": []}
        """Begin and end of every forward and backward so far, by ``time.perf_counter``."""

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.anchor, self)

    def sleep(self, kind: str, begin: float) -> None:
        """Sleep for the rest of a forward or backward that began at ``begin``."""
        layer, its_kind, due = SleepingLayer.just_slept
        runs_on = layer is not None and layer is self.before[kind] and kind == its_kind
        due = (due if runs_on else begin) + self.seconds[kind]
        time.sleep(max(0.0, due - time.perf_counter()))
        SleepingLayer.just_slept = self, kind, due
        self.naps[kind].append((begin, time.perf_counter()))


def sleeping_layers(
    chain: Chain, *, time_scale: float = 1.0, output_numel: int | None = None, most_parameters: int = 1000
) -> list[SleepingLayer]:
    """A layer for each of the chain: its times, its parameters in proportion.

    Args:
        output_numel: of every boundary; left out, those of the chain in fp32.
    """
    heaviest = max(layer.num_trainable_parameters or 0 for layer in chain.layers) or 1
    layers = [
        SleepingLayer(
            layer.forward_seconds * time_scale,
            layer.backward_seconds * time_scale,
            output_numel or max(1, layer.output_bytes // 4),
            1 + round((layer.num_trainable_parameters or 0) / heaviest * most_parameters),
        )
        for layer in chain.layers
    ]
    for one, other in pairwise(layers):
        other.before["F"], one.before["B"] = one, other
    return layers


@dataclass
class Links:
    """The time that a message takes on the way, whatever its tensors are."""

    seconds_of_cut: list[float]
    """Seconds of an activation, and of its gradient, over the cut behind each stage."""
    half_duplex: bool
    """One message at a time between two ranks, as plans have it; otherwise one in each direction."""

    @classmethod
    def of(cls, plan: Plan, chain: Chain) -> Links:
        """Make the links of a plan's platform: latency + bytes / bandwidth, one message at a time."""
        cuts = plan.boundaries[1:-1]
        return cls([plan.platform.transfer_seconds(chain.boundary_bytes(cut)) for cut in cuts], half_duplex=True)


class _Reservations:
    """The instant until which each link is taken, in a file that all processes of the machine share; collective.

    Instants are of ``time.monotonic``, which is the same clock for all of them.
    """

    def __init__(self) -> None:
        size = 8 * dist.get_world_size() ** 2
        path = Path(from_rank_0(lambda: _file_of_zeros(size)))
        self._file = path.open("r+b")
        self._until = mmap.mmap(self._file.fileno(), size)
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink()

    def take(self, source: int, destination: int, ready: float, seconds: float) -> float:
        """Take the first ``seconds`` after ``ready`` in which nothing else is on the link; return their end."""
        at = 8 * (source * dist.get_world_size() + destination)
        fcntl.lockf(self._file, fcntl.LOCK_EX, 8, at)
        try:
            (until,) = struct.unpack_from("d", self._until, at)
            end = max(until, ready) + seconds
            struct.pack_into("d", self._until, at, end)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 8, at)
        return end


def _file_of_zeros(size: int) -> str:
    handle, path = tempfile.mkstemp(prefix="madpipe-links-")
    os.truncate(handle, size)
    os.close(handle)
    return path


class SleepingTransfers(Transfers):
    """Transfers that take as long as ``links`` say, without the CPU.

    As on a real link a transfer begins when its tensor is there, its receive is posted and its link is free: the
    receiver tells the sender when it posted, and the sender when the tensor will have arrived, before the tensor
    itself, which is waited for until then. So no message is late because a process was slow to begin it.
    """

    links: ClassVar[Links]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reservations = _Reservations()
        self._seconds = 0.0
        self._departing: dict[int, queue.SimpleQueue[tuple[Tensor, float, float, _Departure] | None]] = {}
        self._carriers: list[threading.Thread] = []
        for peer in self._sent_to:
            self._departing[peer] = queue.SimpleQueue()
            self._carriers.append(threading.Thread(target=self._carry, args=(peer,), daemon=True))
            self._carriers[-1].start()

    def send(self, message: Message, peer: int, boundary: Boundary) -> None:
        self._seconds = self.links.seconds_of_cut[message.boundary]
        super().send(message, peer, boundary)

    def _start_sending(self, tensor: Tensor, peer: int) -> Any:
        departure = _Departure()
        self._departing[peer].put((tensor, time.monotonic(), self._seconds, departure))
        return departure

    def _start_receiving(self, tensor: Tensor, peer: int) -> Any:
        posted = torch.tensor([time.monotonic()], dtype=torch.float64)
        told = dist.isend(posted, self.ranks[peer], group=self._received_from[peer], tag=POSTED_TAG)
        arrival = torch.empty(1, dtype=torch.float64)
        return _Arrival(
            arrival, [told, super()._start_receiving(arrival, peer), super()._start_receiving(tensor, peer)]
        )

    def close(self) -> None:
        super().close()
        for departing in self._departing.values():
            departing.put(None)
        for carrier in self._carriers:  # one that comes back from a transfer while Python ends aborts the process
            carrier.join(PATIENCE_SECONDS)

    def _carry(self, peer: int) -> None:
        ends = dist.get_rank(), self.ranks[peer]
        link = (min(ends), max(ends)) if self.links.half_duplex else ends
        posted = torch.empty(1, dtype=torch.float64)
        while (departing := self._departing[peer].get()) is not None:
            tensor, ready, seconds, departure = departing
            dist.recv(posted, self.ranks[peer], group=self._sent_to[peer], tag=POSTED_TAG)
            end = self._reservations.take(*link, max(ready, float(posted)), seconds)
            for each in (torch.tensor([end], dtype=torch.float64), tensor):
                super()._start_sending(each, peer).wait()
            departure.end = end
            departure.begun.set()


class _Departure:
    """A send to be waited for until the tensor has left."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.end = 0.0

    def wait(self) -> None:
        self.begun.wait()
        _sleep_until(self.end)


class _Arrival:
    """A receive to be waited for until the sender's instant. (gloo gives up a receive that nobody holds.)"""

    def __init__(self, instant: Tensor, works: list[Any]) -> None:
        self.instant, self.works = instant, works

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        _sleep_until(float(self.instant))


def _sleep_until(instant: float) -> None:
    time.sleep(max(0.0, instant - time.monotonic()))


def over(links: Links) -> type[Transfers]:
    """Make transfers over these links."""
    return type("TransfersOverLinks", (SleepingTransfers,), {"links": links})


@contextmanager
def slow_blocking_transfers(seconds: float, numel: int) -> Iterator[None]:
    """Let DeepSpeed's transfers take as long: a send and its receive meet, and both wait until it is over.

    Args:
        numel: of activations and gradients; what has another size tells shapes, and takes no time.
    """
    send, receive = p2p.send, p2p.recv

    def lasting(transfer: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: Tensor, stage: int, *more: Any) -> Any:
            done = transfer(tensor, stage, *more)
            if tensor.numel() == numel:
                time.sleep(seconds)
            return done

        return run

    p2p.send, p2p.recv = lasting(send), lasting(receive)
    try:
        yield
    finally:
        p2p.send, p2p.recv = send, receive
