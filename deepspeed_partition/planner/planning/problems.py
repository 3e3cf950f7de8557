"""Problems, from the arguments of ``make_plan``, which are checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.memory import StageTable
from deepspeed_partition.planner.problem import Chain, Platform
from deepspeed_partition.planner.recomputation import Recomputation, checked_mode
from deepspeed_partition.planner.solvers.interface import Constraints, Problem
from deepspeed_partition.planner.units import shown

MOST_MICRO_BATCHES = 10_000
MOST_LAYERS = 2048
"""Largest number of layers: the planner looks at every pair of them, and this many take a gigabyte."""
DEFAULT_TIME_LIMIT_SECONDS = 60.0
SHORTEST_TIME_LIMIT_SECONDS = 1e-3
"""Seconds that are left to a search when the time is up, since a deadline is more than 0 seconds away."""


def problem_of(
    chain: Chain,
    platform: Platform,
    num_micro_batches: int | None = None,
    num_stages: int | None = None,
    every_stage_trains: bool = False,
    every_device_trains: bool = False,
    time_limit_seconds: float | None = None,
    deadline: Deadline | None = None,
) -> Problem:
    """Return what a solver is given, from the arguments of ``make_plan``.

    Raises:
        ValueError: an argument is malformed, or no plan could follow it.
    """
    _check_counts(chain, platform, num_micro_batches, num_stages)
    _check_trainable(chain, platform, num_stages, every_stage_trains, every_device_trains)
    times, table = _tables_of(chain, platform)
    return Problem(
        chain=chain,
        platform=platform,
        constraints=Constraints(
            max_stages=num_stages or platform.num_devices,
            exactly=num_stages is not None,
            every_stage_trains=every_stage_trains,
            every_device_trains=every_device_trains,
        ),
        times=times,
        table=table,
        num_micro_batches=num_micro_batches,
        in_deepspeed=num_micro_batches is not None and (num_stages is not None or every_stage_trains),
        deadline=Deadline(time_limit(time_limit_seconds), within=deadline),
    )


@lru_cache(maxsize=1)  # for the algorithms of a comparison, which then share bounds, too
def _tables_of(chain: Chain, platform: Platform) -> tuple[TimedChain, StageTable]:
    return TimedChain(chain, platform), StageTable(chain, platform)


def _check_counts(chain: Chain, platform: Platform, num_micro_batches: int | None, num_stages: int | None) -> None:
    """Refuse a chain that is too long, and numbers of micro-batches or stages that no plan can have."""
    if chain.num_layers > MOST_LAYERS:
        raise ValueError(
            f"chain {chain.name!r} has {chain.num_layers} layers and the planner takes {MOST_LAYERS}: group layers"
        )
    for key, number in (("num_micro_batches", num_micro_batches), ("num_stages", num_stages)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"{key} is {number!r}, not a whole number")
    if num_micro_batches is not None and not 1 <= num_micro_batches <= MOST_MICRO_BATCHES:
        raise ValueError(f"num_micro_batches is {num_micro_batches}: it must be from 1 to {MOST_MICRO_BATCHES}")
    if num_stages is not None and not 1 <= num_stages <= platform.num_devices:
        raise ValueError(f"num_stages is {num_stages}: it must be from 1 to {platform.num_devices}, the devices")
    if num_stages is not None and num_stages > chain.num_layers:
        raise ValueError(
            f"{num_stages} stages need at least {num_stages} layers and the chain has {chain.num_layers}: "
            f"use num_stages={chain.num_layers} or fewer, or split the layers more finely"
        )


def _check_trainable(
    chain: Chain, platform: Platform, num_stages: int | None, every_stage_trains: bool, every_device_trains: bool
) -> None:
    """Refuse a chain with too few layers that train, where each stage or device needs one."""
    training = sum(1 for layer in chain.layers if layer.num_trainable_parameters)
    needed, parts = num_stages or 1, "stages"
    if every_device_trains:
        needed, parts = platform.num_devices, "devices"
    if (every_stage_trains or every_device_trains) and training < needed:
        way_out = f"use num_{parts}={training} or fewer" if training else "let one train"
        raise ValueError(
            f"{needed} {parts} with trainable parameters each need as many such layers and the chain "
            f"has {training}: {way_out}"
        )


def checked_flushes(
    flushes: Sequence[int] | None, num_micro_batches: int | None, *, others: bool
) -> tuple[int, ...] | None:
    if flushes is None:
        return None
    sizes = tuple(flushes)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"flushes is {shown(flushes)}: it must be the numbers of micro-batches of batches")
    if sum(sizes) != num_micro_batches:
        raise ValueError(
            f"flushes is {shown(flushes)}, {sum(sizes)} micro-batches in all, and num_micro_batches is "
            f"{num_micro_batches}: they must be the same"
        )
    if others:
        raise ValueError(
            "flushes is for an engine that overlaps transfers, in one pipeline: leave out num_stages, "
            "every_stage_trains and data_parallel"
        )
    return sizes


def time_limit(seconds: float | None) -> float:
    """Return the seconds that an argument ``time_limit_seconds`` asks for.

    Raises:
        ValueError: it is no number, or not more than 0.
    """
    if seconds is None:
        return DEFAULT_TIME_LIMIT_SECONDS
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValueError(f"time_limit_seconds is {seconds!r}: it must be a number")
    if not seconds > 0:
        raise ValueError(f"time_limit_seconds is {seconds}: it must be more than 0")
    return seconds


def with_recomputation(problem: Problem, mode: str) -> Problem:
    """Return a problem whose plans may recompute what the mode (``recompute`` of ``make_plan``) allows."""
    if checked_mode(mode) == "never" or (problem.in_deepspeed and mode == "auto"):
        return problem
    if problem.in_deepspeed:
        raise ValueError(
            f"recompute is {mode!r}, and DeepSpeed's own engine recomputes nothing that a plan says: use "
            "activation_checkpoint_interval, or leave recompute out"
        )
    recomputation = Recomputation(problem.times, mode)
    return replace(problem, recomputation=recomputation) if recomputation.recomputes_any else problem
