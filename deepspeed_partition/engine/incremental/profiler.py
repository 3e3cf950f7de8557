"""Incremental profiling of a model: starts ranks on this machine, and makes statistics of their peaks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_partition.engine.incremental.rank import OUT_OF_MEMORY_STATUS
from deepspeed_partition.engine.incremental.runs import (
    Layers,
    Peak,
    Run,
    ShortageError,
    runs_of,
    smaller,
    statistics,
)
from deepspeed_partition.engine.warmup.run_platform import machine_memory_bytes
from deepspeed_partition.planner.mcap_profile import McapProfile
from deepspeed_partition.planner.units import format_bytes

NUM_DEVICES = 4
"""Ranks where none are said: statistics hold for any number, and more ranks on one machine are slower."""
OPTIMIZER = {"type": "Adam", "params": {"torch_adam": True}}
"""The optimizer where a configuration has none."""
OF_TRAINING = frozenset({"train_batch_size", "tensorboard", "wandb", "csv_monitor", "comet"})
"""What a configuration says of the training run alone: the size of its batches, and where it is told of."""
POLL_SECONDS = 0.1
Step = tuple[int, int | None]
"""Micro-batches of a step, and how many may be in flight; None: as many as 1F1B has."""
FIRST_STEP: Step = (1, None)
"""The step in which the optimizer makes its states."""
ENDING_SECONDS = 10
SAYING_SECONDS = 2
"""After one rank has failed, for the others to say what they know of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What the runs have in common."""

    factory: str
    """``"module:name"`` or ``"path/to/file.py:name"``, as for ``madpipe profile``."""
    micro_batch_size: int
    num_devices: int = NUM_DEVICES
    num_micro_batches: int = NUM_DEVICES
    """Micro-batches of a step."""
    config: Mapping[str, Any] | None = None
    """DeepSpeed's configuration: optimizer, precision, ZeRO stage; what is left out is of the training run."""
    limit_bytes: int | None = None
    """Most bytes of a rank. None: the memory of this machine, divided by its ranks."""

    @property
    def limit(self) -> int:
        """The most bytes of a rank."""
        return machine_memory_bytes() // self.num_devices if self.limit_bytes is None else self.limit_bytes

    def job(self, runs: Sequence[Run], steps: Sequence[Step], folder: Path) -> dict[str, Any]:
        """Return what a rank reads."""
        config = {key: value for key, value in (self.config or {}).items() if key not in OF_TRAINING}
        of_pipeline = config.get("pipeline", {})
        pipeline = {key: value for key, value in of_pipeline.items() if key not in ("partition_method", "madpipe")}
        config.setdefault("optimizer", OPTIMIZER)
        config |= {
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.num_micro_batches,
            "steps_per_print": 10**9,
            "pipeline": pipeline,
        }
        return {
            "factory": self.factory, "micro_batch_size": self.micro_batch_size, "config": config,
            "steps": list(steps), "folder": str(folder), "limit_bytes": self.limit,
            "threads": max(1, (os.cpu_count() or 1) // self.num_devices),
            "runs": [{"boundaries": run.boundaries, "replaced": run.replaced} for run in runs],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of runs."""

    peaks: list[list[list[int]]]
    """Peak bytes, indexed [run][rank][step], of the runs that were done."""
    shortage: int | None = None
    """The rank that ran out of memory in the run after those."""


def profile_incrementally(
    factory: str,
    *,
    micro_batch_size: int,
    num_devices: int = NUM_DEVICES,
    num_micro_batches: int | None = None,
    config: Mapping[str, Any] | None = None,
    limit_bytes: int | None = None,
    on_run: Callable[[int, int], object] = lambda done, total: None,
) -> McapProfile:
    """Measure mCAP's statistics of each layer: short training runs of chosen cuts, on the CPU of this machine.

    There are L - G + 1 runs for L layers on G devices, each of three steps on the engine: one in which the
    optimizer makes its states, one with two micro-batches one after the other, and one as in training. Peaks are
    of everything that a rank allocates from before its engine is made (``counted_memory``).

    A run that does not fit is repeated with stand-ins in the places of the stages that it is not about, and, if a
    stage does not fit by itself, with a stage that begins at a later layer.

    Source: H. Dreuning et al., mCAP, Euro-Par 2022, section 3.1.

    Args:
        factory: as for ``madpipe profile``: ``"module:name"`` or ``"path/to/file.py:name"``, a function that
            returns ``(layers, sample)`` or ``(layers, sample, loss_fn)``. Each rank calls it.
        micro_batch_size: samples per micro-batch, which the factory is called with.
        num_devices: ranks, 4 at least. The result serves plans for any number of devices.
        num_micro_batches: of a step; by default as many as ranks, so that each holds as many as it ever does.
        config: DeepSpeed's configuration, for optimizer, precision and ZeRO stage; Adam where it has no optimizer.
        limit_bytes: most bytes of a rank; by default the memory of this machine divided by its ranks.
        on_run: called after each run with the number of runs that are done, and that there are.

    Returns:
        The statistics in bytes, for ``Chain.mcap``.

    Raises:
        ValueError: the factory or a layer failed, there are too few layers or devices, or one layer alone needs
            more than ``limit_bytes``.
        RuntimeError: a rank ended without a word.
    """
    setup = Setup(
        factory=factory, micro_batch_size=micro_batch_size, num_devices=num_devices, config=config,
        num_micro_batches=num_micro_batches or num_devices, limit_bytes=limit_bytes,
    )  # fmt: skip
    from deepspeed_partition.profiling.factory import made_by

    num_layers = len(list(made_by(factory, micro_batch_size)[0]))
    steps = steps_of(setup)
    try:
        return collected(num_layers, setup, lambda runs, tell: train(setup, runs, steps, tell), on_run)
    except ShortageError as error:
        raise ValueError(
            f"{factory}: {error} into {format_bytes(setup.limit)}: use a smaller micro-batch, or more memory"
        ) from None


def steps_of(setup: Setup) -> list[Step]:
    """Return the steps of a run: the optimizer makes its states; one micro-batch in flight; as in training."""
    # Two, one after the other: the gradients of a micro-batch come to those of one before.
    return [FIRST_STEP, (min(2, setup.num_micro_batches), 1), (setup.num_micro_batches, None)]


def collected(
    num_layers: int,
    setup: Setup,
    trained_by: Callable[[Sequence[Run], Callable[[int], object]], Trained],
    on_run: Callable[[int, int], object],
) -> McapProfile:
    """Return the statistics after all runs, those that are repeated included.

    Args:
        trained_by: trains runs until one runs out of memory, and tells how many are done.

    Raises:
        ShortageError: one layer, or two neighbours, do not fit.
    """
    waiting, num_runs = runs_of(num_layers, setup.num_devices), 0
    peaks: dict[Layers, Peak] = {}
    while waiting:
        trained = trained_by(waiting, partial(_tell, on_run, num_runs, num_runs + len(waiting)))
        for run, measured in zip(waiting, trained.peaks, strict=False):
            peaks |= _peaks_of(run, measured, setup)
        num_runs += len(trained.peaks) + (trained.shortage is not None)
        waiting = waiting[len(trained.peaks) :]
        if trained.shortage is not None:
            waiting = smaller(waiting[0], waiting[0].stages[trained.shortage], waiting[1:])
    return statistics(peaks, num_layers, num_runs)


def _tell(on_run: Callable[[int, int], object], before: int, total: int, done: int) -> None:
    on_run(before + done, total)


def _peaks_of(run: Run, measured: list[list[int]], setup: Setup) -> dict[Layers, Peak]:
    return {
        stage: Peak.of(peaks[1], peaks[2], min(setup.num_devices - device, setup.num_micro_batches))
        for device, (stage, peaks) in enumerate(zip(run.stages, measured, strict=True))
        if stage in run.wanted
    }


def train(
    setup: Setup, runs: Sequence[Run], steps: Sequence[Step], on_run: Callable[[int], object] = lambda done: None
) -> Trained:
    """Train runs one after the other on ranks of this machine, until one runs out of memory.

    Args:
        steps: those of a run.
        on_run: called with the number of runs that are done, when there is one more.

    Raises:
        ValueError: a rank failed otherwise; the message is what it said.
        RuntimeError: a rank ended without a word; the message ends with what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="madpipe-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(setup.job(runs, steps, folder)))
        ranks, done = _start(folder, setup.num_devices), 0
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks):
                    time.sleep(SAYING_SECONDS)
                    break
                if (now := min(map(len, _lines(folder, setup.num_devices)))) > done:
                    on_run(done := now)
                time.sleep(POLL_SECONDS)
        finally:
            _end(ranks)
        return _outcome(folder, setup.num_devices, len(runs))


def _start(folder: Path, num_ranks: int) -> list[subprocess.Popen[bytes]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        place = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        environment = {**os.environ, **{key: str(value) for key, value in place.items()}}
        command = [sys.executable, "-m", "deepspeed_partition.engine.incremental.rank", str(folder / "job.json")]
        with (folder / f"log-{rank}.txt").open("wb") as log:
            ranks.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )
    return ranks


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: some wait for one that has ended."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _lines(folder: Path, num_ranks: int) -> list[list[str]]:
    """Return what each rank has written of its runs."""
    files = [folder / f"peaks-{rank}.jsonl" for rank in range(num_ranks)]
    return [path.read_text().splitlines() if path.exists() else [] for path in files]


def _outcome(folder: Path, num_ranks: int, num_runs: int) -> Trained:
    peaks = [list(map(json.loads, each)) for each in zip(*_lines(folder, num_ranks), strict=False)]
    failures = {
        int(path.stem.partition("-")[2]): json.loads(path.read_text()) for path in folder.glob("failure-*.json")
    }
    short = {rank: each for rank, each in failures.items() if each["status"] == OUT_OF_MEMORY_STATUS}
    if short:
        rank = max(short, key=lambda each: short[each]["peak"])
        # Ranks that were ahead may have ended the run.
        return Trained(peaks[: short[rank]["run"]], rank)
    if failures:
        raise ValueError(failures[min(failures)]["sentence"])
    if len(peaks) < num_runs:
        logs = ((folder / f"log-{rank}.txt").read_text()[-2000:] for rank in range(num_ranks))
        raise RuntimeError("a rank of incremental profiling ended:\n" + "\n".join(logs))
    return Trained(peaks)
