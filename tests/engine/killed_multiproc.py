"""Trains, moves and saves until one process is killed, and goes on from what is there; see ``test_killed.py``.

The packages are imported once, and each run is a job of processes that are forked from here.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch

from deepspeed_partition.engine.checkpoint import atomic_folders, checkpoint_engine
from deepspeed_partition.engine.repartition import layer_moves, optimizer_state
from deepspeed_partition.engine.warmup import run_plan
from deepspeed_partition.schedule.endless import lower_endless
from tests.deaths import kill, kill_before, run_deaths
from tests.engine.asynchronous_cases import Delayed, begin, call, plan_for
from tests.engine.delayed_updates import flush
from tests.engine.pipelines import mlp, train_alone
from tests.engine.running import NUM_MICRO_BATCHES, batches, mine, planned, start, train
from tests.engine.training_state_multiproc import OPTIMIZERS, warm_up

NUM_STEPS = 6
SAVED_EVERY = 2
MOVES_AT = 3
CUT, MOVED = [0, 3, 8], [0, 6, 8]
"""Three layers go from rank 1 to rank 0, and two at the end of a warm-up."""
PLANNED = {2: MOVED, 1: [0, 8]}


class Death(NamedTuple):
    """Where which rank dies, and with how many steps the next run begins."""

    rank: int
    before: tuple[Any, str, int | str] | None
    """A call of a function in a module, counted from the move on, or the first with such a path; None: of an
    optimizer step."""
    resumes_at: int
    step: int = MOVES_AT
    """Whose optimizer step."""
    tag: str | None = None
    num_processes: int = 1
    """Of the run that goes on."""
    warms_up: bool = False
    """The run plans by itself and moves then; else its layers are moved to boundaries."""
    modes: tuple[str, str] | None = None
    """What ``weight_versions`` is in the plan of the run that dies, and of the one that goes on, where nothing
    moves; both are given. None: the pipeline drains."""
    form: str | None = None
    """In what form the weights are there, one of ``FORMS``; None: fp32."""


ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
FORMS: dict[str | None, dict[str, Any]] = {
    None: {},
    "zero": ZERO,
    "bf16": {"bf16": {"enabled": True}},
    "zero and bf16": {"bf16": {"enabled": True}, **ZERO},
}


DEATHS = {
    "in_a_step_of_the_warm_up": Death(1, None, 2, step=MOVES_AT - 1, num_processes=2, warms_up=True),
    "while_rank_1_measures": Death(1, (run_plan, "_report", 1), 2, warms_up=True),
    "while_rank_0_plans": Death(0, (run_plan, "make_plan", 1), 2, num_processes=2, warms_up=True),
    "while_rank_1_waits_for_the_plan": Death(1, (run_plan, "from_rank_0", 1), 2, num_processes=2, warms_up=True),
    "while_weights_move": Death(1, (layer_moves, "send_tensor", 2), 2, warms_up=True),
    "while_states_move": Death(0, (optimizer_state, "receive_tensor", 4), 2),
    "after_the_move": Death(0, None, 2, num_processes=2, warms_up=True),
    "after_a_checkpoint_of_the_plan": Death(1, None, 4, step=5, num_processes=2, warms_up=True),
    "while_saving": Death(1, (torch, "save", "*/layer_07-model_states.pt"), 2),
    "before_a_complete_folder_has_its_name": Death(
        0, (atomic_folders.os, "replace", "*/.global_step4.unfinished"), 2
    ),
    "before_it_has_the_name_of_another": Death(
        0, (atomic_folders.os, "replace", "*/.same.unfinished"), 4, tag="same", warms_up=True
    ),
    "while_the_old_one_is_removed": Death(
        0, (atomic_folders.shutil, "rmtree", "*/.same.removed"), 4, tag="same", num_processes=2
    ),
    "before_the_latest_is_named": Death(0, (checkpoint_engine.files, "write_text", "*/latest"), 2),
    # While batches are in flight, with other modes, or the same, in the run that goes on.
    **{
        f"{mode}_then_{other}": Death(1, None, 2, num_processes=2, modes=(mode, other))
        for mode, other in (
            ("stashing", "stashing"), ("2bw", "2bw"), ("vertical-sync", "vertical-sync"),
            ("2bw", "flush"), ("flush", "stashing"),
        )
    },
    **{
        f"{mode}_then_{other}_in_{form.replace(' ', '_')}": Death(
            1, None, 2, num_processes=2, modes=(mode, other), form=form
        )
        for form in ("zero", "bf16", "zero and bf16")
        for mode, other in (("stashing", "stashing"), ("2bw", "2bw"), ("vertical-sync", "vertical-sync"))
    },
}  # fmt: skip


def script(folder: Path, out: Path, death: Death, kills: bool, rank: int) -> None:
    """What a user writes: the same for the run that is killed and for the next one."""
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    if death.modes is not None:
        without_a_drain(folder, out, death, kills, rank)
        return
    num_stages = int(os.environ["WORLD_SIZE"])
    config: dict[str, Any] = ZERO
    cut: Any = CUT if num_stages == 2 else [0, 8]
    if death.warms_up:
        cut, config = "madpipe", {**config, **planned(PLANNED[num_stages], warmup_steps=MOVES_AT)}
    engine, _, _ = start(mlp(), cut, config, optimizer=OPTIMIZERS["AdamW"], lr_scheduler=warm_up)
    engine.load_checkpoint(str(folder))
    had_plan = engine.plan is not None
    losses: dict[int, float] = {}
    data = batches(NUM_STEPS)
    while engine.global_steps < NUM_STEPS:
        step = engine.global_steps
        if kills and step == MOVES_AT:
            assert engine.module.parts != MOVED, "no layer would move"
            if death.before is not None and death.rank == rank:
                kill_before(*death.before)
            if not death.warms_up:
                engine.recut(MOVED)
        if kills and death.before is None and (death.rank, death.step) == (rank, step):
            engine.before_optimizer_step = kill
        [losses[step]] = train(engine, data[step : step + 1])
        if engine.global_steps % SAVED_EVERY == 0:
            engine.save_checkpoint(str(folder), tag=death.tag)
    if rank == 0:
        ended = {"losses": losses, "had_plan": had_plan, "has_plan": engine.plan is not None}
        out.write_text(json.dumps({**ended, "cut": engine.module.parts}))


def without_a_drain(folder: Path, out: Path, death: Death, kills: bool, rank: int) -> None:
    """Updates come in the call of a later batch, and checkpoints bring the pipeline to rest."""
    assert death.modes is not None
    plans = [plan_for((0, 1), CUT, mode) for mode in death.modes]
    engine = begin(plans[0 if kills else 1], OPTIMIZERS["AdamW"], FORMS[death.form], lr_scheduler=warm_up)
    engine.load_checkpoint(str(folder))
    losses: dict[int, float] = {}
    dtype = torch.bfloat16 if "bf16" in FORMS[death.form] else torch.float32
    data = batches(NUM_STEPS, dtype=dtype)
    items = mine(engine, data[engine.global_steps :])
    while engine.global_steps < NUM_STEPS:
        step = engine.global_steps
        if kills and (death.rank, death.step) == (rank, step):
            engine.before_optimizer_step = kill
        losses[step] = call(engine, items)
        if engine.global_steps % SAVED_EVERY == 0:
            assert engine._endless is None or engine._endless.is_under_way or step + 1 == NUM_STEPS
            engine.save_checkpoint(str(folder))
    if rank == 0:
        alone = Delayed(
            OPTIMIZERS["AdamW"], flush(NUM_MICRO_BATCHES), plans[0], make_scheduler=warm_up, dtype=dtype
        )
        expected = []
        for step, batch in enumerate(data):
            if step % SAVED_EVERY == 0:
                mode = death.modes[step >= death.resumes_at]
                alone.version = flush(NUM_MICRO_BATCHES)
                if mode != "flush":
                    program = lower_endless(plans[0], NUM_MICRO_BATCHES, two_versions=mode == "2bw")
                    alone.version = functools.partial(program.version, mode)
                alone.rest()
            expected.append(alone.train(batch))
        mode = engine.weight_versions
        out.write_text(json.dumps({"losses": losses, "expected": expected, "mode": mode}))


def unbroken(out: Path, _: int) -> None:
    losses = train_alone(mlp(), batches(NUM_STEPS), OPTIMIZERS["AdamW"], make_scheduler=warm_up)
    out.write_text(json.dumps(losses))


if __name__ == "__main__":
    run_deaths(Path(sys.argv[1]), DEATHS, unbroken, script)
