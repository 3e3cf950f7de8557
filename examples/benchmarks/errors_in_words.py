"""The errors of predicted memory, in the terms of the paper of mCAP."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

NEAR = 0.14
"""The relative error that the paper names: 90 % of its predictions are within it."""


def errors_in_words(errors: Iterable[float]) -> str:
    """Tell the range, the median and the spread of relative errors, 0 for an exact prediction."""
    ordered = sorted(errors)
    within = sum(abs(error) <= NEAR for error in ordered) / len(ordered)
    return (
        f"error from {ordered[0]:+.1%} to {ordered[-1]:+.1%}, median {statistics.median(ordered):+.1%}; within "
        f"{100 * NEAR:.0f} % in {within:.0%}; of 90 % at most "
        f"{sorted(map(abs, ordered))[int(0.9 * (len(ordered) - 1))]:.1%}"
    )
