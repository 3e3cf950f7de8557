"""What of a LightningModule is the pipeline: its layers, and the call that runs them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.utils.weak import WeakIdKeyDictionary
from torchmetrics import Metric

from deepspeed_partition.engine import TiedModule
from deepspeed_partition.engine.repartition.one_memory import may_share_memory, overlapping
from lightning_madpipe.finding.captured_call import CapturedCall

PIPELINE = "pipeline_module"
"""The child of the LightningModule for layers that its user gave no name, such as those from a ``LayerSpec``."""

HOLDER = "_madpipe"
"""The attribute of the LightningModule that knows its pipeline."""

HOW_TO_SAY_IT = (
    "write `def pipeline_layers(self): return [self.embed, *self.blocks, self.head]`, that is, "
    "what forward() runs, in order"
)


frozen_in_one_memory = WeakIdKeyDictionary()
"""Frozen parameters of different layers that have bytes together, each with the names of two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The layers of a LightningModule and the attribute whose call runs them all."""

    layers: tuple[Any, ...]
    """Modules, LayerSpecs, TiedLayerSpecs and functions, in the order in which they run."""
    attribute: str
    """``forward``, or the name of the module's ``nn.Sequential``, or of the part that is captured."""
    captured: CapturedCall | None = None
    """The call that the layers were found in, where the module does not name them."""

    def target(self, module: nn.Module) -> nn.Module:
        """What is called: the LightningModule or a part of it."""
        return module if self.attribute == "forward" else module.get_submodule(self.attribute)

    def existing_modules(self) -> Iterator[tuple[int | str, nn.Module]]:
        """The modules that need no building, each with its owner: the layer's index, or the key of a tie."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, nn.Module):
                yield index, layer
            elif isinstance(layer, TiedModule):
                yield layer.key, layer.module


def find_layers(module: nn.Module, captured: Callable[[], PipelineCall] | None = None) -> PipelineCall:
    """Ask ``module.pipeline_layers()``, or else take the children of its only ``nn.Sequential``.

    Args:
        captured: Finds the layers of a module that has neither.

    Raises:
        ValueError: neither is there; parameters outside the layers; two layers that share parameters. Each of its
            ``args`` is a reason.
    """
    if hasattr(module, "pipeline_layers"):
        call = _declared_layers(module)
    elif captured is not None and not _is_one_sequential(module):
        call = captured()
        if reasons := _in_one_memory(module, call):
            raise ValueError(*reasons)
        return call
    else:
        call = _sequential_layers(module)
    _check_parameters(module, call)
    return call


class PipelineHolder:
    """What a LightningModule knows its pipeline by. A copy of the module, also a saved one, has none."""

    def __init__(self, pipeline: Any = None) -> None:
        self.pipeline = pipeline

    def __reduce__(self) -> Any:
        return PipelineHolder, ()


def pipeline_of(module: Any) -> Any:
    """The DeepSpeed module that runs the layers of a LightningModule, which is not among its children; or None."""
    holder = vars(module).get(HOLDER) if module is not None else None
    return None if holder is None else holder.pipeline


ONE_AFTER_ANOTHER = (
    "what takes several calls, each made from what the one before gave, as in decoding word by word: call it when "
    "fit has returned, or load the whole model from a file of trainer.save_checkpoint(path, weights_only=True)"
)
"""Where calls that no step can make can be made."""
OUTSIDE_A_STEP = (
    "let a step make in one call what it gives, such as validation_step or predict_step from self(batch), or, for "
    f"{ONE_AFTER_ANOTHER}. Where the model makes its own data while it trains, as in reinforcement learning, use "
    "a strategy with the whole model on each device, such as ddp"
)
"""What to do instead of running layers in hooks and in data."""


def refuse_other_calls(
    module: nn.Module, attribute: str, refusal: Callable[[str], Exception]
) -> Callable[[], None]:
    """Let calls of all layers outside a step raise: a rank has some of them, and initial weights for the rest.

    Returns:
        What lets them be made again.
    """

    def refuse(*_: Any, **__: Any) -> None:
        raise refusal(
            f"self.{attribute}() is called outside a step, and this rank has its own stage of the layers only: "
            f"{OUTSIDE_A_STEP}. It may be a copy that a hook has made of it: make frozen copies, which a step may "
            "call, before fit, in __init__"
        )

    target = module if attribute == "forward" else module.get_submodule(attribute)
    with suppress(ValueError, TypeError):  # of code that is not Python's
        refuse.__signature__ = inspect.signature(target.forward)  # type: ignore[attr-defined]
    # In the instance dictionary, where steps put theirs meanwhile. A Sequential stays readable, layer by layer.
    before = vars(target).get("forward")
    object.__setattr__(target, "forward", refuse)

    def allow() -> None:
        if vars(target).get("forward") is refuse:
            object.__delattr__(target, "forward")
            if before is not None:  # a compiled module has one there
                object.__setattr__(target, "forward", before)

    return allow


@contextmanager
def called_as_written(target: nn.Module) -> Iterator[None]:
    """Let a call of a module run what its class says, which is refused or replaced otherwise."""
    own = vars(target)
    before = own.pop("forward", None)
    try:
        yield
    finally:
        if before is not None:
            own["forward"] = before


def outside_pipeline(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The LightningModule and its submodules but for the pipeline's layers, with their names."""
    pipeline = pipeline_of(module)
    skipped = set[int]() if pipeline is None else set(pipeline.elsewhere.ids_inside)
    skipped.add(id(module._modules.get(PIPELINE)))
    yield from _walk("", module, skipped)


def named_owners(module: Any) -> dict[str, Any]:
    """The module and the callbacks of its Trainer, in which a program keeps its own things."""
    callbacks = {type(callback).__name__: callback for callback in reversed(module.trainer.callbacks)}
    more = (
        (f"{type(callback).__name__} {place}", callback)
        for place, callback in enumerate(module.trainer.callbacks)
        if callbacks[type(callback).__name__] is not callback
    )
    return {"self": module, **callbacks, **dict(more)}


def _walk(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            yield from _walk(f"{path}.{name}" if path else name, child, seen)


def _declared_layers(module: Any) -> PipelineCall:
    layers = tuple(module.pipeline_layers())
    if not layers:
        raise ValueError(f"{type(module).__name__}.pipeline_layers() is empty: {HOW_TO_SAY_IT}")
    return PipelineCall(layers=layers, attribute="forward")


def _is_one_sequential(module: nn.Module) -> bool:
    """Whether all weights are in the only ``nn.Sequential``, whose children run in order."""
    try:
        _check_parameters(module, _sequential_layers(module))
    except ValueError:
        return False
    return True


def _sequential_layers(module: nn.Module) -> PipelineCall:
    found = {name: child for name, child in module.named_children() if isinstance(_original(child), nn.Sequential)}
    if len(found) != 1:
        raise ValueError(
            f"{type(module).__name__} has no pipeline_layers() and {len(found)} nn.Sequential children, so "
            f"its layers are unknown: {HOW_TO_SAY_IT}"
        )
    [(name, child)] = found.items()
    sequential: Any = _original(child)
    if type(sequential).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(module).__name__} has no pipeline_layers(), and its {type(sequential).__name__} has a "
            f"forward() of its own, so its layers are unknown: {HOW_TO_SAY_IT}"
        )
    layers = tuple(sequential)
    if isinstance(child, OptimizedModule):
        # torch.compile(self.net) is one graph; on several ranks it is one for each layer.
        layers = tuple(OptimizedModule(layer, child.dynamo_ctx) for layer in layers)
    return PipelineCall(layers=layers, attribute=name)


def _original(child: nn.Module) -> nn.Module:
    """``child`` without ``torch.compile``."""
    return child._orig_mod if isinstance(child, OptimizedModule) else child


def frozen_beside(module: nn.Module, owned: Collection[nn.Parameter]) -> list[nn.Module]:
    """The largest children of a LightningModule that train nothing and share nothing with its layers.

    A step may call them, such as the teacher of a distillation. Every rank has all of each.
    """
    found: list[nn.Module] = []
    for name, child in module.named_children():
        weights = list(child.parameters())
        if name == PIPELINE or not weights:
            continue
        if not any(weight.requires_grad or weight in owned for weight in weights):
            found.append(child)
        elif not isinstance(child, Metric):
            found += frozen_beside(child, owned)
    return found


def _in_one_memory(module: nn.Module, call: PipelineCall) -> list[str]:
    """Why two parameters of different layers that have bytes together cannot train; nothing where none have."""
    names = {weight: name for name, weight in module.named_parameters()}
    owners: dict[nn.Parameter, int | str] = {}
    for owner, layer in call.existing_modules():
        for parameter in layer.parameters():
            owners.setdefault(parameter, owner)
    weights = [weight for weight in owners if may_share_memory(weight)]
    for numbers in overlapping(weights):
        lying = [weights[number] for number in numbers]
        first = lying[0]
        other = next((weight for weight in lying if owners[weight] != owners[first]), None)
        if other is None:
            continue
        one, another = (names.get(weight, "a weight") for weight in (first, other))
        if any(weight.requires_grad for weight in lying):
            return [
                f"{one} and {another}, in two pipeline layers, are two parameters in one memory, as after "
                "`b.weight.data = a.weight.data`, and on two stages these would be two weights: let both be "
                "one parameter, b.weight = a.weight (and where layers are named, in one "
                "lightning_madpipe.TiedModule at both places)"
            ]
        frozen_in_one_memory.update(dict.fromkeys(lying, f"{one} and {another}"))
    return []


def _check_parameters(module: nn.Module, call: PipelineCall) -> None:
    owners: dict[nn.Parameter, int | str] = {}
    shared: dict[str, None] = {}
    for owner, layer in call.existing_modules():
        for parameter in layer.parameters():
            if owners.setdefault(parameter, owner) != owner:
                shared[type(layer).__name__] = None
    reasons = []
    if shared:
        reasons.append(
            f"two pipeline layers of {type(module).__name__} share parameters of {', '.join(shared)}, and on two "
            "stages these would train apart: list lightning_madpipe.TiedModule(key, module, forward_fn=...) of "
            "one key at both places"
        )
    reasons += _in_one_memory(module, call)
    # A metric may compute with a network of its own, which nobody trains; so may a step, with a teacher.
    whole = {weight for part in module.modules() if isinstance(part, Metric) for weight in part.parameters()}
    whole.update(weight for part in frozen_beside(module, owners) for weight in part.parameters())
    outside = [
        name
        for name, parameter in module.named_parameters()
        if parameter not in owners and parameter not in whole and not name.startswith(f"{PIPELINE}.")
    ]
    if outside:
        shown = ", ".join(outside[:3]) + (", ..." if len(outside) > 3 else "")
        reasons.append(
            f"{type(module).__name__} has parameters outside its pipeline layers ({shown}; {len(outside)} in "
            f"all), and no stage would own them: {HOW_TO_SAY_IT}; what forward() never runs, such as an unused "
            "head, has to leave the module (set it to None) or to be frozen before fit, requires_grad_(False), as "
            "a teacher that steps call, of which every rank then has a copy"
        )
    if reasons:
        raise ValueError(*reasons)
