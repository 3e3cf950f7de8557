"""Fits until something goes wrong on one rank; see ``test_lightning_ended.py``.

The packages are imported once, and each case is a job of processes that are forked from here and end by
themselves.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.trainer.connectors import signal_connector
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_madpipe  # noqa: F401  before any fork
from deepspeed_partition.engine.runtime import agreements, watch
from tests.choice import is_chosen
from tests.lightning import lightning_cases as cases
from tests.ranks import before_any_fork, run_job

NUM_STEPS = 8
AT_STEP, NEXT_EPOCH = 2, 4


class Case(NamedTuple):
    """What goes wrong, on which rank; and what the ranks come to."""

    what: str
    rank: int
    told: str
    """By the other rank."""
    exits: tuple[int, int]
    """Of this rank and of the other one."""


def fail() -> None:
    raise OSError(28, "No space left on this disk")


def leave() -> None:
    sys.exit(3)


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FULL = "No space left on this disk"
LEFT = f"rank 0 cannot go on: rank 1 left fit() with OSError: [Errno 28] {FULL}"
CASES = {
    "sigterm_to_rank_0": Case("layer", 0, "after this batch", (0, 0)),
    "sigterm_to_rank_1": Case("layer", 1, "after this batch", (0, 0)),
    "sigterm_to_all": Case("layer", -1, "after this batch", (0, 0)),
    "sigterm_of_slurm_in_validation": Case("on_validation_batch_start", 1, "after this batch", (0, 0)),
    "slurm_asks_rank_1": Case("layer", 1, "requeued: scontrol requeue 7", (0, 0)),
    "slurm_asks_all": Case("layer", -1, "requeued: scontrol requeue 7", (0, 0)),
    "sigint_in_a_layer_of_rank_1": Case("layer", 1, "KeyboardInterrupt", (1, 1)),
    "sigint_in_a_layer_of_rank_0": Case("layer", 0, "KeyboardInterrupt", (1, 1)),
    "sigint_in_a_hook_of_rank_1": Case("on_train_batch_start", 1, "KeyboardInterrupt", (1, 1)),
    "an_error_before_a_batch": Case("on_train_batch_start", 1, FULL, (1, 1)),
    "an_error_after_a_batch": Case("on_train_batch_end", 0, FULL, (1, 1)),
    "an_error_before_the_optimizer_step": Case("on_before_optimizer_step", 1, FULL, (1, 1)),
    "an_error_in_validation": Case("on_validation_batch_start", 1, FULL, (1, 1)),
    "an_error_at_the_end_of_an_epoch": Case("on_train_epoch_end", 0, FULL, (1, 1)),
    "an_error_while_a_checkpoint_is_saved": Case("on_save_checkpoint", 1, FULL, (1, 1)),
    "an_error_of_the_schedule": Case("schedule", 1, FULL, (1, 1)),
    "an_error_of_the_optimizer": Case("optimizer", 0, FULL, (1, 1)),
    # As from a signal's handler, which runs wherever Python is.
    "an_error_while_ranks_agree": Case("agreement", 1, LEFT, (1, 1)),
    "an_error_where_an_epoch_begins": Case("agreement", 1, LEFT, (1, 1)),
    "an_error_while_ranks_agree_caught": Case("agreement", 1, LEFT, (1, 1)),
    "exit_in_a_hook": Case("on_train_batch_end", 1, "SystemExit: 3", (3, 1)),
    "exit_of_another_rank_caught": Case("on_train_batch_end", 1, "a process of this job has ended", (3, 1)),
    "unreadable_data": Case("data", 0, FULL, (1, 1)),
    "a_worker_that_dies": Case("worker", 1, "DataLoader worker", (1, 1)),
    "fewer_batches_on_rank_1": Case("fewer", 1, "4 on rank 0, 3 on rank 1", (1, 1)),
    "a_stream_that_ends_early_on_rank_1": Case("stream", 1, "ends there for all", (0, 0)),
    "caught_in_a_layer": Case("layer", 1, "goes on", (0, 0)),
    "caught_in_the_data": Case("data", 0, "goes on", (0, 0)),
    "caught_in_a_hook": Case("on_train_batch_start", 0, "goes on", (0, 0)),
}


def action_of(name: str) -> Callable[[], None]:
    if name.startswith("sigterm"):
        return send(signal.SIGTERM)
    if name.startswith("sigint"):
        return send(signal.SIGINT)
    if name.startswith("slurm"):
        return send(signal.SIGUSR1)
    return leave if name.startswith("exit") else fail


class Slurm(TorchElasticEnvironment, SLURMEnvironment):
    """Ranks of this job, as if SLURM had started them."""

    def __init__(self) -> None:
        self.auto_requeue, self.requeue_signal = True, signal.SIGUSR1


def requeue(command: list[str]) -> int:
    print("requeued:", " ".join(command))
    return 0


class Trap:
    """Does it once, at a step of a fit."""

    step = 0

    def __init__(self, act: Callable[[], None] | None, at_step: int = AT_STEP) -> None:
        self.act, self.at_step = act, at_step

    def spring(self) -> None:
        if self.act is not None and self.step >= self.at_step:
            act, self.act = self.act, None
            act()


TRAP = Trap(None)


class Trapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            TRAP.spring()
        return x


class Model(cases.Classifier):
    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what = what
        # Of the rank that runs it; to all ranks: each sends it to itself before its third step.
        if what == "layer" and rank >= 0:
            place = 0 if rank == 0 else 4
            self.blocks[place] = nn.Sequential(self.blocks[place], Trapped())

    def configure_optimizers(self) -> Any:
        def factor(step: int) -> float:
            if self.what == "schedule":
                TRAP.spring()
            return 0.9**step

        class Adam(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                if TRAP_PLACE == "optimizer":
                    TRAP.spring()
                return super().step(closure)

        optimizer = Adam(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


TRAP_PLACE = ""


class Validated(Callback):
    """Tells of validations that went through."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            print("validated")


class Springs(Callback):
    def __init__(self, what: str, to_all: bool) -> None:
        if what.startswith("on_") and what != "on_train_batch_start":
            setattr(self, what, lambda *_, **__: TRAP.spring())
        self.springs_at_start = what == "on_train_batch_start" or to_all

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        TRAP.step = trainer.global_step
        if self.springs_at_start:
            TRAP.spring()


class Data(Dataset):
    def __init__(self, what: str, num: int) -> None:
        self.data, self.what, self.num = cases.samples(64), what, num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        if index == 40 and self.what == "worker":
            os._exit(9)
        if index == 40 and self.what == "data" and TRAP.act is not None:
            TRAP.act = None
            fail()
        return self.data[index]


class Stream(IterableDataset):
    def __init__(self, num: int) -> None:
        self.data = [cases.samples(64)[index] for index in range(num)]

    def __iter__(self) -> Any:
        return iter(self.data)


def spring_while_ranks_agree() -> None:
    received = agreements._received

    def springs(*arguments: Any) -> bytes:
        TRAP.spring()
        return received(*arguments)

    agreements._received = springs


def loader_of(what: str, mine: bool) -> DataLoader:
    if what == "stream":
        return DataLoader(Stream(48 if mine else 64), batch_size=16)
    data = Data(what if mine else "", 48 if what == "fewer" and mine else 64)
    return DataLoader(data, batch_size=16, num_workers=int(what == "worker"))


def rank_of(name: str, folder: Path, rank: int) -> None:
    global TRAP, TRAP_PLACE
    case = CASES[name]
    mine = case.rank in (rank, -1)
    TRAP = Trap(action_of(name) if mine else None, NEXT_EPOCH if "epoch_begins" in name else AT_STEP)
    TRAP_PLACE = case.what
    if case.what == "agreement":
        spring_while_ranks_agree()
    host = cases.Host(folder, 2, pipelined=True)
    keep = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)

    as_slurm = {"plugins": [Slurm()], "default_root_dir": folder} if "slurm" in name else {}
    os.environ["SLURM_JOB_ID"], signal_connector.call = "7", requeue

    def fit(path: Path | None = None) -> list[list[float]]:
        pl.seed_everything(0, verbose=False)
        recorder = cases.Recorder()
        trainer = host.trainer(
            Springs(case.what, case.rank < 0), Validated(), recorder,
            keep if case.what == "on_save_checkpoint" else Callback(),
            max_epochs=2, enable_checkpointing=case.what == "on_save_checkpoint",
            strategy={"algorithm": [0, 4, 8]}, **as_slurm,
        )  # fmt: skip
        data = loader_of(case.what, mine)
        num_evaluated = 200 if name.startswith("sigterm") else 16
        trainer.fit(Model(case.what, case.rank), data, cases.loader(num_evaluated, seed=3), ckpt_path=path)
        return recorder.rows

    if name.endswith("caught") and not mine:
        try:
            fit()
        except Exception as error:  # whatever it is: the script goes on
            print(f"caught: {type(error).__name__}")
    if name.startswith("slurm"):
        assert len(fit()) == NUM_STEPS, "it was to go on"
        assert len(fit(folder / "hpc_ckpt_1.ckpt")) == NUM_STEPS - AT_STEP - 1, "it was to be saved when asked"
        return
    if not name.startswith("caught"):
        fit()
        assert not name.startswith("sig"), "it was to end before"
        return
    try:
        fit()
    except OSError as error:
        assert error.errno == 28, error
        assert rank == case.rank or f"rank {case.rank} met this" in str(error.__cause__), error.__cause__
        time.sleep(4 * watch.GRACE_SECONDS * (rank == case.rank))  # nobody is ended for what is over
        after, again = fit(), fit()
        assert after == again and len(after) == NUM_STEPS, (after, again)
        print("goes on")
        return
    raise AssertionError("nothing was raised here")


def main(out: Path) -> None:
    before_any_fork()
    watch.GRACE_SECONDS = 2.0
    outcomes = {}
    for name in CASES:
        if not is_chosen(name):
            continue
        folder = out.parent / name
        folder.mkdir()
        logs = [folder / f"{rank}.log" for rank in range(2)]
        outcome = run_job(functools.partial(rank_of, name, folder), logs)
        print(f"{name}: exits {outcome.exits}, {outcome.seconds_apart:.2f} s apart")
        outcomes[name] = outcome._asdict()
        out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
