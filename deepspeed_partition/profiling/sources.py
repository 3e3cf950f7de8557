"""Layers as a user may list them, and how to run each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from deepspeed_partition.code_names import attribute_of
from deepspeed_partition.layer_calls import is_layer_spec, unpacking
from deepspeed_partition.pipeline_attributes import is_engine, is_pipeline_module, modules_of_program
from deepspeed_partition.profiling.live_bytes import storages_of
from deepspeed_partition.tensor_values import num_bytes_of


@dataclass(frozen=True)
class BuiltLayer:
    """Layer that can run."""

    call: Callable[[Any], Any]
    modules: tuple[nn.Module, ...]
    """Modules whose parameters are the layer's."""

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def buffers(self) -> list[torch.Tensor]:
        return [buffer for module in self.modules for buffer in module.buffers()]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the parameters; those that share memory count once."""
        places = {(*map(id, _storages_of(p)), p.storage_offset()): p for p in self.parameters()}
        return sum(map(num_bytes_of, places.values()))

    @property
    def trainable_parameters(self) -> tuple[int, ...]:
        """Return how many numbers each parameter has that is trained, in order."""
        return tuple(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers; those that share memory count once."""
        return sum(
            {id(each): each.nbytes() for buffer in self.buffers() for each in _storages_of(buffer)}.values()
        )


@dataclass(frozen=True)
class LayerSource:
    """Layer as the user listed it: a specification is built only while it is measured."""

    source: Any
    name: str
    type: str
    """Type as DeepSpeed's ``type:REGEX`` names it: a class, or a function's own name."""

    def build(self) -> BuiltLayer:
        """Build the layer on the CPU; a module that exists is taken as it is.

        Raises:
            ValueError: the specification cannot be built.
        """
        source = self.source
        if is_layer_spec(source):
            try:
                module = source.build()
            except Exception as error:
                raise ValueError(f"layer {self.name!r} cannot be built: {said(error)}") from error
            forward = getattr(source, "forward_fn", None)  # only a TiedLayerSpec may have one
            return BuiltLayer(unpacking(functools.partial(forward, module) if forward else module), (module,))
        return BuiltLayer(unpacking(source), modules_of(source))


def layer_sources(
    layers: Iterable[Any], *, names: Sequence[str] | None = None, first_index: int = 0
) -> list[LayerSource]:
    """Check and name layers: a named child of a Sequential by its name, any other ``"<index>.<type>"``.

    Raises:
        ValueError: there are no layers, or one cannot be called.
    """
    if isinstance(layers, nn.Sequential):
        if names is None:
            names = [name if not name.isdigit() else "" for name in layers._modules]
    elif not isinstance(layers, Iterable) or isinstance(layers, str):
        raise ValueError(f"layers is a {type(layers).__name__}: a list of layers or an nn.Sequential is needed")
    listed = list(layers)
    if not listed:
        raise ValueError("layers is empty: a chain has at least one layer")
    if names is not None and len(names) != len(listed):
        raise ValueError(f"names has {len(names)} entries for {len(listed)} layers")
    sources = []
    for index, layer in enumerate(listed):
        number = first_index + index
        if not is_layer_spec(layer) and not callable(layer):
            raise ValueError(
                f"layer {number} is a {type(layer).__name__}: a layer is a module, a LayerSpec or a function"
            )
        type_name = _type_name(layer)
        name = names[index] if names is not None else ""
        sources.append(LayerSource(layer, name or f"{number}.{type_name}", type_name))
    return sources


users_names: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What the user of a host calls modules, such as ``self.net.1``: messages on layers say it, too."""
MOST_NAMED = 3


def layer_in_words(name: str, modules: Sequence[nn.Module]) -> str:
    """A layer as messages name it: ``'1.Linear' (self.net.1)`` where its user has a name of his own for it."""
    found = list(dict.fromkeys(each for module in modules for each in _names_within(module)))
    if not found:
        return repr(name)
    more = ", ..." if len(found) > MOST_NAMED else ""
    return f"{name!r} ({', '.join(found[:MOST_NAMED])}{more})"


def _names_within(module: nn.Module) -> Iterator[str]:
    """The name of a module, or those of the outermost ones within it that have one."""
    if module in users_names:
        yield users_names[module]
        return
    for child in module.children():
        yield from _names_within(child)


def said(error: BaseException) -> str:
    """Return an error of the user's code, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def modules_of(layer: Any) -> tuple[nn.Module, ...]:
    if isinstance(layer, nn.Module):
        return (layer,)
    if isinstance(layer, functools.partial):  # DeepSpeed's form of a tied layer that was built
        given = (*layer.args, *layer.keywords.values())
        return (*modules_of(layer.func), *(item for item in given if isinstance(item, nn.Module)))
    wrapped = getattr(layer, "__wrapped__", None)
    return () if wrapped is None else modules_of(wrapped)


def modules_called(function: Any) -> tuple[nn.Module, ...]:
    """Return the modules that a loss function is, or is given: their weights are its own.

    A pipeline module's are its layers': of a method of one, and of itself, the modules count that a program has
    added to it.
    """
    found: list[nn.Module] = []
    for each in _wrapped_by(function):
        owner = each.__self__ if isinstance(each, MethodType) else each
        if isinstance(owner, nn.Module) and is_pipeline_module(owner):
            found += modules_of_program(owner)
        elif isinstance(each, nn.Module) and not is_engine(each):
            found.append(each)
    return tuple(found)


def methods_of(function: Any) -> list[tuple[nn.Module, MethodType]]:
    """Return the methods of modules that a loss function is, or is around, each with its module."""
    found = [(each.__self__, each) for each in _wrapped_by(function) if isinstance(each, MethodType)]
    return [
        (owner, method)
        for owner, method in found
        if isinstance(owner, nn.Module) and not is_engine(owner) and not is_pipeline_module(owner)
    ]


def _wrapped_by(function: Any) -> Iterator[Any]:
    """A function, or what it is made of: what it is around, and of a partial the modules that it is given."""
    seen: list[Any] = []
    while not any(function is each for each in seen):
        seen.append(function)
        if isinstance(function, functools.partial):
            given = (*function.args, *function.keywords.values())
            yield from (each for each in given if isinstance(each, nn.Module))
            function = function.func
            continue
        yield function
        wrapped = None if isinstance(function, nn.Module) else attribute_of(function, "__wrapped__")
        function = function if wrapped is None else wrapped


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor, also behind one without memory."""
    return [tensor.untyped_storage()] if tensor.is_meta else storages_of(tensor)


def _type_name(layer: Any) -> str:
    if is_layer_spec(layer):
        return str(layer.typename.__name__)
    modules = modules_of(layer)
    if modules:
        return modules[0].__class__.__name__  # a stand-in gives the class of its original
    if isinstance(layer, functools.partial):
        return _type_name(layer.func)
    return str(getattr(layer, "__name__", type(layer).__name__))
