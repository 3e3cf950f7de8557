"""Lowering of a plan to lists of instructions: what each device runs, known before anything starts.

    device 0   F0.0 SF0.0 F0.1 SF0.1 DF0.0 RB0.0 WB0.0 RB0.1 B0.0 WB0.1 B0.1
    device 1   RF0.0 WF0.0 RF0.1 F1.0 B1.0 SB0.0 WF0.1 F1.1 B1.1 SB0.1

Instructions are named as in a plan, with the number of the micro-batch behind the point:

- ``F1.0``, ``B1.0``: the forward and the backward of stage 1. Each has a *slot*, a number from 0 up that is its
  device's alone from the forward to the backward: the micro-batches in flight. A device never has two of them in
  one slot, so the number of slots is the depth of the schedule.
- ``f1.0``: a forward that keeps its input alone; ``R1.0``: the same forward again, before its backward. ``I1.0``,
  ``W1.0``: a backward in two halves, of which the first makes the gradient of the input, and so the message; the
  slot is free behind the second. ``R`` and ``W`` need no message and make none.
- ``SF0.0``: sends the output of stage 0 to stage 1; ``SB0.0``: sends its gradient back. Neither waits: the tensor
  is kept until it has left.
- ``RF0.0``, ``RB0.0``: posts the receive, that is, makes room for the tensor. It does not wait either.
- ``WF0.0``, ``WB0.0``: waits until the tensor is there, and passes its room on.
- ``DF0.0``, ``DB0.0``: waits until what was sent has left. *Only these two wait.*

Neighbouring stages of one device hand over without any of the last five.

Everything is written from a timetable (``timetable.py``): the plan's own where it is a pattern, else one run of
its order in virtual time, in which a transfer starts when its tensor is there, its link is free and its receiver
has room. Sends and receives of each direction stand in the order of their transfers there. ``emit.py`` decides
how much room there is for tensors that wait, and so where ``D`` and ``R`` stand; ``postponing.py`` puts ``S`` and
``R`` behind what they must wait for anyway, which a GPU needs.

Nothing waits forever, for this reason. Between two devices, messages of one direction are matched in the order in
which they were sent and posted (as NCCL does, and gloo without tags), whatever boundaries they belong to, so a
message may be held up by one in front of it that has no room. Take the transfers in the order in which they begin
in the timetable. Whatever stands before a send or a receive in its list waits only for transfers that begin
earlier than its own: ``W`` for the input of a computation that has begun by then, ``D`` for a tensor that is on
its way by then (``emit.py``). So where all earlier transfers have ended, both ends of the next one are come to,
and it ends, too, whatever the real times are. This holds for every timetable, of a pattern or of an order, with
any number of stages on a device. A timetable itself can only stop if the orders of forwards and backwards wait for
each other in a circle, which is refused with the circle.

There is one exception, which keeps devices within the planned memory: before a computation ``D`` may also wait for
a tensor whose transfer begins while that computation runs on paper. ``dry_run.py``, which checks all finished
lists without any of this reasoning, then finds a circle in few of them (1 in 100 random orders), and there
devices wait for less, at those ends of boundaries where they must (tried one after the other).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

from deepspeed_partition.planner.plan import Plan
from deepspeed_partition.planner.problem import Platform
from deepspeed_partition.planner.schedule import Order
from deepspeed_partition.schedule import timetable
from deepspeed_partition.schedule.dry_run import dry_run
from deepspeed_partition.schedule.emit import lists_of
from deepspeed_partition.schedule.instructions import DeadlockError, LoweringError, Program, role_of
from deepspeed_partition.schedule.postponing import postponed
from deepspeed_partition.schedule.timetable import Timetable


def lower(plan: Plan, num_micro_batches: int, flushes: Sequence[int] | None = None) -> Program:
    """Return the lists of one training step of a plan.

    They follow the plan's ``order``, where it has one for this number of micro-batches, else its pattern with
    fill and drain. A pattern is kept within the micro-batches in flight that the plan promises: a forward that
    comes too early for them is put off.

    Args:
        flushes: micro-batches of each batch of the step, where the last stage begins no backward of a batch
            before all of its forwards are done. An order of the plan that does otherwise is replaced by
            ``flush_orders``.

    Raises:
        LoweringError: an order is not complete, or not on its devices.
        DeadlockError: the devices of an order wait for each other in a circle.
        PlanMismatchError: the plan decides micro-batch by micro-batch, and the step is not the planned one.
    """
    _check_count(num_micro_batches)
    order: Sequence[Order] | None = None
    devices = [stage.device for stage in plan.stages]
    if plan.step is not None and plan.step.num_micro_batches == num_micro_batches:
        order = plan.step.order
    if flushes is not None and (order is None or not is_flushed(order, len(devices), flushes)):
        plan.check_treats_all_alike("a step for a loss of the whole batch")
        order = flush_orders(devices, flushes, plan.platform.num_devices)
    if order is not None:
        return with_transfers(
            order,
            devices,
            comm_buffers=plan.platform.comm_buffers,
            seconds=seconds_in_step(plan),
            platform=plan.platform,
        )
    plan.check_treats_all_alike(f"a step of {num_micro_batches} micro-batches, which is not the planned one,")
    return program_of_timetable(timetable.of_pattern(plan, num_micro_batches, "FB"), plan.platform.comm_buffers)


def seconds_in_step(plan: Plan) -> dict[str, float]:
    """Return the seconds of each operation of a step, by its name.

    The pattern of a plan may have only whole backwards, where its step has some in halves: either half then counts
    as half of one. Only the order of transfers that share a link depends on it.
    """
    found = {each.operation: each.duration_seconds for each in plan.operations}
    for stage in range(len(plan.stages)):
        forward = found.get(f"F{stage}", found.get(f"f{stage}", 0.0))
        whole = found.get(f"B{stage}", found.get(f"I{stage}", 0.0) + found.get(f"W{stage}", 0.0))
        for kind, seconds in {"F": forward, "f": forward, "R": forward, "B": whole}.items():
            found.setdefault(f"{kind}{stage}", seconds)
        for kind in "IW":
            found.setdefault(f"{kind}{stage}", whole / 2)
    beside = plan.platform.operation_seconds
    return {name: seconds + (0.0 if name[0] == "S" else beside) for name, seconds in found.items()}


def lower_evaluation(plan: Plan, num_micro_batches: int) -> Program:
    """Return the lists of one evaluation: the pattern's forwards, each as early as its input is there.

    Where the pattern has several micro-batches, forwards go down the chain as early as they can.
    """
    _check_count(num_micro_batches)
    if not plan.treats_all_alike:
        devices = [stage.device for stage in plan.stages]
        both = flush_orders(devices, [num_micro_batches], plan.platform.num_devices)
        forwards = [tuple(entry for entry in order if entry[0][0] == "F") for order in both]
        return with_transfers(
            forwards, devices, comm_buffers=plan.platform.comm_buffers, platform=plan.platform
        )  # fmt: skip
    return program_of_timetable(timetable.of_pattern(plan, num_micro_batches, "F"), plan.platform.comm_buffers)


def flush_orders(
    devices: Sequence[int], flushes: Sequence[int], num_devices: int | None = None
) -> tuple[Order, ...]:
    """Return GPipe's flush, batch by batch: all forwards of a batch, then all of its backwards.

    Args:
        devices: the device of each stage.
        flushes: micro-batches of each batch.
        num_devices: the number of devices; left out, as many as run a stage.
    """
    last = len(devices) - 1
    orders: list[list[tuple[str, int]]] = [[] for _ in range(num_devices or max(devices) + 1)]
    begin = 0
    for size in flushes:
        numbers = range(begin, begin + size)
        # One wave goes down the chain and one up, so nothing comes before what it needs on any allocation.
        for _, stage, number in sorted(
            (number + stage, stage, number) for stage in range(last + 1) for number in numbers
        ):
            orders[devices[stage]].append((f"F{stage}", number))
        for _, up, number in sorted((number + up, up, number) for up in range(last + 1) for number in numbers):
            orders[devices[last - up]].append((f"B{last - up}", number))
        begin += size
    return tuple(map(tuple, orders))


def is_flushed(orders: Sequence[Order], num_stages: int, flushes: Sequence[int]) -> bool:
    """Return whether the last stage runs all forwards of a batch before the first of its backwards."""
    forward, backward = f"F{num_stages - 1}", f"B{num_stages - 1}"
    in_roles = [[(role_of(name), number) for name, number in order] for order in orders]
    [order] = [order for order in in_roles if any(name == forward for name, _ in order)]
    position = {operation: place for place, operation in enumerate(order)}
    if sum(flushes) != sum(name == forward for name, _ in order):
        return False
    ends = list(accumulate(flushes))
    return all(
        max(position[forward, number] for number in range(end - size, end))
        < min(position[backward, number] for number in range(end - size, end))
        for end, size in zip(ends, flushes, strict=True)
    )


def _check_count(num_micro_batches: int) -> None:
    if num_micro_batches < 1:
        raise LoweringError(f"a batch has at least one micro-batch, not {num_micro_batches}")


def with_transfers(
    orders: Sequence[Order],
    device_of_stage: Sequence[int],
    *,
    comm_buffers: int = 2,
    seconds: Mapping[str, float] | None = None,
    platform: Platform | None = None,
) -> Program:
    """Return orders of forwards and backwards (or of forwards alone) as lists with transfers and slots.

    Args:
        orders: for each device its computations, such as ``("F0", 3)``; together all of them, once each. A forward
            that keeps nothing (``f0``) may stand for one that keeps, with or without ``R0``, which runs it again;
            the halves ``I0`` and ``W0`` for ``B0``.
        device_of_stage: the device of each stage of the chain.
        comm_buffers: tensors for which there is room at each end of a boundary.
        seconds: how long each operation takes (``"F0"``, ``"SF0"``), by which transfers over different boundaries
            that share a direction between two devices take turns. Left out, all take equally long.
        platform: what it says of links and ports. None: a link carries one message at a time.

    Raises:
        LoweringError: a computation is missing, stands twice, or is on another device than its stage.
        DeadlockError: the devices wait for each other in a circle.
    """
    _check_orders(orders, device_of_stage)
    return program_of_timetable(
        timetable.of_orders(orders, device_of_stage, seconds or {}, max(1, comm_buffers // 2), platform),
        comm_buffers,
    )


def program_of_timetable(times: Timetable, comm_buffers: int) -> Program:
    """Return the program within the room of the timetable, if that is possible.

    Otherwise devices stay within that room at as many ends of boundaries, tried one after the other, as is
    possible without a circle of waits.
    """
    ends = {
        (device, message.boundary) for message in times.messages for device in message.ends(times.device_of_stage)
    }

    def tried(strict: AbstractSet[tuple[int, int]]) -> Program:
        written = Program(
            device_of_stage=times.device_of_stage,
            num_micro_batches=1 + max(number for order in times.orders for _, number in order),
            lists=lists_of(times, comm_buffers, strict=strict),
            beyond_room=tuple(sorted(ends - strict)),
        )
        dry_run(written)
        program = postponed(written)
        dry_run(program)
        return program

    try:
        return tried(ends)
    except DeadlockError:
        strict: set[tuple[int, int]] = set()
    program = tried(strict)
    for end in sorted(ends):
        try:
            program = tried(strict | {end})
        except DeadlockError:
            continue
        strict.add(end)
    return program


def _check_orders(orders: Sequence[Order], devices: Sequence[int]) -> None:
    """Refuse orders that are not complete, or not on their devices."""
    found = Counter(entry for order in orders for entry in order)
    twice = [entry for entry, count in found.items() if count > 1]
    if twice:
        raise LoweringError(f"{twice[0][0]} of micro-batch {twice[0][1]} stands twice in the orders")
    trains = any(name[0] in "BI" for name, _ in found)
    num_micro_batches = max((micro_batch for _, micro_batch in found), default=0) + 1
    for stage, device in enumerate(devices):
        for micro_batch in range(num_micro_batches):
            for kind in _kinds_of(stage, micro_batch, found) if trains else "F":
                if (f"{kind}{stage}", micro_batch) not in found:
                    raise LoweringError(f"{kind}{stage} of micro-batch {micro_batch} is missing from the orders")
                del found[f"{kind}{stage}", micro_batch]
        if device >= len(orders):
            raise LoweringError(
                f"stage {stage} is on device {device} and there are orders for {len(orders)} devices"
            )
    if found:
        name, micro_batch = next(iter(found))
        raise LoweringError(f"{name} of micro-batch {micro_batch} in the orders is no computation of these stages")
    for device, order in enumerate(orders):
        for name, _ in order:
            place = devices[int(name[1:])]
            if place != device:
                raise LoweringError(
                    f"{name} stands in the order of device {device}, its stage is on device {place}"
                )


def _kinds_of(stage: int, micro_batch: int, found: Container[tuple[str, int]]) -> Iterator[str]:
    """Yield what a stage runs on a micro-batch, if it runs what is found: a forward and a backward at least."""
    if (f"f{stage}", micro_batch) in found:
        yield "f"
        if (f"R{stage}", micro_batch) in found:
            yield "R"
    else:
        yield "F"
    yield from "IW" if (f"I{stage}", micro_batch) in found else "B"
