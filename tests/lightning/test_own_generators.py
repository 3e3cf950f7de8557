"""Looking for generators and for what code reads, in objects of programs that do not like to be asked."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn

from deepspeed_partition.code_names import CodeSearch, function_of
from deepspeed_partition.generators import generators_of
from lightning_madpipe.steps import own_generators, replayed
from lightning_madpipe.steps.own_generators import OwnGenerators, found_in


class NotInstalled:
    """Stands for a package that is not installed: raises its reason whatever it is asked, as MONAI's do."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("import cupy (No module named 'cupy')")

    def __call__(self, *_: Any) -> Any:
        raise ImportError("import cupy (No module named 'cupy')")


cupy = NotInstalled()
draw = np.random.default_rng(0).normal


def inferred(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else cupy.asarray(x)


class Windows(pl.LightningModule):
    """Its validation reaches a package that is not installed. It was refused with the words of that package."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.backend, self.random = cupy, random.Random(0).random

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(inferred(batch)).sum() * draw()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(cupy.asarray(batch)).sum()


def test_a_package_that_is_not_installed_is_no_function_and_holds_no_generator() -> None:
    assert function_of(cupy) is None
    found = found_in(Windows())
    assert set(map(type, found.values())) == {random.Random, np.random.Generator}
    layer = nn.Linear(2, 2)
    layer.backend, layer.draw = cupy, draw  # type: ignore[assignment]
    assert [type(each) for each in generators_of(layer).values()] == [np.random.Generator]


def test_code_that_names_it_is_read() -> None:
    search = CodeSearch(lambda module: module == __name__)
    search.read(Windows.validation_step, Windows)
    assert (__name__, "cupy") in search.found


class Draws(Iterator[int]):
    """An iterator that has more than items."""

    def __init__(self) -> None:
        self.data, self.place, self._items = [5, 6, 7, 8], -1, ("own",)

    def __next__(self) -> int:
        self.place += 1
        return self.data[self.place]

    def __len__(self) -> int:
        return len(self.data)

    def __call__(self, number: int) -> list[int]:
        return [next(self) for _ in range(number)]

    def __getitem__(self, place: int) -> int:
        return self.data[place]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    @property
    def is_at_end(self) -> bool:
        return self.place == len(self.data) - 1


class BeginsAnew(Draws):
    """One that begins anew in each loop."""

    def __iter__(self) -> BeginsAnew:
        self.place = -1
        return self


def kept(iterator: Any) -> tuple[Any, OwnGenerators]:
    """What stands for an iterator of a module, whose items are given again, and who lets it give them again."""
    module = Windows()
    module.draws = iterator
    own = OwnGenerators(module, (), ValueError)
    own.begin()
    return module.draws, own


def test_what_gives_items_again_is_used_like_the_iterator() -> None:
    """One that can be called could not be, one with a length had none, and nothing could be set on it."""
    draws, own = kept(own_draws := Draws())
    with own.rehearsal():
        assert draws(2) == [5, 6] and next(draws) == 7
    assert draws(2) == [5, 6]
    assert len(draws) == 4 and draws[3] == 8 and isinstance(draws, Draws) and draws.data is own_draws.data
    assert draws._items == ("own",) and draws.place == 2 and draws.state_dict() == {"place": 2}
    draws.set_epoch(3)
    draws.name = "mine"
    assert own_draws.epoch == 3 and own_draws.name == "mine" and not draws.is_at_end  # type: ignore[attr-defined]
    del draws.name
    assert not hasattr(own_draws, "name")
    for copied in (copy.deepcopy(draws), copy.copy(draws), pickle.loads(pickle.dumps(draws))):
        assert next(copied) == 7 and type(copied) is type(draws)
    assert next(draws) == 7


def test_what_gives_items_again_is_used_like_a_generator() -> None:
    draws, own = kept(found for found in (1, 2, 3))
    with own.rehearsal():
        assert next(draws) == 1
    assert list(itertools.islice(draws, 2)) == [1, 2] and draws.gi_frame is not None
    draws.close()
    assert draws.gi_frame is None


def test_what_a_step_sends_to_a_generator_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial and each micro-batch sent, losses were 3 % off, and nothing was said of it."""
    said: list[str] = []
    monkeypatch.setattr(replayed, "warn_once", lambda _, sentence: said.append(sentence))

    def averages() -> Iterator[float]:
        mean = 1.0
        while True:
            mean = 0.5 * mean + 0.5 * (yield mean)  # type: ignore[misc]

    draws, own = kept(averages())
    assert next(draws) == 1.0 and draws.send(3.0) == 2.0 and not said
    with own.of_step("all", 0, None):
        assert draws.send(4.0) == 3.0
    assert said[0].startswith("a step sends to self.draws, a generator: each micro-batch does")


def test_an_iterator_that_begins_anew_does_so() -> None:
    """``for item in self.draws`` went on where the batch before had left it."""
    draws, _ = kept(BeginsAnew())
    assert [list(itertools.islice(draws, 2)) for _ in range(2)] == [[5, 6], [5, 6]]


@pytest.mark.parametrize("reads, is_told", [(next, True), (lambda file: file.readline(), False)])
def test_lines_that_a_step_reads_are_read_again_or_it_is_told(
    reads: Any, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each trial and each micro-batch read the next line, and nothing was said."""
    said: list[str] = []
    monkeypatch.setattr(own_generators, "warn_once", lambda _, sentence: said.append(sentence))
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    with path.open() as file:
        _, own = kept(file)
        lines = []
        for _ in range(2):
            with own.of_step("all", 0, None):
                lines.append(reads(file))
        assert lines == ["1\n", "1\n"] and file.tell() == 0
    assert bool(said) == is_told
    assert all(each.startswith("a step reads lines of self.draws by next() or in a loop") for each in said)
