"""One precision on the devices that there are; writes what each rank saw as JSON.

torchrun --nproc_per_node=2 cuda_multiproc.py PRECISION FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from tests.lightning import lightning_cases as cases


def run(folder: Path, **arguments: Any) -> dict[str, float]:
    """Fit, validate and test, and leave the whole model in ``folder``."""
    pl.seed_everything(0, verbose=False)
    module = cases.Classifier()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=2, enable_checkpointing=False, use_distributed_sampler=False, **quiet, **arguments
    )
    trainer.fit(module, cases.loader(54), cases.loader(21, seed=3))
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    [validated] = trainer.validate(module, cases.loader(21, seed=3), verbose=False)
    [tested] = trainer.test(module, cases.loader(37, seed=5), verbose=False)
    return {**metrics, "validated": validated["loss"], "tested": tested["loss"]}


if __name__ == "__main__":
    import lightning_madpipe

    precision, folder = sys.argv[1], Path(sys.argv[2])
    strategy = lightning_madpipe.MadPipeStrategy(num_micro_batches=4)
    record = run(folder, strategy=strategy, devices=int(os.environ["WORLD_SIZE"]), precision=precision)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(record))
