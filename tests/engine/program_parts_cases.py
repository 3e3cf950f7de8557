"""Cases: losses, functions of data, schedules and iterators as programs write them, and our own tests do not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.nn import functional as F

from deepspeed_partition.engine import TiedModule
from deepspeed_partition.engine import engine as engine_of_plans
from deepspeed_partition.engine.pipeline import drawn_data
from deepspeed_partition.planner.errors import PlanMismatchError
from tests.engine import plans
from tests.engine.pipelines import WIDTH, mlp, two_groups
from tests.engine.running import NUM_MICRO_BATCHES, batches, mine, planned, raised, same, start, train
from tests.engine.strangers_cases import said_here

ZERO_1 = {"zero_optimization": {"stage": 1}}


class WithAWeight(nn.Module):
    """A loss that computes with a layer of the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs @ self.layer.weight, labels)


def a_loss_with_a_weight_of_a_layer(_: Path) -> None:
    """Each trained a copy, and a checkpoint put one in the place of the other, in silence."""

    def layers() -> list[Any]:
        return [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]

    sentence = "the loss function (WithAWeight) and layer 2 share a weight", "let the last layer compute with it"
    for method in ("madpipe", [0, 2, 5]):
        specs = layers()
        with raised(ValueError, *sentence):
            start(specs, method, loss_fn=WithAWeight(specs[2]))
    specs = layers()
    with said_here() as said:
        start(specs, "uniform", loss_fn=WithAWeight(specs[0]), optimizer=two_groups)
    assert (
        any("the loss function (WithAWeight) and layer 0 share a weight" in line for line in said) == _is_first()
    )
    borrowed = specs[2]
    with said_here() as said:
        start(specs, [0, 3, 5], loss_fn=lambda outputs, labels: F.mse_loss(outputs @ borrowed.weight, labels))
    assert any("and layer 2 share a weight" in line for line in said) == _is_first()
    # What the last layer has, too, is there; what does not train is nobody's business.
    specs = layers()
    start(specs, [0, 2, 5], loss_fn=WithAWeight(specs[4]))
    tied = nn.Linear(WIDTH, WIDTH)
    ends = [nn.Linear(8, WIDTH), TiedModule("ends", tied), nn.Tanh(), TiedModule("ends", tied)]
    start(ends, [0, 2, 4], loss_fn=WithAWeight(tied))
    specs = layers()
    specs[0].requires_grad_(False)
    start(specs, [0, 3, 5], loss_fn=WithAWeight(specs[0]))


class Holds(nn.Module):
    """A loss that holds the whole model, as a submodule or in a list, and may use its weights."""

    def __init__(self, net: nn.Module, *, in_list: bool, uses: bool) -> None:
        super().__init__()
        self.net: Any = [net] if in_list else net
        self.uses = uses
        self.temperature = 2.0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs / self.temperature, labels)


class Penalizes(Holds):
    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(outputs, labels) + self.penalty()

    def penalty(self) -> torch.Tensor:
        net = self.net[0] if isinstance(self.net, list) else self.net
        return 1e-3 * sum(weight.pow(2).sum() for weight in net.parameters())


def a_loss_with_the_whole_model(folder: Path) -> None:
    """A checkpoint put the copies of the last rank in the place of the weights of the others, in silence."""

    def layers() -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
        )

    for kind in (Holds, Penalizes):
        net = layers()
        with raised(ValueError, "the layers 0 and 2 share weights", "holds it in a list (self.net = [net])"):
            start([*net], [0, 2, 5], loss_fn=kind(net, in_list=False, uses=False))
        net = layers()
        with said_here() as said:
            engine, _, _ = start(
                [*net], [0, 2, 5], loss_fn=kind(net, in_list=True, uses=False), optimizer=two_groups
            )
        told = any("the layers 0 and 2 share weights" in line for line in said)
        assert told == (_is_first() and kind is Penalizes)
    net = layers()
    with said_here() as said:
        start(
            [*net], [0, 2, 5],
            loss_fn=lambda outputs, labels: F.mse_loss(outputs, labels) + sum(w.sum() for w in net.parameters()),
        )  # fmt: skip
    assert any("the layers 0 and 2 share weights" in line for line in said) == _is_first()
    # On a cut of DeepSpeed's own it is told.
    data, losses = batches(4), []
    for resumes in (False, True):
        torch.manual_seed(0)
        net = layers()

        def begin(net: nn.Sequential = net) -> Any:
            loss = Holds(net, in_list=False, uses=False)
            return start([*net], "uniform", loss_fn=loss, optimizer=two_groups)[0]

        engine = begin()
        found = train(engine, data[:2])
        if resumes:
            engine.save_checkpoint(str(folder))
            torch.manual_seed(1)
            net = layers()
            engine = begin(net)
            engine.load_checkpoint(str(folder))
        losses.append(found + train(engine, data[2:]))
    same(losses[1], losses[0])


def universal_checkpoints_of_other_groups(folder: Path) -> None:
    """DeepSpeed left weights of groups that rank 0 had not as they were, in silence."""
    file = folder / "last" / "zero" / "optimizer_state.pt"
    config = {**ZERO_1, "bf16": {"enabled": True}, "checkpoint": {"load_universal": True}}
    engine, _, _ = start(mlp(), [0, 3, 8], config, optimizer=two_groups)
    groups = len(engine.optimizer.param_groups)
    if _is_first():
        file.parent.mkdir(parents=True)
        (folder / "latest_universal").write_text("last")
        torch.save({"param_groups": [{}] * (groups + 1)}, file)
    torch.distributed.barrier()
    with raised(PlanMismatchError, f"has the settings of {groups + 1} parameter groups, and rank 0 has {groups}"):
        engine.load_checkpoint(str(folder))


class SendsLabels:
    """Sends labels from the rank of the first stage to the last rank, as loaders of public programs do."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> SendsLabels:
        return self

    def __next__(self) -> Any:
        inputs, labels = next(self.items)
        if torch.distributed.get_rank() == 0:
            torch.distributed.send(labels, 1)
        else:
            torch.distributed.recv(labels, 0)
        return inputs, labels


def data_that_are_sent_between_the_ends(_: Path) -> None:
    """Where one rank has both ends it waited for ever, and no sentence had the way out."""
    data = batches(2)
    losses = []
    for sends in (False, True):
        engine, _, _ = start(mlp(), [0, 3, 8], optimizer=two_groups)
        items = mine(engine, data)
        losses.append([float(engine.train_batch(SendsLabels(items) if sends else items)) for _ in data])
    same(losses[1], losses[0])
    devices, cuts = (0, 1, 0), [0, 2, 5, 8]
    chain, platform = plans.chain_of(8), plans.platform_of(2)
    plan = plans.plan_of(chain, platform, cuts, devices, orders=plans.depth_first(devices, NUM_MICRO_BATCHES, 1))
    engine, _, _ = start(mlp(), None, num_stages=2, plan=plan, optimizer=two_groups)
    items = mine(engine, data)
    with raised(RuntimeError, "the data iterator calls torch.distributed.send() for rank 1", '"contiguous"'):
        engine.train_batch(SendsLabels(items))


class Scaled(nn.Module):
    """A loss with a weight of the model that no layer has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.scale = model.scale

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs * self.scale, labels)


class PartOf(nn.Module):
    """A layer that is made of a part of a model that it is given."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.part = model.get_submodule(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def a_loss_with_a_weight_of_its_own(folder: Path) -> None:
    """Of a model that specifications are given, and that no layer takes."""
    data, losses = batches(4), []
    for resumes in (False, True):

        def begin(seed: int) -> Any:
            torch.manual_seed(seed)
            model = nn.Module()
            model.first, model.act, model.last = nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
            model.scale = nn.Parameter(torch.ones(()))
            specs = [LayerSpec(PartOf, model, name) for name in ("first", "act", "last")]
            return start(specs, [0, 2, 3], loss_fn=Scaled(model), optimizer=two_groups)[0]

        engine = begin(0)
        found = train(engine, data[:2])
        if resumes:
            engine.save_checkpoint(str(folder))
            engine = begin(1)
            engine.load_checkpoint(str(folder))
        losses.append(found + train(engine, data[2:]))
    same(losses[1], losses[0])


def a_loss_that_is_compiled(_: Path) -> None:
    """A raw AttributeError of torch's."""
    for method in ("uniform", [0, 2, 3]):
        layers = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]
        engine, _, _ = start(layers, method, loss_fn=torch.jit.script(nn.MSELoss()), optimizer=two_groups)
        assert all(map(math.isfinite, train(engine, batches(2))))


def what_a_function_of_data_holds(_: Path) -> None:
    """A large tensor left no room for a counter behind it; a sparse one ended the run."""
    data = batches(2)
    for sparse in (False, True):
        losses = []
        for method, config in (([0, 3, 8], None), ("madpipe", planned([0, 3, 8]))):
            holds = _Augments(sparse)
            with patch.object(engine_of_plans, "_MOST_BYTES_OF_DATA", 1000):
                engine, _, _ = start(mlp(), method, config, optimizer=two_groups)
                engine.set_batch_fn(holds)
                losses.append(train(engine, data))
        same(losses[1], losses[0])


class _Augments:
    def __init__(self, sparse: bool) -> None:
        self.large = torch.ones(500)
        self.adjacency = torch.eye(2).to_sparse() if sparse else None
        self.count = torch.zeros(())

    def __call__(self, item: Any) -> Any:
        self.count += 1
        return item[0] * self.count * self.large[0], item[1]


def _is_first() -> bool:
    return torch.distributed.get_rank() == 0


def what_a_program_does_with_micro_batches(_: Path) -> None:
    """It was done once more for the plan; what it drew itself was lost where there is no iterator."""
    data = batches(3)
    losses: dict[str, list[list[float]]] = {"drawing": [], "reading": []}
    for method, config in (([0, 3, 8], None), ("madpipe", planned([0, 3, 8]))):
        engine, _, _ = start(mlp(), method, config, optimizer=two_groups)
        generator = torch.Generator().manual_seed(0)
        number = [0]

        def noisy(item: Any) -> Any:
            number[0] += 1  # noqa: B023
            inputs, labels = item
            return inputs + number[0] * torch.randn(inputs.shape, generator=generator), labels  # noqa: B023

        engine.set_batch_fn(noisy)
        losses["drawing"].append(train(engine, data))
        engine, _, _ = start(mlp(), method, config, optimizer=two_groups)
        items = mine(engine, data)
        engine.set_batch_fn(lambda _: next(items))  # noqa: B023
        losses["reading"].append([float(engine.train_batch()) for _ in data])
        assert items.taken == len(items.items)
    for kind, (expected, found) in losses.items():
        same(found, expected), kind


class Target:
    """Labels in an object of the program's own."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


def labels_in_an_object_that_is_filled_again(_: Path) -> None:
    """All micro-batches of a batch had the labels of the last one, in silence."""
    data = batches(2)

    def loss_fn(outputs: torch.Tensor, target: Target) -> torch.Tensor:
        return F.mse_loss(outputs, target.values)

    def filled_again() -> Iterator[Any]:
        target = Target(torch.empty_like(data[0][0][1]))
        for inputs, labels in (each for batch in data for each in batch):
            target.values.copy_(labels)
            yield inputs, target

    def anew() -> Iterator[Any]:
        for inputs, labels in (each for batch in data for each in batch):
            yield inputs, Target(labels)

    def constant() -> Iterator[Any]:
        target = Target(data[0][0][1])
        for inputs, _ in (each for batch in data for each in batch):
            yield inputs, target

    for make, is_said in ((filled_again, True), (anew, False), (constant, False)):
        lines: list[str] = []
        with patch.object(drawn_data, "warn_once", lambda _, line: lines.append(line)):  # noqa: B023
            engine, _, _ = start(mlp(), [0, 3, 8], optimizer=two_groups, loss_fn=loss_fn)
            items = make()
            for _ in data:
                engine.train_batch(items)
        assert any("gives one Target object for several micro-batches" in line for line in lines) == is_said


class Schedule:
    """A schedule of the program's own, which has its own name for the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.of, self.number = optimizer, 0

    def step(self) -> None:
        self.number += 1
        for group in self.of.param_groups:
            group["lr"] = 1e-2 / self.number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Bare:
    """The same without attributes beside its slots."""

    __slots__ = ("number", "optimizer")
    step, state_dict, load_state_dict = Schedule.step, Schedule.state_dict, Schedule.load_state_dict

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.number = optimizer, 0

    @property
    def of(self) -> Any:
        return self.optimizer


def schedules_of_other_forms(_: Path) -> None:
    """The move of layers, or the first step, ended with a raw AttributeError or TypeError."""
    data = batches(3)
    for make in (Schedule, Bare):
        make.for_engine = True  # type: ignore[attr-defined]
        found = []
        for method, config in (([0, 5, 8], {}), ("madpipe", planned([0, 5, 8], warmup_steps=0))):
            engine, _, _ = start(
                mlp(),
                method,
                {**config, **ZERO_1},
                optimizer=two_groups,
                lr_scheduler=lambda each: make(each),  # noqa: B023
            )
            found.append(train(engine, data))
        same(found[1], found[0])


def data_that_end_where_the_plan_is_made(_: Path) -> None:
    """A loop over epochs that catches StopIteration got a RuntimeError."""
    engine, _, _ = start(mlp(), "madpipe", planned([0, 3, 8]), optimizer=two_groups)
    for _ in range(2):
        with raised(StopIteration, "ended after 0 micro-batches"):
            engine.train_batch(iter([]))
    assert engine.plan is None
    data = batches(2)
    found = train(engine, data)
    assert engine.plan is not None
    expected, _, _ = start(mlp(), [0, 3, 8], optimizer=two_groups)
    same(found, train(expected, data))


def by_layer(model: Any) -> torch.optim.Optimizer:
    """A rate for each layer of this rank."""
    modules = [each for each in model.forward_funcs if isinstance(each, nn.Module)]
    layers = [module for module in modules if any(True for _ in module.parameters())]
    groups = [{"params": list(layer.parameters()), "lr": 1e-3 * (1 + place)} for place, layer in enumerate(layers)]
    return torch.optim.AdamW(groups)


def a_schedule_without_the_states_of_its_optimizer(folder: Path) -> None:
    """On another cut it had rates of the groups that the other rank had had, or ended the next step."""

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    data = batches(3)
    engine, _, _ = start(mlp(), [0, 2, 8], optimizer=by_layer, lr_scheduler=halving)
    train(engine, data[:1])
    engine.save_checkpoint(str(folder))
    other, _, scheduler = start(mlp(), [0, 6, 8], optimizer=by_layer, lr_scheduler=halving)
    made = list(scheduler.base_lrs)
    other.load_checkpoint(str(folder), load_optimizer_states=False)
    assert scheduler.base_lrs == made and scheduler.last_epoch == 1
    train(other, data[1:2])
    assert [group["lr"] for group in other.basic_optimizer.param_groups] == [rate / 4 for rate in made]
    again, _, scheduler = start(mlp(), [0, 2, 8], optimizer=by_layer, lr_scheduler=halving)
    again.load_checkpoint(str(folder), load_optimizer_states=False)
    assert scheduler.last_epoch == 1
    train(again, data[1:2])


CASES = [
    data_that_are_sent_between_the_ends, a_loss_with_a_weight_of_a_layer, a_loss_with_the_whole_model,
    a_loss_with_a_weight_of_its_own, a_loss_that_is_compiled, universal_checkpoints_of_other_groups,
    what_a_function_of_data_holds, labels_in_an_object_that_is_filled_again,
    what_a_program_does_with_micro_batches, schedules_of_other_forms, data_that_end_where_the_plan_is_made,
    a_schedule_without_the_states_of_its_optimizer,
]  # fmt: skip
