"""Numbers made from sizes remember how, and tell when somebody asks for more than the number."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition.capture.sizes import Dimension, Shape, Size, evaluate, size  # noqa: E402
from deepspeed_partition.capture.structure import build, flatten, holds_tensors, names_of  # noqa: E402

LENGTH = Dimension(0, "shape", 1)


@pytest.fixture
def asked():
    return []


@pytest.fixture
def length(asked):
    return size(12, LENGTH, lambda expression, outcome: asked.append((expression, outcome)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda n: n + 1, lambda n: 1 - n, lambda n: 3 * n // 5, lambda n: n % 5 + n / 4, lambda n: -n,
        lambda n: n**2, lambda n: 100 // n, lambda n: math.ceil(n / 5), lambda n: divmod(n, 5)[1],
        lambda n: round(n / 7),
        lambda n: Shape((n, 2, n)).numel(), lambda n: math.prod((n, n)), lambda n: abs(-n),
    ],
)  # fmt: skip
def test_arithmetic_is_done_again_for_another_size(length, asked, compute):
    made = compute(length)
    assert isinstance(made, Size) and made.number == compute(12)
    assert evaluate(made.expression, {LENGTH: 35}) == compute(35)
    assert asked == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: n > 5, lambda n: n == 12, lambda n: n != 3, lambda n: n in (3, 12), bool,
        lambda n: list(range(n)), int, float, math.sqrt, lambda n: {n: 1}, lambda n: max(n, 20),
        lambda n: [0] * n, lambda n: "ab"[: n - 11],
    ],
)  # fmt: skip
def test_who_asks_for_more_is_noted(length, asked, ask):
    assert ask(length) == ask(12)
    assert asked
    assert all(evaluate(expression, {LENGTH: 12}) == outcome for expression, outcome in asked)


def test_a_size_is_the_same_as_itself(length, asked):
    assert length == length and length <= length and asked == []


def test_nested_values_come_back_as_they_were():
    value = {"a": [torch.ones(1), (2, None)], "b": slice(1, torch.ones(2))}
    leaves, structure = flatten(value)
    assert names_of(structure) == ["a.0", "a.1.0", "a.1.1", "b.start", "b.stop", "b.step"]
    again = build(structure, leaves)
    assert again["a"][0] is value["a"][0] and again["a"][1] == (2, None) and again["b"] == value["b"]


def test_objects_with_tensors_are_found():
    class Cache:
        def __init__(self) -> None:
            self.layers = [{"keys": None}]
            self.itself = self

    cache = Cache()
    assert not holds_tensors(cache)
    cache.layers[0]["keys"] = torch.ones(1)
    assert holds_tensors(cache)
