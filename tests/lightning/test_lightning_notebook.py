"""A pipeline in a notebook: ranks are forked from it, and what they have trained comes back."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import run_ranks

SCRIPT = Path(__file__).with_name("notebook_script.py")


def test_a_notebook_trains_as_one_process(tmp_path: Path) -> None:
    """Weights, metrics, predictions, the plan and errors of forked ranks, all in one process after the other."""
    log = tmp_path / "log"
    code = run_ranks(SCRIPT, [str(tmp_path)], None, log, timeout_seconds=200)
    said = log.read_text()
    assert code == 0 and "\ndone" in said, said[-3000:]
    assert said.count("2 processes, forked from this one, run the pipeline") == 4, "once per Trainer"
    assert said.count("the fit was interrupted, and its ranks have ended") == 1
    of_one_stage = said.partition("one stage has the whole model")[2]
    lines = [line for line in of_one_stage.splitlines()[1:] if "[madpipe]" in line]
    assert of_one_stage and all(" is a folder, into which each process writes" in line for line in lines), lines
