"""What a rank keeps of a batch from one instruction to another, and how far it has read its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepspeed_partition.engine.pipeline.second_forward import SecondForward
from deepspeed_partition.engine.runtime.autograd_boundary import (
    Arrived,
    ArrivedLeaf,
    Boundary,
    Departed,
    DepartedEdges,
)
from deepspeed_partition.engine.runtime.boundary_shapes import Shapes
from deepspeed_partition.profiling.backward_halves import Halves
from deepspeed_partition.schedule.instructions import Message


class BatchState:
    """The tensors of a batch that is under way; between two batches there are none."""

    def __init__(self) -> None:
        self.between: dict[Message, Boundary] = {}
        """Tensors between two stages, from where they are made, or arrive, to where they are used, or sent."""
        self.arrived: dict[int, Arrived | ArrivedLeaf] = {}
        """Inputs from the stage before, by slot, until their backward."""
        self.departed: dict[int, Departed | DepartedEdges] = {}
        """Outputs to the next stage, by slot, until their backward."""
        self.losses: dict[int, torch.Tensor] = {}
        """Losses by slot, until their backward."""
        self.second_forwards: dict[int, SecondForward] = {}
        """What runs a forward again that kept nothing, by slot."""
        self.in_halves: frozenset[tuple[int, int]] = frozenset()
        """Stages and micro-batches whose backward is in two halves."""
        self.halves: dict[int, Halves] = {}
        """Backwards in two halves, by slot, from the forward to the second half."""
        self.gradient_shapes: dict[Message, Shapes] = {}
        """Shapes of the gradients that will come back."""

    def clear(self) -> None:
        """Forget what a batch before may have left."""
        self.free_graphs()
        for kept in (self.between, self.gradient_shapes):
            kept.clear()

    def free_graphs(self) -> None:
        """Free what is kept for backwards."""
        for kept in (self.arrived, self.departed, self.losses, self.second_forwards, self.halves):
            kept.clear()


class Backlog(NamedTuple):
    """Micro-batches that a rank which reads no data has not taken from its iterator."""

    iterator: Any
    num_micro_batches: int


class BatchData:
    """The micro-batches of a batch, as a rank reads them from its iterator.

    Any rank may come to read data when layers move. So a rank that reads nothing counts how far its iterator is
    behind those of the others.

    Args:
        read_next: Returns the next micro-batch of the iterator.
        iterator: Returns the iterator that the rank has now.
    """

    def __init__(self, read_next: Callable[[], Any], iterator: Callable[[], Any]) -> None:
        self._read_next, self._iterator = read_next, iterator
        self.num_read = 0
        """The micro-batches of this batch that were read, or could not be read."""
        self.kept: dict[int, Any] = {}
        """Micro-batches, by their number, that were read and are not loaded yet by all stages that need them."""
        self.backlog = Backlog(None, 0)

    def begin(self) -> None:
        """Begin a batch."""
        self.num_read = 0
        self.kept.clear()

    def read(self, number: int) -> Any:
        """Return the micro-batch of this number; those before it are kept until they are asked for."""
        while self.backlog.num_micro_batches and self._iterator() is self.backlog.iterator:
            self._read_next()
            self.backlog = Backlog(self.backlog.iterator, self.backlog.num_micro_batches - 1)
        while self.num_read <= number:
            self.num_read += 1  # also where it cannot be read
            self.kept[self.num_read - 1] = self._read_next()
        return self.kept[number]

    def drop(self, number: int) -> None:
        """Forget a micro-batch that all stages of this rank have loaded."""
        del self.kept[number]

    def drop_inputs(self, number: int) -> None:
        """Keep the labels of a micro-batch alone."""
        _, labels = self.kept[number]
        self.kept[number] = None, labels

    def count_unread(self, num_micro_batches: int) -> None:
        """Count a batch of training of which this rank reads ``num_micro_batches`` too few."""
        if self._iterator() is not self.backlog.iterator:
            self.backlog = Backlog(self._iterator(), 0)
        self.backlog = Backlog(self.backlog.iterator, self.backlog.num_micro_batches + num_micro_batches)
