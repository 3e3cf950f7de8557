"""Measurement of the layers of a model, one at a time, and their chain."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from deepspeed_partition.dropped_writing import writing_dropped
from deepspeed_partition.hidden_modules import parts_of
from deepspeed_partition.layer_calls import is_layer_spec
from deepspeed_partition.planner.problem import Chain, LayerProfile
from deepspeed_partition.profiling.attributes import state_kept
from deepspeed_partition.profiling.boundaries import (
    Boundary,
    bytes_of,
    describe,
    is_boundary,
    tensors_of,
    to_device,
    with_grad,
)
from deepspeed_partition.profiling.devices import hardware_name
from deepspeed_partition.profiling.isolation import training_conditions
from deepspeed_partition.profiling.measure import MeasuredLayer, measure_layers, run_layers
from deepspeed_partition.profiling.parts_of_loss import PartsOfLoss
from deepspeed_partition.profiling.readings import suspicious
from deepspeed_partition.profiling.run import Conditions, Loss
from deepspeed_partition.profiling.sharing import measure_shared, share_of
from deepspeed_partition.profiling.sources import LayerSource, layer_sources, modules_of
from deepspeed_partition.profiling.stash import layer_profiles

logger = logging.getLogger(__name__)

LossFunction = Callable[[Any, Any], torch.Tensor]


def profile_chain(
    layers: Iterable[Any],
    sample: Any,
    *,
    loss_fn: LossFunction | None = None,
    device: torch.device | str | None = None,
    name: str = "chain",
    warm_up: int = 2,
    repeats: int = 5,
    autocast_dtype: torch.dtype | None = None,
    halves: bool = True,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
) -> Chain:
    """Measure what each layer of a model costs for one micro-batch.

    Layers run as DeepSpeed's pipeline runs them: each is called with the one value, a tensor or a tuple of
    tensors, that the layer before it returned; in training mode; a backward also computes the gradient of
    what was received. One layer at a time is on the device, so the model may be larger than it. Nothing is
    changed: parameters, gradients, buffers, training or evaluation mode and random numbers stay as they were.

    Times are in seconds, the device synchronized before and after: the median of ``repeats`` runs after
    ``warm_up`` runs, with their interquartile range. The backward adds to gradients that exist, as it does
    from the second micro-batch on. Where nothing needs a gradient, it takes 0 s.

    Sizes are in bytes. ``weight_bytes``: the parameters; a ``TiedLayerSpec`` counts wherever it appears, as in
    DeepSpeed, so that a stage with both of its ends is charged twice. ``stash_bytes``: what autograd keeps
    from the forward to the backward, each storage once, without parameters and buffers; what several layers
    keep, such as the output of a ReLU that the next layer keeps as its input, is charged to the last of
    them. ``transient_bytes``: the most in use while the layer runs, beyond its weights and their gradients,
    its input, stash and output.

    Where ``torch.distributed`` is initialized, every rank of ``group`` must call this: the ranks share the
    layers, and all get the same chain.

    Args:
        layers: modules, DeepSpeed's ``LayerSpec`` and ``TiedLayerSpec``, or functions; or an ``nn.Sequential``.
        sample: one micro-batch: ``(inputs, labels)`` with a ``loss_fn``, the inputs alone without one.
        loss_fn: called with the last output and the labels; the last stage runs it, so that its time and
            stash are part of the last layer. Without it that layer's backward starts from ones.
        device: where to measure; by default the current GPU, or the CPU where there is none.
        name: the name of the chain.
        warm_up: runs of each layer before those that count.
        repeats: runs of each layer that count.
        autocast_dtype: run under ``torch.autocast`` with this type; by default under the caller's, if any.
        halves: measure the two halves of the backward, too: ``backward_input_seconds``,
            ``backward_weight_seconds``, ``weight_stash_bytes``. They are left out where one cannot be divided.
        group: the ranks that share the work; by default all of them.
        progress: show a bar on standard error, on the first rank, where that is a terminal.

    Raises:
        ValueError: the layers or the sample cannot run; the message names the layer and the shapes.
        MemoryError: the device is too small for a layer alone.
    """
    conditions = Conditions.on(
        device, warm_up=warm_up, repeats=repeats, autocast_dtype=autocast_dtype, halves=halves
    )
    sources = layer_sources(layers)
    inputs, labels = _split(sample, loss_fn)
    rank, num_ranks = _place_in(group)
    with training_conditions(conditions.device), state_kept(*_called(sources, loss_fn)), writing_dropped():
        boundary = with_grad(to_device(inputs, conditions.device), False)
        finish = _finish(loss_fn, labels, conditions, sources)
        start, stop = share_of(len(sources), rank, num_ranks)
        silent = None if progress and rank == 0 else True  # None is tqdm's word for all but a terminal
        with tqdm(total=stop - start, desc=name, unit="layer", disable=silent) as bar:
            if num_ranks > 1:
                measured = measure_shared(sources, boundary, conditions, finish, group, on_layer=bar.update)
            else:
                measured, _ = measure_layers(sources, boundary, conditions, finish, on_layer=bar.update)
    return measured_chain(
        measured,
        name=name,
        input_bytes=bytes_of(inputs),
        micro_batch_size=num_samples(inputs),
        device=conditions.device,
        warn=logger.warning if rank == 0 else lambda sentence: None,
    )


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group and the number of ranks; alone it is rank 0 of 1."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        return dist.get_rank(group), dist.get_world_size(group)
    return 0, 1


def num_samples(inputs: Boundary) -> int | None:
    """The length of the first dimension of the first input, which counts samples; None of a tensor without one."""
    first = tensors_of(inputs)[0]
    return first.shape[0] if first.dim() else None


def measured_chain(
    measured: Sequence[MeasuredLayer],
    *,
    name: str,
    input_bytes: int,
    micro_batch_size: int | None,
    device: torch.device,
    warn: Callable[[str], object],
    least_share: float = 0.0,
    in_a_run: bool = False,
) -> Chain:
    """Join the measurements of all layers, in their order, to the chain of a model.

    Args:
        input_bytes: the size of one micro-batch's inputs.
        micro_batch_size: the number of its samples, where that is known.
        device: where the layers were measured.
        warn: called with a sentence for each reading that is hard to believe.
        least_share: as for :func:`suspicious`.
        in_a_run: as for :func:`suspicious`.
    """
    chain = Chain(
        name=name,
        input_bytes=input_bytes,
        layers=tuple(layer_profiles(measured)),
        micro_batch_size=micro_batch_size,
        hardware=hardware_name(device),
    )
    for sentence in suspicious(chain, least_share, in_a_run=in_a_run):
        warn(sentence)
    return chain


def profile_stage(
    layers: Iterable[Any],
    inputs: Any,
    labels: Any = None,
    loss_fn: LossFunction | None = None,
    **how: Any,
) -> tuple[list[LayerProfile], Boundary]:
    """Measure consecutive layers as ``measure_stage``, and join their costs to those of one stage.

    Returns:
        The cost of each layer, in seconds and bytes, and the output of the last layer, detached.

    Raises:
        ValueError, MemoryError: as ``profile_chain``.
    """
    measured, outputs = measure_stage(layers, inputs, labels, loss_fn, **how)
    return layer_profiles(measured), outputs


def measure_stage(
    layers: Iterable[Any],
    inputs: Any,
    labels: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    device: torch.device | str | None = None,
    first_stage: bool = True,
    first_index: int = 0,
    names: Sequence[str] | None = None,
    warm_up: int = 2,
    repeats: int = 5,
    autocast_dtype: torch.dtype | None = None,
    halves: bool = False,
    on_layer: Callable[[], object] | None = None,
) -> tuple[list[MeasuredLayer], Boundary]:
    """Measure consecutive layers that this process has, alone and without talking to other ranks.

    ``profile_chain`` says how, and in which units. ``layer_profiles`` of the lists of all stages, one after the
    other, makes the layers of a ``Chain`` that does not depend on the boundaries of the stages.

    Args:
        inputs: the input of the first of these layers, a tensor or a tuple of tensors.
        first_stage: these layers begin the chain: nothing asks for a gradient of ``inputs``. Otherwise
            all of their floating tensors get one, as those that DeepSpeed receives.
        first_index: the place of the first of these layers in the chain, for their names.
        names: the names of the layers, instead of ``"<index>.<type>"``.
        halves: measure the two halves of the backward, too, as ``profile_chain`` does.
        on_layer: a function that is called after each layer.

    Returns:
        The measurements, and the output of the last layer, detached; ``requires_grad`` is kept on the
        tensors that have a gradient to receive.

    Raises:
        ValueError, MemoryError: as ``profile_chain``.
    """
    conditions = Conditions.on(
        device, warm_up=warm_up, repeats=repeats, autocast_dtype=autocast_dtype, halves=halves
    )
    sources = layer_sources(layers, names=names, first_index=first_index)
    inputs, _ = _split(inputs, None)
    with training_conditions(conditions.device), state_kept(*_called(sources, loss_fn)), writing_dropped():
        boundary = with_grad(to_device(inputs, conditions.device), not first_stage)
        finish = _finish(loss_fn, labels, conditions, sources)
        return measure_layers(sources, boundary, conditions, finish, on_layer=on_layer)


def forward_stage(
    layers: Iterable[Any],
    inputs: Any,
    *,
    device: torch.device | str | None = None,
    first_stage: bool = True,
    first_index: int = 0,
    autocast_dtype: torch.dtype | None = None,
) -> Boundary:
    """Return the output of consecutive layers, detached, as the input of the next stage; measure nothing.

    It changes nothing, as ``profile_chain``.

    Raises:
        ValueError, MemoryError: as ``profile_chain``.
    """
    conditions = Conditions.on(device, autocast_dtype=autocast_dtype)
    sources = layer_sources(layers, first_index=first_index)
    inputs, _ = _split(inputs, None)
    with training_conditions(conditions.device), state_kept(*_called(sources, None)), writing_dropped():
        boundary = with_grad(to_device(inputs, conditions.device), not first_stage)
        return run_layers(sources, boundary, conditions)


def _split(sample: Any, loss_fn: LossFunction | None) -> tuple[Boundary, Any]:
    """Return the inputs and the labels of a sample."""
    labels = None
    inputs = sample
    if loss_fn is not None:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ValueError(
                f"the sample is {describe(sample)}: with a loss_fn it must be a pair (inputs, labels)"
            )
        inputs, labels = sample
    if isinstance(inputs, list):  # as a DataLoader collates a tuple
        inputs = tuple(inputs)
    if not is_boundary(inputs):
        raise ValueError(
            f"the inputs of the sample are {describe(inputs)}: they must be a tensor or a tuple of tensors"
            + ("; labels belong to the sample only with a loss_fn" if loss_fn is None else "")
        )
    return inputs, labels


def _called(
    sources: Iterable[LayerSource], loss_fn: LossFunction | None
) -> tuple[list[Any], list[Any], tuple[nn.Module, ...]]:
    """Return the loss with the layers that are functions, the other layers, and what the loss uses besides.

    Measuring calls the functions often, where they are; layers and what the loss uses run on copies.
    """
    functions: list[Any] = [loss_fn]
    others: list[Any] = []
    sources = list(sources)
    for each in sources:
        forward = getattr(each.source, "forward_fn", None)
        is_function = forward is not None or not (isinstance(each.source, nn.Module) or is_layer_spec(each.source))
        functions += [forward or each.source] if is_function else []
        others += [each.source, *modules_of(each.source)]
    return functions, others, _parts_of_loss(loss_fn, sources).parts


def _finish(
    loss_fn: LossFunction | None, labels: Any, conditions: Conditions, sources: Iterable[LayerSource]
) -> Loss | None:
    if loss_fn is None:
        return None
    return Loss(loss_fn, to_device(labels, conditions.device), _parts_of_loss(loss_fn, sources))


def _parts_of_loss(loss_fn: LossFunction | None, sources: Iterable[LayerSource]) -> PartsOfLoss:
    return PartsOfLoss.of(loss_fn, parts_of(module for each in sources for module in modules_of(each.source)))
