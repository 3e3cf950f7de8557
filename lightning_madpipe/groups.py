"""What the strategy's collectives mean on pipelines.

The ranks of one pipeline hold the same data, which counts once.
"""

from __future__ import annotations

import re
import sys
import warnings
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_partition.engine.runtime.collectives import any_bits, broadcast_object, gather_objects, own_groups
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.compat.running_code import line_of_the_user
from lightning_madpipe.module import pipeline_of
from lightning_madpipe.steps.loaders import EvenLoader
from lightning_madpipe.steps.metrics import gathered

if TYPE_CHECKING:
    from pytorch_lightning.strategies import DeepSpeedStrategy

    from lightning_madpipe.steps.runner import BatchRunner
else:
    DeepSpeedStrategy = object


WORLD_SIZE = (
    "{asked} is asked for at {line}: it counts all {size} processes{of}. The {stages} stages of a "
    "pipeline read the same data together, so that a rate or a number of batches that is multiplied by it, as "
    "with ddp, is another one than in one process: the data are read in trainer.world_size // {stages} parts, "
    "here {pipelines}, and self.all_gather() gives as many, of one the tensor itself, without a dimension in front"
)


class _Gather(torch.autograd.Function):
    """Gathers a tensor of one shape from the ranks of a group; each gets the sum of their gradients for its own.

    ``torch.distributed.nn.functional.all_gather`` (torch 2.4 to 2.13) takes the places in a group of gloo for
    ranks of the world in its backward, and fails where they are not.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor, group)
        return torch.stack(everyone)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def gathered_with_gradients(tensor: Tensor, group: Any) -> Tensor:
    """``tensor`` of each rank of ``group``, stacked, through which gradients go back to all of them."""
    stacked: Tensor = _Gather.apply(tensor.contiguous(), group)
    return stacked


NO_BATCH = (
    "{number} pipelines take each batch together, and the data give none to {which}: let the number of samples be "
    "a multiple of batch size times pipelines, or run it with one pipeline, MadPipeStrategy(num_stages=...) of as "
    "many stages as processes"
)


class PipelineGroups(DeepSpeedStrategy):
    """``reduce`` and ``all_gather`` over the data-parallel ranks; barriers, broadcasts and decisions over all.

    Inside a step, which only the last stages run, the data-parallel ranks are those last stages.
    """

    _lightning: Lightning
    _engine: Any
    _runner: BatchRunner | None
    num_stages: int | None

    @property
    def world_size(self) -> int:
        """All processes. A user who asks the Trainer is told once that these are not as many parts of the data."""
        size = int(super().world_size)
        self._tell_of_size(sys._getframe(1), "world_size", size)
        return size

    @property
    def parallel_devices(self) -> Any:
        """The devices of this machine, which ``trainer.num_devices`` counts."""
        devices = super().parallel_devices
        asked = sys._getframe(1).f_back
        if devices is not None and asked is not None and asked.f_code.co_name == "num_devices":
            self._tell_of_size(asked, "num_devices", len(devices), " of a machine")
        return devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Any) -> None:
        self._parallel_devices = devices

    def _tell_of_size(self, frame: FrameType, asked: str, size: int, of: str = "") -> None:
        if (line := line_of_the_user(frame)) is not None:
            self.tell_of_asked_size(f"trainer.{asked}", line, size, of)

    def tell_of_asked_size(self, asked: str, line: str, size: int, of: str = "") -> None:
        """Say once that what code at ``line`` asks for counts all processes, or those of a machine."""
        num_processes = int(super().world_size)
        stages = self.num_stages or num_processes
        if stages > 1:
            parts = num_processes // stages
            told = WORLD_SIZE.format(asked=asked, line=line, size=size, of=of, stages=stages, pipelines=parts)
            warn_once(f"world size {asked}", told)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if group is None:
            if self._rehearses():
                return tensor
            group = self._data_parallel_group()
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        # LightningModule.all_gather fills in the world where its caller names no group.
        if dist.is_initialized() and (group is None or group is dist.group.WORLD):
            num_pipelines = self._num_pipelines()
            if num_pipelines == 1:
                return tensor  # with its gradient, as in one process
            if self._rehearses():
                return torch.stack([tensor] * num_pipelines)
            group = self._data_parallel_group()
        if sync_grads and dist.is_initialized():
            return gathered_with_gradients(tensor, group)
        return super().all_gather(tensor, group=group)

    def gather_state(self, tensor: Tensor) -> list[Tensor]:
        """A metric's state on each data-parallel rank."""
        if self._rehearses():
            return [tensor] * self._num_pipelines()
        return gathered(tensor, self._data_parallel_group())

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        some_for, some_against = any_bits([bool(decision), not decision])
        return not some_against if all else bool(some_for)

    def barrier(self, *arguments: Any, **keywords: Any) -> None:
        self._check_everyone_comes("barrier")
        if dist.is_initialized():
            dist.barrier(group=own_groups().objects)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._check_everyone_comes("broadcast")
        if not dist.is_initialized():
            return obj
        return broadcast_object(obj, src)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Let a loader without a length end on all ranks at once, and workers of one pipeline draw alike."""
        dataloader = super().process_dataloader(dataloader)
        # Lightning, which comes next, would seed them by the number of the rank.
        of_pipeline = self.distributed_sampler_kwargs["rank"]
        connector = self._lightning.module("trainer.connectors.data_connector")
        connector._auto_add_worker_init_fn(dataloader, of_pipeline)
        length = self._lightning.module("utilities.data").sized_len(dataloader)
        if self._engine is not None:  # else rank 0 may read an example alone
            self._refuse_pipelines_without_data(length)
        if self.world_size == 1 or length is not None:
            return dataloader
        announce = self._lightning.module("utilities.rank_zero").rank_zero_info
        return EvenLoader(dataloader, announce)

    def _refuse_pipelines_without_data(self, length: int | None) -> None:
        """Refuse data of which some pipeline has no batch, and another one has some. Collective.

        Lightning pads the data of training, validation and test for its own sampler, and not those of predict.

        Raises:
            MisconfigurationException: on every rank.
        """
        everyone = gather_objects(length) if self._num_pipelines() > 1 else [length]
        if 0 in everyone and any(theirs != 0 for theirs in everyone):
            without = ", ".join(f"rank {rank}" for rank, theirs in enumerate(everyone) if theirs == 0)
            raise self._lightning.refusal(
                NO_BATCH.format(number=self._num_pipelines(), which=f"that of {without}")
            )

    def refuse_too_few_samples(self, trainer: Any) -> None:
        """Let predict refuse data with fewer samples than pipelines, of which Lightning's sampler asserts some."""
        connector = trainer._data_connector  # of Lightning (2.5 to 2.6), whose samplers know no sentence for it
        vars(connector).pop("_resolve_sampler", None)
        resolve, number = connector._resolve_sampler, self._num_pipelines()

        def resolved(dataloader: Any, *arguments: Any, **keywords: Any) -> Any:
            is_shared = trainer.state.fn == "predict" and connector._requires_distributed_sampler(dataloader)
            if is_shared and 0 < len(dataloader.sampler) < number:
                raise self._lightning.refusal(NO_BATCH.format(number=number, which="some"))
            return resolve(dataloader, *arguments, **keywords)

        connector._resolve_sampler = resolved

    def leave_out_needless_advice(self) -> None:
        """Silence Lightning's advice of ``sync_dist=True``, where one pipeline has nothing to reduce."""
        if self._num_pipelines() == 1:
            category = self._lightning.module("utilities.warnings").PossibleUserWarning
            start, end = map(re.escape, ("It is recommended to use `self.log(", "sync_dist=True)`"))
            warnings.filterwarnings("ignore", message=f"{start}.*{end}", category=category)

    def _data_parallel_group(self) -> Any:
        # There is no pipeline yet in the user's setup(), before which Lightning lets all ranks meet.
        pipeline = pipeline_of(self.lightning_module)
        return own_groups().tensors if pipeline is None else pipeline.mpu().get_data_parallel_group()

    def _num_pipelines(self) -> int:
        return dist.get_world_size(self._data_parallel_group())

    def _rehearses(self) -> bool:
        """Whether a step runs that the other pipelines do not run now."""
        return self._runner is not None and self._runner.steps.rehearsing

    def _check_everyone_comes(self, name: str) -> None:
        if self._runner is not None and self._runner.steps.running is not None and self.world_size > 1:
            raise self._lightning.refusal(
                f"{self._runner.steps.running} calls strategy.{name}(), which the ranks of the other stages would "
                "have to call, too, and they do not run the step: call it in a hook"
            )
