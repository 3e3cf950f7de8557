"""The layers of a LightningModule that does not name them: what its step calls, written down and cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from deepspeed_partition.capture import CaptureError
from deepspeed_partition.capture.recorder import DrawsApartError
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects, raised_together
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.runtime.random_state import preserved_random_state
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.finding.batch_states import state_of_other_size
from lightning_madpipe.finding.captured_call import CapturedCall
from lightning_madpipe.finding.captured_calls import CapturedCalls
from lightning_madpipe.finding.coarse_call import CoarseCall
from lightning_madpipe.finding.example_batch import STEPS, example_batch
from lightning_madpipe.finding.step_call import SeveralCallsError, StepCall, find_call
from lightning_madpipe.module import HOW_TO_SAY_IT, PipelineCall, pipeline_of
from lightning_madpipe.steps.batches import (
    UncutBatchError,
    batch_size_of,
    not_by_samples,
    split_batch,
    with_own_objects,
)
from lightning_madpipe.steps.early_optimizers import optimizers_for_steps
from lightning_madpipe.steps.followed_calls import key_of, trained_parts, undone, without_data_undone
from lightning_madpipe.steps.hooks_that_collect import read_around


def captured_layers(trainer: Any, module: Any, lightning: Lightning, num_micro_batches: int) -> PipelineCall:
    """The layers of what the first step of a run calls. Collective.

    Those of a run before are found again where the step calls the same.

    Raises:
        ValueError: there are none; the message says where that was seen and what to do.
    """
    try:
        with optimizers_for_steps(trainer, module, lightning):
            return _found(trainer, module, lightning, num_micro_batches)
    except ValueError as error:
        raise unknown_layers(module, error) from error


def _found(trainer: Any, module: Any, lightning: Lightning, num_micro_batches: int) -> PipelineCall:
    mine = raised_together(lambda: example_batch(trainer, module))
    whole = from_rank_0(lambda: mine)
    batch = split_batch(whole, num_micro_batches, ones_apart=True)[0]
    step = STEPS[trainer.state.fn.value]
    before = _call_before(module)
    try:
        call = find_call(module, step, with_own_objects(batch), lambda: undone(module, lightning))
    except SeveralCallsError as error:
        found = _several_calls(module, step, batch, before, error, lightning)
        if found is not before:
            _say(found.captured, num_micro_batches)
        return found
    if before is not None and before.attribute == call.attribute:
        assert before.captured is not None
        if before.captured.holds_for(call.args, call.kwargs):
            return before
    try:
        found = _captured(module, call, lightning)
    except Exception as error:  # also the model's own, where it runs with data
        if isinstance(error, DrawsApartError):
            raise
        reason = state_of_other_size(module, (call.args, call.kwargs))
        if reason is None and num_micro_batches > 1:
            reason = _why_not_in_pieces(module, step, whole, batch, lightning)
        if reason is None:
            raise
        raise ValueError(f"{error}; {reason}") from error
    assert found.captured is not None
    found.captured.know(key_of(step, batch), found.captured)
    _say(found.captured, num_micro_batches)
    return found


def _why_not_in_pieces(module: Any, step: str, whole: Any, piece: Any, lightning: Lightning) -> str | None:
    """Say what to do where a model raises for a micro-batch, and not for the batch that it was cut from."""
    size = batch_size_of(whole)
    if batch_size_of(piece) == size:
        return None

    def runs(batch: Any) -> bool:
        try:
            call = find_call(module, step, with_own_objects(batch), lambda: undone(module, lightning))
            with preserved_random_state(), undone(module, lightning), torch.no_grad():
                module.get_submodule(call.path)(*call.args, **call.kwargs)
        except Exception:  # what it raises for the micro-batch says more
            return False
        return True

    if runs(piece) or not runs(whole):
        return None
    few = batch_size_of(piece)
    return f"it runs for a whole batch of {size}, and not for {few} of its samples: {not_by_samples(size)}"


def _say(captured: CapturedCall | None, num_micro_batches: int) -> None:
    """Say once what a user should know of layers that were found."""
    assert captured is not None
    for note in (*captured.notes, *(captured.notes_on_decisions() if num_micro_batches > 1 else ())):
        announce(note)


def unknown_layers(module: Any, reason: Exception) -> ValueError:
    """The error of a module that names no layers, and in which none are found."""
    if isinstance(reason, UncutBatchError):  # which named layers would not mend
        return ValueError(f"the batches of {type(module).__name__} cannot be cut into micro-batches: {reason}")
    return ValueError(
        f"{type(module).__name__} has no pipeline_layers(), and the search for its layers failed: "
        f"{str(reason).removesuffix('.')}. Change that, or name the layers: {HOW_TO_SAY_IT}"
    )


def _call_before(module: Any) -> PipelineCall | None:
    pipeline = pipeline_of(module)
    call = None if pipeline is None else pipeline.call_of_module
    return call if call is not None and call.captured is not None else None


def _captured(module: Any, call: StepCall, lightning: Lightning) -> PipelineCall:
    """The layers of a call: of its capture, or where data decides of what it runs in order. Collective then."""
    model = module.get_submodule(call.path)
    captured: CapturedCall | None = None
    try:
        with without_data_undone(module, lightning):
            captured = CapturedCall(model, call.in_words, call.args, call.kwargs)
        whole = captured.undivided()
    except CaptureError as error:
        whole = "", error
    if whole is not None:
        captured = _of_elements(model, call, *whole, lambda: undone(module, lightning), captured)
    assert captured is not None
    return PipelineCall(layers=captured.layers, attribute=call.attribute, captured=captured)


def _of_elements(
    model: Any, call: StepCall, within: str, reason: CaptureError,
    undone: Callable[[], AbstractContextManager[None]], captured: CapturedCall | None,
) -> CapturedCall:  # fmt: skip
    """What a model runs in order, found by running it on the example. Collective.

    Args:
        captured: What is taken where it runs nothing in order; None: that is refused.
    """
    try:
        found = raised_together(lambda: _coarse(model, call, within, reason, undone))
    except CaptureError as error:
        if captured is None:
            raise
        captured.why_few = str(error)
        captured.notes.append(captured.why_few)
        return captured
    if len(set(gather_objects(found.coarse.description()))) > 1:
        raise CaptureError(
            f"{reason}. Ranks go different ways there: make the module from the same random numbers on all of "
            "them (seed_everything)"
        )
    return found


def _coarse(
    model: nn.Module, call: StepCall, within: str, reason: CaptureError,
    undone: Callable[[], AbstractContextManager[None]],
) -> CoarseCall:  # fmt: skip
    found = CoarseCall(model, call.in_words, call.args, call.kwargs, reason, within, undone)
    elements = [model.get_submodule(element.name) for element in found.coarse.elements]
    read = read_around(model, elements)
    if read is not None:
        collected, owner = read
        raise CaptureError(
            f"{reason}. Its elements cannot be layers either: {collected.hook} writes {collected.shown}, which "
            f"forward() of {owner} reads around them, where another rank runs it: let the elements return it, as "
            "in `return x, feature`, without the hook"
        )
    return found


def _several_calls(
    module: Any, step: str, batch: Any, before: PipelineCall | None, reason: Exception, lightning: Lightning
) -> PipelineCall:
    if (
        before is not None
        and isinstance(before.captured, CapturedCalls)
        and before.captured.holds_for((batch,), {})
    ):
        return before
    try:
        with undone(module, lightning):
            captured = CapturedCalls(module, step, batch, trained_parts(module))
    except ValueError as error:
        raise ValueError(f"{reason}, because its calls cannot be followed ({error})") from error
    captured.know(key_of(step, batch), captured)
    return PipelineCall(layers=captured.layers, attribute="forward", captured=captured)
