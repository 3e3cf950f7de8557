"""The call of a model whose own code decides by data: what it runs in order are layers, with its code around them.

Such a model cannot be written down without data. It runs on the example batch instead, and for every batch its own
code runs before its first element and after its last one (see ``capture/coarse.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from deepspeed_partition.capture import CaptureError
from deepspeed_partition.capture.model_layers import FoundLayer
from deepspeed_partition.engine.captured_model import layers_of_elements
from deepspeed_partition.engine.pipeline.shared_weights import TiedModule
from deepspeed_partition.kept_weights import weights_kept
from lightning_madpipe.finding.captured_call import (
    DECIDES_APART,
    CapturedCall,
    OtherCallError,
    notes_on_caches,
    without_caches,
)  # fmt: skip
from lightning_madpipe.finding.step_call import SILENT, do_nothing, replaced


class CoarseCall(CapturedCall):
    """A call of a module that runs elements in order, and decides by data around them.

    Args:
        model: The module that is called: the LightningModule or a part of it.
        called: How the step calls it, such as ``self.model()``.
        args: What it is called with, with data.
        kwargs: What it is called with by name.
        reason: Why it is not captured.
        within: The module in it that decides, by name; empty: its own code does.
        undone: Gives a context after which the LightningModule is as it was.

    Raises:
        CaptureError: the reason, and why its elements cannot be layers.
    """

    def __init__(
        self,
        model: nn.Module,
        called: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reason: CaptureError,
        within: str,
        undone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._reason, self._within, self._undone = reason, within, undone
        super().__init__(model, called, args, kwargs)

    def _be_first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        model = self.model
        with ExitStack() as stack:
            kinds = stack.enter_context(without_caches(model))
            stack.enter_context(self._undone())
            stack.enter_context(weights_kept([model]))
            for name in SILENT:
                if hasattr(model, name):
                    stack.enter_context(replaced(model, name, do_nothing))
            layers = layers_of_elements(model, args, kwargs, self._reason, self._within)
        self.layers, self._recipe, self.coarse = tuple(layers), layers.recipe, layers.captured
        if () in self.coarse.output_shapes:
            raise CaptureError(
                f"{self._reason}. Cut between its elements it would return a loss of each micro-batch: let it "
                "return what the loss is made of, and compute the loss in the step"
            )
        self.coarse.context = lambda: without_caches(model)
        self.notes = [*self.coarse.notes, *notes_on_caches(kinds)]
        self._weights = list(map(id, model.parameters()))

    def undivided(self) -> None:
        return None

    def notes_on_decisions(self) -> list[str]:
        return [f"{type(self.model).__name__}: {DECIDES_APART}"]

    def lines_that_draw(self) -> list[str]:
        return []

    def is_told(self, decision: str) -> bool:
        """Whether :meth:`notes_on_decisions` tells of what a layer decides: it tells so of all code there."""
        return True

    def another(
        self, model: nn.Module, called: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CapturedCall:
        if model is not self.model:
            self._recipe.other_call()
        found = copy.copy(self)
        args, kwargs = self._in_order(args, kwargs)
        found.called, found._arguments = called, self._named(args, kwargs)
        found._other = found.coarse = self.coarse.for_other_arguments(args, kwargs)
        return found

    def let_reach(self, reach: Callable[[], AbstractContextManager[Any]]) -> None:
        """Nothing is captured again: each batch runs the model's own code."""

    def holds_for(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        try:
            self.inputs(args, kwargs)
        except OtherCallError:
            return False
        return self._weights == list(map(id, self.model.parameters())) and not self.is_cut_off()

    def is_cut_off(self) -> bool:
        """Whether weights around the elements were all frozen when layers were found, and one is trained now."""
        layers = [layer for layer in self.layers if isinstance(layer, FoundLayer)]
        return any(layer.get_parameter(name).requires_grad for layer in layers for name in layer.cut_off)

    def follow_modes(self) -> None:
        """Let the code around the elements run in the modes that the model's own modules have."""
        outside = self.layers[0].module if isinstance(self.layers[0], TiedModule) else self.layers[0].shared
        for name in self.coarse.copied:
            outside.get_submodule(name).training = self.model.get_submodule(name).training

    def returned(self, outputs: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.inputs(args, kwargs)
        return self.coarse.rebuilt(outputs)

    def returned_for(self, outputs: Any, inputs: Sequence[Tensor]) -> Any:
        return self.coarse.rebuilt(outputs)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        args, kwargs = self.coarse.arguments(inputs)
        with without_caches(self.root):
            return self.model(*args, **kwargs)
