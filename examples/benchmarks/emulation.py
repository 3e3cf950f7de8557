"""Layers and links that sleep instead of working, so that every stage has a device of its own on any machine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe import p2p
from torch import Tensor, nn

from deepspeed_partition import Chain
from deepspeed_partition.engine.transfers import Transfers


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, seconds: tuple[float, float], output_numel: int) -> Tensor:
        ctx.backward_seconds, ctx.shape = seconds[1], x.shape
        time.sleep(seconds[0])
        return torch.zeros(x.shape[0], output_numel) + anchor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.backward_seconds)
        return torch.zeros(ctx.shape), gradients[0].sum().reshape(1), None, None


class SleepingLayer(nn.Module):
    """Sleeps for its forward and backward and hands on a tensor of the given size.

    ``num_parameters`` only weigh in cuts that count parameters.
    """

    def __init__(
        self, forward_seconds: float, backward_seconds: float, output_numel: int, num_parameters: int
    ) -> None:
        super().__init__()
        self.seconds = (forward_seconds, backward_seconds)
        self.output_numel = output_numel
        self.anchor = nn.Parameter(torch.zeros(1))
        self.weight = nn.Parameter(torch.zeros(max(0, num_parameters - 1)))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.anchor, self.seconds, self.output_numel)


def sleeping_layers(chain: Chain, *, time_scale: float = 1.0, most_parameters: int = 1000) -> list[SleepingLayer]:
    """A layer for each of the chain: its times, its boundary, its parameters in proportion."""
    heaviest = max(layer.num_trainable_parameters or 0 for layer in chain.layers) or 1
    return [
        SleepingLayer(
            layer.forward_seconds * time_scale,
            layer.backward_seconds * time_scale,
            max(1, layer.output_bytes // 4),
            1 + round((layer.num_trainable_parameters or 0) / heaviest * most_parameters),
        )
        for layer in chain.layers
    ]


class _Both:
    """Two transfers to wait for. (gloo gives up a receive that nobody holds.)"""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    def wait(self) -> None:
        self.first.wait()
        self.second.wait()


class SlowTransfers(Transfers):
    """Links that take ``seconds`` for each message, without the CPU; one message per direction at once.

    As on a real link a transfer begins when the receive is posted: a token that the receiver takes tells so.
    """

    seconds = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._links = {peer: queue.SimpleQueue() for peer in self._sent_to}
        for peer in self._links:
            threading.Thread(target=self._carry, args=(peer,), daemon=True).start()

    def _start_sending(self, tensor: Tensor, peer: int) -> Any:
        left = threading.Event()
        self._links[peer].put((tensor, left))
        return left

    def _start_receiving(self, tensor: Tensor, peer: int) -> Any:
        token = super()._start_receiving(torch.empty(1), peer)
        return _Both(token, super()._start_receiving(tensor, peer))

    def _carry(self, peer: int) -> None:
        while True:
            tensor, left = self._links[peer].get()
            super()._start_sending(torch.zeros(1), peer).wait()
            time.sleep(self.seconds)
            super()._start_sending(tensor, peer).wait()
            left.set()


@contextmanager
def slow_blocking_transfers(seconds: float, numel: int) -> Iterator[None]:
    """The same for DeepSpeed's engine: a send and its receive meet, and both wait until it is over.

    Args:
        numel: of activations and gradients; what has another size tells shapes, and takes no time.
    """
    send, receive = p2p.send, p2p.recv

    def lasting(transfer: Callable[..., Any]) -> Callable[..., Any]:
        def run(tensor: Tensor, stage: int, *more: Any) -> Any:
            done = transfer(tensor, stage, *more)
            if tensor.numel() == numel:
                time.sleep(seconds)
            return done

        return run

    p2p.send, p2p.recv = lasting(send), lasting(receive)
    try:
        yield
    finally:
        p2p.send, p2p.recv = send, receive
