"""A process that is killed in a fit ends the others, they say why, and the next fit goes on from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pytorch_lightning")


from tests.deaths import check_ends
from tests.lightning.killed_lightning_multiproc import CUTS, DEATHS, NUM_STEPS


@pytest.fixture(scope="module")
def outcomes(outcomes_of: Any) -> dict[str, Any]:
    return outcomes_of("killed_lightning_multiproc.py", timeout_seconds=1800)


@pytest.mark.parametrize("name", DEATHS)
def test_the_next_fit_goes_on_from_the_last_complete_checkpoint(outcomes: dict[str, Any], name: str) -> None:
    death, (killed, resumed, after) = DEATHS[name], outcomes[name]
    check_ends(death, killed, resumed, after)
    expected = outcomes["expected"][death.resumes_at :] if death.mode is None else after["expected"]
    assert [step for step, _ in after["rows"]] == list(range(death.resumes_at + 1, NUM_STEPS + 1))
    assert [loss for _, loss in after["rows"]] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    if death.mode is not None:
        assert after["mode"] == death.mode
        return
    # One that is given needs no warm-up. Else the warm-up goes on, or the plan is made at once for one process.
    assert after["had_plan"] == death.is_given_plan
    assert after["has_plan"] and after["cut"] == CUTS[death.num_processes]
