"""Cases: plans with any map through the doors of the host, and moves from any map to any other."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

import deepspeed_partition
from deepspeed_partition import Plan
from deepspeed_partition.engine import MadPipeEngine, PipelineModule, initialize
from deepspeed_partition.engine.warmup import run_plan
from deepspeed_partition.planner.errors import PlanMismatchError
from tests.engine import pipelines, plans
from tests.engine.pipelines import (
    Counted,
    Whole,
    halving,
    loss_fn,
    micro_batch,
    mlp,
    tied,
    train_alone,
    two_groups,
)
from tests.engine.running import (
    ADAM,
    NUM_MICRO_BATCHES,
    adam,
    all_tensors,
    batches,
    configuration,
    planned,
    raised,
    same,
    start,
    train,
)
from tests.engine.warm_up_cases import heard

CONTIGUOUS = {2: [0, 2, 8], 3: [0, 2, 5, 8]}
MAPS = {
    2: [((0, 1, 0, 1), [0, 1, 4, 6, 8]), ((0, 1, 1, 0), [0, 3, 4, 5, 8]), ((1, 0), [0, 3, 8])],
    3: [((1, 0, 1, 2, 1), [0, 1, 3, 5, 6, 8]), ((0, 1, 2, 0), [0, 1, 3, 6, 8]), ((2, 0, 1), [0, 3, 5, 8])],
}
"""With pipelines of so many ranks."""


def looped(devices: Any, cuts: Any, num_micro_batches: int = NUM_MICRO_BATCHES) -> Plan:
    orders = plans.depth_first(devices, num_micro_batches, 3)
    return plans.plan_of(
        plans.chain_of(cuts[-1]), plans.platform_of(max(devices) + 1), cuts, devices, orders=orders
    )  # fmt: skip


def all_maps(num_ranks: int | None = None) -> list[Plan]:
    return [looped(*each) for each in MAPS[num_ranks or dist.get_world_size()]]


def contiguous() -> list[int]:
    return CONTIGUOUS[dist.get_world_size()]


def is_at(engine: Any, plan: Plan) -> bool:
    devices = [stage.device for stage in plan.stages]
    own = [layer for layer in range(8) if engine.module.stage_owner(layer) == engine.stage_id]
    held = [int(name) for name, _ in engine.module.named_children() if name.isdigit()]
    functions = [1]  # of ``mlp``
    return (
        engine.plan is plan
        and engine.module.device_of_stage == devices
        and sorted(held) == [layer for layer in own if layer not in functions]
    )


def moves_between_any_maps(_: Path) -> None:
    """To each map, to the next one, and back: the same values and the same objects."""
    for config in ({}, {"bf16": {"enabled": True}}, {"zero_optimization": {"stage": 1}}):
        engine, optimizer, _ = start(mlp(), contiguous(), config)
        for buffer in engine.module.buffers():
            buffer += 3.0
        for name, parameter in engine.module.named_parameters():
            parameter.requires_grad_(name != "4.linear.bias")
        module, before, state = engine.module, all_tensors(engine), torch.get_rng_state()
        for plan in all_maps():
            held = dict(engine.module.named_parameters())
            engine.recut(plan)
            assert is_at(engine, plan) and engine.module is module and engine.optimizer is optimizer
            after = all_tensors(engine)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in after)
            for name, parameter in engine.module.named_parameters():
                assert held.get(name, parameter) is parameter, "layers that stay keep their parameters"
                assert parameter.requires_grad == (name != "4.linear.bias")
        engine.recut(contiguous())
        assert engine.plan is None and engine.module.parts == contiguous()
        assert torch.equal(state, torch.get_rng_state()), "building layers drew random numbers"


def training_after_moves_equals_one_process(_: Path) -> None:
    """With the user's optimizer of two groups and scheduler, evaluation before and between, ZeRO-1, and ties."""
    data = batches()
    expected = train_alone(mlp(), data, two_groups, make_scheduler=halving, clip=0.05)
    shown = [micro_batch(90 + number, size=2) for number in range(3)]
    for plan, zero in zip(all_maps(), itertools.cycle((0, 1)), strict=False):
        config = {"zero_optimization": {"stage": zero}, "gradient_clipping": 0.05}
        engine, optimizer, scheduler = start(
            mlp(), contiguous(), config, optimizer=two_groups, lr_scheduler=halving
        )
        evaluated = []
        for cut in (contiguous(), plan):
            engine.recut(cut)
            evaluated.append(float(engine.eval_batch(Counted(list(shown)), num_micro_batches=3)))
        with torch.no_grad():
            alone = Whole(mlp())
            wanted = sum(float(loss_fn(alone(x), y)) for x, y in shown) / 3
        same(evaluated, [wanted] * 2)
        same(train(engine, data), expected)
        assert engine.optimizer is optimizer and engine.lr_scheduler is scheduler and is_at(engine, plan)
    data = batches(tokens=True)
    expected = train_alone(tied(), data, adam)
    for before, after in itertools.pairwise((*all_maps(), all_maps()[0])):
        engine, _, _ = start(tied(), contiguous())
        engine.recut(before)
        engine.recut(after)
        same(train(engine, data), expected)


def one_iterator_for_a_run_whose_ends_move(_: Path) -> None:
    """Each rank has an iterator of its own; one that comes to read takes no micro-batch that others have had."""
    data = batches(6)
    expected = train_alone(mlp(), data, adam)
    for plan in all_maps():
        engine, _, _ = start(mlp(), contiguous())
        given = Counted([item for batch in data for item in batch])
        losses = []
        for cut in (plan, contiguous(), plan):
            engine.recut(cut)
            losses += [float(engine.train_batch(given)) for _ in range(2)]
            engine.eval_batch(Counted(list(data[0])))
        same(losses, expected)


def one_iterator_for_a_run_that_is_measured(_: Path) -> None:
    """A rank that gives its last stage away has peeked at a micro-batch, and reads again later.

    Between that, all ranks train on another iterator.
    """
    data = batches(8)
    expected = train_alone(mlp(), data, adam)
    for plan in all_maps():
        engine, _, _ = start(mlp(), "madpipe", planned("contiguous"))
        given, other = (Counted([item for batch in part for item in batch]) for part in (data[:5], data[5:]))
        answer = (plan, plans.chain_of(8))
        with patch.object(run_plan, "_plan", lambda *_, answer=answer: answer):
            losses = [float(engine.train_batch(given)) for _ in range(2)]
        assert engine.module.device_of_stage == [stage.device for stage in plan.stages]
        engine.recut(contiguous())
        losses += [float(engine.train_batch(given)) for _ in range(2)]
        engine.recut(plan)
        losses.append(float(engine.train_batch(given)))
        losses += [float(engine.train_batch(other)) for _ in range(3)]
        same(losses, expected)


def two_iterators_in_turn(_: Path) -> None:
    """A rank that comes to read them takes up both where the others are, also where one was evaluated on."""
    data = batches(6)
    shown = batches(7)[6]
    expected = train_alone(mlp(), data, adam)
    for plan in all_maps():
        engine, _, _ = start(mlp(), plan)
        parts = [shown, *data[::2]], data[1::2]
        both = [Counted([item for batch in part for item in batch]) for part in parts]
        engine.eval_batch(both[0])
        losses = []
        for step in range(6):
            if step == 3:
                engine.recut(contiguous())
            losses.append(float(engine.train_batch(both[step % 2])))
        same(losses, expected)


class Scaled(nn.Linear):
    """Has a buffer that other layers have, too."""

    def __init__(self, width: int, shared: nn.Module) -> None:
        super().__init__(width, width)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.shared.scale.mean()


def layers_that_share_a_buffer(_: Path) -> None:
    shared = nn.Module()
    shared.register_buffer("scale", torch.full((16,), 2.0))
    specs = [LayerSpec(nn.Linear, 8, 16), *[LayerSpec(Scaled, 16, shared) for _ in range(6)]]
    specs.append(LayerSpec(nn.Linear, 16, 4))
    data = batches(2)
    engine, _, _ = start(specs, [0, 5, 8])
    expected = train(engine, data)
    engine, _, _ = start(specs, [0, 5, 8])
    for cut in ([0, 2, 8], looped(*MAPS[2][0]), [0, 5, 8]):
        engine.recut(cut)
    same(train(engine, data), expected)


def a_refused_cut_changes_nothing(_: Path) -> None:
    data = batches(2)
    expected = train_alone(mlp(), data, adam)
    engine, _, _ = start(mlp(), "uniform", {"gradient_clipping": 0.0})
    losses = train(engine, data[:1])
    with raised(ValueError, "without trainable parameters"):
        engine.recut(looped((0, 1, 0), [0, 1, 2, 8]))
    same([*losses, *train(engine, data[1:])], expected)


def an_optimizer_without_parameters_of_a_rank(_: Path) -> None:
    """Rank 0 alone raised torch's words, and the other one waited."""
    module = PipelineModule(layers=mlp(), num_stages=2, loss_fn=loss_fn, partition_method=[0, 1, 8])
    given = (each for name, each in module.named_parameters() if not name.startswith("0."))
    config = configuration(optimizer=copy.deepcopy(ADAM))
    with raised(ValueError, "none of the parameters of stage 0, layers 0 to 1", "'lr': 0.0"):
        initialize(model=module, config=config, model_parameters=given)


def a_layer_that_was_changed_after_it_was_built(_: Path) -> None:
    """Its receiver cannot build it; every rank hears of it before anything has changed, and training goes on."""
    data = batches(2)
    for zero in (0, 1):
        engine, _, _ = start(mlp(), [0, 3, 8], {"zero_optimization": {"stage": zero}})
        losses = train(engine, data[:1])
        if engine.stage_id == 0:
            engine.module._modules["2"].register_parameter("more", torch.nn.Parameter(torch.zeros(1)))
        with raised(RuntimeError, "layer '2' cannot be moved", "builds ['linear.bias', 'linear.weight'] and"):
            engine.recut([0, 2, 8])
        same([*losses, *train(engine, data[1:])], train_alone(mlp(), data, adam))


def the_groups_of_an_old_map_are_ended(_: Path) -> None:
    """Process groups for the transfers of one map at a time, and none for both ways between two ranks.

    gloo's thread spins on a connection over which another thread begins to send.
    """
    data = batches(1)
    engine, _, _ = start(mlp(), contiguous())
    counts = []
    for plan in (*all_maps(), *all_maps()):
        engine.recut(plan)
        known = set(dist.distributed_c10d._world.pg_map)
        engine.eval_batch(Counted(list(data[0])))
        made = set(dist.distributed_c10d._world.pg_map) - known
        to, back = engine._transfers._sent_to, engine._transfers._received_from
        assert to and all(to[peer] is not back[peer] for peer in to)
        engine.recut(contiguous())
        counts.append(len(made & set(dist.distributed_c10d._world.pg_map)))
        assert made
    assert counts == [0] * len(counts)


def plans_from_everywhere(folder: Path) -> None:
    """An argument, a file, the configuration, over DeepSpeed's own cut; and in two jobs one after the other."""
    data = batches()
    expected = train_alone(mlp(), data, adam)
    for number, plan in enumerate(all_maps()):
        path = str(folder / f"plan{number}.json")
        if dist.get_rank() == 0:
            plan.save(path)
        dist.barrier()
        by_option = planned("madpipe", plan=path)
        over = {"pipeline": {**by_option["pipeline"], "partition_method": "madpipe"}}
        for method, config, given in (
            (plan, {}, None), ("madpipe", {}, path), ("madpipe", by_option, None), ("uniform", over, None),
        ):  # fmt: skip
            engine, _, _ = start(mlp(), method, config, plan=given)
            same(train(engine, data), expected)
            assert engine.plan == plan and engine.chain is None
        where = str(folder / f"saved{number}")
        engine.save_checkpoint(where)
        further = train(engine, data)
        resumed, _, _ = start(mlp(), "madpipe")
        resumed.load_checkpoint(where)
        assert resumed.plan == plan and train(resumed, data) == further
        other, _, _ = start(mlp(), contiguous())
        train(other, data[:1])
        other.load_checkpoint(where)
        assert other.plan is None and other.module.parts == contiguous()
        same(train(other, data), further)
        weights_only, _, _ = start(mlp(), contiguous())
        weights_only.load_checkpoint(where, load_module_only=True)
        assert weights_only.module.parts == contiguous()


def initialized_again(_: Path) -> None:
    """A module that an engine has planned, under later engines: their options count; the first cut was kept."""
    there = contiguous()
    elsewhere = [there[0], *(each + 1 for each in there[1:-1]), there[-1]]
    engine, _, _ = start(mlp(), "madpipe", planned(there))
    train(engine, batches(1))
    module = engine.module
    for options, is_kept in ((planned(elsewhere), False), (planned(elsewhere), True), (planned(there), False)):
        engine.destroy()
        engine, _, _ = start(mlp(), "madpipe", options, module_class=lambda **_: module)
        assert (engine.plan is not None) == is_kept
        train(engine, batches(1))
        assert tuple(engine.module.parts) == engine.options.algorithm
    # The plan's memory is that of other micro-batches, and of another optimizer's states.
    for changed, words in (
        ({"train_micro_batch_size_per_gpu": 2 * pipelines.MICRO_BATCH_SIZE}, "another size of micro-batches than"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, "another optimizer than"),
    ):
        engine.destroy()
        with heard() as said:
            engine, _, _ = start(mlp(), "madpipe", {**planned(there), **changed}, module_class=lambda **_: module)
        assert engine.plan is None and any(words in line for line in said), said
        train(engine, batches(1, size=engine.train_micro_batch_size_per_gpu()))


def what_a_given_plan_stands_beside(_: Path) -> None:
    """The memory that a run says was not asked for, and options of planning were dropped without a word."""
    most = 2**20
    plan = dataclasses.replace(looped((0, 1, 0), [0, 3, 6, 8]), peak_memory_bytes=(most, most // 2))
    words = "the plan needs", "and the option memory says", "leave one of the two out"
    with raised(PlanMismatchError, *words):
        start(mlp(), None, {"pipeline": {"madpipe": {"memory": most - 1}}}, plan=plan)
    for options, is_told in (({"memory": most}, False), ({"recompute": "never", "algorithm": "madpipe"}, True)):
        with heard() as said:
            engine, _, _ = start(mlp(), None, {"pipeline": {"madpipe": options}}, plan=plan)
        lines = [line for line in said if "beside which recompute has no effect" in line]
        assert bool(lines) == is_told and engine.plan == plan, said


class Sleeping(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x + torch.tanh(self.linear(x))


def planned_onto_several_stages(_: Path) -> None:
    """Where a rank is best given both ends, the host plans so, and the losses are those of one process.

    Data is given to the first and the last rank only, as DeepSpeed wants it.
    """
    lasts = [0.04, 0.12, 0.08] if dist.get_world_size() == 2 else [0.04, 0.12, 0.12, 0.08]
    specs = [
        LayerSpec(nn.Linear, 8, pipelines.WIDTH), *(LayerSpec(Sleeping, pipelines.WIDTH, each) for each in lasts),
        LayerSpec(nn.Linear, pipelines.WIDTH, 4),
    ]  # fmt: skip
    data = batches(2)
    expected = train_alone(specs, data, adam)
    engine, _, _ = start(specs, "madpipe", planned("madpipe", bandwidth="1GB/s", latency_seconds=0.0))
    same(train(engine, data), expected)
    devices = engine.module.device_of_stage
    assert not engine.plan.is_contiguous and len(devices) > dist.get_world_size(), devices
    assert devices[0] == 0 and devices[-1] in (0, dist.get_world_size() - 1), "where the data is"


def ranks_without_data_are_told(_: Path) -> None:
    turned = looped((1, 0), [0, 3, 8])
    engine, _, _ = start(mlp(), turned)
    given = batches(1)[0] if dist.get_rank() == 0 else None
    for _ in range(2):
        with raised(ValueError, "rank 1 runs the first or the last stage", "was given no data"):
            engine.train_batch(None if given is None else iter(given))
    same(train(engine, batches()), train_alone(mlp(), batches(), adam))

    def broken(rank: int) -> Any:
        if dist.get_rank() == rank:
            raise KeyError("a file is missing")
        yield from batches(1)[0]

    for rank in range(2):
        with raised(KeyError, "a file is missing"):
            engine.train_batch(broken(rank))


def timers_and_profiler_of_deepspeed(_: Path) -> None:
    """They end every pipeline of its own with more than one stage (0.19.8)."""
    data = batches(2)
    expected = train_alone(mlp(), data, adam)
    profiled = {"flops_profiler": {"enabled": True, "profile_step": 1}}
    for config in ({"wall_clock_breakdown": True, "steps_per_print": 1}, profiled):
        engine, _, _ = start(mlp(), all_maps()[0], config)
        same(train(engine, data), expected)


def two_pipelines_of_any_map(folder: Path) -> None:
    """Moved, saved and resumed with two replicas."""
    for specs, tokens in ((mlp, False), (tied, True)):
        data = batches(tokens=tokens)
        expected = train_alone(specs(), data, adam)
        for zero, (devices, cuts) in itertools.product((0, 1), MAPS[2][:2]):
            plan = looped(devices, cuts, NUM_MICRO_BATCHES // 2)
            config = {"zero_optimization": {"stage": zero}}
            engine, _, _ = start(specs(), [0, 2, 8], config, num_stages=2)
            engine.recut(plan)
            same(train(engine, data), expected)
            where = str(folder / f"{tokens}{zero}{len(devices)}{devices[-1]}")
            engine.save_checkpoint(where)
            resumed, _, _ = start(specs(), "madpipe", config, num_stages=2)
            resumed.load_checkpoint(where)
            assert train(resumed, data) == train(engine, data)


def layers_that_are_sliced(_: Path) -> None:
    """DeepSpeed's own schedule runs there, one stage per rank."""
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=dist.get_world_size() // 2, num_dp=1)
    with raised(PlanMismatchError, "each layer is sliced over 2 ranks", "'contiguous'"):
        PipelineModule(mlp(), topology=topology, plan=looped(*MAPS[2][0]), loss_fn=loss_fn)


# install(), last


class Own(deepspeed.PipelineModule):
    """A subclass that looks at what it holds."""

    def num_layers_here(self) -> int:
        return len(self.forward_funcs)


class OwnEngine(deepspeed.PipelineEngine):
    pass


def installed_plans(_: Path) -> None:
    data = batches()
    expected = train_alone(mlp(), data, adam)
    plan = all_maps()[0]
    module = PipelineModule(mlp(), plan=plan, loss_fn=loss_fn)  # as many ranks as the plan has devices
    with raised(RuntimeError, "DeepSpeed's own engine cannot run", "install()"):
        module(torch.zeros(1, 8))
    deepspeed_partition.install()
    for module_class in (deepspeed.PipelineModule, Own):
        engine, _, _ = start(
            mlp(), plan, module_class=module_class, start_engine=deepspeed.initialize
        )  # fmt: skip
        same(train(engine, data), expected)
        assert isinstance(engine, MadPipeEngine) and isinstance(engine.module, module_class)
        assert type(engine.module).__name__ == module_class.__name__ and is_at(engine, plan)
    assert engine.module.num_layers_here() > 0
    with raised(ValueError, "OwnEngine is an engine of your own", "several stages", "MadPipeEngine"):
        OwnEngine(args=None, model=engine.module)


def groups_given_as_generators(_: Path) -> None:
    """A count of the parameters used generators up, so that nothing was trained, without a word."""
    data = batches(3)
    expected = train_alone(mlp(), data, adam)
    for given in (
        lambda module: [{"params": module.parameters()}],
        lambda module: ({"params": each} for each in [(weight for weight in module.parameters())]),
        lambda module: module.named_parameters(),
        lambda module: [{"params": weight} for weight in module.parameters()],
    ):
        module = PipelineModule(
            mlp(), num_stages=2, loss_fn=loss_fn, partition_method=[0, 3, 8], seed_layers=True,
            base_seed=pipelines.BASE_SEED,
        )  # fmt: skip
        engine, *_ = initialize(
            model=module, model_parameters=given(module), config=configuration(optimizer=copy.deepcopy(ADAM))
        )
        same(train(engine, data), expected)


def micro_batches_of_three_members(_: Path) -> None:
    """DeepSpeed reads the first two; a plan with both ends on one rank ended with "too many values to unpack"."""
    data = batches(2)
    plan = looped((0, 1, 0), [0, 3, 6, 8])
    engine, _, _ = start(mlp(), plan, optimizer=adam)
    numbered = [[(*each, torch.tensor(number)) for number, each in enumerate(batch)] for batch in data]
    same(train(engine, numbered), train_alone(mlp(), data, adam))


def loaders_of_ranks_that_read_nothing(_: Path) -> None:
    """A rank between the ends was asked for an iterator of None, and drew the seed of a loader's."""
    data = batches(1)
    for gives_all in (False, True):
        engine, _, _ = start(mlp(), contiguous(), optimizer=adam)
        loader = torch.utils.data.DataLoader(data[0], batch_size=None, shuffle=False)
        reads = engine.is_first_stage() or engine.is_last_stage()
        torch.manual_seed(3)
        before = torch.get_rng_state()
        engine.set_dataloader(loader if reads or gives_all else None)
        assert reads or torch.equal(before, torch.get_rng_state())
        same([float(engine.train_batch())], train_alone(mlp(), data, adam))
    engine.recut([0, 2, 4, 8])
    with raised(StopIteration, "the data iterator ended"):
        engine.train_batch()


def autocast_and_layers_that_run_again(_: Path) -> None:
    """A backward is outside of autocast, in which layers ran again in another type."""
    data = batches(2)
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    losses = []
    for some_recomputed in (None, 1):
        orders = plans.depth_first((0, 1), NUM_MICRO_BATCHES, 2)
        if some_recomputed:
            orders = plans.some_recomputed(orders, some_recomputed)
        for recomputed in ({}, {0: True, 1: True}) if some_recomputed is None else ({},):
            plan = plans.plan_of(
                plans.chain_of(8), plans.platform_of(2), [0, 3, 8], (0, 1), orders=orders, recomputed=recomputed
            )
            engine, _, _ = start(mlp(), plan, config, optimizer=adam)
            losses.append(train(engine, data))
    assert losses[1:] == losses[:1] * 2, losses
    same(losses[0], train_alone(mlp(), data, adam), digits=1e-1)
    assert losses[0] != train_alone(mlp(), data, adam), "nothing was computed in bfloat16"


OF_MAPS = [
    moves_between_any_maps, training_after_moves_equals_one_process, planned_onto_several_stages,
    one_iterator_for_a_run_whose_ends_move, one_iterator_for_a_run_that_is_measured, two_iterators_in_turn,
]  # fmt: skip
CASES = {
    2: [
        *OF_MAPS, the_groups_of_an_old_map_are_ended, plans_from_everywhere, ranks_without_data_are_told,
        initialized_again,
        timers_and_profiler_of_deepspeed, installed_plans, layers_that_share_a_buffer,
        a_refused_cut_changes_nothing, an_optimizer_without_parameters_of_a_rank,
        a_layer_that_was_changed_after_it_was_built,
        what_a_given_plan_stands_beside, groups_given_as_generators, micro_batches_of_three_members,
        autocast_and_layers_that_run_again,
    ],
    3: [*OF_MAPS, loaders_of_ranks_that_read_nothing],
    4: [two_pipelines_of_any_map, layers_that_are_sliced],
}  # fmt: skip
