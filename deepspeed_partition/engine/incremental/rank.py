"""A rank of incremental profiling: trains one cut after the other, and writes down its peaks.

``python -m deepspeed_partition.engine.incremental.rank JOB.json``, in the environment that torchrun gives a rank.
A rank that runs out of memory says so in a file of its own and ends; who started the ranks ends the others.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.utils.groups
import torch
import torch.distributed as dist

from deepspeed_partition.engine import PipelineModule, initialize
from deepspeed_partition.engine.incremental.stand_ins import boundaries_behind, layers_of_run, specifications
from deepspeed_partition.engine.runtime import collectives
from deepspeed_partition.profiling import counted_memory
from deepspeed_partition.profiling.boundaries import Boundary, tensors_of
from deepspeed_partition.profiling.factory import made_by
from deepspeed_partition.profiling.sources import said

OUT_OF_MEMORY_STATUS = 3
"""Exit status of a rank that ran out of memory."""


@dataclass
class Model:
    """What is trained: its layers, one micro-batch, and a loss function."""

    specs: list[Any]
    inputs: Boundary
    labels: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    _shapes: list[Boundary] = field(default_factory=list)

    @classmethod
    def of(cls, layers: Any, sample: Any, loss_fn: Any) -> Model:
        """Return it from what a factory of ``madpipe profile`` returns."""
        inputs, labels = (sample, torch.zeros(1)) if loss_fn is None else sample
        return cls(specifications(list(layers)), inputs, labels, loss_fn or _mean)

    def layers(self, boundaries: Sequence[int], replaced: Sequence[int], dtype: torch.dtype | None) -> list[Any]:
        """Return the layers of a cut, with stand-ins on the devices ``replaced``; of weights of this type."""
        if replaced and not self._shapes:
            self._shapes = boundaries_behind(self.specs, self.inputs, dtype)
        return layers_of_run(self.specs, boundaries, replaced, self._shapes)

    def micro_batches(self) -> Iterator[tuple[Boundary, Any]]:
        """Yield the same micro-batch again and again; the engine loads a copy of it."""
        while True:
            yield self.inputs, self.labels


def _mean(outputs: Boundary, labels: Any) -> torch.Tensor:
    """Return a loss for layers without a loss function."""
    return sum((each.float().mean() for each in tensors_of(outputs) if each.is_floating_point()), torch.zeros(()))


def _type_of_weights(config: dict[str, Any]) -> torch.dtype | None:
    """The type that an engine gives the weights of layers; None: their own."""
    if config.get("fp16", {}).get("enabled"):
        return torch.float16
    return torch.bfloat16 if config.get("bf16", config.get("bfloat16", {})).get("enabled") else None


def peaks_of_cut(
    model: Model,
    config: dict[str, Any],
    boundaries: Sequence[int],
    steps: Sequence[tuple[int, int | None]],
    *,
    replaced: Sequence[int] = (),
    limit_bytes: int | None = None,
) -> list[int]:
    """Train a cut for a few steps, and return this rank's peak bytes after each, from before the engine is made.

    Collective: every rank of the pipeline calls this.

    Args:
        config: DeepSpeed's configuration, with an optimizer.
        boundaries: a stage for each rank.
        steps: of each step the micro-batches, and how many of them may be in flight; None: as many as 1F1B has.
        replaced: ranks whose layers are stand-ins.
        limit_bytes: most bytes that a rank may have.

    Raises:
        torch.OutOfMemoryError: a rank needs more.
    """
    torch.manual_seed(0)
    layers = model.layers(boundaries, replaced, _type_of_weights(config))
    with counted_memory(limit_bytes=limit_bytes) as memory:
        module = PipelineModule(
            layers=layers, num_stages=len(boundaries) - 1, loss_fn=model.loss_fn,
            partition_method=list(boundaries),
        )  # fmt: skip
        parameters = [each for each in module.parameters() if each.requires_grad]
        engine, *_ = initialize(model=module, config=config, model_parameters=parameters)
        data, peaks = model.micro_batches(), []
        for num_micro_batches, most_in_flight in steps:
            engine.micro_batches, engine.most_in_flight = num_micro_batches, most_in_flight
            engine.lower_anew()
            engine.train_batch(data)
            peaks.append(memory.peak_bytes)
        _forget(engine)
    return peaks


def _forget(engine: Any) -> None:
    """End an engine and its process groups: each has threads that wake up again and again."""
    engine.destroy()
    vars(engine).clear()
    shared = (each for each in vars(deepspeed.utils.groups).values() if isinstance(each, dist.ProcessGroup))
    kept = {dist.group.WORLD, *shared, *collectives.own_groups()}
    for group in set(dist.distributed_c10d._world.pg_map) - kept:
        dist.destroy_process_group(group)
    gc.collect()


def main() -> None:
    job, rank = json.loads(Path(sys.argv[1]).read_text()), int(os.environ["RANK"])
    folder = Path(job["folder"])
    torch.set_num_threads(job["threads"])
    deepspeed.init_distributed(dist_backend="gloo")
    try:
        model = Model.of(*made_by(job["factory"], job["micro_batch_size"]))
    except ValueError as error:
        _fail(folder, rank, sentence=str(error))
    for number, run in enumerate(job["runs"]):
        with counted_memory() as memory:  # it counts beyond the end of a run that fails
            try:
                peaks = peaks_of_cut(
                    model, job["config"], run["boundaries"], job["steps"], replaced=run["replaced"],
                    limit_bytes=job["limit_bytes"],
                )  # fmt: skip
            except (torch.OutOfMemoryError, MemoryError):
                # Others raise it, too, where ranks agree on errors: the one with the largest peak ran out.
                _fail(folder, rank, OUT_OF_MEMORY_STATUS, run=number, peak=memory.peak_bytes)
            except Exception as error:
                _fail(folder, rank, sentence=said(error))
        with (folder / f"peaks-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(peaks) + "\n")
    dist.barrier(group=collectives.own_groups().objects)
    dist.destroy_process_group()


def _fail(folder: Path, rank: int, status: int = 1, **facts: Any) -> None:
    """Say why this rank ends, at once: others may wait for it, and end only with their connections."""
    unfinished = folder / f"unfinished-{rank}"  # who reads the file finds all of it
    unfinished.write_text(json.dumps({"status": status, **facts}))
    unfinished.rename(folder / f"failure-{rank}.json")
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
