"""Recomputation: which layers of a stage run their forward again, what that takes, and what it saves.

A recomputed block of layers keeps its input alone, and its backward lasts a forward longer. For layers k to l as
one stage, with P the bytes that the layers before one keep, and S the bytes that the whole stage keeps, g
micro-batches in flight need

    (g - 1) S  +  max of  S,  running_bytes + P of each layer,  S + transient_bytes + the largest block's stash

where inside of a block the larger of its input and of what its layers before this one keep comes on top. So a way
to recompute a stage is worth knowing for its extra time, its S, the largest ``running_bytes + P``, and its largest
block: ``Recomputation`` extends the ways for layers k to l by one more layer or block, and drops every way that
another one beats in all four (a Pareto set). This is exact where no set grows beyond ``MOST_WAYS`` and the chain
has ``MOST_POSITIONS`` layers at the most; chains of ``SMALL`` layers are never cut short. Otherwise sets are
thinned out evenly, so the answer can be slower than the best; ``optimistic`` sets round down instead: no real way
beats all of them, which is what proofs need. In longer chains blocks begin and end at ``MOST_POSITIONS`` places
where little is sent, and nothing is proved.

Method: dynamic programming with labels; not in the MadPipe paper. Checkpointing a chain under memory is from T.
Chen et al., "Training deep nets with sublinear memory cost", 2016, whose blocks these are. Cost: O(W) extensions
for a stage of W layers, each over O(W) sets of ``MOST_WAYS`` ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks, Rematerialize
from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import StageTable, first_backward_bytes
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.units import one_of

MODES = ("auto", "never", "stage", "block", "micro-batch")
"""What a planner may recompute: whatever is fastest, nothing, whole stages, ranges of layers in a stage, or these
and besides what each stage decides for every micro-batch by itself."""
PER_MICRO_BATCH = "micro-batch"
MOST_WAYS, MORE_WAYS = 24, 120
"""Most ways to recompute the same layers that are remembered, at first and where that leaves a proof open."""
MOST_POSITIONS = 48
"""Most places of a chain at which a recomputed block begins or ends."""
SMALL = 10
"""Number of layers up to which every way is remembered."""
Integers = NDArray[np.int64]
_EACH_ALONE = np.array([-2, 0, 0])
"""How a way is made in which each layer is a block of its own."""
_EXTRA, _STASH, _HELD, _LARGEST = range(4)
"""Columns of a set of ways: extra ticks, S, the largest ``running_bytes + P``, bytes of the largest block."""


def checked_mode(mode: object) -> str:
    """Return a value of ``recompute``, if it is one.

    Raises:
        ValueError: it is not.
    """
    return one_of("recompute", mode, MODES)


def rematerialized(blocks: Blocks, stage: tuple[int, int]) -> Rematerialize:
    """Return blocks in the form of a plan file: False for none, True for the whole stage as one block."""
    if not blocks:
        return False
    return True if blocks == (stage,) else blocks


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage takes with the recomputation that was chosen for it: ticks and bytes for a micro-batch."""

    forward: int
    backward: int
    """Ticks of the backward, with the forwards that run again in it."""
    stash: int
    """Bytes for each micro-batch in flight."""
    transient: int
    """Bytes that are needed only while the stage runs, in steady state."""
    forward_transient: int
    """Bytes that are needed only while it runs forward, in a step."""
    most_in_flight: int
    """Most micro-batches in flight for which the device has room; 0 where not one fits."""

    @property
    def compute(self) -> int:
        """Ticks of forward and backward together."""
        return self.forward + self.backward


def stage_cost(times: TimedChain, table: StageTable, stage: tuple[int, int], blocks: Blocks = ()) -> StageCost:
    """Return the cost of a stage, given as layers (half-open), of which ``blocks`` are recomputed."""
    forward, backward = times.forward_ticks(*stage), times.backward_ticks(*stage)
    if not blocks:
        return StageCost(
            forward, backward, int(table.stash[stage]), int(table.transient[stage]),
            int(table.forward_transient[stage]), int(table.max_in_flight[stage]),
        )  # fmt: skip
    stash, needs = _needs(times.chain, stage, blocks)
    forward_transient, transient = (max(0, *(need[index] for need in needs)) for index in (0, 1))
    transient = int(table.with_update(np.array(transient), stage))
    extra = sum(times.forward_ticks(*block) for block in blocks)
    room = rooms(table, stage, np.array(stash), np.array(transient))
    return StageCost(forward, backward + extra, stash, transient, forward_transient, int(room))


def passing_bytes(chain: Chain, stage: tuple[int, int], *, in_step: bool = False) -> int:
    """Return what a stage needs while it runs a forward that keeps nothing: the most of its layers.

    Args:
        in_step: what a layer needs in a forward alone counts; in a steady state, the larger of that and of what it
            needs in a backward.
    """
    most = 0
    for index in range(*stage):
        layer = chain.layers[index]
        needs = layer.running_bytes
        if needs is None:
            most = max(most, layer.transient_bytes)
            continue
        if in_step and layer.forward_running_bytes is not None:
            needs = layer.forward_running_bytes
        most = max(most, needs + (chain.boundary_bytes(stage[0]) if index > stage[0] else 0))
    return most


def weight_stash_bytes(chain: Chain, stage: tuple[int, int]) -> int:
    """Return the bytes of a micro-batch between the two halves of a stage's backward."""
    layers = chain.layers[slice(*stage)]
    return sum(
        chain.stash(layer) if layer.weight_stash_bytes is None else layer.weight_stash_bytes for layer in layers
    )


def first_backward(
    times: TimedChain, table: StageTable, stage: tuple[int, int], blocks: Blocks, late_gradients: Integers
) -> int:
    """Return the transient bytes of a stage in its first backward of a step, gradients that come included.

    Args:
        late_gradients: bytes that come with the backward of each of its layers, shape (number of layers,).
    """
    if not blocks and table.recomputed is not None:
        blocks = table.recomputed(stage)
    if not blocks:
        return table.first_backward(*stage, late_gradients)
    come = np.cumsum(late_gradients[::-1])[::-1]
    own = np.minimum(late_gradients, first_backward_bytes(times.chain.layers[slice(*stage)]))
    with_own: list[int] = (come - late_gradients + own).tolist()
    _, needs = _needs(times.chain, stage, blocks)
    return max(
        0,
        *(
            back + (after if measured else int(come[0]))
            for (_, back, measured), after in zip(needs, with_own, strict=True)
        ),
    )


def _needs(chain: Chain, stage: tuple[int, int], blocks: Blocks) -> tuple[int, list[tuple[int, int, bool]]]:
    """Return the stash of a stage, and what each of its layers needs beyond it.

    That is: in a forward of a step, in a backward, and whether the layer was measured while it ran.
    """
    start, stop = stage
    layers = chain.layers[start:stop]
    block_of = {index: block for block in blocks for index in range(*block)}
    stash = largest = 0
    held = again = 0
    """Bytes that are kept before the block of a layer, and bytes that the layers before it in the block keep."""
    needs: list[tuple[int, int, bool]] = []
    for index, layer in enumerate(layers, start):
        first, last = block_of.get(index, (index, index))
        bytes_in = chain.boundary_bytes(first)
        if index == first:
            held, again = stash, 0
            stash += bytes_in if first < last else chain.stash(layer)
        inner = (bytes_in, max(bytes_in, again)) if index > first else (0, 0)
        again += chain.stash(layer)
        if index + 1 == last:
            largest = max(largest, again - bytes_in)
        if layer.running_bytes is None:
            needs.append((layer.transient_bytes, layer.transient_bytes, False))
        else:
            forth = layer.running_bytes if layer.forward_running_bytes is None else layer.forward_running_bytes
            needs.append((forth + held + inner[0], layer.running_bytes + held + inner[1], True))
    if stop < chain.num_layers and not (blocks and blocks[-1][1] == stop):
        stash += layers[-1].cut_stash_bytes
    return stash, [
        (forth - stash, back - stash, True) if measured else (forth, back + largest, False)
        for forth, back, measured in needs
    ]


def rooms(table: StageTable, stage: Any, stash: Integers, transient: Integers) -> Integers:
    """Return the most micro-batches in flight that fit with these bytes; 0 where not one fits.

    Args:
        stage: an index, or several, of the arrays of ``table``.
    """
    room = table.memory_bytes - (table.fixed[stage] - table.transient[stage]) - table.with_update(transient, stage)
    return table.rooms_for(room, stash, table.memory_bytes, stage)


class Recomputation:
    """Ways to recompute each stage of a chain.

    Args:
        mode: ``"stage"``: each stage as a whole, or not at all. Otherwise any ranges of its layers.
    """

    def __init__(self, times: TimedChain, mode: str) -> None:
        self.mode = mode
        chain = times.chain
        layers, size = chain.layers, chain.num_layers
        self.forward = times.forward
        self.stash = _prefix(chain.stash(layer) for layer in layers)
        self.input = np.array([chain.boundary_bytes(index) for index in range(size)], dtype=np.int64)
        self.at_cut = np.array([0, *(layer.cut_stash_bytes for layer in layers[:-1]), 0], dtype=np.int64)
        self.forbidden = _prefix(int(not layer.recomputable) for layer in layers)
        """Layers that must not run twice, of layers 0 to l; indexed [l]."""
        self.is_measured = np.array([layer.running_bytes is not None for layer in layers])
        self.unmeasured = _prefix(int(not each) for each in self.is_measured)
        self.running = np.array([layer.running_bytes or 0 for layer in layers], dtype=np.int64)
        self.forth = np.array([
            (layer.running_bytes if layer.forward_running_bytes is None else layer.forward_running_bytes) or 0
            for layer in layers
        ], dtype=np.int64)  # fmt: skip
        self.working = np.array(
            [0 if layer.running_bytes is not None else layer.transient_bytes for layer in layers]
        )
        self.positions = _positions(self.input)
        self.has_all_positions = len(self.positions) == size
        """Whether a block may begin and end everywhere."""
        self.remember(MOST_WAYS)

    def remember(self, most_ways: int) -> None:
        """Remember so many ways to recompute the same layers, and forget those that are known."""
        self.most_ways = most_ways
        self.is_exact = self.has_all_positions
        """Whether no set of ways was cut short until now."""
        self._sets: dict[tuple[int, bool], _Extension] = {}

    def forget(self) -> None:
        """Forget the ways that are known, which may take hundreds of megabytes in long chains."""
        self._sets.clear()

    @property
    def recomputes_all(self) -> bool:
        """Whether every layer may run twice."""
        return not self.forbidden[-1]

    @property
    def recomputes_any(self) -> bool:
        """Whether some layer may run twice."""
        return bool(self.forbidden[-1] < len(self.input))

    def allows(self, start: int, stop: int) -> bool:
        """Return whether each of layers ``start`` to ``stop`` may run twice."""
        return bool(self.forbidden[stop] == self.forbidden[start])

    def ways(self, stage: tuple[int, int], *, optimistic: bool = False) -> Ways:
        """Return the ways to recompute a stage, those of the least extra time first; that with none is one.

        Args:
            optimistic: None of them need exist, but no way that does is better than all of them.
        """
        start, stop = stage
        return self._from(start, optimistic).stage(stop)

    def knows(self, stage: tuple[int, int]) -> bool:
        """Return whether the ways to recompute a stage have been made."""
        start, stop = stage
        made = self._sets.get((start, False))
        return made is not None and stop in made.stages

    def _from(self, start: int, optimistic: bool) -> _Extension:
        key = start, optimistic
        if key not in self._sets:
            self._sets[key] = _Extension(self, start, optimistic)
        return self._sets[key]

    def held_in_block(self, first: int, last: int) -> int:
        """Return the most bytes in use in a recomputed block, beyond those kept before it; 0 if not measured."""
        if not self.is_measured[first:last].any():
            return 0
        again = np.maximum(self.stash[first:last] - self.stash[first], self.input[first])
        again[0] = 0
        return int(np.where(self.is_measured[first:last], self.running[first:last] + again, 0).max())

    def largest(self, first: int, last: int) -> int:
        """Return the bytes that a block keeps while its backward runs, beyond its input."""
        if self.unmeasured[-1] == 0:
            return 0  # nobody reads them
        return max(0, int(self.stash[last] - self.stash[first] - self.input[first]))

    def held_in_layers(self, first: int, last: int) -> int:
        """Return the most bytes in use in layers that are not recomputed, beyond those kept before them."""
        before = self.stash[first:last] - self.stash[first]
        return int(np.where(self.is_measured[first:last], self.running[first:last] + before, 0).max())


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to recompute one stage: arrays of shape (N,), and the blocks of each on demand."""

    extra: Integers
    """Ticks by which the backward is longer."""
    stash: Integers
    """Bytes for each micro-batch in flight."""
    transient: Integers
    """Bytes that are needed only while the stage runs, in steady state."""
    sets: _Extension
    came_by: NDArray[np.int64]
    stop: int

    def blocks(self, number: int) -> Blocks:
        """Return the blocks of one of the ways."""
        return self.sets.trace(self.came_by[number], self.stop)


class _Extension:
    """Sets of ways for layers ``start`` to l, each made from those for fewer layers."""

    def __init__(self, costs: Recomputation, start: int, optimistic: bool) -> None:
        self.costs, self.start, self.optimistic = costs, start, optimistic
        first = np.zeros((1, 4), dtype=np.int64)
        self.inner: dict[int, tuple[Integers, Integers]] = {start: (first, np.full((1, 3), -1, dtype=np.int64))}
        """For each end l: the ways, shape (N, 4), and how each was made, shape (N, 3): the end before, the number
        of the way there, and 1 if the layers from there on are a block."""
        self.stages: dict[int, Ways] = {}

    def stage(self, stop: int) -> Ways:
        """Return the ways for layers ``start`` to ``stop`` as one stage."""
        if stop not in self.stages:
            costs = self.costs
            found, made = self._candidates(stop)
            found[:, _STASH] += np.where(made[:, 2] == 1, 0, costs.at_cut[stop])
            if costs.mode != "stage":
                found = np.concatenate([found, [self._each_alone(stop)]])
                made = np.concatenate([made, [_EACH_ALONE]])
            # The whole stage as one block, and each of its layers as one, are never thinned out.
            whole = np.all(made == (self.start, 0, 1), axis=1)
            found, made = self._best(found, made, whole | np.all(made == _EACH_ALONE, axis=1))
            transient = np.maximum(found[:, _HELD] - found[:, _STASH], 0)
            if costs.unmeasured[stop] > costs.unmeasured[self.start]:
                working = int(costs.working[self.start : stop].max())
                transient = np.maximum(transient, working + found[:, _LARGEST])
            self.stages[stop] = Ways(found[:, _EXTRA], found[:, _STASH], transient, self, made, stop)
        return self.stages[stop]

    def trace(self, made: Integers, stop: int) -> Blocks:
        blocks: list[tuple[int, int]] = []
        if np.array_equal(made, _EACH_ALONE):
            return tuple((each, each + 1) for each in range(self.start, stop) if self.costs.allows(each, each + 1))
        while True:
            before, number, is_block = (int(each) for each in made)
            if before < 0:
                return tuple(reversed(blocks))
            if is_block:
                blocks.append((before, stop))
            stop, made = before, self.inner[before][1][number]

    def _each_alone(self, stop: int) -> list[int]:
        """Return what a stage takes of which each layer that may run twice is a block of its own."""
        costs, here = self.costs, slice(self.start, stop)
        again = np.diff(costs.forbidden[self.start : stop + 1]) == 0
        own = np.diff(costs.stash[self.start : stop + 1])
        kept = np.where(again, costs.input[here], own)
        before = np.cumsum(kept) - kept
        held = np.where(costs.is_measured[here], costs.running[here] + before, 0)
        largest = np.where(again, own - costs.input[here], 0) if costs.unmeasured[-1] else np.zeros(1)
        extra = np.where(again, np.diff(costs.forward[self.start : stop + 1]), 0)
        stash = int(kept.sum()) + (0 if again[-1] else int(costs.at_cut[stop]))
        return [int(extra.sum()), stash, int(held.max()), max(0, int(largest.max()))]

    def _until(self, stop: int) -> tuple[Integers, Integers]:
        if stop not in self.inner:
            self.inner[stop] = self._best(*self._candidates(stop))
        return self.inner[stop]

    def _candidates(self, stop: int) -> tuple[Integers, Integers]:
        """Return all ways for layers ``start`` to ``stop``, and how they are made."""
        costs, start = self.costs, self.start
        places = [start, *costs.positions[(costs.positions > start) & (costs.positions < stop)].tolist()]
        if costs.mode == "stage":
            places = [start]
        found, made = [], []

        def extend(before: int, is_block: int, extra: int, stash: int, held: int, largest: int) -> None:
            ways, _ = self._until(before)
            more = ways.copy()
            more[:, _EXTRA] += extra
            more[:, _HELD] = np.maximum(ways[:, _HELD], ways[:, _STASH] + held if held else 0)
            more[:, _STASH] += stash
            more[:, _LARGEST] = np.maximum(ways[:, _LARGEST], largest)
            found.append(more)
            numbers = np.arange(len(ways))
            made.append(
                np.stack([np.full_like(numbers, before), numbers, np.full_like(numbers, is_block)], axis=1)
            )

        last = places[-1]
        extend(last, 0, 0, int(costs.stash[stop] - costs.stash[last]), costs.held_in_layers(last, stop), 0)
        for first in reversed(places):
            if not costs.allows(first, stop):
                break
            extra = int(costs.forward[stop] - costs.forward[first])
            held, largest = costs.held_in_block(first, stop), costs.largest(first, stop)
            extend(first, 1, extra, int(costs.input[first]), held, largest)
        return np.concatenate(found), np.concatenate(made)

    def _best(
        self, found: Integers, made: Integers, certain: NDArray[np.bool_] | None = None
    ) -> tuple[Integers, Integers]:
        """Return the ways that no other one beats, at most ``most_ways``, those of the least extra time first.

        Args:
            certain: the ways that are kept beyond so many.
        """
        order = np.lexsort(found.T[::-1])
        best = order[_undominated(found[order])]
        found, made = found[best], made[best]
        most_ways = self.costs.most_ways
        if len(found) <= most_ways or len(self.costs.input) <= SMALL:
            return found, made
        chosen = np.linspace(0, len(found) - 1, most_ways).round().astype(np.intp)
        chosen = np.unique(np.concatenate([chosen, [] if certain is None else np.flatnonzero(certain[best])]))
        chosen = chosen.astype(np.intp)
        if not self.optimistic:
            self.costs.is_exact = False
            return found[chosen], made[chosen]
        return np.minimum.reduceat(found, chosen, axis=0), made[chosen]


def _undominated(rows: Integers) -> NDArray[np.intp]:
    """Return the rows that no other one beats or equals in every column; of equal rows, the first.

    Args:
        rows: shape (N, 4), in lexicographic order.
    """
    kept = np.zeros(0, dtype=np.intp)
    for begin in range(0, len(rows), 128):
        some = np.arange(begin, min(begin + 128, len(rows)))
        some = some[~_beaten(rows[some], rows[kept])]
        among = np.all(rows[some][:, None, :] >= rows[some][None, :, :], axis=2)
        # A row comes after all that beat it, so the earlier of two equal ones stays.
        some = some[~np.tril(among, -1).any(axis=1)]
        kept = np.concatenate([kept, some])
    return kept


def _beaten(rows: Integers, by: Integers) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = np.all(rows[:, None, :] >= by[None, :, :], axis=2).any(axis=1)
    return result


def _positions(sent: Integers) -> NDArray[np.intp]:
    """Return the layers at which blocks begin or end: all of a short chain, else those with small inputs."""
    size = len(sent)
    if size <= MOST_POSITIONS:
        return np.arange(size)
    edges = np.linspace(0, size, MOST_POSITIONS + 1).round().astype(int)
    return np.array([first + int(sent[first:last].argmin()) for first, last in pairwise(edges)])


def _prefix(values: Any) -> Integers:
    return np.concatenate([[0], np.cumsum(np.array(list(values), dtype=np.int64))])
