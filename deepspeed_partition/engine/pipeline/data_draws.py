"""Draws of the program between two steps that depend on whether this rank reads data.

Data that is drawn from a common random generator (a shuffle, noise, the start of a ``DataLoader``) takes its
numbers on the ranks that read it. Where layers move, the first and the last stage may come to other ranks: a rank
that reads no more, or begins to, has its generators elsewhere when its program draws from them between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.generators import common_marks

DRAWS_OTHERWISE = (
    "rank {rank} {reads} data since layers have moved. Data is drawn from a common random generator ({name}), and "
    "so is what the program draws between steps: there it gets other numbers than without the move. Give the "
    "iterator a generator of its own, as in DataLoader(..., generator=torch.Generator().manual_seed(0))"
)


class DataDraws:
    """A look at what this rank draws while it reads data, and at what its program draws between steps.

    Args:
        rank: The rank of the job.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names: set[str] = set()
        """Generators from which data was drawn."""
        self._read_first: bool | None = None
        """Whether this rank has read data in its first step."""
        self._reads = False
        self._after_step: dict[str, Any] = {}
        """Where generators were behind the last step, where that matters."""

    def note_reading(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Note that a batch has been read, until one is drawn from a common generator.

        Args:
            before: :func:`~deepspeed_partition.generators.common_marks` before it was.
            after: The same afterwards.
        """
        if not self._names:
            self._names = {name for name, mark in after.items() if mark != before.get(name)}

    def begin_step(self) -> None:
        """Begin a step; say once what the program has drawn since the last one."""
        after, self._after_step = self._after_step, {}
        now = common_marks() if after else {}
        for name in sorted(name for name in self._names & after.keys() if now.get(name) != after[name]):
            words = "begins to read" if self._reads else "reads no more"
            warn_once(
                f"draws otherwise/{self._rank}/{name}",
                DRAWS_OTHERWISE.format(rank=self._rank, reads=words, name=name),
            )

    def end_step(self, reads: bool) -> None:
        """End a step, in which this rank has read data or not."""
        self._read_first = reads if self._read_first is None else self._read_first
        self._reads = reads
        if self._names and self._reads != self._read_first:
            self._after_step = common_marks()
