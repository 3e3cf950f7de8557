"""Brute force, as simple as can be: what the planner's answers are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product

from deepspeed_partition import Chain, Platform


def all_cuts(num_layers: int, most_stages: int) -> Iterator[tuple[int, ...]]:
    for count in range(min(most_stages, num_layers)):
        for inner in combinations(range(1, num_layers), count):
            yield (0, *inner, num_layers)


def loads(chain: Chain, platform: Platform, cuts: Sequence[int]) -> list[Fraction]:
    """Stage, cut, stage, ...: seconds per micro-batch, exactly."""
    result = []
    for start, stop in pairwise(cuts):
        if start:
            one_way = platform.latency_seconds + chain.layers[start - 1].output_bytes / platform.bandwidth
            result.append(2 * Fraction(round(one_way, 9)))  # 0 over a link on which transfers are free
        result.append(
            sum(
                (Fraction(l.forward_seconds) + Fraction(l.backward_seconds) for l in chain.layers[start:stop]),
                Fraction(0),
            )
        )
    return result


def groups(loads: Sequence[Fraction], period: Fraction) -> list[int]:
    """1F1B* as the paper words it: fill a group from the end while the sum fits, then start the next."""
    result: list[int] = []
    group, filled = 1, Fraction(0)
    for load in reversed(loads):
        if filled + load > period:
            group, filled = group + 1, Fraction(0)
        filled += load
        result.append(group)
    return result[::-1][::2]


def memory(chain: Chain, platform: Platform, start: int, stop: int, in_flight: int) -> Fraction:
    """M(k, l, g) of the paper, with stash and transient bytes of their own."""
    layers = chain.layers[start:stop]
    before = chain.layers[start - 1].output_bytes if start else 0
    after = chain.layers[stop - 1].output_bytes if stop < len(chain.layers) else 0
    return (
        Fraction(str(platform.weight_copies)) * sum(layer.weight_bytes for layer in layers)
        + in_flight * sum(layer.stash_bytes for layer in layers)
        + platform.comm_buffers * (before + after)
        + max(layer.transient_bytes for layer in layers)
    )


def least_period(chain: Chain, platform: Platform, cuts: Sequence[int]) -> Fraction | None:
    """Try every sum of consecutive loads, the shortest first."""
    every = loads(chain, platform, cuts)
    sums = {sum(every[i:j], Fraction(0)) for i in range(len(every)) for j in range(i + 1, len(every) + 1)}
    for period in sorted(total for total in sums if total >= max(every)):
        counts = groups(every, period)
        if all(
            memory(chain, platform, start, stop, count) <= platform.memory_bytes
            for (start, stop), count in zip(pairwise(cuts), counts, strict=True)
        ):
            return period
    return None


def best_contiguous(chain: Chain, platform: Platform) -> Fraction | None:
    periods = [least_period(chain, platform, cuts) for cuts in all_cuts(len(chain.layers), platform.num_devices)]
    return min((period for period in periods if period is not None), default=None)


def smallest_memory(chain: Chain, platform: Platform) -> int:
    """With one micro-batch in flight everywhere, which a long enough period allows."""
    return min(
        max(math.ceil(memory(chain, platform, start, stop, 1)) for start, stop in pairwise(cuts))
        for cuts in all_cuts(len(chain.layers), platform.num_devices)
    )


def fewest_in_flight(forward: Sequence[int], backward: Sequence[int], transfer: Sequence[int], period: int) -> set:
    """Micro-batches in flight per stage of every periodic pattern whose operations start at whole times.

    Each stage has its own device, each cut its own link. Returns the Pareto-best vectors.
    """
    road: list[tuple[int, int]] = []  # (duration, resource), down and up again
    last = len(forward) - 1
    for stage in range(last + 1):
        road.append((forward[stage], 2 * stage))
        if stage < last:
            road.append((transfer[stage], 2 * stage + 1))
    for stage in range(last, -1, -1):
        if stage < last:
            road.append((transfer[stage], 2 * stage + 1))
        road.append((backward[stage], 2 * stage))
    found: set[tuple[int, ...]] = set()
    # Waiting a whole period before an operation changes nothing but adds to what is in flight.
    for waits in product(range(period), repeat=len(road) - 1):
        starts = [0]
        for (duration, _), wait in zip(road, waits, strict=False):
            starts.append(starts[-1] + duration + wait)
        if _overlap(road, starts, period):
            continue
        vector = []
        for stage in range(last + 1):
            begin = starts[2 * stage]
            index = len(road) - 1 - 2 * stage
            stays = starts[index] + road[index][0] - begin
            vector.append(max(1, -(-stays // period)))
        found.add(tuple(vector))
    return {one for one in found if not any(other != one and all(map(int.__le__, other, one)) for other in found)}


def _overlap(road: list[tuple[int, int]], starts: list[int], period: int) -> bool:
    busy: dict[int, set[int]] = {}
    for (duration, resource), start in zip(road, starts, strict=True):
        for moment in range(start, start + duration):
            if moment % period in busy.setdefault(resource, set()):
                return True
            busy[resource].add(moment % period)
    return False
