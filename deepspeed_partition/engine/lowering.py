"""From a plan to what each device runs: lists of instructions, known before anything starts.

    device 0   F0.0 SF0.0 RB0.0 F0.1 SF0.1 WB0.0 RB0.1 B0.0 WB0.1 B0.1
    device 1   RF0.0 WF0.0 RF0.1 F1.0 B1.0 SB0.0 WF0.1 F1.1 B1.1 SB0.1

Instructions are named as in a plan, with the number of the micro-batch behind the point:

- ``F1.0``, ``B1.0``: the forward and the backward of stage 1. Each has a *slot*, a number from 0 up that is its
  device's alone from the forward to the backward: the micro-batches in flight. A device never has two of them in
  one slot, so the number of slots is the depth of the schedule.
- ``SF0.0``: sends the output of stage 0 to stage 1; ``SB0.0``: sends its gradient back. Neither waits: the tensor
  is kept until it has left.
- ``RF0.0``, ``RB0.0``: posts the receive, that is, makes room for the tensor. It does not wait either.
- ``WF0.0``, ``WB0.0``: waits until the tensor is there, and hands its room on. *Only these wait.*

Neighbouring stages of one device hand over without any of the last four.

Where a receive is posted. At most ``receive_slots`` tensors of one cut and direction are posted and not yet
waited for (what the plan reserves beside the micro-batches in flight). A receive stands as early in its list as
that allows, so that a tensor travels while its device computes something else. A gradient is posted after the
forward whose output it belongs to, whose shape it has.

Why nothing waits forever. Between two devices, messages of one direction are matched in the order in which they
were sent and posted (as NCCL does, and gloo without tags), whatever cuts they belong to, so a message may be held
up by one in front of it that has no room. Therefore the lists are written down from one run of the whole
pipeline in virtual time, in which a transfer starts when its tensor is there and its receiver has room: the
instants of that run are an order of all instructions of all devices in which none comes before what it
waits for. Sends and receives of each direction are listed in the order of that run, so whatever the real
times are, some device can always go on. The run itself can only stop if the orders of forwards and backwards
wait for each other in a circle, which is refused with the circle. ``dry_run.py`` checks the finished lists without
any of this reasoning.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_partition.planner.errors import MadPipeError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.schedule import Order


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
    def producer(self) -> tuple[str, int]:
        """The computation that makes it."""
        return (f"F{self.cut}" if self.direction == "F" else f"B{self.cut + 1}"), self.micro_batch

    @property
    def consumer(self) -> tuple[str, int]:
        """The computation that needs it."""
        return (f"F{self.cut + 1}" if self.direction == "F" else f"B{self.cut}"), self.micro_batch


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


@dataclass(frozen=True, slots=True)
class Transfer:
    """``SF2.5``, ``RF2.5``, ``WF2.5`` and the same with ``B``: this device's part in bringing a message over."""

    kind: str
    """``S`` sends, ``R`` posts the receive, ``W`` waits for what was posted."""
    message: Message
    peer: int
    """The other device."""

    def __str__(self) -> str:
        return f"{self.kind}{self.message.channel}.{self.message.micro_batch}"


Instruction = Compute | Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every device runs for one batch of micro-batches."""

    device_of_stage: tuple[int, ...]
    num_micro_batches: int
    receive_slots: int
    """The most tensors of one cut and direction that are posted and not yet waited for."""
    lists: tuple[tuple[Instruction, ...], ...]
    """One for each device."""

    def __str__(self) -> str:
        return "\n".join(
            f"device {device}   {' '.join(map(str, instructions))}"
            for device, instructions in enumerate(self.lists)
        )

    def num_slots(self, device: int) -> int:
        """The most micro-batches in flight on a device, over all its stages."""
        return max((each.slot + 1 for each in self.lists[device] if isinstance(each, Compute)), default=0)


def lower(plan: Plan, num_micro_batches: int) -> Program:
    """The lists of one training step of a plan.

    Its ``order``, where it has one for this number of micro-batches, else its pattern with fill and drain. A
    pattern is kept within the micro-batches in flight that the plan promises: a forward that comes too early for
    them is put off.

    Raises:
        LoweringError: an order that is not complete, or not on its devices.
        DeadlockError: an order whose devices wait for each other in a circle.
    """
    _check_count(num_micro_batches)
    if plan.step is not None and plan.step.num_micro_batches == num_micro_batches:
        orders: Sequence[Order] = plan.step.order
    else:
        orders = _orders_of_pattern(plan, num_micro_batches, "FB")
    return _with_plans_transfers(plan, orders)


def lower_evaluation(plan: Plan, num_micro_batches: int) -> Program:
    """The lists of one evaluation: the forwards of the plan's pattern, each as early as its input is there."""
    _check_count(num_micro_batches)
    return _with_plans_transfers(plan, _orders_of_pattern(plan, num_micro_batches, "F"))


def _check_count(num_micro_batches: int) -> None:
    if num_micro_batches < 1:
        raise LoweringError(f"a batch has at least one micro-batch, not {num_micro_batches}")


def _with_plans_transfers(plan: Plan, orders: Sequence[Order]) -> Program:
    durations = {operation.operation: operation.duration_seconds for operation in plan.operations}
    devices = [stage.device for stage in plan.stages]
    return with_transfers(
        orders, devices, receive_slots=max(1, plan.platform.comm_buffers // 2), seconds=durations
    )


def _orders_of_pattern(plan: Plan, num_micro_batches: int, kinds: str) -> list[Order]:
    """Each device's computations in the order in which the pattern begins them.

    Of all that may come next, always what begins first. What must come before what is put down explicitly, for
    rounded times may say otherwise: each micro-batch takes its road, micro-batches follow one another, and a
    forward waits until its stage has room.
    """
    num_stages, period = len(plan.stages), plan.period_seconds
    road = [f"F{stage}" for stage in range(num_stages)]
    if "B" in kinds:
        road += [f"B{stage}" for stage in reversed(range(num_stages))]
    offset = {each.operation: each.shift * period + each.start_seconds for each in plan.operations}
    missing = [name for name in road if name not in offset]
    if missing:
        raise LoweringError(
            f"the pattern of the plan has no {missing[0]}: every stage has its forward and backward"
        )
    followers: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # of (position, micro-batch)
    num_before: Counter[tuple[int, int]] = Counter()

    def comes_before(before: tuple[int, int], after: tuple[int, int]) -> None:
        if after[1] < num_micro_batches:
            followers[before].append(after)
            num_before[after] += 1

    for position in range(len(road)):
        for micro_batch in range(num_micro_batches):
            here = position, micro_batch
            comes_before(here, (position, micro_batch + 1))
            if position + 1 < len(road):
                comes_before(here, (position + 1, micro_batch))
            if road[position][0] == "B":
                stage = int(road[position][1:])
                comes_before(here, (stage, micro_batch + plan.stages[stage].in_flight))
    orders: list[list[tuple[str, int]]] = [[] for _ in range(plan.platform.num_devices)]
    ready = [(offset[road[0]], 0, 0)]
    while ready:
        _, position, micro_batch = heapq.heappop(ready)
        name = road[position]
        orders[plan.stages[int(name[1:])].device].append((name, micro_batch))
        for after in followers[position, micro_batch]:
            num_before[after] -= 1
            if not num_before[after]:
                heapq.heappush(ready, (after[1] * period + offset[road[after[0]]], *after))
    return [tuple(order) for order in orders]


def with_transfers(
    orders: Sequence[Order],
    device_of_stage: Sequence[int],
    *,
    receive_slots: int = 1,
    seconds: Mapping[str, float] | None = None,
) -> Program:
    """Orders of forwards and backwards (or of forwards alone) as lists with transfers and slots.

    Args:
        orders: for each device its computations, such as ``("F0", 3)``; together all of them, once each.
        device_of_stage: of each stage of the chain.
        receive_slots: the most tensors of one cut and direction that are posted and not yet waited for.
        seconds: how long each operation takes (``"F0"``, ``"SF0"``), by which transfers of different cuts that
            share a direction between two devices take turns. Left out, all take equally long.

    Raises:
        LoweringError: a computation is missing, stands twice, or is on another device than its stage.
        DeadlockError: the devices wait for each other in a circle.
    """
    devices = tuple(device_of_stage)
    num_micro_batches = _check_orders(orders, devices)
    run = _VirtualRun(orders, devices, receive_slots, seconds or {})
    sequence = run.messages_in_order()
    lists = [_list_of(device, orders[device], devices, sequence, receive_slots) for device in range(len(orders))]
    return Program(
        device_of_stage=devices,
        num_micro_batches=num_micro_batches,
        receive_slots=receive_slots,
        lists=tuple(lists),
    )


def _check_orders(orders: Sequence[Order], devices: Sequence[int]) -> int:
    """The number of micro-batches of complete orders."""
    found = Counter(entry for order in orders for entry in order)
    twice = [entry for entry, count in found.items() if count > 1]
    if twice:
        raise LoweringError(f"{twice[0][0]} of micro-batch {twice[0][1]} stands twice in the orders")
    kinds = "FB" if any(name[0] == "B" for name, _ in found) else "F"
    num_micro_batches = max((micro_batch for _, micro_batch in found), default=0) + 1
    for stage, device in enumerate(devices):
        for kind in kinds:
            for micro_batch in range(num_micro_batches):
                if (f"{kind}{stage}", micro_batch) not in found:
                    raise LoweringError(f"{kind}{stage} of micro-batch {micro_batch} is missing from the orders")
                del found[f"{kind}{stage}", micro_batch]
        if device >= len(orders):
            raise LoweringError(
                f"stage {stage} is on device {device} and there are orders for {len(orders)} devices"
            )
    if found:
        name, micro_batch = next(iter(found))
        raise LoweringError(f"{name} of micro-batch {micro_batch} in the orders is no computation of these stages")
    for device, order in enumerate(orders):
        for name, _ in order:
            place = devices[int(name[1:])]
            if place != device:
                raise LoweringError(
                    f"{name} stands in the order of device {device}, its stage is on device {place}"
                )
    return num_micro_batches


def _input_of(name: str, micro_batch: int, devices: Sequence[int]) -> Message | None:
    """What a computation needs from another stage, wherever that is; None at the ends of the chain."""
    stage = int(name[1:])
    if name[0] == "F":
        return Message("F", stage - 1, micro_batch) if stage > 0 else None
    return Message("B", stage, micro_batch) if stage + 1 < len(devices) else None


def _ends(message: Message, devices: Sequence[int]) -> tuple[int, int]:
    """The devices that a message comes from and goes to."""
    ends = devices[message.cut], devices[message.cut + 1]
    return ends if message.direction == "F" else (ends[1], ends[0])


def _received_for(name: str, micro_batch: int, devices: Sequence[int]) -> Message | None:
    """What a computation needs from another device, if anything."""
    message = _input_of(name, micro_batch, devices)
    return None if message is None or devices[message.cut] == devices[message.cut + 1] else message


class _VirtualRun:
    """All devices at once, in virtual time: always what can start first.

    A link between two devices carries one message at a time. Over one cut and direction messages go in the order
    in which the receiver needs them.
    """

    def __init__(
        self, orders: Sequence[Order], devices: Sequence[int], receive_slots: int, seconds: Mapping[str, float]
    ) -> None:
        self.orders, self.devices = orders, devices
        self.receive_slots, self.seconds = receive_slots, seconds
        self.position = [0] * len(orders)
        self.device_free = [0.0] * len(orders)
        self.link_free: dict[frozenset[int], float] = defaultdict(float)
        self.ended: dict[tuple[str, int], float] = {}
        self.arrived: dict[Message, float] = {}
        self.queues: dict[str, deque[Message]] = defaultdict(deque)
        """Of each channel: what has not started, in the order of its consumption."""
        self.room: dict[str, deque[float]] = {}
        """Of each channel: the instants at which a receive slot became free."""
        for order in orders:
            for name, micro_batch in order:
                message = _received_for(name, micro_batch, devices)
                if message is not None:
                    self.queues[message.channel].append(message)
                    self.room.setdefault(message.channel, deque([0.0] * receive_slots))

    def messages_in_order(self) -> list[Message]:
        """All messages by the beginning of their transfer."""
        started: list[Message] = []
        while True:
            computations = [self._computation(device) for device in range(len(self.orders))]
            transfers = [self._transfer(channel) for channel in self.queues]
            # At one instant computations first: they make room, and nothing is lost by it.
            computation = min((each for each in computations if each is not None), default=None)
            transfer = min((each for each in transfers if each is not None), default=None)
            if transfer is not None and (computation is None or transfer[0] < computation[0]):
                self._start_transfer(*transfer)
                started.append(transfer[1])
            elif computation is not None:
                self._compute(*computation)
            else:
                break
        if any(position < len(order) for position, order in zip(self.position, self.orders, strict=True)):
            raise DeadlockError(self._circle())
        return started

    def _needs(self, name: str, micro_batch: int) -> Iterator[float | None]:
        """When each thing that a computation needs is there; None while that is not known."""
        message = _input_of(name, micro_batch, self.devices)
        if message is not None:
            travels = _received_for(name, micro_batch, self.devices) is not None
            yield self.arrived.get(message) if travels else self.ended.get(message.producer)
        if name[0] == "B":
            yield self.ended.get((f"F{name[1:]}", micro_batch))

    def _computation(self, device: int) -> tuple[float, int] | None:
        """When a device can start its next computation."""
        if self.position[device] == len(self.orders[device]):
            return None
        needs = list(self._needs(*self.orders[device][self.position[device]]))
        known = [instant for instant in needs if instant is not None]
        return (max([self.device_free[device], *known]), device) if len(known) == len(needs) else None

    def _compute(self, start: float, device: int) -> None:
        name, micro_batch = self.orders[device][self.position[device]]
        self.position[device] += 1
        message = _received_for(name, micro_batch, self.devices)
        if message is not None:
            self.room[message.channel].append(start)
        self.device_free[device] = self.ended[name, micro_batch] = start + self.seconds.get(name, 1.0)

    def _transfer(self, channel: str) -> tuple[float, Message] | None:
        """When a channel can start its next message."""
        queue, room = self.queues[channel], self.room[channel]
        if not queue or not room or queue[0].producer not in self.ended:
            return None
        message = queue[0]
        link = frozenset(_ends(message, self.devices))
        return max(self.ended[message.producer], room[0], self.link_free[link]), message

    def _start_transfer(self, start: float, message: Message) -> None:
        self.queues[message.channel].popleft()
        self.room[message.channel].popleft()
        end = start + self.seconds.get(f"S{message.channel}", 1.0)
        self.arrived[message] = self.link_free[frozenset(_ends(message, self.devices))] = end

    def _circle(self) -> str:
        """From a device that waits to the one that it waits for, until one comes again."""
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
            message = _input_of(name, micro_batch, self.devices)
            missing = (f"F{name[1:]}", micro_batch)  # its own forward, which stands later in the same order
            if message is not None and message.producer not in self.ended:
                missing = message.producer
            steps.append(
                f"device {device} cannot run {name}.{micro_batch} before {missing[0]}.{missing[1]} "
                f"of device {self.devices[int(missing[0][1:])]}"
            )
            device = self.devices[int(missing[0][1:])]
        steps = steps[seen.index(device) :]
        return f"the orders of the devices wait for each other in a circle: {', '.join(steps)}"


def _list_of(
    device: int, order: Order, devices: Sequence[int], sequence: Sequence[Message], receive_slots: int
) -> tuple[Instruction, ...]:
    """One device's computations with its transfers, those of each direction in the order of ``sequence``."""
    to_send: dict[int, deque[Message]] = defaultdict(deque)
    to_post: dict[int, deque[Message]] = defaultdict(deque)
    for message in sequence:
        source, destination = _ends(message, devices)
        if source == device:
            to_send[destination].append(message)
        elif destination == device:
            to_post[source].append(message)
    instructions: list[Instruction] = []
    done: set[tuple[str, int]] = set()
    num_open: Counter[str] = Counter()  # of each channel: posted and not yet waited for

    def post() -> None:
        for source, messages in to_post.items():
            while messages and num_open[messages[0].channel] < receive_slots:
                message = messages[0]
                if message.direction == "B" and (f"F{message.cut}", message.micro_batch) not in done:
                    break
                num_open[message.channel] += 1
                instructions.append(Transfer("R", messages.popleft(), source))

    slots = _Slots()
    only_forwards = all(name[0] == "F" for name, _ in order)
    post()
    for name, micro_batch in order:
        needed = _received_for(name, micro_batch, devices)
        if needed is not None:
            instructions.append(Transfer("W", needed, _ends(needed, devices)[0]))
            num_open[needed.channel] -= 1
            post()
        stage = int(name[1:])
        slot = slots.take(stage, micro_batch) if name[0] == "F" else slots.give_back(stage, micro_batch)
        if only_forwards:
            slots.give_back(stage, micro_batch)
        instructions.append(Compute(name[0], stage, micro_batch, slot))
        done.add((name, micro_batch))
        for destination, messages in to_send.items():
            while messages and messages[0].producer in done:
                instructions.append(Transfer("S", messages.popleft(), destination))
        post()
    return tuple(instructions)


class _Slots:
    """The lowest free numbers."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.taken: dict[tuple[int, int], int] = {}

    def take(self, stage: int, micro_batch: int) -> int:
        slot = heapq.heappop(self.free) if self.free else len(self.taken)
        self.taken[stage, micro_batch] = slot
        return slot

    def give_back(self, stage: int, micro_batch: int) -> int:
        slot = self.taken.pop((stage, micro_batch))
        heapq.heappush(self.free, slot)
        return slot
