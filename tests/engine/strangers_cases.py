"""Cases: ways of other people's programs to use DeepSpeed's pipeline, which must train as in one process."""

from __future__ import annotations

import copy
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import numpy
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from torch import nn

from deepspeed_partition.engine import MadPipeEngine, PipelineModule, TiedModule
from deepspeed_partition.engine.engine import initialize_with
from deepspeed_partition.engine.pipeline import asked_ranks
from deepspeed_partition.engine.pipeline.replaced_instructions import AT_THE_END, METHODS
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.profiling import arrivals
from tests.engine import pipelines, plans
from tests.engine.pipelines import WIDTH, WORDS, Block, halving, loss_fn, mlp, tied, train_alone, two_groups
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    adam,
    batches,
    cut,
    mine,
    planned,
    raised,
    recomputes_on_a_cpu,
    same,
    start,
    train,
    train_on_four_cuts,
)
from tests.engine.warm_up_cases import heard, said_here

WARM_UP, AFTER = 3, 2


def looped(devices: Any = (0, 1, 0), cuts: Any = (0, 2, 5, 8)) -> Any:
    """A plan, such as one whose first and last stage are on the first rank."""
    orders = plans.depth_first(devices, NUM_MICRO_BATCHES, 3)
    return plans.plan_of(plans.chain_of(8), plans.platform_of(2), list(cuts), devices, orders=orders)


# A loss that is a module


class Learned(nn.Module):
    """A loss with a weight and a buffer, which tells what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 0.5, 1.5]))
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.latest = nn.functional.cross_entropy(outputs * self.scale, labels) * (1 + self.num_calls / 10)
        return self.latest


class Telling(PipelineModule):
    """A module that asks its loss and its layers for something, within a step."""

    def get_additional_losses(self) -> Any:
        assert isinstance(self.loss_fn, nn.Module) and isinstance(self.forward_funcs[0], nn.Module)
        return {"scale": self.loss_fn.scale.sum().detach()}  # DeepSpeed counts them on every rank


def a_loss_that_is_a_module_in_a_warm_up(folder: Path) -> None:
    """With a checkpoint within a step, whose files have what one between two steps has."""
    data = batches(WARM_UP + AFTER)
    for zero, make_loss in enumerate((nn.CrossEntropyLoss, Learned)):
        expected = train_alone(mlp(), data, two_groups, loss_fn=make_loss())
        config = {**planned(cut(), warmup_steps=WARM_UP), "zero_optimization": {"stage": zero}}
        loss = make_loss()
        engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups, loss_fn=loss)
        where = folder / make_loss.__name__
        engine.save_checkpoint(str(where / "before"))
        engine.before_optimizer_step = lambda e=engine, w=where: e.save_checkpoint(str(w / "within"))
        losses = train(engine, data[:1])
        engine.before_optimizer_step = None
        losses += train(engine, data[1:])
        same(losses, expected)
        assert engine.module.parts == cut() and engine.module.loss_fn is loss
        assert "loss_fn" not in vars(engine.module) and engine.module._modules["loss_fn"] is loss
        before, within = ({file.name for file in (where / name).rglob("*.pt")} for name in ("before", "within"))
        assert before == within and any(name.startswith("layer_") for name in within)


def what_a_module_asks_its_loss_in_a_step(_: Path) -> None:
    data = batches(WARM_UP + 1)
    config = planned(cut(), warmup_steps=WARM_UP)
    engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups, loss_fn=Learned(), module_class=Telling)
    same(train(engine, data), train_alone(mlp(), data, two_groups, loss_fn=Learned()))


def the_loss_that_an_engine_keeps(_: Path) -> None:
    """A public GPT reads ``engine.loss`` on every rank behind each call. It was None: `.item()` ended the run."""
    data = batches(2)

    def kept(engine: MadPipeEngine) -> list[list[float]]:
        found = []
        for step in data:
            engine.train_batch(mine(engine, [step]))
            found.append(float(engine.loss))
            engine.eval_batch(mine(engine, [step]))
            found.append(float(engine.loss))
        return gather_objects(found)

    for stage in (0, 1):
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
        expected = kept(start(mlp(), "uniform", config)[0])  # in DeepSpeed's own schedule
        assert expected[0] == [0.0] * 4 and all(expected[1])
        for engine in (
            start(mlp(), cut(), config)[0],
            start(mlp(), "madpipe", {**planned(cut(), warmup_steps=1), **config})[0],
            start(mlp(), looped(), config)[0],  # the last stage is on the first rank
        ):
            found = sorted(kept(engine))
            assert found == [pytest.approx(of_rank, rel=1e-5) for of_rank in sorted(expected)], (found, expected)


def a_loss_that_is_a_function_with_weights_is_refused(_: Path) -> None:
    """They trained otherwise than in one process, in plain DeepSpeed too, and stayed behind when layers moved."""
    loss = Learned()

    def with_loss(module: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([*module.parameters(), *loss.parameters()])

    for make in (lambda: lambda *both: loss(*both), lambda: partial(loss)):
        with raised(
            ValueError, "the optimizer has 1 weight of the Learned that loss_fn uses", "loss_fn=criterion"
        ):
            start(mlp(), cut(), optimizer=with_loss, loss_fn=make())
    with heard() as said:
        start(mlp(), "uniform", optimizer=with_loss, loss_fn=lambda *both: loss(*both))
    assert any("the optimizer has 1 weight" in line for line in said)
    loss.requires_grad_(False)
    start(mlp(), cut(), optimizer=with_loss, loss_fn=lambda *both: loss(*both))
    whole = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    start([*whole], cut(), optimizer=lambda _: torch.optim.Adam(whole.parameters()))
    nothing = nn.Parameter(torch.zeros(0))  # as for a layer that this rank lacks
    start(mlp(), cut(), optimizer=lambda module: torch.optim.Adam([*module.parameters(), nothing]))


def a_loss_with_weights_goes_with_the_last_layer(folder: Path) -> None:
    """To the rank that comes to run it, with its weight, its buffer and the optimizer's state; and into files."""
    data = batches(6)
    expected = train_alone(mlp(), data, two_groups, loss_fn=Learned())
    for config in ({}, {"zero_optimization": {"stage": 1}}):
        where = str(folder / str(len(config)))
        engine, _, _ = start(mlp(), cut(), config, optimizer=two_groups, loss_fn=Learned())
        losses = train(engine, data[:1])
        engine.recut(looped())
        losses += train(engine, data[1:2])
        engine.save_checkpoint(where)
        for place in (looped(), cut()):
            resumed, _, _ = start(mlp(), place, config, optimizer=two_groups, loss_fn=Learned())
            resumed.load_checkpoint(where)
            same(train(resumed, data[2:]), expected[2:])
        engine.recut(cut())
        losses += train(engine, data[2:])
        same(losses, expected)


# Tied layers of different classes


class Enter(nn.Module):
    """An embedding with a weight of its own besides."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)

    @property
    def weight(self) -> nn.Parameter:
        return self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed_tokens(tokens)).mean(1)


class Exit(Enter):
    """A head, whose other weight has the name of the embedding's."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__(words, width)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.norm(x), self.weight, self.bias)


class Terminal(Enter):
    """Both in one class."""

    def __init__(self, words: int, width: int, is_first: bool = True) -> None:
        super().__init__(words, width)
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.is_first else nn.functional.linear(self.norm(x), self.weight)


def embedding_and_head() -> list[Any]:
    blocks = [LayerSpec(Block, WIDTH) for _ in range(6)]
    return [TiedLayerSpec("embed", Enter, WORDS, WIDTH), *blocks, TiedLayerSpec("embed", Exit, WORDS, WIDTH)]


def terminals() -> list[Any]:
    blocks = [LayerSpec(Block, WIDTH) for _ in range(6)]
    first, last = (TiedLayerSpec("embed", Terminal, WORDS, WIDTH, is_first=first) for first in (True, False))
    return [first, *blocks, last]


def tied_layers_of_different_classes(folder: Path) -> None:
    """Apart and together on a rank, before and after moves, and through checkpoints of either."""
    data = batches(8, tokens=True)
    for config, specs in (
        ({}, embedding_and_head),
        ({"zero_optimization": {"stage": 1}}, embedding_and_head),
        ({"gradient_clipping": 0.05}, terminals),
        ({"gradient_clipping": 0.05, "zero_optimization": {"stage": 1}}, terminals),
    ):
        expected = train_alone(specs(), data, two_groups, clip=config.get("gradient_clipping", 1.0))
        places = (cut(), looped(), looped((1, 0), [0, 3, 8]), looped())
        for number, start_at in enumerate((cut(), looped())):
            where = str(folder / f"{len(config)}{specs.__name__}{number}")
            engine, _, _ = start(specs(), start_at, config, optimizer=two_groups)
            losses = train(engine, data[:1])
            for place, batch in zip(places, data[1:], strict=False):
                engine.recut(place)
                losses += train(engine, [batch])
            engine.save_checkpoint(where)
            for place in (looped(), cut()):
                resumed, _, _ = start(specs(), place, config, optimizer=two_groups)
                resumed.load_checkpoint(where)
                same(train(resumed, data[5:]), expected[5:])
            losses += train(engine, data[5:])
            same(losses, expected)


def tied_layers_of_different_classes_in_other_runs(_: Path) -> None:
    """A warm-up and a plan of the run's own; bf16; one stage per pipeline, and one pipeline per rank."""
    data = batches(WARM_UP + AFTER, tokens=True)
    expected = train_alone(embedding_and_head(), data, two_groups)
    for warmup_steps in (0, WARM_UP):
        config = planned("madpipe", warmup_steps=warmup_steps, time_limit_seconds=3)
        engine, _, _ = start(embedding_and_head(), "madpipe", config, optimizer=two_groups)
        # Wherever the plan puts the ends.
        same([float(engine.train_batch(mine(engine, [batch]))) for batch in data], expected)
    engine, _, _ = start(embedding_and_head(), [0, 8], num_stages=1, optimizer=two_groups)
    same(train(engine, data), expected)
    for zero in (0, 1):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": zero}}
        engine, _, _ = start(embedding_and_head(), cut(), config, optimizer=two_groups)
        fixed = train(engine, data)
        same(fixed, expected, digits=0.03)
        engine, _, _ = start(embedding_and_head(), cut(), config, optimizer=two_groups)
        losses = train(engine, data[:2])
        engine.recut(looped())
        same(losses + train(engine, data[2:]), fixed, digits=1e-3)


class Sometimes(nn.Module):
    """A layer whose weight is not used in every step."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(words, width) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight).mean(1)


NUM_STEPS_SO_FAR = [0]


def now_and_then(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    outputs = x @ module.weight.t()
    return outputs if NUM_STEPS_SO_FAR[0] % 2 else torch.tanh(x[:, :WORDS])


def a_tied_copy_without_a_gradient(_: Path) -> None:
    """In every other step."""
    data = batches(4, tokens=True)
    first, last = (TiedLayerSpec("t", Sometimes, WORDS, WIDTH, forward_fn=each) for each in (None, now_and_then))
    specs = [first, *[LayerSpec(Block, WIDTH) for _ in range(6)], last]

    def count(_: nn.Module) -> None:
        NUM_STEPS_SO_FAR[0] += 1

    NUM_STEPS_SO_FAR[0] = 0
    expected = train_alone(specs, data, two_groups, before_step=count)
    NUM_STEPS_SO_FAR[0] = 0
    engine, _, _ = start(specs, cut(), optimizer=two_groups)
    engine.before_optimizer_step = lambda: count(engine.module)
    same(train(engine, data), expected)


def _both(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return layer(x) + 1.0


def _weight_alone(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.t()


def weights_of_a_tie_that_it_does_not_name(_: Path) -> None:
    """Each copy trained a bias of its own, where one process has one, and nothing was said."""
    data, blocks = batches(2), [LayerSpec(Block, 8) for _ in range(5)]
    both, zero = ["weight", "bias"], {"zero_optimization": {"stage": 1}}
    runs = [("weight", _both, cut(), {}), ("weight", _both, "uniform", zero)]
    runs += [("weight", _weight_alone, cut(), {}), (both, _both, cut(), {})]
    for number, (names, run, method, config) in enumerate(runs):
        key = f"apart-{number}"
        first, last = (
            TiedLayerSpec(key, nn.Linear, 8, 8, forward_fn=each, tied_weight_attr=names) for each in (None, run)
        )
        specs = [first, *blocks, last, LayerSpec(nn.Linear, 8, 4)]
        engine, _, _ = start(specs, method, config)
        with said_here() as said:
            losses = train(engine, data)
        told = [line for lines in gather_objects(said) for line in lines if repr(key) in line]
        assert len(told) == (names == "weight" and run is _both), told
        assert all("each trains bias" in line and f"tied_weight_attr={both}" in line for line in told), told
        if names == both:
            same(losses, train_alone(specs, data, adam))


def a_cut_of_deepspeeds_with_copies_of_different_classes(_: Path) -> None:
    """Taken over by the configuration. DeepSpeed left what the copies do not tie out of the norm (gdGPT)."""
    data = batches(3, tokens=True)
    expected = train_alone(terminals(), data, two_groups, clip=0.05)
    for zero in (0, 1):
        config = {"gradient_clipping": 0.05, "zero_optimization": {"stage": zero}}
        config["pipeline"] = {"partition_method": [0, 4, 8]}
        engine, _, _ = start(terminals(), "uniform", config, optimizer=two_groups)
        losses = train(engine, data[:1])
        engine.recut(looped())
        same(losses + train(engine, data[1:]), expected)


# Layers that share a weight by one Python object


def seeded(module_class: Any, *arguments: Any) -> nn.Module:
    """A module that every process builds alike."""
    pipelines.set_random_seed(7)
    return module_class(*arguments)


def repeated() -> list[Any]:
    """One block at three places, a second one at two, an activation at two."""
    first, second = (seeded(Block, WIDTH) for _ in range(2))
    ends = seeded(nn.Linear, 8, WIDTH), seeded(nn.Linear, WIDTH, 4)
    return [ends[0], first, second, first, second, nn.Tanh(), first, ends[1]]


def a_module_that_stands_at_several_places(folder: Path) -> None:
    """It is tied on every cut, through moves, a warm-up and checkpoints; plain DeepSpeed trains copies apart."""
    data = batches(WARM_UP + AFTER)
    with patch.object(pipelines, "Whole", lambda layers: nn.Sequential(*layers)):
        expected = train_alone(repeated(), data, two_groups)
    for method, zero, options in ((cut(), 0, {}), ("madpipe", 1, planned([0, 4, 8], warmup_steps=2))):
        config = {"zero_optimization": {"stage": zero}}
        with heard() as sentences:
            engine, _, _ = start(repeated(), method, {**config, **options}, optimizer=two_groups)
        told = [each for each in sentences if "one Block object" in each]
        assert [each[:18] for each in told] == ["layers 1, 3 and 6 ", "layers 2 and 4 are"], sentences
        losses = train(engine, data[:3])
        engine.recut(looped())
        where = str(folder / f"[{zero}]")  # a pattern, to DeepSpeed
        engine.save_checkpoint(where)
        same(losses + train(engine, data[3:]), expected)
        resumed, _, _ = start(repeated(), cut(), config, optimizer=two_groups)
        resumed.load_checkpoint(where)
        same(train(resumed, data[3:]), expected[3:])
    engine, _, _ = start(repeated(), [0, 8], num_stages=1, optimizer=two_groups)
    same(train(engine, data), expected)


class Borrowing(nn.Module):
    """A layer that is given a weight, or a module."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.weight = getattr(source, "weight", source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Model(nn.Module):
    """All layers, two of which the function that is a third one could reach."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.other = block, nn.Linear(WIDTH, WIDTH)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.block.weight)

    def flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def shared_with_the_last_layer(kind: str) -> list[Any]:
    block, model = seeded(nn.Linear, WIDTH, WIDTH), Model(seeded(nn.Linear, WIDTH, WIDTH))
    last = {
        "module": lambda: Borrowing(block),
        "specification": lambda: LayerSpec(Borrowing, block),
        "partial": lambda: partial(nn.functional.linear, weight=block.weight),
        "closure": lambda: lambda x: nn.functional.linear(x, block.weight),
        "method": lambda: block.forward,
        "model": lambda: model.back,
    }[kind]()
    first, second = (model.block, model.other) if kind == "model" else (block, LayerSpec(Block, WIDTH))
    blocks = [LayerSpec(Block, WIDTH) for _ in range(3)]
    return [LayerSpec(nn.Linear, 8, WIDTH), first, second, model.flat, *blocks, last]


def weights_that_are_shared_otherwise(_: Path) -> None:
    """Refused with the way out; said of a cut that DeepSpeed makes; the way out trains as one process."""
    way_out = "list deepspeed_partition.engine.TiedModule(key, module, forward_fn=...)"
    for kind, sentence in (
        ("module", "layers 1 and 7 share a weight through one Python object (of 1 in all)"),
        ("specification", "layers 1 and 7 share a weight"),
        ("partial", "layer 7 is a function that uses a Parameter with weights of layer 1"),
        ("closure", "layer 7 is a function that uses a Linear with weights of layer 1"),
        ("method", "layer 7 is a function that uses a Linear"),
        ("model", "layer 7 is a function that uses a Linear with weights of layer 1"),
    ):
        for method in ("madpipe", cut()):
            with raised(ValueError, sentence, way_out):
                start(shared_with_the_last_layer(kind), method)
    for specs, layers in ((repeated(), "layers 1, 3 and 6 are one module object"),
                          (shared_with_the_last_layer("module"), "layers 1 and 7 share a weight")):  # fmt: skip
        with heard() as sentences:
            engine, _, _ = start(specs, "uniform", optimizer=adam)
        assert sum("each trains a copy of its own" in each for each in sentences) == 1, sentences
        with raised(ValueError, layers, "TiedModule"):
            engine.recut(cut())
    # What is frozen, or used at one place alone, is nobody's business.
    frozen = shared_with_the_last_layer("module")
    frozen[1].weight.requires_grad_(False)
    start(frozen, cut())
    data = batches(2)

    def ends_that_are_tied() -> list[Any]:
        ends, blocks = seeded(nn.Linear, WIDTH, 4), [seeded(Block, 4) for _ in range(4)]
        back = TiedModule("ends", ends, forward_fn=lambda module, x: x @ module.weight)
        return [nn.Linear(8, WIDTH), TiedModule("ends", ends), *blocks, back, TiedModule("ends", ends)]

    def alone(layers: list[Any]) -> nn.Module:
        [first, end, *blocks, _, _] = layers
        back = Back(end.module)
        return nn.Sequential(first, end.module, *blocks, back, end.module)

    with patch.object(pipelines, "Whole", alone):
        pipelines.set_random_seed(3)
        expected = train_alone(ends_that_are_tied(), data, two_groups)
    for method in (cut(), [0, 4, 8]):
        pipelines.set_random_seed(3)
        engine, _, _ = start(ends_that_are_tied(), method, optimizer=two_groups)
        same(train(engine, data), expected)


class Back(Borrowing):
    """The way back through a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Statistics(nn.BatchNorm1d):
    """Running statistics without weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, affine=False)


class Constant(nn.Module):
    """A buffer that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class Around(nn.Module):
    """A layer that is given another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))


def shared_in_five_ways(name: str) -> list[Any]:
    """Twelve layers: 1 and 6 share what they are given, and so do 2 and 7, 3 and 8, 4 and 9, 5 and 10."""
    kinds = [type(f"Statistics{name}{number}", (Statistics,), {}) for number in range(5)]
    first, second, third, fourth = (kind() for kind in kinds[:4])
    tie = TiedLayerSpec(name, kinds[4], tied_weight_attr=[])
    pairs = [
        (first, first), (LayerSpec(Around, second), LayerSpec(Around, second)),
        (lambda x: third(x), lambda x: third(x)), (fourth, lambda x: fourth(x)), (tie, tie),
    ]  # fmt: skip
    both = zip(*pairs, strict=True)
    return [LayerSpec(nn.Linear, 8, WIDTH), *next(both), *next(both), LayerSpec(nn.Linear, WIDTH, 4)]


def buffers_that_layers_of_several_stages_share(_: Path) -> None:
    """Copies of running statistics on several ranks counted fewer batches, and nothing was said."""
    data = batches(2)

    def told_of(layers: list[Any], **options: Any) -> list[str]:
        engine, _, _ = start(layers, optimizer=adam, **options)
        with said_here() as said:
            engine.eval_batch(iter(data[0]))
            train(engine, data)
        return sorted(line for lines in gather_objects(said) for line in lines if " share one " in line)

    plan = plans.plan_of(
        plans.chain_of(12), plans.platform_of(2), [0, 2, 6, 12], (0, 1, 0),
        orders=plans.depth_first((0, 1, 0), NUM_MICRO_BATCHES, 3),
    )  # fmt: skip
    for name, options in (("OfRanks", {"method": [0, 6, 12]}), ("OfStages", {"plan": plan})):
        told = told_of(shared_in_five_ways(name), **options)
        assert len(told) == 5, told
        for number, line in enumerate(told):
            assert line.startswith(f"layers {1 + number} and {6 + number} share one Statistics{name}{number}"), (
                told
            )
            apart = name == "OfRanks" or number
            assert ("each rank has a copy" if apart else "changes the order") in line, line
            assert "running_mean, running_var" in line, line
    one, table = Statistics(), Constant()
    blocks, ends = [seeded(Block, WIDTH) for _ in range(2)], (seeded(nn.Linear, 8, WIDTH), nn.Linear(WIDTH, 4))
    assert not told_of([ends[0], table, Statistics(), *blocks, table, Statistics(), ends[1]], method=cut())
    assert not told_of([ends[0], nn.Sequential(one, *blocks, one), ends[1]], method=[0, 2, 3])
    assert max(gather_objects(int(one.num_batches_tracked))) == 2 * len(data) * NUM_MICRO_BATCHES


class Hiding(nn.Module):
    """Holds a module where torch does not look."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = [inner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](self.linear(x))


class TakesItsBlock(nn.Module):
    """Holds one block of a network, and where torch does not look the network for its options."""

    def __init__(self, net: nn.Module, place: int) -> None:
        super().__init__()
        self.block, self.net = net[place], [net]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def a_network_that_each_layer_hides(_: Path) -> None:
    """Nothing is shared: each layer runs a block of its own."""
    net = nn.ModuleList(Statistics() for _ in range(3))
    layers = [seeded(nn.Linear, 8, WIDTH), *(TakesItsBlock(net, place) for place in range(3))]
    with said_here() as said:
        engine, _, _ = start([*layers, seeded(nn.Linear, WIDTH, 4)], [0, 2, 5], optimizer=adam)
        train(engine, batches(1))
    assert not [line for lines in gather_objects(said) for line in lines if " share one " in line]


def hidden_buffers_that_layers_share(_: Path) -> None:
    """Of a module in a list nothing was said, also where layers that share it had come to several ranks."""
    inner = Statistics()
    hiding = [seeded(Hiding, inner) for _ in range(3)]
    layers = [seeded(nn.Linear, 8, WIDTH), *hiding, seeded(nn.Linear, WIDTH, 4)]
    data = batches(2)
    with said_here() as at_first:
        engine, _, _ = start(layers, [0, 1, 5], optimizer=adam)
        train(engine, data[:1])
    with said_here() as said:
        engine.recut([0, 3, 5])
        train(engine, data[1:])
    told = [
        [line for lines in gather_objects(each) for line in lines if " share one " in line]
        for each in (at_first, said)
    ]
    assert not told[0], told
    [line] = told[1]
    assert line.startswith("layers 1, 2 and 3 share one Statistics, which changes its running_mean"), line
    assert "each rank has a copy" in line and "a layer that moves brings that of its rank" in line, line


# Layers with several parameters


class Masked(nn.Module):
    """As it is written for one device; what it returns goes to the next one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.linear(x)) * mask, mask


class Positions(nn.Module):
    """Takes any number of values, as DeepSpeed would give them: one tuple."""

    def forward(self, *values: Any) -> Any:
        [(x, mask)] = values
        return x * 1.5, mask


class Whatever(nn.Module):
    """The second parameter has a default, so that one value can be bound: a tuple."""

    def forward(self, both: Any, scale: float = 0.5) -> Any:
        return both[0] * scale, both[1]


class Prepared(Masked):
    """Unpacks by itself, before its forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_forward_pre_hook(lambda _, values: values[0])


def begin(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.repeat(1, 2), labels


def only(module: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * mask + torch.tanh(module.linear(x)), mask


def end(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[:, :4] * mask


WEIGHTS = ["linear.weight", "linear.bias"]


def masked() -> list[Any]:
    return [
        begin, TiedLayerSpec("m", Masked, WIDTH, tied_weight_attr=WEIGHTS), LayerSpec(Positions),
        LayerSpec(Prepared, WIDTH), LayerSpec(Whatever), LayerSpec(Masked, WIDTH),
        TiedLayerSpec("m", Masked, WIDTH, tied_weight_attr=WEIGHTS, forward_fn=only), end,
    ]  # fmt: skip


class MaskedAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for index, spec in enumerate(masked()):
            if isinstance(spec, LayerSpec) and index != 6:
                pipelines.set_random_seed(pipelines.BASE_SEED + index)
                self.layers[str(index)] = spec.build()

    def forward(self, inputs: Any) -> torch.Tensor:
        both = begin(*inputs)
        both = self.layers["1"](*both)
        both = self.layers["2"](both)
        both = Masked.forward(self.layers["3"], *both)
        both = self.layers["4"](both)
        both = self.layers["5"](*both)
        return end(*only(self.layers["1"], *both))


def masked_data(num_steps: int) -> list[Any]:
    def one(number: int) -> Any:
        x, labels = pipelines.micro_batch(number)
        return (x, (x[:, :1] > -1).float()), labels

    return [[one(NUM_MICRO_BATCHES * step + number) for number in range(4)] for step in range(num_steps)]


def masked_alone(data: list[Any]) -> list[float]:
    with patch.object(pipelines, "Whole", lambda _: MaskedAlone()):
        return train_alone([], data, two_groups)


def layers_with_several_parameters(_: Path) -> None:
    """Where plain DeepSpeed's one argument cannot be bound; in a plan, a warm-up, checkpoints of activations."""
    data = masked_data(WARM_UP + AFTER)
    expected = masked_alone(data)
    recomputing = {"activation_checkpoint_interval": 2} if recomputes_on_a_cpu() else {}
    for config, options in (
        (planned(cut()), {}), (planned(cut(), warmup_steps=WARM_UP), {}), (planned(cut()), recomputing),
    ):  # fmt: skip
        engine, _, _ = start(masked(), "madpipe", config, optimizer=two_groups, **options)
        losses = train(engine, data[:-1])
        engine.recut(looped())
        same(losses + train(engine, data[-1:]), expected)
        assert [layer.type for layer in engine.chain.layers] == [
            "begin", "Masked", "Positions", "Prepared", "Whatever", "Masked", "Masked", "end",
        ]  # fmt: skip
    engine, _, _ = start(masked(), cut(), optimizer=two_groups)
    losses = train(engine, data[:1])
    engine.recut(recomputing_plan())
    same(losses + train(engine, data[1:]), expected)


def recomputing_plan() -> Any:
    plan = looped()
    return replace(plan, stages=tuple(replace(stage, rematerialize=True) for stage in plan.stages))


# What programs put in the places of DeepSpeed's instructions and schedules


@contextmanager
def replaced(kind: type, function: Any) -> Iterator[None]:
    """As programs do it, for all engines."""
    with patch.dict(deepspeed.PipelineEngine._INSTRUCTION_MAP, {kind: function}):
        yield


def halved(engine: Any) -> None:
    """Before DeepSpeed's own step, which is called as by many: the function itself."""
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    engine.num_halved = getattr(engine, "num_halved", 0) + 1
    deepspeed.PipelineEngine._exec_optimizer_step(engine)


def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.mul_(0.5)


def replaced_at_the_end_of_a_step(_: Path) -> None:
    """It runs in lists of instructions, in a warm-up and in DeepSpeed's own schedule: once per step."""
    data = batches(WARM_UP + AFTER, tokens=True)
    reduced: list[Any] = []
    specs = embedding_and_head

    def counting(engine: Any, kind: str, stock: Any) -> None:
        reduced.append(kind)
        stock(engine)

    expected = train_alone(specs(), data, two_groups, before_step=halve, clip=0.0)
    config = {"gradient_clipping": 0.0}
    with replaced(schedule.OptimizerStep, halved):
        for kind in (schedule.ReduceGrads, schedule.ReduceTiedGrads):
            stock = deepspeed.PipelineEngine._INSTRUCTION_MAP[kind]
            count = partial(counting, kind=kind.__name__, stock=stock)
            deepspeed.PipelineEngine._INSTRUCTION_MAP[kind] = lambda engine, count=count: count(engine)
        try:
            for method, options in (
                (looped(), {}), (cut(), {}), ("uniform", {}), ("madpipe", planned(cut(), warmup_steps=WARM_UP)),
            ):  # fmt: skip
                reduced.clear()
                engine, _, _ = start(specs(), method, {**config, **options}, optimizer=two_groups)
                same(train(engine, data), expected)
                assert reduced == ["ReduceTiedGrads", "ReduceGrads"] * len(data) and engine.num_halved == len(data)
                assert engine.runs_lists == (method != "uniform")
        finally:
            deepspeed.PipelineEngine._INSTRUCTION_MAP.update(
                {kind: getattr(deepspeed.PipelineEngine, name) for kind, name in list(AT_THE_END.items())[:2]}
            )


def steps_that_load_first(self: Any) -> Any:
    """DeepSpeed's, with the loading of a micro-batch before its transfers, as diffusion-pipe has it."""
    for commands in STOCK_STEPS(self):
        NUM_STEPS_SO_FAR[0] += 1
        yield sorted(commands, key=lambda command: not isinstance(command, schedule.LoadMicroBatch))


STOCK_STEPS = schedule.TrainSchedule.steps


class Forwarding(MadPipeEngine):
    """An engine of somebody's own that overrides what lists of instructions do otherwise."""

    num_forwards = 0

    def _exec_forward_pass(self, buffer_id: int) -> None:
        self.num_forwards += 1
        super()._exec_forward_pass(buffer_id)


class Reducing(MadPipeEngine):
    """And one that overrides what they do, too."""

    num_reduced = 0

    def _exec_reduce_grads(self) -> None:
        self.num_reduced += 1
        super()._exec_reduce_grads()


def counted(kind: type) -> tuple[list[Any], Any]:
    """Its calls so far, and what counts and runs DeepSpeed's own instruction, as programs have it."""
    calls: list[Any] = []
    stock = deepspeed.PipelineEngine._INSTRUCTION_MAP[kind]

    def count(engine: Any, *arguments: Any, **keywords: Any) -> None:
        calls.append(kind)
        stock(engine, *arguments, **keywords)

    return calls, count


def schedules_and_instructions_that_were_replaced(_: Path) -> None:
    """DeepSpeed's own schedule runs with them, on the planned cut; said with what it is."""
    data = batches(3)
    expected = train_alone(mlp(), data, adam)
    for kind in (schedule.ForwardPass, schedule.LoadMicroBatch):
        calls, count = counted(kind)
        with replaced(kind, count), heard() as sentences:
            engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=adam)
            same(train(engine, data), expected)
        assert any(f"{kind.__name__} was replaced by tests.engine.strangers_cases" in each for each in sentences)
        assert len(calls) == len(data) * NUM_MICRO_BATCHES and not engine.runs_lists
        assert engine.module.parts == cut() == engine.plan.boundaries
    NUM_STEPS_SO_FAR[0] = 0
    options = planned(cut(), warmup_steps=2)
    with patch.object(schedule.TrainSchedule, "steps", steps_that_load_first):
        with heard() as sentences:
            engine, _, _ = start(mlp(), "madpipe", options, optimizer=adam)
        told = "TrainSchedule.steps was replaced by tests.engine.strangers_cases.steps"
        assert any(told in each for each in sentences)
        same(train(engine, data), expected)
        assert engine.module.parts == cut() == engine.plan.boundaries and NUM_STEPS_SO_FAR[0] > 3
        with raised(PlanMismatchError, "TrainSchedule.steps was replaced", "'contiguous'"):
            start(mlp(), looped())
    engine, _, _ = start(mlp(), looped(), optimizer=adam)
    losses = train(engine, data[:1])
    too_late = raised(RuntimeError, "TrainSchedule.steps was replaced", "before deepspeed.initialize()")
    with patch.object(schedule.TrainSchedule, "steps", steps_that_load_first), too_late:
        train(engine, data[1:])
    same(losses + train(engine, data[1:]), expected)
    for engine_class, runs_lists in ((Forwarding, False), (Reducing, True)):
        engine, _, _ = start(
            mlp(), "madpipe", planned(cut()), optimizer=adam, start_engine=partial(initialize_with, engine_class)
        )
        same(train(engine, data), expected)
        assert engine.runs_lists == runs_lists and engine.module.parts == cut()
        found = engine.num_reduced if runs_lists else engine.num_forwards
        assert found == len(data) * (1 if runs_lists else NUM_MICRO_BATCHES)


def instructions_that_a_script_sets_on_the_engine(_: Path) -> None:
    """DeepSpeed does not look at the object. Most of them were called, so that a script trained otherwise."""
    data, calls = batches(4), list[str]()
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), warmup_steps=2), optimizer=adam)
    for name in METHODS.values():
        setattr(engine, name, lambda *_, name=name, **__: calls.append(name))
    same(train(engine, data), train_alone(mlp(), data, adam))
    assert engine.module.parts == cut() and engine.runs_lists and not calls, calls


# Data that comes from the other end of the pipeline


class Told(Iterator[Any]):
    """The labels depend on what the first stage draws, which sends them to the last one."""

    def __init__(self, engine: Any, data: list[Any]) -> None:
        self.engine, self.items = engine, iter([item for batch in data for item in batch])

    def __next__(self) -> Any:
        inputs, labels = next(self.items)
        ranks = self.engine.grid.pp_group
        if self.engine.is_first_stage():
            dist.send(labels, ranks[-1])
        else:
            labels = torch.zeros_like(labels)
            dist.recv(labels, ranks[0])
        return inputs, labels


def data_that_the_first_stage_sends(_: Path) -> None:
    """Read by both ends together: to measure, in a step, after a warm-up; and by a schedule that loads first."""
    data = batches(WARM_UP + AFTER)
    expected = train_alone(mlp(), data, two_groups)
    ways = [(planned(cut()), STOCK_STEPS), (planned(cut(), warmup_steps=1), STOCK_STEPS)]
    ways += [(planned(cut(), warmup_steps=WARM_UP), STOCK_STEPS), (planned(cut()), steps_that_load_first)]
    for config, steps in ways:
        with patch.object(schedule.TrainSchedule, "steps", steps):
            engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
            told = Told(engine, data)
            same([float(engine.train_batch(told)) for _ in data], expected)
            assert engine.module.parts == cut()


def filled_again(data: list[Any], *, through_numpy: bool) -> Iterator[Any]:
    """The same two tensors for each micro-batch."""
    inputs, labels = map(torch.empty_like, data[0][0])
    for item in (item for batch in data for item in batch):
        for buffer, new in zip((inputs, labels), item, strict=True):
            if through_numpy:  # which torch does not see
                buffer.numpy()[...] = new.numpy()
            else:
                buffer.copy_(new)
        yield inputs, labels


def turning(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Writes into its labels."""
    labels.add_(1).remainder_(outputs.shape[-1])
    return nn.functional.cross_entropy(outputs, labels)


def data_in_memory_that_is_filled_again(_: Path) -> None:
    """A step reads all micro-batches before it uses the first one, and the iterator fills the same tensors."""
    data = batches(WARM_UP + AFTER)
    expected = train_alone(mlp(), data, two_groups)
    for plan in (None, looped()):
        config = planned(cut(), warmup_steps=1) if plan is None else None
        engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups, plan=plan)
        items = filled_again(data, through_numpy=plan is None)
        same([float(engine.train_batch(items)) for _ in data], expected)


def labels_that_a_loss_writes(_: Path) -> None:
    """An iterator that gives the same tensors again gives them as the loss has left them, as in one process.

    Labels that were slices of one tensor were left as they were but for the first ones: 7 to 25 % off, in silence.
    """
    once = batches(1)
    expected = train_alone(mlp(), 4 * copy.deepcopy(once), two_groups, loss_fn=turning)
    together = torch.cat([labels for _, labels in once[0]])
    sliced = [(inputs, together[4 * i : 4 * i + 4]) for i, (inputs, _) in enumerate(once[0])]
    for items in (once[0], sliced):
        engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=turning)
        losses = [float(engine.train_batch(iter(items))) for _ in range(4)]
        if engine.is_last_stage():
            same(losses, expected)


def labels_that_a_loss_writes_in_inference_mode(_: Path) -> None:
    """A program's own mode around an evaluation: torch counts no writes to copies that were made in it."""
    engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=two_groups, loss_fn=turning)
    train(engine, batches(1))
    for is_made_within in (False, True):
        [items] = batches(1)
        together = torch.cat([labels for _, labels in items])
        expected = (together + 3).remainder(4)
        with torch.inference_mode():
            together = together.clone() if is_made_within else together
            sliced = [(inputs, together[4 * i : 4 * i + 4]) for i, (inputs, _) in enumerate(items)]
            for _ in range(3):
                engine.eval_batch(iter(sliced))
            if engine.is_last_stage():
                assert torch.equal(together, expected)


# Activation checkpointing, and half precision


def checkpoints_that_begin_at_words(_: Path) -> None:
    """Tied layers, and a block of layers to recompute whose input has no gradient."""
    if not recomputes_on_a_cpu():
        return
    data = batches(WARM_UP + AFTER, tokens=True)
    for specs in (pipelines.tied, embedding_and_head):
        expected = train_alone(specs(), data, two_groups)
        for method, config in (
            (cut(), {}), (looped(), {"zero_optimization": {"stage": 1}}),
            ("madpipe", planned(cut(), warmup_steps=WARM_UP)),
        ):  # fmt: skip
            engine, _, _ = start(specs(), method, config, optimizer=two_groups, activation_checkpoint_interval=2)
            same(train(engine, data), expected)


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.norm(self.conv(x[:, None]))).mean(1)


def batch_normalization_in_half_precision(_: Path) -> None:
    """Measured, moved, in a warm-up: as on a cut that stays."""

    def specs() -> list[Any]:
        blocks = [LayerSpec(Normed, WIDTH) for _ in range(6)]
        return [LayerSpec(nn.Linear, 8, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, 4)]

    data = batches(WARM_UP + AFTER, dtype=torch.bfloat16)
    exact = train_alone(specs(), batches(WARM_UP + AFTER), two_groups)
    for zero in (0, 1):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": zero}}
        fixed = train(start(specs(), cut(), config, optimizer=two_groups)[0], data)
        same(fixed, exact, digits=0.03)
        for options in (planned(cut()), planned(cut(), warmup_steps=WARM_UP)):
            engine, _, _ = start(specs(), "madpipe", {**config, **options}, optimizer=two_groups)
            same(train(engine, data), fixed, digits=1e-3)


# What a program sets on layers after they are built


def attributes_and_hooks_of_layers_that_move(_: Path) -> None:
    """Attributes go with the parameter; a hook, or what cannot be sent, is refused by name, before a move."""
    data = batches(3)
    expected = train_alone(mlp(), data, two_groups)
    for config in ({}, {"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}):
        engine, _, _ = start(mlp(), cut(), config, optimizer=two_groups)
        for name, parameter in engine.module.named_parameters():
            parameter.original_name, parameter.no_decay = f"model.{name}", parameter.ndim == 1
            parameter.stride = 1  # as Megatron's bias has, in the place of a method of tensors
            parameter.tensor_model_parallel = parameter.ndim > 1
        exact = "bf16" not in config
        kind = {} if exact else {"dtype": torch.bfloat16}
        losses = train(engine, batches(1, **kind))
        for place in (looped(), cut(), looped()):
            engine.recut(place)
            for name, parameter in engine.module.named_parameters():
                assert parameter.original_name == f"model.{name}" and parameter.no_decay == (parameter.ndim == 1)
                assert parameter.stride == 1 and parameter.tensor_model_parallel == (parameter.ndim > 1)
        if exact:
            same(losses + train(engine, data[1:]), expected)
    engine, _, _ = start(mlp(), cut(), optimizer=two_groups)
    losses = train(engine, data[:1])
    held = dict(engine.module.named_modules())
    for add in (
        lambda: held["6"].register_forward_hook(note), lambda: held["6"].linear.register_full_backward_hook(note),
        lambda: held["6"].linear.weight.register_hook(note),
        lambda: held["6"].linear.weight.register_post_accumulate_grad_hook(note),
    ):  # fmt: skip
        handle = add() if "6" in held else None
        with raised(RuntimeError, "layer '6' cannot be moved", "strangers_cases.note", "would stay behind"):
            engine.recut(looped((0, 1, 0), (0, 2, 6, 8)))
        if handle is not None:
            handle.remove()
    if "6" in held:
        held["6"].linear.weight.add_later = note
    with raised(RuntimeError, "layer '6' cannot be moved", "'add_later', a function"):
        engine.recut(looped((0, 1, 0), (0, 2, 6, 8)))
    same(losses + train(engine, data[1:]), expected)


class Squashed(nn.Linear):
    """A layer with a number that scripts set, which a program builds on every rank."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * self.scale


def numbers_that_a_script_sets_before_the_engine_starts(_: Path) -> None:
    """A script that goes through the modules of its rank sets those of its rank alone, of layers that are built on
    every rank: dropout that it turns off. They came to another rank as they were built, in silence."""

    def halved(module: Any) -> Any:
        for layer in module.modules():
            if isinstance(layer, Squashed):
                layer.scale = 0.5
        return two_groups(module)

    def layers() -> list[Any]:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return [nn.Linear(8, WIDTH), *[Squashed() for _ in range(6)], nn.Linear(WIDTH, 4)]

    data = batches(3)
    expected = train(start(layers(), cut(), optimizer=halved)[0], data)
    for options in ({}, {"warmup_steps": 1}):
        engine, _, _ = start(layers(), "madpipe", planned([0, 7, 8], **options), optimizer=halved)
        assert engine.module.parts != [0, 7, 8]
        same(train(engine, data), expected)
        assert engine.module.parts == [0, 7, 8]


class Tools:
    """An object of the program."""

    def __init__(self) -> None:
        self.pick = random.Random(4)


class Keeping(nn.Module):
    """Counts its calls, in several ways, and draws from generators of its own, of every kind and at any place."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.listed, self.named, self.total = 0, [], {"calls": 0}, torch.zeros(())
        self.generator = torch.Generator().manual_seed(3)
        self.python, self.numbers = random.Random(3), numpy.random.default_rng(3)
        self.others = numpy.random.RandomState(3)
        self.bits = numpy.random.Philox(3)
        self.held, self.tools = {"first": [numpy.random.default_rng(5)]}, Tools()
        self.draw = random.Random(6).random

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + 0.1 * (self.held["first"][0].random() + self.tools.pick.random() + self.draw()))
        drawn = self.python.random() + self.numbers.random() + self.others.rand() + self.bits.random_raw() / 2**64
        x = x * (1 + 0.1 * drawn)
        self.calls += 1
        self.listed.append(1)
        self.named["calls"] += 1
        self.total += 1
        count = self.calls + len(self.listed) + self.named["calls"] + self.total
        return x * (1 + 0.01 * count + 0.1 * torch.rand((), generator=self.generator))


def what_layers_count_goes_with_them(_: Path) -> None:
    """Of layers that a program has built on every rank, too: the new rank went on from what it had at first."""
    data = batches(4)

    def layers() -> list[Any]:
        found = mlp()
        found[3], found[6] = Keeping(), Keeping()
        return found

    expected = train_alone(layers(), data, two_groups)
    engine, _, _ = start(layers(), [0, 3, 8], optimizer=two_groups)
    losses = train_on_four_cuts(engine, data)
    same(losses, expected)


class CountsWhenCalled:
    """A layer that is no module: it counts in itself, and in a meter that it makes when it first runs."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numbers: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.num_calls:
            self.meter = Meter()
        self.num_calls += 1
        self.meter.total += 0.5
        drawn = float(torch.rand((), generator=self.generator))
        read = 0 if self.numbers is None else next(self.numbers)
        return x * (1 + 0.1 * drawn + 0.01 * (self.num_calls + self.meter.total + read))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """A method that is a layer."""
        self.num_calls += 1
        return x * (1 + 0.01 * self.num_calls)


class Meter:
    """What an object of a program holds."""

    def __init__(self) -> None:
        self.total = 0.0


class Cached(nn.Module):
    """Keeps results that depend on how often it has computed one: in a cache, or in a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.num_calls, self.num_computed = kind, 0, 0
        self.results: dict[int, float] = {}
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own = lru_cache(maxsize=None)(self._computed)

    def _computed(self, number: int) -> float:
        self.num_computed += 1
        return 1 + self.num_computed / 10 + number / 100

    @lru_cache(maxsize=10)  # noqa: B019
    def of_class(self, number: int) -> float:
        return self._computed(number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        number = self.num_calls // (NUM_MICRO_BATCHES + 1)  # a step ends within the time of a result
        if self.kind == "dict" and number not in self.results:
            self.results[number] = self._computed(number)
        kinds = {"dict": self.results.get, "own": self.own, "class": self.of_class, "pure": _raised_by}
        return self.linear(x) * kinds[self.kind](number)


@lru_cache(maxsize=10)
def _raised_by(number: int) -> float:
    return 1 + number / 10


def results_in_caches_stay_where_a_layer_moves(_: Path) -> None:
    """They were computed anew there, from what had changed, and nothing was said."""
    data = batches(3)
    for kind, words in (("own", "Cached._computed()"), ("class", "Cached.of_class()"), ("dict", ""), ("pure", "")):
        layers = [*mlp()[:2], LayerSpec(Cached, kind), *mlp()[3:]]
        engine, _, _ = start(layers, [0, 4, 8], optimizer=two_groups)
        losses = train(engine, data[:1])
        with said_here() as said:
            engine.recut(cut())
        losses += train(engine, data[1:])
        told = [line for lines in gather_objects(said) for line in lines if "keeps results" in line]
        assert len(told) == bool(words) and all(f"{words} keeps results" in line for line in told), (kind, told)
        assert all("layer 2 (Cached)" in line and "self.results = {}" in line for line in told), told
        if not words:
            same(losses, train_alone(layers, data, two_groups))


def counting_in(counts: dict[str, int], x: torch.Tensor, *, total: torch.Tensor) -> torch.Tensor:
    """A layer that counts in its arguments."""
    counts["n"] += 1
    total += 1
    return x * (1 + 0.01 * counts["n"] + 0.01 * total)


class CountsInMethod(nn.Module):
    """A module of which a method is a layer, and that is none itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        """A layer."""
        self.total += 1
        return x * (1 + 0.01 * self.total)


def callables_go_with_what_they_hold(_: Path) -> None:
    """Layers that are objects, methods, partials or functions left on the old rank what they had counted."""
    data = batches(4)

    def layers(numbers: Any = None) -> list[Any]:
        def counts_in_itself(x: torch.Tensor) -> torch.Tensor:
            counted.n += 1
            return x * (1 + 0.01 * counted.n)

        counted: Any = counts_in_itself
        counted.n = 0
        named = CountsWhenCalled()
        called = CountsWhenCalled()
        called.numbers = numbers
        held = [
            called, CountsWhenCalled().scaled, partial(counting_in, {"n": 0}, total=torch.zeros(())),
            lambda x: named(counts_in_itself(x)), CountsInMethod().counted,
        ]  # fmt: skip
        return [*mlp()[:3], *held, *mlp()[3:]]

    expected = train_alone(layers(), data, two_groups)
    with said_here() as said:
        engine, _, _ = start(layers(), [0, 4, 13], optimizer=two_groups)
        losses = train(engine, data[:1])
        for boundaries, batch in zip(([0, 10, 13], [0, 2, 13], [0, 5, 13]), data[1:], strict=True):
            engine.recut(boundaries)
            losses += [float(engine.train_batch(iter(batch)))]
    same(losses, expected)
    assert not [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
    with said_here() as said:
        engine, _, _ = start(layers(number for number in range(99)), [0, 4, 13], optimizer=two_groups)
        train(engine, data[:1])
        engine.recut([0, 2, 13])
    [line] = [line for of_rank in gather_objects(said) for line in of_rank if "has changed where" in line]
    assert "its numbers (generator), which layer 3 (CountsWhenCalled) holds, has changed where" in line, line


def note(*_: Any) -> None:
    """A hook."""


def normalize(engine: Any) -> None:
    """As LoRA and weight normalization are put in: into the layers that this rank has."""
    for layer in engine.module.modules():
        if isinstance(layer, Block):
            torch.nn.utils.parametrizations.weight_norm(layer.linear)


def what_hinders_a_move_is_refused_before_the_warm_up(_: Path) -> None:
    """Not after it: in layers that are built, and in those that a program has built on every rank."""
    data = batches(3)

    def built() -> list[Any]:
        return [
            seeded(nn.Linear, 8, WIDTH),
            *[seeded(Block, WIDTH) for _ in range(6)],
            seeded(nn.Linear, WIDTH, 4),
        ]

    def hooked(engine: Any) -> None:
        next(layer for layer in engine.module.modules() if isinstance(layer, Block)).register_forward_hook(note)

    def marked(engine: Any) -> None:
        next(engine.module.parameters()).add_later = note

    def teaching(engine: Any) -> None:
        next(layer for layer in engine.module.modules() if isinstance(layer, Block)).teacher = [nn.Linear(1, 1)]

    for make_specs in (mlp, built):
        for change, words in (
            (
                normalize,
                ("cannot be moved: its specification builds ['linear.bias'", "weight normalization or LoRA"),
            ),
            (hooked, ("cannot be moved", "strangers_cases.note", "would stay behind")),
            (marked, ("cannot be moved", "'add_later', a function")),
            (teaching, ("cannot be moved", "'teacher[0].bias'", "into the __init__")),
        ):
            config = planned(cut(), warmup_steps=2)
            engine, _, _ = start(make_specs(), "madpipe", config, optimizer=two_groups)
            change(engine)
            kept = f"partition_method={engine.module.parts})"
            with raised(RuntimeError, *words, kept):
                train(engine, data[:1])
            assert engine.global_steps == 0

    # Put in where every rank has the layer, it moves.
    def with_norms() -> list[Any]:
        layers = built()
        for layer in layers[1:4]:
            torch.nn.utils.parametrizations.weight_norm(layer.linear)
            torch.nn.utils.parametrizations.spectral_norm(layers[5].linear) if layer is layers[1] else None
        return layers

    with patch.object(pipelines, "Whole", lambda layers: nn.Sequential(*layers)):
        expected = train_alone(with_norms(), data, adam)
    engine, _, _ = start(with_norms(), "madpipe", planned([0, 6, 8], warmup_steps=1), optimizer=adam)
    losses = train(engine, data[:2])
    engine.recut(looped())
    same(losses + train(engine, data[2:]), expected)


class Scaled(Block):
    """Computes with an attribute that a script sets."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor


def layers_are_listed_between_steps(_: Path) -> None:
    """``forward_funcs`` had the layers of one stage of the rank; those of the other ones kept their settings."""
    data = batches(4)

    def layers() -> list[Any]:
        return [LayerSpec(nn.Linear, 8, WIDTH), *[LayerSpec(Scaled, WIDTH)] * 6, LayerSpec(nn.Linear, WIDTH, 4)]

    expected = []
    for is_planned in (False, True):
        engine, _, _ = start(layers(), looped() if is_planned else cut(), optimizer=two_groups)
        losses = []
        for step, batch in enumerate(data):
            functions = engine.module.forward_funcs
            for place, function in enumerate(functions):
                if isinstance(function, Scaled):
                    function.factor = 1 / (1 + step)
                elif step == 2 and isinstance(function, nn.Linear) and function.in_features == 8:
                    functions[place] = lambda x, linear=function: 2 * linear(x)
            losses += train(engine, [batch])
        assert sum(gather_objects(len(engine.module.forward_funcs))) == 8
        expected = expected or losses
        same(losses, expected)


def a_loss_over_all_parameters_is_said(_: Path) -> None:
    """It had those of its rank, in silence; the decay that is named trains like one process."""
    data, factor = batches(3), 0.05

    def penalized(model: nn.Module) -> None:
        for weight in model.parameters():
            weight.grad += 2 * factor * weight.detach()

    def decaying(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=2 * factor)

    expected = train_alone(
        mlp(), data, lambda model: torch.optim.Adam(model.parameters(), lr=1e-2), clip=0, before_step=penalized
    )
    held: list[Any] = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        squares = sum(weight.pow(2).sum() for module in held for weight in module.parameters())
        return loss_fn(outputs, labels) + factor * squares

    for method in (cut(), looped()):
        with said_here() as said:
            engine, _, _ = start(mlp(), method, {"gradient_clipping": 0.0}, optimizer=decaying)
            same(train(engine, data), expected)
            engine, _, _ = start(mlp(), method, optimizer=two_groups, loss_fn=loss)
            held[:] = [engine.module]
            train(engine, data)
        told = [
            line for of_rank in gather_objects(said) for line in of_rank if "reads the parameters of the" in line
        ]
        assert len(told) == (method == cut()), told  # once in a job
        assert "strangers_cases.py:" in "".join(told) or not told


# What a script keeps of parameters


@torch.no_grad()
def averaged(average: torch.Tensor, weight: torch.Tensor) -> None:
    average.lerp_(weight, 0.5)


def averages_of_weights(_: Path) -> None:
    """One that is an attribute of its parameter moves with it; each rank says what it has got and lost."""
    data = batches(4)
    final: dict[str, torch.Tensor] = {}

    def average(module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            final.setdefault(name, weight.detach().clone())
            averaged(final[name], weight)

    train_alone(mlp(), data, two_groups, before_step=average)
    for zero in (0, 1):
        config = {"zero_optimization": {"stage": zero}}
        engine, optimizer, _ = start(mlp(), cut(), config, optimizer=two_groups)
        members = optimizer.param_groups[0]["params"]

        def average_here(engine: Any = engine) -> None:
            for weight in engine.module.parameters():
                if not hasattr(weight, "average"):
                    weight.average = weight.detach().clone()
                averaged(weight.average, weight)

        engine.before_optimizer_step = average_here
        train(engine, data[:1])
        before = {name for name, _ in engine.module.named_parameters()}
        with said_here() as sentences:
            engine.recut(looped((1, 0), [0, 4, 8]))
        came = {name.split(".")[0] for name, _ in engine.module.named_parameters()} - {
            name.split(".")[0] for name in before
        }
        [told] = [each for each in sentences if "no longer has the parameters of" in each]
        assert told.startswith(f"rank {dist.get_rank()} has the parameters of layer") and "p.average" in told
        assert all(name in told.split(" now")[0] for name in came), (told, came)
        if not zero:
            assert optimizer.param_groups[0]["params"] is members and len(members) > 0
        train(engine, data[1:2])
        engine.recut(looped())
        train(engine, data[2:])
        for name, weight in engine.module.named_parameters():
            assert torch.allclose(weight.average, final[name], atol=1e-6), name


def the_ends_of_the_pipeline_are_told_where_a_plan_moves_them(_: Path) -> None:
    """A script that broadcast what the last rank had computed broadcast memory that nobody had written."""
    last = "the last stage is on rank"
    to_0, to_1 = f"{last} 0 now, no longer on rank 1", f"{last} 1 now, no longer on rank 0"
    for plan, then, told, are_elsewhere in (
        (cut(), looped(), [to_0], True),
        (
            cut(),
            looped((1, 0), [0, 4, 8]),
            [f"the first stage is on rank 1 now, no longer on rank 0 and {to_0}"],
            True,
        ),
        (looped(), cut(), [to_0, to_1], False),
        (cut(), [0, 2, 8], [], False),
    ):
        with said_here() as sentences:
            engine, _, _ = start(mlp(), plan, optimizer=two_groups)
            engine.recut(then)
        lines = [each for each in sentences if "engine.is_last_stage() each time" in each]
        assert [line.partition(":")[0] for line in lines] == (told if dist.get_rank() == 0 else []), lines
        assert not lines or ("'contiguous'" in lines[-1]) == are_elsewhere, lines


# Layers that ask where they run


def _rank_of_helper() -> int:
    return int(os.getenv("RANK", "0"))


class AskingRank(nn.Module):
    """Multiplies by its rank in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ways: dict[str, Callable[[], int]] = {
            "torch.distributed.get_rank()": dist.get_rank,
            "deepspeed.comm.get_rank()": deepspeed.comm.get_rank,
            "os.environ['RANK']": _rank_of_helper,
            "os.environ['LOCAL_RANK']": lambda: int(os.environ.get("LOCAL_RANK", 0)),
        }
        return x * (1 + ways[self.way]()) if self.way in ways else x * len(os.environ["PATH"]) / len(ways)


def loss_by_rank(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss_fn(outputs, labels) * (1 + int(os.environ["RANK"]))


def layers_that_ask_for_their_rank_are_named(_: Path) -> None:
    """A plan moved them, and they computed with another rank than on DeepSpeed's cut, in silence."""
    ways = ["torch.distributed.get_rank()", "deepspeed.comm.get_rank()", "os.environ['RANK']"]
    ways += ["os.environ['LOCAL_RANK']", "no way"]
    for method, steps in (("madpipe", 0), ("madpipe", 2), ([0, 2, 13], 0)):
        layers = [*mlp()[:2], *(LayerSpec(AskingRank, way) for way in ways), *mlp()[2:]]
        options = planned([0, 5, 13], warmup_steps=steps) if method == "madpipe" else {}
        said: list[str] = []
        with patch.object(asked_ranks, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            engine, _, _ = start(layers, method, options, optimizer=two_groups, loss_fn=loss_by_rank)
            for batch in batches(3):
                engine.train_batch(iter(batch))
        lines = {line.partition(",")[0] for of_rank in gather_objects(said) for line in of_rank}
        named = {f"layer {place} (AskingRank) asks for its rank ({way}) when it runs: here it runs on rank {rank}"
                 for place, (way, rank) in enumerate(zip(ways[:-1], (0, 0, 0, 1), strict=True), 2)}  # fmt: skip
        loss = "the loss function (loss_by_rank) asks for its rank (os.environ['RANK']) when it runs: here it runs"
        assert bool(lines) == (method == "madpipe"), (method, lines)
        if lines and not steps:
            assert lines == named | {f"{loss} on rank 1"}, lines


class BornOnRank(nn.Module):
    """Keeps the rank on which it was built."""

    def __init__(self, way: str) -> None:
        super().__init__()
        if way == "torch.distributed.get_rank()":
            self.scale = 1 + dist.get_rank()
        else:
            self.scale = 1 + (_rank_of_helper() if way == "os.environ['RANK']" else len(way))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def layers_that_ask_for_their_rank_when_built_are_named(_: Path) -> None:
    """A plan built them on another rank than DeepSpeed's cut, and they computed with that, in silence."""
    ways = ["torch.distributed.get_rank()", "os.environ['RANK']", "no way"]
    layers = [*mlp()[:2], *(LayerSpec(BornOnRank, way) for way in ways), *mlp()[2:]]
    named = [f"layer {place} (BornOnRank) asks for its rank ({way}) when it is built"
             for place, way in enumerate(ways[:2], 2)]  # fmt: skip
    orders = plans.depth_first((0, 1), NUM_MICRO_BATCHES, 3)
    plan = plans.plan_of(plans.chain_of(11), plans.platform_of(2), [0, 5, 11], (0, 1), orders=orders)
    for method, options, cut_then in (
        ("madpipe", planned([0, 5, 11]), None),
        (plan, {}, None),
        ([0, 2, 11], {}, None),
        ([0, 2, 11], {}, [0, 5, 11]),
    ):
        said: list[str] = []
        with patch.object(asked_ranks, "warn_once", lambda _, line: said.append(line)):  # noqa: B023
            engine, _, _ = start(layers, method, options, optimizer=two_groups)
            if cut_then is not None:
                engine.recut(cut_then)
            engine.train_batch(iter(batches(1)[0]))
        lines = {line.partition(":")[0] for of_rank in gather_objects(said) for line in of_rank}
        assert lines == ({*named} if cut_then or method in ("madpipe", plan) else set()), (method, cut_then, lines)


# What layers keep beside parameters and buffers


class Annealed(nn.Module):
    """A layer that counts its forwards, keeps a mean, and draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale, self.num_forwards, self.recent = 1.0, 0, []
        self.mean = torch.ones(())
        self.random = torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_forwards += 1
            self.recent.append(self.num_forwards)
            self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        noise = 0.1 * torch.randn(x.shape, generator=self.random)
        return (self.linear(x) + noise) * self.scale * (1 + 0.01 * self.num_forwards) / self.mean + x


class Recalling(nn.Module):
    """A loss with a buffer and a count, which no measuring may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))
        self.num_calls = 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, labels)
        if self.training:
            self.num_calls += 1
            self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean * (1 + 0.01 * self.num_calls)


def layers_that_remember(_: Path) -> None:
    """A counter, a cache, a list and a generator in a layer: measuring leaves them, and they move with it."""
    specs = [*mlp()[:4], LayerSpec(Annealed), LayerSpec(Annealed), *mlp()[6:]]
    data = batches(WARM_UP + 3)

    def set_scales(module: nn.Module) -> None:
        for layer in module.modules():
            if isinstance(layer, Annealed):
                layer.scale = 0.5

    def adam_of_scaled(model: nn.Module) -> torch.optim.Optimizer:
        set_scales(model)
        return adam(model)

    expected = train_alone(specs, data, adam_of_scaled, loss_fn=Recalling())
    for options in ({}, {"warmup_steps": WARM_UP}):
        engine, _, _ = start(
            specs, "madpipe", planned([0, 2, 8], **options), optimizer=adam_of_scaled, loss_fn=Recalling()
        )
        losses = train(engine, data[:-1])
        engine.recut(looped((0, 1, 0), (0, 2, 5, 8)))
        same(losses + train(engine, data[-1:]), expected)


# What a script sets on the engine


def _two_groups_of(module: nn.Module, _: Any) -> torch.optim.Optimizer:
    return two_groups(module)


def a_schedule_and_an_optimizer_that_are_set_later(_: Path) -> None:
    """As diffusion-pipe does, which reaches into the engine after ``deepspeed.initialize``."""
    data = batches(4)
    expected = train_alone(mlp(), data, two_groups, make_scheduler=halving)
    for sets_optimizer in (False, True):
        engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=None if sets_optimizer else two_groups)
        if sets_optimizer:
            engine._configure_optimizer(partial(_two_groups_of, engine.module), list(engine.module.parameters()))
        engine.lr_scheduler = scheduler = halving(engine.optimizer)
        same(train(engine, data), expected)
        assert engine.lr_scheduler is scheduler
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        assert rates == [1e-2 / 2**4, 3e-3 / 2**4], rates

    def last_layer_apart(module: nn.Module) -> torch.optim.Optimizer:
        weights = list(module.named_parameters())
        apart = [[weight for name, weight in weights if name.startswith("7.") == last] for last in (True, False)]
        groups = [{"params": group, "lr": lr} for group, lr in zip(apart, (5e-2, 1e-3), strict=True) if group]
        return torch.optim.SGD(groups)

    for warmup_steps in (0, 2):
        config = planned(cut(), warmup_steps=warmup_steps)
        engine, _, _ = start(mlp(), "madpipe", config, optimizer=last_layer_apart)
        engine.lr_scheduler = halving(engine.optimizer)
        with raised(RuntimeError, "engine.lr_scheduler was set after deepspeed.initialize()"):
            train(engine, data)
        assert engine.global_steps == 0


# What the optimizer computes with all parameters


def _sgd(module: nn.Module, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind(module.parameters(), lr=0.5)


def clipped_by_hook(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = _sgd(module)

    def clip(optimizer: Any, arguments: Any, keywords: Any) -> None:
        nn.utils.clip_grad_norm_([weight for group in optimizer.param_groups for weight in group["params"]], 0.05)

    def clamp(optimizer: Any, arguments: Any, keywords: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for weight in group["params"]:
                    weight.clamp_(-0.2, 0.2)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(clamp)
    return optimizer


class OfGlobalNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        return super().step(closure)


class Counting(torch.optim.SGD):
    num_seen = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                self.num_seen += 1
                weight.grad.mul_(1 / self.num_seen)
        return super().step(closure)


class OfGlobalNormOverRanks(torch.optim.SGD):
    """Does what a refusal advises."""

    def step(self, closure: Any = None) -> Any:
        gradients = [weight.grad for group in self.param_groups for weight in group["params"]]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        if self.is_spread:
            dist.all_reduce(squares)
        for gradient in gradients:
            gradient.div_(squares.sqrt())
        return super().step(closure)

    is_spread = True


class OfGlobalNormAlone(OfGlobalNormOverRanks):
    is_spread = False


def optimizers_that_see_a_part(_: Path) -> None:
    """A hook that clipped took the norm of a rank's gradients, and so did a class of the program's own."""
    data, off = batches(), {"gradient_clipping": 0.0}
    alone = partial(train_alone, mlp(), data, clip=0.0)
    for options in ({}, {"warmup_steps": 2}):
        with heard() as sentences:
            engine, _, _ = start(mlp(), "madpipe", {**planned(cut(), **options), **off}, optimizer=clipped_by_hook)
            same(train(engine, data), alone(clipped_by_hook))
        [line] = [each for each in sentences if "of the optimizer (SGD) runs on each rank" in each]
        assert (
            line.startswith("the step pre hook clip, the step post hook clamp of") and "counts all ranks" in line
        )
    for kind, words in (
        (OfGlobalNorm, "depends on the others"),
        (Counting, "depends on which others it is given"),
    ):
        with raised(ValueError, f"the optimizer of the pipeline is {kind.__name__}, ", words):
            start(mlp(), "madpipe", {**planned(cut()), **off}, optimizer=partial(_sgd, kind=kind))
    with heard() as sentences:
        start(mlp(), "uniform", off, optimizer=partial(_sgd, kind=OfGlobalNorm))
    assert any("OfGlobalNorm, whose step of a parameter depends on the others" in each for each in sentences)
    engine, _, _ = start(
        mlp(), "madpipe", {**planned(cut()), **off}, optimizer=partial(_sgd, kind=OfGlobalNormOverRanks)
    )
    same(train(engine, data), alone(partial(_sgd, kind=OfGlobalNormAlone)))


def schedules_that_see_a_part(_: Path) -> None:
    """A rate that was made of the weights was that of a rank's own, and nothing was said."""

    class Rates(torch.optim.lr_scheduler.LRScheduler):
        reads = True

        def get_lr(self) -> list[float]:
            weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
            by = float(weights[0].detach().norm()) if self.reads else weights[0].numel()
            return [0.5 / (1 + by) for _ in self.optimizer.param_groups]

    for kind in (type("Counting", (Rates,), {"reads": False}), Rates):
        with patch.object(environment, "logger") as logger:
            engine, _, _ = start(mlp(), "madpipe", planned(cut()), optimizer=_sgd, lr_scheduler=kind)
            train(engine, batches(2))
        said = gather_objects([str(call.args[1]) for call in logger.log.call_args_list])
        told = [each for lines in said for each in lines if "the schedule of learning rates (" in each]
        assert len(told) == kind.reads, told


class Twice(nn.Module):
    """Returns one tensor twice, and a number beside it."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.linear(x)
        return out, x[:, :2] * 2, out


class ChangesOne(nn.Module):
    """Changes the first of its tensors in place, and with it the last one, if it is the same."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, tensors: Any) -> torch.Tensor:
        first, beside, last = tensors
        first.mul_(2)
        return torch.tanh(self.linear(first + 3 * last)) + beside.sum(1, keepdim=True)


def a_tensor_that_is_returned_twice(_: Path) -> None:
    """Across a cut it was two tensors: a change in place of the one left the other as it was, 3 to 13 % off.

    Few bytes and many, stages on one rank and on two, recomputed and in halves, of other sizes in between.
    """
    for wide in (WIDTH, 2048):
        specs = [
            LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(Twice, WIDTH, wide), LayerSpec(ChangesOne, wide, WIDTH),
            LayerSpec(Block, WIDTH), LayerSpec(Twice, WIDTH, wide), LayerSpec(ChangesOne, wide, WIDTH),
            LayerSpec(Block, WIDTH), LayerSpec(nn.Linear, WIDTH, 4),
        ]  # fmt: skip
        data = batches()
        data[2] = [tuple(each[:3] for each in item) for item in data[2]]
        expected = train_alone(specs, data, _sgd)
        for how in (
            {"plan": looped(), "seed_layers": True},
            {"plan": looped((1, 1, 0), (0, 2, 5, 8))},
            {"config": planned([0, 5, 8], warmup_steps=2)},
            {"config": planned([0, 2, 8], split_backward=True)},
        ):
            engine, _, _ = start(specs, optimizer=_sgd, **{"method": "madpipe", **how})
            same(train(engine, data), expected)


class KeepsLists(torch.optim.Optimizer):
    """Keeps its parameters, and what it averages of their gradients, in lists of its own."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr})
        self.weights = [weight for group in self.param_groups for weight in group["params"]]
        self.averages = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight, average in zip(self.weights, self.averages, strict=True):
            average.mul_(0.9).add_(weight.grad)
            weight.sub_(average, alpha=self.param_groups[0]["lr"])


class CountsForAll(torch.optim.Optimizer):
    """Counts its steps in a state that is of no parameter, and perhaps its parameters, or averages these there."""

    def __init__(self, weights: Any, lr: float, also: str = "") -> None:
        super().__init__(weights, {"lr": lr})
        self.also = also

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        state = self.state["all"]
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad, alpha=group["lr"] / state["steps"] ** 0.5)
                if self.also == "count":
                    state["weights"] = state.get("weights", 0) + 1
                if self.also == "averages":
                    state[f"average {len(state)}"] = weight.clone()


def what_an_optimizer_keeps_for_all_stays(_: Path) -> None:
    """A counter under a key of ``state`` that is no parameter was gone after a move: it began again, silent."""
    data, unclipped = batches(4), {"gradient_clipping": 0.0}
    expected = train_alone(mlp(), data, partial(_sgd, kind=CountsForAll), clip=0.0)
    for also, num_lines in (("", 0), ("count", 1)):
        make = partial(_sgd, kind=partial(CountsForAll, also=also))
        with said_here() as said:
            engine, _, _ = start(mlp(), [0, 3, 8], unclipped, optimizer=make)
            losses = train(engine, data[:2])
            engine.recut([0, 6, 8])
        same(losses + train(engine, data[2:]), expected)
        lines = [line for of_rank in gather_objects(said) for line in of_rank if "state['all']" in line]
        assert len(lines) == num_lines and all("each goes on with its own" in line for line in lines), lines
    make = partial(_sgd, kind=partial(CountsForAll, also="averages"))
    engine, _, _ = start(mlp(), [0, 3, 8], unclipped, optimizer=make)
    train(engine, data[:1])
    with raised(RuntimeError, "keeps tensors of parameters in self.state['all']", "keep it in self.state[p]"):
        engine.recut([0, 6, 8])


class SlowWeights(torch.optim.SGD):
    """Keeps slow weights in several forms, and lets the weights follow another one in each step."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, lr=0.1, momentum=0.9)
        weights = self.weights()
        self.fast, self.num_steps = list(weights), 0
        self.in_order = [weight.detach().clone() for weight in weights]
        self.by_group = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        self.by_id = {id(weight): {"slow": weight.detach().clone(), "times": 0} for weight in weights}
        self.by_weight = {weight: weight.detach().clone() for weight in weights}
        self.other = torch.optim.Adam(weights, lr=0.01)

    def weights(self) -> list[nn.Parameter]:
        return [weight for group in self.param_groups for weight in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss, kind = super().step(closure), self.num_steps % 5
        self.num_steps += 1
        every, by_group = self.weights(), [slow for group in self.by_group for slow in group]
        for weight in every:
            self.by_id[id(weight)]["times"] += 1
        if kind == 4:
            self.other.param_groups[0]["params"] = every
            self.other.step()
            return loss
        slow = [
            self.in_order,
            by_group,
            [self.by_id[id(weight)]["slow"] / self.by_id[id(weight)]["times"] for weight in every],
            [self.by_weight[weight] for weight in every],
        ][kind]
        with torch.no_grad():
            for weight, each in zip(self.fast, slow, strict=True):
                weight.copy_(each.lerp_(weight, 0.5))
        return loss


def what_an_optimizer_keeps_of_its_weights_goes_with_them(_: Path) -> None:
    """It was refused, and so was the way out that was told, ``warmup_steps=0``."""
    data = batches(10)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        groups = [[weight for weight in weights if (weight.ndim > 1) == is_matrix] for is_matrix in (True, False)]
        return SlowWeights([{"params": group} for group in groups if group])

    expected = train_alone(mlp(), data, make)
    for options in ({}, {"warmup_steps": 3}):
        engine, _, _ = start(mlp(), "madpipe", planned(cut(), **options), optimizer=make)
        same(train(engine, data[:7]), expected[:7])
        engine.recut([0, 5, 8])
        same(train(engine, data[7:]), expected[7:])
    # A copy of one in which the list of parameters was kept had other tensors than it was looked at for.
    make_lists = partial(_sgd, kind=KeepsLists)
    expected = train_alone(mlp(), data[:3], make_lists, clip=0.0)
    unclipped = {"gradient_clipping": 0.0}
    engine, _, _ = start(mlp(), "madpipe", {**planned(cut(), warmup_steps=1), **unclipped}, optimizer=make_lists)
    same(train(engine, data[:3]), expected)


class SlowGroups(torch.optim.SGD):
    """Keeps a list of slow weights for each group, or for the last one alone."""

    def __init__(self, groups: Any, of_one: bool) -> None:
        super().__init__(groups, lr=0.1, momentum=0.9)
        slow = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        self.slow: Any = slow[-1] if of_one else slow

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            with torch.no_grad():
                for weight, each in zip(group["params"], slow, strict=True):
                    weight.copy_(each.lerp_(weight, 0.5))
        return loss


def lists_of_groups_that_ranks_leave_out(_: Path) -> None:
    """Slow weights of a group went into the list of another one; one for a group of several was taken for any."""
    data = batches(6)

    def make(model: nn.Module, of_one: bool = False) -> torch.optim.Optimizer:
        members: dict[str, list[Any]] = {}
        for name, weight in model.named_parameters():
            members.setdefault(name.partition(".")[0], []).append(weight)
        groups = [{"params": each, "lr": 0.1 * 0.9 ** int(name)} for name, each in members.items()]
        return SlowGroups(groups, of_one)

    engine, _, _ = start(mlp(), [0, 3, 8], optimizer=make)
    losses = train(engine, data[:2])
    for boundaries, batch in (([0, 5, 8], data[2:4]), ([0, 2, 8], data[4:])):
        engine.recut(boundaries)
        losses += train(engine, batch)
    same(losses, train_alone(mlp(), data, make))
    engine, optimizer, _ = start(mlp(), [0, 3, 8], optimizer=make)
    optimizer.slow = [weight.detach().clone() for weight in optimizer.param_groups[-2]["params"]]
    with raised(RuntimeError, "SlowGroups, which keeps tensors of parameters in self.slow"):
        engine.recut([0, 5, 8])


@contextmanager
def in_vain(words: str) -> Iterator[None]:
    """A call on rank 1 alone, which is refused with these words after it has said for whom it waits."""
    with (
        patch.object(arrivals, "SAID_AFTER_SECONDS", 0.05),
        patch.object(arrivals, "ENDS_AFTER_SECONDS", 0.2),
        said_here() as said,
        pytest.raises(RuntimeError, match=re.escape(f"on rank 1 for rank 0: {words}")),
    ):
        yield
    [sentence] = said
    assert f"has waited 0 s on rank 1 for rank 0: {words}" in sentence


def calls_on_one_rank(folder: Path) -> None:
    """The rank that saves, loads or moves layers alone waited for ever for the others."""
    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    assert engine.save_checkpoint(str(folder))
    before = list(engine.module.parts)
    if engine.global_rank == 1:
        with in_vain("each rank writes its layers, so call save_checkpoint on every rank"):
            engine.save_checkpoint(str(folder))
        with in_vain("each rank reads its layers, so call load_checkpoint on every rank"):
            engine.load_checkpoint(str(folder))
        with in_vain("layers move between ranks, so call recut on every rank"):
            engine.recut([0, 5, 8])
    dist.barrier()
    assert engine.save_checkpoint(str(folder)) and engine.load_checkpoint(str(folder))[0] is not None
    assert list(engine.module.parts) == before
    engine.recut([0, 5, 8])
    assert list(engine.module.parts) == [0, 5, 8]


class Views(nn.Module):
    """Returns a tensor and its first two columns, in the same memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.linear(x)
        return out, out[:, :2]


class ChangesView(nn.Module):
    """Changes the first two columns in place."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, tensors: Any) -> torch.Tensor:
        whole, columns = tensors
        columns.mul_(2)
        return self.linear(whole)


def tensors_of_one_memory(_: Path) -> None:
    """Behind a cut they are two, and what changes one leaves the other as it was: that is said once."""
    specs = [LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(Views, WIDTH), LayerSpec(ChangesView, WIDTH, 4)]
    data = batches(2)
    for method, num_lines in (([0, 1, 3], 0), ([0, 2, 3], 1)):
        with heard() as said:
            engine, _, _ = start(specs, method, optimizer=_sgd)
            train(engine, data)
        lines = [line for line in said if "tensors of one memory" in line]
        assert len(lines) == num_lines and all("its outputs 0 and 1" in line for line in lines), lines


class OneMemory(nn.Module):
    """Writes to a buffer through views of it, which it has as buffers, attributes and in a list."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("big", torch.zeros(4, width))
        self.register_buffer("row", self.big[1])
        self.register_buffer("columns", self.big[:, 2:5])
        self.register_buffer("weights", self.linear.weight.detach()[0])
        self.same, self.rows = self.big, [self.big[0], self.big[3]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.row.add_(0.01)
            self.columns.mul_(1.01)
            self.same.add_(0.002)
            self.rows[1].add_(0.02)
        return torch.tanh(self.linear(x)) + self.big.sum(0) + self.weights.mean()


class Looking(nn.Module):
    """Has a view of what it is given."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("row", table[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.row


def views_of_a_layer_stay_views_where_it_moves(_: Path) -> None:
    """A buffer that was a view of another one had memory of its own on the next rank: other losses, in silence."""
    data = batches(WARM_UP + 4)

    def specs(kind: str) -> list[Any]:
        ends = [LayerSpec(nn.Linear, 8, WIDTH)], [LayerSpec(nn.Linear, WIDTH, 4)]
        between = [LayerSpec(OneMemory) if kind == "specs" else seeded(OneMemory) for _ in range(6)]
        return [*ends[0], *between, *ends[1]]

    for kind, zero in (("specs", 0), ("modules", 0), ("specs", 1)):
        config = {"zero_optimization": {"stage": zero}}
        expected = train(start(specs(kind), [0, 3, 8], config, optimizer=two_groups)[0], data)
        if kind == "specs" and not zero:  # with ZeRO the weights lie in a flat buffer from the start
            same(expected, train_alone(specs(kind), data, two_groups))
        engine, _, _ = start(specs(kind), [0, 3, 8], config, optimizer=two_groups)
        same(train_on_four_cuts(engine, data), expected)
        layers = [layer for layer in engine.module.modules() if isinstance(layer, OneMemory)]
        assert sum(gather_objects(len(layers))) == 6
        for layer in layers:
            memory = layer.big.untyped_storage().data_ptr()
            views = [layer.row, layer.columns, layer.same, *layer.rows]
            assert all(each.untyped_storage().data_ptr() == memory for each in views)
            assert layer.same is layer.big and layer.row.storage_offset() == WIDTH
            assert layer.columns.stride() == (WIDTH, 1) and layer.columns.storage_offset() == 2
            assert zero or layer.weights.data_ptr() == layer.linear.weight.data_ptr()
        if kind == "specs" and not zero:
            config |= planned([0, 6, 8], warmup_steps=WARM_UP)
            engine, _, _ = start(specs(kind), "madpipe", config, optimizer=two_groups)
            same(train(engine, data), expected)
            assert engine.module.parts == [0, 6, 8]


def views_of_a_layer_in_a_checkpoint_of_another_cut(folder: Path) -> None:
    data = batches(6)
    for zero in (0, 1):
        config = {"zero_optimization": {"stage": zero}}

        def started(parts: list[int], config: dict[str, Any] = config) -> Any:
            between = [LayerSpec(OneMemory) for _ in range(6)]
            specs = [LayerSpec(nn.Linear, 8, WIDTH), *between, LayerSpec(nn.Linear, WIDTH, 4)]
            return start(specs, parts, config, optimizer=two_groups)[0]

        expected = train(started([0, 3, 8]), data)
        engine, where = started([0, 3, 8]), str(folder / f"views {zero}")
        same(train(engine, data[:3]), expected[:3])
        assert engine.save_checkpoint(where)
        for parts in [0, 3, 8], [0, 6, 8]:
            engine = started(parts)
            assert engine.load_checkpoint(where)[0] is not None
            same(train(engine, data[3:]), expected[3:])
            for layer in [layer for layer in engine.module.modules() if isinstance(layer, OneMemory)]:
                memory = layer.big.untyped_storage().data_ptr()
                views = [layer.row, layer.columns, layer.same, *layer.rows]
                assert all(each.untyped_storage().data_ptr() == memory for each in views), parts


def views_of_what_is_no_part_of_a_layer_are_told(_: Path) -> None:
    """They have memory of their own on the next rank, and that is said once; what each layer makes is no view."""
    table, data = torch.zeros(4, WIDTH), batches(2)
    layers = {
        "own": lambda: Looking(torch.zeros(4, WIDTH)),  # none of which is said: a line is said once
        "copy": lambda: Looking(table.clone()),
        "script": lambda: Looking(table),
    }
    for name, make in layers.items():
        with heard() as said:
            between = [make(), *(Block(WIDTH) for _ in range(5))]
            engine, _, _ = start([nn.Linear(8, WIDTH), *between, nn.Linear(WIDTH, 4)], [0, 3, 8], optimizer=adam)
            train(engine, data[:1])
            engine.recut([0, 1, 8])
            train(engine, data[1:])
        told = [line for line in said if "lies in one memory with" in line]
        assert len(told) == (name == "script"), told
        assert all("row of layer '1'" in line and "a tensor that is not the layer's" in line for line in told), (
            told
        )
    two, others = [Looking(table), Looking(table)], [Block(WIDTH) for _ in range(4)]
    del two[0].row
    two[0].register_buffer("table", table)
    two[0].row = 0.0
    with heard() as said:
        specs = [nn.Linear(8, WIDTH), two[0], others[0], two[1], *others[1:], nn.Linear(WIDTH, 4)]
        engine, _, _ = start(specs, [0, 4, 8], optimizer=adam)
        train(engine, data[:1])
        engine.recut([0, 3, 8])
        train(engine, data[1:])
    told = [line for line in said if "lies in one memory with" in line]
    assert len(told) == 1 and "row of layer '3'" in told[0] and "table of layer '1'" in told[0], told


class Embedded(nn.Module):
    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


class Unembedded(nn.Module):
    """Looks at the weight of another layer, as the head of a public program."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.linear, self.turned = nn.Linear(8, 8), table.weight.t()  # of 8 rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.turned.t())


def a_view_of_a_weight_that_trains_elsewhere_is_as_it_was(_: Path) -> None:
    """The layer came to the rank where that weight trains, and its view trained along with it."""

    def losses(boundaries: list[int] | None) -> list[float]:
        torch.manual_seed(3)
        table, data = nn.Linear(8, WIDTH), batches(3)
        between = [LayerSpec(Block, WIDTH) for _ in range(4)]
        ends = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Unembedded, table), LayerSpec(nn.Linear, 8, 4)]
        engine, _, _ = start([LayerSpec(Embedded, table), *between, *ends], [0, 4, 8], optimizer=adam)
        if boundaries is not None:
            engine.recut(boundaries)
        return train(engine, data)

    same(losses([0, 7, 8]), losses(None))


class LooksAhead(torch.optim.Optimizer):
    """Has the groups and the state of another optimizer, and none of what ``Optimizer.__init__`` makes."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.num_steps = base, 0
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.slow = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]

    def slow_of(self, weight: nn.Parameter, group: int, place: int) -> torch.Tensor:
        return self.slow[group][place]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.num_steps += 1
        if self.num_steps % 2:
            return
        for number, group in enumerate(self.param_groups):
            for place, weight in enumerate(group["params"]):
                slow = self.slow_of(weight, number, place)
                slow.lerp_(weight, 0.5)
                weight.copy_(slow)


class LooksAheadInState(LooksAhead):
    """Keeps slow weights in a state of its own, and the base's beside it."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.num_steps, self.param_groups = base, 0, base.param_groups
        self.state, self.base_state = defaultdict(dict), base.state
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["slow"] = weight.detach().clone()

    def slow_of(self, weight: nn.Parameter, group: int, place: int) -> torch.Tensor:
        return self.state[weight]["slow"]

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert list(state) == ["base"], state
        self.base.load_state_dict(state["base"])


def an_optimizer_around_another_one(_: Path) -> None:
    """One that calls no ``Optimizer.__init__``: DeepSpeed trains with it, and ``initialize`` ended in an error."""
    data = batches(6)
    for kind in (LooksAhead, LooksAheadInState):
        make = partial(_looking_ahead, kind)
        expected = train_alone(mlp(), data, make)
        for options in ({}, {"warmup_steps": 2}):
            engine, _, _ = start(mlp(), "madpipe", planned(cut(), **options), optimizer=make)
            losses = train(engine, data[:3])
            if kind is LooksAheadInState:
                state = engine.optimizer.state_dict()
                engine.optimizer.load_state_dict(state)
            engine.recut([0, 5, 8])
            if kind is LooksAheadInState:
                with raised(ValueError, "given a state that was taken where rank"):
                    engine.optimizer.load_state_dict(state)
            same(losses + train(engine, data[3:]), expected)


def _looking_ahead(kind: type[LooksAhead], model: nn.Module) -> LooksAhead:
    return kind(torch.optim.Adam(model.parameters(), lr=0.02))


def gradients_that_are_there_before_a_step(_: Path) -> None:
    """A step adds to them: those of a penalty on the weights were gone in the step in which layers moved."""
    sharded = {"zero_optimization": {"stage": 1}}

    def trained(engine: MadPipeEngine, data: list[Any], places: Any = ()) -> list[float]:
        losses, places = [], dict(places)
        for number, step in enumerate(data):
            tied_here = [weight for name, weight in engine.module.named_parameters() if "tied" in name]
            share = 1 / max(1, sum(map(bool, gather_objects(bool(tied_here)))))
            for weight in engine.module.parameters():
                factor = share if any(weight is each for each in tied_here) else 1.0
                (factor * 0.05 * weight.square().sum()).backward()
            for name, weight in engine.module.named_parameters():
                if name == "4.linear.weight" and engine.optimizer is engine.basic_optimizer:
                    weight.grad = weight.grad.t().contiguous().t().to_sparse(1)  # autograd adds to any kind
            if number in places:
                engine.recut(places[number])
            losses += train(engine, [step])
        return losses

    for config in ({}, sharded):
        data = batches(5)
        expected = trained(start(mlp(), [0, 3, 8], config, optimizer=adam)[0], data)
        for options in ({}, {"warmup_steps": 2}):
            engine, _, _ = start(mlp(), "madpipe", {**planned([0, 5, 8], **options), **config}, optimizer=adam)
            same(trained(engine, data, {4: [0, 2, 8]}), expected)
            assert engine.module.parts == [0, 2, 8]
    # Copies of a tied weight on two ranks come to one, and it comes to two again.
    data = batches(5, tokens=True)
    expected = trained(start(tied(), [0, 3, 8], optimizer=adam)[0], data)
    engine, _, _ = start(tied(), [0, 3, 8], optimizer=adam)
    same(trained(engine, data, {1: looped(), 3: [0, 2, 8]}), expected)


class Returns(nn.Module):
    """Returns more than tensors, which the next layer takes."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: torch.Tensor) -> Any:
        return self.more(x)


def takes_first(given: Any) -> torch.Tensor:
    return given[0] * (given[1].item() if len(given) > 1 else 1)


def outputs_that_no_stage_hands_on(_: Path) -> None:
    """The sentence did not say which member of a tuple is no tensor, nor what to do."""
    data = batches(2)
    for more, words in (
        (lambda x: (x, None, 2), ("returns a tuple of which [1] is None and [2] is an int", "leave None out of")),
        (
            lambda x: (x, 2.0),
            ("of which [1] is a float", "torch.tensor(number), of which the next layer takes .item"),
        ),
        (lambda x: (x, (x, x)), ("of which [1] is a tuple", "the members of a tuple as members of the tuple")),
        (lambda x: (x, "mode"), ("of which [1] is a str", "give text to the layers that need it")),
        (lambda x: {"x": x}, ("returns a dict", "the values of a dict as members of a tuple")),
        (lambda x: [x, x], ("returns a list", "the members of a list as members of a tuple")),
    ):
        specs = [*mlp()[:3], LayerSpec(Returns, more), takes_first, *mlp()[3:]]
        engine, _, _ = start(specs, [0, 4, 10], optimizer=two_groups)
        with raised(TypeError, "layer 3 (Returns), the last one of stage 0, ", "can cross a cut", *words):
            train(engine, data)
    # What the sentences tell to do
    for specs in (
        [LayerSpec(Returns, lambda x: (x, torch.tensor(2.0))), takes_first],
        [LayerSpec(nn.Sequential, Returns(lambda x: (x, None)), Returns(lambda both: both[0] * 2))],
    ):
        engine, _, _ = start([*mlp()[:3], *specs, *mlp()[3:]], [0, 4, 8 + len(specs)], optimizer=two_groups)
        alone = [*mlp()[:3], *[torch.nn.Identity()] * (len(specs) - 1), lambda x: x * 2, *mlp()[3:]]
        same(train(engine, data), train_alone(alone, data, two_groups))


def layers_that_are_frozen_when_they_move(_: Path) -> None:
    """ZeRO left them out from then on: released again, they were never trained, without a word."""
    data = batches(7)
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}

    def trained(engine: MadPipeEngine) -> list[float]:
        losses = []
        for number, step in enumerate(data):
            for name, weight in engine.module.named_parameters():
                if number in (1, 4) and name[0] in "34":
                    weight.requires_grad_(number == 4)
            losses += train(engine, [step])
        return losses

    expected = trained(start(mlp(), "uniform", config, optimizer=adam)[0])
    for options in ({}, {"warmup_steps": 3}):
        engine, _, _ = start(mlp(), "madpipe", {**planned(cut(), **options), **config}, optimizer=adam)
        if not options:
            engine.recut([0, 5, 8])
        same(trained(engine), expected, digits=1e-6)
        assert all(weight.requires_grad for weight in engine.module.parameters())


class Halving(PipelineModule):
    """Halves the outputs of the model, in a ``forward`` of its own."""

    num_calls = 0

    def forward(self, inputs: Any) -> Any:
        Halving.num_calls += 1
        outputs = super().forward(inputs)
        return outputs * 0.5 if self._local_stop == self._num_layers else outputs


class HalvingWhenCalled(PipelineModule):
    def __call__(self, inputs: Any) -> Any:
        outputs = super().__call__(inputs)
        return outputs * 0.5 if self._local_stop == self._num_layers else outputs


class HalvingAlone(PipelineModule):
    """Runs the layers itself."""

    def forward(self, inputs: Any) -> Any:
        for function in self.forward_funcs:
            inputs = function(inputs)
        return inputs * 0.5 if self._local_stop == self._num_layers else inputs


_forward_of_deepspeed = deepspeed.PipelineModule.forward


def halved_forward(self: Any, inputs: Any) -> Any:
    """What a script puts into DeepSpeed's class."""
    outputs = _forward_of_deepspeed(self, inputs)
    return outputs * 0.5 if self._local_stop == self._num_layers else outputs


class Hooked(Block):
    """A layer with a hook that it has registered itself."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls: list[None] = []
        self.register_forward_hook(lambda layer, *_: layer.calls.append(None))


def hooks_on_the_pipeline_module(_: Path) -> None:
    """They run for each stage of a plan, as DeepSpeed's for its own, and nothing was said; a layer's run once."""
    data, calls = batches(2), list[None]()

    def of_whole(*_: Any) -> None:
        calls.append(None)

    engine, _, _ = start([*mlp()[:-1], LayerSpec(Hooked, WIDTH), mlp()[-1]], [0, 4, 9], optimizer=two_groups)
    with said_here() as said:
        train(engine, data[:1])
    assert not [line for line in said if "for each stage" in line], said
    hooked = [len(each.calls) for each in engine.module.modules() if isinstance(each, Hooked)]
    assert [each for of_rank in gather_objects(hooked) for each in of_rank] == [NUM_MICRO_BATCHES]
    engine, _, _ = start(mlp(), looped(), optimizer=two_groups, module_class=Halving)
    engine.module.register_forward_hook(of_whole)
    with said_here() as said:
        train(engine, data)
    assert len(calls) == len(engine.module.own_stages) * len(data) * NUM_MICRO_BATCHES
    told = sorted(line for lines in gather_objects(said) for line in lines if "for each stage" in line)
    assert [line.partition(" of the")[0] for line in told] == [
        "the forward hook of_whole",
        "the method Halving.forward",
    ]
    assert all("3 stages on 2 ranks" in line for line in told), told


def loss_of_halves(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return loss_fn(outputs * 0.5, labels)


def modules_with_a_forward_of_their_own(_: Path) -> None:
    """DeepSpeed calls it for each stage and micro-batch, and so do we.

    A plan that runs layers twice is refused where that ``forward`` does not come to ours.
    """
    data = batches(2)
    expected = train_alone(mlp(), data, two_groups, loss_fn=loss_of_halves)

    def trained(method: Any, module_class: type, config: Any = None) -> list[float]:
        engine, _, _ = start(mlp(), method, config, optimizer=two_groups, module_class=module_class)
        engine.module.seed_layers = False  # with seeds, DeepSpeed's forward ran
        return train(engine, data)

    in_warm_up = planned(cut(), warmup_steps=1)
    for module_class in (Halving, HalvingWhenCalled, HalvingAlone):
        for method, config in (("madpipe", in_warm_up), (looped(), None)):
            same(trained(method, module_class, config), expected)
    Halving.num_calls = 0
    same(trained(cut(), Halving), expected)
    assert Halving.num_calls == 2 * NUM_MICRO_BATCHES, Halving.num_calls
    for module_class in (Halving, HalvingWhenCalled):
        same(trained(recomputing_plan(), module_class), expected)
    with raised(RuntimeError, "HalvingAlone.forward runs the layers", "super().forward", "recompute='never'"):
        trained(recomputing_plan(), HalvingAlone)
    with patch.object(deepspeed.PipelineModule, "forward", halved_forward):
        for method, config in ((cut(), None), ("madpipe", in_warm_up), (looped(), None)):
            same(trained(method, PipelineModule, config), expected)
        with raised(RuntimeError, "PipelineModule.forward runs the layers"):
            trained(recomputing_plan(), PipelineModule)


def a_forward_that_a_script_puts_in_between_two_steps(_: Path) -> None:
    """It runs from the next step on, and a hook does, where the steps before ran layers and nothing else."""
    data, num_losses = batches(4), 0

    def halved_later(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal num_losses
        num_losses += 1
        return loss_fn(outputs if num_losses <= 2 * NUM_MICRO_BATCHES else outputs * 0.5, labels)

    def halving_hook(module: Any, _: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs * 0.5 if module._local_stop == module._num_layers else outputs

    expected = train_alone(mlp(), data, two_groups, loss_fn=halved_later)
    for method in (cut(), looped()):
        for put in ("object", "class", "hook"):
            engine, _, _ = start(mlp(), method, optimizer=two_groups)
            engine.module.seed_layers = False  # with seeds, DeepSpeed's forward runs
            losses = train(engine, data[:2])
            with ExitStack() as stack:
                if put == "object":
                    engine.module.forward = partial(halved_forward, engine.module)
                elif put == "class":
                    stack.enter_context(patch.object(deepspeed.PipelineModule, "forward", halved_forward))
                else:
                    engine.module.register_forward_hook(halving_hook)
                same(losses + train(engine, data[2:]), expected)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Fitted(nn.Module):
    """A layer that takes a block of a whole model, and changes what it takes."""

    def __init__(self, whole: list[nn.ModuleList], index: int) -> None:
        super().__init__()
        self.block = whole[0][index]
        del self.block.linear.bias.name_in_the_file
        nn.init.zeros_(self.block.linear.bias)
        self.block.linear = nn.Sequential(self.block.linear, Doubling())
        self.block.linear[0].weight = nn.Parameter(self.block.linear[0].weight / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def fitted() -> list[Any]:
    """Eight layers, of which six are made of one model."""
    torch.manual_seed(3)
    whole = nn.ModuleList(Block(WIDTH) for _ in range(6))
    for name, parameter in whole.named_parameters():
        parameter.name_in_the_file = name  # type: ignore[attr-defined]
    blocks = [LayerSpec(Fitted, [whole], index) for index in range(6)]
    return [LayerSpec(nn.Linear, 8, WIDTH), *blocks, LayerSpec(nn.Linear, WIDTH, 4)]


def _trained_further(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a script that sets weights when layers are built."""
    for name, parameter in model.named_parameters():
        if name.endswith("block.linear.0.bias"):
            nn.init.constant_(parameter, 0.1)
    return two_groups(model)


class Handed(nn.Module):
    """A layer that takes a block, and writes to its data as models of Hugging Face do; its forwards change it."""

    def __init__(self, blocks: list[Block], index: int) -> None:
        super().__init__()
        self.block = blocks[index]
        self.block.index, self.block.is_fresh, self.block.factor = index, True, torch.tensor(1.0)
        self.block.linear.bias.data.zero_()
        self.block.linear.requires_grad_(True)
        with torch.no_grad():
            self.block.linear.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.block.factor = self.block.factor * 0.9
        return self.block(x) * (self.block.factor if hasattr(self.block, "is_fresh") else 1)


def handed() -> list[Any]:
    """Eight layers, of which six take a block."""
    torch.manual_seed(3)
    blocks = [Block(WIDTH) for _ in range(6)]
    between = [LayerSpec(Handed, blocks, index) for index in range(6)]
    return [LayerSpec(nn.Linear, 8, WIDTH), *between, LayerSpec(nn.Linear, WIDTH, 4)]


def _frozen_further(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a script that sets and freezes weights when layers are built."""
    for block in (each for each in model.modules() if isinstance(each, Block)):
        nn.init.constant_(block.linear.bias, 0.1)
        block.linear.weight.requires_grad_(block.index not in (2, 3))
    return two_groups(model)


def _with_other_blocks(engine: MadPipeEngine) -> MadPipeEngine:
    """Change the blocks of an engine that has trained."""
    for block in [each for each in engine.module.modules() if isinstance(each, Block)]:
        block.extra = nn.Dropout(0.0)
        if block.index % 2:
            del block.is_fresh
    return engine


def _trained_with_other_blocks(further: Callable[..., list[float]]) -> list[float]:
    data = batches(5)
    engine, _, _ = start(handed(), cut(), optimizer=_frozen_further)
    losses = train(engine, data[:1])
    return losses + further(_with_other_blocks(engine), data[1:])


def specs_that_change_what_they_are_given(_: Path) -> None:
    """As those of qlora-pipe-lite do: a layer is built more than once, to be counted, compared and moved."""
    data = batches(WARM_UP + AFTER)
    expected = train_alone(handed(), data, _frozen_further)
    for method, config in ((cut(), {}), ("madpipe", planned(cut(), warmup_steps=WARM_UP))):
        engine, _, _ = start(handed(), method, config, optimizer=_frozen_further)
        same(train(engine, data), expected)
    same(_trained_with_other_blocks(train_on_four_cuts), _trained_with_other_blocks(train))
    expected = train_alone(fitted(), data, _trained_further)
    engine, _, _ = start(fitted(), cut(), optimizer=_trained_further)
    same(train_on_four_cuts(engine, data), expected)
    for method, config in (
        (cut(), {}),
        ("madpipe", planned(cut())),
        ("madpipe", planned(cut(), warmup_steps=WARM_UP)),
    ):
        engine, _, _ = start(fitted(), method, config, optimizer=_trained_further)
        same(train(engine, data), expected)
        assert engine.module.parts == cut()


CASES = [
    specs_that_change_what_they_are_given,
    a_forward_that_a_script_puts_in_between_two_steps,
    layers_that_are_frozen_when_they_move,
    hooks_on_the_pipeline_module, modules_with_a_forward_of_their_own,
    outputs_that_no_stage_hands_on, an_optimizer_around_another_one, gradients_that_are_there_before_a_step,
    calls_on_one_rank, layers_that_ask_for_their_rank_are_named,
    layers_that_ask_for_their_rank_when_built_are_named,
    a_tensor_that_is_returned_twice, tensors_of_one_memory, views_of_a_layer_stay_views_where_it_moves,
    views_of_a_layer_in_a_checkpoint_of_another_cut,
    views_of_what_is_no_part_of_a_layer_are_told, a_view_of_a_weight_that_trains_elsewhere_is_as_it_was,
    what_an_optimizer_keeps_of_its_weights_goes_with_them, lists_of_groups_that_ranks_leave_out,
    what_an_optimizer_keeps_for_all_stays,
    optimizers_that_see_a_part, schedules_that_see_a_part,
    layers_that_remember, results_in_caches_stay_where_a_layer_moves,
    a_schedule_and_an_optimizer_that_are_set_later,
    attributes_and_hooks_of_layers_that_move, a_loss_over_all_parameters_is_said,
    layers_are_listed_between_steps, what_layers_count_goes_with_them, callables_go_with_what_they_hold,
    averages_of_weights, the_ends_of_the_pipeline_are_told_where_a_plan_moves_them,
    numbers_that_a_script_sets_before_the_engine_starts,
    what_hinders_a_move_is_refused_before_the_warm_up,
    checkpoints_that_begin_at_words, batch_normalization_in_half_precision,
    data_in_memory_that_is_filled_again, labels_that_a_loss_writes, labels_that_a_loss_writes_in_inference_mode,
    instructions_that_a_script_sets_on_the_engine, replaced_at_the_end_of_a_step,
    schedules_and_instructions_that_were_replaced, data_that_the_first_stage_sends,
    layers_with_several_parameters, a_module_that_stands_at_several_places, weights_that_are_shared_otherwise,
    buffers_that_layers_of_several_stages_share, a_cut_of_deepspeeds_with_copies_of_different_classes,
    a_tied_copy_without_a_gradient, weights_of_a_tie_that_it_does_not_name, tied_layers_of_different_classes,
    tied_layers_of_different_classes_in_other_runs,
    the_loss_that_an_engine_keeps,
    a_loss_that_is_a_module_in_a_warm_up, what_a_module_asks_its_loss_in_a_step,
    a_loss_with_weights_goes_with_the_last_layer, a_loss_that_is_a_function_with_weights_is_refused,
    hidden_buffers_that_layers_share, a_network_that_each_layer_hides,
]  # fmt: skip
