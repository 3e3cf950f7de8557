"""What comes of batches: the last stage knows, and every rank of the pipeline learns it."""

from __future__ import annotations

import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.runtime.collectives import broadcast_object, gather_objects, portable
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.first_failure import raised_by_all
from lightning_madpipe.steps.batch_runs import BatchRun
from lightning_madpipe.steps.changed_batches import Changed, change_alike, joined_changes, shown
from lightning_madpipe.steps.list_in_words import some
from lightning_madpipe.steps.logged_sizes import LoggedSizes
from lightning_madpipe.steps.loss_mode import LossOfBatches
from lightning_madpipe.steps.metrics import MetricValue
from lightning_madpipe.steps.own_generators import States
from lightning_madpipe.steps.recorded_calls import Call, make, merged
from lightning_madpipe.steps.serialization import packed, pickled, unpacked
from lightning_madpipe.steps.step_results import StepResult, result_of
from lightning_madpipe.steps.step_side_effects import Change, Leftovers, make_changes
from lightning_madpipe.steps.user_step import UserSteps
from lightning_madpipe.steps.written_files import OPENED_BEFORE

MOST_REPEATS = 100
"""What a line names of that a step does for each micro-batch; a step may make new attributes for ever."""


class Outcome(NamedTuple):
    """What a run of the pipeline comes to, as the last stage tells it to the others."""

    results: list[StepResult]
    changes: list[Change]
    calls: list[Call]
    should_stop: bool
    error: Exception | None
    draws: States
    """The states in which the steps have left the program's own random generators."""
    batches: list[dict[int, Tensor]]
    """The tensors of each batch that its step has changed in place, by their places in it."""
    contents: list[list[Changed]]
    """What its step has put into each batch, taken out and replaced."""
    tells_elsewhere: bool = False
    """Whether steps have told a metric that is sent to no other rank."""


class Outcomes:
    """Shares what steps have returned, logged, called and changed with every rank of the pipeline.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        pipeline: Its pipeline.
        engine: The pipeline's engine.
        steps: Runs the user's steps.
        losses: Knows how logged values of micro-batches become that of a batch.
        refusal: The host's exception with a sentence.
    """

    def __init__(
        self,
        trainer: Any,
        module: Any,
        pipeline: PipelineModule,
        engine: MadPipeEngine,
        steps: UserSteps,
        losses: LossOfBatches,
        refusal: Callable[[str], Exception],
    ) -> None:
        self._trainer, self._module, self._pipeline, self._engine = trainer, module, pipeline, engine
        self._steps, self._losses, self._refusal = steps, losses, refusal
        self._device = engine.device
        self._told: set[str] = set()
        self._told_repeats: dict[str, set[str]] = defaultdict(set)
        self._logged_sizes: dict[str, LoggedSizes] = {}
        self._before: Leftovers | None = None
        self._changes: list[Change] = []
        """What the steps of the batch had changed before an update came between them."""
        self._tells_of_files = True
        self._undo: Callable[[], object] | None = None
        """Undoes what the steps of a batch that is given up have left on the module."""

    def begin(self) -> None:
        """Forget what was before another batch: the rank that ran whole steps then may not do so now."""
        self._before = self._undo = self._steps.before_batch = None
        self._engine.when_given_up = None
        self._steps.told_elsewhere.begin()

    def remember(self) -> None:
        """Remember what the module is before the steps, on the rank that runs whole steps, once that is known."""
        engine, is_cut = self._engine, self._pipeline.num_stages > 1
        undoable = engine.may_run_again
        may_be_undone = self._steps.watches and self._steps.gives_up and torch.is_grad_enabled()
        self._changes = []
        before = None
        if is_cut or undoable or may_be_undone:
            before = self._steps.leftovers(undoable=undoable, may_be_undone=may_be_undone)
        self._before = before if is_cut else None
        self._steps.before_batch = before
        if self._tells_of_files:
            self._steps.open_files.begin({} if before is None else self._steps.beside.files)
        self._undo = before.undo if before is not None and may_be_undone else None
        engine.when_given_up = before.undo if before is not None and undoable else None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Take nothing of what runs meanwhile for a change by the steps of the batch: hooks run on each rank."""
        if self._before is None:
            yield
            return
        step = "training_step"
        self._changes += _as_they_are(self._taken_changes(step), self._device)
        try:
            yield
        finally:
            self._before = self._steps.before_batch = self._steps.leftovers()

    def forget(self) -> None:
        """Forget what the module was before the steps: nothing of them stays."""
        self._before = None
        self._left_on_layers()

    def _left_on_layers(self) -> list[Change]:
        states = self._steps.call_states
        return [] if states is None else states.left()

    def undo(self) -> None:
        """Undo what the steps of a batch that is given up have left on the module."""
        if self._undo is not None:
            self._undo()
        self._left_on_layers()
        self._before = self._undo = None

    def share_with_pipeline(self, window: Sequence[BatchRun]) -> list[StepResult]:
        """Share the results of the window's batches, and all other traces, with every rank of the pipeline.

        Raises:
            Exception: why what a step returned has no result, on every rank; in training on all pipelines'.
        """
        step = window[0].whole.step
        outcome = self._outcome(window, step) if self._engine.is_last_stage() else None
        if self._pipeline.num_stages > 1:
            grid = self._pipeline.mpu()
            last = grid.stage_to_global(self._pipeline.stage_owner(self._pipeline._num_layers - 1))
            parcel = b""
            if outcome is not None:
                outcome, parcel = self._with_parcel(outcome, step)
            parcel = broadcast_object(parcel, last, grid.get_pipe_parallel_group())
            if outcome is None:
                outcome = unpacked(pickle.loads(parcel), self._device)
                make_changes(self._module, outcome.changes, self._steps.beside, self._steps.reached_objects())
                for run, changed in zip(window, outcome.batches, strict=False):
                    for place, left in changed.items():
                        _write(run.tensors[place], left)
        assert outcome is not None, "the last stage has it and sends it"
        for run, contents in zip(window, outcome.contents, strict=False):
            change_alike(run.given, contents)
        self._steps.draws.put(outcome.draws)
        self._steps.told_elsewhere.learn(outcome.tells_elsewhere)
        if step == "training_step":
            outcome = outcome._replace(error=self._error_anywhere(outcome.error))
        if outcome.error is not None:
            raise raised_by_all(outcome.error)
        if outcome.should_stop:
            self._trainer.should_stop = True
        if self._trainer.is_global_zero:
            for call in outcome.calls:
                make(call, self._module, self._device)
        return outcome.results

    def _outcome(self, window: Sequence[BatchRun], step: str) -> Outcome:
        rules = self._losses.log_rules if step == "training_step" else {}
        error: Exception | None = None
        results: list[StepResult] = []
        try:
            results = [result_of(run.done, rules, self._sizes_of(step)) for run in window]
        except ValueError as raised:
            error = self._refusal(f"{raised}{self._way_to_one_run(step)}")
        changes = [*self._changes, *self._taken_changes(step)]
        changes += self._left_on_layers()
        self._before = self._steps.before_batch = None
        self._changes = []
        if len(window[0].done) > 1:
            self._tell_of_repeats(window[0], step, changes)
        self._tell_of_files(step)
        if self._pipeline.num_stages > 1:
            self._steps.beside.tell_of_caches(step)
        calls = [call for run in window for call in self._calls_of(run, step)]
        batches = [_written_back(run) for run in window]
        draws = self._steps.draws.left()
        contents = [joined_changes(run.done, self._say) for run in window]
        if any(contents[:-1]):
            self._say(
                f"{step} changes what its batch holds ({_names_in(contents)}), and with accumulate_grad_batches "
                "it runs at the end of the window: hooks such as on_train_batch_end see it of the last batch of a "
                "window only. Use it in the step, or do not accumulate"
            )
        return Outcome(
            results, changes, calls, self._stops(window, step), error, draws, batches, contents,
            self._steps.told_elsewhere.look(),
        )  # fmt: skip

    def _way_to_one_run(self, step: str) -> str:
        """The option with which a step that has run for each micro-batch runs once for a batch, in words."""
        # Other steps run once unless the loss is a mean, or outputs cannot be joined.
        by_loss = step == "training_step" or self._losses.option == "mean"
        option = "loss='batch'" if by_loss else "num_micro_batches=1"
        return f"; or MadPipeStrategy({option}) runs {step} once per batch"

    def _tell_of_repeats(self, run: BatchRun, step: str, changes: Sequence[Change]) -> None:
        """Say once what a step does for each micro-batch, where no trial compares that with the batch."""
        is_mean = self._losses.option == "mean"
        untried = set(self._steps.untried(step, changes))
        names = list(dict.fromkeys(str(change.place) for change in changes if change.place in untried))
        if is_mean:
            names += dict.fromkeys(f"self.log({call['name']!r})" for call in run.done[0].log_calls)
        told = self._told_repeats[step]
        names = [name for name in names if name not in told]
        if not names or len(told) > MOST_REPEATS:
            return
        told.update(names)
        under = "with loss='mean' " if is_mean else ""
        auto = "loss='auto' names what differs from one process; " if is_mean else ""
        warn_once(
            f"repeats/{type(self._module).__name__}/{step}/{names}",
            f"{under}{step} runs once for each of the {len(run.done)} micro-batches of a batch, and what it "
            f"leaves is not compared with a run on the batch ({some(names)}): a count grows as often, a list gets "
            "as many entries, and what is logged is merged by its reduce_fx, means by samples. "
            f"{auto}loss='batch' runs the step once per batch",
        )

    def _tell_of_files(self, step: str) -> None:
        names = self._steps.open_files.written() if self._tells_of_files else []
        if names:
            self._tells_of_files = False
            self._steps.open_files.forget()
            key = f"open files/{type(self._module).__name__}/{step}/{names[0]}"
            warn_once(key, OPENED_BEFORE.format(step=step, names=some(names)))

    def _calls_of(self, run: BatchRun, step: str) -> list[Call]:
        """The calls of loggers and of ``self.print`` by a batch's step, which makes them once in one process."""
        calls = [micro_batch.calls for micro_batch in run.done]
        to_loggers = [[call for call in each if call.logger is not None] for each in calls]
        if len(calls) == 1 or not any(to_loggers):
            return [call for each in calls for call in each]
        once = merged(to_loggers, [micro_batch.size for micro_batch in run.done])
        names = list(dict.fromkeys(str(call) for each in to_loggers for call in each))
        does = (
            f"for each of the {len(calls)} micro-batches of a batch, with what that has"
            if once is None
            else "once per batch, with the mean of each number over micro-batches, weighted by samples"
        )
        warn_once(
            f"calls/{step}/{names}/{once is None}",
            f"{step} calls {some(names)} itself, and runs once per micro-batch: rank 0 makes each call {does}. "
            "self.log gives what the batch has; MadPipeStrategy(loss='batch') runs training_step once per batch",
        )
        printed = [call for each in calls for call in each if call.logger is None]
        return [call for each in calls for call in each] if once is None else [*printed, *once]

    def _sizes_of(self, step: str) -> LoggedSizes:
        if step not in self._logged_sizes:
            known = self._losses.logged_sizes if step == "training_step" else LoggedSizes()
            known.tell = lambda sentence: self._say(f"{step} {sentence}")
            self._logged_sizes[step] = known
        return self._logged_sizes[step]

    def _taken_changes(self, step: str) -> list[Change]:
        """What steps have changed since :meth:`remember`, and say what of it other ranks do not see."""
        changes = [] if self._before is None else self._before.changes()
        for kind in [] if self._before is None else self._before.changed_objects():
            self._say(
                f"{step} changes a {kind}, and objects of this class are not sent to the other ranks: keep what "
                "they shall know in attributes of the module, as numbers, tensors, lists or dataclasses of them, "
                "or as torchmetrics metrics that are attributes themselves, or in an nn.ModuleList"
            )
        for place, holder in self._held_by_layers(changes):
            self._say(
                f"{step} changes {place} in place, which is {holder} of a layer, too: in a pipeline layers see "
                "that after some micro-batches on the last stage, and after the batch on the others, and not when "
                "the step of one process does. Change it in a hook, such as on_train_batch_end; after "
                f"{self._steps.call.called} a run with MadPipeStrategy(loss='batch') or num_micro_batches=1 "
                "also does as one process does"
            )
        return changes

    def _stops(self, window: Sequence[BatchRun], step: str) -> bool:
        """Whether the fit ends: a step has set ``trainer.should_stop`` for a whole batch."""
        asked = [[micro_batch.stops for micro_batch in run.done] for run in window]
        if any(any(each) and not all(each) for each in asked):
            warn_once(
                f"stops/{step}",
                f"{step} sets trainer.should_stop for some micro-batches of a batch and not for the others, and "
                "in one process it sees the whole batch: training goes on until it is set for all of them. Set it "
                "in on_train_batch_end, by what is logged, or let MadPipeStrategy(loss='batch') run the step once "
                "per batch",
            )
        return self._trainer.should_stop or any(all(each) for each in asked)

    def _held_by_layers(self, changes: Sequence[Change]) -> list[tuple[str, str]]:
        """The attributes that were changed in place and that one of a layer names, too, each with that one."""
        of_layers = self._steps.changed_by_layers
        found = [
            each
            for each in changes
            if each.kind in ("refill", "extend")
            and each.place.kind == "attribute"
            and str(each.place) not in of_layers
        ]
        if not found:
            return []
        held = {
            id(value): f"self.{path}.{name}"
            for path, part in self._module.named_modules()
            if part in self._pipeline.elsewhere.inside
            for name, value in vars(part).items()
        }
        owners = ((place, vars(self._module.get_submodule(place.owner))) for place, *_ in found)
        return [
            (str(place), held[id(table[place.name])]) for place, table in owners if id(table[place.name]) in held
        ]

    def _with_parcel(self, outcome: Outcome, step: str) -> tuple[Outcome, bytes]:
        """Return ``outcome`` itself and as bytes for other processes, without what cannot leave this one."""
        if outcome.error is not None:
            return outcome, pickle.dumps(
                Outcome([], [], [], outcome.should_stop, portable(outcome.error), {}, [], [])
            )
        sent = packed(outcome)
        parcel, _ = pickled(sent)
        if parcel is not None:
            return outcome, parcel
        changes = [change for change in sent.changes if self._can_leave(f"{change.place}, set by {step},", change)]
        calls = [call for call in sent.calls if self._can_leave(f"{call}, called by {step},", call)]
        contents = [
            [each for each in batch if self._can_leave(f"{_names_in([[each]])}, set by {step},", each)]
            for batch in sent.contents
        ]
        parcel, reason = pickled(sent._replace(changes=changes, calls=calls, contents=contents))
        if parcel is not None:
            return outcome, parcel
        error = self._refusal(f"what {step} returns cannot be sent to the other ranks ({reason})")
        return self._with_parcel(outcome._replace(error=error), step)

    def _can_leave(self, what: str, value: Any) -> bool:
        parcel, reason = pickled(value)
        if parcel is None:
            self._say(
                f"{what} cannot be sent to the other ranks of the pipeline ({reason}): it stays on the last "
                "stage, which alone runs the whole step"
            )
        return parcel is not None

    def _say(self, sentence: str) -> None:
        """Warn once, on this rank, which alone knows it."""
        if sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(f"madpipe: {sentence}", stacklevel=2)

    def _error_anywhere(self, error: Exception | None) -> Exception | None:
        """Return this pipeline's error, or else another one's: no rank makes an optimizer step alone."""
        grid = self._pipeline.mpu()
        group = grid.get_data_parallel_group()
        if grid.get_data_parallel_world_size() == 1:
            return error
        failed = torch.tensor(int(error is not None), device=self._device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed:
            return None
        errors = gather_objects(None if error is None else portable(error), group)
        return error or next(theirs for theirs in errors if theirs is not None)

    def log_again(self, result: StepResult, batch: Any) -> None:
        """Log what a step has logged for a batch, on this rank.

        Where it has given no ``batch_size``, the host finds one in the batch, and says so where that is in doubt.
        """
        results = self._trainer._results
        with _batch_of_logs(results, batch) if results is not None else nullcontext():  # predict has none
            for log_call in result.log_calls:
                value = log_call["value"]
                if isinstance(value, MetricValue):
                    metric = self._module.get_submodule(value.path)
                    metric._forward_cache = value.batch_value  # what Lightning takes for the value on_step
                    log_call = {**log_call, "value": metric}
                self._module.log(**log_call)


@contextmanager
def _batch_of_logs(results: Any, batch: Any) -> Iterator[None]:
    """Let Lightning (2.5 to 2.6) weight what is logged by this batch: those of a window are logged at its end."""
    before = results.batch, results.batch_size
    results.batch, results.batch_size = batch, None
    try:
        yield
    finally:
        if before[0] is not batch:
            results.batch, results.batch_size = before


def _names_in(contents: Sequence[Sequence[Changed]]) -> str:
    """The expressions that find in a batch what a step has changed."""
    changes = [change for batch in contents for change in batch]
    return some(
        list(dict.fromkeys(shown((*path, key)) for path, gone, _, new, _ in changes for key in (*gone, *new)))
    )


def _as_they_are(changes: list[Change], device: torch.device) -> list[Change]:
    """Copies of changes, of which what changes later is no part; themselves where they cannot be copied."""
    parcel, _ = pickled(packed(changes))
    return changes if parcel is None else unpacked(pickle.loads(parcel), device)


def _written_back(run: BatchRun) -> dict[int, Tensor]:
    """Write into a batch what its step has changed in place in copies of it; return those of its tensors.

    A loader may give the same tensors again, and hooks see the batch after its step.
    """
    for micro_batch in run.done:
        for own, left in micro_batch.changed.values():
            _write(own, left)
    return {place: run.tensors[place] for micro_batch in run.done for place in micro_batch.changed}


def _write(tensor: Tensor, left: Tensor) -> None:
    if tensor.data_ptr() != left.data_ptr():
        with torch.no_grad():
            tensor.copy_(left)
