"""Cases: what may travel between two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine import pipelines
from tests.engine.pipelines import WIDTH, train_alone
from tests.engine.running import adam, batches, cut, planned, raised, recomputes_on_a_cpu, same, start, train


class Opening(nn.Module):
    """Makes all kinds of tensors of its input; only the last two of them depend on weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mask = (x[:, :1] > 0).to(x.dtype)
        numbers = torch.arange(len(x), device=x.device).repeat(7)
        shifts = torch.linspace(0, 1, WIDTH, device=x.device, dtype=x.dtype)
        return x > 0.5, mask, numbers, shifts, self.linear(x), self.other(x)


class Carrying(nn.Module):
    """Uses what it carries, with gradients and without, and hands all of it on as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        flags, mask, numbers, shifts, hidden, other = args
        step = torch.tanh(self.linear(hidden)) * mask + 0.1 * other
        step = torch.where(flags[:, :1], step, -step)
        return flags, mask, numbers, shifts, hidden + step + (shifts > 0.5), other


class Closing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, args: tuple[Tensor, ...]) -> Tensor:
        flags, _, numbers, _, hidden, other = args
        assert flags.dtype == torch.bool and numbers.dtype == torch.int64
        assert numbers.tolist() == list(range(len(hidden))) * 7
        return self.linear(hidden - 0.5 * other)


def carrying() -> list[Any]:
    return [LayerSpec(Opening), *(LayerSpec(Carrying) for _ in range(6)), LayerSpec(Closing)]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def tensors_that_get_no_gradient(_: Path) -> None:
    data = batches()
    wanted: list[dict[str, Tensor]] = []
    expected = train_alone(
        carrying(), data, adam, before_step=lambda model: wanted.append(gradients_of(model)), clip=0.05
    )
    clipped = {"gradient_clipping": 0.05}
    for attention_flag in (False, True):
        engine, _, _ = start(carrying(), "madpipe", {**planned(cut()), **clipped})
        engine.set_has_attention_mask(attention_flag)
        found: list[dict[str, Tensor]] = []
        engine.before_optimizer_step = lambda engine=engine, found=found: found.append(gradients_of(engine.module))
        same(train(engine, data), expected)
        assert engine.module.parts == cut()
        for step, own in enumerate(found):
            everything: dict[str, Tensor] = {}
            for part in gather_objects(own):
                everything.update(part)
            assert everything.keys() == wanted[step].keys()
            for name, gradient in everything.items():
                assert torch.allclose(gradient, wanted[step][name], rtol=1e-4, atol=1e-7), (step, name)
    for config in ({"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 1}, "static": True}):
        static = config.pop("static", False)
        engine, _, _ = start(carrying(), cut(), {**config, **clipped})
        if static:
            engine.dynamic_shape = False
        same(train(engine, data), expected)


def tensors_without_gradient_in_bf16(_: Path) -> None:
    expected = train_alone(carrying(), batches(), adam)
    data = batches(dtype=torch.bfloat16)
    for zero in (0, 1):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": zero}}
        same(train(start(carrying(), cut(), config)[0], data), expected, digits=0.05)


class Numbers(nn.Module):
    """A first layer whose whole output is a tensor of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :5] * 10).long() % pipelines.WORDS


def a_boundary_without_any_gradient(_: Path) -> None:
    """The first stage has nothing to learn from its output, alone or in a tuple."""
    data = batches()
    for wrap in (lambda x: x, lambda x: (x,), lambda x: (x, x > 3)):
        specs = [
            LayerSpec(Numbers), wrap, lambda x: x if torch.is_tensor(x) else x[0],
            LayerSpec(pipelines.Embedding, pipelines.WORDS, WIDTH), LayerSpec(pipelines.Block, WIDTH),
            LayerSpec(nn.Linear, WIDTH, 4),
        ]  # fmt: skip
        engine, _, _ = start(specs, "madpipe", planned([0, 2, 6]))
        same(train(engine, data), train_alone(specs, data, adam))


def recomputed_layers(_: Path) -> None:
    """Activation checkpointing around layers that carry floats without gradients."""
    data = batches()
    expected = train_alone(carrying(), data, adam)
    for reentrant in (True, False) if recomputes_on_a_cpu() else ():
        config = {**planned(cut())}
        config["pipeline"] = {**config["pipeline"], "use_reentrant": reentrant}
        engine, _, _ = start(
            carrying(), "madpipe", config, activation_checkpoint_interval=1, checkpointable_layers=["Carrying"]
        )
        same(train(engine, data), expected)
        assert engine.module.parts == cut()


def data_that_ends(_: Path) -> None:
    """Between two steps every rank hears of it; another step can follow on another iterator."""
    for give_dynamic in (True, False):
        engine, _, _ = start(pipelines.mlp(), "madpipe", planned(cut()))
        data = batches(4)
        losses = train(engine, data[:2])
        engine.dynamic_shape = give_dynamic
        for _ in range(2):
            with raised(StopIteration, "after 0 micro-batches", "RepeatingLoader"):
                engine.train_batch(iter([]))
            with raised(StopIteration, "after 0 micro-batches"):
                engine.eval_batch(iter([]))
        losses += train(engine, data[2:])
        same(losses, train_alone(pipelines.mlp(), data, adam))


class Returning(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear, self.value = nn.Linear(WIDTH, WIDTH), value

    def forward(self, x: Tensor) -> Any:
        return {"dict": {"x": x}, "list": [x], "none": None, "nested": (x, [x]), "empty": ()}[self.value]


def layers_that_return_no_tensors(_: Path) -> None:
    for value, words in (
        ("dict", "dict"), ("list", "list"), ("none", "NoneType"), ("nested", "list"), ("empty", "()"),
    ):  # fmt: skip
        specs = pipelines.mlp()
        specs[3] = LayerSpec(Returning, value)
        engine, _, _ = start(specs, "madpipe")
        with raised(ValueError, "'3.Returning'", words, "a tensor or a tuple of tensors: ", "make one layer"):
            train(engine, batches(1))


def losses_of_a_model(_: Path) -> None:
    """Without a loss_fn the last layer makes the loss; where it does not, every rank is told."""
    data = batches()

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x**2).mean()

    specs = [*pipelines.mlp()[:7], LayerSpec(nn.Linear, WIDTH, 4), LayerSpec(Loss)]
    expected = train_alone(specs, data, adam, loss_fn=lambda output, labels: output)
    engine, _, _ = start(specs, "madpipe", planned([*cut()[:-1], 9]), loss_fn=None)
    same(train(engine, data), expected)
    engine, _, _ = start(pipelines.mlp(), "madpipe", loss_fn=None)
    with raised(ValueError, "loss_fn", "(4, 4) float32"):
        train(engine, data)


def what_deepspeed_refuses(_: Path) -> None:
    """In its own words, on every rank."""
    with raised(RuntimeError, "num_stages (3) must divide distributed world size (2)"):
        start(pipelines.mlp(), "madpipe", num_stages=3)
    for zero in (2, 3):
        with raised(AssertionError, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"):
            start(pipelines.mlp(), "madpipe", {"zero_optimization": {"stage": zero}})


BOTH = [tensors_that_get_no_gradient, data_that_ends]
ONLY_TWO = [
    tensors_without_gradient_in_bf16, a_boundary_without_any_gradient, recomputed_layers,
    layers_that_return_no_tensors, losses_of_a_model,
    what_deepspeed_refuses,
]  # fmt: skip
