"""Objects of a layer as another process can have them; here that process is this one."""

from __future__ import annotations

import copy
import random
import threading
from collections import OrderedDict, defaultdict, deque
from functools import partial
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import nn  # noqa: E402

from deepspeed_partition.engine.repartition.object_states import (  # noqa: E402
    NotHereError,
    laid,
    loaded,
    object_state,
)
from deepspeed_partition.hidden_modules import hidden_modules, hidden_tensors  # noqa: E402


class Table(dict):
    """A dict with attributes."""


class Dropping:
    """Leaves its lock out of what is pickled, as objects with locks do, and makes a new one."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0

    def __getstate__(self) -> dict[str, Any]:
        return {"count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self.count = state["count"]


def made() -> Any:
    queue: Queue[int] = Queue()
    queue.put(1)
    table = Table(a=[1])
    table.total = 0
    found = SimpleNamespace(
        numbers=[1, 2], recent=deque([1], maxlen=2), named=OrderedDict(a=1), sets={1}, table=table, queue=queue,
        draw=random.Random(1), generator=torch.Generator().manual_seed(1), bits=numpy.random.default_rng(1),
        weight=nn.Parameter(torch.zeros(2)), tensor=torch.zeros(2), array=numpy.zeros(2), lists=defaultdict(list),
        lock=threading.Lock(), function=lambda: 1, dropping=Dropping(), rank=0,
    )  # fmt: skip
    found.itself, found.pair = found, (found.numbers, found.lock)
    return found


def changed(value: Any) -> None:
    value.numbers.append(3)
    value.recent.extend([2, 3])
    value.named.update(b=2)
    value.named.move_to_end("a")
    value.sets.add(2)
    value.table.update(b=2)
    value.table["a"].append(2)
    value.table.total += 1
    value.queue.put(2)
    value.draw.random()
    torch.rand(1, generator=value.generator)
    value.bits.random()
    value.weight.data += 1
    value.tensor = value.tensor + 1
    value.array += 1
    value.lists["a"].append(1)
    value.dropping.count += 1


def shown(value: Any) -> Any:
    drawn = [copy.deepcopy(value.draw).random(), value.generator.get_state().tolist()]
    return [
        value.numbers, value.recent, list(value.named), value.sets, value.table, value.table.total,
        list(value.queue.queue), *drawn, copy.deepcopy(value.bits).random(), value.weight.tolist(),
        value.tensor.tolist(), value.array.tolist(), value.lists, value.dropping.count,
    ]  # fmt: skip


def test_an_object_gets_what_another_one_has():
    there, here, before = made(), made(), object_state(made(), {})
    changed(there)
    here.rank = 1
    kept, members = dict(vars(here)), {"held": here}
    state = object_state(there, {})
    assert before is not None and state is not None and state.needs_another
    for known in (None, before.data):
        value = laid(_of(state, known), members, "held", {})
        assert value is here and shown(here) == shown(there)
        others = {name for name, one in kept.items() if vars(here)[name] is not one}
        assert others - {"rank"} == {"tensor", "array", "pair"}, "others may have the rest, too"
        assert here.itself is here and here.pair[0] is here.numbers
        here.rank = 1
    assert laid(_of(state, before.data), members, "held", {}).rank == 1, "what has not changed stays"
    assert laid(_of(state, None), members, "held", {}).rank == 0


def _of(state: Any, before: bytes | None) -> Any:
    return type(state)(state.kind, state.data, state.stays, state.classes, before)


def test_what_is_not_here_is_told_and_changes_nothing():
    there, here = made(), made()
    changed(there)
    there.other = threading.Lock()
    state, before = object_state(there, {}), shown(here)
    for present in ({"held": here}, {"held": None}, {}):
        with pytest.raises(NotHereError):
            laid(state, present, "held", {})
        assert shown(here) == before
    with pytest.raises(NotHereError, match="partial"):
        laid(object_state([partial(map, lambda x: x)], {}), {"held": [None]}, "held", {})
    with pytest.raises(NotHereError):
        loaded(object_state([lambda: 1], {}), {})
    assert loaded(object_state([Dropping()], {}), {})[0].count == 0
    assert object_state(lambda: 1, {}) is None and object_state((x for x in [1]), {}) is None


def test_classes_of_functions_are_found_in_what_is_here():
    def of(number: int) -> Any:
        class Local:
            def __init__(self) -> None:
                self.number = number

        return Local()

    here = of(1)
    state = object_state(of(2), {})
    assert laid(state, {"held": here}, "held", {}) is here and here.number == 2
    with pytest.raises(NotHereError):
        laid(state, {}, "held", {})


def test_modules_that_are_held_elsewhere_are_found():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    norm = nn.BatchNorm1d(2)
    norm.more = [nn.Dropout()]
    layer.fixed, layer.itself, layer.parent = [norm, other], [layer], [nn.Sequential(layer)]
    layer.object = SimpleNamespace(call=nn.Linear(2, 2, bias=False).forward, part=partial(map, nn.ReLU()))
    found = hidden_modules(layer, apart=[other])
    assert list(found) == ["fixed[0]", "object.call.__self__", "object.part(1)", "fixed[0].more[0]"]
    names = [*(f"fixed[0].{name}" for name in norm.state_dict()), "object.call.__self__.weight"]
    assert sorted(hidden_tensors(found)) == sorted(names)
    named = {("module", "fixed[0]"): norm}
    assert loaded(object_state([norm], named), {("module", "fixed[0]"): other}) == [other]


@pytest.mark.parametrize("in_list", [True, False])
def test_the_model_around_a_child_is_no_part_of_a_layer(in_list: bool):
    """A captured layer holds blocks that may point to their model, whose other weights do not move along."""
    block, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    model, layer = nn.Sequential(nn.Linear(2, 2), block), nn.Sequential(nn.ReLU(), block)
    object.__setattr__(block, "model", [model] if in_list else model)
    assert hidden_modules(layer) == {}
    block.teacher = [teacher]
    assert hidden_modules(layer) == {"1.teacher[0]": teacher}
