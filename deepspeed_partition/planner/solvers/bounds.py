"""A lower bound on the period of every schedule of every allocation.

Method: the largest of four bounds, each in closed form or by one bisection (``lower_bound``). The first one, U(1,
L) / P, begins Algorithm 1 of the MadPipe paper, section 4.2.3; the others are an addition. The bound holds
exactly, in integers; no plan need reach it. Cost: O(L log L) time per step of the bisection, about 50 steps, and
O(L) memory, for L layers and P devices.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.solvers.interface import Problem


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
    """
    chain, platform, times = problem.chain, problem.platform, problem.times
    total = int(times.compute[-1])
    bound = max(Fraction(total, platform.num_devices), Fraction(_blocks(times, platform.num_devices)))
    stashed, memory_bytes = 0, platform.memory_bytes - platform.fixed_bytes
    for index, layer in enumerate(chain.layers):
        stash, below = chain.stash(layer), total - int(times.compute[index])
        stashed += stash * below
        weights = problem.table.training.of([(index, index + 1)])
        most = (memory_bytes - weights) // stash if stash else 0
        if most > 0:
            bound = max(bound, Fraction(below, most))
    weights = problem.table.training.of([(0, chain.num_layers)])
    room = platform.num_devices * memory_bytes - weights
    return max(bound, Fraction(stashed, room)) if room > 0 else bound


def _blocks(times: TimedChain, num_devices: int) -> int:
    """Return the least period, in ticks, at which the blocks fit onto the devices."""
    least, most = 0, int(times.compute[-1])
    while least < most:
        middle = (least + most) // 2
        starts = np.flatnonzero(times.round_trip[:-1] <= middle)  # 0 at the beginning of the chain
        blocks = np.sort(np.diff([*times.compute[starts], times.compute[-1]]))[::-1]
        pair = blocks[num_devices - 1] + blocks[num_devices] if len(blocks) > num_devices else 0
        if max(blocks[0], pair) <= middle:
            most = middle
        else:
            least = middle + 1
    return least
