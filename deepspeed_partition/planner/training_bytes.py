"""Bytes that training keeps for the weights of the layers on a device, and what the end of a step needs besides.

A layer's weights take ``training_bytes`` where a run has said so, else ``Platform.weight_copies`` times their own,
rounded up once per device. What several layers of a device share (``shared_weights``: a tied embedding) is kept
there once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_partition.planner.problem import LARGEST_MEMORY_BYTES, Chain, LayerProfile, Platform

MOST_BYTES = LARGEST_MEMORY_BYTES + 1
"""Largest number in a table, in bytes: more than any device has; sums of a few are still 64-bit numbers."""


def version_bytes(layer: LayerProfile) -> int:
    """Return the bytes of one more version of a layer's weights; none of a layer that is known to train none."""
    is_frozen = layer.training_bytes is not None and layer.num_trainable_parameters == 0
    return 0 if is_frozen else layer.weight_bytes


class TrainingBytes:
    """Bytes for weights, of any set of stages on one device, or of all stages at once.

    Args:
        num_versions: versions of the weights that a stage holds where the pipeline never drains. Two are among
            ``weight_copies`` then, and ``training_bytes`` have one. None: the pipeline drains.
    """

    def __init__(self, chain: Chain, platform: Platform, num_versions: int | None = None) -> None:
        self._copies = Fraction(str(platform.weight_copies))
        more = 0
        if num_versions is not None:
            self._copies += num_versions - 2
            more = num_versions - 1
        self._sums_up = platform.optimizer_step == "sum"
        layers = chain.layers
        self._weights = _prefix(layer.weight_bytes if layer.training_bytes is None else 0 for layer in layers)
        """Bytes of the weights that are multiplied, of layers 0 to l; shape (L + 1,), indexed [l]."""
        self._as_they_are = _prefix(
            0 if layer.training_bytes is None else layer.training_bytes + more * version_bytes(layer)
            for layer in layers
        )
        self._versions = _prefix(map(version_bytes, layers))
        self._optimizer = np.array([layer.optimizer_transient_bytes for layer in layers], dtype=np.int64)
        self._reduction = np.array([layer.reduction_bytes for layer in layers], dtype=np.int64)
        self._layers = layers
        self.has_gradients = any(layer.gradient_bytes for layer in layers)
        """Whether it is known which part of what training keeps are gradients."""
        self._shares: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """Layers that share weights, by name, in order: number, weights to multiply, and bytes as they are."""
        for index, layer in enumerate(layers):
            for key, size in layer.shared_weights:
                if layer.training_bytes is None:
                    self._shares[key].append((index, size, 0))
                else:
                    kept = layer.training_bytes * size // max(1, layer.weight_bytes)
                    kept += more * size if version_bytes(layer) else 0
                    self._shares[key].append((index, 0, kept))

    @property
    def shares(self) -> bool:
        """Whether several layers share weights, so that it matters which of them are on one device."""
        return any(len(places) > 1 for places in self._shares.values())

    def of(self, stages: Iterable[tuple[int, int]]) -> int:
        """Return the bytes that a device keeps for the weights of its stages, given as layers (half-open)."""
        stages = list(stages)
        weights = sum(int(self._weights[stop] - self._weights[start]) for start, stop in stages)
        as_they_are = sum(int(self._as_they_are[stop] - self._as_they_are[start]) for start, stop in stages)
        for places in self._shares.values():
            here = [place for place in places if any(start <= place[0] < stop for start, stop in stages)]
            weights -= sum(size for _, size, _ in here[1:])
            as_they_are -= sum(kept for _, _, kept in here[1:])
        return self._multiplied(weights) + as_they_are

    def versions(self, stages: Sequence[tuple[int, int]]) -> list[int]:
        """Return the bytes of one more version of the weights of each stage of a device.

        What several layers of the device share is with the first of them.
        """
        seen = set[str]()
        found = []
        for start, stop in stages:
            num_bytes = int(self._versions[stop] - self._versions[start])
            for layer in self._layers[start:stop]:
                num_bytes -= sum(
                    size for name, size in layer.shared_weights if name in seen and version_bytes(layer)
                )
                seen.update(name for name, _ in layer.shared_weights)
            found.append(num_bytes)
        return found

    def versions_of_stages(self) -> NDArray[np.int64]:
        """Return the bytes of one more version of the weights of layers k to l as one stage, [k, l]."""
        versions = self._versions[None, :] - self._versions[:, None]
        for name, places in self._shares.items():
            for (before, *_), (index, *_) in pairwise(places):
                layer = self._layers[index]
                if version_bytes(layer):
                    versions[: before + 1, index + 1 :] -= dict(layer.shared_weights)[name]
        result: NDArray[np.int64] = np.clip(versions, 0, MOST_BYTES)
        return result

    def gradients(self, stages: Sequence[tuple[int, int]]) -> list[int]:
        """Return the bytes of the gradients of each stage: those of layers that share weights on each of them."""
        return [
            sum(
                layer.weight_bytes if layer.training_bytes is None else layer.gradient_bytes
                for layer in self._layers[start:stop]
            )
            for start, stop in stages
        ]

    def late_gradients(self, stages: Sequence[tuple[int, int]]) -> list[NDArray[np.int64]]:
        """Return the bytes that come with the first backward of a step, for each layer of each stage of a device.

        Gradients of weights that several layers of the device share do not count: they come with the first of
        their backwards.
        """
        here = [index for start, stop in stages for index in range(start, stop)]
        names = Counter(name for index in here for name, _ in self._layers[index].shared_weights)

        def late(layer: LayerProfile) -> int:
            own = layer.weight_bytes - sum(size for name, size in layer.shared_weights if names[name] > 1)
            return layer.gradient_bytes * own // layer.weight_bytes if layer.weight_bytes else 0

        layers = (self._layers[start:stop] for start, stop in stages)
        return [np.array(list(map(late, each)), dtype=np.int64) for each in layers]

    def after_backwards(self, stages: Iterable[tuple[int, int]]) -> int:
        """Return the bytes needed besides, after the last backward of a step, on a device with these stages.

        They are the larger of what brings the gradients together and of what the optimizer's step needs.
        """
        stages = list(stages)
        steps = [int(size) for start, stop in stages for size in self._optimizer[start:stop]]
        reduction = sum(int(self._reduction[start:stop].sum()) for start, stop in stages)
        return max(reduction, sum(steps) if self._sums_up else max(steps, default=0))

    def of_stages(self) -> NDArray[np.int64]:
        """Return the bytes of layers k to l as one stage, shape (L + 1, L + 1), indexed [k, l]."""
        weights, as_they_are = (each[None, :] - each[:, None] for each in (self._weights, self._as_they_are))
        for places in self._shares.values():
            for (before, *_), (index, size, kept) in pairwise(places):
                # A stage that begins at the layer before, or above it, and ends behind this one has both.
                weights[: before + 1, index + 1 :] -= size
                as_they_are[: before + 1, index + 1 :] -= kept
        result: NDArray[np.int64] = np.clip(_times(weights, self._copies) + as_they_are, 0, MOST_BYTES)
        return result

    def in_parts_of_a_byte(self, unit: int) -> NDArray[np.int64]:
        """Return the bytes of each stage times ``unit``, not rounded up, at most twice ``MOST_BYTES``; [k, l].

        Weights that layers share count on each of them, also within a stage.
        """
        weights = self._weights
        factor = self._copies.numerator * unit
        if int(weights[-1]) * factor >= 2**62:  # Python's integers, which take much longer
            weights = weights.astype(object)
        scaled = (weights[None, :] - weights[:, None]) * factor // self._copies.denominator
        as_they_are = self._as_they_are[None, :] - self._as_they_are[:, None]
        if int(self._as_they_are[-1]) * unit >= 2**61:
            as_they_are = as_they_are.astype(object)
        as_they_are = as_they_are * unit
        result: NDArray[np.int64] = np.clip(scaled + as_they_are, 0, 2 * MOST_BYTES).astype(np.int64)
        return result

    @property
    def needs_after_backwards(self) -> bool:
        """Return whether some layer needs bytes after the last backward of a step."""
        return bool(self._optimizer.any() or self._reduction.any())

    def after_backwards_of_stages(self) -> NDArray[np.int64]:
        """Return ``after_backwards`` of layers k to l as one stage, [k, l]."""
        size = len(self._optimizer) + 1
        needs = np.zeros((size, size), dtype=np.int64)
        for start in range(size - 1):
            together = np.cumsum if self._sums_up else np.maximum.accumulate
            steps = together(self._optimizer[start:])
            needs[start, start + 1 :] = np.maximum(steps, np.cumsum(self._reduction[start:]))
        return needs

    def _multiplied(self, weights: int) -> int:
        scaled = weights * self._copies
        return -(-scaled.numerator // scaled.denominator)


def _times(num_bytes: NDArray[np.int64], copies: Fraction) -> NDArray[np.int64]:
    """Multiply bytes (0 to 2**60) by ``copies``, exactly, and round up."""
    least, most = int(num_bytes.min()), int(num_bytes.max())
    # Python's integers where the product may need more than 64 bits; they take twenty times as long.
    fits = max(most, -least) * copies.numerator < 2**62 and copies.denominator < 2**62
    exact = num_bytes if fits else num_bytes.astype(object)
    scaled = -((-exact * copies.numerator) // copies.denominator)
    result: NDArray[np.int64] = np.minimum(np.maximum(scaled, 0), MOST_BYTES).astype(np.int64)
    return result


def _prefix(values: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.array(list(values), dtype=np.int64))])
