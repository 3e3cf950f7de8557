"""What an engine did, measured while it ran: its timeline and its bytes. Run by torchrun with 2 processes."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn

from deepspeed_partition import Plan
from deepspeed_partition.engine.runtime import environment
from deepspeed_partition.engine.runtime.recorded_timeline import NUM_STEPS
from deepspeed_partition.planner.report.timeline import MeasuredTimeline, TimedOperation
from tests.engine import step_watch_cases
from tests.engine.any_plan_multiproc import begin, plan_for
from tests.engine.harness import run_cases
from tests.engine.memory_cases import (
    a_peak_above_the_plan_is_said_once,
    losses_are_kept_without_the_room_of_all_elements,
    no_more_bytes_than_planned,
    no_more_bytes_than_planned_without_a_drain,
)
from tests.engine.pipelines import mlp
from tests.engine.running import NUM_MICRO_BATCHES, batches, mine, raised, recomputes_on_a_cpu, start, train
from tests.engine.step_watch_cases import (
    a_monitor_gets_figures_and_who_has_none_pays_nothing,
    a_slow_rank_is_told_and_layers_leave_it,
)

FORWARD_SECONDS, BACKWARD_SECONDS = 0.002, 0.004
MAPS = {
    (0, 1): [0, 3, 8],
    (0, 1, 0): [0, 3, 6, 8],
    (0, 1, 0, 1): [0, 1, 4, 6, 8],
    (0, 1, 1, 0): [0, 3, 4, 5, 8],
}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradient


class Sleeping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Sleep.apply(x) if x.requires_grad else _Sleep.apply(x.requires_grad_()))


def sleeping() -> list[Any]:
    """Eight layers, each of which takes time in both directions."""
    widths = [8, *[16] * 7, 4]
    return [LayerSpec(Sleeping, before, after) for before, after in itertools.pairwise(widths)]


def saving_to(path: Path) -> dict[str, Any]:
    return {"pipeline": {"madpipe": {"save_timeline": str(path)}}}


def needs(each: TimedOperation, plan: Plan) -> list[tuple[str, int]]:
    """What must have ended before it."""
    kind, stage, number = each.operation.rstrip("0123456789"), int(each.operation.lstrip("SFB")), each.micro_batch
    devices = [stage.device for stage in plan.stages]

    def over(cut: int, direction: str, producer: str) -> tuple[str, int]:
        return (f"S{direction}{cut}" if devices[cut] != devices[cut + 1] else producer), number

    if kind == "SF":
        return [(f"F{stage}", number)]
    if kind == "SB":
        return [(f"B{stage + 1}", number)]
    if kind == "F":
        return [over(stage - 1, "F", f"F{stage - 1}")] if stage else []
    behind = [over(stage, "B", f"B{stage + 1}")] if stage + 1 < len(devices) else []
    return [(f"F{stage}", number), *behind]


def the_timeline_is_what_ran(folder: Path) -> None:
    """In the plan's order, each operation as long as its layers sleep, nothing before what it needs."""
    data = batches(NUM_STEPS + 2)
    for devices, cuts in MAPS.items():
        path = folder / f"{'-'.join(map(str, devices))}.json"
        plan = plan_for(devices, cuts)
        engine, _, _ = begin(sleeping(), plan, saving_to(path), dynamic_shape=devices == (0, 1, 1, 0))
        train(engine, data)
        assert engine._transfers.watch is None
        if dist.get_rank() != 0:
            continue
        timeline = MeasuredTimeline.load(path)
        assert [each.step for each in timeline.steps] == list(range(NUM_STEPS))
        assert timeline.num_micro_batches == NUM_MICRO_BATCHES
        for step in timeline.steps:
            assert len(step.clock_error_seconds) == 2 and step.clock_error_seconds[0] == 0.0
            slack = sum(step.clock_error_seconds) + 1e-9
            ended = {(each.operation, each.micro_batch): each.end_seconds for each in step.operations}
            for each in step.operations:
                for need in needs(each, plan):
                    assert ended[need] <= each.start_seconds + slack, (each, need, ended[need])
            for device, order in enumerate(plan.step.order):
                ran = [each for each in step.operations if each.device == device]
                assert tuple((each.operation, each.micro_batch) for each in ran) == order
                for before, after in itertools.pairwise(ran):
                    assert before.end_seconds <= after.start_seconds + 1e-9
                for each in ran:
                    first, last = plan.stages[int(each.operation[1:])].layers
                    seconds = FORWARD_SECONDS if each.operation[0] == "F" else BACKWARD_SECONDS
                    assert each.duration_seconds >= seconds * (last - first)
        found = timeline.compare(plan)
        assert found.measured_step_seconds >= 8 * (FORWARD_SECONDS + BACKWARD_SECONDS)
        assert len(found.operations) == len(plan.operations)


def a_timeline_has_second_forwards_and_halves(folder: Path) -> None:
    """Each operation of the order, in its place: ``f``, ``R``, ``I`` and ``W``, too."""
    if not recomputes_on_a_cpu():
        return
    path = folder / "halves.json"
    plan = plan_for((0, 1, 0), [0, 3, 6, 8], some_recomputed=2, in_halves=2)
    kinds = {name[0] for order in plan.step.order for name, _ in order}
    assert kinds >= {*"fRIW"}
    engine, _, _ = begin(sleeping(), plan, saving_to(path))
    train(engine, batches(NUM_STEPS))
    if dist.get_rank() == 0:
        timeline = MeasuredTimeline.load(path)
        for step in timeline.steps:
            for device, order in enumerate(plan.step.order):
                ran = [each for each in step.operations if each.device == device]
                assert tuple((each.operation, each.micro_batch) for each in ran) == order
        found = {each.operation: each.measured_seconds for each in timeline.compare(plan).operations}
        assert {name[0] for name in found} == {*kinds, "S"}


def who_does_not_ask_pays_nothing(folder: Path) -> None:
    """And evaluation is not recorded."""
    devices, cuts = (0, 1, 0), MAPS[0, 1, 0]
    engine, _, _ = begin(mlp(), plan_for(devices, cuts))
    assert engine._recorder is None and engine._transfers.watch is None
    with engine._recorded() as execute:
        assert execute == engine._execute
    path = folder / "timeline.json"
    engine, _, _ = begin(mlp(), plan_for(devices, cuts), saving_to(path))
    engine.eval_batch(mine(engine, batches(1)), num_micro_batches=NUM_MICRO_BATCHES)
    dist.barrier()
    assert not path.exists()
    train(engine, batches(1))
    if dist.get_rank() == 0:
        assert len(json.loads(path.read_text())["steps"]) == 1


def steps_of_one_plan_and_one_length(folder: Path) -> None:
    """Without a shorter step, and without one that was given up (once the first one); another plan begins anew."""
    path = folder / "timeline.json"
    engine, _, _ = begin(mlp(), plan_for((0, 1, 0), MAPS[0, 1, 0]), saving_to(path))
    failing = patch.object(engine.module, "loss_fn", side_effect=ValueError("not this batch"))
    with failing, raised(ValueError, "not this batch"):
        engine.train_batch(mine(engine, batches(1)))
    engine.eval_batch(mine(engine, batches(1)), num_micro_batches=NUM_MICRO_BATCHES)
    dist.barrier()
    assert not path.exists()
    train(engine, batches(2))
    engine.micro_batches = NUM_MICRO_BATCHES // 2
    engine.train_batch(mine(engine, batches(1)))
    engine.micro_batches = NUM_MICRO_BATCHES
    train(engine, batches(1))
    dist.barrier()
    assert [step.step for step in MeasuredTimeline.load(path).steps] == [0, 1, 3]
    other = plan_for((0, 1, 1, 0), MAPS[0, 1, 1, 0])
    engine.recut(other)
    train(engine, batches(1))
    dist.barrier()
    timeline = MeasuredTimeline.load(path)
    assert timeline.devices == (0, 1, 1, 0) and [step.step for step in timeline.steps] == [4]


def there_is_no_timeline_without_a_plan(folder: Path) -> None:
    """Lists of given boundaries, DeepSpeed's own schedule: rank 0 says that nothing is saved."""
    path = folder / "timeline.json"
    for method in ([0, 3, 8], "uniform"):
        with said(f"no timeline is saved in {path}"):
            engine, _, _ = start(mlp(), method, saving_to(path))
        train(engine, batches(1))
    assert not path.exists()


@contextmanager
def said(sentence: str) -> Iterator[None]:
    with patch.object(environment, "logger") as logger:
        yield
    sentences = [str(call.args[1]) for call in logger.log.call_args_list]
    assert any(sentence in each for each in sentences) == (dist.get_rank() == 0), sentences


def a_timeline_that_cannot_be_written(folder: Path) -> None:
    """Refused before the training; where it cannot be written later, the training goes on."""
    devices, cuts = (0, 1, 0), MAPS[0, 1, 0]
    with raised(ValueError, "'save_timeline'", "cannot be written"):
        begin(mlp(), plan_for(devices, cuts), saving_to(folder / "none" / "timeline.json"))
    gone = folder / "gone"
    if dist.get_rank() == 0:
        gone.mkdir()
    dist.barrier()
    engine, _, _ = begin(mlp(), plan_for(devices, cuts), saving_to(gone / "timeline.json"))
    dist.barrier()
    if dist.get_rank() == 0:
        gone.rmdir()
    dist.barrier()
    train(engine, batches(2))


def a_profiler_sees_the_names_of_the_plan(folder: Path) -> None:
    """Each operation of this rank once, and its messages; without a profiler nothing is named."""
    plan = plan_for((0, 1, 0), MAPS[0, 1, 0])
    with said_by_hosts() as printed:
        engine, _, _ = begin(mlp(), plan)
    assert "topology" not in printed.getvalue() and "SEED_LAYERS" not in printed.getvalue()
    with patch.object(engine, "_run_named") as named:
        train(engine, batches(1))
    assert not named.called
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(engine, batches(1))
    names = [event.name for event in profiler.events()]
    assert plan.step is not None
    mine = [f"{name}.{number}" for name, number in plan.step.order[dist.get_rank()]]
    assert [name for name in names if name in set(mine)] != [] and {names.count(each) for each in mine} == {1}
    ends = {"S" if dist.get_rank() == 0 else "R"}
    assert all(f"{end}F0.{number}" in names for end in ends for number in range(NUM_MICRO_BATCHES)), names[:200]


def figures_are_those_of_the_timeline(folder: Path) -> None:
    step_watch_cases.figures_are_those_of_the_timeline(folder, sleeping())


@contextmanager
def said_by_hosts() -> Iterator[io.StringIO]:
    """What is printed meanwhile."""
    with redirect_stdout(io.StringIO()) as printed:
        yield printed


CASES = [
    a_profiler_sees_the_names_of_the_plan,
    the_timeline_is_what_ran,
    a_timeline_has_second_forwards_and_halves,
    who_does_not_ask_pays_nothing,
    steps_of_one_plan_and_one_length,
    there_is_no_timeline_without_a_plan,
    a_timeline_that_cannot_be_written,
    no_more_bytes_than_planned,
    losses_are_kept_without_the_room_of_all_elements,
    no_more_bytes_than_planned_without_a_drain,
    a_peak_above_the_plan_is_said_once,
    figures_are_those_of_the_timeline,
    a_monitor_gets_figures_and_who_has_none_pays_nothing,
    a_slow_rank_is_told_and_layers_leave_it,
]
NAMES = [case.__name__ for case in CASES]

if __name__ == "__main__":
    run_cases({name: globals()[name] for name in NAMES if os.environ["WORLD_SIZE"] == "2"})
