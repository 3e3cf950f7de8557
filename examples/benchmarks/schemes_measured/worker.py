"""What each host runs (``main.py`` starts it): collectives, then some steps of each scheme of each case."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_partition import Platform
from deepspeed_partition.planner.cluster.scheme_choice import SchemeChoice, rank_schemes
from deepspeed_partition.planner.cluster.sharded_steps import GLOO
from deepspeed_partition.planner.io.files import write_json
from deepspeed_partition.profiling import measure_links, measure_operations

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from chains import CASES, MICRO_BATCHES, Case
from interleaved import engine_for_plan, environment

KILOBYTES = (64, 256, 1024, 4096)
REPEATS = 5
LEARNING_RATE = 1e-4
Step = Callable[[], object]


def main() -> None:
    """Measure, and let the first rank write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", required=True)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    # As a run of ours measures them.
    link = asdict(measure_links()) | asdict(measure_operations())
    data = {
        "environment": environment(),
        "link": link,
        "collectives": collectives(platform_of(link)),
        "cases": [measured(case, link) for case in CASES if case.name in arguments.cases],
    }
    if dist.get_rank() == 0:
        write_json(arguments.output, data)
    dist.barrier()
    dist.destroy_process_group()


def platform_of(link: dict[str, Any], memory_bytes: int = 10**12, **others: Any) -> Platform:
    """Return the platform with the links, and the costs of operations, as they were measured."""
    return Platform(num_devices=dist.get_world_size(), memory_bytes=memory_bytes, **link, **others)


def collectives(platform: Platform) -> list[dict[str, Any]]:
    """Return the seconds of each collective beside those of the model."""
    rows, size = [], dist.get_world_size()
    for kilobytes in KILOBYTES:
        whole, part = torch.zeros(kilobytes * 256), torch.zeros(kilobytes * 256 // size)
        one = GLOO.ring_slowdown * (size - 1) * platform.transfer_seconds(4 * part.numel())
        peer = dist.get_rank() ^ 1

        def transfer(whole: torch.Tensor = whole, peer: int = peer) -> None:
            if dist.get_rank() % 2 == 0:
                dist.send(whole, peer)
            else:
                dist.recv(whole, peer)

        runs: dict[str, tuple[Step, float]] = {
            "transfer": (transfer, platform.transfer_seconds(4 * whole.numel())),
            "all-reduce": (lambda whole=whole: dist.all_reduce(whole), 2 * one),
            "all-gather": (lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part), one),
            "reduce-scatter": (
                lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
                GLOO.reduce_passes * one,
            ),
        }
        for name, (run, predicted) in runs.items():
            seconds = statistics.median([seconds_of(run) for _ in range(REPEATS + 1)][1:])
            rows.append(
                {"collective": name, "kilobytes": kilobytes, "seconds": seconds, "predicted_seconds": predicted}
            )
    return rows


def seconds_of(run: Step) -> float:
    """Return the seconds of something that all ranks do, on the slowest of them."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    lasted = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
    return float(lasted)


def measured(case: Case, link: dict[str, Any]) -> dict[str, Any]:
    """Return the schemes of a case: seconds of a step and memory, as predicted and as measured."""
    platform = platform_of(link, case.memory_bytes, weight_copies=case.weight_copies, fixed_bytes=case.fixed_bytes)
    ranking: list[Any] = [None]
    if dist.get_rank() == 0:
        found = rank_schemes(
            case.chain, [platform], MICRO_BATCHES, recompute="never", time_limit_seconds=6, collectives=GLOO
        )
        ranking = [found.choices]
    dist.broadcast_object_list(ranking, 0)
    choices = {choice.scheme: choice for choice in ranking[0]}
    rows = []
    for name, make in (("DDP", ddp), ("ZeRO-3", fsdp), ("MadPipe 1 x 4", pipeline)):
        choice = choices[name]
        step, destroy, memory = built(make, case, choice)
        seconds = [seconds_of(step) for _ in range(case.rounds + 1)][1:]
        rows.append(
            {
                "scheme": name, "predicted_seconds": choice.step_seconds, "seconds": statistics.median(seconds),
                "all_seconds": seconds, "predicted_bytes": choice.memory_bytes, "memory_bytes": memory(),
            }
        )  # fmt: skip
        destroy()
        if dist.get_rank() == 0:
            print(case.name, rows[-1], flush=True)
    return {"case": case.name, "memory_bytes": case.memory_bytes, "schemes": rows}


def built(
    make: Callable[[Case, SchemeChoice], tuple[Step, Callable[[], None]]], case: Case, choice: SchemeChoice
) -> tuple[Step, Callable[[], None], Callable[[], int]]:
    """Return the step of a scheme, what ends it, and its peak of memory on the fullest rank."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    step, destroy = make(case, choice)

    def memory() -> int:
        peak = torch.tensor([_status("VmHWM") - before])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak)

    return step, destroy, memory


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def data_of(case: Case) -> Iterator[Any]:
    """Yield micro-batches without end."""
    return repeat((torch.zeros(1, case.output_numbers), torch.zeros(1)))


def loss_of(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return outputs.sum()


def ddp(case: Case, choice: SchemeChoice) -> tuple[Step, Callable[[], None]]:
    """Return torch's data parallelism; each layer is a bucket."""
    model = DistributedDataParallel(
        nn.Sequential(*case.layers()), bucket_cap_mb=0.001, gradient_as_bucket_view=True
    )
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=LEARNING_RATE)
    count = MICRO_BATCHES // dist.get_world_size()

    def step() -> None:
        data = data_of(case)
        for number in range(count):
            model.require_backward_grad_sync = number == count - 1
            loss_of(model(next(data)[0]), torch.zeros(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def fsdp(case: Case, choice: SchemeChoice) -> tuple[Step, Callable[[], None]]:
    """Return torch's FSDP2; each layer is a unit."""
    model = nn.Sequential(*case.layers())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=LEARNING_RATE)
    count = MICRO_BATCHES // dist.get_world_size()

    def step() -> None:
        data = data_of(case)
        for _ in range(count):
            loss_of(model(next(data)[0]), torch.zeros(1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def pipeline(case: Case, choice: SchemeChoice) -> tuple[Step, Callable[[], None]]:
    """Return our engine on the plan of the ranking."""
    assert choice.plan is not None
    parameters = {"lr": LEARNING_RATE} | ({"torch_adam": True} if case.optimizer == "Adam" else {})
    engine = engine_for_plan(
        case.layers(),
        choice.plan,
        MICRO_BATCHES,
        loss_of,
        optimizer={"type": case.optimizer, "params": parameters},
        gradient_clipping=0.0,
    )
    return lambda: engine.train_batch(data_of(case)), engine.destroy


if __name__ == "__main__":
    main()
