"""Starts ``any_plan_multiproc.py`` with 2, 3 and 4 processes; each of its cases is a test here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.engine.any_plan_multiproc import CASES

WORKER = Path(__file__).with_name("any_plan_multiproc.py")


@pytest.mark.parametrize(
    ("num_processes", "case"), [(processes, case) for processes, cases in CASES.items() for case in cases]
)
def test_case(check_case, num_processes, case):
    check_case(WORKER.name, num_processes, case)


def test_all_ranks_end_when_the_data_of_one_does():
    """In the middle of a step, with tensors on their way; and none aborts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    command += [str(WORKER.with_name("failing_multiproc.py"))]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "ended after 2 micro-batches" in output, output[-3000:]
    assert "SIGABRT" not in output and "terminate called" not in output, output[-3000:]
