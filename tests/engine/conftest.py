"""Lets the files of this folder import each other, in tests as in workers; starts the workers."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def check_case(tmp_path_factory):
    """Checks what became of a case; a worker is started for the first one that needs it with so many processes."""
    from harness import run_worker

    known = {}

    def check(worker, num_processes, case):
        if (worker, num_processes) not in known:
            script = Path(__file__).with_name(worker)
            known[worker, num_processes] = run_worker(script, num_processes, tmp_path_factory.mktemp("cases"))
        found = known[worker, num_processes]
        assert case in found, f"not run, because another case failed:\n{found['output'][-3000:]}"
        assert found[case] == "", found[case]

    return check
