"""Algorithms by their names, as ``make_plan`` and the command line take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepspeed_partition.planner.allocation import checked_partition
from deepspeed_partition.planner.solvers.contiguous import deepspeed_partitions
from deepspeed_partition.planner.solvers.contiguous.mcap import MCAP_SEARCHES, MemoryBalanced
from deepspeed_partition.planner.solvers.contiguous.optimal import Contiguous
from deepspeed_partition.planner.solvers.contiguous.pipedream import PipeDream
from deepspeed_partition.planner.solvers.contiguous.replicated import REPLICATED
from deepspeed_partition.planner.solvers.interface import Solver
from deepspeed_partition.planner.solvers.non_contiguous.madpipe import MadPipe
from deepspeed_partition.planner.solvers.non_contiguous.madpipe_paper import PaperMadPipe
from deepspeed_partition.planner.units import shown

ALGORITHMS = (
    "madpipe", "contiguous", "pipedream", "pipedream-blind", "mcap", "mcap-bf", "mcap-bo", "uniform", "parameters",
    "type:REGEX", "madpipe-paper", REPLICATED, "a list of boundaries",
)  # fmt: skip


def solver_of(algorithm: str | Sequence[int] | Solver) -> Solver:
    """Return the solver that a name or a list of boundaries stands for.

    Raises:
        ValueError: the name is unknown, or the list has no boundaries.
    """
    if isinstance(algorithm, str):
        text = algorithm.strip()
        if text == "madpipe":
            return MadPipe()
        if text == "contiguous":
            return Contiguous()
        if text in ("pipedream", "pipedream-blind"):
            return PipeDream(text, tests_memory=text == "pipedream")
        if text in MCAP_SEARCHES:
            return MemoryBalanced(text, MCAP_SEARCHES[text])
        if text == "madpipe-paper":
            return PaperMadPipe()
        if text == REPLICATED:
            raise ValueError(
                f"{REPLICATED} may give stages different numbers of replicas, which is no plan: `madpipe plan` "
                "and `madpipe compare` show what it does"
            )
        if text == "uniform":
            return deepspeed_partitions.FixedPartition(text, deepspeed_partitions.uniform)
        if text == "parameters":
            return deepspeed_partitions.FixedPartition(text, deepspeed_partitions.parameters)
        if text.startswith("type:"):
            pattern = text.removeprefix("type:")
            return deepspeed_partitions.FixedPartition(
                text, lambda chain, stages: deepspeed_partitions.by_type(chain, stages, pattern)
            )
        if text and set(text) <= set("0123456789, -"):
            return solver_of(_boundaries_in(text))
        raise ValueError(f"unknown algorithm {shown(algorithm)}: known are {', '.join(ALGORITHMS)}")
    if not isinstance(algorithm, Iterable) and not hasattr(algorithm, "solve"):
        raise ValueError(f"algorithm is {shown(algorithm)}: it must be one of {', '.join(ALGORITHMS)}")
    if isinstance(algorithm, Iterable):
        cuts = tuple(algorithm)
        name = ",".join(map(str, cuts))
        return deepspeed_partitions.FixedPartition(name, lambda chain, stages: checked_partition(cuts, chain))
    return algorithm


def _boundaries_in(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{shown(text)} is no list of boundaries: write it like 0,3,8") from None
