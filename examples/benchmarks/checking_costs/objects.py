"""What it takes a training step to look for objects that a program holds, and at their attributes.

    torchrun --nproc_per_node=2 examples/benchmarks/checking_costs/objects.py

Two processes train a small GPT-2. Its module holds a meter; configurations of transformers are objects, too. The
times are milliseconds of a processor, of all threads of a rank, in the mean of the steps 20 to 119.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from deepspeed_partition.engine.runtime.collectives import gather_objects
from lightning_madpipe import MadPipeStrategy
from lightning_madpipe.steps import loss_signs, step_side_effects
from lightning_madpipe.steps.step_side_effects import Leftovers

FIRST, LAST = 20, 119
NUM_WORDS, NUM_TOKENS, NUM_SAMPLES = 100, 16, 8


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(
            vocab_size=NUM_WORDS, n_positions=32, n_embd=16, n_layer=4, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0,
        ))  # fmt: skip
        self.meter = Meter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.meter.update(float(len(batch)))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks:
    """Processor seconds in which objects were looked for, and looked at."""

    def __init__(self) -> None:
        self.seconds, self._is_running = 0.0, False
        for owner, name in (
            (step_side_effects, "reached_objects"),
            (loss_signs, "reached_objects"),
            (Leftovers, "_look_beside"),
            (Leftovers, "_object_places"),
            (Leftovers, "_gone_from_objects"),
        ):
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._is_running:
                return run(*arguments, **keywords)
            self._is_running, start = True, time.thread_time()
            try:
                found = run(*arguments, **keywords)
                return found if found is None or isinstance(found, dict) else [*found]
            finally:
                self.seconds += time.thread_time() - start
                self._is_running = False

        return timed


class Times(pl.Callback):
    def __init__(self, looks: Looks) -> None:
        self._looks = looks
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.process_time(), self._looks.seconds))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    times = Times(Looks())
    trainer = pl.Trainer(
        strategy=MadPipeStrategy(
            algorithm=[0, 8, 16], num_micro_batches=4, warmup_epochs=0, memory="2GB", bandwidth="1GB/s",
            latency_seconds=1e-4,
        ),
        accelerator="cpu", devices=2, max_epochs=1, logger=False, callbacks=[times], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(0, NUM_WORDS, ((LAST + 1) * NUM_SAMPLES, NUM_TOKENS))
    trainer.fit(Model(), DataLoader(tokens, batch_size=NUM_SAMPLES))  # type: ignore[arg-type]
    before, after = times.ends[FIRST - 1], times.ends[LAST]
    mine = [1e3 * (late - early) / (LAST - FIRST + 1) for early, late in zip(before, after, strict=True)]
    of_ranks = gather_objects(mine)
    if torch.distributed.get_rank() == 0:
        for rank, (step, looks) in enumerate(of_ranks):
            print(f"rank {rank}: a step takes {step:.1f} ms, looks at objects {looks:.2f} ms, {looks / step:.1%}")


if __name__ == "__main__":
    main()
