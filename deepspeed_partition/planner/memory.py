"""The memory model: bytes of a stage of a contiguous allocation on its device, one function per term.

    weight_copies * weights + in_flight * stash + transient + buffers at its two boundaries

These are the instants that count, here and wherever the bytes of a plan are counted. Something that lasts from a
to b is there at the instants t with a <= t < b: what ends at an instant is gone when anything begins there. An
operation that takes no time, a = b, is there at the instant a. So "while the layer runs" and "from the start of
its forward to the end of its backward" include a single instant: the transient bytes of a stage that takes no
time count then, and so does its micro-batch where its forward and its backward fall on one instant. All that is
there at an instant counts together: the sum of the stashes, the largest of the transients. A tensor that waits
from a to a has not waited, and does not count beyond the buffers that are reserved for it.

The replay (``replay.py``) counts the same bytes from the operations alone and shares nothing with this file.
"""

from __future__ import annotations

from copy import copy
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.plan import MemoryUse
from deepspeed_partition.planner.problem import Chain, Platform

UNLIMITED = 2**40
"""Number of micro-batches that stands for no limit: more than any schedule has in flight."""


def stage_memory(chain: Chain, platform: Platform, start: int, stop: int, in_flight: int) -> MemoryUse:
    """Return the bytes of layers ``start`` to ``stop`` on a device: M(k, l, g) of the paper, section 4.2.1."""
    layers = chain.layers[start:stop]
    return MemoryUse(
        weights=platform.weights_bytes(sum(layer.weight_bytes for layer in layers)),
        stash=in_flight * sum(chain.stash(layer) for layer in layers),
        buffers=buffer_slots(platform) * _boundary_bytes(chain, start, stop),
        transient=max(layer.transient_bytes for layer in layers),
    )


def buffer_slots(platform: Platform) -> int:
    """Return the number of tensors for which buffers count at each end of a boundary.

    Under 1F1B* up to two tensors wait there: an activation and a gradient, or two gradients. So fewer buffers
    save nothing that can be counted on; where they do, the replay finds a smaller peak.
    """
    return max(2, platform.comm_buffers)


def reserves_all_slots(platform: Platform) -> bool:
    """Return whether the platform reserves all buffers that count here; otherwise less memory may do."""
    return platform.comm_buffers >= buffer_slots(platform)


def _boundary_bytes(chain: Chain, start: int, stop: int) -> int:
    before = chain.boundary_bytes(start) if start > 0 else 0
    after = chain.boundary_bytes(stop) if stop < chain.num_layers else 0
    return before + after


class StageTable:
    """Bytes of all stages, layers k to l, at once, to fit them into memory.

    Arrays have shape (L + 1, L + 1) and are indexed [k, l], unless said otherwise.
    """

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
        inner = [min(slots * chain.boundary_bytes(boundary), 2**60) for boundary in range(1, chain.num_layers)]
        buffers = np.array([0, *inner, 0], dtype=np.int64)
        scaled = _times(weights[None, :] - weights[:, None], Fraction(str(platform.weight_copies)))
        self.weights: NDArray[np.int64] = weights
        """Bytes of the parameters of layers 0 to l, once; shape (L + 1,), indexed [l]."""
        self.buffers: NDArray[np.int64] = buffers[:, None] + buffers[None, :]
        """Bytes of the buffers at both boundaries of layers k to l, [k, l]; contained in ``fixed``."""
        self.fixed: NDArray[np.int64] = scaled + self.buffers + transient
        """Bytes that layers k to l need however many micro-batches are in flight, [k, l]."""
        self.stash: NDArray[np.int64] = np.maximum(stash[None, :] - stash[:, None], 0)
        """Bytes that each micro-batch in flight adds to layers k to l, [k, l]."""
        self.transient: NDArray[np.int64] = transient
        """Bytes that layers k to l need only while they run, [k, l]; contained in ``fixed``."""
        self.is_stage: NDArray[np.bool_] = np.triu(np.ones((size, size), dtype=bool), 1)
        self.trains: NDArray[np.bool_] = self.is_stage & (trainable[None, :] > trainable[:, None])
        """Booleans, [k, l]: some parameter of layers k to l is trained."""
        self.max_in_flight: NDArray[np.int64] = self._room_for(platform.memory_bytes)
        """Most micro-batches in flight that fit for layers k to l, [k, l]; 0 where not one fits."""

    def with_memory(self, memory_bytes: int) -> StageTable:
        """Return the table for devices with ``memory_bytes``."""
        other = copy(self)
        other.max_in_flight = self._room_for(memory_bytes)
        return other

    def _room_for(self, memory_bytes: int) -> NDArray[np.int64]:
        room = memory_bytes - self.fixed
        in_flight = np.full(room.shape, UNLIMITED, dtype=np.int64)
        np.floor_divide(room, self.stash, out=in_flight, where=self.stash > 0)
        in_flight[(room < 0) | ~self.is_stage] = 0
        return in_flight


def _times(num_bytes: NDArray[np.int64], copies: Fraction) -> NDArray[np.int64]:
    """Multiply bytes (0 to 2**60) by ``copies``, exactly, and round up."""
    least, most = int(num_bytes.min()), int(num_bytes.max())
    # Python's integers where the product may need more than 64 bits; they take twenty times as long.
    fits = max(most, -least) * copies.numerator < 2**62 and copies.denominator < 2**62
    exact = num_bytes if fits else num_bytes.astype(object)
    scaled = -((-exact * copies.numerator) // copies.denominator)
    result: NDArray[np.int64] = np.minimum(np.maximum(scaled, 0), 2**60).astype(np.int64)
    return result


def _prefix(values: object) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(list(values), dtype=np.int64))])  # type: ignore[call-overload]
