"""Lets the files of this folder import each other, in tests as in workers; starts the workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ON_THE_CPU, run_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def check_case(tmp_path_factory):
    """Checks what became of a case; a worker is started for the first one that needs it with so many processes."""
    known = {}

    def check(worker, num_processes, case):
        if (worker, num_processes) not in known:
            folder = tmp_path_factory.mktemp("cases")
            known[worker, num_processes] = run_worker(HERE / worker, num_processes, folder)
        found = known[worker, num_processes]
        assert case in found, f"not run, because another case failed:\n{found['output'][-3000:]}"
        assert found[case] == "", found[case]

    return check


@pytest.fixture(scope="module")
def outcomes_of(tmp_path_factory):
    """Runs a script that starts jobs of its own, and reads what it wrote about them."""

    def run(script, timeout_seconds):
        out = tmp_path_factory.mktemp(Path(script).stem) / "outcomes.json"
        paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **ON_THE_CPU, "PYTHONPATH": paths}
        command = [sys.executable, str(HERE / script), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        assert out.exists(), done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(out.read_text())

    return run


def run_worker(script: Path, num_processes: int, folder: Path) -> dict[str, str]:
    """What became of each case of ``script``: an empty text, or what went wrong."""
    out, log = folder / "outcomes.json", folder / "output.txt"
    chosen = {name: os.environ[name] for name in ("MADPIPE_CASES",) if name in os.environ}
    run_ranks(script, [str(out), str(folder)], num_processes, log, timeout_seconds=900, variables=chosen)
    printed = log.read_text()
    if not out.exists():
        raise RuntimeError(f"the worker wrote no outcomes:\n{printed[-12000:]}")
    return {"output": printed, **json.loads(out.read_text())}
