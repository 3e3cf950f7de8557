"""Hooks of a pipeline that never drains: between two batches weights are of different updates on each rank.

A hook that reads them there is told of, one that changes them is refused. And hooks that see the gradients of an
update run on each rank when it has these, so that ranks cannot meet in them. To change settings of the optimizer
there is refused: an update has those of its own batch, and other batches have been given theirs since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_partition.engine import MadPipeEngine
from deepspeed_partition.engine.runtime.environment import warn_once
from lightning_madpipe.compat.collective_calls import collectives_refused
from lightning_madpipe.compat.optimizers import settings_of
from lightning_madpipe.module import pipeline_of

READ = (
    "{place} reads {what} while the pipeline goes on from batch to batch (weight_versions {mode!r}): "
    "the optimizer's steps of the last batches are not done, and ranks have weights of different steps. Call "
    "self.trainer.strategy.come_to_rest() before, on every rank, or read them in on_validation_start or "
    "on_train_epoch_end"
)
WRITTEN = (
    "{place} changes {what} while the pipeline goes on from batch to batch (weight_versions {mode!r}): "
    "batches in flight have run forward with others, and what is trained would depend on the cut. Call "
    "self.trainer.strategy.come_to_rest() before, on every rank; or change them in a hook that runs with each "
    "step of the optimizer (optimizer.register_step_post_hook); or leave weight_versions out"
)
MEETS = (
    "{place} calls torch.distributed.{name} at {line}, over ranks {ranks}, and with weight_versions {mode!r} each "
    "rank comes to it when it has the gradients of a step, at another time than the others, and would wait for "
    "them, perhaps forever. Call it in on_train_batch_end, or leave weight_versions out"
)
NORM = (
    "{place} clips by the norm of several gradients, which are on several ranks, and with weight_versions "
    "{mode!r} each rank comes to it when it has its own, at another time than the others: use "
    "Trainer(gradient_clip_val=...), or leave weight_versions out"
)

SET = (
    "{place} changes {names} of the optimizer's groups, and with weight_versions {mode!r} it runs on each rank "
    "when that has the gradients of a step, while later batches are under way with the settings that they were "
    "given: ranks would train by different ones. Set it in on_train_batch_start, whose settings the step of that "
    "batch has, or leave weight_versions out"
)


class WeightsInFlight:
    """What hooks may do with weights and other ranks, where a pipeline never drains.

    Args:
        module: The LightningModule.
        engine: Gives the pipeline's engine.
        optimizers: Gives the optimizers of the run, as the user's hooks see them.
        refusal: Makes the error that says a sentence.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Callable[[], MadPipeEngine],
        optimizers: Callable[[], Iterable[Any]],
        refusal: Callable[[str], Exception],
    ) -> None:
        self._module, self._engine, self._refusal = module, engine, refusal
        self._optimizers = optimizers

    def of_hook(
        self, place: str, *, sees_gradients: bool
    ) -> Callable[[bool, list[Tensor], frozenset[str]], None] | None:
        """Return what is to be called where a hook uses tensors; None where it may use all of them.

        It is given whether the first tensor is changed, the tensors, and the names of parameters among them.

        Args:
            place: The hook, in words.
            sees_gradients: Whether it runs with an update, which finds the weights that it is to change.
        """
        engine = self._engine()
        if engine.is_at_rest or (sees_gradients and not engine.updates_wait):
            return None
        weights: set[int] = set()
        states: dict[int, str] = {}

        def used(writes: bool, tensors: list[Tensor], names: frozenset[str]) -> None:
            if engine.is_at_rest:  # the hook has called for it
                return
            if not weights:
                weights.update(set(map(_storage_of, self._module.parameters())) - {0})
                states.update(self._states())
            given = list(map(_storage_of, tensors))
            if names and weights.intersection(given):
                what, is_changed = f"weights ({', '.join(sorted(names)[:3])})", given[0] in weights
            elif states.keys() & given:
                found = sorted({states[each] for each in given if each in states})
                what, is_changed = f"the optimizer's state ({', '.join(found[:3])})", given[0] in states
            else:
                return
            words = {"place": place, "what": what, "mode": engine.weight_versions}
            if writes and is_changed:
                raise self._refusal(WRITTEN.format(**words))
            warn_once(f"in flight/{place}/{what.partition(' (')[0]}", READ.format(**words))

        return used

    def _states(self) -> dict[int, str]:
        """The names of the tensors in optimizers' states, by their storages."""
        return {
            _storage_of(value): str(name)
            for optimizer in self._optimizers()
            for state in getattr(optimizer, "state", {}).values()
            for name, value in (state.items() if isinstance(state, dict) else ())
            if isinstance(value, Tensor) and _storage_of(value)
        }

    def why_no_norm(self, place: str) -> str | None:
        """Why a hook that sees gradients cannot take their norm over all ranks; None where it can."""
        engine = self._engine()
        return None if engine.is_at_rest else NORM.format(place=place, mode=engine.weight_versions)

    @contextmanager
    def with_settings(self, place: str) -> Iterator[None]:
        """Refuse other settings of the optimizer, in what runs with an update.

        Raises:
            Exception: the host's, where a setting is another one at the end.
        """
        if self._engine().is_at_rest:
            yield
            return
        before = settings_of(self._optimizers())
        yield
        now = settings_of(self._optimizers())
        changed = sorted({name for number, name in now if now[number, name] != before.get((number, name))})
        if changed:
            names = ", ".join(map(repr, changed))
            raise self._refusal(SET.format(place=place, names=names, mode=self._engine().weight_versions))

    def without_others(self, place: str) -> AbstractContextManager[None]:
        """Refuse collectives over ranks of other stages, in what runs with an update."""
        engine = self._engine()
        if engine.is_at_rest:
            return nullcontext()

        def refuse(name: str, line: str, ranks: str) -> None:
            mode = engine.weight_versions
            raise self._refusal(MEETS.format(place=place, name=name, line=line, ranks=ranks, mode=mode))

        def peers() -> list[int]:
            pipeline = pipeline_of(self._module)
            assert pipeline is not None, "its engine runs"
            return dist.get_process_group_ranks(pipeline.mpu().get_data_parallel_group())

        return collectives_refused(refuse, peers)


def _storage_of(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # one without a storage
        return 0
