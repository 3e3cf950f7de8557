"""Fits until one process is killed, and goes on from what is there; see ``test_lightning_killed.py``.

The packages are imported once, and each run is a job of processes that are forked from here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch.utils.data import ConcatDataset, DataLoader

import lightning_madpipe  # noqa: F401  before any fork
from deepspeed_partition.engine.checkpoint import atomic_folders
from deepspeed_partition.engine.repartition import layer_moves
from deepspeed_partition.engine.warmup import run_plan
from tests.deaths import kill, kill_before, run_deaths
from tests.engine.asynchronous_cases import plan_for
from tests.engine.running import batches
from tests.lightning import asynchronous_cases as endless
from tests.lightning import lightning_cases as cases

NUM_STEPS, STEPS_PER_EPOCH, SAVED_EVERY = 8, 4, 3
CUTS = {2: [0, 2, 8], 1: [0, 8]}
"""Planned after an epoch; the trial cut is another one."""


class Death(NamedTuple):
    """Where which rank dies, and with how many steps the next run begins."""

    rank: int
    step: int
    before: tuple[Any, str, int | str] | None
    """A call of a function in a module from that step on, or with such a path; None: of the step's optimizer."""
    resumes_at: int
    num_processes: int = 2
    """Of the run that goes on."""
    by_word: bool = True
    """It is given ``ckpt_path="last"``, else the path of that folder."""
    is_given_plan: bool = False
    """It is given the plan that the killed run had saved."""
    mode: str | None = None
    """What ``weight_versions`` is in the plan that both are given; None: the pipeline drains."""
    stage: int = 0
    """Of ZeRO, where there is a mode."""
    precision: str = "32-true"


DEATHS = {
    "in_a_step_of_the_warm_up": Death(1, 3, None, 3),
    "while_rank_0_plans": Death(0, 4, (run_plan, "make_plan", 1), 3),
    "while_layers_move": Death(1, 4, (layer_moves, "receive_tensor", 2), 3, num_processes=1),
    "after_the_move": Death(0, 4, None, 3, is_given_plan=True),
    "while_a_checkpoint_is_saved": Death(1, 5, (torch, "save", "*step=6.ckpt*/layer_07-model_states.pt"), 3),
    "before_the_last_one_has_its_name": Death(
        0, 5, (atomic_folders.os, "replace", "*/.last.ckpt.unfinished"), 6, num_processes=1, by_word=False
    ),
    # While batches are in flight: the step of batch 4 is made during batch 5.
    "in_flight_with_stashing_and_zero": Death(1, 4, None, 3, mode="stashing", stage=1),
    "in_flight_with_2bw_and_bf16": Death(1, 4, None, 3, mode="2bw", precision="bf16-mixed"),
    "in_flight_with_vertical_sync": Death(1, 4, None, 3, mode="vertical-sync"),
}


class Dying(Callback):
    """Kills this process where it is to die."""

    def __init__(self, death: Death) -> None:
        self._death = death

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self._death.before is not None and trainer.global_step == self._death.step:
            kill_before(*self._death.before)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self._death.before is None and module.global_step == self._death.step:
            kill()


class Planned(Callback):
    """Whether there was a plan when training began."""

    at_start = False

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.at_start = trainer.strategy.plan is not None


def data() -> DataLoader:
    """Batches that are alike: Lightning reads an epoch from its beginning where it resumes within one."""
    return DataLoader(ConcatDataset([cases.samples(16)] * STEPS_PER_EPOCH), batch_size=16)


def script(folder: Path, out: Path, death: Death, kills: bool, rank: int) -> None:
    """What a user writes: the same for the run that is killed and for the next one."""
    torch.set_num_threads(1)
    if death.mode is not None:
        without_a_drain(folder, out, death, kills, rank)
        return
    num_processes = int(os.environ["WORLD_SIZE"])
    plan = folder.with_suffix(".plan.json")
    strategy: dict[str, Any] = {"algorithm": CUTS[num_processes], "warmup_epochs": 1, "stage": 1}
    strategy["plan" if death.is_given_plan and not kills else "save_plan"] = str(plan)
    recorder, planned, keep = cases.Recorder(), Planned(), saving(folder)
    dying = [Dying(death)] if kills and rank == death.rank else []
    host = cases.Host(folder, num_processes, pipelined=True)
    trainer = host.trainer(recorder, planned, keep, *dying, strategy=strategy)
    last = "last" if death.by_word else str(folder / "last.ckpt")
    trainer.fit(cases.seeded(seed=0 if kills else 99), data(), ckpt_path=None if kills else last)
    trainer.save_checkpoint(folder / "last.ckpt")  # which leaves nothing of what a kill left
    if rank == 0:
        found = trainer.strategy
        ended = {"rows": recorder.rows, "had_plan": planned.at_start, "has_plan": found.plan is not None}
        out.write_text(json.dumps({**ended, "cut": found.pipeline.parts}))


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, every_n_train_steps=SAVED_EVERY, save_last=True, save_top_k=-1,
        save_on_train_epoch_end=False,  # as Lightning 2.5 has the last one, too
    )  # fmt: skip


def without_a_drain(folder: Path, out: Path, death: Death, kills: bool, rank: int) -> None:
    """Steps are made during a later batch, and checkpoints bring the pipeline to rest."""
    assert death.mode is not None
    plan = plan_for((0, 1), [0, 3, 8], death.mode)
    dtype = torch.bfloat16 if death.precision == "bf16-mixed" else torch.float32
    expected, model = endless.started(plan, "momentum", decays=True, dtype=dtype)
    host, watch = cases.Host(folder.parent, 2, pipelined=True), endless.Losses()
    dying = [Dying(death)] if kills and rank == death.rank else []
    trainer = host.trainer(
        watch, saving(folder), *dying, precision=death.precision,
        strategy={"plan": endless.saved(host, plan), "loss": "mean", "stage": death.stage},
    )  # fmt: skip
    if not kills:  # all of it comes from the checkpoint
        for weight in model.parameters():
            weight.data.zero_()
    trainer.fit(model, endless.loader(batches(1) * STEPS_PER_EPOCH), ckpt_path=None if kills else "last")
    if rank != 0:
        return
    steps = range(death.resumes_at, NUM_STEPS)
    rests = [step for step in range(1, NUM_STEPS + 1) if step % SAVED_EVERY == 0 or step % STEPS_PER_EPOCH == 0]
    assert watch.rests == [step - death.resumes_at for step in rests if step > death.resumes_at], watch.rests
    expected.version = endless.versions_of(trainer)
    alone = endless.alone(expected, batches(1, dtype=dtype) * NUM_STEPS, rests)
    endless.same_weights(model, expected)
    out.write_text(
        json.dumps(
            {
                "rows": [(step + 1, loss) for step, loss in zip(steps, watch.losses, strict=True)],
                "expected": [(step + 1, alone[step]) for step in steps],
                "mode": trainer.strategy.plan.weight_versions,
            }
        )
    )


def unbroken(out: Path, _: int) -> None:
    """With Lightning alone."""
    recorder = cases.Recorder()
    cases.Host(out.parent).trainer(recorder).fit(cases.seeded(), data())
    out.write_text(json.dumps(recorder.rows))


if __name__ == "__main__":
    run_deaths(Path(sys.argv[1]), DEATHS, unbroken, script)
