"""Does the engine take as long as the plan says, in a step and in steady state, whatever the plan?

    torchrun --nproc_per_node=4 examples/benchmarks/plan_vs_engine/main.py [--networks NAME ...] [--rounds 3]
        [--save]

The networks of the evaluation (``madpipe_vs_pipedream``) on 4 or 8 devices, where several stages on a device gain
most over a contiguous cut in its sweep. All times are stretched alike, and bandwidths with them: the layers sleep,
and messages take latency + bytes / bandwidth without the CPU, one at a time between two devices, as in plans.

- ``contiguous``, ``madpipe``: the plans of the shortest period; a step of theirs is the pattern, filled and
  drained.
- ``contiguous, step`` and ``madpipe, step``: the plans of the shortest step.

A step of each in turn. The period is taken from when micro-batches leave the pipeline in the middle of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, Plan, make_plan
from deepspeed_partition.engine.runtime.collectives import from_rank_0, gather_objects
from deepspeed_partition.planner.io.files import write_json

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "madpipe_vs_pipedream")]
from computed import computed_chains
from emulation import Links, SleepingLayer, over, sleeping_layers
from interleaved import engine_for_plan, environment, ratios, step_seconds
from simulated import rhythm, simulated_step
from sweep import Setting, counted

MICRO_BATCHES_PER_DEVICE = 4
SECONDS_PER_DEVICE = 0.15
"""Seconds of computation per device for one micro-batch, in the mean: so long that being late by a fraction of a
millisecond does not count."""
SETTINGS = {
    4: [("ResNet-50", "input", 6, 12), ("ResNet-101", "autograd", 11, 12), ("Inception-v3", "input", 5, 24),
        ("DenseNet-121", "input", 5, 12)],
    8: [("ResNet-50", "input", 12, 24), ("ResNet-101", "autograd", 13, 24), ("Inception-v3", "autograd", 9, 24),
        ("DenseNet-121", "input", 4, 24)],
}  # fmt: skip
"""Settings by the number of devices: the network, what its layers keep, GB per device, GB/s. They are those where
the sweep's period of madpipe is least against the contiguous one's."""
KINDS = ("contiguous", "madpipe", "contiguous, step", "madpipe, step")
TIME_LIMIT_SECONDS = 10.0


@dataclass(frozen=True)
class Promise:
    """What a plan says of a step."""

    step_seconds: float
    period_seconds: float


def stretched(chain: Chain, setting: Setting) -> tuple[Chain, Setting]:
    """Stretch the problem's times to slow motion."""
    factor = SECONDS_PER_DEVICE * setting.num_devices / chain.compute_seconds
    layers = tuple(
        replace(
            layer,
            name=f"sleeping {layer.name}",  # it has not the parameters of the one that was measured
            forward_seconds=layer.forward_seconds * factor,
            backward_seconds=layer.backward_seconds * factor,
        )
        for layer in chain.layers
    )
    return replace(chain, layers=layers), replace(setting, bandwidth_gb=setting.bandwidth_gb / factor)


def problem(
    network: str, kept: str, num_devices: int, memory_gb: float, bandwidth_gb: float
) -> tuple[Chain, Setting]:
    setting = Setting(
        network=network, kept=kept, num_devices=num_devices, memory_gb=memory_gb, bandwidth_gb=bandwidth_gb
    )
    [chain] = computed_chains([network])
    return stretched(counted(chain, kept), setting)


def plans_for(chain: Chain, setting: Setting) -> dict[str, Plan]:
    return {
        kind: make_plan(
            chain,
            setting.platform,
            kind.removesuffix(", step"),
            num_micro_batches=_num_micro_batches(setting.num_devices) if kind.endswith("step") else None,
            time_limit_seconds=TIME_LIMIT_SECONDS,
        )
        for kind in KINDS
    }


def _num_micro_batches(num_devices: int) -> int:
    return MICRO_BATCHES_PER_DEVICE * num_devices


def promise_of(plan: Plan, chain: Chain) -> Promise:
    """Return what a plan promises of a step. The period is the plan's own, if it has no step."""
    step = simulated_step(plan, chain, _num_micro_batches(plan.platform.num_devices))
    return Promise(
        step_seconds=step.step_seconds,
        period_seconds=rhythm(step.left_seconds) if plan.step else plan.period_seconds,
    )


def measured_periods(first_layer: SleepingLayer, num_micro_batches: int) -> list[float]:
    """Return the period of each step in seconds, from when micro-batches left the first layer; on every rank."""
    [naps] = [naps for naps in gather_objects(first_layer.naps["B"]) if naps]
    ends = [end for _, end in naps]
    return [rhythm(ends[at : at + num_micro_batches]) for at in range(0, len(ends), num_micro_batches)]


def rows_of(network: str, kept: str, memory_gb: float, bandwidth_gb: float, rounds: int) -> list[dict[str, Any]]:
    num_devices = dist.get_world_size()
    num_micro_batches = _num_micro_batches(num_devices)

    def planned() -> tuple[Chain, dict[str, Plan]]:
        chain, setting = problem(network, kept, num_devices, memory_gb, bandwidth_gb)
        return chain, plans_for(chain, setting)

    chain, plans = from_rank_0(planned)
    layers = {kind: sleeping_layers(chain, output_numel=1) for kind in plans}
    engines = {
        kind: engine_for_plan(
            layers[kind], plan, num_micro_batches, lambda outputs, _: outputs.sum(), over(Links.of(plan, chain))
        )
        for kind, plan in plans.items()
    }
    seconds = step_seconds(engines, lambda: repeat((torch.zeros(1, 1), torch.zeros(1))), rounds)
    slower = {
        "madpipe": ratios(seconds, to="madpipe")["contiguous"],
        "madpipe, step": ratios(seconds, to="madpipe, step")["contiguous, step"],
    }
    rows = []
    for kind, plan in plans.items():
        promise = promise_of(plan, chain)
        periods = measured_periods(layers[kind][0], num_micro_batches)[1:]  # without the warm-up
        rows.append({
            "network": network, "kept": kept, "num_devices": num_devices, "memory_gb": memory_gb,
            "bandwidth_gb": bandwidth_gb, "num_micro_batches": num_micro_batches, "plan": kind,
            "rounds": rounds, "environment": environment(),
            "boundaries": plan.boundaries, "devices": [stage.device for stage in plan.stages],
            "planned": asdict(promise),
            "measured": asdict(Promise(
                step_seconds=statistics.median(seconds[kind]),
                period_seconds=statistics.median(periods),
            )),
        })  # fmt: skip
        if kind in slower:
            contiguous = promise_of(plans[kind.replace("madpipe", "contiguous")], chain)
            rows[-1]["contiguous_takes"] = {
                "planned": contiguous.step_seconds / promise.step_seconds, "measured": slower[kind],
            }  # fmt: skip
    for engine in engines.values():
        engine.destroy()
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    title = "{num_devices} devices, {num_micro_batches} micro-batches: measured over planned".format(**rows[0])
    table = Table(title=title)
    for name in ("network", "plan", "devices of the stages", "step s", "step", "period s", "period",
                 "contiguous takes: planned", "measured"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("network", "plan") else "right")
    for row in rows:
        planned, gain = row["planned"], row.get("contiguous_takes")
        over_planned = {key: row["measured"][key] / planned[key] for key in planned}
        table.add_row(
            row["network"], row["plan"], " ".join(map(str, row["devices"])),
            *(entry for key in planned for entry in (f"{planned[key]:.3f}", f"{over_planned[key]:.3f}")),
            *((f"{gain['planned']:.2f}", f"{gain['measured']:.2f}") if gain else ("", "")),
        )  # fmt: skip
    Console(width=140).print(table)


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows; those that the file has of other networks stay."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    networks = {row["network"] for row in rows}
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"rows": [row for row in before if row["network"] not in networks] + rows})
    print(f"saved {path.name}")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    networks = [network for network, *_ in SETTINGS[4]]
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/ beside this file")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    num_devices = dist.get_world_size()
    if num_devices not in SETTINGS:
        sys.exit(f"main.py: there are settings for 4 and for 8 processes, not for {num_devices}")
    rows: list[dict[str, Any]] = []
    for network, *platform in SETTINGS[num_devices]:
        if network in arguments.networks:
            rows += rows_of(network, *platform, rounds=arguments.rounds)
            if dist.get_rank() == 0:
                report(rows)
    if dist.get_rank() == 0 and arguments.save:
        path = Path(__file__).parent / "results" / f"{num_devices}_devices_{date.today():%Y%m}.json"
        save(path, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
