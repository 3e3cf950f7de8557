"""Checkpoints: what is in them, what resumes from them, and those that fail.

Written like ``callback_cases.py``.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytorch_lightning as pl
import torch
from pytorch_lightning import callbacks as shipped
from torch import nn

from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import CUT, end, refused, seeded, trained

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
    "kept steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "kept epochs": {"every_n_epochs": 2, "save_on_train_epoch_end": True, "save_top_k": -1},
    "kept best two": {
        "monitor": "train_loss_step",
        "every_n_train_steps": 1,
        "save_top_k": 2,
        "filename": "{step}",
    },
    "kept highest": {"monitor": "accuracy", "mode": "max", "save_last": True, "filename": "{epoch}"},
    "kept link": {"save_last": "link"},
    "kept interval": {"train_time_interval": timedelta(microseconds=1), "save_top_k": -1},
    "kept weights": {"save_weights_only": True, "save_last": True},
}


def model_checkpoints(host: cases.Host) -> dict[str, Any]:
    """Which checkpoints stand there in the end: old ones are gone, links lead somewhere."""
    kept: dict[str, Any] = {}
    for name, arguments in MODEL_CHECKPOINTS.items():
        if not is_chosen(name):
            continue
        folder = host.folder / name
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
    trained(
        host,
        seeded(Keeping),
        Counter(),
        shipped.ModelCheckpoint(**keep),
        max_epochs=1,
        validation=validation,
    )
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


class Trims(cases.Classifier):
    """Its hook leaves its first and its last layers out, casts one, sets one to 0 and adds an entry."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.names = list(state)
        del state["head.bias"]
        state["blocks.3.linear.weight"] = state["blocks.3.linear.weight"].half()
        state["blocks.4.linear.bias"] = torch.zeros_like(state["blocks.4.linear.bias"])
        checkpoint["state_dict"] = {
            **{name: value for name, value in state.items() if not name.startswith("embed")},
            "beside": torch.arange(3),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = {name: str(value.dtype) for name, value in checkpoint["state_dict"].items()}


class Fills(Trims):
    """Its hook puts in what is missing, and takes out what is too much."""

    strict_loading = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["beside"]
        state["embed.weight"] = torch.full((cases.WIDTH, cases.NUM_FEATURES), 0.25)
        state["embed.bias"] = torch.full((cases.WIDTH,), 0.5)
        state["head.bias"] = torch.zeros(cases.NUM_CLASSES)
        state["blocks.0.linear.bias"] = state["blocks.0.linear.bias"] + 1


class Strict(Trims):
    strict_loading = True


class TakesAway(cases.Classifier):
    """Its hook takes something out of the checkpoint."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint[self.key]


def states_of_hooks(host: cases.Host) -> dict[str, Any]:
    """What ``on_save_checkpoint`` makes of the state is what is loaded, and what is resumed from."""
    records: dict[str, Any] = {}
    for name, arguments in (("flat", {}), ("flattened", {"strategy": {"stage": 1}})):
        if not is_chosen(name):
            continue
        path = host.folder / "hooks" / f"{name}.ckpt"
        module = seeded(Trims)
        said: list[str] = []
        log = "deepspeed_partition.engine.runtime.environment.log_here"
        with patch(log, lambda message, _, said=said: said.append(message)):
            trained(host, module, max_epochs=1, **arguments).save_checkpoint(path)
        loaded = seeded(Trims, seed=5)
        state = Trims.load_from_checkpoint(path, strict=False).seen
        again, filled = seeded(Trims, seed=5), seeded(Fills, seed=5)
        host.trainer(strategy={"algorithm": CUT}).test(loaded, cases.loader(16), ckpt_path=path, verbose=False)
        records[name] = {
            "names": module.names,
            "loaded": state,
            "tested": [loaded.seen, outputs(loaded)],
            "resumed": [end(trained(host, again, ckpt_path=path, **arguments)), again.seen],
            "filled": end(trained(host, filled, ckpt_path=path, **arguments)),
            "strict": refused(lambda: trained(host, seeded(Strict), ckpt_path=path, **arguments)) != "not refused",  # noqa: B023
        }
        if host.pipelined:
            records[name]["said"] = said
    return records


def states_that_hooks_take_away(host: cases.Host) -> dict[str, Any]:
    def saved(key: str) -> str:
        trainer = trained(host, seeded(lambda: TakesAway(key)), max_epochs=1)
        return refused(lambda: trainer.save_checkpoint(host.folder / "taken.ckpt"))

    return {key: saved(key) for key in ("state_dict", "optimizer_states")}


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


class LeavesOut(cases.Classifier):
    """Saves its layers alone, in double precision and by other names, and reads them again."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.ones(3))

    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        return {f"old.{name}": value.detach().double() for name, value in whole.items() if name != "teacher"}

    def load_state_dict(self, state: Any, strict: bool = True) -> Any:
        present = nn.Module.state_dict(self)
        state = {name.removeprefix("old."): value.float() for name, value in state.items()}
        fitting = {name: value for name, value in state.items() if present[name].shape == value.shape}
        return super().load_state_dict(fitting, strict=False)


class KeepsTrained(cases.Classifier):
    """Goes by its parameters, of which each rank has its own, and by a hook, which runs on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        whole = super().state_dict(*arguments, **keywords)
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        return {f"kept.{name}": value for name, value in whole.items() if name in trained}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if all(name.startswith("kept.") for name in state):  # of a file
            del state[max(state)]


class TurnedInHooks(KeepsTrained):
    """What a hook unfreezes, and what it freezes, on the rank that has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(True)
        self.head.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        for weight in (self.head.weight, self.embed.weight):
            for trains in (False, True):
                weight.requires_grad = trains
                assert (
                    weight.requires_grad is trains
                    and weight.requires_grad_(not trains).requires_grad is not trains
                )
        self.head.requires_grad_(self.current_epoch == 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.current_epoch == 1 and batch_idx == 0:
            self.counted = sum(weight.numel() for weight in self.parameters() if weight.requires_grad)
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.embed.requires_grad_(False)
        path = Path(self.trainer.default_root_dir) / "turned.ckpt"
        self.trainer.save_checkpoint(path, weights_only=True)


class FromParts(cases.Classifier):
    def state_dict(self) -> dict[str, Any]:
        return {f"head.{name}": value for name, value in self.head.state_dict().items()}


def overridden_state_dicts(host: cases.Host) -> dict[str, Any]:
    """What a class makes of its state is in an ordinary file, and what it makes of a file is loaded."""
    trainer, path = trained(host, seeded(LeavesOut)), host.folder / "weights.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    state = torch.load(path, weights_only=True)["state_dict"]
    tester = host.trainer(strategy={"algorithm": CUT})
    tested = tester.test(seeded(LeavesOut, seed=9), cases.loader(37, seed=5), ckpt_path=path, verbose=False)
    files = {"leaves out": state}
    trained(host, seeded(KeepsTrained)).save_checkpoint(path, weights_only=True)
    files["keeps trained"] = torch.load(path, weights_only=True)["state_dict"]
    turned = seeded(TurnedInHooks)
    trained(host, turned, max_epochs=2)
    files["turned in hooks"] = torch.load(host.folder / "turned.ckpt", weights_only=True)["state_dict"]
    sums = {
        kind: {name: [str(value.dtype), float(value.abs().sum())] for name, value in state.items()}
        for kind, state in files.items()
    }
    flags = {name: weight.requires_grad for name, weight in turned.named_parameters()}
    return {"files": sums, "tested": tested, "trained": flags, "counted": turned.counted}


def states_made_of_parts(host: cases.Host) -> dict[str, Any]:
    trainer = trained(host, seeded(FromParts))
    return {"error": refused(lambda: trainer.save_checkpoint(host.folder / "parts.ckpt", weights_only=True))}


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


def resumed_on_other_stages(host: cases.Host) -> dict[str, Any]:
    """Saved on two stages and resumed on one per process, and the other way, with all that a model may hold."""
    tokens = torch.randint(cases.VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(4))
    token_data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16)
    runs: dict[str, tuple[Any, Any, list[int], int]] = {
        "running": (Running, cases.loader(48), CUT, 1),  # batch statistics are those of the whole batch
        "tied": (TwiceTied, token_data, [0, 3, 6], 4),
    }
    records: dict[str, Any] = {}
    for (name, (build, data, cut, num_micro_batches)), way in itertools.product(runs.items(), ((2, 1), (1, 2))):
        strategies = [
            {
                "num_stages": num_stages,
                "num_micro_batches": num_micro_batches,
                "stage": way[1] - 1,
                "algorithm": cut if num_stages == 2 else [0, cut[-1]],
            }
            for num_stages in way
        ]
        path = host.folder / f"{name}-{way[0]}.ckpt"
        trainer = trained(host, seeded(build), max_epochs=1, strategy=strategies[0], data=data)
        trainer.save_checkpoint(path)
        rates, module = cases.Rates(), seeded(build, seed=5)
        again = trained(host, module, rates, strategy=strategies[1], data=data, ckpt_path=path)
        records[f"{name}, {way}"] = {**end(again), "rates": rates.rates}
        if host.pipelined and trainer.is_global_zero:
            assert again.strategy.deepspeed_engine.plan is not None, "planned for as many stages as there are now"
    return records


def draws_go_on(host: cases.Host) -> dict[str, Any]:
    """What a step draws in the second epoch: of a run that is not interrupted, and of one that is resumed."""
    path, arguments = host.folder / "draws.ckpt", {"strategy": {"algorithm": [0, 2, 4]}, "data": cases.loader(32)}
    whole = trained(host, seeded(cases.Mixing), max_epochs=2, **arguments)
    trained(host, seeded(cases.Mixing), max_epochs=1, **arguments).save_checkpoint(path)
    again = trained(host, seeded(cases.Mixing, seed=9), max_epochs=2, ckpt_path=path, **arguments)
    return {
        "whole": float(whole.callback_metrics["share"]),
        "again": float(again.callback_metrics["share"]),
        "difference": float(again.callback_metrics["difference"]),
    }


class Anchored(cases.Classifier):
    """Keeps copies of its weights: those that it begins with, and those with which it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.start = [weight.detach().clone() for weight in self.parameters()]

    def configure_optimizers(self) -> Any:
        self.anchor = [weight.detach().clone() for weight in self.parameters()]
        return super().configure_optimizers()


class Averages(pl.Callback):
    """Copies of the weights by name.

    Args:
        hook: In which they are made.
        is_saved: Whether the average is in a checkpoint.
    """

    def __init__(self, hook: str, *, is_saved: bool = False) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.is_saved = is_saved
        setattr(self, hook, self._begin)

    def _begin(self, trainer: Any, module: Any) -> None:
        self.average = {name: weight.detach().clone() for name, weight in module.named_parameters()}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.is_saved:
            checkpoint["average"] = self.average

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if self.is_saved:
            self.average = checkpoint["average"]


def copies_before_the_checkpoint(host: cases.Host) -> dict[str, Any]:
    """What is said of copies that a resumed run makes before its checkpoint is loaded."""
    from lightning_madpipe.checkpoint import early_copies

    kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "none": (cases.Classifier, Counter),
        "list": (Anchored, Counter),
        "dict": (cases.Classifier, lambda: Averages("on_fit_start")),
        "later": (cases.Classifier, lambda: Averages("on_train_start")),
        "saved": (cases.Classifier, lambda: Averages("on_fit_start", is_saved=True)),
    }
    found = {}
    for name, (build, callback) in kinds.items():
        path = host.folder / f"copies-{name}.ckpt"
        trained(host, seeded(build), callback(), max_epochs=1).save_checkpoint(path)
        said: list[str] = []
        with patch.object(early_copies, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            trained(host, seeded(build, seed=9), callback(), max_epochs=1)
            anew = len(said)
            trained(host, seeded(build, seed=9), callback(), max_epochs=2, ckpt_path=path)
        found[name] = [anew, *said]
    return found


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
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    weights = (folder / "weights.ckpt").read_bytes()

    def half(self: Any, checkpoint: Any, where: Any, storage_options: Any = None) -> None:
        Path(where).write_bytes(b"half of it")
        raise OSError(28, "No space left on device", str(where))

    with patch.object(type(strategy.checkpoint_io), "save_checkpoint", half):
        full = refused(lambda: trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True))
    strategy.barrier()
    kept &= (folder / "weights.ckpt").read_bytes() == weights
    (folder / "file").touch()
    (host.folder / "mine").mkdir(exist_ok=True)
    (host.folder / "mine" / "notes.txt").write_text("my work")
    strategy.barrier()
    record = {
        "failed": failed.replace(str(folder), ""),
        "kept": kept,
        "full": full,
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


def saved_after_an_evaluation(host: cases.Host) -> dict[str, Any]:
    """What a checkpoint lacks when its Trainer, or another one, has evaluated since the module was fitted."""
    folder, data = host.folder / "evaluated", cases.loader(21, seed=3)
    module = seeded()
    trainer = trained(host, module, max_epochs=1)
    trainer.save_checkpoint(folder / "before.ckpt")
    said: dict[str, list[str]] = {}
    for what in ("validate", "test"):
        getattr(trainer, what)(module, data, verbose=False)
        said[what] = _warned(trainer, lambda: trainer.save_checkpoint(folder / "after.ckpt"))
        said[f"optimizers in {what}"] = [
            *_asked_for_an_optimizer(trainer, module),
            str(len(trainer.optimizers)),
            str(hasattr(trainer.optimizers, "param_groups")),
        ]
    for name in ("before", "after"):
        path = folder / f"{name}.ckpt"
        go_on = functools.partial(trained, host, seeded(seed=9), max_epochs=2, ckpt_path=path)
        said[name] = _warned(trainer, go_on)
    module = seeded()
    trainer = trained(host, module, max_epochs=1)
    host.trainer().validate(module, data, verbose=False)
    by_another = refused(lambda: trainer.save_checkpoint(folder / "other.ckpt"))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    trainer.strategy.barrier()
    weights = torch.load(folder / "weights.ckpt", weights_only=False)["state_dict"]
    return {**said, "by another": by_another, "weights": _equal(weights, module.state_dict())}


def _asked_for_an_optimizer(trainer: Any, module: Any) -> list[str]:
    """What those are told who take an optimizer, who read one, and who go through all, the first time."""
    told: list[str] = []
    for ask in (
        lambda: trainer.optimizers[0],
        lambda: module.optimizers().param_groups[0]["lr"],
        lambda: module.optimizers(use_pl_optimizer=False).state,
    ):
        try:
            told.append(f"nothing, but {ask()}")
        except (IndexError, AttributeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    with patch("lightning_madpipe.compat.optimizers.warn_once", lambda _, sentence: told.append(sentence)):
        assert not list(trainer.optimizers)
    return told


def _warned(trainer: Any, work: Callable[[], Any]) -> list[str]:
    """What rank 0 says of an optimizer's states meanwhile."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        work()
    return trainer.strategy.broadcast([str(one.message) for one in warned if "states of" in str(one.message)])


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
    copies = {
        name: folder / f"{name}.ckpt"
        for name in ("cut short", "unreadable", "without a file", "unfinished", "not mine")
    }
    if trainer.is_global_zero:
        for copy in copies.values():
            shutil.copytree(folder / "full.ckpt", copy)
        _cut_short(copies["cut short"] / "checkpoint" / "mp_rank_01_model_states.pt")
        of_one_rank = copies["unreadable"] / "checkpoint" / "mp_rank_01_model_states.pt"
        of_one_rank.write_bytes(bytes(of_one_rank.stat().st_size))
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
        "weights": resume(folder / "weights.ckpt"),
        "other file": test(folder / "weights.ckpt", Wider),
        "torn file": test(folder / "torn.ckpt"),
        "tested other": test(folder / "full.ckpt", Wider),
    }


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped_bits(host: cases.Host) -> dict[str, Any]:
    """One bit in the middle of each file of a checkpoint, and of one with weights only."""
    trainer = trained(host, seeded(Keeping), max_epochs=1, strategy={"stage": 1})
    path, file = host.folder / "flipped.ckpt", host.folder / "flipped-weights.ckpt"
    trainer.save_checkpoint(path)
    trainer.save_checkpoint(file, weights_only=True)
    trainer.strategy.barrier()
    found: dict[str, Any] = {}
    for victim in [*sorted((path / "checkpoint").iterdir()), file]:
        data = victim.read_bytes()
        place = data.find(b"blocks") if victim.suffix == ".json" else _in_a_tensor(victim, len(data))
        changed = bytearray(data)
        changed[place if place >= 0 else len(data) // 2] ^= 4
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            victim.write_bytes(changed)
        trainer.strategy.barrier()
        if victim == file:
            found[victim.name] = _tested(host, file)
        else:
            record = {
                "fit": refused(lambda: trained(host, seeded(Keeping), ckpt_path=path, strategy={"stage": 1}))
            }
            if "optim_states" not in victim.name:  # which is not read then
                record["test"] = _tested(host, path)
            if trainer.is_global_zero:
                import lightning_madpipe

                record["consolidate"] = refused(
                    lambda: lightning_madpipe.consolidate(path, host.folder / "x.ckpt")
                )
            found[victim.name] = record
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            victim.write_bytes(data)
        trainer.strategy.barrier()
    found["whole"] = [_tested(host, path), _tested(host, file)]
    return found


def _in_a_tensor(path: Path, num_bytes: int) -> int:
    """A byte of the last tensor in an archive."""
    with zipfile.ZipFile(path) as archive:
        last = max(
            (info for info in archive.infolist() if "/data/" in info.filename), key=lambda x: x.header_offset
        )
    with path.open("rb") as opened:
        opened.seek(last.header_offset + 26)
        name, extra = struct.unpack("<HH", opened.read(4))
    return last.header_offset + 30 + name + extra + last.file_size // 2


def _tested(host: cases.Host, path: Path) -> str:
    run = host.trainer(strategy={"algorithm": CUT})
    return refused(lambda: run.test(seeded(Keeping), cases.loader(16), ckpt_path=path, verbose=False))


class Settings:
    """An object of a class of the script, in its hyper-parameters."""


class Configured(Keeping):
    def __init__(self, settings: Settings | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Trace:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def foreign_checkpoints(host: cases.Host) -> dict[str, Any]:
    """What somebody else may have put into a checkpoint."""
    trainer = trained(host, seeded(lambda: Configured(Settings())), max_epochs=1)
    path, trace = host.folder / "configured.ckpt", host.folder / "trace"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    copies = {name: host.folder / f"{name}.ckpt" for name in ("bomb", "outside")}
    if trainer.is_global_zero:
        for copy in copies.values():
            shutil.copytree(path, copy)
            (copy / "checkpoint" / "madpipe-files.json").unlink()
        layer = copies["bomb"] / "checkpoint" / "layer_03-model_states.pt"
        torch.save({"x": Trace(trace)}, layer)
        for copy, change in (
            (copies["bomb"], {"layer_03-model_states.pt": layer.stat().st_size}),
            (copies["outside"], {"../../secret": 1}),
        ):
            model = copy / "checkpoint" / "madpipe-model.json"
            said = json.loads(model.read_text())
            said["files"].update(change)
            model.write_text(json.dumps(said))
        (host.folder / "secret").write_text("sixteen letters.")
    trainer.strategy.barrier()

    def resumed(path: Path, **strategy: Any) -> str:
        return refused(lambda: trained(host, seeded(Configured), ckpt_path=path, strategy=strategy))

    return {
        "said": resumed(path),
        "strict": resumed(path, unpickle=False),
        "bomb": resumed(copies["bomb"]),
        "bomb, tested": refused(
            lambda: host.trainer(strategy={"algorithm": CUT}).test(
                seeded(Configured), cases.loader(16), ckpt_path=copies["bomb"], verbose=False
            )
        ),
        "outside": resumed(copies["outside"]),
        "trace": trace.exists(),
    }


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        model_checkpoints, resumed_by_word, whole_model_files, names_and_values, files_of_one_device,
        folders_on_other_stages, resumed_on_other_stages, states_of_hooks, overridden_state_dicts,
    ],
    4: [whole_model_files],
}  # fmt: skip
ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        draws_go_on,
        copies_before_the_checkpoint,
        failed_saves,
        saved_after_an_evaluation,
        wrong_checkpoints,
        flipped_bits,
        foreign_checkpoints,
        states_that_hooks_take_away,
        states_made_of_parts,
    ],
    4: [],
}
