"""Weights of stages that pipelines share out (FSLPP), with 4 processes: equal to one process, and as simulated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.schemes.scheme import fslpp_even
from deepspeed_partition.planner.schemes.scheme_simulator import SchemeStage, simulate
from tests.engine import plans
from tests.engine.pipelines import Assigning, loss_fn, mlp, tied, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, adam, batches, mine, raised, same, start, train

SHARED_OUT = {"pipeline": {"madpipe": {"shard_weights": True}}}
CUTS = [0, 1, 4, 6, 8]


def plan_for(devices: tuple[int, ...], cuts: list[int], depth: int = 2) -> Any:
    num_devices = max(devices) + 1
    count = NUM_MICRO_BATCHES * num_devices // dist.get_world_size()
    orders = plans.depth_first(devices, count, depth)
    chain, platform = plans.chain_of(cuts[-1]), plans.platform_of(num_devices)
    return plans.plan_of(chain, platform, cuts, devices, orders=orders)


def begin(specs: list[Any], devices: tuple[int, ...], *, shares_out: bool = True, **config: Any) -> Any:
    shared = SHARED_OUT if shares_out else {}
    plan = plan_for(devices, CUTS)
    engine, _, _ = start(specs, None, shared | config, num_stages=max(devices) + 1, plan=plan)
    return engine


def weights_that_are_shared_out(_: Path) -> None:
    """FSLPP, two pipelines of two ranks, and FSDP by stages: losses, gradients, bytes stored and sent."""
    data = batches()
    wanted: dict[str, torch.Tensor] = {}

    def keep(model: torch.nn.Module) -> None:
        if not wanted:
            wanted.update({name: each.grad.clone() for name, each in model.named_parameters()})

    expected = train_alone(mlp(), data, adam, before_step=keep)
    for devices in ((0, 1, 0, 1), (0, 0, 0, 0)):
        engine = begin(mlp(), devices)
        found: dict[str, torch.Tensor] = {}

        def keep_own(engine: Any = engine, found: dict[str, torch.Tensor] = found) -> None:
            if not found:
                own = engine.module.named_parameters()
                found.update({name: each.grad.clone() for name, each in own if each.grad is not None})

        engine.before_optimizer_step = keep_own
        same(train(engine, data), expected)
        parts = gather_objects(found)
        assert sum(map(len, parts)) == len(wanted), "each weight has one owner"
        for name, gradient in (item for part in parts for item in part.items()):
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
        _is_as_simulated(engine, devices, len(data))
        _has_all_weights_when_asked(engine)
        engine.eval_batch(iter(mine(engine, data).items))


def _is_as_simulated(engine: Any, devices: tuple[int, ...], num_steps: int) -> None:
    group_size = max(devices) + 1
    num_groups = dist.get_world_size() // group_size
    sizes = [
        sum(4 * weight.numel() for flat in flats for weight in flat.weights)
        for flats in engine.sharded.flats.values()
    ]
    by_stage = dict(zip(engine.sharded.flats, sizes, strict=True))
    for part in gather_objects(by_stage):
        by_stage.update(part)
    stages = [SchemeStage(weight_bytes=by_stage[stage]) for stage in range(len(devices))]
    run = simulate(fslpp_even(num_groups, group_size), stages, NUM_MICRO_BATCHES)
    worker = group_size * engine.grid.get_data_parallel_rank() + engine.stage_id
    traffic = engine.sharded.traffic
    assert traffic.weights_received == num_steps * run.weights_received[worker] > 0
    assert traffic.weight_bytes_received == num_steps * run.weight_bytes_received[worker]
    assert traffic.gradients_sent == num_steps * run.gradients_sent[worker]
    assert traffic.peak_fetched <= run.peak_fetched[worker] == 2
    assert engine.sharded.stored_bytes == run.weight_bytes_stored[worker]
    assert run.weights_stored[worker] == 1
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in engine.module.parameters()
    }
    others = sum(not engine.sharded.is_here[stage] for stage in engine.sharded.flats)
    hidden = sum(len(flat.weights) for flat in engine.sharded._foreign())
    assert sum(storages.values()) == run.weight_bytes_stored[worker] + 4 * hidden and others
    with_state = [each for each in engine.optimizer.state if each.numel() and engine.optimizer.state[each]]
    assert sum(4 * each.numel() for each in with_state) == run.weight_bytes_stored[worker]


def _has_all_weights_when_asked(engine: Any) -> None:
    foreign = [weight for flat in engine.sharded._foreign() for weight in flat.weights]
    assert all(weight.isnan().all() for weight in foreign)
    with raised(RuntimeError, "stores the weights of some of its stages only", "engine.whole_weights()"):
        engine.module.state_dict()
    with engine.whole_weights():
        state = {name: each.clone() for name, each in engine.module.state_dict().items()}
    copies = gather_objects(state, engine.grid.get_data_parallel_group())
    for name, tensor in state.items():
        assert tensor.isfinite().all()
        assert all(torch.equal(tensor, each[name]) for each in copies)
    boundaries = [0, 8] if engine.num_stages == 1 else [0, 4, 8]
    with raised(RuntimeError, "recut is not possible while weights are shared out", "save a checkpoint"):
        engine.recut(boundaries)


def checkpoints_of_what_is_shared_out(folder: Path) -> None:
    """Saved in the middle, training goes on as in one process: in this run, and loaded in runs of every kind."""
    data = batches(4)
    before, after = data[:2], data[2:]
    losses = train_alone(mlp(), data, adam)
    looped, by_stage = (0, 1, 0, 1), (0, 0, 0, 0)
    for name, devices, shares_out in (("shared", looped, True), ("plain", looped, False)):
        engine = begin(mlp(), devices, shares_out=shares_out)
        same(train(engine, before), losses[:2])
        engine.save_checkpoint(str(folder / name))
        if shares_out:
            _has_its_own_alone(engine)
        same(train(engine, after), losses[2:])
    for name, devices, shares_out in (
        ("shared", looped, True), ("shared", by_stage, True), ("shared", by_stage, False), ("plain", looped, True),
    ):  # fmt: skip
        engine = begin(mlp(), devices, shares_out=shares_out)
        engine.load_checkpoint(str(folder / name))
        if shares_out:
            _has_its_own_alone(engine)
        same(train(engine, after), losses[2:])


def _has_its_own_alone(engine: Any) -> None:
    """Neither weights nor states of other owners are left here, and the states of all its own are."""
    own, foreign = (
        [weight for stage, flats in engine.sharded.flats.items() for flat in flats for weight in flat.weights
         if engine.sharded.is_here[stage] is here]
        for here in (True, False)
    )  # fmt: skip
    assert own and foreign
    assert all(engine.optimizer.state.get(weight) for weight in own)
    assert not any(engine.optimizer.state.get(weight) for weight in foreign)
    assert all(weight.isnan().all() for weight in foreign)


def a_batch_that_is_given_up(_: Path) -> None:
    """An error in a layer left all ranks waiting for weights and gradients that nobody took any more."""
    data = batches()
    expected = train_alone(mlp(), data[1:], adam)

    def fails(*_: torch.Tensor) -> None:
        raise ValueError("the layer has failed")

    for devices, in_forward in itertools.product(((0, 1, 0, 1), (0, 0, 0, 0)), (True, False)):
        calls = itertools.count()

        begun: list[Any] = []

        def failing(
            x: torch.Tensor, calls: Any = calls, begun: Any = begun, in_forward: bool = in_forward
        ) -> torch.Tensor:
            is_first = next(calls) == 0 and begun[0].grid.data_parallel_id == 0
            if is_first and in_forward:
                fails()
            y = x * 2.0
            if is_first:
                y.register_hook(fails)
            return y

        engine = begin([mlp()[0], failing, *mlp()[2:]], devices)
        begun.append(engine)
        with raised(ValueError, "the layer has failed"):
            train(engine, data[:1])
        same(train(engine, data[1:]), expected)


class Learned(torch.nn.Module):
    """A loss with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_fn(outputs * self.scale, labels)


def where_weights_are_not_shared_out(_: Path) -> None:
    """Each refusal says what to do."""
    for specs, devices, config, words in (
        (mlp(), (0, 1, 0, 1), {"zero_optimization": {"stage": 1}}, "set zero_optimization.stage to 0"),
        (tied(), (0, 1, 0, 1), {}, "leave the option out for this model"),
        (mlp(), (0, 1, 2, 3), {}, "use a plan made with data_parallel"),
    ):
        with raised(ValueError, "shard_weights: ", words):
            begin(specs, devices, **config)
    with raised(ValueError, "shard_weights: the loss function has weights, which belong to no stage"):
        start(mlp(), None, SHARED_OUT, num_stages=2, plan=plan_for((0, 1, 0, 1), CUTS), loss_fn=Learned())


def weights_that_are_assigned(_: Path) -> None:
    """The other pipelines had the weights of the start for ever, in silence."""
    data, losses = batches(), []
    for kind in (torch.optim.SGD, Assigning):

        def make(model: Any, kind: Any = kind) -> torch.optim.Optimizer:
            return kind(model.parameters(), lr=0.1)

        plan = plan_for((0, 1, 0, 1), CUTS)
        engine, _, _ = start(mlp(), None, SHARED_OUT, num_stages=2, plan=plan, optimizer=make)
        losses.append(train(engine, data))
    same(losses[1], losses[0])


def weights_that_are_frozen_and_freed(_: Path) -> None:
    """What trained when the engine was made was sent for ever: gradients of other pipelines were lost."""
    data, losses = batches(6), []
    for config in ({}, SHARED_OUT):
        plan = plan_for((0, 1, 0, 1), CUTS)
        engine, _, _ = start(mlp(), None, config, num_stages=2, plan=plan, optimizer=adam)
        layers = [child for name, child in engine.module.named_children() if name in ("0", "4")]
        found = train(engine, data[:2])
        for trains in (False, True):
            for layer in layers:
                layer.requires_grad_(trains)
            found += train(engine, data[2 * trains + 2 :][:2])
        losses.append(found)
    same(losses[1], losses[0])


CASES = [
    weights_that_are_shared_out, weights_that_are_frozen_and_freed,
    weights_that_are_assigned, checkpoints_of_what_is_shared_out, a_batch_that_is_given_up,
    where_weights_are_not_shared_out,
]  # fmt: skip
