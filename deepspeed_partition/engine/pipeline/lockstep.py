"""What the ranks of a job do together: a batch begins on all of them or on none.

An error that not all ranks have met, in what they do together, ends the engine: they are not at the same place any
more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from deepspeed_partition.engine.pipeline.batch_attempt import RaisedElsewhere, traceback_of
from deepspeed_partition.engine.runtime.collectives import any_bits, gather_objects, portable
from deepspeed_partition.engine.runtime.first_failure import (
    FirstFailure,
    in_words,
    is_raised_by_all,
    raised_by_all,
)
from deepspeed_partition.engine.runtime.watch import watch

NUM_FACTS = 5
"""Bits for what a rank says at the beginning of a batch, below those for numbers of micro-batches."""
NUMBER_BITS = 29


class Lockstep:
    """The ranks of a job, which begin batches together.

    Args:
        pipelines: The global ranks of each pipeline.
    """

    def __init__(self, pipelines: list[list[int]]) -> None:
        self._pipelines = pipelines
        self._first_failure: FirstFailure | None = None
        self._ended_with = ""
        """The error, in words, after which this rank cannot go on."""
        self._ended_together = ""
        """What all ranks have agreed cannot go on, in words."""

    @property
    def goes_on(self) -> bool:
        """Whether no error has ended what the ranks do together."""
        return not self._ended_with and not self._ended_together

    def end_together(self, words: str) -> None:
        """Note what has ended what the ranks do together, on all of them.

        Args:
            words: what, for who tries to go on.
        """
        self._ended_together = words

    def check_that_it_goes_on(self) -> None:
        """Refuse to go on after an error that has ended what the ranks do together.

        Raises:
            RuntimeError: there was such an error.
        """
        if self._ended_together:
            raise RuntimeError(f"{self._ended_together}: this engine cannot go on; start again from a checkpoint")
        if self._ended_with:
            raise RuntimeError(
                f"a batch before ended, on this rank alone, with {self._ended_with}: the ranks of the job are "
                "not at the same place any more, and this engine cannot go on; start again from a checkpoint"
            )

    def begin_together(
        self,
        num_micro_batches: int,
        error: BaseException | None = None,
        *,
        asks: bool = False,
        leaves: str = "",
    ) -> bool:
        """Begin a batch together, or none. Collective.

        Args:
            num_micro_batches: 0: this rank comes only to tell what it has met.
            error: what keeps this rank from it.
            asks: whether it asks for something that all ranks do together.
            leaves: what this rank does in the place of another batch, in words.

        Returns:
            Whether any rank asks.

        Raises:
            Exception: what has kept a rank from it, on every rank.
            RuntimeError: ranks begin with different things, such as training and evaluation, on every rank.
        """
        trains = torch.is_grad_enabled()
        mine = next(place for place, ranks in enumerate(self._pipelines) if dist.get_rank() in ranks)
        begins = bool(num_micro_batches)
        facts = [error is not None, begins and trains, begins and not trains, asks, bool(leaves)]
        # All facts in one number, and for each pipeline the bits of its micro-batches, as they are and inverted:
        # where two ranks say different numbers, some bit is there both ways.
        said = [0] * len(self._pipelines)
        if begins:
            ones = 2**NUMBER_BITS - 1
            assert num_micro_batches <= ones
            said[mine] = (num_micro_batches | (num_micro_batches ^ ones) << NUMBER_BITS) << NUM_FACTS
        said[0] |= sum(bool(fact) << place for place, fact in enumerate(facts))
        said = any_bits(said)
        some_fail, some_train, some_evaluate, some_ask, some_leave = (
            bool(said[0] >> place & 1) for place in range(NUM_FACTS)
        )
        if some_fail:
            _raise_first(error)
        if some_leave and (some_train or some_evaluate):
            _raise_that_some_leave(leaves)
        if some_leave:
            return some_ask
        numbers = [each >> NUM_FACTS for each in said]
        if (some_train and some_evaluate) or any(each & each >> NUMBER_BITS for each in numbers):
            kind = "a training step" if trains else "an evaluation"
            doing = gather_objects(f"rank {dist.get_rank()} {kind} of {num_micro_batches} micro-batches")
            raise raised_by_all(
                RuntimeError(
                    f"the ranks begin different batches: {', '.join(doing)}; does the data of one rank end before "
                    "that of another, or does a rank leave a loop alone?"
                )
            )
        return some_ask

    def begin_batch(self, first_rank: int) -> None:
        """Begin to look for the first failure of a batch.

        Args:
            first_rank: The global rank of the first device of this rank's pipeline.
        """
        self._first_failure = FirstFailure(first_rank)

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Run what the ranks do together; an error that they do not agree upon ends this engine.

        Raises:
            RuntimeError: another rank failed before this one, and with what, or has ended.
        """
        assert self._first_failure is not None, "a batch has begun"
        try:
            with self._first_failure.told():
                yield
        except BaseException as error:
            if not is_raised_by_all(error):
                self._ended_with = in_words(error)
                watch.tell_that_this_rank_leaves(f"left a batch with {self._ended_with}")
            raise
        finally:
            watch.runs(None)


def _raise_that_some_leave(leaves: str) -> None:
    does = gather_objects(leaves)
    some = next(f"rank {rank} {words}" for rank, words in enumerate(does) if words)
    other = next(rank for rank, words in enumerate(does) if not words)
    raise raised_by_all(RuntimeError(f"{some}, and rank {other} begins another batch"))


def _raise_first(own: BaseException | None) -> None:
    sent = None if own is None else portable(own, keep=(StopIteration,))
    told = gather_objects(None if sent is None else (dist.get_rank(), sent, traceback_of(own or sent)))
    rank, error, details = next(theirs for theirs in told if theirs is not None)
    if rank == dist.get_rank() and isinstance(own, Exception):
        raise raised_by_all(own)
    if isinstance(error, StopIteration):
        raise raised_by_all(error)
    raise raised_by_all(error) from RaisedElsewhere(f"rank {rank} met this between two batches:\n\n{details}")
