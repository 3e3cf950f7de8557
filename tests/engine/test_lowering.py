"""Lists of instructions for any plan: complete, as deep as planned, and never waiting in a circle."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepspeed_partition import Platform, make_plan, replay
from deepspeed_partition.planner.errors import PlanMismatchError
from deepspeed_partition.planner.step import one_f_one_b_order
from tests.engine import plans
from tests.planner.instances import of_case, solved_cases

pytest.importorskip("torch")

from deepspeed.runtime.pipe import schedule

from deepspeed_partition.schedule import lowering
from deepspeed_partition.schedule.dry_run import dry_run
from deepspeed_partition.schedule.instructions import (
    Compute,
    DeadlockError,
    LoweringError,
    Message,
    Program,
    Transfer,
    input_of,
    output_of,
)
from deepspeed_partition.schedule.lowering import lower, lower_evaluation, with_transfers
from deepspeed_partition.schedule.timetable import of_orders, of_pattern

MAPS = [(0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (1, 0, 1, 2, 1), (0, 1, 2, 0, 1, 2), (2, 0, 2, 1, 1, 0)]


def computations(program, device):
    return [(str(each).split(".")[0], each.micro_batch) for each in program.lists[device] if is_compute(each)]


def is_compute(instruction):
    return isinstance(instruction, Compute)


def test_the_picture_at_the_top_of_the_module():
    orders = [one_f_one_b_order(0, 2, 2), one_f_one_b_order(1, 1, 2)]
    program = with_transfers(orders, (0, 1))
    for line in str(program).splitlines():
        assert line in lowering.__doc__
    assert program.num_slots(0) == 2 and program.num_slots(1) == 1
    assert dry_run(program).in_flight == (2, 1)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
def test_plain_1f1b_is_deepspeeds_schedule(num_stages, num_micro_batches):
    orders = [one_f_one_b_order(stage, num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    program = with_transfers(orders, range(num_stages))
    for stage in range(num_stages):
        theirs = schedule.TrainSchedule(num_micro_batches, num_stages, stage)
        kinds = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
        expected = [(kinds[type(each)], each.buffer_id) for step in theirs for each in step if type(each) in kinds]
        mine = [each for each in program.lists[stage] if is_compute(each)]
        # DeepSpeed numbers its buffers in a circle of at least two, and so tells its micro-batches apart.
        found = [(each.kind, each.micro_batch % theirs.num_pipe_buffers()) for each in mine]
        assert found == expected
        assert program.num_slots(stage) == min(num_stages - stage, num_micro_batches)
    assert dry_run(program).in_flight == tuple(min(num_stages - s, num_micro_batches) for s in range(num_stages))


@pytest.mark.parametrize("devices", MAPS)
@pytest.mark.parametrize("slots", [1, 2])
def test_gpipe_and_looped_orders(devices, slots):
    """Breadth first and depth first, and the order of each device is the one that was given."""
    for orders in (plans.gpipe(devices, 5), plans.depth_first(devices, 7, 3), plans.depth_first(devices, 4, 1)):
        program = with_transfers(orders, devices, comm_buffers=2 * slots)
        result = dry_run(program)
        assert [computations(program, device) for device in range(len(orders))] == [list(each) for each in orders]
        assert all(count <= slots for count in result.num_posted.values())
        assert result.num_posted.keys() == {
            f"{kind}{cut}" for cut in range(len(devices) - 1) for kind in "FB" if devices[cut] != devices[cut + 1]
        }


@pytest.mark.parametrize("devices", MAPS)
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.booleans(), st.booleans())
def test_forwards_that_run_again_and_backwards_in_halves(devices, seed, num_micro_batches, again, in_halves):
    """Each device computes in the order that was given, sends and receives all messages, and frees its slots."""
    without = plans.depth_first(devices, num_micro_batches, 3)
    orders = plans.some_recomputed(without, seed) if again else without
    orders = plans.some_in_halves(orders, seed) if in_halves else orders
    chain, platform = plans.chain_of(len(devices)), plans.platform_of(max(devices) + 1)
    plan = plans.plan_of(chain, platform, range(len(devices) + 1), devices, orders=orders)
    plain = with_transfers(without, devices, platform=platform)
    program = lower(plan, num_micro_batches)
    for order, instructions, expected in zip(orders, program.lists, plain.lists, strict=True):
        assert [str(each) for each in instructions if is_compute(each)] == [f"{n}.{number}" for n, number in order]
        assert {each for each in instructions if not is_compute(each) and each.kind != "D"} == {
            each for each in expected if not is_compute(each) and each.kind != "D"
        }
        held: dict[int, tuple[int, int]] = {}
        for each in filter(is_compute, instructions):
            of = each.stage, each.micro_batch
            assert held.get(each.slot) == (None if each.kind == "F" else of)
            held[each.slot] = of
            if each.kind in "BW":
                del held[each.slot]
        assert not held
    assert dry_run(program).in_flight >= dry_run(plain).in_flight


def test_what_goes_wrong_with_halves():
    """A half that is missing, comes first, or has no slot; an order that waits for its own second half."""
    whole = plans.gpipe((0, 1), 2)
    in_halves = plans.some_in_halves(whole, 1, share=1.0)
    program = with_transfers(in_halves, (0, 1))
    assert [sorted(program.in_halves(device)) for device in (0, 1)] == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    first = list(program.lists[0])
    [half, *_] = [each for each in first if is_compute(each) and each.kind == "W"]
    for broken, told in (
        ([each for each in first if each != half], "is never run"),
        ([half, *(each for each in first if each != half)], "finds None in its slot"),
        ([*first, half], "runs twice"),
        ([*first[:1], replace(half, slot=0, micro_batch=0), *first[1:]], "comes before the first half"),
        ([replace(each, slot=7) if each == half else each for each in first], "in its slot 7"),
    ):
        with pytest.raises(LoweringError, match=told):
            dry_run(replace(program, lists=(tuple(broken), program.lists[1])))
    without = tuple(tuple(entry for entry in order if entry != ("W0", 1)) for order in in_halves)
    with pytest.raises(LoweringError, match="W0 of micro-batch 1 is missing from the orders"):
        with_transfers(without, (0, 1))
    backwards = tuple(tuple(reversed(order)) for order in in_halves)
    with pytest.raises(DeadlockError, match="circle"):
        with_transfers(backwards, (0, 1))
    reversed_halves = [("F0", 0), ("W0", 0), ("I0", 0)]
    with pytest.raises(DeadlockError, match=r"cannot run W0\.0 before B0\.0"):
        with_transfers([reversed_halves], (0,))


def test_a_step_of_another_size_does_not_decide_by_micro_batch():
    orders = plans.some_recomputed(plans.gpipe((0, 1), 4), 1)
    plan = plans.plan_of(plans.chain_of(2), plans.platform_of(2), range(3), (0, 1), orders=orders)
    with pytest.raises(PlanMismatchError, match="a step of 3 micro-batches, which is not the planned one"):
        lower(plan, 3)
    assert all(each.kind == "F" for each in lower_evaluation(plan, 3).lists[0] if is_compute(each))


def test_a_second_forward_without_its_micro_batch():
    program = with_transfers(plans.gpipe((0, 1), 2), (0, 1))
    first = program.lists[0]
    broken = replace(program, lists=((*first, Compute("R", 0, 0, 0)), program.lists[1]))
    with pytest.raises(LoweringError, match=r"B0\.0 comes before its R0"):
        dry_run(broken)


@st.composite
def any_plans(draw):
    """Chains, maps, patterns and orders of all kinds; the replay has counted what is in flight.

    In half of the patterns operations wait longer than they must, so that devices are idle and tensors pile up.
    """
    pick = random.Random(draw(st.integers(0, 2**32)))
    num_stages = pick.randint(1, 6)
    num_devices = pick.randint(1, min(4, num_stages))
    devices = [*range(num_devices), *(pick.randrange(num_devices) for _ in range(num_stages - num_devices))]
    pick.shuffle(devices)
    if pick.random() < 0.3:
        devices = sorted(devices)
    chain = plans.chain_of(
        num_stages,
        [(pick.randint(1, 6), pick.randint(1, 9)) for _ in range(num_stages)],
        pick.choice([0, 1, 4, 12]),
    )
    platform = plans.platform_of(num_devices, comm_buffers=pick.choice([2, 2, 3, 4, 8]))
    cuts = range(num_stages + 1)
    num_micro_batches = pick.choice([1, 2, 3, 5, 9, 17])
    orders = None
    if pick.random() < 0.4:
        orders = plans.depth_first(devices, num_micro_batches, pick.randint(1, 4))
        if pick.random() < 0.3:
            orders = plans.gpipe(devices, num_micro_batches)
    longest = pick.choice([0, 0, 1, 5, 20])

    def waits():
        return pick.choice([0, pick.randint(0, 4 * longest) / 4])

    return (plans.packed(chain, platform, cuts, devices, orders, waits), chain), num_micro_batches


@settings(max_examples=200, deadline=None)
@given(any_plans())
def test_any_plan_runs_as_deep_as_it_says(plan_and_number):
    (plan, _), number = plan_and_number
    promised = [stage.in_flight for stage in plan.stages]
    program = lower(plan, number)
    result = dry_run(program)
    assert all(count <= most for count, most in zip(result.in_flight, promised, strict=True))
    if plan.step is not None:
        assert [computations(program, d) for d in range(len(program.lists))] == [list(o) for o in plan.step.order]
        assert result.in_flight == tuple(promised)
        other = dry_run(lower(plan, number + 2))  # the pattern, within what the step was promised
        assert all(count <= most for count, most in zip(other.in_flight, promised, strict=True))
    elif number >= max(promised):
        assert result.in_flight == tuple(promised)
    evaluation = lower_evaluation(plan, number + 1)
    dry_run(evaluation)
    assert evaluation.num_micro_batches == number + 1
    assert all(evaluation.num_slots(device) <= 1 for device in range(len(program.lists)))


def most_bytes(plan, chain, program, device):
    """What a device may come to hold beside its weights, by its list alone: the other devices may be late."""
    across = [chain.boundary_bytes(stage.layers[1]) for stage in plan.stages[:-1]]
    stash = [sum(map(chain.stash, chain.layers[slice(*stage.layers)])) for stage in plan.stages]
    num_stages, buffers = len(plan.stages), plan.platform.comm_buffers
    crossing = [cut for cut in range(num_stages - 1) if len(set(program.device_of_stage[cut : cut + 2])) == 2]
    ends = [cut for cut in crossing if device in program.device_of_stage[cut : cut + 2]]
    inside = [0 if cut in crossing else across[cut] for cut in range(num_stages - 1)]
    taken = taken_at_once(plan, program, device)
    waiting, kept, going, most = {}, 0, None, 0

    def held():
        """What is held, but for the tensor that is used at once."""
        open_ends = [
            max(buffers, after.get(cut, 0) - (going is not None and cut == going.boundary)) for cut in ends
        ]
        there = sum(count * across[cut] for count, cut in zip(open_ends, ends, strict=True))
        return kept + there - (inside[going.boundary] if going else 0)

    for each, after in zip(program.lists[device], dry_run(program).waiting[device], strict=True):
        if is_compute(each):
            name = f"{each.kind}{each.stage}"
            needed = input_of(name, each.micro_batch, num_stages)
            made = output_of(name, each.micro_batch, num_stages)
            kept -= inside[needed.boundary] if needed else 0
            kept += stash[each.stage] if each.kind == "F" else 0
            most = max(most, kept + sum(max(buffers, waiting.get(cut, 0)) * across[cut] for cut in ends))
            kept -= stash[each.stage] if each.kind == "B" else 0
            kept += inside[made.boundary] if made else 0
            going = taken.get((name, each.micro_batch))
        elif each.kind == "W" and each.message == going:
            going = None
        most = max(most, held())
        waiting = after
    return most


def taken_at_once(plan, program, device):
    """By computation: the input of the next one, where that begins at the instant at which this one ends.

    No instant of a plan counts it beside the output of this one (``planner/memory.py``: what ends at an instant is
    gone when anything begins there).
    """
    if plan.step is None or plan.step.num_micro_batches != program.num_micro_batches:
        times = of_pattern(plan, program.num_micro_batches, "FB")
    else:
        seconds = {each.operation: each.duration_seconds for each in plan.operations}
        times = of_orders(
            plan.step.order, program.device_of_stage, seconds, max(1, plan.platform.comm_buffers // 2)
        )
    found = {}
    for before, after in itertools.pairwise(times.orders[device]):
        if times.instants[before][1] == times.instants[after][0]:
            found[before] = input_of(*after, len(plan.stages))
    return found


def flush_of_thirds():
    """In ticks of a trillionth of the longest time (9 s) three times 3 s were not 9 s.

    So a transfer ended a tick after the one that it made room for had begun: 348 bytes on device 1, 336 planned.
    """
    chain = plans.chain_of(3, [(3, 3), (2, 9), (6, 8)], 12)
    orders = plans.gpipe((0, 1, 2), 17)
    return (plans.packed(chain, plans.platform_of(3, comm_buffers=4), range(4), (0, 1, 2), orders), chain), 17


@settings(max_examples=200, deadline=None)
@given(any_plans())
@example(flush_of_thirds())
def test_no_device_holds_more_than_planned_however_late_the_others_are(plan_and_number):
    """In a pattern also while it fills and drains. Of an order only where all can wait for what must leave.

    So it is of one pattern in a thousand, where tensors wait for periods: at one end there may be one more.
    """
    (plan, chain), number = plan_and_number
    program = lower(plan, number)
    assert plan.step is not None or len(program.beyond_room) <= 1
    for device, use in enumerate(replay(plan, chain).memory):
        may_hold_more = any(each == device for each, _ in program.beyond_room)
        more = 2 * max(each.output_bytes for each in chain.layers) if may_hold_more else 0
        assert most_bytes(plan, chain, program, device) <= use.total - use.weights + more


def test_a_pattern_whose_tensors_wait_for_two_periods():
    """Found by the test above: each end may wait for what leaves the other, and one of them must not."""
    chain = plans.chain_of(2, [(3, 1), (4, 5)], 4)
    platform = plans.platform_of(2, bandwidth=4.0)
    late = iter([4.25, 18.5, 9, 17.5, 15.5, 0])
    plan = plans.plan_of(chain, platform, range(3), (1, 0), 9, waits=late.__next__)
    assert [each.shift for each in plan.operations] == [0, 0, 2, 4, 6, 8]
    assert [lower(plan, number).beyond_room for number in (5, 8, 17)] == [(), ((0, 0),), ((0, 0),)]


@pytest.mark.parametrize(
    ("devices", "seconds", "waits", "period", "number"),
    [
        ((0, 1), [(1, 4), (1, 2)], [8, 0, 0, 10, 0, 0], 5, 5),
        ((0, 1, 0), [(1, 1), (1, 4), (3, 4)], [0, 0, 8, 0, 0, 6, 11, 0, 0, 0], 10, 3),
    ],
)
def test_devices_that_are_idle_between_receives_that_they_make_room_for(devices, seconds, waits, period, number):
    """Informer on 2 ranks, "waits at DB5.0 for device 1, ... waits at DF5.2 for device 0", from a plan of MadPipe.

    While a device was idle in the pattern, it waited for its tensors to leave before it posted any receive, also
    for a tensor that leaves after one has come; the other device waited so for that one.
    """
    chain = plans.chain_of(len(devices), seconds, 4)
    late = iter(waits)
    plan = plans.plan_of(
        chain, plans.platform_of(2), range(len(devices) + 1), devices, period, waits=late.__next__
    )
    program = lower(plan, number)
    assert dry_run(program).in_flight == tuple(min(number, stage.in_flight) for stage in plan.stages)
    assert program.within_room
    for device, use in enumerate(replay(plan, chain).memory):
        assert most_bytes(plan, chain, program, device) <= use.total - use.weights


def test_orders_whose_devices_would_wait_in_a_circle_for_room():
    """GPipe up and down: device 0 would wait for device 1 to take F0.k, and that for device 0 to take F1.j."""
    orders = plans.gpipe((0, 1, 0), 7)
    seconds = {
        "F0": 1,
        "B0": 2,
        "F1": 1,
        "B1": 4,
        "F2": 1,
        "B2": 2,
        "SF0": 0.25,
        "SF1": 0.25,
        "SB0": 0.25,
        "SB1": 0.25,
    }
    program = with_transfers(orders, (0, 1, 0), seconds=seconds)
    assert len(program.beyond_room) == 1 and dry_run(program).in_flight == (7, 7, 7)
    assert any(isinstance(each, Transfer) and each.kind == "D" for each in program.lists[0])
    assert with_transfers(orders, (0, 1, 0)).within_room


def beats_contiguous(case):
    best, contiguous = case.get("special_best"), case.get("contiguous")
    return best is not None and (contiguous is None or best < contiguous)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_plans_of_the_planner(seed):
    pick = random.Random(seed)
    size = pick.randint(2, 8)
    chain = plans.chain_of(size, [(pick.randint(1, 6), pick.randint(1, 9)) for _ in range(size)], 2)
    platform = Platform(num_devices=pick.randint(1, 3), memory_bytes=10**6, bandwidth=1.0)
    plan = make_plan(chain, platform, algorithm=pick.choice(["contiguous", "uniform"]))
    for number in (1, 4, 30):
        program = lower(plan, number)
        assert program.within_room
        result = dry_run(program)
        promised = tuple(stage.in_flight for stage in plan.stages)
        assert all(count <= most for count, most in zip(result.in_flight, promised, strict=True))
    assert result.in_flight == promised


@pytest.mark.parametrize("case", [case for case in solved_cases("plan") if beats_contiguous(case)])
def test_plans_with_several_stages_on_a_device(case):
    """Found by the planner where no contiguous plan is as good."""
    chain, platform = of_case(case, case["P"], case["M"])
    plan = make_plan(chain, platform)
    assert not plan.is_contiguous
    promised = tuple(stage.in_flight for stage in plan.stages)
    for number in (1, 3, 40):
        program = lower(plan, number)
        assert program.within_room
        result = dry_run(program)
        assert all(count <= most for count, most in zip(result.in_flight, promised, strict=True))
    assert result.in_flight == promised
    dry_run(lower_evaluation(plan, 5))


def test_the_pattern_sets_the_order():
    """Stages of three units on two devices, at the shortest period: 1F1B, one deeper at the first."""
    chain, platform = plans.chain_of(2), plans.platform_of(2, bandwidth=4.0)
    plan = plans.plan_of(chain, platform, [0, 1, 2], [0, 1], period=3.0)
    assert [stage.in_flight for stage in plan.stages] == [3, 1]
    assert "".join(name[0] for name, _ in computations(lower(plan, 5), 0)) == "FFFBFBFBBB"
    assert [name for name, _ in computations(lower(plan, 5), 1)] == ["F1", "B1"] * 5


@pytest.mark.parametrize("slots", [1, 2])
def test_a_receive_is_posted_before_the_computation_beside_which_it_travels(slots):
    orders = [one_f_one_b_order(0, 3, 6), one_f_one_b_order(1, 1, 6)]
    times = of_orders(orders, (0, 1), {}, slots)
    program = with_transfers(orders, (0, 1), comm_buffers=2 * slots)
    for message in times.messages:
        device = message.ends((0, 1))[1]
        names = [str(each) for each in program.lists[device]]
        start, _ = times.instants[message.transfer]
        beside = next((each for each in orders[device] if times.instants[each][1] > start), message.consumer)
        posted = names.index(f"R{message.channel}.{message.micro_batch}")
        assert posted < names.index("{}.{}".format(*beside))


def test_messages_of_several_cuts_share_one_direction():
    """Activations over cuts 0 and 2, and gradients over cut 1, all go from device 0 to device 1: in one order."""
    devices = (0, 1, 0, 1)
    program = with_transfers(plans.depth_first(devices, 6, 3), devices)
    sent = [each.message for each in program.lists[0] if isinstance(each, Transfer) and each.kind == "S"]
    posted = [each.message for each in program.lists[1] if isinstance(each, Transfer) and each.kind == "R"]
    assert sent == posted and {message.channel for message in sent} == {"F0", "B1", "F2"}


# What is refused


def test_orders_that_wait_in_a_circle():
    orders = [(("F0", 0), ("B0", 0), ("F0", 1), ("B0", 1)), (("F1", 1), ("F1", 0), ("B1", 0), ("B1", 1))]
    with pytest.raises(
        DeadlockError, match=r"device 0 cannot run B0.0 before B1.0 of device 1, device 1 cannot run"
    ):
        with_transfers(orders, (0, 1))
    with pytest.raises(DeadlockError, match=r"circle: device 0 cannot run B0.0 before F0.0 of device 0$"):
        with_transfers([(("B0", 0), ("F0", 0))], (0,))


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([(("F0", 0), ("B0", 0)), (("F1", 0),)], "B1 of micro-batch 0 is missing"),
        ([(("F0", 0), ("B0", 0), ("F0", 0)), (("F1", 0), ("B1", 0))], "F0 of micro-batch 0 stands twice"),
        (
            [(("F0", 0), ("F1", 0), ("B0", 0)), (("B1", 0),)],
            "F1 stands in the order of device 0, its stage is on device 1",
        ),
        ([(("F0", 0), ("B0", 0)), (("F1", 0), ("B1", 0), ("F2", 0))], "F2 of micro-batch 0 in the orders is no"),
        ([(("F0", 0), ("B0", 0), ("F1", 0), ("B1", 0))], "orders for 1 devices"),
    ],
)
def test_orders_that_are_not_complete(orders, words):
    with pytest.raises(LoweringError, match=words):
        with_transfers(orders, (0, 1))


def test_a_batch_without_micro_batches():
    plan = plans.plan_of(plans.chain_of(2), plans.platform_of(2), [0, 1, 2], [0, 1])
    for lowered in (lower, lower_evaluation):
        with pytest.raises(LoweringError, match="at least one"):
            lowered(plan, 0)
    without = replace(plan, operations=tuple(each for each in plan.operations if each.operation != "B1"))
    with pytest.raises(LoweringError, match="no B1"):
        lower(without, 2)


# The dry run finds what lowering must not do: lists that were spoiled by hand


def two_devices(**changes):
    orders = [one_f_one_b_order(0, 2, 3), one_f_one_b_order(1, 1, 3)]
    program = with_transfers(orders, (0, 1))
    lists = [list(instructions) for instructions in program.lists]
    return program, lists


def find(instructions, name):
    return next(index for index, each in enumerate(instructions) if str(each) == name)


def spoiled(program, lists):
    return replace(program, lists=tuple(tuple(instructions) for instructions in lists))


def move(instructions, name, before):
    instruction = instructions.pop(find(instructions, name))
    instructions.insert(find(instructions, before), instruction)


@pytest.mark.parametrize(
    ("device", "name", "before", "error", "words"),
    [
        (0, "SF0.0", "F0.0", LoweringError, "SF0.0 comes before its tensor"),
        (0, "SF0.1", "SF0.0", LoweringError, "SF0.1 comes before its tensor"),
        (1, "RF0.1", "RF0.0", LoweringError, "is sent as F0.0 and posted as F0.1"),
        (0, "DF0.0", "SF0.0", LoweringError, "DF0.0 waits for what was not sent"),
        (1, "F1.0", "WF0.0", LoweringError, "F1.0 finds no F0 of micro-batch 0"),
        (1, "B1.0", "F1.0", LoweringError, "B1.0 finds None in its slot 0"),
        (1, "WF0.0", "RF0.0", LoweringError, "WF0.0 waits for what was not posted"),
        (0, "F0.2", "B0.0", LoweringError, "F0.2 finds (0, 0) in its slot 0"),
    ],
)
def test_instructions_out_of_place(device, name, before, error, words):
    program, lists = two_devices()
    dry_run(program)
    move(lists[device], name, before)
    with pytest.raises(error) as caught:
        dry_run(spoiled(program, lists))
    assert words in str(caught.value)


def test_devices_that_wait_in_a_circle():
    """A gradient that is wanted before the activation was sent that it comes from."""
    program, lists = two_devices()
    lists[0] = [each for each in lists[0] if str(each) not in ("RB0.0", "WB0.0")]
    at = find(lists[0], "SF0.0")
    gradient = Message("B", 0, 0)
    lists[0][at:at] = [Transfer("R", gradient, 1), Transfer("W", gradient, 1)]
    with pytest.raises(
        DeadlockError, match=r"device 0 waits at WB0.0 for device 1, device 1 waits at WF0.0 for dev"
    ):
        dry_run(spoiled(program, lists))


def test_devices_that_end_too_soon():
    program, lists = two_devices()
    lists[0] = lists[0][: find(lists[0], "SF0.2")]
    with pytest.raises(DeadlockError, match=r"device 1 waits at WF0.2 for device 0, which has ended"):
        dry_run(spoiled(program, lists))
    orders = [(("F0", 0),), (("F1", 0),)]
    program = with_transfers(orders, (0, 1))
    without = replace(program, lists=(program.lists[0], program.lists[1][:1]))
    with pytest.raises(LoweringError, match=r"F1.0 is never run"):
        dry_run(without)
    more = replace(program, num_micro_batches=2)
    with pytest.raises(LoweringError, match=r"F0.1 is never run"):
        dry_run(more)


def test_messages_that_nobody_reads():
    program = with_transfers([(("F0", 0),), (("F1", 0),)], (0, 1))
    post = Transfer("R", Message("B", 0, 0), 1)
    lists = ((*program.lists[0], post), program.lists[1])
    with pytest.raises(LoweringError, match="posts 1 receives"):
        dry_run(Program(device_of_stage=(0, 1), num_micro_batches=1, lists=lists))
