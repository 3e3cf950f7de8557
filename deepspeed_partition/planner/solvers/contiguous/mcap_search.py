"""The three searches of mCAP: brute force, dynamic programming that finds the same, Bayesian optimization.

Each is given, for the stages from the first to the last, a table whose entry [k, l] is the peak bytes of layers k
to l as that stage, ``NOTHING_FITS`` or more where they may not be one. The best partition is that with the
smallest peak; of equals the one whose other devices have the smallest peak, and so on, each time without the
fullest device. Of those that are equal in all of them, the one whose first boundaries are smallest.

Source: H. Dreuning et al., mCAP, Euro-Par 2022, section 3.4. There the fullest device is left out once; here
again and again, so that the answer is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.solvers.contiguous.min_max import NOTHING_FITS
from deepspeed_partition.planner.solvers.interface import Cuts

Tables = Sequence[NDArray[np.int64]]
Peaks = tuple[int, ...]
"""Peaks of the devices, the largest first: partitions are compared by these."""

MOST_PARTITIONS = 5_000_000
"""Brute force looks at so many partitions at most, in about a minute."""
ITERATIONS = 75
"""Partitions that Bayesian optimization looks at, as in the paper, section 4.1."""
FIRST_ITERATIONS = 15
"""How many of them are random."""
KAPPA = 2.576
"""Weight of what is unknown against what is known to be good: that of the 99 % quantile. The paper's 1000 looks at
the unknown alone."""


def peaks_of(stages: Tables, cuts: Cuts) -> Peaks:
    """Return the peaks of a partition's devices in bytes, the largest first."""
    return tuple(sorted((int(table[stage]) for table, stage in zip(stages, pairwise(cuts), strict=True)))[::-1])


def all_cuts(num_layers: int, num_stages: int) -> Iterator[Cuts]:
    """Yield the boundaries of all C(L - 1, P - 1) partitions, smaller first boundaries first."""
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield (0, *inner, num_layers)


def brute_force(stages: Tables) -> Cuts | None:
    """Return the best partition, after a look at each: mCAP-BF; None where none is allowed.

    Raises:
        ValueError: there are more than ``MOST_PARTITIONS``.
    """
    num_layers = stages[0].shape[0] - 1
    count = comb(num_layers - 1, len(stages) - 1)
    if count > MOST_PARTITIONS:
        raise ValueError(
            f"{num_layers} layers on {len(stages)} devices have {count} partitions, and brute force looks at "
            f"{MOST_PARTITIONS} at most: use mcap, which finds the same without a look at each"
        )
    allowed = ((peaks_of(stages, cuts), cuts) for cuts in all_cuts(num_layers, len(stages)))
    return _best(each for each in allowed if each[0][0] < NOTHING_FITS)


def exact(stages: Tables) -> Cuts | None:
    """Return what brute force returns, by dynamic programming, for any number of layers.

    With V(q, k) the smallest peaks, the largest first, of layers k and on in the last q stages::

        V(q, k) = min over l of sorted(peak(q, k, l), V(q - 1, l))

    The order of sorted lists stays as it is where the same number comes to both, so the best partition is made
    of best ones.
    """
    num_layers = stages[0].shape[0] - 1
    best: list[Peaks | None] = [None] * num_layers + [()]
    ways: list[list[int]] = []
    for table in reversed(stages):
        largest = np.array([NOTHING_FITS if each is None else (each or (0,))[0] for each in best], dtype=np.int64)
        costs = np.maximum(table, largest[None, :])
        least = costs.min(axis=1)
        now: list[Peaks | None] = [None] * (num_layers + 1)
        way = [0] * (num_layers + 1)
        for start in np.flatnonzero(least < NOTHING_FITS):
            # Only the stops with the smallest largest peak can be best: mostly one.
            stops = np.flatnonzero(costs[start] == least[start])
            peaks = [(_with(best[stop], int(table[start, stop])), int(stop)) for stop in stops]
            now[start], way[start] = min(peaks)
        best = now
        ways.append(way)
    if best[0] is None:
        return None
    cuts = [0]
    for way in reversed(ways):
        cuts.append(way[cuts[-1]])
    return tuple(cuts)


def _with(peaks: Peaks | None, more: int) -> Peaks:
    assert peaks is not None  # else the cost would be NOTHING_FITS
    return tuple(sorted((*peaks, more), reverse=True))


def bayesian(stages: Tables, *, deadline: Deadline | None = None, seed: int = 0) -> Cuts | None:
    """Return the best of ``ITERATIONS`` partitions that Bayesian optimization looks at: mCAP-BO.

    Each device is a dimension: how many layers it is to have, 1 to L - P + 1. Numbers that do not add up to L
    are scaled until they do, so that each point is a partition. The surrogate is a Gaussian process with a Matern
    kernel, the acquisition function the upper confidence bound. The same seed gives the same answer.

    Args:
        deadline: After it the best so far is returned.

    Raises:
        ValueError: the package bayesian-optimization is not installed.
    """
    num_layers, num_stages = stages[0].shape[0] - 1, len(stages)
    if num_stages == 1 or num_stages == num_layers:
        return brute_force(stages)  # a single partition
    optimizer = _optimizer([f"device {index}" for index in range(num_stages)], num_layers - num_stages + 1, seed)
    from threadpoolctl import threadpool_limits  # scikit-learn needs it

    with threadpool_limits(1):  # matrices of 75 rows: threads would wait for each other
        return _explored(optimizer, stages, seed, deadline)


def _explored(optimizer: Any, stages: Tables, seed: int, deadline: Deadline | None) -> Cuts | None:
    num_layers, num_stages = stages[0].shape[0] - 1, len(stages)
    rng = np.random.default_rng(seed)
    seen: dict[Cuts, Peaks] = {}
    for iteration in range(ITERATIONS):
        if deadline is not None and deadline.passed() and seen:
            break
        if iteration < FIRST_ITERATIONS:
            sizes = {key: float(rng.uniform(1, num_layers - num_stages + 1)) for key in optimizer.space.keys}
        else:
            sizes = optimizer.suggest()
        cuts = _scaled([float(sizes[key]) for key in optimizer.space.keys], num_layers)
        if cuts not in seen:
            seen[cuts] = peaks_of(stages, cuts)
        # What is forbidden is worse than all else, but no larger: the process is fitted to the numbers.
        worst = max((peaks[0] for peaks in seen.values() if peaks[0] < NOTHING_FITS), default=1)
        optimizer.register(params=sizes, target=-min(seen[cuts][0], 2 * worst) / worst)
    return _best((peaks, cuts) for cuts, peaks in seen.items() if peaks[0] < NOTHING_FITS)


def _optimizer(keys: Sequence[str], most: int, seed: int) -> Any:
    """Return the optimizer of the package, over numbers from 1 to ``most``: whole ones take it far longer."""
    try:
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import UpperConfidenceBound
    except ImportError as error:
        raise ValueError(
            "mcap-bo takes the package bayesian-optimization, which is not installed: pip install "
            "'madpipe[bayesian]', or use mcap, which finds the best partition without it"
        ) from error
    return BayesianOptimization(
        f=None, pbounds=dict.fromkeys(keys, (1.0, float(most))), random_state=seed, verbose=0,
        acquisition_function=UpperConfidenceBound(kappa=KAPPA), allow_duplicate_points=True,
    )  # fmt: skip


def _scaled(sizes: Sequence[float], num_layers: int) -> Cuts:
    """Return the partition with numbers of layers in about these proportions; each stage has at least one."""
    extra = num_layers - len(sizes)
    weights = [size - 1 + 1e-9 for size in sizes]
    total, until, cuts = sum(weights), 0.0, [0]
    for index, weight in enumerate(weights):
        until += weight
        cuts.append(index + 1 + round(extra * until / total))
    return tuple(cuts)


def _best(found: Iterator[tuple[Peaks, Cuts]]) -> Cuts | None:
    return min(found, default=((), None))[1]
