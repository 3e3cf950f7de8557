"""Memory of one forward and one backward of a layer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from deepspeed_partition.profiling.allocated import Allocated, allocated_on
from deepspeed_partition.profiling.boundaries import Boundary, bytes_of, receive, tensors_of
from deepspeed_partition.profiling.isolation import gradients_kept
from deepspeed_partition.profiling.live_bytes import LiveBytes, storages_of
from deepspeed_partition.profiling.run import LayerRun, gradients_for


@dataclass(frozen=True, kw_only=True)
class OutputMemory:
    """Storage behind one tensor of a layer's output."""

    from_input: int | None
    """Index of the input tensor that it shares its storage with, as a view or made in place; None: it shares
    none."""
    new_storage: int | None
    """Number of its storage among those that the layer made. With neither index, it lies in a parameter."""
    storage_bytes: int
    saved: bool
    """True: autograd keeps it for the backward of this layer."""


@dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Reading of what one forward and one backward of a layer did to memory."""

    inner_stash_bytes: int
    """Bytes kept for the backward, apart from tensors of the input and the output."""
    saved_inputs: tuple[int, ...]
    """Indices of the input tensors that autograd keeps."""
    outputs: tuple[OutputMemory, ...]
    transient_bytes: int
    forward_bytes: int
    """Most bytes of its own in use in the forward, the output with them; the input is not its own."""
    backward_bytes: int
    """Most bytes of its own in use in the backward, the gradient of its output with them, tensors of its input and
    output without; 0 where there was none."""
    first_backward_bytes: int | None = None
    """Most bytes of its own in use in a first backward, which makes the gradients of weights, too; counted as
    ``backward_bytes``. None: not looked at."""
    has_loss: bool = False
    """True: a loss of its output was observed with it."""
    changes_input: bool = False
    """True: it works in place on a tensor of its input, from which it could not run again."""


class _SavedTensor:
    """Object in the graph in the place of a saved tensor; it dies when the graph lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its graph: a node that keeps its own output would keep itself alive.
        self.tensor = tensor.detach()


class LayerMemory:
    """Observer of one forward of a layer, then of its backward, alone or in the middle of others.

    Kept for the backward is what this forward has made and autograd saves, as saved-tensor hooks see it, and what
    is freed with the graph: what a function of the user hides in its context. What outlives the graph and is not
    saved is not paid per micro-batch, nor is a table that the module has cached before. What is saved counts where
    an attribute holds it, too: the next micro-batch takes that place, and the graph keeps it.

    Args:
        allocated: what the device's allocator gives out; None: tensors are counted, without work spaces.
        inputs: the input that the layer is called with.
        persistent: the storages of parameters and buffers, as ``keys_of`` names them.
        hooks: whether to look at what autograd saves; False: all of input and output counts as saved.
    """

    def __init__(
        self, allocated: Allocated | None, inputs: Boundary, persistent: AbstractSet[int], *, hooks: bool = True
    ) -> None:
        self._allocated, self._hooks = allocated, hooks
        self._inputs = {key: place for place, tensor in enumerate(tensors_of(inputs)) for key in keys_of([tensor])}
        self._versions = [
            (weakref.ref(tensor), tensor._version) for tensor in tensors_of(inputs) if not tensor.is_inference()
        ]
        self._changes_input = self._has_loss = False
        self._keys_before = persistent | set(self._inputs)
        self.live = LiveBytes()
        """Counter of what the layer has made; it is entered, or notes calls, while the backward runs."""
        self._saved: weakref.WeakSet[_SavedTensor] = weakref.WeakSet()
        self._inner: _Watched = []
        """Storages that this forward has made, but for its output, and those of them that autograd saves."""
        self._inner_saved: _Watched = []
        self._saved_inputs: tuple[int, ...] = ()
        self._outputs: tuple[OutputMemory, ...] = ()
        self._forward_peak_bytes = self._backward_peak_bytes = self._incoming_bytes = self._made_bytes = 0
        self._meter: _PeakMeter | None = None
        self._around = _watch(_storages(tensors_of(inputs)))
        self._held: list[torch.UntypedStorage | None] = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Observe the forward, or one part of it after the other, within the context."""
        meter = _PeakMeter(self._allocated, self.live)

        def pack(tensor: torch.Tensor) -> _SavedTensor:
            held = _SavedTensor(tensor)
            self._saved.add(held)
            return held

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor)
        with self.live, hooks if self._hooks else nullcontext():
            yield
        self._forward_peak_bytes = max(self._forward_peak_bytes, meter.peak_bytes())

    def forward_has_ended(self, output: Boundary, roots: Sequence[torch.Tensor]) -> None:
        """Note the output; ``roots`` are what the backward starts from: the output's tensors, or a loss."""
        self._changes_input = any(
            tensor is not None and tensor._version != version
            for tensor, version in ((reference(), version) for reference, version in self._versions)
        )
        saved_keys = keys_of(held.tensor for held in self._saved)
        if not self._hooks:
            saved_keys = {*self._inputs, *keys_of(tensors_of(output))}
        self._saved_inputs = tuple(place for key, place in self._inputs.items() if key in saved_keys)
        self._outputs = _output_memory(output, self._inputs, saved_keys, self._keys_before)
        made = {each.new_storage: each.storage_bytes for each in self._outputs if each.new_storage is not None}
        self._made_bytes = sum(made.values())
        self._has_loss = bool(keys_of(roots) - keys_of(tensors_of(output)))
        # From here on the next layer uses the output.
        self.live.leave_out(tensors_of(output))
        self._around += _watch(_storages(tensors_of(output)))
        # Labels, for one, which only the graph may keep.
        own = {id(storage) for storage in self.live.storages()}
        saved = _storages(held.tensor for held in self._saved)
        self._around += _watch(storage for storage in saved if id(storage) not in own)
        # A loss is no tensor of the output, and nobody keeps it unless the graph does.
        loss_keys = keys_of(roots) - saved_keys
        inner = [storage for storage in self.live.storages() if id(storage) not in loss_keys]
        self._inner = _watch(storage for storage in inner if id(storage) not in saved_keys)
        self._inner_saved = _watch(storage for storage in inner if id(storage) in saved_keys)

    def backward_comes(self) -> None:
        """Forget what has been freed by now: it was not kept for the backward."""
        self._inner = [each for each in self._inner if each[0]() is not None]
        self._inner_saved = [each for each in self._inner_saved if each[0]() is not None]

    def backward_goes_on(self, gradients: Sequence[torch.Tensor] = ()) -> None:
        """Observe the backward until ``backward_pauses``; the caller holds ``gradients`` meanwhile.

        They count as long as the layer runs: those of the output, which have the output's size.
        """
        self._incoming_bytes += sum(map(bytes_of, gradients))
        if self._allocated is not None:  # it would count their release against the layer
            self._held = [reference() for reference, _ in self._around]
        self._meter = _PeakMeter(self._allocated, self.live)

    def backward_pauses(self) -> None:
        if self._meter is not None:
            peak_bytes = self._meter.peak_bytes() + self._incoming_bytes
            self._backward_peak_bytes = max(self._backward_peak_bytes, peak_bytes)
            self._meter = None
            self._held.clear()

    def reading(self) -> MemoryReading:
        """Return the reading, once graph and output are gone."""
        inner_stash_bytes = sum(size for reference, size in self._inner if reference() is None)
        inner_stash_bytes += sum(size for _, size in self._inner_saved)
        most_bytes = max(self._forward_peak_bytes - self._made_bytes, self._backward_peak_bytes)
        return MemoryReading(
            inner_stash_bytes=inner_stash_bytes,
            saved_inputs=self._saved_inputs,
            outputs=self._outputs,
            transient_bytes=max(0, most_bytes - inner_stash_bytes),
            forward_bytes=self._forward_peak_bytes,
            backward_bytes=self._backward_peak_bytes,
            has_loss=self._has_loss,
            changes_input=self._changes_input,
        )


def measure_memory(run: LayerRun, persistent: Sequence[torch.Tensor]) -> MemoryReading:
    """Observe one more run, and one whose gradients are the first; ``persistent`` are the parameters and buffers.

    Some layers do not run where hooks look at what is saved (``torch.func``; a function that wants the very
    weight that it saved). Such a layer is taken to keep its input and its output.
    """
    try:
        return _measure_any_layout(run, persistent, hooks=True)
    except (torch.cuda.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # an error that has another cause is raised again
        return _measure_any_layout(run, persistent, hooks=False)


def _measure_any_layout(run: LayerRun, persistent: Sequence[torch.Tensor], *, hooks: bool) -> MemoryReading:
    """Observe a run with gradients in memory as outputs are, and contiguous, as what another rank sends is.

    Where an output is not contiguous, one of the two may have to be copied: the one that needs more counts.
    """

    def most(*, first: bool) -> MemoryReading:
        with gradients_kept([tensor for tensor in persistent if tensor.requires_grad]) if first else nullcontext():
            found, is_contiguous = _measure_memory(run, persistent, hooks=hooks, contiguous=False)
        if is_contiguous:
            return found
        with gradients_kept([tensor for tensor in persistent if tensor.requires_grad]) if first else nullcontext():
            sent, _ = _measure_memory(run, persistent, hooks=hooks, contiguous=True)
        return max(found, sent, key=lambda reading: reading.backward_bytes)

    return replace(most(first=False), first_backward_bytes=most(first=True).backward_bytes)


def _measure_memory(
    run: LayerRun, persistent: Sequence[torch.Tensor], *, hooks: bool, contiguous: bool
) -> tuple[MemoryReading, bool]:
    """Return the reading, and whether all that the backward begins with is contiguous."""
    with allocated_on(run.conditions.device) as allocated:
        arguments, _ = receive(run.boundary)
        memory = LayerMemory(allocated, arguments, keys_of(persistent), hooks=hooks)
        with memory.forward():
            output, roots = run.forward(arguments)
        memory.forward_has_ended(output, roots)
        is_contiguous = all(root.is_contiguous() for root in roots)
        if roots:
            gradients = gradients_for(roots, contiguous=contiguous)
            memory.backward_goes_on(gradients)
            with memory.live:
                run.backward(roots, gradients)
            memory.backward_pauses()
        del output, roots
        return memory.reading(), is_contiguous


def keys_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the storages of tensors: ids of Python objects that live as long as the storages."""
    return {id(storage) for storage in _storages(tensors)}


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (storage for tensor in tensors for storage in storages_of(tensor))


def _output_memory(
    output: Boundary, inputs: dict[int, int], saved_keys: AbstractSet[int], keys_before: AbstractSet[int]
) -> tuple[OutputMemory, ...]:
    memories, numbers = [], dict[int, int]()
    for tensor in tensors_of(output):
        storage = next(iter(storages_of(tensor)), None)
        if storage is None:  # tensors of a sparse layout are not counted
            memories.append(OutputMemory(from_input=None, new_storage=None, storage_bytes=0, saved=False))
            continue
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


def _watch(storages: Iterable[torch.UntypedStorage]) -> _Watched:
    return [(weakref.ref(storage), storage.nbytes()) for storage in storages]


class _PeakMeter:
    """Meter of the most bytes of ``live`` since it was made, by the allocator with work spaces of kernels."""

    def __init__(self, allocated: Allocated | None, live: LiveBytes) -> None:
        self._allocated, self._live = allocated, live
        self._other_bytes = 0
        if allocated is not None:  # bookkeeping on the host: nothing waits for the device
            allocated.reset_peak()
            self._other_bytes = allocated.current_bytes() - live.current_bytes
        else:
            live.reset_peak()

    def peak_bytes(self) -> int:
        if self._allocated is not None:
            return self._allocated.peak_bytes() - self._other_bytes
        return self._live.peak_bytes
