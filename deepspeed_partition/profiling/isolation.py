"""Isolation of measurements: parameters, gradients, buffers, attributes, modes, random numbers stay."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed_partition.hidden_modules import hidden_beside, table_of
from deepspeed_partition.kept_values import say_of
from deepspeed_partition.kept_weights import Weights
from deepspeed_partition.profiling import weights_beside
from deepspeed_partition.profiling.attributes import attributes_kept
from deepspeed_partition.profiling.module_tables import ModuleTables
from deepspeed_partition.profiling.parts_of_loss import PartsOfLoss
from deepspeed_partition.profiling.remembered_values import STAND_INS
from deepspeed_partition.profiling.weights_beside import WeightsBeside
from deepspeed_partition.tensor_values import num_bytes_of, without_repeats


@contextmanager
def stand_ins(
    modules: Sequence[nn.Module],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    trains: bool = True,
    beside: PartsOfLoss | None = None,
    apart: Container[nn.Module] = (),
) -> Iterator[Callable[[], Callable[[], None]]]:
    """Let ``modules`` train on copies of their parameters and buffers, which lie on ``device``.

    Args:
        dtype: the type of the parameters' copies, where they are floating; None: that of the originals. Buffers
            keep theirs, as in DeepSpeed.
        trains: use the mode of training; False: the modes that the modules are in.
        beside: what a loss uses that runs with them, on copies on the same device, of the same type as the
            originals, in the modes that they are in. Its attributes are the caller's matter.
        apart: other layers and their parts. Those that one of these modules reaches through a whole model stay as
            they are; of those that it holds itself no more than 1 GiB is copied.

    The originals are put back untouched, wherever they live: no gradient, no running statistic, and no
    hook that an optimizer hung on a parameter has noticed anything. Sharing among parameters is kept. Modules that
    they hold in lists and objects have copies, too, where the originals lie, and stay in their modes: those whose
    weights train, and others up to 1 GiB together. Of the rest it is said if it is written. What a first
    forward makes, a module or a parameter, is gone afterwards.

    Yields:
        A function that notes the copies of parameters as they are before a run. It returns what gives them these
        values again where a forward has written some, so that a second run begins like the first.
    """
    own = _once(owner for module in modules for owner in module.modules())
    of_beside = _once(() if beside is None else beside.parts, but=own)
    others = [each for module in modules for each in hidden_beside(module, apart).values()]
    hidden = _once((*others, *(() if beside is None else beside.hidden)), but=(*own, *of_beside))
    owners = [*own, *of_beside, *hidden]
    types = dict.fromkeys(map(id, own), dtype)
    copied, left = _copied_of(hidden, apart)
    modes = [(owner, owner.training) for owner in owners]
    tables = ModuleTables(owners)
    originals: list[tuple[nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}

    def let_copies_stand(owner: nn.Module, place: torch.device | None, is_copied: Callable[[Any], bool]) -> None:
        for name, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
            if tensor is None or not (is_copied(tensor) or id(tensor) in copies):
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = _copy(tensor, place or tensor.device, types.get(id(owner)))
                STAND_INS[copies[id(tensor)]] = None
            originals.append((owner, name, tensor))
            setattr(owner, name, copies[id(tensor)])

    try:
        for owner in own:
            let_copies_stand(owner, device, lambda _: True)
        for owner in of_beside:
            let_copies_stand(owner, device, _has_values)
        for owner in hidden:
            let_copies_stand(owner, None, lambda tensor: id(tensor) in copied)
        lazy = [
            (owner, name)
            for owner in hidden
            for name, each in owner.named_parameters(recurse=False)
            if is_lazy(each)
        ]
        weights_left = WeightsBeside(left, set(map(id, copies.values())), most_bytes=0)
        with attributes_kept(modules):  # a program's own train() may change some, too
            for module in modules if trains else ():
                module.train()
            for owner in {id(owner): owner for owner, _, _ in originals}.values():
                if isinstance(owner, nn.RNNBase):  # cuDNN wants the weights of an RNN side by side
                    owner.flatten_parameters()
            values = {(id(owner), name): tensor for owner, name, tensor in originals}

            def noted() -> Callable[[], None]:
                weights = Weights(own), Weights(owners[len(own) :], noted=False)

                def restore() -> None:
                    for some in weights:
                        some.put_back(partial(_value_at, some, values))

                return restore

            given = Weights(own)
            yield noted
            given.note_written()
        weights_left.put_back()
        for owner, name in lazy:
            weight = owner._parameters.get(name)
            if weight is not None and not is_lazy(weight):
                say_of(f"{name} of {type(owner).__name__}", weight)("it got its shape and its first values")
    finally:
        tables.put_back()
        for owner, name, tensor in originals:
            setattr(owner, name, tensor)
        for owner, mode in modes:
            owner.training = mode


def _once(modules: Iterable[nn.Module], but: Iterable[nn.Module] = ()) -> list[nn.Module]:
    """The modules, each once, by identity: the hash of a metric depends on what it holds."""
    known = set(map(id, but))
    return [each for key, each in {id(each): each for each in modules}.items() if key not in known]


def _has_values(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor) and not tensor.is_meta


def _copied_of(hidden: Iterable[nn.Module], apart: Container[nn.Module]) -> tuple[set[int], list[nn.Module]]:
    """The ``id`` of weights and buffers that are copied, and the modules some of whose are not."""
    copied, left, num_bytes = set[int](), list[nn.Module](), 0
    for owner in hidden:
        for tensor in filter(_has_values, [*owner.parameters(recurse=False), *owner.buffers(recurse=False)]):
            trains = tensor.requires_grad and owner not in apart
            size = 0 if trains or id(tensor) in copied else num_bytes_of(tensor)
            if num_bytes + size <= weights_beside.MOST_BYTES:
                num_bytes += size
                copied.add(id(tensor))
            else:
                left.append(owner)
    return copied, left


def _value_at(weights: Weights, values: Mapping[tuple[int, str], torch.Tensor], number: int) -> torch.Tensor:
    place = weights.places[number]
    return values[id(place.owner), place.name]


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
