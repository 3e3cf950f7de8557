"""Interleaved allocations: several stages per device in a regular pattern, and the layers balanced over them.

Patterns of devices, for v stages per device:

    round robin       0 1 2 3 0 1 2 3        Megatron-LM (D. Narayanan et al., 2021, section 2.2)
    there and back    0 1 2 3 3 2 1 0        zero-bubble's V (P. Qi et al., 2023); repeated, the waves of Hanayo
                                             (Z. Liu et al., 2023)
    and one more      0 1 2 3 0 1 2 3 0      the last layers go back to one of the other devices
    and two more      3 0 1 2 3 0 1 2 3 0    the first layer, too, is a stage of its own

Cuts give each stage as many layers, or time in the proportions of a few sequences of rounds; ``balanced`` then
moves layers from the busiest device. The last device begins last and ends first, so a head there makes the step
longer by m times its ticks; on the first device it takes the time in which the others wait for fill and drain. The
weights of an embedding and of a head are large: where one device has no room for both and for what it has in
flight, an embedding goes to another one.

Method: enumeration, and hill climbing on the busiest device's time; an addition to the papers. Cost: O(S^2)
for each move of a layer between two of S stages, and at most ``MOST_MOVES`` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from deepspeed_partition.planner.allocation import Placement
from deepspeed_partition.planner.solvers.interface import Problem

MOST_STAGES_PER_DEVICE = 8
MOST_MOVES = 32
"""Most moves of a layer with which an allocation is balanced."""
MOST_HEADS = 4
"""Number of first devices to one of which the last layers go back; later ones wait for longer."""
SHORT_END = 0.8
"""Ticks of a first or a last stage, over the mean of all stages, up to which it may run at once."""
ALIKE = 1.1
"""Ticks of the longest stage between such ends, over the mean of these."""
MOST_STAGES_BALANCED = 64
"""Number of stages up to which cuts are balanced by moves."""


def interleaved(problem: Problem, ended: Callable[[], bool] = lambda: False) -> Iterator[Placement]:
    """Yield interleaved allocations of all devices, each once.

    Args:
        ended: whether the time is up: then no more are yielded.
    """
    size, num_devices = problem.chain.num_layers, problem.platform.num_devices
    seen: set[Placement] = set()
    for per_device in range(2, MOST_STAGES_PER_DEVICE + 1):
        if num_devices == 1 or per_device * num_devices > size:
            break
        there = list(range(num_devices))
        for devices in (there * per_device, [*there, *there[::-1]] * (per_device // 2) + there * (per_device % 2)):
            for cuts in _cuts(problem, per_device):
                if ended():
                    return
                placement = Placement.of(cuts, devices)
                if placement not in seen:
                    seen.add(placement)
                    yield placement
    for per_device in range(1, MOST_STAGES_PER_DEVICE + 1):
        for cuts, devices in _with_ends(problem, per_device):
            if ended():
                return
            placement = Placement.of(cuts, devices)
            if placement not in seen:
                seen.add(placement)
                yield placement


def balanced(problem: Problem, placement: Placement, ended: Callable[[], bool] = lambda: False) -> Placement:
    """Return an allocation with layers moved between stages, as long as that balances the devices' times.

    Args:
        ended: whether the time is up: then the allocation is as balanced as it has become.
    """
    ticks = np.diff(problem.times.compute).tolist()
    for _ in range(MOST_MOVES if len(placement.devices) <= MOST_STAGES_BALANCED else 0):
        cuts = None if ended() else _best_move(ticks, placement)
        if cuts is None:
            break
        placement = Placement(cuts, placement.devices)
    return placement


def short_ends(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Return the first and the last stage, as far as they are short and their devices have other stages.

    Where the stages between do not take about equally long, none: orders in turn are none for these.
    """
    devices = placement.devices
    ticks = np.diff(problem.times.compute[list(placement.cuts)])
    ends = tuple(
        stage
        for stage in (0, len(devices) - 1)
        if devices[stage] in devices[1:-1] and ticks[stage] <= SHORT_END * ticks.mean()
    )
    between = np.delete(ticks, ends)
    return ends if between.max() <= ALIKE * between.mean() else ()


def _best_move(ticks: Sequence[int], placement: Placement) -> tuple[int, ...] | None:
    """Return the cuts after the move of a layer from the busiest device that balances best; None: none helps."""
    cuts, devices = placement.cuts, placement.devices
    load = [0] * (max(devices) + 1)
    for (start, stop), device in zip(pairwise(cuts), devices, strict=True):
        load[device] += sum(ticks[start:stop])
    least, best = _imbalance(load), None
    busiest = load.index(max(load))
    for giver, (start, stop) in enumerate(pairwise(cuts)):
        for step in (1, -1) if stop - start > 1 and devices[giver] == busiest else ():
            moved, new = list(load), list(cuts)
            taker = giver + step
            while 0 <= taker < len(devices):
                # The stage before gives its layer at the boundary to this one, and so on.
                boundary = taker if step > 0 else taker + 1
                layer = cuts[boundary] - 1 if step > 0 else cuts[boundary]
                moved[devices[taker - step]] -= ticks[layer]
                moved[devices[taker]] += ticks[layer]
                new[boundary] -= step
                found = _imbalance(moved)
                if found < least:
                    least, best = found, tuple(new)
                taker += step
    return best


def _imbalance(load: Sequence[int]) -> tuple[int, int]:
    """Return the ticks of the busiest device for one micro-batch, and the sum of the squares of all devices'."""
    return max(load), sum(ticks * ticks for ticks in load)


def moved_layers(cuts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the cuts with one layer less in one stage and one more in another: those between move by a layer."""
    sizes = [stop - start for start, stop in pairwise(cuts)]
    for giver, layers in enumerate(sizes):
        for taker in range(len(sizes)) if layers > 1 else ():
            if giver < taker:
                yield (*cuts[: giver + 1], *(cut - 1 for cut in cuts[giver + 1 : taker + 1]), *cuts[taker + 1 :])
            elif taker < giver:
                yield (*cuts[: taker + 1], *(cut + 1 for cut in cuts[taker + 1 : giver + 1]), *cuts[giver + 1 :])


def _cuts(problem: Problem, per_device: int) -> Iterator[tuple[int, ...]]:
    """Yield cuts into ``per_device`` rounds over all devices.

    Stages have as many layers each, those with one more in a row or spread; or, for each way to share the layers
    of a device among the rounds, times or numbers of layers in that proportion: small stages in the first rounds
    fill the pipeline sooner. The first and the last layer, often an embedding and a head, do not count as layers
    there.
    """
    size, num_devices = problem.chain.num_layers, problem.platform.num_devices
    num_stages = per_device * num_devices
    yield from _cuts_in_a_row(size, num_stages)
    yield tuple(size * stage // num_stages for stage in range(num_stages + 1))
    for rounds in dict.fromkeys(_rounds(size // num_devices, per_device)):
        weights = [share for share in rounds for _ in range(num_devices)]
        yield _cuts_by_time(problem, weights)
        if size - 2 >= num_stages:
            yield _cuts_between_ends(size, weights)


def _cuts_in_a_row(size: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Yield cuts into stages of as many layers, those with one more first or last; both ends do not count.

    Devices that run stages of one round at a time wait for the longest of these, so all of a round are equal, but
    for one round.
    """
    ends = int(size - 2 >= num_stages)
    few, more = divmod(size - 2 * ends, num_stages)
    sizes = [few + 1] * more + [few] * (num_stages - more)
    for each in dict.fromkeys((tuple(sizes), tuple(reversed(sizes)))):
        cuts = [0, *accumulate(each)]
        yield (0, *(cut + ends for cut in cuts[1:-1]), size)


def _with_ends(problem: Problem, per_device: int) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Yield cuts and devices of ``per_device`` rounds, one more stage, and one before them or none."""
    size, num_devices = problem.chain.num_layers, problem.platform.num_devices
    rounds = list(range(num_devices)) * per_device
    for cuts in _cuts_with_one_more(problem, per_device):
        for last in (*range(min(MOST_HEADS, num_devices - 1)), num_devices - 1):
            if last < num_devices - 1:
                yield cuts, [*rounds, last]
            if cuts[1] > 1 and cuts[-2] == size - 1:
                for first in dict.fromkeys((num_devices - 1, last)):
                    yield (0, 1, *cuts[1:]), [first, *rounds, last]


def _cuts_with_one_more(problem: Problem, per_device: int) -> Iterator[tuple[int, ...]]:
    """Yield cuts into ``per_device`` rounds over all devices, and one more stage.

    Rounds have as many layers in each stage, the embedding besides, and the last stage is the head; or each stage
    has as much time, and the first and the last one share that of one.
    """
    size, num_stages = problem.chain.num_layers, per_device * problem.platform.num_devices
    if num_stages + 1 > size or problem.platform.num_devices == 1:
        return
    if num_stages <= size - 2:
        for cuts in _cuts_in_a_row(size, num_stages):
            yield (*cuts[:-1], size - 1, size)
    yield _cuts_by_time(problem, [1, *[2] * (num_stages - 1), 1])


def _rounds(layers: int, per_device: int) -> Iterator[tuple[int, ...]]:
    """Yield how many of its layers a device has in each round."""
    yield (1,) * per_device
    for first in range(min(per_device, 4)):
        for last in (0, 1):
            middle, rest = per_device - first - last, layers - first - last
            if 0 < middle <= rest:
                share, more = divmod(rest, middle)
                yield (*(1,) * first, *[share] * (middle - more), *[share + 1] * more, *(1,) * last)
                yield (*(1,) * first, *[share + 1] * more, *[share] * (middle - more), *(1,) * last)


def _cuts_between_ends(size: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return cuts whose numbers of layers are in the proportion of ``weights``; both ends do not count."""
    inner, total, before, cuts = size - 2, sum(weights), 0, [0]
    for stage, weight in enumerate(weights[:-1], start=1):
        before += weight
        cuts.append(min(max(1 + inner * before // total, cuts[-1] + 1), size - (len(weights) - stage)))
    return (*cuts, size)


def _cuts_by_time(problem: Problem, weights: Sequence[int]) -> tuple[int, ...]:
    """Return cuts into stages whose times are as near as layers allow to the proportion of ``weights``."""
    size, compute, total = problem.chain.num_layers, problem.times.compute, sum(weights)
    cuts, before = [0], 0
    for stage, weight in enumerate(weights[:-1], start=1):
        before += weight
        target = int(compute[-1]) * before // total
        after = int(compute.searchsorted(target))
        nearer = after - int(after > 0 and target - compute[after - 1] < compute[after] - target)
        cuts.append(min(max(nearer, cuts[-1] + 1), size - (len(weights) - stage)))
    return (*cuts, size)
