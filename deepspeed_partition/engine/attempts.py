"""A step that may run out of memory on some rank, and is then given up by all of them, as if it had not begun.

In the middle of a step the other ranks wait for tensors of the one that failed. So that one goes on with its list
of instructions, computes nothing more, and sends zeros of the right shape, or nothing where it knows no shape; a
rank that gets nothing does the same. At the end of the lists all ranks agree on what happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.collectives import gather_objects
from deepspeed_partition.engine.first_failure import raised_by_all
from deepspeed_partition.engine.program import Compute, Instruction, Message
from deepspeed_partition.engine.stage_graph import Boundary, tensors_of
from deepspeed_partition.engine.transfers import Shapes
from deepspeed_partition.engine.transplant import random_state

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)
NOTHING: Boundary = ()
"""In the place of a tensor whose shape is not known."""


class CannotBeWatchedError(Exception):
    """A micro-batch failed while its bytes were read. If that was not the reason, it will fail again."""


class StepGivenUp(Exception):
    """A rank ran out of memory, or could not be watched; raised on every rank, with what it said."""

    def __init__(self, reason: str, *, for_memory: bool) -> None:
        super().__init__(reason)
        self.for_memory = for_memory


class Attempt:
    """One try of a training step, on lists of instructions.

    Lack of memory is caught where layers and the loss compute, forward or backward, and the allocator of PyTorch
    or of Python says so. Where it shows elsewhere (in a buffer of a transfer, the reduction of gradients, the
    optimizer's states) or as an error of cuBLAS or cuDNN, it ends the run like any other error.

    Args:
        engine: between two steps, whose data iterator is the one that the step will read.
    """

    def __init__(self, engine: MadPipeEngine) -> None:
        self._engine = engine
        self._flaw: str | None = None
        self._for_memory = False
        self._input_shapes: dict[tuple[int, int], Shapes] = {}
        """By stage and micro-batch."""
        self._output_shapes: dict[int, Shapes] = {}
        module = engine.module
        # A layer may change a buffer, or put another tensor in its place.
        self._tables = [(owner._buffers, dict(owner._buffers)) for owner in module.modules()]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._restore_random_state = random_state()
        self._num_forwards, self._micro_offset = dict(module._num_forwards), module.micro_offset
        self._unread = engine._partly_unread, engine._unread
        self._data: _Remembering | None = None
        if engine.data_iterator is not None and (engine.is_first_stage() or engine.is_last_stage()):
            self._data = engine.data_iterator = _Remembering(engine.data_iterator)

    def execute(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        """``run`` the instruction, or do without it where this rank, or the one before, computes no more."""
        if not isinstance(instruction, Compute):
            run(instruction)
            return
        self._note_input(instruction)
        if self._flaw is None:
            try:
                run(instruction)
            except OUT_OF_MEMORY as flaw:
                # Not the error itself, which refers to what the step holds.
                self._flaw = f"rank {dist.get_rank()} ran out of memory in {instruction}: {flaw}"
                self._for_memory = True
            except CannotBeWatchedError as flaw:
                self._flaw = str(flaw)
            else:
                self._note_output(instruction)
                return
            self._let_go()
        self._do_without(instruction)

    def agree(self) -> None:
        """Collective over the job, when the lists are through.

        Raises:
            StepGivenUp: some rank ran out of memory.
        """
        grid = self._engine.grid
        holds = self._engine._transfers.agree(self._flaw is None)
        if grid.data_parallel_size > 1:
            vote = torch.tensor(int(holds), device=self._engine.device)
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=grid.get_data_parallel_group())
            holds = bool(vote)
        if not holds:
            flaws = [each for each in gather_objects((self._for_memory, self._flaw or "")) if each[1]]
            for_memory, reason = max(flaws, key=lambda each: each[0])
            raise raised_by_all(StepGivenUp(reason, for_memory=for_memory))

    def keep(self) -> None:
        """The step is done, or has ended with another error."""
        if self._data is not None and self._engine.data_iterator is self._data:
            self._engine.data_iterator = self._data.iterator

    def undo(self) -> None:
        """Let the step not have begun: gradients, buffers, random numbers, data."""
        engine = self._engine
        self._let_go()
        engine.zero_grad()
        engine.optimizer.zero_grad()
        for table, buffers in self._tables:
            table.clear()
            table.update(buffers)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        self._restore_random_state()
        engine.module._num_forwards, engine.module.micro_offset = dict(self._num_forwards), self._micro_offset
        engine._partly_unread, engine._unread = self._unread
        if self._data is not None:
            engine.data_iterator = itertools.chain(self._data.taken, self._data.iterator)
        get_accelerator().empty_cache()

    def _note_input(self, compute: Compute) -> None:
        if compute.kind == "F" and compute.stage > 0:
            arrived = self._engine._between[Message("F", compute.stage - 1, compute.micro_batch)]
            self._input_shapes[compute.stage, compute.micro_batch] = Shapes.of(arrived)
            if not tensors_of(arrived) and self._flaw is None:
                self._flaw = ""  # the rank before says what went wrong
                self._let_go()

    def _note_output(self, compute: Compute) -> None:
        output = self._engine._between.get(Message("F", compute.stage, compute.micro_batch))
        if compute.kind == "F" and output is not None:
            self._output_shapes[compute.stage] = Shapes.of(output)

    def _let_go(self) -> None:
        """Free what the step has kept for its backwards."""
        engine = self._engine
        for kept in (engine._arrived, engine._departed, engine._losses):
            kept.clear()
        for slots in engine.pipe_buffers.values():
            slots[:] = [None] * len(slots)
        engine.loss = engine.grad_layer = engine._read_now = None

    def _do_without(self, compute: Compute) -> None:
        engine, stage, number = self._engine, compute.stage, compute.micro_batch
        devices = engine.module.device_of_stage
        is_last = stage == len(devices) - 1
        if compute.kind == "F":
            engine._between.pop(Message("F", stage - 1, number), None)
            if is_last:
                return
            shapes = self._output_shapes.get(stage)
            output = NOTHING if shapes is None else self._zeros(shapes)
            engine._between[Message("F", stage, number)] = output
            if devices[stage] != devices[stage + 1]:
                floating = tuple(tensor for tensor in tensors_of(output) if tensor.is_floating_point())
                engine._gradient_shapes[Message("B", stage, number)] = Shapes.of(floating)
            return
        engine._between.pop(Message("B", stage, number), None)
        if stage > 0:
            inputs = self._zeros(self._input_shapes.get((stage, number), Shapes.of(NOTHING)))
            gradients = tuple(tensor for tensor in tensors_of(inputs) if tensor.is_floating_point())
            engine._between[Message("B", stage - 1, number)] = gradients

    def _zeros(self, shapes: Shapes) -> Boundary:
        boundary = shapes.empty(self._engine.device)
        for tensor in tensors_of(boundary):
            tensor.zero_()  # whatever a layer may look up with it must be there
        return boundary


class _Remembering(Iterator[Any]):
    """An iterator that knows what was taken from it."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self.taken: list[Any] = []

    def __next__(self) -> Any:
        self.taken.append(next(self.iterator))
        return self.taken[-1]
