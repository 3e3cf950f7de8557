"""Calls that every rank of a job makes: who is missing is named, and a rank that has ended is not waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from deepspeed_partition.engine.runtime.environment import log_here
from deepspeed_partition.engine.runtime.watch import ANSWER_SECONDS, MOST_RANKS_ASKED, watch
from deepspeed_partition.profiling.arrivals import LOOKS_EACH_SECONDS, wait_for_all


def wait_until_all_come(
    call: str,
    what_to_do: str,
    *,
    is_asked_to_end: Callable[[], bool] = lambda: False,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Do as :func:`wait_for_all` with the ranks of the job, of which the watch knows who has ended.

    Raises:
        RuntimeError: one has not come, or is at the end of its program; or those that have not come wait for
            other ranks elsewhere, and so for this one.
    """
    if dist.get_world_size() > 1:
        wait_for_all(
            call,
            what_to_do,
            say=log_here if watch.patience_seconds else _say_nothing,
            is_asked_to_end=is_asked_to_end,
            why_not_coming=WhyNotComing(),
            is_over=is_over,
        )


def _say_nothing(_: str) -> None:
    """Where the option ``patience_seconds`` is 0, nothing is said of who waits."""


def wait_for_the_same_error(seconds: float = 10.0) -> None:
    """Wait until all ranks are about to raise what they raise alike, and no longer than some seconds.

    Rank 0 keeps the store of the job: where its process ends first, others that still join a group end with the
    words of a broken connection.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
    keys = [f"madpipe/same error/{rank}" for rank in range(dist.get_world_size())]
    mine = store.add(keys[dist.get_rank()], 1)
    while any(store.add(key, 0) < mine for key in keys) and time.monotonic() < deadline:
        time.sleep(LOOKS_EACH_SECONDS)


STANDSTILL_IN_PATIENCES = 1.5
"""After so many times the patience, after which it is said who waits, ranks that wait for each other end."""


class WhyNotComing:
    """Finds out why ranks do not come: their programs are through, or all of them wait for others elsewhere.

    Who waits in a collective on one rank, and here on another one, waits for ever: then nobody computes any more.
    """

    def __init__(self) -> None:
        self._question, self._asked, self._began = 0, 0.0, time.monotonic()

    def __call__(self, ranks: Sequence[int]) -> list[str]:
        ended = [why for rank in ranks if (why := watch.why_not_coming(rank)) is not None]
        patience, now = watch.patience_seconds, time.monotonic()
        if ended or not patience or len(ranks) > MOST_RANKS_ASKED:
            return ended
        # What is one long transfer between others is said before, see Watch, and is not taken for a standstill.
        still = STANDSTILL_IN_PATIENCES * patience
        if now - max(self._began + still, self._asked) < ANSWER_SECONDS:
            return []
        question, self._question, self._asked = self._question, watch.ask(), now
        waiting = [watch.waits_elsewhere(rank, question, still) for rank in ranks] if question else [None]
        return [] if None in waiting else [why for why in waiting if why is not None]
