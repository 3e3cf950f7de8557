"""Calls that every rank of a job makes: who is missing is named, and a rank that has ended is not waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from deepspeed_partition.engine.runtime.environment import log_here
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.profiling.arrivals import wait_for_all


def wait_until_all_come(
    call: str,
    what_to_do: str,
    *,
    is_asked_to_end: Callable[[], bool] = lambda: False,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Do as :func:`wait_for_all` with the ranks of the job, of which the watch knows who has ended.

    Raises:
        RuntimeError: one has not come, or is at the end of its program.
    """
    if dist.get_world_size() > 1:
        wait_for_all(
            call,
            what_to_do,
            say=log_here,
            is_asked_to_end=is_asked_to_end,
            why_not_coming=watch.why_not_coming,
            is_over=is_over,
        )
