"""What must hold when layers move between steps: run by torchrun, see ``test_training_state.py``."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.repartition import movable_engine
from deepspeed_partition.engine.repartition.optimizer_state import TrainingState
from deepspeed_partition.engine.runtime.collectives import gather_objects
from tests.engine import pipelines, shortage_cases, warm_up_cases
from tests.engine.harness import run_cases
from tests.engine.pipelines import mlp, tied, train_alone, weights_and_biases
from tests.engine.running import ADAM, adam, batches, planned, raised, same, start, train

STEPS = 3
"""Before each move and after the last."""


def world() -> int:
    return dist.get_world_size()


def cuts() -> list[list[int]]:
    """A cut, another one, and the first again; some layers stay, and some go back and forth."""
    there, elsewhere = ([0, 2, 8], [0, 6, 8]) if world() == 2 else ([0, 1, 3, 4, 8], [0, 3, 5, 7, 8])
    return [there, elsewhere, there]


def cuts_of_two() -> list[list[int]]:
    """For two stages, whatever the number of replicas."""
    return [[0, 2, 8], [0, 5, 8], [0, 3, 8]]


class Traced(torch.optim.Optimizer):
    """A made-up optimizer whose state has entries of every kind."""

    def __init__(self, params: Any, lr: float = 0.05, factored: bool = True) -> None:
        super().__init__(params, {"lr": lr, "factored": factored, "steps_of_group": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps_of_group"] += 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["trace"] = torch.zeros_like(weight, dtype=torch.float64)
                    state["count"], state["nothing"], state["scale"] = 0, None, torch.tensor(1.0)
                    if group["factored"]:
                        state["factor"] = torch.zeros(3 + weight.ndim)
                state["count"] += 1
                state["scale"] *= 0.9
                state["trace"].mul_(0.8).add_(weight.grad)
                shrink = 1.0
                if group["factored"]:
                    state["factor"] += weight.grad.abs().mean()
                    shrink = float(1 / (1 + state["factor"].mean()))
                weight -= group["lr"] * shrink * float(state["scale"]) * state["trace"] / state["count"] ** 0.5


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": lambda model: torch.optim.Adam(weights_and_biases(model), lr=1e-2, amsgrad=True),
    "AdamW": lambda model: torch.optim.AdamW(weights_and_biases(model), lr=1e-2),
    "SGD": lambda model: torch.optim.SGD(weights_and_biases(model), lr=5e-2, momentum=0.9, nesterov=True),
    "custom": lambda model: Traced(weights_and_biases(model), factored=False),
}


def train_and_move(
    engine: MadPipeEngine, data: list[Any], cuts: list[list[int]], between: Callable[[], object] = lambda: None
) -> list[float]:
    """The losses of training on one cut after the other."""
    losses: list[float] = []
    share = len(data) // len(cuts)
    for number, cut in enumerate(cuts):
        if number:
            engine.recut(cut)
            between()
        assert engine.module.parts == cut
        losses += train(engine, data[number * share : (number + 1) * share])
    return losses


def untested(zero: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}


def every_optimizer(_: Path) -> None:
    data = batches(3 * STEPS)
    for name, zero in itertools.product(OPTIMIZERS, (0, 1)):
        make = OPTIMIZERS[name]
        expected = train_alone(mlp(), data, make)
        engine, optimizer, _ = start(mlp(), cuts()[0], untested(zero), optimizer=make)
        same(train_and_move(engine, data, cuts()), expected)
        assert engine.optimizer is optimizer and engine.global_steps == len(data)


def a_state_of_any_shape(_: Path) -> None:
    data = batches(3 * STEPS)
    make = lambda model: Traced(weights_and_biases(model))  # noqa: E731
    engine, _, _ = start(mlp(), cuts()[0], optimizer=make)
    same(train_and_move(engine, data, cuts()), train_alone(mlp(), data, make))
    engine, _, _ = start(mlp(), cuts()[0], untested(1), optimizer=make)
    expected = train(start(mlp(), cuts()[0], untested(1), optimizer=make)[0], data[:4])
    losses = train(engine, data[:2])
    with raised(RuntimeError, "'factor'", "flattened"):
        engine.recut(cuts()[1])
    assert engine.module.parts == cuts()[0]
    assert losses + train(engine, data[2:4]) == expected, "a refused move changes nothing"


def adagrad_and_the_configurations_optimizer(_: Path) -> None:
    """Adagrad makes its states when it is built, and ZeRO builds it anew."""
    data = batches(3 * STEPS)

    def adagrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=5e-2, initial_accumulator_value=0.1)

    expected = train_alone(mlp(), data, adagrad)
    for zero, moves_before in ((0, False), (0, True), (1, True)):
        engine, _, _ = start(mlp(), cuts()[0], untested(zero), optimizer=adagrad)
        if moves_before:
            engine.recut(cuts()[1])
            engine.recut(cuts()[0])
        same(train_and_move(engine, data, cuts()), expected)
    engine, _, _ = start(mlp(), cuts()[0], {"optimizer": ADAM})
    same(train_and_move(engine, data, cuts()), train_alone(mlp(), data, adam))


def half_precision(_: Path) -> None:
    """bf16 without ZeRO and with it, accumulating in bf16 and in fp32: equal to a run that stays."""
    data = batches(3 * STEPS, dtype=torch.bfloat16)
    kinds = set()
    for name, zero, accumulated in (
        ("AdamW", 0, "bf16"),
        ("AdamW", 1, "bf16"),
        ("AdamW", 1, "fp32"),
        ("SGD", 0, "bf16"),
        ("custom", 1, "bf16"),
    ):
        config = {
            "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": accumulated}, **untested(zero),
        }  # fmt: skip
        stays, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS[name])
        expected = train(stays, data)
        engine, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS[name])
        kinds.add(type(engine.optimizer).__name__)
        same(train_and_move(engine, data, cuts()), expected)
    assert kinds == {"BF16_Optimizer", "DeepSpeedZeroOptimizer"}


def fp16_with_its_loss_scale(_: Path) -> None:
    """The scale grows and falls; DeepSpeed refuses fp16 on most CPUs, though small models run."""
    accelerator = get_accelerator()
    supported, accelerator.is_fp16_supported = accelerator.is_fp16_supported, lambda: True
    try:
        data = batches(12, dtype=torch.float16)
        fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 1}
        for zero in (1,):  # without ZeRO it is refused
            config = {"fp16": fp16, **untested(zero)}
            stays, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS["AdamW"])
            engine, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS["AdamW"])
            scales: list[float] = []

            def note(engine: MadPipeEngine = engine, scales: list[float] = scales) -> None:
                scales.append(engine.optimizer.loss_scale)

            same(train_and_move(engine, data, cuts(), note), train(stays, data))
            assert engine.skipped_steps == stays.skipped_steps
            assert engine.skipped_steps > 0
            assert engine.optimizer.loss_scale == stays.optimizer.loss_scale and len(set(scales)) == 2, scales
            # The first step was skipped, when there was nothing to find.
            assert all(
                safe_get_full_optimizer_state(each, "exp_avg") is not None for each in stays.module.parameters()
            )
    finally:
        accelerator.is_fp16_supported = supported


def tied_layers(_: Path) -> None:
    """A tie that is held by two ranks, by one, and by others: a copy that is new begins where the old one is."""
    data = batches(4 * STEPS, tokens=True)
    specs = [*tied()[:3], TiedLayerSpec("embed", pipelines.Embedding, 12, 16, forward_fn=turned), *tied()[3:]]
    moves = (
        [[0, 2, 9], [0, 4, 9], [0, 1, 9], [0, 8, 9]]
        if world() == 2
        else [[0, 1, 2, 3, 9], [0, 4, 5, 8, 9], [0, 1, 4, 6, 9], [0, 2, 3, 6, 9]]
    )
    expected = train_alone(specs, data, OPTIMIZERS["AdamW"])
    for zero in (0, 1):
        engine, _, _ = start(specs, moves[0], untested(zero), optimizer=OPTIMIZERS["AdamW"])
        same(train_and_move(engine, data, moves), expected)
        copies = [copy for copy in gather_objects(tie_of(engine)) if copy is not None]
        assert len(copies) > 1 and all(torch.equal(copies[0], copy) for copy in copies)


def turned(embedding: pipelines.Embedding, x: torch.Tensor) -> torch.Tensor:
    """A use of the tied weight that keeps the width."""
    return x + torch.tanh(x @ embedding.weight.t()) @ embedding.weight


def tie_of(engine: MadPipeEngine) -> torch.Tensor | None:
    ties = dict(engine.module.tied_modules.items())
    return ties["embed"].weight.detach().clone() if "embed" in ties else None


class Noisy(nn.Module):
    """Dropout, batch statistics and a buffer that is no parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # Without a bias: normalization takes it away, so that its gradient is rounding, which Adam would enlarge.
        self.linear, self.norm = nn.Linear(width, width, bias=False), nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, self.training)


def noise_and_batch_norm(_: Path) -> None:
    """Layers with seeds of their own drop the same elements wherever they are; running statistics go with them."""
    data = batches(3 * STEPS)
    evaluated = [pipelines.micro_batch(1000 + number) for number in range(4)]
    specs = [LayerSpec(nn.Linear, 8, 16), *(LayerSpec(Noisy, 16) for _ in range(6)), LayerSpec(nn.Linear, 16, 4)]
    for zero in (0, 1):
        stays, _, _ = start(specs, cuts()[0], untested(zero), optimizer=OPTIMIZERS["AdamW"])
        expected = [*train(stays, data), float(stays.eval_batch(iter(evaluated)))]
        engine, _, _ = start(specs, cuts()[0], untested(zero), optimizer=OPTIMIZERS["AdamW"])
        losses = train_and_move(engine, data, cuts())
        same([*losses, float(engine.eval_batch(iter(evaluated)))], expected)


def frozen_layers(_: Path) -> None:
    """A whole layer, and a bias of another; both move."""
    data = batches(3 * STEPS)
    specs = mlp()
    specs[4], specs[5] = LayerSpec(Frozen, 16), LayerSpec(HalfFrozen, 16)
    expected = train_alone(specs, data, OPTIMIZERS["AdamW"])
    for zero in (0, 1):
        engine, _, _ = start(specs, cuts()[0], untested(zero), optimizer=OPTIMIZERS["AdamW"])
        same(train_and_move(engine, data, cuts()), expected)
        assert all(not p.requires_grad for name, p in engine.module.named_parameters() if name.startswith("4."))


def layers_that_are_unfrozen(_: Path) -> None:
    """DeepSpeed's wrapping optimizers leave them as they are: they began to train when layers first moved."""
    data = batches(3 * STEPS)
    specs = mlp()
    specs[4], specs[5] = LayerSpec(Frozen, 16), LayerSpec(HalfFrozen, 16)
    for zero, half in ((1, {}), (0, {"bf16": {"enabled": True}}), (0, {})):
        config = {**untested(zero), **half}
        own = batches(3 * STEPS, dtype=torch.bfloat16) if half else data
        losses = []
        for moves in (False, True):
            engine, _, _ = start(specs, cuts()[0], config, optimizer=adam)
            engine.module.requires_grad_(True)
            given = own[: len(own) // 3 * 2]
            with patch.object(movable_engine, "warn_once") as tell:
                losses.append(train_and_move(engine, given, cuts()[:2]) if moves else train(engine, given))
            wraps = bool(zero or half)
            assert any(gather_objects(tell.called)) == (moves and wraps)
        same(losses[1], losses[0], digits=1e-5)


class Frozen(pipelines.Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)


class HalfFrozen(pipelines.Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.linear.bias.requires_grad_(False)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """Linear, then falling; schedulers of schedulers know where they are."""
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)
    falling = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], milestones=[4])


def schedules_go_on(_: Path) -> None:
    """The user's scheduler, one that DeepSpeed makes with a callable, and one of the configuration."""
    data = batches(3 * STEPS)

    def by_engine(optimizer: torch.optim.Optimizer) -> Any:
        return warm_up(optimizer)

    by_engine.for_engine = True  # type: ignore[attr-defined]
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-2, "warmup_num_steps": 6, "total_num_steps": 9}
    configured = {"scheduler": {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}}
    expected = train_alone(mlp(), data, OPTIMIZERS["SGD"], make_scheduler=warm_up)
    for zero in (0, 1):
        for lr_scheduler in (warm_up, by_engine):
            engine, _, scheduler = start(
                mlp(), cuts()[0], untested(zero), optimizer=OPTIMIZERS["SGD"], lr_scheduler=lr_scheduler
            )
            same(train_and_move(engine, data, cuts()), expected)
            assert engine.lr_scheduler is scheduler and scheduler.last_epoch == len(data)
        stays, _, _ = start(mlp(), cuts()[0], {**untested(zero), **configured}, optimizer=OPTIMIZERS["SGD"])
        engine, _, _ = start(mlp(), cuts()[0], {**untested(zero), **configured}, optimizer=OPTIMIZERS["SGD"])
        same(train_and_move(engine, data, cuts()), train(stays, data))
        assert engine.get_lr() == stays.get_lr()


def groups_that_become_empty_and_fill_again(_: Path) -> None:
    """One layer has a group of its own, which every rank has empty at some time, with every kind of scheduler."""
    data = batches(3 * STEPS)

    def make(model: nn.Module, keeps_empty: bool = True) -> torch.optim.Optimizer:
        special = [weight for name, weight in model.named_parameters() if name.startswith("5.")]
        others = [weight for name, weight in model.named_parameters() if not name.startswith("5.")]
        groups = [{"params": special, "lr": 5e-2}, {"params": others, "lr": 1e-2}]
        return torch.optim.SGD([group for group in groups if group["params"] or keeps_empty], momentum=0.9)

    def by_engine(optimizer: torch.optim.Optimizer) -> Any:
        return warm_up(optimizer)

    by_engine.for_engine = True  # type: ignore[attr-defined]
    expected = train_alone(mlp(), data, make, make_scheduler=warm_up)
    for zero, (lr_scheduler, keeps_empty) in itertools.product(
        (0, 1), ((warm_up, True), (by_engine, True), (by_engine, False))
    ):
        engine, _, scheduler = start(
            mlp(), cuts()[0], untested(zero), lr_scheduler=lr_scheduler,
            optimizer=lambda model, keeps_empty=keeps_empty: make(model, keeps_empty),
        )  # fmt: skip
        same(train_and_move(engine, data, cuts()), expected)
        assert engine.lr_scheduler is scheduler


def groups_that_ranks_have_as_many_of(_: Path) -> None:
    """Two rates for two halves, one on each rank: a layer that moved had the other half's rate, in silence."""
    data, even = batches(3 * STEPS), [0, 4, 8] if world() == 2 else [0, 2, 4, 6, 8]
    cuts_from_there = [even, *cuts()[:2]]

    def by_half(model: nn.Module) -> torch.optim.Optimizer:
        halves: list[list[Any]] = [[], []]
        for name, weight in model.named_parameters():
            halves[int(name.partition(".")[0]) // 4].append(weight)
        rates = zip(halves, (5e-2, 1e-2), strict=True)
        return torch.optim.SGD([{"params": half, "lr": rate} for half, rate in rates if half], momentum=0.9)

    def in_other_orders(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": [each for each in model.parameters() if (each.ndim > 1) == is_matrix], "lr": rate}
            for is_matrix, rate in ((True, 5e-2), (False, 1e-2))
        ]
        return torch.optim.SGD(groups if torch.distributed.get_rank() == 0 else groups[::-1], momentum=0.9)

    for zero in (0, 1):
        engine, _, _ = start(mlp(), even, untested(zero), optimizer=by_half)
        same(train_and_move(engine, data, cuts_from_there), train_alone(mlp(), data, by_half))
        engine, _, _ = start(mlp(), even, untested(zero), optimizer=in_other_orders)
        same(train_and_move(engine, data, cuts_from_there), train_alone(mlp(), data, in_other_orders))
    engine, _, _ = start(mlp(), even, optimizer=in_other_orders, lr_scheduler=warm_up)
    with raised(RuntimeError, "the same parameter groups in different orders", "in one order on every rank"):
        engine.recut(cuts()[0])


def groups_of_layers_and_groups_that_are_added(_: Path) -> None:
    """A group for each layer, with a schedule, and one that a script adds: both ended in a zip() of torch's."""
    data = batches(3 * STEPS)

    def by_layer(model: nn.Module) -> torch.optim.Optimizer:
        members: dict[str, list[Any]] = {}
        for name, weight in model.named_parameters():
            members.setdefault(name.partition(".")[0], []).append(weight)
        return torch.optim.SGD(
            [{"params": each, "lr": 5e-2 * 0.8 ** int(name)} for name, each in members.items()], momentum=0.9
        )

    def falling(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def by_engine(optimizer: torch.optim.Optimizer) -> Any:
        return falling(optimizer)

    by_engine.for_engine = True  # type: ignore[attr-defined]
    expected = train_alone(mlp(), data, by_layer, make_scheduler=falling)
    for zero in (0, 1):
        engine, _, _ = start(mlp(), cuts()[0], untested(zero), optimizer=by_layer, lr_scheduler=by_engine)
        same(train_and_move(engine, data, cuts()), expected)
        engine, _, _ = start(mlp(), cuts()[0], untested(zero), optimizer=by_layer, lr_scheduler=falling)
        train(engine, data[:1])
        with raised(RuntimeError, "the LambdaLR knows", "lr_scheduler=lambda optimizer"):
            engine.recut(cuts()[1])

    def weights_alone(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in model.parameters() if each.ndim > 1], lr=5e-2, momentum=0.9)

    losses = []
    for moves in (False, True):
        engine, optimizer, _ = start(mlp(), cuts()[0], optimizer=weights_alone)
        found = train(engine, data[:1])
        added = [weight for weight in engine.module.parameters() if weight.ndim == 1]
        optimizer.add_param_group({"params": added, "lr": 1e-2})
        found += train(engine, data[1:2])
        rest = data[2:]
        losses.append(found + (train_and_move(engine, rest, cuts()) if moves else train(engine, rest[:6])))
    same(losses[1][: len(losses[0])], losses[0])


def clipping_goes_on(_: Path) -> None:
    data = batches(3 * STEPS)
    expected = train_alone(mlp(), data, OPTIMIZERS["SGD"], clip=0.05)
    for zero in (0, 1):
        config = {**untested(zero), "gradient_clipping": 0.05}
        engine, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS["SGD"])
        same(train_and_move(engine, data, cuts()), expected)


def nothing_is_lost(_: Path) -> None:
    """Each entry of each layer's state matters: without it, the comparisons of this file would fail."""
    data = batches(2 * STEPS)
    expected = train_alone(mlp(), data, OPTIMIZERS["AdamW"])
    original = TrainingState.receive

    def losing(key: str | None) -> Callable[..., None]:
        def receive(self: TrainingState, part: str, pipe_rank: int, rank: int) -> None:
            original(self, part, pipe_rank, rank)
            for name, state in self._states.items():
                if name == "3.linear.weight" and name.startswith(f"{part}."):
                    lost = state.tensors if key in state.tensors else state.values
                    lost[key] = torch.zeros_like(lost[key])  # type: ignore[index]

        return receive

    for zero, key in itertools.product((0, 1), ("exp_avg", "exp_avg_sq", "step", None)):
        if (zero == 0 and key is None) or (zero == 1 and key == "step"):
            continue  # no master weight; one step for all of a flat tensor
        TrainingState.receive = losing(key)  # type: ignore[method-assign]
        try:
            engine, _, _ = start(mlp(), cuts()[0], untested(zero), optimizer=OPTIMIZERS["AdamW"])
            losses = train_and_move(engine, data, cuts()[:2])
        finally:
            TrainingState.receive = original  # type: ignore[method-assign]
        with raised(AssertionError, "are not"):
            same(losses, expected)


def counts_and_settings_stay(_: Path) -> None:
    data = batches(4)
    engine, _, _ = start(mlp(), cuts()[0], optimizer=OPTIMIZERS["AdamW"])
    train(engine, data[:2])
    before = {name: getattr(engine, name) for name in ("global_steps", "global_samples", "micro_steps")}
    groups = list(engine.optimizer.param_groups)
    groups[1]["lr"] = 0.0125  # by hand
    engine.recut(cuts()[1])
    assert all(getattr(engine, name) == value for name, value in before.items()), before
    assert all(now is then for now, then in zip(engine.optimizer.param_groups, groups, strict=True))
    assert engine.optimizer.param_groups[1]["lr"] == 0.0125

    def within_a_step() -> None:
        with raised(RuntimeError, "within a step"):
            engine.recut(cuts()[0])

    engine.before_optimizer_step = within_a_step
    train(engine, data[2:3])
    engine.before_optimizer_step = None
    engine.recut(cuts()[0])
    train(engine, data[3:])


def states_are_found_by_deepspeed(_: Path) -> None:
    """``safe_get_full_optimizer_state`` right after a move, for every group."""
    data = batches(2)
    for half in ({}, {"bf16": {"enabled": True}}):
        config = {**untested(1), **half}
        engine, _, _ = start(mlp(), cuts()[0], config, optimizer=OPTIMIZERS["AdamW"])
        train(engine, batches(2, dtype=torch.bfloat16) if half else data)

        def found(engine: MadPipeEngine = engine) -> dict[str, list[torch.Tensor]]:
            own = {
                name: [
                    safe_get_full_fp32_param(weight),
                    *(safe_get_full_optimizer_state(weight, key) for key in ("exp_avg", "exp_avg_sq")),
                ]
                for name, weight in engine.module.named_parameters()
            }
            everything: dict[str, list[torch.Tensor]] = {}
            for part in gather_objects(own, engine.grid.get_pipe_parallel_group()):
                everything.update(part)
            return everything

        before = found()
        engine.recut(cuts()[1])
        after = found()
        assert before.keys() == after.keys()
        for name in before:
            assert all(torch.equal(a, b) for a, b in zip(before[name], after[name], strict=True)), name


def a_checkpoint_between_moves(folder: Path) -> None:
    """Loading replaces groups and states; the next move must take what was loaded."""
    data = batches(4 * STEPS)
    for zero in (0, 1):
        make = OPTIMIZERS["AdamW"]
        expected = train_alone(mlp(), data, make, make_scheduler=warm_up)
        where = str(folder / f"zero{zero}")
        options: dict[str, Any] = {"optimizer": make, "lr_scheduler": warm_up}
        engine, _, _ = start(mlp(), cuts()[0], untested(zero), **options)
        same(train_and_move(engine, data[: 2 * STEPS], cuts()[:2]), expected[: 2 * STEPS])
        engine.save_checkpoint(where)
        other, _, _ = start(mlp(), cuts()[0], untested(zero), **options)
        train(other, data[:1])
        other.load_checkpoint(where)
        same(train_and_move(other, data[2 * STEPS :], cuts()[:2]), expected[2 * STEPS :])


def replicas(_: Path) -> None:
    """2 x 2: with ZeRO a layer's states lie on both replicas, and shift between them when layers come or go."""
    for specs, tokens in ((mlp(), False), (tied(), True)):
        data = batches(3 * STEPS, tokens=tokens)
        for name, zero in itertools.product(("AdamW", "SGD"), (0, 1)):
            expected = train_alone(specs, data, OPTIMIZERS[name])
            engine, _, _ = start(specs, cuts_of_two()[0], untested(zero), num_stages=2, optimizer=OPTIMIZERS[name])
            same(train_and_move(engine, data, cuts_of_two()), expected)
    data = batches(3 * STEPS, dtype=torch.bfloat16)
    for zero in (0, 1):
        config = {"bf16": {"enabled": True}, **untested(zero)}
        options: dict[str, Any] = {"num_stages": 2, "optimizer": OPTIMIZERS["AdamW"]}
        expected = train(start(mlp(), cuts_of_two()[0], config, **options)[0], data)
        same(train_and_move(start(mlp(), cuts_of_two()[0], config, **options)[0], data, cuts_of_two()), expected)


def memory_of_a_move(_: Path) -> None:
    """Every byte that torch takes and gives back while layers come, and while they leave.

    Without a wrapping optimizer a rank needs, beside what arrives, no more than its largest layer has. Those of
    DeepSpeed are built anew: for that time there is one more flat tensor of fp32 weights, and with ZeRO one of
    gradients, which each step has too.
    """
    width = 256
    part = width * width + width
    specs = [LayerSpec(nn.Linear, width, width) for _ in range(8)]
    data = [[(torch.randn(2, width), torch.zeros(2, dtype=torch.long)) for _ in range(4)]]
    there, elsewhere = [0, 2, 8], [0, 5, 8]
    for half, zero, num_flat in ((False, 0, 0), (False, 1, 2), (True, 0, 1), (True, 1, 2)):
        # Adam's two states in fp32 and the weights, in bf16 also in fp32 beside; ZeRO has them twice in fp32, too.
        part_bytes = part * ((2 if half else 4) + (4 if half or zero else 0) + 8)
        batch = [[(x.bfloat16() if half else x, y) for x, y in data[0]]]
        config = {**untested(zero), **({"bf16": {"enabled": True}} if half else {})}
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            engine, _, _ = start(specs, there, config, optimizer=adam)
            train(engine, batch)
            for cut in (elsewhere, there):
                gc.collect()
                with torch.profiler.record_function("move"):
                    engine.recut(cut)
        events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        moves = [event for event in events if event.name() == "move"]
        assert len(moves) == 2
        for number, move in enumerate(moves):
            stop = move.start_ns() + move.duration_ns()
            within = [event for event in events if move.start_ns() <= event.start_ns() <= stop]
            level = list(itertools.accumulate(event.nbytes() for event in within if event.name() == "[memory]"))
            comes = (number == 0) == (dist.get_rank() == 0)
            allowed = part_bytes * (1 + 3 * comes) + num_flat * 6 * part * 4  # of 6 layers, before or after
            assert max(level) < 1.05 * allowed, (half, zero, comes, max(level), allowed)
            assert comes or level[-1] < -0.8 * 3 * part_bytes, "three layers have left"


def planned_and_moved(_: Path) -> None:
    """The plan of the first step, and another cut later."""
    data = batches(2 * STEPS)
    engine, _, _ = start(mlp(), "madpipe", planned(cuts()[0]), optimizer=OPTIMIZERS["AdamW"])
    losses = train(engine, data[:STEPS])
    assert engine.plan is not None
    kept = {name: (weight, weight.detach()) for name, weight in engine.module.named_parameters()}
    engine.recut(cuts()[1])
    assert engine.plan is None
    stay = [name for name, weight in engine.module.named_parameters() if kept.get(name, (None,))[0] is weight]
    looked_at = [(engine.module.get_parameter(name), kept[name][1]) for name in stay]
    # What looks at a weight that stays, as weight.detach() does, goes on to look at it.
    assert looked_at and all(weight.data_ptr() == view.data_ptr() for weight, view in looked_at)
    same(losses + train(engine, data[STEPS:]), train_alone(mlp(), data, OPTIMIZERS["AdamW"]))


BOTH = [tied_layers, noise_and_batch_norm, frozen_layers, layers_that_are_unfrozen, a_checkpoint_between_moves]
ONLY_TWO = [
    every_optimizer, a_state_of_any_shape, adagrad_and_the_configurations_optimizer, half_precision,
    schedules_go_on, groups_that_become_empty_and_fill_again,
    groups_that_ranks_have_as_many_of,
    groups_of_layers_and_groups_that_are_added,
    fp16_with_its_loss_scale, clipping_goes_on,
    nothing_is_lost, memory_of_a_move, counts_and_settings_stay, states_are_found_by_deepspeed, planned_and_moved,
]  # fmt: skip
CASES = {
    2: [
        *BOTH, *ONLY_TWO, *warm_up_cases.BOTH, *warm_up_cases.ONLY_TWO, *shortage_cases.BOTH,
        *shortage_cases.ONLY_TWO,
    ],
    4: [
        *BOTH, groups_that_become_empty_and_fill_again, replicas, *warm_up_cases.BOTH, *shortage_cases.BOTH,
        *shortage_cases.ONLY_FOUR,
    ],
}  # fmt: skip
CASES = {num_processes: {case.__name__: case for case in cases} for num_processes, cases in CASES.items()}

if __name__ == "__main__":
    run_cases(CASES[int(os.environ["WORLD_SIZE"])])
