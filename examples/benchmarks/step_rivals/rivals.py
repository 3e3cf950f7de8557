"""The best step of each published schedule on a chain and a platform, judged by the replay.

Each family of schedules (``FAMILIES``) is tried with every balanced cut (``rival_cuts.py``), with up to eight
chunks per device where it has chunks, without recomputation and with all stages recomputed. Where the order is
made by list scheduling, it is tried with several limits of the micro-batches on their way. A rival counts where
its peak fits into memory. The search for the best of a family is exhaustive: what is not judged is refuted by a
step that no engine can have (``least_seconds``, or the load of a device), or by bytes that any engine keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from judge import check, judged, plan_of, with_promises
from rival_cuts import Cuts, balanced_cuts
from rival_orders import (
    Costs,
    Orders,
    breadth_first,
    interleaved,
    kept_bytes,
    least_seconds,
    listed,
    one_f_one_b,
    there_and_back,
)

from deepspeed_partition import Chain, Plan, Platform

FAMILIES = ("1F1B", "GPipe", "interleaved", "there and back", "breadth first", "depth first")
MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class Rival:
    """One order on one cut, not yet made."""

    chain: Chain
    platform: Platform
    num_micro_batches: int
    family: str
    chunks: int
    cuts: Cuts
    devices: tuple[int, ...]
    recomputes: bool
    most_alive: int | None = None
    """Most micro-batches on their way, where the order is made by list scheduling."""

    @cached_property
    def costs(self) -> Costs:
        """Seconds of the stages."""
        held = [self.chain.layers[start:stop] for start, stop in pairwise(self.cuts)]
        forward = tuple(sum(layer.forward_seconds for layer in layers) for layers in held)
        again = forward if self.recomputes else (0.0,) * len(forward)
        backward = tuple(
            sum(layer.backward_seconds for layer in layers) + more
            for layers, more in zip(held, again, strict=True)
        )
        transfer = tuple(
            0.0 if before == after else self.platform.transfer_seconds(self.chain.boundary_bytes(cut))
            for cut, (before, after) in zip(self.cuts[1:-1], pairwise(self.devices), strict=True)
        )
        return Costs(self.devices, forward, backward, transfer)

    @cached_property
    def load_seconds(self) -> float:
        """Seconds that the busiest device works: no order is faster."""
        load = [0.0] * self.platform.num_devices
        for device, forward, backward in zip(self.devices, self.costs.forward, self.costs.backward, strict=True):
            load[device] += forward + backward
        return max(load) * self.num_micro_batches

    @cached_property
    def orders(self) -> Orders | None:
        num_devices, number = self.platform.num_devices, self.num_micro_batches
        if self.family == "1F1B":
            return one_f_one_b(num_devices, number)
        if self.family in ("GPipe", "breadth first"):
            return breadth_first(num_devices, self.chunks, number)
        if self.family == "interleaved":
            return interleaved(num_devices, self.chunks, number)
        assert self.most_alive is not None
        return listed(self.costs, number, self.most_alive)

    def least_bytes(self) -> int:
        """Return bytes that some device needs in this order, whatever the engine."""
        assert self.orders is not None
        weights = [0] * self.platform.num_devices
        stash = []
        for (start, stop), device in zip(pairwise(self.cuts), self.devices, strict=True):
            layers = self.chain.layers[start:stop]
            weights[device] += sum(layer.weight_bytes for layer in layers)
            kept = sum(self.chain.stash(layer) for layer in layers)
            stash.append(self.chain.boundary_bytes(start) if self.recomputes else kept)
        return max(
            self.platform.weights_bytes(held) + kept_bytes(order, stash)
            for held, order in zip(weights, self.orders, strict=True)
        )

    def plan(self) -> Plan:
        assert self.orders is not None
        return plan_of(
            self.chain, self.platform, self.cuts, self.devices, self.orders, self.num_micro_batches,
            recomputes=self.recomputes,
        )  # fmt: skip


def rivals_of(chain: Chain, platform: Platform, num_micro_batches: int, family: str) -> Iterator[Rival]:
    """Yield the rivals of a family."""
    num_devices = platform.num_devices
    if family in ("1F1B", "GPipe"):
        all_chunks: Sequence[int] = (1,)
    elif family == "there and back":
        all_chunks = (2,)
    else:
        all_chunks = range(2 if family == "breadth first" else 1, MOST_CHUNKS + 1)
    for chunks in all_chunks:
        num_stages = chunks * num_devices
        devices = tuple(stage % num_devices for stage in range(num_stages))
        if family == "there and back":
            devices = there_and_back(num_devices, num_stages)
        alive: Sequence[int | None] = (None,)
        if family in ("there and back", "depth first"):
            wanted = {
                1, 2, num_devices // 2, num_devices, num_devices + 1, 3 * num_devices // 2, 2 * num_devices,
                3 * num_devices, num_micro_batches,
            }  # fmt: skip
            alive = sorted({min(each, num_micro_batches) for each in wanted if each})
        for cuts in balanced_cuts(chain, devices):
            for recomputes in (False, True):
                for most_alive in alive:
                    yield Rival(
                        chain=chain,
                        platform=platform,
                        num_micro_batches=num_micro_batches,
                        family=family,
                        chunks=chunks,
                        cuts=cuts,
                        devices=devices,
                        recomputes=recomputes,
                        most_alive=most_alive,
                    )


@dataclass(frozen=True)
class Winner:
    """The best of a family, with what the replay finds."""

    rival: Rival
    step_seconds: float
    peak_bytes: int


def best_of(chain: Chain, platform: Platform, num_micro_batches: int, family: str) -> Winner | None:
    """Return the best rival of a family that fits into memory; None where none does."""
    best: Winner | None = None
    rivals = rivals_of(chain, platform, num_micro_batches, family)
    for rival in sorted(rivals, key=lambda each: (each.load_seconds, each.chunks)):
        if best is not None and rival.load_seconds >= best.step_seconds:
            break
        if rival.orders is None or rival.least_bytes() > platform.memory_bytes:
            continue
        least = least_seconds(rival.costs, rival.orders, num_micro_batches)
        # Floats: sums in another order differ in the last digits.
        if least is None or (best is not None and least >= best.step_seconds * (1 + 1e-9)):
            continue
        found = judged(rival.plan(), chain)
        if found is None or found.peak_bytes > platform.memory_bytes:
            continue
        if best is None or found.step_seconds < best.step_seconds:
            best = Winner(rival, found.step_seconds, found.peak_bytes)
    if best is not None:
        agreed = check(with_promises(best.rival.plan(), chain), chain)
        assert (agreed.step_seconds, agreed.peak_bytes) == (best.step_seconds, best.peak_bytes)
    return best


def plain_1f1b_bytes(chain: Chain, platform: Platform, num_micro_batches: int) -> int:
    """Return the least bytes per device that 1F1B needs on a balanced cut, without recomputation."""
    roomy = replace(platform, memory_bytes=2**60)
    found = [
        judged(rival.plan(), chain)
        for rival in rivals_of(chain, roomy, num_micro_batches, "1F1B")
        if not rival.recomputes
    ]
    return min(each.peak_bytes for each in found if each is not None)
