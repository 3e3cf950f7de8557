"""Counter of the bytes of live tensors, which torch does not have on the CPU."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_partition.tensor_values import parts_of

_LOCK = threading.RLock()
"""Lock for all counters: other threads free tensors, and a thread that counts one may free one that another
counter knows."""


class _OperatorWatch(TorchDispatchMode):
    """Mode that notes every call of an operator, after it was made."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        raise NotImplementedError


class LiveBytes(_OperatorWatch):
    """Counter of the bytes of storages that operators create inside the context, until they are freed.

    It works around a whole training step, backward included. What exists already counts only where it is
    named in ``include``: parameters, optimizer state, a batch. Frees are still seen after the context has
    ended, new tensors are not. What a kernel allocates for itself and frees before it returns is invisible
    here; on CUDA ``torch.cuda.max_memory_allocated`` sees it, and is the better counter.

    Args:
        include: tensors that exist already and count, too.
    """

    def __init__(self, include: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._current_bytes = 0
        self._peak_bytes = 0
        self.include(include)

    @property
    def current_bytes(self) -> int:
        """Bytes of the counted storages that are alive now."""
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once, since the beginning or the last ``reset_peak``."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are alive now."""
        self._peak_bytes = self._current_bytes

    def include(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that the counter did not see being made."""
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._count(storage)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> int:
        """Stop counting tensors that are still alive, and return their bytes."""
        with _LOCK:
            keys = {id(storage) for tensor in tensors for storage in storages_of(tensor)}
            num_bytes = sum(self._live.pop(key)[1] for key in keys if key in self._live)
            self._current_bytes -= num_bytes
        return num_bytes

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that are alive now. Holding the list keeps them alive."""
        storages = (reference() for reference, _ in list(self._live.values()))
        return [storage for storage in storages if storage is not None]

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Count the tensors that a call of an operator has made."""
        # A view of, or a write into, a tensor from before the context creates nothing.
        # Only lift_fresh, by which torch.tensor ends, is handed the new tensor itself.
        given: set[int] | None = set() if func is torch.ops.aten.lift_fresh.default else None
        for tensor in _tensors_in(result):
            for storage in storages_of(tensor):
                key = id(storage)
                if key not in self._live:
                    if given is None:
                        given = {id(old) for t in _tensors_in((args, kwargs)) for old in storages_of(t)}
                    if key in given:
                        continue
                self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        # A storage keeps its Python object, hence its id, for as long as any tensor uses it.
        key, size = id(storage), storage.nbytes()
        with _LOCK:
            known = self._live.get(key)
            if known is not None and known[1] == size:
                return
            reference = weakref.ref(storage, lambda _: self._forget(key)) if known is None else known[0]
            self._live[key] = (reference, size)  # a known one was resized
            self._current_bytes += size - (known[1] if known else 0)
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _forget(self, key: int) -> None:
        with _LOCK:
            _, size = self._live.pop(key)
            self._current_bytes -= size


class SwitchedCounter(_OperatorWatch):
    """Mode that shows ``counter`` what is made; the counter may be changed at any time.

    The modes of a backward are those that are entered when it begins: a mode that is entered within it ends with
    the node of the graph that runs.
    """

    counter: LiveBytes | None = None

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Hand the call to the counter, if there is one."""
        if self.counter is not None:
            self.counter.note(func, args, kwargs, result)


def storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages behind a tensor: one, several of a sparse or a wrapping one, none on the meta device."""
    if tensor.device.type == "meta":
        return []
    if tensor.layout is torch.strided:
        with suppress(NotImplementedError):  # a wrapper has none
            return [tensor.untyped_storage()]
    with suppress(NotImplementedError):  # of a layout that lets nobody see its memory
        return [part.untyped_storage() for part in parts_of(tensor) if part.device.type != "meta"]
    return []


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
