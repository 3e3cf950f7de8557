"""Training on a trial cut, while layers are measured where they train; then a plan is made.

Stand-ins take the places of the layers, the loss function and the optimizer step while a step runs, and are gone
between steps. Where the trial cut runs out of memory the step is given up on all ranks and run again: with layers
that recompute, then with fewer and fewer micro-batches in flight as well, then not before the plan is made.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed_partition.dropped_writing import writing_noted
from deepspeed_partition.engine.pipeline.batch_attempt import Attempt, StepGivenUp
from deepspeed_partition.engine.pipeline.beside_layers import modules_of
from deepspeed_partition.engine.pipeline.recomputed_attributes import TwoRuns, tell_of_second_runs
from deepspeed_partition.engine.pipeline.replaced_instructions import shown_as
from deepspeed_partition.engine.pipeline.stages import allocation_of
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce, warn_once
from deepspeed_partition.engine.runtime.tracing import Execute
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.warmup.run_platform import device_memory_bytes, training_bytes
from deepspeed_partition.engine.warmup.stage_profiler import Measuring
from deepspeed_partition.layer_calls import stand_in
from deepspeed_partition.planner.allocation import Allocation
from deepspeed_partition.planner.units import counted, format_bytes
from deepspeed_partition.profiling.attributes import HeldState
from deepspeed_partition.profiling.in_place import NUM_DROPPED, InPlaceClock
from deepspeed_partition.schedule.instructions import Instruction

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

T = TypeVar("T")

NUM_MEASURED_STEPS = NUM_DROPPED + 20
"""The number of steps that are timed at most; in a longer warm-up the steps after these are not."""

MOST_NAMED = 9
WRITTEN = (
    "a step of the warm-up was given up and runs again, and what the program has written in it stays, and "
    "is written again: {names}"
)


class WarmUp:
    """The steps before the plan.

    Args:
        engine: on a trial cut, which runs lists of instructions.
        is_over: asked before each step, with the same answer on every rank.
        length: in words.
    """

    def __init__(self, engine: MadPipeEngine, is_over: Callable[[], bool], length: str) -> None:
        self._engine, self._is_over, self._length = engine, is_over, length
        self.measuring = Measuring(engine)
        self._attempt: Attempt | None = None
        self._recomputes = False
        self._most_in_flight: int | None = None
        self.has_begun = False
        self.goes_on = False
        """Whether no plan fits: training stays on the trial cut, with what was done against a lack of memory."""
        self.ran_out_of_memory = False
        """Whether the trial cut could not be run to its end, whatever was tried."""
        self.ran_at: Allocation | None = None
        """The allocation on which a step was trained to its end, in this run or in that of a checkpoint."""
        self._originals: tuple[list[Any], Any] | None = None
        self._watched: set[int] = set()
        """The layers whose two runs for a micro-batch have been compared."""

    @property
    def clock(self) -> InPlaceClock:
        return self.measuring.clock

    @property
    def has_fallen_back(self) -> bool:
        """Whether something was done against a lack of memory."""
        return self._recomputes or self._most_in_flight is not None

    @property
    def is_trying(self) -> bool:
        """Whether a step runs that may be given up."""
        return self._attempt is not None

    def train(self, step: Callable[[], T]) -> tuple[T] | None:
        """What ``step`` returns; None where the warm-up is over: the plan is to be made first. Collective."""
        if not self.has_begun and not self._is_over():
            self._begin()
        while not self.ran_out_of_memory and (self.goes_on or not self._is_over()):
            # What fits in so many steps fits in the others; to be able to undo a step has its price.
            attempt = self._attempt = Attempt(self._engine, self._held) if self._measures else None
            written: list[str] = []
            noted = nullcontext() if attempt is None else writing_noted(written)
            try:
                with noted, self._measured_step() as measuring, self._stand_ins(measuring):
                    trained = (step(),)
                self.ran_at = allocation_of(self._engine.module)
                return trained
            except StepGivenUp as reason:
                assert attempt is not None
                attempt.undo()
                if written:
                    names = ", ".join(written[:MOST_NAMED])
                    warn_once(f"written in a step given up/{names}", WRITTEN.format(names=names))
                if self._engine.when_given_up is not None:
                    self._engine.when_given_up()
                if reason.for_memory:
                    self._fall_back(str(reason))
                else:
                    self.measuring.do_not_watch(str(reason))
            finally:
                if attempt is not None:
                    attempt.keep()
                self._attempt = None
        return None

    def execute(self, instruction: Instruction, run: Callable[[Instruction], None]) -> None:
        """Execute an instruction of a training step."""
        if self._attempt is None:
            run(instruction)
        else:
            self.measuring.execute(instruction, run)

    def recorded(self, transfers: Transfers, execute: Execute) -> AbstractContextManager[Execute]:
        """Yield what to call for each instruction of a training step."""
        return self.measuring.recorded(transfers, execute) if self._measures else nullcontext(execute)

    def limit_depth(self) -> None:
        """Let no stage of the trial cut have more micro-batches in flight than there was memory for."""
        self._engine.most_in_flight = self._most_in_flight
        self._engine.lower_anew()

    def _begin(self) -> None:
        self.has_begun = True
        self._engine.tell_phase("warm-up")
        cut = self._engine.module.parts
        announce(f"training begins at the cut {cut}, with a warm-up of {self._length}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        """End the warm-up if weights, gradients and optimizer states alone are too many for the trial cut."""
        engine = self._engine
        memory_bytes = device_memory_bytes(engine)
        memory_bytes = engine.options.memory or memory_bytes
        needed_bytes, _ = training_bytes(engine)
        messages = [
            f"rank {rank} needs {format_bytes(needed)} for its weights, gradients and the optimizer's states "
            f"on the trial cut and has {format_bytes(memory)}"
            for rank, (needed, memory) in enumerate(gather_objects((needed_bytes, memory_bytes)))
            if needed > memory
        ]
        if messages:
            announce(f"{messages[0]}; {self._give_up()}", logging.WARNING)

    def _fall_back(self, reason: str) -> None:
        """Do one thing more against a lack of memory. Collective."""
        in_flight = min(self._engine.num_stages, self._engine.micro_batches, self._most_in_flight or math.inf)
        if not self._recomputes and self._most_in_flight is None and self._can_recompute():
            self._recomputes = True
            remedy = "until the plan is made, layers recompute in their backward what they would keep"
        elif in_flight > 1 and self._engine.flushes is None:  # else the loss wants all of them in flight
            self._most_in_flight = math.ceil(in_flight / 2)
            most = counted(self._most_in_flight, "micro-batch")
            remedy = f"until the plan is made, no stage has more than {most} in flight"
            self.limit_depth()
        else:
            remedy = self._give_up()
        announce(f"{reason}; {remedy}", logging.WARNING)

    def _give_up(self) -> str:
        self.ran_out_of_memory = True
        return "the warm-up ends here, and layers are measured one by one, or as far as they were"

    def _can_recompute(self) -> bool:
        """Whether any rank has a layer that can, and does not already."""
        functions = () if self._engine.module.activation_checkpoint_interval else self._engine.module.forward_funcs
        return any(gather_objects(any(map(can_recompute, functions))))

    @functools.cached_property
    def _held(self) -> HeldState:
        """What the layers of this rank and the loss function hold, which is looked for once."""
        module = self._engine.module
        loss_fn = module.loss_fn if self._engine.when_given_up is None else None  # else its host puts back its own
        return HeldState([*module.forward_funcs, *filter(None, [loss_fn])])

    @property
    def _measures(self) -> bool:
        return self.clock.num_steps < NUM_MEASURED_STEPS

    @contextmanager
    def _measured_step(self) -> Iterator[Measuring | None]:
        """Yield what measures a step, while it is to be measured."""
        if not self._measures:
            yield None
            return
        recomputes = self._recomputes and any(map(can_recompute, self._engine.module.forward_funcs))
        with self.measuring.step(recomputes=recomputes):
            yield self.measuring

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Put the layers themselves back within a step, as between two steps."""
        module = self._engine.module
        stand_ins = list(module.forward_funcs)
        functions, loss_fn = self._originals or (stand_ins, module.loss_fn)
        module.forward_funcs[:] = functions
        try:
            with shown_as(module, "loss_fn", loss_fn):
                yield
        finally:
            module.forward_funcs[:] = stand_ins

    def _recomputed(self, layer: int, function: Any, timed: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return what runs a layer, and again in the backward; what the first two runs change is said once."""
        tell_of_second_runs()
        if layer in self._watched:
            return recomputed(timed)

        def watched(inputs: Any) -> Any:
            runs = TwoRuns([function], layer, when_over=lambda: self._watched.add(layer))
            return recomputed(runs.of(timed))(inputs)

        return watched

    @contextmanager
    def _stand_ins(self, measuring: Measuring | None) -> Iterator[None]:
        engine, module = self._engine, self._engine.module
        functions, loss_fn = module.forward_funcs, module.loss_fn
        originals = list(functions)
        self._originals = originals, loss_fn
        # A module's own code, such as get_additional_losses, may ask its layers and its loss for something.
        for place, function in enumerate(originals):
            timed = function if measuring is None else measuring.layer(module._local_start + place, function)
            if self._recomputes and can_recompute(function):
                timed = self._recomputed(module._local_start + place, function, timed)
            functions[place] = function if timed is function else stand_in(function, timed)
        try:
            with ExitStack() as shown:
                if measuring is not None:
                    if loss_fn is not None:
                        timed_loss = measuring.loss(module._num_layers - 1, loss_fn)
                        shown.enter_context(shown_as(module, "loss_fn", stand_in(loss_fn, timed_loss)))
                    timed_optimizer = measuring.clock.timed_optimizer
                    shown.enter_context(shown_as(engine, "around_optimizer_step", timed_optimizer))
                    for name in ("clear_lp_grads", "update_hp_grads") if engine.using_bf16_optimizer else ():
                        timed = measuring.clock.timed_accumulation(
                            getattr(engine.optimizer, name), shares_of_gradients(originals, module._local_start)
                        )
                        shown.enter_context(shown_as(engine.optimizer, name, timed))
                yield
        finally:
            functions[:] = originals
            self._originals = None


def shares_of_gradients(functions: Sequence[Any], first: int) -> dict[int, float]:
    """The shares of consecutive layers, by number from ``first`` on, in what DeepSpeed does with bf16 gradients.

    It adds them up in fp32, one tensor after the other: on a GPU the host takes equally long for each, on a CPU
    for each element.
    """
    on_cpu = get_accelerator().device_name() == "cpu"
    counts: dict[int, int] = {}
    seen: set[int] = set()
    for layer, function in enumerate(functions, first):
        weights = [weight for each in modules_of(function) for weight in each.parameters() if weight.requires_grad]
        new = {id(weight): weight for weight in weights if id(weight) not in seen}
        seen |= new.keys()
        counts[layer] = sum(weight.numel() if on_cpu else 1 for weight in new.values())
    total = sum(counts.values())
    return {layer: count / total for layer, count in counts.items() if count}


def recomputed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``function``, run again in the backward; on a copy, for it may change its input in place."""

    def run(inputs: Any) -> Any:
        return function(_cloned(inputs, {}))

    return functools.partial(checkpoint, run, use_reentrant=False)


def _cloned(inputs: Any, known: dict[int, torch.Tensor]) -> Any:
    """Copies of tensors; one that stands at two places is one again."""
    if isinstance(inputs, tuple | list):
        return type(inputs)([_cloned(each, known) for each in inputs])
    if not isinstance(inputs, torch.Tensor):
        return inputs
    return known[id(inputs)] if id(inputs) in known else known.setdefault(id(inputs), inputs.clone())


def can_recompute(function: Callable[[Any], Any]) -> bool:
    """Whether a layer is worth it, and runs twice as it runs once: it has weights to train and no buffers."""
    return (
        isinstance(function, nn.Module)
        and any(weight.requires_grad for weight in function.parameters())
        and not any(True for _ in function.buffers())
    )
