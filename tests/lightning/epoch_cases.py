"""Cases: the warm-up that every fit begins with, what it says, and what the move after it must not change."""

from __future__ import annotations

import os
from collections.abc import Callable
from csv import DictReader
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from deepspeed_partition import Chain, Plan
from deepspeed_partition.engine.runtime import environment
from tests.choice import is_chosen, run_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning import map_cases
from tests.lightning.loop_cases import Stream

# What a run says


def told(run: Callable[[], Any]) -> list[str]:
    """What this rank says of planning while ``run`` goes on."""
    with patch.object(environment, "logger") as logger:
        run()
    return [str(call.args[1]) for call in logger.log.call_args_list]


def sentences(host: cases.Host) -> dict[str, Any]:
    """Four batches per epoch."""
    stream = DataLoader(Stream(54), 16)

    def of(
        data: Any = None, strategy: dict[str, Any] | None = None, *callbacks: Callback, **arguments: Any
    ) -> Any:
        strategy = {"algorithm": [0, 2, 8], **(strategy or {})}
        trainer = host.trainer(*callbacks, strategy=strategy, **arguments)
        said = told(lambda: trainer.fit(cases.seeded(), cases.loader(54) if data is None else data))
        return {"said": said, "has plan": trainer.strategy.plan is not None}

    path = str(map_cases.plan_file(host, "0-1-0"))

    def off() -> Any:
        with patch.dict(os.environ, MADPIPE="0"):
            return of()

    return run_chosen(
        {
            "default": of,
            "one epoch": lambda: of(max_epochs=1),
            "none": lambda: of(None, {"warmup_epochs": 0}),
            "steps given": lambda: of(None, {"warmup_steps": 3}),
            "no steps given": lambda: of(None, {"warmup_steps": 0}),
            "four steps": lambda: of(max_epochs=-1, max_steps=4),
            "five steps": lambda: of(max_epochs=-1, max_steps=5),
            "more steps than the run has": lambda: of(None, {"warmup_steps": 8}),
            "fast": lambda: of(fast_dev_run=True),
            "stream": lambda: of(stream),
            "stream of one epoch": lambda: of(stream, max_epochs=1),
            "stream without end": lambda: of(stream, max_epochs=-1, max_steps=6),
            "ended early": lambda: of(None, None, cases.Ends()),
            "plan": lambda: of(None, {"plan": path}),
            "boundaries": lambda: of(None, {"config": {"pipeline": {"partition_method": [0, 2, 8]}}}),
            "off": off,
        }
    )


def kept(host: cases.Host) -> dict[str, Any]:
    """The plan beside the logs, and the chain; where they cannot be written the run goes on."""
    records = {}
    for name in ("written", "in the way"):
        folder = host.folder / "kept" / name
        trainer = host.trainer(logger=CSVLogger(folder, version=0), strategy={"algorithm": [0, 2, 8]})
        path = Path(trainer.log_dir) / "madpipe-plan.json"
        if name == "in the way" and os.environ["RANK"] == "0":
            path.mkdir(parents=True)
        said = told(lambda trainer=trainer: trainer.fit(cases.seeded(), cases.loader(54)))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            # Not ``trainer.log_dir``, which is a collective: the other rank does not come to it here.
            rows = list(DictReader(path.with_name("metrics.csv").open()))
            planned = {row["madpipe/planned_step_seconds"] for row in rows} - {""}
            assert [*map(float, planned)] == [trainer.strategy.plan.step_seconds], planned
        plan, whole = trainer.strategy.plan, path.is_file()
        records[name] = {
            "said": said,
            "same": whole and Plan.load(path) == plan,
            "chain": whole and Chain.load(path.with_suffix(".chain.json")).digest() == plan.chain.digest,
            "steps": trainer.global_step,
        }
    return records


# Moves


class Dropping(nn.Module):
    """Dropout whose random numbers are the layer's own, by the count in its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.count += 1
        draws = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(self.count)))
        return x * (draws > 0.2).to(x) / 0.8


class Norm(nn.BatchNorm1d):
    """With fp32 statistics in any precision, as DeepSpeed keeps them."""

    def __init__(self) -> None:
        super().__init__(cases.WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x)


class Signs(torch.optim.Optimizer):
    """One that nobody knows, with a state of its own per parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2e-3})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                    mean.mul_(0.9).add_(weight.grad)
                    weight -= group["lr"] * mean.sign()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Signs": Signs,
}


class Everything(pl.LightningModule):
    """Ties, frozen weights, running statistics, dropout, two groups, a schedule."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.ends = nn.Linear(cases.NUM_FEATURES, cases.WIDTH, bias=False)
        self.body = nn.Sequential(
            cases.Block(), Norm(), Dropping(), cases.Block().requires_grad_(False), cases.Block(), Norm(),
            cases.Block(),
        )  # fmt: skip

    def pipeline_layers(self) -> list[Any]:
        from lightning_madpipe import TiedModule

        def back(ends: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            return x @ ends.weight

        return [TiedModule("ends", self.ends), *self.body, TiedModule("ends", self.ends, forward_fn=back)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.ends(x)) @ self.ends.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]).float(), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        trainable = [weight for weight in self.parameters() if weight.requires_grad]
        groups = [{"params": trainable[::2]}, {"params": trainable[1::2], "weight_decay": 0.01}]
        optimizer = OPTIMIZERS[self.optimizer_name](groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Moves(Callback):
    """Notes the cut of each epoch; at the end of the second one and the next ones layers move to other plans."""

    def __init__(self, plans: list[Any], first: int = 1) -> None:
        self.plans = dict(enumerate(plans, start=first))
        self.cuts: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.cuts.append([trainer.strategy.pipeline.parts, trainer.strategy.pipeline.device_of_stage])
        if trainer.current_epoch in self.plans:
            trainer.strategy.deepspeed_engine.recut(self.plans[trainer.current_epoch])


RUNS: dict[str, dict[str, Any]] = {
    "AdamW": {"gradient_clip_val": 0.5, "max_epochs": 4},
    "momentum": {"strategy": {"stage": 1}, "precision": "bf16-mixed"},
    "Signs": {"strategy": {"stage": 1}, "accumulate_grad_batches": 2},
}


def moved(host: cases.Host) -> dict[str, Any]:
    """A run that never moves, and one that does after its first epoch; with AdamW also to 0-1-0 and back."""
    never, warmed_up = {"algorithm": [0, 5, 9], "warmup_epochs": 0}, {"algorithm": [0, 2, 9]}
    pairs: dict[str, Any] = {}
    for optimizer, arguments in RUNS.items():
        if not is_chosen(optimizer):
            continue
        pair = []
        for how in (never, warmed_up):
            moves = Moves([plan_of_nine(host), [0, 6, 9]] if how is warmed_up and optimizer == "AdamW" else [])
            recorder, rates = cases.Recorder(), cases.Rates()
            strategy = {**arguments.get("strategy", {}), **how}
            trainer = host.trainer(recorder, rates, moves, **{**arguments, "strategy": strategy})
            module = cases.seeded(lambda name=optimizer: Everything(name))
            trainer.fit(module, cases.loader(56, 14), cases.loader(28))
            pair.append(
                {**cases.fit_record(trainer, None, recorder.rows), "rates": rates.rates, "cuts": moves.cuts}
            )
        pairs[optimizer] = pair
    return pairs


def plan_of_nine(host: cases.Host) -> str:
    """Of nine layers, with the first and the last stage on rank 0."""
    plans, cuts, devices = map_cases.plans, [0, 3, 6, 9], (0, 1, 0)
    orders = plans.depth_first(devices, map_cases.NUM_MICRO_BATCHES, 2)
    path = host.folder / "nine.json"
    plans.plan_of(plans.chain_of(9), plans.platform_of(2), cuts, devices, orders=orders).save(path)
    return str(path)


CUT = {"algorithm": [0, 2, 8]}


def replicated_and_moved(host: cases.Host) -> dict[str, Any]:
    """Two pipelines, which move together."""
    moves = [Moves([])] if host.pipelined else []
    strategy = {"algorithm": [0, 2, 8], "stage": 1}
    record = cases.replicated(host, callbacks=moves, strategy=strategy, gradient_clip_val=0.1)
    assert all(each.cuts == [[[0, 3, 8], [0, 1]], [[0, 2, 8], [0, 1]]] for each in moves)
    return record


class Experienced(cases.Classifier):
    """Goes on with the state that an optimizer of the whole model had in a run before."""

    def configure_optimizers(self) -> Any:
        optimizer, before = (torch.optim.AdamW(self.parameters(), lr=1e-2) for _ in range(2))
        state = before.state_dict()
        state["state"] = {
            number: {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full(weight.shape, number / 10),
                "exp_avg_sq": torch.full(weight.shape, 1 + number / 10),
            }
            for number, weight in enumerate(self.parameters())
        }
        optimizer.load_state_dict(state)
        return optimizer


class KeepsState(Callback):
    """Keeps the state of the optimizer in the first epoch, and loads it in the second one."""

    refusal = ""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        optimizer = trainer.optimizers[0]
        if trainer.current_epoch == 0:
            self.kept = optimizer.state_dict()
        else:
            self.refusal = cases.refused(lambda: optimizer.load_state_dict(self.kept))


def states_of_optimizers(host: cases.Host) -> dict[str, Any]:
    """Loaded into an optimizer before fit, with ZeRO and without; and kept over a move of layers."""
    record: dict[str, Any] = {}
    for stage in (0, 1):
        recorder, keeps = cases.Recorder(), KeepsState()
        trainer = host.trainer(recorder, *([keeps] if host.pipelined else []), strategy={**CUT, "stage": stage})
        trainer.fit(cases.seeded(Experienced), cases.loader(32))
        record[f"stage {stage}"] = recorder.rows
        if host.pipelined:
            rank = trainer.global_rank
            assert f"where rank {rank} had layers" in keeps.refusal, keeps.refusal
            assert "fit(ckpt_path=path)" in keeps.refusal
    return record


SAME_AS_SINGLE = {2: [states_of_optimizers], 4: [replicated_and_moved]}
ONLY_PIPELINE = {2: [sentences, kept, moved], 4: []}
