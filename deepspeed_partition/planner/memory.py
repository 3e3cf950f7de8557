"""The memory model: bytes of a stage of a contiguous allocation on its device, one function per term.

    weights + in_flight * stash + transient + buffers at its two boundaries + what the process itself holds

or, where that is more, the weights with what comes after the last backward of a step: gradients are brought
together, the optimizer steps, and no micro-batch is there any more.

While a stage runs, the micro-batch that it runs on has only come to some layer: ahead of it nothing is kept yet,
or nothing any more. The stash counts it in full, so the transient bytes of a stage are what a layer needs beyond
that:

    max over its layers of  running_bytes - (what this layer and those behind it in the stage keep), or 0

Where ``running_bytes`` are not known, they are the largest ``transient_bytes``, on top of the whole stash. Source:
the MadPipe paper, section 4.2.1, has the weights, the stash and the buffers; the rest is an addition, after what
runs of PyTorch really hold.

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

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.allocation import Blocks
from deepspeed_partition.planner.plan import MemoryUse
from deepspeed_partition.planner.problem import Chain, LayerProfile, Platform
from deepspeed_partition.planner.training_bytes import MOST_BYTES, TrainingBytes
from deepspeed_partition.planner.weight_versions import VersionRule

NOTHING = -(2**62)
"""Bytes that are less than any: those of a layer that was not measured."""
UNLIMITED = 2**40
"""Number of micro-batches that stands for no limit: more than any schedule has in flight."""


def stage_memory(
    chain: Chain,
    platform: Platform,
    start: int,
    stop: int,
    in_flight: int,
    recomputing: tuple[int, int] | None = None,
) -> MemoryUse:
    """Return the bytes of layers ``start`` to ``stop`` on a device: M(k, l, g) of the paper, section 4.2.1.

    They are those of a pipeline that drains before each update.

    Args:
        recomputing: stash and transient bytes, where some of the layers are recomputed.
    """
    layers = chain.layers[start:stop]
    at_cut = layers[-1].cut_stash_bytes if stop < chain.num_layers else 0
    kept = [chain.stash(layer) for layer in layers]
    transient = 0
    for index, layer in enumerate(layers):
        ahead = sum(kept[index:]) + at_cut
        needs = layer.transient_bytes if layer.running_bytes is None else layer.running_bytes - ahead
        transient = max(transient, needs)
    stash, transient = recomputing or (sum(kept) + at_cut, transient)
    weights = TrainingBytes(chain, platform)
    training = MemoryUse(
        weights=weights.of([(start, stop)]),
        stash=in_flight * stash,
        buffers=buffer_slots(platform) * _boundary_bytes(chain, start, stop),
        transient=transient,
        fixed=platform.fixed_bytes,
    )
    return larger(training, weights.after_backwards([(start, stop)]))


def larger(training: MemoryUse, after_backwards: int) -> MemoryUse:
    """Return the peak of a device: while it trains, or after the last backward of a step where that is more.

    No activations are left then, and no tensors wait.
    """
    stepping = MemoryUse(
        weights=training.weights,
        stash=0,
        buffers=0,
        transient=after_backwards,
        fixed=training.fixed,
    )
    return stepping if stepping.total > training.total else training


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

    Of long chains these tables are what planning takes most memory for, so two that are equal are one: nobody
    changes a table in place. Arrays have shape (L + 1, L + 1) and are indexed [k, l], unless said otherwise.

    Args:
        versions: how the versions of the weights count, where the pipeline never drains. Updates come while
            micro-batches are in flight then: what they need besides counts as transient, with all of these.
    """

    def __init__(self, chain: Chain, platform: Platform, versions: VersionRule | None = None) -> None:
        size = chain.num_layers + 1
        stash = _prefix(chain.stash(layer) for layer in chain.layers)
        at_cut = np.array([0, *(layer.cut_stash_bytes for layer in chain.layers[:-1]), 0], dtype=np.int64)
        trainable = _prefix(int(bool(layer.num_trainable_parameters)) for layer in chain.layers)
        slots = buffer_slots(platform)
        inner = (slots * chain.boundary_bytes(boundary) for boundary in range(1, chain.num_layers))
        buffers = np.array([0, *(min(size, MOST_BYTES) for size in inner), 0], dtype=np.int64)
        self.versions = versions
        """How the versions of the weights count; None: the pipeline drains before each update."""
        self.training = TrainingBytes(chain, platform, None if versions is None else versions.num_versions)
        """Bytes that training keeps for weights, for any set of stages on one device."""
        self.version_bytes: NDArray[np.int64] | None = None
        """Bytes of each further version of the weights of layers k to l, [k, l], where stages with more in flight
        hold more; None: all hold the same number, which ``training`` counts."""
        if versions is not None and versions.grows:
            self.version_bytes = self.training.versions_of_stages()
        self.weights: NDArray[np.int64] = self.training.of_stages()
        """Bytes that training keeps for the weights of layers k to l, [k, l]; contained in ``fixed``."""
        self._buffers = buffers
        self.stash: NDArray[np.int64] = np.maximum(stash[None, :] - stash[:, None] + at_cut[None, :], 0)
        """Bytes that each micro-batch in flight adds to layers k to l, [k, l]."""
        self._stash_before, self._at_cut = stash, at_cut
        self._unmeasured = np.array([layer.transient_bytes for layer in chain.layers], dtype=np.int64)
        self._running = np.array([
            NOTHING if layer.running_bytes is None else layer.running_bytes for layer in chain.layers
        ], dtype=np.int64)  # fmt: skip
        self._first_backward = first_backward_bytes(chain.layers)
        self.update_bytes: NDArray[np.int64] | None = None
        """Bytes that an update needs besides, which comes while micro-batches are in flight, [k, l]; None: there
        are none then."""
        if versions is not None and self.training.needs_after_backwards:
            self.update_bytes = self.training.after_backwards_of_stages()
        self.transient: NDArray[np.int64] = self.with_update(_transient(chain, stash, at_cut, forward=False))
        """Bytes that layers k to l need only while they run, [k, l]; contained in ``fixed``."""
        self.forward_transient: NDArray[np.int64] = (
            _transient(chain, stash, at_cut, forward=True)
            if any(layer.forward_running_bytes is not None for layer in chain.layers)
            else self.transient
        )
        """Bytes that layers k to l need only while they run forward, in a step, [k, l]."""
        self.fixed_bytes = platform.fixed_bytes
        """Bytes that every device holds, whatever it runs; contained in ``fixed``."""
        self.fixed: NDArray[np.int64] = self.weights + self.buffers + self.transient + self.fixed_bytes
        """Bytes that layers k to l need however many micro-batches are in flight, [k, l]."""
        self.floor: NDArray[np.int64] = (
            self.weights + self.training.after_backwards_of_stages() + self.fixed_bytes
            if self.training.needs_after_backwards or self.fixed_bytes
            else self.weights
        )
        """Bytes that a device with layers k to l needs after the last backward of a step, [k, l]."""
        self.is_stage: NDArray[np.bool_] = np.triu(np.ones((size, size), dtype=bool), 1)
        self.trains: NDArray[np.bool_] = self.is_stage & (trainable[None, :] > trainable[:, None])
        """Booleans, [k, l]: some parameter of layers k to l is trained."""
        self.memory_bytes = platform.memory_bytes
        self.recomputed: Callable[[tuple[int, int]], Blocks] | None = None
        """Layers that are recomputed in each stage, as all numbers here have it; None: none."""
        self.max_in_flight: NDArray[np.int64] = self._room_for(platform.memory_bytes)
        """Most micro-batches in flight that fit for layers k to l, [k, l]; 0 where not one fits."""

    def with_update(self, transient: NDArray[np.int64], stage: Any = slice(None)) -> NDArray[np.int64]:
        """Return the transient bytes of stages that also have updates of the weights, while others are in flight.

        Args:
            transient: bytes of what runs.
            stage: an index, or several, of the arrays; left out, all.
        """
        return transient if self.update_bytes is None else np.maximum(transient, self.update_bytes[stage])

    @property
    def buffers(self) -> NDArray[np.int64]:
        """Bytes of the buffers at both boundaries of layers k to l, [k, l]; contained in ``fixed``."""
        result: NDArray[np.int64] = self._buffers[:, None] + self._buffers[None, :]
        return result

    def with_memory(self, memory_bytes: int) -> StageTable:
        """Return the table for devices with ``memory_bytes``."""
        other = copy(self)
        other.memory_bytes = memory_bytes
        other.max_in_flight = self._room_for(memory_bytes)
        return other

    def needs(self, in_flight: int) -> NDArray[np.int64]:
        """Return the bytes of a device with layers k to l and ``in_flight`` micro-batches in flight, [k, l]."""
        needs = self.fixed + in_flight * self.stash + self.further_versions(in_flight)
        result: NDArray[np.int64] = np.maximum(needs, self.floor)
        return result

    def further_versions(self, in_flight: int, stage: Any = slice(None)) -> NDArray[np.int64]:
        """Return the bytes of the versions of the weights that come with micro-batches in flight.

        Args:
            stage: an index, or several, of the arrays of this table; left out, all.
        """
        if self.version_bytes is None or self.versions is None:
            return np.zeros((), dtype=np.int64)
        result: NDArray[np.int64] = (self.versions.num_held(in_flight) - 1) * self.version_bytes[stage]
        return result

    def first_backward(self, start: int, stop: int, late_gradients: NDArray[np.int64]) -> int:
        """Return the transient bytes of a stage in its first backward of a step, gradients that come included.

        The gradient of a layer comes when its backward runs, and then its stash goes. While it runs, what counts
        of its own gradient is ``first_backward_bytes``, where that is known.

        Args:
            late_gradients: bytes that come with the backward of each of its layers, shape (stop - start,).
        """
        stash = self._stash_before
        behind = stash[stop] + self._at_cut[stop] - stash[start:stop]
        come = np.cumsum(late_gradients[::-1])[::-1]
        own = np.minimum(late_gradients, self._first_backward[start:stop])
        measured = self._running[start:stop] - behind + come - late_gradients + own
        unmeasured = np.where(self._running[start:stop] < 0, self._unmeasured[start:stop] + come[0], 0)
        return int(max(0, measured.max(), unmeasured.max()))

    def with_part_of_versions(self, weights: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return stashes with the part of a version that comes with each of them, and what that is of the weights.

        A stage with g micro-batches in flight, and M per update, holds 1 + (g - 1) / M versions of its weights or
        more: no less than these stashes, and the weights without that part. Shapes (L + 1, L + 1).

        Args:
            weights: bytes for the weights, with one version, [k, l].
        """
        none = np.zeros((), dtype=np.int64)
        if self.version_bytes is None or self.versions is None:
            return self.stash, none
        part = -(-self.version_bytes // self.versions.micro_batches_per_update)
        more = self.version_bytes // self.versions.micro_batches_per_update
        counts = part <= weights  # otherwise ``weight_copies`` have less than one version
        return self.stash + np.where(counts, more, 0), np.where(counts, part, 0)

    def _room_for(self, memory_bytes: int) -> NDArray[np.int64]:
        return self.rooms_for(memory_bytes - self.fixed, self.stash, memory_bytes)

    def rooms_for(
        self, room: NDArray[np.int64], stash: NDArray[np.int64], memory_bytes: int, stage: Any = slice(None)
    ) -> NDArray[np.int64]:
        """Return the most micro-batches in flight that fit; 0 where not one fits.

        Args:
            room: bytes for all of them together, and for versions of the weights beyond those that always count.
            stash: bytes of each of them.
            memory_bytes: bytes of each device.
            stage: an index, or several, of the arrays of this table; left out, all.
        """
        if self.version_bytes is None:
            in_flight = np.full(np.shape(room), UNLIMITED, dtype=np.int64)
            np.floor_divide(room, stash, out=in_flight, where=stash > 0)
        else:
            assert self.versions is not None
            per_update = self.versions.micro_batches_per_update
            in_flight = most_with_versions(room, stash, self.version_bytes[stage], per_update)
        if self.versions is not None and self.versions.most_in_flight is not None:
            in_flight = np.minimum(in_flight, self.versions.most_in_flight)
        no_room = (room < 0) | (self.floor[stage] > memory_bytes) | ~self.is_stage[stage]
        return np.where(no_room, 0, in_flight)


def most_with_versions(
    room: NDArray[np.int64], stash: NDArray[np.int64], version: NDArray[np.int64], per_update: int
) -> NDArray[np.int64]:
    """Return the most micro-batches in flight that fit with the versions of the weights that they use.

    It is the largest g with ``g * stash + ceil((g - 1) / per_update) * version <= room``; 0 where 1 does not fit.

    Args:
        room: bytes beside those of the one version that is always there.
        stash: bytes of each micro-batch in flight.
        version: bytes of each further version.
        per_update: micro-batches of an update.
    """
    beyond = np.maximum(room - stash, 0)
    of_update = version + per_update * stash
    updates = np.full(np.shape(room), UNLIMITED // per_update, dtype=np.int64)
    np.floor_divide(beyond, of_update, out=updates, where=of_update > 0)
    updates = np.minimum(updates, UNLIMITED // per_update)
    rest = np.maximum(beyond - updates * of_update - version, 0)
    more = np.zeros(np.shape(room), dtype=np.int64)
    np.floor_divide(rest, stash, out=more, where=stash > 0)
    more = np.minimum(more, per_update - 1)
    return np.where(room < stash, 0, 1 + updates * per_update + more)


def first_backward_bytes(layers: Sequence[LayerProfile]) -> NDArray[np.int64]:
    """Return how many bytes of its own gradients count while each layer runs its first backward, at most."""
    known = (layer.first_backward_bytes for layer in layers)
    return np.array([MOST_BYTES if each is None else each for each in known], dtype=np.int64)


def _transient(
    chain: Chain, stash: NDArray[np.int64], at_cut: NDArray[np.int64], *, forward: bool
) -> NDArray[np.int64]:
    """Return the transient bytes of layers k to l, [k, l].

    Args:
        stash: of layers 0 to l, indexed [l].
        at_cut: what a cut before layer l adds, indexed [l].
    """
    size = chain.num_layers + 1
    transient = np.zeros((size, size), dtype=np.int64)
    unmeasured = np.array([
        layer.transient_bytes if layer.running_bytes is None else 0 for layer in chain.layers
    ], dtype=np.int64)  # fmt: skip
    measured = np.array([
        NOTHING if running is None else running + int(stash[index])
        for index, layer in enumerate(chain.layers)
        for running in [_running(layer, forward=forward)]
    ], dtype=np.int64)  # fmt: skip
    for start in range(chain.num_layers):
        # Bytes up to and with a layer, beyond those before layer 0, less the whole stash: what lies behind it.
        beyond = np.maximum.accumulate(measured[start:]) - (stash + at_cut)[start + 1 :]
        transient[start, start + 1 :] = np.maximum(np.maximum.accumulate(unmeasured[start:]), beyond)
    return transient


def _running(layer: LayerProfile, *, forward: bool) -> int | None:
    return (
        layer.running_bytes if not forward or layer.forward_running_bytes is None else layer.forward_running_bytes
    )


def _prefix(values: object) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(list(values), dtype=np.int64))])  # type: ignore[call-overload]
