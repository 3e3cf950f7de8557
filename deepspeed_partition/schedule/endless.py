"""Lists of instructions of a pipeline that never drains: a part that repeats, batch after batch.

A *batch* is the micro-batches of one update. The timetable of a plan's pattern, run for several batches, gives
each device a list of which a part repeats, with the numbers of micro-batches one batch higher each time. That
part, repeated without begin and end, restricted to the micro-batches a, a + 1, ..., b - 1 for any a < b, is a
program that fills, runs and drains:

    repeated        ... F0.3 B0.1 | F0.4 B0.2 F0.5 B0.3 U.1 | F0.6 B0.4 F0.7 B0.5 U.2 | ...        M = 2
    restricted      F0.4 | F0.5 | F0.6 B0.4 F0.7 B0.5 U.2 | B0.6 B0.7 U.3                          to 4 to 7

No such restriction waits for ever if the whole does not. A wait in it, for an instruction of its own
micro-batches, is a wait in the whole, too; messages of one direction between two devices keep their order; and
whatever stands before an instruction there stands before it in the whole. Nor does it keep more, at any
instruction. So nothing else is needed for the begin of training, for its end, and for a rest in the middle.

The lists are cut into one *segment* for each call of a step. A device's segment of batch k ends before the first
computation that begins, in the timetable, when the last stage has ended its forward on the last micro-batch of the
batch. At that moment the loss of the batch is known, so a device that runs its segment and waits for the loss
never waits longer than until that moment, and nobody need wait for anybody else. Segments end a little later where
an instruction in one waits for one on another device that would come behind its end.

Forwards of the next batches that begin before that moment belong to the segment (``ahead``): without them each
call would wait for a loss while the first devices have nothing to do. ``runs_ahead=False`` is for who cannot have
their data: the first forward of a batch then comes after the last one of the batch before.

``U.k`` stands behind the last backward on batch k of its device, and behind the messages that it sends. Where
updates wait for something of all devices, such as the norm of all gradients, it may be put off until the first
forward on batch k + 2, which may use version k + 1 of the weights at the earliest (``"2bw"``).
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.weight_versions import TWO_VERSIONS, VERTICAL_SYNC
from deepspeed_partition.schedule import timetable
from deepspeed_partition.schedule.dry_run import dry_run
from deepspeed_partition.schedule.emit import Slots
from deepspeed_partition.schedule.instructions import (
    Compute,
    Instruction,
    LoweringError,
    Message,
    Program,
    Transfer,
    Update,
    role_of,
)
from deepspeed_partition.schedule.lowering import program_of_timetable
from deepspeed_partition.schedule.repeating import RepeatingRun
from deepspeed_partition.schedule.timetable import Operation, Timetable

NUM_COMPARED = 3
"""Batches of which the lists must be alike, for them to be taken as what repeats."""
MOST_BATCHES = 40
"""Batches after which a run that does not repeat is given up."""
EndlessInstruction = Instruction | Update


@dataclass(frozen=True, kw_only=True)
class EndlessProgram:
    """Instructions of every device for batch after batch, without end."""

    device_of_stage: tuple[int, ...]
    num_micro_batches: int
    """Number M of micro-batches of a batch."""
    segments: tuple[tuple[EndlessInstruction, ...], ...]
    """For each device, its segment of batch 0, had batches come before: numbers of micro-batches below 0 are of
    those. The segment of batch k has numbers that are k M higher."""
    ahead: int
    """Number of micro-batches of the next batches that a segment of some device begins with."""
    num_slots: tuple[int, ...]
    """Most micro-batches in flight on each device, over all its stages."""
    beyond_room: tuple[tuple[int, int], ...] = ()
    """Ends of boundaries at which a device may hold a tensor more than planned, see ``Program``."""
    batch_seconds: float = 0.0
    """Time from the loss of a batch to that of the next one, by a timetable in which nothing waits otherwise."""

    @property
    def batches_ahead(self) -> int:
        """Return the number of later batches of which a segment has instructions."""
        return ceil(Fraction(self.ahead, self.num_micro_batches))

    def newest(self, stage: int, micro_batch: int) -> int:
        """Return the version of the weights that the device of a stage has made when its forward begins.

        Version v is that after v updates since the begin, where micro-batches are counted from 0.
        """
        batch, place = divmod(micro_batch, self.num_micro_batches)
        return max(0, batch - self._delays[stage, place])

    @functools.cached_property
    def _delays(self) -> dict[tuple[int, int], int]:
        """Updates of its device that a forward is ahead of, by stage and place in a batch."""
        found: dict[tuple[int, int], int] = {}
        for segment in self.segments:
            updates = [each.batch for each in segment if isinstance(each, Update) and each.kind == "U"]
            newest = min(updates)
            for each in segment:
                if isinstance(each, Update) and each.kind == "U":
                    newest = each.batch + 1
                elif isinstance(each, Compute) and each.kind == "F":
                    batch, place = divmod(each.micro_batch, self.num_micro_batches)
                    found[each.stage, place] = batch - newest
        return found

    def version(self, mode: str, stage: int, micro_batch: int) -> int:
        """Return the version of the weights that a stage uses on a micro-batch, forward and backward.

        Args:
            mode: ``weight_versions``: ``"stashing"``, ``"2bw"`` or ``"vertical-sync"``.
        """
        if mode == TWO_VERSIONS:
            return max(0, micro_batch // self.num_micro_batches - 1)
        return self.newest(0 if mode == VERTICAL_SYNC else stage, micro_batch)

    def most_held_together(self, mode: str, device: int) -> int:
        """Return the most versions of its weights that a device holds at once, if its stages share them.

        Then a version is let go when no stage of the device uses it any more. Where each stage has versions of its
        own, it is ``WeightVersions.num_held``.
        """
        oldest = {stage: 0 for stage, each in enumerate(self.device_of_stage) if each == device}
        num_batches = 2 * (1 + max(self._delays.values())) + self.batches_ahead + 2
        run = EndlessRun(self, device, lambda number: number >= num_batches * self.num_micro_batches)
        most = 1
        for each in (*(each for _ in range(num_batches) for each in run.segment()), *run.rest()):
            if isinstance(each, Compute) and each.kind == "B":
                oldest[each.stage] = each.micro_batch + 1
            elif isinstance(each, Update) and each.kind == "U":
                needed = min(self.version(mode, stage, number) for stage, number in oldest.items())
                most = max(most, each.batch + 2 - min(needed, each.batch + 1))
        return most

    def restricted(self, end: int) -> Program:
        """Return the lists of micro-batches 0 to ``end`` - 1, from fill to drain, without updates."""
        lists = []
        for device in range(len(self.segments)):
            run = EndlessRun(self, device, lambda number: number >= end)
            instructions = [*run.segment(), *run.rest()]
            lists.append(tuple(each for each in instructions if not isinstance(each, Update)))
        return Program(
            device_of_stage=self.device_of_stage, num_micro_batches=end, lists=tuple(lists),
            beyond_room=self.beyond_room,
        )  # fmt: skip


class EndlessRun:
    """Instructions of one device from the first micro-batch on, one segment after the other, until a rest.

    Args:
        program: of all devices.
        device: whose instructions these are.
        is_over: tells whether a micro-batch comes no more; asked for each instruction of it. Where it has said so
            once, it says so of all later micro-batches until the rest.
    """

    def __init__(self, program: EndlessProgram, device: int, is_over: Callable[[int], bool]) -> None:
        self._segment, self._per_batch = program.segments[device], program.num_micro_batches
        self._is_over = is_over
        self._next = -program.batches_ahead  # segments before that of batch 0 have micro-batches of it
        self._slots = Slots()
        self._first = min((_number_of(each, self._per_batch) for each in self._segment), default=0)

    def segment(self) -> Iterator[EndlessInstruction]:
        """Yield the instructions of the next segment; of the first one also those that would have been ahead."""
        for batch in range(self._next, max(0, self._next) + 1):
            self._next = batch + 1
            yield from self._restricted(batch)

    def rest(self) -> Iterator[EndlessInstruction]:
        """Yield all that is left of the micro-batches that come; some are over."""
        while not self._is_over(max(0, self._first + self._next * self._per_batch)):
            self._next += 1
            yield from self._restricted(self._next - 1)

    def _restricted(self, batch: int) -> Iterator[EndlessInstruction]:
        shift = batch * self._per_batch
        for each in self._segment:
            number = _number_of(each, self._per_batch) + shift
            if number < 0 or self._is_over(number):
                continue
            if isinstance(each, Update):
                yield replace(each, batch=each.batch + batch)
            else:
                yield self._shifted(each, shift)

    def _shifted(self, each: Instruction, shift: int) -> Instruction:
        if isinstance(each, Transfer):
            message = Message(each.message.direction, each.message.boundary, each.message.micro_batch + shift)
            return Transfer(each.kind, message, each.peer)
        number, stage = each.micro_batch + shift, each.stage
        slot = self._slots.take(stage, number) if each.kind == "F" else self._slots.taken[stage, number]
        if each.kind == "B":
            self._slots.give_back(stage, number)
        return Compute(each.kind, stage, number, slot)


class EndlessBases:
    """The activation by whose shapes each one is received, for all of a run (``engine/runtime/boundary_shapes``).

    Args:
        program: of all devices.
    """

    def __init__(self, program: EndlessProgram) -> None:
        self._per_batch = program.num_micro_batches
        self._back: dict[tuple[int, int], int] = {}
        """By boundary, and number within a batch: how many micro-batches before it that one is."""
        for segment in program.segments:
            taken: dict[int, int] = {}
            for batch in range(4):  # until each boundary has had one taken before the first one posted
                for each in segment:
                    if not isinstance(each, Transfer) or each.message.direction != "F":
                        continue
                    boundary, number = each.message.boundary, each.message.micro_batch + batch * self._per_batch
                    if each.kind == "W":
                        taken[boundary] = number
                    elif each.kind == "R" and boundary in taken:
                        self._back[boundary, number % self._per_batch] = number - taken[boundary]

    def __getitem__(self, message: Message) -> int | None:
        basis = message.micro_batch - self._back[message.boundary, message.micro_batch % self._per_batch]
        return basis if basis >= 0 else None


def lower_endless(
    plan: Plan,
    num_micro_batches: int,
    *,
    two_versions: bool = False,
    puts_off: bool = False,
    runs_ahead: bool = True,
) -> EndlessProgram:
    """Return the lists of a plan's pattern without fill and drain between batches.

    Args:
        num_micro_batches: number M of micro-batches of a batch.
        two_versions: whether batch k waits for update k - 2, as two versions of the weights ask for.
        puts_off: whether updates come as late as two versions allow.
        runs_ahead: whether forwards of a batch may begin before the loss of the one before is known.

    Raises:
        LoweringError: the pattern lacks an operation, or does not come to repeat itself.
        PlanMismatchError: the plan decides micro-batch by micro-batch.
    """
    plan.check_treats_all_alike("asynchronous training, whose pattern repeats for ever,")
    depth = max(each.shift for each in plan.operations) + 2
    num_batches = 2 * ceil(depth / num_micro_batches) + 4 + NUM_COMPARED
    while True:
        found = _repeated(plan, num_micro_batches, num_batches, two_versions, puts_off, runs_ahead)
        if found is not None:
            break
        num_batches *= 2
        if num_batches > MOST_BATCHES:
            raise LoweringError(
                f"the pattern of the plan does not repeat itself within {MOST_BATCHES} batches of "
                f"{num_micro_batches} micro-batches: train with weight_versions 'flush'"
            )
    length = (found.batches_ahead + 3) * num_micro_batches
    for end in (length, length + 1):  # with a last batch that is whole, and one that is given up
        dry_run(found.restricted(end))
    return found


def _repeated(
    plan: Plan, per_batch: int, num_batches: int, two_versions: bool, puts_off: bool, runs_ahead: bool
) -> EndlessProgram | None:
    """Return what repeats in a run of so many batches; None where nothing does so soon."""
    also: list[tuple[Operation, Operation]] = []
    for begin in range(2 * per_batch, num_batches * per_batch, per_batch) if two_versions else ():
        # Gradients go up the chain, so with this one all backwards of the batch have ended, on every device.
        also.append((("B0", begin - per_batch - 1), ("F0", begin)))
    times = timetable.of_pattern(plan, num_batches * per_batch, "FB", also)
    segment_of = _segments(times, per_batch, num_batches)
    if not runs_ahead:
        held_back = _held_back(plan, times, segment_of, per_batch, num_batches)
        if held_back is None:
            return None
        times = held_back
    program = program_of_timetable(times, plan.platform.comm_buffers)
    lists = [
        _with_updates(instructions, device, program.device_of_stage, per_batch, puts_off)
        for device, instructions in enumerate(program.lists)
    ]
    cuts = _cuts(lists, segment_of, num_batches)
    if runs_ahead:
        for batch in range(num_batches):
            _extend(lists, cuts, batch, "WD")
    else:
        _hold_back(lists, cuts, per_batch, num_batches)
    middle = _middle(lists, cuts, per_batch, num_batches)
    if middle is None:
        return None
    devices = range(len(lists))
    segments = tuple(
        tuple(
            _relative(each, middle, per_batch)
            for each in lists[device][cuts[device][middle - 1] : cuts[device][middle]]
        )
        for device in devices
    )
    last = f"F{len(times.device_of_stage) - 1}"
    known = [times.instants[last, (batch + 1) * per_batch - 1][1] for batch in (middle - 1, middle)]
    ahead = max(_number_of(each, per_batch) for segment in segments for each in segment) - per_batch + 1
    return EndlessProgram(
        device_of_stage=program.device_of_stage, num_micro_batches=per_batch, segments=segments,
        ahead=max(0, ahead), num_slots=tuple(program.num_slots(device) for device in devices),
        beyond_room=program.beyond_room, batch_seconds=(known[1] - known[0]) * _seconds_of_tick(plan, times),
    )  # fmt: skip


def _seconds_of_tick(plan: Plan, times: Timetable) -> float:
    """Return the seconds of a tick of a timetable, by the longest forward."""
    forwards = [each for each in plan.operations if each.operation.startswith("F")]
    longest = max(forwards, key=lambda each: each.duration_seconds)
    begin, end = times.instants[longest.operation, 0]
    return longest.duration_seconds / (end - begin) if end > begin else 0.0


def _number_of(instruction: EndlessInstruction, per_batch: int) -> int:
    """Return the micro-batch of an instruction; of an update the last one of its batch."""
    if isinstance(instruction, Update):
        return (instruction.batch + 1) * per_batch - 1
    return instruction.micro_batch if isinstance(instruction, Compute) else instruction.message.micro_batch


def _relative(each: EndlessInstruction, batch: int, per_batch: int) -> EndlessInstruction:
    """Return an instruction with the numbers that it would have, were ``batch`` batch 0; slots are left out."""
    shift = batch * per_batch
    if isinstance(each, Update):
        return replace(each, batch=each.batch - batch)
    if isinstance(each, Compute):
        return replace(each, micro_batch=each.micro_batch - shift, slot=0)
    return replace(each, message=each.message._replace(micro_batch=each.message.micro_batch - shift))


def _with_updates(
    instructions: Sequence[Instruction], device: int, devices: Sequence[int], per_batch: int, puts_off: bool
) -> list[EndlessInstruction]:
    """Return the list of a device with the updates of the batches of which it has all backwards."""
    num_backwards = devices.count(device) * per_batch
    left: dict[int, int] = defaultdict(lambda: num_backwards)
    begun: set[int] = set()
    written: list[EndlessInstruction] = []
    due: list[int] = []
    """Batches whose gradients are there, and that are not updated with."""
    complete: int | None = None
    for each in instructions:
        if complete is not None and not (isinstance(each, Transfer) and each.kind in "SR"):
            written.append(Update("G", complete))
            due.append(complete)
            complete = None
        if not isinstance(each, Compute):
            if due and not puts_off:
                written.append(Update("U", due.pop(0)))
            written.append(each)
            continue
        batch = each.micro_batch // per_batch
        if each.kind == "F" and batch not in begun:
            begun.add(batch)
            while due and (not puts_off or due[0] <= batch - 2):
                written.append(Update("U", due.pop(0)))
        if due and not puts_off:
            written.append(Update("U", due.pop(0)))
        written.append(each)
        if each.kind == "B":
            left[batch] -= 1
            if not left[batch]:
                complete = batch
    if complete is not None:
        written.append(Update("G", complete))
        due.append(complete)
    written += [Update("U", batch) for batch in due]
    return written


def _segments(times: Timetable, per_batch: int, num_batches: int) -> dict[Operation, int]:
    """Return the batch in whose segment each computation stands: the first one whose loss is not known before."""
    last = len(times.device_of_stage) - 1
    known = [times.instants[f"F{last}", (batch + 1) * per_batch - 1][1] for batch in range(num_batches)]
    return {each: bisect_right(known, times.instants[each][0]) for order in times.orders for each in order}


def _held_back(
    plan: Plan, times: Timetable, segments: dict[Operation, int], per_batch: int, num_batches: int
) -> Timetable | None:
    """Return a run in which no batch begins before its own segment, nor that before the loss of the one before.

    Args:
        segments: of a run that need not be so; changed accordingly.

    Returns:
        None where the devices' orders do not come to repeat themselves.
    """
    for operation in segments:
        segments[operation] = max(segments[operation], operation[1] // per_batch)
    # What an operation needs begins before it and is of the same micro-batch, so these orders have no circles.
    parts: list[list[list[Operation]]] = [[[] for _ in range(num_batches)] for _ in times.orders]
    for mine, order in zip(parts, times.orders, strict=True):
        for name, number in order:
            segment = segments[name, number]
            if segment < num_batches:
                mine[segment].append((name, number - segment * per_batch))
    middle = _first_alike(parts, per_batch, num_batches)
    if middle is None:
        return None
    orders = [mine[middle] for mine in parts]
    segment_of = {(name, number % per_batch): -(number // per_batch) for order in orders for name, number in order}
    for name, number in segments:
        segments[name, number] = number // per_batch + segment_of[name, number % per_batch]
    loss = f"F{len(times.device_of_stage) - 1}", per_batch - 1
    run = RepeatingRun(
        orders, times.device_of_stage, per_batch,
        {each.operation: each.duration_seconds for each in plan.operations},
        max(1, plan.platform.comm_buffers // 2), plan.platform,
        [(loss, (order[0][0], order[0][1] + per_batch)) for order in orders if order],
    )  # fmt: skip
    return run.timetable(num_batches)


def _first_alike(parts: Sequence[Sequence[list[Operation]]], per_batch: int, num_batches: int) -> int | None:
    """Return a batch from which on the orders of several are alike, and whole; None where there is none."""
    for first in range(1, num_batches - NUM_COMPARED):
        if all(mine[first] == mine[first + more] for mine in parts for more in range(1, NUM_COMPARED)) and all(
            _has_each_once(mine[first], per_batch) for mine in parts
        ):
            return first
    return None


def _has_each_once(order: Sequence[Operation], per_batch: int) -> bool:
    """Return whether an order has each of its computations once for each place in a batch."""
    found = {(name, number % per_batch) for name, number in order}
    return len(found) == len(order) == per_batch * len({name for name, _ in order})


def _cuts(
    lists: Sequence[Sequence[EndlessInstruction]], segments: Mapping[Operation, int], num_batches: int
) -> list[list[int]]:
    """Return for each device and batch the place in its list where the segment of the batch ends."""
    cuts: list[list[int]] = []
    for instructions in lists:
        places = [place for place, each in enumerate(instructions) if isinstance(each, Compute)]
        of_places = [segments[_operation(instructions[place])] for place in places]
        mine = []
        for batch in range(num_batches):
            first_later = bisect_right(of_places, batch)
            # Behind the last computation that begins before, and what it sends.
            place = places[first_later - 1] + 1 if first_later else 0
            while place < len(instructions) and _goes_with_what_is_before(instructions[place]):
                place += 1
            mine.append(place)
        cuts.append(mine)
    return cuts


def _goes_with_what_is_before(each: EndlessInstruction) -> bool:
    return isinstance(each, Transfer) and each.kind == "S"


def _operation(each: EndlessInstruction) -> Operation:
    assert isinstance(each, Compute)
    return role_of(each.name), each.micro_batch


def _extend(
    lists: Sequence[Sequence[EndlessInstruction]], cuts: Sequence[list[int]], batch: int, kinds: str
) -> None:
    """Let each device's segment of a batch reach as far as what is waited for in another one's.

    Args:
        kinds: of the waits that count, ``W``, ``D`` or both.
    """
    places: dict[tuple[str, Message], tuple[int, int]] = {}
    for device, instructions in enumerate(lists):
        for place, each in enumerate(instructions):
            if isinstance(each, Transfer) and each.kind in "SR":
                places[each.kind, each.message] = device, place
    seen = [0] * len(lists)
    changed = True
    while changed:
        changed = False
        for device, instructions in enumerate(lists):
            end = cuts[device][batch]
            for each in instructions[seen[device] : end]:
                if isinstance(each, Transfer) and each.kind in kinds:
                    # Messages before it in the same direction stand before it in both lists.
                    other, place = places["S" if each.kind == "W" else "R", each.message]
                    if place >= cuts[other][batch]:
                        cuts[other][batch] = place + 1
                        changed = True
            seen[device] = end


def _hold_back(
    lists: Sequence[list[EndlessInstruction]], cuts: Sequence[list[int]], per_batch: int, num_batches: int
) -> None:
    """Let no segment make room for the next batch, whose data may never come, before the next one begins.

    In a segment these are receives alone. Those behind them from the same device go with them, whose transfers
    begin later still, and so do waits for a message to leave whose receive has gone.
    """
    posted: set[Message] = set()
    for batch in range(num_batches):
        _extend(lists, cuts, batch, "W")
        begins = [mine[batch - 1] if batch else 0 for mine in cuts]
        for device, instructions in enumerate(lists):
            held_from: set[int] = set()
            kept: list[EndlessInstruction] = []
            moved: list[EndlessInstruction] = []
            for each in instructions[begins[device] : cuts[device][batch]]:
                later = _number_of(each, per_batch) >= (batch + 1) * per_batch
                if isinstance(each, Transfer) and each.kind == "R" and (later or each.peer in held_from):
                    held_from.add(each.peer)
                    moved.append(each)
                    continue
                kept.append(each)
                if isinstance(each, Transfer) and each.kind == "R":
                    posted.add(each.message)
            instructions[begins[device] : cuts[device][batch]] = kept + moved
            cuts[device][batch] -= len(moved)
        for device, instructions in enumerate(lists):
            part = instructions[begins[device] : cuts[device][batch]]
            kept = [each for each in part if not _leaves_later(each, posted)]
            moved = [each for each in part if _leaves_later(each, posted)]
            instructions[begins[device] : cuts[device][batch]] = kept + moved
            cuts[device][batch] -= len(moved)


def _leaves_later(each: EndlessInstruction, posted: Container[Message]) -> bool:
    return isinstance(each, Transfer) and each.kind == "D" and each.message not in posted


def _middle(
    lists: Sequence[Sequence[EndlessInstruction]], cuts: Sequence[Sequence[int]], per_batch: int, num_batches: int
) -> int | None:
    """Return a batch from which on several segments are alike; None where there is none."""

    def part(device: int, batch: int) -> list[EndlessInstruction]:
        mine = cuts[device]
        return [_relative(each, batch, per_batch) for each in lists[device][mine[batch - 1] : mine[batch]]]

    for first in range(1, num_batches - NUM_COMPARED):
        if all(
            part(device, first) == part(device, first + more) and _is_whole(part(device, first), per_batch)
            for device in range(len(lists))
            for more in range(1, NUM_COMPARED)
        ):
            return first
    return None


def _is_whole(segment: Sequence[EndlessInstruction], per_batch: int) -> bool:
    """Return whether a segment has each instruction once for each number within a batch."""
    found: dict[str, set[int]] = defaultdict(set)
    count = 0
    for each in segment:
        if isinstance(each, Update):
            continue
        name = each.name if isinstance(each, Compute) else each.kind + each.message.channel
        found[name].add(_number_of(each, per_batch) % per_batch)
        count += 1
    return all(len(numbers) == per_batch for numbers in found.values()) and count == per_batch * len(found)
