"""Whatever goes wrong on one rank under Lightning: both ranks end, or both go on, and both say what it was."""

from __future__ import annotations

import pytest

pytest.importorskip("pytorch_lightning")

from tests.lightning.ended_lightning_multiproc import CASES
from tests.ranks import MOST_SECONDS_APART


@pytest.fixture(scope="module")
def outcomes(outcomes_of):
    return outcomes_of("ended_lightning_multiproc.py", timeout_seconds=1800)


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_end(outcomes, name):
    case, found = CASES[name], outcomes[name]
    here = max(case.rank, 0)
    shown = "\n".join(log[-2500:] for log in found["logs"])
    assert (found["exits"][here], found["exits"][1 - here]) == case.exits, shown
    assert found["seconds_apart"] < MOST_SECONDS_APART, shown
    # What all ranks agree upon is said by rank 0 alone.
    said_by = 0 if case.exits == (0, 0) and not name.startswith("caught") else 1 - here
    assert case.told in found["logs"][said_by], shown
    # A signal in an evaluation was answered when training went on.
    assert not name.startswith("sigterm") or not any("validated" in log for log in found["logs"]), shown
