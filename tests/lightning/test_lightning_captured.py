"""Modules that name no layers train through the strategy like in one process."""

from __future__ import annotations

import pytest

from tests.lightning import captured_cases
from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return records_of(request, 2, tmp_path_factory.mktemp("two"), "captured")


@pytest.mark.parametrize("case", [case.__name__ for case in captured_cases.SAME_AS_SINGLE[2]])
def test_a_module_as_it_is_trains_like_one_process(two: Records, case: str) -> None:
    assert_same(two.of(case), two.reference[case])
