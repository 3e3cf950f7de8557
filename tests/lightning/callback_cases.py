"""What stands around the steps: callbacks, checkpoints, optimizers, precision, settings of the Trainer.

Written like ``lightning_cases.py``; the layers are cut by hand, which spares measuring them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins import AsyncCheckpointIO
from pytorch_lightning.tuner import Tuner
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

CUT = [0, 4, 8]
ENDS = 4
"""Optimizer steps of an epoch of ``trained``."""


def trained(host: cases.Host, module: Any, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    strategy = {"algorithm": CUT, **arguments.pop("strategy", {})}
    data = arguments.pop("data", None) or cases.loader(54)
    validation, ckpt_path = arguments.pop("validation", None), arguments.pop("ckpt_path", None)
    trainer = host.trainer(
        *callbacks, default_root_dir=arguments.pop("root", host.folder), strategy=strategy, **arguments
    )
    trainer.fit(module, data, validation, ckpt_path=ckpt_path)
    return trainer


def seeded(build: Callable[[], Any] = cases.Classifier, seed: int = 0) -> Any:
    pl.seed_everything(seed, verbose=False)
    return build()


def end(trainer: pl.Trainer) -> dict[str, Any]:
    return cases.fit_record(trainer, None, [])


def refused(run: Callable[[], Any]) -> str:
    """The first line of what ``run`` is refused with, here and by Lightning."""
    try:
        run()
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, KeyError) as refusal:
        return f"{type(refusal).__name__}: {str(refusal).splitlines()[0]}"
    return "not refused"


# Hooks


def _hook(name: str) -> Callable[..., None]:
    def called(self: Any, *_: Any, **__: Any) -> None:
        self.calls.append(name)

    return called


EVERY_HOOK = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
MODULE_HOOKS = [
    "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
    "on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_end",
    "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "setup",
    "teardown",
]  # fmt: skip


class Listener(pl.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []


for _name in EVERY_HOOK:
    setattr(Listener, _name, _hook(_name))


class Listening(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []


for _name in MODULE_HOOKS:
    setattr(Listening, _name, _hook(_name))


def hooks(host: cases.Host) -> dict[str, Any]:
    """Every hook of a callback and of the module, in the order of the calls."""
    listener, module = Listener(), seeded(Listening)
    checkpoint = shipped.ModelCheckpoint(host.folder / "hooks", every_n_epochs=1)
    trained(host, module, listener, checkpoint, validation=cases.loader(21, seed=3))
    return {"callback": listener.calls, "module": module.calls}


# Callbacks that Lightning ships


class Summary(shipped.ModelSummary):
    """Keeps what it would print."""

    shown: Any = None

    def summarize(self, data: Any, *totals: Any, **__: Any) -> None:  # type: ignore[override]
        self.shown = [[title, rows] for title, rows in data if title != "FLOPs"], list(totals[:3])


class RichSummary(Summary, shipped.RichModelSummary):
    pass


def summaries(host: cases.Host) -> dict[str, Any]:
    shown = {}
    for kind, depth in ((Summary, 2), (RichSummary, 1)):
        callback = kind(max_depth=depth)
        trained(host, seeded(), callback, max_epochs=1, enable_model_summary=True)
        shown[kind.__name__] = json.loads(json.dumps(callback.shown))
    tied = Summary(max_depth=-1)
    tokens = torch.randint(cases.VOCABULARY, (16, 6), generator=torch.Generator().manual_seed(4))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16)
    cut = {"algorithm": [0, 3, 6]}
    trained(host, seeded(cases.TiedLanguageModel), tied, data=data, strategy=cut, enable_model_summary=True)
    return {**shown, "tied": json.loads(json.dumps(tied.shown))}


class Names(pl.Callback):
    """What a summary callback would show of the module."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        [summary] = [each for each in trainer.callbacks if isinstance(each, shipped.ModelSummary)]
        self.names = list(summary._summary(trainer, module).layer_names)


class FromSpecs(cases.Steps):
    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        first, last = (cases.NUM_FEATURES, cases.WIDTH), (cases.WIDTH, cases.NUM_CLASSES)
        return [LayerSpec(nn.Linear, *first), LayerSpec(cases.Block), LayerSpec(nn.Linear, *last)]


def summary_of_specs(host: cases.Host) -> dict[str, Any]:
    """Layers that are built on their stage only; their weights are saved by the names that they have there."""
    names = Names()
    callbacks = (names, shipped.ModelSummary(max_depth=1))
    trainer = trained(host, seeded(FromSpecs), *callbacks, max_epochs=1, strategy={"algorithm": [0, 1, 3]})
    trainer.save_checkpoint(host.folder / "specs.ckpt", weights_only=True)
    state = torch.load(host.folder / "specs.ckpt", weights_only=False)["state_dict"]
    data = cases.loader(21, seed=3)
    stages = ({"num_stages": 1}, {"num_stages": 2, "algorithm": [0, 2, 3]})
    tested = [
        host.trainer(strategy=strategy).test(
            seeded(FromSpecs, seed=9), data, ckpt_path=host.folder / "specs.ckpt", verbose=False
        )
        for strategy in stages
    ]
    return {"names": names.names, "state": sorted(state), "tested": tested}


def watching_callbacks(host: cases.Host) -> dict[str, Any]:
    """Those that look on and those that count: nothing may change, and they must have seen the run."""
    counts = {"epochs": 0}

    def count(*_: Any) -> None:
        counts["epochs"] += 1

    timer = shipped.Timer(duration="00:01:00:00", interval="step")
    rates = shipped.LearningRateMonitor("step", log_momentum=True)
    trainer = trained(
        host,
        seeded(),
        shipped.DeviceStatsMonitor(cpu_stats=True),
        shipped.EarlyStopping("train_loss_epoch", patience=5),
        shipped.LambdaCallback(on_train_epoch_end=count),
        rates,
        shipped.RichProgressBar(),
        shipped.SpikeDetection(warmup=100),
        # Not a number of samples, which that of Lightning 2.5 takes for the same in every batch.
        shipped.ThroughputMonitor(batch_size_fn=len, window_size=2),
        timer,
        logger=CSVLogger(host.folder / "watching"),
        enable_progress_bar=True,
        validation=cases.loader(21, seed=3),
    )
    header = (Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    measured = sorted(name for name in header if name.startswith("train/"))  # by the ThroughputMonitor
    timed = timer.time_elapsed("train") > 0
    return {**end(trainer), **counts, "rates": rates.lrs, "timed": timed, "measured": measured}


def timed_out(host: cases.Host) -> dict[str, Any]:
    """A Timer that has run out stops every rank after the same step."""
    return end(trained(host, seeded(), shipped.Timer(duration={"seconds": 0}, interval="step")))


class Rated(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.lr = 0.3

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def rate_finder(host: cases.Host) -> dict[str, Any]:
    """By the callback, and by the Tuner: the losses that it saw, what it suggests, and the fit after it."""
    finder = shipped.LearningRateFinder(num_training_steps=16, early_stop_threshold=None)
    module = seeded(Rated)
    recorder = cases.Recorder()
    trained(host, module, finder, recorder, data=cases.loader(512), max_epochs=1, max_steps=6)
    tuned = seeded(Rated)
    trainer = host.trainer(default_root_dir=host.folder, max_epochs=1, strategy={"algorithm": CUT})
    found = Tuner(trainer).lr_find(tuned, cases.loader(512), num_training=16, early_stop_threshold=None)
    trainer.fit(tuned, cases.loader(54))
    assert found is not None and finder.optimal_lr is not None
    return {
        "callback": [finder.optimal_lr.results, finder.optimal_lr.suggestion(), module.lr, recorder.rows],
        "tuner": [found.results, found.suggestion(), tuned.lr, end(trainer)],
    }


def rate_finder_with_a_plan(host: cases.Host) -> dict[str, Any]:
    """The plan is made while the rate is searched, and kept when the weights go back to the beginning."""
    module, recorder = seeded(Rated), cases.Recorder()
    finder = shipped.LearningRateFinder(num_training_steps=4, early_stop_threshold=None)
    trained(host, module, finder, recorder, data=cases.loader(96), max_epochs=1, strategy={"algorithm": None})
    return {"rows": recorder.rows, "rate": module.lr}


# Checkpoints


class Keeping(cases.Classifier):
    """Puts something into checkpoints, and says what it finds there."""

    def __init__(self, width: int = 3, note: str = "hello") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.found: list[Any] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = f"{self.hparams['note']} at {self.trainer.global_step}"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found.append(checkpoint["note"])


class Counter(pl.Callback):
    """A callback with a state, and with words of its own in the checkpoint."""

    def __init__(self) -> None:
        self.num_batches, self.words = 0, ""

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches = state["num_batches"]

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["words"] = "of a callback"

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.words = checkpoint["words"]


MODEL_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "epochs": {"every_n_epochs": 2, "save_on_train_epoch_end": True, "save_top_k": -1},
    "best two": {"monitor": "train_loss_step", "every_n_train_steps": 1, "save_top_k": 2, "filename": "{step}"},
    "highest": {"monitor": "accuracy", "mode": "max", "save_last": True, "filename": "{epoch}"},
    "link": {"save_last": "link"},
    "interval": {"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
    "weights": {"save_weights_only": True, "save_last": True},
}


def model_checkpoints(host: cases.Host) -> dict[str, Any]:
    """Which checkpoints stand there in the end: old ones are gone, links lead somewhere."""
    kept: dict[str, Any] = {}
    for name, arguments in MODEL_CHECKPOINTS.items():
        folder = host.folder / "kept" / name
        callback = shipped.ModelCheckpoint(folder, **arguments)
        trained(host, seeded(), callback, validation=cases.loader(21, seed=3))
        kept[name] = {
            "names": sorted(path.name for path in folder.iterdir()),
            "best": Path(callback.best_model_path).name,
            "last": Path(callback.last_model_path).name,
            "scores": sorted(float(score) for score in callback.best_k_models.values() if score is not None),
            "link": (folder / "last.ckpt").is_symlink() and (folder / "last.ckpt").resolve().exists(),
        }
    return kept


def resumed_by_word(host: cases.Host) -> dict[str, Any]:
    """``ckpt_path="last"`` goes on where the run ended, with all states; ``"best"`` is what is tested."""
    folder = host.folder / "by-word"
    keep = {"dirpath": folder, "save_last": True, "monitor": "accuracy", "mode": "max", "filename": "{epoch}"}
    validation = cases.loader(21, seed=3)
    trained(host, seeded(Keeping), Counter(), shipped.ModelCheckpoint(**keep), max_epochs=1, validation=validation)
    module, counter, rates = seeded(Keeping, seed=9), Counter(), cases.Rates()
    best = shipped.ModelCheckpoint(**keep)
    callbacks = (counter, rates, best)
    trainer = trained(host, module, *callbacks, max_epochs=3, validation=validation, ckpt_path="last")
    tested = trainer.test(ckpt_path="best", dataloaders=cases.loader(37, seed=5), verbose=False)
    validated = trainer.validate(ckpt_path="last", dataloaders=cases.loader(37, seed=5), verbose=False)
    return {
        **end(trainer),
        "rates": rates.rates,
        "counted": [counter.num_batches, counter.words],
        "found": module.found,
        "tested": [tested, validated],
        "best": Path(best.best_model_path).name,
    }


def outputs(module: nn.Module) -> list[list[float]]:
    module.eval()
    with torch.no_grad():
        return module(cases.samples(5, seed=7).tensors[0]).tolist()


def whole_model_files(host: cases.Host) -> dict[str, Any]:
    """The names, hyper-parameters and outputs of what ``weights_only`` writes, by every road that leads there."""
    records = {}
    for name, arguments in WHOLE_MODELS.items():
        folder = host.folder / "whole" / name
        callback = shipped.ModelCheckpoint(folder, filename="callback", save_weights_only=True)
        arguments = {**arguments, "strategy": {**arguments.get("strategy", {}), "num_stages": 2}}
        trainer = trained(host, seeded(Keeping), callback, **(arguments if host.pipelined else {}))
        trainer.save_checkpoint(folder / "full.ckpt")
        trainer.save_checkpoint(folder / "trainer.ckpt", weights_only=True)
        during = trainer.strategy.lightning_module_state_dict()
        if host.pipelined:
            if trainer.is_global_zero:
                import lightning_madpipe

                lightning_madpipe.consolidate(folder / "full.ckpt", folder / "offline.ckpt")
            trainer.strategy.barrier()
        files = ["callback", "trainer", "offline" if host.pipelined else "full"]
        read = [torch.load(folder / f"{file}.ckpt", weights_only=False) for file in files]
        if trainer.is_global_zero:
            read.append({"state_dict": during, "hyper_parameters": {"width": 3, "note": "hello"}})
        else:
            assert during == {}
        loaded = Keeping.load_from_checkpoint(folder / "trainer.ckpt", map_location="cpu", note="now")
        records[name] = {
            "names": list(read[0]["state_dict"]),
            "same": all(_equal(other["state_dict"], read[0]["state_dict"]) for other in read),
            "types": sorted({str(value.dtype) for value in read[0]["state_dict"].values()}),
            "hyper-parameters": [dict(other["hyper_parameters"]) for other in read[:3]],
            "note": [other["note"] for other in read[:3]],
            "outputs": outputs(loaded),
            "now": [loaded.hparams["note"], loaded.found],
        }
    return records


WHOLE_MODELS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32 ZeRO-1": {"strategy": {"stage": 1}},
    "bf16": {"precision": "bf16-mixed"},
    "bf16 ZeRO-1": {"precision": "bf16-mixed", "strategy": {"stage": 1}},
}


def _equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in right)


class Running(Keeping):
    """Layers with buffers, frozen weights and a compiled block, and a buffer of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.BatchNorm1d(cases.WIDTH), nn.Linear(cases.WIDTH, cases.WIDTH))
        self.blocks[2].requires_grad_(False)
        self.blocks[3] = torch.compile(cases.Block(), backend="eager")
        self.register_buffer("passing", torch.ones(2), persistent=False)


class TwiceTied(cases.TiedLanguageModel):
    """Ties that always run in a function, and a second module that shares the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.unembed = nn.Linear(cases.WIDTH, cases.VOCABULARY, bias=False)
        self.unembed.weight = self.embed.weight

    def pipeline_layers(self) -> list[Any]:
        from lightning_madpipe import TiedModule

        def embed(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(tokens, module.weight)

        def unembed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return x @ module.weight.t()

        first, last = (TiedModule("embed", self.embed, forward_fn=run) for run in (embed, unembed))
        return [first, *self.blocks, last]


def names_and_values(host: cases.Host) -> dict[str, Any]:
    """Models with everything that a state dict may hold: saved, read back, and resumed."""
    tokens = torch.randint(cases.VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(4))
    token_data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16)
    micro = {"num_micro_batches": 1}  # batch statistics are those of the whole batch
    runs: dict[str, tuple[Any, dict[str, Any]]] = {
        "running": (Running, {"strategy": micro, "data": cases.loader(48)}),
        "tied": (TwiceTied, {"strategy": {"algorithm": [0, 3, 6]}, "data": token_data}),
    }
    records = {}
    for name, (build, arguments) in runs.items():
        folder = host.folder / "names" / name
        trainer = trained(host, seeded(build), max_epochs=1, **arguments)
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        trainer.save_checkpoint(folder / "full.ckpt")
        state = torch.load(folder / "weights.ckpt", weights_only=False)["state_dict"]
        again = trained(host, seeded(build, seed=5), ckpt_path=folder / "full.ckpt", **arguments)
        offline = state
        if host.pipelined and trainer.is_global_zero:
            import lightning_madpipe

            lightning_madpipe.consolidate(folder / "full.ckpt", folder / "offline.ckpt")
            offline = torch.load(folder / "offline.ckpt", weights_only=False)["state_dict"]
        fresh = build()
        fresh.load_state_dict(state)
        records[name] = {
            "state": {key: value.double().sum().item() for key, value in state.items()},
            "order": list(state) == list(fresh.state_dict()),
            "offline": _equal(offline, state),
            "resumed": end(again),
        }
    return records


def files_of_one_device(host: cases.Host) -> dict[str, Any]:
    """A checkpoint that one process wrote, full or not, is tested on two stages, and on one per process."""
    full, weights = (host.folder.parent / "reference" / "one" / f"{kind}.ckpt" for kind in ("full", "weights"))
    module = seeded()
    if not host.pipelined:
        trainer = trained(host, module)
        trainer.save_checkpoint(full)
        trainer.save_checkpoint(weights, weights_only=True)
    records: dict[str, Any] = {}
    for kind, path in (("full", full), ("weights", weights)):
        for num_stages in (1, 2):
            strategy = {"num_stages": num_stages, **({"algorithm": CUT} if num_stages == 2 else {})}
            trainer = host.trainer(strategy=strategy)
            data = cases.loader(37, seed=5)
            records[f"{kind} {num_stages}"] = trainer.test(seeded(seed=9), data, ckpt_path=path, verbose=False)
    return records


def folders_on_other_stages(host: cases.Host) -> dict[str, Any]:
    """A folder that two stages wrote, in fp32 and with ZeRO-1, is tested on one stage per process."""
    records = {}
    for stage in (0, 1):
        trainer = trained(host, seeded(), strategy={"stage": stage})
        path = host.folder / f"stages-{stage}.ckpt"
        trainer.save_checkpoint(path)
        data = cases.loader(37, seed=5)
        records[f"ZeRO-{stage}"] = [
            host.trainer(strategy={"num_stages": num_stages}).test(
                seeded(seed=9), data, ckpt_path=path, verbose=False
            )
            for num_stages in (1, 2)
        ]
    return records


# Optimizers and schedulers


class Own(optim.Optimizer):
    """Sign descent, as a user may write it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        weight.add_(weight.grad.sign(), alpha=-group["lr"])
        return loss


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    biases = [weight for name, weight in module.named_parameters() if name.endswith("bias")]
    matrices = [weight for name, weight in module.named_parameters() if not name.endswith("bias")]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "lr": 5e-3}]


def stepped(make: Callable[[Any], Any], **settings: Any) -> Callable[[Any], Any]:
    def configure(module: Any) -> Any:
        optimizer = optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": make(optimizer), "interval": "step", **settings}]

    return configure


def adam_one_cycle(module: Any) -> Any:
    optimizer = optim.AdamW(groups_of(module), lr=0.01)
    scheduler = schedulers.OneCycleLR(optimizer, 0.1, total_steps=ENDS)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda module, name=name: getattr(optim, name)(module.parameters(), lr=0.01)
        for name in (
            "Adam", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor",
        )
        if hasattr(optim, name)  # Adafactor came with torch 2.5
    },
    "fused": lambda module: optim.Adam(module.parameters(), lr=0.01, fused=True),
    "foreach": lambda module: optim.AdamW(module.parameters(), lr=0.01, foreach=True, amsgrad=True),
    "own": lambda module: Own(module.parameters(), lr=0.01),
    "a list": lambda module: [optim.SGD(module.parameters(), lr=0.1)],
    "a dict in a list": lambda module: [{"optimizer": optim.SGD(module.parameters(), lr=0.1)}],
    "one cycle of Adam": adam_one_cycle,
    "one cycle of SGD": stepped(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=ENDS)),
    "warm restarts": stepped(lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2)),
    "sequential": stepped(
        lambda optimizer: schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)],
            [3],
        )
    ),
    "by group": stepped(
        lambda optimizer: schedulers.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 0.9**step])
    ),
    "every other step": stepped(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5), frequency=2),
    "every epoch": stepped(lambda optimizer: schedulers.StepLR(optimizer, 1, 0.5), interval="epoch"),
    "plateau of a step": stepped(
        lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, patience=0, mode="max"),
        monitor="train_loss_step",
    ),
}  # fmt: skip

WRAPPED = ("Adam", "RMSprop", "own", "one cycle of Adam", "by group", "sequential")
"""Run again under DeepSpeed's optimizer for ZeRO-1, which gives one flat tensor per group."""


class Groups(pl.Callback):
    """What a scheduler may change, after every step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        self.seen.append([[g["lr"], g.get("momentum"), list(g.get("betas", ()))] for g in groups])


def optimizers(host: cases.Host) -> dict[str, Any]:
    records = {}
    for name, configure in OPTIMIZERS.items():
        kind = type("Classifier", (cases.Classifier,), {"configure_optimizers": configure})
        for stage in (0, 1) if name in WRAPPED else (0,):
            groups = Groups()
            trainer = trained(host, seeded(kind), groups, max_epochs=1, strategy={"stage": stage})
            records[f"{name} ZeRO-{stage}"] = {**end(trainer), "groups": groups.seen}
    return records


class WarmUp(cases.Classifier):
    """The warm-up of Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 5 * 0.1

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


class WarmUpBefore(WarmUp):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 + batch_idx)
        super(WarmUp, self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnScheduling(WarmUp):
    optimizer_step = cases.Classifier.optimizer_step

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": schedulers.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def own_steps(host: cases.Host) -> dict[str, Any]:
    records = {}
    for kind in (WarmUp, WarmUpBefore, OwnScheduling):
        for stage in (0, 1):
            rates = cases.Rates()
            trainer = trained(host, seeded(kind), rates, max_epochs=1, strategy={"stage": stage})
            records[f"{kind.__name__} ZeRO-{stage}"] = {**end(trainer), "rates": rates.rates}
    return records


# Settings of the Trainer


SETTINGS: dict[str, dict[str, Any]] = {
    "inference_mode": {"inference_mode": False},
    "deterministic": {"deterministic": True},
    "benchmark": {"benchmark": True},
    "detect_anomaly": {"detect_anomaly": True},
    "sanity": {"num_sanity_val_steps": 2},
    "no checkpoints": {"enable_checkpointing": False},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "clipped by norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm", "accumulate_grad_batches": 2},
    "num_nodes": {"num_nodes": 1},
    "barebones": {
        "barebones": True, "enable_checkpointing": None, "enable_progress_bar": None, "enable_model_summary": None,
        "logger": None, "log_every_n_steps": None, "num_sanity_val_steps": None,
    },
}  # fmt: skip


def settings(host: cases.Host) -> dict[str, Any]:
    records = {}
    for name, arguments in SETTINGS.items():
        trainer = trained(host, seeded(), max_epochs=1, validation=cases.loader(21, seed=3), **arguments)
        [config] = trainer.lr_scheduler_configs
        counts = [trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.num_val_batches]
        kinds = [type(trainer.optimizers[0]).__name__, type(config.scheduler).__name__, config.interval]
        tested = trainer.validate(trainer.lightning_module, cases.loader(21, seed=3), verbose=False)
        records[name] = {**end(trainer), "counts": counts, "kinds": kinds, "tested": tested}
    torch.use_deterministic_algorithms(False)
    return records


def loggers(host: cases.Host) -> dict[str, Any]:
    """The names in a CSV file, and the hyper-parameters that TensorBoard is given."""
    csv = CSVLogger(host.folder / "csv", version=0)
    board = TensorBoardLogger(str(host.folder / "board"), version=0)
    trainer = trained(host, seeded(Keeping), logger=[csv, board], validation=cases.loader(21, seed=3))
    names = (Path(csv.log_dir) / "metrics.csv").read_text().splitlines()[0]
    parameters = (Path(board.log_dir) / "hparams.yaml").read_text()
    return {**end(trainer), "names": sorted(names.split(",")), "parameters": parameters}


def profilers(host: cases.Host) -> dict[str, Any]:
    """What a profiler has seen, by name and number of calls, where one process sees it, too."""
    records = {}
    for name in ("simple", "advanced", "pytorch"):
        trainer = trained(host, seeded(), profiler=name, max_epochs=1, validation=cases.loader(21, seed=3))
        records[name] = end(trainer)
        if name == "simple":
            seen = trainer.profiler.recorded_durations
            shared = {
                action for action in seen if "[Strategy]" not in action and "_TrainingEpochLoop" not in action
            }
            records["calls"] = {action: len(seen[action]) for action in sorted(shared & PROFILED)}
    return records


PROFILED = {
    "run_training_batch", "run_training_epoch", "optimizer_step", "[LightningModule]Classifier.on_train_batch_end",
    "[LightningModule]Classifier.on_before_optimizer_step", "[LightningModule]Classifier.on_validation_epoch_end",
}  # fmt: skip


# Precision


def low_precision(host: cases.Host) -> dict[str, Any]:
    """Half precision, against 32 bits in one process. A CPU computes in fp16, though DeepSpeed would not start."""
    records = {}
    for precision in ("bf16-mixed", "bf16-true", "16-mixed", "16-true"):
        with _fp16_allowed(host.pipelined):
            chosen = precision if host.pipelined else "32-true"
            trainer = trained(host, seeded(), precision=chosen, validation=cases.loader(21, seed=3))
            records[precision] = end(trainer)
    return records


@contextmanager
def _fp16_allowed(allowed: bool) -> Iterator[None]:
    if not allowed:
        yield
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    try:
        yield
    finally:
        del accelerator.is_fp16_supported


def loss_scales(host: cases.Host) -> dict[str, Any]:
    """The loss scale of the configuration; with one that is too large, every step is skipped and counted."""
    records = {}
    for power in (8, 40):
        config = {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}
        with _fp16_allowed(True):
            module, rates = seeded(), cases.Rates()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            trainer = trained(host, module, rates, precision="16-mixed", strategy={"config": config})
        engine, after = trainer.strategy.deepspeed_engine, trainer.strategy.lightning_module_state_dict()
        records[str(power)] = {
            "scale": engine.optimizer.loss_scale,
            "ZeRO": engine.zero_optimization_stage(),
            "skipped": engine.skipped_steps,
            "steps": [trainer.global_step, engine.global_steps],
            "rates": rates.rates,
            "moved": any(
                not torch.allclose(value.float(), before[name], atol=1e-3) for name, value in after.items()
            ),
        }
        records[str(power)]["moved"] = trainer.strategy.broadcast(records[str(power)]["moved"])
    return records


# After an exception


class Failing(pl.Callback):
    """Fails in the second epoch, on every rank."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            raise OSError("the disk is full")


def after_an_exception(host: cases.Host) -> dict[str, Any]:
    keep = shipped.OnExceptionCheckpoint(host.folder / "failed")
    said = []
    try:
        trained(host, seeded(Keeping), Failing(), keep, enable_checkpointing=True)
    except OSError as error:
        said.append(str(error))
    rates = cases.Rates()
    trainer = trained(host, seeded(Keeping, seed=9), rates, ckpt_path=host.folder / "failed" / "on_exception.ckpt")
    return {**end(trainer), "said": said, "rates": rates.rates}


def changed_settings(host: cases.Host) -> dict[str, Any]:
    """A second fit of one Trainer goes by the settings that it has then."""
    module = seeded()
    trainer = trained(host, module, max_epochs=1, gradient_clip_val=1e-3)
    trainer.accumulate_grad_batches, trainer.gradient_clip_val, trainer.fit_loop.max_epochs = 2, 0.5, 2
    trainer.fit(module, cases.loader(54))
    engine = trainer.strategy.deepspeed_engine
    again = refused(lambda: pl.Trainer(strategy=trainer.strategy, devices=2, logger=False))
    return {"engine": [engine.gradient_clipping(), engine.gradient_accumulation_steps()], "another Trainer": again}


# Saves that fail, and checkpoints that do not fit


def failed_saves(host: cases.Host) -> dict[str, Any]:
    """What was there before stays, nothing half-written appears, and the next save finds its way."""
    folder = host.folder / "saves"
    trainer = trained(host, seeded(), max_epochs=1)
    path, strategy = folder / "full.ckpt", trainer.strategy
    trainer.save_checkpoint(path)
    before = _files(path)
    engine, save = strategy.deepspeed_engine, strategy.deepspeed_engine.save_checkpoint

    def fail(*arguments: Any, **keywords: Any) -> None:
        save(*arguments, **keywords)
        raise OSError(28, "No space left on device")

    engine.save_checkpoint = fail
    failed = refused(lambda: trainer.save_checkpoint(path))
    kept = _files(path) == before
    engine.save_checkpoint = save
    trainer.save_checkpoint(path)
    (folder / "file").touch()
    (host.folder / "mine").mkdir(exist_ok=True)
    (host.folder / "mine" / "notes.txt").write_text("my work")
    strategy.barrier()
    record = {
        "failed": failed.replace(str(folder), ""),
        "kept": kept,
        "again": _files(path).keys() == before.keys(),
        "names": sorted(entry.name for entry in folder.iterdir()),
        "no folder": refused(lambda: trainer.save_checkpoint(folder / "file" / "x.ckpt")),
        "no file": refused(lambda: trainer.save_checkpoint(folder / "file" / "x.ckpt", weights_only=True)),
        "a user's folder": refused(lambda: trainer.save_checkpoint(host.folder / "mine")),
        "what was in it": (host.folder / "mine" / "notes.txt").read_text(),
        "options": refused(lambda: trainer.save_checkpoint(folder / "x.ckpt", storage_options={})),
    }
    strategy.barrier()
    return record


def _files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


class Wider(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[4] = nn.Linear(cases.WIDTH, cases.WIDTH)


def wrong_checkpoints(host: cases.Host) -> dict[str, Any]:
    trainer = trained(host, seeded(), max_epochs=1)
    folder = host.folder / "wrong"
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    copies = {name: folder / f"{name}.ckpt" for name in ("cut short", "without a file", "unfinished", "not mine")}
    if trainer.is_global_zero:
        for copy in copies.values():
            shutil.copytree(folder / "full.ckpt", copy)
        _cut_short(copies["cut short"] / "checkpoint" / "mp_rank_01_model_states.pt")
        (copies["without a file"] / "checkpoint" / "layer_03-model_states.pt").unlink()
        (copies["unfinished"] / "checkpoint" / "madpipe-model.json").unlink()
        model = copies["not mine"] / "checkpoint" / "madpipe-model.json"
        model.write_text(model.read_text().replace("madpipe-model/1", "madpipe-model/9"))
        _cut_short(Path(shutil.copy(folder / "weights.ckpt", folder / "torn.ckpt")))
    trainer.strategy.barrier()

    def resume(path: Path, build: Any = cases.Classifier, **strategy: Any) -> str:
        sentence = refused(lambda: trained(host, seeded(build), ckpt_path=path, strategy=strategy))
        return sentence.replace(str(folder), "")

    def test(path: Path, build: Any = cases.Classifier) -> str:
        run = host.trainer(strategy={"algorithm": CUT})
        return refused(lambda: run.test(seeded(build), cases.loader(16), ckpt_path=path, verbose=False))

    return {
        **{name: resume(copy) for name, copy in copies.items()},
        "nothing": resume(folder / "absent.ckpt"),
        "a part": resume(folder / "full.ckpt" / "checkpoint"),
        "other shapes": resume(folder / "full.ckpt", Wider),
        "other layers": resume(folder / "full.ckpt", cases.SequentialClassifier, algorithm=[0, 2, 5]),
        "other stages": resume(folder / "full.ckpt", num_stages=1, algorithm=[0, 8]),
        "weights": resume(folder / "weights.ckpt"),
        "other file": test(folder / "weights.ckpt", Wider),
        "torn file": test(folder / "torn.ckpt"),
        "tested other": test(folder / "full.ckpt", Wider),
    }


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# What is refused


class OwnZeroGrad(cases.Classifier):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class OwnClipping(cases.Classifier):
    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        pass


class Backbone(cases.Classifier):
    @property
    def backbone(self) -> nn.Module:
        return self.embed


def _with(configure: Callable[[Any], Any]) -> Any:
    return type("Classifier", (cases.Classifier,), {"configure_optimizers": configure})


def not_available(host: cases.Host) -> dict[str, Any]:
    def of(callback: Any, build: Any = cases.Classifier, **arguments: Any) -> str:
        callbacks = [] if callback is None else [callback]
        return refused(lambda: trained(host, seeded(build), *callbacks, max_epochs=1, **arguments))

    def deep(kind: str) -> Any:
        return getattr(shipped, kind, None)

    loaders = DataModule()
    sentences = {
        "BackboneFinetuning": of(shipped.BackboneFinetuning(), Backbone),
        "GradientAccumulationScheduler": of(shipped.GradientAccumulationScheduler({0: 1, 1: 2})),
        "StochasticWeightAveraging": of(shipped.StochasticWeightAveraging(swa_lrs=0.1)),
        "ModelPruning": of(shipped.ModelPruning("l1_unstructured", amount=0.5)),
        "BatchSizeFinder": refused(
            lambda: host.trainer(shipped.BatchSizeFinder(), strategy={"algorithm": CUT}).fit(seeded(), loaders)
        ),
        "finder": of(shipped.LearningRateFinder(), Rated, strategy={"stage": 1}),
        "plugin": of(shipped.ModelCheckpoint(host.folder / "io"), plugins=[AsyncCheckpointIO()]),
        "sync_batchnorm": of(None, sync_batchnorm=True),
        "64-true": of(None, precision="64-true"),
        "16-mixed": of(None, precision="16-mixed"),
        "transformer-engine": of(None, precision="transformer-engine"),
        "optimizer_zero_grad": of(None, OwnZeroGrad),
        "configure_gradient_clipping": of(None, OwnClipping),
        "LBFGS": of(None, _with(lambda module: optim.LBFGS(module.parameters()))),
        "no optimizer": of(None, _with(lambda module: None)),
        "two schedulers": of(None, _with(_two_schedulers)),
        "Adafactor": of(None, _with(lambda module: optim.Adafactor(module.parameters())), strategy={"stage": 1}),
    }
    for kind in ("WeightAveraging", "EMAWeightAveraging"):
        if deep(kind) is not None:  # Lightning 2.6
            sentences[kind] = of(deep(kind)())
    return sentences


def _two_schedulers(module: Any) -> Any:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [schedulers.StepLR(optimizer, 1), schedulers.StepLR(optimizer, 2)]


class DataModule(pl.LightningDataModule):
    batch_size = 16

    def train_dataloader(self) -> Any:
        return cases.loader(32, self.batch_size)


def weights_past_a_plugin(host: cases.Host) -> dict[str, Any]:
    """A CheckpointIO writes the files of whole models."""
    path = host.folder / "plugin"
    callback = shipped.ModelCheckpoint(path, filename="weights", save_weights_only=True)
    trainer = trained(host, seeded(), callback, max_epochs=1, plugins=[AsyncCheckpointIO()])
    trainer.strategy.barrier()  # the first rank has ended its thread, which writes
    return {"names": list(torch.load(path / "weights.ckpt", weights_only=False)["state_dict"])}


def notes(host: cases.Host) -> dict[str, Any]:
    """What is not called and what shows nothing is said once, and only where it matters."""
    said = {}
    board = TensorBoardLogger(str(host.folder / "graph"), log_graph=True)
    for name, callbacks, logger in (("quiet", [], False), ("notes", [Listener()], board)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(host, seeded(), *callbacks, max_epochs=1, logger=logger)
        said[name] = [str(warning.message) for warning in caught if "madpipe:" in str(warning.message)]
    return said


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        hooks, summaries, watching_callbacks, timed_out, rate_finder, rate_finder_with_a_plan, model_checkpoints,
        resumed_by_word, whole_model_files, names_and_values, files_of_one_device, folders_on_other_stages,
        optimizers, own_steps, settings, loggers, profilers, low_precision, after_an_exception,
    ],
    4: [whole_model_files],
}  # fmt: skip
ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        summary_of_specs, loss_scales, changed_settings, failed_saves, wrong_checkpoints, not_available,
        weights_past_a_plugin, notes,
    ],
    4: [],
}  # fmt: skip
