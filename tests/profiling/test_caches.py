"""What functions with a cache keep is as before when layers and a loss have been measured."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepspeed_partition import kept_values  # noqa: E402
from deepspeed_partition.profiling.attributes import attributes_kept, state_kept  # noqa: E402


def counting(most: int | None) -> Any:
    """A function that counts its calls in a cache and in a class."""

    class State:
        number = 0

    @functools.lru_cache(maxsize=most)
    def cached(number: int) -> int:
        return number

    def count() -> int:
        cached(cached.cache_info().currsize)
        State.number += 1
        return State.number + cached.cache_info().currsize

    return count


class Counting(torch.nn.Module):
    def __init__(self, count: Any) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Any) -> Any:
        return x * self.count()


@pytest.mark.parametrize("most", [None, 1000])
def test_caches_are_as_before(most: int | None) -> None:
    """They had what measuring had put into them, and code within the function did not run again, in silence."""
    first, second, of_loss = counting(most), counting(most), counting(most)
    layers = [Counting(first), Counting(second)]

    def loss(x: int) -> int:
        return x * int(of_loss())

    with state_kept([loss], layers), attributes_kept(layers):
        for _ in range(3):
            loss(1)
            for layer in layers:
                layer(1)
    assert [count() for count in (first, second, of_loss)] == [2, 2, 2]


class Keeping(torch.nn.Module):
    """Keeps results in a cache that is an attribute, counts in an attribute of another one, and has a property."""

    total = 0

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self.calls = self.num_computed = 0
        self.cached = functools.lru_cache(maxsize=most)(self._computed)

    def _computed(self, number: int) -> int:
        self.num_computed += 1
        return self.num_computed

    @functools.cached_property
    def property(self) -> int:
        Keeping.total += 1
        return Keeping.total

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * (self.cached(self.calls // 3) + 10 * _numbered(self.calls // 3) + 100 * self.property)


@functools.cache
def _numbered(number: int) -> int:
    _numbered.num_calls = getattr(_numbered, "num_calls", 0) + 1
    return int(_numbered.num_calls)


@pytest.mark.parametrize("most", [None, 1000])
def test_caches_of_layers_and_what_they_count_are_as_before(most: int | None) -> None:
    _numbered.cache_clear()
    vars(_numbered).pop("num_calls", None)
    Keeping.total = 0
    layer = Keeping(most)
    with state_kept([], [layer]), attributes_kept([layer]):
        assert [layer(1) for _ in range(4)] == [111, 111, 122, 122]
    assert [layer(1) for _ in range(4)] == [111, 111, 122, 122]


def test_a_cache_that_cannot_be_put_back_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kept_values, "tell_once", lambda _, line: said.append(line))
    count = counting(1000)
    assert count() == 2

    def loss() -> int:
        return int(count())

    with state_kept([loss]):
        loss()
    assert count() == 5
    assert len(said) == 1 and "its cache, which has a maxsize, has got results" in said[0]
