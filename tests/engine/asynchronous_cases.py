"""What must hold of training without a drain between batches: run by any_plan_multiproc.py."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import random
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from deepspeed_partition import Plan, layers_of
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.planned_peak import PlannedPeak
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.profiling import arrivals, limit_memory
from deepspeed_partition.schedule.instructions import Compute
from tests.engine import plans
from tests.engine.pipelines import WIDTH, Assigning, Block, Whole, halving, loss_fn, mlp, tied
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    all_tensors,
    batches,
    mine,
    raised,
    same,
    start,
)  # fmt: skip
from tests.engine.warm_up_cases import heard

MODES = ("stashing", "2bw", "vertical-sync")
MAPS = {
    2: {(0, 1): [0, 3, 8], (0, 1, 0): [0, 3, 6, 8], (0, 1, 0, 1): [0, 1, 4, 6, 8]},
    4: {(0, 1, 2, 3): [0, 1, 3, 5, 8], (0, 1, 2, 3, 0, 1): [0, 1, 3, 4, 5, 6, 8]},
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}


def maps() -> list[tuple[tuple[int, ...], list[int]]]:
    return list(MAPS[dist.get_world_size()].items())


def plan_for(devices: Sequence[int], cuts: Sequence[int], mode: str, per_update: int = NUM_MICRO_BATCHES) -> Plan:
    """A pattern, of which the stages have several micro-batches in flight."""
    platform = plans.platform_of(max(devices) + 1, bandwidth=40.0, comm_buffers=4)
    plan = plans.packed(plans.chain_of(cuts[-1]), platform, cuts, devices)
    return replace(plan, weight_versions=mode, micro_batches_per_update=per_update)


def begin(plan: Plan, optimizer: Any, config: Any = None, specs: Any = None, **more: Any) -> Any:
    """An engine that does not clip; started twice as many processes, there are two pipelines."""
    config = {"gradient_clipping": 0.0, **(config or {})}
    engine, _, _ = start(
        specs or mlp(), None, config, num_stages=plan.platform.num_devices, plan=plan, optimizer=optimizer, **more
    )  # fmt: skip
    assert engine.weight_versions == plan.weight_versions
    return engine


def call(engine: Any, items: Any) -> float:
    return float(engine.train_batch(items if engine.is_first_stage() or engine.is_last_stage() else None))


class Delayed:
    """The same delayed updates in one process: a loop that keeps all old weights.

    Args:
        version: of the weights of a stage for a micro-batch, both counted from the last rest.
        plan: whose stages have the versions.
    """

    def __init__(
        self, make_optimizer: Any, version: Callable[[int, int], int], plan: Plan, specs: Any = None,
        make_scheduler: Any = None, clip: float = 0.0, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        state = torch.get_rng_state()
        self.model = Whole(specs or mlp())
        torch.set_rng_state(state)
        self.optimizer, self.version = make_optimizer(self.model), version
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.stages = [number for number, stage in enumerate(plan.stages) for _ in range(*stage.layers)]
        self.clip, self.dtype = clip, dtype
        if dtype != torch.float32:  # the weights that a pipeline begins with were of that type
            for each in self.model.parameters():
                each.data = each.data.to(dtype).float()
        self.rest()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def rest(self) -> None:
        self.history, self.number = [self.weights], 0

    def train(self, batch: Sequence[Any]) -> float:
        parameters = dict(self.model.named_parameters())
        self.optimizer.zero_grad()
        sums = {name: torch.zeros_like(each, dtype=self.dtype) for name, each in parameters.items()}
        total: Any = 0.0
        for inputs, labels in batch:
            used = {
                name: self.history[self.version(self.stages[int(name.split(".")[0])], self.number)][name].to(
                    self.dtype, copy=True
                )
                for name in parameters
            }
            for each in used.values():
                each.requires_grad_()
            loss = loss_fn(torch.func.functional_call(self.model, used, inputs), labels)
            gradients = torch.autograd.grad(loss / len(batch), list(used.values()))
            for name, each in zip(used, gradients, strict=True):
                sums[name] += each  # in bf16 where weights are, as DeepSpeed does unless grad_accum_dtype is fp32
            total += loss.detach()  # in the type of the losses, as DeepSpeed does
            self.number += 1
        norm = math.sqrt(sum(float(each.float().norm()) ** 2 for each in sums.values()))
        for name, each in parameters.items():
            if self.clip and norm > self.clip:
                sums[name] *= self.clip / (norm + 1e-6)
            each.grad = sums[name].float()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.append(self.weights)
        return float(total / len(batch))


def alone(engine: Any, make_optimizer: Any, **more: Any) -> Delayed:
    """What an engine that has begun to train must equal."""
    program, mode = engine._endless.program, engine.weight_versions
    return Delayed(make_optimizer, functools.partial(program.version, mode), engine.plan, **more)


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The weights in fp32 that the optimizer of each rank steps, by name."""
    own = {name: safe_get_full_fp32_param(each) for name, each in engine.module.named_parameters()}
    return {name: each for part in gather_objects(own) for name, each in part.items()}


def same_weights(engine: Any, expected: Delayed, digits: float = 1e-5) -> None:
    found = masters(engine) if expected.dtype == torch.bfloat16 else all_tensors(engine)
    for name, weight in expected.weights.items():
        assert torch.allclose(found[name], weight, rtol=digits, atol=digits / 10), name


def delayed_updates_equal_one_process(_: Path) -> None:
    """For each mode, on contiguous stages and several per device, with each optimizer; losses and weights."""
    data = batches(30)
    all_maps = maps()
    for turn, mode in enumerate(MODES):
        for place, (name, make) in enumerate(OPTIMIZERS.items()):
            devices, cuts = all_maps[(turn + place) % len(all_maps)]
            engine = begin(plan_for(devices, cuts, mode), make)
            items = mine(engine, data)
            losses = [call(engine, items) for _ in data]
            assert not engine._endless.is_under_way, "the data has ended"
            expected = alone(engine, make)
            same(losses, [expected.train(batch) for batch in data])
            same_weights(engine, expected)
            delays = [batch - engine._endless.program.version(mode, 0, 4 * batch) for batch in range(6)]
            assert max(delays) == 1, (mode, name, "versions are older than the last one")


def rests_on_the_way(folder: Path) -> None:
    """Evaluation, a checkpoint and a rest; forwards that ran ahead have not been, also for buffers and counts."""
    data = batches(12)
    make = OPTIMIZERS["momentum"]
    for mode, (devices, cuts) in zip(MODES, maps() * 2, strict=False):
        engine = begin(plan_for(devices, cuts, mode), make)
        items = mine(engine, data)
        losses = [call(engine, items) for _ in range(3)]
        expected = alone(engine, make)
        wanted = [expected.train(batch) for batch in data[:3]]
        assert engine._endless.is_under_way and engine.global_steps == 3
        engine.eval_batch(iter(data[0]))
        same_weights(engine, expected)
        losses += [call(engine, items) for _ in range(2)]
        expected.rest()
        wanted += [expected.train(batch) for batch in data[3:5]]
        where = str(folder / mode)
        engine.save_checkpoint(where)
        same_weights(engine, expected)
        losses += [call(engine, items)]
        engine.come_to_rest()
        engine.come_to_rest()
        expected.rest()
        wanted += [expected.train(batch) for batch in data[5:6]]
        same_weights(engine, expected)
        same(losses, wanted)
        seen = {name: int(each) for name, each in all_tensors(engine).items() if name.endswith("seen")}
        assert set(seen.values()) == {6 * NUM_MICRO_BATCHES + NUM_MICRO_BATCHES}, seen
        dist.barrier()
        # In another mode, and on another map.
        other = MODES[MODES.index(mode) - 1]
        again = begin(plan_for(*maps()[0], other), make)
        again.load_checkpoint(where)
        items = mine(again, data[5:])
        found = [call(again, items) for _ in data[5:9]]
        again.come_to_rest()
        program = again._endless.program
        resumed = Delayed(make, expected.version, engine.plan)
        for batch in data[:5]:
            if resumed.number == 3 * NUM_MICRO_BATCHES:
                resumed.rest()
            resumed.train(batch)
        resumed.rest()
        resumed.version = functools.partial(program.version, other)
        resumed.stages = [number for number, stage in enumerate(again.plan.stages) for _ in range(*stage.layers)]
        same(found, [resumed.train(batch) for batch in data[5:9]])
        same_weights(again, resumed)


def a_rest_on_one_rank(_: Path) -> None:
    """The rank that came to rest alone waited for ever for the others."""
    data = batches(4)
    engine = begin(plan_for((0, 1), [0, 3, 8], "stashing"), OPTIMIZERS["sgd"])
    items = mine(engine, data)
    for _ in range(2):
        call(engine, items)
    assert engine._endless.is_under_way
    if engine.global_rank == 1:
        with (
            patch.object(arrivals, "ENDS_AFTER_SECONDS", 0.2),
            raised(
                RuntimeError, "come_to_rest() has waited 0 s on rank 1 for rank 0: the stages finish their batches"
            ),
        ):
            engine.come_to_rest()
    dist.barrier()


def more_runs_ahead_than_a_batch(_: Path) -> None:
    """Batches of one micro-batch: a rest gives whole batches up, with their updates and losses."""
    data = [[item] for batch in batches(3) for item in batch]
    make = OPTIMIZERS["momentum"]
    for mode in ("stashing", "vertical-sync"):
        plan = plan_for((0, 1), [0, 3, 8], mode, 1)
        engine = begin(plan, make, {"gradient_accumulation_steps": 1})
        items = mine(engine, data)
        losses = [call(engine, items) for _ in range(5)]
        assert engine._endless.program.ahead >= 1
        engine.come_to_rest()
        expected = alone(engine, make)
        wanted = [expected.train(batch) for batch in data[:5]]
        same_weights(engine, expected)
        losses += [call(engine, items) for _ in data[5:]]
        expected.rest()
        same(losses, [*wanted, *(expected.train(batch) for batch in data[5:])])
        same_weights(engine, expected)


def forwards_and_backwards_use_the_same_weights(_: Path) -> None:
    """In all bits, whatever was updated in between; and no more versions are held than the plan says.

    Of what rule each version is, too: along a micro-batch one in ``vertical-sync``, that of its batch in ``2bw``.
    """
    data = batches(8)
    for mode, (devices, cuts) in zip(MODES, maps() * 2, strict=False):
        engine = begin(plan_for(devices, cuts, mode), OPTIMIZERS["sgd"])
        used: dict[tuple[int, int], list[torch.Tensor]] = {}
        held: dict[int, int] = {}
        numbers: dict[tuple[int, int], int] = {}
        plain = type(engine)._run

        def run(
            instruction: Any,
            engine: Any = engine,
            plain: Any = plain,
            used: Any = used,
            held: Any = held,
            numbers: Any = numbers,
        ) -> None:
            if isinstance(instruction, Compute):
                stage, number = instruction.stage, instruction.micro_batch
                versions = engine._endless.weights_of(stage)
                weights = [each.detach().clone() for each in versions.parameters]
                held[stage] = max(held.get(stage, 0), versions.num_held)
                if instruction.kind == "F":
                    used[stage, number], numbers[stage, number] = weights, versions.current
                else:
                    both = zip(used.pop((stage, number)), weights, strict=True)
                    assert all(torch.equal(one, other) for one, other in both)
            plain(engine, instruction)

        engine.__dict__["_run"] = run
        items = mine(engine, data)
        [call(engine, items) for _ in data]
        assert not used
        along: dict[int, list[int]] = {}
        for theirs in gather_objects(numbers):
            for (_, number), version in sorted(theirs.items()):
                along.setdefault(number, []).append(version)
        assert len(along) == 8 * NUM_MICRO_BATCHES
        for number, versions in along.items():
            assert len(versions) == len(devices), (mode, number, versions)
            assert mode == "stashing" or len(set(versions)) == 1, (mode, number, versions)
            assert mode != "2bw" or versions[0] == max(0, number // NUM_MICRO_BATCHES - 1)
        assert mode != "stashing" or any(len(set(versions)) > 1 for versions in along.values())
        planned = engine.plan.versions
        for stage, most in held.items():
            assert most == planned.num_held(stage), (mode, stage, most, planned.num_held(stage))


def schedules_and_clipping(_: Path) -> None:
    """Updates have the learning rate of their own call; two versions clip by the norm of all stages."""
    data = batches(7)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.4)

    for mode, clip in (("stashing", 0.0), ("2bw", 0.05)):
        for devices, cuts in maps():
            plan = plan_for(devices, cuts, mode)
            engine = begin(plan, make, {"gradient_clipping": clip}, lr_scheduler=halving)
            items = mine(engine, data)
            losses = [call(engine, items) for _ in data]
            expected = alone(engine, make, make_scheduler=halving, clip=clip)
            same(losses, [expected.train(batch) for batch in data])
            same_weights(engine, expected)


def batches_of_another_size_drain(_: Path) -> None:
    """A batch of fewer micro-batches than planned is trained on at rest, and clipped by the norm of all stages."""
    data, make = batches(5), OPTIMIZERS["sgd"]
    for mode, clip in (("stashing", 0.0), ("2bw", 0.05)):
        engine = begin(plan_for(*maps()[0], mode), make, {"gradient_clipping": clip})
        engine.runs_ahead = False
        losses, wanted = [], []
        for number, batch in enumerate(data):
            given = batch[:3] if number in (0, 3) else batch
            if len(given) != engine.micro_batches:
                engine.come_to_rest()  # in which losses are divided by their own number
            engine.micro_batches = len(given)
            engine._config.gradient_accumulation_steps = len(given)  # by which DeepSpeed divides the losses
            losses.append(call(engine, mine(engine, [given])))
            assert engine.is_at_rest == (number in (0, 3))
            if number == 1:
                expected = alone(engine, make, clip=clip)
        engine.come_to_rest()
        for number, batch in enumerate(data):
            if number in (0, 1, 3, 4):
                expected.rest()
            wanted.append(expected.train(batch[:3] if number in (0, 3) else batch))
        same(losses, wanted)
        same_weights(engine, expected)


def recut_to_another_mode(_: Path) -> None:
    """A plan of another mode and cut, between two calls: the pipeline comes to rest, moves layers and goes on."""
    data, make = batches(6), OPTIMIZERS["momentum"]
    (devices, cuts), (others, other_cuts) = maps()[0], maps()[1]
    engine = begin(plan_for(devices, cuts, "stashing"), make)
    items = mine(engine, data)
    losses = [call(engine, items) for _ in range(3)]
    expected = alone(engine, make)
    wanted = [expected.train(batch) for batch in data[:3]]
    lines: list[str] = []
    with patch.object(environment, "log_here", lambda line, *_: lines.append(line)):
        engine.recut(plan_for(others, other_cuts, "2bw"))
    assert engine.is_at_rest and engine.weight_versions == "2bw"
    told = any("weight_versions is '2bw' now, as the plan says, and was 'stashing'" in line for line in lines)
    assert told == (engine.global_rank == 0), lines
    same_weights(engine, expected)
    items = mine(engine, data[3:])
    with (
        patch.object(PlannedPeak, "is_possible", True),  # as on a GPU
        patch.object(environment, "log_here", lambda line, *_: lines.append(line)),
    ):
        losses += [call(engine, items) for _ in range(3)]
    told = any("memory that each rank needs is not compared with its plan" in line for line in lines)
    assert told == (engine.global_rank == 0), lines
    again = alone(engine, make)
    expected.rest()
    expected.version, expected.stages = again.version, again.stages
    same(losses, [*wanted, *(expected.train(batch) for batch in data[3:])])
    engine.come_to_rest()
    same_weights(engine, expected)


def weights_in_bf16_and_zero_1(_: Path) -> None:
    """To 5 digits over 30 updates, for the loop in one process rounds to bf16 where DeepSpeed does."""
    data = batches(30)
    in_bf16 = batches(30, dtype=torch.bfloat16)
    numbers = 0
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    for mode, config, clip in (
        ("stashing", {"bf16": {"enabled": True}}, 0.0),
        ("2bw", {"bf16": {"enabled": True}, **zero}, 0.0),
        ("2bw", {"bf16": {"enabled": True}}, 0.05),
        ("vertical-sync", {"bf16": {"enabled": True}}, 0.0),
        ("vertical-sync", zero, 0.0),
    ):
        for devices, cuts in (maps()[0], maps()[-1]):
            make = OPTIMIZERS["adam"] if clip else OPTIMIZERS["momentum"]
            is_bf16 = "bf16" in config
            lines: list[str] = []
            with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
                engine = begin(plan_for(devices, cuts, mode), make, {**config, "gradient_clipping": clip})
                items = mine(engine, in_bf16 if is_bf16 else data)
                losses = []
                for _ in data:
                    losses.append(call(engine, items))
                    engine.optimizer.zero_grad()  # which cleared those of bf16 in flight
            expected = alone(engine, make, clip=clip, dtype=torch.bfloat16 if is_bf16 else torch.float32)
            wanted = [expected.train(batch) for batch in (in_bf16 if is_bf16 else data)]
            same(losses, wanted)
            same_weights(engine, expected)
            program = engine._endless.program
            together = [program.most_held_together(mode, device) for device in range(engine.num_stages)]
            for stage in engine.module.own_stages:  # in flat buffers, which all stages of a rank share
                assert engine._endless.weights_of(stage).most_held == together[engine.stage_id]
            told = any("weights of all stages of a rank in one buffer" in line for line in lines)
            held = [engine.plan.versions.num_held(stage) for stage in range(len(devices))]
            beyond = any(together[device] > held[stage] for stage, device in enumerate(devices))
            assert told == (beyond and engine.global_rank == 0), (mode, devices, together, held, lines)
            numbers += beyond
    assert numbers, "nothing was told"


def linear(engine: Any) -> list[nn.Module]:
    """The layers of a rank that have a weight."""
    return [each for each in nn.Module.modules(engine.module) if "weight" in each.__dict__["_parameters"]]


def reads_while_it_goes_on_are_said(_: Path) -> None:
    """Once for an engine, on the rank that reads, and not at rest, nor of what the engine itself reads."""
    data = batches(4)
    for read, words in (
        (lambda engine: list(engine.module.parameters()), "a parameter is read"),
        (lambda engine: engine.module.state_dict(), "the state of the module is read"),
        (lambda engine: engine.optimizer.state_dict(), "the state of the optimizer is read"),
        (lambda engine: [each.weight for each in linear(engine)], "a parameter is read"),
        (lambda engine: [list(each.parameters()) for each in linear(engine)], "a parameter is read"),
        (lambda engine: list(engine.optimizer.state.values()), "the state of the optimizer is read"),
        (lambda engine: [engine.optimizer.state[each] for each in engine.of_test], "the state of the optimizer"),
    ):
        lines: list[str] = []
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            engine = begin(plan_for(*maps()[0], "stashing"), OPTIMIZERS["momentum"])
            engine.of_test = list(engine.module.parameters())
            layers, plain = linear(engine), [each.__dict__["_parameters"] for each in linear(engine)]
            read(engine)
            items = mine(engine, data)
            for _ in range(2):
                call(engine, items)
            engine.come_to_rest()
            read(engine)
            assert not [line for line in lines if "is read" in line]
            call(engine, items)
            if engine.global_rank == 1:
                read(engine)
                read(engine)
            call(engine, items)
            if engine.global_rank == 1:
                read(engine)
            kept = (
                copy.deepcopy(layers[0]),
                copy.copy(engine.optimizer.state),
                copy.deepcopy(engine.optimizer.state),
            )
            assert [type(each) for each in kept[1:]] == [defaultdict] * 2  # copies are ordinary ones, and not told
            assert type(kept[0].__dict__["_parameters"]) is type(plain[0])
            engine.come_to_rest()
        assert all(each.__dict__["_parameters"] is those for each, those in zip(layers, plain, strict=True))
        told = [line for line in lines if "is read" in line]
        assert len(told) == (engine.global_rank == 1), told
        assert all(words in line and "engine.come_to_rest() on every rank" in line for line in told)


def figures_of_batches(folder: Path) -> None:
    """From one loss to the next, beside what the lists are planned to take; versions and peaks beside a plan."""
    data = batches(10)
    logs = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}, "steps_per_print": 3}
    for mode in MODES:
        engine = begin(plan_for((0, 1, 0), [0, 3, 6, 8], mode), OPTIMIZERS["sgd"])
        engine.watch_steps()
        assert engine.figures_of_steps() is None
        items, ends, few = mine(engine, data), [], []
        with limit_memory(10**12):  # which counts them
            for number in range(8):
                call(engine, items)
                ends.append(time.monotonic())
                if number == 1:  # behind which the pipeline may not be full
                    few.append(engine.figures_of_steps())
        figures = engine.figures_of_steps()
        assert few == [None] and figures is not None and 4 <= figures.num_steps <= 6, figures
        took = max(gather_objects((ends[-1] - ends[-1 - figures.num_steps]) / figures.num_steps))
        assert figures.step_seconds == pytest.approx(took, rel=0.2, abs=2e-3)
        assert figures.planned_step_seconds == engine.endless_program.batch_seconds
        worked = sum(figures.stage_seconds.values())
        assert set(figures.stage_seconds) == {0, 1, 2} and worked > 0
        assert figures.bubble_share == pytest.approx(1 - worked / (2 * figures.step_seconds))
        assert worked + sum(figures.waiting_seconds.values()) <= 2 * figures.step_seconds
        planned = {stage: engine.plan.versions.num_held(stage) for stage in range(3)}
        assert figures.planned_versions == planned
        assert all(1 <= figures.versions_held[stage] <= planned[stage] for stage in planned), figures
        assert max(figures.versions_held.values()) == max(planned.values())
        assert set(figures.peak_bytes) == set(figures.planned_peak_bytes) == {0, 1}
        assert all(each > 0 for each in figures.peak_bytes.values())
        engine.come_to_rest()
        call(engine, items)
        assert engine.figures_of_steps() is None, "a batch with a rest was counted"
    engine = begin(plan_for(*maps()[0], "2bw"), OPTIMIZERS["sgd"], logs)
    items = mine(engine, data)
    for _ in range(9):
        call(engine, items)
    dist.barrier()
    written = {path.stem for path in (folder / "job").glob("madpipe_*.csv")}
    assert {"madpipe_step_seconds", "madpipe_planned_step_seconds", "madpipe_stage_1_versions_held"} < written


class Meter:
    seen = 0


class Counting(nn.Module):
    """Computes with what it keeps in attributes: numbers, a list, a tensor, an object, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), 1.0
        self.count, self.meter, self.random = 0, Meter(), random.Random(5)
        self.means: list[float] = []
        self.average = torch.zeros(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.meter.seen += 1
        self.means.append(float(x.detach().mean()))
        self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))
        scale = self.gain + 1 / self.count + 1 / self.meter.seen + self.random.random()
        scale += sum(self.means[-3:])
        return torch.tanh(self.linear(x) * (scale + self.average.sum()))


def counting() -> list[Any]:
    """Layers that count, also one that is a function with a variable around it."""
    number = 0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return x * (1 + 1 / number)

    return [
        LayerSpec(nn.Linear, 8, WIDTH), LayerSpec(Counting), scaled, LayerSpec(Block, WIDTH), LayerSpec(Counting),
        LayerSpec(Block, WIDTH), LayerSpec(Counting), LayerSpec(nn.Linear, WIDTH, 4),
    ]  # fmt: skip


def what_layers_keep_in_attributes(_: Path) -> None:
    """Forwards that ran ahead of a rest have counted nothing; what a program sets on the way is said and stays."""
    data, make, told = batches(8), OPTIMIZERS["momentum"], list[str]()
    for mode, (devices, cuts) in zip(MODES, maps() * 2, strict=False):
        engine = begin(plan_for(devices, cuts, mode), make, specs=counting())
        items = mine(engine, data)
        losses = []
        lines: list[str] = []
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            for number in range(6):
                losses.append(call(engine, items))
                if number in (1, 2, 4):
                    engine.come_to_rest()
        expected = alone(engine, make, specs=counting())
        wanted = []
        for number, batch in enumerate(data[:6]):
            if number in (2, 3, 5):
                expected.rest()
            wanted.append(expected.train(batch))
        same(losses, wanted)
        assert not [line for line in lines if "between two calls" in line], lines
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            layers = [each for each in engine.module.modules() if isinstance(each, Counting)]
            for layer in layers:
                layer.gain = 0.5
            call(engine, items)
            engine.come_to_rest()
            assert all(layer.gain == 0.5 and layer.count == 7 * NUM_MICRO_BATCHES for layer in layers)
            for layer in layers:
                layer.gain = 0.7
            call(engine, items)
        told += [line for line in lines if "between two calls" in line]
    found = sorted(line.split(" was set")[0] for lines in gather_objects(told) for line in lines)
    assert found == [f"gain of layer {place} (Counting)" for place in (1, 4, 6)], found  # once in a job


class Drawing:
    """Takes from a generator and from the common ones at each call, and keeps what it has got."""

    def __init__(self) -> None:
        self.numbers = (number for number in itertools.count())
        self.noise = (random.random() for _ in iter(int, 1))
        self.seen: list[Any] = []

    def draw(self) -> None:
        drawn = float(torch.rand(())), random.random(), float(numpy.random.random())
        with checkpointing.get_cuda_rng_tracker().fork():
            drawn = *drawn, float(torch.rand(()))
        self.seen.append((next(self.numbers), *drawn, next(self.noise)))

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.draw()
        return loss_fn(outputs, labels)


class DrawingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drawing = nn.Linear(8, WIDTH), Drawing()
        self.numbers, self.noise, self.seen = self.drawing.numbers, self.drawing.noise, self.drawing.seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Drawing.draw(self)  # type: ignore[arg-type]
        return self.linear(x)


def seeded() -> None:
    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    checkpointing.get_cuda_rng_tracker().reset()
    checkpointing.get_cuda_rng_tracker().add("model-parallel-rng", 7)


def what_forgotten_forwards_draw(_: Path) -> None:
    """Numbers and items were gone with forwards that a rest had given up; a loss's state had run ahead, too."""
    data = batches(8)
    for mode in MODES:
        loss = Drawing()
        engine = begin(
            plan_for((0, 1), [0, 3, 8], mode), OPTIMIZERS["sgd"], specs=[LayerSpec(DrawingLayer), *mlp()[1:]],
            loss_fn=loss, seed_layers=False,
        )  # fmt: skip
        holder = engine.module.forward_funcs[0] if engine.is_first_stage() else loss
        wanted = Drawing()
        seeded()
        for _ in range(6 * NUM_MICRO_BATCHES):
            wanted.draw()
        seeded()
        items = mine(engine, data)
        with heard() as lines:
            for step in range(6):
                call(engine, items)
                if step % 2:
                    engine.come_to_rest()
        found = gather_objects(holder.seen)
        assert all(seen == wanted.seen for seen in found), (mode, found, wanted.seen)
        assert sum("reads data before its call: a data iterator is 4 micro-batches" in line for line in lines) == 1
        assert not any("have drawn from a common" in line for line in lines), lines


class Writing(nn.Module):
    """Writes a line at each call in one of several ways."""

    def __init__(self, way: str, path: str) -> None:
        super().__init__()
        self.linear, self.way, self.path = nn.Linear(8, WIDTH), way, path
        if way == "appends":
            self.log: Any = Path(path).open("a")  # noqa: SIM115
        if way == "database":
            self.rows = sqlite3.connect(path)
            self.rows.execute("CREATE TABLE lines (number)")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "opens":
            with open(self.path, "a") as file:
                file.write("line\n")
        elif self.way == "saves":
            torch.save(x.detach(), self.path)
        elif self.way == "appends":
            self.log.write("line\n")
        elif self.way == "database":
            self.rows.execute("INSERT INTO lines VALUES (1)")
        return self.linear(x)


def what_forgotten_forwards_write(folder: Path) -> None:
    """Lines in files, and rows of databases, stood there twice, in silence."""
    data = batches(4)
    for way, words in (
        ("opens", "forwards that ran ahead are forgotten, and have written to {path}: that stays"),
        ("saves", "forwards that ran ahead are forgotten, and have written to {path}: that stays"),
        ("appends", "log (TextIOWrapper): lines were added to it by forwards that ran ahead and are forgotten"),
        ("database", "rows (Connection): 1 rows were changed by forwards that ran ahead and are forgotten"),
        ("nothing", None),
    ):
        for rests in (True, False):
            path = str(folder / f"{way}{rests}{dist.get_rank()}")
            specs = [LayerSpec(Writing, way, path), *mlp()[1:]]
            engine = begin(plan_for((0, 1), [0, 3, 8], "2bw"), OPTIMIZERS["sgd"], specs=specs)
            items = mine(engine, data)
            with heard() as lines:
                for _ in range(4 if rests else 2):
                    call(engine, items)
                    if rests:
                        engine.come_to_rest()
            wanted = None if words is None or not rests else words.format(path=repr(path))
            found = gather_objects([line for line in lines if "forgotten" in line])[0]
            right = gather_objects(wanted is not None and any(wanted in line for line in found))[0]
            assert (len(found), right) == (bool(wanted), bool(wanted)), (way, rests, found, lines)


def two_iterators_in_turn(_: Path) -> None:
    """What forwards had run ahead on of the first iterator was lost with a rest on the second, in silence."""
    data = batches(8)
    engine = begin(plan_for((0, 1), [0, 3, 8], "2bw"), OPTIMIZERS["sgd"])
    both = mine(engine, data[:4]), mine(engine, data[4:])
    losses, wanted, expected = [], [], None
    for turn in range(4):
        items = both[turn % 2]
        losses.append(call(engine, items))
        engine.come_to_rest()
        expected = expected or alone(engine, OPTIMIZERS["sgd"])
        expected.rest()
        wanted.append(expected.train(data[4 * (turn % 2) + turn // 2]))
    same(losses, wanted)


def two_pipelines_without_a_drain(_: Path) -> None:
    data = batches(6)
    make = OPTIMIZERS["momentum"]
    for mode, config, clip in (
        ("stashing", {}, 0.0),
        ("2bw", {}, 0.05),
        ("vertical-sync", {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}, 0.0),
    ):
        devices, cuts = (0, 1, 0), [0, 3, 6, 8]
        plan = plan_for(devices, cuts, mode, NUM_MICRO_BATCHES // 2)
        engine = begin(plan, make, {**config, "gradient_clipping": clip})
        items = mine(engine, data)
        losses = [call(engine, items) for _ in data]
        program = engine._endless.program
        # A batch in one process has the micro-batches of both pipelines, in turns.
        expected = Delayed(
            make, lambda stage, number, mode=mode, program=program: program.version(mode, stage, number // 2),
            plan, clip=clip,
        )  # fmt: skip
        same(losses, [expected.train(batch) for batch in data])
        same_weights(engine, expected)


def a_run_that_asks_for_another_mode_than_its_checkpoint_plans_anew(folder: Path) -> None:
    """With the weights of the checkpoint, and says why; one that asks for none goes on in the mode of that."""
    data, make, where = batches(5), OPTIMIZERS["momentum"], str(folder)
    engine = begin(plan_for(*maps()[0], "stashing"), make)
    items = mine(engine, data)
    for _ in range(2):
        call(engine, items)
    engine.save_checkpoint(where)
    for asked, mode in (("2bw", "2bw"), (None, "stashing")):
        options = {} if asked is None else {"weight_versions": asked}
        config = {"gradient_clipping": 0.0, "pipeline": {"madpipe": {"algorithm": maps()[0][1], **options}}}
        lines: list[str] = []
        with patch.object(environment, "log_here", lambda line, *_, heard=lines: heard.append(line)):
            again, _, _ = start(mlp(), "madpipe", config, optimizer=make)
            again.load_checkpoint(where)
            assert again.global_steps == 2 and (again.plan is None) == (asked is not None)
            items = mine(again, data[2:])
            losses = [call(again, items) for _ in range(2)]
            again.come_to_rest()  # what forwards ran ahead on comes again, also behind what was measured
            losses += [call(again, items)]
        assert again.weight_versions == again.plan.weight_versions == mode and again.global_steps == 5
        said = " ".join(lines)
        if again.global_rank == 0:
            assert ("the option weight_versions is '2bw'" in said) == (asked is not None), said
            assert ("makes a plan of its own" in said) == (asked is not None), said
            assert ("weight_versions is 'stashing' now, as the plan says" in said) == (asked is None), said
        expected = Delayed(make, engine._endless.program.version, engine.plan)
        expected.version = functools.partial(engine._endless.program.version, "stashing")
        for batch in data[:2]:
            expected.train(batch)
        expected.rest()
        expected.version = functools.partial(again._endless.program.version, mode)
        wanted = [expected.train(batch) for batch in data[2:4]]
        expected.rest()
        same(losses, [*wanted, expected.train(data[4])])


class FailsAt(nn.Module):
    """Raises in the forward of one micro-batch."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count == 3 * NUM_MICRO_BATCHES + 2:
            raise ArithmeticError("met in a layer")
        return self.linear(x)


def errors_in_a_layer_end_all_ranks(_: Path) -> None:
    data = batches(8)
    for place in (1, 6):
        specs = [LayerSpec(nn.Linear, 8, WIDTH), *(LayerSpec(Block, WIDTH) for _ in range(6))]
        specs[place] = LayerSpec(FailsAt)
        specs.append(LayerSpec(nn.Linear, WIDTH, 4))
        engine = begin(plan_for(*maps()[0], "stashing"), OPTIMIZERS["sgd"], specs=specs)
        items = mine(engine, data)
        with raised(ArithmeticError, "met in a layer"):
            for _ in data:
                call(engine, items)
        with raised(RuntimeError, "ArithmeticError: met in a layer", "start again from a checkpoint"):
            call(engine, items)
        with raised(RuntimeError, "start again from a checkpoint"):
            engine.come_to_rest()


def data_that_ends_or_fails(_: Path) -> None:
    """The last batch brings the pipeline to rest; an error of the data comes when its batch's turn has come."""
    data = batches(6)
    make = OPTIMIZERS["sgd"]
    engine = begin(plan_for(*maps()[0], "2bw"), make)
    items = mine(engine, data[:2])
    losses = [call(engine, items) for _ in range(2)]
    assert not engine._endless.is_under_way
    with raised(StopIteration, "after 0 micro-batches"):
        engine.train_batch(items)
    more = mine(engine, data[2:4])
    losses += [call(engine, more) for _ in range(2)]

    def failing() -> Any:
        yield from mine(engine, data[4:5])
        raise LookupError("met in the data")

    broken = failing()
    losses.append(call(engine, broken))
    assert not engine._endless.is_under_way
    with raised(LookupError, "met in the data"):
        engine.train_batch(broken)
    expected = alone(engine, make)
    wanted = []
    for run in (data[:2], data[2:4], data[4:5]):
        expected.rest()
        wanted += [expected.train(batch) for batch in run]
    same(losses, wanted)
    same_weights(engine, expected)


def what_asynchronous_training_refuses(_: Path) -> None:
    devices, cuts = maps()[0]
    sgd = OPTIMIZERS["sgd"]
    engine = begin(plan_for(devices, cuts, "stashing"), sgd, specs=tied())
    with raised(
        ValueError, "'stashing' cannot be had here", "layers 0, 7 share weights", "leave weight_versions out"
    ):
        engine.train_batch(iter(batches(1, tokens=True)[0]))
    madpipe = {"pipeline": {"madpipe": {"weight_versions": "2bw"}}}
    for plan, config, words in (
        (
            plan_for(devices, cuts, "stashing"),
            madpipe,
            ("is for weight_versions 'stashing'", "weight_versions is '2bw'"),
        ),
        (plan_for(devices, cuts, "flush", 1), madpipe, ("is for weight_versions 'flush'", "leave the option out")),
        (plan_for(devices, cuts, "stashing", 3), {}, ("num_micro_batches is 3", "of this run is 4")),
        (plan_for(*maps()[2], "2bw", 1), {"gradient_accumulation_steps": 1}, ("two versions", "are enough for 2")),
    ):
        with raised(PlanMismatchError, *words):
            begin(plan, sgd, config)
    data = batches(4)
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.1}
    engine = begin(plan_for(devices, cuts, "2bw"), sgd, zero)
    with raised(ValueError, "ZeRO-1 has room for the reduced gradients of one batch"):
        engine.train_batch(iter(data[0]))
    engine = begin(plan_for(devices, cuts, "2bw"), sgd)
    items, other = mine(engine, data), mine(engine, data)
    call(engine, items)
    with raised(RuntimeError, "another iterator", "engine.come_to_rest()"):
        call(engine, other)
        call(engine, other)
    assert all(gather_objects(True))


def updates_that_are_assigned(_: Path) -> None:
    """Stages that hold several versions lost each update, in silence."""
    devices, cuts = maps()[0]
    data = batches(6)
    for mode in ("stashing", "2bw"):
        losses = []
        for kind in (torch.optim.SGD, Assigning):

            def make(model: Any, kind: Any = kind) -> torch.optim.Optimizer:
                return kind(model.parameters(), lr=0.1)

            engine = begin(plan_for(devices, cuts, mode), make)
            items = mine(engine, data)
            losses.append([call(engine, items) for _ in data])
        same(losses[1], losses[0])


def groups_and_flags_that_change_in_flight(_: Path) -> None:
    """A group that was added ended the run with a raw error; a weight that was frozen lost part of a gradient."""
    devices, cuts = maps()[0]
    data = batches(8)
    engine = begin(plan_for(devices, cuts, "stashing"), OPTIMIZERS["sgd"])
    items = mine(engine, data)
    call(engine, items)
    engine.basic_optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 1e-2})
    for _ in range(2):
        call(engine, items)
    engine.come_to_rest()
    weights = list(engine.module.parameters())
    for weight in weights[:1]:
        weight.requires_grad_(False)  # at rest
    call(engine, items)
    for weight in weights[:1]:
        weight.requires_grad_(True)
    with raised(RuntimeError, "requires_grad of a weight was changed", "call engine.come_to_rest()"):
        call(engine, items)
        call(engine, items)
    engine = begin(plan_for(devices, cuts, "stashing"), OPTIMIZERS["sgd"])
    items = mine(engine, data)
    call(engine, items)
    for weight in list(engine.module.parameters())[:1]:
        weight.requires_grad_(False)
    with raised(RuntimeError, "requires_grad of a weight was changed", "call engine.come_to_rest()"):
        engine.come_to_rest()


def groups_of_weights_that_are_added_in_flight(_: Path) -> None:
    """Updates of earlier batches stepped their weights, too, in silence."""
    devices, cuts = maps()[0]
    of_rank: list[nn.Parameter] = []

    def make(model: Any) -> torch.optim.Optimizer:
        of_rank[:] = model.parameters()
        return torch.optim.SGD(of_rank[:1], lr=0.1)

    engine = begin(plan_for(devices, cuts, "stashing"), make)
    items = mine(engine, batches(8))
    for _ in range(2):
        call(engine, items)
    before = [weight.detach().clone() for weight in of_rank[1:]]
    engine.basic_optimizer.add_param_group({"params": of_rank[1:], "lr": 0.1})
    engine.come_to_rest()
    assert all(map(torch.equal, of_rank[1:], before))
    call(engine, items)
    engine.come_to_rest()
    assert not any(map(torch.equal, of_rank[1:], before))


class ScaledBlocks(nn.Module):
    """Multiplies what its blocks return by a number that a program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.scale = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), 1.0
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


def a_number_that_captured_code_reads(_: Path) -> None:
    """Ranks trained layers of different models, and that was not said; it is where the pipeline comes to rest.

    Forwards which had run ahead had the number that was there before, and that was not said either.
    """
    data = batches(8)
    torch.manual_seed(0)
    net, lines = ScaledBlocks(), list[str]()
    layers = layers_of(net, data[0][0][0])
    plan = plan_for((0, 1), [0, len(layers) // 2, len(layers)], "stashing")
    engine = begin(plan, OPTIMIZERS["sgd"], specs=layers, seed_layers=False)
    items = mine(engine, data)

    def said(words: str) -> int:
        return sum(gather_objects(sum(words in line for line in lines)))

    with patch.object(environment, "log_here", lambda line, *_: lines.append(line)):
        call(engine, items)
        net.scale = 0.5  # before forwards that ran ahead are forgotten
        engine.come_to_rest()
        assert not said("of ScaledBlocks was set between") and not said("comes to rest")
        net.scale = 2.0  # for evaluation alone, as a flag may be set
        engine.eval_batch(mine(engine, data[:1]))
        net.scale = 0.5
        call(engine, items)
        net.scale = 0.25
        call(engine, items)
        assert said("self.scale of ScaledBlocks was set between two calls") == 1
        engine.come_to_rest()
        assert not said("comes to rest")
        net.scale = 1.0 + engine.global_rank
        for _ in range(2):
            call(engine, items)
            engine.come_to_rest()
            assert said("self.scale is 2.0 on rank 1 and 1.0 on rank 0 where the pipeline comes to rest") == 1
        net.scale = 1.0
        call(engine, items)
        engine.come_to_rest()
        engine.eval_batch(mine(engine, data[:1]))
        assert said("comes to rest") == 1


CASES = {
    2: [
        delayed_updates_equal_one_process,
        rests_on_the_way,
        a_rest_on_one_rank,
        more_runs_ahead_than_a_batch,
        forwards_and_backwards_use_the_same_weights,
        schedules_and_clipping,
        batches_of_another_size_drain,
        recut_to_another_mode,
        weights_in_bf16_and_zero_1,
        reads_while_it_goes_on_are_said,
        figures_of_batches,
        what_layers_keep_in_attributes,
        what_forgotten_forwards_draw,
        what_forgotten_forwards_write,
        two_iterators_in_turn,
        a_run_that_asks_for_another_mode_than_its_checkpoint_plans_anew,
        errors_in_a_layer_end_all_ranks,
        data_that_ends_or_fails,
        what_asynchronous_training_refuses,
        updates_that_are_assigned,
        groups_and_flags_that_change_in_flight,
        groups_of_weights_that_are_added_in_flight,
        a_number_that_captured_code_reads,
    ],
    3: [],
    4: [
        forwards_and_backwards_use_the_same_weights,
        delayed_updates_equal_one_process,
        weights_in_bf16_and_zero_1,
        two_pipelines_without_a_drain,
    ],
}
