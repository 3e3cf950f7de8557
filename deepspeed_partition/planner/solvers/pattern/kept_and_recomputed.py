"""Optimal patterns of identical stages that hold fewer micro-batches than they need: some kept, some recomputed.

Source: "Optimal Steady-State Schedules for Memory-Efficient Pipeline Parallelism" (slides), for a backward of
twice the forward; the schedules of all devices but the first, and other ratios, are ours.

N devices have one stage each, of forward tF = 1 and backward tB = r, a whole number, and room for K < N stashes.
Time is cut into blocks of a forward slot and a backward slot; device i (from 1) is i - 1 forwards later than
device 1, so that a micro-batch whose forwards follow one another has them in the same block everywhere. With
w = N - K and c = r + 2 the pattern has L = c (N - 1) + 1 blocks:

    runs   b = 0:  blocks -(K - 1) to 0;  b = 1 to c - 1:  blocks b (N - 1) - (K - 2) to b (N - 1)
    gaps   b = 0 to c - 1:  blocks b (N - 1) + 1 to b (N - 1) + w

- Each block x of a run has one micro-batch that all devices keep: its forward in the forward slot of block x, its
  backward on device i in the backward slot of block x + N - i. Nothing waits on its way.
- Each block x of the gaps 0 to c - 2 has one that is recomputed: its backward, too, in block x + N - i. Devices
  i > w keep it, with the forward in block x. The others recompute it: right before the backward where that forward
  slot is free (the last w - i + 1 of a gap), else K - 1 blocks earlier. What is left, the backward slots of the
  last gap (r forwards each) and w forward slots, takes the forwards that keep nothing.

Device 1 is never idle and always full, so that no schedule is faster: (r + 1) L for (r + 1) N + K - 1 - r
micro-batches, c (K - 1) + 1 of them kept. On device i <= w, a window of N - i + 1 blocks contains at most K blocks
of runs, and fewer by what is recomputed K - 1 blocks earlier where that is alive; on the others, N - i + 1 <= K
micro-batches are alive.
"""

from __future__ import annotations

from bisect import bisect_right

Begins = dict[tuple[str, int, int], int]
"""Begin of each operation on its micro-batch: by the first letter of its name, its stage, and the number of the
micro-batch in the pattern."""


def kept_and_recomputed(num_stages: int, slots: int, ratio: int) -> tuple[int, int, Begins]:
    """Return the optimal pattern of identical stages: its length, its number of micro-batches, and its operations.

    Times are in forwards of a stage. Stages that recompute a micro-batch run ``f``, ``R`` and ``B`` on it, others
    ``F`` and ``B``.

    Args:
        num_stages: stages, each on a device of its own.
        slots: micro-batches of which a device can keep the stash; at least 1 and fewer than stages.
        ratio: how many forwards a backward lasts; a whole number of at least 1.
    """
    assert 1 <= slots < num_stages and ratio >= 1
    size, missing, runs = 1 + ratio, num_stages - slots, ratio + 2
    blocks = runs * (num_stages - 1) + 1
    kept = [-back for back in range(slots)]
    kept += [run * (num_stages - 1) - back for run in range(1, runs) for back in range(slots - 1)]
    loose = [gap * (num_stages - 1) + 1 + place for gap in range(runs - 1) for place in range(missing)]
    begins: Begins = {}
    for stage in range(num_stages):
        later, back = stage, num_stages - 1 - stage
        for number, block in enumerate(kept + loose):
            begins["B", stage, number] = later + (block + back) * size + 1
            if number < len(kept) or stage >= missing:
                begins["F", stage, number] = later + block * size
    length, first = blocks * size, len(kept)
    latest = [begins["F", missing, first + number] for number in range(len(loose))]
    for stage in reversed(range(missing)):
        for number, block in enumerate(loose):
            behind = block + num_stages - 1 - stage
            free = (block - 1) % (num_stages - 1) >= stage
            begins["R", stage, first + number] = stage + (behind if free else behind - slots + 1) * size
        free_times = _free_forwards(stage, num_stages, missing, ratio)
        latest = _before(free_times, length, [each - 1 for each in latest])
        for number, begin in enumerate(latest):
            begins["f", stage, first + number] = begin
    return length, len(kept) + len(loose), begins


def _free_forwards(stage: int, num_stages: int, missing: int, ratio: int) -> list[int]:
    """Return when a stage that recomputes has room for forwards that keep nothing."""
    size, runs = ratio + 1, ratio + 2
    times = [block * size + 1 + each for block in range(-stage, missing - stage) for each in range(ratio)]
    times += [block * size for block in range(1, missing - stage + 1)]
    last_gap = (runs - 1) * (num_stages - 1)
    times += [(last_gap + place) * size for place in range(missing - stage + 1, missing + 1)]
    return [stage + time for time in times]


def _before(free: list[int], length: int, latest: list[int]) -> list[int]:
    """Return free times that repeat with ``length``, in the order of ``latest`` and as late as these allow."""
    times = sorted(time % length for time in free)
    count = len(times)

    def nth(number: int) -> int:
        return number // count * length + times[number % count]

    places = [each // length * count + bisect_right(times, each % length) - 1 for each in latest]
    offset = min(place - number for number, place in enumerate(places))
    return [nth(number + offset) for number in range(count)]
