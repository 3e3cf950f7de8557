"""What takes no time is there for its instant: planner, replay and a checker written from the formats alone agree.

A stage may take no time at all (a layer too short for the clock, a node of a converted graph). Its transient
bytes, and the stash of its micro-batch, once counted in the plan and not for whoever wrote a checker of his own.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from deepspeed_partition import InfeasibleError, Platform, replay
from deepspeed_partition.planner.simulate.replay_step import run_step
from tests.exhaustive import some
from tests.planner.instances import chain, random_instance
from tests.planner.instances import plan_without_recomputation as make_plan

Span = tuple[Fraction, Fraction]


def there(spans: list[Span], now: Fraction) -> int:
    """How many are there at an instant: begun and not ended; what begins and ends at once is there just then."""
    return sum(begin <= now < end or begin == now == end for begin, end in spans)


def waiting(spans: list[Span], now: Fraction) -> int:
    """Tensors; one that is used the moment it comes has not waited."""
    return sum(begin <= now < end for begin, end in spans)


def peaks(
    plan: dict[str, Any], layers: list[dict[str, Any]], when: dict[str, list[Span]], *, steps: bool
) -> list[int]:
    """Bytes of each device at its peak, by the sentences of the formats, from plain data."""
    platform, stages = plan["platform"], plan["stages"]
    moments = {moment for spans in when.values() for span in spans for moment in span}
    found = []
    for device in range(platform["num_devices"]):
        mine = [index for index, stage in enumerate(stages) if stage["device"] == device]
        own = {index: layers[slice(*stages[index]["layers"])] for index in mine}
        kept = {
            index: sum(layer["stash_bytes"] for layer in own[index])
            + (own[index][-1].get("cut_stash_bytes", 0) if index < len(stages) - 1 else 0)
            for index in mine
        }
        names = [name for index in mine for layer in own[index] for name in layer.get("shared_weights", {})]
        weights, most = for_weights([layer for index in mine for layer in own[index]], platform)
        for now in moments:
            total = running = 0
            for index in mine:
                forward, backward = when[f"F{index}"], when[f"B{index}"]
                in_flight = [(f[0], b[1]) for f, b in zip(forward, backward, strict=True)]
                total += there(in_flight, now) * kept[index]
                come = [own_gradients(layer, names) if steps else 0 for layer in own[index]]
                is_first = steps and now < min(end for _, end in backward)
                total -= sum(come) if is_first else 0
                for spans, key in ((forward, "forward_running_bytes"), (backward, "running_bytes")):
                    if there(spans, now):
                        key = key if steps else "running_bytes"
                        gradients = come if is_first and spans is backward else [0] * len(come)
                        running = max(running, beyond(own[index], kept[index], key, gradients))
                for cut in (index - 1, index):
                    if 0 <= cut < len(stages) - 1:
                        num_bytes = layers[stages[cut]["layers"][1] - 1]["output_bytes"]
                        total += _at_cut(cut, cut == index, when, now, platform["comm_buffers"]) * num_bytes
            most = max(most, total + running)
        found.append(weights + platform.get("fixed_bytes", 0) + most)
    return found


def for_weights(layers: list[dict[str, Any]], platform: dict[str, Any]) -> tuple[int, int]:
    """What a device keeps for its weights, and what it needs at least besides: behind the last backward."""
    copies, seen, weights, kept = Fraction(str(platform["weight_copies"])), set[str](), 0, 0
    for layer in layers:
        again = sum(size for name, size in layer.get("shared_weights", {}).items() if name in seen)
        seen |= set(layer.get("shared_weights", {}))
        if "training_bytes" in layer:
            kept += layer["training_bytes"] - (layer["training_bytes"] * again // (layer["weight_bytes"] or 1))
        else:
            weights += layer["weight_bytes"] - again
    steps = [layer.get("optimizer_transient_bytes", 0) for layer in layers]
    stepping = sum(steps) if platform.get("optimizer_step") == "sum" else max(steps, default=0)
    return kept + math.ceil(copies * weights), max(
        stepping, sum(layer.get("reduction_bytes", 0) for layer in layers)
    )


def own_gradients(layer: dict[str, Any], names: list[str]) -> int:
    shared = layer.get("shared_weights", {})
    own = layer["weight_bytes"] - sum(size for name, size in shared.items() if names.count(name) > 1)
    return layer.get("gradient_bytes", 0) * own // (layer["weight_bytes"] or 1)


def beyond(layers: list[dict[str, Any]], kept: int, key: str, gradients: list[int]) -> int:
    """What a stage needs while it runs beyond what it keeps: at each layer, what has come up to it and its own."""
    most = up_to_it = 0
    for index, layer in enumerate(layers):
        if "running_bytes" in layer:
            come = sum(gradients[index + 1 :]) + min(gradients[index], layer.get("first_backward_bytes", 10**9))
            most = max(most, up_to_it + layer.get(key, layer["running_bytes"]) - kept + come)
        else:
            most = max(most, layer["transient_bytes"] + sum(gradients))
        up_to_it += layer["stash_bytes"]
    return most


def _at_cut(cut: int, above: bool, when: dict[str, list[Span]], now: Fraction, reserved: int) -> int:
    """Tensors that a device keeps at one end of a cut."""
    down, up = (when[f"F{cut}"], when[f"F{cut + 1}"]), (when[f"B{cut + 1}"], when[f"B{cut}"])
    if f"SF{cut}" not in when:  # both stages are on the device: counted once, above
        inside = [(one[1], other[0]) for one, other in (*zip(*down, strict=True), *zip(*up, strict=True))]
        return waiting(inside, now) if above else 0
    sent, returned = when[f"SF{cut}"], when[f"SB{cut}"]
    if above:
        pairs = [(f[1], s[1]) for f, s in zip(down[0], sent, strict=True)]
        pairs += [(s[0], b[0]) for s, b in zip(returned, up[1], strict=True)]
    else:
        pairs = [(s[0], f[0]) for s, f in zip(sent, down[1], strict=True)]
        pairs += [(b[1], s[1]) for b, s in zip(up[0], returned, strict=True)]
    return max(reserved, waiting(pairs, now))


def of_pattern(plan: dict[str, Any]) -> dict[str, list[Span]]:
    """When each operation runs, on so many micro-batches that one period in the middle is in steady state."""
    period = Fraction(repr(plan["period_seconds"]))
    begins = {
        row["operation"]: (
            row["shift"] * period + Fraction(repr(row["start_seconds"])), Fraction(repr(row["duration_seconds"]))
        )
        for row in plan["operations"]
    }  # fmt: skip
    count = 2 * math.ceil(max(begin + lasts for begin, lasts in begins.values()) / period) + 2
    return {
        name: [(begin + k * period, begin + k * period + lasts) for k in range(count)]
        for name, (begin, lasts) in begins.items()
    }


def of_step(plan, layers) -> dict[str, list[Span]]:
    timeline = run_step(plan, layers)
    assert not isinstance(timeline, str)
    names = {name for name, _ in timeline.operations}
    return {
        name: [tuple(map(Fraction, timeline.operations[name, k])) for k in timeline.micro_batches]  # type: ignore[misc]
        for name in names
    }


def agree(plan, layers) -> None:
    assert replay(plan, layers).violations == ()
    data = plan.to_dict()
    when = of_pattern(data) if plan.step is None else of_step(plan, layers)
    assert peaks(data, layers.to_dict()["layers"], when, steps=plan.step is not None) == list(
        plan.peak_memory_bytes
    )


ROOMY = Platform(num_devices=3, memory_bytes=1000, bandwidth=2.0**1000, weight_copies=1)


@pytest.mark.parametrize("num_micro_batches", [None, 4])
def test_by_hand(num_micro_batches):
    """The middle stage takes no time, forward or backward. While it runs it needs 70 bytes, and it keeps 5."""
    layers = chain([1, 0, 1], [1, 0, 1], stash=[1, 5, 1], transient=[0, 70, 0])
    plan = make_plan(layers, ROOMY, [0, 1, 2, 3], num_micro_batches=num_micro_batches)
    assert (plan.memory[1].transient, plan.peak_memory_bytes[1] % 5) == (70, 0)
    agree(plan, layers)
    last = chain([1, 0], [1, 0], stash=[1, 5], transient=[0, 70])
    plan = make_plan(last, ROOMY, [0, 1, 2], num_micro_batches=num_micro_batches)
    # The forward and the backward of the last stage, and with them its micro-batch, are one instant.
    assert (plan.stages[1].in_flight, plan.peak_memory_bytes[1]) == (1, 75)
    agree(plan, last)


def test_one_byte_less_has_no_room_for_the_instant():
    layers = chain([1, 0, 1], [1, 0, 1], weights=[90, 1, 90], transient=[0, 89, 0])
    tight = Platform(num_devices=3, memory_bytes=90, bandwidth=2.0**1000, weight_copies=1)
    assert make_plan(layers, tight, [0, 1, 2, 3]).peak_memory_bytes == (90, 90, 90)
    with pytest.raises(InfeasibleError):
        more = chain([1, 0, 1], [1, 0, 1], weights=[90, 1, 90], transient=[0, 90, 0])
        make_plan(more, tight)


def zeros(seed: int):
    """Layers half of which take no time, and need much while they run."""
    made, platform = random_instance(seed, most_layers=6, most_devices=3)
    dead = [index % 2 == seed % 2 and index > 0 for index in range(made.num_layers)]
    layers = [
        replace(layer, forward_seconds=0, backward_seconds=0, transient_bytes=9)
        if none
        else replace(layer, forward_seconds=layer.forward_seconds or 1)
        for none, layer in zip(dead, made.layers, strict=True)
    ]
    return replace(made, layers=tuple(layers)), platform


@pytest.mark.parametrize("num_micro_batches", [None, 3])
@pytest.mark.parametrize("algorithm", ["madpipe", "every layer", "contiguous"])
def test_a_checker_from_the_formats_agrees(algorithm, num_micro_batches):
    compared = 0
    for seed in range(some(60)):
        layers, platform = zeros(seed)
        wanted = range(layers.num_layers + 1) if algorithm == "every layer" else algorithm
        try:
            plan = make_plan(layers, platform, wanted, num_micro_batches=num_micro_batches)
        except (InfeasibleError, ValueError):
            continue
        agree(plan, layers)
        compared += 1
    assert compared >= some(10)
