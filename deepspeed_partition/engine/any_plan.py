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

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine import checkpoints, lowering
from deepspeed_partition.engine.collectives import from_rank_0
from deepspeed_partition.engine.dry_run import dry_run
from deepspeed_partition.engine.engine import MadPipeEngine, initialize_with
from deepspeed_partition.engine.environment import check_writable
from deepspeed_partition.engine.first_failure import first_failure_told
from deepspeed_partition.engine.lowering import Compute, Instruction, Message, Program
from deepspeed_partition.engine.stage_graph import Arrived, Boundary, Departed, Loaded, tensors_of
from deepspeed_partition.engine.stages import StagesModule
from deepspeed_partition.engine.timeline import Recorder
from deepspeed_partition.engine.transfers import Shapes, Transfers
from deepspeed_partition.engine.transplant import trainable_parameters
from deepspeed_partition.planner.errors import PlanMismatchError

_ANY = -1
"""In the place of an active stage, between two instructions: this rank is all its stages."""
_STARTING = -2
"""While DeepSpeed's ``__init__`` tries out transfers between neighbouring ranks, which are its stages to it."""


class AnyPlanEngine(MadPipeEngine):
    """``MadPipeEngine`` for a :class:`StagesModule`.

    Raises:
        TypeError: another module.
        ValueError: tensor parallelism; a GPU without NCCL; a device without trainable parameters; other boundaries
            in the configuration.
    """

    transfers_class: type[Transfers] = Transfers
    fwd_outputs: list[Any]
    loss: Any

    def __init__(self, **kwargs: Any) -> None:
        self._active = _STARTING
        _refuse_what_is_not_supported(type(self).__name__, kwargs["model"])
        super().__init__(**kwargs)
        self._active = _ANY
        # What the user said: this engine tells shapes once per batch, unless the module asks for more.
        self.dynamic_shape = self.module.dynamic_shape
        self._between: dict[Message, Boundary] = {}
        self._arrived: dict[int, Arrived] = {}
        self._departed: dict[int, Departed] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._gradient_shapes: dict[Message, Shapes] = {}
        self._micro_batches: dict[int, Any] = {}
        self._num_read = 0
        self._read_now: Any = None
        pipelines = [[int(rank) for rank in ranks] for ranks in self.grid.pipe_groups]
        self._transfers = self.transfers_class(pipelines, self.module.device_of_stage, self.device)
        self._recorder: Recorder | None = None
        if (path := self.options.save_timeline) is not None:
            from_rank_0(lambda: check_writable(path, "save_timeline"))
            self._recorder = Recorder(path, self.device)
        self._lowered = functools.lru_cache(maxsize=16)(self._lower)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        counts = trainable_parameters(self.module)
        trained = {self.module.stage_owner(layer) for layer, count in enumerate(counts) if count}
        untrained = sorted(set(self.module.device_of_stage) - trained)
        if untrained:
            raise ValueError(
                f"the plan leaves device {untrained[0]} without trainable parameters, and DeepSpeed's optimizer "
                "cannot start without: make a plan with more layers on it"
            )
        super()._configure_optimizer(client_optimizer, model_parameters)

    def recut(self, plan: Any) -> None:
        raise ValueError(
            f"this engine runs the plan that its module was built with, whose boundaries are {self.module.parts}: "
            "build another module for another plan"
        )

    def destroy(self) -> None:
        super().destroy()
        if hasattr(self, "_transfers"):
            self._transfers.close()
            if self._recorder is not None:
                self._recorder.close()

    # Who this rank is

    def is_first_stage(self) -> bool:
        if self._active == _STARTING:
            return super().is_first_stage()
        return 0 in self.module.own_stages if self._active == _ANY else self._active == 0

    def is_last_stage(self) -> bool:
        if self._active == _STARTING:
            return super().is_last_stage()
        last = len(self.module.device_of_stage) - 1
        return last in self.module.own_stages if self._active == _ANY else self._active == last

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self.module.device_of_stage[-1])

    @contextmanager
    def _as_stage(self, stage: int) -> Iterator[None]:
        self._active = stage
        try:
            with self.module.active(stage):
                yield
        finally:
            self._active = _ANY

    # A batch

    def _lower(self, num_micro_batches: int, trains: bool) -> Program:
        lower = lowering.lower if trains else lowering.lower_evaluation
        program = lower(self.module.madpipe_cut.plan, num_micro_batches)
        dry_run(program)
        return program

    def _train_schedule(self) -> Program:
        return self._lowered(self.micro_batches, trains=True)

    def _inference_schedule(self, micro_batches: int) -> Program:
        return self._lowered(micro_batches, trains=False)

    def _exec_schedule(self, program: Program) -> None:
        self._begin_batch()
        self._reserve_pipe_buffers(program.num_slots(self.stage_id))
        with first_failure_told(), self._recorded() as execute:
            for instruction in program.lists[self.stage_id]:
                execute(instruction)
            self._transfers.finish()
        if torch.is_grad_enabled():
            self._exec_reduce_tied_grads()
            self._exec_reduce_grads()
            self._exec_optimizer_step()

    def _recorded(self) -> AbstractContextManager[Callable[[Instruction], None]]:
        """What runs an instruction: where a timeline is asked for, it is recorded in training."""
        recorder = self._recorder
        if recorder is None or not recorder.wants_more or not torch.is_grad_enabled():
            return nullcontext(self._execute)
        return recorder.step(self.module.madpipe_cut.plan, self._transfers, self._execute)

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            run = self._run_forward if instruction.kind == "F" else self._run_backward
            with self._as_stage(instruction.stage):
                run(instruction)
        elif instruction.kind == "S":
            self._transfers.send(instruction.message, instruction.peer, self._between.pop(instruction.message))
        elif instruction.kind == "R":
            self._transfers.post(instruction.message, instruction.peer, self._shapes_of(instruction.message))
        else:
            self._between[instruction.message] = self._transfers.take(instruction.message, instruction.peer)

    def _begin_batch(self) -> None:
        """All ranks of a pipeline begin, or none: only the first and the last stage know whether there is data."""
        self.fwd_outputs = []
        self._num_read = 0
        self._micro_batches.clear()
        has_data = True
        if self.is_first_stage() or self.is_last_stage():
            try:
                self._read(0)
            except StopIteration:
                has_data = False
        if not self._transfers.agree(has_data):
            raise self._data_ended()
        self._transfers.start(told_each_time=self.dynamic_shape)

    def _read(self, number: int) -> Any:
        """The micro-batch of this number; those before it are kept until they are asked for."""
        while self._num_read <= number:
            self._micro_batches[self._num_read] = super()._next_batch()
            self._num_read += 1
        return self._micro_batches[number]

    def _next_batch(self) -> Any:
        return self._read_now

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

    # Checkpoints

    def _adopt_cut_of(self, load_dir: str, tag: str | None) -> None:
        folder = checkpoints.folder_to_load(load_dir, tag, universal=self.load_universal_checkpoint())
        saved = from_rank_0(lambda: None if folder is None else checkpoints.read_cut(folder))
        if saved is None:
            return
        devices = list(range(len(saved.boundaries) - 1))
        if saved.plan is not None:
            devices = [stage.device for stage in saved.plan.stages]
        if (saved.boundaries, devices) != (self.module.parts, self.module.device_of_stage):
            raise PlanMismatchError(
                f"the checkpoint in {folder} was written with the boundaries {saved.boundaries} on the devices "
                f"{devices} and this run has {self.module.parts} on {self.module.device_of_stage}: build the "
                "module with the plan of the checkpoint"
            )


def _refuse_what_is_not_supported(engine: str, model: Any) -> None:
    if not isinstance(model, StagesModule):
        raise TypeError(f"{engine} runs a StagesModule, not a {type(model).__name__}")
    if model.mpu().model_parallel_size > 1:
        raise ValueError(f"{engine} does not run layers that are sliced over ranks: use model=1 in the topology")
    device = get_accelerator().device_name()
    if device != "cpu" and dist.get_backend() == "gloo":
        raise ValueError(f"gloo sends no tensors of a {device}: use init_distributed(dist_backend='nccl')")


@functools.wraps(deepspeed.initialize, assigned=())
def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with an :class:`AnyPlanEngine`; the same arguments.

    Returns:
        The engine, its optimizer, data loader and learning-rate scheduler.
    """
    return initialize_with(AnyPlanEngine, *args, **kwargs)
