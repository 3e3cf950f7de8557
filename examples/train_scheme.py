"""Training from what ``madpipe schemes -o`` wrote: a plan, or a configuration of data parallelism or ZeRO.

    madpipe schemes chain.json --devices 2 --memory 1GB --bandwidth 1GB/s --micro-batches 4 -o scheme.json
    torchrun --nproc_per_node=2 examples/train_scheme.py scheme.json [--host lightning]

A plan runs on our engine, a configuration on DeepSpeed as it is; with ``--host lightning`` a ``Trainer`` gets our
strategy with the plan, or what the configuration says under ``madpipe.lightning``. All of them train the same
model on the same batches, so all print the same losses. ``--write-chain FILE`` writes the chain of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import lightning_madpipe
from deepspeed_partition import Chain, LayerProfile, Plan
from deepspeed_partition.engine import PipelineModule, initialize

WIDTH, CLASSES, BLOCKS, MICRO_BATCH = 32, 4, 6, 2
OPTIMIZER = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}


class Block(nn.Module):
    """A hidden layer; ``recomputes``: its forward runs again in the backward."""

    def __init__(self, width_in: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.linear, self.recomputes = nn.Linear(width_in, WIDTH), recomputes

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recomputes else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(*, recomputes: bool = False) -> list[nn.Module]:
    """Return the layers, the same in every process."""
    torch.manual_seed(1)
    blocks = [Block(8 if index == 0 else WIDTH, recomputes=recomputes) for index in range(BLOCKS)]
    return [*blocks, nn.Linear(WIDTH, CLASSES)]


def chain_of() -> Chain:
    """Return the chain of the model, with times by hand."""
    profiles = []
    for index, layer in enumerate(layers()):
        numbers = sum(each.numel() for each in layer.parameters())
        last = index == BLOCKS
        profiles.append(
            LayerProfile(
                name=type(layer).__name__, forward_seconds=1e-3, backward_seconds=2e-3, weight_bytes=4 * numbers,
                output_bytes=4 * MICRO_BATCH * (CLASSES if last else WIDTH), num_trainable_parameters=numbers,
            )
        )  # fmt: skip
    return Chain(
        name="example", input_bytes=4 * MICRO_BATCH * 8, layers=tuple(profiles), micro_batch_size=MICRO_BATCH
    )


class Batches(Dataset):
    """Samples of all steps: of each micro-batch of a step one rank after the other has some."""

    def __init__(self, num_micro_batches: int, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(2)
        shape = num_steps * num_micro_batches * MICRO_BATCH
        self.inputs = torch.randn(shape, 8, generator=generator)
        self.labels = torch.randint(CLASSES, (shape,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]

    def micro_batches(self, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the micro-batches of one of several ranks, which take turns."""
        for first in range(rank * MICRO_BATCH, len(self), num_ranks * MICRO_BATCH):
            yield self.inputs[first : first + MICRO_BATCH], self.labels[first : first + MICRO_BATCH]


class Module(pl.LightningModule):
    """The model under Lightning."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers(recomputes=recomputes))

    def pipeline_layers(self) -> list[nn.Module]:
        return list(self.model)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=OPTIMIZER["params"]["lr"])


class Losses(pl.Callback):
    """Losses of all batches."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def by_plan(path: Path, num_steps: int) -> list[float]:
    """Train by a plan on our engine."""
    plan = Plan.load(path)
    assert plan.num_micro_batches is not None
    module = PipelineModule(
        layers(), num_stages=plan.platform.num_devices, plan=str(path), loss_fn=cross_entropy, seed_layers=False
    )
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": plan.num_micro_batches,
        "optimizer": OPTIMIZER, "zero_optimization": {"stage": plan.zero_stage or 0}, "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }  # fmt: skip
    engine, *_ = initialize(model=module, config=config, model_parameters=list(module.parameters()))
    grid = engine.grid
    data = Batches(plan.num_micro_batches * grid.data_parallel_size, num_steps)
    own = data.micro_batches(grid.data_parallel_id, grid.data_parallel_size)
    losses = [float(engine.train_batch(own)) for _ in range(num_steps)]
    engine.destroy()
    return losses


def by_configuration(config: dict[str, Any], num_steps: int) -> list[float]:
    """Train by a configuration on DeepSpeed as it is."""
    model = nn.Sequential(*layers(recomputes=config["madpipe"]["activation_checkpointing"]))
    own = {"optimizer": OPTIMIZER, "gradient_clipping": 0.0, "steps_per_print": 10**9}
    engine, *_ = deepspeed.initialize(model=model, config=config | own, model_parameters=list(model.parameters()))
    count, size = engine.gradient_accumulation_steps(), dist.get_world_size()
    data = Batches(count * size, num_steps).micro_batches(dist.get_rank(), size)
    losses = []
    for _ in range(num_steps):
        mean = torch.zeros(())
        for inputs, labels in islice(data, count):
            loss = cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            mean += loss.detach() / (count * size)
        dist.all_reduce(mean)
        losses.append(float(mean))
    engine.destroy()
    return losses


def by_lightning(path: Path, data: dict[str, Any], num_steps: int) -> list[float]:
    """Train under Lightning: our strategy with the plan, or what the configuration says."""
    config, rank, size = data.get("madpipe", {}), dist.get_rank(), dist.get_world_size()
    if config:
        trainer = dict(config["lightning"])
        parts, batch_size = trainer["accumulate_grad_batches"], MICRO_BATCH
        count = parts * size
    else:
        plan = Plan.load(path)
        assert plan.num_micro_batches is not None
        strategy = lightning_madpipe.MadPipeStrategy(
            num_stages=plan.platform.num_devices, num_micro_batches=plan.num_micro_batches, plan=path
        )
        trainer = {"strategy": strategy, "devices": size}
        size //= plan.platform.num_devices  # pipelines, of which each has data of its own
        parts, batch_size = 1, MICRO_BATCH * plan.num_micro_batches
        count, rank = plan.num_micro_batches * size, rank % size
    batches = Batches(count, num_steps)
    # Lightning's own sampler would shuffle.
    sampler = DistributedSampler(batches, num_replicas=size, rank=rank, shuffle=False)
    losses = Losses()
    pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, callbacks=[losses], **trainer,
    ).fit(
        Module(recomputes=bool(config.get("activation_checkpointing"))),
        DataLoader(batches, batch_size=batch_size, sampler=sampler),
    )  # fmt: skip
    # Lightning divides the loss of a batch by those that one step accumulates.
    sums = torch.tensor(losses.found).view(num_steps, parts).sum(1)
    dist.all_reduce(sums)
    return (sums / dist.get_world_size()).tolist()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="what madpipe schemes wrote")
    parser.add_argument("--host", choices=["deepspeed", "lightning"], default="deepspeed")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--write-chain", type=Path, help="write the chain of the model there, and end")
    arguments = parser.parse_args()
    if arguments.write_chain is not None:
        chain_of().save(arguments.write_chain)
        return
    deepspeed.init_distributed()
    found = {}
    for path in arguments.files:
        data = json.loads(path.read_text())
        if arguments.host == "lightning":
            found[path.name] = by_lightning(path, data, arguments.steps)
        elif "madpipe" in data:
            found[path.name] = by_configuration(data, arguments.steps)
        else:
            found[path.name] = by_plan(path, arguments.steps)
    if dist.get_rank() == 0:
        for name, losses in found.items():
            print(f"{name}: losses {' '.join(f'{each:.6f}' for each in losses)}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
