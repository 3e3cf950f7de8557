"""Allocation and schedule in one integer linear program: every layer is on any device, its operations at any time.

Independent of the planner: layers are not grouped into stages, so a device may run something else between two of
its layers. For two devices, few layers and no proof of anything but a period.
"""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pulp

from deepspeed_partition import Chain, Platform

LONGEST_WAIT = 3
"""Periods that an operation may wait for the one before it; one would do."""


def best_period(chain: Chain, platform: Platform) -> float | None:
    """The shortest period in seconds, where what waits at cuts beyond the buffers is free; None: nothing fits."""
    layers, M = chain.layers, platform.memory_bytes
    total = chain.compute_seconds
    program = pulp.LpProblem("joint", pulp.LpMaximize)
    tau = pulp.LpVariable("tau", 1e-3, 1)  # the mean load of the two devices over the period
    program += tau

    def binary(name: str) -> Any:
        return pulp.LpVariable(name, cat=pulp.LpBinary)

    on = [0, *(binary(f"on_{l}") for l in range(1, len(layers)))]
    same: dict[tuple[int, int], Any] = {}
    for l, m in combinations(range(len(layers)), 2):
        s = same[l, m] = same[m, l] = binary(f"same_{l}_{m}")
        program += s <= 1 - on[l] + on[m]
        program += s <= 1 + on[l] - on[m]
        program += s >= on[l] + on[m] - 1
        program += s >= 1 - on[l] - on[m]
    cut = [1 - same[l, l + 1] for l in range(len(layers) - 1)]

    # The road: (kind, layer), and how long it takes as a share of the period.
    down: list[tuple[str, int]] = []
    length: dict[tuple[str, int], Any] = {}
    for l, layer in enumerate(layers):
        down.append(("F", l))
        length["F", l] = layer.forward_seconds / (total / 2) * tau
        length["B", l] = layer.backward_seconds / (total / 2) * tau
        if l < len(layers) - 1:
            down.append(("SF", l))
            sent = pulp.LpVariable(f"sent_{l}", 0, 1)  # tau where the tensor is sent
            program += sent >= tau + cut[l] - 1
            length["SF", l] = length["SB", l] = platform.transfer_seconds(layer.output_bytes) / (total / 2) * sent
    road = [*down, *((kind.replace("F", "B"), l) for kind, l in reversed(down))]
    at = {one: pulp.LpVariable(f"t_{one[0]}{one[1]}", 0, 1) for one in road}
    shift: dict[tuple[str, int], Any] = {road[0]: 0}
    program += at[road[0]] == 0
    for before, after in pairwise(road):
        wait = pulp.LpVariable(f"w_{after[0]}{after[1]}", 0, LONGEST_WAIT, pulp.LpInteger)
        shift[after] = shift[before] + wait
        program += at[after] + wait >= at[before] + length[before]

    first: dict[tuple[Any, Any], Any] = {}
    for one, other in combinations(road, 2):
        sends = len(one[0]) + len(other[0])
        if sends == 3:
            continue  # a link and a device
        if one[1] == other[1]:
            free: Any = 1 - cut[one[1]] if sends == 4 else 0
        elif sends == 4:
            free = 2 - cut[one[1]] - cut[other[1]]
        else:
            free = 1 - same[one[1], other[1]]
        y = first[one, other] = binary(f"y_{one[0]}{one[1]}_{other[0]}{other[1]}")
        first[other, one] = 1 - y
        program += at[other] - at[one] >= length[one] - (1 - y) - 2 * free
        program += at[one] - at[other] >= length[other] - y - 2 * free

    most = LONGEST_WAIT * len(road) + 1
    for l, event in ((l, kind) for l in range(len(layers)) for kind in "FB"):
        used: Any = layers[l].transient_bytes
        for m, layer in enumerate(layers):
            forward, backward, now = ("F", m), ("B", m), (event, l)
            begun = 1 if now == forward else first[forward, now]
            ended = 0 if now == backward else first[backward, now]
            count = shift[backward] - shift[forward] + begun - ended
            here = 1 if l == m else same[l, m]
            kept = pulp.LpVariable(f"k_{event}{l}_{m}", 0, most)
            program += kept >= count - most * (1 - here)
            used += chain.stash(layer) * kept + platform.weights_bytes(layer.weight_bytes) * here
        used += pulp.lpSum(
            platform.comm_buffers * layer.output_bytes * crossed
            for layer, crossed in zip(layers, cut, strict=False)
        )
        program += used <= M
    tolerances = {"primal_feasibility_tolerance": 1e-9, "mip_feasibility_tolerance": 1e-9}
    program.solve(pulp.HiGHS(msg=False, threads=1, gapRel=1e-7, **tolerances))
    if program.status == pulp.LpStatusInfeasible:
        return None
    assert program.sol_status == pulp.LpSolutionOptimal
    return total / 2 / tau.value()
