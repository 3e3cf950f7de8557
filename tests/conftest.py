"""For all tests: hypothesis has no deadline, for a test must not fail because its machine is busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.choice import environment_for
from tests.ranks import ON_THE_CPU

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

REPOSITORY = Path(__file__).parents[1]
LONGEST_FIRST = ("tests/engine", "tests/lightning")
"""Folders whose files take longest: a worker that begins with them does not end with one of them alone."""


def pytest_configure(config):
    """Let processes that tests start find this package."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="also run the cases that are many of a kind")


def pytest_collection_modifyitems(config, items):
    """Leave out what is exhaustive, unless it is asked for; let long files come first."""
    items.sort(key=lambda item: not str(item.path.relative_to(REPOSITORY)).startswith(LONGEST_FIRST))
    if config.getoption("--exhaustive") or "exhaustive" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.fixture(scope="module")
def outcomes_of(request, tmp_path_factory):
    """Runs a script beside the test that starts jobs of its own, and reads what it wrote about them."""

    def run(script, timeout_seconds):
        out = tmp_path_factory.mktemp(Path(script).stem) / "outcomes.json"
        environment = {**os.environ, **ON_THE_CPU, **environment_for(request)}
        command = [sys.executable, str(request.path.with_name(script)), str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_seconds)
        assert out.exists(), done.stdout[-2000:] + done.stderr[-8000:]
        return json.loads(out.read_text())

    return run
