"""What is there when fit, validate, test or predict has returned, and what is said when something differs.

Cases of ``lightning_multiproc.py``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import unittest.mock
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning import callbacks as shipped
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.strategies import strategy as lightning_strategy
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases

CUT = {"algorithm": [0, 3, 8]}


def refused(run: Callable[[], Any]) -> str:
    try:
        run()
    except (MisconfigurationException, ValueError, NotImplementedError, RuntimeError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "not refused"


class Said(logging.Handler):
    """The lines of MadPipe's log on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("deepspeed_partition").addHandler(self)
        return self

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("deepspeed_partition").removeHandler(self)


# Checkpoint folders where Lightning reads a file


def read_where_a_file_is_expected(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    best = ModelCheckpoint(host.folder / "best", monitor="loss", filename="best")
    module = cases.Classifier(optimizer="sgd")
    trainer = host.trainer(best, strategy=CUT)
    if host.pipelined:
        from lightning_madpipe.checkpoint.saving import Checkpointing

        Checkpointing._tells_of_folder = True  # another case may have been told
    with Said() as said:
        trainer.fit(module, cases.loader(54), cases.loader(21, seed=3))
        trainer.save_checkpoint(host.folder / "best" / "again.ckpt")
    told = [line for line in said.lines if " is a folder, " in line]  # it was not, and torch.load() failed
    assert len(told) == (host.pipelined and trainer.is_global_zero), told
    assert all("best.ckpt" in line and "lightning_madpipe.consolidate(folder, file)" in line for line in told)
    path = best.best_model_path
    loaded = cases.Classifier.load_from_checkpoint(path, optimizer="sgd")
    mapped = cases.Classifier.load_from_checkpoint(path, map_location=torch.device("cpu"))
    alone = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    read = alone.strategy.load_checkpoint(path)
    inputs = cases.samples(5).tensors[0]
    safely = cases.Classifier.load_from_checkpoint(path, weights_only=True)
    return {
        "weights_only": safely.eval()(inputs).tolist(),
        "outputs": loaded.eval()(inputs).tolist(),
        "mapped": mapped.eval()(inputs).tolist(),
        "names": list(read["state_dict"]),
        "step": read["global_step"],
    }


def folders_that_are_not_read(host: cases.Host) -> dict[str, Any]:
    path = host.folder / "best" / "best.ckpt"
    return {
        "another folder": refused(lambda: cases.Classifier.load_from_checkpoint(host.folder)),
        "note": (path / "README.txt").read_text(),
    }


# Refusals


class Everything(pl.LightningModule):
    """What a script for a GAN may be."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.generator.parameters()), torch.optim.SGD(self.discriminator.parameters())]


class SharedAndOutside(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, self.blocks[0], self.head]


class Iterating(cases.Classifier):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


class Finetuning(shipped.BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.embed)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        pass


def all_reasons(host: cases.Host) -> dict[str, Any]:
    def of(build: Callable[[], Any], *callbacks: Any, **arguments: Any) -> str:
        return refused(lambda: host.trainer(*callbacks, max_epochs=1, **arguments).fit(build(), cases.loader(16)))

    return {
        "everything": of(Everything, sync_batchnorm=True),
        "layers": of(SharedAndOutside),
        "one": of(cases.Classifier, sync_batchnorm=True),
        "iterating": of(Iterating),
        "finetuning": of(cases.Classifier, Finetuning()),
        "callbacks": of(cases.Classifier, Finetuning(), shipped.ModelPruning("l1_unstructured", amount=0.5)),
    }


# torch.compile


class CompiledSequential(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


def compiled_sequential(host: cases.Host) -> dict[str, Any]:
    return cases.fit(host, CompiledSequential, cases.loader(32), strategy={"algorithm": [0, 2, 5]})


# Going on within an epoch


class Remembering:
    """A loader whose position is a part of the checkpoint."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        batches = list(cases.loader(64))
        start, self.place = self.place, 0
        for place in range(start, 4):
            self.place = place + 1
            yield batches[place]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def resumed_within_an_epoch(host: cases.Host) -> dict[str, Any]:
    record = {}
    for kind, loader in (("plain", lambda: cases.loader(64)), ("remembering", Remembering)):
        whole_model = _losses(host, loader, host.folder / f"{kind}-whole")
        begun = _losses(host, loader, host.folder / kind, max_steps=6)
        path = str(next((host.folder / kind).glob("*.ckpt")))
        with Said() as said:
            rest = _losses(host, loader, None, ckpt_path=path)
        with Said() as quiet:
            full = str(next((host.folder / f"{kind}-whole").glob("*.ckpt")))
            _losses(host, loader, None, ckpt_path=full, max_epochs=3)
        record[kind] = {
            "rows": rest,
            "unbroken": begun + rest == whole_model,
            "said": [line for line in said.lines if "within epoch" in line],
            "quiet": [line for line in quiet.lines if "within epoch" in line],
        }
    return record


def _losses(host: cases.Host, loader: Callable[[], Any], folder: Path | None, **arguments: Any) -> list[Any]:
    pl.seed_everything(0, verbose=False)
    recorder, ckpt_path = cases.Recorder(), arguments.pop("ckpt_path", None)
    keep = [] if folder is None else [ModelCheckpoint(folder, save_last=False, every_n_train_steps=2)]
    trainer = host.trainer(recorder, *keep, strategy=CUT, **{"max_epochs": 2, **arguments})
    trainer.fit(cases.Classifier(optimizer="sgd"), loader(), ckpt_path=ckpt_path)
    return [[step, round(loss, 6)] for step, loss in recorder.rows]


# The module after a run


class Freezing(cases.Classifier):
    """A frozen layer, a normalization with statistics, and parts that the user left in eval mode."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.normalize = nn.BatchNorm1d(cases.WIDTH, affine=False).eval()
        self.blocks[1].requires_grad_(False)
        self.blocks[4].eval()
        self.example_input_array = torch.ones(1, cases.NUM_FEATURES)

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks[:3], self.normalize, *self.blocks[3:], torch.tanh, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in (*self.blocks[:3], self.normalize, *self.blocks[3:]):
            x = block(x)
        return self.head(torch.tanh(x))


def seen(module: Any) -> dict[str, Any]:
    """What a script may ask a module for when a run has returned."""
    inputs = cases.samples(5).tensors[0].to(next(module.parameters()).dtype)
    with torch.no_grad():
        outputs = module(inputs)
        copied = copy.deepcopy(module)(inputs)
        pickled = pickle.loads(pickle.dumps(module))(inputs)
    assert torch.equal(outputs, copied) and torch.equal(outputs, pickled)
    state = module.state_dict()
    return {
        "outputs": outputs.tolist(),
        "state": {name: value.double().sum().item() for name, value in state.items()},
        "types": sorted({str(value.dtype) for value in state.values()}),
        "frozen": [name for name, weight in module.named_parameters() if not weight.requires_grad],
        "modes": [name for name, part in module.named_modules() if part.training],
        "children": [name for name, _ in module.named_modules()],
        "attributes": sorted({key for weight in module.parameters() for key in vars(weight) if key[:2] != "ds"}),
        "example": module.example_input_array is not None,
    }


def fitted(
    host: cases.Host, module: Any, *callbacks: Any, ckpt_path: Any = None, **arguments: Any
) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    recorder = cases.Recorder()
    trainer = host.trainer(recorder, *callbacks, **{"strategy": {"algorithm": [0, 3, 9]}, **arguments})
    trainer.fit(module, cases.loader(54), ckpt_path=ckpt_path)
    return {"rows": recorder.rows, "trainer": trainer}


def count_calls(layer: Any, *_: Any) -> None:
    layer.num_calls = getattr(layer, "num_calls", 0) + 1


def whole_again(host: cases.Host) -> dict[str, Any]:
    """The module after fit, validate and test, fitted again, and changed in between."""
    pl.seed_everything(0, verbose=False)
    module = Freezing(optimizer="sgd")
    weights = dict(module.named_parameters())
    module.blocks[0].register_forward_hook(count_calls)
    first = fitted(host, module)
    trainer, record = first["trainer"], {"first": first["rows"], "after fit": seen(module)}
    record["same objects"] = all(weight is weights[name] for name, weight in module.named_parameters())
    in_groups = {id(weight) for group in trainer.optimizers[0].param_groups for weight in group["params"]}
    record["in the optimizer"] = sorted(name for name, weight in weights.items() if id(weight) in in_groups)
    record["validated"] = trainer.validate(module, cases.loader(21, seed=3), verbose=False)
    record["after validate"] = seen(module)
    record["predicted"] = torch.cat(trainer.predict(Predicting(module), cases.loader(8))).tolist()
    record["second"] = fitted(host, module, max_epochs=1)["rows"]
    module.load_state_dict({name: 0.5 * value for name, value in module.state_dict().items()})
    record["changed"] = fitted(host, module, max_epochs=1)["rows"]
    module.head = nn.Linear(cases.WIDTH, cases.NUM_CLASSES)
    with torch.no_grad():
        module.head.weight.fill_(0.1)
        module.head.bias.zero_()
    record["other head"] = fitted(host, module, max_epochs=1)["rows"]
    record["other cut"] = fitted(host, module, max_epochs=1, strategy={"algorithm": [0, 5, 9]})["rows"]
    record["after all"] = seen(module)
    alone = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[recorder := cases.Recorder()],
        strategy=SingleDeviceStrategy("cpu"),
    )  # fmt: skip
    alone.fit(module, cases.loader(54))
    record["alone"], record["after alone"] = recorder.rows, seen(module)
    record["back"] = fitted(host, module, max_epochs=1)["rows"]
    record["hooked"] = module.blocks[0].num_calls > 0
    return record


class Predicting(pl.LightningModule):
    """Another module around the same layers."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def pipeline_layers(self) -> list[Any]:
        return self.inner.pipeline_layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


class Held(Callback):
    """How many parameters this rank has while fit runs."""

    number = 0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.number = len(list(module.parameters()))


def pretrained_after_fit(host: cases.Host) -> dict[str, Any]:
    """What a script does with a language model when fit has returned, on every rank: saves, loads, generates."""
    from transformers import GPT2LMHeadModel

    from tests.lightning.captured_cases import CausalLanguageModel, sentences  # which import from here

    module, held = cases.seeded(CausalLanguageModel), Held()
    model: Any = module.model
    initial = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    prompt = {"input_ids": torch.tensor([[3, 1, 4], [1, 5, 2]]), "attention_mask": torch.ones(2, 3).long()}

    def generated(by: Any) -> list[list[int]]:
        return by.eval().generate(**prompt, max_new_tokens=12, do_sample=False, pad_token_id=0).tolist()

    before = generated(model)
    trainer = host.trainer(held, max_epochs=4, strategy={"algorithm": "uniform", "warmup_epochs": 0})
    trainer.fit(module, sentences())
    assert host.pipelined == (held.number < len(initial)), held.number
    folder = host.folder / "pretrained"
    model.save_pretrained(folder)  # of several ranks the first one writes
    if host.pipelined:
        _objects("it is written")
    loaded = GPT2LMHeadModel.from_pretrained(folder)
    tokens, weights = generated(model), dict(loaded.named_parameters())
    return {
        "weights": {name: weight.double().abs().sum().item() for name, weight in weights.items()},
        "trained": [not torch.equal(weight, initial[name]) for name, weight in weights.items()],
        "same as the module's": all(torch.equal(weights[name], own) for name, own in model.named_parameters()),
        "tokens": tokens,
        "others than before": tokens != before,
        "tokens of the loaded one": generated(loaded),
    }


class OptimizerFromOutside(cases.Classifier):
    """As where a script builds the optimizer and hands it to the module."""

    def __init__(self) -> None:
        super().__init__()
        self.given = torch.optim.Adam(self.parameters(), lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.given


def optimizer_from_outside(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module, moved = OptimizerFromOutside(), []
    to_device = lightning_strategy._optimizers_to_device

    def noted(optimizers: Any, device: Any) -> None:
        moved.append(str(device))
        to_device(optimizers, device)

    with unittest.mock.patch.object(lightning_strategy, "_optimizers_to_device", noted):
        rows = [fitted(host, module, max_epochs=1, strategy=CUT)["rows"] for _ in range(2)]
    names = {id(weight): name for name, weight in module.named_parameters()}
    groups = [names[id(weight)] for weight in module.given.param_groups[0]["params"]]
    # To a GPU where a fit begins, and back: where states stayed on the CPU, the second fit ended there.
    return {"rows": rows, "names": groups, "moved": moved}


class WithMetric(cases.TiedLanguageModel):
    """Layers that share weights, and a metric, whose states the pipelines gather."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        returned = super().training_step(batch, batch_idx)
        self.mean(returned["loss"].detach())
        return returned


def tied_and_metric(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = WithMetric()
    tokens = torch.randint(cases.VOCABULARY, (24, 7), generator=torch.Generator().manual_seed(5))
    host.trainer(strategy={"algorithm": [0, 3, 6]}).fit(module, DataLoader(TensorDataset(tokens), 8))
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    with torch.no_grad():
        return {"logits": again(tokens[:2]).flatten()[:20].tolist(), "names": list(module.state_dict())}


def compiled_again(host: cases.Host) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module, inputs = CompiledSequential(), cases.samples(3).tensors[0]
    rows = []
    for _ in range(2):
        recorder = cases.Recorder()
        host.trainer(recorder, max_epochs=1, strategy={"algorithm": [0, 2, 5]}).fit(module, cases.loader(32))
        rows.append(recorder.rows)
    with torch.no_grad():
        return {"rows": rows, "outputs": module(inputs).tolist(), "names": list(module.state_dict())}


# In half precision, and beside it


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32 ZeRO-1": {"stage": 1},
    "bf16": {"precision": "bf16-mixed"},
    "bf16 ZeRO-1": {"precision": "bf16-mixed", "stage": 1},
    "true bf16": {"precision": "bf16-true"},
}


def in_every_precision(host: cases.Host) -> dict[str, Any]:
    return {name: _in_precision(host, name, dict(settings)) for name, settings in PRECISIONS.items()}


def _in_precision(host: cases.Host, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    pl.seed_everything(0, verbose=False)
    module = Freezing(optimizer="sgd")
    frozen = module.blocks[1].linear.weight.detach().clone()
    strategy = {"algorithm": [0, 3, 9], **({"stage": settings.pop("stage")} if "stage" in settings else {})}
    trainer = fitted(host, module, strategy=strategy, max_epochs=1, **settings)["trainer"]
    record, after = {"after fit": seen(module)}, copy.deepcopy(module.state_dict())
    # What Lightning's file of the whole model has, of the masters, is what the module has.
    path = host.folder / f"{name}.ckpt"
    trainer.save_checkpoint(path, weights_only=True)
    saved = torch.load(path, weights_only=False)["state_dict"]
    record["as saved"] = all(torch.equal(saved[key].to(value), value) for key, value in after.items())
    record["frozen"] = torch.equal(frozen.to(after["blocks.1.linear.weight"]), after["blocks.1.linear.weight"])
    trainer.save_checkpoint(host.folder / f"{name} full.ckpt")
    record["unchanged by saving"] = same_state(module, after)
    trainer.validate(module, cases.loader(21, seed=3), verbose=False)
    record["unchanged by validate"] = same_state(module, after)
    resumed = Freezing(optimizer="sgd")
    found = fitted(host, resumed, strategy=strategy, ckpt_path=str(host.folder / f"{name} full.ckpt"), **settings)
    record["resumed"] = found["rows"]
    with torch.no_grad():
        module.head.bias.add_(1.0)
        module.embed.bias.add_(1.0)
    trainer.fit_loop.max_epochs = 2
    trainer.save_checkpoint(host.folder / f"{name} changed.ckpt", weights_only=True)
    changed = torch.load(host.folder / f"{name} changed.ckpt", weights_only=False)["state_dict"]
    record["changed is saved"] = [
        float((changed[key].to(after[key]) - after[key]).mean()) for key in ("head.bias", "embed.bias")
    ]
    return record


def same_state(module: Any, state: dict[str, Any]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


# Where the layers do not come back


class Interrupting(pl.Callback):
    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise self.kind("stopped here")


class InterruptingValidation(pl.Callback):
    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            raise ArithmeticError("validation stopped here")


class Recutting(pl.Callback):
    """Moves the layers before the second step, if it is given a cut."""

    def __init__(self, cut: Any) -> None:
        self.cut = cut

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.cut is not None and batch_idx == 0:
            trainer.strategy.deepspeed_engine.recut(self.cut)


def planned_again(host: cases.Host) -> dict[str, Any]:
    """The cut of each fit of one module, by Trainers of which the later ones ask for plans of their own.

    A hook of some moves the layers, to boundaries or to a plan, for the rest of its fit.
    """
    plans = {}
    for name, cut in (("first", [0, 3, 8]), ("second", [0, 5, 8])):
        plans[name] = str(host.folder / f"again-{name}.json")
        strategy = {"algorithm": cut, "warmup_epochs": 0, "save_plan": plans[name]}
        fitted(host, cases.Classifier(optimizer="sgd"), strategy=strategy, max_epochs=1)
    first, other = {**CUT, "warmup_epochs": 0}, {"algorithm": [0, 4, 8], "warmup_epochs": 0}
    by_plan = {"plan": plans["first"]}
    rows: dict[str, list[Any]] = {
        "asked": [(first, None), ({"plan": plans["second"]}, None), (by_plan, None), (other, None)],
        "plan first": [(by_plan, None), (other, None)],
        "recut": [(first, [0, 6, 8]), (first, None), (other, None)],
        "recut to a plan": [(first, plans["second"]), (first, None), (other, None)],
        "recut from a plan": [(by_plan, [0, 6, 8]), (by_plan, None), (other, None)],
        "recut and frozen": [(first, plans["second"]), (first, None)],
    }
    return {
        name: _cuts_of_fits(host, fits, name == "recut and frozen")
        for name, fits in rows.items()
        if is_chosen(name)
    }


def _cuts_of_fits(host: cases.Host, fits: list[Any], freezes: bool) -> list[Any]:
    module, cuts = cases.Classifier(optimizer="sgd"), []
    for strategy, recut in fits:
        trainer = fitted(host, module, Recutting(recut), strategy=strategy, max_epochs=1)["trainer"]
        cuts.append(trainer.strategy.pipeline.parts)
        module.head.requires_grad_(not freezes)
    return cuts


def planned_otherwise(host: cases.Host) -> dict[str, Any]:
    """Fits of one module by Trainers that plan by other options, or by the same, which is said on rank 0."""
    module, rows, said_of_each = cases.seeded(lambda: cases.Classifier(optimizer="sgd")), [], []
    later = {"algorithm": [0, 5, 8]}
    delayed = {"memory": "1GB", "weight_versions": "2bw", "loss": "mean"}  # other losses than in one process
    for options in (CUT, later, later, {**later, "memory": "1GB"}, {**later, **delayed}):
        if "loss" in options and not host.pipelined:
            continue
        # As where a script looks at gradients before: a fit begins with zero_grad().
        module(cases.samples(5).tensors[0]).sum().backward()
        with Said() as said:
            fit = fitted(host, module, max_epochs=1, strategy={**options, "warmup_epochs": 0})
        if "loss" not in options:
            rows.append(fit["rows"])
        said_of_each.append([line for line in said.lines if "the run before" in line])
    trainer = fit["trainer"]
    if not isinstance(trainer.strategy, SingleDeviceStrategy) and trainer.is_global_zero:
        expected = [None, "another algorithm than", "stay cut at [0, 5, 8]", "another memory than"]
        expected.append("another weight_versions than")
        for lines, words in zip(said_of_each, expected, strict=True):
            assert lines == [] if words is None else words in lines[0] and len(lines) == 1, said_of_each
    return {"rows": rows}


def planned_for_other_batches(host: cases.Host) -> dict[str, Any]:
    """A fit of larger batches kept the plan that was made for smaller ones, as if it were planned by the same."""
    module, rows = cases.seeded(lambda: cases.Classifier(optimizer="sgd")), []
    for size, words in ((8, None), (16, "another size of micro-batches than")):
        recorder = cases.Recorder()
        with Said() as said:
            trainer = host.trainer(recorder, max_epochs=1, strategy={**CUT, "warmup_epochs": 0})
            trainer.fit(module, cases.loader(48, size))
        rows.append(recorder.rows)
        lines = [line for line in said.lines if "another" in line and "the run before" in line]
        if host.pipelined and trainer.is_global_zero:
            assert (words is None and not lines) or (words is not None and words in lines[0]), said.lines
    return {"rows": rows}


def whole_elsewhere(host: cases.Host) -> dict[str, Any]:
    """Each read of a layer that did not come back raises; gather_model() brings it."""
    record: dict[str, Any] = {}
    for place in ("rank_zero", "none"):
        module = cases.Classifier(optimizer="sgd")
        trainer = fitted(host, module, strategy={**CUT, "whole_model": place}, max_epochs=1)["trainer"]
        record[place] = {**ends_of(module), "gathered": gathered_state(trainer, module)}
    for kind, stops in (
        ("agreed", Interrupting(ArithmeticError)),
        ("interrupted", Interrupting(KeyboardInterrupt)),
        ("validation", InterruptingValidation()),
    ):
        module = cases.Classifier(optimizer="sgd")
        with contextlib.suppress(ArithmeticError, SystemExit):
            trainer = host.trainer(stops, strategy=CUT, max_epochs=1)
            trainer.fit(module, cases.loader(54), cases.loader(21, seed=3))
        record[kind] = {**ends_of(module), "second": fitted(host, module, strategy=CUT)["rows"]}
        record[kind]["whole"] = refused(lambda module=module: module.head.weight.sum().item())
    record["other stages"] = _spread_and_cut_otherwise(host)
    from lightning_madpipe.checkpoint import whole_model

    with unittest.mock.patch.object(whole_model, "SHARE_OF_FREE_MEMORY", 0.0), Said() as said:
        module = cases.Classifier(optimizer="sgd")
        bf16 = {"precision": "bf16-mixed", "strategy": CUT}
        trainer = fitted(host, module, max_epochs=1, **bf16)["trainer"]
        record["short"] = {**ends_of(module), "refused": refused(trainer.strategy.gather_model)}
    record["short"]["said"] = [line for line in said.lines if "whole model" in line]
    return record


def _spread_and_cut_otherwise(host: cases.Host) -> dict[str, Any]:
    module = cases.Classifier(optimizer="sgd")
    trainer = fitted(host, module, strategy={**CUT, "whole_model": "none"}, max_epochs=1)["trainer"]
    again = {"strategy": {"num_stages": 1}, "max_epochs": 1}
    sentence = refused(lambda: fitted(host, module, **again))
    trainer.strategy.gather_model()
    return {"refused": sentence, "then": refused(lambda: fitted(host, module, **again))}


class Shifted(cases.Block):
    """Has a buffer, a number of its own, and another course in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(cases.WIDTH))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor + self.shift + (0.0 if self.training else 0.25)


class Adjusted(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.blocks, self.gain = nn.ModuleList(Shifted() for _ in range(5)), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.gain * super().training_step(batch, batch_idx)


ON_RANK_ZERO = {**CUT, "whole_model": "rank_zero", "warmup_epochs": 0}


def adjusted_on_rank_zero(host: cases.Host) -> dict[str, Any]:
    """A script changes the model on rank 0, which alone has all of it, between runs and before it is saved."""
    record: dict[str, Any] = {}
    module, last = cases.seeded(Adjusted), [slice(0, 3), slice(1, 4), slice(2, 5)]
    trainer = fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1)["trainer"]
    for number in range(3):
        if trainer.is_global_zero:
            _adjust(module, last[number], number)
        if number == 1:
            path = host.folder / f"adjusted-{host.num_processes}.ckpt"
            trainer.save_checkpoint(path, weights_only=True)
            record["saved"] = _sums(torch.load(path, weights_only=False)["state_dict"])
            _adjust(module, last[0], 4) if trainer.is_global_zero else None
        trainer.test(module, cases.loader(21, seed=3), verbose=False)
        record[f"test {number}"] = cases.end(trainer)["metrics"]
        if trainer.is_global_zero:
            _adjust(module, last[number], number + 5)
        again = fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1)
        record[f"fit {number}"], trainer = again["rows"], again["trainer"]
    if trainer.is_global_zero:
        _adjust(module, last[1], 9)
    if host.pipelined:
        trainer.strategy.gather_model()
    record["gathered"] = _sums(module.state_dict())
    tied = cases.seeded(cases.TiedLanguageModel)
    words = DataLoader(TensorDataset(torch.arange(96).reshape(16, 6) % cases.VOCABULARY), batch_size=8)
    for _ in range(2):
        trainer = host.trainer(max_epochs=1, strategy={**ON_RANK_ZERO, "algorithm": [0, 3, 6]})
        trainer.fit(tied, words)
        if trainer.is_global_zero:
            with torch.no_grad():
                tied.embed.weight.mul_(0.5)
    record["tied"] = cases.end(trainer)["metrics"]
    return record


def _adjust(module: Any, blocks: slice, number: int) -> None:
    with torch.no_grad():
        module.head.weight.mul_(0.5)
        module.class_weights.add_(0.1)
        module.embed.bias.data.add_(0.1)
        for block in module.blocks[blocks]:
            block.shift.add_(0.01 * number)
            block.factor = 1.0 - 0.05 * number
            block.train(number % 2 == 0)
            block.linear.weight.requires_grad_(number % 3 > 0)


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: value.double().sum().item() for name, value in state.items()}


def layers_of_rank_zero(host: cases.Host) -> dict[str, Any]:
    """Rank 0 alone has other layers, or layers with other tensors: refused; the same on all ranks: trained."""
    record: dict[str, Any] = {}
    for kind, where in (("layer", "head"), ("part", "linear"), ("parameter", "bias")):
        module = cases.seeded(Adjusted)
        trainer = fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1)["trainer"]
        if trainer.is_global_zero:
            _replace(module, where)
        record[kind] = refused(lambda module=module: fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1))
    module = cases.seeded(Adjusted)
    trainer = fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1)["trainer"]
    trainer.strategy.gather_model()
    for where in ("head", "linear", "bias"):
        _replace(module, where)
    with Said() as said:
        record["everywhere"] = refused(lambda: fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1))
        assert not any("self.gain" in line for line in said.lines), said.lines
        module.gain = 0.5 if trainer.is_global_zero else 1.0
        fitted(host, module, strategy=ON_RANK_ZERO, max_epochs=1)
    record["said"] = [line for line in said.lines if "self.gain" in line]
    return record


def _replace(module: Any, where: str) -> None:
    if where == "head":
        module.head = nn.Linear(cases.WIDTH, cases.NUM_CLASSES)
    elif where == "linear":
        module.blocks[4].linear = nn.Sequential(nn.Linear(cases.WIDTH, 5), nn.Linear(5, cases.WIDTH))
    else:
        module.blocks[3].linear.bias = None


OTHER_VALUES = " other weights, buffers, modes or requires_grad in "


class Unnamed(cases.Steps):
    """Has layers in a plain list, where torch does not look."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        width = cases.WIDTH
        self.layers = [nn.Linear(cases.NUM_FEATURES, width), *(Shifted() for _ in range(4))]
        self.layers.append(nn.Linear(width, cases.NUM_CLASSES))

    def pipeline_layers(self) -> list[Any]:
        return self.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((weight for layer in self.layers for weight in layer.parameters()), lr=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Plain(cases.Steps):
    """Names no layers."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.body, self.neck = nn.Linear(cases.NUM_FEATURES, cases.WIDTH), cases.Block()
        self.head = nn.Linear(cases.WIDTH, cases.NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.neck(torch.tanh(self.body(x))))


def is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _change(module: Any, blocks: slice, number: int) -> None:
    """Change all but attributes of layers, of which it is said that they differ."""
    _adjust(module, blocks, number)
    for block in module.blocks:
        block.factor = 1.0


def changed_on_rank_zero(host: cases.Host) -> dict[str, Any]:
    """A script changes the model on rank 0 alone, before a run and between runs that leave it everywhere."""
    record: dict[str, Any] = {}
    strategies = {"cut": {**CUT, "warmup_epochs": 0}, "replicas": {"num_stages": 1}}
    for name, strategy in strategies.items():
        module = cases.seeded(Adjusted)
        if is_rank_zero():
            _change(module, slice(2, 5), 4)
            module.blocks.requires_grad_(True)
        with Said() as said:
            first = fitted(host, module, strategy=strategy, max_epochs=1)
        lines = [line for line in said.lines if OTHER_VALUES in line]
        assert len(lines) == (host.pipelined and is_rank_zero() and name == "cut"), said.lines  # once
        trainer, record[name] = first["trainer"], {"first": first["rows"]}
        if is_rank_zero():
            _change(module, slice(1, 4), 3)
        trainer.test(module, cases.loader(21, seed=3), verbose=False)
        record[name]["test"] = cases.end(trainer)["metrics"]
        if is_rank_zero():
            _change(module, slice(2, 5), 7)
        again = fitted(host, module, strategy=strategy, max_epochs=1)
        record[name]["again"] = again["rows"]
        if is_rank_zero():
            _change(module, slice(2, 5), 8)
        path = host.folder / f"changed-{name}-{host.num_processes}.ckpt"
        again["trainer"].save_checkpoint(path, weights_only=True)
        record[name]["saved"] = _sums(torch.load(path, weights_only=False)["state_dict"])
    return record


def built_unlike(host: cases.Host) -> dict[str, Any]:
    """Each rank draws initial weights of its own; so does a script that seeds nothing."""
    record: dict[str, Any] = {}
    kinds: list[tuple[Any, Any]] = [(Plain, None), (cases.TiedLanguageModel, [0, 3, 6])]
    words = DataLoader(TensorDataset(torch.arange(96).reshape(16, 6) % cases.VOCABULARY), batch_size=8)
    for kind, cut in kinds:
        module = cases.seeded(kind, seed=int(os.environ.get("RANK", "0")))
        strategy = {"warmup_epochs": 0, **({} if cut is None else {"algorithm": cut})}
        recorder = cases.Recorder()
        trainer = host.trainer(recorder, max_epochs=1, strategy=strategy)
        trainer.fit(module, cases.loader(32) if cut is None else words)
        record[kind.__name__] = {"rows": recorder.rows, "sums": _sums(module.state_dict())}
    return record


def layers_without_names_on_rank_zero(host: cases.Host) -> dict[str, Any]:
    """Those change on all ranks, or on rank 0 alone."""
    rows = []
    for is_changed in (True, is_rank_zero()):
        module = cases.seeded(Unnamed)
        strategy = {"algorithm": [0, 3, 6], "warmup_epochs": 0}
        for shift in (0.5, 0.25):
            if is_changed:
                module.layers[4].shift.add_(shift)
                module.layers[5].weight.data.mul_(0.5)
            rows.append(fitted(host, module, strategy=strategy, max_epochs=1)["rows"])
    return {"on all": rows[:2], "on rank 0": rows[2:]}


def layers_of_one_rank(host: cases.Host) -> dict[str, Any]:
    """Rank 0 alone has a layer with other tensors: refused; it alone has a buffer of another form: taken."""
    module = cases.seeded(Adjusted)
    fitted(host, module, strategy=CUT, max_epochs=1)
    if is_rank_zero():
        _replace(module, "bias")
    record = {"parameter": refused(lambda: fitted(host, module, strategy=CUT, max_epochs=1))}
    module = cases.seeded(Adjusted)
    module.blocks[4].register_buffer("cache", None)
    if is_rank_zero():
        module.blocks[4].cache, module.blocks[3].shift = torch.ones(3), torch.full((1,), 0.5)
    fitted(host, module, strategy=CUT, max_epochs=1)
    record["buffers"] = [module.blocks[4].cache.tolist(), module.blocks[3].shift.tolist()]
    rows, scales, zeros = torch.eye(2) + float(is_rank_zero()), torch.ones(2).double(), torch.zeros(2).long()
    for name, value in {
        "coordinates": rows.to_sparse(), "rows": rows.to_sparse_csr(), "columns": rows.to_sparse_csc(),
        "of a tensor": torch.quantize_per_tensor(torch.ones(3), 0.5 + float(is_rank_zero()), 0, torch.qint8),
        "of channels": torch.quantize_per_channel(rows, scales, zeros, 0, torch.qint8),
    }.items():  # fmt: skip
        module = cases.seeded(Adjusted)
        module.blocks[4].register_buffer("graph", value)
        record[name] = refused(lambda: fitted(host, module, strategy=CUT, max_epochs=1))  # noqa: B023
    return record


def ends_of(module: Any) -> dict[str, str]:
    inputs = torch.ones(1, cases.NUM_FEATURES)
    return {
        "embed": refused(lambda: module.embed.weight.sum().item()),
        "head": refused(lambda: module.head.weight.sum().item()),
        "call": refused(lambda: module(inputs)),
        "names": sorted(name.split(".")[0] for name in module.state_dict()),
    }


def gathered_state(trainer: Any, module: Any) -> list[float]:
    trainer.strategy.gather_model()
    return [value.double().sum().item() for value in module.state_dict().values()]


def specs_after_fit(host: cases.Host) -> dict[str, Any]:
    """Nobody but its own rank knows what a LayerSpec builds."""
    module = Specs()
    fitted(host, module, max_epochs=1, strategy={"algorithm": [0, 2, 4]})
    again = fitted(host, module, max_epochs=1, strategy={"algorithm": [0, 2, 4]})["rows"]
    return {"names": list(module.state_dict()), "call": refused(lambda: module(1)), "again": len(again)}


class CopiesBest(cases.SequentialClassifier):
    """Keeps copies of its layers as modules: as a child, in a list, and in a callback."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.best, self.kept = copy.deepcopy(self.net), [copy.deepcopy(self.net), copy.deepcopy(self.net[4])]
            self.of_one_rank = copy.deepcopy(self.net) if self.trainer.is_global_zero else None


class CopiesLayers(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            self.best = copy.deepcopy(module.net)


def copied_layers(host: cases.Host) -> dict[str, Any]:
    """Copies that hooks have made as modules, before layers move and after, are loaded when the fit has ended."""
    record: dict[str, Any] = {}
    for place, cut in (("every_rank", None), ("rank_zero", [0, 1, 5])):
        module, keeper = cases.seeded(CopiesBest), CopiesLayers()
        moving = [_RecuttingLater(cut)] if host.pipelined and cut else []
        strategy = {"algorithm": [0, 2, 5], "warmup_epochs": 0, "whole_model": place}
        with Said() as said:
            trainer = fitted(host, module, keeper, *moving, strategy=strategy, max_epochs=2)["trainer"]
        lines = [line for line in said.lines if "is a copy of layers that" in line]
        if host.pipelined and trainer.is_global_zero and place == "every_rank":
            [line] = lines
            assert "self.of_one_rank is a copy of layers that a hook has made on rank 0" in line, line
            assert "it lacks what other ranks had then, such as 2.linear.bias" in line, line
        record[f"last, {place}"] = None
        if place == "every_rank" or trainer.is_global_zero:
            sums = [_sums(module.net.state_dict())]
            for best in (module.best, module.kept[0], keeper.best):
                module.net.load_state_dict(best.state_dict())
                sums.append(_sums(module.net.state_dict()))
            module.net[4].load_state_dict(module.kept[1].state_dict())
            sums.append({"output": module(torch.ones(1, cases.NUM_FEATURES)).sum().item()})
            record[f"last, {place}"] = sums
        if host.pipelined:
            [record[f"last, {place}"]] = [each for each in _objects(record[f"last, {place}"]) if each][:1]
    return record


def _objects(value: Any) -> list[Any]:
    from deepspeed_partition.engine.runtime.collectives import gather_objects

    return gather_objects(value)


class _RecuttingLater(Recutting):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 0:
            trainer.strategy.deepspeed_engine.recut(self.cut)


class Specs(cases.Steps):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def pipeline_layers(self) -> list[Any]:
        from deepspeed.pipe import LayerSpec

        ends = [
            LayerSpec(nn.Linear, cases.NUM_FEATURES, cases.WIDTH),
            LayerSpec(cases.Block),
            LayerSpec(cases.Block),
        ]
        return [*ends, LayerSpec(nn.Linear, cases.WIDTH, cases.NUM_CLASSES)]


# Weights that train in one fit and not in another


def unfrozen_and_fitted_again(host: cases.Host) -> dict[str, Any]:
    """Fits with a frozen layer, is frozen for predict, fits unfrozen, and fits with the other end frozen."""
    module = cases.seeded(lambda: cases.Classifier(optimizer="sgd"))
    trainer = host.trainer(strategy={"warmup_epochs": 0}, max_epochs=1)
    records: dict[str, Any] = {}
    with Said() as said:
        for number, frozen in enumerate((module.embed, None, module.blocks)):
            module.requires_grad_(True)
            if frozen is not None:
                frozen.requires_grad_(False)
            trainer.fit_loop.max_epochs = number + 1
            trainer.fit(module, cases.loader(54))
            records[f"fit {number}"] = cases.end(trainer)
            module.requires_grad_(False)
            outputs = trainer.predict(module, DataLoader(cases.samples(5).tensors[0], batch_size=5))
            records[f"predict {number}"] = outputs[0].tolist()
    anew = [line for line in said.lines if "other weights train now" in line]
    if not isinstance(trainer.strategy, SingleDeviceStrategy) and trainer.is_global_zero:
        assert len(anew) == 2 and all("are measured and planned again" in line for line in anew), anew
    return records


class Typed(nn.Module):
    """A layer with numbers of several types, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        turns = torch.arange(cases.WIDTH // 2).float()
        self.register_buffer("turns", torch.polar(torch.ones_like(turns), turns))
        self.register_buffer("far", torch.tensor(1e8 + 0.25, dtype=torch.float64))
        self.scale = nn.Parameter(torch.rand(cases.WIDTH, dtype=torch.float64))
        self.phase = nn.Parameter(torch.polar(torch.ones_like(turns), turns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.reshape(len(x), -1, 2).contiguous()) * self.turns * self.phase
        moved = torch.view_as_real(turned).flatten(1).double() + self.far - 100_000_000
        return (moved * self.scale).float().tanh()


class OfSeveralTypes(cases.Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[3] = Typed(), Typed()


def types_stay(host: cases.Host) -> dict[str, Any]:
    """float64 and complex numbers were cast to float32 without a word, and trained otherwise."""
    recorder = cases.Recorder()
    module = cases.seeded(OfSeveralTypes)
    trainer = cases.trained(host, module, recorder, max_epochs=1)
    state = module.state_dict()
    return {
        **cases.fit_record(trainer, module, recorder.rows),
        "types": [str(value.dtype) for value in state.values()],
        "sums": [float(value.abs().double().sum()) for value in state.values()],
    }


def types_that_are_flattened(host: cases.Host) -> dict[str, Any]:
    def end(**strategy: Any) -> str:
        module = cases.seeded(OfSeveralTypes)
        return refused(lambda: cases.trained(host, module, max_epochs=1, strategy=strategy))

    beside = {"num_stages": 1, "algorithm": None}
    return {"flat": end(stage=1), "two pipelines": end(**beside), "flat, two pipelines": end(stage=1, **beside)}


# What layers set on themselves


class Marks(pl.Callback):
    """Sets attributes on the parameters that its rank has."""

    shared = ["one list of all"]  # noqa: RUF012

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, weight in module.named_parameters():
            weight.marked, weight.among = name, self.shared
            weight.mean = weight.detach() / 2 if hasattr(weight, "mean") else torch.zeros_like(weight)
            vars(weight).pop("until_fit", None)


def attributes_that_hooks_set(host: cases.Host) -> dict[str, Any]:
    """What hooks set on parameters is there when a fit has returned, and so what a second fit has set anew."""
    module, record = cases.seeded(cases.Classifier), {}
    for fit in ("first", "second"):
        for weight in module.parameters():
            weight.until_fit = True
        fitted(host, module, Marks(), max_epochs=1, strategy={"algorithm": [0, 3, 8]})
        record[fit] = {
            name: [weight.marked, weight.among, float(weight.mean.sum()), hasattr(weight, "until_fit")]
            for name, weight in module.named_parameters()
        }
    return record


class MakesBuffers(cases.Block):
    """Makes two buffers in its first call, one under a new name, and lets another one go."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", None)
        self.register_buffer("used", torch.ones(cases.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.made is None:
            self.made, self.used = torch.full((cases.WIDTH,), 0.5), None
        if not hasattr(self, "doubles"):
            self.register_buffer("doubles", torch.full((cases.WIDTH,), 2.0), persistent=False)
        return super().forward(x) * self.made * self.doubles


class OddMarks(pl.Callback):
    """Sets attributes on parameters that no other process can have."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for weight in module.parameters():
            weight.sparse, weight.counts = torch.eye(2).to_sparse(), defaultdict(lambda: 0)


def buffers_that_layers_make(host: cases.Host) -> dict[str, Any]:
    """Layers did not come back to a rank that had not made their buffers: the fit ended with an error."""
    record: dict[str, Any] = {}
    for place in ("every_rank", "rank_zero"):
        module = cases.seeded(cases.Classifier)
        module.blocks[0], module.blocks[4] = MakesBuffers(), MakesBuffers()
        trainer = cases.trained(host, module, OddMarks(), max_epochs=1, strategy={"whole_model": place})
        is_here = place == "every_rank" or trainer.is_global_zero
        record[place] = {
            "loss": float(trainer.callback_metrics["loss"]) if "loss" in trainer.callback_metrics else 0.0,
            "made": not is_here or all(bool((module.blocks[at].made == 0.5).all()) for at in (0, 4)),
            "used": not is_here or all(module.blocks[at].used is None for at in (0, 4)),
            "doubles": not is_here or all(bool((module.blocks[at].doubles == 2).all()) for at in (0, 4)),
            "persistent": is_here and any("doubles" in name for name in module.state_dict()),
        }
    return record


class Covariance(pl.LightningModule):
    """A step adds to a buffer, with gradients that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(cases.NUM_FEATURES, 8), nn.Linear(8, 8)
        self.register_buffer("covariance", torch.eye(8))

    def pipeline_layers(self) -> list[Any]:
        return [self.first, torch.cos, self.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).cos())

    def on_train_epoch_start(self) -> None:
        self.covariance = torch.eye(8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        scores = self(batch[0])
        self.covariance += scores.t() @ scores
        return (scores[:, 0] - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def buffers_with_gradients(host: cases.Host) -> dict[str, Any]:
    """The next fit said that other ranks had other weights, buffers, modes or requires_grad than rank 0."""
    module = cases.seeded(Covariance)
    with Said() as said:
        trainer = cases.trained(host, module, max_epochs=1, strategy={"algorithm": [0, 2, 3]})
        total = float(module.covariance.sum())
        trainer.fit(module, cases.loader(54))
    return {"total": total, "said": [line for line in said.lines if "those of rank 0 count" in line]}


class Meter:
    """An object of the program."""

    def __init__(self) -> None:
        self.total = 0


class Keeping(cases.Block):
    """Keeps of its runs what plain attributes can hold, and computes with some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_runs, self.history, self.mean = 0, [], torch.zeros(cases.WIDTH)
        self.recent, self.sizes, self.counts = deque(maxlen=3), Counter[int](), np.zeros(2, dtype=np.int64)
        self.first = None
        self.meter = Meter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_runs += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.history.append(self.mean)
            self.recent.append(float(x.sum()))
            self.sizes[len(x)] += 1
            self.counts[self.num_runs % 2] += 1
            self.first = self.mean if self.first is None else self.first
            self.meter.total += 1
            vars(self).pop("unused", None)
            self.used_for = x.dtype
        return super().forward(x) * min(1.0, self.num_runs / 20)

    def kept(self) -> dict[str, Any]:
        return {
            "runs": self.num_runs,
            "history": [mean.tolist() for mean in self.history],
            "recent": [*self.recent, self.recent.maxlen],
            "sizes": [list(pair) for pair in self.sizes.items()],
            "counts": self.counts.tolist(),
            "first": None if self.first is None else self.first.tolist(),
            "meter": self.meter.total,
            "unused": hasattr(self, "unused"),
            "used for": str(getattr(self, "used_for", None)),
        }


class Metered(cases.Block):
    """Has an object with a generator, which no other process can have."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.meter.numbers = (number for number in range(10**6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.total += self.training and next(self.meter.numbers)
        return super().forward(x)


class OfKeeping(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.blocks = nn.ModuleList(Keeping() for _ in range(5))
        for block in self.blocks:
            block.unused = 1


WHOLE_BATCHES = {**CUT, "num_micro_batches": 1, "warmup_epochs": 0}


def layers_that_keep(host: cases.Host) -> dict[str, Any]:
    """Two fits; in the second one layers move, to the other rank and back."""
    module, inputs = cases.seeded(OfKeeping), cases.samples(5).tensors[0]
    record = {}
    for name, cut in (("first", None), ("second", [0, 5, 8])):
        moving = [Recutting(cut)] if host.pipelined else []
        rows = fitted(host, module, *moving, strategy=WHOLE_BATCHES, max_epochs=1)["rows"]
        record[name] = {
            "rows": rows,
            "kept": [block.kept() for block in module.blocks],
            "outputs": module.eval()(inputs).tolist(),
        }
    return record


class Scripted(cases.Steps):
    """Some layers are scripted, and one has a scripted child."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        inner = cases.Block()
        inner.linear = torch.jit.script(inner.linear)
        blocks = [
            torch.jit.script(nn.Sequential(nn.Linear(cases.WIDTH, cases.WIDTH), nn.Tanh())) for _ in range(2)
        ]
        self.net = nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH), *blocks, inner, nn.Linear(cases.WIDTH, cases.NUM_CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def scripted_layers(host: cases.Host) -> dict[str, Any]:
    """Two fits, of which the second one moves a scripted layer to the other rank."""
    module, strategy = cases.seeded(Scripted), {"algorithm": [0, 2, 5], "warmup_epochs": 0}
    first = fitted(host, module, strategy=strategy, max_epochs=1)["rows"]
    moving = [Recutting([0, 1, 5])] if host.pipelined else []
    second = fitted(host, module, *moving, strategy=strategy, max_epochs=1)["rows"]
    return {"first": first, "second": second, "after": [weight.tolist() for weight in module.parameters()]}


def objects_of_layers_are_named(host: cases.Host) -> dict[str, Any]:
    module = cases.seeded(cases.Classifier)
    module.blocks = nn.ModuleList(Metered() for _ in range(5))
    with Said() as said:
        fitted(host, module, strategy=WHOLE_BATCHES, max_epochs=1)
    return {"said": said.lines}


SAME_AS_SINGLE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        read_where_a_file_is_expected,
        compiled_sequential,
        resumed_within_an_epoch,
        whole_again,
        optimizer_from_outside,
        tied_and_metric,
        types_stay,
        compiled_again,
        unfrozen_and_fitted_again,
        planned_otherwise,
        planned_for_other_batches,
        layers_that_keep,
        attributes_that_hooks_set,
        buffers_with_gradients,
        buffers_that_layers_make,
        scripted_layers,
        adjusted_on_rank_zero,
        changed_on_rank_zero,
        built_unlike,
        copied_layers,
        pretrained_after_fit,
    ],
    4: [],
}


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


class HangsHooks(cases.Classifier):
    """Hangs a hook on each weight while fit runs, when layers stay where they are; one was there before."""

    def __init__(self) -> None:
        super().__init__()
        self.head.bias.register_hook(doubled)

    def on_train_epoch_start(self) -> None:
        for _, weight in self.named_parameters():
            if self.current_epoch == 1:
                weight.register_hook(doubled)


def hooks_of_a_fit(host: cases.Host) -> dict[str, Any]:
    """A rank lacked the hooks that the other one had hung on its weights, and nothing was said."""
    module = cases.seeded(HangsHooks)
    with Said() as said:
        host.trainer(strategy={**CUT, "warmup_epochs": 0}, max_epochs=2).fit(module, cases.loader(16))
    num_hooks = {name: len(weight._backward_hooks or ()) for name, weight in module.named_parameters()}
    return {"said": [line for line in said.lines if "the hook " in line], "has": num_hooks}


class NamesInHook(Callback):
    """Gives its checkpoints another name on each rank while fit runs."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.checkpoint_callback.filename = f"in a hook of {trainer.global_rank}"


def names_of_each_rank(host: cases.Host) -> dict[str, Any]:
    """Names by the time of day are others on each rank: rank 1 looked for files that rank 0 had not written."""
    found: dict[str, Any] = {}
    for hooks in ([], [NamesInHook()]):
        clock = f"at {os.environ['RANK']}"  # another one on each rank
        best = ModelCheckpoint(host.folder / clock, filename=clock, every_n_train_steps=1)
        loggers = [
            CSVLogger(host.folder / "csv", name="clock", version=clock),
            TensorBoardLogger(host.folder, clock),
        ]
        trainer = host.trainer(best, *hooks, max_epochs=1, logger=loggers)
        with Said() as said:
            trainer.fit(cases.seeded(cases.Classifier), cases.loader(16))
        paths = [best.best_model_path, *(logger.log_dir for logger in trainer.loggers)]
        line = next((line for line in said.lines if "saves a checkpoint as" in line), None)
        found["hook" if hooks else "script"] = {
            "are there": [os.path.exists(path) for path in paths],
            "relative": [os.path.relpath(path, host.folder) for path in paths],
            "said": line and line.replace(str(host.folder), ""),
        }
    return found


ONLY_PIPELINE: dict[int, list[Callable[[cases.Host], dict[str, Any]]]] = {
    2: [
        types_that_are_flattened,
        objects_of_layers_are_named,
        folders_that_are_not_read,
        all_reasons,
        in_every_precision,
        whole_elsewhere,
        layers_of_rank_zero,
        layers_of_one_rank,
        layers_without_names_on_rank_zero,
        planned_again,
        specs_after_fit,
        hooks_of_a_fit,
        names_of_each_rank,
    ],
    4: [],
}
