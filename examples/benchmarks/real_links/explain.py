"""Which links explain the steps that ``main.py`` measured?

    python examples/benchmarks/real_links/explain.py [results/4_hosts_202611.json]

The engine's lists of instructions run over a simulated network. Messages flow at once, and what they go through
shares its bandwidth fairly among them (max-min). A message flows when its receive is posted. Three networks: links
that both directions share; both directions at once, through one port per host; and the same where the word that a
receive is posted waits behind what goes the same way between the two hosts, as over a connection of gloo.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from even_stages import FORWARD_SECONDS, even_chain, plans_for

from deepspeed_partition import Platform
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message
from deepspeed_partition.schedule.lowering import lower

NETWORKS = {
    "links": {"half_duplex": True, "ports": False, "words_wait": False},
    "ports": {"half_duplex": False, "ports": True, "words_wait": False},
    "ports, words wait": {"half_duplex": False, "ports": True, "words_wait": True},
}
ROUNDING = 1e-9
Ends = tuple[int, int]
"""The hosts from which and to which something goes."""


@dataclass
class _Flowing:
    message: Message
    num_bytes: float
    """Bytes that have not come yet; none for the word that a receive is posted."""
    latency_seconds: float = 0.0


@dataclass
class Network:
    """Messages on their way. ``bandwidth`` is that of a link and of a port, in bytes per second."""

    num_bytes: int
    bandwidth: float
    latency_seconds: float
    half_duplex: bool
    ports: bool
    words_wait: bool
    connections: dict[Ends, deque[_Flowing]] = field(default_factory=dict)
    to_send: dict[tuple[Ends, str], deque[Message]] = field(default_factory=dict)
    posted: set[Message] = field(default_factory=set)
    arrived: set[Message] = field(default_factory=set)

    def send(self, message: Message) -> None:
        self.to_send.setdefault((_ends(message), message.direction), deque()).append(message)
        self._begin(message)

    def post(self, message: Message) -> None:
        back = self.connections.get(_ends(message)[::-1])
        if self.words_wait and back:
            back.append(_Flowing(message, 0.0))
        else:
            self._told(message)

    def _told(self, message: Message) -> None:
        self.posted.add(message)
        self._begin(message)

    def _begin(self, message: Message) -> None:
        line = self.to_send.get((_ends(message), message.direction), deque())
        while line and line[0] in self.posted:
            found = _Flowing(line.popleft(), self.num_bytes, self.latency_seconds)
            self.connections.setdefault(_ends(message), deque()).append(found)

    def next_seconds(self) -> float | None:
        """Return the seconds until a message arrives, or its latency is over; None where none is on its way."""
        heads = [each[0] for each in self.connections.values() if each]
        waits = [each.latency_seconds for each in heads if each.latency_seconds > 0]
        waits += [flow.num_bytes / rate for flow, rate in self._rates()]
        return min(waits, default=None)

    def pass_by(self, seconds: float) -> None:
        rates = self._rates()
        for line in self.connections.values():
            if line:
                line[0].latency_seconds = max(0.0, line[0].latency_seconds - seconds)
        for flow, rate in rates:
            flow.num_bytes -= rate * seconds
        for line in list(self.connections.values()):
            while line and line[0].num_bytes <= self.num_bytes * ROUNDING:
                done = line.popleft()
                if done.message in self.posted:
                    self.arrived.add(done.message)
                else:
                    self._told(done.message)

    def _rates(self) -> list[tuple[_Flowing, float]]:
        """Return the bytes per second of each message that flows: fair shares of all that it goes through."""
        flows = {ends: each[0] for ends, each in self.connections.items() if each and not each[0].latency_seconds}
        through: dict[Any, list[Ends]] = {}
        for ends in flows:
            link: Any = frozenset(ends) if self.half_duplex else ends
            for each in (link, *(("out", ends[0]), ("in", ends[1]))[: 2 * self.ports]):
                through.setdefault(each, []).append(ends)
        left, rates = dict.fromkeys(through, self.bandwidth), dict[Ends, float]()
        while len(rates) < len(flows):
            without = {each: [user for user in users if user not in rates] for each, users in through.items()}
            share, narrowest = min(
                ((left[each] / len(users), place) for place, (each, users) in enumerate(without.items()) if users)
            )
            for user in list(without.values())[narrowest]:
                rates[user] = share
                for each, users in through.items():
                    left[each] -= share * (user in users)
        return [(flow, rates[ends]) for ends, flow in flows.items()]


def _ends(message: Message) -> Ends:
    before, behind = message.boundary, message.boundary + 1
    return (before, behind) if message.direction == "F" else (behind, before)


def step_seconds(lists: Sequence[Sequence[Instruction]], network: Network) -> float:
    """Run the lists of a contiguous partition, of equal stages that sleep; return the seconds of the step."""
    place, over, now = [0] * len(lists), [0.0] * len(lists), 0.0
    while True:
        moved = True
        while moved:
            moved = False
            for host, instructions in enumerate(lists):
                while over[host] <= now and place[host] < len(instructions):
                    instruction = instructions[place[host]]
                    if isinstance(instruction, Compute):
                        over[host] = now + FORWARD_SECONDS * (1 if instruction.kind == "F" else 2)
                    elif instruction.kind == "S":
                        network.send(instruction.message)
                    elif instruction.kind == "R":
                        network.post(instruction.message)
                    elif instruction.message not in network.arrived:  # W, and D: what has arrived has left
                        break
                    place[host] += 1
                    moved = True
        waits = [each - now for each in over if each > now]
        if (arrival := network.next_seconds()) is not None:
            waits.append(arrival)
        if not waits:
            break
        seconds = max(min(waits), 1e-12)
        network.pass_by(seconds)
        now += seconds
        over = [now if abs(each - now) < ROUNDING else each for each in over]
    assert all(map(len, lists)) and place == [len(each) for each in lists], "devices wait for each other"
    return now


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "results" / "4_hosts_202611.json"
    print("measured over simulated,", ", ".join(NETWORKS))
    for job in json.loads(path.read_text())["jobs"]:
        link = job["link"]
        for row in job["rows"]:
            numbers = round(row["megabytes"] * 1e6 / 4)
            platform = Platform(
                num_devices=4,
                memory_bytes=10**12,
                bandwidth=link["bandwidth"],
                latency_seconds=link["latency_seconds"],
            )
            for name, plan in plans_for(even_chain(4, numbers), platform).items():
                assert plan.step is not None
                lists = lower(plan, plan.step.num_micro_batches).lists
                measured = row["engines"][name]["seconds"]
                found = [
                    measured
                    / step_seconds(
                        lists, Network(4 * numbers, platform.bandwidth, platform.latency_seconds, **options)
                    )
                    for options in NETWORKS.values()
                ]
                rate = job["megabits_per_second"] or "loopback"
                print(f"{rate!s:>8} {row['megabytes']:4} MB {name:10}", *(f"{each:6.2f}" for each in found))


if __name__ == "__main__":
    main()
