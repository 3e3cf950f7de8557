"""What both ends of a boundary know of its shapes, without processes."""

from __future__ import annotations

import random
from collections import defaultdict, deque

import pytest
import torch

from tests.engine import plans

pytest.importorskip("deepspeed")

from deepspeed_partition.engine.runtime.boundary_shapes import (
    MARK_BYTES,
    Shapes,
    ShapesOfBoundary,
    bases_of,
)
from deepspeed_partition.schedule.instructions import Message, Program, Transfer
from deepspeed_partition.schedule.lowering import with_transfers

MARK = bytes(range(MARK_BYTES))
SMALL, LARGE, TUPLE, TINY = (
    Shapes.of(torch.zeros(4, 2)),
    Shapes.of(torch.zeros(6, 2)),
    Shapes.of((torch.zeros(4, 2), torch.zeros(3, dtype=torch.int64))),
    Shapes.of(torch.zeros(1)),
)


def run_both_ends(program: Program, batches: list[dict[Message, Shapes]], pick: random.Random) -> list[int]:
    """Run the transfers of batches, devices in a random order; return how many headers each batch sends."""
    bases = bases_of(program)
    sent: dict[int, ShapesOfBoundary] = defaultdict(ShapesOfBoundary)
    taken: dict[int, ShapesOfBoundary] = defaultdict(ShapesOfBoundary)
    headers = []
    for shapes in batches:
        for each in (*sent.values(), *taken.values()):
            each.begin()
        for_room: dict[Message, Shapes | None] = {}
        on_the_way: dict[Message, Shapes | None] = {}
        lists = [deque(each for each in one if isinstance(each, Transfer)) for one in program.lists]
        while any(lists):
            instructions = pick.choice([one for one in lists if one])
            kind, message = instructions[0].kind, instructions[0].message
            arrived = message in on_the_way and message in for_room
            if message.direction == "F" and kind == "W" and not arrived:
                continue
            instructions.popleft()
            if message.direction == "B" or kind == "D":
                continue
            known, basis = (sent if kind == "S" else taken)[message.boundary], bases[message]
            if kind == "S":
                on_the_way[message] = known.expected(basis)
            elif kind == "R":
                for_room[message] = known.expected(basis)
            else:
                assert on_the_way[message] == for_room[message], message
            if kind != "R":
                known.note(message.micro_batch, basis, shapes[message])
        headers.append(sum(shapes is None for shapes in on_the_way.values()))
    return headers


@pytest.mark.parametrize("seed", range(40))
def test_both_ends_expect_the_same_whatever_comes(seed: int) -> None:
    pick = random.Random(seed)
    devices = [0, 1, *(pick.randrange(2) for _ in range(pick.randint(0, 3)))]
    program = with_transfers(plans.depth_first(devices, 6, pick.randint(1, 6)), devices)
    messages = list(bases_of(program))

    def batch() -> dict[Message, Shapes]:
        kinds = pick.choice([[SMALL], [SMALL], [LARGE], [SMALL, LARGE, TUPLE, TINY]])
        return {message: pick.choice(kinds) for message in messages}

    run_both_ends(program, [batch() for _ in range(8)], pick)


def test_headers_only_after_a_change() -> None:
    program = with_transfers(plans.depth_first((0, 1), 6, 3), (0, 1))
    messages = list(bases_of(program))
    last_smaller = {message: LARGE if message.micro_batch < 5 else SMALL for message in messages}
    batches = [dict.fromkeys(messages, shapes) for shapes in (LARGE, LARGE, LARGE, SMALL, SMALL, SMALL)]
    found = run_both_ends(program, [*batches, last_smaller, last_smaller], random.Random(1))
    # The first batch tells, and the one after a surprise: SMALL in the fourth, LARGE in the seventh.
    assert found == [6, 0, 0, 0, 6, 0, 0, 6]


def test_data_too_short_for_a_mark_has_headers() -> None:
    program = with_transfers(plans.depth_first((0, 1), 4, 2), (0, 1))
    batch = dict.fromkeys(bases_of(program), TINY)
    assert run_both_ends(program, [batch] * 3, random.Random(1)) == [4, 4, 4]


def test_a_mark_is_found_and_data_is_not_taken_for_one() -> None:
    for shapes in (SMALL, LARGE, TUPLE):
        marked = shapes.marked(MARK)
        assert Shapes.of(marked) == shapes
        assert shapes.bears(MARK, marked)
        assert not shapes.bears(MARK, shapes.marked(MARK[::-1]))
        assert not shapes.bears(MARK, shapes.marked(MARK[:-1] + b"\0"))
    assert TINY.marked_tensor is None and not TINY.bears(MARK, torch.zeros(1))
    assert Shapes.of(()).marked_tensor is None


@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (0, 5), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_room_is_made_anew_for_each_message(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Red where two messages share their room, or where room is not as dense as what is sent."""
    tensor = torch.zeros(shape, dtype=dtype)
    shapes = Shapes.of(tensor)
    assert shapes is Shapes.of(torch.ones(shape, dtype=dtype))
    rooms = [shapes.empty(torch.device("cpu")) for _ in range(3)]
    for room in rooms:
        assert isinstance(room, torch.Tensor)
        assert (room.shape, room.dtype, room.stride()) == (tensor.shape, dtype, tensor.stride())
        room.copy_(tensor)
    assert len({room.untyped_storage().data_ptr() for room in rooms}) == (3 if tensor.numel() else 1)
