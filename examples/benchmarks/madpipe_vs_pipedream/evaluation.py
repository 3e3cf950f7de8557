"""The rows of a sweep as one table, and what can be asked of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from sweep import Result, Setting, read

ALGORITHMS = ("pipedream-blind", "pipedream", "contiguous", "madpipe-paper", "madpipe")
PROOF = 2e-6
"""The relative error of two periods that are compared: the planner proves each to one part in a million."""


@dataclass(frozen=True)
class Evaluation:
    """What every algorithm made of every setting."""

    rows: Mapping[Setting, Mapping[str, Result]]
    sequential_seconds: Mapping[str, float]
    """Seconds of a micro-batch of each network on one device: U(1, L) of the paper."""

    @classmethod
    def of(
        cls, results: Mapping[str, Mapping[Setting, Result]], sequential_seconds: Mapping[str, float]
    ) -> Evaluation:
        """Make the table from the rows of each algorithm."""
        rows: dict[Setting, dict[str, Result]] = {}
        for algorithm, found in results.items():
            for setting, result in found.items():
                rows.setdefault(setting, {})[algorithm] = result
        return cls(dict(sorted(rows.items())), sequential_seconds)

    def where(self, **wanted: object) -> Evaluation:
        """Return the rows of the settings with these fields."""
        chosen = {
            setting: found
            for setting, found in self.rows.items()
            if all(getattr(setting, key) == value for key, value in wanted.items())
        }
        return replace(self, rows=chosen)

    @property
    def algorithms(self) -> list[str]:
        """The algorithms that have a row."""
        present = {algorithm for found in self.rows.values() for algorithm in found}
        return [algorithm for algorithm in ALGORITHMS if algorithm in present]

    def both(self, one: str, other: str) -> Evaluation:
        """Return the rows of the settings in which both algorithms have a plan."""
        chosen = {
            setting: found
            for setting, found in self.rows.items()
            if self.period(setting, one) is not None and self.period(setting, other) is not None
        }
        return replace(self, rows=chosen)

    def values(self, key: str) -> list[object]:
        """Return the values of a field of the settings, in order."""
        return sorted({getattr(setting, key) for setting in self.rows})

    def period(self, setting: Setting, algorithm: str) -> float | None:
        """Return the period in seconds; None where there is no plan, or no row."""
        result = self.rows.get(setting, {}).get(algorithm)
        return None if result is None else result.period_seconds

    def results(self, algorithm: str) -> Iterator[tuple[Setting, Result]]:
        """Yield the settings in which the algorithm has a plan, and what it made of them."""
        for setting, found in self.rows.items():
            if algorithm in found and found[algorithm].period_seconds is not None:
                yield setting, found[algorithm]

    def ratios(self, slower: str, faster: str) -> list[float]:
        """Return the ratios of two algorithms' periods, where both have a plan."""
        pairs = ((self.period(setting, slower), self.period(setting, faster)) for setting in self.rows)
        return [one / other for one, other in pairs if one is not None and other is not None]

    def speedups(self, algorithm: str) -> list[float]:
        """Return the speedups over one device, where there is a plan."""
        return [
            self.sequential_seconds[setting.network] / (result.period_seconds or math.nan)
            for setting, result in self.results(algorithm)
        ]

    def steps(self, axis: str) -> Iterator[tuple[Setting, Setting]]:
        """Pairs of settings that differ in one field, by one step of its values, the smaller one first."""
        values = self.values(axis)
        following = dict(pairwise(values))
        for setting in self.rows:
            here = getattr(setting, axis)
            if here in following:
                more = replace(setting, **{axis: following[here]})
                if more in self.rows:
                    yield setting, more

    def worse_with_more(self, algorithm: str, axis: str) -> list[tuple[Setting, Setting]]:
        """Steps to more memory, devices or bandwidth that make the period longer, or take the plan away."""
        return [
            (less, more)
            for less, more in self.steps(axis)
            if algorithm in self.rows[less] and algorithm in self.rows[more]
            and longer(self.period(more, algorithm), self.period(less, algorithm))
        ]  # fmt: skip


def evaluation_of(folder: Path) -> Evaluation:
    """Read the table from the files of a folder."""
    results, sequential_seconds = {}, {}
    for algorithm in ALGORITHMS:
        path = folder / f"{algorithm}.jsonl"
        if path.exists():
            head, results[algorithm] = read(path)
            sequential_seconds |= head["sequential_seconds"]
    return Evaluation.of(results, sequential_seconds)


def longer(period: float | None, other: float | None) -> bool:
    """Whether a period is longer than another one, or there is none beside it, beyond what is proved."""
    if other is None:
        return False
    return period is None or period > other * (1 + PROOF)


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; NaN where there are no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
