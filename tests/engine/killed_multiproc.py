"""Trains, moves and saves until one process is killed, and goes on from what is there; see ``test_killed.py``.

The packages are imported once, and each run is a job of processes that are forked from here.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from pipelines import mlp, train_alone
from running import batches, start, train
from training_state_multiproc import OPTIMIZERS, warm_up

from deepspeed_partition.engine import folders, resuming, training_state, transplant
from tests.ranks import before_any_fork, run_job

NUM_STEPS = 6
SAVED_EVERY = 2
MOVES_AT = 3
CUT, MOVED = [0, 3, 8], [0, 5, 8]
"""Two layers go from rank 1 to rank 0."""


class Death(NamedTuple):
    """Where which rank dies, and with how many steps the next run begins."""

    rank: int
    before: tuple[Any, str, int] | None
    """A call of a function in a module, counted from the move on; None: of an optimizer step."""
    resumes_at: int
    step: int = MOVES_AT
    """Whose optimizer step."""
    tag: str | None = None
    num_processes: int = 1
    """Of the run that goes on."""


DEATHS = {
    "before_the_move": Death(1, None, 2, step=MOVES_AT - 1, num_processes=2),
    "while_weights_move": Death(1, (transplant, "send_bytes", 2), 2),
    "while_states_move": Death(0, (training_state, "receive_bytes", 4), 2),
    "after_the_move": Death(0, None, 2),
    "while_saving": Death(1, (torch, "save", 2), 2),
    "before_a_complete_folder_has_its_name": Death(0, (folders.os, "replace", 4), 2),
    "before_it_has_the_name_of_another": Death(0, (folders.os, "replace", 5), 4, tag="same"),
    "while_the_old_one_is_removed": Death(0, (folders.shutil, "rmtree", 1), 4, tag="same", num_processes=2),
    "before_the_latest_is_named": Death(0, (resuming.files, "write_text", 4), 2),
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(module: Any, name: str, call: int) -> None:
    """Die when a function is called for the ``call``-th time from now on."""
    function, calls = getattr(module, name), iter(range(1, call))

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            kill()
        return function(*args, **kwargs)

    setattr(module, name, counted)


def script(folder: Path, out: Path, death: Death, kills: bool, rank: int) -> None:
    """What a user writes: the same for the run that is killed and for the next one."""
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    num_stages = int(os.environ["WORLD_SIZE"])
    config = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    cut = CUT if num_stages == 2 else [0, 8]
    engine, _, _ = start(mlp(), cut, config, optimizer=OPTIMIZERS["AdamW"], lr_scheduler=warm_up)
    engine.load_checkpoint(str(folder))
    losses: dict[int, float] = {}
    data = batches(NUM_STEPS)
    while engine.global_steps < NUM_STEPS:
        step = engine.global_steps
        if kills and step == MOVES_AT:
            if death.before is not None and death.rank == rank:
                kill_before(*death.before)
            engine.recut(MOVED)
        if kills and death.before is None and (death.rank, death.step) == (rank, step):
            engine.before_optimizer_step = kill
        [losses[step]] = train(engine, data[step : step + 1])
        if engine.global_steps % SAVED_EVERY == 0:
            engine.save_checkpoint(str(folder), tag=death.tag)
    if rank == 0:
        out.write_text(json.dumps(losses))


def main(out: Path) -> None:
    expected = train_alone(mlp(), batches(NUM_STEPS), OPTIMIZERS["AdamW"], make_scheduler=warm_up)
    before_any_fork()
    outcomes: dict[str, Any] = {"expected": expected}
    for name, death in DEATHS.items():
        folder, losses = out.parent / name, out.parent / f"{name}.json"
        folder.mkdir()
        for kills, size in ((True, 2), (False, death.num_processes)):
            logs = [out.parent / f"{name}_{kills}_{rank}.log" for rank in range(size)]
            ended = run_job(functools.partial(script, folder, losses, death, kills), logs)
            outcomes.setdefault(name, []).append(ended._asdict())
        losses_after = json.loads(losses.read_text()) if losses.exists() else {}
        outcomes[name].append({"losses": losses_after, "left": sorted(os.listdir(folder))})
    out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
