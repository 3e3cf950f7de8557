"""Training without a drain between batches: the pattern of a plan goes on beneath the calls of ``train_batch``.

A call runs one segment of the lists (``schedule/endless.py``) and returns when the loss of its batch is known; the
backwards and the update of the batch follow in the next one. Each stage uses the version of its weights that
``weight_versions`` says (``held_weights.py``).

*At rest* nothing is in flight, all updates of the batches that were trained on are done, and all stages have the
same version. Forwards that ran ahead of the last call are then run to their end and forgotten, as if they had not
begun: their data comes again, buffers and seeds are put back. A *run* goes from one rest to the next; in it,
micro-batches, batches and versions are counted from 0.

An error on one rank cannot be given up as in a step that drains, for the batches in flight are not all its own.
The rank goes on without computing until all ranks have heard of it at a meeting; then all raise it at the same
place of the lists, and the engine refuses further steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from deepspeed_partition.engine.pipeline.batch_attempt import raise_everywhere
from deepspeed_partition.engine.pipeline.batch_state import source_of
from deepspeed_partition.engine.pipeline.endless_batches import (
    DrawnAhead,
    EndlessAttempt,
    HeldByLayer,
    StateOfStages,
    WrittenAhead,
)
from deepspeed_partition.engine.pipeline.held_weights import (
    FlatBuffers,
    FlatGradients,
    Gradients,
    Settings,
    Weights,
    clipped_already,
    counts_kept,
    new_flat_buffers,
    norms_of_this_rank,
    scale_gradients,
    squares_of_gradients,
)
from deepspeed_partition.engine.pipeline.meetings import UNLIMITED, Facts, Meeting, Meetings
from deepspeed_partition.engine.pipeline.parts import all_that_moves, held_modules
from deepspeed_partition.engine.pipeline.unlike_recordings import has_changed, tell_unlike_values
from deepspeed_partition.engine.runtime.all_come import wait_until_all_come
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import in_words
from deepspeed_partition.engine.runtime.watch import watch
from deepspeed_partition.planner.weight_versions import TWO_VERSIONS
from deepspeed_partition.schedule.endless import (
    EndlessBases,
    EndlessInstruction,
    EndlessProgram,
    EndlessRun,
)
from deepspeed_partition.schedule.instructions import Compute, Update

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

NONE = "none"
"""Mode for benchmarks alone: forward and backward use the newest version, which may differ between them."""


class EndlessTraining:
    """Training of one engine, on one plan, without a drain between batches.

    Args:
        engine: whose lists, weights and data are used.
        mode: ``weight_versions``, or ``NONE``.
        program: lists of all devices.
        puts_off: whether its updates come so late that they may wait for a norm over all ranks.
    """

    def __init__(self, engine: MadPipeEngine, mode: str, program: EndlessProgram, *, puts_off: bool) -> None:
        self._engine, self._mode, self.program = engine, mode, program
        self._per_batch = program.num_micro_batches
        self.clips_by_all = mode == TWO_VERSIONS and puts_off
        self._num_read_ahead = max(1, program.batches_ahead) if engine.runs_ahead else 0
        """Batches whose data is read before their call: it may end, and the pipeline comes to rest then."""
        self._num_to_fill = 1 + math.ceil(max(program.num_slots) / self._per_batch)
        """Batches of a run that have ended when the pipeline is full."""
        module: Any = engine.module
        self._devices = tuple(module.device_of_stage)
        self._last_stage = len(self._devices) - 1
        self._held: dict[int, list[HeldByLayer]] = {}
        self._held_by_loss: HeldByLayer | None = None
        self._run: EndlessRun | None = None
        self._num_alone = 0
        """Number of runs of one batch, one after the other."""
        self._meetings: Meetings | None = None
        self._meeting: Meeting | None = None
        self.num_trained = 0
        """Number of the batches of this run whose call has returned."""
        self._end: int | None = None
        """Number of the micro-batch before which the run ends, where that is known."""
        self.loss = 0.0
        """Loss of the last batch."""
        self.watcher: Callable[[EndlessInstruction], object] | None = None
        """Function that is told of each instruction before it runs; for tests."""

    # Between two calls

    @property
    def is_under_way(self) -> bool:
        """Whether batches are in flight; else the pipeline is at rest."""
        return self._run is not None

    def weights_of(self, stage: int) -> Weights:
        """The versions of the weights of a stage of this rank, while batches are in flight."""
        return self._weights[stage]

    def come_to_rest(self) -> None:
        """Bring the pipeline to rest. Collective.

        Raises:
            Exception: what a rank has met since the last meeting, on every rank.
        """
        if self._run is None:
            return
        engine = self._engine
        self._state.come_back(rests=True)
        engine._lockstep.begin_batch(engine._transfers.ranks[0])
        self._refuse_other_flags()
        with engine._lockstep.ended_by_errors():
            meeting = self._meet(Facts(fails=self._attempt.has_failed, rests=True))
            wait_until_all_come("come_to_rest()", RESTS_ON_ALL, is_over=lambda: meeting.is_over)
            outcome = meeting.outcome
            if outcome.fails:
                self._raise_failure()
            if outcome.trains:
                raise RuntimeError("one rank brings the pipeline to rest, and another one begins a batch")
            if self._end is None:
                self._end = self.num_trained * self._per_batch + self.program.ahead
            self._drain()
        engine.batch_data.put_back(self._unused(), self._error_of_data)

    # A call

    def train(self) -> None:
        """Run the segment of the next batch; its mean loss is :attr:`loss` afterwards. Collective.

        Raises:
            StopIteration: there is no data for it, on every rank.
            Exception: what a rank has met, on every rank.
        """
        has_trained = False
        while not has_trained:
            if self._run is None:
                self._begin()
            with self._engine._lockstep.ended_by_errors():
                has_trained = self._train()

    def _begin(self) -> None:
        """Begin a run. All ranks begin it, or none."""
        engine, program, module = self._engine, self.program, self._engine.module
        engine._lockstep.begin_batch(engine._transfers.ranks[0])
        with engine._lockstep.ended_by_errors():
            if self._meetings is None:
                # Schedules step behind the first call, and the optimizer later, which torch would warn of.
                engine.basic_optimizer._opt_called = True
                engine._step_of_user.look()  # before ranks come to their first update one after the other
                self._meetings = Meetings(engine._pipelines(), self._devices[self._last_stage])
            engine._begin_batch(self._per_batch)
        engine._transfers.start_endless(EndlessBases(program), shapes_may_differ=bool(engine.dynamic_shape))
        engine._reserve_pipe_buffers(program.num_slots[engine.stage_id])
        engine.batch_state.in_halves = frozenset()
        self._attempt = EndlessAttempt(engine, engine.batch_state, self._per_batch, engine._runner())
        engine._batch = self._attempt
        engine._is_plain = engine._passes.begin()
        self._run = EndlessRun(program, engine.stage_id, self._is_over)
        self.num_trained, self._end = 0, None
        self._reads = engine.is_first_stage() or engine.is_last_stage()
        self._source = source_of(engine.data_iterator)
        """The program's iterator, of which the engine may have one that gives again what was measured."""
        self._items: dict[int, Any] = {}
        """Micro-batches of this batch and later ones, which may have to come again."""
        self._error_of_data: Exception | None = None
        """What reading of data was answered with, behind what was read."""
        own: list[int] = module.own_stages
        parameters = {stage: _trainable(module, stage) for stage in own}
        self._parameters = [each for stage in own for each in parameters[stage]]
        self._flags = [(weight, weight.requires_grad) for weight in module.parameters()]
        renew, optimizer = new_flat_buffers(engine.optimizer), engine.optimizer
        if renew is None:
            self._weights = {stage: Weights(parameters[stage]) for stage in own}
        else:  # of all stages of the rank at once
            self._weights = dict.fromkeys(own, Weights(self._parameters, renew))
        flat = FlatBuffers(optimizer) if isinstance(optimizer, BF16_Optimizer) else None
        self._gradients = {
            stage: Gradients(parameters[stage]) if flat is None else FlatGradients(parameters[stage], flat)
            for stage in own
        }
        self._oldest = dict.fromkeys(own, 0)
        """For each stage, the first micro-batch that has had no backward."""
        self._norms: dict[int, tuple[torch.Tensor, Any]] = {}
        self._settings = Settings(engine.basic_optimizer)
        self._of_batch: dict[int, tuple[list[dict[str, Any]], int, int]] = {}
        self._totals: dict[int, Any] = {}
        """Sums of the losses of batches, on the last stage."""
        self._losses: dict[int, float] = {}
        """Losses of batches that were not told, on the last stage."""
        self._has_told_loss = -1
        self._num_forwards = dict(module._num_forwards)
        held = {stage: self._held_by(stage) if program.batches_ahead else [] for stage in own}
        self._state = StateOfStages(held, program.batches_ahead, self._mode)
        self._drawn_ahead = DrawnAhead(has_seeds=bool(module.seed_layers))
        self._written_ahead = WrittenAhead()

    def _held_by(self, stage: int) -> list[HeldByLayer]:
        """What the layers of a stage hold; what their code can reach is looked for once for each."""
        module: Any = self._engine.module
        first = module.allocation.stages[stage].layers[0]
        functions: list[Any] = module._functions[stage]
        found = self._held.get(stage, [])
        if [id(each.function) for each in found] != list(map(id, functions)):
            found = self._held[stage] = [HeldByLayer(first + place, each) for place, each in enumerate(functions)]
        loss_fn = module.loss_fn if stage == self._last_stage else None
        if loss_fn is None:
            return found
        if self._held_by_loss is None or self._held_by_loss.function is not loss_fn:
            self._held_by_loss = HeldByLayer(None, loss_fn)
        return [*found, self._held_by_loss]

    def _refuse_other_flags(self) -> None:
        """Let the next meeting fail where weights were frozen or freed while batches are in flight."""
        if any(weight.requires_grad != trains for weight, trains in self._flags):
            self._attempt.fail(RuntimeError(FROZEN_IN_FLIGHT), "the weights")

    def _train(self) -> bool:
        """Run a segment; return whether there was data for it: else the pipeline is at rest."""
        engine, batch, run = self._engine, self.num_trained, self._run
        assert run is not None and self._meetings is not None
        engine.fwd_outputs = []
        self._state.come_back()
        if batch:
            engine._lockstep.begin_batch(engine._transfers.ranks[0])
        self._of_batch[batch] = self._settings.now(), engine.global_steps, engine.global_samples
        self._refuse_other_flags()
        num_there = self._read_ahead(batch)
        fails = self._attempt.has_failed
        self._meeting = self._meet(
            Facts(fails=fails, trains=True, asks=bool(engine.wants_to_stop()), num_batches=num_there)
        )
        expected = self._meetings.expect_loss()
        self._run_all(run.segment())
        outcome = self._look_at_meeting()
        if self._end is not None and self._end <= batch * self._per_batch:
            self._drain()  # there is no data for this batch: the next run begins with that
            engine.batch_data.put_back(self._unused(), self._error_of_data)
            if expected is None:
                self._tell_loss(batch)
            else:
                self._meetings.told_loss(expected)
            return False
        if expected is None:
            self._tell_loss(batch)
        if expected is not None:
            self.loss = self._meetings.told_loss(expected)
        if outcome.fails:
            self._raise_failure()
        if engine.when_losses_are_known is not None:  # for which all ranks come, at the end of this call
            if self._meet(Facts(fails=self._attempt.has_failed, trains=True)).outcome.fails:
                self._raise_failure()
        elif self._attempt.has_failed:
            self._fail_at_next_meeting()
        self._show_newest()
        self.num_trained += 1
        self._drawn_ahead.keep_from(self.num_trained)
        if not self._reads:
            engine.batch_data.count_unread(self._per_batch)
        for number in [each for each in self._items if each < self.num_trained * self._per_batch]:
            del self._items[number]
        if outcome.asks:
            engine.when_asked_to_stop()
        if self._end == self.num_trained * self._per_batch:
            self._num_alone = self._num_alone + 1 if self.num_trained == 1 else 0
            if self._num_alone == 2:
                announce(
                    "the iterator of each train_batch ends with its batch, so the pipeline drains in every call: "
                    "give one iterator with the data of all batches"
                )
            self._drain()
            engine.batch_data.put_back(self._unused(), self._error_of_data)
        else:
            self._state.leave()
        if engine.step_watch is not None:
            held = {stage: weights.most_held for stage, weights in self._weights.items()}
            engine.step_watch.batches.batch_ended(
                held, is_full=self._run is not None and self.num_trained >= self._num_to_fill
            )
        return True

    def _show_newest(self) -> None:
        """Let a program that looks between two calls find the newest weights, and no gradients to clear."""
        for stage, weights in self._weights.items():
            self._gradients[stage].put_aside()
            weights.use(weights.newest)

    def _read_ahead(self, batch: int) -> int:
        """Read the data that this call may begin with; return of how many batches of the run it is there."""
        engine, data = self._engine, self._engine.batch_data
        if not self._reads:
            return UNLIMITED
        if source_of(engine.data_iterator) is not self._source:
            if self._items and any(number >= batch * self._per_batch for number in self._items):
                self._attempt.fail(RuntimeError(ANOTHER_ITERATOR), "the reading of data")
            self._source = source_of(engine.data_iterator)
        wanted = (batch + self._num_read_ahead + 1) * self._per_batch
        while data.num_read < wanted and self._error_of_data is None:
            number = data.num_read
            try:
                data.read(number)
            except Exception as error:  # of the user's data: it is raised when its batch's turn comes
                self._error_of_data = error
        for number in range(batch * self._per_batch, data.num_read):
            if number in data.kept and number not in self._items:
                self._items[number] = data.kept[number]
        num_there = data.num_read - (self._error_of_data is not None)
        return UNLIMITED if num_there >= wanted else num_there // self._per_batch

    def _is_over(self, number: int) -> bool:
        """Whether a micro-batch comes no more in this run; what all ranks know of the data decides it."""
        ahead = (self.num_trained + self._num_read_ahead) * self._per_batch
        if self._end is None and number >= ahead and self._meeting is not None:
            self._look_at_meeting()
        return self._end is not None and number >= self._end

    def _look_at_meeting(self) -> Facts:
        assert self._meeting is not None
        outcome = self._meeting.outcome
        if outcome.num_batches < UNLIMITED and self._end is None:
            self._end = outcome.num_batches * self._per_batch
        if outcome.fails:
            self._attempt.go_without()
        return outcome

    def _meet(self, facts: Facts) -> Meeting:
        assert self._meetings is not None
        return self._meetings.begin(facts)

    # Instructions

    def _run_all(self, instructions: Iterator[EndlessInstruction]) -> None:
        steps = self._engine.step_watch
        for instruction in instructions:
            watch.runs(instruction)
            if steps is not None:
                steps.batches.runs(instruction)
            if self.watcher is not None:
                self.watcher(instruction)
            if isinstance(instruction, Update):
                if not self._is_trained_on(instruction.batch):
                    continue  # it is given up: its call has not come
                if instruction.kind == "U":
                    self._update(instruction.batch)
                elif self.clips_by_all:
                    self._post_norm(instruction.batch)
            elif isinstance(instruction, Compute):
                self._compute(instruction)
            else:
                self._attempt.execute(instruction)
        watch.runs(None)
        if steps is not None:
            steps.batches.runs(None)

    def _compute(self, compute: Compute) -> None:
        engine, stage, number = self._engine, compute.stage, compute.micro_batch
        batch, place = divmod(number, self._per_batch)
        weights, is_loss = self._weights[stage], stage == self._last_stage and compute.kind == "F"
        if compute.kind == "F" and place == 0:
            self._state.begin(stage, batch)
        if compute.kind == "B":
            self._gradients[stage].use(batch)
        weights.use(min(self._version(compute), weights.newest))
        if is_loss:
            engine.total_loss = self._totals.pop(batch, None)
        engine.__dict__["_numbers_per_batch"] = self._per_batch
        runs_ahead = compute.kind == "F" and not self._is_trained_on(batch)
        try:
            if runs_ahead:
                with self._drawn_ahead.noted(batch), self._written_ahead.noted(batch):
                    self._attempt.execute(compute)
            else:
                self._attempt.execute(compute)
        finally:
            engine.__dict__["_numbers_per_batch"] = 0
        if is_loss:
            self._totals[batch], engine.total_loss = engine.total_loss, None
            if place + 1 == self._per_batch:
                self._losses[batch] = self._mean_loss(batch)
                if batch == self.num_trained and self._is_trained_on(batch):
                    self._tell_loss(batch)
        if compute.kind == "B":
            self._oldest[stage] = number + 1
            self._attempt.forget(stage, number)
            self._let_go(weights)

    def _version(self, compute: Compute) -> int:
        if self._mode == NONE:
            return self._weights[compute.stage].newest
        return self.program.version(self._mode, compute.stage, compute.micro_batch)

    def _needed(self, weights: Weights) -> int:
        """The oldest version that micro-batches in flight, or still to come, use on stages with these weights."""
        if self._mode == NONE:
            return weights.newest
        stages = (stage for stage, each in self._weights.items() if each is weights)
        return min(self.program.version(self._mode, stage, self._oldest[stage]) for stage in stages)

    def _let_go(self, weights: Weights) -> None:
        weights.let_go(self._needed(weights))

    def _mean_loss(self, batch: int) -> float:
        total = self._totals.pop(batch)
        if total is None:
            return float("nan")
        return float(self._engine._scale_loss_by_gas(total))

    def _tell_loss(self, batch: int) -> None:
        """Tell the loss of a batch of which the call has come, once; nothing where it was not computed."""
        assert self._meetings is not None
        if self._has_told_loss < batch:
            self._has_told_loss = batch
            self.loss = self._meetings.tell_loss(self._losses.pop(batch, math.nan))

    def _is_trained_on(self, batch: int) -> bool:
        return batch < self.num_trained + (self._meeting is not None)

    def _post_norm(self, batch: int) -> None:
        """Begin to add up the norm of all gradients of a batch, which its update waits for."""
        engine: Any = self._engine
        assert self._meetings is not None
        for gradients in self._gradients.values():
            gradients.use(batch)
        engine.end_batch(steps=False)
        if engine.before_optimizer_step is not None:
            with engine.around_updates(), self._behind(batch):
                engine.before_optimizer_step()
        squares, is_part = squares_of_gradients(engine)
        self._norms[batch] = self._meetings.begin_sum(
            squares if is_part else squares / self._meetings.num_pipelines
        )

    def _clip(self, batch: int) -> torch.Tensor:
        """Clip by the norm of all gradients of a batch; return it."""
        total, work = self._norms.pop(batch)
        work.wait()
        norm = math.sqrt(float(total))
        if not norm <= self._engine.gradient_clipping():
            scale_gradients(self._engine, self._engine.gradient_clipping() / (norm + 1e-6))
        return torch.tensor(norm)

    def _update(self, batch: int) -> None:
        """Step the optimizer with the gradients of a batch: a new version of the weights of this rank."""
        engine: Any = self._engine
        settings, steps, samples = self._of_batch.pop(batch)
        for gradients in self._gradients.values():
            gradients.use(batch)
        for weights in self._all_weights():
            weights.next(keeps=self._needed(weights) <= batch)
        present = engine.global_steps, engine.global_samples, engine.lr_scheduler
        engine.global_steps, engine.global_samples, engine.lr_scheduler = steps, samples, None
        try:
            with (
                engine.around_updates(),
                self._behind(batch),
                self._settings.applied(settings),
                counts_kept(self._parameters),
                norms_of_this_rank(engine.optimizer),
                clipped_already(engine.optimizer) if self.clips_by_all else nullcontext(),
            ):
                norm = self._clip(batch) if self.clips_by_all else None
                engine.end_batch(reduces=not self.clips_by_all)
                if norm is not None:
                    engine._global_grad_norm = norm
        finally:
            engine.global_steps, engine.global_samples, engine.lr_scheduler = present
        for gradients in self._gradients.values():
            gradients.used()
        for weights in self._all_weights():
            weights.updated()
            self._let_go(weights)

    @contextmanager
    def _behind(self, batch: int) -> Iterator[None]:
        """Let the engine know, for what it calls meanwhile, how long ago the call of a batch was."""
        self._engine.steps_behind = self.num_trained - batch
        try:
            yield
        finally:
            self._engine.steps_behind = 0

    def _all_weights(self) -> list[Weights]:
        return list({id(each): each for each in self._weights.values()}.values())

    # The end of a run

    def _drain(self) -> None:
        """Run what is left of the run; nothing is in flight afterwards."""
        run, engine = self._run, self._engine
        assert run is not None and self._meetings is not None
        self._meeting = None
        if engine.step_watch is not None:
            engine.step_watch.batches.rests()
        self._run_all(run.rest())
        engine._transfers.finish()
        self._meetings.finish()
        said = gather_objects((self._attempt.has_failed, has_changed()))
        if any(fails for fails, _ in said):
            self._raise_failure()
        self._run = None
        for stage, weights in self._weights.items():
            weights.use(weights.newest)
            weights.let_go(weights.newest)
            self._gradients[stage].forget()
            engine.module._num_forwards[stage] = self._num_forwards[stage] + self.num_trained * self._per_batch
        engine.module.micro_offset = engine.module._num_forwards[engine.module._shown]
        self._norms.clear()
        self._state.put_back(self.num_trained)
        self._drawn_ahead.put_back(self.num_trained)
        self._written_ahead.tell(self.num_trained)
        engine.total_loss = None
        engine.batch_state.clear()
        engine.let_batch_go()
        if any(changes for _, changes in said):
            tell_unlike_values(engine.grid.data_parallel_id)

    def _unused(self) -> list[Any]:
        """The micro-batches that were read for batches that were not trained on."""
        return [
            item for number, item in sorted(self._items.items()) if number >= self.num_trained * self._per_batch
        ]

    # Errors

    def _fail_at_next_meeting(self) -> NoReturn:
        """Go on without computing until all ranks have heard of what this one has met; raise it with them."""
        assert self._run is not None and self._meetings is not None
        self.num_trained += 1
        outcome = self._meet(Facts(fails=True)).outcome
        if outcome.trains:
            expected = self._meetings.expect_loss()
            self._of_batch[self.num_trained] = self._settings.now(), 0, 0
            self._run_all(self._run.segment())
            if expected is None:
                self._tell_loss(self.num_trained)
            else:
                self._meetings.told_loss(expected)
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        """Raise what the first rank has met, on every rank; the engine goes on no more."""
        engine, attempt = self._engine, self._attempt
        found = [each for each in gather_objects(attempt.told_failure()) if each is not None]
        watch.forget_failures()
        for weights in self._all_weights():
            weights.use(weights.newest)
        announce(LOST_UPDATES, logging.WARNING)
        first = min(found, key=lambda each: (each.order, each.rank))
        self._run = None
        engine._lockstep.end_together(
            f"a batch before ended with {in_words(first.error)}, met by rank {first.rank} in {first.place}, while "
            "other batches were in flight"
        )
        raise_everywhere(first, attempt.failure)


RESTS_ON_ALL = (
    "the stages finish their batches together, so call come_to_rest on every rank, and not under a condition such "
    "as `if rank == 0`"
)
LOST_UPDATES = (
    "an error has ended training while batches were in flight: their updates are lost, and weights of different "
    "stages are of different updates. Go on from a checkpoint"
)
FROZEN_IN_FLIGHT = (
    "requires_grad of a weight was changed between two calls of train_batch, while batches are in flight whose "
    "gradients it is to have, or not: call engine.come_to_rest() on every rank before it is changed"
)
ANOTHER_ITERATOR = (
    "train_batch was given another iterator while forwards run ahead on what was read from the one before: call "
    "engine.come_to_rest() on every rank first, which gives these micro-batches back"
)


def _trainable(module: Any, stage: int) -> list[nn.Parameter]:
    """The parameters of a stage of this rank that train, each once."""
    first, last = module.allocation.stages[stage].layers
    held = held_modules(module)
    found: dict[int, nn.Parameter] = {}
    for part in all_that_moves(module):
        if part.name in held and first <= part.layers[0] < last:
            found.update({id(each): each for each in held[part.name].parameters() if each.requires_grad})
    return list(found.values())
