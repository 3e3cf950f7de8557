"""Runs under torchrun: ranks profile together. Rank 0 writes what test_profile_ranks.py looks at."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_partition.profiling import (
    arrivals,
    layer_profiles,
    links,
    measure_links,
    measure_operations,
    measure_stage,
    profile_chain,
)
from deepspeed_partition.profiling.links import SMALL_BYTES, _another, _shared_seconds
from tests.profiling.networks import networks
from tests.profiling.seen import noting

QUICK = {"warm_up": 1, "repeats": 1, "device": "cpu"}
SIZES = (
    "name",
    "type",
    "weight_bytes",
    "output_bytes",
    "stash_bytes",
    "transient_bytes",
    "num_trainable_parameters",
)


def sizes(chain: Any) -> dict[str, Any]:
    layers = [{key: getattr(layer, key) for key in SIZES} for layer in chain.layers]
    return {"input_bytes": chain.input_bytes, "layers": layers}


def everywhere(value: Any) -> list[Any]:
    """The value of each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def message_of(call: Any) -> str:
    try:
        call()
    except (ValueError, MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def shared_sizes() -> dict[str, Any]:
    """Of all networks, measured together."""
    found = {}
    for name, (layers, x) in networks().items():
        chain = profile_chain(layers, x, **QUICK)
        found[name] = {"sizes": sizes(chain), "digests": everywhere(chain.digest())}
    return found


def whole_and_staged() -> dict[str, Any]:
    """The way of the pipeline engine: each rank has its own layers and hands its output on."""
    layers, x = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh()], torch.randn(5, 8)
    rank, half = dist.get_rank(), 2
    if rank == 0:
        measured, outputs = measure_stage(layers[:half], x, **QUICK)
        dist.send(outputs.detach(), dst=1)
    elif rank == 1:
        outputs = torch.empty(5, 16)
        dist.recv(outputs, src=0)
        measured, _ = measure_stage(layers[half:], outputs, first_stage=False, first_index=half, **QUICK)
    else:
        measured = []
    parts = everywhere(measured)
    return {"stashes": [layer.stash_bytes for layer in layer_profiles([m for part in parts for m in part])]}


def who_measured() -> list[list[int]]:
    """Which of 5 layers each rank spent its repeats on; a hand-over runs a layer once."""
    name, seen = noting()

    def counting(index: int) -> Any:
        def layer(x: torch.Tensor) -> torch.Tensor:
            sys.audit(name, index)
            return x + 1

        return layer

    profile_chain([counting(index) for index in range(5)], torch.zeros(5, 8), **QUICK)
    return everywhere([index for index in range(5) if seen.count(index) > 1])


def errors() -> dict[str, list[str]]:
    x = torch.zeros(5, 8)

    def exhausted(x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("all gone")

    class Untrainable(nn.Module):
        def train(self, mode: bool = True) -> Any:
            raise KeyError("no mode")

    return {
        "unforeseen": everywhere(message_of(lambda: profile_chain([nn.ReLU(), Untrainable()], x, **QUICK))),
        "first layer": everywhere(message_of(lambda: profile_chain([nn.Linear(9, 8), nn.ReLU()], x, **QUICK))),
        "last layer": everywhere(message_of(lambda: profile_chain([nn.ReLU(), nn.Linear(9, 8)], x, **QUICK))),
        "no memory": everywhere(message_of(lambda: profile_chain([nn.ReLU(), exhausted], x, **QUICK))),
    }


def of_a_subgroup() -> dict[str, Any]:
    """The last two ranks profile by themselves; then each rank by itself."""
    world = dist.get_world_size()
    ranks = [world - 2, world - 1]
    group = dist.new_group(ranks)
    alone = [dist.new_group([rank]) for rank in range(world)][dist.get_rank()]
    found: Any = None
    if dist.get_rank() in ranks:
        chains = {name: profile_chain(*network, group=group, **QUICK) for name, network in networks().items()}
        link = measure_links(group)
        found = {
            "sizes": {name: sizes(chain) for name, chain in chains.items()},
            "digests": {name: chain.digest() for name, chain in chains.items()},
            "bandwidth": link.bandwidth,
            "latency_seconds": link.latency_seconds,
        }
    single = message_of(lambda: measure_links(alone))
    own = profile_chain([nn.Linear(8, 8)], torch.zeros(5, 8), group=alone, **QUICK)
    return {"found": everywhere(found), "single": everywhere(single), "own": own.num_layers}


def on_one_rank() -> dict[str, Any]:
    """The first rank calls it alone; then by the way out that it is told; then all together."""
    said: list[str] = []
    sentence = of_links = own = None
    network = [nn.Linear(8, 8)], torch.zeros(5, 8)
    if dist.get_rank() == 0:
        with (
            patch.object(arrivals, "SAID_AFTER_SECONDS", 0.05),
            patch.object(arrivals, "ENDS_AFTER_SECONDS", 0.2),
            patch.object(arrivals.logger, "warning", said.append),
        ):
            sentence = message_of(lambda: profile_chain(*network, **QUICK))
            of_links = message_of(measure_links)
        alone = dist.new_group([0], use_local_synchronization=True)
        own = profile_chain(*network, group=alone, **QUICK).num_layers
    dist.barrier()
    return {
        "said": said,
        "sentence": sentence,
        "of links": of_links,
        "own": own,
        "all": profile_chain(*network, **QUICK).num_layers,
    }


def at_a_busy_start() -> float:
    """The latency where small messages take milliseconds at first."""
    small = iter([2e-3, 5e-5] * 2)

    def seconds(num_bytes: int, *others: Any) -> float:
        return next(small) if num_bytes == SMALL_BYTES else 0.1

    with patch.object(links, "_one_way_seconds", seconds):
        return measure_links().latency_seconds


def main(path: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    begin = time.perf_counter()
    link = measure_links()
    links_seconds = time.perf_counter() - begin
    last = dist.get_world_size() - 1
    flows = [(0, last), (last, 0), (0, 1), (last, 1)]
    report = {
        "links": everywhere((link.bandwidth, link.latency_seconds)),
        "sharing": everywhere((link.duplex, link.port_bandwidth, link.devices_per_port)),
        "flows": everywhere(_shared_seconds(flows, 100_000, None, torch.device("cpu"))),
        "links_seconds": links_seconds,
        "busy start": everywhere(at_a_busy_start()),
        "one other group": everywhere(_another(None) is _another(None)),
        "operations": everywhere(astuple(measure_operations())),
        "operations_on_gpus": everywhere(astuple(measure_operations(device="cuda"))),
        "networks": shared_sizes(),
        "who": who_measured(),
        "staged": whole_and_staged(),
        "errors": errors(),
        "subgroup": of_a_subgroup(),
        "on one rank": on_one_rank(),
        "few": everywhere(sizes(profile_chain([nn.Linear(8, 8)], torch.zeros(5, 8), **QUICK))),
    }
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            json.dump(report, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
