"""A rank alone meets an exception.

torchrun --nproc_per_node=2 lonely_multiproc.py FOLDER          rank 1, and wants a checkpoint of it
torchrun --nproc_per_node=2 lonely_multiproc.py FOLDER sample   rank 0, because its callback calls the module
torchrun --nproc_per_node=2 lonely_multiproc.py FOLDER saving   rank 0, because the other one goes on to train
torchrun --nproc_per_node=2 lonely_multiproc.py FOLDER ended    rank 0, because the other one's program is through
torchrun --nproc_per_node=2 lonely_multiproc.py FOLDER validate rank 0 the same, in another run
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

import lightning_madpipe.checkpoint.saving
from tests.lightning import lightning_cases as cases


class FailingAlone(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2 and os.environ["RANK"] == "1":
            raise OSError("only this disk is full")


class SamplingOnRankZero(pl.Callback):
    @pl.utilities.rank_zero_only
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module(torch.ones(1, cases.NUM_FEATURES))


class SavingOnRankZero(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(sys.argv[1] + "/on_one_rank")


if __name__ == "__main__":
    lightning_madpipe.checkpoint.saving.MEETING_SECONDS = 1.0
    folder = Path(sys.argv[1])
    host = cases.Host(folder, 2, pipelined=True)
    if sys.argv[2:] == ["sample"]:
        trainer = host.trainer(SamplingOnRankZero(), max_epochs=1, strategy={"algorithm": [0, 4, 8]})
        trainer.fit(cases.Classifier(), cases.loader(16), cases.loader(16))
    if sys.argv[2:] == ["saving"]:
        options = {"algorithm": [0, 4, 8], "patience_seconds": 2.0}
        trainer = host.trainer(SavingOnRankZero(), max_epochs=2, strategy=options)
        trainer.fit(cases.Classifier(), cases.loader(16))
    if sys.argv[2:] == ["ended"]:
        trainer = host.trainer(max_epochs=1, strategy={"algorithm": [0, 4, 8]})
        trainer.fit(cases.Classifier(), cases.loader(16))
        if trainer.is_global_zero:
            trainer.save_checkpoint(folder / "on_one_rank")
        sys.exit()
    if sys.argv[2:]:
        trainer = host.trainer(max_epochs=1, strategy={"algorithm": [0, 4, 8]})
        trainer.fit(cases.Classifier(), cases.loader(16))
        if trainer.is_global_zero:
            getattr(trainer, sys.argv[2])(trainer.lightning_module, cases.loader(16))
        sys.exit()
    keep = pl.callbacks.OnExceptionCheckpoint(folder)
    trainer = host.trainer(FailingAlone(), keep, enable_checkpointing=True, strategy={"algorithm": [0, 4, 8]})
    trainer.fit(cases.Classifier(), cases.loader(54))
