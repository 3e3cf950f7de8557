"""The user's ``*_step`` on a pipeline: its input is taken on the first stage, all else on the last."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_partition.engine.pipeline.batch_attempt import OUT_OF_MEMORY
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.random_state import random_state
from lightning_madpipe.compat.elsewhere import ElsewhereError
from lightning_madpipe.finding.batch_states import FROM_THE_FIRST, state_of_other_size
from lightning_madpipe.finding.captured_call import CapturedCall
from lightning_madpipe.module import ONE_AFTER_ANOTHER, pipeline_of
from lightning_madpipe.steps import left_alike
from lightning_madpipe.steps.batch_numbers import Use
from lightning_madpipe.steps.batch_runs import (
    BatchRun,
    Dims,
    Piece,
    Root,
    SamplesSelectedError,
    as_tuple,
    cut_inputs,
    dims_by_whole,
    rows_of_inputs,
    writable,
)
from lightning_madpipe.steps.batches import map_children, shapes_of, tensors_of
from lightning_madpipe.steps.beside_module import BesideModule
from lightning_madpipe.steps.call_state import CallStates
from lightning_madpipe.steps.layers_call import LayersCall
from lightning_madpipe.steps.left_untouched import InputTaken
from lightning_madpipe.steps.list_in_words import some
from lightning_madpipe.steps.log_calls import LogCalls
from lightning_madpipe.steps.loss_signs import (
    MOST_TIMES_NEW,
    Attributes,
    ClassWeights,
    LossGraph,
    Operations,
    UntriedLossError,
    are_in_proportion,
    graph_of,
    kind_of,
    read_operations,
)
from lightning_madpipe.steps.losses import TOLERANCE, Tried
from lightning_madpipe.steps.metrics import ToldElsewhere
from lightning_madpipe.steps.micro_batches import LogCall, MicroBatch
from lightning_madpipe.steps.other_weights import loss_depends_on_weights, other_weight, uses_weights
from lightning_madpipe.steps.own_generators import OwnGenerators
from lightning_madpipe.steps.step_results import does_with, means_of, names_of_numbers
from lightning_madpipe.steps.step_runs import StepRuns
from lightning_madpipe.steps.step_side_effects import Change, Leftovers, Place, reached_objects
from lightning_madpipe.steps.tensor_comparison import as_real, has_gradient
from lightning_madpipe.steps.told_metrics import ToldMetrics
from lightning_madpipe.steps.torch_calls import MOST_PLACES, TorchCalls, TriedCalls, UnlikeNumbers
from lightning_madpipe.steps.what_layers_set import LayerTraces
from lightning_madpipe.steps.written_files import OpenFiles

SKIPPING = (
    "training_step returns None{how}, and a pipeline cannot skip a batch in its step: return the loss times 0 "
    "with `self.skips = True`, set it to False in on_train_batch_start, and in on_before_optimizer_step write "
    "`if self.skips: for p in self.parameters(): p.grad = None`. With stage=1, bf16 or fp16 momentum and weight "
    "decay still change weights"
)


UNSETTLED = (
    "{step} {does}, and no batch that was tried shows whether that of a batch is the mean over samples, is "
    "weighted as the loss is, or is a sum: until one does, it is the mean over samples. "
    "MadPipeStrategy(loss='batch') runs the step once per batch"
)

NEW_AGAIN = (
    "{times} times {step} has called torch at places in its code that no tried step had come to: from here on what"
    " it does for the first time is not tried. MadPipeStrategy(loss='batch') runs the step once per batch, "
    "num_micro_batches=1 the layers, too"
)

UNLIKE_AGAIN = (
    "{times} times {step} has given torch numbers of its batch, other ones in each micro-batch, at places in its "
    "code where no tried step had: from here on others are not tried. MadPipeStrategy(loss='batch') runs the step "
    "once per batch"
)

MOST_TIMES_ALIKE = 4
"""How often a batch is given up for what a step leaves at one place."""
LEFT_FOR_A_WHILE = (
    "{step} has left self.{name} = {value!r} behind micro-batch {number} of a batch and {last!r} behind the last "
    "one, which hooks find: one process runs the step once for the batch, and so does "
    "MadPipeStrategy(loss='batch'). Let later micro-batches not set it back, but on_train_batch_start"
)
LEFT_AGAIN = (
    "{times} times {step} has left {names} as no tried batch had, and each was tried: from here on it is compared"
    " where a batch is tried for something else. MadPipeStrategy(loss='batch') runs the step once per batch"
)
CHANGED_AGAIN = (
    "{times} times {step} has changed something as no tried batch had: from here on such a batch is not tried for"
    " it. MadPipeStrategy(loss='batch') runs the step once per batch"
)
TOO_LARGE = (
    "training_step leaves {names} for a batch as its micro-batches do where that is tried; of more than 16 MiB it"
    " is not compared in other batches. MadPipeStrategy(loss='batch') runs the step once per batch"
)

BEYOND_TORCH = (
    "{step} makes tensors at {comes} of what it took to NumPy or Python at {leaves}: if it does so otherwise in"
    " some batches alone, such as in another order, that is not seen, and each micro-batch does it by itself."
    " Functions of torch are seen; num_micro_batches=1 takes whole batches"
)


class NoLossError(Exception):
    """A training step that is tried returns no loss that depends on the outputs; the message says what."""


def why_no_loss(returned: Any, called: str) -> str | None:
    """What is wrong with what a training step returns; None where it is a loss, or a dict with one.

    Args:
        called: What runs the layers, as the user calls it.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    if returned is None:
        return SKIPPING.format(how="")
    if not isinstance(loss, Tensor):
        return (
            f"training_step returns {type(returned).__name__}, not a loss: return a tensor of one element, or a "
            "dict with one as 'loss'"
        )
    if loss.numel() != 1:
        return (
            f"training_step returns a loss of shape {tuple(loss.shape)}, and a loss is one number: return its "
            "mean, loss.mean(), as for a loss with reduction='none'"
        )
    if not loss.requires_grad:
        return (
            f"the loss of training_step needs no gradient: it does not depend on what {called} returns, or "
            "torch.no_grad(), detach() or item() takes its gradient away"
        )
    return None


class UserSteps:
    """Runs ``training_step`` and its kin with the pipeline in the place of the layers' call.

    Args:
        module: The LightningModule.
        attribute: The attribute whose call runs all layers, see ``PipelineCall``.
        context: A context for each step, such as the precision's.
        error: The host's exception for a step that cannot run on a pipeline.
        ignored: Attributes of the module that its user does not set.
        is_cut: Whether other ranks have some of the layers.
        may_run_again: Whether the engine may undo the batch that runs and run it again, for want of memory.
        traces: What layers set on themselves, which a step may not read; None: it may.
        captured: The call that the layers were found in; None: the module names them.
    """

    def __init__(
        self,
        module: Any,
        attribute: str,
        context: Callable[[], AbstractContextManager] = nullcontext,
        error: type[Exception] = ValueError,
        ignored: Collection[str] = (),
        is_cut: bool = False,
        may_run_again: Callable[[], bool] = lambda: False,
        traces: LayerTraces | None = None,
        captured: CapturedCall | None = None,
    ) -> None:
        self._module = module
        self.call = LayersCall(module, attribute, error, captured)
        """The steps' call of the layers."""
        self._is_cut = is_cut
        self._may_run_again = may_run_again
        self._error = error
        self._ignored = ignored
        self._logs = LogCalls(module, error)
        self.told_elsewhere = ToldElsewhere()
        self.told_metrics = ToldMetrics(module, self._say, repeating=self.told_elsewhere.repeating_steps)
        self._shapes_of_pieces: dict[Any, list[tuple[int, ...]]] = {}
        self._dims: dict[str, Dims] = {}
        self._of_whole: dict[str, tuple[int, list[Tensor]]] = {}
        """The samples of a batch that went through the layers as one, and its outputs, by step."""
        self._dims_of_inputs: dict[str, list[tuple[int, int] | None]] = {}
        """What :func:`rows_of_inputs` has said last, of each step."""
        self._told: set[str] = set()
        self.watches = False
        """Whether a training step that shows a sign of a loss that was not tried gives its batch up."""
        self.gives_up = True
        """Whether that ends the batch, which begins anew; else ``has_seen_sign`` is set, and it goes on."""
        self.has_seen_sign = False
        self._tried: set[tuple[str, str]] = set()
        """Operations in losses that were tried."""
        self.class_weights = ClassWeights()
        self.bends: frozenset[str] = frozenset()
        """Kinds of nodes of which all micro-batches of a batch have to be on one side."""
        self._sides: tuple[str, ...] = ()
        """Where the first micro-batch of this batch is."""
        self._num_bent = 0
        self._divisors: list[tuple[MicroBatch, list[Tensor]]] = []
        """What something in the losses of this batch is divided by, by micro-batch."""
        self._times_divided = 0
        self._graphs: list[LossGraph] = []
        """Those of the losses of this batch, by micro-batch."""
        self._tried_calls = TriedCalls()
        self._unlike_numbers = UnlikeNumbers()
        self._times_unlike = 0
        self._tried_names: set[str] = set()
        """Names of numbers that tried steps have logged or returned."""
        self._times_new = 0
        self.before_batch: Leftovers | None = None
        """The module before the steps of the batches that run, on the rank that runs whole steps."""
        self._tried_changes: set[tuple[str, Place, str]] = set()
        """What each step has changed in trials, and how."""
        self._alike: set[Place] = set()
        """What training steps have changed in trials as their micro-batches have: numbers, texts, small tensors
        and containers of these."""
        self.looked_at_left: set[Use] = set()
        """Questions of batches of which trials have looked at what is left by other answers."""
        self._gained: dict[Place, set[float]] = {}
        """The numbers for each sample that lists have gained in trials, where micro-batches gain them, too."""
        self._times_alike: Counter[Place] = Counter()
        """How often a batch was given up for a place."""
        self._counted_since: Leftovers | None = None
        self._num_samples = 0
        """Samples whose steps have run since then."""
        self._left_first: dict[Place, Any] = {}
        """What the first micro-batch of this batch has left there."""
        self._plain = left_alike.PlainAttributes(module, ignored)
        self._told_left: set[str] = set()
        """The names of what is known, or was told, to differ by micro-batches."""
        self._times_changed = 0
        self.unsettled: Mapping[str, frozenset[str]] = {}
        """Means, logged or returned, of which nothing that was tried shows how they are merged, each with the
        rules that may."""
        self._first_logged: dict[str, float] = {}
        """What the first micro-batch of this batch logs of them."""
        self._times_unsettled = 0
        self._rows: list[tuple[int, int] | None] | None = None
        """The dimension of the samples, and its length for each, in every tensor that a training step passes to
        ``forward``; None where all micro-batches pass the same."""
        self.rehearsing = False
        """Whether what runs is to leave no trace, and the other pipelines may not run it."""
        self.error_in_rehearsal: Exception | None = None
        """What a step has raised that was only measured: after it a backward may fail with words of torch."""
        self.changed_by_layers: set[str] = set()
        """What of the module layers change, which was said."""
        self.draws = OwnGenerators(module, ignored, error)
        self.beside = BesideModule(module)
        """What steps may change beside the module."""
        self._runs = StepRuns(module, self.call, context, error, self.draws, is_cut, traces)
        self._runs.context_apart = self.beside.context_apart
        self.call_states = CallStates(module, error, self.beside) if is_cut else None
        """The state in which steps call the layers; None where this rank runs them all."""

    @property
    def running(self) -> str | None:
        """The name of the step that runs."""
        return self.call.running

    @property
    def drawn_from(self) -> set[str]:
        """The common generators that steps which were rehearsed have drawn from."""
        return self._runs.drawn_from

    @property
    def known_draws(self) -> set[str]:
        """Those that training steps have drawn from in trials, and of which it was told."""
        return self._runs.known_draws

    @known_draws.setter
    def known_draws(self, names: set[str]) -> None:
        self._runs.known_draws = names

    @property
    def open_files(self) -> OpenFiles:
        """What steps may write to that was open before them."""
        return self._runs.open_files

    @property
    def told_of_draws(self) -> set[str]:
        """The names of steps of which it was said what they draw from common generators."""
        return self._runs.told_of_draws

    def leftovers(self, *, undoable: bool = False, may_be_undone: bool = False) -> Leftovers:
        """The module as it is now, to tell later what a step left behind."""
        return Leftovers(
            self._module,
            self._ignored,
            undoable=undoable,
            may_be_undone=may_be_undone,
            beside=self.beside,
        )

    def reached_objects(self) -> dict[str, Any]:
        """The objects of the program that steps reach, by names that are the same on all ranks."""
        return reached_objects(self._module, frozenset(self._ignored), self.beside)

    def attributes(self) -> Attributes:
        """What of the module may change its loss, as it is now."""
        return Attributes(self._module, self._ignored, self.beside)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps that run meanwhile leave nothing behind."""
        rehearsed_already, self.rehearsing = self.rehearsing, True
        try:
            with self.draws.rehearsal():
                before = self.leftovers(undoable=True)  # with iterators that can be put back
                try:
                    yield
                finally:
                    before.undo()
        finally:
            self.rehearsing = rehearsed_already

    def inputs(
        self, micro_batch: MicroBatch, *, is_last_stage: bool = True, on_all_ranks: bool = False
    ) -> Tensor | tuple[Tensor, ...]:
        """What the step passes to the pipeline; it ends there, and what it did until then is undone.

        Args:
            is_last_stage: Whether this rank runs all of the step, too. Otherwise tensors that it changed in place
                stay so until the last stage's arrive.
            on_all_ranks: Whether all ranks of the pipeline do this.

        Raises:
            OtherStateError: it calls the layers in another state than it began with, and this is not done on all
                ranks.
        """
        try:
            taken = self._taken(micro_batch, is_last_stage, on_all_ranks)
        except ElsewhereError as error:
            with pipeline_of(self._module).elsewhere.lifted():
                self._taken(micro_batch, is_last_stage, on_all_ranks)
            raise self._error(uses_weights(micro_batch.step, self.call.called, error)) from None
        if not taken or not all(isinstance(value, Tensor) for value in taken):
            kinds = ", ".join(type(value).__name__ for value in taken) or "nothing"
            hint = f"; {FROM_THE_FIRST}" if any(value is None for value in taken) else ""
            raise self._error(
                f"{micro_batch.step} calls {self.call.called} with {kinds}: only tensors can be sent to a "
                f"pipeline{hint}"
            )
        return taken[0] if len(taken) == 1 else taken

    def inputs_of_first(self, run: BatchRun) -> Tensor | tuple[Tensor, ...]:
        """What the step passes to the pipeline for the first micro-batch, where all ranks ask for it.

        A state that the step keeps from batch to batch is of the samples of a batch; its part is given.
        """
        first = run.micro_batches[0]
        inputs = self.inputs(first, on_all_ranks=True)
        if len(run.micro_batches) == 1 or state_of_other_size(self._module, as_tuple(inputs)) is None:
            return inputs
        whole = as_tuple(self.inputs(run.whole, on_all_ranks=True))
        shapes = self._shapes_of_pieces.get((first.step, shapes_of(first.data), shapes_of(run.whole.data)))
        return inputs if shapes is None else cut_inputs(whole, shapes, run.sizes)[0]

    def _taken(self, micro_batch: MicroBatch, is_last_stage: bool, on_all_ranks: bool) -> tuple[Any, ...]:
        """What the step calls the layers with."""
        taken: tuple[Any, ...] | None = None
        states = self.call_states

        def take(*arguments: Any, **keywords: Any) -> None:
            nonlocal taken
            if states is not None:
                states.note()
            taken = self.call.inputs(arguments, keywords)
            raise InputTaken

        if self.call.is_of_several:
            with self.call.within(micro_batch.step, micro_batch.data):
                return self.call.inputs_for_data()
        before = self.leftovers(undoable=is_last_stage)
        told = nullcontext() if is_last_stage else self.told_elsewhere.undone()
        try:
            with torch.no_grad(), told, nullcontext() if states is None else states.undone():
                returned = self._run_to_call(
                    micro_batch, take, None if states is None else lambda: states.begun(before)
                )
        except InputTaken:
            pass
        finally:
            before.undo()
        if taken is None:
            raise self._error(self._without_call(micro_batch.step, returned))
        if states is not None:
            states.settle(micro_batch.step, alike=on_all_ranks)
        return taken

    def _wrong_calls(self, step: str, returned: Any, number: int) -> str:
        """What to write where a step calls the layers several times, or never."""
        if not number:
            return self._without_call(step, returned)
        return (
            f"{step} calls {self.call.called} a second time: a pipeline runs once per micro-batch; make one call, "
            f"on inputs joined along dimension 0. For {ONE_AFTER_ANOTHER}"
        )

    def _without_call(self, step: str, returned: Any) -> str:
        """What to write where a step has returned without its call of the layers."""
        if step == "training_step" and returned is None:
            return SKIPPING.format(how=f" without a call of {self.call.called}")
        return (
            f"{step} returns for this batch without a call of {self.call.called}, which runs the layers: call it "
            "in each step, also where its outputs are not used; or do what needs no layers in a hook"
        )

    def _run_to_call(
        self,
        micro_batch: MicroBatch,
        take: Callable[..., None],
        begins: Callable[[], AbstractContextManager[object]] | None,
        within: list[ExitStack] | None = None,
    ) -> Any:
        """Run a step up to its call of the layers, where ``take`` ends it; nothing that it logs counts.

        Returns:
            What it returns, where it does not come to its call.
        """
        return self._runs.run(
            micro_batch,
            take,
            log=lambda *_, **__: None,
            record=lambda _: None,
            again=True,
            rehearsing=self.rehearsing,
            only_inputs=True,
            begins=begins,
            within=within,
        )

    def run_layers(self, label: MicroBatch | Piece, run: Callable[[], Any]) -> Any:
        """Run layers of this rank in the state in which the step of a micro-batch calls them.

        The step runs up to its call, as on the first stage, where it gives the inputs, and the layers run there.
        """
        micro_batch, states = label.run.whole if isinstance(label, Piece) else label, self.call_states
        assert states is not None, "this rank has a part of the layers"
        contexts: list[ExitStack] = []
        outputs: list[Any] = []
        errors: list[BaseException] = []
        changed: set[Place] = set()
        before, back = self.leftovers(undoable=True), random_state()

        @torch.compiler.disable  # in a compiled step its compiler would follow what is done here
        def take(*_: Any, **__: Any) -> None:
            nonlocal back
            try:
                changed.update(change.place for change in before.changes())
                states.freeze()
                contexts[0].close()  # all but the step's own
                outputs.append(run())
            except BaseException as error:  # which no code of the step's is to see
                errors.append(error)
            back = random_state()
            raise InputTaken

        try:
            with states.undone():
                copy_context().run(
                    self._run_to_call, micro_batch, take, lambda: states.begun(None), within=contexts
                )
        except InputTaken:
            pass
        finally:
            back()  # from where the step had its own
            before.undo(lambda change: change.place in changed)
        if errors:
            raise errors[0]
        if not outputs:
            raise self._error(self._without_call(micro_batch.step, ...))
        return outputs[0]

    def inputs_of(self, label: MicroBatch | Piece, *, is_last_stage: bool = True) -> Tensor | tuple[Tensor, ...]:
        """The inputs of a micro-batch: what its own step passes to the pipeline, or its piece of the batch's."""
        if isinstance(label, MicroBatch):
            inputs = self.inputs(label, is_last_stage=is_last_stage)
            if self._is_watched(label):
                self._check_rows(label, as_tuple(inputs))
            return inputs
        run = label.run
        if label.place == 0:
            run.inputs = list(self._inputs_of_pieces(run, is_last_stage=is_last_stage))
        tensors, run.inputs[label.place] = run.inputs[label.place], None
        return tensors[0] if len(tensors) == 1 else tensors

    def _inputs_of_pieces(self, run: BatchRun, *, is_last_stage: bool) -> list[tuple[Tensor, ...]]:
        whole = as_tuple(self.inputs(run.whole, is_last_stage=is_last_stage))
        if len(run.micro_batches) == 1:
            return [whole]
        first = run.micro_batches[0]
        key = first.step, shapes_of(first.data), shapes_of(run.whole.data)
        was_known = key in self._shapes_of_pieces
        if not was_known:
            self._look_at_piece(first, key)
        try:
            cut = cut_inputs(
                whole, self._shapes_of_pieces[key], run.sizes, self._dims_of_inputs.get(first.step, ())
            )
        except ValueError as error:
            if was_known:  # it may pass on other shapes now
                del self._shapes_of_pieces[key]
                return self._inputs_of_pieces(run, is_last_stage=is_last_stage)
            if isinstance(error, SamplesSelectedError) and self.rehearsing:
                raise
            raise self._error(f"{first.step}: {error}") from None
        self._dims_of_inputs[first.step] = rows_of_inputs(cut[0], whole, first.size)
        if first.step == "training_step":
            self._rows = self._dims_of_inputs[first.step]
        return cut

    def _look_at_piece(self, first: MicroBatch, key: Any) -> None:
        if len(self._shapes_of_pieces) > 1000:  # of sequences of all lengths
            self._shapes_of_pieces.clear()
        with self.rehearsal():
            pieces = as_tuple(self.inputs(first))
        self._shapes_of_pieces[key] = [tuple(tensor.shape) for tensor in pieces]

    def _check_rows(self, micro_batch: MicroBatch, inputs: tuple[Tensor, ...]) -> None:
        """Give the batch up if a micro-batch passes on more or less for each sample than when it was tried."""
        for tensor, known in zip(inputs, self._rows or (), strict=False):
            if known is not None and (
                tensor.ndim <= known[0] or tensor.shape[known[0]] != known[1] * micro_batch.size
            ):
                self._rows = None
                self._give_up(micro_batch)

    def _check_graph(self, micro_batch: MicroBatch, loss: Tensor, ends: Collection[Any]) -> None:
        graph = graph_of(loss, ends)
        self._check_operations(micro_batch, graph.operations)
        if self.class_weights.are_others(graph.class_weights):
            self._give_up(micro_batch)
        self._check_sides(micro_batch, graph)
        self._check_factors(micro_batch, graph)
        self._check_divisors(micro_batch, graph)

    def _check_operations(self, micro_batch: MicroBatch, operations: Operations) -> None:
        """Give the batch up if its loss has operations that none has that was tried."""
        if not operations <= self._tried:
            self._tried |= operations  # tried once, even if the trial fails
            self._give_up(micro_batch)

    def _check_factors(self, micro_batch: MicroBatch, graph: LossGraph) -> None:
        """Give the batch up if a factor on a device has let a term of its loss begin or end."""
        if micro_batch.place == 0:
            self._graphs = []
        self._graphs.append(graph)
        if micro_batch.is_last:  # pipelines would drain if each micro-batch waited for its device
            self._check_operations(micro_batch, read_operations(self._graphs))

    def _check_sides(self, micro_batch: MicroBatch, graph: LossGraph) -> None:
        """Give the batch up if it lies on two sides of a threshold: it is no mean then."""
        sides = tuple(name for name in graph.bends if kind_of(name.split()[0]) in self.bends)
        if micro_batch.place == 0:
            self._sides = sides
        elif sides != self._sides and not micro_batch.is_retried and self._num_bent < MOST_TIMES_NEW:
            micro_batch.is_retried = True
            self._num_bent += 1
            self._give_up(micro_batch)

    def _check_divisors(self, micro_batch: MicroBatch, graph: LossGraph) -> None:
        """Give the batch up if its micro-batches are divided by what their shares in its loss do not go by."""
        if micro_batch.place == 0:
            self._divisors = []
        self._divisors.append((micro_batch, graph.divisors))
        if not micro_batch.is_last or self._times_divided == MOST_TIMES_NEW:
            return
        parts, divisors = zip(*self._divisors, strict=True)
        sizes = [part.size for part in parts]
        shares = [part.size if part.share is None else part.share for part in parts]
        if not are_in_proportion(divisors, sizes, shares):
            self._times_divided += 1
            self._give_up(micro_batch)

    def _check_names(self, micro_batch: MicroBatch) -> None:
        """Give the batch up if it logs or returns a number that none has that was tried."""
        new = names_of_numbers(micro_batch.log_calls, micro_batch.returned) - self._tried_names
        if new and self._times_new < MOST_TIMES_NEW:
            self._times_new += 1
            self._tried_names |= new  # tried once, even if the trial does not come by them
            self._give_up(micro_batch)

    def _check_calls(self, micro_batch: MicroBatch, calls: TorchCalls) -> None:
        """Give the batch up if it calls functions of torch that none has called there that was tried."""
        beyond = calls.beyond_torch()
        if beyond is not None:
            self._say(BEYOND_TORCH.format(step=micro_batch.step, leaves=beyond[0], comes=beyond[1]))
        if self._tried_calls.are_others(calls.made):
            if self._tried_calls.is_exhausted:
                self._say(NEW_AGAIN.format(step=micro_batch.step, times=MOST_PLACES))
            self._give_up(micro_batch)
        self._check_numbers(micro_batch, calls)

    def _check_numbers(self, micro_batch: MicroBatch, calls: TorchCalls) -> None:
        """Give the batch up if Python has made numbers of its micro-batches that functions of torch are given."""
        if micro_batch.place == 0:
            self._unlike_numbers.begin()
        self._unlike_numbers.add(calls.numbers)
        if not micro_batch.is_last:
            return
        if not self._unlike_numbers.are_new():
            if self._unlike_numbers.has_new_fractions:
                self._give_up(micro_batch)
            return
        self._times_unlike += 1
        if self._times_unlike > MOST_TIMES_NEW:
            self._say(UNLIKE_AGAIN.format(step=micro_batch.step, times=MOST_TIMES_NEW))
        else:
            self._give_up(micro_batch)

    def untried(self, step: str, changes: Iterable[Change]) -> list[Place]:
        """The places that neither a trial of a step nor a layer has changed in this way; they are known then."""
        found = {(step, change.place, change.kind) for change in changes} - self._tried_changes
        self._tried_changes |= found
        return [place for _, place, _ in found if str(place) not in self.changed_by_layers]

    def _check_draws(self, micro_batch: MicroBatch) -> None:
        """Give the batch up, or say it, if its step draws from generators that none has that was tried."""
        new, has_moved = self._runs.drawn, self.draws.newly_moved()
        if (new or has_moved) and self._is_watched(micro_batch) and self.gives_up:
            self._runs.known_draws |= new
            self._give_up(micro_batch)
        if new:
            self._runs.tell_draws(micro_batch.step, new)

    def _check_changes(self, micro_batch: MicroBatch) -> None:
        """Give the batch up if its step has changed something that none has that was tried, or otherwise."""
        if self.before_batch is None or self._times_changed == MOST_TIMES_NEW:
            return
        if self.before_batch is not self._counted_since:
            self._counted_since, self._num_samples = self.before_batch, 0
        self._num_samples += micro_batch.size
        if micro_batch.place == 0:
            looked_at = self.before_batch.changes(lambda place, _: place in self._alike) if self._alike else ()
            self._left_first = {change.place: left_alike.shown(change) for change in looked_at}
        for name, found in self._plain.note(micro_batch.place, micro_batch.is_last).items():
            if f"self.{name}" not in self._told_left:
                self._told_left.add(f"self.{name}")
                self._say(LEFT_FOR_A_WHILE.format(step=micro_batch.step, name=name, **found._asdict()))
        if not micro_batch.is_last:
            return
        changes = self.before_batch.changes()
        others = self._going_on(changes) | self._gaining_otherwise(changes)
        often = {place for place in others if self._times_alike[place] == MOST_TIMES_ALIKE}
        if often:
            names = some(sorted(map(str, often)))
            self._say(LEFT_AGAIN.format(step=micro_batch.step, names=names, times=MOST_TIMES_ALIKE))
        self._alike -= often
        self._gained = {place: shares for place, shares in self._gained.items() if place not in often}
        others -= often
        if self.untried(micro_batch.step, changes) or others:
            self._times_alike.update(others)
            self._times_changed += 1
            if self._times_changed == MOST_TIMES_NEW:
                self._say(CHANGED_AGAIN.format(step=micro_batch.step, times=MOST_TIMES_NEW))
            self._give_up(micro_batch)

    def _going_on(self, changes: Iterable[Change]) -> set[Place]:
        """What micro-batches behind the first one change, and a batch and they have left alike in trials.

        What depends on no sample, such as a rate by the number of the step, all of them leave alike.
        """
        now = {change.place: left_alike.shown(change) for change in changes if change.place in self._alike}
        return {
            place
            for place in {*now, *self._left_first}
            if place not in now
            or place not in self._left_first
            or left_alike.go_on(self._left_first[place], now[place])
        }

    def _gaining_otherwise(self, changes: Iterable[Change]) -> set[Place]:
        """The lists that gain other numbers for each sample than in any batch that was tried."""
        return {
            change.place
            for change in changes
            if change.place in self._gained
            and (count := left_alike.gained(change)) is not None
            and not any(math.isclose(count / self._num_samples, share) for share in self._gained[change.place])
        }

    def note_left(
        self, changes: Iterable[Change], left_out: Collection[str], gained: Mapping[str, int], size: int
    ) -> None:
        """Note what training steps have changed in a trial.

        Args:
            left_out: The names of what differs by micro-batches, or what these go on changing.
            gained: How many numbers and texts lists have gained for the batch, by name.
            size: Samples of the batch.
        """
        told = {*left_out, *(name.partition("[")[0] for name in left_out)}  # also without the key of an item
        self._told_left |= told
        changes = list(changes)
        self._alike |= {change.place for change in changes if left_alike.is_followed(change)}
        self._alike = {place for place in self._alike if str(place) not in told}
        for place in {change.place for change in changes if str(change.place) in gained}:
            self._gained.setdefault(place, set()).add(gained[str(place)] / size)
        self._gained = {place: shares for place, shares in self._gained.items() if str(place) not in told}
        large = {str(change.place) for change in changes if left_alike.is_too_large(change)} - told
        if large:
            self._say(TOO_LARGE.format(names=some(sorted(large))))

    def _check_logs(self, micro_batch: MicroBatch) -> None:
        """Give the batch up, or say it, if rules of which none is known to hold would merge its logs otherwise.

        An accuracy that is 0 in all that was tried is so by samples as by labels that count.
        """
        if micro_batch.place == 0:
            self._first_logged = {}
            if micro_batch.is_last:
                return
        for name, value in means_of(micro_batch.log_calls, micro_batch.returned, self.unsettled):
            first = self._first_logged.setdefault(name, value)
            other = 0.0 if "sum" in self.unsettled[name] else first
            if math.isclose(value, other, rel_tol=TOLERANCE) or micro_batch.is_retried:
                continue
            if self._is_watched(micro_batch) and self.gives_up and self._times_unsettled < MOST_TIMES_NEW:
                self._times_unsettled += 1
                micro_batch.is_retried = True
                self._give_up(micro_batch)
            self.has_seen_sign = True
            self._say(UNSETTLED.format(step=micro_batch.step, does=does_with(name)))

    def _give_up(self, micro_batch: MicroBatch) -> None:
        if not self.gives_up:
            self.has_seen_sign = True
            return
        micro_batch.is_untried = True
        raise UntriedLossError(f"the loss of {micro_batch.step} is not the one that was tried")

    def loss(self, outputs: Any, label: MicroBatch | Piece) -> Tensor:
        """Run the step on the pipeline's ``outputs``; what comes of it is left in its micro-batch or batch.

        Returns:
            The loss times ``loss_scale``; zero where the step returns no loss, as validation may. Where the step
            runs once for a batch, zero for all micro-batches but the last one; the backward of each gives its
            outputs the gradients of the batch's loss.

        Raises:
            Exception: what the step raises, unless it is only measured: when it is trained on, it raises that
                again, and every rank hears of it.
        """
        if isinstance(label, MicroBatch):
            return self._loss_or_error(outputs, label, is_behind=True)
        run, tensors = label.run, as_tuple(outputs)
        trains = torch.is_grad_enabled()
        if label.place == 0:
            run.begin()
        run.collect(tensors)
        value = torch.zeros((), device=self._module.device)
        if label.is_last and run.asks is not None:
            run.asks(run, isinstance(outputs, tuple))
        elif label.is_last:
            loss = self._loss_of_batch(run, isinstance(outputs, tuple), trains)
            run.loss = loss if trains and loss.requires_grad else None
            value = loss.detach()
        if not trains:
            return value
        return Root.apply(value, functools.partial(run.gradients_of, label.place), *tensors)

    def _loss_of_batch(self, run: BatchRun, is_tuple: bool, trains: bool) -> Tensor:
        step, pieces = run.whole.step, run.outputs
        try:
            joined = self.join(run, trains=trains)
        except ValueError as error:
            if trains:
                raise self._error(f"{step}: {error}") from None
            # Nothing is trained by it: as micro-batches, each with its own step.
            self._say(f"{step} runs once per micro-batch, and not once per batch, because {error}")
            run.fell_apart = True
            for outputs, micro_batch in zip(pieces, run.micro_batches, strict=True):
                value = self._loss_or_error(outputs if is_tuple else outputs[0], micro_batch)
            return value
        given = writable(joined)
        loss = self._loss_or_error(given if is_tuple else given[0], run.whole)
        if trains and not loss.requires_grad:
            raise self._error(why_no_loss(loss, self.call.called) or f"{step} returns no loss")
        return loss

    def join(self, run: BatchRun, *, trains: bool) -> tuple[Tensor, ...]:
        """Join the outputs of a batch to those of one forward.

        Raises:
            ValueError: they cannot be joined.
        """
        step = run.micro_batches[0].step
        if step not in self._dims and len(run.sizes) > 1 and step in self._of_whole:
            size, whole = self._of_whole.pop(step)
            dims = dims_by_whole(whole, run.outputs[0]) if run.sizes[0] < size else None
            if dims is not None:
                self._dims[step] = dims
        joined = run.join(self._dims.get(step), trains=trains)
        if len(set(run.sizes)) > 1:
            self._dims[step] = run.dims  # seen, where micro-batches of one size show nothing
        return joined

    def knows_dims(self, step: str) -> bool:
        """Whether it is known how the outputs for a step grow with the samples, on the last stage."""
        return step in self._dims

    def note_whole(self, run: BatchRun) -> None:
        """Note the outputs for a batch that went through the layers as one, until they are joined once."""
        self._of_whole[run.whole.step] = run.whole.size, [each.detach() for each in run.outputs[0]]

    def forget_whole(self) -> None:
        """Free the outputs that :meth:`note_whole` has noted."""
        self._of_whole.clear()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """The steps within are of one batch, which is tried."""
        self._unlike_numbers.begin_trial()
        try:
            yield
        finally:
            self._unlike_numbers.end_trial()

    def forget_trials(self) -> None:
        """Let each training step that is watched show a sign of a loss that was not tried."""
        self._tried.clear()
        self._tried_names.clear()

    def share_dims(self, group: dist.ProcessGroup) -> None:
        """Let every rank know how outputs grow with the samples: layers have moved, and the last stage with them.

        Collective over the pipeline ``group``.
        """
        for dims in gather_objects(self._dims, group):
            self._dims.update(dims)

    def _run_again(
        self,
        micro_batch: MicroBatch,
        answer: Callable[..., Any],
        log: Callable[..., None],
        *,
        tells: bool = True,
        calls: AbstractContextManager[object] | None = None,
    ) -> Any:
        """Run a step that runs for good, too, with something that answers its calls of the layers."""
        return self._runs.run(
            micro_batch,
            answer,
            log,
            record=lambda _: None,
            again=True,
            rehearsing=self.rehearsing,
            tells=tells,
            begins=self._begins(calls),
        )

    def _begins(
        self, calls: AbstractContextManager[object] | None
    ) -> Callable[[], AbstractContextManager[object]] | None:
        """What a step is run in at last: the state of its calls of the layers, and what notes those of torch."""
        states = self.call_states
        if calls is None:
            return None if states is None else lambda: states.begun(None)

        @contextmanager
        def begun() -> Iterator[None]:
            # The mode that notes calls stands before: what begins with the step is compared at its calls.
            with calls, nullcontext() if states is None else states.begun(None):
                yield

        return begun

    def run_apart(
        self,
        micro_batch: MicroBatch,
        layers: Callable[[str | None, Sequence[Any], dict[str, Any]], Any],
        log: Callable[..., None],
    ) -> Any:
        """Run a step within a rehearsal, with something else for its layers; return what it returns.

        Args:
            layers: What is called in their place, with the path of the module that the step calls, None where it
                makes one call, with its arguments and its keywords.
            log: What stands for ``self.log``.
        """
        states = self.call_states

        def answer(*arguments: Any, **keywords: Any) -> Any:
            if self.call.is_of_several:
                return lambda path, *given, **named: layers(path, given, named)
            return layers(None, arguments, keywords)

        with nullcontext() if states is None else states.undone():
            return self._run_again(micro_batch, answer, log, tells=False)

    def try_once(
        self,
        micro_batch: MicroBatch,
        outputs: tuple[Tensor, ...],
        is_tuple: bool,
        watched_by: Callable[..., AbstractContextManager[object]] = lambda *_: nullcontext(),
        *,
        is_known: bool = False,
    ) -> Tried:
        """Run the step on copies of ``outputs``, to know its loss, their gradients and what it logs.

        Within a rehearsal.

        Args:
            watched_by: A context of the step, for the tensors of its batch and the outputs.
            is_known: Whether what the loss does here is no loss that is trained.

        Raises:
            Exception: whatever the step raises.
            NoLossError: it returns none that can be trained.
        """
        # Copies, for a step may change them in place, and others are tried on the same outputs.
        copies = (tensor.detach().clone() for tensor in outputs)
        leaves = tuple(copy.requires_grad_() if has_gradient(copy) else copy for copy in copies)
        with torch.enable_grad():
            given = writable(leaves)
        ends = _graph_of(given)
        passed: list[tuple[Any, ...]] = []
        logged: list[LogCall] = []
        states = self.call_states

        def answer(*arguments: Any, **keywords: Any) -> Any:
            if self.call.is_of_several:
                passed.append(self.call.inputs_for_data())
                return self.call.answers(given if is_tuple else given[0])
            passed.append(self.call.inputs(arguments, keywords))
            return self.call.answer(given if is_tuple else given[0], arguments, keywords)

        def left_out(name: str, _: str) -> None:
            if not is_known:
                self._tried_names.add(name)

        def log(*arguments: Any, **keywords: Any) -> None:
            log_call = self._logs.checked(micro_batch, arguments, keywords, left_out)
            if log_call is not None:
                logged.append(log_call)

        with torch.enable_grad():
            start = _now(self._module.device)
            watch = watched_by(list(tensors_of(micro_batch.data)), given)
            calls = TorchCalls()
            with nullcontext() if states is None else states.undone(), watch:
                returned = self._run_again(micro_batch, answer, log, calls=calls)
            middle = _now(self._module.device)
            why_not = why_no_loss(returned, self.call.called)
            if why_not is not None or len(passed) != 1:
                raise NoLossError(why_not or self._wrong_calls(micro_batch.step, returned, len(passed)))
            loss = returned["loss"] if isinstance(returned, Mapping) else returned
            graph = graph_of(loss, ends)
            operations = graph.operations | read_operations([graph])
            kept = _detached(returned) if micro_batch.keeps_returned else None
            if not is_known:
                self._tried |= operations
                self._tried_calls.note(calls.made)
                self._unlike_numbers.add_tried(calls)
                self.class_weights.note(graph.class_weights)
                self._tried_names |= names_of_numbers(logged, kept)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(loss.reshape(()), wanted, allow_unused=True))
            gradients = tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
            end = _now(self._module.device)
        return Tried(
            loss=float(loss.detach()),
            gradients=gradients,
            passed=passed[0],
            drawn=self._runs.ended,
            log_calls=logged,
            returned=kept,
            seconds=(middle - start, end - middle),
            operations=frozenset(name for pair in operations for name in pair),
        )

    def _loss_or_error(self, outputs: Any, micro_batch: MicroBatch, *, is_behind: bool = False) -> Tensor:
        try:
            return self._loss(outputs, micro_batch, is_behind)
        except Exception as error:
            if not self.rehearsing:
                if isinstance(error, ElsewhereError):
                    raise self._error(uses_weights(micro_batch.step, self.call.called, error)) from None
                if self._may_be_of_a_part(micro_batch, error):
                    micro_batch.is_retried = True
                    self._give_up(micro_batch)
                raise
            self.error_in_rehearsal = error
            return _nothing_of(outputs)

    def _may_be_of_a_part(self, micro_batch: MicroBatch, error: Exception) -> bool:
        """Whether the step may raise this for a micro-batch and not for its batch, which is then tried.

        So it does where it takes the four hardest samples, and a micro-batch has fewer.
        """
        is_known = isinstance(error, (UntriedLossError, self._error, ElsewhereError, *OUT_OF_MEMORY))
        return self._is_watched(micro_batch) and self.gives_up and not (is_known or micro_batch.is_retried)

    def _loss(self, outputs: Any, micro_batch: MicroBatch, is_behind: bool) -> Tensor:
        micro_batch.log_calls, micro_batch.calls = [], []
        micro_batch.loss = micro_batch.returned = None
        if micro_batch.place == 0:
            self._logs.begin_batch()
        num_calls, states = 0, self.call_states

        def answer(*arguments: Any, **keywords: Any) -> Any:
            nonlocal num_calls
            if self.call.is_of_several:
                self.draws.note_call()
                return self._checked(micro_batch.step, self.call.answers(outputs))
            num_calls += 1
            if num_calls > 1:
                raise self._error(self._wrong_calls(micro_batch.step, None, num_calls))
            self.draws.note_call()
            return self.call.answer(outputs, arguments, keywords)

        def log(*arguments: Any, **keywords: Any) -> None:
            log_call = self._logs.checked(micro_batch, arguments, keywords, lambda _, why: self._say(why))
            if log_call is not None:
                micro_batch.log_calls.append(log_call)

        ends = _graph_of(outputs)
        told = nullcontext() if self.rehearsing else self.told_metrics.watching(micro_batch)
        with self._logs.watching_metrics(), told:
            # A step that is watched may show a sign of another loss: then its batch runs again.
            again = self.rehearsing or self._may_run_again() or self._is_watched(micro_batch)
            calls = TorchCalls() if self._is_watched(micro_batch) else None
            with nullcontext() if states is None else states.undone() if self.rehearsing else states.kept():
                returned = self._runs.run(
                    micro_batch,
                    answer,
                    log,
                    record=micro_batch.calls.append,
                    again=again,
                    rehearsing=self.rehearsing,
                    is_behind=is_behind,
                    begins=self._begins(calls),
                )
        if micro_batch.keeps_returned:
            micro_batch.returned = _detached(returned)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, Tensor) and loss.numel() == 1:
            micro_batch.loss = loss.detach().reshape(())
        if not self.rehearsing:
            self.told_metrics.end(micro_batch)
        if isinstance(loss, Tensor) and micro_batch.loss is not None:
            if not self.rehearsing:
                self._check_draws(micro_batch)
            if self._is_watched(micro_batch):
                self._check_graph(micro_batch, loss, ends)
                self._check_names(micro_batch)
                if calls is not None:
                    self._check_calls(micro_batch, calls)
                if self.gives_up:
                    self._check_changes(micro_batch)
            if self.unsettled and micro_batch.step == "training_step" and not self.rehearsing:
                self._check_logs(micro_batch)
            if micro_batch.share == 0.0:
                return _nothing_of(outputs)
            other = self._other_weight(loss, ends, outputs) if micro_batch.place == 0 else None
            if other is not None:
                raise self._error(loss_depends_on_weights(micro_batch.step, self.call.called, other))
            is_trained = micro_batch.step == "training_step" and torch.is_grad_enabled() and not self.rehearsing
            if is_trained and not loss.requires_grad and any(each.requires_grad for each in tensors_of(outputs)):
                raise self._error(why_no_loss(returned, self.call.called) or "training_step returns no loss")
            return loss.reshape(()) * micro_batch.loss_scale
        if micro_batch.step == "training_step":
            raise self._error(why_no_loss(returned, self.call.called) or "training_step returns no loss")
        return torch.zeros((), device=self._module.device)

    def _other_weight(self, loss: Tensor, ends: Collection[Any], outputs: Any) -> str | None:
        """The name of a weight that the loss depends on otherwise than by the layers, and that nobody trains."""
        if self._is_cut:
            return other_weight(self._module, loss, ends, returned=tensors_of(outputs))
        pipeline = pipeline_of(self._module)
        if pipeline is None:
            return None
        # The one stage trains what its layers have, however the loss comes to it.
        of_nobody = pipeline.layers_of_user.given_to_optimizer().difference(pipeline.parameters())
        return other_weight(self._module, loss, ends, of_nobody) if of_nobody else None

    def _checked(self, step: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        """What answers the calls of several modules, and refuses those in a state that the step has changed."""

        def checked(path: str, *arguments: Any, **keywords: Any) -> Any:
            if self.call_states is not None:
                self.call_states.refuse(step, f"self.{path}()" if path else "self()")
            return answer(path, *arguments, **keywords)

        return checked

    def _is_watched(self, micro_batch: MicroBatch) -> bool:
        return self.watches and not self.rehearsing and micro_batch.step == "training_step"

    def _say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(f"madpipe: {sentence}", stacklevel=2)


def _nothing_of(outputs: Any) -> Tensor:
    """A loss of 0 that depends on ``outputs``."""
    floating = [t for t in as_tuple(outputs) if isinstance(t, Tensor) and has_gradient(t)]
    return torch.stack([as_real(t).sum() * 0.0 for t in floating]).sum() if floating else torch.zeros(())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _graph_of(outputs: Any) -> list[Any]:
    """Return where the graph of a stage's outputs ends, before a step changes them in place."""
    return [tensor.grad_fn for tensor in tensors_of(outputs) if tensor.grad_fn is not None]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else map_children(value, _detached)
