"""Measurement of the links between neighbouring ranks, and of what their transfers share."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from deepspeed_partition.profiling.arrivals import wait_for_all

SMALL_BYTES = 64
LARGE_BYTES = 8 * 2**20
WARM_UP = 3
REPEATS, SMALL_REPEATS = 9, 41
MESSAGE_SECONDS, SMALLEST_MESSAGE_BYTES = 0.03, 2**18
"""How long a message is to take by which it is measured what transfers share, and its least bytes."""
NUM_MESSAGES, SHARED_REPEATS = 4, 3
FULL_BELOW = 1.4
"""How many times as long messages both ways may take as one way, if their directions do not share the link."""
SHARED_FROM = 1.6
"""How many times as long messages over two links take as over one, if the links share a port."""
BETWEEN_ALL = (
    "each rank of a group measures its own links, so that all of them must call it; those of some ranks alone are "
    "measured with group=torch.distributed.new_group(ranks, use_local_synchronization=True)"
)

_OTHERS: WeakKeyDictionary[dist.ProcessGroup, ReferenceType[dist.ProcessGroup]] = WeakKeyDictionary()
"""For each group that measured its links over several hosts, one with connections of its own. torch keeps both,
and is to end both: what is left of a group when Python ends aborts the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Cost of a transfer in seconds: ``latency_seconds`` + bytes / ``bandwidth``, as in ``Platform``."""

    bandwidth: float
    """Bandwidth of the link, in bytes per second."""
    latency_seconds: float
    """Seconds that each transfer takes beside its bytes."""
    duplex: str = "half"
    """``"full"`` where messages both ways take hardly longer than one way, else ``"half"``; as in ``Platform``."""
    port_bandwidth: float | None = None
    """Bytes per second of a host's port, where messages to or from two other hosts take turns; None: they do
    not, or it was not measured."""
    devices_per_port: int = 1
    """Number of ranks of each host, where there are ports."""


def measure_links(group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> Link:
    """Measure bandwidth (bytes per second) and latency (seconds) of a group's slowest link; a collective.

    Each pair of neighbours sends a small and a large message forth and back several times; the median counts, of
    the small one, which is sent before the large one and after, the shortest.
    As in a pipeline, other pairs do so at the same time: first those that begin at an even rank, then those
    that begin at an odd one. Then messages travel both ways at once (see ``_shared_seconds``) and, where ranks are
    on several hosts, each with as many ranks that follow one another, from one host to two others, and back. That
    takes about four seconds at 1 Gbit/s and 38 at 100 Mbit/s. On a CPU nothing of it is measured within one host.

    Args:
        group: the ranks of a pipeline, in its order; by default all ranks.
        device: the GPU where the messages lie, for NCCL; by default the current one. Otherwise on the CPU.

    Returns:
        The link, the same on every rank of the group.

    Raises:
        ValueError: there are no links: ``torch.distributed`` is not initialized, or the group has one rank.
        RuntimeError: a rank has not called this for five minutes.
    """
    if not dist.is_initialized():
        raise ValueError("links are measured between ranks, and torch.distributed is not initialized")
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if num_ranks < 2:
        raise ValueError("links are measured between ranks, and the group has only one")
    wait_for_all("measure_links", BETWEEN_ALL, group)
    place = _message_device(group, device)
    slowest_bandwidth, longest_latency = float("inf"), 0.0
    for first in (0, 1):
        starts = (rank - first) % 2 == 0 and rank >= first
        peer = rank + 1 if starts else rank - 1
        has_peer = first <= min(rank, peer) and max(rank, peer) < num_ranks
        readings = []
        for num_bytes in (SMALL_BYTES, LARGE_BYTES, SMALL_BYTES):
            dist.barrier(group=group)  # small messages wait long for a processor that carries large ones
            readings.append(_one_way_seconds(num_bytes, peer, starts, group, place) if has_peer else 0.0)
        if has_peer and starts:
            before, large, after = readings
            link = fit(min(before, after), large)
            slowest_bandwidth = min(slowest_bandwidth, link.bandwidth)
            longest_latency = max(longest_latency, link.latency_seconds)
    worst = torch.tensor([1 / slowest_bandwidth, longest_latency], dtype=torch.float64, device=place)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    seconds_per_byte, latency_seconds = worst.tolist()
    return _with_sharing(Link(bandwidth=1 / seconds_per_byte, latency_seconds=latency_seconds), group, place)


def _with_sharing(link: Link, group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Return the link with what its transfers share, as ``group`` measures it; a collective.

    What is between two and one times as long for noise, or for processors that carry the messages, counts as
    shared by the two directions, which is what a plan without these measurements has, and as no port.
    """
    num_ranks = dist.get_world_size(group)
    hosts: list[str] = [""] * num_ranks
    dist.all_gather_object(hosts, _host(), group=group)
    if len(set(hosts)) == 1 and device.type == "cpu":
        return link  # messages share the processors, which is no property of a link
    num_bytes = int(min(max(link.bandwidth * MESSAGE_SECONDS, SMALLEST_MESSAGE_BYTES), LARGE_BYTES))
    pairs = [(first, first + 1) for first in range(0, num_ranks - 1, 2)]
    alone = _shared_seconds(pairs, num_bytes, group, device)
    flows = [*pairs, *((to, source) for source, to in pairs)]
    both = _shared_seconds(flows, num_bytes, group, device, _another(group))
    duplex = "full" if both < FULL_BELOW * alone else "half"
    per_host = ranks_per_host(hosts)
    crossing = None if per_host is None else crossing_at_once(num_ranks, per_host)
    if per_host is None or crossing is None:
        return replace(link, duplex=duplex)
    one, other = crossing
    alone = max(_shared_seconds([each], num_bytes, group, device) for each in crossing)
    leaving = _shared_seconds([one, other], num_bytes, group, device)
    coming = _shared_seconds([one[::-1], other[::-1]], num_bytes, group, device)
    if max(leaving, coming) < SHARED_FROM * alone:
        return replace(link, duplex=duplex)
    return replace(link, duplex=duplex, port_bandwidth=link.bandwidth, devices_per_port=per_host)


def _host() -> str:
    """Return a name of this host: ranks with the same one reach each other without a port."""
    words = [socket.gethostname()]
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text, lambda: os.readlink("/proc/self/ns/net")):
        with suppress(OSError):  # not Linux: the name alone must do
            words.append(read().strip())
    return " ".join(words)


def ranks_per_host(hosts: Sequence[str]) -> int | None:
    """Return how many ranks each host has, where they follow one another and all have as many; else None."""
    size = list(hosts).index(next((each for each in hosts if each != hosts[0]), hosts[0])) or len(hosts)
    blocks = [set(hosts[first : first + size]) for first in range(0, len(hosts), size)]
    regular = len(hosts) % size == 0 and all(len(block) == 1 for block in blocks)
    return size if regular and len(set(hosts)) == len(blocks) else None


def crossing_at_once(num_ranks: int, per_host: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return two transfers, as (sender, receiver), that leave one host over two links; None where none do."""
    if num_ranks >= 3 * per_host:  # from the second host to the first and to the third
        return (per_host, per_host - 1), (2 * per_host - 1, 2 * per_host)
    if num_ranks == 2 * per_host and per_host > 1:
        return (per_host - 1, per_host), (per_host - 2, per_host + 1)
    return None


def _another(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group with the ranks of ``group`` and connections of its own; with NCCL ``group`` itself.

    It is made once for each group and kept. A group that is made again after it was destroyed gets its old name
    from torch, under which a rank may still read where the others listened before ("Connection refused").
    """
    if "nccl" in dist.get_backend(group):
        return group
    key = group or dist.group.WORLD
    assert key is not None  # torch.distributed is initialized here
    made = _OTHERS[key]() if key in _OTHERS else None
    if made is None:
        ranks = dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _OTHERS[key] = ref(made)
    return made


def _shared_seconds(
    flows: Sequence[tuple[int, int]],
    num_bytes: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    back: dist.ProcessGroup | None = None,
) -> float:
    """Return the seconds of ``NUM_MESSAGES`` messages of each flow, all flows at once; a collective.

    As in a pipeline, a receive is posted when the one before it is over, and flows are not in step: the first
    message of every second one is half as long. NCCL's messages of one round begin together.

    Args:
        flows: the ranks in the group from which and to which messages go.
        back: the same ranks with connections of their own, for messages to earlier ranks, as a run has them: with
            gloo, the word that a receive is posted would go behind messages the other way, and these would wait
            for each other on links that could carry both at once. Left out, ``group``.
    """
    rank, in_rounds = dist.get_rank(group), "nccl" in dist.get_backend(group)
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def transfer(operation: Callable[..., Any], flow: int, peer: int, number: int) -> dist.P2POp:
        part = message[: num_bytes // 2] if number == 0 and flow % 2 else message
        other = peer if group is None else dist.get_global_rank(group, peer)
        source, to = flows[flow]
        way = group if source < to or back is None else back
        return dist.P2POp(operation, part if operation is dist.isend else part.clone(), other, way, tag=flow)

    readings = []
    for _ in range(1 + SHARED_REPEATS):
        rounds = [
            [
                transfer(operation, flow, peer, number)
                for flow, (source, to) in enumerate(flows)
                for operation, me, peer in ((dist.isend, source, to), (dist.irecv, to, source))
                if me == rank
            ]
            for number in range(NUM_MESSAGES)
        ]
        dist.barrier(group=group)
        start = _now(device)
        if in_rounds:
            for each in rounds:
                for work in dist.batch_isend_irecv(each) if each else ():
                    work.wait()
        else:
            _run_flows(rounds)
        readings.append(_now(device) - start)
    slowest = torch.tensor(readings[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return statistics.median(slowest.tolist())


def _run_flows(rounds: Sequence[Sequence[dist.P2POp]]) -> None:
    """Send all at once, and post each receive when the one before it in its flow is over."""

    def begin(each: dist.P2POp) -> Any:
        return each.op(each.tensor, each.peer, group=each.group, tag=each.tag)

    sends = [begin(each) for operations in rounds for each in operations if each.op is dist.isend]
    posted: dict[int, Any] = {}
    for operations in rounds:
        for each in operations:
            if each.op is dist.irecv:
                if each.tag in posted:
                    posted[each.tag].wait()
                posted[each.tag] = begin(each)
    for work in (*posted.values(), *sends):
        work.wait()


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
    """Return half the seconds of a message forth and back: the median, of a small one the shortest.

    What delays a small message for milliseconds is a busy processor, and no property of the link. Where processes
    share processors, that can be three messages of four.
    """
    repeats = SMALL_REPEATS if num_bytes == SMALL_BYTES else REPEATS
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    other = peer if group is None else dist.get_global_rank(group, peer)
    readings = []
    for _ in range(WARM_UP + repeats):
        start = _now(device)
        for sends in (starts, not starts):
            if sends:
                dist.send(message, dst=other, group=group)
            else:
                dist.recv(message, src=other, group=group)
        readings.append(_now(device) - start)
    counted = readings[WARM_UP:]
    return (min(counted) if num_bytes == SMALL_BYTES else statistics.median(counted)) / 2


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _message_device(group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    wanted = torch.device("cuda" if device is None else device)
    if "nccl" not in dist.get_backend(group) or wanted.type != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if wanted.index is None else wanted.index)
