"""The user's ``*_step`` on a pipeline: its input is taken on the first stage, all else on the last."""

from __future__ import annotations

import functools
import inspect
import numbers
import random
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torchmetrics import Metric

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import warn_once
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from lightning_madpipe.compat.elsewhere import ElsewhereError
from lightning_madpipe.finding.captured_call import CapturedCall, OtherCallError
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.finding.step_call import line_of_users, replaced
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.steps.batch_runs import (
    BatchRun,
    Dims,
    Piece,
    Root,
    SamplesSelectedError,
    as_tuple,
    cut_inputs,
    rows_of_inputs,
    writable,
)
from lightning_madpipe.steps.batches import map_children, shapes_of, tensors_of
from lightning_madpipe.steps.beside_module import BesideModule
from lightning_madpipe.steps.left_untouched import left_untouched
from lightning_madpipe.steps.loss_signs import Attributes, Operations, UntriedLossError, operations_of
from lightning_madpipe.steps.losses import Tried
from lightning_madpipe.steps.metrics import BatchMetrics, MetricValue, metrics_of
from lightning_madpipe.steps.micro_batches import LogCall, MicroBatch
from lightning_madpipe.steps.own_generators import OwnGenerators
from lightning_madpipe.steps.recorded_calls import Call, recorded_loggers
from lightning_madpipe.steps.step_side_effects import Leftovers
from lightning_madpipe.steps.what_layers_set import LayerTraces
from lightning_madpipe.steps.written_files import writing_told

SKIPPING = "; a batch cannot be skipped, because the other stages are in the middle of it: return a loss times 0"


class NoLossError(Exception):
    """A training step that is tried returns no loss that depends on the outputs."""


class _InputTaken(BaseException):
    """Ends a step at the pipeline's call; no ``except Exception`` of the user's may stop it."""


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
        self._found = captured
        self._data: Any = None
        """What the step that runs is given."""
        self._is_cut = is_cut
        self._may_run_again = may_run_again
        self._traces = traces
        self._attribute = attribute
        self._context = context
        self._error = error
        self._ignored = ignored
        self._log_signature = inspect.signature(type(module).log)
        self._metrics = BatchMetrics()
        self._shapes_of_pieces: dict[Any, list[tuple[int, ...]]] = {}
        self._dims: dict[str, Dims] = {}
        self._dims_of_inputs: dict[str, list[tuple[int, int] | None]] = {}
        """What :func:`rows_of_inputs` has said last, of each step."""
        self._told: set[str] = set()
        self.running: str | None = None
        """The name of the step that runs."""
        self.watches = False
        """Whether a training step that shows a sign of a loss that was not tried gives its batch up."""
        self._tried: set[tuple[str, str]] = set()
        """Operations in losses that were tried."""
        self._rows: list[tuple[int, int] | None] | None = None
        """The dimension of the samples, and its length for each, in every tensor that a training step passes to
        ``forward``; None where all micro-batches pass the same."""
        self.rehearsing = False
        """Whether what runs is to leave no trace, and the other pipelines may not run it."""
        self.error_in_rehearsal: Exception | None = None
        """What a step has raised that was only measured: after it a backward may fail with words of torch."""
        self.draws = OwnGenerators(module, ignored, error)
        self.beside = BesideModule(module)
        """What steps may change beside the module."""
        self._ended: Mapping[str, int] = {}
        """Where generators were when a step that was rehearsed had ended."""
        self.drawn_from: set[str] = set()
        """The common generators that steps which were rehearsed have drawn from."""

    @property
    def _captured(self) -> CapturedCall | None:
        """The call that the layers run now."""
        return None if self._found is None else self._found.now

    def leftovers(self, *, undoable: bool = False, may_be_undone: bool = False) -> Leftovers:
        """The module as it is now, to tell later what a step left behind."""
        return Leftovers(
            self._module,
            self._ignored,
            undoable=undoable,
            may_be_undone=may_be_undone,
            beside=self.beside if self._is_cut else None,
        )

    def attributes(self) -> Attributes:
        """What of the module may change its loss, as it is now."""
        return Attributes(self._module, self._ignored, self.beside)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps that run meanwhile leave nothing behind."""
        before, rehearsed_already = self.leftovers(undoable=True), self.rehearsing
        self.rehearsing = True
        try:
            with self.draws.rehearsal():
                yield
        finally:
            self.rehearsing = rehearsed_already
            before.undo()

    def inputs(self, micro_batch: MicroBatch, *, is_last_stage: bool = True) -> Tensor | tuple[Tensor, ...]:
        """What the step passes to the pipeline; it ends there, and what it did until then is undone.

        Args:
            is_last_stage: Whether this rank runs all of the step, too. Otherwise tensors that it changed in place
                stay so until the last stage's arrive.
        """
        try:
            taken = self._taken(micro_batch, is_last_stage)
        except ElsewhereError as error:
            with pipeline_of(self._module).elsewhere.lifted():
                taken = self._taken(micro_batch, is_last_stage)
            if taken is not None:
                raise self._uses_weights(micro_batch, error) from None
        if taken is None:
            raise self._error(
                f"{micro_batch.step} does not call {self._called}, which runs the pipeline: call it once"
            )
        if not taken or not all(isinstance(value, Tensor) for value in taken):
            kinds = ", ".join(type(value).__name__ for value in taken) or "nothing"
            raise self._error(
                f"{micro_batch.step} calls {self._called} with {kinds}: only tensors can be sent to a pipeline"
            )
        return taken[0] if len(taken) == 1 else taken

    def _taken(self, micro_batch: MicroBatch, is_last_stage: bool) -> tuple[Any, ...] | None:
        """What the step calls the layers with; None if it does not."""
        taken: tuple[Any, ...] | None = None

        def take(*arguments: Any, **keywords: Any) -> None:
            nonlocal taken
            if self._captured is not None:
                taken = self._inputs_of_call(arguments, keywords)
                raise _InputTaken
            if keywords:
                raise self._error(
                    f"{micro_batch.step} calls {self._called} with the keyword arguments "
                    f"{', '.join(keywords)}: only positional tensors can be sent to a pipeline"
                )
            taken = arguments
            raise _InputTaken

        if isinstance(self._captured, CapturedCalls):
            with self._as_running(micro_batch.step):
                return self._inputs_of_call((micro_batch.data,), {})
        before = self.leftovers(undoable=is_last_stage)
        try:
            with torch.no_grad():
                self._run(micro_batch, take, lambda *_, **__: None, lambda _: None, again=True, only_inputs=True)
        except _InputTaken:
            pass
        finally:
            before.undo()
        return taken

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

    def _check_operations(self, micro_batch: MicroBatch, operations: Operations) -> None:
        if not operations <= self._tried:
            self._tried |= operations  # tried once, even if the trial fails
            self._give_up(micro_batch)

    def _give_up(self, micro_batch: MicroBatch) -> None:
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
            return self._loss_or_error(outputs, label)
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
            raise self._error(
                f"the loss of {step} needs no gradient: it does not depend on what {self._called} returns"
            )
        return loss

    def join(self, run: BatchRun, *, trains: bool) -> tuple[Tensor, ...]:
        """Join the outputs of a batch to those of one forward.

        Raises:
            ValueError: they cannot be joined.
        """
        step = run.micro_batches[0].step
        joined = run.join(self._dims.get(step), trains=trains)
        if len(set(run.sizes)) > 1:
            self._dims[step] = run.dims  # seen, where micro-batches of one size show nothing
        return joined

    def share_dims(self, group: dist.ProcessGroup) -> None:
        """Let every rank know how outputs grow with the samples: layers have moved, and the last stage with them.

        Collective over the pipeline ``group``.
        """
        for dims in gather_objects(self._dims, group):
            self._dims.update(dims)

    def try_once(self, micro_batch: MicroBatch, outputs: tuple[Tensor, ...], is_tuple: bool) -> Tried:
        """Run the step on copies of ``outputs``, to know its loss, their gradients and what it logs.

        Within a rehearsal.

        Raises:
            Exception: whatever the step raises.
            NoLossError: it returns none.
        """
        # Copies, for a step may change them in place, and others are tried on the same outputs.
        copies = (tensor.detach().clone() for tensor in outputs)
        leaves = tuple(copy.requires_grad_() if copy.is_floating_point() else copy for copy in copies)
        with torch.enable_grad():
            given = writable(leaves)
        ends = _graph_of(given)
        passed: list[tuple[Any, ...]] = []
        logged: list[LogCall] = []

        def answer(*arguments: Any, **keywords: Any) -> Any:
            if isinstance(self._captured, CapturedCalls):
                passed.append(self._inputs_of_call((self._data,), {}))
                return self._answers(given if is_tuple else given[0])
            passed.append(self._inputs_of_call(arguments, keywords))
            return self._answer(given if is_tuple else given[0], arguments, keywords)

        def log(*arguments: Any, **keywords: Any) -> None:
            bound = self._log_signature.bind(self._module, *arguments, **keywords)
            logged.append(self._checked(micro_batch, bound.arguments))

        with torch.enable_grad():
            start = _now(self._module.device)
            returned = self._run(micro_batch, answer, log, lambda _: None, again=True)
            middle = _now(self._module.device)
            loss = returned.get("loss") if isinstance(returned, Mapping) else returned
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or len(passed) != 1:
                raise NoLossError
            self._tried |= operations_of(loss, ends)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(loss.reshape(()), wanted, allow_unused=True))
            gradients = tuple(next(found) if leaf.requires_grad else None for leaf in leaves)
            end = _now(self._module.device)
        return Tried(
            loss=float(loss.detach()),
            gradients=gradients,
            passed=passed[0],
            drawn=self._ended,
            log_calls=logged,
            seconds=(middle - start, end - middle),
        )

    def _loss_or_error(self, outputs: Any, micro_batch: MicroBatch) -> Tensor:
        try:
            return self._loss(outputs, micro_batch)
        except Exception as error:
            if not self.rehearsing:
                if isinstance(error, ElsewhereError):
                    raise self._uses_weights(micro_batch, error) from None
                raise
            self.error_in_rehearsal = error
            return _nothing_of(outputs)

    def _loss(self, outputs: Any, micro_batch: MicroBatch) -> Tensor:
        micro_batch.log_calls, micro_batch.calls = [], []
        micro_batch.loss = micro_batch.returned = None
        if micro_batch.place == 0:
            self._metrics.begin()
        num_calls = 0

        def answer(*arguments: Any, **keywords: Any) -> Any:
            nonlocal num_calls
            if isinstance(self._captured, CapturedCalls):
                self.draws.note_call()
                return self._answers(outputs)
            num_calls += 1
            if num_calls > 1:
                raise self._error(
                    f"{micro_batch.step} calls {self._called} a second time: a pipeline runs once per "
                    "micro-batch; make one call, on inputs joined along dimension 0"
                )
            self.draws.note_call()
            return self._answer(outputs, arguments, keywords)

        def log(*arguments: Any, **keywords: Any) -> None:
            bound = self._log_signature.bind(self._module, *arguments, **keywords)
            micro_batch.log_calls.append(self._checked(micro_batch, bound.arguments))

        ends = _graph_of(outputs)
        with self._metrics.watching(self._module):
            # A step that is watched may show a sign of another loss: then its batch runs again.
            again = self.rehearsing or self._may_run_again() or self._is_watched(micro_batch)
            returned = self._run(micro_batch, answer, log, micro_batch.calls.append, again=again)
        if micro_batch.keeps_returned:
            micro_batch.returned = _detached(returned)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if isinstance(loss, Tensor) and loss.numel() == 1:
            micro_batch.loss = loss.detach().reshape(())
            if self._is_watched(micro_batch):
                self._check_operations(micro_batch, operations_of(loss, ends))
            if micro_batch.share == 0.0:
                return _nothing_of(outputs)
            if micro_batch.place == 0 and self._is_cut and self._has_other_weights(loss, ends):
                raise self._other_weights(micro_batch)
            return loss.reshape(()) * micro_batch.loss_scale
        if micro_batch.step == "training_step":
            raise self._error(
                f"training_step returns {type(returned).__name__}, not a loss: return a tensor of one "
                "element, or a dict with one as 'loss'" + SKIPPING * (returned is None)
            )
        return torch.zeros((), device=self._module.device)

    def _is_watched(self, micro_batch: MicroBatch) -> bool:
        return self.watches and not self.rehearsing and micro_batch.step == "training_step"

    def _inputs_of_call(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the first layer is given, where a step calls the layers so."""
        if self._captured is None:
            return arguments
        try:
            return self._captured.inputs(arguments, keywords)
        except OtherCallError as error:
            raise self._error(f"{self.running} calls {self._called} {error}") from None

    def _answer(self, outputs: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a step's call of the layers returns."""
        outputs = self._cut_off(outputs, self._inputs_of_call(arguments, keywords))
        return outputs if self._captured is None else self._captured.returned(outputs, arguments, keywords)

    def _answers(self, outputs: Any) -> Callable[..., Any]:
        """What stands for each of several modules that a step calls."""
        assert isinstance(self._captured, CapturedCalls)
        inputs = self._inputs_of_call((self._data,), {})
        answer = self._captured.answers(self._cut_off(outputs, inputs), self._data)

        def call(path: str, *arguments: Any, **keywords: Any) -> Any:
            try:
                return answer(path, arguments, keywords)
            except OtherCallError as error:
                called = f"self.{path}()" if path else "self()"
                raise self._error(f"{self.running} calls {called} {error}") from None

        return call

    def _cut_off(self, outputs: Any, arguments: Sequence[Any]) -> Any:
        """``outputs``, whose gradients by ``arguments`` a step may not ask for: it would find none."""
        asked = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
        if not asked or not torch.is_grad_enabled():
            return outputs

        def refuse() -> None:
            if self.running is not None:
                raise self._error(
                    f"{self.running} asks for gradients by what it passes to {self._called}, such as for a "
                    "gradient penalty, and in a pipeline these go back through the stages only when the step has "
                    "ended: let the layers compute what needs them, or train with a strategy that has the whole "
                    "model on each device, such as 'ddp'"
                )

        cut = [
            _CutOff.apply(refuse, tensor, *asked) if tensor.is_floating_point() else tensor
            for tensor in as_tuple(outputs)
        ]
        return tuple(cut) if isinstance(outputs, tuple) else cut[0]

    def _uses_weights(self, micro_batch: MicroBatch, error: Exception) -> Exception:
        name = str(error).partition(" is asked for ")[0]
        return self._error(
            f"{micro_batch.step} uses {name} otherwise than by its call of {self._called}, and in a pipeline a "
            "step has the weights of one stage only: for a penalty use the optimizer's weight_decay, to change "
            "weights a hook, such as on_train_batch_end, for a norm that is logged a hook and "
            "torch.distributed.all_reduce; or let the layers return what the step needs "
            f"({line_of_users(error)})"
        )

    def _other_weights(self, micro_batch: MicroBatch) -> Exception:
        return self._error(
            f"the loss of {micro_batch.step} depends on weights otherwise than through {self._called}, "
            "such as by a penalty on self.parameters(), and no rank of a pipeline has them all: use the "
            "optimizer's weight_decay, or let the layers return what the loss needs"
        )

    def _has_other_weights(self, loss: Tensor, ends: Collection[Any]) -> bool:
        """Whether gradients of ``loss`` reach weights other than through the graph of the outputs, ``ends``."""
        of_metrics = {weight for metric in metrics_of(self._module).values() for weight in metric.parameters()}
        todo, seen = [loss.grad_fn], set(ends)
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                leaf = getattr(node, "variable", None)
                if isinstance(leaf, nn.Parameter) and leaf not in of_metrics:
                    return True
                todo.extend(following for following, _ in node.next_functions)
        return False

    @staticmethod
    def _say_of_files(sentence: str) -> None:
        warn_once(f"written/{sentence.partition(' ')[0]}", sentence)

    def _say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(f"madpipe: {sentence}", stacklevel=2)

    @property
    def _called(self) -> str:
        return f"self.{self._attribute}()" if self._captured is None else self._captured.called

    def _run(
        self,
        micro_batch: MicroBatch,
        call: Callable[..., Any],
        log: Callable[..., None],
        record: Callable[[Call], None],
        *,
        again: bool,
        only_inputs: bool = False,
    ) -> Any:
        """Run the step while ``call`` stands for the layers and ``log`` for ``self.log``.

        Args:
            again: The step will run again on this micro-batch, so it gets a copy: it may change what it is given.
            only_inputs: It ends at its call of the layers.
        """
        data = _cloned(micro_batch.data) if again else micro_batch.data
        self._data = data
        stand_ins = [(self._module, self._attribute, call)]
        if isinstance(self._captured, CapturedCalls):
            stand_ins = self._captured_calls(call)
        elif self._captured is not None:
            stand_ins = [(self._captured.model, "forward", call)]
        elif self._attribute != "forward":
            sequential = getattr(self._module, self._attribute)
            stand_in = _SequentialStandIn(sequential, call, self._called, self._error)
            stand_ins = [(self._module, self._attribute, stand_in)]

        def show(*values: Any, **keywords: Any) -> None:
            record(Call(None, (("attribute", "print"),), tuple(map(str, values)), keywords))

        what = "inputs" if only_inputs else "all"
        with (
            self._context(),
            _seeded(micro_batch),
            self.draws.of_step(what, micro_batch.batch_seed, self._note_end if self.rehearsing else None),
            self._as_running(micro_batch.step),
            _all_replaced(stand_ins),
            replaced(self._module, "log", log),
            replaced(self._module, "print", show),
            _recorded(self._module, record),
            nullcontext() if self._traces is None else self._traces.hidden(micro_batch.step),
            left_untouched(self._module, micro_batch.step, self._error) if self._is_cut else nullcontext(),
            pipeline_of(self._module).elsewhere.listed() if self._is_cut else nullcontext(),
            writing_told(micro_batch.step, self._say_of_files) if self._is_cut else nullcontext(),
        ):
            try:
                return getattr(self._module, micro_batch.step)(data, *micro_batch.arguments)
            except StopIteration as error:  # by which Lightning would end the epoch
                raise self._error(
                    f"{micro_batch.step} raises StopIteration at {line_of_users(error)}, by which Lightning would "
                    "end the epoch on some ranks alone: catch it there; -1 from on_train_batch_start ends an epoch"
                ) from error

    def _note_end(self, ended: Mapping[str, int], common: Collection[str]) -> None:
        self._ended = ended
        self.drawn_from.update(common)

    def _captured_calls(self, call: Callable[..., Any]) -> list[tuple[Any, str, Any]]:
        """The forwards of all modules that a step calls; ``call()`` gives what stands for them."""
        assert isinstance(self._captured, CapturedCalls)
        answer: Callable[..., Any] | None = None

        def stand_in(path: str, *arguments: Any, **keywords: Any) -> Any:
            nonlocal answer
            answer = answer or call()
            return answer(path, *arguments, **keywords)

        modules = self._captured.modules.items()
        return [(module, "forward", functools.partial(stand_in, path)) for path, module in modules]

    @contextmanager
    def _as_running(self, step: str) -> Iterator[None]:
        self.running = step
        try:
            yield
        finally:
            self.running = None

    def _checked(self, micro_batch: MicroBatch, arguments: Mapping[str, Any]) -> LogCall:
        log_call = {name: value for name, value in arguments.items() if name != "self"}
        key, value, step = log_call["name"], log_call["value"], micro_batch.step
        if isinstance(value, Metric):
            log_call["value"] = self._metric_value(value, log_call, micro_batch)
        elif isinstance(value, Tensor) and value.numel() == 1:
            log_call["value"] = value.detach().reshape(())
        elif not isinstance(value, numbers.Real):
            raise self._error(
                f"{step} logs {key!r}, a {type(value).__name__}: with a pipeline self.log takes numbers, "
                "tensors of one element and torchmetrics metrics"
            )
        if log_call.get("sync_dist_group") is not None:
            raise self._error(
                f"{step} logs {key!r} with a sync_dist_group, which the strategy itself sets: leave it out"
            )
        return log_call

    def _metric_value(self, metric: Metric, log_call: LogCall, micro_batch: MicroBatch) -> MetricValue:
        path = next((path for path, child in metrics_of(self._module).items() if child is metric), None)
        if path is None:
            raise self._error(
                f"{micro_batch.step} logs {log_call['name']!r}, a {type(metric).__name__} that is no attribute of "
                f"the {type(self._module).__name__}: set it as one, so that the other ranks have it, too"
            )
        on_step = log_call.get("on_step")
        shown = micro_batch.step == "training_step" if on_step is None else on_step
        return MetricValue(path, self._metrics.value_of(metric) if shown and micro_batch.is_last else None)


class _CutOff(torch.autograd.Function):
    """Hands on an output of the layers, and calls ``refuse`` where a gradient is to go back to their inputs."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], None], output: Tensor, *inputs: Tensor) -> Tensor:
        ctx.refuse, ctx.num_inputs = refuse, len(inputs)
        return output.clone()  # and no view, which the step could not change in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.refuse()
        return None, gradient, *[None] * ctx.num_inputs


class _SequentialStandIn:
    """What ``self.net`` is while a step runs: it can be called as a whole, and nothing else."""

    def __init__(
        self, sequential: nn.Module, call: Callable[..., Any], called: str, error: type[Exception]
    ) -> None:
        self._sequential, self._call = sequential, call
        self._refusal = error(
            f"the step, or forward(), uses parts of {called.removesuffix('()')}, whose layers run on other ranks "
            "and leave there what they set on themselves: call it as a whole, let it return all that the step "
            "needs, or name the layers in pipeline_layers()"
        )

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with replaced(self._sequential, "forward", self._call):
            return self._sequential(*arguments, **keywords)  # with its hooks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal

    def __iter__(self) -> Iterator[Any]:
        raise self._refusal

    def __getitem__(self, index: Any) -> Any:
        raise self._refusal


def _nothing_of(outputs: Any) -> Tensor:
    """A loss of 0 that depends on ``outputs``."""
    floating = [t for t in as_tuple(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    return torch.stack([t.sum() * 0.0 for t in floating]).sum() if floating else torch.zeros(())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _graph_of(outputs: Any) -> list[Any]:
    """Return where the graph of a stage's outputs ends, before a step changes them in place."""
    return [tensor.grad_fn for tensor in tensors_of(outputs) if tensor.grad_fn is not None]


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else map_children(value, _cloned)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else map_children(value, _detached)


@contextmanager
def _recorded(module: Any, record: Callable[[Call], None]) -> Iterator[None]:
    """Let ``self.logger`` record what it is told."""
    trainer = getattr(module, "_trainer", None)
    if trainer is None:
        yield
        return
    loggers = trainer.loggers
    trainer.loggers = recorded_loggers(loggers, record)
    try:
        yield
    finally:
        trainer.loggers = loggers


@contextmanager
def _all_replaced(values: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in values:
            stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def _seeded(micro_batch: MicroBatch) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's random numbers, and restore them afterwards.

    The first and the last stage run the same step on the same micro-batch: what it draws, such as the shares of a
    mix-up of inputs and labels, must be the same on both. From Python's and NumPy's generators all micro-batches
    of a batch draw alike, as for the batch: which branch a step takes, say.
    """
    batch_seed = micro_batch.batch_seed
    seed = batch_seed if micro_batch.draws_alike else micro_batch.seed
    with preserved_random_state():
        random.seed(batch_seed)
        numpy.random.seed(batch_seed % 2**32)
        torch.random.default_generator.manual_seed(seed)
        if get_accelerator().device_name() != "cpu":
            get_accelerator().manual_seed(seed)
        yield
