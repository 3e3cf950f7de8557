"""Layers that change something outside of themselves while they run, which steps, hooks or nobody read.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.choice import run_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.hook_cases import lines
from tests.lightning.lightning_cases import Host, refused, seeded, trained

AUX: list[torch.Tensor] = []
LAST: dict[str, Any] = {"aux": 0.0}
STACK: list[list[torch.Tensor]] = []
MEAN = MeanMetric()
CACHE: dict[int, torch.Tensor] = {}


class Leaves(nn.Module):
    """A block that leaves something of its input somewhere."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.linear, self.leave = nn.Linear(cases.WIDTH, cases.WIDTH), leave
        self.owner: list[Any] = []
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.leave(self, x)
        return x + torch.tanh(self.linear(x))


class Module(pl.LightningModule):
    """One ``nn.Sequential``, and no code around it."""

    value: Any = 0.0

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH), nn.Tanh(), Leaves(leave), nn.Tanh(),
            nn.Linear(cases.WIDTH, cases.NUM_CLASSES),
        )  # fmt: skip
        self.net[2].owner.append(self)
        self.values: list[torch.Tensor] = []
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def aux(self) -> Any:
        return 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        AUX.clear()
        self.values.clear()
        loss = F.cross_entropy(self(batch[0]), batch[1]) + 0.3 * self.aux()
        self.log("train_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def to_global(layer: Any, x: torch.Tensor) -> None:
    AUX.append(x.abs().mean())


def to_module(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].values.append(x.abs().mean())


def anew_in_dict(layer: Any, x: torch.Tensor) -> None:
    LAST["aux"] = x.abs().mean()


def anew_on_module(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].value = x.abs().mean()


def to_stack(layer: Any, x: torch.Tensor) -> None:
    if STACK:
        STACK[-1].append(x.abs().mean())


@contextlib.contextmanager
def collected() -> Iterator[list[torch.Tensor]]:
    STACK.append([])
    try:
        yield STACK[-1]
    finally:
        STACK.pop()


class OfGlobal(Module):
    def aux(self) -> Any:
        return sum(AUX)


class OfNamedLayers(OfGlobal):
    def pipeline_layers(self) -> list[Any]:
        return list(self.net)


class Net(nn.Module):
    """Has a ``forward`` of its own, so that the layers are found."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.parts = nn.ModuleList(net)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class OfFoundLayers(OfGlobal):
    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        self.net = Net(self.net)

    def aux(self) -> Any:
        total: Any = 0.0
        for each in AUX:
            total = total + each
        return total


class OfModule(Module):
    def aux(self) -> Any:
        return sum(self.values)


class Given(OfModule):
    """Hands a method of its own to the layer."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        self.net[2].add = self.add_loss
        self.net[2].leave = lambda layer, x: layer.add(x.abs().mean())

    def add_loss(self, value: torch.Tensor) -> None:
        self.values.append(value)


class OfDict(Module):
    def aux(self) -> Any:
        return LAST["aux"]


class OfAttribute(Module):
    def aux(self) -> Any:
        return self.value


class OfStack(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with collected() as values:
            outputs = self(batch[0])
        return F.cross_entropy(outputs, batch[1]) + 0.3 * sum(values)


class Stacked(Module):
    """Raises where nothing was left."""

    def aux(self) -> Any:
        return torch.stack(AUX).mean()


class Predicts(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        AUX.clear()
        return self(batch[0]).argmax(-1), AUX[0] if AUX else None


class Logs(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("seen", self.value)
        return loss


class LogsInEvaluation(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        AUX.clear()
        self(batch[0])
        self.log("seen", AUX[0] if AUX else -1.0)


class InHook(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("number", float(len(AUX)))
        AUX.clear()


class Plain(InHook):
    def on_train_epoch_end(self) -> None:
        pass


class TwoOfThem(Plain):
    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        other = Leaves(leave)
        other.owner.append(self)
        self.net = nn.Sequential(*self.net[:3], other, self.net[4])


class InSharedDict(Plain):
    """A dict that the module and a layer name, which the last stage has."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        leaves = self.net[2]
        self.net = nn.Sequential(*self.net[:2], nn.Tanh(), leaves, self.net[4])
        leaves.table = self.table = {"sum": 0.0}

    def on_train_epoch_end(self) -> None:
        self.log("sum", self.table["sum"])


def to_own_table(layer: Any, x: torch.Tensor) -> None:
    layer.table["sum"] = layer.table["sum"] + 1.0


class ReadsMetric(Plain):
    def on_train_epoch_end(self) -> None:
        self.log("mean", MEAN.compute())
        MEAN.reset()


def to_metric(layer: Any, x: torch.Tensor) -> None:
    MEAN.update(x.detach().abs().mean())


class ReadsTrainer(Plain):
    def on_train_batch_end(self, *_: Any) -> None:
        self.log("act", self.trainer.act)


class Reads(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("number", float(len(AUX)))


class Loaded(Leaves):
    """Keeps what it has seen of its input, as experts count their samples."""

    load: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.load = x.detach().sum(0)
        return super().forward(x)


class HookReadsLoad(Plain):
    """Reads it where it may be None; or as if it were there."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None], must_be_there: bool = False) -> None:
        super().__init__(leave)
        self.net[2], self.must_be_there = Loaded(leave), must_be_there

    def on_train_batch_end(self, *_: Any) -> None:
        if self.must_be_there:
            self.net[2].load.max()
        elif self.net[2].load is not None:
            self.net[2].leave(self, self.net[2].load)


class HookNeeds(Plain):
    """A hook on a layer keeps its output, and one of Lightning reads it, where it is there or anywhere."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None], asks: bool = False) -> None:
        super().__init__(leave)
        self.asks, self.features = asks, dict[str, torch.Tensor]()
        self.net[2].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.features["block"] = output.detach()

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.asks or "block" in self.features:
            self.features["block"].norm()


class OwnsMetric(Plain):
    """A metric that a layer calls."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        self.mean = MeanMetric()


class Around(nn.Module):
    """Its code is written down, and not run."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.first, self.last = net[:3], net[3:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.flatten(self.first(x), 1))


class MetricInForward(Module):
    """A metric that the code of a forward calls whose layers are found, and a count that it sets."""

    def __init__(self, leave: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__(leave)
        self.net, self.num_calls = Around(self.net), 0
        self.accuracy = MulticlassAccuracy(cases.NUM_CLASSES, average="micro")

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        logits = self.net(batch[0])
        self.num_calls += 1
        self.accuracy(logits, batch[1])
        return F.cross_entropy(logits, batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch).mean()

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.accuracy._update_count == 0, "a capture has left what it counted"


def calls_metric(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].mean(x.detach().abs().mean())


def to_trainer(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].trainer.act = x.detach().abs().mean()


def to_buffer(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].average.lerp_(x.detach().abs().mean(), 0.1)


def logs(layer: Any, x: torch.Tensor) -> None:
    layer.owner[0].log("inner", x.abs().mean())


def logs_in_evaluation(layer: Any, x: torch.Tensor) -> None:
    if not layer.training:
        layer.owner[0].log_dict({"inner": x.abs().mean()})


def counts(layer: Any, x: torch.Tensor) -> None:
    layer.num_calls += 1


def caches(layer: Any, x: torch.Tensor) -> None:
    if x.shape[-1] not in CACHE:
        CACHE[x.shape[-1]] = torch.ones(x.shape[-1])


def nothing(layer: Any, x: torch.Tensor) -> None:
    pass


KINDS: dict[str, tuple[Callable[..., Module], Callable[[Any, torch.Tensor], None]]] = {
    "a list of the file": (OfGlobal, to_global),
    "a list of the file, layers that are named": (OfNamedLayers, to_global),
    "a list of the file, layers that are found": (OfFoundLayers, to_global),
    "a list of the module": (OfModule, to_module),
    "a method of the module": (Given, nothing),
    "a dict": (OfDict, anew_in_dict),
    "an attribute": (OfAttribute, anew_on_module),
    "a context manager": (OfStack, to_stack),
    "a step that raises without it": (Stacked, to_global),
    "what a step logs": (Logs, anew_on_module),
    "what an evaluation logs": (LogsInEvaluation, to_global),
    "a hook": (InHook, to_global),
    "a callback": (lambda leave: Plain(leave), to_global),
    "a dict that both name": (InSharedDict, to_own_table),
    "a metric of the file": (ReadsMetric, to_metric),
    "the Trainer": (ReadsTrainer, to_trainer),
    "a buffer of the module": (Plain, to_buffer),
    "a metric that a layer calls": (OwnsMetric, calls_metric),
    "a metric in a forward that is written down": (MetricInForward, nothing),
    "a layer that logs": (Plain, logs),
    "two layers that log": (TwoOfThem, logs),
    "a layer that logs in evaluation": (LogsInEvaluation, logs_in_evaluation),
    "own load that a hook reads": (HookReadsLoad, nothing),
    "own load that a hook needs": (lambda leave: HookReadsLoad(leave, must_be_there=True), nothing),
    "a feature that a hook needs": (HookNeeds, nothing),
    "a feature that a hook asks for": (lambda leave: HookNeeds(leave, asks=True), nothing),
    "own count": (Plain, counts),
    "a cache": (Plain, caches),
    "a list that nobody reads": (Plain, to_global),
    "none": (Module, nothing),
}


def said_of_layers(host: Host) -> dict[str, Any]:
    """What is said of what layers leave, and what is refused."""

    def fit(name: str) -> list[str]:
        build, leave = KINDS[name]
        AUX.clear()
        LAST["aux"] = 0.0
        callbacks = [Reads()] if name == "a callback" else []
        with lines() as said, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module = seeded(lambda: build(leave))
            validation = cases.loader(16, seed=3) if build is LogsInEvaluation else None
            error = refused(
                lambda: trained(
                    host,
                    module,
                    *callbacks,
                    data=cases.loader(16),
                    max_epochs=1,
                    validation=validation,
                    strategy={"algorithm": [0, 1, 3] if build is MetricInForward else [0, 3, 5]},
                )
            )
        every = [*said, *(str(each.message) for each in caught), error]
        words = ("while it runs", "while they run", "of a layer, too", "is not run in a pipeline")
        return [line.split("] ")[-1] for line in every if any(word in line for word in words) or line is error]

    return run_chosen({name: lambda name=name: fit(name) for name in KINDS})


def said_of_predictions(host: Host) -> str:
    trainer = host.trainer(strategy={"algorithm": [0, 3, 5]})
    return refused(lambda: trainer.predict(seeded(lambda: Predicts(to_global)), cases.loader(16)))


class HandsOn(nn.Module):
    """Runs a layer, and hands a number for each sample on beside its output."""

    def __init__(self, layer: nn.Module, makes: bool = False) -> None:
        super().__init__()
        self.layer, self.makes = layer, makes

    def forward(self, given: Any) -> Any:
        if self.makes:
            return self.layer(given), given.abs().mean(1)
        x, value = given
        return self.layer(x), value


class WayOut(Module):
    """What the sentence says to do."""

    def __init__(self) -> None:
        super().__init__(nothing)
        first, second, leaves, *behind = self.net
        self.net = nn.Sequential(first, second, HandsOn(leaves, True), *map(HandsOn, behind))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs, value = self(batch[0])
        loss = F.cross_entropy(outputs, batch[1]) + 0.3 * value.mean()
        self.log("aux", value.mean(), on_epoch=True)
        return loss


def handed_on(host: Host) -> dict[str, Any]:
    """An auxiliary loss of a layer that travels with its output."""
    recorder = cases.Recorder()
    strategy = {"algorithm": [0, 3, 5]}
    trainer = trained(host, seeded(WayOut), recorder, data=cases.loader(54), max_epochs=2, strategy=strategy)
    return {"rows": recorder.rows, "aux": float(trainer.callback_metrics["aux_epoch"])}


class SetsWeights(nn.Module):
    """Halves its weight in its first call, and notes that it has, as data-dependent initialization does.

    Args:
        notes: Where it notes it.
    """

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(cases.WIDTH, cases.WIDTH) / 3)
        self.notes, self.is_ready = notes, False
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready and self.ready.item() == 0:
            if self.notes == "attribute":
                self.weight.data.mul_(0.5)  # which torch does not count
                self.is_ready = True
            elif self.notes == "buffer":
                with torch.no_grad():
                    self.weight.mul_(0.5)
                self.ready += 1
            else:
                self.weight.data = self.weight.data * 0.5
                self.ready = self.ready + 1
        return torch.tanh(x @ self.weight)


class SetsInSequence(Module):
    def __init__(self, notes: str, kind: type[SetsWeights] = SetsWeights) -> None:
        super().__init__(nothing)
        first, *_, last = self.net
        self.net = nn.Sequential(first, *(kind(notes) for _ in range(3)), last)


class SetsInFoundLayers(SetsInSequence):
    def __init__(self, notes: str) -> None:
        super().__init__(notes)
        self.net = Net(self.net)


class SetsInNamedLayers(SetsInFoundLayers):
    def pipeline_layers(self) -> list[Any]:
        return list(self.net.parts)


class DecidingNet(Net):
    """Decides by data before its elements, which are the layers therefore."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if x.mean() > 50 else x)


class SetsInElements(SetsInSequence):
    def __init__(self, notes: str) -> None:
        super().__init__(notes)
        self.net = DecidingNet(self.net)


SETS_WEIGHTS = {
    "one nn.Sequential, a buffer": (SetsInSequence, "buffer"),
    "one nn.Sequential, a new buffer": (SetsInSequence, "new buffer"),
    "one nn.Sequential, an attribute": (SetsInSequence, "attribute"),
    "layers that are found, a buffer": (SetsInFoundLayers, "buffer"),
    "layers that are found, a new buffer": (SetsInFoundLayers, "new buffer"),
    "layers that are found, an attribute": (SetsInFoundLayers, "attribute"),
    "elements, a buffer": (SetsInElements, "buffer"),
    "elements, a new buffer": (SetsInElements, "new buffer"),
    "elements, an attribute": (SetsInElements, "attribute"),
    "layers that are named, a buffer": (SetsInNamedLayers, "buffer"),
    "layers that are named, an attribute": (SetsInNamedLayers, "attribute"),
}
"""Modules whose layers set weights in their first call, and where these note that they have."""


def weights_set_once(host: Host) -> dict[str, Any]:
    """Losses and weights of layers that set weights when they are first called."""

    def fit(name: str) -> dict[str, Any]:
        build, notes = SETS_WEIGHTS[name]
        recorder = cases.Recorder()
        module = seeded(lambda: build(notes))
        # Cut between its elements, with the code around them: so is what is noted in an attribute.
        is_of_elements = build is SetsInElements or name == "layers that are found, an attribute"
        cut = [0, 3, 7] if is_of_elements else [0, 2, 5]
        with lines() as said:
            trained(host, module, recorder, data=cases.loader(32), max_epochs=1, strategy={"algorithm": cut})
        return {"rows": recorder.rows, "said": [line for line in said if "depends on the others" in line]}

    return run_chosen({name: lambda name=name: fit(name) for name in SETS_WEIGHTS})


class SetsNamedWeights(SetsWeights):
    """Of a class of its own, of which the job has said nothing yet."""


class SetsOtherWeights(SetsWeights):
    """Another one."""


def said_of_weights(host: Host) -> list[list[str]]:
    """What is said of layers whose forward() writes to their weights, without ZeRO and with it."""

    def fit(kind: type[SetsWeights], stage: int) -> list[str]:
        module = seeded(lambda: SetsInSequence("buffer", kind))
        with lines() as said:
            strategy = {"algorithm": [0, 2, 5], "stage": stage}
            host.trainer(strategy=strategy, max_steps=3).fit(module, cases.loader(32))
        return [line for line in said if "writes to its weights" in line]

    return [fit(SetsNamedWeights, 0), fit(SetsOtherWeights, 1)]


SAME_AS_SINGLE: dict[int, list[Callable[[Host], Any]]] = {2: [handed_on, weights_set_once], 4: []}
ONLY_PIPELINE: dict[int, list[Callable[[Host], Any]]] = {
    2: [said_of_layers, said_of_predictions, said_of_weights],
    4: [],
}
