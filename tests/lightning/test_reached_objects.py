"""What steps keep in objects of a program: found, undone, and made elsewhere."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import sys
from collections import Counter, UserDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from deepspeed_partition.engine.runtime import random_state
from lightning_madpipe.steps import replayed
from lightning_madpipe.steps.beside_module import BesideModule
from lightning_madpipe.steps.own_generators import OwnGenerators
from lightning_madpipe.steps.reached_objects import MOST_OBJECTS, ReachedObjects
from lightning_madpipe.steps.recorded_calls import Call, Recorder, merged
from lightning_madpipe.steps.serialization import packed, unpacked
from lightning_madpipe.steps.step_side_effects import Leftovers, make_changes, reached_objects
from tests.other_device import OtherDevice, rand_on_device


class Base:
    __slots__ = ("total",)


class Kept(Base):
    __slots__ = ("__dict__", "late", "recent")

    def __init__(self) -> None:
        self.total, self.recent = 0, deque([1.0], maxlen=2)
        self.counts, self.array, self.rows = Counter("aab"), numpy.zeros(3), torch.zeros(2)

    def __call__(self) -> float:
        self.total += 1
        return self.total


class Numbers(dict):  # type: ignore[type-arg]
    """A meter that is a dict, and whose ``update`` is another one."""

    def update(self, name: str, value: float) -> None:  # type: ignore[override]
        self[name] = self.get(name, 0.0) + value


def stepped() -> None:
    stepped.calls = getattr(stepped, "calls", 0) + 1  # type: ignore[attr-defined]


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.kept, self.inner = Kept(), {"all": [Kept()]}
        self.call, self.part = Kept().__call__, partial(Kept())
        self.numbers, self.space, self.user = Numbers(a=1.0), SimpleNamespace(n=0), UserDict(a=1)
        self.random, self.stepped = random.Random(0), stepped
        self.owner = SimpleNamespace(module=self)


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda it: it.kept(),
    "slot that was not set": lambda it: setattr(it.kept, "late", 1),
    "deque": lambda it: it.kept.recent.extend([2.0, 3.0]),
    "counter": lambda it: it.kept.counts.update("b"),
    "array": lambda it: it.kept.array.__setitem__(0, 5),
    "tensor": lambda it: it.kept.rows.add_(1),
    "new attribute": lambda it: setattr(it.kept, "other", [1]),
    "in a container": lambda it: it.inner["all"][0](),
    "behind a method": lambda it: it.call(),
    "behind a partial": lambda it: it.part(),
    "dict with an update of its own": lambda it: it.numbers.update("a", 2.0),
    "namespace": lambda it: setattr(it.space, "n", 1),
    "attribute that is deleted": lambda it: delattr(it.space, "n"),
    "user's dict": lambda it: it.user.update(a=2),
    "function": lambda it: it.stepped(),
}


def state(it: Any) -> str:
    kept = [it.kept, it.inner["all"][0], it.call.__self__, it.part.func]
    shown = [
        [one.total, one.recent, one.counts, one.array.tolist(), one.rows.tolist(), vars(one).get("other")]
        for one in kept
    ]
    late = [getattr(one, "late", None) for one in kept]
    return repr([shown, late, dict(it.numbers), it.space, dict(it.user), vars(stepped)])


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_step_does_to_an_object_is_undone_or_done_elsewhere(name: str) -> None:
    """A schedule in an object advanced in trials of the step, and on the last stage alone."""
    vars(stepped).clear()
    here, there = Module(), Module()
    first, ignored = state(here), vars(pl.LightningModule())
    before = Leftovers(here, ignored, undoable=True)
    assert before.changes() == []
    CHANGES[name](here)
    changes, after = before.changes(), state(here)
    assert len(changes) == 1 and after != first
    parcel = pickle.dumps(packed(changes))
    before.undo()
    assert state(here) == first
    sent = unpacked(pickle.loads(parcel), torch.device("cpu"))
    make_changes(there, sent, objects=reached_objects(there, ignored, None))
    assert state(there) == after


def num_calls(run: Callable[[], object]) -> int:
    """The functions that are called meanwhile, in Python and in C."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def test_looking_at_plain_attributes_of_objects_costs_a_step_next_to_nothing() -> None:
    """Each of the hundred settings of a model's configuration took a dozen calls, in each look at a step."""
    ignored = vars(pl.LightningModule())

    def look(module: Any) -> None:
        assert Leftovers(module, ignored, undoable=True).changes() == []

    module = Module()
    look(module)  # classes are known from here on
    few = num_calls(lambda: look(module))
    vars(module.space).update({f"setting_{place}": place / 3 for place in range(1000)})
    assert num_calls(lambda: look(module)) < few + 6 * 1000


def test_an_object_of_which_there_are_too_many_is_named() -> None:
    found = ReachedObjects([("them", [Kept() for _ in range(150)]), ("more", [Kept() for _ in range(200)])])
    assert len(found.by_name) == MOST_OBJECTS and found.left_out is not None
    assert found.left_out.startswith("more[")


def schedule() -> Iterator[int]:
    yield from itertools.count()


SCHEDULE = COUNT = iter(())


def default(_numbers: Iterator[int] = itertools.count()) -> int:  # noqa: B008
    return next(_numbers)


class Scheduled(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.kept = nn.Linear(2, 2), SimpleNamespace(it=itertools.cycle((1, 2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return next(SCHEDULE), next(COUNT), next(self.kept.it), default()


def test_iterators_in_globals_objects_and_defaults_give_each_run_of_a_step_the_same() -> None:
    """A generator in a global was advanced by each trial of the step and for each micro-batch."""
    global SCHEDULE, COUNT
    SCHEDULE = COUNT = schedule()  # type: ignore[assignment]
    module = Scheduled()
    draws = OwnGenerators(module, vars(pl.LightningModule()), ValueError)
    with draws.rehearsal():
        assert module.training_step(None, 0) == (0, 1, 1, 0)
    for batch in range(3):
        draws.begin()
        for _ in range(2):
            with draws.of_step("all", batch, None):
                given = module.training_step(None, 0)
            assert given == (2 * batch, 2 * batch + 1, batch + 1, batch)
        draws.put(draws.left())
    assert next(SCHEDULE) == 6


class Loading(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.others = iter(lambda: torch.rand(()).item(), None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return next(self.others)


def test_an_iterator_that_draws_gives_the_first_and_the_last_stage_the_same(caplog: Any) -> None:
    """Each stage drew with the seed of its own run of the step: inputs got one item, the loss another."""
    given = []
    for seed in (1, 2):
        torch.manual_seed(0)
        module = Loading()
        draws = OwnGenerators(module, vars(pl.LightningModule()), ValueError)
        draws.begin()
        with draws.of_step("all", 0, None):
            torch.manual_seed(seed)
            given.append(module.training_step(None, 0))
    assert given[0] == given[1]
    assert "draws from the common random generators" in caplog.text


class LoadingOnDevice(Loading):
    def __init__(self) -> None:
        super().__init__()
        self.others = iter(lambda: rand_on_device(torch.zeros(())).item(), None)


def test_an_iterator_that_draws_on_a_device_gives_the_first_and_the_last_stage_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The generator of the CPU alone was seeded for an item, and nothing was said."""
    for owner in (random_state, replayed):
        monkeypatch.setattr(owner, "get_accelerator", OtherDevice)
    given = []
    for seed in (1, 2):
        torch.manual_seed(0)
        module = LoadingOnDevice()
        draws = OwnGenerators(module, vars(pl.LightningModule()), ValueError)
        draws.begin()
        with draws.of_step("all", 0, None):
            OtherDevice().manual_seed(seed)
            given.append(module.training_step(None, 0))
    assert given[0] == given[1]
    assert "draws from the common random generators" in caplog.text


def test_the_calls_of_micro_batches_are_merged_where_only_numbers_differ() -> None:
    path = (("attribute", "log_metrics"),)

    def calls(value: Any) -> list[Call]:
        return [Call(0, path, packed(({"loss": value, "n": 2},)), {"step": 3})]

    [call] = merged([calls(1.0), calls(4.0)], [2, 1]) or []
    assert call == Call(0, path, ({"loss": 2.0, "n": 2},), {"step": 3})
    [call] = merged([calls(torch.tensor(1.0)), calls(torch.tensor(4.0))], [1, 1]) or []
    assert call.arguments == ({"loss": 2.5, "n": 2},)
    assert merged([calls(1), calls(2)], [1, 1]) is None
    assert merged([calls("a"), calls("b")], [1, 1]) is None
    assert merged([calls(1.0), []], [1, 1]) is None


class Table:
    """Compares its cells one by one, as data frames do."""

    def __init__(self, cells: Any) -> None:
        self.cells = cells

    def __eq__(self, other: object) -> Any:
        return self.cells == getattr(other, "cells", None)

    __hash__ = None  # type: ignore[assignment]


def test_calls_with_arrays_are_compared_and_kept_as_they_were() -> None:
    """Arrays for a logger ended in NumPy's words about their truth, and showed what the step did to them later."""

    def calls(value: Any) -> list[Call]:
        recorded: list[Call] = []
        Recorder(0, (("attribute", "experiment"),), recorded.append).add_histogram("outputs", value, step=1)
        return recorded

    shown = numpy.arange(3.0)
    same = [calls(shown), calls(shown.copy())]
    shown += 1
    [call] = merged(same, [1, 1]) or []
    assert call.arguments[1].tolist() == [0, 1, 2]
    for different in (numpy.zeros(3), numpy.zeros(2), Table(shown)):
        assert merged([same[0], calls(different)], [1, 1]) is None
        assert merged([calls([shown]), calls([different])], [1, 1]) is None
    assert merged([calls(Table(shown)), calls(Table(shown))], [1, 1]) is None
    means = [calls({"all": numpy.ones(2), "mean": mean}) for mean in (1.0, 2.0)]
    [call] = merged(means, [1, 1]) or []
    assert call.arguments[1]["mean"] == 1.5


LAST = [1.0]


@functools.cache
def first_of_last() -> float:
    return LAST[0]


@functools.cache
def halved(number: int) -> float:
    return number / 2


class Caching(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> float:
        return first_of_last() + halved(3)


def test_a_cache_that_a_step_fills_and_that_may_differ_is_told_of_once(caplog: Any) -> None:
    """Behind fit rank 0 got 128 from a function that gives 1 in one process: the last stage alone kept that."""
    first_of_last.cache_clear()
    halved.cache_clear()
    module = Caching()
    beside = BesideModule(module)
    beside.tell_of_caches("training_step")
    assert not caplog.messages
    module.training_step(None, 0)
    beside.tell_of_caches("training_step")
    beside.tell_of_caches("training_step")
    [told] = [line for line in caplog.messages if "keeps results" in line]
    assert "first_of_last() keeps results" in told and "keep them in a dict" in told


class InOrder(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.order, self.hardness = list(range(length)), [0.0] * length

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Grading(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.train_dataloader.sampler.hardness[batch_idx] = 1.0


def _beside(sampler: Sampler[int], module: pl.LightningModule | None = None) -> BesideModule:
    module = Grading() if module is None else module
    loader = DataLoader(TensorDataset(torch.zeros(len(sampler))), sampler=sampler)
    module._trainer = trainer = pl.Trainer(logger=False, barebones=True)
    trainer.fit_loop._combined_loader = SimpleNamespace(iterables=loader, flattened=[loader])
    beside = BesideModule(module)
    beside.begin(undoable=True)
    return beside


def test_long_lists_of_a_sampler_are_looked_through_where_steps_name_them() -> None:
    """A bucketed sampler of a million samples took 5 seconds at each look."""
    beside = _beside(InOrder(5000))
    looks = {place.name: beside.look(place, value) for place, value in beside.places() if place.owner == "InOrder"}
    assert looks == {"order": "identity", "hardness": "versions"}


class Noting(InOrder):
    def note_hardness(self, index: int) -> None:
        self.hardness[index] = 1.0


class GradingByMethod(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.trainer.train_dataloader.sampler.note_hardness(batch_idx)


def test_long_lists_of_a_sampler_are_looked_through_where_steps_call_its_methods() -> None:
    beside = _beside(Noting(5000), GradingByMethod())
    looks = {place.name: beside.look(place, value) for place, value in beside.places() if place.owner == "Noting"}
    assert looks["hardness"] == "versions"


@pytest.mark.parametrize("is_shared", [False, True])  # by several pipelines
def test_weights_of_torchs_sampler_are_looked_at(is_shared: bool) -> None:
    sampler: Any = WeightedRandomSampler([1.0] * 8, 8)
    beside = _beside(DistributedSamplerWrapper(sampler, num_replicas=2, rank=0) if is_shared else sampler)
    assert "weights" in {place.name for place, _ in beside.places() if "WeightedRandomSampler" in place.owner}


@pytest.mark.parametrize("before", [None, abs])
def test_a_function_that_a_step_sets_on_a_sampler_is_bound_and_nothing_is_deleted(before: Any) -> None:
    """It was sent as the end of the attribute, and other ranks had none."""
    sampler: Any = InOrder(8)
    sampler.key = before
    beside = _beside(sampler)
    left = Leftovers(Grading(), (), undoable=True, beside=beside)
    sampler.key = lambda index: -index
    assert [(str(change.place), change.kind) for change in left.changes()] == [("InOrder.key", "bind")]
    left.undo()
    assert sampler.key is before
