"""One synchronous step in DeepSpeed's order: fill, steady state, drain; the optimizer is not counted.

In DeepSpeed's ``TrainSchedule``, sends and receives block both ends, and nothing overlaps. In
``step_simulator.py`` transfers run beside computation, as early as their link and buffers allow.

With several pipelines in parallel a stage all-reduces its gradients after its last backward, as DeepSpeed does,
while the stages before it still drain; the step has ended when the last all-reduce has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed_partition.planner.clock import TimedChain
from deepspeed_partition.planner.schedule import Order

Instruction = tuple[str, int]


def one_f_one_b_order(stage: int, depth: int, num_micro_batches: int) -> Order:
    """Return the 1F1B order of one stage: ``depth`` forwards, then one backward, one forward, then drain.

    ::

        depth 2, 4 micro-batches:   F0 F1 B0 F2 B1 F3 B2 B3
    """
    order: list[tuple[str, int]] = []
    for step in range(num_micro_batches + depth):
        if step >= depth:
            order.append((f"B{stage}", step - depth))
        if step < num_micro_batches:
            order.append((f"F{stage}", step))
    # A depth beyond the number of micro-batches leaves nothing between warm-up and drain.
    return tuple(order)


def deepspeed_instructions(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Instruction]:
    """Yield DeepSpeed's ``TrainSchedule`` for one stage: computations and transfers, in order.

    Each result is sent when the *next* step of the stage begins, and a gradient is received before the last
    activation is sent, so that neighbours always meet in pairs.
    """
    previous: tuple[str, int] | None = None
    for step in range(2 * (num_micro_batches + num_stages - 1)):
        forward = step % 2 == stage % 2
        micro_batch = (step - stage) // 2 if forward else (step + stage + 1) // 2 - num_stages
        runs = 0 <= micro_batch < num_micro_batches
        if forward:
            if previous and stage > 0:
                yield "SendGrad", previous[1]
            if runs and stage > 0:
                yield "RecvActivation", micro_batch
        else:
            if runs and stage + 1 < num_stages:
                yield "RecvGrad", micro_batch
            if previous and stage + 1 < num_stages:
                yield "SendActivation", previous[1]
        if runs:
            yield "ForwardPass" if forward else "BackwardPass", micro_batch
        previous = ("forward" if forward else "backward", micro_batch) if runs else None


def blocking_step(
    times: TimedChain, boundaries: Sequence[int], num_micro_batches: int, allreduce: Sequence[int] = ()
) -> int:
    """Return the ticks of one step of a contiguous partition under DeepSpeed's schedule.

    A transfer blocks both ends: it begins when both neighbours have come to it, and holds both until it has
    ended.

    Args:
        allreduce: ticks of the all-reduce of each stage; left out, there is one pipeline.
    """
    num_stages = len(boundaries) - 1
    lists = [list(deepspeed_instructions(stage, num_stages, num_micro_batches)) for stage in range(num_stages)]
    position = [0] * num_stages
    now = [0] * num_stages
    cost = {}
    beside = times.ticks_beside_layers(boundaries, range(num_stages))
    for stage in range(num_stages):
        first, last = boundaries[stage], boundaries[stage + 1]
        cost[stage, "ForwardPass"] = times.forward_ticks(first, last) + beside[stage]
        cost[stage, "BackwardPass"] = times.backward_ticks(first, last) + beside[stage]

    def meet(stage: int, neighbour: int, wanted: Instruction, transfer: int) -> bool:
        if not 0 <= neighbour < num_stages or position[neighbour] >= len(lists[neighbour]):
            return False
        if lists[neighbour][position[neighbour]] != wanted:
            return False
        now[stage] = now[neighbour] = max(now[stage], now[neighbour]) + transfer
        position[stage] += 1
        position[neighbour] += 1
        return True

    partner = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}
    advanced = True
    while advanced:
        advanced = False
        for stage in range(num_stages):
            while position[stage] < len(lists[stage]):
                name, micro_batch = lists[stage][position[stage]]
                if name.endswith("Pass"):
                    now[stage] += cost[stage, name]
                    position[stage] += 1
                elif name in partner:
                    receive, side = partner[name]
                    boundary = boundaries[stage + 1] if side == 1 else boundaries[stage]
                    if not meet(stage, stage + side, (receive, micro_batch), int(times.one_way[boundary])):
                        break
                else:
                    break  # a receive ends when its sender comes
                advanced = True
    assert all(position[stage] == len(lists[stage]) for stage in range(num_stages)), "DeepSpeed's schedule blocks"
    return _with_allreduce(now, allreduce)


def _with_allreduce(ends: Sequence[int], allreduce: Sequence[int]) -> int:
    return max(end + ticks for end, ticks in zip(ends, allreduce or [0] * len(ends), strict=True))
