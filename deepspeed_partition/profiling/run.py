"""Runs of one layer, forward and backward, under the conditions of a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed_partition.profiling.boundaries import Boundary, describe, is_boundary, tensors_of
from deepspeed_partition.profiling.devices import device_or_default
from deepspeed_partition.profiling.layer_outputs import ways_out
from deepspeed_partition.profiling.parts_of_loss import PartsOfLoss
from deepspeed_partition.profiling.sources import layer_in_words, said


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Conditions under which layers are measured."""

    device: torch.device
    warm_up: int = 2
    """Number of runs before those that count; the first of them allocates the gradients."""
    repeats: int = 5
    autocast_dtype: torch.dtype | None = None
    halves: bool = False
    """Whether the two halves of a backward are measured, too."""

    def __post_init__(self) -> None:
        for key, smallest in (("warm_up", 1), ("repeats", 1)):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"{key} is {value!r}: it must be a whole number of at least {smallest}")

    @classmethod
    def on(cls, device: torch.device | str | None, **how: Any) -> Conditions:
        """Return conditions on a device, by default the current one, and under the caller's autocast.

        Raises:
            ValueError: there is no such device here, or a number is malformed.
        """
        place = device_or_default(device)
        if how.get("autocast_dtype") is None and torch.is_autocast_enabled(place.type):
            how["autocast_dtype"] = torch.get_autocast_dtype(place.type)
        return cls(device=place, **how)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        if self.autocast_dtype is None:
            yield
            return
        with torch.autocast(self.device.type, dtype=self.autocast_dtype):
            yield
        # An outer autocast would keep the cast weights for the next run; training casts in every micro-batch.
        torch.clear_autocast_cache()

    def now(self) -> float:
        """Return the time in seconds, once everything that the device was given is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Loss:
    """The loss function with the labels of the sample; it is called with the last output."""

    function: Callable[[Any, Any], torch.Tensor]
    labels: Any
    parts: PartsOfLoss
    """What the function uses that the layers do not have."""

    def __call__(self, output: Any) -> Any:
        return self.function(output, self.labels)


HANDED_OVER = (
    "; each layer is run alone: what an earlier one leaves for it elsewhere than in its output, such as a skip in "
    "a dictionary that both have, is not there. Make one layer of both and of all between them, such as an "
    "nn.Sequential, or let the layers hand it on: `return x, skip`"
)
"""What is said of a layer that finds no entry or attribute."""


class LayerRun:
    """One layer, ready on its device, with its input; it runs its forward and backward again and again.

    Args:
        finish: makes the scalar loss of the output, for the layer that ends the chain.
        modules: of the layer, for which messages say what its user calls them.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[Any], Any],
        boundary: Boundary,
        conditions: Conditions,
        finish: Loss | None = None,
        modules: Sequence[nn.Module] = (),
    ) -> None:
        self.name, self._modules = name, modules
        self.conditions = conditions
        self.boundary = boundary
        self._call = call
        self._finish = finish

    def forward(self, arguments: Boundary) -> tuple[Boundary, tuple[torch.Tensor, ...]]:
        """Return the output, and the tensors from which a backward starts: the loss, or the output's own.

        Raises:
            ValueError: the layer cannot take its input, or returns no boundary; the message says which.
            torch.cuda.OutOfMemoryError, MemoryError: as the layer raises it.
        """
        try:
            with self.conditions.autocast():
                output = self._call(arguments)
        except Exception as error:
            beside = isinstance(error, LookupError | AttributeError)
            self._blame(error, f"cannot take its input {describe(self.boundary)}", HANDED_OVER * beside)
        if not is_boundary(output):
            raise ValueError(
                f"layer {self._in_words()} returns {describe(output)} for the input {describe(self.boundary)}: "
                f"a layer of a pipeline returns a tensor or a tuple of tensors: {ways_out(output)}"
            )
        if self._finish is None:
            return output, tuple(tensor for tensor in tensors_of(output) if tensor.requires_grad)
        try:
            with self.conditions.autocast():
                loss = self._finish(output)
        except Exception as error:
            self._blame(error, f"gives {describe(output)}, which loss_fn cannot take")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ValueError(f"loss_fn returns {describe(loss)}: the loss is a tensor of one number")
        return output, (loss,) if loss.requires_grad else ()

    def backward(self, roots: tuple[torch.Tensor, ...], gradients: list[torch.Tensor]) -> None:
        """Run the backward from ``roots``, which receive ``gradients``.

        Raises:
            ValueError, torch.cuda.OutOfMemoryError, MemoryError: as ``forward``.
        """
        try:
            torch.autograd.backward(roots, gradients)
        except Exception as error:
            self._blame(error, f"fails in its backward for the input {describe(self.boundary)}")

    def _in_words(self) -> str:
        return layer_in_words(self.name, self._modules)

    def _blame(self, error: Exception, what: str, advice: str = "") -> NoReturn:
        if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
            raise error
        raise ValueError(f"layer {self._in_words()} {what}: {said(error)}{advice}") from error


def gradients_for(roots: tuple[torch.Tensor, ...], *, contiguous: bool = False) -> list[torch.Tensor]:
    """Return the gradients that a backward starts with: ones, in memory as the roots are, or contiguous."""
    memory_format = torch.contiguous_format if contiguous else torch.preserve_format
    return [torch.ones_like(root, memory_format=memory_format) for root in roots]
