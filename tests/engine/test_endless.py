"""Lists of a pipeline that never drains: complete, without circles, and with the versions that they say."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from deepspeed_partition import Chain, LayerProfile, Plan, Platform, make_plan
from deepspeed_partition.engine.runtime.boundary_shapes import bases_of
from deepspeed_partition.planner.errors import InfeasibleError, PlanMismatchError
from deepspeed_partition.planner.weight_versions import versions_in_order
from deepspeed_partition.schedule.dry_run import dry_run
from deepspeed_partition.schedule.endless import (
    EndlessBases,
    EndlessInstruction,
    EndlessProgram,
    EndlessRun,
    lower_endless,
)
from deepspeed_partition.schedule.instructions import Compute, LoweringError, Transfer, Update
from tests.engine import plans
from tests.exhaustive import some

EVEN = [0, 1, 2, 3, 4]
KINDS = ({}, {"two_versions": True}, {"two_versions": True, "puts_off": True}, {"runs_ahead": False})


def even_plan(num_devices: int, comm_buffers: int = 4) -> Plan:
    """One stage per device, all alike."""
    devices = range(num_devices)
    platform = plans.platform_of(num_devices, bandwidth=40.0, comm_buffers=comm_buffers)
    return plans.packed(plans.chain_of(num_devices), platform, range(num_devices + 1), devices)


def random_plan(pick: random.Random) -> tuple[Plan, int]:
    """A plan of stages in any order, and micro-batches of a batch."""
    num_devices, more = pick.choice([1, 2, 3, 4, 8]), pick.choice([0, 0, 1, 2, 3])
    devices = list(range(num_devices)) + [pick.randrange(num_devices) for _ in range(more)]
    pick.shuffle(devices)
    times = [(pick.randint(1, 3), pick.randint(1, 6)) for _ in devices]
    platform = plans.platform_of(
        num_devices, bandwidth=pick.choice([4.0, 8.0, 40.0]), comm_buffers=pick.choice([2, 4])
    )
    chain = plans.chain_of(len(devices), times)
    return plans.packed(chain, platform, range(len(devices) + 1), devices), pick.choice([1, 2, 3, 4, 8])


def segments_of(program: EndlessProgram, device: int, num_batches: int) -> list[list[EndlessInstruction]]:
    """The first segments of a device, and in the last place what it drains with."""
    run = EndlessRun(program, device, lambda number: number >= num_batches * program.num_micro_batches)
    return [*([*run.segment()] for _ in range(num_batches)), [*run.rest()]]


def shown(instructions: list[EndlessInstruction]) -> str:
    """Computations and updates alone."""
    return " ".join(str(each) for each in instructions if not isinstance(each, Transfer) and str(each)[0] != "G")


def test_two_even_stages_as_a_picture():
    program = lower_endless(even_plan(2), 2)
    assert program.ahead == 1
    first, second = ([shown(each) for each in segments_of(program, device, 3)] for device in (0, 1))
    assert first == ["F0.0 F0.1 B0.0", "F0.2 B0.1 U.0 F0.3 B0.2", "F0.4 B0.3 U.1 F0.5 B0.4", "B0.5 U.2"]
    assert second == ["F1.0 B1.0 F1.1", "B1.1 U.0 F1.2 B1.2 F1.3", "B1.3 U.1 F1.4 B1.4 F1.5", "B1.5 U.2"]


def test_without_running_ahead_no_segment_has_the_next_batch():
    program = lower_endless(even_plan(4), 4, runs_ahead=False)
    assert program.ahead == 0
    for device in range(4):
        for batch, segment in enumerate(segments_of(program, device, 5)[:-1]):
            numbers = [each.micro_batch for each in segment if isinstance(each, Compute)]
            assert max(numbers) < 4 * (batch + 1)
            forwards = [each.micro_batch for each in segment if str(each)[0] == "F"]
            assert forwards == list(range(4 * batch, 4 * batch + 4))


@pytest.mark.parametrize("seed", range(some(60)))
def test_any_number_of_micro_batches_fills_runs_and_drains(seed):
    """Whatever the plan: by the dry run, which shares nothing with what wrote the lists."""
    pick = random.Random(seed)
    try:
        plan, per_batch = random_plan(pick)
    except ValueError:
        return  # no pattern of these stages was found
    for kind in KINDS:
        try:
            program = lower_endless(plan, per_batch, **kind)
        except LoweringError as error:
            assert "does not repeat itself" in str(error) and (kind.get("two_versions") or per_batch < 4)
            continue
        for end in (1, per_batch, 3 * per_batch + 1, 6 * per_batch):
            lists = program.restricted(end)
            run = dry_run(lists)
            planned = [stage.in_flight for stage in plan.stages]
            assert all(found <= most for found, most in zip(run.in_flight, planned, strict=True))
            bases = EndlessBases(program)
            assert all(bases[message] == basis for message, basis in bases_of(lists).items())


def planned(pick: random.Random, mode: str) -> tuple[Plan, int]:
    """What the planner makes of times and messages as they are measured, and micro-batches of a batch."""
    num_devices, per_batch = pick.choice([2, 3, 4]), pick.randint(2, 16)
    spread, forward = pick.choice([0.0, 0.05, 0.3, 0.9]), 10 ** pick.uniform(-4, -1.5)
    layers = tuple(
        LayerProfile(
            name=f"layer {place}", forward_seconds=forward * pick.uniform(1 - spread, 1 + spread),
            backward_seconds=2 * forward * pick.uniform(1 - spread, 1 + spread), weight_bytes=1000,
            stash_bytes=10_000, output_bytes=int(10 ** pick.uniform(2, 4.5)),
        )
        for place in range(pick.choice([num_devices, num_devices + 2, 8]))
    )  # fmt: skip
    platform = Platform(
        num_devices=num_devices, memory_bytes=pick.choice([10**9, 60_000, 100_000, 200_000]),
        bandwidth=10 ** pick.uniform(6, 9.5), latency_seconds=pick.choice([0.0, 1e-4, 1e-3]),
        operation_seconds=pick.choice([0.0, 1e-4, 1e-3]), duplex=pick.choice(["half", "half", "full"]),
    )  # fmt: skip
    plan = make_plan(
        Chain(input_bytes=100, layers=layers), platform, pick.choice(["contiguous"] * 7 + ["madpipe"]),
        num_micro_batches=per_batch, weight_versions=mode, time_limit_seconds=1,
    )  # fmt: skip
    return plan, per_batch


@pytest.mark.parametrize("mode", ["stashing", "2bw", "vertical-sync"])
def test_whatever_is_planned_runs_without_a_drain(mode):
    """Without forwards ahead, and with updates that wait for a norm of all gradients, too."""
    tried = 0
    for seed in (*range(some(40)), 151, 168):  # the last two: turns on a link that never came to repeat
        try:
            plan, per_batch = planned(random.Random(seed), mode)
        except InfeasibleError:
            continue
        tried += 1
        two_versions = mode == "2bw"
        for puts_off, runs_ahead in itertools.product({False, two_versions}, (True, False)):
            program = lower_endless(
                plan, per_batch, two_versions=two_versions, puts_off=puts_off, runs_ahead=runs_ahead
            )
            run = dry_run(program.restricted(4 * per_batch + 1))
            most = [stage.in_flight for stage in plan.stages]
            assert all(found <= each for found, each in zip(run.in_flight, most, strict=True)), seed
            seconds = per_batch * plan.period_seconds
            assert program.batch_seconds >= 0.999 * seconds, seed
            assert program.batch_seconds == pytest.approx(seconds) or not runs_ahead, seed
    assert tried >= 8


@pytest.mark.parametrize("seed", range(some(20)))
def test_segments_wait_for_nothing_behind_the_same_cut(seed):
    """Else a rank that has come to the end of its segment would be waited for."""
    pick = random.Random(seed)
    try:
        plan, per_batch = random_plan(pick)
        programs = [lower_endless(plan, per_batch), lower_endless(plan, per_batch, runs_ahead=False)]
    except (ValueError, LoweringError):
        return
    for program in programs:
        parts = [segments_of(program, device, 4) for device in range(len(program.segments))]
        for num_segments in range(1, 5):
            done = [list(itertools.chain(*mine[:num_segments])) for mine in parts]
            both = {(each.kind, each.message) for mine in done for each in mine if isinstance(each, Transfer)}
            for kind, message in both:
                assert kind != "W" or ("S", message) in both
                assert kind != "D" or ("R", message) in both


@pytest.mark.parametrize("kind", KINDS[:3])
def test_updates_come_behind_all_backwards_of_their_batch(kind):
    plan = plans.packed(
        plans.chain_of(6), plans.platform_of(2, bandwidth=40.0), [0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 1]
    )
    program = lower_endless(plan, 4, **kind)
    for device in (0, 1):
        left = dict.fromkeys(range(5), 3 * 4)
        updates = []
        for each in itertools.chain(*segments_of(program, device, 5)):
            if isinstance(each, Update):
                assert not left[each.batch]
                updates.append((each.kind, each.batch))
            elif isinstance(each, Compute) and each.kind == "B":
                left[each.micro_batch // 4] -= 1
            elif isinstance(each, Compute) and kind:
                assert each.micro_batch // 4 < 2 or ("U", each.micro_batch // 4 - 2) in updates
        assert sorted(updates) == sorted((kind, batch) for kind in "GU" for batch in range(5))


def test_versions_are_those_of_the_lists():
    """The newest version of a forward is the number of updates before it."""
    pick, checked = random.Random(3), 0
    while checked < 6:
        try:
            plan, per_batch = random_plan(pick)
            program = lower_endless(plan, per_batch)
        except (ValueError, LoweringError):
            continue
        checked += 1
        for device in range(len(program.segments)):
            made = 0
            for each in itertools.chain(*segments_of(program, device, 6)):
                if isinstance(each, Update):
                    made += each.kind == "U"
                elif isinstance(each, Compute) and each.kind == "F":
                    assert program.newest(each.stage, each.micro_batch) == made
                    assert program.version("stashing", each.stage, each.micro_batch) == made
                    assert program.version("vertical-sync", each.stage, each.micro_batch) <= made


@pytest.mark.parametrize("mode", ["stashing", "2bw", "vertical-sync"])
@pytest.mark.parametrize("runs_ahead", [True, False])
def test_versions_are_those_that_the_planner_counts(mode, runs_ahead):
    """In the orders of the lists, of which the planner knows nothing else."""
    pick, checked = random.Random(5), 0
    while checked < 4:
        try:
            plan, per_batch = random_plan(pick)
            if mode == "2bw" and max(stage.in_flight for stage in plan.stages) > per_batch + 1:
                continue
            program = lower_endless(plan, per_batch, two_versions=mode == "2bw", runs_ahead=runs_ahead)
        except (ValueError, LoweringError):
            continue
        checked += 1
        orders = [
            [(each.name, each.micro_batch) for each in mine if isinstance(each, Compute)]
            for mine in program.restricted(6 * per_batch).lists
        ]
        counted = versions_in_order(mode, per_batch, orders)
        for (stage, number), version in counted.versions.items():
            assert program.version(mode, stage, number) == version


def test_what_decides_micro_batch_by_micro_batch_is_refused():
    plan = even_plan(2)
    halves = tuple(
        replace(each, operation=f"I{each.operation[1:]}") if each.operation[0] == "B" else each
        for each in plan.operations
    )
    with pytest.raises(PlanMismatchError, match="asynchronous training"):
        lower_endless(replace(plan, operations=halves), 2)


@pytest.mark.parametrize(
    ("num_stages", "per_update", "of_flush", "ahead"),
    [(4, 4, 1.62, 1.75), (4, 8, 1.32, 1.38), (4, 16, 1.16, 1.19), (8, 8, 1.55, 1.88), (8, 16, 1.30, 1.44)],
)
def test_an_update_takes_longer_where_forwards_do_not_run_ahead(
    num_stages: int, per_update: int, of_flush: float, ahead: float
) -> None:
    """The figures of Lightning's README, of equal layers whose backwards take twice their forwards."""
    platform = Platform(num_devices=num_stages, memory_bytes=10**9, bandwidth=1e9)
    layers = tuple(
        LayerProfile(
            name=f"layer {place}", forward_seconds=0.01, backward_seconds=0.02, weight_bytes=100,
            stash_bytes=1000, output_bytes=10,
        )
        for place in range(num_stages)
    )  # fmt: skip
    plan = make_plan(
        Chain(input_bytes=10, layers=layers), platform, "contiguous", num_micro_batches=per_update,
        weight_versions="stashing",
    )  # fmt: skip
    assert plan.flush_step_seconds is not None
    for runs_ahead, gain in ((True, ahead), (False, of_flush)):
        program = lower_endless(plan, per_update, runs_ahead=runs_ahead)
        assert plan.flush_step_seconds / program.batch_seconds == pytest.approx(gain, abs=0.006)
