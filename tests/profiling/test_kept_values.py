"""Values that are put back after a measurement, and what is said of those that cannot be."""

from __future__ import annotations

import itertools
import queue
import sqlite3
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from deepspeed_partition import kept_values
from deepspeed_partition.kept_weights import Weights
from deepspeed_partition.profiling.attributes import attributes_kept, state_kept
from deepspeed_partition.tensor_values import is_computed, put_back


def layer_with(**attributes: Any) -> nn.Module:
    layer = nn.Linear(2, 2)
    vars(layer).update(attributes)
    return layer


@pytest.fixture
def said(monkeypatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(kept_values, "tell_once", lambda _, sentence: sentences.append(sentence))
    return sentences


def squares() -> Iterator[int]:
    for number in itertools.count():
        yield number**2


def test_an_iterator_that_gave_nothing_stays_itself():
    layer = layer_with(squares=(made := squares()), count=(count := itertools.count()))
    with attributes_kept([layer]):
        assert next(layer.count) == 0 and layer.squares is not made
    assert layer.squares is made and layer.count is count and next(count) == 0


def test_what_an_iterator_gave_is_given_again_and_forgotten():
    """Everything that it gave in training would be kept for ever."""
    layer = layer_with(squares=squares())
    with attributes_kept([layer]):
        assert list(itertools.islice(layer.squares, 3)) == [0, 1, 4]
        with attributes_kept([layer]):
            assert list(itertools.islice(layer.squares, 3)) == [9, 16, 25]
        assert next(layer.squares) == 9
    assert list(itertools.islice(layer.squares, 5)) == [0, 1, 4, 9, 16]
    assert next(layer.squares) == 25 and not layer.squares._items
    layer.squares.close()
    assert next(layer.squares, None) is None


def test_layers_with_one_iterator_have_one_afterwards():
    shared = squares()
    layers = [layer_with(squares=shared), layer_with(draw=partial(next, shared))]
    with attributes_kept(layers):
        assert next(layers[0].squares) == 0 and layers[1].draw() == 1
    assert [next(layers[0].squares), layers[1].draw(), next(layers[0].squares)] == [0, 1, 4]
    for layer in layers:  # measured one after the other
        with attributes_kept([layer]):
            next(layers[0].squares)
    assert layers[1].draw() == 9


def test_what_a_thread_has_taken_from_a_queue_is_said(said):
    taken: list[int] = []
    items: queue.Queue[int] = queue.Queue()
    layer = layer_with(items=items)
    thread = threading.Thread(target=lambda: [taken.append(items.get()) for _ in range(3)], daemon=True)
    thread.start()
    while not items.not_empty._waiters:  # type: ignore[attr-defined]
        pass
    for number in range(2):
        with attributes_kept([layer]):
            items.put(number) if number else None
    items.put(2)
    items.put(3)
    thread.join(timeout=10)
    assert taken == [1, 2, 3] and items.empty()
    [line] = said
    assert line.startswith("items (Queue): 1 items were put into it, which another thread takes while layers")


@pytest.mark.parametrize("in_transaction", [False, True])
def test_changes_of_a_database_are_rolled_back_unless_they_are_committed(said, tmp_path, in_transaction):
    database = sqlite3.connect(tmp_path / "calls")
    database.execute("create table calls (number int)")
    if in_transaction:
        database.execute("insert into calls values (0)")
    layer = layer_with(database=database)
    for commits in (False, True):
        with attributes_kept([layer]):
            database.execute("insert into calls values (1)")
            if commits:
                database.commit()
        found = [number for (number,) in database.execute("select number from calls")]
        assert found == [0] * in_transaction + [1] * commits and len(said) == commits
    assert said[0].startswith("database (Connection): 1 rows were changed while layers")


def test_a_database_in_which_the_program_begins_itself(said):
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("create table calls (number int)")
    layer = layer_with(database=database)
    with attributes_kept([layer]):
        database.execute("begin immediate")
        database.execute("insert into calls values (1)")
        database.execute("commit")
    assert not database.execute("select * from calls").fetchall() and not said


class _CountsReads:
    def __init__(self) -> None:
        self.num_reads = 0

    def read(self) -> None:
        self.num_reads += 1


def test_methods_that_live_for_a_moment_are_told_apart() -> None:
    """Python makes a method where it is asked for, and the next one where the last one was: by their addresses
    one was taken for another, and what it counts was not put back."""
    objects = [_CountsReads() for _ in range(50)]
    with state_kept(each.read for each in objects):
        for each in objects:
            each.read()
    assert [each.num_reads for each in objects] == [0] * 50


class _Observes(nn.Module):
    """An observer of quantization: its range gets a shape with the first data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least = x.amin(0)
        if not self.least.numel():
            self.least.resize_(least.shape)
        self.least.copy_(least)
        return x


def test_a_buffer_that_has_grown_gets_its_shape_back() -> None:
    """It was a bare error of sizes."""
    observer = _Observes()
    before = observer.least
    with attributes_kept([observer], buffers=True):
        observer(torch.ones(2, 3))
        assert observer.least.shape == (3,)
    assert observer.least is before and before.shape == (0,)
    put_back(before, torch.ones(4))
    assert torch.equal(before, torch.ones(4))


def test_modules_in_lists_are_put_back():
    """Running means of one that a layer keeps from parameters() were those of the measurement, too."""
    layer, hidden = nn.Linear(2, 2), nn.BatchNorm1d(2)
    hidden.calls, layer.fixed = [0], [{"norm": hidden}]
    before = {name: value.clone() for name, value in hidden.state_dict().items()}
    with attributes_kept([layer]):
        hidden(torch.randn(3, 2))
        hidden.calls[0] += 1
    assert hidden.calls == [0]
    assert all(torch.equal(value, before[name]) for name, value in hidden.state_dict().items())


def test_what_hooks_of_layers_count_is_put_back():
    """A hook had counted the runs that were made to measure its layer."""
    counts, layer = {"runs": 0}, nn.Sequential(nn.Linear(2, 2))

    def count(*_):
        counts["runs"] += 1

    layer[0].register_forward_hook(count)
    layer[0].register_full_backward_pre_hook(count)
    layer.register_forward_pre_hook(count)
    for functions, layers in (([], [layer]), ([layer], [])):
        with state_kept(functions, layers):
            layer(torch.ones(1, 2)).sum().backward()
            assert counts["runs"] == 3
        assert counts["runs"] == 0


def test_a_view_of_a_weight_that_was_updated_is_no_count():
    """Torch raises when it is asked for the grad_fn of a view that was made without gradients; steps ended."""
    weight = nn.Parameter(torch.ones(4))
    with torch.no_grad():
        view = weight.view(2, 2)
    assert is_computed(weight * 2) and not is_computed(torch.ones(4)) and not is_computed(3)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError):
        _ = view.grad_fn
    assert is_computed(view)


def test_weights_that_are_conjugates_are_told_from_written_ones():
    layer = layer_with()
    layer.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64).conj())
    weights = Weights([layer])
    assert weights.written() == []
    layer.weight.data[0, 0] = 2j
    assert [weights.places[number].name for number in weights.written()] == ["weight"]
