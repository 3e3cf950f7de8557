"""Brute force, as simple as can be: what the planner's answers are compared with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

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
    before = chain.layers[start - 1].output_bytes if start else 0
    after = chain.layers[stop - 1].output_bytes if stop < len(chain.layers) else 0
    kept = training_bytes(chain, platform, [(start, stop)]) + platform.fixed_bytes
    running = in_flight * stash(chain, start, stop) + transient(chain, start, stop)
    optimizer = step_of_optimizer(chain, platform, [(start, stop)])
    return kept + max(running + platform.comm_buffers * (before + after), optimizer)


def training_bytes(chain: Chain, platform: Platform, stages: Iterable[tuple[int, int]]) -> Fraction:
    """What a device keeps for its weights, not rounded up; what layers share once."""
    total, seen = Fraction(0), set()
    for start, stop in stages:
        for layer in chain.layers[start:stop]:
            own = layer.weight_bytes - sum(size for name, size in layer.shared_weights if name in seen)
            seen |= {name for name, _ in layer.shared_weights}
            if layer.training_bytes is None:
                total += Fraction(str(platform.weight_copies)) * own
            else:
                again = layer.weight_bytes - own
                total += layer.training_bytes
                total -= layer.training_bytes * again // layer.weight_bytes if again else 0
    return total


def step_of_optimizer(chain: Chain, platform: Platform, stages: Iterable[tuple[int, int]]) -> int:
    needs = [layer.optimizer_transient_bytes for start, stop in stages for layer in chain.layers[start:stop]]
    reduction = sum(layer.reduction_bytes for start, stop in stages for layer in chain.layers[start:stop])
    return max(reduction, sum(needs) if platform.optimizer_step == "sum" else max(needs))


def stash(chain: Chain, start: int, stop: int) -> int:
    layers = chain.layers[start:stop]
    at_cut = layers[-1].cut_stash_bytes if stop < len(chain.layers) else 0
    return sum(layer.stash_bytes for layer in layers) + at_cut


def transient(chain: Chain, start: int, stop: int) -> int:
    """What a stage needs beyond its whole stash: per layer what is kept up to it, and what it needs to run."""
    most = 0
    for index in range(start, stop):
        layer = chain.layers[index]
        if layer.running_bytes is None:
            most = max(most, layer.transient_bytes)
        else:
            up_to_it = sum(each.stash_bytes for each in chain.layers[start:index]) + layer.running_bytes
            most = max(most, up_to_it - stash(chain, start, stop))
    return most


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


Placed = tuple[tuple[int, ...], tuple[int, ...]]
"""Boundaries, and the device of each stage."""


def all_placements(num_layers: int, num_devices: int) -> Iterator[Placed]:
    """Every allocation whose neighbouring stages are on different devices; devices numbered as they come."""

    def devices(count: int) -> Iterator[tuple[int, ...]]:
        if count == 0:
            yield ()
            return
        for earlier in devices(count - 1):
            for device in range(min(num_devices, max(earlier, default=-1) + 2)):
                if not earlier or earlier[-1] != device:
                    yield (*earlier, device)

    for cuts in all_cuts(num_layers, num_layers):
        for assigned in devices(len(cuts) - 1):
            yield cuts, assigned


def num_shared(placed: Placed) -> int:
    """Devices with several stages."""
    return sum(1 for device in set(placed[1]) if placed[1].count(device) > 1)


def estimated_period(chain: Chain, platform: Platform, placed: Placed, estimate: str) -> Fraction | None:
    """The least period at which no resource is overloaded and an estimate of each device's memory has room.

    ``"peak"``: for some stage i of the device, i has g_i micro-batches in flight, stages before it at least g_i,
    and any other at least g - 1. ``"safe"``: every stage has g.
    """
    cuts, devices = placed
    every, crossing = loads(chain, platform, cuts), list(pairwise(devices))
    busy: dict[object, Fraction] = {}
    for index, load in enumerate(every):
        place: object = frozenset(crossing[index // 2]) if index % 2 else devices[index // 2]
        busy[place] = busy.get(place, Fraction(0)) + load
    sums = {sum(every[i:j], Fraction(0)) for i in range(len(every)) for j in range(i + 1, len(every) + 1)}
    least = max(busy.values())
    for period in sorted(total for total in sums | {least} if total >= least):
        if all(
            _estimated_bytes(chain, platform, placed, device, groups(every, period), estimate)
            <= platform.memory_bytes
            for device in set(devices)
        ):
            return period
    return None


def _estimated_bytes(
    chain: Chain, platform: Platform, placed: Placed, device: int, group: Sequence[int], estimate: str
) -> Fraction:
    cuts, devices = placed
    mine = [stage for stage in range(len(devices)) if devices[stage] == device]
    layers = {stage: (cuts[stage], cuts[stage + 1]) for stage in mine}
    kept = {stage: stash(chain, *layers[stage]) for stage in mine}
    running = {stage: transient(chain, *layers[stage]) for stage in mine}
    sent = [0, *(chain.layers[cut - 1].output_bytes for cut in cuts[1:-1]), 0]
    constant = training_bytes(chain, platform, layers.values()) + platform.fixed_bytes
    floor = constant + step_of_optimizer(chain, platform, layers.values())
    constant += platform.comm_buffers * sum(sent[stage] + sent[stage + 1] for stage in mine)
    if estimate == "safe":
        safe = constant + sum(group[stage] * kept[stage] for stage in mine) + max(running.values())
        return max(safe, floor)

    def at_forward(i: int) -> int:
        fewest = {j: max(group[j] - 1, group[i]) if j <= i else group[j] - 1 for j in mine}
        return sum(fewest[j] * kept[j] for j in mine) + running[i]

    return max(constant + max(at_forward(i) for i in mine), floor)


def a_pattern_exists(chain: Chain, platform: Platform, placed: Placed, period: int) -> bool:
    """Whether some pattern of a whole period fits, memory to the letter of the formats; all times are whole.

    Every operation begins at every moment of the period, the first one that comes after the operation before it
    on the road: a longer wait only adds to what is kept. Between whole times nothing begins or ends.
    """
    cuts, devices = placed
    stages = range(len(devices))
    sends = [int(platform.transfer_seconds(chain.layers[cut - 1].output_bytes)) for cut in cuts[1:-1]]
    layers = [chain.layers[start:stop] for start, stop in pairwise(cuts)]
    down: list[tuple[str, int, object]] = []
    up: list[tuple[str, int, object]] = []
    for stage in stages:
        if stage:
            link = frozenset(devices[stage - 1 : stage + 1])
            down.append((f"SF{stage - 1}", sends[stage - 1], link))
            up.append((f"SB{stage - 1}", sends[stage - 1], link))
        down.append((f"F{stage}", sum(int(layer.forward_seconds) for layer in layers[stage]), devices[stage]))
        up.append((f"B{stage}", sum(int(layer.backward_seconds) for layer in layers[stage]), devices[stage]))
    road = [*down, *reversed(up)]

    # Every way to place the operations of each resource within the period, and every combination of those; the
    # ways of the first resource one after the other, so that the arrays stay small.
    ways = {place: _ways(road, place, period) for _, _, place in road}
    first = road[0][2]
    return any(
        _some_combination_fits(chain, platform, placed, period, road, {**ways, first: one[None, :]})
        for one in ways[first]
    )


def _some_combination_fits(
    chain: Chain,
    platform: Platform,
    placed: Placed,
    period: int,
    road: list[tuple[str, int, object]],
    ways: dict[object, NDArray[np.int64]],
) -> bool:
    cuts, devices = placed
    stages = range(len(devices))
    layers = [chain.layers[start:stop] for start, stop in pairwise(cuts)]
    chosen = np.meshgrid(*(np.arange(len(each)) for each in ways.values()), indexing="ij")
    which = dict(zip(ways, (each.ravel() for each in chosen), strict=True))
    begins, ends = {}, {}
    now = np.zeros(len(which[road[0][2]]), dtype=np.int64)
    counts = dict.fromkeys(ways, 0)
    for name, duration, place in road:
        at = ways[place][which[place], counts[place]]
        counts[place] += 1
        begins[name] = now + (at - now) % period
        now = ends[name] = begins[name] + duration

    def waits(begin: NDArray[np.int64], end: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        return (now - begin) // period - (now - end) // period

    def alive(begin: NDArray[np.int64], end: NDArray[np.int64], now: int) -> NDArray[np.int64]:
        return waits(begin, end, now) + ((begin == end) & ((now - begin) % period == 0))

    fits = np.ones(len(now), dtype=bool)
    for moment, device in product(range(period), sorted(set(devices))):
        here = [each for each, place in zip(pairwise(cuts), devices, strict=True) if place == device]
        for_weights = float(training_bytes(chain, platform, here) + platform.fixed_bytes)
        fits &= for_weights + step_of_optimizer(chain, platform, here) <= platform.memory_bytes
        total = np.full(len(now), for_weights)
        running = np.zeros(len(now))
        for stage in (stage for stage in stages if devices[stage] == device):
            forward, backward = f"F{stage}", f"B{stage}"
            of_stage = chain, cuts[stage], cuts[stage + 1]
            total += alive(begins[forward], ends[backward], moment) * stash(*of_stage)
            for name in (forward, backward):
                runs = alive(begins[name], ends[name], moment) > 0
                running = np.maximum(running, runs * transient(*of_stage))
            if stage < stages[-1]:  # the upper end of the cut below
                waiting = waits(ends[forward], ends[f"SF{stage}"], moment)
                waiting += waits(begins[f"SB{stage}"], begins[backward], moment)
                total += np.maximum(platform.comm_buffers, waiting) * layers[stage][-1].output_bytes
            if stage > 0:  # the lower end of the cut above
                waiting = waits(begins[f"SF{stage - 1}"], begins[forward], moment)
                waiting += waits(ends[backward], ends[f"SB{stage - 1}"], moment)
                total += np.maximum(platform.comm_buffers, waiting) * layers[stage - 1][-1].output_bytes
        fits &= total + running <= platform.memory_bytes
    return bool(fits.any())


def _ways(road: list[tuple[str, int, object]], place: object, period: int) -> NDArray[np.int64]:
    """[way, operation]: when the operations of a device or link begin so that none overlap; F0 at 0."""
    mine = [(name, duration) for name, duration, where in road if where == place]
    found = []
    for begins in product(*([0] if name == "F0" else range(period) for name, _ in mine)):
        moments = [
            (begin + passed) % period
            for begin, (_, duration) in zip(begins, mine, strict=True)
            for passed in range(duration)
        ]
        if len(set(moments)) == len(moments):
            found.append(begins)
    return np.array(found, dtype=np.int64).reshape(-1, len(mine))
