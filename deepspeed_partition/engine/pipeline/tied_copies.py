"""Layers that share a key, where one module per key and rank is not enough.

DeepSpeed builds, on each rank, the first layer of a key that the rank runs, and lets every other layer of the key
run that module. Where an embedding and a head of a class of their own share a key, a rank with both would run the
embedding as the head. Here a rank has one module for each *form* of a key: specifications of the same class, with
the same arguments or a ``forward_fn``. The copies of a rank are to each other what copies of different ranks are:
their tied weights are equal, their gradients are added up, and what they do not tie is their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

PREFIX = "tied_modules"


@dataclass(frozen=True, slots=True)
class Form:
    """One kind of module among the layers that share a key."""

    key: str
    number: int
    """The number of the form; 0 for that of the first layer."""
    layers: tuple[int, ...]
    """The layers that run the form, in the order of the chain."""
    spec: TiedLayerSpec
    """The specification of the first of these layers, which builds the module."""

    @property
    def own_key(self) -> str:
        """The key of the form, which tells it from others of the layers' key."""
        return f"{self.key}-{self.number}" if self.number else self.key

    @property
    def part_name(self) -> str:
        """What names of its parameters begin with, on every rank and every cut."""
        return f"{PREFIX}.{self.own_key}"


def forms_of(specs: Sequence[Any]) -> list[Form]:
    """All forms of all keys, in the order of their first layers."""
    found: dict[tuple[str, int], list[int]] = {}
    for layer, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            alike = (
                (key, number)
                for (key, number), layers in found.items()
                if key == spec.key and _are_alike(specs[layers[0]], spec)
            )
            new = spec.key, sum(key == spec.key for key, _ in found)
            found.setdefault(next(alike, new), []).append(layer)
    return [Form(key, number, tuple(layers), specs[layers[0]]) for (key, number), layers in found.items()]


def forms_with_functions(specs: Sequence[Any]) -> list[Form]:
    """The forms that a ``forward_fn`` runs somewhere; those that nothing else runs first."""

    def as_they_are(form: Form) -> list[bool]:
        return [specs[layer].forward_fn is None for layer in form.layers]

    with_functions = [form for form in forms_of(specs) if not all(as_they_are(form))]
    return sorted(with_functions, key=lambda form: any(as_they_are(form)))  # checkpoints number them so


def _are_alike(first: TiedLayerSpec, other: TiedLayerSpec) -> bool:
    """Whether one module does for both. A function runs any module of its class."""
    if first.typename is not other.typename:
        return False
    if other.forward_fn is not None:
        return True
    same_names = first.module_kwargs.keys() == other.module_kwargs.keys()
    if not same_names or len(first.module_args) != len(other.module_args):
        return False
    named = ((first.module_kwargs[name], other.module_kwargs[name]) for name in first.module_kwargs)
    return all(_equal(a, b) for a, b in (*zip(first.module_args, other.module_args, strict=True), *named))


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor | nn.Module):
        return False
    try:
        return bool(a == b)
    except Exception:  # whatever objects of the user's say to a comparison: they are not told to be equal
        return False


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """A module of this rank that layers of a key run."""

    form: Form
    registered: str
    """The name of the copy in ``tied_modules`` of the pipeline module: the key itself for the rank's first one."""

    @property
    def is_main(self) -> bool:
        """Whether it speaks for the key on this rank."""
        return self.registered == self.form.key

    def tied_weights(self, module: PipelineModule) -> list[nn.Parameter]:
        """The weights that all copies of the key have alike."""
        names, copy = self.form.spec.tied_weight_attr, module.tied_modules[self.registered]
        return [module._recursive_getattr(copy, name) for name in names]


def own_copies(module: PipelineModule) -> list[TiedCopy]:
    """The copies that this rank has, or is to build, on the present cut."""
    copies: list[TiedCopy] = []
    own_keys: set[str] = set()
    for form in forms_of(module._layer_specs):
        if any(module.stage_owner(layer) == module.stage_id for layer in form.layers):
            copies.append(TiedCopy(form, form.own_key if form.key in own_keys else form.key))
            own_keys.add(form.key)
    return copies


def several_of_a_key(module: PipelineModule) -> list[list[TiedCopy]]:
    """The copies of each key of which this rank has several; the one that speaks for the key is first."""
    by_key: dict[str, list[TiedCopy]] = {}
    for copy in own_copies(module):
        by_key.setdefault(copy.form.key, []).append(copy)
    return [copies for copies in by_key.values() if len(copies) > 1]


def parameter_names(module: PipelineModule) -> dict[nn.Parameter, str]:
    """The name of each parameter in the whole pipeline, in the order of ``named_parameters``.

    A tied module's is that of its form, wherever it stands here.
    """
    renamed = {f"{PREFIX}.{copy.registered}.": f"{copy.form.part_name}." for copy in own_copies(module)}

    def renamed_or_not(name: str) -> str:
        for here, everywhere in renamed.items():
            if name.startswith(here):
                return everywhere + name.removeprefix(here)
        return name

    return {parameter: renamed_or_not(name) for name, parameter in module.named_parameters()}
