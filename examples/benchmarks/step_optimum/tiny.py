"""Tiny instances of the step: 4 to 6 layers, 2 to 3 devices, 2 to 4 micro-batches, each from its seed.

Times are whole milliseconds, so that steps are compared exactly. A third of the chains is like a transformer
(equal blocks between an embedding and a head), a third like a convolutional network (large activations first,
large weights last), a third has nothing regular. Links are free, fast or slow; memory is plenty, or 1 to 1.8
times the least in which a contiguous step fits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan

SEEDS = range(100)
PLENTY = 10**12
"""Bytes of a device that has room for everything."""
FREE = 1e30
"""Bytes per second of a link over which transfers take no time."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A step to plan."""

    chain: Chain
    platform: Platform
    num_micro_batches: int


def instance(seed: int) -> Instance:
    """Return the instance of a seed."""
    pick = random.Random(seed)
    shape = (_transformer, _convolutional, _irregular)[seed % 3]
    chain = Chain(name=f"tiny-{seed}", input_bytes=pick.choice([1, 4]), layers=shape(pick, pick.randint(4, 6)))
    platform = Platform(
        num_devices=pick.randint(2, 3),
        memory_bytes=PLENTY,
        bandwidth=pick.choice([FREE, 4000.0, 1000.0]),
        latency_seconds=pick.choice([0.0, 0.0, 0.001]),
    )
    num_micro_batches = pick.randint(2, 4)
    share = pick.choice([None, 1.0, 1.1, 1.3, 1.8])
    if share is not None:
        platform = _with_memory(chain, platform, num_micro_batches, share)
    return Instance(chain, platform, num_micro_batches)


def _with_memory(chain: Chain, platform: Platform, num_micro_batches: int, share: float) -> Platform:
    """Return the platform with ``share`` of the least memory in which a contiguous step fits."""
    little = replace(platform, memory_bytes=1)
    try:
        make_plan(chain, little, "contiguous", num_micro_batches=num_micro_batches, recompute="never")
    except InfeasibleError as error:
        assert error.smallest_memory_bytes is not None
        return replace(platform, memory_bytes=int(error.smallest_memory_bytes * share))
    raise AssertionError("a step fits into one byte")


def _transformer(pick: random.Random, size: int) -> tuple[LayerProfile, ...]:
    forward, ratio, stash = pick.randint(2, 5), pick.choice([1, 2, 2, 3]), pick.randint(4, 12)
    block = _layer("block", forward, forward * ratio, weights=pick.randint(2, 8), output=2, stash=stash)
    embedding = _layer("embedding", pick.randint(0, 1), 1, weights=pick.randint(4, 16), output=2, stash=1)
    head = _layer(
        "head", pick.randint(1, 4), pick.randint(1, 6), weights=embedding.weight_bytes, output=0, stash=4
    )
    return (embedding, *[block] * (size - 2), head)


def _convolutional(pick: random.Random, size: int) -> tuple[LayerProfile, ...]:
    layers = []
    for index in range(size):
        forward = pick.randint(1, 8)
        backward, output = pick.choice([forward, 2 * forward]), 2 ** max(0, 4 - index)
        stash = output + pick.randint(0, output)
        layers.append(_layer("convolution", forward, backward, weights=2**index, output=output, stash=stash))
    return tuple(layers)


def _irregular(pick: random.Random, size: int) -> tuple[LayerProfile, ...]:
    return tuple(
        _layer(
            "layer",
            pick.randint(1, 9),
            pick.randint(1, 12),
            weights=pick.randint(0, 9),
            output=pick.randint(0, 6),
            stash=pick.randint(0, 12),
        )
        for _ in range(size)
    )


def _layer(name: str, forward: int, backward: int, *, weights: int, output: int, stash: int) -> LayerProfile:
    """Return a layer whose times are in milliseconds."""
    return LayerProfile(
        name=name,
        forward_seconds=forward / 1000,
        backward_seconds=backward / 1000,
        weight_bytes=weights,
        output_bytes=output,
        stash_bytes=stash,
    )
