"""What a fit takes for given about the layers: which ones they are, and which of their weights are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_madpipe.module import PIPELINE, frozen_in_one_memory


class Structure:
    """The layers at their places in the user's module, and their frozen weights, as a run begins with them.

    To look at them before each step takes about a microsecond for each layer and weight of the rank.

    Args:
        module: The LightningModule.
        pipeline: Its layers.
        engine: The pipeline's engine.
        wraps: Whether DeepSpeed keeps flat copies of the weights that it trains.
        refusal: The host's exception with a sentence.
    """

    def __init__(
        self, module: nn.Module, pipeline: Any, engine: Any, wraps: bool, refusal: Callable[[str], Exception]
    ) -> None:
        self._wraps = wraps
        self._module, self._pipeline, self._engine, self._refusal = module, pipeline, engine, refusal
        # What the pipeline calls its own parts, such as a tied weight, comes and goes with the layers of a rank.
        own = f"{PIPELINE}."
        names = {part: path for path, part in module.named_modules() if path and not path.startswith(own)}
        call = pipeline.call_of_module
        layers = [layer for _, layer in call.existing_modules()]
        if call.captured is not None:  # whose layers hold the user's modules, and are none
            layers = [part for layer in layers for part in layer.modules()]
        self._places = [(names[layer], layer) for layer in layers if layer in names]
        self._have_moved = False
        self._weights: list[nn.Parameter] = []
        self._shapes: list[torch.Size] = []
        self._trains: list[bool] = []
        self.has_turned = False
        """Whether weights of this rank are frozen or unfrozen since other ranks have heard of it."""
        self._remember_weights()

    def check(self) -> None:
        """Refuse what a hook has made another layer, or another weight to train, since the run began.

        Raises:
            Exception: the host's, with a sentence.
        """
        for path, layer in self._places:
            if _part_at(self._module, path) is not layer:
                raise self._refusal(
                    f"self.{path} is another module than when this run began, and the pipeline trains the "
                    "one that was there: change layers in __init__(), setup() or configure_model(), or between "
                    "two runs"
                )
        if self._have_moved:
            self._have_moved = False
            self._refuse_one_memory()
        for weight, shape in zip(self._weights, self._shapes, strict=True):
            if weight.shape != shape:
                raise self._refusal(
                    f"{self._named(weight)} has the shape {tuple(weight.shape)} now and had {tuple(shape)} when "
                    "this run began, for which the pipeline and the optimizer were made: give it that in "
                    "__init__(), setup() or configure_model()"
                )
        if self._are_turned():
            self._refuse_one_memory()
            self._refuse_untrained()
            self._remember_weights()
            self.has_turned = True

    def follow_layers(self) -> None:
        """Know the weights of the layers that this rank has now, when layers have moved."""
        self.has_turned |= self._are_turned()  # also of those that leave
        before = dict(zip(map(id, self._weights), self._trains, strict=True))
        self._remember_weights()
        self._trains = [before.get(id(weight), weight.requires_grad) for weight in self._weights]
        self._have_moved = True

    def _are_turned(self) -> bool:
        return [weight.requires_grad for weight in self._weights] != self._trains

    def _remember_weights(self) -> None:
        self._weights = list(self._pipeline.parameters())
        self._shapes = [weight.shape for weight in self._weights]
        self._trains = [weight.requires_grad for weight in self._weights]

    def _refuse_one_memory(self) -> None:
        trained = (weight for weight in self._weights if weight.requires_grad and weight in frozen_in_one_memory)
        weight = next(trained, None)
        if weight is not None:
            raise self._refusal(
                f"{frozen_in_one_memory[weight]}, in two pipeline layers, are two parameters in one memory, which "
                "a hook has unfrozen, and on two stages these would be two weights: let both be one parameter, "
                "b.weight = a.weight"
            )

    def _refuse_untrained(self) -> None:
        optimizer = self._engine.basic_optimizer
        if optimizer is None:  # nothing is trained
            return
        pairs = zip(self._weights, self._trains, strict=True)
        turned = [weight for weight, trained in pairs if weight.requires_grad != trained]
        if self._wraps:
            raise self._refusal(
                f"{self._named(turned[0])} is {'un' * turned[0].requires_grad}frozen while fit runs, and "
                "DeepSpeed's ZeRO, bf16 and fp16 optimizers train what they began with: end fit and call it "
                "again, or use precision='32-true' with stage=0"
            )
        captured = self._pipeline.call_of_module.captured
        if captured is not None and captured.is_cut_off():
            raise self._refusal(
                f"{self._named(turned[0])} is unfrozen while fit runs, and the layers of this pipeline, which "
                "were found when it was frozen, send no gradients to it: end fit and call it again, or name the "
                "layers in pipeline_layers()"
            )
        given = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        missing = [weight for weight in turned if weight.requires_grad and id(weight) not in given]
        if missing:
            raise self._refusal(
                f"{self._named(missing[0])} is unfrozen while fit runs, and configure_optimizers has not given it "
                "to the optimizer: give it all parameters, of which it trains those with a gradient"
            )

    def _named(self, weight: nn.Parameter) -> str:
        names = (f"self.{name}" for name, each in self._module.named_parameters() if each is weight)
        return next(names, "a weight of a layer")


def _part_at(module: nn.Module, path: str) -> Any:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None
