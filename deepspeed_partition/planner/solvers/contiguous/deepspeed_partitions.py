"""DeepSpeed's own partitions, so that they can be planned, compared and explained without a process group.

Method: the code of ``partition_uniform`` and ``partition_balanced`` of DeepSpeed
(``deepspeed/runtime/utils.py``), as ``PipelineModule`` calls it. The boundaries are exactly DeepSpeed's; they are
best in no sense. Cost: ``partition_balanced`` takes O(P L^2) time and O(P L) memory for L layers and P devices,
``partition_uniform`` O(P).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.planner.solvers.interface import Answer, Cuts, Problem, bytes_needed, fits
from deepspeed_partition.planner.units import printable, shown


def uniform(chain: Chain, num_stages: int) -> Cuts:
    """Return the partition of ``partition_method="uniform"``: the same number of layers in each stage."""
    return without_empty_stages(partition_uniform(chain.num_layers, num_stages))


def parameters(chain: Chain, num_stages: int) -> Cuts:
    """Return the partition of ``partition_method="parameters"``, the default: it balances trainable parameters."""
    weights = [float(layer.num_trainable_parameters or 0) for layer in chain.layers]
    return without_empty_stages(partition_balanced(weights, num_stages))


def by_type(chain: Chain, num_stages: int, pattern: str) -> Cuts:
    """Return the partition of ``partition_method="type:REGEX"``: it balances layers whose class matches.

    Upper and lower case are not told apart.

    Raises:
        ValueError: REGEX is no regular expression, or matches nothing.
    """
    try:
        matches = re.compile(pattern, re.IGNORECASE).search
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"algorithm {shown('type:' + pattern)}: not a regular expression: {error}") from None
    weights = [float(matches(layer.type or layer.name) is not None) for layer in chain.layers]
    if not any(weights):
        types = sorted({layer.type or layer.name for layer in chain.layers})
        some = printable(", ".join(types[:8])) + (", ..." if len(types) > 8 else "")
        raise ValueError(f"algorithm {shown('type:' + pattern)} matches none of the layer types: {some}")
    return without_empty_stages(partition_balanced(weights, num_stages))


def without_empty_stages(parts: Sequence[int]) -> Cuts:
    """Return the boundaries without the stages that DeepSpeed leaves without a layer."""
    return tuple(sorted(set(parts)))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the boundaries of DeepSpeed's function of this name: the last parts get the remainder."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, rest = divmod(num_items, num_parts)
    # DeepSpeed moves the i-th and all later boundaries by one, for i = 1..rest.
    return [part * size + min(part, rest) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the boundaries of DeepSpeed's function of this name.

    It minimizes the difference between the heaviest and the lightest part, not the heaviest part. It builds on
    best prefixes, although that difference has no such structure. Of equal partitions the one with the latest
    last boundary wins. All of this is copied, since it is what a user's run does.
    """
    n, m = len(weights), num_parts
    if n <= m:
        return partition_uniform(n, m)
    total = np.concatenate([[0.0], np.cumsum(np.array(weights, dtype=float))])
    heaviest = np.full((n + 1, m + 1), np.inf)
    lightest = np.full((n + 1, m + 1), np.inf)
    position = np.zeros((n + 1, m + 1), dtype=int)
    heaviest[0, 0] = 0.0
    for i in range(1, n + 1):
        parts_before = np.arange(min(i, m))  # all numbers of parts at once
        last_part = (total[i] - total[:i])[:, None]
        most = np.maximum(heaviest[:i, : len(parts_before)], last_part)
        least = np.minimum(lightest[:i, : len(parts_before)], last_part)
        k = i - 1 - np.argmin((most - least)[::-1], axis=0)  # the last of equal minima
        heaviest[i, parts_before + 1] = most[k, parts_before]
        lightest[i, parts_before + 1] = least[k, parts_before]
        position[i, parts_before + 1] = k
    parts = [n]
    for j in reversed(range(1, m + 1)):
        parts.append(int(position[parts[-1], j]))
    return parts[::-1]


@dataclass(frozen=True, slots=True)
class FixedPartition:
    """Solver with one given partition: a baseline, or boundaries that a user wrote."""

    name: str
    partition: Callable[[Chain, int], Cuts]
    """Function from the chain and the number of devices to the boundaries."""

    def solve(self, problem: Problem) -> Answer:
        cuts = self._cuts(problem)
        return Answer((cuts,) if fits(problem, cuts) else ())

    def smallest_memory(self, problem: Problem) -> tuple[Cuts, int] | None:
        cuts = self._cuts(problem)
        return cuts, max(bytes_needed(problem, cuts))

    def _cuts(self, problem: Problem) -> Cuts:
        constraints = problem.constraints
        cuts = self.partition(problem.chain, constraints.max_stages)
        num_stages = len(cuts) - 1
        if num_stages > constraints.max_stages:
            raise ValueError(
                f"algorithm {shown(self.name)} makes {num_stages} stages for {constraints.max_stages} devices"
            )
        if num_stages < constraints.fewest_stages:
            raise ValueError(
                f"algorithm {shown(self.name)} makes {num_stages} stages and {constraints.fewest_stages} are "
                "needed"
            )
        allowed = constraints.allowed(problem.table)
        for stage, (start, stop) in enumerate(pairwise(cuts)):
            if not allowed[start, stop]:
                raise ValueError(
                    f"algorithm {shown(self.name)} gives stage {stage} layers {start} to {stop}, none of which "
                    "has trainable parameters: an optimizer has nothing to do there"
                )
        return cuts
