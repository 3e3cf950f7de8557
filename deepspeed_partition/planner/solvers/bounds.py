"""A lower bound on the period of every schedule of every allocation.

Method: the largest of four bounds, each in closed form or by one bisection (``lower_bound``). The first one, U(1,
L) / P, begins Algorithm 1 of the MadPipe paper, section 4.2.3; the others are an addition. The bound holds
exactly, in integers; no plan need reach it. Cost: O(L log L) time per step of the bisection, about 50 steps, and
O(L) memory, for L layers and P devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.memory import most_with_versions
from deepspeed_partition.planner.solvers.interface import Problem
from deepspeed_partition.planner.training_bytes import MOST_BYTES, TrainingBytes, version_bytes
from deepspeed_partition.planner.weight_versions import TWO_VERSIONS, VERTICAL_SYNC


def lower_bound(problem: Problem) -> Fraction:
    """Return a period, in ticks, below which no schedule of any allocation exists: the largest of four bounds.

    - The mean computation of a device.
    - Blocks: a boundary whose transfers take longer than the period is on no link, so the layers on both sides of
      it share a device. The longest of the blocks between the other boundaries is done once per period, and of
      the P + 1 longest blocks two share a device.
    - The memory of one layer: each micro-batch is in flight there while the layer and all later layers compute.
      So at a period T, ``U(l, L) / T`` of them or more are on its device at once, and they must fit.
    - The mean memory: by Little's law the devices together hold, on average over time,
      ``stash(l) * U(l, L) / T`` bytes of layer l, next to all weights.

    Where the pipeline never drains, a layer holds two versions of its weights (``"2bw"``), and no more than M + 1
    micro-batches are in flight; or with g in flight 1 + (g - 1) / M versions at least, so each micro-batch brings
    an M-th of one. That holds for ``"vertical-sync"``, too, under which a stage holds no fewer.

    With halves a layer holds at least the lesser of its stash and ``weight_stash_bytes``, while all later layers
    run forward and compute the gradients of their inputs.

    With recomputation a layer that may run twice may keep nothing. Then the third bound holds for the others
    alone, and the fourth says how much must be saved by layers that run twice: each saves ``stash(l) * U(l, L)``
    at the most for its forward, and all forwards are part of the mean computation of a device.
    """
    chain, platform, times = problem.chain, problem.platform, problem.times
    total = int(times.compute[-1])
    rule, training = problem.versions, problem.table.training
    if rule is not None and rule.mode == VERTICAL_SYNC:
        training = TrainingBytes(chain, platform, 1)
    comes_with_micro_batches = rule is not None and rule.mode != TWO_VERSIONS
    per_update = 1 if rule is None else rule.micro_batches_per_update
    # The path of a micro-batch has no gradients of weights where these may come at any later time.
    path = times.forward + times.first_halves if problem.splits_backward else times.compute
    bound = max(Fraction(total, platform.num_devices), Fraction(blocks_bound(times, platform.num_devices)))
    if rule is not None and rule.mode == TWO_VERSIONS:
        bound = max(bound, Fraction(total, per_update + 1))
    in_versions = [0] * chain.num_layers
    if comes_with_micro_batches:  # what layers share counts once, with the first of them
        in_versions = training.versions([(index, index + 1) for index in range(chain.num_layers)])
    stashed, memory_bytes = Fraction(0), platform.memory_bytes - platform.fixed_bytes
    savings: list[tuple[int, int]] = []
    for index, layer in enumerate(chain.layers):
        stash, below = chain.stash(layer), int(path[-1] - path[index])
        if problem.splits_backward and layer.weight_stash_bytes is not None:
            stash = min(stash, layer.weight_stash_bytes)
        stashed += (stash + Fraction(in_versions[index], per_update)) * below
        if problem.recomputation is not None and layer.recomputable:
            savings.append((stash * below, times.forward_ticks(index, index + 1)))
            continue
        free = np.array(max(memory_bytes - training.of([(index, index + 1)]), -MOST_BYTES))
        if comes_with_micro_batches:
            version = np.array(version_bytes(layer))
            most = int(most_with_versions(free, np.array(stash), version, per_update))
        else:
            most = int(free) // stash if stash else 0
        if most > 0:
            bound = max(bound, Fraction(below, most))
    room: int | Fraction = platform.num_devices * memory_bytes - training.of([(0, chain.num_layers)])
    if comes_with_micro_batches:
        room += Fraction(sum(in_versions), per_update)
    if room <= 0:
        return bound
    if not savings:
        return max(bound, Fraction(stashed, room))
    return max(bound, with_savings(total, stashed, savings, room, platform.num_devices))


def with_savings(
    total: int | Fraction,
    stashed: int | Fraction,
    savings: Sequence[tuple[int | Fraction, int | Fraction]],
    room: int | Fraction,
    num_devices: int,
) -> Fraction:
    """Return the least period for which there is room for what is kept, and time for what is recomputed.

    Args:
        total: ticks of all layers.
        stashed: bytes times ticks that a micro-batch takes of the memory without recomputation.
        savings: what each layer saves of them if it runs twice, and the ticks of its forward; parts of a layer
            count, too, so this is a lower bound.
        room: bytes of all devices beside the weights.
    """
    cheapest = sorted((each for each in savings if each[0]), key=lambda each: Fraction(each[1], each[0]))
    for saved, ticks in cheapest:
        # Without this layer: is the time for the room, or for the computation, the shorter one?
        if Fraction(stashed, room) <= Fraction(total, num_devices):
            break
        if Fraction(stashed - saved, room) <= Fraction(total + ticks, num_devices):
            # The part x of the layer at which both are equal.
            part = Fraction(num_devices * stashed - room * total, num_devices * saved + room * ticks)
            return Fraction(total + part * ticks) / num_devices
        stashed, total = stashed - saved, total + ticks
    return max(Fraction(total, num_devices), Fraction(stashed, room))


def blocks_bound(times: TimedChain, num_devices: int) -> int:
    """Return the least period, in ticks, at which the blocks fit onto the devices."""
    least, most = 0, int(times.compute[-1])
    on_link = (times.one_way if times.platform.duplex == "full" else times.round_trip)[:-1]
    while least < most:
        middle = (least + most) // 2
        starts = np.flatnonzero(on_link <= middle)  # 0 at the beginning of the chain
        blocks = np.sort(np.diff([*times.compute[starts], times.compute[-1]]))[::-1]
        pair = blocks[num_devices - 1] + blocks[num_devices] if len(blocks) > num_devices else 0
        if max(blocks[0], pair) <= middle:
            most = middle
        else:
            least = middle + 1
    return least
