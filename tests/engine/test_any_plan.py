"""Starts ``any_plan_multiproc.py`` with 2, 3 and 4 processes; each of its cases is a test here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from any_plan_multiproc import CASES
from harness import run_worker

WORKER = Path(__file__).with_name("any_plan_multiproc.py")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Outcomes by number of processes; a worker is started for the first test that needs it."""
    known = {}

    def of(num_processes):
        if num_processes not in known:
            known[num_processes] = run_worker(WORKER, num_processes, tmp_path_factory.mktemp("any_plan"))
        return known[num_processes]

    return of


@pytest.mark.parametrize(
    ("num_processes", "case"), [(processes, case) for processes, cases in CASES.items() for case in cases]
)
def test_case(outcomes, num_processes, case):
    found = outcomes(num_processes)
    assert case in found, f"not run, because another case failed:\n{found['output'][-3000:]}"
    assert found[case] == "", found[case]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("killed", "SIGKILL"),
        ("ended", "ended after 2 micro-batches"),
    ],
)
def test_all_ranks_end_when_one_does(how, cause):
    """In the middle of a step, with tensors on their way; and none aborts."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    command += [str(WORKER.with_name("failing_multiproc.py")), how]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert cause in output, output[-3000:]
    assert "SIGABRT" not in output and "terminate called" not in output, output[-3000:]
