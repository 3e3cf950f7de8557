"""Step, memory and traffic of data parallelism and ZeRO, where every device runs the whole model.

Each of N devices runs k micro-batches. Communication runs beside computation, one ring after the other in the
order in which layers are done; a ring over N devices takes N - 1 rounds to reduce and N - 1 to gather, each with
an N-th of the bytes over its slowest link.

- *DDP*: gradients are all-reduced layer by layer in the last backward.
- *ZeRO-1*: they are reduced to where the optimizer's states are; the new weights are gathered after the step.
- *ZeRO-2*: as ZeRO-1, but each device keeps its N-th of the gradients alone, so every micro-batch reduces them.
- *ZeRO-3* (FSDP): each device keeps an N-th of the weights, too. A layer's weights are gathered for its forward
  and again for its backward, one layer ahead, in every micro-batch.

``Collectives`` says how a backend does that. NCCL does as above. gloo, on CPUs, has no reduction to shards that
sends less than an all-reduce (``reduce_passes``), and FSDP over it waits for each collective (``overlaps``); DDP
and ZeRO-1 overlap there, too. Measured in ``examples/benchmarks/schemes_measured``.

Source: S. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020, for
what each stage keeps and sends; the overlap is what DeepSpeed and FSDP do by default. The optimizer's own time is
left out everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.data_parallel import NEVER_SHARED
from deepspeed_partition.planner.memory import StageTable, stage_memory
from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, Platform
from deepspeed_partition.planner.recomputation import stage_cost

DDP = 0
STAGES = (DDP, 1, 2, 3)
"""ZeRO stages; 0 is plain data parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """What the collectives of a backend cost, in passes of a ring: N - 1 messages of an N-th of the bytes each."""

    reduce_passes: int = 1
    """Passes in which gradients are reduced to shards; an all-reduce takes 2."""
    overlaps: bool = True
    """Whether gathers and reductions of weights that are sharded run beside computation."""
    ring_slowdown: float = 1.0
    """How many times as long a message of a ring takes as one that travels alone."""
    call_seconds: float = 0.0
    """Seconds of the host for each gather or reduction of a layer, where computation waits for it."""


NCCL, GLOO = Collectives(), Collectives(reduce_passes=2, overlaps=False, ring_slowdown=1.07, call_seconds=0.004)
BACKENDS = {"nccl": NCCL, "gloo": GLOO}


class UnknownSharesError(ValueError):
    """Layers say what a run kept for their weights, and not which part of it ZeRO shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedStep:
    """Step of one ZeRO stage on all devices of a platform."""

    zero_stage: int
    recomputes: bool
    """Whether every layer runs its forward again (activation checkpointing of each layer)."""
    step_seconds: float
    compute_seconds: float
    """Seconds of the step in which the slowest device computes."""
    memory_bytes: int
    """Peak of each device."""
    bytes_sent: int
    """Bytes that all devices together send in a step."""


def sharded_step(
    chain: Chain,
    platform: Platform,
    num_micro_batches: int,
    zero_stage: int,
    *,
    recomputes: bool = False,
    collectives: Collectives = NCCL,
) -> ShardedStep:
    """Return the step of a ZeRO stage in which all devices share ``num_micro_batches``.

    Raises:
        UnknownSharesError: ZeRO is to share what a run has said to keep for each layer, ``training_bytes``.
        ValueError: they do not share them evenly; the stage is none of 0 to 3; or layers must not run twice and
            ``recomputes`` is set.
    """
    num_devices = platform.num_devices
    if num_micro_batches % num_devices:
        raise ValueError(
            f"{num_devices} devices do not share {num_micro_batches} micro-batches evenly: give a multiple of "
            f"{num_devices}"
        )
    if zero_stage not in STAGES:
        raise ValueError(f"zero_stage is {zero_stage}: it must be one of {', '.join(map(str, STAGES))}")
    if recomputes and not all(layer.recomputable for layer in chain.layers):
        raise ValueError("a layer must not run twice, so not all can be recomputed")
    if zero_stage and any(layer.training_bytes is not None for layer in chain.layers):
        # A part of them may have been shared already, by the ZeRO stage of that run.
        raise UnknownSharesError(
            f"training_bytes say what a run kept for each layer, and not which part of it ZeRO-{zero_stage} "
            "shares: drop them, and give weight_copies"
        )
    count = num_micro_batches // num_devices
    speed = min(platform.speed_of(device) for device in range(num_devices))
    forward = [layer.forward_seconds / speed for layer in chain.layers]
    backward = [layer.backward_seconds / speed for layer in chain.layers]
    if recomputes:
        backward = [down + up for down, up in zip(forward, backward, strict=True)]
    sizes = [layer.weight_bytes for layer in chain.layers]
    rounds = [collectives.ring_slowdown * _pass_seconds(platform, size) for size in sizes]
    reduce = collectives.reduce_passes
    if zero_stage == 3 and not collectives.overlaps:
        calls = 3 * len(rounds) * collectives.call_seconds if platform.num_devices > 1 else 0.0
        seconds = count * (sum(forward) + sum(backward) + (2 + reduce) * sum(rounds) + calls)
    elif zero_stage == 3:
        seconds = _gathered(forward, backward, rounds, count, reduce)
    else:
        every = zero_stage == 2
        seconds = _reduced(forward, backward, rounds, count, 2 if zero_stage == DDP else reduce, every=every)
        if zero_stage:
            seconds += sum(rounds)
    total = sum(sizes)
    passes = {DDP: 2, 1: reduce + 1, 2: reduce * count + 1, 3: (2 + reduce) * count}[zero_stage]
    return ShardedStep(
        zero_stage=zero_stage,
        recomputes=recomputes,
        step_seconds=seconds,
        compute_seconds=count * (sum(forward) + sum(backward)),
        memory_bytes=_memory(chain, platform, zero_stage, recomputes=recomputes),
        bytes_sent=passes * (num_devices - 1) * total,
    )


def _pass_seconds(platform: Platform, num_bytes: int) -> float:
    """Return the seconds in which a ring over all devices reduces, or gathers, so many bytes."""
    size = platform.num_devices
    if size == 1:
        return 0.0
    part = ceil(num_bytes / size)
    one = (
        platform.transfer_seconds(part) if platform.machines is None else platform.ring_seconds(part, range(size))
    )
    return (size - 1) * one


def _reduced(
    forward: Sequence[float],
    backward: Sequence[float],
    rounds: Sequence[float],
    count: int,
    passes: int,
    *,
    every: bool,
) -> float:
    """Return the end of the last backward and of what reduces the gradients beside it, or beside every one."""
    now = free = 0.0
    for number in range(count):
        now += sum(forward)
        for up, one in zip(reversed(backward), reversed(rounds), strict=True):
            now += up
            if every or number == count - 1:
                free = max(free, now) + passes * one
    return max(now, free)


def _gathered(
    forward: Sequence[float], backward: Sequence[float], rounds: Sequence[float], count: int, reduce_passes: int
) -> float:
    """Return the end of a step in which weights are gathered, one layer ahead, and gradients reduced."""
    layers = range(len(forward))
    runs = [(layer, forward[layer], False) for layer in layers]
    runs += [(layer, backward[layer], True) for layer in reversed(layers)]
    now = free = before = 0.0  # the computation, the ring, and the start of the layer before
    waiting: tuple[float, float] | None = None  # gradients: when they are ready, and how long their ring takes
    for _ in range(count):
        for layer, seconds, is_backward in runs:
            free = gathered = max(free, before) + rounds[layer]
            if waiting is not None:  # the weights of this layer were asked for before those gradients were ready
                free, waiting = max(free, waiting[0]) + waiting[1], None
            before = max(now, gathered)
            now = before + seconds
            if is_backward:
                waiting = now, reduce_passes * rounds[layer]
    return max(now, free if waiting is None else max(free, waiting[0]) + waiting[1])


def _memory(chain: Chain, platform: Platform, zero_stage: int, *, recomputes: bool) -> int:
    """Return the peak of a device with one micro-batch in flight.

    Of the copies of the weights two are the weights and their gradients; ZeRO-1 shares the others, ZeRO-2 the
    gradients, too, and ZeRO-3 all. What is gathered or reduced takes a layer's weights, or two, besides.
    """
    copies, size = platform.weight_copies, platform.num_devices
    own = min(copies, {DDP: copies, 1: NEVER_SHARED, 2: 1, 3: 0}[zero_stage])
    kept = own + (copies - own) / size
    roomy = replace(platform, memory_bytes=LARGEST_MEMORY_BYTES, weight_copies=kept, machines=None, pipelines=())
    recomputing = None
    if recomputes:
        blocks = tuple((layer, layer + 1) for layer in range(chain.num_layers))
        cost = stage_cost(TimedChain(chain, roomy), StageTable(chain, roomy), (0, chain.num_layers), blocks)
        recomputing = cost.stash, cost.transient
    largest = max(layer.weight_bytes for layer in chain.layers)
    beside = {DDP: 0, 1: 0, 2: 1, 3: 3}[zero_stage] * largest
    return stage_memory(chain, roomy, 0, chain.num_layers, 1, recomputing).total + beside
