"""Cases: a pipeline that never drains, against the same delayed updates in one process."""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deepspeed_partition import Plan
from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.choice import run_chosen
from tests.engine.asynchronous_cases import MAPS, MODES, OPTIMIZERS, Delayed, plan_for
from tests.engine.delayed_updates import flush
from tests.engine.pipelines import Whole, loss_fn, mlp
from tests.engine.running import batches, same
from tests.lightning import lightning_cases as cases
from tests.lightning.after_fit_cases import Said

Batch = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""The micro-batches of a batch."""


class Model(pl.LightningModule):
    """The layers of the engine's tests, with the weights that one process begins with."""

    def __init__(self, whole: Whole, optimizer: str, *, decays: bool = False) -> None:
        super().__init__()
        self.net = nn.ModuleDict({name: part for name, part in whole.named_children() if name != "tied_modules"})
        self.order = list(whole.functions)
        self.make_optimizer, self.decays = OPTIMIZERS[optimizer], decays
        self.steps_of_hooks: list[int] = []

    def pipeline_layers(self) -> list[Any]:
        return self.order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.order:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = loss_fn(self(batch[0]), batch[1])
        self.log("train", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", loss_fn(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self)
        if not self.decays:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decaying(optimizer), "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.steps_of_hooks.append(self.global_step)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)


class Losses(Callback):
    """The loss of each batch, and which batches the pipeline has come to rest behind."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rests: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        engine = trainer.strategy.deepspeed_engine
        come = engine.come_to_rest

        def come_to_rest() -> None:
            if not engine.is_at_rest:
                self.rests.append(len(self.losses))
            come()

        engine.come_to_rest = come_to_rest

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def loader(data: Sequence[Batch]) -> DataLoader:
    inputs = torch.cat([each for batch in data for each, _ in batch])
    labels = torch.cat([each for batch in data for _, each in batch])
    return DataLoader(TensorDataset(inputs, labels), batch_size=sum(len(each) for each, _ in data[0]))


def saved(host: cases.Host, plan: Plan) -> str:
    path = host.folder / f"{plan.weight_versions} {plan.micro_batches_per_update} on {len(plan.stages)}.json"
    plan.save(path)  # alike on all ranks
    return str(path)


def started(
    plan: Plan, optimizer: str, *, decays: bool = False, clip: float = 0.0, kind: type[Model] = Model,
    dtype: torch.dtype = torch.float32,
) -> tuple[Delayed, Model]:  # fmt: skip
    torch.manual_seed(3)
    expected = Delayed(
        OPTIMIZERS[optimizer], lambda stage, number: 0, plan, clip=clip,
        make_scheduler=decaying if decays else None, dtype=dtype,
    )  # fmt: skip
    model = kind(Whole(mlp()), optimizer, decays=decays)
    weights = {f"net.{name}": each for name, each in expected.weights.items()}
    model.load_state_dict(weights, strict=False)  # of which the buffers begin alike
    return expected, model


def versions_of(trainer: pl.Trainer) -> Callable[[int, int], int]:
    """The versions of the weights that stages use, by the lists that the engine has run."""
    engine = trainer.strategy.deepspeed_engine
    if engine.weight_versions == "flush":
        return flush(engine.micro_batches)
    return functools.partial(engine._endless.program.version, engine.weight_versions)


def alone(expected: Delayed, data: Sequence[Batch], rests: Sequence[int]) -> list[float]:
    """Train in one process, with a rest behind some batches."""
    losses = []
    for number, batch in enumerate(data):
        if number in rests:
            expected.rest()
        losses.append(expected.train(batch))
    return losses


def same_weights(model: Model, expected: Delayed) -> None:
    found = model.state_dict()
    for name, weight in expected.weights.items():
        assert torch.allclose(found[f"net.{name}"], weight, rtol=1e-5, atol=1e-6), name


def fits(host: cases.Host, mode: str, turn: int, optimizer: str, *, decays: bool, clip: float) -> dict[str, Any]:
    """Two epochs of six batches, with validation behind the fourth and the last one of each."""
    data, given = batches(6), batches(1)
    maps = list(MAPS[host.num_processes].items())
    devices, cuts = maps[turn % len(maps)]
    plan = plan_for(devices, cuts, mode)
    expected, model = started(plan, optimizer, decays=decays, clip=clip)
    watch = Losses()
    name = f"{mode} {turn}"
    logger = CSVLogger(host.folder / "asynchronous", name=name, version=0)
    trainer = host.trainer(
        watch, strategy={"plan": saved(host, plan), "loss": "mean"}, val_check_interval=4, logger=logger,
        gradient_clip_val=clip or None,
    )  # fmt: skip
    with Said() as said:
        trainer.fit(model, loader(data), loader(given))
    told = [line for line in said.lines if "so forwards do not run ahead of it: an update is to take" in line]
    assert len(told) == trainer.is_global_zero, said.lines
    assert watch.rests == [4, 6, 10, 12], watch.rests
    expected.version = versions_of(trainer)
    same(watch.losses, alone(expected, [*data, *data], watch.rests))
    same_weights(model, expected)
    assert model.steps_of_hooks == list(range(12)) and trainer.global_step == 12, model.steps_of_hooks
    if trainer.is_global_zero:
        with open(logger.experiment.metrics_file_path) as file:
            rows = list(csv.DictReader(file))
        check_figures([row for row in rows if row["madpipe/step_seconds"]], len(cuts) - 1)
        logged = {int(row["step"]): float(row["train"]) for row in rows if row.get("train")}
        same([logged[step] for step in range(12)], watch.losses)
    validated = float(loss_fn(expected.model(given[0][0][0]), given[0][0][1]))
    assert trainer.callback_metrics["validated"] > 0 and validated > 0
    return {"delay": max(step - expected.version(0, 4 * step) for step in range(4))}


def check_figures(rows: Sequence[dict[str, str]], num_stages: int) -> None:
    """Of batches between two rests, the pipeline full: never of the first two, nor across validation."""
    steps = [int(row["step"]) for row in rows]
    assert steps and set(steps) <= {2, 3, 8, 9}, steps
    for row in rows:
        assert float(row["madpipe/planned_step_seconds"]) > 0 and float(row["madpipe/step_seconds"]) > 0
        assert 0 <= float(row["madpipe/bubble_share"]) < 1
        for stage in range(num_stages):
            assert float(row[f"madpipe/stage_{stage}_seconds"]) > 0
            held, planned = (
                row[f"madpipe/stage_{stage}_{name}"] for name in ("versions_held", "planned_versions")
            )
            assert 1 <= float(held) <= float(planned)


def never_drains(host: cases.Host) -> dict[str, Any]:
    """Losses, weights, logs and hooks of each mode, with a schedule, clipping and validation."""
    runs = {}
    for turn, (mode, optimizer) in enumerate(itertools.product(MODES, ("momentum", "adam"))):
        clip = 0.05 if mode == "2bw" else 0.0
        runs[f"{mode}, {optimizer}"] = functools.partial(
            fits, host, mode, turn, optimizer, decays=bool(turn % 2), clip=clip
        )
    return run_chosen(runs)


def short(
    host: cases.Host,
    mode: str,
    data: Sequence[Batch],
    *callbacks: Callback,
    kind: type[Model] = Model,
    **more: Any,
) -> tuple[Delayed, Model, Losses, pl.Trainer]:
    """A fit of one epoch on two stages, or of more, and what it is to equal."""
    devices, cuts = next(iter(MAPS[host.num_processes].items()))
    plan = plan_for(devices, cuts, mode)
    expected, model = started(plan, "momentum", kind=kind)
    watch = Losses()
    strategy = {"plan": saved(host, plan), "loss": "mean", **more.pop("strategy", {})}
    path = more.pop("ckpt_path", None)
    trainer = host.trainer(watch, *callbacks, **{"strategy": strategy, "max_epochs": 1, **more})
    trainer.fit(model, loader(data), ckpt_path=path)
    expected.version = versions_of(trainer)
    return expected, model, watch, trainer


def resumes(host: cases.Host, mode: str, other: str) -> dict[str, Any]:
    """Checkpoints while batches are in flight and at the end of an epoch, of which a run in a mode goes on."""
    data, folder = batches(5), host.folder / f"checkpoints of {mode} for {other}"
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    end = ModelCheckpoint(folder, filename="end", save_on_train_epoch_end=True)
    expected, model, watch, _ = short(host, mode, data, keep, end)
    assert watch.rests == [2, 4, 5]
    same(watch.losses, alone(expected, data, watch.rests))
    same_weights(model, expected)
    again, model, watch, trainer = short(
        host, other, data, max_epochs=2, ckpt_path=str(folder / "end.ckpt"), strategy={"loss": "mean"}
    )
    expected.rest()  # as an unbroken run does for the checkpoint
    expected.version = again.version
    assert trainer.global_step == 10 and watch.rests == ([] if other == "flush" else [5])
    same(watch.losses, alone(expected, data, watch.rests))
    same_weights(model, expected)
    return {}


def rests_for_checkpoints(host: cases.Host) -> dict[str, Any]:
    """A run in each mode, and one that goes on in the same mode or another."""
    pairs = itertools.product(MODES, (*MODES, "flush"))
    return run_chosen(
        {f"{mode} to {other}": functools.partial(resumes, host, mode, other) for mode, other in pairs}
    )


class Reads(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        float(next(module.parameters()).detach().sum())


class ReadsState(Callback):
    """Looks at, or clears, what the optimizer keeps; no parameter is needed for it."""

    def __init__(self, *, clears: bool = False) -> None:
        self.clears = clears

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            for value in state.values():
                value.zero_() if self.clears else float(value.norm())


class Writes(Callback):
    """Bounds weights."""

    def __init__(self, *, rests: bool = False) -> None:
        self.rests = rests

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.rests:
            trainer.strategy.come_to_rest()
        with torch.no_grad():
            for weight in module.parameters():
                weight.clamp_(-0.2, 0.2)


class Meets(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        dist.all_reduce(torch.ones(()))


class Clips(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)


class Slows(Callback):
    """Halves the rate from a step on, where the gradients of the step are there or where its batch begins."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.slow)

    def slow(self, trainer: Any, module: Any, *_: Any) -> None:
        if module.global_step == 2:
            for group in trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5


class SlowsBehind(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: self.slow(optimizer))

    def slow(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5


class Harmless(Callback):
    """Clears gradients, halves those of a step, logs, and counts the steps of the optimizer."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.optimizers[0].register_step_post_hook(lambda *_: self.count())

    def count(self) -> None:
        self.num_steps += 1

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for weight in module.parameters():
            weight.grad.mul_(0.5)
        module.log("hooked", float(module.global_step), on_step=True, on_epoch=True)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.zero_grad()
        trainer.optimizers[0].zero_grad()


def hooks_in_flight(host: cases.Host) -> dict[str, Any]:
    """What hooks may do with weights, gradients and other ranks while batches are in flight."""
    data = batches(4)
    with Said() as said:
        expected, model, watch, _ = short(host, "stashing", data, Reads(), ReadsState())
    lines = [line for theirs in gather_objects(said.lines) for line in theirs]
    told = [line for line in lines if "Reads reads weights" in line]
    assert len(told) == 1 and "strategy.come_to_rest() before" in told[0], lines
    told = [line for line in lines if "ReadsState reads the optimizer's state (momentum_buffer)" in line]
    assert len(told) == 1 and "strategy.come_to_rest() before" in told[0], lines
    same(watch.losses, alone(expected, data, watch.rests))
    refusals = {}
    for mode, hook in (
        ("stashing", Writes()), ("stashing", ReadsState(clears=True)), ("2bw", Meets()),
        ("vertical-sync", Clips()), ("stashing", Slows("on_before_optimizer_step")),
        ("vertical-sync", SlowsBehind()),
    ):  # fmt: skip
        with pytest.raises(Exception, match="weight_versions") as refusal:
            short(host, mode, data, hook)
        refusals[type(hook).__name__] = str(refusal.value)
    expected, model, watch, _ = short(host, "stashing", data, Writes(rests=True))
    assert watch.rests == [1, 2, 3, 4]
    for batch in data:
        expected.rest()
        expected.train(batch)
        with torch.no_grad():
            for weight in expected.model.parameters():
                weight.clamp_(-0.2, 0.2)
    same_weights(model, expected)
    expected, model, watch, _ = short(host, "stashing", data, Slows("on_train_batch_start"))
    found = []
    for number, batch in enumerate(data):
        for group in expected.optimizer.param_groups if number == 2 else ():
            group["lr"] *= 0.5
        found.append(expected.train(batch))
    same(watch.losses, found)
    same_weights(model, expected)
    harmless = Harmless()
    expected, model, watch, trainer = short(host, "2bw", data, harmless)
    for group in expected.optimizer.param_groups:  # which is linear in the gradients
        group["lr"] *= 0.5
    same(watch.losses, alone(expected, data, watch.rests))
    same_weights(model, expected)
    assert harmless.num_steps == 4 and trainer.callback_metrics["hooked_epoch"] == pytest.approx(1.5)
    return {"refusals": refusals}


class Statistics(Model):
    """A loss that is of all samples of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0]).std(0).mean()


class Later(Model):
    """A loss with a term that begins."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        loss = loss_fn(outputs, batch[1])
        return loss + 0.0 * outputs.abs().mean() if batch_idx == 4 else loss


def losses_in_flight(host: cases.Host) -> dict[str, Any]:
    """Losses that are tried on the way, that show a sign on the way, or that a drain would be needed for."""
    data = batches(6)
    auto = {"strategy": {"loss": "auto"}}
    for kind, rests in ((Model, [1, 3, 6]), (Later, [1, 3, 5, 6])):
        expected, model, watch, _ = short(host, "2bw", data, kind=kind, **auto)
        assert watch.rests == rests, watch.rests
        same(watch.losses, alone(expected, data, watch.rests))
        same_weights(model, expected)
    words_in_turns(host)
    with pytest.raises(Exception, match="no mean over samples") as refusal:
        short(host, "2bw", data, kind=Statistics, **auto)
    # The last batch has two samples.
    few = [*data[:3], [(inputs[:1], labels[:1]) for inputs, labels in data[3][:2]]]
    expected, model, watch, _ = short(host, "stashing", few)
    assert watch.rests == [3], watch.rests
    same(watch.losses, alone(expected, few, watch.rests))
    same_weights(model, expected)
    return {"refusal": str(refusal.value)}


def words_in_turns(host: cases.Host) -> None:
    """Integers of many values, so that each batch has some that no other one had: few are tried."""
    data = batches(14)
    expected, model = started(plan := plan_for(*next(iter(MAPS[2].items())), "stashing"), "momentum")
    words = torch.randint(0, 60, (sum(len(each) for each, _ in data[0]) * len(data), 8))
    plain = loader(data)
    samples = TensorDataset(*plain.dataset.tensors, words)
    watch = Losses()
    trainer = host.trainer(watch, strategy={"plan": saved(host, plan), "loss": "auto"}, max_epochs=2)
    with Said() as said:
        trainer.fit(model, DataLoader(samples, batch_size=plain.batch_size))
    # At steps 2, 4, 8 and 16, the ends of both epochs, four times beside these, and at intervals that double.
    assert {1, 3, 7, 14, 15, 28} < set(watch.rests) and len(watch.rests) <= 6 + 4 + 3, watch.rests
    told = [line for line in said.lines if "the loss has been tried in 4 of" in line]
    assert len(told) == trainer.is_global_zero, said.lines
    expected.version = versions_of(trainer)
    same(watch.losses, alone(expected, [*data, *data], watch.rests))


class Failing(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ArithmeticError("met in the step")
        return loss


class Trainers(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer


def failures_in_flight(host: cases.Host) -> dict[str, Any]:
    """An error in a step ends all ranks, without a checkpoint; a run with a warm-up comes behind it."""
    data = batches(4)
    of = Trainers()
    with Said() as said, pytest.raises(ArithmeticError, match="met in the step"):
        short(host, "stashing", data, of, kind=Failing)
    lost = [line for line in said.lines if "their updates are lost" in line]
    assert len(lost) == of.trainer.is_global_zero, said.lines
    with pytest.raises(Exception, match="no checkpoint is written after this exception"):
        of.trainer.save_checkpoint(host.folder / "behind an error.ckpt")
    torch.manual_seed(3)
    model, watch = Model(Whole(mlp()), "momentum"), Losses()
    trainer = host.trainer(
        watch, strategy={"weight_versions": "2bw", "warmup_steps": 2, "loss": "mean"}, max_epochs=1
    )
    trainer.fit(model, loader([*data, *data]))
    assert trainer.strategy.plan.weight_versions == "2bw" and watch.rests == [8]
    expected, _ = started(trainer.strategy.plan, "momentum")
    expected.version = versions_of(trainer)
    same(watch.losses, alone(expected, [*data, *data], [0, 1, 2]))
    same_weights(model, expected)
    return {}


def in_other_forms(host: cases.Host) -> dict[str, Any]:
    """ZeRO-1, windows of two batches, bf16."""

    def zero() -> dict[str, Any]:
        data = batches(4)
        expected, model, watch, _ = short(host, "stashing", data, strategy={"stage": 1})
        same(watch.losses, alone(expected, data, watch.rests))
        same_weights(model, expected)
        return {}

    def windows() -> dict[str, Any]:
        data = batches(6)
        expected, model = started(plan := plan_of("2bw", 8), "momentum")
        trainer = host.trainer(
            strategy={"plan": saved(host, plan), "loss": "mean"}, max_epochs=1, accumulate_grad_batches=2
        )
        trainer.fit(model, loader(data))
        expected.version = versions_of(trainer)
        alone(expected, [[*data[first], *data[first + 1]] for first in (0, 2, 4)], [])
        same_weights(model, expected)
        assert model.steps_of_hooks == [0, 1, 2]
        return {}

    def bf16() -> dict[str, Any]:
        plan, watch = plan_of("2bw", 4), Losses()
        expected, model = started(plan, "momentum", dtype=torch.bfloat16)
        strategy = {"plan": saved(host, plan), "loss": "mean"}
        trainer = host.trainer(watch, strategy=strategy, max_epochs=1, precision="bf16-mixed")
        trainer.fit(model, loader(batches(4)))
        expected.version = versions_of(trainer)
        same(watch.losses, alone(expected, batches(4, dtype=torch.bfloat16), watch.rests))
        return {}

    def plan_of(mode: str, per_update: int) -> Plan:
        devices, cuts = next(iter(MAPS[host.num_processes].items()))
        return plan_for(devices, cuts, mode, per_update)

    return run_chosen({"zero 1": zero, "windows": windows, "bf16": bf16})


def four_ranks_in_flight(host: cases.Host) -> dict[str, Any]:
    """Four stages, and two pipelines of two, which read the same data."""
    data = batches(4)
    for num_stages in (4, 2):
        devices, cuts = next(iter(MAPS[num_stages].items()))
        for mode, clip in (("stashing", 0.0), ("2bw", 0.05)):
            plan = plan_for(devices, cuts, mode)
            expected, model = started(plan, "momentum", clip=clip)
            watch, strategy = Losses(), {"plan": saved(host, plan), "loss": "mean", "num_stages": num_stages}
            trainer = host.trainer(watch, strategy=strategy, max_epochs=1, gradient_clip_val=clip or None)
            trainer.fit(model, loader(data))
            expected.version = versions_of(trainer)
            same(watch.losses, alone(expected, data, watch.rests))
            same_weights(model, expected)
    return {}


class Weight:
    """What Lightning weights a batch by in a mean of epochs, where it stands before the tensors of the batch."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.zeros(self.weight)


class Weighed(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[1:], batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("hooked", float(self.global_step), on_step=False, on_epoch=True)


WEIGHTS = [1, 9, 3, 2, 7]
"""Of the batches of an epoch."""


class WeighedBatches(DataLoader):
    def __iter__(self) -> Iterator[Any]:
        for weight, batch in zip(WEIGHTS, super().__iter__(), strict=True):
            yield [Weight(weight), *batch]


class Rests(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            trainer.strategy.come_to_rest()


def weights_of_logs_in_flight(host: cases.Host) -> dict[str, Any]:
    """What a hook logs of a step that is made during a later batch weighs as much as the step's own batch.

    It weighed as much as the later one, and in a rest as much as a batch has samples.
    """
    expected = sum(step * weight for step, weight in enumerate(WEIGHTS)) / sum(WEIGHTS)
    data, found = loader(batches(len(WEIGHTS))), {}
    for mode in MODES:
        for callbacks in ([], [Rests()]):
            devices, cuts = next(iter(MAPS[host.num_processes].items()))
            plan = plan_for(devices, cuts, mode)
            _, model = started(plan, "momentum", kind=Weighed)
            strategy = {"plan": saved(host, plan), "loss": "mean"}
            trainer = host.trainer(*callbacks, strategy=strategy, max_epochs=1)
            trainer.fit(model, WeighedBatches(data.dataset, batch_size=data.batch_size))
            found[f"{mode} {len(callbacks)}"] = float(trainer.callback_metrics["hooked"])
    assert found == pytest.approx(dict.fromkeys(found, expected)), found
    return {}


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        never_drains,
        rests_for_checkpoints,
        hooks_in_flight,
        losses_in_flight,
        failures_in_flight,
        in_other_forms,
        weights_of_logs_in_flight,
    ],
    4: [four_ranks_in_flight],
}
SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {2: [], 4: []}
