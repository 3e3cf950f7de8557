"""A batch that some rank may fail in, and that is then given up by all of them, as if it had not begun.

In the middle of a batch the other ranks wait for tensors of the one that failed. So that one goes on with its list
of instructions, computes nothing more, and sends zeros of the right shape, or nothing where it knows no shape; a
rank that gets nothing does the same, and so does one that has heard of the failure (``watch.py``). At the end of
the lists all ranks agree on what happened, and raise the same. What a Python program can catch goes this way:
errors in layers, in the loss, in the data. A broken link, or an error of this very procedure, ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_partition.engine.pipeline.batch_state import Remembering
from deepspeed_partition.engine.pipeline.before_step import is_small
from deepspeed_partition.engine.pipeline.unlike_recordings import has_changed, refuse_unlike_recordings
from deepspeed_partition.engine.runtime.autograd_boundary import Boundary, tensors_of
from deepspeed_partition.engine.runtime.boundary_shapes import Shapes, ShapesDifferError
from deepspeed_partition.engine.runtime.collectives import any_bits, gather_objects, portable
from deepspeed_partition.engine.runtime.first_failure import raised_by_all
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.profiling.attributes import HeldState, Place
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine
    from deepspeed_partition.engine.pipeline.batch_state import BatchState
    from deepspeed_partition.engine.pipeline.plan_engine import AnyPlanEngine

OUT_OF_MEMORY = (torch.cuda.OutOfMemoryError, MemoryError)
FAILED, ASKED, FOUND, CHANGED, NUM_FLAGS = 1, 2, 4, 8, 4
"""What a rank says at the end of a batch, in bits: it has failed; it wants to stop; it has become slow; what the
code that was cut into its layers reads has changed."""
NOTHING: Boundary = ()
"""What stands in the place of a tensor whose shape is not known."""


class BatchGivenUpError(Exception):
    """Whoever runs the batch ends it, to begin it anew in another way; no layer has failed."""


class CannotBeWatchedError(Exception):
    """A micro-batch failed while its bytes were read. If that was not the reason, it will fail again."""


class StepGivenUp(Exception):
    """A rank ran out of memory, or could not be watched; raised on every rank, with what it said."""

    def __init__(self, reason: str, *, for_memory: bool) -> None:
        super().__init__(reason)
        self.for_memory = for_memory

    def __reduce__(self) -> Any:
        return _given_up, (str(self), self.for_memory)


def _given_up(reason: str, for_memory: bool) -> StepGivenUp:
    return StepGivenUp(reason, for_memory=for_memory)


class RaisedElsewhere(Exception):
    """The cause of an error that another rank met: its traceback there, as text."""


class Failure(NamedTuple):
    """What one rank met in a batch."""

    order: int
    """The place of the failure among those of the job, by the time at which it happened."""
    rank: int
    place: str
    """The instruction, in words."""
    error: BaseException
    details: str
    """The traceback, where the batch does not run again."""

    @property
    def runs_again(self) -> bool:
        return isinstance(self.error, StepGivenUp)


class Batch:
    """One batch, training or evaluation, on lists of instructions.

    Args:
        engine: whose batch has begun on all ranks of its pipeline.
        state: The tensors of the batch.
        num_micro_batches: that the ranks with data read.
        run: Runs an instruction.
    """

    def __init__(
        self,
        engine: AnyPlanEngine,
        state: BatchState,
        num_micro_batches: int,
        run: Callable[[Instruction], None],
    ) -> None:
        self._engine, self._state, self._num_micro_batches = engine, state, num_micro_batches
        self._run = run
        self._failure: Failure | None = None
        self._computes = True
        self._input_shapes: dict[tuple[int, int], Shapes] = {}
        """Shapes of the inputs, by stage and micro-batch."""
        self._output_shapes: dict[int, Shapes] = {}

    def execute(self, instruction: Instruction) -> None:
        """Run the instruction, or do without it where this rank, or the one before, computes no more."""
        if not isinstance(instruction, Compute):
            try:
                self._run(instruction)
            except ShapesDifferError as error:
                self._fail(error, instruction)
                self._state.between[instruction.message] = self._zeros(error.expected)
                self._run(instruction)
            return
        if instruction.kind == "F" and instruction.stage > 0:
            self._note_input(instruction)
        if self._computes and watch.has_heard_of_a_failure:
            self._compute_no_more()
        if self._computes:
            try:
                self._run(instruction)
            except Exception as error:
                self._fail(error, instruction)
            else:
                if instruction.kind == "F":
                    self._note_output(instruction)
                return
        elif self._engine.sharded is not None:
            self._engine.sharded.do_without(instruction)
        self._do_without(instruction)

    def agree(self, told: int = 0) -> int:
        """Agree with all ranks of the job on how the batch went, when the lists are through. Collective.

        Args:
            told: Bits that this rank tells the others on the way, if the batch did not fail.

        Returns:
            The bits that any rank has told.

        Raises:
            RuntimeError: ranks have recorded different calls of a model.
            StepGivenUp: some rank ran out of memory in a step that may run again.
            Exception: what some rank met first, on every rank.
        """
        engine = self._engine
        steps = engine.step_watch
        flags = FAILED * (not self._computes) | ASKED * bool(engine.wants_to_stop())
        flags |= FOUND * (steps is not None and steps.has_found)
        flags |= CHANGED * has_changed()
        [said] = any_bits([flags | told << NUM_FLAGS])
        if said & ASKED:
            engine.when_asked_to_stop()
        if said & FOUND and steps is not None:
            steps.hear()
        if not said & FAILED:
            if said & CHANGED:
                refuse_unlike_recordings(engine.grid.data_parallel_id)
            return said >> NUM_FLAGS
        failures = [each for each in gather_objects(self._failure and self._portable(self._failure)) if each]
        watch.forget_failures()
        first = min(failures, key=lambda each: (each.order, each.rank))
        if not first.runs_again:
            engine.skip_data(self._num_micro_batches)
        mine, self._failure = self._failure, None
        try:
            raise_everywhere(first, mine)
        finally:
            # The error's traceback has this frame, and those that hold what the batch computed: with the error
            # among the variables all that would stay until garbage is collected, beside the next batch.
            del first, mine, failures

    def fail(self, error: Exception, place: str) -> None:
        """Note what this rank met, for :meth:`agree`."""
        if self._failure is None:
            details = "" if isinstance(error, StepGivenUp) else traceback_of(error)
            self._failure = Failure(watch.tell_of_a_failure(), dist.get_rank(), place, error, details)
        self._compute_no_more()

    def _fail(self, error: Exception, instruction: Instruction) -> None:
        if isinstance(error, OUT_OF_MEMORY) and self._engine.may_run_again:
            # Not the error itself, which refers to what the step holds.
            reason = f"rank {dist.get_rank()} ran out of memory in {instruction}: {error}"
            self.fail(StepGivenUp(reason, for_memory=True), str(instruction))
        elif isinstance(error, CannotBeWatchedError):
            self.fail(StepGivenUp(str(error), for_memory=False), str(instruction))
        else:
            self.fail(error, instruction.in_words)

    @staticmethod
    def _portable(failure: Failure) -> Failure:
        return failure._replace(error=portable(failure.error, keep=(StopIteration,)))

    def _compute_no_more(self) -> None:
        if self._computes:
            self._computes = False
            self._engine.let_batch_go()

    def _note_input(self, forward: Compute) -> None:
        arrived = self._state.between[Message("F", forward.stage - 1, forward.micro_batch)]
        shapes = self._input_shapes[forward.stage, forward.micro_batch] = Shapes.of(arrived)
        if not shapes.tensors:
            self._compute_no_more()  # the rank before says what went wrong

    def _note_output(self, forward: Compute) -> None:
        output = self._state.between.get(Message("F", forward.stage, forward.micro_batch))
        if output is not None:
            self._output_shapes[forward.stage] = Shapes.of(output)

    def _do_without(self, compute: Compute) -> None:
        if compute.kind in "RW":
            return
        state, stage, number = self._state, compute.stage, compute.micro_batch
        devices = self._engine.module.device_of_stage
        is_last = stage == len(devices) - 1
        if compute.kind == "F":
            state.between.pop(Message("F", stage - 1, number), None)
            if is_last:
                return
            shapes = self._output_shapes.get(stage)
            output = NOTHING if shapes is None else self._zeros(shapes)
            state.between[Message("F", stage, number)] = output
            if devices[stage] != devices[stage + 1]:
                state.gradient_shapes[Message("B", stage, number)] = Shapes.of_gradients(output)
            return
        state.between.pop(Message("B", stage, number), None)
        if stage > 0:
            inputs = self._zeros(self._input_shapes.get((stage, number), Shapes.of(NOTHING)))
            gradients = tuple(tensor for tensor in tensors_of(inputs) if tensor.is_floating_point())
            state.between[Message("B", stage - 1, number)] = gradients

    def _zeros(self, shapes: Shapes) -> Boundary:
        boundary = shapes.empty(self._engine.device)
        for tensor in tensors_of(boundary):
            tensor.zero_()  # whatever a layer may look up with it must be there
        return boundary


def raise_everywhere(first: Failure, mine: Failure | None) -> NoReturn:
    """Raise ``first``, which all ranks know; the rank that met it raises the error itself.

    Raises:
        Exception: that.
    """
    try:
        if mine is not None and mine.order == first.order and mine.rank == first.rank:
            raise raised_by_all(mine.error)
        if first.runs_again:
            raise raised_by_all(first.error)
        told = f"rank {first.rank} met this in {first.place}, and all ranks gave the batch up:\n\n{first.details}"
        raise raised_by_all(first.error) from RaisedElsewhere(told)
    finally:
        del first, mine  # see Batch.agree


def traceback_of(error: BaseException) -> str:
    """The traceback of an error as Python prints it, which is the form in which it goes to other ranks."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


class Attempt:
    """One try of a training step that runs again if it is given up.

    Lack of memory is caught where layers and the loss compute, forward or backward, and the allocator of PyTorch
    or of Python says so. Where it shows elsewhere (in a buffer of a transfer, the reduction of gradients, the
    optimizer's states) or as an error of cuBLAS or cuDNN, it ends the run like any other error.

    Args:
        engine: between two steps, whose data iterator is the one that the step will read.
        held: What the layers and the loss function hold, for all steps on this cut.
    """

    def __init__(self, engine: MadPipeEngine, held: HeldState) -> None:
        self._engine = engine
        self._held = held
        self._put_held_back: Callable[[Collection[Place]], None] | None
        self._put_held_back = held.remembered(buffers=False, copies=is_small, iterators=True)
        self._backlogs = engine.batch_data.backlogs
        self._data: Remembering | None = None
        if engine.data_iterator is not None and (engine.is_first_stage() or engine.is_last_stage()):
            self._data = engine.data_iterator = Remembering(engine.data_iterator)

    def keep(self) -> None:
        """Read the data without notes again: the step is done, or has ended with another error."""
        if self._data is not None and self._engine.data_iterator is self._data:
            self._engine.data_iterator = self._data.iterator
        self._put_held_back = None
        self._held.let_iterators_stand_again()

    def undo(self) -> None:
        """Give the data back, and what layers and the loss hold; the rest was put back when it was given up."""
        engine = self._engine
        if self._put_held_back is not None:
            self._put_held_back(())
        engine.batch_data.backlogs = self._backlogs
        if self._data is not None:
            engine.data_iterator = engine.batch_data.give_again(self._data.taken, self._data.iterator)
        get_accelerator().empty_cache()
