"""What a stage of a contiguous allocation keeps on its device, one function per term.

    weight_copies * weights + in_flight * stash + transient + buffers at its two cuts

The replay (``simulate.py``) counts the same bytes from the operations alone and shares nothing with this file.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.plan import MemoryUse
from deepspeed_partition.planner.problem import Chain, Platform

UNLIMITED = 2**40
"""More micro-batches than any schedule has in flight."""


def stage_memory(chain: Chain, platform: Platform, start: int, stop: int, in_flight: int) -> MemoryUse:
    """M(k, l, g) of the paper, section 4.2.1: layers ``start`` to ``stop`` alone on a device."""
    layers = chain.layers[start:stop]
    return MemoryUse(
        weights=platform.weights_bytes(sum(layer.weight_bytes for layer in layers)),
        stash=in_flight * sum(chain.stash(layer) for layer in layers),
        buffers=buffer_slots(platform) * _cut_bytes(chain, start, stop),
        transient=max(layer.transient_bytes for layer in layers),
    )


def buffer_slots(platform: Platform) -> int:
    """Tensors kept at each end of a cut.

    1F1B* has up to two waiting there, an activation and a gradient or two gradients, so fewer buffers save
    nothing that can be counted on; where they do, the replay finds a smaller peak.
    """
    return max(2, platform.comm_buffers)


def _cut_bytes(chain: Chain, start: int, stop: int) -> int:
    before = chain.boundary_bytes(start) if start > 0 else 0
    after = chain.boundary_bytes(stop) if stop < chain.num_layers else 0
    return before + after


class StageTable:
    """For all stages of layers k to l at once: what must be known to fit them into memory."""

    def __init__(self, chain: Chain, platform: Platform) -> None:
        size = chain.num_layers + 1
        weights = _prefix(layer.weight_bytes for layer in chain.layers)
        stash = _prefix(chain.stash(layer) for layer in chain.layers)
        trainable = _prefix(int(bool(layer.num_trainable_parameters)) for layer in chain.layers)
        transient = np.zeros((size, size), dtype=np.int64)
        of_layer = np.array([layer.transient_bytes for layer in chain.layers], dtype=np.int64)
        for start in range(chain.num_layers):
            transient[start, start + 1 :] = np.maximum.accumulate(of_layer[start:])
        slots = buffer_slots(platform)
        inner = [min(slots * chain.boundary_bytes(cut), 2**60) for cut in range(1, chain.num_layers)]
        buffers = np.array([0, *inner, 0], dtype=np.int64)
        copies = Fraction(str(platform.weight_copies))
        total_weights = (weights[None, :] - weights[:, None]).astype(object)
        scaled = -((-total_weights * copies.numerator) // copies.denominator)  # rounded up, exactly
        scaled = np.minimum(np.maximum(scaled, 0), 2**60).astype(np.int64)
        self.buffers: NDArray[np.int64] = buffers[:, None] + buffers[None, :]
        """[k, l]: bytes at both cuts of layers k to l; contained in ``fixed``."""
        self.fixed: NDArray[np.int64] = scaled + self.buffers + transient
        """[k, l]: bytes that layers k to l need however many micro-batches are in flight."""
        self.stash: NDArray[np.int64] = np.maximum(stash[None, :] - stash[:, None], 0)
        """[k, l]: bytes that each micro-batch in flight adds."""
        self.transient: NDArray[np.int64] = transient
        """[k, l]: bytes that layers k to l need only while they run; contained in ``fixed``."""
        self.is_stage: NDArray[np.bool_] = np.triu(np.ones((size, size), dtype=bool), 1)
        self.trains: NDArray[np.bool_] = self.is_stage & (trainable[None, :] > trainable[:, None])
        """[k, l]: some parameter of layers k to l is trained."""
        room = platform.memory_bytes - self.fixed
        in_flight = np.full((size, size), UNLIMITED, dtype=np.int64)
        np.floor_divide(room, self.stash, out=in_flight, where=self.stash > 0)
        self.max_in_flight: NDArray[np.int64] = np.where((room < 0) | ~self.is_stage, 0, in_flight)
        """[k, l]: the most micro-batches that fit; 0 where not one does."""


def _prefix(values: object) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(list(values), dtype=np.int64))])  # type: ignore[call-overload]
