"""Lower bounds of a step: no order of its micro-batches is shorter, of any allocation that may be chosen.

A device whose first layer is l is idle while the first micro-batch comes to it, at least ``F(l)``, the forwards of
the layers before, and a transfer; and behind its last backward for ``B(l)``. Devices have distinct first layers,
the first of all is 0, and a device has only layers behind its first one. So within T ticks a device with first
layer l has at most

    (T - head(l) - tail(l)) / m       ticks of layers, for m micro-batches,

and the layers up to any one must have room on the devices whose first layers are among them (``_fits``). The same
holds for forwards alone (behind the last one, a micro-batch goes to the end and all the way back), for backwards
alone, and for bytes times ticks: by Little's law a micro-batch holds ``stash(l)`` while l and all layers behind it
compute, and weights stay all the time. What a device can have is less than its room where layers do not fill it:

- where the layers are of few kinds, the largest sum of layers that fits, in its time and its memory;
- for any superadditive function u, ``sum u(layer) <= u(room)``: ``u(x) = floor(x / t)`` for times t of layers
  counts layers (dual feasible functions; S. Fekete and J. Schepers, "New classes of fast lower bounds for bin
  packing problems", 2001).

A forward and a backward of one stage take what they take beside their layers, on each device.

Besides there are the path of a micro-batch, each layer alone with its memory, and links. All times are least ones:
without recomputation, without transfers that an allocation might avoid. Memory counts what any order holds:
gradients come in the middle of a step, and layers that may be recomputed may keep nothing.

Contiguous partitions have a tighter bound. In a partition whose cuts before layer k take S ticks for a tensor one
way, the stage of layers k to l needs ``2 S + X(k, l)`` ticks for its work, its link, its turn (the way to the end
and back), and its memory. The least maximum over all partitions is found by bisection: the least S for each layer
and number of stages at which every stage so far needs at most T.

Method: own; not in the papers. Cost for L layers and P devices: O(L log P) for each of some hundred decisions, and
for contiguous partitions O(P L^2) for each of at most 55 decisions, fewer where ``MOST_WORK`` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from heapq import heappush, heappushpop
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import LayerProfile
from deepspeed_partition.planner.solvers.bounds import blocks_bound, with_savings
from deepspeed_partition.planner.solvers.interface import Cuts, Problem
from deepspeed_partition.planner.solvers.step.memory_bounds import MemoryBound
from deepspeed_partition.planner.solvers.step.segment_bounds import SegmentBound, least_from, num_decisions
from deepspeed_partition.planner.solvers.step.stage_needs import FAR, StageNeeds
from deepspeed_partition.planner.solvers.step.window_bounds import WindowBound

MOST_SUMS = 20_000
"""Most sums of layers of a device that are listed."""
MOST_COUNTED = 12
"""Most times t for which layers are counted by ``floor(x / t)``."""
MOST_WORK = 3 * 10**8
"""Most numbers that the bound of contiguous partitions looks at."""
FEW_DECISIONS = 10
"""Number of decisions with which a good partition is looked for."""
ROUNDING = 1e-9
"""Relative error that products of bytes and ticks may have."""
BOUND_SECONDS = 5e-6
"""Most time of the processor for the bound of any allocation, for each pair of first and last layer of a stage."""
Integers = NDArray[np.int64]


def most_bound_seconds(problem: Problem) -> float:
    """Return the seconds of the processor that :func:`step_lower_bound` takes at most."""
    return BOUND_SECONDS * problem.chain.num_layers**2


def step_lower_bound(problem: Problem, *, contiguous: bool) -> int:
    """Return ticks than which no step is shorter.

    Args:
        contiguous: bound the steps of contiguous partitions alone.
    """
    unit, bound = _of_any_allocation(problem)
    return unit * (StepBounds(problem).of_contiguous(bound) if contiguous else bound)


_known: WeakKeyDictionary[StageTable, dict[tuple[object, ...], tuple[int, int]]] = WeakKeyDictionary()
"""Bounds of any allocation, for as long as the tables live that they are of: those of long chains are large."""


def _of_any_allocation(problem: Problem) -> tuple[int, int]:
    """Return the bound of any allocation, and the ticks of its unit; found once, whatever the constraints.

    Algorithms of a comparison ask for the same one.
    """
    known = _known.setdefault(problem.table, {})
    decisive = (
        problem.times, problem.chain, problem.platform, problem.num_micro_batches, problem.flushes,
        problem.num_pipelines, problem.recomputation is not None, problem.per_micro_batch,
    )  # fmt: skip
    if decisive not in known:
        bounds = StepBounds(problem)
        known[decisive] = bounds.unit, bounds.of_any_allocation()
    return known[decisive]


class StepBounds:
    """Lower bounds of the step of a problem; ticks and bytes are those of the chain, per micro-batch."""

    def __init__(self, problem: Problem) -> None:
        assert problem.num_micro_batches is not None
        self.problem, self.m = problem, problem.num_micro_batches
        chain, times, platform = problem.chain, problem.times, problem.platform
        self.size = chain.num_layers
        self.num_devices = min(platform.num_devices, self.size)
        allreduce = [times.clock.ticks(each) for each in problem.allreduce_seconds(tuple(range(self.size + 1)))]
        most = int(times.compute[-1]) + int(times.round_trip.sum()) + times.operation
        longest = 4 * self.m * most + max(allreduce)
        self.unit = 1 + longest // 2**62
        """Ticks in which everything here is counted, rounded down, so that sums have 64 bits."""
        self.f, self.b = np.diff(times.forward) // self.unit, np.diff(times.backward) // self.unit
        self.F, self.B, self.send = _prefix(self.f), _prefix(self.b), times.one_way[:-1] // self.unit
        self.beside = self.m * (times.operation // self.unit)
        """Ticks that the forwards of a device take beside its layers, or its backwards, at least: one stage's."""
        self.c, self.C = self.f + self.b, self.F + self.B
        self.on_link = self.m + (1 if platform.duplex == "full" else self.m)
        """Tensors that go over a link one after the other at the least: all both ways, or where directions do not
        wait for each other all one way and the last of them back."""
        reduce = np.array(allreduce, dtype=np.int64) // self.unit
        # From the backward of a layer to the end of the step: through each layer before, and its all-reduce.
        latest = np.maximum.accumulate(reduce - self.B[:-1])
        self.after: Integers = self.B[:-1] + latest
        """Ticks from the end of the backward of each layer to the end of the step, shape (L,)."""
        self.head: Integers = self.F[:-1] + self.send
        """Ticks before the first forward of a device, by its first layer, shape (L,)."""
        behind = np.concatenate([[0], self.B[1:-1] + latest[:-1]])
        self.path: Integers = self.F[:-1] + np.where(np.arange(self.size), behind, reduce)
        """Ticks before the forwards and behind the backwards of a device, without transfers, shape (L,)."""
        self.tail: Integers = np.maximum(reduce, self.send + behind)
        """Ticks behind the last backward of a device, by its first layer, shape (L,)."""
        first, last = (problem.flushes[0], problem.flushes[-1]) if problem.flushes else (1, 1)
        self.first_backward = int(self.F[-1]) + (first - 1) * int(self.f.max())
        """Ticks before the first backward of all."""
        self.last_forward = int(self.B[-1] + max(latest[-1], ((last - 1) * self.b + latest).max()))
        """Ticks behind the last forward of the last layer."""
        self.flushes_once = problem.flushes is not None and len(problem.flushes) == 1
        self.least_idle = self._least_idle()
        """Ticks that so many devices idle at least, all together; entry 0 is for none."""
        self._describe_memory()

    def _describe_memory(self) -> None:
        problem = self.problem
        chain, platform = problem.chain, problem.platform
        self.room = platform.memory_bytes - platform.fixed_bytes
        self.stash = [0 if self.may_run_twice(layer) else chain.stash(layer) for layer in chain.layers]
        """Bytes that each micro-batch holds for each layer, at least."""
        self.saved = [self._saved_by(index) for index in range(self.size)]
        """Bytes times ticks that a micro-batch does not hold of each layer if it runs twice, at most."""
        self.savings = [
            (self.saved[index], int(self.f[index]))
            for index, layer in enumerate(chain.layers)
            if self.may_run_twice(layer)
        ]
        ends = 2 * platform.comm_buffers
        sizes = sorted(ends * chain.boundary_bytes(boundary) for boundary in range(1, self.size))
        self.buffers = [0, *accumulate(sizes, initial=0)]
        """Bytes that are reserved at boundaries, at least, by the number of devices."""
        copies, seen = Fraction(str(platform.weight_copies)), set[str]()
        self.weights: list[int] = []
        """Bytes for the weights of each layer before their gradients come, at least."""
        for layer in chain.layers:
            shared = sum(size for name, size in layer.shared_weights if name in seen)
            seen |= {name for name, _ in layer.shared_weights}
            own, kept = layer.weight_bytes - shared, layer.training_bytes
            if kept is None:
                self.weights.append(int(copies * own))
            else:
                kept -= layer.gradient_bytes
                self.weights.append(
                    max(0, kept - (layer.training_bytes or 0) * shared // max(1, layer.weight_bytes) - 1)
                )

    def may_run_twice(self, layer: LayerProfile) -> bool:
        """Return whether a plan may recompute a layer."""
        return self.problem.recomputation is not None and layer.recomputable

    def _saved_by(self, index: int) -> int:
        """Return the bytes times ticks that recomputing a layer saves for each micro-batch, at most.

        Its stash is there while it runs again and backward; of layers that were measured while they ran that is
        not known.
        """
        layer = self.problem.chain.layers[index]
        if not self.may_run_twice(layer):
            return 0
        begins = index + 1 if layer.running_bytes is None else index
        return self.problem.chain.stash(layer) * int(self.C[-1] - self.C[begins])

    def room_besides_weights(self, count: int) -> int:
        """Return the bytes of so many devices besides weights and buffers, at most."""
        return count * self.room - sum(self.weights) - self.buffers[count]

    def lost(self, room: int) -> int:
        """Return the bytes times ticks that the bytes besides weights are idle, on the devices that idle least."""
        return self.room * self.least_idle[room // self.room]

    # Any allocation

    def of_any_allocation(self) -> int:
        """Return ticks than which no step of any allocation is shorter."""
        blocks = blocks_bound(self.problem.times, self.num_devices) // self.unit
        bound = max(int(self._of_layers().max()), self.m * blocks)
        bound = max(bound, self._of_all_devices(), MemoryBound(self).least())
        for decision in self._decisions():
            bound = _least(decision, bound, self._longest())
        needs = StageNeeds(self, self.problem.table.is_stage)
        if num_decisions(self):
            bound = SegmentBound(self, needs).least(bound)
        return WindowBound(self, needs).least(bound)

    def _longest(self) -> int:
        """Return ticks in which everything may run, one after the other, on one device."""
        return int(
            self.m * self.C[-1] + 2 * self.beside
            + self.head.max() + self.tail.max() + self.last_forward + self.first_backward
        )  # fmt: skip

    def _of_layers(self) -> Integers:
        """Return the ticks that the step needs for each layer, shape (L,)."""
        m, F, B = self.m, self.F, self.B
        work = F[:-1] + m * self.c + 2 * self.beside + self.after
        backwards = self.first_backward + B[-1] - B[1:] + m * self.b + self.beside + self.after
        forwards = F[:-1] + m * self.f + self.beside + F[-1] - F[1:] + self.last_forward
        result: Integers = np.maximum(np.maximum(work, backwards), forwards)
        if self.flushes_once:
            result = np.maximum(result, work + self.C[-1] - self.C[1:])
        for index, (stash, weights) in enumerate(zip(self.stash, self.weights, strict=True)):
            if stash:
                most = max(1, (self.room - weights) // stash)
                turns = -(-m // most)
                through = int(self.C[-1] - self.C[index])
                result[index] = max(int(result[index]), int(F[index] + self.after[index]) + turns * through)
        return result

    def _of_all_devices(self) -> int:
        """Return the ticks in which all devices together have time and memory, fill and drain counted.

        For each number of devices, what they compute and idle is no more than their time, and what is stashed no
        more than the memory that weights leave; layers that may run twice are the cheapest that make it so.
        """
        idle = [least + 2 * self.beside * count for count, least in enumerate(self.least_idle)]
        best: Fraction | None = None
        stashed = sum(
            self.problem.chain.stash(layer) * int(self.C[-1] - self.C[index])
            for index, layer in enumerate(self.problem.chain.layers)
        )
        total = self.m * int(self.C[-1])
        counts = range(1, self.num_devices + 1)
        for count in sorted(counts, key=lambda count: Fraction(total + idle[count], count)):
            room = self.room_besides_weights(count)
            if best is not None and best * count <= total + idle[count]:
                break
            if room <= 0:
                continue
            work = Fraction(total + idle[count], self.m)
            lost = Fraction(self.lost(room), self.m)
            found = with_savings(work, stashed + lost, self.savings, room, count)
            best = found * self.m if best is None else min(best, found * self.m)
        return 0 if best is None else int(best)

    def _least_idle(self) -> list[int]:
        """Return the ticks that so many devices idle at least, all together; entry 0 is for none.

        The i-th device to be reached, of q, begins with a layer behind the one before. The tensors that come to it
        go over a link of their own on the way to all devices behind it, too: ``q - i`` times, both ways.
        """
        own, result = self.path, [0]
        for count in range(1, self.num_devices + 1):
            least = np.full(self.size, own[0], dtype=np.int64)
            for place in range(1, count):
                here = least[:-1] + own[1:] + 2 * (count - place) * self.send[1:]
                shorter: Integers = np.minimum.accumulate(here)
                least = np.concatenate([[np.iinfo(np.int64).max // 2], shorter])
            result.append(int(least[-1]))
        return result

    def _decisions(self) -> list[Callable[[int], bool]]:
        """Return questions whether a step may take T ticks; a no holds for smaller T, too."""
        kinds = (
            (_Layers(self.c, self._sums(self.c), self._most_compute()), self.head + self.tail + 2 * self.beside),
            (_Layers(self.f, self._sums(self.f)), self.head + self.last_forward + self.beside),
            (_Layers(self.b, self._sums(self.b)), self.first_backward + self.tail + self.beside),
        )
        result = [self._by_numbers(layers, idle, 1) for layers, idle in kinds]
        result += [
            self._by_numbers(layers, idle, ticks) for layers, idle in kinds for ticks in _typical(layers.ticks)
        ]
        if self.flushes_once:
            result.append(self._has_room_with_flush)
        if any(self.stash):
            result.append(self._has_memory)
        return result

    def _sums(self, ticks: Integers) -> Integers | None:
        """Return the sums of layers that a device has memory for, sorted; None where there are too many."""
        kinds = Counter((int(each), self.stash[index] + self.weights[index]) for index, each in enumerate(ticks))
        number = 1
        for count in kinds.values():
            number *= count + 1
            if number > MOST_SUMS:
                return None
        sums, sizes = np.zeros(1, dtype=np.int64), np.zeros(1)
        for (each, size), count in kinds.items():
            counts = np.arange(count + 1)
            sums = (sums[:, None] + counts * each).ravel()
            sizes = (sizes[:, None] + counts * float(size)).ravel()
        result: Integers = np.unique(sums[sizes <= max(0, self.room) * (1 + ROUNDING)])
        return result

    def _most_compute(self) -> int:
        """Return the most ticks of layers, of parts of layers too, that a device has memory for."""
        sizes = [stash + weights for stash, weights in zip(self.stash, self.weights, strict=True)]
        left, most = self.room, Fraction(0)
        order = sorted(range(self.size), key=lambda index: sizes[index] / max(1, int(self.c[index])))
        for index in order:
            part = Fraction(1) if sizes[index] <= left else Fraction(max(0, left), sizes[index])
            most += part * int(self.c[index])
            left -= sizes[index]
            if part < 1:
                break
        return int(most)

    def _by_numbers(self, layers: _Layers, idle: Integers, ticks: int) -> Callable[[int], bool]:
        """Return the question whether devices have time for all layers, each counted as ``floor(x / ticks)``."""
        items = layers.ticks // ticks

        def decide(T: int) -> bool:
            rooms = layers.filled((T - idle) // self.m)
            counts = np.where(rooms < 0, -1, rooms // ticks)
            return _fits(items, counts, self._may_begin(T), self.num_devices)

        return decide

    def _may_begin(self, T: int) -> NDArray[np.bool_]:
        """Return whether a device may begin with each layer: its link has time for all tensors, both ways."""
        result: NDArray[np.bool_] = self.C[:-1] + self.on_link * self.send <= T
        return result

    def _has_room_with_flush(self, T: int) -> bool:
        """Return whether devices have time where every forward comes before any backward.

        Between the last forward and the first backward of a device, whose last layer is k, a micro-batch goes from
        k to the end and back. Last layers are distinct, too.
        """
        rooms = np.sort(T - self.head - self.tail)[::-1][: self.num_devices]
        turns = (self.C[-1] - self.C[1:])[::-1][: self.num_devices]
        most = max(accumulate(int(room) - int(turn) for room, turn in zip(rooms, turns, strict=True)))
        return most >= self.m * int(self.C[-1])

    def _has_memory(self, T: int) -> bool:
        """Return whether the devices have bytes times ticks for all stashes and weights."""
        idle = self.head + self.tail
        below = (self.C[-1] - self.C[:-1]).astype(float)
        held = np.maximum(0, T - np.maximum.accumulate(idle)).astype(float)
        items = self.m * np.array(self.stash, dtype=float) * below + np.array(self.weights, dtype=float) * held
        rooms = self.room * np.maximum(0, T - idle).astype(float) * (1 + ROUNDING)
        every = np.ones(self.size, dtype=np.bool_)
        return _fits(items, rooms, every, self.num_devices, at_once=False)

    # Contiguous partitions

    def of_contiguous(self, at_least: int) -> int:
        """Return ticks than which no step of a contiguous partition is shorter; never less than ``at_least``."""
        constraints = self.problem.constraints
        most = min(constraints.max_stages, self.size)
        decisions = min(55, MOST_WORK // (most * self.size**2 + 1))
        if decisions < 3:
            return at_least
        needs = StageNeeds(self, constraints.allowed(self.problem.table))
        longest = self._longest() + 2 * int(self.send.sum()) * self.m

        def may_take(T: int) -> bool:
            return self._has_partition(needs, T, most)

        if may_take(at_least) or not may_take(longest):
            return at_least
        return least_from(at_least, may_take, decisions)

    def partition(self) -> Cuts | None:
        """Return a contiguous partition whose stages ask for about the least; None where none may be told soon.

        Neither what stages wait nor that cuts leave time for turns together counts here: local search from what
        that leads to ended with longer steps (vgg16 on 4 devices, 1.483 s for 1.396 s).
        """
        constraints = self.problem.constraints
        most = min(constraints.max_stages, self.size)
        if MOST_WORK // (most * self.size**2 + 1) < 2 * FEW_DECISIONS:
            return None
        needs = StageNeeds(self, constraints.allowed(self.problem.table), waits=False)
        longest = self._longest() + 2 * int(self.send.sum()) * self.m

        def may_take(T: int) -> bool:
            counts = self.problem.constraints.counts(self.size)
            return bool((self._least_ways(needs.within(T), T, most)[counts.start : counts.stop, -1] < FAR).any())

        if not may_take(longest):
            return None
        work = self.m * int(self.C[-1]) // self.num_devices
        T = least_from(work, may_take, FEW_DECISIONS)
        while True:
            needed = needs.within(T)
            least = self._least_ways(needed, T, most)
            counts = self.problem.constraints.counts(self.size)
            count = min(counts, key=lambda count: int(least[count, -1]))
            if least[count, -1] < FAR:
                break
            T += 1 + T // 512
        cuts = [self.size]
        for number in range(count, 0, -1):
            stop = cuts[-1]
            before = least[number - 1, :stop]
            ways = np.where(2 * before + needed[:stop, stop] <= T, before, FAR)
            cuts.append(int(ways.argmin()))
        return tuple(reversed(cuts))

    def _has_partition(self, needs: StageNeeds, T: int, most: int) -> bool:
        """Return whether some partition has stages that all need at most T ticks."""
        counts = self.problem.constraints.counts(self.size)

        def least_total(needed: Integers) -> int:
            return int(self._least_ways(needed, T, most)[counts.start : counts.stop, self.size].min(initial=FAR))

        return needs.total(T, needs.within(T), least_total) < FAR

    def _least_ways(self, needed: Integers, T: int, most: int) -> Integers:
        """Return the least ticks, one way, over the cuts before and at layer l, by the stages so far; [q, l]."""
        size = self.size
        sends = np.array([*self.send, 0], dtype=np.int64)
        least = np.full((most + 1, size + 1), FAR, dtype=np.int64)
        least[0, 0] = 0
        for start in range(size):
            so_far = least[:-1, start, None]
            reached = np.where(2 * so_far + needed[start, None, start + 1 :] <= T, so_far, FAR)
            reached = np.minimum(reached + sends[None, start + 1 :], FAR)
            np.minimum(least[1:, start + 1 :], reached, out=least[1:, start + 1 :])
        return least


class _Layers:
    """Ticks of layers, and how far a device can be filled with them.

    Args:
        sums: ticks that some layers take together, sorted; None: any may be.
        most: most ticks for which a device has memory.
    """

    def __init__(self, ticks: Integers, sums: Integers | None, most: int | None = None) -> None:
        self.ticks, self.sums = ticks, sums
        self.most = int(ticks.sum()) if most is None else min(most, int(ticks.sum()))

    def filled(self, rooms: Integers) -> Integers:
        """Return the ticks that layers can take of each room; negative where there is none."""
        rooms = np.minimum(rooms, self.most)
        if self.sums is None:
            return rooms
        places = self.sums.searchsorted(rooms, "right") - 1
        result: Integers = np.where(rooms < 0, rooms, self.sums[places])
        return result


def _fits(
    items: NDArray[np.generic],
    rooms: NDArray[np.generic],
    may_begin: NDArray[np.bool_],
    num_devices: int,
    *,
    at_once: bool = True,
) -> bool:
    """Return whether the layers up to each one have room on the devices that begin among them.

    Args:
        items: what each layer takes.
        rooms: what a device has that begins with each layer; the first begins with layer 0.
        at_once: a device begins only with a layer that it has room for.
    """
    largest: list[float] = []
    taken: float = 0
    have: float = 0  # whole numbers stay whole
    first = rooms[0].item()
    for index, (item, room, may) in enumerate(
        zip(items.tolist(), rooms.tolist(), may_begin.tolist(), strict=True)
    ):
        if index and may and room > 0 and (room >= item or not at_once) and num_devices > 1:
            if len(largest) < num_devices - 1:
                heappush(largest, room)
                have += room
            else:
                have += room - heappushpop(largest, room)
        taken += item
        if taken > first + have:
            return False
    return True


def _least(decide: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least T from ``low`` on at which a question has the answer yes, ``high`` at most."""
    if low >= high or decide(low):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if decide(middle):
            high = middle
        else:
            low = middle
    return high


def _typical(ticks: Integers) -> list[int]:
    """Return times by which layers are counted."""
    every = sorted({int(each) for each in ticks if each > 0})
    if len(every) <= MOST_COUNTED:
        return every
    return [every[place * (len(every) - 1) // (MOST_COUNTED - 1)] for place in range(MOST_COUNTED)]


def _prefix(values: Integers | list[int]) -> Integers:
    result: Integers = np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])
    return result
