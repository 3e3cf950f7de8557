"""Cases: optimizers of a GPU: offloaded ones; and ``FusedAdam``, which counts steps in its last parameter alone.

Its compiled part, which a test cannot wait for, is written in Python here; the counting is DeepSpeed's own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.ops.adam import FusedAdam, fused_adam
from torch import nn

from deepspeed_partition.engine.pipeline.own_optimizers import TrialError, why_not_in_parts
from tests.engine.faults import STOCK, stock_cut
from tests.engine.pipelines import mlp, train_alone
from tests.engine.running import ADAM, MadPipeEngine, adam, batches, raised, same, start, train, train_on_four_cuts

FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2, "torch_adam": False}}}
OF_TORCH = {"optimizer": {"type": "AdamW", "params": {**ADAM["params"], "weight_decay": 1e-2}}}


def _step(
    _: int, overflow: Any, tensors: Any, lr: float, beta1: float, beta2: float, eps: float, step: int,
    is_adamw: int, corrects_bias: int, decay: float,
) -> None:  # fmt: skip
    assert is_adamw and corrects_bias
    for grad, weight, mean, square in zip(*tensors, strict=True):
        weight.mul_(1 - lr * decay)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        divisor = (square / (1 - beta2**step)).sqrt_().add_(eps)
        weight.addcdiv_(mean, divisor, value=-lr / (1 - beta1**step))


@contextmanager
def _built() -> Iterator[None]:
    builder = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=_step))
    with patch.object(fused_adam, "FusedAdamBuilder", lambda: builder):
        yield


def _steps(engine: MadPipeEngine) -> list[int]:
    optimizer = engine.basic_optimizer
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return [int(optimizer.state[weight]["step"]) for weight in weights]


def fused_adam_goes_on_when_layers_move(_: Path) -> None:
    """A layer that was not the last of its rank, and comes to be, goes on with the steps that it has made."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    with _built():
        same(train_on_four_cuts(start(mlp(), [0, 3, 8], FUSED)[0], data), expected)
        grouped = {**FUSED, "zero_optimization": {"stage": 1}}
        same(train_on_four_cuts(start(mlp(), [0, 3, 8], grouped)[0], data), expected)

        def half(module: nn.Module) -> torch.optim.Optimizer:
            weights = list(module.parameters())
            return FusedAdam([{"params": weights[::2]}, {"params": weights[1::2]}], lr=1e-2, weight_decay=1e-2)

        engine, _, _ = start(mlp(), [0, 3, 8], optimizer=half)
        assert type(engine.basic_optimizer) is FusedAdam
        same(train_on_four_cuts(engine, data), expected)


def fused_adam_is_not_tried(_: Path) -> None:
    """On a GPU its copy could not step tensors of a CPU, and a line warned of what it does not do."""

    def on_a_gpu(*_: Any) -> None:
        raise RuntimeError("expected input to be on cuda")

    builder = SimpleNamespace(load=lambda: SimpleNamespace(multi_tensor_adam=on_a_gpu))
    with patch.object(fused_adam, "FusedAdamBuilder", lambda: builder):
        optimizer = FusedAdam([nn.Parameter(torch.ones(3))])
        assert why_not_in_parts(optimizer, flattened=True) is None

        class Other(FusedAdam):
            """May do anything."""

        with raised(TrialError):
            why_not_in_parts(Other([nn.Parameter(torch.ones(3))]), flattened=True)


def what_is_offloaded_goes_on(folder: Path) -> None:
    """Master copies and states that offload_optimizer keeps on the CPU go where layers move, and into files."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = {**OF_TORCH, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    engine, _, _ = start(mlp(), [0, 3, 8], config)
    assert engine.optimizer.cpu_offload
    same(train_on_four_cuts(engine, data), expected)
    engine, _, _ = start(mlp(), [0, 3, 8], config)
    losses = train(engine, data[:2])
    engine.save_checkpoint(str(folder), tag="offloaded")
    for more in (config, {**OF_TORCH, "zero_optimization": {"stage": 1}}):
        other, _, _ = start(mlp(), [0, 5, 8], more)
        other.load_checkpoint(str(folder), tag="offloaded")
        same(losses + train(other, data[2:]), expected)


def fused_adam_goes_on_in_bf16(_: Path) -> None:
    """There it steps flat tensors of whole groups."""
    data = batches(dtype=torch.bfloat16)
    for zero in (0, 1):
        config = {**FUSED, "bf16": {"enabled": True}, "zero_optimization": {"stage": zero}}
        with _built():
            fixed = train(start(mlp(), [0, 3, 8], config)[0], data)
            engine, _, _ = start(mlp(), [0, 3, 8], config)
            assert type(engine.basic_optimizer) is FusedAdam
            assert train_on_four_cuts(engine, data) == fixed


def checkpoints_of_fused_adam_load_anywhere(folder: Path) -> None:
    """They load on another cut, under ZeRO, and by torch's Adam, which counts for each parameter."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    with _built():
        engine, _, _ = start(mlp(), [0, 3, 8], FUSED)
        losses = train(engine, data[:2])
        assert sorted(set(_steps(engine))) == [0, 2], "FusedAdam counts for each parameter now"
        engine.save_checkpoint(str(folder / "ours"))
        same(losses + train(engine, data[2:]), expected)
        engine, _, _ = start(mlp(), [0, 3, 8], OF_TORCH)
        train(engine, data[:2])
        engine.save_checkpoint(str(folder / "of torch"))
        ways = itertools.product(
            ("ours", "of torch"),
            ([0, 3, 8], [0, 5, 8]),
            (FUSED, OF_TORCH, {**FUSED, "zero_optimization": {"stage": 1}}),
        )
        for saved, place, config in ways:
            engine, _, _ = start(mlp(), place, config)
            engine.load_checkpoint(str(folder / saved))
            same(losses + train(engine, data[2:]), expected)


def plain_checkpoints_of_fused_adam(folder: Path) -> None:
    """Plain DeepSpeed leaves the steps as they are, and they are told where they are loaded."""
    data = batches()
    expected = train_alone(mlp(), data, adam, clip=1e9)
    unclipped = {"gradient_clipping": 0.0}
    with _built():
        plain, _, _ = start(
            mlp(), "uniform", {**FUSED, **unclipped}, **{**STOCK, "module_class": stock_cut([0, 3, 8])}
        )
        losses = train(plain, data[:2])
        plain.save_checkpoint(str(folder / "plain"))
        same(losses + train(plain, data[2:]), expected)
        for config in (FUSED, OF_TORCH):
            engine, _, _ = start(mlp(), [0, 3, 8], {**config, **unclipped})
            engine.load_checkpoint(str(folder / "plain"))
            assert set(_steps(engine)) == {2}
            found = losses + train(engine, data[2:3])
            engine.recut([0, 6, 8])
            same(found + train(engine, data[3:]), expected)


def steps_that_each_parameter_counts_stay(folder: Path) -> None:
    """Those of Adagrad, which begin at 0 before the first step, and of moments that a script has set to zero."""

    def adagrad(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(module.parameters(), lr=1e-2, lr_decay=0.5)

    for how in (adagrad, adam):
        engine, _, _ = start(mlp(), [0, 3, 8], optimizer=how)
        train(engine, batches(2))
        for name, weight in engine.module.named_parameters():
            state = engine.basic_optimizer.state[weight]
            if name.endswith("bias"):
                for key, value in state.items():
                    state[key] = torch.zeros_like(value)
        before = _steps(engine)
        assert set(before) == {0, 2}
        engine.save_checkpoint(str(folder / how.__name__))
        assert _steps(engine) == before
        engine.recut([0, 4, 8])
        by_bias = {name.endswith("bias"): set() for name in ("bias", "weight")}
        for name, weight in engine.module.named_parameters():
            by_bias[name.endswith("bias")].add(int(engine.basic_optimizer.state[weight]["step"]))
        assert by_bias == {True: {0}, False: {2}}
        for place in ([0, 3, 8], [0, 5, 8]):
            loaded, _, _ = start(mlp(), place, optimizer=how)
            loaded.load_checkpoint(str(folder / how.__name__))
            assert set(_steps(loaded)) == {0, 2}


class Signs(torch.optim.Optimizer):
    """An optimizer of a program's own, without the settings that torch's have."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": lr, "scale": None})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    state["sum"] = state.get("sum", 0) + weight.grad
                    weight.data.sub_(group["lr"] * state["sum"].sign())


def checkpoints_of_an_optimizer_of_the_users_load_anywhere(folder: Path) -> None:
    data = batches()
    for make in (Signs, torch.optim.RMSprop, torch.optim.Adafactor):

        def optimizer(parameters: Any, make: Any = make) -> torch.optim.Optimizer:
            return make(parameters, lr=1e-3)

        where = str(folder / make.__name__)
        engine, _, _ = start(mlp(), [0, 3, 8], optimizer=lambda module: optimizer(module.parameters()))
        train(engine, data[:2])
        engine.save_checkpoint(where)
        expected = train(engine, data[2:])
        for _ in range(2):
            engine, _, _ = start(mlp(), [0, 5, 8], optimizer=lambda module: optimizer(module.parameters()))
            engine.load_checkpoint(where)
            engine.load_checkpoint(where)
            same(train(engine, data[2:]), expected)


def checkpoints_of_another_class_are_refused(folder: Path) -> None:
    """On another cut SGD went on with the rate of Adam, and with its moments, in silence."""
    data = batches(2)
    engine, _, _ = start(mlp(), [0, 3, 8], optimizer=adam)
    train(engine, data)
    engine.save_checkpoint(str(folder))

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    with raised(RuntimeError, "has no 'momentum', which SGD needs", "load_optimizer_states=False"):
        start(mlp(), [0, 5, 8], optimizer=sgd)[0].load_checkpoint(str(folder))
    engine, _, _ = start(mlp(), [0, 3, 8], optimizer=sgd)
    engine.load_checkpoint(str(folder))
    with raised(KeyError, "momentum"):  # as in one process
        train(engine, data)


ONLY_TWO = [
    steps_that_each_parameter_counts_stay, checkpoints_of_another_class_are_refused,
    checkpoints_of_an_optimizer_of_the_users_load_anywhere,
    fused_adam_is_not_tried, fused_adam_goes_on_when_layers_move, fused_adam_goes_on_in_bf16,
    checkpoints_of_fused_adam_load_anywhere, plain_checkpoints_of_fused_adam, what_is_offloaded_goes_on,
]  # fmt: skip
