"""How long a step takes where messages share links and the ports of hosts, as connections of a network do.

A plan lets messages through a link or a port one after the other. In a run each flows as soon as both of its ends
have come to it, and what it goes through is shared fairly among all that flow (max-min: the narrowest place first,
its bandwidth in equal parts). So a message that is needed first comes later than the plan has it, beside one that
is needed late:

    port of a host, as planned    |first  |second |           as shared    |first and second|
                                          ^ first is needed                        ^ first is not there

``shared_step_seconds`` runs the lists of instructions that the engine runs, on paper. All-reduces begin after the
last backward of their stage, as in the plan, and use no port.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.schedule.instructions import Compute, DeadlockError, Instruction, LoweringError, Message
from deepspeed_partition.schedule.lowering import lower, seconds_in_step

MOST_COMPUTATIONS = 8192
"""Forwards and backwards of a step that is run on paper: it takes about a millisecond for ten of them."""
_Ends = tuple[int, int]
"""The devices from which and to which a message goes."""
_DONE = 1e-9
"""Part of a message, and of a step, that is rounding."""


def shared_step_seconds(plan: Plan) -> float | None:
    """Return the seconds of a plan's step where messages share what they go through.

    Returns:
        None where hosts have no ports, for a plan without a step, and for more than ``MOST_COMPUTATIONS``.

    Raises:
        LoweringError: the plan cannot be run.
        DeadlockError: its devices wait for each other.
    """
    if plan.step is None or plan.platform.port_bandwidth is None:
        return None
    if sum(map(len, plan.step.order)) > MOST_COMPUTATIONS:
        return None
    program = lower(plan, plan.step.num_micro_batches)
    return _SharedRun(plan, program.lists).run()


def comparable_step_seconds(plans: Sequence[Plan]) -> list[float | None]:
    """Return the seconds of the steps of plans by which they are compared; None for a plan without a step.

    They are those where messages share ports, if all are known, else those of the plans, as where one cannot run.
    """
    with suppress(LoweringError):
        shared = [shared_step_seconds(plan) for plan in plans]
        if not any(seconds is None for seconds in shared):
            return shared
    return [plan.step_seconds for plan in plans]


@dataclass
class _Flow:
    """A message on its way."""

    message: Message
    latency_seconds: float
    """Seconds until its first byte is there."""
    num_bytes: float
    """Bytes that are not there yet."""


@dataclass
class _Network:
    """Messages between devices, in order over each direction."""

    bandwidths: Mapping[Hashable, float]
    """Bytes per second of each link and port."""
    through: Mapping[_Ends, Sequence[Hashable]]
    """Links and ports that messages go through, by their ends."""
    waiting: dict[_Ends, deque[_Flow]] = field(default_factory=lambda: defaultdict(deque))
    """Messages that were sent, and did not begin to flow."""
    flowing: dict[_Ends, _Flow] = field(default_factory=dict)
    posted: set[Message] = field(default_factory=set)
    arrived: set[Message] = field(default_factory=set)
    _rates: dict[_Ends, float] | None = None
    """Bytes per second of what flows; None where that has changed."""

    def send(self, ends: _Ends, flow: _Flow) -> None:
        self.waiting[ends].append(flow)
        self._begin(ends)

    def post(self, ends: _Ends, message: Message) -> None:
        self.posted.add(message)
        self._begin(ends)

    def _begin(self, ends: _Ends) -> None:
        line = self.waiting[ends]
        if line and ends not in self.flowing and line[0].message in self.posted:
            self.flowing[ends] = line.popleft()
            self._rates = None

    def next_seconds(self) -> float:
        """Return the seconds until something arrives, or begins to flow; infinite where nothing is on its way."""
        rates = self._fair_rates()
        return min(
            (
                flow.latency_seconds if flow.latency_seconds > 0 else flow.num_bytes / rates[ends]
                for ends, flow in self.flowing.items()
            ),
            default=math.inf,
        )

    def pass_by(self, seconds: float) -> None:
        """Let messages flow for so long."""
        rates = self._fair_rates()
        for ends, flow in list(self.flowing.items()):
            if flow.latency_seconds > 0:
                flow.latency_seconds = flow.latency_seconds - seconds
                if flow.latency_seconds <= _DONE * seconds:
                    flow.latency_seconds, self._rates = 0.0, None
                continue
            before = flow.num_bytes
            flow.num_bytes -= rates[ends] * seconds
            if flow.num_bytes <= _DONE * before:
                del self.flowing[ends]
                self._rates = None
                self.arrived.add(flow.message)
                self._begin(ends)

    def _fair_rates(self) -> dict[_Ends, float]:
        if self._rates is None:
            self._rates = self._shares()
        return self._rates

    def _shares(self) -> dict[_Ends, float]:
        users: dict[Hashable, set[_Ends]] = defaultdict(set)
        for ends, flow in self.flowing.items():
            if flow.latency_seconds <= 0:
                for place in self.through[ends]:
                    users[place].add(ends)
        left = {place: self.bandwidths[place] for place in users}
        rates: dict[_Ends, float] = {}
        while any(users.values()):
            share, narrowest = min(
                ((left[place] / len(each), place) for place, each in users.items() if each),
                key=lambda pair: pair[0],
            )
            for ends in tuple(users[narrowest]):
                rates[ends] = share
                for place in self.through[ends]:
                    users[place].discard(ends)
                    left[place] -= share
        return rates


class _SharedRun:
    """Run of the lists of all devices at once."""

    def __init__(self, plan: Plan, lists: Sequence[Sequence[Instruction]]) -> None:
        self._lists = lists
        self._devices = [stage.device for stage in plan.stages]
        platform, seconds = plan.platform, seconds_in_step(plan)
        self._latency = platform.latency_seconds
        self._reducing = plan.allreduce_seconds or (0.0,) * len(plan.stages)
        self._end = 0.0
        """Second at which the last all-reduce ends, of the backwards so far."""
        slowest = min(platform.bandwidth, platform.port_bandwidth or platform.bandwidth)
        self._bytes = {
            name[1:]: max(0.0, lasts - self._latency) * slowest
            for name, lasts in seconds.items()
            if name[0] == "S"
        }
        """Bytes of a message, by its direction and boundary (``F0``)."""
        self._seconds = {
            name: lasts + self._copying_seconds(int(name[1:]), platform.copy_bandwidth)
            for name, lasts in seconds.items()
            if name[0] != "S"
        }
        through: dict[_Ends, Sequence[Hashable]] = {}
        bandwidths: dict[Hashable, float] = {}
        for one, other in zip(self._devices, self._devices[1:], strict=False):
            for ends in ((one, other), (other, one)) if one != other else ():
                link, *ports = through[ends] = platform.resources(*ends)
                bandwidths[link] = platform.bandwidth
                bandwidths |= dict.fromkeys(ports, platform.port_bandwidth or platform.bandwidth)
        self._network = _Network(bandwidths, through)

    def _copying_seconds(self, stage: int, copy_bandwidth: float | None) -> float:
        if copy_bandwidth is None:
            return 0.0
        crossing = [self._bytes.get(f"F{boundary}", 0.0) for boundary in (stage - 1, stage)]
        return sum(crossing) / copy_bandwidth

    def run(self) -> float:
        place, over, now = [0] * len(self._lists), [0.0] * len(self._lists), 0.0
        while True:
            moves = True
            while moves:  # what one device does may let another one go on
                moved = [self._advance(device, place, over, now) for device in range(len(self._lists))]
                moves = any(moved)
            waits = [each - now for each in over if each > now]
            seconds = min([self._network.next_seconds(), *waits])
            if math.isinf(seconds):
                break
            self._network.pass_by(seconds)
            now += seconds
            over = [now if abs(each - now) <= _DONE * now else each for each in over]
        if any(at < len(each) for at, each in zip(place, self._lists, strict=True)):
            raise DeadlockError("the devices of the step wait for each other")
        return max(now, self._end)

    def _advance(self, device: int, place: list[int], over: list[float], now: float) -> bool:
        """Run what a device can run now; return whether it has run anything."""
        instructions, begin = self._lists[device], place[device]
        while over[device] <= now and place[device] < len(instructions):
            instruction = instructions[place[device]]
            if isinstance(instruction, Compute):
                over[device] = now + self._seconds[f"{instruction.kind}{instruction.stage}"]
                if instruction.kind in "BW":
                    self._end = max(self._end, over[device] + self._reducing[instruction.stage])
            elif not self._transfers(instruction.kind, instruction.message):
                break
            place[device] += 1
        return place[device] > begin

    def _transfers(self, kind: str, message: Message) -> bool:
        """Run a send, a receive or a wait; return False where it waits still."""
        before, behind = self._devices[message.boundary], self._devices[message.boundary + 1]
        ends = (before, behind) if message.direction == "F" else (behind, before)
        if kind == "S":
            self._network.send(ends, _Flow(message, self._latency, self._bytes[message.channel]))
        elif kind == "R":
            self._network.post(ends, message)
        else:  # W, and D: what has arrived has left
            return message in self._network.arrived
        return True
