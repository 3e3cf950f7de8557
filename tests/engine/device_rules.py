"""Runs lists of instructions under the rules of CUDA's streams and NCCL's point-to-point messages, without a GPU.

First as if each end of a message were given to its device when its own host comes to it (:func:`never_reached`),
then as ``transfers.py`` does it, when both hosts have come to it (:class:`Hosts`). Instruction by instruction:

- ``F``, ``B``: kernels on the stream that computes. The host goes on at once.
- ``S``: a kernel on the stream of the communicator of (here -> peer). It begins when the computing stream has come
  to where it was at ``S``, and everything before it on that communicator is done.
- ``R``: likewise, on the communicator of (peer -> here). Where a header tells the shapes, a thread calls it when
  that has come, but on a stream that waits for the place of ``R`` alone.
- ``W``: the host waits until the receive was called; the computing stream waits for the receive.
- ``D``: the computing stream waits for the send.
- A send and its receive end together, when both have begun: each is a kernel that runs until then.

All this is one graph of needs without any choice. What cannot be reached in it is a deadlock. A host that waits
for its whole device before a computation needs all that this device was given so far.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from deepspeed_partition.schedule.instructions import Compute, Message, Program, Transfer

Node = tuple[object, ...]
Place = tuple[int, int]
"""A device and a position in its list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may differ from run to run."""

    headers: Literal["known", "first", "each"] = "known"
    """Which activations are preceded by their shapes: none, the first of each channel, each."""
    waits_for_device: Collection[Place] = ()
    """The computations before which the host waits for everything that its device was given."""
    waits_for_stream: Collection[Place] = ()
    """The same for the computing stream alone, as ``tensor.item()`` does."""
    late_on_computing_stream: bool = False
    """A receive behind a header waits for all that the computing stream was given when the thread calls it, at the
    latest at its ``W``: what must not be."""
    one_communicator_per_pair: bool = False
    """Both directions between two devices share one: what must not be, either."""


def never_reached(program: Program, rules: Rules = Rules()) -> list[Node]:
    """The things that never happen; empty where all lists come to their end."""
    needs = _Graph(program, rules).needs()
    users: dict[Node, list[Node]] = defaultdict(list)
    missing = {}
    for node, needed in needs.items():
        missing[node] = len(needed)
        for each in needed:
            users[each].append(node)
    ready = deque(node for node, count in missing.items() if not count)
    while ready:
        node = ready.popleft()
        del missing[node]
        for user in users[node]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return list(missing)


def computations(program: Program) -> list[Place]:
    return [
        (device, position)
        for device, instructions in enumerate(program.lists)
        for position, instruction in enumerate(instructions)
        if isinstance(instruction, Compute)
    ]


def first_kernels(program: Program) -> set[Place]:
    """The first forward and the first backward of every stage, where kernels may be loaded."""
    first: dict[tuple[str, int], Place] = {}
    for device, position in computations(program):
        instruction = program.lists[device][position]
        assert isinstance(instruction, Compute)
        first.setdefault((instruction.kind, instruction.stage), (device, position))
    return set(first.values())


class _Graph:
    def __init__(self, program: Program, rules: Rules) -> None:
        self.program, self.rules = program, rules
        self.found: dict[Node, dict[Node, None]] = defaultdict(dict)
        self.host_of_send = {
            instruction.message: ("host", device, position)
            for device, instructions in enumerate(program.lists)
            for position, instruction in enumerate(instructions)
            if isinstance(instruction, Transfer) and instruction.kind == "S"
        }

    def needs(self) -> dict[Node, dict[Node, None]]:
        for device in range(len(self.program.lists)):
            self._device(device)
        return self.found

    def _need(self, node: Node, *needed: Node | None) -> None:
        self.found[node].update((each, None) for each in needed if each is not None)

    def _device(self, device: int) -> None:
        instructions = self.program.lists[device]
        tail: Node | None = None
        """What the computing stream was given last."""
        given: list[Node] = []
        """The transfers that the device was given."""
        lines: dict[object, Node] = {}
        """Of each communicator: its last transfer."""
        called: dict[int, Node] = {}
        """Of each peer: the receive that was called last."""
        told: set[str] = set()
        tails = []
        for position, instruction in enumerate(instructions):
            host: Node = ("host", device, position)
            self._need(host, ("host", device, position - 1) if position else None)
            if isinstance(instruction, Compute):
                if (device, position) in self.rules.waits_for_device:
                    self._need(host, tail, *given)
                if (device, position) in self.rules.waits_for_stream:
                    self._need(host, tail)
                node: Node = ("compute", device, position)
                self._need(node, host, tail)
                tail = node
                tails.append(tail)
                continue
            message = instruction.message
            ended: Node = ("ended", message)
            if instruction.kind in "SR":
                begun: Node = (instruction.kind, message)
                self._need(ended, begun)
                call: Node | None = host
                if instruction.kind == "R":
                    call = ("called", message)
                    self._need(call, host, called.get(instruction.peer))
                    called[instruction.peer] = call
                    if self._has_header(message, told):
                        self._need(call, self.host_of_send[message])
                    told.add(message.channel)
                line = self._line(message)
                self._need(begun, call, tail, lines.get(line))
                lines[line] = ended
                given.append(ended)
            else:
                node = ("wait", device, position)
                if instruction.kind == "W":
                    self._need(host, ("called", message))
                    if self.rules.late_on_computing_stream and self._behind_header(message):
                        self._need(("R", message), tail)
                self._need(node, host, ended, tail)
                tail = node

    def _line(self, message: Message) -> object:
        ends = message.ends(self.program.device_of_stage)
        return frozenset(ends) if self.rules.one_communicator_per_pair else ends

    def _has_header(self, message: Message, told: Collection[str]) -> bool:
        if message.direction == "B" or self.rules.headers == "known":
            return False
        return self.rules.headers == "each" or message.channel not in told

    def _behind_header(self, message: Message) -> bool:
        return self.rules.headers == "each" and message.direction == "F"


class Hosts:
    """Runs the lists as ``transfers.py`` does: a message is given to its devices when both hosts have come to it.

    Hosts go on in a random order; whatever a device can do with what it was given is done. Before each computation
    a host waits for everything that its device was given.

    Args:
        both: False: each end of a message is given to its device when its own host comes to it.
    """

    def __init__(self, program: Program, pick: random.Random, *, both: bool = True) -> None:
        self.program, self.pick, self.both = program, pick, both
        devices = range(len(program.lists))
        self.position = [0 for _ in devices]
        self.streams: list[deque[Message | None]] = [deque() for _ in devices]
        """What the computing streams have not done: a computation, or a wait for a message."""
        self.num_queued, self.num_done = [0 for _ in devices], [0 for _ in devices]
        self.places: dict[tuple[str, Message], int] = {}
        """Of each end that its host has come to: how many things were queued before it."""
        self.lines: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        """By the devices of sender and receiver: messages that have not ended, in the order of the sends."""
        self.ended: set[Message] = set()
        self.awaited: list[set[Message] | None] = [None for _ in devices]
        """Messages that a host in front of a computation waits for."""

    def all_end(self) -> bool:
        """Whether every list comes to its end, and every message."""
        while True:
            self._let_devices_work()
            ready = [device for device in range(len(self.position)) if self._goes_on(device)]
            if not ready:
                break
            device = self.pick.choice(ready)
            self._step(device, self.program.lists[device][self.position[device]])
            self.position[device] += 1
        lists = zip(self.position, self.program.lists, strict=True)
        return all(at == len(instructions) for at, instructions in lists) and not any(self.lines.values())

    def _is_given(self, message: Message) -> bool:
        return ("S", message) in self.places and ("R", message) in self.places

    def _goes_on(self, device: int) -> bool:
        if self.position[device] == len(self.program.lists[device]):
            return False
        instruction = self.program.lists[device][self.position[device]]
        if isinstance(instruction, Transfer):
            return instruction.kind in "SR" or not self.both or self._is_given(instruction.message)
        if self.awaited[device] is None:
            mine = {
                message
                for kind, message in self.places
                if device == message.ends(self.program.device_of_stage)[kind == "R"]
                and (self._is_given(message) or not self.both)
            }
            self.awaited[device] = mine - self.ended
        awaited = self.awaited[device]
        assert awaited is not None
        return awaited <= self.ended and not self.streams[device]

    def _step(self, device: int, instruction: Compute | Transfer) -> None:
        self.awaited[device] = None
        if isinstance(instruction, Transfer) and instruction.kind in "SR":
            message = instruction.message
            self.places[instruction.kind, message] = self.num_queued[device]
            if instruction.kind == "S":
                self.lines[message.ends(self.program.device_of_stage)].append(message)
            return
        self.streams[device].append(instruction.message if isinstance(instruction, Transfer) else None)
        self.num_queued[device] += 1

    def _let_devices_work(self) -> None:
        worked = True
        while worked:
            worked = False
            for device, stream in enumerate(self.streams):
                while stream and (stream[0] is None or stream[0] in self.ended):
                    stream.popleft()
                    self.num_done[device] += 1
                    worked = True
            for (sender, receiver), line in self.lines.items():
                while line and self._is_given(line[0]):
                    begins = self.places["S", line[0]], self.places["R", line[0]]
                    if begins[0] > self.num_done[sender] or begins[1] > self.num_done[receiver]:
                        break
                    self.ended.add(line.popleft())
                    worked = True
