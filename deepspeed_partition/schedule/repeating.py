"""Timetables that repeat themselves from the first batch on, for given orders of the devices.

A run in virtual time that takes the transfer first that is ready first need not come to repeat itself: the turns
of transfers on a link depend on what came before, and settle late or never. So the turns are chosen here, once for
all batches, and each operation gets an instant that is the same in every batch, one *period* later:

    instant(operation, batch) = instant(operation, 0) + batch * period

What must come before what is a graph whose nodes are the operations of one batch, and whose arcs say how many
batches later: instants are longest paths in it, and the period is the shortest for which there are any, that is,
the largest circle by time per batch (F. Baccelli et al., Synchronization and Linearity, 1992, section 2.3).

First each link carries any number of messages at once. The instants that come of it say whose turn it is on each
link and port, and with these turns the instants are found again. No turns chosen so wait in a circle, since
whatever comes before something else in the first instants begins earlier in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.schedule.instructions import DeadlockError, Message, input_of
from deepspeed_partition.schedule.timetable import Operation, Timetable, clock_of

Numbers = NDArray[np.int64]
ROUNDS_BETWEEN_LOOKS = 16
"""Rounds of longer paths after which circles are looked for."""


class RepeatingRun:
    """Run of orders that are the same in every batch.

    Args:
        orders: for each device, its computations of one period, such as ``("F0", 3)``, in which micro-batches of
            earlier batches have smaller numbers; each computation once for each place in a batch.
        devices: the device of each stage.
        per_batch: number M of micro-batches of a batch.
        seconds: how long each operation takes.
        receive_slots: messages of one boundary and direction that have started and are not used yet.
        platform: what it says of links and ports.
        waits: pairs of operations of which the first must end before the second begins, in every batch.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Operation]],
        devices: Sequence[int],
        per_batch: int,
        seconds: Mapping[str, float],
        receive_slots: int,
        platform: Platform,
        waits: Sequence[tuple[Operation, Operation]],
    ) -> None:
        self._orders, self._devices, self._per_batch = orders, tuple(devices), per_batch
        self._platform, clock = platform, clock_of(seconds)
        self._ticks = {name: max(1, clock.ticks(lasts)) for name, lasts in seconds.items()}
        """Durations. None is 0, so that of two operations in turn the second begins later."""
        self._node: dict[Operation, int] = {}
        """Number of each operation, by its name and the place of its micro-batch in its batch."""
        self._arcs: list[tuple[int, int, int, int]] = []
        """What comes before what: both nodes, ticks between their begins, and batches."""
        self._state_order(receive_slots, waits)
        self._period, self._begins = _instants(len(self._node), self._arcs, self._least_period())
        self._give_turns()
        self._period, self._begins = _instants(len(self._node), self._arcs, self._period)
        self.period_seconds = clock.seconds(self._period)
        """Seconds from one batch to the next."""

    def timetable(self, num_batches: int) -> Timetable:
        """Return the run of batches 0 to ``num_batches`` - 1."""
        instants: dict[Operation, tuple[int, int]] = {}
        for (name, place), node in self._node.items():
            for batch in range(num_batches):
                begin = int(self._begins[node]) + batch * self._period
                instants[name, batch * self._per_batch + place] = begin, begin + self._ticks[name]
        found: list[list[Operation]] = [[] for _ in self._orders]
        for (name, number), _ in sorted(instants.items(), key=lambda each: (each[1], each[0])):
            if name[0] != "S":
                found[self._devices[int(name[1:])]].append((name, number))
        transfers = [each for each in instants if each[0][0] == "S"]
        messages = [Message(name[1], int(name[2:]), number) for name, number in sorted(transfers, key=self._turn)]
        return Timetable(self._devices, tuple(map(tuple, found)), tuple(messages), instants)

    def _comes_before(self, before: Operation, after: Operation, ticks: int | None = None) -> None:
        """State that an operation begins after another one has ended, or so many ticks after its begin."""
        (name, number), (_, later) = before, after
        here, there = (self._of(each) for each in (before, after))
        lag = later // self._per_batch - number // self._per_batch
        self._arcs.append((here, there, self._ticks[name] if ticks is None else ticks, lag))

    def _of(self, operation: Operation) -> int:
        name, number = operation
        return self._node.setdefault((name, number % self._per_batch), len(self._node))

    def _state_order(self, receive_slots: int, waits: Sequence[tuple[Operation, Operation]]) -> None:
        """State the paths of the micro-batches, the orders of the devices, and the room of each receiver."""
        last = len(self._devices) - 1
        for order in self._orders:
            channels: dict[str, list[Message]] = defaultdict(list)
            for name, number in order:
                message = input_of(name, number, last + 1)
                if message is not None:
                    if len(set(message.ends(self._devices))) == 2:
                        self._comes_before(message.producer, message.transfer)
                        self._comes_before(message.transfer, (name, number))
                        channels[message.channel].append(message)
                    else:
                        self._comes_before(message.producer, (name, number))
                if name[0] == "B":
                    self._comes_before((f"F{name[1:]}", number), (name, number))
            for before, after in self._in_turn(order):
                self._comes_before(before, after)
            for messages in channels.values():
                taken = [each.consumer for each in messages]
                turns = self._in_turn([each.transfer for each in messages])
                for before, after in turns:
                    self._comes_before(before, after)
                for index, message in enumerate(messages):
                    batches, place = divmod(index - receive_slots, len(messages))
                    name, number = taken[place]
                    self._comes_before((name, number + batches * self._per_batch), message.transfer, ticks=0)
        for before, after in waits:
            self._comes_before(before, after)

    def _in_turn(self, order: Sequence[Operation]) -> list[tuple[Operation, Operation]]:
        """Return the pairs of operations that follow one another, the first one of the next period included."""
        if not order:
            return []
        name, number = order[0]
        return list(pairwise([*order, (name, number + self._per_batch)]))

    def _least_period(self) -> int:
        return max(sum(self._ticks[name] for name, _ in order) for order in self._orders)

    def _turn(self, operation: Operation) -> tuple[int, Operation]:
        """Return by what transfers stand in turn: their begin, and something that no two have in common."""
        name, number = operation
        batch, place = divmod(number, self._per_batch)
        return int(self._begins[self._node[name, place]]) + batch * self._period, operation

    def _give_turns(self) -> None:
        """Let transfers that have a link or a port in common come one after the other."""
        sharing: dict[object, list[Operation]] = defaultdict(list)
        for name, place in self._node:
            if name[0] == "S":
                first = Message(name[1], int(name[2:]), place)
                # The batch of which it begins in the first period.
                batch = -(int(self._begins[self._node[name, place]]) // self._period)
                for resource in self._platform.resources(*first.ends(self._devices)):
                    sharing[resource].append((name, place + batch * self._per_batch))
        for transfers in sharing.values():
            for before, after in self._in_turn(sorted(transfers, key=self._turn)):
                self._comes_before(before, after)


def _instants(num_nodes: int, arcs: Sequence[tuple[int, int, int, int]], period: int) -> tuple[int, Numbers]:
    """Return the shortest period of this length at the least, and when each node begins in batch 0, from 0 on.

    Args:
        arcs: tail, head, ticks and batches of each: ``begin(head) + batches * period >= begin(tail) + ticks``.

    Raises:
        DeadlockError: some operations come before themselves.
    """
    arcs = sorted(arcs, key=lambda each: each[1])
    tails, heads, ticks, lags = (np.array(each, dtype=np.int64) for each in zip(*arcs, strict=True))
    reached, firsts = np.unique(heads, return_index=True)
    counts = np.diff([*firsts, len(arcs)])
    places = np.arange(len(arcs))
    while True:
        begins = np.zeros(num_nodes, dtype=np.int64)
        longest = np.full(num_nodes, -1, dtype=np.int64)
        """For each node, the arc by which its begin was put off for the last time."""
        circle: list[int] = []
        num_rounds = 0
        while not circle:
            found = begins[tails] + ticks - lags * period
            latest = np.maximum.reduceat(found, firsts)
            later = latest > begins[reached]
            if not later.any():
                return period, begins
            which = np.where(found == np.repeat(latest, counts), places, len(arcs))
            begins[reached[later]] = latest[later]
            longest[reached[later]] = np.minimum.reduceat(which, firsts)[later]
            num_rounds += 1
            if num_rounds % ROUNDS_BETWEEN_LOOKS == 0:
                circle = _circle(longest, tails)
        num_batches = int(lags[circle].sum())
        if num_batches <= 0:
            raise DeadlockError("the orders of the devices wait for each other in a circle, batch after batch")
        # A path that grows for ever: the period must be as long as this circle takes for each of its batches.
        period = -(-int(ticks[circle].sum()) // num_batches)


def _circle(longest: Numbers, tails: Numbers) -> list[int]:
    """Return the arcs of a circle in which each node was put off by the one before; nothing if there is none."""
    seen = np.zeros(len(longest), dtype=np.int64)
    for start in range(len(longest)):
        node, arcs = start, []
        while not seen[node] and longest[node] >= 0:
            seen[node] = start + 1
            arcs.append(int(longest[node]))
            node = int(tails[longest[node]])
        if longest[node] >= 0 and seen[node] == start + 1:
            nodes = [start, *(int(tails[each]) for each in arcs)]
            return arcs[nodes.index(node) :]
    return []
