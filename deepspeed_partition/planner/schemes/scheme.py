"""A scheme of parallel training as two functions, and the schemes that have names.

Source: A. Rahimi, "Unifying Parallelization Schemes to Train Deep Nets" (2025), the functions w(s, b, d) and
n(s, b, d). Here B micro-batches need not be as many as the W workers: the named schemes take them in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Direction: TypeAlias = Literal["F", "B"]
"""Forward or backward."""
Priority: TypeAlias = Callable[[int, int, Direction], tuple[int, ...]]
"""Function of stage, micro-batch and direction; of several jobs that could start, the smallest goes first."""


def oldest_first(stage: int, micro_batch: int, direction: Direction) -> tuple[int, ...]:
    """Return the priority of the oldest micro-batch first (the source's depth first)."""
    return micro_batch, direction == "F", stage


def backward_first(stage: int, micro_batch: int, direction: Direction) -> tuple[int, ...]:
    """Return the priority of backwards before forwards, and of the oldest of each (1F1B)."""
    return direction == "F", micro_batch, stage


@dataclass(frozen=True, slots=True)
class Scheme:
    """Scheme of parallel training: two functions that say where, and one that says what goes first.

    ``Scheme(lambda s, b, d: s, lambda s, b: s)`` is GPipe. Source: Rahimi, "Unifying Parallelization Schemes".
    """

    w_compute: Callable[[int, int, Direction], int]
    """Function of stage, micro-batch and direction: the worker that computes it, from 0. A forward and its
    backward may be on different workers."""
    w_weights: Callable[[int, int], int]
    """Function of stage and micro-batch: the worker that stores the weights of the stage, as this micro-batch
    uses them."""
    priority: Priority = oldest_first
    """Function of stage, micro-batch and direction that orders jobs of a worker which could start."""
    most_in_flight: Callable[[int], int] | None = None
    """Function of the stage: a worker begins no forward of it while it has so many micro-batches in flight there.
    None: there is no limit, as in the source."""
    name: str = "scheme"


def looped(num_groups: int, group_size: int) -> Callable[[int, int], int]:
    """Return the source's h(s, b): stages go round the R workers of a group, and micro-batches round G groups."""
    return lambda stage, number: group_size * (number % num_groups) + stage % group_size


def ddp(num_workers: int) -> Scheme:
    """Return data parallelism: each worker has all weights, and some of the micro-batches."""
    return Scheme(lambda s, b, d: b % num_workers, lambda s, b: b % num_workers, name="DDP")


def fsdp(num_workers: int) -> Scheme:
    """Return fully sharded data parallelism: worker s stores stage s, and the others fetch it for each job."""
    return Scheme(lambda s, b, d: b % num_workers, lambda s, b: s % num_workers, name="FSDP")


def gpipe() -> Scheme:
    """Return pipeline parallelism: worker s computes and stores stage s."""
    return Scheme(lambda s, b, d: s, lambda s, b: s, name="GPipe")


def lpp(num_groups: int, group_size: int) -> Scheme:
    """Return looped pipelines: G groups of R workers, each of which has every R-th stage."""
    h = looped(num_groups, group_size)
    return Scheme(lambda s, b, d: h(s, b), h, name=f"LPP {num_groups}x{group_size}")


def fslpp(num_groups: int, group_size: int) -> Scheme:
    """Return fully sharded looped pipelines: as ``lpp``, but worker h(s, s) alone stores stage s."""
    h = looped(num_groups, group_size)
    return Scheme(lambda s, b, d: h(s, b), lambda s, b: h(s, s), name=f"FSLPP {num_groups}x{group_size}")


def fslpp_even(num_groups: int, group_size: int) -> Scheme:
    """Return fully sharded looped pipelines with as many stages stored by each worker, whatever G and R are.

    Of the stages of a place in a group, the i-th is stored by group i mod G; the source's h(s, s) meets on fewer
    workers where G and R have a common divisor. The engine runs this one (``shard_weights``).
    """
    h = looped(num_groups, group_size)
    return Scheme(
        lambda s, b, d: h(s, b), lambda s, b: h(s, s // group_size), name=f"even FSLPP {num_groups}x{group_size}"
    )
