"""What a rank keeps of a batch from one instruction to another, and how far it has read its data."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from deepspeed_partition.engine.pipeline.drawn_data import (
    ObjectsOfBatch,
    Originals,
    copy_of_micro_batch,
    gives_own_memory,
    tensors_in,
)
from deepspeed_partition.engine.pipeline.second_forward import SecondForward
from deepspeed_partition.engine.runtime.autograd_boundary import (
    Arrived,
    ArrivedLeaf,
    Boundary,
    Departed,
    DepartedEdges,
)
from deepspeed_partition.engine.runtime.boundary_shapes import Shapes
from deepspeed_partition.engine.runtime.random_state import preserved_random_state, random_state
from deepspeed_partition.profiling.backward_halves import Halves
from deepspeed_partition.schedule.instructions import Message


class BatchState:
    """The tensors of a batch that is under way; between two batches there are none."""

    def __init__(self) -> None:
        self.between: dict[Message, Boundary] = {}
        """Tensors between two stages, from where they are made, or arrive, to where they are used, or sent."""
        self.arrived: dict[int, Arrived | ArrivedLeaf] = {}
        """Inputs from the stage before, by slot, until their backward."""
        self.departed: dict[int, Departed | DepartedEdges] = {}
        """Outputs to the next stage, by slot, until their backward."""
        self.losses: dict[int, torch.Tensor] = {}
        """Losses by slot, until their backward."""
        self.second_forwards: dict[int, SecondForward] = {}
        """What runs a forward again that kept nothing, by slot."""
        self.in_halves: frozenset[tuple[int, int]] = frozenset()
        """Stages and micro-batches whose backward is in two halves."""
        self.halves: dict[int, Halves] = {}
        """Backwards in two halves, by slot, from the forward to the second half."""
        self.gradient_shapes: dict[Message, Shapes] = {}
        """Shapes of the gradients that will come back."""

    def clear(self) -> None:
        """Forget what a batch before may have left."""
        self.free_graphs()
        for kept in (self.between, self.gradient_shapes):
            kept.clear()

    def free_graphs(self) -> None:
        """Free what is kept for backwards."""
        for kept in (self.arrived, self.departed, self.losses, self.second_forwards, self.halves):
            kept.clear()


class Remembering:
    """An iterator that knows what was taken from it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.taken: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self.iterator)
        self.taken.append(item if gives_own_memory(source_of(self.iterator)) else copy_of_micro_batch(item))
        return item


class GivenAgain:
    """An iterator that first gives again what was taken from it: to be measured, or by a step that was given up.

    Args:
        taken: What was taken, in its order.
        source: The iterator, which may be one of these.
    """

    def __init__(self, taken: Iterable[Any], source: Any) -> None:
        self.left: deque[Any] = deque((*taken, *(source.left if isinstance(source, GivenAgain) else ())))
        """What comes before the rest of ``source``."""
        self.source = source_of(source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.left.popleft() if self.left else next(self.source)


def source_of(iterator: Any) -> Any:
    """The program's own iterator."""
    if isinstance(iterator, Remembering):
        iterator = iterator.iterator
    return iterator.source if isinstance(iterator, GivenAgain) else iterator


class BegunWhenRead:
    """The iterator of a loader, begun when it is first read: that draws random numbers, and may start processes.

    The numbers are those that it would have drawn at once, as on ranks that read from the beginning.

    Args:
        loader: Any iterable.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._as_now = loader, random_state()
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            with preserved_random_state():
                self._as_now()
                self._iterator = iter(self._loader)
        return next(self._iterator)


class Backlog(NamedTuple):
    """Micro-batches that a rank which reads no data has not taken from an iterator of the program."""

    iterator: Callable[[], Any]
    """Returns it; None where nobody has it any more."""
    num_micro_batches: int


class PutBack(NamedTuple):
    """Micro-batches of an iterator that come again before what is left of it."""

    iterator: Callable[[], Any]
    """Returns it; None where nobody has it any more."""
    items: deque[Any]
    error: Exception | None
    """What reading behind them was answered with."""


class _Held:
    """Holds an iterator without weak references, such as that of a list, while the program has it, too."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator

    def __call__(self) -> Any:
        return self._iterator if sys.getrefcount(self._iterator) > _OWN_REFERENCES else None


_OWN_REFERENCES = 2
"""References to an iterator that the program has dropped: that of :class:`_Held`, and that of the question."""


def _as_it_is(_: int, drawn: Any) -> Any:
    return drawn


class BatchData:
    """The micro-batches of a batch, as a rank reads them from its iterator.

    It reads more of them before it uses the first one, and the iterator may fill the same tensors for each. So it
    keeps copies, as DeepSpeed, which reads one at a time, has of the inputs alone.

    Any rank may come to read data when layers move. So a rank that reads nothing counts how far its iterator is
    behind those of the others, and keeps what it has taken from it that a step is still to read.

    Args:
        read_next: Returns the next micro-batch of the iterator.
        iterator: Returns the iterator that the rank has now.
    """

    def __init__(self, read_next: Callable[[], Any], iterator: Callable[[], Any]) -> None:
        self._read_next_of_iterator, self._iterator = read_next, iterator
        self._put_back: tuple[PutBack, ...] = ()
        """What comes again from iterators; that of the last one comes first."""
        self.num_read = 0
        """The micro-batches of this batch that were read, or could not be read."""
        self.kept: dict[int, Any] = {}
        """Micro-batches, by their number, that were read and are not loaded yet by all stages that need them."""
        self._originals, self._objects = Originals(), ObjectsOfBatch()
        self._needs = True, True
        """Whether the inputs of this batch are needed here, and its labels."""
        self._has_copies_of_inputs: bool | None = None
        self._come_again = False
        self.backlogs: tuple[Backlog, ...] = ()
        """Backlog of each iterator that is behind those of other ranks; the last one trained on comes first."""
        self._given_again: tuple[GivenAgain, ...] = ()

    def begin(self, *, inputs: bool = True, labels: bool = True) -> None:
        """Begin a batch.

        Args:
            inputs: whether they are needed here; else they are not copied.
            labels: the same of labels.
        """
        self.num_read = 0
        self._needs = inputs, labels
        self._has_copies_of_inputs = None
        self._come_again = False
        self.kept.clear()
        self._originals.clear()
        self._objects.clear()

    @property
    def has_copies_of_inputs(self) -> bool:
        """Whether inputs were copied that labels have no part in, so that a stage may have the copies."""
        if self._has_copies_of_inputs is None:
            gives_own = gives_own_memory(source_of(self._iterator()))
            self._has_copies_of_inputs = self._needs == (True, False) and not gives_own
        return self._has_copies_of_inputs

    def read(self, number: int) -> Any:
        """Return the micro-batch of this number; those before it are kept until they are asked for."""
        if self.num_read <= number:
            self._read_until(number)
        return self.kept[number]

    def _read_until(self, number: int) -> None:
        self.catch_up()
        copy = _as_it_is if gives_own_memory(source_of(self._iterator())) else self._copy_of
        has_more = bool(self._put_back)
        self._come_again |= has_more
        may_fill_again = copy is not _as_it_is
        while self.num_read <= number:
            self.num_read += 1  # also where it cannot be read
            drawn = self._read_next() if has_more else self._read_next_of_iterator()
            if may_fill_again:
                self._objects.note(drawn)
            self.kept[self.num_read - 1] = copy(self.num_read - 1, drawn)

    def newest(self, number: int) -> Any:
        """The micro-batch of this number, the last one read, if its labels are those of its inputs.

        None where it is not here, and where it may come again: the iterator may have filled what is no copy.
        """
        return None if self._come_again else self.kept.get(number)

    def _copy_of(self, number: int, drawn: Any) -> Any:
        if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
            return copy_of_micro_batch(drawn)
        if self._needs == (True, False):
            return copy_of_micro_batch(drawn[0]), drawn[1]
        if self._needs == (False, True):
            copies = drawn[0], copy_of_micro_batch(drawn[1])
        else:
            copies = copy_of_micro_batch(drawn)
        self._originals.note(number, tensors_in(drawn[1]), tensors_in(copies[1]))
        return copies

    def settle(self, number: int) -> None:
        """Let the iterator's tensors have what a loss function has written into the labels of a micro-batch."""
        if number not in self.kept:
            self._originals.write_back(number)

    def catch_up(self) -> None:
        """Leave behind what the other ranks have taken from this rank's iterator while it did not read."""
        while behind := self._num_behind:
            self._read_next()
            self._note_behind(behind - 1)

    def put_back(self, items: Iterable[Any], error: Exception | None) -> None:
        """Give micro-batches of the present iterator back, which come again before what is left of it.

        Args:
            error: what reading behind them was answered with; it will be again. None: nothing.
        """
        source = source_of(self._iterator())
        others = [each for each in self._put_back if not (each.iterator() is None or each.iterator() is source)]
        put_back = PutBack(self._reference(source), deque(items), error)
        new = [put_back] if put_back.items or error is not None else []
        self._put_back = (*new, *others)

    def _read_next(self) -> Any:
        source = source_of(self._iterator())
        found = next((each for each in self._put_back if each.iterator() is source), None)
        if source is None or found is None:
            return self._read_next_of_iterator()
        if found.items:
            return found.items.popleft()
        self._put_back = tuple(each for each in self._put_back if each is not found)
        if found.error is not None:
            raise found.error
        return self._read_next_of_iterator()

    def drop(self, number: int) -> None:
        """Forget a micro-batch that all stages of this rank have loaded."""
        del self.kept[number]

    def drop_inputs(self, number: int) -> None:
        """Keep the labels of a micro-batch alone."""
        self.kept[number] = None, self.kept[number][1]

    def count_unread(self, num_micro_batches: int) -> None:
        """Count a batch of which this rank reads ``num_micro_batches`` too few."""
        if num_micro_batches:
            self._note_behind(self._num_behind + num_micro_batches)

    @property
    def _num_behind(self) -> int:
        source = source_of(self._iterator())
        if source is None:
            return 0
        return next((each.num_micro_batches for each in self.backlogs if each.iterator() is source), 0)

    def _note_behind(self, num_micro_batches: int) -> None:
        source = source_of(self._iterator())
        others = [each for each in self.backlogs if not (each.iterator() is None or each.iterator() is source)]
        noted = [Backlog(self._reference(source), num_micro_batches)] if num_micro_batches else []
        self.backlogs = (*noted, *others)

    def _reference(self, iterator: Any) -> Callable[[], Any]:
        """Return what returns an iterator, and None once the program has dropped it."""
        try:
            return weakref.ref(iterator)
        except TypeError:
            known = [*(each.iterator for each in self.backlogs), *(each.iterator for each in self._put_back)]
            return next((each for each in known if each() is iterator), None) or _Held(iterator)

    def give_again(self, taken: Iterable[Any], iterator: Any) -> GivenAgain:
        """The iterator, which gives first what was taken from it, in whichever step this rank reads it next."""
        given = GivenAgain(taken, iterator)
        others = [each for each in self._given_again if each.left and each.source is not given.source]
        self._given_again = (given, *others)
        return given

    def as_left(self, iterator: Any) -> Any:
        """An iterator that the program gives, with what was taken from it before and not read by a step."""
        self._given_again = tuple(each for each in self._given_again if each.left)
        return next((each for each in self._given_again if each.source is iterator), iterator)
