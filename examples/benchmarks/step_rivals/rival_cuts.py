"""Balanced cuts of a chain into stages, without the planner: equal numbers of layers, and equal time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from deepspeed_partition import Chain

Cuts = tuple[int, ...]


def balanced_cuts(chain: Chain, devices: Sequence[int]) -> list[Cuts]:
    """Return the cuts of a chain into as many stages as ``devices`` has entries; none where it is too short.

    They have equal numbers of layers; equal numbers between the first and the last layer, which go with their
    neighbours, as Megatron-LM cuts a transformer; the most even time of all stages; and the same with boundaries
    moved until no device has less to do.
    """
    size, num_stages = chain.num_layers, len(devices)
    if num_stages > size:
        return []
    seconds = [layer.compute_seconds for layer in chain.layers]
    found = [_equal(size, num_stages)]
    if num_stages <= size - 2:
        inner = _equal(size - 2, num_stages)
        found.append((0, *(cut + 1 for cut in inner[1:-1]), size))
    even = _even_time(seconds, num_stages)
    found += [even, *(_even_devices(seconds, cuts, devices) for cuts in (even, *found))]
    return list(dict.fromkeys(found))


def _equal(size: int, num_stages: int) -> Cuts:
    return tuple(round(size * stage / num_stages) for stage in range(num_stages + 1))


def _even_time(seconds: Sequence[float], num_stages: int) -> Cuts:
    """Return the cut with the least sum of the squares of the stages' times; O(S L^2)."""
    before = np.concatenate([[0.0], np.cumsum(seconds)])
    size = len(seconds)
    square = (before[None, :] - before[:, None]) ** 2
    square[np.tril_indices(size + 1)] = np.inf  # a stage has a layer
    best, starts = square[0], []
    for _ in range(num_stages - 1):
        through = best[:, None] + square
        starts.append(through.argmin(axis=0))
        best = through.min(axis=0)
    cuts = [size]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return (0, *cuts[::-1])


def _even_devices(seconds: Sequence[float], cuts: Cuts, devices: Sequence[int]) -> Cuts:
    """Move one boundary at a time by one layer while that makes the sum of squares of the devices' times less."""
    before = list(accumulate(seconds, initial=0.0))

    def unevenness(some: Cuts) -> float:
        load = [0.0] * (max(devices) + 1)
        for (start, stop), device in zip(pairwise(some), devices, strict=True):
            load[device] += before[stop] - before[start]
        return sum(each * each for each in load)

    least, better = unevenness(cuts), True
    while better:
        better = False
        for index in range(1, len(cuts) - 1):
            for moved in (cuts[index] - 1, cuts[index] + 1):
                other = (*cuts[:index], moved, *cuts[index + 1 :])
                if cuts[index - 1] < moved < cuts[index + 1] and unevenness(other) < least * (1 - 1e-9):
                    cuts, least, better = other, unevenness(other), True
    return cuts
