"""Dry run of lists of instructions: without tensors, under the rules of real transfers.

It shares with ``lowering.py`` only the types of the instructions. The rules:

- A device runs its list in order. ``S`` and ``R`` never wait; ``W`` and ``D`` wait until their message was sent
  and posted; nothing else waits. So no tensor leaves before there is room for it, as if links held nothing.
- From one device to another, the n-th send and the n-th posted receive are the same message, or the run is wrong.
- A forward finds its input (handed over, or waited for) and a free slot; a backward, or the first half of one,
  finds its gradient, and its micro-batch in its slot, as does a forward that runs again, before that. The second
  half of a backward comes behind the first, and frees the slot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from deepspeed_partition.schedule.instructions import (
    Compute,
    DeadlockError,
    LoweringError,
    Message,
    Program,
    Transfer,
    output_of,
    role_of,
)


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run: what lists of instructions do when they are run."""

    in_flight: tuple[int, ...]
    """Most micro-batches in flight of each stage: forwarded not yet through their backward, both halves of it."""
    num_posted: dict[str, int]
    """Most messages posted and not yet waited for, by boundary and direction (``"F0"``)."""
    waiting: tuple[tuple[dict[int, int], ...], ...]
    """Most tensors that may be at the end of each boundary, with any delay of other devices: for each device,
    after each of its instructions, by boundary. They are those made and not waited for to leave, and those posted
    and not waited for."""


def dry_run(program: Program) -> DryRun:
    """Run all lists to their end.

    Raises:
        DeadlockError: devices wait for each other; the sentence says in which circle.
        LoweringError: a list breaks another rule, or does not do all micro-batches.
    """
    return _DryRun(program).run()


class _DryRun:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.devices = program.device_of_stage
        self.last = len(self.devices) - 1
        self.has_backwards = any(
            isinstance(each, Compute) and each.kind in "BI"
            for instructions in program.lists
            for each in instructions
        )
        self.position = [0] * len(program.lists)
        self.done: set[tuple[str, int]] = set()
        self.sent: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.posted: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.waited_for: set[Message] = set()
        self.open: Counter[str] = Counter()
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        """Stage and micro-batch in each slot, by (device, slot)."""
        self.again = {
            (f"R{each.stage}", each.micro_batch)
            for instructions in program.lists
            for each in instructions
            if isinstance(each, Compute) and each.kind == "R"
        }
        """Forwards that run again, which they do before their backward."""
        self.first_halves: set[tuple[int, int]] = set()
        """Stages and micro-batches of which the second half of the backward is to come."""
        self.live: Counter[int] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.num_posted: Counter[str] = Counter()
        self.left: set[Message] = set()
        """Messages whose end a sender has waited for."""
        self.at_end: list[Counter[int]] = [Counter() for _ in program.lists]
        self.waiting: list[list[dict[int, int]]] = [[] for _ in program.lists]

    def run(self) -> DryRun:
        advanced = True
        while advanced:
            advanced = False
            for device, instructions in enumerate(self.program.lists):
                while self.position[device] < len(instructions):
                    instruction = instructions[self.position[device]]
                    if isinstance(instruction, Compute):
                        self._compute(device, instruction)
                    elif not self._transfer(device, instruction):
                        break
                    self.waiting[device].append(dict(self.at_end[device]))
                    self.position[device] += 1
                    advanced = True
        if any(at < len(each) for at, each in zip(self.position, self.program.lists, strict=True)):
            self._refuse_circle()
        self._check_all_done()
        stages = range(len(self.devices))
        return DryRun(
            tuple(self.in_flight[stage] for stage in stages),
            dict(self.num_posted),
            tuple(tuple(each) for each in self.waiting),
        )

    def _compute(self, device: int, instruction: Compute) -> None:
        kind, stage, micro_batch = instruction.kind, instruction.stage, instruction.micro_batch
        self._require(self.devices[stage] == device, f"{instruction} is on device {device}")
        self._require((f"{kind}{stage}", micro_batch) not in self.done, f"{instruction} runs twice")
        if kind in "RW":
            self._run_again_or_end(device, instruction)
            return
        if kind == "F":
            if stage > 0:
                self._require_input(Message("F", stage - 1, micro_batch), instruction)
            occupant = self.slots.get((device, instruction.slot))
            self._require(occupant is None, f"{instruction} finds {occupant} in its slot {instruction.slot}")
            if self.has_backwards:
                self.slots[device, instruction.slot] = stage, micro_batch
            self.live[stage] += 1
            self.in_flight[stage] = max(self.in_flight[stage], self.live[stage])
        else:
            if stage < self.last:
                self._require_input(Message("B", stage, micro_batch), instruction)
            self._require((f"B{stage}", micro_batch) not in self.done, f"{instruction} is a second backward")
            self._require_slot(device, instruction)
            again = f"R{stage}", micro_batch
            self._require(
                again in self.done or again not in self.again, f"{instruction} comes before its R{stage}"
            )
            if kind == "I":
                self.first_halves.add((stage, micro_batch))
            else:
                del self.slots[device, instruction.slot]
        if kind == "B" or not self.has_backwards:
            self.live[stage] -= 1
        self.done.add((role_of(f"{kind}{stage}"), micro_batch))
        made = output_of(f"{kind}{stage}", micro_batch, len(self.devices))
        if made is not None and len(set(made.ends(self.devices))) == 2:
            self.at_end[device][made.boundary] += 1

    def _run_again_or_end(self, device: int, instruction: Compute) -> None:
        """Run a forward again, or the second half of a backward: what neither gets nor makes a message."""
        here = instruction.stage, instruction.micro_batch
        self._require_slot(device, instruction)
        if instruction.kind == "W":
            self._require(here in self.first_halves, f"{instruction} comes before the first half of its backward")
            self.first_halves.remove(here)
            del self.slots[device, instruction.slot]
            self.live[instruction.stage] -= 1
        self.done.add((f"{instruction.kind}{instruction.stage}", instruction.micro_batch))

    def _require_slot(self, device: int, instruction: Compute) -> None:
        occupant = self.slots.get((device, instruction.slot))
        self._require(
            occupant == (instruction.stage, instruction.micro_batch),
            f"{instruction} finds {occupant} in its slot {instruction.slot}",
        )

    def _require_input(self, message: Message, instruction: Compute) -> None:
        here = self.devices[message.boundary] == self.devices[message.boundary + 1]
        found = message.producer in self.done if here else message in self.waited_for
        self._require(found, f"{instruction} finds no {message.channel} of micro-batch {message.micro_batch}")

    def _transfer(self, device: int, instruction: Transfer) -> bool:
        """Do a device's part of a transfer; return False where it waits."""
        message, peer = instruction.message, instruction.peer
        expected = (device, peer) if instruction.kind in "SD" else (peer, device)
        self._require(
            message.ends(self.devices) == expected and device != peer,
            f"{instruction} of device {device} names device {peer}",
        )
        if instruction.kind == "S":
            self._require(message.producer in self.done, f"{instruction} comes before its tensor")
            self._match(device, peer, message, self.sent)
        elif instruction.kind == "D":
            self._require(message in self.sent[device, peer], f"{instruction} waits for what was not sent")
            self._require(message not in self.left, f"{instruction} waits once more for what has left")
            if message not in self.posted[device, peer]:
                return False
            self.left.add(message)
            self.at_end[device][message.boundary] -= 1
        elif instruction.kind == "R":
            self._match(peer, device, message, self.posted)
            self.open[message.channel] += 1
            self.num_posted[message.channel] = max(self.num_posted[message.channel], self.open[message.channel])
            self.at_end[device][message.boundary] += 1
        else:
            self._require(message in self.posted[peer, device], f"{instruction} waits for what was not posted")
            if message not in self.sent[peer, device]:
                return False
            self.open[message.channel] -= 1
            self.at_end[device][message.boundary] -= 1
            self.waited_for.add(message)
        return True

    def _match(
        self, source: int, destination: int, message: Message, ends: dict[tuple[int, int], list[Message]]
    ) -> None:
        """Match a send with a posted receive: messages between two devices are told apart by their order alone."""
        pair = source, destination
        index = len(ends[pair])
        ends[pair].append(message)
        if index < min(len(self.sent[pair]), len(self.posted[pair])):
            sent, posted = self.sent[pair][index], self.posted[pair][index]
            self._require(
                sent == posted,
                f"message {index} from device {source} to device {destination} is sent as "
                f"{sent.channel}.{sent.micro_batch} and posted as {posted.channel}.{posted.micro_batch}",
            )

    def _refuse_circle(self) -> None:
        waiting = {
            device: instructions[at]
            for device, (at, instructions) in enumerate(zip(self.position, self.program.lists, strict=True))
            if at < len(instructions)
        }
        device, seen, steps = next(iter(waiting)), list[int](), list[str]()
        while device not in seen and device in waiting:
            instruction = waiting[device]
            assert isinstance(instruction, Transfer)
            seen.append(device)
            steps.append(f"device {device} waits at {instruction} for device {instruction.peer}")
            device = instruction.peer
        if device not in waiting:
            raise DeadlockError(f"{', '.join(steps)}, which has ended its list without sending it")
        raise DeadlockError(f"the devices wait in a circle: {', '.join(steps[seen.index(device) :])}")

    def _check_all_done(self) -> None:
        for stage in range(len(self.devices)):
            for kind in "FB" if self.has_backwards else "F":
                for micro_batch in range(self.program.num_micro_batches):
                    self._require(
                        (f"{kind}{stage}", micro_batch) in self.done, f"{kind}{stage}.{micro_batch} is never run"
                    )
        for stage, micro_batch in sorted(self.first_halves):
            self._require(False, f"W{stage}.{micro_batch} is never run")
        for pair in self.sent.keys() | self.posted.keys():
            self._require(
                len(self.sent[pair]) == len(self.posted[pair]),
                f"device {pair[0]} sends {len(self.sent[pair])} messages to device {pair[1]}, which posts "
                f"{len(self.posted[pair])} receives",
            )
        received = {message for messages in self.posted.values() for message in messages}
        unread = received - self.waited_for
        self._require(not unread, f"no operation waits for {sorted(unread)[:1]}")

    @staticmethod
    def _require(holds: bool, message: str) -> None:
        if not holds:
            raise LoweringError(f"the lists of instructions cannot be run: {message}")
