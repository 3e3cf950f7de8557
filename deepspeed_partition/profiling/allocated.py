"""Bytes that a device's allocator has given out, for peaks in which work spaces of kernels count."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepspeed_partition.profiling.allocator import CountedMemory, counted_memory

logger = logging.getLogger(__name__)


class Allocated:
    """Bytes in use on a device, and their peak.

    On a GPU they are all bytes of the process. On a CPU they are those that were allocated since
    the count began.

    Args:
        device: the device.
        memory: the counter, on a CPU.
    """

    def __init__(self, device: torch.device, memory: CountedMemory | None = None) -> None:
        self._device, self._memory = device, memory

    def current_bytes(self) -> int:
        """Return the bytes that are in use now."""
        return torch.cuda.memory_allocated(self._device) if self._memory is None else self._memory.current_bytes

    def peak_bytes(self) -> int:
        """Return the most bytes in use at once since ``reset_peak``."""
        return torch.cuda.max_memory_allocated(self._device) if self._memory is None else self._memory.peak_bytes

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are in use now; nothing waits for the device."""
        if self._memory is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._memory.reset_peak()


@contextmanager
def allocated_on(device: torch.device, *, this_thread: bool = False) -> Iterator[Allocated | None]:
    """Count what is allocated on ``device`` within the context; None: nothing here can, which is said once.

    Args:
        this_thread: on a CPU, count what this thread allocates alone: others receive messages meanwhile.
    """
    if device.type == "cuda":
        yield Allocated(device)
    elif not _counts_on_cpu():
        yield None
    else:
        with counted_memory(this_thread=this_thread) as memory:
            yield Allocated(device, memory)


@functools.cache
def _counts_on_cpu() -> bool:
    try:
        with counted_memory():
            return True
    except RuntimeError as error:
        logger.warning("work spaces of kernels are not counted where layers are measured: %s", error)
        return False
