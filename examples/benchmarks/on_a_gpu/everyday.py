"""What a user of Lightning does on any day, on ranks that share one GPU, against one process on a CPU.

    python examples/benchmarks/on_a_gpu/launch.py 2 nccl examples/benchmarks/on_a_gpu/everyday.py FOLDER [JOB ...]

One line for each job: how far the numbers that it saw are from those of one process. A job that raises ends the
others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_madpipe

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
ALONE = os.environ.get("ALONE") == "1"
BACKEND = os.environ.get("BACKEND", "nccl")
RANK, NUM_RANKS = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))  # which Lightning takes away
WORDS, CLASSES, LENGTH, BATCH = 50, 10, 12, 16
OF_RANKS = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Tagger(pl.LightningModule):
    """A transformer that names no layers, with a buffer of its own; its first and last weight may be one."""

    def __init__(self, width: int = 32, blocks: int = 4, tie: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width, WORDS if tie else CLASSES, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) * self.scale))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1).float(), y.flatten(), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train", loss, on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(size: int, seed: int, *, padded: bool = False) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (size, LENGTH), generator=generator)
    y = x % CLASSES
    if padded:
        lengths = torch.randint(3, LENGTH, (size,), generator=generator)
        y = torch.where(torch.arange(LENGTH)[None] < lengths[:, None], y, -100)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


def trainer(strategy: dict[str, Any] | None = None, **more: Any) -> pl.Trainer:
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False,
        "enable_checkpointing": "callbacks" in more and isinstance(more["callbacks"][0], ModelCheckpoint),
    }  # fmt: skip
    if ALONE:
        return pl.Trainer(accelerator="cpu", devices=1, **{"max_epochs": 2, **quiet, **more})
    backend = "gloo" if BACKEND == "gloo" else None
    spread = lightning_madpipe.MadPipeStrategy(
        num_micro_batches=4, process_group_backend=backend, **(strategy or {})
    )
    device = "cpu" if BACKEND == "cpu" else "gpu"
    return pl.Trainer(
        strategy=spread, accelerator=device, devices=1, num_nodes=NUM_RANKS, **{"max_epochs": 2, **quiet, **more}
    )


def seeded(**how: Any) -> Tagger:
    pl.seed_everything(0, verbose=False)
    return Tagger(**how)


def metrics(of: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in of.callback_metrics.items()}


def warm_up() -> dict[str, float]:
    """A warm-up and a move; then the model is called, validated and tested."""
    module, run = seeded(), trainer(max_epochs=3)
    run.fit(module, data(64, 1), data(32, 2))
    found = {**metrics(run), "after": float(module.loss(next(iter(data(BATCH, 9)))).detach())}
    [validated] = run.validate(module, data(32, 3), verbose=False)
    [tested] = run.test(module, data(32, 4), verbose=False)
    return {**found, "validated": validated["val"], "tested": tested["test"]}


def tied() -> dict[str, float]:
    """Planned before the first step, with padded batches, a tied weight and clipping."""
    module, run = seeded(tie=True), trainer({"warmup_epochs": 0}, gradient_clip_val=0.5)
    run.fit(module, data(64, 1, padded=True), data(32, 2, padded=True))
    weights = sum(float(weight.detach().double().abs().sum()) for weight in module.parameters())
    return {**metrics(run), "weights": weights}


def checkpoints() -> dict[str, float]:
    """A checkpoint that another run goes on from, and the weights of that, loaded without a Trainer."""
    folder = FOLDER / ("one process" if ALONE else "ranks")
    saving = ModelCheckpoint(folder, save_last=True, monitor="val")
    first = trainer(callbacks=[saving])
    first.fit(seeded(), data(64, 1), data(32, 2))
    second, module = trainer(max_epochs=4), seeded()
    second.fit(module, data(64, 1), data(32, 2), ckpt_path=folder / "last.ckpt")
    second.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    found = {**{f"first {name}": value for name, value in metrics(first).items()}, **metrics(second)}
    if RANK == 0:
        loaded = Tagger.load_from_checkpoint(folder / "weights.ckpt", map_location="cpu")
        found["loaded"] = float(loaded.loss(next(iter(data(BATCH, 9)))).detach())
    return found


def early_stopping() -> dict[str, float]:
    """Accumulated gradients, and a fit that ends by itself."""
    run = trainer(
        max_epochs=6, accumulate_grad_batches=2, callbacks=[EarlyStopping("val", patience=1, min_delta=0.05)]
    )
    run.fit(seeded(), data(64, 1), data(32, 2))
    return {**metrics(run), "epochs": run.current_epoch, "steps": run.global_step}


def in_precision(precision: str) -> Callable[[], dict[str, float]]:
    def job() -> dict[str, float]:
        module, run = seeded(), trainer(precision="32-true" if ALONE else precision)
        run.fit(module, data(64, 1), data(32, 2))
        [validated] = run.validate(module, data(32, 3), verbose=False)
        return {**metrics(run), "validated": validated["val"]}

    return job


PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed", "16-true")
JOBS: dict[str, Callable[[], dict[str, float]]] = {
    **{job.__name__: job for job in (warm_up, tied, checkpoints, early_stopping)},
    **{precision: in_precision(precision) for precision in PRECISIONS},
}


def of_one_process(names: list[str]) -> dict[str, dict[str, float]]:
    environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    environment |= {"ALONE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, str(FOLDER), *names]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    names = sys.argv[2:] or [name for name in JOBS if BACKEND != "cpu" or not name.startswith("16")]
    found = {name: JOBS[name]() for name in names}
    if ALONE:
        print(json.dumps(found))
    elif RANK == 0:
        expected = of_one_process(names)
        for name in names:
            assert found[name].keys() == expected[name].keys(), (found[name], expected[name])
            worst = max(abs(found[name][key] - value) / abs(value) for key, value in expected[name].items())
            print(f"{name}: {len(expected[name])} numbers within {worst:.1e} of one process", flush=True)


if __name__ == "__main__":
    main()
