"""Lists of instructions of each device, from a timetable, so that no device holds more than the timetable does.

Real devices are sometimes later than on paper. Then more tensors may be at an end of a boundary: those that wait
to be sent, while the other device is late, and those that were posted early. So each list keeps, at each end of a
boundary and beside every computation,

    tensors not known to have left + receives posted  <=  max(comm_buffers, what the timetable has there then)

whatever the other devices do. What a device keeps for backwards depends on its own list alone, so it never holds
more than it does at that place of the timetable. ``D`` waits for the oldest tensor to leave where there would be
no room otherwise; in a run that is on time it has left already, or leaves while the next computation runs on
paper. A receive is posted at the latest before the computation beside which its transfer begins, and as much
earlier as the room allows (not before its message can come: ``postponing.py``).

While a device computes nothing, the receives whose transfers begin then, and the waits that make room for them,
stand in the order of the timetable. Else two devices that were idle would come to wait in a circle, each for a
receive that the other one posts behind its own wait:

    device 0   ... SB1.0 WF1.1 F2.1 DB1.0 RF1.3 B2.1 ...          SB1.0 begins before SF1.3
    device 1   ... SF1.3 F1.4 RB1.0 DF1.3 WB1.0 B1.0 ...          so RB1.0 stands before DF1.3
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import accumulate

from deepspeed_partition.schedule.instructions import (
    Compute,
    Instruction,
    Message,
    Transfer,
    input_of,
    output_of,
    role_of,
)
from deepspeed_partition.schedule.timetable import Timetable


def lists_of(
    timetable: Timetable, comm_buffers: int, *, strict: AbstractSet[tuple[int, int]]
) -> tuple[tuple[Instruction, ...], ...]:
    """Return each device's computations with its transfers, those of each direction in the timetable's order.

    Args:
        comm_buffers: tensors for which there is room at each end of a boundary, whatever the timetable has there.
        strict: the ends of boundaries, as (device, boundary), at which the bound is kept even where the device
            must wait, before a computation, for a transfer that begins while the computation runs on paper. Then
            devices may come to wait in a circle; otherwise never: what stands before a send or a receive waits
            only for transfers that begin before its own in the timetable.
    """
    devices = range(len(timetable.orders))
    return tuple(tuple(_Device(timetable, device, comm_buffers).instructions(strict)) for device in devices)


class _Spans:
    """Spans in which tensors are kept; what ends at an instant is gone before anything begins there."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        lasting = [span for span in spans if span[0] < span[1]]
        self._begins, self._ends = sorted(begin for begin, _ in lasting), sorted(end for _, end in lasting)

    def at(self, instant: int) -> int:
        return bisect_right(self._begins, instant) - bisect_right(self._ends, instant)

    def until(self, instant: int) -> int:
        """Return the number of tensors kept right before an instant."""
        return bisect_left(self._begins, instant) - bisect_left(self._ends, instant)


class _End:
    """One end of a boundary on a device, in the timetable."""

    def __init__(self, timetable: Timetable, device: int, boundary: int) -> None:
        instants = timetable.instants
        messages = [each for each in timetable.messages if each.boundary == boundary]
        sent = [each for each in messages if each.ends(timetable.device_of_stage)[0] == device]
        self.departing = _Spans((instants[each.producer][1], instants[each.transfer][1]) for each in sent)
        received = [each for each in messages if each.ends(timetable.device_of_stage)[1] == device]
        self.arriving = _Spans((instants[each.transfer][0], instants[each.consumer][0]) for each in received)


class _Device:
    """One device, while its list is written.

    Receives are posted at *places*: place 2 j is before the j-th computation waits for its input, 2 j + 1 after
    that.
    """

    def __init__(self, timetable: Timetable, device: int, comm_buffers: int) -> None:
        self.device, self.devices = device, timetable.device_of_stage
        self.order, self.instants = timetable.orders[device], timetable.instants
        self.comm_buffers = comm_buffers
        roles = [(role_of(name), number) for name, number in self.order]
        self.index = {operation: index for index, operation in enumerate(roles)}
        self.spans = [timetable.instants[operation] for operation in roles]
        self.to_send: dict[int, deque[Message]] = defaultdict(deque)
        self.to_post: dict[int, list[Message]] = defaultdict(list)
        for message in timetable.messages:
            source, destination = message.ends(self.devices)
            if source == device:
                self.to_send[destination].append(message)
            elif destination == device:
                self.to_post[source].append(message)
        received = (message for messages in self.to_post.values() for message in messages)
        self.arrivals = sorted(self.instants[message.transfer][0] for message in received)
        mine = {message.boundary for message in timetable.messages if device in message.ends(self.devices)}
        self.ends = {boundary: _End(timetable, device, boundary) for boundary in sorted(mine)}
        self.room = {boundary: self._room(boundary) for boundary in self.ends}
        self.posts = self._places_of_posts()
        self.unsent: dict[int, deque[Message]] = defaultdict(deque)
        """Messages by boundary that are made, and not known to have left."""
        self.open: Counter[int] = Counter()
        """Number of receives by boundary that are posted and not yet waited for."""
        self.sent: set[Message] = set()

    def _most(self, index: int, boundary: int) -> tuple[int, int]:
        """Return the most tensors at an end before a computation waits for its input, and when it begins."""
        begin, over = self.spans[index]
        end = self.ends[boundary]
        waiting = end.departing.until(begin) + end.arriving.until(begin)
        running = end.departing.until(over) + end.arriving.until(over)
        done = end.departing.at(over) + end.arriving.at(over)
        made = output_of(*self.order[index], len(self.devices))
        room = self.comm_buffers
        return max(room, waiting), min(
            max(room, running), max(room, done) - int(made is not None and made.boundary == boundary)
        )

    def _at(self, instant: int, boundary: int) -> int:
        """Return the tensors at an end at an instant of the timetable."""
        end = self.ends[boundary]
        return end.departing.at(instant) + end.arriving.at(instant)

    def _room(self, boundary: int) -> list[int]:
        """Return, for each place, how many receives may be posted early without a wait for later departures."""
        end, room, free = self.ends[boundary], [], 0
        for index, (begin, over) in enumerate(self.spans):
            waiting, running = self._most(index, boundary)
            kept = end.departing.at(begin)
            # What is posted before an idle time is open when the receives of that time are posted.
            idle = (self._at(instant, boundary) for instant in self._idle_arrivals(free, begin))
            left = (max(0, self.comm_buffers - there) for there in idle)
            room.append(min([waiting - kept - end.arriving.until(begin), *left]))
            room.append(running - kept - end.arriving.until(over))
            free = over
        return room

    def _idle_arrivals(self, free: int, begin: int) -> list[int]:
        """Return the instants at which transfers to this device begin while it computes nothing."""
        return self.arrivals[bisect_left(self.arrivals, free) : bisect_left(self.arrivals, begin)]

    def _places_of_posts(self) -> dict[int, list[tuple[int, Message]]]:
        """Return, by place, the receives posted there and the devices that they come from."""
        overs = [over for _, over in self.spans]
        slots = max(1, self.comm_buffers // 2)
        posts: dict[int, list[tuple[int, Message]]] = defaultdict(list)
        for source, messages in self.to_post.items():
            place = 0
            consumers: dict[str, list[int]] = defaultdict(list)
            needed = [2 * self.index[message.consumer] for message in messages]
            # Receives are posted in turn: one is posted before whatever needs a message behind it.
            needed = list(accumulate(reversed(needed), min))[::-1]
            for message, before_needed in zip(messages, needed, strict=True):
                start, consumer = self.instants[message.transfer][0], self.index[message.consumer]
                index = min(bisect_right(overs, start), consumer)
                latest = min(2 * index + int(start >= self.spans[index][0]), before_needed)
                if message.direction == "B":  # a gradient has the shape of its output
                    place = max(place, 2 * self.index[f"F{message.boundary}", message.micro_batch] + 2)
                earliest = place
                before = consumers[message.channel]
                if len(before) >= slots:
                    earliest = max(earliest, 2 * before[-slots] + 1)
                before.append(consumer)
                place, room = max(place, latest), self.room[message.boundary]
                while place > earliest and room[place - 1] > 0:
                    place -= 1
                    room[place] -= 1
                posts[place].append((source, message))
        return posts

    def instructions(self, strict: AbstractSet[tuple[int, int]]) -> Iterator[Instruction]:
        slots = Slots()
        only_forwards = all(name[0] == "F" for name, _ in self.order)
        for index, (name, micro_batch) in enumerate(self.order):
            last_starts = {
                boundary: self.spans[index][int((self.device, boundary) in strict)] for boundary in self.ends
            }
            needed = input_of(name, micro_batch, len(self.devices))
            begin = self.spans[index][0]
            posts, late = self.posts.get(2 * index, []), self.posts.get(2 * index + 1, [])
            idle = [post for post in posts if self.instants[post[1].transfer][0] < begin]
            yield from self._post_in_turn(idle)
            early = [post for post in posts if self.instants[post[1].transfer][0] >= begin]
            self._count(early)
            most = {boundary: self._most(index, boundary) for boundary in self.ends}
            for boundary, (waiting, _) in most.items():
                yield from self._leave(boundary, waiting, last_starts[boundary])
            for source, message in early:
                yield Transfer("R", message, source)
            if needed is not None and needed.boundary in self.ends:
                yield Transfer("W", needed, needed.ends(self.devices)[0])
                self.open[needed.boundary] -= 1
            self._count(late)
            for boundary, (_, running) in most.items():
                yield from self._leave(boundary, running, last_starts[boundary])
            for source, message in late:
                yield Transfer("R", message, source)
            kind, stage = name[0], int(name[1:])
            slot = slots.take(stage, micro_batch) if kind in "Ff" else slots.taken[stage, micro_batch]
            if kind in "BW" or only_forwards:
                slots.give_back(stage, micro_batch)
            yield Compute("F" if kind == "f" else kind, stage, micro_batch, slot, keeps=kind != "f")
            made = output_of(name, micro_batch, len(self.devices))
            if made is not None and made.boundary in self.ends:
                self.unsent[made.boundary].append(made)
            yield from self._send(index)

    def _post_in_turn(self, posts: list[tuple[int, Message]]) -> Iterator[Instruction]:
        """Yield receives whose transfers begin while nothing is computed, and the waits that make room for them.

        Before each of them, each end of a boundary comes to what it has in the timetable when that transfer
        begins; nothing is waited for that begins later, since the other device may post its receive only after it
        has got rid of that tensor.
        """
        for source, message in sorted(posts, key=lambda post: self.instants[post[1].transfer]):
            instant, _ = self.instants[message.transfer]
            for boundary in self.ends:
                most = max(self.comm_buffers, self._at(instant, boundary)) - int(boundary == message.boundary)
                yield from self._leave(boundary, most, instant)
            self._count([(source, message)])
            yield Transfer("R", message, source)

    def _count(self, posts: list[tuple[int, Message]]) -> None:
        self.open.update(message.boundary for _, message in posts)

    def _leave(self, boundary: int, most: int, last_start: int) -> Iterator[Instruction]:
        """Yield waits until no more than ``most`` tensors are at that end, or none whose transfer began before."""
        unsent = self.unsent[boundary]
        while unsent and len(unsent) + self.open[boundary] > most and unsent[0] in self.sent:
            if self.instants[unsent[0].transfer][0] >= last_start:
                break
            yield Transfer("D", unsent[0], unsent.popleft().ends(self.devices)[1])

    def _send(self, index: int) -> Iterator[Instruction]:
        for destination, messages in self.to_send.items():
            while messages and self.index[messages[0].producer] <= index:
                self.sent.add(messages[0])
                yield Transfer("S", messages.popleft(), destination)


class Slots:
    """Numbers of slots; the lowest free one is given out."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.taken: dict[tuple[int, int], int] = {}

    def take(self, stage: int, micro_batch: int) -> int:
        slot = heapq.heappop(self.free) if self.free else len(self.taken)
        self.taken[stage, micro_batch] = slot
        return slot

    def give_back(self, stage: int, micro_batch: int) -> None:
        heapq.heappush(self.free, self.taken.pop((stage, micro_batch)))
