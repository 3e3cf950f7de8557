"""Starts ``timeline_multiproc.py``; each of its cases is a test here."""

import pytest

pytest.importorskip("torch")

from tests.engine.timeline_multiproc import NAMES


@pytest.mark.parametrize("case", NAMES)
def test_case(check_case, case):
    check_case("timeline_multiproc.py", 2, case)
