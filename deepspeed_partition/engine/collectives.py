"""Agreement between ranks: every rank gets the same value or raises the same error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepspeed_partition.engine import staging

T = TypeVar("T")


def portable(error: BaseException) -> Exception:
    """``error`` as something that another process can raise."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign exception's pickling does, its text is what matters
        copy = None
    if isinstance(error, StopIteration):
        return RuntimeError("the data iterator ended before the first micro-batch")
    if isinstance(copy, Exception):
        return copy
    return RuntimeError(f"{type(error).__name__}: {error}")


def from_rank_0(compute: Callable[[], T]) -> T:
    """What ``compute`` returns on rank 0, on every rank of the job.

    Raises:
        Exception: what ``compute`` raised on rank 0, on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome = [compute(), None]
        except Exception as flaw:
            outcome = [None, portable(flaw)]
    dist.broadcast_object_list(outcome, src=0)
    value, error = outcome
    if error is not None:
        raise error
    return value


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """``value`` of every rank of ``group``, in the order of its ranks, on each of them."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def send_bytes(tensor: torch.Tensor, rank: int) -> None:
    """Send the values of ``tensor``, of any type, to a rank that knows its shape."""
    if tensor.numel():
        staging.send(tensor.detach().contiguous().reshape(-1).view(torch.uint8), rank)


def receive_bytes(shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int) -> torch.Tensor:
    """The tensor that :func:`send_bytes` sends."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.numel():
        staging.receive(tensor.view(-1).view(torch.uint8), rank)
    return tensor
