"""The forward and the backward of a micro-batch in training, where DeepSpeed's engine adds nothing to them.

DeepSpeed wraps each pass in what ZeRO, half precision, autocast, timers and its compiler need: hooks on every
output, contexts, counters, longer together than a tiny layer. In fp32 without ZeRO, and without an option that
looks into a pass, all of that does nothing. Then the passes here run, which call the module and the loss and
nothing else; the numbers are the same in all bits.

They do what these functions of DeepSpeed do, as they were read. Where those are others (another version, a program
that replaced one, a subclass that overrides one), DeepSpeed's run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import struct
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.modules.module as torch_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from deepspeed_partition.engine.pipeline.boundary_engine import AnyBoundaryEngine
from deepspeed_partition.engine.pipeline.module_walks import have_gradients_of, walks_as_torch
from deepspeed_partition.engine.runtime.autograd_boundary import has_twice, run_backward

if TYPE_CHECKING:
    from deepspeed_partition.engine.pipeline.plan_engine import AnyPlanEngine

_OF_PIPELINE = ("_exec_forward_pass", "_exec_backward_pass")
_BESIDE_PASSES = ("_exec_load_micro_batch", "_reentrant_activation_checkpointing", "_aggregate_total_loss")
_OF_ENGINE = (
    "forward", "backward", "_backward_prologue", "_backward_epilogue", "_backward_prologue_per_tensor",
    "_forward_prologue", "_forward_epilogue", "_create_module_forward_pre_hook",
    "_create_module_forward_post_hook",
)  # fmt: skip
_OF_UPDATE = ("zero_grad",)
_OF_REDUCTION = ("allreduce_gradients", "buffered_allreduce_fallback", "_get_gradients_for_reduction",
                 "_reduce_non_expert_gradients")  # fmt: skip
_NUMBER, _FLOAT = struct.Struct("<I"), struct.Struct("<f")
IS_LOSS = 2**32
"""The bit that says that those below it are a loss in fp32."""
READ_VERSION = "0.19.8"
"""The version of DeepSpeed whose functions were read for this."""
DIGEST_AS_READ = "accf2c1ec069be159f2aeef9fd585b849c114f2f444c4ee2e8a8c5c0517f9608"
"""SHA-256 of these functions of that version."""


def bits_of_loss(loss: torch.Tensor) -> int:
    """Return a loss of one number as ``IS_LOSS`` and the 32 bits of its fp32, as which DeepSpeed sends it."""
    number = int(loss.detach().float().reshape(1).view(torch.int32))
    return IS_LOSS | number & IS_LOSS - 1


def loss_of_bits(bits: int) -> torch.Tensor:
    """Return the loss that :func:`bits_of_loss` made bits of, in fp32."""
    return torch.tensor(_FLOAT.unpack(_NUMBER.pack(bits & IS_LOSS - 1))[0], dtype=torch.float32)


def digest_of_deepspeed() -> str:
    """Return the SHA-256 of the functions that are replaced here, as they are now; empty where they are hidden."""
    of_pipeline = (getattr(PipelineEngine, name) for name in (*_OF_PIPELINE, *_BESIDE_PASSES))
    of_engine = (_inside(getattr(DeepSpeedEngine, name)) for name in (*_OF_ENGINE, *_OF_REDUCTION, *_OF_UPDATE))
    try:
        return _digest_of_sources(*of_pipeline, *of_engine)
    except (OSError, TypeError):
        return ""


@functools.cache
def _digest_of_sources(*functions: Hashable) -> str:
    """Kept, because Python reads the lines of a function token by token: all of these for each engine."""
    sources = [inspect.getsource(cast(Callable[..., Any], function)) for function in functions]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()


def _inside(function: Any) -> Any:
    """Return what DeepSpeed's decorator for NVTX has in it."""
    return inspect.getclosurevars(function).nonlocals.get("func", function)


_walks_as_torch = functools.cache(walks_as_torch)


@functools.cache
def _overrides_nothing(engine_class: Hashable) -> bool:
    assert isinstance(engine_class, type)
    for name in (*_OF_PIPELINE, *_OF_ENGINE, "allreduce_gradients", "buffered_allreduce_fallback"):
        owner = next(each for each in engine_class.__mro__ if name in vars(each))
        if owner not in (AnyBoundaryEngine, PipelineEngine, DeepSpeedEngine):
            return False
    return True


def _has_deepspeeds_hooks_alone(module: Any) -> bool:
    """Return whether a call of a module does nothing besides its ``forward`` but what DeepSpeed's engine adds."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return (
        type(module).__call__ is nn.Module.__call__
        and len(before) == len(after) == 1
        and all(each.__module__ == DeepSpeedEngine.__module__ for each in (*before.values(), *after.values()))
        and not (
            module._backward_hooks or module._backward_pre_hooks or module._compiled_call_impl is not None
            or torch_module._has_any_global_hook() or nn.Module.__call__.__globals__ is not vars(torch_module)
        )
    )  # fmt: skip


def has_additional_losses(module: Any) -> bool:
    """Return whether a module tells losses besides that of a batch, by its class or by a function set on it."""
    of_class = type(module).get_additional_losses
    return of_class is not PipelineModule.get_additional_losses or "get_additional_losses" in vars(module)


class PlainPasses:
    """The passes of one engine.

    Args:
        engine: whose module is there.
    """

    def __init__(self, engine: AnyPlanEngine) -> None:
        self._engine = engine
        self._as_read = digest_of_deepspeed() == DIGEST_AS_READ
        self._module: Any = engine.module
        self._call: Callable[[Any], Any] = engine.module
        self._alone: dict[int, Callable[[Any], Any]] = {}
        """What runs the layers of a stage where a call of the module would do nothing else, by stage."""
        self.may_load = False
        """Whether they may load micro-batches of this batch, too."""
        self._of_loss: tuple[Any, ...] = ()
        self._gradient_of_loss = torch.empty(0)

    def begin(self) -> bool:
        """Begin a batch; return whether it may be run by them."""
        may_run = self._may_run()
        module: Any = self._engine.module
        config: Any = self._engine
        self.may_load = may_run and not config._reentrant_activation_checkpointing()
        self._module = self._call = module
        self._alone.clear()
        if may_run and _has_deepspeeds_hooks_alone(module):
            self._call = module.forward
            if "forward" not in vars(module):
                alone = {stage: module.layers_alone(stage) for stage in module.own_stages}
                self._alone.update({stage: run for stage, run in alone.items() if run is not None})
        return may_run

    def _may_run(self) -> bool:
        engine = self._engine
        config: Any = engine
        return (
            self._as_read
            and torch.is_grad_enabled()
            and bool(engine.module.training)
            and _overrides_nothing(cast(Hashable, type(engine)))
            and vars(engine).keys().isdisjoint((*_OF_PIPELINE, *_OF_ENGINE, *_OF_REDUCTION, *_OF_UPDATE))
            and type(engine.optimizer).__module__.partition(".")[0] != "deepspeed"
            and not (
                config.zero_optimization() or config.bfloat16_enabled() or config.fp16_enabled()
                or config.torch_autocast_enabled() or torch.is_autocast_enabled()
                or config.wall_clock_breakdown() or config.memory_breakdown() or config.flops_profiler_enabled()
                or config.autotuning_enabled() or config.is_deepcompile_enabled()
                or config._is_compiled_autograd_enabled or config.enable_backward_allreduce or config.zenflow
                or config.is_pipe_partitioned or config.is_grad_partitioned
                or config.random_ltd_enabled() or config.fp16_auto_cast()
                or has_additional_losses(engine.module)
                or not _walks_as_torch(cast(Hashable, type(engine.module)))
            )
        )  # fmt: skip

    def has_nothing_to_reduce(self) -> bool:
        """Return whether DeepSpeed's reduction of gradients would change none, behind plain passes.

        So it is where there is one pipeline, no type or factor that it would bring them to, and each weight has a
        gradient: where one has none, DeepSpeed makes zeros.
        """
        engine: Any = self._engine
        kind = engine.communication_data_type
        if (
            engine.grid.data_parallel_size > 1 or engine.has_moe_layers or engine.leaves_without_gradient
            or engine.gradient_predivide_factor() != 1.0
        ):  # fmt: skip
            return False
        return have_gradients_of(engine.module, kind)

    def load(self, micro_batch: Any, slot: int, *, is_first: bool, is_last: bool, is_copy: bool) -> None:
        """Load the inputs of a micro-batch on the first stage, its labels on the last one.

        Args:
            is_copy: whether inputs without a gradient are copies already, which nobody else has.
        """
        engine: Any = self._engine
        if is_first:
            inputs = micro_batch[0]
            if not isinstance(inputs, torch.Tensor):
                assert isinstance(inputs, tuple | list)
            whole = isinstance(inputs, torch.Tensor)
            given = (inputs,) if whole else inputs
            is_copy &= not has_twice(given)
            own = tuple([self._copied(each, is_copy) for each in given])
            engine.pipe_buffers["inputs"][slot] = own[0] if whole else own
        if is_last:
            labels = micro_batch[1]
            if isinstance(labels, torch.Tensor):
                labels = labels if labels.device == engine.device else labels.to(engine.device)
            elif isinstance(labels, tuple | list):
                labels = tuple([each.to(engine.device).detach() for each in labels])
            engine.pipe_buffers["labels"][slot] = labels

    def _copied(self, tensor: torch.Tensor, is_copy: bool) -> torch.Tensor:
        copy = tensor if is_copy and not tensor.requires_grad else tensor.clone()
        here: Any = self._engine.device
        if copy.device != here:
            copy = copy.to(here)
        return copy.detach() if copy.requires_grad else copy

    def forward(self, stage: int, inputs: Any) -> Any:
        """Return the output of a stage, which is active and not the last one."""
        engine: Any = self._engine
        engine.tput_timer.start()
        recomputes = self._module.second_forward is not None
        run = self._call if recomputes else self._alone.get(stage, self._call)
        return run(inputs)

    def loss_of(self, stage: int, inputs: Any, labels: Any) -> Any:
        """Return the loss of a micro-batch, on the last stage, and add it to that of the batch."""
        engine: Any = self._engine
        module, outputs = self._module, self.forward(stage, inputs)
        loss_fn = module.loss_fn if engine._compute_loss else None
        loss = outputs if loss_fn is None else loss_fn(outputs, labels)
        if engine.eval_return_logits:
            engine.outputs = outputs
        if isinstance(loss, torch.Tensor):
            detached: Any = without_more(loss.detach())
        else:
            detached = [without_more(each.detach()) for each in loss]
        engine.fwd_outputs.append(detached)
        engine.total_loss = _added(engine.total_loss, detached)
        return loss

    def loss_in_bits(self) -> int:
        """Return the loss of the batch in bits, for those who have none; 0 where DeepSpeed is to tell it.

        That is where this rank has no loss, or more than one number, or the device that it is on would have to be
        waited for, or other pipelines have losses, too.
        """
        engine: Any = self._engine
        total = engine.total_loss
        if (
            not isinstance(total, torch.Tensor) or total.dim() or not total.is_floating_point()
            or total.device.type != "cpu" or not engine.is_last_stage() or engine.grid.data_parallel_size > 1
        ):  # fmt: skip
            return 0
        return bits_of_loss(engine._scale_loss_by_gas(total))

    def told_loss(self, bits: int) -> torch.Tensor:
        """Do what DeepSpeed does when the last stage has told the loss of a batch; return it."""
        engine: Any = self._engine
        loss = engine._scale_loss_by_gas(engine.total_loss) if engine.is_last_stage() else loss_of_bits(bits)
        engine.agg_additional_losses, engine.dp_group_loss = None, loss.detach().clone()
        return loss.detach().clone()

    def backward_of_loss(self, loss: torch.Tensor) -> None:
        """Run the backward of a loss, divided by the number of micro-batches as in DeepSpeed.

        The division is left to its gradient, which is the same number for all losses of one type.
        """
        self.run((loss,), (self.gradient_of_loss(loss),))

    def gradient_of_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return 1 divided by the number of micro-batches, in the type of a loss."""
        of_loss = (self._engine.gradient_accumulation_steps(), loss.dtype, loss.device)
        if of_loss != self._of_loss:
            self._of_loss, self._gradient_of_loss = of_loss, torch.ones_like(loss.detach()) / of_loss[0]
        return self._gradient_of_loss

    def run(self, roots: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
        """Run a backward; DeepSpeed's hooks are told that it is the engine's.

        Args:
            roots: tensors, or where gradients enter the graph (``torch.autograd.graph.GradientEdge``).
            gradients: of the roots; None: of a number, 1.
        """
        if not roots:
            return
        own = self._engine.__dict__
        own["_running_engine_backward"] = True
        try:
            run_backward(roots, gradients)
        finally:
            own["_running_engine_backward"] = False


def _added(total: Any, loss: Any) -> Any:
    if isinstance(loss, torch.Tensor):
        return loss.clone() if total is None else total.add_(loss)
    return [_added(None if total is None else total[place], each) for place, each in enumerate(loss)]


def without_more(value: Any) -> Any:
    """Return a value that is kept until the end of a batch, without what its storage has besides.

    On a CPU the loss of ``mse_loss`` is the first number in the room of the losses of all elements.
    """
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_meta:
        return value
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
