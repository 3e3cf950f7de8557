"""Do steps take what was planned with micro-batches that are recomputed one by one, and with backwards in halves?

    torchrun --nproc_per_node=5 examples/benchmarks/slots_and_halves/main.py --measure
    python examples/benchmarks/slots_and_halves/main.py --plan --devices 5
    torchrun --nproc_per_node=5 examples/benchmarks/slots_and_halves/main.py --save

One layer per device, all alike; layers sleep, so that each rank has a device of its own on any machine. The first
command measures what the engine takes for an operation beside its layers, as a warm-up does: by a step of 1F1B,
from the first forward to the last backward. The second one makes plans that count it (``plans/``), the third one
runs them. Two questions:

- slots: a device has room for K stashes, half as many as there are devices. Three steps: the planned one, which
  decides micro-batch by micro-batch; everything recomputed, with as many micro-batches in flight as 1F1B has;
  nothing recomputed, and 1F1B with no more in flight than fit. A forward takes 1 unit, a backward 2. Stashes are
  tensors, which each rank counts whenever a layer begins or ends.
- halves: room for all stashes. Two steps: 1F1B, and the planned one, whose backwards may be in halves. A forward
  and both halves take 1 unit each.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import torch
from torch import nn

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.planner.buffers import MORE_BUFFERS
from deepspeed_partition.planner.clock import Clock
from deepspeed_partition.planner.operation_costs import operation_seconds_of
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.planner.simulate.replay import replay_and_count
from deepspeed_partition.planner.simulate.replay_step import run_step, step_ticks
from deepspeed_partition.planner.step import one_f_one_b_order

PLANS = HERE / "plans"
UNIT_SECONDS = 0.04
MEASURED_MICRO_BATCHES = 16
"""Micro-batches of the step that tells what the engine takes for an operation."""
SLOTS = {5: (3, (15, 30)), 8: (4, (16,))}
"""Room for stashes, and the micro-batches of the steps, by devices."""
HALVES = {4: (8, 16), 8: (8, 16)}
NUMBERS = 2**20 // 4
"""Numbers of a stash: 1 MiB."""


class Span:
    """From the begin of a layer's first operation to the end of its last one."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.begin, self.end = math.inf, -math.inf

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.begin = min(self.begin, time.perf_counter())
        yield
        self.end = max(self.end, time.perf_counter())


class _Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Sleeping) -> torch.Tensor:
        layer.sleep(1)
        ctx.layer = layer
        ctx.save_for_backward(layer.new_stash())
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        [_] = ctx.saved_tensors
        ctx.layer.sleep(2)
        return gradient, gradient.sum().reshape(1), None


class Sleeping(nn.Module):
    """Sleeps, and keeps one stash from its forward to its backward."""

    alive: ClassVar[weakref.WeakSet[torch.UntypedStorage]] = weakref.WeakSet()
    most_alive: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.span = Span()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeping.apply(x, self.weight, self)

    def sleep(self, units: int) -> None:
        with self.span.counting():
            until = time.perf_counter() + units * UNIT_SECONDS
            for _ in range(2):
                Sleeping.most_alive = max(Sleeping.most_alive, len(Sleeping.alive))
                time.sleep(max(0.0, until - time.perf_counter()))

    @staticmethod
    def new_stash() -> torch.Tensor:
        stash = torch.empty(NUMBERS)
        Sleeping.alive.add(stash.untyped_storage())
        return stash


class _Apart(torch.autograd.Function):
    """A part of a backward that sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, units: int, span: Span) -> torch.Tensor:
        ctx.units, ctx.span = units, span
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        with ctx.span.counting():
            time.sleep(ctx.units * UNIT_SECONDS)
        return gradient, None, None


class Halved(nn.Module):
    """Sleeps for its forward, for the gradient of its input, and for that of its weight, one unit each.

    Where the input needs no gradient, that of the weight takes both units.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.span = Span()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.span.counting():
            time.sleep(UNIT_SECONDS)
        if not x.requires_grad:
            return x + _Apart.apply(self.weight, 2, self.span)
        return _Apart.apply(x, 1, self.span) + _Apart.apply(self.weight, 1, self.span)


def chain_of(num_devices: int, *, in_halves: bool) -> Chain:
    halves = {"backward_input_seconds": UNIT_SECONDS, "backward_weight_seconds": UNIT_SECONDS} if in_halves else {}
    layer = LayerProfile(
        name="sleeping", forward_seconds=UNIT_SECONDS, backward_seconds=2 * UNIT_SECONDS, weight_bytes=0,
        output_bytes=0, stash_bytes=1, num_trainable_parameters=1, **halves,
    )  # fmt: skip
    # Nothing asks for a gradient of the input of the first one.
    first = {"backward_input_seconds": 0.0, "backward_weight_seconds": 2 * UNIT_SECONDS} if in_halves else {}
    return Chain(name="slots", input_bytes=0, layers=(replace(layer, **first), *[layer] * (num_devices - 1)))


def seconds_of(plan: Plan, chain: Chain) -> float:
    """Return what the order of a plan's step takes."""
    timeline = run_step(plan, chain)
    assert not isinstance(timeline, str), timeline
    return Clock.of(chain, plan.platform).seconds(step_ticks(plan, chain, timeline))


def with_order(plan: Plan, chain: Chain, orders: Sequence[Order]) -> Plan:
    """Return a plan with another order of its step, and what that takes and needs."""
    assert plan.step is not None
    step = replace(plan.step, order=tuple(orders), lower_bound_seconds=None, gap=None, proved=None)
    plan = replace(plan, step=step)
    step = replace(step, step_seconds=seconds_of(plan, chain))
    plan, replayed = replay_and_count(replace(plan, step=step), chain)
    assert not replayed.violations, replayed.violations
    return plan


def platform_of(num_devices: int, memory_bytes: int, operation_seconds: float = 0.0) -> Platform:
    """Return devices with as much room for messages as a run gives them, which need no memory here.

    With room for two of them, a device that is to hand on its output waits until the next one, which computes, has
    come to post a receive: that took 4 % of a step.
    """
    return Platform(
        num_devices=num_devices, memory_bytes=memory_bytes, bandwidth=1e9, comm_buffers=max(MORE_BUFFERS),
        operation_seconds=operation_seconds,
    )  # fmt: skip


def operation_seconds(num_devices: int, question: str) -> float:
    """Return what was measured of the engine.

    Raises:
        FileNotFoundError: nothing was measured.
    """
    return float(json.loads(measured_file(num_devices).read_text())[question])


def slot_plans(num_devices: int, slots: int, number: int, limit_seconds: float) -> dict[str, Plan]:
    chain = chain_of(num_devices, in_halves=False)
    platform = platform_of(num_devices, slots, operation_seconds(num_devices, "slots"))
    planned = make_plan(
        chain, platform, "contiguous", num_micro_batches=number, recompute="micro-batch",
        time_limit_seconds=limit_seconds,
    )  # fmt: skip
    deep = [one_f_one_b_order(stage, num_devices - stage, number) for stage in range(num_devices)]
    fits = [one_f_one_b_order(stage, min(slots, num_devices - stage), number) for stage in range(num_devices)]
    recomputed = [tuple((name.replace("F", "f"), each) for name, each in order) for order in deep]
    return {
        "micro-batch by micro-batch": planned,
        "all recomputed": with_order(planned, chain, recomputed),
        "1F1B, as deep as fits": with_order(planned, chain, fits),
    }


def half_plans(num_devices: int, number: int, limit_seconds: float) -> dict[str, Plan]:
    chain = chain_of(num_devices, in_halves=True)
    platform = platform_of(num_devices, 10**6, operation_seconds(num_devices, "halves"))
    planned = make_plan(
        chain, platform, "contiguous", num_micro_batches=number, split_backward=True, recompute="never",
        time_limit_seconds=limit_seconds,
    )  # fmt: skip
    whole = [one_f_one_b_order(stage, num_devices - stage, number) for stage in range(num_devices)]
    return {"in halves": planned, "1F1B": with_order(planned, chain, whole)}


def all_plans(num_devices: int, limit_seconds: float) -> dict[tuple[str, int, int, str], Plan]:
    """Return the plans by question, slots, micro-batches and name."""
    found = {}
    slots, numbers = SLOTS.get(num_devices, (0, ()))
    for number in numbers:
        for name, plan in slot_plans(num_devices, slots, number, limit_seconds).items():
            found["slots", slots, number, name] = plan
    for number in HALVES.get(num_devices, ()):
        for name, plan in half_plans(num_devices, number, limit_seconds).items():
            found["halves", 0, number, name] = plan
    return found


def measured_file(num_devices: int) -> Path:
    """Return the file of the seconds of an operation beside its layers, by question."""
    return PLANS / f"operation_seconds_{num_devices}_devices.json"


def layers_alone_seconds(plan: Plan, question: str) -> float:
    """Return what the step of a plan takes where nothing but layers takes time."""
    chain = chain_of(plan.platform.num_devices, in_halves=question == "halves")
    return seconds_of(replace(plan, platform=replace(plan.platform, operation_seconds=0.0)), chain)


def file_of(key: tuple[str, int, int, str], num_devices: int) -> Path:
    question, _, number, name = key
    words = "-".join(name.replace(",", "").lower().split())
    return PLANS / f"{question}_{num_devices}_devices_{number}_micro_batches_{words}.json"


def keys_of(num_devices: int) -> list[tuple[str, int, int, str]]:
    slots, numbers = SLOTS.get(num_devices, (0, ()))
    names = ("micro-batch by micro-batch", "all recomputed", "1F1B, as deep as fits")
    keys = [("slots", slots, number, name) for number in numbers for name in names]
    numbers = HALVES.get(num_devices, ())
    return keys + [("halves", 0, number, name) for number in numbers for name in ("in halves", "1F1B")]


def bubble(num_devices: int, number: int, seconds: float) -> float:
    """Return the idle part (0 to 1) of a step in which all devices work for 3 units per micro-batch."""
    return 1 - 3 * UNIT_SECONDS * number / seconds


def measured_operation_seconds(question: str, rounds: int) -> float:
    """Run steps of 1F1B; return the seconds of an operation beside its layers that explain the median one."""
    import torch.distributed as dist

    num_devices = dist.get_world_size()
    chain = chain_of(num_devices, in_halves=False)
    platform = platform_of(num_devices, 10**6)
    cuts = list(range(num_devices + 1))
    plan = make_plan(chain, platform, cuts, num_micro_batches=MEASURED_MICRO_BATCHES, recompute="never")
    orders = [
        one_f_one_b_order(stage, num_devices - stage, MEASURED_MICRO_BATCHES) for stage in range(num_devices)
    ]
    plan = with_order(plan, chain, orders)
    spans = run(plan, question, rounds)[1]
    return operation_seconds_of(chain, platform, cuts, orders, statistics.median(spans))


def run(plan: Plan, question: str, rounds: int) -> tuple[list[float], list[float], int]:
    """Run steps of a plan, behind one that warms up.

    Returns:
        Seconds of each step on the slowest rank, and from the first forward to the last backward; most stashes.
    """
    import torch.distributed as dist
    from interleaved import engine_for_plan

    from deepspeed_partition.engine.runtime.collectives import gather_objects

    assert plan.step is not None
    num_devices, number = dist.get_world_size(), plan.step.num_micro_batches
    layers = [Sleeping() if question == "slots" else Halved() for _ in range(num_devices)]
    engine = engine_for_plan(layers, plan, number, lambda outputs, _: outputs.sum(), gradient_clipping=0.0)
    data = repeat((torch.zeros(1, 1), torch.zeros(1)))
    seconds, spans = [], []
    for round_ in range(rounds + 1):
        gc.collect()
        gc.freeze()  # to look for garbage among all that was imported takes a rank 0.2 s
        Sleeping.most_alive = 0
        for layer in layers:
            layer.span.clear()
        dist.barrier()
        began = time.perf_counter()
        engine.train_batch(data)
        lasted = max(gather_objects(time.perf_counter() - began))
        spans_here = [layer.span for layer in layers]
        mine = min(each.begin for each in spans_here), max(each.end for each in spans_here)
        begins, ends = zip(*gather_objects(mine), strict=True)
        if round_:
            seconds.append(lasted)
            spans.append(max(ends) - min(begins))
    most_alive = max(gather_objects(Sleeping.most_alive))
    engine.destroy()
    return seconds, spans, most_alive


def measured(key: tuple[str, int, int, str], rounds: int) -> dict[str, Any]:
    import torch.distributed as dist

    num_devices = dist.get_world_size()
    question, slots, number, name = key
    plan = Plan.load(file_of(key, num_devices))
    seconds, _, most_alive = run(plan, question, rounds)
    assert plan.step is not None
    took = statistics.median(seconds)
    return {
        "question": question, "devices": num_devices, "slots": slots, "micro_batches": number, "step": name,
        "operation_seconds": plan.platform.operation_seconds,
        "layers_alone_seconds": layers_alone_seconds(plan, question),
        "planned_seconds": plan.step.step_seconds, "seconds": seconds, "most_stashes": most_alive,
        "over_planned": took / plan.step.step_seconds, "bubble": bubble(num_devices, number, took),
        "planned_bubble": bubble(num_devices, number, plan.step.step_seconds),
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    print(
        "| devices | K | micro-batches | step | layers alone | planned | measured | over planned | most stashes "
        "| idle, planned | idle |"
    )
    print("|---" * 11 + "|")
    for row in rows:
        is_slots = row["question"] == "slots"
        print(
            f"| {row['devices']} | {row['slots'] or '-'} | {row['micro_batches']} | {row['step']} "
            f"| {row['layers_alone_seconds']:.2f} s | {row['planned_seconds']:.2f} s "
            f"| {statistics.median(row['seconds']):.2f} s "
            f"| {row['over_planned']:.3f} | {row['most_stashes'] if is_slots else '-'} "
            f"| {'-' if is_slots else format(row['planned_bubble'], '.1%')} "
            f"| {'-' if is_slots else format(row['bubble'], '.1%')} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="make the plans, and run nothing")
    parser.add_argument("--measure", action="store_true", help="what the engine takes for an operation")
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 5, 8], help="for which plans are made")
    parser.add_argument("--planning-seconds", type=float, default=30.0, help="of the processor, for each plan")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    arguments = parser.parse_args()
    if arguments.plan:
        for num_devices in arguments.devices:
            for key, plan in all_plans(num_devices, arguments.planning_seconds).items():
                assert key in keys_of(num_devices)
                file_of(key, num_devices).parent.mkdir(exist_ok=True)
                plan.save(file_of(key, num_devices))
                print(*key, f"{plan.step_seconds / UNIT_SECONDS:.0f} units", flush=True)
        return
    import deepspeed
    import torch.distributed as dist
    from interleaved import environment

    torch.set_num_threads(1)
    deepspeed.init_distributed()
    if arguments.measure:
        num_devices = dist.get_world_size()
        questions = dict.fromkeys(question for question, *_ in keys_of(num_devices))
        found = {each: measured_operation_seconds(each, arguments.rounds) for each in questions}
        if dist.get_rank() == 0:
            PLANS.mkdir(exist_ok=True)
            measured_file(num_devices).write_text(json.dumps(found) + "\n")
            print(*(f"{question}: {1e3 * seconds:.2f} ms" for question, seconds in found.items()))
    rows: list[dict[str, Any]] = []
    for key in () if arguments.measure else keys_of(dist.get_world_size()):
        rows.append(measured(key, arguments.rounds))
        if dist.get_rank() == 0 and arguments.save:
            path = HERE / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    if rows and dist.get_rank() == 0:
        show(rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
