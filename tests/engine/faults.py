"""Cases: faults of DeepSpeed that a changed cut exposes. DeepSpeed's own engine shows them, ours does not.

The day that DeepSpeed mends one, its case says so. ``REPAIRS.md`` lists them all; ``test_faults.py`` has those
that can be shown without other processes, or would make them wait for ever.
"""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

from deepspeed_partition.engine import MadPipeEngine, repairs
from deepspeed_partition.engine.runtime.environment import logger
from tests.engine.pipelines import WIDTH, mlp, train_alone, two_groups
from tests.engine.running import adam, batches, cut, planned, raised, same, start, train
from tests.engine.warm_up_cases import heard

STOCK = {"module_class": deepspeed.PipelineModule, "start_engine": deepspeed.initialize}


def differ(actual: list[float], expected: list[float]) -> bool:
    return max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True)) > 1e-4


def stock_cut(boundaries: list[int]) -> type:
    """DeepSpeed's own module on these boundaries."""

    class Cut(deepspeed.PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = boundaries
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=boundaries[stage], stop=boundaries[stage + 1])

    return Cut


def clipping(_: Path) -> None:
    data = batches()
    expected = train_alone(mlp(), data, adam, clip=0.05)
    config = {"gradient_clipping": 0.05}
    stock, _, _ = start(mlp(), "uniform", config, **{**STOCK, "module_class": stock_cut(cut())})
    assert not isinstance(stock, MadPipeEngine)
    assert differ(train(stock, data), expected), "DeepSpeed's clipping is mended"
    repairs._told.clear()
    with heard() as sentences:
        same(train(start(mlp(), cut(), config)[0], data), expected)
        start(mlp(), cut(), config)
    told = [each for each in sentences if "clipped to a norm of 0.05 over all stages, as in one process" in each]
    assert len(told) == 1, sentences


def clipping_of_deepspeeds_cuts(_: Path) -> None:
    """They keep DeepSpeed's norm, and it is told, once."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    repairs._told.clear()
    logger.addHandler(handler)
    try:
        data = batches(2)
        config = {"gradient_clipping": 0.05}
        stock = train(start(mlp(), "uniform", config, **STOCK)[0], data)
        for _ in range(2):
            engine, _, _ = start(mlp(), "uniform", config)
            assert train(engine, data) == stock
        start(mlp(), "uniform", {"gradient_clipping": 0.0})
    finally:
        logger.removeHandler(handler)
    told = [
        message for message in heard if "clips an fp32 pipeline by the gradient norm of its first stage" in message
    ]
    assert len(told) == (dist.get_rank() == 0)


def states(_: Path) -> None:
    """``safe_get_full_optimizer_state`` of the second group, under ZeRO-1."""

    def first_moments(engine: Any) -> list[Any]:
        train(engine, batches(1))
        return [safe_get_full_optimizer_state(weight, "exp_avg") for weight in engine.module.parameters()]

    config = {"zero_optimization": {"stage": 1}}
    stock, _, _ = start(mlp(), "uniform", config, optimizer=two_groups, **STOCK)
    failure = ""
    try:
        first_moments(stock)
    except ValueError as error:
        failure = str(error)
    assert "not found" in failure, "DeepSpeed links the states of all groups now"
    engine, _, _ = start(mlp(), cut(), config, optimizer=two_groups)
    moments = first_moments(engine)
    assert all(moment is not None and moment.abs().max() > 0 for moment in moments)


def scheduler_of_dropped_groups(_: Path) -> None:
    """A rate for each group, on ranks where DeepSpeed drops some of the groups."""
    data = batches()
    late = [0, 6, 8] if dist.get_world_size() == 2 else [0, 4, 6, 7, 8]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        special = [weight for name, weight in model.named_parameters() if name.startswith("7.")]
        others = [weight for name, weight in model.named_parameters() if not name.startswith("7.")]
        return torch.optim.SGD([{"params": special, "lr": 5e-2}, {"params": others, "lr": 1e-3}])

    def one_for_each(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: (step + 1) * 50.0])

    expected = train_alone(mlp(), data, make, make_scheduler=one_for_each)
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    made = {"optimizer": make, "lr_scheduler": one_for_each}
    same(train(start(mlp(), late, config, **made)[0], data), expected)
    same(train(start(mlp(), "madpipe", {**planned(late), **config}, **made)[0], data), expected)


class Warmed(nn.Module):
    """A block with a temperature, and a weight whose last dimension is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).mul(0.3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight) * self.temperature


def parameters_that_are_no_rows_of_bytes(_: Path) -> None:
    """A temperature, ``nn.Parameter(torch.tensor(0.7))``, ended every pipeline as its engine started."""
    specs = [
        LayerSpec(nn.Linear, 8, WIDTH),
        *(LayerSpec(Warmed) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, 4),
    ]
    data = batches()
    expected = train_alone(specs, data, adam)
    if "view(torch.uint8)" in inspect.getsource(DeepSpeedEngine._broadcast_model):  # not in 0.19.0
        with raised(RuntimeError, "view Float as Byte"):
            start(specs, "uniform", {}, **{**STOCK, "module_class": stock_cut(cut())})
    for zero in (0, 1):
        config = {"zero_optimization": {"stage": zero}}
        same(train(start(specs, "madpipe", {**config, **planned(cut())})[0], data), expected)
        engine, _, _ = start(specs, cut(), config)
        losses = train(engine, data[:2])
        engine.recut([0, 5, 8])
        same(losses + train(engine, data[2:]), expected)


class OfType(nn.Module):
    """A layer with a parameter of a type of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.linear(x).to(self.scale.dtype) * self.scale
        return x + torch.tanh((scaled.real if scaled.is_complex() else scaled).float())


def types_in_one_flat_tensor(_: Path) -> None:
    """ZeRO-1 made float32 of bfloat16, which plain DeepSpeed does by rank; float64 ended in words of torch."""
    data = batches(3)
    for dtype in (torch.float64, torch.complex64, torch.bfloat16):
        specs = [
            LayerSpec(nn.Linear, 8, WIDTH),
            *(LayerSpec(OfType, dtype) for _ in range(6)),
            LayerSpec(nn.Linear, WIDTH, 4),
        ]
        same(train(start(specs, "madpipe", planned(cut()))[0], data), train_alone(specs, data, adam))
        for method in (cut(), "madpipe"):
            with raised(ValueError, "1.scale", str(dtype).removeprefix("torch."), "ZeRO stage 0", "fp32"):
                start(specs, method, {"zero_optimization": {"stage": 1}})
        with nullcontext() if dtype is torch.bfloat16 else raised(ValueError, "2 pipelines", "one pipeline"):
            train(start(specs, [0, 8], num_stages=1)[0], data[:1])
        if dtype.is_complex:
            with raised(ValueError, "1.scale (complex64)", "torch.view_as_real"):
                start(specs, cut(), {"bf16": {"enabled": True}})
    engine, _, _ = start(specs, "uniform", {"zero_optimization": {"stage": 1}}, **STOCK)
    found = {weight.dtype for weight in engine.module.parameters()}
    assert found == {torch.float32}, "ZeRO keeps the types of parameters now"


def adam_on_a_cpu(_: Path) -> None:
    """``{"type": "Adam"}`` would compile an extension for the CPU, or end where there is no compiler."""
    data = batches()

    def alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)

    class Compiled(Exception):
        """In the place of half a minute in a compiler."""

    class FusedAdam:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise Compiled

    original, deepspeed.ops.adam.FusedAdam = deepspeed.ops.adam.FusedAdam, FusedAdam
    try:
        fused = {"type": "Adam", "params": {"lr": 1e-2}}
        try:
            start(mlp(), "uniform", {"optimizer": fused}, **STOCK)
            raise AssertionError("DeepSpeed takes torch's Adam on a CPU now")
        except Compiled:
            pass
        engine, _, _ = start(mlp(), "madpipe", {"optimizer": fused, **planned(cut())})
        assert type(engine.basic_optimizer) is torch.optim.AdamW
        same(train(engine, data), train_alone(mlp(), data, alone))
        try:
            start(mlp(), "madpipe", {"optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": False}}})
            raise AssertionError("who asks for DeepSpeed's Adam gets it")
        except Compiled:
            pass
    finally:
        deepspeed.ops.adam.FusedAdam = original


ONLY_TWO = [
    clipping, clipping_of_deepspeeds_cuts, states, scheduler_of_dropped_groups, adam_on_a_cpu,
    parameters_that_are_no_rows_of_bytes, types_in_one_flat_tensor,
]  # fmt: skip
