"""Batches of Lightning through the pipeline, and what comes of them on every rank of it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed_partition.capture.sizes import ShapeError, way_of_sizes
from deepspeed_partition.code_names import does_nothing
from deepspeed_partition.dropped_writing import prints_asked
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.pipeline.drawn_data import Originals, OwnMemory
from deepspeed_partition.engine.runtime.collectives import raise_first, raised_together
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.first_failure import in_words, is_raised_by_all
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from deepspeed_partition.kept_weights import WRITTEN, weights_kept
from deepspeed_partition.planner.units import counted
from deepspeed_partition.planner.weight_versions import FLUSH
from deepspeed_partition.profiling.attributes import attributes_kept
from lightning_madpipe.compat.logged_values import note_first_window, note_waiting_batches
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.unsupported import (
    needs_two_samples,
    note_on_validation_within_window,
    notes_on_windows,
)
from lightning_madpipe.finding.captured_call import OtherCallError
from lightning_madpipe.steps.batch_runs import BatchRun, Piece, SamplesSelectedError
from lightning_madpipe.steps.batches import (
    copy_of_batch,
    normal_tensors,
    not_by_samples,
    refuse_lists_of_samples,
    shapes_of,
    size_of,
    split_batch,
    tensors_of,
)
from lightning_madpipe.steps.call_state import OtherStateError
from lightning_madpipe.steps.followed_calls import follow_step, key_of
from lightning_madpipe.steps.group_settings import GroupSettings
from lightning_madpipe.steps.layer_comparison import LayerComparison
from lightning_madpipe.steps.layer_structure import Structure
from lightning_madpipe.steps.list_in_words import some
from lightning_madpipe.steps.loss_mode import LossOfBatches
from lightning_madpipe.steps.loss_signs import UntriedLossError
from lightning_madpipe.steps.micro_batches import MicroBatch
from lightning_madpipe.steps.outcomes import Outcomes
from lightning_madpipe.steps.random_numbers import RandomNumbers
from lightning_madpipe.steps.same_batches import SameBatches
from lightning_madpipe.steps.step_results import StepResult
from lightning_madpipe.steps.user_step import UserSteps

SETS_WEIGHTS = (
    "a layer's forward() writes to its weights ({weights}): a pipeline runs it once for each micro-batch, so what "
    "it sets by its input it sets by the first micro-batch. If it sets them in its first call alone, let that be "
    "before fit: call the model once in __init__()"
)
UNDONE = (
    "; with ZeRO-1 and in half precision it must be, for the optimizer has a copy of the weights, which its step "
    "puts in the place of what forward() has written"
)


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
        comparison: Compares the layers with ``forward``.
        call_hooks: Called when the gradients of a step are there, and what its batches did is known; where the
            pipeline never drains that is during a later batch.
        loss: How the loss of a batch comes from its micro-batches, see ``LossOfBatches``.
        group_settings: Compares what ranks make of the settings of parameter groups; None: each has all layers.
        look_at_orders: Learns in which orders the program keeps copies of weights; called before each step.
        copies_have_changed: Whether copies of layers beside these may have changed on this rank.
        refuse_changed_copies: Refuses those that ranks have changed otherwise; collective.
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
        comparison: LayerComparison,
        call_hooks: Callable[[], None],
        loss: str,
        group_settings: GroupSettings | None,
        look_at_orders: Callable[[], None],
        copies_have_changed: Callable[[], bool],
        refuse_changed_copies: Callable[[], None],
    ) -> None:
        self.steps, self._group_settings = steps, group_settings
        self._look_at_orders = look_at_orders
        self._copies_have_changed, self._refuse_changed_copies = copies_have_changed, refuse_changed_copies
        self._trainer, self._module, self._pipeline, self._engine = trainer, module, pipeline, engine
        self._num_micro_batches = num_micro_batches
        self._base_seed, self._batch_numbers = base_seed, batch_numbers
        self._call_hooks, self._lightning, self._refusal = call_hooks, lightning, lightning.refusal
        self._comparison = comparison
        self._reading = SameBatches(trainer, module, pipeline, lightning)
        self._structure = Structure(module, pipeline, engine, trainer.strategy.wraps_optimizer, self._refusal)
        self._window: list[BatchRun] = []
        self._num_written = 0
        self._originals, self._num_kept = Originals(), 0
        self._epoch_begins = False
        self._is_told_of_windows = trainer.accumulate_grad_batches > 1
        self._loss_option = loss
        self._losses = LossOfBatches(
            option=loss,
            num_micro_batches=num_micro_batches,
            module=module,
            pipeline=pipeline,
            engine=engine,
            steps=steps,
            forward=self._forward_only,
            again=self._again,
            refusal=self._refusal,
        )
        self._device = engine.device
        self._last_trained: Any = None
        self._knows_lists = False
        self._rehearsed: set[Hashable] = set()
        self._evaluated: set[str] = set()
        is_cut = pipeline.num_stages > 1
        self._random_numbers = RandomNumbers(pipeline.mpu().get_pipe_parallel_group() if is_cut else None)
        self._random_numbers.make_alike()
        self._outcomes = Outcomes(trainer, module, pipeline, engine, steps, self._losses, self._refusal)
        self._results: list[StepResult] = []

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

    def follow_layers(self, group: Any) -> None:
        """Let the ranks of a pipeline know what steps have found out, when layers have moved. Collective.

        Args:
            group: The ranks.
        """
        self.steps.share_dims(group)
        self._structure.follow_layers()

    def _tell_of_windows(self) -> None:
        """Say once what hooks see otherwise, where one lets a fit accumulate that did not when it began."""
        if not self._is_told_of_windows:
            self._is_told_of_windows = True
            for note in notes_on_windows(self._trainer, self._module):
                self._lightning.warn(note)

    def begin_training_epoch(self) -> None:
        """Forget the batches of a step that the epoch before did not come to, where a hook ended it with -1."""
        self.begin_epoch()
        self.leave_window()
        self._epoch_begins = True
        self._originals.clear()

    def leave_window(self) -> None:
        """Forget batches that wait for others of their step, which do not come; say so."""
        waiting, self._window = self._window, []
        if waiting:
            left = counted(len(waiting), "batch")
            warn_once(
                f"window that was left/{type(self._module).__name__}",
                f"a window of accumulate_grad_batches was left unfinished, and {left} of it did not run: what "
                "they would have logged, or left in metrics and layers, is missing, and in one process it is "
                "there. Stop where a window ends",
            )

    def begin_epoch(self) -> None:
        """Let the next batch be the first of an epoch."""
        self._reading.begins = True
        if self.steps.call_states is not None:
            self.steps.call_states.look_again()

    # The two ways through the pipeline

    def train(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Collect the micro-batches of ``batch``; with the last batch of an optimizer step, run them all.

        Returns:
            The loss of ``batch`` on this pipeline, in a dict with what else the step returned if somebody reads
            that; the same on each of its ranks. While batches are being collected: that of the last one before,
            and a loss of 0 where there is none.
        """
        with self._random_numbers.of_layers():
            return self._train(batch, arguments)

    def _train(self, batch: Any, arguments: tuple[Any, ...]) -> Any:
        engine, trainer = self._engine, self._trainer
        if self._window and trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self.leave_window()  # its last batch was None, and one process forgets its gradients here, too
        drawn, comes_later = batch, trainer.fit_loop._should_accumulate() or engine.weight_versions != FLUSH
        if comes_later:
            batch = copy_of_batch(drawn)
        self._window.append(self._run_of("training_step", batch, arguments))
        self._window[-1].given = drawn
        if trainer.accumulate_grad_batches > 1:
            self._tell_of_windows()
            self._window[-1].note_progress(copy.deepcopy(trainer.fit_loop.epoch_loop.batch_progress))
        if comes_later:
            self._num_kept += 1
            self._window[-1].number = self._num_kept
            self._originals.note(self._num_kept, tensors_of(drawn), tensors_of(batch))
        captured = self._pipeline.call_of_module.captured
        self._window[-1].call = None if captured is None else captured.now
        waits = trainer.fit_loop._should_accumulate()
        note_waiting_batches(trainer, trainer.accumulate_grad_batches if waits else 0)
        is_first = self._last_trained is None
        note_first_window(trainer, trainer.accumulate_grad_batches if waits and is_first else 0)
        if waits:
            return torch.zeros((), device=self._device) if is_first else self._last_trained
        window, self._window = self._window, []
        # A rank that has met an error since the last step says so where the others begin the next one.
        self._structure.check()
        changed = self._comparison.changed()
        is_due = self._comparison.look_is_due(epoch_begins=self._epoch_begins) or bool(changed)
        self._epoch_begins = False
        self._look_at_orders()
        asks = self._copies_have_changed() or is_due or self._structure.has_turned
        if engine.meet(sum(len(run.micro_batches) for run in window), asks=asks):
            engine.come_to_rest()
            self._pipeline.elsewhere.share_trained()
            self._structure.has_turned = False
            self._refuse_changed_copies()
            self._comparison.compare_again(window[0], changed)
        if self._group_settings is not None and (engine.may_move or engine.weight_versions != FLUSH):
            self._group_settings.compare()  # before layers go, and where no update waits for all ranks
        self._losses.prepare(window)
        if len(WRITTEN.in_words) > self._num_written:
            self._num_written, weights = len(WRITTEN.in_words), some(sorted(WRITTEN.in_words))
            has_copies = engine.zero_optimization_stage() or engine.fp16_enabled() or engine.bfloat16_enabled()
            told = SETS_WEIGHTS.format(weights=weights) + UNDONE * bool(has_copies)
            warn_once(f"a forward writes {weights}", told)
        while not self._is_trained_on(window):
            self._losses.look_again(window)
        result = self._results[-1]
        loss = torch.tensor(result.loss, device=self._device)
        is_more = isinstance(result.returned, Mapping)
        self._last_trained = {**result.returned, "loss": loss} if is_more else loss
        return self._last_trained

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
            engine.take_micro_batch_size(first.size)
        engine.when_losses_are_known = lambda: self._share_results(window)
        engine.before_optimizer_step, engine.around_updates = self._call_hooks, self._outcomes.apart
        engine.around_measurements = lambda: self._measurement(in_order)
        self.steps.draws.begin(len(window))
        self._outcomes.begin()
        try:
            with self._announced_shapes(window), self._layers_within("training_step", in_order):
                engine.train_batch(self._feed(in_order))
            if self._group_settings is not None:
                self._group_settings.note()
        except ShapeError as error:
            if len({run.call for run in window}) == 1:
                self._refuse_other_sizes(error)
            raise self._refusal(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} puts batches into one optimizer step "
                "of which one is cut into single samples, or has sequences of one, and for those the model runs "
                f"other code: leave the short batch out (drop_last=True), or do not accumulate; {error}"
            ) from error
        except StopIteration as error:  # Lightning would take it for the end of the epoch, and say nothing
            raise RuntimeError("the engine has read more micro-batches than a batch has") from error
        except UntriedLossError as error:
            if not is_raised_by_all(error):
                raise
            self._outcomes.undo()
            return False
        except OtherStateError as error:
            self._run_within(error, "training_step")
            return self._is_trained_on(window)
        except ValueError as error:
            for run in window:
                self._refuse_single_samples(error, run)
            raise
        return True

    def _refuse_other_sizes(self, error: ShapeError) -> NoReturn:
        """Say what to do where layers that were found do not hold for the sizes of a batch.

        Raises:
            MisconfigurationException: that.
        """
        if not is_raised_by_all(error):
            raise error
        raise self._refusal(
            f"{way_of_sizes(str(error))}. Let all batches have the same sizes (drop_last=True in the loader, "
            "padding), and where a batch is not cut into equal parts, set MadPipeStrategy(num_micro_batches=1)"
        ) from error

    def _refuse_single_samples(self, error: ValueError, run: BatchRun) -> None:
        """Say in a sentence that statistics of one sample cannot be computed.

        Raises:
            MisconfigurationException: that.
        """
        sizes = [micro_batch.size for micro_batch in run.micro_batches]
        if is_raised_by_all(error) and min(sizes) == 1:
            names = self._comparison.layers_of_statistics()
            sentence = needs_two_samples(error, run.whole.step, sizes, names)
            if sentence is not None:
                raise self._refusal(sentence) from error

    def _run_within(self, error: OtherStateError, step: str) -> None:
        """Let a batch that was given up begin anew, and its layers run within the step from now on."""
        if not is_raised_by_all(error) or self.steps.call_states is None:
            raise error
        self._outcomes.undo()
        self.steps.call_states.run_within(step, str(error))

    def _layers_within(self, step: str, labels: Sequence[MicroBatch | Piece]) -> AbstractContextManager[None]:
        """Let the layers of a micro-batch run within its step, where this calls them in a state of its own."""
        states = self.steps.call_states
        if states is None or step not in states.steps:
            return nullcontext()
        plan, mode = self._engine.plan, self._engine.weight_versions
        if step == "training_step" and mode != FLUSH and plan and any(stage.blocks for stage in plan.stages):
            raise self._refusal(
                "training_step calls its layers in a state of its own, and the plan recomputes some of them, "
                f"which with weight_versions {mode!r} comes during a later batch, in the state of that: use "
                "recompute='never', or leave weight_versions out"
            )
        return self._pipeline.run_within(lambda number, run: self.steps.run_layers(labels[number], run))

    def evaluate(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Run ``batch`` through the pipeline.

        Returns:
            What the step returned, joined over the micro-batches, if somebody reads it; else its loss, or None.
        """
        if does_nothing(getattr(self._module, step)):
            return None  # what is evaluated, a hook evaluates
        begins, drawn = self._reading.begins, batch
        if self._window and step == "validation_step":
            self._reading.tell(note_on_validation_within_window(self._trainer, self._module))
        # In inference mode, which Lightning may have entered, the engine would allocate buffers that training
        # cannot use; and outside of it no step and no layer may write into what it has made.
        with (
            self._random_numbers.of_layers(),
            torch.inference_mode(False),
            torch.no_grad(),
            normal_tensors(batch) as batch,
        ):
            run = self._run_of(step, batch, arguments)
            run.given = drawn
            if begins:
                self._structure.check()
                self._comparison.compare_if_changed(run)
            self.steps.draws.begin()
            with self._modes_as_they_are():
                try:
                    self._go_forward(run)
                except ShapeError as error:
                    self._refuse_other_sizes(error)
                [result] = self._outcomes.share_with_pipeline([run])
        self._outcomes.log_again(result, run.whole.data)
        if self._reading.is_read(step):
            return result.returned
        return None if result.loss is None else torch.tensor(result.loss, device=self._device)

    @contextmanager
    def _modes_as_they_are(self) -> Iterator[None]:
        """Let layers be in the modes that the user's hooks have left, which may be those of training."""
        elsewhere = self._pipeline.elsewhere
        elsewhere.keeps_modes = True
        try:
            yield
        finally:
            elsewhere.keeps_modes = False

    def _go_forward(self, run: BatchRun) -> None:
        try:
            self._evaluate(run)
        except OtherStateError as error:
            self._run_within(error, run.whole.step)
            self._evaluate(run)
        except ValueError as error:
            self._refuse_single_samples(error, run)
            raise

    def _evaluate(self, run: BatchRun) -> None:
        self._outcomes.begin()
        with self._announced_shapes([run]), self._layers_within(run.whole.step, run.labels):
            self._engine.eval_batch(
                self._feed(run.labels),
                compute_loss=True,
                reduce_output=None,
                bcast_loss=False,
                num_micro_batches=len(run.micro_batches),
            )

    def _forward_only(self, run: BatchRun) -> str | None:
        """Take a batch through the pipeline, of which nothing stays; return what a layer raised on some rank."""
        self._engine.come_to_rest()  # before batches in flight would be taken for a part of it
        layers = [layer for layer in self._pipeline.forward_funcs if isinstance(layer, nn.Module)]
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            preserved_random_state(),  # layers that draw in evaluation, too
            self.steps.rehearsal(),
            prints_asked(lambda _: False),
            attributes_kept(layers, buffers=True),
            weights_kept(layers),
        ):
            try:
                with self._followed(run):
                    self._go_forward(run)
            except SamplesSelectedError as error:
                raise self._refusal(f"{run.whole.step}: {error}") from None
            except Exception as error:
                if not is_raised_by_all(error):
                    raise
                return in_words(error)  # it comes again where it is told, if it is not for want of memory
            finally:
                self._outcomes.forget()
        return None

    def _share_results(self, window: Sequence[BatchRun]) -> None:
        """Let every rank have what the steps did."""
        self._comparison.note_settings()
        self._results = self._outcomes.share_with_pipeline(window)
        for run in window:
            self._originals.write_back(run.number)
        for run, result in zip(window, self._results, strict=True):
            self._outcomes.log_again(result, run.whole.data)

    # Micro-batches

    def _run_of(self, step: str, batch: Any, arguments: tuple[Any, ...]) -> BatchRun:
        if self._reading.is_due(step):
            self._engine.meet(1)  # a rank may have left the loop alone
            self._reading.compare_batches(step, batch)
        # Primes keep the seeds of ranks, batches and pieces apart.
        data_parallel_rank = self._pipeline.mpu().get_data_parallel_rank()
        seed = self._base_seed + 7919 * next(self._batch_numbers) + data_parallel_rank
        evaluates_once = step != "training_step" and self._loss_option != "mean"
        # The first one shows how outputs grow with the samples; all ranks cut it alike.
        run = self._cut(step, batch, arguments, seed, uneven=evaluates_once and step not in self._evaluated)
        run.runs_once = evaluates_once and len(run.micro_batches) > 1
        if run.runs_once:
            self._evaluated.add(step)
        captured = self._pipeline.call_of_module.captured
        is_captured = captured is not None
        if captured is not None:
            captured.follow_modes()  # before layers are compared: a hook may have put a part into eval()
        key = key_of(step, run.micro_batches[0].data) if is_captured else step
        if key not in self._rehearsed:
            raised_together(self._structure.check)  # before ranks work together on the step's first batch
        if is_captured:
            run.runs_once |= step == "training_step" and self._losses.once
            self._follow(step, run)
        if key not in self._rehearsed:
            self._random_numbers.share(self.steps.draws)
            if self.steps.call_states is not None:
                self.steps.call_states.runs_within = self._engine.runs_lists
                self.steps.call_states.rounds_apart = self._engine.micro_batches > 1
            # Every rank runs the step up to the pipeline once: what it cannot do is then an error on all
            # ranks, and not one error and a wait on the others.
            with self.steps.rehearsal(), self._pipeline.elsewhere.everything_hidden():
                inputs = self._inputs_of_first(run)
            if self._comparison.is_due:
                self._engine.come_to_rest()
                self._comparison.compare(inputs, run, [])
            self._comparison.look_at_writes(run)
            self._rehearsed.add(key)
        self._comparison.set_on_metrics()
        return run

    def _inputs_of_first(self, run: BatchRun) -> Any:
        """What the step passes to the layers for the first micro-batch.

        Raises:
            Exception: what the step raises; the host's, with what to do, where it raises that for a micro-batch
                and not for the batch.
        """
        step, first = run.whole.step, run.micro_batches[0]
        try:
            return self.steps.inputs(first, on_all_ranks=True)
        except Exception as error:
            if len(run.micro_batches) == 1 or not self._can_begin(run.whole):
                raise
            size = run.whole.size
            raise self._refusal(
                f"{step} runs for a whole batch of {size} up to its call of the layers, and not for {first.size} "
                f"of its samples ({type(error).__name__}: {error}): {not_by_samples(size)}"
            ) from error

    def _can_begin(self, whole: MicroBatch) -> bool:
        try:
            self.steps.inputs(whole, on_all_ranks=True)
        except Exception:  # what it raises for the micro-batch says more
            return False
        return True

    def _follow(self, step: str, run: BatchRun) -> None:
        """Let the layers run what the step calls, for a whole batch, too, where it runs on that once."""
        piece, whole = run.micro_batches[0].data, run.whole.data
        if run.runs_once and key_of(step, whole) != key_of(step, piece):
            self._follow_for(step, whole)
        try:
            self._follow_for(step, piece)
        except Exception as error:
            if len(run.micro_batches) == 1 or not self._can_follow(step, whole):
                raise
            size = run.whole.size
            raise self._refusal(f"{error}. For a batch of {size} they can: {not_by_samples(size)}") from error

    def _can_follow(self, step: str, batch: Any) -> bool:
        try:
            self._follow_for(step, batch)
        except Exception:  # what the micro-batch raises says more
            return False
        return True

    @contextmanager
    def _followed(self, run: BatchRun) -> Iterator[None]:
        """The layers run what the step calls for a batch that is cut in its own way, such as one that is tried."""
        captured = self._pipeline.call_of_module.captured
        if captured is None:
            yield
            return
        before = captured.now
        self._follow(run.whole.step, run)
        try:
            yield
        finally:
            captured.let_run(before)

    def _follow_for(self, step: str, batch: Any) -> None:
        call = self._pipeline.call_of_module
        if call.captured.follow(key_of(step, batch)):
            return
        try:
            with self._pipeline.elsewhere.lifted(), self._trainer.precision_plugin.forward_context():
                raised_together(lambda: follow_step(self._module, call, step, batch, self._lightning))
        except OtherCallError as error:
            raise self._refusal(f"{step} calls {error}") from error

    def _cut(self, step: str, batch: Any, arguments: tuple[Any, ...], seed: int, *, uneven: bool) -> BatchRun:
        try:
            is_captured = self._pipeline.call_of_module.captured is not None
            is_cut = self._num_micro_batches > 1
            if is_cut and step == "training_step" and not self._knows_lists:  # a later batch may be smaller
                self._knows_lists = True
                if isinstance(samples := getattr(self._trainer.train_dataloader, "batch_size", None), int):
                    refuse_lists_of_samples(batch, samples)
            pieces = split_batch(batch, self._num_micro_batches, uneven=uneven, ones_apart=is_captured)
        except ValueError as error:
            raise self._refusal(f"{step}: {error}") from None
        known: dict[str, Any] = {
            "step": step,
            "arguments": arguments,
            "batch_seed": seed,
            "keeps_returned": self._reading.is_read(step),
        }
        micro_batches = [
            MicroBatch(
                data=piece,
                size=size_of(piece, len(pieces)),
                seed=seed + 15485863 * place,
                place=place,
                is_last=place == len(pieces) - 1,
                **known,
            )
            for place, piece in enumerate(pieces)
        ]
        whole = MicroBatch(data=batch, size=size_of(batch, len(pieces)), seed=seed, **known)
        return BatchRun(micro_batches, whole, tuple(tensors_of(batch)))

    def _again(self, run: BatchRun, uneven: bool) -> BatchRun:
        whole = run.whole
        again = self._cut(whole.step, whole.data, whole.arguments, whole.seed, uneven=uneven)
        again.note_progress(whole.progress)
        return again

    def _feed(self, labels: Sequence[MicroBatch | Piece]) -> OwnMemory:
        """Return what the engine reads: inputs, on the first stage, and each micro-batch itself as its labels."""
        return OwnMemory(self._fed(labels))

    def _fed(self, labels: Sequence[MicroBatch | Piece]) -> Iterator[tuple[Any, MicroBatch | Piece]]:
        is_first, is_last = self._engine.is_first_stage(), self._engine.is_last_stage()
        if is_last:
            self._outcomes.remember()
        for label in labels:
            yield self.steps.inputs_of(label, is_last_stage=is_last) if is_first else None, label

    @contextmanager
    def _measurement(self, in_order: Sequence[MicroBatch | Piece]) -> Iterator[None]:
        with self.steps.rehearsal():
            try:
                yield
            except ValueError:  # on every rank
                raise_first(self.steps.error_in_rehearsal)
                raise
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
