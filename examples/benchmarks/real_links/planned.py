"""Which step does the planner choose where messages share ports, and how long do others take? Nothing runs.

    python examples/benchmarks/real_links/planned.py

The chain and the links of ``main.py``: four hosts with a port each, 16 micro-batches. Beside the planned step
are 1F1B at DeepSpeed's depth, about twice as deep, and all forwards first (GPipe), one layer per host, with room
for two tensors at each end of a boundary, and for 16.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.planner.step import one_f_one_b_order
from deepspeed_partition.schedule.shared_ports import shared_step_seconds

NUM_HOSTS, NUM_MICRO_BATCHES, FORWARD_SECONDS = 4, 16, 0.02
LATENCY_SECONDS = 2e-4
LINKS = {"1 Gbit/s": (118e6, (1.0, 4.0)), "100 Mbit/s": (12e6, (0.5, 1.0, 4.0))}
"""Bytes per second, as they were measured, and megabytes of activations."""
DEPTHS = {
    "same depth": [NUM_HOSTS - stage for stage in range(NUM_HOSTS)],
    "deep": [2 * (NUM_HOSTS - stage) - 1 for stage in range(NUM_HOSTS)],
    "all forwards first": [NUM_MICRO_BATCHES] * NUM_HOSTS,
}


def even_chain(num_bytes: int) -> Chain:
    layer = LayerProfile(
        name="sleeping", forward_seconds=FORWARD_SECONDS, backward_seconds=2 * FORWARD_SECONDS, weight_bytes=4,
        output_bytes=num_bytes, num_trainable_parameters=1,
    )  # fmt: skip
    return Chain(name="even", input_bytes=num_bytes, layers=(layer,) * NUM_HOSTS)


def in_order(chain: Chain, platform: Platform, depths: list[int]) -> Plan:
    """Return a plan of one layer per host under 1F1B of given depths."""
    one_each = list(range(NUM_HOSTS + 1))
    plan = make_plan(chain, platform, one_each, num_micro_batches=NUM_MICRO_BATCHES)
    assert plan.step is not None
    order = tuple(one_f_one_b_order(stage, depth, NUM_MICRO_BATCHES) for stage, depth in enumerate(depths))
    return replace(plan, step=replace(plan.step, order=order))


def main() -> None:
    table = Table(title="Seconds of a step where messages share ports; of the planned one as planned, too")
    for name in ("link", "MB per activation", *DEPTHS, "planned", "as planned", "room", "layers of hosts"):
        table.add_column(name, justify="right")
    for link, (bandwidth, sizes) in LINKS.items():
        for megabytes in sizes:
            chain = even_chain(round(megabytes * 1e6))
            platform = Platform(
                num_devices=NUM_HOSTS, memory_bytes=10**12, bandwidth=bandwidth, latency_seconds=LATENCY_SECONDS,
                duplex="full", port_bandwidth=bandwidth,
            )  # fmt: skip
            planned = make_plan(chain, platform, num_micro_batches=NUM_MICRO_BATCHES)
            cells = []
            for depths in DEPTHS.values():
                both = [in_order(chain, each, depths) for each in (platform, replace(platform, comm_buffers=16))]
                cells.append(" / ".join(f"{shared_step_seconds(plan):.2f}" for plan in both))
            cells += [f"{shared_step_seconds(planned):.2f}", f"{planned.step_seconds:.2f}"]
            counts = " ".join(str(stop - start) for start, stop in (stage.layers for stage in planned.stages))
            room = str(planned.platform.comm_buffers)
            table.add_row(link, f"{megabytes:g}", *cells, room, counts)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
