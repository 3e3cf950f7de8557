"""A call that every rank of a group must make: who has not come to it is named, and is not waited for for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

logger = logging.getLogger("deepspeed_partition.profiling")

SAID_AFTER_SECONDS = 5.0
"""After so long a rank says for which others it waits."""
ENDS_AFTER_SECONDS = 300.0
"""After so long it waits no more."""
LOOKS_EACH_SECONDS, MOST_SECONDS_BETWEEN_LOOKS = 0.002, 0.1


def wait_for_all(
    call: str,
    what_to_do: str,
    group: dist.ProcessGroup | None = None,
    *,
    say: Callable[[str], object] | None = None,
    is_asked_to_end: Callable[[], bool] = lambda: False,
    why_not_coming: Callable[[Sequence[int]], Sequence[str]] = lambda ranks: (),
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Return when every rank of ``group`` has come to this call as often as this one; say for which it waits.

    It asks the store of the job, so that a signal can end the wait, which it could not in a collective.

    Args:
        call: The name of the function that every rank calls.
        what_to_do: Why all of them must call it and what to write instead, as the end of a sentence.
        group: Its ranks; by default all ranks.
        say: What is given the sentence after ``SAID_AFTER_SECONDS``; by default the logger of measurements.
        is_asked_to_end: Whether this process is to end, such as by SIGTERM: then it waits no longer than that.
        why_not_coming: Gives the sentences about those of some ranks that will never come, such as one whose
            process has ended; none where all of them may come still.
        is_over: Whether all have come to what they do together, by this call or by another one.

    Raises:
        RuntimeError: one has not come for ``ENDS_AFTER_SECONDS``, or never will.
    """
    store, rank = _get_default_store(), dist.get_rank()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    keys = {each: f"madpipe/{call}/{'-'.join(map(str, ranks))}/{each}" for each in ranks}
    mine, missing = store.add(keys[rank], 1), ranks
    began, has_said, interval = time.monotonic(), False, LOOKS_EACH_SECONDS
    while (missing := [each for each in missing if store.add(keys[each], 0) < mine]) and not is_over():
        waited = time.monotonic() - began
        named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        sentence = f"{call} has waited {waited:.0f} s on rank {rank} for {named}: {what_to_do}"
        if missing and (lost := why_not_coming(missing)):
            store.add(keys[rank], -1)
            raise RuntimeError(f"{call} waits on rank {rank} for {named}, and {', '.join(lost)}: {what_to_do}")
        ends = is_asked_to_end() and waited > SAID_AFTER_SECONDS
        if waited > SAID_AFTER_SECONDS and not has_said and not ends:
            has_said = True
            (say or logger.warning)(sentence)
        if ends or waited > ENDS_AFTER_SECONDS:
            store.add(keys[rank], -1)
            raise RuntimeError(sentence)
        time.sleep(interval)
        interval = min(2 * interval, MOST_SECONDS_BETWEEN_LOOKS)
