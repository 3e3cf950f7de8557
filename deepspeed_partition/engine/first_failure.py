"""What went wrong first, said by every rank: one that fails in the middle of a step makes the others fail, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_steps = itertools.count()
"""Of this process: all ranks of a pipeline have the same number."""


@contextmanager
def first_failure_told(pipeline: int) -> Iterator[None]:
    """Around what the ranks of a pipeline do together and cannot go on with after an error.

    Args:
        pipeline: the global rank of its first device.

    Raises:
        RuntimeError: another rank failed before this one, and with what.
    """
    step = next(_steps)
    try:
        yield
    except Exception as flaw:
        first = _first(f"{pipeline}/{step}", f"rank {dist.get_rank()} failed first: {type(flaw).__name__}: {flaw}")
        if first is None:
            raise
        # As the cause of another error, contextlib would take a StopIteration for that error itself.
        raise RuntimeError(first) from (None if isinstance(flaw, StopIteration) else flaw)


def _first(key: str, mine: str) -> str | None:
    """What another rank has said; None where this one is the first, or where nobody can be asked any more."""
    try:
        said = _get_default_store().compare_set(f"madpipe/first_failure/{key}", "", mine).decode()
    except RuntimeError:  # the store has ended with its rank, whose own end is what this one has met
        return None
    return None if said == mine else said
