"""Random chains, with memory from very tight to plenty."""

from __future__ import annotations

import random

from deepspeed_partition import Chain, LayerProfile, Platform


def random_chain(num_layers: int, seed: int) -> Chain:
    pick = random.Random(seed)
    return Chain(
        input_bytes=10**6,
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                forward_seconds=pick.uniform(0.001, 0.02),
                backward_seconds=pick.uniform(0.002, 0.04),
                weight_bytes=pick.randrange(10**6),
                output_bytes=pick.randrange(10**7),
                stash_bytes=pick.randrange(10**8),
            )
            for index in range(num_layers)
        ),
    )


def random_instance(num_layers: int, num_devices: int, seed: int, share: float) -> tuple[Chain, Platform]:
    """A chain and devices that together have ``share`` of the memory in which the chain is stored once."""
    chain = random_chain(num_layers, seed)
    stored = sum(layer.stash_bytes + 3 * layer.weight_bytes for layer in chain.layers)
    return chain, Platform(num_devices=num_devices, memory_bytes=int(share * stored), bandwidth=1e9)
