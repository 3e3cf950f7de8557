"""Any plan under the rules of CUDA and NCCL: what waits for a device comes to its end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from deepspeed_partition import Chain, InfeasibleError, LayerProfile, Platform, make_plan
from deepspeed_partition.planner.step import one_f_one_b_order
from tests.engine import plans
from tests.engine.device_rules import Hosts, Rules, computations, first_kernels, never_reached

pytest.importorskip("torch")

from deepspeed_partition.schedule import lowering
from deepspeed_partition.schedule.dry_run import dry_run
from deepspeed_partition.schedule.emit import lists_of
from deepspeed_partition.schedule.instructions import Compute, Instruction, Program, Transfer
from deepspeed_partition.schedule.lowering import lower, lower_evaluation, with_transfers
from deepspeed_partition.schedule.postponing import postponed
from deepspeed_partition.schedule.timetable import of_orders

NUM_RANDOM_PLANS = 150
LONGEST = 400
"""Instructions of a program."""
HEADERS = ("known", "first", "each")


def any_program(seed: int) -> Program | None:
    """A step or an evaluation of a plan of any kind; None where there are too many instructions."""
    pick = random.Random(seed)
    num_stages = pick.randint(2, 7)
    num_devices = pick.randint(2, min(5, num_stages))
    devices = [*range(num_devices), *(pick.randrange(num_devices) for _ in range(num_stages - num_devices))]
    pick.shuffle(devices)
    times = [(pick.randint(1, 6), pick.randint(1, 9)) for _ in range(num_stages)]
    chain = plans.chain_of(num_stages, times, pick.choice([0, 1, 4, 12]))
    platform = plans.platform_of(num_devices, comm_buffers=pick.choice([2, 2, 2, 3, 4, 8]))
    number, orders = pick.choice([2, 3, 5, 9]), None
    if pick.random() < 0.5:
        orders = plans.depth_first(devices, number, pick.randint(1, 4))
        if pick.random() < 0.3:
            orders = plans.gpipe(devices, number)
    plan = plans.packed(chain, platform, range(num_stages + 1), devices, orders)
    program = lower_evaluation(plan, number) if pick.random() < 0.1 else lower(plan, number)
    return program if sum(map(len, program.lists)) <= LONGEST else None


@cache
def random_programs() -> tuple[Program, ...]:
    found = (any_program(seed) for seed in range(2 * NUM_RANDOM_PLANS))
    return tuple(program for program in found if program is not None)[:NUM_RANDOM_PLANS]


@cache
def planned_programs() -> tuple[Program, ...]:
    """Of plans that the planner makes for tight memory, some with several stages on a device."""
    return tuple(_planned())


def _planned() -> Iterator[Program]:
    pick = random.Random(3)
    several = 0
    for _ in range(12):
        num_devices, number = pick.choice([2, 3]), pick.choice([4, 8])
        layers = tuple(
            LayerProfile(
                name=f"layer {index}", forward_seconds=pick.choice([1, 2, 3, 5]) * 1e-3,
                backward_seconds=pick.choice([2, 4, 6]) * 1e-3, weight_bytes=pick.choice([1, 4, 16]) * 10**6,
                output_bytes=pick.choice([1, 4, 16]) * 10**6,
            )
            for index in range(7)
        )  # fmt: skip
        weights = sum(layer.weight_bytes * 4 for layer in layers) // num_devices
        memory = int(weights * 1.2) + pick.choice([40, 80, 160, 400]) * 10**6
        platform = Platform(
            num_devices=num_devices, memory_bytes=memory, bandwidth=pick.choice([2e9, 12e9, 50e9])
        )  # fmt: skip
        chain = Chain(input_bytes=10**6, layers=layers, name="tight")
        try:
            plan = make_plan(chain, platform, num_micro_batches=number, time_limit_seconds=2)
        except InfeasibleError:
            continue
        several += len(plan.stages) > num_devices
        yield lower(plan, number)
    assert several, "among them are plans with several stages on a device"


def of_1f1b(num_stages: int, number: int) -> Program:
    return with_transfers(
        [one_f_one_b_order(stage, num_stages - stage, number) for stage in range(num_stages)], range(num_stages)
    )


@cache
def all_programs() -> tuple[Program, ...]:
    plain = (of_1f1b(num_stages, number) for num_stages in (2, 3, 4, 6) for number in (1, 4, 8))
    return (*plain, *random_programs(), *planned_programs())


def test_there_are_many_programs_and_of_all_kinds():
    programs = random_programs()
    assert len(programs) == NUM_RANDOM_PLANS
    assert sum(len(set(each.device_of_stage)) < len(each.device_of_stage) for each in programs) > 50
    kinds = {instruction.kind for program in programs for each in program.lists for instruction in each}
    assert kinds == set("FBSRWD")


@pytest.mark.parametrize("headers", HEADERS)
def test_every_plan_ends(headers):
    for program in all_programs():
        assert not never_reached(program, Rules(headers=headers)), program


@pytest.mark.parametrize("headers", HEADERS)
def test_a_wait_for_one_whole_device_ends(headers):
    """``torch.cuda.synchronize()`` in a layer: before all computations of one device."""
    for program in all_programs():
        for device in range(len(program.lists)):
            here = {place for place in computations(program) if place[0] == device}
            assert not never_reached(program, Rules(headers=headers, waits_for_device=here)), (device, program)


def test_a_wait_for_one_whole_device_ends_wherever_it_is_the_only_one():
    for program in [of_1f1b(3, 4), *random_programs()[:40], *planned_programs()]:
        for place in computations(program):
            assert not never_reached(program, Rules(waits_for_device={place})), (place, program)


def test_kernels_that_are_loaded_when_they_first_run():
    """On every device of the pipeline: each waits for itself as a whole before each of its first computations."""
    for program in all_programs():
        assert not never_reached(program, Rules(headers="first", waits_for_device=first_kernels(program))), program


@pytest.mark.parametrize("headers", HEADERS)
def test_waits_for_the_computing_stream_end_on_all_devices_at_once(headers):
    """``tensor.item()`` in every layer."""
    for program in all_programs():
        everywhere = computations(program)
        assert not never_reached(program, Rules(headers=headers, waits_for_stream=everywhere)), program


# The rules see what must not be


def as_written(orders, devices, comm_buffers=2) -> Program:
    """The lists without the step that moves sends and receives."""
    times = of_orders(orders, devices, {}, max(1, comm_buffers // 2))
    ends = {
        (device, message.boundary) for message in times.messages for device in message.ends(times.device_of_stage)
    }
    number = 1 + max(number for order in orders for _, number in order)
    lists = lists_of(times, comm_buffers, strict=ends)
    program = Program(device_of_stage=tuple(devices), num_micro_batches=number, lists=lists)
    dry_run(program)
    return program


def test_receives_that_are_posted_as_early_as_there_is_room_may_wait_for_ever():
    devices = (0, 1, 1)
    before = as_written(plans.depth_first(devices, 5, 2), devices, 4)
    assert any(never_reached(before, Rules(waits_for_device={place})) for place in computations(before))
    after = postponed(before)
    assert not any(never_reached(after, Rules(waits_for_device={place})) for place in computations(after))


def test_a_send_whose_receiver_has_no_room_yet(monkeypatch):
    """Its receive stands behind something that needs what the sender computes later; 1 of 300 plans has such."""
    monkeypatch.setattr(lowering, "postponed", lambda program: program)
    before = any_program(194)
    after = postponed(before)
    moved = {send for send, _ in _places_of_transfers(before, "S") - _places_of_transfers(after, "S")}
    assert moved
    here = {place for place in computations(before) if place[0] == 0}
    sends_as_before = replace(after, lists=(_with_sends_of(before, after, 0), *after.lists[1:]))
    assert never_reached(sends_as_before, Rules(waits_for_device=here))
    assert not never_reached(after, Rules(waits_for_device=here))


def _with_sends_of(before: Program, after: Program, device: int) -> tuple[Instruction, ...]:
    """The list of ``after`` with each send right behind the computation behind which it stands in ``before``."""
    behind: dict[Instruction, list[Instruction]] = {}
    for instruction in before.lists[device]:
        if isinstance(instruction, Compute):
            last = instruction
        elif instruction.kind == "S":
            behind.setdefault(last, []).append(instruction)
    written = []
    for instruction in after.lists[device]:
        if isinstance(instruction, Compute):
            written += [instruction, *behind.get(instruction, [])]
        elif instruction.kind != "S":
            written.append(instruction)
    return tuple(written)


def _places_of_transfers(program: Program, kind: str) -> set[tuple[Transfer, int]]:
    """Transfers, with the number of computations before them."""
    found = set()
    for instructions in program.lists:
        computed = 0
        for instruction in instructions:
            computed += isinstance(instruction, Compute)
            if isinstance(instruction, Transfer) and instruction.kind == kind:
                found.add((instruction, computed))
    return found


def test_nothing_moves_that_waits_for_nothing():
    """In plain 1F1B receives are posted as early as before: each depends on what stands right before it."""
    for num_stages in (2, 4):
        orders = [one_f_one_b_order(stage, num_stages - stage, 8) for stage in range(num_stages)]
        before = as_written(orders, range(num_stages))
        after = postponed(before)
        assert _places_of_transfers(before, "R") == _places_of_transfers(after, "R")
        assert _places_of_transfers(before, "S") == _places_of_transfers(after, "S")


def test_postponing_again_changes_nothing():
    for program in all_programs():
        assert postponed(program) == program


def test_one_communicator_for_both_directions_is_too_few():
    assert never_reached(of_1f1b(2, 4), Rules(one_communicator_per_pair=True))
    assert sum(bool(never_reached(each, Rules(one_communicator_per_pair=True))) for each in random_programs()) > 50


def test_receives_that_are_called_behind_later_waits_hang_somewhere():
    late = Rules(headers="each", late_on_computing_stream=True)
    assert any(never_reached(program, late) for program in all_programs())


# Messages that are given to a device when both hosts have come to them: what the engine does


def test_waits_for_all_whole_devices_before_all_computations_end():
    """``torch.cuda.synchronize()`` in every layer of every rank."""
    pick = random.Random(0)
    for program in all_programs():
        assert Hosts(program, pick).all_end(), program


def test_it_takes_both_hosts():
    """Else two devices wait, each for what the other one is to send after that."""
    pick = random.Random(0)
    program = of_1f1b(2, 4)
    assert never_reached(program, Rules(waits_for_device=computations(program)))
    assert not Hosts(program, pick, both=False).all_end()
    assert sum(not Hosts(each, pick, both=False).all_end() for each in random_programs()) > 50


def test_it_does_not_take_lists_that_were_moved(monkeypatch):
    """Each of the two alone is enough on one device."""
    monkeypatch.setattr(lowering, "postponed", lambda program: program)
    pick = random.Random(0)
    programs = [any_program(seed) for seed in range(30)]
    assert all(Hosts(program, pick).all_end() for program in programs if program is not None)
