"""Cases: names of parameters, groups by name, hooks and attributes from before, what is said of layers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.choice import is_chosen, run_chosen
from tests.in_backward import in_backward
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import NUM_CLASSES, NUM_FEATURES, WIDTH, Host

MOVES = {"algorithm": [0, 4, 5], "warmup_steps": 2, "warmup_epochs": 0}


class ByName(cases.SequentialClassifier):
    """A rate of its own for the last layer, and no decay of biases, both told by names."""

    def configure_optimizers(self) -> Any:
        last = [weight for name, weight in self.named_parameters() if name.startswith("net.4")]
        biases = [
            weight for name, weight in self.named_parameters() if name.endswith("bias") and "net.4" not in name
        ]
        named = {id(weight) for weight in (*last, *biases)}
        rest = [weight for weight in self.parameters() if id(weight) not in named]
        assert len(last) == 2 and len(biases) == 3 and len(rest) == 3
        return torch.optim.AdamW(
            [{"params": rest}, {"params": biases, "weight_decay": 0.0}, {"params": last, "lr": 1e-4}], lr=2e-2
        )


class PerParameter(cases.SequentialClassifier):
    """A group per parameter, as layer-wise rates are written."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [weight], "lr": 0.3 / (i + 1)} for i, weight in enumerate(self.parameters())]
        return torch.optim.SGD(groups, lr=0.1)


class Named(cases.SequentialClassifier):
    """What `named_parameters` are passed to the optimizer, as newer versions of torch allow."""

    def configure_optimizers(self) -> Any:
        weights = dict(self.named_parameters())
        return torch.optim.SGD([weights[name] for name in sorted(weights)], lr=0.2, momentum=0.5)


def groups_by_name(host: Host) -> dict[str, Any]:
    def grouped(build: Callable[[], Any], strategy: dict[str, Any]) -> dict[str, Any]:
        record = cases.fit(host, build, cases.loader(54), strategy=strategy)
        del record["rates"]  # ZeRO's optimizer has the groups of its rank
        return record

    return run_chosen(
        {
            "by name": lambda: grouped(ByName, {}),
            "by name, moved": lambda: grouped(ByName, MOVES),
            "by name, moved with ZeRO": lambda: grouped(ByName, {**MOVES, "stage": 1}),
            "per parameter": lambda: grouped(PerParameter, {}),
            "per parameter, moved": lambda: grouped(PerParameter, MOVES),
            "named": lambda: grouped(Named, {}),
            "named, moved": lambda: grouped(Named, MOVES),
        }
    )


class Normalized(cases.Steps):
    """Layers whose weights are made of others, and a frozen batch normalization; a hook doubles an output."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.first = nn.utils.weight_norm(nn.Linear(NUM_FEATURES, WIDTH))
        self.second = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        prune.l1_unstructured(self.third, "weight", amount=0.5)
        self.fourth = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        with torch.no_grad():
            self.norm.running_mean.normal_()
        self.norm.eval()
        self.second.register_forward_hook(lambda layer, arguments, output: output * 2)
        for name, weight in self.named_parameters():
            weight.original_name, weight.no_decay = name, name.endswith("bias")
            weight.tensor_model_parallel = weight.dim() > 1
        self.fourth.weight.register_hook(lambda gradient: gradient * 0.25)
        self.head.bias.register_hook(lambda gradient: gradient * 3)

    def pipeline_layers(self) -> list[Any]:
        return [self.first, self.second, self.norm, torch.tanh, self.third, self.fourth, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not self.norm.training
        return self.head(self.fourth(self.third(torch.tanh(self.norm(self.second(self.first(x)))))))


class Attributes(Callback):
    """Whether parameters have what the user gave them, in every step."""

    complete = True

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for name, weight in module.named_parameters():
            self.complete &= weight.original_name == name and weight.no_decay == name.endswith("bias")
            self.complete &= weight.tensor_model_parallel == (weight.dim() > 1)


def hooks_and_attributes(host: Host) -> dict[str, Any]:
    records = []
    for strategy in ({"warmup_epochs": 0}, {**MOVES, "algorithm": [0, 5, 7]}):
        attributes = Attributes()
        record = cases.fit(host, Normalized, cases.loader(54), callbacks=[attributes], strategy=strategy)
        records.append({**record, "attributes": attributes.complete})
    return {"records": records}


class Around(cases.SequentialClassifier):
    """Hooks on what is called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_pre_hook(lambda net, arguments: (arguments[0] * 0.5,))
        self.net.register_forward_hook(lambda net, arguments, output: output + 0.1)
        self.register_forward_hook(lambda module, arguments, output: output * 0.5)


def hooks_around(host: Host) -> dict[str, Any]:
    return cases.fit(host, Around, cases.loader(54))


# In a pipeline only


LOOKED_IN = (
    "setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_epoch_end", "on_save_checkpoint",
    "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip
"""Hooks of callbacks, and of modules."""


class Watch(Callback):
    """The names that a rank sees in hooks, and what it gets for those of other ranks."""

    def __init__(self) -> None:
        self.seen: dict[str, list[str]] = {}
        self.got: dict[str, Any] = {}

    def look(self, hook: str, module: Any) -> None:
        hook = f"{hook} {min(module.trainer.global_step, 3)}"
        names = [name for name, _ in module.named_parameters()]
        assert names == [name for name in module.state_dict() if name != "class_weights"]
        self.seen[hook] = names
        for name in ("net.0.weight", "net.2.linear.bias", "net.4.weight"):
            try:
                weight = module.get_parameter(name)
                self.got[f"{hook} {name}"] = float(weight.detach().sum())
                assert any(weight is here for here in module.parameters())
            except RuntimeError as error:
                self.got[f"{hook} {name}"] = str(error)
            assert module.get_submodule(name.rpartition(".")[0]) is not None


class Watched(ByName):
    """Looks in its own hooks, too."""


WATCH = Watch()
"""What ``Watched`` tells: an attribute of the module would be looked at, too."""


def looks(hook: str) -> None:
    """Let ``Watch`` and ``Watched`` look in ``hook``."""
    overridden = getattr(Watched, hook)

    def of_callback(self: Watch, trainer: Any, module: Any, *_: Any, **__: Any) -> None:
        self.look(f"callback {hook}", module)

    def of_module(self: Watched, *arguments: Any, **keywords: Any) -> None:
        overridden(self, *arguments, **keywords)
        WATCH.look(f"module {hook}", self)

    setattr(Watch, hook, of_callback)
    setattr(Watched, hook, of_module)


for each in LOOKED_IN:
    looks(each)


def names_in_hooks(host: Host) -> dict[str, Any]:
    callbacks = [WATCH, ModelCheckpoint(host.folder / "watched", save_last=True)]
    cases.fit(host, Watched, cases.loader(54), callbacks=callbacks, strategy=MOVES)
    everything = [name for name, _ in ByName().named_parameters()]
    return {"seen": WATCH.seen, "got": WATCH.got, "all": everything, "hooks": LOOKED_IN}


class LeftOut(cases.Classifier):
    """What the refusal of a module without ``pipeline_layers()`` suggests, with a ReLU forgotten."""

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, self.head]


class OnlyInTraining(cases.Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits if self.training else logits.softmax(-1)


class Contained(cases.Steps):
    """Layers in a module that ``forward`` calls, with a hook on it."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.encoder = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.encoder.register_forward_hook(self.collect)

    def collect(self, *_: Any) -> None: ...

    def pipeline_layers(self) -> list[Any]:
        return [*self.encoder, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class Synchronized(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.SyncBatchNorm(WIDTH))


class BatchNormalized(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(WIDTH))
        self.net.insert(3, nn.BatchNorm1d(WIDTH).eval())
        self.net.insert(5, nn.BatchNorm1d(WIDTH))
        self.net[0].weight.register_hook(lambda gradient: gradient)
        self.net[0].register_forward_hook(lambda *_: None)
        self.net[2].register_full_backward_hook(lambda *_: None)


class InstanceNormalized(cases.SequentialClassifier):
    """Normalizes each sample by itself, with running statistics and without."""

    def __init__(self) -> None:
        super().__init__()
        kept, plain = nn.InstanceNorm1d(4, track_running_stats=True), nn.InstanceNorm1d(4)
        self.net.insert(1, nn.Sequential(nn.Unflatten(1, (4, -1)), kept, plain, nn.Flatten()))


class Centered(nn.Module):
    """Mixes samples, keeps a count and an average, and draws, all without a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average, self.generator = 0, 0.0, random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * float(x.detach().mean())
        return x - x.mean(0) / self.calls - self.average * self.generator.random()


class Divided(nn.Module):
    """Divides the gradient by its norm over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return in_backward(x, lambda gradient: gradient / gradient.norm())


class Gated(nn.Module):
    """Decides for all samples that it is given, and always alike."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.mean() < 1e9 else -x


class CenteredClassifier(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Centered())
        self.net.insert(3, Divided())
        self.net.insert(4, Gated())


class MixingLater(nn.Module):
    """Mixes samples by as much as it is told to, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.share, self.calls = 0.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.share * x.mean(0)


class ChangedLater(cases.SequentialClassifier):
    """Hooks let layers mix samples in the second epoch, and hang hooks on layers and weights in the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(WIDTH).eval())
        self.net.insert(2, MixingLater())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[1].train()
            self.net[2].share = 0.5
        elif self.current_epoch == 2:
            self.net[0].register_forward_hook(lambda layer, arguments, output: output - output.mean(0))
        elif self.current_epoch == 3:
            self.net[0].weight.register_hook(lambda gradient: gradient / gradient.norm())
            self.net[-1].bias.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "seen", True))


class MixingWithin(nn.Module):
    """Mixes samples by as much as its buffers, its dict and its list say together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("share", torch.zeros(()))
        self.settings, self.shares = {"share": 0.0}, [0.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x + (self.share + self.settings["share"] + sum(self.shares)) * x.mean(0)


class ChangedWithin(cases.SequentialClassifier):
    """A hook lets one layer after the other mix samples within an epoch, on either rank."""

    def __init__(self) -> None:
        super().__init__()
        for place in (1, 2, 5, 6, 7):
            self.net.insert(place, MixingWithin())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1:
            self.net[1].share.data.fill_(0.5)
        elif self.global_step == 2:
            self.net[2].shares.append(0.5)
        elif self.global_step == 3:
            self.net[5].share.fill_(0.5)
        elif self.global_step == 4:
            self.net[6].share = torch.tensor(0.5)
        elif self.global_step == 5:
            self.net[7].settings["share"] = 0.5


class Tempered(nn.Module):
    def __init__(self, settings: dict[str, float]) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.settings["factor"]


class TemperedClassifier(cases.SequentialClassifier):
    """Its step changes in place what a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.counts = {"factor": 1.0}, {"steps": 0}
        self.net.insert(1, Tempered(self.settings))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.settings["factor"] = 1.0 / (1 + self.global_step)
        self.counts["steps"] = self.global_step + 1
        return loss


class Ranged(nn.Module):
    """Observes a range as ``FakeQuantize`` of torch does: a buffer that has its shape from the first data on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("observer_enabled", torch.ones(1, dtype=torch.uint8))
        self.register_buffer("range", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                seen = x.abs().amax(0)
                old = seen if not self.range.numel() else 0.9 * self.range + 0.1 * seen
                self.range.resize_(seen.shape).copy_(old)
        if not self.range.numel():
            return x
        limit = self.range.clone()  # the next micro-batch comes before the backward of this one
        return torch.minimum(torch.maximum(x, -limit), limit)


class RangedClassifier(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Ranged())


def whole_batches(host: Host) -> dict[str, Any]:
    """With one micro-batch a layer may do all that, and trials leave nothing of it."""
    strategy = {"num_micro_batches": 1, "algorithm": [0, 4, 8], "warmup_epochs": 0}
    return cases.fit(host, CenteredClassifier, cases.loader(32), max_epochs=1, strategy=strategy)


def said_of_layers(host: Host) -> dict[str, Any]:
    def refused(module: Any, max_epochs: int = 1, num_samples: int = 16, **strategy: Any) -> str:
        try:
            trainer = host.trainer(max_epochs=max_epochs, strategy=strategy)
            trainer.fit(module, cases.loader(num_samples), cases.loader(16, seed=3))
        except MisconfigurationException as refusal:
            return str(refusal)
        return "not refused"

    def warned(build: Callable[[], Any] = BatchNormalized, **strategy: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert refused(build(), **strategy) == "not refused"
        return [str(each.message) for each in caught if str(each.message).startswith("madpipe: ")]

    return {
        "left out": refused(LeftOut()),
        "left out, unchecked": warned(LeftOut, check_layers=False),
        "in evaluation": refused(OnlyInTraining()),
        "hook on a container": refused(Contained()),
        "synchronized": refused(Synchronized()),
        "batch normalization": warned(warmup_epochs=0),
        "one micro-batch": warned(num_micro_batches=1, warmup_epochs=0),
        "one sample": refused(BatchNormalized(), num_samples=20, warmup_epochs=0),
        "instances": warned(InstanceNormalized, warmup_epochs=0),
        "centered": warned(CenteredClassifier, warmup_epochs=0),
        "changed later": warned(ChangedLater, warmup_epochs=0, max_epochs=4),
        "changed later, unchecked": warned(ChangedLater, warmup_epochs=0, max_epochs=4, check_layers=False),
        "changed within": warned(ChangedWithin, algorithm=[0, 5, 10], num_samples=96),
        "tempered": warned(TemperedClassifier, warmup_epochs=0),
        "observed": warned(RangedClassifier, warmup_epochs=0),
    }


# What changes while training runs


class Scaled(cases.Classifier):
    """``forward`` halves its output from the third epoch on."""

    scale = 1.0

    def on_train_epoch_start(self) -> None:
        self.scale = 0.5 if self.current_epoch >= 2 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x if self.scale == 1.0 else x * self.scale


class Settings:
    scale = 1.0


class ScaledBySettings(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.settings = {"head": Settings()}

    def on_train_epoch_start(self) -> None:
        self.settings["head"].scale = 0.5 if self.current_epoch >= 2 else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = cases.Classifier.forward(self, x), self.settings["head"].scale
        return x if scale == 1.0 else x * scale


FACTORS = {"scale": 1.0}


def factor() -> float:
    return FACTORS["scale"]


class ScaledByCalls(Scaled):
    """By what a function of the file reads that a method calls."""

    def on_train_epoch_start(self) -> None:
        FACTORS["scale"] = 0.5 if self.current_epoch >= 2 else 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if factor() == 1.0 else x * factor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(cases.Classifier.forward(self, x))


class ScaledByEpoch(cases.Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * 0.5 if self.current_epoch >= 2 else x


class ScaledInEvaluation(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cases.Classifier.forward(self, x) if self.training else super().forward(x)


class Replaced(cases.Classifier):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.head = nn.Linear(WIDTH, NUM_CLASSES)


class Unfrozen(cases.Classifier):
    """A layer at either end is frozen for two epochs."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.embed.requires_grad_(False)
        self.blocks[4].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.embed.requires_grad_(True)
            self.blocks[4].requires_grad_(True)


class FrozenLater(cases.Classifier):
    """From the second epoch on, within the warm-up, the first stage has nothing to train."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.embed.requires_grad_(False)
            self.blocks[:3].requires_grad_(False)


class UnfrozenWithoutRate(Unfrozen):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.3)


class Dropping(cases.Classifier):
    """A rate of dropout that a hook raises: everything is dropped from the third epoch on."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.drop, self.num_calls = nn.Dropout(0.0), 0

    def pipeline_layers(self) -> list[Any]:
        return [self.embed, *self.blocks, self.drop, self.head]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_calls > 100:  # which changes before each step, and changes nothing
            x = x * 2
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(x))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_calls += 1

    def on_train_epoch_start(self) -> None:
        self.drop.p = 1.0 if self.current_epoch >= 2 else 0.0


def alike_later(host: Host) -> dict[str, Any]:
    cut, warm_up = {"algorithm": [0, 4, 8]}, {"warmup_steps": 3, "warmup_epochs": 0}
    return {
        build.__name__: cases.fit(host, build, cases.loader(32), max_epochs=4, strategy={**given, **warm_up})
        for build, given in ((Unfrozen, cut), (Dropping, cut), (FrozenLater, {}))
    }


class Auxiliary(cases.Block):
    """Leaves a loss on itself, as the experts of a mixture do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.balance(x)
        return x

    def balance(self, x: torch.Tensor) -> None:
        self.auxiliary_loss = x.square().mean()


class WithAuxiliary(cases.Classifier):
    place = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks[self.place] = Auxiliary()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.blocks[self.place].auxiliary_loss


class WithAuxiliaryAtTheEnd(WithAuxiliary):
    place = 4


class Collecting(cases.Block):
    losses: list[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.losses.append(x.square().mean())
        return x


class WithCollected(cases.Classifier):
    """Layers leave losses in a list of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        for place in (0, 4):
            self.blocks[place] = Collecting()
            self.blocks[place].losses = self.losses

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.losses.clear()
        return super().training_step(batch, batch_idx) + sum(self.losses)


class PenalizedGradient(cases.Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        outputs = self(x).square().sum()
        [gradient] = torch.autograd.grad(outputs, x, create_graph=True, allow_unused=True)
        return outputs if gradient is None else outputs + gradient.square().sum()


class Compiled(cases.SequentialClassifier):
    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")


class Asking(cases.Classifier):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.global_step > 100 or x.mean() > 100:
            x = 2 * x
        return super().forward(x)


def different_later(host: Host) -> dict[str, Any]:
    """What ends each run, with its losses until then; and what is said where none is ended."""
    record: dict[str, Any] = {}
    builds = [
        Scaled, ScaledBySettings, ScaledByCalls, ScaledByEpoch, ScaledInEvaluation, Replaced, Unfrozen,
        UnfrozenWithoutRate, WithAuxiliary, WithAuxiliaryAtTheEnd, WithCollected, PenalizedGradient, Compiled,
        Asking,
    ]  # fmt: skip
    for build in builds:
        if not is_chosen(build.__name__):
            continue
        strategy = {"algorithm": [0, 4, 8], "warmup_epochs": 0, "stage": int(build is Unfrozen)}
        if build is Compiled:
            strategy["algorithm"] = [0, 3, 5]
        recorder = cases.Recorder()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            trainer = host.trainer(recorder, max_epochs=3, strategy=strategy)
            try:
                trainer.fit(build(), cases.loader(32), cases.loader(16, seed=3))
                end = "not refused"
            except MisconfigurationException as refusal:
                end = str(refusal)
        said = [str(each.message) for each in caught if str(each.message).startswith("madpipe: ")]
        record[build.__name__] = {"end": end, "num_steps": len(recorder.rows), "said": said}
    return record


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [groups_by_name, hooks_and_attributes, hooks_around, alike_later, whole_batches],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [names_in_hooks, said_of_layers, different_later],
    4: [],
}
