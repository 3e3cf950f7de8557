"""What one forward and one backward of a layer do to memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from deepspeed_partition.profiling.boundaries import Boundary, receive, tensors_of
from deepspeed_partition.profiling.live_bytes import LiveBytes, storages_of
from deepspeed_partition.profiling.run import LayerRun, gradients_for


@dataclass(frozen=True, kw_only=True)
class OutputMemory:
    """The storage behind one tensor of a layer's output."""

    from_input: int | None
    """The place in the input of the tensor that it shares its storage with: a view, or made in place."""
    new_storage: int | None
    """Otherwise its number among the storages that the layer made. With neither, it lies in a parameter."""
    storage_bytes: int
    saved: bool
    """Autograd keeps it for the backward of this layer."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """What one forward and one backward of a layer did to memory."""

    inner_stash_bytes: int
    """Kept for the backward, apart from tensors of the input and the output."""
    saved_inputs: tuple[int, ...]
    """Which tensors of the input autograd keeps."""
    outputs: tuple[OutputMemory, ...]
    transient_bytes: int


class _SavedTensor:
    """Stands in the graph for a saved tensor, so that it dies when the graph lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its graph: a node that keeps its own output would keep itself alive.
        self.tensor = tensor.detach()


def measure_memory(run: LayerRun, persistent: Sequence[torch.Tensor]) -> MemoryReading:
    """One more run, watched; ``persistent`` are the parameters and buffers.

    Kept for the backward is what lives while the graph does and is freed with it: what saved-tensor hooks
    see, and what a function of the user hides in its context. What outlives the graph, a table that the
    module caches for example, is not paid per micro-batch.
    """
    arguments, _ = receive(run.boundary)
    keys_before = _keys([*tensors_of(arguments), *persistent])
    saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> _SavedTensor:
        held = _SavedTensor(tensor)
        saved.add(held)
        return held

    with LiveBytes() as live:
        meter = _PeakMeter(run.conditions.device, live)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
            output, roots = run.forward(arguments)
        saved_keys = _keys(held.tensor for held in saved)
        inputs = {key: place for place, tensor in enumerate(tensors_of(arguments)) for key in _keys([tensor])}
        outputs = _output_memory(output, inputs, saved_keys, keys_before)
        # A loss is no tensor of the output, and nobody keeps it unless the graph does.
        elsewhere = keys_before | _keys(tensors_of(output)) | (_keys(roots) - saved_keys)
        inner = _watch([*live.storages(), *_storages(held.tensor for held in saved)], elsewhere)
        if roots:
            run.backward(roots, gradients_for(roots))
        peak_bytes = meter.peak_bytes()
    del output, roots
    inner_stash_bytes = _freed_bytes(inner)
    made = {memory.new_storage: memory.storage_bytes for memory in outputs if memory.new_storage is not None}
    return MemoryReading(
        inner_stash_bytes=inner_stash_bytes,
        saved_inputs=tuple(place for key, place in inputs.items() if key in saved_keys),
        outputs=outputs,
        transient_bytes=max(0, peak_bytes - inner_stash_bytes - sum(made.values())),
    )


def _keys(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The storages of tensors; a storage's Python object lives, and keeps its id, as long as the storage."""
    return {id(storage) for storage in _storages(tensors)}


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (storage for tensor in tensors for storage in storages_of(tensor))


def _output_memory(
    output: Boundary, inputs: dict[int, int], saved_keys: set[int], keys_before: set[int]
) -> tuple[OutputMemory, ...]:
    memories, numbers = [], dict[int, int]()
    for tensor in tensors_of(output):
        storage = storages_of(tensor)[0]
        key = id(storage)
        made = key not in keys_before
        memories.append(
            OutputMemory(
                from_input=inputs.get(key),
                new_storage=numbers.setdefault(key, len(numbers)) if made else None,
                storage_bytes=storage.nbytes(),
                saved=key in saved_keys,
            )
        )
    return tuple(memories)


_Watched: TypeAlias = list[tuple[weakref.ref[torch.UntypedStorage], int]]


def _watch(storages: Iterable[torch.UntypedStorage], elsewhere: set[int]) -> _Watched:
    once = {id(storage): storage for storage in storages}
    return [(weakref.ref(s), s.nbytes()) for key, s in once.items() if key not in elsewhere]


def _freed_bytes(watched: _Watched) -> int:
    """The bytes of the storages that nothing holds any more."""
    return sum(size for reference, size in watched if reference() is None)


class _PeakMeter:
    """The most bytes in use since it was made, beyond those in use then."""

    def __init__(self, device: torch.device, live: LiveBytes) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._live = live
        if self._cuda is not None:  # the allocator sees the work spaces of kernels, too
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._base_bytes = torch.cuda.memory_allocated(self._cuda)
        else:
            live.reset_peak()
            self._base_bytes = live.current_bytes

    def peak_bytes(self) -> int:
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda) - self._base_bytes
        return self._live.peak_bytes - self._base_bytes
