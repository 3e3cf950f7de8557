"""Weights of stages that pipelines share out (FSLPP), with 4 processes: equal to one process, and as simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.schemes.scheme import fslpp_even
from deepspeed_partition.planner.schemes.scheme_simulator import SchemeStage, simulate
from tests.engine import plans
from tests.engine.pipelines import mlp, tied, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, adam, batches, mine, raised, same, start, train

SHARED_OUT = {"pipeline": {"madpipe": {"shard_weights": True}}}
CUTS = [0, 1, 4, 6, 8]


def plan_for(devices: tuple[int, ...], cuts: list[int], depth: int = 2) -> Any:
    num_devices = max(devices) + 1
    count = NUM_MICRO_BATCHES * num_devices // dist.get_world_size()
    orders = plans.depth_first(devices, count, depth)
    chain, platform = plans.chain_of(cuts[-1]), plans.platform_of(num_devices)
    return plans.plan_of(chain, platform, cuts, devices, orders=orders)


def begin(specs: list[Any], devices: tuple[int, ...], **config: Any) -> Any:
    num_stages = max(devices) + 1
    engine, _, _ = start(
        specs, None, SHARED_OUT | config, num_stages=num_stages, plan=plan_for(devices, CUTS)
    )  # fmt: skip
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
    for refused, way_out in (
        (lambda: engine.save_checkpoint("nowhere"), "engine.whole_weights()"),
        (lambda: engine.load_checkpoint("nowhere"), "load_state_dict"),
        (lambda: engine.recut(boundaries), "start again without the option"),
    ):
        with raised(RuntimeError, "is not possible while weights are shared out", way_out):
            refused()


def where_weights_are_not_shared_out(_: Path) -> None:
    """Each refusal says what to do."""
    for specs, devices, config, words in (
        (mlp(), (0, 1, 0, 1), {"zero_optimization": {"stage": 1}}, "set zero_optimization.stage to 0"),
        (tied(), (0, 1, 0, 1), {}, "leave the option out for this model"),
        (mlp(), (0, 1, 2, 3), {}, "use a plan made with data_parallel"),
    ):
        with raised(ValueError, "shard_weights: ", words):
            begin(specs, devices, **config)


CASES = [weights_that_are_shared_out, where_weights_are_not_shared_out]
