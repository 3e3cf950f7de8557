"""The paper's dynamic program as it is worded: all values T(l, p, t, m, V), from l = 0 upwards.

``madpipe-paper`` computes only those that its answer depends on. This is for the comparison of times, and for a
test that both find the same value.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import NOTHING, Grid


def whole_table(grid: Grid, target: int) -> int:
    """T(L, P - 1, 0, 0, 0) in ticks, rounded up; ``NOTHING`` where there is no allocation."""
    num_delays, num_counts, num_memories, num_loads = grid.shape
    load, memory = np.arange(num_loads), np.arange(num_memories)
    values: list[NDArray[np.int64]] = []
    """[l][p, V, m, t]; ticks times ``grid.scale``"""
    values.append(np.broadcast_to(load * grid.total, (num_counts, num_delays, num_memories, num_loads)))
    for stop in range(1, grid.num_layers + 1):
        stages = grid.stages(stop, target)
        best = np.full((num_counts, num_delays, num_memories, num_loads), NOTHING)
        whole = grid.scale * int(grid.loads[0, stop])
        fits = memory[None, :] <= stages.special_fits[0][:, None]
        best[0] = np.where(fits[:, :, None], whole + load * grid.total, NOTHING)
        for start in range(stop):
            cut, compute = grid.scale * int(grid.transfer[start]), grid.scale * int(grid.loads[start, stop])
            # A delay above the grid is of no interest where no layers are left.
            known = np.full(num_delays, True) if start == 0 else stages.delay[start] >= 0
            normal = np.flatnonzero(known & stages.normal_fits[start])
            reached = values[start][:-1, stages.delay[start][normal]]
            best[1:, normal] = np.minimum(best[1:, normal], np.maximum(reached, max(cut, compute)))

            loaded = np.minimum(load + grid.load_adds[start, stop], grid.last_load)
            for delay in np.flatnonzero(known & (stages.special_fits[start] >= 0)):
                room = int(stages.special_fits[start][delay]) + 1
                kept = memory[:room] + stages.special_adds[start][delay]
                reached = values[start][1:, stages.delay[start][delay]][:, kept][:, :, loaded]
                cost = np.maximum(reached, np.maximum(loaded * grid.total, cut))
                best[1:, delay, :room] = np.minimum(best[1:, delay, :room], cost)
        values.append(best)
    found = int(values[-1][-1, 0, 0, 0])
    return NOTHING if found == NOTHING else -(-found // grid.scale)
