"""What layers of several stages reach beside their outputs, and change: told where another layer may want it."""

from __future__ import annotations

import colorsys
from collections import deque
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from deepspeed_partition.engine.pipeline import beside_layers  # noqa: E402
from deepspeed_partition.engine.pipeline.beside_layers import SharedThings  # noqa: E402
from deepspeed_partition.engine.repartition.state_held import StateHeld, take_held  # noqa: E402
from deepspeed_partition.layer_calls import stand_in  # noqa: E402

helpers, own = ModuleType("helpers"), ModuleType("own")
helpers.colorsys, helpers.own = colorsys, own  # type: ignore[attr-defined]


def _count(module: ModuleType) -> None:
    vars(module)["part"] = vars(module).get("part", 0) + 1


class LoadsParts(torch.nn.Module):
    """Uses an installed module, which sets attributes of its own when it is used."""

    def forward(self, x: Any) -> Any:
        _count(helpers.colorsys)
        return x


class HoldsModule(torch.nn.Module):
    """Has an installed module in an attribute, as layers do that compute with NumPy or with something like it."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = colorsys

    def forward(self, x: Any) -> Any:
        _count(self.backend)
        return x


class LeavesInModule(torch.nn.Module):
    """Leaves something in a module of the program."""

    def forward(self, x: Any) -> Any:
        _count(helpers.own)
        return x


@pytest.mark.parametrize("kind, is_told", [(LoadsParts, False), (HoldsModule, False), (LeavesInModule, True)])
def test_of_modules_only_the_programs_are_told(kind: Any, is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that used an installed module it was said that they hand it something."""
    said: list[str] = []
    monkeypatch.setattr(beside_layers, "warn_once", lambda _, sentence: said.append(sentence))
    layers = [kind(), kind()]
    shared = SharedThings(layers, [0, 1])
    with shared.told(0):
        layers[0](torch.ones(3))
    assert bool(said) == is_told


class CountsInItself:
    """A layer that is no module."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: Any) -> Any:
        self.num_calls += 1
        return x


def test_what_functions_and_objects_of_two_stages_change_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where stand-ins were timed in their place, as in a warm-up, nor of what an object has itself."""
    counts = {"n": 0}

    def counts_around_it(x: Any) -> Any:
        counts["n"] += 1
        return x

    said: list[str] = []
    monkeypatch.setattr(beside_layers, "warn_once", lambda _, sentence: said.append(sentence))
    for layer, written in ((counts_around_it, "counts"), (CountsInItself(), "its num_calls")):
        shared = SharedThings([stand_in(layer, layer), layer], [0, 1])
        with shared.told(0):
            layer(1)
        assert said and f"changes {written} while it runs" in said.pop(), said
        said.clear()


class Series(list[Any]):
    """A layer that is a list, and holds its own numbers."""

    def __call__(self, x: Any) -> Any:
        return x + sum(self)


class Window(deque[Any]):
    def __call__(self, x: Any) -> Any:
        return x


class Numbers(dict[str, Any]):
    def __call__(self, x: Any) -> Any:
        return x


def grows(held: Any) -> None:
    held.append(4)
    held[0] += 5


def shrinks(held: Any) -> None:
    held.pop()
    held.pop()


@pytest.mark.parametrize("change", [grows, shrinks, lambda held: held.clear(), lambda held: held.insert(0, [7])])
@pytest.mark.parametrize("make", [lambda: Series([1, 2, 3]), lambda: Window([1, 2, 3], maxlen=4)])
def test_items_of_a_list_that_is_a_layer_go_with_it(make: Any, change: Any) -> None:
    """Those of a dict did, and those of a list stayed behind, of which nothing was said."""
    here, there, state = make(), make(), StateHeld()
    state.remember([(0, here)])
    change(here)
    sent = list(state.changed(0, here))
    assert sent and all(take_held(there, place, each) for _, each, place in sent)
    assert there == here != make()


def test_items_of_a_list_without_those_before_them_stay() -> None:
    here, there, state = Series([1, 2, 3]), Series([1]), StateHeld()
    state.remember([(0, here)])
    here[2] = 5
    [(written, sent, place)] = state.changed(0, here)
    assert written == "its item 2" and not take_held(there, place, sent) and there == [1]


def test_keys_of_a_dict_that_is_a_layer_go_with_it() -> None:
    here, there, state = Numbers(a=1, b=2), Numbers(a=1, b=2), StateHeld()
    state.remember([(0, here)])
    here["a"] = 3
    del here["b"]
    assert all(take_held(there, place, sent) for _, sent, place in state.changed(0, here)) and there == {"a": 3}


@pytest.mark.parametrize("size", [3, 4000])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.int64]
)
def test_values_of_tensors_of_every_type_can_be_compared(dtype: torch.dtype, size: int) -> None:
    """Torch has no absolute values of truth values, and no view of conjugates: large ones ended the step."""
    values = torch.arange(size).to(dtype)
    changed = torch.cat([values[:-1], values[:1]])
    for make in (lambda tensor: tensor, torch.conj, torch.conj_physical) if dtype.is_complex else (torch.clone,):
        before = list(beside_layers.leaves(make(values)))
        assert beside_layers.are_same(list(beside_layers.leaves(make(values.clone()))), before)
        assert not beside_layers.are_same(list(beside_layers.leaves(make(changed))), before)


def test_values_of_quantized_tensors_can_be_compared() -> None:
    values = torch.quantize_per_tensor(torch.arange(4000.0), 10.0, 0, torch.quint8)
    before = list(beside_layers.leaves(values))
    assert before == list(beside_layers.leaves(values.clone()))
    assert before != list(beside_layers.leaves(values[:-1])) and before[1] > 0
