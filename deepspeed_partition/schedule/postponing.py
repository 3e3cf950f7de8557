"""Postponing of sends and receives behind what they must wait for, so that no wait is endless.

On a GPU a posted receive is a kernel that runs until the tensor has come, and a send one that runs until there is
room for it. Whoever waits for the whole device (``torch.cuda.synchronize()`` in a layer, an allocator that has
too little memory) waits for these, too. If a tensor depends on something that this device computes later, then it
never comes: the host waits, and has not queued that computation. Here device 1 must not wait before F1.0:

    device 0   F0.0 SF0.0 RB0.0 F0.1 SF0.1 WB0.0 B0.0 F0.2 SF0.2 ...
    device 1   RF0.0 RF0.1 WF0.0 RF0.2 F1.0 B1.0 SB0.0 ...

``F0.2`` comes after ``B0.0``, which needs ``B1.0``. So ``RF0.2`` moves behind ``SB0.0``: the last instruction of
its own device that the message depends on, through whatever devices. The message cannot come before that, so
nothing is lost. A send moves behind the last instruction of its device that the receive of its message depends
on. Then all that a device was given depends on what it was given before, and on other devices, whose hosts go on.

One pass is enough: what a message depends on stays the same, for each of its ends moves behind things that it
depended on before. Nothing is kept longer: receives are posted later, and a tensor waits as long to be sent as
before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import numpy

from deepspeed_partition.schedule.instructions import Instruction, Message, Program, Transfer

Reach = numpy.ndarray
"""Positions of the last instruction of each device that must have come before something; -1 for none. Shape
(devices,)."""


def postponed(program: Program) -> Program:
    """Return the program with sends and receives as late as costs nothing.

    Args:
        program: lists that come to their end (``dry_run.py``).
    """
    reach = _Run(program).run()
    return replace(
        program,
        lists=tuple(_with_moved(device, instructions, reach) for device, instructions in enumerate(program.lists)),
    )


class _Run:
    """Run of all lists that notes what the end of each transfer depends on.

    A device runs its list in order; a transfer waits for what stands before its two ends, and for the transfer
    before it in its direction between two devices, since these are told apart by their order.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        num_devices = len(program.lists)
        self.position = [0] * num_devices
        self.here = [numpy.full(num_devices, -1, dtype=numpy.int64) for _ in range(num_devices)]
        """Positions that the next instruction of each device depends on."""
        self.one_end: dict[Message, Reach] = {}
        """Positions that messages depend on of which one end has come: sent or posted, not both."""
        self.ended: dict[Message, Reach] = {}
        self.last: dict[tuple[int, int], Reach] = {}
        """Positions that the last transfer depends on, by direction between two devices."""

    def run(self) -> dict[Message, Reach]:
        """Return the positions that each message depends on, in an order in which transfers can end."""
        advanced = True
        while advanced:
            advanced = False
            for device, instructions in enumerate(self.program.lists):
                while self.position[device] < len(instructions):
                    if not self._done(device, instructions[self.position[device]]):
                        break
                    self.position[device] += 1
                    advanced = True
        return self.ended

    def _done(self, device: int, instruction: Instruction) -> bool:
        """Do an instruction; return False where it waits."""
        here = self.here[device]
        if isinstance(instruction, Transfer) and instruction.kind in "WD":
            ended = self.ended.get(instruction.message)
            if ended is None:
                return False
            here = numpy.maximum(here, ended)
        else:
            here = here.copy()
        here[device] = self.position[device]
        self.here[device] = here
        if _is_one_end(instruction):
            self._one_end(instruction.message, here)
        return True

    def _one_end(self, message: Message, reach: Reach) -> None:
        other = self.one_end.pop(message, None)
        if other is None:
            self.one_end[message] = reach
            return
        direction = message.ends(self.program.device_of_stage)
        before = self.last.get(direction, reach)
        self.ended[message] = self.last[direction] = numpy.maximum(numpy.maximum(reach, other), before)


def _with_moved(
    device: int, instructions: Sequence[Instruction], reach: dict[Message, Reach]
) -> tuple[Instruction, ...]:
    """Return one list, with each ``S`` and ``R`` behind the position that its transfer reaches."""
    turn = {message: number for number, message in enumerate(reach)}
    moved: dict[int, list[Transfer]] = defaultdict(list)
    for instruction in instructions:
        if _is_one_end(instruction):
            moved[int(reach[instruction.message][device])].append(instruction)
    written: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        if not _is_one_end(instruction):
            written.append(instruction)
        # Transfers that nothing holds up are found here as well, at their own position.
        moved[position].sort(key=lambda transfer: turn[transfer.message])
        written += moved[position]
    return tuple(written)


def _is_one_end(instruction: Instruction) -> TypeGuard[Transfer]:
    """Return whether an instruction sends, or posts a receive."""
    return isinstance(instruction, Transfer) and instruction.kind in "SR"
