"""Steps predicted beside steps that others measured, on GPUs, with the cuts that they chose.

AMP (D. Li et al., NeurIPS 2022) published the times of the layers of a GPT-2 with 24 blocks on two kinds of GPU,
the links of two clusters of 16 of them, and the steps of DeepSpeed's engine on them for many numbers of pipelines,
cuts and micro-batches; ``measured_elsewhere.json`` has those without tensor parallelism. Backwards take twice the
time of forwards there, and a micro-batch of b samples b times as long as one, so here, too. Nothing is fitted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_partition import Chain, LayerProfile, Platform, make_plan
from deepspeed_partition.planner.cluster.sharded_steps import sharded_step
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines

DATA = Path(__file__).with_suffix(".json")
HIDDEN, SEQUENCE, VOCABULARY, BLOCKS, NUMBER_BYTES = 1024, 1024, 52256, 24, 4
SAMPLES = 32
"""Samples of a step."""
ROOMY = 10**15
"""Bytes of a device: what did not fit did not end there, and is left out."""


def chain_of(forward_milliseconds: Sequence[float], micro_batch_size: int) -> Chain:
    """Return the layers as DeepSpeed cuts them, from the embedding to the loss."""
    kinds = ["embedding", "reshape", *["block"] * BLOCKS, "reshape", "norm", "head", "loss"]
    weights = {"embedding": HIDDEN * VOCABULARY, "block": 12 * HIDDEN**2, "head": HIDDEN * VOCABULARY}
    width = {"head": VOCABULARY}
    layers = []
    for number, (kind, forward) in enumerate(zip(kinds, forward_milliseconds, strict=True)):
        seconds = micro_batch_size * forward / 1000
        output = micro_batch_size * SEQUENCE * width.get(kind, HIDDEN) * NUMBER_BYTES
        layers.append(
            LayerProfile(
                name=f"{kind} {number}",
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
                weight_bytes=weights.get(kind, 0) * NUMBER_BYTES,
                output_bytes=NUMBER_BYTES if kind == "loss" else output,
                stash_bytes=output,
            )
        )
    return Chain(name="gpt2", input_bytes=8 * SEQUENCE * micro_batch_size, layers=tuple(layers))


def platform_of(cluster: str, layer_milliseconds: dict[str, list[float]]) -> tuple[Platform, list[float]]:
    """Return a cluster, and the times of the layers on its devices of speed 1."""
    t4, v100 = layer_milliseconds["T4"], layer_milliseconds["V100"]
    if cluster == "16 T4":
        return Platform(num_devices=16, memory_bytes=ROOMY, bandwidth=50e9 / 8, weight_copies=4), t4
    machines = Machines(
        devices=(
            DeviceGroup(count=12, name="V100", memory_bytes=ROOMY),
            DeviceGroup(count=4, name="T4", memory_bytes=ROOMY, speed=sum(v100) / sum(t4)),
        ),
        links=(LinkLevel(group=4, bandwidth=170e9 / 8), LinkLevel(bandwidth=10e9 / 8)),
    )
    return Platform.on(machines, weight_copies=4), v100


def predicted_seconds(chain: Chain, platform: Platform, row: dict[str, Any], num_micro_batches: int) -> float:
    """Return the step of a row, with its cuts."""
    if len(row["cuts"]) == 2:
        return sharded_step(chain, platform, num_micro_batches, 0).step_seconds
    plan = make_plan(
        chain,
        platform,
        row["cuts"],
        num_micro_batches=num_micro_batches,
        data_parallel=row["pipelines"],
        recompute="never",
    )
    assert plan.step is not None
    return plan.step.step_seconds


def print_beside_measured() -> None:
    """Print each row, and how far off predictions are, ours and the source's own, in Markdown."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    for cluster, rows in data["clusters"].items():
        platform, milliseconds = platform_of(cluster, data["layer_forward_milliseconds"])
        print(f"\n{cluster}\n")
        print("| pipelines x stages | samples of a micro-batch | measured there | predicted here | AMP's own |")
        print("|---|---|---|---|---|")
        steps = []
        for row in rows:
            size, stages = row["micro_batch_size"], len(row["cuts"]) - 1
            here = predicted_seconds(chain_of(milliseconds, size), platform, row, SAMPLES // size)
            measured, there = row["measured_seconds"], row["predicted_there_seconds"]
            steps.append((measured, here, there))
            print(
                f"| {row['pipelines']} x {stages} | {size} | {measured:.2f} s "
                f"| {here:.2f} s ({here / measured - 1:+.0%}) | {there:.2f} s ({there / measured - 1:+.0%}) |"
            )
        table = np.array(steps)
        for name, column in (("predicted here", 1), ("AMP's own", 2)):
            error, rank = np.abs(table[:, column] / table[:, 0] - 1).mean(), _rank_correlation(table, column)
            print(f"\n{name}: off by {error:.1%} in the mean, rank correlation {rank:.3f}")


def _rank_correlation(table: np.ndarray, column: int) -> float:
    """Return Spearman's rank correlation of a column with the first one."""
    ranks = [table[:, each].argsort().argsort() for each in (0, column)]
    return float(np.corrcoef(*ranks)[0, 1])
