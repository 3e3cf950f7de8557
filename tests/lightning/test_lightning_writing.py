"""What steps and hooks log, count and write is what it is in one process, or is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lightning.test_lightning_pipeline import Records, assert_same, records_of


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder: Path = tmp_path_factory.mktemp("writing")
    return records_of(request, 2, folder, "writing")


@pytest.mark.parametrize("moved_after", ["epochs", "steps"])
def test_numbers_that_are_logged_for_layers_go_with_them(two: Records, moved_after: str) -> None:
    """A rank went on showing the last number of a layer that had left it, and means of an epoch began anew."""
    everything, *ranks = (record["numbers_of_layers"][moved_after] for record in (two.reference, *two.ranks))
    for own in ranks:
        for row, expected in zip(own, everything, strict=True):
            assert_same(row, {name: expected[name] for name in row})
        assert own[0].keys() != own[-1].keys() and own[-1]
    assert {name for own in ranks for name in own[-1]} == everything[-1].keys()
    num_weights = [sum(name.startswith("norm/") for name in own[-1]) for own in ranks]
    assert sum(num_weights) == sum(name.startswith("norm/") for name in everything[-1])
