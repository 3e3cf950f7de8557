"""Programs: what every device runs for one batch, as lists of instructions and the messages between them.

Instructions are named as in a plan, with the number of the micro-batch behind the point; ``lowering.py`` shows
two lists and says what each instruction does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed_partition.planner.errors import MadPipeError


class LoweringError(MadPipeError, ValueError):
    """Raised for a plan, or lists of instructions, that cannot be run."""


class DeadlockError(LoweringError):
    """Raised where devices would wait for each other in a circle."""


class Message(NamedTuple):
    """Tensor that crosses a boundary on its way to another device."""

    direction: str
    """Direction: ``F`` is an activation, down the chain; ``B`` is its gradient, up."""
    boundary: int
    """Number of the boundary: between the stage of this number and the next one."""
    micro_batch: int

    @property
    def channel(self) -> str:
        """Name of the direction over the boundary: ``F0`` is for all activations over boundary 0."""
        return f"{self.direction}{self.boundary}"

    @property
    def transfer(self) -> tuple[str, int]:
        """Name of the transfer in a plan, and the micro-batch: ``("SF0", 3)``."""
        return f"S{self.channel}", self.micro_batch

    @property
    def producer(self) -> tuple[str, int]:
        """Computation that makes the tensor, by its role (``role_of``)."""
        return (f"F{self.boundary}" if self.direction == "F" else f"B{self.boundary + 1}"), self.micro_batch

    @property
    def consumer(self) -> tuple[str, int]:
        """Computation that needs the tensor, by its role (``role_of``)."""
        return (f"F{self.boundary + 1}" if self.direction == "F" else f"B{self.boundary}"), self.micro_batch

    def ends(self, devices: Sequence[int]) -> tuple[int, int]:
        """Return the devices that it comes from and goes to, from the device of each stage."""
        ends = devices[self.boundary], devices[self.boundary + 1]
        return ends if self.direction == "F" else (ends[1], ends[0])


def role_of(name: str) -> str:
    """Return ``F0`` for any forward of stage 0, ``B0`` for a backward or its first half; other names as they are.

    What other stages see of a micro-batch is the same whether a forward keeps nothing (``f0``), and whether a
    backward is in two halves (``I0`` sends the gradient of the input).
    """
    return {"f": "F", "I": "B"}.get(name[0], name[0]) + name[1:]


def input_of(name: str, micro_batch: int, num_stages: int) -> Message | None:
    """Return the message that a computation needs from another stage; None at the ends of the chain.

    A forward that runs again (``R0``) and the second half of a backward (``W0``) need none.
    """
    kind, stage = role_of(name)[0], int(name[1:])
    if kind == "F":
        return Message("F", stage - 1, micro_batch) if stage > 0 else None
    return Message("B", stage, micro_batch) if kind == "B" and stage + 1 < num_stages else None


def output_of(name: str, micro_batch: int, num_stages: int) -> Message | None:
    """Return the message that a computation makes for another stage; None at the ends of the chain.

    A forward that runs again (``R0``) and the second half of a backward (``W0``) make none.
    """
    kind, stage = role_of(name)[0], int(name[1:])
    if kind == "F":
        return Message("F", stage, micro_batch) if stage + 1 < num_stages else None
    return Message("B", stage - 1, micro_batch) if kind == "B" and stage > 0 else None


_IN_WORDS = {
    "F": "forward", "B": "backward", "R": "second forward", "I": "first half of the backward",
    "W": "second half of the backward",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compute:
    """Forward or backward of one stage on one micro-batch: ``F2.5`` or ``B2.5``.

    ``R2.5`` is its forward again; ``I2.5`` and ``W2.5`` are the two halves of its backward.
    """

    kind: str
    """Kind of computation: ``F``, ``B``, ``R``, which makes anew what a forward did not keep, ``I``, which makes
    the gradient of the input, or ``W``, which makes those of the weights after it."""
    stage: int
    micro_batch: int
    slot: int
    keeps: bool = True
    """Whether a forward keeps what its backward needs; ``f2.5`` keeps its input alone."""

    def __str__(self) -> str:
        return f"{self.name}.{self.micro_batch}"

    @property
    def name(self) -> str:
        """Name of the operation in a plan: ``F2``, ``f2``, ``R2``, ``B2``, ``I2`` or ``W2``."""
        return f"{self.kind if self.keeps else 'f'}{self.stage}"

    @property
    def in_words(self) -> str:
        """Text for a message: ``the forward of micro-batch 5 of stage 2``."""
        return f"the {_IN_WORDS[self.kind]} of micro-batch {self.micro_batch} of stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A device's part in moving a message: ``SF2.5``, ``DF2.5``, ``RF2.5``, ``WF2.5``, and the same with ``B``."""

    kind: str
    """Kind of transfer: ``S`` sends, ``D`` waits until what was sent has left, ``R`` posts the receive, ``W``
    waits for what was posted."""
    message: Message
    peer: int
    """Number of the device at the other end."""

    def __str__(self) -> str:
        return f"{self.kind}{self.message.channel}.{self.message.micro_batch}"

    @property
    def in_words(self) -> str:
        """Text for a message: ``the output of stage 1 for micro-batch 5``."""
        message = self.message
        what = "output" if message.direction == "F" else "gradient of the output"
        return f"the {what} of stage {message.boundary} for micro-batch {message.micro_batch}"


Instruction = Compute | Transfer


@dataclass(frozen=True, slots=True)
class Update:
    """Update of the weights of a device where the pipeline never drains: ``G.3`` and ``U.3``.

    ``G.3`` says that all gradients of batch 3 are there; ``U.3`` steps the optimizer with them.
    """

    kind: str
    """Kind of instruction: ``G`` or ``U``."""
    batch: int
    """Number of the batch whose gradients it takes, which is the number of the update."""

    def __str__(self) -> str:
        return f"{self.kind}.{self.batch}"

    @property
    def in_words(self) -> str:
        """Text for a message: ``the update of batch 3``."""
        return f"the {'update' if self.kind == 'U' else 'end of the gradients'} of batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions of every device for one batch of micro-batches."""

    device_of_stage: tuple[int, ...]
    num_micro_batches: int
    lists: tuple[tuple[Instruction, ...], ...]
    """Instructions of each device, in order."""
    beyond_room: tuple[tuple[int, int], ...] = ()
    """Ends of boundaries, as (device, boundary), at which the device may hold a tensor more than in the run that
    the lists were made from, where another device is late."""
    _num_slots: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _in_halves: tuple[frozenset[tuple[int, int]], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        halves = [[each for each in mine if isinstance(each, Compute) and each.kind == "I"] for mine in self.lists]
        in_halves = tuple(frozenset((each.stage, each.micro_batch) for each in mine) for mine in halves)
        object.__setattr__(self, "_in_halves", in_halves)
        counts = [[each.slot + 1 for each in mine if isinstance(each, Compute)] for mine in self.lists]
        object.__setattr__(self, "_num_slots", tuple(max(mine, default=0) for mine in counts))

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}   {' '.join(map(str, instructions))}"
            for device, instructions in enumerate(self.lists)
        )

    @property
    def within_room(self) -> bool:
        """Return whether no device ever holds more than in that run, however late others are."""
        return not self.beyond_room

    def in_halves(self, device: int) -> frozenset[tuple[int, int]]:
        """Return the stages and micro-batches whose backward a device runs in two halves."""
        return self._in_halves[device]

    def num_slots(self, device: int) -> int:
        """Return the most micro-batches in flight on a device, over all its stages."""
        return self._num_slots[device]
