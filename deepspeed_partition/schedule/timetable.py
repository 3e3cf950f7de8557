"""Timetables: one run of a whole pipeline on paper, with the begin and end of each computation and transfer.

The lists of instructions are written from it (``emit.py``). It is in whole ticks, since events at the same
instant must be found equal: what ends there makes room for what begins there. Ticks are decimal, as the planner's
are, so that a plan's times are whole ticks and what is at one instant in the planner's run of the plan is so here.
Were they rounded, a plan would need more memory here than it says.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.schedule.instructions import DeadlockError, LoweringError, Message, input_of, role_of

Operation = tuple[str, int]
"""Computation or transfer, and its micro-batch: ``("F0", 3)``, ``("SF0", 3)``."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """Run of a pipeline in which nothing begins before what it needs."""

    device_of_stage: tuple[int, ...]
    orders: tuple[Order, ...]
    """Computations of each device, in order, as the plan names them (``f0``, ``I0``)."""
    messages: tuple[Message, ...]
    """Messages, by the beginning of their transfer."""
    instants: Mapping[Operation, tuple[int, int]]
    """Begin and end of each operation, in ticks; computations by their role (``role_of``)."""


def of_pattern(
    plan: Plan, num_micro_batches: int, kinds: str, also: Sequence[tuple[Operation, Operation]] = ()
) -> Timetable:
    """Return the pattern of a plan from its first micro-batch to its last: fill, steady state, drain.

    Of all operations that may come next, the one that begins first is taken. What must come before what is stated
    explicitly, for rounded times may say otherwise, and a plan may allow a step fewer micro-batches in flight
    than its pattern has: each micro-batch follows its path, micro-batches follow one another, a forward waits
    until its stage has room, and devices and links do one thing at a time.

    Args:
        also: pairs of operations of which the first must end before the second begins.

    Raises:
        LoweringError: the pattern lacks an operation.
    """
    return _PatternRun(plan, num_micro_batches, kinds, also).run()


class _PatternRun:
    """Run of a pattern over all micro-batches.

    An operation on a micro-batch is a pair of numbers: its position on the road, and the micro-batch.
    """

    def __init__(
        self, plan: Plan, num_micro_batches: int, kinds: str, also: Sequence[tuple[Operation, Operation]]
    ) -> None:
        self.plan, self.num_micro_batches = plan, num_micro_batches
        self.devices = tuple(stage.device for stage in plan.stages)
        self.road = _road(self.devices, kinds)
        placed = {each.operation: each for each in plan.operations}
        missing = [name for name in self.road if name not in placed]
        if missing:
            raise LoweringError(
                f"the pattern of the plan has no {missing[0]}: every stage has its forward and backward, and "
                "every cut between two devices its transfers"
            )
        operations = [placed[name] for name in self.road]
        clock = clock_of({each.operation: each.duration_seconds for each in operations})
        self.period = clock.ticks(plan.period_seconds)
        self.begins = [each.shift * self.period + clock.ticks(each.start_seconds) for each in operations]
        """Ticks at which each operation of the road begins on micro-batch 0, by the pattern."""
        self.lasts = [clock.ticks(each.duration_seconds) for each in operations]
        self.places: list[tuple[object, ...]] = [
            (each.device,)
            if each.link is None
            else plan.platform.resources(*(each.link if each.operation[1] == "F" else each.link[::-1]))
            for each in operations
        ]
        """Device of each operation of the road, or the link and the ports that it occupies."""
        self.followers: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        """Operations on micro-batches that each of them must come before."""
        self.num_before: Counter[tuple[int, int]] = Counter()
        """Number of those that must come before each of them, and have not come yet."""
        self._state_order()
        for before, after in also:
            self._comes_before((self.road.index(before[0]), before[1]), (self.road.index(after[0]), after[1]))

    def _state_order(self) -> None:
        """State what must come before what: the path, the order of micro-batches, and room in each stage."""
        for position, name in enumerate(self.road):
            for micro_batch in range(self.num_micro_batches):
                here = position, micro_batch
                self._comes_before(here, (position, micro_batch + 1))
                if position + 1 < len(self.road):
                    self._comes_before(here, (position + 1, micro_batch))
                if name[0] == "B":
                    stage = int(name[1:])
                    next_in_flight = micro_batch + self.plan.stages[stage].in_flight
                    self._comes_before(here, (self.road.index(f"F{stage}"), next_in_flight))

    def _comes_before(self, before: tuple[int, int], after: tuple[int, int]) -> None:
        if after[1] < self.num_micro_batches:
            self.followers[before].append(after)
            self.num_before[after] += 1

    def run(self) -> Timetable:
        orders: list[list[Operation]] = [[] for _ in range(self.plan.platform.num_devices)]
        messages: list[Message] = []
        instants: dict[Operation, tuple[int, int]] = {}
        free: dict[object, int] = defaultdict(int)
        earliest: dict[tuple[int, int], int] = defaultdict(int)
        ready = [(self.begins[0], 0, 0)]
        while ready:
            begin, position, micro_batch = heapq.heappop(ready)
            name, places = self.road[position], self.places[position]
            begin = max(begin, *(free[place] for place in places))
            end = begin + self.lasts[position]
            instants[name, micro_batch] = begin, end
            free.update(dict.fromkeys(places, end))
            if name[0] == "S":
                messages.append(Message(name[1], int(name[2:]), micro_batch))
            else:
                orders[self.devices[int(name[1:])]].append((name, micro_batch))
            for after in self.followers[position, micro_batch]:
                earliest[after] = max(earliest[after], end)
                self.num_before[after] -= 1
                if not self.num_before[after]:
                    planned = after[1] * self.period + self.begins[after[0]]
                    heapq.heappush(ready, (max(planned, earliest[after]), *after))
        return Timetable(self.devices, tuple(tuple(order) for order in orders), tuple(messages), instants)


def _road(devices: Sequence[int], kinds: str) -> list[str]:
    """Return the operations that every micro-batch goes through: ``F0 SF0 F1 B1 SB0 B0``."""
    last = len(devices) - 1
    crosses = [devices[boundary] != devices[boundary + 1] for boundary in range(last)]
    road = []
    for stage in range(last + 1):
        road += [f"F{stage}"] + [f"SF{stage}"] * (stage < last and crosses[stage])
    for stage in reversed(range(last + 1)) if "B" in kinds else ():
        road += [f"SB{stage}"] * (stage < last and crosses[stage]) + [f"B{stage}"]
    return road


def within_backward(orders: Sequence[Order]) -> frozenset[tuple[int, int]]:
    """Return the stages and micro-batches whose backward runs the forward again: no ``R0`` stands for it."""
    entries = [(name[0], (int(name[1:]), number)) for order in orders for name, number in order]
    return frozenset(of for kind, of in entries if kind == "f") - {of for kind, of in entries if kind == "R"}


def clock_of(seconds: Mapping[str, float]) -> Clock:
    """Return a clock on which all times of a plan are whole ticks, as on the one that the plan was made with.

    That one resolves the sum of all layers and transfers, which is this one's total at the least. The time of a
    backward may include a forward that is run again.
    """
    transfers = (Fraction(lasts) for name, lasts in seconds.items() if name[0] == "S")
    stages = {name[1:] for name in seconds if name[0] != "S"}
    longer = (max(seconds.get(f"{kind}{stage}", 0.0) for kind in "FBIW") for stage in stages)
    total = sum(transfers, Fraction(0)) + sum(map(Fraction, longer), Fraction(0))
    return Clock.resolving(total)


def of_orders(
    orders: Sequence[Order],
    devices: Sequence[int],
    seconds: Mapping[str, float],
    receive_slots: int,
    platform: Platform | None = None,
) -> Timetable:
    """Run all devices at once, in virtual time: the operation that can start first is always next.

    A link between two devices, and a port, carries one message at a time; of those that could go first, the one
    that was ready first. Over one boundary and direction messages go in the order in which the receiver needs
    them, and at most ``receive_slots`` have started and are not used yet.

    A second forward comes behind its first, a second half of a backward behind the other half.

    Args:
        seconds: how long each operation takes; 1 where it is not there. A backward or first half of one that runs
            the forward again, where no ``R0`` stands, takes as long as ``R0`` longer.
        platform: what it says of links and ports. None: links carry one message at a time, and there are no ports.

    Raises:
        DeadlockError: the orders of the devices wait for each other in a circle.
    """
    return _VirtualRun(orders, tuple(devices), seconds, receive_slots, platform).run()


class _VirtualRun:
    def __init__(
        self,
        orders: Sequence[Order],
        devices: tuple[int, ...],
        seconds: Mapping[str, float],
        receive_slots: int,
        platform: Platform | None,
    ) -> None:
        self.orders, self.devices, self.platform = orders, devices, platform
        clock = clock_of(seconds)
        self.ticks = {name: clock.ticks(lasts) for name, lasts in seconds.items()}
        self.unknown = clock.ticks(1.0)
        self.position = [0] * len(orders)
        self.device_free = [0] * len(orders)
        self.free_from: dict[object, int] = defaultdict(int)
        """Ticks at which the last message of each link and port has come."""
        self.instants: dict[Operation, tuple[int, int]] = {}
        self.again = within_backward(orders)
        """Stages and micro-batches whose backward runs the forward again."""
        entries = (entry for order in orders for entry in order)
        self.recomputed = {(int(name[1:]), number) for name, number in entries if name[0] == "R"}
        """Stages and micro-batches whose forward runs again before the backward."""
        self.queues: dict[str, deque[Message]] = defaultdict(deque)
        """Messages of each channel that have not started, in the order of their consumption."""
        self.room: dict[str, deque[int]] = {}
        """Ticks, for each channel, at which a receive slot became free."""
        for order in orders:
            for name, micro_batch in order:
                message = self._received_for(name, micro_batch)
                if message is not None:
                    self.queues[message.channel].append(message)
                    self.room.setdefault(message.channel, deque([0] * receive_slots))

    def run(self) -> Timetable:
        started: list[Message] = []
        while True:
            computations = [self._computation(device) for device in range(len(self.orders))]
            transfers = [self._transfer(channel) for channel in self.queues]
            # At one instant, computations come first: they make room, and nothing is lost by it.
            computation = min((each for each in computations if each is not None), default=None)
            transfer = min((each for each in transfers if each is not None), default=None)
            if transfer is not None and (computation is None or transfer[0] < computation[0]):
                started.append(self._start_transfer(transfer[0], transfer[-1]))
            elif computation is not None:
                self._compute(*computation)
            else:
                break
        if any(position < len(order) for position, order in zip(self.position, self.orders, strict=True)):
            raise DeadlockError(self._circle())
        return Timetable(self.devices, tuple(self.orders), tuple(started), self.instants)

    def _received_for(self, name: str, micro_batch: int) -> Message | None:
        """Return the message that a computation needs from another device; None where it needs none."""
        message = input_of(name, micro_batch, len(self.devices))
        return message if message is not None and len(set(message.ends(self.devices))) == 2 else None

    def _lasts(self, name: str) -> int:
        return self.ticks.get(name, self.unknown)

    def _computes_for(self, name: str, micro_batch: int) -> int:
        """Return the ticks that a computation lasts, with the forward that it may run again."""
        again = name[0] in "BI" and (int(name[1:]), micro_batch) in self.again
        return self._lasts(name) + (self._lasts(f"R{name[1:]}") if again else 0)

    def _ended(self, operation: Operation) -> int | None:
        return self.instants[operation][1] if operation in self.instants else None

    def _needs(self, name: str, micro_batch: int) -> Iterator[int | None]:
        """Yield the ticks at which each thing that a computation needs is there; None while that is not known."""
        message = input_of(name, micro_batch, len(self.devices))
        if message is not None:
            travels = self._received_for(name, micro_batch) is not None
            yield self._ended(message.transfer if travels else message.producer)
        if name[0] not in "Ff":
            yield self._ended((f"{'B' if name[0] == 'W' else 'F'}{name[1:]}", micro_batch))
        if name[0] in "BI" and (int(name[1:]), micro_batch) in self.recomputed:
            yield self._ended((f"R{name[1:]}", micro_batch))

    def _computation(self, device: int) -> tuple[int, int] | None:
        """Return when a device can start its next computation, in ticks; None while that is not known."""
        if self.position[device] == len(self.orders[device]):
            return None
        needs = list(self._needs(*self.orders[device][self.position[device]]))
        known = [instant for instant in needs if instant is not None]
        return (max([self.device_free[device], *known]), device) if len(known) == len(needs) else None

    def _compute(self, start: int, device: int) -> None:
        name, micro_batch = self.orders[device][self.position[device]]
        self.position[device] += 1
        message = self._received_for(name, micro_batch)
        if message is not None:
            self.room[message.channel].append(start)
        self.device_free[device] = start + self._computes_for(name, micro_batch)
        self.instants[role_of(name), micro_batch] = start, self.device_free[device]

    def _transfer(self, channel: str) -> tuple[int, int, int, Message] | None:
        """Return when a channel can start its next message; its time of readiness and micro-batch break ties."""
        queue, room = self.queues[channel], self.room[channel]
        ready = self._ended(queue[0].producer) if queue else None
        if ready is None or not room:
            return None
        start = max(ready, room[0], *(self.free_from[each] for each in self._way(queue[0])))
        return start, ready, queue[0].micro_batch, queue[0]

    def _way(self, message: Message) -> tuple[object, ...]:
        """Return the link and the ports that a message occupies."""
        ends = message.ends(self.devices)
        return (frozenset(ends),) if self.platform is None else self.platform.resources(*ends)

    def _start_transfer(self, start: int, message: Message) -> Message:
        self.queues[message.channel].popleft()
        self.room[message.channel].popleft()
        end = start + self._lasts(f"S{message.channel}")
        self.instants[message.transfer] = start, end
        self.free_from.update(dict.fromkeys(self._way(message), end))
        return message

    def _circle(self) -> str:
        """Return the text of a circle: a device, the one that it waits for, and so on, until one comes again."""
        waiting = {
            device: self.orders[device][position]
            for device, position in enumerate(self.position)
            if position < len(self.orders[device])
        }
        device = next(iter(waiting))
        seen: list[int] = []
        steps: list[str] = []
        while device not in seen:
            seen.append(device)
            name, micro_batch = waiting[device]
            message = input_of(name, micro_batch, len(self.devices))
            # What stands later in the same order: its own forward, or the half that comes first.
            missing = f"{'B' if name[0] == 'W' else 'F'}{name[1:]}", micro_batch
            if name[0] in "BI" and missing in self.instants:
                missing = f"R{name[1:]}", micro_batch
            if message is not None and message.producer not in self.instants:
                missing = message.producer
            steps.append(
                f"device {device} cannot run {name}.{micro_batch} before {missing[0]}.{missing[1]} "
                f"of device {self.devices[int(missing[0][1:])]}"
            )
            device = self.devices[int(missing[0][1:])]
        steps = steps[seen.index(device) :]
        return f"the orders of the devices wait for each other in a circle: {', '.join(steps)}"
