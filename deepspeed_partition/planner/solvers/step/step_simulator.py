"""One synchronous step in an engine that overlaps transfers with computation, simulated event by event.

Operations are numbered by their position on the path that every micro-batch takes,

    F0 F1 F2 B2 B1 B0           0 1 2 3 4 5 for three stages

Each operation takes the micro-batches in their order, so a count says what has been done. A transfer belongs to
the position before it.

The replay (``replay_step.py``) runs the same rules as another program, which searches nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from deepspeed_partition.planner.allocation import Blocks
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.recomputation import StageCost, first_backward, stage_cost
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.solvers.step import step_memory

Positions = tuple[int, ...]
"""Operations of a device in a step, in order, as positions: the k-th time that a position stands there is
micro-batch k."""
Choice = Callable[[int, list[int], list[int]], int]
"""Function that chooses what a free device runs next. It gets the device and, for each position, how many
micro-batches have come to it and how many it has begun; a negative answer means that the device waits."""


class WaitInCircleError(ValueError):
    """Orders of devices that wait for each other in a circle."""


@dataclass(frozen=True, slots=True)
class StepRun:
    """Events of one simulated step, in ticks. Entries are for each position, then for each micro-batch."""

    ticks: int
    """Ticks until the last stage has ended its all-reduce."""
    begins: list[list[int]]
    ends: list[list[int]]
    sends: list[list[int]]
    """Ticks at which the transfer after each position begins, for each micro-batch; empty where there is none."""
    orders: list[list[int]]
    """Positions that each device ran, in order."""


class StepEngine:
    """Simulator of the steps of an allocation.

    Args:
        cuts: the boundaries of the stages, with 0 and the number of layers.
        devices: the device of each stage.
        allreduce: ticks for each stage; left out, there is one pipeline.
        flushes: Micro-batches of each batch of a step, where the last stage begins no backward of a batch before
            all of its forwards are done. Left out, a backward may follow its own forward.
        recomputed: ranges of layers that are recomputed, for each stage; left out, none is.
    """

    def __init__(
        self,
        times: TimedChain,
        table: StageTable,
        cuts: Sequence[int],
        devices: Sequence[int],
        allreduce: Sequence[int] = (),
        flushes: Sequence[int] | None = None,
        recomputed: Sequence[Blocks] = (),
    ) -> None:
        self.flush_ends = None if flushes is None else frozenset(accumulate(flushes))
        """Counts of forwards of the last stage after which its backwards may begin; None: after each."""
        self.platform: Platform = times.platform
        self.num_stages = len(devices)
        stages = list(pairwise(cuts))
        chosen = recomputed or [()] * len(stages)
        costs = [stage_cost(times, table, *each) for each in zip(stages, chosen, strict=True)]
        beside = times.ticks_beside_layers(cuts, devices)
        down = [cost.forward + more for cost, more in zip(costs, beside, strict=True)]
        up = [cost.backward + more for cost, more in zip(costs, beside, strict=True)]
        self.ticks = [*down, *reversed(up)]
        """Ticks of each position, for one micro-batch."""
        self.device = [*devices, *reversed(devices)]
        self.num_devices = max(devices) + 1
        self.stages_of: list[list[int]] = [[] for _ in range(self.num_devices)]
        """Stages of each device, in their order."""
        for stage, place in enumerate(devices):
            self.stages_of[place].append(stage)
        self.names = [f"F{stage}" for stage in range(len(stages))] + [
            f"B{stage}" for stage in reversed(range(len(stages)))
        ]
        self._describe_links([int(times.one_way[boundary]) for boundary in cuts[1:-1]])
        self.slots = max(1, self.platform.comm_buffers // 2)
        tails = allreduce or [0] * self.num_stages
        self.allreduce = [0] * self.num_stages + list(reversed(tails))
        self.tail = self._tails()
        """Ticks from the end of each position to the end of the step, if nothing waits."""
        self.load = [sum(down[stage] + up[stage] for stage in mine) for mine in self.stages_of]
        """Ticks that each device computes for one micro-batch."""
        self._describe_memory(times, table, stages, chosen, costs)

    def run(self, num_micro_batches: int, choose: Choice, at_most: int | None = None) -> StepRun | None:
        """Simulate one step; return None where it is sure to take longer than ``at_most`` ticks.

        A transfer starts when its link (and its ports, where the platform has some) is free and the receiver has
        fewer than ``slots`` tensors of its kind waiting; of several transfers, the one that became ready first.

        Raises:
            WaitInCircleError: the orders wait for each other in a circle.
        """
        return Simulation(self, num_micro_batches, choose).run(at_most)

    def named(self, orders: Sequence[Sequence[int]]) -> tuple[Order, ...]:
        """Return orders in the form of a plan."""
        result = []
        for order in orders:
            count = [0] * len(self.ticks)
            entries = []
            for position in order:
                entries.append((self.names[position], count[position]))
                count[position] += 1
            result.append(tuple(entries))
        return tuple(result)

    def bound(self, num_micro_batches: int) -> int:
        """Return a lower bound on the step, in ticks: no order has a shorter one.

        A device, a link or a port cannot begin before the first micro-batch has come to it. It then has all
        micro-batches to do, and the last one has to go the rest of the path. Likewise each operation of the path,
        and each transfer: one micro-batch after the other. Likewise a stage that has room for a certain number of
        micro-batches: each takes at least as long as the path below the stage.
        """
        head = [0]
        for ticks, send in zip(self.ticks, self.send, strict=True):
            head.append(head[-1] + ticks + (send or 0))
        size, m = len(self.ticks), num_micro_batches
        bounds = [head[-1] + (m - 1) * max(*self.ticks, *(send or 0 for send in self.send))]
        for place, load in enumerate(self.load):
            first = self.stages_of[place][0]
            bounds.append(head[first] + m * load + self.tail[size - 1 - first])
        for users in self.users:
            first, last = users[0], users[-1]
            load = sum(self.send[position] or 0 for position in users)
            after = self.ticks[last + 1] + self.tail[last + 1]
            bounds.append(head[first] + self.ticks[first] + m * load + after)
        for stage, most in enumerate(self.most_in_flight):
            back = size - 1 - stage
            through = head[back] + self.ticks[back] - head[stage]
            bounds.append(head[stage] + -(-m * through // max(1, min(m, most))) + self.tail[back])
        return max(bounds)

    def peaks(self, run: StepRun) -> list[int]:
        """Return the peak bytes of each device, exactly as the file formats define them."""
        return step_memory.peaks(self, run)

    def _describe_links(self, one_way: Sequence[int]) -> None:
        """Set the transfers of the path, from the ticks of one tensor over each boundary."""
        last = len(self.ticks) - 1
        transfers = [*one_way, 0, *reversed(one_way)]
        self.send: list[int | None] = [
            transfers[position] if self.device[position] != self.device[position + 1] else None
            for position in range(last)
        ] + [None]
        """Ticks of the transfer after each position; None where there is none."""
        ways = [
            () if ticks is None else self.platform.resources(*self.device[position : position + 2])
            for position, ticks in enumerate(self.send)
        ]
        # Links come first: transfers wait in line for these.
        links = dict.fromkeys(way[0] for way in ways if way)
        ports = dict.fromkeys(each for way in ways for each in way[1:])
        number = {each: index for index, each in enumerate([*links, *ports])}
        self.link = [number[way[0]] if way else -1 for way in ways]
        """Number of the link for the transfer after each position; -1 where there is none."""
        self.ways = [tuple(number[each] for each in way) for way in ways]
        """Numbers of all that the transfer after each position occupies: its link, then its ports."""
        self.has_ports = bool(ports)
        self.all_transfers_take_time = all(ticks != 0 for ticks in self.send)
        self.users: list[list[int]] = [[] for _ in number]
        """Positions whose transfers occupy each link and each port."""
        for position, numbers in enumerate(self.ways):
            for each in numbers:
                self.users[each].append(position)
        crossing = [position for position in range(last) if self.send[position] is not None]
        # If several could begin at once, the replay takes the first by name: S, kind, stage before the link.
        by_name = sorted(crossing, key=self._transfer_name)
        self.rank = {position: rank for rank, position in enumerate(by_name)}

    def _describe_memory(
        self,
        times: TimedChain,
        table: StageTable,
        stages: list[tuple[int, int]],
        recomputed: Sequence[Blocks],
        costs: Sequence[StageCost],
    ) -> None:
        self.stash = [cost.stash for cost in costs]
        down = [cost.forward_transient for cost in costs]
        up = [cost.transient for cost in costs]
        self.transient = [*down, *reversed(up)]  # a copy: ``first_backward`` changes
        """Bytes that each position needs only while it runs."""
        self.late_gradients = [0] * len(stages)
        """Bytes of each stage that come with its first backward; contained in ``kept``."""
        self.first_backward = up
        """Transient bytes of each stage in its first backward, with the gradients that have come by then."""
        for place in range(self.num_devices if table.training.has_gradients else 0):
            here = self.stages_of[place]
            come = table.training.late_gradients([stages[stage] for stage in here])
            for stage, late in zip(here, come, strict=True):
                self.late_gradients[stage] = int(late.sum())
                self.first_backward[stage] = first_backward(times, table, stages[stage], recomputed[stage], late)
        self.crossing_bytes = [times.chain.boundary_bytes(stop) for _, stop in stages[:-1]]
        self.most_in_flight = [cost.most_in_flight for cost in costs]
        """Most micro-batches in flight of each stage, if it had its device for itself."""
        self.kept: list[int] = []
        """Bytes of each device for its weights, with all gradients, and for the process itself."""
        self.floor: list[int] = []
        """Bytes of each device after the last backward of a step."""
        for here in self.stages_of:
            mine = [stages[stage] for stage in here]
            self.kept.append(table.training.of(mine) + table.fixed_bytes)
            self.floor.append(self.kept[-1] + table.training.after_backwards(mine))

    def _tails(self) -> list[int]:
        tails = [self.allreduce[-1]]
        for position in range(len(self.ticks) - 1, 0, -1):
            rest = (self.send[position - 1] or 0) + self.ticks[position] + tails[-1]
            tails.append(max(rest, self.allreduce[position - 1]))
        return tails[::-1]

    def _transfer_name(self, position: int) -> str:
        name = self.names[position]
        return f"SF{name[1:]}" if name[0] == "F" else f"SB{int(name[1:]) - 1}"


class Simulation:
    """One step while it is simulated: what has come, begun and ended until now, by position."""

    def __init__(self, engine: StepEngine, num_micro_batches: int, choose: Choice) -> None:
        size = len(engine.ticks)
        self.engine, self.num_micro_batches, self.choose = engine, num_micro_batches, choose
        self.arrived = [num_micro_batches] + [0] * (size - 1)
        self.begun = [0] * size
        self.begins: list[list[int]] = [[] for _ in range(size)]
        self.ends: list[list[int]] = [[] for _ in range(size)]
        self.sends: list[list[int]] = [[] for _ in range(size)]
        self.orders: list[list[int]] = [[] for _ in range(engine.num_devices)]
        self.link_busy = [False] * len(engine.users)
        """Whether each link, and behind them each port, carries a transfer."""
        self.pending: list[list[tuple[int, int, int, int]]] = [[] for _ in engine.users]
        """Tensors that wait for each link: when they were ready, micro-batch, rank, and position before it."""
        self.events: list[tuple[int, int]] = []
        """Heap of ends: ticks and position, and beyond the last position the transfer after it."""

    def run(self, at_most: int | None) -> StepRun | None:
        # This loop is where a search for a step spends its time, so it is one function with local names.
        engine, choose, arrived, begun = self.engine, self.choose, self.arrived, self.begun
        ticks, device, link, ways = engine.ticks, engine.device, engine.link, engine.ways
        begins, ends, orders, events = self.begins, self.ends, self.orders, self.events
        link_busy, pending, rank = self.link_busy, self.pending, engine.rank
        begin_transfers = self._begin_through_ports if engine.has_ports else self._begin_transfers
        size, now = len(ticks), 0
        # The last operation of a device is the backward of its first stage.
        last_of = [size - 1 - stages[0] for stages in engine.stages_of]
        latest = inf if at_most is None else at_most
        slack = [
            latest - self.num_micro_batches * load - engine.tail[last]
            for load, last in zip(engine.load, last_of, strict=True)
        ]
        """Ticks that each device may still be idle, if the step is not to take too long."""
        idle_since = [0] * engine.num_devices
        busy = [False] * engine.num_devices
        idle, links = list(range(engine.num_devices)), set[int]()
        """Devices and links that may start something."""
        flushes = engine.flush_ends
        turn = engine.num_stages if flushes is not None else -1
        push, pop = heapq.heappush, heapq.heappop
        while True:
            while idle:
                place = idle.pop()
                if busy[place]:
                    continue
                position = choose(place, arrived, begun)
                if position < 0:
                    continue
                slack[place] -= now - idle_since[place]
                if slack[place] < 0:
                    return None
                idle_since[place] = now + ticks[position]
                busy[place] = True
                orders[place].append(position)
                begun[position] += 1
                begins[position].append(now)
                push(events, (now + ticks[position], position))
                if position and link[position - 1] >= 0:
                    links.add(link[position - 1])  # the receiver has a free slot
            # An operation that takes no time has ended before a transfer begins at the same instant.
            if links and not (events and events[0][0] == now):
                begin_transfers(links, now)
                continue
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] == now:
                position = pop(events)[1]
                if position >= size:
                    position -= size
                    for each in ways[position]:
                        link_busy[each] = False
                    links.add(link[position])
                    position += 1
                    arrived[position] += 1
                    idle.append(device[position])
                    continue
                ends[position].append(now)
                place = device[position]
                busy[place] = False
                idle.append(place)
                after = link[position]
                if after >= 0:
                    pending[after].append((now, len(ends[position]) - 1, rank[position], position))
                    if not link_busy[after]:
                        links.add(after)
                elif position + 1 == turn:
                    assert flushes is not None
                    if len(ends[position]) in flushes:
                        arrived[turn] = len(ends[position])
                elif position + 1 < size:
                    arrived[position + 1] += 1
        if any(count < self.num_micro_batches for count in begun):
            raise WaitInCircleError("the orders of the devices wait for each other in a circle")
        step = max(each[-1] + tail for each, tail in zip(ends, engine.allreduce, strict=True))
        return StepRun(step, begins, ends, self.sends, orders)

    def _begin_transfers(self, links: set[int], now: int) -> None:
        """Begin what free links may send now; links that may not are taken out."""
        engine, events, size = self.engine, self.events, len(self.engine.ticks)
        sends, begun, slots, busy = self.sends, self.begun, engine.slots, self.link_busy
        ready = []
        for link in links:  # ``_next_transfer`` without ports, in place: a simulation asks nothing more often
            best = None
            for found in () if busy[link] else self.pending[link]:
                _, number, _, position = found
                may_go = number == len(sends[position]) and number - begun[position + 1] < slots
                if may_go and (best is None or found < best):
                    best = found
            if best is not None:
                ready.append((best, link))
        links.clear()
        if not engine.all_transfers_take_time and len(ready) > 1:
            # A transfer that takes no time may let another link choose otherwise at the same instant.
            ready.sort(key=lambda each: (each[0][2], each[0][1]))
            links.update(each for _, each in ready[1:])
            del ready[1:]
        for found, link in ready:
            position = found[3]
            self.pending[link].remove(found)
            busy[link] = True
            sends[position].append(now)
            heapq.heappush(events, (now + (engine.send[position] or 0), size + position))

    def _begin_through_ports(self, links: set[int], now: int) -> None:
        """Begin what may be sent now, where a transfer occupies ports that other links use, too.

        What has ended, or made room, may unblock transfers over any link: all are looked at.
        """
        engine, busy = self.engine, self.link_busy
        links.clear()
        while True:
            lines = (link for link, waiting in enumerate(self.pending) if waiting and not busy[link])
            candidates = (found for link in lines if (found := self._next_transfer(link)) is not None)
            best = min(candidates, default=None)
            if best is None:
                return
            position = best[3]
            for each in engine.ways[position]:
                busy[each] = True
            self.pending[engine.link[position]].remove(best)
            self.sends[position].append(now)
            heapq.heappush(self.events, (now + (engine.send[position] or 0), len(engine.ticks) + position))
            if not engine.all_transfers_take_time:
                links.add(engine.link[position])  # what takes no time ends before the next one begins
                return

    def _next_transfer(self, link: int) -> tuple[int, int, int, int] | None:
        """Return what a free link sends next, one of ``pending``; None: nothing is ready and may go."""
        sends, begun, slots = self.sends, self.begun, self.engine.slots
        ways, busy = self.engine.ways, self.link_busy
        best: tuple[int, int, int, int] | None = None
        for found in self.pending[link]:
            _, number, _, position = found
            may_go = number == len(sends[position]) and number - begun[position + 1] < slots
            may_go = may_go and not any(busy[each] for each in ways[position])
            if may_go and (best is None or found < best):
                best = found
        return best


def in_order(orders: Sequence[Positions]) -> Choice:
    """Return the choice by which each device runs its order, each operation as soon as its tensor is there."""
    following = [iter(order) for order in orders]
    upcoming = [next(each, -1) for each in following]

    def choose(device: int, arrived: list[int], begun: list[int]) -> int:
        position = upcoming[device]
        if position < 0 or begun[position] == arrived[position]:
            return -1
        upcoming[device] = next(following[device], -1)
        return position

    return choose


def one_f_one_b(engine: StepEngine, depths: Sequence[int], num_micro_batches: int) -> tuple[Positions, ...]:
    """Return 1F1B orders of one stage per device: ``depths[stage]`` forwards, then alternate, then drain."""
    orders: list[Positions] = [()] * engine.num_devices
    for stage, depth in enumerate(depths):
        forward, backward = stage, len(engine.ticks) - 1 - stage
        alternating = (backward, forward) * (num_micro_batches - depth)
        orders[engine.device[stage]] = (*[forward] * depth, *alternating, *[backward] * depth)
    return tuple(orders)


def eager(engine: StepEngine, most_in_flight: Sequence[int], *, oldest_first: bool) -> Choice:
    """Return the choice by which a free device runs what is ready: the furthest, or the oldest.

    Args:
        most_in_flight: for each stage, the micro-batches in flight beyond which no forward begins.
        oldest_first: take the oldest micro-batch first; False: the operation that is furthest on the path.
    """
    size = len(engine.ticks)
    mine = [
        [position for position in reversed(range(size)) if engine.device[position] == place]
        for place in range(engine.num_devices)
    ]

    def choose(device: int, arrived: list[int], begun: list[int]) -> int:
        best = -1
        for position in mine[device]:
            count = begun[position]
            if count == arrived[position]:
                continue
            # The device is free, so everything that began there has ended.
            if position < engine.num_stages and count - begun[size - 1 - position] >= most_in_flight[position]:
                continue
            if not oldest_first:
                return position
            if best < 0 or count < begun[best]:
                best = position
        return best

    return choose
