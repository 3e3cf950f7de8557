"""DeepSpeed's pipeline engine for any plan: several stages per rank, planned depth, transfers that overlap.

A batch is one list of instructions per rank (``lowering.py``), run in order. What computes is DeepSpeed's code,
with one stage at a time made to look like the only one of its rank; what moves tensors is ``transfers.py``.

Every tensor between two stages lies in ``_between``, under its message, from where it is made (or arrives) to
where it is used (or sent). Stages on one rank therefore hand over by leaving it there: nothing is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine import lowering, staging
from deepspeed_partition.engine.collectives import gather_objects, portable
from deepspeed_partition.engine.environment import announce
from deepspeed_partition.engine.first_failure import FirstFailure
from deepspeed_partition.engine.instructions import AnyBoundaryEngine
from deepspeed_partition.engine.program import Compute, Instruction, Message, Program
from deepspeed_partition.engine.stage_graph import Arrived, Boundary, Departed, Loaded, tensors_of
from deepspeed_partition.engine.stages import StagesModule
from deepspeed_partition.engine.timeline import Recorder
from deepspeed_partition.engine.transfers import Shapes, Transfers
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.step import one_f_one_b_order

_ANY = -1
"""In the place of an active stage, between two instructions: this rank is all its stages."""
_STARTING = -2
"""While DeepSpeed's ``__init__`` tries out transfers between neighbouring ranks, which are its stages to it."""


class AnyPlanEngine(AnyBoundaryEngine):
    """Runs lists of instructions where the module is a :class:`StagesModule`, else DeepSpeed's own schedule."""

    transfers_class: type[Transfers] = Transfers
    fwd_outputs: list[Any]
    loss: Any
    num_stages: int
    _failure: FirstFailure
    _active = _ANY
    _partly_unread: Any = None
    """The iterator of training data of a rank that reads none, of which it is behind the others by ``_unread``."""
    _unread = 0
    _recorder: Recorder | None = None

    def __init__(self, **kwargs: Any) -> None:
        self._active = _STARTING
        with staging.deepspeeds_messages():
            super().__init__(**kwargs)
        self._active = _ANY
        self._between: dict[Message, Boundary] = {}
        self._arrived: dict[int, Arrived] = {}
        self._departed: dict[int, Departed] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._gradient_shapes: dict[Message, Shapes] = {}
        self._micro_batches: dict[int, Any] = {}
        self._num_read = 0
        self._read_now: Any = None
        self._lowered = functools.lru_cache(maxsize=16)(self._lower)

    @property
    def runs_lists(self) -> bool:
        """Whether batches are lists of instructions; otherwise they are DeepSpeed's own schedule."""
        return isinstance(self.module, StagesModule)

    @functools.cached_property
    def _transfers(self) -> Transfers:
        """Made when the first batch begins, on all ranks: on the cut that is measured there is none."""
        pipelines = [[int(rank) for rank in ranks] for ranks in self.grid.pipe_groups]
        return self.transfers_class(pipelines, self.module.device_of_stage, self.device)

    def destroy(self) -> None:
        super().destroy()
        if "_transfers" in self.__dict__:
            self.__dict__.pop("_transfers").close()

    # Who this rank is

    def is_first_stage(self) -> bool:
        if self._active == _STARTING or not self.runs_lists:
            return super().is_first_stage()
        return 0 in self.module.own_stages if self._active == _ANY else self._active == 0

    def is_last_stage(self) -> bool:
        if self._active == _STARTING or not self.runs_lists:
            return super().is_last_stage()
        last = len(self.module.device_of_stage) - 1
        return last in self.module.own_stages if self._active == _ANY else self._active == last

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._rank_of_loss())

    def _rank_of_loss(self) -> int:
        return int(self.module.stage_owner(self.module._num_layers - 1))

    # Before 0.19.8 the loss is looked for on the last rank.

    def _aggregate_total_loss(self) -> Any:
        if not self.runs_lists:
            return super()._aggregate_total_loss()
        num_stages = self.num_stages
        self.num_stages = self._rank_of_loss() + 1
        try:
            with self._failure.told():
                return super()._aggregate_total_loss()
        finally:
            self.num_stages = num_stages

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, **options: Any) -> Any:
        if src_rank is None and self.runs_lists:
            src_rank = self._loss_stage_global_rank()
        return super()._bcast_pipe_scalar(data, src_rank=src_rank, **options)

    @contextmanager
    def _as_stage(self, stage: int) -> Iterator[None]:
        self._active = stage
        try:
            with self.module.active(stage):
                yield
        finally:
            self._active = _ANY

    # Data. Any rank may come to read it when the layers move, so all keep what they are given.

    def set_dataloader(self, loader: Any) -> None:
        if self.runs_lists:
            self.training_dataloader, self.data_iterator = loader, iter(loader)
        else:
            super().set_dataloader(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        if self.runs_lists:
            self.training_dataloader, self.data_iterator = None, iterator
        else:
            super().set_dataiterator(iterator)

    def _next_batch(self) -> Any:
        return super()._next_batch() if self._active < 0 else self._read_now

    def _read(self, number: int) -> Any:
        """The micro-batch of this number; those before it are kept until they are asked for."""
        while self._unread and self.data_iterator is self._partly_unread:
            super()._next_batch()
            self._unread -= 1
        while self._num_read <= number:
            self._micro_batches[self._num_read] = super()._next_batch()
            self._num_read += 1
        return self._micro_batches[number]

    def _count_unread(self, num_micro_batches: int) -> None:
        """Where this rank reads nothing: how far behind its iterator is, in case that layers move and it will."""
        if not torch.is_grad_enabled():
            return
        if self.data_iterator is not self._partly_unread:
            self._partly_unread, self._unread = self.data_iterator, 0
        if not (self.is_first_stage() or self.is_last_stage()):
            self._unread += num_micro_batches

    def _flaw_of_data(self) -> Exception | None:
        """What keeps this rank from reading the first micro-batch of a batch, if it is to read."""
        if not (self.is_first_stage() or self.is_last_stage()):
            return None
        if self.data_iterator is None and self.batch_fn is None:
            return ValueError(
                f"rank {self.global_rank} runs the first or the last stage of its pipeline and was given no data: "
                "give every rank an iterator, or those on which engine.is_first_stage() or is_last_stage() holds"
            )
        try:
            self._read(0)
        except StopIteration:
            return self._data_ended()
        except Exception as flaw:  # of the user's data; every rank must hear of it
            return portable(flaw)
        return None

    # A batch

    def _lower(self, num_micro_batches: int, trains: bool) -> Program:
        plan = self.module.madpipe_cut.plan
        program = program_of(plan, self.num_stages, num_micro_batches, trains=trains)
        if plan is not None and trains and not program.within_room:
            cuts = ", ".join(f"rank {device} beside cut {cut}" for device, cut in program.beyond_room)
            announce(
                f"where another rank is late, a tensor more than the plan says may be kept ({cuts}): with less, "
                "its order could come to a standstill"
            )
        return program

    def _train_schedule(self) -> Any:
        return self._lowered(self.micro_batches, trains=True) if self.runs_lists else super()._train_schedule()

    def _inference_schedule(self, micro_batches: int) -> Any:
        if not self.runs_lists:
            return super()._inference_schedule(micro_batches)
        return self._lowered(micro_batches, trains=False)

    def _exec_schedule(self, program: Any) -> None:
        if not self.runs_lists:
            super()._exec_schedule(program)
            return
        if not isinstance(program, Program):  # before 0.19.8, which asks for its schedules
            program = self._lowered(program.micro_batches, trains=isinstance(program, schedule.TrainSchedule))
        self._begin_batch()
        self._count_unread(program.num_micro_batches)
        self._reserve_pipe_buffers(program.num_slots(self.stage_id))
        self._failure = FirstFailure(self._transfers.ranks[0])
        with self._failure.told():
            with self._recorded() as execute:
                for instruction in program.lists[self.stage_id]:
                    execute(instruction)
                self._transfers.finish()
            if torch.is_grad_enabled():
                self._exec_reduce_tied_grads()
                self._exec_reduce_grads()
                self._exec_optimizer_step()

    def _recorded(self) -> AbstractContextManager[Callable[[Instruction], None]]:
        """What runs an instruction: where a timeline is asked for, it is recorded in training."""
        recorder, plan = self._recorder, self.module.madpipe_cut.plan
        if recorder is None or plan is None or not recorder.wants_more or not torch.is_grad_enabled():
            return nullcontext(self._execute)
        return recorder.step(plan, self._transfers, self._execute)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            run = self._run_forward if instruction.kind == "F" else self._run_backward
            with self._as_stage(instruction.stage):
                run(instruction)
        elif instruction.kind == "S":
            self._transfers.send(instruction.message, instruction.peer, self._between.pop(instruction.message))
        elif instruction.kind == "D":
            self._transfers.wait_until_left(instruction.message, instruction.peer)
        elif instruction.kind == "R":
            self._transfers.post(instruction.message, instruction.peer, self._shapes_of(instruction.message))
        else:
            self._between[instruction.message] = self._transfers.take(instruction.message, instruction.peer)

    def _begin_batch(self) -> None:
        """All ranks of a pipeline begin, or none: only the first and the last stage know whether there is data."""
        self.fwd_outputs = []
        self._num_read = self._num_loaded = 0
        self._micro_batches.clear()
        flaw = self._flaw_of_data()
        if not self._transfers.agree(flaw is None):
            flaws = gather_objects(flaw, self.grid.get_pipe_parallel_group())
            raise next(theirs for theirs in flaws if theirs is not None)
        self._transfers.start(told_each_time=self.dynamic_shape)

    def _load(self, number: int, slot: int) -> None:
        """The active stage's inputs, labels, or both of a micro-batch."""
        self._num_loaded = number
        try:
            self._read_now = self._read(number)
        except StopIteration:
            raise self._data_ended() from None
        PipelineEngine._exec_load_micro_batch(self, slot)
        self._read_now = None
        if self.is_first_stage():
            if not self.dynamic_shape:
                self._check_shapes(self.pipe_buffers["inputs"][slot])
            self.pipe_buffers["inputs"][slot] = Loaded(self.pipe_buffers["inputs"][slot])
        ends = {0, len(self.module.device_of_stage) - 1}.intersection(self.module.own_stages)
        if self._active == max(ends):  # the last one here to ask for it
            del self._micro_batches[number]
        else:  # for which the inputs need not be kept
            self._micro_batches[number] = None, self._micro_batches[number][1]

    # One instruction

    def _run_forward(self, forward: Compute) -> None:
        stage, number, slot = forward.stage, forward.micro_batch, forward.slot
        if self.is_first_stage() or self.is_last_stage():
            self._load(number, slot)
        if stage > 0:
            arrived = Arrived(self._between.pop(Message("F", stage - 1, number)))
            self.pipe_buffers["inputs"][slot] = self._arrived[slot] = arrived
        self._exec_forward_pass(slot)
        self.pipe_buffers["inputs"][slot] = None
        if not self.is_last_stage():
            self._leave_output(Message("F", stage, number), slot)
        elif torch.is_grad_enabled():
            self._losses[slot] = self.loss
        self.loss = None
        if not torch.is_grad_enabled():
            self._arrived.pop(slot, None)
            self.pipe_buffers["outputs"][slot] = self.pipe_buffers["labels"][slot] = None

    def _leave_output(self, message: Message, slot: int) -> None:
        outputs = self.pipe_buffers["outputs"][slot]
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        if not whole or not all(isinstance(tensor, torch.Tensor) for tensor in whole):
            raise TypeError(
                f"stage {message.cut} ends with a layer that returns {type(outputs).__name__}, and only a tensor "
                "or a tuple of tensors can cross a cut"
            )
        detached = tuple(tensor.detach() for tensor in whole)
        self._between[message] = detached if isinstance(outputs, tuple) else detached[0]
        if not torch.is_grad_enabled():
            return
        departed = self._departed[slot] = Departed(outputs)
        self.pipe_buffers["outputs"][slot] = departed.root
        devices = self.module.device_of_stage
        if devices[message.cut] != devices[message.cut + 1]:
            floating = tuple(tensor for tensor in detached if tensor.is_floating_point())
            self._gradient_shapes[message._replace(direction="B")] = Shapes.of(floating)

    def _shapes_of(self, message: Message) -> Shapes | None:
        return self._gradient_shapes.pop(message) if message.direction == "B" else None

    def _run_backward(self, backward: Compute) -> None:
        stage, number, slot = backward.stage, backward.micro_batch, backward.slot
        if self.is_last_stage():
            self.loss = self._losses.pop(slot)
        else:
            departed = self._departed.pop(slot)
            departed.give(tensors_of(self._between.pop(Message("B", stage, number))))
            self.grad_layer = torch.ones_like(departed.root)
        self._exec_backward_pass(slot)
        self.grad_layer = self.loss = None
        self.pipe_buffers["outputs"][slot] = self.pipe_buffers["labels"][slot] = None
        if stage > 0:
            self._between[Message("B", stage - 1, number)] = self._arrived.pop(slot).gradients()


def program_of(plan: Plan | None, num_ranks: int, num_micro_batches: int, *, trains: bool) -> Program:
    """The lists of one batch.

    A cut without a plan has one stage per rank and runs as DeepSpeed would run it, with as many micro-batches in
    flight.

    Raises:
        LoweringError: the plan's order cannot be run.
    """
    if plan is not None:
        lower = lowering.lower if trains else lowering.lower_evaluation
        return lower(plan, num_micro_batches)
    orders = [
        one_f_one_b_order(stage, num_ranks - stage, num_micro_batches)
        if trains
        else tuple((f"F{stage}", number) for number in range(num_micro_batches))
        for stage in range(num_ranks)
    ]
    return lowering.with_transfers(orders, range(num_ranks))
