"""Starts ``cases_multiproc.py`` once with 2 and once with 4 processes; each of its cases is a test here."""

import pytest

torch = pytest.importorskip("torch")

from tests.engine.cases_multiproc import CASES  # noqa: E402


@pytest.mark.parametrize(
    ("num_processes", "case"), [(processes, case) for processes, cases in CASES.items() for case in cases]
)
def test_case(check_case, num_processes, case):
    check_case("cases_multiproc.py", num_processes, case)
