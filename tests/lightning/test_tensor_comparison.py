"""Tensors that are compared with rounding in mind."""

from __future__ import annotations

import torch

from lightning_madpipe.steps.tensor_comparison import close, gap_in_words


def test_complex_numbers_are_compared_but_for_rounding() -> None:
    """They had to be equal to the last bit, and a difference of imaginary parts was said to be 0."""
    numbers = torch.view_as_complex(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    assert close(numbers * (1 + 1e-6), numbers)
    assert not close(numbers + 1j, numbers)
    assert gap_in_words(numbers + 1j, numbers).startswith("by 1 at most")
