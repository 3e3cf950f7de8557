"""What must hold of the engine that runs any plan: run by torchrun with 2 and with 3 processes."""

from __future__ import annotations

import functools
import itertools
import os
import random
import weakref
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock, patch

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import Plan
from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.pipeline.plain_passes import READ_VERSION
from deepspeed_partition.engine.pipeline.stages import StagesModule
from deepspeed_partition.engine.runtime import autograd_boundary, environment, host_staging
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.profiling.backward_halves import Halves
from deepspeed_partition.schedule.instructions import Compute
from tests.engine import (
    asynchronous_cases,
    caught_cases,
    device_cases,
    expert_cases,
    host_cases,
    outputs_cases,
    pipelines,
    plans,
    real_layers_cases,
    sharded_cases,
)
from tests.engine import boundaries as transfers
from tests.engine.harness import run_cases
from tests.engine.pipelines import (
    WIDTH,
    Block,
    Counted,
    Whole,
    halving,
    loss_fn,
    micro_batch,
    mlp,
    tied,
    train_alone,
)
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    adam,
    all_tensors,
    batches,
    divides_backwards,
    divides_gradients_once,
    mine,
    raised,
    recomputes_on_a_cpu,
    same,
    start,
    train,
    two,
)  # fmt: skip

MAPS = {
    2: {
        (0, 1): [0, 3, 8],
        (1, 0): [0, 3, 8],
        (0, 1, 0): [0, 3, 6, 8],
        (0, 1, 0, 1): [0, 1, 4, 6, 8],
        (0, 1, 1, 0): [0, 3, 4, 5, 8],
    },
    3: {
        (1, 0, 1, 2, 1): [0, 1, 3, 5, 6, 8],
        (0, 1, 2, 0, 1, 2): [0, 1, 3, 4, 5, 6, 8],
        (2, 0, 1): [0, 3, 5, 8],
    },
}


def maps() -> list[tuple[tuple[int, ...], list[int]]]:
    return list(MAPS[dist.get_world_size()].items())


def plan_for(
    devices: Any, cuts: Any, depth: int | None = 3, num_micro_batches: int = NUM_MICRO_BATCHES,
    some_recomputed: int | None = None, in_halves: int | None = None, **more: Any,
) -> Plan:  # fmt: skip
    """``depth`` micro-batches in flight; None: GPipe. ``some_recomputed``, ``in_halves``: seeds."""
    orders = (
        plans.gpipe(devices, num_micro_batches)
        if depth is None
        else plans.depth_first(devices, num_micro_batches, depth)
    )
    if some_recomputed is not None:
        orders = plans.some_recomputed(orders, some_recomputed)
    if in_halves is not None:
        orders = plans.some_in_halves(orders, in_halves, share=0.75)
    num_devices = max(devices) + 1
    chain, platform = plans.chain_of(cuts[-1]), plans.platform_of(num_devices)
    return plans.plan_of(chain, platform, cuts, devices, orders=orders, **more)


def begin(specs: list[Any], plan: Plan, config: dict[str, Any] | None = None, **more: Any) -> Any:
    """An engine, its optimizer and its scheduler; started twice as many processes, there are two pipelines.

    Shapes are told once per batch, as on a GPU, unless ``dynamic_shape`` is given.
    """
    engine, *others = start(specs, None, config, num_stages=plan.platform.num_devices, plan=plan, **more)
    assert engine.runs_lists and engine.plan is plan and engine.dynamic_shape
    engine.dynamic_shape = engine.module.dynamic_shape
    return engine, *others


def first_gradients(found: dict[str, torch.Tensor], model: nn.Module) -> None:
    """To be called before each optimizer step."""
    if not found:
        found.update({name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad})


def every_map_equals_one_process(_: Path) -> None:
    """In its losses, and in the gradients of each weight before the first step."""
    data = batches()
    wanted: dict[str, torch.Tensor] = {}
    expected = train_alone(mlp(), data, adam, before_step=lambda model: first_gradients(wanted, model))
    for devices, cuts in maps():
        for depth in (3, None) if devices == (0, 1, 0, 1) else (3,):
            engine, _, _ = begin(mlp(), plan_for(devices, cuts, depth))
            found: dict[str, torch.Tensor] = {}
            engine.before_optimizer_step = functools.partial(first_gradients, found, engine.module)
            same(train(engine, data), expected)
            assert found and found.keys() <= wanted.keys()
            for name, gradient in found.items():
                assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-7), name


def random_maps_equal_one_process(_: Path) -> None:
    data = batches(2)
    expected = train_alone(mlp(), data, adam)
    pick = random.Random(5)
    for _ in range(8 if two() else 12):  # 20 in all
        num_stages = pick.randint(3, 6)
        devices = [*range(dist.get_world_size())]
        devices += [pick.choice(devices) for _ in range(num_stages - len(devices))]
        pick.shuffle(devices)
        # The second layer has no parameters, so it is no stage.
        cuts = [0, *sorted(pick.sample([3, 4, 5, 6, 7], num_stages - 1)), 8]
        engine, _, _ = begin(mlp(), plan_for(devices, cuts, pick.choice([1, 2, 4, None])))
        with patch.object(autograd_boundary, "FEW_BYTES", pick.choice([0, autograd_boundary.FEW_BYTES])):
            same(train(engine, data), expected)


def passes_with_and_without_deepspeeds_wrapping(_: Path) -> None:
    """The same in all bits, whatever the size of a boundary; where DeepSpeed has something to do, it does."""
    data = batches(3)
    devices, cuts = maps()[-1]
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for as_read, few_bytes in ((False, 0), (True, 0), (True, autograd_boundary.FEW_BYTES)):
        torch.manual_seed(3)
        engine, _, _ = begin(mlp(), plan_for(devices, cuts), seed_layers=False)
        engine._passes._as_read = as_read and engine._passes._as_read
        in_turn = StagesModule._forward_in_turn if as_read else deepspeed.PipelineModule.forward
        with (
            patch.object(autograd_boundary, "FEW_BYTES", few_bytes),
            patch.object(StagesModule, "_forward_in_turn", in_turn),
        ):
            found.append((train(engine, data), all_tensors(engine)))
        assert engine._is_plain is engine._passes._as_read
        assert engine._is_plain is as_read or deepspeed.__version__ != READ_VERSION
    (losses, weights), *others = found
    for its_losses, its_weights in others:
        assert its_losses == losses, (its_losses, losses)
        assert all(torch.equal(weight, weights[name]) for name, weight in its_weights.items())
    for more in ({"zero_optimization": {"stage": 1}}, {"bf16": {"enabled": True}}, {"wall_clock_breakdown": True}):
        engine, _, _ = begin(mlp(), plan_for(devices, cuts), more)
        if "bf16" not in more:
            train(engine, data[:1])
            assert not engine._is_plain
        assert not engine._passes.begin()


def a_pattern_with_fill_and_drain(_: Path) -> None:
    """A plan without an order; gradients cross while others are on their way."""
    data = batches(2)
    expected = train_alone(mlp(), data, adam)
    for devices, cuts in maps():
        plan = plans.packed(plans.chain_of(8), plans.platform_of(max(devices) + 1, comm_buffers=4), cuts, devices)
        assert max(stage.in_flight for stage in plan.stages) > 1
        engine, _, _ = begin(mlp(), plan)
        same(train(engine, data), expected)


def tied_layers(_: Path) -> None:
    """Both ends on one rank or on two; with ZeRO-1, and clipped."""
    data = batches(tokens=True)
    for clip, config in ((1.0, {}), (0.05, {"gradient_clipping": 0.05, "zero_optimization": {"stage": 1}})):
        expected = train_alone(tied(), data, adam, clip=clip)
        for devices, cuts in maps() if not config else maps()[-2:]:
            engine, _, _ = begin(tied(), plan_for(devices, cuts), config)
            same(train(engine, data), expected)


def zero_1_clipping_and_bf16(_: Path) -> None:
    data = batches()
    devices, cuts = maps()[-1 if two() else 0]
    for clip in (0.0, 0.05):
        for stage in (0, 1):
            config = {"gradient_clipping": clip, "zero_optimization": {"stage": stage}}
            engine, _, _ = begin(mlp(), plan_for(devices, cuts), config)
            same(train(engine, data), train_alone(mlp(), data, adam, clip=clip))
    expected = train_alone(mlp(), data, adam)
    for stage in (0, 1):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        engine, _, _ = begin(mlp(), plan_for(devices, cuts), config)
        same(train(engine, batches(dtype=torch.bfloat16)), expected, digits=0.03)


def boundaries_of_all_kinds(_: Path) -> None:
    """Booleans, integers and floats, some without a gradient, alone and with layers that are recomputed."""
    data = batches()
    expected = train_alone(transfers.carrying(), data, adam)
    for devices, cuts in maps():
        engine, _, _ = begin(transfers.carrying(), plan_for(devices, cuts))
        same(train(engine, data), expected)
    for reentrant in (True, False) if recomputes_on_a_cpu() else ():
        options = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Carrying"]}
        config = {"pipeline": {"use_reentrant": reentrant}}
        engine, _, _ = begin(transfers.carrying(), plan_for(devices, cuts), config, **options)
        same(train(engine, data), expected)


def a_boundary_without_any_gradient(_: Path) -> None:
    """The first stage has nothing to learn from its output, alone or in a tuple."""
    data = batches(2)
    for wrap in (lambda x: x, lambda x: (x, x > 3)):
        specs = [
            LayerSpec(transfers.Numbers), wrap, lambda x: x if torch.is_tensor(x) else x[0],
            LayerSpec(pipelines.Embedding, pipelines.WORDS, pipelines.WIDTH),
            LayerSpec(pipelines.Block, pipelines.WIDTH), LayerSpec(nn.Linear, pipelines.WIDTH, 4),
        ]  # fmt: skip
        expected = train_alone(specs, data, adam)
        for devices, cuts in (((0, 1), [0, 2, 6]), ((0, 1, 0), [0, 2, 4, 6]), ((0, 0, 1), [0, 2, 4, 6])):
            engine, _, _ = begin(specs, plan_for(devices, cuts))
            same(train(engine, data), expected)


def messages_through_the_host(folder: Path) -> None:
    """As gloo's messages between GPUs go: DeepSpeed's first ones, those of a step, and layers that move."""
    copies = Mock(wraps=host_staging._on_host)
    data, saved = batches(3), {"pipeline": {"madpipe": {"save_timeline": str(folder / "timeline.json")}}}
    with (
        patch.object(host_staging, "goes_through_host", lambda _: True),
        patch.object(host_staging, "_on_host", copies),
    ):
        devices, cuts = maps()[-1]
        engine, _, _ = begin(transfers.carrying(), plan_for(devices, cuts), saved)
        assert copies.call_count == 1, "DeepSpeed sends one number"
        losses = train(engine, data[:2])
        num_messages = 2 * NUM_MICRO_BATCHES * 2 * 2  # steps, two cuts between the ranks, forth and back
        assert copies.call_count > num_messages, "of several tensors each"
        before = copies.call_count
        engine.recut(plan_for(*maps()[0]))
        assert copies.call_count > before
        losses += train(engine, data[2:])
    same(losses, train_alone(transfers.carrying(), data, adam))
    dist.barrier()
    assert (folder / "timeline.json").exists()


def layers_that_work_in_place(_: Path) -> None:
    """The first layer of a stage changes what it is given."""
    data = batches()
    specs = mlp()
    specs[3:3] = [LayerSpec(nn.ReLU, inplace=True)]
    specs[5:5] = [LayerSpec(nn.ReLU, inplace=True)]
    devices, cuts = {2: ((0, 1, 1, 0), [0, 3, 5, 6, 10]), 3: ((1, 0, 0, 2), [0, 3, 5, 6, 10])}[
        dist.get_world_size()
    ]
    engine, _, _ = begin(specs, plan_for(devices, cuts))
    same(train(engine, data), train_alone(specs, data, adam))


def training_and_evaluation_in_turns(_: Path) -> None:
    """Evaluation with other shapes and another number of micro-batches, and its logits."""
    data = batches(3)
    expected = train_alone(mlp(), data, adam)
    for devices, cuts in maps()[-2:]:
        engine, _, _ = begin(mlp(), plan_for(devices, cuts))
        items, losses = mine(engine, data), []
        for step in range(3):
            weights = all_tensors(engine)
            shown = [micro_batch(90 + 10 * step + number, size=2 + step) for number in range(step + 5)]
            loss, logits = engine.eval_batch(Counted(list(shown)), return_logits=True, num_micro_batches=step + 5)
            alone = Whole(mlp())
            alone.load_state_dict(weights, strict=False)
            with torch.no_grad():
                outputs = [alone(x) for x, _ in shown]
                wanted = sum(float(loss_fn(out, y)) for out, (_, y) in zip(outputs, shown, strict=True)) / len(
                    shown
                )
            same([float(loss)], [wanted])
            if engine.is_last_stage():
                assert torch.allclose(logits, outputs[-1], atol=1e-6)
            losses.append(float(engine.train_batch(items)))
        same(losses, expected)
        assert items.taken == (12 if engine.is_first_stage() or engine.is_last_stage() else 0)


def micro_batches_of_different_shapes(_: Path) -> None:
    """A batch may always have its own shapes; its micro-batches only where the module says so."""
    data = [[micro_batch(10 * size + number, size=size) for number in range(4)] for size in (4, 2, 3)]
    devices, cuts = maps()[-1]
    engine, _, _ = begin(mlp(), plan_for(devices, cuts))
    same(train(engine, data), train_alone(mlp(), data, adam))
    data[1][-1] = micro_batch(77, size=1)
    engine, _, _ = begin(mlp(), plan_for(devices, cuts), dynamic_shape=True)
    same(train(engine, data), train_alone(mlp(), data, adam))


class Varied(nn.Module):
    """Returns other tensors for each size of batch: another number, other types, some without a gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) == 3:
            return x, x > 0
        if len(x) == 2:
            return x, x.detach() * 0.1, torch.arange(5)
        return x.double() if len(x) == 1 else x


class Merged(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        first, *others = x if isinstance(x, tuple) else (x,)
        return first.float() * (1 + sum(other.float().mean() for other in others))


def shapes_that_change(_: Path) -> None:
    """In the middle of training and of a batch; nothing but tensors is sent while they stay."""
    blocks = [LayerSpec(Block, WIDTH) for _ in range(4)]
    specs = [
        LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(Varied), LayerSpec(Merged), *blocks,
        LayerSpec(nn.Linear, WIDTH, 4),
    ]  # fmt: skip
    sizes = [
        *[[4, 4, 4, 4]] * 3, [4, 4, 4, 2], [4, 3, 2, 1], *[[4, 4, 4, 4]] * 3, [3, 3, 3, 3], [1, 1, 1, 1],
        [3, 2, 3, 2],
    ]  # fmt: skip
    data = [
        [micro_batch(10 * step + number, size=size) for number, size in enumerate(each)]
        for step, each in enumerate(sizes)
    ]
    expected = train_alone(specs, data, adam)
    for devices, cuts in (((0, 1), [0, 2, 8]), ((0, 1, 0, 1), [0, 2, 4, 6, 8]), ((1, 0, 1), [0, 2, 5, 8])):
        engine, _, _ = start(specs, None, num_stages=2, plan=plan_for(devices, cuts))
        losses, headers, aside = [], [], []
        for step, batch in enumerate(data):
            if step in (2, 5):  # whose shapes are kept apart
                evaluated = [micro_batch(900 + number, size=2) for number in range(NUM_MICRO_BATCHES)]
                engine.eval_batch(iter(evaluated))
            found = engine._transfers
            with (
                patch.object(found, "_send_header", Mock(side_effect=found._send_header)) as header,
                patch.object(found, "_send_aside", Mock(side_effect=found._send_aside)) as beside,
            ):
                losses.append(float(engine.train_batch(iter(batch))))
            headers.append(sum(gather_objects(header.call_count)))
            aside.append(sum(gather_objects(beside.call_count)))
        same(losses, expected)
        crossing = (len(devices) - 1) * NUM_MICRO_BATCHES
        assert headers[:5] == [crossing, 0, 0, 0, crossing], headers
        assert headers[7] == headers[8] == 0, headers
        assert [count > 0 for count in aside] == [step in (3, 8) for step in range(len(data))], aside


def data_that_ends_between_two_steps(_: Path) -> None:
    data = batches(3)
    devices, cuts = maps()[-1]
    engine, _, _ = begin(mlp(), plan_for(devices, cuts))
    losses = train(engine, data[:2])
    for _ in range(2):
        with raised(StopIteration, "after 0 micro-batches", "RepeatingLoader"):
            engine.train_batch(iter([]))
        with raised(StopIteration, "after 0 micro-batches"):
            engine.eval_batch(iter([]))
    same([*losses, *train(engine, data[2:])], train_alone(mlp(), data, adam))


def checkpoints_are_saved_and_loaded(folder: Path) -> None:
    """With DeepSpeed's names for the files of layers, which do not depend on the map."""
    data = batches(4, tokens=True)
    expected = train_alone(tied(), data, adam)
    turned, last = maps()[1 if two() else 2], maps()[-1 if two() else 0]
    for zero, (devices, cuts), (others, other_cuts) in ((0, turned, last), (1, last, turned)):
        config = {"zero_optimization": {"stage": zero}}
        engine, _, _ = begin(tied(), plan_for(devices, cuts), config)
        losses = train(engine, data[:2])
        where = str(folder / f"zero{zero}")
        engine.save_checkpoint(where)
        dist.barrier()
        layers = [name for name in os.listdir(f"{where}/global_step2") if name.startswith("layer_")]
        # A tied layer that a function runs has no state of its own: DeepSpeed saves that of the first one.
        assert sorted(layers) == [f"layer_{index:02d}-model_states.pt" for index in range(7)], layers
        again, _, _ = begin(tied(), plan_for(devices, cuts), config)
        again.load_checkpoint(where)
        same([*losses, *train(again, data[2:])], expected)
        other, _, _ = begin(tied(), plan_for(others, other_cuts), config)
        other.load_checkpoint(where)
        assert other.plan != engine.plan and other.module.device_of_stage == list(others)
        same([*losses, *train(other, data[2:])], expected)


def recomputed_layers(_: Path) -> None:
    """Whole stages and some of their layers, tied ones too, where the first input has no gradient."""
    if not recomputes_on_a_cpu():
        return
    for specs, tokens, config in (
        (mlp, False, {}), (tied, True, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.05}),
    ):  # fmt: skip
        data = batches(tokens=tokens)
        expected = train_alone(specs(), data, adam, clip=config.get("gradient_clipping", 1.0))
        for devices, cuts in maps()[2:4] if two() else maps()[:1]:
            first, last = cuts[-3:-1]
            partly = {0: True, len(devices) - 2: [(first, first + 1)], len(devices) - 1: [(last, last + 1)]}
            for recomputed in (partly, dict.fromkeys(range(len(devices)), True)):
                engine, _, _ = begin(specs(), plan_for(devices, cuts, recomputed=recomputed), config)
                same(train(engine, data), expected)
                assert engine.runs_lists and all(
                    engine.module._num_forwards[stage] == 16 for stage in engine.module.own_stages
                )
                counts = [value for name, value in engine.module.named_buffers() if name.endswith("seen")]
                assert all(count == 16 for count in counts), "as often as without recomputation"


class Tools:
    """An object of the program."""

    def __init__(self) -> None:
        self.pick = random.Random(4)


def recomputed_micro_batch_by_micro_batch(_: Path) -> None:
    """Some forwards keep nothing: they run again at an instruction of their own, or in their backward."""
    if not recomputes_on_a_cpu():
        return
    for specs, tokens, config in (
        (mlp, False, {}), (mlp, False, {"wall_clock_breakdown": True}),
        (tied, True, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.05}),
    ):  # fmt: skip
        data = batches(tokens=tokens)
        expected = train_alone(specs(), data, adam, clip=config.get("gradient_clipping", 1.0))
        for seed, (devices, cuts) in enumerate(maps()[1:4] if two() else maps()[:1]):
            plan = plan_for(devices, cuts, depth=4 if seed else None, some_recomputed=seed)
            engine, _, _ = begin(specs(), plan, config)
            same(train(engine, data), expected)
            lists = engine.program(NUM_MICRO_BATCHES, trains=True).lists
            kinds = [str(each)[0] for each in itertools.chain(*lists) if isinstance(each, Compute)]
            assert kinds.count("f") > kinds.count("R") > 0
            counts = [value for name, value in engine.module.named_buffers() if name.endswith("seen")]
            assert all(count == 16 for count in counts), "as often as without recomputation"
            assert not engine.batch_state.second_forwards
            evaluated = [float(engine.eval_batch(Counted(list(data[0]))))]
            engine.recut(plan_for(devices, cuts))
            same([float(engine.eval_batch(Counted(list(data[0]))))], evaluated, digits=1e-7)


class Scaled(torch.autograd.Function):
    """A function in Python, whose backward reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient * ctx.saved_tensors[1], (gradient * ctx.saved_tensors[0]).sum(0)


class Various(nn.Module):
    """Uses weights twice, a frozen one, batch statistics, dropout, and a function in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.twice(torch.tanh(self.twice(x)) * self.frozen) * self.scale).relu_()
        return self.drop(self.norm(Scaled.apply(x, self.scale))) + x


class Recomputing(nn.Module):
    """Recomputes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


def backwards_in_halves(_: Path) -> None:
    """The gradient of the input first, those of the weights any time later; also of what is recomputed."""
    for specs, tokens, config in (
        (mlp, False, {}), (mlp, False, {"wall_clock_breakdown": True}),
        (tied, True, {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.05}),
    ):  # fmt: skip
        data = batches(tokens=tokens)
        wanted: dict[str, torch.Tensor] = {}
        expected = train_alone(
            specs(), data, adam, clip=config.get("gradient_clipping", 1.0),
            before_step=lambda model: first_gradients(wanted, model),  # noqa: B023
        )  # fmt: skip
        for seed, (devices, cuts) in enumerate(maps()[1:4] if two() else maps()[:1]):
            recomputed = seed if recomputes_on_a_cpu() and seed != 1 else None
            plan = plan_for(devices, cuts, 4 if seed else None, some_recomputed=recomputed, in_halves=seed)
            engine, _, _ = begin(specs(), plan, config)
            found: dict[str, torch.Tensor] = {}
            if not config.get("zero_optimization"):
                engine.before_optimizer_step = functools.partial(first_gradients, found, engine.module)
            lists = engine.program(NUM_MICRO_BATCHES, trains=True).lists
            kinds = [str(each)[0] for each in itertools.chain(*lists) if isinstance(each, Compute)]
            assert kinds.count("I") == kinds.count("W") > 1
            undivided = Mock(side_effect=AssertionError("not divided")) if divides_backwards() else Halves.whole
            with patch.object(Halves, "whole", undivided):
                same(train(engine, data), expected)
            for name, gradient in found.items():
                assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-7), name
            assert found or config.get("zero_optimization")
            counts = [value for name, value in engine.module.named_buffers() if name.endswith("seen")]
            assert all(count == 16 for count in counts), "as often as in one process"
            assert not engine.batch_state.halves and not engine.batch_state.second_forwards


def halves_of_various_layers(_: Path) -> None:
    """As undivided backwards: fp32, bf16 and seeded layers; micro-batches add up in another order."""
    specs = [*mlp()[:3], LayerSpec(Various), LayerSpec(Various), *mlp()[5:7], LayerSpec(nn.Linear, WIDTH, 4)]
    cuts, devices = [0, 3, 5, 8], (0, 1, 0)
    for config, dtype, more in (
        ({}, torch.float32, {}), ({}, torch.float32, {"seed_layers": True}),
        ({"bf16": {"enabled": True}}, torch.bfloat16, {}),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, torch.bfloat16, {}),
    ):  # fmt: skip
        data = batches(1, dtype=dtype)
        found: list[Any] = []
        for in_halves in (None, 3):
            torch.manual_seed(3)
            engine, _, _ = begin(specs, plan_for(devices, cuts, 3, in_halves=in_halves), config, **more)
            gradients: dict[str, torch.Tensor] = {}
            if not config:
                engine.before_optimizer_step = functools.partial(first_gradients, gradients, engine.module)
            torch.manual_seed(7)
            losses = train(engine, data)
            parts = gather_objects(gradients, engine.grid.get_pipe_parallel_group())
            together = {name: each for part in parts for name, each in part.items()}
            found.append((losses, together, float(engine.get_global_grad_norm())))
        (losses, wanted, norm), (others, gradients, other_norm) = found
        same(others, losses)
        assert abs(other_norm - norm) < (1e-2 if config else 1e-5) * norm, (config, other_norm, norm)
        assert gradients.keys() == wanted.keys() and (len(wanted) > 10 or config)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, wanted[name], rtol=1e-5, atol=1e-7), name


def halves_that_cannot_be_divided(_: Path) -> None:
    """Layers that recompute themselves, and DeepSpeed's activation checkpoints: undivided, and said once."""
    specs = [*mlp()[:3], LayerSpec(Recomputing), *mlp()[4:]]
    if not divides_backwards():
        return
    data = batches(2)
    expected = train_alone(specs, data, adam)
    engine, _, _ = begin(specs, plan_for((0, 1, 0), [0, 3, 6, 8], in_halves=2))
    with patch.object(environment, "logger") as logger:
        same(train(engine, data), expected)
    lines = [str(call.args[1]) for call in logger.log.call_args_list]
    told = [line for line in lines if "runs its backwards undivided" in line]
    assert len(told) == (1 in engine.module.own_stages), lines
    assert all("stage 1 " in line and "a layer recomputes itself" in line for line in told)


class OwnNoise(nn.Module):
    """Draws from generators that it holds, and from those of Python and NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_python = random.Random(2)
        self.of_numpy, self.old_of_numpy = np.random.default_rng(3), np.random.RandomState(4)
        self.held, self.tools = {"first": [np.random.default_rng(5)]}, Tools()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draws = (
            self.of_python.random(), self.of_numpy.random(), self.old_of_numpy.rand(), random.random(),
            np.random.rand(), self.held["first"][0].random(), self.tools.pick.random(),
        )  # fmt: skip
        return x * torch.rand(x.shape, generator=self.of_torch) * (1 + sum(draws))


def recomputed_dropout(_: Path) -> None:
    """The same masks in the forward and when it is run again, whether layers are seeded or not."""
    if not recomputes_on_a_cpu():
        return
    specs = [*mlp()[:3], LayerSpec(nn.Dropout, 0.5), LayerSpec(OwnNoise), *mlp()[4:5], LayerSpec(nn.Dropout, 0.5)]
    specs += mlp()[5:]
    data = batches(3)
    devices, cuts = (0, 1, 1, 0), [0, 3, 5, 8, 10]
    for seed_layers in (True, False):
        losses = []
        for recomputed in ({}, dict.fromkeys(range(4), True), {1: [(3, 5)], 2: [(6, 8)]}):
            seed = 1 if recomputed else None
            plan = plan_for(devices, cuts, recomputed=recomputed, some_recomputed=seed)
            engine, _, _ = begin(specs, plan, seed_layers=seed_layers)
            for number, weight in sorted(engine.module.named_parameters()):
                torch.manual_seed(len(number))
                weight.data.normal_(0.0, 0.3)
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
            losses.append(train(engine, data))
        same(losses[1], losses[0], digits=1e-6)
        same(losses[2], losses[0], digits=1e-6)


NUM_RUNS = 0


class Tallying(Block):
    """Keeps in Python what it has seen, and what its last run was."""

    runs: ClassVar[list[int]] = []

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.calls, self.sums, self.kinds, self.meter = 0, [], {"runs": 0}, Meter()
        self.last, self.last_map = 0.0, torch.zeros(())
        self.drawn, self.history, self.size = random.Random(0), torch.zeros(5000), 0
        self.largest = torch.zeros(5000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global NUM_RUNS
        NUM_RUNS += 1
        Tallying.runs.append(len(x))
        self.history[self.size] = 1.0
        self.size += 1
        self.largest[:WIDTH] = x.detach().amax(0)
        with open(os.devnull, "a") as log:
            log.write("run")
        self.calls += 1
        self.sums.append(float(x.detach().sum()))
        self.kinds["runs"] += 1
        self.meter.total += 1
        self.last, self.last_map = float(x.detach().mean()), x.detach()[0]
        return super().forward(x) * (1 + 0 * self.drawn.random())


class Meter:
    """An object of the program."""

    total = 0


class OnceTallying(Tallying):
    """The same with a class of its own, which the job has said nothing of."""


def recomputed_layers_that_count(_: Path) -> None:
    """A counter in Python counted each micro-batch twice, and nothing was said."""
    if not recomputes_on_a_cpu():
        return
    for kind, recomputed in ((OnceTallying, {}), (Tallying, {1: [(4, 6)]})):
        specs = [*mlp()[:4], LayerSpec(kind, WIDTH), *mlp()[4:]]
        engine, _, _ = begin(specs, plan_for((0, 1), [0, 3, 9], recomputed=recomputed))
        lines: list[str] = []
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            train(engine, batches(2))
        [layer] = [each for each in engine.module.modules() if type(each) is kind] or [None]
        told = [line for line in lines if "for each micro-batch, to recompute" in line]
        assert engine.module._has_told == bool(recomputed and layer is not None), "that layers run again"
        if not recomputed or layer is None:
            assert not told, told
            continue
        assert layer.calls == layer.kinds["runs"] == 2 * 2 * NUM_MICRO_BATCHES, "each twice"
        [line] = told
        assert line.startswith("a run changes calls of layer 4 (Tallying), history of layer 4 (Tallying)"), line
        assert "sums of layer 4" in line and "last" not in line and "drawn" not in line
        assert "history of layer 4" in line and "largest" not in line
        assert "NUM_RUNS beside layer 4 (Tallying), Tallying.runs beside layer 4 (Tallying)" in line, line
        [line] = [line for line in lines if " for writing in both runs" in line]
        assert line.startswith("layers 4 to 5 opened '/dev/null' for writing"), line
        assert "recompute='never'" in line


def recomputed_layers_that_work_in_place(_: Path) -> None:
    """Their input is gone when they are run again."""
    if not recomputes_on_a_cpu():
        return
    specs = [*mlp()[:3], LayerSpec(nn.ReLU, inplace=True), *mlp()[3:]]
    engine, _, _ = begin(specs, plan_for((0, 1), [0, 3, 9], recomputed={1: [(3, 5)]}))
    if engine.stage_id == 1:
        with raised(RuntimeError, "layers 3 to 5 change their input in place"), engine.module.active(1):
            engine.module(torch.randn(4, pipelines.WIDTH))


class WithAnotherLoss(PipelineModule):
    def get_additional_losses(self) -> dict[str, torch.Tensor]:
        return {"another": torch.tensor(float(self.is_asked_where_the_loss_is()))}

    def is_asked_where_the_loss_is(self) -> bool:
        return self.parts[-1] == self._local_stop


def dropout(_: Path) -> None:
    """Seeded per layer and micro-batch, so that it does not depend on the map."""
    specs = mlp()
    specs[3:3] = [LayerSpec(nn.Dropout, 0.5)]
    specs[6:6] = [LayerSpec(nn.Dropout, 0.5)]
    data = batches(3)
    config = {"gradient_clipping": 0.0}
    deepspeeds, _, _ = start(specs, "uniform", config)
    assert not deepspeeds.runs_lists
    if not divides_gradients_once():
        return
    expected = train(deepspeeds, data)
    for devices, cuts in (((0, 1), [0, 5, 10]), ((0, 1, 1, 0), [0, 3, 5, 8, 10]), ((1, 0, 1), [0, 3, 7, 10])):
        engine, _, _ = begin(specs, plan_for(devices, cuts), config)
        same(train(engine, data), expected, digits=1e-6)


def what_else_deepspeeds_engine_does(_: Path) -> None:
    """Compiled layers, frozen layers, additional losses, a data set of its own, a scheduler."""
    devices, cuts = maps()[-1]
    plan, data = plan_for(devices, cuts), batches()
    expected = train_alone(mlp(), data, adam)

    more, _, _ = begin(mlp(), plan, module_class=WithAnotherLoss)
    same(train(more, data), expected)
    assert float(more.get_additional_losses()["another"]) == 1.0

    compiled, _, _ = begin(mlp(), plan)
    compiled.compile(backend="eager")
    same(train(compiled, data), expected)

    def frozen() -> list[Any]:
        return [*mlp()[:3], LayerSpec(Frozen, pipelines.WIDTH), *mlp()[3:]]

    kept, _, _ = begin(frozen(), plan_for((0, 1, 1, 0), [0, 3, 4, 5, 9]))
    same(train(kept, data), train_alone(frozen(), data, adam))

    samples = [(x[row], y[row]) for x, y in (micro_batch(number) for number in range(16)) for row in range(4)]
    fed, _, _ = begin(mlp(), plan, training_data=samples)
    same([float(fed.train_batch()) for _ in data], expected)

    scheduled, _, _ = begin(mlp(), plan, optimizer=adam, lr_scheduler=halving)
    same(train(scheduled, data), train_alone(mlp(), data, adam, make_scheduler=halving))


class Frozen(pipelines.Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)


class _Counter(torch.autograd.Function):
    """Lives as long as the graph of one micro-batch in one stage."""

    alive: ClassVar[dict[int, int]] = {}
    most: ClassVar[dict[int, int]] = {}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: int) -> torch.Tensor:
        _Counter.alive[index] = _Counter.alive.get(index, 0) + 1
        _Counter.most[index] = max(_Counter.most.get(index, 0), _Counter.alive[index])
        kept = torch.ones(4)
        ctx.save_for_backward(x, kept)
        ctx.index = index
        weakref.finalize(ctx, _Counter.gone, index)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None

    @staticmethod
    def gone(index: int) -> None:
        _Counter.alive[index] -= 1


class Watched(pipelines.Block):
    def __init__(self, width: int, index: int) -> None:
        super().__init__(width)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Counter.apply(x, self.index) if torch.is_grad_enabled() else x)


def no_more_in_flight_than_planned(_: Path) -> None:
    """Counted by the graphs that are alive; nothing is left after a step, of activations and labels neither."""
    specs = mlp()
    specs[2:7] = [LayerSpec(Watched, pipelines.WIDTH, index) for index in range(2, 7)]
    data = batches(2)
    for devices, cuts in maps():
        for depth in (2, 3) if devices == maps()[0][0] else (2,):
            plan = plan_for(devices, cuts, depth)
            engine, _, _ = begin(specs, plan)
            _Counter.alive.clear()
            _Counter.most.clear()
            train(engine, data)
            for stage in plan.stages:
                for layer in range(max(2, stage.layers[0]), min(7, stage.layers[1])):
                    most = _Counter.most.get(layer)
                    assert most == (stage.in_flight if stage.device == engine.stage_id else None), (
                        devices,
                        layer,
                        most,
                    )
            assert not any(_Counter.alive.values()), _Counter.alive
            held = [value for values in engine.pipe_buffers.values() for value in values if value is not None]
            assert not held and not engine.batch_data.kept
            assert not any(vars(engine.batch_state).values()), vars(engine.batch_state)


def what_is_refused(_: Path) -> None:
    world = dist.get_world_size()
    devices, cuts = maps()[0]
    with raised(PlanMismatchError, "cuts 8 layers and this model has 9"):
        begin([*mlp(), pipelines.doubled], plan_for(devices, cuts))
    too_many = plans.plan_of(plans.chain_of(8), plans.platform_of(world + 1), cuts, devices)
    with raised(PlanMismatchError, f"for {world + 1} devices and this pipeline has {world} ranks"):
        PipelineModule(mlp(), plan=too_many, num_stages=world, loss_fn=loss_fn)
    with raised(PlanMismatchError, f"for {world + 1} devices and this pipeline has {world} ranks"):
        PipelineModule(mlp(), plan=too_many, loss_fn=loss_fn)
    idle = plans.plan_of(plans.chain_of(8), plans.platform_of(world), [0, 8], [0])
    with raised(PlanMismatchError, f"uses 1 of its {world} devices"):
        begin(mlp(), idle)
    untrained = {2: ((0, 1, 0), [0, 1, 2, 8]), 3: ((0, 1, 0, 2), [0, 1, 2, 5, 8])}[world]
    with raised(ValueError, "leaves rank 1, layers 1 to 2, without trainable parameters"):
        begin(mlp(), plan_for(*untrained))


def two_pipelines(_: Path) -> None:
    """Data parallel: gradients are reduced once, at the end; tied weights within each pipeline and among both."""
    config_of = {0: {}, 1: {"zero_optimization": {"stage": 1}}}
    for tokens, specs in ((False, mlp), (True, tied)):
        data = batches(tokens=tokens)
        expected = train_alone(specs(), data, adam)
        for stage in (0, 1):
            for devices, cuts in list(MAPS[2].items())[-2:]:
                for in_halves in (None, stage):
                    plan = plan_for(devices, cuts, 2, NUM_MICRO_BATCHES // 2, in_halves=in_halves)
                    engine, _, _ = begin(specs(), plan, config_of[stage])
                    same(train(engine, data), expected)


def additional_losses_of_a_module_object(_: Path) -> None:
    """A function that a script sets on the module was asked in half precision alone."""
    devices, cuts = maps()[0]
    engine, _, _ = begin(mlp(), plan_for(devices, cuts))
    engine.module.get_additional_losses = lambda: {"another": torch.tensor(1.0)}
    train(engine, batches(1))
    assert float(engine.get_additional_losses()["another"]) == 1.0


def data_without_labels_where_no_loss_is(_: Path) -> None:
    """The first stage read labels that its rank has no need of, in fp32 alone."""
    data = batches(2)
    engine, _, _ = begin(mlp(), plan_for((0, 1), [0, 3, 8]))
    items = Counted([(x,) if engine.is_first_stage() else (x, y) for batch in data for x, y in batch])
    same([float(engine.train_batch(items)) for _ in data], train_alone(mlp(), data, adam))


CASES_OF_ANY = [
    every_map_equals_one_process,
    random_maps_equal_one_process,
    passes_with_and_without_deepspeeds_wrapping,
    a_pattern_with_fill_and_drain,
    tied_layers,
    zero_1_clipping_and_bf16,
    boundaries_of_all_kinds,
    a_boundary_without_any_gradient,
    messages_through_the_host,
    layers_that_work_in_place,
    training_and_evaluation_in_turns,
    micro_batches_of_different_shapes,
    shapes_that_change,
    data_that_ends_between_two_steps,
    checkpoints_are_saved_and_loaded,
    dropout,
    recomputed_layers,
    recomputed_micro_batch_by_micro_batch,
    backwards_in_halves,
    halves_of_various_layers,
    halves_that_cannot_be_divided,
    recomputed_dropout,
    recomputed_layers_that_count,
    recomputed_layers_that_work_in_place,
    no_more_in_flight_than_planned,
    what_is_refused,
    what_else_deepspeeds_engine_does,
    additional_losses_of_a_module_object,
    data_without_labels_where_no_loss_is,
]
OF_MAPS = [
    every_map_equals_one_process,
    random_maps_equal_one_process,
    tied_layers,
    recomputed_layers,
    backwards_in_halves,
    no_more_in_flight_than_planned,
]
CASES = {
    2: [*CASES_OF_ANY, *device_cases.CASES, *real_layers_cases.CASES, *outputs_cases.CASES],
    3: OF_MAPS,
    4: [two_pipelines, *sharded_cases.CASES, *expert_cases.CASES],
}
CASES = {
    num_processes: {case.__name__: case for case in [*cases, *others]}
    for num_processes, cases in CASES.items()
    for others in [
        [
            *host_cases.CASES[num_processes],
            *caught_cases.CASES[num_processes],
            *asynchronous_cases.CASES[num_processes],
        ]
    ]
}

if __name__ == "__main__":
    run_cases(CASES[int(os.environ["WORLD_SIZE"])])
