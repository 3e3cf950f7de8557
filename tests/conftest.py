"""For all tests: hypothesis has no deadline, for a test must not fail because its machine is busy."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests import exhaustive
from tests.choice import environment_for
from tests.server import ADDRESS, ON_THE_CPU, Process, collect_seldom

gc.disable()  # until all tests are imported, and a million objects of libraries with them

REPOSITORY = Path(__file__).parents[1]
LONGEST_FIRST = (
    "lightning/test_lightning_pipeline.py", "lightning/test_lightning_callbacks.py",
    "lightning/test_lightning_steps.py", "engine/test_checkpoints.py", "engine/test_training_state.py",
    "lightning/test_lightning_names.py", "engine/test_pipelines.py", "engine/test_frozen.py",
    "lightning/test_lightning_losses.py", "engine/test_any_plan.py", "test_examples.py",
    "lightning/test_lightning_ended.py", "engine/test_ends.py", "engine/test_scripts.py",
    "lightning/test_lightning_after_fit.py", "engine/test_strangers.py", "lightning/test_lightning_captured.py",
    "engine/test_killed.py", "lightning/test_lightning_killed.py", "engine/test_timeline.py",
)  # fmt: skip
"""Files in whose tests workers wait; a worker that began last with one of them would leave cores idle."""


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="also run what is one of many of a kind")
    parts = [*map(str, range(exhaustive.NUM_PARTS)), "all"]
    parser.addoption("--part", choices=parts, help="of files with many trainings, what runs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One more worker than there are cores, at most ``--maxprocesses``: another computes while ranks wait."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:  # which xdist reads
        return None
    return len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) + 1


def pytest_configure(config):
    """Let processes that tests start find this package, and let modules know what is to run."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if ADDRESS not in os.environ:  # else this is a worker
        folder = tempfile.mkdtemp(prefix="madpipe-tests-")
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
        os.environ[ADDRESS] = f"{folder}/server"
    if config.getoption("--exhaustive"):
        os.environ[exhaustive.VARIABLE] = "1"
    settings.register_profile("no deadline", deadline=None, max_examples=exhaustive.some(100))
    settings.load_profile("no deadline")


def pytest_collection_modifyitems(config, items):
    """Leave out what is exhaustive, unless it is asked for; let long files come first."""
    folder = REPOSITORY / "tests"
    items.sort(key=lambda item: _place(str(item.path.relative_to(folder))))
    one_by_one = any("::" in argument for argument in config.args)
    if exhaustive.is_exhaustive() or one_by_one:
        return
    if unknown := exhaustive.unknown(items, folder):
        raise pytest.UsageError(f"tests/exhaustive.py names tests that are not there: {', '.join(unknown)}")
    has_asked = config.getoption("keyword") or any(argument.endswith(".py") for argument in config.args)
    if left_out := exhaustive.left_out(items, folder, config.getoption("--part") or ("all" if has_asked else "0")):
        config.hook.pytest_deselected(items=left_out)
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]


def pytest_collection_finish():
    gc.freeze()
    collect_seldom()
    gc.enable()


def _place(file):
    return LONGEST_FIRST.index(file) if file in LONGEST_FIRST else len(LONGEST_FIRST)


@pytest.fixture(scope="module")
def outcomes_of(request, tmp_path_factory):
    """Runs a script beside the test that starts jobs of its own, and reads what it wrote about them."""

    def run(script, timeout_seconds):
        out = tmp_path_factory.mktemp(Path(script).stem) / "outcomes.json"
        environment = {**os.environ, **ON_THE_CPU, **environment_for(request)}
        log = out.with_name("output.txt")
        process = Process(request.path.with_name(script), [str(out)], environment, log)
        process.wait(timeout_seconds)
        process.kill()
        assert out.exists(), log.read_text()[-10000:]
        return json.loads(out.read_text())

    return run
