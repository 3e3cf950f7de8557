"""What must hold on real pipelines: run by torchrun with 2 and with 4 processes, see ``test_pipelines.py``."""

from __future__ import annotations

import copy
import itertools
import os
import socket
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn

import deepspeed_partition
from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.runtime import agreements, autograd_boundary, collectives
from deepspeed_partition.engine.runtime.autograd_boundary import Departed
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.warmup.run_platform import num_states, training_bytes
from deepspeed_partition.planner.errors import InfeasibleError, PlanFormatError, PlanMismatchError
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.profiling import counted_memory
from tests.engine import boundaries as transfers
from tests.engine import captured_models_cases, faults, fused_adam_cases, pipelines, third_party
from tests.engine.harness import run_cases
from tests.engine.pipelines import Counted, halving, loss_fn, micro_batch, mlp, tied, train_alone, two_groups
from tests.engine.running import (
    ADAM,
    NUM_MICRO_BATCHES,
    NUM_STEPS,
    adam,
    all_tensors,
    batches,
    cut,
    mine,
    planned,
    raised,
    same,
    start,
    train,
    two,
)  # fmt: skip
from tests.engine.torch_schedule_cases import schedule_files_run_in_torch
from tests.engine.warm_up_cases import heard

# What ranks agree on


def ranks_of_one_host_agree_over_sockets(_: Path) -> None:
    own, rank, size, folders = collectives.own_groups(), dist.get_rank(), dist.get_world_size(), []

    class Known(tempfile.TemporaryDirectory):
        def __enter__(self) -> str:
            folders.append(Path(self.name))
            return super().__enter__()

    with patch.object(dist, "all_reduce", None):  # which gloo would be asked by
        assert collectives.any_bits([1 << rank, 2**62]) == [2**size - 1, 2**62]
    with patch.object(tempfile, "TemporaryDirectory", Known):
        agreement = agreements.connected(own.objects)
    assert agreement is not None
    assert agreement.any_bits([1 << rank]) == [2**size - 1]
    [folder] = folders
    assert not folder.exists()
    dist.barrier()
    agreement.close()


def ranks_that_find_no_sockets_of_others_agree_over_gloo(_: Path) -> None:
    own, rank, size = collectives.own_groups(), dist.get_rank(), dist.get_world_size()
    lacks = [
        patch.object(agreements, "_listening", lambda *_: None),
        patch.object(agreements, "_connected_to", lambda *_: None),
        patch.object(tempfile, "TemporaryDirectory", raising(OSError("no room"))),
        patch.object(socket, "socket", raising(AttributeError("AF_UNIX"))),
    ]
    for lack in lacks:
        for who in (0, size - 1):
            with lack if rank == who else nullcontext():
                assert agreements.connected(own.objects) is None
    with patch.dict(collectives._agreements, {dist.group.WORLD: None}):
        assert collectives.any_bits([1 << rank]) == [2**size - 1]


def raising(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


# Training equals training in one process


def planned_training_equals_one_process(_: Path) -> None:
    data = batches()
    expected = train_alone(mlp(), data, adam)
    for zero in (0, 1):
        engine, optimizer, _ = start(mlp(), "madpipe", {**planned(cut()), "zero_optimization": {"stage": zero}})
        assert engine.module.parts != cut()
        same(train(engine, data), expected)
        assert engine.module.parts == cut() == engine.plan.boundaries
        assert engine.chain.num_layers == 8 and engine.plan.chain.digest == engine.chain.digest()
        assert engine.optimizer is optimizer


def a_plan_of_its_own_trains_the_same(_: Path) -> None:
    data = batches()
    engine, _, _ = start(mlp(), "madpipe", {})
    same(train(engine, data), train_alone(mlp(), data, adam))
    plans = gather_objects((engine.plan, engine.module.parts))
    assert all(plan == plans[0][0] and parts == plan.boundaries for plan, parts in plans)


def tied_layers_train_the_same(_: Path) -> None:
    data = batches(tokens=True)
    expected = train_alone(tied(), data, adam)
    for zero in (0, 1):
        engine, _, _ = start(tied(), "madpipe", {**planned(cut()), "zero_optimization": {"stage": zero}})
        same(train(engine, data), expected)


def tied_layers_that_meet_train_the_same(_: Path) -> None:
    """Two ties on one rank, before the cut moves and after it."""
    data = batches(tokens=True)
    specs = [*tied(), LayerSpec(nn.Linear, pipelines.WORDS, pipelines.WORDS)]
    specs.insert(1, specs.pop(-2))  # embed, head, ... : both in the first stage; then blocks of the wrong width
    specs = [specs[0], specs[1], LayerSpec(nn.Linear, pipelines.WORDS, pipelines.WIDTH), *specs[2:8]]
    specs.append(LayerSpec(nn.Linear, pipelines.WIDTH, pipelines.WORDS))
    together, apart = [0, 2, 10], [0, 1, 10]
    expected = train_alone(specs, data, adam)
    for before, after in ((together, apart), (apart, together)):
        engine, _, _ = start(specs, before)
        engine.recut(after)
        same(train(engine, data), expected)


def clipping_by_the_norm_of_all_stages(_: Path) -> None:
    data = batches()
    for clip in (0.0, 0.05):
        expected = train_alone(mlp(), data, adam, clip=clip)
        engine, _, _ = start(mlp(), "madpipe", {**planned(cut()), "gradient_clipping": clip})
        same(train(engine, data), expected)
    # What nobody wrote is said, where plain DeepSpeed would train otherwise by it.
    default = GRADIENT_CLIPPING_DEFAULT
    for zero in (0, 1):
        config = {"gradient_clipping": None, "zero_optimization": {"stage": zero}}
        with heard() as sentences:
            engine, _, _ = start(mlp(), cut(), config, optimizer=adam)
        told = [each for each in sentences if f"DeepSpeed's default, a norm of {default:g}, over all" in each]
        assert len(told) == (default > 0 and not zero), sentences
    same(train(engine, data), train_alone(mlp(), data, adam, clip=default))


def the_norm_counts_tied_weights_once(_: Path) -> None:
    data = batches(tokens=True)
    engine, _, _ = start(tied(), cut(), {"gradient_clipping": 0.05})
    same(train(engine, data), train_alone(tied(), data, adam, clip=0.05))


def a_stage_with_nothing_but_a_tied_copy(_: Path) -> None:
    data = batches(tokens=True)
    only_the_head = [0, 7, 8] if two() else [0, 1, 3, 7, 8]
    expected = train_alone(tied(), data, adam)
    for config, digits in (
        ({}, 1e-5),
        ({"zero_optimization": {"stage": 1}}, 1e-5),
        ({"bf16": {"enabled": True}}, 0.05),
    ):
        engine, _, _ = start(tied(), "madpipe", {**planned(only_the_head), **config})
        same(train(engine, data), expected, digits=digits)


def bf16_within_its_rounding(_: Path) -> None:
    exact = train_alone(mlp(), batches(), adam)
    data = batches(dtype=torch.bfloat16)
    for zero in (0, 1):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": zero}}
        fixed = train(start(mlp(), cut(), config)[0], data)
        engine, optimizer, _ = start(mlp(), "madpipe", {**config, **planned(cut())})
        losses = train(engine, data)
        assert losses == fixed, "moving layers does not round"
        same(losses, exact, digits=0.03)
        assert engine.optimizer is optimizer and engine.module.parts == cut()


def a_short_last_micro_batch(_: Path) -> None:
    """Within a step and from one step to the next; and evaluation on another shape in between."""
    data = batches(3)
    data[1][-1] = micro_batch(77, size=1)
    data[2] = [micro_batch(80 + number, size=3) for number in range(NUM_MICRO_BATCHES)]
    expected = train_alone(mlp(), data, adam)
    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    items = mine(engine, data)
    losses = []
    for step in range(3):
        losses.append(float(engine.train_batch(items)))
        engine.eval_batch(Counted([micro_batch(90 + step, size=2 + step)] * NUM_MICRO_BATCHES))
    same(losses, expected)


def shapes_without_dynamic_shape(_: Path) -> None:
    """As on a GPU, where telling every shape would hold up the device: each batch may have its own shape."""
    data = [[micro_batch(10 * size + number, size=size) for number in range(4)] for size in (4, 2, 3)]
    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    assert engine.dynamic_shape
    engine.dynamic_shape = False
    engine.eval_batch(Counted([micro_batch(80, size=5)] * NUM_MICRO_BATCHES))  # before layers are measured
    losses, items = [], mine(engine, data)
    for step in range(3):
        losses.append(float(engine.train_batch(items)))
        assert not engine.dynamic_shape
        engine.eval_batch(Counted([micro_batch(90 + step, size=3 + step)] * NUM_MICRO_BATCHES))
    same(losses, train_alone(mlp(), data, adam))
    engine, _, _ = start(mlp(), [0, 8], num_stages=1)
    engine.dynamic_shape = False
    with raised(RuntimeError, "(2, 8)", "(4, 8)", "dynamic_shape=True"):
        engine.train_batch(iter([micro_batch(0), micro_batch(1, size=2)]))


def evaluation_before_the_first_step(_: Path) -> None:
    data = batches(1)
    model = pipelines.Whole(mlp())
    with torch.no_grad():
        expected = sum(float(loss_fn(model(x), y)) for x, y in data[0]) / NUM_MICRO_BATCHES
    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    same([float(engine.eval_batch(Counted(list(data[0]))))], [expected])
    assert engine.plan is None, "evaluation does not plan"
    same(train(engine, data), train_alone(mlp(), data, adam))
    assert engine.plan is not None


def a_data_set_given_to_the_engine(_: Path) -> None:
    """The engine's own loader: the measured micro-batch is trained on, once."""
    samples = [(x[row], y[row]) for x, y in (micro_batch(number) for number in range(16)) for row in range(4)]
    data = batches()
    engine, _, _ = start(mlp(), "madpipe", planned(cut()), training_data=samples)
    same([float(engine.train_batch()) for _ in range(NUM_STEPS)], train_alone(mlp(), data, adam))


def built_modules_as_layers(_: Path) -> None:
    """Every rank holds all modules; one of them, without weights, is listed three times."""
    pipelines.set_random_seed(5)
    tanh = nn.Tanh()
    blocks = [pipelines.Block(16) for _ in range(3)]
    modules = [nn.Linear(8, 16), tanh, blocks[0], tanh, *blocks[1:], tanh, nn.Linear(16, 4)]
    alone = copy.deepcopy(modules)

    class Chained(nn.Sequential):
        pass

    expected_model = Chained(*alone)
    optimizer = adam(expected_model)
    data, expected = batches(), []
    for batch in data:
        optimizer.zero_grad()
        losses = [loss_fn(expected_model(x), y) / len(batch) for x, y in batch]
        sum(losses).backward()
        nn.utils.clip_grad_norm_(expected_model.parameters(), 1.0)
        optimizer.step()
        expected.append(float(sum(losses)))
    for boundaries in (cut(), [0, 5, 8]):
        engine, _, _ = start(copy.deepcopy(modules), "madpipe", planned(boundaries))
        same(train(engine, data), expected)
        held = {name for name, _ in engine.module.named_modules(remove_duplicate=False) if name.isdigit()}
        assert held == {str(index) for index in range(engine.module._local_start, engine.module._local_stop)}


# The user's objects


def the_users_optimizer_and_scheduler_stay(_: Path) -> None:
    data = batches()
    expected = train_alone(mlp(), data, two_groups, make_scheduler=halving)
    for zero in (0, 1):
        kept: list[Any] = []

        def making(model: nn.Module, kept: list[Any] = kept) -> torch.optim.Optimizer:
            kept.append(two_groups(model))
            return kept[0]

        config = {**planned(cut()), "zero_optimization": {"stage": zero}}
        engine, optimizer, scheduler = start(mlp(), "madpipe", config, optimizer=making, lr_scheduler=halving)
        groups = list(kept[0].param_groups)
        same(train(engine, data), expected)
        assert engine.basic_optimizer is kept[0] and engine.optimizer is optimizer
        assert engine.lr_scheduler is scheduler and scheduler.optimizer is kept[0]
        assert all(now is before for now, before in zip(kept[0].param_groups, groups, strict=True))
        assert [group["weight_decay"] for group in kept[0].param_groups] == [0.1, 0.0]
        rates = [group["lr"] for group in kept[0].param_groups]
        assert torch.allclose(torch.tensor(rates), torch.tensor([1e-2, 3e-3]) * 0.5**NUM_STEPS)
        if zero == 0:
            assert all(parameter.ndim > 1 for parameter in kept[0].param_groups[0]["params"])
            held = sum(len(group["params"]) for group in kept[0].param_groups)
            assert held == len(list(engine.module.parameters()))


def schedulers_of_the_configuration_and_callables(_: Path) -> None:
    data = batches()
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 3, "warmup_type": "linear"}
    losses = {}
    for zero in (0, 1):
        config = {
            "scheduler": {"type": "WarmupLR", "params": warm_up}, "zero_optimization": {"stage": zero},
        }  # fmt: skip
        fixed = train(start(mlp(), cut(), config)[0], data)
        engine, _, scheduler = start(mlp(), "madpipe", {**config, **planned(cut())})
        same(train(engine, data), fixed, digits=1e-6)
        assert engine.lr_scheduler is scheduler
        losses[zero] = fixed
    same(losses[0], losses[1])

    def for_engine(optimizer: torch.optim.Optimizer) -> Any:
        return halving(optimizer)

    for_engine.for_engine = True  # type: ignore[attr-defined]
    engine, _, scheduler = start(
        mlp(), "madpipe", planned(cut()), optimizer=lambda _: torch.optim.AdamW, lr_scheduler=for_engine
    )
    same(train(engine, data), train(start(mlp(), cut(), optimizer=lambda _: torch.optim.AdamW,
                                          lr_scheduler=for_engine)[0], data), digits=1e-6)  # fmt: skip
    assert engine.lr_scheduler is scheduler and scheduler.last_epoch == NUM_STEPS


def groups_that_are_empty_on_a_rank(_: Path) -> None:
    """Two layers have a group of their own, which other stages have empty: before the cut moves, or after it."""
    data = batches()

    def by_place(model: nn.Module, places: tuple[str, ...]) -> list[dict[str, Any]]:
        special = [weight for name, weight in model.named_parameters() if name.startswith(places)]
        others = [weight for name, weight in model.named_parameters() if not name.startswith(places)]
        return [{"params": special, "lr": 5e-2}, {"params": others, "lr": 1e-3}]

    def linear(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)

    def by_lambda(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 3)

    linear.for_engine = by_lambda.for_engine = True  # type: ignore[attr-defined]
    late = [0, 6, 8] if two() else [0, 4, 6, 7, 8]
    for boundaries, places in ((cut(), ("2.", "7.")), (late, ("5.", "7."))):
        for zero, keeps_empty, ramp in itertools.product((0, 1), (True, False), (linear, by_lambda)):

            def make(model: nn.Module, keeps_empty: bool = keeps_empty, places: Any = places) -> Any:
                groups = by_place(model, places)
                groups = [group for group in groups if group["params"] or keeps_empty]
                return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)

            config = {"zero_optimization": {"stage": zero}, **planned(boundaries)}
            config["zero_allow_untested_optimizer"] = True
            engine, _, scheduler = start(mlp(), "madpipe", config, optimizer=make, lr_scheduler=ramp)
            same(train(engine, data), train_alone(mlp(), data, make, make_scheduler=ramp))
            assert engine.lr_scheduler is scheduler


def a_scheduler_that_knows_its_groups(_: Path) -> None:
    """It was made by the user, for groups of which this rank has some empty."""
    data = batches()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        special = [weight for name, weight in model.named_parameters() if name.startswith("5.")]
        others = [weight for name, weight in model.named_parameters() if not name.startswith("5.")]
        return torch.optim.SGD([{"params": special, "lr": 5e-2}, {"params": others, "lr": 1e-3}])

    def one_for_each(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: (step + 1) * 5.0])

    expected = train_alone(mlp(), data, make, make_scheduler=one_for_each)
    for boundaries in (cut(), [0, 6, 8] if two() else [0, 4, 6, 7, 8]):
        engine, _, _ = start(mlp(), "madpipe", planned(boundaries), optimizer=make, lr_scheduler=one_for_each)
        same(train(engine, data), expected)


def the_hook_before_the_optimizer_step(_: Path) -> None:
    calls = []

    def hook() -> None:
        calls.append(all(parameter.grad is not None for parameter in engine.module.parameters()))

    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    engine.before_optimizer_step = hook
    train(engine, batches(3))
    assert calls == [True] * 3


# Moving layers


def weights_move_as_they_are(_: Path) -> None:
    for config in ({}, {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}):
        engine, _, _ = start(mlp(), cut(), config)
        for name, parameter in engine.module.named_parameters():
            if name in ("2.linear.bias", "4.linear.bias"):  # one of them moves
                parameter.requires_grad_(False)
        for buffer in engine.module.buffers():
            buffer += 3.0
        before, state = all_tensors(engine), torch.get_rng_state()
        held = dict(engine.module.named_parameters())
        engine.recut([0, 3, 8] if two() else [0, 2, 5, 6, 8])
        after = all_tensors(engine)
        assert before.keys() == after.keys()
        assert all(
            torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in after
        )
        for name, parameter in engine.module.named_parameters():
            assert parameter.requires_grad == (name not in ("2.linear.bias", "4.linear.bias")), name
            assert held.get(name, parameter) is parameter, "layers that stay keep their parameters"
        assert torch.equal(state, torch.get_rng_state()), "building layers drew random numbers"
        engine.recut(cut())
        back = all_tensors(engine)
        assert all(torch.equal(before[name], back[name]) for name in before)
    engine, _, _ = start([*mlp()[1:7], mlp()[0], mlp()[7]], [0, 4, 8] if two() else [0, 2, 4, 6, 8])
    with raised(ValueError, "stage 0", "trainable"):
        engine.recut([0, 1, 8] if two() else [0, 1, 3, 5, 8])


def layers_changed_after_they_were_built(_: Path) -> None:
    engine, _, _ = start(mlp(), cut())
    if "7" in dict(engine.module.named_children()):
        engine.module.get_submodule("7").register_buffer("added", torch.zeros(2))
    other = list(cut())
    other[-2] = 7 if two() else 5
    engine.recut(other)  # layer 7 stays where it is: nothing to build
    assert engine.module.parts == other


# What the user asks for


def explicit_boundaries(_: Path) -> None:
    engine, _, _ = start(mlp(), tuple(cut()))
    assert engine.module.parts == cut() and engine.plan is None
    engine, _, _ = start(mlp(), "uniform", {"pipeline": {"partition_method": cut()}})
    assert engine.module.parts == cut()
    num_stages = dist.get_world_size()
    wrong = [[0, 8], [0, *range(2, num_stages + 1), 9], [0] * num_stages + [8], [0.5] * num_stages + [8]]
    for boundaries in wrong:
        with raised(ValueError, "boundaries"):
            start(mlp(), boundaries)
    with raised(ValueError, "stages", "layers"):
        start(mlp()[-1:], "madpipe")
    with raised(ValueError, "'madpipe', a list of boundaries"):
        start(mlp(), 7)
    with raised(ValueError, "trainable"):
        start([LayerSpec(nn.Linear, 8, 4), *[nn.Identity()] * 5], "madpipe")


def the_configuration_alone(_: Path) -> None:
    data = batches()
    config = planned(cut())
    config["pipeline"]["partition_method"] = "MadPipe"
    engine, _, _ = start(mlp(), "uniform", config)
    same(train(engine, data), train_alone(mlp(), data, adam))
    assert engine.module.parts == cut()
    with raised(ValueError, "unknown madpipe option", "memory", "warmup_steps"):
        start(mlp(), "madpipe", {"pipeline": {"madpipe": {"memry": "1GB"}}})
    with raised(ValueError, "'madpip'", "uniform"):
        start(mlp(), "uniform", {"pipeline": {"partition_method": "madpip"}})
    with raised(ValueError, "unknown algorithm"):
        train(start(mlp(), "madpipe", planned("magic"))[0], data)


def deepspeeds_methods_stay(_: Path) -> None:
    engine, _, _ = start(mlp(), "uniform")
    assert not engine.owns_cut and engine.plan is None
    train(engine, batches(1))
    assert engine.plan is None and engine.module.parts == ([0, 4, 8] if two() else [0, 2, 4, 6, 8])
    for method in ("parameters", "type:block"):
        engine, _, _ = start(mlp(), method)
        assert all(type(boundary) is int for boundary in engine.module.parts)


def planning_turned_off(_: Path) -> None:
    by_parameters = start(mlp(), "parameters")[0].module.parts
    os.environ["MADPIPE"] = "0"
    try:
        engine, _, _ = start(mlp(), "madpipe", planned(cut()))
        data = batches()
        same(train(engine, data), train_alone(mlp(), data, adam))
        assert engine.plan is None and engine.module.parts == by_parameters
    finally:
        del os.environ["MADPIPE"]


def plan_files(folder: Path) -> None:
    data = batches()
    path = folder / "plan.json"
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), save_plan=str(path)))
    expected = train(engine, data)
    plan = Plan.load(path)
    assert plan == engine.plan
    for plan_argument, config in ((plan, {}), (path, {}), (None, planned("madpipe", plan=str(path)))):
        engine, _, _ = start(mlp(), "madpipe", config, plan=plan_argument)
        assert engine.module.parts == cut() and engine.plan == plan
        same(train(engine, data), expected, digits=1e-6)
        assert engine.chain is None, "a plan that is given is not measured again"
    with raised(PlanMismatchError, "8 layers", "9"):
        start([*mlp(), LayerSpec(nn.Linear, 4, 4)], plan=plan)
    with raised(PlanMismatchError, "devices"):
        start(mlp(), plan=plan, num_stages=1)
    wider = [*mlp()[:-1], LayerSpec(nn.Linear, mlp()[-1].module_args[0], 7)]
    for plan_argument, config in ((plan, {}), (None, planned("madpipe", plan=str(path)))):
        with raised(PlanMismatchError, "measured on another model", "trainable parameters"):
            start(wider, "madpipe", config, plan=plan_argument)
    with raised(ValueError, "'save_plan'", "/no/such/folder/plan.json", "cannot be written"):
        start(mlp(), "madpipe", planned(cut(), save_plan="/no/such/folder/plan.json"))
    with raised(ValueError, "unknown algorithm 'best'"):
        start(mlp(), "madpipe", planned("best"))
    broken = folder / "broken.json"
    if dist.get_rank() == 0:
        broken.write_text(path.read_text()[:100])
    with raised(PlanFormatError, "broken.json"):
        start(mlp(), plan=broken)
    with raised(PlanFormatError, "broken.json"):
        start(mlp(), "madpipe", planned("madpipe", plan=str(broken)))


def no_plan_fits(_: Path) -> None:
    engine, _, _ = start(mlp(), "madpipe", planned("madpipe", memory=1000))
    with raised(InfeasibleError):
        train(engine, batches(1))
    train(start(mlp(), "madpipe", planned(cut()))[0], batches(1))


def a_layer_that_fails(_: Path) -> None:
    specs = [*mlp()[:-1], LayerSpec(nn.Linear, 5, 4)]  # the last rank cannot run it; the others must hear of it
    engine, _, _ = start(specs, "madpipe")
    with raised(ValueError, "7.Linear"):
        train(engine, batches(1))
    specs = [LayerSpec(nn.Linear, 5, 16), *mlp()[1:]]
    with raised(ValueError, "0.Linear"):
        train(start(specs, "madpipe")[0], batches(1))
    with raised(StopIteration, "data iterator ended"):
        start(mlp(), "madpipe")[0].train_batch(iter([]))


def options_reach_the_platform(_: Path) -> None:
    given = {"memory": "1GB", "bandwidth": "2GB/s", "latency_seconds": 1e-4, "weight_copies": 7}
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), **given))
    train(engine, batches(1))
    platform = engine.plan.platform
    assert (platform.memory_bytes, platform.bandwidth) == (10**9, 2e9)
    assert (platform.latency_seconds, platform.weight_copies) == (1e-4, 7)
    assert engine.plan.num_micro_batches == NUM_MICRO_BATCHES
    assert engine.chain.micro_batch_size == pipelines.MICRO_BATCH_SIZE and engine.chain.input_bytes == 4 * 8 * 4
    names = [layer.name for layer in engine.chain.layers]
    assert names[:3] + names[-1:] == ["0.Linear", "1.doubled", "2.Block", "7.Linear"]
    engine, _, _ = start(mlp(), "madpipe", planned(cut()))
    train(engine, batches(1))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < engine.plan.platform.memory_bytes <= machine // dist.get_world_size()
    assert engine.plan.platform.weight_copies == 4, "Adam in fp32: weights, gradients and two states"


def weight_copies_are_what_deepspeed_keeps(_: Path) -> None:
    """Counted before the first step, and found in memory after it."""
    import gc

    specs = [LayerSpec(nn.Linear, 8, 256), *(LayerSpec(nn.Linear, 256, 256) for _ in range(6)), mlp()[0]]
    specs[-1] = LayerSpec(nn.Linear, 256, 4)
    half = {"bf16": {"enabled": True}}
    one = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}

    def live() -> dict[int, torch.UntypedStorage]:
        """By address; the storages themselves, because the address of one that is gone is given out again."""
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
        # Those that the garbage collector has emptied are among them (seen with torch 2.4), without a storage.
        tensors = [tensor for tensor in tensors if torch._C._has_storage(tensor)]
        return {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}

    for momentum, config in (
        (None, {}),
        (0.0, {}),
        (0.9, {}),
        (None, one),
        (0.9, one),
        (None, half),
        (0.9, {**half, **one}),
    ):
        adam_or_sgd = ADAM if momentum is None else {"type": "SGD", "params": {"lr": 0.1, "momentum": momentum}}
        before = live()
        engine, _, _ = start(specs, cut(), {**config, "optimizer": adam_or_sgd})
        counted, weights = training_bytes(engine)
        data = mine(engine, batches(2, dtype=torch.bfloat16 if "bf16" in config else torch.float32))
        engine.train_batch(data)
        found: list[int] = []

        # With ZeRO before the gradients are copied into a buffer.
        reduce = getattr(engine.optimizer, "reduce_gradients", None)

        def look(
            *given: Any, found: Any = found, before: Any = before, reduce: Any = reduce, **named: Any
        ) -> None:
            found.append(sum(storage.nbytes() for address, storage in live().items() if address not in before))
            if reduce is not None:
                reduce(*given, **named)

        if reduce is None:
            engine.before_optimizer_step = look
        else:
            engine.optimizer.reduce_gradients = look
        engine.train_batch(data)
        engine.before_optimizer_step = None
        slack = 0.02 * weights + 30_000  # micro-batches and losses
        assert abs(found[0] - counted) < slack, (
            f"{config}: counted {counted / weights}, found {found[0] / weights}"
        )
    weight = nn.Parameter(torch.zeros(3))
    assert num_states(torch.optim.AdamW([weight], lr=0.1, amsgrad=True)) == 3
    assert num_states(torch.optim.SGD([weight], lr=0.1)) == 0


def gradients_are_reduced_in_one_buffer_at_most(_: Path) -> None:
    """With one pipeline fp32 has none; ZeRO-1's is not there beside the activations, nor is there a second one."""
    specs = [LayerSpec(nn.Linear, 8, 256), *(LayerSpec(nn.Linear, 256, 256) for _ in range(6)), mlp()[0]]
    specs[-1] = LayerSpec(nn.Linear, 256, 4)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    # Weights and gradients; with ZeRO a master copy, and the buffer.
    for zero, copies in ((0, 2), (1, 4)):
        with counted_memory() as memory:
            config = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
            engine, _, _ = start(specs, [0, 4, 8], {**config, "optimizer": sgd})
            data = mine(engine, batches(2))
            engine.train_batch(data)
            memory.reset_peak()
            peaks: list[int] = []
            engine.before_optimizer_step = lambda peaks=peaks, memory=memory: peaks.append(memory.peak_bytes)
            engine.train_batch(data)
            engine.before_optimizer_step = None
        weights = sum(4 * weight.numel() for weight in engine.module.parameters())
        assert (copies - 0.5) * weights < peaks[0] < (copies + 0.5) * weights, (zero, peaks[0] / weights)


def norms_are_taken_in_pieces(_: Path) -> None:
    """With two pipelines a step makes a copy of half of the gradients, and none of all for their norm."""
    specs = [LayerSpec(nn.Linear, 8, 4), LayerSpec(nn.Linear, 4, 512), LayerSpec(nn.Linear, 512, 512)]
    specs.append(LayerSpec(nn.Linear, 512, 4))
    for kind in ({"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}):
        config = {
            "zero_allow_untested_optimizer": True, "gradient_clipping": 1e-3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **kind,
        }  # fmt: skip
        with counted_memory() as memory:
            engine, _, _ = start(specs, [0, 2, 4], config, num_stages=2)
            data = mine(engine, batches(2, dtype=torch.bfloat16 if "bf16" in kind else torch.float32))
            engine.train_batch(data)
            held: list[int] = []

            def begin(held: list[int] = held, memory: Any = memory) -> None:
                memory.reset_peak()
                held.append(memory.current_bytes)

            engine.before_optimizer_step = begin
            engine.train_batch(data)
            engine.before_optimizer_step = None
        numbers = sum(weight.numel() for weight in engine.module.parameters())
        needed = gather_objects((memory.peak_bytes - held[0]) / numbers)
        assert all(each < 2.6 for each in needed[2:]), (kind, needed)


def copies_of_gradients_are_let_go(_: Path) -> None:
    """Those of ZeRO-1, which gloo's thread may hold for longer: here until the end of the step."""
    specs = [LayerSpec(nn.Linear, 8, 256), *(LayerSpec(nn.Linear, 256, 256) for _ in range(6)), mlp()[0]]
    specs[-1] = LayerSpec(nn.Linear, 256, 4)
    config = {
        "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    held: list[torch.Tensor] = []
    reduce = stage_1_and_2.dist.all_reduce

    def reduce_and_hold(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        held.append(tensor)
        return reduce(tensor, *args, **kwargs)

    with counted_memory() as memory:
        engine, _, _ = start(specs, [0, 4, 8], config, num_stages=2)
        data = mine(engine, batches(2))
        engine.train_batch(data)
        memory.reset_peak()
        peaks: list[int] = []
        engine.before_optimizer_step = lambda: peaks.append(memory.peak_bytes)
        with patch.object(stage_1_and_2.dist, "all_reduce", reduce_and_hold):
            engine.train_batch(data)
        engine.before_optimizer_step = None
    weights = sum(4 * weight.numel() for weight in engine.module.parameters())
    assert any(tensor.numel() > weights / 16 for tensor in held)
    # Weights, half of a master copy, gradients and the buffer, or then the buffer and a copy.
    assert 3.25 * weights < peaks[0] < 3.75 * weights, peaks[0] / weights


def a_gradient_goes_with_the_layer_that_needed_it(_: Path) -> None:
    """The one that comes over a cut: nothing holds it while the layers before the last one of its stage run."""
    engine, _, _ = start(mlp(), [0, 4, 8])
    given: list[weakref.ref[torch.UntypedStorage]] = []
    still_there: list[bool] = []
    give = Departed.give

    def noted(departed: Departed, gradients: Any, **how: Any) -> None:
        given.append(weakref.ref(gradients[0].untyped_storage()))
        give(departed, gradients, **how)

    next(engine.module.parameters()).register_hook(
        lambda _: still_there.append(bool(given) and given[-1]() is not None)
    )
    # Those of few bytes may stay.
    with patch.object(Departed, "give", noted), patch.object(autograd_boundary, "FEW_BYTES", 0):
        train(engine, batches(1))
    [of_first_stage, _] = gather_objects((len(given), still_there))
    assert of_first_stage == (NUM_MICRO_BATCHES, [False] * NUM_MICRO_BATCHES), of_first_stage


# Checkpoints


def checkpoints_bring_their_cut(folder: Path) -> None:
    data = batches(6)
    for zero in (0, 1):
        config = {**planned(cut()), "zero_optimization": {"stage": zero}}
        where = str(folder / f"zero{zero}")
        engine, _, _ = start(mlp(), "madpipe", config)
        expected = train(engine, data[:3])
        engine.save_checkpoint(where)
        expected = train(engine, data[3:])
        resumed, optimizer, _ = start(mlp(), "madpipe", {"zero_optimization": {"stage": zero}})
        assert resumed.module.parts != cut()
        path, _ = resumed.load_checkpoint(where)
        assert path is not None and resumed.module.parts == cut() and resumed.plan == engine.plan
        assert train(resumed, data[3:]) == expected
        assert resumed.optimizer is optimizer and resumed.chain is None
        assert Plan.load(folder / f"zero{zero}" / "global_step3" / "madpipe-plan.json") == engine.plan
        other = [0, 4, 8] if two() else [0, 2, 5, 6, 8]
        elsewhere, _, _ = start(mlp(), other, {"zero_optimization": {"stage": zero}})
        train(elsewhere, data[:1])
        elsewhere.load_checkpoint(where)
        assert elsewhere.module.parts == other and elsewhere.plan is None, "boundaries are taken as they are"
        same(train(elsewhere, data[3:]), expected)
        weights_only, _, _ = start(mlp(), other, {"zero_optimization": {"stage": zero}})
        weights_only.load_checkpoint(where, load_module_only=True)
        assert weights_only.module.parts == other


def checkpoints_of_boundaries_and_of_deepspeed(folder: Path) -> None:
    data = batches(4)
    engine, _, _ = start(mlp(), cut())
    train(engine, data[:2])
    engine.save_checkpoint(str(folder / "boundaries"), tag="two")
    expected = train(engine, data[2:])
    resumed, _, _ = start(mlp(), "madpipe")
    resumed.load_checkpoint(str(folder / "boundaries"))
    assert resumed.module.parts == cut() and resumed.plan is None
    assert train(resumed, data[2:]) == expected
    engine, _, _ = start(mlp(), "parameters")
    train(engine, data[:2])
    engine.save_checkpoint(str(folder / "stock"))
    assert not list((folder / "stock").glob("*/madpipe-plan.json"))
    resumed, _, _ = start(mlp(), "madpipe")
    parts = list(resumed.module.parts)
    with heard() as sentences:
        resumed.load_checkpoint(str(folder / "stock"))
    assert any("was written without a plan: training goes on" in sentence for sentence in sentences)
    train(resumed, data[2:])
    assert resumed.module.parts == parts and resumed.plan is None
    damaged = folder / "boundaries" / "two" / "madpipe-plan.json"
    dist.barrier()
    if dist.get_rank() == 0:
        damaged.write_text('{"format": "madpipe-boundaries/1", "boundaries": [0, "x"]}')
    with raised(PlanFormatError, "madpipe-plan.json"):
        start(mlp(), "madpipe")[0].load_checkpoint(str(folder / "boundaries"))
    assert start(mlp(), "madpipe")[0].load_checkpoint(str(folder / "nothing")) == (None, None)


def a_checkpoint_from_before_the_first_step(folder: Path) -> None:
    """A script that saves at step 0 kept the trial cut for good when it was started again: nothing was planned."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    for zero in (0, 1):
        config = {**planned(cut()), "zero_optimization": {"stage": zero}}
        where = str(folder / f"zero{zero}")
        engine, _, _ = start(mlp(), "madpipe", config)
        engine.save_checkpoint(where)
        resumed, _, _ = start(mlp(), "madpipe", config)
        path, _ = resumed.load_checkpoint(where)
        assert path is not None and resumed.module.parts == engine.module.parts != cut()
        same(train(resumed, data), expected)
        assert resumed.module.parts == cut() == resumed.plan.boundaries


# Data parallel


def replicas_train_the_same(folder: Path) -> None:
    for specs, tokens in ((mlp(), False), (tied(), True)):
        data = batches(tokens=tokens)
        expected = train_alone(specs, data, adam)
        for zero in (0, 1):
            config = {**planned([0, 2, 8]), "zero_optimization": {"stage": zero}}
            engine, _, _ = start(specs, "madpipe", config, num_stages=2)
            same(train(engine, data), expected)
            assert engine.module.parts == [0, 2, 8] and engine.plan is not None and engine.chain is not None
    data = batches(dtype=torch.bfloat16)
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    fixed = train(start(mlp(), [0, 2, 8], config, num_stages=2)[0], data)
    engine, _, _ = start(mlp(), "madpipe", {**config, **planned([0, 2, 8])}, num_stages=2)
    assert train(engine, data) == fixed
    engine.save_checkpoint(str(folder))
    resumed, _, _ = start(mlp(), "madpipe", config, num_stages=2)
    resumed.load_checkpoint(str(folder))
    assert resumed.module.parts == [0, 2, 8]
    assert train(resumed, data) == train(engine, data)


def replicas_hear_of_failures(_: Path) -> None:
    with raised(InfeasibleError):
        train(start(mlp(), "madpipe", planned("madpipe", memory=1000), num_stages=2)[0], batches(1))
    with raised(ValueError, "7.Linear"):
        specs = [*mlp()[:-1], LayerSpec(nn.Linear, 5, 4)]
        train(start(specs, "madpipe", num_stages=2)[0], batches(1))


def one_stage(_: Path) -> None:
    """Data parallel alone: there is nothing to cut, and no plan is made, unless an option asks for one."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    engine, _, _ = start(mlp(), "madpipe", {}, num_stages=1)
    same(train(engine, data), expected)
    assert engine.plan is None
    engine, _, _ = start(mlp(), "madpipe", planned("madpipe", recompute="block"), num_stages=1)
    same(train(engine, data), expected)
    assert engine.plan.boundaries == [0, 8]


# install(), last: it changes DeepSpeed's classes for all that follows


class Before(deepspeed.pipe.PipelineModule):
    """A subclass made before ``install``, with a signature of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def installed_into_deepspeed(_: Path) -> None:
    original = deepspeed.initialize
    deepspeed_partition.install()
    patched = deepspeed.pipe.PipelineModule._partition_layers
    deepspeed_partition.install()
    assert deepspeed.pipe.PipelineModule._partition_layers is patched, "calling it again changes nothing"
    assert deepspeed.initialize is original
    data = batches()
    expected = train_alone(mlp(), data, adam)
    deepspeeds = {"start_engine": deepspeed.initialize}
    for module_class in (deepspeed.pipe.PipelineModule, Before, PipelineModule):
        for method in ("madpipe", "MadPipe", "profile"):
            engine, _, _ = start(mlp(), method, planned(cut()), module_class=module_class, **deepspeeds)
            same(train(engine, data), expected)
            assert engine.module.parts == cut() and isinstance(engine, deepspeed.PipelineEngine)
    engine, _, _ = start(mlp(), cut(), module_class=Before, **deepspeeds)
    assert engine.module.parts == cut()
    config = planned(cut())
    config["pipeline"]["partition_method"] = "madpipe"
    engine, _, _ = start(mlp(), "uniform", config, module_class=Before, **deepspeeds)
    same(train(engine, data), expected)
    for method in ("uniform", "parameters", "type:block"):
        engine, _, _ = start(mlp(), method, module_class=Before, **deepspeeds)
        assert not engine.owns_cut and all(type(boundary) is int for boundary in engine.module.parts)
    train(engine, data[:1])
    with raised(NotImplementedError, "magic", "'madpipe', a list of boundaries"):
        start(mlp(), "magic", module_class=Before, **deepspeeds)


BOTH = [
    ranks_of_one_host_agree_over_sockets, ranks_that_find_no_sockets_of_others_agree_over_gloo,
    planned_training_equals_one_process, a_plan_of_its_own_trains_the_same, tied_layers_train_the_same,
    clipping_by_the_norm_of_all_stages, the_norm_counts_tied_weights_once, bf16_within_its_rounding,
    the_users_optimizer_and_scheduler_stay, groups_that_are_empty_on_a_rank,
    a_scheduler_that_knows_its_groups, weights_move_as_they_are,
    checkpoints_bring_their_cut, a_short_last_micro_batch, a_stage_with_nothing_but_a_tied_copy,
    schedule_files_run_in_torch,
]  # fmt: skip
ONLY_TWO = [
    tied_layers_that_meet_train_the_same, shapes_without_dynamic_shape,
    evaluation_before_the_first_step, a_data_set_given_to_the_engine,
    built_modules_as_layers, schedulers_of_the_configuration_and_callables, the_hook_before_the_optimizer_step,
    layers_changed_after_they_were_built, explicit_boundaries,
    the_configuration_alone, deepspeeds_methods_stay, planning_turned_off, plan_files, no_plan_fits,
    a_layer_that_fails, options_reach_the_platform, weight_copies_are_what_deepspeed_keeps,
    gradients_are_reduced_in_one_buffer_at_most, a_gradient_goes_with_the_layer_that_needed_it,
    checkpoints_of_boundaries_and_of_deepspeed, a_checkpoint_from_before_the_first_step,
]  # fmt: skip
ONLY_FOUR = [
    replicas_train_the_same, replicas_hear_of_failures, one_stage, copies_of_gradients_are_let_go,
    norms_are_taken_in_pieces,
]  # fmt: skip
# Faults first: they are shown on DeepSpeed's own classes, as they are before install().
CASES = {
    2: [
        *faults.ONLY_TWO, *fused_adam_cases.ONLY_TWO, *BOTH, *transfers.BOTH, *transfers.ONLY_TWO, *ONLY_TWO,
        installed_into_deepspeed, *third_party.BOTH, *third_party.ONLY_TWO,
    ],
    4: [
        *BOTH, *transfers.BOTH, *ONLY_FOUR, installed_into_deepspeed, *third_party.BOTH, *third_party.ONLY_FOUR,
        *captured_models_cases.BOTH,
    ],
}  # fmt: skip
CASES = {num_processes: {case.__name__: case for case in cases} for num_processes, cases in CASES.items()}

if __name__ == "__main__":
    run_cases(CASES[int(os.environ["WORLD_SIZE"])])
