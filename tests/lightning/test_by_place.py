"""Hooks that take parameters by their places have those of all ranks, of others by their form alone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_madpipe.compat import by_place as module
from lightning_madpipe.compat.absent_parameters import Absent
from lightning_madpipe.compat.by_place import goes_by_place
from lightning_madpipe.compat.elsewhere import ElsewhereError

FOUND: list[bool] = []


def parameters() -> Iterator[int]:
    """What ``self.parameters()`` is: a generator that asks who goes through it when it begins."""
    FOUND.append(goes_by_place(sys._getframe(1)))
    yield from range(3)


def state_dict() -> dict[str, int]:
    """What ``self.state_dict()`` is."""
    FOUND.append(goes_by_place(sys._getframe(1)))
    return {"weight": 1}


class Listed(list[int]):
    """What ``group["params"]`` is."""

    def __iter__(self) -> Iterator[int]:
        FOUND.append(goes_by_place(sys._getframe(1)))
        return super().__iter__()


def enumerated() -> None:
    for _ in enumerate(parameters()):
        pass


def over_lines() -> None:
    for _ in enumerate(
        parameters(),
        1,
    ):
        pass


def named_list() -> int:
    weights = list(parameters())
    return weights[0]


def taken_apart() -> list[int]:
    _, *rest = parameters()
    return rest


def named_state() -> int:
    state = state_dict()
    return state["weight"]


def own_averages() -> list[int]:
    averages = [0, 0, 0]  # made of this rank's parameters, in a hook before
    for place, weight in enumerate(parameters()):
        averages[place] += weight
    return averages


def kept_list() -> int:
    weights = list(parameters())
    return sum(weights)


def loop() -> dict[int, int]:
    found = {}
    for weight in parameters():
        found[weight] = 1
    return found


@pytest.mark.parametrize(
    "code, by_place",
    [
        (enumerated, True),
        (over_lines, True),
        (named_list, True),
        (taken_apart, True),
        (lambda: list(parameters())[:2], True),
        (lambda: [weight for weight in parameters() if weight][:1], True),
        (lambda: [*parameters()][-1], True),
        (lambda: list(itertools.islice(parameters(), 2)), True),
        (lambda: dict(zip([0.9, 0.8, 0.7], parameters(), strict=True)), True),
        (lambda: list(zip(range(3), parameters(), strict=True)), True),
        (lambda: {weight: place for place, weight in enumerate(Listed([1, 2]))}, True),
        (lambda: list(Listed([1, 2]))[1], True),
        (lambda: list(enumerate(state_dict())), True),
        (lambda: state_dict()["weight"], False),
        (named_state, False),
        (own_averages, False),
        (kept_list, False),
        (loop, False),
        (lambda: sum(weight for weight in parameters()), False),
        (lambda: next(parameters()), False),
        (lambda: list(zip([0, 0, 0].copy(), parameters(), strict=True)), False),
        (lambda: [2 * weight for weight in Listed([1, 2])], False),
        (lambda: list(Listed([1, 2])), False),
        (lambda: list(zip((*parameters(), 3), [0, 0, 0].copy(), strict=False)), True),
        (lambda: list(zip((*parameters(), *range(2)), [0, 0, 0].copy(), strict=False)), False),
    ],
)
@pytest.mark.parametrize("knows_columns", [True, False])
def test_code_that_takes_parameters_by_their_places_is_known(
    code: Callable[[], Any], by_place: bool, knows_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as in Python 3.10, which knows the line alone."""
    monkeypatch.setattr(module, "KNOWS_COLUMNS", knows_columns and module.KNOWS_COLUMNS)
    module._goes_by_place.cache_clear()
    FOUND.clear()
    code()
    [found] = FOUND
    assert found == by_place
    module._goes_by_place.cache_clear()


def two_in_a_line() -> tuple[int, list[Any]]:
    return sum(weight for weight in parameters()), list(enumerate([]))


def test_without_columns_what_counts_in_a_line_is_all_that_stands_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that counts nothing has all parameters of the model, too, if another one beside it counts places."""
    for knows_columns in {True, False} if module.KNOWS_COLUMNS else {False}:
        monkeypatch.setattr(module, "KNOWS_COLUMNS", knows_columns)
        module._goes_by_place.cache_clear()
        FOUND.clear()
        two_in_a_line()
        assert [not knows_columns] == FOUND
    module._goes_by_place.cache_clear()


def test_code_without_its_source_is_not_known() -> None:
    FOUND.clear()
    exec("for _ in enumerate(parameters()): pass", {"parameters": parameters})
    [found] = FOUND
    assert not found


def test_a_parameter_of_another_rank_is_followed_by_its_form_and_gives_no_numbers() -> None:
    absent = Absent.like(torch.empty(3, 2, device="meta"), torch.device("cpu"))
    here = nn.Parameter(torch.ones(3, 2))
    here.grad = torch.ones(3, 2)
    assert absent.grad is absent and absent.device == here.device and absent.grad.mul_(0.5) is absent
    assert (absent @ torch.ones(2, 4)).shape == (3, 4) and isinstance(absent.norm() * here, Absent)
    absent *= 2
    absent.data[:1] = 3.0
    torch._foreach_mul_([here.grad, absent.grad], 0.5)
    assert here.grad.unique().tolist() == [0.5]
    assert [type(each) for each in torch._foreach_mul([here.grad, absent], 2.0)] == [torch.Tensor, Absent]
    for needs in (
        lambda: float(absent.norm()),
        lambda: absent.sum().item(),
        lambda: bool(absent.sum() > 0),
        lambda: here.data.add_(absent),
        lambda: here.grad.mul_(1 / absent.norm()),
        lambda: torch._foreach_mul_([here.grad], absent.norm()),
        lambda: absent.tolist(),
        lambda: absent.detach().numpy(),
    ):
        with pytest.raises(ElsewhereError, match="goes by the places of all parameters"):
            needs()
