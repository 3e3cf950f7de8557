"""Tensors that were sent, until they have left.

gloo holds no tensor of its own, and tells only to who waits for it that one has left. On a CPU the engine itself
waits, at ``D`` and at the end of a batch: the lists say ``D`` where there would be no room otherwise, so a tensor
that has left before takes no room that is needed, and nobody is woken for it. Where somebody must act while a
message leaves (on a GPU), a thread waits.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_partition.engine.runtime.worker_thread import Helper
from deepspeed_partition.schedule.instructions import Message

Header = tuple[torch.Tensor, Any]
"""Numbers, and what to wait for first."""
_Departing = tuple[Message, Any, torch.Tensor]
"""A tensor of a message, and what to wait for."""


class ThreadedDepartures:
    """Tensors sent to one device, until they have left; a thread waits for them."""

    def __init__(self, rank: int, when_failed: Callable[[Exception], object]) -> None:
        self._rank = rank
        self._helper = Helper(f"departures-to-{rank}", when_failed)
        self._marks: dict[Message, threading.Event] = {}
        self._lock = threading.Lock()
        self._on_device: deque[_Departing] = deque()

    def add(self, work: Any, tensor: torch.Tensor) -> None:
        """Add a tensor that is being sent from the host's memory."""
        self._helper.do(functools.partial(wait_holding, work, tensor, self._rank))

    def start(self, message: Message, room: Header, begin: Callable[[], list[tuple[Any, torch.Tensor]]]) -> None:
        """Send the tensors of a message from the device's memory, when its receiver says that there is room.

        Args:
            begin: sends them, and gives what to wait for and what to keep meanwhile.
        """
        self._helper.do(functools.partial(self._start, message, room, begin))

    def _start(self, message: Message, room: Header, begin: Callable[[], list[tuple[Any, torch.Tensor]]]) -> None:
        wait(room[1], self._rank)
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


class HostDepartures:
    """Tensors sent to one device from the host's memory, until they have left.

    Args:
        rank: that device's, globally.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._leaving: dict[Message, list[tuple[Any, torch.Tensor]]] = {}
        self._aside: list[tuple[Any, torch.Tensor]] = []

    def add(self, message: Message, leaving: list[tuple[Any, torch.Tensor]]) -> None:
        """Keep the tensors of a message, each with what to wait for."""
        self._leaving[message] = leaving

    def add_aside(self, leaving: list[tuple[Any, torch.Tensor]]) -> None:
        """Keep tensors until the batch ends: their receives are posted when the receiver has looked for them."""
        self._aside += leaving

    def wait_for(self, message: Message) -> None:
        """Return when a message and those before it have left.

        Raises:
            RuntimeError: the rank that they go to does not answer.
        """
        all_leaving = self._leaving
        while message in all_leaving:
            first = next(iter(all_leaving))
            for work, _ in all_leaving[first]:
                wait(work, self._rank)
            del all_leaving[first]  # not before: gloo gives up what nobody holds

    def finish(self) -> None:
        """Return when all messages have left; raises what :meth:`wait_for` does."""
        for leaving in self._leaving.values():
            self._wait(leaving)
        self._wait(self._aside)
        self._leaving.clear()
        self._aside.clear()

    def _wait(self, leaving: list[tuple[Any, torch.Tensor]]) -> None:
        for work, _ in leaving:
            wait(work, self._rank)


def wait_holding(work: Any, _: torch.Tensor, rank: int) -> None:
    """Wait as :func:`wait` does, for what refers to a tensor meanwhile."""
    wait(work, rank)


def wait(work: Any, rank: int) -> None:
    """Wait for a message to or from a rank.

    Raises:
        RuntimeError: that rank does not answer.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} has ended, or the link to it is down ({error})") from error
