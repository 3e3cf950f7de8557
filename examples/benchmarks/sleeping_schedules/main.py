"""How far is a step from the shortest one of its own order, under our engine and under torch's schedules?

    torchrun --nproc_per_node=4 examples/benchmarks/sleeping_schedules/main.py --save [--rounds 2]
    torchrun --nproc_per_node=8 examples/benchmarks/sleeping_schedules/main.py --save [--rounds 2]
    python examples/benchmarks/sleeping_schedules/sleeping_report.py

A model of four layers per rank, all alike. They sleep, so that each of 8 ranks has a device of its own on any
machine; links sleep, too (``emulation.py``): a message is there when its tensor has been sent, its receive was
posted, its link has been free and the seconds of the link are over, whoever runs the schedule. Messages have 2 MB
(16 numbers where links take no time), which do travel between the processes meanwhile.

- ``madpipe``: our engine on the plan that madpipe finds for these times and links.
- ``MadPipe v=1``, ``v=2``, ``v=4``: our engine on so many stages per rank, which go round the ranks, in the order
  of torch's ``Schedule1F1B`` and ``ScheduleInterleaved1F1B``.
- ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, ``ScheduleInterleavedZeroBubble``: torch's. The last one splits
  backwards in two halves, which the layers here do alike.

A step of each in turn. The ideal of a row is what its order takes where nothing but layers and links takes time.
The ideal with the engine counts the processor time of the thread that computes, too, as it was in these steps:
what it takes between layers for each operation, and once for each step before the first layer and behind the last.
That with the queue counts, too, how long this thread waited for a processor there, as Linux counts it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.collectives import from_rank_0
from deepspeed_partition.planner.buffers import MORE_BUFFERS
from deepspeed_partition.planner.plan import PlannedStage

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "engine_cost")]
from emulation import Links, over
from interleaved import engine_for_plan, environment
from orders import orders_of
from simulated import simulated_step
from sleeping_report import report
from split_layers import Instant, SplitLayer
from torch_links import LinkedPipeline, actions_of, least_seconds

LAYERS_PER_RANK = 4
STAGES_PER_RANK = (1, 2, 4)
NUMBERS = {True: 2 * 2**20 // 4, False: 16}
"""Numbers of a message where links take time, and where they do not."""


@dataclass(frozen=True)
class Setting:
    """One model on one kind of links.

    Args:
        share: of the forward of a stage, where a rank has ``stages_per_rank``, that a message takes on its way.
    """

    stages_per_rank: int
    share: float
    layer_seconds: float
    num_micro_batches: int

    @property
    def stage_seconds(self) -> float:
        return self.layer_seconds * LAYERS_PER_RANK / self.stages_per_rank

    @property
    def link_seconds(self) -> float:
        return self.share * self.stage_seconds

    @property
    def numbers(self) -> int:
        return NUMBERS[self.share > 0]

    def chain(self, num_ranks: int) -> Chain:
        layer = LayerProfile(
            name="sleeping", forward_seconds=self.layer_seconds, backward_seconds=2 * self.layer_seconds,
            weight_bytes=4, output_bytes=4 * self.numbers, num_trainable_parameters=1,
        )  # fmt: skip
        # The first one has an anchor beside its weight, see ``SplitLayer``.
        first = replace(layer, weight_bytes=8, num_trainable_parameters=2)
        return Chain(name="even", input_bytes=4, layers=(first, *[layer] * (LAYERS_PER_RANK * num_ranks - 1)))

    def platform(self, num_ranks: int) -> Platform:
        seconds = max(self.link_seconds, 1e-9)
        return Platform(
            num_devices=num_ranks, memory_bytes=10**12, bandwidth=4 * self.numbers / seconds, duplex="full",
            comm_buffers=max(MORE_BUFFERS),  # as a run has in so much memory
        )  # fmt: skip

    def layers(self, num_ranks: int) -> list[SplitLayer]:
        return [
            SplitLayer(number, self.layer_seconds, 2 * self.layer_seconds, self.numbers)
            for number in range(LAYERS_PER_RANK * num_ranks)
        ]


@dataclass
class Contender:
    """One engine on one order."""

    name: str
    ideal: Callable[[float], float]
    """Returns what the order takes, in seconds, where each operation takes so many seconds beside its layers."""
    num_operations: float
    """Operations of a rank, in the mean."""
    step: Callable[[], Any]
    close: Callable[[], None]


@dataclass
class Taken:
    """What steps of a contender took."""

    seconds: list[float]
    """Of each step, on the slowest rank."""
    worked_seconds: float = 0.0
    """Processor time of the thread that computes, between layers, for each operation: mean of ranks and steps."""
    queued_seconds: float = 0.0
    """Time that it waited there for a processor, for each operation."""
    once_seconds: float = 0.0
    """Processor time before the first layer of a step and behind the last one."""


def interleaved(setting: Setting, num_ranks: int) -> Plan:
    """Return the plan whose stages go round the ranks, in the order of torch's schedules."""
    chain, platform = setting.chain(num_ranks), setting.platform(num_ranks)
    ends = [LAYERS_PER_RANK * rank for rank in range(num_ranks + 1)]
    number = setting.num_micro_batches
    plan = make_plan(chain, platform, ends, num_micro_batches=number, recompute="never")
    assert plan.step is not None
    size = LAYERS_PER_RANK // setting.stages_per_rank
    stages = tuple(
        PlannedStage(layers=(size * stage, size * (stage + 1)), device=stage % num_ranks, in_flight=number)
        for stage in range(num_ranks * setting.stages_per_rank)
    )
    orders = orders_of(num_ranks, setting.stages_per_rank, number)
    return replace(plan, stages=stages, step=replace(plan.step, order=orders))


def found(setting: Setting, num_ranks: int, seconds: float, operation_seconds: float) -> Plan:
    """Return the plan that madpipe finds for a step, which counts what the engine takes for an operation."""
    platform = replace(setting.platform(num_ranks), operation_seconds=operation_seconds)
    return make_plan(
        setting.chain(num_ranks), platform, "madpipe", recompute="never",
        num_micro_batches=setting.num_micro_batches, time_limit_seconds=seconds,
    )  # fmt: skip


def ours(name: str, setting: Setting, plan: Plan) -> Contender:
    num_ranks, number = dist.get_world_size(), setting.num_micro_batches
    chain = setting.chain(num_ranks)
    links = Links.of(plan, chain)
    links.half_duplex = False
    if not setting.share:
        links.seconds_of_cut = [0.0] * len(links.seconds_of_cut)
    engine = engine_for_plan(
        setting.layers(num_ranks),
        plan,
        number,
        lambda outputs, _: outputs.sum(),
        over(links),
        gradient_clipping=0.0,
    )
    data = repeat((torch.zeros(1, 1), torch.zeros(1)))

    def ideal(operation_seconds: float) -> float:
        platform = replace(plan.platform, operation_seconds=operation_seconds)
        return simulated_step(replace(plan, platform=platform), chain, number).step_seconds

    num_operations = 2 * number * len(plan.stages) / num_ranks
    return Contender(name, ideal, num_operations, lambda: engine.train_batch(data), engine.destroy)


def torchs(schedule: str, setting: Setting) -> Contender:
    num_ranks, number = dist.get_world_size(), setting.num_micro_batches
    num_stages = num_ranks * setting.stages_per_rank
    size = LAYERS_PER_RANK // setting.stages_per_rank
    layers = setting.layers(num_ranks)
    stages = [torch.nn.Sequential(*layers[size * stage : size * (stage + 1)]) for stage in range(num_stages)]
    pipeline = LinkedPipeline(schedule, stages, number, setting.link_seconds)
    if schedule == "Schedule1F1B":
        orders: Any = [
            [("F" if name[0] == "F" else "B", int(name[1:]), number) for name, number in order]
            for order in orders_of(num_ranks, 1, number)
        ]
    else:
        orders = actions_of(schedule, num_ranks, num_stages, number)

    def ideal(operation_seconds: float) -> float:
        return least_seconds(orders, setting.stage_seconds, setting.link_seconds, operation_seconds)

    num_operations = sum(map(len, orders)) / num_ranks
    name = f"{schedule} v={setting.stages_per_rank}"
    return Contender(name, ideal, num_operations, pipeline.step, pipeline.close)


def contenders(setting: Setting, planning_seconds: float) -> list[Contender]:
    num_ranks, stages_per_rank = dist.get_world_size(), setting.stages_per_rank
    same = from_rank_0(lambda: interleaved(setting, num_ranks))
    schedule = "Schedule1F1B" if stages_per_rank == 1 else "ScheduleInterleaved1F1B"
    mine = ours(f"MadPipe v={stages_per_rank}", setting, same)
    first = measured([mine], 1)[mine.name]
    beside = first.worked_seconds + first.queued_seconds
    plan = from_rank_0(lambda: found(setting, num_ranks, planning_seconds, beside))
    theirs = torchs(schedule, setting)
    for seconds in (0.0, beside):
        assert abs(mine.ideal(seconds) / theirs.ideal(seconds) - 1) < 1e-3, "two simulations of one order"
    return [ours("madpipe", setting, plan), mine, theirs, torchs("ScheduleInterleavedZeroBubble", setting)]


def measured(contenders: list[Contender], rounds: int) -> dict[str, Taken]:
    """Return what each one's steps took, after a round that warms up."""
    found = {each.name: Taken([]) for each in contenders}
    part = 1 / (rounds * dist.get_world_size())
    for round_ in range(rounds + 1):
        for each in contenders:
            SplitLayer.work = None
            dist.barrier()
            began = Instant.now()
            each.step()
            ended, work = Instant.now(), SplitLayer.work
            assert work is not None, "each rank has layers"
            lasted = torch.tensor([ended.seconds - began.seconds], dtype=torch.float64)
            of_all = ended.worked_seconds - began.worked_seconds
            once = of_all - (work.end.worked_seconds - work.begin.worked_seconds)
            number = each.num_operations
            engine = [work.worked_seconds / number, work.queued_seconds / number, once]
            means = torch.tensor(engine, dtype=torch.float64)
            dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
            dist.all_reduce(means)
            if round_:
                taken, (worked, queued, once) = found[each.name], (part * means).tolist()
                taken.seconds.append(float(lasted))
                taken.worked_seconds += worked
                taken.queued_seconds += queued
                taken.once_seconds += once
    return found


def save(path: Path, first: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write lines into a file, in the place of those of the same settings; those of other settings stay."""
    settings = {(line["share"], line["stages_per_rank"]) for line in lines}
    before = [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.exists() else []
    others = [line for line in before if (line["share"], line["stages_per_rank"]) not in settings]
    every = sorted(others + lines, key=lambda line: (line["share"], line["stages_per_rank"]))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *every)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stages-per-rank", type=int, nargs="+", default=list(STAGES_PER_RANK))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.05, 0.25, 0.5])
    parser.add_argument(
        "--layer-ms", type=float, default=10.0, help="forward of a layer; a backward takes twice that"
    )
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--planning-seconds", type=float, default=2.0)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file; other settings stay")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    lines = []
    for share in arguments.shares:
        for stages_per_rank in arguments.stages_per_rank:
            setting = Setting(stages_per_rank, share, arguments.layer_ms / 1e3, arguments.micro_batches)
            taken = contenders(setting, arguments.planning_seconds)
            gc.collect()
            gc.freeze()  # to look for garbage among all that was imported takes a rank 0.2 s, each at another time
            figures = measured(taken, arguments.rounds)
            for each in taken:
                figure = figures[each.name]
                lines.append({
                    "engine": each.name, "ranks": dist.get_world_size(), "stages_per_rank": stages_per_rank,
                    "share": share, "link_ms": 1e3 * setting.link_seconds, "message_bytes": 4 * setting.numbers,
                    "layer_ms": arguments.layer_ms, "micro_batches": arguments.micro_batches,
                    "worked_seconds": figure.worked_seconds, "queued_seconds": figure.queued_seconds,
                    "once_seconds": figure.once_seconds, "seconds": figure.seconds,
                    "ideal_seconds": each.ideal(0.0),
                    "with_engine_seconds": each.ideal(figure.worked_seconds) + figure.once_seconds,
                    "with_queue_seconds":
                        each.ideal(figure.worked_seconds + figure.queued_seconds) + figure.once_seconds,
                })  # fmt: skip
                each.close()
            if dist.get_rank() == 0:
                report(lines[-len(taken) :])
    if dist.get_rank() == 0 and arguments.save:
        path = HERE / "results" / f"{dist.get_world_size()}_ranks_{date.today():%Y%m}.jsonl"
        save(path, {"environment": environment()}, lines)
        print(f"saved {path.name}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
