"""What every device runs for one batch: lists of instructions, and the messages between them.

Instructions are named as in a plan, with the number of the micro-batch behind the point; ``lowering.py`` shows two
lists and says what each instruction does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_partition.planner.errors import MadPipeError


class LoweringError(MadPipeError, ValueError):
    """A plan, or lists of instructions, that cannot be run."""


class DeadlockError(LoweringError):
    """Devices that wait for each other in a circle."""


class Message(NamedTuple):
    """A tensor that crosses a cut on its way to another device."""

    direction: str
    """``F``: an activation, down the chain; ``B``: its gradient, up."""
    cut: int
    """The cut between this stage and the next one."""
    micro_batch: int

    @property
    def channel(self) -> str:
        """``F0``: all activations over cut 0."""
        return f"{self.direction}{self.cut}"

    @property
    def transfer(self) -> tuple[str, int]:
        """As a plan names it: ``SF0`` of a micro-batch."""
        return f"S{self.channel}", self.micro_batch

    @property
    def producer(self) -> tuple[str, int]:
        """The computation that makes it."""
        return (f"F{self.cut}" if self.direction == "F" else f"B{self.cut + 1}"), self.micro_batch

    @property
    def consumer(self) -> tuple[str, int]:
        """The computation that needs it."""
        return (f"F{self.cut + 1}" if self.direction == "F" else f"B{self.cut}"), self.micro_batch

    def ends(self, devices: Sequence[int]) -> tuple[int, int]:
        """The devices that it comes from and goes to, from the device of each stage."""
        ends = devices[self.cut], devices[self.cut + 1]
        return ends if self.direction == "F" else (ends[1], ends[0])


def input_of(name: str, micro_batch: int, num_stages: int) -> Message | None:
    """What a computation needs from another stage, wherever that is; None at the ends of the chain."""
    stage = int(name[1:])
    if name[0] == "F":
        return Message("F", stage - 1, micro_batch) if stage > 0 else None
    return Message("B", stage, micro_batch) if stage + 1 < num_stages else None


def output_of(name: str, micro_batch: int, num_stages: int) -> Message | None:
    """What a computation makes for another stage, wherever that is; None at the ends of the chain."""
    stage = int(name[1:])
    if name[0] == "F":
        return Message("F", stage, micro_batch) if stage + 1 < num_stages else None
    return Message("B", stage - 1, micro_batch) if stage > 0 else None


@dataclass(frozen=True, slots=True)
class Compute:
    """``F2.5`` or ``B2.5``: a forward or backward of one stage on one micro-batch."""

    kind: str
    """``F`` or ``B``."""
    stage: int
    micro_batch: int
    slot: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def in_words(self) -> str:
        """``the forward of micro-batch 5 of stage 2``."""
        kind = "forward" if self.kind == "F" else "backward"
        return f"the {kind} of micro-batch {self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """``SF2.5``, ``DF2.5``, ``RF2.5``, ``WF2.5``, and the same with ``B``: a device's part in moving a message."""

    kind: str
    """``S`` sends, ``D`` waits until what was sent has left, ``R`` posts the receive, ``W`` waits for what was
    posted."""
    message: Message
    peer: int
    """The other device."""

    def __str__(self) -> str:
        return f"{self.kind}{self.message.channel}.{self.message.micro_batch}"

    @property
    def in_words(self) -> str:
        """``the output of stage 1 for micro-batch 5``."""
        message = self.message
        what = "output" if message.direction == "F" else "gradient of the output"
        return f"the {what} of stage {message.cut} for micro-batch {message.micro_batch}"


Instruction = Compute | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every device runs for one batch of micro-batches."""

    device_of_stage: tuple[int, ...]
    num_micro_batches: int
    lists: tuple[tuple[Instruction, ...], ...]
    """One for each device."""
    beyond_room: tuple[tuple[int, int], ...] = ()
    """The ends of cuts, as device and cut, at which the device may hold a tensor more than in the run that the
    lists were made from, where another one is late."""

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}   {' '.join(map(str, instructions))}"
            for device, instructions in enumerate(self.lists)
        )

    @property
    def within_room(self) -> bool:
        """Whether no device ever holds more than in that run, however late others are."""
        return not self.beyond_room

    def num_slots(self, device: int) -> int:
        """The most micro-batches in flight on a device, over all its stages."""
        return max((each.slot + 1 for each in self.lists[device] if isinstance(each, Compute)), default=0)
