"""Starts ``strangers_multiproc.py`` once; each of its cases is a test here."""

import pytest

torch = pytest.importorskip("torch")

from tests.engine.strangers_multiproc import CASES  # noqa: E402


@pytest.mark.parametrize("case", CASES)
def test_case(check_case, case):
    check_case("strangers_multiproc.py", 2, case)
