"""Starts ``timeline_multiproc.py``; each of its cases is a test here."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from harness import run_worker
from timeline_multiproc import NAMES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_worker(Path(__file__).with_name("timeline_multiproc.py"), 2, tmp_path_factory.mktemp("timeline"))


@pytest.mark.parametrize("case", NAMES)
def test_case(outcomes, case):
    assert case in outcomes, f"not run, because another case failed:\n{outcomes['output'][-3000:]}"
    assert outcomes[case] == "", outcomes[case]
