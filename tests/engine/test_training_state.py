"""Starts ``training_state_multiproc.py`` with 2 and with 4 processes; each of its cases is a test here."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from harness import run_worker  # noqa: E402
from training_state_multiproc import CASES  # noqa: E402

WORKER = Path(__file__).with_name("training_state_multiproc.py")


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory):
    """Outcomes by number of processes; a worker is started for the first test that needs it."""
    known = {}

    def of(num_processes):
        if num_processes not in known:
            known[num_processes] = run_worker(WORKER, num_processes, tmp_path_factory.mktemp("cases"))
        return known[num_processes]

    return of


@pytest.mark.parametrize(
    ("num_processes", "case"), [(processes, case) for processes, cases in CASES.items() for case in cases]
)
def test_case(outcomes, num_processes, case):
    found = outcomes(num_processes)
    assert case in found, f"not run, because another case failed:\n{found['output'][-3000:]}"
    assert found[case] == "", found[case]
