"""How far a rank stands in the iterators that a program gives it, however many these are: in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition.engine.pipeline.batch_state import BatchData, source_of  # noqa: E402

NUM_ITERATORS = 7


class Reading:
    """The data of a rank that is given many iterators in turn."""

    def __init__(self) -> None:
        self.now: Any = None
        self.data = BatchData(lambda: next(self.now), lambda: self.now)

    def on(self, iterator: Iterator[Any]) -> BatchData:
        self.now = iterator
        self.data.begin()
        return self.data


def generated() -> Iterator[Any]:
    yield from micro_batches()


def listed() -> Iterator[Any]:
    return iter(micro_batches())  # to which there are no weak references


def micro_batches() -> list[Any]:
    return [(torch.tensor(float(number)), torch.tensor(number)) for number in range(4)]


@pytest.mark.parametrize("make", [generated, listed])
def test_a_rank_knows_how_far_it_is_behind_in_each_iterator(make: Callable[[], Iterator[Any]]) -> None:
    """With more than four, it began a validation anew that the other ranks were in the middle of."""
    reading = Reading()
    iterators = [make() for _ in range(NUM_ITERATORS)]
    for each in iterators:
        reading.on(each).count_unread(2)
    for each in iterators:
        assert int(reading.on(each).read(0)[1]) == 2
    assert not reading.data.backlogs


@pytest.mark.parametrize("make", [generated, listed])
def test_what_was_read_ahead_comes_again_from_each_iterator(make: Callable[[], Iterator[Any]]) -> None:
    reading = Reading()
    iterators = [make() for _ in range(NUM_ITERATORS)]
    for each in iterators:
        data = reading.on(each)
        data.read(2)
        data.put_back([data.kept[1], data.kept[2]], None)
    for each in iterators:
        data = reading.on(each)
        assert [int(data.read(number)[1]) for number in (0, 1, 2)] == [1, 2, 3]


@pytest.mark.parametrize("make", [generated, listed])
def test_what_was_measured_comes_again_from_each_iterator(make: Callable[[], Iterator[Any]]) -> None:
    reading = Reading()
    iterators = [make() for _ in range(NUM_ITERATORS)]
    for each in iterators:
        reading.data.give_again([next(each)], each)
    for each in iterators:
        again = reading.data.as_left(each)
        assert source_of(again) is each
        assert [int(number) for _, number in again] == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [generated, listed])
def test_iterators_that_a_program_has_dropped_are_forgotten(make: Callable[[], Iterator[Any]]) -> None:
    """A new one in each epoch: none is kept with its data."""
    reading = Reading()
    for _ in range(NUM_ITERATORS):
        each = make()
        reading.on(each).count_unread(2)
        reading.data.put_back([next(each)], None)
    del each
    gc.collect()
    reading.on(make()).count_unread(1)
    assert [backlog.num_micro_batches for backlog in reading.data.backlogs] == [1]
    reading.data.put_back([], ValueError("the data ended"))
    assert len(reading.data._put_back) == 1
