"""Chain of layers that were measured one by one: who pays for a tensor that several of them keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_partition.planner.problem import LayerProfile
from deepspeed_partition.profiling.measure import MeasuredLayer


def layer_profiles(measured: Sequence[MeasuredLayer]) -> list[LayerProfile]:
    """Return the costs of consecutive layers, in seconds and bytes.

    A tensor that several layers keep is charged to the last of them (``stash_bytes``); the source of that rule is
    the MadPipe paper, section 3, where each layer keeps its input. Where the chain is cut between them, the one
    before the cut keeps it, too (``cut_stash_bytes``).
    """
    kept = _Kept.by(measured)
    stashes = kept.stash_bytes([layer.memory.inner_stash_bytes for layer in measured])
    profiles = []
    for index, (layer, stash) in enumerate(zip(measured, stashes, strict=True)):
        forward = kept.in_forward(index) + layer.memory.forward_bytes
        backward = kept.in_backward(index) + layer.memory.backward_bytes
        profiles.append(
            LayerProfile(
                name=layer.name,
                forward_seconds=layer.forward.median_seconds,
                backward_seconds=layer.backward.median_seconds,
                weight_bytes=layer.weight_bytes,
                output_bytes=layer.output_bytes,
                stash_bytes=stash,
                transient_bytes=layer.memory.transient_bytes,
                cut_stash_bytes=kept.at_cut(index) if layer is not measured[-1] else 0,
                running_bytes=max(forward, backward, stash),
                forward_running_bytes=forward,
                # What a loss keeps stays: it is not run again with the layer.
                recomputable=not layer.memory.changes_input and not layer.memory.has_loss,
                type=layer.type,
                num_trainable_parameters=layer.num_trainable_parameters,
                forward_spread_seconds=layer.forward.interquartile_seconds,
                backward_spread_seconds=layer.backward.interquartile_seconds,
                **_halves(layer),
            )
        )
    return profiles


def _halves(layer: MeasuredLayer) -> dict[str, Any]:
    """Return what is known of the halves of a layer's backward, which last as long as the whole."""
    if layer.halves is None:
        return {}
    whole = layer.backward.median_seconds
    first = whole * layer.halves.input_share
    return {
        "backward_input_seconds": first, "backward_weight_seconds": whole - first,
        "weight_stash_bytes": layer.halves.weight_stash_bytes,
    }  # fmt: skip


def stash_bytes(measured: Sequence[MeasuredLayer]) -> list[int]:
    """Return the stash bytes of consecutive layers; their sum is what all of them together keep alive.

    A tensor between two layers may be kept by both: a ReLU keeps its output, the linear layer after it its
    input, and these are the same bytes. They count once, in the last layer that keeps them; for an input
    that a layer keeps that is the layer itself, as in the MadPipe paper.
    """
    return _Kept.by(measured).stash_bytes([layer.memory.inner_stash_bytes for layer in measured])


_Storage = tuple[int, int]
"""Name of a storage between layers: the layer that made it and a number; -1 made the input of the first one."""


@dataclass
class _Kept:
    """Storages between consecutive layers, and which of the layers keep them for their backwards."""

    boundaries: list[list[_Storage]] = field(default_factory=list)
    """Storages of the tensors before each layer, and behind the last one."""
    num_bytes: dict[_Storage, int] = field(default_factory=dict)
    first_keeper: dict[_Storage, int] = field(default_factory=dict)
    last_keeper: dict[_Storage, int] = field(default_factory=dict)

    @classmethod
    def by(cls, measured: Sequence[MeasuredLayer]) -> _Kept:
        kept = cls()
        sizes = measured[0].input_tensor_bytes if measured else ()
        kept.num_bytes.update({(-1, place): size for place, size in enumerate(sizes)})
        kept.boundaries.append(list(kept.num_bytes))
        for index, layer in enumerate(measured):
            kept._add(index, layer)
        return kept

    def _add(self, index: int, layer: MeasuredLayer) -> None:
        before = self.boundaries[-1]
        for place in layer.memory.saved_inputs:
            self._keep(before[place], index)
        following = []
        for output in layer.memory.outputs:
            if output.from_input is not None:
                name = before[output.from_input]
            elif output.new_storage is not None:
                name = (index, output.new_storage)
                self.num_bytes[name] = output.storage_bytes
            else:  # part of a parameter or buffer, which the weights count
                name = (index, -1)
                self.num_bytes[name] = 0
            if output.saved:
                self._keep(name, index)
            following.append(name)
        self.boundaries.append(following)

    def _keep(self, name: _Storage, layer: int) -> None:
        self.first_keeper.setdefault(name, layer)
        self.last_keeper[name] = layer

    def stash_bytes(self, inner: Sequence[int]) -> list[int]:
        """Return the stash of each layer: ``inner`` and the storages whose last keeper it is."""
        stashes = list(inner)
        for name, index in self.last_keeper.items():
            stashes[index] += self.num_bytes[name]
        return stashes

    def at_cut(self, layer: int) -> int:
        """Return the bytes behind a layer that it or one before it keeps, and one behind it, which is charged."""
        return self._sum(
            name for name in self.boundaries[layer + 1] if self._is_kept_until(name, layer, after=layer + 1)
        )

    def in_forward(self, layer: int) -> int:
        """Return the bytes of a layer's input that are not charged to the layers before it."""
        return self._sum(name for name in self.boundaries[layer] if self.last_keeper.get(name, layer) >= layer)

    def in_backward(self, layer: int) -> int:
        """Return the bytes at a layer's ends that are kept when its backward runs, and not charged before it."""
        ends = self.boundaries[layer] + self.boundaries[layer + 1]
        return self._sum(name for name in ends if self._is_kept_until(name, layer, after=layer))

    def _is_kept_until(self, name: _Storage, layer: int, *, after: int) -> bool:
        return name in self.first_keeper and self.first_keeper[name] <= layer and self.last_keeper[name] >= after

    def _sum(self, names: Iterable[_Storage]) -> int:
        return sum(self.num_bytes[name] for name in set(names))
