"""What must hold where a rank runs out of memory in a warm-up: the step runs again, on all ranks, on less."""

from __future__ import annotations

import itertools
import logging
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.warmup import warm_up
from tests.engine import pipelines
from tests.engine.pipelines import mlp, train_alone, two_groups
from tests.engine.running import (
    NUM_MICRO_BATCHES,
    all_tensors,
    batches,
    cut,
    planned,
    same,
    start,
    train,
    two,
)
from tests.engine.strangers_cases import said_here
from tests.engine.warm_up_cases import AFTER, WARM_UP, heard, leaves_nothing
from tests.in_backward import in_backward


class Failures:
    """What the next tries of a step fail at, on the rank that has the layer; no state of this layer's."""

    __module__ = "torch"  # what an object of a library holds is not put back with a step
    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: list[str] = []


FAILURES = Failures()
LOG = logging.getLogger("a program with a warm-up")


def fails_in_backward(gradient: torch.Tensor) -> torch.Tensor:
    if FAILURES.left and FAILURES.left[0].startswith("backward"):
        fail()
    return gradient


def fail() -> None:
    place, number = FAILURES.left[0].split()
    if int(number) == 0:
        FAILURES.left.pop(0)
        raise torch.cuda.OutOfMemoryError("tried to allocate more than there is")
    FAILURES.left[0] = f"{place} {int(number) - 1}"


class Hungry(nn.Linear):
    """Runs out of memory where ``FAILURES`` says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAILURES.left and FAILURES.left[0].startswith("forward") and torch.is_grad_enabled():
            fail()
        return in_backward(super().forward(x), fails_in_backward)


class Replacing(pipelines.Block):
    """Its buffer is another tensor after each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.seen
        outputs = super().forward(x)
        self.seen = before.clone()
        return outputs


class Counting(Replacing):
    """It counts its forwards, too; in one of several pipelines these are not those of one process."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.num_forwards, self.numbers, self.listed = 0, itertools.count(), array("i")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(x)
        if torch.is_grad_enabled():
            self.num_forwards += 1
            self.listed.append(next(self.numbers))
        return outputs * (1 + 0.01 * (self.num_forwards + len(self.listed) + sum(self.listed[-1:])))


class InPlace(nn.Linear):
    """Changes its input, as activations with ``inplace=True`` do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.5
        return torch.tanh(super().forward(x.relu_()))


def hungry(place: int, block: type[Replacing] = Counting) -> list[Any]:
    specs = mlp()
    specs[4:6] = LayerSpec(block, pipelines.WIDTH), LayerSpec(InPlace, pipelines.WIDTH, pipelines.WIDTH)
    specs[place] = LayerSpec(Hungry, 8 if place == 0 else pipelines.WIDTH, pipelines.WIDTH if place < 7 else 4)
    return specs


def out_of_memory_in_a_warm_up(_: Path) -> None:
    """In a forward and a backward, of a first and a later micro-batch, on the first and the last stage."""
    caps = [None, None, 1] if two() else [None, None, 2, 1]
    words = ["recompute", *(f"more than {cap} micro-batch" for cap in caps if cap), "one by one"]
    data = batches(WARM_UP + AFTER)
    failing: list[tuple[int, int, list[str]]] = [
        (0, 0, ["forward 0"]),
        (0, 1, ["backward 1", "forward 2"]),
        (7, 0, ["forward 1", "forward 0", "backward 2"]),
        (7, 1, ["backward 0"]),
    ]
    if dist.get_world_size() == 4:  # ranks on both sides
        failing = [
            (3, 1, ["forward 0", "backward 1"]),
            (3, 0, ["forward 0", "backward 1", "forward 3"]),
            (3, 1, ["forward 0", "backward 1", "forward 3", "backward 0"]),
        ]
    for place, zero, failures in failing:
        expected = train_alone(hungry(place), data, two_groups)
        config = {**planned(cut(), warmup_steps=WARM_UP), "zero_optimization": {"stage": zero}}
        engine, _, _ = start(hungry(place), "madpipe", config, optimizer=two_groups)
        losses = train(engine, data[:1])
        FAILURES.left[:] = failures if engine.module.stage_owner(place) == engine.stage_id else []
        with heard() as sentences:
            losses += train(engine, data[1:2])
            # A plan is made at once where nothing else is left.
            assert (engine.plan is not None) == (len(failures) == len(words))
            if engine.plan is None:
                num_slots, cap = engine._train_schedule().num_slots(engine.stage_id), caps[len(failures)]
                assert num_slots == min(engine.num_stages - engine.stage_id, cap or NUM_MICRO_BATCHES)
            losses += train(engine, data[2:])
        falls = [each for each in sentences if "ran out of memory" in each]
        assert len(falls) == len(failures), sentences
        assert all(word in each for word, each in zip(words, falls, strict=False)), falls
        same(losses, expected)
        assert engine.module.parts == cut() and not FAILURES.left
        # A step that was given up has not been: layers count their forwards, and seeds go by them.
        num_forwards = NUM_MICRO_BATCHES * len(data)
        counts = [value for name, value in all_tensors(engine).items() if name.endswith("seen")]
        assert counts and all(count == num_forwards for count in counts)
        assert set(engine.module._num_forwards.values()) == {num_forwards}
        leaves_nothing(engine, data[:1])


class Taking(nn.Module):
    """Takes from generators that it holds and counts what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in itertools.count())
        self.squares = map(square, itertools.count())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.01 * (next(self.numbers) + next(self.squares)) if torch.is_grad_enabled() else 1)


def square(number: int) -> float:
    return number * 0.1


def what_a_step_has_taken_and_written_that_is_given_up(folder: Path) -> None:
    """Generators of layers and of a loss went on, and files were written to twice, in silence."""
    data = batches(WARM_UP + AFTER)
    LOG.handlers, LOG.propagate = [logging.FileHandler(folder / f"log {dist.get_rank()}")], False

    def layers(place: int) -> list[Any]:
        specs = hungry(place)
        specs[1], specs[6] = Taking(), Taking()
        return specs

    def writing() -> Any:
        numbers, path = (number for number in itertools.count()), folder / f"losses {dist.get_rank()}"
        opened = (folder / f"opened {dist.get_rank()}").open("a")

        def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with path.open("a") as file:
                file.write("x")
            opened.write("x")
            LOG.warning("called")
            return pipelines.loss_fn(outputs, labels) * (1 + 0.01 * next(numbers))

        return loss_fn

    expected = train_alone(layers(7), data, two_groups, loss_fn=writing())
    engine, _, _ = start(
        layers(7), "madpipe", planned(cut(), warmup_steps=WARM_UP), optimizer=two_groups, loss_fn=writing()
    )
    losses = train(engine, data[:1])
    FAILURES.left[:] = ["backward 1"] if engine.is_last_stage() else []
    kinds = [type(module.numbers).__name__ for module in engine.module.modules() if isinstance(module, Taking)]
    assert kinds == ["generator"]
    with said_here() as said:
        losses += train(engine, data[1:])
    same(losses, expected)
    of_last = gather_objects(said)[-1]
    [line] = [line for line in of_last if "given up and runs again" in line]
    assert "losses 1'" in line and "log 1'" in line, of_last
    assert sum("opened (TextIOWrapper): lines were added to it" in line for line in of_last) == 1, of_last


def fewer_in_flight_where_nothing_can_be_recomputed(_: Path) -> None:
    """Nor fewer than the micro-batches that there are."""
    data = [batch[:3] for batch in batches(3)]
    config = {**planned(cut(), warmup_steps=2), "gradient_accumulation_steps": 3}
    engine, _, _ = start(hungry(0), "madpipe", config, optimizer=two_groups)
    FAILURES.left[:] = ["backward 1", "forward 2"] if engine.is_first_stage() else []
    with patch.object(warm_up, "can_recompute", lambda _: False), heard() as sentences:
        losses = train(engine, data)
    falls = [each for each in sentences if "ran out of memory" in each]
    most = ["more than 1 micro-batch in flight", "one by one"] if two() else ["more than 2", "more than 1"]
    assert len(falls) == 2 and all(word in each for word, each in zip(most, falls, strict=True)), falls
    same(losses, train_alone(hungry(0), data, two_groups))
    assert engine.module.parts == cut() and not FAILURES.left


def replicas_give_a_step_up_together(_: Path) -> None:
    """One rank of one of two pipelines runs out of memory."""
    data = batches(WARM_UP + AFTER)
    expected = train_alone(hungry(7, Replacing), data, two_groups)
    config = {**planned([0, 2, 8], warmup_steps=WARM_UP), "zero_optimization": {"stage": 1}}
    engine, _, _ = start(hungry(7, Replacing), "madpipe", config, optimizer=two_groups, num_stages=2)
    losses = train(engine, data[:1])
    FAILURES.left[:] = ["forward 1", "backward 1"] if engine.grid.data_parallel_id == 1 else []
    with heard() as sentences:
        losses += train(engine, data[1:])
    FAILURES.left.clear()
    same(losses, expected)
    assert sum("ran out of memory" in each for each in sentences) == 2
    assert engine.module.parts == [0, 2, 8]


def what_does_not_fit_is_measured_alone(_: Path) -> None:
    """The weights alone are too many: no step is tried on the trial cut."""
    data = batches(2)
    config = planned(cut(), warmup_steps=WARM_UP, memory=9_000, weight_copies=0.01)
    engine, _, _ = start(mlp(), "madpipe", config, optimizer=two_groups)
    assert engine._pending.warm_up is not None
    with heard() as sentences:
        losses = train(engine, data)
    assert any("for its weights, gradients" in each and "one by one" in each for each in sentences), sentences
    same(losses, train_alone(mlp(), data, two_groups))
    assert engine.module.parts == cut()


def what_was_done_stays_done_where_no_plan_fits(_: Path) -> None:
    data = batches(WARM_UP + AFTER)
    config = planned("madpipe", warmup_steps=WARM_UP, memory=30_000, weight_copies=100)
    engine, _, _ = start(hungry(0), "madpipe", config, optimizer=two_groups)
    FAILURES.left[:] = ["forward 0", "forward 1"] if engine.is_first_stage() else []
    with heard() as sentences:
        losses = train(engine, data[:-1])
    assert any("no plan fits, and training goes on" in each for each in sentences), sentences
    with patch.object(warm_up, "checkpoint") as checkpoint:
        checkpoint.side_effect = lambda function, inputs, **_: function(inputs)
        losses += train(engine, data[-1:])
    same(losses, train_alone(hungry(0), data, two_groups))
    assert checkpoint.call_count >= NUM_MICRO_BATCHES and engine._train_schedule().num_slots(engine.stage_id) == 1
    assert engine.plan is None and not engine.is_warming_up


def layers_that_recompute_from_the_start(_: Path) -> None:
    """The first step does not fit: what layers keep is measured one by one when all else is known."""
    data = batches(WARM_UP + 1)
    engine, _, _ = start(hungry(0), "madpipe", planned(cut(), warmup_steps=WARM_UP), optimizer=two_groups)
    FAILURES.left[:] = ["forward 0"] if engine.is_first_stage() else []
    with heard() as sentences:
        losses = train(engine, data)
    assert any("not all layers were measured in training (layers run again" in each for each in sentences)
    assert not any("held at most" in each for each in sentences), "the trial cut has not run as it is planned"
    same(losses, train_alone(hungry(0), data, two_groups))
    alone, _, _ = start(hungry(0), "madpipe", planned(cut()), optimizer=two_groups)
    train(alone, data[:1])
    for layer, expected in zip(engine.chain.layers, alone.chain.layers, strict=True):
        assert (layer.stash_bytes, layer.transient_bytes) == (expected.stash_bytes, expected.transient_bytes)
    assert engine.chain.warm_up.peak_bytes == (None, None) and alone.chain.warm_up is None


def a_long_warm_up(_: Path) -> None:
    """Only so many steps are timed; what was done for want of memory stays done."""
    data = batches(4)
    engine, _, _ = start(hungry(0), "madpipe", planned(cut(), warmup_steps=4), optimizer=two_groups)
    FAILURES.left[:] = ["forward 0"] if engine.is_first_stage() else []
    with patch.object(warm_up, "NUM_MEASURED_STEPS", 2), patch.object(warm_up, "checkpoint") as checkpoint:
        checkpoint.side_effect = lambda function, inputs, **_: function(inputs)
        num_recomputed = []
        losses = []
        for batch in data:
            losses += train(engine, [batch])
            num_recomputed.append(checkpoint.call_count)
    same(losses, train_alone(hungry(0), data, two_groups))
    assert engine._pending.warm_up is not None and engine._pending.warm_up.clock.num_steps == 2
    per_step = num_recomputed[0]
    assert per_step >= NUM_MICRO_BATCHES and num_recomputed == [per_step * number for number in (1, 2, 3, 4)]


BOTH = [out_of_memory_in_a_warm_up, fewer_in_flight_where_nothing_can_be_recomputed]
ONLY_TWO = [
    what_was_done_stays_done_where_no_plan_fits,
    layers_that_recompute_from_the_start,
    what_does_not_fit_is_measured_alone,
    a_long_warm_up,
    what_a_step_has_taken_and_written_that_is_given_up,
]
ONLY_FOUR = [replicas_give_a_step_up_together]
