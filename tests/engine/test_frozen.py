"""Ranks that stand still, are lost or do not come: the others say for whom they wait, and end if it is in vain."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

from deepspeed_partition.engine.runtime import joining
from deepspeed_partition.options import PATIENCE_SECONDS, Options
from tests.ranks import MOST_SECONDS_APART

HERE = Path(__file__).parent
LONGEST_SECONDS = 150


class Job:
    """Ranks that are started by hand, each with a log."""

    def __init__(self, folder, script, *arguments, num_ranks=2, port=None):
        self.folder = folder
        if port is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
        own = {"WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOGS": folder}
        self.ranks = []
        for rank in range(num_ranks):
            more = {key: str(value) for key, value in (own | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **more}
            command = [sys.executable, str(HERE / script), *arguments]
            with (folder / f"log{rank}").open("w") as log:
                self.ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def log(self, rank):
        return (self.folder / f"log{rank}").read_text()

    def exits(self):
        """Of each rank, when all have ended by themselves; and how long after the first one the last one has."""
        deadline, ends = time.monotonic() + LONGEST_SECONDS, {}
        try:
            while len(ends) < len(self.ranks) and time.monotonic() < deadline:
                for rank in self.ranks:
                    if rank.poll() is not None:
                        ends.setdefault(rank, time.monotonic())
                time.sleep(0.05)
        finally:
            for rank in self.ranks:
                rank.kill()
        assert len(ends) == len(self.ranks), "it had to be killed"
        return [rank.returncode for rank in self.ranks], max(ends.values()) - min(ends.values())


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("frozen_multiproc.py", timeout_seconds=900)


def said(log):
    return [line for line in log.splitlines() if " has waited " in line]


def test_a_rank_that_is_stopped(outcomes):
    found = outcomes["stopped"]
    assert found["exits"] == [0, 0], found["logs"]
    [sentence] = said(found["logs"][0])
    assert "for rank 1, in the gradient of the output of stage 0 for micro-batch 0: " in sentence
    assert sentence.endswith(f"rank 1 (process {found['pids'][1]}) is stopped, as by SIGSTOP")
    assert "rank 0 goes on after " in found["logs"][0] and not said(found["logs"][1])


@pytest.mark.parametrize(
    ("what", "lines"),
    [
        ("computes", [["the gradient of the output of stage 0", "rank 1 runs the forward of micro-batch 0"]]),
        (
            "barrier",
            [
                ["saving a checkpoint", "rank 1 runs frozen_multiproc.py:"],
                ["engine.save_checkpoint() has waited", "so call save_checkpoint on every rank"],
            ],
        ),
        ("off", []),
    ],
)
def test_a_rank_that_takes_its_time_is_only_spoken_of(outcomes, what, lines):
    found = outcomes[what]
    assert found["exits"] == [0, 0], found["logs"]
    sentences = said(found["logs"][0])
    assert len(sentences) == len(lines), sentences
    assert all(word in sentence for sentence, words in zip(sentences, lines, strict=True) for word in words)


def test_who_waits_for_ever_ends_and_who_computes_does_not(outcomes):
    """Where no link breaks when a rank dies, as on NCCL."""
    found = outcomes["no_link_breaks"]
    assert found["exits"] == [1, -9, 0, 1], found["logs"]
    assert "rank 0 ends: it waits in recv(), called at frozen_multiproc.py" in found["logs"][0]
    assert "rank 3 ends: it waits in frozen_multiproc.py:" in found["logs"][3], "for its device"
    assert all(f"and rank 1 (process {found['pids'][1]}) has ended" in found["logs"][rank] for rank in (0, 3))
    assert "the end" in found["logs"][2]


def test_a_collective_in_a_layer_that_is_measured(outcomes):
    """Nothing was said but that both ranks wait in measuring and planning."""
    [sentence] = said(outcomes["measured"]["logs"][0])
    assert (
        "in measuring and planning, and all ranks wait for each other: rank 1 waits in all_reduce(), " in sentence
    )
    assert "called at frozen_multiproc.py:" in sentence and "(forward), within measuring and planning" in sentence


def test_a_rank_that_ends_while_its_thread_waits_for_the_store(outcomes):
    """The thread came back from it while Python ended, and the process was aborted after all was done."""
    found = outcomes["slow_store"]
    assert found["exits"] == [0, 0], found["logs"]


def test_a_rank_that_dies_before_it_has_joined(tmp_path):
    job = Job(tmp_path, "joining_multiproc.py", "dies")
    exits, seconds_apart = job.exits()
    assert exits == [1, 1] and seconds_apart < MOST_SECONDS_APART, "the other one once waited for 90 s"
    assert "rank 0 ends: it waits for rank 1 to join the job, which had begun and has ended" in job.log(0)


def test_a_rank_that_comes_late(tmp_path):
    job = Job(tmp_path, "joining_multiproc.py", "late")
    assert job.exits()[0] == [0, 0], job.log(0) + job.log(1)
    assert "rank 0 has waited " in job.log(0) and "to join the 2 ranks at port" in job.log(0)
    assert "all are here" in job.log(0)


def test_who_hangs_before_its_first_engine_is_not_said_to_join():
    with patch.object(joining.dist, "is_initialized", lambda: True):
        words = joining._what_for(2, "29500")
    assert words == "for other ranks in a call of torch.distributed, before its first engine"


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("", 0)) as somebody:
        job = Job(tmp_path, "joining_multiproc.py", "waits", port=somebody.getsockname()[1])
        exits, seconds_apart = job.exits()
    assert exits == [1, 1] and seconds_apart < MOST_SECONDS_APART, "the other one once waited for 90 s"
    assert "address already in use" in job.log(0)
    assert "rank 1 ends: it waits for rank 0 to join the job, which had begun and has ended" in job.log(1)


def test_ranks_are_patient_for_as_long_as_the_readme_says():
    engine = Path(__file__).parents[2] / "deepspeed_partition" / "engine"
    [row] = [line for line in (engine / "README.md").read_text().splitlines() if "| `patience_seconds` |" in line]
    assert float(row.split("|")[-2]) == PATIENCE_SECONDS == Options().patience_seconds == 20


def test_what_ranks_wait_in_is_said_by_functions_that_exist():
    """A rank says what it waits in by the names of the functions in its stack: a new name would go unnoticed."""
    import deepspeed
    import torch

    import deepspeed_partition
    import lightning_madpipe
    from deepspeed_partition.engine.runtime import watch

    places = [Path(package.__file__).parent for package in (deepspeed_partition, lightning_madpipe)]
    places += [Path(deepspeed.__file__).parent / name for name in ("runtime", "comm")]
    files = [file for place in places for file in place.rglob("*.py")]
    files.append(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
    text = "\n".join(file.read_text() for file in files)
    assert [name for name in watch._OPERATIONS if f"def {name}(" not in text] == []
