"""Which names of a file code reads: globals, and no attributes that are called alike."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition.code_names import CodeSearch, does_nothing, globals_in  # noqa: E402
from deepspeed_partition.engine.pipeline.shared_weights import _held_by  # noqa: E402
from deepspeed_partition.profiling.attributes import state_kept  # noqa: E402


class DeepSpeedEngine(torch.nn.Module):
    """Holds a script's data, as an engine does."""

    __module__ = "deepspeed.runtime.engine"

    def __init__(self) -> None:
        super().__init__()
        self.number, self.data = 0, iter(range(10))


engine = DeepSpeedEngine()
model: Any = {"number": 0}
counts = {"number": 0}


class Layer(torch.nn.Module):
    """Calls an attribute as a script calls its engine, and counts in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        counts["number"] += 1
        return self.model(x)


def loss(x: Any) -> Any:
    engine.number += 1
    next(engine.data)
    return x.sum() + engine.number


def found_in(code: Any, kind: type | None = None) -> set[str]:
    search = CodeSearch(lambda _: True)
    search.read(code, kind)
    return {key for _, key in search.found}


def test_an_attribute_is_no_global_of_its_name() -> None:
    """An engine called model, beside layers that call self.model: batches were read twice, in silence."""
    assert found_in(Layer.forward, Layer) == {"counts"}
    assert globals_in(Layer.forward.__code__) == {"counts"}
    assert all(value is not model for value in _held_by(Layer.forward))
    assert "engine" in found_in(loss)


def test_globals_of_inner_functions_and_those_that_are_set() -> None:
    def outer() -> Any:
        global counts

        def inner() -> Any:
            return [model for _ in range(2)]

        counts = {"number": 0}
        return inner

    assert globals_in(outer.__code__) >= {"counts", "model"}


def test_an_engine_that_a_loss_reads_goes_on() -> None:
    """Red where what measuring does to all modules that code names is undone: batches were read twice."""
    with state_kept([Layer(), loss]):
        loss(torch.ones(2))
        counts["number"] += 1
    assert (engine.number, next(engine.data)) == (1, 1)
    assert counts == {"number": 0}


class CountsAsDict(dict[str, int]):
    """A layer that is a dict, in which it counts."""

    def __call__(self, x: int) -> int:
        self["n"] = self.get("n", 0) + 1
        return x


def test_attributes_of_functions_and_dicts_that_are_called_are_put_back() -> None:
    """Layers that were measured had counted there before training began: 7e-4 off, in silence."""

    def helper(x: int) -> int:
        counted.n += 1
        return x

    def layer(x: int) -> int:
        layer_counts.n += 1
        return int(counted(x))

    counted: Any = helper
    layer_counts: Any = layer
    counted.n = layer_counts.n = 0
    counts = CountsAsDict()
    with state_kept([layer, counts]):
        layer(1), counts(1)
        assert counted.n == layer_counts.n == counts["n"] == 1
    assert counted.n == layer_counts.n == 0 and counts == {}


def test_a_variable_that_is_bound_later_is_none_yet():
    """A loss function in main() that uses the engine, which is made after it, ended deepspeed.initialize()."""

    def loss_fn(x: Any) -> Any:
        return x * scale * factor

    scale, search = 2.0, CodeSearch(lambda _: True)
    search.read(loss_fn, None)
    assert {name.key for name in search.found.values()} == {"scale"}
    factor = 3.0
    assert loss_fn(1.0) == 6.0


def test_what_does_nothing_is_known() -> None:
    def empty(self: Any, batch: Any) -> None:
        """Do nothing."""

    def waiting(self: Any, batch: Any) -> Any:
        yield

    assert does_nothing(empty) and not does_nothing(lambda: 5) and not does_nothing(waiting)
    assert not does_nothing(Layer().forward) and not does_nothing(None)
