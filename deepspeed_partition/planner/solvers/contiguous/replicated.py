"""PipeDream's partitioner: stages that may be replicated, on a hierarchy of links.

With T(i, j, m) the time per micro-batch of one stage of layers i to j on m workers, each of which takes every
m-th micro-batch and all-reduces its gradients once for each that it takes,

    T(i, j, m) = max(compute(i, j), allreduce(i, j, m)) / m
    A(i, j, m) = min( T(i, j, m),  min over c, q of  max( A(i, c, m - q), 2 C(c), T(c, j, q) ) )

is the period of the best pipeline of layers i to j on m workers; C(c) is the time of one tensor over the boundary
before layer c. On a hierarchy (devices in a machine, machines in a rack) the workers of a level are the groups
of the level below, and its compute(i, j) is the A of that group. All workers are used, as the source has it,
also where fewer would be faster; memory is not looked at.

Exact for this recurrence. Cost for L layers and M workers of a single level: O(L^2 M^2) operations on rows of
layers and O(L^2 M) memory; every level below another one costs L times that time.

Source: the PipeDream slides, "Automatic partitioning", with W the ring all-reduce, 2 (m - 1) / m of the
weights through each worker's link; the hierarchy is that of the SOSP paper, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.problem import Chain

Seconds = NDArray[np.float64]

REPLICATED = "pipedream-replicated"
MOST_REPLICAS = 64
"""Most devices that a caller with users asks for: the work grows with their square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Equal groups of devices that one kind of link joins; devices themselves at the lowest level.

    Raises:
        ValueError: there is no worker, or no bandwidth.
    """

    num_workers: int
    bandwidth: float
    """Bytes per second between two workers."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, int) or self.num_workers < 1:
            raise ValueError(f"num_workers is {self.num_workers!r}: it must be a whole number of at least 1")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth is {self.bandwidth!r}: it must be more than 0 bytes per second")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStage:
    """Layers that run on several workers of a level, each with the same share of the micro-batches."""

    layers: tuple[int, int]
    """Layers of the stage, half-open: the first one, and the first one of the next stage."""
    num_replicas: int
    inside: tuple[ReplicatedStage, ...] = ()
    """Partition of these layers within each replica; empty where a replica is a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedPipeline:
    """Pipeline that PipeDream would run."""

    stages: tuple[ReplicatedStage, ...]
    """Stages of the highest level."""
    period_seconds: float
    """Seconds per micro-batch, by PipeDream's own count: no memory, no waiting."""
    bytes_per_micro_batch: float
    """Bytes per micro-batch over all links: activations and gradients at the boundaries, and the all-reduces."""

    @property
    def num_in_flight(self) -> int:
        """Micro-batches that each replica of the first stage starts with (PipeDream's NOAM)."""
        return -(-sum(stage.num_replicas for stage in self.stages) // self.stages[0].num_replicas)


def pipedream_replicated(
    chain: Chain, levels: Sequence[Level], deadline: Deadline | None = None
) -> ReplicatedPipeline:
    """Return the pipeline of the shortest period by PipeDream's recurrence, on all workers of ``levels``.

    Args:
        levels: from the devices of one machine upwards. A single level: ``[Level(num_workers=8,
            bandwidth=12e9)]``.

    Raises:
        ValueError: there are no levels.
        DeadlinePassed: the deadline passed; there is no answer before everything is looked at.
    """
    if not levels:
        raise ValueError("levels is empty: a platform has at least one level of devices")
    times = _prefix([layer.compute_seconds for layer in chain.layers])
    group = np.where(_later(chain), times[None, :] - times[:, None], np.inf)
    tables: list[_Table] = []
    for level in levels:
        first_rows = 1 if level is levels[-1] else chain.num_layers + 1
        tables.append(_Table(chain, level, group, first_rows, deadline or Deadline()))
        group = tables[-1].best[level.num_workers]
    stages = _stages(tables, 0, chain.num_layers)
    return ReplicatedPipeline(
        stages=stages,
        period_seconds=float(group[0, chain.num_layers]),
        bytes_per_micro_batch=_bytes(chain, stages),
    )


class _Table:
    """Table of A(i, j, m) of one level, for i below ``num_rows``, with the choices that lead there."""

    def __init__(self, chain: Chain, level: Level, group: Seconds, num_rows: int, deadline: Deadline) -> None:
        weights = _prefix([layer.weight_bytes for layer in chain.layers])
        sync = (weights[None, :] - weights[:, None]) / level.bandwidth
        self.best: list[Seconds] = [np.full((num_rows, chain.num_layers + 1), np.inf)]
        self.boundary: list[NDArray[np.intp]] = [np.zeros((num_rows, chain.num_layers + 1), dtype=np.intp)]
        """First layer of the last stage, [i, j] for each m; 0: there is only one stage."""
        self.last: list[NDArray[np.intp]] = [np.zeros_like(self.boundary[0])]
        """Replicas of the last stage, [i, j] for each m."""
        transfers = np.array([2 * chain.boundary_bytes(c) / level.bandwidth for c in range(1, chain.num_layers)])
        one_stage = [group]
        for m in range(1, level.num_workers + 1):
            one_stage.append(np.maximum(group, 2 * (m - 1) / m * sync) / m)
            best = one_stage[m][:num_rows].copy()
            boundary, last = np.zeros_like(self.boundary[0]), np.full_like(self.last[0], m)
            for q in range(1, m if chain.num_layers > 1 else 1):
                before = np.maximum(self.best[m - q][:, 1:-1], transfers)  # [i, c], from c = 1 on
                for row in range(num_rows):
                    deadline.check()
                    candidate = np.maximum(before[row, :, None], one_stage[q][1:-1])  # [c, j]
                    c = candidate.argmin(axis=0)
                    least = np.take_along_axis(candidate, c[None, :], axis=0)[0]
                    better = least < best[row]
                    best[row, better], boundary[row, better], last[row, better] = least[better], c[better] + 1, q
            self.best.append(best)
            self.boundary.append(boundary)
            self.last.append(last)

    def stages(self, start: int, stop: int, num_workers: int) -> list[tuple[int, int, int]]:
        """Return the first layer, the end (half-open) and the replicas of each stage, in order."""
        found = []
        while True:
            boundary = int(self.boundary[num_workers][start, stop])
            replicas = int(self.last[num_workers][start, stop])
            found.append((boundary or start, stop, replicas))
            if not boundary:
                return found[::-1]
            stop, num_workers = boundary, num_workers - replicas


def _stages(tables: Sequence[_Table], start: int, stop: int) -> tuple[ReplicatedStage, ...]:
    if not tables:
        return ()
    *below, table = tables
    return tuple(
        ReplicatedStage(layers=(first, end), num_replicas=replicas, inside=_stages(below, first, end))
        for first, end, replicas in table.stages(start, stop, len(table.best) - 1)
    )


def _bytes(chain: Chain, stages: Sequence[ReplicatedStage]) -> float:
    over_boundaries = sum(2 * chain.boundary_bytes(left.layers[1]) for left, _ in pairwise(stages))
    return over_boundaries + sum(
        2 * (stage.num_replicas - 1) / stage.num_replicas
        * sum(layer.weight_bytes for layer in chain.layers[slice(*stage.layers)])
        + _bytes(chain, stage.inside)
        for stage in stages
    )  # fmt: skip


def _later(chain: Chain) -> NDArray[np.bool_]:
    """Return, as entry [i, j], whether there are layers from i to j."""
    return np.triu(np.ones((chain.num_layers + 1, chain.num_layers + 1), dtype=bool), 1)


def _prefix(values: Sequence[float]) -> Seconds:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])
