"""What the ranks of a pipeline read: the same batches, and who reads what steps return."""

from __future__ import annotations

import dis
import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepspeed_partition.engine import PipelineModule
from deepspeed_partition.engine.runtime.collectives import gather_objects
from deepspeed_partition.engine.runtime.environment import announce
from lightning_madpipe.compat.namespace import Lightning
from lightning_madpipe.steps.batches import fingerprint_of, named_tensors_of
from lightning_madpipe.steps.list_in_words import some

BATCH_END_HOOKS = {
    "training_step": "on_train_batch_end",
    "validation_step": "on_validation_batch_end",
    "test_step": "on_test_batch_end",
    "predict_step": "on_predict_batch_end",
}
"""The hook that is given what the step returned."""
OTHER_ON_RANKS = (
    "the ranks of a pipeline read different {} in {}: forward() gets those of the first stage, the rest of the "
    "step those of the last, and hooks those of their own rank. For inputs alone that are augmented it is right. "
    "Where something belongs to them, as its mask to an image or the names of classes to their numbers, another "
    "model is trained, or used wrongly: sort what numbers are made of (a set has another order in each process), "
    "draw from Python's, NumPy's or torch's common generators, or seed your own alike on all ranks"
)
"""What is told where some tensors of a batch differ, and others do not: its first names, and the step."""
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

        Where samples come in another order, every tensor differs, which is refused; where some differ, as by
        augmentation, or by numbers that a program gives to classes in the order of a set, that is told. It costs
        a checksum of the batch and a small collective.
        """
        reads, users = self._somebody_reads(step), self._users_of_outputs() if step == "training_step" else []
        has_others = self._pipeline.mpu().get_data_parallel_world_size() > 1
        if has_others and step != "training_step" and self._num_read[step] == 1:
            self._check_pipelines(step)
        if self._pipeline.num_stages > 1:
            mine = fingerprint_of(batch), reads, users, self._num_batches(step)
            everyone = gather_objects(mine, self._pipeline.mpu().get_pipe_parallel_group())
            reads = any(theirs for _, theirs, _, _ in everyone)
            users = list(dict.fromkeys(user for _, _, theirs, _ in everyone for user in theirs))
            self._check_same_batch([tensors for tensors, _, _, _ in everyone], step, batch)
            self._check_same_number([number for _, _, _, number in everyone])
        self._read[step] = reads
        if users and self._trainer.accumulate_grad_batches > 1:
            self.tell(
                f"on_train_batch_end of {some(users)} uses its outputs, and is given the loss and outputs of the "
                "last window of accumulate_grad_batches that is done (in the first one a loss of 0), because all "
                "batches of a window run at its end. Use them where a window ends, or do not accumulate"
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
                    "ranks, and seed the generators of your own transforms alike, too. A hook that draws random "
                    "numbers on some ranks alone, or for the weights of its rank, needs a generator of its own"
                )
        differing = [
            name
            for (name, _), theirs in zip(named_tensors_of(batch), zip(*everyone, strict=True), strict=True)
            if len(set(theirs)) > 1
        ]
        if differing:
            self.tell(OTHER_ON_RANKS.format(", ".join(differing[:4]), step))

    def tell(self, sentence: str | None) -> None:
        """Print ``sentence``, if it is one, the first time."""
        if sentence is not None and sentence not in self._told:
            self._told.add(sentence)
            announce(sentence, logging.WARNING)

    def _users_of_outputs(self) -> list[str]:
        """The classes of the module and callbacks whose ``on_train_batch_end`` uses what the step returned."""
        owners = [(self._module, 0), *((callback, 2) for callback in self._trainer.callbacks)]
        return [
            type(owner).__name__
            for owner, place in owners
            if _is_of_user(hook := owner.on_train_batch_end) and uses_argument(hook, place)
        ]

    def _somebody_reads(self, step: str) -> bool:
        """Whether what ``step`` returns is worth sending: to a hook that is not Lightning's, or to the caller."""
        callbacks = self._trainer.callbacks
        if step == "predict_step":
            writer = self._lightning.module("callbacks").BasePredictionWriter
            if self._trainer.predict_loop.return_predictions or any(isinstance(c, writer) for c in callbacks):
                return True
        hooks = [getattr(owner, BATCH_END_HOOKS[step]) for owner in (self._module, *callbacks)]
        return any(map(_is_of_user, hooks))


def _is_of_user(hook: Any) -> bool:
    # A hook in an instance, such as a LambdaCallback's, is a plain function of the user's module.
    module = getattr(hook, "__module__", "") or ""
    return not module.startswith(("pytorch_lightning.", "lightning.pytorch."))


def uses_argument(function: Any, place: int) -> bool:
    """Whether the code of a function names the argument that it is given at ``place``; True if it has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    place += inspect.ismethod(function)  # what a decorator has wrapped is a function
    has_rest = code.co_flags & inspect.CO_VARARGS
    if place >= code.co_argcount and not has_rest:
        return False
    name = code.co_varnames[place if place < code.co_argcount else code.co_argcount + code.co_kwonlyargcount]
    # From Python 3.13 on one instruction may load two variables.
    loaded = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD")]
    return name in code.co_cellvars or any(
        name == each or (isinstance(each, tuple) and name in each) for each in loaded
    )
