"""Measurement of what an engine does for a forward or a backward of a stage beside its layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

NUM_WARM_UP, NUM_REPEATS = 4, 40
WIDTH, SMALL_ROWS, LARGE_ROWS = 64, 64, 8192
"""Shapes of the two messages (16 kB and 2 MB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """What a forward or backward of a stage takes beside its layers, as in ``Platform``."""

    operation_seconds: float = 0.0
    """Seconds, whatever the size of its messages."""
    copy_bandwidth: float | None = None
    """Bytes per second of its messages, in and out; None: they move by themselves."""


def measure_operations(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> OperationCost:
    """Measure what an operation of a stage takes beside its layers, on a CPU; a collective.

    That is what a message in and a message out take of the processor, which would compute meanwhile: neighbours
    hand a tensor to each other, in turns, and each copies what it was handed, which is subtracted. Other pairs of
    neighbours do so at the same time: first those that begin at an even rank, then those that begin at an odd one.
    The processor's seconds of all threads count, so that it matters little what else the machine does.

    Args:
        group: the ranks of a pipeline, in its order; by default all ranks.
        device: where layers compute; by default the CPU.

    Returns:
        The most that any rank takes, the same on every rank of the group. Nothing on a GPU, which is given work
        before it has come to it, and in a group of one rank, where no messages travel.
    """
    if torch.device("cpu" if device is None else device).type != "cpu" or dist.get_world_size(group) < 2:
        return OperationCost()
    most = torch.zeros(2, dtype=torch.float64)
    for peer, starts in _neighbours(group):
        seconds = [_seconds_beside(peer, starts, num_rows, group) for num_rows in (SMALL_ROWS, LARGE_ROWS)]
        most = torch.maximum(most, torch.tensor(seconds, dtype=torch.float64))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    small, large = most.tolist()
    # A message in and one out.
    per_byte = (large - small) / (2 * (LARGE_ROWS - SMALL_ROWS) * WIDTH * torch.float32.itemsize)
    if per_byte <= 0:  # noise
        return OperationCost(operation_seconds=max(0.0, small))
    return OperationCost(operation_seconds=max(0.0, small), copy_bandwidth=1 / per_byte)


def _neighbours(group: dist.ProcessGroup | None) -> Iterator[tuple[int, bool]]:
    """Yield the global rank of each neighbour, and whether this rank begins, when both are ready."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    for first in (0, 1):
        dist.barrier(group=group)
        starts = (rank - first) % 2 == 0 and rank >= first
        peer = rank + 1 if starts else rank - 1
        if first <= min(rank, peer) and max(rank, peer) < num_ranks:
            yield (peer if group is None else dist.get_global_rank(group, peer)), starts


def _seconds_beside(peer: int, starts: bool, num_rows: int, group: dist.ProcessGroup | None) -> float:
    """Return the seconds of the processor for a message in and one out, beside what is computed."""
    received = torch.zeros(num_rows, WIDTH)

    def send() -> None:
        _done(dist.isend(received.clone(), peer, group=group))

    def receive() -> None:
        _done(dist.irecv(received, peer, group=group))

    def hand_over() -> None:
        for step in (send, receive) if starts else (receive, send):
            step()

    for _ in range(NUM_WARM_UP):
        hand_over()
    return _processor_seconds(hand_over) - _processor_seconds(received.clone)


def _done(work: dist.Work | None) -> None:
    assert work is not None, "this rank is in the group"
    work.wait()


def _processor_seconds(run: Callable[[], object]) -> float:
    """Return the least seconds of all threads of this process in one call of ``run``.

    More is noise: gloo's thread spins where both ways of a connection are used at once.
    """
    readings = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        run()
        readings.append(time.process_time() - start)
    return min(readings)
