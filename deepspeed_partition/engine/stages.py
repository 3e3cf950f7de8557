"""A pipeline module whose ranks hold the stages that a plan gives them: several, in any order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.pipe
import torch.distributed as dist
from deepspeed.pipe import TiedLayerSpec

from deepspeed_partition.engine.module import Cut, load_plan
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.plan import Plan


def check_plan_for(plan: Plan, num_layers: int, num_ranks: int) -> None:
    """Refuse a plan that this pipeline cannot run.

    Raises:
        PlanMismatchError: for another number of layers or ranks; a rank without a stage; recomputed layers.
    """
    if plan.chain.num_layers != num_layers:
        raise PlanMismatchError(
            f"the plan for {plan.chain.name!r} cuts {plan.chain.num_layers} layers and this model has "
            f"{num_layers}: make a plan for this model"
        )
    if plan.platform.num_devices != num_ranks:
        raise PlanMismatchError(
            f"the plan is for {plan.platform.num_devices} devices and this pipeline has {num_ranks} ranks: "
            f"make a plan for {num_ranks} devices, or start {plan.platform.num_devices} ranks per pipeline"
        )
    idle = sorted(set(range(num_ranks)) - {stage.device for stage in plan.stages})
    if idle:
        raise PlanMismatchError(
            f"the plan leaves {len(idle)} of its {num_ranks} devices without a stage, and DeepSpeed's optimizer "
            "cannot start without parameters: start fewer ranks"
        )
    recomputed = [index for index, stage in enumerate(plan.stages) if stage.blocks]
    if recomputed:
        raise PlanMismatchError(
            f"the plan recomputes layers of stage {recomputed[0]}, which this engine does not do: use "
            "activation_checkpoint_interval, or make a plan without recomputation"
        )


class StagesModule(deepspeed.pipe.PipelineModule):
    """DeepSpeed's ``PipelineModule`` with the stages of any plan; parameters have the same names on any map.

    Only one stage is active at a time: ``forward`` runs its layers, and it alone is saved or loaded by DeepSpeed's
    code, which knows of one stage per rank.

    Args:
        layers: as for DeepSpeed.
        plan: a plan, or the path of one. Its devices are the ranks of a pipeline.
        deepspeeds_arguments: those of DeepSpeed's ``PipelineModule``, without ``partition_method``.

    Raises:
        PlanMismatchError: a plan for another model or another number of ranks.
        PlanFormatError: a file that is no plan.
    """

    forward_funcs: list[Any]
    _loads_stages = False

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        plan: Plan | str | os.PathLike[str],
        num_stages: int | None = None,
        topology: Any = None,
        **deepspeeds_arguments: Any,
    ) -> None:
        loaded = load_plan(plan)
        if num_stages is None and topology is None:
            num_stages = loaded.platform.num_devices
        super().__init__(
            layers=layers,
            num_stages=num_stages,
            topology=topology,
            partition_method=loaded,
            **deepspeeds_arguments,
        )

    def _partition_layers(self, method: Any = None) -> None:
        check_plan_for(method, self._num_layers, self.num_stages)
        self.madpipe_cut = Cut("plan", method)
        self.parts = method.boundaries
        self.device_of_stage = [stage.device for stage in method.stages]
        self.layers_of_stage = [stage.layers for stage in method.stages]
        self.own_stages = [stage for stage, device in enumerate(self.device_of_stage) if device == self.stage_id]
        self._set_bounds(*self.layers_of_stage[self.own_stages[0]])

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that runs a layer."""
        for (start, stop), device in zip(self.layers_of_stage, self.device_of_stage, strict=True):
            if start <= layer_idx < stop:
                return device
        raise RuntimeError(f"layer {layer_idx} is not in the stages {self.layers_of_stage}")

    def _build(self) -> None:
        self._functions: dict[int, list[Any]] = {}
        self._checkpointable: dict[int, list[bool]] = {stage: [] for stage in self.own_stages}
        self._num_forwards = dict.fromkeys(self.own_stages, 0)
        for stage in self.own_stages:
            self._set_bounds(*self.layers_of_stage[stage])
            self.forward_funcs = []
            super()._build()
            self._functions[stage] = self.forward_funcs
        self._show(self.own_stages[0])

    def _show(self, stage: int) -> None:
        self.forward_funcs = self._functions[stage]
        self.is_checkpointable_results = self._checkpointable[stage]
        self._set_bounds(*self.layers_of_stage[stage])
        # What ``seed_layers`` counts micro-batches by.
        self.micro_offset = self._num_forwards[stage]

    @contextmanager
    def active(self, stage: int) -> Iterator[None]:
        """Let this module be one of its stages."""
        self._show(stage)
        try:
            yield
        finally:
            self._num_forwards[stage] = self.micro_offset

    # DeepSpeed's methods for one stage, on each

    def _precompute_checkpointable_values(self) -> None:
        for stage in self.own_stages:
            self._show(stage)
            self.is_checkpointable_results_interval = None  # of the stage before
            super()._precompute_checkpointable_values()
            self._checkpointable[stage] = self.is_checkpointable_results
        self._show(self.own_stages[0])

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        for stage in self.own_stages:
            self._show(stage)
            super().save_state_dict(*args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        self._loads_stages = True
        try:
            for stage in self.own_stages:
                self._show(stage)
                super().load_state_dir(*args, **kwargs)
        finally:
            self._loads_stages = False
        self._synchronize_tied_weights()

    def _synchronize_tied_weights(self) -> None:
        """Give all copies the weights of the first layer that has them.

        DeepSpeed gives them those of the lowest rank, which is the first layer's where stages follow the ranks.
        """
        if self._loads_stages:  # DeepSpeed calls this after each stage, and ranks have different numbers of them
            return
        for key, comm in self.tied_comms.items():
            tied = (isinstance(spec, TiedLayerSpec) and spec.key == key for spec in self._layer_specs)
            source = self._grid.stage_to_global(stage_id=self.stage_owner(list(tied).index(True)))
            for name in comm["weight_attr"]:
                dist.broadcast(self._recursive_getattr(comm["module"], name), src=source, group=comm["group"])

    def compile(self, *args: Any, **kwargs: Any) -> None:
        for stage in self.own_stages:
            self._show(stage)
            super().compile(*args, **kwargs)
