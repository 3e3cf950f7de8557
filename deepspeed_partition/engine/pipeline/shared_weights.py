"""Weights that several layers of a pipeline have through one Python object.

In one process such layers train one weight. On two stages each process has a copy of its own, and the copies would
train apart. A module that stands at several places of the list is tied on every cut, as by DeepSpeed's
``TiedLayerSpec``. What is shared otherwise, a parameter of two modules or a module that a function holds, is
refused with the way out.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from deepspeed_partition.code_names import globals_in
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.given_modules import built_aside, reached
from deepspeed_partition.hidden_modules import hidden_modules

WAY_OUT = (
    "list deepspeed_partition.engine.TiedModule(key, module, forward_fn=...), or a TiedLayerSpec, of one key at "
    "both places"
)


HEDGE = ". If it only reads other things of it, this is nothing"
"""What is added where a function holds something, and may use it or not."""
_ALL_OF_A_MODULE = frozenset(
    ("children", "modules", "named_modules", "named_parameters", "parameters", "state_dict")
)
"""Methods by which code reaches all of a module without naming a part of it."""


class TiedModule(TiedLayerSpec):
    """A module that exists already and runs at several places of the pipeline, with the same weights.

    DeepSpeed's ``TiedLayerSpec`` for a model that was written for one device::

        def unembed(embed, x):
            return x @ embed.weight.t()

        layers = [TiedModule("embed", embed), *blocks, TiedModule("embed", embed, forward_fn=unembed)]

    In a LightningModule they stand in what ``pipeline_layers()`` returns.

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


def tie_repeated_modules(specs: Sequence[Any], num_stages: int, loss_fn: Any = None) -> list[Any]:
    """The list of layers in which a module that trains, and stands at several places, is a :class:`TiedModule`.

    Raises:
        ValueError: two layers share a weight otherwise, or a layer and the loss, and there are several stages.
    """
    tied = list(specs)
    for layers in places_of_repeated(specs):
        key, module = f"layer_{layers[0]}", specs[layers[0]]
        for layer in layers:
            tied[layer] = TiedModule(key, module)
        announce(
            f"layers {listed(layers)} are one {type(module).__name__} object: their weights are tied on every "
            f"cut, as by a TiedLayerSpec, and named tied_modules.{key}"
        )
    if num_stages > 1 and (reason := why_not_apart(tied, loss_fn)):
        raise ValueError(reason)
    return tied


def why_not_apart(specs: Sequence[Any], loss_fn: Any = None) -> str:
    """Why the layers and the loss cannot be on different stages as they are; empty where they can.

    What a function might use, and need not, is said in the log.
    """
    users = _users_of_weights(specs)
    reason, is_certain = _what_loss_shares(loss_fn, users, len(specs))
    if is_certain:
        return reason
    if reason:
        announce(f"{reason}{HEDGE}", logging.WARNING)
    shared = [layers for layers in users.values() if not _are_one(specs, layers)]
    if shared:
        return (
            f"layers {listed(shared[0])} share a weight through one Python object (of {len(shared)} in all), and "
            f"on two stages each would train a copy of its own: {WAY_OUT}"
        )
    return _what_functions_share(specs, {weight: layers[0] for weight, layers in users.items()})


def _what_loss_shares(loss_fn: Any, users: dict[nn.Parameter, list[int]], num_layers: int) -> tuple[str, bool]:
    """What the loss has of a layer that may be on another stage than the last one, and whether that is certain.

    Nothing is an empty reason. It is certain of what a loss that is a module has registered: DeepSpeed trains,
    moves and saves it with the loss.
    """
    owners = {weight: layers[0] for weight, layers in users.items() if num_layers - 1 not in layers}
    if not owners:
        return "", False
    registered = [loss_fn] if isinstance(loss_fn, nn.Module) else []
    for used in (*registered, *_used_by_loss(loss_fn, owners)):
        layers = _layers_of(used, owners)
        if layers:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            if len(layers) > 1:
                what, one = f"the layers {listed(layers)} share weights", "those layers"
            else:
                what, one = f"layer {layers[0]} share a weight", "that layer"
            instead = (
                ". A loss that only reads other things of the model holds it in a list (self.net = [net]), and "
                f"not as a submodule, which would be trained, moved and saved with the loss, and not with {one}"
            )
            reason = (
                f"the loss function ({name}) and {what} through one Python object, and on two stages each has a "
                f"copy of its own: let the last layer compute with it, and not the loss. For that {WAY_OUT}"
            )
            return (reason + instead, True) if used is loss_fn else (reason, False)
    return "", False


def _used_by_loss(loss_fn: Any, owners: dict[nn.Parameter, int]) -> Iterator[nn.Module | nn.Parameter]:
    """What a loss may use, and has not registered."""
    if not isinstance(loss_fn, nn.Module):
        yield from _used_by(loss_fn, owners)
        return
    names = set().union(*(_names_in(each) for each in _methods_of(type(loss_fn))))
    for path, held in hidden_modules(loss_fn).items():
        is_named = path.rpartition(".")[2] in names or not names.isdisjoint(_ALL_OF_A_MODULE)
        if is_named or len(_layers_of(held, owners)) == 1:
            yield held
    for method in _methods_of(type(loss_fn)):
        yield from _used_by(method, owners)


def _methods_of(kind: type) -> Iterator[Any]:
    """The functions of a class and of its bases in Python, but for those of torch."""
    for base in kind.__mro__:
        if base is not nn.Module and not base.__module__.startswith("torch."):
            own = (each for name, each in vars(base).items() if name != "__init__")
            yield from filter(inspect.isfunction, own)


def warn_of_weights_apart(specs: Sequence[Any], stage_of: Callable[[int], int], loss_fn: Any = None) -> None:
    """Say of a cut that DeepSpeed made which layers share a weight in one process and do not here."""
    users = _users_of_weights(specs)
    last = stage_of(len(specs) - 1)
    elsewhere = {weight: layers for weight, layers in users.items() if last not in map(stage_of, layers)}
    reason, is_certain = _what_loss_shares(loss_fn, elsewhere, len(specs))
    if reason:
        announce(reason if is_certain else f"{reason}{HEDGE}", logging.WARNING)
    for layers in users.values():
        if not _are_one(specs, layers) and len(set(map(stage_of, layers))) > 1:
            announce(
                f"layers {listed(layers)} share a weight through one Python object, DeepSpeed has put them on "
                f"different stages, and each trains a copy of its own: {WAY_OUT}",
                logging.WARNING,
            )
            return


def _users_of_weights(specs: Sequence[Any]) -> dict[nn.Parameter, list[int]]:
    users: dict[nn.Parameter, list[int]] = {}
    for layer, spec in enumerate(specs):
        for weight in dict.fromkeys(_weights_of(spec)):
            users.setdefault(weight, []).append(layer)
    return users


def _are_one(specs: Sequence[Any], layers: Sequence[int]) -> bool:
    """Whether layers train as one on every cut: a single one, or those that share a key."""
    keys = {getattr(specs[layer], "key", None) for layer in layers}
    return len(layers) == 1 or (None not in keys and len(keys) == 1)


def places_of_repeated(specs: Sequence[Any]) -> list[list[int]]:
    """The layers of each module that trains and stands at several places."""
    places: dict[int, list[int]] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, nn.Module) and any(weight.requires_grad for weight in spec.parameters()):
            places.setdefault(id(spec), []).append(layer)
    return [layers for layers in places.values() if len(layers) > 1]


def _weights_of(spec: Any) -> list[nn.Parameter]:
    """The trainable weights of a layer that exist before it is built: another layer may have them, too."""
    if isinstance(spec, nn.Module):
        return _trainable(spec.parameters())
    if isinstance(spec, TiedModule):
        return _trainable(spec.module.parameters())
    if not isinstance(spec, LayerSpec):
        return []
    given = {weight for held in reached([spec.module_args, spec.module_kwargs]) for weight in _parameters(held)}
    if not given:
        return []
    # It may take a part of what it is given: a block of a whole model.
    with torch.random.fork_rng(devices=[]), built_aside(spec, spec.build) as layer:
        return _trainable(weight for weight in layer.parameters() if weight in given)


def _what_functions_share(specs: Sequence[Any], owners: dict[nn.Parameter, int]) -> str:
    """Why a function cannot run apart from a layer whose weights it uses; empty where it can."""
    for layer, spec in enumerate(specs):
        if isinstance(spec, nn.Module | LayerSpec):
            continue
        for used in _used_by(spec, owners):
            found = _layers_of(used, owners)
            if len(found) == 1:
                return (
                    f"layer {layer} is a function that uses a {type(used).__name__} with weights of layer "
                    f"{found[0]}, and on two stages it would use a copy that is never trained: {WAY_OUT}"
                )
            if _trainable(_parameters(used)):
                whose = f"weights of the layers {listed(found)}" if found else "weights that no layer has"
                announce(
                    f"layer {layer} is a function that holds a {type(used).__name__} with {whose}: if it uses "
                    "them, make it a module or a TiedLayerSpec with a forward_fn, because a function's weights "
                    "are trained by no optimizer and do not move",
                    logging.WARNING,
                )
    return ""


def modules_before_building(spec: Any) -> list[nn.Module]:
    """The modules that a layer has before it is built: another layer may have them, too."""
    if isinstance(spec, nn.Module):
        return [spec]
    if isinstance(spec, TiedModule):
        return [spec.module]
    given = [spec.module_args, spec.module_kwargs] if isinstance(spec, LayerSpec) else []
    return [held for held in reached(given) if isinstance(held, nn.Module)]


def modules_used_by(function: Any, owners: dict[int, int]) -> list[nn.Module]:
    """The modules that a layer uses that is a function; of one with parts of several layers, those that it names.

    Args:
        owners: A layer that has a part, by the part's ``id``.
    """
    if isinstance(function, nn.Module | LayerSpec):
        return []
    names, found = _names_in(function), list[nn.Module]()
    for held in reached(_held_by(function)):
        if isinstance(held, nn.Module):
            whole = len({owners[id(part)] for part in held.modules() if id(part) in owners}) > 1
            found += [child for name, child in held.named_children() if name in names] if whole else [held]
    return found


def _used_by(function: Any, owners: dict[nn.Parameter, int]) -> Iterator[nn.Module | nn.Parameter]:
    """What a function holds; of a module of many, such as the whole model, the children that it names."""
    names = _names_in(function)
    for held in reached(_held_by(function)):
        children = dict(held.named_children()) if isinstance(held, nn.Module) else {}
        if children and len(_layers_of(held, owners)) != 1 and _ALL_OF_A_MODULE.isdisjoint(names):
            yield from (child for name, child in children.items() if name in names)
        else:
            yield held


def _layers_of(held: nn.Module | nn.Parameter, owners: dict[nn.Parameter, int]) -> list[int]:
    return sorted({owners[weight] for weight in _trainable(_parameters(held)) if weight in owners})


def _names_in(function: Any) -> Sequence[str]:
    """The attributes and globals that a function's code names."""
    if isinstance(function, functools.partial):
        return _names_in(function.func)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return () if code is None else code.co_names


def _held_by(function: Any) -> Iterator[Any]:
    """What a function can use without being given it."""
    if isinstance(function, functools.partial):
        yield from (function.func, function.args, function.keywords)
        yield from _held_by(function.func)
    elif inspect.ismethod(function):
        yield function.__self__
        yield from _held_by(function.__func__)
    elif inspect.isfunction(function):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # nothing is in it yet
                yield cell.cell_contents
        yield from (function.__globals__.get(name) for name in globals_in(function.__code__))
        yield from function.__defaults__ or ()


def _parameters(held: nn.Module | nn.Parameter) -> Iterable[nn.Parameter]:
    return [held] if isinstance(held, nn.Parameter) else held.parameters()


def _trainable(weights: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.requires_grad]


def listed(layers: Sequence[int]) -> str:
    """Numbers in words: ``1, 4 and 7``."""
    *others, last = map(str, layers)
    return f"{', '.join(others)} and {last}" if others else last


def weights_of_nobody(module: Any, weights: Iterable[nn.Parameter]) -> tuple[int, str]:
    """How many of an optimizer's weights no layer of a pipeline has, nor its loss module, and whose they are.

    Args:
        module: The pipeline module, one of whose stages is here.
        weights: Those that the optimizer is to train on this rank; of other ranks' layers, too. Ones without
            elements don't count: a rank that lacks a layer may have such stand-ins.
    """
    held = [module]
    for spec in module._layer_specs:
        given = (spec.module_args, spec.module_kwargs) if isinstance(spec, LayerSpec) else (spec,)
        held += reached([*given, getattr(spec, "module", None), *_held_by(spec)])
    known = {weight for each in held for weight in _parameters(each)}
    others = [each for each in dict.fromkeys(weights) if each.requires_grad and each.numel() and each not in known]
    of_loss = [each for each in reached(_held_by(module.loss_fn)) if isinstance(each, nn.Module)]
    kinds = [type(each).__name__ for each in of_loss if not {*others}.isdisjoint(each.parameters())]
    shapes = ", ".join(str(tuple(weight.shape)) for weight in others[:3])
    return len(others), f"of the {kinds[0]} that loss_fn uses" if kinds else f"of shape {shapes}"
