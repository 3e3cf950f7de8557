"""A lower bound on the period of every schedule of every allocation."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.solvers.problem import Problem


def lower_bound(problem: Problem) -> Fraction:
    """No schedule of any allocation has a shorter period, in ticks: the largest of four bounds.

    - The mean computation of a device.
    - Blocks: a cut whose transfers take longer than the period is on no link, so the layers on both sides of it
      share a device. The longest of the blocks between the other cuts is done once per period, and of the
      P + 1 longest two share a device.
    - The memory of one layer: it is in flight at least while it and all later layers compute, so at a period T
      there are ``U(l, L) / T`` of its micro-batches or more on its device at once, as many as have room.
    - The mean memory: by Little's law the devices together hold, on average over time,
      ``stash(l) * U(l, L) / T`` bytes of layer l, next to all weights.
    """
    chain, platform, times = problem.chain, problem.platform, problem.times
    total = int(times.compute[-1])
    bound = max(Fraction(total, platform.num_devices), Fraction(_blocks(times, platform.num_devices)))
    stashed = 0
    for index, layer in enumerate(chain.layers):
        stash, below = chain.stash(layer), total - int(times.compute[index])
        stashed += stash * below
        most = (platform.memory_bytes - platform.weights_bytes(layer.weight_bytes)) // stash if stash else 0
        if most > 0:
            bound = max(bound, Fraction(below, most))
    weights = platform.weights_bytes(sum(layer.weight_bytes for layer in chain.layers))
    room = platform.num_devices * platform.memory_bytes - weights
    return max(bound, Fraction(stashed, room)) if room > 0 else bound


def _blocks(times: TimedChain, num_devices: int) -> int:
    """The least period whose blocks have a place."""
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
