"""The independent replay: it accepts what is right and finds each thing that is wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan, replay
from deepspeed_partition.planner.plan import ChainReference, MemoryUse, PlannedStage
from deepspeed_partition.planner.schedule import PlacedOperation
from deepspeed_partition.planner.simulate.replay import replay_and_count
from tests.planner.instances import chain

MB = 10**6


def two_layers() -> Chain:
    costs = {"forward_seconds": 0.02, "backward_seconds": 0.04, "weight_bytes": 100 * MB, "output_bytes": 48 * MB}
    return Chain(
        name="two", input_bytes=48 * MB, layers=(LayerProfile(name="a", **costs), LayerProfile(name="b", **costs))
    )


def documented_plan() -> Plan:
    """The plan of the format's documentation, which no planner made: two stages at a period of 0.08 s."""
    operations = [
        ("F0", 0, None, 0.0, 0.02, 0), ("SF0", None, (0, 1), 0.02, 0.004, 0), ("F1", 1, None, 0.024, 0.02, 0),
        ("B1", 1, None, 0.044, 0.04, 0), ("SB0", None, (0, 1), 0.004, 0.004, 1), ("B0", 0, None, 0.02, 0.04, 1),
    ]  # fmt: skip
    return Plan(
        chain=ChainReference.of(two_layers()),
        platform=Platform(num_devices=2, memory_bytes=500 * MB, bandwidth=12e9),
        algorithm="by hand",
        period_seconds=0.08,
        lower_bound_seconds=0.06,
        gap=0.333,
        proved=False,
        stages=(
            PlannedStage(layers=(0, 1), device=0, in_flight=2, layer_names=("a",)),
            PlannedStage(layers=(1, 2), device=1, in_flight=1, layer_names=("b",)),
        ),
        operations=tuple(
            PlacedOperation(
                operation=name, device=device, link=link, start_seconds=start, duration_seconds=lasts, shift=shift
            )
            for name, device, link, start, lasts, shift in operations
        ),
        memory=(
            MemoryUse(weights=300 * MB, stash=96 * MB, buffers=96 * MB, transient=0),
            MemoryUse(weights=300 * MB, stash=48 * MB, buffers=96 * MB, transient=0),
        ),
        peak_memory_bytes=(492 * MB, 444 * MB),
    )


def test_the_documented_plan_is_right():
    found = replay(documented_plan(), two_layers())
    assert found.violations == ()
    assert found.in_flight == (2, 1)
    assert [use.total for use in found.memory] == [492 * MB, 444 * MB]


def moved(name: str, **changes) -> Plan:
    plan = documented_plan()
    return replace(
        plan, operations=tuple(replace(op, **changes) if op.operation == name else op for op in plan.operations)
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (moved("F1", start_seconds=0.02), "F1 starts at 0.02 s, before SF0 has ended at 0.024 s"),
        (moved("B0", shift=0), "B0 starts at 0.02 s, before SB0 has ended"),
        (moved("SB0", start_seconds=0.022), "the link 0-1 runs SF0 until 0.024 s and SB0 from 0.022 s"),
        (moved("B0", start_seconds=0.01), "device 0 runs F0 until 0.02 s and B0 from 0.01 s"),
        (moved("B1", start_seconds=0.07), "device 1 runs B1 until 0.11 s and F1 from 0.104 s"),
        (moved("B0", shift=3), "stage 0 has 4 micro-batches in flight and the plan says 2"),
        (moved("F0", duration_seconds=0.01), "F0 lasts 0.02 s and the plan says 0.01 s"),
        (moved("SF0", duration_seconds=0.001), "SF0 lasts 0.004 s and the plan says 0.001 s"),
        (moved("F0", shift=1), "F0 has shift 1, not 0"),
        (moved("F0", device=1), "F0 is on device 1, not on 0"),
        (moved("SF0", link=(1, 0)), r"SF0 is on link \(1, 0\), not on \(0, 1\)"),
        (moved("B1", start_seconds=0.08), "B1 starts at 0.08 s, not within the period"),
        (moved("F1", operation="F0"), "F0 stands twice"),
        (moved("F1", operation="F0"), "F1 is missing from the pattern"),
        (moved("F1", operation="F7"), "F7 is no operation of this allocation"),
        (
            replace(documented_plan(), peak_memory_bytes=(1, 444 * MB)),
            "device 0 needs 492000000 bytes and the plan says 1",
        ),
        (replace(documented_plan(), gap=0.1), "the gap to the lower bound is 0.3333"),
        (replace(documented_plan(), lower_bound_seconds=0.09), "below its lower bound"),
        (
            replace(documented_plan(), platform=Platform(num_devices=2, memory_bytes=450 * MB, bandwidth=12e9)),
            "device 0 needs 492000000 bytes in the pattern and has 450000000: 42000000 bytes short",
        ),
    ],
)
def test_what_breaks_is_found(plan, message):
    violations = replay(plan, two_layers()).violations
    assert any(re.search(message, violation) for violation in violations), violations


def test_a_longer_depth_needs_more_memory():
    deeper = moved("B0", shift=3)
    assert replay(deeper, two_layers()).memory[0].stash == 4 * 48 * MB


def test_a_tensor_that_waits_too_long_needs_another_buffer():
    """Sent two periods before it is used: three gradients at the receiver, where two tensors have room."""
    plan = moved("B0", shift=3)
    assert replay(plan, two_layers()).memory[0].buffers == 3 * 48 * MB


def recomputed(blocks) -> Plan:
    plan = documented_plan()
    first = replace(plan.stages[0], rematerialize=blocks)
    operations = tuple(
        replace(op, duration_seconds=0.06) if op.operation == "B0" else op for op in plan.operations
    )
    return replace(plan, stages=(first, plan.stages[1]), operations=operations)


@pytest.mark.parametrize("blocks", [True, ((0, 1),)])
def test_recomputation_keeps_the_input_and_pays_a_forward(blocks):
    """By the rule of the format: the input per micro-batch, the stash once while the backward runs."""
    layers = two_layers().layers
    heavy = Chain(
        name="two",
        input_bytes=48 * MB,
        layers=(replace(layers[0], stash_bytes=60 * MB), replace(layers[1], stash_bytes=48 * MB)),
    )
    plan = replace(recomputed(blocks), chain=ChainReference.of(heavy))
    found = replay(plan, heavy)
    assert not [violation for violation in found.violations if "lasts" in violation]
    assert (found.memory[0].stash, found.memory[0].transient) == (2 * 48 * MB, 12 * MB)


def test_stages_on_one_device_hand_over_without_transfers():
    """0-0-0-0 by hand: one device, four stages; a tensor between neighbours counts only while it waits."""
    made = chain([1, 1, 1, 1], [1, 1, 1, 1], outputs=[4, 4, 4, 4], input_bytes=4, weights=[1, 1, 1, 1])
    names = ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]

    def plan(starts, period, buffers):
        return Plan(
            chain=ChainReference.of(made),
            platform=Platform(num_devices=1, memory_bytes=1000, bandwidth=1),
            algorithm="by hand",
            period_seconds=period,
            lower_bound_seconds=8,
            gap=period / 8 - 1,
            proved=False,
            stages=tuple(PlannedStage(layers=(i, i + 1), device=0, in_flight=1) for i in range(4)),
            operations=tuple(
                PlacedOperation(operation=name, device=0, start_seconds=start, duration_seconds=1, shift=0)
                for name, start in zip(names, starts, strict=True)
            ),
            memory=(MemoryUse(weights=12, stash=16, buffers=buffers, transient=0),),
            peak_memory_bytes=(28 + buffers,),
        )

    assert replay(plan(range(8), 8, 0), made).violations == ()
    # The activation for the last stage waits for a second with three micro-batches: as much as four without.
    assert replay(plan([0, 1, 2, 4, 5, 6, 7, 8], 9, 0), made).violations == ()
    late = replay(plan([0, 1, 2, 3, 4, 5, 6, 6], 8, 0), made)
    assert any("device 0 runs" in violation for violation in late.violations)
    first_waits = chain([1, 1], [1, 1], outputs=[40, 4], input_bytes=4, stash=[4, 4])
    waiting = replace(
        plan(range(8), 8, 0),
        chain=ChainReference.of(first_waits),
        lower_bound_seconds=4,
        gap=0.25,
        period_seconds=5,
        stages=tuple(PlannedStage(layers=(i, i + 1), device=0, in_flight=1) for i in range(2)),
        operations=tuple(
            PlacedOperation(operation=name, device=0, start_seconds=start, duration_seconds=1, shift=0)
            for name, start in (("F0", 0), ("F1", 2), ("B1", 3), ("B0", 4))
        ),
        memory=(MemoryUse(weights=0, stash=4, buffers=40, transient=0),),
        peak_memory_bytes=(44,),
    )
    assert replay(waiting, first_waits).violations == ()


def test_the_terms_of_the_memory_are_compared_too():
    plan = documented_plan()
    swapped = MemoryUse(weights=96 * MB, stash=300 * MB, buffers=96 * MB, transient=0)
    violations = replay(replace(plan, memory=(swapped, plan.memory[1])), two_layers()).violations
    assert any("the peak of device 0 consists of" in violation for violation in violations)


def test_names_are_no_markup():
    layers = two_layers().layers
    made = Chain(name="[/b]:smile:", input_bytes=48 * MB, layers=(replace(layers[0], name="attn[q]"), layers[1]))
    text = make_plan(made, documented_plan().platform, [0, 1, 2]).summary()
    assert "[/b]:smile:" in text
    assert "attn[q]" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda order: [order[0][:-1], order[1]], "B0 of micro-batch 3 is missing from the order"),
        (lambda order: [order[0] + order[0][:1], order[1]], "does not stand once"),
        (lambda order: [order[1], order[0]], "does not stand once in the order of its device"),
        (lambda order: [order[0], order[1][::-1]], "waits forever for"),
        (
            lambda order: [order[0][:1] + order[0][2:3] + order[0][1:2] + order[0][3:], order[1]],
            "micro-batches in flight|takes",
        ),
    ],
)
def test_a_wrong_order_of_a_step_is_found(change, message):
    plan = make_plan(two_layers(), documented_plan().platform, [0, 1, 2], num_micro_batches=4)
    orders = tuple(tuple(order) for order in change([list(order) for order in plan.step.order]))
    wrong = replace(plan, step=replace(plan.step, order=orders))
    violations = replay(wrong, two_layers()).violations
    assert any(re.search(message, violation) for violation in violations), violations


def test_a_wrong_promise_of_a_step_is_found():
    plan = make_plan(two_layers(), documented_plan().platform, [0, 1, 2], num_micro_batches=4)
    wrong = replace(plan, step=replace(plan.step, step_seconds=0.1))
    assert any("one step takes" in violation for violation in replay(wrong, two_layers()).violations)


def without_counts(plan: Plan) -> Plan:
    """The plan with memory and micro-batches in flight left open."""
    nothing = (MemoryUse(weights=0, stash=0, buffers=0, transient=0),) * len(plan.memory)
    stages = tuple(replace(stage, in_flight=1) for stage in plan.stages)
    return replace(plan, stages=stages, memory=nothing, peak_memory_bytes=(0,) * len(nothing))


@pytest.mark.parametrize("num_micro_batches", [None, 4])
def test_what_is_counted_in_one_run_is_what_a_replay_finds(num_micro_batches):
    layers = two_layers()
    plan = make_plan(layers, documented_plan().platform, [0, 1, 2], num_micro_batches=num_micro_batches)
    counted, found = replay_and_count(without_counts(plan), layers)
    assert replace(counted, planning_seconds=plan.planning_seconds) == plan
    assert found == replay(plan, layers)
    assert found.violations == ()
    assert replay(without_counts(plan), layers).violations


def test_a_plan_that_cannot_run_is_not_counted():
    layers = two_layers()
    plan = make_plan(layers, documented_plan().platform, [0, 1, 2], num_micro_batches=4)
    order = plan.step.order
    stuck = without_counts(replace(plan, step=replace(plan.step, order=(order[0], order[1][::-1]))))
    same, found = replay_and_count(stuck, layers)
    assert same == stuck
    assert any("waits forever for" in violation for violation in found.violations)
