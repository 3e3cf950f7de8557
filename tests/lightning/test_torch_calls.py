"""Calls of torch in a step: those that no tried step has made are a sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from lightning_madpipe.steps.torch_calls import MOST_PLACES, Calls, TorchCalls, TriedCalls, UnlikeNumbers

X, Y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 2, 1])


def calls_of(step: Callable[..., Any], *arguments: Any) -> Calls:
    calls = TorchCalls()
    with calls:
        step(*arguments)
    return calls.made


def loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, Y)


def by_a_part(x: Tensor, late: bool) -> Tensor:
    return loss(x - x.mean(0) if late else x)


def by_an_operator(x: Tensor, late: bool) -> Tensor:
    return loss(x[:2].repeat(2, 1) if late else x)


def by_another_function(x: Tensor, late: bool) -> Tensor:
    turn = torch.fliplr if late else torch.flipud
    return loss(turn(x))


def by_a_number(x: Tensor, late: bool) -> Tensor:
    return loss(x.roll(int(late), 0))


def by_a_slice(x: Tensor, late: bool) -> Tensor:
    return loss(x[:, slice(1 + late, None)].repeat(1, 3))


def by_a_list(x: Tensor, late: bool) -> Tensor:
    return loss(x[[1, 0, 2, 3] if late else [0, 1, 2, 3]])


def by_a_function_called_twice(x: Tensor, late: bool) -> Tensor:
    if late:
        loss(x.detach())
    return loss(x)


def from_zero_on(x: Tensor, late: bool) -> Tensor:
    return loss(x + x.flip(0) * (0.3 if late else 0.0))


@pytest.mark.parametrize(
    "step",
    [
        by_a_part, by_an_operator, by_another_function, by_a_number, by_a_slice, by_a_list,
        by_a_function_called_twice, from_zero_on,
    ],
)  # fmt: skip
def test_what_a_step_does_in_some_batches_alone_is_a_sign_once(step: Callable[[Tensor, bool], Tensor]) -> None:
    first, *others = [calls_of(step, X + n, late) for n, late in enumerate((False, False, True, True))]
    tried = TriedCalls()
    tried.note(first)
    assert [tried.are_others(each) for each in others] == [False, True, False]


def test_numbers_that_are_others_in_each_batch_are_a_sign_ever_less_often() -> None:
    first, *others = [calls_of(by_lengths, length) for length in range(1, 41)]
    tried = TriedCalls()
    tried.note(first)
    signs = [tried.are_others(each) for each in others]
    assert [place + 1 for place, sign in enumerate(signs) if sign] == [1, 2, 4, 8, 16, 32]


def by_lengths(length: int) -> Tensor:
    return X.repeat(length, 1)


def test_fractions_and_what_metrics_do_are_no_sign() -> None:
    accuracy = MulticlassAccuracy(3)

    def step(share: float, computes: bool) -> None:
        loss(X * share)
        accuracy(X, Y)
        if computes:
            accuracy.compute()

    first, *others = [calls_of(step, *each) for each in ((0.5, False), (0.25, False), (0.5, True))]
    tried = TriedCalls()
    tried.note(first)
    assert first and not any(tried.are_others(each) for each in others)


def test_what_goes_to_numpy_and_comes_back_is_named_by_its_lines() -> None:
    def step(y: Tensor, comes_back: bool) -> Tensor:
        turned = y.numpy()[::-1].copy()
        return torch.from_numpy(turned) + 1 if comes_back else y + int(turned[0])

    first = step.__code__.co_firstlineno
    lines = (f"test_torch_calls.py:{first + 1}", f"test_torch_calls.py:{first + 2}")
    assert [beyond(step, Y, comes_back) for comes_back in (False, True)] == [None, lines]
    assert beyond(lambda: torch.tensor(numpy.asarray(Y).tolist())) is not None
    assert beyond(lambda: torch.tensor([1.0, 2.0]) + Y[:2]) is None
    assert beyond(lambda: (Y.numpy(), X.to_sparse().coalesce() * 2, torch.vmap(lambda x: x * 2)(X))) is None


def beyond(step: Callable[..., Any], *arguments: Any) -> Any:
    calls = TorchCalls()
    with calls:
        step(*arguments)
    return calls.beyond_torch()


def of_the_batch(y: Tensor, batch_idx: int) -> Any:
    share = sum(y.tolist()) / len(y)
    return X * (share if batch_idx > 1 else 1 / (1 + batch_idx))


def of_a_tensor(y: Tensor, batch_idx: int) -> Any:
    return X * (y.float().std() if batch_idx > 1 else torch.full((), 1 / (1 + batch_idx)))


def of_numpy(y: Tensor, batch_idx: int) -> Any:
    return torch.tensor([1.0, y.numpy().mean() if batch_idx > 1 else numpy.float64(batch_idx)])


def named(y: Tensor, batch_idx: int) -> Any:
    return torch.add(X, X, alpha=int(y.max()) if batch_idx > 1 else batch_idx)


def of_a_schedule(y: Tensor, batch_idx: int) -> Any:
    assert float(y.float().mean()) < 9 and y.tolist()  # as where it is only logged
    return X * (0.9**batch_idx) + X * torch.tensor(1 / (1 + batch_idx)) + X * float("nan")


def of_samples(y: Tensor, batch_idx: int) -> Any:
    return torch.stack([row * factor for row, factor in zip(X, [1.0, 0.5, 0.25], strict=False)][: len(y)])


def of_those_alone(y: Tensor, batch_idx: int) -> Any:
    return X * (float(y.float().mean()) if y[0] == 2 and batch_idx > 1 else 0.5)


@pytest.mark.parametrize(
    "step, place",
    [
        *((step, 2) for step in (of_the_batch, of_a_tensor, of_numpy, named, of_those_alone)),
        *((step, None) for step in (of_a_schedule, of_samples)),
    ],
)
def test_a_number_that_a_step_makes_of_its_batch_is_a_sign_once(step: Any, place: int | None) -> None:
    """It was told from no other number at its place, and so each micro-batch was trained with its own."""
    unlike, parts = UnlikeNumbers(), (Y[:2], Y[1:], Y[:1].repeat(3) + 2)
    signs = []
    for batch_idx in range(4):
        unlike.begin()
        for part in parts:
            calls = TorchCalls()
            with calls:
                step(part, batch_idx)
            unlike.add(calls.numbers)
        signs.append(unlike.are_new())
    assert [number for number, sign in enumerate(signs) if sign and number] == [place] * (place is not None)


def of_classes(y: Tensor, batch_idx: int) -> Any:
    share = len(y.unique()) / 10
    return X * (share if batch_idx > 2 else 1.0)


def of_samples_alone(y: Tensor, batch_idx: int) -> Any:
    share = y.numel() / 4
    return X * (share if batch_idx > 2 else 1.0)


def of_a_list(y: Tensor, batch_idx: int) -> Any:
    number = float(len({*y.tolist()}))
    return torch.add(X, X, alpha=number if batch_idx > 2 else 1.5)


@pytest.mark.parametrize(
    "step, places",
    [
        (of_classes, [3]),
        (of_samples_alone, [3]),
        (of_a_list, [3]),
        (of_a_schedule, [1, 2, 4, 8, 16]),
        (of_samples, []),
        (lambda y, batch_idx: X * 0.9**batch_idx, []),
    ],
)
def test_a_number_that_micro_batches_share_is_a_sign(step: Any, places: list[int]) -> None:
    """It was trained on as a number of a schedule, where that of the whole batch is another one."""
    unlike, whole, parts = UnlikeNumbers(), torch.tensor([0, 1, 2, 1, 0, 2]), (Y[:2], Y[1:3], Y[2:])
    unlike.begin_trial()
    signs = []
    for batch_idx in range(20):
        for part in parts if batch_idx else (whole, *parts):
            calls = TorchCalls()
            with calls:
                step(part, batch_idx)
            if batch_idx == 0:
                unlike.add_tried(calls)
            else:
                unlike.add(calls.numbers)
        if batch_idx == 0:
            unlike.end_trial()
        else:
            assert not unlike.are_new()
        signs.append(unlike.has_new_fractions)
    assert [number for number, sign in enumerate(signs) if sign] == places


def test_there_is_an_end_to_places_that_are_new() -> None:
    tried = TriedCalls()
    made = [{(str(place),): {()}} for place in range(MOST_PLACES + 2)]
    assert [tried.are_others(each) for each in made] == [True] * MOST_PLACES + [False] * 2
    assert tried.is_exhausted


def test_a_step_is_compiled_as_without() -> None:
    compiled = torch.compile(lambda x: loss(x * 2 + x.mean(0)), backend="eager", fullgraph=True)
    calls = TorchCalls()
    with calls:
        found = compiled(X)
    assert torch.equal(found, loss(X * 2 + X.mean(0)))
