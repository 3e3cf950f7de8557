"""What the ranks of a pipeline read: the same batches, and who reads what steps return."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.steps.batches import fingerprint_of, named_tensors_of

BATCH_END_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}
"""The hook that is given what the step returned."""
AGREE_EVERY = 128
"""The number of batches after which ranks compare again what they read."""


class SameBatches:
    """Compares what the ranks of a pipeline read.

    Args:
        trainer: Lightning's.
        module: The LightningModule.
        pipeline: Its pipeline.
        lightning: The package of the module's class.
    """

    def __init__(self, trainer: Any, module: Any, pipeline: PipelineModule, lightning: Lightning) -> None:
        self._trainer, self._module, self._pipeline, self._lightning = trainer, module, pipeline, lightning
        self._read: dict[str, bool] = {}
        self._told: set[str] = set()
        self._num_read: Counter[str] = Counter()
        self.begins = True
        """Whether the next batch is the first of an epoch."""

    def is_read(self, step: str) -> bool:
        """Whether somebody reads what ``step`` returns, on any rank, as far as the last comparison knows."""
        return self._read[step]

    def is_due(self, step: str) -> bool:
        """Whether ranks compare what they read now: at an epoch's begin, batches 2, 4, ..., 128, each 128th."""
        begins, self.begins = self.begins or step not in self._read, False
        self._num_read[step] = number = 1 if begins else self._num_read[step] + 1
        return number & (number - 1) == 0 if number < AGREE_EVERY else number % AGREE_EVERY == 0

    def compare_batches(self, step: str, batch: Any) -> None:
        """Find out who reads what steps return, and whether all read the same batch. Collective.

        Random augmentation may make the inputs differ, of which only the first stage's count. Where samples
        come in another order, every tensor differs. It costs a checksum of the batch and a small collective.
        """
        reads = self._somebody_reads(step)
        has_others = self._pipeline.mpu().get_data_parallel_world_size() > 1
        if has_others and step != "training_step" and self._num_read[step] == 1:
            self._check_pipelines(step)
        if self._pipeline.num_stages > 1:
            mine = fingerprint_of(batch), reads, self._num_batches(step)
            everyone = gather_objects(mine, self._pipeline.mpu().get_pipe_parallel_group())
            reads = any(theirs for _, theirs, _ in everyone)
            self._check_same_batch([tensors for tensors, _, _ in everyone], step, batch)
            self._check_same_number([number for _, _, number in everyone])
        self._read[step] = reads
        if reads and step == "training_step" and self._trainer.accumulate_grad_batches > 1:
            self.tell(
                "on_train_batch_end is given the loss and outputs of the last window of accumulate_grad_batches "
                "that is done, because all batches of a window run at its end"
            )

    def _num_batches(self, step: str) -> Any:
        """Return the number of batches of an epoch, as far as Lightning knows it."""
        trainer = self._trainer
        if step == "training_step":
            return trainer.num_training_batches
        if step == "validation_step":
            return trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return trainer.num_test_batches if step == "test_step" else trainer.num_predict_batches

    def _check_same_number(self, everyone: Sequence[Any]) -> None:
        if any(theirs != everyone[0] for theirs in everyone):
            said = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(everyone))
            raise self._lightning.refusal(
                f"the ranks of a pipeline read the same data, and their epochs have different numbers of batches "
                f"({said}): give all ranks the same loader"
            )

    def _check_pipelines(self, step: str) -> None:
        """Refuse an evaluation in which pipelines have different numbers of batches. Collective over the job.

        Lightning pads the data of training, validation and test for its own sampler, and not those of predict.
        """
        everyone = gather_objects(self._num_batches(step))
        if any(theirs != everyone[0] for theirs in everyone):
            said = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(everyone))
            raise self._lightning.refusal(
                f"pipelines take each batch of {step} together, and have different numbers of them ({said}): let "
                "the number of samples be a multiple of batch size times pipelines, or run it with one pipeline, "
                "MadPipeStrategy(num_stages=...) of as many stages as processes"
            )

    def _check_same_batch(self, everyone: Sequence[Any], step: str, batch: Any) -> None:
        for rank, tensors in enumerate(everyone[1:], start=1):
            same_shapes = [shape for shape, _ in tensors] == [shape for shape, _ in everyone[0]]
            if not same_shapes or (tensors and not set(tensors) & set(everyone[0])):
                raise self._lightning.refusal(
                    f"ranks 0 and {rank} of a pipeline read different batches: use the Trainer's own "
                    "distributed sampler (use_distributed_sampler=True), or one that is seeded alike on all "
                    "ranks, and seed the generators of your own transforms alike, too"
                )
        differing = [
            name
            for (name, _), theirs in zip(named_tensors_of(batch), zip(*everyone, strict=True), strict=True)
            if len(set(theirs)) > 1
        ]
        if len(differing) > 1:
            self.tell(
                f"the ranks of a pipeline read different {', '.join(differing[:4])} in {step}: forward() gets "
                "those of the first stage, and the rest of the step those of the last. Where these belong "
                "together, as an image and its mask do, another model is trained: draw them from Python's, "
                "NumPy's or torch's common generators, or seed your own alike on all ranks"
            )

    def tell(self, sentence: str | None) -> None:
        """Print ``sentence``, if it is one, the first time."""
        if sentence is not None and sentence not in self._told:
            self._told.add(sentence)
            announce(sentence, logging.WARNING)

    def _somebody_reads(self, step: str) -> bool:
        """Whether what ``step`` returns is worth sending: to a hook that is not Lightning's, or to the caller."""
        callbacks = self._trainer.callbacks
        if step == "predict_step":
            writer = self._lightning.module("callbacks").BasePredictionWriter
            if self._trainer.predict_loop.return_predictions or any(isinstance(c, writer) for c in callbacks):
                return True
        hooks = [getattr(owner, BATCH_END_HOOKS[step]) for owner in (self._module, *callbacks)]
        # A hook in an instance, such as a LambdaCallback's, is a plain function of the user's module.
        modules = [getattr(hook, "__module__", "") or "" for hook in hooks]
        return not all(name.startswith(("pytorch_lightning.", "lightning.pytorch.")) for name in modules)
