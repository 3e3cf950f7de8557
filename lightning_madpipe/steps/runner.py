"""Batches of Lightning through the pipeline, and what comes of them on every rank of it."""

from __future__ import annotations

import itertools
import logging
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.runtime.collectives import gather_objects, portable, reduced
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.first_failure import in_words, is_raised_by_all, raised_by_all
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.steps.batch_runs import BatchRun, Piece, SamplesSelectedError
from lightning_madpipe.steps.batches import (
    batch_size_of,
    fingerprint_of,
    named_tensors_of,
    shapes_of,
    split_batch,
)
from lightning_madpipe.steps.forward_reads import ForwardWatch, Read
from lightning_madpipe.steps.layer_structure import Structure
from lightning_madpipe.steps.loss_mode import LossOfBatches
from lightning_madpipe.steps.loss_signs import UntriedLossError
from lightning_madpipe.steps.metrics import MetricValue
from lightning_madpipe.steps.random_numbers import RandomNumbers
from lightning_madpipe.steps.recorded_calls import Call, make
from lightning_madpipe.steps.serialization import packed, pickled, unpacked
from lightning_madpipe.steps.step_side_effects import Change, Leftovers, make_changes
from lightning_madpipe.steps.user_step import MicroBatch, StepResult, UserSteps, result_of

BATCH_END_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}
"""The hook that is given what the step returned."""
AGREE_EVERY = 128
"""The number of batches after which ranks compare again what they read."""


class Outcome(NamedTuple):
    """What a run of the pipeline comes to, as the last stage tells it to the others."""

    results: list[StepResult]
    changes: list[Change]
    calls: list[Call]
    should_stop: bool
    error: Exception | None


class BatchRunner:
    """Runs the batches of one fit, validate, test or predict.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        pipeline: Its pipeline.
        engine: The pipeline's engine.
        steps: Runs the user's steps.
        num_micro_batches: Pieces of a Lightning batch.
        base_seed: The same on every rank.
        batch_numbers: Counts batches, alike on all ranks.
        lightning: The package of the module's class.
        check_layers: Called once in each mode, and where something has changed that ``forward`` reads, with what a
            step gives ``forward`` for the first micro-batch, the samples of each micro-batch, and what has
            changed; gives what ``forward`` reads.
        call_hooks: Called when the gradients of a step are there, and what its batches did is known.
        loss: How the loss of a batch comes from its micro-batches, see ``LossOfBatches``.
    """

    def __init__(
        self,
        *,
        trainer: Any,
        module: Any,
        pipeline: PipelineModule,
        engine: MadPipeEngine,
        steps: UserSteps,
        num_micro_batches: int,
        base_seed: int,
        batch_numbers: Iterator[int],
        lightning: Lightning,
        check_layers: Callable[[Sequence[Any], Sequence[int], Sequence[str]], Collection[Read]],
        call_hooks: Callable[[], None],
        loss: str,
    ) -> None:
        self.steps = steps
        self._trainer, self._module, self._pipeline, self._engine = trainer, module, pipeline, engine
        self._num_micro_batches = num_micro_batches
        self._base_seed, self._batch_numbers = base_seed, batch_numbers
        self._lightning, self._call_hooks, self._refusal = lightning, call_hooks, lightning.refusal
        self._check_layers = check_layers
        self._watches: dict[bool, ForwardWatch] = {}
        self._structure = Structure(module, pipeline, engine, trainer.strategy.wraps_optimizer, self._refusal)
        self._window: list[BatchRun] = []
        self._loss_option = loss
        self._losses = LossOfBatches(
            option=loss,
            num_micro_batches=num_micro_batches,
            module=module,
            pipeline=pipeline,
            engine=engine,
            steps=steps,
            forward=self._forward_only,
            again=self._uneven,
            refusal=self._refusal,
        )
        self._device = engine.device
        self._last_loss = torch.zeros((), device=self._device)
        self._rehearsed: set[str] = set()
        self._evaluated: set[str] = set()
        self._read: dict[str, bool] = {}
        self._told: set[str] = set()
        self._num_read: Counter[str] = Counter()
        is_cut = pipeline.num_stages > 1
        self._random_numbers = RandomNumbers(pipeline.mpu().get_pipe_parallel_group() if is_cut else None)
        self._random_numbers.make_alike()
        self._before: Leftovers | None = None
        self._undo: Callable[[], object] | None = None
        """Undoes what the steps of a batch that is given up have left on the module."""
        self._results: list[StepResult] = []
        self.begins = True
        """Whether the next batch is the first of an epoch."""

    @property
    def draws(self) -> tuple[int, int]:
        """What the random numbers of the next batch are drawn with: the base seed, and the batch's number."""
        number = next(self._batch_numbers)
        self._batch_numbers = itertools.count(number)
        return self._base_seed, number

    @draws.setter
    def draws(self, draws: tuple[int, int]) -> None:
        base_seed, number = draws
        self._base_seed, self._batch_numbers = base_seed, itertools.count(number)

    def begin_training_epoch(self) -> None:
        """Forget the batches of a step that the epoch before did not come to, where a hook ended it with -1."""
        self.begins, self._window = True, []

    # The two ways through the pipeline

    def train(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Collect the micro-batches of ``batch``; with the last batch of an optimizer step, run them all.

        Returns:
            The loss of ``batch`` on this pipeline, in a dict with what else the step returned if somebody reads
            that; the same on each of its ranks. While batches are being collected: the loss of the last one
            before, 0 where there is none.
        """
        with self._random_numbers.of_layers():
            return self._train(batch, arguments)

    def _train(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        engine, trainer = self._engine, self._trainer
        self._window.append(self._run_of("training_step", batch, arguments))
        if trainer.fit_loop._should_accumulate():
            return self._last_loss
        window, self._window = self._window, []
        # A rank that has met an error since the last step says so where the others begin the next one.
        self._structure.check()
        watch = self._watches.get(self._module.training)
        changed = [] if watch is None else watch.changed()
        if engine.meet(sum(len(run.micro_batches) for run in window), asks=bool(changed)):
            self._compare_layers(window[0], changed)
        self._losses.prepare(window)
        while not self._is_trained_on(window):
            self._losses.look_again(window)
        result = self._results[-1]
        self._last_loss = torch.tensor(result.loss, device=self._device)
        if isinstance(result.returned, Mapping):
            return {**result.returned, "loss": self._last_loss}
        return self._last_loss

    def _is_trained_on(self, window: Sequence[BatchRun]) -> bool:
        """Whether the window's step has been made; else it was given up because its loss is to be tried."""
        engine, trainer = self._engine, self._trainer
        scale = engine.gradient_accumulation_steps() / trainer.accumulate_grad_batches
        for run in window:
            run.whole.loss_scale = scale
            for micro_batch in run.micro_batches:
                share = micro_batch.size / run.whole.size if micro_batch.share is None else micro_batch.share
                micro_batch.loss_scale = share * scale
        in_order = [label for run in window for label in run.labels]
        engine.micro_batches = len(in_order)
        if engine.global_steps == 0:
            first = window[0].micro_batches[0]
            engine.set_train_micro_batch_size(first.size)  # known now; the plan's chain names it
        engine.before_optimizer_step = lambda: self._before_optimizer_step(window)
        engine.around_measurements = lambda: self._measurement(in_order)
        try:
            with self._announced_shapes(window):
                engine.train_batch(self._feed(in_order))
        except UntriedLossError as flaw:
            if not is_raised_by_all(flaw):
                raise
            if self._undo is not None:
                self._undo()
            self._before = self._undo = None
            return False
        return True

    def evaluate(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Run ``batch`` through the pipeline.

        Returns:
            What the step returned, joined over the micro-batches, if somebody reads it; else its loss, or None.
        """
        begins = self.begins
        with self._random_numbers.of_layers():
            run = self._run_of(step, batch, arguments)
            if begins:
                self._compare_if_changed(run)
            # In inference mode, which Lightning may have entered, the engine would allocate buffers that
            # training cannot use.
            with torch.inference_mode(False), torch.no_grad():
                self._go_forward(run)
                [result] = self._share([run])
        self._log_again(result)
        if self._read[step]:
            return result.returned
        return None if result.loss is None else torch.tensor(result.loss, device=self._device)

    def _go_forward(self, run: BatchRun) -> None:
        with self._announced_shapes([run]):
            self._engine.eval_batch(
                self._feed(run.labels),
                compute_loss=True,
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=len(run.micro_batches),
            )

    def _forward_only(self, run: BatchRun) -> str | None:
        """Take a batch through the pipeline, of which nothing stays; return what a layer raised on some rank."""
        with torch.inference_mode(False), torch.no_grad(), self.steps.rehearsal():
            try:
                self._go_forward(run)
            except SamplesSelectedError as flaw:
                raise self._refusal(f"{run.whole.step}: {flaw}") from None
            except Exception as flaw:
                if not is_raised_by_all(flaw):
                    raise
                return in_words(flaw)  # it comes again where it is told, if it is not for want of memory
            finally:
                self._before = None
        return None

    def _before_optimizer_step(self, window: Sequence[BatchRun]) -> None:
        """Let every rank have what the steps did, then call the hooks that see the gradients of all of it."""
        self._results = self._share(window)
        for result in self._results:
            self._log_again(result)
        self._call_hooks()

    # Micro-batches

    def _run_of(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> BatchRun:
        if self._is_to_agree(step):
            self._agree(step, batch)
        # Primes keep the seeds of ranks, batches and pieces apart.
        data_parallel_rank = self._pipeline.mpu().get_data_parallel_rank()
        seed = self._base_seed + 7919 * next(self._batch_numbers) + data_parallel_rank
        evaluates_once = step != "training_step" and self._loss_option != "mean"
        # The first one shows how outputs grow with the samples; all ranks cut it alike.
        run = self._cut(step, batch, arguments, seed, uneven=evaluates_once and step not in self._evaluated)
        run.runs_once = evaluates_once and len(run.micro_batches) > 1
        if run.runs_once:
            self._evaluated.add(step)
        if step not in self._rehearsed:
            # Every rank runs the step up to the pipeline once: what it cannot do is then an error on all
            # ranks, and not one error and a wait on the others.
            with self.steps.rehearsal(), self._pipeline.elsewhere.everything_hidden():
                inputs = self.steps.inputs(run.micro_batches[0])
            if self._module.training not in self._watches:
                self._compare_with(inputs, run, [])
            self._rehearsed.add(step)
        return run

    def _compare_if_changed(self, run: BatchRun) -> None:
        """Compare the layers again if what ``forward`` reads has changed. Collective over the job."""
        self._structure.check()
        watch = self._watches.get(self._module.training)
        if watch is not None and watch.is_needed:
            changed = watch.changed()
            if any(reduced([bool(changed)], dist.ReduceOp.MAX)):
                self._compare_layers(run, changed)

    def _compare_layers(self, run: BatchRun, changed: Sequence[str]) -> None:
        with self.steps.rehearsal(), self._pipeline.elsewhere.everything_hidden():
            inputs = self.steps.inputs(run.micro_batches[0])
        self._compare_with(inputs, run, changed)

    def _compare_with(self, inputs: Any, run: BatchRun, changed: Sequence[str]) -> None:
        with self.steps.rehearsal():
            sizes = [micro_batch.size for micro_batch in run.micro_batches]
            reads = self._check_layers(inputs if isinstance(inputs, tuple) else (inputs,), sizes, changed)
        mode = self._module.training
        if mode not in self._watches:
            self._watches[mode] = ForwardWatch(self._module, lambda: self._trainer.current_epoch, announce)
        self._watches[mode].begin(reads)

    def _cut(self, step: str, batch: Any, arguments: tuple[Any, ...], seed: int, *, uneven: bool) -> BatchRun:
        try:
            pieces = split_batch(batch, self._num_micro_batches, uneven=uneven)
        except ValueError as flaw:
            raise self._refusal(f"{step}: {flaw}") from None
        known: dict[str, Any] = {"step": step, "arguments": arguments, "keeps_returned": self._read[step]}
        micro_batches = [
            MicroBatch(
                data=piece,
                size=batch_size_of(piece),
                seed=seed + 15485863 * place,
                place=place,
                is_last=place == len(pieces) - 1,
                **known,
            )
            for place, piece in enumerate(pieces)
        ]
        return BatchRun(micro_batches, MicroBatch(data=batch, size=batch_size_of(batch), seed=seed, **known))

    def _uneven(self, run: BatchRun) -> BatchRun:
        whole = run.whole
        return self._cut(whole.step, whole.data, whole.arguments, whole.seed, uneven=True)

    def _feed(self, labels: Sequence[MicroBatch | Piece]) -> Iterator[tuple[Any, MicroBatch | Piece]]:
        """Yield what the engine reads: inputs, on the first stage, and each micro-batch itself as its labels."""
        is_first, is_last = self._engine.is_first_stage(), self._engine.is_last_stage()
        if is_last:
            self._remember()
        for label in labels:
            yield self.steps.inputs_of(label, is_last_stage=is_last) if is_first else None, label

    @contextmanager
    def _measurement(self, in_order: Sequence[MicroBatch | Piece]) -> Iterator[None]:
        with self.steps.rehearsal():
            yield
        # The first pipeline was measured alone. Its steps begin anew: they may gather something from the others.
        self._engine.set_dataiterator(self._feed(in_order))

    @contextmanager
    def _announced_shapes(self, window: Sequence[BatchRun]) -> Iterator[None]:
        """Let the engine send shapes with every micro-batch of a batch, where they differ within it.

        Otherwise it sends them once per batch.
        """
        engine = self._engine
        before = engine.dynamic_shape
        shapes = {shapes_of(micro_batch.data) for run in window for micro_batch in run.micro_batches}
        engine.dynamic_shape = before or len(shapes) > 1
        try:
            yield
        finally:
            engine.dynamic_shape = before

    def _is_to_agree(self, step: str) -> bool:
        """Whether ranks compare what they read now: at an epoch's begin, batches 2, 4, ..., 128, each 128th."""
        begins, self.begins = self.begins or step not in self._read, False
        self._num_read[step] = number = 1 if begins else self._num_read[step] + 1
        return number & (number - 1) == 0 if number < AGREE_EVERY else number % AGREE_EVERY == 0

    def _agree(self, step: str, batch: Any) -> None:
        """Find out who reads what steps return, and whether all read the same batch.

        Random augmentation may make the inputs differ, of which only the first stage's count. Where samples
        come in another order, every tensor differs. It costs a checksum of the batch and a small collective.
        """
        reads = self._somebody_reads(step)
        if self._pipeline.num_stages > 1:
            mine = fingerprint_of(batch), reads, self._num_batches(step)
            everyone = gather_objects(mine, self._pipeline.mpu().get_pipe_parallel_group())
            reads = any(theirs for _, theirs, _ in everyone)
            self._check_same_batch([tensors for tensors, _, _ in everyone], step, batch)
            self._check_same_number([number for _, _, number in everyone])
        self._read[step] = reads
        if reads and step == "training_step" and self._trainer.accumulate_grad_batches > 1:
            self._tell(
                "on_train_batch_end is given the loss and outputs of the last window of accumulate_grad_batches "
                "that is done, because all batches of a window run at its end"
            )

    def _num_batches(self, step: str) -> Any:
        """Return the number of batches of an epoch, as far as Lightning knows it."""
        trainer = self._trainer
        if step == "training_step":
            return trainer.num_training_batches
        if step == "validation_step":
            return trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return trainer.num_test_batches if step == "test_step" else trainer.num_predict_batches

    def _check_same_number(self, everyone: Sequence[Any]) -> None:
        if any(theirs != everyone[0] for theirs in everyone):
            said = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(everyone))
            raise self._refusal(
                f"the ranks of a pipeline read the same data, and their epochs have different numbers of batches "
                f"({said}): give all ranks the same loader"
            )

    def _check_same_batch(self, everyone: Sequence[Any], step: str, batch: Any) -> None:
        for rank, tensors in enumerate(everyone[1:], start=1):
            same_shapes = [shape for shape, _ in tensors] == [shape for shape, _ in everyone[0]]
            if not same_shapes or (tensors and not set(tensors) & set(everyone[0])):
                raise self._refusal(
                    f"ranks 0 and {rank} of a pipeline read different batches: use the Trainer's own "
                    "distributed sampler (use_distributed_sampler=True), or one that is seeded alike on all "
                    "ranks, and seed the generators of your own transforms alike, too"
                )
        differing = [
            name
            for (name, _), theirs in zip(named_tensors_of(batch), zip(*everyone, strict=True), strict=True)
            if len(set(theirs)) > 1
        ]
        if len(differing) > 1:
            self._tell(
                f"the ranks of a pipeline read different {', '.join(differing[:4])} in {step}: forward() gets "
                "those of the first stage, and the rest of the step those of the last. Where these belong "
                "together, as an image and its mask do, another model is trained: draw them from Python's, "
                "NumPy's or torch's common generators, or seed your own alike on all ranks"
            )

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            announce(f"madpipe: {sentence}", logging.WARNING)

    def _somebody_reads(self, step: str) -> bool:
        """Whether what ``step`` returns is worth sending: to a hook that is not Lightning's, or to the caller."""
        callbacks = self._trainer.callbacks
        if step == "predict_step":
            writer = self._lightning.module("callbacks").BasePredictionWriter
            if self._trainer.predict_loop.return_predictions or any(isinstance(c, writer) for c in callbacks):
                return True
        hooks = [getattr(owner, BATCH_END_HOOKS[step]) for owner in (self._module, *callbacks)]
        # A hook in an instance, such as a LambdaCallback's, is a plain function of the user's module.
        modules = [getattr(hook, "__module__", "") or "" for hook in hooks]
        return not all(name.startswith(("pytorch_lightning.", "lightning.pytorch.")) for name in modules)

    # What comes of a batch

    def _remember(self) -> None:
        """Remember what the module is before the steps, on the rank that runs whole steps, once that is known."""
        engine, is_cut = self._engine, self._pipeline.num_stages > 1
        undoable = engine.may_run_again
        may_be_undone = self.steps.watches and torch.is_grad_enabled()
        before = None
        if is_cut or undoable or may_be_undone:
            before = self.steps.leftovers(undoable=undoable, may_be_undone=may_be_undone)
        self._before = before if is_cut else None
        self._undo = before.undo if before is not None and may_be_undone else None
        engine.when_given_up = before.undo if before is not None and undoable else None

    def _share(self, window: Sequence[BatchRun]) -> list[StepResult]:
        """Share the results of the window's batches, and all other traces, with every rank of the pipeline.

        Raises:
            Exception: why what a step returned has no result, on every rank; in training on all pipelines'.
        """
        step = window[0].whole.step
        outcome = self._outcome(window, step) if self._engine.is_last_stage() else None
        if self._pipeline.num_stages > 1:
            grid = self._pipeline.mpu()
            last = grid.stage_to_global(self._pipeline.stage_owner(self._pipeline._num_layers - 1))
            box = [b""]
            if outcome is not None:
                outcome, box[0] = self._with_parcel(outcome, step)
            dist.broadcast_object_list(box, src=last, group=grid.get_pipe_parallel_group())
            if outcome is None:
                outcome = unpacked(pickle.loads(box[0]), self._device)
                make_changes(self._module, outcome.changes)
        assert outcome is not None, "the last stage has it and sends it"
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
        in_order = [micro_batch for run in window for micro_batch in run.done]
        rules = self._losses.log_rules if step == "training_step" else {}
        error: Exception | None = None
        results: list[StepResult] = []
        try:
            results = [result_of(run.done, rules) for run in window]
        except ValueError as flaw:
            error = self._refusal(str(flaw))
        changes = [] if self._before is None else self._before.changes()
        for kind in [] if self._before is None else self._before.changed_objects():
            self._say(
                f"{step} changes a {kind}, and objects of this class are not sent to the other ranks: keep what "
                "they shall know in attributes of the module, as numbers, tensors, lists or dataclasses of them, "
                "or as torchmetrics metrics"
            )
        self._before = None
        calls = [call for micro_batch in in_order for call in micro_batch.calls]
        return Outcome(results, changes, calls, self._trainer.should_stop, error)

    def _with_parcel(self, outcome: Outcome, step: str) -> tuple[Outcome, bytes]:
        """Return ``outcome`` itself and as bytes for other processes, without what cannot leave this one."""
        if outcome.error is not None:
            return outcome, pickle.dumps(Outcome([], [], [], outcome.should_stop, portable(outcome.error)))
        sent = packed(outcome)
        parcel, _ = pickled(sent)
        if parcel is not None:
            return outcome, parcel
        changes = [change for change in sent.changes if self._can_leave(f"{change.place}, set by {step},", change)]
        calls = [call for call in sent.calls if self._can_leave(f"{call}, called by {step},", call)]
        parcel, flaw = pickled(sent._replace(changes=changes, calls=calls))
        if parcel is not None:
            return outcome, parcel
        error = self._refusal(f"what {step} returns cannot be sent to the other ranks ({flaw})")
        return self._with_parcel(outcome._replace(error=error), step)

    def _can_leave(self, what: str, value: Any) -> bool:
        parcel, flaw = pickled(value)
        if parcel is None:
            self._say(
                f"{what} cannot be sent to the other ranks of the pipeline ({flaw}): it stays on the last stage, "
                "which alone runs the whole step"
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

    def _log_again(self, result: StepResult) -> None:
        for log_call in result.log_calls:
            value = log_call["value"]
            if isinstance(value, MetricValue):
                metric = self._module.get_submodule(value.path)
                metric._forward_cache = value.batch_value  # what Lightning takes for the value on_step
                log_call = {**log_call, "value": metric}
            self._module.log(**log_call)
