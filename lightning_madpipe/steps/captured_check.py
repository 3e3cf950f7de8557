"""Whether captured layers compute what the module's own code does, found out on one micro-batch.

The model is called as the step calls it, and the layers run one after the other, on copies of all weights. What
both return and the gradients of all weights and inputs are compared. Where the model does not fit three times, it
is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_partition.capture.recorder import is_recording
from deepspeed_partition.capture.structure import flatten
from deepspeed_partition.code_names import function_of, is_librarys, names_in
from lightning_madpipe.finding.captured_call import verb
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.module import PipelineCall, called_as_written
from lightning_madpipe.steps.forward_reads import Read
from lightning_madpipe.steps.hook_writes import writes_in_hooks
from lightning_madpipe.steps.layer_check import LayerCheck, LayersDifferError, Verdict
from lightning_madpipe.steps.step_side_effects import Leftovers, Place
from lightning_madpipe.steps.watched_forward import WatchedForward


class CapturedCheck(LayerCheck):
    """A comparison of all captured layers at once with the model's own code, as the step calls it."""

    _list_in_words = "the layers that were found"

    def __init__(self, module: Any, call: PipelineCall, arguments: Sequence[Tensor], **settings: Any) -> None:
        super().__init__(module, call, arguments, **settings)
        self._target = call.target(module)
        assert call.captured is not None
        self._call = call.captured.now
        self._called = self._call.called
        self._mode = self._call.root.training
        self._with_gradients = self._mode and torch.is_grad_enabled()

        def forward(_: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return _tensors_of(self._call.run(inputs))

        self._forward = forward
        self._changed_in_calls: dict[Place, None] = {}
        """What the calls of a step with several of them have changed, and not the step itself."""
        self._reads_before_end: list[Read] = []
        """What such a step has read until its last call ended."""

    def _draws(self) -> None:
        """Look at no draws: what draws between layers was refused when these were found."""

    def _why_not(self) -> None:
        """Compare always: the code that is run is the model's."""

    def _found(self) -> Verdict:
        with called_as_written(self._target):
            return super()._found()

    def _run_forward(self, inputs: Sequence[Tensor], watched: WatchedForward, stack: ExitStack) -> Any:
        if isinstance(self._call, CapturedCalls):
            stack.enter_context(self._call.each_within(self._noted_call))
        return super()._run_forward(inputs, watched, stack)

    @contextmanager
    def _noted_call(self) -> Iterator[None]:
        if is_recording():  # for another state, of its code, which the watched run does not run now
            yield
            return
        with self._unnoted():
            before = self._traces()
        try:
            yield
        finally:
            with self._unnoted():
                self._changed_in_calls.update((change.place, None) for change in before.changes())
            self._reads_before_end = list(self._reads_so_far)

    @contextmanager
    def _unnoted(self) -> Iterator[None]:
        """Forget what is read meanwhile: to compare a module, all of it is read."""
        known = dict(self._reads_so_far)
        try:
            yield
        finally:
            self._reads_so_far.clear()
            self._reads_so_far.update(known)

    def _changed_by_forward(self, before: Leftovers) -> list[Place]:
        """What the model's code changes; a step that makes several calls runs itself and may read what it sets."""
        is_step = isinstance(self._call, CapturedCalls)
        return list(self._changed_in_calls) if is_step else super()._changed_by_forward(before)

    def _read_by_forward(self, before: Leftovers) -> Collection[Read]:
        """What the model's code reads.

        What a step reads behind its last call, the layers do not depend on, nor on a list that it lengthens
        between its calls: what it gives these is compared in every step.
        """
        if not isinstance(self._call, CapturedCalls):
            return super()._read_by_forward(before)
        places = (change.place for change in before.changes() if change.kind == "extend")
        longer = {Read(place.owner, place.name) for place in places if place.kind == "attribute"}
        return [read for read in self._reads_before_end if read not in longer]

    def _run_layers(self, first: int, last: int, passed: Any) -> Any:
        inputs = passed if isinstance(passed, tuple) else (passed,)
        outputs = super()._run_layers(first, last, passed)
        return _tensors_of(self._call.returned_for(outputs, inputs))

    def _compare(self, *, whole: bool) -> None:
        if whole:
            super()._compare(whole=True)
        else:
            self._notes.append(f"the layers of {self._name} are trained as they were found, without a comparison")

    def _compare_calls(self, *_: Any, **__: Any) -> None:
        """Compare nothing in between, where both call the same modules."""

    def _all_gradients(self, end: Any, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """What a backward leaves in the weights; inputs get no gradient from layers that are captured."""
        found, num_inputs = super()._all_gradients(end, leaves), len(self._arguments)
        without: list[Tensor | None] = [None] * num_inputs
        return without + found[num_inputs:] if found else found

    def _note_reads(self, of_values: Sequence[str]) -> None:
        asked = [str(read) for read in self._reads if read.is_of_the_trainer]
        if asked:
            self._notes.append(
                f"{self._call.called} of {self._name} {verb(self._call.called, 'reads')} {', '.join(asked[:3])}, "
                "which its layers have as it was when they were found: they are compared with it again at the "
                "start of each epoch"
            )
        if self._mode:
            self._note_writes()

    def _note_writes(self) -> None:
        """Note what hooks set of that which is read: a change ends a run that has trained for an epoch."""
        named = _names_in_forwards(self._module)
        reads = set()
        for read in self._reads:
            # All that a program has given a module of a library is looked at, whether it is read or not.
            is_read = read.name in named or not is_librarys(type(self._module.get_submodule(read.owner)))
            if is_read and not read.is_global:
                reads.add(".".join(filter(None, (read.owner, read.name))))
        told: set[str] = set()
        for write in writes_in_hooks(self._module, self._module.trainer.callbacks):
            if write.path in reads and write.path not in told:
                told.add(write.path)
                self._notes.append(
                    f"{write.hook} sets self.{write.path} ({write.line}), which {self._call.called} of "
                    f"{self._name} {verb(self._call.called, 'reads')}, and the layers that were found have what "
                    "it is now: if a later change makes the model compute something else, the run ends there. Let "
                    "the attribute be a tensor "
                    f"that the hook changes in place (self.{write.path}.fill_(...)), use it in the step, or write "
                    f"pipeline_layers()"
                )

    def _outside(self) -> dict[str, nn.Module]:
        """All modules of libraries, too: a number that a program has given one stands in the layers as it was."""
        of_libraries = {path: part for path, part in self._module.named_modules() if is_librarys(type(part))}
        return {**of_libraries, **super()._outside()}

    def _anchors(self) -> dict[nn.Module, None]:
        return {}

    def _foreign(self) -> dict[nn.Module, str]:
        return {}

    def _differs(self, what: str, advice: str) -> LayersDifferError:
        why_fewer = self._call.why_fewer() if isinstance(self._call, CapturedCalls) else ""
        if why_fewer:
            return LayersDifferError(
                f"the layers of {self._name} that were found are not all: {why_fewer}. Let the step do that "
                "before its first call or behind its last one, or make one call, self(...) or that of a module "
                "whose forward() runs them"
            )
        return LayersDifferError(
            f"the layers that were found of {self._call.called} of {self._name} do not compute what it does, "
            f"which {what}: put what changes from call to call, such as a number that its code counts or an "
            "attribute that something sets, into the forward() of a layer, hand a number that changes to "
            "self(...) as a tensor, or name the layers in pipeline_layers()"
        )


def _tensors_of(returned: Any) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in flatten(returned)[0] if isinstance(leaf, Tensor))


def _names_in_forwards(module: nn.Module) -> set[str]:
    """All names in the code of the program's ``forward()`` of a module and its parts."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    forwards = (function_of(vars(kind).get("forward")) for kind in kinds)
    return {name for each in forwards if each is not None for name in names_in(each.__code__)}
