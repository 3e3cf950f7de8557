"""What tells that two ends of a pipeline read other samples; ``drawn_numbers_cases.py`` has it in a run."""

from __future__ import annotations

from collections import namedtuple

import numpy
import pytest
import torch

from deepspeed_partition.engine.pipeline.both_ends import COMPARE_EVERY, BothEnds, are_others, marks_of

Pair = namedtuple("Pair", "inputs labels")


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, 3)), generator=torch.Generator().manual_seed(seed))


def kinds(seed: int) -> dict[str, torch.Tensor]:
    values = numbers(seed)
    return {
        "float": values, "double": values.double(), "bfloat16": values.bfloat16(), "columns": values.t(),
        "expanded": values[:, :1].expand(4, 5), "integers": (100 * values).long(),
        "bytes": (9 * values.abs()).to(torch.uint8),
        "booleans": values > 0, "one": values[:1, 0], "float8": values.to(torch.float8_e4m3fn),
    }  # fmt: skip


@pytest.mark.parametrize("kind", kinds(0))
def test_other_samples_are_told_by_tensors_of_any_kind(kind):
    def read(inputs: int, labels: int):
        return marks_of((kinds(inputs)[kind], kinds(labels)["integers"]))

    assert are_others(read(0, 1), read(2, 3))
    assert not are_others(read(0, 1), read(0, 1))
    assert not are_others(read(0, 1), read(2, 1)), "noise in the inputs"
    assert not are_others(read(0, 1), read(0, 3))


def test_micro_batches_of_any_form_are_compared():
    def forms(seed: int):
        x, y = numbers(seed), (100 * numbers(seed + 1)).long()
        named = {"ids": y + 1, "mask": torch.ones(4, 3), "text": "same"}
        return [
            (x, y), [x, y], Pair(x, y), (x, y, "more"), ((x, torch.arange(4)), (y, None)), (named, {"labels": y}),
            (x.numpy(), y.numpy()), (x, y.numpy().astype(numpy.float32)),
        ]  # fmt: skip

    for one, same, other in zip(forms(0), forms(0), forms(5), strict=True):
        assert are_others(marks_of(one), marks_of(other)), one
        assert not are_others(marks_of(one), marks_of(same)), one


@pytest.mark.parametrize(
    "first",
    [
        None, "text", {"x": numbers(0), "y": numbers(1)}, (numbers(0),), (), (numbers(0), None),
        (None, numbers(1)),
        (numbers(0), torch.zeros(4, 3)), (numbers(0), torch.tensor([0])), (torch.empty(0, 3), torch.empty(0)),
        (numbers(0), torch.ones(4, 3, device="meta")), (numbers(0).to_sparse(), numbers(1)),
        (torch.quantize_per_tensor(numbers(0), 0.1, 0, torch.qint8), numbers(1)),
        (torch.view_as_complex(numbers(0, 4, 2)), numbers(1)),
        (numpy.array(["a", "b"]), numbers(1)), (numpy.empty(0), numbers(1)),
    ],
)  # fmt: skip
def test_what_says_nothing_is_no_other_sample(first):
    """An end may have something else in the place of what it does not use."""
    last = numbers(2), numbers(3)
    assert not are_others(marks_of(first), marks_of(last)) and not are_others(marks_of(last), marks_of(first))


def test_unlike_machines_compute_the_same_samples():
    x, y = numbers(0, 64, 64), numbers(1, 64)
    rounded = x * (1 + 1e-6), y + 1e-6
    assert not are_others(marks_of((x, y)), marks_of(rounded))


def test_training_and_evaluation_count_their_own():
    ends = BothEnds()
    due = {True: [], False: []}
    for number in range(1, 2 * COMPARE_EVERY + 1):
        for trains in due:
            with torch.set_grad_enabled(trains):
                if ends.is_due():
                    due[trains].append(number)
    assert due[True] == due[False] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
