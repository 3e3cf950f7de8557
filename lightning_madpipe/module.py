"""What of a LightningModule is the pipeline: its layers, and the call that runs them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.pipe import TiedLayerSpec
from torch import nn
from torchmetrics import Metric

PIPELINE = "pipeline_module"
"""The attribute of the LightningModule that holds its pipeline, that is, this rank's layers."""

HOW_TO_SAY_IT = (
    "write `def pipeline_layers(self): return [self.embed, *self.blocks, self.head]`, that is, "
    "what forward() runs, in order"
)


class TiedModule(TiedLayerSpec):
    """A module that exists already and runs at several places of the pipeline, with the same weights.

    DeepSpeed's ``TiedLayerSpec`` for a model that was written for one device::

        def pipeline_layers(self):
            def unembed(embed, x):
                return x @ embed.weight.t()

            return [
                TiedModule("embed", self.embed),
                *self.blocks,
                TiedModule("embed", self.embed, forward_fn=unembed),
            ]

    Args:
        key: Names the tie: the same at each of its places.
        module: The same module at each of its places.
        forward_fn: What runs there, as ``forward_fn(module, inputs)``. None: ``module(inputs)``.
    """

    def __init__(self, key: str, module: nn.Module, forward_fn: Callable[..., Any] | None = None) -> None:
        names = [name for name, _ in module.named_parameters()]
        super().__init__(key, type(module), forward_fn=forward_fn, tied_weight_attr=names)
        self.module = module

    def build(self, log: bool = False) -> nn.Module:
        return self.module


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The layers of a LightningModule and the attribute whose call runs them all."""

    layers: tuple[Any, ...]
    """Modules, LayerSpecs, TiedLayerSpecs and functions, in the order in which they run."""
    attribute: str
    """``forward``, or the name of the module's ``nn.Sequential``."""

    def existing_modules(self) -> Iterator[tuple[int | str, nn.Module]]:
        """The modules that need no building, each with its owner: the layer's index, or the key of a tie."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                yield index, layer
            elif isinstance(layer, TiedModule):
                yield layer.key, layer.module


def find_layers(module: nn.Module) -> PipelineCall:
    """Ask ``module.pipeline_layers()``, or else take the children of its only ``nn.Sequential``.

    Raises:
        ValueError: neither is there; parameters outside the layers; two layers that share parameters.
    """
    call = _declared_layers(module) if hasattr(module, "pipeline_layers") else _sequential_layers(module)
    _check_parameters(module, call)
    return call


def detach_layers(module: nn.Module, call: PipelineCall) -> None:
    """Take the layers out of ``module.modules()``, and so out of ``module.parameters()``.

    With a pipeline a rank holds and trains its own layers only: they come back as the pipeline's
    children. The attributes stay readable (``module.head``), as plain references; on a rank that doesn't
    run such a layer they keep the initial weights.
    """
    inside = {part for _, layer in call.existing_modules() for part in layer.modules()}
    for name, child in list(module.named_children()):
        if not inside.isdisjoint(child.modules()):
            delattr(module, name)
            object.__setattr__(module, name, child)


def refuse_other_calls(module: nn.Module, attribute: str, refusal: Callable[[str], Exception]) -> None:
    """Let calls of all layers outside a step raise: a rank has some of them, and initial weights for the rest."""

    def refuse(*_: Any, **__: Any) -> None:
        raise refusal(
            f"self.{attribute}() is called outside a step, and this rank has its own stage of the layers only: "
            "use trainer.predict(), or load the whole model from a file of "
            "trainer.save_checkpoint(path, weights_only=True)"
        )

    target = module if attribute == "forward" else getattr(module, attribute)
    # In the instance dictionary, where steps put theirs meanwhile. A Sequential stays readable, layer by layer.
    object.__setattr__(target, "forward", refuse)


def outside_pipeline(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The LightningModule and its submodules but for the pipeline, with their names."""
    yield "", module
    for name, child in module.named_children():
        if name != PIPELINE:
            yield from child.named_modules(prefix=name)


def _declared_layers(module: Any) -> PipelineCall:
    layers = tuple(module.pipeline_layers())
    if not layers:
        raise ValueError(f"{type(module).__name__}.pipeline_layers() is empty: {HOW_TO_SAY_IT}")
    return PipelineCall(layers=layers, attribute="forward")


def _sequential_layers(module: nn.Module) -> PipelineCall:
    found = {name: child for name, child in module.named_children() if isinstance(child, nn.Sequential)}
    if len(found) != 1:
        raise ValueError(
            f"{type(module).__name__} has no pipeline_layers() and {len(found)} nn.Sequential children, so "
            f"its layers are unknown: {HOW_TO_SAY_IT}"
        )
    [child] = found.values()
    if type(child).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(module).__name__} has no pipeline_layers(), and its {type(child).__name__} has a forward() of "
            f"its own, so its layers are unknown: {HOW_TO_SAY_IT}"
        )
    [(name, sequential)] = found.items()
    return PipelineCall(layers=tuple(sequential), attribute=name)


def _check_parameters(module: nn.Module, call: PipelineCall) -> None:
    owners: dict[nn.Parameter, int | str] = {}
    for owner, layer in call.existing_modules():
        for parameter in layer.parameters():
            if owners.setdefault(parameter, owner) != owner:
                raise ValueError(
                    f"two pipeline layers of {type(module).__name__} share parameters of "
                    f"{type(layer).__name__}, and on two stages these would train apart: list "
                    "lightning_madpipe.TiedModule(key, module, forward_fn=...) of one key at both places"
                )
    # A metric may compute with a network of its own, which nobody trains.
    of_metrics = {weight for part in module.modules() if isinstance(part, Metric) for weight in part.parameters()}
    outside = [
        name
        for name, parameter in module.named_parameters()
        if parameter not in owners and parameter not in of_metrics
    ]
    if outside:
        shown = ", ".join(outside[:3]) + (", ..." if len(outside) > 3 else "")
        raise ValueError(
            f"{type(module).__name__} has parameters outside its pipeline layers ({shown}; {len(outside)} in "
            f"all), and no stage would own them: {HOW_TO_SAY_IT}"
        )
