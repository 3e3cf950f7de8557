"""The layouts that checkpoints are saved and loaded under, and what is trained there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from deepspeed_partition.engine import MadPipeEngine
from tests.engine import pipelines
from tests.engine.any_plan_multiproc import plan_for
from tests.engine.pipelines import mlp
from tests.engine.running import NUM_MICRO_BATCHES, batches, start
from tests.engine.training_state_multiproc import OPTIMIZERS, Frozen, Noisy, turned, warm_up
from tests.exhaustive import is_exhaustive

STEPS = 2
"""Before the checkpoint, and after it."""


class Layout(NamedTuple):
    """Where the layers are."""

    num_processes: int
    cut: list[int]
    devices: tuple[int, ...] = ()
    num_replicas: int = 1

    @property
    def num_stages(self) -> int:
        return self.num_processes // self.num_replicas


LAYOUTS = {
    "one stage": Layout(1, [0, 8]),
    "two stages": Layout(2, [0, 2, 8]),
    "two others": Layout(2, [0, 6, 8]),
    "0-1-0": Layout(2, [0, 3, 6, 8], (0, 1, 0)),
    "four stages": Layout(4, [0, 1, 3, 4, 8]),
    "two stages twice": Layout(4, [0, 5, 8], (), 2),
}
ALL = list(LAYOUTS)
SOME = ["two stages", "four stages", "two stages twice"]
ALONE = ["one stage", "0-1-0", "four stages"]


class Kind(NamedTuple):
    """What is trained, and how."""

    specs: Callable[[], list[Any]]
    optimizer: str
    zero: int
    half: str = ""
    layouts: list[str] = SOME
    tokens: bool = False

    def loaded_under(self, saved: str) -> list[str]:
        """All others, where all are saved and everything runs; else the next one."""
        if self.layouts is ALL and is_exhaustive():
            return [other for other in ALL if other != saved]
        return [self.layouts[(self.layouts.index(saved) + 1) % len(self.layouts)]]


def tied_by_functions() -> list[Any]:
    """One weight is used by functions alone: DeepSpeed saves it nowhere but with the optimizer. Another one is
    used by a function first, on whose rank DeepSpeed loads nothing.
    """
    first, middle, last = (
        TiedLayerSpec("embed", pipelines.Embedding, pipelines.WORDS, 16, forward_fn=use)
        for use in (embedded, turned, pipelines.head)
    )
    by_function = TiedLayerSpec("turn", nn.Linear, 16, 16, bias=False, forward_fn=run)
    as_it_is = TiedLayerSpec("turn", nn.Linear, 16, 16, bias=False)
    return [first, by_function, LayerSpec(pipelines.Block, 16), LayerSpec(pipelines.Block, 16), middle, as_it_is,
            LayerSpec(pipelines.Block, 16), last]  # fmt: skip


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def embedded(embedding: pipelines.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    return embedding(tokens)


def noisy() -> list[Any]:
    """Dropout with seeds, batch statistics, and a frozen layer."""
    specs = [LayerSpec(nn.Linear, 8, 16), *(LayerSpec(Noisy, 16) for _ in range(6)), LayerSpec(nn.Linear, 16, 4)]
    specs[4] = LayerSpec(Frozen, 16)
    return specs


KINDS = {
    "AdamW, ZeRO 1": Kind(mlp, "AdamW", 1, layouts=ALL),
    "SGD, ZeRO 0": Kind(mlp, "SGD", 0, layouts=ALL),
    "AdamW, ZeRO 0": Kind(mlp, "AdamW", 0),
    "SGD, ZeRO 1": Kind(mlp, "SGD", 1),
    "bf16, ZeRO 0": Kind(mlp, "AdamW", 0, "bf16"),
    "bf16, ZeRO 1": Kind(mlp, "AdamW", 1, "bf16"),
    "fp16, ZeRO 1": Kind(mlp, "AdamW", 1, "fp16"),
    "tied, ZeRO 0": Kind(tied_by_functions, "SGD", 0, tokens=True),
    "tied, ZeRO 1": Kind(tied_by_functions, "AdamW", 1, tokens=True),
    "noisy, ZeRO 1": Kind(noisy, "AdamW", 1, layouts=ALONE),
    "noisy, ZeRO 0": Kind(noisy, "SGD", 0, layouts=ALONE),
}
TYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def begin(kind: Kind, layout: Layout) -> tuple[MadPipeEngine, Any]:
    """An engine, and its scheduler."""
    engine, _, scheduler = start(
        kind.specs(), layout.cut, config_of(kind), num_stages=layout.num_stages, lr_scheduler=warm_up,
        optimizer=OPTIMIZERS[kind.optimizer], plan=plan_of(layout),
    )  # fmt: skip
    return engine, scheduler


def config_of(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": kind.zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # its norm adds up by stages, and the last bits depend on them
    }
    if kind.half:
        config[kind.half] = {"enabled": True}
    if kind.half == "fp16":
        config["fp16"].update(initial_scale_power=24, loss_scale_window=2, hysteresis=1)
    return config


def plan_of(layout: Layout) -> Any:
    return plan_for(layout.devices, layout.cut, num_micro_batches=NUM_MICRO_BATCHES) if layout.devices else None


def data_of(kind: Kind) -> list[Any]:
    return batches(2 * STEPS, tokens=kind.tokens, **({} if kind.tokens else {"dtype": TYPES[kind.half]}))


def losses_after(where: Path) -> list[float]:
    return json.loads((where / "further.json").read_text())["losses"]
