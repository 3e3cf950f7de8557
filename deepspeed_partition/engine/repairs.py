"""Repairs of DeepSpeed where a planned cut meets its faults; ``REPAIRS.md`` beside this file lists all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_partition.engine.runtime.environment import announce

TO_CLIP_ALIKE = (
    "DeepSpeed {version} clips an fp32 pipeline by the gradient norm of its first stage alone, so training "
    "depends on the cut {parts}: set gradient_clipping to 0, use ZeRO stage 1, or ask for this cut as a list or "
    "for the partition_method 'madpipe', which clip by the norm of all stages"
)
"""The warning that is given once per process about a cut that DeepSpeed made."""
SETTINGS_OF_BOTH = {"lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode"}
"""The settings that torch's Adam and DeepSpeed's take alike."""
PIECE_NUMBERS, MOST_PIECES = 2**15, 16
"""Numbers that a norm is taken of at once, at least, and the number of pieces that all of a rank make, at most."""
_told: set[str] = set()


def clip_by_global_norm(
    parameters: Iterable[torch.nn.Parameter],
    max_norm: float,
    *,
    group: dist.ProcessGroup | None,
    holds_slice: bool,
    device: torch.device,
    alone: bool = False,
    pipelines: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip by the norm over the ranks of ``group``, all stages (and slices of layers) of one pipeline; return it.

    Args:
        group: the ranks that have a gradient of each weight once; None: all ranks.
        holds_slice: this rank speaks for the parameters that all tensor-parallel ranks have alike.
        alone: by the norm of this rank's own gradients.
        pipelines: the ranks of all pipelines with this stage, where these hold different experts: the mean of
            their norms is taken, as by DeepSpeed, else weights that all have would part.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    squares = torch.zeros((), device=device)
    for parameter in with_gradient:
        assert parameter.grad is not None
        copy = getattr(parameter, "ds_pipe_replicated", False)  # another stage speaks for tied weights
        if not copy and (holds_slice or is_model_parallel_parameter(parameter)):
            gradient = parameter.grad.abs() if parameter.grad.is_complex() else parameter.grad
            squares += gradient.float().norm() ** 2
    if not alone:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if pipelines is not None:
        norm /= dist.get_world_size(pipelines)
        dist.all_reduce(norm, group=pipelines)
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in with_gradient:
        assert parameter.grad is not None
        parameter.grad.mul_(coefficient)
    return norm


def tell_how_gradients_are_clipped(engine: Any, *, is_compared: bool) -> None:
    """Say how gradients are clipped where plain DeepSpeed, or the program, does otherwise: fp32, no ZeRO.

    Args:
        is_compared: Whether what the program is used to is a pipeline of plain DeepSpeed.
    """
    in_fp32_without_zero = engine.optimizer is not None and engine.optimizer is engine.basic_optimizer
    if not in_fp32_without_zero or engine.num_stages == 1 or not engine.gradient_clipping():
        return
    if not engine.owns_cut:
        warn_of_clipping(deepspeed.__version__, engine.module.parts)
    elif "gradient_clipping" not in engine._config._param_dict:
        announce(
            "gradient_clipping is not set, so gradients are clipped to DeepSpeed's default, a norm of "
            f"{engine.gradient_clipping():g}, over all stages; plain DeepSpeed would take the norm of the first "
            "stage alone and train otherwise: set it to 0 to clip nothing, or to a number"
        )
    elif is_compared and "clipping of all" not in _told:
        _told.add("clipping of all")
        announce(
            f"gradients are clipped to a norm of {engine.gradient_clipping():g} over all stages, as in one "
            "process; plain DeepSpeed would take the norm of the first stage alone (fp32 without ZeRO), and its "
            "losses can be others therefore"
        )


def warn_of_clipping(version: str, parts: Any) -> None:
    """Say, once, that DeepSpeed's norm depends on the cut."""
    if "clipping" not in _told:
        _told.add("clipping")
        announce(TO_CLIP_ALIKE.format(version=version, parts=[int(cut) for cut in parts]), logging.WARNING)


def fp16_without_zero(config: Any, optimizer: Any, num_stages: int) -> str:
    """Why fp16, or autocast in it, does not train without ZeRO; empty for other configurations, and to evaluate.

    Args:
        optimizer: that an engine is given; None: the configuration may name one.
        num_stages: of the pipeline.
    """
    trains = optimizer is not None or config.optimizer_name is not None
    if not trains or config.zero_enabled:
        return ""
    has_autocast = getattr(config, "torch_autocast_enabled", False)
    if has_autocast and config.torch_autocast_dtype == torch.float16 and num_stages > 1:
        return (
            "torch_autocast with float16 and without ZeRO does not train as it should in a pipeline: each rank "
            "has a loss scale of its own, and skips a step by its own gradients; use bfloat16, or ZeRO stage 1"
        )
    if not config.float16_config.enabled:
        return ""
    return (
        f"fp16 without ZeRO does not train as it should: DeepSpeed {deepspeed.__version__} divides the gradients "
        "of a pipeline by the loss scale and does not multiply the loss by it; use ZeRO stage 1, or bf16"
    )


def let_normalizations_run(module: torch.nn.Module) -> int:
    """Give running statistics the type of the weights beside them; return the number of these layers.

    DeepSpeed 0.19.8 casts weights to half precision and leaves buffers in fp32, and torch's batch normalization
    takes no such pair. Versions before cast both.
    """
    mixed = [
        norm
        for norm in module.modules()
        if isinstance(norm, torch.nn.modules.batchnorm._NormBase)
        and norm.weight is not None
        and norm.running_mean is not None
        and norm.running_var is not None
        and norm.weight.dtype in (torch.bfloat16, torch.float16)
        and norm.weight.dtype != norm.running_mean.dtype
    ]
    for norm in mixed:
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean = norm.running_mean.to(norm.weight.dtype)
        norm.running_var = norm.running_var.to(norm.weight.dtype)
    return len(mixed)


@contextmanager
def viewed_as_bytes(module: torch.nn.Module) -> Iterator[None]:
    """Context in which DeepSpeed can broadcast every parameter of ``module``; each is as it was afterwards.

    DeepSpeed 0.19.8 views parameters as bytes, which torch refuses where there is no dimension, such as a
    temperature, or where the last one is not contiguous, such as a convolution's weight with channels last.
    """
    shown = []
    for parameter in module.parameters():
        data = parameter.data
        if data.dim() == 0 or data.stride(-1) != 1:
            parameter.data = data.contiguous().view(-1)
            shown.append((parameter, data))
    try:
        yield
    finally:
        for parameter, data in shown:
            data.copy_(parameter.data.view(data.shape))
            parameter.data = data


def prefer_torch_adam(config: Any) -> None:
    """Let torch's Adam take the place of a fused one that DeepSpeed would compile first, on a CPU.

    The update is the same, and so is the weight decay where none is given: 0, and not torch's 0.01.
    ``"torch_adam": false`` among the optimizer's parameters asks for DeepSpeed's.
    """
    name, parameters = (config.optimizer_name or "").lower(), config.optimizer_params or {}
    if name not in ("adam", "adamw") or not parameters.keys() <= SETTINGS_OF_BOTH:
        return
    if get_accelerator().device_name() == "cpu" and not installed_ops.get("fused_adam"):
        announce(
            "torch's Adam runs in the place of DeepSpeed's, which would have to be compiled for this CPU first "
            '("torch_adam": false in the parameters of the optimizer asks for it)'
        )
        config.optimizer_params = {"weight_decay": 0.0, **parameters, "torch_adam": True}


def let_stages_differ(optimizer: Any, stages: dist.ProcessGroup, device: torch.device) -> None:
    """Repair what a wrapping ``optimizer`` cannot do on this rank's stage. Collective over ``stages``.

    All repairs concern the norm of the gradients over all stages, where DeepSpeed takes for granted that stages
    are alike, and copies each gradient in a wider type.
    """
    if isinstance(optimizer, BF16_Optimizer):
        _allow_nothing_to_count(optimizer, device)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        num_groups = torch.tensor(len(optimizer.bit16_groups), device=device)
        dist.all_reduce(num_groups, op=dist.ReduceOp.MAX, group=stages)
        _take_norms_in_pieces(optimizer)
        _take_part_in_norms(optimizer, int(num_groups) - len(optimizer.bit16_groups))


def in_pieces(gradients: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Return for each gradient views that make it up, of at most a sixteenth of all numbers or ``PIECE_NUMBERS``.

    Each piece is a kernel or two more. So what is small beside the whole stays whole.
    """
    most = max(PIECE_NUMBERS, -(-sum(gradient.numel() for gradient in gradients) // MOST_PIECES))
    return [
        gradient.view(-1).split(most) if gradient.numel() > most and gradient.is_contiguous() else [gradient]
        for gradient in gradients
    ]


def _take_norms_in_pieces(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Let the norm of a gradient, taken of a copy in double precision, be that of its pieces."""
    norm_of: Callable[..., torch.Tensor] = optimizer.get_grad_norm_direct

    def norm_of_pieces(gradients: Iterable[Any], params: Iterable[Any], norm_type: int = 2) -> torch.Tensor:
        own = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        pairs = [(piece, param) for each, param in zip(in_pieces(own), params, strict=False) for piece in each]
        return norm_of([piece for piece, _ in pairs], [param for _, param in pairs], norm_type)

    optimizer.get_grad_norm_direct = norm_of_pieces


def _take_part_in_norms(optimizer: DeepSpeedZeroOptimizer, num_missing: int) -> None:
    """Let a stage with fewer groups than another one take part in the norms of all groups. ZeRO-1 adds up the norm
    over all stages one group after the other: a stage without a group (only an embedding, say, whose weight
    decays, and nothing that does not) would leave the others waiting for ever.
    """
    if not num_missing:
        return
    norm_of_own_groups = optimizer.scaled_global_norm

    def norm_of_all_groups(norm_type: int = 2) -> torch.Tensor:
        norm = norm_of_own_groups(norm_type)
        others = [optimizer.get_grad_norm_direct([], [], norm_type) for _ in range(num_missing)]
        norms = torch.stack([norm, *others])
        # DeepSpeed's sign for infinite and for undefined norms is -1, which a sum of squares would hide.
        return torch.where(norms < 0, torch.inf, norms).norm(norm_type)

    optimizer.scaled_global_norm = norm_of_all_groups


def fit_reduction_buffers(optimizer: Any, num_weights: int) -> None:
    """Let the buffer in which ZeRO reduces gradients have room for those of this rank, and be there when it does.

    DeepSpeed makes it as large as ``reduce_bucket_size``, 5e8 numbers by default, however few weights a stage has;
    and it makes two: one in a step's first backward, beside all activations, and another one that nothing uses,
    when gradients are reduced. Gradients that all fit are reduced alike.
    """
    if not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    optimizer.reduce_bucket_size = min(optimizer.reduce_bucket_size, max(num_weights, 1))
    if _makes_buffer_late(optimizer):
        _make_buffer_late(optimizer)
        _let_go_of_copies(optimizer)


def _makes_buffer_late(optimizer: DeepSpeedZeroOptimizer) -> bool:
    """Return whether the buffer can wait until gradients are reduced: nothing reduces them in the backward."""
    known = hasattr(optimizer, "ipg_buckets") and hasattr(optimizer, "_gradient_reduction_buffer_dtype")
    return known and optimizer.contiguous_gradients and not optimizer.overlap_comm


def _make_buffer_late(optimizer: DeepSpeedZeroOptimizer) -> None:
    set_up: Callable[[], None] = optimizer.setup_buckets
    reduce: Callable[..., None] = optimizer.reduce_gradients

    def set_up_without_buffer() -> None:
        optimizer.contiguous_gradients = False
        try:
            set_up()
        finally:
            optimizer.contiguous_gradients = True

    def reduce_in_buffer(pipeline_parallel: bool = False) -> None:
        for bucket in optimizer.ipg_buckets.values():
            dtype = optimizer._gradient_reduction_buffer_dtype()
            buffer = torch.empty(
                int(optimizer.reduce_bucket_size), dtype=dtype, device=get_accelerator().current_device_name()
            )
            bucket.buffer[:], bucket.index = [buffer], 0
        reduce(pipeline_parallel=False)

    optimizer.setup_buckets, optimizer.reduce_gradients = set_up_without_buffer, reduce_in_buffer


def _let_go_of_copies(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Free the flat copies that gloo has reduced, before gradients are copied for the optimizer's step.

    gloo's own thread holds them a moment longer, sometimes until that copy has been made, too. What one rank has
    reduced alone is no copy but the buffer: it is not given to gloo at all.
    """
    reduce_bucket: Callable[..., torch.Tensor] = optimizer.allreduce_bucket
    average: Callable[..., None] = optimizer.average_tensor
    copies: list[torch.UntypedStorage] = []

    alone = dist.get_world_size(optimizer.dp_process_group) == 1 and optimizer.sequence_parallel_size == 1

    def reduce_and_note(
        bucket: Sequence[torch.Tensor], communication_data_type: torch.dtype, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if alone and communication_data_type == bucket[0].dtype:
            flat: torch.Tensor = optimizer.flatten(bucket)
            return flat
        reduced = reduce_bucket(bucket, communication_data_type, *args, **kwargs)
        storage = reduced.untyped_storage()
        is_copy = all(storage.data_ptr() != each.untyped_storage().data_ptr() for each in bucket)
        if is_copy and reduced.device.type == "cpu":
            copies.append(storage)
        return reduced

    def average_and_let_go(*args: Any, **kwargs: Any) -> None:
        average(*args, **kwargs)
        while copies:
            copies.pop().resize_(0)

    optimizer.allreduce_bucket, optimizer.average_tensor = reduce_and_note, average_and_let_go


def reduction_buffer_bytes(optimizer: Any) -> tuple[int, int]:
    """Return the bytes of ZeRO's buffers to reduce gradients: during all backwards of a step, and at its end."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not optimizer.contiguous_gradients:
        return 0, 0
    in_full = optimizer.use_grad_accum_attribute
    dtype: torch.dtype = optimizer.gradient_accumulation_dtype if in_full else optimizer.dtype
    num_bytes = int(optimizer.reduce_bucket_size) * dtype.itemsize
    return (0, num_bytes) if _makes_buffer_late(optimizer) else (num_bytes, 2 * num_bytes)


def _allow_nothing_to_count(optimizer: BF16_Optimizer, device: torch.device) -> None:
    """Let a stage have nothing to count in the norm: tied weights count on one stage, and another one that has
    nothing else would stack an empty list."""
    gradients_of: Callable[..., Any] = optimizer.get_grads_for_norm

    def gradients_or_zero(for_clipping: bool = False) -> Any:
        found = gradients_of(for_clipping)
        if for_clipping:
            return found
        pieces = [piece for pieces in in_pieces(found[0]) for piece in pieces]  # each is copied in fp32
        return pieces or [torch.zeros(1, device=device)], found[1]

    optimizer.get_grads_for_norm = gradients_or_zero


def link_states_of_all_groups(optimizer: Any) -> None:
    """Let ``safe_get_full_optimizer_state`` find every group's states, after the first step of ZeRO-1.

    DeepSpeed links all groups once the first one was stepped, when the others have no states yet.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and len(optimizer.bit16_groups) > 1:
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
