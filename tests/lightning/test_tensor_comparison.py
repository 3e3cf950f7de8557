"""Tensors that are compared with rounding in mind."""

from __future__ import annotations

import torch

from lightning_madpipe.steps.tensor_comparison import close, first_gap_in_words, gap_in_words


def test_complex_numbers_are_compared_but_for_rounding() -> None:
    """They had to be equal to the last bit, and a difference of imaginary parts was said to be 0."""
    numbers = torch.view_as_complex(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    assert close(numbers * (1 + 1e-6), numbers)
    assert not close(numbers + 1j, numbers)
    assert gap_in_words(numbers + 1j, numbers).startswith("by 1 at most")


def test_the_tensors_that_differ_are_told() -> None:
    """The first ones were, also where they were equal: a model was refused for a difference "by 0 at most"."""
    one, two = torch.ones(3), torch.full((3,), 2.0)
    assert first_gap_in_words([one, one], [one, two]) == "by 1 at most, of values up to 2"
    assert first_gap_in_words([one, two], [one, two]) is None
    assert first_gap_in_words([one], [one, two]) == "2 tensors, and by the list 1"
