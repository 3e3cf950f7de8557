"""What must hold when training begins on a trial cut, is measured, and goes on as planned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import InfeasibleError, make_plan
from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine import engine as engines
from deepspeed_partition.engine.pipeline import module as modules
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.transfers import Transfers
from deepspeed_partition.engine.warmup import run_plan
from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Chain
from deepspeed_partition.profiling import profile_chain
from deepspeed_partition.profiling.in_place import InPlaceClock
from tests.engine import pipelines
from tests.engine.pipelines import mlp, tied, train_alone, two_groups
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    batches,
    cut,
    divides_backwards,
    planned,
    raised,
    recomputes_on_a_cpu,
    same,
    start,
    train,
)

WARM_UP, AFTER = 3, 2


@contextmanager
def heard() -> Iterator[list[str]]:
    """The sentences that rank 0 says, on every rank."""
    sentences: list[str] = []
    with patch.object(environment, "logger") as logger:
        yield sentences
    mine = [str(call.args[1]) for call in logger.log.call_args_list]
    sentences += gather_objects(mine)[0]


@contextmanager
def said_here() -> Iterator[list[str]]:
    """The sentences of this rank."""
    sentences: list[str] = []
    with patch.object(environment, "logger") as logger:
        yield sentences
    sentences += [str(call.args[1]) for call in logger.log.call_args_list]


def leaves_nothing(engine: MadPipeEngine, data: list[Any]) -> None:
    """No stand-in, and nothing that would look at another step."""
    assert engine._pending.warm_up is None and engine.around_optimizer_step is None
    assert engine.module.loss_fn is pipelines.loss_fn
    for stage in engine.module.own_stages:
        for function in engine.module._functions[stage]:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            assert "InPlaceClock" not in name and "checkpoint" not in name, name
    watched = []
    with patch.object(InPlaceClock, "_arrived", lambda *arguments: watched.append(arguments)):
        train(engine, data)
    assert not watched and engine._transfers.watch is None
    assert not any(weight._post_accumulate_grad_hooks for weight in plain_weights(engine))


def plain_weights(engine: MadPipeEngine) -> list[nn.Parameter]:
    """Those that no ZeRO optimizer looks at."""
    return [] if engine.zero_optimization() else list(engine.module.parameters())


def a_warm_up_and_a_move_equal_one_process(folder: Path) -> None:
    for specs, tokens in ((mlp, False), (tied, True)):
        data = batches(WARM_UP + AFTER, tokens=tokens)
        expected = train_alone(specs(), data, two_groups)
        for zero in (0, 1):
            path = folder / f"{specs.__name__}{zero}.json"
            config = {
                **planned(cut(), warmup_steps=WARM_UP, save_plan=str(path)),
                "zero_optimization": {"stage": zero},
            }
            engine, optimizer, _ = start(specs(), "madpipe", config, optimizer=two_groups)
            trial = engine.module.parts
            assert trial != cut()
            losses = train(engine, data[:WARM_UP])
            assert engine.module.parts == trial and engine.plan is None and not path.exists()
            with heard() as sentences:
                losses += train(engine, data[WARM_UP:])
            assert any("rank 0 plans" in each and "the other ranks wait" in each for each in sentences)
            same(losses, expected)
            assert engine.module.parts == cut() == engine.plan.boundaries and engine.optimizer is optimizer
            dist.barrier()
            assert Plan.load(path) == engine.plan
            chain = Chain.load(path.with_suffix(".chain.json"))
            assert chain.digest() == engine.chain.digest() == engine.plan.chain.digest
            given, _, _ = start(specs(), "madpipe", planned(cut(), warmup_steps=WARM_UP, plan=str(path)))
            assert given._pending.warm_up is None and given.plan == engine.plan, (
                "a plan that is given needs no warm-up"
            )
            leaves_nothing(engine, data[:1])


def schedules_go_on_after_a_warm_up(_: Path) -> None:
    """On a module that DeepSpeed cut: the configuration alone asks for the warm-up, or layers move without one."""
    data = batches(WARM_UP + AFTER)
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 5, "warmup_type": "linear"}
    ratios = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
    for zero, scheduler in (
        (1, {"type": "WarmupLR", "params": rates}),
        (1, {"type": "WarmupCosineLR", "params": ratios}),
        (0, {"type": "WarmupLR", "params": rates}),
    ):
        # DeepSpeed's own clipping counts the first stage alone without ZeRO.
        base: dict[str, Any] = {
            "zero_optimization": {"stage": zero}, "scheduler": scheduler, "gradient_clipping": 0.0,
        }  # fmt: skip
        fixed, _, _ = start(mlp(), cut(), base)
        expected = train(fixed, data)
        config = {**base, **planned(cut(), warmup_steps=WARM_UP)}
        config["pipeline"]["partition_method"] = "madpipe"
        engine, _, made = start(mlp(), "parameters", config)
        assert engine.module.parts != cut()
        same(train(engine, data), expected)
        assert engine.module.parts == cut() and engine.lr_scheduler is made and engine.get_lr() == fixed.get_lr()
        engine, _, made = start(mlp(), "parameters", base)
        losses = train(engine, data[:WARM_UP])
        engine.recut(cut())
        same(losses + train(engine, data[WARM_UP:]), expected)
        assert engine.lr_scheduler is made and engine.get_lr() == fixed.get_lr()


def _last_layer_apart(model: nn.Module) -> torch.optim.Optimizer:
    last = [weight for name, weight in model.named_parameters() if name.startswith("7.")]
    others = [weight for name, weight in model.named_parameters() if not name.startswith("7.")]
    return torch.optim.AdamW([{"params": last, "lr": 2e-2}, {"params": others, "lr": 1e-2}])


def schedules_of_groups_that_a_rank_lacks(_: Path) -> None:
    """DeepSpeed drops such a group; its scheduler can go on where it knows that the layers will move."""
    data = batches(WARM_UP + AFTER)
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": [2e-2, 1e-2], "warmup_num_steps": 5, "warmup_type": "linear"}
    base = {"zero_optimization": {"stage": 1}}
    expected = train(
        start(mlp(), cut(), {**base, "scheduler": {"type": "WarmupLR", "params": params}},
              optimizer=_last_layer_apart)[0], data,
    )  # fmt: skip
    config = {**base, **planned(cut(), warmup_steps=WARM_UP), "scheduler": {"type": "WarmupLR", "params": params}}
    config["pipeline"]["partition_method"] = "madpipe"
    engine, _, _ = start(mlp(), "parameters", config, optimizer=_last_layer_apart)
    same(train(engine, data), expected)
    params = {"warmup_num_steps": 2, "total_num_steps": 6, "warmup_type": "linear"}
    by_deepspeed = {**base, "scheduler": {"type": "WarmupCosineLR", "params": params}}
    engine, _, _ = start(mlp(), "parameters", by_deepspeed, optimizer=_last_layer_apart)
    train(engine, data[:1])
    before = engine.module.parts
    with raised(RuntimeError, "WarmupCosineLR", "partition_method"):
        engine.recut(cut())
    assert engine.module.parts == before


def a_run_tells_what_it_does(folder: Path) -> None:
    """From the trial cut to the move, in this order; and where the plan is kept, if anywhere."""
    logs = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "job"}}
    path = folder / "job" / "madpipe-plan.json"
    for config, kept in (
        ({}, "the option save_plan names a place"),
        (logs, f"the plan is saved in {path}, what it was made from in madpipe-plan.chain.json"),
    ):
        story = [
            "MadPipe's own lists", "training begins at the cut [0, 4, 8], with a warm-up of 2 steps",
            "the warm-up is over after step 2", "rank 0 plans", "mlp: 8 layers", kept,
            "the layers are cut at [0, 2, 8] as planned (until now: [0, 4, 8])", "; measuring and planning took ",
        ]  # fmt: skip
        with heard() as sentences:
            engine, _, _ = start(mlp(), "madpipe", {**config, **planned(cut(), warmup_steps=2)})
            engine.module.model_name = "mlp"
            train(engine, batches(4))
        told = [
            next(part for part in story if part in each)
            for each in sentences
            if any(map(each.__contains__, story))
        ]
        assert told == story, sentences
        assert any("2 layers moved in " in each for each in sentences)
    dist.barrier()
    assert Plan.load(path) == engine.plan
    assert Chain.load(path.with_suffix(".chain.json")).digest() == engine.plan.chain.digest
    dist.barrier()
    if dist.get_rank() == 0:
        path.unlink()
        path.mkdir()
    with heard() as sentences:
        engine, _, _ = start(mlp(), "madpipe", {**logs, **planned(cut())})
        losses = train(engine, batches(2))
    assert any("the plan is not saved" in each for each in sentences) and engine.module.parts == cut()
    assert any("are measured one by one on the first micro-batch" in each for each in sentences)
    assert not any("warm-up" in each for each in sentences)
    same(losses, train(start(mlp(), cut())[0], batches(2)))


def evaluation_in_a_warm_up(_: Path) -> None:
    """It is not measured, and changes nothing."""
    data = batches(WARM_UP)
    expected = train_alone(mlp(), data, two_groups)
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), warmup_steps=2), optimizer=two_groups)
    losses = []
    for batch in data:
        items = iter(batch) if engine.is_first_stage() or engine.is_last_stage() else None
        engine.eval_batch(items, num_micro_batches=NUM_MICRO_BATCHES)
        if engine._pending.warm_up is not None:
            assert engine._pending.warm_up.clock.num_steps == len(losses)
        losses += train(engine, [batch])
    same(losses, expected)


# Layers that sleep: in hundredths of a second, forward and backward

UNIT_SECONDS = 0.002
SLEEPS = [(1, 2), (4, 1), (1, 8), (2, 2), (1, 1), (8, 1), (1, 1), (1, 4)]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: int, backward: int) -> torch.Tensor:
        ctx.backward_units = backward
        time.sleep(forward * UNIT_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_units * UNIT_SECONDS)
        return gradient, None, None


class Sleeping(nn.Linear):
    def __init__(self, before: int, after: int, forward: int, backward: int) -> None:
        super().__init__(before, after)
        self.units = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(super().forward(x), *self.units)


def sleeping(sleeps: list[tuple[int, int]] = SLEEPS) -> list[LayerSpec]:
    widths = [8, *[16] * (len(sleeps) - 1), 4]
    return [LayerSpec(Sleeping, widths[i], widths[i + 1], *each) for i, each in enumerate(sleeps)]


@contextmanager
def nothing_run_twice() -> Iterator[None]:
    """What a warm-up has measured needs no more data, and no layer again."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured once more")

    with (
        patch.object(MadPipeEngine, "peek_micro_batch", refused),
        patch.object(run_plan, "measure_stage", refused),
    ):
        yield


def the_chain_of_a_warm_up_is_the_profilers(_: Path) -> None:
    """What layers keep is the same to the byte; what they take is what they sleep, and a little more."""
    for warmup_steps, zero in ((WARM_UP, 0), (2, 1)):
        config = {**planned(cut(), warmup_steps=warmup_steps), "zero_optimization": {"stage": zero}}
        engine, _, _ = start(sleeping(), "madpipe", config)
        with nothing_run_twice():
            train(engine, batches(warmup_steps + 1))
        is_the_profilers(engine)


def is_the_profilers(engine: MadPipeEngine) -> None:
    profiled = profile_chain(
        [spec.build() for spec in sleeping()], pipelines.micro_batch(0), loss_fn=pipelines.loss_fn, repeats=1,
        group=engine.grid.get_pipe_parallel_group(), progress=False,
    )  # fmt: skip
    found = engine.chain
    assert (found.input_bytes, found.micro_batch_size) == (profiled.input_bytes, profiled.micro_batch_size)
    for layer, expected, units in zip(found.layers, profiled.layers, SLEEPS, strict=True):
        for size in ("name", "weight_bytes", "output_bytes", "stash_bytes", "transient_bytes", "type"):
            assert getattr(layer, size) == getattr(expected, size), (layer.name, size)
        times = layer.forward_seconds, layer.backward_seconds
        assert all(seconds >= unit * UNIT_SECONDS for seconds, unit in zip(times, units, strict=True)), layer
    # None of a layer's time is taken for its neighbor's: what sleeps longest takes longest, by far.
    forward, backward = ([times[i] for times in SLEEPS] for i in (0, 1))
    for units, seconds in (
        (forward, [layer.forward_seconds for layer in found.layers]),
        (backward, [layer.backward_seconds for layer in found.layers]),
    ):
        longest = units.index(max(units))
        shortest = [taken for unit, taken in zip(units, seconds, strict=True) if unit == 1]
        assert seconds[longest] > 2 * sorted(shortest)[len(shortest) // 2]


ROWS, WIDE = 512, 512
"""A message of a mebibyte."""
LINK_SECONDS = 0.01


class _Late:
    """A receive that takes its time, like others before it on the same link."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        time.sleep(LINK_SECONDS)


def what_else_a_warm_up_measures(folder: Path) -> None:
    """Peaks and links, beside what was planned, in the file of the chain; what is told wins."""
    specs = [LayerSpec(nn.Linear, 8, WIDE), *[LayerSpec(pipelines.Block, WIDE)] * 4, LayerSpec(nn.Linear, WIDE, 4)]
    data = [[pipelines.micro_batch(number, size=ROWS) for number in range(NUM_MICRO_BATCHES)]] * 6
    receive = Transfers._start_receiving
    late = patch.object(
        Transfers, "_start_receiving", lambda self, tensor, peer: _Late(receive(self, tensor, peer))
    )
    for zero, told in enumerate(({}, {"bandwidth": 1e9, "latency_seconds": 0.0})):
        path = folder / f"{len(told)}.json"
        options = {"algorithm": [0, 2, 6], "warmup_steps": 5, "save_plan": str(path), **told}
        config = {
            "pipeline": {"madpipe": options},
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": zero},
        }
        engine, _, _ = start(specs, "madpipe", config, optimizer=two_groups)
        trial = tuple(engine.module.parts)
        with late, nothing_run_twice(), heard() as sentences:
            train(engine, data)
        dist.barrier()
        found = Chain.load(path.with_suffix(".chain.json")).warm_up
        assert found == engine.chain.warm_up and (found.boundaries, found.num_steps) == (trial, 3)
        assert all(seconds > 0 for seconds in found.optimizer_seconds)
        # What is planned has room for tensors that wait at both sides of a cut; they need not.
        for peak, planned_bytes in zip(found.peak_bytes, found.planned_peak_bytes, strict=True):
            assert 0.75 * planned_bytes < peak < 1.01 * planned_bytes, found
        assert any("the ranks held at most" in each for each in sentences), sentences
        [use] = found.links
        assert use.link == (0, 1) and use.forward_bytes == use.backward_bytes == 4 * ROWS * WIDE
        assert use.forward_seconds >= LINK_SECONDS and use.backward_seconds >= LINK_SECONDS
        assert engine.plan.platform.bandwidth == told.get("bandwidth", use.bandwidth)
        # With links that are told nothing but operations explains what a step took.
        assert found.step_seconds > 2 * NUM_MICRO_BATCHES * LINK_SECONDS
        assert not told or engine.plan.platform.operation_seconds > LINK_SECONDS / 4
        assert not told or any("a step of the warm-up took" in each for each in sentences), sentences
        assert engine._transfers.watch is None


def layers_move_where_that_gains(_: Path) -> None:
    """The trial cut balances weights; the first layers here take all the time."""
    slow_first = [(6, 12), (6, 12), *[(1, 1)] * 6]
    config = planned("contiguous", warmup_steps=2)
    engine, _, _ = start(sleeping(slow_first), "madpipe", config)
    trial = engine.module.parts
    with heard() as sentences:
        train(engine, batches(3))
    assert engine.module.parts[1] < trial[1] and any("instead of" in each for each in sentences)


def no_layer_moves_for_nothing(_: Path) -> None:
    """As good a cut as any: the layers stay, and the run has a plan for where they are."""
    alike = [(4, 4)] * 4 if dist.get_world_size() == 4 else [(4, 4)] * 2
    engine, _, _ = start(sleeping(alike), "madpipe", planned("contiguous", warmup_steps=2))
    trial, weights = engine.module.parts, list(engine.module.parameters())
    with heard() as sentences:
        train(engine, batches(3))
    assert any("no layer moves" in each for each in sentences), sentences
    assert engine.plan is not None and engine.module.parts == trial == engine.plan.boundaries
    assert all(a is b for a, b in zip(weights, engine.module.parameters(), strict=True))


class Compiled(nn.Linear):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.compile(backend="eager")


def layers_that_are_compiled(_: Path) -> None:
    """They would run uncompiled where somebody counts their tensors."""
    specs = mlp()
    specs[-1] = LayerSpec(Compiled, pipelines.WIDTH, 4)
    data = batches(3)
    engine, _, _ = start(specs, "madpipe", planned(cut(), warmup_steps=2), optimizer=two_groups)
    with heard() as sentences:
        losses = train(engine, data)
    assert any("(a layer is compiled" in each for each in sentences), sentences
    same(losses, train_alone(specs, data, two_groups))
    counted = [peak is not None for peak in engine.chain.warm_up.peak_bytes]
    assert counted == [True, False], "the last stage has that layer"


class _Fused(torch.autograd.Function):
    """Adds to the gradient of the weight that it saved, as fused kernels do: autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            added = gradient.t() @ x
            weight.grad = added if weight.grad is None else weight.grad + added
        return gradient @ weight, None


class Fused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fused.apply(x, self.weight) + self.bias


class Transformed(nn.Linear):
    """Which torch refuses where hooks see what is saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: super(Transformed, self).forward(y).sin().sum())(x)


NUM_COMPILED_RUNS = [0]


def _counting(graph: Any, _: Any) -> Any:
    def run(*arguments: Any) -> Any:
        NUM_COMPILED_RUNS[0] += 1
        return graph(*arguments)

    return run


class Compiling(nn.Linear):
    """Calls a compiled function from the second step on."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after)
        self.num_forwards = 0
        self.doubled = torch.compile(lambda x: 2 * x, backend=_counting)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        outputs = super().forward(x)
        return self.doubled(outputs) if self.num_forwards > NUM_MICRO_BATCHES else 2 * outputs


def functions_that_are_compiled(_: Path) -> None:
    """They are not while their tensors are counted, and are afterwards."""
    specs = mlp()
    specs[1] = LayerSpec(Compiling, pipelines.WIDTH, pipelines.WIDTH)
    data = batches(4)
    engine, _, _ = start(specs, "madpipe", planned(cut(), warmup_steps=3), optimizer=two_groups)
    holds = engine.module.stage_owner(1) == engine.stage_id
    losses, num_runs = [], []
    for batch in data:
        NUM_COMPILED_RUNS[0] = 0
        losses += train(engine, [batch])
        num_runs.append(NUM_COMPILED_RUNS[0])
    same(losses, train_alone(specs, data, two_groups))
    assert num_runs[:3] == [0, 0, NUM_MICRO_BATCHES if holds else 0]


def layers_that_cannot_be_watched(_: Path) -> None:
    """They train as they would without, and are measured one by one; so is a warm-up of one step."""
    kinds = ((Fused, 2, "function of its own"), (Transformed, 2, "torch.func"), (Transformed, 0, ""))
    for kind, warmup_steps, reason in (*kinds, (nn.Linear, 1, "that takes two steps")):
        specs = mlp()
        specs[1] = LayerSpec(kind, pipelines.WIDTH, pipelines.WIDTH)
        data = batches(4)
        engine, _, _ = start(specs, "madpipe", planned(cut(), warmup_steps=warmup_steps), optimizer=two_groups)
        with heard() as sentences:
            losses = train(engine, data)
        same(losses, train_alone(specs, data, two_groups))
        told = [each for each in sentences if "not all layers were measured in training" in each]
        assert len(told) == (warmup_steps > 0) and all(reason in each for each in told), sentences
        layer = engine.chain.layers[1]
        assert engine.plan is not None and layer.stash_bytes >= layer.output_bytes and layer.backward_seconds > 0


def layers_that_recompute_anyway(_: Path) -> None:
    """DeepSpeed's activation checkpointing, whose backwards are timed without what they recompute."""
    if not recomputes_on_a_cpu():
        return
    data = batches(WARM_UP + 1)
    config = planned(cut(), warmup_steps=WARM_UP)
    engine, _, _ = start(sleeping(), "madpipe", config, optimizer=two_groups, activation_checkpoint_interval=2)
    with heard() as sentences:
        losses = train(engine, data)
    same(losses, train_alone(sleeping(), data, two_groups))
    assert any("layers run again in their backward" in each for each in sentences), sentences
    for layer, units in zip(engine.chain.layers, SLEEPS, strict=True):
        times = layer.forward_seconds, layer.backward_seconds
        assert all(seconds >= unit * UNIT_SECONDS for seconds, unit in zip(times, units, strict=True)), layer
    # It sleeps 8 units in its forward and 1 in its backward.
    assert engine.chain.layers[5].backward_seconds < engine.chain.layers[5].forward_seconds


def a_run_goes_on_with_its_warm_up(folder: Path) -> None:
    """Saved within it, and after it."""
    data = batches(WARM_UP + AFTER)
    expected = train_alone(mlp(), data, two_groups)
    config = planned(cut(), warmup_steps=WARM_UP)
    for saved_after in (1, WARM_UP, WARM_UP + 1):
        where = str(folder / str(saved_after))
        engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
        losses = train(engine, data[:saved_after])
        engine.save_checkpoint(where)
        resumed, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
        resumed.load_checkpoint(where)
        has_plan = saved_after > WARM_UP
        assert (resumed.plan is not None) == has_plan and (resumed._pending.warm_up is None) == has_plan
        for number in range(saved_after, len(data)):
            losses += train(resumed, data[number : number + 1])
            assert (resumed.plan is not None) == (number >= WARM_UP)
        same(losses, expected)
        assert resumed.module.parts == cut()


def a_checkpoint_within_a_step(folder: Path) -> None:
    """It has what one between two steps has."""
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), warmup_steps=WARM_UP), optimizer=two_groups)
    engine.save_checkpoint(str(folder / "before"))
    engine.before_optimizer_step = lambda: engine.save_checkpoint(str(folder / "within"))
    train(engine, batches(1))
    before, within = ({file.name for file in (folder / name).rglob("*.pt")} for name in ("before", "within"))
    assert before == within and any(name.startswith("layer_") for name in within)


def a_run_does_not_end_for_want_of_a_plan(_: Path) -> None:
    """The trial cut has run; what fits by the planner's count is nothing."""
    data = batches(WARM_UP + AFTER)
    config = planned("madpipe", warmup_steps=WARM_UP, memory=30_000, weight_copies=100)
    engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
    trial = engine.module.parts
    with heard() as sentences:
        losses = train(engine, data)
    assert any("no plan fits, and training goes on" in each for each in sentences), sentences
    same(losses, train_alone(mlp(), data, two_groups))
    assert engine.module.parts == trial and engine.plan is None
    leaves_nothing(engine, data[:1])


def where_deepspeeds_schedule_runs_there_is_no_warm_up(_: Path) -> None:
    places = [
        patch.object(each, "why_deepspeeds_schedule", lambda _: "of this test") for each in (modules, engines)
    ]
    with places[0], places[1], heard() as sentences:
        engine, _, _ = start(mlp(), "madpipe", planned(cut(), warmup_steps=WARM_UP), optimizer=two_groups)
        losses = train(engine, batches(1))
    assert any("there is no warm-up" in each for each in sentences), sentences
    assert not engine.runs_lists and engine.module.parts == cut() == engine.plan.boundaries
    same(losses, train_alone(mlp(), batches(1), two_groups))


def errors_of_other_kinds_stay_errors(_: Path) -> None:
    """The end of the data in a warm-up, after which training goes on."""
    data = batches(2)
    engine, _, _ = start(mlp(), "madpipe", planned(cut(), warmup_steps=2))
    losses = train(engine, data[:1])
    with raised(StopIteration, "the data iterator ended"):
        engine.train_batch(iter([]) if engine.is_first_stage() or engine.is_last_stage() else None)
    assert engine._pending.warm_up is not None and engine._pending.warm_up.clock.num_steps == 1
    assert losses + train(engine, data[1:]) == train(start(mlp(), engine.module.parts)[0], data)


def recomputation_is_planned(_: Path) -> None:
    """In less memory than any plan takes without it; with dropout and running statistics, after a warm-up, too."""
    if not recomputes_on_a_cpu():
        return
    wide = [
        LayerSpec(nn.Linear, 16, 64),
        LayerSpec(nn.BatchNorm1d, 64),
        LayerSpec(nn.Tanh),
        LayerSpec(nn.Dropout, 0.5),
    ]
    specs = [mlp()[0], *wide, LayerSpec(nn.Sigmoid), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 64, 16), *mlp()[1:]]
    size = 8 * pipelines.MICRO_BATCH_SIZE  # more bytes in activations than in the optimizer's step
    data = batches(WARM_UP + AFTER, size=size)
    of_size = {"train_micro_batch_size_per_gpu": size}
    engine, _, _ = start(specs, "madpipe", {**planned("madpipe", recompute="never"), **of_size})
    losses = train(engine, data)
    chain, platform = gather_objects((engine.chain, engine.plan.platform))[0]
    # A plan with room takes more buffers where its times make that faster; in this memory it takes the fewest.
    fewest_buffers = replace(platform, comm_buffers=run_plan.BUFFERS)
    least = []
    for mode in ("never", "auto"):
        try:
            make_plan(
                chain, replace(fewest_buffers, memory_bytes=platform.fixed_bytes + 1), every_device_trains=True,
                num_micro_batches=NUM_MICRO_BATCHES, recompute=mode,
            )  # fmt: skip
        except InfeasibleError as error:
            least.append(error.smallest_memory_bytes or 0)
    assert least[1] < least[0]
    for steps in (0, WARM_UP):  # a warm-up counts other bytes, which may fit without
        tight = planned("madpipe", memory=(least[0] + least[1]) // 2, warmup_steps=steps)
        engine, _, _ = start(specs, "madpipe", {**tight, **of_size})
        same(train(engine, data), losses)
        assert steps or any(stage.blocks for stage in engine.plan.stages)


def halves_are_planned(_: Path) -> None:
    """Measured only where they are asked for, scaled to the backwards of the warm-up; the losses stay."""
    if not divides_backwards():
        return
    data = batches(WARM_UP + AFTER)
    expected = train_alone(mlp(), data, two_groups)
    with heard() as said:
        # The last stage stays where it was: a rank that reads data no more has peeked at a micro-batch.
        config = planned("contiguous", warmup_steps=WARM_UP, split_backward=True, time_limit_seconds=2)
        engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
        same(train(engine, data), expected)
    assert any("to measure the halves of their backwards" in line for line in said)
    chain = gather_objects(engine.chain)[0]
    halves = [layer.backward_input_seconds for layer in chain.layers]
    assert halves[0] == 0.0 and None not in halves, "nothing asks for a gradient of the input"
    for layer in chain.layers[2:]:
        assert 0 < layer.backward_input_seconds < layer.backward_seconds
    engine, _, _ = start(
        mlp(), "madpipe", planned("madpipe", split_backward=True), activation_checkpoint_interval=1
    )
    with raised(ValueError, "'split_backward' is true, and activation_checkpoint_interval is set"):
        train(engine, data)


BOTH = [a_warm_up_and_a_move_equal_one_process]
ONLY_TWO = [
    a_run_tells_what_it_does, evaluation_in_a_warm_up, the_chain_of_a_warm_up_is_the_profilers,
    what_else_a_warm_up_measures, layers_move_where_that_gains, no_layer_moves_for_nothing,
    recomputation_is_planned, halves_are_planned, layers_that_recompute_anyway, layers_that_are_compiled,
    layers_that_cannot_be_watched, functions_that_are_compiled,
    a_checkpoint_within_a_step, a_run_goes_on_with_its_warm_up, a_run_does_not_end_for_want_of_a_plan,
    where_deepspeeds_schedule_runs_there_is_no_warm_up, schedules_go_on_after_a_warm_up,
    schedules_of_groups_that_a_rank_lacks, errors_of_other_kinds_stay_errors,
]  # fmt: skip
