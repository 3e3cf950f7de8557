"""Weights that some steps compute no gradient of: an optimizer leaves them, and what it knows of them.

Cases of ``lightning_multiproc.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from deepspeed_partition.engine.runtime.environment import log_here
from lightning_madpipe.compat import optimizers
from tests.choice import is_chosen, run_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.after_fit_cases import Said
from tests.lightning.lightning_cases import NUM_CLASSES, NUM_FEATURES, WIDTH, Host, seeded, trained


class Partly(cases.Block):
    """A block with a weight that nothing uses, which weight decay would shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)


class Beginning(nn.Module):
    """Embeds, and has a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        # Of which torch would make zeros where no gradient is.
        self.head.register_full_backward_hook(lambda *_: None)
        self.head.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(x)
        return x, self.head(x)


class Beside(nn.Module):
    """A block beside which the early head's output passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Partly()

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, early = both
        return self.block(x), early


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, early = both
        return early, self.head(x)


class TwoHeads(cases.Steps):
    """Trains one head in some steps, and both in others."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer=optimizer)
        self.net = nn.Sequential(Beginning(), Beside(), Beside(), Beside(), End())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        early, late = self(x)
        if batch_idx % 2:
            return F.cross_entropy(late, y)
        return F.cross_entropy(early, y) + (F.cross_entropy(late, y) if self.current_epoch == 0 else 0.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0])[1], batch[1]))

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adam":
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class FoundHeads(TwoHeads):
    """The same, of which the layers are found."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        del self.net
        self.embed, self.early = nn.Linear(NUM_FEATURES, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.blocks, self.late = nn.ModuleList(Partly() for _ in range(3)), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(x)
        early = self.early(x)
        for block in self.blocks:
            x = block(x)
        return early, self.late(x)


class TiedHeads(TwoHeads):
    """The same, in which two of the blocks are one, which has a weight that neither place uses."""

    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer=optimizer)
        self.net[3] = self.net[1]

    def pipeline_layers(self) -> list[Any]:
        from lightning_madpipe import TiedModule

        first, tied, between, _, last = self.net
        return [first, TiedModule("tied", tied), between, TiedModule("tied", tied), last]


def without_gradients(host: Host) -> dict[str, Any]:
    """Steps that leave weights alone, with moves, several stages on a rank, clipping, and a run that goes on."""

    def fit(build: Callable[[], Any], strategy: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        module, recorder = seeded(build), cases.Recorder()
        trained(host, module, recorder, strategy={"algorithm": [0, 2, 5], **strategy}, **arguments)
        sums = {name: float(value.double().abs().sum()) for name, value in module.state_dict().items()}
        return {"rows": recorder.rows, "sums": sums}

    def resumed() -> dict[str, Any]:
        keep = ModelCheckpoint(host.folder / f"without-{host.pipelined}", filename="{epoch}", save_top_k=-1)
        trained(host, seeded(TwoHeads), keep, strategy={"algorithm": [0, 2, 5]})
        path = host.folder / f"without-{host.pipelined}" / "epoch=0.ckpt"
        return fit(TwoHeads, {"algorithm": [0, 4, 5]}, ckpt_path=str(path), max_epochs=3)

    moves = {"algorithm": [0, 4, 5], "warmup_steps": 3}
    return run_chosen(
        {
            "heads": lambda: fit(TwoHeads, {}),
            "heads, momentum": lambda: fit(lambda: TwoHeads("sgd"), {"loss": "batch"}),
            "heads, moved": lambda: fit(TwoHeads, moves),
            "heads, clipped": lambda: fit(TwoHeads, {}, gradient_clip_val=0.5),
            "heads, two pipelines": lambda: fit(TwoHeads, {"num_stages": 1, "algorithm": None}),
            "heads that are found": lambda: fit(FoundHeads, {"algorithm": None}),
            "heads, resumed": resumed,
            "tied": lambda: fit(TiedHeads, {}),
            "tied, momentum": lambda: fit(lambda: TiedHeads("sgd"), {"loss": "batch"}),
            "tied, moved": lambda: fit(TiedHeads, moves),
        }
    )


def told_of_zeros(host: Host) -> dict[str, Any]:
    """What is said where DeepSpeed's flat optimizers take zeros for no gradient."""
    record = {}
    for name, build, arguments in (
        ("flat", TwoHeads, {"strategy": {"stage": 1}}),
        ("half", FoundHeads, {"precision": "bf16-mixed", "strategy": {"algorithm": None}}),
        ("tied", TiedHeads, {"strategy": {"stage": 1}}),
        ("tied, half", TiedHeads, {"precision": "bf16-mixed"}),
        ("all used", cases.SequentialClassifier, {"strategy": {"stage": 1}}),
    ):
        if is_chosen(name):
            arguments["strategy"] = {"algorithm": [0, 2, 5], **arguments.get("strategy", {})}
            # warn_once() would say it in the first case alone
            with Said() as said, mock.patch.object(optimizers, "warn_once", lambda key, line: log_here(line)):
                trained(host, seeded(build), max_epochs=1, **arguments)
            record[name] = [line for line in said.lines if line.startswith("a step has computed no gradient of")]
    return record


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [without_gradients], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {2: [told_of_zeros], 4: []}
