"""LightningCLI and the two namespaces, as scripts use them; writes what each rank saw as JSON.

torchrun --nproc_per_node=2 cli_multiproc.py FOLDER
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)

import lightning.pytorch as unified  # noqa: E402
import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.cli import LightningCLI  # noqa: E402
from torch import nn  # noqa: E402

import lightning_madpipe  # noqa: E402
from tests.lightning import lightning_cases as cases  # noqa: E402
from tests.lightning.lightning_cases import refused  # noqa: E402

HAND_CUT = {"algorithm": [0, 4, 8], "num_micro_batches": 4, "bandwidth": 1e9, "latency_seconds": 0.0}
TRAINER = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class FromCommandLine(cases.Classifier):
    def __init__(self, optimizer: str = "adam") -> None:
        super().__init__(optimizer=optimizer)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return cases.loader(54, self.batch_size)

    def val_dataloader(self) -> Any:
        return cases.loader(21, self.batch_size, seed=3)


def by_command_line(strategy: Any, *arguments: str) -> dict[str, Any]:
    config = {"fit": {"trainer": {**TRAINER, "strategy": strategy}, "data": {"batch_size": 16}}}
    pl.seed_everything(0, verbose=False)
    cli = LightningCLI(
        FromCommandLine,
        Data,
        args=["fit", "--model.optimizer=sgd", f"--config={written(config['fit'])}", *arguments],
        save_config_callback=None,
        seed_everything_default=0,
    )
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items()}
    return {"metrics": metrics, "strategy": type(cli.trainer.strategy).__name__, "lr": cli.model.optimizer_name}


def written(config: dict[str, Any]) -> Path:
    path = FOLDER / f"config-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def complaint(strategy: Any) -> str:
    """What the parser says before it exits."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            by_command_line(strategy)
        except SystemExit as end:
            return f"exit {end.code}: {said.getvalue()}"
    return "accepted"


class Unified(unified.LightningModule):
    """A module of the other namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Classic(pl.LightningModule):
    """The same, of the one."""

    __init__ = Unified.__init__
    training_step = Unified.training_step
    configure_optimizers = Unified.configure_optimizers


def namespaces() -> dict[str, Any]:
    strategy = lightning_madpipe.strategy_class("lightning.pytorch")
    cut = {**HAND_CUT, "algorithm": [0, 2, 4]}
    records = {}
    for name, package, build, chosen in (
        ("unified by name", unified, Unified, "madpipe"),
        ("unified", unified, Unified, strategy(**cut)),
        ("classic", pl, Classic, lightning_madpipe.strategy_class("pytorch_lightning")(**cut)),
    ):
        pl.seed_everything(0, verbose=False)
        # super().__init__() of a shared __init__ asks for the class that it stands in.
        module = _shared(build) if build is Classic else build()
        trainer = package.Trainer(strategy=chosen, **TRAINER)
        trainer.fit(module, cases.loader(54))
        records[name] = float(trainer.callback_metrics["loss"])
    mixed = unified.Trainer(strategy="madpipe", **TRAINER)
    records["mixed"] = refused(lambda: mixed.fit(cases.Classifier(), cases.loader(16)))
    records["other strategy"] = refused(
        lambda: unified.Trainer(strategy=lightning_madpipe.strategy_class("pytorch_lightning")(), **TRAINER)
    )
    return records


def _shared(kind: Any) -> Any:
    module = kind.__new__(kind)
    pl.LightningModule.__init__(module)
    module.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
    return module


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    by_class = {"class_path": "lightning_madpipe.MadPipeStrategy", "init_args": HAND_CUT}
    results = {
        "class": by_command_line(by_class),
        "name": by_command_line("madpipe"),
        "override": by_command_line(by_class, "--trainer.strategy.init_args.stage=1"),
        "wrong name": complaint({**by_class, "init_args": {"memori": "1GB"}}),
        "wrong type": complaint({**by_class, "init_args": {"num_stages": "two"}}),
        "wrong value": refused(lambda: by_command_line({**by_class, "init_args": {"stage": 2}})),
        "namespaces": namespaces(),
    }
    (FOLDER / f"cli-{os.environ['RANK']}.json").write_text(json.dumps(results))
