"""Starts ``any_plan_multiproc.py`` with 2, 3 and 4 processes; each of its cases is a test here."""

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
