"""What training keeps for each weight, and what the end of a step needs besides: asked from the run's own engine.

DeepSpeed's optimizers hold weights in one of three ways: a plain optimizer steps over the parameters themselves,
``BF16_Optimizer`` and ZeRO-1 over flat master copies, of which each pipeline has a share. What they hold at all
times is counted where it lies; what a step brings (gradients, buffers, the optimizer's own temporary tensors) is
known before the first step from their settings and from a trial of the run's optimizer on two tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_partition.engine.pipeline.tied_copies import forms_of
from deepspeed_partition.engine.repairs import reduction_buffer_bytes
from deepspeed_partition.engine.repartition.parameter_groups import another_like
from deepspeed_partition.engine.runtime.environment import announce
from deepspeed_partition.engine.warmup.run_platform import is_on_device, training_bytes
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.profiling import LiveBytes
from deepspeed_partition.profiling.measure import MeasuredLayer

if TYPE_CHECKING:
    from deepspeed_partition.engine.engine import MadPipeEngine

TRIED_NUMBERS = 2**16
"""Numbers of a tensor that an optimizer is tried out on: a GPU's rounding to 512 bytes must not count."""
TRIED_TENSORS = 8
"""Number of such tensors. A step over all of them at once needs eight times what one needs, a step over one after
the other at most twice that: what it has of one is not gone before the next one's is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """What an optimizer's step needs only while it runs, in copies of tensors that it steps over."""

    of_one: float
    """Copies of a tensor that it steps over alone."""
    of_several: float
    """Copies of the largest tensor where it steps over one after the other, or of all of them together."""
    at_once: bool
    """Whether it steps over all of them at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingNeeds:
    """Bytes per number that a rank trains."""

    kept: float
    """There at all times, besides the weight: master copy, states, accumulated gradients."""
    gradient: float
    """From the first backward of a step on, until the optimizer has stepped."""
    accumulated: float
    """Part of ``gradient``: gradients of another type that DeepSpeed adds up beside those of autograd."""
    reduction: float
    """Besides, while gradients are brought together behind the last backward."""
    optimizer: float
    """Besides, while the optimizer steps."""
    before: float
    """Besides, while the optimizer steps over a parameter, for each number of the one before it."""
    at_once: bool
    """Whether ``optimizer`` holds for all weights of a rank, or for one parameter after the other."""


def training_needs(engine: MadPipeEngine) -> TrainingNeeds | None:
    """Return what this rank's training needs; None where it trains nothing."""
    trained = [weight for weight in engine.module.parameters() if weight.requires_grad]
    numbers = sum(weight.numel() for weight in trained)
    if not numbers or engine.basic_optimizer is None:
        return None
    total, weights = training_bytes(engine)
    gradients = sum(weight.numel() * weight.element_size() for weight in trained)
    kept = (total - weights - gradients) / numbers
    wrapper = engine.optimizer
    accumulated = 0.0
    if getattr(wrapper, "use_grad_accum_attribute", False):
        accumulated = wrapper.gradient_accumulation_dtype.itemsize
    gradient = gradients / numbers + accumulated
    step = optimizer_step(engine.basic_optimizer)
    at_once = step.at_once or _is_flat(wrapper)
    optimizer = _in_step(wrapper, step, gradient, engine.grid.data_parallel_size)
    before = 0.0
    if not at_once and _steps_in_order(engine.basic_optimizer, trained):
        optimizer, before = step.of_one * gradient, (step.of_several - step.of_one) * gradient
    return TrainingNeeds(
        kept=kept,
        gradient=gradient,
        accumulated=accumulated,
        reduction=_reduction_bytes(engine, numbers, gradients) / numbers,
        optimizer=optimizer,
        before=before,
        at_once=at_once,
    )


def _steps_in_order(optimizer: torch.optim.Optimizer, trained: Sequence[torch.nn.Parameter]) -> bool:
    """Return whether the optimizer steps over the parameters in the order in which the layers have them."""
    members = [id(member) for group in optimizer.param_groups for member in group["params"]]
    return len(optimizer.param_groups) == 1 and members == [id(weight) for weight in trained]


def _is_flat(wrapper: Any) -> bool:
    return isinstance(wrapper, BF16_Optimizer | DeepSpeedZeroOptimizer)


def _reduction_bytes(engine: MadPipeEngine, numbers: int, gradients: int) -> int:
    """Return what is needed to add up the gradients of all pipelines."""
    wrapper = engine.optimizer
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        # Gradients move into a buffer; a flat copy of it is reduced, and gone when each pipeline copies its share.
        return reduction_buffer_bytes(wrapper)[1]
    if engine.grid.data_parallel_size == 1:
        return 0
    if not isinstance(wrapper, BF16_Optimizer):  # a bucket that gradients are copied into
        return gradients * min(numbers, MEMORY_OPT_ALLREDUCE_SIZE) // numbers
    accumulated: torch.dtype = wrapper.grad_acc_dtype
    sent: torch.dtype = engine.communication_data_type
    copies = accumulated.itemsize if len(wrapper.bf16_groups) > 1 else 0  # one flat tensor is its own bucket
    return numbers * (copies + (sent.itemsize if sent != accumulated else 0))


def _in_step(wrapper: Any, step: OptimizerStep, gradient: float, num_pipelines: int) -> float:
    """Return the bytes per number of a rank's weights, or of the largest one, that a step needs."""
    full = torch.float32.itemsize
    temporary = step.of_one * full
    if isinstance(wrapper, BF16_Optimizer):
        copied = full if wrapper.grad_acc_dtype is not torch.float32 else 0
        return (copied + temporary) / num_pipelines
    if isinstance(wrapper, DeepSpeedZeroOptimizer):
        # Gradients become one flat tensor of their own type, which is copied in full precision. All of them are
        # still there then, and gone when the optimizer steps over the copy.
        flat: torch.dtype = wrapper.gradient_accumulation_dtype
        copied = full + (flat.itemsize if flat is not torch.float32 else 0)
        return max(copied / num_pipelines, (full + temporary) / num_pipelines - gradient)
    return step.of_several * gradient


def optimizer_step(optimizer: torch.optim.Optimizer) -> OptimizerStep:
    """Try an optimizer out on one tensor and on several: what does its second step need besides states?"""
    if not any(is_on_device(member) for group in optimizer.param_groups for member in group["params"]):
        return OptimizerStep(of_one=0, of_several=0, at_once=False)  # with offload_optimizer, it steps on the CPU
    try:
        try:
            one, shape = _needed_bytes(optimizer, 1, [TRIED_NUMBERS]), [TRIED_NUMBERS]
        except Exception:  # Muon takes matrices alone
            shape = [TRIED_NUMBERS // 256, 256]
            one = _needed_bytes(optimizer, 1, shape)
        several = _needed_bytes(optimizer, TRIED_TENSORS, shape)
    except Exception as error:  # somebody else's optimizer, on an input that it never expected
        announce(
            f"what a step of the optimizer {type(optimizer).__name__} needs could not be tried out ({error}). It "
            "is taken to need twice its weights, as Adam does"
        )
        return OptimizerStep(of_one=2, of_several=2, at_once=True)
    size = torch.float32.itemsize * TRIED_NUMBERS
    at_once = several > one * TRIED_TENSORS / 2
    return OptimizerStep(
        of_one=round(one / size, 2), of_several=round((one if at_once else several) / size, 2), at_once=at_once
    )


def _needed_bytes(optimizer: torch.optim.Optimizer, num_tensors: int, shape: Sequence[int]) -> int:
    """Return the most bytes that the second step over some tensors needs, states and gradients not counted."""
    device = get_accelerator().current_device_name()
    weights = [torch.nn.Parameter(torch.zeros(*shape, device=device)) for _ in range(num_tensors)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    trial = another_like(optimizer, weights)
    trial.step()
    if get_accelerator().device_name() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trial.step()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        trial.step()
    return live.peak_bytes


def with_training_needs(
    chain: Chain, layers: Sequence[MeasuredLayer], needs: Sequence[TrainingNeeds], specs: Sequence[Any]
) -> Chain:
    """Return a chain that knows what training needs for the weights of each layer.

    Args:
        layers: the layers as they were measured.
        needs: what the ranks need; that of a layer that may come to any of them is the largest.
        specs: the layers as the module lists them, of which some share a module.
    """
    shared = {
        layer: {form.part_name: layers[layer].weight_bytes}
        for form in forms_of(specs)
        for layer in form.layers
        if len(form.layers) > 1
    }
    names = ("kept", "gradient", "accumulated", "reduction", "optimizer", "before")
    most = {name: max(getattr(each, name) for each in needs) for name in names}
    at_once = any(each.at_once for each in needs)
    # A parameter is stepped over behind those of earlier layers, and of shared ones, wherever they are.
    ends = {layers[index].trainable_parameters[-1] for index in shared if layers[index].trainable_parameters}
    with_needs = []
    for index, (layer, found) in enumerate(zip(chain.layers, layers, strict=True)):
        numbers = found.num_trainable_parameters
        if at_once:
            optimizer = most["optimizer"] * numbers
        else:
            optimizer = _one_by_one(found.trainable_parameters, ends, most["optimizer"], most["before"])
            ends.update(found.trainable_parameters[-1:])
        gradient_bytes = round(most["gradient"] * numbers)
        with_needs.append(
            replace(
                layer,
                # Buffers are copied before each step, which may have to be undone.
                training_bytes=(
                    found.weight_bytes
                    + 2 * found.buffer_bytes
                    + found.hidden_bytes
                    + round(most["kept"] * numbers)
                    + gradient_bytes
                ),
                gradient_bytes=gradient_bytes,
                first_backward_bytes=_in_first_backward(found, gradient_bytes, most["accumulated"]),
                reduction_bytes=round(most["reduction"] * numbers),
                optimizer_transient_bytes=round(optimizer),
                shared_weights=tuple(shared.get(index, {}).items()),
            )
        )
    return replace(chain, layers=tuple(with_needs))


def _in_first_backward(layer: MeasuredLayer, gradient_bytes: int, accumulated: float) -> int | None:
    """Return how many bytes of its gradients a layer's first backward needs beyond a later one."""
    first = layer.memory.first_backward_bytes
    if first is None:
        return None
    of_other_type = round(accumulated * layer.num_trainable_parameters)  # which a layer by itself has not
    return min(gradient_bytes, max(0, first - layer.memory.backward_bytes) + of_other_type)


def _one_by_one(sizes: Sequence[int], ends: Iterable[int], each: float, before: float) -> float:
    """Return the bytes that a step over a layer's parameters, one after the other, needs at most.

    Args:
        sizes: numbers of the parameters.
        ends: numbers of parameters of which one may be before the first one: the last ones of other layers.
        each: bytes per number of the parameter that is stepped over.
        before: bytes per number of the one before it, which are not gone yet.
    """
    if not sizes:
        return 0
    # A large one has been stepped over itself, with no less than this.
    previous = max((end for end in ends if each * end < each * sizes[0] + before * end), default=0)
    return max(each * size + before * last for last, size in pairwise([previous, *sizes]))
