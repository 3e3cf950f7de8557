"""Measurement of the links between neighbouring ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

SMALL_BYTES = 64
LARGE_BYTES = 8 * 2**20
WARM_UP = 3
REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Cost of a transfer in seconds: ``latency_seconds`` + bytes / ``bandwidth``, as in ``Platform``."""

    bandwidth: float
    """Bandwidth of the link, in bytes per second."""
    latency_seconds: float
    """Seconds that each transfer takes beside its bytes."""


def measure_links(group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> Link:
    """Measure bandwidth (bytes per second) and latency (seconds) of a group's slowest link; a collective.

    Each pair of neighbours sends a small and a large message forth and back, the median of several times.
    As in a pipeline, other pairs do so at the same time: first those that begin at an even rank, then those
    that begin at an odd one.

    Args:
        group: the ranks of a pipeline, in its order; by default all ranks.
        device: the GPU where the messages lie, for NCCL; by default the current one. Otherwise on the CPU.

    Returns:
        The link, the same on every rank of the group.

    Raises:
        ValueError: there are no links: ``torch.distributed`` is not initialized, or the group has one rank.
    """
    if not dist.is_initialized():
        raise ValueError("links are measured between ranks, and torch.distributed is not initialized")
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if num_ranks < 2:
        raise ValueError("links are measured between ranks, and the group has only one")
    place = _message_device(group, device)
    slowest_bandwidth, longest_latency = float("inf"), 0.0
    for first in (0, 1):
        dist.barrier(group=group)
        starts = (rank - first) % 2 == 0 and rank >= first
        peer = rank + 1 if starts else rank - 1
        if not first <= min(rank, peer) or max(rank, peer) >= num_ranks:
            continue  # no neighbour in this round
        small = _one_way_seconds(SMALL_BYTES, peer, starts, group, place)
        large = _one_way_seconds(LARGE_BYTES, peer, starts, group, place)
        if starts:
            link = fit(small, large)
            slowest_bandwidth = min(slowest_bandwidth, link.bandwidth)
            longest_latency = max(longest_latency, link.latency_seconds)
    worst = torch.tensor([1 / slowest_bandwidth, longest_latency], dtype=torch.float64, device=place)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    seconds_per_byte, latency_seconds = worst.tolist()
    return Link(bandwidth=1 / seconds_per_byte, latency_seconds=latency_seconds)


def fit(small_seconds: float, large_seconds: float) -> Link:
    """Return the link on which ``SMALL_BYTES`` and ``LARGE_BYTES`` take these seconds, each one way."""
    if large_seconds <= small_seconds:  # noise: the latency hides all that the bytes cost
        return Link(bandwidth=LARGE_BYTES / large_seconds, latency_seconds=0.0)
    seconds_per_byte = (large_seconds - small_seconds) / (LARGE_BYTES - SMALL_BYTES)
    return Link(
        bandwidth=1 / seconds_per_byte,
        latency_seconds=max(0.0, small_seconds - SMALL_BYTES * seconds_per_byte),
    )


def _one_way_seconds(
    num_bytes: int, peer: int, starts: bool, group: dist.ProcessGroup | None, device: torch.device
) -> float:
    """Return half the seconds of a message forth and back."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    other = peer if group is None else dist.get_global_rank(group, peer)
    readings = []
    for _ in range(WARM_UP + REPEATS):
        start = _now(device)
        for sends in (starts, not starts):
            if sends:
                dist.send(message, dst=other, group=group)
            else:
                dist.recv(message, src=other, group=group)
        readings.append(_now(device) - start)
    return statistics.median(readings[WARM_UP:]) / 2


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _message_device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    wanted = torch.device("cuda" if device is None else device)
    if "nccl" not in dist.get_backend(group) or wanted.type != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
