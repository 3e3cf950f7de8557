"""Isolation of measurements: parameters, gradients, buffers, attributes, modes, random numbers stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from deepspeed_partition.hidden_modules import hidden_modules, table_of
from deepspeed_partition.kept_weights import Weights
from deepspeed_partition.profiling.attributes import attributes_kept
from deepspeed_partition.profiling.module_tables import ModuleTables
from deepspeed_partition.tensor_values import without_repeats


@contextmanager
def stand_ins(
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trains: bool = True,
    beside: Sequence[nn.Module] = (),
) -> Iterator[Callable[[], Callable[[], None]]]:
    """Let ``modules`` train on copies of their parameters and buffers, which lie on ``device``.

    Args:
        dtype: the type of the parameters' copies, where they are floating; None: that of the originals. Buffers
            keep theirs, as in DeepSpeed.
        trains: use the mode of training; False: the modes that the modules are in.
        beside: modules that run with them, such as a loss, on copies on the same device, of the same type as the
            originals, in the modes that they are in. Their attributes are the caller's matter.

    The originals are put back untouched, wherever they live: no gradient, no running statistic, and no
    hook that an optimizer hung on a parameter has noticed anything. Sharing among parameters is kept. Modules that
    they hold in lists and objects have copies, too, where the originals lie, and stay in their modes. What a first
    forward makes, a module or a parameter, is gone afterwards.

    Yields:
        A function that notes the copies of parameters as they are before a run. It returns what gives them these
        values again where a forward has written some, so that a second run begins like the first.
    """
    originals: list[tuple[nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    own = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    of_beside = [owner for module in beside for owner in module.modules()]
    hidden = [each for module in (*modules, *beside) for each in hidden_modules(module).values()]
    owners = list(dict.fromkeys((*own, *of_beside, *hidden)))
    types = dict.fromkeys(own, dtype)
    elsewhere = set(hidden).difference(own, of_beside)
    modes = [(owner, owner.training) for owner in owners]
    tables = ModuleTables(owners)
    try:
        for owner in owners:
            for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is None:
                    continue
                if id(tensor) not in copies:
                    place = tensor.device if owner in elsewhere else device
                    copies[id(tensor)] = _copy(tensor, place, types.get(owner))
                originals.append((owner, name, tensor))
                setattr(owner, name, copies[id(tensor)])
        with attributes_kept(modules):  # a program's own train() may change some, too
            for module in modules if trains else ():
                module.train()
            for owner in owners:
                if isinstance(owner, nn.RNNBase):  # cuDNN wants the weights of an RNN side by side
                    owner.flatten_parameters()
            values = {(owner, name): tensor for owner, name, tensor in originals}

            def noted() -> Callable[[], None]:
                weights = Weights(own), Weights(owners[len(own) :], noted=False)

                def restore() -> None:
                    for some in weights:
                        some.put_back(partial(_value_at, some, values))

                return restore

            given = Weights(own)
            yield noted
            given.note_written()
    finally:
        tables.put_back()
        for owner, name, tensor in originals:
            setattr(owner, name, tensor)
        for owner, mode in modes:
            owner.training = mode


def _value_at(weights: Weights, values: Mapping[tuple[nn.Module, str], torch.Tensor], number: int) -> torch.Tensor:
    place = weights.places[number]
    return values[place.owner, place.name]


def _copy(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    casts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    once = without_repeats(tensor.detach())
    copy = once.to(device, dtype if casts else None, copy=True)
    if once.shape != tensor.shape:
        copy = copy.expand(tensor.shape)
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
        if type(copy) is not type(tensor):
            copy = torch.Tensor._make_subclass(type(tensor), copy.data, tensor.requires_grad)
    # Marks such as Megatron's tensor_model_parallel; attributes_kept() puts back what a forward changes in them.
    # A tensor made of others has these and their shapes as attributes: the copy has its own.
    present, marks = table_of(copy), table_of(tensor)
    present.update({name: value for name, value in marks.items() if name not in present})
    return copy


@contextmanager
def training_conditions(device: torch.device) -> Iterator[None]:
    """Turn gradients on and autocast off, whatever the caller uses; restore random numbers afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def gradients_kept(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Start the gradients of ``parameters`` from nothing, and put the old ones back afterwards."""
    gradients: list[Any] = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
