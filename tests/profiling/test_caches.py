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
