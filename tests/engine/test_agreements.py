"""What the ranks of one host agree on over sockets: here ranks are threads."""

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from deepspeed_partition.engine.runtime.agreements import Agreement, Neighbours


def ranks_of(size, timeout_seconds=30.0):
    """The agreements of so many ranks, connected as those of a job."""
    rounds = [[] for _ in range(size)]
    for distance in [2**place for place in range((size - 1).bit_length())]:
        pairs = [socket.socketpair(socket.AF_UNIX) for _ in range(size)]
        for rank in range(size):
            before, behind = (rank - distance) % size, (rank + distance) % size
            rounds[rank].append(Neighbours(behind, before, pairs[rank][0], pairs[before][1]))
    return [Agreement(rank, each, timeout_seconds) for rank, each in enumerate(rounds)]


def on_each(ranks, said):
    """What each rank hears, or raises, when all say something at once."""

    def agree(each):
        rank, values = each
        try:
            return rank.any_bits(values)
        except Exception as error:
            return error

    with ThreadPoolExecutor(max(len(ranks), 1)) as threads:
        return list(threads.map(agree, zip(ranks, said, strict=True)))


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 9),
    num_values=st.integers(1, 3),
    data=st.data(),
)
def test_all_hear_the_bits_of_all(size, num_values, data):
    ranks = ranks_of(size)
    try:
        for _ in range(3):
            number = st.integers(0, 2**63 - 1)
            said = [data.draw(st.lists(number, min_size=num_values, max_size=num_values)) for _ in ranks]
            expected = [0] * num_values
            for values in said:
                expected = [mine | other for mine, other in zip(expected, values, strict=True)]
            assert on_each(ranks, said) == [expected] * size
    finally:
        for rank in ranks:
            rank.close()


def test_a_rank_that_has_ended_is_named():
    ranks = ranks_of(2)
    ranks[1].close()
    [error] = on_each(ranks[:1], [[1]])
    assert isinstance(error, RuntimeError)
    assert str(error) == "Connection closed by peer: rank 1 has ended"
    ranks[0].close()


def test_a_rank_that_comes_from_another_place_is_named():
    ranks = ranks_of(2)
    on_each(ranks, [[1], [2]])
    ranks[1]._count += 1  # as after an agreement that an exception has ended
    errors = on_each(ranks, [[1], [2]])
    assert [str(error) for error in errors] == [
        "rank 1 is at agreement 3 of the job, and rank 0 at 2",
        "rank 0 is at agreement 2 of the job, and rank 1 at 3",
    ]
    for rank in ranks:
        rank.close()


def test_a_rank_that_does_not_come_is_named_after_a_while():
    ranks = ranks_of(2, timeout_seconds=0.05)
    [error] = on_each(ranks[:1], [[1]])
    assert isinstance(error, TimeoutError)
    assert str(error) == "rank 1 has not come to an agreement of all ranks within 0.05 s"
    for rank in ranks:
        rank.close()


OF_A_JOB = """
import sys
from datetime import timedelta
import deepspeed, torch
import torch.distributed as dist
from deepspeed_partition.engine.pipeline.meetings import Meetings
from deepspeed_partition.engine.runtime import collectives
from deepspeed_partition.engine.runtime.transfers import Transfers

dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1, timeout=timedelta(minutes=int(sys.argv[2]))
)
own, meetings = collectives.own_groups(), Meetings([[0]], 0)
transfers = Transfers([[0]], [0], torch.device("cpu"))
groups = own.objects, own.tensors, meetings._group, meetings._sums, meetings._lasts, *transfers._groups
assert len(transfers._groups) == 2
seconds = {each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in groups}
print(*seconds, collectives._agreements[dist.group.WORLD]._timeout_seconds)
"""


@pytest.mark.parametrize(("minutes", "expected"), [(180, 180), (5, 30)])
def test_ranks_wait_as_long_as_the_job_allows(minutes, expected, tmp_path):
    """Others gave up after 30 minutes where a first batch took longer, though the program allowed hours."""
    command = [sys.executable, "-c", OF_A_JOB, str(tmp_path / "store"), str(minutes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [str(60.0 * expected)] * 2, done.stdout
