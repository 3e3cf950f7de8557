"""What a ``batch_size`` that a step gives to ``self.log`` is: a count of what it was given, or a constant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LogKey = tuple[str, int]
"""A logged name, and how many calls with this name came before it in the same run of a step."""

UNKNOWN = (
    "logs {name!r} with batch_size={size} in each of {pieces} micro-batches, and nothing shows whether that "
    "number counts their samples or is the same for every batch: it is taken as a count, {total} for the "
    "batch, by which Lightning weights the batch in the mean over the epoch. Leave batch_size out, which counts "
    "samples; or let MadPipeStrategy(loss='batch') run the step once per batch"
)


class WeightsOfLog(NamedTuple):
    """The weights of micro-batches in the mean of a logged number, and that of their batch."""

    of_pieces: list[int]
    of_batch: int


@dataclass(slots=True)
class _Seen:
    given: set[int] = field(default_factory=set)
    sizes: set[int] = field(default_factory=set)
    factor: int | None = None
    """What a constant is multiplied by, for every batch: by how much the first one of the batches counts."""


@dataclass(slots=True)
class LoggedSizes:
    """Tells counts, such as ``batch_size=len(x)``, from constants, such as ``batch_size=1``, on the last stage.

    A count is summed over the micro-batches of a batch; a constant is the weight of each batch. While it is not
    known which of them a number is, it is summed, and once it is known to be a constant, every batch counts as
    much as those before. So the mean over an epoch is that of one process.

    Args:
        tell: What is given the end of a sentence where the two cannot be told apart and it matters.
    """

    tell: Callable[[str], object] = lambda _: None
    constants: set[LogKey] = field(default_factory=set)
    """Those that a trial has shown: the whole batch is logged with the same number as its micro-batches."""
    counts: set[LogKey] = field(default_factory=set)
    _seen: dict[LogKey, _Seen] = field(default_factory=dict)

    def learn(self, constants: Collection[LogKey], counts: Collection[LogKey]) -> None:
        """Note what a trial has shown."""
        self.counts.update(counts)
        self.constants.update(constants)
        self.constants -= self.counts

    def weights(
        self, key: LogKey, given: Sequence[int | None], sizes: Sequence[int], *, matters: bool = False
    ) -> WeightsOfLog:
        """The weights of a batch's micro-batches.

        Args:
            given: The ``batch_size`` of each micro-batch's call; None: it has none, which is its size.
            sizes: Samples of each micro-batch.
            matters: Whether the batch is weighted in the mean over an epoch.
        """
        numbers = [number or size for number, size in zip(given, sizes, strict=True)]
        if not all(given):
            return WeightsOfLog(numbers, sum(numbers))
        seen = self._seen.setdefault(key, _Seen())
        for new, kept in ((numbers, seen.given), (sizes, seen.sizes)):
            if len(kept) < 2:  # which tells that they differ
                kept.update(new)
        number, pieces = numbers[0], len(numbers)
        is_constant = key in self.constants or len(seen.given) == 1 < len(seen.sizes)
        is_count = key in self.counts or (len(seen.given) > 1 and not is_constant)
        if is_count or len(set(numbers)) > 1:
            return WeightsOfLog(numbers, sum(numbers))
        if is_constant:
            seen.factor = seen.factor or 1
            return WeightsOfLog(list(sizes), number * seen.factor)
        seen.factor = seen.factor or pieces
        if matters and seen.factor != pieces:
            self.tell(UNKNOWN.format(name=key[0], size=number, pieces=pieces, total=sum(numbers)))
        return WeightsOfLog(numbers, sum(numbers))


def told_apart(
    whole: Sequence[tuple[LogKey, int]], pieces: Sequence[tuple[LogKey, int]]
) -> tuple[tuple[LogKey, ...], tuple[LogKey, ...]]:
    """Tell a ``batch_size`` that a batch and its micro-batches share from one that counts what it is given."""
    of_pieces: dict[LogKey, set[int]] = {}
    for key, number in pieces:
        of_pieces.setdefault(key, set()).add(number)
    constants = tuple(key for key, number in whole if of_pieces.get(key) == {number})
    counts = tuple(key for key, number in whole if key in of_pieces and key not in constants)
    return constants, counts
