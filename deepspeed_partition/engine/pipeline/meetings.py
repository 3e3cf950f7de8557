"""How the ranks of a job meet while a pipeline goes on beneath them: nobody waits for who is not through with it.

Each call begins a *meeting*, a reduction of a few numbers that goes on beside computation; a rank looks at the
outcome when it needs it. The loss of a batch is sent by the rank that has it to the others of its pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime import accelerator
from deepspeed_partition.engine.runtime.agreements import job_timeout
from deepspeed_partition.engine.runtime.departures import wait

LOSS_TAG = 7
UNLIMITED = 2**60


class Facts(NamedTuple):
    """What a rank says in a meeting, and what is so on any rank afterwards."""

    fails: bool = False
    """Whether it has met an error, or heard of one."""
    trains: bool = False
    rests: bool = False
    """Whether it brings the pipeline to rest; else, where it does not train, it comes for its error alone."""
    asks: bool = False
    """Whether it asks to stop."""
    num_batches: int = UNLIMITED
    """Number of the batches of the run whose data is there; the smallest of all ranks afterwards."""


class Meetings:
    """Meetings of all ranks of a job, and losses. Made by all ranks at once.

    Args:
        pipelines: the global ranks of each pipeline, by device.
        last: the device of the last stage.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], last: int) -> None:
        me, waits = dist.get_rank(), job_timeout()
        with accelerator.no_splitting():
            self._group = dist.new_group(backend="gloo", timeout=waits)
            self._sums = dist.new_group(backend="gloo", timeout=waits)
            lasts = [ranks[last] for ranks in pipelines]
            self._lasts = dist.new_group(lasts, backend="gloo", timeout=waits)
        self.num_pipelines = len(pipelines)
        [mine] = [ranks for ranks in pipelines if me in ranks]
        self._source = mine[last]
        self._others = [rank for rank in mine if rank != me]
        self._sending: list[tuple[Any, torch.Tensor, int]] = []
        self._is_last = me == self._source

    def begin(self, facts: Facts) -> Meeting:
        """Begin a meeting; what it comes to is there when all ranks have begun it."""
        numbers = torch.tensor([*map(int, facts[:-1]), -facts.num_batches], dtype=torch.int64)
        return Meeting(numbers, dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._group, async_op=True))

    def begin_sum(self, number: float) -> tuple[torch.Tensor, Any]:
        """Begin to add up a number over all ranks; there when all have begun it."""
        total = torch.tensor([number], dtype=torch.float64)
        return total, dist.all_reduce(total, group=self._sums, async_op=True)

    def tell_loss(self, loss: float) -> float:
        """Tell the others of this pipeline a loss; return its mean over all pipelines. On ranks that have one."""
        number = torch.tensor([loss], dtype=torch.float64)
        if self.num_pipelines > 1:
            dist.all_reduce(number, group=self._lasts)
            number /= self.num_pipelines
        self.finish()
        for rank in self._others:
            self._sending.append((dist.isend(number, rank, group=self._group, tag=LOSS_TAG), number, rank))
        return float(number)

    def expect_loss(self) -> tuple[torch.Tensor, Any] | None:
        """Begin to receive the next loss; None on the rank that has it."""
        if self._is_last:
            return None
        number = torch.empty(1, dtype=torch.float64)
        return number, dist.irecv(number, self._source, group=self._group, tag=LOSS_TAG)

    def told_loss(self, expected: tuple[torch.Tensor, Any]) -> float:
        """Wait for a loss."""
        number, work = expected
        wait(work, self._source)
        return float(number)

    def finish(self) -> None:
        """Wait until the losses that were told have left."""
        for work, _, rank in self._sending:
            wait(work, rank)
        self._sending.clear()


class Meeting:
    """One meeting, begun on this rank."""

    def __init__(self, numbers: torch.Tensor, work: Any) -> None:
        self._numbers, self._work = numbers, work
        self._outcome: Facts | None = None

    @property
    def is_over(self) -> bool:
        """Whether all ranks have begun the meeting."""
        return self._outcome is not None or bool(self._work.is_completed())

    @property
    def outcome(self) -> Facts:
        """What is so on any rank; waits until all ranks have begun the meeting."""
        if self._outcome is None:
            self._work.wait()
            fails, trains, rests, asks, fewest = self._numbers.tolist()
            self._outcome = Facts(bool(fails), bool(trains), bool(rests), bool(asks), -fewest)
        return self._outcome
