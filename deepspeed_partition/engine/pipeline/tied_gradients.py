"""The gradients of a step, before ranks add them up: those of tied weights, and weights that have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from deepspeed_partition.engine.pipeline.shared_weights import listed
from deepspeed_partition.engine.pipeline.tied_copies import TiedCopy, forms_of, own_copies, several_of_a_key
from deepspeed_partition.engine.runtime.collectives import gather_objects


def gradient_so_far(weight: nn.Parameter, optimizer: Any, *, in_bf16: bool) -> torch.Tensor:
    """The gradient of ``weight`` that the step has added up so far; zeros if there is none.

    Args:
        optimizer: DeepSpeed's, or the user's where it wraps none.
        in_bf16: Whether it is DeepSpeed's optimizer for bf16.
    """
    name = "_hp_grad" if in_bf16 else _attribute(optimizer)
    if getattr(weight, name, None) is None:
        dtype = optimizer.gradient_accumulation_dtype if name == "grad_accum" else weight.dtype
        setattr(weight, name, torch.zeros_like(weight, dtype=dtype))
    gradient: torch.Tensor = getattr(weight, name)
    return gradient


def _attribute(optimizer: Any) -> str:
    """The attribute of a weight in which its gradient is."""
    return "grad_accum" if getattr(optimizer, "use_grad_accum_attribute", False) else "grad"


def without_gradient(weights: Iterable[nn.Parameter], optimizer: Any) -> list[nn.Parameter]:
    """Those of ``weights`` that the step has computed no gradient of so far.

    Args:
        weights: Of this rank, which train.
        optimizer: As for :func:`gradient_so_far`.
    """
    if hasattr(optimizer, "fp32_groups_has_gradients"):  # of DeepSpeed's for bf16, which keeps count
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_has_gradients, strict=True)
        has = {id(weight): flag for group in groups for weight, flag in zip(*group, strict=True)}
        return [weight for weight in weights if not has.get(id(weight), True)]
    name = _attribute(optimizer)
    return [weight for weight in weights if getattr(weight, name, None) is None]


def tied_without_gradient(module: PipelineModule, optimizer: Any, device: torch.device) -> list[nn.Parameter]:
    """The tied weights of this rank that the step has computed no gradient of, in any copy on any rank.

    Collective over the ranks of each key. A rank that has a gradient itself does not wait for the others' answers.

    Args:
        module: With copies of tied modules, whose gradients are not added up yet.
        optimizer: As for :func:`gradient_so_far`.
        device: Of the tensors by which the ranks tell each other.
    """
    of_one_rank = {id(weights[0]): weights for weights in _copies_of_weights(module)}
    without: list[nn.Parameter] = []
    for comm in module.tied_comms.values():
        tied = [module._recursive_getattr(comm["module"], name) for name in comm["weight_attr"]]
        copies = [of_one_rank.pop(id(weight), (weight,)) for weight in tied if weight.requires_grad]
        own = [len(without_gradient(each, optimizer)) < len(each) for each in copies]
        if not own:
            continue
        found = torch.tensor(own, dtype=torch.uint8, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=comm["group"])
        if not all(own):
            without += [w for each, has in zip(copies, found.tolist(), strict=True) if not has for w in each]
    for weights in of_one_rank.values():
        if len(without_gradient(weights, optimizer)) == len(weights):
            without += weights
    return without


def weights_trained_apart(module: PipelineModule, optimizer: Any) -> dict[str, str]:
    """What copies on different ranks train each for itself, where one process has one weight: a sentence by key.

    A weight counts that ``tied_weight_attr`` does not name and that the step has computed a gradient of in
    several copies of one form. Collective over the ranks of each key.

    Args:
        module: With copies of tied modules.
        optimizer: As for :func:`gradient_so_far`.
    """
    apart: dict[str, str] = {}
    for key, comm in module.tied_comms.items():
        copies = (copy for copy in own_copies(module) if copy.form.key == key)
        own = {copy.form.number: copy for copy in copies if copy.registered in module.tied_modules}
        mine = {number: _trained_untied(module, copy, optimizer) for number, copy in own.items()}
        by_rank = gather_objects(mine, comm["group"])
        for form in forms_of(module._layer_specs):
            found = [names for of_rank in by_rank for names in of_rank.get(form.number, ()) if form.key == key]
            if names := sorted(name for name in {*found} if found.count(name) > 1):
                tied = [*form.spec.tied_weight_attr]
                apart[key] = (
                    f"layers {listed(form.layers)}, {form.spec.typename.__name__} of the key {key!r}, are on "
                    f"several ranks, and each trains {', '.join(names)} for itself, where one process has one, "
                    f"because tied_weight_attr names {', '.join(tied)} alone. Give the TiedLayerSpec of each of "
                    f"them tied_weight_attr={[*tied, *names]}"
                )
    return apart


def _trained_untied(module: PipelineModule, copy: TiedCopy, optimizer: Any) -> list[str]:
    """The weights of a copy that are its own and that the step has computed a gradient of, by name."""
    tied = {*copy.tied_weights(module)}
    weights = module.tied_modules[copy.registered].named_parameters()
    own = {name: weight for name, weight in weights if weight.requires_grad and weight not in tied}
    without = {*without_gradient(own.values(), optimizer)}
    return [name for name, weight in own.items() if weight not in without]


@contextmanager
def copies_added_up(module: PipelineModule, gradient_of: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[None]:
    """Make the gradients of all copies of a tied weight on this rank one, while ranks add them up."""
    alike = [tuple(map(gradient_of, weights)) for weights in _copies_of_weights(module)]
    for first, *others in alike:
        for other in others:
            first += other
    yield
    for first, *others in alike:
        for other in others:
            other.copy_(first)


def _copies_of_weights(module: PipelineModule) -> list[tuple[nn.Parameter, ...]]:
    """The copies of each tied weight that trains and of which this rank has several."""
    return [
        weights
        for copies in several_of_a_key(module)
        for weights in zip(*(tied.tied_weights(module) for tied in copies), strict=True)
        if weights[0].requires_grad
    ]
