"""Whether ``pipeline_layers()`` is what ``forward()`` computes, found out on one micro-batch.

The user's ``forward`` runs once, and is watched at its calls of the layers. What it hands from one layer to the
next must be what the first returned, unchanged, in values and in the gradients that come back. So random layers
need no care, for each of them runs once. Where ``forward`` does not call entries of the list as they stand there
(``F.relu`` in the place of ``nn.ReLU()``, a tied weight in a function), these entries are run on what went in,
with the same random numbers, and compared within the precision of the type. Then the list runs as a whole, and its
output and the gradients of all parameters and inputs are compared with those of ``forward``.

All of it takes place on copies of parameters and buffers; attributes, modes and random numbers are put back, and
of the user's hooks those alone are called that write what ``forward`` may read. It costs two forwards and two
backwards of one micro-batch through the whole model on one process, while the others wait, and room for its
activations and three times its weights. Where that does not fit, one layer at a time is on the device, for one
forward.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torchmetrics import Metric, SumMetric

from deepspeed_partition.capture.draws import EXTREMES, Draws, is_common, numbers_drawn
from deepspeed_partition.engine.pipeline.batch_attempt import OUT_OF_MEMORY
from deepspeed_partition.engine.runtime.random_state import drawn_state, random_state
from deepspeed_partition.layer_calls import needs_unpacking, unpacking
from deepspeed_partition.profiling.failed_backward import forget_failed_backward
from deepspeed_partition.profiling.isolation import stand_ins
from lightning_madpipe.finding.batch_states import state_of_other_size
from lightning_madpipe.finding.captured_call import verb
from lightning_madpipe.module import PipelineCall, TiedModule
from lightning_madpipe.steps.batches import tensors_of
from lightning_madpipe.steps.extreme_numbers import ExtremeNumbers, has_extremes
from lightning_madpipe.steps.forward_reads import Read, noted_reads
from lightning_madpipe.steps.hooks_that_collect import collected_by_hooks
from lightning_madpipe.steps.list_in_words import ListInWords, advice_for, module_of, some, times
from lightning_madpipe.steps.metrics import metrics_of, named_with_class
from lightning_madpipe.steps.module_state import (
    buffer_values,
    buffers_restored,
    fits,
    modes,
    restore_buffers,
    silenced,
)
from lightning_madpipe.steps.step_side_effects import Leftovers, Place
from lightning_madpipe.steps.tensor_comparison import (
    are_same,
    close,
    directions_for,
    equal,
    first_difference,
    first_gap_in_words,
    gap_in_words,
    gradients_of,
)
from lightning_madpipe.steps.watched_forward import LayerCall, Passed, WatchedForward, autograd_state
from lightning_madpipe.steps.what_layers_set import Left

CARRIED = (
    "forward() of {name} sets {places} and reads it in its next call, as recurrent networks carry a state from "
    "batch to batch. A pipeline runs the layers alone, on what it was at first, and so trains other weights than "
    "one process where the outputs depend on it: take a new state in each batch, or name the layers in "
    "pipeline_layers(), so that one layer carries it, with num_micro_batches=1"
)

SETTING = (
    "{called} of {name} {sets} {place} = {value!r}, and {runs} not run in a pipeline, which runs the layers "
    "alone: it is so for all batches of {mode}. Where it shall change, set it in a hook"
)
_OF_TORCHMETRICS = frozenset(vars(SumMetric()))
"""Attributes that every metric has."""

ALWAYS_THE_SAME = frozenset((
    "clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "detach",
    "view", "view_as", "reshape", "reshape_as", "flatten", "expand_as", "requires_grad_", "retain_grad",
))  # fmt: skip
"""What hands on the same values in every batch, where it does so in one."""


class LayersDifferError(Exception):
    """The list and ``forward`` compute different things; the message says where."""

    what = ""
    """What ``forward`` does, in words."""


class Setting(NamedTuple):
    """A text, or None in its place, that ``forward`` sets on a metric of the LightningModule.

    It says how the metric computes, such as a loss of pytorch-forecasting by which distribution, and steps ask for
    it.
    """

    metric: str
    """The metric's name in the module."""
    name: str
    value: str | None


@dataclass(frozen=True)
class Verdict:
    """What rank 0 found out."""

    difference: str | None = None
    """The place where the list is not what ``forward`` computes, and what to write; None where there is none."""
    notes: tuple[str, ...] = ()
    """What was not checked, and what ``forward`` does besides that a pipeline does not do."""
    reads: tuple[Read, ...] = ()
    """What ``forward`` reads besides its input, outside of the layers."""
    left: tuple[Left, ...] = ()
    """What ``forward`` and the layers set on modules while they run."""
    settings: tuple[Setting, ...] = ()
    """How metrics compute in this mode."""


class LayerCheck:
    """A comparison of the layers with ``type(module).forward``, in the module's mode.

    Args:
        module: The LightningModule.
        call: The layers, all of which this process can run.
        arguments: The tensors that the first layer takes, for one micro-batch.
        device: Where both run.
        dtype: What the engine trains in; None for the parameters' own type.
        context: Gives the context in which steps run.
        traces: Gives the module as it is now, to be compared and put back.
    """

    _list_in_words = "pipeline_layers()"
    _called = "forward()"

    def __init__(
        self,
        module: Any,
        call: PipelineCall,
        arguments: Sequence[Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype | None,
        context: Callable[[], AbstractContextManager[Any]],
        traces: Callable[[], Any],
    ) -> None:
        self._module, self._layers, self._arguments = module, call.layers, tuple(arguments)
        self._device, self._dtype, self._context, self._traces = device, dtype, context, traces
        self._forward = type(module).forward
        self._name, self._words = type(module).__name__, ListInWords(call.layers)
        self._mode = module.training
        self._with_gradients = module.training and torch.is_grad_enabled()
        # What the engine calls. Before hooks are silenced, which tell whether a layer unpacks by itself.
        self._functions = [unpacking(layer) for layer in self._layers]
        self._existing = [layer for _, layer in call.existing_modules()]
        self._notes: list[str] = []
        self._drawn: dict[str, None] = {}
        """What ``forward`` draws from outside of its layers, with the line: Python, NumPy, own iterators."""
        self._drawn_by_torch: dict[str, None] = {}
        """What it draws from torch, where no layer of the list does it in its place."""
        self._word: int | None = None
        """While ``forward`` gets the smallest or the largest numbers between its layers: one of ``EXTREMES``."""
        self._collected = list(collected_by_hooks(module, call))
        """What ``forward`` may read that hooks on layers write, which are called therefore."""
        self._in_segment = False
        self._reads: dict[Read, None] = {}
        self._reads_so_far: dict[Read, None] = {}
        """What has been read since ``forward`` began."""
        self._left: dict[Left, None] = {}
        self._put_back: Callable[[], None] = lambda: None
        """Gives the module and the layers the attributes that they had before ``forward`` ran."""
        self._put_weights_back: Callable[[], None] = lambda: None
        """Gives the copies of weights the values that they had before ``forward`` ran, where it writes some."""
        self._besides: dict[Place | str, str] = {}
        """What ``forward`` does besides, in words: by the place that it sets, or by what it calls."""
        self._set_now: Callable[[], list[Place]] = list
        """The places of the module that are not what they were before ``forward`` ran."""
        self._set_on_metrics: dict[Place, str | None] = {}
        """What ``forward`` sets on metrics by which these compute."""
        self._unclear: str | None = None
        """What may end gradients, in words; the comparison of all gradients has to show whether it does."""

    def verdict(self) -> Verdict:
        """Compare; the module and the random numbers are then what they were."""
        reason = self._why_not()
        if reason is not None:
            return Verdict(notes=(reason,))
        restore = random_state()
        try:
            return self._found()
        except LayersDifferError as difference:
            return Verdict(difference=str(difference))
        finally:
            restore()

    def _why_not(self) -> str | None:
        if (self._forward.__module__ or "").startswith(("torch.", "lightning.", "pytorch_lightning.")):
            return f"{self._name} has no forward() to compare {self._list_in_words} with"
        if any(isinstance(layer, LayerSpec) and not isinstance(layer, TiedModule) for layer in self._layers):
            why = "which is built where it runs"
            return f"pipeline_layers() has a LayerSpec, {why}: it is not compared with forward()"
        return None

    def _found(self) -> Verdict:
        known = set(self._module.modules())
        strange = [part for layer in self._existing for part in layer.modules() if part not in known]
        collecting = [each.function for each in self._collected]
        with silenced([self._module, *self._existing], but=collecting), modes(dict.fromkeys(strange, self._mode)):
            whole = self._fits()
            if whole:
                try:
                    self._compare(whole=True)
                    self._compare_draws(whole=True)
                except OUT_OF_MEMORY:
                    whole = False
                    self._notes.clear()
            if not whole:
                forget_failed_backward()
                gc.collect()
                self._compare(whole=False)
                self._compare_draws(whole=False)
                self._notes.append(
                    f"the whole {self._name} does not fit into {self._device} beside what is there: "
                    f"{self._list_in_words} could be compared with forward() layer by layer alone, and the "
                    "gradients of its weights were not"
                )
        return Verdict(
            notes=tuple(self._notes),
            reads=tuple(self._reads),
            left=tuple(self._left),
            settings=tuple(Setting(of.owner, of.name, value) for of, value in self._set_on_metrics.items()),
        )

    def _note_reads(self, of_values: Sequence[str]) -> None:
        asked = [str(read) for read in self._reads if read.is_of_the_trainer]
        if asked:
            self._notes.append(
                f"forward() of {self._name} reads {some(asked)}, and is not run in a pipeline, which runs "
                "the layers alone: pipeline_layers() is compared with it before the first step, and again at the "
                "start of each epoch; what shall change in training belongs in a layer"
            )
        if of_values:
            self._notes.append(
                f"forward() of {self._name} asks for the numbers in tensors ({some(of_values)}) outside of its "
                "layers: what it does for those of the first micro-batch is compared with pipeline_layers(), and "
                "nothing else; what shall depend on them belongs in a layer"
            )

    def _fits(self) -> bool:
        return fits([self._module, *self._existing], self._device, self._dtype)

    # The two ways to run

    def _draws(self) -> Draws | None:
        """The generators, beside torch's, that ``forward`` may draw from between its layers."""
        return Draws(self._module)

    def _compare_draws(self, *, whole: bool) -> None:
        """Refuse what ``forward`` does by numbers that it draws between its layers, where no layer does it.

        With the smallest and the largest numbers, it shows whether it does something else by others. If not, it is
        noted that it draws.

        Raises:
            LayersDifferError: it does, or draws from something of which no extremes are known.
        """
        drawn, by_torch, notes = list(self._drawn), list(self._drawn_by_torch), list(self._notes)
        if not drawn and not by_torch:
            return
        where = f"draws from {some([*drawn, *by_torch])} outside of its layers"
        advice = "put the draw, and what is done by it, into the forward() of a layer"
        if not all(map(is_common, drawn)) or not all(map(has_extremes, by_torch)):
            raise self._differs(f"{where}, which no rank does in a pipeline", advice)
        try:
            for self._word in EXTREMES:
                with numbers_drawn(self._word):
                    self._compare(whole=whole)
        except LayersDifferError as difference:
            what = f"{where}, and by another number it {difference.what}"
            raise self._differs(what, advice) from difference
        finally:
            self._word, self._notes[:] = None, notes
        self._notes.append(
            f"forward() of {self._name} {where}, which no rank does in a pipeline: no number changes what it does "
            "with the first micro-batch, but the numbers that are drawn after it are others than in one process; "
            f"leave it out, or {advice}"
        )

    def _compare(self, *, whole: bool) -> None:
        inputs = [_leaf(tensor, self._with_gradients) for tensor in self._arguments]
        restore = self._random_state()
        with ExitStack() as stack:
            stack.callback(restore)
            if whole:
                self._put_weights_back = stack.enter_context(self._copies([self._module, *self._existing]))()
            else:
                for layer in self._anchors():
                    stack.enter_context(self._alone(layer))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self._with_gradients))
            buffers = buffer_values([self._module, *self._existing])
            passed = [tensor.clone() for tensor in inputs]  # which may be changed in place
            given = Passed.of(tuple(passed))
            draws = self._draws()
            watched = WatchedForward(self._anchors(), given, self._foreign(), draws, self._word)
            if draws is not None:
                stack.enter_context(draws.rewound())
            start = autograd_state()
            try:
                outputs = self._run_forward(passed, watched, stack)
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                self._note_besides()
                state = state_of_other_size(self._module, self._arguments)
                if state is not None:
                    raise LayersDifferError(f"forward() of {self._name} raises {error}: {state}") from error
                self._notes.append(
                    f"{self._list_in_words} could not be compared with forward() of {self._name}, which raises "
                    f"{type(error).__name__} here: {error}"
                )
                return
            returned = Passed.of(outputs)
            after = _random_numbers()
            self._drawn.update(watched.drawn)
            self._compare_calls(watched, given, returned, start, whole=whole)
            # The list as a whole draws ordinary numbers.
            if whole and (self._word is None or not self._drawn_by_torch):
                drew = self._compare_whole(inputs, outputs, buffers, restore, after)
                if drew:
                    self._compare_without_chance(buffers)
            self._note_besides()

    def _run_forward(self, inputs: Sequence[Tensor], watched: WatchedForward, stack: ExitStack) -> Any:
        had = {name: dict(vars(metric)) for name, metric in metrics_of(self._module).items()}
        before, within = self._traces(), Leftovers(nn.ModuleList(self._existing), vars(nn.Module()), undoable=True)

        def put_back() -> None:
            before.undo()
            within.undo()

        self._put_back = put_back
        stack.callback(put_back)
        self._set_now = lambda: [change.place for change in before.changes()]
        besides: dict[Place | str, str] = {}
        silent = {
            name: lambda *_, _name=name, **__: besides.setdefault(
                _name, f"{verb(self._called, 'calls')} self.{_name}()"
            )
            for name in ("log", "log_dict")
        }
        for name, stand_in in silent.items():
            object.__setattr__(self._module, name, stand_in)
        try:
            with (
                self._context(),
                watched.hooked(),
                noted_reads(self._outside(), before.ignored) as self._reads_so_far,
                watched,
            ):
                outputs = self._forward(self._module, *inputs)
            watched.end(getattr(inspect.unwrap(self._forward), "__code__", None))
            return outputs
        finally:
            watched.put_generators_back()
            for name in silent:
                object.__delattr__(self._module, name)
            collected = {each.shown for each in self._collected}
            reads = self._read_by_forward(before)
            self._reads.update((read, None) for read in reads if str(read) not in collected)
            changed = self._changed_by_forward(before)
            self._left.update(dict.fromkeys(self._left_by(changed, within)))
            self._note_reads(list(watched.read_values))
            read = {str(read) for read in reads} - collected
            counting = metrics_of(self._module)
            carried = [
                str(change.place)
                for change in before.changes()
                if str(change.place) in read
                and change.kind not in ("extend", "continues")  # what it only collects
                and change.place.owner not in counting
                and any(each.is_floating_point() for each in tensors_of(change.value))
            ]
            if carried:
                self._notes.append(CARRIED.format(name=self._name, places=some(carried)))
            said_already = collected.union(carried)
            for place in changed:
                metric = counting.get(place.owner)
                if metric is not None and _says_how(metric, had.get(place.owner), place):
                    self._set_on_metrics[place] = vars(metric)[place.name]
                elif str(place) not in said_already:
                    what = str(place) if metric is None else named_with_class(place.owner, metric)
                    besides[place] = f"{verb(self._called, 'sets' if metric is None else 'updates')} {what}"
            self._besides = besides

    def _note_besides(self) -> None:
        """Note what ``forward`` does besides, and no layer does where it runs in the list."""
        words = {
            "called": self._called, "name": self._name, "sets": verb(self._called, "sets"),
            "runs": verb(self._called, "is"), "mode": "training" if self._mode else "evaluation",
        }  # fmt: skip
        self._notes += [
            SETTING.format(place=place, value=value, **words) for place, value in self._set_on_metrics.items()
        ]
        told = list(dict.fromkeys(self._besides.values()))
        if told:
            self._notes.append(
                f"{self._called} of {self._name} also {some(told)}, and {verb(self._called, 'is')} not run in a "
                "pipeline, which runs the layers alone: do that in the steps"
            )

    def _changed_by_forward(self, before: Leftovers) -> list[Place]:
        """What of the module ``forward`` has changed."""
        return [change.place for change in before.changes()]

    def _read_by_forward(self, before: Leftovers) -> Collection[Read]:
        """What ``forward`` has read outside of the layers."""
        return self._reads_so_far

    def _run_layers(self, first: int, last: int, passed: Any) -> Any:
        for layer, function in zip(self._layers[first:last], self._functions[first:last], strict=True):
            if not isinstance(layer, TiedModule):
                passed = function(passed)
            elif layer.forward_fn is None:
                passed = layer.module(passed)
            else:
                passed = layer.forward_fn(layer.module, passed)
        return passed

    # Between two calls

    def _compare_calls(
        self, watched: WatchedForward, given: Passed, returned: Passed, start: tuple[Any, ...], *, whole: bool
    ) -> None:
        place, last = -1, given
        done: list[str] = []
        drawn: list[str] = []
        names = {part: name for name, part in self._module.named_modules()}
        last_calls = {call.layer: number for number, call in enumerate(watched.calls)}
        for number, call in enumerate(watched.calls):
            done += call.done_before
            drawn += call.drawn_before
            found = self._next_place(call, place, lambda part: last_calls.get(part, -1) > number)  # noqa: B023
            if found is None:
                done.append(f"self.{names.get(call.layer, '')} ({type(call.layer).__name__})")
                continue
            self._compare_call(call, found, start)
            self._note_draws(drawn, place, found)
            self._compare_link(place, last, found, call.given, done, whole)
            if call.returned is None:
                return  # forward() caught what the layer raised, and the whole will show it
            if not whole and call.num_given > 1 and not needs_unpacking(call.layer):
                # In a pipeline it gets one tuple. The whole shows what that gives.
                what = f"calls {self._words.described(found)} with {call.num_given} arguments"
                with torch.no_grad():
                    self._compare_segment(found - 1, call.given, found + 1, call.returned, what, whole)
            place, last, done, drawn = found, call.returned, [], []
        self._note_draws([*drawn, *watched.drawn_by_torch], place, len(self._layers))
        self._compare_link(place, last, len(self._layers), returned, [*done, *watched.done], whole)

    def _note_draws(self, drawn: Sequence[str], before: int, after: int) -> None:
        """Note what was drawn from torch between two neighbors of the list; what is between them draws itself."""
        if after == before + 1:
            self._drawn_by_torch.update(dict.fromkeys(drawn))

    def _next_place(self, call: LayerCall, place: int, comes_later: Callable[[Any], bool]) -> int | None:
        """Find the place of this call in the list; None if it comes before one that the list has before it."""
        places = self._places[call.layer]
        found = next((index for index in places if index > place), None)
        if found is not None:
            skipped = map(_callable_module, self._layers[place + 1 : found])
            return None if any(map(comes_later, skipped)) else found
        here = self._words.described(places[-1])
        if place in places:
            what = f"calls {here} a second time, and it stands in the list {times(len(places))}"
        else:
            what = f"calls {here} after {self._words.described(place)}, and in the list it stands before that"
        raise self._differs(what, "name the layers in the order in which forward() calls them, each as often")

    def _compare_call(self, call: LayerCall, place: int, start: tuple[Any, ...]) -> None:
        here = self._words.described(place)
        if call.keywords:
            raise self._differs(
                f"calls {here} with {some(call.keywords)}, and in a pipeline it gets only what the layer before "
                "it returns",
                "let the layers hand on all that later ones need, as a tuple of tensors, or make it an attribute "
                "of the layer",
            )
        if not call.given.is_plain:
            raise self._differs(
                f"calls {here} with a {call.given.kind}, and in a pipeline it gets tensors that the layer before "
                "it returns",
                "let the layers hand on tensors, or tuples of tensors",
            )
        if call.state != start:
            if call.state[1:] != start[1:]:
                raise self._differs(f"calls {here} under another autocast", "set that within the layer")
            # torch.no_grad(), or a checkpoint, which runs it so and again later.
            self._unclear = self._unclear or f"calls {here} without gradients (torch.no_grad)"

    def _compare_link(
        self, before: int, left: Passed, after: int, right: Passed, done: Sequence[str], whole: bool
    ) -> None:
        """Compare what one layer returned, or the input, with what the next got, or what ``forward`` returns."""
        skipped = self._layers[before + 1 : after]
        between = self._words.between(before, after)
        what = (
            f"calls {some(list(dict.fromkeys(done)))} {between}"
            if done
            else f"changes what is handed on {between}"
        )
        if not right.is_plain:
            raise self._differs(
                f"returns a {right.kind}", "let the last layer return what forward() returns, as tensors"
            )
        if skipped:
            self._compare_segment(before, left, after, right, what, whole)
            return
        same = len(left.values) == len(right.values) and all(map(equal, left.values, right.values))
        if not same:
            raise self._differs(what, advice_for(done))
        is_untouched = are_same(left.tensors, right.tensors) and left.versions == right.versions
        if not is_untouched and not ALWAYS_THE_SAME.issuperset(done):
            raise self._differs(
                f"{what}, which changes nothing in the first micro-batch, and would not run in a later one that "
                "it changes",
                advice_for(done),
            )
        if not self._with_gradients:
            return
        for was, now, had, has in zip(left.tensors, right.tensors, left.num_hooks, right.num_hooks, strict=True):
            if now is was:
                if has != had:
                    raise self._differs(
                        f"registers a hook on the gradient {between}", "register it within the layer"
                    )
            elif was.requires_grad:
                [gradient], direction = gradients_of([now], [was])
                if gradient is None or not equal(gradient, direction[0]):
                    raise self._differs(f"{what}, which changes gradients", advice_for(done))

    def _compare_segment(
        self, before: int, left: Passed, after: int, right: Passed, what: str, whole: bool
    ) -> None:
        """Compare entries of the list that ``forward`` does not call as they stand there with what it does."""
        skipped = self._layers[before + 1 : after]
        names = some([self._words.described(index) for index in range(before + 1, after)])
        inputs = [
            _leaf(value, tensor.requires_grad) for value, tensor in zip(left.values, left.tensors, strict=True)
        ]
        gradients = self._passed_back(right, left.tensors)
        assert left.restore is not None
        left.restore()
        modules = [m for m in map(module_of, skipped) if m is not None]
        numbers = _random_numbers()
        with ExitStack() as stack:
            if whole:
                stack.callback(self._put_weights_back)
            else:
                stack.enter_context(self._copies(modules))
            stack.enter_context(buffers_restored(buffer_values(modules)))
            self._in_segment = True
            try:
                with ExtremeNumbers(self._word):
                    outputs = self._run_layers(before + 1, after, _as_passed(inputs))
            except OUT_OF_MEMORY:
                raise
            except Exception as error:
                raise self._differs(
                    f"does not call {names}, which cannot run on what it gets ({type(error).__name__}: {error})",
                    "name what forward() runs, in order",
                ) from error
            finally:
                self._in_segment = False
            found = Passed.of(outputs)
            drew = numbers != _random_numbers()
            if not found.is_plain:
                raise self._differs(
                    f"{what}, where the list has {names}, which returns a {found.kind}",
                    "a layer of a pipeline returns a tensor or a tuple of tensors",
                )
            if len(found.values) != len(right.values):
                raise self._differs(f"{what}, where the list has {names}", "name what forward() runs, in order")
            for ours, theirs in zip(found.values, right.values, strict=True):
                if not close(ours, theirs):
                    raise self._differs(
                        f"{what}, where the list has {names}, which computes something else "
                        f"({gap_in_words(ours, theirs)})" + " from the same random numbers" * drew,
                        "name what forward() runs, in order",
                    )
            again = self._passed_back(found, inputs)
            if gradients is not None and again is not None and first_difference(gradients, again) is not None:
                raise self._differs(
                    f"{what}, where the list has {names}, whose gradients differ",
                    "name what forward() runs, in order",
                )

    def _passed_back(self, end: Passed, start: Sequence[Tensor]) -> list[Tensor | None] | None:
        """The gradients of ``start``; None where they cannot be told without those of all before."""
        if not self._with_gradients or not torch.is_grad_enabled():
            return None
        try:
            return gradients_of(end.tensors, start)[0]
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            return None

    # All of it

    def _compare_whole(
        self,
        inputs: Sequence[Tensor],
        outputs: Any,
        buffers: Sequence[tuple[Tensor, Tensor]],
        restore: Callable[[], None],
        after: Any,
    ) -> bool:
        """Compare outputs and gradients of ``forward`` with those of the list.

        Returns:
            Whether they differ, and so do the random numbers that were drawn: then nothing is said.

        Raises:
            LayersDifferError: they differ otherwise.
        """
        theirs = Passed.of(outputs)
        named = self._named_weights()
        weights = list(named)
        # Before the list runs: batch normalization changes what its backward may ask for.
        try:
            of_theirs = self._all_gradients(theirs, [*inputs, *weights])
        except OUT_OF_MEMORY:
            raise
        except RuntimeError as error:  # such as of a tensor that a hook of an earlier step has kept
            forget_failed_backward()
            self._notes.append(
                f"{self._list_in_words} could not be compared with forward() of {self._name}, whose backward "
                f"raises {type(error).__name__} here: {error}"
            )
            return False
        restore_buffers(buffers)
        restore()
        self._put_back()  # what a layer counts begins again
        self._put_weights_back()
        again = [_leaf(tensor, self._with_gradients) for tensor in self._arguments]
        try:
            sequence = self._run_layers(0, len(self._layers), _as_passed(again))
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            raise self._differs(
                f"runs, and the list does not ({type(error).__name__}: {error})",
                "name what forward() runs, in order",
            ) from error
        for place in self._set_now():
            self._besides.pop(place, None)
            self._set_on_metrics.pop(place, None)
        ours = Passed.of(sequence)
        other_numbers = after != _random_numbers()
        gap = first_gap_in_words(ours.values, theirs.values)
        if gap is not None:
            if other_numbers:
                return True
            raise self._differs(
                f"returns something else than the list ({gap})", "name what forward() runs, in order"
            )
        found = first_difference(of_theirs, self._all_gradients(ours, [*again, *weights]))
        if found is not None:
            what = f"input {found}" if found < len(inputs) else named[weights[found - len(inputs)]]
            where = self._unclear or f"gives {what} another gradient than the list"
            raise self._differs(where, "let the layers do that, or leave it out")
        return False

    def _all_gradients(self, end: Passed, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """What a backward leaves in each of ``leaves``. By backward(), which every checkpoint allows."""
        if not self._with_gradients:
            return []
        ends = [(t, d) for t, d in zip(end.tensors, directions_for(end.tensors), strict=True) if t.requires_grad]
        if ends:
            torch.autograd.backward([t for t, _ in ends], [d for _, d in ends])
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return gradients

    def _compare_without_chance(self, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Compare again in the mode of evaluation, in which dropout does nothing."""
        parts = [part for owner in (self._module, *self._existing) for part in owner.modules()]
        with modes(dict.fromkeys(parts, False)):
            restore_buffers(buffers)
            self._put_back()
            self._put_weights_back()
            restore = self._random_state()
            inputs = [_leaf(tensor, self._with_gradients) for tensor in self._arguments]
            with self._context():
                outputs = self._forward(self._module, *(tensor.clone() for tensor in inputs))
            # Random numbers that are drawn even then are those of the same beginning.
            if self._compare_whole(inputs, outputs, buffers, restore, _random_numbers()):
                raise self._differs("returns something else than the list", "name what forward() runs, in order")
        self._notes.append(
            f"forward() of {self._name} draws its random numbers in another order than its layers in sequence: "
            "the two were compared layer by layer, and as a whole in eval() alone"
        )

    # Words

    def _differs(self, what: str, advice: str) -> LayersDifferError:
        error = LayersDifferError(
            f"pipeline_layers() of {self._name} is not what forward() computes: forward() {what}: {advice}; "
            "MadPipeStrategy(check_layers=False) trains the list as it is"
        )
        error.what = what
        return error

    # Modules

    def _random_state(self) -> Callable[[], None]:
        """Return a function that puts generators back to where they are now, those that layers hold, too."""
        of_all, of_layers = random_state(), drawn_state([self._module, *self._existing])

        def restore() -> None:
            of_all()
            of_layers()

        return restore

    def _anchors(self) -> dict[nn.Module, None]:
        """The layers whose calls in ``forward`` can be seen."""
        return dict.fromkeys(self._places)

    @functools.cached_property
    def _places(self) -> dict[nn.Module, list[int]]:
        """Where in the list each module stands whose calls in ``forward`` can be seen."""
        found: dict[nn.Module, list[int]] = {}
        for place, module in enumerate(map(_callable_module, self._layers)):
            if module is not None:
                found.setdefault(module, []).append(place)
        return found

    def _foreign(self) -> dict[nn.Module, str]:
        """The modules that are not in the list, neither around nor within a layer, with their names."""
        inside = {part for layer in self._existing for part in layer.modules()}
        return {
            part: name for name, part in self._module.named_modules() if name and inside.isdisjoint(part.modules())
        }

    def _outside(self) -> dict[str, nn.Module]:
        """The modules around the layers and beside them, whose attributes ``forward`` may read, by name."""
        inside = {part for layer in self._existing for part in layer.modules()}
        return {path: part for path, part in self._module.named_modules() if part not in inside}

    def _left_by(self, changed: Sequence[Place], within: Leftovers) -> Iterator[Left]:
        """What ``forward`` and the layers have set; a buffer that changes is a statistic."""
        collected = {(id(each.owner), each.name) for each in self._collected}
        for place in changed:
            owner = self._module.get_submodule(place.owner) if place.kind == "attribute" else None
            if owner is not None and (id(owner), place.name) not in collected:
                yield Left(None, place.owner, place.name)
        for place in (change.place for change in within.changes()):
            layer, _, path = place.owner.partition(".")
            if place.kind == "attribute" and layer:
                owner = self._existing[int(layer)].get_submodule(path)
                if (id(owner), place.name) not in collected:
                    yield Left(int(layer), path, place.name)

    def _named_weights(self) -> dict[Tensor, str]:
        named = {w: f"self.{name}" for name, w in self._module.named_parameters() if w.requires_grad}
        for index, layer in enumerate(self._layers):
            part = module_of(layer)
            for name, w in part.named_parameters() if part is not None else ():
                if w.requires_grad:
                    named.setdefault(w, f"{name} of layer {index}")
        return named

    def _copies(self, modules: Sequence[nn.Module]) -> AbstractContextManager[Callable[[], Callable[[], None]]]:
        return stand_ins(modules, self._device, dtype=self._dtype, trains=False)

    @contextmanager
    def _alone(self, layer: nn.Module) -> Iterator[None]:
        """Let ``layer`` run on copies that are on the device for one call, and end gradients there."""
        run, had = layer.forward, "forward" in vars(layer)

        @functools.wraps(run)
        def forward(*arguments: Any, **keywords: Any) -> Any:
            if self._in_segment:
                return run(*arguments, **keywords)
            with self._copies([layer]), torch.no_grad():
                outputs = run(*arguments, **keywords)
            # Copies of leaves: what follows may change them in place.
            if isinstance(outputs, Tensor):
                return _leaf(outputs, self._with_gradients).clone()
            if type(outputs) in (list, tuple):
                ends = (_leaf(o, self._with_gradients).clone() if isinstance(o, Tensor) else o for o in outputs)
                return type(outputs)(ends)
            return outputs

        object.__setattr__(layer, "forward", forward)
        try:
            yield
        finally:
            if had:
                object.__setattr__(layer, "forward", run)
            else:
                object.__delattr__(layer, "forward")


def _callable_module(layer: Any) -> nn.Module | None:
    """The module whose call in ``forward`` is a run of ``layer``; None for functions."""
    if isinstance(layer, TiedModule):
        return layer.module if layer.forward_fn is None else None
    return layer if isinstance(layer, nn.Module) else None


def _random_numbers() -> tuple[Any, ...]:
    """What tells whether random numbers have been drawn."""
    devices = [torch.cuda.get_rng_state()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return tuple(bytes(state.numpy().tobytes()) for state in (torch.get_rng_state(), *devices))


def _as_passed(leaves: Sequence[Tensor]) -> Any:
    """What a layer is given: one tensor, or a tuple of them; which it may change in place, as no leaf may be."""
    copies = tuple(leaf.clone() for leaf in leaves)
    return copies[0] if len(copies) == 1 else copies


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_(requires_grad and (leaf.is_floating_point() or leaf.is_complex()))


def _says_how(metric: Metric, before: Mapping[str, Any] | None, place: Place) -> bool:
    """Whether an attribute of a metric is a text, or None in its place, by which it may choose how it computes.

    Args:
        before: The metric's attributes when ``forward`` began; None for one that it has made.
    """
    if before is None or place.kind != "attribute" or place.name not in vars(metric):
        return False
    values = vars(metric)[place.name], before.get(place.name)
    return place.name not in _OF_TORCHMETRICS and all(isinstance(value, str | None) for value in values)
