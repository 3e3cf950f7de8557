"""What it gains to know links in levels, and unlike devices, on the four networks of the MadPipe paper.

Eight devices are planned for twice: as they are, and as if every link and device were the slowest. The contiguous
allocation of the shortest period is compared, with recomputation where that helps.
"""

from __future__ import annotations

from pathlib import Path

from deepspeed_partition import Chain, InfeasibleError, Platform, make_plan
from deepspeed_partition.planner.machines import DeviceGroup, LinkLevel, Machines

VISION = Path(__file__).parents[2] / "profiles" / "vision"
NETWORKS = ("resnet-50", "resnet-101", "inception-v3", "densenet-121")
MEMORY_GB = (6, 10, 16)
NODES = (LinkLevel(group=4, bandwidth=24e9), LinkLevel(bandwidth=3e9))


def machines_of(memory_bytes: int) -> dict[str, tuple[Machines, Machines]]:
    """Return machines as they are, and as slow as their slowest part, by what is unlike in them."""
    alike = (DeviceGroup(count=8, memory_bytes=memory_bytes),)
    mixed = (
        DeviceGroup(count=4, memory_bytes=memory_bytes),
        DeviceGroup(count=4, memory_bytes=memory_bytes, speed=0.5),
    )
    slow = (DeviceGroup(count=8, memory_bytes=memory_bytes, speed=0.5),)
    slowest = NODES[1:]
    return {
        "two nodes": (Machines(devices=alike, links=NODES), Machines(devices=alike, links=slowest)),
        "two nodes, one half as fast": (
            Machines(devices=mixed, links=NODES),
            Machines(devices=slow, links=slowest),
        ),
    }


def print_gains(time_limit_seconds: float) -> None:
    """Print the period with the slowest links and devices, divided by the period as they are, in Markdown."""
    print("| machines | network | " + " | ".join(f"{size} GB" for size in MEMORY_GB) + " |")
    print("|---|---|" + "---|" * len(MEMORY_GB))
    for kind in machines_of(1):
        for network in NETWORKS:
            chain = Chain.load(VISION / f"{network}.json")
            cells = []
            for size in MEMORY_GB:
                periods = [
                    period_of(chain, machines, time_limit_seconds) for machines in machines_of(size * 10**9)[kind]
                ]
                both = periods[0] is not None and periods[1] is not None
                cells.append(f"{periods[1] / periods[0]:.2f}" if both else "none fits")
            print(f"| {kind} | {network} | {' | '.join(cells)} |", flush=True)


def period_of(chain: Chain, machines: Machines, time_limit_seconds: float) -> float | None:
    """Return the seconds of the shortest period; None where nothing fits."""
    try:
        plan = make_plan(chain, Platform.on(machines), "contiguous", time_limit_seconds=time_limit_seconds)
    except InfeasibleError:
        return None
    return plan.period_seconds
