"""What the tests of the command line share."""

from __future__ import annotations

import json

import pytest

from tests.planner.test_files import CHAIN


@pytest.fixture
def chain(tmp_path):
    """The path of a chain file of two layers."""
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(CHAIN))
    return str(path)
