"""For all tests: hypothesis has no deadline, for a test must not fail because its machine is busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ranks import ON_THE_CPU

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def outcomes_of(request, tmp_path_factory):
    """Runs a script beside the test that starts jobs of its own, and reads what it wrote about them."""

    def run(script, timeout_seconds):
        out = tmp_path_factory.mktemp(Path(script).stem) / "outcomes.json"
        paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **ON_THE_CPU, "PYTHONPATH": paths}
        command = [sys.executable, str(request.path.with_name(script)), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        assert out.exists(), done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(out.read_text())

    return run
