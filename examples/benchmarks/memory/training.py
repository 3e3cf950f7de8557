"""Training runs that are counted: the engine that notes its peaks, and what it measures of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from cases import Group, boundaries
from models import MODELS, loss

from deepspeed_partition import Chain, LayerProfile, Plan, Platform
from deepspeed_partition.engine import MadPipeEngine, PipelineModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.profiling import CountedMemory
from deepspeed_partition.schedule.instructions import Compute
from tests.engine.harness import forget_engines

MICRO_BATCHES_PER_DEVICE = 2
STEPS = 3
BANDWIDTH = 1e9
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Data(Iterator[Any]):
    """Micro-batches that nobody else holds, each with other numbers."""

    def __init__(self, group: Group) -> None:
        self._make, self._dtype = MODELS[group.model].micro_batch, DTYPES[group.precision]

    def __next__(self) -> Any:
        return self._make(self._dtype)


class WatchedEngine(MadPipeEngine):
    """Notes the peak of each part of a step."""

    memory: CountedMemory | None = None

    def begin(self, memory: CountedMemory) -> None:
        """Count from now on."""
        self.memory = memory
        self.peaks: dict[str, int] = {"training": 0, "reduction": 0, "optimizer": 0}
        self.moments: dict[str, str] = dict.fromkeys(self.peaks, "")

    def unread_bytes(self) -> int:
        """Return the bytes of micro-batches that were read and not loaded: on a GPU they are not on the device."""
        unread = (each for each in self.batch_data.kept.values() if each[0] is not None)
        return sum(tensor.untyped_storage().nbytes() for each in unread for tensor in each)

    def note(self, part: str, moment: object, unread_before: int = 0) -> None:
        """Note the peak since the last call."""
        if self.memory is None:
            return
        unread = self.unread_bytes()
        # What the first stage loads is on its device; of the last one's data only the labels ever are.
        peak = self.memory.peak_bytes - (unread if self.stage_id == 0 else max(unread, unread_before))
        if peak > self.peaks[part]:
            self.peaks[part], self.moments[part] = peak, str(moment)
        self.memory.reset_peak()

    def _execute(self, instruction: Any) -> None:
        unread_before = self.unread_bytes()
        super()._execute(instruction)
        if isinstance(instruction, Compute):
            self.note("training", instruction, unread_before)

    def _exec_reduce_tied_grads(self) -> None:
        self.note("training", "the last transfers")
        super()._exec_reduce_tied_grads()

    def _exec_reduce_grads(self) -> None:
        super()._exec_reduce_grads()
        self.note("reduction", "gradients reduced")

    def _exec_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super()._exec_optimizer_step(*args, **kwargs)
        self.note("optimizer", "step")


def engine_of(
    group: Group, num_micro_batches: int, num_stages: int, engine_class: type = WatchedEngine, **how: Any
) -> WatchedEngine:
    """Return an engine that trains a group's model; ``how`` it is cut: a plan, or options of ``madpipe``."""
    torch.manual_seed(0)
    plan: Plan | None = how.pop("plan", None)
    more: dict[str, Any] = {"partition_method": "madpipe"} if plan is None else {"plan": plan}
    module = PipelineModule(MODELS[group.model].layers(), num_stages=num_stages, loss_fn=loss, **more)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": num_micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": group.zero},
        "zero_allow_untested_optimizer": True,
        "pipeline": {"madpipe": {"bandwidth": BANDWIDTH, "latency_seconds": 0.0, **how}},
    }
    if group.precision == "bf16":
        config["bf16"] = {"enabled": True}
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = initialize_with(
        engine_class, model=module, config=config, optimizer=OPTIMIZERS[group.optimizer](parameters),
        model_parameters=parameters,
    )  # fmt: skip
    return engine


def measured(group: Group, num_micro_batches: int, num_stages: int, warm_up_steps: int) -> tuple[Chain, Platform]:
    """Return what the engine measures by itself, on a uniform cut."""
    num_layers = len(MODELS[group.model].layers())
    engine = engine_of(
        group, num_micro_batches, num_stages, algorithm=boundaries("uniform", _alike(num_layers), num_stages),
        warmup_steps=warm_up_steps,
    )  # fmt: skip
    data = Data(group)
    for _ in range(warm_up_steps + 1):
        engine.train_batch(data)
    found = engine.chain, engine.plan.platform
    del engine
    forget_engines()
    return found


def _alike(num_layers: int) -> Chain:
    layer = LayerProfile(name="", forward_seconds=1.0, backward_seconds=1.0, weight_bytes=1, output_bytes=1)
    return Chain(input_bytes=1, layers=(layer,) * num_layers)
