"""Numbers that the ranks of one host agree on, each step anew, over sockets of their own.

An all-reduce of one number over gloo is some messages through threads of gloo's, which costs the processor 0.2 ms
with two ranks and 0.5 ms with four, twice in each step. Here each rank sends all that it knows to the rank that
is 1 place behind it, then to the one that is 2 behind, 4 behind, ...: all know all after a message for each bit of
the number of ranks. A message takes 10 us. What is agreed upon are bits, which may come twice.

The sockets lie in a folder that only this user can enter. Where some rank does not find them (another host,
another container), there are none, and gloo serves.
"""

from __future__ import annotations

import functools
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

_NUMBER = struct.Struct("<q")
_CANNOT = OSError, AttributeError
"""What says that there can be no such socket: also where Python knows none of that kind."""


class Neighbours(NamedTuple):
    """The ranks that one rank exchanges a round's messages with."""

    sends_to: int
    receives_from: int
    outgoing: socket.socket
    incoming: socket.socket

    @property
    def in_words(self) -> str:
        """The ranks that may have ended, where a message does not pass."""
        ranks = sorted({self.sends_to, self.receives_from})
        return " or ".join(f"rank {rank}" for rank in ranks)


class Agreement:
    """The sockets of one rank.

    Args:
        rank: which.
        rounds: the neighbours that are 1, 2, 4, ... ranks away, as many as it takes to reach all.
        timeout_seconds: how long a message is waited for.
    """

    def __init__(
        self,
        rank: int,
        rounds: Sequence[Neighbours],
        timeout_seconds: float = default_pg_timeout.total_seconds(),
    ) -> None:
        self._rank, self._rounds = rank, tuple(rounds)
        self._timeout_seconds = timeout_seconds
        self._count = 0
        for each in rounds:
            each.outgoing.settimeout(timeout_seconds)
            each.incoming.settimeout(timeout_seconds)

    def any_bits(self, values: Sequence[int]) -> list[int]:
        """Return each of ``values``, with the bits set that are set on any rank. Collective.

        Args:
            values: numbers from 0 to 2**63 - 1, as many on each rank.

        Raises:
            RuntimeError: another rank has ended, or comes from another place.
            TimeoutError: another rank has not come.
        """
        self._count += 1
        whole, said = _numbers(len(values) + 1), list(values)
        for each in self._rounds:
            try:
                each.outgoing.sendall(whole.pack(self._count, *said))
                count, *theirs = whole.unpack(_received(each.incoming, whole.size))
            except (ConnectionError, EOFError) as error:
                raise RuntimeError(f"Connection closed by peer: {each.in_words} has ended") from error
            except TimeoutError:
                raise TimeoutError(
                    f"rank {each.receives_from} has not come to an agreement of all ranks within "
                    f"{self._timeout_seconds:g} s"
                ) from None
            if count != self._count:
                raise RuntimeError(
                    f"rank {each.receives_from} is at agreement {count} of the job, and rank {self._rank} at "
                    f"{self._count}"
                )
            said = [mine | other for mine, other in zip(said, theirs, strict=True)]
        return said

    def close(self) -> None:
        """Close the sockets."""
        for each in self._rounds:
            each.outgoing.close()
            each.incoming.close()


@functools.cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = connection.recv(num_bytes)
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def job_timeout() -> timedelta | None:
    """Return how long the job lets its ranks wait for each other, where that is longer than torch's 30 minutes.

    A program says it where it begins (``deepspeed.init_distributed(timeout=...)``), and its groups made later do
    not take it over. None: torch's own, which is another one for each backend.
    """
    job = dist.group.WORLD
    assert job is not None, "a process group is initialized"
    said = default_pg_timeout
    for device in job._device_types:
        with suppress(
            RuntimeError, AttributeError
        ):  # a device without a backend; an older torch, which says nothing
            said = max(said, job._get_backend(device).options._timeout)
    return said if said > default_pg_timeout else None


def connected(group: dist.ProcessGroup) -> Agreement | None:
    """Return the sockets of this rank, if all ranks of a group are on one host; else None. Collective over it.

    Args:
        group: of all ranks, on gloo.
    """
    me, size = dist.get_rank(group), dist.get_world_size(group)
    distances = [2**place for place in range((size - 1).bit_length())]
    with ExitStack() as folders, ExitStack() as opened:
        listening = _listening(folders, opened, len(distances))
        paths: list[str] = [""] * size
        dist.all_gather_object(paths, "" if listening is None else listening.getsockname(), group=group)
        ways = [_connected_to(opened, paths[(me + each) % size], each) for each in distances]
        have_ways: list[bool] = [False] * size
        dist.all_gather_object(have_ways, None not in ways, group=group)
        if listening is None or not all(paths) or not all(have_ways):
            return None
        arrived: dict[int, socket.socket] = {}
        for _ in distances:  # all have connected: nothing here waits
            incoming = opened.enter_context(listening.accept()[0])
            arrived[_NUMBER.unpack(_received(incoming, _NUMBER.size))[0]] = incoming
        opened.pop_all()
        listening.close()
    return Agreement(
        me,
        [
            Neighbours((me + distance) % size, (me - distance) % size, outgoing, arrived[distance])
            for distance, outgoing in zip(distances, ways, strict=True)
            if outgoing is not None
        ],
        (job_timeout() or default_pg_timeout).total_seconds(),
    )


def _listening(folders: ExitStack, opened: ExitStack, backlog: int) -> socket.socket | None:
    """Return a socket that others can connect to, in a new folder; None where there can be none."""
    with suppress(*_CANNOT):
        folder = folders.enter_context(tempfile.TemporaryDirectory(prefix="madpipe-", ignore_cleanup_errors=True))
        listening = opened.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(os.path.join(folder, "agreement"))
        listening.listen(max(backlog, 1))
        return listening
    return None


def _connected_to(opened: ExitStack, path: str, distance: int) -> socket.socket | None:
    """Return a socket to the rank that is ``distance`` places behind; None where it is not found here."""
    with suppress(*_CANNOT):
        outgoing = opened.enter_context(socket.socket(socket.AF_UNIX))
        outgoing.connect(path)
        outgoing.sendall(_NUMBER.pack(distance))
        return outgoing
    return None
