"""A pipeline in a notebook: ranks are forked from it, and what they have trained comes back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_madpipe.forked_ranks import ForkedRanks, RunOfRanks
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


class Counts(nn.Linear):
    """Has buffers that grow while it trains."""

    def __init__(self, number: int) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(number))
        self.register_buffer("recent", torch.zeros(number), persistent=False)
        self.register_buffer("last", torch.ones(2) if number else None)


class Taking(ForkedRanks):
    """A launcher that notes what it says."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(plan_of_ranks=None))
        self.said: list[str] = []
        self._lightning: Any = SimpleNamespace(warn=self.said.append)


def test_what_ranks_have_trained_is_taken_over_whatever_else_they_had() -> None:
    """A fit ended in an error of zip() where configure_callbacks had more checkpoints, with the old weights.

    A buffer that had grown was refused, or stayed as it was.
    """
    here, there, launcher = Counts(0), Counts(3), Taking()
    buffers = {"recent": there.recent}
    kept = SimpleNamespace(state_key="kept", best_model_path="")
    trainer = SimpleNamespace(
        lightning_module=here, callback_metrics={}, logged_metrics={}, checkpoint_callbacks=[kept],
        fit_loop=SimpleNamespace(load_state_dict=lambda state: None),
    )  # fmt: skip
    checkpoints = {"of the model": {"best_model_path": "other"}, "kept": {"best_model_path": "best"}}
    run = RunOfRanks(
        returned=None, trainer_state="finished", weights=there.state_dict(), buffers=buffers, metrics=({}, {}),
        progress={}, checkpoints=checkpoints, plan=None,
    )  # fmt: skip
    launcher._take_over(run, trainer)
    assert torch.equal(here.weight, there.weight) and here.state_dict().keys() == there.state_dict().keys()
    assert all(torch.equal(buffer, here.get_buffer(name)) for name, buffer in there.named_buffers())
    assert kept.best_model_path == "best" and trainer.state == "finished"
    [said] = launcher.said
    assert said.startswith("of the model came from configure_callbacks in the ranks")
