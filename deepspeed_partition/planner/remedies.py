"""What would make a model fit where nothing does, each remedy planned and with its numbers.

Tried are the four that a user has, besides more memory: a smaller micro-batch, recomputation where it was ruled
out, one more device, and ZeRO-1 where several pipelines share the optimizer's states. Each is a plan of its own,
by the same algorithm. They are compared by seconds times devices, so that a device more is a cost, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_partition.planner.deadline import Deadline
from deepspeed_partition.planner.errors import InfeasibleError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.planning.problems import SHORTEST_TIME_LIMIT_SECONDS
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.units import format_bytes, format_seconds

SMALLEST_SHARE = 16
"""Parts of a micro-batch up to which halving it is tried."""
MOST_SECONDS = 5.0
"""Seconds of the processor for the plans of all remedies together, at most."""
SHARE = 0.4
"""Share of the time that is left for each remedy, so that there is some for the next ones."""

Make = Callable[..., Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change with which the model fits."""

    what: str
    """Words for a message."""
    seconds_per_micro_batch: float
    """Seconds for as many samples as a micro-batch had, of the step if there is one, else of the period."""
    device_seconds: float
    """These seconds times the devices: the cost by which remedies are compared."""
    peak_memory_bytes: int


def with_remedies(
    error: InfeasibleError,
    make: Make,
    chain: Chain,
    platform: Platform,
    deadline: Deadline | None = None,
    time_limit_seconds: float | None = None,
    **how: Any,
) -> InfeasibleError:
    """Return ``error`` with a sentence on what would do, the cheapest first.

    Args:
        make: ``make_plan``, or what is called in its place with a chain, a platform and ``how``.
        deadline: another end of all searches.
        time_limit_seconds: seconds of the processor for what would do, all of it together; ``MOST_SECONDS`` where
            left out, and at the most.
        how: arguments of the plan that did not fit.
    """
    if error.smallest_memory_bytes is None:  # it is not memory that lacks
        return error
    limit = MOST_SECONDS if time_limit_seconds is None else min(time_limit_seconds, MOST_SECONDS)
    together = Deadline(limit, within=deadline)
    found = sorted(_remedies(make, chain, platform, together, how), key=lambda each: each.device_seconds)
    if not found:
        return error
    told = "; ".join(
        f"{each.what} ({format_seconds(each.seconds_per_micro_batch)} for {_samples(chain)}, "
        f"{format_bytes(each.peak_memory_bytes)} at most)"
        for each in found
    )
    explained = InfeasibleError(
        f"{error}. What would do, the cheapest first: {told}",
        stage=error.stage,
        short_bytes=error.short_bytes,
        smallest_memory_bytes=error.smallest_memory_bytes,
    )
    explained.remedies = tuple(each.what for each in found)
    return explained


def _samples(chain: Chain) -> str:
    size = chain.micro_batch_size
    return "a micro-batch of the present size" if size is None else f"{size} sample{'s' if size > 1 else ''}"


def _remedies(
    make: Make, chain: Chain, platform: Platform, deadline: Deadline, how: dict[str, Any]
) -> Iterator[Remedy]:
    def tried(what: str, parts: int, chain: Chain, platform: Platform, **changes: Any) -> Iterator[Remedy]:
        if deadline.passed():
            return
        seconds = max(deadline.remaining_seconds() * SHARE, SHORTEST_TIME_LIMIT_SECONDS)
        arguments = {**how, **changes, "time_limit_seconds": seconds, "deadline": deadline, "is_one_of_many": True}
        try:
            plan = make(chain, platform, **arguments)
        except (InfeasibleError, ValueError):
            return
        degree = plan.data_parallel or 1
        if plan.step is None:
            seconds = plan.period_seconds / degree
        else:
            seconds = plan.step.step_seconds / plan.step.num_micro_batches / degree
        yield Remedy(
            what=what,
            seconds_per_micro_batch=seconds * parts,
            device_seconds=seconds * parts * platform.num_devices,
            peak_memory_bytes=max(plan.peak_memory_bytes),
        )

    if how.get("recompute", "auto") == "never":
        yield from tried("recomputation (recompute auto)", 1, chain, platform, recompute="auto")
    fewer = how.get("num_micro_batches")
    parts = 2
    while parts <= SMALLEST_SHARE and (chain.micro_batch_size or SMALLEST_SHARE) % parts == 0:
        size = f"of {chain.micro_batch_size // parts}" if chain.micro_batch_size else f"a {parts}-th as large"
        changes = {} if fewer is None else {"num_micro_batches": parts * fewer}
        found = list(tried(f"a micro-batch {size}", parts, divided(chain, parts), platform, **changes))
        if found:
            yield from found
            break
        parts *= 2
    degree = how.get("data_parallel")
    more = platform.num_devices + (degree if isinstance(degree, int) else 1)
    more_stages = {} if how.get("num_stages") is None else {"num_stages": how["num_stages"] + 1}
    if platform.machines is None and more // (degree if isinstance(degree, int) else 1) <= chain.num_layers:
        yield from tried(f"{more} devices", 1, chain, replace(platform, num_devices=more), **more_stages)
    if degree is not None and degree != 1 and how.get("zero_stage") != 1:
        yield from tried("ZeRO-1 (zero 1)", 1, chain, platform, zero_stage=1)


def divided(chain: Chain, parts: int) -> Chain:
    """Return the chain with micro-batches a ``parts``-th as large: their bytes and seconds are divided.

    A layer is taken to need time and bytes in proportion to its samples; small micro-batches are slower in truth.
    """

    def of_part(layer: LayerProfile) -> LayerProfile:
        sizes = (
            "output_bytes", "stash_bytes", "transient_bytes", "cut_stash_bytes", "running_bytes",
            "forward_running_bytes", "weight_stash_bytes",
        )  # fmt: skip
        times = ("forward_seconds", "backward_seconds", "backward_input_seconds", "backward_weight_seconds")
        changed = {key: -(-getattr(layer, key) // parts) for key in sizes if getattr(layer, key) is not None}
        changed |= {key: getattr(layer, key) / parts for key in times if getattr(layer, key) is not None}
        return replace(layer, **changed)

    size = chain.micro_batch_size
    return replace(
        chain,
        input_bytes=-(-chain.input_bytes // parts),
        layers=tuple(map(of_part, chain.layers)),
        micro_batch_size=None if size is None else max(1, size // parts),
    )
