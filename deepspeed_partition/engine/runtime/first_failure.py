"""What went wrong first, said by every rank: one that fails in the middle of a step makes the others fail, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

T = TypeVar("T", bound=BaseException)

_BY_ALL = "madpipe_raised_by_all"
_MET_BY_ALL = "madpipe_met_by_all"
_batches = itertools.count()
"""Numbers of the batches of this process: all ranks of a pipeline have the same number."""


class FirstFailure:
    """The first failure of one batch, from its first forward until all ranks have its loss.

    Args:
        pipeline: the global rank of its first device.
    """

    def __init__(self, pipeline: int) -> None:
        self._key = f"{pipeline}/{next(_batches)}"

    @contextmanager
    def told(self) -> Iterator[None]:
        """Run what the ranks of a pipeline do together and cannot go on with after an error.

        Raises:
            RuntimeError: another rank failed before this one, and with what, or has ended.
        """
        try:
            yield
        except BaseException as error:
            if is_raised_by_all(error):
                raise
            mine = in_words(error)
            first = _first(self._key, f"rank {dist.get_rank()} failed first: {mine}")
            if not isinstance(error, Exception):  # it ends this program, and not for what another rank has met
                raise
            if first is None or first.endswith(f" failed first: {mine}"):  # the same on all ranks, as agreed upon
                raise
            # As the cause of another error, contextlib would take a StopIteration for that error itself.
            cause = None if isinstance(error, StopIteration) else error
            raise RuntimeError(f"{first} (here: {mine})") from cause


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def is_raised_by_all(error: BaseException) -> bool:
    """Whether all ranks raise this together: they are at the same place, and can go on."""
    return bool(getattr(error, "__dict__", {}).get(_BY_ALL))


def raised_by_all(error: T) -> T:
    """``error``, marked as one that all ranks have agreed to raise, each perhaps in its own words."""
    vars(error)[_BY_ALL] = True  # whatever its class makes of setting attributes
    return error


def met_by_all(error: T) -> T:
    """``error``, marked as one that all ranks meet at the same place; who catches it need not go on alike."""
    vars(error)[_MET_BY_ALL] = True
    return error


def is_met_by_all(error: BaseException | None) -> bool:
    """Whether all ranks have met ``error`` at the same place, or what it was raised in the place of."""
    while error is not None:
        if is_raised_by_all(error) or getattr(error, "__dict__", {}).get(_MET_BY_ALL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first(key: str, mine: str) -> str | None:
    """What another rank has said; None where this one is the first."""
    try:
        said = _get_default_store().compare_set(f"madpipe/first_failure/{key}", "", mine).decode()
    except RuntimeError:
        return "rank 0 has ended, and with it what was said about the first failure: its log says more"
    return None if said == mine else said
