"""Steps of many partitions at once: boundaries differ, devices and orders are the same.

Where each device has its order beforehand, what a step does is known before any time is: which operation follows
which, on its device and on the path of its micro-batch. So one pass over all operations of a step gives the steps
of hundreds of partitions, as vectors, at the cost of a few simulations of one.

Devices keep their orders, and links, too: tensors go over each in the order of a step that was simulated, the one
that all others are compared with. A simulation may send a tensor sooner, so what is found here is simulated again
(``step_search.py``). Of memory it is known what the orders need at the least, whenever their operations run.

Method: own. Cost: O(m S) operations on vectors, for m micro-batches and S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.solvers.step.step_simulator import StepEngine, StepRun

Integers = NDArray[np.int64]


class ManyCuts:
    """Estimates of the steps of partitions that run as another one does.

    Args:
        problem: times and bytes; no layer is recomputed.
        engine: simulator of the other one.
        run: its step: its orders, and the order in which its tensors go over each link, are those of all.
    """

    def __init__(self, problem: Problem, engine: StepEngine, run: StepRun) -> None:
        self.problem, self.engine = problem, engine
        self.num_stages = num_stages = engine.num_stages
        self.devices = tuple(engine.device[:num_stages])
        self.events = _events(engine, run)
        """Operations and the transfers after them, as 2 x position and 2 x position + 1, as they begin."""
        self.crosses = np.array([one != other for one, other in pairwise(self.devices)], dtype=np.bool_)
        chain, platform, table, times = problem.chain, problem.platform, problem.table, problem.times
        self.forward, self.backward = times.forward.astype(np.int64), times.backward.astype(np.int64)
        self.one_way, self.copies = times.one_way.astype(np.int64), np.array(times.copies, dtype=np.int64)
        self.stash = np.concatenate([[0], np.cumsum([chain.stash(layer) for layer in chain.layers])])
        gradients = np.concatenate([[0], np.cumsum([layer.gradient_bytes for layer in chain.layers])])
        self.weights = table.weights - (gradients[None, :] - gradients[:, None])
        """Bytes of layers k to l without gradients, [k, l]."""
        self.crossing = np.array([0, *(chain.boundary_bytes(cut) for cut in range(1, chain.num_layers)), 0])
        self.room = platform.memory_bytes - table.fixed_bytes
        self.in_flight = [
            _most_in_flight(order, num_stages, mine)
            for order, mine in zip(run.orders, engine.stages_of, strict=True)
        ]

    def state(self, placement: Placement) -> Integers:
        """Return an allocation as a row."""
        return np.array(placement.cuts)

    def placement(self, state: Integers) -> Placement:
        """Return the allocation of a row."""
        return Placement(tuple(state.tolist()), self.devices)

    def every(self, most: int) -> Integers | None:
        """Return the states of all allocations; None where these are more than so many."""
        size, num_cuts = self.problem.chain.num_layers, self.num_stages - 1
        if comb(size - 1, num_cuts) > most:
            return None
        cuts = list(combinations(range(1, size), num_cuts))
        states = np.zeros((len(cuts), num_cuts + 2), dtype=np.int64)
        states[:, 1:-1], states[:, -1] = cuts, size
        return states

    def moved(self, states: Integers, draws: np.random.Generator) -> tuple[Integers, NDArray[np.bool_]]:
        """Return states of which one boundary is moved, or two are, and whether they are allocations."""
        count, num_stages = len(states), self.num_stages
        moved, rows = states.copy(), np.arange(count)
        longest = max(1, int(states[0, -1]) // (2 * num_stages))
        distance = np.exp(draws.random(count) * np.log(longest + 1)).astype(np.int64)
        for share in (1.0, 0.4):  # one boundary always, another one now and then
            some = rows[draws.random(count) < share]
            which = draws.integers(1, num_stages, len(some))
            moved[some, which] += distance[some] * draws.choice([-1, 1], len(some))
        rising: NDArray[np.bool_] = np.all(np.diff(moved, axis=1) > 0, axis=1)
        moved[~rising] = states[~rising]
        return moved, rising

    def ticks(self, states: Integers) -> Integers:
        """Return the ticks of the steps of K states."""
        return self.ticks_of(states, np.zeros((len(states), self.num_stages), dtype=np.int64))

    def ticks_of(self, cuts: Integers, extra: Integers) -> Integers:
        """Return the ticks of steps; cuts: (K, S + 1); extra: by which backwards are longer, (K, S)."""
        engine, count = self.engine, len(cuts)
        num_stages, size = engine.num_stages, len(engine.ticks)
        forward = np.diff(self.forward[cuts], axis=1).T
        backward = (np.diff(self.backward[cuts], axis=1) + extra).T
        beside = np.full((num_stages, count), self.problem.times.operation, dtype=np.int64)
        inner = np.where(self.crosses, self.copies[cuts[:, 1:-1]], 0).T
        beside[:-1] += inner
        beside[1:] += inner
        work = np.concatenate([forward + beside, (backward + beside)[::-1]])
        sends = np.where(self.crosses, self.one_way[cuts[:, 1:-1]], 0).T
        ways = np.concatenate([sends, np.zeros((1, count), dtype=np.int64), sends[::-1]])
        free = np.zeros((engine.num_devices, count), dtype=np.int64)
        over = np.zeros((len(engine.users), count), dtype=np.int64)
        ends: list[list[Integers]] = [[] for _ in range(size)]
        begins: list[list[Integers]] = [[] for _ in range(size)]
        comes: list[list[Integers]] = [[] for _ in range(size)]
        device, users, slots, maximum, add = engine.device, engine.ways, engine.slots, np.maximum, np.add
        for event in self.events:
            position = event >> 1
            if event & 1:
                number = len(comes[position + 1])
                begin = ends[position][number]
                for each in users[position]:
                    begin = maximum(begin, over[each])
                if number >= slots:  # an earlier one has left its slot
                    begin = maximum(begin, begins[position + 1][number - slots])
                come = begin + ways[position]
                for each in users[position]:
                    over[each] = come
                comes[position + 1].append(come)
                continue
            now, number = free[device[position]], len(begins[position])
            if position:
                come = comes[position][number] if users[position - 1] else ends[position - 1][number]
                maximum(now, come, out=now)
            begins[position].append(now.copy())
            add(now, work[position], out=now)
            ends[position].append(now.copy())
        return _last(engine, ends)

    def fit(self, states: Integers) -> NDArray[np.bool_]:
        """Return whether the orders have room, as far as they alone say, for each of K states."""
        stash, needed = np.diff(self.stash[states], axis=1), self._needed(states)
        fits = np.ones(len(states), dtype=np.bool_)
        for place, most in enumerate(self.in_flight):
            mine = [stage for stage, device in enumerate(self.devices) if device == place]
            bytes_of = needed[:, mine].sum(axis=1) + (stash[:, mine] @ most.T).max(axis=1)
            fits &= bytes_of <= self.room
        return fits

    def _needed(self, cuts: Integers) -> Integers:
        """Return the bytes of each stage for weights without gradients, and for buffers; (K, S)."""
        buffers = self.problem.platform.comm_buffers * self.crossing[cuts]
        buffers[:, 1:-1] *= self.crosses
        needed: Integers = self.weights[cuts[:, :-1], cuts[:, 1:]] + buffers[:, :-1] + buffers[:, 1:]
        return needed


def _events(engine: StepEngine, run: StepRun) -> list[int]:
    """Return what begins in a step, in time; at one instant nothing before what it waits for."""
    every = [(begin, 2 * position) for position, row in enumerate(run.begins) for begin in row]
    every += [(begin, 2 * position + 1) for position, row in enumerate(run.sends) for begin in row]
    every.sort()
    result: list[int] = []
    done = [0] * (2 * len(engine.ticks))
    late: list[int] = []

    def may_be(event: int) -> bool:
        position, number = event >> 1, done[event]
        if event & 1:
            left = number < engine.slots or done[event + 1] > number - engine.slots
            return done[event - 1] > number and left
        before = event - 1 if position and engine.ways[position - 1] else event - 2
        return not position or done[before] > number

    for _, event in every:
        late.append(event)
        while True:
            found = next((index for index, each in enumerate(late) if may_be(each)), None)
            if found is None:
                break
            each = late.pop(found)
            done[each] += 1
            result.append(each)
    assert not late
    return result


def _last(engine: StepEngine, ends: Sequence[Sequence[Integers]]) -> Integers:
    """Return the ticks until the last stage has ended its all-reduce."""
    result: Integers = np.max([row[-1] + tail for row, tail in zip(ends, engine.allreduce, strict=True)], axis=0)
    return result


def _most_in_flight(order: Sequence[int], num_stages: int, mine: Sequence[int]) -> Integers:
    """Return how many micro-batches the stages of a device hold at once: rows none of which is below another."""
    row = {stage: index for index, stage in enumerate(mine)}
    now, rows = [0] * len(mine), set[tuple[int, ...]]()
    for position in order:
        if position < num_stages:
            now[row[position]] += 1
            rows.add(tuple(now))
        else:
            now[row[2 * num_stages - 1 - position]] -= 1
    every = np.array(sorted(rows, reverse=True), dtype=np.int64)
    kept = [each for each in every if not ((every >= each).all(axis=1) & (every != each).any(axis=1)).any()]
    return np.array(kept)
