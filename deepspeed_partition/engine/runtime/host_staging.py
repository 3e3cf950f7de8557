"""Where gloo must move the tensors of a GPU, it moves copies in pinned memory of the host.

    GPU --copy, on the stream that computes--> host --gloo--> host --copy--> GPU

Collectives that gloo cannot do on a GPU (the ``all_gather`` of ZeRO, for one) stay DeepSpeed's own affair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p

from deepspeed_partition.engine.runtime import accelerator


def goes_through_host(device: torch.device) -> bool:
    """Whether messages between ranks cannot begin or end on a device."""
    return device.type != "cpu" and dist.get_backend() == "gloo"


class Departing:
    """A tensor that is sent when somebody waits for it, after it has been copied. It may be let go at once."""

    def __init__(self, tensor: torch.Tensor, send: Callable[[torch.Tensor], Any]) -> None:
        self.host, self._send = _on_host(tensor), send
        self.host.copy_(tensor, non_blocking=True)
        self._copied = None if tensor.device.type == "cpu" else accelerator.mark()

    def wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._send(self.host).wait()


class Arriving:
    """A tensor that is complete, in the order of a stream, when somebody has waited for it.

    Args:
        receive: posts the receive of a tensor on the host.
        stream: gives what to enter, on any thread, to fill the tensor.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        receive: Callable[[torch.Tensor], Any],
        stream: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._tensor, self._host, self._stream = tensor, _on_host(tensor), stream
        self._work = receive(self._host)

    def wait(self) -> None:
        self._work.wait()
        with self._stream():
            self._tensor.copy_(self._host, non_blocking=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Make room for a copy, which the device can fill while the host does something else."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


def send(tensor: torch.Tensor, rank: int, by: Callable[..., Any] = dist.send) -> Any:
    """Send a contiguous tensor to a rank that waits for it."""
    return by(_on_host(tensor).copy_(tensor) if goes_through_host(tensor.device) else tensor, rank)


def receive(tensor: torch.Tensor, rank: int, by: Callable[..., Any] = dist.recv) -> Any:
    """Fill a contiguous tensor with what a rank sends."""
    if not goes_through_host(tensor.device):
        return by(tensor, rank)
    host = _on_host(tensor)
    done = by(host, rank)
    tensor.copy_(host)
    return done


@contextmanager
def deepspeeds_messages() -> Iterator[None]:
    """Let DeepSpeed's own sends and receives between neighbours go through the host's memory meanwhile."""
    stock = p2p.send, p2p.recv
    p2p.send, p2p.recv = functools.partial(send, by=stock[0]), functools.partial(receive, by=stock[1])
    try:
        yield
    finally:
        p2p.send, p2p.recv = stock
