"""A memory bound for two stages of one device: whether their micro-batches in flight can avoid one another.

Stage i comes before stage j on the path of a micro-batch. At a period T, a stage whose delay from the start of
its forward to the end of its backward is ``(m - 1) T + r`` keeps m micro-batches during an *arc* of length r of
the period, from its forward to its backward, and m - 1 during the rest. Where both arcs meet, the device keeps
one more of both. With i beginning at 0 and j at p + h T, there are few ways for them to lie, since operations of
a device exclude one another::

    apart      0 [i] r_i <= p [j]                       most of i alone, and of j alone
    j in i     0 [i F_i <= p [j] r_i - B_i ]            both while j runs
    i in j     the same with i and j exchanged          both while i runs
    crossing   anything else                            both while either runs

The way from F_i to F_j takes at least ``ahead`` and that from B_j to B_i at least ``back``, so j cannot begin
anywhere: p + h T >= ahead, and i's delay is longer than p + h T plus j's delay by ``back`` at least.
1F1B* gives the least m and r of each stage. A stage may keep more than that, which costs bytes, to move its arc.

These are some of the rules for a schedule, so the bound is a lower one: where no way has room, no schedule has.
With two stages on the device it is mostly that of the integer program, in a thousandth of the time. Cost:
constant time and memory for each pair, O(S^2) for S stages on the device. Source: an addition to the MadPipe
paper, section 4.2.1, which estimates this memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
MOST_EXTRA = 2
"""Most micro-batches beyond the fewest that are looked at; a stage with room for more counts as if it fitted."""


@dataclass(frozen=True, slots=True)
class Side:
    """One stage of each pair; arrays have an entry for each pair."""

    group: Integers
    fill: Integers
    """Fill of the least delay, in ticks; ``group`` is its group."""
    forward: Integers
    backward: Integers
    stash: Integers
    transient: Integers

    def pick(self, chosen: NDArray[np.intp]) -> Side:
        return Side(*(getattr(self, each.name)[chosen] for each in fields(self)))


def may_share(period: int, room: Integers, i: Side, j: Side, ahead: Integers, back: Integers) -> NDArray[np.bool_]:
    """Return, for each pair, whether two stages of a device have room together.

    Args:
        period: the period, in ticks.
        room: bytes beside weights, buffers, and ``group - 1`` micro-batches of every stage of the device.
        i: the stage that comes first.
        j: the stage that comes later.
        ahead: the least ticks from the start of i's forward to the start of j's.
        back: the least ticks from the end of j's backward to the end of i's.
    """
    found: NDArray[np.bool_] = i.stash + j.stash + np.maximum(i.transient, j.transient) <= room
    open_ = np.flatnonzero(~found)
    if len(open_):
        least = least_room(period, i.pick(open_), j.pick(open_), ahead[open_], back[open_])
        found[open_] = least <= np.broadcast_to(room, found.shape)[open_]
    return found


def least_room(period: int, i: Side, j: Side, ahead: Integers, back: Integers) -> Integers:
    """Return, for each pair, the least room with which ``may_share`` is true, in bytes."""
    one_i, one_j = i.stash + i.transient, j.stash + j.transient
    apart = np.maximum(one_i, one_j)
    j_in_i = np.maximum(one_i, i.stash + one_j)
    i_in_j = np.maximum(one_j, j.stash + one_i)
    crossing = np.maximum(j_in_i, i_in_j)
    least: Integers = np.minimum(crossing, apart + (MOST_EXTRA + 1) * np.minimum(i.stash, j.stash))

    def allow(num_bytes: Integers, possible: NDArray[np.bool_]) -> None:
        np.minimum(least, num_bytes, out=least, where=possible)

    for extra_j in range(MOST_EXTRA + 1):
        j_fill = j.forward + j.backward if extra_j else j.fill
        for extra_i in range(MOST_EXTRA + 1):
            i_fill = i.forward + i.backward if extra_i else i.fill
            kept = extra_i * i.stash + extra_j * j.stash
            # Periods that i's delay has beyond j's: h of them go before j, the rest after it.
            more = i.group + extra_i - j.group - extra_j

            h = np.maximum(0, -(-(ahead + j_fill - period) // period))
            allow(apart + kept, (i_fill + j_fill <= period) & ((more - h) * period >= back + j_fill))

            h = np.maximum(0, -(-(ahead + j.forward) // period) - 1)
            fits = i_fill + j.forward + j.backward <= period
            allow(i_in_j + kept, fits & ((more - h - 1) * period >= back + j.backward))

            for periods in range(int(more.max(initial=-1)) + 1):
                begin = np.maximum(i.forward, ahead - periods * period)
                fits = (periods <= more) & (begin + j_fill + i.backward <= period)
                allow(j_in_i + kept, fits & ((more - periods + 1) * period >= begin + j_fill + back))
    return least
