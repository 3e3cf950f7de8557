"""What each step calls of a module whose layers were found: they run it, too, where steps call otherwise.

A ``validation_step`` may leave out the labels, or call ``self(x)`` where ``training_step`` calls
``self.model(**batch)``. Its call is captured when it is first made. Each module stays in the layer that it is in.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from deepspeed_partition.capture import CaptureError
from deepspeed_partition.dropped_writing import prints_asked
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.finding.captured_call import CapturedCall, OtherCallError, kind_of_sizes
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.finding.step_call import call_among, trained
from lightning_madpipe.module import PipelineCall
from lightning_madpipe.steps.batches import tensors_of, with_own_objects
from lightning_madpipe.steps.own_generators import OwnGenerators
from lightning_madpipe.steps.rank_of_step import told_as_process
from lightning_madpipe.steps.step_side_effects import Leftovers


def follow_step(module: Any, call: PipelineCall, step: str, batch: Any, lightning: Lightning) -> None:
    """Let captured layers run what a step calls, which may be another call than the one that they were found in.

    Args:
        batch: A micro-batch, for which the step runs up to its call where what it calls is not known yet. For one
            sample, or one word, the call is captured anew.

    Raises:
        OtherCallError: the layers cannot run it.
    """
    first = call.captured
    key = key_of(step, batch)
    if first is None or first.follow(key):
        return
    first.know(key, _call_of_step(module, first, step, batch, lightning))
    first.follow(key)


def key_of(step: str, batch: Any) -> Hashable:
    """What a call is known by: its step, and the kind of sizes that the step is given."""
    return step, kind_of_sizes(tensors_of(batch))


def _call_of_step(module: Any, first: CapturedCall, step: str, batch: Any, lightning: Lightning) -> CapturedCall:
    back = functools.partial(undone, module, lightning)
    if not isinstance(first, CapturedCalls):
        own, paths = trained(module)
        made = call_among(module, step, with_own_objects(batch), back, paths)
        if made is None:
            return first  # the step is told of that where it runs
        part = module.get_submodule(made[0].path)
        if part is not first.model and first.model in set(part.modules()):
            inner = [path for path in paths if module.get_submodule(path) is first.model]
            made = call_among(module, step, with_own_objects(batch), back, inner) or made
        call, line = made
        part = module.get_submodule(call.path)
        if part is first.model and first.holds_for(call.args, call.kwargs):
            return first
        if own <= set(part.parameters()):
            try:
                with back():
                    return first.another(part, call.in_words, call.args, call.kwargs)
            except CaptureError as error:
                raise OtherCallError(
                    f"{call.in_words} at {line}, and the layers that were found of {first.called} cannot run "
                    f"that: {error}"
                ) from error
    try:
        with back():
            return CapturedCalls(module, step, batch, trained_parts(module), first)
    except ValueError as error:
        raise OtherCallError(f"what the layers that were found of {first.called} cannot run: {error}") from error


def trained_parts(module: Any) -> list[str]:
    """The parts of a module with trained weights."""
    return [path for path in trained(module)[1] if path]


@contextmanager
def without_data_undone(module: Any, lightning: Lightning) -> Iterator[None]:
    """A context after which a module has no tensors without data that a capture has left in its attributes.

    Such as what a hook collects. All else stays: libraries hang hooks on a model when it is first called, and keep
    in an attribute that they did.
    """
    before = Leftovers(module, vars(lightning.module_class()), undoable=True)
    try:
        with _apart(module):
            yield
    finally:
        before.undo(lambda change: any(isinstance(tensor, FakeTensor) for tensor in tensors_of(change.value)))


@contextmanager
def undone(module: Any, lightning: Lightning) -> Iterator[None]:
    """A context after which a module has the attributes that it had, and its generators are where they were.

    So are its weights trained that were: a step that ends at its first call may have frozen them up to there.
    """
    of_host = vars(lightning.module_class())
    with OwnGenerators(module, of_host, lightning.refusal).rehearsal():
        trained_before = [(weight, weight.requires_grad) for weight in module.parameters()]
        before = Leftovers(module, of_host, undoable=True)  # which keeps iterators that can be put back
        try:
            with _apart(module):
                yield
        finally:
            before.undo()
            for weight, requires_grad in trained_before:
                weight.requires_grad = requires_grad


@contextmanager
def _apart(module: Any) -> Iterator[None]:
    """A context in which what is captured goes by one rank on all ranks, which are to find the same layers.

    Nothing is shown of what it prints.
    """
    with told_as_process("forward()", module.trainer.strategy, 0), prints_asked(lambda _: False):
        yield
