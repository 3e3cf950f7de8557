"""Delayed updates in one process: what asynchronous training must compute, as a plain loop that keeps old weights.

It knows no pipeline, order or engine. For each micro-batch every stage takes the weights of the version that
it is told, forward and backward; the gradients of M micro-batches are added up and change the newest weights::

    versions = plan.versions                       # or any function of a stage and a micro-batch
    found = train(layers, boundaries, batches, loss_fn, versions.version, lambda weights: Adam(weights, 1e-3))
    found.losses[k]                                # mean loss of batch k, as train_batch returns it
    found.weights                                  # of each layer by name, after the last update

``version(stage, micro_batch)`` counts updates; ``flush`` is synchronous training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

Version = Callable[[int, int], int]
"""Version of the weights that a stage uses on a micro-batch: the number of updates that made it."""
MicroBatch = tuple[Any, Any]
"""Input and label."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What training computed."""

    losses: list[float]
    """Mean loss over the micro-batches of each batch."""
    weights: dict[str, torch.Tensor]
    """Weights after the last update, by the number of their layer and their name there: ``"3.weight"``."""
    losses_of_micro_batches: list[float]
    norms: list[float]
    """Norm of the gradients of each update, before they are clipped."""


def flush(micro_batches_per_update: int) -> Version:
    """Return the versions of synchronous training: always the newest, which all micro-batches of a batch share."""
    return lambda stage, micro_batch: micro_batch // micro_batches_per_update


def train(
    layers: Sequence[nn.Module],
    boundaries: Sequence[int],
    batches: Sequence[Sequence[MicroBatch]],
    loss_fn: Callable[[Any, Any], torch.Tensor],
    version: Version,
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    *,
    bf16: bool = False,
    clip: float = 0.0,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> Trained:
    """Train copies of ``layers`` with delayed updates, one micro-batch after the other.

    Args:
        layers: the whole model, in order; without buffers, dropout or shared weights.
        boundaries: the first layer of each stage, and the number of layers.
        batches: the micro-batches of each update, M of them.
        loss_fn: the mean loss of one micro-batch; a gradient is that of it divided by M.
        version: of each stage and micro-batch; no later one than the updates before its batch.
        make_optimizer: makes the optimizer of the newest weights; under ``bf16`` of their master copies.
        bf16: weights, activations and gradients of a micro-batch are bf16; gradients are added up in fp32 and
            change master copies in fp32, which are rounded for the next version (DeepSpeed's ``BF16_Optimizer``).
        clip: largest norm of all gradients of an update together; 0: none.
        make_scheduler: makes what steps once behind every update.
    """
    layers = [copy.deepcopy(layer).train() for layer in layers]
    if bf16:
        layers = [layer.to(torch.bfloat16) for layer in layers]
    names = [(index, name) for index, layer in enumerate(layers) for name, _ in layer.named_parameters()]
    newest = [dict(layers[index].named_parameters())[name] for index, name in names]
    masters = [nn.Parameter(weight.detach().float()) for weight in newest] if bf16 else newest
    optimizer = make_optimizer(list(masters))
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    stage_of = {index: stage for stage, span in enumerate(pairwise(boundaries)) for index in range(*span)}
    history = [[weight.detach().clone() for weight in newest]]
    losses, every, norms = [], [], []
    micro_batch = 0
    for number, batch in enumerate(batches):
        gradients = [torch.zeros_like(master) for master in masters]
        of_batch = []
        for inputs, labels in batch:
            used = []
            for place, (index, _) in enumerate(names):
                wanted = version(stage_of[index], micro_batch)
                assert 0 <= wanted <= number, f"stage {stage_of[index]} wants version {wanted} in batch {number}"
                used.append(history[wanted][place].clone().requires_grad_(newest[place].requires_grad))
            value: Any = inputs.to(torch.bfloat16) if bf16 and inputs.is_floating_point() else inputs
            for index, layer in enumerate(layers):
                mine = {name: used[place] for place, (other, name) in enumerate(names) if other == index}
                value = functional_call(layer, mine, (value,))
            loss = loss_fn(value, labels)
            trained = [weight for weight in used if weight.requires_grad]
            found = iter(torch.autograd.grad(loss / len(batch), trained, allow_unused=True))
            for total, weight in zip(gradients, used, strict=True):
                if weight.requires_grad and (gradient := next(found)) is not None:
                    total += gradient.to(total.dtype)
            of_batch.append(loss.item())
            micro_batch += 1
        norm = torch.linalg.vector_norm(torch.stack([gradient.float().norm() for gradient in gradients])).item()
        scale = clip / (norm + 1e-6) if clip and norm > clip else 1.0
        for master, gradient, weight in zip(masters, gradients, newest, strict=True):
            master.grad = gradient * scale if weight.requires_grad else None
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for weight, master in zip(newest, masters, strict=True):
                weight.copy_(master)
        history.append([weight.detach().clone() for weight in newest])
        losses.append(sum(of_batch) / len(of_batch))
        every += of_batch
        norms.append(norm)
    weights = {f"{index}.{name}": weight for (index, name), weight in zip(names, history[-1], strict=True)}
    return Trained(losses, weights, every, norms)
