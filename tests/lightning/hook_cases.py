"""Hooks and optimizers that look at all parameters or gradients, of which a rank has those of its own layers.

Written like ``lightning_cases.py``.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, LambdaCallback, ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.utilities import grad_norm, rank_zero_only
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases
from tests.lightning.lightning_cases import CUT, Host, refused, seeded, trained

LARGEST = 0.05
"""A norm that every step has to be clipped to."""


class Module(cases.Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.norms: list[float] = []

    def note(self, norm: torch.Tensor) -> None:
        self.norms.append(float(norm))


# Equal to one process


class ClippedBefore(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(clip_grad_norm_(self.parameters(), LARGEST))


class ClippedByGroups(Module):
    def on_after_backward(self) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.note(torch.nn.utils.clip_grad_norm_([w for g in groups for w in g["params"]], LARGEST, norm_type=1))


class ClippedInPieces(Module):
    """One layer by its own norm, which one rank has; the largest element of all; each weight by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for block in (self.embed, self.blocks, self.head):
            self.note(clip_grad_norm_(block.parameters(), LARGEST))
        self.note(clip_grad_norm_(self.parameters(), LARGEST, norm_type=math.inf))
        for weight in self.parameters():
            clip_grad_norm_(weight, LARGEST / 4)


class ClippedByLightning(Module):
    """By the LightningModule's own method, which DeepSpeed's precision of Lightning leaves without effect."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=LARGEST, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=LARGEST / 10, gradient_clip_algorithm="value")


class TakenAwayAndClipped(Module):
    """One rank has no gradients, of which torch 2.13 makes an error."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in (*self.embed.parameters(), *self.blocks.parameters()):
            weight.grad = None
        torch.nn.utils.clip_grad_value_(self.parameters(), LARGEST / 10)


class ClippedByValue(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=LARGEST, gradient_clip_algorithm="value")


class ClippingCallback(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.note(clip_grad_norm_([weight for weight in module.parameters() if weight.requires_grad], LARGEST))


class ClippedTied(cases.TiedLanguageModel):
    """The gradient of the embedding is on both ranks, and counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(clip_grad_norm_(self.parameters(), LARGEST)))


def norms_over_ranks(host: Host) -> dict[str, Any]:
    record = {}
    alone = (ClippedBefore, ClippedByGroups, ClippedInPieces, ClippedByLightning, TakenAwayAndClipped)
    for build in (*alone, ClippedTied):
        module, recorder, tied = seeded(build), cases.Recorder(), build is ClippedTied
        tokens = torch.randint(cases.VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(4))
        data = DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16) if tied else None
        trained(host, module, recorder, data=data, strategy={"algorithm": [0, 3, 6] if tied else CUT})
        record[build.__name__] = {"rows": recorder.rows, "norms": module.norms}
    module, recorder = seeded(Module), cases.Recorder()
    trained(host, module, recorder, ClippingCallback())
    record["callback"] = {"rows": recorder.rows, "norms": module.norms}
    module, recorder = seeded(Module), cases.Recorder()
    clips = LambdaCallback(on_before_optimizer_step=ClippingCallback().on_before_optimizer_step)
    trained(host, module, recorder, LambdaCallback(on_train_start=lambda *_: None), clips)
    return {**record, "second of a class": {"rows": recorder.rows, "norms": module.norms}}


class EachByItself(Module):
    """What hooks do to one parameter after the other, with numbers of its own."""

    def on_fit_start(self) -> None:
        self.averages = {name: weight.detach().clone() for name, weight in self.named_parameters()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            weight.grad.data.clamp_(-0.1, 0.1)
            weight.grad.mul_((LARGEST / weight.grad.norm()).clamp(max=1))
            weight.grad.mul_(min(1.0, LARGEST / 2 / float(weight.grad.norm())))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.clamp_(-1, 1)
                self.averages[name].lerp_(weight, 0.1)
            torch._foreach_mul_(list(self.parameters()), 0.999)


def each_by_itself(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    with lines() as said:
        trained(host, seeded(EachByItself), recorder)
    return {"rows": recorder.rows, "said": [line for line in said if line.startswith("on_")]}


class ByPlaces(Module):
    """Factors by the places of parameters, as layer-wise rates have."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for place, weight in enumerate(self.parameters()):
            weight.grad.mul_(1 / (1 + place))
        for weight in list(self.parameters())[:2]:
            weight.grad.zero_()
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        weights[-1].grad.data.add_(0.01 * weights[-1].norm() * weights[-1].detach())
        clip_grad_norm_(weights[1:4], LARGEST)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for factor, (_, weight) in zip([0.9, 0.8, 0.7], self.named_parameters(), strict=False):
                weight *= factor
            torch._foreach_mul_(list(self.parameters())[3:], 0.999)
            for place, weight in enumerate(self.blocks.parameters()):
                weight.copy_(weight.clamp(-1, 1) * 0.99**place)


def by_places(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    trained(host, seeded(ByPlaces), recorder)
    return {"rows": recorder.rows}


class LogsFeatures(Module):
    """Logs what a hook on the last layer keeps, which runs right before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, torch.Tensor] = {}
        for name in ("embed", "head"):
            self.get_submodule(name).register_forward_hook(self.keep(name))

    def keep(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            self.features[name] = output

        return hook

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("of head", self.features["head"].square().mean(), on_epoch=True)
        self.log("of rows", 2.0 * self.features["head"].abs().sum(-1).mean())
        return loss


class Gate(nn.Module):
    """A block whose buffers hooks set, as annealing does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(cases.WIDTH, cases.WIDTH)
        self.register_buffer("heat", torch.ones(()))
        self.register_buffer("shift", torch.zeros(cases.WIDTH))
        self.register_buffer("share", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) / self.heat + self.shift) * self.share


class Gated(Module):
    """A gate on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0], self.blocks[4] = Gate(), Gate()


class Annealed(Gated):
    """Loads another model and draws layers anew, sets and changes tensors of single layers by their names."""

    drawn = 0.0

    def on_fit_start(self) -> None:
        torch.manual_seed(5)
        self.load_state_dict(type(self)().state_dict())
        for layer in (self.embed, self.head):
            layer.reset_parameters()
            nn.init.orthogonal_(layer.weight)
        self.head.bias.data.copy_(torch.randn(cases.NUM_CLASSES))
        self.drawn = float(torch.rand(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for gate in (self.blocks[0], self.blocks[4]):
            gate.heat.fill_(0.9**self.global_step).clamp_(min=0.5)
            gate.shift[:2] = 0.1 * self.global_step
            gate.share *= 0.95
            gate.shift = torch.full((cases.WIDTH,), 0.01 * batch_idx) + gate.shift

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.embed.weight.data.clamp_(-0.2, 0.2)
        with torch.no_grad():
            self.head.weight.copy_(F.normalize(self.head.weight, dim=1) * (1 + self.head.bias.norm()))


class Annealing(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.blocks[0].share.zero_().add_(0.5)
            module.blocks[4].linear.bias.data = torch.full((cases.WIDTH,), 0.1)
            for layer in (module.embed, module.head):  # on two ranks
                trainer.optimizers[0].state[layer.bias]["momentum_buffer"].mul_(-2.0)
            with torch.no_grad():
                module.head.weight *= 0.5
                module.get_parameter("embed.bias").mul_(0.5)


def set_by_name(host: Host) -> dict[str, Any]:
    records = []
    for strategy in ({"warmup_epochs": 0}, {"warmup_steps": 3, "algorithm": [0, 6, 8]}):
        module, recorder = seeded(Annealed), cases.Recorder()
        with lines() as said:
            trained(host, module, recorder, Annealing(), strategy=strategy)
        sums = {name: float(value.double().abs().sum()) for name, value in module.state_dict().items()}
        told = [line for line in said if "draws random numbers for" in line]
        records.append({"rows": recorder.rows, "sums": sums, "drawn": module.drawn, "said": told})
    return {"records": records}


class Constrained(Module):
    """Keeps weights within bounds, and ends with their averages."""

    def on_train_start(self) -> None:
        self.averages = {name: torch.zeros_like(weight) for name, weight in self.named_parameters()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim == 2:
                    weight.renorm_(2, 0, 0.5)
                elif batch_idx == 1:
                    weight.data = weight.clamp(-0.05, 0.05)
                self.averages[name].lerp_(weight, 0.5)
        self.embed.weight.data[0] = 0.1

    def on_train_end(self) -> None:
        self.load_state_dict(self.averages, strict=False)


def written_by_hooks(host: Host) -> dict[str, Any]:
    """What hooks write into weights lasts, also where DeepSpeed makes its steps with copies of them."""
    runs = {
        "flat": {"strategy": {"stage": 1, "warmup_steps": 3, "algorithm": [0, 6, 8]}},
        "flat in two pipelines": {"strategy": {"stage": 1, "num_stages": 1, "algorithm": None}},
        "half": {"precision": "bf16-mixed"} if host.pipelined else {},
    }
    records = {}
    for name, arguments in runs.items():
        if is_chosen(name):
            module, recorder = seeded(Constrained), cases.Recorder()
            trained(host, module, recorder, **arguments)
            sums = {name: float(value.double().abs().sum()) for name, value in module.state_dict().items()}
            records[name] = {"rows": recorder.rows, "sums": sums}
    return records


class SAM(torch.optim.SGD):
    """Evaluates the loss a second time, near by."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        weights = [weight for group in self.param_groups for weight in group["params"]]
        gradients = [weight.grad.clone() for weight in weights]
        torch._foreach_add_(weights, gradients, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(weights, gradients, alpha=0.05)
        super().step()
        return loss


class WithSAM(Module):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.1)


class PoliteSAM(SAM):
    """Asks whether there is a closure."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            return super().step(closure)
        return torch.optim.SGD.step(self)


class SlowedByLoss(torch.optim.SGD):
    """Goes more slowly where the loss grows."""

    before = float("inf")

    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss > self.before:
                self.param_groups[0]["lr"] *= 0.5
            self.before = float(loss)
        super().step()
        return loss


class WithPoliteSAM(Module):
    def configure_optimizers(self) -> Any:
        return PoliteSAM(self.parameters(), lr=0.1)


class WithSlowedByLoss(Module):
    def configure_optimizers(self) -> Any:
        return SlowedByLoss(self.parameters(), lr=0.1)


class EvaluatedTwice(Module):
    """Does the same in its own ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(0.01)
        optimizer_closure()
        optimizer.step()


class WithLBFGS(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class LearnedWeights(Module):
    """Weighs the terms of its loss by parameters that are no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self(batch[0])
        terms = torch.stack([F.cross_entropy(logits, batch[1]), logits.square().mean()])
        return ((-self.weights).exp() * terms + self.weights).sum()


class LearnedWeightsOfFound(cases.Steps):
    """The same, where the layers are found."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.embed, self.head = (
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH),
            nn.Linear(cases.WIDTH, cases.NUM_CLASSES),
        )
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(x)))

    training_step = LearnedWeights.training_step


class LearnedByTensor(Module):
    """Weighs its loss by a tensor that is trained, and no parameter of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = torch.zeros((), requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (-self.log_weight).exp() + self.log_weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.parameters()}, {"params": [self.log_weight]}], lr=0.1)


class RateOfWorld(Module):
    """Scales its rate as scripts for ddp do."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * self.trainer.world_size


class RateOfDevices(Module):
    """Scales its rate as scripts for ddp do, when it makes its optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.num_devices)


class RateOfEnvironment(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * int(os.environ.get("WORLD_SIZE", 1)))


class RateOfGroup(Module):
    """Its rank and the environment of its machine may be asked for."""

    def on_fit_start(self) -> None:
        self.place = dist.get_rank() + int(os.environ["LOCAL_RANK"]) + len(dict(os.environ))

    def on_train_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 * dist.get_world_size()


class GroupFoundByParameter(Module):
    """Lets a layer stand still that it finds by one of its parameters, in a group of its own."""

    def configure_optimizers(self) -> Any:
        groups = [list(part.parameters()) for part in self.modules() if not list(part.children())]
        return torch.optim.SGD([{"params": each} for each in groups if each], lr=0.1, momentum=0.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        slowed = set(map(id, self.blocks[4].parameters()))
        for group in self.trainer.optimizers[0].param_groups if batch_idx == 1 else ():
            if any(id(weight) in slowed for weight in group["params"]):
                group["lr"] = 0.0


class GroupOfSeveralFoundByParameter(GroupFoundByParameter):
    """The group has parameters of layers on both ranks."""

    def configure_optimizers(self) -> Any:
        weights = [weight for weight in self.parameters() if weight.ndim > 1]
        biases = [weight for weight in self.parameters() if weight.ndim < 2]
        return torch.optim.SGD([{"params": weights}, {"params": biases}], lr=0.1)


class SetOnRankZero(Gated):
    @rank_zero_only
    def anneal(self) -> None:
        self.blocks[4].heat.fill_(0.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.anneal()


class WeighedOnAll(Module):
    """Weighs its loss, and asks for the rank for something else."""

    share = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * self.share

    def weigh(self) -> None:
        self.share = 0.5
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weigh()
        if self.trainer.is_global_zero:
            self.shown = batch_idx  # which no step reads


class WeighedOnRankZero(WeighedOnAll):
    @rank_zero_only
    def weigh(self) -> None:
        super().weigh()


class WeighedByRank(WeighedOnAll):
    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.weigh()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        return


class SetByRank(Gated):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.blocks[4].heat = torch.tensor(0.5)


class DecidedByBuffer(Gated):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.blocks[4].heat > 0.5:
            self.blocks[4].heat.mul_(0.9)


class BufferLogged(Gated):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("heat", self.blocks[4].heat)


class PlacesOfOptimizer(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in optimizer.param_groups[0]["params"][:2]:
            weight.grad.zero_()


class CountedPlacesOfOptimizer(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for place, weight in enumerate(optimizer.param_groups[0]["params"]):
            weight.grad.mul_(0.9**place)


class Ordered(Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))


def in_the_order_of_the_loader(host: Host) -> dict[str, Any]:
    """With the Trainer's own default: its distributed sampler would shuffle."""
    module = seeded(Ordered)
    trainer = trained(host, module, use_distributed_sampler=True)
    return {"seen": module.seen, "again": trainer._accelerator_connector.use_distributed_sampler}


# Told


class NormByHand(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = sum(float(weight.grad.norm()) ** 2 for weight in self.parameters()) ** 0.5
        for weight in self.parameters():
            weight.grad.mul_(min(1.0, LARGEST / norm))


class Stacked(Module):
    def on_after_backward(self) -> None:
        norm = torch.stack([weight.grad.norm() for weight in self.parameters()]).norm()
        torch._foreach_mul_([weight.grad for weight in self.parameters()], LARGEST / norm)


class RateOfAll(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        total = torch.zeros(())
        for weight in self.parameters():
            total = total + weight.detach().square().sum()
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1 / float(total)


class Noisy(Module):
    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(torch.randn(weight.shape) * 0.1)


class ScaledAtRandom(Module):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            weight.grad.mul_(self.rng.random())


class DrawnBySeeds(Module):
    """Draws for each parameter by its name, which is the same on every rank."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        with torch.no_grad():
            for name, weight in self.named_parameters():
                drawn = torch.Generator().manual_seed(zlib.crc32(f"{name} {self.global_step}".encode()))
                weight.add_(torch.randn(weight.shape, generator=drawn).to(weight), alpha=0.1)


class DrawnByOneSeed(Module):
    """One generator goes through the parameters of a rank, which are others than in one process."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        drawn = torch.Generator().manual_seed(self.global_step)
        with torch.no_grad():
            for weight in self.parameters():
                weight.add_(torch.randn(weight.shape, generator=drawn), alpha=0.1)


class DrawnByOneSeedForOne(Module):
    """So does one that goes through one parameter of each rank."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        drawn = torch.Generator().manual_seed(self.global_step)
        with torch.no_grad():
            for weight in [weight for weight in self.parameters() if weight.shape[0] != weight.shape[-1]]:
                if weight.ndim > 1:
                    weight.add_(torch.randn(weight.shape, generator=drawn), alpha=0.1)


class DrawnOnce(Module):
    """Draws one number for all parameters, which is the same on every rank."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        factor = random.Random(3).random() * random.random()
        for weight in self.parameters():
            weight.grad.mul_(factor)


class NormsLogged(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, weight in self.named_parameters():
            self.log(f"norm/{name}", weight.grad.norm())


class NormsOfLightning(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.all_norms = grad_norm(self, norm_type=2)


class LookingLate(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.found = [weight.grad for weight in module.parameters()]


class LookingEarly(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        self.found = [weight.grad for weight in module.parameters()]


class OneEach(cases.Steps):
    """Each rank has one parameter, so that none sees two together."""

    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.net = nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH, bias=False),
            nn.Tanh(),
            nn.Linear(cases.WIDTH, cases.NUM_CLASSES, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class NormOfOneEach(OneEach):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norm = sum(weight.grad.square().sum() for weight in self.parameters())


class ZeroingGradients(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.zero_grad()
        self.trainer.optimizers[0].zero_grad()


class Averaged(Module):
    """Moves a teacher towards the layers, as BYOL and mean teachers do: each rank would do so with a part."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        for average, weight in zip(self.teacher.parameters(), self.blocks.parameters(), strict=False):
            average.mul_(0.9).add_(weight, alpha=0.1)


class AveragedWhole(Module):
    """So with all of the layers, which have other shapes than those beside them on another rank."""

    def __init__(self) -> None:
        super().__init__()
        layers = [self.embed, *self.blocks, self.head]
        self.teacher = nn.Sequential(*copy.deepcopy(layers)).requires_grad_(False)

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        weights = [weight for name, weight in self.named_parameters() if not name.startswith("teacher.")]
        for average, weight in zip(self.teacher.parameters(), weights, strict=False):
            average.mul_(0.9).add_(weight, alpha=0.1)


class AveragedWholeAsSums(AveragedWhole):
    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        weights = [weight for name, weight in self.named_parameters() if not name.startswith("teacher.")]
        for average, weight in zip(self.teacher.parameters(), weights, strict=False):
            average.data = 0.9 * average + 0.1 * weight


class AveragedInBuffers(Module):
    """Averages in buffers of a module of its own, whose names have no dots, as latent diffusion does."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Module()
        for name, weight in self.blocks.named_parameters():
            self.average.register_buffer(name.replace(".", ""), weight.detach().clone())

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        buffers = dict(self.average.named_buffers())
        for name, weight in dict(self.blocks.named_parameters()).items():
            average = buffers[name.replace(".", "")]
            average.sub_(0.1 * (average - weight))


class RunsBlocks(Module):
    """Draws samples by layers of its own choice, of which one is on another rank."""

    @torch.no_grad()
    def on_train_batch_end(self, *arguments: Any) -> None:
        x = torch.ones(1, self.head.in_features)
        for block in self.blocks:
            x = block(x)
        self.head(x)


class ListsOfOne(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for weight in self.parameters():
            clip_grad_norm_([weight], LARGEST)


class OnRankZero(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 0:
            clip_grad_norm_(self.parameters(), LARGEST)


class ClippedInClosure(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            clip_grad_norm_(self.parameters(), LARGEST)
            return loss

        optimizer.step(closure=closure)


class GlobalNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        clip_grad_norm_([weight for group in self.param_groups for weight in group["params"]], LARGEST)
        return super().step()


class OwnOptimizer(Module):
    def configure_optimizers(self) -> Any:
        return GlobalNorm(self.parameters(), lr=0.1)


class RarelyClipped(torch.optim.SGD):
    """Clips by a norm that gradients of ordinary size never have."""

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        clip_grad_norm_([weight for group in self.param_groups for weight in group["params"]], 1e4)
        return super().step()


class StepsClippedRarely(Module):
    def configure_optimizers(self) -> Any:
        return RarelyClipped(self.parameters(), lr=0.1)


class HeadAlone(Module):
    """Its optimizer has not all that trains, and Lightning clips what that has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.blocks[-1].parameters(), *self.head.parameters()], lr=0.5)


class StepLeftOut(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class StepBehindClosure(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.step()


class FrozenAtRandom(Module):
    def on_train_epoch_start(self) -> None:
        for weight in self.parameters():
            weight.requires_grad_(random.random() < 0.9)


class ScalesItsBatch(Module):
    """The loader gives the same tensors again, which the step changes before and after it calls the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch[0].mul_(0.8)
        loss = F.cross_entropy(self(batch[0] * 1.0), batch[1].clone())
        batch[1].add_(1).remainder_(cases.NUM_CLASSES)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(batch[0].abs().sum() + batch[1].sum())


class ScalesByNumpy(ScalesItsBatch):
    """By ways of which torch counts no change."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        samples = batch[0].numpy()
        samples *= 0.8
        loss = F.cross_entropy(self(batch[0] * 1.0), batch[1].clone())
        batch[1].data.add_(1).remainder_(cases.NUM_CLASSES)
        return loss


class AverageOfHead(Callback):
    """An average of the last layer's weights alone, of which the first rank has none."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        weights = dict(pl_module.named_parameters())
        self.average = {name: weights[name].detach().clone() for name in weights if name.startswith("head.")}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, weight in pl_module.named_parameters():
            if name in self.average:
                self.average[name].lerp_(weight.detach(), 0.1)


class AveragesHead(Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = AverageOfHead()

    def configure_callbacks(self) -> Any:
        return [self.kept]


class AverageByPairs(Callback):
    """A copy of layers, made before they lie on several ranks, that a hook averages from a step on.

    Args:
        begins: The step; None: it stays as it is.
    """

    def __init__(self, begins: int | None) -> None:
        self.begins, self.num_steps = begins, 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.copies = [copy.deepcopy(pl_module.blocks)]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pairs = zip(self.copies[0].parameters(), pl_module.blocks.parameters(), strict=False)
        self.num_steps += 1
        for average, weight in pairs if self.begins is not None and self.num_steps >= self.begins else ():
            average.data.lerp_(weight.data, 0.1)  # which torch does not count


class SyncByPairs(Callback):
    """Makes a copy of layers, which has other values, equal to them once, before training begins."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.copies = [copy.deepcopy(pl_module.blocks)]
        for weight in self.copies[0].parameters():
            weight.data.mul_(2)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for own, weight in zip(self.copies[0].parameters(), pl_module.blocks.parameters(), strict=False):
            own.data.copy_(weight.data)


class Probe(Callback):
    """Trains a layer of its own, of the class and the form of one of the model, but for its values."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.copies = [
            nn.Linear(head.in_features, head.out_features) for head in (pl_module.embed, pl_module.head)
        ]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for layer in self.copies:
            layer.weight.data.mul_(0.5)


class Teacher(Callback):
    """Loads a copy of layers on all ranks: when training begins, and anew later."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.teacher = copy.deepcopy(pl_module.blocks)

    def load(self, factor: float) -> None:
        self.teacher.load_state_dict({name: value * factor for name, value in self.teacher.state_dict().items()})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.load(0.5)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.load(0.9)


def averages_by_pairs(host: Host) -> dict[str, Any]:
    """They took one layer's weights for another's, in silence."""

    def fit(callback: Callback, num_epochs: int = 1) -> Any:
        with lines() as said:
            refusal = refused(lambda: trained(host, seeded(Module), callback, max_epochs=num_epochs))
        return [refusal, [line for line in said if "is a copy of layers" in line]]

    return {
        "changes": fit(AverageByPairs(1)),
        "stays": fit(AverageByPairs(None)),
        "synchronized": fit(SyncByPairs()),
        "begins late": fit(AverageByPairs(6), num_epochs=2),
        "begins behind the last look": fit(AverageByPairs(4)),
        "a probe": fit(Probe()),
        "a teacher": fit(Teacher()),
    }


class UnfreezesOneMemory(Module):
    """Two frozen weights of different layers lie in one memory, and a hook lets them train."""

    def __init__(self) -> None:
        super().__init__()
        one, other = self.blocks[0].linear.weight, self.blocks[4].linear.weight
        other.data = one.data
        for weight in (one, other):
            weight.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for _, weight in self.named_parameters():
            weight.requires_grad_(batch_idx > 0 or weight.requires_grad)


def unfreezes_one_memory(host: Host) -> str:
    return refused(lambda: trained(host, seeded(UnfreezesOneMemory)))


class AverageByModules(Callback):
    """Keeps averages by the names of modules, and looks at them by these names."""

    def __init__(self) -> None:
        self.averages: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, part in pl_module.named_modules():
            if isinstance(part, nn.Linear):
                weight = part.weight.detach()
                before = self.averages.get(name)
                self.averages[name] = weight.clone() if before is None else before.lerp(weight, 0.1)


class LooksByModules(Callback):
    """Computes with weights that are elsewhere, and keeps nothing."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for part in pl_module.modules():
            if isinstance(part, nn.Linear):
                part.weight.detach().abs()


class SavesByModules(Callback):
    """Writes the weights of all layers, by the names of modules."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        layers = {name: part for name, part in pl_module.named_modules() if isinstance(part, nn.Linear)}
        torch.save({f"{name}.weight": part.weight.data for name, part in layers.items()}, io.BytesIO())


def kept_by_modules(host: Host) -> dict[str, Any]:
    """The averages of weights on other ranks were tensors without values, and nothing was said."""

    def fit(callback: Callback) -> list[str]:
        with lines() as said:
            trained(host, seeded(Module), callback)
        return [line for line in said if "a form without values" in line]

    saving = refused(lambda: trained(host, seeded(Module), SavesByModules()))
    return {"saves": saving} | {type(each).__name__: fit(each) for each in (AverageByModules(), LooksByModules())}


def average_of_head(host: Host) -> dict[str, float]:
    """Layers moved with a KeyError, and so did they at the end of a run."""
    module = seeded(AveragesHead)
    trained(host, module, cases.Recorder())
    return {name: float(value.abs().sum()) for name, value in module.kept.average.items()}


def as_in_one_process(host: Host) -> dict[str, Any]:
    record = {"average": average_of_head(host)}
    for build, arguments in (
        (HeadAlone, {"gradient_clip_val": LARGEST}),
        (StepBehindClosure, {}),
        (ScalesItsBatch, {"data": "kept"}),
        (ScalesByNumpy, {"data": "kept"}),
    ):
        module, recorder = seeded(build), cases.Recorder()
        if arguments.get("data"):
            kept = [[part.clone() for part in batch] for batch in cases.loader(32)]
            arguments = {"data": DataLoader(kept, batch_size=None)}
        trained(host, module, recorder, **arguments)
        record[build.__name__] = {"rows": recorder.rows, "norms": module.norms}
    return record


class Ratio(torch.optim.Optimizer):
    """As LAMB: the step of a matrix has its norm."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad * (group["lr"] * weight.norm() / (weight.grad.norm() + 1e-6)))


class OfTheirOwn(Module):
    def configure_optimizers(self) -> Any:
        return Ratio(self.parameters())


class Untriable(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"] and self.param_groups[0]["params"][0].shape[-1] != cases.NUM_FEATURES:
            raise ValueError("only for eight features")
        return super().step(closure)


class ByPlace(torch.optim.SGD):
    """The step of a parameter depends on its place in the list."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for group in self.param_groups:
                for place, weight in enumerate(group["params"]):
                    weight.sub_(weight.grad * group["lr"] * 0.8**place)


class StepsByPlace(Module):
    def configure_optimizers(self) -> Any:
        return ByPlace(self.parameters(), lr=0.1)


class Lookahead(torch.optim.SGD):
    """Keeps a copy of each parameter by its place."""

    slow: list[torch.Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if self.slow is None:
            self.slow = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for slow, weight in zip(self.slow, weights, strict=True):
                weight.copy_(slow.lerp_(weight, 0.5))
        return loss


class LooksAhead(Module):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), lr=0.1)


class Langevin(torch.optim.SGD):
    """Adds noise to each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(torch.randn_like(weight), alpha=1e-5)
        return loss


class StepsWithNoise(Module):
    def configure_optimizers(self) -> Any:
        return Langevin(self.parameters(), lr=0.1)


class AsksForClosure(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step()


class StepsWithClosure(Module):
    def configure_optimizers(self) -> Any:
        return AsksForClosure(self.parameters(), lr=0.1)


class RateInStep(Module):
    """After the call of ``forward``, which the first stage never comes to."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().param_groups[0]["lr"] *= 0.9
        return loss


class RateBeforeForward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.optimizers().param_groups[0]["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


class UnfreezesInStep(Module):
    """The last layer, which this rank has: from the next micro-batch on."""

    def on_fit_start(self) -> None:
        self.head.bias.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.head.bias.requires_grad_(True)
        return loss


class RateOfStep(Module):
    """Sets one rate for all micro-batches of a batch, which one stage may."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)
        return super().training_step(batch, batch_idx)


class ClampedInStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for weight in self.parameters():
                weight.clamp_(-0.1, 0.1)
        return loss


class HeadClamped(Module):
    """On the rank that has it, a weight of the last layer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)
        return loss


class OptimizerReplaced(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters())]


class ClippingReplaced(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.trainer.gradient_clip_val = LARGEST


class Counted(Module):
    def on_train_epoch_end(self) -> None:
        self.log("elements", float(sum(weight.numel() for weight in self.parameters())))


class OptimizerCounted(Module):
    def on_train_epoch_end(self) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.log("parameters", float(sum(len(group["params"]) for group in groups)))


class StatesCounted(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_states = len(self.optimizers().state)


class CountedInStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("parameters", float(len(self.optimizers().param_groups[0]["params"])))
        return loss


class OptimizerRead(Module):
    """Each by itself, and what asks for a length on the way."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            weights = [*group["params"]] if group["params"] else []
            self.rates = [group["lr"]] * len(weights)
            self.weights = list(group["params"])
            self.moments = [optimizer.state[weight].get("momentum_buffer") for weight in group["params"]]
            self.with_states = list(optimizer.state) if optimizer.state else []
        self.groups = copy.copy(optimizer.param_groups[0]["params"])


class NormInStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("norm", sum(weight.detach().square().sum() for weight in self.parameters()))
        return loss


class GradientsInStep(Module):
    """Logs the gradients of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for name, weight in self.named_parameters():
            if weight.grad is not None:
                self.log(f"norm/{name}", weight.grad.norm())
        return loss


class NormInEvaluation(Module):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("norm", sum(float(weight.norm()) for weight in self.net.parameters()))

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([self.embed, self.blocks[0]])  # a second name of layers on the first rank


class Averages(torch.optim.SGD):
    """Keeps an average of each weight, and puts it in the weight's place, as public programs do."""

    def __init__(self, weights: Any, is_copied: bool) -> None:
        super().__init__(weights, lr=0.1)
        self.is_copied = is_copied

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            average = self.state[weight].setdefault("average", weight.data.clone())
            average += 0.1 * (weight.data - average)
        return loss

    def swap(self) -> None:
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            state, values = self.state[weight], weight.data
            state.setdefault("average", values.clone())  # before the first step
            if self.is_copied:
                values = values.clone()
                weight.data.copy_(state["average"])
                state["average"].copy_(values)
            else:
                weight.data, state["average"] = state["average"], values


class SwapsInValidation(Module):
    is_copied = False

    def configure_optimizers(self) -> Any:
        return Averages(self.parameters(), self.is_copied)

    def swap(self) -> None:
        optimizer = self.optimizers()
        getattr(optimizer, "optimizer", optimizer).swap()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.swap()
        super().validation_step(batch, batch_idx)
        self.swap()


class CopiesInValidation(SwapsInValidation):
    is_copied = True


class SwapsAroundValidation(SwapsInValidation):
    """What the refusal of the former says."""

    on_validation_epoch_start = on_validation_epoch_end = SwapsInValidation.swap
    validation_step = Module.validation_step


def averages_in_validation(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    trainer = trained(host, seeded(SwapsAroundValidation), recorder, validation=cases.loader(48, seed=3))
    return cases.fit_record(trainer, None, recorder.rows)


class NormBeforeForward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        norm = sum(weight.detach().square().sum() for weight in self.parameters())
        return super().training_step(batch, batch_idx) + 0 * norm


class StateInStep(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.state = {name: value.clone() for name, value in self.state_dict().items()}
        return loss


class Asking(cases.TiedLanguageModel):
    """Asks in its steps for what needs no values: how many there are, and where."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("before", float(sum(weight.numel() for weight in self.parameters())))
        loss = super().training_step(batch, batch_idx)
        names = [name for name, weight in self.named_parameters() if weight.requires_grad]
        self.log("elements", float(sum(weight.numel() for weight in self.parameters())))
        self.log("names", float(len(names)))
        torch.zeros((), device=next(self.parameters()).device)
        return loss


def asked_in_steps(host: Host) -> dict[str, Any]:
    tokens = torch.randint(cases.VOCABULARY, (32, 6), generator=torch.Generator().manual_seed(4))
    data = DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=16)
    recorder = cases.Recorder()
    trainer = trained(host, seeded(Asking), recorder, data=data, strategy={"algorithm": [0, 3, 6]})
    return {
        "rows": recorder.rows,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


class StoppingAlone(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = self.global_rank == 0 and batch_idx == 1


class StoppingTogether(Module):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 1


class EpochEndedAlone(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.global_rank == 1 and batch_idx == 1 else None


class Taught(Module):
    """A frozen teacher that the step calls, before and after the layers; the optimizer is given it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = nn.ModuleDict({"large": nn.Sequential(nn.Linear(cases.NUM_FEATURES, 32), nn.Tanh())})
        self.teachers["head"] = nn.Linear(32, cases.NUM_CLASSES)
        self.teachers.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.teachers["large"](batch[0])
        logits = self(batch[0])
        wanted = self.teachers["head"](hidden)
        return F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")


class Mentored(Module):
    def __init__(self) -> None:
        super().__init__()
        self.mentor = nn.Linear(cases.NUM_FEATURES, cases.NUM_CLASSES).requires_grad_(False)


class AveragedInStep(Mentored):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.mentor.weight.lerp_(self.head.weight[:, : cases.NUM_FEATURES], 0.1)
        return loss


class AveragedLate(Mentored):
    """Begins behind the first looks, in a way that torch does not count."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= 6:
            self.mentor.weight.data.lerp_(self.head.weight.data[:, : cases.NUM_FEATURES], 0.1)
        return loss


class AveragedOnceLate(Mentored):
    """Twice, behind the first looks, in a way that torch counts."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx in {6, 8}:
            with torch.no_grad():
                self.mentor.weight.lerp_(self.head.weight[:, : cases.NUM_FEATURES], 0.1)
        return loss


class ClampedAlike(Mentored):
    """Written in each micro-batch, with the same values."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            self.mentor.weight.clamp_(-0.1, 0.1)
        return super().training_step(batch, batch_idx)


class HeadClampedLate(Module):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx >= 6:
            self.head.weight.data.clamp_(-0.1, 0.1)
        return loss


class Judged(LearnedWeightsOfFound):
    """A judge that the step freezes, and that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        del self.weights
        self.judge = nn.Linear(cases.NUM_CLASSES, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.embed.parameters(), *self.head.parameters()], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.judge.requires_grad_(False)
        return self.judge(self(batch[0])).square().mean()


class Targeted(Module):
    """A target network, frozen, which gets the layers' weights at every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.ModuleList([nn.Linear(cases.NUM_FEATURES, cases.WIDTH) for _ in range(2)])
        self.target.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        wanted = self.target[0](batch[0]) + self.target[1](batch[0])
        return F.mse_loss(self(batch[0]), wanted[:, : cases.NUM_CLASSES])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 2 == 0:
            strategy = self.trainer.strategy
            state = strategy.broadcast(strategy.lightning_module_state_dict())
            self.target[0].load_state_dict({name: state[f"embed.{name}"] for name in ("weight", "bias")})
            self.target[1].weight.copy_(state["head.weight"].sum() * state["embed.weight"])


def taught(host: Host) -> dict[str, Any]:
    recorder, path = cases.Recorder(), host.folder / f"taught-{host.pipelined}.ckpt"
    module = seeded(Taught)
    trained(host, module, recorder, validation=cases.loader(21, seed=3)).save_checkpoint(path)
    again, more = seeded(Taught, seed=4), cases.Recorder()
    trained(host, again, more, max_epochs=3, ckpt_path=path)
    sums = {name: float(value.double().sum()) for name, value in again.state_dict().items()}
    targeted = cases.Recorder()
    trained(host, seeded(Targeted), targeted, strategy={"algorithm": [0, 2, 8], "warmup_steps": 3})
    return {"rows": recorder.rows, "more": more.rows, "sums": sums, "targeted": targeted.rows}


class SavingItself(Module):
    def on_train_epoch_end(self) -> None:
        self.state = {name: value.clone() for name, value in self.state_dict().items()}


class CopyingItself(Module):
    def on_train_epoch_end(self) -> None:
        self.first = copy.deepcopy(next(self.parameters()))
        self.copies = copy.deepcopy(list(self.parameters()))


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    said: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("deepspeed_partition.engine"), Keeping()
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


class WithStepHooks(Module):
    """One process runs a hook before the step before the closure, so that clipping there clips nothing."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)

        def clip(optimizer: Any, arguments: Any, keywords: Any) -> None:
            clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], LARGEST)

        def clamp(optimizer: Any, arguments: Any, keywords: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
                    for weight in group["params"]:
                        weight.clamp_(-0.3, 0.3)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_pre_hook(clamp)
        optimizer.register_step_post_hook(clamp)
        return optimizer


def hooks_of_steps(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    with lines() as said:
        trainer = trained(host, seeded(WithStepHooks), recorder)
    record = cases.fit_record(trainer, None, recorder.rows)
    return {**record, "said": [line for line in said if "clamp of" in line]}


class NormAfterStep(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(self.shrink)
        return optimizer

    @torch.no_grad()
    def shrink(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        norm = math.sqrt(sum(float(weight.square().sum()) for weight in weights))
        for weight in weights:
            weight.mul_(3 / norm)


class ClippedEarly(Module):
    """Clips gradients before the step has made them."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(self.clip)
        return optimizer

    def clip(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], LARGEST)


class StepReplaced(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        step = optimizer.step

        def normalized(closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            norm = torch.stack([weight.grad.norm() for weight in self.parameters()]).norm()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / norm.item()
            step()
            return loss

        optimizer.step = normalized
        return optimizer


class StepReplacedByItself(Module):
    """Does nothing that is another one on a rank; the optimizer's own arithmetic is none of the user's."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)
        step = optimizer.step

        def counted(closure: Any = None) -> Any:
            for weight in self.parameters():
                weight.grad.clamp_(-0.1, 0.1)
            return step(closure)

        optimizer.step = counted
        return optimizer


class RateOfWeights(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self) -> list[float]:
        total = sum(
            float(w.detach().abs().sum()) for group in self.optimizer.param_groups for w in group["params"]
        )
        return [10 / total for _ in self.optimizer.param_groups]


class ScheduledByWeights(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": RateOfWeights(optimizer), "interval": "step"}]


class StatesAsked(Module):
    def on_train_epoch_end(self) -> None:
        self.optimizers().state_dict()


class GroupAdded(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().add_param_group({"params": list(self.head.parameters()), "lr": 0.01})


class OptimizersSetUp(Module):
    def on_train_start(self) -> None:
        self.trainer.strategy.setup_optimizers(self.trainer)


class ScheduledByOne(Module):
    """Its schedule reads a weight that one rank has."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        rate = lambda _: 10 / float(self.head.weight.detach().abs().sum())  # noqa: E731
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rate), "interval": "step"}]


def own_ratio(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    trained(host, seeded(OfTheirOwn), recorder)
    return {"rows": recorder.rows}


def groups_found_by_parameters(host: Host) -> dict[str, Any]:
    """The layer moves after the second step, and the rank that it comes to did not find it."""
    rows = {}
    for name, strategy in (("as they lie", {}), ("moved", {"warmup_steps": 2, "algorithm": [0, 6, 8]})):
        recorder = cases.Recorder()
        trained(host, seeded(GroupFoundByParameter), recorder, strategy=strategy)
        rows[name] = recorder.rows
    return rows


SAID_OF_HOOKS = (
    "on_", "training_step counts", "trainer.world_size is", "trainer.num_devices is", "the step p", "step of",
    "state_dict() of", "get_metrics of", "WORLD_SIZE of", "torch.distributed.get_world_size() is",
)  # fmt: skip


class NormInSave(Module):
    """Writes a number of all weights into a checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["norm"] = sum(weight.norm() for weight in self.parameters())


class CopiesInSave(Module):
    """Takes what each weight gives into a checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["copies"] = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        checkpoint["names"] = list(self.state_dict())


class NormBar(TQDMProgressBar):
    def get_metrics(self, trainer: Any, model: Any) -> Any:
        return {**super().get_metrics(trainer, model), "norm": sum(float(w.norm()) for w in model.parameters())}


def told_of_hooks(host: Host) -> dict[str, Any]:
    record: dict[str, Any] = {}

    def run(name: str, build: Callable[[], Any], *callbacks: Any, **arguments: Any) -> None:
        if not is_chosen(name):
            return
        with lines() as said:
            end = refused(lambda: trained(host, seeded(build), *callbacks, max_epochs=1, **arguments))
        record[name] = {
            "end": end,
            "said": [line for line in said if line.startswith(SAID_OF_HOOKS)],
            "said of groups": [line for line in said if line.startswith("'lr' of group ")],
        }

    for build in (
        NormByHand, Stacked, RateOfAll, Noisy, ScaledAtRandom, DrawnOnce, NormsLogged, NormsOfLightning,
        DrawnBySeeds, DrawnByOneSeed, DrawnByOneSeedForOne, AveragedWhole, AveragedWholeAsSums,
        ZeroingGradients, Averaged, AveragedInBuffers, RunsBlocks, ListsOfOne, OnRankZero,
        ClippedInClosure, StepsByPlace, StepsWithNoise, StepsWithClosure, RateInStep, RateBeforeForward,
        UnfreezesInStep,
        OptimizerReplaced, ClippingReplaced, SavingItself, CopyingItself, OwnOptimizer, Counted, NormInStep,
        GradientsInStep,
        NormBeforeForward, StateInStep, StoppingAlone, StoppingTogether, EpochEndedAlone,
        OptimizerCounted, StatesCounted, CountedInStep, OptimizerRead,
        PlacesOfOptimizer, CountedPlacesOfOptimizer,
        WithSAM, WithPoliteSAM, WithSlowedByLoss, EvaluatedTwice, WithLBFGS, LearnedWeights,
        StepsClippedRarely, StepLeftOut, FrozenAtRandom,
        NormAfterStep, ClippedEarly, StepReplaced, StepReplacedByItself, ScheduledByWeights, ScheduledByOne,
        StatesAsked,
        GroupAdded, OptimizersSetUp, GroupOfSeveralFoundByParameter, GroupFoundByParameter,
        WeighedOnAll, WeighedOnRankZero, WeighedByRank,
        RateOfWorld, RateOfDevices, RateOfEnvironment, RateOfGroup,
        SetOnRankZero, SetByRank, DecidedByBuffer, BufferLogged,
    ):  # fmt: skip
        run(build.__name__, build)
    for build in (NormInSave, CopiesInSave):
        run(build.__name__, build, ModelCheckpoint(host.folder / build.__name__))
    run("NormBar", Module, NormBar(), enable_progress_bar=True)
    run("LearnedWeightsOfFound", LearnedWeightsOfFound, strategy={"algorithm": None})
    one_stage = {"algorithm": None, "num_stages": 1}
    run("LearnedWeightsInOneStage", LearnedWeightsOfFound, strategy=one_stage)
    run("LearnedByTensor", LearnedByTensor)
    run("LearnedByTensorInOneStage", LearnedByTensor, strategy=one_stage)
    run("Judged", Judged, strategy={"algorithm": None})
    run("UnfreezesInOneStage", UnfreezesInStep, strategy={**one_stage, "num_micro_batches": 2})
    run("RateTwiceInOneStage", RateInStep, strategy={**one_stage, "num_micro_batches": 2})
    run("AveragedInOneStage", AveragedInStep, strategy={**one_stage, "num_micro_batches": 2})
    for build in (AveragedLate, AveragedOnceLate, ClampedAlike):
        arguments = {"strategy": {**one_stage, "num_micro_batches": 2}, "data": cases.loader(640)}
        run(build.__name__, build, **arguments)
    run("HeadClampedLate", HeadClampedLate, data=cases.loader(640))
    run("RateInOneStage", RateOfStep, strategy={**one_stage, "num_micro_batches": 2})
    run("UnfreezesInOneMicroBatch", UnfreezesInStep, strategy={**one_stage, "num_micro_batches": 1})
    run("ClampedInStep", ClampedInStep, strategy={"warmup_steps": 2})
    run("HeadClamped", HeadClamped, strategy={"warmup_steps": 2})
    run("LooksAhead", LooksAhead, strategy={"warmup_steps": 2, "algorithm": [0, 6, 8], "stage": 1})
    run("HeadClamped measured", HeadClamped, strategy={"algorithm": "madpipe"})
    run("NormInEvaluation", NormInEvaluation, validation=cases.loader(21, seed=3))
    run("SwapsInValidation", SwapsInValidation, validation=cases.loader(48, seed=3))
    run("CopiesInValidation", CopiesInValidation, validation=cases.loader(48, seed=3))
    with lines() as said:
        trained(host, seeded(Mentored), max_epochs=1)
    record["Mentored"] = {"end": "not refused", "said": [line for line in said if "mentor" in line]}
    run("LookingLate", Module, LookingLate())
    run("NormOfOneEach", NormOfOneEach, strategy={"algorithm": [0, 1, 3]})
    for name, arguments in (("zero", {"strategy": {"stage": 1}}), ("bf16", {"precision": "bf16-mixed"})):
        run(f"clipped {name}", ClippedBefore, **arguments)
        run(f"values clipped {name}", ClippedByValue, **arguments)
        run(f"looking {name}", Module, type(f"LookingIn{name}", (LookingEarly,), {})(), **arguments)
        run(f"ratio {name}", OfTheirOwn, **arguments)
        run(f"counted {name}", type(f"CountedIn{name}", (OptimizerCounted,), {}), **arguments)
    return record


def logged_features(host: Host) -> dict[str, Any]:
    recorder = cases.Recorder()
    trainer = trained(host, seeded(LogsFeatures), recorder)
    return cases.fit_record(trainer, None, recorder.rows)


class Skips(Module):
    """Skips each second batch: in one process by None, in a pipeline by what its refusal says."""

    is_pipelined = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.skips = batch_idx % 2 == 1
        if not self.skips:
            return loss
        return 0 * loss if self.is_pipelined else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.skips and self.is_pipelined:
            for weight in self.parameters():
                weight.grad = None


class SkipsWhatIsInfinite(Skips):
    """Skips a batch of which one sample has no finite loss."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.skips = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Module.training_step(self, batch, batch_idx)
        if torch.isfinite(loss):
            return loss
        self.skips = True
        return 0 * loss if self.is_pipelined else None


class SkipsByTheLast(SkipsWhatIsInfinite):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.skips = False
        return super().training_step(batch, batch_idx)


def skipped_batches(host: Host) -> dict[str, Any]:
    record = {}
    for name in ("sgd", "adam"):
        module = seeded(Skips)
        module.optimizer_name, module.is_pipelined = name, host.pipelined
        trained(host, module)
        record[name] = [weight.tolist() for weight in module.parameters()]
    module = seeded(SkipsWhatIsInfinite)
    module.is_pipelined = host.pipelined
    trained(host, module, data=one_infinite())
    return {**record, "infinite": [weight.tolist() for weight in module.parameters()]}


def one_infinite() -> DataLoader:
    data = cases.samples(64)
    data.tensors[0][37, 1] = math.inf  # in the second of four micro-batches
    return DataLoader(data, batch_size=16)


def marked_for_a_while(host: Host) -> list[str]:
    module = seeded(SkipsByTheLast)
    module.is_pipelined = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained(host, module, data=one_infinite())
    return [line for line in (str(each.message) for each in told) if "has left self." in line]


class Recurrent(nn.Module):
    """An LSTM, which lists its own weights anew whenever it is moved or converted."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(cases.WIDTH, cases.WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None])[0][:, 0]


class Converting(cases.SequentialClassifier):
    """Has an LSTM on each stage, and is converted in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(cases.NUM_FEATURES, cases.WIDTH),
            *(Recurrent() for _ in range(3)),
            nn.Linear(cases.WIDTH, cases.NUM_CLASSES),
        )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.float()


def recurrent_layers(host: Host) -> dict[str, Any]:
    """The conversion was refused, as the move to a GPU was; and a layer moves after two steps."""
    strategy = {"algorithm": [0, 1, 5], "warmup_steps": 2, "warmup_epochs": 0}
    with patch.object(nn.Module, "_apply", cases._apply):  # torch's own: whose code converts decides what is told
        return cases.fit(host, Converting, cases.loader(54), strategy=strategy)


SAME_AS_SINGLE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [
        norms_over_ranks,
        as_in_one_process,
        each_by_itself,
        by_places,
        logged_features,
        set_by_name,
        written_by_hooks,
        in_the_order_of_the_loader,
        own_ratio,
        groups_found_by_parameters,
        averages_in_validation,
        hooks_of_steps,
        asked_in_steps,
        taught,
        skipped_batches,
        recurrent_layers,
    ],
    4: [],
}
ONLY_PIPELINE: dict[int, list[Callable[[Host], dict[str, Any]]]] = {
    2: [told_of_hooks, averages_by_pairs, unfreezes_one_memory, kept_by_modules, marked_for_a_while],
    4: [],
}
