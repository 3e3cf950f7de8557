"""DeepSpeed's pipeline engine for any plan: several stages per rank, planned depth, transfers that overlap.

A batch is one list of instructions per rank (``lowering.py``), run in order. What computes is DeepSpeed's code,
with one stage at a time made to look like the only one of its rank; what moves tensors is ``transfers.py``.

Every tensor between two stages lies in ``batch_state.between``, under its message, from where it is made (or
arrives) to where it is used (or sent). Stages on one rank therefore hand over by leaving it there: nothing is
copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_partition.engine.pipeline.around_stages import AroundStages
from deepspeed_partition.engine.pipeline.asked_ranks import ranks_told
from deepspeed_partition.engine.pipeline.batch_attempt import Batch
from deepspeed_partition.engine.pipeline.batch_programs import program_of
from deepspeed_partition.engine.pipeline.batch_state import BatchData, BatchState, BegunWhenRead
from deepspeed_partition.engine.pipeline.beside_layers import name_of
from deepspeed_partition.engine.pipeline.both_ends import BothEnds
from deepspeed_partition.engine.pipeline.boundary_engine import AnyBoundaryEngine
from deepspeed_partition.engine.pipeline.data_draws import DataDraws
from deepspeed_partition.engine.pipeline.drawing_layers import draws_told
from deepspeed_partition.engine.pipeline.ends_of_data import transfers_refused
from deepspeed_partition.engine.pipeline.lockstep import Lockstep
from deepspeed_partition.engine.pipeline.module_walks import clear_gradients
from deepspeed_partition.engine.pipeline.plain_passes import IS_LOSS, PlainPasses, without_more
from deepspeed_partition.engine.pipeline.replaced_instructions import (
    AT_THE_END,
    Replaced,
    instructions_of,
    shown_as,
    why_not_lists,
)
from deepspeed_partition.engine.pipeline.second_forward import SecondForward
from deepspeed_partition.engine.pipeline.sharded_stages import ShardedStages
from deepspeed_partition.engine.pipeline.stages import StagesModule
from deepspeed_partition.engine.pipeline.tied_gradients import (
    copies_added_up,
    gradient_so_far,
    tied_without_gradient,
    weights_trained_apart,
)
from deepspeed_partition.engine.repairs import let_normalizations_run
from deepspeed_partition.engine.runtime import accelerator, host_staging
from deepspeed_partition.engine.runtime.autograd_boundary import (
    HAS_EDGES,
    Departed,
    DepartedEdges,
    Loaded,
    NoGradient,
    Noted,
    arrived_of,
    detached,
    has_few_bytes,
    nothing,
    tagged,
    tensors_of,
    zeros,
)
from deepspeed_partition.engine.runtime.boundary_shapes import Shapes
from deepspeed_partition.engine.runtime.collectives import any_bits, gather_objects, own_groups
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.engine.runtime.first_failure import is_raised_by_all, raised_by_all
from deepspeed_partition.engine.runtime.random_state import DrawnAtOnce
from deepspeed_partition.engine.runtime.recorded_timeline import Recorder
from deepspeed_partition.engine.runtime.shared_outputs import SharedOutputs
from deepspeed_partition.engine.runtime.step_watch import StepWatch
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.generators import common_marks
from deepspeed_partition.profiling.backward_halves import CAN_SPLIT, Halves
from deepspeed_partition.profiling.failed_backward import forget_failed_backward
from deepspeed_partition.profiling.layer_outputs import why_not_carried
from deepspeed_partition.schedule.endless import EndlessProgram
from deepspeed_partition.schedule.instructions import Compute, Instruction, Message, Program

_HAS_NO_TRACKER = not hasattr(deepspeed_engine, "_ENGINE_BACKWARD_GRAPH_TRACKER")
"""Whether this DeepSpeed divides gradients at the outputs of a stage, and not the loss."""
_ANY = -1
"""The active stage between two instructions, when there is none: this rank is all its stages."""
_STARTING = -2
"""The active stage while DeepSpeed's ``__init__`` tries out transfers between neighbouring ranks."""
_NO_CHILDREN = frozenset({type(None), bool, int, float, str, list, tuple, dict, torch.Tensor})
"""Types of what is neither a module nor a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """What a loss costs that is computed once, on all outputs of a batch."""

    forward_seconds: float
    backward_seconds: float
    peak_bytes: int
    """The most bytes at once: the outputs of the batch, what the loss keeps of them, and their gradients."""


DRAWN_AT_ONCE = (
    "the data iterator and the layers of one rank draw from one common generator ({name}; seed_layers sets it, "
    "too): all micro-batches of a batch are read before the first is computed, and plain DeepSpeed reads one at a "
    "time, so both get other numbers than there. "
    "Let the iterator draw from a generator of its own"
)


SHUFFLED_BY_SEEDS = (
    "the data of this rank are shuffled anew for an epoch by numbers from torch's common generator, which "
    "seed_layers sets to the seed of the layer that ran last on the rank: so their order depends on the cut, in "
    "plain DeepSpeed, too. Give the loader a generator of its own: "
    "DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0))"
)


class AnyPlanEngine(AnyBoundaryEngine):
    """Runs lists of instructions where the module is a :class:`StagesModule`, else DeepSpeed's own schedule."""

    transfers_class: type[Transfers] = Transfers
    may_run_again = False
    """Whether a step runs that is given up, and run again, if a rank runs out of memory in it."""
    wants_to_stop: Callable[[], bool] = staticmethod(lambda: False)
    """Function that each batch calls on every rank; where one rank wants to stop, all call
    ``when_asked_to_stop``."""
    when_asked_to_stop: Callable[[], object] = staticmethod(lambda: None)
    leaves_without_gradient = False
    """Whether weights that a step computes no gradient of have none, as in one process, so that the optimizer
    leaves them. Else they have zeros, as in DeepSpeed."""
    data_ends_with_batch = False
    """Whether the rest of the data is lost with a batch that was given up: each batch has an iterator."""
    _batch: Batch
    _in_step = False
    _tied_without_gradient: Sequence[torch.nn.Parameter] = ()
    """While ties are reduced: this rank's tied weights that no copy on any rank has a gradient of."""
    _ties_looked_at: Any = None
    """The groups of tied layers whose copies have been looked at; a move makes others."""
    fwd_outputs: list[Any]
    loss: Any
    num_stages: int
    _lockstep: Lockstep
    _told_loss = 0
    """The loss of the batch, where its ranks have told it when they agreed on how the batch went."""
    _active = _ANY
    batch_state: BatchState
    batch_data: BatchData
    _recorder: Recorder | None = None
    flushes: tuple[int, ...] | None = None
    """Micro-batches of each batch of the next step, where the loss of a batch is computed once on all of its
    outputs: the last stage begins the backwards of a batch when its forwards are done. None: each micro-batch has
    a loss of its own."""
    most_in_flight: int | None = None
    """The most micro-batches that a stage of a cut without a plan has in flight in a step. None: as many as 1F1B
    has."""
    sharded: ShardedStages | None = None
    """What this rank stores and fetches, where pipelines share out the weights of their stages."""
    _numbers_per_batch = 0
    """Micro-batches of a batch, while numbers go on from one batch to the next; 0: each batch begins at 0."""
    step_watch: StepWatch | None = None
    """What times the steps, where somebody has asked to know of them."""
    watches_programs = True
    """Whether the engine looks at what layers and the loss ask and keep beside themselves; a host may do so."""
    around_optimizer_step: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    """What runs the optimizer's step while a warm-up times it: is given the step, and returns what runs in its
    place."""
    loss_cost: LossCost | None = None
    """What the loss of one batch costs, on the rank of the last stage, where it was tried."""

    def __init__(self, **kwargs: Any) -> None:
        self._active = _STARTING
        own_groups()
        if "_why_not_lists" not in vars(self):  # it starts again when layers move
            self._why_not_lists = why_not_lists(self)
        with host_staging.deepspeeds_messages():
            super().__init__(**kwargs)
        self._active = _ANY
        self._pace = accelerator.Pace(self.device)
        self.batch_state = BatchState()
        if "batch_data" not in vars(self):  # what was not read outlives a move of the layers
            self.batch_data = BatchData(
                self._next_of_iterator,  # and not what loading a micro-batch is told
                lambda: self.data_iterator,
            )
        self.batch_data.begin()
        self._read_now: Any = None
        self._replaced = Replaced(self)
        self._lockstep = Lockstep(self._pipelines())
        self._shared_outputs, self._backwards_looked_at = SharedOutputs(), set[int]()
        self._forwards_looked_at = set[tuple[int, bool]]()
        self._drawn_at_once, self._around_stages = DrawnAtOnce(), AroundStages()
        if "data_draws" not in vars(self):  # what was drawn outlives a move of the layers, too
            self.data_draws, self._both_ends = DataDraws(self.global_rank), BothEnds()
        self._passes, self._is_plain = PlainPasses(self), False
        self._computations = {
            "F": self._run_forward, "B": self._run_backward, "R": self._run_again, "I": self._run_first_half,
            "W": self._run_second_half,
        }  # fmt: skip
        self._lowered_lists = functools.lru_cache(maxsize=16)(self._lower)

    def __setattr__(self, name: str, value: Any) -> None:
        # An engine is a module to torch, which looks at each assignment for children, for longer than a transfer.
        own = self.__dict__
        if name in own and type(value) in _NO_CHILDREN:
            own[name] = value
        else:
            super().__setattr__(name, value)

    def _configure_distributed_model(self, model):
        super()._configure_distributed_model(model)
        if self.owns_cut and (self.bfloat16_enabled() or self.fp16_enabled()):
            num_cast = sum(gather_objects(let_normalizations_run(self.module)))
            if num_cast:
                announce(
                    "DeepSpeed keeps buffers in fp32, and batch normalization does not run with weights in half "
                    f"precision beside them: {num_cast} layers have running statistics in half precision, too"
                )

    @property
    def runs_lists(self) -> bool:
        """Whether batches are lists of instructions; otherwise they are DeepSpeed's own schedule."""
        return self._why_not_lists is None and isinstance(self.module, StagesModule)

    @functools.cached_property
    def _transfers(self) -> Transfers:
        """The transfers of this rank. All ranks make them at the first batch; the measured cut has none."""
        transfers = self.transfers_class(self._pipelines(), self.module.device_of_stage, self.device)
        watch.pipeline_ranks = tuple(transfers.ranks)
        return transfers

    @property
    def divides_backwards(self) -> bool:
        """Whether torch and DeepSpeed are recent enough for backwards in two halves."""
        return CAN_SPLIT and not _HAS_NO_TRACKER

    def _pipelines(self) -> list[list[int]]:
        """The global ranks of each pipeline, by device."""
        return [[int(rank) for rank in ranks] for ranks in self.grid.pipe_groups]

    def destroy(self) -> None:
        super().destroy()
        if self.sharded is not None:
            self.sharded.close()
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
        if self._told_loss & IS_LOSS:
            return self._passes.told_loss(self._told_loss)
        num_stages = self.num_stages
        self.num_stages = self._rank_of_loss() + 1
        try:
            with self._lockstep.ended_by_errors():
                return super()._aggregate_total_loss()
        finally:
            self.num_stages = num_stages

    def _bcast_pipe_scalar(self, data: Any, src_rank: int | None = None, **options: Any) -> Any:
        if src_rank is None and self.runs_lists:
            src_rank = self._loss_stage_global_rank()
        return super()._bcast_pipe_scalar(data, src_rank=src_rank, **options)

    # Data. Any rank may come to read it when the layers move, so all keep what they are given.

    def set_dataloader(self, loader: Any) -> None:
        if self.runs_lists:
            reads = self.is_first_stage() or self.is_last_stage()
            begin = iter if reads else BegunWhenRead
            self.training_dataloader, self.data_iterator = loader, None if loader is None else begin(loader)
        else:
            super().set_dataloader(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        iterator = self.batch_data.as_left(iterator)
        if self.runs_lists:
            self.training_dataloader, self.data_iterator = None, iterator
        else:
            super().set_dataiterator(iterator)

    def _next_of_iterator(self) -> Any:
        others = self.grid.pp_group
        has_both_ends = len(others) > 1 and self.is_first_stage() and self.is_last_stage()
        with transfers_refused(dist.get_rank(), others) if has_both_ends else nullcontext():
            return PipelineEngine._next_batch(self)

    def _next_batch(self) -> Any:
        return super()._next_batch() if self._active < 0 else self._read_now

    def skip_data(self, num_micro_batches: int) -> None:
        """Leave a batch that was given up behind, on all ranks that read data, however far each had come."""
        data = self.batch_data
        data.kept.clear()
        if self.data_ends_with_batch or not (self.is_first_stage() or self.is_last_stage()):
            return
        while data.num_read < num_micro_batches:
            try:
                data.read(data.num_read)
            except StopIteration:
                return
            except Exception as error:  # what is wrong has been told; this one would have come next
                announce(f"while the rest of the batch was skipped: {type(error).__name__}: {error}")
            data.kept.clear()

    def let_batch_go(self) -> None:
        """Free what a batch has kept for its backwards, and what one that failed left behind."""
        forget_failed_backward()
        if self.runs_lists:
            self.batch_state.free_graphs()
            self._read_now = None
        for slots in self.pipe_buffers.values():
            slots[:] = [None] * len(slots)
        self.loss = self.grad_layer = None

    def _replaced_too_late(self) -> Exception | None:
        reason = self._replaced.why_not_lists
        if reason is None:
            return None
        return RuntimeError(
            f"{reason} since the engine was started, and its lists of instructions would not call it: replace it "
            "before deepspeed.initialize(), and DeepSpeed's own schedule runs with it"
        )

    def _why_not_begin(self) -> Exception | None:
        """What keeps this rank from beginning a batch, but for data."""
        return self._replaced_too_late()

    def _error_of_data(self, num_micro_batches: int) -> Exception | None:
        """What keeps this rank from reading the micro-batches of a batch, if it is to read.

        The first and the last stage read all of them at once, before anything is sent: an iterator may communicate
        between the two, and all ranks hear of an error before they have begun.
        """
        if not (self.is_first_stage() or self.is_last_stage()):
            return None
        if self.data_iterator is None and self.batch_fn is None:
            return ValueError(
                f"rank {self.global_rank} runs the first or the last stage of its pipeline and was given no data: "
                "give every rank an iterator, or those on which engine.is_first_stage() or is_last_stage() holds"
            )
        try:
            before = common_marks()
            self.batch_data.read(num_micro_batches - 1)
            after = common_marks()
        except StopIteration:
            self._num_loaded = self.batch_data.num_read - 1
            return self._data_ended()
        except Exception as error:  # of the user's data; every rank must hear of it
            return error
        has_seeds = bool(self.module.seed_layers)
        self._drawn_at_once.note_reading(before, after, num_micro_batches, has_seeds=has_seeds)
        if not self.data_ends_with_batch:
            self.data_draws.note_reading(before, after)
        return None

    # A batch

    def program(self, num_micro_batches: int, *, trains: bool) -> Program:
        """Return the lists of instructions of a batch."""
        return self._lowered_lists(num_micro_batches, trains, self.flushes if trains else None)

    def lower_anew(self) -> None:
        """Make the lists of instructions anew, where something has changed that they depend on."""
        self._lowered_lists.cache_clear()
        self._forwards_looked_at.clear()

    def _lower(self, num_micro_batches: int, trains: bool, flushes: tuple[int, ...] | None) -> Program:
        plan = self.module.madpipe_cut.plan
        program = program_of(
            plan, self.num_stages, num_micro_batches, trains=trains, flushes=flushes,
            most_in_flight=self.most_in_flight,
        )  # fmt: skip
        if plan is not None and trains and not program.within_room:
            cuts = ", ".join(f"rank {device} beside cut {cut}" for device, cut in program.beyond_room)
            announce(
                f"where another rank is late, a tensor more than the plan says may be kept ({cuts}): with less, "
                "its order could come to a standstill"
            )
        return program

    def _train_schedule(self) -> Any:
        return self.program(self.micro_batches, trains=True) if self.runs_lists else super()._train_schedule()

    def _inference_schedule(self, micro_batches: int) -> Any:
        if not self.runs_lists:
            return super()._inference_schedule(micro_batches)
        return self.program(micro_batches, trains=False)

    def _exec_schedule(self, program: Any) -> None:
        if isinstance(self.module, StagesModule) and self.owns_cut:
            self._around_stages.tell(self.module, len(self.module.device_of_stage), self.num_stages)
        if not self.runs_lists:
            self._lockstep.begin_batch(min(self._pipelines()[self.grid.data_parallel_id]))
            with self._lockstep.ended_by_errors(), shown_as(self, "_INSTRUCTION_MAP", instructions_of(self)):
                super()._exec_schedule(program)
            return
        if isinstance(program, EndlessProgram):
            self._train_endless()
            return
        if not isinstance(program, Program):  # before 0.19.8, which asks for its schedules
            program = self.program(program.micro_batches, trains=isinstance(program, schedule.TrainSchedule))
        self._lockstep.begin_batch(self._transfers.ranks[0])
        with self._lockstep.ended_by_errors():
            self._begin_batch(program.num_micro_batches)
            self._transfers.start(
                program, trains=torch.is_grad_enabled(), shapes_may_differ=bool(self.dynamic_shape)
            )
            if not (self.is_first_stage() or self.is_last_stage()):
                self.batch_data.count_unread(program.num_micro_batches)
            self._reserve_pipe_buffers(program.num_slots(self.stage_id))
            self.batch_state.in_halves = program.in_halves(self.stage_id)
            self._batch = Batch(self, self.batch_state, program.num_micro_batches, self._runner())
            self._is_plain = self._passes.begin()
            if self.sharded is not None:
                self.sharded.begin(program.lists[self.stage_id], trains=torch.is_grad_enabled())
            if self._recorder is not None:
                self._recorder.forget()
            with self._recorded() as execute:
                if execute == self._execute and type(self)._execute is AnyPlanEngine._execute:
                    execute = self._batch.execute
                instructions = program.lists[self.stage_id]
                steps = self.step_watch if torch.is_grad_enabled() else None
                runs = watch.runs if steps is None else steps.begin(instructions)
                for instruction in instructions:
                    runs(instruction)
                    execute(instruction)
                watch.runs(None)
                if steps is not None:
                    steps.end(program.num_micro_batches)
                self._transfers.finish()
                if self.sharded is not None:
                    self.sharded.finish()
            if self._drawn_at_once.is_shuffled_by_seeds():
                warn_once("shuffled by seeds", SHUFFLED_BY_SEEDS)
            for name in self._drawn_at_once.computed():
                warn_once(f"drawn at once/{name}", DRAWN_AT_ONCE.format(name=name))
            self._told_loss = self._batch.agree(self._passes.loss_in_bits() if self._is_plain else 0)
            self._leave_loss()
            if self._recorder is not None and self.module.madpipe_cut.plan is not None:
                self._recorder.keep(self.module.madpipe_cut.plan, self._transfers)
            if torch.is_grad_enabled():
                self.end_batch()

    def _leave_loss(self) -> None:
        """Leave in ``loss`` what DeepSpeed leaves there, for programs that read it between two calls.

        That is the loss of the last micro-batch where the last stage runs, and 0 on the other ranks.
        """
        self.loss = self.fwd_outputs[-1] if self.fwd_outputs else torch.zeros((), device=self.device)

    def _train_endless(self) -> None:
        """Train on a batch while others are in flight."""
        raise NotImplementedError

    def end_batch(self, *, reduces: bool = True, steps: bool = True) -> None:
        """Reduce the gradients of a batch and step the optimizer, by what stands for these instructions.

        As in DeepSpeed, a function that a script sets on the engine object in their place is not called.

        Args:
            reduces: whether gradients are reduced; else they were before.
            steps: whether the optimizer is stepped; else it is later.
        """
        replaced = self._replaced.instructions
        for kind, name in AT_THE_END.items():
            if not (steps if kind is schedule.OptimizerStep else reduces):
                continue
            run: Callable[..., Any] = MethodType(replaced.get(kind, getattr(type(self), name)), self)
            if kind is schedule.OptimizerStep and self.around_optimizer_step is not None:
                run = self.around_optimizer_step(run)
            is_of_ties = kind is schedule.ReduceTiedGrads
            with self._ties_reduced() if is_of_ties else nullcontext():
                run()

    @contextmanager
    def _ties_reduced(self) -> Iterator[None]:
        """Make the gradients of copies on this rank one around the reduction, and none where no copy has one."""
        if self.leaves_without_gradient:
            self._tied_without_gradient = tied_without_gradient(self.module, self.optimizer, self.device)
        with copies_added_up(self.module, self._tied_gradient):
            yield
        for weight in self._tied_without_gradient:
            weight.grad = None  # flat optimizers keep gradients elsewhere, and take zeros
        self._tied_without_gradient = ()

    def _exec_reduce_tied_grads(self) -> None:
        """Add up the gradients of tied weights on all ranks.

        DeepSpeed passes over a weight without a gradient, which a copy that took no part in a step has on one rank
        alone: the others would wait for it.
        """
        if self._ties_looked_at is not self.module.tied_comms:
            self._ties_looked_at = self.module.tied_comms
            for key, sentence in weights_trained_apart(self.module, self.optimizer).items():
                warn_once(f"apart in {key}", sentence)
        if not isinstance(self.module, StagesModule):
            super()._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            if weight.requires_grad:
                dist.all_reduce(self._tied_gradient(weight), group=group)

    def _exec_reduce_grads(self) -> None:
        """Reduce gradients over the pipelines: to all of them, or to the owners of stages that are shared out."""
        if self.sharded is not None:
            self.sharded.reduce()
        elif not (self._is_plain and self._passes.has_nothing_to_reduce()):
            super()._exec_reduce_grads()

    def zero_grad(self) -> None:
        """Let the weights have no gradients."""
        if self._is_plain:
            clear_gradients(self.module)
        else:
            super().zero_grad()

    def _tied_gradient(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return gradient_so_far(weight, self.optimizer, in_bf16=self.using_bf16_optimizer)

    # DeepSpeed calls instructions through this map, which does not see overriding methods.
    _INSTRUCTION_MAP: ClassVar = {
        **AnyBoundaryEngine._INSTRUCTION_MAP,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
    }

    def _recorded(self) -> AbstractContextManager[Callable[[Instruction], None]]:
        """Return what runs an instruction: in training it is recorded, where a timeline is asked for."""
        recorder, plan = self._recorder, self.module.madpipe_cut.plan
        if recorder is None or plan is None or not recorder.wants_more or not torch.is_grad_enabled():
            return nullcontext(self._execute)
        return recorder.step(self._transfers, self._execute)

    def _execute(self, instruction: Instruction) -> None:
        self._batch.execute(instruction)

    def _runner(self) -> Callable[[Instruction], None]:
        """Return what runs an instruction of the batch that begins: under a profiler it has the plan's name."""
        run = self._run_named if torch.autograd._profiler_enabled() else self._run
        return run if self.sharded is None else self.sharded.around(run)

    def _run_named(self, instruction: Instruction) -> None:
        with torch.profiler.record_function(str(instruction)):
            self._run(instruction)

    def _run(self, instruction: Instruction) -> None:
        if isinstance(instruction, Compute):
            own = self.__dict__  # past ``__setattr__``, here and below: see there
            module = own["_modules"]["module"]
            run = self._computations[instruction.kind]
            own["_active"] = instruction.stage
            module.activate(instruction.stage)
            try:
                run(instruction, module.device_of_stage)
            finally:
                module.deactivate()
                own["_active"] = _ANY
            self._pace.step()
            return
        kind, message, peer = instruction.kind, instruction.message, instruction.peer
        if kind == "S":
            between = self.batch_state.between
            self._transfers.send(message, peer, between[message])
            del between[message]
        elif kind == "D":
            self._transfers.wait_until_left(message, peer)
        elif kind == "R":
            shapes = self.batch_state.gradient_shapes.pop(message) if message.direction == "B" else None
            self._transfers.post(message, peer, shapes)
        else:
            self.batch_state.between[message] = self._transfers.take(message, peer)

    def _begin_batch(self, num_micro_batches: int) -> None:
        """Begin a batch on all ranks of the job, or on none: only first and last stages know of the data.

        Raises:
            StopIteration: there is none, on every rank.
            Exception: what kept a rank from reading it, on every rank.
        """
        self.fwd_outputs = []
        self._num_loaded = 0
        self.batch_data.begin(inputs=self.is_first_stage(), labels=self.is_last_stage())
        self.batch_state.clear()
        error = self._why_not_begin() or self._error_of_data(num_micro_batches)
        try:
            self._lockstep.begin_together(num_micro_batches, error)
        except StopIteration:
            raise
        except Exception:
            self.skip_data(num_micro_batches)
            if not (self.is_first_stage() or self.is_last_stage()):  # which may read after a move
                self.batch_data.count_unread(num_micro_batches)
            raise
        self._compare_both_ends(num_micro_batches)

    def _compare_both_ends(self, num_micro_batches: int) -> None:
        """Say once where the first and the last stage have read other data for a batch. Collective."""
        devices = self.module.device_of_stage
        if self.data_ends_with_batch or devices[0] == devices[-1] or not self._both_ends.is_due():
            return
        ends = [(ranks[devices[0]], ranks[devices[-1]]) for ranks in self._pipelines()]
        uses_labels = torch.is_grad_enabled() or self._compute_loss
        last = self.batch_data.newest(num_micro_batches - 1) if uses_labels else None
        self._both_ends.compare(last, ends)

    def meet(self, num_micro_batches: int, *, asks: bool = False) -> bool:
        """Begin a step with all ranks, before they agree on anything else for it. Collective.

        Args:
            asks: Whether this rank asks for something that all ranks do together.

        Returns:
            Whether any rank asks.

        Raises:
            Exception: what another rank has met since the last step, on every rank.
        """
        if self.runs_lists and dist.get_world_size() > 1:
            return self._lockstep.begin_together(num_micro_batches, asks=asks)
        return any(any_bits([int(asks)])) if dist.get_world_size() > 1 else asks

    def leave(self, words: str) -> None:
        """Leave a loop over batches together. Collective.

        Args:
            words: What this rank does, for the other ones.

        Raises:
            RuntimeError: another rank begins a batch instead; on every rank.
        """
        if self.runs_lists and self._lockstep.goes_on and dist.get_world_size() > 1:
            self._lockstep.begin_together(0, leaves=words)

    @property
    def goes_on(self) -> bool:
        """Whether no error has ended what the ranks do together."""
        return self._lockstep.goes_on

    def check_that_it_goes_on(self) -> None:
        """Refuse to go on after an error that has ended what the ranks do together.

        Raises:
            RuntimeError: there was such an error.
        """
        self._lockstep.check_that_it_goes_on()

    def tell_at_next_batch(self, error: BaseException) -> None:
        """Let the other ranks raise an error of this rank, met between two batches, when they begin the next.

        Where they do not begin one, this waits until they have ended.
        """
        if self.runs_lists and not self._in_step and self._lockstep.goes_on and dist.get_world_size() > 1:
            try:
                self._lockstep.begin_together(0, error)
            except Exception as met:  # the caller raises ``error`` already
                if is_raised_by_all(met):  # and not where another rank has ended instead of coming
                    raised_by_all(error)

    def _load(self, number: int, slot: int, stage: int, devices: Sequence[int]) -> None:
        """Load the active stage's inputs, labels, or both of a micro-batch."""
        is_first, last, buffers = stage == 0, len(devices) - 1, self.pipe_buffers
        self.__dict__["_num_loaded"] = number
        micro_batch = self.batch_data.read(number)
        if self._is_plain and self._passes.may_load:
            self._passes.load(
                micro_batch, slot, is_first=is_first, is_last=stage == last,
                is_copy=self.batch_data.has_copies_of_inputs,
            )  # fmt: skip
        else:
            self._read_now = micro_batch
            PipelineEngine._exec_load_micro_batch(self, slot)
            self._read_now = None
        if is_first:
            if not self.dynamic_shape:
                self._check_shapes(buffers["inputs"][slot])
            buffers["inputs"][slot] = Loaded(buffers["inputs"][slot])
        if stage == last or devices[last] != devices[0]:  # the last one here to ask for it
            self.batch_data.drop(number)
        else:
            self.batch_data.drop_inputs(number)

    # One instruction

    def _run_forward(self, forward: Compute, devices: Sequence[int]) -> None:
        stage, number, slot, state = forward.stage, forward.micro_batch, forward.slot, self.batch_state
        buffers, is_last = self.pipe_buffers, stage + 1 == len(devices)
        self.module.__dict__["micro_batch"] = (
            number % self._numbers_per_batch if self._numbers_per_batch else number
        )
        if stage == 0 or is_last:
            self._load(number, slot, stage, devices)
        if stage > 0:
            from_here = devices[stage - 1] == devices[stage]
            arrived = arrived_of(state.between.pop(Message("F", stage - 1, number)), is_ours=not from_here)
            buffers["inputs"][slot] = state.arrived[slot] = arrived
        in_halves = (stage, number) in state.in_halves
        if forward.keeps and not in_halves:
            self._run_forward_on(forward, devices)
            self.batch_data.settle(number)
            return
        own = self.module.__dict__
        if not forward.keeps:
            own["second_forward"] = state.second_forwards[slot] = SecondForward()
        if in_halves:
            own["halves"] = halves = state.halves[slot] = Halves()
            if stage > 0:
                buffers["inputs"][slot] = Noted(state.arrived[slot], halves.begins_at)
        try:
            with halves.saving() if in_halves else nullcontext():
                self._run_forward_on(forward, devices)
        finally:
            own["second_forward"] = own["halves"] = None
        self.batch_data.settle(number)

    def _run_forward_on(self, forward: Compute, devices: Sequence[int]) -> None:
        kind = forward.stage, torch.is_grad_enabled()
        if kind in self._forwards_looked_at:
            self._compute_forward(forward, devices)
            return
        self._forwards_looked_at.add(kind)
        is_last = forward.stage + 1 == len(devices)
        with self._ranks_told(forward.stage, is_last=is_last), self._draws_told(forward.stage):
            self._compute_forward(forward, devices)

    def _ranks_told(self, stage: int, *, is_last: bool) -> AbstractContextManager[None]:
        """Say once which layers of a stage ask for their rank, where that is a plan's and no program's."""
        module: Any = self.module
        if not self.watches_programs or self.num_stages == 1 or module.madpipe_cut.is_of_program:
            return nullcontext()
        loss_fn = module.loss_fn if is_last else None
        return ranks_told(module._functions[stage], module.allocation.stages[stage].layers[0], loss_fn)

    def _draws_told(self, stage: int) -> AbstractContextManager[None]:
        """Say once which layers of a stage draw, where it is the plan that decides what else their rank draws."""
        module: Any = self.module
        if not self.watches_programs or self.num_stages == 1 or not torch.is_grad_enabled():
            return nullcontext()
        cut, allocation = module.madpipe_cut, module.allocation
        is_plain = allocation.is_contiguous and list(allocation.boundaries) == module.cut_without_plan
        if cut.is_of_program or cut.origin == "trial" or is_plain:
            return nullcontext()
        return draws_told(module, stage)

    def _compute_forward(self, forward: Compute, devices: Sequence[int]) -> None:
        stage, number, slot, state = forward.stage, forward.micro_batch, forward.slot, self.batch_state
        buffers, is_last = self.pipe_buffers, stage + 1 == len(devices)
        if self._is_plain:
            inputs, labels = buffers["inputs"][slot], buffers["labels"][slot]
            buffers["inputs"][slot] = buffers["labels"][slot] = None
            if is_last:
                state.losses[slot] = self._passes.loss_of(stage, inputs.clone(), labels)
            else:
                self._leave_output(
                    Message("F", stage, number), slot, devices, self._passes.forward(stage, inputs.clone())
                )
            return
        type(self)._exec_forward_pass(self, slot)
        buffers["inputs"][slot] = None
        if not is_last:
            outputs, buffers["outputs"][slot] = buffers["outputs"][slot], None
            self._leave_output(Message("F", stage, number), slot, devices, outputs)
        elif torch.is_grad_enabled():
            state.losses[slot] = self.loss
            self.fwd_outputs[-1:] = map(without_more, self.fwd_outputs[-1:])
        self.loss = None
        if not torch.is_grad_enabled():
            state.arrived.pop(slot, None)
            buffers["outputs"][slot] = buffers["labels"][slot] = None

    def _leave_output(self, message: Message, slot: int, devices: Sequence[int], outputs: Any) -> None:
        state = self.batch_state
        if not isinstance(outputs, torch.Tensor) or outputs.is_complex():
            self._check_output(message, outputs)
            self._shared_outputs.look(message.boundary, outputs)
        state.between[message] = detached(outputs)
        if not torch.is_grad_enabled():
            return
        as_edges = self._is_plain and HAS_EDGES and has_few_bytes(outputs)
        state.departed[slot] = DepartedEdges(outputs) if as_edges else Departed(outputs)
        if devices[message.boundary] != devices[message.boundary + 1]:
            gradient = Message("B", message.boundary, message.micro_batch)
            state.gradient_shapes[gradient] = Shapes.of_gradients(outputs)

    def _check_output(self, message: Message, outputs: Any) -> None:
        """Refuse outputs of a stage that cannot go to the next one.

        Raises:
            TypeError: they are no tensors, or have complex numbers.
        """
        stage, module = message.boundary, cast(StagesModule, self.module)
        last = f"layer {module.allocation.stages[stage].layers[1] - 1} ({name_of(module._functions[stage][-1])})"
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        if not whole or not all(isinstance(tensor, torch.Tensor) for tensor in whole):
            raise TypeError(f"{last}, the last one of stage {stage}, {why_not_carried(outputs)}")
        if any(tensor.is_complex() for tensor in whole):
            raise TypeError(
                f"{last}, the last one of stage {stage}, returns complex numbers, whose gradient cannot cross a "
                "cut: return torch.view_as_real(...) of them, and let the next layer begin with "
                "torch.view_as_complex(...)"
            )

    def _run_again(self, again: Compute, devices: Sequence[int]) -> None:
        """Run a forward again that kept nothing, before its backward would."""
        self.batch_state.second_forwards.pop(again.slot).run()

    def _run_backward(self, backward: Compute, devices: Sequence[int]) -> None:
        stage, state = backward.stage, self.batch_state
        if stage in self._backwards_looked_at:
            self._run_backward_on(backward, devices)
            return
        self._backwards_looked_at.add(stage)
        is_alone = len(state.departed) + len(state.losses) == 1 or backward.slot in state.second_forwards
        with nullcontext() if is_alone else self.module.changes_in_backward_told(stage):
            self._run_backward_on(backward, devices)

    def _run_backward_on(self, backward: Compute, devices: Sequence[int]) -> None:
        stage, number, slot, state = backward.stage, backward.micro_batch, backward.slot, self.batch_state
        if stage + 1 == len(devices):
            loss = state.losses.pop(slot)
            if self._is_plain and isinstance(loss, torch.Tensor) and loss.dim() == 0:
                self._passes.backward_of_loss(loss)
            else:
                self.loss = loss
                type(self)._exec_backward_pass(self, slot)
        else:
            # Nothing here holds the gradients: the first layer that needs them no more frees them.
            roots, gradients = state.departed.pop(slot).roots(
                tensors_of(state.between.pop(Message("B", stage, number))),
                may_be_missing=self.leaves_without_gradient,
            )
            if self._is_plain:
                self._passes.run(roots, gradients)
            else:
                [root] = roots or [torch.zeros(())]
                self.pipe_buffers["outputs"][slot], self.grad_layer = root, torch.ones_like(root)
                type(self)._exec_backward_pass(self, slot)
        if not self._is_plain:
            self.grad_layer = self.loss = None
            self.pipe_buffers["outputs"][slot] = self.pipe_buffers["labels"][slot] = None
        if stage > 0:
            of_input = state.arrived.pop(slot).gradients(self._no_gradient_for(stage - 1, devices))
            state.between[Message("B", stage - 1, number)] = of_input

        state.second_forwards.pop(slot, None)

    def _run_first_half(self, half: Compute, devices: Sequence[int]) -> None:
        """Run a backward to the input alone, or all of it where it cannot be divided."""
        stage, number, slot, state = half.stage, half.micro_batch, half.slot, self.batch_state
        halves, is_last = state.halves[slot], stage + 1 == len(devices)
        roots: list[Any]
        gradients: list[torch.Tensor | None]
        if is_last:
            loss = state.losses.pop(slot)
            roots, gradients = [loss], [self._gradient_of_loss(loss)]
            del loss
        else:
            roots, gradients = state.departed.pop(slot).roots(
                tensors_of(state.between.pop(Message("B", stage, number))),
                may_be_missing=self.leaves_without_gradient,
            )
        roots = [root for root in roots if not isinstance(root, torch.Tensor) or root.requires_grad]
        why_not = self._why_not_in_halves(stage, halves) or halves.survey(roots)
        if why_not is None:
            with self._in_own_backward():
                of_begin = halves.first(roots, gradients)
            if stage > 0:
                state.arrived[slot].catch(of_begin)
        else:
            del state.halves[slot]
            warn_once(
                f"halves/{stage}",
                f"stage {stage} runs its backwards undivided, when their first half is due, because they cannot "
                f"be divided: {why_not}",
            )
            with self._in_own_backward(gives_weights=True, is_last=is_last):
                halves.whole(roots, gradients)
        if not self._is_plain:
            self.pipe_buffers["outputs"][slot] = self.pipe_buffers["labels"][slot] = None
        if stage > 0:
            of_input = state.arrived.pop(slot).gradients(self._no_gradient_for(stage - 1, devices))
            state.between[Message("B", stage - 1, number)] = of_input
        state.second_forwards.pop(slot, None)

    def _run_second_half(self, half: Compute, devices: Sequence[int]) -> None:
        """Give weights their gradients."""
        halves = self.batch_state.halves.pop(half.slot, None)
        if halves is not None:
            with self._in_own_backward(gives_weights=True, is_last=half.stage + 1 == len(devices)):
                halves.second()

    def _why_not_in_halves(self, stage: int, halves: Halves) -> str | None:
        """Why backwards of this stage cannot be divided, whatever their graph; None where they can."""
        if _HAS_NO_TRACKER:
            return "DeepSpeed is another one than those whose backward was read for this (0.19.8)"
        if self._is_compiled_autograd_enabled or self.is_deepcompile_enabled():
            return "DeepSpeed compiles the backward"
        if stage == 0 and not halves.is_cut and self.module.activation_checkpoint_interval:
            return "DeepSpeed's activation checkpoints are on (activation_checkpoint_interval)"
        return None

    def _gradient_of_loss(self, loss: Any) -> torch.Tensor:
        """The gradient that a backward of DeepSpeed's engine would begin with: the loss is divided and scaled."""
        if self._is_plain and isinstance(loss, torch.Tensor) and loss.dim() == 0:
            return self._passes.gradient_of_loss(loss)
        leaf = loss.detach().requires_grad_()
        own = self.__dict__
        own["_backward_epilogue"] = lambda: None  # it comes when the weights have their gradients
        try:
            DeepSpeedEngine.backward(self, leaf.clone())
        finally:
            del own["_backward_epilogue"]
        return leaf.grad

    @contextmanager
    def _in_own_backward(self, *, gives_weights: bool = False, is_last: bool = False) -> Iterator[None]:
        """Do around a backward of ours what DeepSpeed does around its own.

        Args:
            gives_weights: whether weights get gradients in it.
            is_last: whether it is one of the last stage, whose backward DeepSpeed ends otherwise.
        """
        own = self.__dict__
        in_halves_of_bf16 = gives_weights and not self._is_plain and self.using_bf16_optimizer
        own["_running_engine_backward"] = own["_divides_no_more"] = True
        try:
            if in_halves_of_bf16:
                self.optimizer.clear_lp_grads()
            yield
        finally:
            own["_running_engine_backward"] = own["_divides_no_more"] = False
        if self._is_plain:
            return
        if gives_weights and is_last:
            self._start_timers((*self.engine_timers.backward_timers, *self.engine_timers.backward_inner_timers))
            self._backward_epilogue()
        elif in_halves_of_bf16 and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)
        self._stop_backward_timers()

    def _no_gradient_for(self, stage: int, devices: Sequence[int]) -> NoGradient:
        """What stands for a gradient that there is none of, for the stage before a cut."""
        if not self.leaves_without_gradient:
            return zeros
        is_here = devices[stage] == devices[stage + 1]
        return nothing if is_here or self._transfers.tells_gradients else tagged
