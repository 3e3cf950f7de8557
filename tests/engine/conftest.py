"""Lets the files of this folder import each other, in tests as in workers; starts the workers."""

import json
from pathlib import Path

import pytest

from tests.choice import environment_for
from tests.engine.harness import WAITING
from tests.ranks import run_ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def check_case(request, tmp_path_factory):
    """Checks what became of a case; a worker is started for the first one that needs it with so many processes."""
    known = {}

    def check(worker, num_processes, case):
        if (worker, num_processes) not in known:
            folder = tmp_path_factory.mktemp("cases")
            chosen = environment_for(request, num_processes=num_processes)
            known[worker, num_processes] = run_worker(HERE / worker, num_processes, folder, chosen)
        found = known[worker, num_processes]
        assert case in found, f"not run, because another case failed:\n{found['output'][-3000:]}"
        if found[case] == WAITING:  # each rank has printed where it waits
            pytest.fail(f"{WAITING}:\n{found['output'][-20000:]}")
        assert found[case] == "", found[case]

    return check


def run_worker(script: Path, num_processes: int, folder: Path, chosen: dict[str, str]) -> dict[str, str]:
    """What became of each chosen case of ``script``: an empty text, or what went wrong."""
    out, log = folder / "outcomes.json", folder / "output.txt"
    run_ranks(script, [str(out), str(folder)], num_processes, log, timeout_seconds=2400, variables=chosen)
    printed = log.read_text()
    if not out.exists():
        raise RuntimeError(f"the worker wrote no outcomes:\n{printed[-12000:]}")
    return {"output": printed, **json.loads(out.read_text())}
